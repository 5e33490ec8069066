"""bench_memory.py where it needs no GPU: its rows, its watch over host memory, a whole run on the CPU."""

import json

import pytest
import torch
from cases import one_process

import bench_memory
from fastgrpo.compose import read_config
from fastgrpo.config import Layout
from fastgrpo.plan import Sizes, make_plan, read_sizes, with_option
from fastgrpo.plan.constants import GIB, SAVE_BUFFER
from run_summary import RESULTS, device_name, out_file, slug


def test_rows_compare_plan_and_measurement():
    config = with_option(read_config(["+exp=qwen2_5_0p5b_gsm8k_1x24gb"]), "actor.use_kl_loss", False)
    model = read_sizes(bench_memory.Path(bench_memory.__file__).parent / "shapes" / "Qwen2.5-0.5B-Instruct")
    plan = make_plan(config, Sizes(model, None), Layout.of(config, 1), 24 * GIB)
    measured = {"training": plan.training.total / GIB / 2, "rollout": None, "host": 1.0}
    training, rollout, host = bench_memory.compare(plan, measured)
    assert training["planned_over_measured"] == pytest.approx(2.0, abs=1e-3)
    assert sum(training["parts_gib"].values()) == pytest.approx(training["planned_gib"], abs=0.01)
    assert rollout["measured_gib"] is None and rollout["planned_over_measured"] is None
    assert rollout["planned_gib"] == pytest.approx(plan.rollout.total / GIB, abs=1e-3)
    without_save = plan.host.total - SAVE_BUFFER  # it makes none
    assert host["planned_over_measured"] == pytest.approx(without_save / GIB, abs=1e-3)
    assert sum(host["parts_gib"].values()) == pytest.approx(host["planned_gib"], abs=0.01)
    assert [row["planned_gib"] for row in bench_memory.compare(None, {"host": 1.5})] == [None]


def test_host_memory_sees_what_came_and_went(monkeypatch):
    """Of a machine whose available memory is made up here: other programs take and free some of the real one's."""
    assert 0 < bench_memory.available_bytes() < 1 << 50
    seen = iter([900, 700, 300, 800])
    looked = bench_memory.threading.Event()

    def available() -> int:
        left = next(seen, None)
        if left is None:
            looked.set()
        return 850 if left is None else left

    monkeypatch.setattr(bench_memory, "available_bytes", available)
    monkeypatch.setattr(bench_memory, "POLL_S", 0.001)
    with bench_memory.HostMemory() as host:
        assert looked.wait(20)
    assert host.taken == 600


@pytest.mark.slow
def test_a_smoke_run(tmp_path, capsys):
    out = tmp_path / "memory.json"
    with one_process():
        assert bench_memory.main(["--smoke", "--out", str(out), "data.max_response_length=6"]) == 0
    record = json.loads(out.read_text())
    printed = capsys.readouterr().out
    assert json.loads(printed[printed.index("{\n") :]) == record
    assert record["command"].endswith("data.max_response_length=6 +exp=quickstart --steps 2 --smoke")
    assert (record["model"], record["steps"], record["planned_for_gib"]) == ("tiny", 2, None)
    assert 0 < record["response_tokens_mean"] <= 6
    assert record["decided"]["actor.max_tokens_per_gpu"] == 4096
    assert [row["peak"] for row in record["peaks"]] == ["training", "rollout", "host"]
    assert [row["measured_gib"] is None for row in record["peaks"]] == [True, True, False]
    assert {"device", "versions", "commit"} <= record.keys()


@pytest.mark.parametrize(
    ("word", "name"), [("+exp=bench/long_sequence.yaml", "long_sequence"), (None, "smollm2_gsm8k_1gpu")]
)
def test_the_record_has_the_name_of_the_experiment(word, name):
    args = bench_memory.parse([word] if word else [])
    assert bench_memory.experiment(args.words) == name and args.steps == 3
    assert out_file(args, f"memory_{name}") == RESULTS / f"memory_{name}_{slug(device_name())}.json"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_made(capsys, monkeypatch):
    monkeypatch.setattr(bench_memory, "make_model", lambda *_: pytest.fail("it made a model"))
    assert bench_memory.main(["+exp=quickstart"]) == 2
    assert "finds no CUDA device here; --smoke tries" in capsys.readouterr().out


def test_several_processes_share_a_model(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        bench_memory.main(["+exp=quickstart", "model.path=tiny"])
    assert "add --model FOLDER" in capsys.readouterr().err
