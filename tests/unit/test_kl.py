"""KL estimates: closed forms in float64, values and gradients, and finite results at the extremes."""

import math

import pytest
import torch

from fastgrpo.algorithm.kl import KL_ESTIMATORS, kl_estimate, log_ratio
from fastgrpo.config import KlType

FORMULAS = {  # of d = logprob - reference: value, gradient
    "k1": (lambda d: d, lambda d: 1.0),
    "abs": (abs, lambda d: math.copysign(1.0, d) if d else 0.0),
    "k2": (lambda d: d * d / 2, lambda d: d),
    "k3": (lambda d: math.exp(-d) + d - 1, lambda d: 1 - math.exp(-d)),
}
ALIASES = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
ALIASES |= {f"{name}+": f"{formula}+" for name, formula in ALIASES.items()}
FORMULAS |= {f"{name}+": (value, lambda d: d) for name, (value, _) in FORMULAS.items()}


@pytest.mark.parametrize("kind", ALIASES)
def test_value_and_gradient(kind: str) -> None:
    ref = torch.tensor([-1.0, -1.0, -3.0, -0.25, -19.0, -1.0], dtype=torch.float64)
    logprobs = torch.tensor([-1.0, -1.2, -0.5, -9.0, -0.5, -19.0], dtype=torch.float64, requires_grad=True)
    estimate = kl_estimate(logprobs, ref, kind)
    (gradient,) = torch.autograd.grad(estimate.sum(), logprobs)
    value_of, gradient_of = FORMULAS[ALIASES[kind]]
    d = (logprobs - ref).tolist()
    assert estimate.tolist() == pytest.approx([value_of(x) for x in d], rel=1e-12, abs=1e-15)
    assert gradient.tolist() == pytest.approx([gradient_of(x) for x in d], rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("kind", ALIASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_finite_at_every_logprob(kind: str, dtype: torch.dtype) -> None:
    points = torch.tensor([0.0, -1e-30, -1.0, -50.0, -400.0, -1e9, -math.inf], dtype=dtype)
    logprobs, ref = torch.cartesian_prod(points, points).unbind(1)
    logprobs = logprobs.clone().requires_grad_()
    estimate = kl_estimate(logprobs, ref, kind)
    (gradient,) = torch.autograd.grad(estimate.sum(), logprobs)
    assert estimate.isfinite().all() and gradient.isfinite().all()
    far = (logprobs - ref).abs().nan_to_num(0) > 20
    assert far.sum() > 20 and (gradient[far] == 0).all()
    at_limit = {FORMULAS[ALIASES[kind]][0](sign * 20.0) for sign in (1, -1)}
    assert all(any(x == pytest.approx(y, rel=1e-6) for y in at_limit) for x in estimate[far].tolist())


def test_k3_is_accurate_and_never_negative_near_zero() -> None:
    d = torch.tensor([1e-3, -1e-3, 1e-4, 3e-6], dtype=torch.float32)
    estimate = kl_estimate(d - 0.0, torch.zeros_like(d), "k3")
    assert estimate.tolist() == pytest.approx([math.expm1(-x) + x for x in d.tolist()], rel=1e-3)
    noise = torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * 1e-4
    assert kl_estimate(noise, torch.zeros_like(noise), "k3").min() >= 0


def test_equal_policies_have_no_kl_and_no_gradient() -> None:
    logprobs = torch.tensor([-0.1, -5.0, -math.inf], requires_grad=True)
    for kind in ("k2", "k3", "abs"):
        estimate = kl_estimate(logprobs, logprobs.detach(), kind)
        assert estimate.tolist() == [0, 0, 0]
        assert torch.autograd.grad(estimate.sum(), logprobs)[0].tolist() == [0, 0, 0]


def test_a_nan_shows() -> None:
    assert log_ratio(torch.tensor([math.nan]), torch.tensor([-1.0])).isnan().all()


def test_every_configurable_kind_exists() -> None:
    assert set(KL_ESTIMATORS) == {kind.value for kind in KlType} == set(ALIASES)
