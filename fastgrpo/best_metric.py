"""Whether trainer.best_metric is a metric that the run will have, asked before anything is loaded: a misspelt one would
show only at the first checkpoint, hours later, and then no checkpoint would be the best.

Held against the names are those of validation and of rewards, which follow from options and sets. Of the other metrics
only the part before the slash is: some come up in some steps alone.
"""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches

from fastgrpo.config import RunConfig
from fastgrpo.config.wording import at
from fastgrpo.errors import ConfigError
from fastgrpo.records import STATUSES
from fastgrpo.val_metrics import powers_of_2

_REWARDS = ("mean", "std", "min", "max", *STATUSES, "zero_signal_groups")
_KL = ("kl_penalty", "kl_coef", "kl")  # with the KL in the reward
_ALL_SETS = ("reward", *STATUSES, "response_length", "truncated")
_OTHERS = (
    *("actor", "gap", "rollout_corr", "training", "response_length", "prompt_length", "filter_groups", "perf"),
    "timing_s",
)


def check_best_metric(config: RunConfig, val_sets: Collection[str]) -> None:
    """`val_sets`: names of the validation sets. Raises ConfigError with what there is instead."""
    metric = config.trainer.best_metric
    if metric is None or metric.split("/")[0] in _OTHERS or metric in (known := _known(config, val_sets)):
        return
    if metric.startswith(("reward/part/", "val/reward/")):
        labels = list(config.reward.functions)
        if not labels or metric.split("/")[2] in labels:  # none: a reward that was given in Python
            return
    near = get_close_matches(metric, known, n=1)
    shown = [name for name in known if not name.endswith(("/low", "/high"))]
    raise ConfigError(
        f"{at(config, 'trainer.best_metric')} is no metric of this run"
        + (f"; did you mean {near[0]}?" if near else "")
        + f"\nwith rollout.val_kwargs.n={config.rollout.val_kwargs.n} and these options there are {', '.join(shown)}, "
        f"and what begins with {', '.join(f'{name}/' for name in _OTHERS)}"
    )


def _known(config: RunConfig, val_sets: Collection[str]) -> list[str]:
    in_reward = _KL if config.algorithm.use_kl_in_reward else ()
    names = [f"reward/{name}" for name in (*_REWARDS, *in_reward)]
    names += [f"reward/part/{label}" for label in config.reward.functions]
    if val_sets:
        names += [f"val/{name}" for name in _ALL_SETS]
        names += [f"val/reward/{label}" for label in config.reward.functions]
    return names + [f"val/{name}/{key}" for name in sorted(val_sets) for key in _of_a_set(config.rollout.val_kwargs.n)]


def _of_a_set(n: int) -> list[str]:
    estimates = [f"mean@{n}", *(f"pass@{k}" for k in powers_of_2(n)), *([f"maj@{n}"] if n > 1 else [])]
    return [*(f"{name}{end}" for name in estimates for end in ("", "/low", "/high")), *STATUSES]
