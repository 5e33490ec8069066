"""Validation alone and beside training: several sets, several samples, the metrics against the answers in the files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases import one_process

from fastgrpo import Trainer
from fastgrpo.config import build
from fastgrpo.errors import ConfigError
from fastgrpo.val_metrics import pass_at_k


def write(path: Path, count: int) -> str:
    path.write_text("".join(json.dumps({"prompt": f"Count to {i}.", "reference": "7"}) + "\n" for i in range(count)))
    return str(path)


def make_reward() -> Callable[[str], dict[str, Any]]:
    """Made inside a function, so that a worker is sent its code and does not import this file, torch and all."""

    def reward(response: str) -> dict[str, Any]:
        score = float(sum(map(ord, response)) % 3)
        return {"score": score, "pred": f"{score}"}

    return reward


def document(folder: Path, model: Path, **trainer: Any) -> dict[str, Any]:
    return {
        "model": {"path": str(model)},
        "data": {
            "train_files": [write(folder / "train.jsonl", 4)],
            "val_files": [write(folder / "easy.jsonl", 3), write(folder / "hard.jsonl", 5)],
            "val_max_samples": 4,
            "train_batch_size": 2,
            "max_prompt_length": 64,
            "max_response_length": 4,
        },
        "reward": {"num_workers": 1},
        "rollout": {"name": "hf", "n": 2, "val_kwargs": {"n": 3, "temperature": 1.0, "pass_score": 2.0}},
        "actor": {"use_kl_loss": False},
        "trainer": {"device": "cpu", "run_dir": str(folder / "runs"), "logger": ["console"], "max_steps": 1} | trainer,
    }


def run(config: dict[str, Any]) -> None:
    with one_process():
        Trainer(build(config), reward=make_reward()).run()


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_val_only_measures_and_ends(tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(document(tmp_path, tiny_model, val_only=True))
    said = capsys.readouterr().out
    [folder] = (tmp_path / "runs").iterdir()
    [row] = rows(folder / "metrics.jsonl")
    assert not {"rollouts", "model", "finished", "checkpoints"} & {path.name for path in folder.iterdir()}
    answers = rows(folder / "validation" / "step_000000.jsonl")
    assert len(answers) == (3 + 4) * 3  # val_max_samples is of each set
    for name, prompts in (("easy", 3), ("hard", 4)):
        own = [answer for answer in answers if answer["uid"].startswith(f"{name}/val/")]
        groups = [[a["reward"] for a in own if a["uid"] == uid] for uid in dict.fromkeys(a["uid"] for a in own)]
        assert len(groups) == prompts and row[f"val/{name}/scored"] == 3 * prompts
        assert row[f"val/{name}/mean@3"] == pytest.approx(sum(sum(group) / 3 for group in groups) / prompts)
        for k in (1, 2, 3):
            expected = sum(pass_at_k(3, group.count(2.0), k) for group in groups) / prompts
            assert row[f"val/{name}/pass@{k}"] == pytest.approx(expected)
            assert row[f"val/{name}/pass@{k}/low"] <= expected <= row[f"val/{name}/pass@{k}/high"]
        assert 0 <= row[f"val/{name}/maj@3"] <= 1
        assert all(answer["pred"] == str(answer["reward"]) for answer in own)
        assert f"  {name}: mean@3 " in said
    assert row["val/reward"] == pytest.approx(sum(answer["reward"] for answer in answers) / len(answers))


@pytest.mark.slow
def test_the_best_checkpoint_is_by_a_sets_own_metric(tmp_path: Path, tiny_model: Path) -> None:
    options = {"save_freq": 1, "test_freq": 1, "max_steps": 2, "best_metric": "val/hard/mean@3", "max_ckpt_to_keep": 1}
    run(document(tmp_path, tiny_model, **options))
    [folder] = (tmp_path / "runs").iterdir()
    scores = {row["step"]: row["val/hard/mean@3"] for row in rows(folder / "metrics.jsonl") if "val/reward" in row}
    assert sorted(scores) == [0, 1, 2]
    best = max((1, 2), key=lambda step: (scores[step], step))
    assert (folder / "checkpoints" / "best").read_text() == f"step_{best:06d}\n"
    manifest = json.loads((folder / "checkpoints" / f"step_{best:06d}" / "checkpoint.json").read_text())
    assert manifest["metric"] == scores[best]
    # The finished run, by its path: what its last weights say again, in a folder of its own.
    before = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    run(document(tmp_path, tiny_model, val_only=True, resume=str(folder), max_steps=2))
    assert before == {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    [own] = (path for path in (tmp_path / "runs").iterdir() if path != folder)
    [again] = rows(own / "metrics.jsonl")
    assert again == [row for row in rows(folder / "metrics.jsonl") if "val/reward" in row][-1]
    assert own.name.endswith("-val") and (own / "validation" / "step_000002.jsonl").is_file()
    [start] = rows(own / "starts.jsonl")
    assert start["resumed_from"] == str(folder / "checkpoints" / "step_000002")


def test_a_best_metric_that_cannot_come_is_refused_before_anything_is_loaded(tmp_path: Path, tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)best_metric=val/hard/pass@7 is no metric of this run.*val/hard/pass@3"):
        run(document(tmp_path, tiny_model, best_metric="val/hard/pass@7"))
    assert not (tmp_path / "runs").exists()
