"""The coefficient of the KL penalty in the reward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_LARGEST_ERROR = 0.2  # of the relative distance to the target, that one step acts on


@dataclass(slots=True)
class KlController:
    """The coefficient of the KL penalty in the reward: fixed, or drawn towards a target (Ziegler et al., "Fine-tuning
    language models from human preferences", arXiv 1909.08593):

        coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * sequences / horizon
    """

    coef: float
    target: float | None = None  # nats a token; None: the coefficient stays
    horizon: int = 10_000  # sequences

    def update(self, kl: float, sequences: int) -> None:
        """kl: mean over the step's sequences of their mean KL a token, under the coefficient as it was."""
        if self.target is not None:
            error = min(max(kl / self.target - 1, -_LARGEST_ERROR), _LARGEST_ERROR)
            self.coef *= 1 + error * sequences / self.horizon

    def state(self) -> dict[str, Any]:
        return {"coef": self.coef}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Only an adaptive coefficient is state; a fixed one is the configuration's."""
        if self.target is not None:
            self.coef = state["coef"]
