"""The memory that a run may use, and the plan made for it: where fastgrpo/plan meets the device and its host.

    whole memory, trainer.gpu_memory_gib      -->  ranks of an engine, before the ranks are joined
    mem_get_info, trainer.gpu_memory_gib  -->  bytes that every rank has  -->  plan  -->  configuration, decided
    the GPU's name, trainer.peak_tflops       -->  the slowest one's speed    ---+
    host_memory.read, trainer.host_memory_gib -->  bytes that every node has  ---^

All ranks take the same decisions, from the least that any of them finds: the micro-batches and the sharded state must
be cut alike. With trainer.gpu_memory_gib torch's allocator is capped too, so that a run on a larger GPU shows what it
would do on the smaller one. What the engine holds comes on top of that cap: torch counts it also while the engine
sleeps and its pages are gone, and its size is the plan's.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from fastgrpo import console, host_memory
from fastgrpo.config import Layout, RunConfig, compute_dtype
from fastgrpo.errors import UserError
from fastgrpo.flops import peak_flops
from fastgrpo.mesh import Mesh
from fastgrpo.plan import (
    Plan,
    Sizes,
    advice_line,
    decision_lines,
    engine_sizes,
    explain,
    make_plan,
    memory_lines,
    settle,
    settle_on_cpu,
    with_option,
)
from fastgrpo.plan.constants import CUDA_CONTEXT, GIB
from fastgrpo.plan.memory import pinned_state
from fastgrpo.policy import liger

log = logging.getLogger("fastgrpo")


def settle_engine(config: RunConfig, sizes: Sizes, layout: Layout, device_type: str) -> RunConfig:
    """`config` with rollout.tensor_model_parallel_size decided. It says which ranks share an engine, so it is wanted
    before they are joined: no collective, each rank reckons by itself from what is the same on all of them,
    trainer.gpu_memory_gib and the size of a GPU. (Where GPUs differ, build_mesh finds the ranks at odds.)"""
    if config.rollout.tensor_model_parallel_size is not None:
        return config
    size = 1
    if device_type == "cuda" and len(engine_sizes(config, sizes.model, layout)) > 1:
        total = torch.cuda.get_device_properties(int(os.environ.get("LOCAL_RANK", "0"))).total_memory
        cap = config.trainer.gpu_memory_gib
        gpu_bytes = total if cap is None else min(total, int(cap * GIB))
        size = make_plan(_as_installed(config), sizes, layout, gpu_bytes).job.tp
    settled = with_option(config, "rollout.tensor_model_parallel_size", size)
    if layout.world > 1:
        console.say("\n".join(decision_lines(config, settled)))
    return settled


def settle_memory(config: RunConfig, sizes: Sizes, layout: Layout, mesh: Mesh) -> tuple[RunConfig, Plan | None]:
    """`config` with every open option of memory decided, and the plan (None on a CPU). A collective; to be called
    before anything lies on the device. Prints the plan, and what would help if it does not fit on GPU or host: it is a
    prediction, so the run goes on. Raises UserError only where a node has less memory than is pinned there."""
    if mesh.device.type != "cuda":
        return settle_on_cpu(config), None
    gpu_bytes = min(mesh.gather(_usable(config, mesh.device)))
    config = _with_speed(_as_installed(config), mesh)
    config, host_total = _with_host(config, layout, mesh)
    settled, plan = settle(config, sizes, layout, gpu_bytes)
    pinned = pinned_state(plan.job, plan.settings)
    if host_total is not None and pinned > host_total:
        helps = advice_line(config, sizes, layout, gpu_bytes, "host")
        raise UserError(
            f"masters and optimizer state that go to host memory take {pinned / GIB:.1f} GiB of a node, which has "
            f"{host_total / GIB:.1f} GiB: the run would be killed; {helps}"
        )
    if plan.fits:
        console.say("\n".join([*memory_lines(plan), *decision_lines(config, settled)]))
    elif mesh.is_main:
        log.warning(explain(config, sizes, layout, gpu_bytes))
    return settled, plan


def _as_installed(config: RunConfig) -> RunConfig:
    missing = config.actor.use_liger and not liger.is_installed()
    return with_option(config, "actor.use_liger", False) if missing else config


def _with_speed(config: RunConfig, mesh: Mesh) -> RunConfig:
    """`config` with trainer.peak_tflops, if that is open and the slowest rank's GPU is a known one."""
    name, dtype = torch.cuda.get_device_name(mesh.device), compute_dtype(config.actor.dtype, mesh.device.type)
    found = mesh.gather(peak_flops(name, config.trainer.peak_tflops, dtype))
    known = [flops for flops in found if flops is not None]
    return with_option(config, "trainer.peak_tflops", min(known) / 1e12) if len(known) == len(found) else config


def _with_host(config: RunConfig, layout: Layout, mesh: Mesh) -> tuple[RunConfig, int | None]:
    """`config` with trainer.host_memory_gib, if that is open, set to what the fullest of all nodes has left for its
    ranks (what they have taken already is in the plan), and the least total of a node; None where nobody knows."""
    here = host_memory.read()
    found = mesh.gather(here and (here.total, here.available + layout.ranks_per_node * host_memory.own_bytes()))
    known = [memory for memory in found if memory is not None]
    if not known:
        return config, None
    total, left = (min(sizes) for sizes in zip(*known, strict=True))
    if config.trainer.host_memory_gib is None:
        config = with_option(config, "trainer.host_memory_gib", round(min(left, total) / GIB, 3))
    return config, total


def _usable(config: RunConfig, device: torch.device) -> int:
    """Bytes of this rank's GPU: what is free now, with this process's own context."""
    free, total = torch.cuda.mem_get_info(device)
    usable, cap = min(total, free + CUDA_CONTEXT), config.trainer.gpu_memory_gib
    cap_memory(config, device)
    return usable if cap is None else min(usable, int(cap * GIB))


def cap_memory(config: RunConfig, device: torch.device, engine_bytes: int = 0) -> None:
    """Holds torch's allocator to trainer.gpu_memory_gib, if that is set, and `engine_bytes`, which it counts for an
    engine whether that sleeps or not. To be called again when an engine has been built."""
    cap = config.trainer.gpu_memory_gib
    if cap is None or device.type != "cuda":
        return
    total = torch.cuda.mem_get_info(device)[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, (cap * GIB + engine_bytes) / total), device)


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
