"""How long the answers to each prompt were last time: by it groups are shared out over engines, and an engine with more
requests than slots begins.

A slot that starts a long answer last keeps the whole step waiting with all others idle, and so does an engine with
more tokens to draw than the others. Longest first (Graham's rule: at most 4/3 of the best makespan for known lengths)
needs a guess, and from the second epoch on there is one. It decides where and in which order requests are drawn and
nothing else: seeds and samples do not depend on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastgrpo.mesh import engine_slice
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


def divide_groups(expected: Sequence[float], engines: int) -> list[list[int]]:
    """Each engine's groups, in order: as many as `engine_slice` gives it, and from the longest expected down each to
    the engine with the fewest expected tokens that has room. Where nothing is known, consecutive ones. A pure function:
    every rank divides alike.

    Example: divide_groups([8, 7, 6, 5, 4, 3, 2, 1], 2) -> [[0, 3, 4, 7], [1, 2, 5, 6]], 18 tokens each.
    """
    slices = [engine_slice(len(expected), 1, engine, engines) for engine in range(engines)]
    if len(set(expected)) <= 1:
        return [list(own) for own in slices]
    shares: list[list[int]] = [[] for _ in slices]
    tokens = [0.0] * engines
    for group in sorted(range(len(expected)), key=lambda group: -expected[group]):
        with_room = [engine for engine in range(engines) if len(shares[engine]) < len(slices[engine])]
        engine = min(with_room, key=lambda engine: tokens[engine])
        shares[engine].append(group)
        tokens[engine] += expected[group]
    return [sorted(share) for share in shares]
