"""From hidden states to logprobs and loss: the only module that calls the kernels.

A head is a function (hidden_RH, output layer, batch) that `PolicyModule.forward` calls where the output weight is
gathered. `score_head` gives logprobs and entropies; `GrpoHead` the loss, with both gradients made in the forward. The
temperature is the sampling temperature: every logprob of the project is of that softmax.

What the model's own forward does around its head is read from its config: a soft cap (`final_logit_softcapping`), a
scale (`logit_scale`, or the inverse of `logits_scaling`).

Shape suffixes: R rows of this rank with a loss weight (or a logprob to score), H hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import PreTrainedModel

from fastgrpo.algorithm.loss import LossBatch, LossConfig, PolicyLossFn, SegmentSum, token_stats
from fastgrpo.algorithm.mismatch import gap_stats
from fastgrpo.algorithm.stats import Stats
from fastgrpo.batch.packing import ShardedBatch
from fastgrpo.config import ActorConfig, HeadImpl
from fastgrpo_kernels import linear_grpo_loss, linear_logprob


@dataclass(frozen=True, slots=True)
class OutputLayer:
    weight_VH: Tensor
    bias_V: Tensor | None
    logit_scale: float
    softcap: float

    @classmethod
    def of(cls, lm: PreTrainedModel) -> OutputLayer:
        layer, config = lm.get_output_embeddings(), lm.config
        assert isinstance(layer, nn.Linear)
        scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
        return cls(layer.weight, layer.bias, scale, getattr(config, "final_logit_softcapping", None) or 0.0)

    @property
    def options(self) -> dict[str, Any]:
        return {"bias_V": self.bias_V, "logit_scale": self.logit_scale, "softcap": self.softcap}


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """What all kernel calls of a run have in common: with other rounding in one of them the ratio of an update to its
    old pass would not be exactly 1."""

    impl: str = "auto"
    chunk_bytes: int | None = None  # of the working buffers; None: the kernels' default

    @classmethod
    def of(cls, actor: ActorConfig, device_type: str) -> KernelChoice:
        chunk_bytes = None if actor.head_chunk_gib is None else int(actor.head_chunk_gib * (1 << 30))
        if actor.head == HeadImpl["reference"]:
            return cls("reference", chunk_bytes)
        # the gradient of an entropy bonus exists in one of the GPU forms alone
        return cls("rows" if actor.entropy_coeff and device_type == "cuda" else "auto", chunk_bytes)

    @property
    def options(self) -> dict[str, Any]:
        return {"impl": self.impl, "chunk_bytes": self.chunk_bytes}


class Head(Protocol):
    def __call__(self, hidden_RH: Tensor, output: OutputLayer, batch: ShardedBatch) -> Any: ...


@dataclass(frozen=True, slots=True)
class Scored:
    logprobs_R: Tensor  # float32
    entropy_R: Tensor


def score_head(
    hidden_RH: Tensor,
    output: OutputLayer,
    batch: ShardedBatch,
    *,
    temperature: float,
    kernel: KernelChoice = KernelChoice(),
) -> Scored:
    """Logprob of each row's target and entropy of its distribution, by the product and the cut of the training heads
    with the same `kernel`: with unchanged weights the ratio to it is exactly 1."""
    options = output.options | kernel.options
    return Scored(*linear_logprob(hidden_RH, output.weight_VH, batch.targets_R, temperature, **options))


@dataclass(frozen=True, slots=True)
class HeadLoss:
    loss_sum: Tensor  # 0-dim: this rank's rows, every normaliser already in the weights
    stats: Stats


@dataclass(frozen=True, slots=True)
class GrpoHead:
    """The policy loss on the rows of one micro-batch. `fused`: loss and both gradients in one sweep of the kernel;
    else logprobs with gradients and the plain loss function on top, the same maths by another road."""

    cfg: LossConfig
    temperature: float
    old_logprobs_R: Tensor | None
    ref_logprobs_R: Tensor | None
    fused: bool
    policy_loss: PolicyLossFn
    segment_sum: SegmentSum
    kernel: KernelChoice = KernelChoice()

    def __call__(self, hidden_RH: Tensor, output: OutputLayer, batch: ShardedBatch) -> HeadLoss:
        loss_sum, logprobs_R, stats = (self._fused if self.fused else self._plain)(hidden_RH, output, batch)
        if batch.sampler_logprobs_R is not None:
            at_rollout_R = logprobs_R if self.old_logprobs_R is None else self.old_logprobs_R
            live_R = batch.weights_R != 0
            stats = stats | gap_stats(at_rollout_R, batch.sampler_logprobs_R, live_R, self.cfg.importance_max)
        return HeadLoss(loss_sum, stats)

    def _fused(self, hidden_RH: Tensor, output: OutputLayer, batch: ShardedBatch) -> tuple[Tensor, Tensor, Stats]:
        cfg = self.cfg
        out = linear_grpo_loss(
            hidden_RH,
            output.weight_VH,
            batch.targets_R,
            self.temperature,
            weights_N=batch.weights_R,
            advantages_N=batch.advantages_R,
            old_logprobs_N=self.old_logprobs_R,
            ref_logprobs_N=self.ref_logprobs_R,
            sampler_logprobs_N=batch.sampler_logprobs_R,
            clip_low=cfg.clip_low,
            clip_high=cfg.clip_high,
            clip_c=cfg.clip_c,
            importance_max=cfg.importance_max or 0.0,
            kl_coef=cfg.kl_coef,
            kl_type=cfg.kl_type,
            entropy_coef=cfg.entropy_coef,
            **output.options,
            **self.kernel.options,
        )
        kl_R = None if self.ref_logprobs_R is None else out.kl_N
        stats = token_stats(batch.weights_R != 0, out.ratio_N, out.flags_N, kl_R, out.entropy_N)
        return out.loss, out.logprobs_N, stats

    def _plain(self, hidden_RH: Tensor, output: OutputLayer, batch: ShardedBatch) -> tuple[Tensor, Tensor, Stats]:
        logprobs_R, entropy_R = linear_logprob(
            hidden_RH,
            output.weight_VH,
            batch.targets_R,
            self.temperature,
            **output.options,
            **self.kernel.options,
        )
        loss_batch = LossBatch(
            advantages_U=batch.advantages_R,
            weights_U=batch.weights_R,
            ref_logprobs_U=self.ref_logprobs_R,
            sampler_logprobs_U=batch.sampler_logprobs_R,
            importance_U=None,
            entropy_U=entropy_R,
            seq_id_U=batch.seq_id_R,
        )
        out = self.policy_loss(logprobs_R, self.old_logprobs_R, loss_batch, self.segment_sum, self.cfg)
        return out.loss_sum, logprobs_R.detach(), out.stats
