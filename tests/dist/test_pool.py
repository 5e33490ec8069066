"""The pool of ranks itself: collectives work, failures and hangs are reported by rank, and it serves on afterwards."""

from __future__ import annotations

import os
import re
import time

import pytest
import torch
import torch.distributed as dist
from pool import RankError

OFFSET = 10  # module globals travel with the function


def _sum_of_ranks(scale: float) -> tuple[float, str, int]:
    value = torch.tensor(scale * (dist.get_rank() + OFFSET), dtype=torch.float64)
    dist.all_reduce(value)
    return value.item(), os.environ["LOCAL_RANK"], torch.get_num_threads()


def _compare_with_rank(expected: int) -> None:
    assert dist.get_rank() == expected, "this rank was not expected"


def _one_process_dies() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


def _process_id() -> int:
    return os.getpid()


@pytest.mark.parametrize("size", [2, 4])
def test_all_reduce(ranks, size):
    total = sum(2.5 * (rank + OFFSET) for rank in range(size))
    assert ranks(size).run(_sum_of_ranks, 2.5) == [(total, str(rank), 1) for rank in range(size)]


def test_processes_are_shared(ranks):
    assert ranks(2).run(_process_id) == ranks(2).run(_process_id)


def test_failed_assertion_names_the_rank_and_values(ranks):
    with pytest.raises(RankError) as error:
        ranks(2).run(_compare_with_rank, 0)
    message = str(error.value)
    assert "--- rank 1 of 2" in message and "--- rank 0" not in message
    assert "this rank was not expected" in message and "assert 1 == 0" in message  # pytest's rewriting came along
    assert "_compare_with_rank" in message  # the traceback
    assert ranks(2).run(_sum_of_ranks, 1.0)[0][0] == 21.0


def test_death_of_a_process_is_reported(ranks):
    with pytest.raises(RankError) as error:
        ranks(2).run(_one_process_dies, timeout_s=300)
    assert "--- rank 1 of 2\nthe process ended with exit code 3" in str(error.value)
    # Rank 0 still waits (its stacks are shown) or was told by gloo: either way the report says where.
    assert re.search(r"--- rank 0 of 2\n(.|\n)*in _?barrier", str(error.value))


def test_hang_is_ended_and_its_place_shown(ranks):
    started = time.monotonic()
    with pytest.raises(RankError, match=r"--- rank 0 of 2\nno answer; its stacks:\n(.|\n)*in _call(.|\n)*--- rank 1"):
        ranks(2).run(time.sleep, 300, timeout_s=1)
    assert time.monotonic() - started < 120


def test_processes_with_too_many_threads_make_room_for_fresh_ones(ranks, monkeypatch):
    pool = ranks(2)
    kept = pool.run(_process_id)
    assert pool.run(_process_id) == kept
    monkeypatch.setattr("pool.MOST_THREADS", 1)
    assert pool.run(_process_id) == kept  # the result of the last call is not lost
    monkeypatch.undo()
    assert not set(pool.run(_process_id)) & set(kept)
