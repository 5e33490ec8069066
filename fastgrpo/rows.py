"""Rows out of a file: .jsonl, .json (a list, or {"data": a list}) or .parquet. A row maps columns to plain values.

Every mistake in a file is a UserError that names the option, the file and the place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastgrpo.errors import UserError

Row = Mapping[str, Any]
SUFFIXES = (".jsonl", ".json", ".parquet")


def read_file(file: Path, option: str, limit: int | None = None) -> list[Row]:
    """The rows, or the first `limit` of them: of a large parquet file no more than those are read."""
    if file.suffix == ".parquet":
        return _read_parquet(file, option, limit)
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{option}: {file} is not UTF-8 text ({error}): save it in UTF-8") from error
    rows = _parse_lines(text, file, option) if file.suffix == ".jsonl" else _parse_json(text, file, option)
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise UserError(f"{option}: {file} row {index} is {_shown(row)}, not an object with named columns")
    return rows[:limit]


def _read_parquet(file: Path, option: str, limit: int | None) -> list[Row]:
    import pyarrow  # here, because only parquet needs it and importing it takes a while
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file)
        if limit is None:
            return table.read().to_pylist()
        rows: list[Row] = []
        for batch in table.iter_batches():
            rows += batch.to_pylist()
            if len(rows) >= limit:
                break
        return rows[:limit]
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{option}: {file} is no readable parquet file: {error}") from error


def _parse_lines(text: str, file: Path, option: str) -> list[Any]:
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):  # splitlines would also cut at U+2028 inside a string
        if line.strip():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise UserError(
                    f"{option}: {file} line {number} is not JSON: {error.msg} at column {error.colno}"
                ) from error
    return rows


def _parse_json(text: str, file: Path, option: str) -> list[Any]:
    try:
        content = json.loads(text) if text.strip() else []
    except json.JSONDecodeError as error:
        hint = "; one JSON object a line is a .jsonl file: rename it" if error.msg == "Extra data" else ""
        raise UserError(
            f"{option}: {file} is not JSON: {error.msg} at line {error.lineno} column {error.colno}{hint}"
        ) from error
    rows = content.get("data") if isinstance(content, dict) else content
    if not isinstance(rows, list):
        raise UserError(
            f'{option}: {file} must be a list of rows or {{"data": a list of rows}}, it is {_shown(content)}'
        )
    return rows


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return f"an object with the keys {', '.join(value) or '(none)'}"
    return f"{type(value).__name__} {str(value)[:40]!r}"
