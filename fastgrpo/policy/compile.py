"""torch.compile of the decoder's blocks: one set of graphs for packs of every length, and for every pass.

    hooks of FSDP | norm, q, k, v, rotary | attention | output projection | residual, norm, MLP | hooks of FSDP
       eager            compiled             eager         compiled              compiled           eager

A block is compiled in place (`Module.compile`), so names stay. Recomputing wraps the compiled block, and FSDP's hooks
run around it; hence the order in model.py: exchange modules, checkpoint, compile, shard. Attention (attention.py) stays
out: its backends are kernels already, SDPA's buckets change with every pack, and compiled all-to-alls could be
reordered against FSDP's collectives. So does an MLP in slices (mlp_slices.py), whose inside is compiled instead.
Modules of liger are not put in: the compiler fuses the plain ones.

Every size is dynamic from the start. Letting the compiler find out would leave a graph for the first length and one for
all, with other rounding: which of them serves a pack would depend on what came before it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from fastgrpo.errors import UserError
from fastgrpo.policy.mlp_slices import SlicedMLP

INDUCTOR = "inductor"


def compile_blocks(blocks: Sequence[nn.Module], backend: str) -> None:
    """Compile each block at its first forward, in place. `backend`: a name that torch.compile knows."""
    for block in blocks:
        for module in block.modules():
            if isinstance(module, SlicedMLP):
                module.whole.compile(backend=backend, dynamic=True)
        block.compile(backend=backend, dynamic=True)


def require_compiler(device_type: str) -> None:
    """Raises UserError where torch.compile would find no compiler. Asked at the start, not in the first step."""
    names = [os.environ.get("CXX", "g++")] if device_type == "cpu" else [os.environ.get("CC", ""), "gcc", "clang"]
    if not any(shutil.which(name) for name in names if name):
        missing = " or ".join(filter(None, names))
        raise UserError(
            f"actor.use_torch_compile=true needs a compiler on {device_type}, and there is no {missing} in "
            "PATH; install one, name it in CXX (C++, on a CPU) or CC (C), or set actor.use_torch_compile=false"
        )


@contextmanager
def training_graphs(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, compiled blocks run the graphs of a training pass and keep nothing for a backward.

    Without gradients the compiler makes graphs of its own, which round at other places: in bfloat16 the hidden states
    of a small model differ by up to 0.06, and the ratio of an update to its old pass would not be 1.
    """
    block: Any  # transformers.modeling_layers.GradientCheckpointingLayer
    recomputed = [block for block in blocks if getattr(block, "gradient_checkpointing", False)]
    for block in recomputed:  # what it keeps is not dropped by the hook below
        block.gradient_checkpointing = False
    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_drop, _never):
            yield
    finally:
        for block in recomputed:
            block.gradient_checkpointing = True


def _drop(saved: Tensor) -> None:
    return None


def _never(packed: None) -> NoReturn:
    raise AssertionError("backward of a pass that only scores")
