"""Where the plan meets the device, on a made one: what is free, the cap, one decision for all ranks, what is said."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastgrpo import gpu, stages
from fastgrpo.config import Layout, RunConfig
from fastgrpo.errors import UserError
from fastgrpo.host_memory import HostMemory
from fastgrpo.plan import Sizes, explain, read_sizes, settle_on_cpu, with_option
from fastgrpo.plan.constants import CUDA_CONTEXT, GIB

MODEL = read_sizes(Path(__file__).parents[2] / "bench" / "shapes" / "Qwen2.5-1.5B-Instruct")


@pytest.fixture
def fractions(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A GPU of 80 GiB of which 60 are free; the caps that are asked for."""
    asked: list[float] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(gpu.host_memory, "read", lambda: None)  # where nobody knows
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: asked.append(share))
    return asked


def settle(
    config: RunConfig, others: tuple[int, ...] = (), device: str = "cuda", hosts: Any = (), speeds: Any = ()
) -> Any:
    def gather(own: Any) -> list[Any]:
        return [own, *(others if isinstance(own, int) else speeds if isinstance(own, float) else hosts)]

    mesh: Any = SimpleNamespace(device=torch.device(device), gather=gather, is_main=True)
    config = with_option(config, "actor.use_kl_loss", False)
    return gpu.settle_memory(config, Sizes(MODEL, None), Layout.of(config, 1 + len(others)), mesh)


