"""Group advantages against closed forms: values, odd groups, order, and what a group without signal does to a KL."""

import math

import pytest
import torch

from fastgrpo.algorithm.advantage import ADVANTAGES, group_means, grpo
from fastgrpo.algorithm.loss import LossBatch, LossConfig, vanilla
from fastgrpo.config import AdvEstimator

NAN = float("nan")


def f64(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def groups(*sizes: int) -> torch.Tensor:
    return torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes, dtype=torch.int64))


def test_without_std_the_group_mean_is_taken_off() -> None:
    advantages_N = grpo(f64([92, 85, 76, 94, 88]), groups(5), by_std=False)
    assert advantages_N.dtype == torch.float64
    assert advantages_N.tolist() == [5, -2, -11, 7, 1]


def test_mean_and_sample_std_are_those_of_each_group() -> None:
    advantages_N = grpo(f64([1, 0, 0, 1, 1, 1, 1, 0]), groups(4, 4), by_std=True)
    root3 = math.sqrt(1 / 3)
    expected = [0.5 / (root3 + 1e-6)] * 4 + [0.25 / (0.5 + 1e-6)] * 3 + [-0.75 / (0.5 + 1e-6)]
    expected[1] = expected[2] = -expected[0]
    torch.testing.assert_close(advantages_N, f64(expected), rtol=1e-14, atol=0)
    torch.testing.assert_close(advantages_N[:2], f64([0.8660, -0.8660]), rtol=0, atol=1e-4)


@pytest.mark.parametrize("by_std", [True, False])
def test_order_of_sequences_does_not_matter(by_std: bool) -> None:
    rewards_N, group_N = f64([1, 0, 0.5, 2, 0, 1, 7, -3]), groups(3, 5)
    whole_N = grpo(rewards_N, group_N, by_std=by_std)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        grpo(rewards_N[order], group_N[order], by_std=by_std), whole_N[order], rtol=1e-14, atol=0
    )
    alone_N = grpo(rewards_N[3:], groups(5), by_std=by_std)
    torch.testing.assert_close(whole_N[3:], alone_N, rtol=1e-14, atol=0)
    torch.testing.assert_close(group_means(whole_N, group_N), f64([0, 0]), rtol=0, atol=1e-15)


@pytest.mark.parametrize("by_std", [True, False])
@pytest.mark.parametrize(("reward", "size"), [(0.1, 8), (0.1, 3), (0.3, 7), (1.0, 1), (-1e9 / 7, 5)])
def test_a_constant_group_is_exactly_zero(reward: float, size: int, by_std: bool) -> None:
    """Also where the mean is not the reward: in float64 (0.1 + 0.1 + 0.1) / 3 is 0.10000000000000002."""
    for rewards_N in (f64([reward] * size), torch.full((size,), reward, dtype=torch.float32).double()):
        assert grpo(rewards_N, groups(size), by_std=by_std).tolist() == [0.0] * size


def test_a_real_but_tiny_spread_is_kept() -> None:
    advantages_N = grpo(f64([1.0, 1.0 + 1e-9]), groups(2), by_std=False)
    torch.testing.assert_close(advantages_N, f64([-5e-10, 5e-10]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("by_std", [True, False])
def test_unscored_samples_are_left_out_of_the_baseline(by_std: bool) -> None:
    rewards_N = f64([1, NAN, 3, NAN, 4, NAN, NAN, NAN])
    group_N = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2])
    unit = 1 / (math.sqrt(2) + 1e-6) if by_std else 1.0
    expected_N = f64([-unit, 0, unit, 0, 0, 0, 0, 0])
    torch.testing.assert_close(grpo(rewards_N, group_N, by_std=by_std), expected_N, rtol=1e-14, atol=0)
    torch.testing.assert_close(group_means(rewards_N, group_N), f64([2, 4, NAN]), equal_nan=True)


def test_no_sequences() -> None:
    empty_N = f64([])
    assert grpo(empty_N, groups(), by_std=True).shape == group_means(empty_N, groups()).shape == (0,)


def test_every_configurable_estimator_exists() -> None:
    assert ADVANTAGES["grpo"] is grpo
    assert set(ADVANTAGES) == {name.value for name in AdvEstimator}


def test_a_constant_group_still_takes_its_kl_gradient() -> None:
    """Two parameters, one token each: advantage 0 removes the policy loss, the documented KL stays."""
    advantages_N = grpo(f64([0.1] * 2), groups(2), by_std=True)
    logprobs_U = f64([-1.0, -2.0]).requires_grad_()
    ref_U = f64([-1.5, -1.0])
    batch = LossBatch(advantages_N, f64([0.5, 0.5]), ref_U, None, None, None, groups(1, 1))
    gradients = []
    for kl_coef in (0.0, 0.1):
        cfg = LossConfig(0.2, 0.2, 3.0, kl_coef, "k3", 0.0, None)
        out = vanilla(logprobs_U, None, batch, lambda x, _: x, cfg)
        gradients.append(torch.autograd.grad(out.loss_sum, logprobs_U)[0])
    assert gradients[0].tolist() == [0, 0]
    torch.testing.assert_close(gradients[1], 0.05 * (1 - (ref_U - logprobs_U.detach()).exp()))
