r"""A number with its unit, out of the cleaned text of an answer: `5\text{ cm}` is 5 and cm, `\$3` is 3 and dollar.

    quantity("1.5 \\times 10^{3} \\text{ miles per hour}") -> Quantity("1.5 \\times 10^{3}", "mile/hour", False)
    exact_value("3\\frac{1}{2}") -> Fraction(7, 2)

Values are exact fractions: 0.333 is not 1/3. Units are compared by name; nothing is converted. A word after a number
that is no known unit (`5 apples`) counts as one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from fastgrpo.reward.math_text import words

_UNITS = {
    "cm": "centimeter centimeters centimetre centimetres cms",
    "mm": "millimeter millimeters millimetre millimetres",
    "m": "meter meters metre metres",
    "km": "kilometer kilometers kilometre kilometres kms",
    "inch": "inches in",
    "foot": "feet ft",
    "yard": "yards yd",
    "mile": "miles mi",
    "g": "gram grams",
    "kg": "kilogram kilograms kgs",
    "pound": "pounds lb lbs",
    "ounce": "ounces oz",
    "second": "seconds sec secs s",
    "minute": "minutes min mins",
    "hour": "hours hr hrs h",
    "day": "days",
    "week": "weeks",
    "month": "months",
    "year": "years yr yrs",
    "dollar": "dollars usd \\$ $",
    "cent": "cents",
    "degree": "degrees ^\\circ deg",
    "liter": "liters litre litres l",
    "ml": "milliliter milliliters",
    "unit": "units",
    "radian": "radians rad",
    "am": "a.m. a.m",
    "pm": "p.m. p.m",
}
_SYNONYM = {word: unit for unit, names in _UNITS.items() for word in [unit, *names.split()]}
_FACTOR = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_TAIL = re.compile(
    r"^(?P<core>.*[\d}a-zA-Z)])\s*\\(?:text|textrm|mathrm|mbox|textbf)\s*\{(?P<tail>[^{}]*)\}(?P<power>\s*\^?\{?[23]?\}?)$"
)
_BARE_TAIL = re.compile(
    r"^(?P<core>.*[\d})])\s*(?P<tail>(?:[a-zA-Z]{2,}\.?[\s/]*)+|[mgslh])(?P<power>\s*\^\{?[23]\}?)?$"
)
_INT = re.compile(r"[-+]?\d+")
_DECIMAL = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)")
_FRACTION = re.compile(
    r"(?P<sign>[-+]?)(?P<whole>\d+(?= ?\\frac))? ?\\frac\{ ?(?P<top>[-+]?[\d.]+) ?\}\{ ?(?P<bottom>[-+]?[\d.]+) ?\}"
)
_SLASH = re.compile(r"(?P<sign>[-+]?)(?:(?P<whole>\d+) )?(?P<top>\d+(?:\.\d+)?) ?/ ?(?P<bottom>\d+(?:\.\d+)?)")
_SCIENTIFIC = re.compile(
    r"(?P<mantissa>[-+]?[\d.]+) ?(?:\\times|\\cdot|\*) ?10 ?\^ ?(?:\{ ?(?P<braced>[-+]?\d+) ?\}|(?P<digit>\d))"
)
_REPEATING = re.compile(
    r"(?P<whole>\d*)\.(?P<fixed>\d*)\\(?:overline|bar|dot)\s*(?:\{ ?(?P<braced>\d+) ?\}|(?P<digit>\d))"
)
_ANGLE_IN_FUNCTION = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?)\s*\^\s*\\circ")
_WITH_BASE = re.compile(r"(-?[0-9A-Z]+)_([0-9]+|[a-z]+)")
_BASE_NAMES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10}
_MAX_EXPONENT = 1000
_MAX_DIGITS = 4000


@dataclass(frozen=True, slots=True)
class Quantity:
    core: str  # what is left when unit and percent sign are gone
    unit: str = ""  # canonical; "" = none
    percent: bool = False
    factor: int = 1  # of words such as million


def quantity(text: str) -> Quantity:
    text = text.strip()
    percent = False
    if match := re.fullmatch(r"(.*\S)\s*(?:%|\\text\s*\{\s*(?:percent|per cent|%)\s*\}|per ?cent)", text):
        text, percent = match[1], True
    unit, factor = "", 1
    if money := re.fullmatch(r"(-?)\s*\\?\$\s*(-?.*\d.*)", text):
        text, unit = money[1] + money[2], "dollar"
    if not _ANGLE_IN_FUNCTION.search(text) and (
        match := re.fullmatch(
            r"(.*\d.*?|.*\\pi|.*\})\s*\^\s*\\circ\s*(?:\\(?:text|mathrm)\s*\{)?\s*([CFK]?)\s*\}?", text
        )
    ):
        return Quantity(match[1].strip(), "degree" + match[2], percent)
    for pattern in (_TAIL, _BARE_TAIL):
        if (match := pattern.match(text)) and _is_value(match["core"]) and _is_tail(match["tail"], pattern):
            named, factor = _canonical(match["tail"], match["power"] or "")
            text, unit = match["core"].strip(), named or unit
            break
    return Quantity(text, unit, percent, factor)


def _is_value(core: str) -> bool:
    return bool(re.search(r"\d|\\pi|\\sqrt", core)) or len(words(core)) == 1


def _is_tail(tail: str, pattern: re.Pattern[str]) -> bool:
    """Letters that stand bare after a number may be variables: only known units and longer words are units."""
    if pattern is _TAIL:
        return bool(tail.strip())
    return all(
        w.lower() in _SYNONYM or w.lower() in _FACTOR or len(w) >= 4 or w in ("per", "sq", "cu")
        for w in re.findall(r"[a-zA-Z]+", tail)
    )


def _canonical(tail: str, power: str) -> tuple[str, int]:
    """(unit, factor): "square centimeters" is cm2, "million dollars" is dollar and 10**6."""
    tail = re.sub(r"\s*\^?\{?([23])\}?", r" ^\1", tail.lower()) if re.search(r"[23]", tail) else tail.lower()
    factor, names = 1, []
    exponent = next(iter(re.findall("[23]", power)), "")
    for word in re.findall(r"[^\s/·]+|/", tail.replace(" per ", " / ").replace("per ", "/ ")):
        if word in _FACTOR:
            factor *= _FACTOR[word]
        elif word in ("square", "sq", "squared", "sq."):
            exponent = "2"
        elif word in ("cubic", "cu", "cubed"):
            exponent = "3"
        elif word[:1] == "^":
            exponent = word[1:]
        elif word not in ("of", "the", "a"):
            names.append(_SYNONYM.get(word, _SYNONYM.get(word.rstrip("."), word.rstrip(".s") or word)))
    if "/" not in names and len(names) > 1 and names[-1] in _UNITS and names[0] not in _UNITS:
        names = names[-1:]
    joined = " ".join(names).replace(" / ", "/")
    return ("" if joined == "unit" else joined) + (exponent if joined else ""), factor


def exact_value(text: str) -> Fraction | None:
    """Value of a plain number: integer, decimal, also repeating, fraction, mixed number, power of ten; None for
    anything else."""
    text = " ".join(re.sub(r"^([-+])\s+", r"\1", text.strip()).split())
    if text.startswith("{") and text.endswith("}") and text.count("{") == 1:
        text = text[1:-1].strip()
    if len(text) > _MAX_DIGITS:
        return None
    if _DECIMAL.fullmatch(text):
        return Fraction(text.rstrip(".") or "0")
    if match := _REPEATING.fullmatch(text.lstrip("+-")):
        return -_repeating(match) if text[0] == "-" else _repeating(match)
    if (match := _FRACTION.fullmatch(text)) or (match := _SLASH.fullmatch(text)):
        return _mixed(match)
    if match := _SCIENTIFIC.fullmatch(text):
        exponent = int(match["braced"] or match["digit"])
        if abs(exponent) <= _MAX_EXPONENT and _DECIMAL.fullmatch(match["mantissa"]):
            return Fraction(match["mantissa"].rstrip(".")) * Fraction(10) ** exponent
    return None


def _mixed(match: re.Match[str]) -> Fraction | None:
    try:
        value = Fraction(match["top"].rstrip(".")) / Fraction(match["bottom"].rstrip("."))
    except (ValueError, ZeroDivisionError):
        return None
    value += Fraction(match["whole"] or 0)
    return -value if match["sign"] == "-" else value


def _repeating(match: re.Match[str]) -> Fraction:
    """0.1(6) = 1/10 + 6/90"""
    repeated = match["braced"] or match["digit"]
    scale = 10 ** len(match["fixed"])
    return Fraction(int(match["whole"] + match["fixed"] or "0"), scale) + Fraction(
        int(repeated), scale * (10 ** len(repeated) - 1)
    )


def in_base(text: str) -> tuple[int, int] | None:
    r"""(value, base) of `110_2`, `110_{\text{two}}`; None for what is no number with its base."""
    match = _WITH_BASE.fullmatch(re.sub(r"[\s{}()]", "", words(text)))
    if match is None or len(match[1]) > _MAX_DIGITS:
        return None
    base = int(match[2][:3]) if match[2].isdigit() else _BASE_NAMES.get(match[2], 0)
    try:
        return (int(match[1], base), base) if base >= 2 else None
    except ValueError:  # a digit that the base does not have, or no such base: an indexed name
        return None


def without_notation(formula: str) -> str:
    """What math-verify reads wrongly, in another way: repeating decimals as fractions, degrees in functions as
    radians."""
    formula = _REPEATING.sub(lambda m: "\\frac{{{0.numerator}}}{{{0.denominator}}}".format(_repeating(m)), formula)
    if _ANGLE_IN_FUNCTION.search(formula):
        formula = _DEGREES.sub(r"(\\frac{\1\\pi}{180})", formula)
    return formula
