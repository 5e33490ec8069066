"""Which run to continue, from which checkpoint, or a new one, and why.

    trainer.resume=never    a new folder RUN_DIR/EXPERIMENT-TIME
    trainer.resume=auto     the folders of this experiment in RUN_DIR, newest first
                              finished, with as many steps as now wanted ->  a new run
                              another process is writing into it         ->  the one before it
                              no complete checkpoint in it               ->  the one before it
                              what it was made of differs                ->  refused, with the reasons; the one before
                                                                             it where a newer run is being written
                              else: its newest complete checkpoint       ->  continued in the same folder
                              none is left                               ->  a new run
    trainer.resume=PATH     that run folder's newest complete checkpoint, or that checkpoint; or refused
                              a checkpoint outside a run folder          ->  continued in a new folder
                              this very command has gone on from it      ->  goes on from there
    trainer.val_only        the same checkpoint, also of a run that is being written, read into a folder of its own;
                            refused only for what its weights and its score rest on

Rank 0 looks, the others are told. Nothing is changed on disk here but the new folder and the lock; what lies after the
checkpoint is set aside by whoever writes there (report.py).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from filelock import FileLock

from fastgrpo.checkpoint.compare import doubts, made_by, objections
from fastgrpo.checkpoint.disk import PART
from fastgrpo.checkpoint.folders import MANIFEST, Found, Manifest, find_checkpoints, read_manifest, step_of
from fastgrpo.checkpoint.identity import Identity
from fastgrpo.checkpoint.others import left_lying
from fastgrpo.checkpoint.runs import CHECKPOINTS, finished_steps, is_held, new_folder, parts_of, runs_of, take
from fastgrpo.config import RunConfig, TrainerConfig
from fastgrpo.errors import ConfigError
from fastgrpo.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Start:
    folder: Path  # of the run
    checkpoint: Path | None  # to continue from, in `folder` or elsewhere; None: a new run
    manifest: Manifest | None
    said: tuple[str, ...]  # what was found and decided, a line each

    @property
    def step(self) -> int:
        return self.manifest.step if self.manifest else 0

    @property
    def goes_on(self) -> bool:
        """In the run that the checkpoint is of; else it is left as it is."""
        return self.checkpoint is not None and self.checkpoint.is_relative_to(self.folder)


@dataclass(frozen=True, slots=True)
class _Choice:
    said: tuple[str, ...]
    folder: Path | None = None  # to go on in; None: a new one
    checkpoint: Path | None = None
    manifest: Manifest | None = None


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is wanted. Before anything is loaded neither identity nor number of steps is known."""

    config: RunConfig
    identity: Identity | None = None
    total_steps: int | None = None
    taken: Path | None = None  # the folder whose lock is ours

    def finished(self, folder: Path) -> bool:
        done = finished_steps(folder)
        return done > 0 if self.total_steps is None else done >= self.total_steps

    def held(self, folder: Path) -> bool:
        """Who only validates does not write there."""
        return not self.config.trainer.val_only and folder != self.taken and is_held(folder)

    def objections(self, manifest: Manifest) -> list[str]:
        return objections(manifest, self.config, self.identity, self.total_steps)


def check_resume(config: RunConfig) -> None:
    """What the options alone show, before anything is loaded, on the first node: another may have a disk of its own,
    with no more than its part of a run. Raises ConfigError where `find_start` would."""
    _choose(_Asked(config))


def find_start(config: RunConfig, mesh: Mesh, identity: Identity, total_steps: int) -> tuple[Start, FileLock | None]:
    """A collective. The lock is rank 0's, and held until it is released or the process ends.

    Raises ConfigError, on every rank, when the run cannot be continued.
    """
    answer: Start | ConfigError | None = None
    lock: FileLock | None = None
    if mesh.is_main:
        try:
            answer, lock = _begin(_Asked(config, identity, total_steps))
        except ConfigError as error:
            answer = error
    answer = mesh.broadcast(answer)
    if isinstance(answer, ConfigError):
        raise answer
    assert answer is not None
    return answer, lock