def test_what_is_free_is_planned_for(fractions: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    settled, plan = settle(RunConfig())
    assert plan.gpu_bytes == 60 * GIB + CUDA_CONTEXT and plan.fits and fractions == []
    assert settled.actor.max_tokens_per_gpu == plan.settings.max_tokens_per_gpu
    printed = capsys.readouterr().out
    assert "60.6  GiB a GPU" in printed and f"actor.max_tokens_per_gpu={settled.actor.max_tokens_per_gpu}" in printed


def test_the_slowest_gpu_is_planned_for(fractions: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """An A100 by its name; beside one that nobody knows the plan is told nothing."""
    for others, expected in (((), 312.0), ((989e12, 165.2e12), 165.2), ((None,), None)):
        settled, plan = settle(RunConfig(), speeds=others)
        assert settled.trainer.peak_tflops == expected and plan.job.peak_flops == (expected or 312.0) * 1e12
    assert settle(with_option(RunConfig(), "trainer.peak_tflops", 50.0))[0].trainer.peak_tflops == 50
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a new one")
    assert settle(RunConfig())[0].trainer.peak_tflops is None


def test_the_least_of_all_ranks_decides(fractions: list[float]) -> None:
    assert settle(RunConfig(), others=(40 * GIB, 50 * GIB))[1].gpu_bytes == 40 * GIB


@pytest.mark.parametrize(("cap", "planned"), [(24.0, 24 * GIB), (70.0, 60 * GIB + CUDA_CONTEXT)])
def test_a_cap_is_kept_and_planned_for(fractions: list[float], cap: float, planned: int) -> None:
    _, plan = settle(with_option(RunConfig(), "trainer.gpu_memory_gib", cap))
    assert plan.gpu_bytes == planned and fractions == [cap / 80]


@pytest.mark.parametrize(("engine", "share"), [(12.0, 36 / 80), (60.0, 1.0)])
def test_a_sleeping_engine_takes_nothing_of_the_cap(fractions: list[float], engine: float, share: float) -> None:
    """torch counts its pages also when they are gone. Seen on an H200: of a cap of 16 GiB a sleeping engine's 11.7
    were missing, and a first forward of 4 GiB found no room."""
    capped = with_option(RunConfig(), "trainer.gpu_memory_gib", 24.0)
    gpu.cap_memory(capped, torch.device("cuda"), int(engine * GIB))
    gpu.cap_memory(capped, torch.device("cpu"), int(engine * GIB))
    gpu.cap_memory(RunConfig(), torch.device("cuda"), int(engine * GIB))
    assert fractions == [share]


@pytest.mark.gpu
def test_torch_allocates_up_to_the_cap_and_what_the_engine_holds() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved(device)
    capped = with_option(RunConfig(), "trainer.gpu_memory_gib", held / GIB + 0.5)
    try:
        gpu.cap_memory(capped, device)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(GIB, dtype=torch.uint8, device=device)
        gpu.cap_memory(capped, device, engine_bytes=GIB)
        assert torch.empty(GIB, dtype=torch.uint8, device=device).numel() == GIB
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        torch.cuda.empty_cache()


def test_a_plan_that_does_not_fit_warns_and_goes_on(
    fractions: list[float], caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    config = with_option(RunConfig(), "trainer.gpu_memory_gib", 16.0)
    config = with_option(config, "actor.fsdp.offload_policy", False)
    with caplog.at_level(logging.WARNING, "fastgrpo"):
        settled, plan = settle(config)
    assert not plan.fits and settled.actor.fsdp.offload_policy is False
    assert "what helps most: actor.fsdp.offload_policy=true" in caplog.text and capsys.readouterr().out == ""


class TestHost:
    """What the run's own nodes have, on made ones."""

    OFFLOAD = with_option(RunConfig(), "actor.gradient_checkpointing", 1)
    OFFLOAD = with_option(OFFLOAD, "actor.max_tokens_per_gpu", 8192)
    OFFLOAD = with_option(OFFLOAD, "actor.fsdp.offload_policy", True)  # 23 GiB of state, 29 as pinned, 10 beside

    @staticmethod
    def has(monkeypatch: pytest.MonkeyPatch, total: float, available: float, own: float = 0.0) -> None:
        memory = HostMemory(int(total * GIB), int(available * GIB))
        monkeypatch.setattr(gpu.host_memory, "read", lambda: memory)
        monkeypatch.setattr(gpu.host_memory, "own_bytes", lambda: int(own * GIB))

    def test_what_is_left_is_planned_for(self, fractions: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
        self.has(monkeypatch, 128, 60, own=2)
        settled, plan = settle(self.OFFLOAD)
        assert plan.fits and settled.trainer.host_memory_gib == 62  # what the rank has taken is its own
        assert plan.job.host_bytes == 62 * GIB

    def test_the_fullest_node_decides(self, fractions: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
        self.has(monkeypatch, 128, 60, own=1)
        settled, _ = settle(self.OFFLOAD, others=(60 * GIB,), hosts=((100 * GIB, 50 * GIB),))
        assert settled.trainer.host_memory_gib == 50

    def test_a_stated_number_stays(self, fractions: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
        self.has(monkeypatch, 128, 30)
        settled, plan = settle(with_option(self.OFFLOAD, "trainer.host_memory_gib", 96.0))
        assert settled.trainer.host_memory_gib == 96 and plan.fits

    def test_a_host_that_is_short_is_said_loudly(
        self, fractions: list[float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        self.has(monkeypatch, 48, 30)
        with caplog.at_level(logging.WARNING, "fastgrpo"):
            settled, plan = settle(self.OFFLOAD)
        assert not plan.fits and plan.shortfall <= 0 and settled.actor.fsdp.offload_policy
        assert "host memory: of the 30.0 GiB of a node it is 9.0 GiB short" in caplog.text
        assert "what helps most: actor.fsdp.offload_policy=false" in caplog.text

    def test_state_above_all_that_there_is_is_refused(
        self, fractions: list[float], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.has(monkeypatch, 23.1, 20)  # 16 x 1,543,714,304 bytes are 23.003 GiB
        settle(self.OFFLOAD)
        self.has(monkeypatch, 22.9, 20)
        for config in (self.OFFLOAD, with_option(self.OFFLOAD, "trainer.host_memory_gib", 96.0)):
            with pytest.raises(
                UserError, match=r"take 23.0 GiB of a node, which has 22.9 GiB: the run would be killed; "
            ):
                settle(config)
        assert settle(RunConfig())[1].fits  # on this GPU it may stay there

    def test_where_nobody_knows_nothing_is_held_against_it(self, fractions: list[float]) -> None:
        settled, plan = settle(self.OFFLOAD)
        assert settled.trainer.host_memory_gib is None and plan.fits


class TestRanksOfAnEngine:
    """Decided from the whole GPU and the cap alone: before the ranks are joined."""

    @pytest.fixture(autouse=True)
    def card(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * GIB))

    @staticmethod
    def decide(world: int, device: str = "cuda", **options: Any) -> int | None:
        config = with_option(RunConfig(), "actor.use_kl_loss", False)
        for key, value in ({"actor__fsdp__offload_policy": True} | options).items():
            config = with_option(config, key.replace("__", "."), value)
        sizes = Sizes(replace(MODEL, heads=16, kv_heads=8, layers=1600), None)
        settled = gpu.settle_engine(config, sizes, Layout.of(config, world), device)
        return settled.rollout.tensor_model_parallel_size

    def test_the_fewest_that_fit(self, capsys: pytest.CaptureFixture[str]) -> None:
        found = [
            self.decide(8),
            self.decide(8, trainer__gpu_memory_gib=30.0),
            self.decide(8, trainer__gpu_memory_gib=500.0),
        ]
        assert found == [4, 8, 4]  # 139 GiB of weights; no cap makes the GPU larger
        assert "rollout.tensor_model_parallel_size=4" in capsys.readouterr().out

    def test_a_stated_number_stays(self) -> None:
        assert self.decide(8, rollout__tensor_model_parallel_size=2) == 2

    def test_one_on_a_cpu_and_for_one_rank(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(torch.cuda, "get_device_properties")
        assert self.decide(8, device="cpu") == 1 and self.decide(1) == 1

    def test_the_ranks_are_joined_as_decided(self, monkeypatch: pytest.MonkeyPatch, tiny_model: Path) -> None:
        class Joined(Exception):
            pass

        def join(device_type: str, **sizes: int) -> None:
            raise Joined(device_type, sizes)

        def settle_engine(config: RunConfig, *given: Any) -> RunConfig:
            return with_option(config, "rollout.tensor_model_parallel_size", 3)

        monkeypatch.setattr(stages, "settle_engine", settle_engine)
        monkeypatch.setattr(stages, "build_mesh", join)
        config = with_option(with_option(RunConfig(), "model.path", str(tiny_model)), "trainer.device", "cpu")
        config = with_option(with_option(config, "data.train_batch_size", 1), "trainer.max_steps", 1)
        config = with_option(with_option(config, "data.max_prompt_length", 64), "data.max_response_length", 8)
        with pytest.raises(Joined) as joined:
            stages.build_stages(config, prompts=["Say hello."], reward=lambda response: 0.0)
        assert joined.value.args == ("cpu", {"sp": 1, "tp": 3, "replicas": 1})


def test_liger_counts_only_where_it_is_installed(fractions: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.liger, "is_installed", lambda: True)
    assert settle(RunConfig())[1].job.liger
    assert not settle(with_option(RunConfig(), "actor.use_torch_compile", True))[1].job.liger
    monkeypatch.setattr(gpu.liger, "is_installed", lambda: False)
    assert not settle(RunConfig())[1].job.liger


def test_on_a_cpu_there_is_no_plan(fractions: list[float]) -> None:
    settled, plan = settle(RunConfig(), device="cpu")
    assert plan is None and settled == settle_on_cpu(with_option(RunConfig(), "actor.use_kl_loss", False))


@pytest.mark.parametrize(("stage", "phase"), [("update", "training"), ("gen", "rollout"), (None, "training")])
def test_an_out_of_memory_error_brings_the_plan_and_one_change(
    fractions: list[float], stage: str | None, phase: str
) -> None:
    settled, plan = settle(RunConfig())
    layout = Layout.of(settled, 1)
    explaining = gpu.explaining_lack_of_memory(settled, plan, layout, lambda: stage)
    with pytest.raises(torch.OutOfMemoryError) as raised, explaining:
        raise torch.OutOfMemoryError("CUDA out of memory.")
    [note] = raised.value.__notes__
    assert note.startswith(f"memory ran out in stage {stage}" if stage else "memory ran out\n")
    assert explain(settled, Sizes(MODEL, None), layout, plan.gpu_bytes, phase=phase) in note
    assert note.count("what helps most: ") == 1


def test_without_a_plan_the_error_goes_on_as_it_is() -> None:
    explaining = gpu.explaining_lack_of_memory(RunConfig(), None, Layout.of(RunConfig(), 1), lambda: "update")
    with pytest.raises(torch.OutOfMemoryError) as raised, explaining:
        raise torch.OutOfMemoryError("CUDA out of memory.")
    assert not hasattr(raised.value, "__notes__")
