"""Whether all ranks see the same run folder. Nodes that share a file system are one place; nodes that write to disks of
their own are several, each led by its lowest rank, which does there what rank 0 does in its own.

    each node's first rank leaves a file in its folder -> all ranks look which of these files are there -> places

Not a question of names: the path is the same everywhere, and what lies behind it is not known before somebody looks.
"""

from __future__ import annotations

import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fastgrpo.errors import UserError
from fastgrpo.mesh import Mesh

_LOOKS, _PAUSE_S = 10, 0.1  # a network file system may take a moment to show a new file


@dataclass(frozen=True, slots=True)
class Places:
    leaders: tuple[int, ...]  # by rank: the lowest rank that sees the same folder

    @property
    def several(self) -> bool:
        return any(self.leaders)

    @property
    def others(self) -> list[int]:
        """The leaders besides rank 0."""
        return sorted(set(self.leaders) - {0})

    def leads(self, rank: int) -> bool:
        return self.leaders[rank] == rank

    def number(self, rank: int) -> int:
        """Of the place that `rank` is in, from 0."""
        return sorted(set(self.leaders)).index(self.leaders[rank])


def find_places(folder: Path, mesh: Mesh) -> Places:
    """A collective. `folder`: of the run, which rank 0 has. Raises UserError where a node cannot write."""
    firsts = [rank for rank, local_rank in enumerate(mesh.gather(mesh.local_rank)) if local_rank == 0]
    if len(firsts) <= 1:
        return Places((0,) * mesh.world)
    # Where a node has disks of its own there may be no such folder, and there need be none unless something is saved.
    where = folder if folder.is_dir() else folder.parent
    names = {rank: f".place-{token}-{rank}" for token in [mesh.broadcast(uuid.uuid4().hex)] for rank in firsts}
    error: str | None = None
    try:
        if mesh.rank in names:
            where.mkdir(parents=True, exist_ok=True, mode=0o700)
            (where / names[mesh.rank]).touch()
    except OSError as failure:
        error = f"rank {mesh.rank}: {failure}"
    if errors := [text for text in mesh.gather(error) if text]:
        raise UserError(f"trainer.run_dir: {'; '.join(errors)}; set it to a folder that every node can write into")
    leaders = mesh.gather(_lowest_seen(where, names, mesh.rank))  # all have looked when it returns
    if mesh.rank in names:
        with suppress(OSError):
            (where / names[mesh.rank]).unlink()
    return Places(tuple(leaders))


def _lowest_seen(where: Path, names: dict[int, str], own: int) -> int:
    seen: list[int] = []
    for _ in range(_LOOKS):
        seen = [rank for rank, name in names.items() if (where / name).exists()]
        if len(seen) == len(names):
            break
        time.sleep(_PAUSE_S)
    return min(seen, default=own)
