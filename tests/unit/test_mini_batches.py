"""From rollouts to updates on one rank: which rows train, what they weigh, what an update does and when it does not."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import (
    GradientReader,
    full_weights,
    make_rollouts,
    mini_batches_of,
    parity_config,
    policy_of,
    share_of,
    training_state,
)

from fastgrpo.algorithm.losses import LossConfig
from fastgrpo.algorithm.mismatch import Correction
from fastgrpo.algorithm.mismatch_stats import gap_metrics
from fastgrpo.batch.mini_batches import MiniBatch, Share, build_mini_batches, build_scoring_batches
from fastgrpo.batch.packing import ShardedBatch
from fastgrpo.config import RunConfig
from fastgrpo.metrics import Sums
from fastgrpo.policy.actor import Actor, loss_config
from fastgrpo.policy.head import FUSED_LOSSES, GrpoHead, OutputLayer, score_head

ALONE = Share(1, 0, 1, 0, 60, None, float, 0)
OPTIONS = {"keep_zero_advantage": True, "loss_agg_mode": "token-mean", "max_response_length": 20}


def build(rollouts, advantages, counted=None, *, share=ALONE, sequences=None, **options):
    return build_mini_batches(
        rollouts,
        np.array(advantages, dtype=np.float64),
        np.ones(len(rollouts), np.bool_) if counted is None else np.array(counted),
        share,
        sequences=sequences or len(rollouts),
        loss_scale_factor=None,
        **(OPTIONS | options),
    )


def drawn_tokens(rollouts):
    return [int(rollout.response_mask.sum()) for rollout in rollouts]


# ---- what is in a mini-batch


def test_weights_come_from_the_counts_of_the_mini_batch():
    rollouts = make_rollouts(6)
    counts = drawn_tokens(rollouts)
    first, second = build(rollouts, range(1, 7), [True, True, False, True, True, True], sequences=3)
    assert (first.loss_tokens, second.loss_tokens) == (counts[0] + counts[1], sum(counts[3:]))
    for mini_batch, rows in ((first, [0, 1]), (second, [3, 4, 5])):
        weights_R = torch.cat([batch.weights_R for batch in mini_batch.micro])
        assert torch.equal(weights_R, torch.full_like(weights_R, 1 / mini_batch.loss_tokens))
        advantages_R = torch.cat([batch.advantages_R for batch in mini_batch.micro])
        assert sorted(advantages_R.tolist()) == [row + 1 for row in rows for _ in range(counts[row])]
        assert all(batch.input_ids_U.numel() <= ALONE.max_tokens for batch in mini_batch.micro)


def test_dropping_rows_of_advantage_zero_keeps_them_in_the_counts():
    rollouts = make_rollouts(4)
    counts = drawn_tokens(rollouts)
    (mini_batch,) = build(rollouts, [1, 0, 0, -1], keep_zero_advantage=False, loss_agg_mode="seq-mean-token-mean")
    assert mini_batch.loss_tokens == sum(counts)
    weights_R = torch.cat([batch.weights_R for batch in mini_batch.micro])
    expected = {0: 1 / (4 * counts[0]), 3: 1 / (4 * counts[3])}
    assert sorted(weights_R.tolist()) == pytest.approx(
        sorted(expected[row] for row in (0, 3) for _ in range(counts[row]))
    )


def test_a_sequence_without_a_token_counts_and_does_not_run():
    empty = {"response_ids": np.empty(0, np.int32), "response_mask": np.empty(0, np.bool_)}
    rollouts = [replace(rollout, sampler_logprobs=None) for rollout in make_rollouts(3)]
    rollouts[1] = replace(rollouts[1], **empty)
    (mini_batch,) = build(rollouts, [1, 2, 3], loss_agg_mode="seq-mean-token-sum")
    assert sum(batch.num_sequences for batch in mini_batch.micro) == 2
    assert {float(w) for batch in mini_batch.micro for w in batch.weights_R} == {np.float32(1 / 3)}
    assert sum(batch.num_sequences for batch in build_scoring_batches(rollouts, ALONE)) == 2


def test_there_is_always_a_micro_batch():
    for advantages, counted in (([0, 0], [True, True]), ([1, 1], [False, False])):
        (mini_batch,) = build(make_rollouts(2), advantages, counted, keep_zero_advantage=False)
        (batch,) = mini_batch.micro
        assert len(batch.rows_R) == 0 and batch.input_ids_U.tolist() == [0] and batch.cu_seqlens.tolist() == [0, 1]


def test_ranks_share_the_rows_and_run_in_step():
    rollouts = make_rollouts(9)
    shares = [Share(4, rank // 2, 2, rank % 2, 48, None, float, 0) for rank in range(8)]
    mini_batches = [build(rollouts, range(1, 10), share=share)[0] for share in shares]
    assert len({len(mini_batch.micro) for mini_batch in mini_batches}) == 1
    assert {mini_batch.loss_tokens for mini_batch in mini_batches} == {sum(drawn_tokens(rollouts))}
    advantages = torch.cat([batch.advantages_R for mini_batch in mini_batches for batch in mini_batch.micro])
    assert sorted(advantages.tolist()) == [
        i + 1 for i, count in enumerate(drawn_tokens(rollouts)) for _ in range(count)
    ]


def test_scoring_batches_hold_every_drawn_token_once():
    rollouts = make_rollouts(7)
    batches = build_scoring_batches(rollouts, ALONE)
    sampler = torch.cat([batch.sampler_logprobs_R for batch in batches])
    expected = np.concatenate([rollout.sampler_logprobs[rollout.response_mask] for rollout in rollouts])
    assert sorted(sampler.tolist()) == sorted(expected.tolist())


# ---- updates


@pytest.fixture(scope="module")
def folder(make_tiny_model):
    return make_tiny_model("qwen2", tied=True)


def actor_of(folder, mesh, config, *, with_reference=False):
    reference = policy_of(folder, mesh, trainable=False) if with_reference else None
    return Actor(policy_of(folder, mesh), reference, config, 10)


def plain_config(**actor):
    config = RunConfig()
    config.rollout.temperature = 0.7
    config.actor.use_kl_loss = False
    config.actor.optim.lr = 1e-3
    for name, value in actor.items():
        setattr(config.actor, name, value)
    return config


def update(actor, mini_batches, mesh, old_R=None, ref_R=None):
    sums = Sums()
    result = actor.update(mini_batches, old_R, ref_R, sums)
    return result, sums.reduce(mesh)


def gradients_of(actor, mini_batches, mesh, old_R=None, ref_R=None):
    adamw, actor.optimizer = actor.optimizer, GradientReader(actor.policy)
    result, sums = update(actor, mini_batches, mesh, old_R, ref_R)
    reader, actor.optimizer = actor.optimizer, adamw
    return sums, result.grad_norms[0], reader.gradients


def assert_same_gradients(actual, expected, relative):
    total = math.sqrt(sum(float(gradient.norm()) ** 2 for gradient in expected.values()))
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():  # 1e-6 of all: a key's bias has no gradient but rounding
        assert (actual[name] - gradient).norm() < relative * gradient.norm() + 1e-6 * total, name


def test_dropped_rows_change_neither_loss_nor_gradient(folder, mesh):
    rollouts = make_rollouts(5)
    actor = actor_of(folder, mesh, plain_config())
    advantages = [1.0, 0.0, -2.0, 0.0, 0.5]
    kept, kept_norm, kept_gradients = gradients_of(actor, build(rollouts, advantages), mesh)
    short, norm, gradients = gradients_of(actor, build(rollouts, advantages, keep_zero_advantage=False), mesh)
    assert short["loss"] == pytest.approx(kept["loss"], rel=1e-6) and norm == pytest.approx(kept_norm, rel=1e-6)
    assert short["tokens"] < kept["tokens"]
    assert_same_gradients(gradients, kept_gradients, 1e-5)


def test_the_token_budget_changes_neither_loss_nor_gradient(folder, mesh):
    rollouts, config = make_rollouts(8), parity_config()
    advantages_N = np.random.default_rng(1).standard_normal(8)
    actor = actor_of(folder, mesh, config, with_reference=True)
    whole = mini_batches_of(rollouts, advantages_N, share_of(mesh, 1000), config)
    expected, expected_norm, expected_gradients = gradients_of(actor, whole, mesh, ref_R=actor.ref_logprobs(whole))
    for budget, least in ((100, 2), (40, 4)):
        cut = mini_batches_of(rollouts, advantages_N, share_of(mesh, budget), config)
        assert len(cut[0].micro) >= least
        sums, norm, gradients = gradients_of(actor, cut, mesh, ref_R=actor.ref_logprobs(cut))
        assert norm == pytest.approx(expected_norm, rel=1e-5)
        assert sums == pytest.approx(expected, rel=1e-5)
        assert_same_gradients(gradients, expected_gradients, 1e-4)


@pytest.mark.parametrize("head", ["auto", "reference"])
def test_the_first_update_has_ratio_exactly_one(folder, mesh, head):
    config = plain_config(head=head)
    actor = actor_of(folder, mesh, config)
    mini_batches = build(make_rollouts(8), [1, -1, 2, -2, 3, -3, 4, -4])
    old_R = actor.old_logprobs(mini_batches)
    again_R = actor.old_logprobs(mini_batches)
    assert all(map(torch.equal, old_R[0], again_R[0]))
    _, first = update(actor, mini_batches, mesh, old_R)
    assert first["ratio_max"] == 1.0 and first["ratio"] == first["tokens"] and first["old_kl"] == 0.0
    assert first["clip_low"] == first["clip_high"] == first["dual_clip"] == 0
    _, second = update(actor, mini_batches, mesh, old_R)  # the weights have moved, old has not
    assert second["ratio_max"] > 1.001
    assert second["gap_abs"] == first["gap_abs"] > 0  # the gap is that of the weights at rollout time


def test_without_old_the_update_is_that_of_old_equal_to_now(folder, mesh):
    rollouts, advantages = make_rollouts(6), [1, -1, 2, -2, 3, -3]
    actor = actor_of(folder, mesh, plain_config())
    mini_batches = build(rollouts, advantages)
    _, norm, gradients = gradients_of(actor, mini_batches, mesh)
    old_R = actor.old_logprobs(mini_batches)
    _, other_norm, others = gradients_of(actor, mini_batches, mesh, old_R)
    assert norm == pytest.approx(other_norm, rel=1e-6)
    assert_same_gradients(others, gradients, 1e-6)


@pytest.mark.parametrize("kl_type", ["low_var_kl", "mse"])
@pytest.mark.parametrize("old_given", [True, False])
def test_the_fused_head_is_the_plain_loss(folder, mesh, old_given, kl_type):
    """With KL, entropy, importance weights of a sampler that is off, and an old policy that is off too."""
    rollouts = make_rollouts(8, sampler_noise=1.0)
    config = parity_config()
    config.actor.kl_loss_type = kl_type
    actors = []
    for head in ("auto", "reference"):
        config.actor.head = head
        actors.append(actor_of(folder, mesh, config, with_reference=True))
        with torch.no_grad():
            for parameter in actors[-1].policy.module.parameters():
                parameter.mul_(1.03)
    fused, plain = actors
    mini_batches = build(rollouts, np.random.default_rng(2).standard_normal(8))
    ref_R = fused.ref_logprobs(mini_batches)
    generator = torch.Generator().manual_seed(0)
    old_R = [
        [x_R + 0.2 * torch.randn(x_R.shape, generator=generator) for x_R in micro]
        for micro in fused.old_logprobs(mini_batches)
    ]
    arguments = (mini_batches, mesh, old_R if old_given else None, ref_R)
    sums, norm, gradients = gradients_of(fused, *arguments)
    expected, expected_norm, expected_gradients = gradients_of(plain, *arguments)
    assert sums == pytest.approx(expected, rel=1e-6, abs=1e-9) and sums["kl"] > 0
    assert norm == pytest.approx(expected_norm, rel=1e-6)
    assert_same_gradients(gradients, expected_gradients, 1e-6)
    assert (sums["clip_high"] + sums["clip_low"] > 0) == old_given


def test_mini_batches_and_epochs(folder, mesh):
    config = plain_config(ppo_epochs=3)
    config.actor.optim.lr_warmup_steps = 4
    actor = actor_of(folder, mesh, config)
    mini_batches = build(make_rollouts(6), [1, -1, 2, -2, 3, -3], sequences=3)
    before = full_weights(actor.policy)
    result, sums = update(actor, mini_batches, mesh, actor.old_logprobs(mini_batches))
    assert len(result.grad_norms) == actor.version == 6 and result.skipped == 0
    assert result.lr == 1e-3  # of update 6; counted in updates, not in micro-batches
    assert {float(state["step"]) for state in actor.optimizer.state.values()} == {6.0}
    assert sums["tokens"] == 3 * sum(mini_batch.loss_tokens for mini_batch in mini_batches)
    assert any(not torch.equal(weight, before[name]) for name, weight in full_weights(actor.policy).items())


def test_the_rate_of_each_update(folder, mesh):
    config = plain_config()
    config.actor.optim.lr_warmup_steps = 4
    actor = actor_of(folder, mesh, config)
    mini_batches = build(make_rollouts(4), [1, -1, 2, -2], share=replace(ALONE, max_tokens=40))
    assert len(mini_batches[0].micro) > 1
    rates = [update(actor, mini_batches, mesh)[0].lr for _ in range(5)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3])


def test_nothing_to_learn_from_skips_the_update(folder, mesh):
    actor = actor_of(folder, mesh, plain_config())
    rollouts = make_rollouts(4)
    update(actor, build(rollouts, [1, -1, 2, -2]), mesh)
    before = [tensor.clone() for tensor in training_state(actor.optimizer)]
    unscored = build(rollouts, [1, -1, 2, -2], [False] * 4)
    undrawn = build([replace(r, response_mask=np.zeros_like(r.response_mask)) for r in rollouts], [1, -1, 2, -2])
    for mini_batches in (unscored, undrawn):
        assert mini_batches[0].loss_tokens == 0
        result, sums = update(actor, mini_batches, mesh, actor.old_logprobs(mini_batches))
        assert (result.grad_norms, result.skipped, sums) == ((), 1, {})
    assert actor.version == 1
    assert all(map(torch.equal, before, training_state(actor.optimizer)))


def test_without_signal_the_update_is_made_and_moves_by_momentum(folder, mesh):
    """Equal rewards are an update of gradient zero: Adam's moments decay and move on, as with any zero gradient."""
    actor = actor_of(folder, mesh, plain_config())
    rollouts = make_rollouts(4)
    update(actor, build(rollouts, [1, -1, 2, -2]), mesh)
    before = full_weights(actor.policy)
    result, sums = update(actor, build(rollouts, [0, 0, 0, 0], keep_zero_advantage=False), mesh)
    assert result.grad_norms == (0.0,) and result.skipped == 0 and actor.version == 2
    assert sums["tokens"] == 0 and sums["loss"] == 0
    assert not torch.equal(full_weights(actor.policy)["lm.model.norm.weight"], before["lm.model.norm.weight"])


