"""bench_algorithms.py: what counts as a rise, and that runs share one engine."""

from __future__ import annotations

import json
import math

import pytest

import bench_algorithms
from bench_algorithms import main, rise


def test_rise_in_standard_errors():
    record = rise([0.2, 0.2, 0.9, *[0.8] * 10], samples=128)
    variance = 0.2 * 0.8 / 256 + 0.8 * 0.2 / 1280
    assert record["first"] == 0.2 and record["last"] == 0.8 and record["rose"]
    assert record["standard_errors"] == pytest.approx(0.6 / math.sqrt(variance), abs=0.06)
    assert not rise([0.5] * 12, samples=128)["rose"] and not rise([0.8] * 4 + [0.2] * 10, samples=128)["rose"]
    assert not rise([0.5, 0.5, *[0.6] * 10], samples=16)["rose"]  # 1.1 standard errors
    assert not rise([0.1, 0.9], samples=128)["rose"]  # too short to say


def test_runs_share_one_engine(tiny_model, tmp_path, monkeypatch):
    built = []
    run = bench_algorithms.run

    def watched(words, engine):
        record, used = run(words, engine)
        built.append((engine, used))
        return record, used

    monkeypatch.setattr(bench_algorithms, "run", watched)
    out = tmp_path / "algorithms.json"
    small = ["data.train_batch_size=2", "rollout.n=2", "data.max_response_length=4", "data.max_prompt_length=256"]
    words = [f"model.path={tiny_model}", "rollout.name=hf", "trainer.device=cpu", *small]
    assert main(["--runs", "grpo", "dr_grpo", "--steps", "2", "--out", str(out), *words]) == 0
    content = json.loads(out.read_text())
    assert list(content["runs"]) == ["grpo", "dr_grpo"]
    assert built[0][0] is None and built[1][0] is built[0][1] is built[1][1]
    # had the second run's weights not reached the engine, its first step would have stopped at the gate
    assert [len(record["reward"]) for record in content["runs"].values()] == [2, 2]
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
