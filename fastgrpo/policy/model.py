"""The policy: a transformers decoder under FSDP2 whose forward ends in the head kernels, never in logits.

    config.json -> meta model -> FSDP2 units (each block, and the root) -> empty shards -> rows of the safetensors

`PolicyModule.forward` is the FSDP root's forward, so the head runs where FSDP has gathered its weight. Which head runs
is the caller's choice (head.py); the body does not know. Masters are float32; a block is gathered and computed in
`actor.dtype` and its gradients are reduced in float32. They are sums over all ranks: FSDP's own averaging is off, every
normaliser is in the token weights (batch/denominators.py). Dropout is off: it would make the policy differ from what
the engine sampled.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from fastgrpo.batch.packing import ShardedBatch
from fastgrpo.mesh import Mesh
from fastgrpo.policy import attention, liger
from fastgrpo.policy.compile import INDUCTOR, compile_blocks, require_compiler, training_graphs
from fastgrpo.policy.head import Head, OutputLayer
from fastgrpo.policy.lora import (
    Lora,
    adapter_names,
    adapters_off,
    add_adapters,
    init_adapters,
    is_adapter,
    merged,
    renamed,
)
from fastgrpo.policy.mlp_slices import slice_mlps
from fastgrpo.policy.weights import full_tensors, load_shards, map_checkpoint


class PolicyModule(nn.Module):
    """The FSDP root: decoder, then head."""

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, batch: ShardedBatch, packing: attention.Packing, head: Head) -> Any:
        """All on this rank's device; returns what `head` makes of the hidden states of the batch's rows."""
        hidden_1UH = self.lm.get_decoder()(
            input_ids=batch.input_ids_U[None],
            position_ids=batch.positions_U[None],
            use_cache=False,
            packing=packing,
        ).last_hidden_state
        hidden_RH = hidden_1UH.squeeze(0).index_select(0, batch.rows_R)
        return head(hidden_RH, OutputLayer.of(self.lm), batch)


@dataclass(frozen=True, slots=True)
class Policy:
    """A built policy, with the folder it came from and the checkpoint names of its parameters."""

    module: PolicyModule
    folder: Path
    names: dict[str, str]  # parameter of the module -> tensor in the checkpoint
    stored_dtype: torch.dtype  # of the checkpoint
    device: torch.device
    backend: attention.Backend
    sp_group: dist.ProcessGroup | None
    lora: Lora | None = None
    adapters: bool = True  # false: computes as the base, without the adapters
    compiled: bool = False

    @property
    def base(self) -> Policy:
        """The same module with its adapters off: the reference policy of a run with adapters."""
        return replace(self, adapters=False)

    @property
    def trained_names(self) -> dict[str, str]:
        """Every parameter that is trained -> its name in the folder that training leaves."""
        return self.names if self.lora is None else adapter_names(self.module)

    @property
    def config(self) -> PretrainedConfig:
        return self.module.lm.config

    def run(self, batch: ShardedBatch, head: Head) -> Any:
        """`batch` on the CPU. A collective over all ranks, also for a rank without rows."""
        packing = attention.make_packing(batch.cu_seqlens, batch.max_seqlen, self.backend, self.sp_group, self.device)
        with nullcontext() if self.adapters else adapters_off(self.module):
            return self.module(batch.to(self.device), packing, head)

    @torch.no_grad()
    def score(self, batch: ShardedBatch, head: Head) -> Any:
        """As `run`, without gradients. Leaves nothing gathered: later weights must not meet today's full copies."""
        with training_graphs(blocks(self.module.lm)) if self.compiled else nullcontext():
            out = self.run(batch, torch.no_grad()(head))
        for unit in fsdp_units(self.module):
            unit.reshard()
        return out

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors under their checkpoint names, a block at a time (a collective; see weights.full_tensors), with
        adapters merged in."""
        assert isinstance(self.module, FSDPModule)
        return full_tensors(self.module, self.names, None if self.lora is None else merged)


def fsdp_units(module: nn.Module) -> list[FSDPModule]:
    return [unit for unit in module.modules() if isinstance(unit, FSDPModule)]


def build_policy(
    folder: Path,
    mesh: Mesh,
    *,
    dtype: torch.dtype,
    attention_backend: str,
    trainable: bool,
    gradient_checkpointing: int = 0,
    activation_offload: bool = False,
    mlp_slices: int = 1,
    reshard_after_forward: bool = True,
    offload_policy: bool = False,
    use_liger: bool = False,
    compile_backend: str | None = None,
    trust_remote_code: bool = False,
    lora: Lora | None = None,
) -> Policy:
    """Build from a Hugging Face folder into shards. `dtype` is the compute dtype; masters of what is trained (with
    `lora`, the adapters alone) are float32, everything else is `dtype` itself. `compile_backend`: of torch.compile for
    the blocks, which then have no modules of liger; None: as they are. Raises UserError when the folder or the
    model class does not fit."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    lm = _meta_model(config, torch.float32 if trainable and lora is None else dtype, trust_remote_code)
    checkpoint_map = map_checkpoint(lm, folder)
    if lora is not None:
        adapted = add_adapters(lm, lora)
        checkpoint_map = checkpoint_map.renamed(lambda name: renamed(name, adapted))
    if use_liger and not compile_backend and liger.is_usable(mesh.device):
        liger.use_liger_modules(lm)
    if mlp_slices > 1:
        slice_mlps(blocks(lm), mlp_slices)
    if gradient_checkpointing and trainable:
        _checkpoint_blocks(lm, gradient_checkpointing, offload=activation_offload, pin=mesh.device.type == "cuda")
    if compile_backend:
        if compile_backend == INDUCTOR:
            require_compiler(mesh.device.type)
        compile_blocks(blocks(lm), compile_backend)
    backend = attention.choose_backend(attention_backend, mesh.device, dtype)
    module = PolicyModule(lm).train(trainable)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(trainable and (lora is None or is_adapter(name)))
    shard(module, mesh, dtype, reshard_after_forward=reshard_after_forward, offload_policy=offload_policy)
    module.to_empty(device="cpu" if offload_policy else mesh.device)
    restore_buffers(lm, mesh.device)
    load_shards(lm, checkpoint_map)
    if lora is not None:
        init_adapters(lm, lora.seed)
    names = {f"lm.{name}": key for name, key in checkpoint_map.names.items()}
    sp_group = mesh.sp_group if mesh.sp > 1 else None
    stored_dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    return Policy(
        module, folder, names, stored_dtype, mesh.device, backend, sp_group, lora, compiled=bool(compile_backend)
    )


