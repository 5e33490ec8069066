"""The table of bench_layouts.py: each layout beside one GPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cli import lacks_rows, read_result
from layout_names import ONE
from step_report import shown, step_time

KEYS = ("what", "layout", "workload", "job", "prompts", "world", "error")
PARITY_HEAD = ("layout", "GPUs", "dtype", "compared with", "loss", "norm", "whole gradient", "worst tensor", "")
STEP_HEAD = ("layout", "GPUs", "prompts", "step", "of one GPU's", "update", "of one GPU's", "MFU")
STEP_HEAD += ("sync", "rollout", "train peak (planned)", "rollout peak (planned)")


def render(path: Path) -> str:
    """Markdown: a table for the first update, and one for each kind of steps; relative errors, medians, GiB.
    Refuses what bench_layouts.py has not written."""
    rows = read_result(path, partial(lacks_rows, wanted={"rows": KEYS}), "bench_layouts.py")["rows"]
    rows.sort(key=lambda row: (row["workload"], row["world"]))
    parts = []
    parity = [row for row in rows if row["what"].startswith("parity")]
    if parity:
        parts.append(
            "**The first update against one GPU's** (relative errors)\n\n" + table(PARITY_HEAD, parity_lines(parity))
        )
    for what in dict.fromkeys(row["what"] for row in rows if row not in parity):
        own = [row for row in rows if row["what"] == what]
        title = {"steps": "Whole steps", "update": "The update alone, on made answers"}[what]
        parts.append(f"**{title}** (medians)\n\n" + table(STEP_HEAD, step_lines(own)))
    return "\n\n".join(parts)


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines))


def parity_lines(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    return [
        [
            row["layout"],
            str(row["world"]),
            row["dtype"],
            row["against"] or "",
            *(shown(row[name], "{:.1e}") for name in ("loss_error", "norm_error", "gradient_error", "tensor_error")),
            verdict(row),
        ]
        for row in rows
    ]


def verdict(row: dict[str, Any]) -> str:
    if row["error"]:
        return f"not measured: {row['error']}"
    if row["failures"]:
        more = f", and {len(row['failures']) - 1} more" if len(row["failures"]) > 1 else ""
        return f"DIFFERS: {row['failures'][0]}{more}"
    return "agrees" if row["layout"] != ONE else "the truth"


def step_lines(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    lines = []
    for row in rows:
        one = next((r for r in rows if r["layout"] == ONE and r["job"] == row["job"]), {})
        update, phases = row["phases"].get("update"), row["phases"]
        lines.append(
            [
                row["layout"],
                str(row["world"]),
                str(row["prompts"]),
                step_time(row),
                shown(ratio(row["step_s_p50"], one.get("step_s_p50")), "{:.2f}"),
                shown(update, "{:.2f} s"),
                shown(ratio(update, one.get("phases", {}).get("update")), "{:.2f}"),
                shown(row["mfu"] and 100 * row["mfu"], "{:.0f} %"),
                shown(phases.get("sync"), "{:.2f} s"),
                shown(phases.get("gen"), "{:.2f} s"),
                *(peak(row, name) for name in ("train", "rollout")),
            ]
        )
    return lines


def ratio(value: float | None, one: float | None) -> float | None:
    return value / one if value is not None and one else None


def peak(row: dict[str, Any], name: str) -> str:
    planned = (row["planned"] or {}).get(name)
    return (shown(row[f"{name}_peak_gib"], "{:.1f}") + shown(planned, " ({:.1f})")).strip()
