"""Ranks: which groups they form, what they exchange, and the update that all of them make or none."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases import make_rollouts, mini_batches_of, policy_of, share_of, training_state
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastgrpo.checkpoint import save_model
from fastgrpo.config import OptimConfig, RunConfig
from fastgrpo.errors import UserError
from fastgrpo.mesh import build_mesh, consecutive_groups, engine_slice, require_backends
from fastgrpo.metrics import Sums
from fastgrpo.policy.actor import Actor
from fastgrpo.policy.optim import apply_update, build_adamw


@pytest.mark.parametrize(
    ("num_groups", "group_size", "engines", "slices"),
    [
        (6, 2, 3, [range(0, 4), range(4, 8), range(8, 12)]),
        (7, 2, 3, [range(0, 6), range(6, 10), range(10, 14)]),
        (5, 1, 2, [range(0, 3), range(3, 5)]),
        (2, 3, 4, [range(0, 3), range(3, 6), range(6, 6), range(6, 6)]),
        (0, 3, 2, [range(0, 0), range(0, 0)]),
    ],
)
def test_whole_groups_as_even_as_they_go(num_groups, group_size, engines, slices):
    assert [engine_slice(num_groups, group_size, engine, engines) for engine in range(engines)] == slices


def test_engines_draw_every_request_once():
    for num_groups in range(12):
        for engines in range(1, 9):
            drawn = [i for engine in range(engines) for i in engine_slice(num_groups, 5, engine, engines)]
            assert drawn == list(range(5 * num_groups))


def test_groups_are_consecutive():
    assert consecutive_groups(8, 2) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert consecutive_groups(4, 4) == [[0, 1, 2, 3]] and consecutive_groups(2, 1) == [[0], [1]]


def refusal_of_other_sizes():
    try:
        build_mesh("cpu", sp=1, tp=1 + dist.get_rank())
    except UserError as error:
        return str(error)
    return None


def test_ranks_that_would_be_cut_differently_say_so(ranks):
    """Each would wait for groups that the other never makes."""
    for said in ranks(2).run(refusal_of_other_sizes):
        assert "rank 0 was laid out as {'sp': 1, 'tp': 1, 'replicas': 1}, rank 1 as {'sp': 1, 'tp': 2" in said


def coordinates(sp, tp):
    mesh = build_mesh("cpu", sp=sp, tp=tp)
    groups = [dist.get_process_group_ranks(group) for group in (mesh.sp_group, mesh.tp_group)]
    numbers = (mesh.dp_rank, mesh.sp_rank, mesh.engine, mesh.tp_rank, mesh.dp, mesh.engines, mesh.is_main)
    return numbers, groups, mesh.gather((mesh.rank, "x" * mesh.rank)), mesh.broadcast({"from": mesh.rank})


def test_coordinates_of_four_ranks(ranks):
    results = ranks(4).run(coordinates, 2, 4)
    assert [numbers for numbers, *_ in results] == [
        (0, 0, 0, 0, 2, 1, True),
        (0, 1, 0, 1, 2, 1, False),
        (1, 0, 0, 2, 2, 1, False),
        (1, 1, 0, 3, 2, 1, False),
    ]
    assert [groups for _, groups, *_ in results] == [[pair, [0, 1, 2, 3]] for pair in ([0, 1], [0, 1], [2, 3], [2, 3])]
    for *_, gathered, sent in results:
        assert gathered == [(rank, "x" * rank) for rank in range(4)] and sent == {"from": 0}


def refusals():
    found = []
    for options in ({"sp": 3, "tp": 1}, {"sp": 1, "tp": 4}, {"sp": 1, "tp": 1, "replicas": 3}):
        try:
            build_mesh("cpu", **options)
        except ValueError as error:
            found.append(str(error))
    return found


def test_a_world_that_does_not_divide_is_refused(ranks):
    assert ranks(2).run(refusals)[1] == [
        "2 ranks cannot be cut into sp groups of 3.",
        "2 ranks cannot be cut into tp groups of 4.",
        "2 ranks cannot be cut into replicas groups of 3.",
    ]


def reduced():
    mesh = build_mesh("cpu", sp=1, tp=1)
    sums = Sums()
    for micro_batch in range(2):
        values = {"tokens": 2.0**mesh.rank + micro_batch, "loss": 0.1 * mesh.rank, "ratio_max": 3.0 - mesh.rank}
        sums.add({name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()})
    return sums.reduce(mesh)


def test_sums_over_ranks(ranks):
    """tokens: 2 (1 + 2 + 4 + 8) + 4; maxima stay maxima, and order of the names decides nothing."""
    for result in ranks(4).run(reduced):
        assert result == {"tokens": 34.0, "loss": pytest.approx(1.2), "ratio_max": 3.0}


# ---- clipping and refusal over shards


class Shares(nn.Module):
    """Two weights, one on each of two ranks."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        return (self.w * x).sum()


def clipped(bad):
    """Gradients 3 and 4 on the two ranks; then, on rank 1, `bad`."""
    mesh = build_mesh("cpu", sp=1, tp=1)
    model = Shares()
    fully_shard(model, mesh=mesh.fsdp_mesh)
    optimizer = build_adamw(model.parameters(), OptimConfig(lr=1.0, beta1=0.0))
    model.w.grad = torch.zeros_like(model.w)
    model.w.grad.to_local().fill_(3.0 + mesh.rank)
    first = apply_update(optimizer, 1.0, 1.0)
    moment = optimizer.state[model.w]["exp_avg"].to_local().item()  # beta1 0: the clipped gradient itself
    before = [tensor.clone() for tensor in map(local, training_state(optimizer))]
    model.w.grad = torch.ones_like(model.w)
    model.w.grad.to_local().fill_(bad if mesh.rank == 1 else 1.0)
    norm, stepped = apply_update(optimizer, 1.0, 1.0)
    same = all(map(torch.equal, before, map(local, training_state(optimizer))))
    return first, moment, math.isfinite(norm), stepped, same


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_the_norm_is_global_and_one_bad_rank_stops_all(ranks, bad):
    for rank, (first, moment, finite, stepped, same) in enumerate(ranks(2).run(clipped, bad)):
        assert first == (5.0, True)
        assert moment == pytest.approx([0.6, 0.8][rank], rel=1e-5)
        assert (finite, stepped, same) == (False, False, True)


