"""The worker's end of a sandbox: start inside.py with a job, read its lines, end it with everything in it.

    with Box(job(...), fds={3: socket.fileno()}) as box:
        for message in box.messages(deadline): ...

No policy here: what is run and what its output means is verdicts.py's.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Level = Literal["namespaces", "limits"]

FOLDER = Path(__file__).resolve().parent
OUTPUT_BYTES = 4 << 20  # of one run's standard output
FILE_BYTES = 64 << 20  # of a file, and of the folder
_END_LIMIT_S = 5.0


class BrokenBox(Exception):
    """The sandbox itself failed: no verdict about the program."""


@dataclass(frozen=True, slots=True)
class Limits:
    level: Level
    time_s: float  # for all runs of a sample together
    memory_mb: int  # a process
    processes: int
    other_user: bool = False  # at level "limits", for root: whether the program gets a user id of its own


def python(script: str) -> list[str]:
    """Arguments that run a script inside, with the packages of this environment."""
    return [sys.executable, "-I", "-B", script]


def make_job(
    limits: Limits, runs: Sequence[Mapping[str, Any]], files: Mapping[str, str], fds: Mapping[int, int] | None = None
) -> dict[str, Any]:
    return {
        "parent": os.getpid(),
        "level": limits.level,
        "other_user": limits.other_user,
        "time_s": limits.time_s,
        "memory_bytes": limits.memory_mb << 20,
        "processes": limits.processes,
        "file_bytes": FILE_BYTES,
        "output_bytes": OUTPUT_BYTES,
        "readable": [sys.prefix, sys.base_prefix, str(FOLDER), *_chain(sys.executable)],
        "runs": [dict(run) for run in runs],
        "files": dict(files),
        "fds": dict(fds or {}),
    }


def _chain(path: str) -> list[str]:
    """The interpreter's folders, where symbolic links lead from one environment to another."""
    folders = []
    while Path(path).is_symlink():
        folders.append(str(Path(path).parent))
        path = os.path.join(os.path.dirname(path), os.readlink(path))
    return [*folders, str(Path(path).parent)]


class Box:
    """One running sandbox. BrokenBox when a wall could not be built."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", str(FOLDER / "inside.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=list(job["fds"].values()),
            start_new_session=True,  # killed with its worker's group it could not end what it started
            env={},
            cwd="/",
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(json.dumps(job).encode())
        self._out = self._process.stdout.fileno()
        self._unread = b""
        self._started = False

    def __enter__(self) -> Box:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def messages(self, deadline: float) -> Iterator[dict[str, Any]]:
        """What it says, until it ends or the deadline (time.monotonic()) passes."""
        while (line := self._line(deadline)) is not None:
            message = json.loads(line)
            if "broken" in message:
                raise BrokenBox(f"the sandbox could not be made: {message['broken']}")
            if "started" in message:
                self._started = True
            else:
                yield message
        if not self._started:
            raise BrokenBox("the sandbox did not start" + (" in time" if time.monotonic() > deadline else ""))

    def check_started(self, deadline: float) -> None:
        """BrokenBox unless its program was started, or is by the deadline."""
        while not self._started:
            next(self.messages(deadline), None)

    def _line(self, deadline: float) -> bytes | None:
        while b"\n" not in self._unread:
            if not select.select([self._out], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return None
            part = os.read(self._out, 1 << 16)
            if not part:
                return None
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def end(self) -> None:
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
