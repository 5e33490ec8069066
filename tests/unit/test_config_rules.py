"""Each rule broken once: the message names the keys, the values and the remedy."""

from collections.abc import Mapping
from copy import deepcopy

import pytest

from fastgrpo.config import (
    Layout,
    LimitsConfig,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
    build,
    check,
    check_model,
    notes,
    rollout_seconds,
    total_steps,
)
from fastgrpo.config.rules import RULES
from fastgrpo.errors import ConfigError

VALID = {
    "model": {"path": "some/model"},
    "data": {"train_files": ["arithmetic"], "train_batch_size": 8, "max_prompt_length": 12, "max_response_length": 8},
    "reward": {"functions": {"right": {"kind": "gsm8k"}}},
    "rollout": {"n": 4},
}


def configured(overrides: Mapping[str, object]) -> RunConfig:
    document = deepcopy(VALID)
    for key, value in overrides.items():
        *sections, leaf = key.split(".")
        place: dict = document
        for section in sections:
            place = place.setdefault(section, {})
        place[leaf] = value
    return build(document)


def refusal(overrides: Mapping[str, object], world: int = 1, ranks_per_node: int | None = None) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        check(configured(overrides), world, ranks_per_node=ranks_per_node)
    return str(refused.value).splitlines()


SP, TP = "actor.ulysses_sequence_parallel_size", "rollout.tensor_model_parallel_size"
STYLE = "reward.functions.style"
RC = "algorithm.rollout_correction"
JUDGE = {"kind": "judge", "url": "http://a/v1", "model": "m"}

