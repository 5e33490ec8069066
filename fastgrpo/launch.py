"""How many processes run, on which device, and the program's own restart under torchrun. Imports no torch.

An experiment states trainer.n_gpus_per_node. A worker that finds itself alone and more than one wanted becomes torchrun
(exec: the same process id, so signals and exit codes reach whoever started it). Any other launch is used as it stands.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn

from fastgrpo import console
from fastgrpo.config import RunConfig
from fastgrpo.errors import UserError

SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # seconds; torchrun's name
SHUTDOWN_MARGIN_S = 10  # for the processes to end, after the save
GUARD = "FASTGRPO_RELAUNCHED"  # set in the new start, which must not start itself once more
# What a torchrun worker inherits from its agent; the next agent would take them for its own.
_ELASTIC = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
_ELASTIC_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_")
_NVIDIA_SMI_TIMEOUT_S = 60


@dataclass(frozen=True, slots=True)
class Launch:
    world: int  # ranks of the job
    ranks_per_node: int
    relaunch: bool  # they are not running yet
    first_node: bool = True  # rank 0 is on this one


def plan(config: RunConfig, environ: Mapping[str, str]) -> Launch:
    """The ranks that this job has, or will have after `relaunch`."""
    world, ranks_per_node = started(environ)
    wanted = config.trainer.n_gpus_per_node
    if world == 1 and wanted > 1 and GUARD not in environ:
        return Launch(wanted, wanted, relaunch=True)
    first_node = environ.get("GROUP_RANK", "0") == "0"  # torchrun's number of the node
    return Launch(world, ranks_per_node, relaunch=False, first_node=first_node)


def started(environ: Mapping[str, str]) -> tuple[int, int]:
    """(ranks of the job, ranks of this node), as torchrun says them; one of each without it."""
    world = _count(environ, "WORLD_SIZE", 1)
    return world, _count(environ, "LOCAL_WORLD_SIZE", world)


def _count(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, str(default))
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"{name}={text} in the environment is no number of ranks; unset it, or start by torchrun")
    return int(text)


def relaunch(processes: int, argv: Sequence[str], shutdown_timeout_s: int) -> NoReturn:
    """Replace this process by a torchrun of `processes` workers with the same arguments. Does not return."""
    command = torchrun_argv(processes, argv)
    console.say(f"starting {processes} processes: torchrun {' '.join(command[3:])}")
    sys.stderr.flush()
    environ = torchrun_environ(processes, os.environ, len(os.sched_getaffinity(0)), shutdown_timeout_s)
    os.execve(command[0], command, environ)


def torchrun_argv(processes: int, argv: Sequence[str]) -> list[str]:
    """--standalone lets the operating system choose a free port: two runs on one host do not clash."""
    torchrun = [sys.executable, "-m", "fastgrpo.torchrun"]
    return [*torchrun, "--standalone", f"--nproc-per-node={processes}", "-m", "fastgrpo.train", *argv]


def torchrun_environ(processes: int, environ: Mapping[str, str], cpus: int, shutdown_timeout_s: int) -> dict[str, str]:
    """`environ` without the parent agent's variables, with the CPUs shared out (torchrun alone: one thread), and with
    the time that torchrun gives its workers after a signal."""
    kept = {k: v for k, v in environ.items() if k not in _ELASTIC and not k.startswith(_ELASTIC_PREFIXES)}
    threads, grace = str(max(1, cpus // processes)), str(shutdown_timeout_s + SHUTDOWN_MARGIN_S)
    return {"OMP_NUM_THREADS": threads, SHUTDOWN: grace, **kept, GUARD: "1"}


def count_gpus(environ: Mapping[str, str] = os.environ) -> int:
    """CUDA devices that a process with `environ` sees. As in CUDA, its list ends at the first missing one."""
    present = _count_installed_gpus(environ)
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present or 0
    count = 0
    for device in visible.split(","):
        number = device.strip()
        if (
            not number
            or number.startswith("-")
            or (number.isdigit() and present is not None and int(number) >= present)
        ):
            break
        count += 1
    return 0 if present == 0 else count


def resolve_device(config: RunConfig, gpu_count: int, ranks_per_node: int | None = None) -> Literal["cpu", "cuda"]:
    """Where the ranks of this node run. `ranks_per_node` defaults to this job's.

    auto means cuda where each rank finds a GPU, and cpu only for an experiment that asks for no more than one and finds
    none. Raises UserError when GPUs are wanted and missing: a large model must not start to crawl on a CPU unasked.
    """
    trainer = config.trainer
    if trainer.device == "cpu":
        return "cpu"
    ranks = ranks_per_node or plan(config, os.environ).ranks_per_node
    if gpu_count >= ranks:
        return "cuda"
    if trainer.device == "auto" and gpu_count == 0 and trainer.n_gpus_per_node == 1:
        return "cpu"
    fewer = f"trainer.n_gpus_per_node={gpu_count} and a batch and model that fit, or " if gpu_count else ""
    raise UserError(
        f"{ranks} GPUs wanted on this node (trainer.n_gpus_per_node={trainer.n_gpus_per_node}, "
        f"trainer.device={trainer.device}), {gpu_count} found; run it where there are {ranks}, or set {fewer}"
        "trainer.device=cpu for a try-out with a tiny model"
    )


def share_cpu(device: str, environ: MutableMapping[str, str]) -> None:
    """On a CPU, trainer and engine each bring an OpenMP runtime; waiting threads must sleep, not spin on the other's
    cores (on a busy machine that took the engine a third of the CPU time). To be called before torch is loaded."""
    if device == "cpu":
        environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _count_installed_gpus(environ: Mapping[str, str]) -> int | None:
    """None: nobody can tell, because nvidia-smi is not there."""
    program = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if program is None:
        return None
    try:
        listing = subprocess.run(
            [program, "-L"], capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT_S, env=dict(environ)
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"nvidia-smi has not answered for {_NVIDIA_SMI_TIMEOUT_S} s: the GPU driver of this node hangs; "
            "restart it, or set trainer.device=cpu"
        ) from error
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
