"""Files that survive a crash: written aside, flushed to the disk, renamed. What a checkpoint needs of a file system."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

PART = ".part"  # ends the name of what is being written


def write_durably(path: Path, text: str) -> None:
    """All of `text` or, after a crash, what was there before."""
    aside = path.with_name(path.name + PART)
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_tree(folder: Path) -> None:
    """Every file and folder below `folder`, and itself: a rename after it cannot be seen before its contents."""
    for where, _, names in os.walk(folder):
        for name in names:
            sync_file(Path(where) / name)
        sync_folder(Path(where))


def sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_tree(folder: Path) -> None:
    """Renamed first: a folder that is half removed must not be taken for a whole one."""
    aside = folder.with_name(folder.name + PART)
    with contextlib.suppress(FileNotFoundError):
        if folder.suffix != PART:
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
        folder = aside if folder.suffix != PART else folder
        if folder.is_symlink():  # somebody keeps the checkpoint elsewhere, and there it stays
            folder.unlink()
        else:
            shutil.rmtree(folder)


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def file_sizes(folder: Path) -> dict[str, int]:
    """Bytes of every file below `folder`, by its path in it."""
    return {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}
