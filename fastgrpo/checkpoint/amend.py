"""What is measured after a checkpoint was saved, at its step: a run that was told to stop before a validation that was
due saves without it, and validates when it goes on. Without the metric that checkpoint could never be the best.

    checkpoint.json of the step  --metric, state of the parts-->  written aside and renamed; then `best` is pointed anew
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastgrpo.checkpoint.folders import point_to_best, read_manifest, write_manifest


def amend(checkpoint: Path, metric: float | None, parts: Mapping[str, Any], *, best_mode: str | None) -> None:
    """By one rank. `best_mode`: max or min where a best one is kept. Raises OSError or, where the checkpoint is no
    longer complete, ValueError."""
    manifest = replace(read_manifest(checkpoint), metric=metric, parts=dict(parts))
    write_manifest(checkpoint, manifest)
    if best_mode:
        point_to_best(checkpoint.parent, best_mode)
