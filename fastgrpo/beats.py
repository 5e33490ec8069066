"""The signs of life that ranks give through the store, and which ranks are lost: who gives none any more.

    every rank, from the watchdog's thread    -->  key `beat/<rank>` at each look; `who/<rank>` once, before
    at each look, each rank of the next one   <--  its beat stands still: for how long?
    a collective broke on this rank           <--  whose beat stands still for LOST_S? Those ranks are lost
                                                   all beats move: nobody is lost, the error is this rank's own

The error of a broken collective ("connection reset by peer") names no rank and only follows from the loss of one, so it
is not what a user should read; and what libraries write in it differs, so the beats decide and not its words.

Not here: what is done about it (watchdog.py).
"""

from __future__ import annotations

import os
import socket
import time
import traceback
from collections.abc import Iterable

import torch.distributed as dist

from fastgrpo.config import BEAT_S
from fastgrpo.mesh import Store

LOST_S = 8 * BEAT_S  # without a sign, where a collective has broken
_LOOK_S = BEAT_S / 2
ABORTED = "aborted"  # key: the rank that failed first


class Beats:
    """Of rank `rank` among `world`; for the thread that watches, but for `lost`, which any may call."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world
        self._given = 0
        self._heard = ("", 0.0)  # the neighbour's last beat, and when it came
        self.neighbour = (rank + 1) % world  # each listens to the next: the work does not grow with the ranks

    def introduce(self, store: Store) -> None:
        store.set(f"who/{self._rank}", f"process {os.getpid()} on {socket.gethostname()}")

    def give(self, store: Store) -> None:
        self._given += 1
        store.set(f"beat/{self._rank}", str(self._given))

    def leave(self, store: Store) -> None:
        """No more beats, and nothing is amiss."""
        store.set(f"left/{self._rank}", "")

    def all_left(self, store: Store) -> bool:
        return store.check([f"left/{rank}" for rank in range(self._world)])

    def neighbour_silent_s(self, store: Store) -> float:
        """How long the neighbour's beat has stood still; 0 of one that has left."""
        beat, now = _beat(store, self.neighbour), time.monotonic()
        if beat != self._heard[0] or not self._heard[1]:
            self._heard = beat, now
        return 0.0 if _has_left(store, self.neighbour) else now - self._heard[1]

    def lost(self, store: Store) -> list[int]:
        """The other ranks that give no sign for LOST_S; none as soon as all have given one, or one has failed by
        itself."""
        silent = {rank: _beat(store, rank) for rank in range(self._world) if rank != self._rank}
        deadline = time.monotonic() + LOST_S
        while silent and time.monotonic() < deadline:
            if store.check([ABORTED]):
                return []
            time.sleep(_LOOK_S)
            silent = {r: b for r, b in silent.items() if _beat(store, r) == b and not _has_left(store, r)}
        return sorted(silent)


def named(store: Store, ranks: Iterable[int]) -> str:
    """ "rank 1 (process 4711 on node3)", the latter as far as it is known."""
    words = []
    for rank in ranks:
        key = f"who/{rank}"
        words.append(f"rank {rank} ({store.get(key).decode()})" if store.check([key]) else f"rank {rank}")
    return " and ".join(words)


def broke_in_a_collective(error: BaseException) -> bool:
    """Whether it came out of torch.distributed: it may follow from the loss of another rank."""
    modules = (str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__))
    return isinstance(error, dist.DistError) or any(name.startswith("torch.distributed.") for name in modules)


def store_holder() -> str:
    """Whose end takes the store along: torchrun's on the first node, or rank 0's."""
    held_by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return f"torchrun on {os.environ.get('MASTER_ADDR')}" if held_by_torchrun else "rank 0"


def _beat(store: Store, rank: int) -> str:
    key = f"beat/{rank}"
    return store.get(key).decode() if store.check([key]) else ""


def _has_left(store: Store, rank: int) -> bool:
    return store.check([f"left/{rank}"])
