"""Compiled blocks against plain ones: numbers, names, how many graphs are made, and that an old pass runs those of the
update. By inductor (marked slow: it calls a C++ compiler) where rounding is the question, else by aot_eager: the same
tracing, guards and autograd, on torch's own kernels.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import full, make_rollouts, one_batch, one_process, one_update, policy_of
from torch._dynamo.utils import counters

from fastgrpo.algorithm.losses import LossConfig
from fastgrpo.config import RunConfig
from fastgrpo.errors import UserError
from fastgrpo.plan import settle_on_cpu, with_option
from fastgrpo.policy import model
from fastgrpo.policy.actor import segment_sum
from fastgrpo.policy.compile import INDUCTOR, require_compiler
from fastgrpo.policy.head import GrpoHead, HeadLoss, score_head
from fastgrpo.policy.lora import ALL_LINEAR, Lora
from fastgrpo.policy.model import Policy, blocks, build_policy
from fastgrpo.stages import _build_policy

LORA = Lora(3, 8, (ALL_LINEAR,), 0, "base")
SLOW = pytest.mark.slow
NEEDS_CXX = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++ on a CPU")
RECOMPUTED = {"gradient_checkpointing": 1}
VARIANTS = [
    pytest.param({}, id="plain", marks=SLOW),
    pytest.param({"gradient_checkpointing": 2, "activation_offload": True}, id="every second, offloaded", marks=SLOW),
    pytest.param(RECOMPUTED | {"lora": LORA}, id="lora", marks=SLOW),
    pytest.param(RECOMPUTED | {"mlp_slices": 3}, id="slices", marks=SLOW),
]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Nothing compiled before, and a failure where the compiler would give up on a block for having seen too many."""
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def folder(make_tiny_model: Callable[..., Path]) -> Path:
    return make_tiny_model("llama", tied=True, num_hidden_layers=2, hidden_size=64, intermediate_size=96)


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def score(policy: Policy, batch: Any) -> torch.Tensor:
    return policy.score(batch, partial(score_head, temperature=0.8)).logprobs_R


def train(policy: Policy, batch: Any) -> HeadLoss:
    """Forward and backward."""
    sums = partial(segment_sum, num_segments=batch.num_sequences + 1, group=policy.sp_group)
    head = GrpoHead(LossConfig(), 0.8, None, None, fused=True, policy_loss="vanilla", segment_sum=sums)
    out = policy.run(batch, head)
    out.loss_sum.backward()
    return out


def grad_norm(policy: Policy) -> float:
    gradients = [p.grad for p in policy.module.parameters() if p.grad is not None]
    return torch.stack([full(gradient).norm() for gradient in gradients]).norm().item()


def batch_of(count: int, seed: int = 0) -> Any:
    return one_batch(make_rollouts(count, seed=seed), np.linspace(0.1, 1.0, count))


def close(compiled: dict[str, Any], plain: dict[str, Any], *, rtol: float) -> None:
    for name in ("loss", "grad_norm"):
        assert compiled[name] == pytest.approx(plain[name], rel=rtol), name
    assert compiled["gradients"].keys() == plain["gradients"].keys()
    for name, gradient in plain["gradients"].items():
        error = (compiled["gradients"][name] - gradient).norm() / gradient.norm().clamp(min=1e-6)
        assert error < 10 * rtol, (name, error)


@SLOW
@pytest.mark.parametrize("options", [pytest.param(RECOMPUTED, id="recomputed"), *VARIANTS])
def test_an_update_is_that_of_plain_blocks(mesh: Any, folder: Path, options: dict[str, Any]) -> None:
    """fp32: loss and gradient norm to 1e-5, each gradient to 1e-4 in norm, under the same names."""
    plain = one_update(folder, mesh=mesh, **options)
    compiled = one_update(folder, mesh=mesh, compile_backend="aot_eager", **options)
    assert graphs() > 0
    close(compiled, plain, rtol=1e-5)


