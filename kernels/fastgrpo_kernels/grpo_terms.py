"""The GRPO loss of single tokens, given their logprobs: value and derivative, no logits, no reduction.

With logprob x, old logprob o, reference logprob q, advantage A, d = clamp(x - o, -20, 20) and r = exp(d):

    policy = -A min(r, 1 + clip_high)                A >= 0                     vanilla
           = -A min(max(r, 1 - clip_low), clip_c)    A < 0 (clip_c: dual clip)
           = -sg(clamp(r, 1 - clip_low, 1 + clip_high)) A x                     cispo (sg: no gradient)
           = -A 4 / tau sigmoid(tau (r - 1)),  tau of the advantage's sign      sapo
    kl     = e^-k + k - 1,  k,  k^2 / 2,  or  |k|,    k = clamp(x - q, -20, 20)
             (a name with + has that value and the gradient of k^2 / 2)
    loss   = weight * (importance * policy + kl_coef * kl)

The derivative is written out, not left to autograd, because the fused op needs it as a number in its forward.
Sources: clip-higher, Yu et al. 2025 (DAPO); dual clip, Ye et al. 2020; cispo, MiniMax-M1 2025; sapo, Gao et al. 2025;
the kl forms, J. Schulman, "Approximating KL Divergence"; truncated importance, Yao et al. 2025. Shape suffix: N tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgrpo_kernels._checks import number

CLIPPED_LOW, CLIPPED_HIGH, CLIPPED_DUAL = 1, 2, 4
_KL_VALUES = ("low_var_kl", "k3", "kl", "k1", "mse", "k2", "abs")
KL_TYPES = (*_KL_VALUES, *(f"{name}+" for name in _KL_VALUES))
POLICY_LOSSES = ("vanilla", "cispo", "sapo")

MAX_LOG_RATIO = 20.0  # exp of it is 4.9e8: finite when squared in fp32, and far outside of any clip range


class GrpoRows(NamedTuple):
    """Constants of each row, [N] in the dtype of the computation; see linear_grpo_loss."""

    weights_N: Tensor
    advantages_N: Tensor
    old_logprobs_N: Tensor | None = None
    ref_logprobs_N: Tensor | None = None
    sampler_logprobs_N: Tensor | None = None
    importance_N: Tensor | None = None

    def map(self, change: Callable[[str, Any], Tensor]) -> GrpoRows:
        """`change(name, tensor)` for each that is given, and for those that must be."""
        given = {n: x for n, x in self._asdict().items() if x is not None or n not in self._field_defaults}
        return GrpoRows(**{name: change(name, x) for name, x in given.items()})

    def chunk(self, rows: slice) -> GrpoRows:
        return self.map(lambda _, x: x[rows])


class GrpoSettings(NamedTuple):
    """Numbers of the loss; see linear_grpo_loss."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_c: float = 3.0
    importance_max: float = 0.0
    kl_coef: float = 0.0
    kl_type: str = "low_var_kl"
    entropy_coef: float = 0.0
    policy_loss: str = "vanilla"
    tau_pos: float = 1.0
    tau_neg: float = 1.05


class TokenTerms(NamedTuple):
    """The loss of single tokens without its entropy term: weight * (importance * policy + kl_coef * kl)."""

    loss_N: Tensor
    dlogprob_N: Tensor  # derivative of loss_N by the token's logprob
    kl_N: Tensor
    ratio_N: Tensor
    importance_N: Tensor
    flags_N: Tensor


def grpo_token_terms(logprobs_N: Tensor, rows: GrpoRows, settings: GrpoSettings) -> TokenTerms:
    """Loss of each token given its logprob, with the derivative. Pure; no gradient flows through it.

    Tokens of weight 0 have loss and derivative exactly 0, ratio 1 and kl 0, whatever else they hold: they are set aside
    before anything is exponentiated.
    """
    active_N = rows.weights_N != 0
    rows = _neutral_where_inactive(logprobs_N, rows, active_N)
    policy_N, dpolicy_N, ratio_N, flags_N = _policy_terms(logprobs_N, rows, settings)
    importance_N = _importance(logprobs_N, rows, settings.importance_max)
    loss_N, dlogprob_N = importance_N * policy_N, importance_N * dpolicy_N
    kl_N = torch.zeros_like(logprobs_N)
    if rows.ref_logprobs_N is not None:
        kl_N, dkl_N = _kl_terms(_log_ratio(logprobs_N, rows.ref_logprobs_N), settings.kl_type)
        if settings.kl_coef:
            loss_N, dlogprob_N = loss_N + settings.kl_coef * kl_N, dlogprob_N + settings.kl_coef * dkl_N
    return TokenTerms(
        loss_N=torch.where(active_N, rows.weights_N * loss_N, 0.0),
        dlogprob_N=torch.where(active_N, rows.weights_N * dlogprob_N, 0.0),
        kl_N=kl_N,
        ratio_N=ratio_N,
        importance_N=importance_N,
        flags_N=flags_N,
    )


