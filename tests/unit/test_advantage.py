"""Every estimator against formulas written in plain floats, and against what is known without computing: groups without
signal, unscored samples, order, odd sizes.
"""

import math
import random
import statistics

import pytest
import torch

from fastgrpo.algorithm.advantage import ADVANTAGES, Graded, gdpo, group_means, group_spreads, grpo, opo, rloo
from fastgrpo.algorithm.losses import POLICY_LOSSES, LossBatch, LossConfig
from fastgrpo.config import AdvEstimator

NAN = float("nan")
NAMES = list(ADVANTAGES)
OF_A_GROUP = ["grpo", "dr_grpo", "rloo", "opo", "grpo_passk"]


def f64(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def groups(*sizes: int) -> torch.Tensor:
    return torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes, dtype=torch.int64))


def graded(rewards: list[float], group_N: torch.Tensor, tokens: list[int] | None = None) -> Graded:
    """With two reward functions, whose sum with weights 1 and 0.5 is the reward."""
    rewards_N = f64(rewards)
    second_N = torch.arange(len(rewards), dtype=torch.float64).remainder(3)
    scores_NF = torch.stack([rewards_N - 0.5 * second_N, second_N], dim=1)
    tokens_N = torch.tensor([1] * len(rewards) if tokens is None else tokens, dtype=torch.int64)
    return Graded(rewards_N, group_N, tokens_N, scores_NF, f64([1.0, 0.5]))


# ---- the formulas, in floats, over lists; a group is a list of indexes


def reference(name: str, data: Graded, by_std: bool) -> list[float]:
    rewards, tokens = data.rewards_N.tolist(), data.tokens_N.tolist()
    scored = [i for i, r in enumerate(rewards) if not math.isnan(r)]
    members: dict[int, list[int]] = {}
    for i in scored:
        members.setdefault(data.group_N[i].item(), []).append(i)
    out = [0.0] * len(rewards)
    if name == "gdpo":
        assert data.scores_NF is not None and data.weights_F is not None
        for f, weight in enumerate(data.weights_F.tolist()):
            scores = data.scores_NF[:, f].tolist()
            for group in members.values():
                for i, a in zip(group, grpo_of([scores[i] for i in group], by_std), strict=True):
                    out[i] += weight * a
        return whitened(out, tokens, scored)
    if name == "reinforce_plus_plus":
        return whitened([0.0 if math.isnan(r) else r for r in rewards], tokens, scored)
    for group in members.values():
        r, n = [rewards[i] for i in group], len(group)
        total = sum(tokens[i] for i in group)
        if name in ("dr_grpo", "reinforce_plus_plus_baseline") or (name == "grpo" and not by_std):
            a = [x - statistics.fmean(r) if max(r) > min(r) else 0.0 for x in r]
        elif name == "grpo":
            a = grpo_of(r, True)
        elif name == "rloo":
            a = [x - (sum(r) - x) / (n - 1) if n > 1 else 0.0 for x in r]
        elif name == "opo":
            baseline = sum(tokens[i] * rewards[i] for i in group) / total if total else 0.0
            a = [x - baseline if max(r) > min(r) and total else 0.0 for x in r]
        else:
            first, second = ([*sorted(r, reverse=True), *r])[:2]
            lead = first - second if n > 1 else 0.0
            scale = statistics.stdev(r) + 1e-6 if by_std and n > 1 else 1.0
            a = [lead / scale if x == first else 0.0 for x in r]
        for i, x in zip(group, a, strict=True):
            out[i] = x
    return whitened(out, tokens, scored) if name == "reinforce_plus_plus_baseline" else out


def grpo_of(r: list[float], by_std: bool) -> list[float]:
    if max(r) == min(r):
        return [0.0] * len(r)
    return [(x - statistics.fmean(r)) / (statistics.stdev(r) + 1e-6 if by_std else 1.0) for x in r]


def whitened(x: list[float], tokens: list[int], scored: list[int]) -> list[float]:
    every = [x[i] for i in scored for _ in range(tokens[i])]  # token by token
    if len(set(every)) < 2:
        return [0.0] * len(x)
    mean, variance = statistics.fmean(every), statistics.variance(every)
    return [(x[i] - mean) / math.sqrt(variance + 1e-8) if i in scored and tokens[i] else 0.0 for i in range(len(x))]


