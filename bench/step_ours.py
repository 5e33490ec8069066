"""fastgrpo's steps for bench_step.py and bench_layouts.py, in processes of their own: the trainer as a user starts it
from Python. On several ranks every rank calls `run`; peaks are the largest of the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from fastgrpo import Trainer
from fastgrpo.compose import read_config
from fastgrpo.config import RunConfig
from fastgrpo.mesh import Mesh
from fastgrpo.plan import Plan
from made_model import make_prompts, reward_of
from step_memory import GIB, train_peak_gib

WORKLOAD = Path(__file__).parent / "reference_step.yaml"


def run(model: Path, steps: int, overrides: Sequence[str], note: Callable[[Mapping[str, Any]], None]) -> None:
    """`note` is given {"steps": [a dict a step], "steps_asked", ...} after every step; see bench_step.py for the
    keys."""
    config = config_of(model, overrides)
    vocab = AutoConfig.from_pretrained(model).vocab_size
    prompts = make_prompts(config.data.train_batch_size * steps, config.data.max_prompt_length, vocab)
    trainer = Trainer(config, prompts=prompts, reward=lambda response: reward_of(response))
    mesh, rows = trainer.stages.mesh, []
    for _ in range(steps):
        record = trainer.step()
        if mesh.is_main:
            print({name: round(seconds, 3) for name, seconds in record.timings.items()}, flush=True)
        rows.append(
            {
                "step_s": record.timings["step"],
                "phases": {name: seconds for name, seconds in record.timings.items() if name != "step"},
                "gen_tail_s": record.metrics["timing_s/gen_tail"],
                "train_peak_gib": largest_of(mesh, train_peak_gib()),
                "rollout_peak_gib": largest_of(mesh, record.metrics.get("perf/rollout_gib")),
                "mfu": record.metrics.get("perf/mfu"),
                "alloc_retries": record.metrics.get("perf/alloc_retries"),
                "response_tokens_mean": record.metrics["response_length/mean"],
                "gap_abs_mean": record.metrics.get("gap/abs_mean"),
            }
        )
        note({"steps": rows, "steps_asked": steps, **about_run(trainer, overrides)})
    trainer.close()


def about_run(trainer: Trainer, overrides: Sequence[str]) -> dict[str, Any]:
    """What all of its steps have in common."""
    settled = trainer.config
    return {
        "engine": dict(trainer.stages.engine.info),
        "planned": planned_gib(trainer.stages.plan),
        "masters": "float32",
        "settings": {
            "max_tokens_per_gpu": settled.actor.max_tokens_per_gpu,
            "gradient_checkpointing": settled.actor.gradient_checkpointing,
            "head_chunk_gib": settled.actor.head_chunk_gib,
            "offload_policy": settled.actor.fsdp.offload_policy,
            "offload_optimizer": settled.actor.fsdp.offload_optimizer,
            "offload_during_rollout": settled.actor.fsdp.offload_during_rollout,
            "kv_cache_gib": settled.rollout.kv_cache_gib,
            "overrides": list(overrides),
        },
    }


def config_of(model: Path, overrides: Sequence[str]) -> RunConfig:
    """Of a run on the workload. Raises ConfigError for overrides that are none."""
    return read_config(
        [f"+exp={WORKLOAD}", f"model.path={model}", f"model.tokenizer_path={model}/tokenizer", *overrides]
    )


def largest_of(mesh: Mesh, value: float | None) -> float | None:
    """Over the ranks; None where none has a value."""
    return max((found for found in mesh.gather(value) if found is not None), default=None)


def planned_gib(plan: Plan | None) -> dict[str, float] | None:
    """What the memory plan expected of the peaks, without its reserves. None on a CPU."""
    if plan is None:
        return None
    peaks = {"train": plan.training, "sync": plan.sync, "rollout": plan.rollout}
    return {name: round(peak.total / GIB, 3) for name, peak in peaks.items()}
