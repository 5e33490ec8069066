"""How far sampler and trainer are apart, in numbers that are always logged, under verl's names where it has one.

`gap_stats` sums on the device; `gap_metrics` divides once, after the last reduction. Per token d = trainer - sampler
logprob and r = e^d (d held within +-20); of a sequence of n tokens the mean logprobs, the sum of d and the mean of r.
A sequence's number is counted once by giving each of its tokens 1/n of it, wherever the tokens lie. Extremes leave as
maxima of numbers that are never negative, so the smallest is 1 / (the largest inverse).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fastgrpo.algorithm.kl import LOG_RATIO_LIMIT, kl_estimate, log_ratio
from fastgrpo.algorithm.mismatch import Correction, importance_weights
from fastgrpo.algorithm.stats import SegmentSum, Stats, live_max, live_sum, select


def gap_stats(
    logprobs_U: Tensor,
    sampler_U: Tensor,
    live_U: Tensor,
    seq_id_U: Tensor,
    segment_sum: SegmentSum,
    correction: Correction,
) -> Stats:
    """Over the tokens of live_U (bool), whose logprobs come from the weights of the rollout. See `gap_metrics`."""
    with torch.no_grad():
        logprobs_U, sampler_U = logprobs_U.double(), sampler_U.double()
        token = _token_stats(logprobs_U, sampler_U, live_U)
        return (
            token
            | _applied(logprobs_U, sampler_U, live_U, seq_id_U, segment_sum, correction)
            | _sequence_stats(logprobs_U, sampler_U, live_U, seq_id_U, segment_sum, correction)
        )


def _token_stats(logprobs_U: Tensor, sampler_U: Tensor, live_U: Tensor) -> Stats:
    gap_U = logprobs_U - sampler_U  # not held: an impossible token shows as inf
    ratio_U = log_ratio(logprobs_U, sampler_U).exp()
    p_U, q_U = logprobs_U.exp(), sampler_U.exp()
    return {
        "gap_tokens": live_U.double().sum(),
        "gap": live_sum(live_U, gap_U),
        "gap_abs": live_sum(live_U, gap_U.abs()),
        "gap_abs_max": live_max(live_U, gap_U.abs()),
        "gap_k3": live_sum(live_U, kl_estimate(sampler_U, logprobs_U, "k3")),
        "is": live_sum(live_U, ratio_U),
        "is_sq": live_sum(live_U, ratio_U.square()),
        "is_max": live_max(live_U, ratio_U),
        "is_inverse_max": live_max(live_U, 1 / ratio_U),
        "probs_diff": live_sum(live_U, (p_U - q_U).abs()),
        "probs_diff_sq": live_sum(live_U, (p_U - q_U).square()),
        "probs_diff_max": live_max(live_U, (p_U - q_U).abs()),
        "probs_p": live_sum(live_U, p_U),
        "probs_q": live_sum(live_U, q_U),
        "probs_pp": live_sum(live_U, p_U.square()),
        "probs_qq": live_sum(live_U, q_U.square()),
        "probs_pq": live_sum(live_U, p_U * q_U),
    }


def _applied(
    logprobs_U: Tensor,
    sampler_U: Tensor,
    live_U: Tensor,
    seq_id_U: Tensor,
    segment_sum: SegmentSum,
    correction: Correction,
) -> Stats:
    """The weights as they act on the loss (1 without a correction), and the ratios outside the bounds."""
    ratio_U = log_ratio(logprobs_U, sampler_U).exp()
    weights_U = importance_weights(logprobs_U, sampler_U, live_U, seq_id_U, segment_sum, correction)
    weights_U = torch.ones_like(ratio_U) if weights_U is None else weights_U
    lower = _lower(correction)
    return {
        "importance": live_sum(live_U, weights_U),
        "importance_sq": live_sum(live_U, weights_U.square()),
        "is_high": live_sum(live_U, ratio_U > correction.upper),
        "is_low": live_sum(live_U, ratio_U < lower),
    }


def _sequence_stats(
    logprobs_U: Tensor,
    sampler_U: Tensor,
    live_U: Tensor,
    seq_id_U: Tensor,
    segment_sum: SegmentSum,
    correction: Correction,
) -> Stats:
    d_U = log_ratio(logprobs_U, sampler_U)
    columns = torch.stack([torch.ones_like(d_U), logprobs_U, sampler_U, d_U, d_U.exp()], dim=1)
    sums_U5 = segment_sum(torch.where(live_U.unsqueeze(1), columns, 0.0), seq_id_U)
    count_U, trainer_U, drawn_U, log_product_U, ratios_U = sums_U5.unbind(1)
    count_U = count_U.clamp(min=1)
    trainer_U, drawn_U, mean_is_U = trainer_U / count_U, drawn_U / count_U, ratios_U / count_U
    log_ppl_diff_U = (drawn_U - trainer_U).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    chi2_U = (2 * log_product_U.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)).exp()

    def per_sequence(x_U: Tensor) -> Tensor:
        return live_sum(live_U, x_U / count_U)

    return {
        "seqs": per_sequence(select(live_U, torch.ones_like(d_U))),
        "training_ppl": per_sequence((-trainer_U).exp()),
        "training_log_ppl": per_sequence(-trainer_U),
        "rollout_ppl": per_sequence((-drawn_U).exp()),
        "rollout_log_ppl": per_sequence(-drawn_U),
        "log_ppl_diff": per_sequence(log_ppl_diff_U),
        "log_ppl_abs_diff": per_sequence(log_ppl_diff_U.abs()),
        "ppl_ratio": per_sequence(log_ppl_diff_U.exp()),
        "ppl_ratio_max": live_max(live_U, log_ppl_diff_U.exp()),
        "ppl_ratio_inverse_max": live_max(live_U, (-log_ppl_diff_U).exp()),
        "chi2_seq": per_sequence(chi2_U),
        "seq_is": per_sequence(mean_is_U),
        "seq_is_sq": per_sequence(mean_is_U.square()),
        "seq_is_max": live_max(live_U, mean_is_U),
        "seq_is_inverse_max": live_max(live_U, 1 / mean_is_U),
        "seq_is_deviation_max": live_max(live_U, (mean_is_U - 1).abs()),
        "seq_is_high": per_sequence((mean_is_U > correction.upper).double()),
        "seq_is_low": per_sequence((mean_is_U < _lower(correction)).double()),
    }


def _lower(correction: Correction) -> float:
    """What counts as low in the metrics: the bound that acts, or the inverse of the upper one."""
    return correction.lower or 1 / correction.upper


def gap_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """From the reduced sums of `gap_stats`, all of them over the trained tokens or their sequences:

    gap/abs_mean, mean, abs_max                     of d, in nats
    rollout_corr/kl, k3_kl, chi2_token, chi2_seq    KL(sampler || trainer) by k1 and k3; mean of r^2 - 1, token and
                                                    sequence
    rollout_corr/rollout_is_mean, std, min, max, ratio_fraction_high, ratio_fraction_low      of r before any bound
    rollout_corr/rollout_is_applied_mean, rollout_is_eff_sample_size    of the weights that act; (sum w)^2 / (n sum w^2)
    rollout_corr/rollout_is_seq_*                   of the mean of r over each sequence
    rollout_corr/training_ppl, rollout_ppl, ...     of each sequence's perplexity; log_ppl_diff = rollout's mean logprob
                                                    minus the trainer's
    training/rollout_probs_diff_mean, std, max, rollout_actor_probs_pearson_corr    of the tokens' probabilities
    """
    tokens, seqs = sums["gap_tokens"], max(sums["seqs"], 1.0)
    mean = {name: value / tokens for name, value in sums.items()}
    seq = {name: value / seqs for name, value in sums.items()}
    return {
        "gap/abs_mean": mean["gap_abs"],
        "gap/mean": mean["gap"],
        "gap/abs_max": sums["gap_abs_max"],
        "rollout_corr/kl": -mean["gap"],
        "rollout_corr/k3_kl": mean["gap_k3"],
        "rollout_corr/chi2_token": mean["is_sq"] - 1,
        "rollout_corr/chi2_seq": seq["chi2_seq"] - 1,
        "rollout_corr/rollout_is_mean": mean["is"],
        "rollout_corr/rollout_is_std": _std(mean["is"], mean["is_sq"]),
        "rollout_corr/rollout_is_max": sums["is_max"],
        "rollout_corr/rollout_is_min": _inverse(sums["is_inverse_max"]),
        "rollout_corr/rollout_is_ratio_fraction_high": mean["is_high"],
        "rollout_corr/rollout_is_ratio_fraction_low": mean["is_low"],
        "rollout_corr/rollout_is_applied_mean": mean["importance"],
        "rollout_corr/rollout_is_eff_sample_size": (
            sums["importance"] ** 2 / (sums["importance_sq"] * tokens) if sums["importance_sq"] else 0.0
        ),
        "rollout_corr/rollout_is_seq_mean": seq["seq_is"],
        "rollout_corr/rollout_is_seq_std": _std(seq["seq_is"], seq["seq_is_sq"]),
        "rollout_corr/rollout_is_seq_max": sums["seq_is_max"],
        "rollout_corr/rollout_is_seq_min": _inverse(sums["seq_is_inverse_max"]),
        "rollout_corr/rollout_is_seq_max_deviation": sums["seq_is_deviation_max"],
        "rollout_corr/rollout_is_seq_fraction_high": seq["seq_is_high"],
        "rollout_corr/rollout_is_seq_fraction_low": seq["seq_is_low"],
        **{f"rollout_corr/{name}": seq[name] for name in _PERPLEXITIES},
        "rollout_corr/log_ppl_diff_max": _log(sums["ppl_ratio_max"]),
        "rollout_corr/log_ppl_diff_min": -_log(sums["ppl_ratio_inverse_max"]),
        "training/rollout_probs_diff_mean": mean["probs_diff"],
        "training/rollout_probs_diff_std": _std(mean["probs_diff"], mean["probs_diff_sq"]),
        "training/rollout_probs_diff_max": sums["probs_diff_max"],
        "training/rollout_actor_probs_pearson_corr": _correlation(mean),
    }


_PERPLEXITIES = (
    "training_ppl",
    "training_log_ppl",
    "rollout_ppl",
    "rollout_log_ppl",
    "log_ppl_diff",
    "log_ppl_abs_diff",
    "ppl_ratio",
)


def _std(mean: float, mean_square: float) -> float:
    return math.sqrt(max(mean_square - mean * mean, 0.0))


def _inverse(x: float) -> float:
    return 1 / x if x else 0.0


def _log(x: float) -> float:
    return math.log(x) if x else 0.0


def _correlation(mean: Mapping[str, float]) -> float:
    covariance = mean["probs_pq"] - mean["probs_p"] * mean["probs_q"]
    scale = _std(mean["probs_p"], mean["probs_pp"]) * _std(mean["probs_q"], mean["probs_qq"])
    return min(max(covariance / scale, -1.0), 1.0) if scale else 0.0
