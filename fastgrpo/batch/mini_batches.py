"""From a step's rollouts to what one rank trains on: mini-batches of packed, weighted micro-batches.

    N rollouts, in the order of their prompts
      -> mini-batches: ppo_mini_batch_size prompts each, an optimizer update each
           -> weights from the counts of the whole mini-batch (denominators.py)
           -> rows that can carry a gradient -> micro-batches, balanced over dp (packing.plan)
                -> packed, sliced for this rank (packing.pack, slice_for_rank)

Every rank computes the same plan from the same rollouts, so no counts are exchanged. A sequence with advantage 0 has no
gradient when neither KL nor entropy acts on it: it stays in the counts and out of the forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fastgrpo.batch.denominators import token_weights_N
from fastgrpo.batch.packing import ShardedBatch, pack, plan, slice_for_rank
from fastgrpo.records import Rollout


@dataclass(frozen=True, slots=True)
class Share:
    """How rows are cut: the limits of one SP group's micro-batch, and which part is this rank's."""

    dp: int
    dp_rank: int
    sp: int
    sp_rank: int
    max_tokens: int  # of one SP group's micro-batch
    max_sequences: int | None
    cost: Callable[[int], float]  # of a sequence of s tokens, to balance by
    pad_id: int


@dataclass(frozen=True, slots=True)
class MiniBatch:
    micro: tuple[ShardedBatch, ...]  # this rank's; as many on every rank
    loss_tokens: int  # counted over all ranks; 0: nothing to learn from, the update is skipped
    lengths: tuple[int, ...] = ()  # tokens as packed of each sequence that runs, on whatever rank
    head_rows: int = 0  # tokens of those that carry a loss


def build_mini_batches(
    rollouts: Sequence[Rollout],
    advantages_N: np.ndarray,
    counted_N: np.ndarray,  # bool: false for what was filtered out before the counts (unscored)
    share: Share,
    *,
    sequences: int,  # of one mini-batch
    keep_zero_advantage: bool,  # whether KL or entropy acts on them
    loss_agg_mode: str,
    max_response_length: int,
    loss_scale_factor: float | None,
) -> list[MiniBatch]:
    """The step's mini-batches, in order; each rank's own share of each."""
    loss_tokens_N = torch.tensor([int(rollout.response_mask.sum()) for rollout in rollouts])
    mini_batches = []
    for start in range(0, len(rollouts), sequences):
        in_batch_N = np.zeros(len(rollouts), dtype=np.bool_)
        in_batch_N[start : start + sequences] = counted_N[start : start + sequences]
        weights_N = token_weights_N(
            loss_tokens_N,
            torch.from_numpy(in_batch_N),
            loss_agg_mode,
            max_response_length=max_response_length,
            loss_scale_factor=loss_scale_factor,
        ).numpy()
        trained_N = in_batch_N & (loss_tokens_N.numpy() > 0)  # one that was cut before its first token has none
        if not keep_zero_advantage:
            trained_N &= advantages_N != 0
        rows = np.flatnonzero(trained_N).tolist()
        micro = _pack_rows(rollouts, rows, advantages_N, weights_N, share, scoring=False)
        mini_batches.append(
            MiniBatch(
                micro,
                loss_tokens=int(loss_tokens_N.numpy()[in_batch_N].sum()),
                lengths=tuple(rollouts[row].num_tokens - 1 for row in rows),
                head_rows=int(loss_tokens_N.numpy()[rows].sum()),
            )
        )
    return mini_batches


def build_scoring_batches(rollouts: Sequence[Rollout], share: Share) -> tuple[ShardedBatch, ...]:
    """All response tokens of all rollouts, weighted or not: for comparing sampler and trainer."""
    zeros = np.zeros(len(rollouts))
    rows = [row for row, rollout in enumerate(rollouts) if len(rollout.response_ids)]
    return _pack_rows(rollouts, rows, zeros, zeros, share, scoring=True)


def _pack_rows(
    rollouts: Sequence[Rollout],
    rows: list[int],
    advantages_N: np.ndarray,
    weights_N: np.ndarray,
    share: Share,
    *,
    scoring: bool,
) -> tuple[ShardedBatch, ...]:
    micro_batches = plan(
        [rollouts[row].num_tokens - 1 for row in rows],
        dp=share.dp,
        max_tokens=share.max_tokens,
        max_sequences=share.max_sequences,
        sp=share.sp,
        cost=share.cost,
    )
    # At least one, if only of padding: an update whose rows all have advantage 0 still moves by momentum.
    own = [micro_batch[share.dp_rank] for micro_batch in micro_batches] or [()]
    return tuple(
        slice_for_rank(
            pack(
                rollouts,
                [rows[index] for index in indexes],
                sp=share.sp,
                advantages_N=advantages_N,
                weights_N=weights_N,
                pad_id=share.pad_id,
            ),
            share.sp_rank,
            share.sp,
            scoring=scoring,
        )
        for indexes in own
    )
