"""Reward from regular expressions: every rule that is found in the response adds its score.

`re.search` on the decoded response with its trailing white space removed; whether a rule matched is the detail
`rule_<i>`, so that the hit rate of each is a metric. Patterns are Python's: without the flags s and m, `.` stops at the
end of a line, `^` means the start of the response and `$` its end.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from fastgrpo.errors import ConfigError
from fastgrpo.reward.function import RewardFunction, Setting

if TYPE_CHECKING:  # a worker starts faster without the schema
    from fastgrpo.config import RegexRule, RewardFunctionConfig

_FLAGS = {"a": re.ASCII, "i": re.IGNORECASE, "m": re.MULTILINE, "s": re.DOTALL, "x": re.VERBOSE}


def build(label: str, config: RewardFunctionConfig, setting: Setting) -> RewardFunction:
    if not config.rules:
        raise ConfigError(
            f"reward.functions.{label} is of kind rules and has none. "
            f"Set reward.functions.{label}.rules to a list such as [{{pattern: 'Thank you!$', score: 1.0}}]."
        )
    rules = tuple(_compile(f"reward.functions.{label}.rules[{i}]", rule) for i, rule in enumerate(config.rules))
    return RewardFunction(label, f"{len(rules)} regex rules", config.weight, partial(load, rules))


def load(rules: tuple[tuple[re.Pattern[str], float], ...]) -> Callable[..., object]:
    return partial(compute_score, rules=rules)


def compute_score(response: str, rules: tuple[tuple[re.Pattern[str], float], ...] = ()) -> dict[str, float]:
    text = response.rstrip()
    hits = [pattern.search(text) is not None for pattern, _ in rules]
    total = math.fsum(score for hit, (_, score) in zip(hits, rules, strict=True) if hit)
    return {"score": total} | {f"rule_{i}": float(hit) for i, hit in enumerate(hits)}


def _compile(where: str, rule: RegexRule) -> tuple[re.Pattern[str], float]:
    if not rule.pattern:
        raise ConfigError(f"{where}.pattern is empty: it would match every response. Give a regular expression.")
    if not math.isfinite(rule.score):
        raise ConfigError(f"{where}.score is {rule.score}. Give a finite number.")
    unknown = sorted(set(rule.flags) - _FLAGS.keys())
    if unknown:
        raise ConfigError(f"{where}.flags is {rule.flags!r}: {', '.join(unknown)} unknown. Use letters of a i m s x.")
    flags = re.NOFLAG
    for letter in rule.flags:
        flags |= _FLAGS[letter]
    try:
        return re.compile(rule.pattern, flags), rule.score
    except re.error as error:
        raise ConfigError(f"{where}.pattern {rule.pattern!r} is no regular expression: {error}.") from None
