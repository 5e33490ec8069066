"""Plain documents (nested dicts, from YAML or the command line) <-> the schema. Refuses unknown keys and wrong types.

Nothing is guessed: the text '8' is no number and 'None' is no null. Only what loses nothing is converted, and only in
documents: a whole number where a float or a text is wanted, one text where a list of texts is wanted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, is_dataclass
from enum import StrEnum
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from fastgrpo.config.names import REFUSED_VALUES, unknown_key
from fastgrpo.config.schema import RunConfig
from fastgrpo.errors import ConfigError


def build(document: Mapping[str, Any]) -> RunConfig:
    """The configuration that `document` describes; what it leaves out keeps its default.

    Raises ConfigError with a line for each unknown key and each value of the wrong type.
    """
    mistakes: list[str] = []
    config = _read(RunConfig, document, "", mistakes)
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return config


def type_mistakes(config: RunConfig) -> list[str]:
    """A line for each value of the wrong type, for configurations that were written in Python."""
    mistakes: list[str] = []
    _read(RunConfig, config, "", mistakes)
    return mistakes


def to_document(config: RunConfig) -> dict[str, Any]:
    """Nested dicts of plain values, ready for YAML; `build(to_document(c)) == c`."""
    return json.loads(json.dumps(asdict(config)))  # through JSON: the enums become texts


def option_keys() -> tuple[str, ...]:
    """Every option's full key, sorted; `<name>` stands for a label of the user's, `[]` for the place in a list."""
    return tuple(sorted(_keys(RunConfig, "")))


def _keys(hint: Any, key: str) -> Iterator[str]:
    if is_dataclass(hint):
        for name, inner in get_type_hints(hint).items():
            yield from _keys(inner, f"{key}.{name}" if key else name)
    elif get_origin(hint) is dict and is_dataclass(get_args(hint)[1]):
        yield from _keys(get_args(hint)[1], f"{key}.<name>")
    elif get_origin(hint) is list and is_dataclass(get_args(hint)[0]):
        yield from _keys(get_args(hint)[0], f"{key}[]")
    else:
        yield key


def _read(hint: Any, value: Any, key: str, mistakes: list[str]) -> Any:
    if is_dataclass(hint):
        return _read_section(hint, value, key, mistakes)
    origin, args = get_origin(hint), get_args(hint)
    if origin is UnionType:  # the schema's only unions are `X | None`
        return None if value is None else _read(args[0], value, key, mistakes)
    if origin is list:
        if isinstance(value, list):
            return [_read(args[0], item, f"{key}[{i}]", mistakes) for i, item in enumerate(value)]
        mistakes.append(f"{key} must be a list, not {_show(value)}; write {key}=[...]")
    elif origin is dict:
        if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
            return {name: _read(args[1], item, f"{key}.{name}", mistakes) for name, item in value.items()}
        mistakes.append(f"{key} must be a mapping of names, not {_show(value)}; write {key}.NAME=...")
    elif hint is not Any and (wrong := _wrong_scalar(hint, value)):
        mistakes.append(f"{key} must be {wrong}, not {_show(value)}{_hint_at(hint, value, key)}")
    return value


def _read_section(cls: Any, value: Any, key: str, mistakes: list[str]) -> Any:
    hints = get_type_hints(cls)
    if isinstance(value, cls):
        for field in fields(cls):
            _read(hints[field.name], getattr(value, field.name), _join(key, field.name), mistakes)
        return value
    if not isinstance(value, Mapping):
        mistakes.append(
            f"{key} is a section, not {_show(value)}; set what is in it, {_join(key, next(iter(hints)))}=..."
        )
        return None
    arguments = {}
    for name, item in value.items():
        if name in hints:
            arguments[name] = _read(hints[name], _convert(hints[name], item), _join(key, name), mistakes)
        else:
            siblings = [_join(key, sibling) for sibling in hints]
            for leaf in _leaves(item, _join(key, str(name))):
                mistakes.append(unknown_key(leaf, [*siblings, *option_keys()]))
    return cls(**arguments)


def _convert(hint: Any, value: Any) -> Any:
    if get_origin(hint) is UnionType:
        hint = get_args(hint)[0]
    if type(value) is int and hint in (float, str):
        return hint(value)
    if type(value) is str and hint == list[str]:
        return [value]
    return value


def _wrong_scalar(hint: type, value: Any) -> str | None:
    """What `value` should have been; None when it is that."""
    if issubclass(hint, StrEnum):
        return None if value in list(hint) else f"one of {', '.join(hint)}"
    if hint is bool:
        return None if isinstance(value, bool) else "true or false"
    if hint is int:
        return None if type(value) is int else "a whole number"
    if hint is float:
        return None if type(value) in (int, float) and math.isfinite(value) else "a finite number"
    return None if isinstance(value, str) else "a text"


def _hint_at(hint: type, value: Any, key: str) -> str:
    if not isinstance(value, str):
        return f"; put it in quotes in YAML, or write {key}='\"{value}\"'" if hint is str and value is not None else ""
    if (key, value) in REFUSED_VALUES:
        return f": {REFUSED_VALUES[key, value]}"
    if value.lower() in ("none", "null", "~"):
        return "; an empty value is written null"
    if hint in (int, float) and _is_number(value):
        return f"; write {key}={value.strip()} without quotes"
    return ""


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _leaves(value: Any, key: str) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from _leaves(item, f"{key}.{name}")
    else:
        yield key


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _show(value: Any) -> str:
    if isinstance(value, str):
        return f"the text {value!r}"
    return json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
