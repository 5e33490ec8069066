"""The comparison of layouts where it needs no GPU: names, limits, a wrong gradient, its file and table; slow: a whole
run on two CPU processes."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cases import one_process
from safetensors.torch import save_file

import bench_layouts
import layout_parity
from bench_layouts import config_of, jobs, parse
from cli import command
from layout_names import ParallelLayout, defaults
from layout_parity import LIMITS, Difference, Truth, compare, difference
from layout_report import render
from made_engine import RaggedEngine
from made_model import make_model, shape_config

ROOT = Path(__file__).resolve().parents[2]


def test_a_name_says_what_runs():
    layout = ParallelLayout.of("dp4-sp2-tp4-hsdp2-x2")
    assert (layout.world, layout.dp, layout.sp) == (8, 4, 2)
    assert layout.options(32) == [
        "actor.ulysses_sequence_parallel_size=2",
        "rollout.tensor_model_parallel_size=4",
        "actor.fsdp.replicas=2",
        "data.train_batch_size=64",
    ]
    assert ParallelLayout.of("sp2").world == 2 and ParallelLayout.of("dp1").options(32)[-1].endswith("=32")
    for name in ("dp0", "pp2", "dp2-dp4", "dp2tp2", ""):
        with pytest.raises(ValueError, match="is no layout"):
            ParallelLayout.of(name)


def names_of(*arguments):
    return [f"{what} {layout.name}" for what, layout in jobs(parse([*arguments]))]


def test_which_layouts_run_and_one_gpu_first():
    both = [f"parity {dtype} {name}" for dtype in ("float32", "bfloat16") for name in ("dp1", "dp2", "sp2")]
    assert names_of("--world", "2", "--parity") == both
    assert names_of("--world", "2", "--parity", "--layouts", "dp2", "dp2-x2", "sp2") == both  # twice is another update
    assert names_of("--world", "2", "--steps", "--layouts", "dp2-tp2") == ["steps dp2-tp2"]
    assert [n for n in names_of("--world", "4") if "hsdp" in n][-1] == "update dp4-hsdp2"
    assert defaults(bench_layouts.STEPS, 2) == ["dp1", "dp2", "sp2", "dp2-tp2", "dp2-x2"]
    with pytest.raises(SystemExit):
        parse(["--world", "2", "--layouts", "dp4"])


def test_every_layout_is_a_configuration_that_can_run(tmp_path):
    args = parse(["--world", "4", "--parity", "--steps", "--layouts", "dp2-sp2", "dp4-hsdp2", "dp4-tp4", "dp4-x4"])
    for what, layout in jobs(args):
        config = config_of(args, what, layout, tmp_path)
        assert config.actor.ulysses_sequence_parallel_size == layout.sp
        prompts = 8 if what.startswith("parity") else 32 * layout.x
        assert config.data.train_batch_size == prompts and (config.data.max_prompt_length == 250)
        assert (config.actor.dtype == "float32") == (what == "parity float32")


def same(name="a.weight", **changes):
    right = torch.arange(1, 7.0).view(2, 3)
    return difference(name, **({"gradient": right.clone(), "right": right} | changes))


def test_difference_is_in_norm():
    right = torch.tensor([3.0, 4.0])
    found = difference("w", right + torch.tensor([0.0, 1e-3]), right, right - torch.tensor([0.6, 0.8]))
    assert (found.norm, found.rounding) == (5.0, pytest.approx(1.0))
    assert found.error == pytest.approx(1e-3, rel=1e-3)
    with pytest.raises(ValueError, match=r"a gradient of \(2,\), the truth has \(2, 1\)"):
        difference("w", right, right[:, None])


def failures(differences, found=(0.5, 9.0), right=(0.5, 9.0), names=None, dtype="float32"):
    names = {d.name for d in differences} if names is None else names
    return compare(found, right, names, differences, LIMITS[dtype])["failures"]


def test_a_perturbed_gradient_is_a_failure():
    right = torch.randn(40, 50, generator=torch.Generator().manual_seed(0))
    wrong = right.clone()
    wrong[3, 7] += 2e-4 * right.norm()
    assert failures([same(), difference("b", right * (1 + 5e-5), right)]) == []
    one_wrong = failures([same(), difference("b", wrong, right)])
    assert any(line.startswith("b: off by") for line in one_wrong)
    assert failures([same(), difference("b", 2 * right, right)])  # a sum where a mean belongs
    assert failures([difference("b", torch.full_like(right, torch.nan), right)])


def test_loss_norm_and_missing_gradients_are_failures():
    assert failures([same()], found=(0.5 + 4e-6, 9.0)) == []
    assert failures([same()], found=(0.5 + 6e-6, 9.0)) == ["loss: off by 1.2e-05, limit 1e-05"]
    assert failures([same()], found=(0.5, 9.0002)) == ["gradient norm: off by 2.2e-05, limit 1e-05"]
    assert failures([same()], names={"a.weight", "b"}) == ["b: only on one side"]
    assert failures([same()], found=(torch.nan, 9.0)) and failures([], names=set())


def test_only_a_keys_bias_may_be_rounding():
    tiny = {"norm": 5e-6, "error": 4e-6}  # of a whole norm of 9
    assert failures([same(), Difference("layers.0.self_attn.k_proj.bias", **tiny)]) == []
    assert failures([same(), Difference("layers.0.self_attn.q_proj.bias", **tiny)])
    assert failures([same(), Difference("layers.0.self_attn.k_proj.bias", 5e-6, 1e-5)])


def test_bfloat16_may_be_off_by_two_roundings():
    def of(error, rounding=0.1):
        return [Difference("a", 100.0, error, rounding)]

    assert failures(of(0.19), dtype="bfloat16") == []
    assert failures(of(0.21), dtype="bfloat16") == ["a: off by 0.21, limit 0.2"]
    assert failures(of(6.0, rounding=9.0), dtype="bfloat16") == ["whole gradient: off by 0.06, limit 0.05"]
    assert failures(of(0.0), found=(0.51, 9.0), dtype="bfloat16") == ["loss: off by 0.02, limit 0.01"]


@pytest.mark.slow
def test_the_trainers_own_step_is_compared_and_one_wrong_gradient_seen(tmp_path):
    for seed, folder in enumerate(("tiny", bench_layouts.reference("tiny"))):
        make_model("tiny", tmp_path / folder, seed=seed)

    def update(*overrides, is_truth=False):
        args = parse(["--smoke", "--", *overrides])
        config = config_of(args, "parity float32", ParallelLayout.of("dp1"), tmp_path)
        with one_process():
            return layout_parity.run(config, "float32", tmp_path, is_truth=is_truth)

    one = update(is_truth=True)
    assert one["comparison"] is None and abs(one["loss"]) > 1e-3 and one["grad_norm"] > 0.01
    file, wrong = Truth.file(tmp_path, "float32"), "lm.model.layers.1.mlp.up_proj.weight"
    truth = Truth(file)
    gradients = {name: truth.gradient(name, torch.device("cpu")) for name in truth.names}
    whole = sum(gradient.double().norm() ** 2 for gradient in gradients.values()) ** 0.5
    assert whole.item() == pytest.approx(one["grad_norm"], rel=1e-5) == pytest.approx(truth.grad_norm, rel=1e-5)
    gradients[wrong][5] *= 1.003
    save_file(gradients, file, {"loss": repr(one["loss"]), "grad_norm": repr(one["grad_norm"])})
    other = update("actor.max_tokens_per_gpu=64")["comparison"]  # other micro-batches
    assert [line.split(": off by")[0] for line in other["failures"]] == [wrong]
    assert other["worst"][0]["name"] == wrong and other["loss_error"] < 1e-5 and other["tensors"] > 20


def result_of(step_s, update_s):
    step = {"step_s": step_s, "phases": {"gen": 1.0, "update": update_s, "sync": 0.1}, "train_peak_gib": 9.0}
    step |= {"rollout_peak_gib": 8.0, "mfu": 0.5, "gen_tail_s": 0.0, "gap_abs_mean": 0.0, "response_tokens_mean": 9.0}
    return {"steps": [step] * 3, "planned": {"train": 9.5, "rollout": 8.5}, "start_s": 40.0, "process_s": 60.0}


def test_rows_table_and_status(tmp_path, monkeypatch):
    compared = {"against": "float32", "loss_error": 1e-7, "norm_error": 2e-7, "gradient_error": 3e-7}
    compared |= {"tensor_error": 4e-7, "worst": [], "tensors": 3, "failures": []}
    answers = {
        "models": {"start_s": 0.5, "process_s": 1.0},
        "parity float32 dp1": {"loss": 1.0, "grad_norm": 2.0, "comparison": None, "start_s": 0.5, "process_s": 1.0},
        "parity float32 dp2": {"loss": 1.0, "grad_norm": 2.0, "comparison": compared, "start_s": 0.5, "process_s": 1.0},
        "parity bfloat16": {"error": "ended with status 1", "start_s": 0.5, "process_s": 1.0},
        "steps dp1": result_of(10.0, 4.0),
        "steps dp2 ": result_of(6.0, 2.2),
        "steps dp2-x2": result_of(11.0, 4.4),
    }

    def measure(args, what, layout, models, ending):
        return next(answer for key, answer in answers.items() if f"{what} {layout.name} ".startswith(key))

    monkeypatch.setattr(bench_layouts, "measure", measure)
    monkeypatch.setattr(bench_layouts.layout_parity, "DTYPES", ("float32",))
    out = tmp_path / "layouts.json"
    words = ["--smoke", "--out", str(out), "--parity", "--steps", "3", "--layouts", "dp1", "dp2", "dp2-x2"]
    assert bench_layouts.main(words) == 0
    lines = render(out).splitlines()
    assert "| dp2 | 2 | float32 | float32 | 1.0e-07 | 2.0e-07 | 3.0e-07 | 4.0e-07 | agrees |" in lines
    assert "| dp2 | 2 | 2 | 6.00 s | 0.60 | 2.20 s | 0.55 | 50 % | 0.10 s | 1.00 s | 9.0 (9.5) | 8.0 (8.5) |" in lines
    assert any(line.startswith("| dp2-x2 | 2 | 4 | 11.00 s | 1.10 | 4.40 s | 1.10 |") for line in lines)
    rows = json.loads(out.read_text())["rows"]
    assert {(row["dp"], row["sp"], row["tp"], row["world"]) for row in rows} == {(1, 1, 1, 1), (2, 1, 1, 2)}
    compared["failures"] = ["a.weight: off by 1, limit 0.1", "b: only on one side"]
    assert bench_layouts.main(words) == 1
    assert "DIFFERS: a.weight: off by 1, limit 0.1, and 1 more" in render(out)
    monkeypatch.setattr(bench_layouts.layout_parity, "DTYPES", ("bfloat16",))
    assert bench_layouts.main(["--smoke", "--out", str(out), "--parity"]) == 1
    assert "| not measured: ended with status 1 |" in render(out)
    assert len(json.loads(out.read_text())["rows"]) == 8


def test_a_layout_that_cannot_run_is_refused_before_anything_starts(tmp_path, capsys):
    words = ["--smoke", "--world", "3", "--steps", "--layouts", "dp3-tp2", "--out", str(tmp_path / "a.json")]
    assert command(bench_layouts.main, words) == 2
    assert "rollout.tensor_model_parallel_size=2" in capsys.readouterr().err


def test_ragged_answers_follow_the_seed(tmp_path):
    shape_config("tiny").save_pretrained(tmp_path)
    requests = [SimpleNamespace(uid="p", sample=0, attempt=0, ids=(1,), seed=s, max_tokens=9) for s in [*range(40), 0]]
    answers = RaggedEngine(None, None, tmp_path, ()).generate(requests, None)
    assert {len(answer.response_ids) for answer in answers} == set(range(1, 10))
    assert answers[0].response_ids.tolist() == answers[-1].response_ids.tolist()


@pytest.mark.slow
def test_layouts_on_two_cpu_processes(tmp_path):
    out = tmp_path / "layouts.json"
    environ = {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, str(ROOT / "bench" / "bench_layouts.py"), "--smoke", "--out", str(out)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {(row["what"], row["layout"]): row for row in json.loads(out.read_text())["rows"]}
    for what in ("parity float32", "parity bfloat16"):
        for name in ("dp2", "sp2"):
            row = rows[what, name]
            assert row["failures"] == [] and row["error"] is None and row["tensors"] > 20
            assert row["loss"] == pytest.approx(rows[what, "dp1"]["loss"], rel=1e-2)
    assert rows["steps", "dp2"]["world"] == 2 and rows["steps", "dp2"]["step_s_p50"] > 0
