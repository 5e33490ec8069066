"""The held-out score: draw answers to the validation prompts with their own sampling, score them.

The score is the mean reward over all samples that were scored; what each set says by itself is val_metrics.py's. No
update is made and the training order does not move.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from fastgrpo.config import RunConfig
from fastgrpo.mesh import Mesh
from fastgrpo.records import Prompt, Rollout, Sample, Sampling
from fastgrpo.reward import Rewards
from fastgrpo.rollout.draw import draw_own, make_requests, score_own, share_samples
from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.val_metrics import by_set, set_metrics, status_counts


@dataclass(frozen=True, slots=True)
class Validation:
    score: float | None  # mean reward; None when nothing could be scored
    samples: int  # that were scored
    metrics: dict[str, float]
    sets: Mapping[str, Mapping[str, float]]  # of each set by its name, see val_metrics.set_metrics


def draw_answers(
    engine: RolloutEngine, prompts: Sequence[Prompt], config: RunConfig, mesh: Mesh, *, step: int
) -> list[Rollout]:
    """This rank's engine's share of the answers. Inside `engine.awake`; every rank must call it."""
    val = config.rollout.val_kwargs
    sampling = Sampling(val.temperature, val.top_p, val.top_k, 0.0, 1.0)
    requests = make_requests(
        prompts, val.n, run_seed=config.trainer.seed + 1, step=step, max_tokens=config.data.max_response_length
    )
    return draw_own(engine, requests, val.n, sampling, mesh)


def validate(
    own: Sequence[Rollout],
    rewards: Rewards,
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    mesh: Mesh,
    *,
    step: int,
    pass_score: float,
) -> tuple[Validation, list[Sample]]:
    """Score what `draw_answers` drew, while the engine sleeps (a reward may need the GPU); a collective. The
    samples are those of all ranks. `pass_score`: the reward from which on one passes."""
    samples = share_samples(score_own(rewards, own, prompts, tokenizer, mesh, step=step), mesh)
    return summarise(samples, pass_score), samples


def summarise(samples: Sequence[Sample], pass_score: float) -> Validation:
    totals = [sample.score.total for sample in samples if sample.score.total is not None]
    mean = sum(totals) / len(totals) if totals else None
    rollouts = [sample.rollout for sample in samples]
    metrics = {
        **{f"val/{status}": count for status, count in status_counts(samples).items()},
        "val/response_length": sum(len(rollout.response_ids) for rollout in rollouts) / max(1, len(rollouts)),
        "val/truncated": sum(rollout.truncated for rollout in rollouts) / max(1, len(rollouts)),
    }
    if mean is not None:
        metrics["val/reward"] = mean
    sets = {name: set_metrics(of_set, pass_score) for name, of_set in by_set(samples).items()}
    metrics |= {f"val/{name}/{key}": value for name, values in sets.items() for key, value in values.items()}
    return Validation(mean, len(totals), metrics | part_means(samples, "val/reward"), sets)


def part_means(samples: Sequence[Sample], prefix: str) -> dict[str, float]:
    """Mean of each function's own score and of each detail, over the samples that have one."""
    values: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in (*sample.score.parts.items(), *sample.score.details.items()):
            if value is not None:
                values.setdefault(f"{prefix}/{name}", []).append(float(value))
    return {name: sum(found) / len(found) for name, found in values.items()}


def answer_rows(samples: Sequence[Sample], prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
    """One jsonl row a sample, for reading."""
    by_uid = {prompt.uid: prompt for prompt in prompts}
    return [
        {
            "uid": sample.rollout.uid,
            "sample": sample.rollout.sample,
            "prompt": by_uid[sample.rollout.uid].text,
            "response": sample.response,
            "reference": by_uid[sample.rollout.uid].reference,
            "reward": sample.score.total,
            "parts": dict(sample.score.parts),
            "pred": sample.score.pred,
            "status": sample.score.status,
            "error": sample.score.error,
            "tokens": len(sample.rollout.response_ids),
            "finish_reason": sample.rollout.finish_reason,
            "weight_version": sample.rollout.weight_version,
        }
        for sample in samples
    ]
