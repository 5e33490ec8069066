"""Numbers of a step: sums on the device, reduced once, and the files and displays they go to.

`Sums` adds up what losses report (algorithm/stats.py: sums, and maxima under names that end in `_max`), on the device,
without waiting for it; `reduce` makes one collective and one host read of it. Means are made from two reduced sums, so
they do not depend on how the step was cut into micro-batches and ranks.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fastgrpo.algorithm.mismatch_stats import gap_metrics
from fastgrpo.algorithm.stats import Stats
from fastgrpo.mesh import Mesh


class Sums:
    def __init__(self) -> None:
        self._values: Stats = {}

    def add(self, stats: Stats) -> None:
        for name, value in stats.items():
            held = self._values.get(name)
            if held is None:
                self._values[name] = value
            else:
                self._values[name] = torch.maximum(held, value) if name.endswith("_max") else held + value

    @property
    def values(self) -> Stats:
        return self._values

    def reduce(self, mesh: Mesh) -> dict[str, float]:
        """Over all ranks, each of which must have added the same names."""
        if not self._values:
            return {}
        maxima = sorted(name for name in self._values if name.endswith("_max"))
        sums = sorted(name for name in self._values if not name.endswith("_max"))
        out: dict[str, float] = {}
        for names, op in ((sums, dist.ReduceOp.SUM), (maxima, dist.ReduceOp.MAX)):
            if names:
                vector = mesh.reduce(torch.stack([self._values[name] for name in names]), op)
                out.update(zip(names, vector.tolist(), strict=True))
        return out


def ratio(total: float, count: float) -> float:
    return total / count if count else 0.0


def loss_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Means over the trained tokens of the update's sums, under verl's names where it has one. A step that trained no
    token has no means: 0 would read as a collapse of the entropy."""
    tokens = sums.get("tokens", 0.0)
    out = {"actor/loss": sums.get("loss", 0.0), "actor/trained_tokens": tokens}
    if tokens:
        out |= {name: sums[key] / tokens for name, key in _TOKEN_MEANS.items() if key in sums}
        out["actor/ratio_max"] = sums.get("ratio_max", 0.0)
    return out | (gap_metrics(sums) if sums.get("gap_tokens") else {})


_TOKEN_MEANS = {  # metric -> its sum (algorithm/losses/contract.py)
    "actor/pg_clipfrac_high": "clip_high",
    "actor/pg_clipfrac_low": "clip_low",
    "actor/pg_clipfrac_dual": "dual_clip",
    "actor/ppo_kl": "old_kl",
    "actor/ratio_mean": "ratio",
    "actor/entropy": "entropy",
    "actor/kl": "kl",  # with a KL term in the loss
}


class Logger(Protocol):
    name: str

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


_SYNC_BYTES = 1 << 20  # some hundred rows


class JsonlFile:
    """metrics.jsonl: a row a step, at once. Non-finite numbers are written as null. Where the disk is full OSError is
    raised, and what is not written yet, be it half a row, goes before the next row; half a row at the end goes.

        _rows   | 3 4 5 half of 6 | rest of 6, 7 |      since the last fsync that worked: a checkpoint takes them along
                  0 ...  _written                       those up to here are in the file
    """

    name = "metrics.jsonl"

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._rows = b""
        self._written = 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._rows += row_text({"step": step, **metrics}).encode()
        self.flush()
        if len(self._rows) > _SYNC_BYTES:  # a run that saves nothing must not keep all its rows in memory
            self.sync()

    def flush(self) -> None:
        while self._written < len(self._rows):
            self._written += self._file.write(self._rows[self._written :])

    def sync(self) -> None:
        """All rows, on the disk."""
        self.flush()
        os.fsync(self._file.fileno())
        self._rows, self._written = b"", 0

    def not_synced(self) -> str:
        """Whole rows that may not be on the disk; what the file has of them, a crash of the machine may lose."""
        return self._rows.decode()

    def went_away(self) -> bool:
        """Whether the file was deleted or moved, or another is in its place. Raises OSError."""
        try:
            return not os.path.samestat(self._path.stat(), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return True

    def reopen(self, *, again: bool = False) -> None:
        """At the same path, where another file may be now. What the old one has of a row is of no use there; `again`:
        nor are the rows since the last fsync."""
        file = self._path.open("ab", buffering=0)
        self._file.close()
        self._file = file
        self._rows, self._written = self._rows[0 if again else self._written - self._half :], 0

    @property
    def _half(self) -> int:
        """Bytes of a row at the end of the file that is not whole yet."""
        return self._written - (self._rows.rfind(b"\n", 0, self._written) + 1)

    def close(self) -> None:
        try:
            self.flush()
        except OSError:
            os.ftruncate(self._file.fileno(), os.fstat(self._file.fileno()).st_size - self._half)
            raise
        finally:
            self._file.close()


class TensorBoard:
    name = "tensorboard"

    def __init__(self, folder: Path, steps_done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # What an earlier start logged after the step that this one resumes from is not shown.
        self._writer = SummaryWriter(str(folder), purge_step=steps_done + 1 if steps_done else None)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    name = "wandb"

    def __init__(self, folder: Path, project: str, name: str, config: Any) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        self._run = wandb.init(
            project=project, name=name, id=name, resume="allow", dir=str(folder), config=asdict(config)
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def row_text(row: Mapping[str, Any]) -> str:
    clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    return json.dumps(clean, ensure_ascii=False) + "\n"


def write_row(file: Any, row: Mapping[str, Any]) -> None:
    file.write(row_text(row))
    file.flush()


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            write_row(file, row)


def plot_rewards(path: Path, steps: list[int], rewards: list[float], validation: list[tuple[int, float]]) -> None:
    """The reward curve as a PNG: mean reward a step, and the held-out score where it was measured."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot(steps, rewards, marker=".", linewidth=1.2, label="training, mean of the step")
    if validation:
        at, scores = zip(*validation, strict=True)
        axes.plot(at, scores, marker="o", linewidth=1.8, label="held out")
    axes.set(xlabel="step", ylabel="reward")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=130)
