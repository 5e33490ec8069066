"""From a chunk's logits to the softmax of its rows, in Triton: one program a row, one read of the logits.

    exp_rows            logprob, entropy and sums of each row, and (for gradients) the scaled exponentials D
    entropy_gradients   D where the loss also has a derivative by the entropy, which takes a second sweep

Without a derivative by the entropy, dL/dz of a row is a number times what is known in the first sweep already:

    dL/dz_v = -g slope / sum * D_v,    D_v = exp(l_v - k) for v != y,  D_y = -S        (S, k, sum: _row_stats.py)

so the sweep that makes the sums also stores D, and the loss may decide on g later. The number goes into the factor on
the other side of each product: dX = scale * (D W), dW = D^T (scale * X).

    read   logits [C, V] fp32   ->   store   D [C, V] in the weight's dtype   ->   dX, dW

Shape suffixes: C rows of a chunk, V vocabulary.
"""

from __future__ import annotations

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# (device code is not what it looks like, and a launch takes options that are not among the parameters)
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from fastgrpo_kernels._exact_rows import RowSums
from fastgrpo_kernels._row_stats import LARGEST, LOG2E, SHIFT_FLOOR, logit_of, row_result


class SweepConfig(NamedTuple):
    block: int  # columns that a program takes at a time
    num_warps: int


SWEEP = SweepConfig(block=2048, num_warps=16)


class RowStats(NamedTuple):
    """Of each row, [N] fp32; see _row_stats.py."""

    logprob_N: Tensor
    entropy_N: Tensor
    sum_N: Tensor
    shift_N: Tensor

    def chunk(self, rows: slice) -> RowStats:
        return RowStats(*(x[rows] for x in self))


