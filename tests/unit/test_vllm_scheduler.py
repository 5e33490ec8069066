"""The scheduler with the BlockKeeper plans what vLLM's plans, step for step, and its cache is in the same state; what
vLLM is asked then; models for which it stays away."""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from fastgrpo.rollout.vllm_scheduler import BlockKeeper, make_scheduler

BLOCK, LONGEST, END = 16, 160, 7


def options(
    folder: Path, *, ahead: bool, blocks: int, caching: bool = True, window: int | None = None
) -> dict[str, Any]:
    """What vLLM builds a scheduler with."""
    model = ModelConfig(model=str(folder), dtype="float32", max_model_len=LONGEST, skip_tokenizer_init=True)
    sizes: dict[str, Any] = dict(max_num_batched_tokens=64, max_num_seqs=6, max_model_len=LONGEST)
    plan = SchedulerConfig(**sizes, is_encoder_decoder=False, async_scheduling=ahead, enable_chunked_prefill=True)
    cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=caching)
    device = DeviceConfig(device="cpu")
    config = VllmConfig(model_config=model, scheduler_config=plan, cache_config=cache, device_config=device)
    config.scheduler_config.async_scheduling = ahead  # which a CPU's platform takes back
    cache.num_gpu_blocks = blocks
    of_a_head: dict[str, Any] = dict(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
    spec = FullAttentionSpec(**of_a_head) if window is None else SlidingWindowSpec(**of_a_head, sliding_window=window)
    groups = [KVCacheGroupSpec(["layer"], spec)]
    return dict(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        hash_block_size=BLOCK,
    )


def requests(seed: int) -> list[Request]:
    """Four samples each of six prompts of 1 to 70 tokens, with 1 to 90 tokens to draw."""
    rng = random.Random(seed)
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)
    made = []
    for prompt in range(6):
        ids = [rng.randrange(10, 500) for _ in range(rng.choice([1, 15, 16, 17, 40, rng.randrange(1, 70)]))]
        for sample in range(4):
            params = SamplingParams(max_tokens=rng.choice([1, 16, rng.randrange(1, 90)]), detokenize=False)
            params.update_from_generation_config({}, END)
            made.append(Request(f"{prompt}.{sample}", list(ids), params, None, block_hasher=hasher))
    return made


def drawn(name: str, position: int) -> int:
    """Seldom the token that ends a sequence."""
    return END if (number := zlib.crc32(f"{name} {position}".encode()) % 200) == 0 else 10 + number


def steps(scheduler: Any, asked: list[Request]) -> list[Any]:
    """Every step's plan and the state of the cache behind it, until all requests have ended. Up to two steps are on
    their way where the scheduler plans ahead."""
    for request in asked:
        scheduler.add_request(request)
    on_the_way: deque[Any] = deque()
    depth = 2 if isinstance(scheduler, AsyncScheduler) else 1
    count: dict[str, int] = {}
    seen: list[Any] = []
    while scheduler.has_requests() or on_the_way:
        assert len(seen) < 3000
        plan = scheduler.schedule()
        names = list(plan.num_scheduled_tokens)
        draws = []
        for name in names:
            whole = not scheduler.requests[name].is_prefill_chunk if depth == 2 else reaches(scheduler, name)
            count[name] = count.get(name, 0) + whole
            draws.append([drawn(name, count[name])] if whole else [])
        pool = scheduler.kv_cache_manager.block_pool
        seen.append((told(plan), pool.get_num_free_blocks(), sorted(map(str, cached_blocks(pool)))))
        output = ModelRunnerOutput(names, {name: row for row, name in enumerate(names)}, draws)
        if names:
            on_the_way.append((plan, output))
        if on_the_way and (len(on_the_way) == depth or not names):
            scheduler.update_from_output(*on_the_way.popleft())
    return seen


def reaches(scheduler: Any, name: str) -> bool:
    request = scheduler.requests[name]
    return request.num_computed_tokens >= request.num_tokens


def cached_blocks(pool: Any) -> list[Any]:
    return [block.block_id for block in pool.blocks if block.block_hash is not None]


def told(plan: Any) -> Any:
    """What a worker reads of a plan."""
    new = [(new.req_id, new.block_ids, new.num_computed_tokens) for new in plan.scheduled_new_reqs]
    old = plan.scheduled_cached_reqs
    running = (old.req_ids, old.new_block_ids, old.num_computed_tokens, sorted(old.resumed_req_ids))
    return new, running, plan.num_scheduled_tokens, sorted(plan.finished_req_ids), sorted(plan.preempted_req_ids or ())


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize(("blocks", "caching"), [(200, True), (200, False), (16, True), (13, False)])
def test_plans_and_cache_are_vllms(
    make_tiny_model: Callable[..., Path], ahead: bool, blocks: int, caching: bool
) -> None:
    """16 and 13 blocks do not hold six sequences: some are sent away and come back."""
    folder, sent_away = make_tiny_model(), 0
    for seed in range(4):
        built = [options(folder, ahead=ahead, blocks=blocks, caching=caching) for _ in range(2)]
        plain = (AsyncScheduler if ahead else Scheduler)(**built[0])
        keeping = make_scheduler(**built[1])
        assert type(keeping) is type(plain) and isinstance(keeping.kv_cache_manager, BlockKeeper)
        expected, found = steps(plain, requests(seed)), steps(keeping, requests(seed))
        assert found == expected and len(found) > 60
        sent_away += sum(len(preempted) for (*_, preempted), _, _ in expected)
    assert (sent_away >= 8) is (blocks < 100)


def test_vllm_is_asked_where_something_may_change() -> None:
    asked: list[tuple[Any, ...]] = []
    manager = SimpleNamespace(
        empty_kv_cache_blocks="nothing new",
        allocate_slots=lambda *args, **options: asked.append((*args, options)) or "vLLM's",
        cache_blocks=lambda *args: asked.append(args),
        block_pool="the pool",
    )
    keeper = BlockKeeper(manager, 16)
    assert keeper.block_pool == "the pool"
    answers = []
    for computed in range(32, 48):
        answers.append(keeper.allocate_slots(at(computed), 1, num_lookahead_tokens=0))
    assert answers == ["vLLM's"] + ["nothing new"] * 14 + ["vLLM's"] and len(asked) == 2
    others: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((2,), {"num_lookahead_tokens": 0}),
        ((1,), {"num_lookahead_tokens": 1}),
        ((1, 16), {"num_lookahead_tokens": 0}),
        ((1,), {"num_lookahead_tokens": 0, "new_computed_blocks": None}),
        ((1,), {}),
    ]
    for args, given in others:  # a prompt's piece, drafted tokens, a sequence that starts
        request = at(40)
        assert keeper.allocate_slots(request, *args, **given) == "vLLM's" and asked[-1] == (request, *args, given)
    asked.clear()
    for computed in range(30, 50):
        keeper.cache_blocks(at(computed), computed)
    assert asked == [(at(32), 32), (at(48), 48)]


def at(computed: int) -> Any:
    return SimpleNamespace(num_computed_tokens=computed)


def test_a_model_with_a_window_keeps_vllms(make_tiny_model: Callable[..., Path]) -> None:
    scheduler = make_scheduler(**options(make_tiny_model(), ahead=True, blocks=50, window=32))
    assert not isinstance(scheduler.kv_cache_manager, BlockKeeper)
