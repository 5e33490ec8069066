"""The memory plan against what a run takes: a few steps of an experiment on this host's GPUs, with random weights.

    python bench/bench_memory.py +exp=qwen2_5_0p5b_gsm8k_1x24gb trainer.gpu_memory_gib=24 --out memory.json
    torchrun --nproc-per-node=2 bench/bench_memory.py +exp=gsm8k_8xa100 trainer.n_gpus_per_node=2 --model made

The model is made on the spot in the shape that model.path names (bench/shapes/<last part of it>), the prompts have
data.max_prompt_length tokens, and random weights hardly ever draw an end token: every sequence is as long as the plan
takes it to be. Prints JSON, a row for each peak: planned and measured GiB, and planned / measured.

    training   torch's allocations between two rollouts, the engine's own left out; the largest of the ranks and steps
    rollout    what the whole GPU holds when the last token is drawn
    host       fall of the machine's available memory since the start, the largest seen (on a machine left alone)

Without +exp it runs smollm2_gsm8k_1gpu; +exp=bench/long_sequence.yaml trains on sequences of 131,072 tokens.
--steps N: steps (default 3; the first makes AdamW's state). --model FOLDER: where the made model lies, or will; several
processes need one. --commit HASH: the commit to write down where git does not know it.
"""

from __future__ import annotations

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

from fastgrpo import Trainer, console, host_memory
from fastgrpo.compose import read_config
from fastgrpo.errors import UserError
from fastgrpo.plan import Plan, with_option
from fastgrpo.plan.constants import GIB
from fastgrpo.plan.settle import DECIDED
from fastgrpo.records import StepRecord
from made_model import make_model, make_prompts, reward_of
from run_summary import commit, versions

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


def main(argv: Sequence[str]) -> dict[str, Any]:
    arguments = list(argv)
    if not any(argument.startswith("+exp=") for argument in arguments):
        arguments.append("+exp=smollm2_gsm8k_1gpu")
    steps = int(_take(arguments, "--steps", "3"))
    out, folder = _take(arguments, "--out", ""), _take(arguments, "--model", "")
    at = _take(arguments, "--commit", "") or commit()
    if not folder and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise SystemExit("several processes share one made model: add --model FOLDER")
    shape = Path(read_config(arguments).model.path).name
    with tempfile.TemporaryDirectory() as made:
        model = make_model(shape, Path(folder or made), "cuda" if torch.cuda.is_available() else "cpu")
        torch.cuda.empty_cache()
        record = measure([*arguments, *MADE, f"model.path={model}", f"model.tokenizer_path={model}/tokenizer"], steps)
    command = " ".join(["bench/bench_memory.py", *arguments, f"--steps {steps}"])
    record = {"command": command, "model": shape, **record, "commit": at}
    if torch.distributed.is_initialized() and torch.distributed.get_rank() > 0:
        return record
    print(json.dumps(record, indent=1))
    if out:
        Path(out).write_text(json.dumps(record, indent=1) + "\n")
    return record


def measure(arguments: Sequence[str], steps: int) -> dict[str, Any]:
    config = with_option(read_config(arguments), "reward.functions", {})  # the made reward stands alone
    with HostMemory() as host:
        vocab = AutoConfig.from_pretrained(config.model.path).vocab_size
        prompts = make_prompts(config.data.train_batch_size * steps, config.data.max_prompt_length, vocab)
        trainer = Trainer(config, prompts=prompts, reward=lambda response: reward_of(response))
        mesh, plan, settled = trainer.stages.mesh, trainer.stages.plan, trainer.config
        records = [trainer.step() for _ in range(steps)]
    largest = {
        name: max((value for value in mesh.gather(_largest(records, key)) if value is not None), default=None)
        for name, key in (("training", "perf/train_peak_gib"), ("rollout", "perf/rollout_gib"))
    }
    largest["host"] = max(mesh.gather(host.taken / GIB))
    trainer.close()
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "ranks": mesh.world,
        "planned_for_gib": None if plan is None else _rounded(plan.gpu_bytes / GIB),
        "steps": steps,
        "response_tokens_mean": records[-1].metrics["response_length/mean"],
        "seconds_of_the_last_step": round(records[-1].timings["step"], 2),
        "mfu_of_the_last_step": _rounded(records[-1].metrics.get("perf/mfu")),
        "decided": {option: _at(settled, option) for option in DECIDED},
        "peaks": compare(plan, largest),
        "versions": versions(),
    }


def compare(plan: Plan | None, measured: dict[str, float | None]) -> list[dict[str, Any]]:
    """A row a peak. Without a plan (on a CPU) or a measurement the fields are null."""
    planned = {} if plan is None else {"training": plan.training, "rollout": plan.rollout, "host": plan.host}
    rows = []
    for name, found in measured.items():
        expected = planned[name].total / GIB if name in planned else None
        rows.append(
            {
                "peak": name,
                "planned_gib": _rounded(expected),
                "measured_gib": _rounded(found),
                "planned_over_measured": _rounded(expected / found) if expected and found else None,
                "parts_gib": {part: _rounded(size / GIB) for part, size in planned[name].parts} if expected else None,
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


def _take(arguments: list[str], flag: str, default: str) -> str:
    """The argument after `flag`, both taken out."""
    if flag not in arguments:
        return default
    at = arguments.index(flag)
    value = arguments[at + 1]
    del arguments[at : at + 2]
    return value


def command(argv: Sequence[str]) -> int:
    """`main` with the exit status of a command: 2 after a mistake of the user, which is said without a traceback."""
    try:
        main(argv)
    except UserError as error:
        console.complain(error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
