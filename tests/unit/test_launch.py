"""Counting GPUs, choosing the device, and the program's own start under torchrun."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastgrpo import console, launch
from fastgrpo.config import Device, RunConfig, TrainerConfig
from fastgrpo.errors import ConfigError, UserError
from fastgrpo.launch import GUARD, Launch, count_gpus, plan, resolve_device, torchrun_argv, torchrun_environ


def wanting(n: int, device: str = "auto") -> RunConfig:
    return RunConfig(trainer=TrainerConfig(n_gpus_per_node=n, device=Device[device]))


def with_gpus(folder: Path, count: int, status: int = 0) -> dict[str, str]:
    """An environment whose nvidia-smi lists `count` GPUs."""
    listing = "".join(
        f"GPU {i}: NVIDIA A100 (UUID: GPU-{i})\n  MIG 1g.10gb Device 0: (UUID: MIG-{i})\n" for i in range(count)
    )
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n[ \"$1\" = -L ] && printf '%s' '{listing}'\nexit {status}\n")
    program.chmod(0o755)
    return {"PATH": str(folder)}


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 4),
        ("", 0),
        ("-1", 0),
        ("2", 1),
        ("0,1", 2),
        (" 0, 3 ", 2),
        ("0,7,1", 1),  # CUDA's list ends at the device that is not there
        ("0,-1,1", 1),
        ("GPU-0,GPU-1,GPU-2", 3),
    ],
)
def test_gpus_are_counted_without_torch(tmp_path: Path, visible: str | None, count: int) -> None:
    environ = with_gpus(tmp_path, 4) | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    assert count_gpus(environ) == count


def test_gpus_without_nvidia_smi(tmp_path: Path) -> None:
    assert count_gpus({"PATH": str(tmp_path)}) == 0
    assert count_gpus({"PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "0,1"}) == 2  # the variable is all there is


def test_gpus_with_a_driver_that_fails(tmp_path: Path) -> None:
    environ = with_gpus(tmp_path, 0, status=9)
    assert count_gpus(environ) == 0
    assert count_gpus(environ | {"CUDA_VISIBLE_DEVICES": "0"}) == 0


def test_a_driver_that_hangs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexec /bin/sleep 5\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setattr(launch, "_NVIDIA_SMI_TIMEOUT_S", 0.1)
    with pytest.raises(UserError, match=r"nvidia-smi has not answered for 0.1 s"):
        count_gpus({"PATH": str(tmp_path)})


@pytest.mark.parametrize(
    ("wanted", "device", "found", "ranks", "resolved"),
    [
        (1, "auto", 0, 1, "cpu"),
        (1, "auto", 1, 1, "cuda"),
        (1, "auto", 0, 2, "cpu"),  # two processes asked for by torchrun, on an experiment for any machine
        (8, "auto", 8, 8, "cuda"),
        (8, "auto", 2, 2, "cuda"),  # torchrun --nproc-per-node=2 is used as it stands
        (8, "cpu", 8, 8, "cpu"),
        (8, "cpu", 0, 8, "cpu"),
        (2, "cuda", 2, 2, "cuda"),
    ],
)
def test_device(wanted: int, device: str, found: int, ranks: int, resolved: str) -> None:
    assert resolve_device(wanting(wanted, device), found, ranks) == resolved


@pytest.mark.parametrize(
    ("wanted", "device", "found", "ranks", "fragments"),
    [
        (8, "auto", 0, 8, ["8 GPUs wanted", "trainer.n_gpus_per_node=8", "0 found", "or set trainer.device=cpu"]),
        (8, "auto", 2, 8, ["2 found", "set trainer.n_gpus_per_node=2", "or trainer.device=cpu"]),
        (1, "cuda", 0, 1, ["1 GPUs wanted", "trainer.device=cuda", "0 found"]),
        (1, "auto", 1, 2, ["2 GPUs wanted", "1 found"]),
        (8, "auto", 0, 2, ["2 GPUs wanted", "0 found"]),
    ],
)
def test_missing_gpus(wanted: int, device: str, found: int, ranks: int, fragments: list[str]) -> None:
    with pytest.raises(UserError) as refused:
        resolve_device(wanting(wanted, device), found, ranks)
    for fragment in fragments:
        assert fragment in str(refused.value)


@pytest.mark.parametrize(
    ("wanted", "environ", "planned"),
    [
        (1, {}, Launch(1, 1, False)),
        (8, {}, Launch(8, 8, True)),
        (8, {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "RANK": "0"}, Launch(8, 8, True)),
        (8, {"WORLD_SIZE": "1", GUARD: "1"}, Launch(1, 1, False)),
        (8, {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, Launch(2, 2, False)),
        (8, {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, Launch(16, 8, False)),
        (8, {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "GROUP_RANK": "1"}, Launch(16, 8, False, first_node=False)),
        (8, {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8", GUARD: "1"}, Launch(8, 8, False)),
        (0, {}, Launch(1, 1, False)),  # refused by the rules
    ],
)
def test_plan(wanted: int, environ: dict[str, str], planned: Launch) -> None:
    assert plan(wanting(wanted), environ) == planned


def test_relaunch_is_torchrun_with_the_same_arguments() -> None:
    assert torchrun_argv(8, ["+exp=gsm8k_8xa100", "data.prompt_suffix=' a b'"]) == [
        sys.executable,
        "-m",
        "fastgrpo.torchrun",
        "--standalone",
        "--nproc-per-node=8",
        "-m",
        "fastgrpo.train",
        "+exp=gsm8k_8xa100",
        "data.prompt_suffix=' a b'",
    ]


def test_relaunch_strips_the_parent_agent() -> None:
    environ = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_RANK": "0",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1234",
        "TORCHELASTIC_RUN_ID": "x",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "PATH": "/bin",
        "HF_HOME": "/cache",
    }
    assert torchrun_environ(4, environ, 10, 120) == {
        "CUDA_VISIBLE_DEVICES": "0,1",
        "PATH": "/bin",
        "HF_HOME": "/cache",
        "OMP_NUM_THREADS": "2",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "130",
        GUARD: "1",
    }
    assert torchrun_environ(8, {}, 2, 60)["OMP_NUM_THREADS"] == "1"
    assert torchrun_environ(8, {"OMP_NUM_THREADS": "5"}, 2, 60)["OMP_NUM_THREADS"] == "5"


def test_relaunch_replaces_the_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Replaced(Exception):
        pass

    def execve(program: str, argv: list[str], environ: dict[str, str]) -> None:
        raise Replaced(program, argv, environ[GUARD])

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(Replaced) as replaced:
        launch.relaunch(2, ["+exp=x"], 120)
    assert replaced.value.args == (sys.executable, torchrun_argv(2, ["+exp=x"]), "1")
    said = "starting 2 processes: torchrun --standalone --nproc-per-node=2 -m fastgrpo.train +exp=x\n"
    assert capsys.readouterr().out == said


def test_two_starts_at_once_choose_different_ports() -> None:
    command = [*torchrun_argv(1, [])[:5], "--no-python", "printenv", "MASTER_PORT"]
    environ = torchrun_environ(1, os.environ, 1, 30)
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) for _ in range(2)]
    ports = [run.communicate(timeout=120)[0].strip() for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert len(set(ports)) == 2 and all(port.isdigit() for port in ports)


@pytest.mark.parametrize(
    ("rank", "error", "printed"),
    [
        (0, ConfigError("a=1 is wrong"), "fastgrpo: a=1 is wrong\n"),
        (0, ConfigError("a\nb"), "fastgrpo:\n  a\n  b\n"),
        (0, UserError("no file"), "fastgrpo: no file\n"),
        (3, ConfigError("a=1 is wrong"), ""),  # rank 0 has said it
        (3, UserError("no file"), "fastgrpo: no file\n"),  # perhaps only here
    ],
)
def test_complaints(
    rank: int,
    error: UserError,
    printed: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RANK", str(rank))
    waits: list[float] = []
    monkeypatch.setattr(console.time, "sleep", waits.append)
    monkeypatch.setattr(console.signal, "signal", lambda *_: None)
    console.complain(error)
    assert capsys.readouterr() == ("", printed)
    assert waits == ([] if rank == 0 else [16.5])  # patience, and three turns of half a second
