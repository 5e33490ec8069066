"""Room for a checkpoint, looked at before it is written: on rank 0's disk, and where nodes have their own, on each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.checkpoint.planner import SavePlan

from fastgrpo.checkpoint.disk import free_bytes, remove_tree
from fastgrpo.checkpoint.places import Places

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Share:
    """What a rank brings to the common plan."""

    plan: SavePlan | None
    size: int  # bytes
    free: int | None  # bytes on its disk, of a leader of another place
    error: str | None


def make_anew(part: Path) -> int:
    """An empty folder; the bytes free in it."""
    remove_tree(part)
    part.mkdir(parents=True, mode=0o700)
    return free_bytes(part)


def check_room(part: Path, shares: Sequence[Share], places: Places, free: int, model: int) -> None:
    """`free`: bytes on rank 0's disk, where `model` bytes are written besides the state. Raises OSError."""
    for leader in (0, *places.others):
        there = free if leader == 0 else shares[leader].free or 0
        state = sum(share.size for share, place in zip(shares, places.leaders, strict=True) if place == leader)
        needed = state + (model if leader == 0 else 0)
        if there < needed:
            where = f", on the node of rank {leader}" if places.several else ""
            raise OSError(
                f"a checkpoint takes {needed / _GIB:.3g} GiB and {there / _GIB:.3g} GiB are free in "
                f"{part.parent}{where}; free some (all but the newest complete checkpoint may be deleted by hand), or "
                f"go on elsewhere: trainer.run_dir=DIR trainer.resume={part.parent}/step_N"
            )
