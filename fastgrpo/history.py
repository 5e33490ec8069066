"""What a run folder says of the steps so far, and the way back to a step of it.

    metrics.jsonl   1 2 3 [4 5]        --go_back(folder, 3)-->   metrics.jsonl 1 2 3
    rollouts/       1 2 3 [4 5 half a 6]                         rollouts/     1 2 3
    checkpoints/    2 3 [4, 6.part], latest: 4                   checkpoints/  2 3, latest: 3
    model/          if it is finished after more than 3          aside-<time>/ the rest, as it was
    finished                                                     (gone: it is not)

A row's number is the steps done when it was written; validation has rows of its own under the number of its step,
which are later than a checkpoint of that step that does not know of them.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastgrpo.checkpoint import CHECKPOINTS, FINISHED
from fastgrpo.checkpoint.disk import PART, remove_tree, write_durably
from fastgrpo.checkpoint.folders import aside_folder, point_again, set_aside
from fastgrpo.checkpoint.model import ADAPTER, MODEL
from fastgrpo.checkpoint.runs import finished_steps

log = logging.getLogger("fastgrpo")

_NUMBERED = re.compile(r"step_(\d+)(\.jsonl)?")


@dataclass(slots=True)
class History:
    """Curves of the run, and the last value of each metric."""

    curve: list[tuple[int, float]] = field(default_factory=list)  # step, mean reward
    scores: list[tuple[int, float, int]] = field(default_factory=list)  # step, held-out score, samples
    steps: int = 0
    _latest: dict[str, tuple[int, float]] = field(default_factory=dict)

    def add(self, row: Mapping[str, Any]) -> None:
        step = int(row["step"])
        self.steps = max(self.steps, step)
        if row.get("reward/mean") is not None:
            self.curve.append((step, row["reward/mean"]))
        if row.get("val/reward") is not None:
            self.scores.append((step, row["val/reward"], int(row.get("val/scored") or 0)))
        self._latest |= {name: (step, value) for name, value in row.items() if value is not None}

    def knows(self, metric: str) -> bool:
        return metric in self._latest

    def value_at(self, step: int, metric: str | None) -> float | None:
        at, value = self._latest.get(metric or "", (-1, 0.0))
        return value if at == step else None


def go_back(folder: Path, step: int, *, validated: bool = True, best_mode: str = "max") -> History:
    """Set aside everything in the run folder that is later than `step` (`validated`: than its validation); the history
    of what stays. Folders of checkpoints that were still being written are removed, and so is the word that the run has
    finished: whoever looks for a run to go on with must find it again. Safe to be cut short and called again."""
    aside = aside_folder(folder)
    if finished_steps(folder) > step:
        set_aside([path for name in (MODEL, ADAPTER) if (path := folder / name).is_dir()], aside)
    (folder / FINISHED).unlink(missing_ok=True)
    for unfinished in (folder / CHECKPOINTS).glob(f"*{PART}"):
        remove_tree(unfinished)
    for name in ("rollouts", "validation", CHECKPOINTS):
        first = step if name == "validation" and not validated else step + 1
        late = [path for path in sorted((folder / name).glob("step_*")) if (number(path) or 0) >= first]
        set_aside(late, aside / name)
    point_again(folder / CHECKPOINTS, best_mode)
    return _cut_rows(folder / "metrics.jsonl", step, aside, validated=validated)


def number(path: Path) -> int | None:
    match = _NUMBERED.fullmatch(path.name)
    return int(match[1]) if match else None


def _cut_rows(file: Path, step: int, aside: Path, *, validated: bool) -> History:
    """The rows after `step`, and a line that was cut short by the end of the process, go into `aside`; so does, with a
    warning, a line that is no row."""
    history = History()
    kept: list[bytes] = []
    late: list[bytes] = []
    bad: list[int] = []
    for number, line in enumerate(file.read_bytes().splitlines(keepends=True) if file.exists() else (), start=1):
        row = _row(line)
        if row is None and line.endswith(b"\n"):
            bad.append(number)
        later = row is not None and row["step"] == step and not validated and "val/scored" in row
        if row is None or row["step"] > step or later:
            late.append(line)
        else:
            kept.append(line)
            history.add(row)
    if bad:
        log.warning("%s: line %s is no row of metrics and is moved to %s", file, ", ".join(map(str, bad)), aside)
    if late:
        aside.mkdir(exist_ok=True)
        (aside / file.name).write_bytes(b"".join(late))
        write_durably(file, b"".join(kept).decode())
    return history


def _row(line: bytes) -> dict[str, Any] | None:
    """None for anything but a whole line with a step and numbers."""
    try:
        row = json.loads(line.decode()) if line.endswith(b"\n") else None
    except ValueError:
        return None
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        return None
    return row if all(value is None or isinstance(value, int | float) for value in row.values()) else None
