"""Importance weights, rejection and the gap's metrics on hand-computed tokens, one of them dead."""

import math

import pytest
import torch

from fastgrpo.algorithm.mismatch import IMPORTANCE, REJECTIONS, Correction, divergences, importance_weights, kept_N
from fastgrpo.algorithm.mismatch_stats import gap_metrics, gap_stats
from fastgrpo.config import RolloutIs, RolloutRs

# Two sequences: tokens 0, 1 and tokens 2, 4; token 3 is dead.
TRAINER = [-1.0, -2.0, -0.5, math.nan, -3.0]
SAMPLER = [-1.5, -1.0, -2.5, -math.inf, -3.2]
D = [0.5, -1.0, 2.0, 0.2]  # of the live ones
LIVE = torch.tensor([True, True, True, False, True])
SEQ = torch.tensor([0, 0, 1, 1, 1])


def by_sequence(x_U: torch.Tensor, seq_id_U: torch.Tensor) -> torch.Tensor:
    count = int(seq_id_U.max()) + 1 if len(seq_id_U) else 0
    return x_U.new_zeros(count, *x_U.shape[1:]).index_add(0, seq_id_U, x_U)[seq_id_U]


def weights(correction: Correction) -> list[float]:
    trainer = torch.tensor(TRAINER, dtype=torch.float64, requires_grad=True)
    found = importance_weights(trainer, torch.tensor(SAMPLER, dtype=torch.float64), LIVE, SEQ, by_sequence, correction)
    assert found is not None and not found.requires_grad
    return found[LIVE].tolist()


def test_token_weights_are_truncated_ratios() -> None:
    assert weights(Correction("token", 2.0)) == pytest.approx([math.exp(0.5), math.exp(-1), 2.0, math.exp(0.2)])


def test_sequence_weights_are_truncated_products() -> None:
    assert weights(Correction("sequence", 5.0)) == pytest.approx([math.exp(-0.5)] * 2 + [5.0] * 2, rel=1e-14)


def test_icepop_drops_what_is_out_of_bounds() -> None:
    assert weights(Correction("icepop", 5.0, 0.5)) == pytest.approx([math.exp(0.5), 0.0, 0.0, math.exp(0.2)])
    edge = importance_weights(
        torch.zeros(1), torch.zeros(1), LIVE[:1], SEQ[:1], by_sequence, Correction("icepop", 1, 1)
    )
    assert edge is not None and edge.tolist() == [1.0]


def test_without_a_correction_there_are_no_weights() -> None:
    nothing = torch.zeros(1)
    assert importance_weights(nothing, nothing, LIVE[:1], SEQ[:1], by_sequence, Correction()) is None


@pytest.mark.parametrize("kind", IMPORTANCE)
def test_weights_stay_finite(kind: str) -> None:
    old = torch.tensor([0.0, -math.inf, -math.inf, -300.0])
    sampler = torch.tensor([-math.inf, 0.0, -math.inf, -1.0])
    live, seq = torch.ones(4, dtype=torch.bool), torch.arange(4)
    found = importance_weights(old, sampler, live, seq, by_sequence, Correction(kind, 1e30))
    assert found is not None
    assert found.tolist() == pytest.approx([math.exp(20), math.exp(-20), 1.0, math.exp(-20)], rel=1e-5)


def test_every_configurable_kind_exists() -> None:
    assert {"none", *IMPORTANCE} == {kind.value for kind in RolloutIs}
    assert {"none", *REJECTIONS} == {kind.value for kind in RolloutRs}


