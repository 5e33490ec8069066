"""trainer.deterministic, as torch understands it: what may warn, and what has to obey.

    be_deterministic    for the whole process, the engine in it included: deterministic forms where there are any,
                        and a warning where not, because the engine has operations without one that change nothing
    strictly            around the trainer's own passes: an operation without a deterministic form is an error

A warning is not enough for the passes. The backward of torch's attention (flash and memory-efficient) adds up the
gradient of the queries in an order that differs from run to run, unless it is forbidden to warn.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def be_deterministic() -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue] - for bugs


@contextmanager
def strictly(on: bool) -> Iterator[None]:
    """With `on`, torch's operations inside are deterministic or raise RuntimeError; afterwards they may warn again.
    Backward passes have to run inside, too: they look at the setting when they run."""
    if not on:
        yield
        return
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    was_on = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=warn_only)
