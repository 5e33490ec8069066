"""Sequences to micro-batches: which go together (`plan`), how a row is laid out (`pack`), who holds what of it
(`slice_for_rank`).

    lengths --plan--> [micro-batch][dp rank] -> sequences --pack--> MicroBatch (T tokens, one SP group)
                                                          --slice_for_rank--> ShardedBatch (U = T / sp, one rank)

All of it is plain computation on the CPU, the same on every rank. A sequence is never split over micro-batches; over
the ranks of an SP group it is, at any token.

Shape suffixes: N sequences of the step, B of one micro-batch, T tokens of its row, U of one rank, R of U with
a loss weight (or a logprob to score).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from fastgrpo.errors import UserError
from fastgrpo.records import MicroBatch, Rollout

Bin = list[int]  # sequence indexes that one rank handles in one micro-batch


def attention_cost(
    *, num_parameters: float, num_layers: int, num_attention_heads: int, head_dim: int
) -> Callable[[int], float]:
    """Cost of a sequence of s tokens: flops of a causal decoder's forward, 2 s num_parameters for the matrix products
    and 2 s^2 num_layers num_attention_heads head_dim for QK^T and PV (half of 4 s^2, by causality). The backward is
    nearly proportional; only ratios matter."""
    linear = 2.0 * num_parameters
    quadratic = 2.0 * num_layers * num_attention_heads * head_dim
    return lambda s: s * linear + s * s * quadratic


def plan(
    lengths: Sequence[int],
    *,
    dp: int,
    max_tokens: int,
    max_sequences: int | None,
    sp: int,
    cost: Callable[[int], float],
) -> list[list[tuple[int, ...]]]:
    """Micro-batches x dp ranks -> indexes of the sequences, every sequence once.

    lengths: tokens of each sequence as packed (prompt + response - 1). max_tokens: of one SP group in one micro-batch,
    padding to a multiple of sp included, never exceeded; max_sequences likewise, None: no bound. Every rank gets the
    same number of micro-batches, some of them empty if need be. A pure function of its arguments. Raises UserError for
    a sequence that fits nowhere.

    Ranks wait for each other in each micro-batch, so what counts is that the ranks of one micro-batch cost the same:
    first-fit decreasing gives few, full bins; bins of like cost become one micro-batch; in it the sequences are dealt
    again, the costliest first, each to the rank with the least. (Balancing all bins at once needs more of them: long
    sequences cost more than their tokens, so the others overflow. The differencing method knows no hard bound.)
    """
    capacity = max_tokens // sp * sp
    longest = max(lengths, default=0)
    if longest > capacity:
        raise UserError(
            f"a sequence of {longest} tokens does not fit into a micro-batch of {capacity} tokens "
            f"(actor.max_tokens_per_gpu x actor.ulysses_sequence_parallel_size = {max_tokens}, sp {sp}); "
            f"raise one of them or lower data.max_prompt_length or data.max_response_length"
        )
    costs_N = [cost(length) for length in lengths]
    limits = _Limits(capacity, len(lengths) if max_sequences is None else max_sequences)
    bins = _first_fit_decreasing(lengths, limits)
    bins += [[] for _ in range(-len(bins) % dp)]
    bins.sort(key=lambda bin_: -_total(bin_, costs_N))  # the fullest first: a lack of memory shows at once
    totals = [0.0] * dp
    micro_batches: list[list[tuple[int, ...]]] = []
    for start in range(0, len(bins), dp):
        row = _rebalance(bins[start : start + dp], lengths, costs_N, limits)
        # the costliest bin to the rank that has had the least so far
        by_rank = dict(zip(sorted(range(dp), key=totals.__getitem__), row, strict=True))
        totals = [total + _total(by_rank[rank], costs_N) for rank, total in enumerate(totals)]
        micro_batches.append([tuple(sorted(by_rank[rank])) for rank in range(dp)])
    return micro_batches


def _total(bin_: Bin, costs_N: list[float]) -> float:
    """Exact, because numpy's order of addition depends on the processor, and all hosts must come to the same plan."""
    return math.fsum(costs_N[index] for index in bin_)


