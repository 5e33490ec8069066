"""The code reward: right and wrong programs, and programs that attack; nothing that they do pays, stays or gets out."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from code_attacks import CHEATS, SEARCH_FOR_OUTPUT, attacks

from fastgrpo.config import RewardConfig, RewardFunctionConfig, RewardKind
from fastgrpo.config.reward_schema import Isolation as IsolationOption
from fastgrpo.errors import ConfigError
from fastgrpo.records import RewardRequest, Score
from fastgrpo.reward import build_rewards, code_tests
from fastgrpo.reward.code_reference import read_tests
from fastgrpo.reward.code_tests import compute_score, find_code
from fastgrpo.reward.sandbox import wire
from fastgrpo.reward.sandbox.box import BrokenBox, Limits
from fastgrpo.reward.sandbox.isolation import Isolation, try_isolation
from fastgrpo.reward.sandbox.verdicts import BadTests, Functions, Streams, Verdict, judge

LIMITS = Limits("namespaces", 2.0, 256, 8)
ADD = ("assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert add('a', 'b') == 'ab'")
SUMS = (("1 2\n", "3\n"), ("20 22\n", "42"))


def namespaces() -> bool:
    try:
        return try_isolation(256, 8, 2.0).full
    except BrokenBox:
        return False


needs_namespaces = pytest.mark.skipif(not namespaces(), reason="this machine forbids namespaces")
pytestmark = needs_namespaces


def left_running() -> list[str]:
    """Processes of sandboxes."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or [])
        mine = any(
            name in line for name in ("sandbox/inside.py", "sandbox/harness.py", "solution.py", "sandbox/tester.py")
        )
        if mine and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(line)
    return found


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    deadline = time.monotonic() + 2
    while left_running() and time.monotonic() < deadline:  # others on this machine may be running this very test
        time.sleep(0.05)
    assert left_running() == []


def verdict(program: str, tests: Streams | Functions, limits: Limits = LIMITS) -> Verdict:
    return judge(program, tests, limits, all_tests=True)


def test_functions_and_streams() -> None:
    assert verdict("def add(a, b): return a + b", Functions(ADD)) == Verdict(3, 3)
    assert verdict("def add(a, b): return a * b", Functions(ADD[:2])) == Verdict(0, 2, error="AssertionError: ")
    some = verdict("def add(a, b): return 3", Functions(ADD))
    assert (some.passed, some.total) == (1, 3)
    assert verdict("print(sum(map(int, input().split())))", Streams(SUMS)) == Verdict(2, 2)
    assert verdict("print('3  \\n')", Streams(SUMS)) == Verdict(
        1, 2, error="another output"
    )  # space at the ends is free
    assert verdict("print(' 3')", Streams(SUMS)).passed == 0
    assert verdict("print(3); raise SystemExit(1)", Streams(SUMS[:1])) == Verdict(0, 1, error="exit 1")


def test_tests_in_every_style() -> None:
    check = (
        "def check(candidate):\n    assert candidate([1, 2]) == 3\n    assert abs(candidate([0.1, 0.2]) - 0.3) < 1e-9\n"
    )
    tests = read_tests(check, None, "total")
    assert isinstance(tests, Functions)
    assert verdict("def total(numbers): return sum(numbers)", tests) == Verdict(1, 1)
    assert verdict("def total(numbers): return 3", tests).passed == 0

    stack = "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n"
    uses = "s = Stack()\ns.push(4)\nassert s.items == [4]\ns.push(5)\nassert len(s.items) == 2"
    assert verdict(stack, Functions((uses,))) == Verdict(1, 1)

    sort = "def sort(items): items.sort()"
    assert verdict(sort, Functions(("a = [3, 1]\nsort(a)\nassert a == [1, 3]",))) == Verdict(1, 1)
    raises = "try:\n    half(3)\n    done = True\nexcept ValueError:\n    done = False\nassert not done"
    assert verdict("def half(n):\n    if n % 2: raise ValueError('odd')", Functions((raises,))) == Verdict(1, 1)
    lazy = "def squares(n):\n    for i in range(n): yield i * i"
    assert verdict(lazy, Functions(("assert list(squares(4)) == [0, 1, 4, 9]",))) == Verdict(1, 1)
    close = Functions(("assert math.isclose(third(), 1 / 3)",), "import math")
    assert verdict("def third(): return 1 / 3", close) == Verdict(1, 1)
    value = "{1: (2, 3.5)}, {4, 5}, None, True, b'x', 2 + 1j, 10 ** 40, float('inf')"
    assert verdict(f"def f(): return {value}", Functions((f"assert f() == ({value})",))) == Verdict(1, 1)


