"""Probes of the parity gate: which are drawn, on which engine, and that nothing of the run but the gate changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fastgrpo import RunConfig, Trainer
from fastgrpo import trainer as trainer_module
from fastgrpo.config import ActorConfig, DataConfig, Device, ModelConfig, OptimConfig, RolloutConfig, TrainerConfig
from fastgrpo.mesh import build_mesh
from fastgrpo.records import Prompt, Request, Sampling
from fastgrpo.rollout.draw import make_requests
from fastgrpo.rollout.probes import PROBES, TOKENS, draw_probes, probe_requests, probe_sampling, share_probes

FULL = Sampling(temperature=0.7, top_p=1.0, top_k=-1, min_p=0.0, repetition_penalty=1.0)
CUT = replace(FULL, top_p=0.9)


def requests_of(count: int, n: int = 4, step: int = 3, max_tokens: int = 100) -> list[Request]:
    prompts = [Prompt(f"p{i}", (i, i + 1), "", None, {}) for i in range(count)]
    return make_requests(prompts, n, run_seed=5, step=step, max_tokens=max_tokens)


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"repetition_penalty": 1.1}])
def test_probes_are_for_cut_vocabularies_at_the_same_temperature(cut: dict[str, float]) -> None:
    assert probe_sampling(FULL) is None and probe_sampling(replace(FULL, temperature=0.0, **cut)) is None
    assert probe_sampling(replace(FULL, **cut)) == FULL


@pytest.mark.parametrize("count", [1, 5, 16, 40])
def test_each_prompt_once_before_any_twice_and_seeds_of_their_own(count: int) -> None:
    requests = requests_of(count)
    probes = probe_requests(requests)
    assert [probe.uid for probe in probes] == [f"p{i % count}" for i in range(PROBES)]
    assert all(probe.ids == requests[4 * (i % count)].ids for i, probe in enumerate(probes))
    assert {probe.max_tokens for probe in probes} == {TOKENS}
    assert {probe.max_tokens for probe in probe_requests(requests_of(count, max_tokens=3))} == {3}
    seeds = {probe.seed for probe in probes}
    assert len(seeds) == PROBES and not seeds & {request.seed for request in requests}
    assert not seeds & {probe.seed for probe in probe_requests(requests_of(count, step=4))}
    assert probes == probe_requests(requests)


def drawn_on(tp: int, prompts: int, sampling: Sampling) -> tuple[list[int], list[tuple[int, str]]]:
    """The seeds that this rank's engine was asked for, and what every rank is then told."""
    mesh, asked = build_mesh("cpu", sp=1, tp=tp), []

    class Engine:
        def generate(self, requests: list[Request], sampling: Sampling) -> list[tuple[int, str]]:
            asked.extend(request.seed for request in requests)
            return [(mesh.engine, request.uid) for request in requests]

    own = draw_probes(Engine(), requests_of(prompts), 4, sampling, mesh)  # pyright: ignore[reportArgumentType]
    return asked, share_probes(own, mesh)  # pyright: ignore


@pytest.mark.parametrize("prompts", [1, 2, 7])  # with one, the second engine has no share of the rollout
def test_every_engine_is_looked_at_and_its_ranks_go_one_way(ranks, prompts: int) -> None:
    first, second = ranks(2).run(drawn_on, 1, prompts, CUT)
    halves = [uid for _, uid in first[1]][:PROBES], [uid for _, uid in first[1]][PROBES:]
    assert first[1] == second[1] and [engine for engine, _ in first[1]] == [0] * PROBES + [1] * PROBES
    own = {1: ({"p0"}, {"p0"}), 2: ({"p0"}, {"p1"}), 7: ({"p0", "p1", "p2", "p3"}, {"p4", "p5", "p6"})}
    assert (set(halves[0]), set(halves[1])) == own[prompts]
    first, second = ranks(2).run(drawn_on, 2, prompts, CUT)
    assert first == second and [engine for engine, _ in first[1]] == [0] * PROBES
    assert ranks(2).run(drawn_on, 1, prompts, FULL) == [([], []), ([], [])]


def test_the_run_is_the_same_with_and_without_them(
    tiny_model: Path, mesh: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> list[tuple[list[list[str]], float, dict[str, float]]]:
        config = RunConfig(
            model=ModelConfig(path=str(tiny_model)),
            data=DataConfig(train_batch_size=2, max_prompt_length=64, max_response_length=8),
            rollout=RolloutConfig(name="hf", n=3, temperature=0.7, top_p=0.9),
            actor=ActorConfig(use_kl_loss=False, optim=OptimConfig(lr=1e-2)),
            trainer=TrainerConfig(device=Device["cpu"], total_epochs=3),
        )
        trainer = Trainer(config, prompts=["one", "two"], reward=lambda response: len(response.encode()) % 7)
        records = [trainer.step() for _ in range(3)]
        trainer.close()
        quiet = ("timing_s/", "perf/")
        return [
            (r.responses_PG, r.loss, {k: v for k, v in r.metrics.items() if not k.startswith(quiet)}) for r in records
        ]

    with_probes = run()
    monkeypatch.setattr(trainer_module, "draw_probes", lambda *arguments: [])
    without = run()
    assert len({loss for _, loss, _ in without}) > 1  # it learns something
    for (answers, loss, metrics), (plain_answers, plain_loss, plain) in zip(with_probes, without, strict=True):
        assert answers == plain_answers and loss == plain_loss
        assert set(metrics) - set(plain) == {"gap/abs_mean", "gap/mean", "gap/abs_max"}
        assert {name: metrics[name] for name in plain} == plain
