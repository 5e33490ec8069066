"""The passes that need no package but torch and ours: fastgrpo, bare products, torch.compile'd chunks, plain torch.

Each function takes the inputs of one shape and returns a closure that makes one whole pass: forward, and for the
training op backward into hidden.grad and weight.grad. Dtypes are the same for all: bf16 in, bf16 gradients out.

The bare products over all rows at once are the floor of the table: no exact method can leave them out. Their time is no
bound, though: cuBLAS chooses its kernels by shape, and the same products in chunks are at times faster. Their left
factor in the two gradient products is a real gradient of the logits, since the speed of a product depends on its
operands' bits.
Shape suffixes: T rows, H hidden, V vocabulary, C rows of a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fastgrpo_kernels import linear_grpo_loss, linear_logprob
from fastgrpo_kernels._chunks import DEFAULT_CHUNK_BYTES_CUDA
from lm_head_data import CLIP, KL_COEF, Inputs, grpo_objective
from lm_head_exact import Outputs

Run = Callable[[], Outputs]
COMPILED_ROWS = 4096


def training_pass(inputs: Inputs, forward: Callable[[], tuple[Tensor, Tensor | None, Tensor | None]]) -> Run:
    """One training pass around `forward() -> (loss, logp_T, entropy_T)`."""

    def run() -> Outputs:
        loss, logp_T, entropy_T = forward()
        loss.backward()
        return Outputs(logp_T, entropy_T, inputs.hidden_TH.grad, inputs.weight_VH.grad)

    return run


# ---- ours


def ours_nograd(inputs: Inputs, **options) -> Run:
    @torch.no_grad()
    def run() -> Outputs:
        return Outputs(*linear_logprob(inputs.hidden_TH, inputs.weight_VH, inputs.target_T, **options))

    return run


def ours_train(inputs: Inputs, **options) -> Run:
    def forward() -> tuple[Tensor, Tensor, Tensor]:
        out = linear_grpo_loss(
            inputs.hidden_TH,
            inputs.weight_VH,
            inputs.target_T,
            weights_N=inputs.weights_T,
            advantages_N=inputs.advantages_T,
            old_logprobs_N=inputs.old_T,
            ref_logprobs_N=inputs.ref_T,
            clip_low=CLIP,
            clip_high=CLIP,
            clip_c=math.inf,
            kl_coef=KL_COEF,
            **options,
        )
        return out.loss, out.logprobs_N, out.entropy_N

    return training_pass(inputs, forward)


def ours_ce(inputs: Inputs) -> Run:
    ones_T = torch.ones_like(inputs.weights_T)

    def forward() -> tuple[Tensor, Tensor, Tensor]:
        out = linear_grpo_loss(
            inputs.hidden_TH, inputs.weight_VH, inputs.target_T, weights_N=inputs.weights_T, advantages_N=ones_T
        )
        return out.loss, out.logprobs_N, out.entropy_N

    return training_pass(inputs, forward)


# ---- the kernel of the rows form


def _block_of_logits(inputs: Inputs) -> Tensor:
    from fastgrpo_kernels._sweep import SUB_ROWS, empty_rows

    hidden_TH, weight_VH = inputs.hidden_TH.detach()[:SUB_ROWS], inputs.weight_VH.detach()
    logits_CV = empty_rows(len(hidden_TH), len(weight_VH), torch.float32, hidden_TH.device)
    return torch.mm(hidden_TH, weight_VH.t(), out_dtype=torch.float32, out=logits_CV)


def row_kernel(inputs: Inputs, *, gradient: bool) -> Run:
    """Statistics of one block's logits: 4 bytes read for a logit; with `gradient` also D: 2 written."""
    from fastgrpo_kernels._exp_rows import RowStats, exp_rows

    logits_CV = _block_of_logits(inputs)
    rows, vocab = logits_CV.shape
    stats = RowStats(*torch.empty(len(RowStats._fields), rows, device=logits_CV.device))
    slope_C, target_C = torch.ones(rows, device=logits_CV.device), inputs.target_T[:rows]
    exp_CV = torch.empty(rows, logits_CV.stride(0), dtype=inputs.weight_VH.dtype, device=logits_CV.device)
    exp_CV = exp_CV[:, : vocab if gradient else 0]

    def run() -> Outputs:
        exp_rows(logits_CV, target_C, slope_C, stats, exp_CV)
        return Outputs()

    return run


