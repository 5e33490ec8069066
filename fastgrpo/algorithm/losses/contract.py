"""What a policy loss is given and gives, and the metrics of its tokens.

Shape suffixes: U rows of this rank, either all tokens of its share or only those that carry a weight; N any rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from fastgrpo.algorithm.kl import log_ratio
from fastgrpo.algorithm.mismatch import Correction
from fastgrpo.algorithm.stats import SegmentSum, Stats, live_max, live_sum

# Bits of a token's flags: a bound that acted on it. In vanilla, gspo, geo_mean and dppo_tv the policy loss has no
# gradient there; in cispo the token's weight was cut.
CLIP_LOW, CLIP_HIGH, DUAL_CLIP = 1, 2, 4


@dataclass(frozen=True, slots=True)
class LossConfig:
    clip_low: float = 0.2  # the ratio counts from 1 - clip_low ...
    clip_high: float = 0.2  # ... to 1 + clip_high (dppo_tv: bounds on the change of the probability)
    clip_c: float = 3.0  # vanilla: most that a ratio counts at a negative advantage; dppo_tv: at any
    tau_pos: float = 1.0  # sapo, at positive advantages
    tau_neg: float = 1.05  # sapo, at the others
    kl_coef: float = 0.0  # of the KL estimate to the reference; 0 needs no reference
    kl_type: str = "k3"  # a key of kl.KL_ESTIMATORS
    entropy_coef: float = 0.0  # entropy bonus; 0 needs no entropy
    correction: Correction = field(default_factory=Correction)  # of the gap between sampler and trainer


@dataclass(frozen=True, slots=True)
class LossBatch:
    """What a loss knows of its tokens besides their logprobs; float32 where nothing else is said.

    A token with weight 0 contributes nothing, in value and gradient, whatever its other fields hold.
    """

    advantages_U: Tensor  # the same for all tokens of a sequence
    weights_U: Tensor  # factor of the token's loss in the sum
    ref_logprobs_U: Tensor | None
    sampler_logprobs_U: Tensor | None  # the importance weights of cfg.correction are formed from it
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


@dataclass(frozen=True, slots=True)
class Rows:
    """The live tokens of a LossBatch, zeros elsewhere, as a surrogate sees them."""

    live_U: Tensor  # bool
    logprobs_U: Tensor  # with gradient
    old_logprobs_U: Tensor
    advantages_U: Tensor
    seq_id_U: Tensor
    segment_sum: SegmentSum

    def mean_over_sequence(self, x_U: Tensor) -> Tensor:
        """Mean of x over the live tokens of each token's sequence; 0 at the others. Differentiable."""
        live_U = self.live_U.to(x_U.dtype)
        sums_U2 = self.segment_sum((x_U * live_U).unsqueeze(1), self.seq_id_U).squeeze(1)
        return sums_U2 / self.segment_sum(live_U, self.seq_id_U).clamp(min=1) * live_U


@dataclass(frozen=True, slots=True)
class Surrogate:
    loss_U: Tensor  # of each token, not weighted
    ratio_U: Tensor  # new / old probability that it counted with, for the metrics
    flags_U: Tensor  # int32


SurrogateFn = Callable[[Rows, LossConfig], Surrogate]


def token_stats(
    live_N: Tensor, ratio_N: Tensor, flags_N: Tensor, kl_N: Tensor | None, entropy_N: Tensor | None
) -> Stats:
    """Metrics of the tokens of live_N (bool) from what a loss, plain or fused, knows of each: ratio new / old, flags
    (bits CLIP_LOW, CLIP_HIGH, DUAL_CLIP), KL to the reference, entropy; the last two only if given.

    Returns (see stats.py) tokens; clip_low, clip_high, dual_clip: tokens on which that bound acted; ratio,
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


def token_ratio(rows: Rows) -> Tensor:
    """New over old probability of each token, log-ratio within +-20."""
    return log_ratio(rows.logprobs_U, rows.old_logprobs_U).exp()


def flag(low_U: Tensor, high_U: Tensor, dual_U: Tensor | None = None) -> Tensor:
    flags_U = CLIP_LOW * low_U.int() + CLIP_HIGH * high_U.int()
    return flags_U if dual_U is None else flags_U + DUAL_CLIP * dual_U.int()