def _begin(asked: _Asked) -> tuple[Start, FileLock | None]:
    trainer = asked.config.trainer
    while True:
        choice = _choose(asked)
        if choice.manifest is not None and choice.manifest.node > 0:
            raise ConfigError(
                f"{choice.checkpoint} was saved on each node's own disk, and rank 0 was on another node then, where "
                "the run's rows and its model are: start so that it is there again (torchrun's --node-rank)"
            )
        if choice.folder is None or trainer.val_only:
            folder = new_folder(trainer)
            return Start(folder, choice.checkpoint, choice.manifest, _told(choice, folder, asked)), take(folder)[0]
        lock, free = take(choice.folder)
        if free and _choose(replace(asked, taken=choice.folder)) == choice:
            told = _told(choice, choice.folder, asked)
            return Start(choice.folder, choice.checkpoint, choice.manifest, told), lock
        if lock is not None:  # another process was faster, or was there meanwhile: look again
            lock.release()


def _told(choice: _Choice, folder: Path, asked: _Asked) -> tuple[str, ...]:
    trainer, manifest = asked.config.trainer, choice.manifest
    if manifest is None:
        what = f"validating model.path={asked.config.model.path} in" if trainer.val_only else "a new run:"
        return (*choice.said, f"{what} {folder}") if choice.said or trainer.val_only else ()
    source = choice.checkpoint if choice.folder is None else choice.folder
    if trainer.val_only:
        what = f"validating {source} after step {manifest.step} in {folder}"
        return (*choice.said, what, *doubts(manifest, asked.identity))
    place = f", in {folder}" if choice.folder is None else ""
    never = "; trainer.resume=never starts a new run" if trainer.resume == "auto" else ""
    ranks = "1 rank" if manifest.world == 1 else f"{manifest.world} ranks"
    after = f"after step {manifest.step} of {asked.total_steps}, saved by {ranks}"
    return (*choice.said, f"resuming {source} {after}{place}{never}")


def _choose(asked: _Asked) -> _Choice:
    """Raises ConfigError. Changes nothing."""
    resume = asked.config.trainer.resume
    if resume == "never":
        return _Choice(())
    try:
        choice = _newest(asked) if resume == "auto" else _by_path(asked, Path(resume).expanduser())
    except OSError as error:
        raise ConfigError(f"trainer.resume={resume}: what is there cannot be read: {error}") from error
    folder = None if asked.config.trainer.val_only else choice.folder
    if folder is not None and not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(
            f"trainer.resume={resume}: {folder} cannot be written to, and a resumed run goes on in its folder; "
            "copy it to a place of yours and set trainer.resume to the copy, or trainer.resume=never for a new run"
        )
    return choice


def _newest(asked: _Asked) -> _Choice:
    trainer, said, empty, beside = asked.config.trainer, [], list[Path](), False
    runs = runs_of(Path(trainer.run_dir), trainer.experiment_name)
    for number, folder in enumerate(runs, start=1):
        if asked.finished(folder):
            hint = f": trainer.resume={folder} validates its last checkpoint" if trainer.val_only else ""
            finished = f"{folder} is finished{hint}"
            return _Choice((*said, *_without(empty), finished, *_older(asked, runs[number:])))
        if asked.held(folder):
            said.append(f"{folder} is being written by another process")
            beside = True
            continue
        found = find_checkpoints(folder / CHECKPOINTS)
        said += [f"not resumed from {line}" for line in found.passed_over]
        if not found.complete:
            empty.append(folder)
            continue
        path, manifest = found.complete[0]
        reasons = asked.objections(manifest)
        if not reasons:
            return _Choice((*said, *_without(empty), *_older(asked, runs[number:])), folder, path, manifest)
        if not beside:
            raise _refusal(path, reasons, trainer)
        said.append("\n".join([f"not resumed from {path}:", *reasons]))
    return _Choice((*said, *_without(empty)))


