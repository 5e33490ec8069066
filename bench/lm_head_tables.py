"""Tables of a result file of bench_lm_head.py, as Markdown.

Each op has a table: implementations by speed, a column for each shape with the median time, p20 and p80, and the
median's ratio to that of the bare GEMMs in the same turns, then the largest peak memory and errors over the shapes.
What could not run is listed with its reason. Above them stands how they are to be read: a table is copied, a page is
not.
"""

from __future__ import annotations

import math
from collections import Counter

from lm_head_exact import NUM_ROWS, NUM_TOKENS

TITLES = {
    "train": "Training pass: loss and gradients of hidden and weight; floor: its three products",
    "ce": "The same on mean cross entropy, for peers without a policy loss; the floor is the same",
    "nograd": "No-gradient pass: logprob and entropy; floor: its product",
    "row": "Row kernel alone",
}
ERRORS = {
    "max_abs_logp_err": "largest logprob error",
    "max_abs_entropy_err": "largest entropy error",
    "rel_dx_err": "largest dX error",
    "rel_dw_err": "largest dW error",
}


def make_markdown(content: dict) -> str:
    rows = content["rows"]
    tables = [
        table
        for op in TITLES
        for num_rows in sorted({row["T"] for row in rows if row["op"] == op})
        for table in _op_tables(op, num_rows, [row for row in rows if (row["op"], row["T"]) == (op, num_rows)])
    ]
    return "\n\n".join([_header(content), *tables, *_memory_table([row for row in rows if row["op"] == "memory"])])


def _header(content: dict) -> str:
    """What was measured where, at which commits, and how the tables are to be read."""
    rows, data = content["rows"], content["data"]
    packages = sorted({f"{name} {version}" for row in rows for name, version in row["versions"].items()})
    lines = [f"{content['device']}; {', '.join(packages)}; commit {_commits(rows)}."]
    if data:
        entropies = [entry["mean_entropy"] for entry in data]
        lines[0] += f" Mean entropy of the rows {min(entropies):.2f} to {max(entropies):.2f} nats."
    if counts := [row["repeats"] for row in rows if row["ms_p50"] is not None]:
        calls = "-".join(str(count) for count in sorted({min(counts), max(counts)}))
        lines.append(
            f"Times are medians of {calls} calls in ms, p20-p80 in brackets, then the multiple of the floor's median: "
            "of the bare products over all rows at once, with bf16 results. That is the time of these products, not a "
            "bound: cuBLAS chooses its kernels by shape, and in chunks they may be faster. Peak memory (above the "
            f"inputs) and errors are the largest over the shapes. Errors are against fp64, on a sample of {NUM_ROWS} "
            f"rows and {NUM_TOKENS} rows of the weight: of logprob and entropy the largest difference in nats, of the "
            "gradients dX and dW the norm of the difference relative to the norm."
        )
    return "\n\n".join(lines)


def _commits(rows: list[dict]) -> str:
    """One commit, or each with the shapes (hidden / vocabulary) that it measured."""
    shapes: dict[str, dict[str, None]] = {}
    for row in rows:
        shapes.setdefault(row["commit"][:10], {})[f"{row['H']} / {row['V']}"] = None
    if len(shapes) < 2:
        return next(iter(shapes), "unknown")
    return ", ".join(f"{commit} at {' and '.join(names)}" for commit, names in shapes.items())


def shapes_of(rows: list[dict]) -> list[tuple[int, int]]:
    return list(dict.fromkeys((row["H"], row["V"]) for row in rows))


def by_impl(rows: list[dict]) -> dict[str, dict[tuple[int, int], dict]]:
    found: dict[str, dict[tuple[int, int], dict]] = {}
    for row in rows:
        found.setdefault(row["impl"], {})[row["H"], row["V"]] = row
    return found


