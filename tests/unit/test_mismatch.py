"""Importance weights and gap metrics on four hand-computed tokens, one of them dead."""

import math

import pytest
import torch

from fastgrpo.algorithm.mismatch import gap_stats, importance_weights

TRAINER = [-1.0, -2.0, -0.5, math.nan]
SAMPLER = [-1.5, -1.0, -2.5, -math.inf]
LIVE = torch.tensor([True, True, True, False])


def test_weights_are_truncated_ratios_and_constants() -> None:
    old = torch.tensor(TRAINER[:3], dtype=torch.float64, requires_grad=True)
    weights = importance_weights(old, torch.tensor(SAMPLER[:3], dtype=torch.float64), 2.0)
    assert weights.tolist() == pytest.approx([math.exp(0.5), math.exp(-1), 2.0], rel=1e-14)
    assert not weights.requires_grad


def test_weights_stay_finite() -> None:
    old = torch.tensor([0.0, -math.inf, -math.inf, -300.0])
    sampler = torch.tensor([-math.inf, 0.0, -math.inf, -1.0])
    weights = importance_weights(old, sampler, 1e30)
    assert weights.tolist() == pytest.approx([math.exp(20), math.exp(-20), 1.0, math.exp(-20)], rel=1e-5)


@pytest.mark.parametrize("threshold", [2.0, None])
def test_gap_stats(threshold: float | None) -> None:
    stats = gap_stats(torch.tensor(TRAINER), torch.tensor(SAMPLER), LIVE, threshold)
    d = [0.5, -1.0, 2.0]
    w = [min(math.exp(x), threshold or math.inf) for x in d]
    expected = {
        "gap_tokens": 3,
        "gap": 1.5,
        "gap_abs": 3.5,
        "gap_abs_max": 2.0,
        "gap_k3": sum(math.exp(x) - x - 1 for x in d),
        "gap_truncated": 1 if threshold else 0,
        "importance": sum(w),
        "importance_sq": sum(x * x for x in w),
    }
    assert {name: x.item() for name, x in stats.items()} == pytest.approx(expected, rel=1e-6)
    assert all(x.dtype == torch.float64 and x.shape == () for x in stats.values())


def test_equal_logprobs_have_no_gap_and_full_sample_size() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -3.0])
    stats = {k: v.item() for k, v in gap_stats(logprobs, logprobs, torch.ones(3, dtype=torch.bool), 2.0).items()}
    assert stats["gap_abs"] == stats["gap"] == stats["gap_abs_max"] == stats["gap_k3"] == stats["gap_truncated"] == 0
    assert stats["importance"] ** 2 / (stats["importance_sq"] * stats["gap_tokens"]) == 1


@pytest.mark.parametrize("count", [0, 3])
def test_no_live_token_gives_zeros(count: int) -> None:
    nan = torch.full((count,), math.nan)
    stats = gap_stats(nan, nan, torch.zeros(count, dtype=torch.bool), 2.0)
    assert all(x.item() == 0 for x in stats.values())


def test_an_impossible_token_shows_as_an_infinite_gap() -> None:
    stats = gap_stats(torch.tensor([-math.inf]), torch.tensor([-1.0]), torch.tensor([True]), 2.0)
    assert stats["gap_abs"].item() == stats["gap_abs_max"].item() == math.inf
    assert math.isfinite(stats["gap_k3"].item()) and math.isfinite(stats["importance"].item())
