"""Advantages: from the rewards of a step to one number a sequence. Each estimator is one registered pure function.

Shape suffixes: N sequences of the step, P prompts (groups). Rewards are float64 with NaN for a sample that no function
could score; nothing here turns a reward into an advantage in place. Groups are given by index, so they may be of any
size and their members in any order.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

STD_EPS = 1e-6  # added to the group's standard deviation, as verl does


class AdvantageFn(Protocol):
    def __call__(self, rewards_N: Tensor, group_N: Tensor, *, by_std: bool) -> Tensor: ...


def grpo(rewards_N: Tensor, group_N: Tensor, *, by_std: bool) -> Tensor:
    """Reward minus the group's mean, and with `by_std` divided by (std + 1e-6). (DeepSeekMath, arXiv 2402.03300, eq. 3;
    without std: Dr. GRPO, arXiv 2503.20783.)

    rewards_N: float64, NaN = unscored. group_N: int64 >= 0, group of each sequence. Returns advantages_N, float64.

    - Mean and std are those of the group's scored members; std is the sample std (ddof 1).
    - A group whose scored rewards are all equal has no signal: its advantages are exactly 0. It is recognised by
      max == min, because mean - reward is only almost 0 and a tiny std would blow the rest up. A group with one scored
      member is such a group. Its tokens keep their loss weight: they stay in the denominators, and a KL or an entropy
      term acts on them.
    - An unscored sample gets 0. (The trainer also takes it out of the batch.)

    Example, without std: 92, 85, 76, 94, 88 -> +5, -2, -11, +7, +1.
    """
    scored_N = ~rewards_N.isnan()
    constant_P = _group_extreme(rewards_N, group_N, "amax") == _group_extreme(rewards_N, group_N, "amin")
    centred_N = rewards_N - group_means(rewards_N, group_N)[group_N]
    if by_std:
        squares_P = _group_sum(torch.where(scored_N, centred_N.square(), 0.0), group_N)
        degrees_P = _group_sum(scored_N.double(), group_N) - 1
        std_P = (squares_P / degrees_P.clamp(min=1)).sqrt()
        centred_N = centred_N / (std_P[group_N] + STD_EPS)
    return torch.where(scored_N & ~constant_P[group_N], centred_N, 0.0)


def group_means(rewards_N: Tensor, group_N: Tensor) -> Tensor:
    """Mean reward of each group's scored members: float64, P = largest group index + 1, NaN where none is scored."""
    scored_N = ~rewards_N.isnan()
    sums_P = _group_sum(torch.where(scored_N, rewards_N, 0.0), group_N)
    return sums_P / _group_sum(scored_N.double(), group_N)


def _num_groups(group_N: Tensor) -> int:
    return int(group_N.max()) + 1 if group_N.numel() else 0


def _group_sum(x_N: Tensor, group_N: Tensor) -> Tensor:
    return x_N.new_zeros(_num_groups(group_N)).index_add(0, group_N, x_N)


def _group_extreme(rewards_N: Tensor, group_N: Tensor, reduce: str) -> Tensor:
    """Largest ("amax") or smallest ("amin") scored reward of each group; an infinity where none is scored."""
    neutral = float("-inf") if reduce == "amax" else float("inf")
    values_N = torch.where(rewards_N.isnan(), neutral, rewards_N)
    return values_N.new_full((_num_groups(group_N),), neutral).scatter_reduce(0, group_N, values_N, reduce)


ADVANTAGES: dict[str, AdvantageFn] = {"grpo": grpo}
