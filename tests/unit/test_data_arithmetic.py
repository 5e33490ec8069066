"""Tasks made on the spot: right answers, distinct, held-out ones apart, the same for the same seed."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from fastgrpo.config import ArithmeticConfig
from fastgrpo.data.arithmetic import answer, make_tasks, num_tasks
from fastgrpo.errors import UserError


@pytest.mark.parametrize(
    ("operands", "operators", "expected"),
    [
        ([3, 4], "+", 7),
        ([3, 4], "-", -1),
        ([3, -4], "-", 7),
        ([2, 3, 4], "+*", 14),
        ([2, 3, 4], "*+", 10),
        ([2, 3, 4], "-*", -10),
        ([20, 3, 4, 5], "-*-", 3),
        ([2, 3, 4, 5], "-+*", 19),
        ([7, 2, 3], "--", 2),
    ],
)
def test_answer_follows_the_usual_precedence(operands: list[int], operators: str, expected: int) -> None:
    assert answer(operands, list(operators)) == expected


@pytest.mark.parametrize(
    "config",
    [
        ArithmeticConfig(train_size=200, val_size=50),
        ArithmeticConfig(operations="+-*", operands=4, min_value=-9, max_value=9, train_size=300, val_size=50),
        ArithmeticConfig(operations="*", operands=3, min_value=0, max_value=10**12, train_size=20, val_size=5),
    ],
)
def test_tasks_are_distinct_disjoint_and_right(config: ArithmeticConfig) -> None:
    train, val = make_tasks(config, "train", 5), make_tasks(config, "val", 5)
    assert (len(train), len(val)) == (config.train_size, config.val_size)
    tasks = [row["task"] for row in train + val]
    assert len(set(tasks)) == len(tasks)
    for row in train + val:
        assert row["prompt"] == f"{row['task']} ="
        assert row["reference"] == str(eval(row["task"]))  # Python's own arithmetic is the truth here
        numbers = [int(number) for number in re.findall(r"-?\d+", re.sub(r"(\d) - ", r"\1 + ", row["task"]))]
        assert len(numbers) == config.operands
        assert all(config.min_value <= number <= config.max_value for number in numbers)


def test_negative_operands_are_in_brackets_except_the_first() -> None:
    config = ArithmeticConfig(operations="-", min_value=-2, max_value=-1, train_size=3, val_size=1)
    shown = {row["task"] for row in make_tasks(config, "train", 0) + make_tasks(config, "val", 0)}
    assert shown == {"-2 - (-2)", "-2 - (-1)", "-1 - (-2)", "-1 - (-1)"}


def test_same_seed_same_tasks_and_training_size_leaves_the_held_out_ones_alone() -> None:
    config = ArithmeticConfig(train_size=100, val_size=20)
    assert make_tasks(config, "train", 1) == make_tasks(config, "train", 1)
    assert make_tasks(config, "train", 1) != make_tasks(config, "train", 2)
    assert make_tasks(config, "val", 1) == make_tasks(ArithmeticConfig(train_size=999, val_size=20), "val", 1)


def test_the_whole_space_can_be_used_up() -> None:
    config = ArithmeticConfig(operations="-", max_value=9, train_size=500, val_size=50)
    assert num_tasks(config) == 100
    tasks = Counter(row["task"] for split in ("train", "val") for row in make_tasks(config, split, 3))
    assert tasks == Counter(f"{a} - {b}" for a in range(10) for b in range(10))
    for val_size in (100, 101):  # nothing left to train on, and too few
        with pytest.raises(UserError, match=f"val_size {val_size} .* only 100 different"):
            make_tasks(ArithmeticConfig(operations="-", max_value=9, val_size=val_size), "train", 3)


def test_a_held_out_sum_is_trained_in_no_order() -> None:
    config = ArithmeticConfig(max_value=9, val_size=20)
    held_out = {frozenset(row["task"].split(" + ")) for row in make_tasks(config, "val", 0)}
    trained = [row["task"] for row in make_tasks(config, "train", 0)]
    assert len(trained) > 50
    assert all(frozenset(task.split(" + ")) not in held_out for task in trained)
    everything = {frozenset((str(a), str(b))) for a in range(10) for b in range(10)}
    assert held_out | {frozenset(task.split(" + ")) for task in trained} == everything


def test_no_values_make_no_tasks() -> None:
    with pytest.raises(UserError, match="only 0 different"):
        make_tasks(ArithmeticConfig(min_value=5, max_value=4), "train", 0)


def test_one_operand_is_its_own_answer() -> None:
    rows = make_tasks(ArithmeticConfig(operands=1, max_value=3, train_size=3, val_size=1), "train", 0)
    assert all(row["task"] == row["reference"] for row in rows) and len({row["task"] for row in rows}) == 3


def test_every_task_in_every_wording() -> None:
    config = ArithmeticConfig(templates=["Answer in \\boxed{}: {task}", "{task}?"], train_size=2, val_size=0)
    rows = make_tasks(config, "train", 0)
    first, second = rows[0]["task"], rows[2]["task"]
    assert [row["prompt"] for row in rows] == [
        f"Answer in \\boxed{{}}: {first}",
        f"{first}?",
        f"Answer in \\boxed{{}}: {second}",
        f"{second}?",
    ]
