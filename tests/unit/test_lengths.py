"""What the engine expects of a prompt's answers, and what starting the longest first is worth."""

import heapq
from types import SimpleNamespace

import numpy as np
import pytest

from fastgrpo import Trainer
from fastgrpo.config import (
    ActorConfig,
    DataConfig,
    Device,
    ModelConfig,
    OptimConfig,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
)
from fastgrpo.mesh import build_mesh, engine_slice
from fastgrpo.records import Prompt, Request, Rollout, Sample, Score
from fastgrpo.rollout import draw as draw_module
from fastgrpo.rollout.draw import draw_own, drawing_rows, make_requests, share_samples
from fastgrpo.rollout.lengths import LengthHistory, divide_groups
from fastgrpo.rollout.vllm_draw import longest_first
from fastgrpo.stages import _lengths_help


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


def test_groups_are_divided_by_expected_tokens():
    assert divide_groups([8, 7, 6, 5, 4, 3, 2, 1], 2) == [[0, 3, 4, 7], [1, 2, 5, 6]]
    assert divide_groups([1, 1, 9, 1, 1], 2) == [[2, 3, 4], [0, 1]]  # as many as without a guess
    assert divide_groups([5, 9], 3) == [[1], [0], []] and divide_groups([], 2) == [[], []]


@pytest.mark.parametrize("known", [0.0, 7.5])
def test_where_nothing_tells_them_apart_consecutive_groups(known):
    for groups in range(12):
        for engines in range(1, 9):
            slices = [list(engine_slice(groups, 1, engine, engines)) for engine in range(engines)]
            assert divide_groups([known] * groups, engines) == slices


def test_every_group_once_and_counts_as_even_as_before():
    generator = np.random.default_rng(1)
    for groups in range(1, 40, 3):
        for engines in range(1, 9):
            shares = divide_groups(generator.lognormal(size=groups).tolist(), engines)
            assert sorted(group for share in shares for group in share) == list(range(groups))
            assert [len(share) for share in shares] == [
                len(engine_slice(groups, 1, engine, engines)) for engine in range(engines)
            ]
            assert all(share == sorted(share) for share in shares)


def test_the_busiest_of_eight_engines_has_less_to_draw():
    """128 prompts, 8 answers each, of log-normal length up to 1,024 tokens, guessed from 8 others of the same prompt
    under a policy that has moved on. Equal shares are what perfect balance comes to."""
    generator = np.random.default_rng(0)
    ordered, balanced = [], []
    for _ in range(20):
        middle = np.log(250) + 0.6 * generator.normal(size=(128, 1))

        def draw(shift, middle=middle):
            return np.minimum(1024, np.exp(middle + shift + 0.5 * generator.normal(size=(128, 8)))).sum(1)

        guesses, tokens = draw(0.0), draw(0.2 * generator.normal(size=(128, 1)))
        for found, expected in ((ordered, np.zeros(128)), (balanced, guesses)):
            shares = divide_groups(expected.tolist(), 8)
            found.append(max(tokens[share].sum() for share in shares) / (tokens.sum() / 8))
    assert np.mean(ordered) > 1.18 and np.mean(balanced) < 1.13, (np.mean(ordered), np.mean(balanced))


def drawn_over_ranks(tp):
    """Which requests this rank's engine drew, and all samples as every rank has them."""
    mesh, drawn = build_mesh("cpu", sp=1, tp=tp), []
    prompts = [Prompt(f"p{i}", (i,), "", None, {}) for i in range(4)]
    expected = {"p0": 9.0, "p1": 8.0, "p2": 1.0, "p3": 1.5}
    requests = make_requests(prompts, 2, run_seed=0, step=3, max_tokens=9, expected=expected.get)

    class Engine:
        def generate(self, own, sampling):
            drawn.extend((request.uid, request.sample) for request in own)
            return [Rollout(r.uid, r.sample, 0, r.ids, np.zeros(1), np.ones(1), None, "stop", 0) for r in own]

    rollouts = draw_own(Engine(), requests, 2, None, mesh)
    own = [Sample(rollout, "", Score(None, {}, {}, "unscored")) for rollout in rollouts] if mesh.tp_rank == 0 else []
    shared = share_samples(own, mesh, drawing_rows(requests, 2, mesh.engines))
    return drawn, [(sample.rollout.uid, sample.rollout.sample) for sample in shared]


def test_samples_come_back_in_the_order_of_the_requests(ranks):
    every = [(f"p{i}", sample) for i in range(4) for sample in range(2)]
    (first, shared), (second, also) = ranks(2).run(drawn_over_ranks, 1)
    assert first == [*every[0:2], *every[4:6]] and second == [*every[2:4], *every[6:8]]  # whole groups: 10 and 9.5
    assert shared == also == every
    assert ranks(2).run(drawn_over_ranks, 2) == [(every, every)] * 2


def answers_of_three_epochs(model):
    """The answers of each step, and which groups the engines drew in it. No weight moves."""
    config = RunConfig(
        model=ModelConfig(path=str(model)),
        data=DataConfig(train_batch_size=4, max_prompt_length=64, max_response_length=50),
        rollout=RolloutConfig(name="hf", n=2),
        actor=ActorConfig(use_kl_loss=False, optim=OptimConfig(lr=0.0)),
        trainer=TrainerConfig(device=Device["cpu"], total_epochs=3),
    )
    trainer = Trainer(config, prompts=["a", "b", "c", "d"], reward=lambda response: len(response))
    divide, divided = draw_module.divide_groups, []
    draw_module.divide_groups = lambda *arguments: divided.append(divide(*arguments)) or divided[-1]
    try:
        steps = [trainer.step().responses_PG for _ in range(3)]
    finally:
        draw_module.divide_groups = divide
        trainer.close()
    return steps, divided


def test_a_run_on_two_engines_draws_what_one_draws(ranks, tiny_model, mesh):
    """From the second epoch on by length; groups and their order stay."""
    alone, whole = answers_of_three_epochs(tiny_model)
    assert {str(groups) for groups in whole} == {"[[0, 1, 2, 3]]"}
    (first, divided), (second, also) = ranks(2).run(answers_of_three_epochs, tiny_model)
    assert first == second == alone and divided == also
    assert divided[0] == [[0, 1], [2, 3]] and any(groups != [[0, 1], [2, 3]] for groups in divided)


def lengths_kept(config, steps_of_the_data, engines, per_engine):
    layout = SimpleNamespace(sequences_per_engine=per_engine)
    return _lengths_help(config, layout, SimpleNamespace(engines=engines), prompts_come_again=steps_of_the_data)


def test_lengths_are_kept_where_they_decide_something():
    config = RunConfig()
    assert lengths_kept(config, True, engines=2, per_engine=8)  # who draws what
    assert lengths_kept(config, True, engines=1, per_engine=config.rollout.max_num_seqs + 1)  # what comes first
    assert not lengths_kept(config, True, engines=1, per_engine=config.rollout.max_num_seqs)
    assert not lengths_kept(config, False, engines=2, per_engine=1000)  # no prompt is drawn twice
