"""Runs in the program's sandbox: loads /box/solution.py and calls what the tester asks for.

    tester -> here   {"op": "call", "of": [name] or [number, attribute], "args": [...], "kwargs": {...}}
                     {"op": "get", "of": [name] or [number, attribute]}     {"op": "iterate", "of": [number]}
    here -> tester   {"value": ..., "args": the arguments after the call} or {"error": [type, text]}

What the program does to this process is its own affair: the tester believes nothing but the values.
"""

from __future__ import annotations

import itertools
import os
import sys
from typing import Any, NoReturn

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import wire

FD = 3
LONGEST = 1_000_000  # items of an iterator


class Objects:
    """Those that stay here because they are no data."""

    def __init__(self) -> None:
        self.by_number: list[Any] = []

    def keep(self, value: Any) -> int:
        self.by_number.append(value)
        return len(self.by_number) - 1

    def find(self, number: int, _: str) -> Any:
        return self.by_number[number]


def main() -> NoReturn:
    objects = Objects()
    namespace: dict[str, Any] = {"__name__": "solution"}
    try:
        with open("solution.py", encoding="utf-8") as file:
            exec(compile(file.read(), "solution.py", "exec"), namespace)
        broken = None
    except BaseException as error:
        broken = describe(error)
    while True:
        request = wire.receive(FD)
        try:
            reply = {"error": broken} if broken else serve(request, namespace, objects)
            wire.send(FD, reply)
        except BaseException as error:
            wire.send(FD, {"error": describe(error)})


def serve(request: dict[str, Any], namespace: dict[str, Any], objects: Objects) -> dict[str, Any]:
    name, *attribute = request["of"]
    if isinstance(name, str):
        if name not in namespace:
            raise NameError(f"name {name!r} is not defined")
        target = namespace[name]
    else:
        target = objects.find(name, "")
    if attribute:
        target = getattr(target, attribute[0])
    arguments = []
    if request["op"] == "call":
        arguments = [wire.decode(value, objects.find) for value in request["args"]]
        keywords = {key: wire.decode(value, objects.find) for key, value in request["kwargs"].items()}
        target = target(*arguments, **keywords)
    elif request["op"] == "iterate":
        target = list(itertools.islice(target, LONGEST))
    return {
        "value": wire.encode(target, objects.keep),
        "args": [
            wire.encode(value, objects.keep) if isinstance(value, list | dict | set) else None for value in arguments
        ],
    }


def describe(error: BaseException) -> list[str]:
    return [type(error).__name__, str(error)[:200]]


try:
    main()
except (EOFError, BrokenPipeError, ConnectionResetError):
    os._exit(0)
