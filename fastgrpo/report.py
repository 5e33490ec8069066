"""What a run leaves behind and shows: the run folder, the loggers, the progress bar and a line a step.

    runs/<experiment>-<time>/
        config.yaml            the configuration as it was run last
        starts.jsonl           a row a start: command, code, versions, ranks, data (provenance.py)
        engine.json            what drew the answers: library, version, model runner
        metrics.jsonl          a row a step, everything
        rollouts/step_*.jsonl  every sample with its reward
        validation/step_*.jsonl
        reward.png             the reward curve
        checkpoints/           what to resume from (checkpoint/folders.py)
        model/                 the trained model, a Hugging Face folder
        finished               the number of steps, once all is written
        aside-<time>/          what lay after the checkpoint that a run was resumed from

A resumed run goes on in these files: rows and answers after the checkpoint's step are set aside first, so that no step
is there twice, and rows that the checkpoint has because they could not be written before it are written:

    rows since the last fsync that worked  --state()-->  checkpoint.json  --take_up-->  metrics.jsonl

Only rank 0 writes; on the other ranks every method returns at once.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from tqdm import tqdm

from fastgrpo.checkpoint import FINISHED, Start
from fastgrpo.checkpoint.disk import sync_file, sync_folder, write_durably
from fastgrpo.config import RunConfig, to_document
from fastgrpo.errors import ConfigError, RunError
from fastgrpo.evaluate import Validation
from fastgrpo.history import History, rows_after, take_up
from fastgrpo.mesh import Mesh
from fastgrpo.metrics import JsonlFile, Logger, TensorBoard, WandB, plot_rewards, row_text
from fastgrpo.records import StepRecord
from fastgrpo.run_files import RunFiles
from fastgrpo.val_metrics import in_words

log = logging.getLogger("fastgrpo")


class Report:
    def __init__(
        self, config: RunConfig, mesh: Mesh, total_steps: int, start: Start, provenance: Mapping[str, Any]
    ) -> None:
        """`provenance`: where this start comes from, a row of starts.jsonl."""
        self.folder = start.folder
        self._on = mesh.is_main
        self._config = config
        self._total_steps = total_steps
        self._begun = time.monotonic()
        self._history = History()
        self.failed_saves = 0  # so far: in the rows of the steps to come, a run that cannot save must not look healthy
        self._rows_after = rows_after(start)
        self._unflushed: list[Path] = []
        self._loggers: list[Logger] = []
        self._files = RunFiles(self.folder)
        if self._on:
            try:
                self._open(start, provenance)
            except OSError as error:
                raise ConfigError(f"{self.folder} cannot be written to: {error}; mend it, and start again") from error
        self._bar = tqdm(
            total=total_steps, initial=start.step, unit="step", disable=None if self._on else True, leave=False
        )
        for line in start.said:
            self.say(line)

    def _open(self, start: Start, provenance: Mapping[str, Any]) -> None:
        trainer, metrics = self._config.trainer, self.folder / "metrics.jsonl"
        if start.checkpoint is not None:
            self._history = take_up(start, best_mode=str(trainer.best_mode))
        self._write_config()
        write_durably(self.folder / "engine.json", json.dumps(provenance["engine"], indent=1) + "\n")
        starts = self.folder / "starts.jsonl"
        before = starts.read_text(encoding="utf-8", errors="replace") if starts.exists() else ""
        write_durably(starts, before[: before.rfind("\n") + 1] + row_text(provenance))  # without half a row
        self._rows = JsonlFile(metrics)
        self._loggers.append(self._rows)
        if "tensorboard" in trainer.logger:
            self._loggers.append(TensorBoard(self.folder / "tensorboard", start.step))
        if "wandb" in trainer.logger:
            self._loggers.append(WandB(self.folder, trainer.project_name, self.folder.name, self._config))

    def _write_config(self) -> None:
        document = yaml.safe_dump(to_document(self._config), allow_unicode=True, sort_keys=False)
        write_durably(self.folder / "config.yaml", document)

    def _look_for_the_folder(self, step: int) -> None:
        if self._files.went_away(step):
            self._write_config()
            self._rows.reopen()
        self._files.look_for(self._rows, step)

    def say(self, text: str) -> None:
        if self._on and "console" in self._config.trainer.logger:
            tqdm.write(text)

    def step(self, record: StepRecord, rollouts: Sequence[Mapping[str, Any]]) -> None:
        if not self._on:
            return
        file = self.folder / "rollouts" / f"step_{record.step:06d}.jsonl"
        self._files.attempt("the run folder", lambda: self._look_for_the_folder(record.step))
        self._files.write_rows("rollouts", file, rollouts)
        self._unflushed.append(file)
        lost = {"checkpoint/failed": float(self.failed_saves)} if self.failed_saves else {}
        self._log(record.step, {**record.metrics, **lost})
        self._bar.update(1)
        self.say(step_line(record, self._total_steps))
        every = self._config.trainer.show_group_freq
        if every > 0 and (record.step - 1) % every == 0:
            self.say(group_lines(record, rollouts))

    def validation(self, step: int, result: Validation, answers: Sequence[Mapping[str, Any]]) -> None:
        if not self._on:
            return
        self._files.attempt("the run folder", lambda: self._look_for_the_folder(step))
        self._files.write_rows("validation", self.folder / "validation" / f"step_{step:06d}.jsonl", answers)
        self._log(step, result.metrics)
        score = "nothing scored" if result.score is None else f"{result.score:.4f}"
        self.say(f"validation at step {step}: {score} (n={result.samples})")
        if len(result.sets) > 1 or self._config.rollout.val_kwargs.n > 1:  # else the line above says it all
            for name, metrics in result.sets.items():
                self.say(f"  {name}: {in_words(metrics)}")

    def value_at(self, step: int, metric: str | None) -> float | None:
        """A metric of this step, if it was measured there; that a metric has never been measured is said. None on the
        ranks that do not write."""
        if self._on and metric and not self._history.knows(metric):
            self.say(f"trainer.best_metric={metric}: no row of metrics.jsonl has it, so step {step} cannot be the best")
        return self._history.value_at(step, metric)

    def flush(self) -> None:
        """Everything so far onto the disk: a checkpoint must not be newer than the rows before it. Rows for which that
        fails are in `state`, which is asked for after it."""
        if not self._on:
            return
        self._files.attempt(self._rows.name, self._rows.sync)
        for path in (path for path in self._unflushed if path.is_file()):
            self._files.attempt("fsync", partial(sync_file, path))
        for folder in {self.folder, *(path.parent for path in self._unflushed)}:
            if folder.is_dir():
                self._files.attempt("fsync", partial(sync_folder, folder))
        self._unflushed.clear()

    def state(self) -> dict[str, Any]:
        """For the checkpoint (history.py): the rows that may not be on the disk, and after which step the first is."""
        return {"rows": self._rows.not_synced() if self._on else "", "rows_after": self._rows_after}

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._files.failures:
            metrics = {**metrics, "files/failed_writes": float(self._files.failures)}
        for logger in self._loggers:
            self._files.attempt(logger.name, partial(logger.log, step, metrics))
        self._history.add({"step": step, **metrics})

    def close(self, *, finished: bool) -> None:
        """`finished`: every step is done and the model is saved. The curve is drawn then; a run that was told to stop
        has no time for it. Raises RunError, when all is written, if the folder was moved meanwhile: such a run must not
        look as if all were well, so it does not count as finished."""
        if not self._on:
            return
        self._bar.close()
        attempt = partial(self._files.attempt, again=False)
        attempt("the run folder", lambda: self._look_for_the_folder(self._history.steps))
        closed = {logger.name: attempt(logger.name, logger.close) for logger in self._loggers}
        moved_at = self._files.moved_at
        if finished:
            attempt("reward.png", self._draw_curve)
        if finished and moved_at is None:
            attempt(FINISHED, lambda: write_durably(self.folder / FINISHED, f"{self._total_steps}\n"))
            self.say(self._last_line())
        self._files.sum_up(rows_are_whole=closed[self._rows.name])
        if finished and moved_at is not None:
            raise RunError(
                f"all steps are done, but {self.folder} was moved or deleted while the run wrote into it, which was "
                f"noticed after step {moved_at}: what was written before is where it went, what came after is in a new "
                "folder of this name, which lacks the rest and so is not marked as finished"
            )

    def _draw_curve(self) -> None:
        curve, scored = self._history.curve, [(step, score) for step, score, _ in self._history.scores]
        if curve or scored:
            steps, rewards = [step for step, _ in curve], [reward for _, reward in curve]
            plot_rewards(self.folder / "reward.png", steps, rewards, scored)

    def _last_line(self) -> str:
        seconds = f"in {time.monotonic() - self._begun:.0f} s: {self.folder}"
        scores = self._history.scores
        if not scores:
            return f"{self._history.steps} steps {seconds}"
        (_, before, _), (_, after, samples) = scores[0], scores[-1]
        return f"validation before {before:.2f} after {after:.2f} (n={samples}) {seconds}"


def step_line(record: StepRecord, total_steps: int) -> str:
    m, t = record.metrics, record.timings
    kl = "" if record.kl is None else f" | kl {record.kl:.4f}"
    phases = " ".join(
        f"{name} {t[name]:.1f}s" for name in ("gen", "reward", "old", "ref", "update", "sync") if name in t
    )
    reward = f"{m['reward/mean']:.3f} ±{m['reward/std']:.3f}" if "reward/mean" in m else "nothing scored"
    left_out = int(m["reward/unscored"] + m["reward/timeout"] + m["reward/error"])
    reward += f" ({left_out} unscored)" if left_out else ""
    return (
        f"step {record.step}/{total_steps} | reward {reward}{kl} | loss {record.loss:.4f} | {phases} | "
        f"{t['step']:.1f}s | {_rate(m['perf/tokens_per_s'])} tok/s"
    )


def _rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s / 1000:.1f}k" if tokens_per_s >= 1000 else f"{tokens_per_s:.0f}"


def group_lines(record: StepRecord, rollouts: Sequence[Mapping[str, Any]]) -> str:
    """One group of the step, the one whose rewards differ most: what the model was asked, said and was told."""
    spreads = [
        max((r for r in g if r is not None), default=0) - min((r for r in g if r is not None), default=0)
        for g in record.rewards_PG
    ]
    chosen = max(range(len(spreads)), key=lambda p: spreads[p])
    group_size = len(record.rewards_PG[chosen])
    prompt = str(rollouts[chosen * group_size]["prompt"])
    mean = record.group_means_P[chosen]
    lines = [f"  prompt: {_short(prompt)}", f"  group mean {'-' if mean is None else f'{mean:.3f}'}"]
    for reward, advantage, response in zip(
        record.rewards_PG[chosen], record.advantages_PG[chosen], record.responses_PG[chosen], strict=True
    ):
        shown = "unscored" if reward is None else f"{reward:.2f}"
        lines.append(f"    reward {shown:>8}  advantage {advantage:+.2f}  {_short(response)}")
    return "\n".join(lines)


def _short(text: str, limit: int = 80) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 3] + "..."
