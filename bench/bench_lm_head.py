"""Time the lm_head kernels and their peers on this machine's CUDA device, with their errors against fp64.

    python bench/bench_lm_head.py                        four shapes at T = 16384, about 6 minutes on an H200
    python bench/bench_lm_head.py --quick                the smallest shape at T = 4096, under a minute
    python bench/bench_lm_head.py --render FILE --readme README.md        table and picture again; no GPU, no kernels

Measured are the training pass (a GRPO loss with clipping and k3, gradients of hidden and weight), the same on cross
entropy, which is all that some peers have, the pass without gradient (logprob and entropy), and the memory of the
training pass over T. Rows go to bench/results/lm_head_<gpu>.json as they come, the picture beside it, the tables to the
screen. T is halved until a shape fits the free memory. A peer that cannot run here is a row that says why; one that
takes the CUDA context down costs a restart, which goes on behind it.

The parts: lm_head_run.py (the run), lm_head_data.py (inputs), lm_head_exact.py (fp64), lm_head_peers.py and
lm_head_own.py (what is timed), lm_head_timing.py (how), lm_head_records.py and lm_head_file.py (the file),
lm_head_report.py, lm_head_tables.py and lm_head_picture.py (pages from it).
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

import torch

from cli import MISUSE, checked_out, make_parser, no_gpu, positive_int, positive_number
from lm_head_report import check_page, render
from run_summary import commit, slug

SHAPES = ((896, 151936), (1536, 151936), (3584, 152064), (4096, 128256))
RESULTS = Path(__file__).parent / "results"


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="the smallest shape, 4096 rows, 3 repeats")
    parser.add_argument("--shapes", nargs="+", type=shape, metavar="HxV", help="hidden x vocabulary, 3584x152064 say")
    parser.add_argument("--rows", nargs="+", type=positive_int, metavar="T", help="rows; default 16384")
    parser.add_argument("--impl", nargs="+", metavar="NAME", help="only peers whose name contains one of these")
    parser.add_argument(
        "--minutes", type=positive_number, help="what is not begun by then is left out; default 6, quick 0.6"
    )
    parser.add_argument("--resume", action="store_true", help="keep the rows of --out and measure what is missing")
    parser.add_argument("--render", type=Path, metavar="FILE", help="only draw FILE's tables and picture")
    parser.add_argument(
        "--readme", type=Path, metavar="FILE", help="write the table between FILE's lm_head table markers"
    )
    args = parser.parse_args(arguments)
    args.rows = args.rows or [4096 if args.quick else 16384]
    args.shapes = args.shapes or (SHAPES[:1] if args.quick else SHAPES)
    args.minutes = args.minutes or (0.6 if args.quick else 6.0)  # none given: 0 was refused
    return args


def shape(text: str) -> tuple[int, int]:
    """(3584, 152064) from "3584x152064"."""
    if not (found := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not HIDDENxVOCABULARY, like 3584x152064")
    return int(found[1]), int(found[2])


def main(arguments: list[str]) -> int:
    args = parse(arguments)
    if args.render:
        print(render(args.render, args.readme))
        return 0
    if not torch.cuda.is_available():
        return no_gpu("bench_lm_head.py times GPU kernels", "--render FILE draws an existing result")
    if args.readme:
        check_page(args.readme)  # now rather than after the run
    try:
        from lm_head_run import LostDevice, Records, run
    except ModuleNotFoundError as error:
        if error.name != "fastgrpo_kernels":
            raise
        print("bench_lm_head.py times fastgrpo_kernels, which is not installed here: set PYTHONPATH=kernels.")
        return MISUSE
    gpu = torch.cuda.get_device_name()
    out = checked_out(args.out or RESULTS / f"lm_head_{slug(gpu)}{'_quick' if args.quick else ''}.json")
    try:
        run(args, Records(out, gpu, args.commit or commit(), keep=args.resume))
    except LostDevice as lost:
        print(f"{lost} took the CUDA context down: going on without it in a new process", file=sys.stderr, flush=True)
        again = [] if args.resume else ["--resume"]
        os.execv(sys.executable, [sys.executable, __file__, *arguments, *again])
    print(render(out, args.readme))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
