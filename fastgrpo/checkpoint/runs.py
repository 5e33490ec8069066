"""Run folders of an experiment: their names, which is newer, making one, whether it is being written. No torch.

    RUN_DIR/EXPERIMENT-TIME[-N]        a run
    RUN_DIR/EXPERIMENT-TIME-val[-N]    one validation (trainer.val_only): no name of a run ends so, no search finds it

Who writes into a folder holds a lock in it to the end of the process, however it ends.
"""

from __future__ import annotations

import fcntl
import re
import time
from pathlib import Path

from filelock import FileLock, Timeout

from fastgrpo.checkpoint.folders import MANIFEST, step_of
from fastgrpo.config import TrainerConfig
from fastgrpo.errors import ConfigError

CHECKPOINTS = "checkpoints"
FINISHED = "finished"  # file in a run folder: the steps that the finished run had
CONFIG = "config.yaml"  # every run folder has it, no other
_LOCK = ".lock"
_TAKE_S = 1.0  # others who ask whether a folder is held do so for an instant


def runs_of(run_dir: Path, experiment: str) -> list[Path]:
    """Newest first, by the time and number in the name, which a copy keeps."""
    return [path for *_, path in _named(run_dir, experiment)]


def _named(run_dir: Path, experiment: str) -> list[tuple[str, int, Path]]:
    name = re.compile(re.escape(experiment) + r"-(\d{8}-\d{6})(?:-(\d+))?")
    runs = [
        (match[1], int(match[2] or 0), path)
        for path in (run_dir.iterdir() if run_dir.is_dir() else ())
        if path.is_dir() and (match := name.fullmatch(path.name))
    ]
    return sorted(runs, reverse=True)


def parts_of(path: Path) -> tuple[Path | None, Path | None]:
    """(run folder, or None of a checkpoint that lies in none; the checkpoint, or None for the newest)."""
    path = path.absolute()
    if step_of(path) is None and not (path / MANIFEST).is_file():
        return path, None
    run = path.parent.parent
    inside = path.parent.name == CHECKPOINTS and (run / CONFIG).is_file()
    return run if inside else None, path


def finished_steps(folder: Path) -> int:
    """0 unless the run has finished."""
    try:
        return int((folder / FINISHED).read_text())
    except (OSError, ValueError):
        return 0


def new_folder(trainer: TrainerConfig) -> Path:
    """Two runs started in one second get two folders: making one is what tells whether it was there. None is older by
    its name than those that are there, also after the clock was set back."""
    time_, number = time.strftime("%Y%m%d-%H%M%S"), 0
    try:
        runs = [] if trainer.val_only else _named(Path(trainer.run_dir), trainer.experiment_name)
    except OSError:  # said below
        runs = []
    if runs and runs[0][0] >= time_:
        time_, number = runs[0][0], runs[0][1] + 1
    stem = f"{trainer.experiment_name}-{time_}{'-val' if trainer.val_only else ''}"
    while True:
        folder = Path(trainer.run_dir) / (f"{stem}-{number}" if number else stem)
        try:
            folder.mkdir(parents=True, mode=0o700)
        except FileExistsError:
            number += 1
            continue
        except OSError as error:
            raise ConfigError(f"trainer.run_dir={trainer.run_dir}: {error}; set it to a folder of yours") from error
        return folder


def take(folder: Path) -> tuple[FileLock | None, bool]:
    """(the lock, whether nobody else has it). File systems without locks: none, and nobody is known to have it."""
    lock = FileLock(folder / _LOCK)
    try:
        lock.acquire(timeout=_TAKE_S)
    except Timeout:
        return None, False
    except (NotImplementedError, OSError):
        return None, True
    return lock, True


def is_held(folder: Path) -> bool:
    """Whether a run has `take(folder)`. Shared, since all ranks ask at once; rank 0 takes it after all have asked."""
    try:
        with (folder / _LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no lock file, or a file system without locks: nobody is known to have it
        return False
    return False
