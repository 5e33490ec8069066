"""Which numbers each option may take, on its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter

from fastgrpo.config.layout import Layout
from fastgrpo.config.schema import RunConfig

AT_LEAST_1 = (
    "data.train_batch_size",
    "data.gen_batch_size",
    "algorithm.filter_groups.max_num_gen_batches",
    "data.max_prompt_length",
    "data.max_response_length",
    "data.arithmetic.operands",
    "data.arithmetic.train_size",
    "data.arithmetic.val_size",
    "reward.num_workers",
    "reward.max_unscored_steps",
    "model.lora_alpha",
    "rollout.n",
    "rollout.tensor_model_parallel_size",
    "rollout.max_model_len",
    "rollout.max_num_seqs",
    "rollout.max_num_batched_tokens",
    "rollout.val_kwargs.n",
    "actor.ppo_mini_batch_size",
    "actor.ppo_epochs",
    "actor.max_tokens_per_gpu",
    "actor.micro_batch_size_per_gpu",
    "actor.mlp_slices",
    "actor.max_skipped_updates",
    "actor.ulysses_sequence_parallel_size",
    "actor.fsdp.replicas",
    "algorithm.kl_ctrl.horizon",
    "trainer.n_gpus_per_node",
    "trainer.max_steps",
    "trainer.total_epochs",
    "trainer.max_ckpt_to_keep",
    "trainer.shutdown_timeout_s",
)
AT_LEAST_0 = (
    "model.lora_rank",
    "rollout.val_kwargs.temperature",
    "actor.clip_ratio_low",
    "actor.clip_ratio_high",
    "actor.kl_loss_coef",
    "algorithm.kl_ctrl.kl_coef",
    "actor.grad_clip",
    "actor.gradient_checkpointing",
    "actor.optim.lr",
    "actor.optim.lr_warmup_steps",
    "actor.optim.weight_decay",
    "trainer.seed",
    "trainer.show_group_freq",
)
ABOVE_0 = (
    "trainer.limits_s.sync",
    "trainer.limits_s.gen",
    "trainer.limits_s.reward",
    "trainer.limits_s.score",
    "trainer.limits_s.update",
    "trainer.limits_s.validate",
    "trainer.limits_s.save",
    "trainer.limits_s.heartbeat",
    "rollout.max_seconds",
    "trainer.peak_tflops",
    "reward.timeout_s",
    "rollout.temperature",
    "rollout.top_p",
    "rollout.repetition_penalty",
    "rollout.kv_cache_gib",
    "actor.head_chunk_gib",
    "trainer.gpu_memory_gib",
    "trainer.host_memory_gib",
    "rollout.max_logprob_gap",
    "rollout.val_kwargs.top_p",
    "actor.loss_scale_factor",
    "actor.tau_pos",
    "actor.tau_neg",
    "actor.optim.eps",
    "algorithm.rollout_correction.rollout_is_threshold",
    "algorithm.rollout_correction.rollout_is_threshold_lower",
    "algorithm.rollout_correction.rollout_rs_threshold",
    "algorithm.rollout_correction.rollout_rs_threshold_lower",
    "algorithm.kl_ctrl.target_kl",
)
AT_MOST_1 = (
    "rollout.top_p",
    "rollout.val_kwargs.top_p",
    "rollout.min_p",
    "actor.clip_ratio_low",
    "actor.optim.min_lr_ratio",
)
BELOW_1 = ("actor.optim.beta1", "actor.optim.beta2")
SHARES = ("rollout.min_p", "actor.optim.min_lr_ratio", "actor.optim.beta1", "actor.optim.beta2")
MINUS_1_OR_MORE = (  # key, what -1 means
    ("data.train_max_samples", "all"),
    ("data.val_max_samples", "all"),
    ("rollout.top_k", "all"),
    ("rollout.val_kwargs.top_k", "all"),
    ("trainer.save_freq", "only the model, at the end"),
    ("trainer.test_freq", "only before and after"),
)


def numbers_in_range(c: RunConfig, layout: Layout) -> Iterator[str]:
    bounds: tuple[tuple[tuple[str, ...], Callable[[float], bool], str], ...] = (
        (AT_LEAST_1, lambda x: x >= 1, "1 or more"),
        (AT_LEAST_0, lambda x: x >= 0, "0 or more"),
        (ABOVE_0, lambda x: x > 0, "a number above 0"),
        (AT_MOST_1, lambda x: x <= 1, "1 or less"),
        (BELOW_1, lambda x: x < 1, "a number below 1"),
        (SHARES, lambda x: x >= 0, "0 or more"),
        (tuple(key for key, _ in MINUS_1_OR_MORE), lambda x: x == -1 or x >= 1, "1 or more, or -1"),
    )
    minus_one = dict(MINUS_1_OR_MORE)
    for keys, holds, wanted in bounds:
        for key in keys:
            value = attrgetter(key)(c)
            if value is not None and not holds(value):
                yield f"{key}={value} is out of range; set {wanted}" + (
                    f" ({minus_one[key]})" if key in minus_one else ""
                )
