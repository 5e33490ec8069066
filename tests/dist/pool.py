"""Processes for tests that need several ranks: started once, used by every test, joined in one gloo process group.

    results = ranks(4).run(function, *args)     # `ranks` is the fixture; results[rank] = function(*args) on that rank

`function` and its result travel by cloudpickle, a test module's own functions by value (its assertions stay pytest's
rewritten ones). It finds torch.distributed initialised and torchrun's variables set. When a rank raises, dies or keeps
the others waiting, `run` raises RankError with every rank's traceback (or stacks) and the next call starts fresh
processes: a process group is not to be trusted after a collective that some rank left. A function that is expected to
raise catches that itself and returns what it caught.

The processes are forked from one that has made the long imports and nothing else, so that they start in no time.
"""

from __future__ import annotations

import contextlib
import faulthandler
import inspect
import multiprocessing
import os
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import cloudpickle

TESTS = Path(__file__).resolve().parents[1]
START_S = 120  # torch's import in the process that is forked, on a busy machine
# Every mesh makes groups, and the threads of gloo's groups poll, also between two calls: four ranks with 890 each took
# nine tenths of a processor for nothing. They stay as long as the process: torch's caches know the groups by name.
MOST_THREADS = 400
GRACE_S = 5  # for the other ranks, once one has failed
IMPORTS = [  # that a process is forked with; none of them touches a GPU
    "fastgrpo.policy.actor",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
]


class RankError(AssertionError):
    """What went wrong on which rank."""


@dataclass(frozen=True, slots=True)
class _Worker:
    process: BaseProcess
    pipe: Connection
    stacks: Path  # where the process writes its stacks on SIGUSR1


class RankPool:
    def __init__(self, size: int) -> None:
        self.size = size
        self._workers: list[_Worker] = []

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 120, **kwargs: Any) -> list[Any]:
        """`function(*args, **kwargs)` on every rank; the results in rank order. RankError if any rank fails."""
        with _by_value(function):
            call = cloudpickle.dumps((function, args, kwargs))
        try:
            if not self._workers:
                self._workers = _start(self.size)
                self._collect(START_S)
            for worker in self._workers:
                worker.pipe.send_bytes(call)
            results = self._collect(timeout_s)
        except BaseException:
            self.close()
            raise
        if len(os.listdir(f"/proc/{self._workers[0].process.pid}/task")) > MOST_THREADS:
            self.close()  # the next call starts fresh ones
        return results

    def close(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.pipe.close()
            worker.stacks.unlink()
        self._workers = []

    def _collect(self, timeout_s: float) -> list[Any]:
        """One answer a rank. After the first failure, or the timeout, the ranks that are still silent are shown too."""
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout_s
        while len(answers) < self.size and (remaining := deadline - time.monotonic()) > 0:
            waiting = {worker.pipe: rank for rank, worker in enumerate(self._workers) if rank not in answers}
            for pipe in wait(list(waiting), remaining):
                assert isinstance(pipe, Connection)
                answers[waiting[pipe]] = answer = self._receive(waiting[pipe])
                if not answer[0]:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        failures = {rank: text for rank, (good, text) in answers.items() if not good}
        for rank in set(range(self.size)) - set(answers):
            failures[rank] = self._stacks(rank)
        if failures:
            parts = (f"--- rank {rank} of {self.size}\n{failures[rank]}" for rank in sorted(failures))
            raise RankError("\n".join(["", *parts]))
        return [answers[rank][1] for rank in range(self.size)]

    def _receive(self, rank: int) -> tuple[bool, Any]:
        try:
            return cloudpickle.loads(self._workers[rank].pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            process = self._workers[rank].process
            process.join()
            return False, f"the process ended with exit code {process.exitcode}"

    def _stacks(self, rank: int) -> str:
        worker = self._workers[rank]
        assert worker.process.pid is not None
        os.kill(worker.process.pid, signal.SIGUSR1)
        time.sleep(0.5)  # the signal handler writes them
        return "no answer; its stacks:\n" + worker.stacks.read_text()


def _start(size: int) -> list[_Worker]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTS)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    workers = []
    for rank in range(size):
        ours, theirs = context.Pipe()
        handle, stacks = tempfile.mkstemp(prefix=f"rank{rank}-", suffix=".stacks")
        os.close(handle)
        # Not a daemon: those may not have children, and reward workers are children. Its pipe ends with this process.
        process = context.Process(target=_serve, args=(rank, size, port, theirs, stacks), daemon=False)
        with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):  # or the process that is forked has threads
            process.start()
        theirs.close()
        workers.append(_Worker(process, ours, Path(stacks)))
    return workers


def _serve(rank: int, size: int, port: int, pipe: Connection, stacks: str) -> None:
    os.environ.update(
        OMP_NUM_THREADS="1",
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file)
        pipe.send_bytes(_answer(_join_group))
        with contextlib.suppress(EOFError, BrokenPipeError):  # the test run is over
            while True:
                call = pipe.recv_bytes()
                pipe.send_bytes(_answer(lambda call=call: _call(call)))


def _join_group() -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")


def _call(call: bytes) -> Any:
    function, args, kwargs = cloudpickle.loads(call)
    return function(*args, **kwargs)


def _answer(function: Callable[[], Any]) -> bytes:
    try:
        return cloudpickle.dumps((True, function()))
    except BaseException:  # SystemExit too: the rank's answer is that it raised, and the process serves on
        return cloudpickle.dumps((False, traceback.format_exc()))


@contextlib.contextmanager
def _by_value(function: Callable[..., Any]) -> Iterator[None]:
    """Pickle functions of a test module by value: they carry pytest's rewritten assertions."""
    module = inspect.getmodule(function)
    if module is None or not Path(getattr(module, "__file__", None) or "/").resolve().is_relative_to(TESTS):
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)
