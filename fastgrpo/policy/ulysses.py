"""Ulysses sequence parallelism: two all-to-alls that turn a share of the tokens into a share of the heads and back.

    rank 0: tokens 0..U-1, heads 0..H-1          rank 0: tokens 0..T-1, heads 0..h-1
    rank 1: tokens U..T-1, heads 0..H-1   <-->   rank 1: tokens 0..T-1, heads h..H-1       T = sp * U, h = H / sp

Attention itself needs every token of a sequence but only one head at a time, so between the two it runs unchanged.
With fewer key/value heads than ranks each is repeated sp / Hkv times first, which keeps every query head on the rank
of its key/value head: rank r holds query heads r*Hq/sp .. and key/value head r*Hkv/sp (rounded down). The repetition
is an ordinary op, so the gradient of a repeated head is the sum over its copies.

Both directions are eager collectives of the SP group on purpose: compiled, their backward could be reordered against
FSDP's reduce-scatters, differently on each rank, which deadlocks.

Shape suffixes: T tokens of the SP group, U = T / sp tokens of this rank, H heads, D head size.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class _AllToAll(torch.autograd.Function):
    """[U, H, D] -> [T, H / sp, D] when `to_heads`, else the inverse. Each is the other's backward."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup, to_heads: bool) -> Tensor:
        ctx.group, ctx.to_heads = group, to_heads
        return _exchange(x, group, to_heads)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        return _exchange(grads[0], ctx.group, not ctx.to_heads), None, None


def _exchange(x: Tensor, group: dist.ProcessGroup, to_heads: bool) -> Tensor:
    sp = dist.get_world_size(group)
    if to_heads:
        tokens, heads, size = x.shape
        send = x.view(tokens, sp, heads // sp, size).transpose(0, 1).contiguous()  # [sp (receiver), U, h, D]
        received = torch.empty_like(send)  # [sp (sender = token share), U, h, D]
        dist.all_to_all_single(received, send, group=group)
        return received.view(sp * tokens, heads // sp, size)
    tokens, heads, size = x.shape
    send = x.contiguous().view(sp, tokens // sp, heads, size)  # [sp (receiver = token share), U, h, D]
    received = torch.empty_like(send)  # [sp (sender = head share), U, h, D]
    dist.all_to_all_single(received, send, group=group)
    return received.transpose(0, 1).reshape(tokens // sp, sp * heads, size)


def tokens_to_heads(x_UHD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[U, H, D] of every rank -> [T, H / sp, D]; H is divisible by sp (see `repeat_kv`)."""
    return _AllToAll.apply(x_UHD, group, True)


def heads_to_tokens(x_THD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[T, H / sp, D] of every rank -> [U, H, D]."""
    return _AllToAll.apply(x_THD, group, False)


def repeat_kv(x_UHD: Tensor, sp: int) -> Tensor:
    """Repeat each key/value head so that sp divides their number; nothing to do when it does already."""
    heads = x_UHD.shape[1]
    return x_UHD if heads % sp == 0 else x_UHD.repeat_interleave(sp // heads, dim=1)
