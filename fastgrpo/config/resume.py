"""Which options a resumed run may have otherwise than the run that it continues, and why not the others.

An option is in one of four kinds:

    FREE       the result is the same, up to rounding: layout, memory, speed, what is shown and kept
    IDENTITY   files may move; what they hold is compared by its fingerprint, not by its path
    FIXED      the place in the data would mean something else, or what is saved would not fit: refused, no exception
    the rest   changes the updates: refused, unless trainer.resume_allow names it

An option that is not listed belongs to the rest, so a new one is compared until somebody says otherwise. A validation
alone (trainer.val_only) updates nothing: only SCORE is compared, what its weights and the meaning of its score rest on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from fastgrpo.config.build import build, option_keys, to_document
from fastgrpo.config.layout import Layout
from fastgrpo.config.schema import RunConfig
from fastgrpo.errors import ConfigError

FREE = (
    "rollout.tensor_model_parallel_size",
    "rollout.max_model_len",
    "rollout.max_num_seqs",
    "rollout.max_num_batched_tokens",
    "rollout.kv_cache_gib",
    "rollout.enforce_eager",
    "rollout.cudagraph_capture_sizes",
    "rollout.sleep_level",
    "rollout.max_logprob_gap",
    "rollout.val_kwargs.",
    "reward.num_workers",
    "reward.timeout_s",
    "reward.max_unscored_steps",
    "actor.max_tokens_per_gpu",
    "actor.micro_batch_size_per_gpu",
    "actor.max_skipped_updates",
    "actor.ulysses_sequence_parallel_size",
    "actor.attention",
    "actor.head",
    "actor.head_chunk_gib",
    "actor.use_liger",
    "actor.use_torch_compile",
    "actor.gradient_checkpointing",
    "actor.activation_offload",
    "actor.mlp_slices",
    "actor.fsdp.",
    "ref.offload_policy",
    "trainer.",  # but for what FIXED holds
)
IDENTITY = ("model.", "ref.path", "data.")  # but for what FIXED holds
_PLACE = "the place in the data would mean something else"
_ADAPTERS = "the checkpoint holds adapters of another shape; set it back, or do without them: trainer.resume=never"
FIXED = {  # and why
    "data.train_batch_size": _PLACE,
    "data.shuffle": _PLACE,
    "trainer.seed": _PLACE,
    "model.lora_rank": _ADAPTERS,
    "model.target_modules": _ADAPTERS,
}
# of the rest, though an entry above would cover them
COMPARED = ("data.max_response_length", "model.lora_alpha")
SCORE = ("model.lora_rank", "model.target_modules", "model.lora_alpha", "data.max_response_length", "reward.functions.")


def resume_is_readable(c: RunConfig, layout: Layout) -> Iterator[str]:
    if not c.trainer.resume:
        yield "trainer.resume is empty; set auto, never, or the path of a run folder or a checkpoint"
    known = option_keys()
    for key in c.trainer.resume_allow:
        if key in FIXED:
            yield f"trainer.resume_allow holds {key!r}, which cannot be allowed: {FIXED[key]}"
        elif not key.startswith("reward.functions.") and key not in known:
            near = get_close_matches(key, known, n=1)
            yield f"trainer.resume_allow holds {key!r}, which is no option" + (
                f"; did you mean {near[0]}?" if near else ""
            )


def changed_options(before: Mapping[str, Any], config: RunConfig, *, allowed: Sequence[str] | None = None) -> list[str]:
    """A line for each option whose change forbids to continue a run whose configuration was `before`, a document as of
    `to_document`. An option that `before` does not know had today's default. `allowed`: options that may differ; None:
    those of trainer.resume_allow."""
    excused = config.trainer.resume_allow if allowed is None else allowed
    try:
        old = leaves(to_document(build(before)))
    except ConfigError:  # written by a version with other options
        old = leaves(to_document(RunConfig())) | leaves(before)
    new = leaves(to_document(config))
    lines = []
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) == new.get(key) or _kind(key) == "same result" or _allowed(key, excused):
            continue
        if config.trainer.val_only and not _matches(key, SCORE):
            continue
        lines.append(f"{key} was {_show(old, key)} and is {_show(new, key)} ({_remedy(key, new)})")
    return lines


def leaves(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"rollout": {"n": 8}}` -> `{"rollout.n": 8}`. An empty mapping has no leaves; lists are leaves."""
    found: dict[str, Any] = {}
    for name, value in document.items():
        found |= leaves(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def _remedy(key: str, new: Mapping[str, Any]) -> str:
    if key in FIXED:
        return FIXED[key]
    if key not in new and not key.startswith("reward.functions."):
        return "this version has no such option"
    return f"allow it: trainer.resume_allow=[{key}]"


def _kind(key: str) -> str:
    if key in FIXED or key in COMPARED:
        return "other result"
    return "same result" if _matches(key, (*FREE, *IDENTITY)) else "other result"


def _matches(key: str, patterns: Sequence[str]) -> bool:
    return any(key.startswith(pattern) if pattern.endswith(".") else key == pattern for pattern in patterns)


def _allowed(key: str, allowed: Sequence[str]) -> bool:
    return key not in FIXED and any(key == entry or key.startswith(f"{entry}.") for entry in allowed)


def _show(found: Mapping[str, Any], key: str) -> str:
    return repr(found[key]) if key in found else "not there"
