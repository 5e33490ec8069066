"""What the formulas of memory.py are fed with: frozen records of sizes, read off the configuration once.

RunConfig, Layout, Sizes  -->  Job (what is given)  +  Settings (what the plan may choose)  -->  memory.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastgrpo.config import Dtype, HeadImpl, Layout, RunConfig, compute_dtype
from fastgrpo.plan import constants as k
from fastgrpo.plan.sizes import ModelSizes

_WIDTH = {"bfloat16": 2, "float32": 4}
_LIGER_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # whose modules policy/liger.py exchanges


@dataclass(frozen=True, slots=True)
class Sizes:
    """The models of a run. `reference` is that of ref.path, or the policy's own; None where no KL term asks for one."""

    model: ModelSizes
    reference: ModelSizes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The options that are the plan's to choose when they are null."""

    max_tokens_per_gpu: int
    head_chunk_bytes: int
    gradient_checkpointing: int
    activation_offload: bool
    mlp_slices: int
    reshard_after_forward: bool
    offload_policy: bool
    offload_optimizer: bool
    offload_during_rollout: bool
    ref_offload_policy: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One rank's share of a run on CUDA. Widths are bytes of an element."""

    model: ModelSizes
    reference: ModelSizes | None
    world: int
    ranks_per_node: int
    shard: int
    sp: int
    tp: int
    longest: int  # tokens, prompt and response
    most_tokens: int  # that a rank can have in one forward, whatever the budget
    most_is_an_update: bool  # with a budget of most_tokens an update is one micro-batch, however long its sequences are
    step_tokens: int  # of all sequences of a step at their longest
    wanted_sequences: int  # that an engine would draw at once
    max_num_seqs: int
    max_model_len: int
    prefill_tokens: int
    compute_width: int
    engine_width: int
    reference_width: int
    liger: bool  # fused RMSNorm, SwiGLU and rotary embedding
    varlen: bool  # attention on packed rows without padding
    repeatable: bool  # trainer.deterministic
    reference_head: bool  # actor.head: the chunked torch form instead of the kernels
    entropy_gradient: bool
    own_engine: bool  # rollout.name=hf: its weights stay on the device
    graphs: bool
    engine_copy: bool  # sleep level 1: the sleeping engine's weights lie in host memory
    fixed_kv_bytes: int | None  # rollout.kv_cache_gib
    peak_flops: float = k.A100_TFLOPS * 1e12
    host_bytes: int | None = None  # of a node, trainer.host_memory_gib; None: nobody said
    lora_rank: int = 0
    adapted: tuple[tuple[int, int], ...] = ()  # inputs and outputs of each linear layer of a block that has adapters

    @classmethod
    def of(cls, config: RunConfig, sizes: Sizes, layout: Layout) -> Job:
        actor, rollout = config.actor, config.rollout
        compute = compute_dtype(actor.dtype, "cuda")
        engine = compute if rollout.dtype == Dtype["auto"] else str(rollout.dtype)
        reference = compute if config.ref.dtype == Dtype["auto"] else str(config.ref.dtype)
        sequences = layout.max_sequences_per_micro_batch or layout.sequences_per_rank_and_update
        return cls(
            model=sizes.model,
            reference=sizes.reference,
            world=layout.world,
            ranks_per_node=layout.ranks_per_node,
            shard=layout.shard,
            sp=layout.sp,
            tp=layout.tp,
            longest=layout.max_sequence_tokens,
            most_tokens=-(-sequences * layout.max_sequence_tokens // layout.sp),
            most_is_an_update=layout.dp == 1 and layout.max_sequences_per_micro_batch is None,
            step_tokens=layout.sequences_per_step * layout.max_sequence_tokens,
            wanted_sequences=min(rollout.max_num_seqs, -(-layout.sequences_per_step // layout.engines)),
            max_num_seqs=rollout.max_num_seqs,
            max_model_len=layout.max_model_len,
            prefill_tokens=rollout.max_num_batched_tokens,
            compute_width=_WIDTH[compute],
            engine_width=_WIDTH[engine],
            reference_width=_WIDTH[reference],
            liger=actor.use_liger and not actor.use_torch_compile and sizes.model.family in _LIGER_FAMILIES,
            varlen=compute == "bfloat16" and actor.attention != "sdpa",
            repeatable=config.trainer.deterministic,
            reference_head=actor.head == HeadImpl["reference"],
            entropy_gradient=actor.entropy_coeff != 0 or actor.head == HeadImpl["reference"],
            own_engine=rollout.name == "hf",
            graphs=not rollout.enforce_eager,
            engine_copy=rollout.sleep_level == 1,
            fixed_kv_bytes=None if rollout.kv_cache_gib is None else int(rollout.kv_cache_gib * (1 << 30)),
            peak_flops=(config.trainer.peak_tflops or k.A100_TFLOPS) * 1e12,
            host_bytes=None
            if config.trainer.host_memory_gib is None
            else int(config.trainer.host_memory_gib * (1 << 30)),
            lora_rank=config.model.lora_rank,
            adapted=adapted_layers(config.model.target_modules, sizes.model) if config.model.lora_rank else (),
        )

    @property
    def block_trained(self) -> int:
        """Parameters of a block that have a master, a gradient and AdamW's moments."""
        if not self.lora_rank:
            return self.model.block_parameters
        return self.lora_rank * sum(inputs + outputs for inputs, outputs in self.adapted)

    @property
    def outer_trained(self) -> int:
        return 0 if self.lora_rank else self.model.outer_parameters

    @property
    def trained(self) -> int:
        return self.model.layers * self.block_trained + self.outer_trained

    @property
    def frozen(self) -> int:
        """Parameters beside adapters, in the compute dtype."""
        return self.model.parameters if self.lora_rank else 0

    @property
    def block_whole(self) -> int:
        """Parameters that are gathered for a block."""
        return self.model.block_parameters + (self.block_trained if self.lora_rank else 0)

    @property
    def least_budget(self) -> int:
        """Tokens a rank, so that the longest sequence fits into a row."""
        return -(-self.longest // self.sp)


def adapted_layers(targets: Sequence[str], model: ModelSizes) -> tuple[tuple[int, int], ...]:
    """Inputs and outputs of the linear layers of a block that `model.target_modules` names. A name that is not one of
    the seven usual ones counts as the widest of them."""
    hidden, inner, q, kv = model.hidden, model.intermediate, model.query_width, model.kv_width
    layers = {
        "q_proj": (hidden, q),
        "k_proj": (hidden, kv),
        "v_proj": (hidden, kv),
        "o_proj": (q, hidden),
        "gate_proj": (hidden, inner),
        "up_proj": (hidden, inner),
        "down_proj": (inner, hidden),
    }
    if list(targets) == ["all-linear"]:
        return tuple(layers.values())
    return tuple(layers.get(target.rpartition(".")[2], (hidden, inner)) for target in targets)
