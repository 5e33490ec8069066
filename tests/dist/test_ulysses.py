"""Sequence parallelism against one rank: attention, whole models on lengths that sp does not divide, sums over a
sequence, and the scale of a gradient.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from cases import full, make_rollouts, one_batch, policy_of
from torch import nn
from torch.distributed.fsdp import fully_shard

from fastgrpo.batch.packing import pack, slice_for_rank
from fastgrpo.mesh import build_mesh
from fastgrpo.policy.actor import segment_sum
from fastgrpo.policy.attention import attend, make_packing, sdpa
from fastgrpo.policy.head import score_head
from fastgrpo.policy.optim import apply_update, global_norm
from fastgrpo.policy.ulysses import heads_to_tokens, tokens_to_heads

LENGTHS = (3, 1, 5, 2, 1)  # 12 tokens: sequences cross every border between ranks


def attention_of_share(inputs, grad, lengths, share, group):
    """Output of this rank's tokens, and the gradients of its q, k, v."""
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    packing = make_packing(cu_seqlens, max(lengths), sdpa, group, torch.device("cpu"))
    own = [x[share].clone().requires_grad_() for x in inputs]
    layout = [x.transpose(0, 1).unsqueeze(0) for x in own]  # [1, heads, U, D]
    out, _ = attend(nn.Identity(), *layout, None, packing=packing, scaling=0.7)
    return out[0].detach(), torch.autograd.grad(out[0], own, grad[share])


def attention_case(heads, kv_heads):
    generator = torch.Generator().manual_seed(heads + kv_heads)
    shapes = (12, heads, 2), (12, kv_heads, 2), (12, kv_heads, 2), (12, heads, 2)
    *inputs, grad = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return inputs, grad


