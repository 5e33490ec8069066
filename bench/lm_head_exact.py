"""What errors are measured against: logprob, entropy and gradients of a sample, in fp64 from the same bf16 inputs.

    sampled rows S (512)                 [S, V] logits from an fp64 product: logprob, entropy and dL/dhidden in fp64
    sampled vocabulary rows K (256)      dL/dweight needs the softmax of every row at these tokens, [T, K]:
                                         logits at K from an fp64 product, minus each row's log-sum-exp

The log-sum-exp of all T rows comes from products of bf16 values summed in fp32 (no TF32), exponentials summed in fp64:
an fp64 product of that size would take minutes on most cards. It is the only error of the reference: what it was on the
sampled rows, where it is known in fp64, stands in `lse_error`. Logprob and entropy do not depend on it; the gradients
inherit it as a relative error (1e-6 nats: 1e-6), through the softmax and the ratio. Gradients by the logprob are
autograd's, in fp64, of the plain formula in lm_head_data.py.

Shape suffixes: T rows, H hidden, V vocabulary, S sampled rows, K sampled tokens, C rows or tokens of one block.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from lm_head_data import OBJECTIVES, Inputs

NUM_ROWS, NUM_TOKENS = 512, 256
_BLOCK = 1024
_TOKEN_BLOCK = 16384


@dataclass(frozen=True)
class Outputs:
    """What one pass gave: None where the implementation does not return it. Gradients are of the op's own objective."""

    logp_T: Tensor | None = None
    entropy_T: Tensor | None = None
    dhidden_TH: Tensor | None = None
    dweight_VH: Tensor | None = None


@dataclass(frozen=True)
class Exact:
    """fp64 values of the sample. Gradients are kept per objective ("grpo", "ce")."""

    rows_S: Tensor
    tokens_K: Tensor
    logp_S: Tensor
    entropy_S: Tensor
    dhidden_SH: dict[str, Tensor]
    dweight_KH: dict[str, Tensor]
    lse_error: float


@contextmanager
def without_tf32() -> Iterator[None]:
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed


def lse_of_all(hidden_TH: Tensor, weight_VH: Tensor) -> Tensor:
    """log-sum-exp of every row's logits, fp64 from products summed in fp32."""
    lse_T = torch.full(hidden_TH.shape[:1], -torch.inf, dtype=torch.float64, device=hidden_TH.device)
    with torch.no_grad(), without_tf32():
        for weight_CH in weight_VH.split(_TOKEN_BLOCK):
            factor_HC = weight_CH.float().t()
            for start in range(0, len(hidden_TH), _BLOCK):
                rows = slice(start, start + _BLOCK)
                logits_CC = (hidden_TH[rows].float() @ factor_HC).double()
                lse_T[rows] = torch.logaddexp(lse_T[rows], logits_CC.logsumexp(1))
    return lse_T


def logp_of_all(hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor, lse_T: Tensor) -> Tensor:
    """Logprob of every row's target, fp64: exact logits, `lse_T` subtracted."""
    logits = []
    with torch.no_grad():
        for start in range(0, len(hidden_TH), _BLOCK):
            rows = slice(start, start + _BLOCK)
            logits.append((hidden_TH[rows].double() * weight_VH[target_T[rows]].double()).sum(1))
    return torch.cat(logits) - lse_T


