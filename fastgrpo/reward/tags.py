"""Reward for form (kind `format`): the response is one block of each tag, in order, and nothing besides.

    <think> ... </think> <answer> ... </answer>          1, else 0

Each opening and closing tag stands exactly once, no block is empty, white space between blocks is free. With
`tag_opened` the chat template has written the first opening tag, so the response begins inside that block.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from fastgrpo.reward.function import RewardFunction, Setting

if TYPE_CHECKING:  # a worker starts faster without the schema
    from fastgrpo.config import RewardFunctionConfig


def build(label: str, config: RewardFunctionConfig, setting: Setting) -> RewardFunction:
    shown = " ".join(f"<{tag}>" for tag in config.tags)
    return RewardFunction(label, f"format {shown}", config.weight, partial(load, tuple(config.tags), config.tag_opened))


def load(tags: Sequence[str], opened: bool) -> Callable[..., object]:
    def compute_score(response: str) -> float:
        return float(well_formed(response, tags, opened))

    return compute_score


def well_formed(response: str, tags: Sequence[str], opened: bool = False) -> bool:
    text = f"<{tags[0]}>{response}" if opened else response
    found = [(m[0], m.start(), m.end()) for m in re.finditer("|".join(f"</?{tag}>" for tag in tags), text)]
    if [name for name, *_ in found] != [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]:
        return False
    edges = [0, *(place for _, start, end in found for place in (start, end)), len(text)]
    pieces = [text[start:end].strip() for start, end in zip(edges[::2], edges[1::2], strict=True)]
    # outside, inside, outside, inside, ..., outside
    return not any(pieces[::2]) and all(pieces[1::2])
