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

from fastgrpo.algorithm.losses import POLICY_LOSSES, RATIO_FREE, LossBatch, LossConfig, SegmentSum, token_stats
from fastgrpo.algorithm.mismatch import importance_weights
from fastgrpo.algorithm.mismatch_stats import gap_stats
from fastgrpo.algorithm.stats import Stats
from fastgrpo.batch.packing import ShardedBatch
from fastgrpo.config import ActorConfig, HeadImpl
from fastgrpo_kernels import linear_grpo_loss, linear_logprob

# What `linear_grpo_loss` computes; everything else runs as a plain function over the logprobs of `linear_logprob`.
FUSED_LOSSES = frozenset({"vanilla", "cispo", "sapo"})


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
    logprobs_R: Tensor  # without gradient


@dataclass(frozen=True, slots=True)
class GrpoHead:
    """The policy loss on the rows of one micro-batch. Where the kernel has the loss and `fused` asks for it: loss and
    both gradients in one sweep; else logprobs with gradients and the plain loss function on top, the same maths by
    another road."""

    cfg: LossConfig
    temperature: float
    old_logprobs_R: Tensor | None
    ref_logprobs_R: Tensor | None
    fused: bool
    policy_loss: str  # a key of POLICY_LOSSES
    segment_sum: SegmentSum
    at_rollout: bool = True  # whether the weights are still those of the rollout
    kernel: KernelChoice = KernelChoice()

    def __call__(self, hidden_RH: Tensor, output: OutputLayer, batch: ShardedBatch) -> HeadLoss:
        fused = self.fused and self._kernel_has_it()
        loss_sum, logprobs_R, stats = (self._fused if fused else self._plain)(hidden_RH, output, batch)
        trainer_R = self.old_logprobs_R  # under the weights of the rollout
        if trainer_R is None and self.at_rollout:
            trainer_R = logprobs_R
        if batch.sampler_logprobs_R is not None and trainer_R is not None:
            live_R = batch.weights_R != 0
            acting = self.cfg.correction.acting(has_ratio=self.policy_loss not in RATIO_FREE)
            stats = stats | gap_stats(
                trainer_R, batch.sampler_logprobs_R, live_R, batch.seq_id_R, self.segment_sum, acting
            )
        return HeadLoss(loss_sum, stats, logprobs_R.detach())

    def _kernel_has_it(self) -> bool:
        correction = self.cfg.correction
        known_weights = correction.kind in ("none", "token") or correction.bypass or self.old_logprobs_R is not None
        return self.policy_loss in FUSED_LOSSES and known_weights

    def _fused(self, hidden_RH: Tensor, output: OutputLayer, batch: ShardedBatch) -> tuple[Tensor, Tensor, Stats]:
        cfg, correction, sampler_R = self.cfg, self.cfg.correction, batch.sampler_logprobs_R
        old_R, importance_R, in_kernel = self.old_logprobs_R, None, False
        if correction.bypass:
            old_R = sampler_R
        elif sampler_R is not None and old_R is not None:
            live_R = batch.weights_R != 0
            importance_R = importance_weights(old_R, sampler_R, live_R, batch.seq_id_R, self.segment_sum, correction)
        else:
            in_kernel = correction.kind == "token"
        out = linear_grpo_loss(
            hidden_RH,
            output.weight_VH,
            batch.targets_R,
            self.temperature,
            weights_N=batch.weights_R,
            advantages_N=batch.advantages_R,
            old_logprobs_N=old_R,
            ref_logprobs_N=self.ref_logprobs_R,
            sampler_logprobs_N=sampler_R if in_kernel else None,
            importance_N=importance_R,
            clip_low=cfg.clip_low,
            clip_high=cfg.clip_high,
            clip_c=cfg.clip_c,
            importance_max=correction.upper if in_kernel and sampler_R is not None else 0.0,
            kl_coef=cfg.kl_coef,
            kl_type=cfg.kl_type,
            entropy_coef=cfg.entropy_coef,
            policy_loss=self.policy_loss,
            tau_pos=cfg.tau_pos,
            tau_neg=cfg.tau_neg,
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
            entropy_U=entropy_R,
            seq_id_U=batch.seq_id_R,
        )
        loss = POLICY_LOSSES[self.policy_loss]
        out = loss(logprobs_R, self.old_logprobs_R, loss_batch, self.segment_sum, self.cfg)
        return out.loss_sum, logprobs_R.detach(), out.stats
