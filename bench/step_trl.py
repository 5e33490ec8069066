"""TRL's steps for bench_step.py, in a process of their own: GRPOTrainer with colocated vLLM, its defaults but for what
makes the workload the same, and its sleep mode, gradient checkpointing and fused AdamW.

TRL is used as it is; a subclass looks at the clock around its generation. What a step does besides counts as update:
rewards, the forward of TRL's importance correction, forward and backward, AdamW. Without CUDA it draws with
transformers, as vLLM's CPU engine takes no weights the way TRL hands them over: this tries the
script and measures nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, TrainerCallback

from made_model import make_prompts, reward_of
from step_memory import device_peak, forget_peak, train_peak_gib


@dataclass(frozen=True)
class Workload:
    prompts: int
    samples: int  # a prompt
    prompt_tokens: int
    response_tokens: int  # at most
    micro_batch: int  # sequences a forward
    max_model_length: int


REFERENCE = Workload(32, 8, 250, 1024, 16, 2048)  # as in reference_step.yaml
SMOKE = Workload(2, 2, 12, 8, 2, 32)  # as in bench_step.SMOKE
# What goes into the row, as TRL settled it.
SETTINGS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "gradient_checkpointing",
    "use_liger_kernel",
    "use_vllm",
    "vllm_gpu_memory_utilization",
    "vllm_enable_sleep_mode",
    "vllm_importance_sampling_correction",  # one more forward a step, TRL's default
    "loss_type",
)


def run(
    model: Path,
    steps: int,
    note: Callable[[Mapping[str, Any]], None],
    *,
    liger: bool,
    masters: str,
    workload: Workload = REFERENCE,
) -> None:
    """`note` is given {"steps": [a dict a step], "steps_asked", ...} after every step; see bench_step.py for the keys.
    masters: dtype of the trained weights."""
    for key, value in dict(RANK=0, LOCAL_RANK=0, WORLD_SIZE=1, MASTER_ADDR="127.0.0.1", MASTER_PORT=29512).items():
        os.environ.setdefault(key, str(value))
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    cuda = torch.cuda.is_available()
    rows: list[dict[str, Any]] = []

    class TimedTrainer(GRPOTrainer):
        """Notes the generation, weight sync included, and the memory of the device meanwhile."""

        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            with device_peak() as peak:
                completions, logprobs = super()._generate_single_turn(*args, **kwargs)
                synchronize()
            forget_peak()
            rows.append(
                {
                    "phases": {"gen": time.perf_counter() - start},
                    "rollout_peak_gib": peak[0],
                    "response_tokens_mean": sum(map(len, completions)) / len(completions),
                }
            )
            return completions, logprobs

    class StepTimer(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            synchronize()
            self.start = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            synchronize()
            row = rows[-1]
            row["step_s"] = time.perf_counter() - self.start
            row["phases"]["update"] = row["step_s"] - row["phases"]["gen"]
            row["train_peak_gib"] = train_peak_gib()
            print({"step": row["step_s"], **row["phases"]}, flush=True)
            note({"steps": rows, "steps_asked": steps, "masters": masters, **about()})

    vocab = AutoConfig.from_pretrained(model).vocab_size
    texts = make_prompts(workload.prompts * steps, workload.prompt_tokens, vocab)
    config = GRPOConfig(
        output_dir=str(model.parent / "trl"),
        per_device_train_batch_size=workload.micro_batch,
        gradient_accumulation_steps=workload.prompts * workload.samples // workload.micro_batch,
        num_generations=workload.samples,
        max_completion_length=workload.response_tokens,
        use_vllm=cuda,
        vllm_mode="colocate",
        vllm_enable_sleep_mode=True,
        vllm_gpu_memory_utilization=0.4,
        vllm_max_model_length=workload.max_model_length,
        beta=0.0,
        learning_rate=1e-6,
        bf16=True,
        use_cpu=not cuda,
        gradient_checkpointing=True,
        max_steps=steps,
        save_strategy="no",
        report_to=[],
        optim="adamw_torch_fused",
        use_liger_kernel=liger,
        model_init_kwargs={"dtype": masters},
    )
    trainer = TimedTrainer(
        model=str(model),
        args=config,
        train_dataset=Dataset.from_list([{"prompt": text} for text in texts]),
        processing_class=AutoTokenizer.from_pretrained(model / "tokenizer"),
        reward_funcs=lambda completions, **_: [reward_of(text) for text in completions],
        callbacks=[StepTimer()],
    )

    def about() -> dict[str, Any]:
        """Of the trainer at work: TRL settles some of it late."""
        return {
            "engine": engine_info(trainer.vllm_generation.llm) if cuda else {"library": "transformers"},
            "settings": {name: getattr(config, name) for name in SETTINGS},
        }

    trainer.train()


def engine_info(llm: Any) -> dict[str, Any]:
    cache = llm.llm_engine.vllm_config.cache_config
    return {"library": "vllm", "kv_cache_tokens": cache.num_gpu_blocks * cache.block_size}


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
