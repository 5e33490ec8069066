"""The first update on one layout against that of one GPU: loss, gradient norm, every gradient. For bench_layouts.py.

One GPU leaves the truth in a file; every other layout is compared tensor by tensor, so that no rank ever holds all
gradients whole:

    one GPU      trainer.step() --> gradients on the host --> gradients-<dtype>.safetensors (4 bytes a parameter)
    a layout     trainer.step() --> a sharded gradient --all ranks gather it--> rank 0: its difference to the file's

The trainer makes the step as always, over made answers of ragged lengths; only where AdamW would move the weights, the
gradients are read. Two bounds:

    float32     loss, norm 1e-5 relative, each tensor 1e-4 in norm. A tensor that has no more than 1e-6 of the whole
                norm can only be a key's bias (which hardly changes the scores' order), and must agree to that 1e-6.
    bfloat16    loss, norm 1e-2 relative, the whole gradient 5e-2 in norm, and each tensor within twice its rounding,
                which is how far bfloat16 is from float32 on one GPU: two roundings of that size may point apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig

from fastgrpo import Trainer
from fastgrpo.config import RunConfig
from made_model import make_prompts, reward_of

DTYPES = ("float32", "bfloat16")
NOTHING = 1e-6  # of the whole norm: a gradient of that size is rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    loss: float  # relative
    norm: float  # relative
    gradient: float  # of all tensors together, in norm, relative
    tensor: float | None = None  # each tensor, in norm, relative
    roundings: float | None = None  # each tensor, in norm, in its own distance from float32


LIMITS = {
    "float32": Limits(loss=1e-5, norm=1e-5, gradient=1e-4, tensor=1e-4),
    "bfloat16": Limits(loss=1e-2, norm=1e-2, gradient=5e-2, roundings=2.0),
}


@dataclass(frozen=True, slots=True)
class Difference:
    """Of one gradient: norms of the truth, of the difference to it, and of the truth's own to float32's, if known."""

    name: str
    norm: float
    error: float
    rounding: float | None = None


class GradientReader(torch.optim.Optimizer):
    """In an optimizer's place: shows every gradient, whole, to `visit`, one after the other, and moves nothing. A
    collective: all ranks show all of them."""

    def __init__(self, module: nn.Module, visit: Callable[[str, Tensor], None]) -> None:
        self._module, self._visit = module, visit
        super().__init__(module.parameters(), {"lr": 0.0})

    def step(self, closure: Any = None) -> None:
        for name, parameter in self._module.named_parameters():
            gradient = parameter.grad
            if gradient is not None:
                self._visit(name, gradient.full_tensor() if isinstance(gradient, DTensor) else gradient)


class Truth:
    """A file of gradients, read one at a time, with the loss and the norm they came with."""

    def __init__(self, file: Path) -> None:
        self._tensors: Any = safe_open(file, framework="pt")
        self.names = set(self._tensors.keys())
        self.loss, self.grad_norm = (float(self._tensors.metadata()[name]) for name in ("loss", "grad_norm"))

    def gradient(self, name: str, device: torch.device) -> Tensor:
        return self._tensors.get_tensor(name).to(device)

    @staticmethod
    def file(folder: Path, dtype: str) -> Path:
        return folder / f"gradients-{dtype}.safetensors"


def run(config: RunConfig, dtype: str, folder: Path, *, is_truth: bool) -> dict[str, Any]:
    """One update on this process's ranks, every rank calls it: {"loss", "grad_norm", "comparison"}. `is_truth`: its
    gradients become the truth of `dtype`, and what it is compared with is float32's. Raises RuntimeError when there was
    not one whole update."""
    torch.set_float32_matmul_precision("highest")  # no TF32
    against = "float32" if is_truth else dtype
    files = {name: Truth.file(folder, name) for name in {against, "float32"}}
    if is_truth:
        Truth.file(folder, dtype).unlink(missing_ok=True)  # no later layout must meet a former run's
    truth = None if is_truth and dtype == "float32" else Truth(files[against])
    exact = Truth(files["float32"]) if against != "float32" else None
    trainer = _trainer(config)
    actor: Any = trainer.stages.actor  # whose optimizer is said to be AdamW
    mesh = trainer.stages.mesh
    kept: dict[str, Tensor] = {}
    differences: list[Difference] = []

    def visit(name: str, gradient: Tensor) -> None:
        if not mesh.is_main:
            return
        if is_truth:
            kept[name] = gradient.detach().cpu().contiguous()
        if truth is not None:
            right = truth.gradient(name, gradient.device)
            differences.append(
                difference(name, gradient, right, None if exact is None else exact.gradient(name, gradient.device))
            )

    actor.optimizer = GradientReader(actor.policy.module, visit)
    record = trainer.step()
    loss, grad_norm = record.loss, record.metrics["actor/grad_norm"]
    if (record.metrics["actor/updates"], record.metrics["actor/skipped_updates"]) != (1, 0):
        raise RuntimeError(f"there was not one whole update: {dict(record.metrics)}")
    if is_truth:
        save_file(kept, Truth.file(folder, dtype), {"loss": repr(loss), "grad_norm": repr(grad_norm)})
    comparison = None
    if truth is not None and mesh.is_main:
        comparison = {"against": against} | compare(
            (loss, grad_norm),
            (truth.loss, truth.grad_norm),
            truth.names,
            differences,
            None if is_truth else LIMITS[dtype],
        )
    trainer.close()
    return {"loss": loss, "grad_norm": grad_norm, "comparison": comparison}


def _trainer(config: RunConfig) -> Trainer:
    vocab = AutoConfig.from_pretrained(config.model.path).vocab_size
    prompts = make_prompts(config.data.train_batch_size, config.data.max_prompt_length, vocab)
    return Trainer(config, prompts=prompts, reward=lambda response: reward_of(response))


def difference(name: str, gradient: Tensor, right: Tensor, exact: Tensor | None = None) -> Difference:
    """Norms in float64 of tensors of one shape. Raises ValueError for different shapes."""
    if gradient.shape != right.shape:
        raise ValueError(f"{name}: a gradient of {tuple(gradient.shape)}, the truth has {tuple(right.shape)}")
    rounding = None if exact is None else _norm(right - exact)
    return Difference(name, _norm(right), _norm(gradient - right), rounding)


def _norm(tensor: Tensor) -> float:
    return torch.linalg.vector_norm(tensor, dtype=torch.float64).item()


def compare(
    found: tuple[float, float],
    right: tuple[float, float],
    names: set[str],
    differences: Sequence[Difference],
    limits: Limits | None,
) -> dict[str, Any]:
    """`found`, `right`: (loss, gradient norm). `names`: the gradients that must be there. The relative errors, the
    tensors that are furthest off, and `failures`: a line for everything beyond its limit (NaN is beyond any)."""
    loss_error, norm_error = (abs(a - b) / abs(b) if b else math.inf for a, b in zip(found, right, strict=True))
    whole = math.sqrt(sum(d.norm**2 for d in differences))
    gradient_error = math.sqrt(sum(d.error**2 for d in differences)) / whole if whole else math.inf
    bounds = [(d, bound(d, right[1], limits)) for d in differences]
    bounds.sort(key=lambda pair: pair[0].error / pair[1] if pair[1] else math.inf, reverse=True)
    failures = []
    if limits is not None:
        scalars = (("loss", loss_error, limits.loss), ("gradient norm", norm_error, limits.norm))
        for name, error, limit in (*scalars, ("whole gradient", gradient_error, limits.gradient)):
            if not error <= limit:
                failures.append(f"{name}: off by {error:.2g}, limit {limit:g}")
        failures += [
            f"{d.name}: off by {d.error:.3g}, limit {limit:.3g}" for d, limit in bounds if not d.error <= limit
        ]
    missing = names ^ {d.name for d in differences}
    failures += [f"{name}: only on one side" for name in sorted(missing)]
    return {
        "loss_error": loss_error,
        "norm_error": norm_error,
        "gradient_error": gradient_error,
        "tensors": len(differences),
        "tensor_error": max((d.error / d.norm for d in differences if d.norm > NOTHING * right[1]), default=None),
        "worst": [{"name": d.name, "norm": d.norm, "error": d.error, "rounding": d.rounding} for d, _ in bounds[:3]],
        "failures": failures,
    }


def bound(d: Difference, grad_norm: float, limits: Limits | None) -> float:
    """How large the error of one tensor may be; without limits, its norm."""
    if limits is None:
        return d.norm
    if limits.roundings is not None and d.rounding is not None:
        return limits.roundings * d.rounding
    if d.norm <= NOTHING * grad_norm:
        return NOTHING * grad_norm if d.name.endswith("k_proj.bias") else 0.0
    return (limits.tensor or limits.gradient) * d.norm
