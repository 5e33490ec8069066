"""What an estimator is given, and sums over groups. Groups are given by index: of any size, members in any order.

Shape suffixes: N sequences of the step, P prompts (groups), F reward functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

STD_EPS = 1e-6  # added to a group's standard deviation, as verl does


@dataclass(frozen=True, slots=True)
class Graded:
    """The rewards of a step. Example: Graded(tensor([1., 0.]), tensor([0, 0]), tensor([17, 230]))."""

    rewards_N: Tensor  # float64, NaN = unscored
    group_N: Tensor  # int64 >= 0, group of each sequence
    tokens_N: Tensor  # int64, tokens that the policy drew
    scores_NF: Tensor | None = None  # float64, each reward function's own; only `gdpo` reads them
    weights_F: Tensor | None = None  # float64, of the functions

    @property
    def scored_N(self) -> Tensor:
        return ~self.rewards_N.isnan()


class AdvantageFn(Protocol):
    """Returns advantages_N, float64; 0 for an unscored sample, which is in no mean and no deviation either. (The
    trainer also takes it out of the batch.) `by_std`: whether deviations from a group's mean are divided by the group's
    standard deviation; read by grpo, grpo_passk and gdpo."""

    def __call__(self, graded: Graded, *, by_std: bool) -> Tensor: ...


def centred(graded: Graded) -> Tensor:
    """Reward minus the mean of the group's scored members. Exactly 0 where `has_signal` is false."""
    difference_N = graded.rewards_N - group_means(graded.rewards_N, graded.group_N)[graded.group_N]
    return torch.where(has_signal(graded), difference_N, 0.0)


def has_signal(graded: Graded) -> Tensor:
    """bool [N]: scored, in a group whose scored rewards differ. A group whose rewards are all equal is recognised by
    max == min: the mean of equal numbers is only almost that number, and a tiny deviation would blow the rest up. A
    group with one scored member is such a group."""
    return graded.scored_N & (group_spreads(graded.rewards_N, graded.group_N) > 0)[graded.group_N]


def group_stds(graded: Graded) -> Tensor:
    """Sample standard deviation (ddof 1) of each group's scored members; 0 where there are fewer than two."""
    squares_P = group_sum(centred(graded).square(), graded.group_N)
    degrees_P = group_sum(graded.scored_N.double(), graded.group_N) - 1
    return (squares_P / degrees_P.clamp(min=1)).sqrt()


def group_means(rewards_N: Tensor, group_N: Tensor) -> Tensor:
    """Mean reward of each group's scored members: float64, P = largest group index + 1, NaN where none is scored."""
    scored_N = ~rewards_N.isnan()
    sums_P = group_sum(torch.where(scored_N, rewards_N, 0.0), group_N)
    return sums_P / group_sum(scored_N.double(), group_N)


def group_spreads(rewards_N: Tensor, group_N: Tensor) -> Tensor:
    """Largest minus smallest scored reward of each group: float64, >= 0; 0 where none is scored."""
    spread_P = group_extreme(rewards_N, group_N, "amax") - group_extreme(rewards_N, group_N, "amin")
    return spread_P.clamp(min=0)


def group_sum(x_N: Tensor, group_N: Tensor) -> Tensor:
    return x_N.new_zeros(_num_groups(group_N)).index_add(0, group_N, x_N)


def group_extreme(rewards_N: Tensor, group_N: Tensor, reduce: str) -> Tensor:
    """Largest ("amax") or smallest ("amin") scored reward of each group; an infinity where none is scored."""
    neutral = float("-inf") if reduce == "amax" else float("inf")
    values_N = torch.where(rewards_N.isnan(), neutral, rewards_N)
    return values_N.new_full((_num_groups(group_N),), neutral).scatter_reduce(0, group_N, values_N, reduce)


def _num_groups(group_N: Tensor) -> int:
    return int(group_N.max()) + 1 if group_N.numel() else 0
