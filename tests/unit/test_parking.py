"""Masters and moments on the host while the engine draws: in which order they go and come, what waits for what, that no
bit is lost, and that nobody reads what is away. The same on a GPU, with its streams and its memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cases import full_weights, make_rollouts, mini_batches_of, one_process, policy_of, share_of, training_state
from cpu_parking import CpuParking, local, overwrite_freed_memory, there
from torch import Tensor, nn

import fastgrpo.policy.actor
from fastgrpo.batch.packing import ShardedBatch
from fastgrpo.checkpoint import Identity
from fastgrpo.config import OptimConfig, RunConfig
from fastgrpo.mesh import Mesh
from fastgrpo.metrics import Sums
from fastgrpo.plan import with_option
from fastgrpo.policy.actor import Actor
from fastgrpo.policy.optim import apply_update, build_adamw, masters, moments
from fastgrpo.policy.parking import HostParking
from fastgrpo.session import Session
from fastgrpo.stages import Stages


class Trained:
    """A matrix, a vector and their AdamW after one update, with a view of the matrix such as FSDP has of its shards."""

    def __init__(self, device: str, rows: int = 5, columns: int = 3) -> None:
        generator = torch.Generator().manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(rows, columns, generator=generator).to(device))
        self.vector = nn.Parameter(torch.randn(columns, generator=generator).to(device))
        self.view = self.matrix.data[1]
        self.optimizer = build_adamw([self.matrix, self.vector], OptimConfig())
        self.x = torch.randn(8, rows, generator=generator).to(device)
        self.update()

    def update(self) -> None:
        (self.x @ self.matrix + self.vector).square().sum().backward()
        apply_update(self.optimizer, 1e-3, 1.0)

    def send(self, parking: HostParking) -> None:
        parking.send(masters(self.optimizer), moments(self.optimizer))

    def copies(self) -> list[Tensor]:
        return [tensor.detach().cpu().clone() for tensor in training_state(self.optimizer)]

    def same(self, expected: list[Tensor]) -> bool:
        state = self.copies()
        return all(map(torch.equal, state, expected)) and torch.equal(self.view, self.matrix.data[1])


def test_by_default_tensors_on_the_cpu_stay() -> None:
    state, parking = Trained("cpu"), HostParking()
    expected = state.copies()
    state.send(parking)
    parking.free()
    assert all(there(state.optimizer)) and state.same(expected)
    parking.bring_back()
    parking.arrive()
    assert state.same(expected)


def test_every_bit_comes_back_cycle_after_cycle() -> None:
    state, untouched, parking = Trained("cpu"), Trained("cpu"), CpuParking()
    for cycle in range(4):
        expected = state.copies()
        state.send(parking)
        assert state.same(expected)  # it may be read until it is freed
        parking.free()
        assert not any(there(state.optimizer))
        overwrite_freed_memory()
        parking.bring_back()
        assert state.same(expected)
        if cycle % 2:  # and cycles without an update between them
            parking.arrive()
            state.update()
            untouched.update()
    assert state.same(untouched.copies())


def test_moments_go_first_and_come_last_and_only_the_end_of_sending_waits() -> None:
    state, parking = Trained("cpu"), CpuParking()
    matrix, vector, count = 4 * 15, 4 * 3, 4
    adam = [count, matrix, matrix, count, vector, vector]
    state.send(parking)
    assert parking.diary == ["behind compute", *(f"out {size}" for size in (*adam, matrix, vector))]
    parking.diary.clear()
    parking.free()
    assert parking.diary == ["host waits for all"]
    parking.diary.clear()
    parking.bring_back()
    back = [f"in {size}" for size in (matrix, vector, *adam)]
    assert parking.diary == ["behind compute", *back, "compute waits for 2 copies"]  # for the masters alone
    parking.diary.clear()
    parking.arrive()
    assert parking.diary == ["compute waits for 8 copies"]
    parking.diary.clear()
    state.send(parking)  # pinned memory that is still read would be taken twice
    assert parking.diary[:2] == ["host waits for copies", "behind compute"]


def test_shared_storages_go_once_and_empty_ones_never() -> None:
    whole = torch.arange(12.0)
    expected, empty, parking = whole.clone(), torch.empty(0), CpuParking()
    parking.send([whole[:6], whole[6:], empty], [])
    assert parking.diary == ["behind compute", "out 48"]
    parking.free()
    overwrite_freed_memory()
    parking.bring_back()
    assert torch.equal(whole, expected)


def test_what_was_never_freed_is_as_it_was() -> None:
    """An engine that did not ask for the weights."""
    state, parking = Trained("cpu"), CpuParking()
    expected = state.copies()
    state.send(parking)
    parking.bring_back()
    assert state.same(expected)
    parking.require_home()


def test_what_is_lent_is_not_lent_again_nor_read() -> None:
    state, parking = Trained("cpu"), CpuParking()
    parking.require_home()
    state.send(parking)
    for home_only in (parking.arrive, parking.require_home, lambda: state.send(parking)):
        with pytest.raises(RuntimeError, match="in host memory while the engine is awake"):
            home_only()
    parking.require_readable()
    parking.free()
    for readable_only in (parking.free, parking.require_readable):
        with pytest.raises(RuntimeError, match="an engine may ask for the weights once"):
            readable_only()
    parking.bring_back()
    parking.require_home()


# ---- the actor, and the step


@pytest.fixture
def actor_of(
    make_tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> Callable[[Mesh], tuple[Actor, Any]]:
    """An actor with `offload_during_rollout` after one update, and the mini-batches for more."""
    folder = make_tiny_model("qwen2", tied=True, num_hidden_layers=1, hidden_size=32, intermediate_size=48)

    def make(mesh: Mesh) -> tuple[Actor, Any]:
        if mesh.device.type == "cpu":
            monkeypatch.setattr(fastgrpo.policy.actor, "HostParking", CpuParking)
        config = with_option(RunConfig(), "actor.fsdp.offload_during_rollout", True)
        config = with_option(with_option(config, "actor.use_kl_loss", False), "actor.optim.lr", 1e-3)
        actor = Actor(policy_of(folder, mesh), None, config, 10)
        advantages_N = np.linspace(-1, 1, 8)
        mini_batches = mini_batches_of(make_rollouts(8), advantages_N, share_of(mesh, 1000), config)
        actor.update(mini_batches, None, None, Sums())
        return actor, mini_batches

    return make


def test_nothing_of_the_actor_reads_what_is_away(mesh: Mesh, actor_of: Any) -> None:
    actor, mini_batches = actor_of(mesh)
    batches: list[ShardedBatch] = list(mini_batches[0].micro)
    expected = actor.score(actor.policy, batches)
    with actor.lent(held=True) as export:
        for reading in (
            lambda: actor.score(actor.policy, batches),
            lambda: actor.gap(batches),
            lambda: actor.update(mini_batches, None, None, Sums()),
            actor.settle,
            lambda: actor.lent(held=True).__enter__(),
        ):
            with pytest.raises(RuntimeError, match=r"offload_during_rollout\).* before it sleeps"):
                reading()
        with pytest.raises(RuntimeError, match="its `holds` said"):
            next(export())
    actor.settle()
    assert all(map(torch.equal, actor.score(actor.policy, batches), expected))


class AskedEngine:
    """Holds the weights or asks for them, and looks at the trainer's state at each point of a cycle."""

    def __init__(self, held: bool, optimizer: torch.optim.Optimizer) -> None:
        self._held, self._optimizer = held, optimizer
        self.weights: dict[str, Tensor] = {}
        self.seen: list[tuple[str, list[bool]]] = []

    def holds(self, version: int) -> bool:
        return self._held

    @contextmanager
    def awake(self, export: Any, version: int) -> Iterator[None]:
        self._look("wakes")
        if not self._held:
            self.weights = {name: tensor.clone() for name, tensor in export()}
        self._look("takes its cache")
        yield
        self._look("sleeps")

    def _look(self, moment: str) -> None:
        self.seen.append((moment, there(self._optimizer)))


