"""Saving while training goes on. A save that fails costs nothing but itself: it is said and counted, and ends no run.

    main thread, every rank                          writer thread, every rank
    copy shards to host memory
    gather plans and sizes                           write state/__<rank>_0.distcp, ranks/<rank>.json, flush
    rank 0: room on the disk? one global plan   -->  tell rank 0 what was written, or what went wrong
    broadcast                                        rank 0: wait for all, write state/.metadata, model/ out of the
    the step goes on                                 shards, checksums, checkpoint.json, rename, move `latest`, retire
                                                     the others end when it says so

The threads meet in the store (words.py), never in a collective: those belong to the main thread. A rank's thread always
leaves its word, so no other waits for one that failed. The next save waits for the one before.

Where nodes have disks of their own (places.py), each has the state of its ranks. No rank can read all shards then, so
model/ is gathered in the main thread, and the step waits until rank 0 has written it.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from transformers import PreTrainedTokenizerBase

from fastgrpo import host_memory
from fastgrpo.checkpoint.checksum import write_list
from fastgrpo.checkpoint.disk import PART, remove_tree
from fastgrpo.checkpoint.folders import Manifest, commit, step_folder, tidy
from fastgrpo.checkpoint.model import save_trained, trained_bytes, write_trained
from fastgrpo.checkpoint.places import Places
from fastgrpo.checkpoint.room import Share, check_room, make_anew
from fastgrpo.checkpoint.tensors import (
    ShardPlanner,
    copied_bytes,
    copy_to_host,
    full_masters,
    plan_files,
    training_tensors,
    write_index,
    write_shard,
)
from fastgrpo.checkpoint.words import Results, Words, describe
from fastgrpo.config import TrainerConfig
from fastgrpo.mesh import Mesh, open_store
from fastgrpo.policy.model import Policy
from fastgrpo.policy.weights import local

log = logging.getLogger("fastgrpo")

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class _Job:
    number: int
    part: Path
    plan: SavePlan  # this rank's
    planner: ShardPlanner
    random_state: dict[str, Any]
    manifest: Manifest
    metadata: Metadata | None  # of the whole, where an index is written


class Saver:
    """On rank 0: `failures` counts the saves that were lost, `complete` is the step of the last that was not."""

    def __init__(
        self, root: Path, policy: Policy, optimizer: torch.optim.Optimizer, tokenizer: PreTrainedTokenizerBase,
        mesh: Mesh, config: TrainerConfig, places: Places, complete: int = 0,
    ) -> None:  # fmt: skip
        self.failures = 0
        self.complete = complete
        self._root = root
        self._policy = policy
        self._optimizer = optimizer
        self._tokenizer = tokenizer
        self._mesh = mesh
        self._config = config
        self._places = places
        self._follows = places.leads(mesh.rank) and not mesh.is_main
        self._number = 0
        self._said_no_room = False
        self._thread: threading.Thread | None = None
        self._store = open_store("save") if mesh.world > 1 else None

    def save(self, manifest: Manifest, random_state: dict[str, Any], *, wait: bool = False) -> None:
        """A collective; `random_state` is this rank's. Returns when the state is copied, or, with `wait`, without
        trainer.async_save, or where host memory has no room for the copy, when the checkpoint is complete. Never raises
        for a failed save."""
        self.wait()
        self._number += 1
        copy = self._config.async_save and not wait and self._has_room()
        part = step_folder(self._root, manifest.step).with_suffix(PART)
        job = self._plan(manifest, random_state, part, copy=copy)
        if job is None or not self._has_model(job.part):
            return
        self._thread = threading.Thread(target=self._write, args=(job,), name="checkpoint", daemon=True)
        self._thread.start()
        if not copy:  # the writer reads the weights themselves: they must stay as they are
            self.wait()

    def wait(self, limit_s: float | None = None) -> bool:
        """Until the last save is complete or has failed, on all ranks; whether so: with a limit it may be neither."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(limit_s)
        return thread is None or not thread.is_alive()

    # Main thread -----------------------------------------------------------------------------------------------------

    def _plan(self, manifest: Manifest, random_state: dict[str, Any], part: Path, *, copy: bool) -> _Job | None:
        planner, share = self._own_share(part, copy)
        shares = self._mesh.gather(share)
        plan: tuple[list[SavePlan], Metadata] | str = ""
        if self._mesh.is_main:
            try:
                plan = self._prepare(part, shares)
            except Exception as error:
                plan = describe(error)
                self._lost(part, plan)
        plan = self._mesh.broadcast(plan)
        if isinstance(plan, str):
            self._clear(part)
            return None
        if self._places.several:
            node, save = self._places.number(self._mesh.rank), self._mesh.broadcast(uuid.uuid4().hex)
            manifest = replace(manifest, node=node, nodes=1 + len(self._places.others), save=save)
        return _Job(self._number, part, plan[0][self._mesh.rank], planner, random_state, manifest, plan[1])

    def _has_model(self, part: Path) -> bool:
        """With nodes that have disks of their own: model/ is written now. False when it could not be."""
        if not self._places.several:
            return True
        try:
            save_trained(self._policy, self._tokenizer, part, self._mesh)
            return True
        except OSError as error:
            if self._mesh.is_main:
                self._lost(part, describe(error))
            self._clear(part)
            return False

    def _clear(self, part: Path) -> None:
        if self._follows:
            remove_tree(part)

    def _has_room(self) -> bool:
        """Whether this host can hold the copies of its ranks; the same on all ranks."""
        tensors = training_tensors(self._policy.module, self._optimizer).values()
        size = copied_bytes(tensors)
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", str(self._mesh.world)))
        room = all(self._mesh.gather(host_memory.fits(size, ranks)))
        if not room and not self._said_no_room and self._mesh.is_main:
            log.warning(
                "trainer.async_save: host memory has no room for a copy of masters and optimizer (%.3g GiB a rank): "
                "steps wait until their checkpoint is written",
                size / _GIB,
            )
            self._said_no_room = True
        return room

    def _own_share(self, part: Path, copy: bool) -> tuple[ShardPlanner, Share]:
        tensors = training_tensors(self._policy.module, self._optimizer)
        size = sum(local(tensor).nbytes for tensor in tensors.values())
        free: int | None = None
        try:
            if self._follows:
                free = make_anew(part)
            shards = copy_to_host(tensors) if copy else {k: local(v) for k, v in tensors.items()}
            planner = ShardPlanner(shards)
            planner.set_up_planner(dict(tensors), is_coordinator=self._mesh.is_main)
            return planner, Share(planner.create_local_plan(), size, free, None)
        except (RuntimeError, MemoryError, OSError) as error:  # no host memory for the copy, or no folder
            return ShardPlanner({}), Share(None, size, free, describe(error))

    def _prepare(self, part: Path, shares: list[Share]) -> tuple[list[SavePlan], Metadata]:
        """Rank 0: the folder, and everybody's plan. Raises when it cannot work."""
        errors = [f"rank {rank}: {share.error}" for rank, share in enumerate(shares) if share.error]
        if errors:
            raise OSError("; ".join(errors))
        plans = [share.plan for share in shares if share.plan is not None]
        check_room(part, shares, self._places, make_anew(part), trained_bytes(self._policy))
        return plan_files(part / "state", plans, self._places.leaders)

    # Writer thread ---------------------------------------------------------------------------------------------------

    def _write(self, job: _Job) -> None:
        results: Results = []
        error: str | None = None
        try:
            if (
                self._mesh.device.type == "cuda"
            ):  # a new thread begins on the first GPU, whose stream is not this rank's
                torch.cuda.set_device(self._mesh.device)
            results = write_shard(job.part / "state", job.plan, job.planner)
            ranks = job.part / "ranks"
            ranks.mkdir(exist_ok=True)
            (ranks / f"{self._mesh.rank:05d}.json").write_text(json.dumps(job.random_state))
        except BaseException as failure:
            error = describe(failure)
        words = Words(self._store, job.number, self._mesh.rank) if self._store is not None else None
        if self._mesh.is_main:
            self._lead(job, words, results, error)
        elif words is not None:
            try:
                self._follow(job, words, results, error)
            except Exception as failure:  # rank 0 has its word, or the store is gone
                log.error("checkpoint %s: %s", job.part, describe(failure))

    def _lead(self, job: _Job, words: Words | None, own: Results, error: str | None) -> None:
        retired: list[Path] = []
        try:
            if words is None and error:
                raise OSError(f"rank 0: {error}")
            results = [own] if words is None else words.all_results(own, error, self._mesh.world)
            if words is not None and self._places.several:
                words.publish(results)
            retired = self._complete(job, words, results)
        except Exception as failure:
            self._lost(job.part, describe(failure))
        if words is not None:
            words.end(complete=self.complete == job.manifest.step, retired=retired)

    def _follow(self, job: _Job, words: Words, own: Results, error: str | None) -> None:
        words.tell(own, error)
        if not self._follows:
            words.await_end()
            return

        def complete(results: list[Results]) -> None:
            self._index(job, results)
            write_list(job.part, {})
            commit(job.part, job.manifest)

        words.follow(step_folder(self._root, job.manifest.step), job.part, str(self._config.best_mode), complete)

    def _complete(self, job: _Job, words: Words | None, results: list[Results]) -> list[Path]:
        """Returns what had to go for it."""
        policy, state = self._policy, job.part / "state"
        self._index(job, results)
        known: dict[str, str] = {}
        if not self._places.several:
            known = write_trained(job.part, policy, full_masters(state, policy.trained_names), self._tokenizer)
        write_list(job.part, known)
        if words is not None:
            words.await_places(self._places.others)
        folder = commit(job.part, job.manifest)
        self.complete = job.manifest.step
        log.info("checkpoint %s", folder)
        best = str(self._config.best_mode) if self._config.best_metric else None
        return tidy(self._root, self._config.max_ckpt_to_keep, best=best)

    def _index(self, job: _Job, results: list[Results]) -> None:
        assert job.metadata is not None
        own = self._places.leaders[self._mesh.rank]
        write_index(job.part / "state", job.metadata, results, [leader == own for leader in self._places.leaders])

    def _lost(self, part: Path, why: str) -> None:
        self.failures += 1
        newest = f"The newest complete one is step_{self.complete:06d}" if self.complete else "None is complete yet"
        log.error("CHECKPOINT NOT SAVED (%s): %s. %s.", part.with_suffix("").name, why, newest)
        try:
            remove_tree(part)
        except OSError as error:
            log.error("%s stays behind: %s", part, error)
