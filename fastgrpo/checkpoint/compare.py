"""Why a checkpoint cannot be continued by this configuration: options that changed, and what options do not show, the
data, the models, the code of rewards, the length of the schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from fastgrpo.checkpoint.folders import Manifest
from fastgrpo.checkpoint.identity import Identity
from fastgrpo.config import RunConfig, Schedule, changed_options


def objections(manifest: Manifest, config: RunConfig, identity: Identity | None, total_steps: int | None) -> list[str]:
    """A line for each reason. Before anything is loaded (`identity` or `total_steps` None) the options alone speak."""
    reasons = changed_options(manifest.config, config)
    if identity is None or total_steps is None:
        return reasons
    return reasons + _other_material(manifest, config, identity, total_steps)


def made_by(manifest: Manifest, config: RunConfig) -> bool:
    """Whether a run with this very configuration saved it, up to what does not change the result; trainer.resume_allow
    excuses nothing, since what it names may have been changed a second time."""
    same_place = manifest.config.get("trainer", {}).get("resume") == config.trainer.resume
    return same_place and not changed_options(manifest.config, config, allowed=())


def doubts(manifest: Manifest, identity: Identity | None) -> list[str]:
    """Of a validation: nothing in it rests on the training prompts, but what makes them makes its own as well."""
    if identity is None or manifest.identity["data"] == identity.data:
        return []
    return [
        "the training prompts are not those of the run: if tokenizer, chat template, system prompt or suffix are "
        "others, too, then the score cannot be compared with the run's"
    ]


def same_rewards(manifest: Manifest, config: RunConfig, identity: Identity) -> bool:
    """Whether the functions are those of the start that saved: what they do not score now, they have scored then."""
    changed = changed_options(manifest.config, config, allowed=())
    same_code = manifest.identity["reward_code"] == identity.reward_code
    return same_code and not any(line.startswith("reward.functions.") for line in changed)


def _other_material(manifest: Manifest, config: RunConfig, identity: Identity, total_steps: int) -> list[str]:
    before, now = manifest.identity, asdict(identity)
    validates = config.trainer.val_only  # it needs the weights, and its score the same code
    reasons = []
    if before["data"] != now["data"] and not validates:
        reasons.append(
            "the training prompts have changed: their tokens, references or order, or the names of data.train_files, "
            f"which seed the samples ({before['prompts']} prompts then, {now['prompts']} now)"
            f"{_renamed(manifest, config)}"
        )
    if before["model"] != now["model"]:
        reasons.append(f"model.path={config.model.path} holds another model than the run began with")
    if before["reference"] != now["reference"] and not validates:
        reasons.append("the reference policy is another one (ref.path, model.path)")
    reasons += _changed_code(before["reward_code"], now["reward_code"], config.trainer.resume_allow)
    if validates:
        return reasons
    if config.actor.optim.lr_scheduler_type != Schedule["constant"] and manifest.total_steps != total_steps:
        reasons.append(
            f"the run had {manifest.total_steps} steps and would have {total_steps}, which moves the learning rate of "
            f"{config.actor.optim.lr_scheduler_type}"
        )
    if manifest.step > total_steps:
        reasons.append(f"it has done {manifest.step} steps and {total_steps} are wanted (trainer.max_steps)")
    return reasons


def _renamed(manifest: Manifest, config: RunConfig) -> str:
    before, now = manifest.config.get("data", {}).get("train_files", []), config.data.train_files
    if [Path(str(entry)).name for entry in before] == [Path(entry).name for entry in now]:
        return ""
    return f"; data.train_files was {before} and is {now}: if only names have changed, a link of the old name will do"


def _changed_code(before: Mapping[str, str], now: Mapping[str, str], allowed: list[str]) -> list[str]:
    keys = {label: f"reward.functions.{label}.path" for label in now if before.get(label) != now[label]}
    return [
        f"the code of reward {label} has changed (allow it: trainer.resume_allow=[{key}])"
        for label, key in keys.items()
        if key not in allowed
    ]
