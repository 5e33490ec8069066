r"""Reward for multiple choice: one letter, compared with the reference's.

    strict      the letter in the last \boxed{}, else after the last "answer is" / "answer:", else the whole response
    flexible    else also the last letter that stands in brackets or alone on the end of the response: (B), **B**, B.
    reference   a letter A to Z, also as (B) or B. ; anything else leaves the sample unscored
    score       1 for the same letter, `format_score` for another, 0 for none

Thoughts up to `</think>` are not read. Details: `correct` and `formatted`, each 0 or 1.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from fastgrpo.reward.function import RewardFunction, Setting
from fastgrpo.reward.math_text import last_boxed, words

if TYPE_CHECKING:  # a worker starts faster without the schema
    from fastgrpo.config import RewardFunctionConfig

_LETTER = re.compile(r"\W*([A-Za-z])\W*")
_SAID = re.compile(
    r"\b(?:answer|choice|option)\b(?:\s+is)?(?:\s+(?:the\s+)?(?:choice|option|letter))?\s*[:=]?\s*[(\[*\"']*([A-Z])(?![\w'])",
    re.IGNORECASE,
)
_MARKED = re.compile(r"[(\[]([A-Z])[)\]]|\*\*\(?([A-Z])\)?[.:)]?\*\*|\b([A-Z])[.)]?\s*$")


def build(label: str, config: RewardFunctionConfig, setting: Setting) -> RewardFunction:
    mode = str(config.mode)
    return RewardFunction(label, f"choice, {mode}", config.weight, partial(load, mode == "strict", config.format_score))


def load(strict: bool, format_score: float) -> Callable[..., object]:
    return partial(compute_score, strict=strict, format_score=format_score)


def compute_score(
    response: str, reference: str | None, strict: bool = True, format_score: float = 0.0
) -> dict[str, float | str | None]:
    answer, gold = chosen_letter(response, strict), _only_letter(reference or "")
    formatted = float(answer is not None)
    if gold is None:
        return {"score": None, "formatted": formatted}
    correct = answer == gold
    score = 1.0 if correct else format_score if answer is not None else 0.0
    return {"score": score, "correct": float(correct), "formatted": formatted, "pred": answer}


def chosen_letter(response: str, strict: bool) -> str | None:
    text = response.rpartition("</think>")[2]
    boxed = last_boxed(text)
    if boxed is not None:
        return _only_letter(words(boxed))
    # a small letter after `answer is` may be a word: "the answer is a ..."
    said = [letter for letter in _SAID.findall(text) if letter.isupper()]
    if said:
        return said[-1]
    if (alone := _only_letter(text)) or strict:
        return alone
    marked = _MARKED.findall(text.strip())
    return next(letter for letter in marked[-1] if letter) if marked else None


def _only_letter(text: str) -> str | None:
    match = _LETTER.fullmatch(text.strip())
    return match[1].upper() if match else None
