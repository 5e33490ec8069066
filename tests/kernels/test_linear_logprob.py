"""linear_logprob against full logits in fp64, values and gradients, and the faults of others that it must not have."""

from __future__ import annotations

import ast
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fastgrpo_kernels
from fastgrpo_kernels import linear_grpo_loss, linear_logprob, linear_logprob_ref

CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
)


def truth(hidden, weight, target, temperature=1.0, bias=None, logit_scale=1.0, softcap=0.0) -> tuple[Tensor, Tensor]:
    logits = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    logits = logits * logit_scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits / (temperature.unsqueeze(1) if isinstance(temperature, Tensor) else temperature)
    logprobs = logits.log_softmax(1)
    entropy = -(logprobs.exp() * logprobs).sum(1)
    return logprobs.gather(1, target.unsqueeze(1)).squeeze(1), entropy


def problem(N, V, H, dtype=torch.float32, seed=0, device="cpu"):
    """Peaked rows: the largest logits of a row are about 10 above the rest."""
    rng = torch.Generator().manual_seed(seed)
    weight = torch.randn(V, H, generator=rng)
    target = torch.randint(V, (N,), generator=rng)
    hidden = torch.randn(N, H, generator=rng) + 6 / H * weight[target]
    bias = torch.randn(V, generator=rng)
    return (x.to(device, dtype) if x.is_floating_point() else x.to(device) for x in (hidden, weight, target, bias))


def leaves(*tensors, dtype=None) -> list[Tensor]:
    return [x.detach().to(dtype or x.dtype).clone().requires_grad_() for x in tensors]


def relative(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


class Watch(TorchDispatchMode):
    """Records the shapes that operations return."""

    def __init__(self):
        super().__init__()
        self.shapes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.shapes |= {tuple(x.shape) for x in tree_leaves(out) if isinstance(x, Tensor)}
        return out


@pytest.mark.parametrize("rows", [1, 7, 64])
@pytest.mark.parametrize("N", [0, 1, 3, 37])
@pytest.mark.parametrize("H", [8, 24])
@pytest.mark.parametrize("V", [5, 17, 257, 1000])
def test_values_and_gradients_equal_full_logits(V, H, N, rows):
    hidden, weight, target, bias = problem(N, V, H)
    rng = torch.Generator().manual_seed(1)
    temperature = 0.5 + torch.rand(N, generator=rng)
    up_logprob, up_entropy = torch.randn(2, N, generator=rng)
    for options in ({}, {"logit_scale": 0.3}, {"softcap": 4.0, "logit_scale": 1.5}):
        inputs, exact = leaves(hidden, weight, bias), leaves(hidden, weight, bias, dtype=torch.float64)
        logprob, entropy = linear_logprob(
            *inputs[:2], target, temperature, bias_V=inputs[2], chunk_bytes=4 * V * rows, **options
        )
        assert logprob.dtype == entropy.dtype == torch.float32 and logprob.shape == entropy.shape == (N,)
        want = truth(*exact[:2], target, temperature.double(), exact[2], **options)
        torch.testing.assert_close(logprob.double(), want[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(entropy.double(), want[1], rtol=1e-5, atol=1e-5)
        (up_logprob * logprob + up_entropy * entropy).sum().backward()
        (up_logprob * want[0] + up_entropy * want[1]).sum().backward()
        for got, expected in zip(inputs, exact, strict=True):
            assert got.grad.dtype == torch.float32 and got.grad.shape == got.shape
            assert relative(got.grad, expected.grad) < 1e-5


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"logit_scale": 0.25, "chunk_bytes": 1}])
def test_gradcheck(options):
    hidden, weight, target, bias = problem(3, 7, 4, torch.float64)
    temperature = torch.tensor([0.6, 1.0, 1.7], dtype=torch.float64)

    def call(hidden, weight, bias):
        return linear_logprob(hidden, weight, target, temperature, bias_V=bias, **options)

    assert torch.autograd.gradcheck(call, leaves(hidden, weight, bias))


