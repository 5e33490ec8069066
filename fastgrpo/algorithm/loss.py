"""Policy losses: each one registered pure function of this rank's rows, returning a sum.

Every normaliser is already in `weights_U` (batch/denominators.py), so a loss never divides, never sees a process group
and does not depend on how the batch was cut. What a loss needs of a whole sequence it gets from `segment_sum`, which
the caller has wired to the sequence-parallel group. Metrics leave as sums (stats.py).

The fused kernel computes `vanilla` inside the language-model head; this function is the same maths for any head, and
`token_stats` makes the metrics of both.

Shape suffixes: U rows of this rank, either all tokens of its share or only those that carry a weight; N any rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fastgrpo.algorithm.kl import kl_estimate, log_ratio
from fastgrpo.algorithm.mismatch import importance_weights
from fastgrpo.algorithm.stats import Stats, live_max, live_sum, select

# Bits of a token's flags: a bound that acted on it, so that the policy loss has no gradient there.
CLIP_LOW, CLIP_HIGH, DUAL_CLIP = 1, 2, 4

# (x_U, seq_id_U) -> x_U whose value is the sum of x over all tokens of the token's sequence, on every rank that holds a
# part of it; differentiable.
SegmentSum = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class LossConfig:
    clip_low: float  # the ratio counts from 1 - clip_low ...
    clip_high: float  # ... to 1 + clip_high
    clip_c: float  # dual clip, > 1 + clip_high: most that a ratio counts at a negative advantage
    kl_coef: float  # of the KL estimate to the reference; 0 needs no reference
    kl_type: str  # a key of kl.KL_ESTIMATORS
    entropy_coef: float  # entropy bonus; 0 needs no entropy
    importance_max: float | None  # truncation of the importance weights; None: no correction


@dataclass(frozen=True, slots=True)
class LossBatch:
    """What a loss knows of its tokens besides their logprobs; float32 where nothing else is said.

    A token with weight 0 contributes nothing, in value and gradient, whatever its other fields hold.
    """

    advantages_U: Tensor
    weights_U: Tensor  # factor of the token's loss in the sum
    ref_logprobs_U: Tensor | None
    sampler_logprobs_U: Tensor | None  # with cfg.importance_max: the importance weights are formed from it
    importance_U: Tensor | None  # importance weights formed elsewhere; they win
    entropy_U: Tensor | None  # with gradient when cfg.entropy_coef is not 0
    seq_id_U: Tensor  # int64


@dataclass(frozen=True, slots=True)
class LossOut:
    loss_sum: Tensor  # 0-dim, attached to the graph even when no token has a weight
    stats: Stats


class PolicyLossFn(Protocol):
    def __call__(
        self,
        logprobs_U: Tensor,
        old_logprobs_U: Tensor | None,
        batch: LossBatch,
        segment_sum: SegmentSum,
        cfg: LossConfig,
    ) -> LossOut: ...


def vanilla(
    logprobs_U: Tensor,
    old_logprobs_U: Tensor | None,
    batch: LossBatch,
    segment_sum: SegmentSum,
    cfg: LossConfig,
) -> LossOut:
    """Clipped surrogate with separate bounds and dual clip (PPO, arXiv 1707.06347; clip-higher: DAPO, arXiv 2503.14476;
    dual clip: arXiv 1912.09729), plus KL, minus entropy. Per token, with r = exp(logprob - old), A the advantage:

        weight * (importance * loss(r, A) + kl_coef * kl - entropy_coef * entropy)
        loss = max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A),  and for A < 0 at most -clip_c A

    logprobs_U: with gradient. old_logprobs_U: None when the weights are still those of the rollout (then r is exactly 1
    and the gradient -A). `segment_sum` goes unused: nothing here speaks of a whole sequence.
    """
    live_U = batch.weights_U != 0
    logprobs_U = select(live_U, logprobs_U)
    old_U = logprobs_U.detach() if old_logprobs_U is None else select(live_U, old_logprobs_U)
    ratio_U = log_ratio(logprobs_U, old_U).exp()
    loss_U, flags_U = clipped_surrogate(ratio_U, select(live_U, batch.advantages_U), cfg)
    importance_U = _importance(old_U, batch, live_U, cfg)
    if importance_U is not None:
        loss_U = loss_U * importance_U
    kl_U = None
    if batch.ref_logprobs_U is not None:
        kl_U = kl_estimate(logprobs_U, select(live_U, batch.ref_logprobs_U), cfg.kl_type)
        loss_U = loss_U + cfg.kl_coef * kl_U
    elif cfg.kl_coef:
        raise ValueError(f"kl_coef is {cfg.kl_coef} but the batch has no ref_logprobs_U")
    if batch.entropy_U is not None:
        loss_U = loss_U - cfg.entropy_coef * select(live_U, batch.entropy_U)
    elif cfg.entropy_coef:
        raise ValueError(f"entropy_coef is {cfg.entropy_coef} but the batch has no entropy_U")
    stats = token_stats(live_U, ratio_U, flags_U, kl_U, batch.entropy_U)
    return LossOut((loss_U * batch.weights_U).sum(), stats)


def clipped_surrogate(ratio_U: Tensor, advantages_U: Tensor, cfg: LossConfig) -> tuple[Tensor, Tensor]:
    """Loss of each token, not weighted, and its flags (int32). The nested max and min of the formula come down to one
    bound on the ratio: from above where A > 0, from below and (dual clip) far above where A < 0."""
    negative_U = advantages_U < 0
    lower_U = torch.zeros_like(ratio_U).masked_fill(negative_U, 1 - cfg.clip_low)
    upper_U = torch.full_like(ratio_U, 1 + cfg.clip_high).masked_fill(negative_U, cfg.clip_c)
    above_U = (ratio_U > upper_U) & (advantages_U != 0)
    flags_U = (
        CLIP_LOW * (ratio_U < lower_U).int()
        + CLIP_HIGH * (above_U & ~negative_U).int()
        + DUAL_CLIP * (above_U & negative_U).int()
    )
    return -advantages_U * ratio_U.clamp(lower_U, upper_U), flags_U


def token_stats(
    live_N: Tensor, ratio_N: Tensor, flags_N: Tensor, kl_N: Tensor | None, entropy_N: Tensor | None
) -> Stats:
    """Metrics of the tokens of live_N (bool) from what a loss, plain or fused, knows of each: ratio new / old, flags
    (bits CLIP_LOW, CLIP_HIGH, DUAL_CLIP), KL to the reference, entropy; the last two only if given.

    Returns (see stats.py) tokens; clip_low, clip_high, dual_clip: tokens whose gradient that bound removed; ratio,
    ratio_max; old_kl: estimate (k1) of KL(old || new), sum of -log ratio; kl; entropy.
    """
    stats = {
        "tokens": live_N.double().sum(),
        "clip_low": live_sum(live_N, flags_N & CLIP_LOW != 0),
        "clip_high": live_sum(live_N, flags_N & CLIP_HIGH != 0),
        "dual_clip": live_sum(live_N, flags_N & DUAL_CLIP != 0),
        "ratio": live_sum(live_N, ratio_N),
        "ratio_max": live_max(live_N, ratio_N),
        "old_kl": live_sum(live_N, -ratio_N.detach().log()),
    }
    if kl_N is not None:
        stats["kl"] = live_sum(live_N, kl_N)
    if entropy_N is not None:
        stats["entropy"] = live_sum(live_N, entropy_N)
    return stats


def _importance(old_U: Tensor, batch: LossBatch, live_U: Tensor, cfg: LossConfig) -> Tensor | None:
    """Importance weights: the given ones, or formed from the logprobs at rollout time, or None."""
    if batch.importance_U is not None:
        return select(live_U, batch.importance_U).detach()
    if batch.sampler_logprobs_U is None or cfg.importance_max is None:
        return None
    return importance_weights(old_U, select(live_U, batch.sampler_logprobs_U), cfg.importance_max)


POLICY_LOSSES: dict[str, PolicyLossFn] = {"vanilla": vanilla}
