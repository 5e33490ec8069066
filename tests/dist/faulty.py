"""Faults for small_runs.py: each function is called in a rank before its run begins. They patch this process alone."""

from __future__ import annotations

import errno
import functools
import os
import signal
from collections.abc import Callable
from typing import Any


def _rank() -> int:
    return int(os.environ["RANK"])


def _before(module: Any, name: str, action: Callable[[int], object]) -> None:
    """Call action(number of the call, from 1) before each call of module.name."""
    original, calls = getattr(module, name), 0

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        action(calls)
        return original(*args, **kwargs)

    setattr(module, name, wrapped)


def _die_at(call: int) -> Callable[[int], object]:
    return lambda calls: os.kill(os.getpid(), signal.SIGKILL) if calls == call else None


def end_soon() -> None:
    """The ranks look more often, and give the one that failed less time for its last words: nobody kills it as soon as
    they end, which torchrun would do. That time is more than two looks, which it waits for them."""
    from fastgrpo import watchdog

    watchdog.POLL_S, watchdog.GRACE_S = 0.25, 1.5


def die_before_the_index() -> None:
    from fastgrpo.checkpoint import saver

    end_soon()
    _before(saver, "write_index", _die_at(3))


def die_before_the_commit() -> None:
    from fastgrpo.checkpoint import saver

    end_soon()
    _before(saver, "commit", _die_at(3))


def die_before_latest_moves() -> None:
    from fastgrpo.checkpoint import folders

    end_soon()
    _before(folders, "write_durably", _die_at(6))  # manifest and pointer of each save


def die_before_the_final_model() -> None:
    """When the last checkpoint is complete."""
    from fastgrpo import final_save
    from fastgrpo.checkpoint import saver

    save = saver.Saver.save
    saver.Saver.save = lambda self, manifest, state, wait: save(self, manifest, state, wait=True)
    _before(final_save, "save_trained", _die_at(1))


def stop_after_each_step() -> None:
    """As a scheduler would; on the last rank only, the others have to be told."""
    from fastgrpo.report import Report

    if _rank() == int(os.environ["WORLD_SIZE"]) - 1:
        _before(Report, "step", lambda calls: os.kill(os.getpid(), signal.SIGTERM))


def stop_in_the_rollout_of_step_3() -> None:
    from fastgrpo import trainer

    if _rank() == 1:
        _before(trainer, "draw_own", lambda calls: os.kill(os.getpid(), signal.SIGUSR1) if calls == 3 else None)


def stop_in_the_rollout_of_step_4() -> None:
    from fastgrpo import trainer

    if _rank() == 1:
        _before(trainer, "draw_own", lambda calls: os.kill(os.getpid(), signal.SIGUSR1) if calls == 4 else None)


def die_on_rank_0_before_the_commit() -> None:
    from fastgrpo.checkpoint import saver

    if _rank() == 0:
        _before(saver, "commit", _die_at(3))


def fail_at_the_second_index() -> None:
    """Of rank 0, when the other nodes have had the word for theirs."""
    from fastgrpo.checkpoint import saver

    def action(calls: int) -> None:
        if calls == 2 and _rank() == 0:
            raise OSError(errno.ENOSPC, "No space left on device")

    _before(saver, "write_list", action)


def rank_1_is_gone_when_asked_to_stop() -> None:
    """What torchrun does when a rank has died: SIGTERM to those that are left."""
    from fastgrpo import trainer

    def action(calls: int) -> None:
        if calls == 3:
            os.kill(os.getpid(), signal.SIGKILL if _rank() == 1 else signal.SIGTERM)

    _before(trainer, "share_samples", action)


def rank_1_cannot_write_its_second_shard() -> None:
    from fastgrpo.checkpoint import saver

    def action(calls: int) -> None:
        if calls == 2 and _rank() == 1:
            raise OSError(errno.ENOSPC, "No space left on device")

    _before(saver, "write_shard", action)


def stall_the_writer(call: int) -> None:
    """From this shard on, as a disk that does not answer."""
    import time

    from fastgrpo.checkpoint import saver

    _before(saver, "write_shard", lambda calls: time.sleep(60) if calls >= call else None)


def stall_in_the_last_checkpoint() -> None:
    stall_the_writer(4)


def stall_and_be_stopped() -> None:
    """The signal comes when the save of step 2 has begun."""
    from fastgrpo import trainer

    stall_the_writer(2)
    if _rank() == 0:
        _before(trainer, "draw_own", lambda calls: os.kill(os.getpid(), signal.SIGTERM) if calls == 3 else None)


def stop_at_the_end_of_step_2() -> None:
    """Before its validation."""
    from fastgrpo.report import Report

    _before(Report, "step", lambda calls: os.kill(os.getpid(), signal.SIGTERM) if calls == 2 else None)


