"""The runner with real worker processes: values, order, kills, mistakes, and that nothing is left running."""

import asyncio
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest

from fastgrpo.config import RegexRule, RewardConfig, RewardFunctionConfig, RewardKind
from fastgrpo.errors import RunError, UserError
from fastgrpo.records import RewardRequest, Score
from fastgrpo.reward import Rewards, build_rewards
from fastgrpo.reward import runner as runner_module
from fastgrpo.reward.function import BadReturn, RewardMistake, read_return
from fastgrpo.reward.worker import serve

MARGIN_S = 1.0


def requests(*responses: str, step: int = 0) -> list[RewardRequest]:
    return [RewardRequest("p", response, "3", {"level": 2}, step) for response in responses]


def workers() -> list[psutil.Process]:
    """Processes of runners that descend from this one."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if "fastgrpo.reward.worker" in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


@contextmanager
def running(
    function: Callable[..., object] | None = None, config: RewardConfig | None = None, **limits: float
) -> Iterator[Rewards]:
    runner = build_rewards(config or RewardConfig(**{"num_workers": 2, "timeout_s": 20.0, **limits}), function)  # type: ignore[arg-type]
    try:
        yield runner
    finally:
        runner.close()
        assert not workers()


def make_scripted() -> Callable[[str], object]:
    """Made inside a function, so that workers are sent its code and do not import this file, pytest and all."""

    def scripted(response: str) -> object:
        """Sleeps, holds the CPU and the interpreter's lock, raises, leaves, dies, or scores the number it reads."""
        match response:
            case "sleep":
                time.sleep(1000)
            case "spin":
                return 10**10**8
            case "child":
                subprocess.run([sys.executable, "-c", "import time; time.sleep(1000)  # fastgrpo.reward.worker"])
            case "raise":
                raise ValueError("bad\nsecond line")
            case "exit":
                sys.exit(3)
            case "die":
                os._exit(7)
            case "segv":
                os.kill(os.getpid(), signal.SIGSEGV)
        return float(response)

    return scripted


scripted = make_scripted()


def check_scripted(responses: list[str], scores: list[Score]) -> None:
    errors = {
        "raise": "scripted: ValueError: bad",
        "exit": "scripted: SystemExit: 3",
        "die": "scripted: its process ended with exit code 7",
        "segv": "scripted: its process ended with signal 11 (Segmentation fault)",
    }
    for response, score in zip(responses, scores, strict=True):
        if response in ("sleep", "spin", "child"):
            assert (score.total, score.status, score.parts) == (None, "timeout", {"scripted": None})
        elif response in errors:
            assert (score.total, score.status, score.error) == (None, "error", errors[response])
        else:
            assert (score.total, score.status, score.error) == (float(response), "scored", None)


@pytest.mark.parametrize("calls", [5, pytest.param(10, marks=pytest.mark.slow)])
def test_bad_samples_beside_good_ones(calls: int) -> None:
    """`calls` in a row; the good ones in order, the bad ones counted, within the timeout and a margin."""
    responses = ["1", "2", "sleep", "3", "spin", "4", "raise", "5", "6", "7", "8"]
    with running(scripted, num_workers=4, timeout_s=0.5) as runner:
        runner.start()
        seconds = []
        for _ in range(calls):
            start = time.monotonic()
            check_scripted(responses, runner.score(requests(*responses)))
            seconds.append(time.monotonic() - start)
        assert sorted(seconds)[-3] < 0.5 + MARGIN_S  # two may meet a busy moment of the machine


def test_every_way_to_die() -> None:
    responses = ["die", "1", "exit", "segv", "2", "child", "3"]
    with running(scripted, num_workers=2, timeout_s=1.0) as runner:
        check_scripted(responses, runner.score(requests(*responses)))
        assert not [p for p in workers() if "-c" in p.cmdline()]  # the child went with its worker


