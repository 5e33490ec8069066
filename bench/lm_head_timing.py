"""Time several implementations of one pass on the same tensors, in turns, so that clocks and heat are the same for all.

Each is first set up and called twice on its own: compilation, autotuning, its errors against fp64 and its peak memory.
Then all of them are called in turns until each has its `repeats`. A turn is a burst of calls without waiting, as in
training, of which the first is not counted: it runs at the clocks that the peer before it left (a bare product was 12 %
faster after a slow kernel than after its own kind), and the launches of the others overlap with the work of the one
before. One that takes more than 200 ms is called once a turn, three times in all. Times are CUDA events. One that
raises, runs out of memory or exceeds its time becomes a result with its error; the others go on.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch

from lm_head_data import Inputs
from lm_head_exact import Exact, errors
from lm_head_own import Run
from lm_head_peers import Peer, Unavailable

SLOW_MS, SLOW_REPEATS, BURST = 200.0, 3, 3
GIB = 2**30


class LostDevice(Exception):
    """The CUDA context died in a peer, whose `result` this holds: this process cannot use the device any more."""

    def __init__(self, result: Result):
        super().__init__(result.peer.name)
        self.result = result


class OutOfTime(Exception):
    """A time limit passed."""


@dataclass
class Result:
    """What was seen of one peer; `error` says why there is nothing more."""

    peer: Peer
    run: Run | None = None
    milliseconds: list[float] = field(default_factory=list)
    slow: bool = False
    peak_gib: float | None = None
    first_call_s: float | None = None
    errors: dict[str, float | None] = field(default_factory=dict)
    error: str | None = None

    def fail(self, reason: str) -> None:
        self.error, self.run = reason, None

    def calls_wanted(self, repeats: int) -> int:
        """Counted calls in its next turn."""
        if self.run is None:
            return 0
        most = min(repeats, SLOW_REPEATS) if self.slow else repeats
        return min(1 if self.slow else BURST, most - len(self.milliseconds))


@dataclass(frozen=True)
class Deadline:
    """The end of the run, on the clock of time.monotonic."""

    at: float

    @staticmethod
    def after(seconds: float) -> Deadline:
        return Deadline(time.monotonic() + seconds)

    def passed(self) -> bool:
        return time.monotonic() > self.at


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """OutOfTime after `seconds` of Python; if the process hangs in the driver for twice that, it ends with status 3."""

    def expire(*_: object) -> None:
        raise OutOfTime(f"more than {seconds:g} s")

    def give_up() -> None:
        print(f"stuck in one call for {2 * seconds:g} s: ending; rows so far are written", file=sys.stderr, flush=True)
        os._exit(3)

    hang = threading.Timer(2 * seconds, give_up)
    hang.daemon = True
    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    hang.start()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        hang.cancel()


def measure(
    peers: Sequence[Peer],
    inputs: Inputs,
    exact: Exact | None,
    *,
    repeats: int,
    seconds_each: float,
    deadline: Deadline,
) -> list[Result]:
    """Set up and time `peers` on `inputs`, with errors against `exact` where it is given. Raises LostDevice alone."""
    results = [Result(peer) for peer in peers]
    for result in results:
        if deadline.passed():
            result.fail("left out: the run's time was spent")
        else:
            _guarded(result, seconds_each, lambda result=result: _warm_up(result, inputs, exact))
    turn = 0
    while any(result.calls_wanted(repeats) for result in results):
        if turn >= SLOW_REPEATS and deadline.passed():
            break
        for result in results:
            if count := result.calls_wanted(repeats):
                _guarded(result, seconds_each, lambda result=result, count=count: _time_burst(result, inputs, count))
        turn += 1
    return results


def _guarded(result: Result, seconds: float, call: Callable[[], None]) -> None:
    """Whatever `call` raises becomes the result's error; KeyboardInterrupt goes through."""
    try:
        with time_limit(seconds):
            call()
    except Unavailable as error:
        result.fail(str(error))
    except ImportError as error:
        result.fail(f"not installed: {error.name or error}")
    except torch.OutOfMemoryError:
        result.fail("out of memory")
    except Exception as error:  # a peer may raise anything; one that fails is a row of the table
        result.fail(f"{type(error).__name__}: {error}".strip().splitlines()[0][:200])
    if result.error is None:
        return
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError as error:
        raise LostDevice(result) from error


def _clear(inputs: Inputs) -> None:
    inputs.hidden_TH.grad = inputs.weight_VH.grad = None


def _warm_up(result: Result, inputs: Inputs, exact: Exact | None) -> None:
    _clear(inputs)  # one that failed may have left its gradients
    start = time.monotonic()
    run = result.peer.make(inputs)
    outputs = run()
    torch.cuda.synchronize()
    result.first_call_s = time.monotonic() - start
    if exact is not None:
        result.errors = errors(outputs, exact, result.peer.objective)
    del outputs
    _clear(inputs)
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    start = time.monotonic()
    run()
    torch.cuda.synchronize()
    result.slow = 1000 * (time.monotonic() - start) > SLOW_MS
    result.peak_gib = (torch.cuda.max_memory_allocated() - base) / GIB
    _clear(inputs)
    result.run = run


def _time_burst(result: Result, inputs: Inputs, count: int) -> None:
    assert result.run is not None
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    torch.cuda.synchronize()
    for event in [*([] if result.slow else [None]), *events[:-1]]:
        if event is not None:
            event.record()
        _clear(inputs)
        result.run()
    events[-1].record()
    torch.cuda.synchronize()
    _clear(inputs)
    result.milliseconds += [a.elapsed_time(b) for a, b in pairwise(events)]


def quantiles(milliseconds: Sequence[float]) -> dict[str, float | None]:
    if not len(milliseconds):
        return {"ms_p20": None, "ms_p50": None, "ms_p80": None}
    values = np.percentile(milliseconds, [20, 50, 80])
    return {f"ms_p{p}": round(float(value), 3) for p, value in zip((20, 50, 80), values, strict=True)}
