"""Engines that draw nothing: made answers, at once. MadeEngine's have full length, for timing the training phase alone;
RaggedEngine's any length, for comparing updates. They follow the request's seed, so they are the same on any ranks.

The answers carry no logprobs, so the parity gate and the importance correction have nothing to look at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from transformers import AutoConfig

from fastgrpo.config import RunConfig
from fastgrpo.mesh import Mesh
from fastgrpo.records import Request, Rollout, Sampling
from fastgrpo.rollout.engine import WeightExport


class MadeEngine:
    def __init__(self, config: RunConfig, mesh: Mesh, model_dir: Path, end_ids: tuple[int, ...]) -> None:
        self._vocab = AutoConfig.from_pretrained(model_dir).vocab_size
        self._version = 0

    @property
    def info(self) -> Mapping[str, str]:
        return {"library": "none: made answers"}

    def holds(self, version: int) -> bool:
        return True  # made answers need no weights

    @contextmanager
    def awake(self, export: WeightExport, version: int) -> Iterator[None]:
        self._version = version
        yield

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Request) -> Rollout:
        rng = np.random.default_rng(request.seed)
        ids = rng.integers(0, self._vocab, self._length(rng, request.max_tokens), dtype=np.int32)
        return Rollout(
            uid=request.uid,
            sample=request.sample,
            attempt=request.attempt,
            prompt_ids=request.ids,
            response_ids=ids,
            response_mask=np.ones(ids.shape, np.bool_),
            sampler_logprobs=None,
            finish_reason="length",
            weight_version=self._version,
        )

    def _length(self, rng: np.random.Generator, most: int) -> int:
        return most

    def close(self) -> None:
        pass


class RaggedEngine(MadeEngine):
    def _length(self, rng: np.random.Generator, most: int) -> int:
        return int(rng.integers(1, most + 1))
