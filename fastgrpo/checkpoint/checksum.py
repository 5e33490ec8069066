"""Checksums of a checkpoint's files: written with them, compared before a run goes on from it.

    state/__0_0.distcp --CRC32--> state/__0_0.distcp.crc32   at the save, in the thread of the rank that wrote it
    tensors of model/  --CRC32--> files.crc32                rank 0's thread, from memory: the file is not read again
    all other files    --CRC32--> files.crc32                which are small, read back
    every file         --CRC32--> equal?                     at the start, every rank its share of the files

Against disks and copies that change bytes and keep the size, not against people. torch does not look at the CRC32 that
its own files hold, and safetensors holds none. A file without one (of an older version) is taken as it is. Not here:
checkpoint.json, which holds its own (folders.py).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from fastgrpo.checkpoint.disk import write_durably

SUFFIX = ".crc32"
LIST = "files.crc32"  # lines of `<CRC32>  <path in the checkpoint>`
_PIECE = 1 << 24  # bytes read at a time


def crc32(file: Path) -> str:
    """8 hexadecimal digits."""
    value = 0
    with file.open("rb") as stream:
        while piece := stream.read(_PIECE):
            value = zlib.crc32(piece, value)
    return f"{value:08x}"


def safetensors_crc32(file: Path, tensors: Mapping[str, Tensor]) -> str:
    """What `crc32(file)` is, if the safetensors file holds these tensors, which are in host memory: only its header is
    read. Layout: https://github.com/huggingface/safetensors#format"""
    with file.open("rb") as stream:
        size = stream.read(8)
        header = stream.read(int.from_bytes(size, "little"))
    value = zlib.crc32(header, zlib.crc32(size))
    places = {name: entry["data_offsets"] for name, entry in json.loads(header).items() if name in tensors}
    for name in sorted(places, key=places.__getitem__):
        value = zlib.crc32(tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().data, value)
    return f"{value:08x}"


def write_checksums(files: Iterable[Path]) -> None:
    """Of each beside it."""
    for file in files:
        write_durably(file.with_name(file.name + SUFFIX), crc32(file) + "\n")


def write_list(folder: Path, known: Mapping[str, str]) -> None:
    """`files.crc32` of a checkpoint that is complete but for this and checkpoint.json. `known`: CRC32 by path, of files
    that need not be read; a shard has its own beside it."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    wanted = [name for name in names if name + SUFFIX not in names]
    write_durably(folder / LIST, "".join(f"{known.get(name) or crc32(folder / name)}  {name}\n" for name in wanted))


def check_files(folder: Path, share: int, shares: int) -> None:
    """Of the files of a checkpoint every `shares`-th from number `share` on, by size. Raises ValueError, naming it, for
    one whose bytes are not those that were written, and OSError for one that cannot be read."""
    written = dict([*_beside(folder / "state"), *_listed(folder)])
    by_size = sorted(written, key=lambda file: (-file.stat().st_size, file))  # nobody gets all the large ones
    for file in by_size[share::shares]:
        if (there := crc32(file)) != written[file]:
            name = file.relative_to(folder)
            raise ValueError(f"{name} has changed since it was written (CRC32 {there}, {written[file]} then)")


def _beside(state: Path) -> Iterator[tuple[Path, str]]:
    for file in state.glob("*.distcp"):
        beside = file.with_name(file.name + SUFFIX)
        if beside.exists():
            yield file, beside.read_text(errors="replace").strip()


def _listed(folder: Path) -> Iterator[tuple[Path, str]]:
    if not (folder / LIST).exists():
        return
    for line in (folder / LIST).read_text(errors="replace").splitlines():
        value, _, name = line.partition("  ")
        if not (folder / name).is_file():
            raise ValueError(f"{LIST} is damaged: it names {name!r}")
        yield folder / name, value
