"""Runs interpreted_forms.py, the tests of the Triton forms, in a process whose triton interprets kernels on CPUs.

A process of its own, because triton decides when it is imported whether kernels are compiled or interpreted.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).with_name("interpreted_forms.py")


@pytest.mark.skipif(torch.cuda.is_available(), reason="test_triton_gpu.py runs them compiled")
def test_forms_under_the_interpreter():
    path = os.pathsep.join([str(TESTS.parents[2] / "kernels"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(TESTS)],
        env={**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert int(done.stdout.rsplit(" passed", 1)[0].split()[-1]) >= 130  # none skipped or lost
