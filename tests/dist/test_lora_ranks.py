"""Adapters on several ranks: the same update as on one, and a run that is stopped goes on as if nothing had been."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import one_update
from safetensors.torch import load_file
from small_runs import SmallRuns, document

from fastgrpo.checkpoint.tensors import read_index
from fastgrpo.policy.lora import Lora, is_adapter

LORA = Lora(5, 16, ("all-linear",), 0, "base")  # 5 rows of A on 2 ranks: 3 and 2
SAVED = 75


@pytest.mark.parametrize(
    ("tied", "layout"), [(True, {"max_tokens_per_gpu": 60}), (False, {"sp": 2, "gradient_checkpointing": 1})]
)
def test_an_update_is_that_of_one_process(
    mesh: Any, ranks: Callable[[int], Any], make_tiny_model: Callable[..., Path], tied: bool, layout: dict[str, Any]
) -> None:
    folder = make_tiny_model("qwen2", tied=tied)
    expected = one_update(folder, mesh=mesh, lora=LORA, updates=2)
    for actual in ranks(2).run(one_update, folder, lora=LORA, updates=2, **layout):
        for name in ("loss", "grad_norm", "kl", "entropy", "gap_abs", "ratio"):
            assert actual[name] == pytest.approx(expected[name], rel=1e-5), name
        gradients, right = actual["gradients"], expected["gradients"]
        assert gradients.keys() == right.keys() and all(is_adapter(name) for name in right)
        for name, gradient in right.items():
            assert gradient.norm() > 0 and (gradients[name] - gradient).norm() < 1e-4 * gradient.norm(), name
        for name, move in expected["moves"].items():
            if is_adapter(name):
                assert move.any() and (actual["moves"][name] - move).norm() < 1e-3 * move.norm(), name
            else:
                assert not actual["moves"][name].any() and not move.any(), name
    assert expected["kl"] > 1e-3  # against the base


def rows(run: Path) -> list[dict[str, Any]]:
    read = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(("timing_s/", "perf/"))} for row in read]


@pytest.mark.slow
def test_a_stopped_run_goes_on_bit_for_bit(tiny_model: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "model__lora_rank": 5,
        "actor__use_kl_loss": True,
        "actor__kl_loss_coef": 0.1,
        "actor__optim__lr": 1e-2,
        "trainer__save_merged": True,
    }
    (tmp_path / "outputs").mkdir()
    server = SmallRuns(tmp_path / "outputs")
    try:
        server.start(2, document(tmp_path / "whole", tiny_model, **options)).finish()
        configured = document(tmp_path / "broken", tiny_model, **options)
        stopped = server.start(2, configured, faults="stop_in_the_rollout_of_step_3")
        assert stopped.wait() == [SAVED] * 2, stopped.output()
        server.start(2, configured).finish()
    finally:
        server.close()
    [right], [run] = (tmp_path / "whole").iterdir(), (tmp_path / "broken").iterdir()
    assert rows(run) == rows(right)
    assert [row["step"] for row in rows(run)] == [1, 2, 3, 4]
    assert rows(run)[0]["actor/kl"] == 0 and rows(run)[-1]["actor/kl"] > 0  # the reference is the base
    assert all(row["gap/abs_mean"] < 1e-5 for row in rows(run))  # the engine had the merged weights
    for name in ("adapter/adapter_model", "checkpoints/step_000004/adapter/adapter_model", "model/model"):
        actual, expected = (load_file(folder / f"{name}.safetensors") for folder in (run, right))
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[key], expected[key]) for key in expected)
    final, saved = (load_file(run / n / "adapter_model.safetensors") for n in ("adapter", "checkpoints/step_000004/adapter"))
    assert all(torch.equal(final[key], saved[key]) for key in final)  # out of the policy and out of the shards
    assert any(final[key].any() for key in final if "lora_B" in key)
    kept = read_index(run / "checkpoints" / "step_000004" / "state").state_dict_metadata
    assert len(kept) == 4 * len(final) and all(is_adapter(key) for key in kept)  # masters, two moments, a counter
    assert not (run / "checkpoints" / "step_000004" / "model").exists()
