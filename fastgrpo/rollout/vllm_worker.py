"""vLLM's worker with a notebook: what each decode step drew is written down where it arrives, as one array a step.

    model runner -> [B] token ids, [B] logprobs, request ids      (numpy, once a step)
        notebook on:   kept here; the step's output goes on to the scheduler without logprobs
        notebook off:  everything goes on, as vLLM's own worker would have it

On a GPU a step's output is a promise: the scheduler plans the next step meanwhile, and what was drawn is written down
when the promise is kept. A request that ended is in the step planned before its end was known: its row there is noted,
too, and vllm_draw.py leaves it out.

vLLM would carry a logprob from here to the caller in objects of its own, several for each token, through scheduler,
output processor and request state; on the reference workload that costs more than half of the decoding itself. Taken
from the notebook they cost a handful of arrays a step. The notebook also holds the tokens of requests that are cut
before they finish, which vLLM does not hand out.

vLLM imports this module by name (`worker_cls`) in a process that serves; nothing else may. No patching: it overrides
one method of the worker.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.platforms import current_platform
from vllm.v1.outputs import AsyncModelRunnerOutput

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as _Worker
else:
    from vllm.v1.worker.gpu_worker import Worker as _Worker


class NotingWorker(_Worker):  # pyright: ignore[reportGeneralTypeIssues]
    _notes: list[Any] | None = None

    def start_notes(self) -> None:
        """From now on steps are written down. What an interrupted rollout left is dropped."""
        self._notes = []

    def take_notes(self) -> list[Any]:
        """Everything since `start_notes`, a step an entry (see vllm_draw.Note); the notebook is then off. A step that
        is still on the device is not in it, now or later."""
        notes, self._notes = self._notes or [], None
        return list(notes)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        output = super().sample_tokens(*args, **kwargs)
        if self._notes is None or output is None:
            return output
        if isinstance(output, AsyncModelRunnerOutput):
            return _Promise(output, self._notes)
        return _note(output, self._notes)


class _Promise(AsyncModelRunnerOutput):  # pyright: ignore[reportGeneralTypeIssues]
    """A step's output that is not there yet, and the notebook that it goes into."""

    def __init__(self, promised: Any, notes: list[Any]) -> None:
        self._promised = promised
        self._notes = notes

    def get_output(self) -> Any:
        return _note(self._promised.get_output(), self._notes)


def _note(output: Any, notes: list[Any]) -> Any:
    # Flat arrays: keeping the lists themselves would leave a quarter of a million of them to the garbage collector.
    token_ids = np.fromiter((ids[0] if ids else -1 for ids in output.sampled_token_ids), np.int32)
    logprobs = None
    if output.logprobs is not None:
        logprobs = np.array(output.logprobs.logprobs[:, 0], dtype=np.float32)  # the drawn token stands first
        output.logprobs = None
    notes.append((tuple(output.req_ids), token_ids, logprobs))
    return output
