"""The two logits that decide a row's logprob, the target's and the largest of the others', in plain fp32, in Triton.

Tensor cores cut off what they add, more the longer the row: a logit near 29 is off by up to 1.2e-4 at H = 4096, whoever
multiplies. One product of single vectors a row costs next to nothing beside V of them:

    target_logits    e_y of each row                                                  1 program a row
    refine           sums of a row with e_t and e_y in place of the products'
                     a_t (its largest logit but y's) and a_y   ->  logprob, entropy, sum

With S, M about the shift k (_row_stats.py), d = e_t - a_t, g = a_y - k:

    S' = S + exp(a_t - k) (e^d - 1),    M' = M + exp(a_t - k) ((e^d - 1) (a_t - k) + e^d d),    g' = g + e_y - a_y

What is left is the error of the other logits, each times its probability. D keeps the products' own.

Shape suffixes: C rows of a chunk, H hidden, V vocabulary.
"""

from __future__ import annotations

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# (device code is not what it looks like, and a launch takes options that are not among the parameters)
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastgrpo_kernels._row_stats import LOG2E, SHIFT_FLOOR, logit_of, row_result

REFINED_WIDTH = 2048  # from this H on: at 1536 the errors are 5e-5, below what finding the largest logit is worth
NO_LOGIT = tl.constexpr(-1e29)  # below: no other token counts
MOST = tl.constexpr(1.0)  # nats that a logit may be off; where it is more, no digit of it is right
_BLOCK = 1024


class RowSums(NamedTuple):
    """Of each row of a chunk, [C]; see _row_stats.py."""

    rest_C: Tensor  # S
    mean_C: Tensor  # M
    target_C: Tensor  # a_y, nats
    top_C: Tensor  # a_t, nats
    column_C: Tensor  # t, int32; -1: none

    @classmethod
    def empty(cls, rows: int, device: torch.device) -> RowSums:
        numbers = torch.empty(4, rows, dtype=torch.float32, device=device)
        return cls(*numbers, torch.empty(rows, dtype=torch.int32, device=device))


