"""Every shipped experiment is composed and checked for its own world size, without torch."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fastgrpo.config import RunConfig, check, check_model
from fastgrpo.data.sources import find_file
from fastgrpo.paths import config_dir
from fastgrpo.train import list_experiments, read_config

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
    check_model(config, layout, num_heads=heads, num_kv_heads=kv_heads, max_positions=positions, vocab=vocab)
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