def test_a_nonlinear_loss_over_sums_of_rows():
    hidden, weight, target, _ = problem(6, 17, 8, torch.float64)
    sequence = torch.tensor([0, 0, 0, 1, 1, 1])

    def loss(logprob, entropy):
        sums = torch.zeros(2, dtype=torch.float64).index_add(0, sequence, logprob)
        return (sums / 3).exp().sum() + (entropy**2).mean()

    inputs, exact = leaves(hidden, weight), leaves(hidden, weight)
    loss(*linear_logprob(*inputs, target, 0.7, chunk_bytes=4 * 17 * 2)).backward()
    loss(*truth(*exact, target, 0.7)).backward()
    for got, expected in zip(inputs, exact, strict=True):
        torch.testing.assert_close(got.grad, expected.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_bf16_operands_have_fp32_logits(device):
    """Only the returned gradients are rounded to bf16 (2^-9 relative); on CUDA the gradient of the logits is, too."""
    hidden, weight, target, bias = problem(300, 1000, 64, torch.bfloat16, device=device)
    inputs, exact = leaves(hidden, weight, bias), leaves(hidden, weight, bias, dtype=torch.float64)
    logprob, entropy = linear_logprob(*inputs[:2], target, 0.8, bias_V=inputs[2], chunk_bytes=4 * 1000 * 77)
    want = truth(*exact[:2], target, 0.8, exact[2])
    assert (logprob - want[0]).abs().max() < 3e-5 and (entropy - want[1]).abs().max() < 3e-5
    (logprob.sum() + 0.3 * entropy.sum()).backward()
    (want[0].sum() + 0.3 * want[1].sum()).backward()
    for got, expected in zip(inputs, exact, strict=True):
        assert got.grad.dtype == torch.bfloat16
        assert relative(got.grad, expected.grad) < 4e-3


def test_weight_gradient_is_summed_in_fp32():
    """1024 equal rows in chunks of one: a bf16 sum would stop growing at 256 times the first."""
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    hidden, target = torch.ones(1024, 1, dtype=torch.bfloat16), torch.zeros(1024, dtype=torch.int64)
    linear_logprob(hidden, weight, target, chunk_bytes=1)[0].sum().backward()
    assert weight.grad.flatten().tolist() == [512.0, -512.0]


def test_temperature_number_equals_tensor_and_rows_are_independent():
    hidden, weight, target, _ = problem(5, 17, 8)
    number = linear_logprob(hidden, weight, target, 0.7)
    for got, want in zip(linear_logprob(hidden, weight, target, torch.full((5,), 0.7)), number, strict=True):
        assert torch.equal(got, want)
    mixed = linear_logprob(hidden, weight, target, torch.tensor([0.7, 1.0, 1.7, 0.7, 0.1]))[0]
    assert torch.equal(mixed[[0, 3]], number[0][[0, 3]])
    torch.testing.assert_close(mixed[4].double(), truth(hidden.double(), weight.double(), target, 0.1)[0][4])


def test_temperature_is_in_values_and_gradient():
    """B06: logits [2, 1, 0], token 1, T = 0.5. d logprob / d z_v = (1[v = y] - p_v) / T."""
    hidden = torch.tensor([[2.0, 1.0, 0.0]], requires_grad=True)
    logprob, _ = linear_logprob(hidden, torch.eye(3), torch.tensor([1]), 0.5)
    assert logprob.item() == pytest.approx(-2.142932, abs=1e-6)
    assert linear_logprob(hidden, torch.eye(3), torch.tensor([1]))[0].item() == pytest.approx(-1.407606, abs=1e-6)
    logprob.sum().backward()
    p = torch.tensor([4.0, 2.0, 0.0]).softmax(0)
    torch.testing.assert_close(hidden.grad[0], (torch.tensor([0.0, 1.0, 0.0]) - p) / 0.5)


def test_rows_score_the_next_token():
    """B07: the logits of x favour (x + 1) mod 5 by 10; rows 1..3 of [0 1 2 3 4] draw the completion 2 3 4."""
    ids = torch.arange(5)
    weight = 10 * torch.eye(5).roll(1, 0)
    logprob, _ = linear_logprob(torch.eye(5)[ids[1:4]], weight, ids[2:5])
    assert logprob.tolist() == pytest.approx([-1.8166e-4] * 3, abs=3e-7)
    shifted, _ = linear_logprob(torch.eye(5)[ids[1:4]], weight, ids[1:4])
    assert shifted.tolist() == pytest.approx([-10.0002] * 3, abs=1e-4)


@pytest.mark.parametrize("V", [129, 257, 1000, 129920, 151936])
def test_nothing_past_the_vocabulary_counts(V):
    """B10: all logits -5, so logprob = -ln V and entropy = ln V. What lies behind the weight is not read or written."""
    buffer = torch.full((V + 3, 8), math.nan)
    buffer[:V] = -5 / 8
    weight = buffer[:V].requires_grad_()
    hidden = torch.ones(3, 8, requires_grad=True)
    logprob, entropy = linear_logprob(hidden, weight, torch.tensor([0, V // 2, V - 1]), chunk_bytes=8 * V)
    assert logprob.tolist() == pytest.approx([-math.log(V)] * 3, abs=1e-5)
    assert entropy.tolist() == pytest.approx([math.log(V)] * 3, abs=1e-5)
    (gradient,) = torch.autograd.grad(logprob.sum(), weight)
    expected = torch.full((V, 8), -3 / V)
    expected[[0, V // 2, V - 1]] += 1
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-9)
    assert buffer[V:].isnan().all()


@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0, 1e4, 1e18])
def test_bounds_hold_for_any_logits(scale):
    hidden, weight, target, _ = problem(37, 257, 8)
    inputs = leaves(hidden * scale, weight)
    logprob, entropy = linear_logprob(*inputs, target, 0.7)
    assert (logprob <= 0).all() and (entropy >= 0).all() and (entropy <= math.log(257) + 1e-5).all()
    (logprob.sum() + entropy.sum()).backward()
    assert all(x.isfinite().all() for x in (logprob, entropy, inputs[0].grad, inputs[1].grad))


def test_a_near_certain_token_keeps_the_digits_that_it_lacks_to_one():
    """logprob = -ln(1 + 16 e^-d): a loss that takes 1 - p from p would have no digit left at d = 20."""
    for d in (5.0, 12.0, 20.0):
        hidden, weight = torch.full((1, 8), d / 8).requires_grad_(), torch.zeros(17, 8)
        weight[3] = 1
        logprob, entropy = linear_logprob(hidden, weight, torch.tensor([3]))
        others = 16 * math.exp(-d)
        rest = others / (1 + others)  # 1 - p
        assert logprob.item() == pytest.approx(-math.log1p(others), rel=2e-6, abs=0)
        assert entropy.item() == pytest.approx(math.log1p(others) + d * rest, rel=2e-5, abs=0)
        (gradient,) = torch.autograd.grad(logprob.sum(), hidden, retain_graph=True)
        assert gradient[0].tolist() == pytest.approx([rest] * 8, rel=2e-6, abs=0)


def test_tokens_masked_by_the_bias():
    """Logits of -inf take no part, forward or backward."""
    hidden, weight, target, bias = problem(9, 17, 8, torch.float64)
    target %= 10
    bias[10:] = -math.inf
    inputs, exact = leaves(hidden, weight), leaves(hidden, weight[:10])
    logprob, entropy = linear_logprob(*inputs, target, bias_V=bias, chunk_bytes=4 * 17 * 4)
    want = truth(*exact, target, bias=bias[:10])
    (logprob.sum() - 2 * entropy.sum()).backward()
    (want[0].sum() - 2 * want[1].sum()).backward()
    torch.testing.assert_close((logprob, entropy), want)
    torch.testing.assert_close(inputs[0].grad, exact[0].grad)
    torch.testing.assert_close(inputs[1].grad[:10], exact[1].grad)
    assert (inputs[1].grad[10:] == 0).all()
    assert linear_logprob(hidden, weight, target + 10 * (target < 7), bias_V=bias)[0].min() == -math.inf


def test_target_outside_the_vocabulary_is_nan_and_leaves_others_alone():
    hidden, weight, target, _ = problem(4, 17, 8)
    broken = target.clone()
    broken[1], broken[2] = -100, 17
    clean, inputs = leaves(hidden, weight), leaves(hidden, weight)
    logprob, entropy = linear_logprob(*inputs, broken)
    want = linear_logprob(*clean, target)
    assert logprob.isnan().tolist() == [False, True, True, False]
    assert torch.equal(logprob[[0, 3]], want[0][[0, 3]]) and torch.equal(entropy[[0, 3]], want[1][[0, 3]])
    torch.testing.assert_close(entropy, want[1], rtol=1e-6, atol=1e-6)
    logprob[[0, 3]].sum().backward()
    want[0][[0, 3]].sum().backward()
    assert torch.equal(inputs[0].grad, clean[0].grad) and torch.equal(inputs[1].grad, clean[1].grad)


def test_no_rows_give_zero_gradients():
    """B12: the graph and the gradients exist without any row."""
    inputs = leaves(torch.empty(0, 8), torch.randn(17, 8), torch.randn(17))
    logprob, entropy = linear_logprob(*inputs[:2], torch.empty(0, dtype=torch.int64), bias_V=inputs[2])
    loss = logprob.sum() + entropy.sum()
    assert loss.item() == 0 and loss.requires_grad
    loss.backward()
    assert all(torch.equal(x.grad, torch.zeros_like(x)) for x in inputs)


def test_chunk_budget_changes_rounding_only():
    hidden, weight, target, _ = problem(600, 97, 24)
    results = []
    for rows in (1, 7, 256, 300, 600, 10_000):
        inputs = leaves(hidden, weight)
        logprob, entropy = linear_logprob(*inputs, target, chunk_bytes=4 * 97 * rows)
        (logprob * logprob.detach() + entropy).sum().backward()
        results.append((logprob, entropy, inputs[0].grad, inputs[1].grad))
    for result in results[1:]:
        for got, want in zip(result, results[0], strict=True):
            assert relative(got, want.double()) < 1e-6


def test_a_gradient_of_the_gradient_is_refused():
    """Of a loss that is linear in the logprobs, too, which torch's own check would let pass."""
    hidden, weight, target, _ = problem(10, 17, 8)
    inputs = leaves(hidden, weight)
    logprob, _ = linear_logprob(*inputs, target)
    for loss in (logprob.sum(), logprob.square().sum()):
        with pytest.raises(RuntimeError, match="have first derivatives alone: call autograd without create_graph=True"):
            torch.autograd.grad(loss, inputs, create_graph=True, retain_graph=True)


def test_a_temperature_that_is_not_positive_is_seen():
    """In its row alone: what a tensor holds is not looked at before."""
    hidden, weight, target, _ = problem(5, 17, 8)
    logprob, entropy = linear_logprob(hidden, weight, target, torch.tensor([0.7, -0.7, 0.0, math.nan, 1.0]))
    want = linear_logprob(hidden, weight, target, torch.tensor([0.7, 1.0, 1.0, 1.0, 1.0]))
    assert logprob.isnan().tolist() == entropy.isnan().tolist() == [False, True, True, True, False]
    assert torch.equal(logprob[[0, 4]], want[0][[0, 4]]) and torch.equal(entropy[[0, 4]], want[1][[0, 4]])


def test_equal_calls_give_equal_bits():
    hidden, weight, target, _ = problem(100, 257, 24, torch.bfloat16)

    def run():
        inputs = leaves(hidden, weight)
        logprob, entropy = linear_logprob(*inputs, target, chunk_bytes=4 * 257 * 7)
        (logprob + entropy).sum().backward()
        return logprob, entropy, inputs[0].grad, inputs[1].grad

    first = run()
    assert all(torch.equal(a, b) for _ in range(2) for a, b in zip(run(), first, strict=True))


def test_strided_inputs():
    """Sliced and column-major operands: their values, and gradients that do not take over the strides."""
    hidden, weight, target, _ = problem(10, 17, 8)
    wide = torch.zeros(10, 2, 8)
    wide[:, 1] = hidden
    for given, plain, rows in (
        ((wide[::2, 1], weight.T.contiguous().T), (hidden[::2], weight), target[::2]),
        ((hidden.T.contiguous().T, weight), (hidden, weight), target),
    ):
        strided, dense = [x.detach().requires_grad_() for x in given], leaves(*plain)
        got, want = linear_logprob(*strided, rows), linear_logprob(*dense, rows)
        torch.testing.assert_close(got, want)
        for upstream in (0.0, 0.3):
            gradients = [
                torch.autograd.grad((x[0] + upstream * x[1]).sum(), inputs, retain_graph=True)
                for x, inputs in ((got, strided), (want, dense))
            ]
            torch.testing.assert_close(*gradients)


def test_no_tensor_of_rows_times_vocabulary():
    hidden, weight, target, bias = problem(64, 300, 8)
    inputs = leaves(hidden, weight, bias)
    with Watch() as watch:
        logprob, entropy = linear_logprob(
            *inputs[:2], target, 0.7, bias_V=inputs[2], softcap=9.0, chunk_bytes=4 * 300 * 4
        )
        (logprob + entropy).sum().backward()
    assert (4, 300) in watch.shapes  # the chunks are seen
    assert max(math.prod(shape) for shape in watch.shapes) == 300 * 8


def test_nothing_is_saved_under_no_grad_and_inputs_alone_otherwise():
    hidden, weight, target, _ = problem(64, 300, 8)
    inputs = leaves(hidden, weight)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        with torch.no_grad():
            assert linear_logprob(*inputs, target)[0].grad_fn is None
        assert saved == []
        linear_logprob(*inputs, target)
    assert {x.numel() for x in saved} == {64 * 8, 300 * 8, 64}


def test_frozen_weight_costs_nothing():
    hidden, weight, target, _ = problem(64, 300, 8)
    hidden.requires_grad_()
    with Watch() as watch:
        linear_logprob(hidden, weight, target)[0].sum().backward()
    assert weight.grad is None and (300, 8) not in watch.shapes
    assert (8, 300) in watch.shapes  # the transposed view of the forward is seen


def test_autocast_does_not_reach_inside():
    hidden, weight, target, _ = problem(20, 257, 24)
    plain, cast = leaves(hidden, weight), leaves(hidden, weight)
    want, _ = linear_logprob(*plain, target)
    want.sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        got, _ = linear_logprob(*cast, target)
        got.sum().backward()
    assert torch.equal(got, want)
    assert torch.equal(plain[0].grad, cast[0].grad) and torch.equal(plain[1].grad, cast[1].grad)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_NH": torch.zeros(2, 3, 8)}, "flatten batch and sequence"),
        ({"hidden_NH": torch.zeros(3, 17)}, "not logits"),
        ({"weight_VH": torch.zeros(8, 17)}, "do not fit"),
        ({"weight_VH": torch.zeros(17, 8, dtype=torch.int64)}, "cast it to bfloat16, float32 or float64"),
        ({"hidden_NH": torch.zeros(3, 8, dtype=torch.float16)}, "cast it to bfloat16, float32 or float64"),
        ({"weight_VH": torch.zeros(17, 8, dtype=torch.bfloat16)}, "cast one to the other's dtype"),
        ({"target_N": torch.zeros(4, dtype=torch.int64)}, r"shape \(3,\)"),
        ({"target_N": torch.zeros(3)}, "must be int64"),
        ({"bias_V": torch.zeros(16)}, r"shape \(17,\)"),
        ({"hidden_NH": [[0.0] * 8] * 3}, "hidden_NH must be a torch tensor, got a list"),
        ({"target_N": np.zeros(3, dtype=np.int64)}, "target_N must be a torch tensor, got a ndarray"),
        ({"weight_VH": torch.nn.Linear(8, 17)}, "weight_VH must be a torch tensor, got a Linear: pass its weight"),
        ({"temperature": 0.0}, "temperature must be positive, got 0.0"),
        (
            {"temperature": "1"},
            "temperature must be a number, got '1': pass one above 0, or a tensor with one for each",
        ),
        ({"temperature": None}, "temperature must be a number, got None"),
        ({"temperature": math.inf}, "temperature must be a finite number, got inf"),
        ({"temperature": torch.ones(4)}, r"temperature must be a floating tensor of shape \(3,\)"),
        ({"softcap": -1.0}, "softcap must be positive"),
        ({"softcap": math.inf}, "softcap must be a finite number, got inf"),
        ({"logit_scale": math.nan}, "logit_scale must be a finite number, got nan"),
        ({"logit_scale": torch.ones(17)}, r"logit_scale must be a number, got a tensor of shape \(17,\), to which no"),
        ({"chunk_bytes": 0}, "chunk_bytes must be positive"),
        ({"chunk_bytes": 1e6}, "chunk_bytes must be positive and a whole number, got 1000000.0"),
        ({"weight_grad_VH": torch.zeros(17, 8).double()}, "weight_grad_VH must be torch.float32 of shape"),
        ({"weight_grad_VH": torch.zeros(1, 8).expand(17, 8)}, "weight_grad_VH is expanded"),
        ({"weight_VH": torch.zeros(17, 8, device="meta")}, "move one to the other"),
    ],
)
def test_refusals_say_what_to_do(change, message):
    good = {
        "hidden_NH": torch.zeros(3, 8),
        "weight_VH": torch.zeros(17, 8),
        "target_N": torch.zeros(3, dtype=torch.int64),
    }
    for op in (linear_logprob, linear_logprob_ref):
        with pytest.raises(ValueError, match=message):
            op(**{**good, **change})


def test_sharded_tensors_are_refused():
    started = not torch.distributed.is_initialized()
    if started:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        good = {"hidden_NH": torch.zeros(3, 8), "weight_VH": torch.zeros(17, 8), "target_N": torch.zeros(3).long()}
        by_row = {"weights_N": torch.ones(3), "advantages_N": torch.ones(3)}
        others = {"bias_V": torch.zeros(17), "weight_grad_VH": torch.zeros(17, 8), "temperature": torch.ones(3)}
        for op, given in ((linear_logprob, good | others), (linear_grpo_loss, good | others | by_row)):
            for name, x in given.items():
                sharded = distribute_tensor(x, mesh, [Replicate()])
                with pytest.raises(ValueError, match=f"{name} is a DTensor: call the op inside the FSDP-managed"):
                    op(**given | {name: sharded})
    finally:
        if started:
            torch.distributed.destroy_process_group()


def test_package_imports_torch_and_triton_alone():
    package = Path(fastgrpo_kernels.__file__).parent
    nodes = [node for path in package.glob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    assert {name.partition(".")[0] for name in names} - sys.stdlib_module_names == {
        "torch",
        "triton",
        "fastgrpo_kernels",
    }
    lazily = subprocess.run(
        [sys.executable, "-c", "import sys, fastgrpo_kernels; print('triton' in sys.modules)"],
        env={**os.environ, "PYTHONPATH": str(package.parent)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert lazily.stdout.strip() == "False"
    assert not (package.parent / "__init__.py").exists()  # a package called `kernels` would be taken for another one