@pytest.mark.parametrize(
    ("kind", "upper", "lower", "kept"),
    [  # sums of d: -0.5, 2.2; means: -0.25, 1.1
        ("seq_sum_k1", math.exp(2.2) + 1e-9, math.exp(-0.5) - 1e-9, [True, True]),
        ("seq_sum_k1", math.exp(2.2) - 1e-9, math.exp(-0.5) + 1e-9, [False, False]),
        ("seq_mean_k1", 3.0, 0.7, [True, False]),
        ("seq_mean_k1", 3.1, 0.8, [False, True]),
        ("seq_sum_k2", 0.7, 0.0, [True, False]),  # 0.125 + 0.5, 2 + 0.02
        ("seq_mean_k2", 0.35, 0.0, [True, False]),
        ("seq_sum_k3", 0.6, 0.0, [True, False]),  # 0.149 + 0.368, 4.389 + 0.021
        ("seq_mean_k3", 2.3, 0.0, [True, True]),
    ],
)
def test_rejection(kind: str, upper: float, lower: float, kept: list[bool]) -> None:
    parts = divergences(torch.tensor(D, dtype=torch.float64))
    sums = {name: torch.stack([x[:2].sum(), x[2:].sum()]) for name, x in parts.items()}
    assert kept_N(sums, torch.tensor([2.0, 2.0]), kind, lower, upper).tolist() == kept


@pytest.mark.parametrize("kind", REJECTIONS)
def test_rejection_at_the_extremes(kind: str) -> None:
    """No token: kept. NaN: rejected. An impossible token: out of any usual bound."""
    nan = {name: torch.tensor([0.0, math.nan]) for name in ("k1", "k2", "k3")}
    assert kept_N(nan, torch.tensor([0.0, 3.0]), kind, 0.5, 2.0).tolist() == [True, False]
    far = divergences(torch.tensor([1e30, -1e30]))
    assert kept_N(far, torch.ones(2), kind, 0.5, 2.0).tolist() == [False, False]


def stats_of(correction: Correction) -> dict[str, float]:
    stats = gap_stats(torch.tensor(TRAINER), torch.tensor(SAMPLER), LIVE, SEQ, by_sequence, correction)
    assert all(x.dtype == torch.float64 and x.shape == () for x in stats.values())
    return {name: x.item() for name, x in stats.items()}


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def spread(values: list[float]) -> float:
    return math.sqrt(mean([x * x for x in values]) - mean(values) ** 2)


def test_all_metrics_by_hand() -> None:
    metrics = gap_metrics(stats_of(Correction("token", 2.0)))
    trainer, sampler = [-1.0, -2.0, -0.5, -3.0], [-1.5, -1.0, -2.5, -3.2]
    ratios = [math.exp(d) for d in D]
    applied = [min(r, 2.0) for r in ratios]
    p, q = [math.exp(x) for x in trainer], [math.exp(x) for x in sampler]
    seq_ratios = [mean(ratios[:2]), mean(ratios[2:])]
    log_trainer, log_sampler = [1.5, 1.75], [1.25, 2.85]  # minus the mean logprob of each sequence
    differences = [0.25, -1.1]  # sampler's mean logprob minus trainer's
    covariance = mean([a * b for a, b in zip(p, q, strict=True)]) - mean(p) * mean(q)
    gaps = [abs(a - b) for a, b in zip(p, q, strict=True)]
    rc, diff = "rollout_corr/", "training/rollout_probs_diff"
    expected = {
        "gap/abs_mean": mean([abs(d) for d in D]),
        "gap/mean": mean(D),
        "gap/abs_max": 2.0,
        rc + "kl": -mean(D),
        rc + "k3_kl": mean([math.exp(d) - d - 1 for d in D]),
        rc + "chi2_token": mean([r * r for r in ratios]) - 1,
        rc + "chi2_seq": mean([math.exp(-1.0), math.exp(4.4)]) - 1,
        rc + "rollout_is_mean": mean(ratios),
        rc + "rollout_is_std": spread(ratios),
        rc + "rollout_is_max": max(ratios),
        rc + "rollout_is_min": min(ratios),
        rc + "rollout_is_ratio_fraction_high": 0.25,
        rc + "rollout_is_ratio_fraction_low": 0.25,
        rc + "rollout_is_applied_mean": mean(applied),
        rc + "rollout_is_eff_sample_size": sum(applied) ** 2 / (4 * sum(w * w for w in applied)),
        rc + "rollout_is_seq_mean": mean(seq_ratios),
        rc + "rollout_is_seq_std": spread(seq_ratios),
        rc + "rollout_is_seq_max": max(seq_ratios),
        rc + "rollout_is_seq_min": min(seq_ratios),
        rc + "rollout_is_seq_max_deviation": max(abs(x - 1) for x in seq_ratios),
        rc + "rollout_is_seq_fraction_high": 0.5,
        rc + "rollout_is_seq_fraction_low": 0.0,
        rc + "training_ppl": mean([math.exp(x) for x in log_trainer]),
        rc + "training_log_ppl": mean(log_trainer),
        rc + "rollout_ppl": mean([math.exp(x) for x in log_sampler]),
        rc + "rollout_log_ppl": mean(log_sampler),
        rc + "log_ppl_diff": mean(differences),
        rc + "log_ppl_abs_diff": mean([abs(x) for x in differences]),
        rc + "log_ppl_diff_max": 0.25,
        rc + "log_ppl_diff_min": -1.1,
        rc + "ppl_ratio": mean([math.exp(x) for x in differences]),
        diff + "_mean": mean(gaps),
        diff + "_std": spread(gaps),
        diff + "_max": max(gaps),
        "training/rollout_actor_probs_pearson_corr": covariance / (spread(p) * spread(q)),
    }
    assert metrics == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("kind", ["none", "sequence", "icepop"])
