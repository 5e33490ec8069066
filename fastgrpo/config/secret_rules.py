"""No option holds a secret: config.yaml, every checkpoint and loggers keep the options as they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from fastgrpo.config.layout import Layout
from fastgrpo.config.schema import RunConfig
from fastgrpo.redact import holds_token, redact


def options_hold_no_tokens(c: RunConfig, layout: Layout) -> Iterator[str]:
    """By the form of known kinds of token; a password in other words is not known for one."""
    for key, text in _texts(asdict(c), ""):
        if holds_token(text):
            yield (
                f"{redact(key)} holds what looks like an access token, and would be kept with the run; take it out "
                "(and revoke it, if it has been shared): keys belong in environment variables, such as HF_TOKEN or the "
                "one that a reward's api_key_env names"
            )


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """(option, text) of every text."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _texts(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _texts(inner, f"{key}[{index}]")