def copy_of_row_bytes(inputs: Inputs) -> Run:
    """As many bytes as the statistics and D take, half of them read and half written."""
    logits_CV = _block_of_logits(inputs)
    source = torch.empty(logits_CV.numel() * 3, dtype=torch.uint8, device=logits_CV.device).random_()
    target = torch.empty_like(source)

    def run() -> Outputs:
        target.copy_(source)
        return Outputs()

    return run


# ---- bare products


def own_chunk_rows(hidden_TH: Tensor, weight_VH: Tensor) -> int:
    """Rows of a chunk of linear_grpo_loss with its default budget."""
    from fastgrpo_kernels._sweep import make_plan  # needs triton, which a CPU may lack

    return make_plan(hidden_TH, weight_VH, DEFAULT_CHUNK_BYTES_CUDA).chunk_rows


def products(inputs: Inputs, *, backward: bool, whole: bool, out_dtype: torch.dtype) -> Run:
    """X W^T, and for the training op G W and G^T X. Logits and dW are stored in `out_dtype`, dX in bf16.

    In chunks: those of linear_grpo_loss by default, logits in one buffer, dW added up over the chunks.
    """
    hidden_TH, weight_VH = inputs.hidden_TH.detach(), inputs.weight_VH.detach()
    rows, hidden, vocab = inputs.shape
    step = rows if whole else own_chunk_rows(hidden_TH, weight_VH)
    grad_TV = inputs.logits_gradient_TV if backward else None
    options = {"dtype": out_dtype, "device": hidden_TH.device}

    @torch.no_grad()
    def run() -> Outputs:
        logits_CV = torch.empty(min(step, rows), vocab, **options)
        dhidden_TH = torch.empty_like(hidden_TH) if backward else None
        dweight_VH = torch.empty(vocab, hidden, **options) if backward else None
        for start in range(0, rows, step):
            chunk = slice(start, start + step)
            hidden_CH = hidden_TH[chunk]
            _mm(hidden_CH, weight_VH.t(), logits_CV[: len(hidden_CH)])
            if grad_TV is not None and dhidden_TH is not None and dweight_VH is not None:
                _mm(grad_TV[chunk], weight_VH, dhidden_TH[chunk])
                _mm(grad_TV[chunk].t(), hidden_CH, dweight_VH, add=start > 0)
        return Outputs()

    return run


def _mm(a: Tensor, b: Tensor, out: Tensor, add: bool = False) -> None:
    wider = {} if out.dtype == a.dtype else {"out_dtype": out.dtype}
    if add:
        torch.addmm(out, a, b, **wider, out=out)
    else:
        torch.mm(a, b, **wider, out=out)


# ---- our own algorithm with the row pass left to torch.compile


