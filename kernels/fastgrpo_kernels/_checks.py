"""What the ops take: everything else is refused here, with a ValueError that says what to do, before any work is done.

No value of a tensor is looked at: that would be to wait for the device. What only its values could tell (a target
outside the vocabulary, a temperature that is not positive) becomes NaN in its row instead.

Shape suffixes: N rows, H hidden, V vocabulary.
"""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fastgrpo_kernels._chunks import (
    DEFAULT_CHUNK_BYTES_CPU,
    DEFAULT_CHUNK_BYTES_CUDA,
    OPERAND_DTYPES,
    compute_dtype,
    runs_epilogue,
)

IMPLS = ("auto", "reference", "rows", "epilogue")


class HeadOptions(NamedTuple):
    """What a call of either op holds besides its tensors by row, its operands and its bias."""

    logit_scale: float
    softcap: float  # 0 = none
    chunk_bytes: int
    weight_grad_VH: Tensor | None
    impl: str  # `reference` or, with Triton, `auto`, `rows` or `epilogue`


def check_head(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    target_N: Tensor,
    bias_V: Tensor | None,
    *,
    logit_scale: float,
    softcap: float | None,
    chunk_bytes: int | None,
    weight_grad_VH: Tensor | None,
    impl: str,
) -> HeadOptions:
    """Refuse what the ops cannot take, with ValueError; returns the options, their defaults filled in."""
    _check_operands(hidden_NH, weight_VH)
    _check_others(hidden_NH, weight_VH, target_N, bias_V)
    if weight_grad_VH is not None:
        _check_accumulator(hidden_NH, weight_VH, weight_grad_VH)
    hint = ". Multiply hidden_NH and bias_V by a scale that is learned" if isinstance(logit_scale, Tensor) else ""
    scale = number("logit_scale", logit_scale, hint=hint, finite=True)
    cap = 0.0 if softcap is None else number("softcap", softcap, finite=True)
    if cap < 0:
        raise ValueError(f"softcap must be positive, or 0 for none; got {softcap}")
    return HeadOptions(scale, cap, _budget(chunk_bytes, hidden_NH), weight_grad_VH, _choose_impl(impl, hidden_NH))


def number(name: str, x: object, *, hint: str = "", finite: bool = False) -> float:
    """x as a float; ValueError for NaN and what is no number, a tensor too: settings are constants."""
    if isinstance(x, Tensor):
        raise ValueError(
            f"{name} must be a number, got a tensor of shape {tuple(x.shape)}, to which no gradient would flow{hint}"
        )
    if not isinstance(x, Real):
        raise ValueError(f"{name} must be a number, got {x!r}{hint}")
    value = float(x)
    if math.isnan(value) or (finite and math.isinf(value)):
        raise ValueError(f"{name} must be a {'finite ' if finite else ''}number, got {value}{hint}")
    return value


def row_vector(name: str, x: Tensor | None, hidden_NH: Tensor) -> Tensor:
    """A per-row constant, detached and contiguous, in the dtype of the computation; ValueError for another shape, kind
    or device."""
    wanted = f"{name} must be a floating tensor of shape ({hidden_NH.shape[0]},) on {hidden_NH.device}"
    if not isinstance(x, Tensor):
        raise ValueError(f"{wanted}, got {x!r}")
    _check_tensor(name, x)
    if x.shape != hidden_NH.shape[:1] or not x.dtype.is_floating_point or x.device != hidden_NH.device:
        raise ValueError(f"{wanted}, one value for each row of hidden_NH; got {x.dtype} {tuple(x.shape)} on {x.device}")
    return x.detach().to(compute_dtype(hidden_NH)).contiguous()


def temperature_rows(temperature: float | Tensor, hidden_NH: Tensor) -> Tensor:
    """Temperature of each row, NaN where it is not positive; one number for all gives the same bits as a tensor full of
    it."""
    if isinstance(temperature, Tensor):
        return torch.threshold(row_vector("temperature", temperature, hidden_NH), 0.0, math.nan)
    value = number(
        "temperature", temperature, hint=": pass one above 0, or a tensor with one for each row", finite=True
    )
    if value <= 0:
        raise ValueError(f"temperature must be positive, got {value}: greedy samples have no logprob to train on")
    return torch.full(hidden_NH.shape[:1], value, dtype=compute_dtype(hidden_NH), device=hidden_NH.device)


