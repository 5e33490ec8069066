"""Which settings: of all that the open options allow, the fastest that fits. Pure, no torch.

A few thousand combinations at most, each priced (constants.COST_*) and weighed (memory.py). When none fits, the one
that misses by least is returned, with what it misses by: `Plan.shortfall`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from operator import itemgetter
from typing import Any

from fastgrpo.plan import constants as k
from fastgrpo.plan.job import Job, Settings
from fastgrpo.plan.memory import (
    Peak,
    host_peak,
    kept_by_torch,
    overhead,
    rollout_peak,
    row_tokens,
    sequence_bytes,
    sync_peak,
    training_peak,
)

_BUDGETS = (65536, 49152, 32768, 24576, 16384, 12288, 8192, 6144, 4096, 3072, 2048)
_CHECKPOINTING = (0, 4, 3, 2, 1)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a job takes on each GPU of `gpu_bytes`, and what was decided for it."""

    job: Job
    settings: Settings
    gpu_bytes: int
    kv_bytes: int
    training: Peak  # torch's tensors; `training_needs` adds the rest
    sync: Peak
    rollout: Peak

    @property
    def host(self) -> Peak:
        """Of a node."""
        return host_peak(self.job, self.settings)

    @property
    def sequences(self) -> int:
        """That one engine's cache holds at once, each at its longest."""
        return self.kv_bytes // sequence_bytes(self.job)

    @property
    def training_needs(self) -> int:
        return int(self.training.total * (1 + k.TRAINING_SLACK)) + overhead(self.job)

    @property
    def rollout_needs(self) -> int:
        return max(self.rollout.total, self.sync.total) + int(k.ROLLOUT_SLACK * self.gpu_bytes)

    @property
    def needs(self) -> dict[str, int]:
        """Of a GPU, by phase, with reserves."""
        return {"training": self.training_needs, "rollout": self.rollout_needs}

    def short_of(self, phase: str | None = None) -> int:
        """Bytes that "training", "rollout" or (None) the tighter of the two is short of; negative: what it leaves. The
        same of a node's "host"; 0 where nobody said what that has."""
        if phase == "host":
            return 0 if self.job.host_bytes is None else self.host.total - self.job.host_bytes
        return (max(self.needs.values()) if phase is None else self.needs[phase]) - self.gpu_bytes

    @property
    def shortfall(self) -> int:
        return self.short_of()

    @property
    def fits(self) -> bool:
        """On GPU and host."""
        return self.shortfall <= 0 and self.short_of("host") <= 0