def test_from_a_thread_and_from_a_loop() -> None:
    responses = ["1", "sleep", "raise", "2"]
    with running(scripted, timeout_s=0.5) as runner:
        runner.start()
        found: list[list[Score]] = []
        threads = [threading.Thread(target=lambda: found.append(runner.score(requests(*responses)))) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)

        async def inside() -> list[Score]:
            return runner.score(requests(*responses))

        async def aside() -> list[Score]:
            return await asyncio.to_thread(runner.score, requests(*responses))

        found += [asyncio.run(inside()), asyncio.run(aside())]
        assert len(found) == 4
        for scores in found:
            check_scripted(responses, scores)


@pytest.mark.parametrize("timeout_s", [0.5, pytest.param(4.0, marks=pytest.mark.slow)])
def test_one_percent_hanging_costs_one_timeout(timeout_s: float) -> None:
    """Wherever the hanging ones are: strewn, before anything is known of the function's speed, in a row, at the end."""
    seconds = []
    strewn = np.random.default_rng(0).choice(1000, size=10, replace=False).tolist()
    for hanging in (strewn, range(10), range(500, 510), range(990, 1000)):
        responses = ["sleep" if i in hanging else str(i) for i in range(1000)]
        with running(scripted, num_workers=4, timeout_s=timeout_s) as runner:
            runner.start()
            start = time.monotonic()
            scores = runner.score(requests(*responses))
            seconds.append(time.monotonic() - start)
            check_scripted(responses, scores)
    assert max(seconds) < timeout_s + MARGIN_S, seconds


def test_endless_regex_is_killed() -> None:
    """Backtracking in C holds the interpreter's lock: only a kill from outside ends it."""
    rules = [RegexRule(pattern="^(a+)+$", score=1.0)]
    config = RewardConfig(functions={"r": RewardFunctionConfig(kind=RewardKind["rules"], rules=rules)}, timeout_s=0.5)
    with running(config=config) as runner:
        scores = runner.score(requests("aa", "a" * 60 + "b", "ab"))
    assert [(s.total, s.status) for s in scores] == [(1.0, "scored"), (None, "timeout"), (0.0, "scored")]


def test_processes_are_reused_and_spares_leave() -> None:
    with running(scripted, num_workers=2, timeout_s=0.5) as runner:
        runner.start()
        before = {p.pid for p in workers()}
        assert len(before) == 3  # the nursery and two workers
        check_scripted(["1"] * 50, runner.score(requests(*["1"] * 50)))
        assert {p.pid for p in workers()} == before
        runner.score(requests(*["1"] * 20, *["sleep"] * 4, *["2"] * 20))
        assert len(workers()) == 3


def test_a_function_that_never_answers_is_refused() -> None:
    with running(scripted, num_workers=1, timeout_s=0.1) as runner, pytest.raises(UserError, match="first 4 samples"):
        runner.score(requests(*["sleep"] * 100))


def test_arguments_and_cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A closure is given what the request holds, in the trainer's folder; its other arguments keep their default."""
    monkeypatch.chdir(tmp_path)
    bonus, folder = 10.0, str(tmp_path)

    def score(prompt: str, response: str, reference: str, meta: dict, step: int, extra: float = 0.5) -> float:
        assert (prompt, response, reference, meta, os.getcwd()) == ("p", "r", "3", {"level": 2}, folder)
        return bonus + step + extra

    with running(score) as runner:
        assert runner.score(requests("r", step=4))[0].total == 14.5
    with running(lambda **given: len(given)) as runner:
        assert runner.score(requests("r"))[0].parts == {"reward": 8.0}


def test_prints_do_not_break_anything(capfd: pytest.CaptureFixture[str]) -> None:
    def score(response: str) -> float:
        print('[0, 0.0, "scored", 99.0, {}]')
        os.write(1, b"raw\n")
        return float(response)

    with running(score) as runner:
        assert [s.total for s in runner.score(requests(*map(str, range(30))))] == [float(i) for i in range(30)]
    out, err = capfd.readouterr()
    assert out == "" and err.count("raw\n") == 30 and err.count("99.0") == 30


class Scalar:
    """Like a 0-dimensional tensor of a library that the runner does not know."""

    ndim = 0

    def item(self) -> float:
        return 2.5


