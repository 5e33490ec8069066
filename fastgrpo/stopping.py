"""Being told to stop: a signal sets a flag, ranks agree on it between two phases, the run saves and ends.

    SIGTERM, SIGUSR1, Ctrl-C  ->  flag of this rank  ->  key `asked` in the store
    check(), between phases:      rank 0 reads `asked` and writes `turn/<number>`: go on or stop; the others wait for it
    await_everybody():            every rank sets `here/<rank>`, all wait for all: only then is a collective safe
    key `aborted`:                the rank that failed first (watchdog.py sets it, and ends the others)

torchrun sends the survivors of a dead rank the SIGTERM that a scheduler sends. A collective save would hang then, so
nothing is saved unless every rank says that it is here. Not here: ending a process that hangs inside a collective
(watchdog.py).

Ctrl-C a second time ends at once. A terminal's Ctrl-C may reach a worker twice, directly and through torchrun, so
within half a second it counts once: longer than the way through torchrun, shorter than a second thought. Where workers
have sessions of their own they hear of torchrun alone, which passes the first press on as SIGINT and the second as
SIGTERM: after a Ctrl-C that ends at once as well.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from fastgrpo.errors import RunError, UserError
from fastgrpo.mesh import Mesh, Store, open_store

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
SAVED = 75  # exit status after SIGTERM or SIGUSR1 (EX_TEMPFAIL: try again later)
NOT_SAVED = 74  # after any of them, when the save failed (EX_IOERR)
INTERRUPTED = 130  # after Ctrl-C
MISTAKEN = 2  # after a mistake of the user that showed in the middle of a run
AGAIN = (signal.SIGINT, signal.SIGTERM)  # what a second Ctrl-C arrives as
ONE_PRESS_S = 0.5  # two SIGINTs within it are one Ctrl-C: torchrun passes its own on within milliseconds
GO_ON = "-"
_KEPT_TURNS = 64  # keys of more turns ago than a step has are deleted


class Stopped(Exception):
    """Raised on every rank alike, between two phases. Whoever fails to save then makes the `exit_code` NOT_SAVED."""

    def __init__(self, reason: str, exit_code: int) -> None:
        super().__init__(reason)
        self.exit_code = exit_code

    @property
    def by(self) -> str:
        """What stopped the run, in a few words."""
        return str(self)


class Mistaken(Stopped, UserError):
    """A mistake of the user that one rank or several met, and all heard of, before they changed any weight."""

    def __init__(self, mistake: UserError) -> None:
        super().__init__(str(mistake), MISTAKEN)
        self.mistake = mistake

    @property
    def by(self) -> str:
        return "the mistake above"


class Stopper:
    """`asked_at`: when this rank heard that the run is to stop, by time.monotonic(); None before."""

    def __init__(self, mesh: Mesh, shutdown_timeout_s: float) -> None:
        self.asked_at: float | None = None
        self.timeout_s = shutdown_timeout_s
        self._mesh = mesh
        self._signum: int | None = None
        self._first_interrupt_s: float | None = None
        self._store: Store | None = None
        self._listening = False
        self._turn = 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Catch the signals inside the block; in the main thread only, as Python demands."""
        self._store = open_store("stop") if self._mesh.world > 1 else None
        before = {signum: signal.signal(signum, self._note) for signum in SIGNALS}
        self._listening = True
        try:
            yield
        finally:
            self._listening = False
            for signum, handler in before.items():
                signal.signal(signum, handler)

    def check(self) -> None:
        """Where a step may be left; every rank calls it. Raises Stopped on all ranks once one of them was signalled.
        Outside `listening` nothing happens."""
        if not self._listening:
            return
        signum = self._signum if self._store is None else self._agree(self._store)
        if signum is not None:
            self.asked_at = self.asked_at or time.monotonic()
            raise Stopped(signal.Signals(signum).name, INTERRUPTED if signum == signal.SIGINT else SAVED)

    def await_everybody(self, otherwise: str) -> None:
        """Until all ranks are here: a collective is safe then. Raises RunError, beginning with `otherwise`, when they
        do not arrive within the shutdown time, or one has failed."""
        if self._store is None:
            return
        self._store.set(f"here/{self._mesh.rank}", "")
        keys = [f"here/{rank}" for rank in range(self._mesh.world)]
        deadline = time.monotonic() + self.timeout_s
        while time.monotonic() < deadline and not self._store.check(["aborted"]):
            if _wait(self._store, keys):
                return
        if self._store.check(["aborted"]):
            raise RunError(f"{otherwise}, because rank {self._store.get('aborted').decode()} has failed")
        if absent := [str(rank) for rank, key in enumerate(keys) if not self._store.check([key])]:
            ranks = ", ".join(absent)
            raise RunError(f"{otherwise}, because rank {ranks} did not answer within {self.timeout_s:g} s")

    def _agree(self, store: Store) -> int | None:
        """Rank 0's decision of this turn. Raises RuntimeError when a rank has failed meanwhile."""
        self._turn += 1
        if self._signum is not None:
            store.set("asked", str(self._signum))
        key = f"turn/{self._turn}"
        if self._mesh.is_main:
            store.set(key, store.get("asked").decode() if store.check(["asked"]) else GO_ON)
            store.delete_key(f"turn/{self._turn - _KEPT_TURNS}")
        while not _wait(store, [key]):
            if store.check(["aborted"]):
                raise RuntimeError(f"rank {store.get('aborted').decode()} has failed; its message says why")
        answer = store.get(key).decode()
        return None if answer == GO_ON else int(answer)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first_interrupt_s is None:
            if signum == signal.SIGINT:
                self._first_interrupt_s = now
                if self._mesh.is_main:  # not print: the signal may have come in the middle of one
                    os.write(2, b"\ninterrupted: saving at the end of this phase; Ctrl-C again ends at once\n")
        elif signum in AGAIN and now - self._first_interrupt_s > ONE_PRESS_S:
            os._exit(INTERRUPTED)  # no clean-up: it may be the clean-up that hangs
        if self._signum is None:
            self._signum = signum
            self.asked_at = now


def _wait(store: Store, keys: list[str], limit_s: float = 1.0) -> bool:
    """Whether all keys are there within the limit. Asks again and again: the store's own `wait` holds signals back and
    writes two lines to the console for each time that it gives up."""
    deadline, pause_s = time.monotonic() + limit_s, 0.001
    while not store.check(keys):
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)
    return True
