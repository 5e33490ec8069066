"""What two runs differ in: python -m fastgrpo.diff RUN_A RUN_B

    fastgrpo.diff runs/a-20261130-101500 runs/b-20261130-113000
    config actor.optim.lr                1e-06                 2e-06
    code fastgrpo.commit                 5392543...            dbe9b6f...

Compares the last start of each run folder (starts.jsonl): configuration, code, versions, ranks, data, environment.
Exit status as diff's: 0 the same, 1 different, 2 something cannot be read. Needs no torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastgrpo.config import leaves
from fastgrpo.errors import UserError

SECTIONS = (
    "config",
    "identity",
    "layout",
    "code",
    "versions",
    "engine",
    "device",
    "host",
    "command",
    "folder",
    "environment",
)
WIDTH = 44  # of a value; a longer one is cut


def main(argv: Sequence[str]) -> int:
    if len(argv) != 2 or {"-h", "--help"} & set(argv):
        print("usage: python -m fastgrpo.diff RUN_A RUN_B", file=sys.stderr)
        return 2
    try:
        lines = differences(*(last_start(Path(run)) for run in argv))
    except UserError as error:
        print(f"fastgrpo: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines) if lines else "no difference")
    return 1 if lines else 0


def last_start(run: Path) -> dict[str, Any]:
    """The last row of starts.jsonl. Raises UserError when there is none."""
    file = run / "starts.jsonl"
    try:
        return json.loads(file.read_text(encoding="utf-8").splitlines()[-1])
    except (OSError, ValueError, IndexError) as error:
        raise UserError(f"{file} cannot be read ({error}): is {run} a run folder?") from error


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """A line for each value that differs: where, a's, b's. A section is compared leaf by leaf."""
    rows: list[tuple[str, str, str]] = []
    for section in SECTIONS:
        old, new = leaves({section: a.get(section)}), leaves({section: b.get(section)})
        for key in sorted(old.keys() | new.keys()):
            if old.get(key) != new.get(key):
                place = key.replace(".", " ", 1)
                rows.append((place, _show(old, key), _show(new, key)))
    width = max((len(place) for place, _, _ in rows), default=0)
    return [f"{place:<{width}}  {old:<{WIDTH}}  {new}" for place, old, new in rows]


def _show(found: Mapping[str, Any], key: str) -> str:
    if key not in found:
        return "-"
    value = found[key]
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = " ".join(text.split()) if text else "''"
    return text if len(text) <= WIDTH else text[: WIDTH - 3] + "..."


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
