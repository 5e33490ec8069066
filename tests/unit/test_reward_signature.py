"""The forms of a reward function, through real worker processes: verl's, TRL's, lists, async; and their limits."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from fastgrpo.config import DataConfig, RewardConfig
from fastgrpo.data.prompts import prompts_from_python
from fastgrpo.errors import UserError
from fastgrpo.records import RewardRequest, Score
from fastgrpo.reward import build_rewards
from fastgrpo.reward.signature import read_signature

REQUESTS = [
    RewardRequest(f"p{i}", f"r{i}", str(i), {"answer": 10 * i, "level": i % 2}, 7, f"set/train/{i}", 1, 100 + i)
    for i in range(5)
]


def scored(function: Callable[..., object], requests: list[RewardRequest] = REQUESTS, **limits: float) -> list[Score]:
    runner = build_rewards(RewardConfig(**{"num_workers": 2, "timeout_s": 20.0, **limits}), function)  # type: ignore[arg-type]
    try:
        return runner.score(requests)
    finally:
        runner.close()


def totals(
    function: Callable[..., object], requests: list[RewardRequest] = REQUESTS, **limits: float
) -> list[float | None]:
    return [score.total for score in scored(function, requests, **limits)]


def test_verls_names() -> None:
    def compute_score(data_source, solution_str, ground_truth, extra_info):
        assert data_source is None and extra_info["answer"] == 10 * float(ground_truth)
        return float(ground_truth) + (solution_str == f"r{ground_truth}")

    assert totals(compute_score) == [1.0, 2.0, 3.0, 4.0, 5.0]
    row = {"data_source": "mine", "extra_info": {"index": 3}}
    request = RewardRequest("p", "r", "4", row, 0)
    assert totals(
        lambda data_source, solution_str, extra_info, **more: extra_info["index"] + (data_source == "mine"), [request]
    ) == [4.0]


def test_verls_names_for_batches() -> None:
    def compute_score(data_sources, solution_strs, ground_truths, extra_infos):
        assert data_sources == [None] * len(solution_strs)
        return [{"score": float(g), "level": e["level"]} for g, e in zip(ground_truths, extra_infos, strict=True)]

    scores = scored(compute_score)
    assert [s.total for s in scores] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert [s.details["compute_score/level"] for s in scores] == [0.0, 1.0, 0.0, 1.0, 0.0]


def test_trls_names_and_columns() -> None:
    def by_column(prompts, completions, answer):
        return [
            float(a) + (c == f"r{i}") + (p == f"p{i}")
            for i, (p, c, a) in enumerate(zip(prompts, completions, answer, strict=True))
        ]

    def by_keywords(completions, **kwargs):
        assert sorted(kwargs) == ["answer", "level"] and len(completions) == 5
        return [None if level else float(a) for a, level in zip(kwargs["answer"], kwargs["level"], strict=True)]

    assert totals(by_column) == [2.0, 12.0, 22.0, 32.0, 42.0]
    assert totals(by_keywords) == [0.0, None, 20.0, None, 40.0]
    with pytest.raises(
        UserError, match=r"takes the parameter 'solution', .*; its columns are answer, level. Rename"
    ) as e:
        totals(lambda completions, solution: [0.0] * len(completions))
    assert "Traceback" not in str(e.value) and "\n" not in str(e.value)
    assert totals(lambda completions, reference: list(map(float, reference))) == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_trls_reward_on_a_data_row_of_gsm8k(tiny_model: Path) -> None:
    """The columns that prompt and reference come from are there under their own names."""
    data = DataConfig(prompt_key="question", reference_key="answer", max_prompt_length=64)
    rows = [{"question": "hi there", "answer": "3 + 4\n#### 7"}, {"question": "hi", "answer": "#### 8"}]
    prompts = prompts_from_python(rows, AutoTokenizer.from_pretrained(tiny_model), data).prompts
    requests = [RewardRequest(p.text, p.text[::-1], p.reference, p.meta, 0, p.uid, 0, 2) for p in prompts]

    def reward(prompts, completions, answer, **kwargs):
        assert prompts == kwargs["question"] == ["hi there", "hi"] and set(kwargs) == {"question"}
        return [float(a.rpartition("#### ")[2]) + c.startswith("e") for a, c in zip(answer, completions, strict=True)]

    assert totals(reward, requests) == [8.0, 8.0]
    assert totals(lambda response, meta: float(meta["answer"][-1]), requests) == [7.0, 8.0]


def test_token_ids_of_completions() -> None:
    ids = np.array([5, 70000, 2], np.int32)
    requests = [RewardRequest("p", "r", None, {}, 0, response_ids=part.tobytes()) for part in (ids, ids[:1])]
    assert totals(lambda completion_ids: [float(sum(c)) for c in completion_ids], requests) == [70007.0, 5.0]


def test_what_only_trls_trainer_has_is_refused_with_a_hint() -> None:
    with pytest.raises(UserError, match=r"requires trainer_state, which only TRL's trainer has.*`step`"):
        read_signature(lambda completions, trainer_state: 0, "f")
    assert totals(lambda completions, trainer_state=None: [1.0] * len(completions)) == [1.0] * 5


def test_a_batch_is_one_call_with_all_samples_and_the_step() -> None:
    def ranked(responses, references, metas, uids, num_tokens, step):
        assert [m["level"] for m in metas] == [0, 1, 0, 1, 0] and uids[3] == "set/train/3" and num_tokens[0] == 100
        return [step + sorted(responses).index(r) / len(references) for r in responses]

    assert totals(ranked) == [7.0, 7.2, 7.4, 7.6, 7.8]
    many = REQUESTS * 200
    assert totals(lambda responses: [float(len(responses))] * len(responses), many) == [1000.0] * 1000


def test_async_calls_run_side_by_side() -> None:
    async def compute_score(response, step):
        await asyncio.sleep(0.3)
        return step + float(response[1:])

    requests = [RewardRequest("p", f"r{i}", None, {}, 1) for i in range(60)]
    start = time.monotonic()
    assert totals(compute_score, requests) == [1.0 + i for i in range(60)]
    assert time.monotonic() - start < 5  # 18 s of waiting, two workers


def test_async_for_batches() -> None:
    async def compute_score(prompts, completions, **kwargs):
        return await asyncio.gather(*(asyncio.sleep(0.01, float(len(c))) for c in completions))

    assert totals(compute_score) == [2.0] * 5


def test_an_async_call_that_hangs_or_raises_is_alone_in_it() -> None:
    async def compute_score(response):
        if response == "r1":
            await asyncio.sleep(100)
        if response == "r2":
            raise TimeoutError("the server's own")
        return 1.0

    scores = scored(compute_score, timeout_s=1.0)
    assert [s.status for s in scores] == ["scored", "timeout", "error", "scored", "scored"]
    assert scores[1].error == "compute_score: no answer within 1 s"
    assert scores[2].error == "compute_score: TimeoutError: the server's own"


def test_a_blocked_loop_is_killed() -> None:
    async def compute_score(response):
        if response == "r3":
            time.sleep(100)
        return 1.0

    start = time.monotonic()
    statuses = [s.status for s in scored(compute_score, timeout_s=1.0, num_workers=1)]
    assert time.monotonic() - start < 6
    assert statuses == ["scored"] * 3 + ["timeout", "scored"]  # those beside it are run again


def test_an_async_call_that_ends_its_process_is_alone_in_it() -> None:
    async def compute_score(response):
        await asyncio.sleep(0.05)
        if response == "r9":
            os._exit(3)
        return 1.0

    requests = [RewardRequest("p", f"r{i}", None, {}, 1) for i in range(40)]
    scores = scored(compute_score, requests)
    assert [s.status for s in scores] == ["error" if i == 9 else "scored" for i in range(40)]
    assert scores[9].error == "compute_score: its process ended with exit code 3"


def test_a_batch_that_hangs_raises_or_dies_is_so_as_a_whole() -> None:
    def hanging(responses, step):
        if step == 1:
            time.sleep(100)
        if step == 2:
            os._exit(3)
        if step == 3:
            raise ValueError("no")
        return [1.0] * len(responses)

    runner = build_rewards(RewardConfig(num_workers=1, timeout_s=1.0), hanging)
    steps = [[RewardRequest("p", "r", None, {}, step)] * 3 for step in range(5)]
    found = [runner.score(requests) for requests in steps]
    runner.close()
    assert [[s.status for s in scores] for scores in found] == [
        [status] * 3 for status in ("scored", "timeout", "error", "error", "scored")
    ]
    assert found[2][0].error == "hanging: its process ended with exit code 3"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0], "returned 1 values for 5 samples"),
        (1.0, r"returned float: 1.0 for 5 samples; a function that takes lists returns a list"),
        ({"score": 1.0}, "returned dict: "),
        ([1.0, "x", 1.0, 1.0, 1.0], "returned str: 'x', as item 1 of 5 \\(after "),
    ],
)
def test_what_a_batch_may_not_return(value: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        totals(lambda responses: value)


def test_signatures() -> None:
    async def call(response): ...

    class Object:
        async def __call__(self, response): ...

    assert read_signature(call, "f").form == read_signature(Object(), "f").form == "concurrent"
    assert read_signature(lambda response, completions=None: 0, "f").form == "batch"
    assert read_signature(lambda num_tokens: 0, "f").takes == ("num_tokens",)
    assert read_signature(lambda: 0, "f") == read_signature(lambda extra=1: 0, "f")
    with pytest.raises(UserError, match="requires the parameter gold"):
        read_signature(lambda gold, **rest: 0, "f")
