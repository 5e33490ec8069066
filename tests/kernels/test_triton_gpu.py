"""The Triton forms on a GPU, with the operands they are made for: `pytest -m gpu tests/kernels`."""

from __future__ import annotations

import gc
import math

import pytest
import torch
from torch import Tensor

from fastgrpo_kernels import linear_grpo_loss, linear_logprob

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FORMS = ["rows", "epilogue"]
VOCABULARIES = [257, 32001, 128256, 129280, 151669, 151936, 152064]


@pytest.fixture(autouse=True)
def free_memory():
    yield
    gc.collect()
    torch.cuda.empty_cache()


def problem(T: int, H: int, V: int, *, spread: float = 2.2, peak: float = 22.0, seed: int = 0):
    """bf16 operands; logits spread as `spread`, the target's raised by about `peak`."""
    rng = torch.Generator("cuda").manual_seed(seed)
    weight = (torch.randn(V, H, device="cuda", generator=rng) * (spread / math.sqrt(H))).bfloat16()
    target = torch.randint(V, (T,), device="cuda", generator=rng)
    hidden = torch.randn(T, H, device="cuda", generator=rng)
    hidden += weight[target].float() * (peak / spread**2)
    return hidden.bfloat16(), weight, target


def row_inputs(T: int, logprob: Tensor) -> dict[str, Tensor]:
    rng = torch.Generator("cuda").manual_seed(1)
    noise = torch.randn(3, T, device="cuda", generator=rng)
    return {
        "weights_N": torch.full((T,), 1 / max(T, 1), device="cuda"),
        "advantages_N": noise[0],
        "old_logprobs_N": logprob + 0.3 * noise[1],
        "ref_logprobs_N": logprob + 0.3 * noise[2],
    }


