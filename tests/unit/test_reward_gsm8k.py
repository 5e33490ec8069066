"""The GSM8K reward against hand-written verdicts, and against every reference answer of the data set if it is there."""

import json
import os
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastgrpo.reward.gsm8k import compute_score, last_number, number_after_marker, reference_number

DATA = Path(os.environ.get("FASTGRPO_TEST_DATA", Path(__file__).parents[3] / "shared" / "data")) / "gsm8k"


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ("#### -3", "-3"),
        ("#### +7", "7"),
        ("#### $1,234.50", "1234.5"),
        ("#### -$3", "-3"),
        ("#### $-3", "-3"),
        ("#### 29.00", "29"),
        ("#### 70000", "70000"),
        ("#### 70,000", "70000"),
        ("#### 1,234,567", "1234567"),
        ("#### 18.", "18"),
        ("#### 50%", "50"),
        ("#### 5 apples", "5"),
        ("#### 5apples", "5"),
        ("#### **42**", "42"),
        ("####42", "42"),
        ("####: .5", "0.5"),
        ("#### \u22124", "-4"),
        ("#### 3.5.7", "3.5"),
        ("#### 12,5", "12"),  # no thousands group
        ("#### 5 no, wait\n#### 7", "7"),
        ("<<2*3=6>>6 #### 6", "6"),
        ("####", None),
        ("", None),
        ("42", None),
        ("#### 5 ####", None),  # only the last marker counts
        ("####\n42", None),  # not on its line
        ("#### Step 2: 42", None),
        ("#### - 3", None),  # a sign or a dash
        ("#### x5", None),
    ],
)
def test_number_after_marker(response: str, value: str | None) -> None:
    assert number_after_marker(response) == (None if value is None else Decimal(value))


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ("it is 3 5", "5"),
        ("it is 3,4", "4"),
        ("so 10-7", "7"),
        ("so 10 - 7", "7"),
        ("x = -7", "-7"),
        ("(2)-7", "7"),
        ("costs $1,234.50.", "1234.5"),
        ("costs -$5 today", "-5"),
        ("\u22124", "-4"),
        ("18.", "18"),
        ("1,2345", "2345"),
        (".5", "0.5"),
        ("three", None),
        ("", None),
    ],
)
def test_last_number(response: str, value: str | None) -> None:
    assert last_number(response) == (None if value is None else Decimal(value))


@pytest.mark.parametrize(
    ("response", "reference", "score"),
    [
        ("#### -3", "3", 0.1),
        ("#### 29.00", "29", 1.0),
        ("#### 70000", "70,000", 1.0),
        ("#### 50%", "50", 1.0),
        ("#### 50%", "0.5", 0.1),
        ("#### 6", "2*3 = <<2*3=6>>6\n#### 6", 1.0),
        ("#### 5 or #### 7", "7", 1.0),
        ("#### 5 or #### 7", "5", 0.1),
        ("####", "5", 0.0),
        ("the answer is 5", "5", 0.0),
        ("#### 0.1", "0.10000000000000000000000000000000000001", 0.1),  # exact, not as floats
        ("#### " + "9" * 60, "-" + "9" * 60, 0.1),
    ],
)
def test_strict_verdict(response: str, reference: str, score: float) -> None:
    assert compute_score(response, reference, strict=True, format_score=0.1)["score"] == score


def test_details_tell_right_from_well_formed() -> None:
    assert compute_score("#### 4", "5", format_score=0.2) == {
        "score": 0.2,
        "correct": 0.0,
        "formatted": 1.0,
        "pred": "4",
    }
    assert compute_score("4", "4") == {"score": 0.0, "correct": 0.0, "formatted": 0.0, "pred": None}
    assert compute_score("so 4", "4", strict=False) == {"score": 1.0, "correct": 1.0, "formatted": 1.0, "pred": "4"}


@pytest.mark.parametrize("reference", [None, "", "none", "####"])
def test_reference_without_number_is_unscored(reference: str | None) -> None:
    assert compute_score("#### 4", reference)["score"] is None


@given(st.text(alphabet=st.one_of(st.sampled_from("#-+$,.%0123456789 \n"), st.characters())), st.booleans())
def test_never_raises(text: str, strict: bool) -> None:
    assert compute_score(text, text, strict=strict)["score"] in (None, 0.0, 1.0)


@given(st.decimals(allow_nan=False, allow_infinity=False, places=2, min_value=-(10**9), max_value=10**9))
def test_any_way_to_write_a_number(number: Decimal) -> None:
    for text in (f"{number:f}", f"{number:,f}", f"{number:f}0", f"{number:f} km"):
        assert number_after_marker(f"#### {text}") == last_number(f"it is {text}") == number


@pytest.mark.skipif(not DATA.is_dir(), reason=f"no GSM8K files in {DATA}")
def test_every_reference_answer_scores_against_itself_only() -> None:
    answers = [
        json.loads(line)["answer"]
        for name in ("train.jsonl", "test.jsonl")
        for line in (DATA / name).read_text("utf-8").splitlines()
    ]
    assert len(answers) == 8792
    for answer in answers:
        number = reference_number(answer)
        assert number is not None
        bare = answer.rpartition("####")[2].strip()
        for reference in (answer, bare):
            assert compute_score(answer, reference)["score"] == 1.0, answer
            assert compute_score(bare, reference, strict=False)["score"] == 1.0, answer
            for wrong in (number + 1, number * 10 + 1, -number - 1):
                assert compute_score(f"#### {wrong}", reference)["score"] == 0.0, answer
                assert compute_score(f"so {wrong}", reference, strict=False)["score"] == 0.0, answer
