"""Rules of the algorithm: options that would contradict each other or have no effect. One function a rule."""

from __future__ import annotations

from collections.abc import Iterator

from fastgrpo.config.layout import Layout
from fastgrpo.config.schema import RunConfig
from fastgrpo.config.wording import at

_IS = "algorithm.rollout_correction.rollout_is"
_RS = "algorithm.rollout_correction.rollout_rs"


def group_has_two_samples(c: RunConfig, layout: Layout) -> Iterator[str]:
    if c.rollout.n == 1 and c.algorithm.adv_estimator != "reinforce_plus_plus":
        yield (
            f"rollout.n=1: algorithm.adv_estimator={c.algorithm.adv_estimator} compares the samples of a prompt with "
            "each other; set rollout.n=2 or more, or algorithm.adv_estimator=reinforce_plus_plus"
        )


def gdpo_has_two_functions(c: RunConfig, layout: Layout) -> Iterator[str]:
    active = [label for label, function in c.reward.functions.items() if function.weight]
    if c.algorithm.adv_estimator == "gdpo" and len(active) == 1:
        yield (
            f"algorithm.adv_estimator=gdpo compares each reward function on its own, and {active[0]} is the only one; "
            "add another under reward.functions, or set algorithm.adv_estimator=grpo"
        )


def filter_groups_can_fill_a_step(c: RunConfig, layout: Layout) -> Iterator[str]:
    filtering, size = c.algorithm.filter_groups, c.data.gen_batch_size
    if not filtering.enable:
        if size is not None:
            yield f"data.gen_batch_size={size} is read only with algorithm.filter_groups.enable=true; set that, or null"
        return
    if c.rollout.n == 1:
        yield "algorithm.filter_groups.enable=true keeps groups whose rewards differ; set rollout.n=2 or more, or false"
    rounds, batch = filtering.max_num_gen_batches, c.data.train_batch_size
    if size is not None and size * rounds < batch:
        yield (
            f"data.gen_batch_size={size} prompts x algorithm.filter_groups.max_num_gen_batches={rounds} cannot fill a "
            f"step of data.train_batch_size={batch}; set data.gen_batch_size={-(-batch // rounds)} or more"
        )


def filter_metric_is_a_function(c: RunConfig, layout: Layout) -> Iterator[str]:
    metric, labels = c.algorithm.filter_groups.metric, list(c.reward.functions)
    if metric is not None and labels and metric not in labels:
        yield (
            f"algorithm.filter_groups.metric={metric} is none of reward.functions: {', '.join(labels)}; set one of "
            "them, or null for the whole reward"
        )


def scale_factor_is_read(c: RunConfig, layout: Layout) -> Iterator[str]:
    if c.actor.loss_scale_factor is not None and c.actor.loss_agg_mode != "seq-mean-token-sum-norm":
        yield (
            f"{at(c, 'actor.loss_scale_factor')} has no effect with {at(c, 'actor.loss_agg_mode')}; "
            "set actor.loss_agg_mode=seq-mean-token-sum-norm or actor.loss_scale_factor=null"
        )


def one_kl_term(c: RunConfig, layout: Layout) -> Iterator[str]:
    if c.algorithm.use_kl_in_reward and c.actor.use_kl_loss:
        yield (
            "algorithm.use_kl_in_reward=true beside actor.use_kl_loss=true would count the KL twice; "
            "set actor.use_kl_loss=false, or keep the KL in the loss"
        )


def kl_ctrl_is_read(c: RunConfig, layout: Layout) -> Iterator[str]:
    if c.algorithm.kl_ctrl.type == "adaptive" and not c.algorithm.use_kl_in_reward:
        yield (
            "algorithm.kl_ctrl.type=adaptive moves the coefficient of the KL in the reward, which is off; "
            "set algorithm.use_kl_in_reward=true (and actor.use_kl_loss=false), or algorithm.kl_ctrl.type=fixed"
        )


def adaptive_kl_starts_above_0(c: RunConfig, layout: Layout) -> Iterator[str]:
    if c.algorithm.kl_ctrl.type == "adaptive" and c.algorithm.kl_ctrl.kl_coef == 0:
        yield (
            "algorithm.kl_ctrl.kl_coef=0: an adaptive coefficient is multiplied, and 0 stays 0; set one above 0, such "
            "as 0.001"
        )


def importance_bounds_fit(c: RunConfig, layout: Layout) -> Iterator[str]:
    correction = c.algorithm.rollout_correction
    lower, upper = correction.rollout_is_threshold_lower, correction.rollout_is_threshold
    if lower is not None and correction.rollout_is != "icepop":
        yield f"{_IS}_threshold_lower={lower} is read only with {_IS}=icepop; set that, or null"
    if correction.rollout_is == "icepop" and (1 / upper if lower is None else lower) >= upper:
        yield (
            f"{_IS}=icepop keeps ratios from {_IS}_threshold_lower={lower} (null: the inverse) to {upper}, "
            "which leaves nothing; set a lower bound below the upper one, such as 0.5 and 5.0"
        )


def rejection_bounds_fit(c: RunConfig, layout: Layout) -> Iterator[str]:
    correction = c.algorithm.rollout_correction
    kind, upper, lower = correction.rollout_rs, correction.rollout_rs_threshold, correction.rollout_rs_threshold_lower
    if kind == "none":
        if upper is not None or lower is not None:
            yield f"{_RS}_threshold and {_RS}_threshold_lower are read only with {_RS}; set one, or both to null"
        return
    if upper is None:
        yield f"{_RS}={kind} has no bound; set {_RS}_threshold, such as {'2.0' if kind.endswith('k1') else '0.01'}"
    elif kind.endswith("k1") and (1 / upper if lower is None else lower) >= upper:
        yield (
            f"{_RS}={kind} keeps ratios from {_RS}_threshold_lower={lower} (null: the inverse) to {upper}, "
            "which leaves nothing; set a lower bound below the upper one"
        )
    if lower is not None and not kind.endswith("k1"):
        yield f"{_RS}_threshold_lower={lower} bounds a ratio, and {kind} is a divergence, at least 0; set it to null"


def correction_has_logprobs(c: RunConfig, layout: Layout) -> Iterator[str]:
    """A cut vocabulary leaves nothing to compare with. (The importance weight alone is then off, with a warning.)"""
    rollout, correction = c.rollout, c.algorithm.rollout_correction
    wanted = [
        *(["algorithm.rollout_correction.bypass_mode=true"] if correction.bypass_mode else []),
        *([f"{_RS}={correction.rollout_rs}"] if correction.rollout_rs != "none" else []),
    ]
    full = rollout.top_p == 1 and rollout.top_k <= 0 and rollout.min_p == 0 and rollout.repetition_penalty == 1
    for option in [] if full else wanted:
        yield (
            f"{option} needs the engine's logprobs, which rollout.top_p={rollout.top_p}, top_k={rollout.top_k}, "
            f"min_p={rollout.min_p}, repetition_penalty={rollout.repetition_penalty} make incomparable; set 1, -1, 0, 1"
        )
