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

from pathlib import Path
from typing import Any

from cli import lacks_rows, read_result

DATA_KEYS = {"T", "H", "V", "mean_entropy"}
ROW_KEYS = {
    *("op", "impl", "T", "H", "V", "ms_p20", "ms_p50", "ms_p80", "repeats", "gemm_floor_ms", "peak_gib"),
    *("max_abs_logp_err", "max_abs_entropy_err", "rel_dx_err", "rel_dw_err", "error", "versions", "commit"),
}


def load(path: Path) -> dict[str, Any]:
    """The object in `path`. Refuses what cannot be read or is not of this kind."""
    return read_result(path, _missing, "bench_lm_head.py")


def _missing(content: Any) -> str | None:
    if not isinstance(content, dict) or not isinstance(content.get("device"), str):
        return "not an object with a device"
    return lacks_rows(content, {"data": DATA_KEYS, "rows": ROW_KEYS})
