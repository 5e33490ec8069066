"""All rewards of a run: those in worker processes and those in the trainer's own, put together into Scores.

    requests -> RewardRunner (worker processes) ─┐
             -> LocalReward  (this process)     ─┴─► an Outcome a function and sample ─► one Score a sample, in order

The functions of the worker processes come first, then the local ones, one after the other: they need the GPU or take no
time.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fastgrpo.errors import UserError
from fastgrpo.records import RewardRequest, Score
from fastgrpo.reward.function import LocalReward, Outcome, RewardFunction
from fastgrpo.reward.runner import RewardRunner
from fastgrpo.reward.total import refuse_if_all_raise, total

if TYPE_CHECKING:
    import torch

log = logging.getLogger("fastgrpo")


class Rewards:
    """`functions` in the order of the configuration."""

    def __init__(self, functions: Sequence[RewardFunction | LocalReward], num_workers: int, timeout_s: float) -> None:
        self.functions = tuple(functions)
        self._runner = RewardRunner([f for f in functions if isinstance(f, RewardFunction)], num_workers, timeout_s)
        self._local = [f for f in functions if not isinstance(f, RewardFunction)]
        self._first = True  # no batch has been scored yet

    def resume(self) -> None:
        """The run goes on, so the functions have scored in an earlier start: what fails on the whole first batch of
        this one is an outage, as at a later step, and no mistake of the user's."""
        self._first = False
        self._runner.resume()

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know of the functions before they run."""
        return tuple(note for function in self.functions for note in function.notes)

    def start(self) -> None:
        """Start the workers and load what they run. UserError when a function cannot be loaded."""
        if self._runner.functions:
            self._runner.start()

    def load(self, device: torch.device) -> None:
        """Load what runs in this process, before memory is shared out; on ranks that score."""
        for function in self._local:
            function.load(device)

    def score(self, requests: Sequence[RewardRequest]) -> list[Score]:
        """One Score a request, in the order of the requests. UserError for a mistake in a function, and when one with
        a weight fails in the same way on every sample of the first batch."""
        if not requests:
            return []
        of_workers = iter(self._runner.outcomes(requests))
        outcomes: list[list[Outcome]] = [
            next(of_workers) if isinstance(function, RewardFunction) else function.outcomes(requests)
            for function in self.functions
        ]
        if self._first:
            for function, found in zip(self.functions, outcomes, strict=True):
                try:
                    refuse_if_all_raise(function, found)
                except UserError as error:
                    if function.weight != 0:
                        raise
                    log.warning(f"{error}\nIts weight is 0, so training goes on without it.")
            self._first = False
        return [total(self.functions, found) for found in zip(*outcomes, strict=True)]

    def close(self) -> None:
        self._runner.close()
