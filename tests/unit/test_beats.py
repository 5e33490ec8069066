"""Who is lost when a collective breaks: ranks on a store in this process."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from fastgrpo import beats
from fastgrpo.beats import ABORTED, Beats, broke_in_a_collective, named, store_holder


@contextmanager
def giving(store: Any, *ranks: int, world: int) -> Iterator[None]:
    over, all_ranks = threading.Event(), [Beats(rank, world) for rank in ranks]

    def give() -> None:
        while not over.wait(0.02):
            for each in all_ranks:
                each.give(store)

    thread = threading.Thread(target=give)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(beats, "LOST_S", 0.5)
    monkeypatch.setattr(beats, "_LOOK_S", 0.05)
    return HashStore()


@pytest.mark.parametrize(
    ("alive", "left", "lost"),
    [((0, 1, 2, 3), (), []), ((0, 2), (), [1, 3]), ((0, 1), (2,), [3]), ((0,), (1, 2, 3), []), ((), (), [1, 2, 3])],
)
def test_those_that_give_no_sign_are_lost(
    alive: tuple[int, ...], left: tuple[int, ...], lost: list[int], store
) -> None:
    for rank in range(1, 4):
        Beats(rank, 4).give(store)  # all have lived once
    for rank in left:
        Beats(rank, 4).leave(store)
    with giving(store, *alive, world=4):
        start = time.monotonic()
        assert Beats(0, 4).lost(store) == lost
        assert (time.monotonic() - start < 0.4) == (not lost)  # whoever fails alone is not kept waiting


def test_nobody_is_lost_once_a_rank_has_failed_by_itself(store) -> None:
    store.set(ABORTED, "1")
    start = time.monotonic()
    assert Beats(0, 2).lost(store) == [] and time.monotonic() - start < 0.4


def test_a_rank_has_process_and_host(store) -> None:
    Beats(1, 3).introduce(store)
    who = f"process {os.getpid()} on {socket.gethostname()}"
    assert named(store, [1]) == f"rank 1 ({who})" and named(store, [1, 2]) == f"rank 1 ({who}) and rank 2"


def raised(action) -> BaseException:
    with pytest.raises(Exception) as caught:
        action()
    return caught.value


def test_which_errors_may_follow_from_a_loss(mesh) -> None:
    """By where they come from: libraries word them differently, and differently each year."""
    unequal = [torch.zeros(2), torch.zeros(3)]
    assert broke_in_a_collective(raised(lambda: dist.all_gather(unequal, torch.zeros(2))))
    assert broke_in_a_collective(raised(lambda: (_ for _ in ()).throw(dist.DistNetworkError("the store"))))
    assert not broke_in_a_collective(raised(lambda: [][0]))
    assert not broke_in_a_collective(raised(lambda: torch.zeros(2) @ torch.zeros(3)))


def test_whose_end_takes_the_store_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "node0")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert store_holder() == "torchrun on node0"
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert store_holder() == "rank 0"
