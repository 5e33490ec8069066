"""What a run is made of, built in the order in which mistakes are cheapest to find.

    rules -> rewards -> model folder, config, tokenizer -> data -> ranks -> policy, reference, optimizer -> engine

Everything up to `ranks` needs no weights and takes seconds. The policy is built before the engine, so that the engine
sees what memory is left.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from fastgrpo import console, hub
from fastgrpo.algorithm.kl_control import KlController
from fastgrpo.batch.mini_batches import MiniBatch, Share
from fastgrpo.best_metric import check_best_metric
from fastgrpo.checkpoint import Identity, identify
from fastgrpo.config import (
    Dtype,
    Layout,
    RunConfig,
    check,
    check_model,
    compute_dtype,
    loads_reference,
    needs_reference,
    notes,
    total_steps,
)
from fastgrpo.data.order import PromptOrder
from fastgrpo.data.prompts import PromptSet, load_prompts, load_tokenizer, prompts_from_python
from fastgrpo.flops import ModelFlops, peak_flops
from fastgrpo.gpu import cap_memory, settle_engine, settle_memory
from fastgrpo.launch import count_gpus, resolve_device, started
from fastgrpo.mesh import Mesh, build_mesh
from fastgrpo.plan import Plan, Sizes, read_sizes
from fastgrpo.policy.actor import Actor
from fastgrpo.policy.compile import INDUCTOR
from fastgrpo.policy.determinism import be_deterministic
from fastgrpo.policy.lora import Lora, require_peft, warn_of_narrow_layers
from fastgrpo.policy.model import Policy, build_policy
from fastgrpo.policy.selfcheck import check_packing
from fastgrpo.policy.work import model_flops, sequence_cost
from fastgrpo.records import Sampling
from fastgrpo.reward import Rewards, build_rewards
from fastgrpo.rollout import build_engine
from fastgrpo.rollout.engine import RolloutEngine, engine_dtype, reports_logprobs
from fastgrpo.rollout.lengths import LengthHistory
from fastgrpo.val_metrics import set_of

log = logging.getLogger("fastgrpo")


@dataclass(frozen=True, slots=True)
class Stages:
    config: RunConfig  # with every open option of memory decided
    plan: Plan | None  # of the memory; None on a CPU
    layout: Layout
    mesh: Mesh
    tokenizer: PreTrainedTokenizerBase
    train: PromptSet
    val: PromptSet
    total_steps: int
    rewards: Rewards
    actor: Actor
    engine: RolloutEngine
    engine_bytes: int  # of torch's memory, counted also while the engine sleeps; 0 on a CPU
    share: Share
    sampling: Sampling
    identity: Identity
    flops: ModelFlops
    peak_flops: float | None  # of this rank's device; None: unknown
    order: PromptOrder  # where the run is in its data
    kl_controller: KlController  # of the KL in the reward
    lengths: LengthHistory  # of the answers to each prompt

    @contextmanager
    def engine_awake(self) -> Iterator[None]:
        """The engine awake with the policy's weights; what the trainer can spare meanwhile is away."""
        actor, engine = self.actor, self.engine
        with actor.lent(held=engine.holds(actor.version)) as export, engine.awake(export, actor.version):
            yield

    def peak_seconds(self, mini_batches: Sequence[MiniBatch], passes: int) -> float | None:
        """What the update's work would take the devices at their peak; None where that is unknown."""
        if self.peak_flops is None:
            return None
        work = sum(self.flops.training(batch.lengths, batch.head_rows) for batch in mini_batches)
        return passes * work / (self.mesh.world * self.peak_flops)


