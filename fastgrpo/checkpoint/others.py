"""The runs beside the one that is gone on with: what `auto` leaves lying is named, and what a run says as it stops is
what `auto` will do. No torch.

    newest   B   step 1   <-- auto goes on here                            B says: trainer.resume=auto goes on from here
             A   step 7   <-- named with trainer.resume=A (`left_lying`)   A says: trainer.resume=A (`way_on`)

Not here: which run is gone on with (resume.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from fastgrpo.checkpoint.folders import Manifest, find_checkpoints
from fastgrpo.checkpoint.runs import CHECKPOINTS, finished_steps, is_held, runs_of
from fastgrpo.config import TrainerConfig

_NAMED = 3  # at most, of the newest


def left_lying(runs: Sequence[Path], may_go_on: Callable[[Manifest], bool]) -> tuple[str, ...]:
    """A line that names those of `runs`, newest first, that are unfinished, have a complete checkpoint and may be gone
    on with."""
    named: list[str] = []
    for folder in runs:
        if finished_steps(folder) or is_held(folder):
            continue
        complete = find_checkpoints(folder / CHECKPOINTS).complete
        if complete and may_go_on(complete[0][1]):
            named.append(f"{folder} after step {complete[0][1].step} (trainer.resume={folder})")
        if len(named) == _NAMED:
            break
    return (f"unfinished as well, and passed over because it is older: {'; '.join(named)}",) if named else ()


def way_on(folder: Path, trainer: TrainerConfig) -> str:
    """What goes on with the run in `folder`, which has a complete checkpoint: `trainer.resume=auto`, unless that would
    come upon another run first."""
    try:
        runs = runs_of(Path(trainer.run_dir), trainer.experiment_name)
        met = next((run for run in runs if _same(run, folder) or _stops_auto(run)), None)
    except OSError:  # a run that ends has other things to say
        return "trainer.resume=auto"
    if met is not None and _same(met, folder):
        return "trainer.resume=auto"
    why = f"auto would come upon the newer {met}" if met else f"auto looks in {trainer.run_dir}"
    return f"trainer.resume={folder} ({why})"


def start_anew(folder: Path, trainer: TrainerConfig) -> str:
    """The same of a run that has no checkpoint: what begins it anew."""
    try:
        runs = runs_of(Path(trainer.run_dir), trainer.experiment_name)
        met = next((run for run in runs if not _same(run, folder) and _stops_auto(run)), None)
    except OSError:
        met = None
    if met is None or finished_steps(met):
        return "trainer.resume=auto"
    return f"trainer.resume=never (auto would come upon {met})"


def _same(run: Path, folder: Path) -> bool:
    return run.resolve() == folder.resolve()


def _stops_auto(run: Path) -> bool:
    """Whether the search ends there, or may when whoever writes there has ended."""
    return finished_steps(run) > 0 or is_held(run) or bool(find_checkpoints(run / CHECKPOINTS).complete)
