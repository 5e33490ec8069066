"""Causal attention over packed sequences, for any transformers decoder.

Registered under the name `fastgrpo` with transformers' AttentionInterface, so no model code is replaced. The packing
(and with it the SP group) travels as the keyword argument `packing` through the model's forward to `attend`; no state
is kept. No mask is ever built: transformers makes none for an implementation that has no mask function, and the
packing says it all.

    model -> q, k, v [1, heads, U, D]
             tokens -> heads (ulysses.py, when sp > 1)        [T, heads / sp, D]
             backend over the packed sequences                [T, heads / sp, D]
             heads -> tokens                                  [U, heads, D]

Backends, chosen once (`choose_backend`): flash-attn's varlen function where installed, torch's own varlen_attn on CUDA
in half precision, else SDPA. What a backend cannot express (soft caps, sinks, sliding windows shorter than a sequence)
is refused by name.

Shape suffixes: see records.py; Q and K count query and key/value heads.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from fastgrpo.errors import UserError
from fastgrpo.policy.ulysses import heads_to_tokens, repeat_kv, tokens_to_heads

NAME = "fastgrpo"
# Keyword arguments by which transformers' models ask for something that packed causal attention does not do here.
_UNSUPPORTED = ("softcap", "s_aux", "sinks", "position_bias", "head_mask")


@dataclass(frozen=True, slots=True)
class Packing:
    """Where the sequences of a packed row lie, on the device, and how to attend to them.

    `buckets` serve SDPA: sequences of similar length side by side, as indices [b, L] into the T tokens (short ones end
    in repeats of their last token, which nothing attends to: attention is causal), and `unbucket_T`, where each of the
    T outputs lies in the concatenated bucket outputs.
    """

    cu_seqlens: Tensor  # [B + 1] int32
    max_seqlen: int
    backend: Backend
    sp_group: dist.ProcessGroup | None
    buckets: tuple[Tensor, ...] = ()
    unbucket_T: Tensor | None = None


# (q [T, Q, D], k [T, K, D], v [T, K, D], packing, softmax scale) -> [T, Q, D]
Backend = Callable[[Tensor, Tensor, Tensor, Packing, float], Tensor]


def make_packing(
    cu_seqlens: Tensor, max_seqlen: int, backend: Backend, sp_group: dist.ProcessGroup | None, device: torch.device
) -> Packing:
    """`cu_seqlens` [B + 1] int32 on the CPU. The group is None without sequence parallelism."""
    buckets, unbucket_T = _bucket(cu_seqlens) if backend is sdpa else ((), None)
    return Packing(
        cu_seqlens.to(device, non_blocking=True),
        max_seqlen,
        backend,
        sp_group,
        tuple(bucket.to(device, non_blocking=True) for bucket in buckets),
        None if unbucket_T is None else unbucket_T.to(device, non_blocking=True),
    )


def _bucket(cu_seqlens: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """Group sequences whose lengths round up to the same power of two: at most half of a bucket is repeats, and a batch
    of hundreds of short sequences needs a handful of calls a layer."""
    starts, lengths = cu_seqlens[:-1].long(), (cu_seqlens[1:] - cu_seqlens[:-1]).long()
    classes = torch.ceil(torch.log2(lengths.double())).long()
    buckets, unbucket_T, offset = [], torch.empty(int(cu_seqlens[-1]), dtype=torch.long), 0
    for size in classes.unique().tolist():
        members = (classes == size).nonzero().squeeze(1)
        width = int(lengths[members].max())
        step = torch.arange(width)
        inside = step < lengths[members, None]
        index = starts[members, None] + torch.minimum(step, lengths[members, None] - 1)
        buckets.append(index)
        unbucket_T[index[inside]] = offset + torch.arange(index.numel()).view_as(index)[inside]
        offset += index.numel()
    return tuple(buckets), unbucket_T


def sdpa(q_TQD: Tensor, k_TKD: Tensor, v_TKD: Tensor, packing: Packing, scale: float) -> Tensor:
    """Any device and dtype."""
    groups = q_TQD.shape[1] // k_TKD.shape[1]
    k_TQD, v_TQD = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (k_TKD, v_TKD))
    outputs = []
    for index in packing.buckets:
        q, k, v = (x[index].transpose(1, 2) for x in (q_TQD, k_TQD, v_TQD))  # [b, Q, L, D]
        outputs.append(
            F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).transpose(1, 2).flatten(0, 1)
        )
    return torch.cat(outputs)[packing.unbucket_T]


def varlen(q_TQD: Tensor, k_TKD: Tensor, v_TKD: Tensor, packing: Packing, scale: float) -> Tensor:
    """CUDA, bfloat16 or float16."""
    from torch.nn.attention.varlen import varlen_attn

    gqa: dict[str, Any] = {}  # torch 2.11 takes unequal head counts unasked
    if q_TQD.shape[1] != k_TKD.shape[1]:
        gqa = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    cu, longest = packing.cu_seqlens, packing.max_seqlen
    out = varlen_attn(q_TQD, k_TKD, v_TKD, cu, cu, longest, longest, scale=scale, window_size=(-1, 0), **gqa)
    assert isinstance(out, Tensor)
    return out


def flash(q_TQD: Tensor, k_TKD: Tensor, v_TKD: Tensor, packing: Packing, scale: float) -> Tensor:
    """CUDA, bfloat16 or float16, with the package flash-attn."""
    from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

    cu, longest, repeatable = packing.cu_seqlens, packing.max_seqlen, torch.are_deterministic_algorithms_enabled()
    lengths = (cu, cu, longest, longest)
    return flash_attn_varlen_func(
        q_TQD, k_TKD, v_TKD, *lengths, softmax_scale=scale, causal=True, deterministic=repeatable
    )


def choose_backend(wanted: str, device: torch.device, dtype: torch.dtype) -> Backend:
    """The function for `actor.attention`; raises UserError when the wish cannot be met on this machine."""
    half_on_cuda = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    has_flash = half_on_cuda and importlib.util.find_spec("flash_attn") is not None
    if wanted == "auto":
        return flash if has_flash else varlen if half_on_cuda else sdpa
    if wanted == "flash" and not has_flash:
        raise UserError(
            "actor.attention=flash needs a CUDA device, actor.dtype=bfloat16 and the package flash-attn "
            "(pip install flash-attn --no-build-isolation); actor.attention=auto takes what there is."
        )
    if wanted == "varlen" and not half_on_cuda:
        raise UserError(
            f"actor.attention=varlen needs a CUDA device and actor.dtype=bfloat16, not {device.type} and {dtype}; "
            "set actor.attention=sdpa or auto."
        )
    return {"flash": flash, "varlen": varlen, "sdpa": sdpa}[wanted]


@torch.compiler.disable(reason="see compile.py")
def attend(
    module: nn.Module,
    query: Tensor,  # [1, Q, U, D]
    key: Tensor,  # [1, K, U, D]
    value: Tensor,
    attention_mask: None,
    *,
    packing: Packing,
    scaling: float,
    sliding_window: int | None = None,
    **features,
) -> tuple[Tensor, None]:
    """transformers' attention function: returns [1, U, Q, D]."""
    asked = [name for name in _UNSUPPORTED if features.get(name) is not None]
    if sliding_window is not None and packing.max_seqlen > sliding_window:
        asked.append(f"sliding window of {sliding_window} tokens with sequences of {packing.max_seqlen}")
    if asked:
        raise UserError(f"{type(module).__name__} asks for {', '.join(asked)}: fastgrpo has no such attention.")
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # [U, heads, D]
    group = packing.sp_group
    if group is not None:
        sp = dist.get_world_size(group)
        q, k, v = (tokens_to_heads(x, group) for x in (q, repeat_kv(k, sp), repeat_kv(v, sp)))
    out = packing.backend(q, k, v, packing, scaling)
    if group is not None:
        out = heads_to_tokens(out, group)
    return out.unsqueeze(0), None


AttentionInterface.register(NAME, attend)