def slowdown(row: dict | None) -> float | None:
    """Median over the floor's in the same turns."""
    if row is None or row["ms_p50"] is None or not row["gemm_floor_ms"]:
        return None
    return row["ms_p50"] / row["gemm_floor_ms"]


def _order(cells: dict[tuple[int, int], dict]) -> float:
    """Geometric mean of the ratios: one number to sort by."""
    ratios = [ratio for row in cells.values() if (ratio := slowdown(row))]
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else math.inf


def _op_tables(op: str, num_rows: int, rows: list[dict]) -> list[str]:
    shapes, impls = shapes_of(rows), by_impl(rows)
    timed = sorted(
        (n for n, c in impls.items() if any(r["ms_p50"] is not None for r in c.values())),
        key=lambda n: _order(impls[n]),
    )
    head = ["", *(f"{hidden} / {vocab}" for hidden, vocab in shapes), "largest peak", *ERRORS.values()]
    lines = [_line(head), _line(["---"] * len(head))]
    for name in timed:
        cells = impls[name]
        peak = _largest(cells, "peak_gib")
        lines.append(
            _line(
                [
                    name,
                    *(_time(cells.get(shape)) for shape in shapes),
                    "" if peak is None else f"{peak:.2f} GiB",
                    *(_scientific(_largest(cells, key)) for key in ERRORS),
                ]
            )
        )
    tables = [f"**{TITLES[op]}** (T = {num_rows}, hidden / vocabulary)"]
    if timed:
        tables.append("\n".join(lines))
    if missing := _reasons(impls):
        tables.append("Not measured: " + "; ".join(missing) + ".")
    return tables


def _reasons(impls: dict[str, dict[tuple[int, int], dict]]) -> list[str]:
    found = []
    for name, cells in impls.items():
        reasons = Counter(row["error"] for row in cells.values() if row["error"])
        for reason, count in reasons.items():
            where = (
                ""
                if count == len(cells)
                else " at " + ", ".join(f"{h} / {v}" for (h, v), r in cells.items() if r["error"] == reason)
            )
            found.append(f"{name}{where} ({reason})")
    return found


def _memory_table(rows: list[dict]) -> list[str]:
    """Peak and time of the training pass over T."""
    if not rows:
        return []
    names = list(dict.fromkeys(row["impl"] for row in rows))
    (hidden, vocab), *_ = shapes_of(rows)
    lines = [_line(["T", *names]), _line(["---"] * (1 + len(names)))]
    for num_rows in sorted({row["T"] for row in rows}):
        found = {row["impl"]: row for row in rows if row["T"] == num_rows}
        lines.append(_line([str(num_rows), *(_memory(found.get(name)) for name in names)]))
    title = (
        f"**Memory of the training pass** (H = {hidden}, V = {vocab}): peak above the inputs, of that beyond the "
        "gradients and one fp32 sum of the weight's, and time"
    )
    return [title, "\n".join(lines)]


def _memory(row: dict | None) -> str:
    if row is None or row["error"] or row["ms_p50"] is None:
        return (row or {}).get("error") or ""
    return f"{row['peak_gib']:.2f} GiB, {row['beyond_gradients_gib']:.2f} GiB, {row['ms_p50']:.1f} ms"


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _time(row: dict | None) -> str:
    if row is None or row["ms_p50"] is None:
        return "-"
    ratio = slowdown(row)
    digits = 1 if row["ms_p50"] >= 1 else 3
    low, middle, high = (f"{row[f'ms_p{p}']:.{digits}f}" for p in (20, 50, 80))
    return f"{middle} ({low}-{high})" + ("" if ratio is None else f" {ratio:.2f} x")


def _largest(cells: dict[tuple[int, int], dict], key: str) -> float | None:
    """Largest over the shapes; NaN, if any, since a comparison would lose it."""
    values = [row[key] for row in cells.values() if row.get(key) is not None]
    return next((value for value in values if math.isnan(value)), max(values, default=None))


def _scientific(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"
