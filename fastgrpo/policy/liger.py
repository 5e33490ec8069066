"""Fused RMSNorm, SwiGLU and rotary embedding from liger-kernel, put in as modules.

liger's own way is to replace functions inside transformers. Here whole modules are exchanged before sharding, one by
one, for modules with the same parameters under the same names, and only those whose maths is known to be the same:
plain RMSNorm with a weight, the gated SiLU MLP, and the attention of the same families. The last is there for the
rotary embedding alone, which transformers calls as a function in the middle of it; attention itself is attention.py's.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fastgrpo.policy import attention

# Classes whose forward is weight * x / sqrt(mean(x^2) + eps), computed in float32 and rounded before the weight.
_NORMS = {"LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm"}
# Classes whose forward is down(silu(gate(x)) * up(x)).
_MLPS = {"LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP"}
# Classes whose forward is LigerAttention's, with what each hands on as sliding window.
_ATTENTIONS: dict[str, Callable[[Any], int | None]] = {
    "LlamaAttention": lambda plain: None,
    "MistralAttention": lambda plain: plain.config.sliding_window,
    "Qwen2Attention": lambda plain: plain.sliding_window,
    "Qwen3Attention": lambda plain: plain.sliding_window,
}
_PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj"]
_HEAD_NORMS = ["q_norm", "k_norm"]


def is_installed() -> bool:
    return importlib.util.find_spec("liger_kernel") is not None


def is_usable(device: torch.device) -> bool:
    return device.type == "cuda" and is_installed()


def use_liger_modules(lm: PreTrainedModel) -> int:
    """Exchange what can be exchanged, in place, on any device; returns how many modules. Parameters stay the same
    objects, so ties and names hold."""
    exchanged = 0
    for parent in reversed(list(lm.modules())):  # the inner ones first: an attention takes its norms along
        child: Any  # the classes named above, whose attributes nn.Module does not declare
        for name, child in list(parent.named_children()):
            if type(child).__name__ in _NORMS:
                setattr(parent, name, LigerNorm(child.weight, child.variance_epsilon))
            elif type(child).__name__ in _MLPS and lm.config.hidden_act in ("silu", "swish"):
                setattr(parent, name, LigerMLP(child.gate_proj, child.up_proj, child.down_proj))
            elif _is_known_attention(child):
                setattr(parent, name, LigerAttention(child))
            else:
                continue
            exchanged += 1
    return exchanged


def _is_known_attention(module: Any) -> bool:
    """Whether LigerAttention computes what `module` does. Code of a model's own often changes attention and keeps the
    name, so it has to be transformers' class with the parameters that are expected; it has to attend through
    attention.py, and to rotate whole heads (liger would rotate a part where transformers raises an error)."""
    kind = type(module)
    if kind.__name__ not in _ATTENTIONS or not kind.__module__.startswith("transformers.models."):
        return False
    rope = module.config.rope_parameters or {}
    return (
        _parts(module) in (_PROJECTIONS, _PROJECTIONS + _HEAD_NORMS)
        and module.config._attn_implementation == attention.NAME
        and rope.get("partial_rotary_factor") in (None, 1.0)
    )


def _parts(module: nn.Module) -> list[str]:
    """The children that hold parameters, in order."""
    return list(dict.fromkeys(name.partition(".")[0] for name, _ in module.named_parameters()))


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


class LigerAttention(nn.Module):
    """Attention of the families in _ATTENTIONS with the rotary embedding in one kernel a direction.

        x [1, U, H] -> q_proj, k_proj, v_proj [1, U, heads, D] -> norms of q, k -> rotation in place -> attend -> o_proj

    liger rotates q and k in the memory of the projections' (or norms') outputs, and their gradients in that of the
    incoming ones. Both are free for it: no linear layer, adapter or norm keeps its output, and `attend` alone reads the
    rotated ones.
    """

    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    o_proj: nn.Module
    q_norm: nn.Module
    k_norm: nn.Module

    def __init__(self, plain: Any) -> None:
        super().__init__()
        for name in _parts(plain):
            self.add_module(name, getattr(plain, name))
        self._has_norms = hasattr(plain, "q_norm")
        self._head_dim, self._scaling = plain.head_dim, plain.scaling
        self._sliding_window = _ATTENTIONS[type(plain).__name__](plain)

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], past_key_values: None = None, **kwargs
    ) -> tuple[Tensor, None]:
        """hidden_states [1, U, H], cosine and sine [1, U, D] with equal halves; `kwargs` go on to `attend`, the packing
        among them. Returns [1, U, H] and no attention weights."""
        from liger_kernel.ops import LigerRopeFunction  # pyright: ignore[reportMissingImports]

        assert past_key_values is None
        heads = (*hidden_states.shape[:-1], -1, self._head_dim)
        q, k, v = (project(hidden_states).view(heads) for project in (self.q_proj, self.k_proj, self.v_proj))
        if self._has_norms:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        q, k = LigerRopeFunction.apply(q, k, *position_embeddings)
        limits = {"scaling": self._scaling, "sliding_window": self._sliding_window}
        out, _ = attention.attend(self, q, k, v, **limits, **kwargs)
        return self.o_proj(out.flatten(2)), None
