"""Bytes of one GPU, and of one host, at their peaks. Pure functions of (Job, Settings); no torch.

Notation: P parameters, S ranks of a shard, c bytes of the compute dtype, U tokens of a rank's micro-batch, R of them
through the head, H hidden, V vocabulary, I intermediate, q and k widths of queries and of keys (= values).

Training is at its highest at one of these moments, and the plan is the largest of them:

    head      end of the forward: every kept activation, and the buffers of the logits
    backward  one block's activations again, its gradients on their way through the reduce-scatter
    first     the same of the first block, when an update is one micro-batch: that has no gradients before its backward,
              and all of them when hardly an activation is left
    outer     the reduce-scatter of embedding and output layer, everything else gone
    scoring   a forward of the reference, without gradients
    update    AdamW with offload_optimizer: its moments visit the device, those of embedding and output layer last

All count what torch calls allocated. What lies outside of it (CUDA's context, NCCL, the sleeping engine) is
`overhead`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fastgrpo.host_memory import pinned
from fastgrpo.plan import constants as k
from fastgrpo.plan.job import Job, Settings
from fastgrpo.plan.sizes import ModelSizes

SAVE = "a save"  # a part of the host's peak


@dataclass(frozen=True, slots=True)
class Peak:
    """What is live at one moment, by kind."""

    moment: str
    parts: tuple[tuple[str, int], ...]

    @property
    def total(self) -> int:
        return sum(size for _, size in self.parts)


def training_peak(job: Job, settings: Settings) -> Peak:
    """The largest of the moments."""
    return max(training_moments(job, settings), key=lambda peak: peak.total)


def training_moments(job: Job, settings: Settings) -> list[Peak]:
    """Every moment that the training phase of this job has."""
    state = [
        *trainer_state(job, settings),
        ("frozen weights", frozen_state(job, settings)),
        ("reference", reference_state(job, settings)),
    ]
    with_gradients = [*state, ("gradients", gradient_shards(job, settings))]
    alone = job.most_is_an_update and settings.max_tokens_per_gpu >= job.most_tokens
    before = state if alone else with_gradients
    moments = [
        Peak("head", (*before, *_at_head(job, settings))),
        Peak("backward", (*before, *_at_backward(job, settings))),
        Peak("outer", (*with_gradients, ("gradients being reduced", _reduced(job, job.outer_trained)))),
    ]
    if alone:
        moments.append(Peak("first", (*with_gradients, *_at_first_block(job, settings))))
    if settings.offload_optimizer:
        moments.append(Peak("update", (*with_gradients, ("AdamW's visits", _visits(job)))))
        moments.append(Peak("last visit", (*state, *_at_last_visit(job))))
    if job.reference is not None:
        moments.append(Peak("scoring", (*state, *_at_scoring(job, settings, job.reference))))
    return moments


def trainer_state(job: Job, settings: Settings) -> tuple[tuple[str, int], ...]:
    """Masters and both moments of AdamW on the device, 12 P / S of what is trained; without the moments a third."""
    master = k.MASTER * job.trained
    if settings.offload_optimizer:
        return (("masters", _sharded(job, master)),)
    return (("masters and AdamW", 0 if settings.offload_policy else _sharded(job, (1 + k.ADAMW_STATES) * master)),)


def frozen_state(job: Job, settings: Settings) -> int:
    """The model beside its adapters: c P / S. Neither gradients nor moments."""
    return 0 if settings.offload_policy else _sharded(job, job.compute_width * job.frozen)


def gradient_shards(job: Job, settings: Settings) -> int:
    """4 P / S, from the first backward to the update. With offload_policy each leaves for the host as it is made."""
    return 0 if settings.offload_policy else _sharded(job, k.MASTER * job.trained)


def reference_state(job: Job, settings: Settings) -> int:
    if job.reference is None or settings.ref_offload_policy:
        return 0
    return _sharded(job, job.reference_width * job.reference.parameters)


def _at_head(job: Job, settings: Settings) -> tuple[tuple[str, int], ...]:
    model, tokens = job.model, row_tokens(job, settings)
    in_flight = 1 if job.shard > 1 else 0  # the last block's gathering buffer
    blocks = in_flight if settings.reshard_after_forward else model.layers
    return (
        ("gathered weights", job.compute_width * (model.outer_parameters + blocks * job.block_whole)),
        ("activations", kept_activations(job, settings)),
        ("head", head_bytes(job, tokens, settings.head_chunk_bytes)),
    )


def _at_backward(job: Job, settings: Settings) -> tuple[tuple[str, int], ...]:
    model, tokens, c = job.model, row_tokens(job, settings), job.compute_width
    every = settings.gradient_checkpointing
    # Blocks 0, k, 2k, ... are recomputed; when the last of them is, the whole ones behind it have been freed.
    whole_behind = (model.layers - 1) % every if every else 0
    own_input = c * model.hidden  # kept already
    recomputed = block_activations(job, settings) - own_input if every and not whole_behind else 0
    return (
        ("activations", kept_activations(job, settings)),
        ("a block's backward", tokens * recomputed + _block_scratch(job, settings)),
        *_beside_a_backward(job, settings),
    )


def _at_first_block(job: Job, settings: Settings) -> tuple[tuple[str, int], ...]:
    activations = row_tokens(job, settings) * block_activations(job, settings)
    return (
        ("a block's backward", activations + _block_scratch(job, settings)),
        *_beside_a_backward(job, settings),
    )


def _beside_a_backward(job: Job, settings: Settings) -> tuple[tuple[str, int], ...]:
    model, c = job.model, job.compute_width
    alone = k.GATHERED_BLOCKS_ALONE if job.shard == 1 else k.GATHERED_BLOCKS
    blocks = alone if settings.reshard_after_forward else model.layers
    return (
        ("gathered weights", c * (model.outer_parameters + blocks * job.block_whole)),
        ("gradients being reduced", (c + k.REDUCED) * job.block_trained),  # its own, the block's before it
        ("head's gradient", 0 if job.lora_rank else c * model.head_parameters),
    )


def _visits(job: Job) -> int:
    """AdamW's moments on the device while blocks are stepped: what a visit has room for, or a matrix that has more."""
    matrix = job.model.intermediate * job.model.hidden if not job.lora_rank else 0
    return k.ADAMW_VISITS * max(k.ADAMW_VISIT, _sharded(job, k.MASTER * k.ADAMW_STATES * matrix))


