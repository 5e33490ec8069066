"""AdamW with its moments on the host: the numbers of AdamW to the last bit, where the moments are, how much of them is
on the device at once, and that a checkpoint does not care. The same on a GPU, with its streams and its memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import full_weights, make_rollouts, mini_batches_of, one_process, policy_of, share_of, training_state
from torch import Tensor, nn
from torch.distributed.checkpoint.planner import SavePlan

from fastgrpo.checkpoint.tensors import (
    ShardPlanner,
    copy_to_host,
    plan_files,
    restore_tensors,
    training_tensors,
    write_index,
    write_shard,
)
from fastgrpo.config import OptimConfig, RunConfig
from fastgrpo.metrics import Sums
from fastgrpo.plan import constants as k
from fastgrpo.plan import with_option
from fastgrpo.policy.actor import Actor
from fastgrpo.policy.host_adamw import MOMENTS, VISIT_BYTES, HostAdamW, parts_of
from fastgrpo.policy.optim import apply_update, build_adamw
from fastgrpo.policy.weights import local

SIZES = ((64, 33), (7,), (16, 48), (1, 5), (300, 20), (33,))  # parameters of one small model


def parameters(device: str) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(*size, generator=generator).to(device)) for size in SIZES]


def gradients(step: int, device: str) -> list[Tensor | None]:
    """Of step 0, 1, ...; the third parameter has none in step 1."""
    generator = torch.Generator().manual_seed(100 + step)
    made = [torch.randn(*size, generator=generator).to(device) for size in SIZES]
    return [None if (step, number) == (1, 2) else gradient for number, gradient in enumerate(made)]


def stepped(optimizer: torch.optim.Optimizer, trained: list[nn.Parameter], step: int, device: str) -> float:
    for parameter, gradient in zip(trained, gradients(step, device), strict=True):
        parameter.grad = gradient
    return apply_update(optimizer, 1e-2 / (1 + step), 1.0)[0]


def pair(device: str, visit_bytes: int) -> tuple[Any, list[nn.Parameter], HostAdamW, list[nn.Parameter]]:
    plain, hosted = parameters(device), parameters(device)
    usual = build_adamw(plain, OptimConfig())
    optimizer = build_adamw(hosted, OptimConfig(), on_host=True)
    assert isinstance(optimizer, HostAdamW)
    optimizer._visit_bytes = visit_bytes
    return usual, plain, optimizer, hosted


@pytest.mark.parametrize("visit_bytes", [1, 8 * 2200, 1 << 28])
def test_every_bit_is_adamws(visit_bytes: int) -> None:
    usual, plain, optimizer, hosted = pair("cpu", visit_bytes)
    homes: dict[tuple[int, str], int] = {}
    for step in range(5):
        assert stepped(usual, plain, step, "cpu") == stepped(optimizer, hosted, step, "cpu")
        for number, (expected, parameter) in enumerate(zip(plain, hosted, strict=True)):
            assert torch.equal(expected, parameter) and parameter.grad is None
            assert optimizer.state[parameter].keys() == usual.state[expected].keys() == {"step", *MOMENTS}
            for name, value in optimizer.state[parameter].items():
                assert torch.equal(value, usual.state[expected][name])
                if name in MOMENTS:  # made once, and filled again
                    assert homes.setdefault((number, name), value.data_ptr()) == value.data_ptr()
    assert optimizer.state[hosted[2]]["step"] == 4 and optimizer.state[hosted[0]]["step"] == 5


def test_a_step_without_gradients_is_none() -> None:
    _, _, optimizer, hosted = pair("cpu", 1)
    optimizer.step()
    assert not optimizer.state and all(map(torch.equal, hosted, parameters("cpu")))


def test_the_smallest_go_first_and_as_many_as_have_room() -> None:
    made = parameters("cpu")
    sizes = [parameter.numel() for parameter in made]
    assert sizes == [2112, 7, 768, 5, 6000, 33]

    def cut(most_bytes: int) -> list[list[int]]:
        return [[parameter.numel() for parameter in part] for part in parts_of(made, most_bytes)]

    assert cut(1) == [[5], [7], [33], [768], [2112], [6000]]
    assert cut(8 * 45) == [[5, 7, 33], [768], [2112], [6000]]
    assert cut(8 * 44) == [[5, 7], [33], [768], [2112], [6000]]
    assert cut(8 * 3000) == [[5, 7, 33, 768, 2112], [6000]]
    assert cut(8 * 8925) == [[5, 7, 33, 768, 2112, 6000]] and parts_of([], 1) == []


def test_the_plan_knows_the_sizes() -> None:
    assert (VISIT_BYTES, len(MOMENTS)) == (k.ADAMW_VISIT, k.ADAMW_STATES)


def test_three_visits_at_most_are_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted when AdamW works: what its state and the visits before hold apart from the host's own."""
    _, _, optimizer, hosted = pair("cpu", 1)
    stepped(optimizer, hosted, 0, "cpu")
    homes = {value.data_ptr() for state in optimizer.state.values() for value in state.values()}
    steps = torch.optim.AdamW.step
    away: list[list[int]] = []

    def looked(self: Any, closure: Any = None) -> Any:
        here = [p for p, state in optimizer.state.items() if state["exp_avg"].data_ptr() not in homes]
        away.append(sorted(parameter.numel() for parameter in here))
        assert [p.numel() for p in hosted if p.grad is not None] == [away[-1][0]]  # the one that is stepped, no other
        return steps(self, closure)

    monkeypatch.setattr(torch.optim.AdamW, "step", looked)
    stepped(optimizer, hosted, 2, "cpu")
    # The one that arrives beside it; the third leaves, and its state is the host's again.
    assert away == [[5, 7], [7, 33], [33, 768], [768, 2112], [2112, 6000], [6000]]


