"""Every shipped experiment is composed and checked for its own world size, without torch."""

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import yaml

from fastgrpo.config import RunConfig, check, check_model
from fastgrpo.data.sources import find_file
from fastgrpo.errors import ConfigError
from fastgrpo.paths import config_dir
from fastgrpo.train import list_experiments, list_presets, read_config

EXPERIMENTS = sorted(file.stem for file in (config_dir() / "exp").glob("*.yaml"))

# heads, key-value heads, positions, vocabulary, as in the models' config.json
MODELS = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": (9, 3, 8192, 49152),
    "Qwen/Qwen2-0.5B-Instruct": (14, 2, 32768, 151936),
    "Qwen/Qwen2.5-0.5B-Instruct": (14, 2, 32768, 151936),
    "Qwen/Qwen2.5-1.5B-Instruct": (12, 2, 32768, 151936),
    "Qwen/Qwen2.5-7B-Instruct": (28, 4, 32768, 152064),
    "Qwen/Qwen3-8B": (32, 8, 40960, 151936),
}


def shipped(name: str) -> RunConfig:
    return read_config([f"+exp={name}"])


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_shipped_experiment_obeys_every_rule(name: str) -> None:
    config = shipped(name)
    layout = check(config, config.trainer.n_gpus_per_node)
    heads, kv_heads, positions, vocab = MODELS[config.model.path]
    check_model(
        config, layout, num_heads=heads, num_kv_heads=kv_heads, hidden=576, max_positions=positions, vocab=vocab
    )
    for entry in [*config.data.train_files, *config.data.val_files]:
        if entry.endswith((".jsonl", ".json", ".parquet")):
            find_file(entry)


def test_gsm8k_8xa100_is_what_was_asked_for() -> None:
    config = shipped("gsm8k_8xa100")
    layout = check(config, 8)
    assert config.model.path == "Qwen/Qwen2.5-7B-Instruct"
    assert (layout.prompts_per_step, layout.samples_per_prompt, layout.prompts_per_update) == (1024, 5, 256)
    assert (layout.max_prompt_length, layout.max_response_length) == (512, 1024)
    assert (layout.sequences_per_step, layout.sequences_per_rank, layout.updates_per_step) == (5120, 640, 4)
    assert config.data.prompt_suffix == ' Let\'s think step by step and output the final answer after "####".'


def test_longcot_fits_32k_tokens_in_one_row() -> None:
    layout = check(shipped("longcot_32k_8xa100"), 8)
    assert layout.max_sequence_tokens == layout.tokens_per_micro_batch == 32768
    assert shipped("longcot_32k_8xa100").actor.use_kl_loss is False
    assert shipped("longcot_32k_8xa100").actor.loss_agg_mode == "token-mean"


def test_rules_zh_is_what_was_asked_for() -> None:
    config = shipped("rules_zh")
    layout = check(config, 4)
    assert (layout.prompts_per_step, layout.samples_per_prompt, layout.tp, layout.engines) == (32, 8, 2, 2)
    assert (config.trainer.max_steps, config.trainer.save_freq, config.trainer.test_freq) == (1000, 100, 50)
    (style,) = config.reward.functions.values()
    scores = {rule.pattern: rule.score for rule in style.rules}
    assert scores == {"谢谢您的提问！$": 1.0, "^.*[。！？]$": 0.2, ".*[a-zA-Z].*": -0.5}


def test_files_hold_only_what_differs_from_the_defaults() -> None:
    def repeated(values: dict, defaults: object, path: str) -> list[str]:
        found = []
        for key, value in values.items():
            default = getattr(defaults, key, None)
            if isinstance(value, dict) and default is not None and not isinstance(default, dict):
                found += repeated(value, default, f"{path}.{key}")
            elif value == default and not isinstance(value, dict):
                found.append(f"{path}.{key}")
        return found

    for name in EXPERIMENTS:
        document = yaml.safe_load((config_dir() / "exp" / f"{name}.yaml").read_text(encoding="utf-8"))
        assert repeated(document, RunConfig(), name) == []


PRESETS = sorted(file.stem for file in (config_dir() / "algorithm").glob("*.yaml"))