@pytest.mark.parametrize("held", [False, True])
def test_all_is_away_before_the_cache_whether_the_engine_needs_weights_or_not(
    mesh: Mesh, actor_of: Any, held: bool
) -> None:
    actor, _ = actor_of(mesh)
    expected = full_weights(actor.policy)
    engine = AskedEngine(held, actor.optimizer)
    stages: Any = SimpleNamespace(actor=actor, engine=engine)
    all_there = [True] * len(training_state(actor.optimizer))
    all_away = [False] * len(all_there)
    with Stages.engine_awake(stages):
        assert there(actor.optimizer) == all_away
    assert engine.seen == [
        ("wakes", all_away if held else all_there),
        ("takes its cache", all_away),
        ("sleeps", all_away),
    ]
    assert there(actor.optimizer) == all_there
    assert len(engine.weights) == (0 if held else len(actor.policy.names))
    for name, weight in full_weights(actor.policy).items():
        assert torch.equal(weight, expected[name])
        assert held or torch.equal(engine.weights[actor.policy.names[name]], expected[name])


def test_after_an_exception_the_state_stays_away(mesh: Mesh, actor_of: Any) -> None:
    """The engine may still have the memory."""
    actor, _ = actor_of(mesh)
    with pytest.raises(ZeroDivisionError), actor.lent(held=True):
        raise ZeroDivisionError
    assert not any(there(actor.optimizer))
    with pytest.raises(RuntimeError, match="in host memory"):
        actor.settle()


