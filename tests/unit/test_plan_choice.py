"""What the planner decides and advises, on made cases and on every shipped experiment; the command; README's table."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastgrpo.compose import read_config
from fastgrpo.config import Layout, RunConfig, build, check, loads_reference
from fastgrpo.plan import Sizes, engine_sizes, explain, read_sizes, settle, settle_on_cpu, with_option
from fastgrpo.plan.__main__ import main
from fastgrpo.plan.advice import MORE_GPUS, OTHER_TRAINING, SAME_NUMBERS, best_change, changes
from fastgrpo.plan.choose import Plan, break_even_tokens, budgets, cost
from fastgrpo.plan.constants import CARDS_GIB, GIB
from fastgrpo.plan.settle import OPTIONS, make_plan
from fastgrpo.policy.liger import _MLPS

ROOT = Path(__file__).parents[2]
SHAPES = ROOT / "bench" / "shapes"
QWEN_1P5B = read_sizes(SHAPES / "Qwen2.5-1.5B-Instruct")
QWEN_7B = read_sizes(SHAPES / "Qwen2.5-7B-Instruct")
ROOM = {  # experiment -> the smallest card that its headline promises
    "gsm8k_8xa100": "80 GB",
    "longcot_32k_8xa100": "80 GB",
    "qwen3_8b_gsm8k_8xa100": "80 GB",
    "qwen2_5_0p5b_gsm8k_1x24gb": "24 GB",
    "qwen2_5_1p5b_gsm8k_1x24gb": "24 GB",
    "qwen2_5_7b_lora_1x80gb": "80 GB",
    "dapo_math": "80 GB",
    "humaneval": "24 GB",
    "truthfulqa_mc": "24 GB",
    "rules_zh": "24 GB",
    "smollm2_gsm8k_1gpu": "24 GB",
    "quickstart": "24 GB",
}


def config_of(**options: Any) -> RunConfig:
    """Keys with __ for dots: actor__use_kl_loss=False."""
    config = build({"model": {"path": "some/model"}, "data": {"train_files": ["arithmetic"]}})
    for key, value in ({"actor__use_kl_loss": False} | options).items():
        config = with_option(config, key.replace("__", "."), value)
    return config


def planned(config: RunConfig, gpu_gib: float, world: int = 1, model: Any = QWEN_1P5B) -> tuple[RunConfig, Plan]:
    sizes = Sizes(model, model if loads_reference(config) else None)
    return settle(config, sizes, Layout.of(config, world), int(gpu_gib * GIB))


def advised(config: RunConfig, gpu_gib: float, world: int = 1, model: Any = QWEN_1P5B, phase: str | None = None) -> Any:
    sizes = Sizes(model, model if loads_reference(config) else None)
    return best_change(config, sizes, Layout.of(config, world), int(gpu_gib * GIB), phase)


# ---- settle


def test_all_open_options_are_decided_and_given_ones_kept() -> None:
    config = config_of(actor__gradient_checkpointing=2, actor__fsdp__reshard_after_forward=False)
    settled, plan = planned(config, 80)
    assert plan.fits
    values = {option: _at(settled, option) for option in OPTIONS.values()}
    assert None not in values.values() and settled.rollout.kv_cache_gib is not None
    assert values["actor.gradient_checkpointing"] == 2 and values["actor.fsdp.reshard_after_forward"] is False
    assert config.actor.max_tokens_per_gpu is None  # nothing was edited
    assert check(settled, 1, needs_reward=False).tokens_per_micro_batch == plan.settings.max_tokens_per_gpu
    again, same = planned(settled, 80)
    assert again == settled and same.settings == plan.settings and same.kv_bytes == plan.kv_bytes


def test_what_is_decided_is_what_is_planned() -> None:
    settled, plan = planned(config_of(), 80)
    as_it_is = make_plan(settled, Sizes(QWEN_1P5B, None), Layout.of(settled, 1), 80 * GIB)
    assert as_it_is.settings == plan.settings and as_it_is.training == plan.training
    assert as_it_is.rollout == plan.rollout


def test_much_room_recomputes_nothing_and_little_room_offloads() -> None:
    roomy = planned(config_of(), 139.5)[1].settings
    assert roomy.gradient_checkpointing == 0 and not roomy.offload_policy and not roomy.offload_during_rollout
    tight = planned(config_of(), 22)[1]  # 16 bytes x 1.5e9 do not fit into 22 GiB, 8 do, and into 14 not even those
    assert tight.fits and tight.settings.offload_optimizer and not tight.settings.offload_policy
    tighter = planned(config_of(), 14)[1]
    assert tighter.fits and tighter.settings.offload_policy and not tighter.settings.offload_optimizer
    assert not planned(config_of(), 6)[1].fits


def test_a_fast_gpu_gets_long_rows() -> None:
    """28 blocks take 0.21 s at least, in which 0.45 x 312e12 FLOP/s are 3,183 tokens of 6 x 1.54e9 FLOP, and of an
    H200's 989e12 10,090: rows of 3,072 would leave it idle for 0.7 of the time, so it recomputes larger ones."""
    slow, fast = (planned(config_of(trainer__peak_tflops=speed), 24)[1] for speed in (None, 989.0))
    least = [round(break_even_tokens(plan.job, plan.settings)) for plan in (slow, fast)]
    assert least == [round(0.21 * 0.45 * peak * 1e12 / (6 * 1_543_714_304)) for peak in (312, 989)] == [3183, 10_090]
    assert slow.fits and slow.settings.gradient_checkpointing == 0 and slow.settings.max_tokens_per_gpu < 4096
    assert fast.fits and fast.settings.gradient_checkpointing == 1 and fast.settings.max_tokens_per_gpu > 10_090
    sliced = replace(slow.settings, mlp_slices=8)
    assert break_even_tokens(slow.job, sliced) == pytest.approx(2.75 * break_even_tokens(slow.job, slow.settings))


