"""What the benchmarks' commands share: arguments, refusals, where a result goes, how one is read and written, and how a
benchmark that is told to end keeps what it has measured.

A mistake of the user is one line on standard error and exit status 2, before anything is measured. Nothing here imports
the trainer until `command` meets an error: bench_lm_head.py runs where the kernels alone are installed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Self

SHAPES = Path(__file__).parent / "shapes"
MISUSE = 2
ONE_PRESS_S = 0.5  # two SIGINTs within it are one Ctrl-C, which came on several ways


class Misuse(SystemExit):
    """Ends the process with status 2; `refuse` has said why, and so does str()."""

    def __init__(self, text: str) -> None:
        super().__init__(MISUSE)
        self.text = text

    def __str__(self) -> str:
        return self.text


def refuse(text: str) -> NoReturn:
    print(text, file=sys.stderr, flush=True)
    raise Misuse(text)


def command(main: Callable[[list[str]], int], arguments: list[str]) -> int:
    """The exit status of `main`; 2 after a mistake that the trainer found, which is said without a traceback."""
    try:
        return main(arguments)
    except Exception as error:
        from fastgrpo import console
        from fastgrpo.errors import UserError

        if not isinstance(error, UserError):
            raise
        console.complain(error)
        return MISUSE


# ---- arguments


def make_parser(abstract: str | None, *, smoke: str | None = None, models: bool = False) -> argparse.ArgumentParser:
    """With the options that the scripts have in common. `smoke`: what --smoke does; None: there is none. `models`: the
    script makes models and may keep them."""
    parser = argparse.ArgumentParser(description=abstract, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="FILE", help="the JSON file; default: bench/results/...")
    parser.add_argument("--commit", metavar="HASH", help="the commit to write down where git does not know it")
    if smoke is not None:
        parser.add_argument("--smoke", action="store_true", help=smoke)
    if models:
        parser.add_argument("--models", type=Path, help="folder that keeps the made models; default: one that goes")
    return parser


def positive_int(text: str) -> int:
    return at_least(1)(text)


def at_least(least: int) -> Callable[[str], int]:
    def whole_number(text: str) -> int:
        if not re.fullmatch(r"\d+", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return whole_number


def positive_number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def known_shape(text: str) -> str:
    """A folder of bench/shapes, or tiny."""
    known = ["tiny", *sorted(path.name for path in SHAPES.iterdir())]
    if text not in known:
        raise argparse.ArgumentTypeError(f"no shape {text!r}; there are {', '.join(known)}")
    return text


def warm_up_of(asked: int | None, usual: int, steps: int) -> int:
    """Steps left out at the start of `steps`, one of which must be left. Refuses what was asked for and cannot be."""
    if asked is not None and asked >= steps:
        refuse(f"--warm-up {asked} leaves nothing of {steps} steps: give a smaller number, or more --steps")
    return min(usual, steps - 1) if asked is None else asked


def no_gpu(does: str, instead: str) -> int:
    """The exit status of a script that `does` something with a GPU, where there is none."""
    print(f"{does} and finds no CUDA device here; {instead}.", flush=True)
    return MISUSE


# ---- files


def checked_out(path: Path) -> Path:
    """`path`, where a result can be written: asked before the run, not after it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse(f"cannot write {path}: {error.strerror}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        refuse(f"cannot write {path}: " + ("it is a folder" if path.is_dir() else "no permission"))
    return path


def write_json(path: Path, content: Any) -> None:
    """Whole or not at all, for whoever reads `path` meanwhile or after this process was killed here."""
    unfinished = path.with_suffix(".partial")
    unfinished.write_text(json.dumps(content, indent=1) + "\n")
    unfinished.replace(path)


def read_text(path: Path) -> str:
    """Refuses what is no text file."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        refuse(f"cannot read {path}: {reason}")


def read_result(path: Path, lacks: Callable[[Any], str | None], script: str = "this script") -> dict[str, Any]:
    """The JSON in `path`, written by `script`. `lacks` says what the content lacks, or None. Refuses anything else."""
    try:
        content = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        refuse(f"{path} is no result of {script}: not JSON ({error})")
    if missing := lacks(content):
        refuse(f"{path} is no result of {script}: {missing}")
    return content


def lacks_rows(content: Any, wanted: dict[str, Iterable[str]]) -> str | None:
    """`wanted`: name of a list of objects in `content` -> the keys that each of them has."""
    for name, keys in wanted.items():
        entries = content.get(name) if isinstance(content, dict) else None
        if not isinstance(entries, list):
            return f"it has no list of {name}"
        for i, entry in enumerate(entries):
            if lacking := set(keys) - (set(entry) if isinstance(entry, dict) else set()):
                return f"{name}[{i}] has no {', '.join(sorted(lacking))}"
    return None


# ---- being told to end


class Ending:
    """SIGTERM and Ctrl-C noted instead of obeyed, so that what was measured is written first.

        with Ending() as ending:     nothing is changed yet: there is nothing to lose
            ending.listen()          from here to the end of the block a signal is only noted
            ending.status            None, or the exit status that is due; looked at between two pieces of work

    `timeout`, a terminal and torchrun let one signal arrive several times, so further ones change nothing, but for a
    Ctrl-C that is clearly another one: KeyboardInterrupt, at once. For the main thread."""

    def __init__(self) -> None:
        self.status: int | None = None  # 128 + the signal's number, as in a shell
        self._noted_s = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        return self

    def listen(self) -> None:
        for signum in (signal.SIGTERM, signal.SIGINT):
            self._before[signum] = signal.signal(signum, self._note)

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.status is None:
            self.status, self._noted_s = 128 + signum, now
        elif signum == signal.SIGINT and now - self._noted_s > ONE_PRESS_S:
            raise KeyboardInterrupt

    def repeat(self, gather: Callable[[Any], list[Any]], times: int, work: Callable[[], Any]) -> list[Any]:
        """What `work` returns, `times` times, or as often as it could before one of the ranks was told to end, which
        all of them are then. A collective: `gather` is the mesh's."""
        found: list[Any] = []
        while len(found) < times:
            self.status = max((status for status in gather(self.status) if status is not None), default=None)
            if self.status is not None:
                break
            found.append(work())
        return found

    def reason(self) -> str:
        """For the row: "ended by SIGTERM". Only where there is a status."""
        assert self.status is not None
        return f"ended by {signal.Signals(self.status - 128).name}"


def so_far(reason: str, done: int, asked: int, unit: str) -> str:
    """The `error` of an incomplete row: "ended by SIGTERM; 2 of 3 steps"."""
    return f"{reason}; {done} of {asked} {unit}"