def test_a_save_waits_for_what_is_on_its_way() -> None:
    """After a validation no update has waited for the moments."""
    calls: list[str] = []

    def called(name: str) -> Any:
        return lambda *arguments, **options: calls.append(name)

    stages = SimpleNamespace(actor=SimpleNamespace(settle=called("settle")), mesh=SimpleNamespace(world=1))
    stages.total_steps, stages.identity = 3, Identity("", 0, "", None, {})
    watchdog = SimpleNamespace(stage=lambda name: nullcontext())
    run: Any = SimpleNamespace(stages=stages, steps_done=2, config=RunConfig(), watchdog=watchdog)
    session: Any = Session(run)
    session._noted, session._saver = ({}, None), SimpleNamespace(save=called("save"))
    session.report = SimpleNamespace(value_at=lambda *of: None, flush=called("flush"), state=dict)
    session._save()
    assert calls == ["flush", "settle", "save"]


# ---- on a GPU

MIB = 1 << 20
LONG = 1_000_000_000  # cycles, about half a second


class SlowLink(HostParking):
    """As if masters, and then moments, took long to come back."""

    def _copy_back(self, group: Any) -> Any:
        torch.cuda._sleep(LONG)
        return super()._copy_back(group)


def device_bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in map(local, tensors))


def cycle(state: Trained, parking: HostParking) -> None:
    state.send(parking)
    parking.free()
    parking.bring_back()


@pytest.mark.gpu
def test_the_memory_is_gone_while_it_is_lent_and_every_bit_comes_back() -> None:
    state, untouched = (Trained("cuda", 1 << 12, 1 << 10) for _ in range(2))  # 16 MiB, and two moments
    parking = HostParking()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    for number in range(4):
        expected = state.copies()
        state.send(parking)
        parking.free()
        assert held - torch.cuda.memory_allocated() >= device_bytes(expected) > 48 * MIB
        scratch = torch.full((64 * MIB,), 7.0, device="cuda")  # somebody else uses the memory
        del scratch
        parking.bring_back()
        assert torch.cuda.memory_allocated() == held
        parking.arrive()
        assert all(tensor.is_cuda for tensor in training_state(state.optimizer)) and state.same(expected)
        if number % 2:
            state.update()
            untouched.update()
            assert state.same(untouched.copies()) and not state.same(expected)
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    state.send(parking)
    parking.free()
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] - free >= 48 * MIB  # of the device, for an engine beside torch
    parking.bring_back()


