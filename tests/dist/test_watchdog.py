"""One rank that fails, hangs or falls silent ends all ranks, soon, with one report that says where."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path

import pytest
from small_runs import SmallRuns, document

from fastgrpo.watchdog import ENDED

FAILED = 1


def run_with(runs: SmallRuns, ranks: int, folder: Path, model: Path, faults: str, **options) -> tuple[list[int], str]:
    start = time.monotonic()
    run = runs.start(ranks, document(folder, model, **options), faults=faults)
    codes, seconds = run.wait(), time.monotonic() - start
    assert seconds < 30, run.output()
    return codes, run.output()


STAGES = {"raise_in_reward": "score_own", "raise_in_packing": "build_mini_batches", "raise_in_save": "save"}
STAGES["raise_in_forward"] = "forward"


@pytest.mark.parametrize("faults", STAGES)
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_an_error_of_one_rank_ends_all(faults: str, ranks: int, runs, tiny_model: Path, tmp_path: Path) -> None:
    codes, said = run_with(runs, ranks, tmp_path, tiny_model, faults, data__train_batch_size=4)
    assert codes == [ENDED] * (ranks - 1) + [FAILED], said
    words = f"ValueError: no {STAGES[faults]} today"
    assert said.count("Traceback (most recent call last)") == 1 and said.count("\n" + words) == 1
    assert f"fastgrpo: rank 0: ended, because rank {ranks - 1} has failed: {words}\n" in said
    [run] = tmp_path.iterdir()
    assert "Thread MainThread" in (run / "faults" / "stacks_rank0.txt").read_text()  # where rank 0 waited
    assert not (run / "finished").exists()


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_killed_rank_is_the_message(ranks: int, runs, tiny_model: Path, tmp_path: Path) -> None:
    """And not the error of the collective that broke on the others, which names nobody and only follows."""
    options = {"data__train_batch_size": 4, "trainer__save_freq": -1}  # a save in flight would be waited for
    codes, said = run_with(runs, ranks, tmp_path, tiny_model, "be_killed_in_reward", **options)
    assert codes == [ENDED] * (ranks - 1) + [-signal.SIGKILL], said
    lines = [line for line in said.splitlines() if line.startswith("fastgrpo: ")]
    [line] = [line for line in lines if " is lost: no sign of life for 4 s" in line]
    lost = re.fullmatch(
        rf"fastgrpo: rank (\d): (rank {ranks - 1} \(process \d+ on \S+\) is lost): no sign of life for 4 s, and a "
        r"collective with it broke in stage reward\. It was killed, .*; nothing more is saved, and "
        r"trainer\.resume=auto goes on from the last checkpoint",
        line,
    )
    assert lost, line
    others = [f"fastgrpo: rank {rank}: ended, because {lost[2]}" for rank in range(ranks - 1) if rank != int(lost[1])]
    assert sorted(set(lines) - {line}) == others
    assert "Traceback" not in said and "gloo" not in said
    [run] = tmp_path.iterdir()
    kept = (run / "faults" / f"traceback_rank{lost[1]}.txt").read_text()
    assert kept.startswith(f"{lost[2]}; what follows on rank {lost[1]}:\n\nTraceback (most recent call last):\n")
    assert "gather" in kept and not (run / "finished").exists()


def test_a_killed_rank_0_takes_the_store_along(runs, tiny_model: Path, tmp_path: Path) -> None:
    codes, said = run_with(runs, 2, tmp_path, tiny_model, "kill_rank_0_in_reward", trainer__save_freq=-1)
    assert codes == [-signal.SIGKILL, ENDED], said
    [line] = [line for line in said.splitlines() if line.startswith("fastgrpo: ")]
    assert line.startswith("fastgrpo: rank 1: rank 0 is lost, and the job's key-value store with it (")
    assert "Traceback" not in said


def test_a_mistake_that_all_ranks_meet_is_said_once(runs, tiny_model: Path, tmp_path: Path) -> None:
    codes, said = run_with(runs, 2, tmp_path, tiny_model, "raise_a_mistake_of_the_user")
    assert sorted(codes) == [2, ENDED]
    assert said.splitlines().count("this reward is no number") == 1 and "Traceback" not in said


def test_a_stage_that_hangs_is_named(runs, tiny_model: Path, tmp_path: Path) -> None:
    """Rank 0 waits for it in the same stage and for as long: the one that does not wait is the one reported."""
    codes, said = run_with(runs, 2, tmp_path, tiny_model, "hang_in_reward", trainer__limits_s__reward=1.0)
    assert codes == [ENDED, ENDED]
    [line] = [line for line in said.splitlines() if "has been in stage" in line and "the run ends" in line]
    assert line.startswith("fastgrpo: rank 1: rank 1 has been in stage reward for ")
    assert line.endswith("; trainer.limits_s.reward=1; the run ends")
    assert "in hang_in_reward" in said or "time.sleep(60)" in said  # its stacks
    [run] = tmp_path.iterdir()
    waiting = (run / "faults" / "stacks_rank0.txt").read_text()
    assert waiting.startswith("rank 1 has been in stage reward") and "all_gather_object" in waiting


@pytest.mark.slow
def test_the_layer_and_the_sequences_are_named(runs, tiny_model: Path, tmp_path: Path) -> None:
    options = {"trainer__limits_s__update": 2.0, "data__train_batch_size": 4}
    codes, said = run_with(runs, 2, tmp_path, tiny_model, "hang_in_layer_1", **options)
    assert codes == [ENDED, ENDED]
    [line] = [line for line in said.splitlines() if "the run ends" in line]
    assert "rank 0 has been in stage update" in line and "(layer 1, sequences " in line and " of the step)" in line


@pytest.mark.slow
def test_a_rank_that_falls_silent_is_missed(runs, tiny_model: Path, tmp_path: Path) -> None:
    codes, said = run_with(runs, 2, tmp_path, tiny_model, "be_stopped_in_step_2", trainer__limits_s__heartbeat=2.0)
    assert codes[0] == ENDED
    assert re.search(r"rank 1 \(process \d+ on \S+\) has not been heard of for ", said)
    assert "(trainer.limits_s.heartbeat=2)" in said


def test_a_straggling_rollout_is_cut_and_does_not_wedge_the_resumed_run(runs, tiny_model: Path, tmp_path: Path) -> None:
    """Cut at 80 % of what the watchdog allows, so that it never comes to that; drawn slowly again after a resume."""
    options = {"trainer__limits_s__gen": 3.0, "trainer__max_steps": 1, "actor__optim__lr_warmup_steps": 0}
    run_with(runs, 2, tmp_path, tiny_model, "draw_slowly", **options)
    codes, said = run_with(runs, 2, tmp_path, tiny_model, "draw_slowly", **options | {"trainer__max_steps": 2})
    assert codes == [0, 0], said
    [run] = tmp_path.iterdir()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["response_length/cut_by_time"]) for row in rows] == [(1, 0.5), (2, 0.5)]
    for step in (1, 2):
        answers = (run / "rollouts" / f"step_00000{step}.jsonl").read_text().splitlines()
        assert [json.loads(row)["finish_reason"] for row in answers][2:] == ["time", "time"]  # rank 1's prompt
        assert all(0 < json.loads(row)["tokens"] < 5 for row in answers[2:])
