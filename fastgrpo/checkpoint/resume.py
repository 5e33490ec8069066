"""Which run to continue, from which checkpoint, or a new one, and why.

    trainer.resume=never    a new folder RUN_DIR/EXPERIMENT-TIME
    trainer.resume=auto     the newest folder of this experiment in RUN_DIR
                              finished, with as many steps as now wanted ->  a new one
                              no complete checkpoint in it               ->  a new one
                              another process is writing into it         ->  a new one
                              what it was made of differs                ->  refused, with the reasons
                              else: its newest complete checkpoint       ->  continued in the same folder
    trainer.resume=PATH     that run folder's newest complete checkpoint, or that checkpoint; or refused

Rank 0 looks, the others are told. Nothing is changed on disk here but the new folder and the lock; what lies after the
checkpoint is set aside by whoever writes there (report.py).
"""

from __future__ import annotations

import fcntl
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from fastgrpo.checkpoint.folders import Found, Manifest, find_checkpoints, read_manifest, step_of
from fastgrpo.checkpoint.identity import Identity
from fastgrpo.config import RunConfig, Schedule, TrainerConfig, changed_options
from fastgrpo.errors import ConfigError
from fastgrpo.mesh import Mesh

CHECKPOINTS = "checkpoints"
FINISHED = "finished"  # file in a run folder: the steps that the finished run had
_LOCK = ".lock"


@dataclass(frozen=True, slots=True)
class Start:
    folder: Path  # of the run
    checkpoint: Path | None  # to continue from; None: a new run
    manifest: Manifest | None
    said: tuple[str, ...]  # what was found and decided, a line each

    @property
    def step(self) -> int:
        return self.manifest.step if self.manifest else 0


def check_resume(config: RunConfig) -> None:
    """What the options alone show, before anything is loaded. Raises ConfigError where `find_start` would."""
    if config.trainer.resume == "never":
        return
    folder, checkpoint = _candidate(config.trainer)
    if folder is None:
        return
    if _is_held(folder):
        _beside(config.trainer, folder)
        return
    found = _checkpoints(folder, checkpoint, explicit=config.trainer.resume != "auto")
    if found.complete and not (config.trainer.resume == "auto" and _finished_steps(folder)):
        refuse_changes(*found.complete[0], config)


def find_start(config: RunConfig, mesh: Mesh, identity: Identity, total_steps: int) -> tuple[Start, FileLock | None]:
    """A collective. The lock is rank 0's, and held until it is released or the process ends.

    Raises ConfigError, on every rank, when the run cannot be continued.
    """
    answer: Start | ConfigError | None = None
    lock: FileLock | None = None
    if mesh.is_main:
        try:
            answer, lock = _choose(config, identity, total_steps)
        except ConfigError as error:
            answer = error
    answer = mesh.broadcast(answer)
    if isinstance(answer, ConfigError):
        raise answer
    assert answer is not None
    return answer, lock


def _choose(config: RunConfig, identity: Identity, total_steps: int) -> tuple[Start, FileLock | None]:
    trainer, auto = config.trainer, config.trainer.resume == "auto"
    folder, checkpoint = (None, None) if trainer.resume == "never" else _candidate(trainer)
    if folder is None:
        return _new_run(trainer, ())
    found = _checkpoints(folder, checkpoint, explicit=not auto)
    skipped = tuple(f"not resumed from {line}" for line in found.passed_over)
    if auto and _finished_steps(folder) >= total_steps:
        return _new_run(trainer, (f"{folder} is finished: this is a new run",))
    if not found.complete:
        return _new_run(trainer, (*skipped, f"{folder} holds no complete checkpoint: this is a new run"))
    lock, free = _lock(folder)
    if not free:
        return _new_run(trainer, (_beside(trainer, folder),))
    path, manifest = found.complete[0]
    refuse_changes(path, manifest, config)
    refuse_other_material(path, manifest, config, identity, total_steps)
    never = "; trainer.resume=never starts a new run" if auto else ""
    world = f", saved by {manifest.world} ranks"
    said = (*skipped, f"resuming {folder} after step {manifest.step} of {total_steps}{world}{never}")
    return Start(folder, path, manifest, said), lock


def _beside(trainer: TrainerConfig, folder: Path) -> str:
    """What is said of a new run beside `folder`, which is being written. Raises ConfigError where it was asked for."""
    where = f"{folder} is being written by another process"
    if trainer.resume != "auto":
        raise ConfigError(f"trainer.resume={trainer.resume}: {where}; wait until it has ended")
    return f"{where}: this is a new run beside it"


def _candidate(trainer: TrainerConfig) -> tuple[Path | None, Path | None]:
    """(run folder, one checkpoint in it or None for the newest)."""
    if trainer.resume == "auto":
        return newest_run(Path(trainer.run_dir), trainer.experiment_name), None
    path = Path(trainer.resume).expanduser()
    if not path.is_dir():
        raise ConfigError(
            f"trainer.resume={trainer.resume}: there is no folder {path.absolute()}; set auto, never or a run"
        )
    if step_of(path) is not None and path.absolute().parent.name == CHECKPOINTS:
        return path.absolute().parent.parent, path.absolute()
    return path, None


