"""Tables and picture of a result file of bench_lm_head.py. Needs the file alone: no GPU, no kernels.

Each op has a table: implementations by speed, a column for each shape with the median time and its ratio to the bare
GEMMs of the same run, then the largest peak memory and errors over the shapes. What could not run is listed with its
reason. The picture draws the ratios, one line for each implementation, from shape to shape.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

PICTURE_TOP = 3.0
MARKER = "<!-- lm_head table -->"
TITLES = {
    "train": "Training pass: loss and gradients of hidden and weight; floor = its three bare GEMMs",
    "ce": "The same on mean cross entropy, for peers without a policy loss; the floor is the same",
    "nograd": "No-gradient pass: logprob and entropy; floor = its bare GEMM",
    "row": "Row kernel alone",
}
README_IMPLS = (  # the short tables: the floor, ours, and each peer's best
    "bare GEMM, whole T, bf16 (floor)",
    "fastgrpo",
    "Liger fused linear CE, 16 x chunk",
    "Liger SM90",
    "Liger SM90 + torch loss",
    "Liger fused linear GRPO",
    "CCE filtered + torch loss",
    "CCE, no entropy",
    "torch.compile'd chunks",
    "torch, whole logits",
)
ERRORS = {
    "max_abs_logp_err": "logprob error",
    "max_abs_entropy_err": "entropy error",
    "rel_dx_err": "dX error",
    "rel_dw_err": "dW error",
}


def render(path: Path, readme: Path | None = None) -> str:
    """Markdown of the file's tables. Writes the picture beside it, and between the markers in `readme` the tables; in a
    file called README.md only those of both passes, with the peers in README_IMPLS."""
    content = json.loads(path.read_text())
    markdown = make_markdown(content)
    draw(content, path.with_suffix(".png"))
    if readme:
        short = make_markdown(shortened(content)) if readme.name == "README.md" else markdown
        readme.write_text(between_markers(readme.read_text(), short))
    return markdown


def shortened(content: dict) -> dict:
    rows = [row for row in content["rows"] if row["op"] in ("train", "ce", "nograd") and row["impl"] in README_IMPLS]
    return content | {"rows": rows}


def between_markers(text: str, markdown: str) -> str:
    """`text` with what stands between its two markers replaced."""
    parts = text.split(MARKER)
    if len(parts) != 3:
        raise SystemExit(
            f"the README needs {MARKER} twice, around the table's place; it is there {len(parts) - 1} times"
        )
    return f"{parts[0]}{MARKER}\n{markdown}\n{MARKER}{parts[2]}"


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
    rows, data = content["rows"], content["data"]
    commits = sorted({row["commit"] for row in rows})
    packages = sorted({f"{name} {version}" for row in rows for name, version in row["versions"].items()})
    line = f"{content['device']}, commit {', '.join(commits) or 'unknown'}; {', '.join(packages)}."
    if data:
        entropies = [entry["mean_entropy"] for entry in data]
        line += f" Mean entropy of the rows {min(entropies):.2f} to {max(entropies):.2f} nats."
    return line


def _shapes(rows: list[dict]) -> list[tuple[int, int]]:
    return list(dict.fromkeys((row["H"], row["V"]) for row in rows))


def _by_impl(rows: list[dict]) -> dict[str, dict[tuple[int, int], dict]]:
    found: dict[str, dict[tuple[int, int], dict]] = {}
    for row in rows:
        found.setdefault(row["impl"], {})[row["H"], row["V"]] = row
    return found


def slowdown(row: dict | None) -> float | None:
    """Median over the floor of the same run."""
    if row is None or row["ms_p50"] is None or not row["gemm_floor_ms"]:
        return None
    return row["ms_p50"] / row["gemm_floor_ms"]


def _order(cells: dict[tuple[int, int], dict]) -> float:
    """Geometric mean of the ratios: one number to sort by."""
    ratios = [ratio for row in cells.values() if (ratio := slowdown(row))]
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else math.inf


def _op_tables(op: str, num_rows: int, rows: list[dict]) -> list[str]:
    shapes, impls = _shapes(rows), _by_impl(rows)
    timed = sorted(
        (n for n, c in impls.items() if any(r["ms_p50"] is not None for r in c.values())),
        key=lambda n: _order(impls[n]),
    )
    head = ["", *(f"{hidden} / {vocab}" for hidden, vocab in shapes), "peak", *ERRORS.values()]
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
    tables = [f"**{TITLES[op]}** (T = {num_rows}, hidden / vocabulary, median ms and multiple of the floor)"]
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
    (hidden, vocab), *_ = _shapes(rows)
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
    return f"{row['ms_p50']:.{digits}f}" + ("" if ratio is None else f" ({ratio:.2f} x)")


def _largest(cells: dict[tuple[int, int], dict], key: str) -> float | None:
    """Largest over the shapes; NaN, if any, since a comparison would lose it."""
    values = [row[key] for row in cells.values() if row.get(key) is not None]
    return next((value for value in values if math.isnan(value)), max(values, default=None))


def _scientific(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


# ---- picture


def draw(content: dict, path: Path) -> None:
    """Time over floor by shape, log scale, one panel an op; the number of rows that has most results."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in content["rows"] if slowdown(row) is not None]
    ops = [op for op in TITLES if any(row["op"] == op for row in rows)]
    figure, panels = plt.subplots(1, max(1, len(ops)), figsize=(8 * max(1, len(ops)), 6), squeeze=False)
    for op, axes in zip(ops, panels[0], strict=False):
        of_op = [row for row in rows if row["op"] == op]
        (num_rows, _), *_ = Counter(row["T"] for row in of_op).most_common()
        _draw_panel(axes, [row for row in of_op if row["T"] == num_rows])
        axes.set_title(f"{TITLES[op].split(':')[0]}, T = {num_rows}")
    figure.suptitle(content["device"])
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_panel(axes, rows: list[dict]) -> None:
    shapes, impls = _shapes(rows), _by_impl(rows)
    ends = []
    for name, cells in impls.items():
        points = [(x, ratio) for x, shape in enumerate(shapes) if (ratio := slowdown(cells.get(shape)))]
        ours = name.startswith("fastgrpo")
        color = "tab:red" if ours else "0.6" if name.startswith("bare") else "tab:blue"
        xs, ratios = zip(*points, strict=True)
        ys = [min(ratio, PICTURE_TOP) for ratio in ratios]
        axes.plot(xs, ys, marker="o", markersize=3, color=color, linewidth=2.2 if ours else 1)
        ends.append((ratios[-1], xs[-1], ys[-1], name, color))
    axes.set_yscale("log")
    ticks = (0.8, 0.9, 1, 1.1, 1.2, 1.3, 1.5, 1.75, 2, 2.5, PICTURE_TOP)
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_yticks([], minor=True)
    lowest = min(end[2] for end in ends)
    axes.set_ylim(0.97 * min(1, lowest), 1.35 * PICTURE_TOP)  # room for names above the cut
    axes.set_xlim(-0.2, len(shapes) - 1 + 0.75 * max(1, len(shapes) - 1))  # and beside the lines
    axes.set_xticks(range(len(shapes)), [f"{hidden}\n{vocab}" for hidden, vocab in shapes])
    axes.set_ylabel(f"time / bare GEMMs, cut at {PICTURE_TOP:g}")
    low, high = (math.log(y) for y in axes.get_ylim())
    height = -math.inf
    for ratio, x, y, name, color in sorted(ends):
        height = max(math.log(y), height + (high - low) / 32)
        arrow = {"arrowstyle": "-", "color": color, "linewidth": 0.5, "relpos": (0, 0.5)}
        place = (len(shapes) - 0.8, math.exp(height))
        axes.annotate(f"{name} {ratio:.2f}", (x, y), place, fontsize=7, color=color, va="center", arrowprops=arrow)
