"""How long the answers to each prompt were last time: what an engine with more requests than slots goes by.

A slot that starts a long answer last keeps the whole step waiting with all others idle. Starting the longest first
(Graham's rule: at most 4/3 of the best makespan for known lengths) needs a guess, and from the second epoch on there is
one. It decides the order of submission and nothing else: seeds and samples do not depend on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastgrpo.records import Rollout


class LengthHistory:
    """A part of the trainer's state, the same on every rank. Empty, and a few bytes, where no order is `wanted`."""

    def __init__(self, *, wanted: bool) -> None:
        self._wanted = wanted
        self._mean: dict[str, float] = {}  # uid -> tokens
        self._longest = 0.0

    def expected(self, uid: str) -> float:
        """Tokens of an answer; for a prompt never drawn, those of the longest that is known."""
        return self._mean.get(uid, self._longest)

    def note(self, rollouts: Sequence[Rollout]) -> None:
        """All of a step's rollouts."""
        if not self._wanted:
            return
        lengths: dict[str, list[int]] = {}
        for rollout in rollouts:
            lengths.setdefault(rollout.uid, []).append(len(rollout.response_ids))
        self.load_state({"mean": self._mean | {uid: sum(found) / len(found) for uid, found in lengths.items()}})

    def state(self) -> dict[str, Any]:
        return {"mean": dict(self._mean)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._mean = dict(state["mean"])
        self._longest = max(self._mean.values(), default=0.0)
