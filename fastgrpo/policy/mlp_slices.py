"""The MLP of a block, computed over slices of the tokens: its intermediate values exist for one slice at a time.

    x [.., U, H] --> slice --> mlp --> y           forward: nothing of the inside is kept, only x
                     slice --> mlp --> y           backward: each slice is computed again, with gradients,
                     ...                           and the weights' gradients are summed in float32

An MLP treats every token alone, so the values are those of the whole, to the rounding of the products; the sum of the
weights' gradients is as exact as one product over all tokens. Per token an MLP keeps three to four times its
intermediate size, which for long sequences is most of what a block keeps. Attention needs no slices: its kernels keep
nothing of the size of the scores.

Modules are exchanged before sharding, as in liger.py: the children stay the same objects under the same names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fastgrpo.errors import UserError


def slice_mlps(blocks: Sequence[nn.Module], slices: int) -> None:
    """Exchange the `mlp` of each block for one that works in `slices` slices, in place. Raises UserError for a class
    whose blocks have none, or one with parameters of its own beside its children's."""
    for block in blocks:
        mlp = getattr(block, "mlp", None)
        if not isinstance(mlp, nn.Module) or next(mlp.parameters(recurse=False), None) is not None:
            raise UserError(
                f"actor.mlp_slices={slices}: {type(block).__name__} has no MLP of linear layers under the name `mlp`; "
                "set actor.mlp_slices=1"
            )
        block.mlp = SlicedMLP(mlp, slices)


class SlicedMLP(nn.Module):
    def __init__(self, whole: nn.Module, slices: int) -> None:
        super().__init__()
        for name, child in whole.named_children():
            self.add_module(name, child)
        self._whole = [whole]  # in a list: as a module of its own it would rename the parameters
        self._slices = slices

    @property
    def whole(self) -> nn.Module:
        """What works on a slice."""
        return self._whole[0]

    @torch.compiler.disable(reason="its backward runs the inside again, which a graph cannot hold")
    def forward(self, x: Tensor) -> Tensor:
        """x [..., U, H]; returns the same shape."""
        return _Sliced.apply(self.whole, self._slices, x, *self.parameters())


class _Sliced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: nn.Module, slices: int, x: Tensor, *parameters: Tensor) -> Tensor:
        """The parameters are arguments so that autograd knows of them; FSDP fills them again for the backward."""
        ctx.whole, ctx.slices = whole, slices
        ctx.save_for_backward(x)
        return torch.cat([whole(part) for part in x.chunk(slices, dim=-2)], dim=-2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        needed = ctx.needs_input_grad[3:]
        weights = [p for p, wanted in zip(ctx.whole.parameters(), needed, strict=True) if wanted]
        sums = [torch.zeros(p.shape, dtype=_sum_dtype(p), device=p.device) for p in weights]
        grad_x = torch.empty_like(x)
        parts = zip(*(tensor.chunk(ctx.slices, dim=-2) for tensor in (x, grad, grad_x)), strict=True)
        for x_part, grad_part, grad_x_part in parts:
            leaf = x_part.detach().requires_grad_()
            with torch.enable_grad():
                out = ctx.whole(leaf)
            of_x, *of_weights = torch.autograd.grad(out, [leaf, *weights], grad_part)
            grad_x_part.copy_(of_x)
            for total, of_weight in zip(sums, of_weights, strict=True):
                total.add_(of_weight)
        found = iter([total.to(p.dtype) for total, p in zip(sums, weights, strict=True)])
        return None, None, grad_x, *(next(found) if wanted else None for wanted in needed)


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
