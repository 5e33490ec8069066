"""Rewards for the length of a response, in tokens. Pure functions; a reward never changes which tokens are trained.

overlong   DAPO's soft punishment (Yu et al. 2025, arXiv:2503.14476, equation 13), shown for max_length 10, buffer 4:

           tokens   1 ... 6   7      8     9      10 and more
           score    0     0  -0.25  -0.5  -0.75  -1           times overlong_penalty_factor

linear     -tokens / max_length, never below -1
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from fastgrpo.reward.function import RewardFunction, Setting

if TYPE_CHECKING:  # a worker starts faster without the schema
    from fastgrpo.config import RewardFunctionConfig


def build(label: str, config: RewardFunctionConfig, setting: Setting) -> RewardFunction:
    max_length = config.max_length or setting.max_response_length
    if config.shape == "linear":
        score: Callable[..., float] = partial(linear_penalty, max_length=max_length)
        factor = 1.0
    else:
        score = partial(overlong_penalty, max_length=max_length, buffer=config.overlong_buffer_len)
        factor = config.overlong_penalty_factor
    return RewardFunction(label, f"length, {config.shape}", config.weight, partial(load, score, factor))


def load(score: Callable[[int], float], factor: float) -> Callable[..., object]:
    def compute_score(num_tokens: int) -> float:
        return factor * score(num_tokens)

    return compute_score


def overlong_penalty(length: int, max_length: int, buffer: int) -> float:
    """0 up to max_length - buffer tokens, from there straight down to -1 at max_length, and -1 beyond it.

    `buffer` 0: nothing up to max_length, -1 beyond.
    """
    if length > max_length:
        return -1.0
    free = max_length - buffer
    return 0.0 if length <= free else (free - length) / buffer


def linear_penalty(length: int, max_length: int) -> float:
    return -min(length, max_length) / max_length
