"""The trainer's side of a step: score under the policy and the reference, then update, mini-batch after mini-batch.

    mini-batches (batch/packing.py)  -- old, ref passes -->  logprobs of each micro-batch's rows
                                     -- update -->           forward, head, backward; clip; AdamW

All passes go over the same micro-batches with the same cut into chunks, so `old` equals the first update's logprobs bit
for bit. A micro-batch without rows still runs: its collectives are those of the other ranks. Nothing here waits for the
device within a mini-batch; the gradient norm is the one number read back after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_functional
from torch import Tensor

from fastgrpo.algorithm.losses import LossConfig, SegmentSum
from fastgrpo.algorithm.mismatch import Correction
from fastgrpo.algorithm.mismatch_stats import gap_stats
from fastgrpo.batch.mini_batches import MiniBatch
from fastgrpo.batch.packing import ShardedBatch
from fastgrpo.config import HeadImpl, RolloutCorrectionConfig, RunConfig, uses_reference
from fastgrpo.errors import RunError
from fastgrpo.metrics import Sums
from fastgrpo.policy.determinism import strictly
from fastgrpo.policy.head import GrpoHead, KernelChoice, score_head
from fastgrpo.policy.host_adamw import HostAdamW
from fastgrpo.policy.model import Policy
from fastgrpo.policy.nonfinite import BadUpdate, Pass, unhealthy
from fastgrpo.policy.optim import apply_update, build_adamw, learning_rate, masters, moments
from fastgrpo.policy.parking import HostParking

Logprobs = list[list[Tensor]]  # of the rows of each micro-batch of each mini-batch, on this rank


@dataclass(frozen=True, slots=True)
class UpdateResult:
    grad_norms: tuple[float, ...]  # before clipping, one an update
    lr: float  # of the last update
    skipped: int  # updates that something non-finite (nonfinite.py) or an empty mini-batch prevented


class Actor:
    """Policy, reference and optimizer. `version` counts the updates made."""

    def __init__(self, policy: Policy, reference: Policy | None, config: RunConfig, total_updates: int) -> None:
        self.policy = policy
        self.reference = reference
        self.version = 0
        on_host = bool(config.actor.fsdp.offload_optimizer)
        self.optimizer = build_adamw(policy.module.parameters(), config.actor.optim, on_host=on_host)
        self._config = config.actor
        self._deterministic = config.trainer.deterministic
        self._temperature = config.rollout.temperature
        self._kernel = KernelChoice.of(config.actor, policy.device.type)
        self._loss_config = loss_config(config)
        self._total_updates = total_updates
        self._skipped_in_a_row = 0
        self._parking = HostParking()

    @contextmanager
    def lent(self, *, held: bool) -> Iterator[Callable[[], Iterator[tuple[str, Tensor]]]]:
        """Around an engine that is awake: the export of the policy's weights for it (see Policy.export). With
        `offload_during_rollout` masters and optimizer leave the device meanwhile: at once where the engine has the
        weights already (`held`), else when the last one is out, which is before an engine takes its cache. After an
        exception they stay away, because the engine may still have the memory."""
        if not self._config.fsdp.offload_during_rollout:
            yield self.policy.export
            return
        self._parking.send(masters(self.optimizer), moments(self.optimizer))
        if held:
            self._parking.free()
        yield self._last_export
        self._parking.bring_back()

    def _last_export(self) -> Iterator[tuple[str, Tensor]]:
        self._parking.require_readable()
        yield from self.policy.export()
        self._parking.free()

    def settle(self) -> None:
        """Before masters and optimizer state are read from outside: the optimizer's may still be on its way."""
        self._parking.arrive()
        if isinstance(self.optimizer, HostAdamW):
            self.optimizer.settle()

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps besides masters and optimizer."""
        return {"version": self.version, "skipped_in_a_row": self._skipped_in_a_row}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.version, self._skipped_in_a_row = state["version"], state["skipped_in_a_row"]

    def old_logprobs(self, mini_batches: Sequence[MiniBatch]) -> Logprobs | None:
        """None with bypass, where the sampler's stand for them."""
        if self._loss_config.correction.bypass:
            return None
        return [self.score(self.policy, mini_batch.micro) for mini_batch in mini_batches]

    def ref_logprobs(self, mini_batches: Sequence[MiniBatch]) -> Logprobs | None:
        """None without a KL term in the loss."""
        if self.reference is None or self._loss_config.kl_coef == 0:
            return None
        return [self.score(self.reference, mini_batch.micro) for mini_batch in mini_batches]

    def score(self, model: Policy, batches: Sequence[ShardedBatch]) -> list[Tensor]:
        """Logprobs of the rows of each micro-batch, without gradient. Raises RuntimeError where `lent` has taken the
        weights away, as `update` does."""
        self._parking.require_home()
        head = partial(score_head, temperature=self._temperature, kernel=self._kernel)
        with strictly(self._deterministic):
            return [model.score(batch, head).logprobs_R for batch in batches]

    def gap(self, batches: Sequence[ShardedBatch]) -> Sums:
        """Sampler against trainer on all rows of `batches`, with the weights as they are."""
        sums = Sums()
        for batch, logprobs_R in zip(batches, self.score(self.policy, batches), strict=True):
            if batch.sampler_logprobs_R is not None:
                sampler_R = batch.sampler_logprobs_R.to(logprobs_R.device)
                live_R = torch.ones_like(sampler_R, dtype=torch.bool)
                seq_id_R, sum_R = batch.seq_id_R.to(logprobs_R.device), self._segment_sum(batch)
                sums.add(gap_stats(logprobs_R, sampler_R, live_R, seq_id_R, sum_R, self._loss_config.correction))
        return sums

    def update(
        self,
        mini_batches: Sequence[MiniBatch],
        old_R: Logprobs | None,
        ref_R: Logprobs | None,
        sums: Sums,
        on_bad: Callable[[BadUpdate], None] = lambda bad: None,
    ) -> UpdateResult:
        """ppo_epochs passes over the mini-batches. `old_R` None: they are the logprobs of now. `on_bad` is called, on
        all ranks, with an update that was skipped because something in it was not finite; its numbers are not summed.

        Raises RunError after `max_skipped_updates` of them in a row.
        """
        self._parking.require_home()
        rollout_version = self.version
        grad_norms: list[float] = []
        skipped, lr = 0, 0.0
        for _ in range(self._config.ppo_epochs):
            for number, mini_batch in enumerate(mini_batches):
                if mini_batch.loss_tokens == 0:
                    skipped += 1
                    continue
                old, ref = old_R[number] if old_R else None, ref_R[number] if ref_R else None
                own = Sums()
                passes = self._backward(mini_batch, old, ref, own, at_rollout=self.version == rollout_version)
                lr = learning_rate(self._config.optim, self.version + 1, self._total_updates)
                flag = unhealthy(passes, self.policy.device)
                self._parking.arrive()
                grad_norm, stepped = apply_update(self.optimizer, lr, self._config.grad_clip, flag)
                grad_norms.append(grad_norm)
                self.version += 1
                if stepped:
                    sums.add(own.values)
                else:
                    skipped += 1
                    on_bad(BadUpdate(self.version, grad_norm, tuple(passes)))
                self._count_skips(stepped, grad_norm)
        return UpdateResult(tuple(grad_norms), lr, skipped)

    def _backward(
        self,
        mini_batch: MiniBatch,
        old_R: Sequence[Tensor] | None,
        ref_R: Sequence[Tensor] | None,
        sums: Sums,
        *,
        at_rollout: bool,
    ) -> list[Pass]:
        passes = []
        for index, batch in enumerate(mini_batch.micro):
            head = GrpoHead(
                self._loss_config,
                self._temperature,
                None if old_R is None else old_R[index],
                None if ref_R is None else ref_R[index],
                fused=self._config.head != HeadImpl["reference"],
                policy_loss=str(self._config.policy_loss),
                segment_sum=self._segment_sum(batch),
                at_rollout=at_rollout,
                kernel=self._kernel,
            )
            with strictly(self._deterministic):
                out = self.policy.run(batch, head)
                out.loss_sum.backward()
            loss_sum = out.loss_sum.detach()
            sums.add({"loss": loss_sum.double(), **out.stats})
            passes.append(Pass(batch, out.logprobs_R, loss_sum))
        return passes

    def _segment_sum(self, batch: ShardedBatch) -> SegmentSum:
        return partial(segment_sum, num_segments=batch.num_sequences + 1, group=self.policy.sp_group)

    def _count_skips(self, stepped: bool, grad_norm: float) -> None:
        self._skipped_in_a_row = 0 if stepped else self._skipped_in_a_row + 1
        if self._skipped_in_a_row >= self._config.max_skipped_updates:
            raise RunError(
                f"{self._skipped_in_a_row} updates in a row had something that is not finite (gradient norm of the "
                f"last: {grad_norm}); weights and Adam state are those before the first. Lower actor.optim.lr, or look "
                "at the sequences in the run folder's faults/."
            )


