"""Checkpoint names and bytes: which tensor of a Hugging Face folder is which parameter, read into shards, written back.

The one module that maps parameters to checkpoint names, through transformers' own conversions; loading, weight sync
and export all go through it. Models whose checkpoints are fused or split on loading (experts, mostly) are refused.

    folder/*.safetensors --slice of rows--> this rank's shard          (load: nobody reads the whole model)
    shards --one all-gather a block--> full tensors, a block at a time (full_tensors: nobody holds the whole model)
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from fastgrpo.errors import UserError

_SHARD_BYTES = 4 << 30  # a file of an exported checkpoint
_COPIED = (".json", ".txt", ".model", ".jinja", ".py")  # config, tokenizer, template, code that came with the weights


@dataclass(frozen=True, slots=True)
class CheckpointMap:
    """Where each parameter lies. `names`: parameter name -> name in the checkpoint; `files`: that name -> file."""

    names: dict[str, str]
    files: dict[str, Path]

    def renamed(self, new_name: Callable[[str], str]) -> CheckpointMap:
        """The same for a model whose parameters have got other names."""
        return CheckpointMap({new_name(name): key for name, key in self.names.items()}, self.files)


def map_checkpoint(model: PreTrainedModel, folder: Path) -> CheckpointMap:
    """Match the folder's tensors with the parameters of `model` (on any device, before sharding).

    Raises UserError when the checkpoint lacks a parameter or needs a conversion other than renaming.
    """
    files = _tensor_files(folder)
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    state = model.state_dict()
    names: dict[str, str] = {}
    for key in files:
        name, converted = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        if converted is not None:
            raise UserError(
                f"{folder}: {type(model).__name__} fuses or splits {key!r} when it is loaded; fastgrpo trains models "
                "whose parameters are the checkpoint's own tensors (dense decoders)."
            )
        names[name] = key
    wanted = {name for name, _ in model.named_parameters()}  # tied parameters once, under their first name
    missing = sorted(wanted - set(names))
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise UserError(f"{folder} lacks {shown}: is it a complete checkpoint of {type(model).__name__}?")
    return CheckpointMap({name: key for name, key in names.items() if name in wanted}, files)


def _tensor_files(folder: Path) -> dict[str, Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = {key: folder / file for key, file in json.loads(index.read_text())["weight_map"].items()}
        absent = sorted({path.name for path in files.values() if not path.exists()})
        if absent:
            raise UserError(
                f"{folder} lacks the file {', '.join(absent)}, which {index.name} names: download it again."
            )
        return files
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise UserError(
            f"{folder} holds no *.safetensors: fastgrpo reads no other weight format. Convert it once with "
            "transformers' save_pretrained."
        )
    files = {}
    for path in paths:
        with _open(path) as tensors:
            files.update(dict.fromkeys(tensors.keys(), path))
    return files


def _open(path: Path) -> Any:
    try:
        return safe_open(path, "pt")
    except SafetensorError as error:
        raise UserError(f"{path} is damaged ({error}), as after an interrupted download: fetch it again.") from error


@torch.no_grad()
def load_shards(model: nn.Module, checkpoint: CheckpointMap) -> None:
    """Fill every parameter of `model` (sharded or not) from the checkpoint, reading only this rank's rows."""
    by_file: dict[Path, list[str]] = {}
    for name, key in checkpoint.names.items():
        by_file.setdefault(checkpoint.files[key], []).append(name)
    parameters = dict(model.named_parameters())
    for path, names in by_file.items():
        with _open(path) as tensors:
            for name in names:
                source, parameter = tensors.get_slice(checkpoint.names[name]), parameters[name]
                shape = tuple(source.get_shape())
                if shape != tuple(parameter.shape):
                    raise UserError(f"{path}: {name} has shape {shape}, config.json says {tuple(parameter.shape)}.")
                if not isinstance(parameter, DTensor):
                    parameter.copy_(source[:] if shape else source[...])
                    continue
                if 0 not in parameter.to_local().shape:
                    parameter.to_local().copy_(source[local_rows(parameter)])


def local(tensor: Tensor) -> Tensor:
    """This rank's shard, or what is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_rows(parameter: Tensor) -> slice:
    """The rows of a parameter that this rank holds."""
    if not isinstance(parameter, DTensor) or not parameter.ndim:
        return slice(None)
    local_shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return slice(offset[0], offset[0] + local_shape[0])


def full_tensors(
    root: FSDPModule, names: dict[str, str], value: Callable[[nn.Module, str, str, Tensor], Tensor] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(checkpoint name, full tensor in the compute dtype) of the parameters in `names`, one FSDP unit at a time. A
    collective: every rank iterates to the end. A tensor is valid only until the next is asked for. Tied parameters
    come once. `value(unit, name in it, checkpoint name, parameter)` stands for the parameter, where it is given."""
    assert isinstance(root, nn.Module)
    units = {name: module for name, module in root.named_modules() if isinstance(module, FSDPModule)}
    for unit_name, unit in units.items():
        inner = tuple(
            f"{other}."
            for other in units
            if other != unit_name and other.startswith(f"{unit_name}." if unit_name else "")
        )
        prefix = f"{unit_name}." if unit_name else ""
        unit.unshard()
        assert isinstance(unit, nn.Module)
        for name, parameter in unit.named_parameters():
            full_name = prefix + name
            if full_name in names and not full_name.startswith(inner):
                key, tensor = names[full_name], parameter.detach()
                yield key, tensor if value is None else value(unit, name, key, tensor)
        unit.reshard()


def save_folder(
    folder: Path,
    source: Path,
    tensors: Iterator[tuple[str, Tensor]],
    dtype: torch.dtype,
    *,
    extra: Callable[[Path], object],
    digest: Callable[[Path, Mapping[str, Tensor]], str] | None = None,
) -> dict[str, str]:
    """Write a Hugging Face folder: weights in `dtype`, everything else copied from the `source` folder, then what
    `extra` writes into it. Written aside and renamed when complete; one rank writes. Returns what `digest` makes
    of each file of weights and its tensors, by the file's name."""
    part = _fresh(folder)
    files: dict[str, str] = {}
    digests: dict[str, str] = {}
    held: dict[str, Tensor] = {}
    total, held_bytes, number = 0, 0, 1

    def flush() -> None:
        file = f"model-{number:05d}.safetensors"
        save_file(held, part / file, metadata={"format": "pt"})
        files.update(dict.fromkeys(held, file))
        if digest is not None:
            digests[file] = digest(part / file, held)
        held.clear()

    for name, tensor in tensors:
        held[name] = tensor.to("cpu", dtype, copy=True)
        size = held[name].nbytes
        total, held_bytes = total + size, held_bytes + size
        if held_bytes >= _SHARD_BYTES:
            flush()
            number, held_bytes = number + 1, 0
    if held:
        flush()
    if len(set(files.values())) == 1:
        [only] = set(files.values())
        (part / only).rename(part / "model.safetensors")
        digests = {"model.safetensors": digests[only]} if digests else {}
    else:
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (part / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    for path in source.iterdir():
        if path.is_file() and path.suffix in _COPIED and "safetensors" not in path.name:
            shutil.copy(path, part)
    extra(part)
    _complete(part, folder)
    return digests


@contextmanager
def written_aside(folder: Path) -> Iterator[Path]:
    """A fresh folder `folder`.part, which becomes `folder` when the block ends well."""
    part = _fresh(folder)
    yield part
    _complete(part, folder)


def _fresh(folder: Path) -> Path:
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    return part


def _complete(part: Path, folder: Path) -> None:
    for path in part.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)
