"""The vanilla policy loss: hand-computed tokens, an independent scalar reference, masking, no effect of the cut."""

import math
from dataclasses import replace

import pytest
import torch

from fastgrpo.algorithm.losses import (
    CLIP_HIGH,
    CLIP_LOW,
    DUAL_CLIP,
    POLICY_LOSSES,
    LossBatch,
    LossConfig,
    LossOut,
    token_stats,
)
from fastgrpo.algorithm.mismatch import Correction
from fastgrpo.batch.denominators import token_weights_N
from fastgrpo.config import LossAgg, PolicyLoss

CFG = LossConfig(clip_low=0.2, clip_high=0.28, clip_c=3.0)
vanilla = POLICY_LOSSES["vanilla"]
MODES = [mode.value for mode in LossAgg]
NAN, INF = math.nan, math.inf


def f64(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def batch(advantages: list[float], weights: list[float], **fields: list[float]) -> LossBatch:
    empty = dict.fromkeys(["ref_logprobs_U", "sampler_logprobs_U", "entropy_U"])
    tensors = empty | {f"{name}_U": f64(values) for name, values in fields.items()}
    return LossBatch(f64(advantages), f64(weights), seq_id_U=torch.zeros(len(weights), dtype=torch.int64), **tensors)


def no_segments(x_U: torch.Tensor, seq_id_U: torch.Tensor) -> torch.Tensor:
    raise AssertionError("vanilla asks for nothing of a whole sequence")


def run(
    logprobs: list[float], old: list[float] | None, b: LossBatch, cfg: LossConfig
) -> tuple[float, list[float], dict[str, float]]:
    logprobs_U = f64(logprobs).requires_grad_()
    out = vanilla(logprobs_U, None if old is None else f64(old), b, no_segments, cfg)
    (gradient_U,) = torch.autograd.grad(out.loss_sum, logprobs_U)
    return out.loss_sum.item(), gradient_U.tolist(), {name: x.item() for name, x in out.stats.items()}


def test_clipping_acts_and_is_counted_only_where_it_removes_the_gradient() -> None:
    ratios = [1.5, 0.5, 1.5, 0.5]
    loss, gradient, stats = run([math.log(r) for r in ratios], [0.0] * 4, batch([1, -1, -1, 1], [0.25] * 4), CFG)
    assert loss == pytest.approx((-1.28 + 0.8 + 1.5 - 0.5) / 4)
    assert loss == pytest.approx(0.13)
    assert gradient == pytest.approx([0, 0, 0.375, -0.125])
    assert (stats["tokens"], stats["clip_high"], stats["clip_low"], stats["dual_clip"]) == (4, 1, 1, 0)
    assert stats["ratio"] == pytest.approx(4) and stats["ratio_max"] == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "gradient", "name"),
    [
        (-1, 5.0, 3.0, 0.0, "dual_clip"),
        (-1, 2.9, 2.9, 2.9, None),
        (2, 5.0, -2.56, 0.0, "clip_high"),  # dual clip leaves positive advantages alone
        (2, 0.1, -0.2, -0.2, None),
        (-2, 0.1, 1.6, 0.0, "clip_low"),
        (0, 5.0, 0.0, 0.0, None),
        (0, 0.1, 0.0, 0.0, None),
    ],
)
def test_bounds_of_one_token(advantage: float, ratio: float, loss: float, gradient: float, name: str | None) -> None:
    value, (slope,), stats = run([math.log(ratio)], [0.0], batch([advantage], [1.0]), CFG)
    assert (value, slope) == (pytest.approx(loss), pytest.approx(gradient))
    assert [key for key in ("clip_low", "clip_high", "dual_clip") if stats[key]] == ([name] if name else [])


def test_a_ratio_on_the_bound_keeps_its_gradient() -> None:
    cfg = replace(CFG, clip_low=0.0, clip_high=0.0)
    loss, gradient, stats = run([-1.0, -2.0], [-1.0, -2.0], batch([2, -3], [1, 1]), cfg)
    assert (loss, gradient) == (1.0, [-2.0, 3.0])
    assert stats["clip_low"] == stats["clip_high"] == 0


