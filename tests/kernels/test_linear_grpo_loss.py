"""linear_grpo_loss against full logits and autograd in fp64, and the faults of others that it must not have."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from fastgrpo_kernels import (
    CLIPPED_DUAL,
    CLIPPED_HIGH,
    CLIPPED_LOW,
    GrpoRows,
    GrpoSettings,
    grpo_token_terms,
    linear_grpo_loss,
    linear_grpo_loss_ref,
    linear_logprob,
)

CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
)
INF, NAN = math.inf, math.nan


def plain_loss(logprob, entropy, r: dict, o: dict) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, kl, importance) in ordinary differentiable torch."""
    A = r["advantages_N"]
    old = r.get("old_logprobs_N")
    old = logprob.detach() if old is None else old
    ratio = (logprob - old).exp()
    low, high, c = o.get("clip_low", 0.2), o.get("clip_high", 0.2), o.get("clip_c", 3.0)
    policy = torch.maximum(-ratio * A, -ratio.clamp(1 - low, 1 + high) * A)
    policy = torch.where(A < 0, torch.minimum(policy, -c * A), policy)
    importance = torch.ones_like(logprob)
    if "importance_N" in r:
        importance = r["importance_N"]
    elif "sampler_logprobs_N" in r and o.get("importance_max", 0) > 0:
        importance = (old - r["sampler_logprobs_N"]).exp().clamp(max=o["importance_max"])
    kl = torch.zeros_like(logprob)
    if "ref_logprobs_N" in r:
        gap = logprob - r["ref_logprobs_N"]
        kind = o.get("kl_type", "low_var_kl")
        if kind in ("low_var_kl", "k3"):
            kl = (-gap).exp() + gap - 1
        else:
            kl = {"kl": gap, "k1": gap, "mse": gap**2 / 2, "k2": gap**2 / 2, "abs": gap.abs()}[kind]
    terms = importance * policy + o.get("kl_coef", 0.0) * kl - o.get("entropy_coef", 0.0) * entropy
    return (r["weights_N"] * terms).sum(), kl, importance


def truth(hidden, weight, target, temperature, bias, rows, options):
    logits = (hidden @ weight.T + bias) * options.get("logit_scale", 1.0)
    if cap := options.get("softcap", 0.0):
        logits = cap * torch.tanh(logits / cap)
    logprobs = (logits / temperature.unsqueeze(1)).log_softmax(1)
    logprob = logprobs.gather(1, target.unsqueeze(1)).squeeze(1)
    entropy = -(logprobs.exp() * logprobs).sum(1)
    return *plain_loss(logprob, entropy, rows, options), logprob, entropy


def problem(N, V, H, seed=0):
    rng = torch.Generator().manual_seed(seed)
    weight = torch.randn(V, H, generator=rng)
    target = torch.randint(V, (N,), generator=rng)
    hidden = torch.randn(N, H, generator=rng) + 6 / H * weight[target]
    bias = torch.randn(V, generator=rng)
    temperature = 0.5 + torch.rand(N, generator=rng)
    return hidden, weight, target, bias, temperature


def row_inputs(N, logprob: Tensor, seed=1, *, sampler=False) -> dict[str, Tensor]:
    """Rows near `logprob`, so that all clips occur; with `sampler` for calls with importance_max."""
    rng = torch.Generator().manual_seed(seed)
    noise = torch.randn(3, N, generator=rng)
    rows = {
        "weights_N": torch.rand(N, generator=rng) / 7,
        "advantages_N": torch.randn(N, generator=rng),
        "old_logprobs_N": logprob + 0.7 * noise[0],
        "ref_logprobs_N": logprob + 0.8 * noise[1],
    }
    return rows | ({"sampler_logprobs_N": logprob + 0.6 * noise[2]} if sampler else {})


def doubles(rows: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.double() for name, x in rows.items()}


def leaves(*tensors, dtype=None) -> list[Tensor]:
    return [x.detach().to(dtype or x.dtype).clone().requires_grad_() for x in tensors]


def relative(actual: Tensor, expected: Tensor) -> float:
    """Of a gradient below 1e-2 the error is absolute: 1 - p of a near certain token has few digits in fp32."""
    return ((actual.double() - expected).norm() / expected.norm().clamp(min=1e-2)).item()


def check_against_truth(hidden, weight, target, bias, temperature, rows, options, chunk_rows, tolerance=1e-5):
    inputs, exact = leaves(hidden, weight, bias), leaves(hidden, weight, bias, dtype=torch.float64)
    out = linear_grpo_loss(
        *inputs[:2],
        target,
        temperature,
        bias_V=inputs[2],
        chunk_bytes=4 * weight.shape[0] * chunk_rows,
        **rows,
        **options,
    )
    loss, kl, importance, logprob, entropy = truth(
        *exact[:2], target, temperature.double(), exact[2], doubles(rows), options
    )
    old = doubles(rows).get("old_logprobs_N", logprob)
    scale = max(1.0, loss.abs().item())
    assert out.loss.dtype == torch.float32 and abs(out.loss.item() - loss.item()) < tolerance * scale
    for got, want in (
        (out.logprobs_N, logprob),
        (out.entropy_N, entropy),
        (out.kl_N, kl),
        (out.importance_N, importance),
        (out.ratio_N, (logprob - old).exp()),
    ):
        assert got.dtype == torch.float32 and not got.requires_grad
        torch.testing.assert_close(got.double(), want.detach(), rtol=3 * tolerance, atol=3 * tolerance)
    (out.loss * 3.0).backward()
    (loss * 3.0).backward()
    for got, want in zip(inputs, exact, strict=True):
        assert got.grad.dtype == got.dtype and relative(got.grad, want.grad) < 3 * tolerance
    return out