@SLOW
@NEEDS_CXX
@pytest.mark.parametrize(
    "options", [{}, {"lora": LORA}, RECOMPUTED | {"mlp_slices": 3}], ids=["plain", "lora", "slices"]
)
def test_an_update_by_inductor(mesh: Any, folder: Path, options: dict[str, Any]) -> None:
    """fp32, as above."""
    plain = one_update(folder, mesh=mesh, **options)
    close(one_update(folder, mesh=mesh, compile_backend=INDUCTOR, **options), plain, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("options", [pytest.param(RECOMPUTED, id="recomputed"), *VARIANTS])
def test_one_set_of_graphs_for_all_lengths_and_passes(mesh: Any, folder: Path, options: dict[str, Any]) -> None:
    """An update makes them; no later length and no old pass makes another. A reference has its own set."""
    plain, policy = (policy_of(folder, mesh, compile_backend=backend, **options) for backend in (None, "eager"))
    train(policy, batch_of(3))
    train(plain, batch_of(3))
    of_training = graphs()
    assert of_training > 0
    for seed in range(1, 9):
        batch = batch_of(2 + seed, seed)
        old_R = score(policy, batch)
        assert torch.equal(old_R, train(policy, batch).logprobs_R)
        torch.testing.assert_close(old_R, train(plain, batch).logprobs_R, rtol=1e-5, atol=1e-5)
        score(policy, batch_of(12 - seed, seed))
    assert graphs() == of_training
    assert grad_norm(policy) == pytest.approx(grad_norm(plain), rel=1e-5)
    reference = policy.base if policy.lora else policy_of(folder, mesh, trainable=False, compile_backend="eager")
    score(reference, batch_of(3))
    of_both = graphs()
    for seed in range(1, 5):
        score(reference, batch_of(2 + seed, seed))
    assert of_training < of_both == graphs() <= 2 * of_training + 4


def old_pass_and_update(folder: Path, mesh: Any, options: dict[str, Any]) -> None:
    """bfloat16, by inductor: an old pass has the update's logprobs bit for bit, so that the ratio is exactly 1. Loss
    and gradient norm are within a hundredth of the plain blocks', logprobs within 0.1."""
    build = partial(build_policy, folder, mesh, dtype=torch.bfloat16, attention_backend="auto", trainable=True)
    plain, policy = build(**options), build(compile_backend=INDUCTOR, **options)
    for seed in range(3):
        batch = batch_of(4 + seed, seed)
        old_R, out, right = score(policy, batch), train(policy, batch), train(plain, batch)
        assert torch.equal(old_R, out.logprobs_R) and torch.equal(old_R, score(policy, batch))
        assert (right.logprobs_R - old_R).abs().max() < 0.1
        assert out.loss_sum.item() == pytest.approx(right.loss_sum.item(), rel=1e-2)
        assert grad_norm(policy) == pytest.approx(grad_norm(plain), rel=1e-2)


OLD_PASSES = pytest.mark.parametrize("options", [{}, RECOMPUTED, RECOMPUTED | {"mlp_slices": 3}])


@SLOW
@NEEDS_CXX
@OLD_PASSES
def test_an_old_pass_has_the_logprobs_of_the_update(mesh: Any, folder: Path, options: dict[str, Any]) -> None:
    old_pass_and_update(folder, mesh, options)


@pytest.mark.gpu
@OLD_PASSES
def test_an_old_pass_on_a_gpu(folder: Path, options: dict[str, Any]) -> None:
    with one_process("cuda") as mesh:
        old_pass_and_update(folder, mesh, options)


def test_names_stay_and_nothing_is_kept_by_a_pass_that_scores(mesh: Any, folder: Path) -> None:
    plain = policy_of(folder, mesh)
    policy = policy_of(folder, mesh, compile_backend="eager", gradient_checkpointing=1)
    assert list(policy.module.state_dict()) == list(plain.module.state_dict())
    assert [name for name, _ in policy.export()] == [name for name, _ in plain.export()]
    kept: list[torch.Tensor] = []

    def head(hidden_RH: torch.Tensor, output: Any, batch: Any) -> torch.Tensor:
        kept.append(hidden_RH)
        return hidden_RH * output.weight_VH.sum()

    out = policy.score(batch_of(4), head)
    torch.testing.assert_close(out, plain.score(batch_of(4), head), rtol=1e-5, atol=1e-5)
    assert not out.requires_grad and kept[0].requires_grad  # the body ran as in training, the head did not
    with pytest.raises(AssertionError, match="only scores"):
        kept[0].sum().backward()
    assert all(block.gradient_checkpointing for block in blocks(policy.module.lm))


@pytest.mark.parametrize("trainable", [True, False])
@pytest.mark.parametrize("wanted", [True, False])
def test_the_option_compiles_policy_and_reference(
    mesh: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, wanted: bool, trainable: bool
) -> None:
    config = settle_on_cpu(with_option(RunConfig(), "actor.use_torch_compile", wanted))
    monkeypatch.setattr(model, "require_compiler", lambda device_type: None)  # nothing runs here
    policy = _build_policy(config, folder, mesh, trainable=trainable)
    assert policy.compiled == wanted
    assert all((block._compiled_call_impl is not None) == wanted for block in blocks(policy.module.lm))


@pytest.mark.parametrize(
    ("device", "variable", "command", "named"),
    [("cpu", "CXX", "g++", "my-cc"), ("cuda", "CC", "gcc", "my-cc or gcc or clang")],
)
def test_a_machine_without_a_compiler_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str, variable: str, command: str, named: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv(variable, "my-cc")
    with pytest.raises(UserError, match=f"on {device}, and there is no {named} in PATH; .*use_torch_compile=false"):
        require_compiler(device)
    for name in (command, "my-cc"):
        (tmp_path / name).touch(mode=0o755)
    require_compiler(device)
    monkeypatch.delenv(variable)
    require_compiler(device)


@SLOW
def test_two_ranks_that_share_their_tokens(mesh: Any, ranks: Any, folder: Path) -> None:
    plain = one_update(folder, mesh=mesh)
    for options in ({"sp": 2}, {"sp": 2} | RECOMPUTED, {"max_tokens_per_gpu": 60}):
        for compiled in ranks(2).run(one_update, folder, compile_backend="aot_eager", **options):
            close(compiled, plain, rtol=1e-5)
