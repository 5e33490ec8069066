"""Documents into the schema: types, unknown keys, verl's and TRL's names, and the frozen option surface."""

import re
from pathlib import Path
from typing import Any

import pytest

from fastgrpo.config import ActorConfig, KlType, LossAgg, RegexRule, RunConfig, build, option_keys, to_document
from fastgrpo.config.names import TRL, VERL, unknown_key
from fastgrpo.config.rules import RULES
from fastgrpo.errors import ConfigError

SURFACE = Path(__file__).with_name("option_surface.txt")


def refusal(document: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as refused:
        build(document)
    return str(refused.value)


def test_option_surface_is_frozen() -> None:
    """A new option is a decision: add it to option_surface.txt, to the schema with unit and sentence, and to a rule."""
    assert list(option_keys()) == SURFACE.read_text().split()


def test_documents_and_schema_round_trip() -> None:
    document = {
        "actor": {"loss_agg_mode": "seq-mean-token-sum-norm", "kl_loss_type": "k3", "optim": {"lr": 1e-5}},
        "reward": {"functions": {"style": {"kind": "rules", "rules": [{"pattern": "谢谢您的提问！$", "score": 1}]}}},
        "data": {"apply_chat_template_kwargs": {"enable_thinking": False, "deep": {"a": [1]}}, "reference_key": None},
    }
    config = build(document)
    assert config.actor.loss_agg_mode == LossAgg["seq-mean-token-sum-norm"] == "seq-mean-token-sum-norm"
    assert config.actor.kl_loss_type == KlType["k3"]
    assert config.reward.functions["style"].rules == [RegexRule(pattern="谢谢您的提问！$", score=1.0)]
    assert config.data.apply_chat_template_kwargs == {"enable_thinking": False, "deep": {"a": [1]}}
    assert config.data.reference_key is None
    assert config.actor.clip_ratio_c == ActorConfig().clip_ratio_c
    assert build(to_document(config)) == config
    assert build({}) == RunConfig()


def test_only_what_loses_nothing_is_converted() -> None:
    config = build(
        {
            "rollout": {"temperature": 1, "kv_cache_gib": 2},
            "trainer": {"experiment_name": 7, "logger": "console"},
            "data": {"train_files": "my.jsonl"},
        }
    )
    assert type(config.rollout.temperature) is float
    assert config.rollout.kv_cache_gib == 2.0 and type(config.rollout.kv_cache_gib) is float
    assert config.trainer.experiment_name == "7"
    assert config.trainer.logger == ["console"]
    assert config.data.train_files == ["my.jsonl"]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (
            {"rollout": {"n": "8"}},
            "rollout.n must be a whole number, not the text '8'; write rollout.n=8 without quotes",
        ),
        ({"rollout": {"n": 8.0}}, "rollout.n must be a whole number, not 8.0"),
        ({"rollout": {"n": True}}, "rollout.n must be a whole number, not true"),
        ({"rollout": {"n": None}}, "rollout.n must be a whole number, not null"),
        ({"rollout": {"n": [8]}}, "rollout.n must be a whole number, not [8]"),
        (
            {"actor": {"clip_ratio_low": "0.3"}},
            "actor.clip_ratio_low must be a finite number, not the text '0.3'; write actor.clip_ratio_low=0.3 without "
            "quotes",
        ),
        ({"actor": {"kl_loss_coef": float("nan")}}, "actor.kl_loss_coef must be a finite number, not nan"),
        ({"actor": {"grad_clip": float("inf")}}, "actor.grad_clip must be a finite number, not inf"),
        ({"actor": {"use_kl_loss": "yes"}}, "actor.use_kl_loss must be true or false, not the text 'yes'"),
        ({"actor": {"use_kl_loss": 1}}, "actor.use_kl_loss must be true or false, not 1"),
        (
            {"trainer": {"max_steps": "None"}},
            "trainer.max_steps must be a whole number, not the text 'None'; an empty value is written null",
        ),
        (
            {"actor": {"loss_agg_mode": "token_mean"}},
            "actor.loss_agg_mode must be one of token-mean, token-sum, seq-mean-token-sum, seq-mean-token-sum-norm, "
            "seq-mean-token-mean, not the text 'token_mean'",
        ),
        (
            {"model": {"path": 1.5}},
            "model.path must be a text, not 1.5; put it in quotes in YAML, or write model.path='\"1.5\"'",
        ),
        ({"actor": 3}, "actor is a section, not 3; set what is in it, actor.ppo_mini_batch_size=..."),
        ({"trainer": {"logger": 3}}, "trainer.logger must be a list, not 3; write trainer.logger=[...]"),
        ({"trainer": {"logger": ["console", 3]}}, "trainer.logger[1] must be a text, not 3"),
        (
            {"reward": {"functions": [1]}},
            "reward.functions must be a mapping of names, not [1]; write reward.functions.NAME=...",
        ),
        (
            {"reward": {"functions": {"a": {"rules": [{"score": "x"}]}}}},
            "reward.functions.a.rules[0].score must be a finite number, not the text 'x'",
        ),
    ],
)
def test_wrong_types(document: dict[str, Any], message: str) -> None:
    assert refusal(document).startswith(message)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"rolout": {"n": 8}}, "unknown key rolout.n: did you mean rollout.n "),
        ({"rollout": {"temprature": 1}}, "unknown key rollout.temprature: did you mean rollout.temperature "),
        ({"trainer": {"lr": 1}}, "unknown key trainer.lr: did you mean actor.optim.lr"),
        ({"lr": 1}, "unknown key lr: did you mean actor.optim.lr"),
        ({"trainer": {"max_step": 3}}, "unknown key trainer.max_step: did you mean trainer.max_steps?"),
        ({"ppo_mini_batch_size": 1}, "unknown key ppo_mini_batch_size: did you mean actor.ppo_mini_batch_size"),
        (
            {"reward": {"functions": {"a": {"patth": "x"}}}},
            "unknown key reward.functions.a.patth: did you mean reward.functions.a.path",
        ),
        (
            {"reward": {"functions": {"a": {"rules": [{"patern": "x"}]}}}},
            "unknown key reward.functions.a.rules[0].patern: did you mean reward.functions.a.rules[0].pattern",
        ),
        (
            {"zzzz": {"qqqq": 1}},
            "unknown key zzzz.qqqq: fastgrpo/config/schema.py holds every key",
        ),
        # verl
        (
            {"actor_rollout_ref": {"rollout": {"n": 5}}},
            "unknown key actor_rollout_ref.rollout.n: verl's; here it is rollout.n",
        ),
        (
            {"actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 5}}},
            "unknown key actor_rollout_ref.actor.ppo_mini_batch_size: verl's; here it is actor.ppo_mini_batch_size",
        ),
        (
            {"actor": {"ppo_max_token_len_per_gpu": 5}},
            "unknown key actor.ppo_max_token_len_per_gpu: verl's; here it is actor.max_tokens_per_gpu",
        ),
        (
            {"algorithm": {"gdpo_reward_weights": [1]}},
            "unknown key algorithm.gdpo_reward_weights: verl's; here it is reward.functions.NAME.weight",
        ),
        (
            {"trainer": {"total_training_steps": 1}},
            "unknown key trainer.total_training_steps: verl's; here it is trainer.m",
        ),
        (
            {"custom_reward_function": {"path": "a"}},
            "unknown key custom_reward_function.path: verl's; here it is reward.f",
        ),
        (
            {"critic": {"optim": {"lr": 1}}},
            "unknown key critic.optim.lr: verl's, without a counterpart here: GRPO compares the samples of a group "
            "and has no critic",
        ),
        # TRL
        ({"num_generations": 8}, "unknown key num_generations: TRL's; here it is rollout.n"),
        ({"rollout": {"num_generations": 8}}, "unknown key rollout.num_generations: TRL's; here it is rollout.n"),
        ({"beta": 0.04}, "unknown key beta: TRL's; here it is actor.kl_loss_coef"),
        ({"epsilon_high": 0.3}, "unknown key epsilon_high: TRL's; here it is actor.clip_ratio_high"),
        ({"max_completion_length": 8}, "unknown key max_completion_length: TRL's; here it is data.max_response_length"),
        (
            {"per_device_train_batch_size": 8},
            "unknown key per_device_train_batch_size: TRL's; here it is data.train_batch",
        ),
        ({"sapo_temperature_pos": 1}, "unknown key sapo_temperature_pos: TRL's; here it is actor.tau_pos"),
        ({"sapo_temperature_neg": 1}, "unknown key sapo_temperature_neg: TRL's; here it is actor.tau_neg"),
        # verl's, which the keys around them would otherwise answer for
        (
            {"trainer": {"default_hdfs_dir": "x"}},
            "unknown key trainer.default_hdfs_dir: verl's, without a counterpart here: a run writes to trainer.run_dir",
        ),
        (
            {"data": {"custom_cls": {"path": "x"}}},
            "unknown key data.custom_cls.path: verl's, without a counterpart here: data.train_files reads",
        ),
        (
            {"reward_model": {"launch_reward_fn_async": True}},
            "unknown key reward_model.launch_reward_fn_async: verl's, without a counterpart here: rewards al",
        ),
        (
            {"actor_rollout_ref": {"actor": {"policy_loss": {"clip_cov_ratio": 1}}}},
            "unknown key actor_rollout_ref.actor.policy_loss.clip_cov_ratio: verl's, without a counterpart here: clip",
        ),
    ],
)
def test_unknown_keys(document: dict[str, Any], message: str) -> None:
    assert refusal(document).startswith(message)


