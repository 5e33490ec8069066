"""What the planner knows of a model: a frozen record of sizes, from config.json alone. Imports no torch.

The parameter counts are closed formulas for the families in FAMILIES; any other class is counted on torch's meta
device (`count_on_meta`), which needs transformers and seconds, but neither memory nor weights.

A block, H hidden, I intermediate, Q and K query and key-value heads of D each:

    q, o  2 H Q D    k, v  2 H K D    gate, up, down  3 H I    two norms  2 H    and the family's biases, head norms
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastgrpo.errors import UserError
from fastgrpo.hub import read_model_config


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Example: Qwen2.5-7B has 28 layers of 233,057,792 parameters and 1,089,998,336 outside of them."""

    family: str  # model_type in config.json
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    positions: int  # tokens that the model reads at most
    block_parameters: int  # of one layer
    outer_parameters: int  # embedding, last norm and output layer; a tied matrix counts once
    normed_heads: bool  # queries and keys are normed before attention

    @property
    def parameters(self) -> int:
        return self.layers * self.block_parameters + self.outer_parameters

    @property
    def head_parameters(self) -> int:
        """Of the output layer's matrix [vocab, hidden]."""
        return self.vocab * self.hidden

    @property
    def mlp_parameters(self) -> int:
        """Of one layer's gated MLP."""
        return 3 * self.hidden * self.intermediate

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    def kv_bytes_per_token(self, element_bytes: int, tp: int = 1) -> int:
        """Keys and values of all layers on one of `tp` ranks. Heads are repeated when there are fewer than ranks."""
        return 2 * self.layers * max(1, self.kv_heads // tp) * self.head_dim * element_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """How a family departs from the formula above. A text names the key of config.json that decides; absent: no."""

    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    normed: str | None = None  # "head": q and k normed head by head; "row": over all heads at once
    tied: bool = False  # when config.json does not say


FAMILIES: dict[str, _Family] = {
    "llama": _Family(qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias"),
    "granite": _Family(qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias"),
    "smollm3": _Family(qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias", tied=True),
    "mistral": _Family(),
    "phi3": _Family(),  # its fused matrices have the same sizes together
    "qwen2": _Family(qkv_bias=True),
    "qwen3": _Family(qkv_bias="attention_bias", output_bias="attention_bias", normed="head"),
    "olmo2": _Family(qkv_bias="attention_bias", output_bias="attention_bias", normed="row"),
}


def read_sizes(folder: Path, *, trust_remote_code: bool = False) -> ModelSizes:
    """Of the model whose config.json lies in `folder`. Raises UserError when the file does not describe one."""
    file = folder / "config.json"
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}") from error
    if isinstance(document, dict) and document.get("model_type") in FAMILIES:
        return sizes_from_document(document, str(file))
    return count_on_meta(folder, trust_remote_code=trust_remote_code)


def sizes_from_document(document: Mapping[str, Any], where: str = "config.json") -> ModelSizes:
    """The closed formulas. `document` is a config.json of one of FAMILIES; `where` names it in the UserError about
    what it lacks."""
    family = FAMILIES[document["model_type"]]

    def number(key: str) -> int:
        value = document.get(key)
        if type(value) is not int or value < 1:
            raise UserError(f"{where}: {key} is {value!r}, no positive whole number; is it a model's config.json?")
        return value

    def has(switch: bool | str) -> bool:
        return bool(document.get(switch, False)) if isinstance(switch, str) else switch

    hidden, inner, heads = number("hidden_size"), number("intermediate_size"), number("num_attention_heads")
    kv_heads = number("num_key_value_heads")
    head_dim = document.get("head_dim") or hidden // heads
    q, kv, vocab = heads * head_dim, kv_heads * head_dim, number("vocab_size")
    block = 2 * hidden * (q + kv) + 3 * hidden * inner + 2 * hidden
    block += (q + 2 * kv) * has(family.qkv_bias) + hidden * has(family.output_bias)
    block += (2 * inner + hidden) * has(family.mlp_bias)
    block += {None: 0, "head": 2 * head_dim, "row": q + kv}[family.normed]
    tied = document.get("tie_word_embeddings", family.tied)
    return ModelSizes(
        family=document["model_type"],
        layers=number("num_hidden_layers"),
        hidden=hidden,
        intermediate=inner,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=vocab,
        positions=number("max_position_embeddings"),
        block_parameters=block,
        outer_parameters=vocab * hidden * (1 if tied else 2) + hidden,
        normed_heads=family.normed is not None,
    )


def count_on_meta(folder: Path, *, trust_remote_code: bool = False) -> ModelSizes:
    """The same by counting: for classes that no formula above describes. Seconds, no weights, no memory."""
    import torch
    from transformers import AutoModelForCausalLM

    config: Any = read_model_config(folder, "model.path", trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    layers = list(lm.get_decoder().layers)
    in_blocks = sum(parameter.numel() for layer in layers for parameter in layer.parameters())
    heads = config.num_attention_heads
    return ModelSizes(
        family=config.model_type,
        layers=len(layers),
        hidden=config.hidden_size,
        intermediate=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocab=config.vocab_size,
        positions=config.max_position_embeddings,
        block_parameters=in_blocks // len(layers),
        outer_parameters=sum(parameter.numel() for parameter in lm.parameters())
        - in_blocks // len(layers) * len(layers),
        normed_heads=any("q_norm" in name for name, _ in layers[0].named_modules()),
    )
