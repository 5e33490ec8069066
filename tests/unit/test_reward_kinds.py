"""The small kinds: choice, exact, format and length, on cases decided by hand."""

from __future__ import annotations

import pytest

from fastgrpo.config import RewardConfig, RewardFunctionConfig, RewardKind
from fastgrpo.records import RewardRequest
from fastgrpo.reward import build_rewards
from fastgrpo.reward.choice import chosen_letter, compute_score
from fastgrpo.reward.exact import compute_score as exact
from fastgrpo.reward.length import linear_penalty, overlong_penalty
from fastgrpo.reward.tags import well_formed


@pytest.mark.parametrize(
    ("response", "strict", "flexible"),
    [
        ("B", "B", "B"),
        ("b", "B", "B"),
        ("(C)", "C", "C"),
        ("**D.**", "D", "D"),
        (r"so \boxed{B}", "B", "B"),
        (r"\boxed{\text{(E)}} is not A", "E", "E"),
        (r"\boxed{42}. The answer is B", None, None),
        ("The answer is (A). No: the answer is B.", "B", "B"),
        ("Answer: C", "C", "C"),
        ("The correct option is **D**", "D", "D"),
        ("The answer is option C because ...", "C", "C"),
        ("The answer is a dog", None, None),
        ("The answer is A dog", "A", "A"),
        ("The answer is Berlin", None, None),
        ("I weigh (A) against (B) and take (B) here", None, "B"),
        ("It must be **C**, I think", None, "C"),
        ("We pick D.", None, "D"),
        ("I like dogs", None, None),
        ("<think>The answer is A</think> B", "B", "B"),
        ("<think>The answer is A</think>", None, None),
        ("", None, None),
    ],
)
def test_chosen_letter(response: str, strict: str | None, flexible: str | None) -> None:
    assert (chosen_letter(response, True), chosen_letter(response, False)) == (strict, flexible)


def test_choice_scores() -> None:
    right, wrong, none = (compute_score(text, "(B)", format_score=0.1) for text in ("B", "A", "well"))
    assert right == {"score": 1.0, "correct": 1.0, "formatted": 1.0, "pred": "B"}
    assert wrong == {"score": 0.1, "correct": 0.0, "formatted": 1.0, "pred": "A"}
    assert none == {"score": 0.0, "correct": 0.0, "formatted": 0.0, "pred": None}
    for reference in (None, "", "Berlin", "12"):
        assert compute_score("B", reference)["score"] is None


@pytest.mark.parametrize(
    ("response", "reference", "strict", "flexible"),
    [
        (" Paris.\n", "Paris", 1.0, 1.0),
        ("paris", "Paris", 1.0, 1.0),
        ("It is Paris, of course", "Paris", 0.0, 1.0),
        ("Parisian", "Paris", 0.0, 0.0),
        ("New   York", "new york", 1.0, 1.0),
        ("a+b (c", "a+b (c", 1.0, 1.0),
        ("<think>Rome</think> Paris", "Paris", 1.0, 1.0),
        ("<think>Paris</think> Rome", "Paris", 0.0, 0.0),
        ("", "Paris", 0.0, 0.0),
        ("Paris", "", None, None),
        ("Paris", None, None, None),
    ],
)
def test_exact(response: str, reference: str | None, strict: float | None, flexible: float | None) -> None:
    assert (exact(response, reference), exact(response, reference, strict=False)) == (strict, flexible)


def test_exact_with_case() -> None:
    assert exact("paris", "Paris", ignore_case=False) == 0.0
    assert exact("Paris", "Paris", ignore_case=False) == 1.0


@pytest.mark.parametrize(
    ("response", "good"),
    [
        ("<think>a</think><answer>b</answer>", True),
        ("<think>\na\n</think>\n\n<answer>b</answer>\n", True),
        ("x<think>a</think><answer>b</answer>", False),
        ("<think>a</think> so <answer>b</answer>", False),
        ("<think>a</think><answer>b</answer> bye", False),
        ("<think>a</think>", False),
        ("<answer>b</answer><think>a</think>", False),
        ("<think>a</think><answer> </answer>", False),
        ("<think></think><answer>b</answer>", False),
        ("<think>a<think>b</think></think><answer>b</answer>", False),
        ("<think>a</think><answer>b</answer><answer>c</answer>", False),
        ("<think>a<answer>b</answer></think>", False),
        ("a</think><answer>b</answer>", False),
        ("", False),
    ],
)
def test_format(response: str, good: bool) -> None:
    assert well_formed(response, ["think", "answer"]) is good


def test_format_where_the_template_opened_the_first_tag() -> None:
    assert well_formed("a</think><answer>b</answer>", ["think", "answer"], opened=True)
    assert not well_formed("<think>a</think><answer>b</answer>", ["think", "answer"], opened=True)
    assert not well_formed("a", ["think"], opened=True)
    assert well_formed("<solution>5</solution>", ["solution"])


def test_overlong_penalty_is_daposs_equation() -> None:
    found = [overlong_penalty(length, 10, 4) for length in (0, 1, 6, 7, 8, 9, 10, 11, 1000)]
    assert found == [0.0, 0.0, 0.0, -0.25, -0.5, -0.75, -1.0, -1.0, -1.0]
    assert [overlong_penalty(length, 10, 0) for length in (9, 10, 11)] == [0.0, 0.0, -1.0]
    assert overlong_penalty(18432, 20480, 4096) == -0.5  # the paper's lengths: 16384 free, 4096 of buffer
    assert overlong_penalty(5, 10, 10) == -0.5
    assert [linear_penalty(length, 8) for length in (0, 2, 8, 9)] == [0.0, -0.25, -1.0, -1.0]


def test_length_through_the_runner_and_a_mixture() -> None:
    """0.7 of a rule and 0.3 of the length: 0.7 * 1 + 0.3 * (2 * -0.5)."""
    config = RewardConfig(
        functions={
            "right": RewardFunctionConfig(kind=RewardKind["exact"], weight=0.7),
            "long": RewardFunctionConfig(
                kind=RewardKind["length"], weight=0.3, overlong_buffer_len=4, overlong_penalty_factor=2.0
            ),
        },
        num_workers=1,
    )
    runner = build_rewards(config, max_response_length=10)
    requests = [RewardRequest("p", text, "a", {}, 0, "u", 0, tokens) for text, tokens in (("a", 8), ("b", 6), ("a", 1))]
    scores = runner.score(requests)
    runner.close()
    assert [s.total for s in scores] == [pytest.approx(0.7 - 0.3), 0.0, 0.7]
    assert dict(scores[0].parts) == {"right": 1.0, "long": -1.0}
