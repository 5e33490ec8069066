"""A run whose open options the memory plan decided is continued by the same command, in which they are open again."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from operator import attrgetter

import pytest

from fastgrpo.config import RunConfig, to_document
from fastgrpo.config.resume import changed_options
from fastgrpo.plan import settle_on_cpu
from fastgrpo.plan.settle import DECIDED

OTHERS = {"actor.max_tokens_per_gpu": 4096, "actor.mlp_slices": 8, "actor.gradient_checkpointing": 2}


def with_value(tree, path: str, value):
    name, _, rest = path.partition(".")
    return replace(tree, **{name: with_value(getattr(tree, name), rest, value) if rest else value})


def test_what_was_decided_on_a_cpu_does_not_forbid_to_go_on():
    config = RunConfig()
    settled = settle_on_cpu(config)
    assert to_document(settled) != to_document(config)  # something was decided
    assert changed_options(to_document(settled), config) == []
    assert changed_options(to_document(config), settled) == []


@pytest.mark.parametrize("option", DECIDED)
def test_whatever_the_plan_decides_may_be_decided_otherwise(option):
    other = {"max_tokens_per_gpu": 4096, "mlp_slices": 8, "gradient_checkpointing": 2}.get(
        option.rpartition(".")[2], 1.5
    )
    before = with_value(RunConfig(), option, other)
    assert attrgetter(option)(RunConfig()) != other
    assert changed_options(to_document(before), RunConfig()) == []


def test_every_open_option_is_one_of_them():
    """An option that is null by default and has the result of its value must be listed, or no run could be resumed."""

    def open_options(tree, prefix=""):
        for field in fields(tree):
            value = getattr(tree, field.name)
            if is_dataclass(value):
                yield from open_options(value, f"{prefix}{field.name}.")
            elif value is None:
                yield f"{prefix}{field.name}"

    settled, config = settle_on_cpu(RunConfig()), RunConfig()
    filled = {name for name in open_options(config) if attrgetter(name)(settled) is not None}
    assert filled and filled <= set(DECIDED)
