"""The tests that a data row's reference holds, for the kind `code`. Runs nothing.

    "assert f(1) == 2\\n..."            Python, one test as a whole (HumanEval's `check` is called with the entry point)
    ["assert f(1) == 2", ...]          one test each (MBPP's test_list)
    {"inputs": ["1 2"], "outputs": ["3"]}                  standard input and output, one case each (APPS, TACO)
    [{"input": "1 2", "output": "3"}, ...]                 the same
    {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]} calls of a function, or of a method of class Solution, one
                                                           case each (APPS, TACO)

A reference in no such form is an error that says so, never a verdict about the program.
"""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Mapping, Sequence

from fastgrpo.reward.sandbox.verdicts import BadTests, Functions, Streams

_FORMS = (
    'a Python source, a list of Python sources, {"inputs": [...], "outputs": [...]} (with "fn_name" for calls of a '
    'function), or a list of {"input": ..., "output": ...}'
)
# Runs in the tester's sandbox, beside a program's function that may be called like any builtin.
_CALLS = """
import builtins as _b

def _call(*args):
    try:
        return NAME(*args)
    except _b.NameError:
        return Solution().NAME(*args)

def _plain(value):
    if _b.isinstance(value, (_b.list, _b.tuple)):
        return [_plain(item) for item in value]
    if _b.isinstance(value, _b.dict):  # JSON's keys are texts
        return {_b.str(key): _plain(item) for key, item in value.items()}
    return value

def _same(value, wanted):
    if _b.isinstance(value, _b.list) and _b.isinstance(wanted, _b.list):
        return _b.len(value) == _b.len(wanted) and _b.all(_same(*pair) for pair in _b.zip(value, wanted))
    if _b.isinstance(value, _b.float) or _b.isinstance(wanted, _b.float):
        numbers = _b.isinstance(value, (_b.int, _b.float)) and _b.isinstance(wanted, (_b.int, _b.float))
        return numbers and (value == wanted or _b.abs(value - wanted) <= 1e-9 * _b.max(_b.abs(value), _b.abs(wanted)))
    return value == wanted

def _right(value, wanted):
    value = _plain(value)
    boxed = _b.isinstance(wanted, _b.list) and _b.len(wanted) == 1  # APPS puts some results into a list
    return _same(value, wanted) or (boxed and _same(value, wanted[0]))
"""


def read_tests(
    reference: str | None, setup: object = None, entry_point: str | None = None
) -> Functions | Streams | None:
    """The tests that a reference holds; None if it holds none. BadTests for a form that is not known."""
    value = _parsed(reference)
    before = "\n".join(setup) if isinstance(setup, Sequence) and not isinstance(setup, str) else str(setup or "")
    if isinstance(value, Mapping) or (isinstance(value, list) and any(isinstance(case, Mapping) for case in value)):
        return _cases(value, before, entry_point)
    if isinstance(value, list) and value:
        if not all(isinstance(test, str) for test in value):
            raise BadTests(f"the reference {str(reference)[:80]!r} is not {_FORMS}")
        return Functions(tuple(value), before, entry_point)
    if isinstance(value, str) and value.strip():
        called = f"\ncheck({entry_point})\n" if entry_point and re.search(r"^def check\(", value, re.MULTILINE) else ""
        return Functions((value + called,), before, entry_point)
    return None


def _cases(value: Mapping | list, before: str, entry_point: str | None) -> Functions | Streams | None:
    if isinstance(value, Mapping):
        inputs, outputs, name = value.get("inputs"), value.get("outputs"), value.get("fn_name")
    else:
        for i, case in enumerate(value):
            if not isinstance(case, Mapping) or not {"input", "output"} <= case.keys():
                raise BadTests(f'case {i} of the reference, {str(case)[:80]}, is not {{"input": ..., "output": ...}}')
        inputs, outputs = [case["input"] for case in value], [case["output"] for case in value]
        calls = any(case.get("testtype") == "functional" or case.get("fn_name") for case in value)
        name = next((case["fn_name"] for case in value if case.get("fn_name")), entry_point or "") if calls else None
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise BadTests(f"the reference {str(value)[:80]} is not {_FORMS}")
    if len(inputs) != len(outputs):
        raise BadTests(
            f"the reference has {len(inputs)} inputs and {len(outputs)} outputs; each input needs its output"
        )
    if not inputs:
        return None
    if name is None:
        return Streams(tuple((_text(given), _text(wanted)) for given, wanted in zip(inputs, outputs, strict=True)))
    if not (isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name)):
        raise BadTests(f'the reference tests calls of a function and does not name it: "fn_name" is {name!r}')
    tests = tuple(_call(given, wanted) for given, wanted in zip(inputs, outputs, strict=True))
    return Functions(tests, before + re.sub(r"\bNAME\b", name, _CALLS), name)


def _call(given: object, wanted: object) -> str:
    """Source of one test. Arguments and result as text are JSON, an argument a line (LiveCodeBench)."""
    if isinstance(given, str):
        try:
            given, wanted = [json.loads(line) for line in given.splitlines() if line.strip()], _loaded(wanted)
        except json.JSONDecodeError:
            raise BadTests(
                f"the arguments {given[:80]!r} of a call are neither a list nor a line of JSON each"
            ) from None
    if not isinstance(given, list):
        raise BadTests(f"the arguments {str(given)[:80]} of a call are no list")
    return f"assert _right(_call(*{given!r}), {wanted!r})"


def _loaded(wanted: object) -> object:
    return json.loads(wanted) if isinstance(wanted, str) else wanted


def _parsed(reference: str | None) -> object:
    if reference is None or reference.lstrip()[:1] not in ("[", "{"):
        return reference
    try:
        return json.loads(reference)
    except json.JSONDecodeError:
        return reference


def _text(value: object) -> str:
    """APPS holds some inputs and outputs as lists of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)
