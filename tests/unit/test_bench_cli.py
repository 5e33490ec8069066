"""A mistake of a benchmark's user is said in a line, with exit status 2, before anything runs."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import bench_algorithms
import bench_attention
import bench_generate
import bench_layouts
import bench_memory
import bench_resume
import bench_step
import bench_sync
import cli
import run_summary
from step_report import Rows

ROOT = Path(__file__).resolve().parents[2]
SYNC = str(ROOT / "bench" / "results" / "sync_h200.json")
README = str(ROOT / "README.md")


def status(script: ModuleType, *arguments: str) -> int | str | None:
    """As the command ends."""
    try:
        return cli.command(script.main, list(arguments))
    except SystemExit as end:
        return end.code


@pytest.fixture(autouse=True)
def nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for script, name in (
        *((script, "run") for script in (bench_algorithms, bench_generate, bench_sync)),
        *((script, "run_all") for script in (bench_step, bench_layouts)),
        *((script, name) for script, name in ((bench_memory, "measure"), (bench_attention, "run_backend"))),
        (bench_resume, "start"),
    ):
        monkeypatch.setattr(script, name, lambda *_, **__: pytest.fail("it ran"))


@pytest.mark.parametrize(
    ("script", "arguments", "said"),
    [
        (bench_step, ["--render", "/nonexistent.json"], "cannot read /nonexistent.json: No such file or directory"),
        (bench_step, ["--render", README], f"{README} is no result of bench_step.py: not JSON"),
        (bench_step, ["--render", SYNC], f"{SYNC} is no result of bench_step.py: rows[0] has no impl, masters,"),
        (bench_layouts, ["--render", "/nonexistent"], "cannot read /nonexistent: No such file or directory"),
        (bench_layouts, ["--render", SYNC], f"{SYNC} is no result of bench_layouts.py: rows[0] has no job, layout,"),
        (bench_algorithms, ["--render", SYNC], f"{SYNC} is no result of bench_algorithms.py: not an object with"),
        (bench_step, ["--smoke", "--steps", "2", "--warm-up", "2"], "--warm-up 2 leaves nothing of 2 steps"),
        (bench_step, ["--smoke", "--", "actor.nonsense=1"], "fastgrpo: unknown key actor.nonsense: did you mean"),
        (bench_layouts, ["--smoke", "--steps", "1", "--warm-up", "1"], "--warm-up 1 leaves nothing of 1 steps"),
        (
            bench_memory,
            ["--smoke", "model.path=some/Qwen9"],
            "model.path=some/Qwen9: no shape 'Qwen9'; there are tiny,",
        ),
        (bench_memory, ["--smoke", "actor.nonsense=1"], "fastgrpo: unknown key actor.nonsense: did you mean"),
        (run_summary, ["/nonexistent", "out.json"], "/nonexistent is no folder of a run: it has no metrics.jsonl"),
        (bench_attention, ["--smoke", "--out", "/proc/none/a.json"], "cannot write /proc/none/a.json: "),
        (bench_resume, ["--out", README + "/a.json"], f"cannot write {README}/a.json: "),
    ],
)
def test_one_line(script: ModuleType, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(script, *arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith(said)


@pytest.mark.parametrize(
    ("script", "arguments", "said"),
    [
        (bench_sync, ["--smoke", "--cycles", "0"], "argument --cycles: '0' is not a whole number of at least 3"),
        (bench_sync, ["--smoke", "--cycles", "1"], "argument --cycles: '1' is not a whole number of at least 3"),
        (bench_step, ["--smoke", "--steps", "0"], "argument --steps: '0' is not a whole number of at least 1"),
        (bench_step, ["--minutes", "nan"], "argument --minutes: 'nan' is not a number above 0"),
        (bench_generate, ["--smoke", "--rounds", "1"], "argument --rounds: '1' is not a whole number of at least 2"),
        (bench_resume, ["--steps", "4", "--stop", "4"], "--stop 4: nothing is left to resume of --steps 4"),
        (bench_attention, ["--smoke", "--shapes", "7B"], "--smoke has a tiny shape of its own: leave --shapes away"),
        (bench_memory, ["--nonsense"], "unrecognized arguments: --nonsense"),
        *(
            (script, ["--smoke", "--shape", "nosuch"], "argument --shape: no shape 'nosuch'; there are tiny,")
            for script in (bench_step, bench_sync, bench_generate, bench_layouts)
        ),
        *(
            (script, ["--smoke", "--shape", "Qwen3-8B"], "--smoke")
            for script in (bench_step, bench_sync, bench_generate, bench_layouts)
        ),
    ],
)
def test_arguments_are_not_passed_over(
    script: ModuleType, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(script, *arguments) == 2
    usage, _, message = capsys.readouterr().err.partition("error: ")
    assert usage.startswith("usage: ") and said in message and message.count("\n") == 1


def test_trl_is_looked_for_first(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = {"trl": None, "datasets": object()}
    monkeypatch.setattr(bench_step.importlib.util, "find_spec", found.get)
    assert status(bench_step, "--smoke", "--impl", "ours", "trl_liger") == 2
    assert capsys.readouterr().err == ("--impl trl_liger needs trl, not installed here; --impl ours needs neither\n")


@pytest.mark.parametrize("script", [bench_algorithms, bench_generate, bench_resume, bench_sync, bench_memory])
def test_each_says_how_it_is_used(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(script, "--help") == 0
    said = capsys.readouterr().out
    assert said.startswith("usage: ") and "--out FILE" in said and "--commit HASH" in said


def test_a_fault_of_ours_keeps_its_traceback() -> None:
    def main(arguments: list[str]) -> int:
        raise ValueError("ours")

    with pytest.raises(ValueError, match="ours"):
        cli.command(main, [])


def test_rows_are_not_added_to_another_kind_of_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.json"
    for text in ("no JSON", "[]", json.dumps({"rows": [{"impl": "ours"}]})):
        file.write_text(text)
        with pytest.raises(SystemExit) as end:
            Rows(file, {})
        assert end.value.code == 2 and file.read_text() == text
    assert capsys.readouterr().err.splitlines()[-1].endswith("rows[0] has no workload")


# ---- bench_sync.py: what a cycle leaves behind


def cycle(sleeping: float, fragmentation: float) -> dict[str, Any]:
    return {"sleeping_gib": sleeping, "fragmentation_gib": fragmentation}


@pytest.mark.parametrize(
    ("last", "verdict"),
    [
        (cycle(20.0, 0.5), (True, True)),
        (cycle(20.2, 0.505), (True, True)),  # one percent
        (cycle(20.21, 0.5), (False, True)),
        (cycle(20.0, 0.5051), (True, False)),
        (cycle(21.0, 0.6), (False, False)),
        (cycle(15.0, 0.1), (True, True)),  # less is no growth
    ],
)
def test_growth_from_the_second_cycle_to_the_last(last: dict[str, Any], verdict: tuple[bool, bool]) -> None:
    row = bench_sync.steadiness([cycle(90.0, 9.0), cycle(20.0, 0.5), cycle(50.0, 5.0), last])
    assert row == {
        "sleeping_gib_cycle_2": 20.0,
        "sleeping_gib_last": last["sleeping_gib"],
        "memory_steady": verdict[0],
        "fragmentation_gib_cycle_2": 0.5,
        "fragmentation_gib_last": last["fragmentation_gib"],
        "fragmentation_steady": verdict[1],
    }


def test_from_nothing_any_growth_counts() -> None:
    assert bench_sync.steadiness([cycle(1.0, 0.0)] * 3)["fragmentation_steady"]
    assert not bench_sync.steadiness([cycle(1.0, 0.0)] * 2 + [cycle(1.0, 2**-20)])["fragmentation_steady"]


def test_fragmentation_is_what_is_reserved_beyond_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, gib = bench_sync.torch.cuda, 2**30
    kept = {"reserved": 9 * gib}
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "empty_cache", lambda: kept.update(reserved=6 * gib))
    monkeypatch.setattr(cuda, "mem_get_info", lambda: (60 * gib, 80 * gib))
    monkeypatch.setattr(cuda, "memory_reserved", lambda: kept["reserved"])
    monkeypatch.setattr(cuda, "memory_allocated", lambda: 5.5 * gib)
    assert bench_sync.memory_asleep() == cycle(20.0, 0.5)


@pytest.mark.parametrize("failing", [None, "greedy_identical", "memory_steady", "fragmentation_steady"])
def test_each_verdict_decides_the_status(failing: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    row = {"shape": "tiny", "ranks": 1, "tensor_parallel": 1, "greedy_identical": True}
    row |= {"memory_steady": True, "fragmentation_steady": True} | ({failing: False} if failing else {})
    monkeypatch.setattr(bench_sync, "run", lambda args, models, ending: row | {"cycles": args.cycles})
    out = tmp_path / "sync.json"
    assert bench_sync.main(["--smoke", "--cycles", "50", "--out", str(out)]) == (1 if failing else 0)
    [written] = json.loads(out.read_text())["rows"]
    assert written["cycles"] == 50 and written["fragmentation_steady"] == (failing != "fragmentation_steady")
