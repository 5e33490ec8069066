"""Attention over packed sequences against a softmax written out, one sequence at a time, in float64."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fastgrpo.errors import UserError
from fastgrpo.policy.attention import attend, choose_backend, flash, make_packing, sdpa, varlen
from fastgrpo.policy.ulysses import repeat_kv

CPU = torch.device("cpu")
LENGTHS = (1, 2, 3, 17, 33)


class Gemma9Attention(nn.Module):
    pass


def packing_of(lengths=LENGTHS, backend=sdpa, device=CPU):
    cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return make_packing(cu_seqlens, max(lengths), backend, None, device)


def written_out(q_TQD, k_TKD, v_TKD, lengths, scale):
    """softmax(scale q k^T) v over the tokens up to one's own, head by head, sequence by sequence."""
    heads, groups = q_TQD.shape[1], q_TQD.shape[1] // k_TKD.shape[1]
    outputs, start = [], 0
    for length in lengths:
        part = slice(start, start + length)
        by_head = []
        for head in range(heads):
            q, k, v = q_TQD[part, head], k_TKD[part, head // groups], v_TKD[part, head // groups]
            scores = (scale * q @ k.T).masked_fill(torch.ones(length, length).triu(1).bool().to(q.device), -math.inf)
            by_head.append(scores.softmax(-1) @ v)
        outputs.append(torch.stack(by_head, 1))
        start += length
    return torch.cat(outputs)


def qkv(heads, kv_heads, size, dtype, lengths=LENGTHS, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    tokens = sum(lengths)
    shapes = (tokens, heads, size), (tokens, kv_heads, size), (tokens, kv_heads, size), (tokens, heads, size)
    q, k, v, grad = (torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype) for shape in shapes)
    return [x.requires_grad_() for x in (q, k, v)], grad


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 4, 8), (4, 2, 5), (6, 1, 1)])
@pytest.mark.parametrize("scale", [0.125, 3.0])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_sdpa_over_packed_sequences(heads, kv_heads, size, scale, dtype, tolerance):
    inputs, grad = qkv(heads, kv_heads, size, dtype)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    out, expected = sdpa(*inputs, packing_of(), scale), written_out(*exact, LENGTHS, scale)
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    gradients = torch.autograd.grad(out, inputs, grad)
    for actual, right in zip(gradients, torch.autograd.grad(expected, exact, grad.double()), strict=True):
        torch.testing.assert_close(actual.double(), right, rtol=10 * tolerance, atol=10 * tolerance)


def test_order_of_the_sequences_changes_no_bit():
    inputs, _ = qkv(2, 2, 4, torch.float32)
    order = [3, 0, 4, 2, 1]
    tokens = torch.arange(sum(LENGTHS)).split(LENGTHS)
    moved = torch.cat([tokens[i] for i in order])
    out = sdpa(*(x[moved] for x in inputs), packing_of([LENGTHS[i] for i in order]), 0.5)
    assert torch.equal(out, sdpa(*inputs, packing_of(), 0.5)[moved])


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(1, 70), min_size=1, max_size=30))
def test_buckets_hold_every_token_once_and_few_repeats(lengths):
    packing = packing_of(lengths)
    laid_out = torch.cat([index.flatten() for index in packing.buckets])
    assert torch.equal(laid_out[packing.unbucket_T], torch.arange(sum(lengths)))
    assert len(laid_out) < 2 * sum(lengths)
    starts = packing.cu_seqlens[:-1].tolist()
    rows = sorted((row for index in packing.buckets for row in index.tolist()), key=lambda row: row[0])
    for row, start, length in zip(rows, starts, lengths, strict=True):
        repeats = [start + length - 1] * (len(row) - length)
        assert row == [*range(start, start + length), *repeats]


def transposed(inputs):
    return [x.transpose(0, 1).unsqueeze(0) for x in inputs]  # [1, heads, T, D]


