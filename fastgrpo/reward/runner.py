"""Runs reward functions on the samples of a step, in worker processes that can be killed.

    jobs (function, sample) -> queue -> few at a time to each worker -> outcomes, an Outcome a function and sample

A call that takes longer than `timeout_s` costs its worker: the process group is killed, another one started, and that
sample is "timeout" for that function. A sample that kills its worker is "error". Neither is a 0: the sample is unscored
and counted. What can only be a mistake of the user's ends the run instead: a value that is no score, a function that
cannot be loaded, one that raises the same error on the whole first batch or never comes back. Where the process that
starts the workers dies, another one does.

How many jobs a message holds follows from the speed seen so far, so that slow functions are spread and fast ones do not
pay for messages. A worker that is far slower than its function's mean is `overdue`: what it has not begun goes to
others (if it gets to it after all, the first answer counts), and a spare worker stands in for it. So a few hanging
samples cost one timeout together, not one each.
Everything happens in the thread that calls `outcomes`, one call at a time. What they come to is rewards.py's.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from fastgrpo import console
from fastgrpo.errors import RunError, UserError
from fastgrpo.records import RewardRequest
from fastgrpo.reward.function import Outcome, RewardFunction, RewardMistake, arguments_of
from fastgrpo.reward.process import Job, Nursery, NurseryDied, WorkerProcess
from fastgrpo.reward.signature import Form
from fastgrpo.whereabouts import listed

_MESSAGE_S = 0.02  # work that one message should hold
_MESSAGE_JOBS = 64  # and the most jobs in it
_SPARE_WORKERS = 16  # most that stand in for overdue ones
_LOAD_LIMIT_S = 300.0  # for importing the user's module
_LOAD_WORDS_S = (10.0, 30.0, 60.0, 120.0, 240.0)  # when it is said that it still goes on
_NURSERIES = 3  # lost in a row, with no worker ready in between
_CONCURRENT_JOBS = 32  # calls of an async function that one worker has running
_LOOP_GRACE_S = 0.5  # for an event loop to end its late calls itself
_PATIENCE_S = 0.1  # a call is overdue after 10 times its function's mean, and not before
_FIRST_PATIENCE_S = 0.25  # when nothing has been answered yet


log = logging.getLogger("fastgrpo")


@dataclass(slots=True)
class _Speed:
    calls: int = 0
    seconds: float = 0.0

    @property
    def mean(self) -> float:
        return self.seconds / self.calls


@dataclass(slots=True)
class _Batch:
    requests: Sequence[RewardRequest]
    queue: deque[Job] = field(default_factory=deque)
    outcomes: dict[Job, Outcome] = field(default_factory=dict)
    alone: set[Job] = field(default_factory=set)  # async calls that are run again, each without others beside it

    def give_up(self, function: int, outcome: Outcome) -> None:
        """What waits for this function gets `outcome`; what is under way may still answer."""
        for job in self.queue:
            if job[0] == function:
                self.outcomes.setdefault(job, outcome)
        self.queue = deque(job for job in self.queue if job[0] != function)


class RewardRunner:
    """Reward functions and the processes they run in, which start with the first call and serve all later ones."""

    def __init__(self, functions: Sequence[RewardFunction], num_workers: int, timeout_s: float) -> None:
        """`num_workers` processes; `timeout_s` seconds for one function on one sample."""
        self.functions = tuple(functions)
        self._num_workers = num_workers
        self._timeout_s = timeout_s
        self._payloads = [(str(function), _pickled(function)) for function in functions]
        self._speeds = [_Speed() for _ in functions]
        self._forms: list[Form] = []  # how each function is called; known when a worker has loaded them
        self._load_s = 0.0  # that a worker took to load the functions
        self._load_words = 0  # of _LOAD_WORDS_S, said
        self._resumed = False
        self._nursery: Nursery | None = None
        self._nurseries_lost = 0
        self._workers: list[WorkerProcess] = []
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the workers and wait until one has loaded every function. UserError when one cannot be loaded.
        `outcomes` does it too; calling it early shows the mistake before the model is loaded."""
        with self._lock, self._killing_on_error():
            batch = _Batch(())
            self._staff(batch)
            while not any(worker.ready for worker in self._workers):
                self._turn(batch)
                self._staff(batch)

    def resume(self) -> None:
        """The functions have answered in an earlier start of the run: one that never comes back is down, not wrong."""
        self._resumed = True

    def outcomes(self, requests: Sequence[RewardRequest]) -> list[list[Outcome]]:
        """For each function, an Outcome a request, in order. From any thread. UserError for a mistake in a function."""
        if not requests or not self.functions:
            return [[] for _ in self.functions]
        with self._lock, self._killing_on_error():
            batch = _Batch(requests, deque((f, i) for f in range(len(self.functions)) for i in range(len(requests))))
            num_jobs = len(batch.queue)
            while len(batch.outcomes) < num_jobs:
                self._staff(batch)
                self._hand_out(batch)
                self._turn(batch)
            self._rest()
        return [[batch.outcomes[f, i] for i in range(len(requests))] for f in range(len(self.functions))]

    def whereabouts(self) -> str:
        """What the workers are at, for a report on a hang (whereabouts.py); from another thread."""
        at = [w.jobs[0] for w in tuple(self._workers) if w.jobs]
        samples = {function: sorted(sample for f, sample in at if f == function) for function, _ in at}
        return "; ".join(
            f"{self.functions[function]} at sample{'s' * (len(found) > 1)} {listed(found)} of this rank"
            for function, found in samples.items()
        )

    def close(self) -> None:
        """End the workers. A later `outcomes` would start new ones."""
        with self._lock:
            self._end_all()

    # the loop

    def _turn(self, batch: _Batch) -> None:
        """Wait for answers or the next limit, and treat both."""
        for key, _ in self._selector.select(self._next_limit()):
            worker: WorkerProcess = key.data
            answers = worker.read()
            if answers is None:
                self._on_death(worker, batch)
                continue
            for answer in answers:
                self._on_answer(worker, answer, batch)
        for worker in tuple(self._workers):
            self._check_limits(worker, batch)

    def _on_answer(self, worker: WorkerProcess, answer: Any, batch: _Batch) -> None:
        if isinstance(answer, dict):
            if "broken" in answer:
                raise UserError(answer["broken"])
            worker.ready, self._forms = True, answer["ready"]
            self._nurseries_lost = 0
            self._load_s = time.monotonic() - worker.started
            return
        sample, seconds, kind, *rest = answer
        job = (worker.jobs[0][0], sample)
        worker.jobs.remove(job)
        if kind == "timeout":
            batch.outcomes.setdefault(job, self._late())
            self._refuse_if_never_back(job[0], batch)
            return
        request = batch.requests[sample]
        speed = self._speeds[job[0]]
        speed.calls, speed.seconds = speed.calls + 1, speed.seconds + seconds
        # It may be answered already: jobs of an overdue worker are given to others, and the first answer counts.
        batch.outcomes.setdefault(job, self._outcome(job[0], request, kind, rest))

    def _outcome(self, function: int, request: RewardRequest, kind: str, rest: list[Any]) -> Outcome:
        if kind == "scored":
            score, details = rest
            return Outcome("unscored" if score is None else "scored", score, details)
        if kind == "raised":
            text, where, trace = rest
            return Outcome("error", error=text, where=where, trace=trace)
        named = self.functions[function]
        if named.weight == 0:  # it only watches
            return Outcome("error", error=rest[0] if kind == "misfit" else f"it returned {rest[0]}")
        if kind == "misfit":
            text = f"{named} cannot be called: {rest[0]}. Rename the parameter, or give it a default."
            raise RewardMistake(text, named.label)
        one = f"for sample {request.sample} of prompt {request.uid}, " if request.uid else ""
        which = "" if self._forms[function] == "batch" else one  # of a list, which one is in what it returned
        raise RewardMistake(
            f"{named} returned {rest[0]} ({which}after {request.step} steps). Expected is one finite number for the "
            'one sample it is called with, None (the sample cannot be scored), or a dict {"score": number, ...}; from '
            "a function that takes lists, a list of those, one a sample.",
            named.label,
        )

    def _late(self) -> Outcome:
        return Outcome("timeout", error=f"no answer within {self._timeout_s:g} s")

    def _on_death(self, worker: WorkerProcess, batch: _Batch) -> None:
        """The sample it was at is an error; those that it had not begun go back."""
        how = self._remove(worker).end()
        if not worker.ready:
            if worker.orphaned:
                return  # that another nursery is started, and how often, is _hire's
            raise UserError(f"a worker process ended with {how} while it loaded {self._names()}; see its output above.")
        if worker.jobs:
            self._close(worker, Outcome("error", error=f"its process ended with {how}"), batch)
            if not worker.overdue:
                batch.queue.extendleft(reversed(worker.jobs))

    def _check_limits(self, worker: WorkerProcess, batch: _Batch) -> None:
        elapsed = time.monotonic() - worker.since
        if not worker.ready:
            if elapsed > _LOAD_LIMIT_S:
                raise UserError(
                    f"loading {self._names()} took more than {_LOAD_LIMIT_S:g} s. Make the import of its file faster."
                )
            if elapsed > self._next_load_word():
                self._load_words += 1
                console.say(
                    f"still loading {self._names()} after {elapsed:.0f} s; after {_LOAD_LIMIT_S:g} s the run ends"
                )
        elif worker.jobs and elapsed > self._limit(worker):
            self._remove(worker).end()
            function = worker.jobs[0][0]
            self._close(worker, self._late(), batch)
            if not worker.overdue:
                batch.queue.extendleft(reversed(worker.jobs))
            self._refuse_if_never_back(function, batch)
        elif worker.jobs and not worker.overdue and elapsed > self._patience(worker):
            worker.overdue = True
            batch.queue.extendleft(list(worker.jobs)[:0:-1])

    def _close(self, worker: WorkerProcess, outcome: Outcome, batch: _Batch) -> None:
        """What a worker that has ended was at gets `outcome`: its first job, or all jobs of a group. Which of several
        async calls blocked their loop or ended the process is not known: each stays, to be tried once more, alone."""
        if len(worker.jobs) > 1 and self._forms[worker.jobs[0][0]] == "concurrent":
            batch.alone.update(worker.jobs)
            return
        for _ in range(len(worker.jobs) if worker.grouped else 1):
            batch.outcomes.setdefault(worker.jobs.popleft(), outcome)

    def _limit(self, worker: WorkerProcess) -> float:
        """Seconds for what a worker is at. One event loop ends its calls by itself, unless something blocks it."""
        return self._timeout_s + _LOOP_GRACE_S * (self._forms[worker.jobs[0][0]] == "concurrent")

    def _patience(self, worker: WorkerProcess) -> float:
        """Seconds after which a call is out of the ordinary. A group is one call: nobody can stand in for it."""
        if worker.grouped:
            return float("inf")
        speed = self._speeds[worker.jobs[0][0]]
        usual = 10 * speed.mean if speed.calls else _FIRST_PATIENCE_S
        return max(usual, min(self._timeout_s / 10, max(_PATIENCE_S, self._load_s)))

    def _next_limit(self) -> float:
        """Seconds until some worker reaches a limit."""
        limits = []
        for worker in self._workers:
            if not worker.ready:
                limits.append(worker.since + min(_LOAD_LIMIT_S, self._next_load_word()))
            elif worker.jobs:
                patience = float("inf") if worker.overdue else self._patience(worker)
                limits.append(worker.since + min(self._limit(worker), patience))
        return max(0.0, min(limits) - time.monotonic()) + 1e-3  # rather just after the limit than just before

    def _next_load_word(self) -> float:
        """Seconds of loading after which it is said once more. After the first load, which tells it all, never."""
        said_all = bool(self._forms) or self._load_words == len(_LOAD_WORDS_S)
        return float("inf") if said_all else _LOAD_WORDS_S[self._load_words]

    def _names(self) -> str:
        return ", ".join(str(function) for function in self.functions)

    # the workers

    def _staff(self, batch: _Batch) -> None:
        """Start workers where any are missing, also spare ones while there is work."""
        while True:
            fit = sum(not worker.overdue for worker in self._workers)
            limit = self._num_workers + _SPARE_WORKERS if batch.queue else self._num_workers
            if fit >= self._num_workers or len(self._workers) >= limit:
                return
            worker = self._hire()
            self._workers.append(worker)
            self._selector.register(worker.socket, selectors.EVENT_READ, worker)

    def _hire(self) -> WorkerProcess:
        """A new worker. Raises RunError where the process that starts them dies again and again."""
        while True:
            if self._nursery is not None and self._nursery.died:
                self._replace(self._nursery)
            self._nursery = self._nursery or Nursery()
            with contextlib.suppress(NurseryDied):
                return WorkerProcess(self._nursery, self._payloads)

    def _replace(self, nursery: Nursery) -> None:
        """Its workers that are left go on; those that died with it are noticed by the end of their streams."""
        nursery.close()
        self._nursery = None
        self._nurseries_lost += 1
        if self._nurseries_lost > _NURSERIES:
            raise RunError(
                f"the process that starts the reward workers (python -m fastgrpo.reward.worker) has died "
                f"{self._nurseries_lost} times in a row: it was killed, or has crashed while it loaded "
                f"{self._names()}; its last words, if any, are above"
            )
        log.warning("the process that starts the reward workers was killed or has crashed: another one is started")

    def _hand_out(self, batch: _Batch) -> None:
        for worker in self._workers:
            while batch.queue and batch.queue[0] in batch.outcomes:
                batch.queue.popleft()
            if not batch.queue:
                return
            if worker.idle:
                function = batch.queue[0][0]
                samples = self._take(function, batch)
                jobs = [(i, arguments_of(batch.requests[i])) for i in samples]
                worker.give(function, jobs, grouped=self._forms[function] != "single", limit_s=self._timeout_s)

    def _take(self, function: int, batch: _Batch) -> list[int]:
        """The next samples for one message: as many as _MESSAGE_S holds, and no more than an even share; all of them
        for a function that takes batches."""
        form, speed = self._forms[function], self._speeds[function]
        if form == "batch":
            most = len(batch.queue)
        elif form == "concurrent":
            left = sum(job[0] == function for job in batch.queue)
            most = 1 if batch.queue[0] in batch.alone else min(_CONCURRENT_JOBS, -(-left // self._num_workers))
        else:
            held = int(_MESSAGE_S / max(speed.mean, 1e-9)) if speed.calls else 1
            most = max(1, min(held, _MESSAGE_JOBS, len(batch.queue) // self._num_workers))
        samples: list[int] = []
        while batch.queue and batch.queue[0][0] == function and len(samples) < most:
            if samples and batch.queue[0] in batch.alone:
                break
            job = batch.queue.popleft()
            if job not in batch.outcomes:
                samples.append(job[1])
        return samples

    def _rest(self) -> None:
        """After a batch: replace the workers that were killed, so that the next call finds them ready; end the spare
        ones and those still at a sample that another has answered."""
        for worker in [w for w in self._workers if w.jobs]:
            self._remove(worker).end()
        for worker in self._workers[self._num_workers :]:
            self._remove(worker).end()
        self._staff(_Batch(()))

    def _remove(self, worker: WorkerProcess) -> WorkerProcess:
        self._selector.unregister(worker.socket)
        self._workers.remove(worker)
        return worker

    def _end_all(self) -> None:
        for worker in tuple(self._workers):
            self._remove(worker)
            if worker.orphaned:  # nobody else ends it
                worker.end()
            else:
                worker.hang_up()
        if self._nursery is not None:
            self._nursery.close()
            self._nursery = None

    @contextlib.contextmanager
    def _killing_on_error(self) -> Iterator[None]:
        """What interrupts a batch leaves workers amid their jobs: end them, so that the next call starts clean."""
        try:
            yield
        except BaseException:
            self._end_all()
            raise

    def _refuse_if_never_back(self, function: int, batch: _Batch) -> None:
        """UserError when a function has never answered: without it, a first batch would wait for every timeout. One
        that only watches, or is down in a run that goes on, is not asked any more in this batch."""
        timeouts = sum(o.status == "timeout" for (f, _), o in batch.outcomes.items() if f == function)
        if not self._speeds[function].calls and timeouts >= 4 * self._num_workers:
            if self.functions[function].weight == 0 or self._resumed:
                batch.give_up(function, self._late())
                return
            raise UserError(
                f"{self.functions[function]} answered none of the first {timeouts} samples within reward.timeout_s = "
                f"{self._timeout_s:g} s. Raise reward.timeout_s if it needs longer."
            )


def _pickled(function: RewardFunction) -> bytes:
    try:
        return cloudpickle.dumps(function.load)
    except Exception as error:  # the objects that a closure holds raise what they like
        raise UserError(
            f"{function} cannot be sent to a worker process: {type(error).__name__}: {error}. "
            "Create what it holds (open files, locks, models) inside the function, or give it as a file: "
            "reward.functions.<label>.path."
        ) from None
