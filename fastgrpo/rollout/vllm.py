"""The real engine: vLLM inside this process, one engine a tensor-parallel group, launched with the trainer by torchrun.

    build      LLM(...) with made-up weights, then sleep                  (CUDA: its memory goes to the trainer)
    awake      wake weights -> load -> reset the prefix cache -> wake KV cache
               ... generate ...
               sleep                                                      (level 2 drops the weights, 1 keeps a copy)

The engine never reads a weight file: what it serves is what `export` gave it, so a name that does not fit shows at
the first step. On a CPU vLLM cannot sleep; there the phases only gate `generate`, which is vllm_draw.py.

Only the files vllm*.py of this folder import vllm, and only when it is chosen.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fastgrpo.config import RunConfig, rollout_seconds
from fastgrpo.errors import UserError
from fastgrpo.mesh import Mesh
from fastgrpo.records import Request, Rollout, Sampling
from fastgrpo.rollout.checksums import BufferCheck, WeightCheck
from fastgrpo.rollout.engine import WeightExport, engine_dtype, reports_logprobs
from fastgrpo.rollout.process_state import kept_process_state
from fastgrpo.rollout.vllm_arguments import engine_arguments
from fastgrpo.rollout.vllm_draw import Drawn, draw, longest_first
from fastgrpo.rollout.vllm_load import held_weights, load_and_repack, load_in_place


class VllmEngine:
    """`runner`, "V1" or "V2", is the vLLM model runner that serves. Both honour a request's seed, V2 drawing on the GPU
    for the whole batch and V1 in a loop over its rows, so their samples differ."""

    def __init__(self, config: RunConfig, mesh: Mesh, model_dir: Path, end_ids: tuple[int, ...]) -> None:
        llm_class, self._params_class, self._final_only = _import_vllm(mesh.device.type)
        self._on_cuda = mesh.device.type == "cuda"
        self._end_ids = end_ids
        self._sleep_level = config.rollout.sleep_level
        self._max_seconds = rollout_seconds(config)
        self._max_num_seqs = config.rollout.max_num_seqs
        self._mesh = mesh
        dtype = getattr(torch, engine_dtype(config, mesh.device.type))
        self._check = WeightCheck(dtype, mesh.tp, mesh.tp_group) if config.rollout.check_weight_update else None
        self._is_awake = False
        self._version: int | None = None  # of the weights that the engine holds; None: none worth serving
        with kept_process_state(), warnings.catch_warnings(action="ignore", category=FutureWarning):
            self._llm = llm_class(**engine_arguments(config, mesh, model_dir))
        _keep_process_group(self._llm.llm_engine.engine_core)
        self.runner = "V2" if self._llm.llm_engine.vllm_config.use_v2_model_runner else "V1"
        self.info = {
            "library": "vllm",
            "version": importlib.import_module("vllm").__version__,
            "model_runner": self.runner,
            "dtype": engine_dtype(config, mesh.device.type),
        }
        if self._check is not None:
            [self._buffers] = self._llm.apply_model(lambda model: BufferCheck(model.named_buffers()))
        self._sleep()

    def holds(self, version: int) -> bool:
        return self._version == version

    @contextmanager
    def awake(self, export: WeightExport, version: int) -> Iterator[None]:
        if self._is_awake:
            raise RuntimeError("The engine is awake already: `awake` does not nest.")
        self._wake(export, version)
        self._is_awake = True
        try:
            yield
        finally:
            self._is_awake = False
            self._sleep()

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        """See RolloutEngine. The seed reaches the engine whole; on a CPU torch's generator uses its low 32 bits."""
        if not self._is_awake or self._version is None:
            raise RuntimeError("generate() outside of `with engine.awake(...)`: the engine sleeps.")
        if not requests:  # fewer groups than engines
            return []
        params = [self._sampling_params(request, sampling) for request in requests]
        with kept_process_state():
            drawn = draw(
                self._llm,
                requests,
                params,
                order=longest_first(requests, self._max_num_seqs),
                max_seconds=self._max_seconds,
                on_any_rank=self._on_any_rank,
            )
        return [self._rollout(request, one) for request, one in zip(requests, drawn, strict=True)]

    def close(self) -> None:
        # vLLM's own shutdown would end the default process group, so only its worker and its own groups go.
        from vllm.distributed.parallel_state import destroy_model_parallel

        self._is_awake = False
        self._llm.llm_engine.model_executor.shutdown()
        destroy_model_parallel()

    def _wake(self, export: WeightExport, version: int) -> None:
        if self._on_cuda:
            torch.cuda.empty_cache()  # the engine allocates from the device, not from torch's cache
            self._llm.wake_up(tags=["weights"])
        if not self.holds(version):
            self._version = None  # until the load is complete
            self._load(export() if self._check is None else self._check.noting(export()))
            self._version = version
        # Keys and values of older weights would be reused without an error.
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM refused to reset its prefix cache: it would reuse keys and values of old weights.")
        if self._on_cuda:
            torch.cuda.empty_cache()  # drops the staging of the load
            self._llm.wake_up(tags=["kv_cache"])
        if self._check is not None:  # all memory is in its place now
            self._compare(self._check)

    def _sleep(self) -> None:
        if not self._on_cuda:
            return
        self._llm.sleep(level=self._sleep_level)
        if self._sleep_level == 2:
            self._version = None

    def _load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        load = load_in_place if self._on_cuda else load_and_repack
        model_config = self._llm.llm_engine.model_config
        with torch.no_grad():
            [unfed] = self._llm.apply_model(lambda model: load(model, weights, model_config))
        if unfed:
            raise RuntimeError(
                f"{len(unfed)} of the engine's parameters were given no value, {sorted(unfed)[0]} among them: "
                "the exported names do not fit vLLM's model."
            )

    def _compare(self, check: WeightCheck) -> None:
        def compare(model: Any) -> None:
            check.compare(held_weights(model), getattr(model, "packed_modules_mapping", None))
            self._buffers.compare(model.named_buffers())

        with torch.no_grad():
            self._llm.apply_model(compare)

    def _sampling_params(self, request: Request, sampling: Sampling) -> Any:
        return self._params_class(
            seed=request.seed,
            max_tokens=request.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            stop_token_ids=list(self._end_ids),
            logprobs=0 if reports_logprobs(sampling) else None,  # 0: of the drawn token alone
            output_kind=self._final_only,
            detokenize=False,
            skip_special_tokens=False,
        )

    def _rollout(self, request: Request, drawn: Drawn) -> Rollout:
        assert self._version is not None
        return Rollout(
            uid=request.uid,
            sample=request.sample,
            attempt=request.attempt,
            prompt_ids=request.ids,
            response_ids=drawn.token_ids,
            response_mask=np.ones(drawn.token_ids.shape, dtype=np.bool_),
            sampler_logprobs=drawn.logprobs,
            finish_reason=drawn.finish_reason,
            weight_version=self._version,
            seconds=drawn.seconds,
        )

    def _on_any_rank(self, flag: bool) -> bool:
        """The ranks of one engine must go the same way: their clocks differ, their collectives must not."""
        if self._mesh.tp == 1:
            return flag
        flags = torch.tensor([int(flag)])
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._mesh.tp_group)
        return bool(flags)


