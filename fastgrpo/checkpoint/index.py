"""`state/.metadata`, DCP's index of a checkpoint, read without running what somebody may have put into it.

DCP pickles it and unpickles it with no questions asked; a checkpoint from elsewhere could run any code that way. Here
only the names that an index is made of are looked up. (The shards themselves DCP reads with `weights_only`.)
"""

from __future__ import annotations

import enum
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

_NEEDED = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
}


def _member(kind: Any, name: str) -> Any:
    """In place of getattr, by which Python 3.11.0 to 3.11.3 pickle the member of an enumeration."""
    if not (isinstance(kind, enum.EnumMeta) and name in kind.__members__):
        raise pickle.UnpicklingError(f"it asks {kind!r} for {name}, no member of an enumeration; it was not loaded")
    return kind.__members__[name]


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) == ("builtins", "getattr"):
            return _member
        if global_name not in _NEEDED.get(module_name, ()):
            raise pickle.UnpicklingError(
                f"it names {module_name}.{global_name}, which no index of a checkpoint needs; it was not loaded"
            )
        return super().find_class(module_name, global_name)


def read_index(folder: Path) -> Metadata:
    """Raises pickle.UnpicklingError for a file that holds anything but an index."""
    with (folder / ".metadata").open("rb") as file:
        metadata = _IndexUnpickler(file).load()
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError(f"{folder / '.metadata'} holds a {type(metadata).__name__}, no index")
    return metadata
