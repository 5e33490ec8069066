"""What a start records, without secrets, and the difference of two runs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from fastgrpo import diff
from fastgrpo.diff import differences, last_start
from fastgrpo.errors import UserError
from fastgrpo.provenance import environment, git_state, versions


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *identity, "-C", str(folder), *arguments], check=True, capture_output=True)


def test_state_of_the_code(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None
    git(tmp_path, "init", "-b", "trunk")
    file = tmp_path / "sub" / "a.py"
    file.parent.mkdir()
    file.write_text("1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "one")
    clean = git_state(file.parent)
    assert clean is not None and clean["branch"] == "trunk" and clean["changed"] == [] and clean["diff"] == ""
    assert len(clean["commit"]) == 40
    file.write_text("2\n")
    (tmp_path / "untracked").write_text("x")
    changed = git_state(tmp_path)
    assert changed is not None and changed["commit"] == clean["commit"] and changed["changed"] == ["sub/a.py"]
    assert changed["diff"].endswith("-1\n+2\n")


def test_environment_without_secrets() -> None:
    kept = {"NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "0", "HF_HOME": "/c", "OMP_NUM_THREADS": "1"}
    secret = {
        "HF_TOKEN": "x",
        "VLLM_API_KEY": "x",
        "HF_AUTH": "x",
        "FASTGRPO_PASSWORD": "x",
        "PATH": "/bin",
        "HOME": "/",
    }
    assert environment(kept | secret) == kept
    assert environment(kept | dict.fromkeys(diff.PER_PROCESS, "x")) == kept


def test_versions() -> None:
    found = versions()
    assert {"fastgrpo", "python", "torch", "transformers"} <= found.keys()
    assert all(found.values())


A = {
    "config": {"rollout": {"n": 8, "name": "hf"}, "data": {"train_files": ["a"]}},
    "versions": {"torch": "2.13", "vllm": "0.31"},
    "code": {"fastgrpo": {"commit": "a" * 60}},
    "time": "then",
}
B = {
    "config": {"rollout": {"n": 16, "name": "hf"}, "data": {"train_files": ["a"]}},
    "versions": {"torch": "2.13"},
    "code": {"fastgrpo": {"commit": "b" * 60}},
    "time": "now",
}


def test_differences() -> None:
    assert differences(A, A | {"time": "later"}) == []
    lines = [line.split() for line in differences(A, B)]
    assert lines == [
        ["config", "rollout.n", "8", "16"],
        ["code", "fastgrpo.commit", "a" * 41 + "...", "b" * 41 + "..."],
        ["versions", "vllm", "0.31", "-"],
    ]


def test_two_processes_of_one_run_do_not_differ() -> None:
    def start(suffix: str, **more: str) -> dict:
        names = ("VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME", "FASTGRPO_STATUS_FILE", "SLURM_JOB_ID")
        return A | {"environment": {name: suffix for name in names} | more}

    assert differences(start("a"), start("b")) == []
    assert differences(start("a"), A) == []
    found = differences(start("a", VLLM_USE_V1="0"), start("b", VLLM_USE_V1="1"))
    assert [line.split() for line in found] == [["environment", "VLLM_USE_V1", "0", "1"]]


def test_long_values_are_shown_from_where_they_differ() -> None:
    command = "/usr/bin/python -m fastgrpo.train +exp=quickstart trainer.max_steps=30 "
    [line] = differences({"command": f"{command}rollout.n=4"}, {"command": f"{command}rollout.n=16"})
    assert line.split() == ["command", "...0", "rollout.n=4", "...0", "rollout.n=16"]
    [line] = differences({"command": command}, {"command": f"{command}rollout.n=16 {'x' * 60}"})
    assert line.split()[1:] == ["...max_steps=30", "...max_steps=30", "rollout.n=16", "x" * 12 + "..."]
    [line] = differences({"command": command}, {})
    assert line.split() == ["command", *command[:41].split()[:-1], command[:41].split()[-1] + "...", "null"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, starts in (("a", [B, A]), ("b", [B])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "starts.jsonl").write_text("".join(json.dumps(start) + "\n" for start in starts))
    assert last_start(tmp_path / "a") == A
    assert diff.main([str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert diff.main([str(tmp_path / "b"), str(tmp_path / "b")]) == 0
    assert capsys.readouterr().out == "no difference\n"
    assert diff.main([str(tmp_path / "a"), str(tmp_path / "c")]) == 2
    assert "starts.jsonl cannot be read" in capsys.readouterr().err
    assert diff.main([]) == 2
    assert capsys.readouterr().err == "usage: python -m fastgrpo.diff RUN_A RUN_B\n--help says what is compared\n"
    assert diff.main(["--help"]) == 0
    told = capsys.readouterr().out
    assert (
        told.startswith("usage: python -m fastgrpo.diff RUN_A RUN_B\n") and "Exit status as diff's: 0 the same" in told
    )
    with pytest.raises(UserError, match=r"is .* a run folder"):
        last_start(tmp_path)
