"""Values as data between a program and its tester: no pickles, so that nothing runs by being read.

    message   4 bytes of length (big endian), then JSON
    value     None, bool, str as they are; others as [tag, ...]: int i, float f, complex c, bytes b, list l, tuple t,
              set s, frozenset z, dict d, deque q, range r; h: an object that stays where it is, by number and type name

What arrives is of exactly these types, whatever subclass was sent. Raises Unsendable, or ValueError for what is no
message.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable
from typing import Any

LIMIT = 16 << 20  # bytes of a message
_DEPTH = 100


class Unsendable(Exception):
    """A value that is no data."""


def send(fd: int, message: Any) -> None:
    data = json.dumps(message).encode()
    if len(data) > LIMIT:
        raise Unsendable(f"a value of {len(data)} bytes")
    data = len(data).to_bytes(4, "big") + data
    while data:
        data = data[os.write(fd, data) :]


def receive(fd: int) -> Any:
    """The next message; EOFError when the other end has gone."""
    size = int.from_bytes(_exactly(fd, 4), "big")
    if size > LIMIT:
        raise ValueError(f"a message of {size} bytes")
    return json.loads(_exactly(fd, size))


def _exactly(fd: int, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = os.read(fd, min(size - len(data), 1 << 16))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def encode(value: Any, keep: Callable[[Any], int] | None = None, depth: int = 0) -> Any:
    """`keep(object) -> number` stores what is no data on this side; None: such a value is Unsendable."""
    if depth > _DEPTH:
        raise Unsendable("a value nested too deeply")
    inner = (keep, depth + 1)
    if value is None or isinstance(value, bool):
        return value
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # scalars of numpy
        return encode(value.item(), *inner)
    for kind, tag in ((list, "l"), (tuple, "t"), (set, "s"), (frozenset, "z"), (deque, "q")):
        if isinstance(value, kind):
            return [tag, [encode(item, *inner) for item in value]]
    if isinstance(value, dict):
        return ["d", [[encode(k, *inner), encode(v, *inner)] for k, v in value.items()]]
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return ["i", hex(int.__index__(value))]
    if isinstance(value, float):
        return ["f", float.__repr__(value)]
    if isinstance(value, complex):
        return ["c", repr(value.real), repr(value.imag)]
    if isinstance(value, bytes | bytearray):
        return ["b", bytes(value).hex()]
    if isinstance(value, range):
        return ["r", value.start, value.stop, value.step]
    if keep is None:
        raise Unsendable(f"a value of type {type(value).__name__}")
    return ["h", keep(value), type(value).__name__]


def decode(value: Any, find: Callable[[int, str], Any]) -> Any:
    """`find(number, type name)` is what stands for an object that stayed on the other side."""
    if value is None or isinstance(value, bool | str):
        return value
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise ValueError("no value")
    tag, *rest = value
    if tag in _MADE_OF:
        return _MADE_OF[tag](decode(item, find) for item in rest[0])
    if tag == "d":
        return {decode(k, find): decode(v, find) for k, v in rest[0]}
    if tag == "h":
        return find(int(rest[0]), str(rest[1]))
    if tag in _SCALARS:
        return _SCALARS[tag](*rest)
    raise ValueError("no value")


_MADE_OF: dict[str, Callable[..., Any]] = {"l": list, "t": tuple, "s": set, "z": frozenset, "q": deque}
_SCALARS: dict[str, Callable[..., Any]] = {
    "i": lambda text: int(text, 16),
    "f": float,
    "c": lambda real, imag: complex(float(real), float(imag)),
    "b": bytes.fromhex,
    "r": range,
}
