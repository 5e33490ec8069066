"""Rules of the adapters. One function a rule. Which modules a model has is seen when it is built (policy/lora.py)."""

from __future__ import annotations

from collections.abc import Iterator

from fastgrpo.config.layout import Layout
from fastgrpo.config.schema import Dtype, ModelConfig, RunConfig, needs_reference
from fastgrpo.config.wording import at

_OUTER = ("lm_head", "embed_tokens", "embed_out", "wte")


def lora_targets_are_inner(c: RunConfig, layout: Layout) -> Iterator[str]:
    targets = c.model.target_modules
    if not c.model.lora_rank:
        return
    if not targets:
        yield "model.target_modules is empty with model.lora_rank set; set all-linear, or names such as [q_proj]"
    if "all-linear" in targets and len(targets) > 1:
        yield f"model.target_modules={targets}: all-linear stands alone; take out the other names, or it"
    for target in targets:
        if target.rpartition(".")[2] in _OUTER:
            yield (
                f"model.target_modules holds {target!r}: the loss reads the output layer's weight itself, and the "
                "embedding is no linear layer, so neither can have adapters; name linear layers of the blocks"
            )


def lora_options_are_read(c: RunConfig, layout: Layout) -> Iterator[str]:
    if c.model.lora_rank:
        return
    default = ModelConfig()
    for key, has, plain in (
        ("model.lora_alpha", c.model.lora_alpha != default.lora_alpha, str(default.lora_alpha)),
        ("model.target_modules", c.model.target_modules != default.target_modules, "[all-linear]"),
    ):
        if has:
            yield (
                f"{at(c, key)} has no effect with model.lora_rank=0, which trains all weights of the model; set "
                f"model.lora_rank, such as 16, or {key}={plain}"
            )


def lora_reference_is_the_base(c: RunConfig, layout: Layout) -> Iterator[str]:
    if not c.model.lora_rank or c.ref.path is not None or not needs_reference(c):
        return
    for key, changed in (("ref.dtype", c.ref.dtype != Dtype["auto"]), ("ref.offload_policy", c.ref.offload_policy)):
        if changed:
            yield (
                f"{at(c, key)} has no use with model.lora_rank={c.model.lora_rank}: the reference is the policy's own "
                "base, with its adapters off; leave it out, or name a second model in ref.path"
            )


def merged_folder_has_adapters(c: RunConfig, layout: Layout) -> Iterator[str]:
    if c.trainer.save_merged and not (c.model.lora_rank and c.trainer.save_final):
        yield (
            "trainer.save_merged=true merges adapters into a folder at the end, and there are none (model.lora_rank="
            f"{c.model.lora_rank}, trainer.save_final={str(c.trainer.save_final).lower()}); set it to false"
        )


def rank_within_the_model(c: RunConfig, hidden: int) -> Iterator[str]:
    """A product B A has no more rank than the smaller side of its layer, which is this at most in every block."""
    if c.model.lora_rank > hidden:
        yield (
            f"{at(c, 'model.lora_rank')} is more than the model's hidden size of {hidden}, and no layer's adapters can "
            "use that; set a small rank, such as 16, or 0 to train all weights"
        )