def _neutral_where_inactive(logprobs_N: Tensor, rows: GrpoRows, active_N: Tensor) -> GrpoRows:
    def select(x: Tensor | None, neutral: Tensor | float) -> Tensor | None:
        return None if x is None else torch.where(active_N, x, neutral)

    return GrpoRows(
        weights_N=rows.weights_N,
        advantages_N=rows.advantages_N,
        old_logprobs_N=select(rows.old_logprobs_N, logprobs_N),
        ref_logprobs_N=select(rows.ref_logprobs_N, logprobs_N),
        sampler_logprobs_N=select(rows.sampler_logprobs_N, logprobs_N),
        importance_N=select(rows.importance_N, 1.0),
    )


def _log_ratio(a_N: Tensor, b_N: Tensor) -> Tensor:
    """a - b, and 0 where both are the same infinity."""
    return torch.where(a_N == b_N, 0.0, a_N - b_N)


def _policy_terms(logprobs_N: Tensor, rows: GrpoRows, settings: GrpoSettings) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, derivative, ratio, flags). NaN goes through every branch, so that it is seen."""
    old_N = logprobs_N if rows.old_logprobs_N is None else rows.old_logprobs_N
    log_ratio_N = _log_ratio(logprobs_N, old_N)
    ratio_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    far_N = log_ratio_N.abs() > MAX_LOG_RATIO  # the ratio is constant there
    match settings.policy_loss:
        case "vanilla":
            loss_N, derivative_N, flags_N = _vanilla(ratio_N, far_N, rows.advantages_N, settings)
        case "cispo":
            loss_N, derivative_N, flags_N = _cispo(logprobs_N, ratio_N, rows.advantages_N, settings)
        case "sapo":
            loss_N, derivative_N, flags_N = _sapo(ratio_N, far_N, rows.advantages_N, settings)
        case _:
            raise ValueError(f"policy_loss is {settings.policy_loss!r}: choose one of {', '.join(POLICY_LOSSES)}")
    return loss_N, derivative_N, ratio_N, flags_N.to(torch.uint8)


def _vanilla(
    ratio_N: Tensor, far_N: Tensor, advantages_N: Tensor, settings: GrpoSettings
) -> tuple[Tensor, Tensor, Tensor]:
    positive_N, negative_N = advantages_N > 0, advantages_N < 0
    high_N = positive_N & (ratio_N > 1 + settings.clip_high)
    low_N = negative_N & (ratio_N < 1 - settings.clip_low)
    dual_N = negative_N & (ratio_N > settings.clip_c)
    used_N = torch.where(
        negative_N, ratio_N.clamp(1 - settings.clip_low, settings.clip_c), ratio_N.clamp(max=1 + settings.clip_high)
    )
    derivative_N = torch.where(high_N | low_N | dual_N | far_N, 0.0, -advantages_N * ratio_N)
    flags_N = low_N * CLIPPED_LOW + high_N * CLIPPED_HIGH + dual_N * CLIPPED_DUAL
    return -advantages_N * used_N, derivative_N, flags_N


def _cispo(
    logprobs_N: Tensor, ratio_N: Tensor, advantages_N: Tensor, settings: GrpoSettings
) -> tuple[Tensor, Tensor, Tensor]:
    low, high = 1 - settings.clip_low, 1 + settings.clip_high
    factor_N = -advantages_N * ratio_N.clamp(low, high)
    return factor_N * logprobs_N, factor_N, (ratio_N < low) * CLIPPED_LOW + (ratio_N > high) * CLIPPED_HIGH


def _sapo(
    ratio_N: Tensor, far_N: Tensor, advantages_N: Tensor, settings: GrpoSettings
) -> tuple[Tensor, Tensor, Tensor]:
    tau_N = torch.where(advantages_N > 0, settings.tau_pos, settings.tau_neg)
    argument_N = tau_N * (ratio_N - 1)
    share_N, rest_N = argument_N.sigmoid(), (-argument_N).sigmoid()
    derivative_N = torch.where(far_N, 0.0, -advantages_N * 4 * share_N * rest_N * ratio_N)
    return -advantages_N * 4 / tau_N * share_N, derivative_N, torch.zeros_like(far_N, dtype=torch.uint8)


def _importance(logprobs_N: Tensor, rows: GrpoRows, importance_max: float) -> Tensor:
    if rows.importance_N is not None:
        return rows.importance_N
    if rows.sampler_logprobs_N is None or importance_max <= 0:
        return torch.ones_like(logprobs_N)
    trainer_N = logprobs_N if rows.old_logprobs_N is None else rows.old_logprobs_N
    log_ratio_N = _log_ratio(trainer_N, rows.sampler_logprobs_N)
    return log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=importance_max)


def _kl_terms(log_ratio_N: Tensor, kl_type: str) -> tuple[Tensor, Tensor]:
    """(estimate, derivative) from logprob - reference, held within +-20: beyond, the estimate is constant."""
    d_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    match kl_type.removesuffix("+"):
        case "low_var_kl" | "k3":
            growth_N = (-d_N).expm1()  # keeps the digits that exp(.) - 1 would lose near 0
            value_N, slope_N = growth_N + d_N, -growth_N
        case "kl" | "k1":
            value_N, slope_N = d_N, torch.where(d_N.isnan(), d_N, 1.0)
        case "mse" | "k2":
            value_N, slope_N = 0.5 * d_N.square(), d_N
        case "abs":
            value_N, slope_N = d_N.abs(), torch.where(d_N.isnan(), d_N, d_N.sign())  # sign(NaN) is 0
        case _:
            raise ValueError(f"kl_type is {kl_type!r}: choose one of {', '.join(KL_TYPES)}")
    if kl_type.endswith("+"):
        slope_N = d_N
    return value_N, torch.where(log_ratio_N.abs() > MAX_LOG_RATIO, 0.0, slope_N)


def check_settings(settings: GrpoSettings, rows: GrpoRows) -> GrpoSettings:
    """The settings with floats for numbers; ValueError for what has no meaning, alone or with these rows."""
    if settings.kl_type not in KL_TYPES:
        raise ValueError(f"kl_type is {settings.kl_type!r}: choose one of {', '.join(KL_TYPES)}")
    if settings.policy_loss not in POLICY_LOSSES:
        raise ValueError(f"policy_loss is {settings.policy_loss!r}: choose one of {', '.join(POLICY_LOSSES)}")
    bounds = ("clip_low", "clip_high", "clip_c", "importance_max")  # may be infinite: none
    factors = ("kl_coef", "entropy_coef", "tau_pos", "tau_neg")
    numbers = {name: number(name, getattr(settings, name), finite=name in factors) for name in (*bounds, *factors)}
    settings = settings._replace(**numbers)
    if settings.tau_pos <= 0 or settings.tau_neg <= 0:
        raise ValueError(f"tau_pos and tau_neg must be positive, got {settings.tau_pos}, {settings.tau_neg}")
    if settings.clip_low < 0 or settings.clip_high < 0:
        raise ValueError(f"clip_low and clip_high must not be negative, got {settings.clip_low}, {settings.clip_high}")
    if settings.clip_c <= 1:
        raise ValueError(f"clip_c must be above 1, got {settings.clip_c}: use {math.inf} for no dual clip")
    if settings.importance_max < 0:
        raise ValueError(f"importance_max must not be negative, got {settings.importance_max}: 0 means no weights")
    _check_rows(settings, rows)
    return settings


def _check_rows(settings: GrpoSettings, rows: GrpoRows) -> None:
    if settings.kl_coef and rows.ref_logprobs_N is None:
        raise ValueError(f"kl_coef is {settings.kl_coef} without ref_logprobs_N: pass them, or kl_coef 0")
    if rows.sampler_logprobs_N is None:
        return
    if rows.importance_N is not None:
        raise ValueError("importance_N and sampler_logprobs_N both make importance weights: pass one of them")
    if not settings.importance_max:
        raise ValueError(
            "sampler_logprobs_N make importance weights of at most importance_max, which is 0: pass it "
            f"({math.inf} for no bound), or leave them out"
        )
