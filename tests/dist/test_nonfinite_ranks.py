"""Something that is not finite on one rank: no rank moves, the run goes on, and the sequences are on disk."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import make_rollouts, mini_batches_of, policy_of, share_of, training_state
from small_runs import document
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from fastgrpo.checkpoint.index import read_index
from fastgrpo.checkpoint.tensors import full_masters
from fastgrpo.config import OptimConfig, RunConfig
from fastgrpo.mesh import build_mesh
from fastgrpo.metrics import Sums
from fastgrpo.policy import head
from fastgrpo.policy.actor import Actor
from fastgrpo.policy.nonfinite import BadUpdate
from fastgrpo.policy.optim import apply_update, build_adamw


def everything_in(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Masters and Adam state of a checkpoint, whole."""
    keys = list(read_index(checkpoint / "state").state_dict_metadata)
    names = {key.removeprefix("model."): key for key in keys}
    return dict(full_masters(checkpoint / "state", {name: name for name in names if not name.startswith("optimizer.")}))


def shards_of(checkpoint: Path) -> list[bytes]:
    """Masters, moments and Adam's count, as each rank wrote them."""
    return [path.read_bytes() for path in sorted((checkpoint / "state").glob("*.distcp"))]


def test_nan_in_one_ranks_gradient_moves_nothing_and_the_run_goes_on(runs, tiny_model: Path, tmp_path: Path) -> None:
    options = {"trainer__max_steps": 3, "actor__optim__lr_warmup_steps": 0, "data__train_batch_size": 4}
    run = runs.start(2, document(tmp_path, tiny_model, **options), faults="poison_the_second_gradient")
    run.finish()
    [folder] = tmp_path.iterdir()
    steps = [folder / "checkpoints" / f"step_00000{step}" for step in (1, 2, 3)]
    first, second, third = map(everything_in, steps)
    assert len(first) > 20 and all(torch.equal(first[name], second[name]) for name in first)
    assert shards_of(steps[0]) == shards_of(steps[1]) != shards_of(steps[2])  # optimizer state included, all ranks
    assert any(not torch.equal(second[name], third[name]) for name in second)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["actor/skipped_updates"] for row in rows] == [0, 1, 0]
    assert [row["actor/grad_norm"] is None for row in rows] == [False, True, False]
    assert "update 2 of step 2 SKIPPED on all ranks: gradient not finite (gradient norm nan)" in run.output()

    [dump] = (folder / "faults").iterdir()
    assert dump.name == "nonfinite_step_000002_update_000002.jsonl" and folder.stat().st_mode & 0o77 == 0
    update, *sequences = [json.loads(line) for line in dump.read_text().splitlines()]
    assert (update["step"], update["update"], update["grad_norm"]) == (2, 2, "nan")
    assert {row["rank"] for row in sequences} == {0, 1}
    drawn = [json.loads(line) for line in (folder / "rollouts" / "step_000002.jsonl").read_text().splitlines()]
    by_name = {(row["uid"], row["sample"]): row for row in drawn}
    for row in sequences:
        assert row["not_finite"] == "gradient" and row["advantage"] != 0
        assert len(row["response_ids"]) == by_name[row["uid"], row["sample"]]["tokens"] == len(row["logprobs"])
        assert row["logprobs"] == pytest.approx(row["sampler_logprobs"], abs=1e-4)  # of the update and of the engine


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def infinite_loss(folder: Path) -> tuple:
    """On rank 1 a loss of infinity whose gradient is finite; then three of them in a row."""
    mesh = build_mesh("cpu", sp=1, tp=1)
    config = RunConfig()
    config.actor.use_kl_loss, config.actor.optim.lr, config.actor.max_skipped_updates = False, 1e-3, 3
    actor = Actor(policy_of(folder, mesh), None, config, 10)
    batches = mini_batches_of(make_rollouts(4), np.array([1.0, -1.0, 2.0, -2.0]), share_of(mesh, 1000), config)
    actor.update(batches, None, None, Sums())
    before = [local(tensor).clone() for tensor in training_state(actor.optimizer)]
    honest, bad = head.GrpoHead.__call__, []

    def spoiled(self, *args):
        out = honest(self, *args)
        return replace(out, loss_sum=out.loss_sum + math.inf) if mesh.rank == 1 else out

    head.GrpoHead.__call__ = spoiled
    sums = Sums()
    try:
        result = actor.update(batches, None, None, sums, bad.append)
        error = ""
        for _ in range(2):
            try:
                actor.update(batches, None, None, Sums(), bad.append)
            except RuntimeError as raised:
                error = str(raised)
    finally:
        head.GrpoHead.__call__ = honest
    same = all(map(torch.equal, before, map(local, training_state(actor.optimizer))))
    finite = all(math.isfinite(update.grad_norm) for update in bad)
    assert all(isinstance(update, BadUpdate) for update in bad)
    return result.skipped, same, finite, sums.values, [update.number for update in bad], error


def test_a_loss_that_is_not_finite_stops_the_update_on_all_ranks(ranks, tiny_model: Path) -> None:
    for skipped, same, finite, sums, numbers, error in ranks(2).run(infinite_loss, tiny_model):
        assert (skipped, same, finite, sums, numbers) == (1, True, True, {}, [2, 3, 4])
        assert error.startswith("3 updates in a row had something that is not finite")


class Shares(nn.Module):
    """Two weights, one on each of two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.w * x).sum()


def clipped_on_the_host() -> tuple:
    """Gradients 3 and 4, made by a backward, in shards that FSDP2 keeps on the host."""
    mesh = build_mesh("cpu", sp=1, tp=1)
    model = Shares()
    fully_shard(model, mesh=mesh.fsdp_mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    model.set_gradient_divide_factor(1.0)
    model.set_force_sum_reduction_for_comms(True)
    optimizer = build_adamw(model.parameters(), OptimConfig(lr=1.0, beta1=0.0, weight_decay=0.0))
    model(torch.tensor([3.0, 4.0]) / mesh.world).backward()
    norm, stepped = apply_update(optimizer, 1.0, 1.0)
    return norm, stepped, local(optimizer.state[model.w]["exp_avg"]).tolist()


def test_clipping_with_offloaded_shards(ranks) -> None:
    """The norm is 5 on both ranks, not 3 and 4; beta1 is 0, so the moment is the clipped gradient."""
    for rank, (norm, stepped, moment) in enumerate(ranks(2).run(clipped_on_the_host)):
        assert (norm, stepped) == (5.0, True)
        assert moment == pytest.approx([[0.6], [0.8]][rank], rel=1e-5)
