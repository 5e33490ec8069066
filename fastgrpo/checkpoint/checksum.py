"""Checksums of shards: each beside its shard, written by the rank that wrote it, compared before a run goes on from it.

    state/__0_0.distcp --CRC32--> state/__0_0.distcp.crc32     at the save, in the writer's thread
    state/*.distcp     --CRC32--> equal?                       at the start, every rank its share of the files

Against disks and copies that change bytes and keep the size, not against people. torch does not look at the CRC32 that
its own files hold. A shard without one (of an older version) is taken as it is.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from pathlib import Path

from fastgrpo.checkpoint.disk import write_durably

SUFFIX = ".crc32"
_PIECE = 1 << 24  # bytes read at a time


def crc32(file: Path) -> str:
    """8 hexadecimal digits."""
    value = 0
    with file.open("rb") as stream:
        while piece := stream.read(_PIECE):
            value = zlib.crc32(piece, value)
    return f"{value:08x}"


def write_checksums(files: Iterable[Path]) -> None:
    for file in files:
        write_durably(file.with_name(file.name + SUFFIX), crc32(file) + "\n")


def check_shards(folder: Path, share: int, shares: int) -> None:
    """Every `shares`-th shard in `folder` from number `share` on. Raises ValueError, naming it, for one whose bytes are
    not those that were written."""
    for file in sorted(folder.glob("*.distcp"))[share::shares]:
        beside = file.with_name(file.name + SUFFIX)
        if beside.exists() and (there := crc32(file)) != (written := beside.read_text().strip()):
            raise ValueError(f"{file.name} has changed since it was written (CRC32 {there}, {written} then)")