def test_a_module_that_the_tests_forgot_is_not_the_programs() -> None:
    tests = Functions(("assert math.isclose(f(), 1.0)",))
    assert verdict("def f(): return 1.0", tests).passed == 1
    assert verdict("class math:\n    isclose = staticmethod(lambda a, b: True)\ndef f(): return 2.0", tests).passed == 0


@pytest.mark.parametrize("name", CHEATS)
def test_no_trick_passes_a_test(name: str) -> None:
    start = time.monotonic()
    assert verdict(CHEATS[name], Functions(ADD)).passed == 0
    assert time.monotonic() - start < LIMITS.time_s + 2


def test_printing_the_expected_output_needs_the_input() -> None:
    """A program that knows nothing of the hidden cases can only guess; one that searches finds nothing."""
    assert verdict("print(3)", Streams(SUMS)).passed == 1  # the one that it guesses
    assert verdict(SEARCH_FOR_OUTPUT, Streams((("secret input", "8675309"),))) == Verdict(0, 1, error="another output")


def attack_scores(
    programs: Sequence[str], tests: object, *, partial: bool = True, timeout_s: float = 20.0
) -> list[Score]:
    function = RewardFunctionConfig(
        kind=RewardKind["code"], time_limit_s=2.5, memory_limit_mb=256, max_processes=8, partial_credit=partial
    )
    runner = build_rewards(RewardConfig(functions={"code": function}, num_workers=2, timeout_s=timeout_s))
    try:
        return runner.score(
            [RewardRequest("p", f"```python\n{code}\n```", json.dumps(tests), {}, 0) for code in programs]
        )
    finally:
        runner.close()


def test_attacks(tmp_path: Path) -> None:
    """Each is scored as documented within its time (0, or what its tests deserve), and leaves nothing behind."""
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        programs = attacks(server.getsockname()[1], str(secret), str(tmp_path / "written"))
        start = time.monotonic()
        scores = dict(zip(programs, attack_scores(list(programs.values()), list(ADD)), strict=True))
        seconds = time.monotonic() - start
        with pytest.raises(TimeoutError):
            server.accept()
    assert {name: score.status for name, score in scores.items()} == dict.fromkeys(programs, "scored")
    assert {name for name, score in scores.items() if score.total} == {"honest", "honest, with a file"}
    assert scores["honest"].total == scores["honest, with a file"].total == 1.0
    late = {name for name, score in scores.items() if score.details["code/late"]}
    assert {"endless loop", "endless call", "fork bomb", "fork bomb in the call"} <= late
    assert "network" not in late and "10 GiB" not in late
    assert not (tmp_path / "written").exists()
    assert seconds < 45  # 17 programs of at most 2.5 s each, two at a time, on a busy machine


def test_attacks_on_standard_output() -> None:
    attacks = [
        "print(3); print(42)",
        "import os; os._exit(0)",
        "while True: print(3)",
        "print(sum(map(int, input().split())))",
    ]
    scores = attack_scores(attacks, {"inputs": ["1 2", "40 2"], "outputs": ["3", "42"]}, partial=False)
    assert [score.total for score in scores] == [0.0, 0.0, 0.0, 1.0]


def test_a_killed_worker_takes_its_sandbox_along() -> None:
    """reward.timeout_s ends the worker amid a program's time: the sandbox ends too, and the sample is no 0."""
    (score,) = attack_scores(["def add(a, b):\n    while True: pass"], list(ADD), timeout_s=0.8)
    assert (score.total, score.status) == (None, "timeout")


