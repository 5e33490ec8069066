"""fastgrpo's steps for bench_step.py, in a process of their own: the trainer as a user starts it from Python."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from fastgrpo import Trainer
from fastgrpo.compose import read_config
from made_model import make_prompts, reward_of
from step_memory import train_peak_gib

WORKLOAD = Path(__file__).parent / "reference_step.yaml"


def run(model: Path, steps: int, overrides: Sequence[str]) -> dict[str, Any]:
    """{"steps": [a dict a step], ...}; see bench_step.py for the keys."""
    config = read_config(
        [f"+exp={WORKLOAD}", f"model.path={model}", f"model.tokenizer_path={model}/tokenizer", *overrides]
    )
    vocab = AutoConfig.from_pretrained(model).vocab_size
    prompts = make_prompts(config.data.train_batch_size * steps, config.data.max_prompt_length, vocab)
    trainer = Trainer(config, prompts=prompts, reward=lambda response: reward_of(response))
    rows = []
    for _ in range(steps):
        record = trainer.step()
        print({name: round(seconds, 3) for name, seconds in record.timings.items()}, flush=True)
        rows.append(
            {
                "step_s": record.timings["step"],
                "phases": {name: seconds for name, seconds in record.timings.items() if name != "step"},
                "gen_tail_s": record.metrics["timing_s/gen_tail"],
                "train_peak_gib": train_peak_gib(),
                "rollout_peak_gib": record.metrics.get("perf/rollout_gib"),
                "mfu": record.metrics.get("perf/mfu"),
                "response_tokens_mean": record.metrics["response_length/mean"],
                "gap_abs_mean": record.metrics.get("gap/abs_mean"),
            }
        )
    settled = trainer.config
    result = {
        "steps": rows,
        "engine": dict(trainer.stages.engine.info),
        "masters": "float32",
        "settings": {
            "max_tokens_per_gpu": settled.actor.max_tokens_per_gpu,
            "gradient_checkpointing": settled.actor.gradient_checkpointing,
            "head_chunk_gib": settled.actor.head_chunk_gib,
            "offload_policy": settled.actor.fsdp.offload_policy,
            "offload_during_rollout": settled.actor.fsdp.offload_during_rollout,
            "kv_cache_gib": settled.rollout.kv_cache_gib,
            "overrides": list(overrides),
        },
    }
    trainer.close()
    return result
