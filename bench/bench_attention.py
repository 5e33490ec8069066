"""Time the attention backends of fastgrpo/policy/attention.py on packed rows, with their errors against fp64.

    python bench/bench_attention.py                      every backend that runs here, two minutes on an H200
    python bench/bench_attention.py --smoke              SDPA on a tiny row, anywhere

Rows of 16,384 tokens (32,768 for the longest) are cut into sequences of one length, or of drawn ones ("mixed"). A row
of the result is {shape, lengths, backend, forward_ms, training_ms (forward and backward), training_tflops (of causal
attention's own work, 3 x the forward's), max_abs_out_err, rel_dq_err, rel_dk_err, rel_dv_err, error, versions, commit,
device}. The errors are the backend's on one small mixed row in the same dtype: the largest |out - fp64|, and
|gradient - fp64| in norm over the fp64 gradient's norm.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cli import command, make_parser, no_gpu, positive_int
from fastgrpo.errors import UserError
from fastgrpo.policy.attention import Packing, choose_backend, make_packing
from run_summary import out_file, provenance

BACKENDS = ("varlen", "sdpa", "flash")
SHAPES = {"1.5B": (12, 2, 128), "7B": (28, 4, 128), "0.5B": (14, 2, 64)}  # query heads, KV heads, head size
SMALL = (300, 1, 77, 134, 512)
PACKAGES = ("torch", "triton", "flash-attn", "flash-attn-4", "transformers")


def main(arguments: list[str]) -> int:
    parser = make_parser(__doc__, smoke="a tiny row, on any machine")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, help="default: all")
    parser.add_argument("--repeats", type=positive_int, default=20)
    args = parser.parse_args(arguments)
    if args.smoke and args.shapes:
        parser.error("--smoke has a tiny shape of its own: leave --shapes away")
    if not torch.cuda.is_available() and not args.smoke:
        return no_gpu("bench_attention.py times GPU kernels", "--smoke tries the script on a CPU")
    out = out_file(args, "attention")
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    common = provenance(args.commit, PACKAGES)
    cases = {"64": [64] * 4, "mixed": list(SMALL)} if args.smoke else packed_rows()
    shapes = {"tiny": (4, 2, 32)} if args.smoke else {name: SHAPES[name] for name in args.shapes or SHAPES}
    rows = []
    for shape, heads in shapes.items():
        for backend in BACKENDS:
            rows += [
                row | common for row in run_backend(backend, shape, heads, cases, torch.device(device), dtype, args)
            ]
    out.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    return 0


def packed_rows() -> dict[str, list[int]]:
    """Name -> lengths of the sequences of one row."""
    mixed = np.random.default_rng(0).integers(64, 2048, 64)
    mixed = mixed[: int(np.searchsorted(mixed.cumsum(), 16384, side="right"))]
    equal = {str(length): [length] * (16384 // length) for length in (256, 1024, 4096, 16384)}
    return equal | {"32768": [32768], "mixed": [*mixed.tolist(), 16384 - int(mixed.sum())]}


def run_backend(
    name: str,
    shape: str,
    heads: tuple[int, int, int],
    cases: dict[str, list[int]],
    device: torch.device,
    dtype: torch.dtype,
    args: argparse.Namespace,
) -> list[dict[str, Any]]:
    try:
        backend = choose_backend(name, device, dtype)
        found = errors(backend, heads, device, dtype)
    except (UserError, RuntimeError, ImportError) as error:
        print(f"{shape:5} {name:7} {str(error).splitlines()[0]}", flush=True)
        return [{"shape": shape, "lengths": None, "backend": name, "error": str(error).splitlines()[0]}]
    rows = []
    for label, lengths in cases.items():
        row = {"shape": shape, "lengths": label, "backend": name, "error": None, **found}
        try:
            row |= timed(backend, heads, lengths, device, dtype, args.repeats)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            row["error"] = str(error).splitlines()[0]
        print(
            f"{shape:5} {name:7} {label:>6}", {k: v for k, v in row.items() if k.endswith(("ms", "flops"))}, flush=True
        )
        rows.append(row)
    return rows


def make_row(
    heads: tuple[int, int, int], lengths: list[int], backend: Any, device: torch.device, dtype: torch.dtype
) -> tuple[list[Tensor], Tensor, Packing]:
    """q, k, v that want gradients, the gradient of the output, and the packing."""
    query, kv, size = heads
    generator = torch.Generator(device).manual_seed(0)
    total = sum(lengths)
    make = [torch.randn(total, h, size, device=device, generator=generator).to(dtype) for h in (query, kv, kv, query)]
    cu = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    return [x.requires_grad_() for x in make[:3]], make[3], make_packing(cu, max(lengths), backend, None, device)


def errors(backend: Any, heads: tuple[int, int, int], device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    qkv, gradient, packing = make_row(heads, list(SMALL), backend, device, dtype)
    scale = heads[2] ** -0.5
    out = backend(*qkv, packing, scale)
    out.backward(gradient)
    exact_qkv = [x.detach().double().requires_grad_() for x in qkv]
    exact = exact_attention(*exact_qkv, list(SMALL), scale)
    exact.backward(gradient.double())
    found = {"max_abs_out_err": (out.detach().double() - exact.detach()).abs().max().item()}
    for name, own, right in zip("qkv", qkv, exact_qkv, strict=True):
        assert own.grad is not None and right.grad is not None
        found[f"rel_d{name}_err"] = float((own.grad.double() - right.grad).norm() / right.grad.norm())
    return found


def exact_attention(q_TQD: Tensor, k_TKD: Tensor, v_TKD: Tensor, lengths: list[int], scale: float) -> Tensor:
    """Causal attention of each sequence for itself, written out."""
    groups = q_TQD.shape[1] // k_TKD.shape[1]
    outputs = []
    for q, k, v in zip(*(x.split(lengths) for x in (q_TQD, k_TKD, v_TKD)), strict=True):
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        scores = torch.einsum("iqd,jqd->qij", q, k) * scale
        ahead = torch.ones(len(q), len(q), device=q.device, dtype=torch.bool).triu(1)
        outputs.append(torch.einsum("qij,jqd->iqd", scores.masked_fill(ahead, float("-inf")).softmax(-1), v))
    return torch.cat(outputs)


def timed(
    backend: Any,
    heads: tuple[int, int, int],
    lengths: list[int],
    device: torch.device,
    dtype: torch.dtype,
    repeats: int,
) -> dict[str, float]:
    qkv, gradient, packing = make_row(heads, lengths, backend, device, dtype)
    scale = heads[2] ** -0.5
    with torch.no_grad():
        forward_ms = median_ms(lambda: backend(*qkv, packing, scale), repeats)
    training_ms = median_ms(lambda: torch.autograd.grad(backend(*qkv, packing, scale), qkv, gradient), repeats)
    work = 3 * 2.0 * sum(length**2 for length in lengths) * heads[0] * heads[2]
    return {
        "forward_ms": round(forward_ms, 4),
        "training_ms": round(training_ms, 4),
        "training_tflops": round(work / training_ms / 1e9, 1),
    }


def median_ms(call: Callable[[], object], repeats: int) -> float:
    """CUDA events; on a CPU, for the smoke test, the wall clock."""
    import time

    times = []
    for _ in range(repeats + 3):
        if torch.cuda.is_available():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        else:
            before = time.perf_counter()
            call()
            times.append(1000 * (time.perf_counter() - before))
    return float(np.median(times[3:]))


if __name__ == "__main__":
    sys.exit(command(main, sys.argv[1:]))