@pytest.mark.parametrize("by_std", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_against_the_formula_on_ragged_groups(name: str, by_std: bool) -> None:
    rng = random.Random(name)
    sizes = [5, 1, 3, 8, 2, 4]
    rewards = [rng.choice([0.0, 1.0, 0.1, rng.gauss(0, 2), NAN]) for _ in range(sum(sizes))]
    rewards[:5] = [1.0, 1.0, NAN, 1.0, 1.0]
    data = graded(rewards, groups(*sizes), [rng.choice([0, 1, 7, 300]) for _ in rewards])
    found_N = ADVANTAGES[name](data, by_std=by_std)
    assert found_N.dtype == torch.float64
    assert found_N.tolist() == pytest.approx(reference(name, data, by_std), rel=1e-10, abs=1e-12)
    assert len({round(x, 6) for x in found_N.tolist()}) >= 3  # it says something


@pytest.mark.parametrize("name", NAMES)
def test_order_of_sequences_does_not_matter(name: str) -> None:
    rewards, sizes, tokens = [1, 0, 0.5, 2, 0, 1, 7, -3], (3, 5), [3, 1, 4, 1, 5, 9, 2, 6]
    data = graded(rewards, groups(*sizes), tokens)
    whole_N = ADVANTAGES[name](data, by_std=True)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    assert data.scores_NF is not None
    mixed = Graded(
        data.rewards_N[order], data.group_N[order], data.tokens_N[order], data.scores_NF[order], data.weights_F
    )
    torch.testing.assert_close(ADVANTAGES[name](mixed, by_std=True), whole_N[order], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", OF_A_GROUP)
def test_a_group_is_compared_with_itself_alone(name: str) -> None:
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    whole_N = ADVANTAGES[name](graded([1, 0, 0.5, 2, 0, 1, 7, -3], groups(3, 5), tokens), by_std=True)
    alone_N = ADVANTAGES[name](graded([2, 0, 1, 7, -3], groups(5), tokens[3:]), by_std=True)
    torch.testing.assert_close(whole_N[3:], alone_N, rtol=1e-14, atol=0)


@pytest.mark.parametrize("by_std", [True, False])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("reward", "size"), [(0.1, 8), (0.1, 3), (0.3, 7), (1.0, 1), (-1e9 / 7, 5)])
def test_a_step_of_equal_rewards_is_exactly_zero(reward: float, size: int, name: str, by_std: bool) -> None:
    """Also where the mean is not the reward: in float64 (0.1 + 0.1 + 0.1) / 3 is 0.10000000000000002."""
    for rewards_N in (f64([reward] * size), torch.full((size,), reward, dtype=torch.float32).double()):
        tokens_N = torch.arange(1, size + 1)
        data = Graded(rewards_N, groups(size), tokens_N, rewards_N.unsqueeze(1), f64([1.0]))
        assert ADVANTAGES[name](data, by_std=by_std).tolist() == [0.0] * size


@pytest.mark.parametrize("name", OF_A_GROUP)
def test_a_group_without_signal_is_exactly_zero_beside_others(name: str) -> None:
    data = graded([0.1, 0.1, 0.1, 1, 0, 5], groups(3, 2, 1), [3, 5, 2, 2, 2, 2])
    found = ADVANTAGES[name](data, by_std=True).tolist()
    assert found[:3] == [0, 0, 0] and found[5] == 0 and found[3] > 0


def test_whitening_is_over_tokens() -> None:
    """Rewards 1 (3 tokens) and 0 (1 token): mean 3/4, variance (3/16 * 3 + 9/16) / 3 = 1/4."""
    found = ADVANTAGES["reinforce_plus_plus"](graded([1, 0], groups(1, 1), [3, 1]), by_std=True)
    assert found.tolist() == pytest.approx([0.5, -1.5], rel=1e-6)


def test_baselines_by_hand() -> None:
    rewards, group_N = [1.0, 0.0, 0.0, 3.0], groups(4)
    assert rloo(graded(rewards, group_N), by_std=True).tolist() == pytest.approx([0, -4 / 3, -4 / 3, 8 / 3])
    lengths = [1, 1, 2, 4]  # baseline (1 + 12) / 8
    expected = [1 - 13 / 8, -13 / 8, -13 / 8, 3 - 13 / 8]
    assert opo(graded(rewards, group_N, lengths), by_std=True).tolist() == pytest.approx(expected)
    passk = ADVANTAGES["grpo_passk"]
    assert passk(graded(rewards, group_N), by_std=False).tolist() == [0, 0, 0, 2]
    assert passk(graded([3.0, 0, 3.0], groups(3)), by_std=False).tolist() == [0, 0, 0]  # a shared best leads nobody


def test_gdpo_keeps_apart_what_a_sum_would_drown() -> None:
    """Right or wrong (1, 0) beside a length score of hundreds: the sum follows the length alone, gdpo counts both."""
    right, length = [1.0, 1.0, 0.0, 0.0], [100.0, 300.0, 200.0, 400.0]
    total = [a + b for a, b in zip(right, length, strict=True)]
    data = Graded(
        f64(total), groups(4), torch.ones(4, dtype=torch.int64), f64([*right, *length]).view(2, 4).T, f64([1, 1])
    )
    by_sum, apart = grpo(data, by_std=True).tolist(), gdpo(data, by_std=True).tolist()
    assert by_sum[0] < by_sum[2] and apart[0] > apart[2]
    with pytest.raises(ValueError, match="scores_NF"):
        gdpo(Graded(data.rewards_N, data.group_N, data.tokens_N), by_std=True)


def test_without_std_the_group_mean_is_taken_off() -> None:
    for name in ("grpo", "dr_grpo"):
        assert ADVANTAGES[name](graded([92, 85, 76, 94, 88], groups(5)), by_std=False).tolist() == [5, -2, -11, 7, 1]


def test_a_real_but_tiny_spread_is_kept() -> None:
    advantages_N = grpo(graded([1.0, 1.0 + 1e-9], groups(2)), by_std=False)
    torch.testing.assert_close(advantages_N, f64([-5e-10, 5e-10]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("by_std", [True, False])
def test_unscored_samples_are_left_out_of_the_baseline(by_std: bool) -> None:
    data = graded([1, NAN, 3, NAN, 4, NAN, NAN, NAN], torch.tensor([0, 0, 0, 1, 1, 1, 2, 2]))
    unit = 1 / (math.sqrt(2) + 1e-6) if by_std else 1.0
    expected_N = f64([-unit, 0, unit, 0, 0, 0, 0, 0])
    torch.testing.assert_close(grpo(data, by_std=by_std), expected_N, rtol=1e-14, atol=0)
    torch.testing.assert_close(group_means(data.rewards_N, data.group_N), f64([2, 4, NAN]), equal_nan=True)
    assert group_spreads(data.rewards_N, data.group_N).tolist() == [2, 0, 0]


@pytest.mark.parametrize("name", NAMES)
def test_no_sequences_and_nothing_scored(name: str) -> None:
    assert ADVANTAGES[name](graded([], groups()), by_std=True).shape == (0,)
    assert ADVANTAGES[name](graded([NAN, NAN], groups(2)), by_std=True).tolist() == [0, 0]


def test_every_configurable_estimator_exists() -> None:
    assert set(ADVANTAGES) == {name.value for name in AdvEstimator}


def test_a_constant_group_still_takes_its_kl_gradient() -> None:
    """Two parameters, one token each: advantage 0 removes the policy loss, the documented KL stays."""
    advantages_N = grpo(graded([0.1] * 2, groups(2)), by_std=True)
    logprobs_U = f64([-1.0, -2.0]).requires_grad_()
    ref_U = f64([-1.5, -1.0])
    batch = LossBatch(advantages_N, f64([0.5, 0.5]), ref_U, None, None, groups(1, 1))
    gradients = []
    for kl_coef in (0.0, 0.1):
        out = POLICY_LOSSES["vanilla"](logprobs_U, None, batch, lambda x, _: x, LossConfig(kl_coef=kl_coef))
        gradients.append(torch.autograd.grad(out.loss_sum, logprobs_U)[0])
    assert gradients[0].tolist() == [0, 0]
    torch.testing.assert_close(gradients[1], 0.05 * (1 - (ref_U - logprobs_U.detach()).exp()))
