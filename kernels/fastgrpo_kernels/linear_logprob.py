"""linear_logprob: log-probability of a target and entropy of each row, from hidden states and the output layer.

    z = hidden W^T + b;  l = logit_scale * z / temperature  (softcap: see _chunks.py)
    logprob = l_y - lse(l);  entropy = lse(l) - sum(p l)

Forward and backward each go over chunks of rows and make the logits anew: 2 NHV operations without gradient, 8 NHV
with (10 in Triton where the loss has a derivative by the entropy: the backward then makes them twice). Any loss may
follow, also one that sums over sequences before it is nonlinear. A loss of single tokens is cheaper through
linear_grpo_loss (6 NHV). Shape suffixes: N rows, C rows of a chunk, H hidden, V vocabulary.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from fastgrpo_kernels._checks import HeadOptions, check_head, temperature_rows
from fastgrpo_kernels._chunks import (
    Head,
    HeadGradients,
    compute_dtype,
    first_derivative_only,
    logits_gradient,
    operand,
    row_slices,
    softmax_rows,
)


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        target_N: Tensor,
        temperature_N: Tensor,
        call: HeadOptions,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, target_N, temperature_N)
        ctx.call = call
        ctx.set_materialize_grads(False)  # an entropy that no loss uses costs nothing
        head = Head(operand(weight_VH), bias_V, call.logit_scale, call.softcap)
        forward = _forward_reference if call.impl == "reference" else _forward_triton
        return forward(hidden_NH, head, target_N, temperature_N, call)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dlogprob_N: Tensor | None, dentropy_N: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, target_N, temperature_N = ctx.saved_tensors
        call: HeadOptions = ctx.call
        dlogprob_N = torch.zeros_like(temperature_N) if dlogprob_N is None else dlogprob_N.contiguous()
        dentropy_N = None if dentropy_N is None else dentropy_N.contiguous()
        with torch.autocast(hidden_NH.device.type, enabled=False):
            head = Head(operand(weight_VH), bias_V, call.logit_scale, call.softcap)
            gradients = HeadGradients(hidden_NH, weight_VH, bias_V, ctx.needs_input_grad[:3], call.weight_grad_VH)
            backward = _backward_reference if call.impl == "reference" else _backward_triton
            backward(hidden_NH, head, target_N, temperature_N, dlogprob_N, dentropy_N, call, gradients)
            hidden_grad_NH, *others = gradients.finish()
            cast = [
                None if x is None else x.to(like.dtype) for x, like in zip(others, (weight_VH, bias_V), strict=True)
            ]
            return hidden_grad_NH, *cast, None, None, None


def _forward_reference(
    hidden_NH: Tensor, head: Head, target_N: Tensor, temperature_N: Tensor, call: HeadOptions
) -> tuple[Tensor, Tensor]:
    logprob_N = torch.empty(hidden_NH.shape[0], dtype=compute_dtype(hidden_NH), device=hidden_NH.device)
    entropy_N = torch.empty_like(logprob_N)
    for rows in row_slices(hidden_NH.shape[0], head.weight_VH.shape[0], call.chunk_bytes):
        chunk = softmax_rows(hidden_NH[rows], head, target_N[rows], temperature_N[rows])
        logprob_N[rows] = chunk.logprob_C
        entropy_N[rows] = chunk.entropy_C
    return logprob_N, entropy_N


def _backward_reference(
    hidden_NH: Tensor,
    head: Head,
    target_N: Tensor,
    temperature_N: Tensor,
    dlogprob_N: Tensor,
    dentropy_N: Tensor | None,
    call: HeadOptions,
    gradients: HeadGradients,
) -> None:
    for rows in row_slices(hidden_NH.shape[0], head.weight_VH.shape[0], call.chunk_bytes):
        chunk = softmax_rows(
            hidden_NH[rows],
            head,
            target_N[rows],
            temperature_N[rows],
            for_gradient=True,
            for_entropy_gradient=dentropy_N is not None,
        )
        dentropy_C = None if dentropy_N is None else dentropy_N[rows]
        grad_CV = logits_gradient(chunk, dlogprob_N[rows], dentropy_C)
        gradients.add(rows, hidden_NH[rows], head.weight_VH, grad_CV)


def _forward_triton(
    hidden_NH: Tensor, head: Head, target_N: Tensor, temperature_N: Tensor, call: HeadOptions
) -> tuple[Tensor, Tensor]:
    from fastgrpo_kernels import _sweep  # where triton is not installed the reference still runs

    epilogue = {"auto": None, "rows": False, "epilogue": True}[call.impl]
    plan = _sweep.make_plan(hidden_NH, head.weight_VH, call.chunk_bytes, epilogue=epilogue)
    sweep = _sweep.Sweep.of(hidden_NH, head, target_N, temperature_N, plan)
    nothing_NV = sweep.gradient_buffer(wanted=False)
    for chunk in sweep.chunks:
        sweep.run(chunk, nothing_NV[: chunk.stop - chunk.start])
    return sweep.stats.logprob_N, sweep.stats.entropy_N


def _backward_triton(
    hidden_NH: Tensor,
    head: Head,
    target_N: Tensor,
    temperature_N: Tensor,
    dlogprob_N: Tensor,
    dentropy_N: Tensor | None,
    call: HeadOptions,
    gradients: HeadGradients,
) -> None:
    from fastgrpo_kernels import _sweep

    # the entropy's gradient needs logits twice
    epilogue = False if dentropy_N is not None else {"auto": None, "rows": False, "epilogue": True}[call.impl]
    plan = _sweep.make_plan(hidden_NH, head.weight_VH, call.chunk_bytes, epilogue=epilogue)
    sweep = _sweep.Sweep.of(hidden_NH, head, target_N, temperature_N, plan)
    grad_NV = sweep.gradient_buffer(wanted=True)
    for chunk in sweep.chunks:
        grad_CV = grad_NV[: chunk.stop - chunk.start]
        sweep.run(chunk, grad_CV if dentropy_N is None else grad_CV[:, :0])
        dentropy_C = None if dentropy_N is None else dentropy_N[chunk]
        scale_C = sweep.finish_gradient(chunk, grad_CV, dlogprob_N[chunk], dentropy_C)
        gradients.add(chunk, hidden_NH[chunk], head.weight_VH, grad_CV, scale_C)


def linear_logprob(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    target_N: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    bias_V: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = 0.0,
    chunk_bytes: int | None = None,
    weight_grad_VH: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Log-probability of each row's target and entropy of each row's softmax, in nats.

    hidden_NH [N, H] and weight_VH [V, H]: bfloat16, float32 or float64, both alike. The logits are fp32 in any case
        (fp64 for fp64). On CUDA fp32 operands obey torch's setting for TF32.
    target_N [N] int64. One outside the vocabulary gets logprob NaN: to refuse it would be to wait for the device.
    temperature: a positive number, or one for each row, [N] floating; a constant, as far as gradients go. A row whose
        temperature is not above 0 gets NaN.
    bias_V [V]; logit_scale and softcap (0 or None = none): what the model does to its logits, before the temperature.
        Both numbers are constants: multiply hidden and bias by a scale that is learned.
    chunk_bytes: what the working buffers of a call may take, by default 2600 MiB on CUDA and 256 MiB elsewhere; besides
        them there are the gradients, and the weight's in fp32. A chunk of `epilogue` has at least 256 rows whatever
        the budget, of the other forms 1. (The reference takes it as the size of one fp32 buffer of logits, of which two
        to four live at once, and on a CPU has an fp32 copy of a bfloat16 weight besides.)
    weight_grad_VH [V, H] fp32 (fp64 for fp64): an accumulator that each backward adds the weight's gradient to, whether
        or not the weight requires one; autograd then returns none for the weight. For use without FSDP.
    impl: `auto` (Triton on CUDA; elsewhere, and for float64, the reference), `reference` (chunks in plain torch), or
        one of the Triton forms: `epilogue` (the softmax inside of the product; what `auto` takes for bfloat16 on
        compute capability 9; needs rows that start at multiples of 16 bytes, or it is `rows`) and `rows` (cuBLAS and a
        kernel over stored logits).

    Returns (logprob_N, entropy_N), fp32 (fp64 for fp64). Gradients flow to hidden, weight and bias through both, where
    required; the backward makes the logits again, and under no_grad nothing is kept. The results depend on chunk_bytes
    and N only by rounding; equal calls give equal bits, and the logprobs are those of linear_grpo_loss on the same rows
    with the same budget and form (for one with an entropy bonus, whose form is `rows` where it would be `epilogue`,
    pass that).
    Raises ValueError for shapes, dtypes, devices and numbers that do not fit, and for DTensors; its backward
    RuntimeError under create_graph=True: there are no second derivatives.
    """
    call = check_head(
        hidden_NH,
        weight_VH,
        target_N,
        bias_V,
        logit_scale=logit_scale,
        softcap=softcap,
        chunk_bytes=chunk_bytes,
        weight_grad_VH=weight_grad_VH,
        impl=impl,
    )
    temperature_N = temperature_rows(temperature, hidden_NH)
    # the op obeys the dtypes that it is given: autocast would turn fp32 products into bf16 ones
    with torch.autocast(hidden_NH.device.type, enabled=False):
        return _LinearLogprob.apply(hidden_NH, weight_VH, bias_V, target_N.long().contiguous(), temperature_N, call)


linear_logprob_ref = functools.partial(linear_logprob, impl="reference")
"""linear_logprob in plain torch, on any device: what the other forms are measured against."""
