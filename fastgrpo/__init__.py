"""fastgrpo: GRPO and its relatives in one torchrun job, fast and in little memory."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastgrpo.config import RunConfig
    from fastgrpo.trainer import Trainer

__version__ = "0.1.0"
__all__ = ["RunConfig", "Trainer", "__version__"]

_HOMES = {"RunConfig": "fastgrpo.config", "Trainer": "fastgrpo.trainer"}


def __getattr__(name: str) -> Any:
    # Imported when asked for: the command must be able to refuse a configuration before torch is loaded.
    if name == "Trainer":
        launch = import_module("fastgrpo.launch")
        launch.share_cpu("cuda" if launch.count_gpus() else "cpu", os.environ)
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
