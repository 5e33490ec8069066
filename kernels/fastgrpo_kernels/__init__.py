"""Logprob, entropy and GRPO loss straight from hidden states and the weight of the output layer.

Of a [rows, vocabulary] tensor no more than a chunk of rows ever exists, forward or backward. Depends on torch alone,
and where there is a GPU on triton.

    linear_logprob      logprob and entropy of each row, differentiable: any loss can follow (its backward recomputes)
    linear_grpo_loss    the whole clipped GRPO loss, with both gradients made in the forward
    grpo_token_terms    the loss of single tokens and its derivative: the maths of the former, without the logits
"""

from fastgrpo_kernels.grpo_terms import (
    CLIPPED_DUAL,
    CLIPPED_HIGH,
    CLIPPED_LOW,
    KL_TYPES,
    POLICY_LOSSES,
    GrpoRows,
    GrpoSettings,
    TokenTerms,
    grpo_token_terms,
)
from fastgrpo_kernels.linear_grpo_loss import GrpoLoss, linear_grpo_loss, linear_grpo_loss_ref
from fastgrpo_kernels.linear_logprob import linear_logprob, linear_logprob_ref

__all__ = [
    "CLIPPED_DUAL",
    "CLIPPED_HIGH",
    "CLIPPED_LOW",
    "KL_TYPES",
    "POLICY_LOSSES",
    "GrpoLoss",
    "GrpoRows",
    "GrpoSettings",
    "TokenTerms",
    "grpo_token_terms",
    "linear_grpo_loss",
    "linear_grpo_loss_ref",
    "linear_logprob",
    "linear_logprob_ref",
]
