"""Loss weights of the five aggregation modes against formulas computed token by token."""

import math

import pytest
import torch

from fastgrpo.batch.denominators import token_weights_N
from fastgrpo.config import LossAgg

MODES = [mode.value for mode in LossAgg]


def weights(tokens: list[int], mode: str, in_batch: list[bool] | None = None, **kwargs: float) -> torch.Tensor:
    mask_N = torch.tensor([True] * len(tokens) if in_batch is None else in_batch, dtype=torch.bool)
    return token_weights_N(torch.tensor(tokens, dtype=torch.int64), mask_N, mode, max_response_length=16, **kwargs)


def aggregate(losses: list[list[float]], mode: str, scale: float = 16) -> float:
    """The formulas, from the per-token losses of each sequence."""
    sums, means = [sum(x) for x in losses], [sum(x) / len(x) if x else 0.0 for x in losses]
    return {
        "token-mean": sum(sums) / sum(len(x) for x in losses),
        "token-sum": sum(sums),
        "seq-mean-token-sum": sum(sums) / len(losses),
        "seq-mean-token-sum-norm": sum(sums) / len(losses) / scale,
        "seq-mean-token-mean": sum(means) / len(losses),
    }[mode]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lengths", [[2, 6], [1], [3, 0, 7, 5], [16, 1, 1]])
def test_weighted_sum_is_the_aggregate(mode: str, lengths: list[int]) -> None:
    losses = [[math.sin(10 * i + t) for t in range(n)] for i, n in enumerate(lengths)]
    weights_N = weights(lengths, mode)
    assert weights_N.dtype == torch.float64
    total = sum(w * sum(x) for w, x in zip(weights_N.tolist(), losses, strict=True))
    assert total == pytest.approx(aggregate(losses, mode), rel=1e-14)


@pytest.mark.parametrize("mode", MODES)
def test_what_is_filtered_out_counts_nowhere(mode: str) -> None:
    filtered = weights([4, 8, 6], mode, [True, False, True]).tolist()
    kept = weights([4, 6], mode).tolist()
    assert filtered == [kept[0], 0.0, kept[1]]


def test_denominator_of_truncated_answers() -> None:
    """Lengths 4, 8 (cut off) and 6: 10 tokens with the cut one excluded, 18 without; the lengths are not touched."""
    lengths_N = torch.tensor([4, 8, 6])
    in_batch_N = torch.tensor([True, False, True])
    excluded = token_weights_N(lengths_N, in_batch_N, "token-mean", max_response_length=8)
    assert (1 / excluded[0]).item() == pytest.approx(10)
    assert (1 / weights([4, 8, 6], "token-mean")[0]).item() == pytest.approx(18)
    assert lengths_N.tolist() == [4, 8, 6]


@pytest.mark.parametrize("mode", MODES)
def test_nothing_to_weigh_gives_zeros(mode: str) -> None:
    assert weights([0, 0, 0], mode).tolist() == [0, 0, 0]
    assert weights([4, 8], mode, [False, False]).tolist() == [0, 0]
    assert weights([], mode).tolist() == []
    assert weights([0, 5], mode)[0].item() == 0


def test_a_sequence_without_loss_tokens_counts_as_a_sequence() -> None:
    assert weights([0, 5], "seq-mean-token-sum").tolist() == [0, 0.5]
    assert weights([0, 5], "seq-mean-token-mean").tolist() == [0, 0.1]


def test_constant_of_dr_grpo() -> None:
    """Two sequences, summed loss 12, constant 16: 12 / (2 * 16), whatever the rows were padded to."""
    assert 12 * weights([2, 6], "seq-mean-token-sum-norm")[0].item() == 0.375
    assert 12 * weights([2, 6], "seq-mean-token-sum-norm", loss_scale_factor=100.0)[0].item() == pytest.approx(0.06)


def test_an_unknown_mode_is_an_error() -> None:
    with pytest.raises(KeyError):
        weights([1], "token-average")
