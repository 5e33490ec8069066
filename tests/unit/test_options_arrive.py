"""Every number and switch of loss, sampling and optimizer is changed, and must change what it is there for.

    half_step   groups, token weights, mini-batches, passes and two updates of a small policy, on fixed rollouts
    draw        what the hf engine draws             ask    what a validation asks of the engine
    refill      dynamic sampling                     skips  updates without a finite gradient until the run ends

The tables hold every such option of the schema: a new one has to be placed here before the tests pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import is_dataclass, replace
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch
from cases import full_weights, make_rollouts, mini_batches_of, policy_of, share_of

from fastgrpo.batch.mini_batches import build_scoring_batches
from fastgrpo.config import Layout, RunConfig
from fastgrpo.evaluate import draw_answers
from fastgrpo.groups import make_groups
from fastgrpo.metrics import Sums
from fastgrpo.plan import with_option
from fastgrpo.policy.actor import Actor
from fastgrpo.policy.sequences import sequence_terms
from fastgrpo.records import Prompt, Request, Rollout, Sample, Score
from fastgrpo.rollout.hf import HfEngine
from fastgrpo.rollout.refill import fill_step
from fastgrpo.stages import _kl_controller, _sampling
from fastgrpo.trainer import Trainer

Options = dict[str, Any]
LOSS = {"data.train_batch_size": 2, "rollout.n": 4, "actor.use_kl_loss": False, "actor.optim.lr": 1e-3}
OFF_POLICY = LOSS | {"actor.grad_clip": 0.0}
IN_REWARD = LOSS | {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.5}
ADAPTIVE = IN_REWARD | {"algorithm.kl_ctrl.type": "adaptive", "algorithm.kl_penalty": "k2"}
SEQUENCES = LOSS | {"algorithm.rollout_correction.rollout_rs": "seq_mean_k1"}
SEQUENCES |= {"algorithm.rollout_correction.rollout_rs_threshold": 50.0}
ICEPOP = OFF_POLICY | {"algorithm.rollout_correction.rollout_is": "icepop"}
NORM = LOSS | {"actor.loss_agg_mode": "seq-mean-token-sum-norm", "actor.grad_clip": 0.0}
COSINE = LOSS | {"actor.optim.lr_scheduler_type": "cosine"}
FILTER = {"algorithm.filter_groups.enable": True, "rollout.n": 2, "data.train_batch_size": 2}

HALF_STEP: dict[str, tuple[Options, Any]] = {  # option -> (what else is set, its other value)
    "rollout.n": (LOSS, 2),
    "rollout.temperature": (LOSS, 0.7),
    "actor.ppo_mini_batch_size": (LOSS, 1),
    "actor.ppo_epochs": (LOSS, 2),
    "actor.clip_ratio_low": (OFF_POLICY, 0.5),
    "actor.clip_ratio_high": (OFF_POLICY, 0.5),
    "actor.clip_ratio_c": (OFF_POLICY, 1.3),
    "actor.tau_pos": (OFF_POLICY | {"actor.policy_loss": "sapo"}, 2.0),
    "actor.tau_neg": (OFF_POLICY | {"actor.policy_loss": "sapo"}, 2.0),
    "actor.loss_scale_factor": (NORM, 3.0),
    "actor.use_kl_loss": (LOSS | {"actor.kl_loss_coef": 0.1}, True),
    "actor.kl_loss_coef": (LOSS | {"actor.use_kl_loss": True}, 0.2),
    "actor.entropy_coeff": (LOSS, 0.1),
    "actor.grad_clip": (LOSS, 1e-3),
    "actor.optim.lr": (LOSS, 2e-3),
    "actor.optim.lr_warmup_steps": (LOSS, 4),
    "actor.optim.min_lr_ratio": (COSINE, 0.5),
    "actor.optim.weight_decay": (LOSS, 0.5),
    "actor.optim.beta1": (LOSS, 0.5),
    "actor.optim.beta2": (LOSS, 0.9),
    "actor.optim.eps": (LOSS, 1e-2),
    "algorithm.norm_adv_by_std_in_grpo": (LOSS, False),
    "algorithm.use_kl_in_reward": (LOSS | {"algorithm.kl_ctrl.kl_coef": 0.5}, True),
    "algorithm.kl_ctrl.kl_coef": (IN_REWARD, 2.0),
    "algorithm.kl_ctrl.target_kl": (ADAPTIVE, 1e-5),
    "algorithm.kl_ctrl.horizon": (ADAPTIVE, 10),
    "algorithm.overlong_filtering": (LOSS, True),
    "algorithm.rollout_correction.rollout_is_threshold": (OFF_POLICY, 0.5),
    "algorithm.rollout_correction.rollout_is_threshold_lower": (ICEPOP, 1.0),
    "algorithm.rollout_correction.rollout_rs_threshold": (SEQUENCES, 1.05),
    "algorithm.rollout_correction.rollout_rs_threshold_lower": (SEQUENCES, 1.0),
    "algorithm.rollout_correction.bypass_mode": (OFF_POLICY, True),
}
DRAW: dict[str, tuple[Options, Any]] = {
    "rollout.temperature": ({}, 0.5),
    "rollout.top_p": ({}, 0.3),
    "rollout.top_k": ({}, 2),
    "rollout.min_p": ({}, 0.5),
    "rollout.repetition_penalty": ({}, 3.0),
    "rollout.max_seconds": ({}, 1e-9),
}
ASK: dict[str, tuple[Options, Any]] = {
    "rollout.val_kwargs.temperature": ({}, 0.5),
    "rollout.val_kwargs.top_p": ({}, 0.5),
    "rollout.val_kwargs.top_k": ({}, 5),
    "rollout.val_kwargs.n": ({}, 3),
}
REFILL: dict[str, tuple[Options, Any]] = {
    "algorithm.filter_groups.enable": (FILTER | {"algorithm.filter_groups.enable": False}, True),
    "algorithm.filter_groups.max_num_gen_batches": (FILTER, 3),
}
SKIPS: dict[str, tuple[Options, Any]] = {"actor.max_skipped_updates": (LOSS, 5)}
ELSEWHERE = {  # memory, speed, layout, limits: test_memory_options, test_plan_*, test_parity, test_gate and others
    *("rollout.tensor_model_parallel_size", "rollout.max_model_len", "rollout.max_num_seqs", "rollout.sleep_level"),
    *("rollout.max_num_batched_tokens", "rollout.kv_cache_gib", "rollout.enforce_eager", "rollout.max_logprob_gap"),
    "rollout.check_weight_update",
    *("actor.max_tokens_per_gpu", "actor.micro_batch_size_per_gpu", "actor.ulysses_sequence_parallel_size"),
    *("actor.head_chunk_gib", "actor.use_liger", "actor.gradient_checkpointing", "actor.activation_offload"),
    "actor.use_torch_compile",
    *("actor.mlp_slices", "actor.fsdp.reshard_after_forward", "actor.fsdp.replicas", "actor.fsdp.offload_policy"),
    *("actor.fsdp.offload_optimizer", "actor.fsdp.offload_during_rollout", "rollout.val_kwargs.pass_score"),
}


def numbers_and_switches(cls: Any, prefix: str) -> set[str]:
    found: set[str] = set()
    for name, hint in get_type_hints(cls).items():
        key = f"{prefix}.{name}" if prefix else name
        if is_dataclass(hint):
            found |= numbers_and_switches(hint, key)
        elif ({*get_args(hint)} - {type(None)} or {hint}) <= {int, float, bool}:
            found.add(key)
    return found


def test_every_number_and_switch_has_its_place() -> None:
    leaves = {k for k in numbers_and_switches(RunConfig, "") if k.startswith(("actor.", "algorithm.", "rollout."))}
    placed = HALF_STEP.keys() | DRAW.keys() | ASK.keys() | REFILL.keys() | SKIPS.keys()
    assert leaves - placed - ELSEWHERE == set() and placed - leaves == set() and not placed & ELSEWHERE


def both(table: dict[str, tuple[Options, Any]], key: str) -> tuple[RunConfig, RunConfig]:
    """The configuration without and with the change."""
    config = RunConfig()
    for name, value in table[key][0].items():
        config = with_option(config, name, value)
    assert attrgetter(key)(config) != table[key][1]
    return config, with_option(config, key, table[key][1])


@pytest.fixture(scope="module")
def half_step(mesh: Any, make_tiny_model: Callable[..., Path]) -> Callable[[RunConfig], list[float]]:
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48}
    folder = make_tiny_model("qwen2", tied=True, **sizes)
    policy, reference = policy_of(folder, mesh), policy_of(folder, mesh, trainable=False)
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter.mul_(1.1)  # off the reference
    start = {name: parameter.detach().clone() for name, parameter in policy.module.named_parameters()}
    whole = full_weights(policy)
    rollouts = drawn_by(policy, make_rollouts(8), mesh)

    def run(config: RunConfig) -> list[float]:
        """Gradient norms, loss and moves of two updates; the KL coefficient; what was counted."""
        with torch.no_grad():
            for name, parameter in policy.module.named_parameters():
                parameter.copy_(start[name])
        actor, layout, controller = Actor(policy, reference, config, 10), Layout.of(config, 1), _kl_controller(config)
        scores = [1.0, 0.0, 0.0, 3.0, 0.0, 2.0, 1.0, 1.5]
        samples = [Sample(r, "", Score(s, {}, {}, "scored")) for r, s in zip(rollouts, scores, strict=True)]
        share = share_of(mesh, 1000)
        terms = sequence_terms(actor, build_scoring_batches(rollouts, share), 8, config, controller, mesh)
        groups = make_groups(samples, config, terms)
        trainer: Any = SimpleNamespace(config=config, stages=SimpleNamespace(layout=layout, share=share))
        mini_batches = Trainer._mini_batches(trainer, rollouts, groups)
        sums, noise = Sums(), torch.Generator().manual_seed(0)
        old = actor.old_logprobs(mini_batches)
        if old is not None:  # as if updates had been made since
            old = [[x + 0.5 * torch.randn(x.shape, generator=noise) for x in one] for one in old]
        ref = actor.ref_logprobs(mini_batches)
        norms = [norm for _ in range(2) for norm in actor.update(mini_batches, old, ref, sums).grad_norms]
        moved = [(w - whole[name]).norm().item() for name, w in full_weights(policy).items()]
        return [*norms, sums.reduce(mesh)["loss"], *moved, controller.coef, float(groups.counted_N.sum())]

    return run


def drawn_by(policy: Any, rollouts: list[Rollout], mesh: Any) -> list[Rollout]:
    """With logprobs of the sampler a little off the policy's, and one answer that was cut."""
    actor = Actor(policy, None, with_option(RunConfig(), "actor.use_kl_loss", False), 1)
    [batch] = build_scoring_batches(rollouts, share_of(mesh, 1000))
    [logprobs_R] = actor.score(policy, [batch])
    rng = np.random.default_rng(0)
    made = []
    for row, rollout in enumerate(rollouts):
        sampler = rollout.sampler_logprobs.copy()
        sampler[rollout.response_mask] = logprobs_R[batch.seq_id_R == row].numpy()
        sampler += 0.3 * rng.standard_normal(len(sampler)).astype(np.float32)
        made.append(replace(rollout, sampler_logprobs=sampler, finish_reason="length" if row == 5 else "stop"))
    return made


