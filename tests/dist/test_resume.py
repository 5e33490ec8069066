"""A run that is killed, stopped or moved goes on as if nothing had been: weights, rows and answers, bit for bit."""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file
from small_runs import SmallRuns, document

from fastgrpo.checkpoint.folders import find_checkpoints
from fastgrpo.checkpoint.index import read_index
from fastgrpo.checkpoint.tensors import full_masters
from fastgrpo.watchdog import ENDED

VALIDATED = {"data__val_files": ["arithmetic"], "data__arithmetic__val_size": 2, "trainer__test_freq": 2}
SAVED, MISUSE = 75, 2


@pytest.fixture(scope="module")
def unbroken(runs: SmallRuns, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """(folder of a run of 4 steps on 2 ranks, its seconds)."""
    folder = tmp_path_factory.mktemp("unbroken")
    start = time.monotonic()
    runs.start(2, document(folder, tiny_model, **VALIDATED)).finish()
    return only_run(folder), time.monotonic() - start


def only_run(folder: Path) -> Path:
    [run] = folder.iterdir()
    return run


def newest(folder: Path) -> Path:
    return max(folder.iterdir())


def rows(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what the clock says."""
    read = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(("timing_s/", "perf/"))} for row in read]


def answers(run: Path) -> dict[str, str]:
    return {
        f"{name}/{path.name}": path.read_text() for name in ("rollouts", "validation") for path in (run / name).iterdir()
    }


def masters(checkpoint: Path) -> dict[str, torch.Tensor]:
    names = [key.removeprefix("model.") for key in read_index(checkpoint / "state").state_dict_metadata]
    names = [name for name in names if not name.startswith("optimizer.")]
    return dict(full_masters(checkpoint / "state", {name: name for name in names}))


def assert_same_run(run: Path, right: Path) -> None:
    assert rows(run) == rows(right)
    assert answers(run) == answers(right)
    for name in ("model", "checkpoints/step_000004/model"):
        actual, expected = (load_file(folder / name / "model.safetensors") for folder in (run, right))
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[key], expected[key]) for key in expected)
    actual, expected = (masters(folder / "checkpoints" / "step_000004") for folder in (run, right))
    assert len(expected) > 20 and all(torch.equal(actual[key], expected[key]) for key in expected)
    assert (run / "finished").read_text() == "4\n"


def test_the_unbroken_run_moves_and_repeats(unbroken: tuple[Path, float], runs, tiny_model: Path, tmp_path: Path) -> None:
    run, _ = unbroken
    steps = [row["step"] for row in rows(run) if "actor/loss" in row]
    assert steps == [1, 2, 3, 4]
    assert [row["step"] for row in rows(run) if "val/reward" in row] == [0, 2, 4]
    assert [row["actor/lr"] for row in rows(run) if "actor/lr" in row] == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3, 1e-3])
    first, last = (masters(run / "checkpoints" / f"step_00000{step}") for step in (1, 4))
    assert max((last[key] - first[key]).abs().max() for key in first) > 1e-3
    saved = load_file(run / "checkpoints" / "step_000004" / "model" / "model.safetensors")
    final = load_file(run / "model" / "model.safetensors")
    assert all(torch.equal(saved[key], final[key]) for key in final)  # out of the shards and out of the policy
    assert (run / "checkpoints" / "latest").read_text() == "step_000004\n"


def kill_and_resume(runs: SmallRuns, configured: dict[str, Any], moment_s: float) -> None:
    run = runs.start(2, configured)
    time.sleep(moment_s)
    run.kill()
    run.wait()
    folder = Path(configured["trainer"]["run_dir"])
    if not (folder.exists() and any(path.joinpath("finished").exists() for path in folder.iterdir())):
        runs.start(2, configured).finish()


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 20))])
def test_killed_at_any_moment(
    seed: int, runs: SmallRuns, unbroken: tuple[Path, float], tiny_model: Path, tmp_path: Path
) -> None:
    right, seconds = unbroken
    kill_and_resume(runs, document(tmp_path, tiny_model, **VALIDATED), random.Random(seed).uniform(0.4, 0.98) * seconds)
    assert_same_run(newest(tmp_path), right)


@pytest.mark.parametrize(
    ("faults", "resumed_after"),
    [
        ("die_before_the_index", 2),
        pytest.param("die_before_the_commit", 2, marks=pytest.mark.slow),
        ("die_before_latest_moves", 3),
        pytest.param("die_before_the_final_model", 4, marks=pytest.mark.slow),
        ("stop_in_the_rollout_of_step_3", 2),
    ],
)
def test_ended_at_a_certain_moment(
    faults: str, resumed_after: int, runs: SmallRuns, unbroken: tuple[Path, float], tiny_model: Path, tmp_path: Path
) -> None:
    configured = document(tmp_path, tiny_model, trainer__logger=["console"], **VALIDATED)
    broken = runs.start(2, configured, faults=faults)
    codes = broken.wait()
    if faults.startswith("die"):
        assert codes[0] == -signal.SIGKILL
    else:
        assert codes == [SAVED, SAVED] and "stopped by SIGUSR1 after step 2" in broken.output()
    resumed = runs.start(2, configured)
    resumed.finish()
    assert f"after step {resumed_after} of 4, saved by 2 ranks" in resumed.output()
    assert_same_run(only_run(tmp_path), unbroken[0])


def test_damaged_checkpoints_are_passed_over(
    runs: SmallRuns, unbroken: tuple[Path, float], tiny_model: Path, tmp_path: Path
) -> None:
    """A truncated shard, a folder that was half copied, one that was being written, and a pointer to nowhere."""
    folder = tmp_path / unbroken[0].name
    shutil.copytree(unbroken[0], folder)
    (folder / "finished").unlink()
    checkpoints = folder / "checkpoints"
    shard = checkpoints / "step_000004" / "state" / "__1_0.distcp"
    shard.write_bytes(shard.read_bytes()[:1000])
    (checkpoints / "step_000003" / "model" / "model.safetensors").unlink()
    shutil.copytree(checkpoints / "step_000002", checkpoints / "step_000005.part")
    (checkpoints / "latest").write_text("step_000099\n")
    configured = document(tmp_path, tiny_model, trainer__logger=["console"], **VALIDATED)
    resumed = runs.start(2, configured)
    resumed.finish()
    said = resumed.output()
    assert f"not resumed from {checkpoints}/step_000004: state/__1_0.distcp has 1000 of " in said
    assert f"not resumed from {checkpoints}/step_000003: model/model.safetensors is missing" in said
    assert f"not resumed from {checkpoints}/step_000005.part: it was still being written" in said
    assert "it names 'step_000099', which is no complete checkpoint" in said
    assert f"resuming {folder} after step 2 of 4" in said
    assert_same_run(folder, unbroken[0])
    [aside] = folder.glob("aside-*")
    assert sorted(path.name for path in (aside / "checkpoints").iterdir()) == ["step_000003", "step_000004"]
    assert [json.loads(line)["step"] for line in (aside / "metrics.jsonl").read_text().splitlines()] == [3, 4, 4]
    assert not (checkpoints / "step_000005.part").exists()


def test_stopped_after_every_step_of_two_epochs(runs: SmallRuns, tiny_model: Path, tmp_path: Path) -> None:
    """8 prompts, batch 2: the epoch ends after step 4. Nothing is saved but on the signal."""
    options: dict[str, Any] = {"trainer__max_steps": None, "trainer__total_epochs": 2, "trainer__save_freq": -1}
    runs.start(1, document(tmp_path / "whole", tiny_model, **options)).finish()
    right = only_run(tmp_path / "whole")
    configured = document(tmp_path / "broken", tiny_model, **options)
    for step in range(1, 9):
        stopped = runs.start(1, configured, faults="stop_after_each_step")
        assert stopped.wait() == [SAVED], stopped.output()
        run = only_run(tmp_path / "broken")
        assert [row["step"] for row in rows(run)] == list(range(1, step + 1))
    runs.start(1, configured).finish()
    assert rows(run) == rows(right)
    assert answers_of_training(run) == answers_of_training(right)
    uids = [{json.loads(line)["uid"] for line in text.splitlines()} for _, text in sorted(answers_of_training(run).items())]
    assert set.union(*uids[:4]) == set.union(*uids[4:]) and len(set.union(*uids[:4])) == 8
    actual, expected = (load_file(folder / "model" / "model.safetensors") for folder in (run, right))
    assert all(torch.equal(actual[key], expected[key]) for key in expected)


def answers_of_training(run: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (run / "rollouts").iterdir()}


def test_a_step_that_was_left_leaves_no_trace(runs: SmallRuns, tiny_model: Path, tmp_path: Path) -> None:
    """Stopped when the adaptive KL coefficient had moved for a step whose update was not made."""
    options: dict[str, Any] = {
        "algorithm__use_kl_in_reward": True,
        "algorithm__kl_ctrl__type": "adaptive",
        "algorithm__kl_ctrl__kl_coef": 0.1,
        "algorithm__kl_ctrl__target_kl": 1e-4,
        "algorithm__kl_ctrl__horizon": 20,
        "trainer__save_freq": -1,
    }
    runs.start(1, document(tmp_path / "whole", tiny_model, **options)).finish()
    configured = document(tmp_path / "broken", tiny_model, **options)
    stopped = runs.start(1, configured, faults="stop_between_reward_and_update")
    assert stopped.wait() == [SAVED], stopped.output()
    runs.start(1, configured).finish()
    right, run = only_run(tmp_path / "whole"), only_run(tmp_path / "broken")
    [checkpoint] = (run / "checkpoints").glob("step_*")
    parts = json.loads((checkpoint / "checkpoint.json").read_text())["parts"]
    assert parts["trainer"]["steps_done"] == 2 and parts["kl_controller"]["coef"] != 0.1
    assert rows(run) == rows(right)


def test_nothing_is_saved_when_a_rank_is_missing(runs: SmallRuns, tiny_model: Path, tmp_path: Path) -> None:
    configured = document(tmp_path, tiny_model, trainer__save_freq=-1, trainer__shutdown_timeout_s=1)
    ended = runs.start(2, configured, faults="rank_1_is_gone_when_asked_to_stop")
    codes = ended.wait()
    assert codes[1] == -signal.SIGKILL and codes[0] not in (0, SAVED)
    assert "Traceback" not in ended.output()
    assert not (only_run(tmp_path) / "checkpoints").exists()


def test_a_rank_that_cannot_write_loses_that_save_alone(runs: SmallRuns, tiny_model: Path, tmp_path: Path) -> None:
    run = runs.start(2, document(tmp_path, tiny_model), faults="rank_1_cannot_write_its_second_shard")
    run.finish()
    folder = only_run(tmp_path)
    [line] = [line for line in run.output().splitlines() if line.startswith("CHECKPOINT NOT SAVED (step_000002): ")]
    assert "OSError: rank 1: OSError: [Errno 28] No space left" in line
    assert line.endswith(". The newest complete one is step_000001.")
    assert [row["step"] for row in rows(folder)] == [1, 2, 3, 4]
    failed = [row.get("checkpoint/failed") for row in rows(folder)]
    assert failed in ([None, None, 1, 1], [None, None, None, 1])  # heard of in step 3 or before it
    found = find_checkpoints(folder / "checkpoints")
    assert [manifest.step for _, manifest in found.complete] == [4, 3, 1] and found.passed_over == []


TEN = {"trainer__max_steps": 10, "trainer__save_freq": 2, "trainer__async_save": False}


@pytest.fixture(scope="module")
def ten_steps(runs: SmallRuns, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ten")
    runs.start(1, document(folder, tiny_model, **TEN)).finish()
    return only_run(folder)


def test_rows_that_waited_for_room_are_in_the_checkpoints(
    runs: SmallRuns, ten_steps: Path, tiny_model: Path, tmp_path: Path
) -> None:
    """metrics.jsonl alone cannot be written from step 3 on; killed in step 8."""
    configured = document(tmp_path, tiny_model, **TEN, trainer__logger=["console"])
    killed = runs.start(1, configured, faults="full_disk_for_rows_from_step_3_and_killed_in_step_8")
    assert killed.wait() == [-signal.SIGKILL]
    run = only_run(tmp_path)
    assert [row["step"] for row in rows(run)] == [1, 2]
    resumed = runs.start(1, configured)
    resumed.finish()
    said = resumed.output()
    assert "after step 6 of 10" in said and "has no row of" not in said
    assert f"{run}/metrics.jsonl: rows that could not be written before the checkpoint are written now: 4" in said
    read = rows(run)
    counted = [row.pop("files/failed_writes", None) for row in read]
    assert read == rows(ten_steps) and [row["step"] for row in read] == list(range(1, 11))
    assert counted == [None, None, None, 1, 3, 4, *[None] * 4]  # the save of step 4 tried as well
    assert answers_of_training(run) == answers_of_training(ten_steps)


@pytest.mark.parametrize(
    ("damage", "missing", "left"),
    [
        (lambda rows: rows[:5] + [rows[5][:-200]], "step 6", [1, 2, 3, 4, 5, 7, 8, 9, 10]),
        (lambda rows: [rows[0], *rows[3:]], "steps 2-3", [1, 4, 5, 6, 7, 8, 9, 10]),
        (None, "steps 1-6", [7, 8, 9, 10]),
    ],
)
def test_rows_that_somebody_took_are_named(
    damage: Callable[[list[bytes]], list[bytes]] | None,
    missing: str,
    left: list[int],
    runs: SmallRuns,
    ten_steps: Path,
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    folder = tmp_path / ten_steps.name
    shutil.copytree(ten_steps, folder)
    file, again = folder / "metrics.jsonl", str(folder / "checkpoints" / "step_000006")
    if damage is None:
        file.unlink()
    else:
        file.write_bytes(b"".join(damage(file.read_bytes().splitlines(keepends=True))))
    resumed = runs.start(1, document(tmp_path, tiny_model, **TEN, trainer__resume=again))
    resumed.finish()
    [line] = [line for line in resumed.output().splitlines() if "has no row of" in line]
    assert f"{file} has no row of {missing}: " in line and line.endswith("goes on after step 6 without it")
    assert rows(folder) == [row for row in rows(ten_steps) if row["step"] in left]
    assert [row["step"] for row in rows(folder)] == left


def test_ctrl_c_twice_ends_at_once(runs: SmallRuns, tiny_model: Path, tmp_path: Path) -> None:
    start = time.monotonic()
    run = runs.start(1, document(tmp_path, tiny_model, trainer__save_freq=-1), faults="press_ctrl_c_twice")
    assert run.wait() == [130]
    assert time.monotonic() - start < 30  # the save would have hung for 60
    assert run.output().count("Ctrl-C again ends at once") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (4, {"actor__ulysses_sequence_parallel_size": 2}),
        (1, {}),
        (2, {"actor__max_tokens_per_gpu": 80, "actor__gradient_checkpointing": 0}),
    ],
)
def test_resumed_on_another_layout(
    ranks: int, options: dict[str, Any], runs: SmallRuns, unbroken: tuple[Path, float], tiny_model: Path, tmp_path: Path
) -> None:
    """From step 2 of the unbroken run: the next step's loss, gradient and answers are the same, up to rounding."""
    folder = tmp_path / unbroken[0].name
    shutil.copytree(unbroken[0], folder)
    (folder / "finished").unlink()
    checkpoint = str(folder / "checkpoints" / "step_000002")
    runs.start(ranks, document(tmp_path, tiny_model, trainer__resume=checkpoint, **VALIDATED, **options)).finish()
    actual, expected = (
        next(row for row in rows(run) if row["step"] == 3 and "actor/loss" in row) for run in (folder, unbroken[0])
    )
    # terms of order 1 that cancel: what is left of them is their rounding
    assert actual["actor/loss"] == pytest.approx(expected["actor/loss"], rel=1e-5, abs=1e-6)
    assert actual["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=1e-5)
    assert actual["reward/mean"] == expected["reward/mean"]
    aside = next(folder.glob("aside-*"))
    assert sorted(path.name for path in (aside / "checkpoints").iterdir()) == ["step_000003", "step_000004"]


def test_validation_leaves_a_live_run_as_it_is(
    runs: SmallRuns, unbroken: tuple[Path, float], tiny_model: Path, tmp_path: Path
) -> None:
    """By the path of an older checkpoint while another process writes; the run then goes on as if nothing had been."""
    folder = tmp_path / unbroken[0].name
    shutil.copytree(unbroken[0], folder)
    (folder / "finished").unlink()
    shutil.rmtree(folder / "checkpoints" / "step_000004")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    options: dict[str, Any] = {"trainer__resume": str(folder / "checkpoints" / "step_000002"), "trainer__val_only": True}
    options |= {"actor__optim__lr": 1e-4, "rollout__n": 3, "trainer__max_steps": 3}  # which only updates read
    with FileLock(folder / ".lock"):
        runs.start(2, document(tmp_path, tiny_model, **VALIDATED, **options)).finish()
    assert before == {path: path.read_bytes() for path in before} and not list(folder.glob("aside-*"))
    [own] = tmp_path.glob("*-val")
    assert rows(own) == [row for row in rows(folder) if row["step"] == 2 and "val/reward" in row]
    runs.start(2, document(tmp_path, tiny_model, **VALIDATED)).finish()
    assert_same_run(folder, unbroken[0])


def test_a_finished_run_taken_up_again_is_found_by_auto(
    runs: SmallRuns, unbroken: tuple[Path, float], tiny_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / unbroken[0].name
    shutil.copytree(unbroken[0], folder)
    again = str(folder / "checkpoints" / "step_000002")
    stopped = runs.start(
        2, document(tmp_path, tiny_model, trainer__resume=again, **VALIDATED), faults="stop_after_each_step"
    )
    assert stopped.wait() == [SAVED, SAVED], stopped.output()
    assert not (folder / "finished").exists() and (folder / "checkpoints" / "latest").read_text() == "step_000003\n"
    runs.start(2, document(tmp_path, tiny_model, **VALIDATED)).finish()
    assert only_run(tmp_path) == folder
    assert_same_run(folder, unbroken[0])


def test_a_copied_checkpoint_is_gone_on_with_in_a_new_folder(
    runs: SmallRuns, unbroken: tuple[Path, float], tiny_model: Path, tmp_path: Path
) -> None:
    copied = shutil.copytree(unbroken[0] / "checkpoints" / "step_000002", tmp_path / "bak" / "step_000002")
    configured = document(tmp_path / "runs", tiny_model, trainer__resume=str(copied), **VALIDATED)
    runs.start(2, configured).finish()
    folder = only_run(tmp_path / "runs")
    assert rows(folder) == [row for row in rows(unbroken[0]) if row["step"] > 2]
    (folder / "finished").unlink()
    again = runs.start(2, document(tmp_path / "runs", tiny_model, trainer__logger=["console"], **VALIDATED))
    again.finish()
    assert "after step 4 of 4" in again.output() and "has no row of" not in again.output()  # it never had those of 1 and 2
    assert rows(folder) == [row for row in rows(unbroken[0]) if row["step"] > 2]
    assert [manifest.step for _, manifest in find_checkpoints(folder / "checkpoints").complete] == [4, 3, 2]
    actual, expected = (masters(run / "checkpoints" / "step_000004") for run in (folder, unbroken[0]))
    assert all(torch.equal(actual[key], expected[key]) for key in expected)


def change_the_batch(configured: dict[str, Any]) -> None:
    configured["data"]["train_batch_size"] = 4


def change_the_model(configured: dict[str, Any]) -> None:
    configured["model"]["path"] = configured["other_model"]


def change_the_rate(configured: dict[str, Any]) -> None:
    configured["actor"]["optim"]["lr"] = 2e-3


def change_the_template(configured: dict[str, Any]) -> None:
    configured["data"]["prompt_suffix"] = " Please."


REFUSED: list[tuple[Callable[[dict[str, Any]], None], str]] = [
    (change_the_batch, "data.train_batch_size was 2 and is 4 (the place in the data would mean something else)"),
    (change_the_model, "holds another model than the run began with"),
    (change_the_rate, "actor.optim.lr was 0.001 and is 0.002 (allow it: trainer.resume_allow=[actor.optim.lr])"),
    (change_the_template, "(8 prompts then, 8 now)"),
]


@pytest.mark.parametrize(("change", "reason"), [REFUSED[1], *(pytest.param(*c, marks=pytest.mark.slow) for c in REFUSED)])
def test_another_run_is_not_continued(
    change: Callable[[dict[str, Any]], None],
    reason: str,
    runs: SmallRuns,
    unbroken: tuple[Path, float],
    tiny_model: Path,
    make_tiny_model: Callable[..., Path],
    tmp_path: Path,
) -> None:
    folder = tmp_path / unbroken[0].name
    shutil.copytree(unbroken[0], folder)
    (folder / "finished").unlink()
    configured = document(tmp_path, tiny_model, **VALIDATED) | {"other_model": str(make_tiny_model(seed=1))}
    change(configured)
    del configured["other_model"]
    refused = runs.start(2, configured, faults="end_soon")
    assert sorted(refused.wait()) == [MISUSE, ENDED]  # all ranks meet it, one speaks
    assert reason in refused.output()
    assert rows(folder) == rows(unbroken[0])  # nothing was touched
