"""linear_logprob: log-probability of a target and entropy of each row, from hidden states and the output layer.

    z = hidden W^T + b;  l = logit_scale * z / temperature  (softcap: see _chunks.py)
    logprob = l_y - lse(l);  entropy = lse(l) - sum(p l)

Forward and backward each go over chunks of rows and make the logits anew: 2 NHV operations without gradient, 8 NHV
with. Any loss may follow, also one that sums over sequences before it is nonlinear. A loss of single tokens is cheaper
through linear_grpo_loss (6 NHV). Shape suffixes: N rows, C rows of a chunk, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastgrpo_kernels._chunks import (
    Head,
    HeadGradients,
    check_head,
    compute_dtype,
    logits_gradient,
    operand,
    row_slices,
    softmax_rows,
    temperature_rows,
)


def linear_logprob_ref(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    target_N: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    bias_V: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float = 0.0,
    chunk_bytes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """linear_logprob in plain torch, on any device: what the other forms are measured against."""
    chunk_bytes = check_head(hidden_NH, weight_VH, target_N, bias_V, softcap, chunk_bytes)
    temperature_N = temperature_rows(temperature, hidden_NH)
    # the op obeys the dtypes that it is given: autocast would turn fp32 products into bf16 ones
    with torch.autocast(hidden_NH.device.type, enabled=False):
        return _LinearLogprobRef.apply(
            hidden_NH, weight_VH, bias_V, target_N.long(), temperature_N, logit_scale, softcap, chunk_bytes
        )


def _forward_chunks(
    hidden_NH: Tensor, head: Head, target_N: Tensor, temperature_N: Tensor, chunk_bytes: int
) -> tuple[Tensor, Tensor]:
    logprob_N = torch.empty(hidden_NH.shape[0], dtype=compute_dtype(hidden_NH), device=hidden_NH.device)
    entropy_N = torch.empty_like(logprob_N)
    for rows in row_slices(hidden_NH.shape[0], head.weight_VH.shape[0], chunk_bytes):
        chunk = softmax_rows(hidden_NH[rows], head, target_N[rows], temperature_N[rows])
        logprob_N[rows] = chunk.logprob_C
        entropy_N[rows] = chunk.entropy_C
    return logprob_N, entropy_N


class _LinearLogprobRef(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        target_N: Tensor,
        temperature_N: Tensor,
        logit_scale: float,
        softcap: float,
        chunk_bytes: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, target_N, temperature_N)
        ctx.settings = logit_scale, softcap, chunk_bytes
        ctx.set_materialize_grads(False)  # an entropy that no loss uses costs nothing
        head = Head(operand(weight_VH), bias_V, logit_scale, softcap)
        return _forward_chunks(hidden_NH, head, target_N, temperature_N, chunk_bytes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlogprob_N: Tensor | None, dentropy_N: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, target_N, temperature_N = ctx.saved_tensors
        logit_scale, softcap, chunk_bytes = ctx.settings
        if dlogprob_N is None:
            dlogprob_N = torch.zeros_like(temperature_N)
        with torch.autocast(hidden_NH.device.type, enabled=False):
            head = Head(operand(weight_VH), bias_V, logit_scale, softcap)
            gradients = HeadGradients(hidden_NH, weight_VH, bias_V, ctx.needs_input_grad[:3])
            for rows in row_slices(hidden_NH.shape[0], weight_VH.shape[0], chunk_bytes):
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
            return *gradients.finish(), None, None, None, None, None


def linear_logprob(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    target_N: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    bias_V: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float = 0.0,
    chunk_bytes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each row's target and entropy of each row's softmax, in nats.

    hidden_NH [N, H] and weight_VH [V, H]: bfloat16, float32 or float64, both alike. The logits are fp32 in any case
        (fp64 for fp64). On CUDA fp32 operands obey torch's setting for TF32.
    target_N [N] int64. One outside the vocabulary gets logprob NaN: to refuse it would be to wait for the device.
    temperature: a positive number, or one for each row, [N] float32; a constant, as far as gradients go.
    bias_V [V]; logit_scale and softcap (0 = none): what the model does to its logits, before the temperature.
    chunk_bytes: size of one fp32 buffer of logits, by default 256 MiB, on CUDA 2.5 GiB. It holds at least 1 row, and a
        multiple of 256 rows when that many fit. Two buffers live at once; with gradient, a third when the entropy has
        one too, and another for a softcap.

    Returns (logprob_N, entropy_N), fp32. Gradients flow to hidden, weight and bias through both, where required; the
    backward makes the logits again, and under no_grad nothing is kept. The results depend on chunk_bytes and N only by
    rounding; equal calls give equal bits, and the logprobs are those of linear_grpo_loss on the same rows and budget.
    Raises ValueError for shapes, dtypes and devices that do not fit, and for DTensors.
    """
    return linear_logprob_ref(
        hidden_NH,
        weight_VH,
        target_N,
        temperature,
        bias_V=bias_V,
        logit_scale=logit_scale,
        softcap=softcap,
        chunk_bytes=chunk_bytes,
    )
