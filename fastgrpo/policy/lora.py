"""LoRA: low-rank adapters beside frozen linear layers, in peft's terms and under peft's names.

    y = W x + b + (lora_alpha / lora_rank) B (A x)         A [rank, in], B [out, rank], both float32 masters

The layers are exchanged before sharding, as in liger.py; A starts uniform within 1 / sqrt(in) (peft's own start) and B
at 0, so the first policy is the base. The base is the reference policy: the same module with its adapters off. For the
engine and for a merged folder a layer's weight is W + scale B A, see `merge`.

Own modules instead of peft's: peft turns adapters off by way of requires_grad, which FSDP holds parameters by. peft
writes the adapters' config, and reads what is written here (tests/unit/test_lora.py).
"""

from __future__ import annotations

import importlib.util
import logging
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from fastgrpo.errors import UserError
from fastgrpo.policy.weights import local, local_rows, written_aside

log = logging.getLogger("fastgrpo")

ALL_LINEAR = "all-linear"
_PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class Lora:
    """What adapters a policy has. Example: Lora(16, 32, ("q_proj", "v_proj"), 0, "Qwen/Qwen2.5-7B-Instruct")."""

    rank: int
    alpha: int
    targets: tuple[str, ...]  # ends of module names, or all-linear: every linear layer but the output layer
    seed: int
    base: str  # the base model, as an adapter folder names it

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class LoraLinear(nn.Module):
    """A linear layer with adapters. `active` is false only inside `adapters_off`."""

    def __init__(self, base_layer: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.base_layer = base_layer
        device = base_layer.weight.device
        self.lora_A = nn.Linear(base_layer.in_features, rank, bias=False, device=device, dtype=torch.float32)
        self.lora_B = nn.Linear(rank, base_layer.out_features, bias=False, device=device, dtype=torch.float32)
        self.scale = scale
        self.active = True

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in]; returns [..., out]."""
        out = self.base_layer(x)
        return out + self.lora_B(self.lora_A(x)) * self.scale if self.active else out


def require_peft() -> None:
    """Raises UserError. Asked at the start: the first adapter folder is written hours later."""
    if importlib.util.find_spec("peft") is None:
        raise UserError('model.lora_rank needs peft, which writes the adapters\' folder: pip install "fastgrpo[lora]"')


def add_adapters(lm: PreTrainedModel, lora: Lora) -> set[str]:
    """Exchange the targets of `lm` in place, on any device. Returns the names of the exchanged modules.

    Raises UserError when a target is not there, is no linear layer, or is the output layer.
    """
    found: dict[str, nn.Module] = {}
    output = lm.get_output_embeddings()
    for name, module in lm.named_modules():
        wanted = [t for t in lora.targets if name == t or name.endswith(f".{t}")]
        if wanted or (lora.targets == (ALL_LINEAR,) and isinstance(module, nn.Linear) and module is not output):
            found[name] = module
    for target in lora.targets:
        if target != ALL_LINEAR and not any(name == target or name.endswith(f".{target}") for name in found):
            inner = [n for n, m in lm.named_modules() if isinstance(m, nn.Linear) and m is not output]
            names = sorted({name.rpartition(".")[2] for name in inner})
            raise UserError(
                f"model.target_modules holds {target!r}, and {type(lm).__name__} has no such module; the linear "
                f"layers of its blocks are {', '.join(names)}"
            )
    for name, module in found.items():
        if not isinstance(module, nn.Linear) or module is output:
            what = "the output layer, whose weight the loss reads itself" if module is output else "no linear layer"
            raise UserError(f"model.target_modules: {name} is {what}; adapters go on the linear layers of the blocks")
        parent, _, leaf = name.rpartition(".")
        setattr(lm.get_submodule(parent), leaf, LoraLinear(module, lora.rank, lora.scale))
    return set(found)


def warn_of_narrow_layers(module: nn.Module) -> None:
    """A product B A has no more rank than the smaller side of its layer: what is above it costs memory alone."""
    narrow: dict[str, int] = {}
    for name, layer in module.named_modules():
        if isinstance(layer, LoraLinear):
            smaller = min(layer.base_layer.in_features, layer.base_layer.out_features)
            if layer.lora_A.out_features > smaller:
                narrow[name.rpartition(".")[2]] = smaller
    if narrow:
        layers = ", ".join(f"{name} ({size})" for name, size in sorted(narrow.items()))
        log.warning(
            f"model.lora_rank is above the smaller side of {layers}: adapters of a higher rank change nothing there "
            "and cost memory; a lower rank, or model.target_modules without these layers, spares it"
        )


def renamed(name: str, adapted: set[str]) -> str:
    """Name of a base parameter after `add_adapters`: x.q_proj.weight -> x.q_proj.base_layer.weight."""
    module, _, leaf = name.rpartition(".")
    return f"{module}.base_layer.{leaf}" if module in adapted else name


def is_adapter(name: str) -> bool:
    """Whether a parameter of an adapted module is part of an adapter, by its name."""
    return ".lora_A." in name or ".lora_B." in name


@torch.no_grad()
def init_adapters(lm: nn.Module, seed: int) -> None:
    """The same values however the parameters are sharded: each A is drawn whole, from a generator of its own."""
    for name, parameter in lm.named_parameters():
        if ".lora_B." in name:
            parameter.zero_()
        elif ".lora_A." in name:
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
            bound = parameter.shape[1] ** -0.5
            whole = torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)
            local(parameter).copy_(whole[local_rows(parameter)])


@contextmanager
def adapters_off(module: nn.Module) -> Iterator[None]:
    """Inside, the module computes what its base does, bit for bit."""
    layers = [layer for layer in module.modules() if isinstance(layer, LoraLinear)]
    for layer in layers:
        layer.active = False
    try:
        yield
    finally:
        for layer in layers:
            layer.active = True


def merged(unit: nn.Module, name: str, key: str, parameter: Tensor) -> Tensor:
    """What an ordinary model of this policy has for `parameter`: `name` in the gathered `unit`, `key` in a folder."""
    owner, _, leaf = name.removesuffix(".weight").rpartition(".")
    if leaf != "base_layer" or not name.endswith(".weight"):
        return parameter
    layer = unit.get_submodule(owner)
    assert isinstance(layer, LoraLinear)
    return merge(parameter, layer.lora_A.weight, layer.lora_B.weight, layer.scale, key)


@torch.no_grad()
def merge(base: Tensor, a: Tensor, b: Tensor, scale: float, key: str) -> Tensor:
    """base [out, in] + scale B A in base's dtype, the product in float32.

    In bfloat16 an update that is smaller than half of a weight's last place would be rounded away, all of it: the
    base lies on the grid. So the sum is rounded up or down at random, with the probability that keeps its mean. The
    draw is a function of `key`: the same on every rank, and at every step.
    """
    exact = base.float().addmm(b.float(), a.float(), alpha=scale)
    if base.dtype != torch.bfloat16:
        return exact.to(base.dtype)
    generator = torch.Generator(base.device).manual_seed(zlib.crc32(key.encode()))
    noise = torch.randint(0, 1 << 16, base.shape, generator=generator, device=base.device, dtype=torch.int32)
    bits = exact.view(torch.int32).add_(noise).bitwise_and_(-(1 << 16))  # bfloat16 is the upper half of float32
    return bits.view(torch.float32).to(torch.bfloat16)


def peft_name(name: str) -> str:
    """lm.model.layers.0.self_attn.q_proj.lora_A.weight, a parameter of PolicyModule, in an adapter folder."""
    return _PEFT_PREFIX + name.removeprefix("lm.")


def adapter_names(module: nn.Module) -> dict[str, str]:
    """Parameter -> its name in an adapter folder."""
    return {name: peft_name(name) for name, _ in module.named_parameters() if is_adapter(name)}


def full_adapters(module: nn.Module, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """(name in an adapter folder, full float32 master), one at a time; a collective: every rank iterates to the end."""
    for name, parameter in module.named_parameters():
        if is_adapter(name):
            value: Tensor = parameter.detach()
            if isinstance(value, DTensor):  # offloaded shards are gathered on the device
                shape, stride = value.shape, value.stride()
                shard = value.to_local().to(device)
                value = DTensor.from_local(
                    shard, value.device_mesh, value.placements, run_check=False, shape=shape, stride=stride
                ).full_tensor()
            yield peft_name(name), value


def save_adapter(folder: Path, lora: Lora, tensors: Mapping[str, Tensor], extra: Any) -> None:
    """A folder that `peft.PeftModel.from_pretrained` loads: adapter_config.json, adapter_model.safetensors in float32,
    and what `extra` writes into it. Written aside and renamed when complete."""
    from peft import LoraConfig  # imports much, and only this needs it

    # As they were given: an end such as layers.3.mlp.down_proj means one layer, and its last word would mean them all.
    found = {name.rpartition(".lora_")[0].rpartition(".")[2] for name in tensors}
    modules = found if lora.targets == (ALL_LINEAR,) else set(lora.targets)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=sorted(modules),
        task_type="CAUSAL_LM",
        base_model_name_or_path=lora.base,
        inference_mode=True,
    )
    with written_aside(folder) as part:
        save_file(dict(tensors), part / "adapter_model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(str(part))
        extra(part)