@pytest.mark.parametrize("chunk_rows", [1, 7, 64])
@pytest.mark.parametrize("N", [0, 1, 3, 37])
@pytest.mark.parametrize("H", [8, 24])
@pytest.mark.parametrize("V", [5, 17, 257, 1000])
def test_everything_at_once_equals_full_logits(V, H, N, chunk_rows):
    hidden, weight, target, bias, temperature = problem(N, V, H)
    logprob = truth(hidden, weight, target, temperature, bias, row_inputs(N, torch.zeros(N)), {})[3]
    options = {"clip_high": 0.28, "importance_max": 2.0, "kl_coef": 0.1, "entropy_coef": 0.05}
    rows = row_inputs(N, logprob, sampler=True)
    check_against_truth(hidden, weight, target, bias, temperature, rows, options, chunk_rows)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"softcap": 4.0, "logit_scale": 1.5, "entropy_coef": 0.1},
        {"logit_scale": 0.25},
        {"entropy_coef": -0.3},
        {"clip_low": 0.0, "clip_high": 0.0},
        {"clip_low": 0.5, "clip_high": 0.1, "clip_c": 1.5},
        {"clip_c": INF},
        {"importance_max": 1.1},
        *({"kl_coef": 0.2, "kl_type": kind} for kind in ("low_var_kl", "k3", "kl", "k1", "mse", "k2", "abs")),
    ],
    ids=str,
)
@pytest.mark.parametrize("without", ["", "old_logprobs_N", "sampler_logprobs_N"])
def test_each_option_equals_full_logits(options, without):
    hidden, weight, target, bias, temperature = problem(37, 17, 8)
    logprob = truth(hidden, weight, target, temperature, bias, row_inputs(37, torch.zeros(37)), options)[3]
    given = row_inputs(37, logprob, sampler="importance_max" in options)
    rows = {name: x for name, x in given.items() if name != without}
    out = check_against_truth(hidden, weight, target, bias, temperature, rows, options, chunk_rows=10)
    if without == "old_logprobs_N":
        assert (out.ratio_N == 1).all() and (out.flags_N == 0).all()
    if not options.get("importance_max") or without == "sampler_logprobs_N":
        assert (out.importance_N == 1).all()


def test_without_reference_and_with_given_importance():
    hidden, weight, target, bias, temperature = problem(37, 17, 8)
    logprob = truth(hidden, weight, target, temperature, bias, row_inputs(37, torch.zeros(37)), {})[3]
    rows = row_inputs(37, logprob)
    del rows["ref_logprobs_N"]
    rows["importance_N"] = torch.rand(37) * 2
    out = check_against_truth(hidden, weight, target, bias, temperature, rows, {}, chunk_rows=10)
    assert torch.equal(out.importance_N, rows["importance_N"]) and (out.kl_N == 0).all()


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_bf16_operands(device):
    """Only the returned gradients are rounded to bf16; on CUDA the gradient of the logits is, too."""
    N, V = 300, 1000
    hidden, weight, target, bias, temperature = problem(N, V, 64)
    hidden, weight, bias = hidden.bfloat16(), weight.bfloat16(), bias.bfloat16()
    exact = [x.double() for x in (hidden, weight, bias)]
    logprob = truth(*exact[:2], target, temperature.double(), exact[2], doubles(row_inputs(N, torch.zeros(N))), {})[3]
    rows = row_inputs(N, logprob.float(), sampler=True)
    options = {"importance_max": 2.0, "kl_coef": 0.1, "entropy_coef": 0.05}
    on_device = [x.to(device) for x in (hidden, weight, target, bias, temperature)]
    inputs = leaves(on_device[0], on_device[1], on_device[3])
    out = linear_grpo_loss(
        *inputs[:2], on_device[2], on_device[4], bias_V=inputs[2], chunk_bytes=4 * V * 77, **options,
        **{name: x.to(device) for name, x in rows.items()},
    )  # fmt: skip
    exact = leaves(*exact)
    want = truth(*exact[:2], target, temperature.double(), exact[2], doubles(rows), options)
    out.loss.backward()
    want[0].backward()
    assert (out.logprobs_N.cpu() - want[3]).abs().max() < 3e-5 and (out.entropy_N.cpu() - want[4]).abs().max() < 3e-5
    assert abs(out.loss.item() / want[0].item() - 1) < 1e-4
    for got, expected in zip(inputs, exact, strict=True):
        assert got.grad.dtype == torch.bfloat16 and relative(got.grad.cpu(), expected.grad) < 4e-3