def test_without_old_the_ratio_is_exactly_one() -> None:
    loss, gradient, stats = run([-0.1, -7.3, -2.2], None, batch([1, -2, 0.5], [0.5, 0.25, 0.125]), CFG)
    assert loss == pytest.approx(-0.5 + 0.5 - 0.0625)
    assert gradient == [-0.5, 0.5, -0.0625]
    assert stats["ratio"] == 3 and stats["ratio_max"] == 1 and stats["old_kl"] == 0


def reference_token(x: float, o: float, a: float, w: float, q: float, h: float, cfg: LossConfig) -> float:
    """One token by the nested formula, in floats: x new, o old, a advantage, w importance, q ref, h entropy."""
    r = math.exp(max(-20.0, min(20.0, x - o)))
    loss = max(-r * a, -max(1 - cfg.clip_low, min(1 + cfg.clip_high, r)) * a)
    if a < 0:
        loss = min(loss, -cfg.clip_c * a)
    d = max(-20.0, min(20.0, x - q))
    return w * loss + cfg.kl_coef * (math.exp(-d) + d - 1) - cfg.entropy_coef * h


def test_all_terms_against_a_scalar_reference() -> None:
    generator = torch.Generator().manual_seed(0)
    count = 400
    old, new, ref, sampler = (-3 * torch.rand(4, count, generator=generator, dtype=torch.float64)).tolist()
    advantages = torch.randn(count, generator=generator, dtype=torch.float64).tolist()
    weights, entropy = torch.rand(2, count, generator=generator, dtype=torch.float64).tolist()
    weights[::7] = [0.0] * len(weights[::7])
    cfg = replace(CFG, kl_coef=0.1, entropy_coef=0.01, correction=Correction("token", 1.5))
    b = batch(advantages, weights, ref_logprobs=ref, sampler_logprobs=sampler, entropy=entropy)
    loss, gradient, stats = run(new, old, b, cfg)

    def total(i: int, x: float) -> float:
        importance = min(math.exp(old[i] - sampler[i]), 1.5)
        return weights[i] * reference_token(x, old[i], advantages[i], importance, ref[i], entropy[i], cfg)

    assert loss == pytest.approx(sum(total(i, new[i]) for i in range(count)), rel=1e-12)
    step = 1e-6
    slopes = [(total(i, new[i] + step) - total(i, new[i] - step)) / (2 * step) for i in range(count)]
    assert gradient == pytest.approx(slopes, rel=1e-6, abs=1e-9)
    live = [i for i in range(count) if weights[i]]
    assert stats["tokens"] == len(live)
    assert stats["kl"] == pytest.approx(sum(math.exp(ref[i] - new[i]) - ref[i] + new[i] - 1 for i in live))
    assert stats["entropy"] == pytest.approx(sum(entropy[i] for i in live))
    assert stats["old_kl"] == pytest.approx(sum(old[i] - new[i] for i in live))
    assert stats["ratio_max"] == pytest.approx(max(math.exp(new[i] - old[i]) for i in live))


def test_entropy_bonus_has_a_gradient() -> None:
    entropy_U = f64([0.5, 1.5]).requires_grad_()
    b = replace(batch([0, 0], [0.5, 0.0]), entropy_U=entropy_U)
    out = vanilla(f64([-1, -1]).requires_grad_(), None, b, no_segments, replace(CFG, entropy_coef=0.1))
    assert out.loss_sum.item() == pytest.approx(-0.025)
    assert torch.autograd.grad(out.loss_sum, entropy_U)[0].tolist() == pytest.approx([-0.05, 0])


