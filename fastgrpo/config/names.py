"""What to answer to a key that the schema does not have: verl's and TRL's names with ours beside them, or near misses.

VERL holds only names that differ; `actor_rollout_ref.X` is answered with X where the schema has X. A value is our key,
or `nothing: ` and why where there is no counterpart. A key that ends in a dot stands for all that begins with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher, get_close_matches

from fastgrpo.config.trl_names import COLOCATED, FUNCTIONS, TRL

_BUDGET = "actor.max_tokens_per_gpu (tokens; old and reference passes use the micro-batches of the update)"
_PACKED = "nothing: rows are always packed, within actor.max_tokens_per_gpu"
_REWARD_PATH = "reward.functions.NAME.path, with reward.functions.NAME.kind=custom"
_REWARD_NAME = "reward.functions.NAME.name, with reward.functions.NAME.kind=custom"
_REWARD_KWARGS = (
    "nothing: the function gets its arguments from the row alone; write the values into its file as defaults"
)
_REWARD_ASYNC = "nothing: rewards always run in processes of their own, reward.num_workers a rank"
_SANDBOX = "reward.functions.NAME.kind=code (programs run in sandboxes on this machine)"
_NO_CRITIC = "nothing: GRPO compares the samples of a group and has no critic"
_NO_DISCOUNT = "nothing: GRPO neither discounts nor bootstraps"

VERL = {
    "data.seed": "trainer.seed",
    "data.trust_remote_code": "model.trust_remote_code",
    "data.tokenizer": "model.tokenizer_path",
    "data.val_batch_size": "nothing: validation is handed to the engine at once",
    "data.reward_fn_key": FUNCTIONS,
    "data.filter_overlong_prompts_workers": "nothing: data.filter_overlong_prompts is enough",
    "data.return_raw_chat": "nothing: the chat template is applied once",
    "data.custom_cls.": (
        "nothing: data.train_files reads files and hub data sets, data.prompt_key, data.prompt_template and "
        "data.reference_key say what of them; in Python, Trainer(prompts=...) takes any list"
    ),
    "data.image_key": "nothing: prompts are text only",
    "actor_rollout_ref.hybrid_engine": COLOCATED,
    "actor_rollout_ref.nccl_timeout": "trainer.limits_s.update and its neighbours (seconds, by stage)",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "actor.gradient_checkpointing",
    "actor_rollout_ref.model.enable_activation_offload": "actor.activation_offload",
    "actor_rollout_ref.model.use_remove_padding": _PACKED,
    "actor_rollout_ref.model.use_liger": "actor.use_liger",
    "actor_rollout_ref.model.use_fused_kernels": "actor.head",
    "actor_rollout_ref.model.fused_kernel_options.impl_backend": "actor.head",
    "actor_rollout_ref.model.custom_chat_template": "model.chat_template",
    "actor_rollout_ref.model.exclude_modules": "model.target_modules (those that are to have adapters)",
    "actor_rollout_ref.model.lora_adapter_path": "nothing: adapters start anew, or are resumed (trainer.resume)",
    "actor_rollout_ref.model.external_lib": (
        "nothing: model.trust_remote_code runs the code of a checkpoint; rollout.name takes package.module:Class"
    ),
    "actor_rollout_ref.model.lora.rank": "model.lora_rank",
    "actor_rollout_ref.model.lora.alpha": "model.lora_alpha",
    "actor_rollout_ref.model.lora.target_modules": "model.target_modules",
    "actor_rollout_ref.model.lora.merge": "nothing: the engine always gets merged weights",
    "actor_rollout_ref.actor.strategy": "nothing: FSDP2 always",
    "actor_rollout_ref.actor.ppo_micro_batch_size": "actor.micro_batch_size_per_gpu (sequences)",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "actor.micro_batch_size_per_gpu (sequences)",
    "actor_rollout_ref.actor.use_dynamic_bsz": _PACKED,
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "actor.max_tokens_per_gpu",
    "actor_rollout_ref.actor.clip_ratio": "actor.clip_ratio_low and actor.clip_ratio_high",
    "actor_rollout_ref.actor.policy_loss.loss_mode": "actor.policy_loss",
    "actor_rollout_ref.actor.policy_loss.": "nothing: clip_cov and kl_cov are no losses of actor.policy_loss",
    "actor_rollout_ref.actor.data_loader_seed": "trainer.seed",
    "actor_rollout_ref.actor.entropy_from_logits_with_chunking": "nothing: logits exist only in chunks",
    "actor_rollout_ref.actor.entropy_checkpointing": "nothing: logits exist only in chunks",
    "actor_rollout_ref.actor.checkpoint.async_save": "trainer.async_save",
    "actor_rollout_ref.actor.checkpoint.": "nothing: a checkpoint always holds everything, and a Hugging Face folder",
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": "actor.optim.lr_warmup_steps (updates)",
    "actor_rollout_ref.actor.optim.warmup_style": "actor.optim.lr_scheduler_type",
    "actor_rollout_ref.actor.optim.total_training_steps": "trainer.max_steps",
    "actor_rollout_ref.actor.optim.betas": "actor.optim.beta1 and actor.optim.beta2",
    "actor_rollout_ref.actor.optim.clip_grad": "actor.grad_clip",
    "actor_rollout_ref.actor.fsdp_config.param_offload": "actor.fsdp.offload_during_rollout",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": "actor.fsdp.offload_optimizer",
    "actor_rollout_ref.actor.fsdp_config.offload_policy": "actor.fsdp.offload_policy",
    "actor_rollout_ref.actor.fsdp_config.reshard_after_forward": "actor.fsdp.reshard_after_forward",
    "actor_rollout_ref.actor.fsdp_config.fsdp_size": "actor.fsdp.replicas (= ranks / fsdp_size)",
    "actor_rollout_ref.actor.fsdp_config.dtype": "actor.dtype",
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile": "actor.use_torch_compile",
    "actor_rollout_ref.actor.fsdp_config.model_dtype": "actor.dtype (masters are always float32)",
    "actor_rollout_ref.actor.fsdp_config.mixed_precision": "actor.dtype",
    "actor_rollout_ref.ref.model.path": "ref.path",
    "actor_rollout_ref.ref.fsdp_config.param_offload": "ref.offload_policy",
    "actor_rollout_ref.ref.use_torch_compile": "actor.use_torch_compile (of the reference too)",
    "actor_rollout_ref.ref.log_prob_micro_batch_size": _BUDGET,
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": _BUDGET,
    "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": _PACKED,
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": _BUDGET,
    "actor_rollout_ref.ref.ulysses_sequence_parallel_size": "actor.ulysses_sequence_parallel_size",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size": _BUDGET,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": _BUDGET,
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz": _PACKED,
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": _BUDGET,
    "actor_rollout_ref.rollout.gpu_memory_utilization": "rollout.kv_cache_gib (GiB, not a share of the GPU)",
    "actor_rollout_ref.rollout.free_cache_engine": "rollout.sleep_level",
    "actor_rollout_ref.rollout.mode": COLOCATED,
    "actor_rollout_ref.rollout.prompt_length": "data.max_prompt_length",
    "actor_rollout_ref.rollout.response_length": "data.max_response_length",
    "actor_rollout_ref.rollout.do_sample": "rollout.temperature (always sampled)",
    "actor_rollout_ref.rollout.val_kwargs.do_sample": "rollout.val_kwargs.temperature (0 = greedy)",
    "actor_rollout_ref.rollout.seed": "trainer.seed",
    "actor_rollout_ref.rollout.ignore_eos": "nothing: an answer always ends at its end token",
    "actor_rollout_ref.rollout.enable_chunked_prefill": (
        "nothing: the engine decides; rollout.max_num_batched_tokens bounds what one iteration prefills"
    ),
    "actor_rollout_ref.rollout.engine_kwargs.": "nothing: the engine is given what the options of rollout say",
    "actor_rollout_ref.rollout.calculate_log_probs": "nothing: always on",
    "actor_rollout_ref.rollout.load_format": "nothing: weights always come from the trainer",
    "actor_rollout_ref.rollout.data_parallel_size": "nothing: engines = ranks / rollout.tensor_model_parallel_size",
    "actor_rollout_ref.rollout.pipeline_model_parallel_size": "rollout.tensor_model_parallel_size",
    "actor_rollout_ref.rollout.multi_turn.": "nothing: one turn a sample",
    "actor_rollout_ref.rollout.agent.": "nothing: one turn a sample",
    "algorithm.gamma": _NO_DISCOUNT,
    "algorithm.lam": _NO_DISCOUNT,
    "algorithm.gdpo_reward_keys": FUNCTIONS,
    "algorithm.gdpo_reward_weights": "reward.functions.NAME.weight",
    "algorithm.rollout_correction.rollout_is_batch_normalize": "nothing: weights are bounded, not rescaled",
    "algorithm.rollout_correction.loss_type": "actor.policy_loss (reinforce, or any other)",
    "algorithm.filter_groups.max_inflight_gen_batches": "nothing: rounds come one after the other",
    "reward.custom_reward_function.path": _REWARD_PATH,
    "reward.custom_reward_function.name": _REWARD_NAME,
    "reward.custom_reward_function.reward_kwargs.": _REWARD_KWARGS,
    "reward.launch_reward_fn_async": _REWARD_ASYNC,
    "reward.reward_manager.": FUNCTIONS,
    "reward.sandbox_fusion.url": _SANDBOX,
    "reward.sandbox_fusion.memory_limit_mb": "reward.functions.NAME.memory_limit_mb, with kind=code",
    "reward.sandbox_fusion.": _SANDBOX,
    "sandbox_fusion.": _SANDBOX,
    "reward_model.model.path": "reward.functions.NAME.path, with kind=model",
    "reward_model.model.input_tokenizer": "nothing: a reward model reads text, with its own tokenizer",
    "reward_model.max_length": "reward.functions.NAME.max_length, with kind=model",
    "reward_model.micro_batch_size_per_gpu": "reward.functions.NAME.micro_batch_size_per_gpu, with kind=model",
    "reward_model.overlong_buffer.enable": "reward.functions.NAME.kind=length",
    "reward_model.overlong_buffer.len": "reward.functions.NAME.overlong_buffer_len, with kind=length",
    "reward_model.overlong_buffer.penalty_factor": "reward.functions.NAME.overlong_penalty_factor, with kind=length",
    "reward_model.overlong_buffer.": "reward.functions.NAME.kind=length",
    "custom_reward_function.path": _REWARD_PATH,
    "custom_reward_function.name": _REWARD_NAME,
    "custom_reward_function.reward_kwargs.": _REWARD_KWARGS,
    "reward_model.launch_reward_fn_async": _REWARD_ASYNC,
    "reward_model.": FUNCTIONS,
    "critic.": _NO_CRITIC,
    "trainer.critic_warmup": _NO_CRITIC,
    "trainer.total_training_steps": "trainer.max_steps",
    "trainer.resume_mode": "trainer.resume (auto, never or a path)",
    "trainer.resume_from_path": "trainer.resume (auto, never or a path)",
    "trainer.max_actor_ckpt_to_keep": "trainer.max_ckpt_to_keep",
    "trainer.max_critic_ckpt_to_keep": _NO_CRITIC,
    "trainer.del_local_ckpt_after_load": "trainer.max_ckpt_to_keep",
    "trainer.esi_redundant_time": "trainer.shutdown_timeout_s (checkpoints follow a signal, not a clock)",
    "trainer.nnodes": "torchrun --nnodes=M --nproc-per-node=N",
    "trainer.default_hdfs_dir": "nothing: a run writes to trainer.run_dir, on a disk that is mounted here",
    "trainer.default_local_dir": "trainer.run_dir",
    "trainer.balance_batch": "nothing: ranks are always balanced by tokens",
    "trainer.log_val_generations": "nothing: validation answers are always in the run folder",
    "trainer.rollout_data_dir": "nothing: rollouts are always in the run folder",
    "trainer.validation_data_dir": "nothing: validation answers are always in the run folder",
    "ray_init.": "nothing: there is no Ray; processes come from torchrun",
    "ray_kwargs.": "nothing: there is no Ray; processes come from torchrun",
}

# Values that other trainers have and this one refuses, each with the reason and what to use.
REFUSED_VALUES = {
    ("algorithm.adv_estimator", "gae"): (
        "GAE needs a critic, a second model of the policy's size that predicts the value of every token, and this "
        "trainer has none: a group's own rewards are the baseline; use grpo"
    ),
    ("algorithm.adv_estimator", "remax"): "its greedy baseline is one more rollout a prompt; use rloo",
    ("actor.kl_loss_type", "full"): "the whole distribution's KL would need the logits of both models; use k3 or k3+",
}


def unknown_key(key: str, known: Sequence[str]) -> str:
    """One line for a key that is not in `known`: whose name it is and what it is called here, or near misses."""
    if ours := _verl(key, known):
        return _answer(key, "verl", ours)
    leaf = key.rpartition(".")[2]
    if ours := TRL.get(leaf):
        return _answer(key, "TRL", ours)
    by_likeness = sorted(set(known), key=lambda candidate: SequenceMatcher(None, candidate, key).ratio(), reverse=True)
    same_leaf = [candidate for candidate in by_likeness if candidate.rpartition(".")[2] == leaf]
    near_leaf = [c for c in by_likeness if get_close_matches(leaf, [c.rpartition(".")[2]], cutoff=0.8)]
    near = get_close_matches(key, by_likeness, n=3, cutoff=0.6)  # may share the section alone
    proposals = list(dict.fromkeys([*same_leaf, *near_leaf]))[:3] or near
    if proposals:
        return f"unknown key {key}: did you mean {' or '.join(proposals)}?"
    return f"unknown key {key}: fastgrpo/config/schema.py holds every key"


def _answer(key: str, whose: str, ours: str) -> str:
    if ours.startswith("nothing"):
        return f"unknown key {key}: {whose}'s, without a counterpart here{ours.removeprefix('nothing')}"
    return f"unknown key {key}: {whose}'s; here it is {ours}"


def _verl(key: str, known: Sequence[str]) -> str | None:
    for path in (key, f"actor_rollout_ref.{key}"):
        if path in VERL:
            return VERL[path]
        prefixes = [prefix for prefix in VERL if prefix.endswith(".") and path.startswith(prefix)]
        if prefixes:
            return VERL[max(prefixes, key=len)]
    stripped = key.removeprefix("actor_rollout_ref.")
    return stripped if stripped != key and stripped in known else None