@triton.jit
def _sweep(
    logits_ptr,
    bias_ptr,
    exp_ptr,
    target,
    shift,
    slope,
    softcap_inverse,
    vocab,
    stored_columns,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    TOP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(S, M) of one row about `shift`, and with TOP the largest logit but the target's and its column; the
    exponentials, times the softcap's derivative, go to exp_ptr."""
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    means = tl.zeros([BLOCK], dtype=tl.float32)
    tops = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    places = tl.full([BLOCK], -1, dtype=tl.int32)
    for start in range(0, vocab, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < vocab
        product = tl.load(logits_ptr + columns, mask=inside, other=0.0)
        if HAS_BIAS:
            product += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        logit, derivative = logit_of(product, slope, softcap_inverse, HAS_SOFTCAP)
        below = logit - shift
        exp = tl.exp2(below * LOG2E)
        counts = inside & (columns != target)
        exp_rest = tl.where(counts, exp, 0.0)
        if TOP:
            larger = counts & (logit > tops)
            tops = tl.where(larger, logit, tops)
            places = tl.where(larger, columns, places)
        sums += exp_rest
        means += exp_rest * tl.maximum(below, SHIFT_FLOOR)
        stored = (exp * derivative).to(exp_ptr.dtype.element_ty)
        tl.store(exp_ptr + columns, stored, mask=columns < stored_columns)
    top = tl.max(tops, 0)
    return tl.sum(sums, 0), tl.sum(means, 0), top, tl.max(tl.where(tops == top, places, -1), 0)


@triton.jit
def _row_max(
    logits_ptr,
    bias_ptr,
    slope,
    softcap_inverse,
    vocab,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    largest = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    for start in range(0, vocab, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < vocab
        product = tl.load(logits_ptr + columns, mask=inside, other=0.0)
        if HAS_BIAS:
            product += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        logit, _ = logit_of(product, slope, softcap_inverse, HAS_SOFTCAP)
        largest = tl.maximum(largest, tl.where(inside, logit, float("-inf")))
    return tl.max(largest, 0)


@triton.jit(do_not_specialize=["stored_columns"])
def exp_rows_kernel(
    logits_ptr,
    logits_stride,
    exp_ptr,
    exp_stride,
    bias_ptr,
    target_ptr,
    slope_ptr,
    logprob_ptr,
    entropy_ptr,
    sum_ptr,
    shift_ptr,
    rest_ptr,
    mean_ptr,
    target_logit_ptr,
    top_ptr,
    column_ptr,
    softcap_inverse,
    vocab,
    stored_columns,  # vocab, or 0: one program for both, or passes with and without gradients would differ in a bit
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    TOP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    exp_ptr += row * exp_stride
    target = tl.load(target_ptr + row)
    slope = tl.load(slope_ptr + row)
    in_vocab = (target >= 0) & (target < vocab)
    place = tl.where(in_vocab, target, 0)
    product = tl.load(logits_ptr + place)
    if HAS_BIAS:
        product += tl.load(bias_ptr + place).to(tl.float32)
    target_logit, target_derivative = logit_of(product, slope, softcap_inverse, HAS_SOFTCAP)
    shift = target_logit
    rest_sum, rest_mean, top, column = _sweep(
        logits_ptr,
        bias_ptr,
        exp_ptr,
        target,
        shift,
        slope,
        softcap_inverse,
        vocab,
        stored_columns,
        HAS_BIAS,
        HAS_SOFTCAP,
        TOP,
        BLOCK,
    )
    # a target that no policy would have sampled, or a masked one; false also for NaN
    if not (rest_sum < tl.exp2(LARGEST * LOG2E)):
        shift = _row_max(logits_ptr, bias_ptr, slope, softcap_inverse, vocab, HAS_BIAS, HAS_SOFTCAP, BLOCK)
        shift = tl.where(shift == float("-inf"), 0.0, shift)
        rest_sum, rest_mean, top, column = _sweep(
            logits_ptr,
            bias_ptr,
            exp_ptr,
            target,
            shift,
            slope,
            softcap_inverse,
            vocab,
            stored_columns,
            HAS_BIAS,
            HAS_SOFTCAP,
            TOP,
            BLOCK,
        )
    # a target outside the vocabulary has no share in the sums
    target_gap = tl.where(in_vocab, target_logit - shift, float("-inf"))
    logprob, entropy, total = row_result(target_gap, rest_sum, rest_mean)
    tl.store(logprob_ptr + row, tl.where(in_vocab, logprob, float("nan")))
    tl.store(entropy_ptr + row, entropy)
    tl.store(sum_ptr + row, total)
    tl.store(shift_ptr + row, shift)
    if TOP:
        tl.store(rest_ptr + row, rest_sum)
        tl.store(mean_ptr + row, rest_mean)
        tl.store(target_logit_ptr + row, target_logit)
        tl.store(top_ptr + row, top)
        tl.store(column_ptr + row, column)
    tl.debug_barrier()  # the sweep's own store to this place comes first
    gap = (-rest_sum * target_derivative).to(exp_ptr.dtype.element_ty)
    tl.store(exp_ptr + place, gap, mask=in_vocab & (target < stored_columns))


def exp_rows(
    logits_CV: Tensor,
    target_C: Tensor,
    slope_C: Tensor,
    out: RowStats,
    exp_CV: Tensor,
    *,
    sums: RowSums | None = None,
    bias_V: Tensor | None = None,
    softcap_inverse: float = 0.0,
    config: SweepConfig = SWEEP,
) -> None:
    """Fill `out` and exp_CV (D above, without its scale; [C, 0] where it is not wanted) from products logits_CV, fp32;
    and `sums`, for `refine`, where they are given.

    slope_C: logit_scale / temperature. softcap_inverse: logit_scale / softcap, 0 for none. Rows may be strided.
    """
    num_rows, vocab = logits_CV.shape
    if num_rows == 0:
        return
    exp_rows_kernel[(num_rows,)](
        logits_CV,
        logits_CV.stride(0),
        exp_CV,
        exp_CV.stride(0),
        bias_V if bias_V is not None else logits_CV,
        target_C,
        slope_C,
        *out,
        *(sums or 5 * (out.sum_N,)),
        softcap_inverse,
        vocab,
        exp_CV.shape[1],
        HAS_BIAS=bias_V is not None,
        HAS_SOFTCAP=softcap_inverse != 0,
        TOP=sums is not None,
        BLOCK=config.block,
        num_warps=config.num_warps,
    )


@triton.jit
def entropy_gradients_kernel(
    logits_ptr,
    logits_stride,
    gradient_ptr,
    gradient_stride,
    bias_ptr,
    target_ptr,
    slope_ptr,
    entropy_ptr,
    sum_ptr,
    shift_ptr,
    dlogprob_ptr,
    dentropy_ptr,
    softcap_inverse,
    vocab,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    gradient_ptr += row * gradient_stride
    target = tl.load(target_ptr + row)
    slope = tl.load(slope_ptr + row)
    shift = tl.load(shift_ptr + row)
    inverse_sum = 1.0 / tl.load(sum_ptr + row)
    # sum(p (l - shift)) = ln sum - entropy
    mean = -tl.log(inverse_sum) - tl.load(entropy_ptr + row)
    dlogprob = tl.load(dlogprob_ptr + row)
    dentropy = tl.load(dentropy_ptr + row)
    for start in range(0, vocab, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < vocab
        product = tl.load(logits_ptr + columns, mask=inside, other=0.0)
        if HAS_BIAS:
            product += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        logit, derivative = logit_of(product, slope, softcap_inverse, HAS_SOFTCAP)
        below = logit - shift
        probability = tl.exp2(below * LOG2E) * inverse_sum
        one = tl.where(columns == target, 1.0, 0.0)
        pull = dentropy * (tl.maximum(below, SHIFT_FLOOR) - mean)
        gradient = (dlogprob * (one - probability) - probability * pull) * derivative
        tl.store(gradient_ptr + columns, gradient.to(gradient_ptr.dtype.element_ty), mask=inside)


def entropy_gradients(
    logits_CV: Tensor,
    target_C: Tensor,
    slope_C: Tensor,
    stats: RowStats,
    dlogprob_C: Tensor,
    dentropy_C: Tensor,
    out_CV: Tensor,
    *,
    bias_V: Tensor | None = None,
    softcap_inverse: float = 0.0,
    config: SweepConfig = SWEEP,
) -> None:
    """dL/dz / slope of each row, from the loss's derivatives by its logprob and entropy (fp32, contiguous)."""
    num_rows, vocab = logits_CV.shape
    if num_rows == 0:
        return
    entropy_gradients_kernel[(num_rows,)](
        logits_CV,
        logits_CV.stride(0),
        out_CV,
        out_CV.stride(0),
        bias_V if bias_V is not None else logits_CV,
        target_C,
        slope_C,
        stats.entropy_N,
        stats.sum_N,
        stats.shift_N,
        dlogprob_C,
        dentropy_C,
        softcap_inverse,
        vocab,
        HAS_BIAS=bias_V is not None,
        HAS_SOFTCAP=softcap_inverse != 0,
        BLOCK=config.block,
        num_warps=config.num_warps,
    )
