"""A thread on each rank that ends the process when the run cannot go on, also inside a collective.

    this rank raises            -->  key `aborted` (the first rank that writes it speaks; the error goes on from there)
    a stage outlasts its limit  -->  the same, and the stacks of all threads
    a save outlasts trainer.shutdown_timeout_s after a signal  -->  the same
    a neighbour's `beat/<rank>` stands still (after a signal: for 10 s)  -->  the same (beats.py)
    a collective breaks because a rank is lost  -->  the same: that rank is the message, not the error that follows
    `aborted`, of another rank  -->  one line, os._exit: the main thread may hang in a collective that nobody will join

                 rank 0 ...... collective ...... (hangs)            rank 1 ...... raises
                 thread: aborted? -- aborted? -- yes: exit 70       sets `aborted`, prints its traceback, exit 1

A signal is not enough: torchrun sends the survivors of a dead rank the SIGTERM that a scheduler sends (stopping.py).
Ranks end within POLL_S + GRACE_S of the word. Nothing is saved here, and nothing can be once a rank is missing.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from operator import attrgetter
from pathlib import Path
from textwrap import shorten

from fastgrpo import whereabouts
from fastgrpo.beats import ABORTED, LOST_S, Beats, broke_in_a_collective, named, store_holder
from fastgrpo.config import BEAT_S, LimitsConfig
from fastgrpo.errors import Told
from fastgrpo.mesh import Mesh, Store, open_store
from fastgrpo.redact import redact
from fastgrpo.stopping import Stopped, Stopper

ENDED = 70  # exit status (EX_SOFTWARE) of a rank that was ended here
POLL_S = BEAT_S  # between two looks
GRACE_S = 3.0  # for the rank that failed to print its traceback, before torchrun sees the others end
WAITING_S = 3.0  # longer for a rank that waits for the others: the one they wait for shall be the one reported
ASKED_SILENCE_S = 10.0  # of a neighbour, after a signal: torchrun kills what is left 30 s after a rank has died
_LONGEST_S = 60.0  # for the thread to end this process; a store that answers nobody may hold it
KILLED = (
    "It was killed, has crashed or hangs: its last words, if any, are above (exit code -9: killed, by the kernel for "
    "want of memory, or by the launcher because it did not end)"
)
_SHORT = 120  # characters of an error that other ranks repeat
FAULTS = "faults"  # folder in the run folder: stacks and dumps, for a bug report

# Stage as the clock names it -> option that limits it.
LIMITS = {
    "sync": "sync",
    "gen": "gen",
    "reward": "reward",
    "gate": "score",
    "terms": "score",
    "old": "score",
    "ref": "score",
    "update": "update",
    "validate": "validate",
    "save": "save",
}


class Watchdog:
    """`folder`: the run folder, once there is one. `way_on`: the option that goes on with it, found beforehand, since
    nothing may keep a process from its end. `failed_in`: the innermost stage that an error came out of."""

    def __init__(self, mesh: Mesh, limits: LimitsConfig, stopper: Stopper) -> None:
        self.folder: Path | None = None
        self.way_on = "trainer.resume=auto"
        self.failed_in: str | None = None
        self._mesh = mesh
        self._stopper = stopper
        self._limits = {stage: attrgetter(option)(limits) for stage, option in LIMITS.items()}
        self._heartbeat_s = limits.heartbeat
        self._stages: list[tuple[str, float]] = []  # the innermost last, with its start
        self._store: Store | None = None  # the main thread's; the watching thread has its own
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._beats = Beats(mesh.rank, mesh.world)

    @property
    def _ahead(self) -> str:
        return f"nothing more is saved, and {self.way_on} goes on from the last checkpoint"

    @property
    def faults(self) -> Path | None:
        """Where files for a bug report go."""
        return None if self.folder is None else self.folder / FAULTS

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """What happens inside is `name`, and has its limit."""
        self._stages.append((name, time.monotonic()))
        try:
            yield
        except BaseException:
            self.failed_in = self.failed_in or name
            raise
        finally:
            self._stages.pop()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch while the block runs. An error of this rank ends the others; one that another rank's caused does not
        leave the block, because that rank's is the one to read."""
        theirs: Store | None = None
        if self._mesh.world > 1:
            self._store, theirs = open_store("stop"), open_store("stop")
            self._beats.introduce(self._store)
        self._over.clear()
        self._thread = threading.Thread(target=self._watch, args=(theirs,), name="watchdog", daemon=True)
        self._thread.start()
        try:
            yield
            self._leave()
        except Stopped:
            self._leave()
            raise
        except BaseException as error:
            self._fail(error)
            raise

    def _leave(self) -> None:
        """All ranks leave together: the store ends with rank 0."""
        self._over.set()
        assert self._thread is not None
        self._thread.join()
        if self._store is not None:
            self._beats.leave(self._store)
            deadline = time.monotonic() + GRACE_S
            while self._mesh.is_main and not self._beats.all_left(self._store) and time.monotonic() < deadline:
                time.sleep(0.01)

    def _fail(self, error: BaseException) -> None:
        """Returns on the rank whose error it is to be; on another the thread ends this process."""
        assert self._thread is not None
        first = self._store is None
        if self._store is not None:
            with suppress(Exception):  # the store has gone with a rank that failed before
                if broke_in_a_collective(error) and (lost := self._beats.lost(self._store)):
                    self._end_for_lost(self._store, lost, error)
                what = shorten(f"{type(error).__name__}: {str(error).split(chr(10))[0]}", _SHORT, placeholder=" ...")
                first = self._claim(self._store, f"rank {self._mesh.rank} has failed: {what}")
            if not first:
                self._thread.join(_LONGEST_S)
            time.sleep(2 * POLL_S)  # the others must have read it, should the store end with this rank
        if isinstance(error, Told):
            error.speaks_alone = True
        self._over.set()

    # the thread ------------------------------------------------------------------------------------------------------

    def _watch(self, store: Store | None) -> None:
        while not self._over.wait(POLL_S):
            try:
                self._look(store)
            except Exception as error:
                if not self._over.wait(GRACE_S):  # or is it that all ranks leave?
                    why = str(error).split("\n")[0]
                    self._end(f"{store_holder()} is lost, and the job's key-value store with it ({why}); {self._ahead}")

    def _look(self, store: Store | None) -> None:
        self._end_for(store, *self._overdue())
        if store is None:
            return
        self._beats.give(store)
        if silent := self._silent_neighbour(store):
            self._end_for(store, silent, f"{silent}. {KILLED}", show=self.faults is None)
        if store.check([ABORTED]):
            why = self._reason(store)
            self._write_stacks(why, show=False)
            if not self._over.wait(GRACE_S):
                self._end(f"ended, because {why}")

    def _end_for(
        self, store: Store | None, why: str | None, at_length: str | None = None, *, show: bool = True
    ) -> None:
        """End the run for `why`, unless another rank was first. `at_length`: what this rank alone says of it; `show`:
        the stacks of this rank, too."""
        if why and self._claim(store, why):
            self._write_stacks(at_length or why, show=show)
            if store is not None:
                time.sleep(2 * POLL_S)  # the others must have read it, should the store end with this rank
            self._end(f"{at_length or why}; the run ends")

    def _end_for_lost(self, store: Store, lost: list[int], error: BaseException) -> None:
        """End the run for what `error` follows from, unless another rank was first. In the main thread."""
        who, text = named(store, lost), "".join(traceback.format_exception(error))
        why = f"{who} {'is' if len(lost) == 1 else 'are'} lost"
        if not self._claim(store, why):
            return
        if (faults := self.faults) is not None:
            name = f"traceback_rank{self._mesh.rank}.txt"
            _briefly(lambda: _write(faults, name, f"{why}; what follows on rank {self._mesh.rank}:\n\n{text}"))
        else:
            os.write(2, text.encode())
        time.sleep(2 * POLL_S)  # the others must have read it
        at = f" in stage {self.failed_in}" if self.failed_in else ""
        self._end(
            f"{why}: no sign of life for {LOST_S:g} s, and a collective with it broke{at}. {KILLED}; {self._ahead}"
        )

    def _overdue(self) -> tuple[str | None, str | None]:
        """Which stage outlasts its limit: in short, and with where in it this rank is."""
        for stage, begun in tuple(self._stages):
            limit, option, seconds = self._limits[stage], f"limits_s.{LIMITS[stage]}", time.monotonic() - begun
            asked_at = self._stopper.asked_at
            if stage == "save" and asked_at is not None and time.monotonic() - asked_at > self._stopper.timeout_s:
                limit = min(self._stopper.timeout_s, limit or self._stopper.timeout_s)
                option = "shutdown_timeout_s" if limit == self._stopper.timeout_s else option
            if limit is None or seconds <= limit:
                continue
            frames = whereabouts.main_frames()
            if self._mesh.world > 1 and seconds <= limit + WAITING_S and whereabouts.waits_for_others(frames):
                continue
            place = whereabouts.describe(frames)
            what = f"rank {self._mesh.rank} has been in stage {stage} for {_digits(seconds)} s"
            limited = f"; trainer.{option}={limit:g}"
            return f"{what}{limited}", f"{what}{f' ({place})' if place else ''}{limited}"
        return None, None

    def _silent_neighbour(self, store: Store) -> str | None:
        silent_s, limit = self._beats.neighbour_silent_s(store), self._heartbeat_s
        asked = self._stopper.asked_at is not None and silent_s > ASKED_SILENCE_S
        if not (asked or (limit is not None and silent_s > limit)):
            return None
        option = "" if asked or limit is None else f" (trainer.limits_s.heartbeat={limit:g})"
        return f"{named(store, [self._beats.neighbour])} has not been heard of for {silent_s:.0f} s{option}"

    def _claim(self, store: Store | None, why: str) -> bool:
        """Whether this rank is the first to fail, for `why`, which names a rank; a run of one rank always is."""
        if store is None:
            return True
        own = str(self._mesh.rank)
        store.set(f"why/{own}", redact(why))
        return store.compare_set(ABORTED, "", own).decode() == own

    def _reason(self, store: Store) -> str:
        culprit = store.get(ABORTED).decode()
        key = f"why/{culprit}"
        return store.get(key).decode() if store.check([key]) else f"rank {culprit} has failed: see its message"

    def _write_stacks(self, why: str, *, show: bool) -> None:
        stacks = whereabouts.stacks()
        text = f"{why}\n\n{stacks}"
        if show:  # why: in this rank's last line
            os.write(2, f"fastgrpo: stacks of rank {self._mesh.rank}\n\n{stacks}\n".encode())
        if (faults := self.faults) is not None:
            _briefly(lambda: _write(faults, f"stacks_rank{self._mesh.rank}.txt", text))

    def _end(self, why: str) -> None:
        """Standard streams first, but not for long: the main thread may hold their locks."""
        _briefly(lambda: (sys.stdout.flush(), sys.stderr.flush()))
        os.write(2, f"fastgrpo: rank {self._mesh.rank}: {why}\n".encode())
        os._exit(ENDED)


def _digits(seconds: float) -> str:
    """Two digits at least: 0.52, 4.1, 2000."""
    return f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.2g}"


def _write(folder: Path, name: str, text: str) -> None:
    with suppress(OSError):  # a full disk must not keep the process alive
        folder.mkdir(exist_ok=True, mode=0o700)
        (folder / name).write_text(text)


def _briefly(action: Callable[[], object]) -> None:
    """What may hang (a stalled disk, a lock that is held) must not keep the process alive either."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(1.0)
