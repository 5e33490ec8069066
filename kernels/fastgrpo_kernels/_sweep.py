"""The walk of both ops over the rows on a GPU: chunks, buffers, products, kernels.

Two forms of the same sums (_row_stats.py), chosen by the operands, so that a pass without gradients and the training
pass agree bit for bit (an entropy bonus, whose gradient the epilogue cannot make, takes `rows`: whoever scores for such
a pass must ask for `rows` as well):

    epilogue   logits live in registers only (_exp_gemm.py): bf16 operands on GPUs with TMA (compute capability 9)
    rows       logits of SUB_ROWS rows at a time are stored in fp32 by cuBLAS and read once (_exp_rows.py): elsewhere

    hidden [C, H] --W^T--> D [C, V] in the operands' dtype, sums [C]    C rows: what the byte budget holds
                           D W * scale -> dX [C, H];   D^T (scale * X) added to dW [V, H] fp32

Shape suffixes: N rows, C rows of a chunk, S rows of a sub-chunk, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor
from triton import knobs

from fastgrpo_kernels import _exact_rows
from fastgrpo_kernels._chunks import Head, product, runs_epilogue
from fastgrpo_kernels._exact_rows import RowSums, refine
from fastgrpo_kernels._exp_gemm import GEMM, Partials, exp_gemm, fits_exp_gemm
from fastgrpo_kernels._exp_rows import RowStats, entropy_gradients, exp_rows

INTERPRETED = knobs.runtime.interpret  # by triton, on a CPU: decided when the kernels are defined
SUB_ROWS = 1024  # rows whose fp32 logits exist at once
_ROW_MULTIPLE = 256  # whole tiles of the products
_LEADING = 64  # elements: rows of a buffer start at multiples of 128 bytes whatever the vocabulary


def slices(rows: slice, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, rows.stop)) for start in range(rows.start, rows.stop, step))


@dataclass(frozen=True, slots=True)
class Plan:
    epilogue: bool
    refined: bool  # the logits that decide a logprob are made again without tensor cores
    sub_rows: int
    chunk_rows: int


def make_plan(hidden_NH: Tensor, weight_VH: Tensor, chunk_bytes: int, *, epilogue: bool | None = None) -> Plan:
    """Rows a chunk from the bytes that all buffers of the walk may take together. `epilogue` None: what fits."""
    vocab, width = weight_VH.shape
    padded = _round_up(vocab, _LEADING)
    if epilogue is None:
        epilogue = runs_epilogue(hidden_NH)
    epilogue = epilogue and fits_exp_gemm(hidden_NH, weight_VH)
    row_bytes = padded * weight_VH.element_size() + 4 * width  # D, and room for dX in fp32 or for scale * X
    refined = width >= _exact_rows.REFINED_WIDTH
    if epilogue:
        row_bytes += 4 * ((5 if refined else 3) * _round_up(vocab, GEMM.columns) // (GEMM.columns // 2) + 5)
        sub_rows = _ROW_MULTIPLE
    else:
        sub_rows = _floor_rows(chunk_bytes // 4 // (4 * padded), SUB_ROWS)
        chunk_bytes -= sub_rows * 4 * padded
    rows = max(chunk_bytes // row_bytes // sub_rows * sub_rows, sub_rows)
    chunks = -(-hidden_NH.shape[0] // rows)  # chunks of equal size: a short last one would waste products
    if chunks > 1:
        rows = _round_up(-(-hidden_NH.shape[0] // chunks), sub_rows)
    return Plan(epilogue, refined, sub_rows, rows)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _floor_rows(rows: int, most: int) -> int:
    rows = max(1, min(rows, most))
    return rows if rows < _ROW_MULTIPLE else rows - rows % _ROW_MULTIPLE


def empty_rows(rows: int, vocab: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(rows, _round_up(vocab, _LEADING), dtype=dtype, device=device)[:, :vocab]


class _Options(TypedDict):
    bias_V: Tensor | None
    softcap_inverse: float


@dataclass(frozen=True, slots=True)
class Sweep:
    """One call's rows on their way to statistics and, chunk by chunk, to D."""

    hidden_NH: Tensor
    head: Head
    target_N: Tensor
    slope_N: Tensor  # logit_scale / temperature
    plan: Plan
    stats: RowStats
    logits_SV: Tensor | None  # rows form
    sums: RowSums | None  # rows form, refined
    partials: Partials | None  # epilogue form

    @classmethod
    def of(cls, hidden_NH: Tensor, head: Head, target_N: Tensor, temperature_N: Tensor, plan: Plan) -> Sweep:
        num_rows, device = hidden_NH.shape[0], hidden_NH.device
        vocab = head.weight_VH.shape[0]
        logits_SV = sums = partials = None
        if plan.epilogue:
            partials = Partials.empty(min(plan.chunk_rows, num_rows), vocab, device, GEMM, refined=plan.refined)
        else:
            logits_SV = empty_rows(min(plan.sub_rows, num_rows), vocab, torch.float32, device)
            sums = RowSums.empty(logits_SV.shape[0], device) if plan.refined else None
        stats = RowStats(*torch.empty(len(RowStats._fields), num_rows, dtype=torch.float32, device=device))
        slope_N = temperature_N.reciprocal().mul_(head.logit_scale)
        return cls(hidden_NH, head, target_N, slope_N, plan, stats, logits_SV, sums, partials)

    @property
    def chunks(self) -> Iterator[slice]:
        return slices(slice(0, self.hidden_NH.shape[0]), self.plan.chunk_rows)

    @property
    def _options(self) -> _Options:
        head = self.head
        return {
            "bias_V": None if head.bias_V is None else head.bias_V.contiguous(),
            "softcap_inverse": head.logit_scale / head.softcap if head.softcap else 0.0,
        }

    def run(self, chunk: slice, exp_CV: Tensor) -> None:
        """Statistics of the chunk's rows and D of them without its scale; exp_CV of no columns: statistics alone."""
        if self.partials is not None:
            exp_gemm(
                self.hidden_NH[chunk],
                self.head.weight_VH,
                self.target_N[chunk],
                self.slope_N[chunk],
                self.stats.chunk(chunk),
                self.partials,
                exp_CV,
                **self._options,
            )
            return
        for rows in slices(chunk, self.plan.sub_rows):
            target_C, slope_C, stats = self.target_N[rows], self.slope_N[rows], self.stats.chunk(rows)
            exp = exp_CV[rows.start - chunk.start : rows.stop - chunk.start]
            exp_rows(self._logits(rows), target_C, slope_C, stats, exp, sums=self.sums, **self._options)
            if self.sums is not None:
                operands = (self.hidden_NH[rows], self.head.weight_VH, target_C, slope_C)
                refine(*operands, self.sums, stats, target_is_exact=False, **self._options)

    def gradient_buffer(self, wanted: bool) -> Tensor:
        """For D of one chunk; without columns where it is not wanted."""
        rows = min(self.plan.chunk_rows, self.hidden_NH.shape[0])
        weight_VH = self.head.weight_VH
        return empty_rows(rows, weight_VH.shape[0] if wanted else 0, weight_VH.dtype, weight_VH.device)

    def finish_gradient(self, chunk: slice, grad_CV: Tensor, dlogprob_C: Tensor, dentropy_C: Tensor | None) -> Tensor:
        """The scale of grad_CV, which `run` has filled; with dentropy_C it is filled here, from logits made anew."""
        slope_C = self.slope_N[chunk]
        if dentropy_C is None:
            return dlogprob_C.neg().mul_(slope_C).div_(self.stats.sum_N[chunk])
        for rows in slices(chunk, self.plan.sub_rows):
            inside = slice(rows.start - chunk.start, rows.stop - chunk.start)
            entropy_gradients(
                self._logits(rows),
                self.target_N[rows],
                self.slope_N[rows],
                self.stats.chunk(rows),
                dlogprob_C[inside],
                dentropy_C[inside],
                grad_CV[inside],
                **self._options,
            )
        return slope_C

    def _logits(self, rows: slice) -> Tensor:
        assert self.logits_SV is not None, "the epilogue form keeps no logits"
        return product(self.hidden_NH[rows], self.head.weight_VH.t(), out=self.logits_SV[: rows.stop - rows.start])
