"""A prompt out of several columns (`data.prompt_template`), and multiple choice out of a list (`data.choices_key`).

    {question: "Why?", choices: ["a", "b"], answer: 0}, template "{question}\\n{choices}"
        -> "Why?\\nA. b\\nB. a", reference "B"

Choices are shuffled, for in some data sets (TruthfulQA) the right one always comes first: by a hash of themselves, so
that a question looks the same in every run. The right one may be given as an index, a letter, its text, or a list with
a 1 in its place.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Mapping, Sequence
from string import ascii_uppercase
from typing import Any

from fastgrpo.data.sources import Row, columns, lookup
from fastgrpo.errors import UserError

CHOICES = "choices"  # the place that the lettered choices take in a template
_PLACE = re.compile(r"\{([A-Za-z_][\w.]*)\}")


def fill_template(template: str, row: Row, places: Mapping[str, str], where: str) -> str:
    """The template with its places filled from `places`, else from columns. Other braces stay as they are."""

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name in places:
            return places[name]
        try:
            found = lookup(row, name)
        except KeyError:
            raise UserError(
                f"{where}: data.prompt_template has a place {{{name}}}, and there is no such column; the columns there "
                f"are {columns(row)}"
            ) from None
        return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False, default=str)

    return _PLACE.sub(value, template)


def letter_choices(choices: Any, right: Any, where: str) -> tuple[str, str | None]:
    """(the choices, a line each, in their shuffled order; the letter of the right one). `right` None: no reference."""
    if not isinstance(choices, Sequence) or isinstance(choices, str) or not 2 <= len(choices) <= len(ascii_uppercase):
        raise UserError(f"{where}: data.choices_key must name a list of 2 to 26 choices, not {str(choices)[:80]!r}")
    order = list(range(len(choices)))
    digest = hashlib.blake2b(json.dumps([str(choice) for choice in choices]).encode(), digest_size=8).digest()
    random.Random(int.from_bytes(digest, "big")).shuffle(order)
    text = "\n".join(f"{letter}. {choices[i]}" for letter, i in zip(ascii_uppercase, order, strict=False))
    index = None if right is None else _right_index(choices, right, where)
    return text, None if index is None else ascii_uppercase[order.index(index)]


def _right_index(choices: Sequence[Any], right: Any, where: str) -> int:
    if isinstance(right, list) and len(right) == len(choices) and sum(map(bool, right)) == 1:
        return [bool(mark) for mark in right].index(True)
    if isinstance(right, int) and not isinstance(right, bool) and 0 <= right < len(choices):
        return right
    if isinstance(right, str) and right in choices:
        return list(choices).index(right)
    if isinstance(right, str) and len(right) == 1 and 0 <= ascii_uppercase.find(right.upper()) < len(choices):
        return ascii_uppercase.index(right.upper())
    raise UserError(
        f"{where}: {str(right)[:80]!r} does not say which of {len(choices)} choices is right; data.reference_key must "
        "name an index from 0, a letter, the text of a choice, or a list with one 1 in the right one's place"
    )
