"""What both ops share: rows cut into chunks, the softmax of a chunk's logits, and the gradients that come of it.

Of a row with hidden state x, raw logits z = W x + b, temperature t:

    l = logit_scale * z / t                               without softcap
    l = softcap * tanh(logit_scale * z / softcap) / t     with it
    p = softmax(l),  logprob = l_y - lse(l),  entropy = lse(l) - sum(p l)

and for a loss with derivatives g by the logprob and h by the entropy

    dL/dl_v = g (1[v = y] - p_v) - h p_v (l_v - sum(p l))

With m = max(l) and s = sum(exp(l - m)) everything is taken from l - m <= 0: the entropy is ln s - sum(p (l - m)), two
terms of one sign, where lse - sum(p l) would cancel; so logprob <= 0 and entropy >= 0 hold exactly.

Shape suffixes: N rows, C rows of one chunk, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

DEFAULT_CHUNK_BYTES_CPU = 256 << 20
DEFAULT_CHUNK_BYTES_CUDA = 2560 << 20
OPERAND_DTYPES = (torch.bfloat16, torch.float32, torch.float64)

_ROW_MULTIPLE = 256  # whole tiles of the matrix products
_SHIFT_FLOOR = -1000.0  # exp of it is 0 in fp64 too; keeps 0 * -inf (a token masked by its bias) out of the sums


class Head(NamedTuple):
    """From hidden states to logits: the output layer, and what the model does after it."""

    weight_VH: Tensor  # an `operand`
    bias_V: Tensor | None
    logit_scale: float
    softcap: float  # 0 = none


class SoftmaxRows(NamedTuple):
    """Softmax of one chunk. `logits_gradient` uses its buffers up."""

    logprob_C: Tensor
    entropy_C: Tensor
    exp_CV: Tensor  # exp(l - max)
    sum_C1: Tensor  # of exp_CV
    mean_C1: Tensor  # sum(p (l - max))
    shifted_CV: Tensor | None  # l - max; only the entropy's gradient wants it
    slope: Tensor  # dl/dz, [C, 1]; with softcap [C, V]
    index_C1: Tensor  # target, brought into the vocabulary


def compute_dtype(hidden_NH: Tensor) -> torch.dtype:
    """fp32, except for fp64 operands."""
    return torch.float64 if hidden_NH.dtype == torch.float64 else torch.float32


def rows_per_chunk(vocab: int, chunk_bytes: int) -> int:
    """Rows whose fp32 logits fit the budget: at least 1, and a multiple of 256 from 256 on."""
    rows = max(1, chunk_bytes // (4 * vocab))
    return rows if rows < _ROW_MULTIPLE else rows - rows % _ROW_MULTIPLE


def row_slices(num_rows: int, vocab: int, chunk_bytes: int) -> Iterator[slice]:
    step = rows_per_chunk(vocab, chunk_bytes)
    return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))


def operand(x: Tensor) -> Tensor:
    """A factor of the products: bf16 stays on CUDA, whose tensor cores sum in fp32; elsewhere it becomes fp32."""
    return x.float() if x.dtype == torch.bfloat16 and not x.is_cuda else x


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a b, stored in fp32 (fp64 for fp64) whatever the factors: bf16 logits would cost 3e-2 of logprob error."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.dtype == torch.bfloat16 else torch.mm(a, b)


def softmax_rows(
    hidden_CH: Tensor,
    head: Head,
    target_C: Tensor,
    temperature_C: Tensor,
    *,
    for_gradient: bool = False,
    for_entropy_gradient: bool = False,
) -> SoftmaxRows:
    """Softmax of a chunk. Two fp32 [C, V] buffers live at the peak; three for the entropy's gradient; one more for the
    gradient through a softcap. A target outside the vocabulary has logprob NaN."""
    logits_CV = _product(operand(hidden_CH), head.weight_VH.t())
    if head.bias_V is not None:
        logits_CV += head.bias_V
    inverse_C1 = temperature_C.reciprocal().unsqueeze(1)
    slope = inverse_C1 * head.logit_scale
    if head.softcap:
        logits_CV.mul_(head.logit_scale / head.softcap).tanh_()
        if for_gradient:
            slope = logits_CV.square().neg_().add_(1).mul_(slope)
        logits_CV.mul_(inverse_C1 * head.softcap)
    else:
        logits_CV.mul_(slope)

    index_C1 = target_C.clamp(0, logits_CV.shape[1] - 1).unsqueeze(1)
    max_C1 = logits_CV.amax(1, keepdim=True)
    target_shift_C = (logits_CV.gather(1, index_C1) - max_C1).squeeze(1)
    target_shift_C = torch.where(target_C == index_C1.squeeze(1), target_shift_C, torch.nan)
    shifted_CV = logits_CV.sub_(max_C1).clamp_(min=_SHIFT_FLOOR)
    exp_CV = shifted_CV.exp()
    sum_C1 = exp_CV.sum(1, keepdim=True)
    weighted_CV = shifted_CV * exp_CV if for_entropy_gradient else shifted_CV.mul_(exp_CV)
    mean_C1 = weighted_CV.sum(1, keepdim=True) / sum_C1
    log_sum_C = sum_C1.log().squeeze(1)
    return SoftmaxRows(
        logprob_C=target_shift_C - log_sum_C,
        entropy_C=log_sum_C - mean_C1.squeeze(1),
        exp_CV=exp_CV,
        sum_C1=sum_C1,
        mean_C1=mean_C1,
        shifted_CV=shifted_CV if for_entropy_gradient else None,
        slope=slope,
        index_C1=index_C1,
    )


def logits_gradient(rows: SoftmaxRows, dlogprob_C: Tensor, dentropy_C: Tensor | None) -> Tensor:
    """dL/dz [C, V] of raw logits, from the loss's derivatives by logprob and entropy, in the buffers of `rows`."""
    dlogprob_C1 = dlogprob_C.unsqueeze(1)
    grad_CV = rows.exp_CV
    if dentropy_C is None:
        grad_CV.mul_(-dlogprob_C1 / rows.sum_C1)
    else:
        assert rows.shifted_CV is not None, "made without for_entropy_gradient"
        factor_CV = rows.shifted_CV.sub_(rows.mean_C1).mul_(dentropy_C.unsqueeze(1)).add_(dlogprob_C1)
        grad_CV.mul_(factor_CV.div_(-rows.sum_C1))
    # not scatter_add_, whose atomics on CUDA have no order
    grad_CV.scatter_(1, rows.index_C1, grad_CV.gather(1, rows.index_C1) + dlogprob_C1)
    return grad_CV.mul_(rows.slope)


