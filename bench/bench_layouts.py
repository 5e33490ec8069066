"""Compare parallel layouts on the GPUs of one host: is the update the same, and what do more GPUs gain?

    python bench/bench_layouts.py --parity                         the first update on each layout against one GPU's
    python bench/bench_layouts.py --steps --layouts dp1 dp2 dp2-x2     whole steps, with vLLM
    python bench/bench_layouts.py --train-only                     forward, backward and update alone, on made answers
    python bench/bench_layouts.py                                  all three, every layout that the GPUs allow
    python bench/bench_layouts.py --smoke                          a tiny model on two CPU processes: does it work?
    python bench/bench_layouts.py --render FILE                    the table again; needs no GPU

Each layout (layout_names.py) runs in processes of its own, one a GPU, on a model of random weights. Steps are those of
reference_step.yaml; the update that is compared is of 8 prompts x 2 ragged answers, 250 + 256 tokens, with a KL term to
another model, once in float32 (SDPA, no TF32) and once in bfloat16 (layout_parity.py has the limits). A layout that
disagrees or fails makes the status 1. Rows go to bench/results/layouts_<gpu>.json as they come:

    {what (steps, update, parity float32, parity bfloat16), layout, workload, job, prompts, world, dp, sp, tp, replicas,
     start_s, process_s, error, versions, commit, device}
    steps, update: and what bench_step.py's rows have, also of processes that end early; peaks are the largest of the
    ranks; start_s and process_s count from the start of torchrun (of parity, start_s is to the comparison's end)
    parity: {dtype, against, loss, grad_norm, loss_error, norm_error, gradient_error, tensor_error, worst, failures}
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

import layout_parity
import step_ours
from bench_step import MADE, REFERENCE, SMOKE
from children import keeping, reporter, run_child, start_words
from cli import Ending, at_least, command, known_shape, make_parser, no_gpu, positive_int, positive_number, warm_up_of
from fastgrpo.compose import read_config
from fastgrpo.config import RunConfig, check
from layout_names import ONE, PARITY, STEPS, TRAIN_ONLY, ParallelLayout, defaults
from layout_report import render
from made_model import make_model
from run_summary import out_file, provenance
from step_report import Rows, summary

FIRST_UPDATE = ["rollout.name=made_engine:RaggedEngine", "actor.grad_clip=0", "actor.use_kl_loss=true"]
FIRST_UPDATE += ["actor.kl_loss_coef=0.1", "data.train_batch_size=8", "rollout.n=2", "data.max_response_length=256"]
FIRST_UPDATE += ["actor.max_tokens_per_gpu=1024"]  # several micro-batches, on each layout others
DTYPE = {"float32": ["actor.dtype=float32", "actor.attention=sdpa"], "bfloat16": ["actor.dtype=bfloat16"]}
SMOKE_UPDATE = ["data.train_batch_size=4", "data.max_response_length=8", "actor.max_tokens_per_gpu=24"]
NO_COMPARISON = dict.fromkeys(("against", "loss_error", "norm_error", "gradient_error", "tensor_error"))


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = make_parser(__doc__, smoke="a tiny model on CPUs", models=True)
    parser.add_argument("--parity", action="store_true", help="compare the first update")
    timed: Any = {"type": positive_int, "nargs": "?", "const": 5, "metavar": "N"}
    parser.add_argument("--steps", **timed, help="time N whole steps, default 5")
    parser.add_argument("--train-only", **timed, help="time N updates, default 5")
    parser.add_argument("--warm-up", type=at_least(0), help="steps left out at the start, default 2, smoke 1")
    parser.add_argument("--layouts", nargs="+", metavar="NAME", help="default: all that --world allows")
    parser.add_argument("--world", type=positive_int, help="GPUs to use; default: all")
    parser.add_argument("--shape", type=known_shape, help=f"a folder of bench/shapes, default {REFERENCE}")
    parser.add_argument(
        "--minutes", type=positive_number, default=5.0, help="of one layout's processes, which are ended then"
    )
    parser.add_argument("--label", default="", help="stands behind the workload: for runs with other options")
    parser.add_argument("--render", type=Path, metavar="FILE", help="only print FILE's table")
    parser.add_argument("--child", nargs=3, metavar=("WHAT", "LAYOUT", "FILE"), help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="options of all runs, after --")
    args = parser.parse_args(arguments)
    args.world = args.world or (2 if args.smoke else torch.cuda.device_count())
    if args.smoke and args.shape not in (None, "tiny"):
        parser.error("--smoke has a tiny model of its own: leave --shape away")
    args.shape = "tiny" if args.smoke else args.shape or REFERENCE
    if not (args.parity or args.steps or args.train_only):
        args.parity, args.steps, args.train_only = True, 2 if args.smoke else 5, None if args.smoke else 5
    fewest = min(n for n in (args.steps, args.train_only, sys.maxsize) if n)
    args.warm_up = warm_up_of(args.warm_up, 1 if args.smoke else 2, fewest)
    try:
        too_large = [n for n in args.layouts or [] if ParallelLayout.of(n).world > args.world and not args.child]
    except ValueError as error:
        parser.error(str(error))
    if too_large:
        parser.error(f"{', '.join(too_large)}: more than {args.world} GPUs")
    return args


def main(arguments: list[str]) -> int:
    args = parse(arguments)
    if args.render:
        print(render(args.render))
        return 0
    if args.child:
        child(args, *args.child)
        return 0
    if not torch.cuda.is_available() and not args.smoke:
        return no_gpu("bench_layouts.py compares GPUs", "--smoke tries it on CPU processes")
    out = out_file(args, "layouts")
    rows = Rows(out, provenance(args.commit), key=("what", "layout", "workload"))
    return keeping(partial(run_all, args, rows), args.models, out, render)


def jobs(args: argparse.Namespace) -> list[tuple[str, ParallelLayout]]:
    """(what, layout), in the order in which they run: one GPU's update is the truth of the others'."""
    found = []
    if args.parity:
        names = [n for n in args.layouts or defaults(PARITY, args.world) if ParallelLayout.of(n).x == 1]
        names = dict.fromkeys((ONE, *names))
        found += [(f"parity {dtype}", name) for dtype in layout_parity.DTYPES for name in names]
    if args.steps:
        found += [("steps", n) for n in args.layouts or (["dp2"] if args.smoke else defaults(STEPS, args.world))]
    if args.train_only:
        found += [("update", n) for n in args.layouts or defaults(TRAIN_ONLY, args.world)]
    return [(what, ParallelLayout.of(name)) for what, name in found]


def run_all(args: argparse.Namespace, rows: Rows, models: Path, ending: Ending) -> bool:
    """Whether any failed, of those that ran before somebody said to end. All options are checked before the first
    starts."""
    wanted = [(what, layout, config_of(args, what, layout, models)) for what, layout in jobs(args)]
    made = measure(args, "models", ParallelLayout.of(ONE), models, ending)
    if "error" in made:
        print(f"no models: {made['error']}")
        return True
    failed = False
    for what, layout, config in wanted:
        if ending.status is not None:
            break
        row = make_row(args, what, layout, config, measure(args, what, layout, models, ending))
        failed |= bool(row["error"] or row.get("failures"))
        rows.put(row)
    return failed


def config_of(args: argparse.Namespace, what: str, layout: ParallelLayout, models: Path) -> RunConfig:
    """Of a run on `layout`. Raises ConfigError when the layout cannot run it."""
    options = options_of(args, what, layout)
    if what.startswith("parity"):
        options.append(f"ref.path={models / reference(args.shape)}")
    config = step_ours.config_of(models / args.shape, options)
    check(config, layout.world, needs_data=False, needs_reward=False)
    return config


def options_of(args: argparse.Namespace, what: str, layout: ParallelLayout) -> list[str]:
    own = list(SMOKE) if args.smoke else []
    if what.startswith("parity"):
        own += [*FIRST_UPDATE, *(SMOKE_UPDATE if args.smoke else []), *DTYPE[what.split()[1]]]
    if what == "update":
        own.append(MADE)
    own += args.overrides
    prompts = read_config([f"+exp={step_ours.WORKLOAD}", *own]).data.train_batch_size
    return [*own, *layout.options(prompts)]


def reference(shape: str) -> str:
    return f"{shape}-other"  # folder of the model that the KL term is to


def measure(
    args: argparse.Namespace, what: str, layout: ParallelLayout, models: Path, ending: Ending
) -> dict[str, Any]:
    """One layout's processes: what run_child says of them."""
    print(f"-- {what}, {layout.name}", flush=True)
    report = models / "report.json"
    words, environ = start_words(layout.world)
    words += [__file__, "--child", what, layout.name, str(report), "--shape", args.shape]
    words += ["--models", str(models), *(["--smoke"] if args.smoke else [])]
    words += [*(["--steps", str(args.steps)] if args.steps else [])]
    words += [*(["--train-only", str(args.train_only)] if args.train_only else []), "--", *args.overrides]
    return run_child(words, report, args.minutes, environ, ending)


