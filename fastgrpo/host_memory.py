"""Host memory, as far as Linux tells: what there is and what is left, of the machine and of each control group around
this process (a container's, a Slurm job's; both versions). What takes more than that is killed, without a word.

    /proc/meminfo          MemTotal, MemAvailable                    ---+--> the least of them
    own group and those    limit, limit - used + what the kernel     ---+
    above it               drops first (files that nobody reads)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MEMINFO, _STATUS = Path("/proc/meminfo"), Path("/proc/self/status")
_OWN_GROUPS, _CGROUP = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
RESERVE = 2 << 30  # bytes that stay free
# Of a control group: limit, use, and the entry of memory.stat for what the kernel drops first, its children's too.
_VERSIONS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def pinned(size: int) -> int:
    """Bytes that torch's pinned allocator takes for a tensor of `size` bytes: the next power of two."""
    return 1 << (size - 1).bit_length() if size else 0


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes."""

    total: int
    available: int


def read(meminfo: Path = _MEMINFO, own_groups: Path = _OWN_GROUPS, cgroup: Path = _CGROUP) -> HostMemory | None:
    """The least of the machine and of the groups around this process; None where nobody knows."""
    found = [_of_machine(meminfo), *(_of_group(folder) for folder in group_folders(own_groups, cgroup))]
    known = [memory for memory in found if memory is not None]
    if not known:
        return None
    return HostMemory(min(memory.total for memory in known), min(memory.available for memory in known))


def available_bytes() -> int | None:
    """What is left; None where nobody knows."""
    memory = read()
    return None if memory is None else memory.available


def fits(size: int, processes: int) -> bool:
    """Whether each of `processes` on this host may take `size` bytes more; true where nobody knows."""
    available = available_bytes()
    return available is None or size * processes <= available - RESERVE


def own_bytes(status: Path = _STATUS) -> int:
    """What this process alone has taken: its memory that is neither a file's nor shared. 0 where nobody knows."""
    return _kib(status, "RssAnon") or 0


def group_folders(own_groups: Path, cgroup: Path) -> Iterator[Path]:
    """The group of this process and those above it. Inside a container the top may be the container's own."""
    try:
        lines = own_groups.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines or ["0::/"]:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = cgroup / "memory" if controllers else cgroup
        parts = [part for part in path.split("/") if part not in ("", "..")]
        yield from (top.joinpath(*parts[:count]) for count in range(len(parts), -1, -1))


def _of_machine(meminfo: Path) -> HostMemory | None:
    total, available = _kib(meminfo, "MemTotal"), _kib(meminfo, "MemAvailable")
    return None if total is None or available is None else HostMemory(total, available)


def _kib(file: Path, key: str) -> int | None:
    """Bytes of a line `key:  12 kB`."""
    try:
        lines = dict(line.split(":", 1) for line in file.read_text().splitlines())
        return int(lines[key].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def _of_group(folder: Path) -> HostMemory | None:
    for limit_name, used_name, cache_name in _VERSIONS:
        try:
            limit, used = (int((folder / name).read_text()) for name in (limit_name, used_name))  # "max" is no number
            cache = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        return HostMemory(limit, max(0, limit - used + int(cache.get(cache_name, 0))))
    return None
