"""No secrets in what is printed or kept: passwords and keys in addresses, and tokens of the usual forms, become ***.

A net below the rule, not the rule: secrets belong in environment variables that options name (`api_key_env`), and of
the environment only listed variables are recorded (provenance.py).
"""

from __future__ import annotations

import re

HIDDEN = "***"
_FORMS = (
    (re.compile(r"(?<=://)[^/\s@'\"]+(?=@)"), HIDDEN),  # user:password@host
    (
        re.compile(r"([?&;][\w.-]*(?:token|key|secret|passw|signature|credential|auth)[\w.-]*=)[^&;#\s'\"]+", re.I),
        rf"\1{HIDDEN}",
    ),
    (re.compile(r"(?i)(\bbearer\s+)[\w.~+/=-]{8,}"), rf"\1{HIDDEN}"),
    (re.compile(r"\b(?:hf_\w{16,}|sk-[\w-]{16,}|gh[opsru]_\w{20,}|glpat-[\w-]{16,})"), HIDDEN),
)


def redact(text: str) -> str:
    for form, hidden in _FORMS:
        text = form.sub(hidden, text)
    return text
