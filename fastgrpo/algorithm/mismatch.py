"""What to do about the gap between the engine that drew the tokens and the trainer: importance weights, rejection.

The two compute the same softmax with other kernels, so the samples are slightly off-policy from the start. With
d = trainer - sampler logprobs under the weights of the rollout, the policy loss of a token is multiplied by

    token      min(e^d, upper)                          truncated importance sampling (Yao et al., "Your efficient RL
                                                        framework secretly brings you off-policy RL training", 2025)
    sequence   min(e^(sum of d over the sequence), upper)
    icepop     e^d where lower <= e^d <= upper, else 0  (Ling team, "Every step evolves", arXiv 2510.18855)

Weights multiply the loss and leave the counts alone. Rejection takes whole sequences out before the counts:

    seq_sum_k1    e^(sum of d) outside [lower, upper]    seq_mean_k1   e^(mean of d) outside it (geometric)
    seq_sum_k2, seq_sum_k3, seq_mean_k2, seq_mean_k3     sum or mean of d^2 / 2, of e^d - d - 1, above upper

Shape suffixes: U rows of this rank, N sequences of the step. How far the two are apart: mismatch_stats.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fastgrpo.algorithm.kl import LOG_RATIO_LIMIT, log_ratio
from fastgrpo.algorithm.stats import SegmentSum


@dataclass(frozen=True, slots=True)
class Correction:
    kind: str = "none"  # none, or a key of IMPORTANCE
    upper: float = math.inf  # most that a weight counts (icepop: above it, nothing)
    lower: float = 0.0  # icepop: below it, nothing
    bypass: bool = False  # the sampler's logprobs stand for old_logprobs, so the loss's own ratio does the correction

    def acting(self, *, has_ratio: bool) -> Correction:
        """What multiplies a loss that contains the ratio new / old, or does not: with bypass the former needs nothing,
        and the latter takes that ratio, policy over sampler, as its weight."""
        return replace(self, kind="none") if self.bypass and has_ratio else self


def importance_weights(
    old_U: Tensor, sampler_U: Tensor, live_U: Tensor, seq_id_U: Tensor, segment_sum: SegmentSum, correction: Correction
) -> Tensor | None:
    """Weight of each token, a constant (detached); None where there is no correction. Log-ratios are held within +-20,
    a sequence's sum as well. `live_U` (bool): the tokens that make up a sequence."""
    if correction.kind == "none":
        return None
    with torch.no_grad():
        d_U = log_ratio(old_U, sampler_U)
        return IMPORTANCE[correction.kind](d_U, live_U, seq_id_U, segment_sum, correction)


def _token(d_U: Tensor, live_U: Tensor, seq_id_U: Tensor, segment_sum: SegmentSum, c: Correction) -> Tensor:
    return d_U.exp().clamp(max=c.upper)


def _sequence(d_U: Tensor, live_U: Tensor, seq_id_U: Tensor, segment_sum: SegmentSum, c: Correction) -> Tensor:
    sum_U = segment_sum(torch.where(live_U, d_U, 0.0), seq_id_U)
    return sum_U.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().clamp(max=c.upper)


def _icepop(d_U: Tensor, live_U: Tensor, seq_id_U: Tensor, segment_sum: SegmentSum, c: Correction) -> Tensor:
    ratio_U = d_U.exp()
    return torch.where((ratio_U >= c.lower) & (ratio_U <= c.upper), ratio_U, 0.0)


IMPORTANCE: dict[str, Callable[[Tensor, Tensor, Tensor, SegmentSum, Correction], Tensor]] = {
    "token": _token,
    "sequence": _sequence,
    "icepop": _icepop,
}

REJECTIONS = tuple(f"seq_{over}_{kind}" for over in ("sum", "mean") for kind in ("k1", "k2", "k3"))


def divergences(d: Tensor) -> dict[str, Tensor]:
    """k1, k2, k3 of each token's d = trainer - sampler, same shape: what REJECTIONS sum up over a sequence."""
    d = d.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return {"k1": d, "k2": d.square() / 2, "k3": torch.expm1(d) - d}


def kept_N(sums_N: Mapping[str, Tensor], tokens_N: Tensor, kind: str, lower: float, upper: float) -> Tensor:
    """bool: the sequences that rejection keeps. `sums_N`: the divergences summed over each sequence's tokens;
    `kind`: one of REJECTIONS. A sequence without tokens is kept. NaN is rejected: a broken sequence must not train."""
    _, over, divergence = kind.split("_")
    value_N = sums_N[divergence] / (tokens_N.clamp(min=1) if over == "mean" else 1)
    if divergence == "k1":
        ratio_N = value_N.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        return (ratio_N >= lower) & (ratio_N <= upper)
    return value_N <= upper
