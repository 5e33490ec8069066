r"""Rule-based reward for mathematical answers: is what the response boxes the same as the reference?

    response -> the answer's text -> its structure (set, list, tuple or interval, union) -> atoms
    atoms: the same text | the same number and unit, exactly | the same formula, by math-verify

Conventions, the same for training and validation:
    where        strict: the last \boxed{}; flexible: else after the last "answer is", the last formula or number
    numbers      exact: 1/2 = 0.5 = \frac12, 0.333 is not 1/3; 1,234 = 1{,}234 = 1\,234 = 1234.
    units        may be left out on either side; where both have one it must be the same (nothing is converted).
    percent      50\% equals 0.5 and 50: whether the sign is written depends on the question.
    bases        other than ten must be written: 110_2 is neither 110 nor 110_3, 6_{10} is 6
    sets, lists  in any order: \{1,2\} = 2, 1 = \{2,1\}; a set holds each member once: \{1,1,2\} = \{1,2\}
    tuples       and intervals in theirs, with their brackets: (1,2] is not [1,2)
    x = 5        equals 5. \pm 3 is the list 3, -3. Words are compared without regard to case.
    formulas     equal if math-verify finds them so; powers and factorials too large to work out count as text.
Score 1 or `format_score` (an answer was found, not the right one), 0 where none was found. Unscored: without a
reference, and where math-verify takes longer than a few seconds (detail `slow`).
"""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from fastgrpo.errors import ConfigError
from fastgrpo.reward.function import RewardFunction, Setting
from fastgrpo.reward.math_quantity import Quantity, exact_value, in_base, quantity, without_notation
from fastgrpo.reward.math_text import Parts, answer_text, clean, last_boxed, split, words

if TYPE_CHECKING:  # a worker starts faster without the schema
    from fastgrpo.config import RewardFunctionConfig

_FORMULA_LIMIT_S = 3  # for math-verify's parser and for its comparison, each
_TOO_LARGE = re.compile(
    r"\^\s*\{?\s*-?\s*\d{4,}|\^[^,;=]*\^[^,;=]*\^|\^\s*\{[^{}]*\^|\d{4,}\s*!|!\s*!|\\(?:int|sum|prod|lim)(?![a-z])"
)
_MAX_FORMULA = 400  # characters; longer ones are compared as text


class Slow(Exception):
    """math-verify did not finish."""


def build(label: str, config: RewardFunctionConfig, setting: Setting) -> RewardFunction:
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError(
            f"reward.functions.{label} is of kind math, which needs math-verify: pip install 'fastgrpo[math]'"
        )
    mode = str(config.mode)
    return RewardFunction(label, f"math, {mode}", config.weight, partial(load, mode == "strict", config.format_score))


def load(strict: bool, format_score: float) -> Callable[..., object]:
    import math_verify  # noqa: F401  # a second or two, before the first sample's time runs

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it logs each text that it cannot parse
    return partial(compute_score, strict=strict, format_score=format_score)


def compute_score(
    response: str, reference: str | None, strict: bool = True, format_score: float = 0.0
) -> dict[str, float | str | None]:
    answer = answer_text(response, strict)
    found = float(answer is not None)
    gold = None if reference is None else last_boxed(reference) or reference
    if gold is None or not gold.strip():
        return {"score": None, "formatted": found}
    if answer is None:
        return {"score": 0.0, "correct": 0.0, "formatted": found}
    try:
        correct = equal(answer, gold)
    except Slow:
        return {"score": None, "formatted": found, "slow": 1.0}
    score = 1.0 if correct else format_score
    return {"score": score, "correct": float(correct), "formatted": found, "pred": clean(answer)}


def equal(answer: str, reference: str) -> bool:
    """Whether two answers are the same. Slow where math-verify does not finish."""
    return _equal(clean(answer), clean(reference), 0)


def _equal(a: str, b: str, depth: int) -> bool:
    if _bare(a) == _bare(b):
        return bool(_bare(a))
    left, right = split(a), split(b)
    if depth > 4 or (left.kind == "atom" and right.kind == "atom"):
        return _equal_atoms(a, b)
    same = partial(_equal, depth=depth + 1)
    if left.kind == "tuple" or right.kind == "tuple":
        if left.kind == right.kind:
            return (
                left.brackets == right.brackets
                and len(left.parts) == len(right.parts)
                and all(map(same, left.parts, right.parts))
            )
        return (left.kind == "atom" or right.kind == "atom") and _equal_atoms(a, b)  # an inequality
    if left.kind == "union" or right.kind == "union":
        if left.kind == right.kind:
            return _same_members(left.parts, right.parts, same)
        return _equal_atoms(a, b)
    return _same_members(_members(left, same), _members(right, same), same)


