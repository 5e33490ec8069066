"""Sums made on the spot: a training and a held-out set of tasks without any download.

A task is its operands and operators in order; it is asked in every wording of `templates`. Held-out tasks occur in
training in no wording, and in no order either: with `3 + 4` held out, `4 + 3` is not trained. Both sets are functions
of (configuration, seed) alone. The rules for the single options are fastgrpo.config's; whether there are enough tasks
is decided here.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Literal

from fastgrpo.config import ArithmeticConfig
from fastgrpo.errors import UserError

SIGN = {"+": 1, "-": -1}
_SMALL_SPACE = 1 << 20  # tasks that are shuffled as a whole; from more, they are drawn

Task = tuple[list[int], list[str]]  # operands, and the operators between them


def make_tasks(config: ArithmeticConfig, split: Literal["train", "val"], seed: int) -> list[dict[str, Any]]:
    """Rows {"prompt": "3 + 4 =", "reference": "7", "task": "3 + 4"}: val_size tasks, or as many of train_size as there
    are beside them, each in all wordings.

    Raises UserError when the ranges do not allow that many, or leave nothing to train on.
    """
    held_out: list[Task] = []
    trained: list[Task] = []
    held_out_kinds: set[Any] = set()
    for task in _draw(config, random.Random(f"arithmetic/{seed}")):
        if len(held_out) < config.val_size:
            held_out.append(task)
            held_out_kinds.add(_whatever_the_order(task))
        elif len(trained) == config.train_size:
            break
        elif _whatever_the_order(task) not in held_out_kinds:
            trained.append(task)
    if len(held_out) < config.val_size or not trained:
        raise UserError(
            f"data.arithmetic: val_size {config.val_size} tasks wanted and some to train on, but {config.operands} "
            f"operands from {config.min_value} to {config.max_value} with operations `{config.operations}` make only "
            f"{num_tasks(config)} different ones: lower val_size or widen the range"
        )
    return [row for task in (held_out if split == "val" else trained) for row in _rows(config, task)]


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


def _draw(config: ArithmeticConfig, generator: random.Random) -> Iterator[Task]:
    """All tasks, each once, in random order; of a very large space, different ones without end."""
    space = num_tasks(config)
    if space <= _SMALL_SPACE:
        yield from (_task(config, index) for index in generator.sample(range(space), space))
        return
    drawn: set[int] = set()
    while True:
        index = generator.randrange(space)
        if index not in drawn:
            drawn.add(index)
            yield _task(config, index)


def _task(config: ArithmeticConfig, index: int) -> Task:
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
    return operands, operators


def _whatever_the_order(task: Task) -> Any:
    """The same for tasks that differ only in the order of a sum's or product's operands."""
    operands, operators = task
    commutes = set(operators) in ({"+"}, {"*"})
    return tuple(sorted(operands) if commutes else operands), tuple(operators)


def _rows(config: ArithmeticConfig, task: Task) -> list[dict[str, Any]]:
    operands, operators = task
    text = str(operands[0])
    for operator, operand in zip(operators, operands[1:], strict=True):
        text += f" {operator} {operand}" if operand >= 0 else f" {operator} ({operand})"
    reference = str(answer(operands, operators))
    prompts = (template.replace("{task}", text) for template in config.templates)
    return [{"prompt": prompt, "reference": reference, "task": text} for prompt in prompts]
