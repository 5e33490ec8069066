"""The worker processes: a nursery that forks them, and what a worker does.

    python -m fastgrpo.reward.worker <file descriptor> <process id of the trainer>

starts the nursery. It imports this module, never a user's, and obeys the trainer one message at a time (ORDER):
    (0, _) with a socket    fork a worker that serves this socket; the answer is its process id
    (id, grace)             end that worker and its process group, after `grace` seconds if it has not left by then; the
                            answer is its exit code, as subprocess gives it
So a worker starts in milliseconds, and no process with CUDA or threads is ever forked. When the trainer has gone,
however it ended, the nursery ends all workers, also one that is stuck in a C call, and whatever they started.

    trainer -> worker   pickles: first (folder, sys.path), then the loaders; then
                        (function, seconds a call may take, [(job, arguments), ...])
    worker -> trainer   JSON lines: {"ready": form of each function}, or {"broken": message}; then
                        [job, seconds, kind, ...] for each job
                        kind scored: score or null, details | raised: text, where, trace | timeout
                             bad: description of what it returned | misfit: why it cannot be called

One call for one job, in their order; for a function that takes batches, one for all jobs of the message; for an async
one, all of them at once on one event loop.

The answers are JSON because what runs here is not trusted with the trainer's unpickler. Standard output goes to
standard error. Nothing here imports torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import pickle
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any

from fastgrpo.errors import UserError
from fastgrpo.reward.function import BadReturn, MissingColumn, read_batch, read_return
from fastgrpo.reward.process import ANSWER, ORDER
from fastgrpo.reward.signature import Signature, read_signature

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
        _reply(connection, {"ready": [signature.form for _, signature in functions]})
        with asyncio.Runner() as loop:  # one for all messages: connections that a function keeps open belong to it
            while True:
                index, limit_s, jobs = pickle.load(messages)
                function, signature = functions[index]
                for answer in _answers(function, signature, jobs, limit_s, loop, partial(_reply, connection)):
                    _reply(connection, answer)
    except _Unusable as error:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # another worker has said it, and all end
            _reply(connection, {"broken": str(error)})
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _load(name: str, payload: bytes) -> tuple[Callable[..., object], Signature]:
    try:
        function = pickle.loads(payload)()
        return function, read_signature(function, name)
    except UserError as error:
        raise _Unusable(str(error)) from None
    except BaseException as error:  # whatever the user's module does at import, sys.exit included
        raise _Unusable(f"{name} cannot be loaded: {_first_line(error)}\n{_trace(error)[1]}") from None


_Jobs = Sequence[tuple[int, dict[str, Any]]]


def _answers(
    function: Callable[..., object],
    signature: Signature,
    jobs: _Jobs,
    limit_s: float,
    loop: asyncio.Runner,
    reply: Callable[[object], None],
) -> Iterator[list[object]]:
    """An answer a job; those of an async function go out through `reply` as they come."""
    if signature.form == "batch":
        keywords = partial(signature.batch_keywords, [arguments for _, arguments in jobs])
        yield from _batch_answers(function, keywords, [job for job, _ in jobs], loop)
    elif signature.form == "concurrent":
        loop.run(_all_at_once(function, signature, jobs, limit_s, reply))
    else:
        for job, arguments in jobs:
            start = time.perf_counter()
            try:
                answer = _scored(read_return(function(**signature.keywords(arguments))))
            except BaseException as error:  # sys.exit in a reward is an error of one sample like any other
                answer = _failed(error)
            yield [job, time.perf_counter() - start, *answer]


def _batch_answers(
    function: Callable[..., object],
    keywords: Callable[[], dict[str, Any]],
    jobs: Sequence[int],
    loop: asyncio.Runner,
) -> Iterator[list[object]]:
    start = time.perf_counter()
    try:
        value = function(**keywords())
        if inspect.isawaitable(value):
            value = loop.run(_awaited(value))
        answers = [_scored(item) for item in read_batch(value, len(jobs))]
    except BaseException as error:
        answers = [_failed(error)] * len(jobs)
    seconds = (time.perf_counter() - start) / len(jobs)
    yield from ([job, seconds, *answer] for job, answer in zip(jobs, answers, strict=True))


async def _awaited(value: Awaitable[object]) -> object:
    return await value


async def _all_at_once(
    function: Callable[..., Any],
    signature: Signature,
    jobs: _Jobs,
    limit_s: float,
    reply: Callable[[object], None],
) -> None:
    async def one(job: int, arguments: dict[str, Any]) -> None:
        start = time.perf_counter()
        try:
            async with asyncio.timeout(limit_s) as limit:
                value = await function(**signature.keywords(arguments))
            answer = _scored(read_return(value))
        except BaseException as error:
            answer = ["timeout"] if isinstance(error, TimeoutError) and limit.expired() else _failed(error)
        reply([job, time.perf_counter() - start, *answer])

    await asyncio.gather(*(one(job, arguments) for job, arguments in jobs))


def _scored(value: tuple[float | None, dict[str, float | str]]) -> list[object]:
    return ["scored", *value]


def _failed(error: BaseException) -> list[object]:
    if isinstance(error, MissingColumn):
        return ["misfit", str(error)]
    return ["bad", str(error)] if isinstance(error, BadReturn) else ["raised", _first_line(error), *_trace(error)]


def _first_line(error: BaseException) -> str:
    text = "".join(traceback.format_exception_only(error)).strip()
    return text.splitlines()[0][:500]


def _trace(error: BaseException) -> tuple[str, str]:
    """(file:line that raised, last lines of the traceback), without the frames of this module."""
    ours = (__file__, asyncio.runners.__file__, asyncio.base_events.__file__)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename not in ours]
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    lines = "".join([*traceback.format_list(frames), *traceback.format_exception_only(error)]).splitlines()
    return where, "\n".join(line[:500] for line in lines[-_TRACE_LINES:])


def _reply(connection: socket.socket, message: object) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main()
