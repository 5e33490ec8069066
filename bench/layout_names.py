"""Names of the parallel layouts that bench_layouts.py compares, and what a name means.

dp2        2 data ranks                      dp2-tp2     ... one engine over both
sp2        one row of tokens over 2 ranks    dp2-x2      ... twice the prompts
dp2-sp2    4 ranks, rows shared by pairs     dp4-hsdp2   4 data ranks, 2 copies of the sharded model
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

ONE = "dp1"  # what all others are compared with
PARITY = (ONE, "dp2", "sp2", "dp4", "dp2-sp2", "sp4", "dp4-hsdp2")
STEPS = (ONE, "dp2", "sp2", "dp2-tp2", "dp2-x2", "dp4", "dp2-sp2", "sp4", "dp4-hsdp2", "dp4-tp2", "dp4-tp4", "dp4-x4")
TRAIN_ONLY = (ONE, "dp2", "sp2", "dp2-x2", "dp4", "dp2-sp2", "sp4", "dp4-hsdp2", "dp4-x4")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    name: str
    dp: int = 1  # data ranks, or SP groups of ranks
    sp: int = 1
    tp: int = 1  # ranks of one engine
    hsdp: int = 1  # copies of the sharded model
    x: int = 1  # times the prompts

    @classmethod
    def of(cls, name: str) -> ParallelLayout:
        """Raises ValueError for what is no name."""
        parts = [re.fullmatch(r"(dp|sp|tp|hsdp|x)([1-9]\d*)", part) for part in name.split("-")]
        sizes = {part[1]: int(part[2]) for part in parts if part}
        if len(sizes) != len(parts):
            raise ValueError(f"{name!r} is no layout; write dp, sp, tp, hsdp and x with a number each, as in dp2-tp2")
        return cls(name=name, **sizes)

    @property
    def world(self) -> int:
        return self.dp * self.sp

    def options(self, prompts: int) -> list[str]:
        """The run's options; `prompts`: of a step of the workload."""
        return [
            f"actor.ulysses_sequence_parallel_size={self.sp}",
            f"rollout.tensor_model_parallel_size={self.tp}",
            f"actor.fsdp.replicas={self.hsdp}",
            f"data.train_batch_size={self.x * prompts}",
        ]

    def fields(self) -> dict[str, Any]:
        """Of a row."""
        sizes = {"dp": self.dp, "sp": self.sp, "tp": self.tp, "replicas": self.hsdp}
        return {"layout": self.name, "world": self.world, **sizes}


def defaults(names: tuple[str, ...], world: int) -> list[str]:
    """Those of `names` that `world` ranks can run."""
    return [name for name in names if ParallelLayout.of(name).world <= world]
