"""A step in numbers: rewards, lengths, and the record of the step. The same on every rank.

Shape suffixes: N sequences in the order of the requests, P prompts, G samples a prompt, N = P * G.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

import torch

from fastgrpo.clock import Clock
from fastgrpo.config import RunConfig
from fastgrpo.evaluate import part_means
from fastgrpo.groups import Groups
from fastgrpo.metrics import loss_metrics, ratio
from fastgrpo.policy.actor import UpdateResult
from fastgrpo.records import Rollout, Sample, StepRecord
from fastgrpo.val_metrics import status_counts

T = TypeVar("T")


def make_record(
    step: int,
    samples: Sequence[Sample],
    groups: Groups,
    sums: Mapping[str, float],
    update: UpdateResult,
    clock: Clock,
    config: RunConfig,
    more: Mapping[str, float] = MappingProxyType({}),
) -> StepRecord:
    timings = clock.finish()
    loss = loss_metrics(sums)
    metrics = (
        reward_metrics(samples, groups)
        | length_metrics([sample.rollout for sample in samples])
        | dict(groups.metrics)
        | dict(more)
        | loss
        | {
            "actor/grad_norm": ratio(sum(update.grad_norms), len(update.grad_norms)),
            "actor/lr": update.lr,
            "actor/updates": float(len(update.grad_norms)),
            "actor/skipped_updates": float(update.skipped),
            "perf/tokens_per_s": sum(sample.rollout.num_tokens for sample in samples) / timings["step"],
        }
        | {f"timing_s/{phase}": seconds for phase, seconds in timings.items()}
        | {"timing_s/gen_tail": tail_seconds([sample.rollout for sample in samples])}
        | clock.memory
        | clock.mfu
    )
    n = config.rollout.n
    return StepRecord(
        step=step,
        rewards_PG=_by_group([sample.score.total for sample in samples], n),
        group_means_P=[None if math.isnan(mean) else mean for mean in groups.means_P.tolist()],
        advantages_PG=_by_group(groups.advantages_N.tolist(), n),
        responses_PG=_by_group([sample.response for sample in samples], n),
        loss=loss["actor/loss"],
        kl=loss.get("actor/kl"),
        timings=timings,
        metrics=metrics,
    )


def reward_metrics(samples: Sequence[Sample], groups: Groups) -> dict[str, float]:
    """Over the scored samples; a group without signal is one whose advantages are all 0."""
    scored = groups.scores_N[~groups.scores_N.isnan()]
    num_groups = len(groups.means_P)
    signal_P = groups.advantages_N.view(num_groups, -1).ne(0).any(dim=1)
    metrics = {f"reward/{status}": count for status, count in status_counts(samples).items()}
    if scored.numel():
        metrics |= {
            "reward/mean": scored.mean().item(),
            "reward/std": scored.std(correction=0).item(),
            "reward/min": scored.min().item(),
            "reward/max": scored.max().item(),
        }
    metrics["reward/zero_signal_groups"] = 1 - signal_P.double().mean().item()
    return metrics | part_means(samples, "reward/part")


def length_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Of what the engine drew, before anything was filtered."""
    lengths = torch.tensor([len(rollout.response_ids) for rollout in rollouts], dtype=torch.float64)
    prompts = torch.tensor([len(rollout.prompt_ids) for rollout in rollouts], dtype=torch.float64)
    truncated = torch.tensor([rollout.truncated for rollout in rollouts])
    cut = torch.tensor([rollout.finish_reason == "time" for rollout in rollouts])
    stopped = lengths[~truncated]
    metrics = {
        "response_length/mean": lengths.mean().item(),
        "response_length/min": lengths.min().item(),
        "response_length/max": lengths.max().item(),
        "response_length/truncated": truncated.double().mean().item(),
        "response_length/cut_by_time": cut.double().mean().item(),
        "prompt_length/mean": prompts.mean().item(),
        "prompt_length/max": prompts.max().item(),
    }
    if stopped.numel():
        metrics["response_length/stopped_mean"] = stopped.mean().item()
    return metrics


def tail_seconds(rollouts: Sequence[Rollout]) -> float:
    """Seconds at the end of the generation with under 10 % of the sequences alive: what the longest cost alone. Engines
    start together, so their clocks are taken for one."""
    ends = sorted(rollout.seconds for rollout in rollouts)
    return ends[-1] - ends[9 * len(ends) // 10]  # when more than 9 in 10 had ended


def _by_group(values_N: Sequence[T], n: int) -> list[list[T]]:
    return [list(values_N[start : start + n]) for start in range(0, len(values_N), n)]
