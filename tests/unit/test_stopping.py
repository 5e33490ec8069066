"""What the signals of one rank do: the first asks, a second Ctrl-C ends, the same press twice is one."""

from __future__ import annotations

import os
import signal
import time
from types import SimpleNamespace
from typing import cast

import pytest

from fastgrpo import stopping
from fastgrpo.mesh import Mesh
from fastgrpo.stopping import Stopped, Stopper


class Ended(Exception):
    pass


@pytest.fixture
def stopper(monkeypatch: pytest.MonkeyPatch) -> Stopper:
    def end(status: int) -> None:
        raise Ended(status)

    monkeypatch.setattr(stopping.os, "_exit", end)
    alone = SimpleNamespace(world=1, rank=0, is_main=True)
    return Stopper(cast(Mesh, alone), shutdown_timeout_s=1)


def send(*signals: signal.Signals) -> None:
    for signum in signals:
        os.kill(os.getpid(), signum)
        time.sleep(0.01)


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_ctrl_c_ends_at_once(stopper: Stopper, second: signal.Signals) -> None:
    with stopper.listening():
        send(signal.SIGINT, second)  # one press, passed on
        with pytest.raises(Stopped) as stopped:
            stopper.check()
        assert stopped.value.exit_code == 130
        time.sleep(0.6)
        with pytest.raises(Ended, match="130"):
            send(second)


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGUSR1])
def test_a_second_sigterm_changes_nothing(stopper: Stopper, first: signal.Signals) -> None:
    with stopper.listening():
        send(first)
        time.sleep(0.6)
        send(signal.SIGTERM, signal.SIGUSR1)
        with pytest.raises(Stopped) as stopped:
            stopper.check()
        assert stopped.value.exit_code == 75 and str(stopped.value) == first.name
