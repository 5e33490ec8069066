"""What the watching thread decides, on a store in this process and a clock that is set back."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from fastgrpo import watchdog
from fastgrpo.config import LimitsConfig
from fastgrpo.watchdog import ASKED_SILENCE_S, Watchdog


def watchdog_of(heartbeat: float | None, asked_at: float | None) -> Watchdog:
    mesh: Any = SimpleNamespace(world=2, rank=0)
    stopper: Any = SimpleNamespace(asked_at=asked_at, timeout_s=120)
    return Watchdog(mesh, LimitsConfig(heartbeat=heartbeat), stopper)


@pytest.mark.parametrize(
    ("silent_s", "heartbeat", "asked", "said"),
    [
        (20, 60, False, None),
        (61, 60, False, "rank 1 has not been heard of for 61 s (trainer.limits_s.heartbeat=60)"),
        (20, 60, True, "rank 1 has not been heard of for 20 s"),  # torchrun tells the others when a rank is dead
        (20, None, True, "rank 1 has not been heard of for 20 s"),
        (ASKED_SILENCE_S - 1, 60, True, None),
        (999, None, False, None),
    ],
)
def test_a_silent_neighbour(silent_s: float, heartbeat: float | None, asked: bool, said: str | None) -> None:
    store: Any = HashStore()
    store.set("beat/1", "7")
    dog = watchdog_of(heartbeat, time.monotonic() if asked else None)
    dog._beats._heard = "7", time.monotonic() - silent_s
    assert dog._silent_neighbour(store) == said
    store.set("beat/1", "8")
    assert dog._silent_neighbour(store) is None
    dog._beats._heard = "8", time.monotonic() - silent_s
    store.set("left/1", "")
    assert dog._silent_neighbour(store) is None


def test_where_a_stage_hangs_is_said_once(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """By the rank that hangs, in its last line; the others hear of rank, stage and limit."""

    class Ended(Exception):
        pass

    def end(status: int) -> None:
        raise Ended(status)

    monkeypatch.setattr(watchdog.os, "_exit", end)
    monkeypatch.setattr(watchdog, "POLL_S", 0.0)
    monkeypatch.setattr(watchdog.whereabouts, "describe", lambda frames: "compute_score at samples 1, 2")
    dog, store = watchdog_of(60, None), HashStore()
    dog._stages.append(("reward", time.monotonic() - 2000))
    with pytest.raises(Ended, match="70"):
        dog._look(store)
    said, told = capfd.readouterr().err, store.get("why/0").decode()
    assert told == "rank 0 has been in stage reward for 2000 s; trainer.limits_s.reward=1800"
    assert said.count("compute_score at samples") == said.count("has been in stage") == 1
    assert said.endswith("for 2000 s (compute_score at samples 1, 2); trainer.limits_s.reward=1800; the run ends\n")


@pytest.mark.parametrize(
    ("seconds", "digits"), [(0.00123, "0.0012"), (0.5, "0.5"), (4.12, "4.1"), (63.4, "63"), (2000.0, "2000")]
)
def test_seconds_have_digits_enough(seconds: float, digits: str) -> None:
    assert watchdog._digits(seconds) == digits