def test_presets_are_those_that_were_promised() -> None:
    assert PRESETS == ["cispo", "dapo", "dr_grpo", "grpo", "gspo", "reinforce_pp", "rloo", "sapo"]
    lines = list_presets().splitlines()
    assert [line.split()[0] for line in lines[1:]] == PRESETS
    assert all(re.search(r"arXiv \d{4}\.\d{5}", line) for line in lines[1:])  # each names its paper


@pytest.mark.parametrize("experiment", ["quickstart", "longcot_32k_8xa100", "gsm8k_8xa100"])
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_obeys_every_rule_on_top_of_an_experiment(name: str, experiment: str) -> None:
    config = read_config([f"+exp={experiment}", f"algorithm={name}"])
    check(config, config.trainer.n_gpus_per_node)


@pytest.mark.parametrize("before", PRESETS)
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_leaves_nothing_of_another_that_acts(tmp_path: Path, name: str, before: str) -> None:
    """On top of any other, it comes to what it comes to alone, up to options that then act on nothing."""
    (tmp_path / "mine.yaml").write_text(f"exp: quickstart\nalgorithm: {before}\n")
    over = read_config([f"+exp={tmp_path}/mine.yaml", f"algorithm={name}"])
    assert what_acts(over) == alone(name)


def what_acts(config: RunConfig) -> RunConfig:
    """`config`, the options that act on nothing in it at their default."""
    actor, algorithm = config.actor, config.algorithm
    if actor.policy_loss in ("sapo", "reinforce"):
        actor.clip_ratio_low = actor.clip_ratio_high = 0.2
    if not actor.use_kl_loss:
        actor.kl_loss_coef = 0.001
    if not algorithm.use_kl_in_reward:
        algorithm.kl_ctrl.kl_coef = 0.001
    return config


@cache
def alone(name: str) -> RunConfig:
    return what_acts(read_config(["+exp=quickstart", f"algorithm={name}"]))


def test_presets_set_what_their_papers_say() -> None:
    dapo, gspo = (read_config(["+exp=longcot_32k_8xa100", f"algorithm={name}"]) for name in ("dapo", "gspo"))
    assert (dapo.actor.clip_ratio_low, dapo.actor.clip_ratio_high, dapo.actor.loss_agg_mode) == (
        0.2,
        0.28,
        "token-mean",
    )
    assert dapo.algorithm.filter_groups.enable and not dapo.actor.use_kl_loss
    assert (gspo.actor.policy_loss, gspo.actor.clip_ratio_low, gspo.actor.clip_ratio_high) == ("gspo", 3e-4, 4e-4)
    grpo = read_config(["+exp=longcot_32k_8xa100", "algorithm=grpo"])
    assert (grpo.actor.use_kl_loss, grpo.actor.kl_loss_coef) == (True, 0.04)
    assert grpo.actor.clip_ratio_high == 0.2  # the preset is over the experiment, which has 0.28
    assert read_config(["+exp=quickstart", "algorithm=rloo"]).algorithm.adv_estimator == "rloo"


def test_keys_of_the_command_line_are_over_the_preset_and_a_files_values_too(tmp_path: Path) -> None:
    config = read_config(["+exp=quickstart", "actor.clip_ratio_high=0.3", "+algorithm=dapo"])
    assert (config.actor.clip_ratio_high, config.algorithm.filter_groups.enable) == (0.3, True)
    (tmp_path / "mine.yaml").write_text("exp: quickstart\nalgorithm: cispo\nactor: {clip_ratio_high: 6.0}\n")
    mine = read_config([f"+exp={tmp_path}/mine.yaml"])
    assert (mine.actor.policy_loss, mine.actor.clip_ratio_high, mine.actor.clip_ratio_low) == ("cispo", 6.0, 1.0)
    (tmp_path / "alone.yaml").write_text("algorithm: sapo\nmodel: {path: a/b}\n")
    assert read_config([f"+exp={tmp_path}/alone.yaml"]).actor.policy_loss == "sapo"
    options = read_config(["+exp=quickstart", "algorithm.adv_estimator=opo"])  # a section, as ever
    assert options.algorithm.adv_estimator == "opo"


