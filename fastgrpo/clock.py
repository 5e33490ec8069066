"""Seconds and device memory of a step's phases."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

_GIB = 1 << 30


class Clock:
    """`with clock("gen"): ...` adds to that phase. On CUDA a phase ends when its work has ended, so that no phase pays
    for the one before: a handful of waits a step. Work is what this thread's stream was given and waits for; copies
    that go on beside it (policy/parking.py) end no phase."""

    def __init__(
        self,
        device: torch.device,
        engine_bytes: int,
        watch: Callable[[str], AbstractContextManager[None]] = lambda phase: nullcontext(),
    ) -> None:
        """`engine_bytes`: what torch counts as allocated for the engine, also while it sleeps, its pages gone. `watch`
        is entered around each phase (watchdog.py)."""
        self._watch = watch
        self._engine_bytes = engine_bytes
        self._device = device
        self._cuda = device.type == "cuda"
        self._seconds: dict[str, float] = {}
        self.memory: dict[str, float] = {}  # of this rank's device, GiB and retries; empty on a CPU
        self._retries = self._alloc_retries()
        self._work: tuple[str, float] | None = None
        self._start = time.perf_counter()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        with self._watch(phase):
            yield
            if self._cuda:
                torch.cuda.current_stream(self._device).synchronize()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - start

    def note_rollout_memory(self) -> None:
        """What the whole device holds now, the engine's own allocations included. To be called while it is awake."""
        if self._cuda:
            free, total = torch.cuda.mem_get_info(self._device)
            self.memory["perf/rollout_gib"] = (total - free) / _GIB
            torch.cuda.reset_peak_memory_stats(self._device)

    def note_work(self, phase: str, peak_seconds: float | None) -> None:
        """`peak_seconds`: what the phase would take a device at its peak (flops.py); None: nobody knows the peak."""
        if peak_seconds is not None:
            self._work = (phase, peak_seconds)

    @property
    def mfu(self) -> dict[str, float]:
        """perf/mfu: the share of the device's peak that the noted phase reached; empty where that is unknown."""
        if self._work is None:
            return {}
        phase, peak_seconds = self._work
        return {"perf/mfu": peak_seconds / self._seconds[phase]}

    def finish(self) -> dict[str, float]:
        """All phases, and the whole under `step`. Notes the peak of torch's memory since the rollout, engine asleep."""
        if self._cuda:
            peak = torch.cuda.max_memory_allocated(self._device) - self._engine_bytes
            self.memory["perf/train_peak_gib"] = peak / _GIB
            self.memory["perf/alloc_retries"] = self._alloc_retries() - self._retries
        return {**self._seconds, "step": time.perf_counter() - self._start}

    def _alloc_retries(self) -> int:
        """How often torch has given back all of its spare memory, waiting for the device, to find room for a tensor."""
        return torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0) if self._cuda else 0
