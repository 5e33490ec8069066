"""Namespaces, and the file system of one of them: what a program in a sandbox can reach. See inside.py.

    /usr /bin /lib ...   the host's, read-only        the interpreter's folders   read-only, at their own paths
    /dev                 null, zero, random, urandom  /box                        in memory, of limited size: its folder

No /proc, no /home, no data. Standard library only.
"""

from __future__ import annotations

import ctypes
import os
import stat
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)
NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
RDONLY, NOSUID, NODEV, REMOUNT, BIND, REC, PRIVATE, RELATIME = 1, 2, 4, 32, 4096, 16384, 1 << 18, 1 << 21
KEPT_FLAGS = {os.ST_NOSUID: NOSUID, os.ST_NODEV: NODEV, os.ST_NOEXEC: 8, os.ST_NOATIME: 1024, os.ST_NODIRATIME: 2048}
DETACH = 2
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41, "riscv64": 41, "ppc64le": 203, "s390x": 217}
SYSTEM = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
INNER_ID = 1000


def check(result: int, what: str) -> None:
    """OSError naming `what` unless a call to the C library returned 0."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


def leave_namespaces(job: dict[str, Any]) -> None:
    """Root needs no user namespace, and is left for an id of its own, so that limits on processes count."""
    flags = NEWNS | NEWPID | NEWNET | NEWIPC | NEWUTS
    uid, gid = os.getuid(), os.getgid()
    if uid == 0:
        check(LIBC.unshare(flags), "unshare")
        job["uid"] = own_user_id()
        return
    check(LIBC.unshare(flags | NEWUSER), "unshare")
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{INNER_ID} {uid} 1"),
        ("gid_map", f"{INNER_ID} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def own_user_id() -> int | None:
    """A user id that no other sandbox has now, for RLIMIT_NPROC counts by user; None where only one user is known (then
    it is not the host's root, whom that limit passes over)."""
    wanted = 60000 + os.getpid() % 5000
    with open("/proc/self/uid_map") as file:
        ranges = [[int(word) for word in line.split()] for line in file]
    return wanted if any(first <= wanted < first + count for first, _, count in ranges) else None


def mount(source: str | None, target: str, kind: str | None = None, flags: int = 0, data: str | None = None) -> None:
    def text(value: str | None) -> bytes | None:
        return None if value is None else value.encode()

    check(LIBC.mount(text(source), text(target), text(kind), flags, text(data)), f"mount {target}")


def make_root(job: dict[str, Any]) -> None:
    """Process 1 ends up in a new root whose only writable folder is /box."""
    mount("none", "/", None, REC | PRIVATE)
    shown = [os.path.realpath(path) for path in job["readable"]]
    base = next(
        path for path in ("/sys", "/mnt", "/srv", "/media", "/opt") if os.path.isdir(path) and not below(path, shown)
    )
    mount("tmpfs", base, "tmpfs", NOSUID | NODEV, "size=4m,mode=755")
    for path in (*SYSTEM, *sorted(set(shown), key=len)):
        show(path, base, job["uid"] is not None)
    os.makedirs(f"{base}/dev")
    for path in DEVICES:
        bind(path, base + path, NOSUID)
    os.mkdir(f"{base}/box")
    mount("tmpfs", f"{base}/box", "tmpfs", NOSUID | NODEV, f"size={job['file_bytes']},mode=777")
    if not os.path.lexists(f"{base}/tmp"):  # there when an interpreter lives under it
        os.symlink("/box", f"{base}/tmp")
    os.chdir(base)
    number = PIVOT_ROOT.get(os.uname().machine)
    if number is None:
        raise OSError(0, "no pivot_root known for this processor", os.uname().machine)
    check(LIBC.syscall(number, b".", b"."), "pivot_root")
    check(LIBC.umount2(b".", DETACH), "umount")
    os.chdir("/")
    mount(None, "/", None, REMOUNT | BIND | RDONLY | NOSUID | NODEV)


def below(path: str, shown: list[str]) -> bool:
    return any(other == path or other.startswith(f"{path}/") for other in shown)


def show(path: str, base: str, other_user: bool) -> None:
    """Bind a host path read-only at its own place. A folder that only its owner may enter is shown entry by entry to a
    program that runs as somebody else."""
    target = base + path
    if os.path.lexists(target) or not os.path.lexists(path):
        return
    if os.path.islink(path):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.symlink(os.readlink(path), target)
    elif other_user and os.path.isdir(path) and os.stat(path).st_mode & 0o005 != 0o005:
        os.makedirs(target)
        for name in os.listdir(path):
            show(f"{path}/{name}", base, other_user)
    else:
        bind(path, target, NOSUID | NODEV)


def bind(path: str, target: str, flags: int) -> None:
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if stat.S_ISDIR(os.stat(path).st_mode):
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT, 0o644))
    mount(path, target, None, BIND | REC)
    present = os.statvfs(target).f_flag
    kept = sum(flag for bit, flag in KEPT_FLAGS.items() if present & bit)
    mount(None, target, None, REMOUNT | BIND | RDONLY | flags | kept | (RELATIME if present & 4096 else 0))