def _members(parts: Parts, same: Callable[[str, str], bool]) -> tuple[str, ...]:
    """Of a set or list, with the unit at its end spread over them; a set holds each only once."""
    members = _spread_unit(parts.parts)
    if parts.kind != "set":
        return members
    return tuple(m for i, m in enumerate(members) if not any(same(m, other) for other in members[:i]))


def _same_members(a: tuple[str, ...], b: tuple[str, ...], same: Callable[[str, str], bool]) -> bool:
    """In any order, each member of `a` with one of its own in `b`."""
    if len(a) != len(b):
        return False
    left = list(b)
    for member in a:
        twin = next((i for i, other in enumerate(left) if same(member, other)), None)
        if twin is None:
            return False
        del left[twin]
    return True


def _spread_unit(parts: tuple[str, ...]) -> tuple[str, ...]:
    """`3, 4 \\text{ cm}`: the unit at the end is that of all."""
    if len(parts) < 2 or not (last := quantity(parts[-1])).unit or any(quantity(part).unit for part in parts[:-1]):
        return parts
    return (*parts[:-1], last.core)


def _equal_atoms(a: str, b: str) -> bool:
    a, b = _without_name(a, b), _without_name(b, a)
    bases = in_base(a), in_base(b)
    if any(bases):
        return in_base(_with_ten(a)) == in_base(_with_ten(b))
    left, right = quantity(a), quantity(b)
    if left.unit and right.unit and left.unit != right.unit:
        return False
    x, y = exact_value(left.core), exact_value(right.core)
    if x is not None and y is not None:
        x, y = x * left.factor, y * right.factor
        return x == y or (left.percent != right.percent and (x * 100 == y if right.percent else x == y * 100))
    if left.factor != right.factor or left.percent != right.percent:
        return False
    if _bare(left.core) == _bare(right.core) or words(a).casefold() == words(b).casefold():
        return True
    if _is_word(left) or _is_word(right):
        return _letters(a) == _letters(b) != ""
    return _equal_formulas(left.core, right.core)


def _with_ten(text: str) -> str:
    return f"{text}_{{10}}" if re.fullmatch(r"-?\d+", text) else text


def _is_word(answer: Quantity) -> bool:
    """A word or a choice such as (B), which a parser would read as a product of letters."""
    return "\\text" in answer.core or re.fullmatch(r"\(?[A-Z]\)?\.?|[A-Za-z][A-Za-z ]{2,}", answer.core) is not None


def _letters(text: str) -> str:
    return re.sub(r"[^\w]", "", words(text)).casefold()


def _without_name(text: str, other: str) -> str:
    """`x = 5` as 5, where the other side names nothing; `f(x) = ...` and `x_1 = ...` as well."""
    match = re.fullmatch(r"[a-zA-Z]\w?(?:_\{?\w+\}?|\([a-z]\))?\s*=\s*([^=<>]+)", text)
    return match[1] if match and "=" not in other else text


def _bare(text: str) -> str:
    r"""Without spaces, and without the braces that change nothing: `x^{2}`, but not \frac{1}{23} or \frac{12}{3}."""
    text = re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)  # 1 2 is not 12
    return re.sub(r"(?<!\\)\{(\w)\}", r"\1", re.sub(r"\^(\d\d+)", r"^{\1}", text))


def _equal_formulas(a: str, b: str) -> bool:
    if max(len(a), len(b)) > _MAX_FORMULA or _TOO_LARGE.search(a) or _TOO_LARGE.search(b):
        return False
    from math_verify import LatexExtractionConfig, parse, verify
    from math_verify.errors import TimeoutException

    settings = {"extraction_config": [LatexExtractionConfig()], "parsing_timeout": _FORMULA_LIMIT_S}
    try:
        left, right = (
            parse(f"\\boxed{{{without_notation(text)}}}", raise_on_error=True, **settings) for text in (a, b)
        )
        if not left or not right:
            return False
        return verify(right, left, timeout_seconds=_FORMULA_LIMIT_S, strict=True, raise_on_error=True)
    except (TimeoutException, TimeoutError):
        raise Slow from None
    except Exception:  # whatever sympy meets in a text that is no formula
        return False