def test_importance_comes_from_the_rollout_time_and_is_a_constant() -> None:
    cfg = replace(CFG, correction=Correction("token", 2.0))
    sampler = [-2.0, -1.5, -9.0]
    with_old = run([-1.0, -1.0, -1.0], [-1.0, -2.0, -1.0], batch([1, 1, 1], [1, 1, 1], sampler_logprobs=sampler), cfg)
    expected = [-2.0, 0.0, -2.0]  # min(e, 2) * 1; the ratio e is clipped; min(e^8, 2) * 1
    assert with_old[1] == pytest.approx(expected)
    without_old = run([-1.0] * 3, None, batch([1, 1, 1], [1, 1, 1], sampler_logprobs=sampler), cfg)
    assert without_old[1] == pytest.approx([-2.0, -math.exp(0.5), -2.0])
    off = batch([1, 1, 1], [1, 1, 1], sampler_logprobs=sampler)
    assert run([-1.0] * 3, None, off, CFG)[1] == [-1, -1, -1]


@pytest.mark.parametrize(
    "junk", [(-200.0, -400.0), (-400.0, -200.0), (NAN, NAN), (-INF, -1.0), (-INF, -INF), (0.0, INF)]
)
@pytest.mark.parametrize("mode", MODES)
def test_a_masked_token_changes_no_bit(junk: tuple[float, float], mode: str) -> None:
    """Two live tokens and a masked one, against the same row with a clean masked slot."""
    weight = token_weights_N(torch.tensor([2]), torch.tensor([True]), mode, max_response_length=4).item()
    cfg = replace(CFG, clip_high=0.2, kl_coef=0.1, entropy_coef=0.01, correction=Correction("token", 2.0))

    def outcome(new: float, other: float, rest: float) -> tuple[float, list[float], dict[str, float]]:
        b = batch(
            [1, 1, rest],
            [weight, weight, 0],
            ref_logprobs=[-1, -1.2, other],
            sampler_logprobs=[-1, -1.1, other],
            entropy=[0.3, 0.4, rest],
        )
        return run([-1, -1, new], [-1, -1.2, other], b, cfg)

    clean, dirty = outcome(0.0, 0.0, 0.0), outcome(junk[0], junk[1], NAN)
    assert dirty == clean
    assert dirty[1][2] == 0 and all(math.isfinite(x) for x in [dirty[0], *dirty[1], *dirty[2].values()])


def test_masked_overflow_as_first_reported() -> None:
    loss, gradient, _ = run(
        [-1, -1, -200], [-1, -1.2, -400], batch([1, 1, 1], [0.5, 0.5, 0]), replace(CFG, clip_high=0.2)
    )
    assert (loss, gradient) == (pytest.approx(-1.1), [-0.5, 0, 0])


@pytest.mark.parametrize("count", [0, 3])
def test_without_any_weight_loss_and_gradient_are_zero_and_attached(count: int) -> None:
    b = batch([NAN] * count, [0.0] * count, ref_logprobs=[NAN] * count, sampler_logprobs=[-INF] * count)
    loss, gradient, stats = run(
        [NAN] * count, [INF] * count, b, replace(CFG, kl_coef=0.1, correction=Correction("token", 2.0))
    )
    assert (loss, gradient) == (0, [0.0] * count)
    assert all(x == 0 for x in stats.values())


@pytest.mark.parametrize(
    ("term", "cfg"), [("ref", replace(CFG, kl_coef=0.1)), ("entropy", replace(CFG, entropy_coef=1.0))]
)
def test_a_term_without_its_input_is_an_error(term: str, cfg: LossConfig) -> None:
    with pytest.raises(ValueError, match=term):
        run([-1.0], None, batch([1], [1]), cfg)


def test_token_stats_of_the_kernels_outputs() -> None:
    flags_N = torch.tensor([CLIP_LOW, CLIP_HIGH, DUAL_CLIP, 0, CLIP_HIGH, CLIP_HIGH], dtype=torch.int32)
    ratio_N = torch.tensor([0.5, 2.0, 4.0, 1.0, 3.0, 9.0])
    live_N = torch.tensor([True] * 5 + [False])
    stats = {k: v.item() for k, v in token_stats(live_N, ratio_N, flags_N, None, ratio_N / 2).items()}
    expected = {"tokens": 5, "clip_low": 1, "clip_high": 2, "dual_clip": 1, "ratio": 10.5, "ratio_max": 4.0}
    assert stats == pytest.approx(expected | {"entropy": 5.25, "old_kl": -math.log(0.5 * 2 * 4 * 3)})