def test_more_memory_never_costs_time() -> None:
    costs = [cost(planned(config_of(), gib)[1]) for gib in (16, 24, 40, 80, 140)]
    assert costs == sorted(costs, reverse=True)


def test_the_cache_holds_a_step_or_what_is_free() -> None:
    config = config_of(data__train_batch_size=16)
    _, plan = planned(config, 80)
    assert plan.sequences == plan.job.wanted_sequences == 128
    _, crowded = planned(config_of(rollout__max_num_seqs=4096, data__train_batch_size=512), 40)
    assert crowded.fits and crowded.sequences < crowded.job.wanted_sequences == 4096
    free = crowded.gpu_bytes - crowded.rollout_needs
    assert 0 <= free < 2**21  # all of it
    assert planned(config_of(rollout__kv_cache_gib=3.0), 80)[1].kv_bytes == 3 * GIB


@pytest.mark.parametrize(("sp", "least"), [(1, 1536), (4, 384)])
def test_no_budget_below_the_longest_sequence(sp: int, least: int) -> None:
    config = config_of(actor__ulysses_sequence_parallel_size=sp)
    _, plan = planned(config, 80, world=4)
    assert min(budgets(plan.job)) == least and len(set(budgets(plan.job))) == len(budgets(plan.job))
    one = with_option(config_of(), "data.train_batch_size", 1)
    _, small = planned(with_option(one, "rollout.n", 2), 80)
    assert max(budgets(small.job)) == 2 * 1536  # no more than there is


def test_contradictions_are_not_planned() -> None:
    for option in ("offload_during_rollout", "offload_optimizer"):
        settled, _ = planned(config_of(**{f"actor__fsdp__{option}": True}), 14)
        assert settled.actor.fsdp.offload_policy is False
    settled, _ = planned(config_of(actor__fsdp__offload_policy=True), 139.5)
    assert settled.actor.fsdp.offload_optimizer is settled.actor.fsdp.offload_during_rollout is False
    settled, _ = planned(config_of(actor__activation_offload=True), 139.5)
    assert settled.actor.gradient_checkpointing != 0
    settled, _ = planned(config_of(actor__gradient_checkpointing=0), 12)
    assert settled.actor.activation_offload is False


