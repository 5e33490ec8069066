"""Do the algorithms learn? A short run of each on made sums, one process and one engine for all, and the curves.

    python bench/bench_algorithms.py model.path=FOLDER                        grpo, dr_grpo, dapo, gspo, cispo
    python bench/bench_algorithms.py --runs grpo lora --steps 50 --out FILE  model.path=FOLDER     a choice of them
    python bench/bench_algorithms.py --render FILE                            the picture again

The task is the quickstart's (`configs/exp/quickstart.yaml`: SmolLM2-135M-Instruct, one-digit sums), in small steps of
16 prompts x 8 samples; key=value overrides go to every run. `lora` is grpo with adapters of rank 16. Written to
bench/results/algorithms_<device>.json as the runs end: per step the mean reward and the engine's gap to the trainer,
per run the peaks of memory; the picture beside it. A run has risen when the mean of its last ten steps is above that of
its first two by more than four standard errors of their difference (a sample's reward lies between 0 and 1, so that the
variance of a mean m over n of them is at most m (1 - m) / n).

What it does not ask is which algorithm is better: one seed, one learning rate for all.
"""

from __future__ import annotations

import gc
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch

from cli import command, make_parser, positive_int, read_result
from fastgrpo.compose import read_config
from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.trainer import Trainer
from run_summary import out_file, provenance

RUNS: dict[str, tuple[str, ...]] = {
    "grpo": ("algorithm=grpo", "actor.use_kl_loss=false"),
    "dr_grpo": ("algorithm=dr_grpo",),
    "dapo": ("algorithm=dapo",),
    "gspo": ("algorithm=gspo", "actor.ppo_mini_batch_size=8"),  # two updates, or no ratio differs from 1
    "cispo": ("algorithm=cispo", "actor.ppo_mini_batch_size=8"),
    "lora": ("algorithm=grpo", "actor.use_kl_loss=false", "model.lora_rank=16", "actor.optim.lr=2e-4"),
}
COMMON = ("data.train_batch_size=16", "rollout.max_num_seqs=128", "actor.max_tokens_per_gpu=16384", "data.val_files=[]")
FIRST, LAST = 2, 10  # steps at the ends of a curve that are compared


def main(arguments: list[str]) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=[name for name in RUNS if name != "lora"])
    parser.add_argument("--steps", type=positive_int, default=50)
    parser.add_argument("--render", type=Path, metavar="FILE", help="only draw FILE's picture")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_intermixed_args(arguments)
    if args.render:
        draw(read_result(args.render, lacks, "bench_algorithms.py"), args.render.with_suffix(".png"))
        return 0
    out = out_file(args, "algorithms")
    content = {**provenance(args.commit), "steps": args.steps, "runs": {}}
    engine: RolloutEngine | None = None
    for name in args.runs:
        words = ["+exp=quickstart", *COMMON, *RUNS[name], f"trainer.max_steps={args.steps}", *args.overrides]
        content["runs"][name], engine = run(words, engine)
        out.write_text(json.dumps(content, indent=1) + "\n")
        print(f"{name:8} {describe(content['runs'][name])}", flush=True)
    draw(content, out.with_suffix(".png"))
    return 0


def lacks(content: Any) -> str | None:
    """What keeps `content` from being drawn."""
    if not isinstance(content, dict) or not isinstance(content.get("device"), str):
        return "not an object with a device"
    runs = content.get("runs")
    if not isinstance(runs, dict) or not all(isinstance(run, dict) and "reward" in run for run in runs.values()):
        return "it has no runs with a reward each"
    return None


def run(words: list[str], engine: RolloutEngine | None) -> tuple[dict, RolloutEngine]:
    """The record of one run, and the engine, built by the first."""
    started = time.monotonic()
    trainer = Trainer(read_config(words), engine=engine)
    built_s = time.monotonic() - started
    rows = []
    while trainer.steps_done < trainer.stages.total_steps:
        rows.append(dict(trainer.step().metrics))
    trainer.stages.rewards.close()
    record = {
        "command": words,
        "reward": [round(row["reward/mean"], 4) for row in rows],
        "gap_abs_mean": [row.get("gap/abs_mean") for row in rows],
        "gap_mean": [row.get("gap/mean") for row in rows],
        "train_peak_gib": max(
            (row["perf/train_peak_gib"] for row in rows if "perf/train_peak_gib" in row), default=None
        ),
        "rollout_gib": max((row["perf/rollout_gib"] for row in rows if "perf/rollout_gib" in row), default=None),
        "build_s": round(built_s, 1),
        "steps_s": round(time.monotonic() - started - built_s, 1),
    }
    engine, samples = trainer.stages.engine, trainer.stages.layout.sequences_per_step
    del trainer  # masters and optimizer make room for the next run's
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return {**record, **rise(record["reward"], samples)}, engine


def rise(rewards: list[float], samples: int) -> dict[str, float | bool]:
    """Means of both ends, their difference in standard errors, and whether that is a rise. `samples`: of a step."""
    if len(rewards) < FIRST + LAST:
        return {"rose": False}
    first, last = sum(rewards[:FIRST]) / FIRST, sum(rewards[-LAST:]) / LAST
    variance = first * (1 - first) / (FIRST * samples) + last * (1 - last) / (LAST * samples)
    errors = (last - first) / math.sqrt(variance) if variance else 0.0
    return {"first": round(first, 4), "last": round(last, 4), "standard_errors": round(errors, 1), "rose": errors > 4}


def describe(record: dict) -> str:
    gaps = [gap for gap in record["gap_abs_mean"] if gap is not None]
    peak = record["train_peak_gib"]
    return (
        f"reward {record.get('first')} -> {record.get('last')} ({record.get('standard_errors')} standard errors), "
        f"{record['steps_s']} s, largest gap {max(gaps, default=math.nan):.4f}, train peak {peak} GiB"
    )


def draw(content: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5))
    for name, record in content["runs"].items():
        rewards = record["reward"]
        smooth = [
            sum(rewards[max(0, i - 4) : i + 1]) / len(rewards[max(0, i - 4) : i + 1]) for i in range(len(rewards))
        ]
        (line,) = axes.plot(range(1, len(rewards) + 1), smooth, label=name, linewidth=2)
        axes.plot(range(1, len(rewards) + 1), rewards, color=line.get_color(), alpha=0.25, linewidth=0.8)
    axes.set_xlabel("step")
    axes.set_ylabel("mean reward; bold: of the last five steps")
    axes.set_title(f"One-digit sums, SmolLM2-135M-Instruct, {content['device']}")
    axes.set_ylim(0, 1)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(command(main, sys.argv[1:]))
