"""AdamW over sharded masters: schedule, clipping, the update that refuses non-finite gradients.

The learning rate is a pure function of the update's number, so a resumed run needs no scheduler state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fastgrpo.config import OptimConfig, Schedule
from fastgrpo.policy.host_adamw import HostAdamW


def learning_rate(config: OptimConfig, update: int, total_updates: int) -> float:
    """Of update 1, 2, ...: update k of the warm-up runs at k / lr_warmup_steps of lr; a cosine goes from lr at the end
    of the warm-up to min_lr_ratio * lr at `total_updates`."""
    if update < config.lr_warmup_steps:
        return config.lr * update / config.lr_warmup_steps
    if config.lr_scheduler_type == Schedule["constant"]:
        return config.lr
    span = max(1, total_updates - config.lr_warmup_steps)
    done = min(1.0, (update - config.lr_warmup_steps) / span)
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * (1 + math.cos(math.pi * done)) / 2)


def build_adamw(parameters: Iterable[nn.Parameter], config: OptimConfig, *, on_host: bool = False) -> torch.optim.AdamW:
    """Of what is trained; `on_host`: with its moments in host memory. No weight decay on vectors (norms, biases): they
    are not what decay is meant to shrink."""
    matrices, vectors = [], []
    for parameter in (parameter for parameter in parameters if parameter.requires_grad):
        (matrices if parameter.ndim > 1 else vectors).append(parameter)
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return (HostAdamW if on_host else torch.optim.AdamW)(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


def apply_update(
    optimizer: torch.optim.Optimizer, lr: float, grad_clip: float, unhealthy: Tensor | None = None
) -> tuple[float, bool]:
    """Clip to the global norm, step, clear the gradients. Returns (norm before clipping, whether the step was made): a
    non-finite norm, or `unhealthy` other than 0 (0-dim), both the same on every rank, leaves weights and Adam state
    untouched."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = global_norm([p.grad for p in parameters])
    flag = torch.zeros_like(norm) if unhealthy is None else unhealthy.to(norm)
    grad_norm, refused = torch.stack([norm, flag]).tolist()  # one wait for the device
    finite = math.isfinite(grad_norm) and not refused
    if finite:
        if grad_clip > 0:
            torch.nn.utils.clip_grads_with_norm_(parameters, grad_clip, norm)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return grad_norm, finite


def global_norm(gradients: Sequence[Tensor]) -> Tensor:
    """L2 norm over all shards of all ranks, float32, on every rank."""
    norm = torch.nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def masters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters that `optimizer` moves."""
    return [parameter.data for group in optimizer.param_groups for parameter in group["params"]]


def moments(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """What `optimizer` keeps of each of its parameters (AdamW: two moments and the count of steps); nothing before its
    first step."""
    states = (optimizer.state.get(parameter, {}) for group in optimizer.param_groups for parameter in group["params"])
    return [value for state in states for value in state.values() if isinstance(value, Tensor)]
