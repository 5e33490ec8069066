"""What must be known of whole sequences before anything is counted: KL to the reference, for the reward; the distance
between trainer and sampler, for rejection. One pass of the policy (and one of the reference) over all drawn tokens:

    scoring micro-batches --policy, reference--> numbers a token --> [K, N] sums, a sequence --all ranks--> terms

A token lies on exactly one rank, so the sum over ranks is the sum over tokens. Runs only where an option asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastgrpo.algorithm.kl import kl_estimate, raw_log_ratio
from fastgrpo.algorithm.kl_control import KlController
from fastgrpo.algorithm.mismatch import divergences, kept_N
from fastgrpo.batch.packing import ShardedBatch
from fastgrpo.config import RolloutCorrectionConfig, RunConfig
from fastgrpo.groups import NO_TERMS, SequenceTerms
from fastgrpo.mesh import Mesh
from fastgrpo.policy.actor import Actor


def needs_terms(config: RunConfig) -> bool:
    return config.algorithm.use_kl_in_reward or config.algorithm.rollout_correction.rollout_rs != "none"


def sequence_terms(
    actor: Actor, batches: Sequence[ShardedBatch], count: int, config: RunConfig, controller: KlController, mesh: Mesh
) -> SequenceTerms:
    """A collective. `batches`: this rank's scoring micro-batches of the step's `count` rollouts. The controller moves
    on, after its coefficient was used."""
    if not needs_terms(config):
        return NO_TERMS
    algorithm = config.algorithm
    policy_R = actor.score(actor.policy, batches)
    numbers = []
    if algorithm.use_kl_in_reward:
        ref_R = actor.score(actor.reference, batches) if actor.reference is not None else policy_R
        numbers.append([kl_estimate(x, y, str(algorithm.kl_penalty)) for x, y in zip(policy_R, ref_R, strict=True)])
    if algorithm.rollout_correction.rollout_rs != "none":
        numbers += _distances(policy_R, batches)
    ones = [torch.ones_like(logprobs_R) for logprobs_R in policy_R]
    sums_KN = mesh.reduce(sum_by_sequence([ones, *numbers], batches, count)).cpu()
    tokens_N, rest = sums_KN[0], list(sums_KN[1:])
    kl_N = rest.pop(0) if algorithm.use_kl_in_reward else None
    kept = _kept(rest, tokens_N, algorithm.rollout_correction) if rest else None
    if kl_N is None:
        return SequenceTerms(None, controller.coef, kept)
    kl_per_token = (kl_N / tokens_N.clamp(min=1)).mean().item()
    terms = SequenceTerms(kl_N, controller.coef, kept, kl_per_token)
    controller.update(kl_per_token, count)
    return terms


def sum_by_sequence(numbers: Sequence[Sequence[Tensor]], batches: Sequence[ShardedBatch], count: int) -> Tensor:
    """[K, N] float64: K numbers of each row, a tensor a micro-batch, summed into the sequences that the rows are of."""
    device = numbers[0][0].device
    sums_KN = torch.zeros(len(numbers), count, dtype=torch.float64, device=device)
    for index, batch in enumerate(batches):
        rows_B = torch.tensor(batch.rows, dtype=torch.int64, device=device)
        row_R = rows_B[batch.seq_id_R.to(device)]
        for k, tensors in enumerate(numbers):
            sums_KN[k].index_add_(0, row_R, tensors[index].double())
    return sums_KN


def _distances(policy_R: Sequence[Tensor], batches: Sequence[ShardedBatch]) -> list[list[Tensor]]:
    found: dict[str, list[Tensor]] = {"k1": [], "k2": [], "k3": []}
    for logprobs_R, batch in zip(policy_R, batches, strict=True):
        assert batch.sampler_logprobs_R is not None  # a rule of the configuration
        d_R = raw_log_ratio(logprobs_R, batch.sampler_logprobs_R.to(logprobs_R.device))
        for name, value_R in divergences(d_R).items():
            found[name].append(value_R)
    return list(found.values())


def _kept(sums: Sequence[Tensor], tokens_N: Tensor, options: RolloutCorrectionConfig) -> Tensor:
    upper = options.rollout_rs_threshold
    assert upper is not None  # a rule of the configuration
    lower = 1 / upper if options.rollout_rs_threshold_lower is None else options.rollout_rs_threshold_lower
    return kept_N(dict(zip(("k1", "k2", "k3"), sums, strict=True)), tokens_N, str(options.rollout_rs), lower, upper)
