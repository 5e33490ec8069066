"""What a report on a hang says of the place: read off real frames."""

from __future__ import annotations

import sys
import threading
import time
from types import FrameType, SimpleNamespace

from fastgrpo import whereabouts
from fastgrpo.records import RewardRequest
from fastgrpo.reward.custom import build_callable
from fastgrpo.reward.runner import RewardRunner


def here() -> list[FrameType]:
    return list(whereabouts._outwards(sys._getframe(1)))


class Layer:
    def __init__(self, number: int) -> None:
        self.layer_idx = number

    def forward(self, inner: Layer | None = None) -> list[FrameType]:
        return here() if inner is None else inner.forward()


def run_on(batch: SimpleNamespace) -> list[FrameType]:
    return Layer(0).forward(Layer(3))


def test_innermost_layer_and_the_sequences_of_the_micro_batch() -> None:
    frames = run_on(SimpleNamespace(rows=(4, 7)))
    assert whereabouts.describe(frames) == "layer 3, sequences 4, 7 of the step"
    frames = run_on(SimpleNamespace(rows=tuple(range(20))))
    assert whereabouts.describe(frames).endswith("sequences 0, 1, 2, 3, 4, 5, 6, 7, ... (20) of the step")
    assert not whereabouts.waits_for_others(frames)


def test_nothing_known_is_nothing_said() -> None:
    assert whereabouts.describe([]) == ""


def test_an_object_that_fails_to_answer_hides_nothing_else() -> None:
    class Broken(Layer):
        def whereabouts(self) -> str:
            raise RuntimeError("changed meanwhile")

    assert whereabouts.describe(Broken(2).forward()) == "layer 2"


def test_stacks_begin_with_the_main_thread_and_name_the_others() -> None:
    over = threading.Event()
    other = threading.Thread(target=over.wait, name="the-other", daemon=True)
    other.start()
    try:
        text = whereabouts.stacks()
    finally:
        over.set()
        other.join()
    assert text.startswith("Thread MainThread")
    assert "Thread the-other" in text and "test_stacks_begin_with_the_main_thread" in text


def said_while_scoring(runner: RewardRunner, requests: list[RewardRequest], word: str) -> str:
    """What the runner says of where it is, once it says `word`; it is closed then."""
    runner.start()
    thread = threading.Thread(target=runner.outcomes, args=(requests,))
    thread.start()
    deadline, said = time.monotonic() + 8, ""
    while word not in said and time.monotonic() < deadline:
        time.sleep(0.02)
        said = runner.whereabouts()
    thread.join()
    runner.close()
    return said


def test_a_reward_names_the_sample_that_it_hangs_at() -> None:
    def slow(response: str) -> float:
        time.sleep(1 if response == "slow" else 0)
        return 1.0

    runner = RewardRunner([build_callable(slow)], 1, 10.0)
    requests = [RewardRequest("p", text, None, {}, 0) for text in ("a", "b", "slow")]
    said = said_while_scoring(runner, requests, "sample 2")
    assert said.startswith("reward ") and said.endswith(" at sample 2 of this rank")


def test_a_function_that_hangs_at_several_samples_is_named_once() -> None:
    def slow(response: str) -> float:
        time.sleep(1)
        return 1.0

    runner = RewardRunner([build_callable(slow)], 2, 10.0)
    said = said_while_scoring(runner, [RewardRequest("p", text, None, {}, 0) for text in "ab"], "samples")
    assert said.startswith("reward ") and said.endswith(" at samples 0, 1 of this rank") and said.count(" at ") == 1