RETURNS = {
    "int": (3, 3.0),
    "bool": (True, 1.0),
    "float32": (np.float32(0.5), 0.5),
    "int64": (np.int64(-2), -2.0),
    "bool_": (np.bool_(True), 1.0),
    "0d": (np.array(1.5), 1.5),
    "scalar": (Scalar(), 2.5),
    "fraction": (Fraction(1, 4), 0.25),
    "decimal": (Decimal("0.75"), 0.75),
    "none": (None, None),
    "dict none": ({"score": None}, None),
}
BAD_RETURNS = {
    "[1.0]": ([1.0], "list of length 1: [1.0]"),
    "three": ([1.0, 2.0, 3.0], "list of length 3"),
    "string": ("1.0", "str: '1.0'"),
    "array": (np.ones(4), "ndarray of shape (4,)"),
    "size 1": (np.ones(1), "ndarray of shape (1,)"),
    "inf": (float("inf"), "float: inf"),
    "nan": (np.float64("nan"), "float64: "),
    "huge": (10**400, "int: 1000"),
    "no score": ({"acc": 1.0}, "a dict without \"score\" (keys: ['acc'])"),
    "dict of string": ({"score": "1"}, "str: '1'"),
    "complex": (1j, "complex: 1j"),
}


@pytest.mark.parametrize("name", RETURNS)
def test_good_returns(name: str) -> None:
    value, score = RETURNS[name]
    assert read_return(value) == (score, {})


@pytest.mark.parametrize("name", BAD_RETURNS)
def test_bad_returns(name: str) -> None:
    value, description = BAD_RETURNS[name]
    with pytest.raises(BadReturn, match=f"^{re.escape(description)}"):
        read_return(value)


def test_a_bad_return_ends_the_run() -> None:
    """At any time, and the next call is not disturbed by what was under way."""

    def named(response: str) -> object:
        return None if response == "none" else "9" if response == "text" else float(response)

    good = ["1", "2", "none", "4"]
    with running(named) as runner:
        for _ in range(2):
            scores = runner.score(requests(*good))
            assert [s.total for s in scores] == [1.0, 2.0, None, 4.0]
            assert [s.status for s in scores] == ["scored", "scored", "unscored", "scored"]
            with pytest.raises(UserError) as raised:
                runner.score(requests(*good, "text", *good))
            message = str(raised.value)
            assert message.startswith(f"reward 'named' (named in {__file__}:") and "returned str: '9'" in message
            assert "one finite number" in message


def test_dict_details() -> None:
    def score(response: str) -> dict:
        return {"score": 0.5, "acc": True, "len": np.int32(4), "pred": "72", "nothing": None, "nan": float("nan")}

    with running(score) as runner:
        result = runner.score(requests("x"))[0]
    assert result == Score(0.5, {"score": 0.5}, {"score/acc": 1.0, "score/len": 4.0}, "scored", pred="72")


def test_an_error_on_the_whole_first_batch_is_a_mistake() -> None:
    def score(response: str) -> float:
        return float(response)  # the line to be named

    with running(score) as runner:
        with pytest.raises(UserError) as raised:
            runner.score(requests("a", "b", "c"))
        line = next(i for i, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "to be named" in text)
        message = str(raised.value)
        assert f"failed on all 3 samples of the first batch at {__file__}:{line}: ValueError: could not conv" in message
        assert message.splitlines()[-1] == "ValueError: could not convert string to float: 'a'"
        assert "worker.py" not in message
        assert [s.status for s in runner.score(requests("a", "1"))] == ["error", "scored"]
        assert [s.status for s in runner.score(requests("a", "b"))] == ["error", "error"]  # later it is counted only


def write(path: Path, source: str) -> RewardConfig:
    path.write_text(textwrap.dedent(source))
    return RewardConfig(functions={"file": RewardFunctionConfig(path=str(path))}, num_workers=1)


