"""The options that trade time for memory change no number, so no result would show that one was lost on its way: here
is where they arrive.

    configuration --> build_policy        every option that the policy is built from, for policy and reference
    build_policy  --> model               recomputed blocks, their inputs on the host, slices, resharding, offload
    actor         --> kernels             the head's working buffers
    a run         --> packing, parking    a micro-batch's tokens; masters and AdamW are away while the engine draws
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cases import (
    full_weights,
    make_rollouts,
    mini_batches_of,
    one_batch,
    one_process,
    policy_of,
    share_of,
    training_state,
)
from cpu_parking import CpuParking, is_there, overwrite_freed_memory
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

import fastgrpo.policy.actor
import fastgrpo.policy.head
import fastgrpo.policy.model
import fastgrpo.stages
from fastgrpo import Trainer
from fastgrpo.config import RunConfig, build
from fastgrpo.metrics import Sums
from fastgrpo.plan import settle_on_cpu, with_option
from fastgrpo.plan.settle import OPTIONS
from fastgrpo.policy.actor import Actor
from fastgrpo.policy.mlp_slices import SlicedMLP
from fastgrpo.policy.model import blocks
from fastgrpo.policy.weights import full_tensors
from fastgrpo.records import StepRecord
from fastgrpo.rollout.hf import HfEngine

# ---- configuration -> build_policy


@pytest.fixture
def built(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """What build_policy is asked for."""
    monkeypatch.setattr(fastgrpo.stages, "build_policy", lambda folder, mesh, **options: options)

    def of(config: RunConfig, *, trainable: bool = True) -> dict[str, Any]:
        options: Any = fastgrpo.stages._build_policy(config, Path(), mesh, trainable=trainable)
        return options

    return of


# option, its value, keyword of build_policy, (what the policy is built with, the reference); both differ where they may
ARRIVES = [
    ("actor.gradient_checkpointing", 3, "gradient_checkpointing", (3, 3)),  # only a trained model recomputes
    ("actor.activation_offload", True, "activation_offload", (True, True)),
    ("actor.mlp_slices", 4, "mlp_slices", (4, 4)),
    ("actor.fsdp.reshard_after_forward", False, "reshard_after_forward", (False, True)),
    ("actor.fsdp.offload_policy", True, "offload_policy", (True, False)),
    ("ref.offload_policy", True, "offload_policy", (False, True)),
    ("actor.use_liger", False, "use_liger", (False, False)),
    ("actor.use_torch_compile", True, "compile_backend", ("inductor", "inductor")),
]


@pytest.mark.parametrize(("option", "value", "keyword", "expected"), ARRIVES, ids=[row[0] for row in ARRIVES])
def test_the_policy_is_built_as_told(built: Any, option: str, value: Any, keyword: str, expected: Any) -> None:
    plain = settle_on_cpu(RunConfig())
    changed = with_option(plain, option, value)
    moved = 0
    for trainable, right in zip((True, False), expected, strict=True):
        before, after = built(plain, trainable=trainable), built(changed, trainable=trainable)
        assert after[keyword] == right
        differ = {name for name in before if before[name] != after[name]}
        assert differ == ({keyword} if before[keyword] != right else set())
        moved += len(differ)
    assert moved


def test_every_option_of_the_plan_has_its_test_here() -> None:
    further_on = {"actor.max_tokens_per_gpu", "actor.head_chunk_gib", "actor.fsdp.offload_during_rollout"}
    further_on |= {"actor.fsdp.offload_optimizer"}  # test_host_adamw
    assert set(OPTIONS.values()) - {row[0] for row in ARRIVES} == further_on


# ---- build_policy -> model; actor -> kernels


@pytest.fixture(scope="module")
def three_blocks(make_tiny_model: Callable[..., Path]) -> Path:
    return make_tiny_model("llama", num_hidden_layers=3, hidden_size=32, intermediate_size=48)


def forward(policy: Any) -> Tensor:
    return policy.run(one_batch(make_rollouts(4)), lambda hidden_RH, *_: hidden_RH.sum())


@pytest.mark.parametrize(("every", "offloaded"), [(1, 3), (2, 2), (3, 1)])
def test_offloaded_activations_go_through_the_host(
    mesh: Any, three_blocks: Path, monkeypatch: pytest.MonkeyPatch, every: int, offloaded: int
) -> None:
    """Each recomputed block keeps its input, [1, U, H], by save_on_cpu, and gets it back in the backward."""
    kept: list[tuple[int, ...]] = []
    returned: list[int] = []

    class Watched(torch.autograd.graph.save_on_cpu):
        def __init__(self, pin_memory: bool = False, device_type: str = "cuda") -> None:
            super().__init__(pin_memory, device_type)
            pack, unpack = self.pack_hook, self.unpack_hook
            self.pack_hook = lambda tensor: (kept.append(tuple(tensor.shape)), pack(tensor))[1]
            self.unpack_hook = lambda packed: (returned.append(1), unpack(packed))[1]

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", Watched)
    forward(policy_of(three_blocks, mesh, gradient_checkpointing=every)).backward()
    assert kept == [] == returned
    policy = policy_of(three_blocks, mesh, gradient_checkpointing=every, activation_offload=True)
    loss = forward(policy)
    tokens = len(one_batch(make_rollouts(4)).input_ids_U)
    inputs = [shape for shape in kept if shape == (1, tokens, 32)]
    assert len(inputs) == offloaded and returned == []
    loss.backward()
    assert len(returned) >= offloaded


@pytest.mark.parametrize("slices", [1, 4])
def test_slices_are_in_every_block(mesh: Any, three_blocks: Path, slices: int) -> None:
    mlps: list[nn.Module] = [block.mlp for block in blocks(policy_of(three_blocks, mesh, mlp_slices=slices).module.lm)]
    found = [mlp._slices if isinstance(mlp, SlicedMLP) else 1 for mlp in mlps]
    assert found == [slices] * 3


@pytest.mark.parametrize("reshard", [True, False])
def test_blocks_are_sharded_again_after_the_forward_or_not(mesh: Any, three_blocks: Path, reshard: bool) -> None:
    """FSDP shows a DTensor where a parameter is sharded, and the whole, plain tensor where it is gathered."""
    policy = policy_of(three_blocks, mesh, reshard_after_forward=reshard)
    forward(policy)
    for block in blocks(policy.module.lm):
        assert {isinstance(parameter, DTensor) for parameter in block.parameters()} == {reshard}


@pytest.mark.parametrize("offload", [True, False])
def test_offloaded_shards_are_asked_of_every_unit(
    mesh: Any, three_blocks: Path, monkeypatch: pytest.MonkeyPatch, offload: bool
) -> None:
    asked: list[bool] = []
    real = fastgrpo.policy.model.fully_shard

    def watched(module: nn.Module, **options: Any) -> Any:
        asked.append(isinstance(options["offload_policy"], CPUOffloadPolicy))
        return real(module, **options)

    monkeypatch.setattr(fastgrpo.policy.model, "fully_shard", watched)
    forward(policy_of(three_blocks, mesh, offload_policy=offload)).backward()
    assert asked == [offload] * 4  # three blocks and the root


@pytest.mark.parametrize(("gib", "expected"), [(None, None), (0.25, 1 << 28)])
def test_every_pass_of_the_head_has_its_chunk(
    mesh: Any, three_blocks: Path, monkeypatch: pytest.MonkeyPatch, gib: float | None, expected: int | None
) -> None:
    chunks: dict[str, set[int | None]] = {}
    for name in ("linear_logprob", "linear_grpo_loss"):
        kernel = getattr(fastgrpo.policy.head, name)

        def watched(*args: Any, kernel: Any = kernel, name: str = name, **options: Any) -> Any:
            chunks.setdefault(name, set()).add(options["chunk_bytes"])
            return kernel(*args, **options)

        monkeypatch.setattr(fastgrpo.policy.head, name, watched)
    config = with_option(RunConfig(), "actor.head_chunk_gib", gib)
    policy, reference = policy_of(three_blocks, mesh), policy_of(three_blocks, mesh, trainable=False)
    actor, rollouts = Actor(policy, reference, config, 1), make_rollouts(4)
    mini_batches = mini_batches_of(rollouts, np.ones(4), share_of(mesh, 1000), config)
    actor.update(mini_batches, actor.old_logprobs(mini_batches), actor.ref_logprobs(mini_batches), Sums())
    assert chunks == {"linear_logprob": {expected}, "linear_grpo_loss": {expected}}


# ---- a run -> packing, parking


def held(optimizer: torch.optim.Optimizer) -> int:
    """Numbers of masters and AdamW's state that are there."""
    return sum(tensor.numel() for tensor in training_state(optimizer) if is_there(tensor))