@pytest.mark.parametrize("chunk_rows", [1, 7, 64])
def test_equals_linear_logprob_and_a_plain_loss(chunk_rows):
    hidden, weight, target, bias, temperature = problem(37, 257, 24)
    chunk_bytes = 4 * 257 * chunk_rows
    logprob, _ = linear_logprob(hidden, weight, target, temperature, bias_V=bias, chunk_bytes=chunk_bytes)
    rows = row_inputs(37, logprob, sampler=True)
    options = {"kl_coef": 0.1, "entropy_coef": 0.05, "importance_max": 2.0}
    fused, split = leaves(hidden, weight, bias), leaves(hidden, weight, bias)
    out = linear_grpo_loss(*fused[:2], target, temperature, bias_V=fused[2], chunk_bytes=chunk_bytes, **rows, **options)
    logprob, entropy = linear_logprob(*split[:2], target, temperature, bias_V=split[2], chunk_bytes=chunk_bytes)
    loss = plain_loss(logprob, entropy, rows, options)[0]
    assert torch.equal(out.logprobs_N, logprob) and torch.equal(out.entropy_N, entropy)  # bit for bit
    torch.testing.assert_close(out.loss, loss, rtol=1e-6, atol=1e-6)
    out.loss.backward()
    loss.backward()
    for got, want in zip(fused, split, strict=True):
        assert relative(got.grad, want.grad.double()) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ratio_is_exactly_one_against_an_old_pass(dtype):
    hidden, weight, target, _, temperature = problem(600, 257, 24)
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    with torch.no_grad():
        old, _ = linear_logprob(hidden, weight, target, temperature)
    rows = {"weights_N": torch.ones(600), "advantages_N": torch.randn(600)}
    given = leaves(hidden, weight)
    missing = leaves(hidden, weight)
    out = linear_grpo_loss(*given, target, temperature, old_logprobs_N=old, **rows)
    assert (out.ratio_N == 1).all() and (out.flags_N == 0).all()
    without = linear_grpo_loss(*missing, target, temperature, **rows)
    assert torch.equal(out.loss, without.loss)
    out.loss.backward()
    without.loss.backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(given, missing, strict=True))


def two_token_rows(logprobs: list[float]) -> dict:
    """Hidden states of width 1 and a vocabulary of 2 whose token 0 has these logprobs."""
    exact = torch.tensor(logprobs, dtype=torch.float64)
    logits = exact - torch.log(-torch.expm1(exact))
    return {
        "hidden_NH": logits.float().unsqueeze(1).requires_grad_(),
        "weight_VH": torch.tensor([[1.0], [0.0]], requires_grad=True),
        "target_N": torch.zeros(len(logprobs), dtype=torch.int64),
    }


def test_clipping_acts_and_is_counted_where_it_acts():
    """B04: ratios 1.5 .5 1.5 .5, advantages + - - +, clip 0.2 / 0.28; the mean is .13, its gradient 0 0 .375 -.125."""
    logprobs = torch.tensor([1.5, 0.5, 1.5, 0.5]).log()
    rows = GrpoRows(torch.full((4,), 0.25), torch.tensor([1.0, -1, -1, 1]), torch.zeros(4))
    terms = grpo_token_terms(logprobs, rows, GrpoSettings(clip_high=0.28))
    torch.testing.assert_close(terms.loss_N * 4, torch.tensor([-1.28, 0.8, 1.5, -0.5]))
    torch.testing.assert_close(terms.loss_N.sum(), torch.tensor(0.13))
    torch.testing.assert_close(terms.dlogprob_N, torch.tensor([0, 0, 0.375, -0.125]))
    assert terms.flags_N.tolist() == [CLIPPED_HIGH, CLIPPED_LOW, 0, 0]

    # the same four through hidden states, the old logprobs moved so that the present ones stay negative
    inputs = two_token_rows([-1.0] * 4)
    out = linear_grpo_loss(
        **inputs, weights_N=rows.weights_N, advantages_N=rows.advantages_N, old_logprobs_N=-1 - logprobs, clip_high=0.28
    )
    assert out.loss.item() == pytest.approx(0.13, abs=1e-6)
    assert out.flags_N.dtype == torch.uint8 and out.flags_N.tolist() == [CLIPPED_HIGH, CLIPPED_LOW, 0, 0]
    out.loss.backward()
    slope = torch.tensor([0, 0, 0.375, -0.125]) * (1 - math.exp(-1))  # d logprob / d hidden = 1 - p
    torch.testing.assert_close(inputs["hidden_NH"].grad.flatten(), slope)


def test_dual_clip_bounds_negative_advantages_alone():
    """B04: for A = -1 and ratio 5 the loss is 3 with gradient 0; A = +1 clips at 1.2; ratio 2.9 is free."""
    rows = GrpoRows(torch.ones(4), torch.tensor([-1.0, 1, -1, -2]), torch.zeros(4))
    terms = grpo_token_terms(torch.tensor([5.0, 5, 2.9, 5]).log(), rows, GrpoSettings())
    torch.testing.assert_close(terms.loss_N, torch.tensor([3.0, -1.2, 2.9, 6.0]))
    torch.testing.assert_close(terms.dlogprob_N, torch.tensor([0.0, 0, 2.9, 0]))
    assert terms.flags_N.tolist() == [CLIPPED_DUAL, CLIPPED_HIGH, 0, CLIPPED_DUAL]


