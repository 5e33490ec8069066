"""Masters and optimizer state in pinned host memory while the engine generates, copied beside the device's other work.

    compute stream  AdamW | weights -> engine        |          the engine draws | forward, backward       | AdamW
    copy stream           | moments, masters -> host |                           | masters, moments -> GPU |
                          ^ send                     ^ free           bring_back ^                  arrive ^

Between `send` and `free` the masters may be read, as the weight sync does. In `free` the host waits: the engine takes
its cache from the device itself, so the memory must be gone before. `bring_back` takes all memory at once and returns;
the compute stream waits for the masters, and for the moments only from `arrive` on.

Storages are emptied and filled again in place, because FSDP keeps views of its shards: a new tensor would leave them
behind. Not here: when the engine may be given the memory (Actor.lent), and what it comes to (plan/memory.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, UntypedStorage

from fastgrpo.policy.weights import local


class _Parked(NamedTuple):
    storage: UntypedStorage  # on the device; empty while it is lent
    host: UntypedStorage  # its bytes


class HostParking:
    """Lends the device memory of masters and moments. Tensors that live on the CPU stay where they are."""

    device_type = "cuda"

    def __init__(self) -> None:
        self._masters: list[_Parked] = []
        self._moments: list[_Parked] = []
        self._sent = self._freed = False
        self._copy_stream: torch.cuda.Stream | None = None
        self._arrival: torch.Event | None = None  # of the moments, when they were brought back last

    def send(self, masters: Iterable[Tensor], moments: Iterable[Tensor]) -> None:
        """Begin to copy both to the host, behind all that the compute stream was given. Until `bring_back` nobody may
        write them."""
        self.require_home()
        masters_s, moments_s = self._storages(masters), self._storages(moments)
        if self._arrival is not None:  # torch would take new pinned memory beside what is still being read
            self._wait_for_copies()
        self._sent = True
        if masters_s or moments_s:
            with self._beside():
                self._moments = [self._to_host(storage) for storage in moments_s]
                self._masters = [self._to_host(storage) for storage in masters_s]

    def free(self) -> None:
        """Wait until the copies, and all that reads the masters, are done; then give the memory back to torch."""
        self.require_readable()
        if self._masters or self._moments:
            self._drain()
        for parked in (*self._moments, *self._masters):
            parked.storage.resize_(0)
        self._freed = True

    def bring_back(self) -> None:
        """Fill the memory again. What the compute stream is given from here on finds the masters, and the moments
        behind `arrive`."""
        lent = [*self._masters, *self._moments]
        if self._freed:
            for parked in lent:  # by the compute stream, whose pool it came from
                parked.storage.resize_(parked.host.nbytes())
        if lent:
            with self._beside():
                there = self._copy_back(self._masters)
                self._arrival = self._copy_back(self._moments)
            self._compute_waits(there)
        # torch's pinned memory is not used again before the copies from it are done.
        self._masters, self._moments = [], []
        self._sent = self._freed = False

    def arrive(self) -> None:
        """What the compute stream is given from here on finds the moments, too."""
        self.require_home()
        if self._arrival is not None:
            self._compute_waits(self._arrival)

    def require_home(self) -> None:
        """Raises RuntimeError while the memory is lent."""
        if self._sent:
            raise RuntimeError(
                "Masters and optimizer state are in host memory while the engine is awake "
                "(actor.fsdp.offload_during_rollout): no pass, update or save can read them before it sleeps."
            )

    def require_readable(self) -> None:
        """Raises RuntimeError when the masters are on the host alone."""
        if self._freed:
            raise RuntimeError(
                "The masters are in host memory already (actor.fsdp.offload_during_rollout): an engine may ask for the "
                "weights once, and not at all where its `holds` said that it has them."
            )

    def _storages(self, tensors: Iterable[Tensor]) -> list[UntypedStorage]:
        """Of this rank's shards, each once."""
        found: dict[int, UntypedStorage] = {}
        for tensor in tensors:
            storage = local(tensor).untyped_storage()
            if storage.device.type == self.device_type and storage.nbytes():
                found[storage.data_ptr()] = storage
        return list(found.values())

    def _to_host(self, storage: UntypedStorage) -> _Parked:
        host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=self.device_type == "cuda")
        return _Parked(storage, host.untyped_storage().copy_(storage, non_blocking=True))

    def _copy_back(self, group: list[_Parked]) -> torch.Event:
        for parked in group:
            parked.storage.copy_(parked.host, non_blocking=True)
        return self._mark()

    # ---- the device: a stand-in for tests replaces what is below

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """On the copy stream, behind all that the compute stream was given so far: it wrote what is sent, and it may
        still use what was in the memory that is filled again."""
        stream = self._copy_stream = self._copy_stream or torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield

    def _mark(self) -> torch.Event:
        return torch.cuda.current_stream().record_event()

    def _compute_waits(self, event: torch.Event) -> None:
        torch.cuda.current_stream().wait_event(event)

    def _wait_for_copies(self) -> None:
        assert self._copy_stream is not None
        self._copy_stream.synchronize()

    def _drain(self) -> None:
        torch.cuda.synchronize()
