"""The trainer's end of the worker processes: start one, give it samples, read answers, end it. No scheduling.

    Nursery         the process that forks workers (see worker.py), one a runner
    WorkerProcess   one worker, which may outlive its nursery: then it is killed from here

The nursery is started with subprocess, not multiprocessing: neither is the user's main module imported again nor a
process with CUDA forked. No signal handler, no thread; usable from any thread, by one at a time.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ORDER = struct.Struct("!if")  # to the nursery: process id or 0, seconds of grace
ANSWER = struct.Struct("!i")  # from it: process id or exit code

Job = tuple[int, int]  # (function, sample)

_ROOT = Path(__file__).resolve().parents[2]  # the folder to import fastgrpo from
_SEND_LIMIT_S = 60.0  # a worker that takes nothing for so long is left to its sample's timeout
_LEAVE_LIMIT_S = 1.0  # for a worker that is asked to leave
_CLOSE_LIMIT_S = 10.0  # for the nursery, which gives its workers a second


class NurseryDied(Exception):
    """No worker can be started or waited for through this nursery any more."""


class Nursery:
    """Closed by `close`, by garbage collection, at the interpreter's exit, and by the trainer's death."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-u", "-m", "fastgrpo.reward.worker", str(theirs.fileno()), str(os.getpid())]
            process = subprocess.Popen(
                command,
                cwd=_ROOT,  # `-m` looks there first; the workers go to the trainer's folder afterwards
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # this process's standard error
                start_new_session=True,  # Ctrl-C is the trainer's to treat
            )
        self._process = process
        self._lost = False  # an order got no answer
        self.close = weakref.finalize(self, _close, self._control, process, os.getpid())

    @property
    def died(self) -> bool:
        return self._lost or self._process.poll() is not None

    def fork(self, connection: socket.socket) -> int:
        """Process id of a new worker that serves `connection`. Raises NurseryDied."""
        return self._ask(ORDER.pack(0, 0.0), [connection.fileno()])

    def end(self, worker: int, grace_s: float) -> int:
        """Exit code of a worker that is ended now, with all that it started, or had ended before. Raises
        NurseryDied."""
        return self._ask(ORDER.pack(worker, grace_s), [])

    def _ask(self, order: bytes, descriptors: Sequence[int]) -> int:
        answer = b""
        with contextlib.suppress(OSError):  # it may have died
            socket.send_fds(self._control, [order], descriptors)
            answer = self._control.recv(ANSWER.size, socket.MSG_WAITALL)
        if len(answer) < ANSWER.size:
            self._lost = True
            raise NurseryDied
        return ANSWER.unpack(answer)[0]


def _close(control: socket.socket, process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() != owner:  # a forked copy of the trainer: they are not its own
        return
    with contextlib.suppress(OSError):  # it may have died
        control.shutdown(socket.SHUT_RDWR)
    control.close()
    try:
        process.wait(_CLOSE_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class WorkerProcess:
    """`jobs` are those it was given and has not answered; `since` then it is at the first, or at all of a group."""

    def __init__(self, nursery: Nursery, payloads: Sequence[tuple[str, bytes]]) -> None:
        self._nursery = nursery
        self.socket, theirs = socket.socketpair()
        with theirs:
            try:
                self._id = nursery.fork(theirs)
            except NurseryDied:
                self.socket.close()
                raise
        self.socket.settimeout(_SEND_LIMIT_S)
        self.started = time.monotonic()
        self.ready = False  # whether it has loaded the functions
        self.overdue = False  # whether it is slower than the runner's patience
        self.jobs: deque[Job] = deque()
        self.grouped = False  # whether its jobs are one call: they are answered, or late, together
        self.since = self.started
        self._unread = b""
        self._send((os.getcwd(), sys.path))
        self._send(list(payloads))

    @property
    def idle(self) -> bool:
        return self.ready and not self.jobs

    def give(
        self, function: int, samples: Sequence[tuple[int, dict[str, Any]]], *, grouped: bool, limit_s: float
    ) -> None:
        self.jobs.extend((function, sample) for sample, _ in samples)
        self.grouped = grouped
        self.since = time.monotonic()
        self._send((function, limit_s, list(samples)))

    def read(self) -> list[Any] | None:
        """What it has answered, if the socket is readable; None: it has died."""
        try:
            received = self.socket.recv(1 << 20)
        except OSError:
            received = b""
        if not received:
            return None
        *lines, self._unread = (self._unread + received).split(b"\n")
        if not self.grouped:
            self.since, self.overdue = time.monotonic(), False
        return [json.loads(line) for line in lines]

    @property
    def orphaned(self) -> bool:
        return self._nursery.died

    def hang_up(self) -> None:
        """Ask it to leave. Shut down, not only closed: a forked copy of the trainer may hold the socket too."""
        with contextlib.suppress(OSError):  # it may have died
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def end(self) -> str:
        """End it and all that it started: at once if it is at a sample. Returns how it ended, e.g. "exit code 1"."""
        grace_s = _LEAVE_LIMIT_S if self.idle else 0.0
        alive = self._holds_its_socket()
        self.hang_up()
        try:
            code = self._nursery.end(self._id, grace_s)
        except NurseryDied:
            if alive:  # else its id may be another's by now
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._id, signal.SIGKILL)
            return "its parent process, which was killed or has crashed"
        return f"exit code {code}" if code >= 0 else f"signal {-code} ({signal.strsignal(-code)})"

    def _holds_its_socket(self) -> bool:
        self.socket.setblocking(False)  # nothing more is sent or awaited
        try:
            return bool(self.socket.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def _send(self, message: object) -> None:
        # One that died meanwhile is noticed by read(), at the end of its stream.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError, TimeoutError):
            self.socket.sendall(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))
