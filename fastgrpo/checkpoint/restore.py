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

from fastgrpo.checkpoint.checksum import check_files
from fastgrpo.checkpoint.folders import Manifest, find_checkpoints, step_of
from fastgrpo.checkpoint.random_state import set_random_state
from fastgrpo.checkpoint.tensors import restore_tensors
from fastgrpo.errors import UserError
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
    """A collective, so that a rank that cannot read ends all. Raises UserError, which names an older checkpoint."""
    error: str | None = None
    try:
        check_files(folder, mesh.rank, mesh.world)
        restore_tensors(folder / "state", policy.module, optimizer)
        if manifest.world == mesh.world:
            set_random_state(json.loads((folder / "ranks" / f"{mesh.rank:05d}.json").read_text()))
    except torch.OutOfMemoryError:  # of the GPU, whose lack is explained elsewhere
        raise
    except Exception as failure:
        log.debug("rank %d cannot read %s", mesh.rank, folder, exc_info=True)
        error = _in_words(failure, mesh)
    if errors := [text for text in mesh.gather(error) if text]:
        why = f"{folder} cannot be read, though no file is missing: {'; '.join(errors)}."
        raise UserError(f"{why} {_way_out(folder, mesh)}")
    for name, part in parts.items():
        if name in manifest.parts:  # a part that is newer than the checkpoint starts as it is
            part.load_state(manifest.parts[name])


def _in_words(failure: Exception, mesh: Mesh) -> str:
    return f"rank {mesh.rank}: {type(failure).__name__}: {str(failure).partition(chr(10))[0]}"


def _way_out(folder: Path, mesh: Mesh) -> str:
    """A collective: what is offered is read before, by all ranks, as at a start."""
    step = step_of(folder) or 0
    found = find_checkpoints(folder.parent).complete if mesh.is_main else []
    older = mesh.broadcast([path for path, manifest in found if manifest.step < step])
    damaged: list[str] = []
    for path in older:
        if not _is_damaged(path, mesh):
            also = f" ({', '.join(damaged)} cannot be read either)" if damaged else ""
            before = f"the complete one before it with trainer.resume={path}{also}"
            return f"Go on from {before}, or copy it anew if it was copied"
        damaged.append(path.name)
    none = f"No older one can be read ({', '.join(damaged)})" if damaged else "There is no older one"
    return f"{none}; copy it anew if it was copied, or start a new run with trainer.resume=never"


def _is_damaged(folder: Path, mesh: Mesh) -> bool:
    error: str | None = None
    try:
        check_files(folder, mesh.rank, mesh.world)
    except (OSError, ValueError) as failure:
        error = _in_words(failure, mesh)
    return any(mesh.gather(error))
