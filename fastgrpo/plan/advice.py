"""What to do when memory is short: the one change of the configuration that helps most. Pure, no torch.

Every single change that the configuration allows is planned as if it had been made. Of those that help enough, the ones
that leave the numbers of the training alone come before those that change what is trained, and those before more GPUs;
of one kind, the one that costs least time. When no single change is enough it is the one that frees most.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from fastgrpo.config import Layout, RunConfig, heads_divide, loads_reference
from fastgrpo.plan import constants as k
from fastgrpo.plan.choose import Plan, budgets, cost
from fastgrpo.plan.job import Sizes
from fastgrpo.plan.memory import sequence_bytes
from fastgrpo.plan.settle import make_plan, with_option

SAME_NUMBERS, OTHER_TRAINING, MORE_GPUS = range(3)
_WORTH_IT = 0.1  # of the GPU: what a change must free when memory ran out although the plan fitted
_OFFLOADS = (
    "actor.activation_offload",
    "actor.fsdp.offload_policy",
    "actor.fsdp.offload_optimizer",
    "actor.fsdp.offload_during_rollout",
    "ref.offload_policy",
)

Option = tuple[str, Any, int]


@dataclass(frozen=True, slots=True)
class Change:
    """One option set to another value, and the plan that follows from it."""

    key: str
    value: Any
    kind: int
    plan: Plan

    @property
    def text(self) -> str:
        return f"{self.key}={str(self.value).lower() if isinstance(self.value, bool) else format(self.value, 'g')}"


def best_change(
    config: RunConfig, sizes: Sizes, layout: Layout, gpu_bytes: int, phase: str | None = None
) -> Change | None:
    """The single change that helps most with `phase` ("training", "rollout", "host", None: the tighter on
    the GPU); None when none helps. One that would make GPU or host short of memory, or shorter, is no help.

    What `config` leaves open the plan has tried already: only what it states, and what the plan never decides, is
    changed, and the open options are decided anew for each change.
    """
    plan = make_plan(config, sizes, layout, gpu_bytes)
    now, other = plan.short_of(phase), None if phase == "host" else "host"
    goal = 0 if now > 0 else now - int(_WORTH_IT * gpu_bytes)
    better = [
        change
        for change in changes(config, sizes, layout, gpu_bytes)
        if change.plan.short_of(phase) < now and change.plan.short_of(other) <= max(0, plan.short_of(other))
    ]
    enough = [change for change in better if change.plan.short_of(phase) <= goal]
    if enough:
        return min(enough, key=lambda change: (change.kind, cost(change.plan)))
    return min(better, key=lambda change: change.plan.short_of(phase), default=None)


def changes(config: RunConfig, sizes: Sizes, layout: Layout, gpu_bytes: int) -> Iterator[Change]:
    """Every single change worth planning that is neither in force nor open."""
    plan = make_plan(config, sizes, layout, gpu_bytes)
    for key, value, kind in (*_of_the_trainer(config, plan), *_of_the_run(config, plan, layout)):
        if attrgetter(key)(config) in (value, None):
            continue
        changed = with_option(config, key, value)
        models = sizes if loads_reference(changed) else replace(sizes, reference=None)
        world = value if kind == MORE_GPUS else layout.world
        after = Layout.of(changed, world, value if kind == MORE_GPUS else layout.ranks_per_node)
        yield Change(key, value, kind, make_plan(changed, models, after, gpu_bytes))


def _of_the_trainer(config: RunConfig, plan: Plan) -> Iterator[Option]:
    job, settings = plan.job, plan.settings
    for budget in budgets(job):
        if budget < settings.max_tokens_per_gpu:
            yield "actor.max_tokens_per_gpu", budget, SAME_NUMBERS
    yield "actor.gradient_checkpointing", 1, SAME_NUMBERS
    yield "actor.fsdp.reshard_after_forward", True, SAME_NUMBERS
    if settings.head_chunk_bytes > k.HEAD_CHUNK_LEAST:
        yield "actor.head_chunk_gib", k.HEAD_CHUNK_LEAST / k.GIB, SAME_NUMBERS
    yield "actor.mlp_slices", max(k.MLP_SLICES, 2 * settings.mlp_slices), SAME_NUMBERS
    actor, fsdp = config.actor, config.actor.fsdp  # what they state, not what the plan chose around it
    if actor.gradient_checkpointing != 0:
        yield "actor.activation_offload", True, SAME_NUMBERS
    if not (fsdp.offload_optimizer or fsdp.offload_during_rollout):
        yield "actor.fsdp.offload_policy", True, SAME_NUMBERS
    if not fsdp.offload_policy:
        yield "actor.fsdp.offload_optimizer", True, SAME_NUMBERS
        yield "actor.fsdp.offload_during_rollout", True, SAME_NUMBERS
    # What is stated as on fills the host, and the one kind of offload keeps the plan from choosing the other.
    for key in _OFFLOADS:
        if attrgetter(key)(config):
            yield key, False, SAME_NUMBERS
    if fsdp.replicas > 1:
        yield "actor.fsdp.replicas", 1, SAME_NUMBERS
    if job.reference is not None:
        yield "ref.offload_policy", True, SAME_NUMBERS
        yield "actor.use_kl_loss", False, OTHER_TRAINING


def _of_the_run(config: RunConfig, plan: Plan, layout: Layout) -> Iterator[Option]:
    job, model = plan.job, plan.job.model
    groups = {"rollout.tensor_model_parallel_size": layout.tp, "actor.ulysses_sequence_parallel_size": layout.sp}
    for key, size in groups.items():
        fits = heads_divide(2 * size, model.heads, model.kv_heads)
        own = config.rollout.name == "hf" and key.startswith("rollout")
        if layout.ranks_per_node % (2 * size) == 0 and fits and not own:
            yield key, 2 * size, SAME_NUMBERS
    half_cache = plan.kv_bytes // 2 // k.MIB * k.MIB
    if config.rollout.kv_cache_gib is not None and half_cache >= sequence_bytes(job):
        yield "rollout.kv_cache_gib", half_cache / k.GIB, SAME_NUMBERS
    if config.rollout.sleep_level == 1:
        yield "rollout.sleep_level", 2, SAME_NUMBERS
    if config.rollout.max_num_seqs > 1:
        yield "rollout.max_num_seqs", config.rollout.max_num_seqs // 2, SAME_NUMBERS
    if config.data.max_response_length > 1 and config.rollout.max_model_len is None:
        yield "data.max_response_length", config.data.max_response_length // 2, OTHER_TRAINING
    if layout.nodes == 1:
        yield "trainer.n_gpus_per_node", 2 * layout.world, MORE_GPUS
