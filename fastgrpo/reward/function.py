"""What a reward function is: the record that names one, how it is called, and what its answer may be.

    def compute_score(prompt, response, reference, meta, step) -> float

is the whole form. It is called with keyword arguments and may take only those it needs. It returns a number, None (this
sample cannot be scored), or a dict {"score": number or None, ...} whose other finite numbers become metrics. Everything
else is a mistake that ends the run with a message, because a guess would train on it.

A new kind of reward is one file with `build(label, config) -> RewardFunction` and a line in `fastgrpo.reward.KINDS`.
Neither processes nor timeouts are handled here (see runner.py, worker.py).
"""

from __future__ import annotations

import inspect
import math
import reprlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from numbers import Real
from typing import Any

from fastgrpo.errors import UserError
from fastgrpo.records import RewardRequest

ARGUMENTS = ("prompt", "response", "reference", "meta", "step")
_VERL_NAMES = {
    "solution_str": "response",
    "ground_truth": "reference",
    "extra_info": "meta",
    "data_source": 'meta["data_source"]',
}


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """One configured reward. `load` is shipped to the worker processes and called once in each of them."""

    label: str  # its name in metrics and messages
    source: str  # where it comes from, for messages: "compute_score in /home/me/rewards.py"
    weight: float
    load: Callable[[], Callable[..., object]]

    def __str__(self) -> str:
        return f"reward {self.label!r} ({self.source})"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one function made of one sample."""

    status: str  # "scored", "unscored" (it returned None), "timeout", "error"
    score: float | None = None
    details: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None  # one line
    where: str = ""  # file:line that raised
    trace: str = ""  # last lines of the traceback


class BadReturn(Exception):
    """The function returned what no reward can be; the text describes the value."""


def accepted_arguments(function: Callable[..., object], name: str) -> tuple[str, ...]:
    """Those of ARGUMENTS that `function` takes. UserError when it requires others."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # some builtins do not tell theirs
        raise UserError(f"{name} does not tell its parameters. Wrap it in a function of your own.") from None
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        optional = ARGUMENTS
    else:
        optional = tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]
    positional_only = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    if positional_only:
        raise UserError(
            f"{name} takes {', '.join(positional_only)} by position only; drop the `/` from its parameters."
        )
    check_required(required, name)
    return tuple(a for a in ARGUMENTS if a in optional)


def check_required(required: Collection[str], name: str) -> None:
    """UserError when a function requires parameters that no reward is given."""
    unknown = [p for p in required if p not in ARGUMENTS]
    if not unknown:
        return
    hints = [f"{p} is {_VERL_NAMES[p]}" for p in unknown if p in _VERL_NAMES]
    raise UserError(
        f"{name} requires the parameter{'s' if len(unknown) > 1 else ''} {', '.join(unknown)}, which no reward is "
        f"given. It is called with {', '.join(ARGUMENTS)} (name those it needs, give others a default)."
        + (f" verl's names here: {'; '.join(hints)}." if hints else "")
    )


def arguments_of(request: RewardRequest) -> dict[str, Any]:
    return {
        "prompt": request.prompt,
        "response": request.response,
        "reference": request.reference,
        "meta": dict(request.meta),  # a plain dict: read-only mappings cannot be pickled
        "step": request.step,
    }


def read_return(value: object) -> tuple[float | None, dict[str, float]]:
    """(score, details) of what a function returned. BadReturn when it is no score."""
    if isinstance(value, Mapping):
        if "score" not in value:
            raise BadReturn(f'a dict without "score" (keys: {reprlib.repr(list(value))})')
        details = {str(k): x for k, v in value.items() if k != "score" and (x := _finite(v)) is not None}
        value = value["score"]
    else:
        details = {}
    if value is None:
        return None, details
    score = _finite(value)
    if score is None:
        raise BadReturn(_describe(value))
    return score, details


def _finite(value: object) -> float | None:
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
