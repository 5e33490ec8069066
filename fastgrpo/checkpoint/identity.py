"""What a run is made of besides its options, as fingerprints: data, models, the code of rewards."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from pathlib import Path

from fastgrpo.config import RunConfig

_SAMPLE_BYTES = 1 << 16  # of each end of a weight file


@dataclass(frozen=True, slots=True)
class Identity:
    """What a run is made of besides its options, as fingerprints."""

    data: str  # names (file/split/row), ids and references of all training prompts, in order
    prompts: int
    model: str  # config.json and a sample of the weight files that the run began with
    reference: str | None  # likewise, of the reference policy; None without one
    reward_code: dict[str, str]  # label of a custom function -> digest of its file


def identify(data: str, prompts: int, model_dir: Path, ref_dir: Path | None, config: RunConfig) -> Identity:
    code = {
        label: _digest(Path(function.path).read_bytes())
        for label, function in config.reward.functions.items()
        if function.path and Path(function.path).is_file()
    }
    reference = None if ref_dir is None else model_fingerprint(ref_dir)
    return Identity(data, prompts, model_fingerprint(model_dir), reference, code)


def model_fingerprint(folder: Path) -> str:
    """Of config.json, and of each weight file's size, beginning (names and shapes) and end. Not of every byte: reading
    them all would take as long as loading them."""
    digest = hashlib.blake2b((folder / "config.json").read_bytes(), digest_size=16)
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(struct.pack("<q", size))
        with path.open("rb") as file:
            digest.update(file.read(_SAMPLE_BYTES))
            file.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
