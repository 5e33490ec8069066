"""The memory plan against what a run takes: a few steps of an experiment on this host's GPUs, with random weights.

    python bench/bench_memory.py +exp=qwen2_5_0p5b_gsm8k_1x24gb trainer.gpu_memory_gib=24
    torchrun --nproc-per-node=2 bench/bench_memory.py +exp=gsm8k_8xa100 trainer.n_gpus_per_node=2 --model made
    python bench/bench_memory.py +exp=bench/long_sequence.yaml      sequences of 131,072 tokens
    python bench/bench_memory.py --smoke                            a tiny model and nothing planned, on a CPU

The model is made on the spot in the shape that model.path names (bench/shapes/<last part of it>), the prompts have
data.max_prompt_length tokens, and random weights hardly ever draw an end token: every sequence is as long as the plan
takes it to be. Prints JSON, and writes it to bench/results/memory_<experiment>_<gpu>.json: a row for each peak, planned
and measured GiB, and planned / measured.

    training   torch's allocations between two rollouts, the engine's own left out; the largest of the ranks and steps
    rollout    what the whole GPU holds when the last token is drawn
    host       fall of the machine's available memory since the start, the largest seen (on a machine left alone);
               planned without a save, since none is made

start_s is the time from the start of the process to the end of its first step. SIGTERM or Ctrl-C ends it at the end of
a step, on all ranks: the peaks are those of the steps so far, `error` says how many ("ended by SIGTERM; 1 of 3 steps"),
the exit status is 143 or 130. Without a step nothing is written.

A CPU has no plan and no device to look at: with --smoke only the host's row has a figure, and it measures nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from cli import Ending, command, known_shape, make_parser, no_gpu, positive_int, refuse, so_far, write_json
from fastgrpo import Trainer, host_memory
from fastgrpo.compose import read_config
from fastgrpo.plan import Plan, with_option
from fastgrpo.plan.constants import GIB
from fastgrpo.plan.memory import SAVE
from fastgrpo.plan.settle import DECIDED
from fastgrpo.records import StepRecord
from made_model import make_model, make_prompts, reward_of
from run_summary import out_file, process_age_s, provenance

POLL_S = 0.1
# Prompts are made here: nothing of the experiment's data or template is used, and nothing but memory is of interest.
MADE = (
    "model.chat_template=plain",
    "data.val_files=[]",
    "data.system_prompt=null",
    "data.prompt_suffix=''",
    "data.apply_chat_template_kwargs={}",
    "rollout.max_logprob_gap=100",  # noise of weights that were never trained; a shift still stops the run
)


SMOKE = ("model.path=tiny", "rollout.name=hf", "trainer.device=cpu", "data.train_batch_size=2", "rollout.n=2")
SMOKE += ("data.max_prompt_length=12", "data.max_response_length=8", "reward.num_workers=1")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = make_parser(__doc__, smoke="2 steps of a tiny model on a CPU, on transformers instead of vLLM")
    parser.add_argument("--steps", type=positive_int, help="default 3, smoke 2; the first makes AdamW's state")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="where the made model lies, or will")
    parser.add_argument("words", nargs="*", metavar="key=value", help="+exp=NAME, default smollm2_gsm8k_1gpu; options")
    args = parser.parse_intermixed_args(list(arguments))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not args.model:
        parser.error("several processes share one made model: add --model FOLDER")
    if not any(word.startswith("+exp=") for word in args.words):
        args.words.append(f"+exp={'quickstart' if args.smoke else 'smollm2_gsm8k_1gpu'}")
    args.steps = args.steps or (2 if args.smoke else 3)
    return args


def main(arguments: Sequence[str]) -> int:
    args = parse(arguments)
    if not torch.cuda.is_available() and not args.smoke:
        return no_gpu("bench_memory.py measures a GPU's memory", "--smoke tries the script on a CPU")
    words = [*(SMOKE if args.smoke else []), *args.words]
    shape = shape_of(read_config(words).model.path)
    is_main = os.environ.get("RANK", "0") == "0"
    out = out_file(args, f"memory_{experiment(words)}") if is_main else None
    with Ending() as ending, tempfile.TemporaryDirectory() as made:
        model = make_model(shape, args.model or Path(made), "cpu" if args.smoke else "cuda")
        torch.cuda.empty_cache()
        options = [*words, *MADE, f"model.path={model}", f"model.tokenizer_path={model}/tokenizer"]
        found = measure(options, args.steps, ending)
        typed = " ".join(["bench/bench_memory.py", *args.words, f"--steps {args.steps}", *(["--smoke"] * args.smoke)])
        if out and found["steps"]:
            record = {"command": typed, "model": shape, **found, **provenance(args.commit)}
            print(json.dumps(record, indent=1), flush=True)
            write_json(out, record)
        elif out:
            print(f"nothing measured: {found['error']}", file=sys.stderr, flush=True)
    return ending.status or 0


def shape_of(path: str) -> str:
    """The shape that model.path names. Refuses one that bench/shapes lacks."""
    try:
        return known_shape(Path(path).name)
    except argparse.ArgumentTypeError as error:
        refuse(f"model.path={path}: {error}")


def experiment(words: Sequence[str]) -> str:
    """`long_sequence` of +exp=bench/long_sequence.yaml."""
    return Path(next(word for word in words if word.startswith("+exp=")).removeprefix("+exp=")).stem


def measure(arguments: Sequence[str], steps: int, ending: Ending) -> dict[str, Any]:
    config = with_option(read_config(arguments), "reward.functions", {})  # the made reward stands alone
    with HostMemory() as host:
        vocab = AutoConfig.from_pretrained(config.model.path).vocab_size
        prompts = make_prompts(config.data.train_batch_size * steps, config.data.max_prompt_length, vocab)
        trainer = Trainer(config, prompts=prompts, reward=lambda response: reward_of(response))
        mesh, plan, settled = trainer.stages.mesh, trainer.stages.plan, trainer.config
        ending.listen()
        records, start_s = ending.repeat(mesh.gather, 1, trainer.step), process_age_s()
        records += ending.repeat(mesh.gather, steps - 1, trainer.step)
    largest = {
        name: max((value for value in mesh.gather(_largest(records, key)) if value is not None), default=None)
        for name, key in (("training", "perf/train_peak_gib"), ("rollout", "perf/rollout_gib"))
    }
    largest["host"] = max(mesh.gather(host.taken / GIB))
    trainer.close()
    return {
        "ranks": mesh.world,
        "planned_for_gib": None if plan is None else _rounded(plan.gpu_bytes / GIB),
        "steps": len(records),
        "error": so_far(ending.reason(), len(records), steps, "steps") if len(records) < steps else None,
        "start_s": start_s,
        **(_of_the_last(records[-1]) if records else {}),
        "decided": {option: _at(settled, option) for option in DECIDED},
        "peaks": compare(plan, largest),
    }


def _of_the_last(record: StepRecord) -> dict[str, Any]:
    return {
        "response_tokens_mean": record.metrics["response_length/mean"],
        "seconds_of_the_last_step": round(record.timings["step"], 2),
        "mfu_of_the_last_step": _rounded(record.metrics.get("perf/mfu")),
    }


def compare(plan: Plan | None, measured: dict[str, float | None]) -> list[dict[str, Any]]:
    """A row a peak. Without a plan (on a CPU) or a measurement the fields are null."""
    planned = {} if plan is None else {"training": plan.training, "rollout": plan.rollout, "host": plan.host}
    rows = []
    for name, found in measured.items():
        parts = [(part, size) for part, size in planned[name].parts if part != SAVE] if name in planned else []
        expected = sum(size for _, size in parts) / GIB if parts else None
        rows.append(
            {
                "peak": name,
                "planned_gib": _rounded(expected),
                "measured_gib": _rounded(found),
                "planned_over_measured": _rounded(expected / found) if expected and found else None,
                "parts_gib": {part: _rounded(size / GIB) for part, size in parts} if expected else None,
            }
        )
    return rows


class HostMemory:
    """`with HostMemory() as host: ...; host.taken`: bytes by which the machine's available memory fell, at the most."""

    def __enter__(self) -> HostMemory:
        self._start = self._least = available_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _poll(self) -> None:
        while not self._done.wait(POLL_S):
            self._least = min(self._least, available_bytes())

    @property
    def taken(self) -> int:
        return self._start - self._least


def available_bytes() -> int:
    return host_memory.available_bytes() or 0


def _largest(records: Sequence[StepRecord], key: str) -> float | None:
    return max((record.metrics[key] for record in records if key in record.metrics), default=None)


def _rounded(number: float | None) -> float | None:
    return None if number is None else round(number, 3)


def _at(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = getattr(config, name)
    return config


if __name__ == "__main__":
    sys.exit(command(main, sys.argv[1:]))