def test_no_advantage_no_flag_and_no_gradient():
    terms = grpo_token_terms(
        torch.tensor([5.0, 0.1]).log(), GrpoRows(torch.ones(2), torch.zeros(2), torch.zeros(2)), GrpoSettings()
    )
    assert (terms.loss_N == 0).all() and (terms.dlogprob_N == 0).all() and (terms.flags_N == 0).all()


def test_a_ratio_on_the_bound_keeps_its_gradient():
    """At 1 + clip_high and 1 - clip_low exactly; also where both are 1."""
    rows = GrpoRows(torch.ones(2), torch.tensor([1.0, -1.0]), torch.zeros(2))
    terms = grpo_token_terms(torch.zeros(2), rows, GrpoSettings(clip_low=0.0, clip_high=0.0))
    assert terms.dlogprob_N.tolist() == [-1, 1] and terms.flags_N.tolist() == [0, 0]


@pytest.mark.parametrize("new, old", [(-200.0, -400.0), (-200.0, NAN), (-200.0, -INF), (-200.0, INF), (-1.0, -1e30)])
def test_a_masked_ratio_leaks_nothing(new, old):
    """B05: policy loss -1.1, gradient by logprob [-.5, 0, 0], and not a bit of it depends on the masked slot."""
    advantages, junk = torch.tensor([1.0, 1.0, 1.0]), torch.tensor([1.0, 1.0, NAN])

    def run(new, old, advantages, target=0):
        inputs = two_token_rows([-1, -1, new])
        inputs["target_N"][2] = target
        out = linear_grpo_loss(
            **inputs,
            weights_N=torch.tensor([0.5, 0.5, 0.0]),
            advantages_N=advantages,
            old_logprobs_N=torch.tensor([-1, -1.2, old]),
            sampler_logprobs_N=torch.tensor([-1, -1.0, old]),
            importance_max=2.0,
        )
        out.loss.backward()
        return out, inputs

    terms = grpo_token_terms(
        torch.tensor([-1, -1, new]),
        GrpoRows(torch.tensor([0.5, 0.5, 0.0]), advantages, torch.tensor([-1, -1.2, old])),
        GrpoSettings(),
    )
    assert terms.loss_N.sum().item() == pytest.approx(-1.1, abs=1e-6)
    torch.testing.assert_close(terms.dlogprob_N, torch.tensor([-0.5, 0, 0]))

    clean, clean_inputs = run(-1.0, -1.0, advantages)
    for target in (0, 1, -100):
        out, inputs = run(new, old, junk, target)
        assert torch.equal(out.loss, clean.loss)
        assert torch.equal(inputs["hidden_NH"].grad, clean_inputs["hidden_NH"].grad)
        assert torch.equal(inputs["weight_VH"].grad, clean_inputs["weight_VH"].grad)
        assert all(x.isfinite().all() for x in out)
        for name in ("ratio_N", "kl_N", "importance_N", "flags_N"):
            assert torch.equal(getattr(out, name), getattr(clean, name))
    assert clean_inputs["hidden_NH"].grad[2] == 0


@pytest.mark.parametrize("kind", ["low_var_kl", "k1", "k2", "abs"])
@pytest.mark.parametrize("new, ref", [(-400.0, -200.0), (-1.0, NAN), (-1.0, -INF), (-1.0, INF)])
def test_a_masked_kl_leaks_nothing(kind, new, ref):
    """B05, the KL term."""

    def run(new, ref):
        inputs = two_token_rows([-1, -1, new])
        out = linear_grpo_loss(
            **inputs,
            weights_N=torch.tensor([0.5, 0.5, 0.0]),
            advantages_N=torch.ones(3),
            ref_logprobs_N=torch.tensor([-1, -1.2, ref]),
            kl_coef=0.1,
            kl_type=kind,
        )
        out.loss.backward()
        return out, inputs["hidden_NH"].grad, inputs["weight_VH"].grad

    clean, leaky = run(-1.0, -1.0), run(new, ref)
    assert torch.equal(clean[0].loss, leaky[0].loss) and torch.equal(clean[0].kl_N, leaky[0].kl_N)
    assert torch.equal(clean[1], leaky[1]) and torch.equal(clean[2], leaky[2])


def test_kl_values_in_closed_form():
    """x = -1, reference -1.2: k1 .2, k2 .02, abs .2, k3 e^-.2 + .2 - 1; derivatives 1, .2, 1, 1 - e^-.2."""
    rows = GrpoRows(torch.ones(1), torch.zeros(1), None, torch.tensor([-1.2]))
    for kind, value, slope in (
        ("k1", 0.2, 1.0),
        ("k2", 0.02, 0.2),
        ("abs", 0.2, 1.0),
        ("k3", math.exp(-0.2) - 0.8, 1 - math.exp(-0.2)),
    ):
        terms = grpo_token_terms(torch.tensor([-1.0]), rows, GrpoSettings(kl_coef=1.0, kl_type=kind))
        assert terms.kl_N.item() == pytest.approx(value, rel=1e-5)
        assert terms.loss_N.item() == pytest.approx(value, rel=1e-5)
        assert terms.dlogprob_N.item() == pytest.approx(slope, rel=1e-5)


