"""Validation metrics against counting by hand, by brute force over all draws, and against what was drawn at random."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import combinations
from statistics import fmean

import numpy as np
import pytest

from fastgrpo.evaluate import summarise
from fastgrpo.records import STATUSES, Rollout, Sample, Score
from fastgrpo.reward import gsm8k
from fastgrpo.reward.choice import compute_score as choice
from fastgrpo.reward.function import Outcome, RewardFunction, read_return
from fastgrpo.reward.math_answers import compute_score as math_score
from fastgrpo.reward.total import total
from fastgrpo.val_metrics import by_set, in_words, majority, normal, pass_at_k, powers_of_2, set_metrics, wilson


def sample(uid: str, number: int, reward: float | None, pred: str | None = None) -> Sample:
    empty = np.zeros(0, np.int32)
    rollout = Rollout(uid, number, 0, (1,), empty, empty.astype(bool), None, "stop", 0)
    status = "unscored" if reward is None else "scored"
    return Sample(rollout, "", Score(reward, {"r": reward}, {}, status, pred=pred))


def prompt(uid: str, rewards: list[float | None], preds: list[str | None] | None = None) -> list[Sample]:
    return [sample(uid, i, r, preds[i] if preds else None) for i, r in enumerate(rewards)]


@pytest.mark.parametrize("n", [1, 2, 5, 6])
def test_pass_at_k_is_the_share_of_all_draws_that_hold_one_that_passes(n: int) -> None:
    for c in range(n + 1):
        marks = [True] * c + [False] * (n - c)
        for k in range(1, n + 1):
            draws = [any(draw) for draw in combinations(marks, k)]
            assert pass_at_k(n, c, k) == pytest.approx(fmean(draws), abs=1e-15)


def test_pass_at_k_at_large_numbers() -> None:
    assert pass_at_k(100_000, 1, 50_000) == 0.5
    assert pass_at_k(10_000, 0, 100) == 0 and pass_at_k(10_000, 9_901, 100) == 1
    assert pass_at_k(2000, 1, 1) == 1 / 2000
    assert [powers_of_2(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_pass_at_k_does_not_depend_on_n_in_the_mean() -> None:
    """Unbiased: over draws of n samples its mean is 1 - (1 - p)^k, whatever n."""
    p, k = 0.3, 2
    for n in (2, 3, 8):
        mean = sum(math.comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at_k(n, c, k) for c in range(n + 1))
        assert mean == pytest.approx(1 - (1 - p) ** k, abs=1e-14)


def test_wilson_by_hand_and_at_the_ends() -> None:
    """10 of 20, and the closed form at 0 and 1: z^2 / (n + z^2)."""
    low, high = wilson([1.0] * 10 + [0.0] * 10)
    assert (low, high) == (pytest.approx(0.299298, abs=1e-6), pytest.approx(0.700702, abs=1e-6))
    z2 = 1.959963984540054**2
    assert wilson([0.0] * 30) == (0.0, pytest.approx(z2 / (30 + z2)))
    assert wilson([1.0] * 30) == (pytest.approx(30 / (30 + z2)), 1.0)


def test_wilson_covers() -> None:
    """Of 2000 sets of 40 prompts, pass@2 of 4 samples with its true value: at least 95 % of the intervals hold it."""
    rng = random.Random(0)
    chances = [rng.random() ** 2 for _ in range(4000)]
    truth = fmean(1 - (1 - p) ** 2 for p in chances)
    held = 0
    for _ in range(2000):
        drawn = [sum(rng.random() < p for _ in range(4)) for p in rng.sample(chances, 40)]
        low, high = wilson([pass_at_k(4, c, 2) for c in drawn])
        held += low <= truth <= high
    assert held / 2000 >= 0.95


def test_normal_interval() -> None:
    values = [0.0, 2.0, 4.0, 6.0]
    half = 1.959963984540054 * np.std(values, ddof=1) / 2
    assert normal(values) == (pytest.approx(3 - half), pytest.approx(3 + half))
    assert normal([0.5]) == (0.5, 0.5)


@pytest.mark.parametrize(
    ("answers", "passed", "expected"),
    [
        (["7", "7", "8"], [True, True, False], 1.0),
        (["8", "7", "8"], [False, True, False], 0.0),
        (["7", "8", "7", "8", "9"], [True, False, True, False, False], 0.5),  # two answers, equally frequent
        ([None, None, "7"], [False, False, True], 1.0),  # no answer has no vote
        ([None, None], [False, False], 0.0),
        (["7"], [True], 1.0),
    ],
)
def test_majority(answers: list[str | None], passed: list[bool], expected: float) -> None:
    assert majority(answers, passed) == expected


def test_a_set_by_hand() -> None:
    """Three prompts of four samples; the second has one that was not scored, the third none that was."""
    samples = [
        *prompt("a/val/0", [1.0, 0.0, 0.1, 1.0], ["7", "8", "8", "7"]),
        *prompt("a/val/1", [0.0, None, 1.0, 0.0], ["1", None, "2", "1"]),
        *prompt("a/val/2", [None] * 4),
    ]
    found = set_metrics(samples, 1.0)
    assert (found["scored"], found["unscored"]) == (7, 5)
    assert found["mean@4"] == pytest.approx((2.1 / 4 + 1 / 3) / 2)
    assert (found["mean@4/low"], found["mean@4/high"]) == pytest.approx(normal([2.1 / 4, 1 / 3]))
    assert found["pass@1"] == pytest.approx((2 / 4 + 1 / 3) / 2)
    assert found["pass@2"] == pytest.approx(((1 - 1 / 6) + (1 - 1 / 3)) / 2)
    assert found["pass@4"] == 1.0  # of the first prompt alone: the second has three scored samples
    assert (found["pass@4/low"], found["pass@4/high"]) == wilson([1.0])
    assert found["maj@4"] == (0.5 + 0.0) / 2
    assert "pass@3" not in found and "pass@2/high" in found
    assert set_metrics(samples, 0.05)["pass@1"] == pytest.approx((3 / 4 + 1 / 3) / 2)  # another bar
    assert "maj@4" not in set_metrics(prompt("a/val/0", [1.0] * 4), 1.0)  # nothing says what the answers are
    assert set_metrics(prompt("a/val/0", [None]), 1.0) == dict.fromkeys(STATUSES, 0.0) | {"unscored": 1.0}
    lost = [replace(s, score=replace(s.score, status="error")) for s in samples[-4:]]
    counts = {key: set_metrics([*samples[:-4], *lost], 1.0)[key] for key in STATUSES}
    assert counts == {"scored": 7.0, "unscored": 1.0, "timeout": 0.0, "error": 4.0}
    assert set_metrics(prompt("a/val/0", [0.7 + 0.2 + 0.1]), 1.0)["pass@1"] == 1  # 0.9999999999999999


def test_sets_are_reported_by_their_own_names() -> None:
    samples = [*prompt("openai/gsm8k/val/0", [1.0, 0.0]), *prompt("aime/val/0", [0.0, 0.0])]
    assert {name: len(found) for name, found in by_set(samples).items()} == {"openai/gsm8k": 2, "aime": 2}
    result = summarise(samples, 1.0)
    assert result.score == result.metrics["val/reward"] == 0.25
    assert (result.metrics["val/openai/gsm8k/mean@2"], result.metrics["val/aime/mean@2"]) == (0.5, 0.0)
    assert (result.metrics["val/openai/gsm8k/pass@2"], result.metrics["val/aime/pass@2"]) == (1.0, 0.0)
    assert in_words(result.sets["aime"]).startswith("mean@2 0.000 [0.000, 0.000], pass@1 0.000 [0.000, 0.793]")


def test_rewards_say_what_answer_they_found() -> None:
    texts = ("#### 7.00", "#### 7", "none")
    assert [gsm8k.compute_score(text, "#### 7")["pred"] for text in texts] == ["7", "7", None]
    assert gsm8k.compute_score("#### 1,200.50", "#### 7")["pred"] == "1200.5"
    assert choice("The answer is (B).", "A")["pred"] == "B"
    assert math_score(r"so \boxed{3}", "4")["pred"] == "3"
    assert read_return({"score": 1, "pred": 7, "other": "text"}) == (1.0, {"pred": "7"})
    functions = [RewardFunction(label, "", 1.0, lambda: len) for label in ("a", "b")]
    score = total(functions, [Outcome("scored", 1.0, {"x": 2.0}), Outcome("scored", 0.0, {"pred": "7", "y": 1.0})])
    assert score.pred == "7" and score.details == {"a/x": 2.0, "b/y": 1.0}