@dataclass(frozen=True, slots=True)
class _Limits:
    tokens: int
    sequences: int


def _first_fit_decreasing(lengths_N: Sequence[int], limits: _Limits) -> list[Bin]:
    """The longest first, each into the first bin that takes it."""
    free = np.full(len(lengths_N), limits.tokens)  # tokens a bin can still take; -1: it has all its sequences
    bins: list[Bin] = []
    for index in sorted(range(len(lengths_N)), key=lambda index: -lengths_N[index]):
        fits = free[: len(bins) + 1] >= lengths_N[index]  # the last of them is new and empty
        chosen = int(fits.argmax())
        if chosen == len(bins):
            bins.append([])
        bins[chosen].append(index)
        free[chosen] = -1 if len(bins[chosen]) == limits.sequences else free[chosen] - lengths_N[index]
    return bins


def _rebalance(row: list[Bin], lengths_N: Sequence[int], costs_N: list[float], limits: _Limits) -> list[Bin]:
    """The sequences of one micro-batch spread evenly over its ranks, costliest rank first; `row` itself, which comes
    in that order, if spreading would break a limit or be no better."""
    spread: list[Bin] = [[] for _ in row]
    load, free = [0.0] * len(row), [limits.tokens] * len(row)
    for index in sorted((index for bin_ in row for index in bin_), key=lambda index: (-costs_N[index], index)):
        fits = [k for k in range(len(row)) if free[k] >= lengths_N[index] and len(spread[k]) < limits.sequences]
        if not fits:
            return row
        chosen = min(fits, key=load.__getitem__)
        spread[chosen].append(index)
        load[chosen] += costs_N[index]
        free[chosen] -= lengths_N[index]
    if max(load) >= _total(row[0], costs_N):
        return row
    return [spread[k] for k in sorted(range(len(row)), key=lambda k: -load[k])]


def pack(
    rollouts: Sequence[Rollout],
    rows: Sequence[int],
    *,
    sp: int,
    advantages_N: np.ndarray | Tensor,
    weights_N: np.ndarray | Tensor,
    pad_id: int,
) -> MicroBatch:
    """One micro-batch on the CPU, laid out as MicroBatch's example shows.

    rollouts: all N of the step. rows: the sequences to pack, in this order. advantages_N, weights_N: a number a
    sequence (weights_N from batch/denominators.py); weights land on the tokens that the policy drew, by response_mask
    and never by token id: an end token that equals `pad_id` is trained. T is padded to a multiple of sp and is at least
    sp: an empty micro-batch is all padding, since every rank must run its forward and backward.
    """
    chosen = [rollouts[row] for row in rows]
    lengths_B = np.asarray([rollout.num_tokens - 1 for rollout in chosen], dtype=np.int64)
    starts_B = np.cumsum(lengths_B) - lengths_B
    used = int(lengths_B.sum())
    total = max(math.ceil(used / sp), 1) * sp
    input_ids_T, targets_T = np.full(total, pad_id, np.int64), np.full(total, pad_id, np.int64)
    loss_mask_T, sampler_logprobs_T = np.zeros(total, np.bool_), np.zeros(total, np.float32)
    # Asked of the whole step, not of these rows: all ranks must report the same metrics in each micro-batch.
    has_sampler_logprobs = all(rollout.sampler_logprobs is not None for rollout in rollouts)
    for rollout, start, length in zip(chosen, starts_B.tolist(), lengths_B.tolist(), strict=True):
        ids = np.concatenate([np.asarray(rollout.prompt_ids, np.int64), rollout.response_ids])
        drawn = slice(start + len(rollout.prompt_ids) - 1, start + length)  # inputs whose target is in the response
        input_ids_T[start : start + length] = ids[:-1]
        targets_T[start : start + length] = ids[1:]
        loss_mask_T[drawn] = rollout.response_mask
        if has_sampler_logprobs:
            sampler_logprobs_T[drawn] = rollout.sampler_logprobs
    segments = np.append(lengths_B, total - used)  # the padding is a sequence of its own
    cu_seqlens = np.append(0, np.cumsum(segments if total > used else lengths_B))
    seq_id_T = np.repeat(np.arange(len(segments)), segments)
    return MicroBatch(
        input_ids_T=torch.from_numpy(input_ids_T),
        targets_T=torch.from_numpy(targets_T),
        positions_T=torch.from_numpy(np.arange(total) - np.append(starts_B, used)[seq_id_T]),
        seq_id_T=torch.from_numpy(seq_id_T),
        loss_mask_T=torch.from_numpy(loss_mask_T),
        weights_T=torch.from_numpy(_spread(weights_N, rows, seq_id_T) * loss_mask_T),
        advantages_T=torch.from_numpy(_spread(advantages_N, rows, seq_id_T)),
        sampler_logprobs_T=torch.from_numpy(sampler_logprobs_T) if has_sampler_logprobs else None,
        cu_seqlens=torch.from_numpy(cu_seqlens.astype(np.int32)),
        max_seqlen=int(segments.max()),
        rows=tuple(rows),
    )