def test_small_kl_keeps_its_digits():
    """A gap of 3e-4: k3 is about gap^2 / 2 = 4.5e-8, below one fp32 step of exp(gap)."""
    ref = torch.tensor([3e-4])
    rows = GrpoRows(torch.ones(1), torch.zeros(1), None, ref)
    kl = grpo_token_terms(torch.zeros(1), rows, GrpoSettings()).kl_N.item()
    assert kl == pytest.approx(math.expm1(ref.item()) - ref.item(), rel=2e-3)


def test_exponents_are_clamped_without_gradient_beyond():
    """Log-ratios of +-29 count as +-20, in the ratio, in k3 and in the importance weight."""
    gaps = torch.tensor([29.0, -29.0])
    given = -30 - gaps
    rows = GrpoRows(torch.ones(2), torch.tensor([-1.0, 1.0]), given, given, torch.tensor([0.0, -60.0]))
    logprobs = torch.full((2,), -30.0)
    terms = grpo_token_terms(logprobs, rows, GrpoSettings(clip_c=INF, importance_max=INF))
    high, low = math.exp(20), math.exp(-20)
    assert terms.ratio_N.tolist() == pytest.approx([high, low]) and terms.flags_N.tolist() == [0, 0]
    assert terms.importance_N.tolist() == pytest.approx([low, high])
    assert terms.loss_N.tolist() == pytest.approx([1, -1]) and terms.dlogprob_N.tolist() == [0, 0]
    assert terms.kl_N.tolist() == pytest.approx([low + 19, high - 21])
    with_kl = grpo_token_terms(logprobs, rows, GrpoSettings(clip_c=INF, importance_max=INF, kl_coef=1.0))
    assert with_kl.loss_N.tolist() == pytest.approx([1 + low + 19, -1 + high - 21])
    assert with_kl.dlogprob_N.tolist() == [0, 0]


def test_every_kl_estimate_is_clamped_without_gradient_beyond():
    """A gap of 50 counts as 20: k1 20, k2 200, abs 20."""
    rows = GrpoRows(torch.ones(1), torch.zeros(1), None, torch.tensor([-51.0]))
    for kind, value in (("kl", 20.0), ("mse", 200.0), ("abs", 20.0)):
        terms = grpo_token_terms(torch.tensor([-1.0]), rows, GrpoSettings(kl_coef=1.0, kl_type=kind))
        assert terms.kl_N.item() == terms.loss_N.item() == value and terms.dlogprob_N.item() == 0


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("clip_c", [3.0, INF])
@pytest.mark.parametrize("other", [-1e30, -INF, INF, -200.0, 0.0])
@pytest.mark.parametrize("new", [-1e-3, -1.0, -90.0, -400.0])
def test_finite_for_any_logprobs_given(new, other, clip_c, advantage):
    inputs = two_token_rows([new])
    given = torch.tensor([other])
    out = linear_grpo_loss(
        **inputs, weights_N=torch.ones(1), advantages_N=torch.tensor([advantage]), old_logprobs_N=given, clip_c=clip_c,
        ref_logprobs_N=given, sampler_logprobs_N=given, importance_max=2.0, kl_coef=0.1, entropy_coef=0.1,
    )  # fmt: skip
    out.loss.backward()
    assert all(x.isfinite().all() for x in (*out, inputs["hidden_NH"].grad, inputs["weight_VH"].grad))


@pytest.mark.parametrize("scale", [0.0, 30.0, 1e4, 1e18])
def test_finite_for_any_logits(scale):
    hidden, weight, target, _, temperature = problem(37, 257, 8)
    inputs = leaves(hidden * scale, weight)
    out = linear_grpo_loss(
        *inputs, target, temperature, entropy_coef=0.1, kl_coef=0.1, **row_inputs(37, torch.full((37,), -1.0))
    )
    out.loss.backward()
    assert all(x.isfinite().all() for x in (*out, inputs[0].grad, inputs[1].grad))


@pytest.mark.parametrize("bad", [{"old_logprobs_N": NAN}, {"ref_logprobs_N": NAN}, {"sampler_logprobs_N": NAN}])
def test_nan_of_a_row_that_counts_is_seen(bad):
    """NaN must not turn into a plausible number: neither the loss nor the gradient hides it."""
    inputs = two_token_rows([-1.0])
    given = {name: torch.tensor([value]) for name, value in bad.items()}
    out = linear_grpo_loss(
        **inputs, weights_N=torch.ones(1), advantages_N=-torch.ones(1), kl_coef=0.1, importance_max=2.0, **given,
        **({"ref_logprobs_N": torch.tensor([-1.0])} if "ref_logprobs_N" not in given else {}),
    )  # fmt: skip
    out.loss.backward()
    assert out.loss.isnan() and inputs["hidden_NH"].grad.isnan().all()


@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
@pytest.mark.parametrize("old", [None, torch.tensor([-1.0, -1.0])])
def test_a_target_outside_the_vocabulary_is_seen(old, entropy_coef):
    inputs = two_token_rows([-1.0, -1.0])
    inputs["target_N"][1] = 2
    out = linear_grpo_loss(
        **inputs, weights_N=torch.ones(2), advantages_N=torch.ones(2), old_logprobs_N=old, entropy_coef=entropy_coef
    )
    out.loss.backward()
    assert out.loss.isnan() and inputs["hidden_NH"].grad.isnan().flatten().tolist() == [False, True]


