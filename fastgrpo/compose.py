"""The user's words -> RunConfig: what the command line and the files say, composed by hydra, each over the ones before.

    base.yaml < an experiment (a file of the user's: the preset and the experiment it names, then itself)
              < algorithm=NAME, a preset of configs/algorithm < key=value

The only module that imports hydra. Its compose API makes no folders and no log; keys are compared with the schema, so
that every mistake gets our message. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fastgrpo.config import RunConfig, build, option_keys, to_document
from fastgrpo.config.names import unknown_key
from fastgrpo.errors import ConfigError
from fastgrpo.paths import config_dir

_ABSENT = object()  # null would be a mistake
_OPTIONS = "algorithm.KEY=VALUE, in a file algorithm: {preset: NAME, KEY: VALUE}"
# What hydra, YAML and the files themselves raise over a document of the user's.
MALFORMED = (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, UnicodeDecodeError)


def read_config(argv: Sequence[str]) -> RunConfig:
    """Compose base.yaml, the experiment and the overrides, and read them into the schema. Raises ConfigError."""
    overrides = [_parse(argument) for argument in argv]
    names = [override.value() for override in overrides if override.key_or_group == "exp"]
    if not names:
        raise ConfigError(f"no experiment given: add +exp=NAME\n{list_experiments()}")
    if len(names) > 1:
        given = " and ".join(f"+exp={name}" for name in names)
        raise ConfigError(
            f"{given}: a run has one experiment; to build on one, write a file of your own with exp: NAME at its top"
        )
    presets = [o for o in overrides if _names_preset(o)]
    if len(presets) > 1:
        given = " and ".join(str(o.input_line) for o in presets)
        raise ConfigError(f"{given}: a run has one preset; keep one, and set single options beside it: {_OPTIONS}")
    rest = [o for o in overrides if o.key_or_group != "exp" and o not in presets]
    try:
        experiment = _experiment(str(names[0]))
        for override in presets:
            said = str(override.input_line)
            experiment = _over(experiment, _preset(override.value(), said), "with_preset")
        document = _compose(experiment, rest)
    except MALFORMED as error:
        raise ConfigError(f"the configuration cannot be composed: {_in_one_line(error)}") from error
    return build(document)


def list_experiments() -> str:
    """A line an experiment, from the first line of comment in its file: model, GPUs, memory."""
    files = sorted((config_dir() / "exp").glob("*.yaml"))
    width = max((len(file.stem) for file in files), default=0)
    return "\n".join(["experiments:", *(f"  {file.stem:<{width}}  {_headline(file)}" for file in files)])


def list_presets() -> str:
    """A line an algorithm preset: its name and paper."""
    files = sorted((config_dir() / "algorithm").glob("*.yaml"))
    width = max((len(file.stem) for file in files), default=0)
    return "\n".join(["algorithms:", *(f"  {file.stem:<{width}}  {_headline(file)}" for file in files)])


def _headline(file: Path) -> str:
    comments = re.findall(r"^# (?!@)(.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    return comments[0] if comments else ""


def _parse(argument: str) -> Override:
    if argument.startswith("-"):
        key, _, value = argument.lstrip("-").partition("=")
        known = option_keys()
        answer = f"write {key}={value or '...'}" if key in known else unknown_key(key, known)
        raise ConfigError(f"{argument}: options are written key=value, without dashes; {answer}")
    if "=" not in argument and not argument.startswith("~"):
        raise ConfigError(f"{argument!r} is no option: write key=value")
    try:
        override = OverridesParser.create().parse_override(argument)
    except HydraException as error:
        raise ConfigError(
            f"{argument!r} cannot be read ({_in_one_line(error)}); put special characters in quotes: key='\"a (b)\"'"
        ) from error
    key = override.key_or_group
    if override.package is not None or not re.fullmatch(r"(?!hydra\b)[\w-]+(\.[\w-]+)*", key):
        raise ConfigError(
            f"{argument!r} is no option: keys are those of the schema, without hydra's own options and groups"
        )
    if override.is_sweep_override():
        raise ConfigError(f"{argument!r} gives several values; write one, or a list in brackets: [a,b]")
    return override


def _experiment(name: str) -> str:
    """`name` of a shipped experiment, or the name under which the user's own file is made known to hydra."""
    shipped = {file.stem for file in (config_dir() / "exp").glob("*.yaml")}
    if name in shipped:
        return name
    file = Path(name).expanduser()
    if not name.endswith((".yaml", ".yml")):
        near = get_close_matches(name, shipped, n=1) or ([f"{name}.yaml"] if Path(f"{name}.yaml").is_file() else [])
        hint = f"; did you mean +exp={near[0]}?" if near else ""
        raise ConfigError(f"there is no experiment {name!r}{hint}\n{list_experiments()}")
    if not file.is_file():
        raise ConfigError(f"+exp={name}: there is no file {file.resolve()}")
    document = OmegaConf.to_container(OmegaConf.load(file))
    if not isinstance(document, dict):
        raise ConfigError(
            f"+exp={name}: the file is no mapping of keys; write what you change, such as rollout: {{n: 8}}"
        )
    base = document.pop("exp", None)
    if base is not None and str(base).endswith((".yaml", ".yml")):
        raise ConfigError(
            f"+exp={name}: exp: {base} is a file, and a file builds on a shipped experiment alone: write exp: NAME, "
            f"and the rest of {base} into this file\n{list_experiments()}"
        )
    if base is not None and base not in shipped:
        raise ConfigError(f"+exp={name}: there is no experiment {base}, which it builds on\n{list_experiments()}")
    if dotted := _dotted(document):
        raise ConfigError("\n".join(f"+exp={name}: {line}" for line in dotted))
    section = document.pop("algorithm", {})
    if isinstance(section, dict):
        document["algorithm"] = {key: value for key, value in section.items() if key != "preset"}
        preset, said = section.get("preset", _ABSENT), f"+exp={name}: algorithm: {{preset: {section.get('preset')}}}"
    else:
        preset, said = section, f"+exp={name}: algorithm: {section}"
    if preset is not _ABSENT:
        base = _over(base, _preset(preset, said), "preset_of_file")
    return _over(base, document, "own_file")


