"""bench_resume.py: what it takes for a difference, and a whole comparison on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import bench_resume

ROW = {"step": 3, "actor/loss": 0.25, "timing_s/step": 1.0, "perf/train_peak_gib": 2.0}


def run_folder(root: Path, answer: str = "4", weight: float = 1.0, **metrics: float) -> Path:
    run = root / "quickstart-1"
    (run / "rollouts").mkdir(parents=True)
    (run / "model").mkdir()
    (run / "metrics.jsonl").write_text(json.dumps(ROW | metrics) + '\n{"step": 4, "half a ro')
    (run / "rollouts" / "step_000003.jsonl").write_text(answer)
    save_file({"w": torch.tensor([weight])}, run / "model" / "model.safetensors")
    return run


@pytest.mark.parametrize(
    ("changed", "differs"),
    [
        ({}, None),
        ({"timing_s/step": 9.0, "perf/train_peak_gib": 9.0}, None),
        ({"answer": "5"}, "answers"),
        ({"actor/loss": 0.25 + 2**-52}, "metrics"),
        ({"weight": 1.0 + 2**-23}, "weights"),
    ],
)
def test_a_difference_of_one_bit_is_seen(changed, differs, tmp_path):
    right, run = run_folder(tmp_path / "a"), run_folder(tmp_path / "b", **changed)
    assert bench_resume.compare(run, right) == {name: name != differs for name in ("answers", "metrics", "weights")}
    assert [row["step"] for row in bench_resume.rows_of(tmp_path / "b")] == [3]


@pytest.mark.slow
def test_stopped_and_resumed_on_a_cpu(tiny_model, tmp_path):
    out = tmp_path / "resume.json"
    small = ["data.train_batch_size=2", "rollout.n=2", "data.max_response_length=4", "data.max_prompt_length=256"]
    words = [f"model.path={tiny_model}", "rollout.name=hf", "trainer.device=cpu", "data.val_files=[]", *small]
    assert bench_resume.main(["--steps", "40", "--stop", "2", "--cost", "--out", str(out), *words]) == 0
    record = json.loads(out.read_text())
    assert record["equal"] == {"answers": True, "metrics": True, "weights": True}
    assert 2 <= record["stopped_after_step"] < 40
    assert record["unbroken"]["steps"] == [1, 40] and record["resumed"]["steps"] == [
        record["stopped_after_step"] + 1,
        40,
    ]
    assert record["unbroken_after_the_stop"] | {"seconds_of_a_step": 0} == record["resumed"] | {"seconds_of_a_step": 0}
    assert record["not_deterministic"]["steps"] == [1, 40]
