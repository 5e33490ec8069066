"""Several nodes as the documents start them: their commands are read from their text and run, two nodes on this host.

What is replaced: the number of ranks a node, the experiment, names of hosts and ports; `srun` and `scontrol` are two
small scripts. HOST is 127.0.0.1, so both nodes may serve the rendezvous, as either could.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))}
# What Slurm's commands do here: one node's name; the command once a node, signals passed on, the highest status.
SCONTROL = """#!{python}
import pathlib, sys
if sys.argv[1] == "show":
    sys.stdout.write("127.0.0.1\\nanother\\n")
else:
    assert sys.argv[1:] == ["requeue", "77"]
    pathlib.Path("requeued").touch()
"""
SRUN = """#!{python}
import signal, subprocess, sys
nodes = [subprocess.Popen(sys.argv[1:], stdout=open(f"node{{n}}.txt", "a"), stderr=subprocess.STDOUT) for n in (0, 1)]
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda signum, frame: [node.send_signal(signum) for node in nodes])
statuses = [node.wait() for node in nodes]
open("statuses", "w").write(f"{{statuses}}")
sys.exit(max(statuses))
"""


def commands() -> list[tuple[str, str]]:
    """(page, command) of each that starts a torchrun of several nodes, its lines joined."""
    found = []
    for name, text in PAGES.items():
        joined = re.sub(r"\\\n\s*", "", text)
        inline = re.findall(r"`([^`\n]*torchrun --nnodes[^`\n]*)`", joined)
        blocks = re.findall(r"^([^`\n]*torchrun --nnodes[^`\n]*)$", joined, re.M)
        found += [(name, command) for command in (*inline, *blocks)]
    return found


def test_every_documented_rendezvous_numbers_its_nodes() -> None:
    """torchrun's default, `static`, takes each node for number 0 that is not told otherwise."""
    assert {page for page, _ in commands()} >= {"README.md", "slurm.md"}
    for page, command in commands():
        assert "--rdzv-backend=c10d" in command or "--node-rank" in command, (page, command)
    for page, text in PAGES.items():
        assert text.count("--rdzv-endpoint=") == sum(c.count("--rdzv-endpoint=") for p, c in commands() if p == page), (
            page
        )


