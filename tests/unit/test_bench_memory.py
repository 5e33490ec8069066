"""bench_memory.py where it needs no GPU: its rows, its watch over host memory, a whole run on the CPU."""

import json

import pytest
from cases import one_process

import bench_memory
from fastgrpo.compose import read_config
from fastgrpo.config import Layout
from fastgrpo.plan import Sizes, make_plan, read_sizes, with_option
from fastgrpo.plan.constants import GIB


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
    assert host["planned_over_measured"] == pytest.approx(plan.host.total / GIB, abs=1e-3)
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


def test_a_run_on_the_cpu(tmp_path, capsys):
    out = tmp_path / "memory.json"
    small = ["rollout.name=hf", "trainer.device=cpu", "data.train_batch_size=2", "rollout.n=2"]
    with one_process():
        record = bench_memory.main(["+exp=quickstart", "model.path=tiny", *small, "--steps", "2", "--out", str(out)])
    assert record == json.loads(out.read_text())
    printed = capsys.readouterr().out
    assert json.loads(printed[printed.index("{") :]) == record
    assert (record["model"], record["steps"], record["planned_for_gib"]) == ("tiny", 2, None)
    assert record["response_tokens_mean"] == 10  # as long as they may be
    assert record["decided"]["actor.max_tokens_per_gpu"] == 4096
    assert [row["peak"] for row in record["peaks"]] == ["training", "rollout", "host"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--smoke"], "fastgrpo: --smoke: options are written key=value"),
        (["+exp=nothing"], "there is no experiment 'nothing'"),
    ],
)
def test_a_mistake_is_said_without_a_traceback(argv, message, capsys):
    assert bench_memory.command(argv) == 2
    assert message in capsys.readouterr().err


def test_several_processes_share_a_model(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="add --model FOLDER"):
        bench_memory.main(["+exp=quickstart", "model.path=tiny"])
