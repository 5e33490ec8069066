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
from typing import Any, Protocol, Self

from fastgrpo import console
from fastgrpo.checkpoint import (
    CHECKPOINTS,
    Manifest,
    Saver,
    Stateful,
    amend,
    find_start,
    restore,
    same_rewards,
    start_anew,
    way_on,
)
from fastgrpo.checkpoint.places import find_places
from fastgrpo.checkpoint.random_state import random_state
from fastgrpo.config import RunConfig, to_document
from fastgrpo.errors import RunError
from fastgrpo.final_save import check_room, warn_without_room
from fastgrpo.history import REPORT, go_back
from fastgrpo.provenance import describe_start
from fastgrpo.report import Report
from fastgrpo.reward import RewardMistake
from fastgrpo.stages import Stages
from fastgrpo.stopping import NOT_SAVED, Mistaken, Stopped, Stopper
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
        check_room(s.actor.policy, s.mesh, run.config.trainer)
        start, self._lock = find_start(run.config, s.mesh, s.identity, s.total_steps)  # to the end
        if start.checkpoint is not None and start.manifest is not None:
            restore(start.checkpoint, start.manifest, s.actor.policy, s.actor.optimizer, run.stateful, s.mesh)
            if not run.config.trainer.val_only and same_rewards(start.manifest, run.config, s.identity):
                s.rewards.resume()  # a validation is worth nothing without scores, and functions that changed are new
        places = find_places(start.folder, s.mesh)
        if start.goes_on and places.leads(s.mesh.rank) and not s.mesh.is_main:
            go_back(start.folder, start.step)  # of rank 0's the report does it
        provenance = describe_start(run.config, s.layout, s.mesh, s.identity, start, s.engine.info)
        self.report = Report(run.config, s.mesh, s.total_steps, start, provenance)
        run.watchdog.folder = self.report.folder
        run.watchdog.way_on = way_on(self.report.folder, run.config.trainer)
        # What this folder holds: a run that begins at another's checkpoint saves its own; step 0 is not worth it.
        self._saved_at = start.step if start.goes_on or run.config.trainer.val_only else 0
        self._resumed_from = start.checkpoint if start.goes_on else None
        root = self.report.folder / CHECKPOINTS
        trainer, done = run.config.trainer, self._saved_at
        warn_without_room(s.actor.policy, s.mesh, trainer, places, root)
        self._saver = Saver(
            root, s.actor.policy, s.actor.optimizer, s.tokenizer, s.mesh, trainer, places, complete=done
        )
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
        last = every > 0 and run.steps_done == run.stages.total_steps
        if run.steps_done != self._saved_at and (last or due(run.steps_done, every)):
            self._save()
        self.report.failed_saves = self._saver.failures

    def note_validation(self) -> None:
        """After a validation. Of the checkpoint that the run goes on from, when it was saved before: it may be the best
        by it, and whoever goes on from it once more must not validate again."""
        run, checkpoint, trainer = self._run, self._resumed_from, self._run.config.trainer
        if checkpoint is None or run.steps_done != self._saved_at or not run.stages.mesh.is_main:
            return
        self.note()
        best_mode = str(trainer.best_mode) if trainer.best_metric else None
        try:
            self.report.flush()
            metric = self.report.value_at(run.steps_done, trainer.best_metric)
            amend(checkpoint, metric, self._parts(), best_mode=best_mode)
        except (OSError, ValueError) as error:
            log.error("%s does not get the metrics of its validation: %s", checkpoint, error)

    def _save(self, *, wait: bool = False) -> None:
        run, s, step = self._run, self._run.stages, self._run.steps_done
        with run.watchdog.stage("save"):
            self.report.flush()
            manifest = Manifest(
                step=step,
                total_steps=s.total_steps,
                world=s.mesh.world,
                config=to_document(run.config),
                identity=asdict(s.identity),
                parts=self._parts(),
                metric=self.report.value_at(step, run.config.trainer.best_metric),
                files={},
            )
            s.actor.settle()
            self._saver.save(manifest, self._noted[1], wait=wait)
        self._saved_at = step

    def _parts(self) -> dict[str, Any]:
        return self._noted[0] | {REPORT: self.report.state()}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, Stopped):
            written = self._saver.wait(LAST_SAVE_S)  # some rank may be gone
            self._close(finished=False, written=written)
            return
        with self._run.watchdog.stage("save"):  # a disk that stalls has its limit here, too
            if error is not None:
                self._stop(error)
            self._saver.wait()
            lost = error is None and self._lost()
            self._close(finished=error is None and not lost and not self._run.config.trainer.val_only)
            if error is not None:
                self._run.stages.mesh.barrier()  # the first that ends takes the others with it
        if error is not None:
            self._run.close()
        if lost:
            raise RunError(
                "the last checkpoint could NOT BE SAVED (the reason is above) and trainer.save_final=false: nothing "
                f"keeps what was trained since {self._kept()}"
            )

    def _kept(self) -> str:
        """Where the run stands when its last step is lost; what rank 0 says, whoever speaks. A collective."""
        ways = self._ways()
        last, (way, anew) = self._run.stages.mesh.broadcast((self._saver.complete, ways))
        if last:
            return f"step_{last:06d}, from which {way} goes on when there is room: {self.report.folder}"
        return f"the start, where {anew} begins anew: {self.report.folder}"

    def _ways(self) -> tuple[str, str]:
        """(what goes on with this run if it has a checkpoint, what begins it anew if not)"""
        folder, trainer = self.report.folder, self._run.config.trainer
        return way_on(folder, trainer), start_anew(folder, trainer)

    def _lost(self) -> bool:
        """Whether all steps are done and neither a checkpoint nor a model is to keep the last of them."""
        trainer, mesh = self._run.config.trainer, self._run.stages.mesh
        if trainer.val_only or trainer.save_final or trainer.save_freq <= 0:
            return False
        return mesh.broadcast(self._saver.complete != self._run.steps_done)

    def _close(self, *, finished: bool, written: bool = True) -> None:
        self.report.close(finished=finished)
        if self._lock is not None and written:  # the process may live on, in a notebook, and start the run again
            self._lock.release()

    def _stop(self, stop: Stopped) -> None:
        """Raises RunError when a rank is missing: a save would wait for it for ever."""
        run, mesh, saver = self._run, self._run.stages.mesh, self._saver
        if isinstance(stop, Mistaken) and mesh.is_main:
            console.complain(stop)
        run.stopper.await_everybody(f"stopped by {stop.by}, and nothing was saved")
        saver.wait()
        if mesh.broadcast(saver.complete != run.steps_done):  # also where it failed before: there may be room again
            self._save(wait=True)
        if mesh.broadcast(saver.complete != run.steps_done):
            stop.exit_code = NOT_SAVED
        if mesh.is_main:
            self._say_what_is_saved(stop)
        if mesh.local_rank == 0:  # each node has a process that wants to know
            leave_status(stop.exit_code, os.environ)

    def _say_what_is_saved(self, stop: Stopped) -> None:
        step, last, failures = self._run.steps_done, self._saver.complete, self._saver.failures
        way, anew = self._ways()
        if stop.exit_code == NOT_SAVED:
            kept = f"the last complete checkpoint is step_{last:06d}" if last else "there is no complete checkpoint"
            then = f"{way} goes on from there" if last else f"{anew} goes on from the start"
            log.error(
                "stopped by %s after step %d, which could NOT BE SAVED (the reason is above); %s, %s: %s",
                stop.by, step, kept, then, self.report.folder,
            )  # fmt: skip
        elif self._run.config.trainer.val_only:
            self.report.say(f"stopped by {stop.by} before the validation was complete: {self.report.folder}")
        elif step == 0:
            self.report.say(
                f"stopped by {stop.by} before a step was complete: there was nothing to save, and {anew} begins anew: "
                f"{self.report.folder}"
            )
        else:
            failed = f", but {failures} save(s) FAILED" if failures else ""
            self.report.say(
                f"stopped by {stop.by} after step {step}{failed}; {way} goes on from here{self._allowance(stop)}: "
                f"{self.report.folder}"
            )

    def _allowance(self, stop: Stopped) -> str:
        """What else a resume needs when the file of the reward that made the mistake has been corrected."""
        if not isinstance(stop, Mistaken) or not isinstance(stop.mistake, RewardMistake):
            return ""
        label = stop.mistake.label
        function = self._run.config.reward.functions.get(label)
        if function is None or function.path is None:
            return ""
        return f", with the reward corrected and trainer.resume_allow=[reward.functions.{label}.path]"


def due(step: int, every: int) -> bool:
    """Whether something that happens every `every` steps (-1: never) happens after `step` steps."""
    return every > 0 and step % every == 0
