"""Reward for an exact text: the response says what the reference says, apart from white space (and case).

    strict      the whole response, up to a full stop at its end
    flexible    the reference stands in the response as whole words

Thoughts up to `</think>` are not read. An empty reference leaves the sample unscored.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from fastgrpo.reward.function import RewardFunction, Setting

if TYPE_CHECKING:  # a worker starts faster without the schema
    from fastgrpo.config import RewardFunctionConfig


def build(label: str, config: RewardFunctionConfig, setting: Setting) -> RewardFunction:
    mode = str(config.mode)
    return RewardFunction(label, f"exact, {mode}", config.weight, partial(load, mode == "strict", config.ignore_case))


def load(strict: bool, ignore_case: bool) -> Callable[..., object]:
    return partial(compute_score, strict=strict, ignore_case=ignore_case)


def compute_score(response: str, reference: str | None, strict: bool = True, ignore_case: bool = True) -> float | None:
    text = _plain(response.rpartition("</think>")[2], ignore_case)
    wanted = _plain(reference or "", ignore_case)
    if not wanted:
        return None
    if strict:
        return float(text == wanted)
    return float(re.search(rf"(?<!\w){re.escape(wanted)}(?!\w)", text) is not None)


def _plain(text: str, ignore_case: bool) -> str:
    text = " ".join(text.split()).removesuffix(".")
    return text.casefold() if ignore_case else text
