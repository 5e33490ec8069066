"""From the outcomes of the functions to the Score of a sample, and to a refusal when a whole batch failed alike."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fastgrpo.errors import UserError
from fastgrpo.records import STATUSES, Score
from fastgrpo.reward.function import PRED, LocalReward, Outcome, RewardFunction


def total(functions: Sequence[RewardFunction | LocalReward], outcomes: Sequence[Outcome]) -> Score:
    """One sample's Score from one outcome a function: the weighted sum, or None when a part of it is missing. A
    function of weight 0 only watches: that it failed is told in `error`, and changes neither total nor status."""
    pairs = list(zip(functions, outcomes, strict=True))
    counted = [(f.weight, outcome.score) for f, outcome in pairs if f.weight != 0]
    terms = [weight * score for weight, score in counted if score is not None]
    errors = [f"{f.label}: {outcome.error}" for f, outcome in pairs if outcome.error is not None]
    return Score(
        total=math.fsum(terms) if len(terms) == len(counted) else None,
        parts={f.label: outcome.score for f, outcome in pairs},
        details={
            f"{f.label}/{key}": value
            for f, outcome in pairs
            for key, value in outcome.details.items()
            if not isinstance(value, str)
        },
        status=max((outcome.status for f, outcome in pairs if f.weight != 0), key=STATUSES.index),
        error=errors[0] if errors else None,
        pred=next((str(outcome.details[PRED]) for _, outcome in pairs if PRED in outcome.details), None),
    )


def refuse_if_all_raise(function: RewardFunction | LocalReward, outcomes: Sequence[Outcome]) -> None:
    """UserError when every sample failed with the same error: its type and place, for texts may quote the sample."""
    kinds = {(o.status, o.where, (o.error or "").partition(":")[0]) for o in outcomes}
    first = outcomes[0]
    if len(kinds) > 1 or first.status != "error":
        return
    at = f" at {first.where}" if first.where else ""
    trace = f"\n{first.trace}" if first.trace else ""
    raise UserError(f"{function} failed on all {len(outcomes)} samples of the first batch{at}: {first.error}{trace}")
