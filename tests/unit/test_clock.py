"""What the clock notes of a device's memory, on a made one. Its seconds: test_flops.py, test_summary.py."""

from __future__ import annotations

import pytest
import torch

from fastgrpo.clock import Clock
from fastgrpo.plan.constants import GIB


def test_memory_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's 2 GiB are not the trainer's; of 5 retries 3 were made before the step."""
    retries = iter([3, 5])
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"num_alloc_retries": next(retries)})
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 9 * GIB)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    clock = Clock(torch.device("cuda"), 2 * GIB)
    clock.note_rollout_memory()
    clock.finish()
    assert clock.memory == {"perf/rollout_gib": 20.0, "perf/train_peak_gib": 7.0, "perf/alloc_retries": 2}


def test_a_cpu_has_none() -> None:
    clock = Clock(torch.device("cpu"), 0)
    clock.note_rollout_memory()
    clock.finish()
    assert clock.memory == {}
