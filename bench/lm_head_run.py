"""One run of bench_lm_head.py: shape by shape what is timed and written down, then the training pass's memory over T.

Not here: the command line (bench_lm_head.py), how a pass is timed (lm_head_timing.py). Apart from the command line
because it imports the kernels, which drawing an existing result does without.
"""

from __future__ import annotations

import argparse

import torch

from fastgrpo_kernels import linear_logprob
from fastgrpo_kernels._chunks import DEFAULT_CHUNK_BYTES_CUDA
from lm_head_data import Inputs, make_hidden, make_inputs, make_weight
from lm_head_exact import Exact, logp_of_all, lse_of_all, make_exact
from lm_head_peers import FLOOR, Peer, all_peers, row_kernels
from lm_head_records import Records, make_row
from lm_head_timing import GIB, Deadline, LostDevice, Result, measure, quantiles

MEMORY_ROWS = tuple(8192 << i for i in range(6))
MEMORY_IMPLS = ("fastgrpo", "fastgrpo, 1 GiB")
TURNS = (("nograd",), ("train", "ce"), ("row",))  # ops whose passes are timed in turns, against one floor
DEVICE = "cuda"


def run(args: argparse.Namespace, records: Records) -> None:
    deadline = Deadline.after(60 * args.minutes)
    chosen = [peer for peer in [*all_peers(), *row_kernels()] if is_chosen(peer, args.impl)]
    for hidden, vocab in args.shapes:
        for rows in args.rows:
            run_shape(args, records, chosen, (rows, hidden, vocab), deadline)
    hidden, vocab = max(args.shapes, key=lambda shape: shape[0] * shape[1])
    for rows in MEMORY_ROWS[:1] if args.quick else MEMORY_ROWS:
        peers = [peer for peer in chosen if peer.op == "train" and peer.name in MEMORY_IMPLS]
        run_memory(records, peers, (rows, hidden, vocab), deadline)


def is_chosen(peer: Peer, names: list[str] | None) -> bool:
    return names is None or peer.name == FLOOR or any(name.lower() in peer.name.lower() for name in names)


def run_shape(
    args: argparse.Namespace,
    records: Records,
    peers: list[Peer],
    size: tuple[int, int, int],
    deadline: Deadline,
) -> None:
    """The ops of one shape; `size` is T (wanted), H, V."""
    if not (rows := fitting_rows(*size, free_bytes())):
        reason = "no number of rows fits the free memory"
        records.add(make_row(peer.op, Result(peer, error=reason), size, None) for peer in peers)
        return
    size = (rows, *size[1:])
    todo = [[peer for peer in peers if peer.op in ops and not records.has(peer.op, peer.name, size)] for ops in TURNS]
    if not any(todo):
        print(f"{size}: done before", flush=True)
        return
    inputs, exact = prepare(*size)
    records.add_data(size, exact)
    print(f"T {size[0]} H {size[1]} V {size[2]}: mean entropy {exact.entropy_S.mean().item():.3f}", flush=True)
    for pending in todo:
        try:
            results = measure(
                pending,
                inputs,
                exact,
                repeats=3 if args.quick else 9,
                seconds_each=15 if args.quick else 90,
                deadline=deadline,
            )
        except LostDevice as lost:
            records.add([make_row(lost.result.peer.op, lost.result, size, None)])
            raise
        floor_ms = next((quantiles(r.milliseconds)["ms_p50"] for r in results if r.peer.name == FLOOR), None)
        new = [make_row(result.peer.op, result, size, floor_ms) for result in results]
        records.add(new)
        for row in new:
            print(f"  {row['op']:7} {row['impl']:34} {describe(row)}", flush=True)


def describe(row: dict) -> str:
    if row["error"]:
        return row["error"]
    return f"{row['ms_p50']:9.2f} ms  {row['peak_gib']:6.2f} GiB" if row["ms_p50"] is not None else "not timed"


def prepare(rows: int, hidden: int, vocab: int) -> tuple[Inputs, Exact]:
    generator = torch.Generator(DEVICE).manual_seed(0)
    weight_VH = make_weight(hidden, vocab, generator)
    hidden_TH, target_T = make_hidden(rows, weight_VH, generator)
    lse_T = lse_of_all(hidden_TH, weight_VH)
    inputs = make_inputs(hidden_TH, weight_VH, target_T, logp_of_all(hidden_TH, weight_VH, target_T, lse_T))
    return inputs, make_exact(inputs, lse_T)


def run_memory(records: Records, peers: list[Peer], size: tuple[int, int, int], deadline: Deadline) -> None:
    """Peak of the training pass at one T, and what is left of it without gradients and an fp32 sum of dW."""
    pending = [peer for peer in peers if not records.has("memory", peer.name, size)]
    if not pending:
        return
    if needed_bytes(*size, whole=False) > free_bytes():
        reason = "does not fit the free memory"
        records.add(make_row("memory", Result(peer, error=reason), size, None) for peer in pending)
        return
    rows, hidden, vocab = size
    generator = torch.Generator(DEVICE).manual_seed(0)
    weight_VH = make_weight(hidden, vocab, generator)
    hidden_TH, target_T = make_hidden(rows, weight_VH, generator)
    with torch.no_grad():
        logp_T, _ = linear_logprob(hidden_TH, weight_VH, target_T)
    inputs = make_inputs(hidden_TH, weight_VH, target_T, logp_T)
    try:
        results = measure(pending, inputs, None, repeats=3, seconds_each=60, deadline=deadline)
    except LostDevice as lost:
        records.add([make_row("memory", lost.result, size, None)])
        raise
    for result in results:
        row = make_row("memory", result, size, None)
        gradients_gib = (2 * rows * hidden + (2 + 4) * vocab * hidden) / GIB
        row["beyond_gradients_gib"] = None if row["peak_gib"] is None else row["peak_gib"] - gradients_gib
        records.add([row])
        print(f"  memory  {row['impl']:34} T {rows:6} {describe(row)}", flush=True)


def free_bytes() -> int:
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def fitting_rows(rows: int, hidden: int, vocab: int, free: int) -> int:
    """`rows` halved until inputs, our op and the floor's products fit `free` bytes; 0 if fewer than 256 would do."""
    while rows and needed_bytes(rows, hidden, vocab, whole=True) > free:
        rows = rows // 2 if rows >= 512 else 0
    return rows


def needed_bytes(rows: int, hidden: int, vocab: int, *, whole: bool) -> int:
    """Of the training pass: tensors and gradients, fp32 sum of dW, two chunks of logits; `whole`: bf16 [T, V] twice."""
    one_chunk = min(DEFAULT_CHUNK_BYTES_CUDA, 4 * rows * vocab)
    logits = max(2 * one_chunk, 2 * rows * vocab) + 2 * rows * vocab if whole else 2 * one_chunk
    return int(1.1 * (10 * vocab * hidden + 6 * rows * hidden + logits))
