"""A checkpoint back into the run: tensors, the states of its parts, this rank's random generators.

Every rank reads the rows that it holds now, so the ranks may be others than those that saved. Where nodes have disks of
their own, a rank reads from its node's: the rows that it holds now must be there, so nodes, ranks and sharding are
those that saved, or somebody copies the files together.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from fastgrpo.checkpoint.checksum import check_files
from fastgrpo.checkpoint.folders import Manifest, find_checkpoints, read_manifest, step_of
from fastgrpo.checkpoint.random_state import set_random_state
from fastgrpo.checkpoint.tensors import ElsewhereError, restore_tensors
from fastgrpo.errors import UserError
from fastgrpo.mesh import Mesh
from fastgrpo.policy.model import Policy

log = logging.getLogger("fastgrpo")

_OWN_DISKS = (
    " It was saved on each node's own disk, so it is read by the same ranks on the same nodes, sharded the same. For "
    "others, copy state/*.distcp* and ranks/* of every node together, into rank 0's folder and, unless all see that, "
    "into each node's."
)
_WITHOUT = "Or do without a checkpoint: trainer.resume=never"


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
    error, elsewhere = _damage(folder, manifest, mesh), False
    try:
        if error is None:
            restore_tensors(folder / "state", policy.module, optimizer)
        if error is None and manifest.world == mesh.world:
            set_random_state(json.loads((folder / "ranks" / f"{mesh.rank:05d}.json").read_text()))
    except torch.OutOfMemoryError:  # of the GPU, whose lack is explained elsewhere
        raise
    except Exception as failure:
        log.debug("rank %d cannot read %s", mesh.rank, folder, exc_info=True)
        error = _in_words(failure, mesh)
        elsewhere = isinstance(failure, ElsewhereError)
    if errors := [text for text in mesh.gather(error) if text]:
        but = ", though no file is missing" if manifest.nodes == 1 else ""
        why = f"{folder} cannot be read{but}: {'; '.join(errors)}.{_OWN_DISKS if manifest.nodes > 1 else ''}"
        if any(mesh.gather(elsewhere)):  # so are those of an older checkpoint
            raise UserError(f"{why} {_WITHOUT}")
        raise UserError(f"{why} {_way_out(folder, mesh)}")
    for name, part in parts.items():
        if name in manifest.parts:  # a part that is newer than the checkpoint starts as it is
            part.load_state(manifest.parts[name])


def _damage(folder: Path, manifest: Manifest, mesh: Mesh) -> str | None:
    """What this rank finds wrong with its share of the files. A collective; `manifest` is rank 0's."""
    node, error = manifest.node, None
    if manifest.nodes > 1:
        node, error = _node_here(folder, manifest.save)
    nodes = mesh.gather(node)
    peers = [rank for rank, other in enumerate(nodes) if other == node]
    try:
        if error is not None:
            raise ValueError(error)
        check_files(folder, peers.index(mesh.rank), len(peers))
    except Exception as failure:
        log.debug("rank %d cannot read %s", mesh.rank, folder, exc_info=True)
        return _in_words(failure, mesh)
    return None


def _node_here(folder: Path, save: str) -> tuple[int, str | None]:
    """Which node's part of the checkpoint lies here, and what is wrong with it."""
    try:
        manifest = read_manifest(folder)
    except (OSError, ValueError) as error:
        return -1, f"on this node it is not complete: {error}"
    return manifest.node, None if manifest.save == save else "on this node it is of another save than rank 0's"


def _in_words(failure: Exception, mesh: Mesh) -> str:
    return f"rank {mesh.rank}: {type(failure).__name__}: {str(failure).partition(chr(10))[0]}"


def _way_out(folder: Path, mesh: Mesh) -> str:
    """A collective: what is offered is read before, by all ranks, as at a start."""
    step = step_of(folder) or 0
    found = find_checkpoints(folder.parent).complete if mesh.is_main else []
    older = mesh.broadcast([(path, manifest) for path, manifest in found if manifest.step < step])
    damaged: list[str] = []
    for path, manifest in older:
        if not any(mesh.gather(_damage(path, manifest, mesh))):
            also = f" ({', '.join(damaged)} cannot be read either)" if damaged else ""
            return f"The complete one before it: trainer.resume={path}{also}. Or copy it anew if it was copied"
        damaged.append(path.name)
    none = f"No older one can be read ({', '.join(damaged)})" if damaged else "There is no older one"
    return f"{none}; copy it anew if it was copied. {_WITHOUT}"