def actor_of(folder: Path, mesh: Any, on_host: bool) -> tuple[Actor, Callable[[], Any]]:
    config = with_option(RunConfig(), "actor.fsdp.offload_optimizer", on_host)
    config = with_option(with_option(config, "actor.use_kl_loss", False), "actor.optim.lr", 1e-2)
    actor = Actor(policy_of(folder, mesh), None, config, 10)
    mini_batches = mini_batches_of(make_rollouts(5), np.array([1.0, 0.5, -2.0, -1.0, 0.5]), share_of(mesh, 64), config)
    return actor, lambda: actor.update(mini_batches, actor.old_logprobs(mini_batches), None, Sums())


def test_an_actor_trains_alike_and_a_checkpoint_of_either_goes_on_with_the_other(
    mesh: Any, make_tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_tiny_model("qwen2", tied=True)
    (usual, train_usual), (hosted, train_hosted) = (actor_of(folder, mesh, on_host) for on_host in (False, True))
    assert type(usual.optimizer) is torch.optim.AdamW and type(hosted.optimizer) is HostAdamW
    for _ in range(2):
        assert train_usual().grad_norms == train_hosted().grad_norms
    hosted.settle()
    for name, actor in (("usual", usual), ("hosted", hosted)):
        save(tmp_path / name, training_tensors(actor.policy.module, actor.optimizer))
    for name, on_host in (("usual", True), ("hosted", False), ("hosted", True)):
        resumed, train = actor_of(folder, mesh, on_host)
        restore_tensors(tmp_path / name, resumed.policy.module, resumed.optimizer)
        assert all(map(torch.equal, map(local, training_state(resumed.optimizer)), state_of(usual)))
        resumed.version = usual.version
        resumed_norms, expected = train().grad_norms, trained_once_more(folder, mesh, tmp_path / "usual")
        assert resumed_norms == expected[0]
        assert all(torch.equal(weight, expected[1][key]) for key, weight in full_weights(resumed.policy).items())


def trained_once_more(folder: Path, mesh: Any, checkpoint: Path) -> tuple[Any, dict[str, Tensor]]:
    actor, train = actor_of(folder, mesh, False)
    restore_tensors(checkpoint, actor.policy.module, actor.optimizer)
    actor.version = 2
    return train().grad_norms, full_weights(actor.policy)


def save(folder: Path, tensors: dict[str, Tensor]) -> None:
    planner = ShardPlanner(copy_to_host(tensors))
    planner.set_up_planner(tensors, is_coordinator=True)
    plans, metadata = plan_files(folder, [planner.create_local_plan()], [0])
    [plan] = plans
    assert isinstance(plan, SavePlan)
    write_index(folder, metadata, [write_shard(folder, plan, planner)], [True])


def state_of(actor: Actor) -> list[Tensor]:
    return [local(tensor) for tensor in training_state(actor.optimizer)]


# ---- on a GPU

MIB = 1 << 20


@pytest.mark.gpu
@pytest.mark.parametrize("visit_bytes", [1, 8 * 2200, 1 << 28])
def test_on_cuda_every_bit_is_adamws(visit_bytes: int) -> None:
    usual, plain, optimizer, hosted = pair("cuda", visit_bytes)
    for step in range(6):
        assert stepped(usual, plain, step, "cuda") == stepped(optimizer, hosted, step, "cuda")
        if step % 2:  # and steps that follow one another without a wait
            optimizer.settle()
            for expected, parameter in zip(plain, hosted, strict=True):
                assert torch.equal(expected, parameter)
                for name in MOMENTS:
                    home = optimizer.state[parameter][name]
                    assert home.is_pinned() and torch.equal(home, usual.state[expected][name].cpu())


@pytest.mark.gpu
def test_on_cuda_the_moments_leave_the_device_and_copies_wait_for_what_computes() -> None:
    made = [nn.Parameter(torch.zeros(MIB, device="cuda")) for _ in range(24)]  # 4 MiB each, 192 of moments
    optimizer = HostAdamW([{"params": made}], visit_bytes=16 * MIB, lr=1e-3, fused=True)
    for step in range(4):
        for number, parameter in enumerate(made):
            parameter.grad = torch.full_like(parameter, float(number - 11))
        torch.cuda._sleep(200_000_000)  # a tenth of a second: the gradients are late
        for parameter in made:
            assert parameter.grad is not None
            parameter.grad.mul_(2)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
        assert torch.cuda.max_memory_allocated() - before <= 3 * 16 * MIB
        assert before - torch.cuda.memory_allocated() >= 23 * 4 * MIB or step == 0  # the gradients
        scratch = torch.full((64 * MIB,), float("nan"), device="cuda")  # somebody else uses the memory
        del scratch
    optimizer.settle()
    for number, parameter in enumerate(made):
        gradient, m, v = 2.0 * (number - 11), 0.0, 0.0
        for _ in range(4):
            m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        for name, expected in zip(MOMENTS, (m, v), strict=True):
            found = optimizer.state[parameter][name]
            assert found.device.type == "cpu"
            torch.testing.assert_close(found, torch.full((MIB,), expected), rtol=1e-4, atol=0)


@pytest.mark.gpu
def test_on_cuda_an_actor_trains_alike(make_tiny_model: Callable[..., Path]) -> None:
    folder = make_tiny_model("qwen2", tied=True)
    with one_process("cuda") as mesh:
        (usual, train_usual), (hosted, train_hosted) = (actor_of(folder, mesh, on_host) for on_host in (False, True))
        for _ in range(3):
            assert train_usual().grad_norms == train_hosted().grad_norms
        hosted.settle()
        for expected, parameter in zip(
            usual.policy.module.parameters(), hosted.policy.module.parameters(), strict=True
        ):
            for name in MOMENTS:
                home = local(hosted.optimizer.state[parameter][name])
                assert home.is_pinned() and torch.equal(home, local(usual.optimizer.state[expected][name]).cpu())
        weights = full_weights(usual.policy)
        assert all(torch.equal(weight, weights[name]) for name, weight in full_weights(hosted.policy).items())
