"""What tests of the policy share: ragged rollouts, batches of them, one update on any number of ranks, and the truth
that transformers gives for each sequence on its own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fastgrpo.batch.mini_batches import MiniBatch, Share, build_mini_batches
from fastgrpo.batch.packing import ShardedBatch, pack, slice_for_rank
from fastgrpo.config import RunConfig
from fastgrpo.mesh import Mesh, build_mesh
from fastgrpo.metrics import Sums
from fastgrpo.policy.actor import Actor, uses_reference
from fastgrpo.policy.lora import is_adapter
from fastgrpo.policy.model import Policy, build_policy
from fastgrpo.policy.optim import masters, moments
from fastgrpo.policy.weights import local_rows
from fastgrpo.records import Rollout


@contextlib.contextmanager
def one_process(device_type: str = "cpu") -> Iterator[Mesh]:
    """This process as a mesh of its own. The process group and torchrun's variables end with the block."""
    before = dict(os.environ)
    started = not dist.is_initialized()
    try:
        yield build_mesh(device_type, sp=1, tp=1)
    finally:
        if started:
            dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(before)


def make_rollouts(count: int = 8, *, seed: int = 0, vocab: int = 200, sampler_noise: float = 0.3) -> list[Rollout]:
    """Prompts of 2 to 19 and responses of 1 to 19 random tokens, the first of each 5 partly not drawn by the policy."""
    rng = np.random.default_rng(seed)
    rollouts = []
    for i in range(count):
        length = int(rng.integers(1, 20))
        mask = np.ones(length, np.bool_)
        mask[1 : length // 2] = i % 5 != 0
        rollouts.append(
            Rollout(
                uid="p",
                sample=i,
                attempt=0,
                prompt_ids=tuple(rng.integers(4, vocab, rng.integers(2, 20)).tolist()),
                response_ids=rng.integers(4, vocab, length).astype(np.int32),
                response_mask=mask,
                sampler_logprobs=(-6 + sampler_noise * rng.standard_normal(length)).astype(np.float32),
                finish_reason="stop",
                weight_version=0,
            )
        )
    return rollouts


def one_batch(rollouts: Sequence[Rollout], weights_N: Any = None) -> ShardedBatch:
    """All sequences in one row, in order, on one rank: every token that the policy drew, or those of weight."""
    ones_N = np.ones(len(rollouts))
    micro = pack(
        rollouts,
        range(len(rollouts)),
        sp=1,
        advantages_N=ones_N,
        weights_N=ones_N if weights_N is None else weights_N,
        pad_id=0,
    )
    return slice_for_rank(micro, 0, 1, scoring=weights_N is None)


def separate_logprobs(model: Any, rollouts: Sequence[Rollout], temperature: float) -> Tensor:
    """By a transformers model, each sequence in a forward of its own: log-softmax of logits / temperature at the tokens
    that the policy drew, in the order of `one_batch`. With gradient."""
    found = []
    for rollout in rollouts:
        ids = torch.tensor([[*rollout.prompt_ids, *rollout.response_ids.tolist()]])
        logprobs = (model(input_ids=ids, use_cache=False).logits[0, :-1] / temperature).log_softmax(-1)
        drawn = logprobs.gather(1, ids[0, 1:, None])[len(rollout.prompt_ids) - 1 :, 0]
        found.append(drawn[torch.from_numpy(rollout.response_mask)])
    return torch.cat(found)


def policy_of(folder: Path, mesh: Mesh, *, trainable: bool = True, **options: Any) -> Policy:
    return build_policy(folder, mesh, dtype=torch.float32, attention_backend="auto", trainable=trainable, **options)


def share_of(mesh: Mesh, max_tokens_per_gpu: int) -> Share:
    return Share(
        dp=mesh.dp,
        dp_rank=mesh.dp_rank,
        sp=mesh.sp,
        sp_rank=mesh.sp_rank,
        max_tokens=max_tokens_per_gpu * mesh.sp,
        max_sequences=None,
        cost=lambda tokens: tokens,
        pad_id=0,
    )


def mini_batches_of(
    rollouts: Sequence[Rollout], advantages_N: np.ndarray, share: Share, config: RunConfig, sequences: int | None = None
) -> list[MiniBatch]:
    return build_mini_batches(
        rollouts,
        advantages_N,
        np.ones(len(rollouts), np.bool_),
        share,
        sequences=sequences or len(rollouts),
        keep_zero_advantage=uses_reference(config.actor) or config.actor.entropy_coeff != 0,
        loss_agg_mode=str(config.actor.loss_agg_mode),
        max_response_length=20,
        loss_scale_factor=None,
    )


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def full_weights(policy: Policy) -> dict[str, Tensor]:
    return {name: full(parameter) for name, parameter in policy.module.named_parameters()}


def full_gradients(policy: Policy) -> dict[str, Tensor]:
    return {name: full(parameter.grad) for name, parameter in policy.module.named_parameters() if parameter.requires_grad}


@torch.no_grad()
def stir_adapters(policy: Policy) -> None:
    """Off their start, where B is 0, so that each adapter shows; the same on any number of ranks."""
    for number, (name, parameter) in enumerate(policy.module.named_parameters()):
        if is_adapter(name):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            parameter.to_local().add_(0.1 * noise[local_rows(parameter)])


class GradientReader(torch.optim.Optimizer):
    """In an optimizer's place: keeps the whole gradients that it is given and moves nothing."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.gradients: dict[str, Tensor] = {}
        super().__init__(policy.module.parameters(), {"lr": 0.0})

    def step(self, closure: Any = None) -> None:
        self.gradients = full_gradients(self._policy)


def one_update(
    folder: Path,
    *,
    sp: int = 1,
    replicas: int = 1,
    max_tokens_per_gpu: int = 1000,
    count: int = 8,
    config: RunConfig | None = None,
    updates: int = 1,
    mesh: Mesh | None = None,
    **options: Any,
) -> dict[str, Any]:
    """What an update over `count` ragged rollouts sees (loss, stats, gradient norm, whole gradients), and how far
    `updates` AdamW updates over the same then move the weights. With a KL term and an entropy bonus."""
    mesh = mesh or build_mesh("cpu", sp=sp, tp=1, replicas=replicas)
    config = config or parity_config()
    policy = policy_of(folder, mesh, **options)
    reference = policy_of(folder, mesh, trainable=False) if policy.lora is None else policy.base
    stir_adapters(policy)
    with torch.no_grad():  # off the reference, so that the KL term has a gradient
        for parameter in policy.module.parameters():
            parameter.mul_(1.05)
    actor = Actor(policy, reference, config, 10)
    start, adamw = full_weights(policy), actor.optimizer
    rollouts = make_rollouts(count)
    advantages_N = np.random.default_rng(1).standard_normal(count)
    mini_batches = mini_batches_of(rollouts, advantages_N, share_of(mesh, max_tokens_per_gpu), config)
    ref_R = actor.ref_logprobs(mini_batches)
    actor.optimizer = reader = GradientReader(policy)
    sums = Sums()
    result = actor.update(mini_batches, None, ref_R, sums)
    actor.optimizer = adamw
    for _ in range(updates):
        actor.update(mini_batches, None, ref_R, Sums())
    return {
        "micro_batches": len(mini_batches[0].micro),
        "rows": sum(len(batch.rows_R) for batch in mini_batches[0].micro),
        "grad_norm": result.grad_norms[0],
        "gradients": reader.gradients,
        "moves": {name: weight - start[name] for name, weight in full_weights(policy).items()},
        **sums.reduce(mesh),
    }


def parity_config() -> RunConfig:
    config = RunConfig()
    config.rollout.temperature = 0.8
    config.actor.kl_loss_coef, config.actor.entropy_coeff = 0.1, 0.01
    config.actor.optim.lr = 1e-3
    config.actor.optim.eps = 1e-4  # Adam's own 1e-8 would blow gradients that are all rounding up to full steps
    return config


def training_state(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Masters, then moments."""
    return [*masters(optimizer), *moments(optimizer)]