def poisoned(folder):
    """An advantage of infinity reaches one data rank only; the next update is good."""
    mesh = build_mesh("cpu", sp=1, tp=1)
    config = RunConfig()
    config.actor.use_kl_loss, config.actor.optim.lr = False, 1e-3
    actor = Actor(policy_of(folder, mesh), None, config, 10)
    rollouts, share = make_rollouts(4), share_of(mesh, 1000)
    good, bad = (
        mini_batches_of(rollouts, np.array([first, -1.0, 2.0, -2.0]), share, config) for first in (1, math.inf)
    )
    own_is_bad = any(batch.advantages_R.isinf().any() for batch in bad[0].micro)
    actor.update(good, None, None, Sums())
    before = [local(tensor).clone() for tensor in training_state(actor.optimizer)]
    skipped = actor.update(bad, None, None, Sums())
    same = all(map(torch.equal, before, map(local, training_state(actor.optimizer))))
    after = actor.update(good, None, None, Sums())
    return bool(own_is_bad), skipped.skipped, same, after.skipped, math.isfinite(after.grad_norms[0])


def test_a_bad_gradient_on_one_rank_leaves_every_rank_as_it_was(ranks, tiny_model):
    results = ranks(2).run(poisoned, tiny_model)
    assert sorted(own_is_bad for own_is_bad, *_ in results) == [False, True]
    assert all(rest == (1, True, 0, True) for _, *rest in results for rest in [tuple(rest)])


# ---- shards of the weights


def loaded_and_saved(folder, target, replicas):
    mesh = build_mesh("cpu", sp=1, tp=1, replicas=replicas)
    policy = policy_of(folder, mesh)
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter.mul_(2.0)
    save_model(policy, AutoTokenizer.from_pretrained(folder), target, mesh)
    frequencies = [buffer.tolist() for buffer in policy.module.buffers()]
    exported = {name: tensor.sum(dtype=torch.float64).item() for name, tensor in policy.export()}
    return frequencies, exported, (target / "model.safetensors").exists()


@pytest.mark.parametrize("replicas", [1, 2])
def test_shards_are_read_gathered_and_saved_whole(ranks, make_tiny_model, tmp_path, replicas):
    """267 rows over 4 ranks are uneven, and a rank's share of a vector may be empty."""
    folder = make_tiny_model("qwen3", tied=True, head_dim=2)
    results = ranks(4).run(loaded_and_saved, folder, tmp_path / "model", replicas)
    model, saved = (AutoModelForCausalLM.from_pretrained(path) for path in (folder, tmp_path / "model"))
    for (name, weight), doubled in zip(model.named_parameters(), saved.parameters(), strict=True):
        assert torch.equal(2 * weight, doubled), name
    expected = {name: 2 * weight.sum(dtype=torch.float64).item() for name, weight in model.named_parameters()}
    for frequencies, exported, exists in results:  # the same bits on every rank, right after the save returns
        assert frequencies == [buffer.tolist() for buffer in model.buffers()] and exists
        assert exported == pytest.approx(expected)


@pytest.mark.parametrize(
    ("device", "backends", "fits"),
    [
        ("cuda", "cpu:gloo,cuda:nccl", True),
        ("cuda", "cpu:gloo,cuda:gloo", True),
        ("cpu", "cpu:gloo,cuda:gloo", True),
        ("cuda", "cuda:nccl", False),  # the first clip of an offloaded gradient would fail
        ("cuda", "cpu:gloo", False),
        ("cpu", "cuda:nccl", False),
    ],
)
def test_a_process_group_without_a_backend_it_will_need_is_refused(device, backends, fits):
    if fits:
        require_backends(device, backends)
    else:
        with pytest.raises(ValueError, match=rf"serves {backends}, this run needs the CPU and {device}: start it with"):
            require_backends(device, backends)


def test_one_mesh_after_the_other_in_one_process():
    program = (
        "import os\n"
        "from fastgrpo.mesh import build_mesh\n"
        "for _ in range(3):\n"
        "    build_mesh('cpu', sp=1, tp=1).close()\n"
        "print(os.environ['RANK'], os.environ['WORLD_SIZE'])\n"
    )
    alone = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run([sys.executable, "-c", program], env=alone, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.split() == ["0", "1"], done.stderr


PREFIXES = """
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from fastgrpo.mesh import _one_prefix, build_mesh
for _ in range(3):
    if {world} == 1:
        build_mesh("cpu", sp=1, tp=1).close()
    else:
        with _one_prefix():
            dist.init_process_group("fake", store=FakeStore(), rank=1, world_size={world})
        dist.destroy_process_group()
raise RuntimeError("a mistake")
"""


@pytest.mark.parametrize(("world", "prefix"), [(1, ""), (2, "[rank1]: ")])
def test_a_traceback_names_the_rank_once_and_only_where_there_are_several(world, prefix):
    alone = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    program = [sys.executable, "-c", PREFIXES.format(world=world)]
    done = subprocess.run(program, env=alone, capture_output=True, text=True, timeout=120)
    assert f"{prefix}RuntimeError: a mistake" in done.stderr.splitlines(), done.stderr
