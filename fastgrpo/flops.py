"""Floating-point work of an update, and the share of the device's peak that it reached (MFU).

Counted is what the model needs, forward and backward, nothing twice: recomputed activations, padding, frozen passes
(old, ref) and the optimizer are not in it. For a sequence of s tokens, r of which carry a loss:

    6 (s blocks + r head)          each weight of a matrix product: 2 in the forward, 4 in the backward (2 if frozen)
    6 s^2 layers heads head_dim    QK^T and PV: 4 s^2 heads head_dim a layer, halved by causality, times 3

The input embedding is a lookup and counts nothing, so a tied head counts once, on the rows it runs on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

# Dense bfloat16 without sparsity, FLOP/s in units of 1e12, from the makers' data sheets. The first name that stands in
# the device's wins, so the longer ones come first.
PEAK_TFLOPS = (
    ("B300", 2500.0),
    ("B200", 2250.0),
    ("GH200", 989.0),
    ("H200", 989.0),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.0),
    ("H800", 989.0),
    ("H20", 148.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("L40S", 362.0),
    ("A40", 149.7),
    ("A10", 125.0),
    ("RTX 4090", 165.2),
    ("RTX 3090", 71.0),
)


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """What of a model the formula needs. Example: Qwen2.5-1.5B has (1_310e6, 233e6, 28 * 12 * 128)."""

    blocks: int  # weights in the matrix products of all blocks
    head: int  # hidden x vocabulary
    attention: int  # layers x heads x head size
    frozen_blocks: int = 0  # of `blocks`, the weights beside adapters: they have no gradient
    frozen_head: int = 0

    @classmethod
    def of(cls, blocks: Iterable[nn.Module], head: Tensor, *, layers: int, heads: int, head_dim: int) -> ModelFlops:
        matrices = [p for block in blocks for p in block.parameters() if p.dim() >= 2]
        weights = sum(p.numel() for p in matrices)
        frozen = sum(p.numel() for p in matrices if not p.requires_grad)
        frozen_head = 0 if head.requires_grad else head.numel()
        return cls(weights, head.numel(), layers * heads * head_dim, frozen, frozen_head)

    def training(self, lengths: Sequence[int], head_rows: int) -> float:
        """FLOP of one forward and backward. lengths: tokens of each sequence as packed; head_rows: of all of them."""
        tokens, squares = sum(lengths), sum(length * length for length in lengths)
        whole = 6.0 * (tokens * self.blocks + head_rows * self.head + squares * self.attention)
        return whole - 2.0 * (tokens * self.frozen_blocks + head_rows * self.frozen_head)


def peak_flops(device_name: str, stated_tflops: float | None, dtype: str) -> float | None:
    """FLOP/s of one device: what the user states, else the table's for bfloat16; None when it has none."""
    if stated_tflops is not None:
        return stated_tflops * 1e12
    if dtype != "bfloat16":
        return None
    return next((1e12 * tflops for name, tflops in PEAK_TFLOPS if re.search(rf"\b{name}(?!\d)", device_name)), None)
