"""Work of an update against counts made by hand and by torch itself, and the peak table."""

import pytest
import torch
from cases import policy_of
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from fastgrpo.clock import Clock
from fastgrpo.flops import ModelFlops, peak_flops
from fastgrpo.policy.work import model_flops

SHAPE = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)


@pytest.mark.parametrize("tied", [True, False])
def test_work_without_attention_is_what_torch_counts(tied):
    """Forward and backward of a llama whose head runs on half of the rows. torch counts the products of SDPA without
    causality, so a sequence is cut into single tokens: 64 of them, whose attention is next to nothing."""
    lm = LlamaForCausalLM(LlamaConfig(vocab_size=517, tie_word_embeddings=tied, attn_implementation="eager", **SHAPE))
    flops = ModelFlops.of(lm.model.layers, lm.lm_head.weight, layers=3, heads=4, head_dim=16)
    attention_weights = 64 * 64 * 2 + 64 * 32 * 2  # q and o; k and v of 2 heads
    assert flops == ModelFlops(3 * (attention_weights + 3 * 64 * 96), 517 * 64, 3 * 64)
    ids = torch.arange(64)[:, None]
    hidden = lm.model(
        input_ids=ids
    ).last_hidden_state  # outside the count: the first product has no gradient of its own
    with FlopCounterMode(display=False) as counter:
        embedded = lm.model.embed_tokens(ids)
        hidden = lm.model(inputs_embeds=embedded).last_hidden_state
        lm.lm_head(hidden[:32]).sum().backward()
    attention = 2 * 3 * (4 * 16) * 2 * 3 * 64  # twice our causal half, 1 x 1 scores
    assert flops.training([1] * 64, 32) == pytest.approx(counter.get_total_flops() - attention / 2, rel=1e-3)


def test_the_reference_step_by_hand():
    """256 sequences of 250 + 1024 tokens through Qwen2.5-1.5B's shape: about 3 PFLOP."""
    per_layer = 2 * 1536 * 1536 + 2 * 1536 * 256 + 3 * 1536 * 8960
    flops = ModelFlops(28 * per_layer, 1536 * 151936, 28 * 1536)
    length = 250 + 1024 - 1
    by_hand = 6 * 256 * (length * 28 * per_layer + 1024 * 1536 * 151936 + length**2 * 28 * 1536)
    assert flops.training([length] * 256, 256 * 1024) == by_hand
    assert 2.9e15 < by_hand < 3.2e15
    assert flops.training([], 0) == 0


def test_frozen_weights_have_no_gradient_to_be_computed():
    lm = LlamaForCausalLM(LlamaConfig(vocab_size=517, attn_implementation="eager", **SHAPE)).requires_grad_(False)
    sizes = dict(layers=3, heads=4, head_dim=16)
    frozen = ModelFlops.of(lm.model.layers, lm.lm_head.weight, **sizes)
    assert (frozen.frozen_blocks, frozen.frozen_head) == (frozen.blocks, frozen.head)
    attention = 6 * 10**2 * frozen.attention
    assert frozen.training([10], 5) == 4 * (10 * frozen.blocks + 5 * frozen.head) + attention
    lm.model.layers[0].mlp.requires_grad_(True)
    half = ModelFlops.of(lm.model.layers, lm.lm_head.weight, **sizes)
    assert half.training([10], 5) - frozen.training([10], 5) == 2 * 10 * 3 * 64 * 96


def test_attention_grows_with_the_square():
    only_attention = ModelFlops(0, 0, 10)
    assert only_attention.training([100], 0) == 6 * 10 * 100**2 == 4 * only_attention.training([50], 0)


@pytest.mark.parametrize(
    ("name", "stated", "dtype", "peak"),
    [
        ("NVIDIA H200", None, "bfloat16", 989e12),
        ("NVIDIA H100 PCIe", None, "bfloat16", 756e12),
        ("NVIDIA A100-SXM4-80GB", None, "bfloat16", 312e12),
        ("NVIDIA A10G", None, "bfloat16", 125e12),
        ("NVIDIA H200", None, "float32", None),
        ("NVIDIA H200", 67.0, "float32", 67e12),
        ("NVIDIA RTX A4000", None, "bfloat16", None),
        ("cpu", None, "bfloat16", None),
        ("Somebody's GPU", None, "bfloat16", None),
        ("cpu", 1.0, "float32", 1e12),
    ],
)
def test_peak_by_name_or_as_stated(name, stated, dtype, peak):
    assert peak_flops(name, stated, dtype) == peak


def test_mfu_is_peak_time_over_time(monkeypatch):
    ticks = iter([0.0, 1.0, 5.0, 6.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(ticks))
    clock = Clock(torch.device("cpu"), 0)
    with clock("update"):
        pass
    assert clock.mfu == {}
    clock.note_work("update", None)
    assert clock.mfu == {}
    clock.note_work("update", 1.0)
    assert clock.mfu == {"perf/mfu": 0.25}


def test_a_sharded_policy_counts_as_the_whole_model(tiny_model, mesh):
    """2 layers of hidden 128, MLP 192, 4 heads of 32 and 2 KV heads; 267 tokens."""
    flops = model_flops(policy_of(tiny_model, mesh))
    layer = 2 * 128 * 128 + 2 * 64 * 128 + 3 * 128 * 192
    assert flops == ModelFlops(2 * layer, 267 * 128, 2 * 4 * 32)
