"""The update in numbers: schedule, decay, clipping, what a non-finite gradient must not touch."""

import math

import pytest
import torch
from cases import training_state
from torch import nn

from fastgrpo.config import OptimConfig
from fastgrpo.policy.optim import apply_update, build_adamw, global_norm, learning_rate


def rates(updates, total, **options):
    return [learning_rate(OptimConfig(lr=1e-3, **options), update, total) for update in updates]


def test_warm_up_then_constant():
    assert rates(range(1, 6), 100, lr_warmup_steps=4) == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3])
    assert rates([1, 2, 1000], 10) == [1e-3, 1e-3, 1e-3]
    assert rates([1, 2], 1, lr_warmup_steps=1) == [1e-3, 1e-3]


def test_cosine():
    after_warm_up = rates([1, 4, 8, 12, 16], 12, lr_warmup_steps=4, lr_scheduler_type="cosine")
    assert after_warm_up == pytest.approx([0.25e-3, 1e-3, 0.5e-3, 0, 0])
    floor = rates([4, 6, 8, 12, 99], 12, lr_warmup_steps=4, lr_scheduler_type="cosine", min_lr_ratio=0.1)
    quarter = 0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2
    assert floor == pytest.approx([1e-3, quarter * 1e-3, 0.55e-3, 0.1e-3, 0.1e-3])
    assert rates([10], 10, lr_scheduler_type="cosine", min_lr_ratio=0.2) == pytest.approx([0.2e-3])


def test_a_warm_up_longer_than_the_run_divides_by_nothing():
    assert rates([1, 5, 6], 3, lr_warmup_steps=5, lr_scheduler_type="cosine") == pytest.approx([0.2e-3, 1e-3, 0])


def test_the_rate_is_a_function_of_the_update_alone():
    """So that a resumed run goes on as an unbroken one: nothing was counted anywhere else."""
    config = OptimConfig(lr=1e-3, lr_warmup_steps=4)
    unbroken = [learning_rate(config, update, 9) for update in range(1, 10)]
    assert [learning_rate(config, update, 9) for update in range(4, 10)] == unbroken[3:]


def toy(**options):
    matrix, vector = nn.Parameter(torch.full((2, 3), 2.0)), nn.Parameter(torch.full((3,), 2.0))
    return matrix, vector, build_adamw([matrix, vector], OptimConfig(**options))


def test_decay_of_matrices_and_not_of_vectors():
    matrix, vector, optimizer = toy(weight_decay=0.1)
    matrix.grad, vector.grad = torch.zeros_like(matrix), torch.zeros_like(vector)
    assert apply_update(optimizer, 0.5, 1.0) == (0.0, True)
    torch.testing.assert_close(matrix.detach(), torch.full((2, 3), 2.0 * (1 - 0.5 * 0.1)))
    assert torch.equal(vector.detach(), torch.full((3,), 2.0))


def test_a_model_of_vectors_only():
    build_adamw([nn.Parameter(torch.ones(3))], OptimConfig())


def adamw_by_hand(weight, gradients, lrs, decay, beta1, beta2, eps):
    m = v = torch.zeros_like(weight)
    for number, (gradient, lr) in enumerate(zip(gradients, lrs, strict=True), 1):
        weight = weight * (1 - lr * decay)
        m, v = beta1 * m + (1 - beta1) * gradient, beta2 * v + (1 - beta2) * gradient**2
        weight = weight - lr * (m / (1 - beta1**number)) / ((v / (1 - beta2**number)).sqrt() + eps)
    return weight


def test_adamw_with_the_configured_numbers():
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(5, 2, 3, generator=generator).double()
    lrs = [1e-3, 2e-3, 5e-3, 5e-3, 1e-3]
    matrix, vector, optimizer = toy(weight_decay=0.1, beta1=0.8, beta2=0.95, eps=1e-3)
    for gradient, lr in zip(gradients, lrs, strict=True):
        matrix.grad, vector.grad = gradient.float(), gradient[0].float()
        apply_update(optimizer, lr, 0.0)
        assert matrix.grad is None and vector.grad is None
    expected = adamw_by_hand(torch.full((2, 3), 2.0).double(), gradients, lrs, 0.1, 0.8, 0.95, 1e-3)
    torch.testing.assert_close(matrix.detach().double(), expected, rtol=1e-6, atol=1e-6)
    plain = adamw_by_hand(torch.full((3,), 2.0).double(), gradients[:, 0], lrs, 0.0, 0.8, 0.95, 1e-3)
    torch.testing.assert_close(vector.detach().double(), plain, rtol=1e-6, atol=1e-6)


class Seen(torch.optim.SGD):
    """Notes the gradients that arrive."""

    def step(self, closure=None):
        self.seen = [p.grad.clone() for group in self.param_groups for p in group["params"] if p.grad is not None]
        return super().step(closure)


@pytest.mark.parametrize(("clip", "seen"), [(1.0, [0.6, 0.8]), (10.0, [3.0, 4.0]), (0.0, [3.0, 4.0])])
def test_clipping_to_the_global_norm(clip, seen):
    first, second, idle = (nn.Parameter(torch.zeros(1)) for _ in range(3))
    first.grad, second.grad = torch.tensor([3.0]), torch.tensor([4.0])
    optimizer = Seen([first, second, idle], lr=123.0)
    assert apply_update(optimizer, 0.5, clip) == (5.0, True)
    torch.testing.assert_close(torch.cat(optimizer.seen), torch.tensor(seen))
    torch.testing.assert_close(torch.cat([first, second]).detach(), -0.5 * torch.tensor(seen))


def test_the_norm_is_one_of_all_tensors():
    tensors = [torch.randn(3, 4), torch.randn(7), torch.randn(())]
    expected = torch.cat([tensor.flatten() for tensor in tensors]).double().norm()
    assert float(global_norm(tensors)) == pytest.approx(float(expected), rel=1e-6)
    assert float(global_norm([])) == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_norm_touches_nothing(bad):
    matrix, vector, optimizer = toy(lr=0.1)
    matrix.grad, vector.grad = torch.ones_like(matrix), torch.ones_like(vector)
    apply_update(optimizer, 0.1, 1.0)
    before = [tensor.clone() for tensor in training_state(optimizer)]
    matrix.grad, vector.grad = torch.ones_like(matrix), torch.ones_like(vector)
    matrix.grad[1, 1] = bad
    norm, stepped = apply_update(optimizer, 0.1, 1.0)
    assert not stepped and not math.isfinite(norm)
    assert matrix.grad is None and vector.grad is None  # nothing is left to poison the next
    after = training_state(optimizer)
    assert len(after) == len(before) == 8  # two parameters; each with two moments and its count of steps
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert {float(state["step"]) for state in optimizer.state.values()} == {1.0}
