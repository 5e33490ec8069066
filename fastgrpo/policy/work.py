"""What a policy's passes cost in arithmetic: for balancing sequences over ranks, and for MFU. The formulas are in
batch/packing.py and flops.py; here they meet the model."""

from __future__ import annotations

from collections.abc import Callable

from transformers import PretrainedConfig

from fastgrpo.batch.packing import attention_cost
from fastgrpo.flops import ModelFlops
from fastgrpo.policy.head import OutputLayer
from fastgrpo.policy.model import Policy, blocks


def sequence_cost(policy: Policy) -> Callable[[int], float]:
    """Cost of a sequence of s tokens, up to a factor."""
    config = policy.config
    return attention_cost(
        num_parameters=sum(parameter.numel() for parameter in policy.module.parameters()),
        num_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        head_dim=_head_dim(config),
    )


def model_flops(policy: Policy) -> ModelFlops:
    """Of the whole model, whatever share of it lies on this rank."""
    lm, config = policy.module.lm, policy.config
    return ModelFlops.of(
        blocks(lm),
        OutputLayer.of(lm).weight_VH,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        head_dim=_head_dim(config),
    )


def _head_dim(config: PretrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