@pytest.mark.gpu
def test_sending_comes_behind_what_the_compute_stream_still_writes() -> None:
    state, parking = Trained("cuda", 1 << 10, 1 << 10), HostParking()
    cycle(state, parking)  # pinned memory is there now
    parking.arrive()
    expected = [tensor + 1 for tensor in state.copies()]
    torch.cuda._sleep(LONG)
    for tensor in training_state(state.optimizer):
        tensor.add_(1)
    written = torch.cuda.current_stream().record_event()
    state.send(parking)
    assert not written.query()  # the host did not wait
    parking.free()
    assert written.query()
    parking.bring_back()
    parking.arrive()
    assert state.same(expected)


@pytest.mark.gpu
def test_memory_that_the_compute_stream_still_writes_is_filled_behind_it() -> None:
    state, parking = Trained("cuda", 1 << 10, 1 << 10), HostParking()
    expected = state.copies()
    state.send(parking)
    parking.free()
    scratch = [torch.empty(1 << 20, device="cuda") for _ in range(8)]
    torch.cuda._sleep(LONG)
    for tensor in scratch:
        tensor.fill_(7.0)
    written = torch.cuda.current_stream().record_event()
    scratch.clear()
    del tensor  # the allocator gives these blocks out again: whoever takes them comes behind, on the same stream
    parking.bring_back()
    assert not written.query()
    parking.arrive()
    assert state.same(expected)


@pytest.mark.gpu
def test_the_compute_stream_waits_for_the_masters_and_at_arrive_for_the_moments() -> None:
    state, untouched = (Trained("cuda", 1 << 12, 1 << 10) for _ in range(2))
    parking = SlowLink()
    for _ in range(2):
        cycle(state, parking)
        assert parking._arrival is not None
        matrix = state.matrix.detach().clone()
        torch.cuda.current_stream().synchronize()
        assert not parking._arrival.query()  # the moments are on their way
        assert torch.equal(matrix, untouched.matrix)
        parking.arrive()
        state.update()
        untouched.update()
        assert state.same(untouched.copies())
        assert parking._arrival.query()


@pytest.mark.gpu
def test_cycles_at_once_one_after_the_other_take_no_more_pinned_memory() -> None:
    state, parking = Trained("cuda", 1 << 12, 1 << 10), SlowLink()
    expected, taken = state.copies(), []
    for _ in range(4):
        cycle(state, parking)
        taken.append(torch.cuda.host_memory_stats()["num_host_alloc"])
    assert taken[-1] == taken[0] > 0
    parking.arrive()
    assert state.same(expected)


@pytest.mark.gpu
@pytest.mark.parametrize("held", [False, True])
def test_an_actor_trains_on_after_each_rollout(actor_of: Any, held: bool) -> None:
    with one_process("cuda") as mesh:
        actor, mini_batches = actor_of(mesh)
        for _ in range(3):
            state = training_state(actor.optimizer)
            expected = [local(tensor).clone().cpu() for tensor in state]
            actor.score(actor.policy, mini_batches[0].micro)  # leaves nothing gathered
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            stages: Any = SimpleNamespace(actor=actor, engine=AskedEngine(held, actor.optimizer))
            with Stages.engine_awake(stages):
                assert [all(seen) for _, seen in stages.engine.seen] == [not held, False]
                assert not any(there(actor.optimizer))
                stages.engine.weights.clear()
                assert before - torch.cuda.memory_allocated() >= device_bytes(state)
                with pytest.raises(RuntimeError, match="before it sleeps"):
                    actor.score(actor.policy, mini_batches[0].micro)
                scratch = torch.full((4 * MIB,), float("nan"), device="cuda")
                del scratch
            assert torch.cuda.memory_allocated() <= before
            scored = actor.score(actor.policy, mini_batches[0].micro)
            assert all(bool(logprobs_R.isfinite().all()) for logprobs_R in scored)
            actor.settle()
            assert all(torch.equal(local(tensor).cpu(), right) for tensor, right in zip(state, expected, strict=True))
            result = actor.update(mini_batches, None, None, Sums())
            assert result.skipped == 0 and 0 < result.grad_norms[0] < float("inf")
            assert not torch.equal(local(state[0]).cpu(), expected[0])
