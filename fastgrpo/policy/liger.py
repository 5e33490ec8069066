"""Fused RMSNorm and SwiGLU from liger-kernel, put in as modules.

liger's own way is to replace functions inside transformers. Here whole modules are exchanged before sharding, one by
one, for modules with the same parameters under the same names, and only those whose maths is known to be the same:
plain RMSNorm with a weight, and the gated SiLU MLP. RoPE stays transformers': it is a function, not a module.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

# Classes whose forward is weight * x / sqrt(mean(x^2) + eps), computed in float32 and rounded before the weight.
_NORMS = {"LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm"}
# Classes whose forward is down(silu(gate(x)) * up(x)).
_MLPS = {"LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP"}


def is_installed() -> bool:
    return importlib.util.find_spec("liger_kernel") is not None


def use_liger_modules(lm: PreTrainedModel) -> int:
    """Exchange what can be exchanged, in place, on any device; returns how many modules. Parameters stay the same
    objects, so ties and names hold."""
    exchanged = 0
    for parent in list(lm.modules()):
        child: Any  # the classes named above, whose attributes nn.Module does not declare
        for name, child in list(parent.named_children()):
            if type(child).__name__ in _NORMS:
                setattr(parent, name, LigerNorm(child.weight, child.variance_epsilon))
            elif type(child).__name__ in _MLPS and lm.config.hidden_act in ("silu", "swish"):
                setattr(parent, name, LigerMLP(child.gate_proj, child.up_proj, child.down_proj))
            else:
                continue
            exchanged += 1
    return exchanged


class LigerNorm(nn.Module):
    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        from liger_kernel.ops import LigerRMSNormFunction  # pyright: ignore[reportMissingImports]

        # In place would overwrite the gradient that the residual path still needs.
        return LigerRMSNormFunction.apply(x, self.weight, self._eps, 0.0, "llama", False)


class LigerMLP(nn.Module):
    def __init__(self, gate_proj: nn.Linear, up_proj: nn.Linear, down_proj: nn.Linear) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate_proj, up_proj, down_proj

    def forward(self, x: Tensor) -> Tensor:
        from liger_kernel.ops import LigerSiLUMulFunction  # pyright: ignore[reportMissingImports]

        return self.down_proj(LigerSiLUMulFunction.apply(self.gate_proj(x), self.up_proj(x)))