def _spread(values_N: np.ndarray | Tensor, rows: Sequence[int], seq_id_T: np.ndarray) -> np.ndarray:
    """A number a sequence -> a float32 a token, 0 on padding."""
    values_B = np.asarray(values_N)[list(rows)] if rows else np.zeros(0)
    return np.append(values_B, 0).astype(np.float32)[seq_id_T]


@dataclass(frozen=True, slots=True)
class ShardedBatch:
    """What one rank of an SP group holds of a MicroBatch: U consecutive tokens, and of those the R that go through the
    language-model head, already gathered. Fields of the same name mean the same there."""

    input_ids_U: Tensor  # int64
    positions_U: Tensor  # int64
    rows_R: Tensor  # int64, ascending indexes into U
    targets_R: Tensor  # int64
    seq_id_R: Tensor  # int64
    weights_R: Tensor  # float32
    advantages_R: Tensor  # float32
    sampler_logprobs_R: Tensor | None  # float32
    cu_seqlens: Tensor  # int32, of the whole row: attention sees all T tokens
    max_seqlen: int
    rows: tuple[int, ...]  # [B] index of each sequence in the step's N rollouts

    @property
    def num_sequences(self) -> int:
        return len(self.rows)

    def to(self, device: torch.device | str) -> ShardedBatch:
        """The same on another device."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved = {name: x.to(device, non_blocking=True) for name, x in values.items() if isinstance(x, Tensor)}
        return replace(self, **moved)


def slice_for_rank(micro: MicroBatch, sp_rank: int, sp: int, *, scoring: bool = False) -> ShardedBatch:
    """Rank sp_rank's share, tokens sp_rank * U up to (sp_rank + 1) * U of the row.

    The R tokens are those with a loss weight, or with `scoring` all that the policy drew. (Old logprobs belong on the
    rows of the update.) They are found and gathered here, on the CPU: on the GPU, nonzero would wait for the device.
    """
    share = micro.num_tokens // sp
    part = slice(sp_rank * share, (sp_rank + 1) * share)
    wanted_U = micro.loss_mask_T[part] if scoring else micro.weights_T[part] != 0
    rows_R = wanted_U.nonzero().squeeze(1)
    sampler_logprobs_T = micro.sampler_logprobs_T
    return ShardedBatch(
        input_ids_U=micro.input_ids_T[part],
        positions_U=micro.positions_T[part],
        rows_R=rows_R,
        targets_R=micro.targets_T[part][rows_R],
        seq_id_R=micro.seq_id_T[part][rows_R],
        weights_R=micro.weights_T[part][rows_R],
        advantages_R=micro.advantages_T[part][rows_R],
        sampler_logprobs_R=None if sampler_logprobs_T is None else sampler_logprobs_T[part][rows_R],
        cu_seqlens=micro.cu_seqlens,
        max_seqlen=micro.max_seqlen,
        rows=micro.rows,
    )
