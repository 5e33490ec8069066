"""The rules of the configuration: one function a rule, named after it. A message says what is wrong, the values, and
what to set. All broken rules are reported at once; nothing is mended silently.

Here: what the options and the number of ranks show (`check`), and what the model's own config shows (`check_model`).
Not here: files, data sets, GPUs and memory, which are looked at by the parts that use them, before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter

from fastgrpo.config.algorithm_rules import (
    adaptive_kl_starts_above_0,
    correction_has_logprobs,
    filter_groups_can_fill_a_step,
    filter_metric_is_a_function,
    gdpo_has_two_functions,
    group_has_two_samples,
    importance_bounds_fit,
    kl_ctrl_is_read,
    one_kl_term,
    rejection_bounds_fit,
    scale_factor_is_read,
)
from fastgrpo.config.batch_rules import (
    attention_runs_on_the_device,
    engine_prefills_every_sequence,
    every_rank_gets_a_sequence,
    groups_divide_the_ranks,
    hf_engine_has_no_tensor_parallelism,
    lengths,
    longest_sequence_fits_the_engine,
    longest_sequence_fits_the_token_budget,
    micro_batch_within_mini_batch,
    mini_batch_divides_batch,
    offload_has_something_to_offload,
    one_kind_of_offload,
    replicas_hold_whole_groups,
    warmup_ends_within_the_run,
)
from fastgrpo.config.build import type_mistakes
from fastgrpo.config.layout import Layout
from fastgrpo.config.lora_rules import (
    lora_options_are_read,
    lora_reference_is_the_base,
    lora_targets_are_inner,
    merged_folder_has_adapters,
    rank_within_the_model,
)
from fastgrpo.config.ranges import numbers_in_range
from fastgrpo.config.resume import resume_is_readable
from fastgrpo.config.reward_rules import (
    code_limits_fit,
    judges_and_models_are_found,
    judges_and_models_can_run,
    length_reward_fits,
    patterns_compile,
    reward_functions_are_complete,
    reward_is_given,
    reward_options_are_read,
    reward_options_are_read_here,
)
from fastgrpo.config.schema import RunConfig
from fastgrpo.config.secret_rules import options_hold_no_tokens
from fastgrpo.config.task_rules import (
    arithmetic_can_be_made,
    best_metric_is_measured_at_checkpoints,
    choices_have_a_place,
    data_files_have_a_known_form,
    data_is_given,
    dual_clip_above_1,
    engine_name_has_a_known_form,
    graph_sizes_are_used,
    greedy_validation_draws_once,
    heartbeat_outlasts_some_beats,
    loggers_are_known,
    names_are_usable,
    rollouts_are_cut_before_the_watchdog_ends_them,
    sleep_level_is_1_or_2,
    validation_is_there,
)
from fastgrpo.config.wording import at, either
from fastgrpo.errors import ConfigError

Rule = Callable[[RunConfig, Layout], Iterator[str]]


def check(
    config: RunConfig,
    world_size: int,
    *,
    ranks_per_node: int | None = None,
    needs_data: bool = True,
    needs_reward: bool = True,
) -> Layout:
    """Run every rule for `world_size` ranks, `ranks_per_node` of them on each node (default: one node).

    `needs_data` and `needs_reward` are false where a Python caller hands over prompts or a reward function.
    Raises ConfigError, a line a broken rule.
    """
    if mistakes := type_mistakes(config):  # the other rules would stumble over them
        raise ConfigError("\n".join(mistakes))
    layout = Layout.of(config, world_size, ranks_per_node)
    rules = (*RULES, *((data_is_given,) if needs_data else ()), *((reward_is_given,) if needs_reward else ()))
    _refuse(message for rule in rules for message in rule(config, layout))
    return layout


def check_model(
    config: RunConfig, layout: Layout, *, num_heads: int, num_kv_heads: int, hidden: int, max_positions: int, vocab: int
) -> None:
    """The rules that need the model's config. Raises ConfigError, a line a broken rule."""
    _refuse(
        message
        for messages in (
            heads_divide_over_ranks("actor.ulysses_sequence_parallel_size", layout.sp, num_heads, num_kv_heads),
            heads_divide_over_ranks("rollout.tensor_model_parallel_size", layout.tp, num_heads, num_kv_heads),
            model_reads_the_longest_sequence(layout, max_positions),
            top_k_within_vocabulary(config, vocab),
            rank_within_the_model(config, hidden),
        )
        for message in messages
    )


