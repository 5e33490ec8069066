"""Surrogates of single tokens: nothing here speaks of a whole sequence. With x the logprob, r = exp(x - old) and A the
advantage (sg: no gradient flows through it):

    vanilla    max(-r A, -clip(r, 1 - low, 1 + high) A), for A < 0 at most -c A
    cispo      -sg(clip(r, 1 - low, 1 + high)) A x
    sapo       -A 4/tau sigmoid(tau (r - 1)),  tau = tau_pos where A > 0, else tau_neg
    dppo_tv    -sg(min(r, c)) A x inside the trust region, else 0
    reinforce  -A x
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastgrpo.algorithm.losses.contract import LossConfig, Rows, Surrogate, flag, token_ratio


def vanilla(rows: Rows, cfg: LossConfig) -> Surrogate:
    """Clipped surrogate with separate bounds and dual clip (PPO, arXiv 1707.06347; clip-higher: DAPO, arXiv 2503.14476;
    dual clip: arXiv 1912.09729)."""
    ratio_U = token_ratio(rows)
    loss_U, flags_U = clipped_surrogate(ratio_U, rows.advantages_U, cfg, dual=True)
    return Surrogate(loss_U, ratio_U, flags_U)


def clipped_surrogate(ratio_U: Tensor, advantages_U: Tensor, cfg: LossConfig, *, dual: bool) -> tuple[Tensor, Tensor]:
    """Loss of each token, not weighted, and its flags (int32). The nested max and min of the formula come down to one
    bound on the ratio: from above where A > 0, from below and (`dual`) far above where A < 0."""
    negative_U = advantages_U < 0
    lower_U = torch.zeros_like(ratio_U).masked_fill(negative_U, 1 - cfg.clip_low)
    upper_U = torch.full_like(ratio_U, 1 + cfg.clip_high).masked_fill(negative_U, cfg.clip_c if dual else torch.inf)
    above_U = (ratio_U > upper_U) & (advantages_U != 0)
    flags_U = flag(ratio_U < lower_U, above_U & ~negative_U, above_U & negative_U)
    return -advantages_U * ratio_U.clamp(lower_U, upper_U), flags_U


def cispo(rows: Rows, cfg: LossConfig) -> Surrogate:
    """The ratio is a clipped, constant weight of the log-likelihood: no token ever loses its gradient (MiniMax-M1,
    arXiv 2506.13585). clip_ratio_low=1 leaves the weight without a lower bound, as the paper does."""
    ratio_U = token_ratio(rows).detach()
    lower, upper = 1 - cfg.clip_low, 1 + cfg.clip_high
    loss_U = -ratio_U.clamp(lower, upper) * rows.advantages_U * rows.logprobs_U
    return Surrogate(loss_U, ratio_U, flag(ratio_U < lower, ratio_U > upper))


def sapo(rows: Rows, cfg: LossConfig) -> Surrogate:
    """A soft gate instead of a clip: the gradient is -A r at r = 1 and fades on both sides, faster at negative
    advantages by tau_neg > tau_pos (SAPO, arXiv 2511.20347)."""
    ratio_U = token_ratio(rows)
    tau_U = torch.full_like(ratio_U, cfg.tau_neg).masked_fill(rows.advantages_U > 0, cfg.tau_pos)
    loss_U = -rows.advantages_U * torch.sigmoid(tau_U * (ratio_U - 1)) * (4 / tau_U)
    never_U = torch.zeros_like(rows.live_U)
    return Surrogate(loss_U, ratio_U, flag(never_U, never_U))


def dppo_tv(rows: Rows, cfg: LossConfig) -> Surrogate:
    """Trust region on the token's probability p instead of its ratio, which for a rare token says little: no gradient
    where A > 0 and p - p_old > clip_high, or A <= 0 and p_old - p > clip_low (DPPO with the binary total variation,
    arXiv 2602.04879)."""
    ratio_U = token_ratio(rows).detach()
    change_U = (rows.logprobs_U.exp() - rows.old_logprobs_U.exp()).detach()
    positive_U, acts_U = rows.advantages_U > 0, rows.advantages_U != 0
    high_U = positive_U & (change_U > cfg.clip_high)
    low_U = ~positive_U & (change_U < -cfg.clip_low)
    loss_U = -ratio_U.clamp(max=cfg.clip_c) * rows.advantages_U * rows.logprobs_U
    loss_U = torch.where(high_U | low_U, 0.0, loss_U)
    return Surrogate(loss_U, ratio_U, flag(low_U & acts_U, high_U))


def reinforce(rows: Rows, cfg: LossConfig) -> Surrogate:
    """The plain policy gradient (Williams, 1992): no ratio and no bound. What it needs to be right off policy is the
    importance weight of `correction`, which with `bypass` is that of the policy now over the sampler."""
    never_U = torch.zeros_like(rows.live_U)
    return Surrogate(-rows.advantages_U * rows.logprobs_U, token_ratio(rows).detach(), flag(never_U, never_U))
