"""No secrets in what is printed or kept: what addresses carry, and tokens of the usual forms, become ***.

    https://user:password@host/v1?key=value&n=2#part  -->  https://***@host/v1?key=***&n=2#***

A net below the rule, not the rule: secrets belong in environment variables that options name (`api_key_env`), and of
the environment only listed variables are recorded (provenance.py). Of an address's query only parameters that are known
to be none (`_OPEN`) stay: a secret may have any name. Options that hold a token are refused (config/secret_rules.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
_ADDRESS = re.compile(r"(?<=://)[^\s'\"]+")
_OPEN = ("api-version", "version", "v", "model", "name", "n", "lang")
_NAMES = "token|key|secret|passw|passwd|pwd|signature|credential|auth|cookie|jwt|session"
_PARAMETER = re.compile(rf"([?&;](?:[\w.-]*(?:{_NAMES})[\w.-]*|sig|sas)=)[^&;#\s'\"]+", re.IGNORECASE)
_BEARER = re.compile(r"(?i)(\bbearer\s+)[\w.~+/=-]{8,}")
_TOKEN = re.compile(
    r"\b(?:hf_\w{16,}|sk-(?=[\w-]*\d)[\w-]{16,}|gh[opsru]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|xox[abeprs]-[\w-]{10,}|AKIA[0-9A-Z]{16}\b|AIza[\w-]{35}|nvapi-[\w-]{20,}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]+)?)"  # the last: a JSON web token
)


def redact(text: str) -> str:
    text = _ADDRESS.sub(lambda found: _address(found[0]), text)
    text = _BEARER.sub(rf"\1{HIDDEN}", _PARAMETER.sub(rf"\1{HIDDEN}", text))
    return _TOKEN.sub(HIDDEN, text)


def redact_all(value: Any) -> Any:
    """`value`, of JSON's kinds, with every text in it redacted."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {name: redact_all(inner) for name, inner in value.items()}
    return [redact_all(inner) for inner in value] if isinstance(value, list | tuple) else value


def holds_token(text: str) -> bool:
    """Whether something in it has the form of an access token."""
    return _TOKEN.search(text) is not None


def _address(rest: str) -> str:
    """What follows `://`, without the user before the last @ of the host's part, the query's values, the fragment."""
    rest, hash_mark, fragment = rest.partition("#")
    rest, question_mark, query = rest.partition("?")
    host, slash, path = rest.partition("/")
    user, at, host = host.rpartition("@")
    hidden = re.sub(r"[^&;]+", lambda found: _parameter(found[0]), query)
    return (
        f"{HIDDEN if user else ''}{at}{host}{slash}{path}{question_mark}{hidden}{hash_mark}{HIDDEN if fragment else ''}"
    )


def _parameter(text: str) -> str:
    name, equals, value = text.partition("=")
    if not equals:
        return HIDDEN
    return text if not value or name.lower() in _OPEN else f"{name}={HIDDEN}"
