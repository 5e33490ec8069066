"""Prompts out of columns, lettered choices, slices of splits; and the experiments that need them, on rows of their data
sets' shape: loaded, answered rightly and wrongly, scored."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from transformers import AutoTokenizer

from fastgrpo.compose import read_config
from fastgrpo.config import DataConfig, RunConfig
from fastgrpo.data import sources
from fastgrpo.data.columns import fill_template, letter_choices
from fastgrpo.data.prompts import PromptSet, load_prompts
from fastgrpo.data.sources import read_split
from fastgrpo.errors import UserError
from fastgrpo.records import Prompt, RewardRequest
from fastgrpo.reward import build_rewards
from fastgrpo.rows import read_file

FRUITS = ["apple", "pear", "plum", "fig"]


def test_template_places() -> None:
    row = {"question": "Why {x}?", "n": 3, "target": {"best": "so"}, "text": '{"inner": "deep"}'}
    assert fill_template("{question}|{n}|{target.best}|{text.inner}|{choices}", row, {"choices": "A"}, "row 0") == (
        "Why {x}?|3|so|deep|A"
    )
    assert fill_template(r"\boxed{} {} { question } {1}", row, {}, "row 0") == r"\boxed{} {} { question } {1}"
    with pytest.raises(
        UserError, match=r"row 0: data.prompt_template has a place \{answer\}.*question, n, target.best"
    ):
        fill_template("{answer}", row, {}, "row 0")


@pytest.mark.parametrize("right", [2, "plum", "C", "c", [0, 0, 1, 0], [False, False, True, False]])
def test_the_letter_is_that_of_the_right_choice(right: Any) -> None:
    text, letter = letter_choices(FRUITS, right, "row 0")
    lines = dict(line.split(". ") for line in text.splitlines())
    assert list(lines) == ["A", "B", "C", "D"] and sorted(lines.values()) == sorted(FRUITS)
    assert letter is not None and lines[letter] == "plum"
    assert letter_choices(FRUITS, right, "elsewhere") == (text, letter)  # the same in every run
    assert letter_choices(FRUITS, None, "row 0") == (text, None)


def test_every_letter_is_right_as_often() -> None:
    """The right one comes first in every row; of 4000 rows each letter should have 1000, deviation 27."""
    letters = Counter(letter_choices([f"{i} {fruit}" for fruit in FRUITS], 0, "row")[1] for i in range(4000))
    assert set(letters) == set("ABCD") and all(abs(count - 1000) < 5 * 27 for count in letters.values())


@pytest.mark.parametrize("right", [4, -1, "E", "kiwi", "", [1, 1, 0, 0], [0, 0, 0, 0], [1, 0], True, 1.0])
def test_what_names_no_choice(right: Any) -> None:
    with pytest.raises(UserError, match=r"row 0: .* does not say which of 4 choices is right"):
        letter_choices(FRUITS, right, "row 0")


@pytest.mark.parametrize("choices", ["apple", ["apple"], [str(i) for i in range(27)], None, {"a": 1}])
def test_what_is_no_list_of_choices(choices: Any) -> None:
    with pytest.raises(UserError, match=r"row 0: data\.choices_key must name a list of 2 to 26 choices"):
        letter_choices(choices, 0, "row 0")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train", ("train", 0, None)),
        ("train[:5]", ("train", 0, 5)),
        ("train[5:]", ("train", 5, None)),
        ("a.b-c[5:9]", ("a.b-c", 5, 9)),
    ],
)
def test_splits(text: str, expected: tuple[str, int, int | None]) -> None:
    assert read_split(text, "data.train_split") == expected


@pytest.mark.parametrize("text", ["train[5]", "train[-5:]", "train[:50%]", "", "a b"])
def test_no_splits(text: str) -> None:
    with pytest.raises(UserError, match=r"data\.train_split=.* is no split; write a name"):
        read_split(text, "data.train_split")


def parquet(path: Path, rows: list[dict[str, Any]], row_group_size: int = 2) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=row_group_size)
    return path


def test_the_first_rows_of_a_file(tmp_path: Path) -> None:
    rows = [{"a": i} for i in range(7)]
    path = parquet(tmp_path / "a.parquet", rows)
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for file in (path, tmp_path / "a.jsonl"):
        for limit in (0, 1, 3, 7, 9):
            assert read_file(file, "x", limit) == rows[:limit]
        assert read_file(file, "x") == rows


def test_a_slice_runs_over_files_and_keeps_the_rows_numbers(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": f"p{i}", "reference": str(i)} for i in range(10)]
    files = [parquet(tmp_path / "0.parquet", rows[:4]), parquet(tmp_path / "1.parquet", rows[4:])]
    asked = []
    monkeypatch.setattr(sources, "resolve_dataset", lambda name, config, split, option: asked.append(split) or files)
    data = DataConfig(train_files=["me/set"], val_files=["me/set"], train_split="all[:6]", val_split="all[6:]")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    train, val = (load_prompts(data, tokenizer, split=split, seed=0) for split in ("train", "val"))
    assert [p.text for p in train.prompts] == [f"p{i}" for i in range(6)]
    assert [(p.uid, p.text) for p in val.prompts] == [(f"me/set/val/{i}", f"p{i}") for i in range(6, 10)]
    assert asked == ["all", "all"]
    empty = replace(data, train_split="all[10:]")
    with pytest.raises(UserError, match=r"data\.train_files: me/set \(default/all\[10:\]\) is empty"):
        load_prompts(empty, tokenizer, split="train", seed=0)


def test_choices_go_below_a_plain_prompt(tmp_path: Path, tiny_model: Path) -> None:
    row = {"question": "Which is blue?", "options": FRUITS, "answer": 2, "level": 1}
    (tmp_path / "q.jsonl").write_text(json.dumps(row))
    data = DataConfig(
        train_files=[str(tmp_path / "q.jsonl")], prompt_key="question", choices_key="options", reference_key="answer"
    )
    (prompt,) = load_prompts(data, AutoTokenizer.from_pretrained(tiny_model), split="train", seed=0).prompts
    text, letter = letter_choices(FRUITS, 2, "row")
    assert (prompt.text, prompt.reference) == (f"Which is blue?\n{text}", letter)
    assert prompt.meta == row


# ------------------------------------------------------------------------------- the experiments' data, by its shape

TRUTHFULQA = {
    "question": "What happens when one cracks one's knuckles?",
    "mc1_targets": {"choices": ["Nothing of note", "Arthritis", "Fingers grow"], "labels": [1, 0, 0]},
    "mc2_targets": {"choices": ["Nothing", "Little", "Arthritis"], "labels": [1, 1, 0]},
}
HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": (
        "from typing import List\n\n\ndef bump(numbers: List[int]) -> List[int]:\n"
        '    """Each number and one.\n    >>> bump([1, 2])\n    [2, 3]\n    """\n'
    ),
    "canonical_solution": "    return [number + 1 for number in numbers]\n",
    "test": (
        "\n\nMETADATA = {'author': 'us'}\n\n\ndef check(candidate):\n    assert candidate([]) == []\n"
        "    assert candidate([1, 2]) == [2, 3]\n    assert candidate([-1]) == [0]\n\n"
    ),
    "entry_point": "bump",
}
DAPO = {
    "data_source": "math_dapo",
    "prompt": [
        {
            "role": "user",
            "content": (
                "Solve this and close with a line of the form Answer: $Answer.\n\nHow many pairs has a set of 9?\n\n"
                'Put the answer on its own line after "Answer:".'
            ),
        }
    ],
    "ability": "MATH",
    "reward_model": {"ground_truth": "36", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4"},
}


@pytest.fixture
def experiment(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[RunConfig, PromptSet, PromptSet]]:
    """The prompts of a shipped experiment, whose hub data set holds `row` `count` times."""

    def load(name: str, row: dict[str, Any], count: int, *more: str) -> tuple[RunConfig, PromptSet, PromptSet]:
        file = parquet(tmp_path / "0000.parquet", [row] * count, row_group_size=1000)
        monkeypatch.setattr(sources, "resolve_dataset", lambda *_, **__: [file])
        config = read_config([f"+exp={name}", "data.max_prompt_length=2000", *more])  # the tiny tokenizer's are bytes
        tokenizer = AutoTokenizer.from_pretrained(tiny_model)
        train, val = (load_prompts(config.data, tokenizer, split=s, seed=0) for s in ("train", "val"))
        return config, train, val

    return load


def totals(config: RunConfig, prompt: Prompt, *responses: str) -> list[float | None]:
    rewards = build_rewards(replace(config.reward, num_workers=1), max_response_length=config.data.max_response_length)
    try:
        requests = [
            RewardRequest(prompt.text, r, prompt.reference, prompt.meta, 0, prompt.uid, 0, 50) for r in responses
        ]
        return [score.total for score in rewards.score(requests)]
    finally:
        rewards.close()


def test_truthfulqa_mc(experiment: Callable[..., Any]) -> None:
    config, train, val = experiment("truthfulqa_mc", TRUTHFULQA, 817)
    assert (len(train), len(val)) == (600, 217)
    prompt = val.prompts[0]
    assert prompt.uid == "truthfulqa/truthful_qa/val/600"
    question, choices, closing = prompt.text.split("\n\n")
    assert question == TRUTHFULQA["question"] and closing.endswith(r"in \boxed{}.")
    letters = {line[3:]: line[0] for line in choices.splitlines()}
    assert prompt.reference == letters["Nothing of note"]
    wrong = letters["Arthritis"]
    assert totals(config, prompt, rf"So \boxed{{{prompt.reference}}}.", rf"\boxed{{{wrong}}}", "No idea") == [
        1.0,
        0.1,
        0.0,
    ]


def test_humaneval(experiment: Callable[..., Any]) -> None:
    config, train, val = experiment("humaneval", HUMANEVAL, 164)
    assert (len(train), len(val)) == (132, 32)
    prompt = train.prompts[0]
    assert HUMANEVAL["prompt"] in prompt.text and "assert" not in prompt.text and "canonical" not in prompt.text
    assert prompt.reference == HUMANEVAL["test"]
    whole = HUMANEVAL["prompt"] + HUMANEVAL["canonical_solution"]
    bare = "def bump(numbers: List[int]):\n    return [n + 1 for n in numbers]"  # List comes from the prompt
    answers = (f"```python\n{whole}```", f"```python\n{bare}\n```", bare.replace("+ 1", "+ 2"), "I cannot.")
    try:
        assert totals(config, prompt, *answers) == [1.0, 1.0, 0.0, 0.0]
    except UserError as error:
        pytest.skip(str(error))  # no namespaces here


def test_dapo_math(experiment: Callable[..., Any]) -> None:
    pytest.importorskip("math_verify")
    shipped = read_config(["+exp=dapo_math"]).data
    assert (shipped.train_split, shipped.val_split) == ("train[:17405]", "train[17405:17917]")
    config, train, val = experiment(
        "dapo_math", DAPO, 40, "data.train_split='train[:17]'", "data.val_split='train[17:20]'"
    )
    assert (len(train), len(val)) == (17, 3)
    prompt = train.prompts[0]
    assert prompt.text == DAPO["prompt"][0]["content"] and prompt.reference == "36"
    answers = ("9 * 8 / 2\n\nAnswer: 36", "Answer: $36$", r"Answer: \boxed{36}", "Answer: 72", "36 of them", "many")
    assert totals(config, prompt, *answers) == [1.0, 1.0, 1.0, 0.0, 1.0, 0.0]
    assert config.reward.functions["overlong"].overlong_buffer_len == 1024
