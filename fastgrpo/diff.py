"""What two runs differ in: python -m fastgrpo.diff RUN_A RUN_B

    fastgrpo.diff runs/a-20261130-101500 runs/b-20261130-113000
    config actor.optim.lr                1e-06                 2e-06
    code fastgrpo.commit                 5392543...            dbe9b6f...

Compares the last start of each run folder (starts.jsonl): configuration, code, versions, ranks, data, environment.
What names the process or the job, and nothing that it does, is not compared. Of two long values the parts from where
they differ are shown.
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
# Variables of the environment with another value in each process (not recorded either), and in each job.
PER_PROCESS = ("VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME", "FASTGRPO_STATUS_FILE")
PER_JOB = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT")
WIDTH = 44  # of a value; a longer one is cut
CONTEXT = 12  # characters before the first that differs


USAGE = "usage: python -m fastgrpo.diff RUN_A RUN_B"


def main(argv: Sequence[str]) -> int:
    if {"-h", "--help"} & set(argv):
        print(f"{USAGE}\n\n{__doc__}")
        return 0
    if len(argv) != 2:
        print(f"{USAGE}\n--help says what is compared", file=sys.stderr)
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
    left_out = {f"environment.{name}" for name in (*PER_PROCESS, *PER_JOB)}
    rows: list[tuple[str, str, str]] = []
    for section in SECTIONS:
        old, new = leaves({section: a.get(section)}), leaves({section: b.get(section)})
        for key in sorted((old.keys() | new.keys()) - left_out):
            if old.get(key) != new.get(key):
                place = key.replace(".", " ", 1)
                rows.append((place, *_cut(_show(old, key), _show(new, key))))
    width = max((len(place) for place, _, _ in rows), default=0)
    return [f"{place:<{width}}  {old:<{WIDTH}}  {new}" for place, old, new in rows]


def _show(found: Mapping[str, Any], key: str) -> str:
    if key not in found:
        return "-"
    value = found[key]
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return " ".join(text.split()) if text else "''"


def _cut(old: str, new: str) -> tuple[str, str]:
    """Both within WIDTH, from shortly before the first character that differs."""
    if max(len(old), len(new)) <= WIDTH:
        return old, new
    pairs = enumerate(zip(old, new, strict=False))
    differs = next((at for at, (a, b) in pairs if a != b), min(len(old), len(new)))
    start = max(0, differs - CONTEXT)
    a, b = (f"...{text[start:]}" if start else text for text in (old, new))
    return _shortened(a), _shortened(b)


def _shortened(text: str) -> str:
    return text if len(text) <= WIDTH else text[: WIDTH - 3] + "..."


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
