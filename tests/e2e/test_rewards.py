"""A step and a validation with a mixture: rules in workers, a reward model in this process, labels in a file, and a
function whose weight follows the step. What each sample got is worked out again from its parts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import one_process

from fastgrpo import Trainer
from fastgrpo.checkpoint.folders import find_checkpoints
from fastgrpo.config import RunConfig, build
from fastgrpo.errors import UserError
from fastgrpo.reward.reward_model import ModelReward
from fastgrpo.stopping import Stopped

PROMPTS = ["Say hello.", "Name a colour."]


@pytest.fixture(scope="module")
def reward_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    folder = tmp_path_factory.mktemp("reward-model")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model("llama", vocab_size=len(tokenizer), num_labels=1, initializer_range=0.5, **sizes)
    config.pad_token_id = tokenizer.pad_token_id
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture
def trainer(tiny_model: Path, reward_model: Path, tmp_path: Path) -> Iterator[Trainer]:
    labels = [{"uid": f"prompts/train/{i}", "sample": 0, "score": i + 1} for i in range(2)]
    (tmp_path / "labels.jsonl").write_text("\n".join(map(json.dumps, labels)))
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": text}) for text in PROMPTS))
    (tmp_path / "mine.py").write_text("def compute_score(response, step):\n    return step * len(response)\n")
    functions: dict[str, Any] = {
        "rule": {"kind": "rules", "rules": [{"pattern": "[a-m]", "score": 1.0}], "weight": 0.7},
        "small_model": {"kind": "model", "path": str(reward_model), "weight": 0.3},
        "people": {"kind": "file", "path": str(tmp_path / "labels.jsonl"), "weight": 0.0},
        "later": {"kind": "custom", "path": str(tmp_path / "mine.py"), "weight": 0.01},
    }
    files = [str(tmp_path / "prompts.jsonl")]
    config = build(
        {
            "model": {"path": str(tiny_model)},
            "data": {"train_files": files, "val_files": files, "train_batch_size": 2, "max_prompt_length": 64}
            | {"max_response_length": 8, "reference_key": None},
            "reward": {"functions": functions, "num_workers": 1},
            "rollout": {"name": "hf", "n": 3},
            "trainer": {"device": "cpu", "max_steps": 2},
            "actor": {"use_kl_loss": False, "optim": {"lr": 1e-3}},
        }
    )
    with one_process():
        made = Trainer(config)
        yield made
        made.stages.rewards.close()


def test_a_mixture_in_a_step_and_a_validation(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    awake: list[bool] = []  # what the engine was while the reward model scored
    engine, outcomes = trainer.stages.engine, ModelReward.outcomes

    def watched(self: ModelReward, requests: Any) -> Any:
        try:
            engine.generate([], trainer.stages.sampling)
            awake.append(True)
        except RuntimeError:
            awake.append(False)
        return outcomes(self, requests)

    monkeypatch.setattr(ModelReward, "outcomes", watched)
    for step in range(2):
        record = trainer.step()
        rows = trainer._rows
        assert [row["reward"] for row in rows] == [reward for group in record.rewards_PG for reward in group]
        for row in rows:
            parts = row["parts"]
            assert parts["rule"] == float(any(letter in "abcdefghijklm" for letter in row["response"].rstrip()))
            assert parts["later"] == step * len(row["response"])
            assert parts["people"] == (int(row["uid"][-1]) + 1 if row["sample"] == 0 else None)
            expected = 0.7 * parts["rule"] + 0.3 * parts["small_model"] + 0.01 * parts["later"]
            assert row["reward"] == pytest.approx(expected, abs=1e-12)
        model_scores = [row["parts"]["small_model"] for row in rows]
        assert record.metrics["reward/part/small_model"] == pytest.approx(sum(model_scores) / 6)
        assert record.metrics["reward/part/people"] == 1.5
        # `people` only watches (weight 0): what it cannot score is trained all the same
        assert (record.metrics["reward/scored"], record.metrics["reward/unscored"]) == (6.0, 0.0)
    assert trainer.validate().score is not None
    assert awake == [False] * 3


def scored_by(path: Path, model: Path, folder: Path, **trainer: Any) -> RunConfig:
    return build(
        {
            "model": {"path": str(model)},
            "data": {"train_batch_size": 2, "max_prompt_length": 64, "max_response_length": 8, "reference_key": None},
            "reward": {
                "functions": {"mine": {"kind": "custom", "path": str(path)}},
                "num_workers": 1,
                "max_unscored_steps": 2,
                "timeout_s": 0.3,
            },
            "rollout": {"name": "hf", "n": 3},
            "trainer": {"device": "cpu", "total_epochs": 6, "run_dir": str(folder), "logger": [], **trainer},
            "actor": {"use_kl_loss": False, "optim": {"lr": 1e-3}},
        }
    )


def read_rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_an_outage_of_the_reward_ends_the_run_saved(tiny_model: Path, tmp_path: Path) -> None:
    """Scores for one step, then none: two steps are counted and make no update, and the state after them is kept."""
    (tmp_path / "mine.py").write_text("def compute_score(response, step):\n    return len(response) / (step < 1)\n")
    config = scored_by(tmp_path / "mine.py", tiny_model, tmp_path / "runs")
    with one_process(), pytest.raises(Stopped, match="2 steps in a row without a scored sample") as stopped:
        Trainer(config, prompts=PROMPTS).run()
    assert stopped.value.exit_code == 1
    [folder] = (tmp_path / "runs").iterdir()
    rows = read_rows(folder)
    assert [row["actor/updates"] for row in rows] == [1, 0, 0]
    assert [row["reward/error"] for row in rows] == [0, 6, 6] and "reward/mean" not in rows[2]
    [saved] = find_checkpoints(folder / "checkpoints").complete
    assert saved[1].step == 3 and saved[1].parts["actor"]["version"] == 1


def test_a_bad_value_late_in_a_run_loses_no_step(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sample of step 3: the two steps before are kept, and a corrected function goes on from them when allowed."""
    code = tmp_path / "mine.py"
    code.write_text(
        "def compute_score(response, step, sample):\n"
        "    return float('inf') if (step, sample) == (2, 1) else len(response) / 8\n"
    )
    config = scored_by(code, tiny_model, tmp_path / "runs", max_steps=3, save_freq=3)
    config = replace(config, trainer=replace(config.trainer, logger=["console"]))
    with one_process(), pytest.raises(UserError, match=r"for sample 1 of prompt \S+, after 2 steps\)") as stopped:
        Trainer(config, prompts=PROMPTS).run()
    assert isinstance(stopped.value, Stopped) and stopped.value.exit_code == 2
    [folder] = (tmp_path / "runs").iterdir()
    told = capsys.readouterr()
    allow = "trainer.resume_allow=[reward.functions.mine.path]"
    said = "stopped by the mistake above after step 2; trainer.resume=auto goes on from here, with the reward corrected"
    assert f"{said} and {allow}: {folder}" in told.out + told.err
    [saved] = find_checkpoints(folder / "checkpoints").complete
    assert saved[1].step == 2
    code.write_text("def compute_score(response):\n    return len(response) / 8\n")
    with one_process(), pytest.raises(UserError, match="mine"):
        Trainer(config, prompts=PROMPTS).run()
    allowed = replace(config, trainer=replace(config.trainer, resume_allow=["reward.functions.mine.path"]))
    with one_process():
        Trainer(allowed, prompts=PROMPTS).run()
    assert [row["step"] for row in read_rows(folder)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("fails", "counted"),
    [("raise OSError('down')", "error"), pytest.param("time.sleep(9)", "timeout", marks=pytest.mark.slow)],
)
def test_an_outage_at_a_resumed_start_is_one_too(fails: str, counted: str, tiny_model: Path, tmp_path: Path) -> None:
    """The judge is down from the first batch of a start on: a mistake of the user's in a new run, or with another
    function, and in a validation alone; waited for and saved in a run that has a checkpoint."""
    code, down = tmp_path / "mine.py", tmp_path / "down"
    text = f"import os, time\ndef compute_score(response):\n    if os.path.exists({str(down)!r}):\n        {fails}\n"
    code.write_text(f"{text}    return len(response) / 8\n")
    config = scored_by(code, tiny_model, tmp_path / "runs", save_freq=1, max_steps=1)
    more = replace(config, trainer=replace(config.trainer, max_steps=5))

    def run(configured: RunConfig) -> None:
        made = Trainer(configured, prompts=PROMPTS)
        try:
            made.run()
        finally:
            made.stages.rewards.close()

    def refused(configured: RunConfig) -> None:
        with one_process(), pytest.raises(UserError, match=r"failed on all \d samples|answered none of the first"):
            run(configured)

    down.touch()
    refused(replace(config, trainer=replace(config.trainer, resume="never", run_dir=str(tmp_path / "others"))))
    down.unlink()
    with one_process():
        run(config)
    [folder] = (tmp_path / "runs").iterdir()
    down.touch()
    validated = replace(more.data, val_files=["arithmetic"], val_max_samples=5)
    refused(replace(more, trainer=replace(more.trainer, val_only=True), data=validated))
    with one_process(), pytest.raises(Stopped, match="2 steps in a row without a scored sample") as stopped:
        run(more)
    assert stopped.value.exit_code == 1
    assert [row[f"reward/{counted}"] for row in read_rows(folder)[1:]] == [6, 6]
    assert [row["actor/updates"] for row in read_rows(folder)] == [1, 0, 0]
    code.write_text(code.read_text() + "# another one\n")
    changed = replace(more, trainer=replace(more.trainer, resume_allow=["reward.functions.mine.path"]))
    refused(changed)
    down.unlink()
    with one_process():
        run(changed)
    assert [row["actor/updates"] for row in read_rows(folder)] == [1, 0, 0, 1, 1]
