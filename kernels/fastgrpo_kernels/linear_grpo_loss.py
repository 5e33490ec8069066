"""linear_grpo_loss: the clipped GRPO loss of each row's target, from hidden states and the output layer, in one pass.

With x = logprob of the target and H = entropy of the row's softmax (linear_logprob.py):

    loss = sum over rows of weight * (importance * policy(x) + kl_coef * kl(x) - entropy_coef * H)

where policy and kl are those of grpo_terms.py. Each row's derivatives, g by x and h by H, are known once its logits
are, so the gradient of the logits is made on the spot,

    dL/dl_v = g (1[v = y] - p_v) - h p_v (l_v - sum(p l)),    h = -weight * entropy_coef,

and so are those of hidden and weight: 6 NHV operations (8 in Triton with an entropy bonus, whose gradient takes the
logits a second time), nothing of size [N, V]. A loss that needs more than its own row (a ratio of whole sequences, say)
goes through linear_logprob.
Shape suffixes: N rows, C rows of a chunk, H hidden, V vocabulary.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgrpo_kernels._checks import HeadOptions, check_head, row_vector, temperature_rows
from fastgrpo_kernels._chunks import (
    Head,
    HeadGradients,
    compute_dtype,
    first_derivative_only,
    logits_gradient,
    operand,
    row_slices,
    scaled,
    softmax_rows,
)
from fastgrpo_kernels.grpo_terms import GrpoRows, GrpoSettings, check_settings, grpo_token_terms


class GrpoLoss(NamedTuple):
    """What linear_grpo_loss returns, fp32 (fp64 for fp64 operands); everything but `loss` is detached. Rows of weight
    0: see there."""

    loss: Tensor  # scalar, summed over the rows
    logprobs_N: Tensor  # of the targets
    entropy_N: Tensor  # nats
    kl_N: Tensor  # the estimate without its coefficient; 0 without reference
    ratio_N: Tensor  # before clipping; 1 without old_logprobs
    importance_N: Tensor  # the weight used; 1 without any
    flags_N: Tensor  # uint8, bits CLIPPED_LOW, CLIPPED_HIGH, CLIPPED_DUAL: clipping removed this row's policy gradient


class _Call(NamedTuple):
    """What one call holds besides its differentiable inputs."""

    target_N: Tensor
    temperature_N: Tensor
    rows: GrpoRows
    settings: GrpoSettings
    head: HeadOptions
    differentiable: bool  # inside an autograd function gradients are always off


class _LinearGrpoLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, call: _Call
    ) -> tuple[Tensor, ...]:
        hidden, weight, bias = ctx.needs_input_grad[:3]
        there_is_a_backward = call.differentiable and (hidden or weight or bias)
        needs = hidden, weight or call.head.weight_grad_VH is not None, bias
        head = Head(operand(weight_VH), bias_V, call.head.logit_scale, call.head.softcap)
        gradients = HeadGradients(hidden_NH, weight_VH, bias_V, needs if there_is_a_backward else (False, False, False))
        run = _run_reference if call.head.impl == "reference" else _run_triton
        outputs = run(hidden_NH, head, call, gradients)
        ctx.save_for_backward(*gradients.finish())
        ctx.dtypes = hidden_NH.dtype, weight_VH.dtype, None if bias_V is None else bias_V.dtype
        ctx.weight_grad_VH = call.head.weight_grad_VH
        ctx.mark_non_differentiable(*outputs[1:])
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dloss: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if dloss is None:
            return None, None, None, None
        hidden_grad_NH, weight_grad_VH, bias_grad_V = ctx.saved_tensors
        if ctx.weight_grad_VH is not None and weight_grad_VH is not None:
            # here and not in the forward, which activation checkpointing runs twice, and others for its value alone
            ctx.weight_grad_VH.addcmul_(weight_grad_VH, dloss)
            weight_grad_VH = None
        # not in place: a second backward over a retained graph must find them as they were
        pairs = zip((hidden_grad_NH, weight_grad_VH, bias_grad_V), ctx.dtypes, strict=True)
        return *(None if x is None else scaled(x, dloss, dtype) for x, dtype in pairs), None


def _run_reference(hidden_NH: Tensor, head: Head, call: _Call, gradients: HeadGradients) -> GrpoLoss:
    outputs = _empty_outputs(hidden_NH)
    loss_N = torch.empty_like(outputs.logprobs_N)
    with_entropy = call.settings.entropy_coef != 0
    for chunk in row_slices(hidden_NH.shape[0], head.weight_VH.shape[0], call.head.chunk_bytes):
        softmax = softmax_rows(
            hidden_NH[chunk],
            head,
            call.target_N[chunk],
            call.temperature_N[chunk],
            for_gradient=gradients.wanted,
            for_entropy_gradient=gradients.wanted and with_entropy,
        )
        loss_N[chunk], dlogprob_C, dentropy_C = _store_terms(
            outputs, chunk, softmax.logprob_C, softmax.entropy_C, call.rows.chunk(chunk), call.settings
        )
        if gradients.wanted:
            grad_CV = logits_gradient(softmax, dlogprob_C, dentropy_C)
            gradients.add(chunk, hidden_NH[chunk], head.weight_VH, grad_CV)
    return outputs._replace(loss=loss_N.sum())


def _run_triton(hidden_NH: Tensor, head: Head, call: _Call, gradients: HeadGradients) -> GrpoLoss:
    from fastgrpo_kernels import _grpo_rows, _sweep  # where triton is not installed the reference still runs

    settings, rows = call.settings, call.rows
    # the entropy's gradient needs logits twice
    epilogue = False if settings.entropy_coef else {"auto": None, "rows": False, "epilogue": True}[call.head.impl]
    plan = _sweep.make_plan(hidden_NH, head.weight_VH, call.head.chunk_bytes, epilogue=epilogue)
    sweep = _sweep.Sweep.of(hidden_NH, head, call.target_N, call.temperature_N, plan)
    outputs = _empty_outputs(hidden_NH)._replace(logprobs_N=sweep.stats.logprob_N, entropy_N=sweep.stats.entropy_N)
    loss_N, dlogprob_N = torch.empty(2, hidden_NH.shape[0], dtype=torch.float32, device=hidden_NH.device)
    terms = _grpo_rows.GrpoOutputs(
        loss_N, dlogprob_N, outputs.kl_N, outputs.ratio_N, outputs.importance_N, outputs.flags_N
    )
    dentropy_N = -settings.entropy_coef * rows.weights_N
    grad_NV = sweep.gradient_buffer(gradients.wanted)
    for chunk in sweep.chunks:
        grad_CV = grad_NV[: chunk.stop - chunk.start]
        sweep.run(chunk, grad_CV[:, :0] if settings.entropy_coef else grad_CV)
        _grpo_rows.grpo_rows(
            outputs.logprobs_N[chunk], outputs.entropy_N[chunk], rows.chunk(chunk), settings, terms.chunk(chunk)
        )
        if gradients.wanted:
            dentropy_C = dentropy_N[chunk] if settings.entropy_coef else None
            scale_C = sweep.finish_gradient(chunk, grad_CV, dlogprob_N[chunk], dentropy_C)
            gradients.add(chunk, hidden_NH[chunk], head.weight_VH, grad_CV, scale_C)
    return outputs._replace(loss=loss_N.sum())


def _empty_outputs(hidden_NH: Tensor) -> GrpoLoss:
    def empty(dtype: torch.dtype) -> Tensor:
        return torch.empty(hidden_NH.shape[0], dtype=dtype, device=hidden_NH.device)

    dtype = compute_dtype(hidden_NH)
    return GrpoLoss(
        loss=torch.zeros((), dtype=dtype, device=hidden_NH.device),
        logprobs_N=empty(dtype),
        entropy_N=empty(dtype),
        kl_N=empty(dtype),
        ratio_N=empty(dtype),
        importance_N=empty(dtype),
        flags_N=empty(torch.uint8),
    )


def _store_terms(
    outputs: GrpoLoss,
    chunk: slice,
    logprobs_C: Tensor,
    entropy_C: Tensor,
    rows: GrpoRows,
    settings: GrpoSettings,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Fill one chunk of the outputs; returns its losses and their derivatives by logprob and entropy."""
    active_C = rows.weights_N != 0
    # a row without weight may have any target: its logprob is then 0, so that no sum meets a NaN
    logprobs_C = torch.where(active_C | ~logprobs_C.isnan(), logprobs_C, 0.0)
    terms = grpo_token_terms(logprobs_C, rows, settings)
    outputs.logprobs_N[chunk] = logprobs_C
    outputs.entropy_N[chunk] = entropy_C
    outputs.kl_N[chunk] = terms.kl_N
    outputs.ratio_N[chunk] = terms.ratio_N
    outputs.importance_N[chunk] = terms.importance_N
    outputs.flags_N[chunk] = terms.flags_N
    if not settings.entropy_coef:
        return terms.loss_N, terms.dlogprob_N, None
    dentropy_C = -settings.entropy_coef * rows.weights_N
    return torch.where(active_C, terms.loss_N + dentropy_C * entropy_C, 0.0), terms.dlogprob_N, dentropy_C


