"""Pinned memory of its own size: registered once, let go with the last tensor on it; what torch has where CUDA refuses.
On a GPU: what CUDA says of it, and copies both ways."""

from __future__ import annotations

import mmap
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from fastgrpo.policy.pinned import pinned_empty


class Runtime:
    """In the place of CUDA's: notes what is registered, by address."""

    def __init__(self, status: int = 0) -> None:
        self.status, self.registered = status, dict[int, int]()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert flags == 0 and address not in self.registered
        if self.status == 0:
            self.registered[address] = size
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


def install(monkeypatch: pytest.MonkeyPatch, status: int = 0) -> Runtime:
    runtime = Runtime(status)

    def check(found: int) -> None:
        if found:
            raise RuntimeError(f"CUDA error {found}")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", check)
    return runtime


@pytest.mark.parametrize(
    ("shape", "dtype", "size"),
    [((3, 5), torch.float32, 60), ((7,), torch.bfloat16, 14), ((1025, 1024), torch.int8, 1049600)],
)
def test_it_is_as_large_as_it_must_be_and_goes_with_the_last_that_uses_it(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], dtype: torch.dtype, size: int
) -> None:
    runtime = install(monkeypatch)
    made = pinned_empty(shape, dtype)
    assert runtime.registered == {made.data_ptr(): size} and made.data_ptr() % mmap.PAGESIZE == 0
    assert made.shape == shape and made.dtype == dtype and made.is_contiguous() and made.device.type == "cpu"
    made.fill_(3)
    row = made[-1]
    del made
    assert runtime.registered and bool((row == 3).all())
    del row
    assert not runtime.registered


def test_another_tensor_can_move_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """As HostAdamW does: a tensor, made elsewhere, whose memory becomes this."""
    runtime = install(monkeypatch)
    home = torch.empty(4, 3)
    home.set_(pinned_empty((4, 3), torch.float32))  # pyright: ignore[reportArgumentType, reportCallIssue]
    assert runtime.registered == {home.data_ptr(): 48}
    assert float(home.zero_().sum()) == 0
    del home
    assert not runtime.registered


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux tells of a mapping's flags")
def test_a_child_has_no_part_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    made = pinned_empty((1 << 20,), torch.float32)
    assert "dc" in flags_of(made.data_ptr()) and "dc" not in flags_of(torch.ones(1 << 20).data_ptr())


def flags_of(address: int) -> list[str]:
    """Linux's, of the mapping around an address: "dc" is "do not copy on fork"."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError("no mapping there")


def test_nothing_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = install(monkeypatch)
    assert pinned_empty((0, 5), torch.float32).shape == (0, 5) and not runtime.registered


def refuse(self: Any, advice: int) -> None:
    raise OSError(22, "Invalid argument")


def test_advice_that_a_system_does_not_take_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastgrpo.policy.pinned._Pages.madvise", refuse)
    runtime = install(monkeypatch)
    made = pinned_empty((2, 3), torch.float32)
    assert runtime.registered == {made.data_ptr(): 24}


def test_where_cuda_refuses_torch_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = install(monkeypatch, status=801)  # not supported
    asked: list[dict[str, Any]] = []
    empty = torch.empty

    def noted(*size: Any, **options: Any) -> torch.Tensor:
        asked.append(options)
        return empty(*size, **(options | {"pin_memory": False}))

    monkeypatch.setattr("fastgrpo.policy.pinned.torch.empty", noted)
    made = pinned_empty((2, 3), torch.float32)
    assert made.shape == (2, 3) and asked == [{"dtype": torch.float32, "pin_memory": True}] and not runtime.registered


@pytest.mark.gpu
def test_on_cuda_it_is_pinned_and_copies_are_whole() -> None:
    for numbers in (1, 1000, 3 << 20):
        made = pinned_empty((numbers,), torch.float32)
        assert made.is_pinned()
        there = torch.arange(numbers, dtype=torch.float32, device="cuda")
        torch.cuda._sleep(20_000_000)  # what is copied is late
        there.add_(1)
        made.copy_(there, non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(made, torch.arange(1, numbers + 1, dtype=torch.float32))
        back = made.to("cuda", non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(back, there)
    address = made.data_ptr()
    del made
    again = pinned_empty((3 << 20,), torch.float32)  # most likely at the same address, which is free to register
    assert again.is_pinned() and address
