"""From the scores of a step to its advantages, and which samples count. The same on every rank.

    score --KL penalty--> reward --estimator--> advantage
    sample --unscored? truncated? rejected?--> counted or not

A sample that is not counted is in no denominator and in no forward; its score, if it has one, still compares the others
of its group. Lengths and scores in the metrics are those drawn, whatever is left out here.

Shape suffixes: N sequences in the order of the requests, P prompts, G samples a prompt, N = P * G.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastgrpo.algorithm.advantage import ADVANTAGES, Graded, group_means
from fastgrpo.config import RunConfig
from fastgrpo.records import Sample


@dataclass(frozen=True, slots=True)
class SequenceTerms:
    """What of a step's sequences only the models know, before anything is counted; see policy/sequences.py."""

    kl_N: Tensor | None  # float64, KL(policy || reference) summed over each sequence; None: not in the reward
    kl_coef: float
    kept_N: Tensor | None  # bool, what rejection keeps; None: no rejection
    kl_per_token: float = 0.0  # mean over the sequences of their mean KL a token; what an adaptive coefficient follows


NO_TERMS = SequenceTerms(None, 0.0, None)


@dataclass(frozen=True, slots=True)
class Groups:
    scores_N: Tensor  # float64, NaN = unscored: what the reward functions gave
    rewards_N: Tensor  # float64, NaN = unscored: less the KL penalty, what the advantages were made of
    advantages_N: Tensor  # float64
    means_P: Tensor  # float64, of the scores, NaN = no member scored
    counted_N: Tensor  # bool
    metrics: Mapping[str, float]  # of the penalty and of what was left out


def make_groups(samples: Sequence[Sample], config: RunConfig, terms: SequenceTerms = NO_TERMS) -> Groups:
    """A step of which no sample could be scored has advantages of 0 and nothing that counts (see outage.py)."""
    scores_N = score_tensor(samples)
    tokens_N = torch.tensor([int(sample.rollout.response_mask.sum()) for sample in samples])
    group_N = torch.arange(len(samples)) // config.rollout.n
    penalty_N = None if terms.kl_N is None else terms.kl_coef * terms.kl_N
    rewards_N = scores_N if penalty_N is None else scores_N - penalty_N
    parts_NF, weights_F = _parts(samples, config, penalty_N)
    graded = Graded(rewards_N, group_N, tokens_N, parts_NF, weights_F)
    algorithm = config.algorithm
    advantages_N = ADVANTAGES[algorithm.adv_estimator](graded, by_std=algorithm.norm_adv_by_std_in_grpo)
    counted_N, filters = _counted(samples, scores_N, tokens_N, config, terms)
    metrics = _kl_metrics(penalty_N, terms) | filters
    return Groups(scores_N, rewards_N, advantages_N, group_means(scores_N, group_N), counted_N, metrics)


def _kl_metrics(penalty_N: Tensor | None, terms: SequenceTerms) -> dict[str, float]:
    """Of the KL in the reward: what it took off a sequence, the coefficient that it had, and nats a token."""
    if penalty_N is None:
        return {}
    return {
        "reward/kl_penalty": penalty_N.mean().item(),
        "reward/kl_coef": terms.kl_coef,
        "reward/kl": terms.kl_per_token,
    }


def score_tensor(samples: Sequence[Sample]) -> Tensor:
    totals_N = [sample.score.total for sample in samples]
    return torch.tensor([math.nan if total is None else total for total in totals_N], dtype=torch.float64)


def _parts(
    samples: Sequence[Sample], config: RunConfig, penalty_N: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Scores of the single functions and their weights, for the estimator that compares each on its own; the KL
    penalty is one more function, of weight -1. (A reward given in Python has weight 1.)"""
    if config.algorithm.adv_estimator != "gdpo":
        return None, None
    functions = config.reward.functions
    weights = {label: functions[label].weight if label in functions else 1.0 for label in samples[0].score.parts}
    used = {label: weight for label, weight in weights.items() if weight}
    columns = [
        torch.tensor([_number(sample.score.parts[label]) for sample in samples], dtype=torch.float64) for label in used
    ]
    all_weights = list(used.values())
    if penalty_N is not None:
        columns, all_weights = [*columns, penalty_N], [*all_weights, -1.0]
    return torch.stack(columns, dim=1), torch.tensor(all_weights, dtype=torch.float64)


def _number(score: float | None) -> float:
    return math.nan if score is None else score


def _counted(
    samples: Sequence[Sample], scores_N: Tensor, tokens_N: Tensor, config: RunConfig, terms: SequenceTerms
) -> tuple[Tensor, dict[str, float]]:
    counted_N = ~scores_N.isnan()
    metrics: dict[str, float] = {}
    if config.algorithm.overlong_filtering:
        truncated_N = torch.tensor([sample.rollout.truncated for sample in samples])
        metrics["response_length/filtered"] = (truncated_N & counted_N).double().mean().item()
        counted_N = counted_N & ~truncated_N
    if terms.kept_N is not None:
        rejected_N = counted_N & ~terms.kept_N
        tokens = tokens_N[counted_N].sum().clamp(min=1)
        share = rejected_N.sum() / counted_N.sum().clamp(min=1)
        metrics["rollout_corr/rollout_rs_seq_masked_fraction"] = share.item()
        metrics["rollout_corr/rollout_rs_masked_fraction"] = (tokens_N[rejected_N].sum() / tokens).item()
        counted_N = counted_N & terms.kept_N
    return counted_N, metrics
