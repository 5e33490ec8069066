"""The Triton forms of both ops (`rows`, `epilogue`), run through the tests of the reference and beyond them.

Run by test_triton_forms.py in a process of its own, or by hand:

    TRITON_INTERPRET=1 python -m pytest tests/kernels/interpreted_forms.py

The interpreter rounds to bf16 by truncation and cannot multiply bf16, so that operands are fp32 here.
test_triton_gpu.py has the real ones.
"""

from __future__ import annotations

import functools
import math

import pytest
import test_linear_grpo_loss as grpo_tests
import test_linear_logprob as logprob_tests
import torch

from fastgrpo_kernels import (
    KL_TYPES,
    POLICY_LOSSES,
    GrpoRows,
    GrpoSettings,
    _chunks,
    _exact_rows,
    _exp_gemm,
    _exp_rows,
    _grpo_rows,
    _scale,
    _sweep,
    grpo_token_terms,
    linear_grpo_loss,
    linear_logprob,
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, on the infinities of these tests
INF, NAN = math.inf, math.nan
slow = pytest.mark.slow  # an interpreter is; `make test-all` runs them by test_triton_forms.py


@pytest.fixture
def small_tiles(monkeypatch):
    """So that each tensor has several."""
    small = _exp_gemm.GemmConfig(rows=16, columns=32, depth=16, group=2, num_warps=4, num_stages=2, flatten=True)
    monkeypatch.setattr(_exp_gemm, "GEMM", small)
    monkeypatch.setattr(_sweep, "GEMM", small)
    monkeypatch.setattr(_exp_gemm.exp_gemm, "__kwdefaults__", {**_exp_gemm.exp_gemm.__kwdefaults__, "config": small})
    return small


@pytest.fixture(params=["rows", "epilogue"])
def form(request, monkeypatch, small_tiles):
    """Both test modules with their ops bound to one form."""
    for module in (grpo_tests, logprob_tests):
        for op in (linear_logprob, linear_grpo_loss):
            monkeypatch.setattr(module, op.__name__, functools.partial(op, impl=request.param), raising=False)
    return request.param


@pytest.fixture
def scaled_by_triton(monkeypatch):
    """As on a GPU; a list of the tensors that the kernel scaled."""
    seen = []
    monkeypatch.setattr(_chunks, "_runs_triton", lambda x: True)
    monkeypatch.setattr(_scale, "scale", lambda x, *args, scale=_scale.scale: seen.append(x) or scale(x, *args))
    return seen


@pytest.fixture
def refined(monkeypatch):
    """Rows are refined, as long ones are."""
    monkeypatch.setattr(_exact_rows, "REFINED_WIDTH", 1)


@pytest.mark.parametrize("N, V, H", [(0, 5, 8), (1, 257, 24), (19, 100, 40)])
def test_logprob_values_and_gradients(form, N, V, H):
    logprob_tests.test_values_and_gradients_equal_full_logits(V, H, N, 7)


@pytest.mark.parametrize("V, H, N", [(17, 8, 3), (257, 24, 19), (300, 8, 0)])
def test_loss_values_and_gradients(form, V, H, N):
    grpo_tests.test_everything_at_once_equals_full_logits(V, H, N, 7)


OPTIONS = [{"softcap": 4.0, "logit_scale": 1.5}, {"clip_low": 0.5, "clip_c": 1.5}, {}]


@pytest.mark.parametrize(
    ("options", "without"),
    [
        *((options, "") for options in OPTIONS),
        *(({}, without) for without in ("old_logprobs_N", "sampler_logprobs_N")),
        *(  # what changes the logits or the limits, in a row without one of its inputs
            pytest.param(options, without, marks=slow)
            for options in OPTIONS[:2]
            for without in ("old_logprobs_N", "sampler_logprobs_N")
        ),
    ],
    ids=str,
)
def test_each_option(form, options, without):
    grpo_tests.test_each_option_equals_full_logits(options, without)


@pytest.mark.parametrize(
    "test",
    [
        logprob_tests.test_temperature_number_equals_tensor_and_rows_are_independent,
        logprob_tests.test_temperature_is_in_values_and_gradient,  # B06
        logprob_tests.test_rows_score_the_next_token,  # B07
        logprob_tests.test_target_outside_the_vocabulary_is_nan_and_leaves_others_alone,
        logprob_tests.test_no_rows_give_zero_gradients,  # B12
        logprob_tests.test_a_temperature_that_is_not_positive_is_seen,
        logprob_tests.test_a_near_certain_token_keeps_the_digits_that_it_lacks_to_one,
        logprob_tests.test_autocast_does_not_reach_inside,
        grpo_tests.test_without_reference_and_with_given_importance,
        grpo_tests.test_clipping_acts_and_is_counted_where_it_acts,  # B04
        grpo_tests.test_temperature_and_its_gradient,
        grpo_tests.test_an_empty_micro_batch_changes_nothing,  # B12
        grpo_tests.test_backward_scales_and_may_run_twice,
        grpo_tests.test_an_accumulator_gets_the_gradient_of_the_weight_with_each_backward,
        grpo_tests.test_constants_get_no_gradient,
    ],
    ids=lambda test: test.__name__,
)
def test_what_the_reference_promises(form, test):
    test()


def test_strided_inputs(form, scaled_by_triton):
    logprob_tests.test_strided_inputs()
    grpo_tests.test_strided_inputs()
    assert scaled_by_triton


@pytest.mark.parametrize("V", [129, 257])
def test_nothing_past_the_vocabulary_counts(form, V):  # B10
    logprob_tests.test_nothing_past_the_vocabulary_counts(V)


@pytest.mark.parametrize("scale", [0.0, pytest.param(30.0, marks=slow), 1e18])
def test_any_logits(form, scale):
    logprob_tests.test_bounds_hold_for_any_logits(scale)
    grpo_tests.test_finite_for_any_logits(scale)


@pytest.mark.parametrize("new, old", [(-200.0, -400.0), (-200.0, NAN), (-200.0, -INF), (-1.0, -1e30)])
def test_a_masked_row_leaks_nothing(form, new, old):  # B05
    grpo_tests.test_a_masked_ratio_leaks_nothing(new, old)
    grpo_tests.test_a_masked_kl_leaks_nothing("low_var_kl", new, old)


@pytest.mark.parametrize("N, targets", [(4, -100), (0, 0)])
def test_no_valid_row(form, N, targets):  # B12
    grpo_tests.test_no_valid_row(N, targets)


@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
def test_what_is_not_a_number_is_seen(form, entropy_coef):
    grpo_tests.test_a_target_outside_the_vocabulary_is_seen(None, entropy_coef)
    for name in ("old_logprobs_N", "ref_logprobs_N", "sampler_logprobs_N"):
        grpo_tests.test_nan_of_a_row_that_counts_is_seen({name: NAN})


@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
def test_several_chunks(form, entropy_coef, monkeypatch):
    """Chunks and sub-chunks of 8 rows: the sum of dW is written first and added to then."""
    monkeypatch.setattr(_sweep, "_ROW_MULTIPLE", 8)
    hidden, weight, target, bias, temperature = grpo_tests.problem(37, 97, 24)
    rows = grpo_tests.row_inputs(37, torch.full((37,), -2.0))
    results = []
    for impl, chunk_bytes in ((form, 4 * 97 * 60), (form, 1 << 30), ("reference", 1 << 30)):
        inputs = grpo_tests.leaves(hidden, weight, bias)
        accumulator = torch.ones_like(weight)
        options = {"kl_coef": 0.1, "entropy_coef": entropy_coef, "chunk_bytes": chunk_bytes, "impl": impl, **rows}
        out = linear_grpo_loss(*inputs[:2], target, temperature, bias_V=inputs[2], **options)
        out.loss.backward()
        again = linear_grpo_loss(*inputs[:2], target, temperature, bias_V=bias, weight_grad_VH=accumulator, **options)
        torch.autograd.grad(again.loss, inputs[0])
        results.append((out.logprobs_N, inputs[0].grad, inputs[1].grad, inputs[2].grad, accumulator - 1))
    for result in results[:2]:
        for got, want in zip(result, results[2], strict=True):
            assert grpo_tests.relative(got, want.double()) < 4e-6


def test_the_rows_a_byte_budget_buys():
    """Everything that lives at once beside the gradients stays within the budget."""
    for vocab, width in ((151936, 896), (152064, 3584), (32001, 4096)):
        hidden = torch.empty(1, width, dtype=torch.bfloat16, device="meta").expand(262144, width)
        weight = torch.empty(vocab, width, dtype=torch.bfloat16, device="meta")
        for budget in (1 << 30, 2600 << 20):
            padded = -(-vocab // 64) * 64
            plan = _sweep.make_plan(hidden, weight, budget, epilogue=True)
            tiles = 2 * -(-vocab // _exp_gemm.GEMM.columns)
            assert budget * 0.8 < plan.chunk_rows * (2 * padded + 4 * width + 12 * tiles) <= budget
            plan = _sweep.make_plan(hidden, weight, budget, epilogue=False)
            spent = plan.sub_rows * 4 * padded + plan.chunk_rows * (2 * padded + 4 * width)
            assert budget * 0.8 < spent <= budget and plan.chunk_rows % plan.sub_rows == 0


def test_a_tile_far_above_the_target(form):
    """The target 200 below the largest logit, at the start or the end of the row: tiles about two shifts in one row."""
    weight = torch.zeros(300, 8)
    weight[:, 0] = torch.linspace(-1, 1, 300)
    weight.requires_grad_()
    hidden = torch.zeros(4, 8)
    hidden[:, 0] = torch.tensor([100.0, -100.0, 100.0, 1e-3])
    target = torch.tensor([0, 299, 299, 7])
    got, exact = grpo_tests.leaves(hidden, weight), grpo_tests.leaves(hidden, weight, dtype=torch.float64)
    logprob, entropy = linear_logprob(*got, target, impl=form)
    want = logprob_tests.truth(*exact, target)
    torch.testing.assert_close(logprob.double(), want[0], rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(entropy.double(), want[1], rtol=1e-6, atol=1e-5)
    logprob.sum().backward()
    want[0].sum().backward()
    for a, b in zip(got, exact, strict=True):
        assert logprob_tests.relative(a.grad, b.grad) < 1e-5


def test_tokens_masked_by_the_bias(form):
    hidden, weight, target, bias = logprob_tests.problem(9, 300, 8)
    target %= 100
    bias[100:] = -INF
    got, exact = grpo_tests.leaves(hidden, weight), grpo_tests.leaves(hidden, weight[:100], dtype=torch.float64)
    logprob, entropy = linear_logprob(*got, target, bias_V=bias, impl=form)
    want = logprob_tests.truth(*exact, target, bias=bias[:100].double())
    for upstream in (0.0, 2.0):
        gradient = torch.autograd.grad((logprob - upstream * entropy).sum(), got, retain_graph=True)
        expected = torch.autograd.grad((want[0] - upstream * want[1]).sum(), exact, retain_graph=True)
        assert logprob_tests.relative(gradient[0], expected[0]) < 1e-5
        assert logprob_tests.relative(gradient[1][:100], expected[1]) < 1e-5 and (gradient[1][100:] == 0).all()
    torch.testing.assert_close(logprob.double(), want[0], rtol=1e-5, atol=1e-5)
    assert linear_logprob(hidden, weight, target + 100, bias_V=bias, impl=form)[0].max() == -INF


def test_the_ratio_to_an_old_pass_by_rows_is_one_with_an_entropy_bonus(form):
    hidden, weight, target, _, temperature = grpo_tests.problem(37, 97, 24)
    old, _ = linear_logprob(hidden, weight, target, temperature, impl="rows")
    rows = {"weights_N": torch.ones(37), "advantages_N": torch.ones(37), "old_logprobs_N": old}
    inputs = grpo_tests.leaves(hidden, weight)
    out = linear_grpo_loss(*inputs, target, temperature, entropy_coef=0.1, impl=form, **rows)
    assert (out.ratio_N == 1).all() and torch.equal(out.logprobs_N, old)


@pytest.mark.parametrize("kl_type", KL_TYPES)
@pytest.mark.parametrize("policy_loss", POLICY_LOSSES)
def test_token_terms_equal_the_torch_form(policy_loss, kl_type):
    rng = torch.Generator().manual_seed(0)
    edge = torch.tensor([-INF, -1e30, -400.0, -30.0, -20.0, -1.0, -1e-6, 0.0, NAN, INF])
    new, old, ref, sampler = torch.meshgrid(edge[2:8], edge, edge[[0, 3, 5, 8]], edge[[1, 4, 7]], indexing="ij")
    N = new.numel()
    weights = torch.rand(N, generator=rng) * (torch.rand(N, generator=rng) > 0.2)
    rows = GrpoRows(weights, torch.randn(N, generator=rng), *(x.flatten() for x in (old, ref, sampler)))
    near = torch.randn(3, 500, generator=rng) * 0.5 - 2
    near_rows = GrpoRows(torch.rand(500, generator=rng), torch.randn(500, generator=rng), *near)
    for logprobs, given in ((new.flatten(), rows), (near[0] + 0.3, near_rows)):
        settings = GrpoSettings(
            0.2, 0.28, 3.0, 2.0, kl_coef=0.1, kl_type=kl_type, policy_loss=policy_loss, tau_pos=1.3, tau_neg=0.7
        )
        want = grpo_token_terms(logprobs, given, settings)
        out = _grpo_rows.GrpoOutputs(*torch.empty(5, len(logprobs)), torch.empty(len(logprobs), dtype=torch.uint8))
        _grpo_rows.grpo_rows(logprobs.clone(), torch.zeros_like(logprobs), given, settings, out)
        for name in out._fields:
            got, expected = getattr(out, name), getattr(want, name)
            torch.testing.assert_close(got, expected, rtol=2e-6, atol=1e-7, equal_nan=True, msg=lambda m, n=name: n + m)


@pytest.mark.parametrize(
    "test",
    [
        lambda: logprob_tests.test_values_and_gradients_equal_full_logits(100, 40, 19, 7),
        lambda: grpo_tests.test_everything_at_once_equals_full_logits(257, 24, 19, 7),
        lambda: grpo_tests.test_each_option_equals_full_logits({"softcap": 4.0, "logit_scale": 1.5}, ""),
        pytest.param(lambda: logprob_tests.test_bounds_hold_for_any_logits(0.0), marks=slow),
        lambda: logprob_tests.test_bounds_hold_for_any_logits(1e18),
        lambda: grpo_tests.test_finite_for_any_logits(1e18),
        lambda: grpo_tests.test_no_valid_row(4, -100),
        logprob_tests.test_target_outside_the_vocabulary_is_nan_and_leaves_others_alone,
        logprob_tests.test_strided_inputs,
    ],
)
def test_refined_rows_keep_every_promise(form, refined, test):
    test()


def test_refined_rows_far_and_masked(form, refined):
    test_a_tile_far_above_the_target(form)
    test_tokens_masked_by_the_bias(form)
    logprob_tests.test_a_near_certain_token_keeps_the_digits_that_it_lacks_to_one()


@pytest.mark.parametrize("entropy_coef", [pytest.param(0.0, marks=slow), 0.1])
def test_refined_rows_in_several_chunks(form, refined, entropy_coef, monkeypatch):
    test_several_chunks(form, entropy_coef, monkeypatch)


@pytest.mark.parametrize("target_is_exact", [True, False])
@pytest.mark.parametrize("softcap", [0.0, 40.0])
@pytest.mark.parametrize("sure", [True, False])
def test_logits_cut_short_are_put_right(target_is_exact, softcap, sure):
    """Products 1e-3 short, as tensor cores leave them, with targets that are the row's best token or are not."""
    hidden, weight, target, bias = logprob_tests.problem(9, 300, 32)
    hidden, rows, slope = hidden * 6, range(9), torch.linspace(0.5, 1.5, 9)

    def logits(product):
        raw = product + bias.double()
        return (softcap * (raw / softcap).tanh() if softcap else raw) * slope[:, None].double()

    product = hidden.double() @ weight.double().T
    if sure:
        target = logits(product).argmax(1)
    short = product * (1 - 1e-3)
    if target_is_exact:
        short[rows, target] = product[rows, target]
    top = logits(short).scatter(1, target[:, None], -INF).argmax(1)
    want = short.clone()
    want[rows, target], want[rows, top] = product[rows, target], product[rows, top]
    want = logits(want).log_softmax(1)

    options = {"bias_V": bias, "softcap_inverse": 1 / softcap if softcap else 0.0}
    stats, sums = _exp_rows.RowStats(*torch.empty(4, 9)), _exact_rows.RowSums.empty(9, torch.device("cpu"))
    _exp_rows.exp_rows(short.float(), target, slope, stats, torch.empty(9, 0), sums=sums, **options)
    assert torch.equal(sums.column_C.long(), top)
    assert (stats.logprob_N - want[rows, target]).abs().max() > 1e-4
    _exact_rows.refine(hidden, weight, target, slope, sums, stats, target_is_exact=target_is_exact, **options)
    torch.testing.assert_close(stats.logprob_N.double(), want[rows, target], rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(stats.entropy_N.double(), -(want * want.exp()).sum(1), rtol=1e-6, atol=1e-5)
    assert (stats.logprob_N <= 0).all() and (stats.entropy_N >= 0).all()


def test_the_epilogue_finds_the_largest_of_the_others(small_tiles):
    for V in (1, 2, 33, 100):
        hidden, weight, target, _ = logprob_tests.problem(19, V, 16)
        weight[V // 2 :] = weight[: V - V // 2].clone()  # equal logits: any of them will do
        partials = _exp_gemm.Partials.empty(19, V, hidden.device, small_tiles, refined=True)
        stats = _exp_rows.RowStats(*torch.empty(4, 19))
        _exp_gemm.exp_gemm(hidden, weight, target, torch.ones(19), stats, partials, torch.empty(19, 0))
        others = (hidden @ weight.T).scatter(1, target[:, None], -INF)
        top, column = partials.sums.top_C, partials.sums.column_C.long()
        if V == 1:
            assert (top < _exact_rows.NO_LOGIT.value).all()
            continue
        torch.testing.assert_close(top, others.amax(1))
        assert (column != target).all()
        torch.testing.assert_close(others.gather(1, column[:, None])[:, 0], others.amax(1))


def test_offsets_beyond_32_bits():
    """B11: rows 2^30 elements apart, so that the third starts at 2^31. (Pages that nobody touches take no memory.)"""
    far = torch.empty(2, (1 << 31) + 300)
    logits, exp = (x.as_strided((3, 300), (1 << 30, 1)) for x in far)
    logits.copy_(torch.randn(3, 300))
    target, slope, near = torch.tensor([3, 5, 7]), torch.ones(3), logits.clone()
    stats = [_exp_rows.RowStats(*torch.empty(4, 3)) for _ in range(2)]
    want = torch.empty(3, 300)
    _exp_rows.exp_rows(near, target, slope, stats[0], want)
    _exp_rows.exp_rows(logits, target, slope, stats[1], exp)
    assert torch.equal(exp, want) and all(torch.equal(a, b) for a, b in zip(*stats, strict=True))
    ones = torch.ones(3)
    _exp_rows.entropy_gradients(near, target, slope, stats[0], ones, ones, want)
    _exp_rows.entropy_gradients(logits, target, slope, stats[1], ones, ones, exp)
    assert torch.equal(exp, want)
    assert torch.equal(_scale.scale(exp, 2 * ones, torch.empty(3, 300)), 2 * want)


@pytest.mark.parametrize("shape", [(1, 1), (3, 5000), (5, 8), (0, 8)])
def test_scale(shape, monkeypatch):
    monkeypatch.setattr(_scale, "_BLOCK", 1024)
    wide = torch.randn(shape[0], shape[1] + 3)
    x, factor = wide[:, : shape[1]], torch.randn(shape[0])
    assert torch.equal(_scale.scale(x, factor, torch.empty(shape)), x * factor[:, None])
    x = x.contiguous()
    assert torch.equal(_scale.scale(x, torch.tensor(-0.25), torch.empty(shape)), -0.25 * x)


def test_only_what_is_in_one_piece_is_scaled_by_the_kernel(scaled_by_triton):
    x, row, one = torch.randn(6, 8), torch.randn(6), torch.tensor(0.5)
    for given, factor, out, fits in (
        (x, row, torch.empty(6, 8), True),
        (x[:, :5], row, torch.empty(6, 9)[:, :5], True),
        (x, row, torch.empty(8, 6).T, False),
        (x.T.contiguous().T, row, torch.empty(6, 8), False),
        (x, one, torch.empty(6, 8), True),
        (x[:, :5], one, torch.empty(6, 5), False),
        (x, one, torch.empty(8, 6).T, False),
    ):
        scaled_by_triton.clear()
        want = given * (factor[:, None] if factor.dim() else factor)
        assert torch.equal(_chunks.scaled(given, factor, x.dtype, out=out), want)
        assert len(scaled_by_triton) == fits


def test_forms_need_a_gpu_or_the_interpreter(monkeypatch):
    monkeypatch.setattr(_sweep, "INTERPRETED", False)
    with pytest.raises(ValueError, match="impl 'rows' is for bfloat16 and float32 on a CUDA device, got"):
        linear_logprob(torch.zeros(1, 8), torch.zeros(3, 8), torch.zeros(1, dtype=torch.int64), impl="rows")
    with pytest.raises(ValueError, match="impl 'epilogue' is for bfloat16 on a CUDA device of compute capability 9"):
        linear_logprob(torch.zeros(1, 8), torch.zeros(3, 8), torch.zeros(1, dtype=torch.int64), impl="epilogue")
    with pytest.raises(ValueError, match="impl is 'cuda': choose one of auto, reference, rows, epilogue"):
        linear_logprob(torch.zeros(1, 8), torch.zeros(3, 8), torch.zeros(1, dtype=torch.int64), impl="cuda")
