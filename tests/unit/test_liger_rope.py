"""Which attention is exchanged for the fused rotary embedding, and, on a GPU, the whole policy with and without it.

The kernel's values on a CPU are in interpreted_rope.py, which runs here in a process of its own, because triton decides
when it is imported whether kernels are compiled or interpreted.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from cases import full_gradients, make_rollouts, one_batch, one_process, policy_of
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

from fastgrpo.policy import attention, liger
from fastgrpo.policy.head import score_head
from fastgrpo.policy.lora import Lora, LoraLinear, add_adapters
from fastgrpo.policy.model import build_policy

TESTS = Path(__file__).with_name("interpreted_rope.py")
FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]
LORA = Lora(3, 8, ("all-linear",), 0, "base")


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiled there")
@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="needs liger-kernel")
@pytest.mark.parametrize(("marked", "count"), [("not slow", 10), pytest.param("slow", 2, marks=pytest.mark.slow)])
def test_values_under_the_interpreter(marked, count):
    path = os.pathsep.join([str(TESTS.parents[2] / "kernels"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", marked, str(TESTS)],
        env={**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert int(done.stdout.rsplit(" passed", 1)[0].split()[-1]) == count  # none skipped or lost


# ---- what is exchanged


def model_of(folder, kind=attention.NAME):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=kind)


def fused(lm):
    return [module for module in lm.modules() if isinstance(module, liger.LigerAttention)]


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_block_takes_it_with_the_same_parameters(make_tiny_model, family, adapted):
    lm = model_of(make_tiny_model(family))
    if adapted:
        add_adapters(lm, LORA)
    before = dict(lm.named_parameters())
    assert liger.use_liger_modules(lm) == (6 if family == "qwen3" else 4) * 2 + 1
    assert [layer.self_attn for layer in lm.model.layers] == fused(lm)
    after = dict(lm.named_parameters())
    assert list(after) == list(before) and all(after[name] is before[name] for name in before)
    for module in fused(lm):
        assert all(isinstance(getattr(module, name), LoraLinear) == adapted for name in liger._PROJECTIONS)
        if family == "qwen3":
            assert isinstance(module.q_norm, liger.LigerNorm) and isinstance(module.k_norm, liger.LigerNorm)


def test_other_attention_stays(make_tiny_model, monkeypatch):
    """Another family's, one that does not attend through ours, one that rotates a part of a head, and one of the same
    name that transformers did not write or that has more parameters."""
    gated = model_of(make_tiny_model("llama"))
    for layer in gated.model.layers:
        layer.self_attn.gate = torch.nn.Linear(2, 2)
    partly = model_of(make_tiny_model("llama"))
    partly.config.rope_parameters = partly.config.rope_parameters | {"partial_rotary_factor": 0.5}
    others = [
        model_of(make_tiny_model("gemma2", tied=True, attn_logit_softcapping=None)),
        model_of(make_tiny_model("llama"), "eager"),
        gated,
        partly,
    ]
    for lm in others:
        liger.use_liger_modules(lm)
        assert not fused(lm)
    lm = model_of(make_tiny_model("llama"))
    monkeypatch.setattr(LlamaAttention, "__module__", "transformers_modules.custom.modeling_custom")
    liger.use_liger_modules(lm)
    assert not fused(lm)


@pytest.mark.parametrize(
    ("device", "options", "count"),
    [
        ("cuda", {}, 2),
        ("cuda", {"use_liger": False}, 0),
        ("cuda", {"compile_backend": "eager"}, 0),
        ("cpu", {}, 0),
    ],
)
def test_the_policy_takes_it_with_the_rest_of_liger(make_tiny_model, mesh, monkeypatch, device, options, count):
    """On CUDA, unless the option says no or its blocks are compiled. Built here, on the CPU, and not run."""
    monkeypatch.setattr(liger, "is_installed", lambda: True)
    usable = liger.is_usable(torch.device(device))
    monkeypatch.setattr(liger, "is_usable", lambda _: usable)
    policy = policy_of(make_tiny_model("qwen2"), mesh, **({"use_liger": True} | options))
    assert len(fused(policy.module)) == count


# ---- on a GPU


def logprobs_and_gradients(folder, mesh, dtype, *, fuse, **options):
    """Of a policy whose norms and MLPs are liger's either way."""
    with mock.patch.dict(liger._ATTENTIONS, clear=not fuse):
        policy = build_policy(
            folder, mesh, dtype=dtype, attention_backend="auto", trainable=True, use_liger=True, **options
        )
    assert len(fused(policy.module)) == (2 if fuse else 0)
    logprobs_R = policy.run(one_batch(make_rollouts(24)), partial(score_head, temperature=1.0)).logprobs_R
    logprobs_R.sum().backward()
    return logprobs_R.detach().float(), full_gradients(policy)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("family", "config"),
    [("llama", {}), ("mistral", {}), ("qwen2", {"num_key_value_heads": 1}), ("qwen3", {"head_dim": 128})],
)
def test_the_whole_policy_with_and_without(make_tiny_model, family, config):
    """float32: the same. bfloat16: no farther from float32 than without. Recomputed in the backward, which rotates
    twice."""
    pytest.importorskip("liger_kernel")
    folder = make_tiny_model(family, **config)
    with one_process("cuda") as mesh:
        exact, right = logprobs_and_gradients(folder, mesh, torch.float32, fuse=False)
        actual, gradients = logprobs_and_gradients(folder, mesh, torch.float32, fuse=True, gradient_checkpointing=1)
        torch.testing.assert_close(actual, exact, rtol=1e-4, atol=1e-4)
        assert list(gradients) == list(right)
        for name, gradient in right.items():
            floor = 1e-3 if name.endswith("k_proj.bias") else 1e-6  # that gradient is zero but for rounding
            assert (gradients[name] - gradient).norm() < 1e-4 * gradient.norm() + floor, name

        plain, plain_gradients = logprobs_and_gradients(folder, mesh, torch.bfloat16, fuse=False)
        actual, gradients = logprobs_and_gradients(folder, mesh, torch.bfloat16, fuse=True, gradient_checkpointing=1)
        # Seen on a CPU with one rounding in place of three: at most 1.1 x.
        assert (actual - exact).norm() < 1.5 * (plain - exact).norm()
        for name, gradient in right.items():
            assert (gradients[name] - gradient).norm() < 1.5 * (plain_gradients[name] - gradient).norm(), name