def test_on_a_cpu_everything_is_as_it_was() -> None:
    settled = settle_on_cpu(config_of())
    actor = settled.actor
    assert (actor.max_tokens_per_gpu, actor.gradient_checkpointing, actor.activation_offload) == (16384, 1, False)
    assert (actor.fsdp.reshard_after_forward, actor.fsdp.offload_policy) == (True, False)
    assert actor.fsdp.offload_optimizer is False
    assert actor.fsdp.offload_during_rollout is False and settled.ref.offload_policy is False
    assert settled.rollout.tensor_model_parallel_size == 1
    assert settled.rollout.kv_cache_gib is None and actor.head_chunk_gib is None  # 2 GiB and 256 MiB, by their owners
    long = settle_on_cpu(config_of(data__max_response_length=40_000))
    assert long.actor.max_tokens_per_gpu == 40_512
    quickstart = settle_on_cpu(read_config(["+exp=quickstart"]))
    assert (quickstart.actor.max_tokens_per_gpu, quickstart.actor.gradient_checkpointing) == (4096, 0)
    assert quickstart.rollout.kv_cache_gib == 0.5


def test_liger_is_counted_on_for_the_classes_that_it_serves() -> None:
    from fastgrpo.plan.job import _LIGER_FAMILIES

    assert {f"{family}mlp" for family in _LIGER_FAMILIES} == {name.lower() for name in _MLPS}


