"""Host memory that is left, as far as Linux tells: a copy that does not fit would end the process, not the save."""

from __future__ import annotations

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")  # version 2; inside a container this is the container's own
RESERVE = 2 << 30  # bytes that stay free


def available_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int | None:
    """The least of what the machine and this process's control group have left; None where nobody knows."""
    found = [size for size in (_of_machine(meminfo), _of_group(cgroup)) if size is not None]
    return min(found) if found else None


def fits(size: int, processes: int) -> bool:
    """Whether each of `processes` on this host may take `size` bytes more; true where nobody knows."""
    available = available_bytes()
    return available is None or size * processes <= available - RESERVE


def _of_machine(meminfo: Path) -> int | None:
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def _of_group(cgroup: Path) -> int | None:
    try:
        limit, used = ((cgroup / name).read_text().strip() for name in ("memory.max", "memory.current"))
        cache = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        return int(limit) - int(used) + int(cache.get("inactive_file", 0))  # "max", no limit, is no number
    except (OSError, ValueError):
        return None
