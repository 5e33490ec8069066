"""Properties of what everything else rests on, over random input: few examples by default, many among the slow tests.

Packing and the shares of sequence-parallel ranks are in test_packing.py; here their plan, denominators, advantages,
Ulysses' two exchanges, and what becomes of answers and command lines nobody thought of.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastgrpo.algorithm.advantage import ADVANTAGES, Graded
from fastgrpo.batch.denominators import token_weights_N
from fastgrpo.batch.packing import plan
from fastgrpo.compose import read_config
from fastgrpo.config import Layout, LossAgg, check, option_keys
from fastgrpo.errors import ConfigError
from fastgrpo.policy.ulysses import heads_to_tokens, repeat_kv, tokens_to_heads
from fastgrpo.reward.gsm8k import compute_score, last_number, number_after_marker
from fastgrpo.reward.math_answers import equal

FEW, MANY = 25, 500
amounts = pytest.mark.parametrize("examples", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])


def check_with(examples: int, **strategies: Any) -> Callable[[Callable[..., None]], None]:
    """Run the decorated function on that many random arguments."""

    def run(holds: Callable[..., None]) -> None:
        slack = [HealthCheck.too_slow, HealthCheck.filter_too_much]
        settings(max_examples=examples, deadline=None, suppress_health_check=slack)(given(**strategies)(holds))()

    return run


lengths = st.lists(st.integers(1, 40), max_size=40)


@amounts
def test_plan(examples: int) -> None:
    @check_with(examples, lengths=lengths, dp=st.integers(1, 5), sp=st.sampled_from([1, 2, 4]), most=st.integers(1, 4))
    def holds(lengths: list[int], dp: int, sp: int, most: int) -> None:
        found = plan(lengths, dp=dp, max_tokens=40, max_sequences=most, sp=sp, cost=lambda s: s + 0.01 * s * s)
        assert sorted(index for row in found for one in row for index in one) == list(range(len(lengths)))
        assert all(len(row) == dp for row in found)
        for one in (one for row in found for one in row):
            padded = -(-sum(lengths[index] for index in one) // sp) * sp
            assert padded <= 40 and len(one) <= most


@amounts
@pytest.mark.parametrize("mode", [mode.value for mode in LossAgg])
def test_denominators(mode: str, examples: int) -> None:
    """The order of the sequences, and others that are not in the batch, change no weight; what is left out has none;
    the weighted number of tokens is that of the formula."""

    def weights(tokens: list[int], mask: list[bool]) -> list[float]:
        return token_weights_N(torch.tensor(tokens), torch.tensor(mask), mode, max_response_length=64).tolist()

    @check_with(examples, data=st.data(), tokens=st.lists(st.integers(0, 50), min_size=1, max_size=9))
    def holds(data: st.DataObject, tokens: list[int]) -> None:
        mask = data.draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens)))
        found, order = weights(tokens, mask), data.draw(st.permutations(range(len(tokens))))
        assert weights([tokens[i] for i in order], [mask[i] for i in order]) == pytest.approx([found[i] for i in order])
        assert weights([*tokens, 7], [*mask, False]) == pytest.approx([*found, 0.0])
        inside = [n for n, counted in zip(tokens, mask, strict=True) if counted]
        total = sum(w * n for w, n in zip(found, tokens, strict=True))
        trained = [n for n in inside if n]
        expected = {
            "token-mean": 1.0 if trained else 0.0,
            "token-sum": float(sum(inside)),
            "seq-mean-token-sum": sum(inside) / max(1, len(inside)),
            "seq-mean-token-sum-norm": sum(inside) / max(1, len(inside)) / 64,
            "seq-mean-token-mean": len(trained) / max(1, len(inside)),
        }[mode]
        assert total == pytest.approx(expected) and all(w >= 0 and math.isfinite(w) for w in found)


rewards = st.lists(st.one_of(st.floats(-100, 100), st.just(math.nan)), min_size=4, max_size=24)


@amounts
@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_advantages(name: str, examples: int) -> None:
    """Finite whatever the rewards, 0 for what was not scored; members in any order get the same; a constant on top of
    all rewards changes nothing where an estimator compares within the group."""

    def estimate(rewards: list[float], groups: list[int], tokens: list[int]) -> list[float]:
        values = torch.tensor(rewards, dtype=torch.float64)
        one = Graded(values, torch.tensor(groups), torch.tensor(tokens), values[:, None], torch.ones(1).double())
        return ADVANTAGES[name](one, by_std=True).tolist()

    @check_with(examples, data=st.data(), rewards=rewards)
    def holds(data: st.DataObject, rewards: list[float]) -> None:
        size = len(rewards)
        groups = [i % 3 for i in range(size)]
        tokens = data.draw(st.lists(st.integers(1, 99), min_size=size, max_size=size))
        found = estimate(rewards, groups, tokens)
        assert all(map(math.isfinite, found))
        assert all(a == 0 for a, r in zip(found, rewards, strict=True) if math.isnan(r))
        order = data.draw(st.permutations(range(size)))
        mixed = estimate(*([values[i] for i in order] for values in (rewards, groups, tokens)))
        assert mixed == pytest.approx([found[i] for i in order], rel=1e-6, abs=1e-6)

    @check_with(examples, whole=st.lists(st.integers(-9, 9), min_size=4, max_size=12), shift=st.integers(-5, 5))
    def is_relative(whole: list[int], shift: int) -> None:
        groups, tokens = [i % 2 for i in range(len(whole))], [5] * len(whole)
        found = estimate([float(r) for r in whole], groups, tokens)
        moved = estimate([float(r + shift) for r in whole], groups, tokens)
        if name != "reinforce_plus_plus":  # compares over the batch alone, and does so after a discount
            assert moved == pytest.approx(found, abs=1e-6)
        if name in ("grpo", "dr_grpo", "rloo"):
            for group in (0, 1):
                assert sum(a for a, g in zip(found, groups, strict=True) if g == group) == pytest.approx(0, abs=1e-9)


def exchange(shapes: list[tuple[int, int, int, int]]) -> bool:
    """Whether, for each (tokens a rank, heads, key-value heads, head size), splitting by heads and gathering by tokens
    are what slices of the whole are, and each is the other's inverse in values and gradients."""
    group, rank, sp = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    for number, (tokens, heads, kv_heads, size) in enumerate(shapes):
        generator = torch.Generator().manual_seed(number)
        for own_heads in (heads, kv_heads):
            whole = torch.randn(tokens * sp, own_heads, size, generator=generator)
            part = whole[rank * tokens : (rank + 1) * tokens].clone().requires_grad_()
            split = tokens_to_heads(repeat_kv(part, sp), group)
            repeated = repeat_kv(whole, sp)
            share = repeated.shape[1] // sp
            right = torch.equal(split, repeated[:, rank * share : (rank + 1) * share])
            back = heads_to_tokens(split, group)
            weight = torch.randn(back.shape, generator=generator)
            (back * weight).sum().backward()
            copies = weight.view(tokens, own_heads, -1, size).sum(2) if repeated.shape[1] != own_heads else weight
            if not (right and torch.equal(back, repeat_kv(part, sp)) and torch.allclose(part.grad, copies, atol=1e-6)):
                return False
    return True


