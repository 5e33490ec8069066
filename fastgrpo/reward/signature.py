"""How a user's function is called: its parameters decide, whether it takes one sample or all of them, sync or async.

    (prompt, response, reference, meta, step, uid, sample, num_tokens)      one sample; any of them, by name
    (prompts, responses, references, metas, step, ...)                      all samples of this rank's step, as lists
    (data_source, solution_str, ground_truth, extra_info)                   verl's names, also in the plural
    (prompts, completions, completion_ids, **kwargs)                        TRL's; kwargs and further parameters are the
                                                                            columns of the data, as lists

An `async def` of the first form runs for many samples at once. What else a function requires is refused with a hint.
Calling and its limits are worker.py's and runner.py's.
"""

from __future__ import annotations

import inspect
from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fastgrpo.errors import UserError
from fastgrpo.reward.function import MissingColumn

ARGUMENTS = ("prompt", "response", "reference", "meta", "step", "uid", "sample", "num_tokens")
_VERL = {
    "solution_str": "response",
    "ground_truth": "reference",
    "extra_info": "extra_info",
    "data_source": "data_source",
}
_SINGLE = {name: name for name in ARGUMENTS} | _VERL
# parameter -> what it holds of each sample; `step` is one number for all
_BATCH = {f"{name}s": name for name in ARGUMENTS if name not in ("step", "num_tokens")}
_BATCH |= {f"{theirs}s": ours for theirs, ours in _VERL.items()} | {
    "completions": "response",
    "completion_ids": "completion_ids",
    "num_tokens": "num_tokens",
}
_NOT_IN_KEYWORDS = {*_BATCH, "step", "prompt", "completion"}  # columns that **kwargs leaves out, as TRL's does
_OF_TRLS_TRAINER = {"trainer_state", "log_extra", "log_metric", "environments"}
_MARKS = set(_BATCH) - {"num_tokens"}  # a parameter of such a name makes a function one for batches
_EXAMPLE = "def compute_score(prompt, response, reference, meta, step) -> float"

Form = Literal["single", "concurrent", "batch"]


@dataclass(frozen=True, slots=True)
class Signature:
    """`takes` are parameter names; `all_columns`: the function has **kwargs for the data's columns (batches only)."""

    form: Form
    takes: tuple[str, ...]
    all_columns: bool = False

    def keywords(self, sample: dict[str, Any]) -> dict[str, Any]:
        """Keyword arguments for one sample, given all of ARGUMENTS."""
        return {name: _value(sample, _SINGLE[name]) for name in self.takes}

    def batch_keywords(self, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Keyword arguments for a batch. MissingColumn when a column that the function asks for is not in the data."""
        columns = {name for sample in samples for name in sample["meta"]} if self.all_columns else set()
        names = dict.fromkeys([*self.takes, *sorted(columns - _NOT_IN_KEYWORDS)])
        return {name: self._column(name, samples) for name in names}

    def _column(self, name: str, samples: Sequence[dict[str, Any]]) -> Any:
        if name == "step":
            return samples[0]["step"]
        if source := _BATCH.get(name):
            return [_value(sample, source) for sample in samples]
        if any(name in sample["meta"] for sample in samples):
            return [sample["meta"].get(name) for sample in samples]
        if name in ARGUMENTS:  # `reference`, whatever its column is called
            return [sample[name] for sample in samples]
        known = ", ".join(samples[0]["meta"]) or "(none)"
        raise MissingColumn(
            f"it takes the parameter {name!r}, and the data has no such column; its columns are {known}"
        )


def read_signature(function: Callable[..., object], name: str) -> Signature:
    """UserError when the function requires what no reward is given."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # some builtins do not tell theirs
        raise UserError(f"{name} does not tell its parameters. Wrap it in a function of your own.") from None
    positional_only = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    if positional_only:
        raise UserError(
            f"{name} takes {', '.join(positional_only)} by position only; drop the `/` from its parameters."
        )
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = [p.name for p in parameters if p.kind not in (*variadic, inspect.Parameter.POSITIONAL_ONLY)]
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]
    any_keyword = any(p.kind is p.VAR_KEYWORD for p in parameters)
    check_required(required, named, name)
    if is_batched(named):
        takes = tuple(p for p in named if p in _BATCH or p == "step" or p in required)
        return Signature("batch", takes, any_keyword)
    takes = ARGUMENTS if any_keyword else ()
    takes = tuple(dict.fromkeys([*takes, *(p for p in named if p in _SINGLE)]))
    return Signature("concurrent" if is_async(function) else "single", takes)


def is_async(function: Callable[..., object]) -> bool:
    call = getattr(function, "__call__", None)  # noqa: B004  # an object with an async __call__
    inner = getattr(function, "func", function)  # functools.partial
    return any(inspect.iscoroutinefunction(f) for f in (function, inner, call))


def is_batched(parameters: Collection[str]) -> bool:
    return not _MARKS.isdisjoint(parameters)


def check_required(required: Collection[str], parameters: Collection[str], name: str) -> None:
    """UserError when a function of these `parameters` requires some that no reward is given."""
    if is_batched(parameters):  # anything else may be a column
        if others := sorted(_OF_TRLS_TRAINER & set(required)):
            raise UserError(
                f"{name} requires {', '.join(others)}, which only TRL's trainer has. Give it a default; the step's "
                'number is `step`, and a dict {"score": ..., more numbers} makes metrics.'
            )
        return
    unknown = [p for p in required if p not in _SINGLE]
    if unknown:
        raise UserError(
            f"{name} requires the parameter{'s' if len(unknown) > 1 else ''} {', '.join(unknown)}, which no reward is "
            f"given. It is called with {', '.join(ARGUMENTS)} (name those it needs, give others a default); a column "
            f'of the data is meta["{unknown[0]}"]. Write it as `{_EXAMPLE}`, or, for all samples at once, with lists: '
            "`def compute_score(prompts, completions, **columns) -> list[float]`."
        )


def _value(sample: dict[str, Any], source: str) -> Any:
    if source == "data_source":
        return sample["meta"].get("data_source")
    if source == "extra_info":
        return sample["meta"].get("extra_info", sample["meta"])
    if source == "completion_ids":
        return array("i", sample["completion_ids"]).tolist()
    return sample[source]
