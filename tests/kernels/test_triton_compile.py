"""Every kernel configuration compiles for the GPUs that it may run on, within their shared memory."""

import collections
import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
SHARED = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10}  # bytes a program may have


def test_kernels_compile_within_shared_memory(tmp_path):
    path = os.pathsep.join([str(HERE.parents[1] / "kernels"), os.environ.get("PYTHONPATH", "")])
    compilers = [
        subprocess.Popen(
            [sys.executable, str(HERE / "compile_kernels.py"), *archs],
            env={**os.environ, "PYTHONPATH": path, "TRITON_CACHE_DIR": str(tmp_path / archs[0])},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for archs in (("80", "89"), ("90",))
    ]
    results = []
    for compiler in compilers:
        compiled, errors = compiler.communicate()
        assert compiler.returncode == 0, errors[-3000:]
        results += json.loads(compiled)
    assert [r for r in results if r["shared"] > SHARED[r["arch"]]] == []
    counts = collections.Counter((r["arch"], r["kernel"]) for r in results)
    for arch in SHARED:
        assert (
            counts[arch, "exp_rows_kernel"] == 4
            and counts[arch, "refine_kernel"] >= 2
            and counts[arch, "grpo_rows_kernel"] == 3
        )
    assert counts[90, "exp_gemm_kernel"] == 4  # TMA: capability 9 alone
    gemm = [r["shared"] for r in results if r["kernel"] == "exp_gemm_kernel"]
    assert min(gemm) > 3 * (128 + 256) * 64 * 2  # three stages of both operands are really there
