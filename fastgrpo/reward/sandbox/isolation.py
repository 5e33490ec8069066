"""Which isolation this machine allows, found out by trying: a program that attacks is run, and what it did is read.

    full          no network, no file outside its folder, no signal to others, limits on processes and memory: all were
                  tried and held
    best effort   what held of them

Level "namespaces" needs user namespaces (or root with the right to make namespaces); containers often forbid both.
Level "limits" has resource limits, the filter of system calls, a clean environment, and a user id of its own where the
trainer is root. A limit of time is in force at every level: it is kept from outside. A program that could signal others
could end the trainer: that is never accepted.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from fastgrpo.reward.sandbox.box import Box, BrokenBox, Limits, make_job, python

_START_LIMIT_S = 20.0
_NAMES = {
    "network": "no network",
    "files": "no file outside its folder",
    "signals": "no signal to other processes",
    "processes": "limit on processes",
    "memory": "limit on memory",
}
_ATTACK = """
import json, os, socket, sys, time
port, secret, processes, trainer = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
held = dict.fromkeys(("network", "files", "signals", "processes", "memory"), False)
try:
    os.kill(trainer, 0)
except OSError:
    held["signals"] = True
try:
    socket.create_connection(("127.0.0.1", port), 2)
except OSError:
    held["network"] = True
try:
    open(secret).read()
except OSError:
    held["files"] = True
try:
    bytearray(10 << 30)
except MemoryError:
    held["memory"] = True
for _ in range(processes + 1):
    try:
        if os.fork() == 0:
            time.sleep(60)
    except OSError:
        held["processes"] = True
        break
print(json.dumps(held))
"""


@dataclass(frozen=True, slots=True)
class Isolation:
    limits: Limits
    held: tuple[str, ...]  # walls that the attack did not break
    reason: str = ""  # why it is not level "namespaces"

    @property
    def full(self) -> bool:
        return set(self.held) == set(_NAMES)

    def __str__(self) -> str:
        missing = [name for wall, name in _NAMES.items() if wall not in self.held]
        text = "in force: " + ", ".join([_NAMES[wall] for wall in self.held] + ["limit of time"])
        return text + (f"; NOT in force: {', '.join(missing)} (namespaces: {self.reason})" if missing else "")


@functools.cache
def try_isolation(memory_mb: int, processes: int, time_s: float) -> Isolation:
    """The strongest level that works here. BrokenBox when none does."""
    wanted = Limits("namespaces", time_s, memory_mb, processes)
    try:
        return _attacked(wanted, "")
    except BrokenBox as error:
        reason = str(error)
    wanted = replace(wanted, level="limits")
    if os.getuid() == 0:
        try:
            return _attacked(replace(wanted, other_user=True), reason)
        except BrokenBox:  # the interpreter lies where another user may not look
            pass
    return _attacked(wanted, reason)


def _attacked(limits: Limits, reason: str) -> Isolation:
    limits_now = replace(limits, time_s=_START_LIMIT_S)
    with socket.create_server(("127.0.0.1", 0)) as server, tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        secret = Path(folder) / "secret"
        secret.write_text("secret")
        arguments = [str(server.getsockname()[1]), str(secret), str(limits.processes), str(os.getpid())]
        job = make_job(limits_now, [{"argv": [*python("attack.py"), *arguments], "input": ""}], {"attack.py": _ATTACK})
        with Box(job) as box:
            message = next(iter(box.messages(time.monotonic() + _START_LIMIT_S)), None)
    if message is None or not message["output"].startswith("{"):
        raise BrokenBox(f"the sandbox's first program did not run ({message and message['end']})")
    held = json.loads(message["output"])
    if not held["signals"]:
        raise BrokenBox("programs could end the trainer's own processes")
    return Isolation(limits, tuple(wall for wall in _NAMES if held[wall]), reason)
