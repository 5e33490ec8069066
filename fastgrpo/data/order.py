"""Which prompts a run takes: a function of (seed, epoch) and the number of batches that were taken before, the only
state that a resumed run needs.

Every rank computes the same global order and takes its slice. The last, incomplete batch of an epoch is left out. A
step takes one batch, or with dynamic sampling as many as it needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fastgrpo.data.prompts import PromptSet
from fastgrpo.errors import UserError
from fastgrpo.records import Prompt


def epoch_order(num_prompts: int, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """[num_prompts] int64, a permutation of 0 .. num_prompts - 1; the identity without `shuffle`.

    Sorts by the raw output of a counter-based generator keyed by (seed, epoch): that output is fixed by its algorithm,
    whereas numpy may change `permutation` between versions and a resumed run would visit other prompts.
    """
    if not shuffle:
        return np.arange(num_prompts)
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(num_prompts), kind="stable")


def steps_per_epoch(num_prompts: int, batch_size: int) -> int:
    """Full batches in one pass over the prompts. Raises UserError when there is none."""
    if num_prompts < batch_size:
        raise UserError(
            f"{num_prompts} prompts do not fill a batch of data.train_batch_size={batch_size} (0 batches an epoch; "
            f"with dynamic sampling data.gen_batch_size): lower it to at most {num_prompts}, or give more prompts "
            "(data.train_files)"
        )
    return num_prompts // batch_size


class PromptOrder:
    """Where a run is in its data."""

    def __init__(self, prompt_set: PromptSet, batch_size: int, seed: int, shuffle: bool) -> None:
        """Raises UserError when the prompts do not fill a batch."""
        steps_per_epoch(len(prompt_set), batch_size)
        self._prompt_set, self._batch_size, self._seed, self._shuffle = prompt_set, batch_size, seed, shuffle
        self._batches = 0  # taken so far

    def take(self) -> list[Prompt]:
        """The next `batch_size` prompts, in their global order."""
        prompts = batch_prompts(self._prompt_set, self._batches, self._batch_size, self._seed, self._shuffle)
        self._batches += 1
        return prompts

    def state(self) -> dict[str, Any]:
        return {"batches": self._batches}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._batches = state["batches"]


def batch_prompts(prompt_set: PromptSet, number: int, batch_size: int, seed: int, shuffle: bool) -> list[Prompt]:
    """The prompts of batch `number` (counted from 0, over all epochs), in their global order."""
    epoch, batch = divmod(number, steps_per_epoch(len(prompt_set), batch_size))
    order = epoch_order(len(prompt_set), seed, epoch, shuffle)
    return [prompt_set.prompts[i] for i in order[batch * batch_size : (batch + 1) * batch_size]]