def test_non_finite_updates_are_skipped_counted_and_end_the_run(folder, mesh):
    actor = actor_of(folder, mesh, plain_config(max_skipped_updates=3))
    good, bad = (build(make_rollouts(4), [first, -1, 2, -2]) for first in (1, math.inf))
    update(actor, good, mesh)
    before = [tensor.clone() for tensor in training_state(actor.optimizer)]
    for _ in range(2):
        assert update(actor, bad, mesh)[0].skipped == 1
    assert all(map(torch.equal, before, training_state(actor.optimizer)))
    assert update(actor, good, mesh)[0].skipped == 0  # and the count starts anew
    before = [tensor.clone() for tensor in training_state(actor.optimizer)]
    update(actor, bad, mesh)
    update(actor, bad, mesh)
    with pytest.raises(
        RuntimeError,
        match=r"3 updates in a row .* not finite \(.*: (nan|inf)\); weights and Adam state",
    ):
        update(actor, bad, mesh)
    assert all(map(torch.equal, before, training_state(actor.optimizer)))


def test_gap_is_trainer_minus_sampler_over_every_drawn_token(folder, mesh):
    actor = actor_of(folder, mesh, plain_config())
    rollouts = make_rollouts(5)
    batches = build_scoring_batches(rollouts, ALONE)
    trainer = torch.cat(actor.old_logprobs([MiniBatch(batches, 1)])[0])
    sampler = torch.cat([batch.sampler_logprobs_R for batch in batches])
    sums = actor.gap(batches).reduce(mesh)
    gaps = (trainer - sampler).double()
    assert sums["gap_tokens"] == sum(drawn_tokens(rollouts))
    assert sums["gap"] == pytest.approx(float(gaps.sum())) and sums["gap_abs"] == pytest.approx(float(gaps.abs().sum()))
    assert sums["gap_abs_max"] == pytest.approx(float(gaps.abs().max()))


