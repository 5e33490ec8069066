"""Adapters against peft's own model of the same folder: values, gradients, what is saved; the base beneath them."""

from __future__ import annotations

import json
import math
from functools import partial

import pytest
import torch
from cases import full_weights, make_rollouts, one_batch, policy_of, separate_logprobs, stir_adapters
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastgrpo.checkpoint import save_trained
from fastgrpo.errors import UserError
from fastgrpo.policy.head import score_head
from fastgrpo.policy.liger import use_liger_modules
from fastgrpo.policy.lora import (
    ALL_LINEAR,
    Lora,
    LoraLinear,
    add_adapters,
    full_adapters,
    is_adapter,
    merge,
    warn_of_narrow_layers,
)
from fastgrpo.policy.model import build_policy
from fastgrpo_kernels import linear_logprob

ROLLOUTS = make_rollouts(6)
TEMPERATURE = 0.7
ATTENTION = ("q_proj", "v_proj")


def lora(targets=(ALL_LINEAR,), rank=3, alpha=8, base="base"):
    return Lora(rank, alpha, targets, 0, base)


def adapted(folder, mesh, targets=(ALL_LINEAR,), **options):
    """A policy whose adapters are off their start, so that each of them shows."""
    policy = policy_of(folder, mesh, lora=lora(targets, base=str(folder)), **options)
    stir_adapters(policy)
    return policy


def score(policy):
    return policy.score(one_batch(ROLLOUTS), partial(score_head, temperature=TEMPERATURE)).logprobs_R


def adapters(policy):
    return {name: tensor.clone() for name, tensor in full_adapters(policy.module, policy.device)}


def pretrained(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def peft_model(folder, policy, targets):
    """peft's own, with the policy's adapters."""
    names = list(targets) if targets != (ALL_LINEAR,) else ALL_LINEAR
    config = LoraConfig(r=3, lora_alpha=8, target_modules=names, task_type="CAUSAL_LM")
    model = get_peft_model(pretrained(folder), config)
    own = {name: p for name, p in model.named_parameters() if "lora_" in name}
    values = adapters(policy)
    assert {name.replace(".default", "") for name in own} == values.keys()
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(values[name.replace(".default", "")])
    return model, own


@pytest.mark.parametrize(
    ("family", "tied", "targets", "options"),
    [
        ("qwen2", True, (ALL_LINEAR,), {}),
        ("qwen3", False, ATTENTION, {"gradient_checkpointing": 1}),
        ("llama", False, ("down_proj", "o_proj"), {"mlp_slices": 3}),
        ("llama", True, (ALL_LINEAR,), {"mlp_slices": 2, "gradient_checkpointing": 2, "activation_offload": True}),
    ],
)
def test_logprobs_and_gradients_are_those_of_pefts_model(mesh, make_tiny_model, family, tied, targets, options):
    folder = make_tiny_model(family, tied=tied)
    policy = adapted(folder, mesh, targets, **options)
    model, own = peft_model(folder, policy, targets)
    expected_R = separate_logprobs(model, ROLLOUTS, TEMPERATURE)
    torch.testing.assert_close(score(policy), expected_R, rtol=1e-5, atol=1e-5)
    assert (score(policy) - score(policy.base)).abs().max() > 0.01

    weights_R = torch.randn(len(expected_R), generator=torch.Generator().manual_seed(1))

    def weighted_sum(hidden_RH, output, batch):
        return (linear_logprob(hidden_RH, output.weight_VH, batch.targets_R, TEMPERATURE)[0] * weights_R).sum()

    policy.run(one_batch(ROLLOUTS), weighted_sum).backward()
    (expected_R * weights_R).sum().backward()
    found = {name: p.grad for name, p in policy.module.named_parameters() if p.grad is not None}
    assert len(found) == len(own) and all(is_adapter(name) for name in found)
    for name, parameter in own.items():
        gradient = found["lm." + name.removeprefix("base_model.model.").replace(".default", "")].full_tensor()
        assert (gradient - parameter.grad).norm() < 1e-4 * parameter.grad.norm() + 1e-7, name


def test_the_reference_is_the_base_bit_for_bit(mesh, make_tiny_model):
    folder = make_tiny_model("qwen2")
    expected_R = score(policy_of(folder, mesh, trainable=False))
    policy = adapted(folder, mesh)
    assert torch.equal(score(policy.base), expected_R)
    assert not torch.equal(score(policy), expected_R)  # and they are on again
    assert torch.equal(score(policy_of(folder, mesh, lora=lora())), expected_R)  # B starts at 0


def test_half_precision_has_float32_masters_of_adapters_alone(mesh, make_tiny_model, tmp_path):
    folder = make_tiny_model("llama")
    options = dict(dtype=torch.bfloat16, attention_backend="auto")
    policy = build_policy(folder, mesh, trainable=True, lora=lora(), **options)
    for name, parameter in policy.module.named_parameters():
        assert parameter.requires_grad == is_adapter(name)
        assert parameter.dtype == (torch.float32 if is_adapter(name) else torch.bfloat16)
    base = build_policy(folder, mesh, trainable=False, **options)
    assert torch.equal(score(policy.base), score(base))
    policy.run(one_batch(ROLLOUTS), lambda hidden_RH, *_: hidden_RH.float().sum()).backward()
    assert {p.grad.dtype for p in policy.module.parameters() if p.grad is not None} == {torch.float32}


def test_the_start_is_pefts(mesh, tiny_model):
    """Uniform within 1 / sqrt(in), B at 0; other layers and seeds draw otherwise, the same call draws the same."""
    first, again = (adapters(policy_of(tiny_model, mesh, lora=lora(rank=64))) for _ in range(2))
    other = adapters(policy_of(tiny_model, mesh, lora=Lora(64, 8, (ALL_LINEAR,), 1, "base")))
    drawn = [tensor for name, tensor in first.items() if ".lora_A." in name]
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name])
        if ".lora_A." in name:
            bound = tensor.shape[1] ** -0.5
            assert tensor.abs().max() <= bound
            assert tensor.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)  # of a uniform distribution
            assert not torch.equal(tensor, other[name])
        else:
            assert not tensor.any()
    assert not torch.equal(drawn[0], drawn[1])


