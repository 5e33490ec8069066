"""Advantages: from the rewards of a step to one number a sequence. Each estimator is one registered pure function.

    Graded (rewards, groups, lengths, scores of the single functions) --ADVANTAGES[name]--> advantages_N

    of a prompt's group (group.py)      grpo, dr_grpo, rloo, opo, grpo_passk
    scaled over the batch (batch.py)    reinforce_plus_plus, reinforce_plus_plus_baseline, gdpo

Nothing here turns a reward into an advantage in place. `gae` is not among them: it needs a critic.
"""

from __future__ import annotations

from fastgrpo.algorithm.advantage.batch import gdpo, reinforce_plus_plus, reinforce_plus_plus_baseline
from fastgrpo.algorithm.advantage.graded import STD_EPS, AdvantageFn, Graded, group_means, group_spreads
from fastgrpo.algorithm.advantage.group import dr_grpo, grpo, grpo_passk, opo, rloo

ADVANTAGES: dict[str, AdvantageFn] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "opo": opo,
    "grpo_passk": grpo_passk,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "gdpo": gdpo,
}

__all__ = [
    "ADVANTAGES",
    "STD_EPS",
    "AdvantageFn",
    "Graded",
    "dr_grpo",
    "gdpo",
    "group_means",
    "group_spreads",
    "grpo",
    "grpo_passk",
    "opo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "rloo",
]