def test_temperature_and_its_gradient():
    """B06: logits [2, 1, 0], token 1, T = 0.5: logprob -2.142932; ratio 1 to an old pass at T, .4794 at T = 1."""
    hidden = torch.tensor([[2.0, 1.0, 0.0]], requires_grad=True)
    fixed = {"weights_N": torch.ones(1), "advantages_N": torch.ones(1)}
    target = torch.tensor([1])
    old = linear_logprob(hidden, torch.eye(3), target, 0.5)[0].detach()
    out = linear_grpo_loss(hidden, torch.eye(3), target, 0.5, old_logprobs_N=old, **fixed)
    assert out.logprobs_N.item() == pytest.approx(-2.142932, abs=1e-6) and out.ratio_N.item() == 1
    out.loss.backward()
    p = torch.tensor([4.0, 2.0, 0.0]).softmax(0)
    torch.testing.assert_close(hidden.grad[0], -(torch.tensor([0.0, 1.0, 0.0]) - p) / 0.5)
    forgot = linear_grpo_loss(
        hidden, torch.eye(3), target, 0.5, old_logprobs_N=linear_logprob(hidden, torch.eye(3), target)[0], **fixed
    )
    assert forgot.ratio_N.item() == pytest.approx(0.4794, abs=1e-4)


@pytest.mark.parametrize("N, targets", [(4, -100), (0, 0)])
def test_no_valid_row(N, targets):
    """B12: loss 0 on the graph, gradients there and exactly 0."""
    inputs = leaves(torch.randn(N, 8), torch.randn(17, 8), torch.randn(17))
    out = linear_grpo_loss(
        *inputs[:2],
        torch.full((N,), targets),
        bias_V=inputs[2],
        weights_N=torch.zeros(N),
        advantages_N=torch.ones(N),
        entropy_coef=0.1,
    )
    assert out.loss.item() == 0 and out.loss.requires_grad
    assert [len(x) for x in out[1:]] == [N] * 6 and all(x.isfinite().all() for x in out)
    out.loss.backward()
    assert all(torch.equal(x.grad, torch.zeros_like(x)) for x in inputs)


def test_an_empty_micro_batch_changes_nothing():
    """B12: between two others on the same weight."""
    hidden, weight, target, _, temperature = problem(10, 17, 8)
    rows = row_inputs(10, torch.full((10,), -2.0))

    def run(cuts):
        (leaf,) = leaves(weight)
        for a, b in cuts:
            part = {name: x[a:b] for name, x in rows.items()}
            linear_grpo_loss(hidden[a:b], leaf, target[a:b], temperature[a:b], **part).loss.backward()
        return leaf.grad

    assert torch.equal(run([(0, 6), (6, 10)]), run([(0, 6), (6, 6), (6, 10)]))


def test_loss_is_a_sum_over_rows_however_cut():
    hidden, weight, target, bias, temperature = problem(600, 97, 24)
    rows = row_inputs(600, torch.full((600,), -2.0))
    results = []
    for chunk_rows in (1, 7, 256, 300, 600, 10_000):
        inputs = leaves(hidden, weight)
        out = linear_grpo_loss(
            *inputs,
            target,
            temperature,
            bias_V=bias,
            kl_coef=0.1,
            entropy_coef=0.1,
            chunk_bytes=4 * 97 * chunk_rows,
            **rows,
        )
        out.loss.backward()
        results.append((*(x.float() for x in out), inputs[0].grad, inputs[1].grad))
    for result in results[1:]:
        for got, want in zip(result, results[0], strict=True):
            assert relative(got, want.double()) < 1e-5


def test_backward_scales_and_may_run_twice():
    hidden, weight, target, _, temperature = problem(10, 17, 8)
    rows = row_inputs(10, torch.full((10,), -2.0))
    inputs = leaves(hidden, weight)
    loss = linear_grpo_loss(*inputs, target, temperature, **rows).loss
    once = torch.autograd.grad(loss, inputs, retain_graph=True)
    scaled = torch.autograd.grad(loss * -0.25 + 7, inputs, retain_graph=True)
    again = torch.autograd.grad(loss, inputs)
    for a, b, c in zip(once, scaled, again, strict=True):
        assert torch.equal(a, c) and torch.equal(b, -0.25 * a)


def test_a_gradient_of_the_gradient_is_refused():
    """The loss is linear in itself: without the refusal a penalty on its gradient would count for nothing."""
    hidden, weight, target, _, temperature = problem(10, 17, 8)
    inputs = leaves(hidden, weight)
    loss = linear_grpo_loss(*inputs, target, temperature, **row_inputs(10, torch.full((10,), -2.0))).loss
    with pytest.raises(RuntimeError, match="have first derivatives alone: call autograd without create_graph=True"):
        torch.autograd.grad(loss, inputs, create_graph=True)
    assert torch.autograd.grad(loss, inputs[0])[0].abs().sum() > 0


