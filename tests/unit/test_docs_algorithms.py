"""The pages on algorithms and batch sizes say what the program does: names, defaults, presets, the printed table."""

import re
from pathlib import Path

from fastgrpo.algorithm.kl import KL_ESTIMATORS
from fastgrpo.compose import list_presets, read_config
from fastgrpo.config import AdvEstimator, LossAgg, PolicyLoss, RolloutIs, check, option_keys

DOCS = Path(__file__).resolve().parents[2] / "docs"
ALGORITHMS, BATCH_SIZES = ((DOCS / name).read_text(encoding="utf-8") for name in ("algorithms.md", "batch_sizes.md"))


def blocks(text: str) -> list[str]:
    return re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)


def test_the_worked_example_is_what_the_program_prints() -> None:
    command, printed = blocks(BATCH_SIZES)
    config = read_config(command.split("fastgrpo.train")[1].split())
    layout = check(config, config.trainer.n_gpus_per_node)
    assert printed.splitlines() == layout.table()
    assert (layout.prompts_per_step, layout.sequences_per_step, layout.world) == (32, 256, 4)
    assert (layout.sequences_per_rank, layout.sequences_per_rank_and_update // 8) == (64, 8)  # 8 rounds of 8
    for number in ("**32**", "**256**", "**64 a\nGPU**", "**8 rounds of 8**"):
        assert number in BATCH_SIZES


def test_four_updates_of_the_example() -> None:
    layout = check(read_config(["+exp=rules_zh", "actor.ppo_mini_batch_size=8"]), 4)
    assert (layout.updates_per_step, layout.sequences_per_update, layout.sequences_per_rank_and_update) == (4, 64, 16)


def test_every_choice_has_its_row() -> None:
    rows = {
        name for line in ALGORITHMS.splitlines() if line.startswith("| `") for name in re.findall(r"`([^`]+)`", line)
    }
    assert {name.value for enum in (AdvEstimator, PolicyLoss, LossAgg) for name in enum} <= rows
    assert {name for name in KL_ESTIMATORS if not name.endswith("+")} <= rows
    assert {f"rollout_is={name.value}" for name in RolloutIs} <= rows
    assert {line.split()[0] for line in list_presets().splitlines()[1:]} <= rows


def test_named_options_exist_and_the_commands_compose() -> None:
    keys = set(option_keys())
    for text in (ALGORITHMS, BATCH_SIZES):
        named = re.findall(r"`((?:actor|algorithm|data|rollout|trainer|ref)(?:\.\w+)+)", text)
        assert (
            named and [key for key in named if key not in keys and not any(k.startswith(f"{key}.") for k in keys)] == []
        )
    (command,) = blocks(ALGORITHMS)
    assert read_config(command.split("fastgrpo.train")[1].split()).algorithm.filter_groups.enable


def test_two_common_errors_are_put_right() -> None:
    assert "GRPO is **Group Relative Policy Optimization**" in ALGORITHMS
    assert "**`gae` is refused**" in ALGORITHMS and "there is no critic here" in ALGORITHMS


def test_papers_of_the_presets_are_those_in_their_files() -> None:
    for line in list_presets().splitlines()[1:]:
        name, paper = line.split()[0], re.search(r"arXiv (\d{4}\.\d{5})", line)
        assert paper
        row = next(row for row in ALGORITHMS.splitlines() if row.startswith(f"| `{name}`"))
        assert paper[1] in row