def exact_rows(hidden: Tensor, weight: Tensor, target: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(softmax, logprob, entropy) of some rows in fp64."""
    logits = hidden[rows].double() @ weight.double().T
    logprobs = logits.log_softmax(1)
    return logprobs.exp(), logprobs.gather(1, target[rows, None])[:, 0], -(logprobs.exp() * logprobs).sum(1)


def gradient_of_weight(hidden, weight, dlogprob, target, some: Tensor, step=256) -> Tensor:
    """fp64 rows `some` of dL/dW = sum over t of dlogprob_t (1[v = y_t] - p_tv) x_t."""
    total = torch.zeros(len(some), hidden.shape[1], dtype=torch.float64, device=hidden.device)
    for rows in torch.arange(hidden.shape[0], device=hidden.device).split(step):
        p, _, _ = exact_rows(hidden, weight, target, rows)
        factor = (target[rows, None] == some).double() - p[:, some]
        total += (factor * dlogprob[rows, None].double()).T @ hidden[rows].double()
    return total


def relative(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("T", [0, 1, 1000])
@pytest.mark.parametrize("V", VOCABULARIES)
def test_errors_against_fp64(V, T, form):
    """Values, entropy and both gradients of the whole loss; the three runs have equal bits."""
    hidden, weight, target = problem(T, 512, V)
    hidden.requires_grad_()
    weight.requires_grad_()
    with torch.no_grad():
        logprob, entropy = linear_logprob(hidden, weight, target, impl=form)
    rows = torch.arange(T, device="cuda")
    p, want, want_entropy = exact_rows(hidden.detach(), weight.detach(), target, rows)
    runs = []
    for _ in range(3):
        hidden.grad = weight.grad = None
        out = linear_grpo_loss(hidden, weight, target, kl_coef=0.1, impl=form, **row_inputs(T, logprob))
        out.loss.backward()
        runs.append((*out, hidden.grad, weight.grad))
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))
    assert torch.equal(out.logprobs_N, logprob) and torch.equal(out.entropy_N, entropy)
    if T == 0:
        assert out.loss.item() == 0 and not weight.grad.any() and hidden.grad.shape == (0, 512)
        return
    assert (logprob - want).abs().max() < 1e-4 and (entropy - want_entropy).abs().max() < 1e-4
    assert (logprob <= 0).all() and (entropy >= 0).all() and (entropy <= math.log(V) + 1e-4).all()
    x = want.clone().requires_grad_()
    plain_loss(x, row_inputs(T, logprob)).backward()
    dlogprob = x.grad
    factor = -p * dlogprob[:, None]
    factor[rows, target] += dlogprob
    assert relative(hidden.grad, factor @ weight.detach().double()) < 4e-3
    assert relative(weight.grad, factor.T @ hidden.detach().double()) < 4e-3


def plain_loss(x: Tensor, r: dict[str, Tensor], kl_coef: float = 0.1) -> Tensor:
    A, ratio = r["advantages_N"].double(), (x - r["old_logprobs_N"].double()).exp()
    policy = torch.maximum(-ratio * A, -ratio.clamp(0.8, 1.2) * A)
    policy = torch.where(A < 0, torch.minimum(policy, -3 * A), policy)
    gap = x - r["ref_logprobs_N"].double()
    return (r["weights_N"].double() * (policy + kl_coef * ((-gap).exp() + gap - 1))).sum()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("H, V", [(896, 151936), (3584, 152064), (4096, 128256)])
def test_errors_at_16384_rows(H, V, form):
    T = 16384
    hidden, weight, target = problem(T, H, V)
    hidden.requires_grad_()
    weight.requires_grad_()
    logprob, entropy = linear_logprob(hidden, weight, target, impl=form)
    up = torch.randn(T, device="cuda")
    (logprob * up).sum().backward()
    some = torch.cat([target[:40], torch.arange(0, V, V // 50, device="cuda")]).unique()
    plain = hidden.detach(), weight.detach()
    assert relative(weight.grad[some], gradient_of_weight(*plain, up, target, some)) < 4e-3
    rows = torch.arange(0, T, 97, device="cuda")
    p, want, want_entropy = exact_rows(*plain, target, rows)
    assert (logprob[rows] - want).abs().max() < 1e-4 and (entropy[rows] - want_entropy).abs().max() < 1e-4
    factor = -p * up[rows, None].double()
    factor[torch.arange(len(rows)), target[rows]] += up[rows].double()
    assert relative(hidden.grad[rows], factor @ plain[1].double()) < 4e-3


@pytest.mark.parametrize("form", FORMS)
def test_entropy_gradient(form):
    hidden, weight, target = problem(600, 512, 32001)
    hidden.requires_grad_()
    weight.requires_grad_()
    logprob, entropy = linear_logprob(hidden, weight, target, 0.8, impl=form)
    up = torch.randn(2, 600, device="cuda")
    (logprob * up[0] + entropy * up[1]).sum().backward()
    x, w = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    logprobs = (x @ w.T / 0.8).log_softmax(1)
    want = (logprobs.gather(1, target[:, None])[:, 0] * up[0] - (logprobs.exp() * logprobs).sum(1) * up[1]).sum()
    want.backward()
    assert relative(hidden.grad, x.grad) < 4e-3 and relative(weight.grad, w.grad) < 4e-3


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("level", ["low", "high", "mixed"])
def test_large_logits(level, form):
    """Logits about -200, +200 or both: finite, and at most twice the error of an fp32 product and an fp64 softmax."""
    hidden, weight, target = problem(512, 256, 32001, peak=5.0)
    signs = {"low": -torch.ones(512), "high": torch.ones(512), "mixed": torch.arange(512) % 2 * 2.0 - 1}[level]
    weight[:, 0], hidden[:, 0] = 1.0, 200 * signs.cuda().bfloat16()
    weight[16000:, 0] = -1.0 if level == "mixed" else 1.0
    hidden.requires_grad_()
    weight.requires_grad_()
    logprob, entropy = linear_logprob(hidden, weight, target, impl=form)
    _, want, want_entropy = exact_rows(hidden.detach(), weight.detach(), target, torch.arange(512, device="cuda"))
    product = torch.mm(hidden.detach(), weight.detach().T, out_dtype=torch.float32).double().log_softmax(1)
    allowed = 2 * (product.gather(1, target[:, None])[:, 0] - want).abs().max() + 2e-5
    assert (logprob - want).abs().max() <= allowed and (entropy - want_entropy).abs().max() <= allowed
    (logprob.sum() + entropy.sum()).backward()
    assert hidden.grad.isfinite().all() and weight.grad.isfinite().all()


@pytest.mark.parametrize("form", FORMS)
def test_more_than_2_31_elements(form):
    """B11: chunks of 2.5e9 elements; the last 200 rows are those of the rows alone, forward and backward."""
    T, H, V = 16384, 256, 151936
    hidden, weight, target = problem(T, H, V)
    hidden.requires_grad_()
    up = torch.randn(T, device="cuda")
    logprob, entropy = linear_logprob(hidden, weight, target, impl=form, chunk_bytes=16 << 30)
    (whole,) = torch.autograd.grad((logprob * up).sum(), hidden)
    tail = hidden[-200:].detach().requires_grad_()
    few, few_entropy = linear_logprob(tail, weight, target[-200:], impl=form)
    (alone,) = torch.autograd.grad((few * up[-200:]).sum(), tail)
    torch.testing.assert_close(logprob[-200:], few, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(entropy[-200:], few_entropy, rtol=1e-6, atol=2e-6)
    assert relative(whole[-200:], alone.double()) < 4e-3


@pytest.mark.parametrize("form", FORMS)
def test_strided_and_sliced_inputs(form):
    hidden, weight, target = problem(600, 512, 32001)
    wide = torch.randn(600, 3, 512, device="cuda", dtype=torch.bfloat16)
    wide[:, 1] = hidden
    tall = torch.cat([torch.full((64, 512), math.nan, device="cuda", dtype=torch.bfloat16), weight])
    want = linear_logprob(hidden, weight, target, impl=form)
    got = linear_logprob(wide[:, 1], tall[64:], target, impl=form)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    odd = linear_logprob(hidden[1::2], weight, target[1::2], impl=form)
    torch.testing.assert_close(odd[0], want[0][1::2], rtol=1e-6, atol=2e-6)
    rows = {name: x.expand(2, -1).T.reshape(-1)[::2] for name, x in row_inputs(600, want[0]).items()}
    assert rows["weights_N"].stride() == (2,)
    loss = linear_grpo_loss(hidden, weight, target, impl=form, **rows)
    plain = linear_grpo_loss(hidden, weight, target, impl=form, **{name: x.contiguous() for name, x in rows.items()})
    assert torch.equal(loss.loss, plain.loss)
    transposed = linear_logprob(hidden.T.contiguous().T, weight.T.contiguous().T, target, impl=form)
    torch.testing.assert_close(transposed[0], want[0], rtol=1e-6, atol=2e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", ["columns first", "every second row", "part of wider rows"])
def test_gradients_of_strided_inputs(form, layout):
    """Against those of the same numbers in one piece, in every pass: by logprob, by entropy too, and of the loss."""

    def strided(x: Tensor) -> Tensor:
        if layout == "columns first":
            return x.T.contiguous().T.requires_grad_()
        wide = torch.full((2 * x.shape[0], 2 * x.shape[1]), math.nan, device="cuda", dtype=x.dtype)
        part = wide[::2, : x.shape[1]] if layout == "every second row" else wide[: x.shape[0], : x.shape[1]]
        return part.copy_(x).requires_grad_()

    hidden, weight, target = problem(600, 512, 32001)
    inputs, dense = (strided(hidden), strided(weight)), (hidden.requires_grad_(), weight.requires_grad_())
    assert not inputs[0].is_contiguous() and torch.equal(inputs[0], hidden) and torch.equal(inputs[1], weight)
    rows = row_inputs(600, torch.full((600,), -1.0, device="cuda"))
    up = torch.randn(600, device="cuda")

    def gradients(x: Tensor, w: Tensor) -> list[Tensor]:
        logprob, entropy = linear_logprob(x, w, target, impl=form)
        losses = [(logprob * up).sum(), (logprob * up + 0.3 * entropy).sum()]
        for entropy_coef in (0.0, 0.1):
            losses.append(linear_grpo_loss(x, w, target, entropy_coef=entropy_coef, impl=form, **rows).loss)
        return [grad for loss in losses for grad in torch.autograd.grad(loss, (x, w), retain_graph=True)]

    for got, want in zip(gradients(*inputs), gradients(*dense), strict=True):
        assert relative(got, want.double()) < 6e-3  # two gradients, each rounded


@pytest.mark.parametrize("form", FORMS)
def test_rows_without_weight_add_nothing(form):
    hidden, weight, target = problem(700, 512, 32001)
    hidden.requires_grad_()
    weight.requires_grad_()
    rows = row_inputs(700, torch.full((700,), -1.0, device="cuda"))
    rows["weights_N"] = torch.zeros(700, device="cuda")
    rows["advantages_N"] = torch.full((700,), math.nan, device="cuda")
    target = torch.full_like(target, -100)
    out = linear_grpo_loss(hidden, weight, target, kl_coef=0.1, impl=form, **rows)
    out.loss.backward()
    assert out.loss.item() == 0 and not hidden.grad.any() and not weight.grad.any()


@pytest.mark.parametrize("form", FORMS)
def test_accumulator_of_the_caller(form):
    """With each backward, not with a forward, of both ops; the loss's own gradient counts."""
    hidden, weight, target = problem(700, 512, 32001)
    rows = row_inputs(700, torch.full((700,), -1.0, device="cuda"))
    hidden.requires_grad_()
    weight.requires_grad_()

    def losses(weight: Tensor, **options) -> tuple[Tensor, Tensor]:
        loss = linear_grpo_loss(hidden, weight, target, impl=form, **rows, **options).loss
        return loss, linear_logprob(hidden, weight, target, impl=form, **options)[0].sum() / 700

    for at in range(2):
        (want,) = torch.autograd.grad(losses(weight)[at], weight)
        total = torch.ones(32001, 512, device="cuda")
        losses(weight.detach(), weight_grad_VH=total)
        assert (total == 1).all()
        for factor in (1.0, 2.0):
            (factor * losses(weight.detach(), weight_grad_VH=total)[at]).backward()
        assert relative(total - 1, 3 * want.double()) < 4e-3


def test_a_call_waits_for_nothing_and_compiles_once():
    """No host sync; no new kernel for another number of rows, temperature, clip or coefficient."""
    from fastgrpo_kernels import _exp_gemm, _grpo_rows

    hidden, weight, target = problem(3000, 512, 32001)
    weight.requires_grad_()

    def call(T, temperature, clip):
        rows = row_inputs(T, torch.full((T,), -1.0, device="cuda"))
        return linear_grpo_loss(
            hidden[:T], weight, target[:T], temperature, clip_low=clip, kl_coef=clip / 10, impl="auto", **rows
        )

    for T in (1024, 999):  # lengths that are and are not a multiple of 16
        call(T, 1.0, 0.2).loss.backward()
    kernels = (_exp_gemm.exp_gemm_kernel, _exp_gemm.merge_kernel, _exp_gemm.settle_kernel, _grpo_rows.grpo_rows_kernel)
    count = lambda: sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())  # noqa: E731
    before = count()
    assert before > 0
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for T, temperature, clip in ((1, 0.7, 0.1), (17, 0.6, 0.3), (2048, 1.3, 0.25), (2999, 1.0, 1.0)):
            call(T, temperature, clip).loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert count() == before


def test_memory_beside_gradients():
    """At most 2.5 GiB beside inputs, returned gradients and one fp32 sum of the weight's gradient, at any T."""
    hidden, weight, target = problem(32768, 896, 151936)
    hidden.requires_grad_()
    weight.requires_grad_()
    rows = row_inputs(32768, torch.full((32768,), -1.0, device="cuda"))
    for impl in FORMS:
        linear_grpo_loss(hidden, weight, target, impl=impl, **rows).loss.backward()
        hidden.grad = weight.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        linear_grpo_loss(hidden, weight, target, impl=impl, **rows).loss.backward()
        spent = torch.cuda.max_memory_allocated() - base - 2 * hidden.numel() - 6 * weight.numel()
        hidden.grad = weight.grad = None
        assert spent <= 2.5 * 2**30
