"""vLLM's scheduler, which leaves its bookkeeping of cache blocks alone where a decode step changes nothing in it.

    a sequence's next token, in its block of 16
     0            needs a new block                                      -> vLLM
     1 ... 14     changes nothing                                        -> no blocks, at once
    15            fills the block, which may be shared from then on      -> vLLM, now or when the token has been read

vLLM plans each step in Python, for every sequence anew, while the device works on the step before. With a small model
the planning takes longer than the kernels, and most of it is the bookkeeping of blocks. What is planned is vLLM's to
the last field. Not here: sequences that start, that are preempted or come back, and every other decision; nor models
with a window, a state or several kinds of caches, drafted tokens, and blocks from elsewhere: vLLM's own bookkeeping
answers for all of those.

vLLM imports this module by name (`scheduler_cls`) in a process that serves; nothing else may.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec


class BlockKeeper:
    """Stands in the place of a KVCacheManager with blocks of `block_size` tokens, and is one but for that."""

    def __init__(self, manager: Any, block_size: int) -> None:
        self._manager = manager
        self._block_size = block_size
        self._nothing_new = manager.empty_kv_cache_blocks
        for name in set(dir(type(manager))) - set(dir(type(self))):  # some are asked for each sequence of a step
            if callable(getattr(type(manager), name)):
                setattr(self, name, getattr(manager, name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def allocate_slots(self, request: Any, num_new_tokens: int, *args: Any, **options: Any) -> Any:
        running = num_new_tokens == 1 and not args and options == {"num_lookahead_tokens": 0}
        if running and 0 < request.num_computed_tokens % self._block_size < self._block_size - 1:
            return self._nothing_new
        return self._manager.allocate_slots(request, num_new_tokens, *args, **options)

    def cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
        """Called with each token that is read. A prompt's blocks are shared where its slots are allocated."""
        if num_computed_tokens % self._block_size == 0:
            self._manager.cache_blocks(request, num_computed_tokens)


def make_scheduler(*, vllm_config: Any, **options: Any) -> Any:
    """vLLM's own for this configuration, with a BlockKeeper where the model lets it have one."""
    kind = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    scheduler: Any = kind(vllm_config=vllm_config, **options)
    block_size = plain_block_size(scheduler.kv_cache_manager)
    if block_size is not None and vllm_config.speculative_config is None and scheduler.connector is None:
        scheduler.kv_cache_manager = BlockKeeper(scheduler.kv_cache_manager, block_size)
    return scheduler


def plain_block_size(manager: Any) -> int | None:
    """Tokens of a block where full attention is all that there is, else None."""
    groups = manager.kv_cache_config.kv_cache_groups
    if len(groups) != 1 or type(groups[0].kv_cache_spec) is not FullAttentionSpec:
        return None
    spec = groups[0].kv_cache_spec
    if spec.sliding_window is not None or spec.attention_chunk_size is not None:
        return None
    [single] = manager.coordinator.single_type_managers
    return single.block_size
