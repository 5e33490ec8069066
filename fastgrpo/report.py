"""What a run leaves behind and shows: the run folder, the loggers, the progress bar and a line a step.

    runs/<experiment>-<time>/
        config.yaml            the configuration as it was run
        engine.json            what drew the answers: library, version, model runner
        metrics.jsonl          a row a step, everything
        rollouts/step_*.jsonl  every sample with its reward
        validation/step_*.jsonl
        reward.png             the reward curve
        model/                 the trained model, a Hugging Face folder

Only rank 0 writes; on the other ranks every method returns at once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from tqdm import tqdm

from fastgrpo.config import RunConfig, to_document
from fastgrpo.evaluate import Validation
from fastgrpo.mesh import Mesh
from fastgrpo.metrics import JsonlFile, Logger, TensorBoard, WandB, plot_rewards, write_rows
from fastgrpo.records import StepRecord


class Report:
    def __init__(self, config: RunConfig, mesh: Mesh, total_steps: int, engine: Mapping[str, str]) -> None:
        trainer = config.trainer
        stamp = time.strftime("%Y%m%d-%H%M%S")
        self.folder = Path(
            mesh.broadcast(str(_free_folder(Path(trainer.run_dir), f"{trainer.experiment_name}-{stamp}")))
        )
        self._on = mesh.is_main
        self._config = config
        self._engine = engine
        self._total_steps = total_steps
        self._start = time.monotonic()
        self._validations: list[tuple[int, Validation]] = []
        self._curve: list[tuple[int, float]] = []
        self._loggers: list[Logger] = []
        if self._on:
            self._open()
        self._bar = tqdm(total=total_steps, unit="step", disable=None if self._on else True, leave=False)

    def _open(self) -> None:
        trainer = self._config.trainer
        self.folder.mkdir(parents=True, mode=0o700)
        (self.folder / "config.yaml").write_text(
            yaml.safe_dump(to_document(self._config), allow_unicode=True, sort_keys=False)
        )
        (self.folder / "engine.json").write_text(json.dumps(dict(self._engine), indent=1) + "\n")
        self._loggers.append(JsonlFile(self.folder / "metrics.jsonl"))
        if "tensorboard" in trainer.logger:
            self._loggers.append(TensorBoard(self.folder / "tensorboard"))
        if "wandb" in trainer.logger:
            self._loggers.append(WandB(self.folder, trainer.project_name, self.folder.name, self._config))

    def say(self, text: str) -> None:
        if self._on and "console" in self._config.trainer.logger:
            tqdm.write(text)

    def step(self, record: StepRecord, rollouts: Sequence[Mapping[str, Any]]) -> None:
        if not self._on:
            return
        write_rows(self.folder / "rollouts" / f"step_{record.step:06d}.jsonl", rollouts)
        for logger in self._loggers:
            logger.log(record.step, record.metrics)
        if "reward/mean" in record.metrics:
            self._curve.append((record.step, record.metrics["reward/mean"]))
        self._bar.update(1)
        self.say(step_line(record, self._total_steps))
        every = self._config.trainer.show_group_freq
        if every > 0 and (record.step - 1) % every == 0:
            self.say(group_lines(record, rollouts))

    def answers(self, step: int) -> Path | None:
        """Where the validation of this step writes its answers, on the rank that writes."""
        return self.folder / "validation" / f"step_{step:06d}.jsonl" if self._on else None

    def validation(self, step: int, result: Validation) -> None:
        if not self._on:
            return
        self._validations.append((step, result))
        for logger in self._loggers:
            logger.log(step, result.metrics)
        score = "nothing scored" if result.score is None else f"{result.score:.4f}"
        self.say(f"validation at step {step}: {score} (n={result.samples})")

    def close(self) -> None:
        if not self._on:
            return
        self._bar.close()
        for logger in self._loggers:
            logger.close()
        scored = [(step, v.score) for step, v in self._validations if v.score is not None]
        if self._curve or scored:
            steps, rewards = [step for step, _ in self._curve], [reward for _, reward in self._curve]
            plot_rewards(self.folder / "reward.png", steps, rewards, scored)
        self.say(self._last_line())

    def _last_line(self) -> str:
        seconds = f"in {time.monotonic() - self._start:.0f} s: {self.folder}"
        scored = [v for _, v in self._validations if v.score is not None]
        if not scored:
            return f"{len(self._curve)} steps {seconds}"
        before, after = scored[0], scored[-1]
        return f"validation before {before.score:.2f} after {after.score:.2f} (n={after.samples}) {seconds}"


def _free_folder(parent: Path, name: str) -> Path:
    """Two runs started in one second get two folders."""
    candidates = (parent / (name + suffix) for suffix in ("", *(f"-{i}" for i in range(1, 1000))))
    return next(folder for folder in candidates if not folder.exists())


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
