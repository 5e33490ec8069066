"""A run on disk: begun or resumed, saved as it goes, closed in good order, whatever ends it.

    find the run folder, or make one -> restore -> open its files -> (the steps) -> last save -> close

Around the steps, so that the trainer's loop stays on one screen. What a checkpoint holds and how it is written is
checkpoint/'s.
"""

from __future__ import annotations

import logging
import os
from dataclasses import asdict
from types import TracebackType
from typing import Protocol, Self

from fastgrpo.checkpoint import CHECKPOINTS, Manifest, Saver, Stateful, find_start, restore
from fastgrpo.checkpoint.random_state import random_state
from fastgrpo.config import RunConfig, to_document
from fastgrpo.provenance import describe_start
from fastgrpo.report import Report
from fastgrpo.stages import Stages
from fastgrpo.stopping import Stopped, Stopper
from fastgrpo.torchrun import leave_status
from fastgrpo.watchdog import Watchdog

LAST_SAVE_S = 15.0  # for a save in flight when the run fails: every rank is to be gone within 30 s

log = logging.getLogger("fastgrpo")


class Run(Protocol):
    """The trainer, as far as it is looked at here."""

    config: RunConfig
    stages: Stages
    stopper: Stopper
    watchdog: Watchdog
    stateful: dict[str, Stateful]
    steps_done: int

    def close(self) -> None: ...


class Session:
    """Entering chooses the folder and restores; leaving waits for the last save and closes the files. Left by
    Stopped, it saves first."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def __enter__(self) -> Self:
        run, s = self._run, self._run.stages
        start, self._lock = find_start(run.config, s.mesh, s.identity, s.total_steps)  # held to the end
        if start.checkpoint is not None and start.manifest is not None:
            restore(start.checkpoint, start.manifest, s.actor.policy, s.actor.optimizer, run.stateful, s.mesh)
        provenance = describe_start(run.config, s.layout, s.mesh, s.identity, start, s.engine.info)
        self.report = Report(run.config, s.mesh, s.total_steps, start, provenance)
        run.watchdog.folder = self.report.folder
        self._saved_at = start.step  # nothing is worth saving at step 0
        self._failures_said = 0
        root = self.report.folder / CHECKPOINTS
        self._saver = Saver(root, s.actor.policy, s.actor.optimizer, s.tokenizer, s.mesh, run.config.trainer)
        return self

    def note(self) -> None:
        """What is true between two steps. A save that a signal asks for in the middle of a step keeps the parts as they
        are noted here: masters and optimizer change in the update alone, where no step is left, but a part may change
        before."""
        self._noted = {name: part.state() for name, part in self._run.stateful.items()}, random_state()

    def save_if_due(self) -> None:
        """After every `save_freq` steps, and after the last, so that a longer run can go on from there."""
        run, every = self._run, self._run.config.trainer.save_freq
        self.note()
        self._say_failures()
        last = every > 0 and run.steps_done == run.stages.total_steps
        if run.steps_done != self._saved_at and (last or due(run.steps_done, every)):
            self._save()

    def _save(self, *, wait: bool = False) -> None:
        run, s, step = self._run, self._run.stages, self._run.steps_done
        self.report.flush()
        manifest = Manifest(
            step=step,
            total_steps=s.total_steps,
            world=s.mesh.world,
            config=to_document(run.config),
            identity=asdict(s.identity),
            parts=self._noted[0],
            metric=self.report.value_at(step, run.config.trainer.best_metric),
            files={},
        )
        with run.watchdog.stage("save"):
            self._saver.save(manifest, self._noted[1], wait=wait)
        self._saved_at = step

    def _say_failures(self) -> None:
        if self._saver.failures != self._failures_said:
            self._failures_said = self._saver.failures
            self.report.lost_checkpoints(self._run.steps_done, self._failures_said)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Stopped):
            self._stop(error)
        failed = error is not None and not isinstance(error, Stopped)
        self._saver.wait(LAST_SAVE_S if failed else None)  # after a failure some rank may be gone
        self._say_failures()
        self.report.close(finished=error is None and not self._run.config.trainer.val_only)
        if isinstance(error, Stopped):
            self._run.stages.mesh.barrier()  # the first that ends takes the others with it
            self._run.close()

    def _stop(self, stop: Stopped) -> None:
        """Raises RuntimeError when a rank is missing: a save would wait for it for ever."""
        run, mesh = self._run, self._run.stages.mesh
        if not run.stopper.everybody_is_here():
            raise RuntimeError(f"{stop}: nothing was saved, because not every rank has answered")
        if run.steps_done != self._saved_at:
            self._save(wait=True)
        self._saver.wait()
        failed = f", but {self._saver.failures} save(s) FAILED" if self._saver.failures else ""
        self.report.say(
            f"stopped by {stop} after step {run.steps_done}{failed}; trainer.resume=auto goes on from here: "
            f"{self.report.folder}"
        )
        if mesh.is_main:
            leave_status(stop.exit_code, os.environ)


def due(step: int, every: int) -> bool:
    """Whether something that happens every `every` steps (-1: never) happens after `step` steps."""
    return every > 0 and step % every == 0
