"""Policy losses and what is known of whole sequences, over ranks: a sequence's tokens lie on several of them, and loss,
gradients and metrics are those of one.

The first half needs no model: rows are cut between ranks inside a sequence. The second trains a tiny one.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from cases import make_rollouts, one_update, parity_config, policy_of, share_of

from fastgrpo.algorithm.losses import POLICY_LOSSES, LossBatch, LossConfig
from fastgrpo.algorithm.mismatch import Correction, divergences
from fastgrpo.algorithm.mismatch_stats import gap_metrics, gap_stats
from fastgrpo.batch.denominators import token_weights_N
from fastgrpo.batch.mini_batches import build_scoring_batches
from fastgrpo.config import LossAgg
from fastgrpo.mesh import build_mesh
from fastgrpo.policy.actor import Actor, segment_sum
from fastgrpo.policy.sequences import sum_by_sequence

LOSSES = list(POLICY_LOSSES)
MODES = [mode.value for mode in LossAgg]
LENGTHS = [5, 1, 9, 4]
CUTS = {2: [0, 8, 19], 4: [0, 3, 3, 12, 19]}  # of the 19 rows; a sequence over two ranks, a rank without any


def one_loss(name: str, mode: str, kind: str, start: int, stop: int, group: object) -> dict:
    """Loss of rows start to stop of the same batch, their gradient, and their stats."""
    generator = torch.Generator().manual_seed(0)
    new, old, ref, sampler = -3 * torch.rand(4, sum(LENGTHS), generator=generator, dtype=torch.float64)
    lengths = torch.tensor(LENGTHS)
    weights_N = token_weights_N(lengths, torch.ones(4, dtype=torch.bool), mode, max_response_length=16)
    advantages_N = torch.tensor([1.0, -0.5, 0.7, -1.2], dtype=torch.float64)
    rows = slice(start, stop)
    seq_id_U = torch.arange(4).repeat_interleave(lengths)[rows]
    sum_U = partial(segment_sum, num_segments=4, group=group)
    cfg = LossConfig(kl_coef=0.1, kl_type="k3+", correction=Correction(kind, 1.5, 0.6))
    logprobs_U = new[rows].clone().requires_grad_()
    batch = LossBatch(advantages_N[seq_id_U], weights_N[seq_id_U], ref[rows], sampler[rows], None, seq_id_U)
    out = POLICY_LOSSES[name](logprobs_U, old[rows], batch, sum_U, cfg)
    out.loss_sum.backward()
    live_U = torch.ones_like(seq_id_U, dtype=torch.bool)
    stats = out.stats | gap_stats(old[rows], sampler[rows], live_U, seq_id_U, sum_U, cfg.correction)
    assert logprobs_U.grad is not None
    return {"loss": out.loss_sum.item(), "gradient": logprobs_U.grad, "stats": {k: v.item() for k, v in stats.items()}}


def losses_on_rank(cases: list, cut: list[int]) -> list[dict]:
    rank = dist.get_rank()
    return [one_loss(*case, cut[rank], cut[rank + 1], dist.group.WORLD) for case in cases]


def pairs() -> list[tuple[str, str, str]]:
    kinds = ["sequence", "token", "icepop", "none"]
    return [(n, MODES[(i + k) % 5], kinds[(i + k) % 4]) for i, n in enumerate(LOSSES) for k in range(5)]


def assert_ranks_make_one(results: list[list[dict]], cases: list) -> None:
    for number, case in enumerate(cases):
        parts, whole = [result[number] for result in results], one_loss(*case, 0, sum(LENGTHS), None)
        assert sum(p["loss"] for p in parts) == pytest.approx(whole["loss"], rel=1e-12), case
        torch.testing.assert_close(torch.cat([p["gradient"] for p in parts]), whole["gradient"], rtol=1e-11, atol=1e-15)
        reduced = {
            key: max(p["stats"][key] for p in parts) if key.endswith("_max") else sum(p["stats"][key] for p in parts)
            for key in whole["stats"]
        }
        assert reduced == pytest.approx(whole["stats"], rel=1e-12), case
        assert gap_metrics(reduced) == pytest.approx(gap_metrics(whole["stats"]), rel=1e-9, abs=1e-12)


def test_a_sequence_over_two_ranks_has_the_loss_of_one(ranks):
    assert_ranks_make_one(ranks(2).run(losses_on_rank, pairs(), CUTS[2]), pairs())


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_every_loss_and_aggregation_over_ranks(ranks, size):
    cases = [(n, m, k) for n in LOSSES for m in MODES for k in ("sequence", "token", "icepop", "none")]
    assert_ranks_make_one(ranks(size).run(losses_on_rank, cases, CUTS[size]), cases)


# ---- with a model: the head, FSDP and Ulysses around the same losses


def config_of(loss: str, mode: str, correction: str = "token"):
    config = parity_config()
    config.actor.policy_loss, config.actor.loss_agg_mode = loss, mode  # type: ignore[assignment]
    config.algorithm.rollout_correction.rollout_is = correction  # type: ignore[assignment]
    config.actor.kl_loss_type = "k3+"  # type: ignore[assignment]
    return config


def assert_same(actual, expected):
    assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    for name in ("tokens", "kl", "ratio", "importance", "seqs", "seq_is", "chi2_seq", "is_inverse_max"):
        assert actual[name] == pytest.approx(expected[name], rel=1e-5), name
    for name, gradient in expected["gradients"].items():
        if gradient.norm() > 1e-6 * expected["grad_norm"]:
            assert (actual["gradients"][name] - gradient).norm() < 1e-4 * gradient.norm(), name


MODEL_PAIRS = [
    ("gspo", "seq-mean-token-mean", "sequence", {"sp": 2, "max_tokens_per_gpu": 24}),
    ("geo_mean", "token-mean", "icepop", {"sp": 2}),
    ("cispo", "seq-mean-token-sum-norm", "token", {}),
    ("sapo", "token-sum", "sequence", {"max_tokens_per_gpu": 40}),
    ("reinforce", "seq-mean-token-sum", "none", {"sp": 2}),
]


@pytest.mark.parametrize(("loss", "mode", "correction", "options"), MODEL_PAIRS)
def test_two_ranks_make_the_update_of_one(make_tiny_model, mesh, ranks, loss, mode, correction, options):
    """Token counts of both ranks are in every denominator: each holds about half of the tokens."""
    folder, config = make_tiny_model("qwen2"), config_of(loss, mode, correction)
    expected = one_update(folder, mesh=mesh, config=config)
    for result in ranks(2).run(one_update, folder, config=config, **options):
        assert_same(result, expected)


@pytest.mark.slow
@pytest.mark.parametrize("sp", [1, 2, 4])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss", LOSSES)
def test_four_ranks_make_the_update_of_one(make_tiny_model, mesh, ranks, loss, mode, sp):
    folder, config = make_tiny_model("qwen2"), config_of(loss, mode, "sequence")
    expected = one_update(folder, mesh=mesh, config=config)
    for result in ranks(4).run(one_update, folder, config=config, sp=sp, max_tokens_per_gpu=40):
        assert_same(result, expected)


def sums_of_sequences(folder, sp: int, max_tokens: int, mesh=None):
    """Log-ratio trainer / sampler and number of tokens of each of 7 sequences."""
    mesh = mesh or build_mesh("cpu", sp=sp, tp=1)
    rollouts = make_rollouts(7)
    batches = build_scoring_batches(rollouts, share_of(mesh, max_tokens))
    actor = Actor(policy_of(folder, mesh), None, parity_config(), 1)
    logprobs = actor.score(actor.policy, batches)
    ones = [torch.ones_like(x) for x in logprobs]
    pairs = zip(logprobs, batches, strict=True)
    gaps = [divergences(x - b.sampler_logprobs_R)["k3"] for x, b in pairs if b.sampler_logprobs_R is not None]
    return mesh.reduce(sum_by_sequence([ones, gaps], batches, 7))


@pytest.mark.parametrize(("sp", "max_tokens"), [(1, 1000), (2, 24)])
def test_sums_over_sequences_do_not_depend_on_ranks(make_tiny_model, mesh, ranks, sp, max_tokens):
    folder = make_tiny_model("qwen2")
    expected = sums_of_sequences(folder, 1, 1000, mesh)
    assert expected[0].tolist() == [r.response_mask.sum() for r in make_rollouts(7)]
    for result in ranks(2).run(sums_of_sequences, folder, sp, max_tokens):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)
