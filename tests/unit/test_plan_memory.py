"""The planner's maths: sizes against real models on the meta device, bytes against closed forms, monotonicity."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fastgrpo.errors import UserError
from fastgrpo.plan import constants as k
from fastgrpo.plan.job import Job, Settings, adapted_layers
from fastgrpo.plan.memory import (
    block_activations,
    chunk_rows,
    head_bytes,
    host_peak,
    hosted_state,
    kept_activations,
    pinned_rounding,
    pinned_state,
    repeatable_scratch,
    rollout_peak,
    sequence_bytes,
    sync_peak,
    training_moments,
    training_peak,
)
from fastgrpo.plan.sizes import FAMILIES, ModelSizes, count_on_meta, read_sizes, sizes_from_document
from fastgrpo.policy.lora import Lora, add_adapters
from fastgrpo_kernels._chunks import DEFAULT_CHUNK_BYTES_CUDA, rows_per_chunk

SHAPES = Path(__file__).parents[2] / "bench" / "shapes"
TINY = {
    "vocab_size": 1000,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def meta_model(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


# ---- sizes


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("tied", "extra"),
    [(False, {}), (True, {"attention_bias": True, "mlp_bias": True}), (True, {"head_dim": 48})],
)
def test_parameters_are_those_of_the_real_model(family: str, tied: bool, extra: dict[str, Any]) -> None:
    """Both from a full config.json and from one that leaves out the defaults, as save_pretrained writes it."""
    config = AutoConfig.for_model(family, tie_word_embeddings=tied, **TINY, **extra)
    model = meta_model(config)
    for document in (config.to_dict(), config.to_diff_dict()):
        sizes = sizes_from_document(json.loads(json.dumps(document, default=str)))
        assert sizes.parameters == sum(p.numel() for p in model.parameters())
        assert sizes.block_parameters == sum(p.numel() for p in model.get_decoder().layers[1].parameters())


@pytest.mark.parametrize(
    ("name", "parameters", "kv_bytes"),
    [
        ("Qwen2.5-7B-Instruct", 7_615_616_512, 57_344),  # 2 x 28 layers x 4 heads x 128 x 2 bytes
        ("Qwen2.5-1.5B-Instruct", 1_543_714_304, 28_672),
        ("Qwen2.5-0.5B-Instruct", 494_032_768, 12_288),
        ("Qwen2-0.5B-Instruct", 494_032_768, 12_288),
        ("Qwen3-8B", 8_190_735_360, 147_456),
        ("SmolLM2-135M-Instruct", 134_515_008, 23_040),
    ],
)
def test_published_models(name: str, parameters: int, kv_bytes: int) -> None:
    sizes = read_sizes(SHAPES / name)
    assert sizes.parameters == parameters
    assert sum(p.numel() for p in meta_model(AutoConfig.from_pretrained(SHAPES / name)).parameters()) == parameters
    assert sizes.kv_bytes_per_token(2) == kv_bytes
    heads = sizes.kv_heads
    assert sizes.kv_bytes_per_token(2, tp=heads) == sizes.kv_bytes_per_token(2, tp=4 * heads) == kv_bytes // heads


def test_a_class_without_a_formula_is_counted(tmp_path: Path) -> None:
    config = AutoConfig.for_model("gemma2", head_dim=32, **TINY)
    config.architectures = ["Gemma2ForCausalLM"]
    config.save_pretrained(tmp_path)
    sizes = read_sizes(tmp_path)
    model = meta_model(config)
    assert sizes.family == "gemma2" and sizes.parameters == sum(p.numel() for p in model.parameters())
    assert sizes.block_parameters == sum(p.numel() for p in model.get_decoder().layers[0].parameters())


def test_counting_and_formula_agree() -> None:
    for name in ("Qwen3-8B", "SmolLM2-135M-Instruct"):
        assert count_on_meta(SHAPES / name) == read_sizes(SHAPES / name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model_type": "qwen2"}', "hidden_size is None"),
        ('{"model_type": "qwen2", "hidden_size": "896"}', "hidden_size is '896'"),
        ("{", "cannot be read"),
    ],
)
def test_what_is_no_model_config(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=message):
        read_sizes(tmp_path)


# ---- bytes

MODEL = ModelSizes(
    family="qwen2",
    layers=4,
    hidden=10,
    intermediate=30,
    heads=5,
    kv_heads=1,
    head_dim=2,
    vocab=1000,
    positions=4096,
    block_parameters=1200,
    outer_parameters=20_010,
    normed_heads=False,
)
P = 4 * 1200 + 20_010


def job(**changes: Any) -> Job:
    plain = Job(
        model=MODEL,
        reference=None,
        world=2,
        ranks_per_node=2,
        shard=2,
        sp=1,
        tp=1,
        longest=100,
        most_tokens=10_000,
        most_is_an_update=False,
        step_tokens=5000,
        wanted_sequences=8,
        max_num_seqs=16,
        max_model_len=100,
        prefill_tokens=64,
        compute_width=2,
        engine_width=2,
        reference_width=2,
        liger=True,
        varlen=True,
        repeatable=False,
        reference_head=False,
        entropy_gradient=False,
        own_engine=False,
        graphs=True,
        engine_copy=False,
        fixed_kv_bytes=None,
    )
    return replace(plain, **changes)


def settings(**changes: Any) -> Settings:
    plain = Settings(
        max_tokens_per_gpu=200,
        head_chunk_bytes=600_000,
        gradient_checkpointing=1,
        activation_offload=False,
        mlp_slices=1,
        reshard_after_forward=True,
        offload_policy=False,
        offload_optimizer=False,
        offload_during_rollout=False,
        ref_offload_policy=False,
    )
    return replace(plain, **changes)


def moment(name: str, j: Job, s: Settings) -> dict[str, int]:
    (peak,) = [peak for peak in training_moments(j, s) if peak.moment == name]
    return dict(peak.parts)


def kept_by_a_block(**changes: Any) -> int:
    return block_activations(job(**changes), settings())


def test_block_activations_by_hand() -> None:
    """Two norms in and out 4 H, q and output 2 x 10, k and v 2 x 2, gate, up, product 3 x 30; sums 4 bytes a head."""
    assert kept_by_a_block() == 2 * (4 * 10 + 2 * 10 + 2 * 2 + 3 * 30) + 4 * 5
    assert kept_by_a_block(compute_width=4) == 4 * (4 * 10 + 2 * 10 + 2 * 2 + 3 * 30) + 4 * 5
    # transformers' own norm keeps a float32 input and the normed value: 8 bytes an element; its MLP silu(gate)
    assert kept_by_a_block(liger=False) == 2 * 8 * 10 + 2 * (2 * 10 + 2 * 2 + 4 * 30) + 4 * 5
    assert kept_by_a_block(varlen=False) == 2 * (4 * 10 + (50 + 10) + 3 * 30) + 4 * 5  # 4 x 10, padded by 1.25
    assert kept_by_a_block(sp=5) == kept_by_a_block() + 2 * 2 * (5 - 1) * 2  # heads repeated for sp
    normed = replace(MODEL, normed_heads=True)
    assert kept_by_a_block(model=normed) == kept_by_a_block() + 2 * (10 + 2)  # q and k before the norm


@pytest.mark.parametrize(
    ("every", "offload", "inputs", "whole"),
    [(0, False, 0, 4), (1, False, 4, 0), (2, False, 2, 2), (3, False, 2, 2), (4, False, 1, 3), (1, True, 2, 0)],
)
def test_kept_activations(every: int, offload: bool, inputs: int, whole: int) -> None:
    kept = kept_activations(job(), settings(gradient_checkpointing=every, activation_offload=offload))
    assert kept == 200 * (inputs * 10 * 2 + whole * block_activations(job(), settings()) + 2 * 2 * 10)


def test_a_sliced_mlp_keeps_nothing_of_its_inside() -> None:
    """4 slices of 50 tokens: gate, up and product of one slice, one gradient beside them, dW in float32."""
    sliced = settings(mlp_slices=4)
    assert block_activations(job(), sliced) == block_activations(job(), settings()) - 2 * 3 * 30
    parts = moment("backward", job(), sliced)
    recomputed = 200 * (block_activations(job(), sliced) - 2 * 10)
    assert parts["a block's backward"] == recomputed + 2 * 2 * 10 * 200 + 50 * 2 * (30 + 3 * 30) + 4 * 3 * 10 * 30
    kept = kept_activations(job(), settings(gradient_checkpointing=0, mlp_slices=4))
    assert kept == 200 * (4 * block_activations(job(), sliced) + 2 * 2 * 10)


def test_training_state_is_sharded_and_offloaded() -> None:
    parts = moment("head", job(), settings())
    assert parts["masters and AdamW"] == 12 * P // 2 and parts["gradients"] == 4 * P // 2
    assert parts["gathered weights"] == 2 * (20_010 + 1200)
    assert moment("head", job(), settings(reshard_after_forward=False))["gathered weights"] == 2 * P
    alone = moment("head", job(shard=1), settings())
    assert alone["masters and AdamW"] == 12 * P and alone["gathered weights"] == 2 * 20_010
    away = moment("head", job(), settings(offload_policy=True))
    assert away["masters and AdamW"] == away["gradients"] == 0
    without_moments = moment("head", job(), settings(offload_optimizer=True))
    assert without_moments == {"masters": 4 * P // 2} | {k: v for k, v in parts.items() if k != "masters and AdamW"}


def test_one_micro_batch_has_its_gradients_when_its_activations_are_gone() -> None:
    whole = job(most_tokens=200, most_is_an_update=True)
    for name in ("head", "backward"):
        several = moment(name, replace(whole, most_is_an_update=False), settings())
        assert moment(name, whole, settings()) == {part: size for part, size in several.items() if part != "gradients"}
    first = moment("first", whole, settings())
    assert first["gradients"] == 4 * P // 2 and "activations" not in first
    behind = moment("backward", whole, settings())["a block's backward"]  # less the block's input, which was kept
    assert first["a block's backward"] == behind + 200 * 2 * 10
    assert first["gathered weights"] == 2 * (20_010 + 3 * 1200)
    shorter = replace(whole, most_tokens=201)  # two rows
    assert moment("head", shorter, settings())["gradients"] == 4 * P // 2
    assert "first" not in {peak.moment for peak in training_moments(shorter, settings())}


def test_adamws_moments_visit_the_device() -> None:
    """Three visits of 256 MiB, or of the moments of one matrix; embedding and output layer when the other gradients are
    gone."""
    hosted = settings(offload_optimizer=True)
    update = {"masters": 4 * P // 2, "frozen weights": 0, "reference": 0, "gradients": 4 * P // 2}
    assert moment("update", job(), hosted) == update | {"AdamW's visits": 3 << 28}
    last = update | {"gradients": 4 * 20_010 // 2, "AdamW's visits": (3 << 28) + 8 * 20_010 // 2}
    assert moment("last visit", job(), hosted) == last
    wide = job(model=replace(MODEL, intermediate=10**8))
    assert moment("update", wide, hosted)["AdamW's visits"] == 3 * 8 * 10**9 // 2
    names = {peak.moment for peak in training_moments(job(), settings())}
    assert names & {"update", "last visit"} == set()
    assert dict(rollout_peak(job(), hosted, 0).parts)["masters"] == 4 * P // 2
    assert dict(sync_peak(job(), hosted).parts)["masters"] == 4 * P // 2


def test_backward_and_outer_by_hand() -> None:
    parts = moment("backward", job(), settings())
    assert parts["gathered weights"] == 2 * (20_010 + 3 * 1200)
    assert parts["a block's backward"] == 200 * (block_activations(job(), settings()) - 2 * 10 + 2 * (30 + 2 * 10))
    assert parts["gradients being reduced"] == 1200 * (2 + 4)
    assert parts["head's gradient"] == 2 * 1000 * 10
    plain = moment("backward", job(liger=False), settings(gradient_checkpointing=0))
    assert plain["a block's backward"] == 200 * 2 * (2 * 30 + 2 * 10)
    # of 4 blocks 0 and 2 are recomputed: when 2 is, block 3 has been freed
    assert moment("backward", job(), settings(gradient_checkpointing=2))["a block's backward"] == 200 * 2 * (30 + 20)
    outer = moment("outer", job(), settings())
    assert outer["gradients being reduced"] == 20_010 * 6 + 4 * 20_010 // 2


def test_a_repeatable_attention_keeps_copies_of_a_gradient() -> None:
    """200 tokens are two sequences of 100 with 5 heads: 14 copies on 132 processors, of 200 + 256 rows of 5 heads,
    whose 2 columns are padded to 32."""
    exact = job(repeatable=True)
    copies = 14 * 4 * 456 * 5 * 32
    assert repeatable_scratch(exact, settings()) == copies
    recomputed = 200 * (block_activations(exact, settings()) - 2 * 10)
    assert moment("backward", exact, settings())["a block's backward"] == recomputed + copies
    assert repeatable_scratch(job(), settings()) == 0
    assert repeatable_scratch(job(repeatable=True, varlen=False), settings()) == 0
    # sp 5: 1,000 tokens of 10 sequences, each rank with one head of all
    assert repeatable_scratch(job(repeatable=True, sp=5), settings()) == 14 * 4 * (1000 + 1280) * 32
    busy = job(repeatable=True, model=replace(MODEL, heads=66, head_dim=128))  # two sequences keep the device busy
    assert repeatable_scratch(busy, settings()) == 4 * 456 * 66 * 128
    small = job(repeatable=True, longest=400, most_tokens=50)  # less than one sequence
    assert repeatable_scratch(small, settings()) == 27 * 4 * (50 + 128) * 5 * 32


def test_adapters_by_hand() -> None:
    """Rank 3 on a layer of 10 -> 10 and one of 10 -> 30: 3 (20 + 40) parameters a block, 12 + 4 bytes each; the model
    2 bytes a parameter, without gradients, and no gradient of the head."""
    own = job(lora_rank=3, adapted=((10, 10), (10, 30)))
    trained = 4 * 180
    parts = moment("backward", own, settings())
    assert parts["masters and AdamW"] == 12 * trained // 2 and parts["gradients"] == 4 * trained // 2
    assert parts["frozen weights"] == 2 * P // 2
    assert parts["gathered weights"] == 2 * (20_010 + 3 * (1200 + 180))
    assert parts["gradients being reduced"] == 180 * (2 + 4) and parts["head's gradient"] == 0
    assert block_activations(own, settings()) == block_activations(job(), settings()) + 2 * 3 * 2
    whole, frozen = (head_bytes(j, 200, 10**9) for j in (job(), own))
    assert whole - frozen == 4 * 10_000  # dW in float32; D and the logits stay
    assert moment("outer", own, settings())["gradients being reduced"] == 0
    assert moment("head", own, settings(offload_policy=True))["frozen weights"] == 0
    parked = dict(rollout_peak(own, settings(offload_during_rollout=True), 0).parts)
    assert parked["masters and AdamW"] == 0 and parked["frozen weights"] == 2 * P // 2
    assert dict(sync_peak(own, settings()).parts)["merging"] == 300 * (4 + 4 + 4 + 2)
    host = dict(host_peak(own, settings(offload_policy=True)).parts)
    assert host["masters and AdamW"] == int(80_384 / 49_120 * (2 * ((16 * trained + 2 * P) // 2)))


def test_adapted_layers_are_those_of_the_model(make_tiny_model: Any) -> None:
    folder = make_tiny_model("qwen3", head_dim=16)
    lm = AutoModelForCausalLM.from_pretrained(folder)
    for targets in (["all-linear"], ["q_proj", "down_proj"], ["o_proj", "mlp.up_proj"]):
        adapted = add_adapters(AutoModelForCausalLM.from_pretrained(folder), Lora(4, 8, tuple(targets), 0, "base"))
        real = [lm.get_submodule(name) for name in adapted if ".layers.0." in name]
        found = adapted_layers(targets, read_sizes(folder))
        assert sorted(found) == sorted((layer.in_features, layer.out_features) for layer in real)
    assert adapted_layers(["some_fused_proj"], read_sizes(folder)) == ((128, 192),)


def test_the_reference_takes_its_share_and_its_own_moment() -> None:
    large = replace(MODEL, outer_parameters=10**9)
    with_reference, s = job(reference=large), settings()
    assert moment("head", with_reference, s)["reference"] == 2 * large.parameters // 2
    assert training_peak(with_reference, s).moment == "scoring"
    assert moment("head", with_reference, settings(ref_offload_policy=True))["reference"] == 0
    assert "reference" in dict(rollout_peak(with_reference, s, 0).parts)


def test_head_by_hand() -> None:
    """200 rows: hidden states and their gradient, the weight's in float32, and the working buffers: what is allowed, or
    what the rows need (D in the compute dtype, H in float32, 200 rows of float32 logits), or dW's copy."""
    fixed = 2 * 2 * 200 * 10 + 4 * 10_000
    needed = 200 * (2 * 1000 + 4 * 10) + 4 * 1000 * 200
    assert head_bytes(job(), 200, 10**9) == fixed + needed
    assert head_bytes(job(), 200, 600_000) == fixed + 600_000
    assert head_bytes(job(), 2000, 600_000) == 2 * 2 * 2000 * 10 + 4 * 10_000 + 600_000
    assert head_bytes(job(), 2000, 1) == 2 * 2 * 2000 * 10 + 4 * 10_000 + 256 * 2040  # 256 rows at least
    assert head_bytes(job(), 5, 10**9) == 2 * 2 * 5 * 10 + 4 * 10_000 + 5 * 2040 + 4 * 1000 * 5
    assert head_bytes(job(), 1, 10**9) == 2 * 2 * 10 + (4 + 2) * 10_000


