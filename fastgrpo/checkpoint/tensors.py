"""The tensors of a checkpoint: masters and optimizer as DCP shards, written and read without a collective.

    masters, Adam state (DTensor, on the device) --copy--> host --FileSystemWriter--> state/__<rank>_0.distcp
    state/ --any rank reads the rows that it holds now--> masters, Adam state, in place

What is planned together is planned in the main thread (saver.py); only files are touched here, so a thread may run it
while the step goes on. Names: `model.<parameter>`, `optimizer.<parameter>.<state>`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from fastgrpo.checkpoint.checksum import write_checksums
from fastgrpo.checkpoint.index import read_index
from fastgrpo.host_memory import pinned
from fastgrpo.policy.host_adamw import new_moment
from fastgrpo.policy.weights import local

_READ_BYTES = 1 << 30  # full tensors that are read back at a time


class ElsewhereError(OSError):
    """What this rank holds now was written on another node's disk."""


def training_tensors(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Masters and what the optimizer holds of each (nothing before its first step), as they are, not copied. What is
    frozen beside adapters is in the model's own folder."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in trained_parameters(module):
        tensors[f"model.{name}"] = parameter.detach()
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{name}.{key}"] = value
    return tensors


def trained_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]


def copied_bytes(tensors: Iterable[Tensor]) -> int:
    """What `copy_to_host` takes of the host: pinned memory is rounded up by torch."""
    shards = [local(tensor) for tensor in tensors]
    return sum(pinned(shard.nbytes) if shard.is_cuda else shard.nbytes for shard in shards)


def copy_to_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This rank's shards in host memory, complete when it returns. Pinned where they come from a GPU: several times
    the speed, and the step waits for it."""
    copies: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        shard = local(tensor)
        copies[name] = torch.empty(shard.shape, dtype=shard.dtype, pin_memory=shard.is_cuda)
        copies[name].copy_(shard, non_blocking=True)
    if any(local(tensor).is_cuda for tensor in tensors.values()):
        torch.cuda.synchronize()
    return copies


class ShardPlanner(DefaultSavePlanner):
    """Plans with the DTensors, so with their places in the whole, and takes the bytes from `shards`."""

    def __init__(self, shards: Mapping[str, Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._shards = shards

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._shards[index.fqn]


def plan_files(folder: Path, plans: list[SavePlan], places: Sequence[int]) -> tuple[list[SavePlan], Metadata]:
    """All ranks' plans -> what each of them writes, into which file. `places`, by rank: what several ranks hold is
    written once in each, so that every place has all that its ranks hold."""
    once, metadata = ShardPlanner({}).create_global_plan(plans)
    if len(set(places)) > 1:
        written: set[tuple[int, MetadataIndex]] = set()
        once = [_unless_written(plan, place, written) for plan, place in zip(plans, places, strict=True)]
    return FileSystemWriter(folder).prepare_global_plan(once), metadata


def _unless_written(plan: SavePlan, place: int, written: set[tuple[int, MetadataIndex]]) -> SavePlan:
    items = [item for item in plan.items if (place, item.index) not in written]
    written |= {(place, item.index) for item in items}
    return replace(plan, items=items)


def write_shard(folder: Path, plan: SavePlan, planner: ShardPlanner) -> list[WriteResult]:
    """This rank's file and its checksum, flushed to the disk. `plan` is its part of the global plan."""
    folder.mkdir(parents=True, exist_ok=True)
    results = FileSystemWriter(folder).write_data(planner.finish_plan(plan), planner).wait()
    write_checksums(folder / name for name in sorted({result.storage_data.relative_path for result in results}))
    return results


def write_index(folder: Path, metadata: Metadata, results: list[list[WriteResult]], here: Sequence[bool]) -> None:
    """`.metadata`, from all ranks' results: which file holds which rows. What was written in several places is looked
    for in the files of the ranks that are `here`."""
    order = sorted(range(len(results)), key=lambda rank: here[rank])  # the last word counts
    FileSystemWriter(folder).finish(metadata, [results[rank] for rank in order])


@torch.no_grad()
def read_tensors(folder: Path, tensors: dict[str, Tensor], metadata: Metadata) -> None:
    """Fill `tensors` (a DTensor: this rank's rows) from the shards, whatever ranks wrote them."""
    reader, planner = FileSystemReader(folder), DefaultLoadPlanner(flatten_state_dict=False)
    planner.set_up_planner(tensors, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    [plan] = reader.prepare_global_plan(planner.create_global_plan([plan]))
    _check_there(folder, plan, metadata)
    reader.read_data(planner.finish_plan(plan), planner).wait()


def _check_there(folder: Path, plan: LoadPlan, metadata: Metadata) -> None:
    files = {metadata.storage_data[item.storage_index].relative_path for item in plan.items}
    if missing := sorted(name for name in files if not (folder / name).is_file()):
        raise ElsewhereError(f"{', '.join(missing)} in {folder.name}/ not on this node")


def restore_tensors(folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Masters and optimizer state in place; state that the optimizer has not made yet is made first."""
    metadata = read_index(folder)
    for name, parameter in trained_parameters(module):
        prefix = f"optimizer.{name}."
        stored = {
            key.removeprefix(prefix): entry
            for key, entry in metadata.state_dict_metadata.items()
            if key.startswith(prefix)
        }
        for key, entry in stored.items():
            assert isinstance(entry, TensorStorageMetadata)
            whole = tuple(entry.size) == tuple(parameter.shape) and parameter.ndim > 0
            optimizer.state[parameter][key] = (
                new_moment(optimizer, parameter, entry.properties.dtype)
                if whole
                else torch.zeros(entry.size, dtype=entry.properties.dtype, device=parameter.device)
            )
    read_tensors(folder, training_tensors(module, optimizer), metadata)


def full_masters(folder: Path, names: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    """(checkpoint name, full float32 master) of each parameter in `names`, read from the shards by one rank alone."""
    metadata = read_index(folder)
    for group in _groups(names, metadata):
        tensors = {name: _empty(metadata, name) for name in group}
        read_tensors(folder, tensors, metadata)
        for name, tensor in tensors.items():
            yield names[name.removeprefix("model.")], tensor


def _groups(names: Iterable[str], metadata: Metadata) -> Iterator[list[str]]:
    group: list[str] = []
    for name in names:
        group.append(f"model.{name}")
        if sum(_entry(metadata, key).size.numel() for key in group) * 4 >= _READ_BYTES:
            yield group
            group = []
    if group:
        yield group


def _entry(metadata: Metadata, name: str) -> TensorStorageMetadata:
    entry = metadata.state_dict_metadata[name]
    assert isinstance(entry, TensorStorageMetadata)
    return entry


def _empty(metadata: Metadata, name: str) -> Tensor:
    entry = _entry(metadata, name)
    return torch.empty(entry.size, dtype=entry.properties.dtype)
