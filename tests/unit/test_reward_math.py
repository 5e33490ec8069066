r"""The math reward on pairs that were decided by hand, by kind of notation; what is extracted; what must not happen."""

from __future__ import annotations

import importlib.util
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("math_verify")

from fastgrpo.config import RewardConfig, RewardFunctionConfig, RewardKind
from fastgrpo.errors import ConfigError
from fastgrpo.records import RewardRequest
from fastgrpo.reward import build_rewards
from fastgrpo.reward.math_answers import compute_score, equal
from fastgrpo.reward.math_text import answer_text, last_boxed

# Each kind: answers that are right for a reference, and answers that are wrong for it.
RIGHT: dict[str, list[tuple[str, str]]] = {
    "integers and signs": [
        ("5", "5"), ("+5", "5"), ("-5", "-5"), ("−5", "-5"), ("–12", "-12"), ("- 7", "-7"), ("007", "7"),
        ("0", "-0"), ("5.", "5"), ("5.0", "5"), ("5.00", "5"), ("-0.50", "-.5"), (".5", "0.5"), ("{5}", "5"),
        ("(5)", "5"), ("$5$", "5"), (r"\(5\)", "5"), ("$$5$$", "5"), ("**5**", "5"), ("$-5$.", "-5"),
    ],
    "fractions": [
        (r"\frac{1}{2}", "0.5"), (r"\frac12", r"\frac{1}{2}"), (r"\dfrac{3}{4}", r"\frac{3}{4}"),
        ("1/2", r"\frac{1}{2}"), (r"\tfrac34", "0.75"), (r"\frac{2}{4}", r"\frac12"),
        (r"-\frac{1}{3}", r"\frac{-1}{3}"), (r"\frac{1}{-3}", r"-\frac13"), (r"3\frac{1}{2}", r"\frac{7}{2}"),
        (r"3\frac12", "3.5"), ("3 1/2", "7/2"), (r"-2\frac{1}{4}", "-9/4"), (r"\frac{ 1 }{ 2 }", "1 / 2"),
        (r"\cfrac{5}{10}", "1/2"), (r"\frac{14}{7}", "2"), (r"\frac{1.5}{3}", "0.5"),
        (r"\frac{x}{2}", r"\frac12 x"), (r"\frac{\pi}{2}", r"\frac12\pi"),
        (r"\frac{\sqrt3}{3}", r"\frac{1}{\sqrt{3}}"), (r"\frac{a+b}{2}", r"\frac{b+a}{2}"),
        ("½", "0.5"), ("3½", r"\frac72"), ("-⅔", r"-\frac{2}{3}"), ("1 ¾", "7/4"),
    ],
    "repeating decimals": [
        (r"0.\overline{34}", r"\frac{34}{99}"), (r"1.\overline{6}", r"\frac53"), (r"0.1\overline{6}", "1/6"),
        (r"-0.\bar{3}", r"-\frac13"), (r"0.\overline{9}", "1"), (r".\overline3", "1/3"), (r"0.\dot{3}", "1/3"),
        (r"0.\overline{3}x", r"\frac{x}{3}"), (r"66.\overline{6}\%", r"\frac23"),
    ],
    "bases": [
        ("110_2", "110_{2}"), (r"110_{\text{two}}", "110_2"), ("1A_{16}", r"1A_{16}"), ("(110)_2", "110_2"),
        ("0110_2", "110_2"), ("6_{10}", "6"), ("-6", r"-6_{\text{ten}}"),
    ],
    "degrees in functions": [
        (r"\sin 30^\circ", "1/2"), (r"\tan 45^\circ", "1"), (r"2\cos(60^{\circ})", "1"),
        (r"\sin 30°", r"\cos 60^\circ"), (r"\cos 45^\circ", r"\frac{\sqrt{2}}{2}"),
    ],
    "thousands": [
        ("1,234", "1234"), ("1{,}234", "1234"), (r"1\,234", "1234"), ("1 234 567", "1234567"),
        ("1,234,567", r"1{,}234{,}567"), (r"12{,}345.5", "12345.5"), ("$10,000", "10000"),
        (r"1\;000\;000", "1000000"), ("-1,000", "-1000"), (r"\text{1,000}", "1000"), (r"20\!,\!000", "20000"),
        ("100,000", r"100\,000"),
    ],
    "LaTeX spacing and sizes": [
        (r"\left( 1, 2 \right)", "(1,2)"), (r"x \, + \, 1", "x+1"), (r"2\quad", "2"),
        (r"\displaystyle\frac12", r"\frac12"), (r"\bigl(3,4\bigr)", "(3,4)"),
        (r"\left\{1,2\right\}", r"\{1,2\}"), (r"\! 7", "7"), (r"3~", "3"), (r"2\ \pi", r"2\pi"),
        (r"\sqrt2", r"\sqrt{2}"), (r"\sqrt 2", r"\sqrt{2}"), (r"5 \cdot x", "5x"),
        (r"\left[0,1\right)", "[0,1)"), ("x^{2}", "x^2"), (r"2^{n}\;", "2^n"),
    ],
    "units": [
        (r"5\text{ cm}", "5"), ("5", r"5\text{ cm}"), (r"5\,\mathrm{cm}", r"5\text{ centimeters}"),
        ("5 cm", r"5\text{ cm}"), (r"12\text{ cm}^2", r"12\text{ square centimeters}"),
        (r"12\text{ cm}^{2}", "12"), (r"8\text{ in}^3", r"8\text{ cubic inches}"), (r"90^\circ", "90"),
        (r"90^{\circ}", r"90\text{ degrees}"), ("90°", r"90^\circ"), (r"\$5", "5"),
        (r"\$5.50", r"5.50\text{ dollars}"), ("$12", r"\$12"), ("5 dollars", r"\$5"),
        (r"60\text{ miles per hour}", r"60\text{ mi/h}"), (r"3\text{ hours}", "3 hrs"),
        (r"5\text{ apples}", "5"), ("5 apples", "5"), (r"24\pi\text{ square units}", r"24\pi"),
        (r"2\text{ million}", "2000000"), (r"1.5 \text{ million dollars}", r"\$1,500,000"),
        (r"3 \text{ dozen}", "36"), (r"\frac{1}{2}\text{ mile}", "0.5 miles"),
        (r"10\text{ a.m.}", r"10\text{ am}"), (r"25\text{ minutes}", "25 min"), (r"7\mathrm{~m}", "7"),
        (r"16\text{ feet}", "16 ft"),
    ],
    "percent": [
        (r"50\%", "0.5"), (r"50\%", "50"), ("50%", r"50\%"), ("50", r"50\%"), ("0.5", r"50\%"),
        (r"\frac12", r"50\%"), (r"12.5\%", r"\frac18"), ("50 percent", r"50\%"), (r"50\text{ percent}", "50%"),
        (r"-3\%", "-0.03"), (r"100\%", "1"),
    ],
    "powers of ten": [
        (r"1.5\times10^3", "1500"), (r"1.5 \times 10^{3}", "1500"), (r"2 \cdot 10^{-3}", "0.002"),
        ("3×10^8", "300000000"), (r"6\times 10^{0}", "6"), (r"-1.2\times 10^{2}", "-120"),
    ],
    "sets and lists": [
        (r"\{1,2,3\}", r"\{3,1,2\}"), ("1, 2, 3", r"\{1,2,3\}"), ("3, 1", "1,3"), ("1 and 3", "3, 1"),
        (r"1 \text{ or } 3", "1,3"), (r"\pm 3", "3, -3"), (r"\{-3, 3\}", r"\pm 3"), (r"x = 2", "2"),
        ("x=2", "x = 2"), (r"\{5\}", "5"), (r"\emptyset", r"\{\}"), (r"\varnothing", r"\emptyset"),
        (r"2, \frac12", r"\frac{1}{2}, 2"), (r"\{0.5, 2\}", r"\{2,\frac12\}"),
        (r"\{(1,2),(3,4)\}", r"\{(3,4),(1,2)\}"), ("(1,2), (3,4)", "(3,4),(1,2)"),
        (r"1\pm\sqrt{2}", r"1+\sqrt{2}, 1-\sqrt{2}"), (r"\{1,234\}", r"\{234, 1\}"),
        (r"\{1,1,2\}", r"\{1,2\}"), (r"\{1,2\}", r"\{2,1,1.0\}"),
        (r"3, 4 \text{ cm}", "4, 3"), ("1, 2, and 3", "1,2,3"),
    ],
    "tuples and intervals": [
        ("(1,2)", "(1, 2)"), (r"(\frac12, 3)", "(0.5,3)"), ("[1,2)", r"\left[1,2\right)"),
        (r"(-\infty, 3]", r"(-\infty,3]"), (r"[0,1]\cup[2,3]", r"[2,3]\cup[0,1]"), (r"x\in(0,1)", "(0,1)"),
        (r"x \in [2,\infty)", r"[2,+\infty)"), ("(−∞, 0)", r"(-\infty,0)"), ("[0.5, 1]", r"[\frac12,1]"),
        ("((1,2),3)", "((1, 2), 3)"), ("(1,-2,3)", "(1, -2, 3)"),
        (r"(-\infty,-1)\cup(1,\infty)", r"(1,\infty) \cup (-\infty,-1)"), (r"(1,234)", "(1, 234)"),
        (r"(\sqrt2,\sqrt3)", r"(\sqrt{2},\sqrt{3})"),
    ],
    "formulas": [
        ("2x+1", "1+2x"), ("x^2-1", "(x-1)(x+1)"), (r"2\sqrt{2}", r"\sqrt{8}"), (r"\pi r^2", r"r^2\pi"),
        (r"3\pi", r"\pi \cdot 3"), (r"\frac{1}{x}", "x^{-1}"), (r"\sqrt{12}", r"2\sqrt3"), (r"e^{2}", "e^2"),
        (r"\log_2 8", "3"), (r"\sin(x)", r"\sin x"), (r"y=2x+3", "2x+3"), (r"f(x)=x^2", "x^2"),
        (r"2^{10}", "1024"), ("4!", "24"), (r"\binom{5}{2}", "10"), ("1+2i", "2i+1"),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}"),
        ("x²+1", "x^2+1"), (r"x>3", "3<x"), (r"\sqrt[3]{8}", "2"), ("10x-5", "5(2x-1)"),
    ],
    "words and choices": [
        (r"\text{Monday}", "Monday"), ("monday", r"\text{Monday}"), (r"\text{(B)}", "B"), ("(C)", "C"),
        (r"\textbf{(D)}", r"\text{D}"), (r"\mathrm{Yes}", "yes"), ("2:3", "2 : 3"), (r"\text{even}", "even"),
        ("10:30", "10:30"), (r"\text{ east}", r"\text{east}"),
    ],
}  # fmt: skip
WRONG: dict[str, list[tuple[str, str]]] = {
    "integers and signs": [
        ("5", "-5"), ("−5", "5"), ("50", "5"), ("5", "6"), ("0.5", "5"), ("12", "21"), ("", "5"), ("5.01", "5"),
        ("1", "11"),
    ],
    "fractions": [
        (r"\frac{1}{2}", r"\frac{2}{1}"), (r"\frac13", "0.333"), ("0.33333333", r"\frac13"),
        (r"3\frac12", r"\frac32"), ("1/2", "2"), (r"-\frac12", r"\frac12"), (r"\frac{1}{0}", "0"),
        (r"\frac12", "12"), (r"\frac{x}{2}", r"\frac{2}{x}"), ("½", "2"), ("3½", "1.5"),
        (r"\frac{1}{23}", r"\frac{12}{3}"), (r"\frac{a}{bc}", r"\frac{ab}{c}"), ("x^{1}2", "x^{12}"),
    ],
    "repeating decimals": [
        (r"0.\overline{34}", "0.34"), (r"0.\overline{3}", "0"), (r"0.\overline{3}", "0.33"),
        (r"0.\overline{3}x", "0"), (r"1.\overline{6}", r"\frac{16}{9}"),
    ],
    "bases": [
        ("110_2", "110"), ("110", "110_2"), ("110_2", "110_3"), ("110_2", "6"), ("110_2", "111_2"), ("12_3", "12_{13}"),
        ("110_{10}", "110_2"),
    ],
    "degrees in functions": [
        (r"\sin 30^\circ", r"\sin 30"), (r"\sin 30^\circ", "30"), (r"\tan 45^\circ", "45"),
        (r"\cos 60^\circ", r"\frac{\sqrt3}{2}"),
    ],
    "thousands": [
        ("1,234", "1.234"), ("1,234", "1,23"), ("1,234", "1"), ("1000", "1,000,000"), ("12,34", "1234"),
        (r"1{,}234", "234"), ("1,234", "1,2,3,4"),
    ],
    "LaTeX spacing and sizes": [
        (r"\left(1,2\right)", "(2,1)"), (r"x\,+\,1", "x+2"), (r"\sqrt2", r"\sqrt{3}"), (r"2^{n}", "2n"),
    ],
    "units": [
        (r"5\text{ cm}", r"5\text{ m}"), (r"5\text{ cm}", r"5\text{ cm}^2"), (r"5\text{ cm}", "6"),
        ("5 hours", "5 minutes"), (r"\$5", r"5\text{ cents}"), (r"2\text{ million}", "2"),
        (r"10\text{ am}", r"10\text{ pm}"), (r"90^\circ", "9"), (r"1\text{ dozen}", "1"),
        (r"100\text{ cm}", r"1\text{ m}"), (r"20^\circ\text{C}", r"20^\circ\text{F}"),
    ],
    "percent": [
        (r"50\%", "5"), ("0.05", r"50\%"), (r"50\%", "0.05"), (r"5\%", r"0.5\%"), ("5000", r"50\%"),
        (r"50\%", r"-0.5"),
    ],
    "powers of ten": [
        (r"1.5\times10^3", "150"), (r"10^3", "30"), (r"2\cdot10^{-3}", "0.02"),
        (r"1.5\times10^{3}", r"1.5\times10^{4}"),
    ],
    "sets and lists": [
        (r"\{1,1,2\}", r"\{1,3\}"), ("1,1,2", r"\{1,2\}"), (r"\{1,2\}", r"\{1,2,3\}"),
        ("1,2,3", r"\{1,2\}"), ("1,1", "1,2"), (r"\pm3", "3"), ("3", r"\pm 3"),
        ("1", "1,2"), (r"\{1,2\}", "(1,2)"), ("x=2", "x=3"), (r"\emptyset", "0"), ("x=2", "y=2"),
        (r"\{(1,2)\}", r"\{(2,1)\}"), (r"\{1,234\}", r"\{1234\}"),
    ],
    "tuples and intervals": [
        ("(1,2)", "(2,1)"), ("(1,2)", "[1,2]"), ("[1,2)", "(1,2]"), ("(1,2)", "(1,2,3)"),
        (r"(-\infty,3)", r"(-\infty,3]"), (r"[0,1]\cup[2,3]", "[0,1]"), (r"[0,1]\cup[2,3]", "[0,3]"),
        ("(1,2)", "12"), ("(1,234)", "1234"), ("(-1,2)", "(1,2)"), (r"[0,\infty)", r"(-\infty,0]"),
    ],
    "formulas": [
        ("2x+1", "2x-1"), ("x^2+1", "(x-1)(x+1)"), (r"2\sqrt2", r"\sqrt{4}"), ("x", "y"), (r"\pi", "3.14"),
        (r"e^2", "e^3"), ("x>3", "x<3"), (r"x\ge3", "x>3"),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&3\\2&4\end{pmatrix}"), ("1+2i", "1-2i"),
        (r"\log_2 8", r"\log_8 2"), ("5", "x"), ("2^{10}", "2^{11}"), (r"\sin x", r"\cos x"),
    ],
    "words and choices": [
        (r"\text{Monday}", "Tuesday"), ("(B)", "(C)"), ("A", "B"), ("yes", "no"), ("2:3", "3:2"),
        ("10:30", "10:31"), ("even", "odd"), ("B", "8"),
    ],
}  # fmt: skip


