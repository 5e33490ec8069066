"""The order of prompts is a function of (seed, epoch), the prompts of a step one of (order, step)."""

from __future__ import annotations

import numpy as np
import pytest

from fastgrpo.data import PromptOrder, PromptSet, batch_prompts, epoch_order, steps_per_epoch
from fastgrpo.errors import UserError
from fastgrpo.records import Prompt


def numbered(count: int) -> PromptSet:
    return PromptSet(tuple(Prompt(str(i), (i,), "", None, {}) for i in range(count)), 0, "", "")


def taken(count: int, step: int, batch: int, seed: int = 3, shuffle: bool = True) -> list[int]:
    return [prompt.ids[0] for prompt in batch_prompts(numbered(count), step, batch, seed, shuffle)]


def test_order_is_fixed_for_all_time() -> None:
    # Written down, because a resumed run must see the order that the interrupted one had, on any machine and version.
    assert epoch_order(8, seed=0, epoch=0, shuffle=True).tolist() == [0, 2, 1, 5, 4, 3, 6, 7]
    assert epoch_order(8, seed=0, epoch=1, shuffle=True).tolist() == [5, 3, 7, 2, 4, 1, 0, 6]


def test_order_is_a_permutation_that_only_seed_and_epoch_change() -> None:
    orders = {(s, e): epoch_order(100, s, e, True) for s in (-1, 0, 1, 2**40) for e in range(4)}
    assert all(np.array_equal(np.sort(order), np.arange(100)) for order in orders.values())
    assert len({order.tobytes() for order in orders.values()}) == len(orders)
    assert all(np.array_equal(order, epoch_order(100, s, e, True)) for (s, e), order in orders.items())


def test_every_place_gets_every_prompt_about_equally_often() -> None:
    # 6000 epochs of 6: each of the 36 counts is binomial(6000, 1/6), mean 1000, standard deviation 29.
    orders = np.array([epoch_order(6, 11, epoch, True) for epoch in range(6000)])
    counts = np.array([[np.sum(orders[:, place] == prompt) for prompt in range(6)] for place in range(6)])
    assert abs(counts - 1000).max() < 5 * 29


def test_no_shuffle_is_the_order_of_the_data() -> None:
    assert epoch_order(5, 9, 3, False).tolist() == [0, 1, 2, 3, 4]
    assert [taken(7, step, 3, shuffle=False) for step in range(3)] == [[0, 1, 2], [3, 4, 5], [0, 1, 2]]


def test_steps_walk_the_epochs_and_leave_the_incomplete_batch_out() -> None:
    assert steps_per_epoch(7, 3) == 2
    for epoch in (0, 1, 5):
        order = epoch_order(7, 3, epoch, True).tolist()
        assert taken(7, 2 * epoch, 3) + taken(7, 2 * epoch + 1, 3) == order[:6]


def test_an_order_goes_on_where_it_was_saved() -> None:
    order, resumed = (PromptOrder(numbered(7), 3, 3, True) for _ in range(2))
    first = [[p.ids[0] for p in order.take()] for _ in range(3)]
    assert first == [taken(7, step, 3) for step in range(3)]
    resumed.load_state(order.state())
    assert [p.uid for p in resumed.take()] == [p.uid for p in order.take()] == [str(i) for i in taken(7, 3, 3)]


def test_batch_of_the_whole_set() -> None:
    assert sorted(taken(4, 2, 4)) == [0, 1, 2, 3]


def test_fewer_prompts_than_a_batch_is_refused_with_both_numbers() -> None:
    with pytest.raises(UserError, match=r"5 prompts .* data\.train_batch_size=8 \(0 batches an epoch;.*at most 5"):
        steps_per_epoch(5, 8)
    with pytest.raises(UserError, match="0 batches"):
        taken(5, 0, 8)
    with pytest.raises(UserError, match=r"data\.gen_batch_size"):  # before the first step
        PromptOrder(numbered(5), 8, 0, True)
