"""Rules of rewards. One function a rule."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from functools import reduce
from operator import or_

from fastgrpo.config.layout import Layout
from fastgrpo.config.reward_schema import NEEDS_REFERENCE, READ_BY, RewardFunctionConfig, RewardKind
from fastgrpo.config.schema import RunConfig
from fastgrpo.redact import redact

INHERITED = {"mode", "format_score"}  # may stay behind when an experiment exchanges the kind of another's function
_SANDBOX_S = 12  # to make a sandbox on a busy machine, and to end it


def reward_is_given(c: RunConfig, layout: Layout) -> Iterator[str]:
    if not c.reward.functions:
        yield f"reward.functions is empty; set reward.functions.NAME.kind to one of {', '.join(RewardKind)}"


def reward_functions_are_complete(c: RunConfig, layout: Layout) -> Iterator[str]:
    for label, function in c.reward.functions.items():
        key = f"reward.functions.{label}"
        if not re.fullmatch(r"[\w-]+", label):
            yield f"{key}: the label becomes a metric's name; use letters, digits, _ and -"
        if function.kind == "custom" and not (function.path or "").endswith(".py"):
            yield f"{key}.path={function.path} must be a Python file; set {key}.path=FILE.py, or another {key}.kind"
        if function.kind == "rules" and not function.rules:
            yield f"{key}.rules is empty; give a list of {{pattern: ..., score: ...}}"
        if function.kind == "format" and not (function.tags and all(re.fullmatch(r"\w+", t) for t in function.tags)):
            yield f"{key}.tags={function.tags} must be names such as [think, answer]"
        if function.kind in NEEDS_REFERENCE and c.data.reference_key is None:
            yield f"{key}.kind={function.kind} needs the right answers; set data.reference_key to their column"
    if c.reward.functions and all(function.weight == 0 for function in c.reward.functions.values()):
        yield "reward.functions: every weight is 0, so every reward is 0; set one reward.functions.NAME.weight"


def reward_options_are_read(c: RunConfig, layout: Layout) -> Iterator[str]:
    default = RewardFunctionConfig()
    for label, function in c.reward.functions.items():
        key = f"reward.functions.{label}"
        for option in (field.name for field in fields(function) if field.name in READ_BY.keys() - INHERITED):
            value, kinds = getattr(function, option), READ_BY[option]
            if value != getattr(default, option) and function.kind not in kinds:
                shown = "" if isinstance(value, list) else f"={value}"
                yield (
                    f"{key}.{option}{shown} is not read with {key}.kind={function.kind}; take it out, or "
                    f"set {key}.kind={' or '.join(kinds)}"
                )


_OF_SHAPE_OVERLONG = ("overlong_buffer_len", "overlong_penalty_factor")
_OF_PATH = ("input", "device", "offload", "micro_batch_size_per_gpu", "label", "sigmoid", "max_length")
_OF_URL = ("api_key_env", "max_retries")


def reward_options_are_read_here(c: RunConfig, layout: Layout) -> Iterator[str]:
    """Options that their kind reads in one of its forms only."""
    default = RewardFunctionConfig()
    for label, function in c.reward.functions.items():
        key = f"reward.functions.{label}"
        if function.kind == "length" and function.shape == "linear":
            form, options = f"{key}.shape=linear", _OF_SHAPE_OVERLONG
        elif function.kind == "model" and function.url is not None:
            form, options = f"{key}.url", _OF_PATH
        elif function.kind == "model":
            form, options = f"{key}.path", _OF_URL
        else:
            continue
        for option in options:
            if (value := getattr(function, option)) != getattr(default, option):
                yield f"{key}.{option}={value} is not read with {form}; take it out"


def code_limits_fit(c: RunConfig, layout: Layout) -> Iterator[str]:
    for label, function in c.reward.functions.items():
        if function.kind != "code":
            continue
        key = f"reward.functions.{label}"
        for option, least in (("time_limit_s", 0.1), ("memory_limit_mb", 64), ("max_processes", 1)):
            if (value := getattr(function, option)) < least:
                yield f"{key}.{option}={value} is too little to start a program with; set {least} or more"
        if function.time_limit_s + _SANDBOX_S > c.reward.timeout_s:
            yield (
                f"{key}.time_limit_s={function.time_limit_s} leaves less than {_SANDBOX_S} s of "
                f"reward.timeout_s={c.reward.timeout_s} to make the sandbox, and slow programs would be unscored; set "
                f"reward.timeout_s={function.time_limit_s + _SANDBOX_S:g} or more"
            )


def judges_and_models_are_found(c: RunConfig, layout: Layout) -> Iterator[str]:
    for label, function in c.reward.functions.items():
        key = f"reward.functions.{label}"
        if function.url is not None and redact(function.url) != function.url:
            yield (
                f"{key}.url={redact(function.url)} holds what may be a secret (***), which would be kept with the run; "
                f"put it into an environment variable and set {key}.api_key_env to its name"
            )
        if function.url is not None and not re.match(r"https?://[^/\s]", function.url):
            yield f"{key}.url={function.url} must begin with http:// or https://"
        if function.kind == "judge" and not (function.url and function.model):
            yield (
                f"{key}.url={function.url} and {key}.model={function.model!r} must name an endpoint and its model, "
                f"such as {key}.url=http://localhost:8000/v1 {key}.model=Qwen/Qwen2.5-7B-Instruct"
            )
        if function.kind == "model" and (function.path is None) == (function.url is None):
            yield (
                f"{key}.path={function.path}, {key}.url={function.url}: a reward model is one of them; set "
                f"{key}.path to a folder or hub id, or {key}.url to an endpoint"
            )
        if function.kind == "file" and function.path is None:
            yield f"{key}.path=None must be a file of scores; set {key}.path=FILE.jsonl"


def judges_and_models_can_run(c: RunConfig, layout: Layout) -> Iterator[str]:
    for label, function in c.reward.functions.items():
        key = f"reward.functions.{label}"
        for option in ("micro_batch_size_per_gpu", "max_tokens"):
            if (value := getattr(function, option)) < 1:
                yield f"{key}.{option}={value} is out of range; set 1 or more"
        for option in ("max_retries", "temperature"):
            if (value := getattr(function, option)) < 0:
                yield f"{key}.{option}={value} is out of range; set 0 or more"
        if function.max_score <= 0:
            yield f"{key}.max_score={function.max_score} is out of range; set a number above 0"


def length_reward_fits(c: RunConfig, layout: Layout) -> Iterator[str]:
    for label, function in c.reward.functions.items():
        if function.kind != "length":
            continue
        key = f"reward.functions.{label}"
        longest = function.max_length or c.data.max_response_length
        if function.max_length is not None and function.max_length < 1:
            yield f"{key}.max_length={function.max_length} tokens; set 1 or more, or null for data.max_response_length"
        elif not 0 <= function.overlong_buffer_len <= longest:
            yield (
                f"{key}.overlong_buffer_len={function.overlong_buffer_len} tokens must lie between 0 and the longest "
                f"response, {longest}; DAPO's is a fifth of that: set {longest // 5}"
            )
        elif (
            function.shape == "overlong" and not function.overlong_buffer_len and longest >= c.data.max_response_length
        ):
            yield (
                f"{key}.overlong_buffer_len=0 with the limit at {longest} tokens, which no response is longer than, "
                f"punishes nothing: each score is 0; set {key}.overlong_buffer_len={max(1, longest // 5)} (DAPO's "
                f"is a fifth), a smaller {key}.max_length, or {key}.shape=linear"
            )


def patterns_compile(c: RunConfig, layout: Layout) -> Iterator[str]:
    for label, function in c.reward.functions.items():
        for i, rule in enumerate(function.rules):
            key = f"reward.functions.{label}.rules[{i}]"
            if not rule.pattern:
                yield f"{key}.pattern is empty and would match every answer"
            if not set(rule.flags) <= set("aimsx"):
                yield f"{key}.flags={rule.flags!r} must be letters out of a i m s x"
                continue
            try:
                re.compile(rule.pattern, reduce(or_, (re.RegexFlag[flag.upper()] for flag in rule.flags), 0))
            except re.error as error:
                yield f"{key}.pattern={rule.pattern!r} is no regular expression: {error}"