def test_file_imports_its_neighbour_once(tmp_path: Path) -> None:
    (tmp_path / "helper_of_reward.py").write_text("def double(x): return 2 * x")
    config = write(
        tmp_path / "my reward.py",
        """
        from dataclasses import dataclass
        from helper_of_reward import double
        calls = 0
        @dataclass
        class Point:  # looks its module up in sys.modules
            x: "float"
        def compute_score(response, **kwargs):
            global calls
            calls += 1
            return double(Point(float(response)).x) + 100 * calls
        def second(step):
            return calls
        """,
    )
    config.functions["second"] = RewardFunctionConfig(path=config.functions["file"].path, name="second", weight=0.0)
    with running(config=config) as runner:
        scores = runner.score(requests("1", "2", "3"))
    assert [s.total for s in scores] == [102.0, 204.0, 306.0]
    assert [s.parts["second"] for s in scores] == [3.0, 3.0, 3.0]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_module\ndef compute_score(): ...", "cannot be loaded: ModuleNotFoundError: No module named"),
        ("import sys\nsys.exit(1)\ndef compute_score(): ...", "cannot be loaded: SystemExit: 1"),
        ("import os\nos._exit(5)\ndef compute_score(): ...", "ended with exit code 5 while it loaded"),
        ("from os.path import *", "cannot be loaded: AttributeError"),
        ("compute_score = lambda answer: 1", "requires the parameter answer"),
        ("compute_score = 5", "is not a callable object"),
    ],
)
def test_file_that_cannot_be_loaded(tmp_path: Path, source: str, message: str) -> None:
    with running(config=write(tmp_path / "r.py", source)) as runner:
        for call in (runner.start, lambda: runner.score(requests("1"))):
            with pytest.raises(UserError, match=re.escape(message)) as raised:
                call()
            assert "reward 'file' (compute_score in " in str(raised.value)


def test_weighted_sum(tmp_path: Path) -> None:
    """2 * file + 0.7 * gsm8k + 0 * slow: a missing part unscores the sample, unless its weight is 0."""
    config = write(
        tmp_path / "r.py",
        """
        import time
        def compute_score(response):
            if response == "none 3":
                return None
            if response == "boom 3":
                raise KeyError(response)
            return len(response)
        def slow(response):
            if response == "slow 3":
                time.sleep(100)
            return -1
        """,
    )
    path = config.functions["file"].path
    config.timeout_s = 0.5
    config.functions["file"].weight = 2.0
    config.functions["g"] = RewardFunctionConfig(kind=RewardKind["gsm8k"], weight=0.7)
    config.functions["g"].mode = type(config.functions["g"].mode)["flexible"]
    config.functions["slow"] = RewardFunctionConfig(path=path, name="slow", weight=0.0)
    with running(config=config) as runner:
        scores = runner.score(requests("3", "44", "none 3", "boom 3", "slow 3"))
    assert [s.total for s in scores] == pytest.approx([2.7, 4.0, None, None, 12.7])
    assert [s.status for s in scores] == ["scored", "scored", "unscored", "error", "scored"]
    assert scores[0].parts == {"file": 1.0, "g": 1.0, "slow": -1.0}
    assert scores[1].details == {"g/correct": 0.0, "g/formatted": 1.0}
    assert scores[3].parts == {"file": None, "g": 1.0, "slow": -1.0}
    assert scores[3].error == "file: KeyError: 'boom 3'"
    assert scores[4].error == "slow: no answer within 0.5 s"


def test_a_worker_that_cannot_load_ends_quietly_when_the_trainer_has_gone() -> None:
    ours, theirs = socket.socketpair()
    for message in ((os.getcwd(), sys.path), [("f", pickle.dumps(partial(int, "x")))]):
        ours.sendall(pickle.dumps(message))
    ours.close()
    serve(theirs)  # its answer finds nobody
    theirs.close()


