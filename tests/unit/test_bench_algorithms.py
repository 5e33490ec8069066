"""bench_algorithms.py: what counts as a rise, and that runs share one engine."""

from __future__ import annotations

import json
import math

import pytest

import bench_algorithms
from bench_algorithms import main, rise


def test_rise_in_standard_errors():
    low, high = [0.1, 0.3] * 5, [0.5, 0.7] * 5
    record = rise([*low, 0.0, *high])
    variance = 10 * 0.1**2 / 9  # of ten values, each 0.1 from their mean
    assert record["first"] == pytest.approx(0.2) and record["last"] == pytest.approx(0.6)
    assert record["standard_errors"] == pytest.approx(0.4 / math.sqrt(2 * variance / 10), abs=0.01) and record["rose"]
    assert not rise(low + low)["rose"] and not rise(high + low)["rose"]
    assert not rise([0.1, 0.9])["rose"]  # too short to say


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
