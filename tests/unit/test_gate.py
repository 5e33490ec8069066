"""The gate between engine and trainer: its three thresholds, and what it says."""

import math

import pytest
import torch

from fastgrpo.algorithm.mismatch import Correction
from fastgrpo.algorithm.mismatch_stats import gap_stats
from fastgrpo.config import RunConfig
from fastgrpo.errors import Told
from fastgrpo.gate import check_gap, comparable


def sums_of(gaps):
    """Reduced sums over tokens whose trainer logprob is the sampler's plus the gap."""
    sampler = torch.full((len(gaps),), -1.0, dtype=torch.float64)
    trainer = sampler + torch.tensor(gaps, dtype=torch.float64)
    live, ids = torch.ones(len(gaps), dtype=torch.bool), torch.arange(len(gaps))
    stats = gap_stats(trainer, sampler, live, ids, lambda x_U, seq_id_U: x_U, Correction("token", 2.0))
    return {name: value.item() for name, value in stats.items()}


def config_of(limit=0.1):
    config = RunConfig()
    config.rollout.max_logprob_gap = limit
    return config


def test_a_small_gap_passes_in_silence():
    assert check_gap(sums_of([0.029, -0.029, 0.01, -0.01]), config_of()) is None


def test_above_three_hundredths_it_warns():
    warning = check_gap(sums_of([0.0625, -0.0625, 0.03125, -0.03125]), config_of())
    assert warning is not None
    assert "mean |trainer - sampler| logprob 0.04688, mean +0, largest 0.0625 nats" in warning
    assert "stale prefix cache" in warning


@pytest.mark.parametrize(
    ("gaps", "limit", "words"),
    [
        (
            [0.125, -0.125],
            0.1,
            r"over 2 tokens: .*logprob 0\.125, mean \+0, .*first is rollout.max_logprob_gap=0\.1\)",
        ),
        ([0.031, 0.031, 0.031], 0.1, r"logprob 0\.031, mean \+0\.031,.*the second is 0\.03 either way"),
        ([-0.04, -0.03], 0.1, r"mean -0\.035,"),
        ([0.02, -0.01], 0.001, r"max_logprob_gap=0\.001"),
        ([2e-6, -1e-6], 1e-6, r"logprob 1\.5e-06, .*max_logprob_gap=1e-06"),
        (
            [0.1000004, -0.1000004],
            0.1,
            r"logprob 0\.1000004, .*max_logprob_gap=0\.1\)",
        ),  # more than 0.1, and seen to be
        ([-0.03000002] * 2, 0.1, r"mean -0\.03000002, .*the second is 0\.03"),
        ([0.5, -0.5], 0.4, r"largest 0\.5 nats"),
        ([math.inf, 0.0], 0.1, "logprob inf"),
    ],
)
def test_beyond_its_limits_it_stops(gaps, limit, words):
    with pytest.raises(RuntimeError, match=rf"engine and trainer disagree.*{words}.*likely causes") as stopped:
        check_gap(sums_of(gaps), config_of(limit))
    assert isinstance(stopped.value, Told)  # printed alone, without a traceback


@pytest.mark.parametrize(
    ("value", "limit", "shown"),
    [
        (0.123456, 0.1, "0.1235"),
        (0.09999999, 0.1, "0.1"),
        (0.1, 0.1, "0.1"),  # at the limit, which it is not beyond
        (math.nextafter(0.1, 1), 0.1, "0.10000000000000002"),
        (3e-9, 1e-9, "3e-09"),
        (math.inf, 0.1, "inf"),
    ],
)
def test_a_value_beyond_its_limit_is_seen_to_be(value, limit, shown):
    assert comparable(value, limit) == shown


def test_logprobs_that_are_no_numbers_are_no_disagreement():
    with pytest.raises(RuntimeError, match=r"^logprobs are not finite \(NaN\) among 2 tokens: the weights hold"):
        check_gap(sums_of([math.nan, 0.0]), config_of())


def test_a_wider_limit_lets_noise_pass_but_no_shift():
    assert "drift apart" in str(check_gap(sums_of([0.3, -0.3]), config_of(0.4)))
    with pytest.raises(RuntimeError, match=r"the second is 0\.03 either way") as stopped:
        check_gap(sums_of([0.1, 0.1]), config_of(0.4))
    assert "max_logprob_gap" not in str(stopped.value)  # a limit that did not act


def test_without_comparable_tokens_there_is_nothing_to_say():
    assert check_gap({}, config_of()) is None
    assert check_gap(sums_of([]), config_of()) is None
