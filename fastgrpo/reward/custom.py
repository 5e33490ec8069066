"""The user's own reward function: from a Python file by path and name, or a callable handed over in Python.

The file is read but never run in the trainer's process: at start its syntax, the name and the parameters are checked,
and the worker processes import it, with its folder on sys.path. A callable travels by cloudpickle, so that lambdas,
closures and functions of a notebook work; one that lives in an importable module is imported there.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING

from fastgrpo.errors import ConfigError, UserError
from fastgrpo.reward.function import RewardFunction, Setting
from fastgrpo.reward.signature import check_required, read_signature

if TYPE_CHECKING:  # a worker starts faster without the schema
    from fastgrpo.config import RewardFunctionConfig


def build(label: str, config: RewardFunctionConfig, setting: Setting) -> RewardFunction:
    if config.path is None:
        raise ConfigError(
            f"reward.functions.{label} is of kind custom and has no path. Set reward.functions.{label}.path to a "
            f"Python file that defines `def {config.name}(prompt, response, reference, meta, step) -> float`."
        )
    path = Path(config.path).expanduser().resolve()
    source = f"{config.name} in {path}"
    function = RewardFunction(label, source, config.weight, partial(load, str(path), config.name))
    _check_file(function, path, config.name)
    return function


def build_callable(function: Callable[..., object]) -> RewardFunction:
    """The reward of `Trainer(..., reward=function)`; its label is the function's name."""
    if not callable(function):
        raise UserError(
            f"reward is {function!r}, which cannot be called. "
            "Give a function such as `def reward(prompt, response, reference, meta, step) -> float`."
        )
    name = getattr(function, "__name__", type(function).__name__)
    code = getattr(function, "__code__", None)
    file = code.co_filename if code else ""
    source = f"{name} in {file}:{code.co_firstlineno}" if code else f"{name}, a Python object"
    reward = RewardFunction(name if name.isidentifier() else "reward", source, 1.0, partial(_given, function, file))
    read_signature(function, str(reward))
    return reward


def load(path: str, name: str) -> Callable[..., object]:
    """Runs in the worker. Functions of one file share one module."""
    module_name = "fastgrpo_reward_" + hashlib.blake2b(path.encode(), digest_size=8).hexdigest()
    module = sys.modules.get(module_name)
    if module is None:
        spec = importlib.util.spec_from_file_location(module_name, path)
        if spec is None or spec.loader is None:
            raise UserError(f"{path} cannot be imported: its name must end in .py.")
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module  # before it runs: dataclasses and pickle look their module up
        sys.path.insert(0, str(Path(path).parent))
        spec.loader.exec_module(module)
    return getattr(module, name)


def _given(function: Callable[..., object], file: str) -> Callable[..., object]:
    """Runs in the worker. cloudpickle forgets where code comes from; tracebacks shall name the file and its lines."""
    if isinstance(function, FunctionType):
        for part in (function, *function.__globals__.values()):
            if isinstance(part, FunctionType) and part.__code__.co_filename == "<dynamic-code>":
                part.__code__ = part.__code__.replace(co_filename=file)
    return function


def _check_file(function: RewardFunction, path: Path, name: str) -> None:
    """ConfigError when the file, the name in it or the function's parameters cannot be right. Runs nothing of it."""
    option = f"reward.functions.{function.label}"
    if not path.is_file():
        raise ConfigError(f"{option}.path: there is no file {path} (relative paths start at {Path.cwd()}).")
    if path.suffix != ".py":
        raise ConfigError(f"{option}.path: {path} is no Python file; its name must end in .py.")
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError) as error:  # ValueError: null bytes
        raise ConfigError(f"{option}.path: {path} is not valid Python: {error}.") from None
    functions = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
    node = functions.get(name)
    if node is None:
        if not {name, "*"} & _bound_names(tree):
            known = ", ".join(functions) or "no function"
            raise ConfigError(f"{option}.name: {path} defines no {name}. It defines {known}. Set {option}.name.")
    elif not node.decorator_list:  # a decorator may change the parameters: the worker looks at the result
        try:
            check_required(_required_parameters(node.args), _parameters(node.args), str(function))
        except UserError as error:
            raise ConfigError(str(error)) from None


def _parameters(arguments: ast.arguments) -> list[str]:
    return [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def _required_parameters(arguments: ast.arguments) -> list[str]:
    positional = arguments.posonlyargs + arguments.args
    required = positional[: len(positional) - len(arguments.defaults)]
    required += [a for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if default is None]
    return [a.arg for a in required]


def _bound_names(tree: ast.Module) -> set[str]:
    """Names that a module binds outside its functions and classes, also in if and try. `*` stands for what a star
    import brings: then anything may be there, and the worker's import decides."""
    names: set[str] = set()
    nodes: list[ast.AST] = list(tree.body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        else:
            nodes += ast.iter_child_nodes(node)
    return names
