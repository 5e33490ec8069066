"""Many tiny steps of a whole run in this process: memory, open files and threads do not grow with their number."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from fastgrpo import RunConfig, Trainer
from fastgrpo.config import ActorConfig, DataConfig, Device, ModelConfig, OptimConfig, RewardConfig, RolloutConfig
from fastgrpo.config import TrainerConfig as Options
from fastgrpo.report import Report

MIB = 1 << 20


def own_threads() -> list[str]:
    """The progress bar's monitor, one a process, stays."""
    return [thread.name for thread in threading.enumerate() if type(thread).__name__ != "TMonitor"]


def usage() -> tuple[int, int, int, int]:
    """(bytes resident, open files, threads, children) of this process."""
    process = psutil.Process()
    return process.memory_info().rss, process.num_fds(), len(own_threads()), len(process.children())


@pytest.mark.parametrize("steps", [30, pytest.param(300, marks=pytest.mark.slow)])
def test_nothing_grows(steps: int, make_tiny_model: Any, tmp_path: Path, monkeypatch: Any, mesh: Any) -> None:
    model = make_tiny_model("qwen2", tied=True, hidden_size=32, intermediate_size=48)
    config = RunConfig(
        model=ModelConfig(path=str(model)),
        data=DataConfig(train_batch_size=2, max_prompt_length=64, max_response_length=4),
        reward=RewardConfig(num_workers=1),
        rollout=RolloutConfig(name="hf", n=2),
        actor=ActorConfig(use_kl_loss=False, optim=OptimConfig(lr=1e-4)),
        trainer=Options(
            device=Device["cpu"],
            run_dir=str(tmp_path),
            max_steps=steps,
            save_freq=10,
            max_ckpt_to_keep=1,
            save_final=False,
            logger=[],
        ),
    )
    seen: list[tuple[int, int, int, int]] = []
    write = Report.step

    def noted(self: Report, *args: Any) -> None:
        write(self, *args)
        if len(seen) % 10 == 9:  # it takes longer than a step
            gc.collect()
        seen.append(usage())

    monkeypatch.setattr(Report, "step", noted)
    prompts = [f"Count to {i}" for i in range(4)]
    before = usage()
    Trainer(config, prompts=prompts, reward=lambda response: sum(map(ord, response)) % 7).run()
    after = usage()
    assert len(seen) == steps
    warm, last = seen[steps // 3 : 2 * steps // 3], seen[2 * steps // 3 :]  # each with its saves
    for index, name in enumerate(("memory", "open files", "threads", "children")):
        slack = 8 * MIB if index == 0 else 0
        assert min(row[index] for row in last) <= min(row[index] for row in warm) + slack, name  # without a save's own
    # The watchdog, the saver and the reward workers are gone; a process that an earlier test ended may go meanwhile.
    assert after[2] == before[2] and after[3] <= before[3], (before, after, own_threads())
    assert after[1] <= before[1] + 12  # two groups of a process group that stays (4 each), fonts, a selector
