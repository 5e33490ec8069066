"""What bench_lm_head.py times: the list of all, and the passes of public packages, each at its best public settings.

A peer is a name and a function like those of lm_head_own.py, which imports its package when it is called. What a peer
cannot do is in its name: "no entropy" = logprob only. The op "ce" is a training pass on mean cross entropy, whose
gradient is that of the GRPO loss of an on-policy batch with advantage 1: for packages that have no policy loss.
cut-cross-entropy runs with its shipped kernel settings (no CCE_AUTOTUNE).
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lm_head_data import CLIP, KL_COEF, Inputs, grpo_objective
from lm_head_exact import Outputs
from lm_head_own import (
    Run,
    compiled_nograd,
    compiled_train,
    copy_of_row_bytes,
    naive_nograd,
    naive_train,
    ours_ce,
    ours_nograd,
    ours_train,
    products,
    row_kernel,
    training_pass,
)

SMALL_CHUNK_BYTES = 1 << 30
FLOOR = "bare GEMM, whole T, bf16 (floor)"


class Unavailable(Exception):
    """This peer cannot run here, and why."""


@dataclass(frozen=True)
class Peer:
    name: str
    op: str  # "train", "ce", "nograd" or "row"
    make: Callable[[Inputs], Run]

    @property
    def objective(self) -> str:
        """Of a training pass: see lm_head_data.OBJECTIVES."""
        return "ce" if self.op == "ce" else "grpo"


def all_peers() -> list[Peer]:
    """In the order of the table; the first ones are what a run that is cut short should still have."""
    others = [
        Peer(f"fastgrpo, {impl} form", op, functools.partial(make, impl=impl))
        for impl in ("rows", "reference")
        for op, make in (("nograd", ours_nograd), ("train", ours_train))
    ]
    return [
        Peer(FLOOR, "nograd", functools.partial(products, backward=False, whole=True, out_dtype=torch.bfloat16)),
        Peer(FLOOR, "train", functools.partial(products, backward=True, whole=True, out_dtype=torch.bfloat16)),
        Peer("fastgrpo", "nograd", ours_nograd),
        Peer("fastgrpo", "train", ours_train),
        Peer("fastgrpo, 1 GiB", "train", functools.partial(ours_train, chunk_bytes=SMALL_CHUNK_BYTES)),
        Peer("fastgrpo", "ce", ours_ce),
        *_product_peers(),
        Peer("torch.compile'd chunks", "nograd", compiled_nograd),
        Peer("torch.compile'd chunks", "train", compiled_train),
        Peer("Liger SM90", "nograd", _liger_sm90_nograd),
        Peer("Liger SM90 + torch loss", "train", _liger_sm90_train),
        Peer("CCE, no entropy", "nograd", _cce_nograd),
        Peer("CCE unfiltered + torch loss", "train", functools.partial(_cce_train, filter_eps=None)),
        Peer("CCE filtered + torch loss", "train", functools.partial(_cce_train, filter_eps="auto")),
        Peer("Liger fused linear CE", "ce", functools.partial(_liger_ce, chunk_mem_const=1)),
        Peer("Liger fused linear CE, 16 x chunk", "ce", functools.partial(_liger_ce, chunk_mem_const=16)),
        Peer("Liger fused linear GRPO", "train", functools.partial(_liger_grpo, tf32=False)),
        Peer("Liger fused linear GRPO, TF32", "train", functools.partial(_liger_grpo, tf32=True)),
        Peer("torch, whole logits", "nograd", naive_nograd),
        Peer("torch, whole logits", "train", naive_train),
        *others,
    ]


def row_kernels() -> list[Peer]:
    """The kernel of the rows form alone, on one block of stored logits, and a copy of as many bytes."""
    return [
        Peer("row kernel, statistics", "row", functools.partial(row_kernel, gradient=False)),
        Peer("row kernel, statistics and D", "row", functools.partial(row_kernel, gradient=True)),
        Peer("copy of the bytes of both", "row", copy_of_row_bytes),
    ]


def _product_peers() -> list[Peer]:
    return [
        Peer(
            f"bare GEMM, {'whole T' if whole else 'chunks'}, {dtype_name}",
            op,
            functools.partial(products, backward=op == "train", whole=whole, out_dtype=dtype),
        )
        for whole, dtype_name, dtype in (
            (True, "fp32", torch.float32),
            (False, "bf16", torch.bfloat16),
            (False, "fp32", torch.float32),
        )
        for op in ("nograd", "train")
    ]


# ---- liger-kernel


def _liger_sm90() -> Callable[..., tuple[Tensor, Tensor]]:
    if torch.cuda.get_device_capability() != (9, 0):
        raise Unavailable("needs compute capability 9.0: elsewhere it is 512-row chunks in torch")
    os.environ["LIGER_SCALED_CE_SM90_VALIDATE_TARGETS"] = "0"  # it would wait for the device
    from liger_kernel.ops.cutedsl.ops import fused_scaled_cross_entropy_sm90  # noqa: F401  (fails here, by name)
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import LigerFusedLinearScaledCrossEntropyFunction

    return LigerFusedLinearScaledCrossEntropyFunction.apply


def _liger_sm90_nograd(inputs: Inputs) -> Run:
    scaled_ce = _liger_sm90()

    @torch.no_grad()
    def run() -> Outputs:
        nll_T, entropy_T = scaled_ce(inputs.hidden_TH, inputs.weight_VH, inputs.target_T, 1.0, -100, 1, True)
        return Outputs(-nll_T, entropy_T)

    return run


def _liger_sm90_train(inputs: Inputs) -> Run:
    scaled_ce = _liger_sm90()

    def forward() -> tuple[Tensor, Tensor, Tensor]:
        nll_T, entropy_T = scaled_ce(inputs.hidden_TH, inputs.weight_VH, inputs.target_T, 1.0, -100, 1, True)
        return grpo_objective(-nll_T.float(), inputs), -nll_T, entropy_T

    return training_pass(inputs, forward)


def _liger_ce(inputs: Inputs, *, chunk_mem_const: int) -> Run:
    """Mean cross entropy with gradient in the forward; bf16 logits, fp32 dW."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    names = list(inspect.signature(LigerFusedLinearCrossEntropyFunction.forward).parameters)[1:]
    chosen = {"accum_dtype": torch.float32, "chunk_mem_const": chunk_mem_const}
    if "chunk_mem_const" not in names and chunk_mem_const != 1:
        raise Unavailable("this release of liger-kernel has no chunk_mem_const")
    defaults = inspect.signature(LigerFusedLinearCrossEntropyFunction.forward).parameters
    rest = [chosen.get(name, defaults[name].default) for name in names[3:]]

    def forward() -> tuple[Tensor, None, None]:
        out = LigerFusedLinearCrossEntropyFunction.apply(inputs.hidden_TH, inputs.weight_VH, inputs.target_T, *rest)
        return (out[0] if isinstance(out, tuple) else out), None, None

    return training_pass(inputs, forward)