def test_a_function_of_weight_0_changes_nothing_whatever_it_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = write(
        tmp_path / "r.py",
        """
        import time
        def compute_score(response):
            return float(response)
        def raises(response):
            raise KeyError(response)
        def hangs(response):
            time.sleep(100)
        def odd(response, step):
            return float("nan") if step else "1"
        def columns(completions, solution):
            return [0.0] * len(completions)
        """,
    )
    path, config.timeout_s = config.functions["file"].path, 0.2
    for name in ("raises", "hangs", "odd", "columns"):
        config.functions[name] = RewardFunctionConfig(path=path, name=name, weight=0.0)
    with running(config=config) as runner:
        for step in range(2):
            start = time.monotonic()
            scores = runner.score(requests(*map(str, range(60)), step=step))
            assert [(s.total, s.status) for s in scores] == [(float(i), "scored") for i in range(60)]
            assert all(part is None for s in scores for name, part in s.parts.items() if name != "file")
            assert time.monotonic() - start < 8  # of 60 hanging samples 12 s would be waited for
    assert "'raises'" in caplog.text and "Its weight is 0, so training goes on without it." in caplog.text


def test_large_samples_and_many_of_them() -> None:
    responses = [chr(97 + i % 26) * 100_000 for i in range(200)]
    with running(lambda response: ord(response[0]) * len(response)) as runner:
        totals = [s.total for s in runner.score(requests(*responses))]
    assert totals == [(97 + i % 26) * 100_000 for i in range(200)]


def test_no_sample_starts_no_process() -> None:
    with running(scripted) as runner:
        assert runner.score([]) == []
        assert not workers()


def test_builtin_speed() -> None:
    """5,000 short answers in about a second; the bound leaves room for a busy machine."""
    config = RewardConfig(functions={"g": RewardFunctionConfig(kind=RewardKind["gsm8k"])})
    with running(config=config) as runner:
        runner.start()
        start = time.monotonic()
        scores = runner.score(requests(*[f"#### {i % 5}" for i in range(5000)]))
        assert time.monotonic() - start < 5
    assert [s.total for s in scores] == [float(i % 5 == 3) for i in range(5000)]


PROGRAM = """
import sys, time
from fastgrpo.config import RewardConfig
from fastgrpo.records import RewardRequest
from fastgrpo.reward import build_rewards

assert "torch" not in sys.modules
print("main ran", flush=True)

def score(response):
    assert "torch" not in sys.modules and "vllm" not in sys.modules
    if response == "spin":
        print("spinning", file=sys.stderr, flush=True)
        10**10**8
    return float(response)

runner = build_rewards(RewardConfig(num_workers=2, timeout_s=300.0), score)
print([s.total for s in runner.score([RewardRequest("", x, None, {}, 0) for x in "123"])], flush=True)
if sys.argv[1] == "killed":
    runner.score([RewardRequest("", "spin", None, {}, 0)])
elif sys.argv[1] == "raises":
    raise SystemError
"""