@pytest.mark.parametrize("key", HALF_STEP)
def test_loss_and_optimizer(key: str, half_step: Callable[[RunConfig], list[float]]) -> None:
    before, after = map(half_step, both(HALF_STEP, key))
    assert all(map(math.isfinite, before + after))
    assert len(before) != len(after) or max(abs(a - b) for a, b in zip(before, after, strict=True)) > 1e-7


def test_the_same_options_give_the_same_numbers(half_step: Callable[[RunConfig], list[float]]) -> None:
    """Otherwise the differences above would show nothing."""
    config, _ = both(HALF_STEP, "actor.optim.lr")
    assert half_step(config) == half_step(config)


@pytest.fixture(scope="module")
def draw(mesh: Any, make_tiny_model: Callable[..., Path]) -> Callable[[RunConfig], list[Any]]:
    folder = make_tiny_model("qwen2", tied=True, num_hidden_layers=1, hidden_size=32, intermediate_size=48)
    policy = policy_of(folder, mesh)

    def run(config: RunConfig) -> list[Any]:
        engine = HfEngine(config, mesh, folder, ())
        requests = [Request("p", i, 0, (7, 8, 9 + i), seed=i, max_tokens=8) for i in range(3)]
        with engine.awake(policy.export, 0):
            return [rollout.response_ids.tolist() for rollout in engine.generate(requests, _sampling(config, mesh))]

    return run