def environment(tmp_path: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    programs = os.pathsep.join([str(tmp_path / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    # The name under which a node is reached by the others: of a host without a resolver its own may lead nowhere.
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PATH": programs, "PET_LOCAL_ADDR": "127.0.0.1"}


def small_run(tiny_model: Path, tmp_path: Path) -> str:
    (tmp_path / "length.py").write_text("def compute_score(response):\n    return len(response) / 10\n")
    return (
        f"+exp=quickstart model.path={tiny_model} rollout.name=hf rollout.n=3 trainer.device=cpu "
        "data.train_batch_size=4 data.max_response_length=6 'data.val_files=[]' "
        "reward.functions.answer.kind=custom trainer.deterministic=true "
        f"reward.functions.answer.path={tmp_path}/length.py"
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def replaced(command: str, *pairs: tuple[str, str]) -> str:
    for old, new in pairs:
        assert old in command, (old, command)
        command = command.replace(old, new)
    return command


def run_nodes(command: str, folders: list[Path], environ: dict[str, str]) -> list[str]:
    """The same command once in each folder; what each printed. All must end well."""
    started: list[subprocess.Popen[str]] = []
    try:
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            numbered = environ | {"NODE": str(len(started))}
            started.append(
                subprocess.Popen(["bash", "-c", f"exec {command}"], cwd=folder, env=numbered, text=True, **pipes)
            )
        printed = [process.communicate(timeout=240)[0] for process in started]
    finally:
        for process in started:
            process.terminate()  # an agent ends its workers
    assert [process.returncode for process in started] == [0] * len(folders), "\n".join(printed)
    return printed


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def only(folder: Path) -> Path:
    [found] = folder.iterdir()
    return found


@pytest.mark.slow
def test_the_command_of_the_readme_trains_on_two_nodes_as_one_process_does(tiny_model: Path, tmp_path: Path) -> None:
    """HSDP across the nodes, sequence parallelism inside: 3 steps, against those of one process."""
    [command] = [command for page, command in commands() if page == "README.md"]
    small = f"{small_run(tiny_model, tmp_path)} trainer.max_steps=3"
    layout = "actor.fsdp.replicas=2 actor.ulysses_sequence_parallel_size=2"
    two = replaced(
        command,
        ("--nproc-per-node=8", "--nproc-per-node=2"),
        ("HOST:29500", f"127.0.0.1:{free_port()}"),
        (" ...", f" -m fastgrpo.train {small} {layout}"),
    )
    environ = environment(tmp_path)
    run_nodes(two, [tmp_path / "two"] * 2, environ)
    run_nodes(f"python -m fastgrpo.train {small}", [tmp_path / "one"], environ)
    run, right = (only(tmp_path / name / "runs") for name in ("two", "one"))
    assert json.loads((run / "starts.jsonl").read_text())["layout"]["world"] == 4
    assert [row["step"] for row in rows(run)] == [1, 2, 3] and (run / "finished").read_text() == "3\n"
    for row, expected in zip(rows(run), rows(right), strict=True):
        assert row["reward/mean"] == pytest.approx(expected["reward/mean"])
        assert row["actor/loss"] == pytest.approx(expected["actor/loss"], rel=1e-4, abs=1e-6)
        assert row["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=1e-4)
    assert (run / "model" / "model.safetensors").is_file()


@pytest.mark.slow
def test_nodes_with_disks_of_their_own_save_and_begin_the_next_run(tiny_model: Path, tmp_path: Path) -> None:
    """A folder a node. The second start has other options: the finished run's part on node 1 is no reason to refuse."""
    folders = [tmp_path / "node0", tmp_path / "node1"]
    small = f"{small_run(tiny_model, tmp_path)} trainer.max_steps=2 trainer.save_freq=1"
    for options, begun in ((small, 1), (small.replace("rollout.n=3", "rollout.n=2"), 2)):
        nodes = f"--nnodes=2 --nproc-per-node=2 --master-addr=127.0.0.1 --master-port={free_port()}"
        command = f"python -m fastgrpo.torchrun {nodes} --node-rank=$NODE -m fastgrpo.train {options}"
        run_nodes(command, folders, environment(tmp_path))
        runs = [sorted((folder / "runs").iterdir()) for folder in folders]
        assert [[run.name for run in on_node] for on_node in runs] == [[run.name for run in runs[0]]] * 2
        assert len(runs[0]) == begun and (runs[0][-1] / "finished").read_text() == "2\n"
        for node, on_node in enumerate(runs):
            shards = sorted(
                path.name for path in (on_node[-1] / "checkpoints" / "step_000002" / "state").glob("*.distcp")
            )
            assert shards == [f"__{rank}_0.distcp" for rank in (2 * node, 2 * node + 1)]


@pytest.mark.slow
def test_the_script_for_slurm_is_stopped_requeued_and_goes_on(tiny_model: Path, tmp_path: Path) -> None:
    """The time limit's signal comes in the middle of the run; every process of both nodes ends with 75."""
    [script] = re.findall(r"^```bash\n(#!/bin/bash\n.*?)^```", PAGES["slurm.md"], re.M | re.S)
    script = replaced(
        script,
        ("--nproc-per-node=8", "--nproc-per-node=2"),
        ("$head:29500", f"$head:{free_port()}"),
        ("+exp=gsm8k_8xa100", f"{small_run(tiny_model, tmp_path)} trainer.max_steps=25"),
        ("/shared/runs", str(tmp_path / "runs")),
    )
    (tmp_path / "job.sh").write_text(script)
    (tmp_path / "bin").mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        program = tmp_path / "bin" / name
        program.write_text(text.format(python=sys.executable))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    environ = environment(tmp_path) | {"SLURM_JOB_ID": "77", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "n[0-1]"}

    job = subprocess.Popen(["bash", "job.sh"], cwd=tmp_path, env=environ)
    until(lambda: len(list(tmp_path.glob("runs/*/rollouts/*.jsonl"))) > 2 or job.poll() is not None)
    job.send_signal(signal.SIGUSR1)
    printed = lambda: "".join((tmp_path / f"node{node}.txt").read_text() for node in (0, 1))  # noqa: E731
    assert job.wait(timeout=120) == 75, printed()
    assert (tmp_path / "statuses").read_text() == "[75, 75]"
    (tmp_path / "requeued").unlink()
    [checkpoint] = tmp_path.glob("runs/*/checkpoints/step_*")

    again = subprocess.run(["bash", "job.sh"], cwd=tmp_path, env=environ | {"SLURM_RESTART_COUNT": "1"}, timeout=240)
    assert again.returncode == 0 and not (tmp_path / "requeued").exists(), printed()
    assert f"after step {int(checkpoint.name[5:])} of 25, saved by 4 ranks" in printed()
    run = only(tmp_path / "runs")
    assert (run / "finished").read_text() == "25\n"
    assert [row["step"] for row in rows(run)] == list(range(1, 26))


def until(holds: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)