def loss_config(config: RunConfig) -> LossConfig:
    actor, correction = config.actor, config.algorithm.rollout_correction
    return LossConfig(
        clip_low=actor.clip_ratio_low,
        clip_high=actor.clip_ratio_high,
        clip_c=actor.clip_ratio_c,
        tau_pos=actor.tau_pos,
        tau_neg=actor.tau_neg,
        kl_coef=actor.kl_loss_coef if uses_reference(actor) else 0.0,
        kl_type=str(actor.kl_loss_type),
        entropy_coef=actor.entropy_coeff,
        correction=correction_of(correction),
    )


def correction_of(options: RolloutCorrectionConfig) -> Correction:
    if options.rollout_is == "none":
        return Correction(bypass=options.bypass_mode)
    upper, lower = options.rollout_is_threshold, options.rollout_is_threshold_lower
    return Correction(str(options.rollout_is), upper, 1 / upper if lower is None else lower, options.bypass_mode)


def segment_sum(x_U: Tensor, seq_id_U: Tensor, *, num_segments: int, group: dist.ProcessGroup | None) -> Tensor:
    """Sum of x over all tokens of each token's sequence, also those on other ranks of the SP group; differentiable.
    x_U: a number a token, or [U, K], K numbers."""
    sums = x_U.new_zeros(num_segments, *x_U.shape[1:]).index_add(0, seq_id_U, x_U)
    if group is not None:
        sums = dist_functional.all_reduce(sums, group=group)
    return sums[seq_id_U]
