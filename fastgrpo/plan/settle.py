"""Between the configuration and the plan: which options are open, and the configuration with all of them decided.

    RunConfig (some null)  -- settle -->  Plan, RunConfig (none null)         on CUDA
                           -- settle_on_cpu -->     RunConfig (none null)     fixed values: memory is the user's there

Nothing is edited: a decided configuration is a new one.
"""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from typing import Any

from fastgrpo.config import Layout, RunConfig, heads_divide
from fastgrpo.plan import constants as k
from fastgrpo.plan.choose import Plan, choose
from fastgrpo.plan.job import Job, Sizes
from fastgrpo.plan.sizes import ModelSizes

# Field of Settings -> option. head_chunk_gib alone has another unit.
OPTIONS = {
    "max_tokens_per_gpu": "actor.max_tokens_per_gpu",
    "head_chunk_bytes": "actor.head_chunk_gib",
    "gradient_checkpointing": "actor.gradient_checkpointing",
    "activation_offload": "actor.activation_offload",
    "mlp_slices": "actor.mlp_slices",
    "reshard_after_forward": "actor.fsdp.reshard_after_forward",
    "offload_policy": "actor.fsdp.offload_policy",
    "offload_optimizer": "actor.fsdp.offload_optimizer",
    "offload_during_rollout": "actor.fsdp.offload_during_rollout",
    "ref_offload_policy": "ref.offload_policy",
}
DECIDED = (*OPTIONS.values(), "rollout.kv_cache_gib", "rollout.tensor_model_parallel_size")
# On a CPU; the head keeps its own default.
_ON_CPU: dict[str, Any] = {
    "actor.max_tokens_per_gpu": 16384,
    "actor.gradient_checkpointing": 1,
    "actor.activation_offload": False,
    "actor.mlp_slices": 1,
    "actor.fsdp.reshard_after_forward": True,
    "actor.fsdp.offload_policy": False,
    "actor.fsdp.offload_optimizer": False,
    "actor.fsdp.offload_during_rollout": False,
    "ref.offload_policy": False,
    "rollout.tensor_model_parallel_size": 1,
}


def settle(config: RunConfig, sizes: Sizes, layout: Layout, gpu_bytes: int) -> tuple[RunConfig, Plan]:
    """The configuration for GPUs of `gpu_bytes` with every open option decided, and the plan it follows. When nothing
    fits, the plan says so (`Plan.fits`): what to do about it is the caller's."""
    plan = make_plan(config, sizes, layout, gpu_bytes)
    decided = {option: getattr(plan.settings, name) for name, option in OPTIONS.items()}
    decided["actor.head_chunk_gib"] = plan.settings.head_chunk_bytes / k.GIB
    decided["rollout.kv_cache_gib"] = plan.kv_bytes / k.GIB
    decided["rollout.tensor_model_parallel_size"] = plan.job.tp
    return _fill(config, decided), plan


def make_plan(config: RunConfig, sizes: Sizes, layout: Layout, gpu_bytes: int) -> Plan:
    """The fastest plan that fits, within what `config` leaves open; of a decided configuration, its own. An engine gets
    the fewest ranks with which a plan fits, and one where none does."""
    layouts = (replace(layout, tp=tp) for tp in engine_sizes(config, sizes.model, layout))
    plans = (choose(Job.of(config, sizes, each), given(config), gpu_bytes) for each in layouts)
    least = next(plans)
    if least.short_of("rollout") <= 0 and least.short_of("host") <= 0:
        return least  # if it does not fit it is training's fault, and that has the same peak with any number
    return next((plan for plan in plans if plan.fits), least)


def engine_sizes(config: RunConfig, model: ModelSizes, layout: Layout) -> list[int]:
    """Ranks that an engine may have, the fewest first: what is stated, else whatever the rules allow vLLM."""
    if config.rollout.tensor_model_parallel_size is not None or config.rollout.name != "vllm":
        return [layout.tp]
    sizes = (size for size in range(1, layout.ranks_per_node + 1) if heads_divide(size, model.heads, model.kv_heads))
    return [size for size in sizes if not layout.ranks_per_node % size and not layout.world % size]


def settle_on_cpu(config: RunConfig) -> RunConfig:
    """Null options get fixed values; rollout.kv_cache_gib and actor.head_chunk_gib keep their owners' defaults."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    tokens = max(16384, -(-longest // config.actor.ulysses_sequence_parallel_size))
    return _fill(config, _ON_CPU | {"actor.max_tokens_per_gpu": tokens})


def given(config: RunConfig) -> dict[str, Any]:
    """The fields of Settings that `config` decides itself. offload_policy excludes offload_optimizer and
    offload_during_rollout, so one that is on decides the others too."""
    values = {name: attrgetter(option)(config) for name, option in OPTIONS.items()}
    if values["head_chunk_bytes"] is not None:
        values["head_chunk_bytes"] = max(1, int(values["head_chunk_bytes"] * k.GIB))
    found = {name: value for name, value in values.items() if value is not None}
    if found.get("offload_policy"):
        found = {"offload_optimizer": False, "offload_during_rollout": False} | found
    if found.get("offload_optimizer") or found.get("offload_during_rollout"):
        found.setdefault("offload_policy", False)
    if found.get("gradient_checkpointing") == 0:
        found.setdefault("activation_offload", False)
    return found


def with_option(config: RunConfig, key: str, value: Any) -> RunConfig:
    """A copy with one option changed; what it shares with the original is never written to."""
    return _replace_at(config, key.split("."), value)


def _fill(config: RunConfig, values: dict[str, Any]) -> RunConfig:
    for key, value in values.items():
        if attrgetter(key)(config) is None:
            config = with_option(config, key, value)
    return config


def _replace_at(section: Any, path: list[str], value: Any) -> Any:
    inner = value if len(path) == 1 else _replace_at(getattr(section, path[0]), path[1:], value)
    return replace(section, **{path[0]: inner})
