"""The loss weight of each sequence's tokens: every normaliser of a mini-batch in one number, fixed before any backward.

All five `loss_agg_mode`s give the tokens of one sequence the same weight, so the counts of the whole mini-batch (every
rank knows all lengths) are all that is needed, and the loss is then a plain sum, over tokens, micro-batches and ranks.

Shape suffix: N sequences. B below is the number of sequences in the mini-batch, n_i the loss tokens of sequence i.
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_weights_N(
    loss_tokens_N: Tensor,
    in_batch_N: Tensor,
    mode: str,
    *,
    max_response_length: int,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """Weight of each loss token of sequence i, float64, as verl's modes of these names define it:

        token-mean               1 / sum of n_j
        token-sum                1
        seq-mean-token-sum       1 / B
        seq-mean-token-sum-norm  1 / (B * scale), scale = loss_scale_factor or else max_response_length (Dr. GRPO)
        seq-mean-token-mean      1 / (B * n_i) (the first GRPO)

    loss_tokens_N: int64, tokens that the policy drew. in_batch_N: bool, false for what was filtered out (unscored,
    overlong, of another mini-batch): such a sequence has weight 0 and is in neither B nor the sum. One that is in the
    batch counts in B even if it has no loss token. Weights are 0, never NaN, where there is nothing to weigh.
    """
    tokens_N = torch.where(in_batch_N, loss_tokens_N, 0).double()
    one_N = torch.ones_like(tokens_N)
    sequences = in_batch_N.sum()
    scale = max_response_length if loss_scale_factor is None else loss_scale_factor
    divisors = {
        "token-mean": one_N * tokens_N.sum(),
        "token-sum": one_N,
        "seq-mean-token-sum": one_N * sequences,
        "seq-mean-token-sum-norm": one_N * sequences * scale,
        "seq-mean-token-mean": tokens_N * sequences,
    }
    return torch.where(tokens_N > 0, 1 / divisors[mode], 0.0)