def build_stages(
    config: RunConfig,
    prompts: Sequence[Any] | None = None,
    reward: Callable[..., object] | None = None,
    engine: RolloutEngine | None = None,
) -> Stages:
    """Raises UserError (ConfigError) for every mistake that shows before training. `engine`: see Trainer."""
    world, ranks_per_node = started(os.environ)
    layout = check(
        config,
        world,
        ranks_per_node=ranks_per_node,
        needs_data=prompts is None,
        needs_reward=reward is None,
    )
    device_type = resolve_device(config, count_gpus())
    engine_dtype(config, device_type)
    if config.model.lora_rank:
        require_peft()
    rewards = build_rewards(config.reward, reward, max_response_length=config.data.max_response_length)
    model_dir = hub.resolve_model(config.model.path)
    ref_dir = hub.resolve_model(config.ref.path, option="ref.path") if config.ref.path else model_dir
    trust = config.model.trust_remote_code
    model_config = hub.read_model_config(model_dir, "model.path", trust_remote_code=trust)
    if config.ref.path:
        hub.read_model_config(ref_dir, "ref.path", trust_remote_code=trust)
    _check_model(config, layout, model_config)
    tokenizer = load_tokenizer(config.model, model_dir)
    seed = config.trainer.seed
    if prompts is None:
        train = load_prompts(config.data, tokenizer, split="train", seed=seed)
    else:
        train = prompts_from_python(prompts, tokenizer, config.data)
    val = load_prompts(config.data, tokenizer, split="val", seed=seed)
    check_best_metric(config, {set_of(prompt.uid) for prompt in val.prompts})
    steps = total_steps(config, len(train))
    order = PromptOrder(train, config.data.gen_batch_size or layout.prompts_per_step, seed, config.data.shuffle)
    for note in (*notes(config), *rewards.notes):
        console.say(note)
    rewards.start()

    if config.trainer.deterministic:
        be_deterministic()
    sizes = _sizes(config, model_dir, ref_dir)
    config = settle_engine(config, sizes, layout, device_type)
    layout = Layout.of(config, layout.world, layout.ranks_per_node)
    mesh = build_mesh(device_type, sp=layout.sp, tp=layout.tp, replicas=layout.replicas)
    held = _allocated(mesh.device)  # by an engine of a former run, asleep; 0 without one
    config, plan = settle_memory(config, sizes, layout, mesh)
    layout = Layout.of(config, layout.world, layout.ranks_per_node)
    torch.manual_seed(seed)
    policy = _build_policy(config, model_dir, mesh, trainable=True)
    if mesh.is_main:
        warn_of_narrow_layers(policy.module)
    reference = policy.base if needs_reference(config) else None
    if loads_reference(config):
        reference = _build_policy(config, ref_dir, mesh, trainable=False)
    actor = Actor(policy, reference, config, steps * layout.updates_per_step)
    if mesh.tp_rank == 0:  # the ranks that score
        rewards.load(mesh.device)
    before = _allocated(mesh.device)
    engine = engine or build_engine(config, mesh, model_dir, end_ids(tokenizer, model_dir))
    engine_bytes = held + _allocated(mesh.device) - before
    cap_memory(config, mesh.device, engine_bytes)
    share = Share(
        dp=mesh.dp,
        dp_rank=mesh.dp_rank,
        sp=mesh.sp,
        sp_rank=mesh.sp_rank,
        max_tokens=layout.tokens_per_micro_batch,
        max_sequences=layout.max_sequences_per_micro_batch,
        cost=sequence_cost(policy),
        pad_id=tokenizer.pad_token_id if isinstance(tokenizer.pad_token_id, int) else 0,
    )
    sampling = _sampling(config, mesh)
    identity = identify(train.fingerprint, len(train), model_dir, ref_dir if reference else None, config)
    return Stages(
        config,
        plan,
        layout,
        mesh,
        tokenizer,
        train,
        val,
        steps,
        rewards,
        actor,
        engine,
        engine_bytes,
        share,
        sampling,
        identity,
        flops=model_flops(policy),
        peak_flops=peak_flops(
            torch.cuda.get_device_name(mesh.device) if device_type == "cuda" else "cpu",
            config.trainer.peak_tflops,
            compute_dtype(config.actor.dtype, device_type),
        ),
        order=order,
        kl_controller=_kl_controller(config),
        lengths=LengthHistory(wanted=_lengths_help(config, layout, mesh, steps * layout.prompts_per_step > len(train))),
    )