def _meta_model(config: PretrainedConfig, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    config = copy.deepcopy(config)
    for name, value in config.to_dict().items():  # attention_dropout, resid_pdrop, layerdrop, ...: every family its own
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention.NAME, trust_remote_code=trust_remote_code
        )


def blocks(lm: PreTrainedModel) -> list[nn.Module]:
    """The decoder's layers: what FSDP gathers at a time and checkpointing recomputes."""
    layers = lm.get_decoder().layers
    assert isinstance(layers, nn.ModuleList)
    return list(layers)


def _checkpoint_blocks(lm: PreTrainedModel, every: int, *, offload: bool, pin: bool) -> None:
    """Recompute every `every`-th block in the backward, through transformers' own switch on the layer."""
    plain = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)  # no dropout: no state to keep

    def offloaded(function: Callable, *args: Any) -> Any:
        with torch.autograd.graph.save_on_cpu(pin_memory=pin):  # catches the block's input; the rest is recomputed
            return plain(function, *args)

    block: Any  # transformers.modeling_layers.GradientCheckpointingLayer
    for block in blocks(lm)[::every]:
        block.gradient_checkpointing = True
        block._gradient_checkpointing_func = offloaded if offload else plain


def shard(
    module: PolicyModule, mesh: Mesh, dtype: torch.dtype, *, reshard_after_forward: bool, offload_policy: bool
) -> None:
    """FSDP2: a block a unit, what is left (embedding, norm, head) in the root, which stays gathered until backward."""
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    offload = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda") if offload_policy else OffloadPolicy()
    options: dict[str, Any] = {"mesh": mesh.fsdp_mesh, "mp_policy": precision, "offload_policy": offload}
    for block in blocks(module.lm):
        fully_shard(block, reshard_after_forward=reshard_after_forward, **options)
    fully_shard(module, reshard_after_forward=False, **options)
    for unit in fsdp_units(module):
        unit.set_gradient_divide_factor(1.0)  # only both together make it a sum on every backend
        unit.set_force_sum_reduction_for_comms(True)


@torch.no_grad()
def restore_buffers(lm: PreTrainedModel, device: torch.device) -> None:
    """Recompute what no checkpoint holds (rotary frequencies): `to_empty` left them uninitialised."""
    for module in lm.modules():
        own = dict(module.named_buffers(recurse=False))
        if own:
            for name, buffer in own.items():
                module._buffers[name] = buffer.to(device)
            lm._init_weights(module)
