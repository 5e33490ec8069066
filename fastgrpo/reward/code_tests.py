"""Reward for programs (kind `code`): the response's code passes the tests of its data row, in a sandbox.

    response -> the last fenced block that defines the entry point, else the last one, else the whole response
             -> the prefix column, if one is named, in front of it -> sandbox/ -> share of tests passed

The reference holds the tests (code_reference.py).
Score: 1 if all tests pass, else 0; with `partial_credit` their share. A program that is too slow, too large, or wrong
scores 0 or its share: that is its fault. A sandbox that could not be made, or tests that cannot be run, is an error; no
tests: unscored. Details: `passed` (share), `late` (ran out of time), `found` (there was code).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from fastgrpo.errors import ConfigError
from fastgrpo.reward.code_reference import read_tests
from fastgrpo.reward.function import RewardFunction, Setting
from fastgrpo.reward.sandbox.box import BrokenBox, Limits
from fastgrpo.reward.sandbox.isolation import try_isolation
from fastgrpo.reward.sandbox.verdicts import Functions, judge

if TYPE_CHECKING:  # a worker starts faster without the schema
    from fastgrpo.config import RewardFunctionConfig

_FENCE = re.compile(r"```[ \t]*([\w+-]*)[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


def build(label: str, config: RewardFunctionConfig, setting: Setting) -> RewardFunction:
    """Tries the isolation. ConfigError when it is weaker than asked."""
    option = f"reward.functions.{label}"
    try:
        found = try_isolation(config.memory_limit_mb, config.max_processes, config.time_limit_s)
    except BrokenBox as error:
        raise ConfigError(f"{option} is of kind code, and no program can be run in a sandbox here: {error}.") from None
    if not found.full and config.isolation == "full":
        raise ConfigError(
            f"{option}.isolation=full, and this machine does not allow it. {found}. In a container allow namespaces "
            "(Docker: --cap-add SYS_ADMIN --security-opt seccomp=unconfined --security-opt apparmor=unconfined), or "
            f"accept what is in force with {option}.isolation=best_effort."
        )
    columns = {"entry_point": config.entry_point_key, "setup": config.setup_key, "prefix": config.prefix_key}
    return RewardFunction(
        label,
        f"code, {found}",
        config.weight,
        partial(load, found.limits, config.partial_credit, columns),
        (f"reward {label}: programs are isolated, {found}",),
    )


def load(limits: Limits, partial_credit: bool, columns: Mapping[str, str | None]) -> Callable[..., object]:
    return partial(compute_score, limits=limits, partial_credit=partial_credit, columns=columns)


def compute_score(
    response: str,
    reference: str | None,
    meta: Mapping[str, Any],
    limits: Limits,
    partial_credit: bool = False,
    columns: Mapping[str, str | None] | None = None,
) -> dict[str, float | None]:
    row = {name: meta.get(key) if key else None for name, key in (columns or {}).items()}
    tests = read_tests(reference, row.get("setup"), row.get("entry_point"))
    if tests is None:
        return {"score": None}
    code = find_code(response, tests.entry_point if isinstance(tests, Functions) else row.get("entry_point"))
    if not code.strip():
        return {"score": 0.0, "passed": 0.0, "found": 0.0}
    program = f"{row['prefix']}\n{code}" if row.get("prefix") else code
    verdict = judge(program, tests, limits, all_tests=partial_credit)
    share = verdict.passed / verdict.total
    score = share if partial_credit else float(verdict.passed == verdict.total)
    return {"score": score, "passed": share, "late": float(verdict.late), "found": 1.0}


def find_code(response: str, entry_point: str | None = None) -> str:
    text = response.rpartition("</think>")[2]
    blocks = [code for _, code in _FENCE.findall(text)]
    if not blocks:
        return text
    defining = [code for code in blocks if entry_point and re.search(rf"\bdef {re.escape(entry_point)}\b", code)]
    return (defining or blocks)[-1]