# rule, ranks, what is set, what the message holds
BROKEN = [
    ("numbers_in_range", 1, {"data.train_batch_size": 0}, ["data.train_batch_size=0", "set 1 or more"]),
    ("numbers_in_range", 1, {"rollout.n": -1}, ["rollout.n=-1", "set 1 or more"]),
    ("numbers_in_range", 1, {"trainer.max_steps": 0}, ["trainer.max_steps=0", "set 1 or more"]),
    ("numbers_in_range", 1, {SP: 0}, [f"{SP}=0", "set 1 or more"]),
    ("numbers_in_range", 1, {TP: 0}, [f"{TP}=0", "set 1 or more"]),
    ("numbers_in_range", 1, {"actor.fsdp.replicas": 0}, ["actor.fsdp.replicas=0", "set 1 or more"]),
    ("numbers_in_range", 1, {"actor.optim.lr": -1e-6}, ["actor.optim.lr=-1e-06", "set 0 or more"]),
    ("numbers_in_range", 1, {"rollout.temperature": 0.0}, ["rollout.temperature=0.0", "above 0"]),
    ("numbers_in_range", 1, {"rollout.top_p": 1.5}, ["rollout.top_p=1.5", "1 or less"]),
    ("numbers_in_range", 1, {"rollout.kv_cache_gib": 0}, ["rollout.kv_cache_gib=0.0", "above 0"]),
    ("numbers_in_range", 1, {"actor.clip_ratio_low": 1.5}, ["actor.clip_ratio_low=1.5", "1 or less"]),
    ("numbers_in_range", 1, {"actor.optim.beta2": 1.0}, ["actor.optim.beta2=1.0", "below 1"]),
    ("numbers_in_range", 1, {"rollout.min_p": -0.1}, ["rollout.min_p=-0.1", "0 or more"]),
    ("numbers_in_range", 1, {"trainer.save_freq": 0}, ["trainer.save_freq=0", "-1 (only the model, at the end)"]),
    ("numbers_in_range", 1, {"trainer.test_freq": -2}, ["trainer.test_freq=-2", "-1 (only before and after)"]),
    ("numbers_in_range", 1, {"trainer.max_ckpt_to_keep": 0}, ["trainer.max_ckpt_to_keep=0", "set 1 or more"]),
    ("resume_is_readable", 1, {"trainer.resume": ""}, ["trainer.resume is empty", "set auto, never"]),
    ("resume_is_readable", 1, {"trainer.resume_allow": ["actor.optim.l"]}, ["'actor.optim.l'", "actor.optim.lr"]),
    ("resume_is_readable", 1, {"trainer.resume_allow": ["data.train_batch_size"]}, ["the place in the data"]),
    ("resume_is_readable", 1, {"trainer.resume_allow": ["model.lora_rank"]}, ["adapters of another shape", "=never"]),
    ("dual_clip_above_1", 1, {"actor.clip_ratio_c": 1.0}, ["actor.clip_ratio_c=1.0", "above 1", "3.0"]),
    (
        "graph_sizes_are_used",
        1,
        {"rollout.cudagraph_capture_sizes": [8], "rollout.enforce_eager": True},
        ["rollout.cudagraph_capture_sizes=[8]", "no use with rollout.enforce_eager=true"],
    ),
    ("graph_sizes_are_used", 1, {"rollout.cudagraph_capture_sizes": [8, 0]}, ["=[8, 0] must hold", "1 or more"]),
    ("numbers_in_range", 1, {"rollout.max_seconds": 0.0}, ["rollout.max_seconds=0.0", "above 0"]),
    ("numbers_in_range", 1, {"model.lora_rank": -1}, ["model.lora_rank=-1", "set 0 or more"]),
    (
        "lora_targets_are_inner",
        1,
        {"model.lora_rank": 8, "model.target_modules": ["q_proj", "lm_head"]},
        ["holds 'lm_head'", "the loss reads the output layer's weight itself", "name linear layers of the blocks"],
    ),
    ("lora_targets_are_inner", 1, {"model.lora_rank": 8, "model.target_modules": []}, ["is empty", "set all-linear"]),
    (
        "lora_targets_are_inner",
        1,
        {"model.lora_rank": 8, "model.target_modules": ["all-linear", "q_proj"]},
        ["['all-linear', 'q_proj']", "all-linear stands alone"],
    ),
    (
        "lora_reference_is_the_base",
        1,
        {"model.lora_rank": 8, "ref.offload_policy": True},
        ["ref.offload_policy=True", "model.lora_rank=8", "its adapters off", "name a second model in ref.path"],
    ),
    ("lora_options_are_read", 1, {"model.lora_alpha": 32}, ["model.lora_alpha=32", "model.lora_rank=0", "all weights"]),
    (
        "lora_options_are_read",
        1,
        {"model.target_modules": ["q_proj"]},
        ["model.target_modules=['q_proj']", "set model.lora_rank", "model.target_modules=[all-linear]"],
    ),
    (
        "merged_folder_has_adapters",
        1,
        {"trainer.save_merged": True},
        ["trainer.save_merged=true", "model.lora_rank=0", "set it to false"],
    ),
    ("numbers_in_range", 1, {"trainer.limits_s.gen": 0.0}, ["trainer.limits_s.gen=0.0", "above 0"]),
    (
        "rollouts_are_cut_before_the_watchdog_ends_them",
        1,
        {"rollout.max_seconds": 90.0, "trainer.limits_s.gen": 60.0},
        ["rollout.max_seconds=90 is not below trainer.limits_s.gen=60", "set it lower"],
    ),
    (
        "heartbeat_outlasts_some_beats",
        1,
        {"trainer.limits_s.heartbeat": 0.4},
        ["trainer.limits_s.heartbeat=0.4", "every 0.5 s", "set 2 or more"],
    ),
    ("validation_is_there", 1, {"trainer.val_only": True}, ["trainer.val_only=true", "list what is to be validated"]),
    (
        "validation_is_there",
        1,
        {"trainer.best_metric": "val/reward"},
        ["trainer.best_metric=val/reward", "data.val_files is empty", "such as reward/mean"],
    ),
    (
        "best_metric_is_measured_at_checkpoints",
        1,
        {
            "trainer.best_metric": "val/gsm8k/pass@8",
            "trainer.save_freq": 10,
            "trainer.test_freq": 4,
            "data.val_files": ["arithmetic"],
        },
        ["trainer.best_metric=val/gsm8k/pass@8", "trainer.test_freq=4", "trainer.save_freq=10", "let test_freq divide"],
    ),
    ("sleep_level_is_1_or_2", 1, {"rollout.sleep_level": 3}, ["rollout.sleep_level=3", "must be 2"]),
    ("loggers_are_known", 1, {"trainer.logger": ["swanlab"]}, ["'swanlab'", "console, tensorboard, wandb"]),
    ("names_are_usable", 1, {"model.path": ""}, ["model.path is empty"]),
    ("names_are_usable", 1, {"trainer.experiment_name": "a/b"}, ["trainer.experiment_name=a/b"]),
    ("names_are_usable", 1, {"trainer.run_dir": ""}, ["trainer.run_dir is empty"]),
    ("engine_name_has_a_known_form", 1, {"rollout.name": "sglang"}, ["rollout.name=sglang", "package.module:Class"]),
    (
        "mini_batch_divides_batch",
        1,
        {"data.train_batch_size": 6, "actor.ppo_mini_batch_size": 4},
        ["data.train_batch_size=6", "actor.ppo_mini_batch_size=4", "set actor.ppo_mini_batch_size=3"],
    ),
    (
        "mini_batch_divides_batch",
        1,
        {"actor.ppo_mini_batch_size": 16},
        ["data.train_batch_size=8", "actor.ppo_mini_batch_size=16", "set actor.ppo_mini_batch_size=8"],
    ),
    (
        "micro_batch_within_mini_batch",
        4,
        {
            "data.train_batch_size": 6,
            "actor.ppo_mini_batch_size": 2,
            SP: 2,
            "actor.micro_batch_size_per_gpu": 16,
        },
        ["actor.micro_batch_size_per_gpu=16", "4 = 2 prompts x rollout.n=4 / 2 data ranks", "set 4 or less"],
    ),
    ("group_has_two_samples", 1, {"rollout.n": 1}, ["rollout.n=1", "algorithm.adv_estimator=grpo", "set rollout.n=2"]),
    (
        "every_rank_gets_a_sequence",
        16,
        {"data.train_batch_size": 2, "rollout.n": 4, TP: 4},
        [
            "8 sequences",
            "data.train_batch_size=2",
            "16 data ranks and 4 engines",
            "set data.train_batch_size=4 or more",
        ],
    ),
    (
        "every_rank_gets_a_sequence",
        16,
        {"data.train_batch_size": 2, "rollout.n": 4, SP: 4},
        ["8 sequences", "rollout.n=4", "4 data ranks and 16 engines"],
    ),
    (
        "scale_factor_is_read",
        1,
        {"actor.loss_scale_factor": 512},
        ["actor.loss_scale_factor=512.0", "actor.loss_agg_mode=token-mean", "seq-mean-token-sum-norm"],
    ),
    (
        "gdpo_has_two_functions",
        1,
        {"algorithm.adv_estimator": "gdpo"},
        ["algorithm.adv_estimator=gdpo", "right is the only one", "set algorithm.adv_estimator=grpo"],
    ),
    (
        "filter_groups_can_fill_a_step",
        1,
        {"data.gen_batch_size": 4},
        ["data.gen_batch_size=4", "algorithm.filter_groups.enable=true"],
    ),
    (
        "filter_groups_can_fill_a_step",
        1,
        {"data.gen_batch_size": 2, "algorithm.filter_groups": {"enable": True, "max_num_gen_batches": 3}},
        ["data.gen_batch_size=2", "max_num_gen_batches=3", "data.train_batch_size=8", "set data.gen_batch_size=3"],
    ),
    (
        "filter_groups_can_fill_a_step",
        1,
        {"rollout.n": 1, "algorithm": {"adv_estimator": "reinforce_plus_plus", "filter_groups": {"enable": True}}},
        ["algorithm.filter_groups.enable=true", "set rollout.n=2 or more"],
    ),
    (
        "filter_metric_is_a_function",
        1,
        {"algorithm.filter_groups.metric": "acc"},
        ["algorithm.filter_groups.metric=acc", "reward.functions: right", "or null"],
    ),
    (
        "one_kl_term",
        1,
        {"algorithm.use_kl_in_reward": True},
        ["algorithm.use_kl_in_reward=true", "set actor.use_kl_loss=false"],
    ),
    (
        "kl_ctrl_is_read",
        1,
        {"algorithm.kl_ctrl.type": "adaptive"},
        ["algorithm.kl_ctrl.type=adaptive", "set algorithm.use_kl_in_reward=true"],
    ),
    (
        "adaptive_kl_starts_above_0",
        1,
        {
            "algorithm.use_kl_in_reward": True,
            "actor.use_kl_loss": False,
            "algorithm.kl_ctrl": {"type": "adaptive", "kl_coef": 0},
        },
        ["algorithm.kl_ctrl.kl_coef=0", "set one above 0"],
    ),
    ("importance_bounds_fit", 1, {f"{RC}.rollout_is_threshold_lower": 0.5}, ["=0.5", "set that, or null"]),
    (
        "importance_bounds_fit",
        1,
        {f"{RC}.rollout_is": "icepop", f"{RC}.rollout_is_threshold": 0.5},
        [f"{RC}.rollout_is=icepop", "to 0.5", "such as 0.5 and 5.0"],
    ),
    ("rejection_bounds_fit", 1, {f"{RC}.rollout_rs_threshold": 2.0}, ["are read only with", "both to null"]),
    ("rejection_bounds_fit", 1, {f"{RC}.rollout_rs": "seq_mean_k3"}, ["has no bound", "such as 0.01"]),
    (
        "rejection_bounds_fit",
        1,
        {RC: {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": 2.0, "rollout_rs_threshold_lower": 3.0}},
        ["threshold_lower=3.0", "to 2.0", "below the upper one"],
    ),
    (
        "rejection_bounds_fit",
        1,
        {RC: {"rollout_rs": "seq_sum_k2", "rollout_rs_threshold": 2.0, "rollout_rs_threshold_lower": 1.0}},
        ["threshold_lower=1.0", "seq_sum_k2 is a divergence"],
    ),
    (
        "correction_has_logprobs",
        1,
        {f"{RC}.bypass_mode": True, "rollout.top_p": 0.9},
        [f"{RC}.bypass_mode=true", "rollout.top_p=0.9", "set 1, -1, 0, 1"],
    ),
    (
        "correction_has_logprobs",
        1,
        {RC: {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 2.0}, "rollout.top_k": 50},
        [f"{RC}.rollout_rs=seq_mean_k1", "top_k=50"],
    ),
    (
        "warmup_ends_within_the_run",
        1,
        {"actor.optim.lr_warmup_steps": 50, "trainer.max_steps": 10, "actor.ppo_mini_batch_size": 2},
        ["actor.optim.lr_warmup_steps=50", "40 updates = trainer.max_steps=10 x 4", "set 40 or less"],
    ),
    (
        "longest_sequence_fits_the_engine",
        1,
        {"rollout.max_model_len": 16},
        ["data.max_prompt_length=12 + data.max_response_length=8 = 20", "rollout.max_model_len=16", "=20"],
    ),
    (
        "longest_sequence_fits_the_token_budget",
        2,
        {"actor.max_tokens_per_gpu": 9, SP: 2},
        ["= 20 tokens", "18 = actor.max_tokens_per_gpu=9 x", f"{SP}=2", "set actor.max_tokens_per_gpu=10"],
    ),
    (
        "engine_prefills_every_sequence",
        1,
        {"rollout.max_num_batched_tokens": 100},
        ["rollout.max_num_batched_tokens=100", "rollout.max_num_seqs=256", "set rollout.max_num_batched_tokens=256"],
    ),
    ("groups_divide_the_ranks", 6, {SP: 4}, [f"{SP}=4 does not divide the 6 ranks", "set 1, 2, 3 or 6"]),
    ("groups_divide_the_ranks", 4, {TP: 3}, [f"{TP}=3 does not divide the 4 ranks", "set 1, 2 or 4"]),
    ("replicas_hold_whole_groups", 4, {"actor.fsdp.replicas": 3}, ["actor.fsdp.replicas=3", "set 1, 2 or 4"]),
    (
        "replicas_hold_whole_groups",
        4,
        {"actor.fsdp.replicas": 2, SP: 4},
        ["actor.fsdp.replicas=2", "2 of 4", f"{SP}=4"],
    ),
    ("hf_engine_has_no_tensor_parallelism", 2, {"rollout.name": "hf", TP: 2}, [f"{TP}=2", "rollout.name=vllm"]),
    (
        "one_kind_of_offload",
        1,
        {"actor.fsdp.offload_policy": True, "actor.fsdp.offload_during_rollout": True},
        ["actor.fsdp.offload_policy=true", "set actor.fsdp.offload_during_rollout=false"],
    ),
    (
        "one_kind_of_offload",
        1,
        {"actor.fsdp.offload_policy": True, "actor.fsdp.offload_optimizer": True},
        ["actor.fsdp.offload_policy=true", "set actor.fsdp.offload_optimizer=false"],
    ),
    (
        "offload_has_something_to_offload",
        1,
        {"actor.activation_offload": True, "actor.gradient_checkpointing": 0},
        ["actor.activation_offload=true", "set actor.gradient_checkpointing=1"],
    ),
    (
        "attention_runs_on_the_device",
        1,
        {"trainer.device": "cpu", "actor.attention": "flash"},
        ["actor.attention=flash", "trainer.device=cpu"],
    ),
    ("data_is_given", 1, {"data.train_files": []}, ["data.train_files is empty"]),
    ("data_files_have_a_known_form", 1, {"data.val_files": ["my.csv"]}, ["data.val_files holds 'my.csv'", ".jsonl"]),
    ("arithmetic_can_be_made", 1, {"data.arithmetic.operations": "+/"}, ["data.arithmetic.operations='+/'"]),
    ("arithmetic_can_be_made", 1, {"data.arithmetic.min_value": 100}, ["min_value=100", "max_value=99"]),
    ("arithmetic_can_be_made", 1, {"data.arithmetic.templates": ["add"]}, ["templates: 'add'", "{task}"]),
    ("arithmetic_can_be_made", 1, {"data.arithmetic.templates": []}, ["templates is empty"]),
    ("greedy_validation_draws_once", 1, {"rollout.val_kwargs.n": 4}, ["rollout.val_kwargs.n=4", "temperature"]),
    ("reward_is_given", 1, {"reward.functions": {}}, ["reward.functions is empty"]),
    ("reward_functions_are_complete", 1, {STYLE: {"kind": "custom"}}, [f"{STYLE}.path=None", "Python file"]),
    ("reward_functions_are_complete", 1, {STYLE: {"kind": "rules"}}, [f"{STYLE}.rules is empty"]),
    (
        "reward_options_are_read",
        1,
        {STYLE: {"kind": "gsm8k", "rules": [{"pattern": "a"}]}},
        [f"{STYLE}.rules is not read", f"set {STYLE}.kind=rules"],
    ),
    (
        "reward_options_are_read",
        1,
        {STYLE: {"kind": "gsm8k", "path": "a.py"}},
        [f"{STYLE}.path=a.py is not read", f"set {STYLE}.kind=custom"],
    ),
    ("reward_functions_are_complete", 1, {"data.reference_key": None}, ["kind=gsm8k", "data.reference_key"]),
    ("reward_options_are_read", 1, {STYLE: {"kind": "format", "url": "http://a"}}, [f"{STYLE}.url=http://a", "judge"]),
    ("reward_functions_are_complete", 1, {STYLE: {"kind": "format", "tags": []}}, [f"{STYLE}.tags=[]", "think"]),
    ("code_limits_fit", 1, {STYLE: {"kind": "code", "max_processes": 0}}, [f"{STYLE}.max_processes=0", "set 1"]),
    (
        "code_limits_fit",
        1,
        {STYLE: {"kind": "code", "time_limit_s": 25}},
        [f"{STYLE}.time_limit_s=25.0", "reward.timeout_s=30.0", "set reward.timeout_s=37"],
    ),
    (
        "judges_and_models_are_found",
        1,
        {STYLE: {"kind": "judge", "url": "http://a/v1"}},
        [f"{STYLE}.model=''", "8000/v1"],
    ),
    ("judges_and_models_are_found", 1, {STYLE: {**JUDGE, "url": "a:8000"}}, [f"{STYLE}.url=a:8000", "http://"]),
    (
        "judges_and_models_are_found",
        1,
        {STYLE: {"kind": "model"}},
        [f"{STYLE}.path=None", f"{STYLE}.url=None", "one of"],
    ),
    (
        "choices_have_a_place",
        1,
        {"data.prompt_template": "{question}", "data.choices_key": "options"},
        ["data.choices_key=options", "{choices}"],
    ),
    ("judges_and_models_are_found", 1, {STYLE: {"kind": "file"}}, [f"{STYLE}.path=None", "FILE.jsonl"]),
    (
        "judges_and_models_are_found",
        1,
        {STYLE: {**JUDGE, "url": "https://me:hunter2@judge.example/v1"}},
        [f"{STYLE}.url=https://***@judge.example/v1 holds what may be a secret", f"{STYLE}.api_key_env"],
    ),
    *(
        (
            "judges_and_models_are_found",
            1,
            {STYLE: {**JUDGE, "url": f"http://h/v1{end}hunter2"}},
            [f"{STYLE}.url=http://h/v1{end}*** holds what may be a secret"],
        )
        for end in ("?sig=", "?access=", "?", "#")
    ),
    (
        "options_hold_no_tokens",
        1,
        {"data.system_prompt": "Use hf_AbCdEfGhIjKlMnOpQrSt to log in."},
        ["data.system_prompt holds what looks like an access token"],
    ),
    ("judges_and_models_can_run", 1, {STYLE: {**JUDGE, "max_score": 0}}, [f"{STYLE}.max_score=0", "above 0"]),
    ("judges_and_models_can_run", 1, {STYLE: {**JUDGE, "max_retries": -1}}, [f"{STYLE}.max_retries=-1", "0 or more"]),
    ("length_reward_fits", 1, {STYLE: {"kind": "length", "max_length": 0}}, [f"{STYLE}.max_length=0", "null"]),
    (
        "length_reward_fits",
        1,
        {STYLE: {"kind": "length", "overlong_buffer_len": 9}},
        [f"{STYLE}.overlong_buffer_len=9", "longest response, 8", "set 1"],
    ),
    (
        "length_reward_fits",
        1,
        {STYLE: {"kind": "length"}},
        [f"{STYLE}.overlong_buffer_len=0", "each score is 0", f"set {STYLE}.overlong_buffer_len=1"],
    ),
    *(
        ("reward_options_are_read_here", 1, {STYLE: options}, [f"{STYLE}.{unread} is not read with {STYLE}.{form}"])
        for options, unread, form in (
            ({"kind": "length", "shape": "linear", "overlong_buffer_len": 2}, "overlong_buffer_len=2", "shape=linear"),
            ({"kind": "model", "url": "http://a", "label": "good"}, "label=good", "url"),
            ({"kind": "model", "path": "a/b", "max_retries": 1}, "max_retries=1", "path"),
        )
    ),
    ("reward_functions_are_complete", 1, {"reward.functions.right.weight": 0}, ["every weight is 0"]),
    (
        "reward_functions_are_complete",
        1,
        {"reward.functions": {"a b": {"kind": "gsm8k"}}},
        ["reward.functions.a b", "label"],
    ),
    (
        "patterns_compile",
        1,
        {STYLE: {"kind": "rules", "rules": [{"pattern": "a"}, {"pattern": "(b"}]}},
        [f"{STYLE}.rules[1].pattern='(b'", "unterminated"],
    ),
    (
        "patterns_compile",
        1,
        {STYLE: {"kind": "rules", "rules": [{"score": 1}]}},
        [f"{STYLE}.rules[0].pattern is empty"],
    ),
    (
        "patterns_compile",
        1,
        {STYLE: {"kind": "rules", "rules": [{"pattern": "a", "flags": "g"}]}},
        [f"{STYLE}.rules[0].flags='g'", "a i m s x"],
    ),
]


@pytest.mark.parametrize(("rule", "world", "overrides", "fragments"), BROKEN)
def test_a_broken_rule_is_one_line_with_keys_values_and_remedy(
    rule: str, world: int, overrides: Mapping[str, object], fragments: list[str]
) -> None:
    lines = refusal(overrides, world)
    assert len(lines) == 1, lines
    for fragment in fragments:
        assert fragment in lines[0]


def test_every_rule_is_broken_above() -> None:
    named = {rule.__name__ for rule in RULES} | {"data_is_given", "reward_is_given"}
    assert {rule for rule, *_ in BROKEN} == named


def test_all_broken_rules_are_reported_at_once() -> None:
    lines = refusal({"rollout.n": 1, "rollout.top_p": 0.0, "rollout.name": "x", "data.train_batch_size": 1}, world=2)
    assert sorted(line.split("=")[0] for line in lines) == [
        "a step has 1 sequences (data.train_batch_size",
        "rollout.n",
        "rollout.name",
        "rollout.top_p",
    ]


@pytest.mark.parametrize("key", [SP, TP])
def test_groups_stay_inside_a_node(key: str) -> None:
    overrides = {key: 4, "data.train_batch_size": 32}
    assert refusal(overrides, world=4, ranks_per_node=2) == [f"{key}=4 would cross nodes of 2 ranks; set 1 or 2"]
    check(configured(overrides), 4, ranks_per_node=4)


def test_prompts_and_reward_may_come_from_python() -> None:
    config = configured({"data.train_files": [], "reward.functions": {}})
    check(config, 1, needs_data=False, needs_reward=False)
    with pytest.raises(ConfigError, match=r"data\.train_files is empty"):
        check(config, 1, needs_reward=False)


def test_learning_rate_0_and_plain_enum_texts_are_legitimate() -> None:
    config = configured({"actor.optim.lr": 0, "rollout.name": "my.engines:Engine", "trainer.seed": 0})
    config.actor.loss_agg_mode = "token-sum"  # type: ignore[assignment]  # as written in Python
    check(config, 1)


def test_wrong_types_in_python_are_refused() -> None:
    config = configured({})
    config.rollout.n = "8"  # type: ignore[assignment]
    config.data.train_files = "arithmetic"  # type: ignore[assignment]
    with pytest.raises(ConfigError) as refused:
        check(config, 1)
    assert "rollout.n must be a whole number, not the text '8'" in str(refused.value)
    assert "data.train_files must be a list" in str(refused.value)


# (query heads, key-value heads, sp) of B14 in words: Hq % sp == 0, and Hkv % sp == 0 or sp % Hkv == 0.
@pytest.mark.parametrize("heads", [(32, 4, 8), (40, 8, 40), (32, 8, 4), (14, 2, 2), (28, 4, 4), (28, 4, 1)])
def test_heads_that_divide(heads: tuple[int, int, int]) -> None:
    num_heads, num_kv_heads, sp = heads
    config = configured({SP: sp, TP: sp, "data.train_batch_size": 64})
    layout = check(config, sp)
    check_model(config, layout, num_heads=num_heads, num_kv_heads=num_kv_heads, hidden=64, max_positions=64, vocab=100)


@pytest.mark.parametrize(
    ("heads", "remedy"),
    [((28, 4, 8), "set 1, 2, 4 or 28"), ((14, 2, 4), "set 1, 2 or 14"), ((9, 3, 2), "set 1, 3 or 9")],
)
@pytest.mark.parametrize("key", [SP, TP])
def test_heads_that_do_not_divide(heads: tuple[int, int, int], remedy: str, key: str) -> None:
    num_heads, num_kv_heads, size = heads
    config = configured({key: size, "data.train_batch_size": 64})
    layout = check(config, 8)
    with pytest.raises(ConfigError) as refused:
        check_model(
            config, layout, num_heads=num_heads, num_kv_heads=num_kv_heads, hidden=64, max_positions=64, vocab=100
        )
    message = str(refused.value)
    assert message.startswith(f"{key}={size} does not divide")
    assert f"{num_heads} attention heads and {num_kv_heads} key-value heads" in message
    assert message.endswith(remedy)


def test_without_groups_one_sample_is_enough() -> None:
    check(configured({"rollout.n": 1, "algorithm.adv_estimator": "reinforce_plus_plus"}), 1)


def test_gae_is_refused_with_the_reason_and_what_to_use() -> None:
    with pytest.raises(ConfigError) as refused:
        configured({"algorithm.adv_estimator": "gae"})
    message = str(refused.value)
    assert message.startswith("algorithm.adv_estimator must be one of grpo, dr_grpo, rloo, ")
    assert message.endswith("a group's own rewards are the baseline; use grpo") and "GAE needs a critic" in message


def test_model_limits() -> None:
    config = configured({"rollout.top_k": 101, "rollout.max_model_len": 24})
    layout = check(config, 1)
    with pytest.raises(ConfigError) as refused:
        check_model(config, layout, num_heads=4, num_kv_heads=2, hidden=8, max_positions=23, vocab=100)
    positions, top_k = str(refused.value).splitlines()
    assert "rollout.max_model_len=24: the model reads 23 tokens at most" in positions
    assert top_k == "rollout.top_k=101 is more than the model's 100 tokens; set -1 for all"


def test_a_rank_above_the_models_width_is_refused() -> None:
    config = configured({"model.lora_rank": 64})
    shape = {"num_heads": 4, "num_kv_heads": 2, "max_positions": 64, "vocab": 100}
    check_model(config, check(config, 1), hidden=64, **shape)
    with pytest.raises(
        ConfigError, match=r"model\.lora_rank=64 is more than the model's hidden size of 63.*such as 16"
    ):
        check_model(config, check(config, 1), hidden=63, **shape)


def test_steps_of_a_run() -> None:
    epochs = {"trainer.total_epochs": 3}
    assert total_steps(configured(epochs), 8) == 3
    assert total_steps(configured(epochs), 23) == 6  # the rest of 7 prompts waits for the next epoch's order
    assert total_steps(configured(epochs | {"trainer.max_steps": 100}), 23) == 100
    with pytest.raises(ConfigError, match=r"0 batches: 5 training prompts .*data.train_batch_size=8; set .*=5 or less"):
        total_steps(configured({}), 5)


def test_layout_of_the_worked_example() -> None:
    """32 prompts x 8 samples on 4 GPUs: 32, 256, 64 a GPU, 8 rounds of 8."""
    overrides = {
        "data.train_batch_size": 32,
        "rollout.n": 8,
        TP: 2,
        "actor.micro_batch_size_per_gpu": 8,
        "actor.max_tokens_per_gpu": 16384,
        "data.max_prompt_length": 512,
        "data.max_response_length": 1024,
    }
    layout = check(configured(overrides), 4)
    assert (layout.prompts_per_step, layout.sequences_per_step, layout.sequences_per_rank) == (32, 256, 64)
    assert (layout.dp, layout.engines, layout.updates_per_step, layout.max_model_len) == (4, 2, 1, 1536)
    table = [" ".join(line.split()) for line in layout.table()]
    assert table == [
        "a step 32 prompts data.train_batch_size",
        "256 sequences x 8 samples a prompt (rollout.n)",
        "an engine 128 sequences over 2 = 4 ranks / 2 (rollout.tensor_model_parallel_size)",
        "a GPU 64 sequences over 4 data ranks",
        "an update 32 prompts actor.ppo_mini_batch_size",
        "256 sequences 64 a GPU",
        "updates a step 1 1 mini-batch",
        "a forward 16384 tokens at most actor.max_tokens_per_gpu: 10 of the longest sequences (1536 tokens)",
        "8 sequences at most actor.micro_batch_size_per_gpu: 8 rounds or more an update",
    ]


def test_layout_with_every_axis() -> None:
    overrides = {
        "data.train_batch_size": 6,
        "rollout.n": 3,
        "actor.ppo_mini_batch_size": 2,
        "actor.ppo_epochs": 2,
        "actor.fsdp.replicas": 2,
        "actor.max_tokens_per_gpu": 100,
        SP: 2,
    }
    layout = check(configured(overrides), 8, ranks_per_node=4)
    assert (layout.nodes, layout.dp, layout.engines, layout.shard) == (2, 4, 8, 4)
    assert (layout.sequences_per_rank, layout.sequences_per_rank_and_update) == (5, 2)  # ceil(18 / 4), ceil(6 / 4)
    assert (layout.mini_batches, layout.updates_per_step, layout.tokens_per_micro_batch) == (3, 6, 200)
    table = "\n".join(layout.table())
    assert "4-5" in table  # 18 sequences over 4 groups
    assert "2-3" in table  # and over 8 engines
    assert "a group of 2 GPUs" in table
    assert "3 mini-batches x 2 passes (actor.ppo_epochs)" in table
    open_budget = Layout.of(configured({}), 1).table()[-1]
    assert "as many  tokens as fit" in open_budget and "the memory plan decides" in open_budget


def test_ranks_of_an_engine_may_be_left_open() -> None:
    layout = check(configured({TP: None, "trainer.n_gpus_per_node": 4}), 4)
    assert (layout.tp, layout.engines) == (1, 4)
    assert f"over 4, or more over fewer: {TP}=null: the plan decides" in "\n".join(layout.table())
    alone = "\n".join(check(configured({TP: None}), 1).table())
    assert "over 1 = 1 ranks / 1" in alone and "null" not in alone.split(TP)[1].splitlines()[0]


def test_layout_checks_nothing() -> None:
    assert Layout.of(configured({"rollout.n": 1}), 1).samples_per_prompt == 1


def test_a_rollout_is_cut_before_the_watchdog_ends_the_run() -> None:
    assert rollout_seconds(RunConfig()) == 0.8 * 1800
    assert rollout_seconds(RunConfig(rollout=RolloutConfig(max_seconds=7.0))) == 7.0
    assert rollout_seconds(RunConfig(trainer=TrainerConfig(limits_s=LimitsConfig(gen=None)))) is None


@pytest.mark.parametrize(
    ("policy_loss", "low", "high", "words"),
    [
        ("cispo", 3e-4, 4e-4, "gspo's mean over a sequence, and actor.policy_loss=cispo bounds single tokens"),
        ("vanilla", 3e-4, 4e-4, "gspo's mean over a sequence, and actor.policy_loss=vanilla bounds single tokens"),
        ("gspo", 0.2, 0.2, "for single tokens, and actor.policy_loss=gspo"),
        ("gspo", 3e-4, 4e-4, None),
        ("sapo", 3e-4, 4e-4, None),  # reads no bounds
        ("cispo", 1.0, 4.0, None),
        ("vanilla", 0.0, 0.2, None),
    ],
)
def test_clips_that_belong_to_another_loss_are_said(
    policy_loss: str, low: float, high: float, words: str | None
) -> None:
    actor = {"actor.policy_loss": policy_loss, "actor.clip_ratio_low": low, "actor.clip_ratio_high": high}
    config = configured(actor)
    check(config, 1)  # not refused
    said = notes(config)
    if words is None:
        assert said == []
    else:
        (line,) = said
        assert words in line and f"actor.clip_ratio_low={low} and actor.clip_ratio_high={high}" in line