@pytest.mark.parametrize(
    ("reference", "meta", "expected"),
    [
        ("assert f(1) == 1", {}, Functions(("assert f(1) == 1",))),
        (
            "def check(c):\n    assert c(1)",
            {"entry": "f"},
            Functions(("def check(c):\n    assert c(1)\ncheck(f)\n",), "", "f"),
        ),
        (
            '["assert f(1) == 1", "assert f(2)"]',
            {"setup": "import math"},
            Functions(("assert f(1) == 1", "assert f(2)"), "import math"),
        ),
        ('["assert f(1)"]', {"setup": ["import a", "import b"]}, Functions(("assert f(1)",), "import a\nimport b")),
        ('{"inputs": ["1"], "outputs": [["2", "3"]]}', {}, Streams((("1", "2\n3"),))),
        ('[{"input": "1", "output": "2", "testtype": "stdin"}]', {}, Streams((("1", "2"),))),
        ("[1, 2] == f()", {}, Functions(("[1, 2] == f()",))),
        ("", {}, None),
        (None, {}, None),
        ("[]", {}, None),
        ('{"inputs": [], "outputs": []}', {}, None),
    ],
)
def test_reading_tests(reference: str | None, meta: dict[str, Any], expected: object) -> None:
    assert read_tests(reference, meta.get("setup"), meta.get("entry")) == expected


CALLS = {"fn_name": "add", "inputs": [[1, 2], ["a", "b"], [[1], [2]], [0.1, 0.2]], "outputs": [3, "ab", [[1, 2]], 0.3]}


@pytest.mark.parametrize(
    ("program", "passed"),
    [
        ("def add(a, b): return a + b", 4),
        ("class Solution:\n    def add(self, a, b): return a + b", 4),
        ("def add(a, b): return tuple(a + b) if type(a) is list else a + b", 4),  # JSON knows no tuples
        ("def add(a, b): return 3", 1),
        ("def add(a, b): return str(a + b)", 1),
        ("def sub(a, b): return a - b", 0),
        ("print(3)", 0),
        ("class Yes:\n    def __eq__(self, other): return True\ndef add(a, b): return Yes()", 0),
        ("import os\ndef add(a, b): os._exit(0)", 0),
    ],
)
def test_calls_of_a_function(program: str, passed: int) -> None:
    """As APPS and TACO write them; what is wanted stays where the program cannot see it."""
    tests = read_tests(json.dumps(CALLS))
    assert isinstance(tests, Functions)
    assert verdict(program, tests).passed == passed


def test_calls_of_a_function_called_like_a_builtin_and_with_json_text() -> None:
    tests = read_tests(
        '{"fn_name": "all", "inputs": ["[1, 2]\\n3", "[]\\n1"], "outputs": ["{\\"3\\": [1, 2]}", "{\\"1\\": []}"]}'
    )
    assert isinstance(tests, Functions)
    assert verdict("def all(a, b): return {b: a}", tests) == Verdict(2, 2)
    cases = [{"input": "1\n2", "output": "3", "testtype": "functional"}]
    score = compute_score(
        "```\ndef add(a, b): return a + b\n```", json.dumps(cases), {"f": "add"}, LIMITS, False, {"entry_point": "f"}
    )
    assert score["score"] == 1.0


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ({"inputs": ["1", "2"], "outputs": ["1"]}, "has 2 inputs and 1 outputs"),
        ([{"input": "1", "output": "1"}, {"input": "2"}], "case 1 of the reference, {'input': '2'}, is not"),
        ({"foo": 1}, "is not a Python source, a list of Python sources, "),
        ([1, 2], "is not a Python source"),
        ({"fn_name": "a b", "inputs": [[1]], "outputs": [1]}, "\"fn_name\" is 'a b'"),
        ({"fn_name": "f", "inputs": [1], "outputs": [1]}, "are no list"),
        ({"fn_name": "f", "inputs": ["x y"], "outputs": [1]}, "neither a list nor a line of JSON each"),
        ([{"input": "1", "output": "1", "testtype": "functional"}], "does not name it"),
    ],
)
def test_a_reference_in_no_known_form_says_so(reference: object, message: str) -> None:
    with pytest.raises(BadTests, match=re.escape(message)):
        compute_score("x = 1", json.dumps(reference), {}, LIMITS)


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("a\n```py\nx = 1\n```\nb\n```\nx = 2\n```", "x = 2\n"),
        ("```python\ndef f(): pass\n```\nUse it:\n```python\nf()\n```", "def f(): pass\n"),
        ("```python\nx = 1", "x = 1"),
        ("x = 1", "x = 1"),
        ("<think>```python\nx = 1\n```</think>\nx = 2", "\nx = 2"),
    ],
)
def test_finding_code(response: str, code: str) -> None:
    assert find_code(response, "f") == code


