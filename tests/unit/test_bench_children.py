"""A benchmark that ends early, or whose process does, keeps what was measured: steps as they come, whole files, the
signals of a whole script; slow: real runs of a tiny model."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import bench_layouts
import bench_memory
import bench_resume
import bench_step
import bench_sync
import children
from children import reporter, run_child
from cli import Ending, write_json
from layout_report import render as render_layouts
from run_summary import process_age_s
from step_report import Rows, render

ROOT = Path(__file__).resolve().parents[2]
# A child that reports some of three steps, of 9, 4 and 6 seconds, and leaves half a file beside them; then `last`.
STEPS = """
import json, os, pathlib, signal, sys, time
report, steps = pathlib.Path(sys.argv[1]), int(sys.argv[2])
rows = [{"step_s": s, "phases": {"gen": s / 4, "update": s / 2}, "train_peak_gib": s} for s in (9, 4, 6)]
about = {"steps_asked": 3, "engine": {"library": "made"}, "masters": "float32"}
aside = report.with_suffix(".aside")
for done in range(1, steps + 1):
    aside.write_text(json.dumps({"steps": rows[:done], **about}))
    os.replace(aside, report)
report.with_suffix(".partial").write_text('{"steps": [')
"""


def stub(report, steps, last):
    return [sys.executable, "-c", STEPS + last, str(report), str(steps)]


def python(code, *arguments):
    return [sys.executable, "-c", code, *map(str, arguments)]


def test_a_child_reports_or_is_ended(tmp_path):
    report = tmp_path / "new" / "report.json"
    write = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text('{\"a\": 1}'); time.sleep(1)"
    done = run_child(python(write, report), report, 1, {}, Ending())
    assert done["a"] == 1 and 0.9 <= done["process_s"] < 60 and 0 <= done["start_s"] <= done["process_s"] - 0.7
    assert run_child(python("raise SystemExit(3)"), report, 1, {}, Ending())["error"] == "ended with status 3"
    nothing = run_child(python("pass"), report, 1, {}, Ending())  # the former report is gone
    assert nothing["error"] == "ended with status 0" and nothing["start_s"] is None
    failed = run_child(python(write + "; sys.exit(4)", report), report, 1, {}, Ending())
    assert failed["error"] == "ended with status 4" and "a" not in failed  # a report without steps is of a whole run
    start, mark = time.monotonic(), tmp_path / "mark"
    wait = "import pathlib, signal, sys, time\ndef end(*_): pathlib.Path(sys.argv[1]).write_text('x'); sys.exit(0)\n"
    wait += "signal.signal(signal.SIGTERM, end); time.sleep(60)"
    ended = run_child(python(wait, mark), report, 0.03, {}, Ending())
    assert ended["error"] == "not done after 0.03 minutes"
    assert mark.exists() and time.monotonic() - start < 30  # asked to end, as torchrun must be for its workers


@pytest.mark.parametrize(
    ("steps", "last", "error"),
    [
        (3, "", None),
        (2, "time.sleep(60)", "not done after 0.05 minutes; 2 of 3 steps"),
        (3, "sys.exit(5)", "ended with status 5; 3 of 3 steps"),  # it fails in its end
        (2, "sys.exit(5)", "ended with status 5; 2 of 3 steps"),
        (1, "", "ended with status 0; 1 of 3 steps"),
        (0, "sys.exit(5)", "ended with status 5"),
    ],
)
def test_steps_are_kept_however_a_child_ends(steps, last, error, tmp_path):
    report = tmp_path / "report.json"
    result = run_child(stub(report, steps, last), report, 0.05, {}, Ending())
    assert result.get("error") == error
    assert [step["step_s"] for step in result.get("steps", [])] == [9, 4, 6][:steps]
    assert (result["start_s"] is None) == (steps == 0)


def run_step(monkeypatch, tmp_path, steps, last, *arguments):
    """bench_step.py on children that are stubs: its status, its rows, its table, the children begun."""
    begun = []

    def instead(words, report, *rest):
        begun.append(words[words.index("--child") + 1])
        return run_child(stub(report, steps, last), report, *rest)

    monkeypatch.setattr(bench_step, "run_child", instead)
    out = tmp_path / "step.json"
    words = ["--smoke", "--steps", "3", "--minutes", "0.05", "--out", str(out), *arguments]
    status = bench_step.main(words)
    return status, json.loads(out.read_text())["rows"], render(out), begun


def test_steps_before_the_time_is_over_make_a_row_that_says_so(monkeypatch, tmp_path):
    status, [row], table, _ = run_step(monkeypatch, tmp_path, 2, "time.sleep(60)")
    assert status == 1 and row["error"] == "not done after 0.05 minutes; 2 of 3 steps"
    assert (row["step_s"], row["step_s_p50"], row["phases"]) == ([4], 4, {"gen": 1, "update": 2})
    assert row["train_peak_gib"] == 4 and row["engine"] == {"library": "made"} and row["masters"] == "float32"
    assert 0 < row["start_s"] <= row["process_s"] < 30
    assert "| 4.00 s (incomplete: not done after 0.05 minutes; 2 of 3 steps) | gen 1.00 update 2.00 |" in table


def test_steps_of_the_warm_up_are_no_measurement(monkeypatch, tmp_path):
    status, [row], table, _ = run_step(monkeypatch, tmp_path, 1, "sys.exit(5)")
    assert status == 1 and row["step_s_p50"] is None and row["step_s"] == [] and row["engine"] is None
    assert "| not measured: ended with status 5; 1 of 3 steps |" in table and row["start_s"] > 0


def test_a_whole_run_is_shown_as_ever(monkeypatch, tmp_path):
    status, [row], table, _ = run_step(monkeypatch, tmp_path, 3, "")
    assert status == 0 and row["error"] is None and row["step_s"] == [4, 6] and row["step_s_p50"] == 5
    assert "| 5.00 s | gen 1.25 update 2.50 | 6.0 GiB |" in table and "incomplete" not in table


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_bench_that_is_told_to_end_writes_its_row(signum, status, monkeypatch, tmp_path):
    """As `timeout` does it: the bench is told twice, and the child beside it."""
    Rows(tmp_path / "step.json", {}).put({"impl": "trl", "workload": "tiny, 2 x 2, 12 + 8 tokens", "mfu": None})
    monkeypatch.setattr(bench_step, "render", lambda path: "")  # the row above is none of a table
    monkeypatch.setattr(sys.modules[__name__], "render", lambda path: "")
    monkeypatch.setattr(bench_step.importlib.util, "find_spec", lambda name: object())
    before = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)]
    last = f"[os.kill(pid, {int(signum)}) for pid in (os.getppid(), os.getppid(), os.getpid())]; time.sleep(60)"
    words = ["--minutes", "1", "--impl", "ours", "trl"]
    found, rows, _, begun = run_step(monkeypatch, tmp_path, 2, last, *words)
    assert found == status and begun == ["ours"]  # nothing else was begun, and what there was is kept
    assert [row["impl"] for row in rows] == ["trl", "ours"] and rows[1]["step_s"] == [4]
    assert rows[1]["error"] == f"ended by {signum.name}; 2 of 3 steps"
    assert [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)] == before


def test_layouts_keep_steps_too(monkeypatch, tmp_path):
    """The process that makes the models, then two layouts of which the first tells the bench to end."""

    def instead(words, report, *rest):
        what = words[words.index("--child") + 1]
        command = python("open(__import__('sys').argv[1], 'w').write('{}')", report)
        if what == "steps":
            command = stub(report, 2, "os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)")
        return run_child(command, report, *rest)

    monkeypatch.setattr(bench_layouts, "run_child", instead)
    out = tmp_path / "layouts.json"
    words = ["--smoke", "--out", str(out), "--steps", "3", "--layouts", "dp1", "dp2"]
    assert bench_layouts.main(words) == 143
    [row] = json.loads(out.read_text())["rows"]
    assert (row["layout"], row["step_s"], row["error"]) == ("dp1", [4], "ended by SIGTERM; 2 of 3 steps")
    assert 0 < row["start_s"] <= row["process_s"]
    assert "| 4.00 s (incomplete: ended by SIGTERM; 2 of 3 steps) |" in render_layouts(out)


# ---- files and signals


def test_a_reader_never_sees_half_a_file(tmp_path):
    file = tmp_path / "a.json"
    write_json(file, {"n": -1})
    with pytest.raises(TypeError):
        write_json(file, {"n": 1, "more": object()})
    assert json.loads(file.read_text()) == {"n": -1}
    code = "import sys, pathlib; sys.path.insert(0, sys.argv[2]); from cli import write_json\n"
    code += "for n in range(150): write_json(pathlib.Path(sys.argv[1]), {'n': n, 'more': [n] * 20_000})"
    writer = subprocess.Popen(python(code, file, ROOT / "bench"))
    seen = []
    while writer.poll() is None:
        content = json.loads(file.read_text())
        seen.append(content["n"])
        assert set(content.get("more", [])) <= {content["n"]}
    assert writer.returncode == 0 and seen == sorted(seen) and json.loads(file.read_text())["n"] == 149


def test_rank_0_alone_reports(tmp_path, monkeypatch):
    report = tmp_path / "report.json"
    for rank, expected in (("1", None), ("0", {"a": 2})):
        monkeypatch.setenv("RANK", rank)
        reporter(str(report))({"a": 2})
        assert (json.loads(report.read_text()) if report.exists() else None) == expected


def test_a_signal_is_noted_until_the_block_is_left():
    own = signal.getsignal(signal.SIGINT)
    with Ending() as ending:
        assert signal.getsignal(signal.SIGINT) is own  # nothing to lose yet
        ending.listen()
        assert ending.repeat(lambda status: [status], 2, lambda: 7) == [7, 7] and ending.status is None
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)  # within half a second: the same request
        assert (ending.status, ending.reason()) == (143, "ended by SIGTERM")
        assert ending.repeat(lambda status: [status], 2, lambda: 7) == []
        ending._noted_s -= 1
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
    assert signal.getsignal(signal.SIGINT) is own


def test_ranks_end_together():
    """Another rank hears of the signal during the third turn; both leave after it."""
    told, ending = iter([None, None, None, 130]), Ending()
    assert ending.repeat(lambda status: [status, next(told)], 20, lambda: 7) == [7, 7, 7]
    assert (ending.status, ending.reason()) == (130, "ended by SIGINT")


def test_the_age_of_a_process():
    code = "import sys, time; sys.path[:0] = sys.argv[1:]; time.sleep(0.5); t = time.perf_counter()\n"
    code += "from run_summary import process_age_s; print(process_age_s(), time.perf_counter() - t)"
    start = time.perf_counter()
    words = python(code, ROOT / "bench", ROOT)
    age, imports = map(float, subprocess.run(words, capture_output=True, text=True, check=True).stdout.split())
    assert 0.5 + imports - 0.1 <= age <= time.perf_counter() - start + 0.1
    assert process_age_s() > 0


# ---- benchmarks in one process


class SignalledTrainer:
    """Steps that a signal reaches in the one of that number."""

    told_in = 2

    def __init__(self, config, **_):
        mesh = SimpleNamespace(gather=lambda value: [value], world=1, tp=1, is_main=True)
        engine = SimpleNamespace(info={"library": "made"})
        self.config, self.done = config, 0
        self.stages = SimpleNamespace(mesh=mesh, plan=None, engine=engine, config=config)

    def step(self):
        self.done += 1
        if self.done == self.told_in:
            os.kill(os.getpid(), signal.SIGTERM)
        metrics = {"response_length/mean": 4.0, "perf/train_peak_gib": 3.0 + self.done, "perf/rollout_gib": 2.0}
        return SimpleNamespace(metrics=metrics, timings={"step": 1.5})

    def close(self):
        pass


def test_peaks_of_the_steps_so_far(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench_memory, "Trainer", SignalledTrainer)
    out = tmp_path / "memory.json"
    assert bench_memory.main(["--smoke", "--steps", "9", "--out", str(out)]) == 143
    record = json.loads(out.read_text())
    assert (record["steps"], record["error"]) == (2, "ended by SIGTERM; 2 of 9 steps")
    peaks = {row["peak"]: row["measured_gib"] for row in record["peaks"]}
    assert peaks["training"] == 5.0 and peaks["rollout"] == 2.0 and record["seconds_of_the_last_step"] == 1.5
    out.unlink()
    listen = Ending.listen

    def told_at_once(self):
        listen(self)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Ending, "listen", told_at_once)
    assert bench_memory.main(["--smoke", "--out", str(out)]) == 143 and not out.exists()
    assert capsys.readouterr().err.endswith("nothing measured: ended by SIGTERM; 0 of 2 steps\n")


def run_sync(monkeypatch, tmp_path, told_in, *overrides):
    """Cycles of 1 s, 2 s, ... of which one is signalled: the status and the row."""
    begun = []

    def cycle(trainer, *, park=True):
        begun.append(park)
        if len(begun) == told_in:
            os.kill(os.getpid(), signal.SIGTERM)
        seconds = dict.fromkeys(("wake_s", "sync_s", "sleep_s", "total_s"), float(len(begun)))
        back = {"masters_back_s": 1.0, "all_back_s": 2.0, "sleeping_gib": 1.0, "fragmentation_gib": 0.0}
        return seconds | back | {"tokens": [[1]]}

    monkeypatch.setattr(bench_sync, "Trainer", SignalledTrainer)
    monkeypatch.setattr(SignalledTrainer, "told_in", None)
    monkeypatch.setattr(bench_sync, "cycle", cycle)
    monkeypatch.setattr(bench_sync, "park_alone", lambda trainer: {"gib": 3.0, "alone_s": 0.5})
    out = tmp_path / "sync.json"
    status = bench_sync.main(["--smoke", "--cycles", "6", "--out", str(out), "--", *overrides])
    return status, (json.loads(out.read_text())["rows"][0] if out.exists() else None)


def test_cycles_so_far(monkeypatch, tmp_path, capsys):
    status, row = run_sync(monkeypatch, tmp_path, 4)
    assert status == 143 and (row["cycles"], row["error"]) == (4, "ended by SIGTERM; 4 of 6 cycles")
    assert row["total_s"] == 3.5 and row["first"]["total_s"] == 1.0 and row["start_s"] > 0
    (tmp_path / "sync.json").unlink()
    assert run_sync(monkeypatch, tmp_path, 2) == (143, None)
    assert "nothing measured: ended by SIGTERM" in capsys.readouterr().err
    status, row = run_sync(monkeypatch, tmp_path, None)
    assert (status, row["cycles"], row["error"], row["total_s"]) == (0, 6, None, 4.5)


def test_parking_is_whole_or_not_there(monkeypatch, tmp_path):
    parked = "actor.fsdp.offload_during_rollout=true"
    status, row = run_sync(monkeypatch, tmp_path, 8, parked)
    assert status == 143 and row["parking"] is None and row["error"] == "ended by SIGTERM; 6 of 6 cycles"
    status, row = run_sync(monkeypatch, tmp_path, None, parked)
    assert status == 0 and row["parking"]["sync_plain_s"] == 10.5 and row["parking"]["gib"] == 3.0
    assert row["error"] is None


def test_half_a_comparison_is_said_and_not_written(monkeypatch, tmp_path, capsys):
    code = "import os, pathlib, signal, sys, time; run = pathlib.Path(sys.argv[1], 'r'); run.mkdir(parents=True)\n"
    code += "(run / 'metrics.jsonl').write_text(''.join('{\"step\": %d}\\n' % n for n in range(1, 8)))\n"
    code += "os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)"
    runs = []

    def start(words, folder):
        runs.append(subprocess.Popen(python(code, folder)))
        return runs[-1]

    monkeypatch.setattr(bench_resume, "start", start)
    out = tmp_path / "resume.json"
    assert bench_resume.main(["--steps", "9", "--stop", "8", "--together", "--out", str(out)]) == 143
    assert not out.exists() and [run.returncode for run in runs] == [-signal.SIGTERM] * 2  # none is left
    said = capsys.readouterr().err
    assert said.startswith("ended by SIGTERM, nothing is compared; steps done of 9: ") and " 7" in said


# ---- real runs


def ended_group(script, out, lines, *arguments):
    """The status of a script that is ended once it has printed so many steps, as `timeout` ends it: first itself, then
    its whole group."""
    environ = {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, str(ROOT / "bench" / script), "--smoke", "--out", str(out), *arguments]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True, start_new_session=True) as bench:
        for line in bench.stdout:
            lines -= line.startswith("{'")
            if lines == 0 and line.startswith("{'"):
                os.kill(bench.pid, signal.SIGTERM)
                os.killpg(bench.pid, signal.SIGTERM)
        status = bench.wait(timeout=120)
    with pytest.raises(ProcessLookupError):  # nothing is left of the group
        os.killpg(bench.pid, 0)
    return status


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "more"),
    [("bench_step.py", ["--steps", "2000"]), ("bench_layouts.py", ["--steps", "2000", "--layouts", "dp2"])],
)
def test_a_real_bench_is_ended(script, more, tmp_path):
    out = tmp_path / "rows.json"
    assert ended_group(script, out, 5, *more) == 143
    [row] = json.loads(out.read_text())["rows"]
    done = len(row["step_s"]) + row["warm_up"]
    assert 4 <= done < 2000 and row["error"] == f"ended by SIGTERM; {done} of 2000 steps"
    assert row["step_s_p50"] > 0 and row["engine"]["library"] == "transformers"
    assert 0 < row["start_s"] < row["process_s"] < 120


@pytest.mark.slow
def test_a_real_child_past_its_time(tmp_path, monkeypatch):
    out = tmp_path / "rows.json"
    monkeypatch.setattr(children, "GRACE_S", 10)
    words = ["--smoke", "--out", str(out), "--steps", "20000", "--minutes", "0.5"]
    assert bench_step.main(words) == 1
    [row] = json.loads(out.read_text())["rows"]
    assert row["error"] == f"not done after 0.5 minutes; {len(row['step_s']) + 1} of 20000 steps"
    assert row["step_s_p50"] > 0 and 30 <= row["process_s"] < 45
