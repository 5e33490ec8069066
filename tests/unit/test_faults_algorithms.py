"""Faults that users of other trainers met, each with its stated values: B01-B04, B08, B09, B22-B27.

What takes worker processes or a toy tokenizer stands where those are set up; ELSEWHERE says where, and is checked.
"""

from __future__ import annotations

import ast
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from fastgrpo.algorithm.advantage import ADVANTAGES, Graded
from fastgrpo.algorithm.losses import POLICY_LOSSES, LossBatch, LossConfig
from fastgrpo.batch.denominators import token_weights_N
from fastgrpo.batch.packing import pack, slice_for_rank
from fastgrpo.config import DataConfig, LossAgg, ModelConfig, RolloutConfig, RunConfig, check
from fastgrpo.errors import ConfigError
from fastgrpo.groups import make_groups
from fastgrpo.records import Rollout, Sample, Score
from fastgrpo.reward.gsm8k import compute_score, last_number, number_after_marker
from fastgrpo.reward.math_answers import equal
from fastgrpo.reward.math_text import answer_text
from fastgrpo.summary import length_metrics

MODES = [mode.value for mode in LossAgg]


def f64(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def advantages(rewards: list[float], groups: list[int], by_std: bool = True) -> list[float]:
    graded = Graded(f64(rewards), torch.tensor(groups), torch.ones(len(rewards), dtype=torch.int64))
    return ADVANTAGES["grpo"](graded, by_std=by_std).tolist()


# ---- B01: over each prompt's group, not over the batch

B01 = [
    ([1, 0, 0, 1, 1, 1, 1, 0], [0] * 4 + [1] * 4, [0.8660, -0.8660, -0.8660, 0.8660, 0.5, 0.5, 0.5, -1.5]),
    (
        [1, 1, 0, 1, 0, 0, 1, 0],
        [0, 1, 0, 1, 0, 1, 1, 1],
        [1.1547, 0.7303, -0.5774, 0.7303, -0.5774, -1.0954, 0.7303, -1.0954],
    ),
]


@pytest.mark.parametrize(("rewards", "groups", "right"), B01)
def test_b01_advantages_of_each_group(rewards: list[float], groups: list[int], right: list[float]) -> None:
    """Sample deviation (ddof 1). Batch-wide it would be 0.7246 for every 1 and -1.2076 for every 0."""
    found = advantages(rewards, groups)
    assert found == pytest.approx(right, abs=1e-4)
    assert all(abs(sum(a for a, g in zip(found, groups, strict=True) if g == k)) < 1e-12 for k in set(groups))
    order = [5, 2, 7, 0, 3, 6, 1, 4]
    assert advantages([rewards[i] for i in order], [groups[i] for i in order]) == pytest.approx(
        [found[i] for i in order]
    )


# ---- B02: groups without signal


@pytest.mark.parametrize(("reward", "size"), [(0.1, 8), (0.3, 7), (1.0, 1)])
def test_b02_equal_rewards_have_no_advantage(reward: float, size: int) -> None:
    """Not 0.0074 or 0.415, not NaN: rounding of the mean over a tiny deviation."""
    rewards_N = torch.full((size,), reward, dtype=torch.float32).double().tolist()
    assert advantages(rewards_N, [0] * size) == [0.0] * size


def test_b02_their_kl_still_has_a_gradient() -> None:
    """On a toy policy of two parameters, kl_coef 0.1, policy != reference: as documented, the KL stays."""
    theta = f64([0.3, -0.2]).requires_grad_()
    features, ref = torch.arange(16, dtype=torch.float64).view(8, 2) / 10, f64([-0.9] * 8)
    logprobs = torch.nn.functional.logsigmoid(features @ theta)
    a = f64(advantages([0.1] * 8, [0] * 8))
    gradients = []
    for kl_coef in (0.0, 0.1):
        batch = LossBatch(a, f64([1 / 8] * 8), ref, None, None, torch.arange(8))
        out = POLICY_LOSSES["vanilla"](logprobs, None, batch, lambda x, _: x, LossConfig(kl_coef=kl_coef))
        gradients.append(torch.autograd.grad(out.loss_sum, theta, retain_graph=True)[0])
    assert gradients[0].tolist() == [0, 0]
    by_hand = torch.autograd.grad((0.1 / 8 * ((ref - logprobs).exp() - (ref - logprobs) - 1)).sum(), theta)[0]
    torch.testing.assert_close(gradients[1], by_hand)
    assert by_hand.abs().min() > 1e-4


# ---- B03: the cut and the padding


def summed(losses: list[list[float]], mode: str, cut: list[list[int]], pad: int) -> tuple[float, list[float]]:
    """Loss and gradient when token t of sequence i has loss `losses[i][t]`: reinforce with A = -loss at x = 1."""
    lengths = torch.tensor([len(x) for x in losses])
    weights = token_weights_N(lengths, torch.ones(len(losses), dtype=torch.bool), mode, max_response_length=16)
    total, gradient = 0.0, [[]] * len(losses)
    for rows in cut:
        a = f64([-x for i in rows for x in losses[i]] + [7.0] * pad)
        w = f64([weights[i].item() for i in rows for _ in losses[i]] + [0.0] * pad)
        x = torch.ones_like(a).requires_grad_()
        batch = LossBatch(a, w, None, None, None, torch.zeros(len(a), dtype=torch.int64))
        out = POLICY_LOSSES["reinforce"](x, None, batch, lambda x, _: x, LossConfig())
        (slope,) = torch.autograd.grad(out.loss_sum, x)
        total += out.loss_sum.item()
        for i, part in zip(rows, slope.split([*(len(losses[i]) for i in rows), pad]), strict=False):
            gradient[i] = part.tolist()
    return total, [x for part in gradient for x in part]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pad", [0, 4, 8])
@pytest.mark.parametrize("cut", [[[0, 1]], [[0], [1]], [[1], [0]], [[1, 0]]])
def test_b03_loss_and_gradient_do_not_depend_on_the_cut(mode: str, pad: int, cut: list[list[int]]) -> None:
    losses = [[3.0] * 2, [1.0] * 6]
    right = {
        "token-mean": 12 / 8,  # not 2.0
        "token-sum": 12.0,
        "seq-mean-token-sum": 6.0,
        "seq-mean-token-sum-norm": 0.375,  # not 2.0 or 1.2
        "seq-mean-token-mean": 2.0,
    }
    total, gradient = summed(losses, mode, cut, pad)
    assert total == pytest.approx(right[mode], rel=1e-14)
    assert gradient == pytest.approx(summed(losses, mode, [[0, 1]], 0)[1], rel=1e-14)


# ---- B04: clipping acts, and the clip fraction knows signs


def test_b04_clipped_surrogate() -> None:
    x = torch.tensor([1.5, 0.5, 1.5, 0.5], dtype=torch.float64).log().requires_grad_()
    batch = LossBatch(f64([1, -1, -1, 1]), f64([0.25] * 4), None, None, None, torch.arange(4))
    cfg = LossConfig(clip_low=0.2, clip_high=0.28)
    out = POLICY_LOSSES["vanilla"](x, torch.zeros(4, dtype=torch.float64), batch, lambda y, _: y, cfg)
    (slope,) = torch.autograd.grad(out.loss_sum, x)
    assert out.loss_sum.item() == pytest.approx(0.13)  # not 0
    assert slope.tolist() == pytest.approx([0, 0, 0.375, -0.125])
    assert (out.stats["clip_high"] / 4, out.stats["clip_low"] / 4) == (0.25, 0.25)


@pytest.mark.parametrize(("advantage", "loss", "gradient"), [(-1.0, 3.0, 0.0), (1.0, -1.28, 0.0)])
def test_b04_dual_clip_is_for_negative_advantages(advantage: float, loss: float, gradient: float) -> None:
    x = f64([math.log(5)]).requires_grad_()
    batch = LossBatch(f64([advantage]), f64([1.0]), None, None, None, torch.arange(1))
    out = POLICY_LOSSES["vanilla"](x, f64([0.0]), batch, lambda y, _: y, LossConfig(clip_high=0.28, clip_c=3.0))
    assert out.loss_sum.item() == pytest.approx(loss)
    assert torch.autograd.grad(out.loss_sum, x)[0].item() == gradient
    assert out.stats["dual_clip"] == (1 if advantage < 0 else 0)


# ---- B08, B09: masks and lengths


def rollout(response: list[int], reason: str, prompt: tuple[int, ...] = (3, 0, 4)) -> Rollout:
    mask = np.ones(len(response), np.bool_)
    return Rollout("p", 0, 0, prompt, np.asarray(response, np.int32), mask, None, reason, 0)


@pytest.mark.parametrize(
    ("response", "trained"),
    [([5, 6, 0], [5, 6, 0]), ([5, 6, 7, 8, 9], [5, 6, 7, 8, 9]), ([0], [0])],
)
def test_b08_an_end_token_that_equals_the_padding_is_trained(response: list[int], trained: list[int]) -> None:
    """pad = eos = 0, which the prompt holds as well: masks come from the engine's lengths, never from token ids."""
    rollouts = [rollout(response, "stop"), rollout([5, 6, 7, 8, 9], "length")]
    micro = pack(rollouts, [0, 1], sp=4, advantages_N=np.ones(2), weights_N=np.ones(2), pad_id=0)
    shards = [slice_for_rank(micro, rank, 4) for rank in range(4)]
    targets, owners = torch.cat([s.targets_R for s in shards]), torch.cat([s.seq_id_R for s in shards])
    assert targets[owners == 0].tolist() == trained
    assert len(targets) == len(trained) + 5
    assert micro.input_ids_T[:3].tolist() == [3, 0, 4]  # the prompt's 0 is seen
    assert length_metrics([rollouts[0]])["response_length/mean"] == len(trained)


@pytest.mark.parametrize(("filtering", "denominator"), [(True, 10), (False, 18)])
def test_b09_lengths_are_those_drawn(filtering: bool, denominator: int) -> None:
    samples = [
        Sample(rollout([5] * length, reason), "", Score(score, {"a": score}, {}, "scored"))
        for length, reason, score in ((4, "stop", 1.0), (8, "length", 0.0), (6, "stop", 0.5))
    ]
    metrics = length_metrics([sample.rollout for sample in samples])
    named = {name: metrics[f"response_length/{name}"] for name in ("min", "mean", "max", "stopped_mean", "truncated")}
    assert named == {"min": 4, "mean": 6, "max": 8, "stopped_mean": 5, "truncated": pytest.approx(1 / 3)}
    config = RunConfig(rollout=RolloutConfig(n=3))
    config.algorithm.overlong_filtering = filtering
    counted_N = make_groups(samples, config).counted_N
    weights_N = token_weights_N(torch.tensor([4, 8, 6]), counted_N, "token-mean", max_response_length=8)
    assert weights_N[0].item() == pytest.approx(1 / denominator)


@pytest.mark.parametrize("mode", MODES)
def test_b09_all_truncated(mode: str) -> None:
    weights_N = token_weights_N(torch.tensor([8, 8]), torch.zeros(2, dtype=torch.bool), mode, max_response_length=8)
    assert weights_N.tolist() == [0, 0]


# ---- B22: lengths that do not fit


def test_b22_lengths_are_compared_at_the_start() -> None:
    """max_prompt 12, max_response 8, max_model_len 16."""
    config = RunConfig(
        model=ModelConfig(path="a/b"),
        data=DataConfig(train_files=["arithmetic"], max_prompt_length=12, max_response_length=8),
        rollout=RolloutConfig(n=2, max_model_len=16),
    )
    with pytest.raises(ConfigError) as refused:
        check(config, 1, needs_reward=False)
    assert all(number in str(refused.value) for number in ("max_prompt_length=12", "max_response_length=8", "len=16"))
    config.rollout.max_model_len = 20
    check(config, 1, needs_reward=False)


# ---- B23, B24: answers

B23 = [
    ("#### -3", -3), ("#### +7", 7), ("#### $1,234.50", 1234.5), ("#### 29.00", 29), ("#### 70000", 70_000),
    ("#### 18.", 18), ("#### 50%", 50), ("#### 5 apples", 5), ("####", None), ("", None), ("#### \u22124", -4),
    ("####42", 42), ("#### 5 ... #### 7", 7), ("<<2*3=6>>6 #### 6", 6),
]  # fmt: skip


@pytest.mark.parametrize(("response", "value"), B23)
def test_b23_gsm8k_answers(response: str, value: float | None) -> None:
    found = number_after_marker(response)
    assert (None if found is None else float(found)) == value
    if value is not None:
        assert compute_score(response, f"#### {value}")["score"] == 1.0  # type: ignore[index]
        assert compute_score(response, f"#### {-value}")["score"] == 0.0  # type: ignore[index]


def test_b23_last_number_and_separators_in_the_reference() -> None:
    assert last_number("it is 3 5") == 5
    assert compute_score("#### 70000", "#### 70,000")["score"] == 1.0  # type: ignore[index]
    assert compute_score("", "#### 5")["score"] == compute_score("####", "#### 5")["score"] == 0.0  # type: ignore[index]


B24 = [
    (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"), (r"\fbox{42}", "42"), (r"\boxed{5} wrong, so \boxed{7}", "7"),
    (r"\boxed {8}", "8"), (r"\boxed{\text{a} {b}}", r"\text{a} {b}"), (r"\boxed{3", None), ("maybe 42", None),
    (r"<answer>\boxed{6}</answer>", "6"),
]  # fmt: skip


@pytest.mark.parametrize(("response", "answer"), B24)
def test_b24_boxed_answers(response: str, answer: str | None) -> None:
    assert answer_text(response, True) == answer


@pytest.mark.parametrize("inside", ["x", "{x}", "{{}}", r"a{b{c}d}e", r"\frac{1}{\sqrt{2}}"])
def test_b24_a_box_returns_what_was_put_in(inside: str) -> None:
    assert answer_text(rf"so \boxed{{{inside}}}", True) == inside


# ---- B25: verdicts that a symbolic verifier got wrong


def test_b25_verdicts() -> None:
    assert not equal("1/2004!", "1/2006!")


# ---- what needs processes or tokenizers

ELSEWHERE = {
    "B22": [("test_data_prompts.py", "test_overlong_prompts_are_dropped_by_their_templated_length_and_counted")],
    "B25": [
        ("test_reward_runner.py", "test_bad_samples_beside_good_ones"),
        ("test_reward_runner.py", "test_from_a_thread_and_from_a_loop"),
    ],
    "B26": [
        ("test_reward_runner.py", "test_bad_returns"),
        ("test_reward_runner.py", "test_a_bad_return_ends_the_run"),
        ("test_reward_signature.py", "test_what_a_batch_may_not_return"),
        ("../e2e/test_train.py", "test_a_reward_that_fails_on_one_rank_ends_all_ranks"),
    ],
    "B27": [
        ("test_data_prompts.py", "test_one_bos_when_template_and_tokenizer_both_write_it"),
        ("test_data_prompts.py", "test_template_without_bos_is_followed_though_the_tokenizer_adds_one"),
    ],
}


@pytest.mark.parametrize("fault", ELSEWHERE)
def test_the_others_are_where_they_are_said_to_be(fault: str) -> None:
    for name, test in ELSEWHERE[fault]:
        tree = ast.parse((Path(__file__).parent / name).read_text(encoding="utf-8"))
        assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
