"""Asking an HTTP endpoint for scores: one POST of JSON, repeated while the trouble may pass, a plain error otherwise.

Repeated, with 0.5, 1, 2, ... seconds in between (at most 8): no connection, no answer in time, and the statuses 408,
425, 429 and 5xx (a `Retry-After` in seconds is obeyed within the same bound). Everything together is bounded by
reward.timeout_s, from outside. Connections are kept open, one client an event loop.

httpx is imported where an endpoint is made, which is in a worker: with all that it brings, it would take half of the
time in which the process that starts the workers is up.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from fastgrpo.errors import ConfigError
from fastgrpo.redact import redact

if TYPE_CHECKING:
    import httpx

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 8.0
_PASSING = (408, 425, 429)


class EndpointError(Exception):
    """The endpoint gave no usable answer."""


class Endpoint:
    def __init__(self, url: str, headers: Mapping[str, str], max_retries: int, timeout_s: float) -> None:
        import httpx

        self._url = url
        self._headers = dict(headers)
        self._max_retries = max_retries
        self._make_client = partial(httpx.AsyncClient, timeout=timeout_s, limits=httpx.Limits(max_connections=None))
        self._no_answer = httpx.HTTPError
        self._client: httpx.AsyncClient | None = None  # made on the event loop that uses it

    async def post(self, body: Mapping[str, Any]) -> tuple[Any, int]:
        """(the answer's JSON, how often it was asked again). EndpointError when there is none."""
        self._client = self._client or self._make_client()
        trouble = ""
        for attempt in range(self._max_retries + 1):
            pause = min(_FIRST_PAUSE_S * 2**attempt, _LONGEST_PAUSE_S)
            try:
                response = await self._client.post(self._url, json=body, headers=self._headers)
            except self._no_answer as error:
                trouble = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            else:
                if response.is_success:
                    return _json(response, self._url), attempt
                trouble = f"status {response.status_code}: {response.text[:200].strip()}"
                if response.status_code < 500 and response.status_code not in _PASSING:
                    raise EndpointError(redact(f"{self._url}: {trouble}"))
                pause = _wanted_pause(response, pause)
            if attempt < self._max_retries:
                await asyncio.sleep(pause)
        raise EndpointError(redact(f"{self._url}: {trouble} (asked {self._max_retries + 1} times)"))


def _json(response: httpx.Response, url: str) -> Any:
    try:
        return response.json()
    except ValueError:
        raise EndpointError(redact(f"{url}: the answer is no JSON: {response.text[:200].strip()}")) from None


def _wanted_pause(response: httpx.Response, pause: float) -> float:
    wanted = response.headers.get("retry-after", "")
    return min(float(wanted), _LONGEST_PAUSE_S) if wanted.isdigit() else pause


def authorization(variable: str | None, option: str) -> dict[str, str]:
    """The header with the key that an environment variable holds; ConfigError when it holds none."""
    if variable is None:
        return {}
    if not os.environ.get(variable):
        raise ConfigError(f"{option}={variable}: there is no environment variable of that name, or it is empty")
    return {"Authorization": f"Bearer {os.environ[variable]}"}