@pytest.mark.parametrize("tied", [False, True])
def test_export_is_base_plus_product_and_the_other_weights_are_the_bases(mesh, make_tiny_model, tied):
    folder = make_tiny_model("qwen2", tied=tied)
    policy = adapted(folder, mesh)
    stored, values = load_file(folder / "model.safetensors"), adapters(policy)
    exported = {name: tensor.clone() for name, tensor in policy.export()}
    assert exported.keys() == stored.keys()
    moved = 0
    for name, tensor in exported.items():
        key = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{key}.lora_A.weight" in values:
            a, b = values[f"{key}.lora_A.weight"].double(), values[f"{key}.lora_B.weight"].double()
            expected = stored[name].double() + b @ a * 8 / 3
            assert (tensor - expected).abs().max() < 1e-6 and (tensor - stored[name]).abs().max() > 0.01
            moved += 1
        else:
            assert torch.equal(tensor, stored[name])
    assert moved == 2 * 7
    assert torch.equal(full_weights(policy)["lm.model.norm.weight"], stored["model.norm.weight"])


def test_merging_in_half_precision_keeps_what_rounding_would_lose():
    """Updates of a tenth of the last place: rounding to nearest keeps none of them; here their effect stays."""
    generator = torch.Generator().manual_seed(0)
    base = (0.02 * torch.randn(256, 512, generator=generator)).bfloat16()
    a, b = torch.randn(4, 512, generator=generator), 1e-6 * torch.randn(256, 4, generator=generator)
    exact = base.float() + 2 * b @ a
    result = merge(base, a, b, 2.0, "some.weight")
    assert result.dtype == torch.bfloat16 and torch.equal(result, merge(base, a, b, 2.0, "some.weight"))
    x = a.T @ torch.randn(4, generator=generator)  # along the adapters' own directions
    update, kept = (exact - base.float()) @ x, (result.float() - base.float()) @ x
    lost = (exact.bfloat16().float() - base.float()) @ x
    assert (lost - update).norm() > 0.8 * update.norm() and (kept - update).norm() < 0.4 * update.norm()
    mean = sum(merge(base, a, b, 2.0, f"{key}").double() for key in range(100)) / 100
    grid = 2.0 ** (base.abs().double().log2().floor() - 7)  # a draw's deviation is at most half of it
    assert ((mean - exact.double()).abs() / grid).mean() < 0.05
    assert torch.equal(merge(base, a, 0 * b, 2.0, "some.weight"), base)  # what needs no rounding is not rounded
    spread = (result.float() - exact).abs() / exact.abs()
    assert spread.max() < 2**-7  # never beyond the neighbours