def weigh(job: Job, settings: Settings, gpu_bytes: int) -> Plan:
    """The plan of given settings. The cache gets what the run asks for (rollout.kv_cache_gib), else what the sequences
    of a step need at their longest, or what is free, and at least one sequence."""
    training = training_peak(job, settings)
    kept = kept_by_torch(job, training)
    free = gpu_bytes - int(k.ROLLOUT_SLACK * gpu_bytes) - rollout_peak(job, settings, 0, kept).total
    one = sequence_bytes(job)
    kv_bytes = job.fixed_kv_bytes
    if kv_bytes is None:
        kv_bytes = max(one, min(job.wanted_sequences * one, free // k.MIB * k.MIB))
        kv_bytes += -kv_bytes % k.MIB
    return Plan(
        job,
        settings,
        gpu_bytes,
        kv_bytes,
        training,
        sync_peak(job, settings, kept),
        rollout_peak(job, settings, kv_bytes, kept),
    )


def choose(job: Job, given: Mapping[str, Any], gpu_bytes: int) -> Plan:
    """The cheapest fitting plan; where GPU and host do not both have room, the GPU comes first. `given`: fields of
    Settings that are not open."""
    best: tuple[tuple[int, int, float], Plan] | None = None
    for price, settings in sorted(((price_of(job, s), s) for s in candidates(job, given)), key=itemgetter(0)):
        if best is not None and (0, 0, price) >= best[0]:
            break  # one that fits was found, and the cache can only add to the price
        plan = weigh(job, settings, gpu_bytes)
        rank = _rank(plan)
        if best is None or rank < best[0]:
            best = rank, plan
    assert best is not None
    return best[1]


def _rank(plan: Plan) -> tuple[int, int, float]:
    return max(0, plan.shortfall), max(0, plan.short_of("host")), cost(plan)


def candidates(job: Job, given: Mapping[str, Any]) -> Iterator[Settings]:
    """Every combination that makes sense of the open settings."""
    open_choices: dict[str, tuple[Any, ...]] = {
        "max_tokens_per_gpu": budgets(job),
        "head_chunk_bytes": tuple(k.HEAD_CHUNK_CUDA >> i for i in range(4)),
        "gradient_checkpointing": _CHECKPOINTING,
        "activation_offload": (False, True),
        "mlp_slices": (1, k.MLP_SLICES),
        "reshard_after_forward": (False, True),
        "offload_policy": (False, True),
        "offload_optimizer": (False, True),
        "offload_during_rollout": (False, True),
        "ref_offload_policy": (False, True) if job.reference else (False,),
    }
    choices = [(given[name],) if name in given else values for name, values in open_choices.items()]
    for values in product(*choices):
        settings = Settings(**dict(zip(open_choices, values, strict=True)))
        if settings.offload_policy and (settings.offload_optimizer or settings.offload_during_rollout):
            continue
        if settings.activation_offload and not settings.gradient_checkpointing:
            continue
        yield settings


def budgets(job: Job) -> tuple[int, ...]:
    """Token budgets worth trying: none below the longest sequence, none above what a rank has for one update."""
    most = max(job.least_budget, min(_BUDGETS[0], job.most_tokens))
    inner = [budget for budget in _BUDGETS if job.least_budget < budget < most]
    return tuple(dict.fromkeys([most, *inner, job.least_budget]))


def cost(plan: Plan) -> float:
    """Time that a plan loses, in shares of the training phase: by its settings, and by a cache too small for a step."""
    waves = max(1.0, plan.job.wanted_sequences / max(1, plan.sequences))
    return price_of(plan.job, plan.settings) + k.COST_CACHE_HALVED * math.log2(waves)


def price_of(job: Job, s: Settings) -> float:
    """Of the settings alone."""
    recomputed = math.ceil(job.model.layers / s.gradient_checkpointing) if s.gradient_checkpointing else 0
    recompute = k.COST_RECOMPUTE * recomputed / job.model.layers
    recompute += k.COST_RECOMPUTE * (s.mlp_slices > 1) * job.model.mlp_parameters / job.model.block_parameters
    per_micro_batch = k.COST_MICRO_BATCH_TOKENS + k.COST_GATHER_TOKENS * (job.shard > 1)
    per_micro_batch += k.COST_CPU_OFFLOAD_TOKENS * s.offload_policy
    return (
        (1 + recompute) * max(1.0, break_even_tokens(job, s) / row_tokens(job, s))
        - 1
        + k.COST_GATHER_AGAIN * (s.reshard_after_forward and job.shard > 1)
        - 1e-6 * (s.reshard_after_forward and job.shard == 1)  # alone it costs nothing: then it may save memory
        + k.COST_ACTIVATION_OFFLOAD * s.activation_offload
        + k.COST_CPU_OPTIMIZER * s.offload_policy
        + k.COST_HOST_MOMENTS * s.offload_optimizer
        + k.COST_PARK * s.offload_during_rollout
        + k.COST_REF_OFFLOAD * s.ref_offload_policy
        + per_micro_batch / row_tokens(job, s)
        + k.COST_CHUNK_HALVED * math.log2(k.HEAD_CHUNK_CUDA / s.head_chunk_bytes)
    )


def break_even_tokens(job: Job, s: Settings) -> float:
    """Of a micro-batch: as many as the device computes in the time that a row takes at least."""
    seconds = job.model.layers * k.ROW_BLOCK_S * (1 + k.ROW_MLP * (s.mlp_slices - 1))
    return seconds * k.REACHED * job.peak_flops / (6 * job.model.parameters)
