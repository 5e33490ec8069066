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

from fastgrpo.checkpoint.checksum import check_shards
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
        check_shards(folder / "state", mesh.rank, mesh.world)
        restore_tensors(folder / "state", policy.module, optimizer)
        if manifest.world == mesh.world:
            set_random_state(json.loads((folder / "ranks" / f"{mesh.rank:05d}.json").read_text()))
    except torch.OutOfMemoryError:  # of the GPU, whose lack is explained elsewhere
        raise
    except Exception as failure:
        log.debug("rank %d cannot read %s", mesh.rank, folder, exc_info=True)
        error = f"rank {mesh.rank}: {type(failure).__name__}: {str(failure).partition(chr(10))[0]}"
    if errors := [text for text in mesh.gather(error) if text]:
        raise UserError(f"{folder} cannot be read, though no file is missing: {'; '.join(errors)}. {_way_out(folder)}")
    for name, part in parts.items():
        if name in manifest.parts:  # a part that is newer than the checkpoint starts as it is
            part.load_state(manifest.parts[name])


def _way_out(folder: Path) -> str:
    step = step_of(folder) or 0
    older = next((path for path, manifest in find_checkpoints(folder.parent).complete if manifest.step < step), None)
    if older is None:
        return "There is no older one; copy it anew if it was copied, or start a new run with trainer.resume=never"
    return f"Go on from the complete one before it with trainer.resume={older}, or copy it anew if it was copied"