def _refuse(messages: Iterator[str]) -> None:
    if mistakes := list(messages):
        raise ConfigError("\n".join(mistakes))


def heads_divide(size: int, num_heads: int, num_kv_heads: int) -> bool:
    """Key and value heads are repeated when there are fewer than ranks, so either may divide the other."""
    return not num_heads % size and (not num_kv_heads % size or not size % num_kv_heads)


def heads_divide_over_ranks(key: str, size: int, num_heads: int, num_kv_heads: int) -> Iterator[str]:
    if not heads_divide(size, num_heads, num_kv_heads):
        good = [n for n in range(1, num_heads + 1) if heads_divide(n, num_heads, num_kv_heads)]
        yield (
            f"{key}={size} does not divide the model's {num_heads} attention heads and {num_kv_heads} key-value heads; "
            f"set {either(good)}"
        )


def model_reads_the_longest_sequence(layout: Layout, max_positions: int) -> Iterator[str]:
    if layout.max_model_len > max_positions:
        yield (
            f"{lengths(layout)}, rollout.max_model_len={layout.max_model_len}: the model reads "
            f"{max_positions} tokens at most; set shorter lengths"
        )


def top_k_within_vocabulary(c: RunConfig, vocab: int) -> Iterator[str]:
    for key in ("rollout.top_k", "rollout.val_kwargs.top_k"):
        if attrgetter(key)(c) > vocab:
            yield f"{at(c, key)} is more than the model's {vocab} tokens; set -1 for all"


RULES: tuple[Rule, ...] = (
    numbers_in_range,
    options_hold_no_tokens,
    dual_clip_above_1,
    sleep_level_is_1_or_2,
    rollouts_are_cut_before_the_watchdog_ends_them,
    heartbeat_outlasts_some_beats,
    loggers_are_known,
    names_are_usable,
    resume_is_readable,
    engine_name_has_a_known_form,
    graph_sizes_are_used,
    lora_targets_are_inner,
    lora_options_are_read,
    lora_reference_is_the_base,
    merged_folder_has_adapters,
    mini_batch_divides_batch,
    micro_batch_within_mini_batch,
    group_has_two_samples,
    every_rank_gets_a_sequence,
    gdpo_has_two_functions,
    filter_groups_can_fill_a_step,
    filter_metric_is_a_function,
    scale_factor_is_read,
    one_kl_term,
    kl_ctrl_is_read,
    adaptive_kl_starts_above_0,
    importance_bounds_fit,
    rejection_bounds_fit,
    correction_has_logprobs,
    warmup_ends_within_the_run,
    longest_sequence_fits_the_engine,
    longest_sequence_fits_the_token_budget,
    engine_prefills_every_sequence,
    groups_divide_the_ranks,
    replicas_hold_whole_groups,
    hf_engine_has_no_tensor_parallelism,
    one_kind_of_offload,
    offload_has_something_to_offload,
    attention_runs_on_the_device,
    data_files_have_a_known_form,
    arithmetic_can_be_made,
    choices_have_a_place,
    greedy_validation_draws_once,
    validation_is_there,
    best_metric_is_measured_at_checkpoints,
    reward_functions_are_complete,
    reward_options_are_read,
    reward_options_are_read_here,
    code_limits_fit,
    judges_and_models_are_found,
    judges_and_models_can_run,
    length_reward_fits,
    patterns_compile,
)
