"""Reward from a file (kind `file`): what people said of answers, looked up.

    {"uid": "train/train/17", "sample": 0, "score": 1}              by the answer's number, or
    {"uid": "train/train/17", "response": "7 + 6 is 13.", "score": 0.5}   by its text, white space at the ends apart

`uid` and `sample` are as in the run folder's rollouts/ and validation/ files, so those files with a `score` beside each
answer are the form. An answer that several rows speak of gets their mean; one that no row speaks of, and one whose
score is null, is unscored. A number without a text holds for that place whatever the answer is: meant for answers that
are drawn again with the same seeds, not for training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fastgrpo.errors import UserError
from fastgrpo.records import RewardRequest
from fastgrpo.reward.function import LocalReward, Outcome, Setting
from fastgrpo.rows import SUFFIXES, Row, read_file

if TYPE_CHECKING:
    import torch

    from fastgrpo.config import RewardFunctionConfig

_Key = tuple[str, int | str]


def build(label: str, config: RewardFunctionConfig, setting: Setting) -> LocalReward:
    """Reads the file; UserError for what is wrong with it."""
    option = f"reward.functions.{label}.path"
    path = Path(config.path or "").expanduser().resolve()
    if not path.is_file():
        raise UserError(f"{option}: there is no file {path} (relative paths start at {Path.cwd()})")
    if path.suffix not in SUFFIXES:
        raise UserError(f"{option}: {path} is no {', '.join(SUFFIXES)} file")
    found: dict[_Key, list[float | None]] = {}
    for index, row in enumerate(read_file(path, option)):
        key, score = _read(row, f"{option}: {path} row {index}")
        found.setdefault(key, []).append(score)
    if not found:
        raise UserError(f"{option}: {path} holds no row, so nothing would be scored; give a file of scored answers")
    return FileReward(label, config.weight, str(path), {key: _mean(scores) for key, scores in found.items()})


def _read(row: Row, where: str) -> tuple[_Key, float | None]:
    uid, score = row.get("uid"), row.get("score")
    which = row.get("response") if isinstance(row.get("response"), str) else row.get("sample")
    if not isinstance(uid, str) or "score" not in row or isinstance(which, bool) or not isinstance(which, int | str):
        raise UserError(f'{where} is not {{"uid": text, "response": text or "sample": number, "score": number}}')
    if score is not None and not (isinstance(score, int | float) and math.isfinite(score)):
        raise UserError(f"{where}: the score {score!r} is neither a finite number nor null")
    return (uid, which.strip() if isinstance(which, str) else which), None if score is None else float(score)


def _mean(scores: Sequence[float | None]) -> float | None:
    known = [score for score in scores if score is not None]
    return math.fsum(known) / len(known) if known else None


class FileReward:
    """A text is looked up before a number."""

    def __init__(self, label: str, weight: float, path: str, scores: dict[_Key, float | None]) -> None:
        self.label = label
        self.weight = weight
        self.notes = (f"reward {label}: {len(scores)} scored answers in {path}",)
        self._path = path
        self._scores = scores

    def __str__(self) -> str:
        return f"reward {self.label!r} ({self._path})"

    def load(self, device: torch.device) -> None:
        """Nothing to load."""

    def outcomes(self, requests: Sequence[RewardRequest]) -> list[Outcome]:
        return [self._outcome(request) for request in requests]

    def _outcome(self, request: RewardRequest) -> Outcome:
        for which in (request.response.strip(), request.sample):
            if (score := self._scores.get((request.uid, which))) is not None:
                return Outcome("scored", score)
        return Outcome("unscored")
