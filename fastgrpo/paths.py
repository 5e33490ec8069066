"""Where files lie: the project's own, in a checkout and in an installed wheel, and those that a run will write."""

from __future__ import annotations

import os
from pathlib import Path

from fastgrpo.errors import UserError


def config_dir() -> Path:
    """The shipped configurations: inside the package in a wheel, at the top of the repository in a checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def existing_part(folder: Path) -> Path:
    """`folder`, or the nearest of its parents that is there."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())


def check_run_dir(run_dir: str) -> None:
    """Raises UserError when no run folder can be made in `run_dir`: better now than after the model is loaded."""
    existing = existing_part(Path(run_dir))
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(
            f"trainer.run_dir={run_dir}: cannot write into {existing}; set trainer.run_dir to a folder of yours"
        )
