"""Sums and maxima over the tokens that count, the only form in which losses report what they saw.

A `Stats` is a dict of 0-dim float64 tensors on the device. A name that ends in `_max` is reduced by maximum (its
values are never negative, so 0 is its neutral element), every other name by addition, over micro-batches and ranks
alike. Means are made once, after the last reduction, by dividing two sums: a mean of means would weight tokens by the
company they were packed in.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Stats = dict[str, Tensor]

# (x_U or x_UK, seq_id_U) -> the same shape: the sum of x over all tokens of the token's sequence, on every rank that
# holds a part of it; differentiable.
SegmentSum = Callable[[Tensor, Tensor], Tensor]


def select(live_N: Tensor, x_N: Tensor) -> Tensor:
    """`x_N` where live, else 0, in value and in gradient: whatever stands at the other places, NaN included, is gone
    before anything is computed from it. (Multiplying by a mask afterwards would make inf * 0 = NaN.)"""
    return torch.where(live_N, x_N, 0.0)


def live_sum(live_N: Tensor, x_N: Tensor) -> Tensor:
    """Sum over the live tokens, float64 because counts of millions must stay exact."""
    return select(live_N, x_N.detach().double()).sum()


def live_max(live_N: Tensor, x_N: Tensor) -> Tensor:
    """Largest of the live, non-negative values; 0 when there is none."""
    values_N = select(live_N, x_N.detach().double())
    return values_N.amax() if values_N.numel() else values_N.sum()