def _check_tensor(name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        hint = ": pass its weight" if isinstance(x, torch.nn.Module) else ""
        raise ValueError(f"{name} must be a torch tensor, got a {type(x).__name__}{hint}")
    if isinstance(x, DTensor):
        raise ValueError(
            f"{name} is a DTensor: call the op inside the FSDP-managed forward, or after unshard(), where parameters "
            "are whole local tensors; of another tensor pass to_local() or full_tensor()"
        )


def _check_operands(hidden_NH: Tensor, weight_VH: Tensor) -> None:
    for name, x in (("hidden_NH", hidden_NH), ("weight_VH", weight_VH)):
        _check_tensor(name, x)
        if x.dim() != 2:
            raise ValueError(f"{name} must have 2 dimensions, got shape {tuple(x.shape)}: flatten batch and sequence")
        if x.dtype not in OPERAND_DTYPES:
            raise ValueError(f"{name} is {x.dtype}: cast it to bfloat16, float32 or float64")
    if weight_VH.shape[0] == 0 or weight_VH.shape[1] != hidden_NH.shape[1]:
        raise ValueError(
            f"hidden_NH {tuple(hidden_NH.shape)} and weight_VH {tuple(weight_VH.shape)} do not fit: pass hidden states "
            "(not logits) of the width of the weight, and the weight as [vocabulary, hidden]"
        )
    if hidden_NH.dtype != weight_VH.dtype:
        raise ValueError(
            f"hidden_NH is {hidden_NH.dtype} and weight_VH {weight_VH.dtype}: cast one to the other's dtype"
        )


def _check_others(hidden_NH: Tensor, weight_VH: Tensor, target_N: Tensor, bias_V: Tensor | None) -> None:
    num_rows, vocab = hidden_NH.shape[0], weight_VH.shape[0]
    _check_tensor("target_N", target_N)
    if target_N.shape != (num_rows,) or target_N.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"target_N must be int64 (or int32) of shape ({num_rows},), one for each row of hidden_NH; got "
            f"{target_N.dtype} {tuple(target_N.shape)}"
        )
    if bias_V is not None:
        _check_tensor("bias_V", bias_V)
        if bias_V.shape != (vocab,) or not bias_V.dtype.is_floating_point:
            raise ValueError(f"bias_V must be floating of shape ({vocab},), got {bias_V.dtype} {tuple(bias_V.shape)}")
    for name, x in (("weight_VH", weight_VH), ("target_N", target_N), ("bias_V", bias_V)):
        if x is not None and x.device != hidden_NH.device:
            raise ValueError(f"{name} is on {x.device} and hidden_NH on {hidden_NH.device}: move one to the other")


def _check_accumulator(hidden_NH: Tensor, weight_VH: Tensor, weight_grad_VH: Tensor) -> None:
    _check_tensor("weight_grad_VH", weight_grad_VH)
    dtype, device = compute_dtype(hidden_NH), hidden_NH.device
    if (
        weight_grad_VH.shape != weight_VH.shape or weight_grad_VH.dtype != dtype or weight_grad_VH.device != device
    ):  # fmt: skip
        raise ValueError(
            f"weight_grad_VH must be {dtype} of shape {tuple(weight_VH.shape)} on {device}, got "
            f"{weight_grad_VH.dtype} {tuple(weight_grad_VH.shape)} on {weight_grad_VH.device}"
        )
    if any(step == 0 < size - 1 for step, size in zip(weight_grad_VH.stride(), weight_grad_VH.shape, strict=True)):
        raise ValueError("weight_grad_VH is expanded, so that places share memory: pass one of its own, zeros at first")


def _budget(chunk_bytes: int | None, hidden_NH: Tensor) -> int:
    if chunk_bytes is None:
        return DEFAULT_CHUNK_BYTES_CUDA if hidden_NH.is_cuda else DEFAULT_CHUNK_BYTES_CPU
    if not isinstance(chunk_bytes, Integral) or chunk_bytes <= 0:
        raise ValueError(
            f"chunk_bytes must be positive and a whole number, got {chunk_bytes!r}: leave it out for the default"
        )
    return int(chunk_bytes)


def _choose_impl(impl: str, hidden_NH: Tensor) -> str:
    """ValueError for what these operands cannot have."""
    if impl not in IMPLS:
        raise ValueError(f"impl is {impl!r}: choose one of {', '.join(IMPLS)}")
    on_gpu = hidden_NH.is_cuda and hidden_NH.dtype != torch.float64
    if impl == "auto":
        return "auto" if on_gpu else "reference"
    interpreted = impl != "reference" and not hidden_NH.is_cuda and _interpreted()
    if impl == "rows" and not (on_gpu or interpreted):
        raise ValueError(
            f"impl 'rows' is for bfloat16 and float32 on a CUDA device, got {hidden_NH.dtype} on {hidden_NH.device}: "
            "use 'auto' (TRITON_INTERPRET=1, set before triton is imported, runs it on a CPU)"
        )
    if impl == "epilogue" and not (runs_epilogue(hidden_NH) or (interpreted and hidden_NH.dtype == torch.float32)):
        raise ValueError(
            f"impl 'epilogue' is for bfloat16 on a CUDA device of compute capability 9, got {hidden_NH.dtype} on "
            f"{hidden_NH.device}: use 'auto' (TRITON_INTERPRET=1 runs it on a CPU, on float32 alone)"
        )
    return impl


def _interpreted() -> bool:
    from fastgrpo_kernels._sweep import INTERPRETED  # where triton is not installed the reference still runs

    return INTERPRETED
