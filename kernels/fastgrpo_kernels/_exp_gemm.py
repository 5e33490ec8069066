"""The output layer's product with the softmax in its epilogue, in Triton: the logits are never stored.

What exp_rows (_exp_rows.py) makes from stored logits is made here from the accumulators of a persistent GEMM: partial
sums of each row and tile and, for gradients, the scaled exponentials D. Where the product is short (a small H), the
store and the read of fp32 logits that this saves cost more than cuBLAS gains over Triton.

    target_logits     k: the target's own logit (_exact_rows.py)                        1 program a row
    exp_gemm          x W^T -> per tile: sums about k, D = exp(l - k)                   persistent, TMA
    merge             sums of the tiles -> logprob, entropy, sum, shift                 1 program for 8 rows
    refine            the same with the largest logit put right (_exact_rows.py)        1 program a row; long rows
    settle            D_y = -S; rows whose tiles were summed about another shift        1 program a row

A tile whose largest logit is more than LARGEST above k is summed about that logit instead; `settle` brings such rows
to one shift afterwards. A sampled token never causes it.

Shape suffixes: C rows of a chunk, H hidden, V vocabulary, B tiles across the vocabulary.
"""

from __future__ import annotations

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# (device code is not what it looks like, and a launch takes options that are not among the parameters)
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fastgrpo_kernels._exact_rows import RowSums, refine, target_logits
from fastgrpo_kernels._exp_rows import RowStats
from fastgrpo_kernels._row_stats import LARGEST, LOG2E, SHIFT_FLOOR, logit_of, row_result


class GemmConfig(NamedTuple):
    rows: int
    columns: int
    depth: int
    group: int  # row tiles that share the columns of W in the cache
    num_warps: int
    num_stages: int
    flatten: bool  # loads of the next tile begin before the epilogue of this one


GEMM = GemmConfig(rows=128, columns=256, depth=64, group=16, num_warps=8, num_stages=3, flatten=True)
NOTHING = tl.constexpr(-1e30)  # for a logit that does not count: its exponential is 0, and 0 times it is 0
_MERGE_ROWS, _MERGE_TILES = 8, 128
_SETTLE_BLOCK = 4096


class Partials(NamedTuple):
    """Of one chunk, fp32; see _row_stats.py for the names. The tiles' tops are None where rows are not refined."""

    shift_BC: Tensor  # shift, S and M of each row's share in each tile
    sum_BC: Tensor
    mean_BC: Tensor
    top_BC: Tensor | None  # its largest logit but the target's, nats
    column_BC: Tensor | None  # that one's token, int32; -1: none
    sums: RowSums  # of whole rows

    @classmethod
    def empty(cls, rows: int, vocab: int, device: torch.device, config: GemmConfig, *, refined: bool) -> Partials:
        shape = (2 * triton.cdiv(vocab, config.columns), rows)
        parts = torch.empty(3 + refined, *shape, dtype=torch.float32, device=device)
        column_BC = torch.empty(shape, dtype=torch.int32, device=device) if refined else None
        top_BC = parts[3] if refined else None
        return cls(parts[0], parts[1], parts[2], top_BC, column_BC, RowSums.empty(rows, device))