# ---- the temperature of every logprob: logits [2, 1, 0], token 1, T = 0.5

LOGPROB_AT_HALF = -2.142932
PROBABILITIES = torch.tensor([4.0, 2.0, 0.0]).softmax(0)


def one_row(sampler=None):
    one = torch.ones(1)
    return ShardedBatch(
        input_ids_U=torch.zeros(1, dtype=torch.int64),
        positions_U=torch.zeros(1, dtype=torch.int64),
        rows_R=torch.zeros(1, dtype=torch.int64),
        targets_R=torch.ones(1, dtype=torch.int64),
        seq_id_R=torch.zeros(1, dtype=torch.int64),
        weights_R=one,
        advantages_R=one,
        sampler_logprobs_R=sampler,
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
        max_seqlen=1,
        rows=(0,),
    )


@pytest.mark.parametrize("fused", [True, False])
def test_temperature_is_in_all_three_logprobs_and_in_the_gradient(fused):
    hidden_RH, output = torch.tensor([[2.0, 1.0, 0.0]]), OutputLayer(torch.eye(3), None, 1.0, 0.0)
    scored_R = score_head(hidden_RH, output, one_row(), temperature=0.5).logprobs_R
    assert scored_R.item() == pytest.approx(LOGPROB_AT_HALF, abs=1e-6)
    config = parity_config()
    config.actor.entropy_coeff = 0.0
    head = GrpoHead(
        loss_config(config),
        temperature=0.5,
        old_logprobs_R=scored_R,
        ref_logprobs_R=scored_R,
        fused=fused,
        policy_loss="vanilla",
        segment_sum=lambda x_U, seq_id_U: x_U,
    )
    hidden_RH.requires_grad_()
    out = head(hidden_RH, output, one_row(sampler=scored_R))
    assert out.stats["ratio"].item() == 1.0 and out.stats["kl"].item() == 0.0 and out.stats["gap_abs"].item() == 0.0
    assert out.loss_sum.item() == pytest.approx(-1.0)
    out.loss_sum.backward()
    # d(-logprob)/d(logits) = (p - onehot) / T
    expected = (PROBABILITIES - torch.tensor([0.0, 1.0, 0.0])) / 0.5
    torch.testing.assert_close(hidden_RH.grad[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kl_type", ["k3", "k1+", "abs+"])
@pytest.mark.parametrize("kind", ["token", "sequence", "icepop", "bypass"])
@pytest.mark.parametrize("policy_loss", sorted(FUSED_LOSSES))
def test_the_kernel_and_the_plain_loss_are_the_same(policy_loss, kind, kl_type):
    """On one row of probability 0.14 whose old, reference and sampler logprobs all differ."""
    correction = Correction("token", 1.1, bypass=True) if kind == "bypass" else Correction(kind, 1.1, 0.5)
    cfg = LossConfig(kl_coef=0.1, kl_type=kl_type, entropy_coef=0.02, correction=correction)
    output, found = OutputLayer(torch.eye(3), None, 1.0, 0.0), []
    for fused in (True, False):
        hidden_RH = torch.tensor([[2.0, 1.0, 0.0]], requires_grad=True)
        old_R, ref_R, sampler_R = torch.tensor([[-2.0], [-1.7], [-2.2]])
        head = GrpoHead(
            cfg,
            0.5,
            old_R,
            ref_R,
            fused=fused,
            policy_loss=policy_loss,
            segment_sum=lambda x_U, seq_id_U: x_U,
        )
        out = head(hidden_RH, output, one_row(sampler=sampler_R))
        out.loss_sum.backward()
        found.append((out.loss_sum, hidden_RH.grad, {name: x.item() for name, x in out.stats.items()}))
    torch.testing.assert_close(found[0][:2], found[1][:2], rtol=1e-5, atol=1e-6)
    assert found[0][2] == pytest.approx(found[1][2], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("policy_loss", ["vanilla", "cispo", "sapo", "gspo", "reinforce"])
def test_with_bypass_the_metric_shows_the_weight_that_acted(policy_loss):
    """None on a loss with the ratio in it, though the kind is `token`; on the one without: policy over sampler, at most
    1.1. The sampler's logprob is lower by 0.05, then by 0.5."""
    output, correction = OutputLayer(torch.eye(3), None, 1.0, 0.0), Correction("token", 1.1, bypass=True)
    for gap, weight in ((0.05, math.exp(0.05)), (0.5, 1.1)):
        losses = []
        for cfg in (LossConfig(correction=correction), LossConfig(correction=Correction(bypass=True))):
            head = GrpoHead(cfg, 0.5, None, None, True, policy_loss, segment_sum=lambda x_U, seq_id_U: x_U)
            sampler_R = torch.tensor([LOGPROB_AT_HALF - gap])
            out = head(torch.tensor([[2.0, 1.0, 0.0]], requires_grad=True), output, one_row(sampler=sampler_R))
            losses.append((out.loss_sum.item(), gap_metrics({name: x.item() for name, x in out.stats.items()})))
        (loss, metrics), (unweighted, _) = losses
        acted = metrics["rollout_corr/rollout_is_applied_mean"]
        assert acted == pytest.approx(weight if policy_loss == "reinforce" else 1.0, rel=1e-5)
        assert loss == pytest.approx(unweighted * acted, rel=1e-5)
        assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(math.exp(gap), rel=1e-5)


def test_a_forgotten_temperature_shows_in_the_ratio():
    """What the numbers would be with old at T = 1: exp(-2.142932 + 1.407606) and its inverse."""
    hidden_RH, output = torch.tensor([[2.0, 1.0, 0.0]]), OutputLayer(torch.eye(3), None, 1.0, 0.0)
    at_one, at_half = (score_head(hidden_RH, output, one_row(), temperature=t).logprobs_R.item() for t in (1.0, 0.5))
    assert math.exp(at_one - at_half) == pytest.approx(2.0862, abs=1e-4)