def _checkpoints(folder: Path, checkpoint: Path | None, *, explicit: bool) -> Found:
    """Raises ConfigError when what was asked for by its path is not there."""
    if checkpoint is not None:
        try:
            return Found([(checkpoint, read_manifest(checkpoint))], [])
        except ValueError as error:
            raise ConfigError(f"trainer.resume={checkpoint} is no complete checkpoint: {error}") from None
    found = find_checkpoints(folder / CHECKPOINTS)
    if explicit and not found.complete:
        why = "".join(f"\n{line}" for line in found.passed_over)
        raise ConfigError(f"trainer.resume={folder} holds no complete checkpoint in {CHECKPOINTS}/{why}")
    return found


def newest_run(run_dir: Path, experiment: str) -> Path | None:
    """By the time and number in the name, which a copy keeps."""
    name = re.compile(re.escape(experiment) + r"-(\d{8}-\d{6})(?:-(\d+))?")
    runs = [
        (match[1], int(match[2] or 0), path)
        for path in (run_dir.iterdir() if run_dir.is_dir() else ())
        if path.is_dir() and (match := name.fullmatch(path.name))
    ]
    return max(runs)[2] if runs else None


def _finished_steps(folder: Path) -> int:
    """0 unless the run has finished."""
    try:
        return int((folder / FINISHED).read_text())
    except (OSError, ValueError):
        return 0


def refuse_changes(path: Path, manifest: Manifest, config: RunConfig) -> None:
    _refuse(path, changed_options(manifest.config, config))


def refuse_other_material(
    path: Path, manifest: Manifest, config: RunConfig, identity: Identity, total_steps: int
) -> None:
    """What the options do not show: the data, the models, the code of rewards, the length of the schedule."""
    before, now = manifest.identity, asdict(identity)
    reasons = []
    if before["data"] != now["data"]:
        reasons.append(
            "the training prompts have changed: their tokens, references or order, or the names of data.train_files, "
            f"which seed the samples ({before['prompts']} prompts then, {now['prompts']} now)"
        )
    if before["model"] != now["model"]:
        reasons.append(f"model.path={config.model.path} holds another model than the run began with")
    if before["reference"] != now["reference"]:
        reasons.append("the reference policy is another one (ref.path, model.path)")
    reasons += _changed_code(before["reward_code"], now["reward_code"], config.trainer.resume_allow)
    if config.actor.optim.lr_scheduler_type != Schedule["constant"] and manifest.total_steps != total_steps:
        reasons.append(
            f"the run had {manifest.total_steps} steps and would have {total_steps}, which moves the learning rate of "
            f"{config.actor.optim.lr_scheduler_type}"
        )
    if manifest.step > total_steps:
        reasons.append(f"it has done {manifest.step} steps and {total_steps} are wanted (trainer.max_steps)")
    _refuse(path, reasons)


def _changed_code(before: Mapping[str, str], now: Mapping[str, str], allowed: list[str]) -> list[str]:
    keys = {label: f"reward.functions.{label}.path" for label in now if before.get(label) != now[label]}
    return [
        f"the code of reward {label} has changed (allow it: trainer.resume_allow=[{key}])"
        for label, key in keys.items()
        if key not in allowed
    ]


def _refuse(path: Path, reasons: list[str]) -> None:
    if reasons:
        raise ConfigError(
            "\n".join(
                [
                    f"{path} cannot be continued by this configuration (trainer.resume=never starts a new run):",
                    *reasons,
                ]
            )
        )


def _new_run(trainer: TrainerConfig, said: tuple[str, ...]) -> tuple[Start, FileLock | None]:
    """Two runs started in one second get two folders: making one is what tells whether it was there."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    number = 0
    while True:
        suffix = f"-{number}" if number else ""
        folder = Path(trainer.run_dir) / f"{trainer.experiment_name}-{stamp}{suffix}"
        try:
            folder.mkdir(parents=True, mode=0o700)
        except FileExistsError:
            number += 1
            continue
        except OSError as error:
            raise ConfigError(f"trainer.run_dir={trainer.run_dir}: {error}; set it to a folder of yours") from error
        return Start(folder, None, None, said), _lock(folder)[0]


def _lock(folder: Path) -> tuple[FileLock | None, bool]:
    """(the lock, whether nobody else has it). File systems without locks: none, and nobody is known to have it."""
    lock = FileLock(folder / _LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return None, False
    except (NotImplementedError, OSError):
        return None, True
    return lock, True


def _is_held(folder: Path) -> bool:
    """Whether a run has `_lock(folder)`. Shared, since all ranks ask at once; rank 0 takes it after all have asked."""
    try:
        with (folder / _LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no lock file, or a file system without locks: nobody is known to have it
        return False
    return False