@triton.jit
def _epilogue(
    acc,
    exp_desc,
    bias_ptr,
    target_ptr,
    slope_ptr,
    shift_ptr,
    tile_shift_ptr,
    tile_sum_ptr,
    tile_mean_ptr,
    tile_top_ptr,
    tile_column_ptr,
    tile_stride,
    softcap_inverse,
    num_rows,
    vocab,
    row_tile,
    column_tile,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    STORE: tl.constexpr,
    TOP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sums and exponentials of one tile of products; a tile past the vocabulary sums to nothing."""
    rows = row_tile * ROWS + tl.arange(0, ROWS)
    columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    row_inside = rows < num_rows
    slope = tl.load(slope_ptr + rows, mask=row_inside, other=0.0)
    shift = tl.load(shift_ptr + rows, mask=row_inside, other=0.0)
    target = tl.load(target_ptr + rows, mask=row_inside, other=-1).to(tl.int32)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + columns, mask=columns < vocab, other=0.0).to(tl.float32)[None, :]
    # in units of ln 2 from here on: one multiplication less for each exponential
    logit, derivative = logit_of(acc, (slope * LOG2E)[:, None], softcap_inverse, HAS_SOFTCAP)
    # the target counts apart: its logit here and its logit of target_logits may differ in the last bits
    counts = (columns < vocab)[None, :] & (columns[None, :] != target[:, None])
    logit = tl.where(counts, logit, NOTHING)
    largest = tl.max(logit, 1)
    at = column_tile.to(tl.int64) * tile_stride + rows
    if TOP:
        column = tl.max(tl.where(logit == largest[:, None], columns[None, :], -1), 1)  # pyright: ignore[reportArgumentType]
        tl.store(tile_top_ptr + at, largest / LOG2E, mask=row_inside)
        tl.store(tile_column_ptr + at, column, mask=row_inside)
    fits = largest - shift * LOG2E <= LARGEST * LOG2E  # false for NaN and for a shift of minus infinity
    base = tl.where(fits, shift * LOG2E, tl.where(largest == float("-inf"), 0.0, largest))
    below = logit - base[:, None]
    exp = tl.exp2(below)
    if HAS_BIAS:
        below = tl.maximum(below, SHIFT_FLOOR)  # a token may be masked by its bias
    if STORE:
        stored = (exp * derivative).to(exp_desc.dtype)
        exp_desc.store([row_tile * ROWS, column_tile * COLUMNS], stored)
    tl.store(tile_shift_ptr + at, tl.where(fits, shift, base / LOG2E), mask=row_inside)
    tl.store(tile_sum_ptr + at, tl.sum(exp, 1), mask=row_inside)
    tl.store(tile_mean_ptr + at, tl.sum(exp * below, 1) / LOG2E, mask=row_inside)


@triton.jit(do_not_specialize=["num_rows", "tile_stride"])
def exp_gemm_kernel(
    hidden_desc,
    weight_desc,
    exp_desc,
    bias_ptr,
    target_ptr,
    slope_ptr,
    shift_ptr,
    tile_shift_ptr,
    tile_sum_ptr,
    tile_mean_ptr,
    tile_top_ptr,
    tile_column_ptr,
    tile_stride,
    softcap_inverse,
    num_rows,
    vocab,
    width,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    STORE: tl.constexpr,
    TOP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    row_tiles = tl.cdiv(num_rows, ROWS)
    column_tiles = tl.cdiv(vocab, COLUMNS)
    depth_tiles = tl.cdiv(width, DEPTH)
    in_group = GROUP * column_tiles
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, PROGRAMS, flatten=FLATTEN):  # pyright: ignore[reportArgumentType]
        first = (tile // in_group) * GROUP
        height = min(row_tiles - first, GROUP)
        row_tile = first + (tile % in_group) % height
        column_tile = (tile % in_group) // height
        acc = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        for depth in range(depth_tiles):
            x = hidden_desc.load([row_tile * ROWS, depth * DEPTH])
            w = weight_desc.load([column_tile * COLUMNS, depth * DEPTH])
            acc = tl.dot(x, w.T, acc)

        # by halves: 128 accumulators a thread leave no registers for the epilogue's own values
        halves = tl.permute(tl.reshape(acc, (ROWS, 2, COLUMNS // 2)), (0, 2, 1))
        left, right = tl.split(halves)
        for half in tl.static_range(2):
            _epilogue(
                left if half == 0 else right,
                exp_desc,
                bias_ptr,
                target_ptr,
                slope_ptr,
                shift_ptr,
                tile_shift_ptr,
                tile_sum_ptr,
                tile_mean_ptr,
                tile_top_ptr,
                tile_column_ptr,
                tile_stride,
                softcap_inverse,
                num_rows,
                vocab,
                row_tile,
                2 * column_tile + half,
                HAS_BIAS,
                HAS_SOFTCAP,
                STORE,
                TOP,
                ROWS,
                COLUMNS // 2,
            )


@triton.jit(do_not_specialize=["num_rows", "tile_stride"])
def merge_kernel(
    tile_shift_ptr,
    tile_sum_ptr,
    tile_mean_ptr,
    tile_top_ptr,
    tile_column_ptr,
    tile_stride,
    tiles,
    target_ptr,
    logprob_ptr,
    entropy_ptr,
    sum_ptr,
    shift_ptr,
    rest_ptr,
    mean_ptr,
    target_logit_ptr,
    top_ptr,
    column_ptr,
    num_rows,
    vocab,
    TOP: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_inside = rows < num_rows
    shift = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    top = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    column = tl.full([ROWS], -1, dtype=tl.int32)
    for start in range(0, tiles, TILES):
        at = start + tl.arange(0, TILES)
        inside = (at < tiles)[:, None] & row_inside[None, :]
        place = at.to(tl.int64)[:, None] * tile_stride + rows[None, :]
        shift = tl.maximum(shift, tl.max(tl.load(tile_shift_ptr + place, mask=inside, other=float("-inf")), 0))
        if TOP:
            tile_top = tl.load(tile_top_ptr + place, mask=inside, other=float("-inf"))
            here = tl.max(tile_top, 0)
            tile_column = tl.load(
                tile_column_ptr + place,
                mask=inside & (tile_top == here[None, :]),  # pyright: ignore[reportArgumentType]
                other=-1,
            )
            column = tl.where(here > top, tl.max(tile_column, 0), column)
            top = tl.maximum(top, here)
    sums = tl.zeros([TILES, ROWS], dtype=tl.float32)
    means = tl.zeros([TILES, ROWS], dtype=tl.float32)
    for start in range(0, tiles, TILES):
        at = start + tl.arange(0, TILES)
        inside = (at < tiles)[:, None] & row_inside[None, :]
        place = at.to(tl.int64)[:, None] * tile_stride + rows[None, :]
        moved = tl.load(tile_shift_ptr + place, mask=inside, other=float("-inf")) - shift[None, :]
        factor = tl.where(inside, tl.exp2(moved * LOG2E), 0.0)
        tile_sum = tl.load(tile_sum_ptr + place, mask=inside, other=0.0)
        tile_mean = tl.load(tile_mean_ptr + place, mask=inside, other=0.0)
        sums += factor * tile_sum
        means += factor * (tile_mean + tile_sum * tl.maximum(moved, SHIFT_FLOOR))
    target = tl.load(target_ptr + rows, mask=row_inside, other=-1)
    in_vocab = (target >= 0) & (target < vocab)
    gap = tl.load(target_logit_ptr + rows, mask=row_inside, other=0.0) - shift
    gap = tl.where(in_vocab, gap, float("-inf"))
    rest, mean = tl.sum(sums, 0), tl.sum(means, 0)
    logprob, entropy, total = row_result(gap, rest, mean)
    tl.store(logprob_ptr + rows, tl.where(in_vocab, logprob, float("nan")), mask=row_inside)
    tl.store(entropy_ptr + rows, entropy, mask=row_inside)
    tl.store(sum_ptr + rows, total, mask=row_inside)
    tl.store(shift_ptr + rows, shift, mask=row_inside)
    tl.store(rest_ptr + rows, rest, mask=row_inside)
    if TOP:
        tl.store(mean_ptr + rows, mean, mask=row_inside)
        tl.store(top_ptr + rows, top, mask=row_inside)
        tl.store(column_ptr + rows, column, mask=row_inside)


@triton.jit(do_not_specialize=["tile_stride"])
def settle_kernel(
    exp_ptr,
    exp_stride,
    tile_shift_ptr,
    tile_stride,
    tiles,
    target_logit_ptr,
    target_ptr,
    slope_ptr,
    rest_ptr,
    shift_ptr,
    softcap_inverse,
    vocab,
    HAS_SOFTCAP: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    exp_ptr += row * exp_stride
    target = tl.load(target_ptr + row)
    target_logit = tl.load(target_logit_ptr + row)
    shift = tl.load(shift_ptr + row)
    if shift != target_logit:
        for start in range(0, vocab, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < vocab
            tile_shift = tl.load(tile_shift_ptr + row + (columns // COLUMNS).to(tl.int64) * tile_stride, mask=inside)
            exp = tl.load(exp_ptr + columns, mask=inside, other=0.0).to(tl.float32)
            exp *= tl.exp2((tile_shift - shift) * LOG2E)
            tl.store(exp_ptr + columns, exp.to(exp_ptr.dtype.element_ty), mask=inside)
        tl.debug_barrier()
    derivative = 1.0
    if HAS_SOFTCAP:
        bounded = target_logit * softcap_inverse / tl.load(slope_ptr + row)
        derivative = 1.0 - bounded * bounded
    rest = tl.load(rest_ptr + row)
    in_vocab = (target >= 0) & (target < vocab)
    tl.store(exp_ptr + target, (-rest * derivative).to(exp_ptr.dtype.element_ty), mask=in_vocab)


def exp_gemm(
    hidden_CH: Tensor,
    weight_VH: Tensor,
    target_C: Tensor,
    slope_C: Tensor,
    out: RowStats,
    partials: Partials,
    exp_CV: Tensor,
    *,
    bias_V: Tensor | None = None,
    softcap_inverse: float = 0.0,
    config: GemmConfig = GEMM,
) -> None:
    """What the product and exp_rows would make of these rows. Operands: `fits_exp_gemm`; the rest as in exp_rows."""
    num_rows, width = hidden_CH.shape
    vocab = weight_VH.shape[0]
    if num_rows == 0:
        return
    flags = {"HAS_BIAS": bias_V is not None, "HAS_SOFTCAP": softcap_inverse != 0}
    bias = bias_V if bias_V is not None else hidden_CH
    operands = (hidden_CH, weight_VH, target_C, slope_C)
    target_logits(*operands, partials.sums.target_C, bias_V=bias_V, softcap_inverse=softcap_inverse)
    refined = partials.top_BC is not None
    tops = (partials.top_BC, partials.column_BC) if refined else (partials.shift_BC, partials.shift_BC)
    programs = _multiprocessors(hidden_CH.device)
    tile_stride = partials.sum_BC.stride(0)
    store = exp_CV.shape[1] > 0
    hidden_desc = TensorDescriptor.from_tensor(hidden_CH, [config.rows, config.depth])
    exp_gemm_kernel[(programs,)](
        hidden_desc,
        TensorDescriptor.from_tensor(weight_VH, [config.columns, config.depth]),
        TensorDescriptor.from_tensor(exp_CV, [config.rows, config.columns // 2]) if store else hidden_desc,
        bias,
        target_C,
        slope_C,
        partials.sums.target_C,
        partials.shift_BC,
        partials.sum_BC,
        partials.mean_BC,
        *tops,
        tile_stride,
        softcap_inverse,
        num_rows,
        vocab,
        width,
        **flags,
        STORE=store,
        TOP=refined,
        ROWS=config.rows,
        COLUMNS=config.columns,
        DEPTH=config.depth,
        GROUP=config.group,
        PROGRAMS=programs,
        FLATTEN=config.flatten,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    tiles = partials.sum_BC.shape[0]
    merge_kernel[(triton.cdiv(num_rows, _MERGE_ROWS),)](
        partials.shift_BC,
        partials.sum_BC,
        partials.mean_BC,
        *tops,
        tile_stride,
        tiles,
        target_C,
        *out,
        *partials.sums,
        num_rows,
        vocab,
        TOP=refined,
        ROWS=_MERGE_ROWS,
        TILES=_MERGE_TILES,
        num_warps=4,
    )
    if refined:
        sums = RowSums(*(x[:num_rows] for x in partials.sums))
        refine(*operands, sums, out, target_is_exact=True, bias_V=bias_V, softcap_inverse=softcap_inverse)
    if store:
        settle_kernel[(num_rows,)](
            exp_CV,
            exp_CV.stride(0),
            partials.shift_BC,
            tile_stride,
            tiles,
            partials.sums.target_C,
            target_C,
            slope_C,
            partials.sums.rest_C,
            out.shift_N,
            softcap_inverse,
            vocab,
            HAS_SOFTCAP=softcap_inverse != 0,
            COLUMNS=config.columns // 2,
            BLOCK=_SETTLE_BLOCK,
            num_warps=4,
        )


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def fits_exp_gemm(*operands: Tensor) -> bool:
    """Whether their rows start at multiples of 16 bytes, as TMA wants them."""
    return all(
        x.stride(1) == 1 and x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0 for x in operands
    )