def make_exact(inputs: Inputs, lse_T: Tensor, seed: int = 0) -> Exact:
    """Reference values for `inputs`; `lse_T` from lse_of_all. 2 to 3 GiB of workspace at most."""
    hidden_TH, weight_VH, target_T = inputs.hidden_TH.detach(), inputs.weight_VH.detach(), inputs.target_T
    generator = torch.Generator(hidden_TH.device).manual_seed(seed)
    rows_S = _sample(len(hidden_TH), NUM_ROWS, generator)
    tokens_K = _sample_tokens(target_T, len(weight_VH), generator)
    hidden_SH, target_S1 = hidden_TH[rows_S].double(), target_T[rows_S].unsqueeze(1)

    logits_SV = torch.cat([hidden_SH @ block.double().t() for block in weight_VH.split(_TOKEN_BLOCK)], 1)
    log_softmax_SV = logits_SV.log_softmax(1)
    lse_S = (logits_SV[:, 0] - log_softmax_SV[:, 0]).clone()
    del logits_SV
    softmax_SV = log_softmax_SV.exp()
    logp_S = log_softmax_SV.gather(1, target_S1).squeeze(1)
    entropy_S = -(softmax_SV * log_softmax_SV).sum(1)
    del log_softmax_SV
    direction_SV = softmax_SV.neg_()
    direction_SV.scatter_add_(1, target_S1, torch.ones_like(logp_S).unsqueeze(1))
    blocks = zip(direction_SV.split(_TOKEN_BLOCK, 1), weight_VH.split(_TOKEN_BLOCK), strict=True)
    direction_SH = sum((direction @ block.double() for direction, block in blocks), torch.zeros_like(hidden_SH))
    del direction_SV, softmax_SV

    slopes = {name: _slope(name, inputs, lse_T) for name in OBJECTIVES}
    return Exact(
        rows_S=rows_S,
        tokens_K=tokens_K,
        logp_S=logp_S,
        entropy_S=entropy_S,
        dhidden_SH={name: slope_T[rows_S, None] * direction_SH for name, slope_T in slopes.items()},
        dweight_KH=_weight_gradients(hidden_TH, weight_VH[tokens_K], tokens_K, target_T, lse_T, slopes),
        lse_error=(lse_T[rows_S] - lse_S).abs().max().item(),
    )


def _slope(objective: str, inputs: Inputs, lse_T: Tensor) -> Tensor:
    """Derivative of the objective by every row's logprob, fp64."""
    logp_T = logp_of_all(inputs.hidden_TH.detach(), inputs.weight_VH.detach(), inputs.target_T, lse_T)
    with torch.enable_grad():
        loss = OBJECTIVES[objective](logp_T.requires_grad_(), inputs)
    return torch.autograd.grad(loss, logp_T)[0]


def _weight_gradients(
    hidden_TH: Tensor,
    weight_KH: Tensor,
    tokens_K: Tensor,
    target_T: Tensor,
    lse_T: Tensor,
    slopes: dict[str, Tensor],
) -> dict[str, Tensor]:
    sums = {name: torch.zeros(weight_KH.shape, dtype=torch.float64, device=weight_KH.device) for name in slopes}
    for start in range(0, len(hidden_TH), _BLOCK):
        rows = slice(start, start + _BLOCK)
        hidden_CH = hidden_TH[rows].double()
        softmax_CK = (hidden_CH @ weight_KH.double().t() - lse_T[rows, None]).exp()
        direction_CK = (target_T[rows, None] == tokens_K).double() - softmax_CK
        for name, slope_T in slopes.items():
            sums[name] += (slope_T[rows, None] * direction_CK).t() @ hidden_CH
    return sums


def _sample(count: int, wanted: int, generator: torch.Generator) -> Tensor:
    return torch.randperm(count, generator=generator, device=generator.device)[:wanted].sort().values


def _sample_tokens(target_T: Tensor, vocab: int, generator: torch.Generator) -> Tensor:
    """Up to 256 different tokens, half of them targets of some row where there are as many."""
    targets = target_T.unique()
    targets = targets[_sample(len(targets), NUM_TOKENS // 2, generator)]
    is_taken_V = torch.zeros(vocab, dtype=torch.bool, device=target_T.device)
    is_taken_V[targets] = True
    others = (~is_taken_V).nonzero().squeeze(1)
    others = others[_sample(len(others), NUM_TOKENS - len(targets), generator)]
    return torch.cat([targets, others]).sort().values


def errors(outputs: Outputs, exact: Exact, objective: str) -> dict[str, float | None]:
    """Largest absolute error of logprob and entropy in nats; relative (Frobenius) error of the gradients' samples."""

    def largest(x_T: Tensor | None, exact_S: Tensor) -> float | None:
        return None if x_T is None else (x_T.detach()[exact.rows_S].double() - exact_S).abs().max().item()

    def relative(x: Tensor | None, index: Tensor, true: Tensor) -> float | None:
        if x is None:
            return None
        return ((x[index].double() - true).norm() / true.norm()).item()

    return {
        "max_abs_logp_err": largest(outputs.logp_T, exact.logp_S),
        "max_abs_entropy_err": largest(outputs.entropy_T, exact.entropy_S),
        "rel_dx_err": relative(outputs.dhidden_TH, exact.rows_S, exact.dhidden_SH[objective]),
        "rel_dw_err": relative(outputs.dweight_VH, exact.tokens_K, exact.dweight_KH[objective]),
    }
