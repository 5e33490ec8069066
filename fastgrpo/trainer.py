"""The order of a step, on one screen.

    1 prompts     every rank takes the same slice of the global order
    2 rollout     the engine wakes with the policy's weights, draws, sleeps
    3 reward      in worker processes; then every rank holds every rollout and its score
                  (1 to 3 again, with dynamic sampling, until the step is full of groups whose rewards differ)
    4 advantage   from scores and penalties, within each prompt's group; what does not count is left out
    5 pack, 6 weights   each rank cuts the same plan and takes its share
    7 old, ref    logprobs under the weights of the rollout and the reference, where something needs them
    8 update      mini-batch after mini-batch
    9 record

What each phase does is in its own module; what they hand each other is in records.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from fastgrpo.batch.mini_batches import MiniBatch, build_mini_batches, build_scoring_batches
from fastgrpo.checkpoint import Stateful
from fastgrpo.clock import Clock
from fastgrpo.config import RunConfig, uses_reference
from fastgrpo.dump import dump_bad_update
from fastgrpo.evaluate import Validation, answer_rows, draw_answers, validate
from fastgrpo.final_save import save_final
from fastgrpo.gate import check_gap, gate_metrics
from fastgrpo.gpu import explaining_lack_of_memory
from fastgrpo.groups import Groups, make_groups
from fastgrpo.metrics import Sums
from fastgrpo.outage import Outage
from fastgrpo.policy.sequences import needs_terms, sequence_terms
from fastgrpo.records import Prompt, Rollout, Sample, StepRecord
from fastgrpo.report import Report
from fastgrpo.rollout.draw import draw_own, drawing_rows, make_requests, score_own, share_samples
from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.probes import draw_probes, share_probes
from fastgrpo.rollout.refill import fill_step
from fastgrpo.session import Session, due
from fastgrpo.stages import build_stages
from fastgrpo.stopping import Stopper
from fastgrpo.summary import make_record
from fastgrpo.watchdog import Watchdog

log = logging.getLogger("fastgrpo")


class Trainer:
    """One run. `prompts` and `reward` replace what the configuration names: a list of strings, message lists or rows,
    and a function (prompt, response, reference, meta, step) -> float. `engine`: one that a former run of this process
    built for the same model and rollout options, which saves its start.

        trainer = Trainer(RunConfig(...), prompts=["..."], reward=score)
        record = trainer.step()     # one step
        trainer.run()               # all of them, with validation, files and the trained model
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        prompts: Sequence[Any] | None = None,
        reward: Callable[..., object] | None = None,
        engine: RolloutEngine | None = None,
    ) -> None:
        self.stages = build_stages(config, prompts, reward, engine)
        self.config = self.stages.config
        self.stopper = Stopper(self.stages.mesh, config.trainer.shutdown_timeout_s)
        self.watchdog = Watchdog(self.stages.mesh, config.trainer.limits_s, self.stopper)
        self._outage = Outage(config.reward.max_unscored_steps, speaks=self.stages.mesh.is_main)
        self.stateful: dict[str, Stateful] = {  # what a checkpoint keeps besides tensors, by name
            "trainer": self,
            "actor": self.stages.actor,
            "order": self.stages.order,
            "kl_controller": self.stages.kl_controller,
            "lengths": self.stages.lengths,
        }
        self.steps_done = 0
        self._validated_at = -1  # the steps that were done at the last validation
        self._drift_said = False
        self._rows: list[dict[str, Any]] = []  # the last step's samples, for the files

    def run(self) -> None:
        """All steps that are left. With validation data it validates before the first (`val_before_train`), every
        `test_freq` and after the last; with `val_only` it does that alone, once. Raises Stopped after a signal, when
        the state is saved."""
        s = self.stages
        memory = explaining_lack_of_memory(s.config, s.plan, s.layout, lambda: self.watchdog.failed_in)
        with self.stopper.listening(), self.watchdog.watching(), memory, Session(self) as session:
            if s.config.trainer.val_only:
                with self.watchdog.stage("validate"):
                    self.validate(session.report)
            else:
                self._run_steps(session)
        self.close()

    def _run_steps(self, session: Session) -> None:
        s, trainer = self.stages, self.config.trainer
        while True:
            session.note()
            self.stopper.check()
            self._outage.check()
            if self._validation_is_due():
                with self.watchdog.stage("validate"):
                    self.validate(session.report)
                session.note_validation()
            session.save_if_due()
            if self.steps_done == s.total_steps:
                break
            session.report.step(self.step(), self._rows)
        if trainer.save_final:
            save_final(
                s.actor.policy,
                s.tokenizer,
                session.report.folder,
                s.mesh,
                merged=trainer.save_merged,
                way_on=self.watchdog.way_on,
                saving=partial(self.watchdog.stage, "save"),
                check_stop=self.stopper.check,
            )

    def step(self) -> StepRecord:
        """One rollout and its updates; every rank calls it. Raises RuntimeError when sampler and trainer disagree."""
        s, config, step = self.stages, self.config, self.steps_done
        clock = Clock(s.mesh.device, s.engine_bytes, self.watchdog.stage)
        own_probes: list[Rollout] = []
        filled = fill_step(partial(self._draw, clock, own_probes), config)
        probes = share_probes(own_probes, s.mesh)
        samples, rollouts = filled.samples, [sample.rollout for sample in filled.samples]
        self._outage.note(samples, step)
        s.lengths.note(rollouts)
        scoring = build_scoring_batches(rollouts, s.share) if step == 0 or needs_terms(config) else ()
        seen: dict[str, float] = {}
        if step == 0 or probes:
            with clock("gate"):  # before any update: every response token, trained or not, or those of the probes
                seen = s.actor.gap(build_scoring_batches(probes, s.share) if probes else scoring).reduce(s.mesh)
                self._watch_gap(seen)
        with clock("terms"):  # what the reward's KL and rejection need of whole sequences
            terms = sequence_terms(s.actor, scoring, len(rollouts), config, s.kl_controller, s.mesh)
        groups = make_groups(samples, config, terms)
        mini_batches = self._mini_batches(rollouts, groups)
        with clock("old"):  # one update: the ratio is 1, and the logprobs of the update are those of the rollout
            old_R = s.actor.old_logprobs(mini_batches) if s.layout.updates_per_step > 1 else None
        with clock("ref"):
            ref_R = s.actor.ref_logprobs(mini_batches)
        self.stopper.check()
        with clock("update"):
            sums, about = Sums(), {"rollouts": rollouts, "advantages_N": groups.advantages_N}
            dump = partial(dump_bad_update, **about, step=step + 1, mesh=s.mesh, folder=self.watchdog.faults)
            update = s.actor.update(mini_batches, old_R, ref_R, sums, dump)
            reduced = sums.reduce(s.mesh)
        clock.note_work("update", s.peak_seconds(mini_batches, config.actor.ppo_epochs))
        self._watch_gap(reduced)
        self.steps_done += 1
        self._rows = answer_rows(samples, filled.prompts)
        more = filled.metrics | gate_metrics(seen)
        return make_record(self.steps_done, samples, groups, reduced, update, clock, config, more)

    def validate(self, report: Report | None = None) -> Validation:
        """The held-out score of the weights as they are."""
        s, step = self.stages, self.steps_done
        with s.engine_awake():
            own = draw_answers(s.engine, s.val.prompts, self.config, s.mesh, step=step)
        pass_score = self.config.rollout.val_kwargs.pass_score
        result, samples = validate(own, s.rewards, s.val.prompts, s.tokenizer, s.mesh, step=step, pass_score=pass_score)
        self._validated_at = step
        if report is not None:
            report.validation(step, result, answer_rows(samples, s.val.prompts))
        return result

    def _validation_is_due(self) -> bool:
        step, trainer = self.steps_done, self.config.trainer
        if not len(self.stages.val) or step == self._validated_at:
            return False
        last = step == self.stages.total_steps
        return last or (trainer.val_before_train if step == 0 else due(step, trainer.test_freq))

    def state(self) -> dict[str, Any]:
        return {"steps_done": self.steps_done, "validated_at": self._validated_at, "drift_said": self._drift_said}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.steps_done, self._validated_at = state["steps_done"], state["validated_at"]
        self._drift_said = state["drift_said"]

    def _watch_gap(self, sums: Mapping[str, float]) -> None:
        """Stops the run when sampler and trainer disagree; a drift is said once, and stays in the metrics."""
        drift = check_gap(sums, self.config)
        if drift and not self._drift_said and self.stages.mesh.is_main:
            log.warning(drift)
            self._drift_said = True

    def _draw(self, clock: Clock, probes: list[Rollout], attempt: int) -> tuple[list[Prompt], list[Sample]]:
        """The next prompts, and the scored samples of all ranks. This engine's probes, if any, go to `probes`."""
        s, config, step = self.stages, self.config, self.steps_done
        prompts = s.order.take()
        requests = make_requests(
            prompts,
            config.rollout.n,
            run_seed=config.trainer.seed,
            step=step,
            max_tokens=config.data.max_response_length,
            attempt=attempt,
            expected=s.lengths.expected,
        )
        with ExitStack() as awake:
            with clock("sync"):
                awake.enter_context(s.engine_awake())
            with clock("gen"):
                own = draw_own(s.engine, requests, config.rollout.n, s.sampling, s.mesh)
                probes += draw_probes(s.engine, requests, config.rollout.n, s.sampling, s.mesh)
            clock.note_rollout_memory()
        self.stopper.check()  # what was drawn is drawn again after the resume
        rows = drawing_rows(requests, config.rollout.n, s.mesh.engines)
        with clock("reward"):
            own_samples = score_own(s.rewards, own, prompts, s.tokenizer, s.mesh, step=step)
            return prompts, share_samples(own_samples, s.mesh, rows)

    def _mini_batches(self, rollouts: Sequence[Rollout], groups: Groups) -> list[MiniBatch]:
        actor, layout = self.config.actor, self.stages.layout
        return build_mini_batches(
            rollouts,
            groups.advantages_N.numpy(),
            groups.counted_N.numpy(),
            self.stages.share,
            sequences=layout.sequences_per_update,
            keep_zero_advantage=uses_reference(actor) or actor.entropy_coeff != 0,
            loss_agg_mode=str(actor.loss_agg_mode),
            max_response_length=layout.max_response_length,
            loss_scale_factor=actor.loss_scale_factor,
        )

    def close(self) -> None:
        self.stages.rewards.close()
        self.stages.engine.close()
        self.stages.mesh.close()
