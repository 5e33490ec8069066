"""Rewards: numbers for responses, from functions that run in killable worker processes.

    runner = build_rewards(config.reward, function)      # checks everything that can be checked without running it
    scores = runner.score(requests)                      # list[RewardRequest] -> list[Score], in order

    function.py  what a reward function is            gsm8k.py, ... custom.py      one kind each
    rewards.py   all together: Scores from Outcomes   runner.py                    scheduling, timeouts of workers
    worker.py    what a worker does                   process.py                   the trainer's end of one

Another kind is one file with `build(label, config, setting) -> RewardFunction`, a line in KINDS, and its name and
options in config/reward_schema.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from fastgrpo.errors import ConfigError
from fastgrpo.reward import (
    choice,
    code_tests,
    custom,
    exact,
    gsm8k,
    judge,
    length,
    math_answers,
    reward_model,
    rules,
    score_file,
    tags,
)
from fastgrpo.reward.function import LocalReward, RewardFunction, RewardMistake, Setting
from fastgrpo.reward.rewards import Rewards

if TYPE_CHECKING:  # a worker starts faster without the schema
    from fastgrpo.config import RewardConfig, RewardFunctionConfig

__all__ = ["KINDS", "RewardFunction", "RewardMistake", "Rewards", "build_rewards"]

KINDS: dict[str, Callable[[str, RewardFunctionConfig, Setting], RewardFunction | LocalReward]] = {
    "gsm8k": gsm8k.build,
    "math": math_answers.build,
    "code": code_tests.build,
    "choice": choice.build,
    "exact": exact.build,
    "format": tags.build,
    "length": length.build,
    "rules": rules.build,
    "model": reward_model.build,
    "judge": judge.build,
    "file": score_file.build,
    "custom": custom.build,
}


def build_rewards(
    config: RewardConfig, function: Callable[..., object] | None = None, *, max_response_length: int = 1024
) -> Rewards:
    """The configured functions, and `function` (a Python callable, weight 1) when one is given. Starts no worker.

    Raises ConfigError or UserError for everything that is wrong with them and can be seen without running them.
    """
    setting = Setting(config.timeout_s, max_response_length)
    functions: list[RewardFunction | LocalReward] = [
        KINDS[str(c.kind)](label, c, setting) for label, c in config.functions.items()
    ]
    if function is not None:
        functions.append(custom.build_callable(function))
    _check_some(functions)
    _check_labels(functions)
    _check_weights(functions)
    _check_limits(config)
    return Rewards(functions, config.num_workers, config.timeout_s)


def _check_some(functions: list[RewardFunction | LocalReward]) -> None:
    if not functions:
        raise ConfigError(
            "no reward is set, so there is nothing to learn. Add to the configuration, for a function of your own:\n"
            "  reward:\n"
            "    functions: {mine: {kind: custom, path: my_reward.py, name: compute_score}}\n"
            "or on the command line: +reward.functions.mine.path=my_reward.py. Built in are: "
            + ", ".join(kind for kind in KINDS if kind != "custom")
            + ". In Python: Trainer(..., reward=function)."
        )


def _check_labels(functions: list[RewardFunction | LocalReward]) -> None:
    labels = [function.label for function in functions]
    twice = sorted({label for label in labels if labels.count(label) > 1})
    if twice:
        raise ConfigError(
            f"the label {twice[0]!r} is used by a function of reward.functions and by the callable given as reward. "
            "Rename one of them."
        )


def _check_weights(functions: list[RewardFunction | LocalReward]) -> None:
    for function in functions:
        if not math.isfinite(function.weight):
            raise ConfigError(f"reward.functions.{function.label}.weight is {function.weight}. Give a finite number.")
    if all(function.weight == 0 for function in functions):
        raise ConfigError("every weight in reward.functions is 0, so every reward is 0. Give one of them a weight.")


def _check_limits(config: RewardConfig) -> None:
    if config.num_workers < 1:
        raise ConfigError(f"reward.num_workers is {config.num_workers}. Set at least 1.")
    if not (config.timeout_s > 0 and math.isfinite(config.timeout_s)):
        raise ConfigError(f"reward.timeout_s is {config.timeout_s}. Set the seconds that a sample may take, above 0.")
