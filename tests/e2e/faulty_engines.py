"""Engines with one fault each, of the kind that trains on in silence. `rollout.name=faulty_engines:<class>` runs one.

Each fault is a mix-in over an honest engine, which is otherwise untouched: FAULTS x {hf, vllm}.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from fastgrpo.records import Request, Rollout, Sampling
from fastgrpo.rollout.hf import HfEngine
from fastgrpo.rollout.vllm import VllmEngine


class NeverLoads:
    """Serves the weights that it was built with."""

    def _load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        for _ in weights:  # the export is a collective: every rank goes through it
            pass


class LoadsOnce:
    """Serves the first version for ever."""

    _loaded = False

    def _load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        if self._loaded:
            weights = iter([*weights][:0])
        else:
            self._loaded = True
            super()._load(weights)  # pyright: ignore


class OtherTemperature:
    """Draws hotter than it was told, and reports what it drew with."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        return super().generate(requests, replace(sampling, temperature=1.5 * sampling.temperature))  # pyright: ignore


class OneLayerRenamed:
    """One layer's matrix arrives under its neighbour's name, of the same shape, and the neighbour's under its own."""

    PAIR = ("model.layers.0.mlp.down_proj.weight", "model.layers.1.mlp.down_proj.weight")

    def _load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        swapped = dict(zip(self.PAIR, reversed(self.PAIR), strict=True))
        super()._load((swapped.get(name, name), tensor) for name, tensor in weights)  # pyright: ignore


class TwoModels:
    """Reads prompts with an older model than it decodes with: keys and values that outlived their weights."""

    def __init__(self, model: Any) -> None:
        self.now, self.older = model, copy.deepcopy(model)

    def __call__(self, **inputs: Any) -> Any:
        return (self.older if inputs["input_ids"].shape[1] > 1 else self.now)(**inputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.now, name)


class StalePrefixHf(HfEngine):
    _warm = False

    def _load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        super()._load(weights)
        if not self._warm:
            self._warm, self._model = True, TwoModels(self._model)


class _KeepsItsCache:
    """vLLM's LLM, but for the reset of its prefix cache, which it only says to have done."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def reset_prefix_cache(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)


class StalePrefixVllm(VllmEngine):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._llm = _KeepsItsCache(self._llm)


class NeverLoadsHf(NeverLoads, HfEngine): ...


class LoadsOnceHf(LoadsOnce, HfEngine): ...


class OtherTemperatureHf(OtherTemperature, HfEngine): ...


class OneLayerRenamedHf(OneLayerRenamed, HfEngine): ...


class NeverLoadsVllm(NeverLoads, VllmEngine): ...


class LoadsOnceVllm(LoadsOnce, VllmEngine): ...


class OtherTemperatureVllm(OtherTemperature, VllmEngine): ...


class OneLayerRenamedVllm(OneLayerRenamed, VllmEngine): ...
