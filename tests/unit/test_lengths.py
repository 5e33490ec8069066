"""What the engine expects of a prompt's answers, and what starting the longest first is worth."""

import heapq

import numpy as np
import pytest

from fastgrpo.records import Prompt, Request, Rollout
from fastgrpo.rollout.draw import make_requests
from fastgrpo.rollout.lengths import LengthHistory
from fastgrpo.rollout.vllm_draw import longest_first


def rollout(uid, length):
    ids = np.zeros(length, np.int32)
    return Rollout(uid, 0, 0, (1,), ids, ids == 0, None, "stop", 0)


def request(row, expected):
    return Request(f"p{row}", 0, 0, (1,), row, 100, expected)


def makespan(lengths, slots):
    """A slot takes the next in line when its own ends; no slot slows another."""
    free = [0.0] * slots
    for length in lengths:
        heapq.heappush(free, heapq.heappop(free) + length)
    return max(free)


def test_the_mean_of_the_last_time_and_the_longest_for_a_stranger():
    history = LengthHistory(wanted=True)
    assert history.expected("a") == 0
    history.note([rollout("a", 2), rollout("b", 10), rollout("a", 4), rollout("b", 30)])
    assert (history.expected("a"), history.expected("b"), history.expected("new")) == (3, 20, 20)
    history.note([rollout("b", 5)])
    assert (history.expected("a"), history.expected("b"), history.expected("new")) == (3, 5, 5)
    again = LengthHistory(wanted=True)
    again.load_state(history.state())
    assert again.state() == {"mean": {"a": 3, "b": 5}} and again.expected("new") == 5


def test_nothing_is_kept_where_every_request_has_a_slot():
    history = LengthHistory(wanted=False)
    history.note([rollout("a", 2)])
    assert history.state() == {"mean": {}} and history.expected("a") == 0


def test_order_of_submission():
    requests = [request(row, expected) for row, expected in enumerate([5, 9, 5, 0, 9])]
    assert longest_first(requests, 4) == [1, 4, 0, 2, 3]  # equals as they come: a group stays together
    assert longest_first(requests, 5) is None


def test_requests_carry_the_guess_and_the_same_seeds():
    prompts = [Prompt(uid, (1,), "", None, {}) for uid in ("a", "b")]
    plain = make_requests(prompts, 2, run_seed=0, step=3, max_tokens=9)
    guessed = make_requests(prompts, 2, run_seed=0, step=3, max_tokens=9, expected={"a": 7.0, "b": 1.0}.get)
    assert [r.expected_tokens for r in plain] == [0] * 4 and [r.expected_tokens for r in guessed] == [7, 7, 1, 1]
    assert [r.seed for r in plain] == [r.seed for r in guessed]


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_the_longest_first_end_sooner(noise):
    """640 answers on 256 slots, of log-normal length up to 1,024 tokens, guessed with an error of 30 %, too."""
    generator = np.random.default_rng(0)
    savings = []
    for _ in range(20):
        lengths = np.minimum(1024, np.exp(generator.normal(5.3, 0.8, 640)))
        guesses = lengths * np.exp(noise * generator.normal(size=640))
        order = longest_first([request(row, guess) for row, guess in enumerate(guesses)], 256)
        savings.append(makespan(lengths[order], 256) / makespan(lengths, 256))
    floor = 0.75 if noise == 0 else 0.8
    assert np.mean(savings) < floor, np.mean(savings)