def test_there_are_enough_pairs() -> None:
    assert sum(map(len, RIGHT.values())) >= 150
    assert sum(map(len, WRONG.values())) >= 90
    assert all(len(set(pairs)) == len(pairs) for pairs in (*RIGHT.values(), *WRONG.values()))


@pytest.mark.parametrize("kind", RIGHT)
def test_right_answers(kind: str) -> None:
    assert [pair for pair in RIGHT[kind] if not equal(*pair)] == []


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_answers(kind: str) -> None:
    assert [pair for pair in WRONG[kind] if equal(*pair)] == []


@pytest.mark.parametrize(
    ("response", "strict", "answer"),
    [
        (r"so \boxed{5}.", True, "5"),
        (r"\boxed{1} then \boxed{2}", True, "2"),
        (r"\boxed{\boxed{7}}", True, "7"),
        (r"\boxed{$\boxed{\frac{1}{2}}$}", True, r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", True, r"\{1, 2\}"),
        (r"\fbox{3}", True, "3"),
        (r"\boxed {4}", True, "4"),
        (r"\boxed{5", True, None),
        (r"\boxed{1} and \boxed{2", True, "1"),
        ("the answer is 5", True, None),
        ("the answer is 5", False, "5"),
        ("The final answer is: $\\frac12$. I hope it is right.", False, r"$\frac12$"),
        ("**Answer:** 3.5", False, "3.5"),
        ("It follows that $x = 4$.", False, "x = 4"),
        ("we get 3 and then 1,234", False, "1,234"),
        ("nothing here", False, None),
        (r"<think>\boxed{1}</think> \boxed{2}", True, "2"),
        (r"<think>\boxed{1}</think> so it is", True, None),
        ("", True, None),
    ],
)
def test_answer_text(response: str, strict: bool, answer: str | None) -> None:
    assert answer_text(response, strict) == answer


def test_scores_and_details() -> None:
    right, wrong = (compute_score(rf"\boxed{{{x}}}", "5", format_score=0.1) for x in (5, 6))
    assert right == {"score": 1.0, "correct": 1.0, "formatted": 1.0, "pred": "5"}
    assert wrong == {"score": 0.1, "correct": 0.0, "formatted": 1.0, "pred": "6"}
    assert compute_score("5", "5") == {"score": 0.0, "correct": 0.0, "formatted": 0.0}
    assert compute_score("5", "5", strict=False)["score"] == 1.0
    assert compute_score(r"\boxed{5}", r"We find \boxed{5}.")["score"] == 1.0  # a whole solution as reference
    for reference in (None, "", " "):
        assert compute_score(r"\boxed{5}", reference) == {"score": None, "formatted": 1.0}


@pytest.mark.parametrize(
    "answer",
    [
        "9^{9^{9^9}}",
        "10^{100000000}",
        "99999!",
        "((((((((((",
        "{" * 5000,
        r"\frac" * 300,
        "1," * 3000,
        r"\int_0^1 x^x dx",
    ],
)
def test_monsters_are_wrong_and_quick(answer: str) -> None:
    start = time.monotonic()
    assert compute_score(rf"\boxed{{{answer}}}", "5")["score"] in (0.0, None)
    assert equal(answer, "5") is False
    assert time.monotonic() - start < 2


def test_a_slow_formula_is_unscored(monkeypatch: pytest.MonkeyPatch) -> None:
    import math_verify

    def endless(*args: object, **kwargs: object) -> bool:
        from math_verify.errors import TimeoutException

        raise TimeoutException("too slow")

    monkeypatch.setattr(math_verify, "verify", endless)
    assert compute_score(r"\boxed{x+1}", "x+2") == {"score": None, "formatted": 1.0, "slow": 1.0}


@given(st.text(alphabet=st.sampled_from(list("0123456789.,-+^_{}()[]\\$%/ =xab!|&")) | st.characters(), max_size=40))
@settings(max_examples=150, deadline=None)
def test_never_raises(text: str) -> None:
    for reference in ("5", text):
        assert compute_score(rf"a \boxed{{{text}}}", reference)["score"] in (0.0, 1.0, None)
        compute_score(text, reference, strict=False)
    last_boxed(text)


def test_a_missing_library_is_named_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    reward = RewardConfig(functions={"right": RewardFunctionConfig(kind=RewardKind["math"])})
    with pytest.raises(
        ConfigError, match=r"right is of kind math, which needs math-verify: pip install 'fastgrpo\[math\]'"
    ):
        build_rewards(reward)


def test_in_a_worker() -> None:
    reward = RewardConfig(functions={"right": RewardFunctionConfig(kind=RewardKind["math"])}, num_workers=1)
    runner = build_rewards(reward)
    responses = [r"\boxed{x^2-1}", r"\boxed{x^2}", "x^2-1"]
    scores = runner.score([RewardRequest("p", response, "(x-1)(x+1)", {}, 0) for response in responses])
    runner.close()
    assert [score.total for score in scores] == [1.0, 0.0, 0.0]
