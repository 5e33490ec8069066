"""What both ops share: rows cut into chunks, the softmax of a chunk's logits, and the gradients that come of it.

Of a row with hidden state x, raw logits z = W x + b, temperature t:

    l = logit_scale * z / t                               without softcap
    l = softcap * tanh(logit_scale * z / softcap) / t     with it
    p = softmax(l),  logprob = l_y - lse(l),  entropy = lse(l) - sum(p l)

and for a loss with derivatives g by the logprob and h by the entropy

    dL/dl_v = g (1[v = y] - p_v) - h p_v (l_v - sum(p l))

With m = max(l) and s = sum(exp(l - m)) everything is taken from l - m <= 0: the entropy is ln s - sum(p (l - m)), two
terms of one sign, where lse - sum(p l) would cancel; so logprob <= 0 and entropy >= 0 hold exactly. The target is kept
out of the sum: where it is the largest, s = 1 + rest, and ln(1 + rest) and 1 - p_y = rest / s keep the digits of a rest
that is small.

Shape suffixes: N rows, C rows of one chunk, H hidden, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

DEFAULT_CHUNK_BYTES_CPU = 256 << 20
DEFAULT_CHUNK_BYTES_CUDA = 2600 << 20
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
    rest_C1: Tensor  # of exp_CV without the target's
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


def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a b, stored in fp32 (fp64 for fp64) whatever the factors: bf16 logits would cost 3e-2 of logprob error."""
    if a.dtype != torch.bfloat16:
        return torch.mm(a, b, out=out)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32, out=out)
    return torch.mm(a.float(), b.float(), out=out)


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
    logits_CV = product(operand(hidden_CH), head.weight_VH.t())
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
    exp_target_C1 = exp_CV.gather(1, index_C1)
    rest_C1 = exp_CV.scatter_(1, index_C1, 0.0).sum(1, keepdim=True)
    exp_CV.scatter_(1, index_C1, exp_target_C1)
    sum_C1 = rest_C1 + exp_target_C1
    weighted_CV = shifted_CV * exp_CV if for_entropy_gradient else shifted_CV.mul_(exp_CV)
    mean_C1 = weighted_CV.sum(1, keepdim=True) / sum_C1
    log_sum_C = torch.where(exp_target_C1 == 1.0, rest_C1.log1p(), sum_C1.log()).squeeze(1)
    return SoftmaxRows(
        logprob_C=target_shift_C - log_sum_C,
        entropy_C=log_sum_C - mean_C1.squeeze(1),
        exp_CV=exp_CV,
        sum_C1=sum_C1,
        rest_C1=rest_C1,
        mean_C1=mean_C1,
        shifted_CV=shifted_CV if for_entropy_gradient else None,
        slope=slope,
        index_C1=index_C1,
    )


def logits_gradient(rows: SoftmaxRows, dlogprob_C: Tensor, dentropy_C: Tensor | None) -> Tensor:
    """dL/dz [C, V] of raw logits, from the loss's derivatives by logprob and entropy, in the buffers of `rows`."""
    dlogprob_C1 = dlogprob_C.unsqueeze(1)
    at_target_C1 = dlogprob_C1 * (rows.rest_C1 / rows.sum_C1)
    grad_CV = rows.exp_CV
    if dentropy_C is None:
        grad_CV.mul_(-dlogprob_C1 / rows.sum_C1)
    else:
        assert rows.shifted_CV is not None, "made without for_entropy_gradient"
        factor_CV = rows.shifted_CV.sub_(rows.mean_C1).mul_(dentropy_C.unsqueeze(1))
        at_target_C1 -= (grad_CV.gather(1, rows.index_C1) / rows.sum_C1) * factor_CV.gather(1, rows.index_C1)
        grad_CV.mul_(factor_CV.add_(dlogprob_C1).div_(-rows.sum_C1))
    return grad_CV.scatter_(1, rows.index_C1, at_target_C1).mul_(rows.slope)