def test_all_mistakes_are_reported_at_once() -> None:
    lines = refusal(
        {"beta": 1, "rollout": {"n": "8", "m": 1}, "actor_rollout_ref": {"a": 1, "b": {"c": 2}}}
    ).splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "unknown key beta",
        "rollout.n must be a whole number, not the text '8'; write rollout.n=8 without quotes",
        "unknown key rollout.m",
        "unknown key actor_rollout_ref.a",
        "unknown key actor_rollout_ref.b.c",
    ]


TRLS = [
    "top_entropy_quantile",
    "sync_ref_model",
    "ref_model_mixup_alpha",
    "ref_model_sync_steps",
    "disable_dropout",
    "cast_lm_head_to_fp32",
    "log_completions",
    "num_completions_to_print",
    "vllm_importance_sampling_mode",
    "vllm_server_base_url",
    "off_policy_mask_threshold",
    "use_bias_correction_kl",
    "multi_objective_aggregation",
    "use_peft",
    "lora_dropout",
    "eval_strategy",
    "per_device_eval_batch_size",
    "num_generations_eval",
    "optim",
    "fp16",
    "load_best_model_at_end",
]
VERLS = [
    "custom_reward_function.reward_kwargs.x",
    "actor_rollout_ref.actor.policy_loss.clip_cov_ratio",
    "actor_rollout_ref.rollout.ignore_eos",
    "rollout.enable_chunked_prefill",
    "rollout.engine_kwargs.vllm.seed",
    "model.external_lib",
]


