"""The trained model as a folder that other programs load as it is: `model/`, an ordinary Hugging Face folder, or with
adapters `adapter/`, which peft loads, and on demand `model/` with the adapters merged in.

Written aside and renamed when complete, so a folder that exists is whole. A run cannot be resumed from one: it holds
no optimizer, and model/ rounded weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from fastgrpo.checkpoint.checksum import safetensors_crc32
from fastgrpo.checkpoint.disk import PART, remove_tree
from fastgrpo.checkpoint.tensors import trained_parameters
from fastgrpo.mesh import Mesh
from fastgrpo.policy.lora import full_adapters, save_adapter
from fastgrpo.policy.model import Policy
from fastgrpo.policy.weights import save_folder

MODEL, ADAPTER = "model", "adapter"


def save_trained(
    policy: Policy, tokenizer: PreTrainedTokenizerBase, folder: Path, mesh: Mesh, *, merged: bool = False
) -> None:
    """What was trained, into `folder`, with the tokenizer, which carries the chat template that the run used;
    `merged`: of adapters the merged model, too. A collective; rank 0 writes. What it cannot write raises OSError on
    every rank, and leaves what was there before."""
    if policy.lora is None or merged:
        save_model(policy, tokenizer, folder / MODEL, mesh)
    if policy.lora is not None:
        tensors = full_adapters(policy.module, policy.device)
        _saved(mesh, folder / ADAPTER, tensors, lambda: write_trained(folder, policy, tensors, tokenizer))


def trained_bytes(policy: Policy, *, merged: bool = False) -> int:
    """What `save_trained` writes, without the few files beside the weights."""
    trained = sum(parameter.numel() for _, parameter in trained_parameters(policy.module))
    if policy.lora is None:
        return trained * policy.stored_dtype.itemsize
    whole = sum(parameter.numel() for parameter in policy.module.parameters()) - trained
    return 4 * trained + (whole * policy.stored_dtype.itemsize if merged else 0)


def save_model(policy: Policy, tokenizer: PreTrainedTokenizerBase, folder: Path, mesh: Mesh) -> None:
    """The whole model, adapters merged in, in the dtype that the checkpoint came in; otherwise as `save_trained`."""
    tensors = policy.export()
    _saved(mesh, folder, tensors, lambda: _write_model(folder, policy, tensors, tokenizer))


def write_trained(
    folder: Path, policy: Policy, tensors: Iterator[tuple[str, Tensor]], tokenizer: PreTrainedTokenizerBase
) -> dict[str, str]:
    """By one rank alone. `tensors`: of policy.trained_names, whole, under the names of the folder. Returns the CRC32 of
    the large files, by their path in `folder`."""
    if policy.lora is None:
        found = _write_model(folder / MODEL, policy, tensors, tokenizer, digest=safetensors_crc32)
        return {f"{MODEL}/{name}": value for name, value in found.items()}
    held = {name: tensor.to("cpu", copy=True) for name, tensor in tensors}
    save_adapter(folder / ADAPTER, policy.lora, held, tokenizer.save_pretrained)
    return {}


def _write_model(
    folder: Path,
    policy: Policy,
    tensors: Iterator[tuple[str, Tensor]],
    tokenizer: PreTrainedTokenizerBase,
    digest: Callable[[Path, Mapping[str, Tensor]], str] | None = None,
) -> dict[str, str]:
    extra = tokenizer.save_pretrained
    return save_folder(folder, policy.folder, tensors, policy.stored_dtype, extra=extra, digest=digest)


def _saved(mesh: Mesh, folder: Path, tensors: Iterator[tuple[str, Tensor]], write: Callable[[], object]) -> None:
    failure: Exception | None = None
    try:
        if mesh.is_main:
            write()
    except Exception as error:
        failure = error
        with suppress(OSError):
            remove_tree(folder.with_name(folder.name + PART))
    for _ in tensors:  # on the ranks that do not write, and where writing failed: the others go on gathering
        pass
    others = mesh.broadcast(None if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None and not _of_the_disk(failure):
        raise failure
    if others is not None:
        raise OSError(f"rank 0 could not save {folder} ({others})") from failure


def _of_the_disk(failure: Exception) -> bool:
    """safetensors has an exception of its own for a full disk; tokenizers raise plain Exception."""
    return isinstance(failure, (OSError, SafetensorError)) or type(failure) is Exception
