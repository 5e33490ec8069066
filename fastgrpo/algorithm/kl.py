"""Estimates of KL(policy || reference) from the logprobs of drawn tokens, and the bounded log-ratio under all of them.

With d = logprobs - ref_logprobs, a token's estimate and its gradient with respect to logprobs are

    kl,  k1          d               1          the value is unbiased; as a loss its expected gradient is zero
    abs              |d|             sign(d)
    mse, k2          d^2 / 2         d          the gradient is that of the KL, on policy
    low_var_kl, k3   e^-d + d - 1    1 - e^-d   the value is unbiased and never negative
    any name with +  as without      d          that value with the gradient of k2 (straight through)

(J. Schulman, "Approximating KL Divergence", 2020.) `+` exists because k1 and k3 have the right value but, over drawn
tokens, not the expected gradient of KL(policy || reference), which k2 has. d is held within +-20, as in verl: beyond
that the estimate is constant and its gradient 0, so that neither overflows. The result itself is not cut (verl cuts
low_var_kl at 10).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0  # nats; e^20 = 4.9e8
_LOGPROB_FLOOR = -1e30  # stands for -inf, which would make -inf - -inf = NaN


def log_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """log(p / q) from two logprobs, held within +-20 (gradient 0 outside). Finite for every logprob in [-inf, 0]; two
    impossible tokens have ratio 1. NaN stays NaN: a broken model must show."""
    return raw_log_ratio(numerator, denominator).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def raw_log_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """The same, not held: for means over a sequence, which are held themselves. +-1e30 for an impossible token."""
    return numerator.clamp(min=_LOGPROB_FLOOR) - denominator.clamp(min=_LOGPROB_FLOOR)


def _k1(d: Tensor) -> Tensor:
    return d


def _abs(d: Tensor) -> Tensor:
    return d.abs()


def _k2(d: Tensor) -> Tensor:
    return d.square() / 2


def _k3(d: Tensor) -> Tensor:
    return torch.expm1(-d) + d  # expm1: in float32, e^-d - 1 + d is all rounding below d = 1e-3


def _with_gradient_of_k2(value: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def estimate(d: Tensor) -> Tensor:
        gradient = _k2(d)
        return value(d).detach() + (gradient - gradient.detach())  # the second term is exactly 0

    return estimate


_BASIC: dict[str, Callable[[Tensor], Tensor]] = {
    "kl": _k1,
    "k1": _k1,
    "abs": _abs,
    "mse": _k2,
    "k2": _k2,
    "low_var_kl": _k3,
    "k3": _k3,
}
KL_ESTIMATORS = _BASIC | {f"{name}+": _with_gradient_of_k2(value) for name, value in _BASIC.items()}


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: str) -> Tensor:
    """The estimate of each token (same shape), differentiable in `logprobs`. `kind` is a key of KL_ESTIMATORS."""
    return KL_ESTIMATORS[kind](log_ratio(logprobs, ref_logprobs))
