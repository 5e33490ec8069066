"""The picture of a result file of bench_lm_head.py: time over floor, a line for each implementation, shape by shape."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

from lm_head_tables import TITLES, by_impl, shapes_of, slowdown

PICTURE_TOP = 3.0


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
    shapes, impls = shapes_of(rows), by_impl(rows)
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
