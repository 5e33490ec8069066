"""A checkpoint back into the run: tensors, the states of its parts, this rank's random generators.

Every rank reads the rows that it holds now, so the ranks may be others than those that saved.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from fastgrpo.checkpoint.folders import Manifest
from fastgrpo.checkpoint.random_state import set_random_state
from fastgrpo.checkpoint.tensors import restore_tensors
from fastgrpo.mesh import Mesh
from fastgrpo.policy.model import Policy

log = logging.getLogger("fastgrpo")


class Stateful(Protocol):
    """The same on every rank; values that JSON holds exactly (a float comes back bit for bit)."""

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: Mapping[str, Any]) -> None: ...


def restore(
    folder: Path,
    manifest: Manifest,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    parts: Mapping[str, Stateful],
    mesh: Mesh,
) -> None:
    """A collective, so that a rank that cannot read ends all. Raises OSError."""
    error: str | None = None
    try:
        restore_tensors(folder / "state", policy.module, optimizer)
        if manifest.world == mesh.world:
            set_random_state(json.loads((folder / "ranks" / f"{mesh.rank:05d}.json").read_text()))
    except Exception as failure:
        log.exception("rank %d cannot read %s", mesh.rank, folder)
        error = f"rank {mesh.rank}: {type(failure).__name__}: {failure}"
    if errors := [text for text in mesh.gather(error) if text]:
        raise OSError(f"{folder} cannot be read ({'; '.join(errors)})")
    for name, part in parts.items():
        if name in manifest.parts:  # a part that is newer than the checkpoint starts as it is
            part.load_state(manifest.parts[name])
