"""TRL's names of options, with ours beside them, or `nothing: ` and why where there is no counterpart. How they are
looked up, and verl's, is in names.py.
"""

from __future__ import annotations

FUNCTIONS = "reward.functions.NAME.kind, a function a label, summed with their weights"
COLOCATED = "nothing: engine and trainer always share each GPU, in one process"
REFERENCE = "nothing: the reference policy stays as it was loaded; ref.path names it"
DROPOUT = "nothing: dropout is always off, or the policy would differ from the one that the engine drew from"

TRL = {
    "num_generations": "rollout.n",
    "per_device_train_batch_size": "data.train_batch_size (prompts over all ranks) and actor.micro_batch_size_per_gpu",
    "gradient_accumulation_steps": "nothing: it follows from actor.ppo_mini_batch_size and actor.max_tokens_per_gpu",
    "generation_batch_size": "data.train_batch_size (prompts, not sequences)",
    "steps_per_generation": "actor.ppo_mini_batch_size (prompts an update)",
    "num_iterations": "actor.ppo_epochs",
    "max_completion_length": "data.max_response_length",
    "beta": "actor.kl_loss_coef, with actor.use_kl_loss",
    "epsilon": "actor.clip_ratio_low",
    "epsilon_high": "actor.clip_ratio_high",
    "loss_type": "actor.policy_loss and actor.loss_agg_mode",
    "importance_sampling_level": "actor.policy_loss (gspo for sequences)",
    "delta": "actor.clip_ratio_c",
    "mask_truncated_completions": "algorithm.overlong_filtering",
    "scale_rewards": "algorithm.norm_adv_by_std_in_grpo",
    "vllm_importance_sampling_correction": "algorithm.rollout_correction.rollout_is",
    "vllm_importance_sampling_cap": "algorithm.rollout_correction.rollout_is_threshold",
    "entropy_coef": "actor.entropy_coeff",
    "learning_rate": "actor.optim.lr",
    "warmup_steps": "actor.optim.lr_warmup_steps (updates)",
    "warmup_ratio": "actor.optim.lr_warmup_steps (updates)",
    "adam_beta1": "actor.optim.beta1",
    "adam_beta2": "actor.optim.beta2",
    "adam_epsilon": "actor.optim.eps",
    "max_grad_norm": "actor.grad_clip",
    "num_train_epochs": "trainer.total_epochs",
    "logging_steps": "nothing: every step is logged",
    "save_steps": "trainer.save_freq",
    "save_total_limit": "trainer.max_ckpt_to_keep",
    "resume_from_checkpoint": "trainer.resume (auto, never or a path)",
    "metric_for_best_model": "trainer.best_metric",
    "greater_is_better": "trainer.best_mode",
    "full_determinism": "trainer.deterministic",
    "eval_steps": "trainer.test_freq",
    "output_dir": "trainer.run_dir",
    "run_name": "trainer.experiment_name",
    "report_to": "trainer.logger",
    "use_vllm": "rollout.name",
    "vllm_mode": COLOCATED,
    "vllm_gpu_memory_utilization": "rollout.kv_cache_gib (GiB, not a share of the GPU)",
    "vllm_tensor_parallel_size": "rollout.tensor_model_parallel_size",
    "vllm_max_model_length": "rollout.max_model_len",
    "vllm_enable_sleep_mode": "rollout.sleep_level",
    "model_name_or_path": "model.path",
    "attn_implementation": "actor.attention",
    "use_liger_kernel": "actor.use_liger, and actor.head for the loss",
    "torch_compile": "actor.use_torch_compile",
    "bf16": "actor.dtype",
    "dataset_name": "data.train_files",
    "dataset_config": "data.hub_config",
    "dataset_train_split": "data.train_split",
    "dataset_test_split": "data.val_split",
    "shuffle_dataset": "data.shuffle",
    "chat_template_kwargs": "data.apply_chat_template_kwargs",
    "reward_funcs": FUNCTIONS,
    "reward_weights": "reward.functions.NAME.weight",
    "top_entropy_quantile": "nothing: every token of an answer counts, whatever its entropy",
    "sync_ref_model": REFERENCE,
    "ref_model_mixup_alpha": REFERENCE,
    "ref_model_sync_steps": REFERENCE,
    "disable_dropout": DROPOUT,
    "lora_dropout": DROPOUT,
    "cast_lm_head_to_fp32": "nothing: the softmax is always in float32; actor.dtype=float32 has the product in it, too",
    "log_completions": "nothing: every sample is in the run folder; trainer.show_group_freq shows some",
    "num_completions_to_print": "trainer.show_group_freq (steps between two groups shown)",
    "vllm_importance_sampling_mode": (
        "algorithm.rollout_correction.rollout_is (token, sequence: truncated; icepop: tokens masked) and "
        "algorithm.rollout_correction.rollout_rs (sequences masked)"
    ),
    "off_policy_mask_threshold": (
        "algorithm.rollout_correction.rollout_rs_threshold, with rollout_rs (whatever the sign of the advantage)"
    ),
    "use_bias_correction_kl": (
        "nothing: the KL has no weight of its own; actor.kl_loss_type=k3+ has the right gradient on policy"
    ),
    "multi_objective_aggregation": "algorithm.adv_estimator (grpo: sum, then normalize; gdpo: normalize, then sum)",
    "sapo_temperature_pos": "actor.tau_pos, with actor.policy_loss=sapo",
    "sapo_temperature_neg": "actor.tau_neg, with actor.policy_loss=sapo",
    "vllm_server_base_url": COLOCATED,
    "vllm_server_host": COLOCATED,
    "vllm_server_port": COLOCATED,
    "vllm_server_timeout": COLOCATED,
    "use_peft": "model.lora_rank (above 0)",
    "lora_r": "model.lora_rank",
    "lora_target_modules": "model.target_modules",
    "optim": "nothing: AdamW always; actor.optim.lr and its neighbours set it",
    "fp16": "actor.dtype (bfloat16 or float32)",
    "eval_strategy": "trainer.test_freq (steps)",
    "eval_on_start": "trainer.val_before_train",
    "per_device_eval_batch_size": "nothing: validation is handed to the engine at once",
    "num_generations_eval": "rollout.val_kwargs.n",
    "save_strategy": "trainer.save_freq (steps)",
    "load_best_model_at_end": (
        "nothing: what is saved at the end is the last step's; with trainer.best_metric the best checkpoint stays, too"
    ),
}
