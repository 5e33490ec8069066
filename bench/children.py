"""A benchmark's measurements, each in a process (or a torchrun of several) of its own, so that none inherits another's
memory, compiled code or fault.

    command --> stdout, stderr: the console's
            --> report: JSON by the child (its rank 0), whole at any time, read when the child has ended
                {"steps": [a dict a step], "steps_asked", ...}    rewritten after every step
                anything else                                     written once, at the end

A child that ends early, for lack of time, by a fault or because the benchmark itself is told to end (cli.Ending),
leaves the steps that it has finished. It is ended with SIGTERM, which torchrun passes on to its workers before it ends
itself: killed at once it would leave them behind, on the GPUs.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cli import Ending, so_far, write_json
from fastgrpo.launch import torchrun_environ

POLL_S = 0.1
GRACE_S = 45  # torchrun kills workers 30 s after it has passed a signal on, told so by WORKERS_S
WORKERS_S = 20


def run_child(
    command: Sequence[str], report: Path, minutes: float, environ: Mapping[str, str], ending: Ending
) -> dict[str, Any]:
    """What `command` wrote to `report`; where it ended early, {"error"} and the steps that it had reported. And
    "process_s", the seconds of the whole process, and "start_s", those to its first report; null without one."""
    report.parent.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    start, reported = time.perf_counter(), []

    def look() -> None:
        if not reported and report.exists():
            reported.append(round(time.perf_counter() - start, 1))

    process = subprocess.Popen(list(command), env=dict(environ) | {"PYTHONUNBUFFERED": "1"})
    try:
        status = wait(process, ending, 60 * minutes, look)
    finally:
        end(process)
    look()
    seconds = {"start_s": reported[0] if reported else None, "process_s": round(time.perf_counter() - start, 1)}
    found = json.loads(report.read_text()) if reported else {}
    steps, asked = len(found.get("steps", [])), found.get("steps_asked", 0)
    if status == 0 and reported and steps == asked:
        return found | seconds
    if ending.status is not None:  # asked first: the child may have been given the same signal
        error = ending.reason()
    else:
        error = f"not done after {minutes:g} minutes" if status is None else f"ended with status {status}"
    if not steps:
        return {"error": error} | seconds
    return found | {"error": so_far(error, steps, asked, "steps")} | seconds


def keeping(
    measure: Callable[[Path, Ending], bool], models: Path | None, out: Path, render: Callable[[Path], str]
) -> int:
    """The exit status of a benchmark: `measure(folder of models, ending)` puts rows into `out` and says whether any
    failed; what there is at the end is shown. Without `models` they are made in a folder that goes."""
    with Ending() as ending, tempfile.TemporaryDirectory() as folder:
        ending.listen()
        failed = measure(models or Path(folder), ending)
        if out.exists():
            print(render(out), flush=True)
    return ending.status or (1 if failed else 0)


def wait(
    process: subprocess.Popen[bytes], ending: Ending, limit_s: float = math.inf, look: Callable[[], None] | None = None
) -> int | None:
    """Its exit status, or None when the time is over or `ending` was asked for. Calls `look` again and again."""
    deadline = time.monotonic() + limit_s
    while process.poll() is None and ending.status is None and time.monotonic() < deadline:
        time.sleep(POLL_S)
        if look is not None:
            look()
    return process.poll()


def end(process: subprocess.Popen[bytes]) -> None:
    """Nothing, for one that has ended."""
    process.terminate()
    try:
        process.wait(timeout=GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def reporter(report: str) -> Callable[[Mapping[str, Any]], None]:
    """Of a child: writes what it is given to the file `report`, in place of what is there. On rank 0 alone."""

    def write(result: Mapping[str, Any]) -> None:
        if os.environ.get("RANK", "0") == "0":
            write_json(Path(report), result)

    return write


def start_words(ranks: int) -> tuple[list[str], dict[str, str]]:
    """How a script is started on `ranks` ranks of this host: the words before its name, and its environment, in which
    the CPUs are shared out."""
    environ = torchrun_environ(ranks, os.environ, len(os.sched_getaffinity(0)), WORKERS_S)
    if ranks == 1:
        return [sys.executable], environ
    torchrun = [sys.executable, "-m", "fastgrpo.torchrun", "--standalone", "--local-addr=127.0.0.1"]
    return [*torchrun, f"--nproc-per-node={ranks}"], environ
