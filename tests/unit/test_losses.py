"""Every policy loss, with every aggregation, KL and correction, against formulas written sequence by sequence in plain
floats; and its independence of micro-batch, order and padding.

The truth takes lists of sequences, token by token, and divides where the formula of the aggregation divides; its
gradients are central differences. Nothing of the code under test is used in it.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from fastgrpo.algorithm.losses import POLICY_LOSSES, LossBatch, LossConfig
from fastgrpo.algorithm.mismatch import Correction
from fastgrpo.batch.denominators import token_weights_N
from fastgrpo.config import KlType, LossAgg, PolicyLoss

LOSSES = list(POLICY_LOSSES)
MODES = [mode.value for mode in LossAgg]
KLS = [kind.value for kind in KlType]
CORRECTIONS = {
    "none": Correction(),
    "token": Correction("token", 1.5),
    "sequence": Correction("sequence", 1.5),
    "icepop": Correction("icepop", 1.6, 0.5),
    "bypass": Correction("token", 1.5, bypass=True),
}
LENGTHS = [2, 6, 1, 11]
SCALE = 16
CFG = LossConfig(clip_low=0.2, clip_high=0.28, kl_coef=0.07, entropy_coef=0.03)


@dataclass(frozen=True)
class Sequence_:
    """One response: a list a token, and its advantage."""

    new: list[float]
    old: list[float]
    ref: list[float]
    sampler: list[float]
    entropy: list[float]
    advantage: float


def sequences(seed: int = 0) -> list[Sequence_]:
    rng = random.Random(seed)
    made = []
    for length, advantage in zip(LENGTHS, (1.3, -0.7, 0.4, -1.1), strict=True):
        old = [-3 * rng.random() - 0.05 for _ in range(length)]
        new, ref, sampler = ([x + rng.uniform(-width, width) for x in old] for width in (0.6, 0.5, 0.4))
        made.append(Sequence_(new, old, ref, sampler, [rng.random() for _ in old], advantage))
    made[1].new[2] = made[1].old[2] + 1.4  # beyond the dual clip
    return made


# ---- the truth


def clip(x: float, low: float, high: float) -> float:
    return max(low, min(high, x))


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def surrogates(
    name: str, new: list[float], old: list[float], const: list[float], a: float, cfg: LossConfig
) -> list[float]:
    """Loss of each token; `const`: the logprobs where the formula stops the gradient."""
    ratios = [math.exp(clip(x - o, -20, 20)) for x, o in zip(new, old, strict=True)]
    fixed = [math.exp(clip(x - o, -20, 20)) for x, o in zip(const, old, strict=True)]
    low, high = 1 - cfg.clip_low, 1 + cfg.clip_high
    if name == "vanilla":
        losses = [max(-r * a, -clip(r, low, high) * a) for r in ratios]
        return [min(x, -cfg.clip_c * a) if a < 0 else x for x in losses]
    if name == "cispo":
        return [-clip(r, low, high) * a * x for r, x in zip(fixed, new, strict=True)]
    if name == "sapo":
        tau = cfg.tau_pos if a > 0 else cfg.tau_neg
        return [-a * 4 / tau / (1 + math.exp(-tau * (r - 1))) for r in ratios]
    if name == "dppo_tv":
        moves = [math.exp(x) - math.exp(o) for x, o in zip(const, old, strict=True)]
        inside = [m <= cfg.clip_high if a > 0 else m >= -cfg.clip_low for m in moves]
        return [-min(r, cfg.clip_c) * a * x * ok for r, x, ok in zip(fixed, new, inside, strict=True)]
    if name == "reinforce":
        return [-a * x for x in new]
    log_ratios = [x - o for x, o in zip(new, old, strict=True)]
    if name == "gspo":
        s = math.exp(mean(log_ratios))
        return [max(-s * a, -clip(s, low, high) * a)] * len(new)
    assert name == "geo_mean"
    bounded = [min(d, cfg.clip_high) if a > 0 else max(d, -cfg.clip_low) for d in log_ratios]
    return [-a * math.exp(mean(bounded))] * len(new)


def kl_value(kind: str, d: float) -> float:
    return {
        "k1": d,
        "kl": d,
        "abs": abs(d),
        "k2": d * d / 2,
        "mse": d * d / 2,
        "k3": math.exp(-d) + d - 1,
        "low_var_kl": math.exp(-d) + d - 1,
    }[kind.rstrip("+")]


def importance(name: str, s: Sequence_, const: list[float], c: Correction) -> list[float]:
    if c.bypass and name != "reinforce":
        return [1.0] * len(const)
    trainer = const if c.bypass else s.old
    d = [x - y for x, y in zip(trainer, s.sampler, strict=True)]
    if c.kind == "sequence":
        return [min(math.exp(sum(d)), c.upper)] * len(d)
    ratios = [math.exp(x) for x in d]
    if c.kind == "icepop":
        return [r if c.lower <= r <= c.upper else 0.0 for r in ratios]
    return [min(r, c.upper) if c.kind == "token" else 1.0 for r in ratios]


def truth(name: str, data: list[Sequence_], const: list[list[float]], mode: str, cfg: LossConfig) -> float:
    per_sequence = []
    for s, fixed in zip(data, const, strict=True):
        old = s.sampler if cfg.correction.bypass else s.old
        policy = surrogates(name, s.new, old, fixed, s.advantage, cfg)
        weight = importance(name, s, fixed, cfg.correction)
        kl, entropy = [], s.entropy
        for x, x0, q in zip(s.new, fixed, s.ref, strict=True):
            straight = kl_value("k2", x - q) - kl_value("k2", x0 - q) + kl_value(cfg.kl_type, x0 - q)
            kl.append(straight if cfg.kl_type.endswith("+") else kl_value(cfg.kl_type, x - q))
        terms = zip(policy, weight, kl, entropy, strict=True)
        per_sequence.append([w * p + cfg.kl_coef * k - cfg.entropy_coef * h for p, w, k, h in terms])
    sums, count = [sum(x) for x in per_sequence], len(per_sequence)
    return {
        "token-mean": sum(sums) / sum(len(x) for x in per_sequence),
        "token-sum": sum(sums),
        "seq-mean-token-sum": sum(sums) / count,
        "seq-mean-token-sum-norm": sum(sums) / count / SCALE,
        "seq-mean-token-mean": sum(mean(x) for x in per_sequence) / count,
    }[mode]


def true_gradient(name: str, data: list[Sequence_], mode: str, cfg: LossConfig, step: float = 1e-5) -> list[float]:
    const = [list(s.new) for s in data]
    slopes = []
    for s in data:
        for t in range(len(s.new)):
            middle, values = s.new[t], []
            for at in (middle + step, middle - step):
                s.new[t] = at
                values.append(truth(name, data, const, mode, cfg))
            s.new[t] = middle
            slopes.append((values[0] - values[1]) / (2 * step))
    return slopes


# ---- the code under test, on any cut of the sequences


def by_sequence(x_U: torch.Tensor, seq_id_U: torch.Tensor) -> torch.Tensor:
    return x_U.new_zeros(20, *x_U.shape[1:]).index_add(0, seq_id_U, x_U)[seq_id_U]


def accumulate(
    name: str, data: list[Sequence_], mode: str, cfg: LossConfig, cut: list[list[int]], pad: int, old: bool = True
) -> tuple[float, list[float], dict[str, float]]:
    """Loss, d loss / d logprobs in the order of `data`, and stats, over the micro-batches of `cut`."""
    lengths = torch.tensor([len(s.new) for s in data])
    weights = token_weights_N(lengths, torch.ones(len(data), dtype=torch.bool), mode, max_response_length=SCALE)
    loss, gradient, stats = 0.0, [[0.0]] * len(data), {}

    def row(values: list[list[float]]) -> torch.Tensor:
        return torch.tensor([x for v in values for x in v] + [math.nan] * pad, dtype=torch.float64)

    for rows in cut:
        chosen = [data[i] for i in rows]
        sizes = [len(s.new) for s in chosen]
        logprobs = row([s.new for s in chosen]).requires_grad_()
        weight = row([[weights[i].item()] * len(data[i].new) for i in rows]).nan_to_num(0.0)
        seq_id = torch.arange(len(rows) + 1).repeat_interleave(torch.tensor([*sizes, pad]))
        b = LossBatch(
            row([[s.advantage] * len(s.new) for s in chosen]),
            weight,
            row([s.ref for s in chosen]),
            row([s.sampler for s in chosen]),
            row([s.entropy for s in chosen]),
            seq_id,
        )
        old_logprobs = row([s.old for s in chosen]) if old else None
        out = POLICY_LOSSES[name](logprobs, old_logprobs, b, by_sequence, cfg)
        (slope,) = torch.autograd.grad(out.loss_sum, logprobs)
        loss += out.loss_sum.item()
        parts = slope.split([*sizes, pad])
        assert parts[-1].tolist() == [0.0] * pad
        for i, part in zip(rows, parts[:-1], strict=True):
            gradient[i] = part.tolist()
        for key, x in out.stats.items():
            before = stats.get(key, 0.0)
            stats[key] = max(before, x.item()) if key.endswith("_max") else before + x.item()
    return loss, [x for part in gradient for x in part], stats


def check(name: str, mode: str, cfg: LossConfig) -> None:
    data = sequences()
    loss, gradient, _ = accumulate(name, data, mode, cfg, [[0, 1, 2, 3]], 0)
    assert loss == pytest.approx(truth(name, data, [s.new for s in data], mode, cfg), rel=1e-12)
    assert gradient == pytest.approx(true_gradient(name, data, mode, cfg), rel=1e-6, abs=1e-9)
    assert max(abs(x) for x in gradient) > 1e-3


def pairs() -> list[tuple[str, str, str, str]]:
    """Each loss with each aggregation, each KL and each correction, not all of their product."""
    found = []
    for i, name in enumerate(LOSSES):
        for j in range(max(len(MODES), len(KLS), len(CORRECTIONS))):
            kinds = list(CORRECTIONS)
            found.append((name, MODES[(i + j) % len(MODES)], KLS[j % len(KLS)], kinds[(i + 2 * j) % len(kinds)]))
    return found


@pytest.mark.parametrize(("name", "mode", "kl", "correction"), pairs())
def test_value_and_gradient(name: str, mode: str, kl: str, correction: str) -> None:
    check(name, mode, replace(CFG, kl_type=kl, correction=CORRECTIONS[correction]))


@pytest.mark.slow
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("kl", KLS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradient_of_the_whole_product(name: str, mode: str, kl: str, correction: str) -> None:
    check(name, mode, replace(CFG, kl_type=kl, correction=CORRECTIONS[correction]))


@pytest.mark.parametrize("name", LOSSES)
def test_each_pair_above_covers_every_partner(name: str) -> None:
    mine = [rest for found, *rest in pairs() if found == name]
    assert [len({x[k] for x in mine}) for k in range(3)] == [len(MODES), len(KLS), len(CORRECTIONS)]


CUTS = [([[0], [1], [2], [3]], 0), ([[3, 1], [2, 0]], 3), ([[2], [], [1, 0, 3]], 10), ([[1, 3, 0, 2]], 1)]


@pytest.mark.parametrize("number", range(len(CUTS)))
@pytest.mark.parametrize(("name", "mode"), [(n, MODES[(i + k) % 5]) for i, n in enumerate(LOSSES) for k in (0, 2)])
def test_micro_batch_order_and_padding_change_nothing(name: str, mode: str, number: int) -> None:
    same_under_cuts(name, mode, CORRECTIONS["sequence" if number % 2 else "icepop"], *CUTS[number])


@pytest.mark.slow
@pytest.mark.parametrize(("cut", "pad"), CUTS)
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LOSSES)
def test_no_cut_of_any_loss_changes_anything(
    name: str, mode: str, correction: str, cut: list[list[int]], pad: int
) -> None:
    same_under_cuts(name, mode, CORRECTIONS[correction], cut, pad)


def same_under_cuts(name: str, mode: str, correction: Correction, cut: list[list[int]], pad: int) -> None:
    cfg, data = replace(CFG, correction=correction), sequences(1)
    whole, parts = (accumulate(name, data, mode, cfg, c, p) for c, p in (([[0, 1, 2, 3]], 0), (cut, pad)))
    assert parts[0] == pytest.approx(whole[0], rel=1e-12)
    assert parts[1] == pytest.approx(whole[1], rel=1e-12, abs=1e-15)
    assert parts[2] == pytest.approx(whole[2], rel=1e-12) and whole[2]["tokens"] == sum(LENGTHS)


@pytest.mark.parametrize("name", LOSSES)
def test_without_old_the_loss_is_that_of_equal_logprobs(name: str) -> None:
    data = [replace(s, new=list(s.old)) for s in sequences()]
    given, absent = (accumulate(name, data, "token-mean", CFG, [[0, 1, 2, 3]], 0, old=old) for old in (True, False))
    assert given == absent
    assert absent[2]["ratio"] == sum(LENGTHS) and absent[2]["ratio_max"] == 1


@pytest.mark.parametrize("name", LOSSES)
def test_at_ratio_1_the_policy_gradient_is_minus_the_advantage(name: str) -> None:
    """All of them are the same first step, whatever they do later."""
    data = [replace(s, new=list(s.old)) for s in sequences()]
    cfg = replace(CFG, kl_coef=0.0, entropy_coef=0.0)
    _, gradient, stats = accumulate(name, data, "token-sum", cfg, [[0, 1, 2, 3]], 0)
    assert gradient == pytest.approx([-s.advantage for s in data for _ in s.new], rel=1e-12)
    assert stats["clip_low"] == stats["clip_high"] == stats["dual_clip"] == 0


# (loss, log-ratios, advantage, counted as: low, high, dual)
FLAGS = [
    ("vanilla", [0.5, -0.5, 0.0], 1.0, (0, 1, 0)),
    ("vanilla", [1.5, -0.5, 0.5], -1.0, (1, 0, 1)),
    ("cispo", [0.5, -0.5, 0.0], 1.0, (1, 1, 0)),
    ("gspo", [0.5, 0.5, 0.2], 1.0, (0, 3, 0)),
    ("gspo", [0.5, -2.0, 0.0], 1.0, (0, 0, 0)),
    ("gspo", [0.5, -2.0, 0.0], -1.0, (3, 0, 0)),
    ("gspo", [2.0, 2.0, 2.0], -1.0, (0, 0, 0)),  # no dual clip
    ("geo_mean", [0.5, -0.5, 0.1], 1.0, (0, 1, 0)),
    ("geo_mean", [0.5, -0.5, 0.1], -1.0, (1, 0, 0)),
    ("dppo_tv", [0.6, -0.6, 0.01], 1.0, (0, 1, 0)),  # p_old e^-1: +0.30, -0.17
    ("dppo_tv", [0.6, -1.6, 0.01], -1.0, (1, 0, 0)),
    ("sapo", [0.6, -1.6, 3.0], -1.0, (0, 0, 0)),
    ("reinforce", [0.6, -1.6, 3.0], -1.0, (0, 0, 0)),
]


@pytest.mark.parametrize(("name", "log_ratios", "advantage", "counts"), FLAGS)
def test_what_counts_as_clipped(name: str, log_ratios: list[float], advantage: float, counts: tuple[int, ...]) -> None:
    old = [-1.0] * 3
    new = [o + d for o, d in zip(old, log_ratios, strict=True)]
    data = [Sequence_(new, old, old, old, [0.0] * 3, advantage)]
    cfg = replace(CFG, kl_coef=0.0, entropy_coef=0.0)
    _, gradient, stats = accumulate(name, data, "token-sum", cfg, [[0]], 2)
    assert (stats["clip_low"], stats["clip_high"], stats["dual_clip"]) == counts
    if name not in ("cispo", "sapo", "reinforce"):  # a counted token has no gradient, the others have one
        assert sum(x == 0 for x in gradient) == sum(counts)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("d", [-400.0, -30.0, 30.0, 400.0])
def test_far_ratios_are_finite_in_value_and_gradient(name: str, d: float) -> None:
    far = Sequence_([min(-500 + d, 0.0), -1.0], [-500.0, -1.0], [-500.0, -1.0], [-500.0, -1.0], [0.1, 0.1], -1.0)
    for dtype_cfg in (CFG, replace(CFG, correction=CORRECTIONS["sequence"])):
        loss, gradient, stats = accumulate(name, [far], "token-mean", dtype_cfg, [[0]], 1)
        assert all(math.isfinite(x) for x in [loss, *gradient, *stats.values()])


@pytest.mark.parametrize("name", LOSSES)
def test_a_token_without_weight_changes_no_bit(name: str) -> None:
    """NaN stands in every field of the padding of `accumulate`; against no padding at all."""
    cfg = replace(CFG, correction=CORRECTIONS["sequence"])
    clean, dirty = (accumulate(name, sequences(), "token-mean", cfg, [[0, 1, 2, 3]], pad) for pad in (0, 4))
    assert dirty == clean


def test_bypass_needs_the_samplers_logprobs() -> None:
    one, ids = torch.ones(1), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="sampler"):
        POLICY_LOSSES["vanilla"](
            -one,
            None,
            LossBatch(one, one, None, None, None, ids),
            by_sequence,
            LossConfig(correction=Correction(bypass=True)),
        )


def test_every_configurable_loss_exists() -> None:
    assert set(POLICY_LOSSES) == {name.value for name in PolicyLoss}