def test_numbers_of_any_kind_are_taken():
    """numpy's scalars and ints: the numbers that configurations hold."""
    hidden, weight, target, _, _ = problem(10, 17, 8)
    rows = row_inputs(10, torch.full((10,), -2.0))
    floats = {"temperature": 0.5, "clip_c": 2.0, "kl_coef": 1.0, "softcap": 0.0, "chunk_bytes": 1000}
    others = {"temperature": np.float32(0.5), "clip_c": 2, "kl_coef": np.int64(1), "softcap": None}
    want = linear_grpo_loss(hidden, weight, target, **rows, **floats)
    got = linear_grpo_loss(hidden, weight, target, **rows, **others, chunk_bytes=np.int64(1000))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_equal_calls_give_equal_bits():
    hidden, weight, target, _, temperature = problem(100, 257, 24)

    def run():
        inputs = leaves(hidden, weight, dtype=torch.bfloat16)
        out = linear_grpo_loss(
            *inputs,
            target,
            temperature,
            kl_coef=0.1,
            chunk_bytes=4 * 257 * 7,
            **row_inputs(100, torch.full((100,), -2.0)),
        )
        out.loss.backward()
        return *out, inputs[0].grad, inputs[1].grad

    first = run()
    assert all(torch.equal(a, b) for _ in range(2) for a, b in zip(run(), first, strict=True))


def test_strided_inputs():
    """Column-major hidden states and weight: a gradient that took over the strides was written as if it had not."""
    hidden, weight, target, _, temperature = problem(10, 17, 8)
    rows = row_inputs(10, torch.full((10,), -2.0))
    for entropy_coef in (0.0, 0.1):
        strided, dense = [x.T.contiguous().T.requires_grad_() for x in (hidden, weight)], leaves(hidden, weight)
        results = []
        for inputs in (strided, dense):
            out = linear_grpo_loss(*inputs, target, temperature, entropy_coef=entropy_coef, **rows)
            results.append((out.loss, *torch.autograd.grad(out.loss, inputs)))
        torch.testing.assert_close(*results)


class Watch(TorchDispatchMode):
    """Records the shapes that operations return."""

    def __init__(self):
        super().__init__()
        self.shapes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.shapes |= {tuple(x.shape) for x in tree_leaves(out) if isinstance(x, Tensor)}
        return out


def test_no_tensor_of_rows_times_vocabulary():
    hidden, weight, target, bias, temperature = problem(64, 300, 8)
    inputs = leaves(hidden, weight, bias)
    saved = []
    with Watch() as watch, torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out = linear_grpo_loss(
            *inputs[:2], target, temperature, bias_V=inputs[2], softcap=9.0, kl_coef=0.1, entropy_coef=0.1,
            chunk_bytes=4 * 300 * 4, **row_inputs(64, torch.full((64,), -2.0)),
        )  # fmt: skip
        out.loss.backward()
    assert (4, 300) in watch.shapes  # the chunks are seen
    assert max(math.prod(shape) for shape in watch.shapes) == 300 * 8
    assert sorted(x.numel() for x in saved) == [300, 64 * 8, 300 * 8]


def test_no_gradient_is_made_where_none_is_wanted():
    hidden, weight, target, _, temperature = problem(64, 300, 8)
    rows = row_inputs(64, torch.full((64,), -2.0))
    inputs = leaves(hidden, weight)
    with torch.no_grad(), Watch() as watch:
        out = linear_grpo_loss(*inputs, target, temperature, chunk_bytes=4 * 300 * 4, **rows)
    assert not out.loss.requires_grad and not {(300, 8), (64, 8)} & watch.shapes
    with Watch() as watch:
        frozen = linear_grpo_loss(inputs[0], weight, target, temperature, chunk_bytes=4 * 300 * 4, **rows)
        frozen.loss.backward()
    assert torch.equal(frozen.loss, out.loss) and weight.grad is None and (300, 8) not in watch.shapes
    both = linear_grpo_loss(*inputs, target, temperature, chunk_bytes=4 * 300 * 4, **rows)
    assert torch.equal(inputs[0].grad, torch.autograd.grad(both.loss, inputs[0])[0])
    linear_grpo_loss(hidden, inputs[1], target, temperature, **rows).loss.backward()
    assert inputs[1].grad.abs().sum() > 0


def test_autocast_does_not_reach_inside():
    hidden, weight, target, _, temperature = problem(20, 257, 24)
    rows = row_inputs(20, torch.full((20,), -2.0))
    plain, cast = leaves(hidden, weight), leaves(hidden, weight)
    want = linear_grpo_loss(*plain, target, temperature, **rows)
    want.loss.backward()
    with torch.autocast("cpu", torch.bfloat16):
        got = linear_grpo_loss(*cast, target, temperature, **rows)
        got.loss.backward()
    assert torch.equal(got.loss, want.loss) and torch.equal(got.logprobs_N, want.logprobs_N)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain, cast, strict=True))