def _dotted(document: dict[Any, Any], above: str = "") -> list[str]:
    """A line for each key of ours that is written with its dots, which YAML takes for one word."""
    known, lines = option_keys(), []
    for name, value in document.items():
        key = f"{above}{name}"
        if "." in str(name) and any(option == key or option.startswith(f"{key}.") for option in known):
            *outer, leaf = key.split(".")
            shown = yaml.safe_dump({leaf: value}, default_flow_style=True, allow_unicode=True, width=1000).strip()
            for section in reversed(outer):
                shown = f"{section}: {shown}" if section == outer[0] else f"{{{section}: {shown}}}"
            lines.append(f"{key} is written with dots; in a file write it nested: {shown}")
        elif isinstance(value, dict):
            lines += _dotted(value, f"{key}.")
    return lines


def _names_preset(override: Override) -> bool:
    """`algorithm` is a section of options and, given one word, the preset of that name."""
    key, value = override.key_or_group, override.value()
    return not override.is_delete() and (
        key == "algorithm.preset" or (key == "algorithm" and not isinstance(value, dict))
    )


def _preset(name: object, said: str) -> dict[str, Any]:
    files = {file.stem: file for file in (config_dir() / "algorithm").glob("*.yaml")}
    if not isinstance(name, str):
        raise ConfigError(f"{said}: a preset is one name, such as dapo; single options are set beside it: {_OPTIONS}")
    if name not in files:
        near = get_close_matches(name, files, n=1)
        hint = f"; did you mean algorithm={near[0]}?" if near else ""
        raise ConfigError(f"{said}: there is no preset of that name{hint}\n{list_presets()}")
    document = OmegaConf.to_container(OmegaConf.load(files[name]))
    assert isinstance(document, dict)
    return {str(key): value for key, value in document.items()}


def _over(base: str | None, document: dict[Any, Any], name: str) -> str:
    """`document` on top of the experiment `base`, made known to hydra under `name`."""
    defaults = [base] if base else document.get("defaults", [])
    node = document | {"defaults": [*defaults, "_self_"]}
    ConfigStore.instance().store(group="exp", name=name, node=node, package="_global_")
    return name


def _compose(experiment: str, overrides: Sequence[Override]) -> dict[str, Any]:
    # Every key is forced in, with + or without, known or not: `build` knows the schema and answers for all mistakes.
    forced = [o.input_line if o.is_delete() else f"++{str(o.input_line).lstrip('+')}" for o in overrides]
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        composed = compose("base", [f"+exp={experiment}", *map(str, forced)])
    if missing := sorted(OmegaConf.missing_keys(composed)):
        raise ConfigError("\n".join(f"{key} is left open (???); set {key}=..." for key in missing))
    # Over the defaults, so that ${rollout.n} finds what no file sets.
    document = OmegaConf.to_container(
        OmegaConf.merge(OmegaConf.create(to_document(RunConfig())), composed), resolve=True
    )
    assert isinstance(document, dict)
    return {str(key): value for key, value in document.items()}


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())