def toy(lengths: list[int]) -> list[dict[str, torch.Tensor]]:
    """Sequences of a per-token model with 5 parameters: logprob of token t = log sigmoid(features_t . theta)."""
    generator = torch.Generator().manual_seed(7)
    rand = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return [
        {"features": rand(n, 5), "old": -rand(n).abs(), "ref": -rand(n).abs(), "a": rand(1).expand(n)} for n in lengths
    ]


def micro_batch_loss(theta: torch.Tensor, micro: list[tuple[dict, float]], pad: int) -> LossOut:
    def row(values: list[torch.Tensor], fill: float) -> torch.Tensor:
        return torch.cat([*values, torch.full((pad,), fill, dtype=torch.float64)])

    features = torch.cat([s["features"] for s, _ in micro] + [torch.zeros(pad, 5, dtype=torch.float64)])
    b = LossBatch(
        row([s["a"] for s, _ in micro], 1.0),
        row([torch.full_like(s["a"], w) for s, w in micro], 0.0),
        row([s["ref"] for s, _ in micro], -1.0),
        None,
        None,
        torch.zeros(len(features), dtype=torch.int64),
    )
    logprobs_U = torch.nn.functional.logsigmoid(features @ theta)
    return vanilla(logprobs_U, row([s["old"] for s, _ in micro], -1.0), b, no_segments, replace(CFG, kl_coef=0.05))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("cut", "pad"), [([[0], [1], [2], [3]], 0), ([[3, 1], [2, 0]], 3), ([[2], [], [1, 0, 3]], 10), ([[1, 3, 0, 2]], 1)]
)
def test_loss_and_gradient_do_not_depend_on_cut_order_or_padding(mode: str, cut: list[list[int]], pad: int) -> None:
    lengths = [2, 6, 1, 11]
    sequences = toy(lengths)
    weights = token_weights_N(torch.tensor(lengths), torch.ones(4, dtype=torch.bool), mode, max_response_length=16)
    pairs = list(zip(sequences, weights.tolist(), strict=True))

    def accumulate(cut: list[list[int]], pad: int) -> tuple[float, torch.Tensor, dict[str, float]]:
        theta = torch.linspace(-0.5, 0.5, 5, dtype=torch.float64).requires_grad_()
        loss, stats = 0.0, {}
        for rows in cut:
            out = micro_batch_loss(theta, [pairs[i] for i in rows], pad)
            out.loss_sum.backward()
            loss += out.loss_sum.item()
            for name, x in out.stats.items():
                before = stats.get(name, 0.0)
                stats[name] = max(before, x.item()) if name.endswith("_max") else before + x.item()
        assert theta.grad is not None
        return loss, theta.grad, stats

    whole, parts = accumulate([[0, 1, 2, 3]], 0), accumulate(cut, pad)
    assert parts[0] == pytest.approx(whole[0], rel=1e-12)
    torch.testing.assert_close(parts[1], whole[1], rtol=1e-12, atol=1e-14)
    assert parts[2] == pytest.approx(whole[2], rel=1e-12) and whole[2]["tokens"] == sum(lengths)


def test_token_mean_is_of_the_mini_batch() -> None:
    """Two tokens of loss 3 and six of loss 1: 12 / 8 in one micro-batch or two, not the mean of the means, 2."""
    weights = token_weights_N(torch.tensor([2, 6]), torch.tensor([True] * 2), "token-mean", max_response_length=16)
    weight = weights[0].item()
    whole = run([-1.0] * 8, None, batch([-3] * 2 + [-1] * 6, [weight] * 8), CFG)
    first, second = (run([-1.0] * n, None, batch([a] * n, [weight] * n), CFG) for n, a in ((2, -3), (6, -1)))
    assert whole[0] == first[0] + second[0] == 1.5
    assert whole[1] == first[1] + second[1]


def test_every_configurable_loss_exists() -> None:
    assert set(POLICY_LOSSES) == {name.value for name in PolicyLoss}
