"""Ranks: the only place that builds a DeviceMesh and knows rank arithmetic.

    rank            0   1   2   3   4   5   6   7      world 8, sp 2, tp 4
    dp axis         0   0   1   1   2   2   3   3      ranks of one dp index hold the same rows of tokens
    sp axis         0   1   0   1   0   1   0   1      and share them out along the sequence
    engine          0   0   0   0   1   1   1   1      rollout TP groups, drawn over the same ranks
    tp rank         0   1   2   3   0   1   2   3

FSDP2 shards over dp x sp flattened (with `replicas`, over the ranks inside one replica). SP and TP groups are
consecutive ranks, so that each stays inside a node; they need not be equal.

Objects and metrics travel through `gather` and `reduce`, both on the CPU group: small, once a step. Words that must not
wait for a collective (a save that failed, a signal) travel through the job's key-value store: `open_store`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fastgrpo.errors import UserError

Store = dist.Store  # pyright: ignore[reportPrivateImportUsage]
STORE_TIMEOUT = timedelta(minutes=30)  # as the process group's: longer than any phase


@dataclass(frozen=True, slots=True)
class Mesh:
    rank: int
    local_rank: int
    world: int
    sp: int
    tp: int
    device: torch.device
    fsdp_mesh: DeviceMesh  # 1-D (shard) or 2-D (replicate, shard)
    sp_group: dist.ProcessGroup
    tp_group: dist.ProcessGroup  # carries CPU tensors too
    owns_process_group: bool  # `build_mesh` started it

    @property
    def dp(self) -> int:
        return self.world // self.sp

    @property
    def dp_rank(self) -> int:
        return self.rank // self.sp

    @property
    def sp_rank(self) -> int:
        return self.rank % self.sp

    @property
    def engines(self) -> int:
        return self.world // self.tp

    @property
    def engine(self) -> int:
        return self.rank // self.tp

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value`, in rank order, on every rank."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: Any) -> Any:
        """Rank 0's `value` on every rank."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def reduce(self, values: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
        """`values` (on this rank's device) reduced over all ranks, in place."""
        if self.world > 1:
            dist.all_reduce(values, op)
        return values

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()

    def close(self) -> None:
        """End the process group, unless it was there before."""
        if self.owns_process_group and dist.is_initialized():
            dist.destroy_process_group()


def engine_slice(num_groups: int, group_size: int, engine: int, engines: int) -> range:
    """Which of the step's N = num_groups * group_size requests this engine draws: whole groups, as even as they go."""
    share, extra = divmod(num_groups, engines)
    start = engine * share + min(engine, extra)
    stop = start + share + (engine < extra)
    return range(start * group_size, stop * group_size)


def build_mesh(device_type: str, *, sp: int, tp: int, replicas: int = 1) -> Mesh:
    """Join (or start, for one process) the process group and lay the axes over it. Call once a process.

    Raises UserError when ranks were given different sizes; ValueError when the world does not divide (the configuration
    was checked before: this is for Python users), or a process group that was there before has no backend for CPU
    tensors or none for the device's.
    """
    owns_process_group = not dist.is_initialized()
    if owns_process_group:
        with _one_prefix():
            _init_process_group(device_type)
    require_backends(device_type, str(dist.get_backend_config()))
    world, rank = dist.get_world_size(), dist.get_rank()
    _require_agreement(world, {"sp": sp, "tp": tp, "replicas": replicas})
    for name, size in (("sp", sp), ("tp", tp), ("replicas", replicas)):
        if world % size:
            raise ValueError(f"{world} ranks cannot be cut into {name} groups of {size}.")
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local_rank) if device_type == "cuda" else torch.device("cpu")
    if replicas > 1:
        fsdp_mesh = init_device_mesh(device_type, (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))
    else:
        fsdp_mesh = init_device_mesh(device_type, (world,), mesh_dim_names=("shard",))
    return Mesh(
        rank=rank,
        local_rank=local_rank,
        world=world,
        sp=sp,
        tp=tp,
        device=device,
        fsdp_mesh=fsdp_mesh,
        sp_group=_own_group(consecutive_groups(world, sp), rank),
        tp_group=_own_group(consecutive_groups(world, tp), rank),
        owns_process_group=owns_process_group,
    )


def open_store(name: str) -> Store:
    """A connection of its own to the job's key-value store, its keys under `name`: one for each thread that waits on
    it, because a client that waits is locked. A job that torchrun restarted sees none of the keys before."""
    shared: Store
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if host and port:
        shared = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=STORE_TIMEOUT)
    else:  # a process group that a Python caller made in another way
        shared = dist.distributed_c10d._get_default_store()
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"fastgrpo/{restart}/{name}", shared)


def consecutive_groups(world: int, size: int) -> list[list[int]]:
    return [list(range(start, start + size)) for start in range(0, world, size)]


def _own_group(groups: Sequence[Sequence[int]], rank: int) -> dist.ProcessGroup:
    own: dist.ProcessGroup | None = None
    for ranks in groups:  # every rank must create every group
        group = dist.new_group(list(ranks))
        if rank in ranks:
            assert isinstance(group, dist.ProcessGroup)
            own = group
    assert own is not None
    return own


def require_backends(device_type: str, backends: str) -> None:
    """`backends` as torch writes them, "cpu:gloo,cuda:nccl". Gradients that live in host memory are reduced there, and
    so are the step's objects: the first of either would fail in the middle of a step."""
    served = {pair.split(":")[0] for pair in backends.split(",")}
    if not {"cpu", device_type} <= served:
        raise ValueError(
            f"the process group serves {backends}, this run needs the CPU and {device_type}: start it with "
            f'init_process_group("{"cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"}")'
        )


def _require_agreement(world: int, sizes: dict[str, int]) -> None:
    """Ranks that cut the world differently would wait for each other for ever."""
    found: list[Any] = [sizes] * world
    if world > 1:
        dist.all_gather_object(found, sizes)
    odd = next((rank for rank, other in enumerate(found) if other != found[0]), None)
    if odd is not None:
        raise UserError(
            f"rank 0 was laid out as {found[0]}, rank {odd} as {found[odd]}: their options or their GPUs differ. "
            "Start them alike, and where GPUs differ set rollout.tensor_model_parallel_size"
        )


@contextmanager
def _one_prefix() -> Iterator[None]:
    """torch puts "[rank0]: " before each line of a traceback, by a hook around the hook that is there: once more at
    every process group of a process, and for nothing where there is one rank."""
    hook = sys.excepthook
    yield
    if dist.get_world_size() == 1 or hook.__module__ == sys.excepthook.__module__:
        sys.excepthook = hook


def _init_process_group(device_type: str) -> None:
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    timeout = STORE_TIMEOUT  # longer than any phase: a slower rank is not an error
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group(backend, timeout=timeout)
        return
    # Alone. The variables are set as torchrun would: the engine reads them. Port 0 lets the store choose a free one, so
    # that two runs on one host, or one after the other in one process, never collide.
    store = TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    os.environ.setdefault("LOCAL_RANK", "0")
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port))
    dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
