"""The prompts of a run: rows are read, templated once, filtered by their length in tokens, and numbered for good.

What is dropped is counted, and a set from which nothing is left is an error here, before any engine is built. A
prompt's uid is its place in the data (`<source>/<split>/<row>`), so it is the same in every run over the same files,
whatever the filter drops. The order in which a run visits them is order.py's.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fastgrpo.config import DataConfig, Truncation
from fastgrpo.data.columns import CHOICES, fill_template, letter_choices
from fastgrpo.data.sources import Row, Source, Split, columns, find_file, lookup, read_sources, source_of
from fastgrpo.data.template import Message, encode, load_tokenizer, to_messages, what_the_user_said
from fastgrpo.errors import UserError
from fastgrpo.records import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


__all__ = ["PromptSet", "find_file", "load_prompts", "load_tokenizer", "prompts_from_python"]


@dataclass(frozen=True, slots=True)
class PromptSet:
    """The prompts of one split, in the order of the data. Example: PromptSet((Prompt(...),), 3, "a.jsonl", "9f0c")."""

    prompts: tuple[Prompt, ...]
    dropped: int  # prompts left out because they are longer than data.max_prompt_length
    source: str  # where they come from, for the eye
    fingerprint: str  # hex digest of uids, token ids and references: differs when the data or the template does

    def __len__(self) -> int:
        return len(self.prompts)


@dataclass(frozen=True, slots=True)
class _Task:
    uid: str
    where: str  # names the row in messages
    messages: list[Message]
    reference: str | None
    meta: Mapping[str, Any]


def load_prompts(data: DataConfig, tokenizer: PreTrainedTokenizerBase, *, split: Split, seed: int) -> PromptSet:
    """Prompts of `data.train_files` or `data.val_files`. `seed` draws made-up tasks. No val_files: an empty set.

    Raises UserError for anything that is wrong with the data.
    """
    if split == "train" and not data.train_files:
        raise UserError(
            "data.train_files is empty: list .jsonl, .json or .parquet files, a hub data set such as openai/gsm8k, or "
            "`arithmetic`"
        )
    return _make_set(read_sources(data, split, seed), tokenizer, data, split)


def prompts_from_python(
    prompts: Sequence[str | Sequence[Mapping[str, Any]] | Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    *,
    split: Split = "train",
) -> PromptSet:
    """Prompts given as strings or lists of messages (both without a reference), or as rows with the configured keys."""
    if isinstance(prompts, (str, Mapping)):
        raise UserError(f"prompts={str(prompts)[:40]!r} is one prompt: put it into a list, prompts=[...]")
    if not prompts:
        raise UserError("prompts=[] holds no prompts: give a list of strings, of message lists or of rows")
    rows = [_python_row(prompt, data) for prompt in prompts]
    return _make_set([source_of(data, "python", "prompts", rows)], tokenizer, data, split)


def _python_row(prompt: Any, data: DataConfig) -> Row:
    if isinstance(prompt, Mapping):
        return prompt
    return {data.prompt_key: prompt} | ({data.reference_key: None} if data.reference_key else {})


def _make_set(sources: list[Source], tokenizer: PreTrainedTokenizerBase, data: DataConfig, split: Split) -> PromptSet:
    limit = data.train_max_samples if split == "train" else data.val_max_samples
    if limit == 0:
        raise UserError(f"data.{split}_max_samples=0 leaves no prompt: -1 takes all of them")
    limit = limit if limit > 0 else None
    tasks = [
        task
        for source, name in zip(sources, _distinct_names(sources), strict=True)
        for task in _tasks(source, name, data, split)[: limit if split == "val" else None]  # of each set
    ]
    tasks = tasks[:limit] if split == "train" else tasks
    ids = encode(
        tokenizer, [task.messages for task in tasks], data.apply_chat_template_kwargs, lambda i: tasks[i].where
    )
    kept = [
        (task, fitted) for task, row in zip(tasks, ids, strict=True) if (fitted := _fit(row, task, data)) is not None
    ]
    if tasks and not kept:
        raise UserError(
            f"all {len(tasks)} prompts of {', '.join(source.origin for source in sources)} are longer than "
            f"data.max_prompt_length={data.max_prompt_length} tokens after the chat template (the shortest has "
            f"{min(map(len, ids))}): raise data.max_prompt_length, or cut them with "
            f"data.filter_overlong_prompts=false data.truncation=left"
        )
    prompts = tuple(
        Prompt(task.uid, tuple(row), what_the_user_said(task.messages), task.reference, task.meta) for task, row in kept
    )
    return PromptSet(prompts, len(tasks) - len(kept), _described(sources, len(tasks)), _fingerprint(prompts))


def _distinct_names(sources: list[Source]) -> list[str]:
    """Source names for uids: the second of the same name becomes `name-2`."""
    seen: Counter[str] = Counter()
    names = []
    for source in sources:
        seen[source.name] += 1
        names.append(source.name if seen[source.name] == 1 else f"{source.name}-{seen[source.name]}")
    return names


def _tasks(source: Source, name: str, data: DataConfig, split: Split) -> list[_Task]:
    tasks = []
    for index, row in enumerate(source.rows, start=source.first_row):
        where = f"{source.origin} row {index}"
        prompt, reference = _prompt_and_reference(row, source, data, where)
        tasks.append(_Task(f"{name}/{split}/{index}", where, to_messages(prompt, data, where), reference, dict(row)))
    return tasks


def _prompt_and_reference(row: Row, source: Source, data: DataConfig, where: str) -> tuple[Any, str | None]:
    """The prompt, a text or a list of messages, and the right answer."""
    prompt = None if source.template else _column(row, source, source.prompt_key, "data.prompt_key", where)
    right = None
    if source.reference_key is not None:
        right = _column(row, source, source.reference_key, "data.reference_key", where)
    lines, places = "", {}
    if source.choices_key is not None:
        lines, right = letter_choices(_column(row, source, source.choices_key, "data.choices_key", where), right, where)
        places = {CHOICES: lines}
    if source.template is not None:
        return fill_template(source.template, row, places, where), _as_text(right)
    if lines and not isinstance(prompt, str):
        raise UserError(f"{where}: choices go below a text, and the prompt is a list; set data.prompt_template")
    return f"{prompt}\n{lines}" if lines else prompt, _as_text(right)


def _column(row: Row, source: Source, key: str, option: str, where: str) -> Any:
    try:
        return lookup(row, key)
    except KeyError:
        if having := sum(_has(other, key) for other in source.rows):
            raise UserError(
                f"{where}: no column `{key}` ({option}), which {having} of the {len(source.rows)} rows have; the "
                f"columns there are {columns(row)}: complete the row, or leave it out"
            ) from None
        none = " (or null: no references)" if option == "data.reference_key" else ""
        raise UserError(
            f"{where}: no column `{key}`; the columns there are {columns(row)}: set {option} to one of them{none}"
        ) from None


def _has(row: Row, key: str) -> bool:
    try:
        lookup(row, key)
    except KeyError:
        return False
    return True


def _as_text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)


def _fit(ids: list[int], task: _Task, data: DataConfig) -> list[int] | None:
    """`ids` within data.max_prompt_length, or None where the prompt is to be dropped."""
    limit = data.max_prompt_length
    if len(ids) <= limit:
        return ids
    if data.filter_overlong_prompts:
        return None
    if data.truncation == Truncation["left"]:
        return ids[-limit:]
    if data.truncation == Truncation["right"]:
        return ids[:limit]
    raise UserError(
        f"{task.where}: the prompt has {len(ids)} tokens after the chat template, more than "
        f"data.max_prompt_length={limit}: raise it, or set data.filter_overlong_prompts=true to drop such prompts, or "
        f"data.truncation=left (keeps the end) or right (keeps the beginning)"
    )


def _described(sources: list[Source], rows: int) -> str:
    total = sum(len(source.rows) for source in sources)
    names = ", ".join(f"{source.origin}: {len(source.rows)} rows" for source in sources) or "none"
    return names if rows == total else f"{names}; the first {rows} taken"


def _fingerprint(prompts: Sequence[Prompt]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        digest.update(json.dumps([prompt.uid, prompt.reference, len(prompt.ids)]).encode())
        digest.update(np.asarray(prompt.ids, dtype="<i8").tobytes())
    return digest.hexdigest()