def die_in_the_rollout_that_follows() -> None:
    from fastgrpo import trainer

    _before(trainer, "share_samples", _die_at(1))


def full_disk_for_the_rows_of_step_2() -> None:
    """And for its answers; not for the checkpoints."""
    from fastgrpo import run_files
    from fastgrpo.metrics import JsonlFile

    _before(run_files, "write_rows", _full_disk_at(2, 2))
    _before(JsonlFile, "flush", _full_disk_at(3, 3))  # the save of step 1 flushes as well


def full_disk_for_rows_from_step_3() -> None:
    """With a save after each step."""
    from fastgrpo.metrics import JsonlFile

    _before(JsonlFile, "flush", _full_disk_at(5, 99))


def delete_the_rows_in_step_4() -> None:
    from fastgrpo.report import Report

    original = Report.step

    def step(self: Any, record: Any, rollouts: Any) -> None:
        if record.step == 4:
            (self.folder / "metrics.jsonl").unlink()
        original(self, record, rollouts)

    Report.step = step


def full_disk_for_rows_from_step_3_and_killed_in_step_8() -> None:
    """For metrics.jsonl alone."""
    from fastgrpo import trainer
    from fastgrpo.metrics import JsonlFile

    _before(JsonlFile, "flush", _full_disk_at(4, 99))  # after steps 1 and 2 and the save of 2
    _before(trainer, "draw_own", _die_at(8))


def move_the_run_folder_in_step_3() -> None:
    from fastgrpo.report import Report

    original, calls = Report.step, 0

    def step(self: Any, *args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            self.folder.rename(self.folder.parent.parent / "moved")
        original(self, *args)

    Report.step = step


def _full_disk_for_the_model(last: int) -> None:
    """As safetensors says it, when a part of the folder is written."""
    from safetensors import SafetensorError

    from fastgrpo import final_save
    from fastgrpo.policy import weights

    def action(calls: int) -> None:
        if calls <= last:
            raise SafetensorError("Error while serializing: IoError(Os { code: 28, StorageFull })")

    final_save.RETRY_S, final_save.WAIT_FOR_ROOM_S = 0.1, 1.0
    _before(weights, "save_file", action)


def full_disk_for_the_model_once() -> None:
    _full_disk_for_the_model(1)


def full_disk_for_the_model() -> None:
    _full_disk_for_the_model(99)


def full_disk_for_the_model_and_stopped() -> None:
    from fastgrpo import final_save

    _full_disk_for_the_model(1)
    final_save.WAIT_FOR_ROOM_S = 60.0
    _before(final_save, "_sleep", lambda calls: os.kill(os.getpid(), signal.SIGTERM))


def no_room_for_the_model() -> None:
    from fastgrpo import final_save

    final_save.free_bytes = lambda folder: 100_000


def wait_after_step_4_and_be_stopped() -> None:
    """Until there is a file `go` beside the run folder."""
    import time

    from fastgrpo.report import Report

    original, calls = Report.step, 0

    def step(self: Any, *args: Any) -> None:
        nonlocal calls
        calls += 1
        original(self, *args)
        while calls == 4 and not (self.folder.parent / "go").exists():
            time.sleep(0.05)
        if calls == 4:
            os.kill(os.getpid(), signal.SIGUSR1)

    Report.step = step


def stop_before_step_1() -> None:
    from fastgrpo import trainer

    _before(trainer, "draw_own", lambda calls: os.kill(os.getpid(), signal.SIGTERM) if calls == 1 else None)


def _full_disk_at(first: int, last: int) -> Callable[[int], object]:
    def action(calls: int) -> None:
        if first <= calls <= last:
            raise OSError(errno.ENOSPC, "No space left on device")

    return action


def full_disk_from_step_2_and_stopped() -> None:
    from fastgrpo.checkpoint import saver

    stop_at_the_end_of_step_2()
    _before(saver, "write_shard", _full_disk_at(2, 99))


def full_disk_in_the_last_checkpoint() -> None:
    from fastgrpo.checkpoint import saver

    _before(saver, "write_shard", _full_disk_at(4, 4))


def full_disk_at_the_start() -> None:
    from fastgrpo import report

    _before(report, "write_durably", _full_disk_at(1, 1))


def full_disk_at_step_2_and_stopped_in_step_3() -> None:
    """There is room again when the run is told to stop."""
    from fastgrpo import trainer
    from fastgrpo.checkpoint import saver

    _before(trainer, "draw_own", lambda calls: os.kill(os.getpid(), signal.SIGTERM) if calls == 3 else None)
    _before(saver, "write_shard", _full_disk_at(2, 2))


def full_disk_and_stopped_in_step_2() -> None:
    from fastgrpo import trainer
    from fastgrpo.checkpoint import saver

    _before(trainer, "draw_own", lambda calls: os.kill(os.getpid(), signal.SIGTERM) if calls == 2 else None)
    _before(saver, "write_shard", _full_disk_at(1, 99))


def press_ctrl_c_twice() -> None:
    """The second time a second later, while the first save hangs; each press arrives twice."""
    import time

    from fastgrpo.checkpoint import saver
    from fastgrpo.report import Report

    def hang(calls: int) -> None:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)

    _before(Report, "step", lambda calls: [os.kill(os.getpid(), signal.SIGINT) for _ in range(2)])
    _before(saver.Saver, "_plan", hang)