def test_peft_loads_what_is_saved(mesh, make_tiny_model, tmp_path):
    folder = make_tiny_model("qwen2")
    policy, tokenizer = adapted(folder, mesh, ("q_proj", "up_proj")), AutoTokenizer.from_pretrained(folder)
    save_trained(policy, tokenizer, tmp_path, mesh, merged=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "model"]
    expected_R = score(policy)
    loaded = PeftModel.from_pretrained(pretrained(folder), tmp_path / "adapter")
    torch.testing.assert_close(separate_logprobs(loaded, ROLLOUTS, TEMPERATURE), expected_R, rtol=1e-5, atol=1e-5)
    merged = separate_logprobs(pretrained(tmp_path / "model"), ROLLOUTS, TEMPERATURE)
    torch.testing.assert_close(merged, expected_R, rtol=1e-5, atol=1e-5)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (3, 8, str(folder))
    assert sorted(config["target_modules"]) == ["q_proj", "up_proj"]
    assert AutoTokenizer.from_pretrained(tmp_path / "adapter").chat_template
    save_trained(policy, tokenizer, tmp_path / "alone", mesh)  # the merged one by option only
    assert [path.name for path in (tmp_path / "alone").iterdir()] == ["adapter"]


def test_peft_puts_adapters_on_the_layers_that_were_named(mesh, make_tiny_model, tmp_path):
    """One block's down_proj, and not every block's: an end of a name stays one in the folder."""
    folder = make_tiny_model("llama")
    policy = adapted(folder, mesh, ("q_proj", "layers.1.mlp.down_proj"))
    save_trained(policy, AutoTokenizer.from_pretrained(folder), tmp_path, mesh)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert sorted(config["target_modules"]) == ["layers.1.mlp.down_proj", "q_proj"]
    loaded = PeftModel.from_pretrained(pretrained(folder), tmp_path / "adapter")
    own = {name.replace(".default", "") for name, _ in loaded.named_parameters() if "lora_" in name}
    assert own == adapters(policy).keys() and sum("down_proj" in name for name in own) == 2  # A and B
    torch.testing.assert_close(separate_logprobs(loaded, ROLLOUTS, TEMPERATURE), score(policy), rtol=1e-5, atol=1e-5)


def test_layers_too_narrow_for_the_rank_are_named(mesh, make_tiny_model, caplog):
    lm = policy_of(make_tiny_model("llama"), mesh, lora=lora(rank=3)).module.lm
    layers = {name.rpartition(".")[2]: layer for name, layer in lm.named_modules() if isinstance(layer, LoraLinear)}
    sides = {n: min(x.base_layer.in_features, x.base_layer.out_features) for n, x in layers.items()}
    narrow, wide = min(sides.values()), max(sides.values())
    assert narrow < wide  # grouped keys and values
    for rank, named in ((narrow, set()), (narrow + 1, {n for n, side in sides.items() if side == narrow})):
        caplog.clear()
        warn_of_narrow_layers(policy_of(make_tiny_model("llama"), mesh, lora=lora(rank=rank)).module)
        assert {name for name in sides if f"{name} ({narrow})" in caplog.text} == named


@pytest.mark.parametrize(
    ("targets", "reason"),
    [
        (
            ("q_poj",),
            "'q_poj', and Qwen2ForCausalLM has no such module; ((?!lm_head).)*q_proj((?!lm_head).)*$",
        ),
        (("lm_head",), "lm_head is the output layer, whose weight the loss reads itself"),
        (("embed_tokens",), "model.embed_tokens is no linear layer"),
        (("mlp",), "model.layers.0.mlp is no linear layer"),
    ],
)
def test_what_cannot_be_adapted_is_refused(mesh, tiny_model, targets, reason):
    with pytest.raises(UserError, match=reason):
        policy_of(tiny_model, mesh, lora=lora(targets))


def test_fused_modules_take_adapted_layers(tiny_model):
    lm = pretrained(tiny_model)
    add_adapters(lm, lora())
    assert use_liger_modules(lm) > 0
    assert all(isinstance(layer.mlp.gate_proj, LoraLinear) for layer in lm.model.layers)
    assert not isinstance(lm.lm_head, LoraLinear)