def child(args: argparse.Namespace, what: str, name: str, report: str) -> None:
    """On every rank of the layout."""
    device, layout = "cuda" if torch.cuda.is_available() else "cpu", ParallelLayout.of(name)
    note = reporter(report)
    if what == "models":  # made once, by a process that gives its memory back
        for seed, folder in enumerate((args.shape, reference(args.shape))):
            make_model(args.shape, args.models / folder, device, seed)
        note({})
    elif what.startswith("parity"):
        config = config_of(args, what, layout, args.models)
        note(layout_parity.run(config, what.split()[1], args.models, is_truth=name == ONE))
    else:
        steps = args.steps if what == "steps" else args.train_only
        step_ours.run(args.models / args.shape, steps, options_of(args, what, layout), note)


def make_row(
    args: argparse.Namespace, what: str, layout: ParallelLayout, config: RunConfig, result: dict[str, Any]
) -> dict[str, Any]:
    data, rollout = config.data, config.rollout
    job = f"{args.shape}, x {rollout.n}, {data.max_prompt_length} + {data.max_response_length} tokens"
    job += f", {args.label}" if args.label else ""
    row = {
        "what": what,
        **layout.fields(),
        "workload": job.replace(", x", f", {data.train_batch_size} x", 1),
        "job": job,  # the workload without the number of prompts: what layouts are compared within
        "prompts": data.train_batch_size,
        "start_s": result["start_s"],
        "process_s": result["process_s"],
    }
    if not what.startswith("parity"):
        return row | summary([result], args.warm_up)
    comparison = result.get("comparison") or NO_COMPARISON
    numbers = {name: result.get(name) for name in ("loss", "grad_norm", "error")}
    return row | {"dtype": what.split()[1], "failures": []} | numbers | comparison


if __name__ == "__main__":
    sys.exit(command(main, sys.argv[1:]))
