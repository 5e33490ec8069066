"""Writing into the run folder when the disk is full or the folder goes away: rows and answers must not end a run.

    a write --ok--> on the disk
            --OSError--> said once of each kind of file until it works again, counted (`files/failed_writes` of the
                         rows); rows wait in memory for the next write (metrics.py), a step's answers are left out
    the folder is another one than at the start (moved, deleted) --> said; a new one in its place, and `moved_at`
    metrics.jsonl alone is --> said; a new one in its place

Not here: checkpoints and the trained model (checkpoint/), which say themselves what they could not save.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fastgrpo.checkpoint import CHECKPOINTS
from fastgrpo.checkpoint.folders import LATEST
from fastgrpo.metrics import JsonlFile, write_rows

log = logging.getLogger("fastgrpo")


class RunFiles:
    """On the rank that writes. `failures` counts writes that failed; `moved_at`: the step after which it was last
    noticed that the folder had gone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.failures = 0
        self.moved_at: int | None = None
        self._failing: set[str] = set()
        self._is = _inode(folder)

    def attempt(self, what: str, write: Callable[[], object], *, again: bool = True) -> bool:
        """Whether `write` of `what`, a kind of file, raised no OSError. `again`: there will be another try."""
        try:
            write()
        except OSError as error:
            self.failures += 1
            if what not in self._failing:
                then = "It will be tried again" if again else "It was the last try"
                log.error("%s NOT WRITTEN into %s: %s. %s.", what, self.folder, error, then)
            self._failing.add(what)
            return False
        if what in self._failing:
            self._failing.remove(what)
            log.warning("%s is written again; %d writes into %s have failed so far", what, self.failures, self.folder)
        return True

    def write_rows(self, what: str, file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
        """All of them, or no file."""
        if not self.attempt(what, lambda: write_rows(file, rows)):
            with suppress(OSError):
                file.unlink(missing_ok=True)

    def went_away(self, step: int) -> bool:
        """Whether the folder is not the one that it was; then there is a new one in its place. Raises OSError."""
        if _inode(self.folder) == self._is:
            return False
        self.moved_at = step
        log.error(
            "THE RUN FOLDER %s HAS BEEN MOVED OR DELETED, noticed after step %d. What was in it is not here; what is "
            "written from now on is in a new folder of this name, and the run will end with an error.",
            self.folder, step,
        )  # fmt: skip
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._is = _inode(self.folder)
        return True

    def look_for(self, rows: JsonlFile, step: int) -> None:
        """Where the file of rows alone has gone there is a new one then, with what no checkpoint rests on yet. Raises
        OSError."""
        if rows.went_away():
            rows.reopen(again=True)
            log.error(
                "%s HAS BEEN MOVED OR DELETED, noticed after step %d: rows since the last checkpoint, and those to "
                "come, are in a new file of this name",
                self.folder / rows.name, step,
            )  # fmt: skip

    def sum_up(self, *, rows_are_whole: bool) -> None:
        """At the end, if writes have failed. A checkpoint has the rows that waited as it was saved."""
        if not self.failures:
            return
        saved = not rows_are_whole and (self.folder / CHECKPOINTS / LATEST).is_file()
        then = f"; trainer.resume={self.folder} writes the rows that its newest checkpoint has" if saved else ""
        log.error("%d writes into %s have failed: answers, maybe rows, are missing%s", self.failures, self.folder, then)


def _inode(folder: Path) -> tuple[int, int] | None:
    try:
        found = folder.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino
