"""AdamW whose moments live in host memory and visit the device, a few parameters at a time, for their step alone.

    inbound   |  m0 v0 ->     m1 v1 ->      m2 v2 ->
    compute   |               AdamW 0       AdamW 1       AdamW 2
    outbound  |                             <- m0 v0      <- m1 v1      <- m2 v2

Forward and backward have the moments' 8 bytes a parameter for themselves, and no micro-batch pays for it: masters and
gradients stay, the copies are made once an update, both ways at the same time. On the device are three visits at most.
The smallest parameters go first and each gradient is freed with its visit, so that embedding and output layer, whose
moments are the largest, come when most gradients are gone.

The numbers are AdamW's to the last bit: it works on each element alone. Not here: masters on the host too, which is
FSDP2's CPU offload (actor.fsdp.offload_policy), nor their parking while the engine draws (parking.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fastgrpo.policy.pinned import pinned_empty
from fastgrpo.policy.weights import local

MOMENTS = ("exp_avg", "exp_avg_sq")
VISIT_BYTES = 256 << 20  # of moments at a time: enough for PCIe's full speed, little beside gradients and masters


class HostAdamW(torch.optim.AdamW):
    """Takes torch.optim.AdamW's arguments. `state` holds the moments as tensors of the host, sharded as the parameters
    are: complete behind `settle`. On a CPU everything is on the host anyway, and the copies are made in its memory."""

    def __init__(self, groups: Iterable[dict[str, Any]], *, visit_bytes: int = VISIT_BYTES, **options: Any) -> None:
        super().__init__(groups, **options)
        self._visit_bytes = visit_bytes
        self._inbound = self._outbound = _Lane(None)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Of all parameters that have a gradient; the gradients are gone afterwards."""
        gradients = {p: p.grad for group in self.param_groups for p in group["params"] if p.grad is not None}
        if not gradients:
            return
        self._open_lanes(next(iter(gradients)).device)
        self._inbound.wait_for(self._outbound)  # the last step's moments, on their way out, are what this one takes in
        visits = [_Visit(self, part) for part in parts_of(list(gradients), self._visit_bytes)]
        for parameter in gradients:
            parameter.grad = None
        visits[0].arrive(self._inbound)
        for before, visit, after in _with_neighbours(visits):
            if after is not None:
                after.arrive(self._inbound)
            self._inbound.hold_compute(visit.arrival)
            for parameter in visit.parameters:
                parameter.grad = gradients.pop(parameter)
            super().step()
            for parameter in visit.parameters:
                parameter.grad = None
            visit.leave(self._outbound)
            if before is not None:
                before.forget(self._outbound)
        visits[-1].forget(self._outbound)

    def settle(self) -> None:
        """Wait until the moments on the host are those of the last step."""
        self._outbound.wait()

    def _open_lanes(self, device: torch.device) -> None:
        if device.type == "cuda" and self._inbound.stream is None:
            self._inbound, self._outbound = _Lane(torch.cuda.Stream(device)), _Lane(torch.cuda.Stream(device))


def new_moment(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
    """Zeros in the shape, and the shards, of `parameter`, where `optimizer` keeps a moment of it."""
    if not isinstance(optimizer, HostAdamW):
        return torch.zeros_like(parameter, dtype=dtype)
    return _on_host(parameter, dtype).zero_()


def parts_of(parameters: Sequence[nn.Parameter], most_bytes: int) -> list[list[nn.Parameter]]:
    """In order of size; as many as have `most_bytes` of moments on this rank, and at least one."""
    parts: list[list[nn.Parameter]] = []
    room = 0
    for parameter in sorted(parameters, key=lambda parameter: local(parameter).numel()):
        size = len(MOMENTS) * local(parameter).nbytes
        if not parts or size > room:
            parts.append([])
            room = most_bytes
        parts[-1].append(parameter)
        room -= size
    return parts


def _with_neighbours(visits: Sequence[_Visit]) -> Iterator[tuple[_Visit | None, _Visit, _Visit | None]]:
    return zip([None, *visits], visits, [*visits[1:], None], strict=False)


class _Visit:
    """Some parameters' moments on their way to the device and back. Before the first step there are none: AdamW makes
    them on the device, and they leave for a place on the host that is made then."""

    def __init__(self, optimizer: HostAdamW, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.arrival: torch.Event | None = None
        self.departure: torch.Event | None = None
        self._state = optimizer.state
        self._home: dict[tuple[nn.Parameter, str], Tensor] = {}
        self._here: list[Tensor] = []

    def arrive(self, lane: _Lane) -> None:
        known = [p for p in self.parameters if MOMENTS[0] in self._state[p]]
        guests = {(p, name): torch.empty_like(p, dtype=self._state[p][name].dtype) for p in known for name in MOMENTS}
        with lane.behind_compute():  # which may still use what was in that memory
            for (parameter, name), guest in guests.items():
                home = self._home[parameter, name] = self._state[parameter][name]
                local(guest).copy_(local(home), non_blocking=True)
                self._state[parameter][name] = guest
            self.arrival = lane.mark()

    def leave(self, lane: _Lane) -> None:
        with lane.behind_compute():
            for parameter in self.parameters:
                for name in MOMENTS:
                    guest = self._state[parameter][name]
                    home = self._home.get((parameter, name))
                    home = _on_host(parameter, guest.dtype) if home is None else home
                    local(home).copy_(local(guest), non_blocking=True)
                    self._state[parameter][name] = home
                    self._here.append(guest)
            self.departure = lane.mark()

    def forget(self, lane: _Lane) -> None:
        """Give the memory to what the compute stream does next, behind the copies from it."""
        lane.hold_compute(self.departure)
        self._here.clear()


class _Lane:
    """A stream for copies beside the compute stream; on a CPU (None) what is asked for is done at once."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self.stream = stream

    def behind_compute(self) -> AbstractContextManager[object]:
        if self.stream is None:
            return nullcontext()
        self.stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self.stream)

    def mark(self) -> torch.Event | None:
        return None if self.stream is None else self.stream.record_event()

    def wait_for(self, other: _Lane) -> None:
        if self.stream is not None and other.stream is not None:
            self.stream.wait_stream(other.stream)

    def hold_compute(self, event: torch.Event | None) -> None:
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    def wait(self) -> None:
        if self.stream is not None:
            self.stream.synchronize()


@torch.no_grad()
def _on_host(parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
    """In the shape, and the shards, of `parameter`; pinned where that is on a GPU."""
    home = torch.empty_like(parameter, dtype=dtype, device="cpu")
    if parameter.device.type == "cuda":
        shard = local(home)
        shard.set_(pinned_empty(shard.shape, dtype))  # pyright: ignore[reportArgumentType, reportCallIssue]
    return home
