"""Inputs of the lm_head benchmark: peaked logits like a trained model's, and the per-token constants of a GRPO loss.

Not random noise: on flat logits every probability is 1/V, an error in the logits does not show, and a kernel that
skips small probabilities has nothing to keep. Here each row's hidden state is noise plus planted directions:

    hidden = noise + sum_k L_k w_k / |w_k|^2        so that candidate k has logit L_k (top: 18 to 25), everything else
    L_1 > L_2 > ... > L_8, steps of random size     about N(0, 1.5^2): mean entropies of 0.60 to 0.67 nats were recorded

Candidates are drawn log-uniformly over a shuffled vocabulary, so that a few tokens are hot, as in text. Targets are
drawn from the row's candidates by their probability, one in 64 uniformly from the vocabulary instead (a logprob near
-22).

Shape suffixes: T rows, H hidden, V vocabulary, C rows of one block, K candidates, N sequences.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

CLIP, KL_COEF = 0.2, 0.001
NUM_CANDIDATES = 8
_BACKGROUND_STD = 1.5
_TOP_LOGIT = (18.0, 25.0)
_STEP_SCALE = (0.3, 12.0)  # mean step between candidates, log-uniform over rows
_LOGPROB_NOISE = 0.1  # old and ref against the present policy
_BLOCK = 2048


@dataclass(frozen=True)
class Inputs:
    """One shape's tensors, all on one device. hidden and weight are bf16 leaves that want gradients."""

    hidden_TH: Tensor
    weight_VH: Tensor
    target_T: Tensor  # int64
    advantages_T: Tensor  # fp32, one value for each of `sequences` stretches of rows
    weights_T: Tensor  # fp32, 1/T
    old_T: Tensor  # fp32
    ref_T: Tensor  # fp32
    sequences: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """T, H, V."""
        return len(self.hidden_TH), self.hidden_TH.shape[1], len(self.weight_VH)

    @cached_property
    def logits_gradient_TV(self) -> Tensor:
        """Gradient of an on-policy loss by the logits, bf16: what the two gradient products get to multiply."""
        hidden_TH, weight_VH = self.hidden_TH.detach(), self.weight_VH.detach()
        grad_TV = torch.empty(*self.target_T.shape, len(weight_VH), dtype=weight_VH.dtype, device=weight_VH.device)
        for start in range(0, len(hidden_TH), _BLOCK):
            rows = slice(start, start + _BLOCK)
            grad_CV = torch.softmax((hidden_TH[rows] @ weight_VH.t()).float(), 1)
            grad_CV[torch.arange(len(grad_CV), device=grad_CV.device), self.target_T[rows]] -= 1
            grad_TV[rows] = grad_CV.mul_((self.advantages_T * self.weights_T)[rows, None])
        return grad_TV


def grpo_objective(logp_T: Tensor, inputs: Inputs) -> Tensor:
    """Clipped GRPO loss with the k3 estimate of the KL to the reference, in the dtype of `logp_T`."""
    ratio_T = (logp_T - inputs.old_T).exp()
    policy_T = torch.maximum(-inputs.advantages_T * ratio_T, -inputs.advantages_T * ratio_T.clamp(1 - CLIP, 1 + CLIP))
    log_ratio_T = inputs.ref_T - logp_T
    return ((policy_T + KL_COEF * (log_ratio_T.exp() - log_ratio_T - 1)) * inputs.weights_T).sum()


def ce_objective(logp_T: Tensor, inputs: Inputs) -> Tensor:
    """Mean cross entropy: the GRPO loss of an on-policy batch with advantage 1 has this gradient."""
    return -(logp_T * inputs.weights_T).sum()


OBJECTIVES = {"grpo": grpo_objective, "ce": ce_objective}