def linear_grpo_loss(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    target_N: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    weights_N: Tensor,
    advantages_N: Tensor,
    old_logprobs_N: Tensor | None = None,
    ref_logprobs_N: Tensor | None = None,
    sampler_logprobs_N: Tensor | None = None,
    importance_N: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_c: float = 3.0,
    importance_max: float = 0.0,
    kl_coef: float = 0.0,
    kl_type: str = "low_var_kl",
    entropy_coef: float = 0.0,
    policy_loss: str = "vanilla",
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    bias_V: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = 0.0,
    chunk_bytes: int | None = None,
    weight_grad_VH: Tensor | None = None,
    impl: str = "auto",
) -> GrpoLoss:
    """The GRPO loss, summed over rows, with the gradients of hidden, weight and bias made in the forward.

    hidden_NH, weight_VH, target_N, temperature, bias_V, logit_scale, softcap, chunk_bytes, impl: as in linear_logprob
        (with an entropy bonus the Triton form is always `rows`: take it for the old pass too, so that the ratio to it
        is 1). The rest are constants, to which no gradient flows;
        those called ..._N are floating tensors [N], a value for each row:
    weights_N: factor of each row's loss; every normaliser is in here.
    advantages_N.
    old_logprobs_N: logprobs at rollout time; without them the present ones, detached, so that the ratio is exactly 1.
    ref_logprobs_N, kl_coef, kl_type: reference policy, its coefficient, and the estimate: low_var_kl = k3, kl = k1,
        mse = k2, abs; with a + behind it (k3+, say) its value has the gradient of k2. With a coefficient of 0 kl_N is
        still reported.
    importance_N: factor of each row's policy term (rollout correction); or, from sampler_logprobs_N and
        importance_max > 0, min(exp(old - sampler), importance_max), with the present logprobs, detached, in place of a
        missing old. sampler_logprobs_N need importance_max; importance_max without them changes nothing.
    clip_low, clip_high: the ratio is clipped to [1 - low, 1 + high]; clip_c > 1: bound of the ratio for negative
        advantages, math.inf for none. A ratio on a bound keeps its gradient.
    entropy_coef: weight of the entropy bonus, with gradient.
    policy_loss: vanilla (clipped, the above); cispo: the ratio, held to [1 - low, 1 + high] and detached, weighs the
        logprob; sapo: a sigmoid gate of temperature tau_pos (advantages above 0) or tau_neg in place of the clip.
    weight_grad_VH: as in linear_logprob; the sum of this call's rows is held beside it until the backward.

    Log-ratios, those of every kl estimate too, are clamped to [-20, 20], with gradient 0 outside: loss and gradients
    are finite for finite logits, weights and advantages, also where a logprob given is infinite. NaN in one makes them
    NaN.
    A row of weight 0 adds exactly nothing, whatever its target, advantage and given logprobs hold, NaN too; its ratio
    is 1, its kl 0, its flags 0. Gather such rows out beforehand where you can: here they cost as much as any other.

    Returns GrpoLoss. From forward to backward the gradients are kept, of hidden in its dtype, of weight in fp32; the
    backward scales and casts them into new tensors. Under no_grad none are made. With N = 0 the loss is 0 and the
    gradients are zeros. Raises ValueError for shapes, dtypes, devices and settings that do not fit, and for
    DTensors; its backward RuntimeError under create_graph=True: there are no second derivatives.
    """
    head = check_head(
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
    settings = GrpoSettings(
        clip_low,
        clip_high,
        clip_c,
        importance_max,
        kl_coef,
        kl_type,
        entropy_coef,
        policy_loss,
        tau_pos,
        tau_neg,
    )
    given = GrpoRows(weights_N, advantages_N, old_logprobs_N, ref_logprobs_N, sampler_logprobs_N, importance_N)
    settings = check_settings(settings, given)
    call = _Call(
        target_N.long().contiguous(),
        temperature_rows(temperature, hidden_NH),
        given.map(lambda name, x: row_vector(name, x, hidden_NH)),
        settings,
        head,
        torch.is_grad_enabled(),
    )
    # the op obeys the dtypes that it is given: autocast would turn fp32 products into bf16 ones
    with torch.autocast(hidden_NH.device.type, enabled=False):
        return GrpoLoss(*_LinearGrpoLoss.apply(hidden_NH, weight_VH, bias_V, call))


linear_grpo_loss_ref = functools.partial(linear_grpo_loss, impl="reference")
"""linear_grpo_loss in plain torch, on any device: what the other forms are measured against."""