@pytest.fixture
def trained(
    make_tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[[bool], SimpleNamespace]:
    folder = make_tiny_model("qwen2", tied=True, num_hidden_layers=1, hidden_size=32, intermediate_size=48)
    (tmp_path / "held_out.jsonl").write_text('{"prompt": "Say a word."}\n')
    monkeypatch.setattr(fastgrpo.policy.actor, "HostParking", CpuParking)
    generate = HfEngine.generate

    def run(offload: bool) -> SimpleNamespace:
        """A validation between two steps, so the second step's engine has its weights already: what the policy holds
        while the engine draws, and after each; rewards, losses and gradient norms; how often weights were brought over;
        the weights at the end."""
        document = {
            "model": {"path": str(folder)},
            "data": {"train_batch_size": 2, "max_prompt_length": 64, "max_response_length": 4, "reference_key": None}
            | {"val_files": [str(tmp_path / "held_out.jsonl")]},
            "reward": {"num_workers": 1},
            "rollout": {"name": "hf", "n": 2},
            "actor": {"use_kl_loss": False, "max_tokens_per_gpu": 96, "optim": {"lr": 1e-3}}
            | {"fsdp": {"offload_during_rollout": offload}},
            "trainer": {"device": "cpu", "max_steps": 2},
        }
        drawing: list[int] = []
        exports: list[int] = []

        def exported(*arguments: Any) -> Any:
            exports.append(1)
            return full_tensors(*arguments)

        with one_process():
            # A lambda goes to the worker as code; a function of a module would have it import torch.
            prompts, reward = ["Say hello.", "Name a colour."], lambda response: sum(map(ord, response)) % 1000 / 1000
            trainer = Trainer(build(document), prompts=prompts, reward=reward)
            optimizer = trainer.stages.actor.optimizer
            assert trainer.stages.share.max_tokens == 96

            def watched(self: HfEngine, *arguments: Any) -> Any:
                drawing.append(held(optimizer))
                overwrite_freed_memory()
                return generate(self, *arguments)

            monkeypatch.setattr(HfEngine, "generate", watched)
            monkeypatch.setattr(fastgrpo.policy.model, "full_tensors", exported)
            after, numbers = [], []
            for act in (trainer.step, trainer.validate, trainer.step):
                done = act()
                after.append(held(optimizer))
                if isinstance(done, StepRecord):
                    numbers.append((done.rewards_PG, done.loss, done.metrics["actor/grad_norm"]))
            weights = full_weights(trainer.stages.actor.policy)
            trainer.stages.rewards.close()
        return SimpleNamespace(drawing=drawing, after=after, numbers=numbers, weights=weights, exports=len(exports))

    return run


def test_masters_and_adamw_are_away_while_the_engine_draws(trained: Callable[[bool], SimpleNamespace]) -> None:
    there, away = trained(False), trained(True)
    assert all(there.drawing) and len(there.drawing) == 3  # two rollouts and a validation
    assert away.drawing == [0, 0, 0] and away.after == there.after and all(away.after)
    assert away.exports == there.exports == 2 and len(away.numbers) == 2
    assert away.numbers == there.numbers and all(norm > 0 for _, _, norm in away.numbers)
    assert all(torch.equal(weight, there.weights[name]) for name, weight in away.weights.items())
