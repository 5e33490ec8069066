"""Surrogates of whole sequences: every token of a sequence of n live tokens counts with the same ratio, made from all
of them. With d = x - old and A the sequence's advantage:

    gspo       s = exp(mean d),  max(-s A, -clip(s, 1 - low, 1 + high) A)
    geo_mean   s = exp(mean of d bounded by [-low, high] on the side that A asks for),  -s A

The sums over a sequence cross the sequence-parallel group, backward included, so d loss / d x_t = -A s / n for every
token that was not bounded, wherever it lies; the token weights then make the aggregate that `loss_agg_mode` names.
"""

from __future__ import annotations

import torch

from fastgrpo.algorithm.kl import LOG_RATIO_LIMIT, log_ratio, raw_log_ratio
from fastgrpo.algorithm.losses.contract import LossConfig, Rows, Surrogate, flag
from fastgrpo.algorithm.losses.token_level import clipped_surrogate


def gspo(rows: Rows, cfg: LossConfig) -> Surrogate:
    """Group sequence policy optimisation (arXiv 2507.18071): the geometric mean of the token ratios is clipped,
    so that a sequence is kept or left out as a whole. Its bounds are narrow, of the order of 1e-4; no dual clip."""
    mean_U = rows.mean_over_sequence(raw_log_ratio(rows.logprobs_U, rows.old_logprobs_U))
    ratio_U = mean_U.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    loss_U, flags_U = clipped_surrogate(ratio_U, rows.advantages_U, cfg, dual=False)
    return Surrogate(loss_U, ratio_U, flags_U)


def geo_mean(rows: Rows, cfg: LossConfig) -> Surrogate:
    """Geometric-mean policy optimisation (GMPO, arXiv 2507.20673): each token's log-ratio is bounded, then averaged, so
    that one outlier moves the sequence little. The bounds are on the log-ratio; the paper's are 0.4 on both sides."""
    d_U = log_ratio(rows.logprobs_U, rows.old_logprobs_U)
    positive_U, acts_U = rows.advantages_U > 0, rows.advantages_U != 0
    lower_U = torch.full_like(d_U, -cfg.clip_low).masked_fill(positive_U, -torch.inf)
    upper_U = torch.full_like(d_U, torch.inf).masked_fill(positive_U, cfg.clip_high)
    ratio_U = rows.mean_over_sequence(d_U.clamp(lower_U, upper_U)).exp()
    flags_U = flag((d_U < lower_U) & acts_U, (d_U > upper_U) & acts_U)
    return Surrogate(-rows.advantages_U * ratio_U, ratio_U, flags_U)
