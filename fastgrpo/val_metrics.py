"""What a validation set says: mean@n, pass@k, maj@n, each with its interval of confidence. Pure functions.

    n samples of a prompt --> one number a prompt --> mean over the prompts, 95 % interval over the prompts

    mean@n   mean reward of the prompt's samples
    pass@k   chance that k of its n samples, drawn without replacement, hold one that passes: 1 - C(n - c, k) / C(n, k)
             for c that pass (Chen et al., arXiv 2107.03374, eq. 1), without bias in n
    maj@n    how right the answer is that most of its samples give; of equally frequent ones the mean

Prompts are what the data were drawn from, samples of one prompt are alike: so the intervals are over prompts. That of
pass@k and maj@n is Wilson's score interval for the mean over P prompts, which stays within 0 and 1 and has a width
also where every prompt passes; it is on the safe side, since numbers between 0 and 1 vary no more than a coin of
the same mean. That of mean@n is the normal one, mean +- 1.96 s / sqrt(P).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev

from fastgrpo.records import STATUSES, Sample

Z = 1.959963984540054  # 97.5 % quantile of the normal distribution
_TOLERANCE = 1e-9  # weighted sums of 0.7 and 0.3 may miss 1 by rounding


def by_set(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    """Set name -> its samples, in order."""
    sets: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        sets[set_of(sample.rollout.uid)].append(sample)
    return dict(sets)


def set_of(uid: str) -> str:
    """A uid is <set>/val/<row>; a set's name may have slashes of its own."""
    return uid.rsplit("/", 2)[0]


def set_metrics(samples: Sequence[Sample], pass_score: float) -> dict[str, float]:
    """mean@n, pass@k for k = 1, 2, 4, ..., n, and maj@n where a reward says what the answer is (`Score.pred`), each
    with its `/low` and `/high`. Samples that were not scored are left out; pass@k is over the prompts with k scored
    ones."""
    groups: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[sample.rollout.uid].append(sample)
    n = max(len(group) for group in groups.values())
    scored = [[s for s in group if s.score.total is not None] for group in groups.values()]
    means = [fmean(s.score.total or 0.0 for s in group) for group in scored if group]
    metrics = status_counts(samples)
    metrics |= _named(f"mean@{n}", means, normal)
    passed = [[passes(s, pass_score) for s in group] for group in scored]
    for k in powers_of_2(n):
        values = [pass_at_k(len(group), sum(group), k) for group in passed if len(group) >= k]
        metrics |= _named(f"pass@{k}", values, wilson)
    if n > 1 and any(s.score.pred is not None for group in scored for s in group):
        votes = [
            majority([s.score.pred for s in group], right) for group, right in zip(scored, passed, strict=True) if group
        ]
        metrics |= _named(f"maj@{n}", votes, wilson)
    return metrics


def status_counts(samples: Sequence[Sample]) -> dict[str, float]:
    """Samples of each status, as training counts them: `unscored` are those of which a function said None."""
    counts: dict[str, float] = {status: 0.0 for status in STATUSES}
    for sample in samples:
        counts[sample.score.status] += 1
    return counts


def passes(sample: Sample, pass_score: float) -> bool:
    return sample.score.total is not None and sample.score.total >= pass_score - _TOLERANCE


def powers_of_2(n: int) -> list[int]:
    """1, 2, 4, ... and n itself."""
    return [*(1 << i for i in range(n.bit_length()) if 1 << i < n), n]


def pass_at_k(n: int, c: int, k: int) -> float:
    """Of n samples c pass; exact up to one rounding."""
    whole = math.comb(n, k)
    return (whole - math.comb(n - c, k)) / whole


def majority(answers: Sequence[str | None], passed: Sequence[bool]) -> float:
    """Share of passing samples among those that give the most frequent answer. Samples without an answer have no vote;
    without any vote it is 0."""
    votes: dict[str, list[bool]] = defaultdict(list)
    for answer, right in zip(answers, passed, strict=True):
        if answer is not None:
            votes[answer].append(right)
    most = max(map(len, votes.values()), default=0)
    return fmean(fmean(rights) for rights in votes.values() if len(rights) == most) if votes else 0.0


def wilson(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval for the mean of `values`, each within 0 and 1."""
    count, mean = len(values), fmean(values)
    share = Z * Z / count
    half = Z * math.sqrt(mean * (1 - mean) / count + share / (4 * count))
    middle = mean + share / 2
    return max(0.0, (middle - half) / (1 + share)), min(1.0, (middle + half) / (1 + share))


def normal(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval for the mean of `values`; of one value it is not known, and the value itself."""
    mean = fmean(values)
    half = Z * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return mean - half, mean + half


def in_words(metrics: Mapping[str, float]) -> str:
    """mean@8 0.412 [0.380, 0.444], pass@1 ..."""
    shown = []
    for name, value in metrics.items():
        if f"{name}/low" in metrics:
            shown.append(f"{name} {value:.3f} [{metrics[f'{name}/low']:.3f}, {metrics[f'{name}/high']:.3f}]")
    return ", ".join(shown) or "nothing scored"


def _named(
    name: str, values: Sequence[float], interval: Callable[[Sequence[float]], tuple[float, float]]
) -> dict[str, float]:
    if not values:
        return {}
    low, high = interval(values)
    return {name: fmean(values), f"{name}/low": low, f"{name}/high": high}
