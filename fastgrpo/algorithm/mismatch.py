"""What to do about, and how to measure, the gap between the engine that drew the tokens and the trainer.

The two compute the same softmax with other kernels, so the samples are slightly off-policy from the start. The policy
loss of a token is multiplied by the ratio trainer / sampler, truncated from above (Yao et al., "Your efficient RL
framework secretly brings you off-policy RL training", 2025). Weights multiply the loss and leave the counts alone.
"""

from __future__ import annotations

from torch import Tensor

from fastgrpo.algorithm.kl import kl_estimate, log_ratio
from fastgrpo.algorithm.stats import Stats, live_max, live_sum


def importance_weights(old_logprobs: Tensor, sampler_logprobs: Tensor, threshold: float) -> Tensor:
    """min(p_trainer / p_sampler, threshold) of each token: same shape, a constant (detached), log-ratio within +-20."""
    return log_ratio(old_logprobs, sampler_logprobs).exp().clamp(max=threshold).detach()


def gap_stats(logprobs_N: Tensor, sampler_logprobs_N: Tensor, live_N: Tensor, threshold: float | None) -> Stats:
    """How far trainer and sampler are apart on the tokens of live_N (bool), whose logprobs come from the same weights.

    d = logprobs - sampler_logprobs in nats, w = the importance weight; None: no truncation, the weights are those that
    would be. Returns (see stats.py for the reductions)
        gap_tokens                        how many
        gap, gap_abs, gap_abs_max         d and |d|; d is not cut, so an impossible token shows as inf
        gap_k3                            estimate of KL(sampler || trainer)
        gap_truncated                     tokens whose ratio was above the threshold
        importance, importance_sq         w and w^2; effective share of samples = (sum w)^2 / (gap_tokens * sum w^2)
    """
    gap_N = logprobs_N - sampler_logprobs_N
    limit = float("inf") if threshold is None else threshold
    weights_N = importance_weights(logprobs_N, sampler_logprobs_N, limit)
    return {
        "gap_tokens": live_N.double().sum(),
        "gap": live_sum(live_N, gap_N),
        "gap_abs": live_sum(live_N, gap_N.abs()),
        "gap_abs_max": live_max(live_N, gap_N.abs()),
        "gap_k3": live_sum(live_N, kl_estimate(sampler_logprobs_N, logprobs_N, "k3")),
        "gap_truncated": live_sum(live_N, log_ratio(logprobs_N, sampler_logprobs_N).exp() > limit),
        "importance": live_sum(live_N, weights_N),
        "importance_sq": live_sum(live_N, weights_N.square()),
    }
