"""HostParking on the CPU's own memory: the same code, a device that does at once what it is told, and a diary of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from cases import training_state
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor

from fastgrpo.policy.parking import HostParking


class CpuParking(HostParking):
    device_type = "cpu"

    def __init__(self) -> None:
        super().__init__()
        self.diary: list[str] = []  # bytes of each copy, marks and waits

    def _to_host(self, storage: UntypedStorage) -> Any:
        self.diary.append(f"out {storage.nbytes()}")
        return super()._to_host(storage)

    def _copy_back(self, group: Any) -> Any:
        self.diary += [f"in {parked.host.nbytes()}" for parked in group]
        return super()._copy_back(group)

    @contextmanager
    def _beside(self) -> Iterator[None]:
        self.diary.append("behind compute")
        yield

    def _mark(self) -> Any:
        return SimpleNamespace(copies=sum(line.startswith("in ") for line in self.diary))

    def _compute_waits(self, event: Any) -> None:
        self.diary.append(f"compute waits for {event.copies} copies")

    def _wait_for_copies(self) -> None:
        self.diary.append("host waits for copies")

    def _drain(self) -> None:
        self.diary.append("host waits for all")


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_there(tensor: Tensor) -> bool:
    """Whether its memory is; to read a tensor without memory ends the process on a CPU."""
    return local(tensor).untyped_storage().nbytes() > 0


def there(optimizer: torch.optim.Optimizer) -> list[bool]:
    """Of each master and moment: in an assertion that fails, pytest would print, hence read, the tensors."""
    return [is_there(tensor) for tensor in training_state(optimizer)]


def overwrite_freed_memory() -> None:
    """Somebody else uses what was given back."""
    for size in (16, 64, 256, 1024, 4096, 16384):
        for _ in range(64):
            torch.full((size,), float("nan"))