def sharded_attention(heads, kv_heads, sp):
    mesh = build_mesh("cpu", sp=sp, tp=1)
    share = slice(mesh.sp_rank * 12 // sp, (mesh.sp_rank + 1) * 12 // sp)
    return mesh.sp_rank, attention_of_share(*attention_case(heads, kv_heads), LENGTHS, share, mesh.sp_group)


@pytest.mark.parametrize(("heads", "kv_heads", "sp"), [(4, 2, 2), (4, 1, 2), (8, 2, 4), (4, 4, 4), (12, 4, 4)])
def test_attention_of_grouped_heads(ranks, heads, kv_heads, sp):
    """A key/value head that several ranks hold gets the sum of their gradients."""
    out, gradients = attention_of_share(*attention_case(heads, kv_heads), LENGTHS, slice(0, 12), None)
    for sp_rank, (own, own_gradients) in ranks(4).run(sharded_attention, heads, kv_heads, sp):
        share = slice(sp_rank * 12 // sp, (sp_rank + 1) * 12 // sp)
        torch.testing.assert_close(own, out[share], rtol=1e-12, atol=1e-12)
        for actual, expected in zip(own_gradients, gradients, strict=True):
            torch.testing.assert_close(actual, expected[share], rtol=1e-12, atol=1e-12)


def exchanged(sp):
    """tokens_to_heads of numbers that say which token and head they are, and back."""
    mesh = build_mesh("cpu", sp=sp, tp=1)
    tokens, heads = torch.arange(2) + 2 * mesh.sp_rank, torch.arange(sp * 3)
    x_UHD = (100 * tokens[:, None] + heads)[..., None].double()
    by_heads = tokens_to_heads(x_UHD, mesh.sp_group)
    return mesh.sp_rank, by_heads[..., 0].tolist(), torch.equal(heads_to_tokens(by_heads, mesh.sp_group), x_UHD)


@pytest.mark.parametrize("sp", [2, 4])
def test_which_tokens_and_heads_travel(ranks, sp):
    for sp_rank, by_heads, back in ranks(4).run(exchanged, sp):
        assert by_heads == [[100 * t + h for h in range(3 * sp_rank, 3 * sp_rank + 3)] for t in range(2 * sp)]
        assert back


# ---- lengths that sp does not divide


def sharded_logprobs(folder, sp, lengths):
    """Each rank's logprobs of its rows, and how many tokens it holds."""
    mesh = build_mesh("cpu", sp=sp, tp=1)
    rollouts = rollouts_of(lengths)
    micro = pack(rollouts, range(len(rollouts)), sp=sp, advantages_N=ones(rollouts), weights_N=ones(rollouts), pad_id=3)
    batch = slice_for_rank(micro, mesh.sp_rank, sp, scoring=True)
    scored = policy_of(folder, mesh, trainable=False).score(batch, at_temperature_one)
    return batch.input_ids_U.numel(), scored.logprobs_R


def at_temperature_one(hidden_RH, output, batch):
    return score_head(hidden_RH, output, batch, temperature=1.0)


def rollouts_of(lengths):
    """One prompt token and `length` drawn ones: as many packed tokens, all of them scored."""
    made = []
    for rollout, length in zip(make_rollouts(len(lengths)), lengths, strict=True):
        ids = torch.arange(5, 5 + length).numpy()
        fields = {"prompt_ids": (4,), "response_ids": ids, "response_mask": ids > 0, "sampler_logprobs": None}
        made.append(SimpleNamespace(**fields, num_tokens=1 + length, uid=rollout.uid))
    return made


def ones(rollouts):
    return torch.ones(len(rollouts))


@pytest.mark.parametrize(("lengths", "padded"), [((10,), 12), ((3,), 4), ((1,), 4), ((4, 7, 2), 16), ((8,), 8)])
def test_no_token_is_lost_and_no_padding_counts(ranks, make_tiny_model, mesh, lengths, padded):
    folder = make_tiny_model("llama", num_key_value_heads=1)
    expected = policy_of(folder, mesh, trainable=False).score(one_batch(rollouts_of(lengths)), at_temperature_one)
    results = ranks(4).run(sharded_logprobs, folder, 4, lengths)
    assert [tokens for tokens, _ in results] == [padded // 4] * 4
    logprobs = torch.cat([own for _, own in results])  # in order
    assert len(logprobs) == sum(lengths)
    torch.testing.assert_close(logprobs, expected.logprobs_R, rtol=1e-5, atol=1e-5)


# ---- sums over a sequence


def segment_sums(sp):
    """x = 1 .. 8 over sequences [0 0 0 1 1 1 1 2], cut over sp; loss = sum of (sum of the token's sequence)^2 * x."""
    mesh = build_mesh("cpu", sp=sp, tp=1)
    share = slice(mesh.sp_rank * 8 // sp, (mesh.sp_rank + 1) * 8 // sp)
    x_U = torch.arange(1.0, 9.0, dtype=torch.float64)[share].requires_grad_()
    seq_id_U = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2])[share]
    group = mesh.sp_group if sp > 1 else None
    sums_U = segment_sum(x_U, seq_id_U, num_segments=4, group=group)
    (sums_U.square() * x_U).sum().backward()
    return mesh.dp_rank, mesh.sp_rank, sums_U.tolist(), x_U.grad.tolist()


@pytest.mark.parametrize("sp", [1, 2, 4])
def test_segment_sum_crosses_ranks_and_so_does_its_gradient(ranks, sp):
    sums = [6.0] * 3 + [22.0] * 4 + [8.0]
    # With s the sum of the sequence: the loss of a sequence is s^2 * s, its derivative by any of its tokens 3 s^2.
    slopes = [3 * s * s for s in sums]
    for dp_rank, sp_rank, own, own_slopes in ranks(4).run(segment_sums, sp):
        assert dp_rank < 4 // sp
        share = slice(sp_rank * 8 // sp, (sp_rank + 1) * 8 // sp)
        assert own == sums[share] and own_slopes == pytest.approx(slopes[share])


# ---- the scale of a gradient: y = w x, x = [1 2 3 4], loss = mean(y), w = 1


class Times(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(8))  # so that every rank holds a share; only the first is used

    def forward(self, x):
        return self.w[0] * x


def scaled(size, sp):
    """The weight of a token, 1 / 4, is fixed beforehand and FSDP sums, so that neither dp nor sp enters."""
    mesh = build_mesh("cpu", sp=sp, tp=1)
    model = Times()
    fully_shard(model, mesh=mesh.fsdp_mesh)
    model.set_gradient_divide_factor(1.0)
    model.set_force_sum_reduction_for_comms(True)
    share = slice(mesh.rank * 4 // size, (mesh.rank + 1) * 4 // size)
    loss = (model(torch.tensor([1.0, 2.0, 3.0, 4.0])[share]) / 4).sum()
    loss.backward()
    norm = float(global_norm([model.w.grad]))
    return (
        mesh.reduce(torch.stack([loss.detach(), torch.tensor(4.0 / size)])).tolist(),
        full(model.w.grad)[0].item(),
        norm,
    )


@pytest.mark.parametrize(("size", "sp"), [(2, 1), (2, 2), (4, 2)])
def test_a_gradient_is_a_sum_whatever_the_number_of_ranks(ranks, size, sp):
    assert ranks(size).run(scaled, size, sp) == [([2.5, 4.0], 2.5, 2.5)] * size


def policy_units(folder, replicas):
    """The switches of every unit of a built policy, as FSDP holds them."""
    mesh = build_mesh("cpu", sp=1, tp=1, replicas=replicas)
    policy = policy_of(folder, mesh)
    hidden = policy.module.lm.config.hidden_size

    def first_column(hidden_RH, output, batch):
        return output.weight_VH[0].sum() / 4

    policy.run(one_batch(rollouts_of((2,))), first_column).backward()
    optimizer = torch.optim.SGD(policy.module.parameters(), lr=0.0)
    gradient = full(policy.module.lm.lm_head.weight.grad)
    return gradient[0].tolist() == [mesh.world / 4] * hidden, apply_update(optimizer, 0.0, 0.0)[0]


@pytest.mark.parametrize("replicas", [1, 2])
def test_gradients_of_a_policy_are_sums_over_ranks(ranks, make_tiny_model, replicas):
    """Each of 4 ranks adds a gradient of 1 / 4 to 128 weights: 1 each, so a norm of sqrt(128)."""
    for right, norm in ranks(4).run(policy_units, make_tiny_model("llama", num_key_value_heads=1), replicas):
        assert right and norm == pytest.approx(128**0.5)
