"""The command: torchrun -m fastgrpo.train +exp=NAME [key=value ...]

Arguments -> RunConfig (compose.py) -> Trainer.run(), and nothing else. Every mistake gets our message: once, without a
traceback, exit status 2; so does what a run met and could not help, exit status 1 (errors.py). torch is imported only
when the configuration is right and the processes are running.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from fastgrpo import console, launch
from fastgrpo.compose import list_experiments, list_presets, read_config
from fastgrpo.config import RunConfig, check
from fastgrpo.errors import RunError, UserError
from fastgrpo.paths import check_run_dir
from fastgrpo.torchrun import leave_status, loading

MISUSE = 2  # exit status after a mistake of the user
FAILED = 1  # of a run that could not go on, or is not complete
INTERRUPTED = 130

USAGE = """usage: torchrun -m fastgrpo.train +exp=NAME [key=value ...]

+exp also takes a YAML file of your own, which may build on an experiment (exp: NAME at its top).
algorithm=NAME (in a file algorithm: NAME, or algorithm: {preset: NAME, ...} beside options of your own) sets an
algorithm's options to what its paper says.
torchrun is optional: the command starts as many processes as trainer.n_gpus_per_node says."""


def main(argv: Sequence[str]) -> int:
    try:
        return run(argv)
    except UserError as error:
        console.complain(error)
        leave_status(MISUSE, os.environ)
        return MISUSE
    except RunError as error:
        console.complain(error)
        leave_status(-FAILED, os.environ)
        return FAILED
    except KeyboardInterrupt:
        console.say("interrupted: what the run has written stays; of the model, what trainer.save_freq has saved")
        return INTERRUPTED


def run(argv: Sequence[str]) -> int:
    if {"-h", "--help"} & set(argv):
        console.say(f"{USAGE}\n\n{list_experiments()}\n\n{list_presets()}")
        return 0
    config = read_config(argv)
    start = launch.plan(config, os.environ)
    layout = check(config, start.world, ranks_per_node=start.ranks_per_node)
    device = launch.resolve_device(config, launch.count_gpus(), start.ranks_per_node)
    launch.share_cpu(device, os.environ)
    console.drop_noise(device)
    if start.relaunch:
        launch.relaunch(start.world, argv, config.trainer.shutdown_timeout_s)
    check_run_dir(config.trainer.run_dir)
    console.say("\n".join([*layout.table(), rewards_line(config)]))

    with loading(os.environ):
        from fastgrpo.checkpoint import check_resume  # brings torch
        from fastgrpo.stopping import Stopped
        from fastgrpo.trainer import Trainer

        if start.first_node:
            check_resume(config)
        trainer = Trainer(config)
    try:
        trainer.run()
    except Stopped as stop:  # it has said what it saved
        return stop.exit_code
    return 0


def rewards_line(config: RunConfig) -> str:
    """Every active reward function: one that an experiment brought along must not score unnoticed."""
    shown = [f"{label} ({function.kind}) x {function.weight:g}" for label, function in config.reward.functions.items()]
    return f"reward            {' + '.join(shown)}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
