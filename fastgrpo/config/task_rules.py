"""Rules of names and data. One function a rule."""

from __future__ import annotations

import re
from collections.abc import Iterator
from operator import attrgetter

from fastgrpo.config.layout import Layout
from fastgrpo.config.schema import BEAT_S, RunConfig
from fastgrpo.config.wording import at

LEAST_HEARTBEAT_S = 4 * BEAT_S
LOGGERS = ("console", "tensorboard", "wandb")
DATA_SUFFIXES = (".jsonl", ".json", ".parquet")


def dual_clip_above_1(c: RunConfig, layout: Layout) -> Iterator[str]:
    if c.actor.clip_ratio_c <= 1:
        yield f"{at(c, 'actor.clip_ratio_c')} must be above 1, or it cuts the ordinary clip; verl's value is 3.0"


def sleep_level_is_1_or_2(c: RunConfig, layout: Layout) -> Iterator[str]:
    if c.rollout.sleep_level not in (1, 2):
        yield f"{at(c, 'rollout.sleep_level')} must be 2 (drop the engine's weights) or 1 (keep them in host memory)"


def graph_sizes_are_used(c: RunConfig, layout: Layout) -> Iterator[str]:
    sizes = c.rollout.cudagraph_capture_sizes
    if sizes is None:
        return
    if not sizes or min(sizes) < 1:
        yield f"{at(c, 'rollout.cudagraph_capture_sizes')} must hold numbers of sequences, each 1 or more"
    if c.rollout.enforce_eager:
        yield (
            f"{at(c, 'rollout.cudagraph_capture_sizes')} has no use with rollout.enforce_eager=true, which makes no "
            "CUDA graphs; set one of them only"
        )


def loggers_are_known(c: RunConfig, layout: Layout) -> Iterator[str]:
    for name in c.trainer.logger:
        if name not in LOGGERS:
            yield f"trainer.logger holds {name!r}; choose from {', '.join(LOGGERS)}"


def names_are_usable(c: RunConfig, layout: Layout) -> Iterator[str]:
    if not c.model.path:
        yield "model.path is empty; set a Hugging Face id or a folder"
    if not c.trainer.run_dir:
        yield "trainer.run_dir is empty; set a folder, such as runs"
    if not re.fullmatch(r"[^/\\\s]+", c.trainer.experiment_name):
        yield f"{at(c, 'trainer.experiment_name')} becomes part of a folder's name; leave out slashes and spaces"


def engine_name_has_a_known_form(c: RunConfig, layout: Layout) -> Iterator[str]:
    name = c.rollout.name
    if name not in ("vllm", "hf") and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name):
        yield f"rollout.name={name} is no engine; set vllm, hf, or package.module:Class"


def data_is_given(c: RunConfig, layout: Layout) -> Iterator[str]:
    if not c.data.train_files:
        yield "data.train_files is empty; set [FILE.jsonl], [owner/name] of a hub data set, or [arithmetic]"


def data_files_have_a_known_form(c: RunConfig, layout: Layout) -> Iterator[str]:
    for key in ("data.train_files", "data.val_files"):
        for entry in attrgetter(key)(c):
            known = (
                entry == "arithmetic" or entry.endswith(DATA_SUFFIXES) or re.fullmatch(r"[\w.-]+/[\w.-]+|[\w-]+", entry)
            )
            if not known:
                yield (
                    f"{key} holds {entry!r}, which is neither a {', '.join(DATA_SUFFIXES)} file, nor owner/name of a "
                    "hub data set, nor arithmetic"
                )


def choices_have_a_place(c: RunConfig, layout: Layout) -> Iterator[str]:
    template, key = c.data.prompt_template, c.data.choices_key
    if template is not None and ("{choices}" in template) != (key is not None):
        yield (
            f"data.prompt_template={template!r} and data.choices_key={key}: the lettered choices go where the template "
            "says {choices}; set both, or take both out"
        )


def arithmetic_can_be_made(c: RunConfig, layout: Layout) -> Iterator[str]:
    made = c.data.arithmetic
    if not made.operations or not set(made.operations) <= set("+-*"):
        yield f"data.arithmetic.operations={made.operations!r} must be characters out of + - *"
    if made.min_value > made.max_value:
        yield (
            f"data.arithmetic.min_value={made.min_value} is above data.arithmetic.max_value={made.max_value}; "
            "exchange them"
        )
    if not made.templates:
        yield "data.arithmetic.templates is empty; write at least one wording, such as ['{task} =']"
    for template in made.templates:
        if "{task}" not in template:
            yield f"data.arithmetic.templates: {template!r} has no place for the task; write {{task}} in it"


def validation_is_there(c: RunConfig, layout: Layout) -> Iterator[str]:
    if c.data.val_files:
        return
    if c.trainer.val_only:
        yield "trainer.val_only=true, and data.val_files is empty; list what is to be validated"
    if (c.trainer.best_metric or "").startswith("val/"):
        yield (
            f"{at(c, 'trainer.best_metric')} is a metric of validation, and data.val_files is empty; list validation "
            "data, or name a metric of the steps, such as reward/mean"
        )


def best_metric_is_measured_at_checkpoints(c: RunConfig, layout: Layout) -> Iterator[str]:
    t = c.trainer
    if (t.best_metric or "").startswith("val/") and t.save_freq > 0 and (t.test_freq < 1 or t.save_freq % t.test_freq):
        yield (
            f"{at(c, 'trainer.best_metric')} is measured every trainer.test_freq={t.test_freq} steps and checkpoints "
            f"are saved every trainer.save_freq={t.save_freq}: some have no score; let test_freq divide save_freq"
        )


def greedy_validation_draws_once(c: RunConfig, layout: Layout) -> Iterator[str]:
    val = c.rollout.val_kwargs
    if val.temperature == 0 and val.n > 1:
        yield (
            f"rollout.val_kwargs.n={val.n} greedy answers would all be equal; set rollout.val_kwargs.n=1 or "
            "rollout.val_kwargs.temperature above 0"
        )


def rollouts_are_cut_before_the_watchdog_ends_them(c: RunConfig, layout: Layout) -> Iterator[str]:
    cut = c.rollout.max_seconds
    for key in ("trainer.limits_s.gen", "trainer.limits_s.validate"):
        limit = attrgetter(key)(c)
        if cut is not None and limit is not None and cut >= limit:
            yield f"rollout.max_seconds={cut:g} is not below {key}={limit:g}, which ends the run; set it lower"


def heartbeat_outlasts_some_beats(c: RunConfig, layout: Layout) -> Iterator[str]:
    limit = c.trainer.limits_s.heartbeat
    if limit is not None and 0 < limit < LEAST_HEARTBEAT_S:
        yield (
            f"trainer.limits_s.heartbeat={limit:g}: ranks give a sign every {BEAT_S} s, and a busy one a little late; "
            f"set {LEAST_HEARTBEAT_S:g} or more (60 is the default), or null for no limit"
        )
