"""The sequences of an update that was skipped, as one file for a bug report.

    this rank's suspects --gather--> rank 0 --> RUN/faults/nonfinite_step_000012_update_000012.jsonl
        first line: the update; then a line a sequence: token ids, logprobs, advantage, rank

It holds what is needed to make the update again on another machine: ids, not text.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fastgrpo.mesh import Mesh
from fastgrpo.metrics import write_rows
from fastgrpo.policy.nonfinite import BadUpdate, Suspect, suspects
from fastgrpo.records import Rollout

log = logging.getLogger("fastgrpo")


def dump_bad_update(
    bad: BadUpdate,
    *,
    rollouts: Sequence[Rollout],
    advantages_N: Tensor,
    step: int,
    mesh: Mesh,
    folder: Path | None,
) -> None:
    """A collective. `step` from 1; `folder`: where to write, None: only say it. What cannot be written is said."""
    own = {
        "rank": mesh.rank,
        "losses": readable(float(one.loss_sum) for one in bad.passes),
        "rows": [sequence_row(suspect, rollouts, advantages_N, mesh.rank) for suspect in suspects(bad)],
    }
    everybodys = mesh.gather(own)
    if not mesh.is_main:
        return
    rows = [row for part in everybodys for row in part["rows"]]
    rows.sort(key=lambda row: ("logprob", "loss", "gradient").index(row["not_finite"]))
    where = "no run folder, so they are not written"
    if folder is not None:
        path = folder / f"nonfinite_step_{step:06d}_update_{bad.number:06d}.jsonl"
        update = {"step": step, "update": bad.number, "grad_norm": readable([bad.grad_norm])[0]}
        losses = {f"rank {part['rank']}": part["losses"] for part in everybodys}
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            write_rows(path, [update | {"losses_of_micro_batches": losses}, *rows])
            where = str(path)
        except OSError as error:
            where = f"not written ({error})"
    log.warning(
        "update %d of step %d SKIPPED on all ranks: %s not finite (gradient norm %g). Suspect sequences: %d, %s",
        bad.number, step, rows[0]["not_finite"] if rows else "gradient", bad.grad_norm, len(rows), where,
    )  # fmt: skip


def sequence_row(suspect: Suspect, rollouts: Sequence[Rollout], advantages_N: Tensor, rank: int) -> dict[str, Any]:
    rollout = rollouts[suspect.row]
    sampler = rollout.sampler_logprobs
    return {
        "not_finite": suspect.why,
        "rank": rank,
        "uid": rollout.uid,
        "sample": rollout.sample,
        "advantage": readable([float(advantages_N[suspect.row])])[0],
        "prompt_ids": list(rollout.prompt_ids),
        "response_ids": rollout.response_ids.tolist(),
        "response_mask": rollout.response_mask.astype(int).tolist(),
        "sampler_logprobs": None if sampler is None else readable(sampler.tolist()),
        "logprobs": readable(suspect.logprobs),
        "finish_reason": rollout.finish_reason,
        "weight_version": rollout.weight_version,
    }


def readable(numbers: Iterable[float]) -> list[float | str]:
    """JSON has no name for what is not finite: "nan", "inf", "-inf"."""
    return [number if math.isfinite(number) else str(number) for number in numbers]