def test_reference_head_by_hand() -> None:
    """200 rows in chunks of 16: two fp32 buffers, one left by the chunk before, one in bf16."""
    size, reference = 4 * 1000 * 16, job(reference_head=True)
    fixed = 2 * 2 * 200 * 10 + 4 * 10_000
    assert head_bytes(reference, 200, size) == fixed + 16 * 1000 * (3 * 4 + 2)
    with_entropy = replace(reference, entropy_gradient=True)
    assert head_bytes(with_entropy, 200, size) == fixed + 16 * 1000 * (5 * 4 + 2)  # three, and two left
    assert head_bytes(replace(reference, compute_width=4), 200, size) == 2 * fixed - 4 * 10_000 + 16 * 1000 * 12
    assert head_bytes(reference, 16, size) == 2 * 2 * 16 * 10 + 4 * 10_000 + 16 * 1000 * 10


def test_chunks_are_cut_as_the_kernels_cut_them() -> None:
    assert k.HEAD_CHUNK_CUDA == DEFAULT_CHUNK_BYTES_CUDA
    for vocab in (1, 7, 1000, 49_152, 151_936, 152_064):
        for size in (1, 4096, 320 * k.MIB, 1 << 30, k.HEAD_CHUNK_CUDA):
            assert chunk_rows(vocab, size, 1 << 40) == rows_per_chunk(vocab, size)


