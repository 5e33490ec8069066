"""The lm_head benchmark where it needs no GPU: its inputs, its fp64 reference, its own passes and its command.

The whole run is driven once on CPU tensors with a stand-in for the device's clock and memory counters.
"""

import json
import math
import sys
import time
from dataclasses import replace

import pytest
import torch

import bench_lm_head
import lm_head_run
from bench_lm_head import main, parse, slug
from lm_head_data import CLIP, KL_COEF, OBJECTIVES, Inputs, make_hidden, make_weight
from lm_head_exact import Outputs, errors, lse_of_all
from lm_head_own import _row_gradient, _row_stats, naive_train, ours_ce, ours_nograd, ours_train, products
from lm_head_peers import FLOOR, Peer, all_peers, row_kernels
from lm_head_run import fitting_rows, needed_bytes, prepare
from lm_head_timing import Deadline, LostDevice, OutOfTime, Result, measure, quantiles, time_limit

T, H, V = 80, 48, 517


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(lm_head_run, "DEVICE", "cpu")


@pytest.fixture
def prepared(on_cpu):
    return prepare(T, H, V)


def plain_logits(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden, weight = (x.detach().double().requires_grad_() for x in (inputs.hidden_TH, inputs.weight_VH))
    return hidden, weight, hidden @ weight.t()


def grpo_by_token(logp: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """The loss token by token, with plain numbers' branches."""
    total = logp.new_zeros(())
    for x, old, ref, advantage in zip(logp, inputs.old_T, inputs.ref_T, inputs.advantages_T, strict=True):
        ratio = (x - old.double()).exp()
        clipped = 1 + CLIP if ratio > 1 + CLIP else 1 - CLIP if ratio < 1 - CLIP else ratio
        policy = -min(ratio * advantage.double(), clipped * advantage.double())
        k = ref.double() - x
        total = total + (policy + KL_COEF * (k.exp() - k - 1)) / len(logp)
    return total


# ---- inputs


@pytest.mark.parametrize(("hidden", "vocab"), [(64, 1000), (96, 4099)])
def test_logits_are_peaked_like_a_trained_models(hidden, vocab):
    generator = torch.Generator().manual_seed(0)
    weight = make_weight(hidden, vocab, generator)
    x, target = make_hidden(600, weight, generator)
    log_softmax = (x.double() @ weight.double().t()).log_softmax(1)
    entropy = -(log_softmax.exp() * log_softmax).sum(1)
    logp = log_softmax.gather(1, target[:, None]).squeeze(1)
    assert 0.3 < entropy.mean() < 1.5
    assert 18 < (x.double() @ weight.double().t()).amax(1).mean() < 30
    common = logp > -10  # all but the one in 64 that is any token: drawn from the row's own distribution
    assert 0.95 < common.double().mean() < 1
    assert logp[common].mean().item() == pytest.approx(-entropy[common].mean().item(), abs=0.15)
    assert x.dtype == weight.dtype == torch.bfloat16 and not x.requires_grad


def test_inputs_are_reproducible_and_near_the_policy(prepared, on_cpu):
    inputs, exact = prepared
    again, _ = prepare(T, H, V)
    for name in ("hidden_TH", "weight_VH", "target_T", "advantages_T", "old_T", "ref_T"):
        assert torch.equal(getattr(inputs, name), getattr(again, name)), name
    assert inputs.sequences == 16 and inputs.shape == (T, H, V)
    assert inputs.advantages_T.view(16, 5).std(1).max() == 0
    gap = inputs.old_T[exact.rows_S] - exact.logp_S
    assert 0.05 < gap.std() < 0.2 and not torch.equal(inputs.old_T, inputs.ref_T)


def test_gradient_of_the_logits_is_that_of_an_on_policy_loss(prepared):
    inputs, _ = prepared
    _, _, logits = plain_logits(inputs)
    logits = logits.detach().requires_grad_()
    logp = logits.log_softmax(1).gather(1, inputs.target_T[:, None]).squeeze(1)
    (-(inputs.advantages_T * inputs.weights_T) * logp).sum().backward()
    assert (inputs.logits_gradient_TV.double() - logits.grad).norm() < 0.03 * logits.grad.norm()


# ---- the reference


@pytest.mark.parametrize("objective", ["grpo", "ce"])
def test_reference_equals_fp64_autograd(prepared, objective):
    inputs, exact = prepared
    hidden, weight, logits = plain_logits(inputs)
    log_softmax = logits.log_softmax(1)
    logp = log_softmax.gather(1, inputs.target_T[:, None]).squeeze(1)
    loss = grpo_by_token(logp, inputs) if objective == "grpo" else -logp.mean()
    loss.backward()
    assert OBJECTIVES[objective](logp, inputs).item() == pytest.approx(loss.item(), rel=1e-6)
    rows, tokens = exact.rows_S, exact.tokens_K
    assert torch.allclose(exact.logp_S, logp[rows], rtol=0, atol=1e-10)
    entropy = -(log_softmax.exp() * log_softmax).sum(1)
    assert torch.allclose(exact.entropy_S, entropy[rows], rtol=0, atol=1e-10)
    for got, true in ((exact.dhidden_SH, hidden.grad[rows]), (exact.dweight_KH, weight.grad[tokens])):
        assert (got[objective] - true).norm() < 3e-6 * true.norm()
    assert exact.lse_error < 1e-5
    assert len(tokens.unique()) == 256 and torch.isin(inputs.target_T.unique(), tokens).all()
    assert torch.allclose(lse_of_all(inputs.hidden_TH, inputs.weight_VH), logits.logsumexp(1), rtol=0, atol=1e-5)


def test_errors_are_the_distances_that_were_made(prepared):
    _, exact = prepared
    logp, entropy = torch.zeros(T, dtype=torch.float64), torch.zeros(T, dtype=torch.float64)
    logp[exact.rows_S], entropy[exact.rows_S] = exact.logp_S, exact.entropy_S
    logp[3] += 0.25
    entropy[7] -= 0.5
    dhidden, dweight = torch.zeros(T, H, dtype=torch.float64), torch.zeros(V, H, dtype=torch.float64)
    dhidden[exact.rows_S] = 1.01 * exact.dhidden_SH["grpo"]
    dweight[exact.tokens_K] = 0.98 * exact.dweight_KH["grpo"]
    found = errors(Outputs(logp, entropy, dhidden, dweight), exact, "grpo")
    expected = {"max_abs_logp_err": 0.25, "max_abs_entropy_err": 0.5, "rel_dx_err": 0.01, "rel_dw_err": 0.02}
    assert found == pytest.approx(expected)
    assert set(errors(Outputs(), exact, "ce").values()) == {None}
    logp[3] = math.nan
    assert math.isnan(errors(Outputs(logp), exact, "grpo")["max_abs_logp_err"])


# ---- our passes


@pytest.mark.parametrize(("make", "objective"), [(ours_train, "grpo"), (ours_ce, "ce"), (naive_train, "grpo")])
def test_training_passes_agree_with_the_reference(prepared, make, objective):
    inputs, exact = prepared
    found = errors(make(inputs)(), exact, objective)
    exactly = make is not naive_train  # that one rounds its logits to bf16
    assert found["max_abs_logp_err"] < (1e-4 if exactly else 0.2)
    assert max(found["rel_dx_err"], found["rel_dw_err"]) < (4e-3 if exactly else 0.1)


def test_no_grad_pass_agrees_with_the_reference(prepared):
    inputs, exact = prepared
    outputs = ours_nograd(inputs)()
    found = errors(outputs, exact, "grpo")
    assert found["max_abs_logp_err"] < 1e-4 and found["max_abs_entropy_err"] < 1e-4
    assert outputs.logp_T is not None and not outputs.logp_T.requires_grad


def test_compiled_chunks_formula(prepared):
    """The function that the peer compiles, uncompiled, on fp64 logits against autograd; some rows are clipped."""
    inputs, _ = prepared
    inputs = replace(inputs, **{name: getattr(inputs, name).double() for name in ("old_T", "ref_T", "advantages_T")})
    _, _, logits = plain_logits(inputs)
    logits = logits.detach().requires_grad_()
    log_softmax = logits.log_softmax(1)
    logp = log_softmax.gather(1, inputs.target_T[:, None]).squeeze(1)
    loss = grpo_by_token(logp, inputs)
    loss.backward()
    per_row = (inputs.target_T, inputs.old_T, inputs.ref_T, inputs.advantages_T, inputs.weights_T.double())
    losses, got_logp, entropy, grad = _row_gradient(logits.detach(), *per_row)
    assert losses.sum().item() == pytest.approx(loss.item(), rel=1e-7)
    assert torch.allclose(got_logp, logp, rtol=0, atol=1e-10)
    assert torch.allclose(entropy, -(log_softmax.exp() * log_softmax).sum(1), rtol=0, atol=1e-10)
    assert (grad.double() - logits.grad).norm() < 4e-3 * logits.grad.norm()
    assert ((grad == 0) == (logits.grad.to(torch.bfloat16) == 0)).all()
    ratio = (logp - inputs.old_T).exp()
    assert ((ratio > 1 + CLIP) & (inputs.advantages_T > 0)).any()
    assert torch.allclose(_row_stats(logits.detach(), inputs.target_T)[2], logits.logsumexp(1), rtol=0, atol=1e-10)


def test_bare_products_in_chunks_fill_the_same_shapes(prepared, monkeypatch):
    inputs, _ = prepared
    calls = []
    monkeypatch.setattr("lm_head_own.own_chunk_rows", lambda hidden, weight: 32)

    def record(a, b, out, add=False):
        calls.append((a.shape, b.shape, out.shape, add))

    monkeypatch.setattr("lm_head_own._mm", record)
    products(inputs, backward=True, whole=False, out_dtype=torch.bfloat16)()
    assert [call[2] for call in calls[-3:]] == [(16, V), (16, H), (V, H)]  # 80 = 32 + 32 + 16
    assert [call[3] for call in calls] == [False] * 5 + [True] + [False] * 2 + [True]
    assert all((a[0], b[1]) == tuple(out) and a[1] == b[0] for a, b, out, _ in calls)


# ---- timing, with a stand-in for the device


class FakeEvent:
    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = time.perf_counter()

    def elapsed_time(self, end):
        return 1e3 * (end.at - self.at)


@pytest.fixture
def fake_cuda(monkeypatch, on_cpu):
    stand_ins = {
        "Event": FakeEvent,
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "memory_allocated": lambda: 0,
        "max_memory_allocated": lambda: 3 << 30,
        "reset_peak_memory_stats": lambda: None,
        "mem_get_info": lambda: (80 << 30, 80 << 30),
        "is_available": lambda: True,
        "get_device_name": lambda: "NVIDIA Test 9000",
        "get_device_capability": lambda: (8, 0),
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)


def failing(error):
    def make(inputs):
        def run():
            raise error

        return run

    return make


def test_a_failing_peer_is_a_row_and_the_others_go_on(fake_cuda, prepared):
    inputs, exact = prepared

    def absent(inputs):
        import no_such_kernels  # noqa: F401

    def slow(inputs):
        return lambda: time.sleep(5)

    peers = [
        Peer("good", "train", ours_train),
        Peer("absent", "train", absent),
        Peer("bad", "train", failing(ValueError("no kernel image\nmore"))),
        Peer("big", "train", failing(torch.OutOfMemoryError())),
        Peer("slow", "train", slow),
        Peer("also good", "ce", ours_ce),
    ]
    results = measure(peers, inputs, exact, repeats=4, seconds_each=1.0, deadline=Deadline.after(60))
    assert [result.error for result in results] == [
        None,
        "not installed: no_such_kernels",
        "ValueError: no kernel image",
        "out of memory",
        "OutOfTime: more than 1 s",
        None,
    ]
    assert [len(result.milliseconds) for result in results] == [4, 0, 0, 0, 0, 4]
    assert results[0].peak_gib == 3.0 and results[0].errors["rel_dw_err"] < 4e-3
    assert inputs.hidden_TH.grad is None and inputs.weight_VH.grad is None


def test_a_dead_context_is_told_apart(fake_cuda, prepared, monkeypatch):
    def dead():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def make(inputs):
        monkeypatch.setattr(torch.cuda, "synchronize", dead)
        dead()

    with pytest.raises(LostDevice, match="killer") as caught:
        measure([Peer("killer", "train", make)], *prepared, repeats=1, seconds_each=5, deadline=Deadline.after(60))
    assert "illegal memory access" in caught.value.result.error


def test_slow_ones_sit_out_and_a_deadline_leaves_out(fake_cuda, prepared):
    slow = Result(Peer("slow", "train", ours_train), run=Outputs, slow=True)
    assert [slow.calls_wanted(9), slow.calls_wanted(1)] == [1, 1]
    slow.milliseconds += [250.0] * 3
    assert slow.calls_wanted(9) == 0
    quick = Result(Peer("quick", "train", ours_train), run=Outputs, milliseconds=[2.0] * 3)
    assert [quick.calls_wanted(n) for n in (9, 4, 3)] == [3, 1, 0]
    (late,) = measure([slow.peer], *prepared, repeats=1, seconds_each=5, deadline=Deadline.after(-1))
    assert late.error == "left out: the run's time was spent" and late.milliseconds == []


def test_time_limit_ends_python_and_leaves_no_alarm():
    with pytest.raises(OutOfTime), time_limit(0.05):
        time.sleep(5)
    with time_limit(0.05):
        pass
    time.sleep(0.15)  # nothing rings


def test_quantiles():
    assert quantiles(range(11)) == {"ms_p20": 2, "ms_p50": 5, "ms_p80": 8}
    assert set(quantiles([]).values()) == {None}


# ---- the command


def test_on_a_cpu_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--quick"]) == 2
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and "no CUDA device" in said


def test_arguments(capsys):
    args = parse(["--shapes", "896x151936", "64x100", "--rows", "1000", "2000"])
    assert args.shapes == [(896, 151936), (64, 100)] and args.rows == [1000, 2000] and args.minutes == 6
    quick = parse(["--quick"])
    assert (quick.shapes, quick.rows, quick.minutes) == (((896, 151936),), [4096], 0.6)
    with pytest.raises(SystemExit):
        parse(["--shapes", "896*151936"])
    assert "'896*151936' is not HIDDENxVOCABULARY" in capsys.readouterr().err
    assert parse(["--quick", "--minutes", "1.5"]).minutes == 1.5
    assert slug("NVIDIA H200") == "h200" and slug("NVIDIA GeForce RTX 4090") == "rtx_4090"


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        *(("--rows", value, "is not a whole number of at least 1") for value in ("0", "-5", "1.5", "many")),
        *(("--minutes", value, "is not a number above 0") for value in ("0", "-1", "nan", "inf", "long")),
    ],
)
def test_numbers_that_no_run_can_have_are_refused(option, value, reason, capsys):
    with pytest.raises(SystemExit):
        parse([f"{option}={value}"])
    assert f"argument {option}: {value!r} {reason}" in capsys.readouterr().err