def program(tmp_path: Path, how: str) -> subprocess.Popen[str]:
    path = tmp_path / "main.py"  # no `if __name__ == "__main__"`: workers must not import it
    path.write_text(PROGRAM)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen(
        [sys.executable, str(path), how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=environment,
    )


@pytest.mark.parametrize("how", ["leaves", "raises"])
def test_nothing_is_left_when_the_trainer_ends_unclosed(tmp_path: Path, how: str) -> None:
    with program(tmp_path, how) as process:
        out, _ = process.communicate(timeout=60)
    assert out == "main ran\n[1.0, 2.0, 3.0]\n"
    assert process.returncode == (how == "raises")
    assert not left_in(tmp_path)


def test_nothing_is_left_when_the_trainer_is_killed(tmp_path: Path) -> None:
    with program(tmp_path, "killed") as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "spinning\n"
        assert len(left_in(tmp_path)) >= 3
        process.kill()
        process.wait()
        deadline = time.monotonic() + 5
        while left_in(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left_in(tmp_path)


def left_in(folder: Path) -> list[int]:
    """Living processes that work in `folder`; workers go to their trainer's."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and Path(process.cwd()) == folder:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def make_counting(folder: Path) -> Callable[[str], object]:
    def counting(response: str) -> object:
        """Its process and the one that starts the workers are killed at "both", once; at "hang" it never comes back."""
        if response == "both" and not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        if response == "hang":
            if not (folder / "orphaned").exists():
                (folder / "orphaned").write_text(str(os.getpid()))
                os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(1000)
        return 0.0 if response == "both" else float(response)

    return counting


def test_workers_and_the_process_that_starts_them_die_together(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The sample is left out, the others are scored; it is said in one line, and later calls know nothing of it."""
    with running(make_counting(tmp_path), num_workers=2) as runner:
        scores = runner.score(requests("1", "both", "2", "3"))
        assert [s.total for s in scores] == [1.0, None, 2.0, 3.0]
        assert scores[1].status == "error"
        assert scores[1].error == "counting: its process ended with its parent process, which was killed or has crashed"
        assert len(caplog.messages) == 1 and "another one is started" in caplog.messages[0]
        assert [s.total for s in runner.score(requests("4", "both"))] == [4.0, 0.0]
        between = workers()  # two calls: nobody was at a sample
        for process in between:
            process.kill()
        assert soon(lambda: all(map(has_ended, between)))  # or the next calls are over before it is seen
        assert [s.total for s in runner.score(requests(*"123456"))].count(None) <= 2
        assert [s.total for s in runner.score(requests(*"123456"))] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
        assert len(caplog.messages) == 2


def test_a_late_worker_whose_parent_has_died_is_killed_too(tmp_path: Path) -> None:
    with running(make_counting(tmp_path), num_workers=2, timeout_s=1.0) as runner:
        scores = runner.score(requests("1", "hang", "2"))
        assert [(s.total, s.status) for s in scores] == [(1.0, "scored"), (None, "timeout"), (2.0, "scored")]
        hung = int((tmp_path / "orphaned").read_text())
        assert soon(lambda: hung not in orphans())
        assert orphans()  # the other one goes on
    assert soon(lambda: not orphans())


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def soon(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 5
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)
    return holds()


def orphans() -> list[int]:
    """Living workers of this process's runners that descend from it no more."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = process.info["cmdline"] or []
        ours = "fastgrpo.reward.worker" in line and line[-1] == str(os.getpid())
        if ours and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process.pid)
    return sorted(set(found) - {process.pid for process in workers()})


def test_a_function_whose_import_kills_what_starts_it(tmp_path: Path) -> None:
    path = tmp_path / "kills.py"
    path.write_text("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nos.kill(os.getpid(), signal.SIGKILL)\n"
                    "def compute_score(response):\n    return 1.0\n")  # fmt: skip
    kills = RewardFunctionConfig(kind=RewardKind.custom, path=str(path))
    said = r"has died 4 times in a row: .* while it loaded reward 'kills' \(compute_score in "
    config = RewardConfig(functions={"kills": kills}, num_workers=1)
    with running(config=config) as runner, pytest.raises(RunError, match=said):
        runner.start()


def test_a_long_import_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner_module, "_LOAD_WORDS_S", (0.2, 0.5))
    monkeypatch.setattr(runner_module, "_LOAD_LIMIT_S", 1.5)
    path = tmp_path / "rx.py"
    path.write_text("import time\ntime.sleep(1000)\ndef compute_score(response):\n    return 1.0\n")
    rx = RewardFunctionConfig(kind=RewardKind.custom, path=str(path))
    config = RewardConfig(functions={"rx": rx}, num_workers=2)
    with running(config=config) as runner, pytest.raises(UserError, match=r"loading reward 'rx' .* took more than 1.5"):
        runner.start()
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2  # not once a worker
    for line, seconds in zip(said, ("0", "1"), strict=True):
        assert line == (
            f"still loading reward 'rx' (compute_score in {path}) after {seconds} s; after 1.5 s the run ends"
        )


def test_a_bad_return_names_the_sample() -> None:
    def bad(response: str) -> float:
        return float(response)

    asked = [RewardRequest("p", text, None, {}, 6, f"a/train/{i}", 3) for i, text in enumerate(["1", "inf", "2"])]
    with running(bad) as runner, pytest.raises(RewardMistake) as raised:
        runner.score(asked)
    assert "returned float: inf (for sample 3 of prompt a/train/1, after 6 steps). Expected" in str(raised.value)
    again = pickle.loads(pickle.dumps(raised.value))
    assert (str(again), again.label) == (str(raised.value), "bad")