@pytest.mark.parametrize(("key", "whose"), [*((key, "TRL") for key in TRLS), *((key, "verl") for key in VERLS)])
def test_options_of_others_are_answered_as_theirs(key: str, whose: str) -> None:
    answer = unknown_key(key, option_keys())
    assert answer.startswith(
        (f"unknown key {key}: {whose}'s; here it is ", f"unknown key {key}: {whose}'s, without a c")
    )


@pytest.mark.parametrize("ours", sorted({*VERL.values(), *TRL.values()}))
def test_proposed_keys_exist(ours: str) -> None:
    """What is answered to verl's and TRL's users is in the schema, or says that there is no counterpart."""
    keys = re.findall(r"\b(?:model|data|reward|rollout|actor|ref|algorithm|trainer)(?:\.\w+)+", ours)
    assert keys or ours.startswith(("nothing", "torchrun"))
    for key in keys:
        assert key.replace(".NAME", ".<name>") in option_keys()


@pytest.mark.parametrize("theirs", VERL)
def test_foreign_names_are_not_ours(theirs: str) -> None:
    assert theirs not in option_keys()
    assert unknown_key(theirs, option_keys()).startswith(f"unknown key {theirs}: verl's")


def test_rules_have_distinct_names() -> None:
    names = [rule.__name__ for rule in RULES]
    assert len(names) == len(set(names))
