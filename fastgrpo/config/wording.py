"""Small phrases that the messages of the rules share."""

from __future__ import annotations

from operator import attrgetter

from fastgrpo.config.schema import RunConfig


def at(config: RunConfig, key: str) -> str:
    """`rollout.n=8`."""
    return f"{key}={attrgetter(key)(config)}"


def either(numbers: list[int]) -> str:
    """`1, 2 or 4`."""
    return " or ".join(part for part in (", ".join(map(str, numbers[:-1])), str(numbers[-1])) if part)


def divisors(number: int) -> str:
    return either([n for n in range(1, number + 1) if number % n == 0])