class HeadGradients:
    """Gradients of hidden, weight and bias, gathered chunk by chunk; weight and bias in fp32, for one cast at the end.

    weight_grad_VH: an accumulator of the caller's, fp32, that the weight's gradient is added to instead.
    """

    def __init__(
        self,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        needs: tuple[bool, bool, bool],
        weight_grad_VH: Tensor | None = None,
    ):
        needs_hidden, needs_weight, needs_bias = needs
        accumulator = {"dtype": compute_dtype(hidden_NH), "device": hidden_NH.device}
        self._returns_weight = weight_grad_VH is None and needs_weight
        self._weight_started = weight_grad_VH is not None
        # rows in one piece, as the kernels write them, whatever the strides of hidden_NH
        self._hidden_NH = torch.empty_like(hidden_NH, memory_format=torch.contiguous_format) if needs_hidden else None
        self._weight_VH = torch.empty(weight_VH.shape, **accumulator) if self._returns_weight else weight_grad_VH
        self._bias_V = torch.zeros(bias_V.shape, **accumulator) if needs_bias and bias_V is not None else None

    @property
    def wanted(self) -> bool:
        return any(x is not None for x in (self._hidden_NH, self._weight_VH, self._bias_V))

    def add(
        self, rows: slice, hidden_CH: Tensor, weight_VH: Tensor, grad_CV: Tensor, scale_C: Tensor | None = None
    ) -> None:
        """grad_CV: dL/dz of these rows, or, with scale_C, scale_C[:, None] * grad_CV is."""
        factor_CV = grad_CV.to(weight_VH.dtype)
        if self._bias_V is not None:
            self._bias_V += grad_CV.sum(0) if scale_C is None else _weighted_sum(scale_C, factor_CV)
        if self._hidden_NH is not None:
            if scale_C is None:
                self._hidden_NH[rows] = torch.mm(factor_CV, weight_VH)
            else:
                scaled(product(factor_CV, weight_VH), scale_C, hidden_CH.dtype, out=self._hidden_NH[rows])
        if self._weight_VH is None:
            return
        if scale_C is not None:
            hidden_CH = scaled(hidden_CH, scale_C, hidden_CH.dtype)
        self._add_weight(self._weight_VH, factor_CV.t(), operand(hidden_CH))

    def _add_weight(self, out: Tensor, factor_VC: Tensor, hidden_CH: Tensor) -> None:
        if not self._weight_started:
            product(operand(factor_VC), hidden_CH, out=out)
            self._weight_started = True
        elif factor_VC.dtype == hidden_CH.dtype == torch.bfloat16:
            torch.addmm(out, factor_VC, hidden_CH, out_dtype=torch.float32, out=out)
        else:
            out.addmm_(operand(factor_VC), hidden_CH)

    def finish(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of hidden (in its dtype), weight and bias (still in fp32); None where not wanted."""
        weight_VH = self._weight_VH if self._returns_weight else None
        if weight_VH is not None and not self._weight_started:
            weight_VH.zero_()
        return self._hidden_NH, weight_VH, self._bias_V


def scaled(x: Tensor, factor: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """x * factor in `dtype`, rounded once. factor: one number, or [C] for the rows of x [C, K]."""
    out = torch.empty(x.shape, dtype=dtype, device=x.device) if out is None else out
    if _runs_triton(x):
        from fastgrpo_kernels._scale import fits_scale, scale  # where triton is not installed the reference still runs

        if fits_scale(x, factor, out):
            return scale(x, factor, out)
    return torch.mul(x, factor.unsqueeze(1) if factor.dim() else factor, out=out)


def _runs_triton(x: Tensor) -> bool:
    return x.is_cuda and x.dtype != torch.float64


def _weighted_sum(scale_C: Tensor, x_CV: Tensor) -> Tensor:
    """scale_C @ x_CV in fp32. The scale as a sum of two numbers of x's dtype: one alone would round it to 8 bits."""
    high_C = scale_C.to(x_CV.dtype)
    low_C = (scale_C - high_C).to(x_CV.dtype)
    return product(torch.stack([high_C, low_C]), x_CV).sum(0)


def first_derivative_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """For the backward of an autograd function: RuntimeError where its gradients are to be differentiated again.

    torch's once_differentiable does not see a loss that is linear in the function's outputs: the gradients that come in
    are constants then, those that go out too, and a penalty on them would be without effect.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *grads: Tensor | None) -> Any:
        if torch.is_grad_enabled():  # in a backward: create_graph=True
            raise RuntimeError(
                "linear_logprob and linear_grpo_loss have first derivatives alone: call autograd without "
                "create_graph=True (retain_graph=True is enough for a second backward), or take whole logits"
            )
        return backward(ctx, *grads)

    return checked


def runs_epilogue(hidden_NH: Tensor) -> bool:
    """bfloat16 on a GPU with TMA and the tensor cores that the epilogue form was made for."""
    if not hidden_NH.is_cuda or hidden_NH.dtype != torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(hidden_NH.device)[0] == 9