def _without(empty: Sequence[Path]) -> tuple[str, ...]:
    """A line about the folders, newest first, that nothing can be resumed from: runs that ended early leave many."""
    if len(empty) < 2:
        return tuple(f"{folder} holds no complete checkpoint" for folder in empty)
    return (f"{len(empty)} runs hold no complete checkpoint, the newest of them {empty[0]}",)


def _older(asked: _Asked, runs: Sequence[Path]) -> tuple[str, ...]:
    if asked.config.trainer.val_only:  # it takes nobody's place
        return ()
    return left_lying(runs, lambda manifest: not asked.objections(manifest))


def _by_path(asked: _Asked, path: Path) -> _Choice:
    resume = asked.config.trainer.resume
    folder, checkpoint = parts_of(path)
    said: tuple[str, ...] = ()
    if folder is not None and asked.held(folder):
        raise ConfigError(
            f"trainer.resume={resume}: {folder} is being written by another process; wait until it has ended"
        )
    if not path.is_dir():  # it may have made room for later ones
        if folder is not None and checkpoint is not None and (later := _made_since(asked, folder, step_of(path) or 0)):
            return later
        raise ConfigError(
            f"trainer.resume={resume}: there is no folder {path.absolute()}{_beside(path)}; set auto, never or a run"
        )
    if checkpoint is None:
        found = _checkpoints(path.absolute())
        said = tuple(f"not resumed from {line}" for line in found.passed_over)
        checkpoint, manifest = found.complete[0]
    else:
        manifest = _manifest(checkpoint)
        if later := _made_since(asked, folder, manifest.step):
            return later
    if reasons := asked.objections(manifest):
        raise _refusal(checkpoint, reasons, asked.config.trainer)
    return _Choice(said, folder, checkpoint, manifest)


def _made_since(asked: _Asked, folder: Path | None, step: int) -> _Choice | None:
    """The newest checkpoint that this very command has made since it began at `step`, of a run that is not
    finished: a job that is requeued with a checkpoint's path must not begin there for ever."""
    config = asked.config
    if config.trainer.val_only:
        return None
    runs: Sequence[Path] = [folder] if folder else runs_of(Path(config.trainer.run_dir), config.trainer.experiment_name)
    for run in runs:
        if finished_steps(run) or asked.held(run):
            continue
        for path, later in find_checkpoints(run / CHECKPOINTS).complete:
            if later.step > step and made_by(later, config) and not asked.objections(later):
                said = (
                    f"trainer.resume={config.trainer.resume}: this command began there, has come to step {later.step} "
                    f"and goes on; to begin at step {step} again, move later checkpoints elsewhere"
                )
                return _Choice((said,), run, path, later)
    return None


def _manifest(checkpoint: Path) -> Manifest:
    if checkpoint.suffix == PART:  # the folder's next start would remove it
        raise ConfigError(f"trainer.resume={checkpoint}: it was still being written, or removed{_beside(checkpoint)}")
    try:
        return read_manifest(checkpoint)
    except ValueError as error:
        raise ConfigError(
            f"trainer.resume={checkpoint} is no complete checkpoint: {error}{_beside(checkpoint)}"
        ) from None


def _beside(checkpoint: Path) -> str:
    """What else could be named."""
    complete = find_checkpoints(checkpoint.absolute().parent).complete
    return f"; the newest complete one beside it: trainer.resume={complete[0][0]}" if complete else ""


def _checkpoints(folder: Path) -> Found:
    found = find_checkpoints(folder / CHECKPOINTS)
    if not found.complete:
        why = "".join(f"\n{line}" for line in found.passed_over)
        raise ConfigError(
            f"trainer.resume={folder} is neither a checkpoint (it has no {MANIFEST}) nor a run: it holds no complete "
            f"checkpoint in {CHECKPOINTS}/{_beside(folder)}{why}"
        )
    return found


def _refusal(path: Path, reasons: Sequence[str], trainer: TrainerConfig) -> ConfigError:
    if trainer.val_only:
        head = f"{path} cannot be validated by this configuration (trainer.resume=never validates model.path instead):"
    else:
        head = f"{path} cannot be continued by this configuration (trainer.resume=never starts a new run):"
    return ConfigError("\n".join([head, *reasons]))
