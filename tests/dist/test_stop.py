"""A run whose disk is full, does not answer or loses the run folder, as it goes on and as it is told to stop."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from small_runs import SmallRuns, document

from fastgrpo.stopping import MISTAKEN, NOT_SAVED, SAVED
from fastgrpo.watchdog import ENDED


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def checkpoints(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("faults", "options", "said", "ranks"),
    [
        ("stall_in_the_last_checkpoint", {"trainer__limits_s__save": 1.0}, "trainer.limits_s.save=1", 1),
        ("stall_and_be_stopped", {"trainer__shutdown_timeout_s": 1}, "trainer.shutdown_timeout_s=1", 1),
        pytest.param(
            *("stall_and_be_stopped", {"trainer__shutdown_timeout_s": 1}, "trainer.shutdown_timeout_s=1", 2),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_disk_that_does_not_answer(
    faults: str, options: dict[str, Any], said: str, ranks: int, runs: SmallRuns, tiny_model: Path, tmp_path: Path
) -> None:
    start = time.monotonic()
    run = runs.start(ranks, document(tmp_path, tiny_model, **options), faults=faults)
    assert run.wait() == [ENDED] * ranks, run.output()
    assert time.monotonic() - start < 20
    [line] = [line for line in run.output().splitlines() if line.endswith("; the run ends")]
    assert "has been in stage save for " in line and said in line
    [folder] = tmp_path.iterdir()
    assert not (folder / "finished").exists()


VALIDATED = {
    "data__val_files": ["arithmetic"],
    "data__arithmetic__val_size": 2,
    "trainer__test_freq": 2,
    "trainer__save_freq": 2,
    "trainer__max_steps": 6,
    "trainer__val_before_train": False,
    "trainer__best_metric": "val/reward",
    "trainer__best_mode": "min",
    "trainer__max_ckpt_to_keep": 1,
}


@pytest.mark.slow
def test_a_checkpoint_saved_before_its_validation_may_be_the_best(
    runs: SmallRuns, tiny_model: Path, tmp_path: Path
) -> None:
    """Stopped at the end of step 2; the second start validates and is killed, the third goes on. As unbroken."""
    runs.start(1, document(tmp_path / "whole", tiny_model, **VALIDATED)).finish()
    configured = document(tmp_path / "broken", tiny_model, **VALIDATED)
    stopped = runs.start(1, configured, faults="stop_at_the_end_of_step_2")
    assert stopped.wait() == [SAVED], stopped.output()
    [run] = (tmp_path / "broken").iterdir()
    manifest = run / "checkpoints" / "step_000002" / "checkpoint.json"
    assert json.loads(manifest.read_text())["metric"] is None
    runs.start(1, configured, faults="die_in_the_rollout_that_follows").wait()
    assert [row["step"] for row in rows(run)] == [1, 2, 2]
    read = json.loads(manifest.read_text())
    assert read["metric"] == rows(run)[2]["val/reward"] and read["parts"]["trainer"]["validated_at"] == 2
    runs.start(1, configured).finish()
    [right] = (tmp_path / "whole").iterdir()
    for folder in (run, right):
        assert [row["step"] for row in rows(folder)] == [1, 2, 2, 3, 4, 4, 5, 6, 6]
        assert checkpoints(folder) == ["best", "latest", "step_000002", "step_000006"]
    assert [row.get("val/reward") for row in rows(run)] == [row.get("val/reward") for row in rows(right)]
    assert (run / "checkpoints" / "best").read_text() == (right / "checkpoints" / "best").read_text()
    assert json.loads(manifest.read_text())["metric"] == read["metric"]


@pytest.mark.parametrize(
    ("faults", "status", "said", "kept"),
    [
        ("full_disk_from_step_2_and_stopped", NOT_SAVED, "checkpoint is step_000001, trainer.resume=auto goes on from there", ["step_000001"]),
        ("full_disk_and_stopped_in_step_2", NOT_SAVED, "there is no complete checkpoint, trainer.resume=auto goes on from the start", []),
        ("full_disk_at_step_2_and_stopped_in_step_3", SAVED, "after step 2, but 1 save(s) FAILED; trainer.resume=auto goes on from here", ["step_000001", "step_000002"]),
    ],
)  # fmt: skip
def test_stopped_while_the_disk_is_full(
    faults: str, status: int, said: str, kept: list[str], runs: SmallRuns, tiny_model: Path, tmp_path: Path
) -> None:
    run = runs.start(1, document(tmp_path, tiny_model, trainer__logger=["console"]), faults=faults)
    assert run.wait() == [status], run.output()
    assert said in run.output() and ("could NOT BE SAVED" in run.output()) == (status == NOT_SAVED)
    [folder] = tmp_path.iterdir()
    assert [name for name in checkpoints(folder) if name.startswith("step")] == kept


def test_the_same_command_twice_each_stopped(runs: SmallRuns, tiny_model: Path, tmp_path: Path) -> None:
    """The second start has the newer name and is stopped first: what each says is what happens."""
    configured = document(tmp_path, tiny_model, trainer__logger=["console"], trainer__max_steps=8)
    first = runs.start(1, configured, faults="wait_after_step_4_and_be_stopped")
    while not list(tmp_path.glob("*/checkpoints/step_000003")):
        time.sleep(0.05)
    second = runs.start(1, configured, faults="stop_after_each_step")
    assert second.wait() == [SAVED], second.output()
    (tmp_path / "go").touch()
    assert first.wait() == [SAVED], first.output()
    old, new = sorted(path for path in tmp_path.iterdir() if path.is_dir())
    assert f"after step 1; trainer.resume=auto goes on from here: {new}" in second.output()
    by_path = f"trainer.resume={old} (auto would come upon the newer {new}) goes on from here: {old}"
    assert f"stopped by SIGUSR1 after step 4; {by_path}" in first.output()
    third = runs.start(1, configured, faults="stop_before_step_1")
    third.wait()
    assert f"because it is older: {old} after step 4 (trainer.resume={old})" in third.output()
    assert f"resuming {new} after step 1 of 8" in third.output()


def test_stopped_before_there_is_anything_to_save(runs: SmallRuns, tiny_model: Path, tmp_path: Path) -> None:
    run = runs.start(1, document(tmp_path, tiny_model, trainer__logger=["console"]), faults="stop_before_step_1")
    assert run.wait() == [SAVED]
    assert "stopped by SIGTERM before a step was complete: there was nothing to save" in run.output()
    assert "nothing to save, and trainer.resume=auto begins anew: " in run.output()
    assert "goes on from here" not in run.output()
    [folder] = tmp_path.iterdir()
    assert not (folder / "checkpoints").exists()


def test_a_full_disk_between_saves_costs_the_answers_alone(runs: SmallRuns, tiny_model: Path, tmp_path: Path) -> None:
    run = runs.start(1, document(tmp_path, tiny_model), faults="full_disk_for_the_rows_of_step_2")
    run.finish()
    [folder] = tmp_path.iterdir()
    assert [row["step"] for row in rows(folder)] == [1, 2, 3, 4]  # the second was written with the third
    assert [row.get("files/failed_writes") for row in rows(folder)] == [None, 1, 2, 2]
    assert [path.name[5:11] for path in sorted((folder / "rollouts").iterdir())] == ["000001", "000003", "000004"]
    for kind in ("rollouts", "metrics.jsonl"):
        assert run.output().count(f"{kind} NOT WRITTEN into {folder}: [Errno 28] No space left") == 1
        assert f"{kind} is written again" in run.output()
    assert f"2 writes into {folder} have failed" in run.output().splitlines()[-1]


def test_rows_that_never_found_room_are_in_the_last_checkpoint(runs: SmallRuns, tiny_model: Path, tmp_path: Path) -> None:
    """Full from step 3 to the end of the process: the message names the way, and it works."""
    run = runs.start(1, document(tmp_path, tiny_model), faults="full_disk_for_rows_from_step_3")
    run.finish()
    [folder] = tmp_path.iterdir()
    assert [row["step"] for row in rows(folder)] == [1, 2]
    assert f"maybe rows, are missing; trainer.resume={folder} writes the rows that its newest" in run.output()
    runs.start(1, document(tmp_path, tiny_model, trainer__resume=str(folder))).finish()
    assert [row["step"] for row in rows(folder)] == [1, 2, 3, 4] and (folder / "finished").read_text() == "4\n"


def test_rows_whose_file_is_deleted_under_the_run(runs: SmallRuns, tiny_model: Path, tmp_path: Path) -> None:
    """Between two saves, in step 4: what no save has flushed is written again, and the run goes on."""
    configured = document(tmp_path, tiny_model, trainer__save_freq=2, trainer__async_save=False)
    run = runs.start(1, configured, faults="delete_the_rows_in_step_4")
    run.finish()
    [folder] = tmp_path.iterdir()
    assert f"{folder}/metrics.jsonl HAS BEEN MOVED OR DELETED, noticed after step 4: rows since" in run.output()
    assert [row["step"] for row in rows(folder)] == [3, 4] and (folder / "finished").exists()


def test_a_run_folder_that_moves_is_noticed(runs: SmallRuns, tiny_model: Path, tmp_path: Path) -> None:
    """What comes after is together in a new folder, and the run does not end as if all were well."""
    (tmp_path / "runs").mkdir()
    configured = document(tmp_path / "runs", tiny_model, trainer__async_save=False)
    run = runs.start(1, configured, faults="move_the_run_folder_in_step_3")
    assert run.wait() == [1]
    [folder] = (tmp_path / "runs").iterdir()
    assert f"THE RUN FOLDER {folder} HAS BEEN MOVED OR DELETED, noticed after step 3" in run.output()
    [last] = [line for line in run.output().splitlines() if line.startswith("fastgrpo: ")]
    assert last.startswith(f"fastgrpo: all steps are done, but {folder} was moved or deleted while the run wrote into it")
    assert "noticed after step 3: " in last and "not marked as finished" in last and "Traceback" not in run.output()
    assert [row["step"] for row in rows(tmp_path / "moved")] == [1, 2]
    assert [row["step"] for row in rows(folder)] == [3, 4]
    left = {path.name for path in folder.iterdir()}
    assert {"config.yaml", "model", "rollouts"} < left and "finished" not in left
    assert checkpoints(folder) == ["latest", "step_000003", "step_000004"]
    again = runs.start(1, document(tmp_path / "runs", tiny_model, trainer__logger=["console"]))
    again.finish()
    assert f"{folder}/metrics.jsonl has no row of steps 1-2: what somebody deleted, cut or moved away" in again.output()
    assert "after step 4 of 4" in again.output() and (folder / "finished").read_text() == "4\n"


@pytest.mark.parametrize(
    ("faults", "status", "said"),
    [
        ("full_disk_for_the_model_once", 0, "THE TRAINED MODEL IS NOT SAVED YET: rank 0 could not save "),
        ("full_disk_for_the_model", 1, "fastgrpo: THE TRAINED MODEL IS NOT SAVED: rank 0 could not save "),
        ("full_disk_for_the_model_and_stopped", SAVED, "stopped by SIGTERM after step 4; trainer.resume=auto goes on"),
    ],
)
def test_a_full_disk_at_the_end(
    faults: str, status: int, said: str, runs: SmallRuns, tiny_model: Path, tmp_path: Path
) -> None:
    """No checkpoint was saved before: all steps are in the model alone, so it is tried again."""
    configured = document(tmp_path, tiny_model, trainer__save_freq=-1, trainer__logger=["console"])
    run = runs.start(1, configured, faults=faults)
    assert run.wait() == [status], run.output()
    assert said in run.output() and "SafetensorError" in run.output() and "Traceback" not in run.output()
    [folder] = tmp_path.iterdir()
    assert (folder / "model").exists() == (folder / "finished").exists() == (status == 0)
    assert not (folder / "model.part").exists()
    if status == SAVED:
        assert checkpoints(folder) == ["latest", "step_000004"]
    if status == 1:
        assert "trainer.resume=auto goes on from it, and saves the model, when there is room" in run.output()


def test_a_model_that_will_not_fit_is_refused_before_training(
    runs: SmallRuns, tiny_model: Path, tmp_path: Path
) -> None:
    run = runs.start(1, document(tmp_path, tiny_model), faults="no_room_for_the_model")
    assert run.wait() == [2]
    assert "trainer.save_final: the trained model takes 0.00" in run.output() and list(tmp_path.iterdir()) == []
    said = "trainer.save_freq=1, but NO CHECKPOINT WILL FIT as things are: a checkpoint takes "
    assert said not in run.output()
    run = runs.start(1, document(tmp_path, tiny_model, trainer__save_final=False), faults="no_room_for_the_model")
    run.finish()
    [line] = [line for line in run.output().splitlines() if said in line]
    [folder] = tmp_path.iterdir()
    figures = re.search(r"takes (\S+) GiB and (\S+) GiB are free in (\S+);", line)
    assert figures and figures[3] == str(folder / "checkpoints")
    written = sum(path.stat().st_size for path in (folder / "checkpoints" / "step_000001").rglob("*") if path.is_file())
    assert float(figures[1]) * (1 << 30) == pytest.approx(written, rel=0.1)  # headers and json are not foreseen
    assert float(figures[2]) == pytest.approx(100_000 / (1 << 30), rel=0.01)


@pytest.mark.slow
def test_a_run_whose_last_checkpoint_is_lost_is_not_finished(
    runs: SmallRuns, tiny_model: Path, tmp_path: Path
) -> None:
    """Without a final model nothing would hold its last step. Then a start on a full disk, which changes nothing."""
    configured = document(tmp_path, tiny_model, trainer__save_final=False, trainer__logger=["console"])
    lost = runs.start(2, configured, faults="full_disk_in_the_last_checkpoint")
    assert 1 in lost.wait()
    said = lost.output()
    assert "CHECKPOINT NOT SAVED (step_000004): OSError: rank 0: OSError: [Errno 28] No space left" in said
    assert "fastgrpo: the last checkpoint could NOT BE SAVED (the reason is above)" in said
    assert "nothing keeps what was trained since step_000003, from which trainer.resume=auto goes on" in said
    assert said.count("nothing keeps what was trained") == 1  # not by the other rank again
    assert "Traceback" not in said and "The run goes on" not in said
    [run] = tmp_path.glob("run-*")
    assert not (run / "finished").exists()
    before = {name: (run / name).read_text() for name in ("config.yaml", "engine.json", "starts.jsonl")}
    full = runs.start(1, configured, faults="full_disk_at_the_start")
    assert full.wait() == [2] and f"{run} cannot be written to: [Errno 28] No space left" in full.output()
    assert before == {name: (run / name).read_text() for name in before}
    with (run / "starts.jsonl").open("a") as file:
        file.write('{"half a row')
    resumed = runs.start(1, configured)
    resumed.finish()
    assert "after step 3 of 4" in resumed.output() and (run / "finished").read_text() == "4\n"
    assert [json.loads(line)["layout"]["world"] for line in (run / "starts.jsonl").read_text().splitlines()] == [2, 1]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_mistake_in_a_reward_in_the_middle_of_a_run_saves_first(
    ranks: int, runs: SmallRuns, tiny_model: Path, tmp_path: Path
) -> None:
    """Met by one rank alone. The resumed run is the unbroken one, to the last bit."""
    options = {"trainer__save_freq": 4, "trainer__logger": ["console"]}
    runs.start(ranks, document(tmp_path / "whole", tiny_model, **options)).finish()
    configured = document(tmp_path / "broken", tiny_model, **options)
    stopped = runs.start(ranks, configured, faults="return_infinity_in_step_3")
    assert stopped.wait() == [MISTAKEN] * ranks, stopped.output()
    assert stopped.output().count("returned float: inf (for sample 1 of prompt p)") == 1
    [run] = (tmp_path / "broken").iterdir()
    said = f"stopped by the mistake above after step 2; trainer.resume=auto goes on from here: {run}"
    assert said in stopped.output() and "Traceback" not in stopped.output()
    assert checkpoints(run) == ["latest", "step_000002"]
    resumed = runs.start(ranks, configured)
    resumed.finish()
    assert f"after step 2 of 4, saved by {ranks} rank{'s' * (ranks > 1)}" in resumed.output()
    [right] = (tmp_path / "whole").iterdir()
    assert [row["step"] for row in rows(run)] == [1, 2, 3, 4]
    assert [row["actor/loss"] for row in rows(run)] == [row["actor/loss"] for row in rows(right)]
    assert [row["reward/mean"] for row in rows(run)] == [row["reward/mean"] for row in rows(right)]
