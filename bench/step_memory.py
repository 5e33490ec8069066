"""Device memory of a step, read in the same way for every trainer that bench_step.py runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

GIB = 2**30
POLL_S = 0.1  # seldom: an in-process engine shares the interpreter with the thread that polls


def train_peak_gib() -> float | None:
    """Peak of what torch allocated since the last `forget_peak`, without vLLM's pools: those count in torch's sums also
    while the engine sleeps and its pages are gone. None without CUDA."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.synchronize()
    segments = torch.cuda.memory_snapshot()
    pools = sum(s["allocated_size"] for s in segments if tuple(s.get("segment_pool_id", (0, 0))) != (0, 0))
    return (torch.cuda.max_memory_allocated() - pools) / GIB


def forget_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()


@contextmanager
def device_peak() -> Iterator[list[float | None]]:
    """A list that holds, on leaving, the largest use of the whole device seen meanwhile, in GiB; None without CUDA.
    Polls in a thread."""
    peak: list[float | None] = []
    if not torch.cuda.is_available():
        yield peak
        peak.append(None)
        return
    done = threading.Event()

    def poll() -> None:
        most = 0
        while True:
            free, total = torch.cuda.mem_get_info()
            most = max(most, total - free)
            if done.wait(POLL_S):
                peak.append(most / GIB)
                return

    thread = threading.Thread(target=poll, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()
