"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): a step is filled with groups whose rewards differ.

    round 0   prompts of the order -> groups --differ?--> kept
    round 1   the next prompts     -> groups --differ?--> kept     ... until the step is full
    the last  no further round is allowed: groups without signal, the earliest first, fill what is missing

Every rank sees all samples and so decides alike. How many rounds were drawn, and what became of the groups, is counted;
prompts come from the run's order, which goes on where the last round left it. Without `filter_groups` a step is its
round 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastgrpo.algorithm.advantage import group_spreads
from fastgrpo.config import RunConfig
from fastgrpo.errors import UserError
from fastgrpo.groups import score_tensor
from fastgrpo.records import Prompt, Sample


@dataclass(frozen=True, slots=True)
class Filled:
    prompts: list[Prompt]  # P
    samples: list[Sample]  # N = P * G, prompt by prompt
    metrics: dict[str, float]


def fill_step(draw: Callable[[int], tuple[list[Prompt], list[Sample]]], config: RunConfig) -> Filled:
    """`draw(attempt)`: the next prompts and their scored samples, prompt by prompt; a collective."""
    filtering, wanted, n = config.algorithm.filter_groups, config.data.train_batch_size, config.rollout.n
    if not filtering.enable:
        return Filled(*draw(0), {})
    drawn: list[tuple[Prompt, list[Sample]]] = []
    signal: list[bool] = []
    rounds = 0
    while sum(signal) < wanted and rounds < filtering.max_num_gen_batches:
        prompts, samples = draw(rounds)
        rounds += 1
        drawn += [(prompt, samples[i * n : (i + 1) * n]) for i, prompt in enumerate(prompts)]
        signal += has_signal(samples, n, filtering.metric).tolist()
    chosen = choose(signal, wanted)
    scores = score_tensor([sample for _, group in drawn for sample in group])
    metrics = {
        "filter_groups/gen_batches": float(rounds),
        "filter_groups/drawn": float(len(drawn)),
        "filter_groups/without_signal": float(len(drawn) - sum(signal)),
        "filter_groups/surplus": float(max(0, sum(signal) - wanted)),  # had a signal, and the step was full
        "filter_groups/filled_up": float(max(0, wanted - sum(signal))),  # had none, and no round was left
        "filter_groups/drawn_reward_mean": scores.nanmean().item(),  # of all, where reward/mean is of the kept
    }
    return Filled([drawn[i][0] for i in chosen], [sample for i in chosen for sample in drawn[i][1]], metrics)


def choose(signal: Sequence[bool], wanted: int) -> list[int]:
    """Indexes of the groups to train on, in the order in which they were drawn."""
    with_signal = [i for i, good in enumerate(signal) if good][:wanted]
    without = [i for i, good in enumerate(signal) if not good][: wanted - len(with_signal)]
    return sorted(with_signal + without)


def has_signal(samples: Sequence[Sample], n: int, metric: str | None) -> Tensor:
    """bool, a group: whether the scores of its samples differ, those of the function `metric` or the whole reward. What
    could not be scored is left out."""
    scores_N = score_tensor(samples) if metric is None else _scores_of(samples, metric)
    return group_spreads(scores_N, torch.arange(len(samples)) // n) > 0


def _scores_of(samples: Sequence[Sample], metric: str) -> Tensor:
    known = samples[0].score.parts
    if metric not in known:
        raise UserError(
            f"algorithm.filter_groups.metric={metric} is none of the reward's functions: {', '.join(known)}; set one "
            "of them, or null for the whole reward"
        )
    scores = [sample.score.parts[metric] for sample in samples]
    return torch.tensor([float("nan") if score is None else score for score in scores], dtype=torch.float64)
