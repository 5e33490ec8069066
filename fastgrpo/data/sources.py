"""Rows out of what `data.train_files` and `data.val_files` name: local files, hub data sets, tasks made on the spot.

Nothing here knows of tokenizers. A row is a dictionary of plain Python values; a key with dots goes into nested
columns, whose values may be dictionaries or JSON text, as in verl's parquet files (`reward_model.ground_truth`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fastgrpo.config import DataConfig
from fastgrpo.data.arithmetic import make_tasks
from fastgrpo.errors import UserError
from fastgrpo.hub import looks_local, resolve_dataset
from fastgrpo.paths import config_dir
from fastgrpo.rows import SUFFIXES, Row, read_file

Split = Literal["train", "val"]
ARITHMETIC = "arithmetic"


@dataclass(frozen=True, slots=True)
class Source:
    """The rows of one entry. Example: Source("train", "data/train.jsonl", [{"prompt": "3 + 4 ="}], "prompt", None)."""

    name: str  # first part of the prompts' uids: file stem, hub id or `arithmetic`
    origin: str  # as the user wrote it, for messages
    rows: list[Row]
    prompt_key: str
    reference_key: str | None
    template: str | None = None  # data.prompt_template
    choices_key: str | None = None
    first_row: int = 0  # place of the first row in its data, for uids and messages


def source_of(data: DataConfig, name: str, origin: str, rows: list[Row], first_row: int = 0) -> Source:
    """A source whose rows are read as `data` says."""
    return Source(
        name, origin, rows, data.prompt_key, data.reference_key, data.prompt_template, data.choices_key, first_row
    )


def find_file(path: str, option: str = "data.train_files") -> Path:
    """The file `path` names, seen from the working directory, then from the folder of shipped configurations. `option`
    is the configuration key that the message names."""
    wanted = Path(path).expanduser()
    places = [Path.cwd() / wanted, config_dir() / wanted]  # an absolute path stays what it is
    for place in places:
        if place.is_file():
            return place
    if places[0].is_dir():
        raise UserError(f"{option}: {path} is a folder: name the file in it")
    tried = " and ".join(dict.fromkeys(str(place) for place in places))
    raise UserError(f"{option}: there is no file {path} (looked for {tried})")


def read_sources(data: DataConfig, split: Split, seed: int) -> list[Source]:
    """All rows of a split, an entry a source. Raises UserError naming the entry for anything that cannot be read."""
    option = f"data.{split}_files"
    entries = data.train_files if split == "train" else data.val_files
    sources = [_read_entry(entry, data, split, seed, option) for entry in entries]
    for source in sources:
        if not source.rows:
            raise UserError(f"{option}: {source.origin} is empty, it has no rows")
    return sources


def _read_entry(entry: str, data: DataConfig, split: Split, seed: int, option: str) -> Source:
    if entry == ARITHMETIC:
        return Source(ARITHMETIC, ARITHMETIC, list(make_tasks(data.arithmetic, split, seed)), "prompt", "reference")
    if entry.endswith(SUFFIXES):
        rows = read_file(find_file(entry, option), option)
        return source_of(data, Path(entry).stem, entry, rows)
    if looks_local(entry):
        found = find_file(entry, option)
        raise UserError(f"{option}: {found} is none of {', '.join(SUFFIXES)}: convert it to one of them")
    wanted = data.train_split if split == "train" else data.val_split
    hub_split, first, end = read_split(wanted, f"data.{split}_split")
    files = resolve_dataset(entry, data.hub_config, hub_split, option=option)
    rows: list[Row] = []
    for file in files:
        if end is None or len(rows) < end:
            rows += read_file(file, option, None if end is None else end - len(rows))
    return source_of(data, entry, f"{entry} ({data.hub_config or 'default'}/{wanted})", rows[first:], first)


def read_split(text: str, option: str) -> tuple[str, int, int | None]:
    """(name, first row, end row or None) of `train`, `train[:100]`, `train[100:200]` or `train[100:]`."""
    match = re.fullmatch(r"([\w.-]+)(?:\[(\d*):(\d*)\])?", text)
    if match is None:
        raise UserError(
            f"{option}={text} is no split; write a name, or some of its rows as in train[:1000] or train[1000:]"
        )
    return match[1], int(match[2] or 0), int(match[3]) if match[3] else None


def lookup(row: Row, key: str) -> Any:
    """Value of a column, or of a nested one by dots. Raises KeyError when a part is not there.

    Example: lookup({"reward_model": '{"ground_truth": "7"}'}, "reward_model.ground_truth") -> "7".
    """
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except json.JSONDecodeError:
                raise KeyError(key) from None
        if not isinstance(value, Mapping) or part not in value:
            raise KeyError(key)
        value = value[part]
    return value


def columns(row: Row) -> str:
    """The names that `lookup` finds in a row, for messages: nested ones of one level with their dots."""
    names: list[str] = []
    for name, value in row.items():
        if isinstance(value, str) and value.startswith("{"):
            with suppress(json.JSONDecodeError):  # ordinary text may begin with a brace
                value = json.loads(value)
        names += [f"{name}.{inner}" for inner in value] if isinstance(value, Mapping) and value else [name]
    return ", ".join(names) or "(none)"
