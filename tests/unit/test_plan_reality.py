"""The planned training peak against what torch really holds: whole updates of a real FSDP2 policy, on the CPU.

One or two micro-batches, AdamW state made before, every row of full length, so that nothing of the plan is a mere
bound. A GPU differs in liger's kernels, varlen attention and the engine beside it (bench/bench_memory.py measures
those).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import mini_batches_of, share_of, training_state
from live_bytes import LiveBytes

from fastgrpo.config import Dtype, Layout, RunConfig
from fastgrpo.mesh import Mesh, build_mesh
from fastgrpo.metrics import Sums
from fastgrpo.plan import Sizes, read_sizes, settle_on_cpu, with_option
from fastgrpo.plan.choose import Plan, choose
from fastgrpo.plan.job import Job
from fastgrpo.plan.settle import given
from fastgrpo.policy.actor import Actor
from fastgrpo.policy.lora import Lora
from fastgrpo.policy.model import build_policy
from fastgrpo.records import Rollout

TOKENS, PROMPT = 1024, 4  # of a micro-batch; sequences of 128 tokens as packed
SHAPE = {"num_hidden_layers": 6, "intermediate_size": 448}


def rollouts(count: int) -> list[Rollout]:
    rng = np.random.default_rng(0)
    length = 129 - PROMPT
    return [
        Rollout(
            uid="p",
            sample=i,
            attempt=0,
            prompt_ids=tuple(rng.integers(4, 200, PROMPT).tolist()),
            response_ids=rng.integers(4, 200, length).astype(np.int32),
            response_mask=np.ones(length, np.bool_),
            sampler_logprobs=np.full(length, -6, np.float32),
            finish_reason="length",
            weight_version=0,
        )
        for i in range(count)
    ]


def planned_and_held(folder: Path, world: int, vocab: int, rows: int, mesh: Mesh | None, **options: Any) -> Any:
    """(plan of the update, bytes that torch held at its peak) on one of `world` ranks. `micro`: micro-batches, 2."""
    micro = options.pop("micro", 2)
    mesh = mesh or build_mesh("cpu", sp=1, tp=1)
    config = RunConfig()
    config.model.path = str(folder)
    config.data.max_prompt_length, config.data.max_response_length = PROMPT, 128 - PROMPT
    config.data.train_batch_size, config.rollout.n = 8 * micro * world, 1
    config.actor.use_kl_loss, config.actor.use_liger, config.actor.max_tokens_per_gpu = False, False, TOKENS
    config.actor.head_chunk_gib = rows * 4 * vocab / 2**30
    config.actor.dtype = Dtype["float32"]
    config.model.lora_rank = options.pop("lora_rank", 0)
    for key, value in options.items():
        config = with_option(config, f"actor.{key.replace('__', '.')}", value)
    config = settle_on_cpu(config)
    job = Job.of(config, Sizes(read_sizes(folder), None), Layout.of(config, world))
    plan = choose(replace(job, reference_head=True), given(config), 2**40)  # what `auto` is on a CPU
    actor = config.actor
    policy = build_policy(
        folder,
        mesh,
        dtype=torch.float32,
        attention_backend="sdpa",
        trainable=True,
        gradient_checkpointing=actor.gradient_checkpointing or 0,
        mlp_slices=actor.mlp_slices or 1,
        reshard_after_forward=bool(actor.fsdp.reshard_after_forward),
        lora=Lora(config.model.lora_rank, 16, ("all-linear",), 0, "base") if config.model.lora_rank else None,
    )
    trainer = Actor(policy, None, config, 10)
    samples = rollouts(8 * micro * world)
    mini_batches = mini_batches_of(samples, np.ones(len(samples)), share_of(mesh, TOKENS), config)
    assert [len(batch.micro) for batch in mini_batches] == [micro]
    trainer.update(mini_batches, None, None, Sums())  # makes AdamW's state
    with LiveBytes() as live:
        live.add(training_state(trainer.optimizer))
        live.add([p.data for p in policy.module.parameters() if not p.requires_grad])
        trainer.update(mini_batches, None, None, Sums())
    return plan, live.peak


@pytest.mark.parametrize(
    ("vocab", "rows", "every", "reshard", "moment"),
    [
        (2000, 256, 0, True, "backward"),
        pytest.param(2000, 1024, 0, False, "head", marks=pytest.mark.slow),
        (2000, 256, 1, True, "backward"),
        pytest.param(2000, 256, 2, False, "head", marks=pytest.mark.slow),
        (20_000, 256, 1, True, "head"),  # four chunks of the head: the buffer that each leaves to the next
        pytest.param(20_000, 1024, 1, False, "head", marks=pytest.mark.slow),
    ],
)
def test_one_rank(
    mesh: Mesh, make_tiny_model: Any, vocab: int, rows: int, every: int, reshard: bool, moment: str
) -> None:
    folder = make_tiny_model(vocab_size=vocab, **SHAPE)
    options = {"gradient_checkpointing": every, "fsdp__reshard_after_forward": reshard}
    plan, held = planned_and_held(folder, 1, vocab, rows, mesh, **options)
    assert plan.training.moment == moment
    assert 0.98 <= plan.training.total / held <= 1.08, plan.training


@pytest.mark.parametrize(("vocab", "every", "moment"), [(2000, 0, "backward"), (20_000, 1, "head"), (267, 1, "first")])
def test_one_micro_batch(mesh: Mesh, make_tiny_model: Any, vocab: int, every: int, moment: str) -> None:
    folder = make_tiny_model(vocab_size=vocab, **SHAPE)
    plan, held = planned_and_held(folder, 1, vocab, 256, mesh, gradient_checkpointing=every, micro=1)
    assert plan.training.moment == moment
    assert 0.98 <= plan.training.total / held <= 1.08, plan.training


@pytest.mark.parametrize(("every", "moment"), [(0, "head"), (1, "backward")])
def test_sliced_mlps(mesh: Mesh, make_tiny_model: Any, every: int, moment: str) -> None:
    folder = make_tiny_model(vocab_size=2000, **SHAPE)
    plan, held = planned_and_held(folder, 1, 2000, 256, mesh, gradient_checkpointing=every, mlp_slices=8)
    assert plan.training.moment == moment
    assert 0.98 <= plan.training.total / held <= 1.08, plan.training


@pytest.mark.parametrize(
    ("every", "reshard", "slices"),
    [(0, True, 1), (1, True, 1), pytest.param(1, True, 8, marks=pytest.mark.slow), (1, False, 1)],
)
def test_adapters(mesh: Mesh, make_tiny_model: Any, every: int, reshard: bool, slices: int) -> None:
    folder = make_tiny_model(vocab_size=2000, **SHAPE)
    options = {"gradient_checkpointing": every, "fsdp__reshard_after_forward": reshard, "mlp_slices": slices}
    plan, held = planned_and_held(folder, 1, 2000, 256, mesh, lora_rank=8, **options)
    assert 0.98 <= plan.training.total / held <= 1.08, (plan.training, held)


@pytest.mark.slow
def test_two_ranks(ranks: Any, make_tiny_model: Any) -> None:
    folder = make_tiny_model(tied=True, vocab_size=2000, **SHAPE)
    results: list[tuple[Plan, int]] = ranks(2).run(
        planned_and_held, folder, 2, 2000, 256, None, gradient_checkpointing=1
    )
    for plan, held in results:
        assert 0.98 <= plan.training.total / held <= 1.12, plan.training
