"""Saving while training goes on. A save that fails costs nothing but itself: it is said, counted, and the run goes on.

    main thread, every rank                          writer thread, every rank
    copy shards to host memory
    gather plans and sizes                           write state/__<rank>_0.distcp, ranks/<rank>.json, flush
    rank 0: room on the disk? one global plan   -->  key `<number>/<rank>`: what was written, or what went wrong
    broadcast                                        rank 0: wait for all, write state/.metadata, model/ out of the
    the step goes on                                 shards, checksums, checkpoint.json, rename, move `latest`, retire
                                                     key `<number>/done`; the others end when it is there

The threads meet in the store, never in a collective: those belong to the main thread. A rank's thread always leaves its
key, so no other waits for one that failed. The next save waits for the one before.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from transformers import PreTrainedTokenizerBase

from fastgrpo import host_memory
from fastgrpo.checkpoint.checksum import write_list
from fastgrpo.checkpoint.disk import PART, free_bytes, remove_tree
from fastgrpo.checkpoint.folders import Manifest, commit, step_folder, tidy
from fastgrpo.checkpoint.model import trained_bytes, write_trained
from fastgrpo.checkpoint.tensors import (
    ShardPlanner,
    copy_to_host,
    full_masters,
    local,
    plan_files,
    training_tensors,
    write_index,
    write_shard,
)
from fastgrpo.config import TrainerConfig
from fastgrpo.mesh import Mesh, Store, open_store
from fastgrpo.policy.model import Policy

log = logging.getLogger("fastgrpo")

_GIB = 1 << 30
_POLL_S = 0.05
PINNED_ROUNDING = 1.4  # torch's pinned allocator rounds up to a power of two: 4/3 on average


@dataclass(frozen=True, slots=True)
class _Share:
    """What a rank brings to the common plan."""

    plan: SavePlan | None
    size: int  # bytes
    error: str | None


@dataclass(frozen=True, slots=True)
class _Job:
    number: int
    part: Path
    plan: SavePlan  # this rank's
    planner: ShardPlanner
    random_state: dict[str, Any]
    manifest: Manifest
    metadata: Metadata | None  # rank 0: of the whole


class Saver:
    """On rank 0: `failures` counts the saves that were lost, `complete` is the step of the last that was not."""

    def __init__(
        self, root: Path, policy: Policy, optimizer: torch.optim.Optimizer, tokenizer: PreTrainedTokenizerBase,
        mesh: Mesh, config: TrainerConfig, complete: int = 0,
    ) -> None:  # fmt: skip
        self.failures = 0
        self.complete = complete
        self._root = root
        self._policy = policy
        self._optimizer = optimizer
        self._tokenizer = tokenizer
        self._mesh = mesh
        self._config = config
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
        if job is None:
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
        planner, share = self._own_share(copy)
        shares = self._mesh.gather(share)
        metadata: Metadata | None = None
        answer: list[SavePlan] | str = ""
        if self._mesh.is_main:
            try:
                answer, metadata = self._prepare(part, shares)
            except Exception as error:
                answer = describe(error)
                self._lost(part, answer)
        answer = self._mesh.broadcast(answer)
        if isinstance(answer, str):
            return None
        return _Job(self._number, part, answer[self._mesh.rank], planner, random_state, manifest, metadata)

    def _has_room(self) -> bool:
        """Whether this host can hold the copies of its ranks; the same on all ranks."""
        size = sum(local(tensor).nbytes for tensor in training_tensors(self._policy.module, self._optimizer).values())
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", str(self._mesh.world)))
        room = all(self._mesh.gather(host_memory.fits(int(size * PINNED_ROUNDING), ranks)))
        if not room and not self._said_no_room and self._mesh.is_main:
            log.warning(
                "trainer.async_save: host memory has no room for a copy of masters and optimizer (%.3g GiB a rank): "
                "steps wait until their checkpoint is written",
                size / _GIB,
            )
            self._said_no_room = True
        return room

    def _own_share(self, copy: bool) -> tuple[ShardPlanner, _Share]:
        tensors = training_tensors(self._policy.module, self._optimizer)
        size = sum(local(tensor).nbytes for tensor in tensors.values())
        try:
            shards = copy_to_host(tensors) if copy else {k: local(v) for k, v in tensors.items()}
            planner = ShardPlanner(shards)
            planner.set_up_planner(dict(tensors), is_coordinator=self._mesh.is_main)
            return planner, _Share(planner.create_local_plan(), size, None)
        except (RuntimeError, MemoryError) as error:  # no host memory for the copy
            return ShardPlanner({}), _Share(None, size, describe(error))

    def _prepare(self, part: Path, shares: list[_Share]) -> tuple[list[SavePlan], Metadata]:
        """Rank 0: the folder, and everybody's plan. Raises when it cannot work."""
        errors = [f"rank {rank}: {share.error}" for rank, share in enumerate(shares) if share.error]
        if errors:
            raise OSError("; ".join(errors))
        plans = [share.plan for share in shares if share.plan is not None]
        remove_tree(part)
        part.mkdir(parents=True, mode=0o700)
        self._check_room(part, sum(share.size for share in shares) + trained_bytes(self._policy))
        return plan_files(part / "state", plans)

    def _check_room(self, folder: Path, needed: int) -> None:
        free = free_bytes(folder)
        if free < needed:
            raise OSError(
                f"a checkpoint takes {needed / _GIB:.3g} GiB and {free / _GIB:.3g} GiB are free in {folder.parent}; "
                "free some, or set trainer.max_ckpt_to_keep lower or trainer.run_dir elsewhere"
            )

    # Writer thread ---------------------------------------------------------------------------------------------------

    def _write(self, job: _Job) -> None:
        results: list[WriteResult] = []
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
        try:
            if self._mesh.is_main:
                self._complete(job, self._everybodys(job.number, results, error))
            elif self._store is not None:
                self._store.set(f"{job.number}/{self._mesh.rank}", pickle.dumps((results, error)))  # pyright: ignore[reportArgumentType] bytes are taken
                self._await(self._store, f"{job.number}/done")
        except Exception as failure:
            if self._mesh.is_main:
                self._lost(job.part, describe(failure))
        if self._mesh.is_main and self._store is not None:
            self._store.set(f"{job.number}/done", "")

    def _everybodys(self, number: int, results: list[WriteResult], error: str | None) -> list[list[WriteResult]]:
        """Rank 0: what all ranks have written. Raises OSError when one of them could not."""
        answers = [(results, error)]
        for rank in range(1, self._mesh.world):
            assert self._store is not None
            key = f"{number}/{rank}"
            self._await(self._store, key)
            answers.append(pickle.loads(self._store.get(key)))
            self._store.delete_key(key)
        errors = [f"rank {rank}: {error}" for rank, (_, error) in enumerate(answers) if error]
        if errors:
            raise OSError("; ".join(errors))
        return [results for results, _ in answers]

    def _complete(self, job: _Job, results: list[list[WriteResult]]) -> None:
        assert job.metadata is not None
        policy, state = self._policy, job.part / "state"
        write_index(state, job.metadata, results)
        known = write_trained(job.part, policy, full_masters(state, policy.trained_names), self._tokenizer)
        write_list(job.part, known)
        folder = commit(job.part, job.manifest)
        self.complete = job.manifest.step
        log.info("checkpoint %s", folder)
        best = str(self._config.best_mode) if self._config.best_metric else None
        tidy(self._root, self._config.max_ckpt_to_keep, best=best)

    def _await(self, store: Store, key: str) -> None:
        while not store.check([key]):
            time.sleep(_POLL_S)

    def _lost(self, part: Path, why: str) -> None:
        self.failures += 1
        log.error("CHECKPOINT NOT SAVED (%s): %s. The run goes on.", part.with_suffix("").name, why)
        try:
            remove_tree(part)
        except OSError as error:
            log.error("%s stays behind: %s", part, error)


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