def test_scores_of_rows() -> None:
    columns = {"entry_point": "entry_point", "setup": None, "prefix": "prompt"}
    row = {"entry_point": "twice", "prompt": 'def helper(x): return x\ndef twice(x):\n    """Twice x."""\n'}
    check = "def check(candidate):\n    assert candidate(2) == 4\n"
    for response in ("    return helper(x) + x", "```python\ndef twice(x):\n    return 2 * helper(x)\n```"):
        assert compute_score(response, check, row, LIMITS, columns=columns) == {
            "score": 1.0,
            "passed": 1.0,
            "late": 0.0,
            "found": 1.0,
        }
    assert compute_score("    return x", check, row, LIMITS, columns=columns)["score"] == 0.0
    assert compute_score("", check, row, LIMITS, columns=columns) == {"score": 0.0, "passed": 0.0, "found": 0.0}
    assert compute_score("x", None, {}, LIMITS) == {"score": None}
    with pytest.raises(Exception, match="the tests cannot be run: SyntaxError"):
        compute_score("def f(): pass", "assert f(1 ==", {}, LIMITS)


def test_a_sandbox_that_cannot_be_made_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = replace(LIMITS, level="no such level")  # type: ignore[arg-type]
    monkeypatch.setattr("fastgrpo.reward.sandbox.box.FOLDER", Path("/nowhere"))
    with pytest.raises(BrokenBox, match="did not start"):
        judge("print(3)", Streams(SUMS), broken, all_tests=True)


def test_weaker_isolation_is_never_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    weak = Isolation(
        replace(LIMITS, level="limits"), ("network", "signals", "memory"), "unshare: Operation not permitted"
    )
    monkeypatch.setattr(code_tests, "try_isolation", lambda *_: weak)
    function = RewardFunctionConfig(kind=RewardKind["code"])
    with pytest.raises(
        ConfigError, match=r"isolation=full.*NOT in force: no file outside its folder, limit on processes"
    ):
        build_rewards(RewardConfig(functions={"code": function}))
    function.isolation = IsolationOption["best_effort"]
    (note,) = build_rewards(RewardConfig(functions={"code": function})).notes
    assert "in force: no network, no signal to other processes, limit on memory, limit of time; NOT in force" in note
    assert "(namespaces: unshare: Operation not permitted)" in note


def test_without_namespaces_time_memory_and_network_hold() -> None:
    weak = replace(LIMITS, level="limits")
    assert verdict("def add(a, b): return a + b", Functions(ADD), weak) == Verdict(3, 3)
    assert verdict("print(sum(map(int, input().split())))", Streams(SUMS), weak) == Verdict(2, 2)
    daemon = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(1000)\nwhile True: pass"
    assert verdict(daemon, Functions(ADD), weak).late
    assert verdict("x = bytearray(10 << 30)", Streams((("", ""),)), weak).error == "exit 1"
    assert verdict("import socket; socket.socket()", Streams((("", ""),)), weak).error == "exit 1"
    kills = "import os\ntry: os.kill(-1, 9)\nexcept PermissionError: print('refused')\nos.kill(os.getpid(), 0)"
    assert verdict(kills, Streams((("", "refused"),)), weak) == Verdict(1, 1)
    limits_of_others = "import resource as r\nr.prlimit(1, r.RLIMIT_CPU, (1, 1))"
    assert verdict(limits_of_others, Streams((("", ""),)), weak).error == "exit 1"
    assert not list(Path(os.environ.get("TMPDIR", "/tmp")).glob("fastgrpo-box-*"))


def test_values_travel_as_plain_types() -> None:
    class Sly(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    value = wire.decode(wire.encode([Sly(3), (1.5, None), {"a": {1, 2}}]), lambda *_: None)
    assert value == [3, (1.5, None), {"a": {1, 2}}] and type(value[0]) is int
    with pytest.raises(wire.Unsendable, match="type object"):
        wire.encode(object())
    for wrong in (3, [], [3], ["x", 1], {"a": 1}, ["i", "zz"]):
        with pytest.raises((ValueError, KeyError)):
            wire.decode(wrong, lambda *_: None)
