"""What a reward function is: the record that names one, how it is called, and what its answer may be.

    def compute_score(prompt, response, reference, meta, step) -> float

is the plainest form (signature.py holds the others). It is called with keyword arguments and may take only those it
needs. It returns a number, None (this sample cannot be scored), or a dict {"score": number or None, ...} whose other
finite numbers become metrics and whose "pred", a text, is the answer that it found in the response; one for batches
returns a list of those. Everything else is a mistake that ends the run with a message: a guess would train on it.

A new kind of reward is one file with `build(label, config) -> RewardFunction` and a line in `fastgrpo.reward.KINDS`.
Neither processes nor timeouts are handled here (see runner.py, worker.py).
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol

from fastgrpo.errors import UserError
from fastgrpo.records import RewardRequest

if TYPE_CHECKING:
    import torch


PRED = "pred"  # key under which a function may tell the answer that it found, as verl's do


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """One configured reward. `load` is shipped to the worker processes and called once in each of them."""

    label: str  # its name in metrics and messages
    source: str  # where it comes from, for messages: "compute_score in /home/me/rewards.py"
    weight: float
    load: Callable[[], Callable[..., object]]
    notes: tuple[str, ...] = ()  # what the user should know of it, said at the start

    def __str__(self) -> str:
        return f"reward {self.label!r} ({self.source})"


@dataclass(frozen=True, slots=True)
class Setting:
    """What a kind's `build` knows besides its own options."""

    timeout_s: float  # reward.timeout_s
    max_response_length: int  # tokens


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one function made of one sample."""

    status: str  # "scored", "unscored" (it returned None), "timeout", "error"
    score: float | None = None
    details: Mapping[str, float | str] = field(default_factory=dict)  # numbers, and under PRED a text
    error: str | None = None  # one line
    where: str = ""  # file:line that raised
    trace: str = ""  # last lines of the traceback


class LocalReward(Protocol):
    """A reward that is computed in the trainer's own process: one that needs its GPU, or only looks something up."""

    label: str
    weight: float
    notes: tuple[str, ...]

    def load(self, device: torch.device) -> None:
        """On every rank that scores, before the engine is built. `device` is the trainer's."""
        ...

    def outcomes(self, requests: Sequence[RewardRequest]) -> list[Outcome]:
        """One a request, in order, while the engine sleeps."""
        ...


class RewardMistake(UserError):
    """What only a mistake in the function `label` can be. Travels between ranks."""

    def __init__(self, text: str, label: str) -> None:
        super().__init__(text, label)  # pickle calls with what it was given
        self.label = label

    def __str__(self) -> str:
        return self.args[0]


class BadReturn(Exception):
    """The function returned what no reward can be; the text describes the value."""


def arguments_of(request: RewardRequest) -> dict[str, Any]:
    return {
        "prompt": request.prompt,
        "response": request.response,
        "reference": request.reference,
        "meta": dict(request.meta),  # a plain dict: read-only mappings cannot be pickled
        "step": request.step,
        "uid": request.uid,
        "sample": request.sample,
        "num_tokens": request.num_tokens,
        "completion_ids": request.response_ids,
    }


def read_return(value: object) -> tuple[float | None, dict[str, float | str]]:
    """(score, details) of what a function returned. BadReturn when it is no score."""
    details: dict[str, float | str] = {}
    if isinstance(value, Mapping):
        if "score" not in value:
            raise BadReturn(f'a dict without "score" (keys: {reprlib.repr(list(value))})')
        details |= {str(k): x for k, v in value.items() if k != "score" and (x := finite(v)) is not None}
        if value.get(PRED) is not None:
            details[PRED] = str(value[PRED])
        value = value["score"]
    if value is None:
        return None, details
    score = finite(value)
    if score is None:
        raise BadReturn(_describe(value))
    return score, details


def read_batch(value: object, size: int) -> list[tuple[float | None, dict[str, float | str]]]:
    """read_return of each of the `size` values that a function for batches returned. BadReturn when there are not so
    many."""
    if isinstance(value, str | Mapping) or not hasattr(value, "__len__") or not hasattr(value, "__getitem__"):
        raise BadReturn(f"{_describe(value)} for {size} samples; a function that takes lists returns a list")
    if len(value) != size:  # type: ignore[arg-type]
        raise BadReturn(f"{len(value)} values for {size} samples")  # type: ignore[arg-type]
    return [_read_one(value[i], i, size) for i in range(size)]  # type: ignore[index]


def _read_one(value: object, index: int, size: int) -> tuple[float | None, dict[str, float | str]]:
    try:
        return read_return(value)
    except BadReturn as error:
        raise BadReturn(f"{error}, as item {index} of {size}") from None


class MissingColumn(Exception):
    """The function asks for a column that the data does not have; the text names both."""


def finite(value: object) -> float | None:
    """A number as float; None for what is none, or not finite."""
    if getattr(value, "ndim", None) == 0:  # numpy and torch scalars, without importing either
        value = value.item()  # type: ignore[attr-defined]
    if not isinstance(value, Real | Decimal):
        return None
    try:
        number = float(value)
    except (OverflowError, ValueError):  # an int beyond float's range, a signalling Decimal nan
        return None
    return number if math.isfinite(number) else None


def _describe(value: object) -> str:
    shape = getattr(value, "shape", None)
    size = (
        f" of shape {tuple(shape)}" if shape else f" of length {len(value)}" if isinstance(value, list | tuple) else ""
    )
    return f"{type(value).__name__}{size}: {reprlib.repr(value)}"
