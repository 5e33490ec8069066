"""Starts programs behind the walls. Run by a bare interpreter as `python -I -S inside.py`, one job a process.

    worker ── job (JSON) on stdin ──► A  leaves the host's namespaces, forks
                                      └─ B  process 1 of its own: makes the file system, then for each run
                                         └─ C  limits, no privileges, exec of the program
    worker ◄── JSON lines on stdout ── B      {"started": true} before the first run, {"run": i, "end": text, "output":
                                              text} after each; {"broken": text}: a wall cannot be built, nothing is run

    job: level       "namespaces": new user (unless root), mount, process, network, IPC namespaces; a root of its own
                     with the interpreter and system libraries read-only and one folder /box in memory, nothing else
                     "limits": none of these; see isolation.py for what then is and is not in force
         runs        [{"argv": [...], "input": text}], one after another; everything that a run leaves is killed
         files       {name: text} in the folder    readable  host paths to show    fds  {number in C: number in A}
         other_user  at "limits": whether root gives the program a user id of its own
         time_s      for all runs together         memory_bytes, processes, file_bytes, output_bytes

Standard library only. Nothing of the host's environment is passed on. Whatever happens to A or to the worker, B and all
that it started die: B by its parent-death signal, and with process 1 of a namespace everything in it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from filter import refuse_calls
from walls import LIBC, check, leave_namespaces, make_root, own_user_id

PDEATHSIG, NO_NEW_PRIVS, SUBREAPER, DROP_BOUNDING = 1, 38, 36, 24  # of prctl
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


def main() -> None:
    job = json.load(sys.stdin)
    LIBC.prctl(PDEATHSIG, signal.SIGTERM)
    if os.getppid() != job["parent"]:
        return
    os.umask(0o022)
    try:
        job["uid"] = None
        if job["level"] == "namespaces":
            leave_namespaces(job)
        child = os.fork()
    except OSError as error:
        say({"broken": f"{error.strerror}: {error.filename or ''}"})
        return
    if child == 0:
        os._exit(serve(job))
    signal.signal(
        signal.SIGTERM, lambda *_: os.kill(child, signal.SIGTERM if job["level"] == "limits" else signal.SIGKILL)
    )
    while True:
        try:
            os.waitpid(child, 0)
            return
        except InterruptedError:
            continue


def say(message: dict[str, Any]) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


# Process 1


def serve(job: dict[str, Any]) -> int:
    """Make the walls, then run after run. Returns the exit code."""
    LIBC.prctl(PDEATHSIG, signal.SIGKILL if job["level"] == "namespaces" else signal.SIGTERM)
    folder = "/box"
    try:
        if job["level"] == "namespaces":
            make_root(job)
        else:
            LIBC.prctl(SUBREAPER, 1)
            signal.signal(signal.SIGTERM, lambda *_: (kill_all(), shutil.rmtree(folder, True), os._exit(1)))
            folder = tempfile.mkdtemp(prefix="fastgrpo-box-")
            if job["other_user"] and (user := own_user_id()) is not None:
                job["uid"] = user
                os.chown(folder, user, user)
        for name, text in job["files"].items():
            with open(os.path.join(folder, name), "w", encoding="utf-8", errors="surrogatepass") as file:
                file.write(text)
        os.chdir(folder)
    except OSError as error:
        say({"broken": f"{error.strerror}: {error.filename or ''}"})
        if folder != "/box":
            shutil.rmtree(folder, ignore_errors=True)
        return 1
    say({"started": True})
    try:
        deadline = time.monotonic() + job["time_s"]
        for index, run in enumerate(job["runs"]):
            say({"run": index, **run_once(job, run, folder, deadline)})
    except BrokenPipeError:  # the worker has seen enough
        pass
    except OSError as error:
        say({"broken": str(error)})
    finally:
        kill_all()
        if job["level"] != "namespaces":
            os.chdir("/")
            shutil.rmtree(folder, ignore_errors=True)
    return 0


def run_once(job: dict[str, Any], run: dict[str, Any], folder: str, deadline: float) -> dict[str, str]:
    given = os.memfd_create("input")
    os.write(given, run["input"].encode("utf-8", "surrogatepass"))
    os.lseek(given, 0, os.SEEK_SET)
    reading, writing = os.pipe()
    failed, fails = os.pipe()  # closed by a successful exec
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            fails = arrange_descriptors(job, given, writing, fails)
            become_program(job, run, folder)
        except BaseException as error:
            os.write(fails, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(127)
    for descriptor in (given, writing, fails):
        os.close(descriptor)
    reason = os.read(failed, 4096).decode()
    os.close(failed)
    if reason:
        raise OSError(0, reason)
    output, end = collect(child, reading, job["output_bytes"], deadline)
    os.close(reading)
    return {"output": output.decode("utf-8", "replace"), "end": end}


def collect(child: int, reading: int, limit: int, deadline: float) -> tuple[bytes, str]:
    """What the program writes, until it has ended; then everything that it started is killed."""
    ended, output = os.pidfd_open(child), b""
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(reading, select.POLLIN)
    end = None
    while end is None:
        ready = poll.poll(max(0, deadline - time.monotonic()) * 1000)
        if not ready:
            end = "timeout"
        for descriptor, _ in ready:
            if descriptor == reading:
                part = os.read(reading, 1 << 16)
                output += part
                if not part:
                    poll.unregister(reading)
                if len(output) > limit:
                    end = "too much output"
            elif end is None:
                end = describe(os.waitpid(child, 0)[1])
    kill_all()
    os.close(ended)
    os.set_blocking(reading, False)
    while len(output) <= limit:
        try:
            part = os.read(reading, 1 << 16)
        except BlockingIOError:
            break
        if not part:
            break
        output += part
    return output[:limit], end


def describe(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"exit {code}" if code >= 0 else f"signal {-code}"


def kill_all() -> None:
    """Everything but this process. As process 1 that is one call; else children are killed until none is left, those
    of killed ones becoming this process's (it is their subreaper)."""
    while True:
        if os.getpid() == 1:
            targets = [-1]
        else:
            with open(f"/proc/self/task/{os.getpid()}/children") as file:
                targets = [int(word) for word in file.read().split()]
        for target in targets:
            with contextlib.suppress(ProcessLookupError):
                os.kill(target, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


# The program


def arrange_descriptors(job: dict[str, Any], given: int, writing: int, fails: int) -> int:
    """0, 1, 2 and those of the job, nothing else but the one that is returned: `fails`, which exec closes."""
    null = os.open(os.devnull, os.O_RDWR)
    wanted = {0: given, 1: writing, 2: null} | {int(inner): outer for inner, outer in job["fds"].items()}
    last = max(wanted) + 1
    wanted[last] = fails
    spare = {inner: os.dup2(outer, 200 + inner) for inner, outer in wanted.items()}
    for inner, outer in spare.items():
        os.dup2(outer, inner, inheritable=inner != last)
    os.closerange(last + 1, 1 << 16)
    return last


def become_program(job: dict[str, Any], run: dict[str, Any], folder: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    seconds = int(job["time_s"]) + 2
    for limit, value in (
        (resource.RLIMIT_AS, job["memory_bytes"]),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, job["file_bytes"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_NPROC, job["processes"]),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))
    if job["uid"] is not None:
        os.setgroups([])
        os.setresgid(job["uid"], job["uid"], job["uid"])
        os.setresuid(job["uid"], job["uid"], job["uid"])
    LIBC.prctl(NO_NEW_PRIVS, 1, 0, 0, 0)
    if job["uid"] is None and job["level"] == "namespaces":
        drop_capabilities()
    LIBC.prctl(PDEATHSIG, signal.SIGKILL)
    refuse_calls(LIBC)
    os.chdir(folder)
    os.execve(run["argv"][0], run["argv"], ENVIRONMENT | {"HOME": folder, "TMPDIR": folder})


def drop_capabilities() -> None:
    """All of them, also for what a later exec could gain."""
    for capability in range(64):
        LIBC.prctl(DROP_BOUNDING, capability, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    check(LIBC.capset(header, (ctypes.c_uint32 * 6)()), "capset")


main()
