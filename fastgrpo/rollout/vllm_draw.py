"""One call of vLLM for all of a rank's samples: submit, step until all have ended, read the worker's notebook.

    requests --add_request, one by one, in the order given--> engine
        engine.step() ...  each step's tokens and logprobs stay in the worker's notebook (vllm_worker.py)
        past `max_seconds`: what still runs is cut, with what it has drawn
    notebook: steps x rows  --sort by row-->  each request's tokens and logprobs
    engine.step() until none is on the device: the engine may go to sleep

Knows vLLM's LLM object by what it can do; imports no vllm.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastgrpo.records import Request

STEPS_A_LOOK = 16  # engine steps between two looks at the clock, which the ranks of one engine take together
Note = tuple[tuple[str, ...], np.ndarray, "np.ndarray | None"]  # request ids; int32 tokens, -1: none; float32 logprobs


@dataclass(frozen=True, slots=True)
class Drawn:
    """What one request drew. Example: Drawn([7 2], [-0.3 -1.2], "stop", 1.5)."""

    token_ids: np.ndarray  # [L] int32
    logprobs: np.ndarray | None  # [L] float32; None: not asked for
    finish_reason: str  # "stop", "length", or "time": cut at the limit
    seconds: float  # from the start of the call to its end


def longest_first(requests: Sequence[Request], slots: int) -> list[int] | None:
    """Rows in the order of submission when not all run at once: the longest expected first, else as they come."""
    if len(requests) <= slots:
        return None
    return sorted(range(len(requests)), key=lambda row: -requests[row].expected_tokens)


def draw(
    llm: Any,
    requests: Sequence[Request],
    params: Sequence[Any],
    *,
    order: Sequence[int] | None = None,
    max_seconds: float | None = None,
    on_any_rank: Callable[[bool], bool] = bool,
) -> list[Drawn]:
    """One Drawn a request, in the order of `requests`.

    params: vLLM's, one a request, of the kind that reports final outputs only. order: the order of submission.
    on_any_rank: whether the flag is set on any rank of this engine, which must cut in the same step; called by all.
    Raises RuntimeError when the engine loses a request or the notebook and the engine disagree.
    """
    engine = llm.llm_engine
    llm.collective_rpc("start_notes")
    start = time.perf_counter()
    names = [""] * len(requests)  # by which the worker knows each request
    for row in range(len(requests)) if order is None else order:
        prompt = {"type": "token", "prompt_token_ids": list(requests[row].ids)}
        names[row] = engine.add_request(str(row), prompt, params[row])
    outputs: dict[int, Any] = {}
    ends = [0.0] * len(requests)
    steps = 0
    while engine.has_unfinished_requests():
        finished = [output for output in engine.step() if output.finished]
        now = time.perf_counter() - start
        for output in finished:
            outputs[int(output.request_id)] = output
            ends[int(output.request_id)] = now
        steps += 1
        if max_seconds is not None and steps % STEPS_A_LOOK == 0 and on_any_rank(now > max_seconds):
            break
    cut = [row for row in range(len(requests)) if row not in outputs] if engine.has_unfinished_requests() else []
    engine.abort_request([str(row) for row in cut])
    [notes] = llm.collective_rpc("take_notes")  # before the steps in flight, which drew past the ends of some
    drain(engine)
    took = time.perf_counter() - start
    tokens, logprobs = sort_notes(notes, names)
    drawn = []
    for row, request in enumerate(requests):
        if row in cut:
            drawn.append(Drawn(tokens[row], logprobs[row], "time", took))
            continue
        reason = _finish_reason(request, outputs.get(row), len(requests), len(outputs))
        size = _noted_size(request, tokens[row], outputs[row].outputs[0].token_ids)
        noted = logprobs[row]
        drawn.append(Drawn(tokens[row][:size], None if noted is None else noted[:size], reason, ends[row]))
    return drawn


def sort_notes(notes: Sequence[Note], names: Sequence[str]) -> tuple[list[np.ndarray], list[np.ndarray | None]]:
    """Each named request's tokens and logprobs, in the order of the steps. Those of other requests are passed over."""
    row_of = {name: row for row, name in enumerate(names)}
    rows = np.asarray([row_of.get(name, -1) for ids, _, _ in notes for name in ids], dtype=np.int64)
    tokens = np.concatenate([np.empty(0, np.int32), *(ids for _, ids, _ in notes)])
    kept = np.flatnonzero((rows >= 0) & (tokens >= 0))
    kept = kept[np.argsort(rows[kept], kind="stable")]
    ends = np.cumsum(np.bincount(rows[kept], minlength=len(names)))[:-1]
    if all(noted is None for _, _, noted in notes):
        return np.split(tokens[kept], ends), [None] * len(names)
    blank = np.float32("nan")  # a step of nothing but unfinished prompts may bring none
    noted = np.concatenate([np.full(len(ids), blank) if found is None else found for _, ids, found in notes])
    return np.split(tokens[kept], ends), list(np.split(noted[kept], ends))


def drain(engine: Any) -> None:
    """Step until none of the steps that were planned ahead is on the device."""
    while engine.engine_core.engine_core.batch_queue:
        engine.step()


def _noted_size(request: Request, noted: np.ndarray, returned: Sequence[int]) -> int:
    """How many of the noted tokens are the request's: all, or all but one, drawn in a step planned before the end was
    known."""
    size = len(returned)
    if not np.array_equal(noted[:size], returned) or len(noted) > size + 1:
        raise RuntimeError(f"vLLM's worker noted other tokens than vLLM returned for {_where(request)}.")
    return size


def _finish_reason(request: Request, output: Any, num_requests: int, num_outputs: int) -> str:
    if output is None or tuple(output.prompt_token_ids) != request.ids:
        raise RuntimeError(
            f"vLLM returned {num_outputs} outputs for {num_requests} requests; it lost {_where(request)}."
        )
    reasons = [completion.finish_reason for completion in output.outputs]
    if reasons not in (["stop"], ["length"]):
        raise RuntimeError(f"vLLM did not finish {_where(request)}: finish reasons {reasons}.")
    return reasons[0]


def _where(request: Request) -> str:
    return f"prompt {request.uid}, sample {request.sample} ({len(request.ids)} + {request.max_tokens} tokens)"
