"""MLPs in slices: the same values and gradients, alone and inside a sharded, recomputed policy; less memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from cases import full_gradients, full_weights, make_rollouts, one_batch, policy_of
from live_bytes import LiveBytes
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from fastgrpo.errors import UserError
from fastgrpo.policy.mlp_slices import SlicedMLP, slice_mlps
from fastgrpo_kernels import linear_logprob

ROLLOUTS = make_rollouts()


class Gated(nn.Module):
    def __init__(self, hidden: int, inner: int, bias: bool) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(hidden, inner, bias=bias), nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def run(mlp: nn.Module, x: Tensor, weight: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    out = mlp(x)
    (out * weight).sum().backward()
    assert x.grad is not None
    found = {name: p.grad for name, p in mlp.named_parameters() if p.grad is not None}
    return {"out": out.detach(), "x": x.grad, **found}


@pytest.mark.parametrize("tokens", [1, 2, 7, 64])
@pytest.mark.parametrize("slices", [1, 2, 3, 8, 100])
@pytest.mark.parametrize("bias", [False, True])
def test_values_and_gradients_in_fp64(tokens: int, slices: int, bias: bool) -> None:
    torch.manual_seed(0)
    whole = Gated(6, 10, bias).double()
    sliced = SlicedMLP(copy.deepcopy(whole), slices)
    x, weight = torch.randn(2, 1, tokens, 6, dtype=torch.float64)
    expected, found = run(whole, x, weight), run(sliced, x, weight)
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-13, atol=1e-13)


def entropy_and_logprob(hidden_RH: Tensor, output: Any, batch: Any) -> Tensor:
    logprobs_R, entropy_R = linear_logprob(hidden_RH, output.weight_VH, batch.targets_R)
    return (logprobs_R + entropy_R).sum()


def test_a_frozen_weight_gets_no_gradient_and_no_grad_keeps_nothing() -> None:
    torch.manual_seed(0)
    sliced = SlicedMLP(Gated(6, 10, False), 3)
    sliced.up_proj.weight.requires_grad_(False)
    found = run(sliced, *torch.randn(2, 1, 9, 6))
    assert set(found) == {"out", "x", "gate_proj.weight", "down_proj.weight"}
    with torch.no_grad():
        assert sliced(torch.randn(1, 9, 6)).grad_fn is None


def test_weight_gradients_are_summed_in_float32() -> None:
    """In bfloat16 over 64 slices: no further from the truth than one product over all tokens, by more than a half."""
    torch.manual_seed(0)
    truth_mlp = Gated(32, 64, False).to(torch.bfloat16)
    whole, sliced = copy.deepcopy(truth_mlp), SlicedMLP(copy.deepcopy(truth_mlp), 64)
    x, weight = torch.randn(2, 1, 4096, 32).to(torch.bfloat16)
    truth = run(copy.deepcopy(truth_mlp).double(), x.double(), weight.double())
    errors = {
        kind: {n: (g.double() - truth[n]).norm() / truth[n].norm() for n, g in run(mlp, x, weight).items()}
        for kind, mlp in (("whole", whole), ("sliced", sliced))
    }
    for name in ("gate_proj.weight", "up_proj.weight", "down_proj.weight"):
        assert errors["sliced"][name] < 1.5 * errors["whole"][name] + 1e-4, (name, errors)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "phi3"])
@pytest.mark.parametrize("every", [0, 1, 2])
def test_inside_a_policy(mesh: Any, make_tiny_model: Any, family: str, every: int) -> None:
    """Sharded, with and without recomputed blocks: logits, loss and every gradient, names and exported weights."""
    folder = make_tiny_model(family, num_hidden_layers=3)

    def loss_and_gradients(slices: int) -> Any:
        policy = policy_of(folder, mesh, gradient_checkpointing=every, mlp_slices=slices)
        loss = policy.run(one_batch(ROLLOUTS), entropy_and_logprob)
        loss.backward()
        return loss.detach(), full_gradients(policy), full_weights(policy), [name for name, _ in policy.export()]

    loss, gradients, weights, names = loss_and_gradients(1)
    sliced_loss, sliced_gradients, sliced_weights, sliced_names = loss_and_gradients(5)
    torch.testing.assert_close(sliced_loss, loss, rtol=1e-5, atol=1e-6)
    assert sliced_names == names and sliced_weights.keys() == weights.keys()
    for name in gradients:
        torch.testing.assert_close(sliced_gradients[name], gradients[name], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_two_ranks_agree_with_one(ranks: Any, mesh: Any, make_tiny_model: Any) -> None:
    from cases import one_update

    folder = make_tiny_model()
    alone = one_update(folder, mesh=mesh, gradient_checkpointing=1)
    for result in ranks(2).run(one_update, folder, gradient_checkpointing=1, mlp_slices=3):
        for name, gradient in alone["gradients"].items():
            torch.testing.assert_close(result["gradients"][name], gradient, rtol=1e-4, atol=1e-6)


def test_the_inside_exists_for_one_slice_at_a_time() -> None:
    """Whole, 4 intermediate values a token are kept and 2 more made in the backward; in 16 slices a 16th of them."""
    hidden, inner, tokens = 8, 256, 4096

    def peak(mlp: nn.Module) -> int:
        x = torch.randn(1, tokens, hidden, requires_grad=True)
        with LiveBytes() as live:
            mlp(x).sum().backward()
        return live.peak

    whole = peak(Gated(hidden, inner, False))
    sliced = peak(SlicedMLP(Gated(hidden, inner, False), 16))
    inside = 4 * tokens * inner
    assert whole > 4 * inside
    assert sliced < 6 * inside / 16 + 8 * 4 * tokens * hidden


def test_a_block_without_an_mlp_is_refused() -> None:
    with pytest.raises(UserError, match=r"actor.mlp_slices=2: Linear has no MLP .* set actor.mlp_slices=1"):
        slice_mlps([nn.Linear(2, 2)], 2)
    config = AutoConfig.for_model("llama", hidden_size=32, intermediate_size=8, num_hidden_layers=1, vocab_size=8)
    with torch.device("meta"):
        block = AutoModelForCausalLM.from_config(config).model.layers[0]
    block.mlp.scale = nn.Parameter(torch.ones(1, device="meta"))
    with pytest.raises(UserError, match="LlamaDecoderLayer"):
        slice_mlps([block], 2)
