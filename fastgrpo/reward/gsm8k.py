"""Rule-based reward for GSM8K-like answers: one number, compared by value.

Conventions, the same for training and validation:
    strict      the number must follow the LAST `####` of the response, on its line, with nothing between but spaces and
                marks such as `$` or `**`. Earlier markers do not count, also when the last has no number.
    flexible    the last number anywhere.
    a number    optional sign (- + or the minus U+2212), optional currency sign before or after it, digits with
                thousands commas in groups of three, optional decimals. What follows is ignored: `5 apples` is 5, `18.`
                is 18, and `50%` is 50, not 0.5. A minus between two numbers, `10-7`, is no sign.
    reference   a bare number, or a full GSM8K solution, of which what follows the last `####` counts. Without a number
                in it the sample is unscored.
    score       1 if the values are equal (29.00 = 29), else `format_score` if a number was found, else 0.
Details: `correct` and `formatted`, each 0 or 1. Nothing here raises, whatever the texts.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING

from fastgrpo.reward.function import RewardFunction, Setting

if TYPE_CHECKING:  # a worker starts faster without the schema
    from fastgrpo.config import RewardFunctionConfig

MARKER = "####"
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)%\]])[-+\u2212])?[$€£¥]?"
    r"(?P<digits>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+)"
)
# Spaces and marks before a strict answer. No minus: one that stands apart from its number is ambiguous.
_LEAD = re.compile(r"[^\w\n.+\-\u2212]*")


def build(label: str, config: RewardFunctionConfig, setting: Setting) -> RewardFunction:
    mode = str(config.mode)
    return RewardFunction(label, f"gsm8k, {mode}", config.weight, partial(load, mode == "strict", config.format_score))


def load(strict: bool, format_score: float) -> Callable[..., object]:
    return partial(compute_score, strict=strict, format_score=format_score)


def compute_score(
    response: str, reference: str | None, strict: bool = True, format_score: float = 0.0
) -> dict[str, float | str | None]:
    gold = reference_number(reference)
    answer = number_after_marker(response) if strict else last_number(response)
    if gold is None:
        return {"score": None, "formatted": float(answer is not None)}
    correct = answer == gold
    score = 1.0 if correct else format_score if answer is not None else 0.0
    return {
        "score": score,
        "correct": float(correct),
        "formatted": float(answer is not None),
        "pred": None if answer is None else _written(answer),
    }


def _written(value: Decimal) -> str:
    """Equal numbers alike: 7 for 7.00."""
    text = f"{value:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def reference_number(reference: str | None) -> Decimal | None:
    if reference is None:
        return None
    return number_after_marker(reference) if MARKER in reference else last_number(reference)


def number_after_marker(text: str) -> Decimal | None:
    """The number that follows the last `####`; None if there is none."""
    start = text.rfind(MARKER)
    if start < 0:
        return None
    lead = _LEAD.match(text, start + len(MARKER))
    assert lead is not None  # the pattern matches the empty string
    return _value(_NUMBER.match(text, lead.end()))


def last_number(text: str) -> Decimal | None:
    return _value(next(iter(deque(_NUMBER.finditer(text), maxlen=1)), None))


def _value(match: re.Match[str] | None) -> Decimal | None:
    if match is None:
        return None
    value = Decimal(match["digits"].replace(",", ""))
    # Not `-value`: arithmetic would round to the context's precision.
    return value.copy_negate() if match["sign"] in ("-", "\u2212") else value