def _liger_grpo(inputs: Inputs, *, tf32: bool) -> Run:
    """Its backward products are fp32 products: on the tensor cores only with TF32."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    head = LigerFusedLinearGRPOLoss(
        beta=KL_COEF, use_ref_model=True, loss_type="dapo", epsilon_low=CLIP, epsilon_high=CLIP
    )
    count = inputs.sequences

    def by_sequence(x: Tensor) -> Tensor:
        return x.view(count, -1, *x.shape[1:])

    mask = torch.ones_like(by_sequence(inputs.weights_T))
    advantages = by_sequence(inputs.advantages_T)[:, 0].contiguous()

    def forward() -> tuple[Tensor, None, None]:
        ids, ref, old = map(by_sequence, (inputs.target_T, inputs.ref_T, inputs.old_T))
        return (
            head(by_sequence(inputs.hidden_TH), inputs.weight_VH, ids, mask, advantages, None, ref, old)[0],
            None,
            None,
        )

    passed = training_pass(inputs, forward)

    def run() -> Outputs:
        allowed = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = tf32
        try:
            return passed()
        finally:
            torch.backends.cuda.matmul.allow_tf32 = allowed

    return run


# ---- cut-cross-entropy


def _cce_nograd(inputs: Inputs) -> Run:
    from cut_cross_entropy import linear_cross_entropy

    # detached: it looks at requires_grad, and would prepare the filter of a backward
    tensors = inputs.hidden_TH.detach(), inputs.weight_VH.detach(), inputs.target_T

    @torch.no_grad()
    def run() -> Outputs:
        return Outputs(-linear_cross_entropy(*tensors, reduction="none", filter_eps=None))

    return run


def _cce_train(inputs: Inputs, *, filter_eps: str | None) -> Run:
    """Filtered, it leaves out blocks of the gradient whose entries are all below 2.4e-4 before the loss's factor."""
    from cut_cross_entropy import linear_cross_entropy

    def forward() -> tuple[Tensor, Tensor, None]:
        nll_T = linear_cross_entropy(
            inputs.hidden_TH, inputs.weight_VH, inputs.target_T, reduction="none", filter_eps=filter_eps
        )
        return grpo_objective(-nll_T.float(), inputs), -nll_T, None

    return training_pass(inputs, forward)
