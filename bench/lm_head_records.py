"""Write the result file of bench_lm_head.py (lm_head_file.py says what is in it), row by row as a run goes on."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from lm_head_exact import Exact
from lm_head_file import load
from lm_head_timing import Result, quantiles
from run_summary import versions

PACKAGES = ("torch", "triton", "liger-kernel", "cut-cross-entropy", "nvidia-cutlass-dsl")


class Records:
    """The JSON file: rewritten whole at every addition, so that a run cut short keeps what it had."""

    def __init__(self, path: Path, device: str, commit: str, *, keep: bool = False):
        self.path = path
        self.common = {"versions": versions(PACKAGES), "commit": commit}
        self.content: dict = {"device": device, "data": [], "rows": []}
        if keep and path.exists():
            self.content = load(path)
        path.parent.mkdir(parents=True, exist_ok=True)

    def has(self, op: str, impl: str, size: tuple[int, int, int]) -> bool:
        wanted = (op, impl, *size)
        return any(tuple(row[k] for k in ("op", "impl", "T", "H", "V")) == wanted for row in self.content["rows"])

    def add(self, rows: Iterable[dict]) -> None:
        self.content["rows"] += [row | self.common for row in rows]
        self._write()

    def add_data(self, size: tuple[int, int, int], exact: Exact) -> None:
        entry = dict(zip("THV", size, strict=True))
        entry |= {"mean_entropy": round(exact.entropy_S.mean().item(), 4), "reference_lse_err": exact.lse_error}
        self.content["data"] = [old for old in self.content["data"] if tuple(old[k] for k in "THV") != size] + [entry]
        self._write()

    def _write(self) -> None:
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.content, indent=1) + "\n")
        partial.replace(self.path)


def make_row(op: str, result: Result, size: tuple[int, int, int], floor_ms: float | None) -> dict:
    empty = {"max_abs_logp_err": None, "max_abs_entropy_err": None, "rel_dx_err": None, "rel_dw_err": None}
    return {
        "op": op,
        "impl": result.peer.name,
        **dict(zip("THV", size, strict=True)),
        **quantiles(result.milliseconds),
        "repeats": len(result.milliseconds),
        "gemm_floor_ms": floor_ms,
        "peak_gib": result.peak_gib,
        **empty,
        **result.errors,
        "first_call_s": result.first_call_s,
        "error": result.error,
    }
