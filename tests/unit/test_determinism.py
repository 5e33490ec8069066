"""trainer.deterministic: torch may warn while the engine works, and obeys in the trainer's own passes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cases import make_rollouts, mini_batches_of, policy_of, share_of
from torch import Tensor

from fastgrpo.config import RunConfig
from fastgrpo.metrics import Sums
from fastgrpo.policy.actor import Actor
from fastgrpo.policy.attention import Packing, flash, make_packing, sdpa, varlen
from fastgrpo.policy.determinism import be_deterministic, strictly

Setting = tuple[bool, bool]  # deterministic algorithms on, and only with a warning


def setting() -> Setting:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    on, warn_only = setting()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ":4096:8"))
    yield
    torch.use_deterministic_algorithms(on, warn_only=warn_only)
    torch.utils.deterministic.fill_uninitialized_memory = fill  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("before", [(False, False), (True, True), (True, False)])
def test_strictly_holds_inside_and_restores(before: Setting) -> None:
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    with strictly(False):
        assert setting() == before
    with strictly(True):
        assert setting() == (True, False)
    assert setting() == before
    with pytest.raises(ValueError, match="inside"), strictly(True):
        raise ValueError("inside")
    assert setting() == before


def test_the_process_warns_and_asks_for_repeatable_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    be_deterministic()
    assert setting() == (True, True) and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert torch.utils.deterministic.fill_uninitialized_memory is False  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    be_deterministic()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


@pytest.mark.parametrize("deterministic", [False, True])
def test_every_pass_of_the_actor_obeys(make_tiny_model: Any, mesh: Any, deterministic: bool) -> None:
    config = RunConfig()
    config.actor.use_kl_loss, config.trainer.deterministic = False, deterministic
    policy = policy_of(make_tiny_model("qwen2"), mesh, gradient_checkpointing=1)  # blocks run again in the backward
    actor = Actor(policy, None, config, 10)
    forward: list[Setting] = []
    backward: list[Setting] = []

    def look(module: Any, inputs: Any, output: Tensor) -> None:
        forward.append(setting())
        if output.requires_grad:
            output.register_hook(lambda grad: backward.append(setting()))

    for name, module in actor.policy.module.named_modules():
        if name.endswith("o_proj"):
            module.register_forward_hook(look)
    mini_batches = mini_batches_of(make_rollouts(5), np.array([1.0, 0.5, -2.0, -1.0, 0.5]), share_of(mesh, 64), config)
    if deterministic:
        be_deterministic()
    outside = setting()
    actor.old_logprobs(mini_batches)
    actor.update(mini_batches, None, None, Sums())
    assert forward and backward and set(forward) | set(backward) == {(True, False) if deterministic else outside}
    assert setting() == outside


def test_the_package_flash_attn_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []

    def attention(q: Tensor, *others: Any, deterministic: bool, **options: Any) -> Tensor:
        told.append(deterministic)
        return q

    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=attention))
    x_TQD = torch.zeros(3, 2, 8)
    packing = make_packing(torch.tensor([0, 3], dtype=torch.int32), 3, flash, None, torch.device("cpu"))
    flash(x_TQD, x_TQD, x_TQD, packing, 1.0)
    with strictly(True):
        flash(x_TQD, x_TQD, x_TQD, packing, 1.0)
    assert told == [False, True]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("backend", "dtype"), [(varlen, torch.bfloat16), (sdpa, torch.bfloat16), (sdpa, torch.float32)]
)
def test_attention_repeats_to_the_bit_on_cuda(backend: Any, dtype: torch.dtype, recwarn: Any) -> None:
    """Long sequences of few heads: many blocks of keys add to the gradient of each query."""
    be_deterministic()
    cuda = torch.device("cuda")
    lengths = torch.tensor([0, 4096, 7000], dtype=torch.int32)
    packing: Packing = make_packing(lengths, 4096, backend, None, cuda)
    torch.manual_seed(0)
    grad, q = (torch.randn(7000, 4, 64, device=cuda, dtype=dtype) for _ in range(2))
    k, v = (torch.randn(7000, 2, 64, device=cuda, dtype=dtype) for _ in range(2))

    def once() -> list[Tensor]:
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        with strictly(True):
            out = backend(*inputs, packing, 0.125)
            return [out.detach(), *torch.autograd.grad(out, inputs, grad)]

    first = once()
    for _ in range(10):
        for actual, right in zip(once(), first, strict=True):
            assert torch.equal(actual, right)
    assert not [str(warning.message) for warning in recwarn if "non-deterministic" in str(warning.message)]