def _row_stats(logits_CV: Tensor, target_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(logprob, entropy, log-sum-exp)."""
    max_C1 = logits_CV.amax(1, keepdim=True)
    shifted_CV = logits_CV - max_C1
    exp_CV = shifted_CV.exp()
    sum_C = exp_CV.sum(1)
    log_sum_C = sum_C.log()
    target_logit_C = logits_CV.gather(1, target_C.unsqueeze(1)).squeeze(1)
    lse_C = max_C1.squeeze(1) + log_sum_C
    return target_logit_C - lse_C, log_sum_C - (exp_CV * shifted_CV).sum(1) / sum_C, lse_C


def _row_gradient(
    logits_CV: Tensor, target_C: Tensor, old_C: Tensor, ref_C: Tensor, advantages_C: Tensor, weights_C: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, logprob, entropy, dL/dlogits in bf16) of the GRPO loss of lm_head_data.py, derivative by hand."""
    logp_C, entropy_C, lse_C = _row_stats(logits_CV, target_C)
    ratio_C, growth_C = (logp_C - old_C).exp(), (ref_C - logp_C).exp()
    clipped_C = ratio_C.clamp(1 - CLIP, 1 + CLIP)
    policy_C = torch.maximum(-advantages_C * ratio_C, -advantages_C * clipped_C)
    loss_C = weights_C * (policy_C + KL_COEF * (growth_C - (ref_C - logp_C) - 1))
    keeps_C = torch.where(advantages_C > 0, ratio_C <= 1 + CLIP, ratio_C >= 1 - CLIP)
    slope_C = weights_C * (torch.where(keeps_C, -advantages_C * ratio_C, 0.0) + KL_COEF * (1 - growth_C))
    is_target_CV = torch.arange(logits_CV.shape[1], device=logits_CV.device) == target_C.unsqueeze(1)
    softmax_CV = (logits_CV - lse_C.unsqueeze(1)).exp()
    grad_CV = slope_C.unsqueeze(1) * (is_target_CV.float() - softmax_CV)
    return loss_C, logp_C, entropy_C, grad_CV.to(torch.bfloat16)


def _compiled(function: Callable) -> Callable:
    torch._dynamo.reset()  # every shape gets its own code, none the general one for varying sizes
    return torch.compile(function, dynamic=False)


def _logits(hidden_CH: Tensor, weight_VH: Tensor) -> Tensor:
    return torch.mm(hidden_CH, weight_VH.t(), out_dtype=torch.float32)


def compiled_nograd(inputs: Inputs) -> Run:
    stats = _compiled(_row_stats)

    @torch.no_grad()
    def run() -> Outputs:
        parts = [
            stats(_logits(hidden_CH, inputs.weight_VH), target_C)[:2]
            for hidden_CH, target_C in zip(
                inputs.hidden_TH.split(COMPILED_ROWS), inputs.target_T.split(COMPILED_ROWS), strict=True
            )
        ]
        logp, entropy = zip(*parts, strict=True)
        return Outputs(torch.cat(logp), torch.cat(entropy))

    return run


def compiled_train(inputs: Inputs) -> Run:
    row_gradient = _compiled(_row_gradient)
    per_row = (inputs.target_T, inputs.old_T, inputs.ref_T, inputs.advantages_T, inputs.weights_T)

    @torch.no_grad()
    def run() -> Outputs:
        hidden_TH, weight_VH = inputs.hidden_TH, inputs.weight_VH
        dhidden_TH = torch.empty_like(hidden_TH)
        dweight_VH = torch.zeros(weight_VH.shape, dtype=torch.float32, device=weight_VH.device)
        logp, entropy, loss = [], [], torch.zeros((), device=weight_VH.device)
        for start in range(0, len(hidden_TH), COMPILED_ROWS):
            rows = slice(start, start + COMPILED_ROWS)
            logits_CV = _logits(hidden_TH[rows], weight_VH)
            loss_C, logp_C, entropy_C, grad_CV = row_gradient(logits_CV, *(x[rows] for x in per_row))
            del logits_CV
            _mm(grad_CV, weight_VH, dhidden_TH[rows])
            _mm(grad_CV.t(), hidden_TH[rows], dweight_VH, add=True)
            loss += loss_C.sum()
            logp.append(logp_C)
            entropy.append(entropy_C)
        return Outputs(torch.cat(logp), torch.cat(entropy), dhidden_TH, dweight_VH.to(weight_VH.dtype))

    return run


# ---- torch with all logits at once


def naive_nograd(inputs: Inputs) -> Run:
    @torch.no_grad()
    def run() -> Outputs:
        log_softmax_TV = torch.log_softmax((inputs.hidden_TH @ inputs.weight_VH.t()).float(), 1)
        logp_T = log_softmax_TV.gather(1, inputs.target_T.unsqueeze(1)).squeeze(1)
        return Outputs(logp_T, -(log_softmax_TV.exp() * log_softmax_TV).sum(1))

    return run


def naive_train(inputs: Inputs) -> Run:
    def forward() -> tuple[Tensor, Tensor, None]:
        log_softmax_TV = torch.log_softmax((inputs.hidden_TH @ inputs.weight_VH.t()).float(), 1)
        logp_T = log_softmax_TV.gather(1, inputs.target_T.unsqueeze(1)).squeeze(1)
        return grpo_objective(logp_T, inputs), logp_T, None

    return training_pass(inputs, forward)
