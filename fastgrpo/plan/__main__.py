"""The command: python -m fastgrpo.plan +exp=NAME [key=value ...]. No GPU, no weights: config.json is enough.

For GPUs of trainer.gpu_memory_gib; where that is not set, for each usual card in a line, and in full for the smallest
on which the run fits. The exit status is 0 when the plan fits, 1 when it does not, 2 for a mistake.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fastgrpo import console, hub, launch
from fastgrpo.compose import list_experiments, read_config
from fastgrpo.config import Layout, RunConfig, check, check_model, loads_reference
from fastgrpo.errors import UserError
from fastgrpo.plan.choose import Plan
from fastgrpo.plan.constants import CARDS_GIB, GIB
from fastgrpo.plan.job import Sizes
from fastgrpo.plan.settle import settle
from fastgrpo.plan.sizes import ModelSizes, read_sizes
from fastgrpo.plan.table import decision_lines, explain, gib, markdown_head, markdown_row, memory_lines, verdict

MISUSE = 2
USAGE = """usage: python -m fastgrpo.plan [--shapes FOLDER] [--nnodes N] [--markdown] +exp=NAME [key=value ...]

trainer.gpu_memory_gib=80   the GPUs to plan for; without it, every usual card is tried
trainer.host_memory_gib=512 the host memory of a node to plan for; without it, the plan only says what it takes
--shapes FOLDER             look for the model's config.json in FOLDER/MODEL first (model.path=owner/MODEL), for hosts
                            without the hub; model.path may also be a folder that holds config.json alone
--nnodes N                  N nodes of trainer.n_gpus_per_node GPUs each
--markdown                  a table, with a row for each +exp=NAME"""


@dataclass(frozen=True, slots=True)
class _Where:
    """What the command's own flags say."""

    shapes: Path | None  # folder of models' config.json
    nodes: int | None  # None: the ranks of this process's job, or of the one that it would start


def main(argv: Sequence[str]) -> int:
    try:
        return run(list(argv))
    except UserError as error:
        console.complain(error)
        return MISUSE


def run(argv: list[str]) -> int:
    if {"-h", "--help"} & set(argv):
        console.say(f"{USAGE}\n\n{list_experiments()}")
        return 0
    where = _Where(_take_folder(argv, "--shapes"), _take_count(argv, "--nnodes"))
    if "--markdown" in argv:
        argv.remove("--markdown")
        return _table(argv, where)
    if sum(argument.startswith("+exp=") for argument in argv) > 1:
        raise UserError(
            "several experiments make a table: add --markdown and trainer.gpu_memory_gib, or leave one +exp="
        )
    config = read_config(argv)
    sizes, layout = _read(config, where)
    console.say("\n".join(layout.table()))
    if config.trainer.gpu_memory_gib is not None:
        return _show(config, sizes, layout, int(config.trainer.gpu_memory_gib * GIB))
    plans = {card: settle(config, sizes, layout, int(memory * GIB))[1] for card, memory in CARDS_GIB.items()}
    for card, plan in plans.items():
        console.say(f"on a GPU of {card:>6} ({gib(plan.gpu_bytes)} GiB) it {verdict(plan)}")
    shown = next((plan for plan in plans.values() if plan.fits), plans[max(plans, key=lambda card: CARDS_GIB[card])])
    return _show(config, sizes, layout, shown.gpu_bytes)


def _show(config: RunConfig, sizes: Sizes, layout: Layout, gpu_bytes: int) -> int:
    settled, plan = settle(config, sizes, layout, gpu_bytes)
    if plan.fits:
        console.say("\n".join([*memory_lines(plan), *decision_lines(config, settled)]))
        return 0
    console.say(explain(config, sizes, layout, gpu_bytes))
    return 1


def _table(argv: Sequence[str], where: _Where) -> int:
    experiments = [argument for argument in argv if argument.startswith("+exp=")]
    if not experiments:
        raise UserError("--markdown makes a row for each experiment and was given none: add +exp=NAME")
    rest = [argument for argument in argv if not argument.startswith("+exp=")]
    rows, plans = [], list[Plan]()
    for experiment in experiments:
        config = read_config([experiment, *rest])
        if config.trainer.gpu_memory_gib is None:
            raise UserError("--markdown needs one size of GPU: add trainer.gpu_memory_gib=80, or another number of GiB")
        sizes, layout = _read(config, where)
        settled, plan = settle(config, sizes, layout, int(config.trainer.gpu_memory_gib * GIB))
        plans.append(plan)
        rows.append(markdown_row(experiment.removeprefix("+exp="), config, settled, plan))
    console.say("\n".join([*markdown_head(), *rows]))
    return 0 if all(plan.fits for plan in plans) else 1


def _read(config: RunConfig, where: _Where) -> tuple[Sizes, Layout]:
    """Sizes of the models, and the ranks that the run would have; every rule is checked."""
    if where.nodes is None:
        start = launch.plan(config, os.environ)
        world, ranks_per_node = start.world, start.ranks_per_node
    else:
        ranks_per_node = config.trainer.n_gpus_per_node
        world = where.nodes * ranks_per_node
    layout = check(config, world, ranks_per_node=ranks_per_node)
    trust = config.model.trust_remote_code
    model = _model(config.model.path, "model.path", where.shapes, trust)
    reference: ModelSizes | None = None
    if loads_reference(config):
        reference = _model(config.ref.path, "ref.path", where.shapes, trust) if config.ref.path else model
    check_model(
        config,
        layout,
        num_heads=model.heads,
        num_kv_heads=model.kv_heads,
        hidden=model.hidden,
        max_positions=model.positions,
        vocab=model.vocab,
    )
    return Sizes(model, reference), layout


def _model(path: str, option: str, shapes: Path | None, trust_remote_code: bool) -> ModelSizes:
    # A folder that is there speaks for itself.
    if shapes is not None and not Path(path).is_dir() and (shapes / Path(path).name / "config.json").is_file():
        return read_sizes(shapes / Path(path).name)
    folder = hub.resolve_model(path, need_weights=False, option=option)
    return read_sizes(folder, trust_remote_code=trust_remote_code)


def _take_folder(argv: list[str], flag: str) -> Path | None:
    text = _take_value(argv, flag, "a folder: --shapes bench/shapes")
    if text is not None and not Path(text).is_dir():
        raise UserError(f"{flag} {text}: there is no such folder")
    return None if text is None else Path(text)


def _take_count(argv: list[str], flag: str) -> int | None:
    text = _take_value(argv, flag, "a number: --nnodes 2")
    if text is not None and (not text.isdecimal() or int(text) < 1):
        raise UserError(f"{flag} {text}: not a whole number above 0")
    return None if text is None else int(text)


def _take_value(argv: list[str], flag: str, wanted: str) -> str | None:
    """The argument after `flag`, both taken out of `argv`."""
    if flag not in argv:
        return None
    at = argv.index(flag)
    if at + 1 == len(argv):
        raise UserError(f"{flag} needs {wanted}")
    value = argv[at + 1]
    del argv[at : at + 2]
    return value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