@triton.jit
def _exact_logit(
    hidden_ptr,
    hidden_step,
    weight_ptr,
    weight_stride,
    weight_step,
    bias_ptr,
    token,
    slope,
    softcap_inverse,
    width,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The logit of one token for the row that hidden_ptr is at."""
    weight_ptr += token.to(tl.int64) * weight_stride
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < width
        x = tl.load(hidden_ptr + at * hidden_step, mask=inside, other=0.0).to(tl.float32)
        w = tl.load(weight_ptr + at * weight_step, mask=inside, other=0.0).to(tl.float32)
        total += x * w
    product = tl.sum(total, 0)
    if HAS_BIAS:
        product += tl.load(bias_ptr + token).to(tl.float32)
    logit, _ = logit_of(product, slope, softcap_inverse, HAS_SOFTCAP)
    return logit


@triton.jit
def _held(gain):
    return tl.minimum(tl.maximum(gain, -MOST), MOST)


@triton.jit
def target_logits_kernel(
    hidden_ptr,
    hidden_stride,
    hidden_step,
    weight_ptr,
    weight_stride,
    weight_step,
    bias_ptr,
    target_ptr,
    slope_ptr,
    out_ptr,
    softcap_inverse,
    width,
    vocab,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row).to(tl.int64)
    place = tl.where((target >= 0) & (target < vocab), target, 0)
    logit = _exact_logit(
        hidden_ptr + row * hidden_stride,
        hidden_step,
        weight_ptr,
        weight_stride,
        weight_step,
        bias_ptr,
        place,
        tl.load(slope_ptr + row),
        softcap_inverse,
        width,
        HAS_BIAS,
        HAS_SOFTCAP,
        BLOCK,
    )
    tl.store(out_ptr + row, logit)


@triton.jit
def refine_kernel(
    hidden_ptr,
    hidden_stride,
    hidden_step,
    weight_ptr,
    weight_stride,
    weight_step,
    bias_ptr,
    target_ptr,
    slope_ptr,
    rest_ptr,
    mean_ptr,
    target_logit_ptr,
    top_ptr,
    column_ptr,
    logprob_ptr,
    entropy_ptr,
    sum_ptr,
    shift_ptr,
    softcap_inverse,
    width,
    vocab,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    TARGET: tl.constexpr,  # the target's logit is the product's
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    hidden_ptr += row * hidden_stride
    slope = tl.load(slope_ptr + row)
    shift = tl.load(shift_ptr + row)
    top = tl.load(top_ptr + row)
    column = tl.load(column_ptr + row).to(tl.int64)
    counts = (column >= 0) & (top > NO_LOGIT)
    logit = _exact_logit(
        hidden_ptr,
        hidden_step,
        weight_ptr,
        weight_stride,
        weight_step,
        bias_ptr,
        tl.where(counts, column, 0),
        slope,
        softcap_inverse,
        width,
        HAS_BIAS,
        HAS_SOFTCAP,
        BLOCK,
    )
    gain = tl.where(counts, _held(logit - top), 0.0)
    below = tl.maximum(tl.where(counts, top - shift, SHIFT_FLOOR), SHIFT_FLOOR)
    exp, growth = tl.exp2(below * LOG2E), tl.exp2(gain * LOG2E)
    rest = tl.load(rest_ptr + row) + exp * (growth - 1.0)
    mean = tl.load(mean_ptr + row) + exp * ((growth - 1.0) * below + growth * gain)

    target = tl.load(target_ptr + row).to(tl.int64)
    in_vocab = (target >= 0) & (target < vocab)
    target_logit = tl.load(target_logit_ptr + row)
    gap = target_logit - shift
    if TARGET:
        logit = _exact_logit(
            hidden_ptr,
            hidden_step,
            weight_ptr,
            weight_stride,
            weight_step,
            bias_ptr,
            tl.where(in_vocab, target, 0),
            slope,
            softcap_inverse,
            width,
            HAS_BIAS,
            HAS_SOFTCAP,
            BLOCK,
        )
        gap += tl.where(gap > float("-inf"), _held(logit - target_logit), 0.0)
    gap = tl.where(in_vocab, gap, float("-inf"))
    logprob, entropy, total = row_result(gap, rest, mean)
    tl.store(logprob_ptr + row, tl.where(in_vocab, logprob, float("nan")))
    tl.store(entropy_ptr + row, entropy)
    tl.store(sum_ptr + row, total)


def _operands(hidden_CH: Tensor, weight_VH: Tensor, bias_V: Tensor | None) -> tuple[Tensor | int, ...]:
    """The first arguments of both kernels; without a bias any pointer stands for one."""
    bias = hidden_CH if bias_V is None else bias_V
    return hidden_CH, *hidden_CH.stride(), weight_VH, *weight_VH.stride(), bias


def _constants(bias_V: Tensor | None, softcap_inverse: float) -> dict[str, int]:
    return {"HAS_BIAS": bias_V is not None, "HAS_SOFTCAP": softcap_inverse != 0, "BLOCK": _BLOCK, "num_warps": 4}


def target_logits(
    hidden_CH: Tensor,
    weight_VH: Tensor,
    target_C: Tensor,
    slope_C: Tensor,
    out_C: Tensor,
    *,
    bias_V: Tensor | None = None,
    softcap_inverse: float = 0.0,
) -> None:
    """Fill out_C, fp32; for a target outside the vocabulary with the logit of token 0."""
    target_logits_kernel[(hidden_CH.shape[0],)](
        *_operands(hidden_CH, weight_VH, bias_V),
        target_C,
        slope_C,
        out_C,
        softcap_inverse,
        hidden_CH.shape[1],
        weight_VH.shape[0],
        **_constants(bias_V, softcap_inverse),
    )


def refine(
    hidden_CH: Tensor,
    weight_VH: Tensor,
    target_C: Tensor,
    slope_C: Tensor,
    sums: RowSums,
    out: tuple[Tensor, Tensor, Tensor, Tensor],
    *,
    target_is_exact: bool,
    bias_V: Tensor | None = None,
    softcap_inverse: float = 0.0,
) -> None:
    """out (a RowStats): its shifts are what `sums` are about; the rest is filled anew."""
    refine_kernel[(hidden_CH.shape[0],)](
        *_operands(hidden_CH, weight_VH, bias_V),
        target_C,
        slope_C,
        *sums,
        *out,
        softcap_inverse,
        hidden_CH.shape[1],
        weight_VH.shape[0],
        **_constants(bias_V, softcap_inverse),
        TARGET=not target_is_exact,
    )