def _lengths_help(config: RunConfig, layout: Layout, mesh: Mesh, prompts_come_again: bool) -> bool:
    return prompts_come_again and (mesh.engines > 1 or layout.sequences_per_engine > config.rollout.max_num_seqs)


def _kl_controller(config: RunConfig) -> KlController:
    ctrl = config.algorithm.kl_ctrl
    return KlController(ctrl.kl_coef, ctrl.target_kl if ctrl.type == "adaptive" else None, ctrl.horizon)


def _sizes(config: RunConfig, model_dir: Path, ref_dir: Path) -> Sizes:
    trust = config.model.trust_remote_code
    reference = read_sizes(ref_dir, trust_remote_code=trust) if loads_reference(config) else None
    return Sizes(read_sizes(model_dir, trust_remote_code=trust), reference)


def _check_model(config: RunConfig, layout: Layout, model_config: PretrainedConfig) -> None:
    check_packing(model_config, trust_remote_code=config.model.trust_remote_code)
    check_model(
        config,
        layout,
        num_heads=model_config.num_attention_heads,
        num_kv_heads=getattr(model_config, "num_key_value_heads", model_config.num_attention_heads),
        hidden=model_config.hidden_size,
        max_positions=model_config.max_position_embeddings,
        vocab=model_config.vocab_size,
    )


def _sampling(config: RunConfig, mesh: Mesh) -> Sampling:
    rollout = config.rollout
    sampling = Sampling(rollout.temperature, rollout.top_p, rollout.top_k, rollout.min_p, rollout.repetition_penalty)
    if not reports_logprobs(sampling) and mesh.is_main:
        log.warning(
            "rollout.top_p, top_k, min_p or repetition_penalty cut the vocabulary: the engine's logprobs are not "
            "comparable, so the importance correction is off; the parity gate looks at a few short answers that each "
            "engine draws for it from the whole vocabulary."
        )
    return sampling


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _build_policy(config: RunConfig, folder: Path, mesh: Mesh, *, trainable: bool) -> Policy:
    actor, device_type = config.actor, mesh.device.type
    offload_policy = actor.fsdp.offload_policy if trainable else config.ref.offload_policy
    own_dtype = actor.dtype if trainable or config.ref.dtype == Dtype["auto"] else config.ref.dtype
    return build_policy(
        folder,
        mesh,
        dtype=getattr(torch, compute_dtype(own_dtype, device_type)),
        attention_backend=str(actor.attention),
        trainable=trainable,
        gradient_checkpointing=actor.gradient_checkpointing or 0,
        activation_offload=bool(actor.activation_offload),
        mlp_slices=actor.mlp_slices or 1,
        reshard_after_forward=bool(actor.fsdp.reshard_after_forward) or not trainable,
        offload_policy=bool(offload_policy),
        use_liger=actor.use_liger,
        compile_backend=INDUCTOR if actor.use_torch_compile else None,
        trust_remote_code=config.model.trust_remote_code,
        lora=lora_of(config) if trainable else None,
    )


def lora_of(config: RunConfig) -> Lora | None:
    model = config.model
    if not model.lora_rank:
        return None
    base = str(Path(model.path).absolute()) if Path(model.path).is_dir() else model.path
    return Lora(model.lora_rank, model.lora_alpha, tuple(model.target_modules), config.trainer.seed, base)


def end_ids(tokenizer: PreTrainedTokenizerBase, model_dir: Path) -> tuple[int, ...]:
    """Every id that ends a response: the tokenizer's end token and all that the model's generation config names."""
    found = [tokenizer.eos_token_id] if isinstance(tokenizer.eos_token_id, int) else []
    if (model_dir / "generation_config.json").exists():
        more = GenerationConfig.from_pretrained(model_dir).eos_token_id
        found += more if isinstance(more, list) else [] if more is None else [more]
    return tuple(dict.fromkeys(found))
