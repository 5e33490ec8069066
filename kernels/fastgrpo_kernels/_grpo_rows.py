"""grpo_token_terms (grpo_terms.py) and the scale of D (_exp_rows.py), in Triton: one launch over the rows of a chunk.

The torch form of the same maths is forty launches, which at a few thousand rows take longer than the arithmetic. The
formulas are in grpo_terms.py; a branch that the settings rule out is not compiled, and no number is compiled in.
"""

from __future__ import annotations

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# (device code is not what it looks like, and a launch takes options that are not among the parameters)
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from fastgrpo_kernels.grpo_terms import (
    CLIPPED_DUAL,
    CLIPPED_HIGH,
    CLIPPED_LOW,
    MAX_LOG_RATIO,
    POLICY_LOSSES,
    GrpoRows,
    GrpoSettings,
)

_LOW, _HIGH, _DUAL = tl.constexpr(CLIPPED_LOW), tl.constexpr(CLIPPED_HIGH), tl.constexpr(CLIPPED_DUAL)
_FAR = tl.constexpr(MAX_LOG_RATIO)
_CISPO, _SAPO = tl.constexpr(POLICY_LOSSES.index("cispo")), tl.constexpr(POLICY_LOSSES.index("sapo"))
_KL_FORMS = {"low_var_kl": 0, "k3": 0, "kl": 1, "k1": 1, "mse": 2, "k2": 2, "abs": 3}
_BLOCK = 256


class GrpoOutputs(NamedTuple):
    """Of each row, [N] fp32 but for the flags (uint8)."""

    loss_N: Tensor
    dlogprob_N: Tensor
    kl_N: Tensor
    ratio_N: Tensor
    importance_N: Tensor
    flags_N: Tensor

    def chunk(self, rows: slice) -> GrpoOutputs:
        return GrpoOutputs(*(x[rows] for x in self))


@triton.jit
def _held(x, low, high):
    """x held between the two; NaN stays NaN, which tl.minimum would drop."""
    return tl.where(x > high, high, tl.where(x < low, low, x))


@triton.jit
def _log_ratio(a, b):
    return tl.where(a == b, 0.0, a - b)


@triton.jit
def _expm1(x):
    """e^x - 1, exact to a few ulp also near 0 (W. Kahan's form)."""
    grown = tl.exp(x)
    near = tl.where(grown == 1.0, 1.0, tl.log(grown))
    return tl.where(grown == 1.0, x, tl.where((x > -0.5) & (x < 0.5), (grown - 1.0) * (x / near), grown - 1.0))


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _policy(logprob, log_ratio, ratio, advantage, clip_low, clip_high, clip_c, tau_pos, tau_neg, POLICY: tl.constexpr):
    far = tl.abs(log_ratio) > _FAR
    low, high = 1.0 - clip_low, 1.0 + clip_high
    if POLICY == _CISPO:
        derivative = -advantage * _held(ratio, low, high)
        loss = derivative * logprob
        flags = tl.where(ratio < low, _LOW, 0) + tl.where(ratio > high, _HIGH, 0)
    elif POLICY == _SAPO:
        tau = tl.where(advantage > 0.0, tau_pos, tau_neg)
        argument = tau * (ratio - 1.0)
        share = _sigmoid(argument)
        loss = -advantage * 4.0 / tau * share
        derivative = tl.where(far, 0.0, -advantage * 4.0 * share * _sigmoid(-argument) * ratio)
        flags = tl.where(far, 0, 0)
    else:
        negative = advantage < 0.0
        is_high = (advantage > 0.0) & (ratio > high)
        is_low = negative & (ratio < low)
        is_dual = negative & (ratio > clip_c)
        used = tl.where(negative, _held(ratio, low, clip_c), tl.where(ratio > high, high, ratio))
        loss = -advantage * used
        derivative = tl.where(is_high | is_low | is_dual | far, 0.0, -advantage * ratio)
        flags = tl.where(is_low, _LOW, 0) + tl.where(is_high, _HIGH, 0) + tl.where(is_dual, _DUAL, 0)
    return loss, derivative, flags


@triton.jit
def _kl(log_ratio, FORM: tl.constexpr, STRAIGHT: tl.constexpr):
    gap = _held(log_ratio, -_FAR, _FAR)
    if FORM == 0:
        growth = _expm1(-gap)
        value, slope = growth + gap, -growth
    elif FORM == 1:
        value, slope = gap, tl.where(gap == gap, 1.0, gap)
    elif FORM == 2:
        value, slope = 0.5 * gap * gap, gap
    else:
        sign = tl.where(gap > 0.0, 1.0, tl.where(gap < 0.0, -1.0, gap))
        value, slope = tl.abs(gap), sign
    if STRAIGHT:
        slope = gap
    return value, tl.where(tl.abs(log_ratio) > _FAR, 0.0, slope)


