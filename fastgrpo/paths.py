"""Where the project's own files lie, in a checkout and in an installed wheel."""

from __future__ import annotations

from pathlib import Path


def config_dir() -> Path:
    """The shipped configurations: inside the package in a wheel, at the top of the repository in a checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"