def _import_vllm(device_type: str) -> tuple[Any, Any, Any]:
    """vLLM's LLM, SamplingParams and RequestOutputKind.FINAL_ONLY, its environment set first. Raises UserError when
    it cannot serve `device_type`."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # external_launcher: the engine core lives in this process
    os.environ["VLLM_ALLREDUCE_USE_SYMM_MEM"] = "0"  # colocated engines were tried without it only
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # its warnings at start speak of what is set here on purpose
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    extra = "vllm" if device_type == "cuda" else "cpu"
    remedy = f'pip install "fastgrpo[{extra}]", or set rollout.name=hf (small and slow)'
    try:
        from vllm import LLM, SamplingParams
        from vllm.platforms import current_platform
        from vllm.sampling_params import RequestOutputKind
    except ModuleNotFoundError as error:
        if error.name == "vllm":
            raise UserError(f"rollout.name=vllm, but vLLM is not installed: {remedy}.") from None
        raise UserError(f"vLLM is installed, but lacks a module of its own: {error}. Repair it: {remedy}.") from error
    except (ImportError, OSError) as error:  # OSError: a shared library that does not load
        raise UserError(f"vLLM is installed, but its import fails: {error}. Repair it: {remedy}.") from error
    if current_platform.device_type != device_type:
        raise UserError(
            f"The installed vLLM serves on {current_platform.device_type or 'no device it finds'}, "
            f"this run is on {device_type}: {remedy}, or set trainer.device."
        )
    return LLM, SamplingParams, RequestOutputKind.FINAL_ONLY


def _keep_process_group(core_client: Any) -> None:
    """From 0.31 on, vLLM ends the default process group when the engine is collected or the program exits."""
    finalizer = getattr(core_client, "_finalizer", None)
    if finalizer is not None:
        finalizer.detach()