@triton.jit(do_not_specialize=["num_rows"])
def grpo_rows_kernel(
    logprob_ptr,
    entropy_ptr,
    weight_ptr,
    advantage_ptr,
    old_ptr,
    ref_ptr,
    sampler_ptr,
    importance_ptr,
    loss_ptr,
    dlogprob_ptr,
    kl_ptr,
    ratio_ptr,
    importance_out_ptr,
    flags_ptr,
    clip_low,
    clip_high,
    clip_c,
    importance_max,
    kl_coef,
    entropy_coef,
    tau_pos,
    tau_neg,
    num_rows,
    HAS_OLD: tl.constexpr,
    HAS_REF: tl.constexpr,
    HAS_SAMPLER: tl.constexpr,
    HAS_IMPORTANCE: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    POLICY: tl.constexpr,
    KL_FORM: tl.constexpr,
    STRAIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_rows
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0)
    active = weight != 0.0
    logprob = tl.load(logprob_ptr + at, mask=inside, other=0.0)
    # a row without weight may have any target: its logprob is then 0, so that no sum meets a NaN
    logprob = tl.where(active | (logprob == logprob), logprob, 0.0)
    advantage = tl.load(advantage_ptr + at, mask=inside, other=0.0)
    old = logprob
    if HAS_OLD:
        old = tl.where(active, tl.load(old_ptr + at, mask=inside, other=0.0), logprob)
    log_ratio = _log_ratio(logprob, old)
    ratio = tl.exp(_held(log_ratio, -_FAR, _FAR))
    policy, derivative, flags = _policy(
        logprob, log_ratio, ratio, advantage, clip_low, clip_high, clip_c, tau_pos, tau_neg, POLICY
    )
    importance = tl.full([BLOCK], 1.0, dtype=tl.float32)
    if HAS_IMPORTANCE:
        importance = tl.where(active, tl.load(importance_ptr + at, mask=inside, other=1.0), 1.0)
    elif HAS_SAMPLER:
        sampler = tl.where(active, tl.load(sampler_ptr + at, mask=inside, other=0.0), logprob)
        importance = tl.exp(_held(_log_ratio(old, sampler), -_FAR, _FAR))
        importance = tl.where(importance > importance_max, importance_max, importance)
    loss = importance * policy
    derivative = importance * derivative
    kl = tl.zeros([BLOCK], dtype=tl.float32)
    if HAS_REF:
        ref = tl.where(active, tl.load(ref_ptr + at, mask=inside, other=0.0), logprob)
        kl, slope = _kl(_log_ratio(logprob, ref), KL_FORM, STRAIGHT)
        loss += tl.where(kl_coef == 0.0, 0.0, kl_coef * kl)
        derivative += tl.where(kl_coef == 0.0, 0.0, kl_coef * slope)
    loss = weight * loss
    if HAS_ENTROPY:
        loss -= entropy_coef * weight * tl.load(entropy_ptr + at, mask=inside, other=0.0)
    tl.store(logprob_ptr + at, logprob, mask=inside)
    tl.store(loss_ptr + at, tl.where(active, loss, 0.0), mask=inside)
    tl.store(dlogprob_ptr + at, tl.where(active, weight * derivative, 0.0), mask=inside)
    tl.store(kl_ptr + at, kl, mask=inside)
    tl.store(ratio_ptr + at, ratio, mask=inside)
    tl.store(importance_out_ptr + at, importance, mask=inside)
    tl.store(flags_ptr + at, tl.where(active, flags, 0).to(tl.uint8), mask=inside)


def grpo_rows(logprob_C: Tensor, entropy_C: Tensor, rows: GrpoRows, settings: GrpoSettings, out: GrpoOutputs) -> None:
    """Fill `out`; the loss includes the entropy term. logprob_C of rows without weight becomes 0 where it is NaN."""
    num_rows = logprob_C.shape[0]
    if num_rows == 0:
        return
    unused = logprob_C
    sampler_C = rows.sampler_logprobs_N if settings.importance_max > 0 else None
    optional = (rows.old_logprobs_N, rows.ref_logprobs_N, sampler_C, rows.importance_N)
    grpo_rows_kernel[(triton.cdiv(num_rows, _BLOCK),)](
        logprob_C,
        entropy_C,
        rows.weights_N,
        rows.advantages_N,
        *(unused if x is None else x for x in optional),
        *out,
        settings.clip_low,
        settings.clip_high,
        settings.clip_c,
        settings.importance_max,
        settings.kl_coef,
        settings.entropy_coef,
        settings.tau_pos,
        settings.tau_neg,
        num_rows,
        *(x is not None for x in optional),
        settings.entropy_coef != 0,
        POLICY_LOSSES.index(settings.policy_loss),
        _KL_FORMS[settings.kl_type.removesuffix("+")],
        settings.kl_type.endswith("+"),
        _BLOCK,
        num_warps=4,
    )
