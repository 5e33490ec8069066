"""Our torchrun: signals reach the ranks, and the job's exit status is theirs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fastgrpo.torchrun import STATUS_FILE, _status_of, leave_status, set_defaults

ROOT = Path(__file__).resolve().parents[2]
WORKER = """
import os, pathlib, signal, sys, time
from fastgrpo.torchrun import leave_status
here, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]
def stop(signum, frame):
    time.sleep(0.5)  # the save
    (here / f"got-{rank}").write_text(signal.Signals(signum).name)
    if rank == "0":
        leave_status(75, os.environ)
    sys.exit(75)
for name in ("SIGUSR1", "SIGTERM"):
    signal.signal(getattr(signal, name), stop)
(here / f"up-{rank}").write_text("")
time.sleep(60)
"""


def environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def until(holds, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_signal_reaches_the_ranks_and_their_status_comes_back(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    command = [
        sys.executable,
        "-m",
        "fastgrpo.torchrun",
        "--standalone",
        "--nproc-per-node=2",
        str(script),
        str(tmp_path),
    ]
    job = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True)
    until(lambda: (tmp_path / "up-0").exists() and (tmp_path / "up-1").exists())
    job.send_signal(signal.SIGUSR1)
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 75, errors
    assert [(tmp_path / f"got-{rank}").read_text() for rank in (0, 1)] == ["SIGUSR1", "SIGUSR1"]
    assert "Traceback" not in errors


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("signum", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)])
def test_a_signal_while_the_run_is_loaded_asks_for_another_start(
    ranks: int, signum: int, tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text(
        f"import time\nopen('{tmp_path}/up', 'w').close()\ntime.sleep(60)\ndef compute_score(response): ...\n"
    )
    command = [
        *(sys.executable, "-m", "fastgrpo.train", "+exp=quickstart", f"model.path={tiny_model}", "rollout.name=hf"),
        *("trainer.device=cpu", f"trainer.n_gpus_per_node={ranks}", "reward.functions.answer.kind=custom"),
        f"reward.functions.answer.path={tmp_path}/slow.py",
    ]
    job = subprocess.Popen(command, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True)
    until(lambda: (tmp_path / "up").exists() or job.poll() is not None)
    job.send_signal(signum)
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 75, errors
    assert f"stopped by {signal.Signals(signum).name} before the run began" in errors


@pytest.mark.slow
def test_a_failure_while_the_run_is_loaded_is_one(tmp_path: Path) -> None:
    """torchrun ends the other rank by SIGTERM, which would ask for another start."""
    script = tmp_path / "worker.py"
    script.write_text(
        "import os, sys, time\n"
        "from fastgrpo.torchrun import loading\n"
        "with loading(os.environ):\n"
        "    time.sleep(1)\n"
        "    sys.exit(3) if os.environ['RANK'] == '1' else time.sleep(60)\n"
    )
    command = [sys.executable, "-m", "fastgrpo.torchrun", "--standalone", "--nproc-per-node=2", str(script)]
    job = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)
    assert job.returncode == 3 and "before the run began" in job.stderr


@pytest.mark.parametrize(
    ("failures", "status"),
    [
        ([(7, 1), (5, -9)], -9),  # rank 1 was killed, rank 0 says later that its peer is gone
        ([(5, 1), (5, -9)], -9),  # in the same second
        ([(5, 1), (7, -9)], 1),  # an error, and the other had to be killed
        ([(5, 1), (5, -15)], 1),  # and the other was ended
        ([(5, 70), (5, 1)], 70),
        ([(5, 75), (6, 3)], 3),
        ([(5, 75), (6, 75)], 75),
    ],
)
def test_the_status_of_ranks_that_failed(failures: list[tuple[int, int]], status: int) -> None:
    assert _status_of(failures) == status


def test_a_rank_that_was_killed_gives_the_status(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    text = "import os, signal, sys, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)\n"
    script.write_text(f"{text}signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))\ntime.sleep(5)\nsys.exit(1)\n")
    command = [sys.executable, "-m", "fastgrpo.torchrun", "--standalone", "--nproc-per-node=2", str(script)]
    job = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=False)
    assert job.returncode == 137, job.stderr


@pytest.mark.parametrize(("left", "traceback"), [(None, True), (-1, False)])
def test_what_a_rank_has_said_needs_no_traceback_of_torchrun(left: int | None, traceback: bool, tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    leave = f"from fastgrpo.torchrun import leave_status\nleave_status({left}, os.environ)\n" if left else ""
    script.write_text(f"import os, sys\n{leave}print('fastgrpo: the disk is full', file=sys.stderr)\nsys.exit(1)\n")
    command = [sys.executable, "-m", "fastgrpo.torchrun", "--standalone", "--nproc-per-node=1", str(script)]
    job = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=False)
    assert job.returncode == 1 and "fastgrpo: the disk is full\n" in job.stderr
    assert ("Traceback" in job.stderr) == traceback


def test_defaults_in_both_spellings() -> None:
    environ = {"PATH": "/bin", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "500"}
    set_defaults(environ)
    assert environ == {
        "PATH": "/bin",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
        "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "500",
        "PET_SHUTDOWN_TIMEOUT": "500",
    }


def test_a_status_is_left_where_one_is_wanted(tmp_path: Path) -> None:
    leave_status(75, {})
    leave_status(75, {STATUS_FILE: str(tmp_path / "status")})
    assert (tmp_path / "status").read_text() == "75"


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_the_command_is_stopped_and_goes_on(signum: int, tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "length.py").write_text("def compute_score(response):\n    return len(response) / 10\n")
    command = [
        *(sys.executable, "-m", "fastgrpo.train", "+exp=quickstart", f"model.path={tiny_model}", "rollout.name=hf"),
        *("trainer.device=cpu", "trainer.n_gpus_per_node=2", "trainer.max_steps=40", "data.train_batch_size=4"),
        *("rollout.n=3", "data.max_response_length=6", "data.val_files=[]", "reward.functions.answer.kind=custom"),
        f"reward.functions.answer.path={tmp_path}/length.py",
    ]
    job = subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    until(lambda: len(list(tmp_path.glob("runs/*/rollouts/*.jsonl"))) > 2)
    job.send_signal(signum)
    out, errors = job.communicate(timeout=120)
    assert job.returncode == 75, errors
    assert f"stopped by {signal.Signals(signum).name} after step" in out
    [run] = (tmp_path / "runs").iterdir()
    [checkpoint] = (run / "checkpoints").glob("step_*")
    resumed = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300)
    assert resumed.returncode == 0, resumed.stderr
    assert f"resuming {run.relative_to(tmp_path)} after step {int(checkpoint.name[5:])} of 40" in resumed.stdout
    assert (run / "finished").read_text() == "40\n"
    refused = subprocess.run(
        [*command, "trainer.max_steps=41", "rollout.n=4"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert refused.returncode == 2
    assert refused.stderr.count("rollout.n was 3 and is 4") == 1
