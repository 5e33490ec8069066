"""Does a run that was told to stop and was started again end as the unbroken one does? And does it take more memory?

    python bench/bench_resume.py model.path=FOLDER                  60 steps of the quickstart, stopped after step 30
    python bench/bench_resume.py --steps 6 --stop 3 model.path=FOLDER rollout.n=4

Three runs of the same command, each a start of `python -m fastgrpo.train` (configs/exp/quickstart.yaml with
trainer.deterministic=true; key=value overrides go to all):

    unbroken    1 ............................ 60
    stopped     1 ........ 30 SIGTERM, exit status 75
    resumed                   31 ............. 60

and what each left is compared: the answers of every step (text and number of tokens), every metric but those of time
and memory, the trained weights, all to the last bit, and the peaks of memory over the same steps. Written to
bench/results/resume_<device>.json (or --out FILE); exit status 1 if anything differs. --together starts the first two
at the same time, which spares a start and spoils only the timings and `rollout_gib`, what the whole GPU holds. --cost
adds the unbroken run without trainer.deterministic: how much longer is a step that can be repeated?

SIGTERM or Ctrl-C ends its runs, and half a comparison is none: it says how far they came and exits with 143 or 130.

What it does not ask is what a run does that is killed: tests/dist/test_resume.py, on a CPU.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors.torch import load_file

from children import end, wait
from cli import MISUSE, Ending, at_least, command, make_parser, positive_int, refuse, write_json
from fastgrpo.stopping import SAVED
from run_summary import out_file, peak, provenance, quantiles

POLL_S = 0.05
VARIES = ("timing_s/", "perf/")  # what clocks and other processes decide


def main(arguments: Sequence[str]) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=at_least(2), default=60)
    parser.add_argument("--stop", type=positive_int, help="the step after which SIGTERM is sent; default: half of them")
    parser.add_argument("--together", action="store_true", help="the unbroken run and the one to stop at the same time")
    parser.add_argument("--cost", action="store_true", help="also the unbroken run with trainer.deterministic=false")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_intermixed_args(arguments)
    stop = args.stop or args.steps // 2
    if stop >= args.steps:
        parser.error(f"--stop {stop}: nothing is left to resume of --steps {args.steps}")
    out = out_file(args, "resume")
    with Ending() as ending, tempfile.TemporaryDirectory() as folder:
        ending.listen()
        whole, broken, free = Path(folder, "unbroken"), Path(folder, "stopped"), Path(folder, "not_deterministic")
        words = ["+exp=quickstart", "trainer.deterministic=true", f"trainer.max_steps={args.steps}", *args.overrides]
        try:
            stopped_at = run_all(args, words, (whole, broken, free), stop, ending)
        except Ended as ended:
            came = ", ".join(f"{run.name} {last_step(run)}" for run in (whole, broken, free) if run.exists())
            print(f"{ended}, nothing is compared; steps done of {args.steps}: {came}", file=sys.stderr, flush=True)
            return ending.status or 1
        record = {
            "command": words,
            **provenance(args.commit),
            "steps": args.steps,
            "stopped_after_step": stopped_at,
            "equal": compare(only_run(whole), only_run(broken)),
            "unbroken": summary(rows_of(whole)),
            "unbroken_after_the_stop": summary(rows_after(stopped_at, whole)),
            "resumed": summary(rows_after(stopped_at, broken)),
            "not_deterministic": summary(rows_of(free)) if args.cost else None,
        }
    record["peak_resumed_over_unbroken"] = {
        name: ratio(record["resumed"][name], record["unbroken_after_the_stop"][name])
        for name in ("train_peak_gib", "rollout_gib")
    }
    print(json.dumps(record, indent=1))
    write_json(out, record)
    return 0 if all(record["equal"].values()) else 1


class Ended(Exception):
    """The benchmark was told to end."""


def run_all(
    args: argparse.Namespace, words: Sequence[str], folders: tuple[Path, Path, Path], stop: int, ending: Ending
) -> int:
    """The runs, and the step after which the second was stopped. None of them is left. Raises Ended."""
    whole, broken, free = folders
    with ExitStack() as left:

        def begin(words: Sequence[str], folder: Path) -> subprocess.Popen[bytes]:
            process = start(words, folder)
            left.callback(end, process)
            return process

        first = begin(words, whole)
        if not args.together:
            finish(first, 0, ending)
        second = begin(words, broken)
        wait_for(second, broken, stop, ending)
        second.send_signal(signal.SIGTERM)
        finish(second, SAVED, ending)
        stopped_at = last_step(broken)
        if args.together:
            finish(first, 0, ending)
        finish(begin(words, broken), 0, ending)
        if args.cost:
            finish(begin([*words, "trainer.deterministic=false"], free), 0, ending)
    return stopped_at


def start(words: Sequence[str], folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "fastgrpo.train", *words, f"trainer.run_dir={folder}"])


def finish(process: subprocess.Popen[bytes], status: int, ending: Ending) -> None:
    found = wait(process, ending)
    if ending.status is not None:  # asked first: the run may have been given the same signal
        raise Ended(ending.reason())
    if found is not None and found != status:
        give_up(f"a run ended with status {found}, not {status}: see above", found)


def give_up(text: str, status: int) -> NoReturn:
    """After a run that ended as it should not: with status 2 where the run found a mistake of the user, else with 1."""
    if status == MISUSE:
        refuse(text)
    raise SystemExit(text)


def wait_for(process: subprocess.Popen[bytes], folder: Path, step: int, ending: Ending) -> None:
    """Until the run has written the row of that step."""
    while not any(row["step"] >= step and "actor/loss" in row for row in rows_of(folder)):
        if ending.status is not None:
            raise Ended(ending.reason())
        if process.poll() is not None:
            give_up(f"the run ended with status {process.returncode} before step {step}: see above", process.returncode)
        time.sleep(POLL_S)


def only_run(folder: Path) -> Path:
    [run] = folder.iterdir()
    return run


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl of the folder's run as far as it is written; nothing before it begins."""
    text = "".join(file.read_text() for file in folder.glob("*/metrics.jsonl"))
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def last_step(folder: Path) -> int:
    return max((row["step"] for row in rows_of(folder)), default=0)


def rows_after(step: int, folder: Path) -> list[dict[str, Any]]:
    return [row for row in rows_of(folder) if row["step"] > step]


def ratio(over: float | None, under: float | None) -> float | None:
    return None if over is None or under is None else round(over / under, 4)


def compare(run: Path, right: Path) -> dict[str, bool]:
    def metrics(folder: Path) -> list[dict[str, Any]]:
        return [{k: v for k, v in row.items() if not k.startswith(VARIES)} for row in rows_of(folder.parent)]

    def answers(folder: Path) -> dict[str, str]:
        return {file.name: file.read_text() for file in (folder / "rollouts").iterdir()}

    ours, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (run, right))
    return {
        "answers": answers(run) == answers(right),
        "metrics": metrics(run) == metrics(right),
        "weights": ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs),
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    steps = [row for row in rows if "actor/loss" in row]
    return {
        "steps": [steps[0]["step"], steps[-1]["step"]],
        "train_peak_gib": peak(steps, "perf/train_peak_gib"),
        "rollout_gib": peak(steps, "perf/rollout_gib"),
        "seconds_of_a_step": quantiles(steps, "timing_s/step"),
        "reward": [round(row["reward/mean"], 4) for row in steps],
    }


if __name__ == "__main__":
    sys.exit(command(main, sys.argv[1:]))