@pytest.mark.parametrize("epilogue", [False, True])
@pytest.mark.parametrize("rows", [300, 5000, 40_000])
@pytest.mark.parametrize("size", [k.HEAD_CHUNK_LEAST, k.HEAD_CHUNK_CUDA])
def test_working_buffers_bound_those_of_the_kernels(rows: int, size: int, epilogue: bool) -> None:
    """What the kernels' own plan of a sweep takes of the buffers is never more than counted here, and not much less."""
    sweep = pytest.importorskip("fastgrpo_kernels._sweep")
    hidden, vocab = 896, 151_936
    x = torch.empty(rows, hidden, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(vocab, hidden, dtype=torch.bfloat16, device="meta")
    plan = sweep.make_plan(x, weight, size, epilogue=epilogue)
    in_chunk = min(plan.chunk_rows, rows)
    taken = in_chunk * (2 * vocab + 4 * hidden) + (0 if plan.epilogue else min(plan.sub_rows, rows) * 4 * vocab)
    model = replace(MODEL, vocab=vocab, hidden=hidden)
    counted = head_bytes(job(model=model), rows, size) - 4 * rows * hidden - 4 * vocab * hidden
    assert taken <= counted and (rows < 1024 or taken >= 0.6 * counted)


def test_rollout_by_hand() -> None:
    parts = dict(rollout_peak(job(tp=2, sp=2), settings(), 12345).parts)
    assert parts["KV cache"] == 12345 and parts["engine weights"] == 2 * P // 2
    assert parts["masters and AdamW"] == 12 * P // 2
    assert parts["engine workspace"] == k.ENGINE_AWAKE + 64 * 2 * (30 + 30) + 16 * 1000 * 4 * k.ENGINE_LOGIT_COPIES
    assert parts["CUDA and NCCL"] == k.CUDA_CONTEXT + k.NCCL
    parked = settings(offload_during_rollout=True)
    assert dict(rollout_peak(job(), parked, 0).parts)["masters and AdamW"] == 0
    assert dict(sync_peak(job(), parked).parts)["masters and AdamW"] == 12 * P // 2  # they leave after the export
    assert dict(sync_peak(job(), parked).parts)["gathered weights"] == 2 * 2 * 20_010


def test_a_sequence_takes_whole_blocks_of_cache() -> None:
    per_token = 2 * 4 * 1 * 2 * 2
    assert sequence_bytes(job()) == 112 * per_token  # 100 tokens: 7 blocks of 16
    assert sequence_bytes(job(max_model_len=96, tp=2)) == 96 * per_token


def test_pinned_state_is_that_of_a_nodes_ranks() -> None:
    assert pinned_state(job(), settings()) == 0
    for option, width in (("offload_policy", 16), ("offload_optimizer", 8), ("offload_during_rollout", 12)):
        assert pinned_state(job(), settings(**{option: True})) == 2 * width * P // 2
        assert pinned_state(job(world=4, shard=4), settings(**{option: True})) == 2 * width * P // 4  # two nodes

    both = settings(offload_optimizer=True, offload_during_rollout=True)
    assert pinned_state(job(), both) == 2 * 12 * P // 2


def test_host_by_hand() -> None:
    """Shards of 5 x 10, 1 x 10 (twice), 5 x 10, 15 x 10 (twice) and 5 x 30 numbers a block, 500 x 10 twice outside: in
    float32 256 bytes for 200, 64 for 40, 1,024 for 600, 32,768 for 20,000."""
    assert host_peak(job(), settings()).total == 2 * k.PROCESS_HOST + k.SAVE_BUFFER + 2 * 64 * 5000
    rounding = (4 * (2 * 256 + 2 * 64 + 3 * 1024) + 2 * 32_768) / (4 * (2 * 200 + 2 * 40 + 3 * 600) + 2 * 20_000)
    assert pinned_rounding(job(), MODEL, 4) == rounding == 80_384 / 49_120
    parts = dict(host_peak(job(), settings(offload_policy=True)).parts)
    assert parts["masters and AdamW"] == int(rounding * 16 * P)
    parked = dict(host_peak(job(), settings(offload_during_rollout=True)).parts)
    assert parked["masters and AdamW"] == int(rounding * 12 * P)
    at_home = settings(offload_optimizer=True)
    assert hosted_state(job(), at_home) == dict(host_peak(job(), at_home).parts)["masters and AdamW"] == 8 * P
    assert hosted_state(job(), replace(at_home, offload_during_rollout=True)) == 8 * P + int(rounding * 4 * P)
    inputs = dict(host_peak(job(), settings(activation_offload=True)).parts)["activations"]
    assert inputs == 2 * 4 * 4096  # two ranks, four blocks, 200 tokens x 10 x 2 bytes
    hosted = dict(host_peak(job(reference=MODEL), settings(ref_offload_policy=True)).parts)["reference"]
    assert hosted == int(2 * pinned_rounding(job(), MODEL, 2) * P)
    assert dict(host_peak(job(engine_copy=True), settings()).parts)["engine weights"] == 2 * 2 * P


GROWS = {
    "max_tokens_per_gpu": 400,
    "head_chunk_bytes": 700_000,
    "gradient_checkpointing": 0,
    "reshard_after_forward": False,
}


@pytest.mark.parametrize("name", GROWS)
def test_training_grows_with(name: str) -> None:
    """The largest moment may be another one; none of them shrinks."""
    large = settings(max_tokens_per_gpu=5000) if name == "gradient_checkpointing" else settings()
    before = {peak.moment: peak.total for peak in training_moments(job(), large)}
    after = {peak.moment: peak.total for peak in training_moments(job(), replace(large, **{name: GROWS[name]}))}
    assert all(after[name] >= before[name] for name in before)
    assert after["head"] > before["head"]


@pytest.mark.parametrize("change", [{"shard": 8}, {"most_tokens": 50}])
def test_training_shrinks_with(change: dict[str, int]) -> None:
    assert training_peak(job(**change), settings()).total < training_peak(job(), settings()).total