@pytest.mark.parametrize("command", [[], ["algorithm=cispo"]])
def test_a_file_sets_options_of_the_algorithm_beside_its_preset(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "mine.yaml").write_text(
        "exp: quickstart\n"
        "algorithm: {preset: dapo, filter_groups: {max_num_gen_batches: 3}, overlong_filtering: true}\n"
    )
    mine = read_config([f"+exp={tmp_path}/mine.yaml", *command])
    algorithm = mine.algorithm
    assert algorithm.overlong_filtering and algorithm.filter_groups.max_num_gen_batches == 3
    assert algorithm.filter_groups.enable == (not command)  # the preset of the command line is over the file's
    assert (mine.actor.policy_loss, mine.actor.clip_ratio_high) == (("cispo", 4.0) if command else ("vanilla", 0.28))
    assert read_config(["+exp=quickstart", "algorithm.preset=dapo"]) == read_config(
        ["+exp=quickstart", "algorithm=dapo"]
    )


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (
            ["algorithm=[dapo,gspo]"],
            r"algorithm=\[dapo,gspo\]: a preset is one name, such as dapo; single options .* beside",
        ),
        (["algorithm=null"], r"algorithm=null: a preset is one name"),
        (["algorithm=dapo", "algorithm=gspo"], r"algorithm=dapo and algorithm=gspo: a run has one preset; keep one"),
    ],
)
def test_a_run_has_one_preset(command: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=f"^{words}"):
        read_config(["+exp=quickstart", *command])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("algorithm: {preset: [dapo, gspo]}", r"algorithm: \{preset: \['dapo', 'gspo'\]\}: a preset is one name"),
        (
            "algorithm: {preset: grop}",
            r"algorithm: \{preset: grop\}: there is no preset of that name; did you mean algorithm=grpo",
        ),
        ("algorithm:", "algorithm: None: a preset is one name"),
        (
            "algorithm.adv_estimator: rloo",
            r"algorithm\.adv_estimator is written with dots; .* algorithm: \{adv_estimator: rloo\}$",
        ),
        ("actor: {optim.lr: 1.0e-5}", r"actor\.optim\.lr is written .* nested: actor: \{optim: \{lr: 1\.0e-05\}\}$"),
        ("actor.optim: {lr: 1.0e-5}", r"actor\.optim is written .* nested: actor: \{optim: \{lr: 1\.0e-05\}\}$"),
    ],
)
def test_mistakes_of_a_file_are_answered_in_its_own_form(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "mine.yaml").write_text(f"exp: quickstart\n{text}\n")
    with pytest.raises(ConfigError, match=rf"^\+exp=\S+mine\.yaml: {words}"):
        read_config([f"+exp={tmp_path}/mine.yaml"])


def test_an_unknown_preset_is_answered_with_the_list(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        read_config(["+exp=quickstart", "algorithm=grop"])
    first, *rest = str(refused.value).splitlines()
    assert first == "algorithm=grop: there is no preset of that name; did you mean algorithm=grpo?"
    assert rest == list_presets().splitlines()
    (tmp_path / "mine.yaml").write_text("exp: quickstart\nalgorithm: ppo\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml: algorithm: ppo: there is no preset of that name"):
        read_config([f"+exp={tmp_path}/mine.yaml"])


def test_listing_has_a_line_for_each_experiment_with_model_and_hardware() -> None:
    lines = list_experiments().splitlines()
    assert lines[0] == "experiments:"
    assert [line.split()[0] for line in lines[1:]] == EXPERIMENTS
    for line in lines[1:]:
        assert re.search(r"(Qwen|SmolLM)\S+", line) and "GB" in line and re.search(r"GPU|CPU", line)


def test_composing_and_checking_load_neither_torch_nor_vllm(tmp_path: Path) -> None:
    program = """
import json, sys
from fastgrpo.config import check
from fastgrpo.train import read_config
from fastgrpo import launch, __version__
check(read_config(["+exp=gsm8k_8xa100"]), 8)
print(json.dumps(sorted({"torch", "vllm", "transformers", "numpy"} & set(sys.modules))))
import subprocess
bare = "import sys, fastgrpo.config as c; c.check; print(sorted({'hydra', 'omegaconf', 'yaml'} & set(sys.modules)))"
subprocess.run([sys.executable, "-c", bare], check=True)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    composed, schema = done.stdout.splitlines()
    assert json.loads(composed) == []
    assert schema == "[]"
