"""Policy losses: each one registered pure function of this rank's rows, returning a sum.

    per token:  weight * (importance * surrogate(r, A) + kl_coef * kl - entropy_coef * entropy)

Every normaliser is already in `weights_U` (batch/denominators.py), so a loss never divides by a count of the batch,
never sees a process group and does not depend on how the batch was cut. What a loss needs of a whole sequence it gets
from `segment_sum`, which the caller has wired to the sequence-parallel group. Metrics leave as sums (stats.py).

The surrogates are in token_level.py and sequence_level.py, one function each; what they share is here. The fused kernel
computes some of them inside the language-model head (policy/head.py says which); these functions are the same maths for
any head, and `token_stats` makes the metrics of both.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from fastgrpo.algorithm.kl import kl_estimate
from fastgrpo.algorithm.losses.contract import (
    CLIP_HIGH,
    CLIP_LOW,
    DUAL_CLIP,
    LossBatch,
    LossConfig,
    LossOut,
    PolicyLossFn,
    Rows,
    SurrogateFn,
    token_stats,
)
from fastgrpo.algorithm.losses.sequence_level import geo_mean, gspo
from fastgrpo.algorithm.losses.token_level import cispo, dppo_tv, reinforce, sapo, vanilla
from fastgrpo.algorithm.mismatch import importance_weights
from fastgrpo.algorithm.stats import SegmentSum, select

SURROGATES: dict[str, SurrogateFn] = {
    "vanilla": vanilla,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "dppo_tv": dppo_tv,
    "geo_mean": geo_mean,
    "reinforce": reinforce,
}
RATIO_FREE = frozenset({"reinforce"})  # losses whose gradient does not contain new / old


def policy_loss(
    logprobs_U: Tensor,
    old_logprobs_U: Tensor | None,
    batch: LossBatch,
    segment_sum: SegmentSum,
    cfg: LossConfig,
    *,
    name: str,
) -> LossOut:
    """logprobs_U: with gradient. old_logprobs_U: None when the weights are still those of the rollout (then r is
    exactly 1 and the gradient that of r = 1). Raises ValueError for a term whose input is missing."""
    live_U = batch.weights_U != 0
    logprobs_U = select(live_U, logprobs_U)
    sampler_U = None if batch.sampler_logprobs_U is None else select(live_U, batch.sampler_logprobs_U)
    old_U = logprobs_U.detach() if old_logprobs_U is None else select(live_U, old_logprobs_U)
    if cfg.correction.bypass:
        if sampler_U is None:
            raise ValueError("correction.bypass takes the sampler's logprobs as old, but the batch has none")
        old_U = sampler_U
    rows = Rows(live_U, logprobs_U, old_U, select(live_U, batch.advantages_U), batch.seq_id_U, segment_sum)
    surrogate = SURROGATES[name](rows, cfg)
    loss_U = surrogate.loss_U
    if sampler_U is not None:
        at_rollout_U = logprobs_U.detach() if cfg.correction.bypass else old_U
        acting = cfg.correction.acting(has_ratio=name not in RATIO_FREE)
        weights_U = importance_weights(at_rollout_U, sampler_U, live_U, batch.seq_id_U, segment_sum, acting)
        loss_U = loss_U if weights_U is None else loss_U * weights_U
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
    stats = token_stats(live_U, surrogate.ratio_U, surrogate.flags_U, kl_U, batch.entropy_U)
    return LossOut((loss_U * batch.weights_U).sum(), stats)


POLICY_LOSSES: dict[str, PolicyLossFn] = {name: partial(policy_loss, name=name) for name in SURROGATES}

__all__ = [
    "CLIP_HIGH",
    "CLIP_LOW",
    "DUAL_CLIP",
    "POLICY_LOSSES",
    "RATIO_FREE",
    "SURROGATES",
    "LossBatch",
    "LossConfig",
    "LossOut",
    "PolicyLossFn",
    "SegmentSum",
    "policy_loss",
    "token_stats",
]
