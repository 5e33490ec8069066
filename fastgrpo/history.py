"""What a run folder says of the steps so far, and the way back to a step of it.

    metrics.jsonl   1 2 3 [4 5]        --go_back(folder, 3)-->   metrics.jsonl 1 2 3
    rollouts/       1 2 3 [4 5 half a 6]                         rollouts/     1 2 3
    checkpoints/    2 3 [4, 6.part], latest: 4                   checkpoints/  2 3, latest: 3
    model/          if it is finished after more than 3          aside-<time>/ the rest, as it was
    finished                                                     (gone: it is not)

A row's number is the steps done when it was written; validation has rows of its own under the number of its step,
which are later than a checkpoint of that step that does not know of them. Rows that could not be written are in the
checkpoint (report.py), and go_back writes those that the file lacks.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastgrpo.checkpoint import CHECKPOINTS, FINISHED, Start
from fastgrpo.checkpoint.disk import PART, remove_tree, write_durably
from fastgrpo.checkpoint.folders import aside_folder, point_again, set_aside
from fastgrpo.checkpoint.model import ADAPTER, MODEL
from fastgrpo.checkpoint.runs import finished_steps

log = logging.getLogger("fastgrpo")

REPORT = "report"  # the name of the report's state in a checkpoint
_NUMBERED = re.compile(r"step_(\d+)(\.jsonl)?")
RowKey = tuple[int, bool]  # steps done, whether it is a validation's: no two rows have the same


@dataclass(slots=True)
class History:
    """Curves of the run, and the last value of each metric."""

    curve: list[tuple[int, float]] = field(default_factory=list)  # step, mean reward
    scores: list[tuple[int, float, int]] = field(default_factory=list)  # step, held-out score, samples
    steps: int = 0
    rows: set[RowKey] = field(default_factory=set)
    _latest: dict[str, tuple[int, float]] = field(default_factory=dict)

    def add(self, row: Mapping[str, Any]) -> None:
        step = int(row["step"])
        self.rows.add(_key(row))
        self.steps = max(self.steps, step)
        if row.get("reward/mean") is not None:
            self.curve.append((step, row["reward/mean"]))
        if row.get("val/reward") is not None:
            self.scores.append((step, row["val/reward"], int(row.get("val/scored") or 0)))
        self._latest |= {name: (step, value) for name, value in row.items() if value is not None}

    def missing(self, after: int, step: int, validated_at: int) -> str:
        """Which rows of the steps after `after` up to `step`, and of the last validation, are not there; "" if none."""
        steps = [number for number in range(after + 1, step + 1) if (number, False) not in self.rows]
        validation = (
            validated_at >= 0 and (validated_at > after or after == 0) and (validated_at, True) not in self.rows
        )
        words = [f"step{'s' if len(steps) > 1 else ''} {_ranges(steps)}"] if steps else []
        return " and ".join(words + ([f"the validation at step {validated_at}"] if validation else []))

    def knows(self, metric: str) -> bool:
        return metric in self._latest

    def value_at(self, step: int, metric: str | None) -> float | None:
        at, value = self._latest.get(metric or "", (-1, 0.0))
        return value if at == step else None


def rows_after(start: Start) -> int:
    """The step after which the rows of the run folder begin: one that goes on from another's checkpoint has none of the
    steps before."""
    return int(_report_of(start).get("rows_after", 0)) if start.goes_on else start.step


def take_up(start: Start, *, best_mode: str) -> History:
    """`go_back` to the checkpoint of `start`, with the rows that are in it. What is missing then is said."""
    validated_at = int(_parts(start).get("trainer", {}).get("validated_at", -1))
    rows = str(_report_of(start).get("rows", "")) if start.goes_on else ""
    validated = validated_at == start.step
    history = go_back(start.folder, start.step, validated=validated, best_mode=best_mode, kept_rows=rows)
    if start.goes_on and (missing := history.missing(rows_after(start), start.step, validated_at)):
        log.warning(
            "%s has no row of %s: what somebody deleted, cut or moved away is not made anew; the run goes on after "
            "step %d without it",
            start.folder / "metrics.jsonl", missing, start.step,
        )  # fmt: skip
    return history


def _parts(start: Start) -> dict[str, Any]:
    return {} if start.manifest is None else start.manifest.parts


def _report_of(start: Start) -> dict[str, Any]:
    """`Report.state`; an older checkpoint has none."""
    return _parts(start).get(REPORT, {})


def go_back(folder: Path, step: int, *, validated: bool = True, best_mode: str = "max", kept_rows: str = "") -> History:
    """Set aside everything in the run folder that is later than `step` (`validated`: than its validation); the history
    of what stays. `kept_rows`: those that the checkpoint has because they could not be written; they are now. Folders
    of checkpoints that were still being written are removed, and so is the word that the run has finished: whoever
    looks for a run to go on with must find it again. Safe to be cut short and called again."""
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
    return _cut_rows(folder / "metrics.jsonl", step, aside, kept_rows.encode(), validated=validated)


def number(path: Path) -> int | None:
    match = _NUMBERED.fullmatch(path.name)
    return int(match[1]) if match else None


def _cut_rows(file: Path, step: int, aside: Path, more: bytes, *, validated: bool) -> History:
    """The rows after `step`, and a line that was cut short by the end of the process, go into `aside`; so does, with a
    warning, a line that is no row. Those of `more` that the file lacks are put in their places."""
    history = History()
    kept: list[bytes] = []
    late: list[bytes] = []
    bad: list[int] = []
    for number, line in enumerate(file.read_bytes().splitlines(keepends=True) if file.exists() else (), start=1):
        row = _row(line)
        if row is None and line.endswith(b"\n"):
            bad.append(number)
        later = row is not None and not validated and _key(row) == (step, True)
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
    lacked = [line for line in more.splitlines(keepends=True) if _key(json.loads(line)) not in history.rows]
    if lacked:
        history, kept = History(), sorted(kept + lacked, key=lambda line: _key(json.loads(line)))
        for line in kept:
            history.add(json.loads(line))
        log.warning("%s: rows that could not be written before the checkpoint are written now: %d", file, len(lacked))
    if late or lacked:
        write_durably(file, b"".join(kept).decode())
    return history


def _key(row: Mapping[str, Any]) -> RowKey:
    return int(row["step"]), "val/scored" in row


def _ranges(numbers: Sequence[int]) -> str:
    """[1, 2, 3, 5] -> "1-3, 5"."""
    there = set(numbers)
    starts = [number for number in numbers if number - 1 not in there]
    ends = [number for number in numbers if number + 1 not in there]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def _row(line: bytes) -> dict[str, Any] | None:
    """None for anything but a whole line with a step and numbers."""
    try:
        row = json.loads(line.decode()) if line.endswith(b"\n") else None
    except ValueError:
        return None
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        return None
    return row if all(value is None or isinstance(value, int | float) for value in row.values()) else None
