"""Estimators that look at one prompt's group. All of them give exactly 0 to a group whose scored rewards are equal, and
so to one with a single scored member: comparing needs two. Its tokens keep their loss weight: they stay in the
denominators, and a KL or an entropy term acts on them.

With rewards r of a group of n, m and s their mean and sample standard deviation (ddof 1), l lengths in tokens:

    grpo         (r_i - m) / (s + 1e-6), without `by_std` r_i - m      DeepSeekMath, arXiv 2402.03300
    dr_grpo      r_i - m                                               arXiv 2503.20783
    rloo         r_i - mean of the others = (r_i - m) n / (n - 1)      arXiv 2402.14740
    opo          r_i - sum(l r) / sum(l)                               arXiv 2505.23585
    grpo_passk   best: r_1st - r_2nd (over s + 1e-6 with `by_std`); others 0   arXiv 2503.19595
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastgrpo.algorithm.advantage.graded import (
    STD_EPS,
    Graded,
    centred,
    group_extreme,
    group_stds,
    group_sum,
    has_signal,
)


def grpo(graded: Graded, *, by_std: bool) -> Tensor:
    """Example, without std: 92, 85, 76, 94, 88 -> +5, -2, -11, +7, +1."""
    return _over_std(centred(graded), graded) if by_std else centred(graded)


def dr_grpo(graded: Graded, *, by_std: bool) -> Tensor:
    """Without the deviation, which favours questions that are almost always or almost never solved."""
    return centred(graded)


def rloo(graded: Graded, *, by_std: bool) -> Tensor:
    """Each sample against the mean of the others: the baseline does not contain the sample, so it is unbiased."""
    count_N = group_sum(graded.scored_N.double(), graded.group_N)[graded.group_N]
    return centred(graded) * (count_N / (count_N - 1).clamp(min=1))


def opo(graded: Graded, *, by_std: bool) -> Tensor:
    """The baseline of least gradient variance, under the assumption that a sample's squared gradient norm grows with
    its length: the length-weighted mean reward. (A group of scored samples without any token: exactly 0.)"""
    lengths_N = torch.where(graded.scored_N, graded.tokens_N.double(), 0.0)
    reward_N = torch.where(graded.scored_N, graded.rewards_N, 0.0)
    total_P = group_sum(lengths_N, graded.group_N)
    baseline_P = group_sum(lengths_N * reward_N, graded.group_N) / total_P.clamp(min=1)
    signal_N = has_signal(graded) & (total_P > 0)[graded.group_N]
    return torch.where(signal_N, reward_N - baseline_P[graded.group_N], 0.0)


def grpo_passk(graded: Graded, *, by_std: bool) -> Tensor:
    """What the best sample adds to the best of k: only it is rewarded, by its lead over the second. Two samples that
    share the best reward have no lead over each other, so such a group is all 0."""
    best_P = group_extreme(graded.rewards_N, graded.group_N, "amax")
    is_best_N = graded.scored_N & (graded.rewards_N == best_P[graded.group_N])
    others_N = graded.rewards_N.masked_fill(is_best_N, float("nan"))
    lead_P = best_P - group_extreme(others_N, graded.group_N, "amax")
    alone_P = group_sum(is_best_N.double(), graded.group_N) == 1
    winner_N = is_best_N & has_signal(graded) & alone_P[graded.group_N]
    lead_N = torch.where(winner_N, lead_P[graded.group_N], 0.0)
    return _over_std(lead_N, graded) if by_std else lead_N


def _over_std(difference_N: Tensor, graded: Graded) -> Tensor:
    return difference_N / (group_stds(graded)[graded.group_N] + STD_EPS)
