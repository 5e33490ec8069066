"""What is left of host memory, on made files of the kernel: of the machine, of control groups of both versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastgrpo import host_memory
from fastgrpo.host_memory import HostMemory, own_bytes, read

KIB = 1024


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "meminfo").write_text("MemTotal:  100 kB\nMemFree: 1 kB\nMemAvailable:   50 kB\n")
    return tmp_path


def group(folder: Path, limit: str, used: int, cache: int, version: int = 2) -> None:
    names = {2: ("memory.max", "memory.current"), 1: ("memory.limit_in_bytes", "memory.usage_in_bytes")}[version]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    stat = f"anon 1\ninactive_file {cache}\n" if version == 2 else f"inactive_file 7\ntotal_inactive_file {cache}\n"
    (folder / "memory.stat").write_text(stat)


def seen(root: Path, own: str | None = None) -> HostMemory | None:
    if own is not None:
        (root / "own").write_text(own)
    return read(root / "meminfo", root / "own", root / "groups")


def test_the_machine_alone(root: Path) -> None:
    assert seen(root) == HostMemory(100 * KIB, 50 * KIB)
    (root / "meminfo").write_text("MemTotal: many\n")
    assert seen(root) is None


def test_a_containers_own_group_lies_at_the_top(root: Path) -> None:
    group(root / "groups", "40000", 30_000, 500)
    assert seen(root) == seen(root, "0::/\n") == HostMemory(40_000, 10_500)
    assert seen(root, "0::/../elsewhere/that/is/not/mounted\n") == HostMemory(40_000, 10_500)
    group(root / "groups", "max", 30_000, 500)
    assert seen(root) == HostMemory(100 * KIB, 50 * KIB)


def test_every_group_above_binds(root: Path) -> None:
    """A job's limit lies above the step that this process is in."""
    group(root / "groups" / "job" / "step", "max", 10_000, 0)
    group(root / "groups" / "job", "30000", 25_000, 1_000)
    assert seen(root, "0::/job/step\n") == HostMemory(30_000, 6_000)
    group(root / "groups" / "job" / "step", "20000", 18_000, 0)
    assert seen(root) == HostMemory(20_000, 2_000)
    assert seen(root, "0::/other\n") == HostMemory(100 * KIB, 50 * KIB)


def test_the_first_version(root: Path) -> None:
    lines = "5:cpu:/job\n4:memory:/job\n0::/\n"
    group(root / "groups" / "memory", "9223372036854771712", 60_000, 0, version=1)  # that is: none
    assert seen(root, lines) == HostMemory(100 * KIB, 50 * KIB)
    group(root / "groups" / "memory" / "job", "20000", 19_000, 300, version=1)
    assert seen(root, lines) == HostMemory(20_000, 1_300)
    group(root / "groups" / "memory" / "job", "20000", 30_000, 0, version=1)  # above a limit that was lowered
    assert seen(root, lines) == HostMemory(20_000, 0)


def test_own_memory(tmp_path: Path) -> None:
    status = tmp_path / "status"
    assert own_bytes(status) == 0
    status.write_text("VmRSS:\t 90 kB\nRssAnon:\t 60 kB\nRssFile:\t 30 kB\n")
    assert own_bytes(status) == 60 * KIB


def test_of_this_machine() -> None:
    memory = read()
    assert memory is not None and 0 < memory.available <= memory.total < 1 << 50
    assert 1 << 20 < own_bytes() < memory.total


def test_what_fits_leaves_a_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available_bytes", lambda: host_memory.RESERVE + 300)
    assert host_memory.fits(100, 3) and not host_memory.fits(101, 3)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: None)
    assert host_memory.fits(1 << 60, 3)


def test_pinned_memory_is_rounded_up_to_powers_of_two() -> None:
    sizes = (0, 1, 2, 3, 1 << 20, (1 << 20) + 1, 55_050_240)
    assert [host_memory.pinned(size) for size in sizes] == [0, 1, 2, 4, 1 << 20, 1 << 21, 1 << 26]