def _at_last_visit(job: Job) -> tuple[tuple[str, int], ...]:
    """Embedding and output layer are stepped last, when the other gradients are gone."""
    outer = _sharded(job, k.MASTER * job.outer_trained)
    return (("gradients", outer), ("AdamW's visits", _visits(job) + k.ADAMW_STATES * outer))


def _at_scoring(job: Job, settings: Settings, reference: ModelSizes) -> tuple[tuple[str, int], ...]:
    tokens, c = row_tokens(job, settings), job.reference_width
    blocks = k.GATHERED_BLOCKS_ALONE if job.shard == 1 else k.GATHERED_BLOCKS
    widest = c * tokens * (3 * reference.intermediate + 3 * reference.hidden)
    head = head_bytes(replace(job, model=reference, compute_width=c), tokens, settings.head_chunk_bytes)
    return (
        ("gathered weights", c * (reference.outer_parameters + blocks * reference.block_parameters)),
        ("activations", max(widest, head - (k.LOGITS + c) * reference.head_parameters)),  # no gradients
    )


def row_tokens(job: Job, settings: Settings) -> int:
    """U: the budget, or all that there is."""
    return min(settings.max_tokens_per_gpu, job.most_tokens)


def kept_activations(job: Job, settings: Settings) -> int:
    """From the forward to the backward: the input of each recomputed block, everything of the others, and the last
    norm's input and output."""
    model, every = job.model, settings.gradient_checkpointing
    recomputed = -(-model.layers // every) if every else 0
    inputs = min(recomputed, k.OFFLOADED_IN_FLIGHT) if settings.activation_offload else recomputed
    width = inputs * model.hidden * job.compute_width + (model.layers - recomputed) * block_activations(job, settings)
    return row_tokens(job, settings) * (width + _norm_activations(job, model.hidden))


def block_activations(job: Job, settings: Settings) -> int:
    """Bytes a token that one block keeps for its backward.

    Two norms (input, output), the attention's q, k, v and output, the MLP's gate, up and product (nothing of its inside
    when it is sliced); without liger the MLP keeps silu(gate) too and a norm a float32 copy. SDPA gathers q, k, v and
    output into padded buckets, keys and values repeated to the query heads."""
    model, c = job.model, job.compute_width
    q, kv = model.query_width, model.kv_width * max(1, job.sp // model.kv_heads)
    attention = 2 * q + 2 * kv if job.varlen else int(4 * q * k.SDPA_PADDING) + q
    mlp = _mlp_activations(job) if settings.mlp_slices == 1 else 0
    heads = _norm_activations(job, q + kv) - c * (q + kv) if model.normed_heads else 0  # their outputs are q and k
    softmax_sums = 4 * model.heads
    attention += job.lora_rank * len(job.adapted)  # each A x
    return 2 * _norm_activations(job, model.hidden) + c * attention + mlp + heads + softmax_sums


def _norm_activations(job: Job, width: int) -> int:
    """Bytes a token of an RMSNorm over `width`: input and output; transformers' own keeps its float32 input and, for
    the weight's gradient, the normed value before the weight."""
    c = job.compute_width
    if job.liger:
        return 2 * c * width
    return (4 + (1 if job.lora_rank else 2) * c) * width


def _mlp_activations(job: Job) -> int:
    """Bytes a token of an MLP's inside."""
    return job.compute_width * (3 if job.liger else 4) * job.model.intermediate


def _block_scratch(job: Job, settings: Settings) -> int:
    """Of the MLP's backward or of the attention's, which follow one another."""
    return max(backward_scratch(job, settings), repeatable_scratch(job, settings))


def repeatable_scratch(job: Job, settings: Settings) -> int:
    """Bytes of flash attention's deterministic backward; 0 without. Its thread blocks may not add to one gradient of
    the queries, so there are as many float32 copies of it as it takes to keep the device busy with B sequences of the
    heads that a rank has: ceil(processors / (B heads / sp)), with 128 rows of padding a sequence and heads of multiples
    of 32 (mha_varlen_bwd of flash-attn 2, which torch carries too). For packs of sequences at their longest."""
    if not (job.varlen and job.repeatable):
        return 0
    packed, heads = row_tokens(job, settings) * job.sp, -(-job.model.heads // job.sp)
    sequences = max(1, packed // job.longest)
    copies = -(-k.PROCESSORS // (sequences * heads))
    return copies * 4 * (packed + 128 * sequences) * heads * 32 * -(-job.model.head_dim // 32)


def backward_scratch(job: Job, settings: Settings) -> int:
    """Bytes that the widest point of a block's backward, its MLP, adds to the block's activations: gradients of
    product, gate and up, with the product freed (liger writes the last two over their values), and of the hidden
    states. Beside frozen weights one gradient of the inside less is alive (seen on the CPU). Of a sliced MLP: one slice
    with its inside, and the weights' gradients summed in float32."""
    model, c, tokens = job.model, job.compute_width, row_tokens(job, settings)
    inside = c * (1 if job.liger or job.lora_rank else 2) * model.intermediate
    hidden = 2 * c * model.hidden * tokens
    if settings.mlp_slices == 1:
        return inside * tokens + hidden
    part = -(-tokens // settings.mlp_slices)
    summed = min(model.mlp_parameters, job.block_trained)
    return hidden + part * (inside + _mlp_activations(job)) + k.REDUCED * summed


def chunk_rows(vocab: int, chunk_bytes: int, rows: int) -> int:
    """Rows of a chunk in the head's reference form: its own cut, and no more than there are."""
    cut = max(1, chunk_bytes // (k.LOGITS * vocab))
    return min(rows, cut if cut < k.HEAD_ROW_MULTIPLE else cut - cut % k.HEAD_ROW_MULTIPLE)


def head_bytes(job: Job, rows: int, chunk_bytes: int) -> int:
    """The loss head's own memory over `rows` rows: hidden states and their gradient, the weight's gradient in float32,
    and the larger of its working buffers and, in the backward, that gradient's copy in the compute dtype."""
    model, c = job.model, job.compute_width
    working = (_reference_buffers if job.reference_head else _kernel_buffers)(job, rows, chunk_bytes)
    if job.lora_rank:  # a frozen head
        return 2 * c * rows * model.hidden + working
    return 2 * c * rows * model.hidden + k.LOGITS * model.head_parameters + max(working, c * model.head_parameters)


def _kernel_buffers(job: Job, rows: int, chunk_bytes: int) -> int:
    """fastgrpo_kernels/_sweep.py: what chunk_bytes allows, or what these rows need: a row of D in the compute dtype and
    one of H in float32 each, and 1,024 rows of float32 logits. At least 256 rows a chunk."""
    row = job.compute_width * job.model.vocab + k.LOGITS * job.model.hidden
    logits = k.LOGITS * job.model.vocab * min(rows, k.HEAD_SUB_ROWS)
    return min(max(chunk_bytes, k.HEAD_ROW_MULTIPLE * row), rows * row + logits)


def _reference_buffers(job: Job, rows: int, chunk_bytes: int) -> int:
    """actor.head=reference: float32 buffers [C, V] of a chunk, two, or three when the entropy has a gradient; all but
    one of the chunk before; and the logits' gradient in the compute dtype if that is narrower."""
    c, chunk = job.compute_width, chunk_rows(job.model.vocab, chunk_bytes, rows)
    live = 3 if job.entropy_gradient else 2
    left = live - 1 if chunk < rows else 0
    return chunk * job.model.vocab * (k.LOGITS * (live + left) + (c if c < k.LOGITS else 0))


def _reduced(job: Job, parameters: int) -> int:
    """Gradients of one FSDP unit in the compute dtype, the float32 copy that is reduced, the shard that comes out."""
    return parameters * (job.compute_width + k.REDUCED) + _sharded(job, k.REDUCED * parameters)


def _sharded(job: Job, size: int) -> int:
    return -(-size // job.shard)


# ---- the engine


def overhead(job: Job) -> int:
    """On the device beside torch's tensors while the policy trains."""
    engine = k.ENGINE_ASLEEP if job.graphs else k.ENGINE_ASLEEP_EAGER
    return _base(job) + (engine_weights(job) if job.own_engine else engine)


def _base(job: Job) -> int:
    return k.CUDA_CONTEXT + (k.NCCL if job.world > 1 else 0)


def engine_weights(job: Job) -> int:
    return job.engine_width * job.model.parameters // job.tp


def kept_by_torch(job: Job, training: Peak) -> int:
    """Beyond its tensors, from a training with this peak. An engine that shares torch's memory uses it."""
    return 0 if job.own_engine else int(k.KEPT_BY_TORCH * training.total)


def rollout_peak(job: Job, settings: Settings, kv_bytes: int, kept: int = 0) -> Peak:
    """Engine awake, all of its cache taken. `kept`: see `kept_by_torch`."""
    parked = settings.offload_during_rollout
    return Peak(
        "rollout",
        (
            *((name, 0 if parked else size) for name, size in trainer_state(job, settings)),
            ("frozen weights", frozen_state(job, settings)),
            ("reference", reference_state(job, settings)),
            *_engine(job),
            ("kept by torch", kept),
            ("KV cache", kv_bytes),
        ),
    )


def sync_peak(job: Job, settings: Settings, kept: int = 0) -> Peak:
    """Weights on their way into the engine, the largest FSDP unit gathered; its cache not yet awake. `kept`: see
    `kept_by_torch`."""
    model = job.model
    unit = max(model.outer_parameters, model.block_parameters) * job.compute_width
    return Peak(
        "sync",
        (
            *trainer_state(job, settings),
            ("frozen weights", frozen_state(job, settings)),
            ("reference", reference_state(job, settings)),
            *_engine(job),
            ("kept by torch", kept),
            ("gathered weights", unit * (1 if job.shard == 1 else 2)),
            ("merging", max((i * o for i, o in job.adapted), default=0) * (k.MERGING + job.compute_width)),
        ),
    )


def _engine(job: Job) -> tuple[tuple[str, int], ...]:
    model, e = job.model, job.engine_width
    prefill = job.prefill_tokens * e * (2 * model.intermediate // job.tp + 3 * model.hidden)
    logits = job.max_num_seqs * model.vocab * k.LOGITS * k.ENGINE_LOGIT_COPIES
    awake = 0 if job.own_engine else k.ENGINE_AWAKE if job.graphs else k.ENGINE_ASLEEP_EAGER
    return (
        ("engine weights", engine_weights(job)),
        ("engine workspace", awake + prefill + logits),
        ("CUDA and NCCL", _base(job)),
    )


def sequence_bytes(job: Job) -> int:
    """Cache of one sequence at its longest, whole blocks of it."""
    blocks = -(-job.max_model_len // k.KV_BLOCK_TOKENS)
    return blocks * k.KV_BLOCK_TOKENS * job.model.kv_bytes_per_token(job.engine_width, job.tp)


def pinned_state(job: Job, settings: Settings) -> int:
    """Masters, AdamW's moments and, with offload_policy, gradients and frozen weights of a node's ranks, where they
    leave for its host: no rounding. Pinned memory is never swapped."""
    everything, parked = settings.offload_policy, settings.offload_during_rollout
    masters, moments = everything or parked, everything or parked or settings.offload_optimizer
    state = k.MASTER * (masters + k.ADAMW_STATES * moments + everything) * job.trained
    state += job.compute_width * job.frozen if everything else 0
    return job.ranks_per_node * _sharded(job, state)


def hosted_state(job: Job, settings: Settings) -> int:
    """`pinned_state` as it is pinned: what FSDP2 and the parking ask of torch rounded up, AdamW's moments at home there
    (policy/pinned.py) as large as they are."""
    state = pinned_state(job, settings)
    moments = k.MASTER * k.ADAMW_STATES * job.trained if settings.offload_optimizer else 0
    moments = job.ranks_per_node * _sharded(job, moments)
    return moments + int(pinned_rounding(job, job.model, k.MASTER) * (state - moments))


def pinned_rounding(job: Job, model: ModelSizes, width: int) -> float:
    """What torch pins of this model's shards over their bytes, each of its matrices rounded up; `width`: bytes of an
    element. FSDP2 cuts a matrix by its rows."""
    hidden, inner, q, kv = model.hidden, model.intermediate, model.query_width, model.kv_width
    block = ((q, hidden), (kv, hidden), (kv, hidden), (hidden, q), (inner, hidden), (inner, hidden), (hidden, inner))
    outer = max(1, model.outer_parameters // model.head_parameters)
    # Each shape once with its number: this is asked for every combination that choose() weighs.
    shapes = [*((model.layers, *shape) for shape in block), (outer, model.vocab, hidden)]
    sizes = [(number, width * columns * -(-rows // job.shard)) for number, rows, columns in shapes]
    return sum(number * pinned(size) for number, size in sizes) / sum(number * size for number, size in sizes)


def host_peak(job: Job, settings: Settings) -> Peak:
    """Of one node: its ranks' processes, what the options keep in host memory, and the buffer of a save."""
    offloaded = -(-job.model.layers // settings.gradient_checkpointing) if settings.gradient_checkpointing else 0
    inputs, ranks, reference = row_tokens(job, settings) * job.model.hidden * job.compute_width, job.ranks_per_node, 0
    if job.reference and settings.ref_offload_policy:
        rounding = pinned_rounding(job, job.reference, job.reference_width)
        reference = int(ranks * rounding * _sharded(job, job.reference_width * job.reference.parameters))
    return Peak(
        "host",
        (
            ("processes", ranks * k.PROCESS_HOST),
            (SAVE, k.SAVE_BUFFER),
            ("rollouts", ranks * k.EXCHANGED_TOKEN * job.step_tokens),
            ("masters and AdamW", hosted_state(job, settings)),
            ("reference", reference),
            ("activations", ranks * offloaded * pinned(inputs) if settings.activation_offload else 0),
            ("engine weights", ranks * engine_weights(job) if job.engine_copy else 0),
        ),
    )
