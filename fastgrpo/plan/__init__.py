"""The memory planner: what a run will take of each GPU and of the host, before anything is loaded.

    sizes.py      config.json -> ModelSizes (parameter counts, widths)
    job.py        RunConfig, Layout, Sizes -> Job: what the formulas read
    memory.py     Job, Settings -> bytes at each peak
    choose.py     the fastest settings that fit            constants.py   every number that no formula gives
    settle.py     open (null) options -> decided ones      advice.py      the one change that helps most
    table.py      all of it in words                       __main__.py    python -m fastgrpo.plan

It works on numbers alone: no torch, no GPU, no weights (but for counting a model class that no formula describes).
"""

from fastgrpo.plan.choose import Plan
from fastgrpo.plan.job import Sizes
from fastgrpo.plan.settle import engine_sizes, make_plan, settle, settle_on_cpu, with_option
from fastgrpo.plan.sizes import ModelSizes, read_sizes
from fastgrpo.plan.table import advice_line, decision_lines, explain, memory_lines

__all__ = [
    "ModelSizes",
    "Plan",
    "Sizes",
    "advice_line",
    "decision_lines",
    "engine_sizes",
    "explain",
    "make_plan",
    "memory_lines",
    "read_sizes",
    "settle",
    "settle_on_cpu",
    "with_option",
]
