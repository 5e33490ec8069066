"""The README does what it says: its Python and its own-experiment example are run from its text, and every other
command block is either marked with the hardware it needs or known to be run elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from ast import literal_eval
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
# Run by a test of their own: the quickstart below (slow), the own experiment below, the plan in test_plan_choice.py.
PLAN = "python -m fastgrpo.plan --shapes bench/shapes"
RUN_HERE = {"make quickstart", ".venv/bin/python -m fastgrpo.train +exp=capitals.yaml"}


def blocks(language: str) -> list[tuple[str, str]]:
    """(the line before it, text) of each fenced block."""
    found = re.findall(rf"^([^\n]*)\n```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    return [(before, text.strip()) for before, text in found]


def run(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environ = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    environ |= {"OMP_NUM_THREADS": "1"}
    return subprocess.run(arguments, cwd=folder, env=environ, capture_output=True, text=True, timeout=300)


def test_every_command_block_is_run_or_names_its_hardware() -> None:
    commands = blocks("bash")
    assert len(commands) >= 4
    for before, text in commands:
        assert before.startswith("<!-- needs: ") or text in RUN_HERE or PLAN in text, text


def test_python_example(tmp_path: Path, tiny_model: Path) -> None:
    [(_, source)] = [block for block in blocks("python") if "Trainer(" in block[1]]
    assert MODEL in source
    script = tmp_path / "example.py"
    script.write_text(source.replace(MODEL, str(tiny_model)))
    done = run([sys.executable, str(script)], tmp_path)
    assert done.returncode == 0, done.stderr
    printed = dict(line.split(" ", 1) for line in done.stdout.strip().splitlines()[-4:])
    rewards, means, advantages, kl = (literal_eval(printed[n]) for n in ("rewards", "means", "advantages", "kl"))
    assert [len(group) for group in rewards] == [3, 3]
    for group, mean, advantage in zip(rewards, means, advantages, strict=True):
        assert mean == pytest.approx(sum(group) / 3)
        assert sum(advantage) == pytest.approx(0, abs=1e-6)
    assert kl == pytest.approx(0, abs=1e-6)  # the policy still is its reference


def test_own_data_reward_and_experiment(tmp_path: Path, tiny_model: Path) -> None:
    [(_, row)] = blocks("json")
    [reward] = [text for _, text in blocks("python") if "compute_score" in text]
    [(_, experiment)] = blocks("yaml")
    (tmp_path / "capitals.jsonl").write_text((row + "\n") * 4)
    (tmp_path / "capitals.py").write_text(reward)
    (tmp_path / "capitals.yaml").write_text(experiment)
    [(_, command)] = [block for block in blocks("bash") if "capitals.yaml" in block[1]]
    arguments = command.replace(".venv/bin/python", sys.executable).split()
    small = [
        "data.max_prompt_length=200",
        "rollout.name=hf",
        "trainer.device=cpu",
        "trainer.max_steps=1",
        f"model.path={tiny_model}",
    ]
    done = run([*arguments, *small], tmp_path)
    assert done.returncode == 0, done.stderr
    [folder] = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("capitals-")
    assert "(n=4)" in done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_quickstart_command() -> None:
    done = subprocess.run(
        ["make", "quickstart", "QUICKSTART_ARGS=trainer.max_steps=1 data.arithmetic.val_size=2"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"validation before \d\.\d\d after \d\.\d\d \(n=8\) in \d+ s: runs/quickstart-", done.stdout)
