"""This process's random generators as plain values, and back. The samples of a rollout need none of them (their seeds
are functions of the step); what a reward, an engine or a later option draws in this process does."""

from __future__ import annotations

import base64
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    version, numbers, gauss = random.getstate()
    numpy_state = np.random.get_state()
    assert isinstance(numpy_state, tuple)
    name, keys, position, has_gauss, cached = numpy_state
    state = {
        "python": [version, list(numbers), gauss],
        "numpy": [name, keys.tolist(), position, has_gauss, cached],
        "torch": _text(torch.get_rng_state()),
    }
    return state | ({"cuda": _text(torch.cuda.get_rng_state())} if torch.cuda.is_initialized() else {})


def set_random_state(state: Mapping[str, Any]) -> None:
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_bytes(state["torch"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_bytes(state["cuda"]))


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
