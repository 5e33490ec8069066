"""Checkpoint folders: their names, what makes one complete, which is the newest, which may go. No torch.

RUN/checkpoints/
    latest                   name of the newest one, moved last
    best                     name of the one with the best trainer.best_metric, where that is set
    step_000020/
        checkpoint.json      what it is, with the size of every other file: written last, then the folder is renamed
        state/               DCP shards: float32 masters and optimizer
        ranks/00000.json     each rank's random generators
        files.crc32          checksums of all these (checksum.py)
        model/               the policy as an ordinary Hugging Face folder
    step_000030.part/        one that is being written, or was when the run died
"""

from __future__ import annotations

import json
import logging
import re
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fastgrpo.checkpoint.disk import PART, file_sizes, remove_tree, sync_folder, sync_tree, write_durably

log = logging.getLogger("fastgrpo")

MANIFEST = "checkpoint.json"
LATEST, BEST = "latest", "best"
FORMAT = 1
_CRC32 = "crc32"  # in checkpoint.json, besides the fields of Manifest
_NAME = re.compile(r"step_(\d+)")


@dataclass(frozen=True, slots=True)
class Manifest:
    """checkpoint.json."""

    step: int
    total_steps: int
    world: int
    config: dict[str, Any]  # document of the run that saved
    identity: dict[str, Any]  # fingerprints, see resume.Identity
    parts: dict[str, Any]  # state of each stateful part, by name
    metric: float | None  # trainer.best_metric at this step
    files: dict[str, int]  # bytes of every other file
    format: int = FORMAT
    # Where nodes have disks of their own: `files` are those on the node of this number, of as many nodes, and all
    # manifests of one save have the same name for it.
    node: int = 0
    nodes: int = 1
    save: str = ""


def step_folder(root: Path, step: int) -> Path:
    return root / f"step_{step:06d}"


def step_of(folder: Path) -> int | None:
    match = _NAME.fullmatch(folder.name)
    return int(match[1]) if match else None


def commit(part: Path, manifest: Manifest) -> Path:
    """Make `part`, a folder whose name ends in .part, a complete checkpoint; returns its folder. `manifest.files` is
    filled in here."""
    sync_tree(part)
    write_manifest(part, replace(manifest, files=file_sizes(part)))
    folder = part.with_name(part.name.removesuffix(PART))
    if folder.exists():  # an incomplete one, else it would not be saved again
        remove_tree(folder)
    part.rename(folder)
    sync_folder(folder.parent)
    write_durably(folder.parent / LATEST, folder.name + "\n")
    return folder


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """With a CRC32 of what it says: a digit that a disk changes would be a number like any other."""
    document = asdict(manifest)
    write_durably(folder / MANIFEST, json.dumps(document | {_CRC32: _crc32(document)}, indent=1))


def _crc32(document: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(document).encode()):08x}"


def read_manifest(folder: Path) -> Manifest:
    """Raises ValueError, saying what is wrong, unless the checkpoint is complete."""
    try:
        document = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        written = document.pop(_CRC32, None) if isinstance(document, dict) else None
        manifest = Manifest(**document)
    except FileNotFoundError:
        raise ValueError(f"it has no {MANIFEST}, which is written last") from None
    except (ValueError, TypeError, OSError, RecursionError) as error:
        raise ValueError(f"its {MANIFEST} cannot be read ({error})") from None
    if manifest.format != FORMAT:
        raise ValueError(f"its format is {manifest.format}, this version of fastgrpo reads {FORMAT}")
    if lacking := _lacking(manifest):
        raise ValueError(f"its {MANIFEST} is damaged: {lacking}")
    if written is not None and written != _crc32(document):  # an older version wrote none
        raise ValueError(f"its {MANIFEST} has changed since it was written (CRC32 {_crc32(document)}, {written} then)")
    if step_of(folder) not in (None, manifest.step):  # what is later than a step is told by names, too
        name = step_folder(folder, manifest.step).name
        raise ValueError(f"it holds step {manifest.step}: name it {name} again")
    sizes = file_sizes(folder)
    for name, size in manifest.files.items():
        if name not in sizes:
            raise ValueError(f"{name} is missing")
        if sizes[name] != size:
            raise ValueError(f"{name} has {sizes[name]} of {size} bytes")
    return manifest