def check_accumulator(loss_of, hidden, weight):
    """loss_of(hidden, weight, accumulator or None): the accumulator gets what weight.grad would, when it would."""
    plain, given = leaves(hidden, weight), leaves(hidden, weight)
    loss_of(*plain, None).backward()
    gradient = plain[1].grad
    total = torch.ones_like(weight)
    with torch.no_grad():
        loss_of(*given, total)
    loss = 3.0 * loss_of(*given, total)
    assert (total == 1).all()  # a forward adds nothing
    loss.backward(retain_graph=True)
    torch.testing.assert_close(total - 1, 3 * gradient, rtol=1e-4, atol=1e-5)
    assert given[1].grad is None and torch.allclose(given[0].grad, 3 * plain[0].grad)
    loss.backward()
    torch.testing.assert_close(total - 1, 6 * gradient, rtol=1e-4, atol=1e-5)
    for reentrant in (False, True):
        total.zero_()
        checkpoint(loss_of, *given, total, use_reentrant=reentrant).backward()
        torch.testing.assert_close(total, gradient, rtol=1e-4, atol=1e-6)
    total.zero_()
    loss_of(given[0], weight, total).backward()  # a weight that requires none: a copy of the parameter, say
    torch.testing.assert_close(total, gradient, rtol=1e-4, atol=1e-6)
    total.zero_()
    assert not loss_of(hidden, weight, total).requires_grad and not total.any()


def test_an_accumulator_gets_the_gradient_of_the_weight_with_each_backward():
    hidden, weight, target, _, temperature = problem(10, 17, 8)
    rows = row_inputs(10, torch.full((10,), -2.0))

    def loss_of(hidden, weight, accumulator):
        return linear_grpo_loss(hidden, weight, target, temperature, weight_grad_VH=accumulator, **rows).loss

    def by_logprobs(hidden, weight, accumulator):
        return linear_logprob(hidden, weight, target, temperature, weight_grad_VH=accumulator)[0].square().sum()

    check_accumulator(loss_of, hidden, weight)
    check_accumulator(by_logprobs, hidden, weight)


def test_constants_get_no_gradient():
    hidden, weight, target, _, temperature = problem(3, 17, 8)
    rows = {name: x.requires_grad_() for name, x in row_inputs(3, torch.full((3,), -2.0), sampler=True).items()}
    out = linear_grpo_loss(*leaves(hidden, weight), target, temperature, kl_coef=0.1, importance_max=2.0, **rows)
    out.loss.backward()
    assert all(x.grad is None for x in rows.values())
    assert not any(x.requires_grad for x in out[1:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights_N": torch.ones(4)}, r"weights_N must be a floating tensor of shape \(3,\)"),
        ({"advantages_N": torch.ones(3, 1)}, "one value for each row of hidden_NH"),
        ({"old_logprobs_N": torch.ones(3, dtype=torch.int64)}, "old_logprobs_N must be a floating tensor"),
        ({"advantages_N": 1.0}, r"advantages_N must be a floating tensor of shape \(3,\) on cpu, got 1.0"),
        ({"importance_max": -2.0}, "importance_max must not be negative, got -2.0"),
        ({"policy_loss": "gspo"}, "choose one of vanilla, cispo, sapo"),
        ({"tau_neg": 0.0}, "tau_pos and tau_neg must be positive"),
        ({"kl_type": "k4"}, "choose one of low_var_kl, k3"),
        ({"kl_coef": 0.1}, "without ref_logprobs_N"),
        ({"clip_low": -0.1}, "must not be negative"),
        ({"clip_c": 1.0}, "clip_c must be above 1, got 1.0: use inf"),
        (
            {"importance_N": torch.ones(3), "sampler_logprobs_N": torch.ones(3), "importance_max": 2.0},
            "both make importance weights: pass one of them",
        ),
        ({"sampler_logprobs_N": torch.ones(3)}, r"at most importance_max, which is 0: pass it \(inf for no bound\)"),
        ({"weights_N": None}, r"weights_N must be a floating tensor of shape \(3,\) on cpu, got None"),
        ({"advantages_N": None}, "advantages_N must be a floating tensor"),
        *(({name: NAN}, f"{name} must be a number, got nan") for name in ("clip_low", "clip_high", "clip_c")),
        *(({name: NAN}, f"{name} must be a finite number, got nan") for name in ("kl_coef", "entropy_coef", "tau_pos")),
        ({"importance_max": NAN}, "importance_max must be a number, got nan"),
        ({"kl_coef": INF}, "kl_coef must be a finite number, got inf"),
        ({"clip_high": "0.2"}, "clip_high must be a number, got '0.2'"),
        ({"entropy_coef": torch.tensor(0.1)}, "entropy_coef must be a number, got a tensor"),
        (
            {"logit_scale": torch.nn.Parameter(torch.ones(()))},
            "Multiply hidden_NH and bias_V by a scale that is learned",
        ),
        ({"hidden_NH": torch.zeros(3, 9)}, "do not fit"),
        ({"temperature": -1.0}, "temperature must be positive"),
    ],
)
def test_refusals_say_what_to_do(change, message):
    good = {
        "hidden_NH": torch.zeros(3, 8),
        "weight_VH": torch.zeros(17, 8),
        "target_N": torch.zeros(3, dtype=torch.int64),
        "weights_N": torch.ones(3),
        "advantages_N": torch.ones(3),
    }
    for op in (linear_grpo_loss, linear_grpo_loss_ref):
        with pytest.raises(ValueError, match=message):
            op(**{**good, **change})
