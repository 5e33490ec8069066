"""What the options alone show to be unlikely, though it can be meant: said at the start, never refused.

Here: what a person would ask about when reading the configuration. Not here: contradictions, which are refused
(rules.py), and what shows only with the model or the data.
"""

from __future__ import annotations

from collections.abc import Iterator

from fastgrpo.config.schema import RunConfig
from fastgrpo.config.wording import at

_LOW, _HIGH = "actor.clip_ratio_low", "actor.clip_ratio_high"
_NARROW = 0.01  # a bound below it is one on a sequence's mean; above ten times it, one on a token
_OF_TOKENS = ("vanilla", "cispo", "dppo_tv", "geo_mean")


def notes(config: RunConfig) -> list[str]:
    """A line for each thing that is unlikely to be meant."""
    return list(clips_of_another_loss(config))


def clips_of_another_loss(c: RunConfig) -> Iterator[str]:
    """As a preset leaves them when the loss alone is exchanged."""
    bounds, narrow = f"{at(c, _LOW)} and {at(c, _HIGH)}", max(c.actor.clip_ratio_low, c.actor.clip_ratio_high)
    if c.actor.policy_loss in _OF_TOKENS and narrow < _NARROW:
        yield (
            f"{bounds} are of the size for gspo's mean over a sequence, and {at(c, 'actor.policy_loss')} bounds single "
            "tokens by them: most are then clipped after one update; docs/algorithms.md has each loss's bounds"
        )
    if c.actor.policy_loss == "gspo" and narrow >= 10 * _NARROW:
        yield (
            f"{bounds} are of the size for single tokens, and actor.policy_loss=gspo bounds the mean over a sequence: "
            "nothing is ever clipped; gspo's paper has 3e-4 and 4e-4 (algorithm=gspo)"
        )
