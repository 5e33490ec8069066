"""A benchmark's measurements, each in a process (or a torchrun of several) of its own, so that none inherits another's
memory, compiled code or fault.

    command --> stdout, stderr: the console's            report: JSON that the child (its rank 0) writes at its end

A child past its time is ended with SIGTERM, which torchrun passes on to its workers before it ends itself: killed at
once it would leave them behind, on the GPUs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastgrpo.launch import torchrun_environ

GRACE_S = 45  # torchrun kills workers 30 s after it has passed a signal on, told so by WORKERS_S
WORKERS_S = 20


def run_child(command: Sequence[str], report: Path, minutes: float, environ: Mapping[str, str]) -> dict[str, Any]:
    """What `command` wrote to `report`, or {"error"}; and "process_s", the seconds of the whole process."""
    report.parent.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    start = time.perf_counter()
    process = subprocess.Popen(list(command), env=dict(environ) | {"PYTHONUNBUFFERED": "1"})
    try:
        status = process.wait(timeout=60 * minutes)
        error = f"ended with status {status}" if status or not report.exists() else None
    except subprocess.TimeoutExpired:
        error = f"not done after {minutes:g} minutes"
    finally:
        end(process)
    result = {"error": error} if error else json.loads(report.read_text())
    return result | {"process_s": round(time.perf_counter() - start, 1)}


def end(process: subprocess.Popen[bytes]) -> None:
    """Nothing, for one that has ended."""
    process.terminate()
    try:
        process.wait(timeout=GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def start_words(ranks: int) -> tuple[list[str], dict[str, str]]:
    """How a script is started on `ranks` ranks of this host: the words before its name, and its environment, in which
    the CPUs are shared out."""
    environ = torchrun_environ(ranks, os.environ, len(os.sched_getaffinity(0)), WORKERS_S)
    if ranks == 1:
        return [sys.executable], environ
    torchrun = [sys.executable, "-m", "fastgrpo.torchrun", "--standalone", "--local-addr=127.0.0.1"]
    return [*torchrun, f"--nproc-per-node={ranks}"], environ
