"""Dynamic sampling: which groups fill a step, when it stops, and what is counted."""

import numpy as np
import pytest

from fastgrpo.config import RunConfig
from fastgrpo.errors import UserError
from fastgrpo.records import Prompt, Rollout, Sample, Score
from fastgrpo.rollout.refill import choose, fill_step, has_signal

N = 2


def sample(score, **parts):
    rollout = Rollout("p", 0, 0, (4,), np.full(3, 5, np.int32), np.ones(3, np.bool_), None, "stop", 0)
    return Sample(
        rollout, "", Score(score, parts or {"right": score}, {}, "scored" if score is not None else "timeout")
    )


def config_of(wanted, rounds=10, metric=None, enable=True):
    config = RunConfig()
    config.rollout.n, config.data.train_batch_size = N, wanted
    filtering = config.algorithm.filter_groups
    filtering.enable, filtering.max_num_gen_batches, filtering.metric = enable, rounds, metric
    return config


def drawing(*rounds):
    """`draw` over rounds of groups, each a pair of scores; prompts are numbered through all rounds."""
    asked = []

    def draw(attempt):
        assert attempt == len(asked)
        start = sum(len(groups) for groups in rounds[:attempt])
        asked.append(attempt)
        prompts = [Prompt(str(start + i), (i,), "", None, {}) for i in range(len(rounds[attempt]))]
        return prompts, [sample(score) for group in rounds[attempt] for score in group]

    return draw, asked


LIVE, DEAD = (1.0, 0.0), (1.0, 1.0)


def uids(filled):
    return [prompt.uid for prompt in filled.prompts]


def test_a_full_first_round_is_the_step():
    draw, asked = drawing([LIVE, LIVE, LIVE])
    filled = fill_step(draw, config_of(3))
    assert uids(filled) == ["0", "1", "2"] and asked == [0] and len(filled.samples) == 6
    assert filled.metrics["filter_groups/gen_batches"] == 1 and filled.metrics["filter_groups/without_signal"] == 0


def test_groups_without_signal_are_replaced_in_drawing_order():
    draw, asked = drawing([DEAD, LIVE, DEAD], [DEAD, (0.5, 0.0), LIVE])
    filled = fill_step(draw, config_of(3))
    assert uids(filled) == ["1", "4", "5"] and asked == [0, 1]
    assert [s.score.total for s in filled.samples] == [1.0, 0.0, 0.5, 0.0, 1.0, 0.0]
    assert filled.metrics == {
        "filter_groups/gen_batches": 2,
        "filter_groups/drawn": 6,
        "filter_groups/without_signal": 3,
        "filter_groups/surplus": 0,
        "filter_groups/filled_up": 0,
        "filter_groups/drawn_reward_mean": pytest.approx((6 + 2.5) / 12),
    }


def test_what_is_drawn_beyond_a_full_step_is_counted_as_surplus():
    draw, _ = drawing([DEAD, LIVE], [LIVE, LIVE])
    filled = fill_step(draw, config_of(2))
    assert uids(filled) == ["1", "2"] and filled.metrics["filter_groups/surplus"] == 1


def test_the_last_round_is_filled_up_with_the_earliest():
    draw, asked = drawing([DEAD, DEAD, LIVE], [DEAD, LIVE, DEAD], [LIVE] * 3)
    filled = fill_step(draw, config_of(4, rounds=2))
    assert asked == [0, 1] and uids(filled) == ["0", "1", "2", "4"]
    assert filled.metrics["filter_groups/filled_up"] == 2


def test_smaller_rounds_fill_a_step_too():
    draw, asked = drawing([LIVE], [DEAD], [LIVE])
    assert uids(fill_step(draw, config_of(2))) == ["0", "2"] and asked == [0, 1, 2]


def test_without_filtering_a_step_is_one_round_whatever_it_holds():
    draw, asked = drawing([DEAD, LIVE])
    filled = fill_step(draw, config_of(2, enable=False))
    assert uids(filled) == ["0", "1"] and asked == [0] and filled.metrics == {}


def test_signal_is_a_difference_between_scored_samples():
    groups = [(0.1, 0.1), (0.1, 0.2), (None, 1.0), (None, None)]
    samples = [sample(score) for group in groups for score in group]
    assert has_signal(samples, N, None).tolist() == [False, True, False, False]


def test_a_metric_looks_at_one_function():
    """All right with different lengths: the whole reward differs, `right` does not."""
    samples = [sample(1.0, right=1.0, length=0.0), sample(0.5, right=1.0, length=-0.5)]
    assert has_signal(samples, N, None).tolist() == [True] and has_signal(samples, N, "right").tolist() == [False]
    with pytest.raises(UserError, match=r"metric=acc is none of the reward's functions: right, length"):
        has_signal(samples, N, "acc")


def test_choose():
    assert choose([False, True, False, True, True], 2) == [1, 3]
    assert choose([False, True, False], 3) == [0, 1, 2]
    assert choose([], 2) == []
