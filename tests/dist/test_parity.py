"""One update is the same update on any number of ranks: loss, gradient norm, every gradient, and the weights after.

The truth is one process. Ragged rollouts, grouped-query attention, a KL term to another policy, an entropy bonus,
importance weights. Tolerances in float32: 1e-5 relative for loss and norm, 1e-4 in norm for each gradient.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import one_update, policy_of

from fastgrpo.mesh import build_mesh

MODELS = {
    "tied, 2 kv heads": {"family": "qwen2", "tied": True},
    "untied, 1 kv head": {"family": "qwen2", "num_key_value_heads": 1},
    "norms on heads": {"family": "qwen3", "num_hidden_layers": 3},
}


def assert_same_update(actual, expected):
    assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    assert actual["tokens"] == expected["tokens"]
    for name in ("kl", "entropy", "gap_abs", "ratio", "importance"):
        assert actual[name] == pytest.approx(expected[name], rel=1e-5), name
    assert actual["ratio_max"] == expected["ratio_max"] == 1
    gradients, right = actual["gradients"], expected["gradients"]
    assert gradients.keys() == right.keys()
    for name, gradient in right.items():
        # A key's bias shifts all scores of a query alike, so its gradient is zero, and what there is is rounding.
        if gradient.norm() > 1e-6 * expected["grad_norm"]:
            assert (gradients[name] - gradient).norm() < 1e-4 * gradient.norm(), name
        else:
            assert name.endswith("k_proj.bias")
    for name, move in expected["moves"].items():
        difference = (actual["moves"][name] - move).abs()
        assert difference.max() < 2e-6, name  # of a learning rate of 1e-3
        assert difference.norm() < 1e-3 * move.norm() or name.endswith("k_proj.bias"), name


@pytest.fixture(scope="module")
def truth(make_tiny_model, mesh):
    """truth(model, count) -> (folder, what one process gets in one micro-batch)."""
    made = {}

    def get(model, count=8):
        if (model, count) not in made:
            folder = make_tiny_model(**MODELS[model])
            made[model, count] = folder, one_update(folder, mesh=mesh, count=count, updates=2)
        return made[model, count]

    return get


def test_the_case_has_every_term(truth):
    _, one = truth("tied, 2 kv heads")
    assert one["micro_batches"] == 1 and one["rows"] == one["tokens"] > 40
    assert one["kl"] / one["tokens"] > 1e-3 and one["entropy"] / one["tokens"] > 1
    assert abs(one["loss"]) > 1e-3 and one["grad_norm"] > 1e-2
    assert one["is_high"] > 0  # some weights of the correction are cut
    assert max(move.abs().max() for move in one["moves"].values()) > 1e-3
    assert "lm.lm_head.weight" not in one["gradients"]


# (model, ranks, what they do)
LAYOUTS = [
    ("tied, 2 kv heads", 2, {}),
    ("tied, 2 kv heads", 2, {"sp": 2}),
    ("untied, 1 kv head", 2, {"sp": 2, "max_tokens_per_gpu": 24}),
    ("untied, 1 kv head", 4, {"sp": 2}),
    ("tied, 2 kv heads", 4, {"sp": 2, "max_tokens_per_gpu": 20, "gradient_checkpointing": 1}),
    ("tied, 2 kv heads", 4, {"sp": 2, "replicas": 2, "reshard_after_forward": False}),
]


@pytest.mark.parametrize(("model", "size", "options"), LAYOUTS)
def test_ranks_make_the_update_of_one_process(truth, ranks, model, size, options):
    folder, expected = truth(model)
    results = ranks(size).run(one_update, folder, updates=2, **options)
    for result in results:
        assert_same_update(result, expected)
    assert len({result["micro_batches"] for result in results}) == 1
    assert sum(result["rows"] for result in results) == expected["rows"]
    if "max_tokens_per_gpu" in options:
        assert results[0]["micro_batches"] > 1


def rotary_frequencies(folder):
    """Of a policy and of a reference on this rank, where every uninitialised tensor is full of NaN."""
    mesh = build_mesh("cpu", sp=1, tp=1)
    torch.use_deterministic_algorithms(True)
    try:
        built = [policy_of(folder, mesh, trainable=trainable) for trainable in (True, False)]
    finally:
        torch.use_deterministic_algorithms(False)
    return [[b.clone() for name, b in p.module.named_buffers() if name.endswith(".inv_freq")] for p in built]


def test_every_rank_has_the_rotary_frequencies(ranks, make_tiny_model):
    """theta^(-2i / D) for i below D / 2."""
    folder = make_tiny_model("llama", head_dim=8, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    results = ranks(2).run(rotary_frequencies, folder)
    assert len(results) == 2
    for policy, reference in results:
        assert len(policy) == len(reference) == 1
        for found in (*policy, *reference):
            torch.testing.assert_close(found, torch.tensor([1, 0.1, 0.01, 0.001]))


@pytest.mark.parametrize(("size", "options"), [(2, {}), (4, {"sp": 2})])
def test_ranks_without_any_loss_token(truth, ranks, size, options):
    """Fewer sequences than data ranks: the others run an empty row in step, and nothing hangs."""
    folder, expected = truth("tied, 2 kv heads", count=1)
    results = ranks(size).run(one_update, folder, count=1, updates=2, **options)
    assert min(result["rows"] for result in results) == 0
    for result in results:
        assert_same_update(result, expected)


@pytest.mark.slow
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("budget", [40, 1000])
@pytest.mark.parametrize(("size", "sp", "replicas"), [(2, 1, 1), (2, 2, 1), (2, 1, 2), (4, 1, 1), (4, 2, 1), (4, 4, 1)])
@pytest.mark.parametrize("model", MODELS)
def test_every_layout(truth, ranks, model, size, sp, replicas, budget, reshard):
    folder, expected = truth(model)
    options = {"sp": sp, "replicas": replicas, "max_tokens_per_gpu": budget, "reshard_after_forward": reshard}
    for result in ranks(size).run(one_update, folder, updates=2, **options):
        assert_same_update(result, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"gradient_checkpointing": 2},
        {"gradient_checkpointing": 1, "activation_offload": True},
        {"offload_policy": True},
        {"replicas": 4},
        {"replicas": 2, "offload_policy": True},
    ],
)
def test_savings_of_memory_change_nothing(truth, ranks, options):
    folder, expected = truth("norms on heads")
    for result in ranks(4).run(one_update, folder, sp=2, updates=2, **options):
        assert_same_update(result, expected)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_two_agents_of_two_processes_are_one_of_four(truth, tmp_path, replicas):
    """With 2 replicas each agent, a node, holds a whole copy (HSDP)."""
    folder, expected = truth("untied, 1 kv head")
    port = free_port()
    two = [f"--nnodes=2 --nproc-per-node=2 --node-rank={node} --rdzv-id=parity".split() for node in (0, 1)]
    agents = [[*agent, f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-backend=c10d"] for agent in two]
    one = ["--standalone", "--nproc-per-node=4"]
    for name, commands in (("two", agents), ("one", [one])):
        file = tmp_path / f"{name}.pt"
        processes = [start_agent([*command, "--local-addr=127.0.0.1"], folder, file, replicas) for command in commands]
        try:
            for process in processes:
                _, errors = process.communicate(timeout=300)
                assert process.returncode == 0, errors
        finally:
            for process in processes:
                process.terminate()  # an agent ends its workers
        result = torch.load(file)
        assert result["world"] == 4
        assert_same_update(result, expected)


def start_agent(options, folder, file, replicas):
    script = Path(__file__).with_name("agents.py")
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *options, *map(str, (script, folder, file, replicas))],
        env=environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