class HeadGradients:
    """Gradients of hidden, weight and bias, gathered chunk by chunk; weight and bias in fp32, cast once at the end."""

    def __init__(self, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, needs: tuple[bool, bool, bool]):
        needs_hidden, needs_weight, needs_bias = needs
        self.accumulator_dtype = compute_dtype(hidden_NH)
        self.weight_dtype = weight_VH.dtype
        self.bias_dtype = None if bias_V is None else bias_V.dtype
        self.hidden_NH = torch.empty_like(hidden_NH) if needs_hidden else None
        self.weight_VH = self._zeros(weight_VH) if needs_weight else None
        self.bias_V = self._zeros(bias_V) if needs_bias and bias_V is not None else None

    def _zeros(self, like: Tensor) -> Tensor:
        return torch.zeros(like.shape, dtype=self.accumulator_dtype, device=like.device)

    def add(self, rows: slice, hidden_CH: Tensor, weight_VH: Tensor, grad_CV: Tensor) -> None:
        if self.bias_V is not None:
            self.bias_V += grad_CV.sum(0)
        factor_CV = grad_CV.to(weight_VH.dtype)
        if self.hidden_NH is not None:
            self.hidden_NH[rows] = torch.mm(factor_CV, weight_VH)
        if self.weight_VH is None:
            return
        if factor_CV.dtype == torch.bfloat16:
            out = self.weight_VH
            torch.addmm(out, factor_CV.t(), operand(hidden_CH), out_dtype=torch.float32, out=out)
        else:
            self.weight_VH.addmm_(factor_CV.t(), operand(hidden_CH))

    def finish(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients in the dtypes of hidden, weight and bias; None where not wanted."""
        weight_VH = None if self.weight_VH is None else self.weight_VH.to(self.weight_dtype)
        bias_V = None if self.bias_V is None else self.bias_V.to(self.bias_dtype)
        return self.hidden_NH, weight_VH, bias_V


def check_head(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    target_N: Tensor,
    bias_V: Tensor | None,
    softcap: float,
    chunk_bytes: int | None,
) -> int:
    """Refuse what the ops cannot take, with ValueError; returns the chunk budget in bytes, the default filled in."""
    for name, x in (("hidden_NH", hidden_NH), ("weight_VH", weight_VH)):
        if isinstance(x, DTensor):
            raise ValueError(
                f"{name} is a DTensor: call the op inside the FSDP-managed forward, or after unshard(), where "
                "parameters are whole local tensors"
            )
        if x.dim() != 2:
            raise ValueError(f"{name} must have 2 dimensions, got shape {tuple(x.shape)}: flatten batch and sequence")
        if x.dtype not in OPERAND_DTYPES:
            raise ValueError(f"{name} is {x.dtype}: cast it to bfloat16, float32 or float64")
    num_rows, hidden = hidden_NH.shape
    vocab = weight_VH.shape[0]
    if vocab == 0 or weight_VH.shape[1] != hidden:
        raise ValueError(
            f"hidden_NH {tuple(hidden_NH.shape)} and weight_VH {tuple(weight_VH.shape)} do not fit: pass hidden states "
            "(not logits) of the width of the weight, and the weight as [vocabulary, hidden]"
        )
    if hidden_NH.dtype != weight_VH.dtype:
        raise ValueError(
            f"hidden_NH is {hidden_NH.dtype} and weight_VH {weight_VH.dtype}: cast one to the other's dtype"
        )
    if target_N.shape != (num_rows,) or target_N.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"target_N must be int64 (or int32) of shape ({num_rows},), one for each row of hidden_NH; got "
            f"{target_N.dtype} {tuple(target_N.shape)}"
        )
    if bias_V is not None and (bias_V.shape != (vocab,) or not bias_V.dtype.is_floating_point):
        raise ValueError(f"bias_V must be floating of shape ({vocab},), got {bias_V.dtype} {tuple(bias_V.shape)}")
    for name, x in (("weight_VH", weight_VH), ("target_N", target_N), ("bias_V", bias_V)):
        if x is not None and x.device != hidden_NH.device:
            raise ValueError(f"{name} is on {x.device} and hidden_NH on {hidden_NH.device}: move one to the other")
    if softcap < 0:
        raise ValueError(f"softcap must be positive, or 0 for none; got {softcap}")
    if chunk_bytes is None:
        return DEFAULT_CHUNK_BYTES_CUDA if hidden_NH.is_cuda else DEFAULT_CHUNK_BYTES_CPU
    if chunk_bytes <= 0:
        raise ValueError(f"chunk_bytes must be positive, got {chunk_bytes}: leave it out for the default")
    return chunk_bytes


def row_vector(name: str, x: Tensor, hidden_NH: Tensor) -> Tensor:
    """A per-row constant, detached, in the dtype of the computation; ValueError for another shape, kind or device."""
    if x.shape != hidden_NH.shape[:1] or not x.dtype.is_floating_point or x.device != hidden_NH.device:
        raise ValueError(
            f"{name} must be a floating tensor of shape ({hidden_NH.shape[0]},) on {hidden_NH.device}, one value for "
            f"each row of hidden_NH; got {x.dtype} {tuple(x.shape)} on {x.device}"
        )
    return x.detach().to(compute_dtype(hidden_NH))


def temperature_rows(temperature: float | Tensor, hidden_NH: Tensor) -> Tensor:
    """Temperature of each row; one number for all gives the same bits as a tensor full of it."""
    if isinstance(temperature, Tensor):
        return row_vector("temperature", temperature, hidden_NH)
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}: greedy samples have no logprob to train on")
    return torch.full(hidden_NH.shape[:1], temperature, dtype=compute_dtype(hidden_NH), device=hidden_NH.device)