def test_a_page_is_looked_at_before_the_run(fake_cuda, tmp_path, monkeypatch):
    monkeypatch.setattr(lm_head_run, "run", lambda *_: pytest.fail("it ran"))
    with pytest.raises(SystemExit, match=r"none\.md: No such file"):
        main(["--readme", str(tmp_path / "none.md"), "--out", str(tmp_path / "out.json")])


def test_without_the_kernels_a_run_says_how_to_get_them(fake_cuda, monkeypatch, capsys):
    for name in ("lm_head_run", "fastgrpo_kernels"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "lm_head_run")
    assert main([]) == 2
    assert "fastgrpo_kernels, which is not installed here: set PYTHONPATH=kernels" in capsys.readouterr().out


def test_rows_shrink_to_the_memory():
    full = needed_bytes(16384, 3584, 152064, whole=True)
    assert fitting_rows(16384, 3584, 152064, full) == 16384
    assert fitting_rows(16384, 3584, 152064, full - 1) == 8192
    assert fitting_rows(16384, 3584, 152064, 10 * 3584 * 152064) == 0
    weights = 10 * 3584 * 152064
    assert full > weights + 4 * 16384 * 152064 + 6 * 16384 * 3584


def test_whole_run_on_stand_ins(fake_cuda, tmp_path, monkeypatch, capsys):
    """Every peer gets a row: those that run here with true errors, the rest with a reason; then again with --resume."""
    monkeypatch.setattr(lm_head_run, "MEMORY_ROWS", (32, 64))
    monkeypatch.setattr("lm_head_own._compiled", lambda function: function)
    out = tmp_path / "lm_head.json"
    command = ["--shapes", f"{H}x{V}", "--rows", str(T), "--out", str(out), "--commit", "abc1234"]
    assert main(command) == 0
    content = json.loads(out.read_text())
    rows = {(row["op"], row["impl"], row["T"]): row for row in content["rows"]}
    assert len(rows) == len(content["rows"]) == len(all_peers()) + len(row_kernels()) + 2 * 2
    assert {(op, impl) for op, impl, _ in rows if op != "memory"} == {
        (peer.op, peer.name) for peer in all_peers() + row_kernels()
    }
    for op in ("nograd", "train"):
        ours, floor = rows[op, "fastgrpo", T], rows[op, FLOOR, T]
        assert ours["error"] is None and ours["repeats"] == 9 and ours["commit"] == "abc1234"
        assert ours["ms_p20"] <= ours["ms_p50"] <= ours["ms_p80"]
        assert ours["gemm_floor_ms"] == floor["ms_p50"] == floor["gemm_floor_ms"] > 0
        assert ours["max_abs_logp_err"] < 1e-4 and ours["versions"]["torch"] == torch.__version__
    assert rows["train", "fastgrpo", T]["rel_dw_err"] < 4e-3
    for impl in ("CCE filtered + torch loss", "Liger SM90 + torch loss", "Liger fused linear GRPO"):
        assert rows["train", impl, T]["error"] and rows["train", impl, T]["ms_p50"] is None, impl
    assert rows["train", "Liger SM90 + torch loss", T]["error"].startswith("needs compute capability 9.0")
    gradients = (2 * 64 * H + 6 * V * H) / 2**30
    assert rows["memory", "fastgrpo, 1 GiB", 64]["beyond_gradients_gib"] == pytest.approx(3 - gradients)
    (data,) = content["data"]
    assert (data["T"], data["H"], data["V"]) == (T, H, V) and 0.3 < data["mean_entropy"] < 1.5
    assert (tmp_path / "lm_head.png").read_bytes().startswith(b"\x89PNG")
    assert "**Training pass" in capsys.readouterr().out

    content["rows"] = [row for row in content["rows"] if row["op"] != "nograd"]
    out.write_text(json.dumps(content))
    assert main([*command, "--resume"]) == 0
    again = json.loads(out.read_text())
    assert again["rows"][: len(content["rows"])] == content["rows"]
    assert {row["op"] for row in again["rows"][len(content["rows"]) :]} == {"nograd"}
    assert len(again["data"]) == 1


def test_a_lost_device_is_written_down_and_the_command_starts_again(fake_cuda, tmp_path, monkeypatch):
    started = []
    killer = Peer("killer", "train", ours_train)

    def lose(peers, *_, **__):
        if peers and peers[0] is killer:
            raise LostDevice(Result(killer, error="illegal memory access"))
        return []

    monkeypatch.setattr(lm_head_run, "all_peers", lambda: [killer])
    monkeypatch.setattr(lm_head_run, "measure", lose)
    monkeypatch.setattr(bench_lm_head.os, "execv", lambda program, argv: started.append(argv[2:]))
    out = tmp_path / "lm_head.json"
    command = ["--shapes", f"{H}x{V}", "--rows", str(T), "--out", str(out)]
    main(command)
    assert started == [[*command, "--resume"]]
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["impl"], row["error"], row["ms_p50"]) == ("killer", "illegal memory access", None)


def test_a_result_of_another_kind_is_not_resumed(fake_cuda, tmp_path):
    out = tmp_path / "out.json"
    out.write_text("[]")
    with pytest.raises(SystemExit, match="is no result of bench_lm_head"):
        main(["--resume", "--out", str(out)])
    assert out.read_text() == "[]"
