"""From scores to advantages and counts: penalties, filters, and what the metrics say of them."""

import math

import numpy as np
import pytest
import torch

from fastgrpo.algorithm.kl_control import KlController
from fastgrpo.config import RewardFunctionConfig, RunConfig
from fastgrpo.groups import SequenceTerms, make_groups
from fastgrpo.records import Rollout, Sample, Score


def sample(score, length=3, reason="stop", **parts):
    rollout = Rollout("p", 0, 0, (4,), np.full(length, 5, np.int32), np.ones(length, np.bool_), None, reason, 0)
    return Sample(
        rollout, "", Score(score, parts or {"right": score}, {}, "scored" if score is not None else "timeout")
    )


def config_of(n, **algorithm):
    config = RunConfig()
    config.rollout.n, config.algorithm.norm_adv_by_std_in_grpo, config.data.max_response_length = n, False, 20
    for name, value in algorithm.items():
        setattr(config.algorithm, name, value)
    return config


def test_the_kl_penalty_is_in_the_advantage():
    terms = SequenceTerms(torch.tensor([2.0, 4.0, 0.0, 1.0], dtype=torch.float64), 0.1, None, 0.3)
    groups = make_groups([sample(1.0), sample(1.0), sample(1.0), sample(0.0)], config_of(2), terms)
    assert groups.scores_N.tolist() == [1, 1, 1, 0] and groups.means_P.tolist() == [1, 0.5]  # of the scores
    assert groups.rewards_N.tolist() == pytest.approx([0.8, 0.6, 1.0, -0.1])
    assert groups.advantages_N.tolist() == pytest.approx([0.1, -0.1, 0.55, -0.55])
    penalty = pytest.approx(0.1 * 7 / 4)
    assert groups.metrics == {"reward/kl_penalty": penalty, "reward/kl_coef": 0.1, "reward/kl": 0.3}


def test_truncated_answers_leave_the_counts_and_stay_in_the_baseline():
    samples = [sample(3.0, 4), sample(0.0, 8, "length"), sample(0.0, 6)]
    groups = make_groups(samples, config_of(3, overlong_filtering=True))
    assert groups.advantages_N.tolist() == [2, -1, -1]
    assert groups.counted_N.tolist() == [True, False, True]
    assert groups.metrics == {"response_length/filtered": pytest.approx(1 / 3)}
    assert make_groups(samples, config_of(3)).counted_N.tolist() == [True] * 3


def test_rejected_sequences_leave_the_counts():
    terms = SequenceTerms(None, 0.0, torch.tensor([True, False, False, True]))
    samples = [sample(1.0, 2), sample(0.0, 4), sample(None, 10), sample(0.0, 2)]
    groups = make_groups(samples, config_of(2), terms)
    assert groups.counted_N.tolist() == [True, False, False, True]
    assert groups.advantages_N.tolist() == [0.5, -0.5, 0, 0]
    assert groups.metrics == {
        "rollout_corr/rollout_rs_seq_masked_fraction": pytest.approx(1 / 3),  # of those that were scored
        "rollout_corr/rollout_rs_masked_fraction": pytest.approx(4 / 8),
    }


def test_gdpo_sees_each_function_with_its_weight_and_a_penalty_as_one_more():
    config = config_of(2, adv_estimator="gdpo")
    config.reward.functions = {
        "right": RewardFunctionConfig(weight=2.0),
        "style": RewardFunctionConfig(weight=0.5),
        "shown": RewardFunctionConfig(weight=0.0),
    }
    rows = [(1.0, 0.0), (0.0, 4.0), (1.0, 2.0), (0.0, 2.0)]
    samples = [sample(2 * a + b / 2, right=a, style=b, shown=None) for a, b in rows]
    terms = SequenceTerms(torch.tensor([0.0, 1.0, 0.0, 0.0], dtype=torch.float64), 0.2, None)
    raw = [2 * 0.5 - 0.5 * 2 + 0.1, 2 * -0.5 + 0.5 * 2 - 0.1, 2 * 0.5, 2 * -0.5]
    mean = sum(raw) / 4
    variance = sum(3 * (x - mean) ** 2 for x in raw) / 11  # 3 tokens each, ddof 1
    expected = [(x - mean) / math.sqrt(variance + 1e-8) for x in raw]
    assert make_groups(samples, config, terms).advantages_N.tolist() == pytest.approx(expected)


def test_a_reward_given_in_python_has_weight_1():
    config = config_of(2, adv_estimator="gdpo")
    groups = make_groups([sample(1.0, right=1.0), sample(0.0, right=0.0)], config)
    assert groups.advantages_N.tolist() == pytest.approx([math.sqrt(5 / 6), -math.sqrt(5 / 6)])  # 6 tokens


def test_a_fixed_coefficient_stays():
    controller = KlController(0.05)
    controller.update(10.0, 512)
    assert controller.coef == 0.05
    controller.load_state({"coef": 3.0})  # the configuration's, not the checkpoint's
    assert controller.coef == 0.05


def test_an_adaptive_coefficient_moves_towards_the_target_and_resumes():
    controller = KlController(0.05, target=0.1, horizon=1000)
    controller.update(0.11, 500)  # 10 % above
    assert controller.coef == pytest.approx(0.05 * 1.05)
    controller.update(5.0, 500)  # far above: 20 % count
    assert controller.coef == pytest.approx(0.05 * 1.05 * 1.1)
    controller.update(0.0, 500)
    assert controller.coef == pytest.approx(0.05 * 1.05 * 1.1 * 0.9)
    resumed = KlController(0.05, target=0.1, horizon=1000)
    resumed.load_state(controller.state())
    for each in (controller, resumed):
        each.update(0.2, 100)
    assert resumed.coef == controller.coef
