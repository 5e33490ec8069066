"""The worker processes: a nursery that forks them, and what a worker does.

    python -m fastgrpo.reward.worker <file descriptor> <process id of the trainer>

starts the nursery. It imports this module, never a user's, and obeys the trainer one message at a time (ORDER):
    (0, _) with a socket    fork a worker that serves this socket; the answer is its process id
    (id, grace)             end that worker and its process group, after `grace` seconds if it has not left by then; the
                            answer is its exit code, as subprocess gives it
So a worker starts in milliseconds, and no process with CUDA or threads is ever forked. When the trainer has gone,
however it ended, the nursery ends all workers, also one that is stuck in a C call, and whatever they started.

    trainer -> worker   pickles: first (folder, sys.path), then the loaders; then (function, [(job, arguments), ...])
    worker -> trainer   JSON lines: "ready", or {"broken": message}; then [job, seconds, kind, ...] after each call
                        kind scored: score or null, details | raised: text, where, trace | bad: description

The answers are JSON because what runs here is not trusted with the trainer's unpickler. Standard output goes to
standard error. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from fastgrpo.errors import UserError
from fastgrpo.reward.function import BadReturn, accepted_arguments, read_return
from fastgrpo.reward.process import ANSWER, ORDER

_TRACE_LINES = 12
_POLL_S = 0.5  # how late the nursery may notice that the trainer has gone
_GRACE_S = 1.0  # for the workers when it has


def main() -> None:
    descriptor, trainer = int(sys.argv[1]), int(sys.argv[2])
    connection = _nurse(socket.socket(fileno=descriptor), trainer)
    if connection is not None:
        with connection:
            serve(connection)


def _nurse(control: socket.socket, trainer: int) -> socket.socket | None:
    """Obey until the trainer has gone. Returns None then; in each worker that it forks, the socket to serve."""
    workers: set[int] = set()
    while os.getppid() == trainer:  # a forked copy of the trainer may keep the socket open
        if not select.select([control], [], [], _POLL_S)[0]:
            continue
        order, descriptors, _, _ = socket.recv_fds(control, ORDER.size, 1)
        if not order:
            break
        worker, grace = ORDER.unpack(order)
        if worker:
            workers.remove(worker)
            control.sendall(ANSWER.pack(_end(worker, time.monotonic() + grace)))
            continue
        worker = os.fork()
        if worker == 0:
            os.setpgid(0, 0)
            control.close()
            return socket.socket(fileno=descriptors[0])
        with contextlib.suppress(OSError):  # both sides set it, so that it holds for both from now on
            os.setpgid(worker, worker)
        os.close(descriptors[0])
        workers.add(worker)
        control.sendall(ANSWER.pack(worker))
    deadline = time.monotonic() + _GRACE_S
    for worker in workers:
        _end(worker, deadline)
    return None


def _end(worker: int, deadline: float) -> int:
    """Exit code. The group is killed before its leader is waited for: until then nobody else can have its id."""
    while time.monotonic() < deadline:
        if os.waitid(os.P_PID, worker, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            break
        time.sleep(0.002)
    with contextlib.suppress(ProcessLookupError, PermissionError):  # some systems deny it when only a zombie is left
        os.killpg(worker, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])


class _Unusable(Exception):
    """A reward function cannot be loaded or called; the text says why."""


def serve(connection: socket.socket) -> None:
    """Answer until the trainer hangs up."""
    messages = connection.makefile("rb")
    try:
        folder, sys.path[:] = pickle.load(messages)
        os.chdir(folder)
        functions = [_load(name, payload) for name, payload in pickle.load(messages)]
        _reply(connection, "ready")
        while True:
            index, jobs = pickle.load(messages)
            function, names = functions[index]
            for job, arguments in jobs:
                _reply(connection, [job, *_call(function, {name: arguments[name] for name in names})])
    except _Unusable as error:
        _reply(connection, {"broken": str(error)})
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _load(name: str, payload: bytes) -> tuple[Callable[..., object], tuple[str, ...]]:
    """The function, and the arguments that it takes."""
    try:
        function = pickle.loads(payload)()
        return function, accepted_arguments(function, name)
    except UserError as error:
        raise _Unusable(str(error)) from None
    except BaseException as error:  # whatever the user's module does at import, sys.exit included
        raise _Unusable(f"{name} cannot be loaded: {_first_line(error)}\n{_trace(error)[1]}") from None


def _call(function: Callable[..., object], arguments: dict[str, Any]) -> list[object]:
    start = time.perf_counter()
    try:
        score, details = read_return(function(**arguments))
        answer: list[object] = ["scored", score, details]
    except BadReturn as error:
        answer = ["bad", str(error)]
    except BaseException as error:  # sys.exit in a reward is an error of one sample like any other
        answer = ["raised", _first_line(error), *_trace(error)]
    return [time.perf_counter() - start, *answer]


def _first_line(error: BaseException) -> str:
    text = "".join(traceback.format_exception_only(error)).strip()
    return text.splitlines()[0][:500]


def _trace(error: BaseException) -> tuple[str, str]:
    """(file:line that raised, last lines of the traceback), without the frames of this module."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    lines = "".join([*traceback.format_list(frames), *traceback.format_exception_only(error)]).splitlines()
    return where, "\n".join(line[:500] for line in lines[-_TRACE_LINES:])


def _reply(connection: socket.socket, message: object) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main()
