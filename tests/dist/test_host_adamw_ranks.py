"""AdamW with its moments on the host, on shards of two ranks, some of them empty: AdamW's numbers to the last bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from cases import full_weights, make_rollouts, mini_batches_of, policy_of, share_of, training_state
from torch.distributed.tensor import DTensor

from fastgrpo.config import RunConfig
from fastgrpo.mesh import build_mesh
from fastgrpo.metrics import Sums
from fastgrpo.plan import with_option
from fastgrpo.policy.actor import Actor


def trained(folder: Path, *, on_host: bool) -> tuple[tuple[float, ...], list[torch.Tensor], dict[str, torch.Tensor]]:
    mesh = build_mesh("cpu", sp=1, tp=1)
    config = with_option(RunConfig(), "actor.fsdp.offload_optimizer", on_host)
    config = with_option(with_option(config, "actor.use_kl_loss", False), "actor.optim.lr", 1e-2)
    actor = Actor(policy_of(folder, mesh), None, config, 10)
    mini_batches = mini_batches_of(make_rollouts(5), np.array([1.0, 0.5, -2.0, -1.0, 0.5]), share_of(mesh, 64), config)
    norms = [actor.update(mini_batches, None, None, Sums()).grad_norms for _ in range(3)]
    actor.settle()
    state = training_state(actor.optimizer)
    assert sum(isinstance(tensor, DTensor) for tensor in state) == len(state) * 3 // 4  # but the counts of steps
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in state]
    return sum(norms, ()), local, full_weights(actor.policy)


def both(folder: Path) -> tuple[bool, list[int]]:
    """Whether all is alike, and the sizes of this rank's shards."""
    (norms, state, weights), (hosted_norms, hosted, hosted_weights) = (
        trained(folder, on_host=on_host) for on_host in (False, True)
    )
    alike = norms == hosted_norms and len(norms) == 3 and all(map(torch.equal, state, hosted))
    alike &= all(torch.equal(weight, hosted_weights[name]) for name, weight in weights.items())
    return alike, [tensor.numel() for tensor in state]


def test_two_ranks_train_alike(ranks, make_tiny_model) -> None:
    """A head of 17 numbers leaves 9 and 8 to the ranks, a norm of one number 1 and none."""
    folder = make_tiny_model("qwen3", head_dim=18, hidden_size=17, intermediate_size=1)
    results = ranks(2).run(both, folder)
    assert [alike for alike, _ in results] == [True, True]
    assert results[0][1] != results[1][1] and 0 in results[1][1]