@pytest.mark.parametrize("key", DRAW)
def test_sampling(key: str, draw: Callable[[RunConfig], list[Any]]) -> None:
    config, changed = both(DRAW, key)
    before = draw(config)
    assert before == draw(config) != draw(changed)
    assert [len(tokens) for tokens in draw(changed)] == [1 if key == "rollout.max_seconds" else 8] * 3


def ask(config: RunConfig) -> tuple[int, Any]:
    asked: list[Any] = []
    engine: Any = SimpleNamespace(generate=lambda requests, sampling: asked.append((len(requests), sampling)) or [])
    prompts = [Prompt("a", (1,), "", None, {}), Prompt("b", (2,), "", None, {})]
    one: Any = SimpleNamespace(engine=0, engines=1)
    draw_answers(engine, prompts, config, one, step=0)
    return asked[0]


@pytest.mark.parametrize("key", ASK)
def test_validation_sampling(key: str) -> None:
    (count, sampling), (count_after, sampling_after) = map(ask, both(ASK, key))
    value = ASK[key][1]
    if key.endswith(".n"):
        assert (count, count_after) == (2, 2 * value)
    else:
        assert getattr(sampling_after, key.rpartition(".")[2]) == value != getattr(sampling, key.rpartition(".")[2])


def refill(config: RunConfig) -> int:
    """Rounds drawn, where no group ever has a signal."""
    rounds = []

    def nothing_to_learn(attempt: int) -> tuple[list[Prompt], list[Sample]]:
        rounds.append(attempt)
        return [Prompt("p", (1,), "", None, {})] * 2, [Sample(rollout, "", Score(1.0, {}, {}, "scored"))] * 4

    rollout = make_rollouts(1)[0]
    fill_step(nothing_to_learn, config)
    return len(rounds)


@pytest.mark.parametrize("key", REFILL)
def test_dynamic_sampling(key: str) -> None:
    before, after = map(refill, both(REFILL, key))
    assert (before, after) == ((1, 10) if key.endswith("enable") else (10, 3))


@pytest.mark.parametrize("key", SKIPS)
def test_skips(key: str, mesh: Any, tiny_model: Path) -> None:
    policy = policy_of(tiny_model, mesh)
    for config in both(SKIPS, key):
        actor = Actor(policy, None, config, 10)
        bad = mini_batches_of(make_rollouts(2), np.array([math.inf, 1.0]), share_of(mesh, 1000), config)
        for _ in range(config.actor.max_skipped_updates - 1):
            assert actor.update(bad, None, None, Sums()).skipped == 1
        with pytest.raises(RuntimeError, match=f"^{config.actor.max_skipped_updates} updates in a row"):
            actor.update(bad, None, None, Sums())