@amounts
def test_ulysses_splits_and_gathers(examples: int, ranks: Any) -> None:
    shapes: list[tuple[int, int, int, int]] = []
    shape = st.tuples(st.integers(1, 7), st.sampled_from([2, 4, 6, 8]), st.sampled_from([1, 2, 4]), st.integers(1, 5))

    @check_with(examples, shape=shape)
    def collect(shape: tuple[int, int, int, int]) -> None:
        shapes.append(shape)

    assert len(shapes) >= 10 and ranks(2).run(exchange, shapes) == [True, True]


numbers = st.one_of(st.integers(-(10**9), 10**9), st.decimals(-9999, 9999, allow_nan=False, places=2))


@amounts
def test_answers(examples: int) -> None:
    """A number comes back however it is written; any text gives a score and no error."""

    @check_with(examples, number=numbers, before=st.text(max_size=30), sign=st.sampled_from(["", "$", "€"]))
    def a_number_comes_back(number: Any, before: str, sign: str) -> None:
        written = f"{number:,}" if not sign else f"{'-' if number < 0 else ''}{sign}{abs(number):,}"
        assert number_after_marker(f"{before}\n#### {written}") == number
        assert last_number(f"so it is {written}") == number
        assert compute_score(f"#### {written}", f"{number}")["score"] == 1.0

    @check_with(examples, response=st.text(max_size=80), reference=st.one_of(st.none(), st.text(max_size=20)))
    def any_text_has_a_score(response: str, reference: str | None) -> None:
        for strict in (True, False):
            assert compute_score(response, reference, strict, 0.1)["score"] in (None, 0.0, 0.1, 1.0)

    @check_with(examples, a=st.integers(-999, 999), b=st.integers(1, 99))
    def fractions_are_exact(a: int, b: int) -> None:
        assert equal(rf"\frac{{{a}}}{{{b}}}", rf"\frac{{{2 * a}}}{{{2 * b}}}")
        assert not equal(rf"\frac{{{a}}}{{{b}}}", rf"\frac{{{a + 1}}}{{{b}}}")


VALUES = st.one_of(
    st.integers(-3, 9).map(str),
    st.floats(-2, 2).map(repr),
    st.sampled_from(
        ["true", "false", "null", "None", "'0.3'", "1_1", "yes", "[]", "[1,2]", "{a: 1}", "''", "1e-6", "inf"]
    ),
    st.sampled_from(
        ["grpo", "token-mean", "auto", "cosine", "bfloat16", "${rollout.n}", "${nowhere}", "a b", "(", "ü"]
    ),
    st.text(max_size=6),
)
KEYS = st.one_of(
    st.sampled_from([key for key in option_keys() if "<" not in key and "[" not in key]),
    st.sampled_from(
        ["actor", "rollout.m", "algorithm", "reward.functions.answer.kind", "hydra.run.dir", "x.y", "", "-h"]
    ),
    st.text(alphabet="abcdefg._+~@-", max_size=8),
)


@pytest.mark.parametrize("examples", [12, pytest.param(300, marks=pytest.mark.slow)])
def test_any_command_line_is_a_configuration_or_one_message(examples: int) -> None:
    outcomes: list[bool] = []

    @check_with(examples, pairs=st.lists(st.tuples(KEYS, VALUES), min_size=1, max_size=2), ranks=st.integers(1, 4))
    def holds(pairs: list[tuple[str, str]], ranks: int) -> None:
        argv = ["+exp=quickstart", *(f"{key}={value}" for key, value in pairs)]
        try:
            config = read_config(argv)
            assert isinstance(check(config, ranks), Layout)
            outcomes.append(True)
        except ConfigError as error:  # and nothing else
            assert str(error).strip() and "Traceback" not in str(error)
            outcomes.append(False)

    assert not all(outcomes)


def test_some_random_command_lines_are_good() -> None:
    assert read_config(["+exp=quickstart", "rollout.n=4"]).rollout.n == 4
