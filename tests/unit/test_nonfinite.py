"""Which updates are refused, and which sequences are suspected of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cases import make_rollouts, one_batch
from torch import nn

from fastgrpo.config import OptimConfig
from fastgrpo.dump import dump_bad_update, readable
from fastgrpo.policy.nonfinite import MOST_SUSPECTS, BadUpdate, Pass, suspects, unhealthy
from fastgrpo.policy.optim import apply_update, build_adamw

CPU = torch.device("cpu")


def made(values: list[list[float]], loss: float = 1.0, rows: tuple[int, ...] | None = None) -> Pass:
    """A pass over sequences with these logprobs."""
    seq_id_R = torch.tensor([i for i, sequence in enumerate(values) for _ in sequence])
    batch: Any = SimpleNamespace(rows=rows or tuple(range(len(values))), seq_id_R=seq_id_R)
    return Pass(batch, torch.tensor([x for sequence in values for x in sequence]), torch.tensor(loss))


@pytest.mark.parametrize(
    ("logprob", "loss", "flag"),
    [(-1.0, 2.0, 0), (math.nan, 2.0, 1), (-math.inf, 2.0, 1), (-1.0, math.inf, 1), (-1.0, math.nan, 1)],
)
def test_what_is_unhealthy(logprob: float, loss: float, flag: int) -> None:
    assert float(unhealthy([made([[-3.0]]), made([[-1.0, logprob]], loss)], CPU)) == flag


def test_nothing_and_empty_micro_batches_are_healthy() -> None:
    assert float(unhealthy([], CPU)) == 0
    assert float(unhealthy([Pass(one_batch(make_rollouts(2)), torch.zeros(0), torch.zeros(()))], CPU)) == 0


def test_a_flag_alone_refuses_the_update() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = build_adamw([weight], OptimConfig(lr=0.1))
    for flag, moved in ((1.0, False), (0.0, True)):
        weight.grad = torch.tensor([3.0, 4.0])
        assert apply_update(optimizer, 0.1, 0.0, torch.tensor(flag)) == (5.0, moved)
        assert torch.equal(weight.detach(), torch.ones(2)) is not moved and bool(optimizer.state) is moved


def test_the_likeliest_come_first() -> None:
    passes = (
        made([[-1.0], [-9.0, -2.0], [-3.0]], rows=(5, 6, 7)),
        made([[-1.0], [-2.0, math.nan]], loss=math.nan, rows=(1, 2)),
    )
    found = suspects(BadUpdate(1, math.nan, passes))
    assert [(one.row, one.why) for one in found] == [
        (2, "logprob"), (1, "loss"), (6, "gradient"), (7, "gradient"), (5, "gradient"),
    ]  # fmt: skip
    assert found[2].logprobs == (-9.0, -2.0)


def test_a_dump_has_a_bound() -> None:
    many = made([[-float(i)] for i in range(3 * MOST_SUSPECTS)])
    found = suspects(BadUpdate(1, math.inf, (many,)))
    assert len(found) == MOST_SUSPECTS and found[0].row == 3 * MOST_SUSPECTS - 1


def test_the_file(tmp_path: Path) -> None:
    rollouts = make_rollouts(3)
    rollouts[1].sampler_logprobs[0] = np.nan
    lengths = [len(rollout.response_ids) for rollout in rollouts]
    one = made([[-1.0] * length for length in lengths], loss=math.inf)
    other = {"rank": 1, "losses": [0.5], "rows": []}
    mesh: Any = SimpleNamespace(rank=0, is_main=True, gather=lambda own: [own, other])
    advantages_N = torch.tensor([1.0, -math.inf, 0.5])
    bad = BadUpdate(7, math.nan, (one,))
    dump_bad_update(bad, rollouts=rollouts, advantages_N=advantages_N, step=4, mesh=mesh, folder=tmp_path / "faults")
    [path] = (tmp_path / "faults").iterdir()
    first, *rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert first == {
        "step": 4, "update": 7, "grad_norm": "nan", "losses_of_micro_batches": {"rank 0": ["inf"], "rank 1": [0.5]},
    }  # fmt: skip
    assert [row["advantage"] for row in rows] == [1.0, "-inf", 0.5]
    assert rows[1]["sampler_logprobs"][0] == "nan" and rows[1]["prompt_ids"] == list(rollouts[1].prompt_ids)
    assert rows[2]["response_ids"] == rollouts[2].response_ids.tolist() and rows[2]["logprobs"] == [-1.0] * lengths[2]


def test_without_a_folder_it_is_only_said(caplog: pytest.LogCaptureFixture) -> None:
    mesh: Any = SimpleNamespace(rank=0, is_main=True, gather=lambda own: [own])
    rollouts = make_rollouts(1)
    bad = BadUpdate(1, math.inf, (made([[-1.0]]),))
    dump_bad_update(bad, rollouts=rollouts, advantages_N=torch.ones(1), step=1, mesh=mesh, folder=None)
    assert "update 1 of step 1 SKIPPED on all ranks: gradient not finite (gradient norm inf)" in caplog.text
    assert readable([1.0, math.inf]) == [1.0, "inf"]
