"""Sums made on the spot: a training and a held-out set of tasks without any download.

A task is its operands and operators in order, so `3 + 4` and `4 + 3` are two tasks and may lie on either side; nothing
else is shared between the training and the held-out set. Both are functions of (configuration, seed) alone. The rules
for the single options are fastgrpo.config's; whether there are enough tasks is decided here.
"""

from __future__ import annotations

import random
from typing import Any, Literal

from fastgrpo.config import ArithmeticConfig
from fastgrpo.errors import UserError

SIGN = {"+": 1, "-": -1}


def make_tasks(config: ArithmeticConfig, split: Literal["train", "val"], seed: int) -> list[dict[str, Any]]:
    """Rows {"prompt": "3 + 4 =", "reference": "7", "task": "3 + 4"}, `train_size` or `val_size` of them, all distinct.

    Raises UserError when the ranges do not allow train_size + val_size distinct tasks.
    """
    space = num_tasks(config)
    wanted = config.train_size + config.val_size
    if wanted > space:
        raise UserError(
            f"data.arithmetic: train_size {config.train_size} + val_size {config.val_size} = {wanted} tasks wanted, "
            f"but {config.operands} operands from {config.min_value} to {config.max_value} with operations "
            f"`{config.operations}` make only {space} different ones: lower the sizes or widen the range"
        )
    drawn = _distinct(random.Random(f"arithmetic/{seed}"), space, wanted)
    chosen = drawn[: config.val_size] if split == "val" else drawn[config.val_size :]
    return [_row(config, index) for index in chosen]


def num_tasks(config: ArithmeticConfig) -> int:
    """How many different tasks there are: values ** operands * operations ** (operands - 1)."""
    values = max(config.max_value - config.min_value + 1, 0)
    return values**config.operands * len(set(config.operations)) ** (config.operands - 1)


def answer(operands: list[int], operators: list[str]) -> int:
    """Value of operands joined by operators, products first. Example: ([2, 3, 4], ["+", "*"]) -> 14."""
    total, term = 0, operands[0]
    for operator, operand in zip(operators, operands[1:], strict=True):
        if operator == "*":
            term *= operand
        else:
            total += term
            term = SIGN[operator] * operand
    return total + term


def _distinct(generator: random.Random, space: int, wanted: int) -> list[int]:
    """`wanted` different integers below `space` (any size), in the order drawn."""
    drawn: dict[int, None] = {}
    while len(drawn) < wanted:
        drawn[generator.randrange(space)] = None
    return list(drawn)


def _row(config: ArithmeticConfig, index: int) -> dict[str, Any]:
    """Task number `index` of the space, read as a number of mixed base: operands first, then operators."""
    values = config.max_value - config.min_value + 1
    symbols = sorted(set(config.operations))
    operands, operators = [], []
    for _ in range(config.operands):
        index, digit = divmod(index, values)
        operands.append(config.min_value + digit)
    for _ in range(config.operands - 1):
        index, digit = divmod(index, len(symbols))
        operators.append(symbols[digit])
    task = str(operands[0])
    for operator, operand in zip(operators, operands[1:], strict=True):
        task += f" {operator} {operand}" if operand >= 0 else f" {operator} ({operand})"
    return {
        "prompt": config.template.replace("{task}", task),
        "reference": str(answer(operands, operators)),
        "task": task,
    }
