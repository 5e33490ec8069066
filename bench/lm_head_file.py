"""The result file of bench_lm_head.py and how it is read: one JSON object, a row for each implementation, op and size.

    device, data: [{T, H, V, mean_entropy (nats), reference_lse_err}],
    rows: [{op, impl, T, H, V, ms_p20, ms_p50, ms_p80, repeats, gemm_floor_ms, peak_gib (above the inputs),
            max_abs_logp_err, max_abs_entropy_err (nats), rel_dx_err, rel_dw_err, first_call_s, error,
            versions, commit}]

A row without times has its reason in `error`. gemm_floor_ms is the median of the bare GEMMs in the same turns. Rows of
the op "memory" also have beyond_gradients_gib where they ran. Written by lm_head_records.py, apart from here because
that needs the kernels.
"""

from __future__ import annotations

import json
from pathlib import Path

DATA_KEYS = {"T", "H", "V", "mean_entropy"}
ROW_KEYS = {
    *("op", "impl", "T", "H", "V", "ms_p20", "ms_p50", "ms_p80", "repeats", "gemm_floor_ms", "peak_gib"),
    *("max_abs_logp_err", "max_abs_entropy_err", "rel_dx_err", "rel_dw_err", "error", "versions", "commit"),
}


def load(path: Path) -> dict:
    """The object in `path`. SystemExit with one line where it cannot be read or is not of this kind."""
    try:
        content = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise SystemExit(f"{path} is no result of bench_lm_head.py: not JSON ({error})") from None
    if missing := _missing(content):
        raise SystemExit(f"{path} is no result of bench_lm_head.py: {missing}")
    return content


def _missing(content: object) -> str | None:
    if not isinstance(content, dict) or not isinstance(content.get("device"), str):
        return "not an object with a device"
    for name, wanted in (("data", DATA_KEYS), ("rows", ROW_KEYS)):
        if not isinstance(content.get(name), list):
            return f"it has no list of {name}"
        for i, entry in enumerate(content[name]):
            if lacking := wanted - (set(entry) if isinstance(entry, dict) else set()):
                return f"{name}[{i}] has no {', '.join(sorted(lacking))}"
    return None


def read_text(path: Path) -> str:
    """SystemExit with one line where there is no such text file."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise SystemExit(f"cannot read {path}: {reason}") from None
