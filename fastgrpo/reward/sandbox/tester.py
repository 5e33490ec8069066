"""Runs in a sandbox of its own: the tests, with the program's functions behind proxies.

    /box/tests.json   {"setup": source, "tests": [source, ...], "entry_point": name or null,
                      "all": whether to go on after a failed one}
    fd 3              the program (harness.py)
    fd 4              verdicts, a JSON line each: {"passed": bool, "error": text or null}; {"broken": text}: bad tests

A name that the tests use and do not define is the program's, unless it is a builtin or a module of the standard
library. An object that is no data stays with the program; here it is a Remote, which equals only itself and is neither
true nor false. A list, dict or set that a call changed is changed here too.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import wire

FD, VERDICTS = 3, 4
ALIASES = {"np": "numpy", "pd": "pandas"}


class RemoteError(Exception):
    """An exception of a type that only the program knows."""


class Remote:
    """A function or an object of the program. `of`: [name], or [number]."""

    def __init__(self, of: list[Any], kind: str = "function") -> None:
        self.__dict__.update(_of=of, _kind=kind)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return call(self._of, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python looks for by itself
            raise AttributeError(name)
        return ask({"op": "get", "of": [*self._of, name]})

    def __len__(self) -> int:
        try:
            return call([*self._of, "__len__"], (), {})
        except AttributeError as error:  # what list() expects of an iterator
            raise TypeError(str(error)) from None

    def __getitem__(self, key: Any) -> Any:
        return call([*self._of, "__getitem__"], (key,), {})

    def __iter__(self) -> Iterator[Any]:
        return iter(ask({"op": "iterate", "of": self._of}))

    def __bool__(self) -> bool:
        raise TypeError(f"the truth of an object of type {self._kind} is not known here")

    def __repr__(self) -> str:
        return f"<{self._kind}>"


def call(of: list[Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    message = {
        "op": "call",
        "of": of,
        "args": [outgoing(value) for value in args],
        "kwargs": {key: outgoing(value) for key, value in kwargs.items()},
    }
    return ask(message, args)


def outgoing(value: Any) -> Any:
    if isinstance(value, Remote) and isinstance(value._of[0], int):
        return ["h", value._of[0], value._kind]
    return wire.encode(value)


def ask(message: dict[str, Any], args: Sequence[Any] = ()) -> Any:
    wire.send(FD, message)
    reply = wire.receive(FD)
    if "error" in reply:
        name, text = reply["error"]
        kind = getattr(builtins, str(name), None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            raise kind(str(text))
        raise RemoteError(f"{name}: {text}")
    for mine, theirs in zip(args, reply.get("args", ()), strict=False):
        if theirs is not None:
            follow(mine, wire.decode(theirs, found))
    return wire.decode(reply["value"], found)


def found(number: int, kind: str) -> Remote:
    return Remote([number], kind)


def follow(mine: Any, theirs: Any) -> None:
    """Make `mine` what the program made of its copy."""
    if type(mine) is not type(theirs) or mine == theirs:
        return
    if isinstance(mine, list):
        mine[:] = theirs
    else:
        mine.clear()
        mine.update(theirs)


def free_names(sources: Sequence[str]) -> tuple[set[str], set[str]]:
    """(names that are read in the sources and bound in none of them, those that are called)"""
    read: set[str] = set()
    bound: set[str] = set()
    called: set[str] = set()
    for node in (node for source in sources for node in ast.walk(ast.parse(source))):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called.add(node.func.id)
    return read - bound - set(dir(builtins)), called


def make_namespace(sources: Sequence[str], entry_point: str | None) -> dict[str, Any]:
    """Names for the tests. A module that they forgot to import must not be the program's: it could decide the test."""
    names, called = free_names(sources)
    namespace: dict[str, Any] = {"__name__": "tests"}
    for name in names | ({entry_point} if entry_point else set()):
        module = ALIASES.get(name, name)
        if name != entry_point and name not in called and (module in sys.stdlib_module_names or name in ALIASES):
            namespace[name] = importlib.import_module(module)
        else:
            namespace[name] = Remote([name])
    return namespace


def main() -> None:
    with open("tests.json", encoding="utf-8") as file:
        job = json.load(file)
    with os.fdopen(VERDICTS, "w") as verdicts:

        def say(**verdict: object) -> None:
            verdicts.write(json.dumps(verdict) + "\n")
            verdicts.flush()

        try:
            namespace = make_namespace([job["setup"], *job["tests"]], job["entry_point"])
            exec(compile(job["setup"], "setup", "exec"), namespace)
            compiled = [compile(test, "test", "exec") for test in job["tests"]]
        except BaseException as error:
            say(broken=f"{type(error).__name__}: {error}")
            return
        for test in compiled:
            try:
                exec(test, namespace)
                say(passed=True, error=None)
            except BaseException as error:
                say(passed=False, error=f"{type(error).__name__}: {error}"[:200])
                if not job["all"]:
                    return


main()
