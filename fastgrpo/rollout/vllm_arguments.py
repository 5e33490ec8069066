"""What vLLM's LLM is built with, and why: every argument that departs from its defaults. Nothing is built here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fastgrpo.config import Layout, RunConfig
from fastgrpo.mesh import Mesh
from fastgrpo.rollout.engine import engine_dtype
from fastgrpo.rollout.vllm_graphs import capture_sizes

_GIB = 1 << 30
_KV_CACHE_GIB = 2.0  # when nobody decides: on CUDA a run's memory plan does (fastgrpo/plan)


def engine_arguments(config: RunConfig, mesh: Mesh, model_dir: Path) -> dict[str, Any]:
    rollout = config.rollout
    on_cuda = mesh.device.type == "cuda"
    max_model_len = Layout.of(config, mesh.world).max_model_len
    arguments: dict[str, Any] = dict(
        model=str(model_dir),
        load_format="dummy",
        skip_tokenizer_init=True,
        trust_remote_code=config.model.trust_remote_code,
        distributed_executor_backend="external_launcher",
        worker_cls="fastgrpo.rollout.vllm_worker.NotingWorker",
        scheduler_cls="fastgrpo.rollout.vllm_scheduler.make_scheduler",
        tensor_parallel_size=mesh.tp,
        disable_custom_all_reduce=True,
        seed=config.trainer.seed + mesh.engine,  # equal inside a TP group, as its ranks must draw alike
        dtype=engine_dtype(config, mesh.device.type),
        max_model_len=max_model_len,
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        enforce_eager=rollout.enforce_eager,
        enable_prefix_caching=True,
        # The next step is planned while the device works on this one. It is always one step ahead, whatever the clock
        # says, so that the ranks of a TP group plan alike.
        async_scheduling=on_cuda,
        logprobs_mode="processed_logprobs",  # after the temperature
        generation_config="vllm",  # the checkpoint's sampling defaults change nothing silently
        enable_sleep_mode=on_cuda,
        kv_cache_memory_bytes=int((rollout.kv_cache_gib or _KV_CACHE_GIB) * _GIB),
    )
    if not on_cuda:
        return arguments | dict(
            enforce_eager=True,  # a compiled graph would keep the packed weights of the first load
            # The first piece of a split prompt rewinds its request's generator, which CPU generators cannot do.
            enable_chunked_prefill=False,
            max_num_batched_tokens=max(rollout.max_num_batched_tokens, max_model_len),
        )
    free, total = torch.cuda.mem_get_info(mesh.device)
    # The share of the whole GPU decides nothing beside an explicit cache size, but is checked against what is free.
    return arguments | dict(
        compilation_config=_compilation(config, mesh.engines),
        gpu_memory_utilization=0.9 * free / total,
        # Logits stored in bfloat16 are off by hundredths of a nat.
        hf_overrides={"head_dtype": "float32"},
    )


def _compilation(config: RunConfig, engines: int) -> dict[str, Any]:
    """vLLM fuses some kernels side by side where a timing says that it pays. torch's deterministic mode, under which
    the engine is built too, refuses a choice by the clock with an error: two starts could compile two programs."""
    graphs: dict[str, Any] = {"cudagraph_capture_sizes": capture_sizes(config, engines)}
    if config.trainer.deterministic:
        graphs["inductor_compile_config"] = {"combo_kernels": False, "benchmark_combo_kernel": False}
    return graphs
