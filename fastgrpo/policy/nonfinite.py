"""Updates that must not be made: a loss, a logprob or a gradient that is no finite number, on any rank.

    forward of each micro-batch --> Pass --unhealthy--> one flag, the largest of all ranks'  \\
    gradient norm over all shards (optim.py) ----------------------------------------------> step, or skip on all ranks
                                   Pass --suspects--> which sequences, for the dump (fastgrpo/dump.py)

A finite gradient is not enough: a loss of infinity can have one (a clipped ratio has none at all), and what is logged
and compared would be infinite. Which sequence it was is known where a logprob is not finite; a loss or a gradient
belongs to all the sequences of the micro-batch, or of the update.

Shape suffixes: R rows of a micro-batch on this rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fastgrpo.batch.packing import ShardedBatch

MOST_SUSPECTS = 64  # a rank; the likeliest come first


@dataclass(frozen=True, slots=True)
class Pass:
    """What the forward of one micro-batch gave on this rank; both without gradient, on the device."""

    batch: ShardedBatch  # on the CPU
    logprobs_R: Tensor
    loss_sum: Tensor  # 0-dim


@dataclass(frozen=True, slots=True)
class BadUpdate:
    """An update that was skipped."""

    number: int  # of the update, from 1
    grad_norm: float
    passes: tuple[Pass, ...]


@dataclass(frozen=True, slots=True)
class Suspect:
    """One sequence of such an update."""

    row: int  # index into the step's N rollouts
    why: str  # what was not finite: logprob, loss (of its micro-batch), gradient (of the update)
    logprobs: tuple[float, ...]  # of its tokens that carry a loss on this rank, in order


def unhealthy(passes: Sequence[Pass], device: torch.device) -> Tensor:
    """1.0 when a loss or a logprob of any rank is not finite, else 0.0; 0-dim float32 on `device`. A collective."""
    flags = [~torch.isfinite(p.logprobs_R).all() | ~torch.isfinite(p.loss_sum) for p in passes]
    flag = torch.stack(flags).any().float() if flags else torch.zeros((), device=device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(flag, dist.ReduceOp.MAX)
    return flag


def suspects(bad: BadUpdate) -> list[Suspect]:
    """The likeliest first: non-finite logprobs, then sequences under a non-finite loss, then the others by their
    smallest logprob; at most MOST_SUSPECTS."""
    found: list[tuple[float, Suspect]] = []
    for one in bad.passes:
        logprobs_R, seq_id_R = one.logprobs_R.float().cpu(), one.batch.seq_id_R
        infinite_loss = not math.isfinite(float(one.loss_sum))
        for sequence, row in enumerate(one.batch.rows):
            logprobs = logprobs_R[seq_id_R == sequence]
            infinite = bool((~torch.isfinite(logprobs)).any())
            why = "logprob" if infinite else "loss" if infinite_loss else "gradient"
            smallest = float(logprobs.min()) if len(logprobs) and not infinite else 0.0
            rank = {"logprob": -2e30, "loss": -1e30, "gradient": 0.0}[why] + max(smallest, -1e29)
            found.append((rank, Suspect(row, why, tuple(logprobs.tolist()))))
    found.sort(key=lambda item: item[0])
    return [suspect for _, suspect in found[:MOST_SUSPECTS]]
