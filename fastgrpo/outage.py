"""Steps of which no sample could be scored: a mistake at the first one, an outage at a later one.

    no sample of the run's first step    UserError: the reward function, its column or its time limit is wrong
    none of a later one                  said and counted, no update; the run goes on
    none of the last `most` in a row     Stopped, between two steps: the state is saved, for a start after the outage

Not here: a function that raises on a whole first batch (reward/total.py; in a run that goes on from a checkpoint it is
an outage like any other), and single samples, which are left out.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from fastgrpo.errors import UserError
from fastgrpo.records import Sample
from fastgrpo.stopping import Stopped

FAILED = 1  # exit status: not 75, which asks to be started again at once

log = logging.getLogger("fastgrpo")


class Outage:
    """Every rank has every sample, so all decide alike. A start counts from 0: whoever starts a run again has mended
    what failed."""

    def __init__(self, most: int, *, speaks: bool) -> None:
        """`most`: reward.max_unscored_steps. `speaks`: of this rank, whether it prints."""
        self._most, self._speaks = most, speaks
        self._in_a_row = 0
        self._why = ""

    def note(self, samples: Sequence[Sample], step: int) -> None:
        """The samples of step `step`, from 0. Raises UserError when none of the run's first step could be scored."""
        if any(sample.score.total is not None for sample in samples):
            self._in_a_row = 0
            return
        score = samples[0].score
        self._why = f"the first: {score.status}, {score.error or dict(score.parts)}"
        nothing = f"none of the step's {len(samples)} samples could be scored ({self._why})"
        if step == 0:
            raise UserError(
                f"{nothing}; look at the reward function, its reference column (data.reference_key) and "
                "reward.timeout_s."
            )
        self._in_a_row += 1
        if self._speaks:
            log.warning(
                "step %d makes NO UPDATE: %s; %d such steps in a row (reward.max_unscored_steps=%d saves and ends the "
                "run)",
                step + 1,
                nothing,
                self._in_a_row,
                self._most,
            )

    def check(self) -> None:
        """Between two steps. Raises Stopped, on all ranks alike."""
        if self._in_a_row >= self._most:
            raise Stopped(f"{self._in_a_row} steps in a row without a scored sample ({self._why})", FAILED)
