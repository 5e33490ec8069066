"""Runs interpreted_forms.py, the tests of the Triton forms, in two processes whose triton interprets kernels on CPUs.

Processes of their own, because triton decides when it is imported whether kernels are compiled or interpreted. Two,
because these are the longest tests that one process would have.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).with_name("interpreted_forms.py")


@pytest.mark.skipif(torch.cuda.is_available(), reason="test_triton_gpu.py runs them compiled")
@pytest.mark.parametrize(("marked", "least"), [("not slow", 167), pytest.param("slow", 14, marks=pytest.mark.slow)])
def test_forms_under_the_interpreter(marked, least):
    path = os.pathsep.join([str(TESTS.parents[2] / "kernels"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", marked, str(TESTS)]
    halves = [
        subprocess.Popen(
            [*command, "-k", half],
            env={**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for half in ("epilogue", "not epilogue")
    ]
    said = [half.communicate()[0] for half in halves]
    assert [half.returncode for half in halves] == [0, 0], "\n".join(text[-4000:] for text in said)
    assert sum(int(text.rsplit(" passed", 1)[0].split()[-1]) for text in said) >= least  # none skipped or lost