def test_attend_speaks_transformers_layout():
    inputs, _ = qkv(4, 2, 8, torch.float64)
    out, weights = attend(
        Gemma9Attention(), *transposed(inputs), None, packing=packing_of(), scaling=0.3, dropout=0.5, softcap=None
    )
    assert weights is None
    torch.testing.assert_close(out[0], written_out(*inputs, LENGTHS, 0.3), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("feature", "words"),
    [
        ({"softcap": 50.0}, "asks for softcap"),
        ({"s_aux": torch.zeros(4)}, "asks for s_aux"),
        ({"softcap": 50.0, "sinks": torch.zeros(4)}, "asks for softcap, sinks"),
        ({"position_bias": torch.zeros(1)}, "asks for position_bias"),
        ({"sliding_window": 32}, "asks for sliding window of 32 tokens with sequences of 33"),
    ],
)
def test_attend_refuses_what_it_cannot_do(feature, words):
    inputs, _ = qkv(4, 2, 8, torch.float32)
    with pytest.raises(UserError, match=f"Gemma9Attention {words}"):
        attend(Gemma9Attention(), *transposed(inputs), None, packing=packing_of(), scaling=1.0, **feature)


def test_attend_takes_a_window_that_hides_nothing():
    inputs, _ = qkv(2, 2, 4, torch.float32)
    options = {"packing": packing_of(), "scaling": 1.0}
    plain, _ = attend(Gemma9Attention(), *transposed(inputs), None, **options)
    assert torch.equal(plain, attend(Gemma9Attention(), *transposed(inputs), None, sliding_window=33, **options)[0])


def test_choose_backend(monkeypatch):
    cuda = torch.device("cuda")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert choose_backend("auto", CPU, torch.bfloat16) is sdpa
    assert choose_backend("auto", cuda, torch.float32) is sdpa
    assert choose_backend("auto", cuda, torch.bfloat16) is varlen
    assert choose_backend("varlen", cuda, torch.float16) is varlen
    assert choose_backend("sdpa", cuda, torch.bfloat16) is sdpa
    with pytest.raises(UserError, match=r"attention=flash needs .*pip install flash-attn"):
        choose_backend("flash", cuda, torch.bfloat16)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: SimpleNamespace(name=name))
    assert choose_backend("auto", cuda, torch.bfloat16) is flash
    with pytest.raises(UserError, match="attention=flash needs a CUDA device"):
        choose_backend("flash", CPU, torch.bfloat16)
    with pytest.raises(UserError, match=r"attention=varlen needs .* not cpu and torch\.float32"):
        choose_backend("varlen", CPU, torch.float32)
    with pytest.raises(UserError, match=r"not cuda and torch\.float32"):
        choose_backend("varlen", cuda, torch.float32)


# (query heads, key/value heads, sp) -> (query heads, key/value head or heads) of each rank
@pytest.mark.parametrize(
    ("heads", "kv_heads", "sp", "owned"),
    [
        (32, 4, 8, [([4 * r, 4 * r + 1, 4 * r + 2, 4 * r + 3], [r // 2]) for r in range(8)]),
        (40, 8, 40, [([r], [r // 5]) for r in range(40)]),
        (32, 8, 4, [(list(range(8 * r, 8 * r + 8)), [2 * r, 2 * r + 1]) for r in range(4)]),
        (4, 1, 2, [([0, 1], [0]), ([2, 3], [0])]),
        (6, 6, 3, [([0, 1], [0, 1]), ([2, 3], [2, 3]), ([4, 5], [4, 5])]),
    ],
)
def test_which_heads_a_rank_holds(heads, kv_heads, sp, owned):
    q = torch.arange(heads)[None, :, None]
    kv = repeat_kv(torch.arange(kv_heads)[None, :, None], sp)
    shares = zip(q.chunk(sp, dim=1), kv.chunk(sp, dim=1), strict=True)
    assert [(q_share.flatten().tolist(), kv_share.flatten().tolist()) for q_share, kv_share in shares] == owned
    for queries, keys in owned:  # grouped attention pairs them by position, as the whole model does by number
        groups = len(queries) // len(keys)
        assert [keys[i // groups] for i in range(len(queries))] == [q * kv_heads // heads for q in queries]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [varlen, sdpa])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 4, 64), (4, 2, 128), (6, 1, 64)])
def test_backends_on_cuda(backend, heads, kv_heads, size):
    inputs, grad = qkv(heads, kv_heads, size, torch.bfloat16, device="cuda")
    exact = [x.detach().double().requires_grad_() for x in inputs]
    scale = size**-0.5
    out = backend(*inputs, packing_of(backend=backend, device=torch.device("cuda")), scale)
    expected = written_out(*exact, LENGTHS, scale)
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)
    gradients = torch.autograd.grad(out, inputs, grad)
    for actual, right in zip(gradients, torch.autograd.grad(expected, exact, grad.double()), strict=True):
        assert (actual.double() - right).norm() < 1e-2 * right.norm()
