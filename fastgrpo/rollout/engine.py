"""What the trainer asks of an engine, and the seeds of its samples. No engine lives here (see vllm.py, hf.py).

    with engine.awake(policy.export, version):      # new weights in, prefix cache reset, KV cache up
        rollouts = engine.generate(requests, sampling)
    # here the engine sleeps: on CUDA its weights and cache are given back to the trainer

The memory phase is an indentation: generating outside it raises. All ranks enter, generate and leave together; the
ranks of one tensor-parallel group are given the same requests and return the same rollouts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from fastgrpo.config import Dtype, RunConfig, compute_dtype
from fastgrpo.errors import ConfigError
from fastgrpo.records import Request, Rollout, Sampling

if TYPE_CHECKING:
    from torch import Tensor

# Called when weights are wanted: Hugging Face names and full tensors, one block's at a time. Each tensor is valid only
# until the next is asked for. A collective over the trainer's ranks: every rank iterates to the end.
WeightExport = Callable[[], Iterator[tuple[str, "Tensor"]]]


class RolloutEngine(Protocol):
    @property
    def info(self) -> Mapping[str, str]:
        """What served, for the run's records: library, version and what else decides what is drawn."""
        ...

    def holds(self, version: int) -> bool:
        """Whether `awake(export, version)` would do without asking `export`: these weights are here already. The same
        on every rank."""
        ...

    def awake(self, export: WeightExport, version: int) -> AbstractContextManager[None]:
        """Wake with the weights of `version`, sleep on leaving. `version` counts the policy's updates. An engine that
        does not hold them loads them through `export`, once and to its end, before it takes memory for its cache: at
        that end the trainer gives its own away."""
        ...

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        """One rollout a request, in the order of the requests. Raises RuntimeError outside `awake`."""
        ...

    def close(self) -> None:
        """Give everything back. The process group stays: it is the trainer's."""
        ...


def sample_seed(run_seed: int, step: int, attempt: int, uid: str, sample: int) -> int:
    """Seed of one sample, 0 <= seed < 2**63: a hash, because neighbouring seeds share random streams in some engines.
    The same after a resume and on every rank, different for every sample of a run."""
    text = f"{run_seed}/{step}/{attempt}/{sample}/{uid}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def reports_logprobs(sampling: Sampling) -> bool:
    """Whether rollouts drawn with `sampling` carry sampler_logprobs. Greedy tokens are not drawn, and logprobs over a
    cut or penalised vocabulary cannot be compared with the trainer's."""
    return sampling.temperature > 0 and sampling.keeps_full_vocabulary


def engine_dtype(config: RunConfig, device_type: str) -> str:
    """Name of the torch dtype that `rollout.dtype` means: auto is the trainer's. Raises ConfigError for a narrower one:
    the updates of a few steps are smaller than bfloat16's steps, so an engine that rounds what the trainer does not
    keeps drawing from the old policy (seen: a gap of 0.02 nats at step 1 and 0.10 at step 12, at lr 1e-5)."""
    trainer = compute_dtype(config.actor.dtype, device_type)
    wanted = trainer if config.rollout.dtype == Dtype["auto"] else str(config.rollout.dtype)
    if wanted == "bfloat16" and trainer == "float32":
        raise ConfigError(
            f"rollout.dtype=bfloat16 with a trainer in float32 (actor.dtype={config.actor.dtype}, {device_type}): the "
            "engine would round the updates away; set rollout.dtype=auto, or actor.dtype=bfloat16"
        )
    return wanted
