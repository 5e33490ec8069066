"""Scores from a file: by text and by number, several people, what is missing, what is wrong with the file."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from fastgrpo.config import RewardConfig, RewardFunctionConfig, RewardKind
from fastgrpo.errors import UserError
from fastgrpo.records import RewardRequest
from fastgrpo.reward import Rewards, build_rewards

ROWS = [
    {"uid": "t/0", "response": "seven \n", "score": 1},
    {"uid": "t/0", "response": "eight", "score": 0.0},
    {"uid": "t/0", "response": "about seven", "score": 0},
    {"uid": "t/0", "response": "about seven", "score": 1},
    {"uid": "t/0", "response": "about seven", "score": None},
    {"uid": "t/1", "sample": 2, "score": -0.5},
    {"uid": "t/1", "sample": 3, "score": None},
    {"uid": "t/2", "sample": 0, "response": "both", "score": 3, "prompt": "other columns are free"},
]


def rewards_of(path: Path) -> Rewards:
    function = RewardFunctionConfig(kind=RewardKind["file"], path=str(path), weight=2.0)
    return build_rewards(RewardConfig(functions={"people": function}))


def request(uid: str, response: str, sample: int = 0) -> RewardRequest:
    return RewardRequest("p", response, None, {}, 0, uid, sample)


@pytest.mark.parametrize("form", ["jsonl", "json", "parquet"])
def test_looked_up(tmp_path: Path, form: str) -> None:
    path = tmp_path / f"scores.{form}"
    if form == "parquet":
        pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist([dict.fromkeys(("uid", "response", "sample", "score")) | r for r in ROWS]), path
        )
    else:
        path.write_text("\n".join(map(json.dumps, ROWS)) if form == "jsonl" else json.dumps(ROWS))
    pairs: list[tuple[RewardRequest, float | None]] = [
        (request("t/0", "seven"), 1.0),
        (request("t/0", "eight", 5), 0.0),
        (request("t/0", "about seven"), 0.5),  # the mean of two people; the third did not say
        (request("t/0", "nine"), None),
        (request("t/1", "whatever", 2), -0.5),
        (request("t/1", "whatever", 3), None),
        (request("t/1", "whatever", 4), None),
        (request("t/2", "both"), 3.0),
        (request("t/2", "other"), None),  # the text was given, so the number does not stand for others
        (request("t/3", "seven"), None),
    ]
    scores = rewards_of(path).score([given for given, _ in pairs])
    assert [s.parts["people"] for s in scores] == [value for _, value in pairs]
    assert [s.total for s in scores] == [None if value is None else 2 * value for _, value in pairs]
    assert [s.status for s in scores] == ["unscored" if value is None else "scored" for _, value in pairs]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"uid": "t/0", "score": 1},
            'row 1 is not {"uid": text, "response": text or "sample": number, "score": number}',
        ),
        ({"response": "x", "score": 1}, "row 1 is not"),
        ({"uid": "t/0", "response": "x"}, "row 1 is not"),
        ({"uid": "t/0", "response": "x", "score": "1"}, "row 1: the score '1' is neither a finite number nor null"),
        ({"uid": "t/0", "response": "x", "score": float("nan")}, "row 1: the score nan"),
    ],
)
def test_wrong_rows(tmp_path: Path, row: dict, message: str) -> None:
    path = tmp_path / "scores.jsonl"
    path.write_text("\n".join(map(json.dumps, [ROWS[0], row])))
    with pytest.raises(UserError) as refused:
        rewards_of(path)
    assert message in str(refused.value) and "reward.functions.people.path" in str(refused.value)


def test_no_such_file(tmp_path: Path) -> None:
    for name, text, message in (
        ("missing.jsonl", None, r"there is no file .*missing\.jsonl \(relative paths start at"),
        ("scores.csv", "uid,score", r".*csv is no \.jsonl, \.json, \.parquet file"),
        ("empty.jsonl", "", r".*empty\.jsonl holds no row"),
    ):
        if text is not None:
            (tmp_path / name).write_text(text)
        with pytest.raises(UserError, match=rf"people\.path: {message}"):
            rewards_of(tmp_path / name)
