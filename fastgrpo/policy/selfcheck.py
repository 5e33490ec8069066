"""Does packing fit this model class? Asked once at start, of a tiny model of the same class.

Two short sequences packed into one row must give the logits that transformers gives them one at a time. A model whose
attention or forward does something that packed rows do not carry (a mask, a state that crosses tokens) fails here, with
its name, instead of training on wrong numbers.
"""

from __future__ import annotations

import copy

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from fastgrpo.errors import UserError
from fastgrpo.policy import attention

_TOLERANCE = 1e-3  # of the logits' standard deviation


def check_packing(config: PretrainedConfig, *, trust_remote_code: bool = False) -> None:
    """Raises UserError naming the model class when packed and separate logits differ."""
    name = type(config).__name__.removesuffix("Config")
    if not hasattr(config, "num_attention_heads"):
        raise UserError(f"{name} has no attention heads: fastgrpo trains decoders with attention.")
    tiny = _tiny(config)
    generator = torch.Generator().manual_seed(0)
    lengths = (7, 4)
    ids = [torch.randint(0, tiny.vocab_size, (length,), generator=generator) for length in lengths]
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        try:
            plain = _build(tiny, "eager", trust_remote_code)
        except ValueError as error:
            reason = str(error).partition("\n")[0]
            raise UserError(
                f"{name}: transformers builds no causal language model of it: {reason} If the model brings code of its "
                "own that you trust, set model.trust_remote_code=true"
            ) from error
        if not (plain._supports_attention_backend and hasattr(plain.get_decoder(), "layers")):
            raise UserError(
                f"{name}: fastgrpo trains decoders that take their attention from transformers' AttentionInterface and "
                "keep their blocks in `layers`; this class does not."
            )
        _spread_out(plain)
        packed = _build(tiny, attention.NAME, trust_remote_code)
        packed.load_state_dict(plain.state_dict())
        expected = torch.cat([plain(input_ids=row[None], use_cache=False).logits[0] for row in ids])
        cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
        packing = attention.make_packing(cu_seqlens, max(lengths), attention.sdpa, None, torch.device("cpu"))
        positions = torch.cat([torch.arange(length) for length in lengths])
        try:
            actual = packed(
                input_ids=torch.cat(ids)[None], position_ids=positions[None], use_cache=False, packing=packing
            ).logits[0]
        except TypeError as error:
            raise UserError(
                f"{name}: its attention does not take packed sequences ({error}); not supported."
            ) from error
    gap = float((actual - expected).abs().max() / expected.std())
    if not gap < _TOLERANCE:
        raise UserError(
            f"{name}: packed sequences give other logits than separate ones (difference {gap:.2g} of their spread, in "
            "float32), so its forward does something that packing does not carry; not supported."
        )


def _spread_out(model: PreTrainedModel) -> None:
    """Weights so large that attention prefers some tokens by far. With fresh ones it is all but uniform: a wrong scale,
    or a bias by distance, would hide within the tolerance."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=2 * parameter.shape[-1] ** -0.5)
        else:
            parameter.add_(0.1 * torch.randn_like(parameter))


def _build(config: PretrainedConfig, attn: str, trust_remote_code: bool) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(
        copy.deepcopy(config), dtype=torch.float32, attn_implementation=attn, trust_remote_code=trust_remote_code
    ).eval()


def _tiny(config: PretrainedConfig) -> PretrainedConfig:
    """The same class with two layers at most and few heads; head size and everything that defines the maths stay."""
    tiny = copy.deepcopy(config)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    grouped = getattr(config, "num_key_value_heads", config.num_attention_heads) < config.num_attention_heads
    changes = {
        "num_hidden_layers": min(2, config.num_hidden_layers),
        "num_attention_heads": 4,
        "num_key_value_heads": 2 if grouped else 4,
        "hidden_size": 4 * head_dim,
        "intermediate_size": 4 * head_dim,
        "vocab_size": 64,
        "pad_token_id": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    for name, value in changes.items():
        setattr(tiny, name, value)
    if getattr(tiny, "layer_types", None):
        tiny.layer_types = list(config.layer_types[:2])
    return tiny
