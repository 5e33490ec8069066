"""Engines: who draws the responses. `build_engine` is the only way in; engine.py holds the contract.

    vllm     vllm.py: the real one, in this process, asleep while the policy trains
    hf       hf.py: transformers, small and slow, for tests and machines without vLLM; only when asked for
    other    `package.module:Class`, called like the two above

Each engine's module is imported only when it is chosen: vllm takes seconds and a CUDA context.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from fastgrpo.config import RunConfig
from fastgrpo.errors import ConfigError
from fastgrpo.mesh import Mesh
from fastgrpo.rollout.engine import RolloutEngine

_OWN = {"vllm": "fastgrpo.rollout.vllm:VllmEngine", "hf": "fastgrpo.rollout.hf:HfEngine"}


def build_engine(config: RunConfig, mesh: Mesh, model_dir: Path, end_ids: tuple[int, ...]) -> RolloutEngine:
    """The engine that `rollout.name` asks for, asleep. A collective: every rank builds at the same point.

    `model_dir` is a Hugging Face folder, of which config.json alone is read: weights come through `awake`. A response
    ends with the first of `end_ids`. Raises UserError when the engine's library is missing or broken, ConfigError for
    a name that leads to no class.
    """
    name = config.rollout.name
    module_name, _, class_name = _OWN.get(name, name).partition(":")
    remedy = "set vllm, hf, or package.module:Class of an importable class"
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, something that it imports is not
        raise ConfigError(f"rollout.name={name} leads to no engine ({error}); {remedy}") from error
    if not hasattr(module, class_name):
        raise ConfigError(f"rollout.name={name} leads to no engine ({module_name} has no {class_name!r}); {remedy}")
    return getattr(module, class_name)(config, mesh, model_dir, end_ids)
