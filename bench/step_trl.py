"""TRL's steps for bench_step.py, in a process of their own: GRPOTrainer with colocated vLLM, its defaults but for what
makes the workload the same, and its sleep mode, gradient checkpointing and fused AdamW.

TRL is used as it is; a subclass looks at the clock around its generation.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, TrainerCallback

from made_model import make_prompts, reward_of
from step_memory import device_peak, forget_peak, train_peak_gib

PROMPTS, SAMPLES, PROMPT_TOKENS, RESPONSE_TOKENS = 32, 8, 250, 1024  # as in reference_step.yaml
MICRO_BATCH = 16  # sequences a forward


def run(model: Path, steps: int, *, liger: bool, masters: str) -> dict[str, Any]:
    """{"steps": [a dict a step], ...}; see bench_step.py for the keys. masters: dtype of the trained weights."""
    for key, value in dict(RANK=0, LOCAL_RANK=0, WORLD_SIZE=1, MASTER_ADDR="127.0.0.1", MASTER_PORT=29512).items():
        os.environ.setdefault(key, str(value))
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    rows: list[dict[str, Any]] = []

    class TimedTrainer(GRPOTrainer):
        """Notes the generation, weight sync included, and the memory of the device meanwhile."""

        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            with device_peak() as peak:
                out = super()._generate_single_turn(*args, **kwargs)
                torch.cuda.synchronize()
            forget_peak()
            rows.append({"phases": {"gen": time.perf_counter() - start}, "rollout_peak_gib": peak[0]})
            return out

    class StepTimer(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            self.start = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            row = rows[-1]
            row["train_peak_gib"] = train_peak_gib()
            row["step_s"] = time.perf_counter() - self.start
            row["phases"]["update"] = row["step_s"] - row["phases"]["gen"]
            print({"step": row["step_s"], **row["phases"]}, flush=True)

    vocab = AutoConfig.from_pretrained(model).vocab_size
    data = Dataset.from_list([{"prompt": text} for text in make_prompts(PROMPTS * steps, PROMPT_TOKENS, vocab)])
    config = GRPOConfig(
        output_dir=str(model.parent / "trl"),
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=PROMPTS * SAMPLES // MICRO_BATCH,
        num_generations=SAMPLES,
        max_completion_length=RESPONSE_TOKENS,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_enable_sleep_mode=True,
        vllm_gpu_memory_utilization=0.4,
        vllm_max_model_length=2048,
        beta=0.0,
        learning_rate=1e-6,
        bf16=True,
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
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(model / "tokenizer"),
        reward_funcs=lambda completions, **_: [reward_of(text) for text in completions],
        callbacks=[StepTimer()],
    )
    trainer.train()
    cache = trainer.vllm_generation.llm.llm_engine.vllm_config.cache_config
    return {
        "steps": rows,
        "engine": {"library": "vllm", "kv_cache_tokens": cache.num_gpu_blocks * cache.block_size},
        "masters": masters,
        "settings": {"micro_batch": MICRO_BATCH, "use_liger_kernel": liger, "vllm_gpu_memory_utilization": 0.4},
    }
