"""A program and its tests -> how many it passes. Outputs and values are compared outside the program's sandbox.

    streams      input -> the program, as a script -> its output, compared here with the expected one, line by line
                 without regard to space at the ends of lines and of the text; it must end with exit code 0
    functions    tests in one sandbox, the program in another (tester.py, harness.py)

The limit of time is for all tests of a sample together; those not decided by then are not passed. BrokenBox: no
verdict.
"""

from __future__ import annotations

import json
import socket
import time
from dataclasses import dataclass, replace

from fastgrpo.reward.sandbox.box import FOLDER, Box, Limits, make_job, python

_START_S = 10.0  # for making the sandboxes, on top of the program's time
_TESTER_MEMORY_MB = 4096


@dataclass(frozen=True, slots=True)
class Streams:
    cases: tuple[tuple[str, str], ...]  # input, expected output


@dataclass(frozen=True, slots=True)
class Functions:
    tests: tuple[str, ...]  # sources; each passes when it raises nothing
    setup: str = ""  # run once before them
    entry_point: str | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    passed: int
    total: int
    late: bool = False  # the time was over before all tests were decided
    error: str = ""  # of the first test that was not passed


class BadTests(Exception):
    """The tests of the data cannot be run: no verdict about the program."""


def judge(program: str, tests: Streams | Functions, limits: Limits, *, all_tests: bool) -> Verdict:
    """`all_tests`: go on after a test that is not passed, to count those that are."""
    if isinstance(tests, Streams):
        return _judge_streams(program, tests, limits, all_tests)
    return _judge_functions(program, tests, limits, all_tests)


def _judge_streams(program: str, tests: Streams, limits: Limits, all_tests: bool) -> Verdict:
    runs = [{"argv": python("solution.py"), "input": given} for given, _ in tests.cases]
    passed, late, error = 0, False, ""
    with Box(make_job(limits, runs, {"solution.py": program})) as box:
        for message in box.messages(time.monotonic() + limits.time_s + _START_S):
            right = message["end"] == "exit 0" and _lines(message["output"]) == _lines(tests.cases[message["run"]][1])
            passed += right
            late |= message["end"] == "timeout"
            if not right:
                error = error or (message["end"] if message["end"] != "exit 0" else "another output")
                if not all_tests:
                    break
    return Verdict(passed, len(tests.cases), late, error)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _judge_functions(program: str, tests: Functions, limits: Limits, all_tests: bool) -> Verdict:
    ours, theirs = socket.socketpair()
    reading, writing = socket.socketpair()
    job = {"setup": tests.setup, "tests": tests.tests, "entry_point": tests.entry_point, "all": all_tests}
    program_job = make_job(
        limits,
        [{"argv": python(str(FOLDER / "harness.py")), "input": ""}],
        {"solution.py": program},
        {3: theirs.fileno()},
    )
    tester_job = make_job(
        replace(limits, memory_mb=_TESTER_MEMORY_MB),
        [{"argv": python(str(FOLDER / "tester.py")), "input": ""}],
        {"tests.json": json.dumps(job)},
        {3: ours.fileno(), 4: writing.fileno()},
    )
    start = time.monotonic()
    deadline = start + limits.time_s + _START_S
    with reading, Box(program_job) as box, Box(tester_job) as tester:
        for end in (ours, theirs, writing):
            end.close()
        for _ in tester.messages(deadline):
            pass
        late = time.monotonic() > start + limits.time_s  # the program's end may reach the tester before its own
        box.check_started(deadline)
        verdicts = _verdicts(reading)
    if broken := next((verdict["broken"] for verdict in verdicts if "broken" in verdict), None):
        raise BadTests(f"the tests cannot be run: {broken}")
    passed = sum(verdict["passed"] for verdict in verdicts)
    error = next(
        (verdict["error"] for verdict in verdicts if not verdict["passed"]), "no answer in time" if late else ""
    )
    return Verdict(passed, len(tests.tests), late, error)


def _verdicts(reading: socket.socket) -> list[dict]:
    """What the tester, which has ended, had decided. The last line may be cut."""
    reading.setblocking(False)
    text = b""
    try:
        while part := reading.recv(1 << 16):
            text += part
    except BlockingIOError:
        pass
    return [json.loads(line) for line in text.split(b"\n")[:-1]]