def stop_between_reward_and_update() -> None:
    """After the adaptive coefficient of the step has moved."""
    from fastgrpo import trainer

    if _rank() == 0:
        _before(trainer, "make_groups", lambda calls: os.kill(os.getpid(), signal.SIGTERM) if calls == 3 else None)


def _raise_in(module: Any, name: str) -> None:
    """On the last rank, in the second call."""
    end_soon()
    if _rank() == int(os.environ["WORLD_SIZE"]) - 1:

        def action(calls: int) -> None:
            if calls == 2:
                raise ValueError(f"no {name} today")

        _before(module, name, action)


def raise_in_reward() -> None:
    from fastgrpo import trainer

    _raise_in(trainer, "score_own")


def raise_in_packing() -> None:
    from fastgrpo import trainer

    _raise_in(trainer, "build_mini_batches")


def raise_in_forward() -> None:
    from fastgrpo.policy.model import PolicyModule

    _raise_in(PolicyModule, "forward")


def raise_in_save() -> None:
    from fastgrpo.checkpoint import saver

    _raise_in(saver.Saver, "save")


def raise_a_mistake_of_the_user() -> None:
    """On all ranks at once: one of them is to speak."""
    from fastgrpo import trainer
    from fastgrpo.errors import UserError

    def action(calls: int) -> None:
        if calls == 2:
            raise UserError("this reward is no number")

    end_soon()
    _before(trainer, "score_own", action)


def be_killed_in_reward() -> None:
    """The last rank, in the second step; the others meet a broken collective."""
    from fastgrpo import trainer

    if _rank() == int(os.environ["WORLD_SIZE"]) - 1:
        _before(trainer, "score_own", _die_at(2))


def kill_rank_0_in_reward() -> None:
    """Which holds the store where no torchrun does."""
    from fastgrpo import trainer

    if _rank() == 0:
        _before(trainer, "score_own", _die_at(2))


def hang_in_reward() -> None:
    import time

    from fastgrpo import trainer

    end_soon()
    if _rank() == 1:
        _before(trainer, "score_own", lambda calls: time.sleep(60) if calls == 2 else None)


def hang_in_layer_1() -> None:
    """Of the backward's or forward's attention, in the second update."""
    import time

    from transformers.models.qwen2 import modeling_qwen2

    class Attention(modeling_qwen2.Qwen2Attention):
        seen = 0

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if self.layer_idx == 1 and not torch_grad_off():
                Attention.seen += 1
                if Attention.seen == 2 and _rank() == 0:
                    time.sleep(60)
            return super().forward(*args, **kwargs)

    def torch_grad_off() -> bool:
        import torch

        return not torch.is_grad_enabled()

    modeling_qwen2.Qwen2Attention = Attention  # pyright: ignore[reportAttributeAccessIssue]


def be_stopped_in_step_2() -> None:
    """As a process that the kernel no longer runs: neither an answer nor an end."""
    from fastgrpo import trainer

    if _rank() == 1:
        _before(trainer, "score_own", lambda calls: os.kill(os.getpid(), signal.SIGSTOP) if calls == 2 else None)


def draw_slowly() -> None:
    """0.6 s a token, on one rank."""
    import time

    from fastgrpo.rollout import hf

    if _rank() == 1:
        _before(hf, "_draw", lambda calls: time.sleep(0.6))


def poison_the_second_gradient() -> None:
    """Of the last rank alone."""
    from fastgrpo.policy import actor

    original, calls = actor.apply_update, 0

    def poisoned(optimizer: Any, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2 and _rank() == int(os.environ["WORLD_SIZE"]) - 1:
            optimizer.param_groups[0]["params"][0].grad.to_local().view(-1)[0] = float("nan")
        return original(optimizer, *args)

    actor.apply_update = poisoned


def _bad_scores(calls: int) -> None:
    """Of rank 1's reward, in the third step: a mistake that the worker would report of a value that is no number."""
    from fastgrpo.reward import RewardMistake

    if calls == 3 and _rank() == int(os.environ["WORLD_SIZE"]) - 1:
        raise RewardMistake("reward 'reward' returned float: inf (for sample 1 of prompt p)", "reward")


def return_infinity_in_step_3() -> None:
    """The last rank alone; without it no checkpoint is due."""
    from fastgrpo.reward import Rewards

    _before(Rewards, "score", _bad_scores)
