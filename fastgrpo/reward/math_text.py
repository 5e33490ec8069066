r"""Mathematical answers as text: taken out of a response, freed from typography, cut into their parts.

    response -> answer_text: what the last \boxed{} holds (nested ones unwrapped), or what follows the last "answer is"
    text     -> clean:       one way to write spaces, fractions, minus signs, thousands, delimiters
    clean    -> split:       set, list, tuple or interval, union, or an atom
    atom     -> quantity:    value text, unit, percent

Why of our own: a symbolic parser reads `1,234` as two numbers, `5 \text{ cm}` as a product, `\frac12` and `3\frac12`
as it likes, and takes `(1,2]` for a typo. What is left after this is numbers (compared exactly) and true formulas
(math_answers.py).
Nothing here raises, whatever the text, and every function takes time linear in it, or nearly so.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from typing import Literal

_OPEN, _CLOSE = "([{", ")]}"
_ANSWER_IS = re.compile(r"(?:final\s+)?answer(?:\s+is)?\s*(?::|is|=)\s*(.+)", re.IGNORECASE)
_INLINE = re.compile(r"\$([^$\n]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:\s*/\s*\d+|\s*\\?%)?")
_SPACES = re.compile(
    r"(?<!\\)\\[,;:! ]|\\q?quad(?![a-zA-Z])|\\(?:thinspace|medspace|thickspace|enspace|hspace\{[^{}]*\})|~|\s+"
)
_SIZES = re.compile(r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits|phantom\{[^{}]*\})(?![a-zA-Z])\.?")
_FRAC = re.compile(r"\\[dtc]?frac(?![a-zA-Z])")
_BARE_FRAC = re.compile(r"\\frac\s*(\{[^{}]*\}|[0-9a-zA-Z])\s*(\{[^{}]*\}|[0-9a-zA-Z])")
_BARE_SQRT = re.compile(r"\\sqrt\s*([0-9a-zA-Z])")
_THOUSANDS = re.compile(r"(?<![\d.,])(\d{1,3}(?:,\d{3})+)(?![\d,])")
_SPACED_THOUSANDS = re.compile(r"(?<![\d.])(\d{1,3}(?: \d{3})+)(?! ?\d)")
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mbox|operatorname)\s*\{([^{}]*)\}")
_REPLACED = (
    ("−", "-"), ("–", "-"), ("\\dots", "..."), ("\\ldots", "..."), ("\\cdots", "..."), ("\\le ", "\\leq "),
    ("\\ge ", "\\geq "), ("≤", "\\leq "), ("≥", "\\geq "), ("×", "\\times "), ("·", "\\cdot "), ("π", "\\pi "),
    ("∞", "\\infty "), ("∪", "\\cup "), ("∈", "\\in "), ("√", "\\sqrt"), ("°", "^\\circ"), ("\\degree", "^\\circ"),
    ("^{\\circ}", "^\\circ"), ("\\lbrace", "\\{"), ("\\rbrace", "\\}"), ("\\lbrack", "["), ("\\rbrack", "]"),
    ("\\varnothing", "\\emptyset"), ("∅", "\\emptyset"), ("\\%", "%"), ("\\#", "#"), ("{,}", ","), ("±", "\\pm "),
    ("\\neq", "\\ne"), ("²", "^2"), ("³", "^3"),
)  # fmt: skip
_VULGAR = {
    letter: "\\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKD", letter).split("\u2044"))
    for letter in "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
}


def answer_text(response: str, strict: bool) -> str | None:
    r"""The answer that a response gives; None if it gives none. `strict`: only \boxed{} counts. Otherwise what follows
    the last "answer is", then the last formula between dollars, then the last number, is taken where nothing is boxed.
    """
    text = response.rpartition("</think>")[2]
    boxed = last_boxed(text)
    if boxed is not None or strict:
        return boxed
    said = _ANSWER_IS.findall(text)
    if said:
        return _until_sentence_end(said[-1])
    formulas = _INLINE.findall(text)
    if formulas:
        return next(part for part in formulas[-1] if part) if any(formulas[-1]) else None
    numbers = _NUMBER.findall(text)
    return numbers[-1] if numbers else None


def last_boxed(text: str) -> str | None:
    r"""Content of the last complete \boxed{} or \fbox{} that is not inside another, with its own boxes unwrapped."""
    found: str | None = None
    start = 0
    while match := re.compile(r"\\(?:boxed|fbox)\s*\{").search(text, start):
        end = _closing(text, match.end() - 1)
        if end is None:
            start = match.end()
            continue
        found, start = text[match.end() : end], end
    while found is not None and (
        inner := re.fullmatch(r"\s*\$?\s*\\(?:boxed|fbox)\s*\{(.*)\}\s*\$?\s*", found, re.DOTALL)
    ):
        found = inner[1]
    return found


def _closing(text: str, opening: int) -> int | None:
    """Index of the brace that closes the one at `opening`; escaped braces are text."""
    depth, i = 0, opening
    while i < len(text):
        if text[i] == "\\":
            i += 1
        elif text[i] == "{":
            depth += 1
        elif text[i] == "}":
            depth -= 1
            if depth == 0:
                return i
        i += 1
    return None


def _until_sentence_end(text: str) -> str:
    text = re.split(r"(?<!\d)\.(?:\s|$)|(?<=\d)\.(?:\s|$)|\n", text, maxsplit=1)[0]
    return text.strip().strip("*").strip()


def clean(text: str) -> str:
    """One spelling of an answer: delimiters, sizes and kinds of space gone; `\\text{x}` kept."""
    text = _undelimited(text.strip().rstrip(".").strip())
    for old, new in (*_REPLACED, *_VULGAR.items()):
        text = text.replace(old, new)
    text = re.sub(r"(?<=\d)\\!,\\!(?=\d)", ",", text)  # 1\!,\!234
    text = re.sub(r"(?<=\d)(?:\\[,;:! ]|~)+(?=\d{3}(?!\d))", " ", text)  # 1\,234
    text = _SIZES.sub("", text)
    text = _SPACES.sub(" ", text)
    text = _FRAC.sub(r"\\frac", text)
    text = _BARE_FRAC.sub(lambda m: f"\\frac{_braced(m[1])}{_braced(m[2])}", text)
    text = _BARE_SQRT.sub(r"\\sqrt{\1}", text)
    text = _SPACED_THOUSANDS.sub(lambda m: m[1].replace(" ", ""), text)
    if not _bracketed(text):  # in (1,234) and {1,234} the comma parts two numbers
        text = _THOUSANDS.sub(lambda m: m[1].replace(",", ""), text)
    return text.strip()


def _undelimited(text: str) -> str:
    while True:
        for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("`", "`")):
            if len(text) > len(opening) + len(closing) and text.startswith(opening) and text.endswith(closing):
                inner = text[len(opening) : -len(closing)]
                if opening[0] != "$" or "$" not in inner.replace("\\$", ""):
                    text = inner.strip()
                    break
        else:
            return text


def _braced(part: str) -> str:
    return part if part.startswith("{") else f"{{{part}}}"


def _bracketed(text: str) -> bool:
    return text.startswith(("(", "[", "\\{")) and text.endswith((")", "]", "\\}"))


Kind = Literal["atom", "list", "set", "tuple", "union"]


@dataclass(frozen=True, slots=True)
class Parts:
    """`brackets` are those of a tuple or interval, such as "(]"."""

    kind: Kind
    parts: tuple[str, ...]
    brackets: str = ""


def split(text: str) -> Parts:
    """The outermost structure of a clean text. An atom's only part is the text."""
    text = re.sub(r"^[a-zA-Z](?:_\{?\w\}?)?\s*\\in(?![a-zA-Z])\s*", "", text).strip()
    if text in ("\\emptyset", "\\{\\}", "\\{ \\}"):
        return Parts("set", ())
    if len(pieces := _cut(text, "\\cup")) > 1:
        return Parts("union", pieces)
    if text.startswith("\\{") and text.endswith("\\}") and _spans(text[1:-2] + "}"):
        return Parts("set", _cut(text[2:-2], ","))
    if text[:1] in "([" and text[-1:] in ")]" and text and _spans(text):
        pieces = _cut(text[1:-1], ",")
        if len(pieces) > 1:
            return Parts("tuple", pieces, text[0] + text[-1])
        if text[0] == "(" and text[-1] == ")" and not re.fullmatch(r"\([A-Z]\)", text):
            return split(text[1:-1].strip())
    if "\\pm" in text and len(signs := text.split("\\pm")) == 2:
        plus = f"{signs[0]}+{signs[1]}" if signs[0].strip() else signs[1]
        return Parts("list", (plus.strip(), f"{signs[0]}-{signs[1].strip()}".strip()))
    listed = re.sub(r"\s*,?\s*(?:\\text\s*\{\s*(?:and|or)\s*\}|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z]))\s*", ",", text)
    pieces = _cut(listed, ",")
    return Parts("list", pieces) if len(pieces) > 1 and all(pieces) else Parts("atom", (text,))


def _spans(text: str) -> bool:
    """Whether the first bracket is closed by the last character; round and square ones may close each other."""
    depth = 0
    for i, letter in enumerate(text):
        if letter in _OPEN:
            depth += 1
        elif letter in _CLOSE:
            depth -= 1
            if depth == 0:
                return i == len(text) - 1
    return False


def _cut(text: str, separator: str) -> tuple[str, ...]:
    """`text` at each `separator` outside brackets."""
    pieces, depth, start, i = [], 0, 0, 0
    while i < len(text):
        if depth == 0 and text.startswith(separator, i):
            pieces.append(text[start:i].strip())
            i += len(separator)
            start = i
            continue
        depth += (text[i] in _OPEN) - (text[i] in _CLOSE)
        i += 1
    return (*pieces, text[start:].strip())


def words(text: str) -> str:
    r"""`text` with the contents of \text{} and its kin in its place, one space between words."""
    return " ".join(_TEXT.sub(lambda m: f" {m[1]} ", text).split())