def _at(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = getattr(config, name)
    return config


# ---- advice, each case made so that one change is the answer


FIXED = {
    "actor__max_tokens_per_gpu": 16384,
    "actor__head_chunk_gib": 2.5,
    "actor__gradient_checkpointing": 1,
    "actor__activation_offload": False,
    "actor__mlp_slices": 1,
    "actor__fsdp__reshard_after_forward": True,
    "actor__fsdp__offload_policy": False,
    "actor__fsdp__offload_optimizer": False,
    "actor__fsdp__offload_during_rollout": False,
    "ref__offload_policy": False,
}


LONG = {"data__max_response_length": 7680}  # one sequence is 8,192 tokens


@pytest.mark.parametrize(
    ("change", "gpu", "answer"),
    [
        # 31 GiB of activations without recomputing: smaller rows, unless a sequence fills one
        ({"actor__gradient_checkpointing": 0}, 48, "actor.max_tokens_per_gpu=6144"),
        (
            LONG | {"actor__gradient_checkpointing": 0, "actor__max_tokens_per_gpu": 8192},
            36,
            "actor.gradient_checkpointing=1",
        ),
        # 23 GiB of state on one GPU: no smaller buffer would do
        ({}, 24, "actor.fsdp.offload_optimizer=true"),
        ({}, 18, "actor.fsdp.offload_policy=true"),
        # a cache that was asked for and does not fit
        ({"rollout__kv_cache_gib": 70.0}, 80, "rollout.kv_cache_gib=35"),
        # the head's 2.5 GiB buffers
        (
            LONG | {"actor__max_tokens_per_gpu": 8192, "rollout__kv_cache_gib": 4.0},
            33,
            "actor.head_chunk_gib=0.317383",
        ),
    ],
)
def test_the_change_that_helps_most(change: dict[str, Any], gpu: float, answer: str) -> None:
    config = config_of(**(FIXED | change))
    best = advised(config, gpu)
    assert best.text == answer and best.plan.fits and best.kind == SAME_NUMBERS
    assert not planned(config, gpu)[1].fits


def test_the_engine_of_a_large_model_is_spread_over_ranks() -> None:
    config = config_of(**(FIXED | {"actor__fsdp__offload_policy": True, "actor__max_tokens_per_gpu": 2048}))
    settled, plan = planned(config, 22.5, world=2, model=QWEN_7B)  # engine weights 14.2 GiB and the sync's buffers
    assert plan.fits and settled.rollout.tensor_model_parallel_size == 2
    stated = with_option(config, "rollout.tensor_model_parallel_size", 1)
    kept, plan = planned(stated, 22.5, world=2, model=QWEN_7B)
    assert not plan.fits and kept.rollout.tensor_model_parallel_size == 1
    best = advised(stated, 22.5, world=2, model=QWEN_7B)
    assert best.text == "rollout.tensor_model_parallel_size=2" and best.plan.fits


def test_an_engine_gets_the_fewest_ranks_with_which_it_fits() -> None:
    tp = "rollout.tensor_model_parallel_size"
    assert planned(config_of(), 80, world=8)[0].rollout.tensor_model_parallel_size == 1  # any number would do
    assert planned(config_of(), 4, world=8)[0].rollout.tensor_model_parallel_size == 1  # none does
    config = config_of(actor__fsdp__offload_policy=True, rollout__kv_cache_gib=2.0)
    large, sizes = replace(QWEN_7B, layers=200), []
    for gib in (200, 100, 40):
        settled, plan = planned(config, gib, world=8, model=large)
        found = settled.rollout.tensor_model_parallel_size or 0
        assert plan.fits and plan.job.tp == found
        assert all(
            not planned(with_option(config, tp, size), gib, 8, large)[1].fits for size in (1, 2, 4) if size < found
        )
        sizes.append(found)
    assert sizes == [1, 2, 4]


def test_ranks_of_an_engine_obey_the_rules() -> None:
    def sizes(config: RunConfig, world: int, node: int, heads: int = 28, kv_heads: int = 4) -> list[int]:
        model = replace(QWEN_7B, heads=heads, kv_heads=kv_heads)
        return engine_sizes(config, model, Layout.of(config, world, node))

    assert sizes(config_of(), 8, 8) == [1, 2, 4]  # 28 heads are not divided by 8
    assert sizes(config_of(), 8, 8, heads=32) == [1, 2, 4, 8]  # 4 key-value heads, each of them twice
    assert sizes(config_of(), 16, 2) == [1, 2]  # an engine stays inside its node
    assert sizes(config_of(), 6, 6, heads=12, kv_heads=2) == [1, 2, 6]
    assert sizes(config_of(rollout__tensor_model_parallel_size=2), 8, 8) == [2]
    assert sizes(config_of(rollout__name="hf"), 8, 8) == [1]


def test_parking_that_was_asked_for_makes_way_for_the_cpu_optimizer() -> None:
    """longcot_32k_8xa100 states offload_during_rollout=true, and with it the plan may not choose offload_policy."""
    config = read_config(["+exp=longcot_32k_8xa100"])
    model = read_sizes(SHAPES / "Qwen3-8B")
    for card in (18, 20):
        assert not planned(config, card, 8, model)[1].fits
        best = advised(config, card, 8, model)
        assert best.text == "actor.fsdp.offload_during_rollout=false"
        assert best.plan.fits and best.plan.settings.offload_policy
    stated = with_option(config, "actor.fsdp.offload_policy", False)  # then it would help nobody
    assert advised(stated, 20, 8, model).key != "actor.fsdp.offload_during_rollout"


def test_what_is_trained_changes_only_when_nothing_else_helps() -> None:
    """A cache of one sequence that is too long: shorter answers are the only way on one GPU."""
    config = config_of(data__max_response_length=130_560, data__train_batch_size=1)
    best = advised(config, 9)
    assert (best.key, best.kind) == ("data.max_response_length", OTHER_TRAINING)


def test_more_gpus_come_last() -> None:
    config = config_of(**FIXED, data__max_response_length=64)
    kinds = {change.text: change.kind for change in _changes(config, 12)}
    assert kinds["trainer.n_gpus_per_node=2"] == MORE_GPUS
    assert kinds["actor.fsdp.offload_policy=true"] == SAME_NUMBERS


def _changes(config: RunConfig, gpu: float) -> list[Any]:
    return list(changes(config, Sizes(QWEN_1P5B, None), Layout.of(config, 1), int(gpu * GIB)))


def test_every_change_obeys_the_rules() -> None:
    stated = {"rollout__kv_cache_gib": 8.0, "rollout__tensor_model_parallel_size": 1}
    config = config_of(**FIXED, **stated, trainer__n_gpus_per_node=4, reward__functions={})
    layout = Layout.of(config, 4)
    found = list(changes(config, Sizes(QWEN_7B, QWEN_7B), layout, 40 * GIB))
    assert {change.key for change in found} >= {
        "actor.max_tokens_per_gpu",
        "actor.ulysses_sequence_parallel_size",
        "rollout.tensor_model_parallel_size",
        "rollout.kv_cache_gib",
        "rollout.max_num_seqs",
        "ref.offload_policy",
        "actor.fsdp.offload_during_rollout",
    }
    for change in found:
        world = change.value if change.kind == MORE_GPUS else 4
        check(with_option(config, change.key, change.value), world, needs_reward=False)


def test_explain_says_what_is_short_and_what_to_set() -> None:
    config = config_of(**FIXED)
    text = explain(config, Sizes(QWEN_1P5B, None), Layout.of(config, 1), 24 * GIB)
    assert re.search(r"on GPUs of 24.0 GiB the plan is \d+\.\d GiB short", text)
    assert re.search(r"training +\d+\.\d +GiB +masters and AdamW 17.3", text)  # 12 x 1,543,714,304 bytes
    assert text.splitlines()[-1].startswith("what helps most: actor.fsdp.offload_optimizer=true (by the plan")


def test_explain_after_memory_ran_out_though_it_should_fit() -> None:
    """In training, what frees a tenth of the GPU there at the least loss of time; the cache is no answer."""
    config = config_of(**(FIXED | {"actor__max_tokens_per_gpu": 65536}), rollout__kv_cache_gib=20.0)
    sizes, layout = Sizes(QWEN_1P5B, None), Layout.of(config, 1)
    text = explain(config, sizes, layout, 80 * GIB, phase="training")
    assert "should leave" in text
    best = best_change(config, sizes, layout, 80 * GIB, phase="training")
    assert best is not None and best.key.startswith("actor.")
    before = make_plan(config, sizes, layout, 80 * GIB)
    assert before.short_of("training") - best.plan.short_of("training") >= 8 * GIB
    rollout = best_change(config, sizes, layout, 80 * GIB, phase="rollout")
    assert rollout is not None and rollout.key == "rollout.kv_cache_gib"


def test_explain_when_nothing_helps() -> None:
    config = config_of(**(FIXED | {"actor__use_kl_loss": False}), data__max_response_length=1)
    text = explain(config, Sizes(QWEN_7B, None), Layout.of(config, 1), GIB // 2)
    assert re.search(r"\(by the plan it is still [\d.]+ GiB short then: take more GPUs as well\)$", text)


# ---- the host


PRESET = "qwen2_5_1p5b_gsm8k_1x24gb"


def preset(host: float | None, **options: Any) -> RunConfig:
    config = with_option(read_config([f"+exp={PRESET}"]), "trainer.host_memory_gib", host)
    for key, value in options.items():
        config = with_option(config, key.replace("__", "."), value)
    return config


def test_a_plan_fits_the_host_too() -> None:
    for host, fits in ((None, True), (64.0, True), (20.0, False)):
        _, plan = planned(preset(host), 22)
        assert plan.fits is fits and plan.shortfall <= 0
        assert plan.short_of("host") == (0 if host is None else plan.host.total - int(host * GIB))


def test_of_what_fits_the_gpu_the_host_decides() -> None:
    """On 39.3 GiB the fastest plan puts 155 GiB on the host; with less there, another one does."""
    config, model = read_config(["+exp=gsm8k_8xa100"]), QWEN_7B
    _, free = planned(config, 39.3, 8, model)
    _, held = planned(with_option(config, "trainer.host_memory_gib", 128.0), 39.3, 8, model)
    assert free.fits and held.fits and free.host.total > 128 * GIB >= held.host.total and cost(free) < cost(held)


def test_the_change_that_helps_the_host() -> None:
    stated = {"actor__fsdp__offload_policy": True, "actor__use_kl_loss": False, "actor__activation_offload": False}
    config = config_of(**(FIXED | stated), trainer__host_memory_gib=36.0)
    best = advised(config, 40, phase="host")
    assert best.text == "actor.fsdp.offload_policy=false" and best.plan.fits
    text = explain(config, Sizes(QWEN_1P5B, None), Layout.of(config, 1), 40 * GIB)
    assert re.search(r"^host memory: of the 36.0 GiB of a node it is \d+\.\d GiB short$", text, re.MULTILINE)
    assert text.splitlines()[-1].startswith("what helps most: actor.fsdp.offload_policy=false (by the plan it leaves")
    assert advised(config, 22, phase="host").key != "actor.fsdp.offload_policy"  # there it would cost the GPU its room


@pytest.mark.parametrize(
    ("stated", "answer"),
    [
        ({"rollout__sleep_level": 1}, "rollout.sleep_level=2"),
        ({"ref__offload_policy": True, "actor__use_kl_loss": True}, "ref.offload_policy=false"),
        (LONG | {"actor__activation_offload": True}, "actor.activation_offload=false"),
        ({"actor__fsdp__offload_during_rollout": True}, "actor.fsdp.offload_during_rollout=false"),
    ],
)
def test_what_fills_the_host_is_turned_off(stated: dict[str, Any], answer: str) -> None:
    fixed = config_of(**(FIXED | stated))
    needed = planned(fixed, 139.5)[1].host.total / GIB
    config = with_option(fixed, "trainer.host_memory_gib", needed - 0.5)
    assert answer in {change.text for change in _changes_of(config, 139.5) if change.plan.fits}


def _changes_of(config: RunConfig, gpu: float) -> list[Any]:
    sizes = Sizes(QWEN_1P5B, QWEN_1P5B if loads_reference(config) else None)
    return list(changes(config, sizes, Layout.of(config, 1), int(gpu * GIB)))


def test_no_room_on_the_gpu_is_bought_with_room_that_the_host_has_not() -> None:
    config = config_of(**FIXED)
    assert advised(config, 24).text == "actor.fsdp.offload_optimizer=true"
    small = with_option(config, "trainer.host_memory_gib", 20.0)
    best = advised(small, 24)
    assert best.text == "trainer.n_gpus_per_node=2" and best.plan.short_of("host") <= 0


def test_nothing_helps_a_host_without_room_for_the_processes() -> None:
    config = config_of(**FIXED, trainer__host_memory_gib=4.0)
    text = explain(config, Sizes(QWEN_1P5B, None), Layout.of(config, 1), 80 * GIB)
    assert "is 6." in text and "a host with more memory" in text.splitlines()[-1]


# ---- the shipped experiments, and the command


@pytest.mark.parametrize("name", sorted(file.stem for file in (ROOT / "configs" / "exp").glob("*.yaml")))
def test_shipped_experiments_fit_on_the_card_they_promise(name: str) -> None:
    config = read_config([f"+exp={name}"])
    model = read_sizes(SHAPES / config.model.path.rpartition("/")[2])
    _, plan = planned(config, CARDS_GIB[ROOM[name]], config.trainer.n_gpus_per_node, model)
    assert plan.fits
    headline = (ROOT / "configs" / "exp" / f"{name}.yaml").read_text().splitlines()[1]
    assert ROOM[name] in headline or name == "quickstart"  # "any GPU"
    host = re.search(r"(\d+) GB of host memory", headline)
    assert plan.host.total < (int(host.group(1)) * 10**9 if host else config.trainer.n_gpus_per_node * 40 * GIB)


def command(*argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fastgrpo.plan", *argv], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_the_table_in_the_readme_is_the_commands() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"python -m fastgrpo\.plan ([^\n]*--markdown[^\n]*)\n```\n+((?:\|[^\n]*\n)+)", readme)
    assert found, "README.md has lost the plan's table or its command"
    done = command(*found.group(1).split())
    assert done.returncode == 0, done.stderr
    assert done.stdout == found.group(2)
    assert len(done.stdout.splitlines()) == 5  # three experiments


def test_the_command_needs_neither_gpu_nor_torch() -> None:
    program = (
        "import sys, json; from fastgrpo.plan.__main__ import main\n"
        "code = main(['--shapes', 'bench/shapes', '+exp=gsm8k_8xa100'])\n"
        "print(json.dumps([code, sorted({'torch', 'transformers', 'vllm'} & set(sys.modules))]))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert json.loads(lines[-1]) == [0, []]
    assert sum("GB" in line and ("it fits" in line or "it is short" in line) for line in lines) == len(CARDS_GIB)
    assert any(line.startswith("  decided") and "actor.max_tokens_per_gpu=" in line for line in lines)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    code = main(argv)
    captured = capsys.readouterr()
    return code, captured.out + captured.err


FEW = (  # stated, so that few combinations are left to try
    *("actor.gradient_checkpointing=1", "actor.max_tokens_per_gpu=4096"),
    *("actor.mlp_slices=1", "actor.head_chunk_gib=1"),
)


def test_a_plan_that_does_not_fit_says_what_helps(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(capsys, "--shapes", str(SHAPES), "+exp=gsm8k_8xa100", "trainer.gpu_memory_gib=22", *FEW)
    assert code == 0 and "rollout.tensor_model_parallel_size=2" in text.splitlines()[-1]
    stated = (*FEW, "trainer.gpu_memory_gib=22", "rollout.tensor_model_parallel_size=1")
    code, text = run(capsys, "--shapes", str(SHAPES), "+exp=gsm8k_8xa100", *stated)
    assert code == 1 and "what helps most: rollout.tensor_model_parallel_size=2" in text


def test_the_command_says_whether_the_host_has_room(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--shapes", str(SHAPES), f"+exp={PRESET}", *FEW)
    code, text = run(capsys, *arguments, "trainer.gpu_memory_gib=22", "trainer.host_memory_gib=20")
    assert code == 1 and "host memory: of the 20.0 GiB of a node it is 1.5 GiB short" in text
    code, text = run(capsys, *arguments, "trainer.gpu_memory_gib=22", "trainer.host_memory_gib=64")
    assert code == 0 and "; it has 64.0" in text
    code, text = run(capsys, *arguments, "trainer.host_memory_gib=20")
    assert code == 0 and re.search(r"24 GB \(22.0 GiB\) it is short of 1.5 GiB of host memory", text)


def test_a_folder_with_config_json_alone_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    folder = SHAPES / "Qwen2.5-0.5B-Instruct"
    code, text = run(capsys, "+exp=rules_zh", f"model.path={folder}", "trainer.gpu_memory_gib=24")
    assert code == 0 and "KV cache" in text


def test_a_folder_that_is_there_is_read_whatever_its_name(
    capsys: pytest.CaptureFixture[str], make_tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    shutil.copytree(make_tiny_model(), tmp_path / "Qwen3-8B")
    arguments = ("--shapes", str(SHAPES), "+exp=quickstart", "trainer.gpu_memory_gib=8")
    code, text = run(capsys, *arguments, f"model.path={tmp_path / 'Qwen3-8B'}")
    assert code == 0 and "engine weights" not in text  # a tiny model: less than is shown
    code, text = run(capsys, *arguments, "model.path=Qwen/Qwen3-8B")
    assert code == 1 and "engine weights 30.5" in text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("+exp=gsm8k_8xa100", "model.path=./nowhere"), "model.path=./nowhere: there is no folder"),
        (("--shapes", "nowhere", "+exp=quickstart"), "--shapes nowhere: there is no such folder"),
        (("+exp=quickstart", "--shapes"), "--shapes needs a folder"),
        (("--markdown", "+exp=quickstart"), "--markdown needs one size of GPU: add trainer.gpu_memory_gib=80"),
        (("--shapes", str(SHAPES), "+exp=rules_zh", "rollout.tensor_model_parallel_size=4"), "14 attention heads"),
        (("--markdown", "trainer.gpu_memory_gib=79"), "--markdown makes a row for each experiment and was given none"),
        (("+exp=quickstart", "+exp=gsm8k_8xa100"), "several experiments make a table: add --markdown"),
        (("+exp=quickstart", "--nnodes"), "--nnodes needs a number"),
        (("--nnodes", "0", "+exp=quickstart"), "--nnodes 0: not a whole number above 0"),
        (("+exp=nothing",), "there is no experiment 'nothing'"),
        (("trainer.gpu_memory_gib=0", "+exp=quickstart"), "trainer.gpu_memory_gib=0.0 is out of range"),
    ],
)
def test_mistakes_are_said_in_one_message(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], message: str
) -> None:
    code, text = run(capsys, *argv)
    assert code == 2 and message in text and "Traceback" not in text


@pytest.mark.parametrize(("name", "value"), [("WORLD_SIZE", "abc"), ("LOCAL_WORLD_SIZE", "0")])
def test_an_environment_that_makes_no_sense(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    code, text = run(capsys, "--shapes", str(SHAPES), "+exp=rules_zh")
    assert code == 2 and f"{name}={value} in the environment is no number of ranks" in text


def test_nodes_are_those_of_a_job_of_so_many_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--shapes", str(SHAPES), "+exp=gsm8k_8xa100", "trainer.gpu_memory_gib=79")
    code, text = run(capsys, *arguments, "--nnodes", "2")
    assert code == 0 and "over 16, or more over fewer" in text
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert run(capsys, *arguments) == (0, text)


def test_help_lists_the_experiments(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(capsys, "--help")
    assert code == 0 and "usage: python -m fastgrpo.plan" in text and "gsm8k_8xa100" in text
