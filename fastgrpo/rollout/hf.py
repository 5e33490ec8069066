"""The small embedded engine: transformers' forward in a decode loop of our own, on its own copy of the model.

For tests and for machines without vLLM; it is slow and lives on one rank. A response is a function of (weights,
prompt, seed, sampling): each row draws from a generator of its own, so batch mates change it only through rounding.

    prompts, longest first, cut into batches of rollout.max_num_seqs rows, padded on the left
    forward -> logits_BV -> penalty, temperature, min_p, top_k, top_p -> one uniform number a row -> token

B rows of a batch, V vocabulary, L tokens of the longest prompt, T tokens of the longest response.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from fastgrpo.config import RunConfig, rollout_seconds
from fastgrpo.errors import ConfigError
from fastgrpo.mesh import Mesh
from fastgrpo.records import Request, Rollout, Sampling
from fastgrpo.rollout.checksums import WeightCheck
from fastgrpo.rollout.engine import WeightExport, engine_dtype, reports_logprobs
from fastgrpo.rollout.process_state import kept_process_state


class HfEngine:
    def __init__(self, config: RunConfig, mesh: Mesh, model_dir: Path, end_ids: tuple[int, ...]) -> None:
        if mesh.tp != 1:
            raise ConfigError(
                f"rollout.name=hf lives on one rank, rollout.tensor_model_parallel_size={mesh.tp}: set it to 1, "
                "or rollout.name=vllm"
            )
        trust = config.model.trust_remote_code
        dtype = getattr(torch, engine_dtype(config, mesh.device.type))
        with kept_process_state(), mesh.device:  # the random weights are only overwritten
            model_config = AutoConfig.from_pretrained(model_dir, trust_remote_code=trust)
            self._model = AutoModelForCausalLM.from_config(model_config, dtype=dtype, trust_remote_code=trust)
        self._model.eval().requires_grad_(False)
        self._device = mesh.device
        self._end_ids = torch.tensor(end_ids, dtype=torch.int64, device=mesh.device)
        self._check = WeightCheck(dtype) if config.rollout.check_weight_update else None
        self._max_rows = config.rollout.max_num_seqs
        self._max_seconds = rollout_seconds(config)
        self.info = {
            "library": "transformers",
            "version": transformers.__version__,
            "dtype": engine_dtype(config, mesh.device.type),
        }
        self._is_awake = False
        self._version: int | None = None

    def holds(self, version: int) -> bool:
        return self._version == version

    @contextmanager
    def awake(self, export: WeightExport, version: int) -> Iterator[None]:
        if self._is_awake:
            raise RuntimeError("The engine is awake already: `awake` does not nest.")
        if not self.holds(version):
            self._version = None  # until the load is complete
            self._load(export() if self._check is None else self._check.noting(export()))
            self._version = version
        if self._check is not None:
            self._check.compare(self._model.named_parameters())
        self._is_awake = True
        try:
            yield
        finally:
            self._is_awake = False

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        if not self._is_awake or self._version is None:
            raise RuntimeError("generate() outside of `with engine.awake(...)`: the engine sleeps.")
        order = sorted(
            range(len(requests)), key=lambda index: -len(requests[index].ids)
        )  # alike lengths: little padding
        rollouts: dict[int, Rollout] = {}
        started = time.perf_counter()
        for start in range(0, len(order), self._max_rows):
            rows = order[start : start + self._max_rows]
            rollouts |= zip(rows, self._generate_batch([requests[row] for row in rows], sampling, started), strict=True)
        return [rollouts[index] for index in range(len(requests))]

    def close(self) -> None:
        self._is_awake = False
        del self._model

    @torch.no_grad()
    def _load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        parameters = dict(self._model.named_parameters())
        unfed = set(parameters)
        for name, tensor in weights:
            if name not in parameters:
                raise RuntimeError(f"rollout.name=hf has no parameter {name!r}: its names must be the checkpoint's.")
            parameters[name].copy_(tensor)
            unfed.discard(name)
        if unfed:
            raise RuntimeError(f"{len(unfed)} parameters were given no value, {sorted(unfed)[0]} among them.")

    def _generate_batch(self, requests: Sequence[Request], sampling: Sampling, started: float) -> list[Rollout]:
        """Past its seconds (config.rollout_seconds) since `started` a batch draws one more token and is cut."""
        ids_BL, mask_BL = self._pad_left(requests)
        generators = [torch.Generator(self._device).manual_seed(request.seed) for request in requests]
        processors = _processors(sampling)
        budget_B = torch.tensor([request.max_tokens for request in requests], device=self._device)
        length_B, ended_B = torch.zeros_like(budget_B), torch.zeros_like(budget_B, dtype=torch.bool)
        chosen: list[Tensor] = []  # T of [B]
        logprobs: list[Tensor] = []
        seconds: list[float] = []  # since `started`, after each token
        cache = DynamicCache(config=self._model.config)
        input_ids, positions = ids_BL, (mask_BL.cumsum(1) - 1).clamp(min=0)  # a padded row counts from its first token
        while True:
            output = self._model(
                input_ids=input_ids,
                attention_mask=mask_BL,
                position_ids=positions,
                past_key_values=cache,
                logits_to_keep=1,
            )
            logits_BV = output.logits[:, -1].float()
            token_B1 = _draw(processors(ids_BL, logits_BV), generators, greedy=sampling.temperature == 0)
            if reports_logprobs(sampling):
                logprobs.append((logits_BV / sampling.temperature).log_softmax(-1).gather(1, token_B1).squeeze(1))
            chosen.append(token_B1.squeeze(1))
            running_B = ~ended_B & (length_B < budget_B)
            length_B += running_B
            ended_B |= running_B & torch.isin(chosen[-1], self._end_ids)
            seconds.append(time.perf_counter() - started)
            out_of_time = self._max_seconds is not None and seconds[-1] > self._max_seconds
            if out_of_time or not (~ended_B & (length_B < budget_B)).any():
                break
            ids_BL = torch.cat([ids_BL, token_B1], dim=1)
            mask_BL = torch.cat([mask_BL, torch.ones_like(token_B1)], dim=1)
            input_ids, positions = token_B1, positions[:, -1:] + 1
        tokens_BT = torch.stack(chosen, dim=1).cpu().numpy().astype(np.int32)
        logprobs_BT = torch.stack(logprobs, dim=1).cpu().numpy() if logprobs else [None] * len(requests)
        rows = zip(requests, tokens_BT, logprobs_BT, length_B.tolist(), ended_B.tolist(), strict=True)
        return [
            self._rollout(
                request,
                tokens_T[:length],
                None if logprobs_T is None else logprobs_T[:length],
                "stop" if ended else "length" if length == request.max_tokens else "time",
                seconds[length - 1],
            )
            for request, tokens_T, logprobs_T, length, ended in rows
        ]

    def _pad_left(self, requests: Sequence[Request]) -> tuple[Tensor, Tensor]:
        """[B, L] ids and mask. A row is padded with a token of its own prompt: a penalty looks at the padding too."""
        longest = max(len(request.ids) for request in requests)
        rows = [request.ids[:1] * (longest - len(request.ids)) + request.ids for request in requests]
        mask = [[0] * (longest - len(request.ids)) + [1] * len(request.ids) for request in requests]
        return torch.tensor(rows, device=self._device), torch.tensor(mask, device=self._device)

    def _rollout(
        self, request: Request, tokens: np.ndarray, logprobs: np.ndarray | None, finish_reason: str, seconds: float
    ) -> Rollout:
        assert self._version is not None
        return Rollout(
            uid=request.uid,
            sample=request.sample,
            attempt=request.attempt,
            prompt_ids=request.ids,
            response_ids=tokens,
            response_mask=np.ones(tokens.shape, dtype=np.bool_),
            sampler_logprobs=logprobs,
            finish_reason=finish_reason,
            weight_version=self._version,
            seconds=seconds,
        )


def _processors(sampling: Sampling) -> LogitsProcessorList:
    """In vLLM's order: the same options then cut the same tokens."""
    processors = LogitsProcessorList()
    if sampling.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.temperature == 0:
        return processors
    if sampling.temperature != 1:
        processors.append(TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.min_p > 0:
        processors.append(MinPLogitsWarper(sampling.min_p))
    if sampling.top_k > 0:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(TopPLogitsWarper(sampling.top_p))
    return processors


def _draw(scores_BV: Tensor, generators: Sequence[torch.Generator], *, greedy: bool) -> Tensor:
    """[B, 1] tokens: the largest score, or the token where the cumulative probability first exceeds a uniform number.
    In float64, so that 150,000 small probabilities add up."""
    if greedy:
        return scores_BV.argmax(dim=-1, keepdim=True)
    uniform_B1 = torch.stack([torch.rand(1, generator=g, device=g.device, dtype=torch.float64) for g in generators])
    cumulative_BV = scores_BV.double().softmax(dim=-1).cumsum(dim=-1)
    token_B1 = torch.searchsorted(cumulative_BV, uniform_B1 * cumulative_BV[:, -1:], right=True)
    return token_B1.clamp(max=scores_BV.shape[-1] - 1)
