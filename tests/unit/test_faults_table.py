"""docs/faults.md: all thirty faults are accounted for, and every test that it names exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROWS = re.findall(r"^\| (B\d\d) \| (.+?) \| (.+) \|$", (ROOT / "docs" / "faults.md").read_text(), re.MULTILINE)


@cache
def functions_in(file: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_all_thirty_are_there() -> None:
    assert [number for number, _, _ in ROWS] == [f"B{i:02}" for i in range(1, 31)]


@pytest.mark.parametrize(("number", "fault", "tests"), ROWS, ids=[row[0] for row in ROWS])
def test_named_tests_exist(number: str, fault: str, tests: str) -> None:
    named = re.findall(r"`([^`]+)::(test_\w+)`", tests)
    assert named and len(named) == tests.count("`") // 2 and len(fault) > 20
    assert [(file, test) for file, test in named if test not in functions_in(file)] == []


def test_row_numbers_are_widened_before_they_are_multiplied() -> None:
    """B11, what can be seen without a GPU. Row 14135 of a vocabulary of 151936 begins past 2^31 - 1, so whatever a
    kernel multiplies by a stride must be 64 bits wide before."""
    assert 14134 * 151936 <= 2**31 - 1 < 14135 * 151936
    found, narrow = 0, []
    for path in sorted((ROOT / "kernels" / "fastgrpo_kernels").glob("*.py")):
        for kernel in kernels_of(path):
            wide = wide_names(kernel)
            for node in ast.walk(kernel):
                if (
                    isinstance(node, ast.BinOp)
                    and isinstance(node.op, ast.Mult)
                    and "stride" in ast.unparse(node.right)
                ):
                    found += 1
                    left = ast.unparse(node.left)
                    if "tl.int64" not in left and not wide & set(re.findall(r"\w+", left)):
                        narrow.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
    assert found > 5 and narrow == []


def kernels_of(path: Path) -> list[ast.FunctionDef]:
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    return [node for node in functions if any("jit" in ast.unparse(one) for one in node.decorator_list)]


def wide_names(kernel: ast.FunctionDef) -> set[str]:
    """Variables that are 64 bits wide: assigned from something that is made so, or from another such variable."""
    wide: set[str] = set()
    for node in ast.walk(kernel):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            value = ast.unparse(node.value)
            if "tl.int64" in value or wide & set(re.findall(r"\w+", value)):
                wide.add(node.targets[0].id)
    return wide