def test_applied_weights_are_those_of_the_correction(kind: str) -> None:
    correction = Correction(kind, 5.0, 0.5) if kind != "none" else Correction()
    applied = weights(correction) if kind != "none" else [1.0] * 4
    metrics = gap_metrics(stats_of(correction))
    assert metrics["rollout_corr/rollout_is_applied_mean"] == pytest.approx(mean(applied), rel=1e-6)
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(mean([math.exp(d) for d in D]), rel=1e-6)


def test_equal_logprobs_have_no_gap_and_full_sample_size() -> None:
    logprobs, live = torch.tensor([-1.0, -2.0, -3.0]), torch.ones(3, dtype=torch.bool)
    stats = gap_stats(logprobs, logprobs, live, torch.tensor([0, 0, 1]), by_sequence, Correction("token", 2.0))
    metrics = gap_metrics({name: x.item() for name, x in stats.items()})
    ones = {
        "rollout_is_eff_sample_size",
        "rollout_is_mean",
        "rollout_is_seq_mean",
        "rollout_is_applied_mean",
        "ppl_ratio",
    }
    assert all(metrics[f"rollout_corr/{name}"] == 1 for name in ones)
    zeros = {"kl", "k3_kl", "chi2_token", "chi2_seq", "rollout_is_std", "log_ppl_diff", "log_ppl_diff_max"}
    assert all(metrics[f"rollout_corr/{name}"] == 0 for name in zeros)
    assert metrics["gap/abs_mean"] == metrics["training/rollout_probs_diff_max"] == 0
    assert metrics["training/rollout_actor_probs_pearson_corr"] == pytest.approx(1)


@pytest.mark.parametrize("count", [0, 3])
def test_no_live_token_gives_zeros(count: int) -> None:
    nan, ids = torch.full((count,), math.nan), torch.zeros(count, dtype=torch.int64)
    stats = gap_stats(nan, nan, torch.zeros(count, dtype=torch.bool), ids, by_sequence, Correction("sequence", 2.0))
    assert all(x.item() == 0 for x in stats.values())


def test_an_impossible_token_shows_as_an_infinite_gap() -> None:
    one, ids = torch.tensor([True]), torch.tensor([0])
    stats = gap_stats(torch.tensor([-math.inf]), torch.tensor([-1.0]), one, ids, by_sequence, Correction("token", 2.0))
    assert stats["gap_abs"].item() == stats["gap_abs_max"].item() == math.inf
    assert math.isfinite(stats["gap_k3"].item()) and math.isfinite(stats["importance"].item())
