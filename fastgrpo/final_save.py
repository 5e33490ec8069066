"""The trained model at the end of a run: room for it is looked at before training, and waited for after. Room for
a checkpoint is looked at there, too.

    before the first step   free < size?  -->  ConfigError: nothing is lost yet; of a checkpoint's a warning: room may
                                               be made, and a save that fails ends no run
    after the last          saved?  -- no -->  said; every RETRY_S again, for WAIT_FOR_ROOM_S, unless told to stop
                                               then RunError

Every step is in it, and without checkpoints nowhere else: ending at once would lose the run for want of a file that
somebody could delete. What is written is checkpoint/model.py's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from fastgrpo.checkpoint import room, save_trained, trained_bytes
from fastgrpo.checkpoint.disk import free_bytes
from fastgrpo.checkpoint.places import Places
from fastgrpo.checkpoint.tensors import trained_parameters
from fastgrpo.config import TrainerConfig
from fastgrpo.errors import ConfigError, RunError
from fastgrpo.mesh import Mesh
from fastgrpo.paths import existing_part
from fastgrpo.policy.model import Policy
from fastgrpo.policy.weights import local

RETRY_S = 10.0
WAIT_FOR_ROOM_S = 600.0
_GIB = 1 << 30

log = logging.getLogger("fastgrpo")


def check_room(policy: Policy, mesh: Mesh, trainer: TrainerConfig) -> None:
    """A collective. Raises ConfigError where trainer.run_dir has no room for the trained model that is wanted."""
    if not trainer.save_final or trainer.val_only:
        return
    needed = trained_bytes(policy, merged=trainer.save_merged)
    place = existing_part(Path(trainer.run_dir))
    free = mesh.broadcast(free_bytes(place) if mesh.is_main else 0)
    if free < needed:
        raise ConfigError(
            f"trainer.save_final: the trained model takes {needed / _GIB:.3g} GiB and {free / _GIB:.3g} GiB are free "
            f"in {place}; free some (older checkpoints may be deleted by hand), or set trainer.save_final=false; with "
            "another trainer.run_dir a run begins anew, unless trainer.resume names a checkpoint"
        )


def warn_without_room(policy: Policy, mesh: Mesh, trainer: TrainerConfig, places: Places, folder: Path) -> None:
    """A collective. Says so where the disks of `folder`, the run's checkpoints, have no room for the first one."""
    if trainer.save_freq <= 0 or trainer.val_only:
        return
    state = 3 * sum(local(master).nbytes for _, master in trained_parameters(policy.module))  # and Adam's two moments
    free = free_bytes(existing_part(folder)) if places.leads(mesh.rank) else None
    shares = mesh.gather(room.Share(None, state, free, None))
    if mesh.is_main:
        try:
            room.check_room(folder / "step", shares, places, shares[0].free or 0, trained_bytes(policy))
        except OSError as error:
            log.warning("trainer.save_freq=%d, but NO CHECKPOINT WILL FIT as things are: %s", trainer.save_freq, error)


def save_final(
    policy: Policy,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    mesh: Mesh,
    *,
    merged: bool,
    way_on: str,
    saving: Callable[[], AbstractContextManager[None]],
    check_stop: Callable[[], None],
) -> None:
    """A collective. `way_on`: the option that goes on with this run; `saving`: the watchdog's stage, around each try;
    `check_stop` raises when the run is to stop. Raises RunError on every rank."""
    give_up_at = time.monotonic() + WAIT_FOR_ROOM_S
    said = False
    while True:
        try:
            with saving():
                return save_trained(policy, tokenizer, folder, mesh, merged=merged)
        except OSError as error:
            if mesh.broadcast(time.monotonic() >= give_up_at):
                raise RunError(
                    f"THE TRAINED MODEL IS NOT SAVED: {error}, tried for {WAIT_FOR_ROOM_S:.0f} s. What is kept is the "
                    f"newest complete checkpoint in {folder}/checkpoints, if there is one: {way_on} goes on from it, "
                    "and saves the model, when there is room"
                ) from error
            if mesh.is_main and not said:
                log.error(
                    "THE TRAINED MODEL IS NOT SAVED YET: %s. It takes %.3g GiB: make room. Tried again every %.0f s "
                    "for %.0f s.",
                    error, trained_bytes(policy, merged=merged) / _GIB, RETRY_S, WAIT_FOR_ROOM_S,
                )  # fmt: skip
            said = True
        _sleep(RETRY_S, check_stop)


def _sleep(seconds: float, check_stop: Callable[[], None]) -> None:
    """The same number of checks on every rank."""
    for _ in range(max(1, round(seconds))):
        time.sleep(min(seconds, 1.0))
        check_stop()