def make_weight(hidden: int, vocab: int, generator: torch.Generator) -> Tensor:
    """[V, H] bf16, rows of norm about `_BACKGROUND_STD`."""
    options = {"generator": generator, "device": generator.device}
    weight_VH = torch.empty(vocab, hidden, dtype=torch.bfloat16, device=generator.device)
    for rows in weight_VH.split(16384):  # in blocks: fp32 noise for all of it would be the largest tensor of the run
        rows.copy_(torch.randn(rows.shape, **options) * (_BACKGROUND_STD / math.sqrt(hidden)))
    return weight_VH


@torch.no_grad()
def make_hidden(rows: int, weight_VH: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(hidden_TH bf16, target_T) whose logits under `weight_VH` are peaked."""
    vocab, hidden = weight_VH.shape
    shuffle_V = torch.randperm(vocab, generator=generator, device=generator.device)
    hidden_TH = torch.empty(rows, hidden, dtype=weight_VH.dtype, device=weight_VH.device)
    target_T = torch.empty(rows, dtype=torch.int64, device=weight_VH.device)
    for start in range(0, rows, _BLOCK):
        block = slice(start, min(start + _BLOCK, rows))
        hidden_TH[block], target_T[block] = _peaked_rows(block.stop - start, weight_VH, shuffle_V, generator)
    return hidden_TH, target_T


def _peaked_rows(count: int, weight_VH: Tensor, shuffle_V: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    vocab, hidden = weight_VH.shape

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=generator.device)

    per_class = vocab // NUM_CANDIDATES  # candidate k out of the tokens k modulo 8: no token twice in a row
    ranks_CK = (per_class ** uniform(count, NUM_CANDIDATES)).long().clamp(1, per_class) - 1
    ids_CK = shuffle_V[ranks_CK * NUM_CANDIDATES + torch.arange(NUM_CANDIDATES, device=generator.device)]

    low, high = _TOP_LOGIT
    scale_C1 = (_STEP_SCALE[0] * (_STEP_SCALE[1] / _STEP_SCALE[0]) ** uniform(count, 1)).clamp(max=50)
    steps_CK = -uniform(count, NUM_CANDIDATES).clamp(min=1e-6).log() * scale_C1
    steps_CK[:, 0] = 0
    logits_CK = (low + (high - low) * uniform(count, 1) - steps_CK.cumsum(1)).clamp(min=0)

    directions_CKH = weight_VH[ids_CK].float()
    shares_CK = logits_CK / directions_CKH.square().sum(2)
    noise_CH = torch.randn(count, hidden, generator=generator, device=generator.device)
    hidden_CH = noise_CH + (shares_CK.unsqueeze(1) @ directions_CKH).squeeze(1)

    true_CK = (directions_CKH @ hidden_CH.unsqueeze(2)).squeeze(2)  # planted ones disturb each other when H is small
    pick_C1 = torch.multinomial(true_CK.softmax(1), 1, generator=generator)
    target_C = ids_CK.gather(1, pick_C1).squeeze(1)
    anything_C = (uniform(count) * vocab).long().clamp(max=vocab - 1)
    return hidden_CH.to(weight_VH.dtype), torch.where(uniform(count) < 1 / 64, anything_C, target_C)


def make_inputs(hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor, logp_T: Tensor, seed: int = 0) -> Inputs:
    """Join the tensors with old and ref logprobs (`logp_T` and noise), and advantages of up to 16 sequences."""
    rows = len(hidden_TH)
    generator = torch.Generator(hidden_TH.device).manual_seed(seed)
    sequences = math.gcd(rows, 16)
    options = {"generator": generator, "device": hidden_TH.device}
    logp_T = logp_T.float()
    return Inputs(
        hidden_TH=hidden_TH.requires_grad_(),
        weight_VH=weight_VH.requires_grad_(),
        target_T=target_T,
        advantages_T=torch.randn(sequences, **options).repeat_interleave(rows // sequences),
        weights_T=torch.full((rows,), 1 / rows, device=hidden_TH.device),
        old_T=logp_T + _LOGPROB_NOISE * torch.randn(rows, **options),
        ref_T=logp_T + _LOGPROB_NOISE * torch.randn(rows, **options),
        sequences=sequences,
    )