def _lacking(manifest: Manifest) -> str:
    """What of the types is wrong; "" for a manifest that this program wrote."""
    wrong = [name for name in ("config", "identity", "parts", "files") if not isinstance(getattr(manifest, name), dict)]
    numbers = ("step", "total_steps", "world", "node", "nodes")
    wrong += [name for name in numbers if type(getattr(manifest, name)) is not int]
    wrong += [] if wrong or all(type(size) is int for size in manifest.files.values()) else ["files"]
    return f"{', '.join(wrong)} cannot be what it says" if wrong else ""


@dataclass(frozen=True, slots=True)
class Found:
    complete: list[tuple[Path, Manifest]]  # newest first
    passed_over: list[str]  # a line for each folder that is not complete, and for a wrong pointer


def find_checkpoints(root: Path) -> Found:
    """What is in a run's folder of checkpoints. Completeness alone decides; `latest` is for people and programs."""
    complete: list[tuple[Path, Manifest]] = []
    passed_over: list[str] = []
    folders = sorted((path for path in root.glob("step_*") if path.is_dir()), key=lambda path: path.name)
    for folder in folders:
        if step_of(folder) is None:
            passed_over.append(
                f"{folder}: it was still being written" if folder.suffix == PART else f"{folder}: no step"
            )
            continue
        try:
            complete.append((folder, read_manifest(folder)))
        except ValueError as error:
            passed_over.append(f"{folder}: {error}")
    complete.sort(key=lambda found: found[1].step, reverse=True)
    name = _pointed_to(root / LATEST)
    if name is not None and name not in [folder.name for folder, _ in complete]:
        passed_over.append(f"{root / LATEST}: it names {name!r}, which is no complete checkpoint")
    return Found(complete, passed_over)


def _pointed_to(pointer: Path) -> str | None:
    """None where there is none that can be read: nothing rests on it."""
    try:
        return pointer.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def best_of(complete: Sequence[tuple[Path, Manifest]], mode: str) -> Path | None:
    """Of those that have the metric the one with the largest or (`mode` min) smallest, of equals the newest."""
    measured = [(m.metric, m.step, folder) for folder, m in complete if m.metric is not None]
    sign = 1 if mode == "max" else -1
    return max(measured, key=lambda entry: (sign * entry[0], entry[1]))[2] if measured else None


def point_to_best(root: Path, mode: str) -> None:
    """`best` holds the name of the best complete checkpoint, as `latest` that of the newest."""
    if found := best_of(find_checkpoints(root).complete, mode):
        write_durably(root / BEST, found.name + "\n")


def point_again(root: Path, mode: str) -> None:
    """`latest` and `best`, where they are there, name one of those that are left, or go."""
    complete = find_checkpoints(root).complete
    for name, found in ((LATEST, complete[0][0] if complete else None), (BEST, best_of(complete, mode))):
        if not (root / name).is_file():
            continue
        if found is None:
            (root / name).unlink()
        elif _pointed_to(root / name) != found.name:
            write_durably(root / name, found.name + "\n")


def tidy(root: Path, keep: int | None, *, best: str | None) -> list[Path]:
    """After a save: point to the best one and remove old ones, which are returned. What fails in it costs no
    checkpoint, and is said."""
    try:
        if best:
            point_to_best(root, best)
        return retire(root, keep, best=best)
    except OSError as error:
        log.error("%s: the new checkpoint is whole, but `best` did not move or an old one did not go: %s", root, error)
        return []


def retire(root: Path, keep: int | None, *, best: str | None) -> list[Path]:
    """Remove checkpoints beyond the `keep` newest complete ones and the best (`best`: max or min of the metric, among
    those that have it; of equals the newest). The newest complete one always stays. Returns what was removed."""
    if keep is None:
        return []
    complete = find_checkpoints(root).complete
    stays = {folder for folder, _ in complete[: max(1, keep)]}
    if best and (found := best_of(complete, best)):
        stays.add(found)
    removed = [folder for folder, _ in complete if folder not in stays]
    for folder in removed:
        remove_tree(folder)
    return removed


def aside_folder(run: Path) -> Path:
    """One that is not there yet: two starts in one second, or after a clock was set back, do not share one."""
    stem, number = f"aside-{time.strftime('%Y%m%d-%H%M%S')}", 0
    while (folder := run / (f"{stem}-{number}" if number else stem)).exists():
        number += 1
    return folder


def set_aside(paths: Sequence[Path], aside: Path) -> None:
    """Move `paths` into the folder `aside`: kept for the eye, out of the way."""
    for path in paths:
        aside.mkdir(parents=True, exist_ok=True)
        path.rename(aside / path.name)
