"""The GPU memory that a run may use, and the plan made for it: where fastgrpo/plan meets the device.

    mem_get_info, trainer.gpu_memory_gib  -->  bytes that every rank has  -->  plan  -->  configuration, decided

All ranks take the same decisions, from the least that any of them finds: the micro-batches and the sharded state must
be cut alike. With trainer.gpu_memory_gib torch's allocator is capped too, so that a run on a larger GPU shows what it
would do on the smaller one. (The engine's cache lies outside of that cap; its size is the plan's.)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from fastgrpo import console
from fastgrpo.config import Layout, RunConfig
from fastgrpo.mesh import Mesh
from fastgrpo.plan import Plan, Sizes, decision_lines, explain, memory_lines, settle, settle_on_cpu, with_option
from fastgrpo.plan.constants import CUDA_CONTEXT, GIB
from fastgrpo.policy import liger

log = logging.getLogger("fastgrpo")


def settle_memory(config: RunConfig, sizes: Sizes, layout: Layout, mesh: Mesh) -> tuple[RunConfig, Plan | None]:
    """`config` with every open option of memory decided, and the plan (None on a CPU). A collective; to be called
    before anything lies on the device. Prints the plan, and what would help if it does not fit: it is a prediction,
    so the run goes on."""
    if mesh.device.type != "cuda":
        return settle_on_cpu(config), None
    gpu_bytes = min(mesh.gather(_usable(config, mesh.device)))
    if config.actor.use_liger and not liger.is_installed():
        config = with_option(config, "actor.use_liger", False)
    settled, plan = settle(config, sizes, layout, gpu_bytes)
    if plan.fits:
        console.say("\n".join([*memory_lines(plan), *decision_lines(config, settled)]))
    elif mesh.is_main:
        log.warning(explain(config, sizes, layout, gpu_bytes))
    return settled, plan


def _usable(config: RunConfig, device: torch.device) -> int:
    """Bytes of this rank's GPU: what is free now, with this process's own context."""
    free, total = torch.cuda.mem_get_info(device)
    usable, cap = min(total, free + CUDA_CONTEXT), config.trainer.gpu_memory_gib
    if cap is None:
        return usable
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap * GIB / total), device)
    return min(usable, int(cap * GIB))


@contextmanager
def explaining_lack_of_memory(
    config: RunConfig, plan: Plan | None, layout: Layout, stage: Callable[[], str | None]
) -> Iterator[None]:
    """To an OutOfMemoryError inside the block the plan's view is added, with the one change that helps most: it is
    printed below the traceback. `stage`: in which one it happened (see clock.py)."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        if plan is not None:
            phase = "rollout" if stage() in ("sync", "gen", "validate") else "training"
            sizes = Sizes(plan.job.model, plan.job.reference)
            where = f"memory ran out in stage {stage()}" if stage() else "memory ran out"
            error.add_note(f"{where}\n{explain(config, sizes, layout, plan.gpu_bytes, phase=phase)}")
        raise
