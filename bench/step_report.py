"""The result file of the benchmarks of whole steps: what goes into a row; bench_step.py's table and its picture."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cli import lacks_rows, read_result, write_json

COLORS = {"sync": "tab:purple", "gen": "tab:blue", "reward": "0.7", "old": "tab:olive", "ref": "tab:cyan"}
KEYS = ("impl", "workload", "step_s_p50", "phases", "train_peak_gib", "rollout_peak_gib", "mfu", "masters", "error")
COLORS |= {"update": "tab:red", "gate": "0.5", "rest": "0.85"}


class Rows:
    """A JSON object {"rows": [...]}, a row for each value of `key`, rewritten whole at every change. `common` goes into
    every row that is put there. Refuses a file of another kind."""

    def __init__(self, path: Path, common: dict[str, Any], key: tuple[str, ...] = ("impl", "workload")) -> None:
        self._path, self._common, self._key = path, common, key
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            self._rows()

    def _rows(self) -> list[dict[str, Any]]:
        return read_result(self._path, partial(lacks_rows, wanted={"rows": self._key}))["rows"]

    def put(self, row: dict[str, Any]) -> None:
        """Adds `row`, in the place of one of the same key."""
        kept = self._rows() if self._path.exists() else []
        rows = [old for old in kept if any(old[k] != row[k] for k in self._key)] + [row | self._common]
        write_json(self._path, {"rows": rows})


def summary(results: Sequence[dict[str, Any]], warm_up: int) -> dict[str, Any]:
    """Of what run_child says of step_ours.run and its like: medians over the steps after the warm-up of all processes,
    whether they came to their end or not, the largest peaks, the longest start and process."""
    measured = [result for result in results if len(result.get("steps", [])) > warm_up]
    steps = [step for result in measured for step in result["steps"][warm_up:]]
    last = measured[-1] if measured else {}
    return {
        "step_s_p50": median([step["step_s"] for step in steps]),
        "phases": {
            name: median([step["phases"][name] for step in steps]) for name in (steps[0]["phases"] if steps else [])
        },
        "train_peak_gib": largest(steps, "train_peak_gib"),
        "rollout_peak_gib": largest(steps, "rollout_peak_gib"),
        "planned": last.get("planned"),
        "mfu": median([step["mfu"] for step in steps if step.get("mfu") is not None]),
        "alloc_retries": largest(steps, "alloc_retries"),
        "gen_tail_s": median([step["gen_tail_s"] for step in steps if step.get("gen_tail_s") is not None]),
        "gap_abs_mean": largest(steps, "gap_abs_mean"),
        "response_tokens_mean": mean(steps, "response_tokens_mean"),
        "masters": last.get("masters"),
        "warm_up": warm_up,
        "step_s": [round(step["step_s"], 3) for step in steps],
        "start_s": largest(results, "start_s"),
        "process_s": largest(results, "process_s"),
        "engine": last.get("engine"),
        "settings": last.get("settings"),
        "error": next((result["error"] for result in results if "error" in result), None),
    }


def median(values: Sequence[float]) -> float | None:
    return round(float(np.median(values)), 4) if values else None


def step_time(row: dict[str, Any]) -> str:
    """A table's cell; of an incomplete measurement with what it lacks."""
    if row["step_s_p50"] is None:
        return f"not measured: {row['error']}"
    return f"{row['step_s_p50']:.2f} s" + (f" (incomplete: {row['error']})" if row["error"] else "")


def largest(steps: Sequence[dict[str, Any]], name: str) -> float | None:
    values = [step[name] for step in steps if step.get(name) is not None]
    return round(max(values), 4) if values else None


def mean(steps: Sequence[dict[str, Any]], name: str) -> float | None:
    values = [step[name] for step in steps if step.get(name) is not None]
    return round(float(np.mean(values)), 4) if values else None


def render(path: Path) -> str:
    """Draws the picture beside `path`; the table as Markdown. Refuses what bench_step.py has not written."""
    rows = read_result(path, partial(lacks_rows, wanted={"rows": KEYS}), "bench_step.py")["rows"]
    draw(rows, path.with_suffix(".png"))
    head = ["", "workload", "step", "phases", "train peak", "rollout peak", "MFU"]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        phases = " ".join(f"{name} {seconds:.2f}" for name, seconds in row["phases"].items() if seconds >= 0.005)
        lines.append(
            [
                row["impl"] if row["masters"] is None else f"{row['impl']} ({row['masters']} masters)",
                row["workload"],
                step_time(row),
                phases,
                shown(row["train_peak_gib"], "{:.1f} GiB"),
                shown(row["rollout_peak_gib"], "{:.1f} GiB"),
                shown(row["mfu"] and 100 * row["mfu"], "{:.0f} %"),
            ]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def shown(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """A bar a row, cut into its phases."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    measured = [row for row in rows if row["step_s_p50"] is not None]
    figure = Figure(figsize=(9, 1.2 + 0.6 * max(1, len(measured))), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    labels = [f"{row['impl']}\n{row['workload']}" for row in measured]
    for y, row in enumerate(measured):
        left = 0.0
        rest = max(0.0, row["step_s_p50"] - sum(row["phases"].values()))
        for name, seconds in [*row["phases"].items(), ("rest", rest)]:
            axes.barh(y, seconds, left=left, color=COLORS.get(name, "tab:gray"), label=name)
            left += seconds
        axes.text(left, y, f" {row['step_s_p50']:.2f} s{', incomplete' if row['error'] else ''}", va="center")
    axes.set_yticks(range(len(measured)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.2 * max((row["step_s_p50"] for row in measured), default=1.0))  # figures stand behind the bars
    axes.set_xlabel("seconds a step, median")
    handles, names = axes.get_legend_handles_labels()
    unique = dict(zip(names, handles, strict=True))
    if unique:
        axes.legend(unique.values(), unique.keys(), fontsize=7, loc="upper left", bbox_to_anchor=(1.02, 1.0))
    figure.savefig(path, dpi=130)
