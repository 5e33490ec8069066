"""liger's rotary embedding inside LigerAttention, interpreted on the CPU, against transformers' own forward.

Run by test_liger_rope.py in a process of its own, or by hand:

    TRITON_INTERPRET=1 python -m pytest tests/unit/interpreted_rope.py

The interpreter can run neither liger's norm and MLP nor bfloat16; test_liger_rope.py has both on a GPU.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from cases import one_update
from transformers import AutoModelForCausalLM

from fastgrpo.errors import UserError
from fastgrpo.policy import attention, liger
from fastgrpo.policy.lora import Lora, add_adapters

LENGTHS = (5, 1, 11)  # of the sequences in a row
LORA = Lora(3, 8, ("all-linear",), 0, "base")


@pytest.fixture(autouse=True)
def rope_alone(monkeypatch):
    monkeypatch.setattr(liger, "_NORMS", set())
    monkeypatch.setattr(liger, "_MLPS", set())


def model_of(folder, kind=attention.NAME, dtype=torch.float64):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=kind).train()


def sequences():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(4, 200, (length,), generator=generator) for length in LENGTHS]


def packed_logits(lm):
    """Of all sequences in one row [1, T], positions from 0 in each."""
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    packing = attention.make_packing(cu_seqlens, max(LENGTHS), attention.sdpa, None, torch.device("cpu"))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    ids = torch.cat(sequences())
    return lm(input_ids=ids[None], position_ids=positions[None], use_cache=False, packing=packing).logits[0]


def loss_of(logits):
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1), dtype=logits.dtype)
    return (logits.log_softmax(-1) * weights).sum()


def with_gradients(lm, logits):
    """`logits` and the gradient of each parameter that is trained."""
    trained = {name: p for name, p in lm.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(loss_of(logits), list(trained.values()))
    return logits.detach(), dict(zip(trained, gradients, strict=True))


def packed(lm):
    return with_gradients(lm, packed_logits(lm))


def assert_same(found, wanted, tolerance=1e-11):
    """Values within `tolerance` of the largest, and the gradient of each parameter within it of its norm."""
    (actual, gradients), (expected, right) = found, wanted
    assert (actual - expected).abs().max() < tolerance * expected.abs().max()
    assert list(gradients) == list(right)
    for name, gradient in right.items():
        assert gradient.norm() > 0
        # A bias of k moves no softmax: its gradient is rounding alone.
        error = 100 * tolerance if name.endswith("k_proj.bias") else tolerance * gradient.norm()
        assert (gradients[name] - gradient).norm() < error, name


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("llama", {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 24}),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}),  # cosines scaled
        ("mistral", {"sliding_window": 11}),  # as long as the longest
        ("qwen2", {}),
        ("qwen2", {"num_key_value_heads": 1}),
        ("qwen3", {"head_dim": 40}),
    ],
)
def test_values_and_gradients_are_those_of_transformers(make_tiny_model, family, options):
    """In float64: of the same packed row, and, as far as the norms' own float32 goes, of each sequence on its own in a
    model with nothing of ours."""
    folder = make_tiny_model(family, **options)
    plain, separate, lm = model_of(folder), model_of(folder, "eager"), model_of(folder)
    assert liger.use_liger_modules(lm) == 2
    found = packed(lm)
    assert_same(found, packed(plain))
    expected = torch.cat([separate(input_ids=ids[None], use_cache=False).logits[0] for ids in sequences()])
    assert_same(found, with_gradients(separate, expected), tolerance=3e-6)


def test_float32(make_tiny_model):
    plain, lm = (model_of(make_tiny_model("qwen3"), dtype=torch.float32) for _ in range(2))
    assert liger.use_liger_modules(lm) == 2
    assert_same(packed(lm), packed(plain), tolerance=1e-5)


def test_adapters_on_every_projection(make_tiny_model):
    models = [model_of(make_tiny_model("qwen2")) for _ in range(2)]
    for lm in models:
        add_adapters(lm, LORA)
        generator = torch.Generator().manual_seed(0)
        for name, parameter in lm.named_parameters():
            parameter.requires_grad_("lora_" in name)
            if "lora_" in name:
                parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    plain, lm = models
    assert liger.use_liger_modules(lm) == 2
    found = packed(lm)
    assert_same(found, packed(plain))
    assert sum(".self_attn." in name for name in found[1]) == 2 * 4 * 2


def test_a_window_that_is_too_short_is_still_refused(make_tiny_model):
    for family, options in (("mistral", {}), ("qwen2", {"use_sliding_window": True, "max_window_layers": 1})):
        lm = model_of(make_tiny_model(family, sliding_window=10, **options))
        assert liger.use_liger_modules(lm) == 2
        with pytest.raises(UserError, match="sliding window of 10 tokens with sequences of 11"):
            packed_logits(lm)


# ---- whole updates: adapters, recomputed blocks, FSDP and Ulysses


def update(folder, exchange, lora=None, **layout):
    """One update's gradients, and how often a block's attention ran as LigerAttention."""
    forward = liger.LigerAttention.forward
    with (
        mock.patch.object(liger, "_NORMS", set()),
        mock.patch.object(liger, "_MLPS", set()),
        mock.patch.object(liger, "is_usable", return_value=exchange),
        mock.patch.object(liger.LigerAttention, "forward", autospec=True, side_effect=forward) as calls,
    ):
        result = one_update(folder, count=3, use_liger=True, lora=lora, **layout)
    return result, calls.call_count


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LORA])
def test_an_update_on_two_ranks(ranks, make_tiny_model, mesh, lora):
    """Two halves of each row, a key/value head for both, every block recomputed."""
    folder = make_tiny_model("qwen3", num_key_value_heads=1)
    expected, calls = update(folder, False, lora, mesh=mesh)
    assert calls == 0
    for actual, calls in ranks(2).run(update, folder, True, lora, sp=2, gradient_checkpointing=1):
        assert calls > 0
        for name in ("loss", "grad_norm", "kl", "entropy"):
            assert actual[name] == pytest.approx(expected[name], rel=1e-5), name
        assert actual["gradients"].keys() == expected["gradients"].keys()
        for name, gradient in expected["gradients"].items():
            assert gradient.norm() > 0 and (actual["gradients"][name] - gradient).norm() < 1e-4 * gradient.norm(), name
