"""The parity gate: engine and trainer must give the tokens just drawn the same logprobs, or the run stops.

Stale weights, a stale prefix cache, another temperature, a layer under a wrong name: all of them train on, quietly, on
wrong ratios. All of them show here. The numbers come from algorithm/mismatch.py, reduced over all ranks; the tokens are
the step's own, or where those come from a cut vocabulary, those of probes (rollout/probes.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from fastgrpo.algorithm.mismatch_stats import gap_metrics
from fastgrpo.config import RunConfig
from fastgrpo.errors import RunError
from fastgrpo.metrics import ratio

WARN_ABS = 0.03  # nats, mean |trainer - sampler|: bfloat16 engines stay well below
STOP_SIGNED = 0.03  # nats, |mean (trainer - sampler)|: noise has no sign
CAUSES = (
    "likely causes: the engine holds other weights than the trainer (a failed or partial sync, a stale prefix cache), "
    "another temperature, or a layer that the engine computes differently (quantised weights, another rope scaling)"
)
NOT_FINITE = (
    "the weights hold numbers that are not finite (look at model.path, or at the checkpoint that was resumed), or the "
    "forward overflows (actor.dtype, rollout.dtype)"
)


def check_gap(sums: Mapping[str, float], config: RunConfig) -> str | None:
    """A warning above 0.03 nats, else None. RunError above rollout.max_logprob_gap, or a signed mean beyond that or
    0.03, whichever is less: no option lets a shift pass."""
    tokens = sums.get("gap_tokens", 0.0)
    if not tokens:
        return None
    absolute, signed = ratio(sums["gap_abs"], tokens), ratio(sums["gap"], tokens)
    limit = config.rollout.max_logprob_gap
    first, second = comparable(absolute, limit), comparable(abs(signed), min(STOP_SIGNED, limit))
    sign = "-" if signed < 0 else "+"
    shown = f"mean |trainer - sampler| logprob {first}, mean {sign}{second}, largest {sums['gap_abs_max']:.4g} nats"
    if math.isnan(absolute):
        raise RunError(f"logprobs are not finite (NaN) among {tokens:.0f} tokens: {NOT_FINITE}")
    if exceeded := _exceeded(absolute, signed, limit):
        raise RunError(f"engine and trainer disagree over {tokens:.0f} tokens: {shown} ({exceeded}); {CAUSES}")
    return f"engine and trainer drift apart: {shown}; {CAUSES}" if absolute > WARN_ABS else None


def comparable(value: float, limit: float) -> str:
    """`value` with four significant digits, or as many more as show whether it is beyond `limit`."""
    return next(text for digits in range(4, 18) if (float(text := f"{value:.{digits}g}") > limit) == (value > limit))


def gate_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """What the gate looked at, gap/* alone: for probes, of which nothing else is of interest."""
    if not sums.get("gap_tokens"):
        return {}
    return {name: value for name, value in gap_metrics(sums).items() if name.startswith("gap/")}


def _exceeded(absolute: float, signed: float, limit: float) -> str:
    """The limit that the gap is beyond, in words; empty: none."""
    if not math.isfinite(absolute):
        return "some token is impossible for one of them"
    if absolute > limit:
        return f"the limit of the first is rollout.max_logprob_gap={limit}"
    if abs(signed) > min(STOP_SIGNED, limit):
        return (
            f"the limit of the second is {min(STOP_SIGNED, limit)} either way: noise has no sign, a shift has a cause"
        )
    return ""
