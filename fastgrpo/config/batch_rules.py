"""Rules of the batch, the lengths and the ranks: numbers that must fit each other. One function a rule."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from fastgrpo.config.layout import Layout
from fastgrpo.config.schema import RunConfig
from fastgrpo.config.wording import at, divisors

# The batch


def mini_batch_divides_batch(c: RunConfig, layout: Layout) -> Iterator[str]:
    batch, mini = layout.prompts_per_step, layout.prompts_per_update
    if not _divides(mini, batch):
        nearest = max(size for size in range(1, min(batch, mini) + 1) if batch % size == 0) if batch > 0 else 1
        yield (
            f"data.train_batch_size={batch} prompts is no multiple of actor.ppo_mini_batch_size={mini} prompts; "
            f"set actor.ppo_mini_batch_size={nearest}, or a batch that is a multiple of {mini}"
        )


def micro_batch_within_mini_batch(c: RunConfig, layout: Layout) -> Iterator[str]:
    micro = layout.max_sequences_per_micro_batch
    if micro is None or layout.sp < 1 or layout.dp < 1:
        return
    share = layout.sequences_per_rank_and_update
    if micro > share:
        yield (
            f"actor.micro_batch_size_per_gpu={micro} sequences is more than a data rank has in one update: {share} = "
            f"{layout.prompts_per_update} prompts x rollout.n={layout.samples_per_prompt} / {layout.dp} data ranks; "
            f"set {share} or less, or leave it out and use actor.max_tokens_per_gpu"
        )


def every_rank_gets_a_sequence(c: RunConfig, layout: Layout) -> Iterator[str]:
    if min(layout.sequences_per_step, layout.sp, layout.tp) < 1:
        return
    takers = max(layout.dp, layout.engines)
    if layout.sequences_per_step < takers:
        yield (
            f"a step has {layout.sequences_per_step} sequences (data.train_batch_size={layout.prompts_per_step} x "
            f"rollout.n={layout.samples_per_prompt}) for {layout.dp} data ranks and {layout.engines} engines; set "
            f"data.train_batch_size={-(-takers // layout.samples_per_prompt)} or more, or use fewer GPUs"
        )


def warmup_ends_within_the_run(c: RunConfig, layout: Layout) -> Iterator[str]:
    if c.trainer.max_steps and layout.prompts_per_update > 0:
        updates = c.trainer.max_steps * layout.updates_per_step
        if 0 < updates < c.actor.optim.lr_warmup_steps:
            yield (
                f"{at(c, 'actor.optim.lr_warmup_steps')} updates is longer than the run: {updates} updates = "
                f"trainer.max_steps={c.trainer.max_steps} x {layout.updates_per_step} a step; set {updates} or less"
            )


# Lengths


def longest_sequence_fits_the_engine(c: RunConfig, layout: Layout) -> Iterator[str]:
    if layout.max_sequence_tokens > layout.max_model_len:
        yield (
            f"{lengths(layout)} is more than rollout.max_model_len={layout.max_model_len}; "
            f"set rollout.max_model_len={layout.max_sequence_tokens}, or null, or shorter lengths"
        )


def longest_sequence_fits_the_token_budget(c: RunConfig, layout: Layout) -> Iterator[str]:
    if layout.max_tokens_per_gpu is None or layout.sp < 1:
        return
    if layout.max_sequence_tokens > layout.tokens_per_micro_batch:
        yield (
            f"{lengths(layout)} is more than one forward may hold: {layout.tokens_per_micro_batch} = "
            f"actor.max_tokens_per_gpu={layout.max_tokens_per_gpu} x actor.ulysses_sequence_parallel_size={layout.sp}; "
            f"set actor.max_tokens_per_gpu={-(-layout.max_sequence_tokens // layout.sp)} or more, or a larger sp"
        )


def engine_prefills_every_sequence(c: RunConfig, layout: Layout) -> Iterator[str]:
    if c.rollout.max_num_batched_tokens < c.rollout.max_num_seqs:
        yield (
            f"{at(c, 'rollout.max_num_batched_tokens')} is below {at(c, 'rollout.max_num_seqs')}, and a running "
            f"sequence needs a token an iteration; set rollout.max_num_batched_tokens={c.rollout.max_num_seqs} or more"
        )


def lengths(layout: Layout) -> str:
    return (
        f"data.max_prompt_length={layout.max_prompt_length} + data.max_response_length={layout.max_response_length} = "
        f"{layout.max_sequence_tokens} tokens"
    )


# Ranks


def groups_divide_the_ranks(c: RunConfig, layout: Layout) -> Iterator[str]:
    for key in ("actor.ulysses_sequence_parallel_size", "rollout.tensor_model_parallel_size"):
        size = attrgetter(key)(c)
        if size is None:
            continue
        if not _divides(size, layout.world):
            yield f"{key}={size} does not divide the {layout.world} ranks; set {divisors(layout.world)}"
        elif not _divides(size, layout.ranks_per_node):
            yield (
                f"{key}={size} would cross nodes of {layout.ranks_per_node} ranks; "
                f"set {divisors(layout.ranks_per_node)}"
            )


def replicas_hold_whole_groups(c: RunConfig, layout: Layout) -> Iterator[str]:
    replicas = layout.replicas
    if not _divides(replicas, layout.world):
        yield f"actor.fsdp.replicas={replicas} does not divide the {layout.world} ranks; set {divisors(layout.world)}"
    elif replicas > 1 and not _divides(layout.sp, layout.shard):
        yield (
            f"actor.fsdp.replicas={replicas} leaves {layout.shard} of {layout.world} ranks a copy, which cuts "
            f"the groups of actor.ulysses_sequence_parallel_size={layout.sp}; set fewer replicas"
        )


def hf_engine_has_no_tensor_parallelism(c: RunConfig, layout: Layout) -> Iterator[str]:
    if c.rollout.name == "hf" and layout.tp > 1:
        yield (
            f"rollout.tensor_model_parallel_size={layout.tp} needs rollout.name=vllm; the hf engine lives on one rank: "
            "set rollout.tensor_model_parallel_size=1"
        )


def one_kind_of_offload(c: RunConfig, layout: Layout) -> Iterator[str]:
    fsdp = c.actor.fsdp
    for name, on in {
        "offload_optimizer": fsdp.offload_optimizer,
        "offload_during_rollout": fsdp.offload_during_rollout,
    }.items():
        if fsdp.offload_policy and on:
            yield (
                "actor.fsdp.offload_policy=true keeps the trainer's state in host memory already; "
                f"set actor.fsdp.{name}=false"
            )


def offload_has_something_to_offload(c: RunConfig, layout: Layout) -> Iterator[str]:
    if c.actor.activation_offload and c.actor.gradient_checkpointing == 0:
        yield (
            "actor.activation_offload=true moves the inputs of recomputed blocks, and actor.gradient_checkpointing=0 "
            "recomputes none; set actor.gradient_checkpointing=1 or actor.activation_offload=false"
        )


def attention_runs_on_the_device(c: RunConfig, layout: Layout) -> Iterator[str]:
    if c.trainer.device == "cpu" and c.actor.attention in ("flash", "varlen"):
        yield f"{at(c, 'actor.attention')} needs a GPU; set actor.attention=auto or sdpa with trainer.device=cpu"


def _divides(part: int, whole: int) -> bool:
    return part < 1 or whole % part == 0  # a part below 1 is the business of numbers_in_range
