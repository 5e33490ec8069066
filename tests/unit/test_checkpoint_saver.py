"""Saving and loading in one process: bit for bit, asynchronously, on disks that are full or read-only."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastgrpo import host_memory
from fastgrpo.checkpoint import Manifest, Saver, checksum, restore, room, saver
from fastgrpo.checkpoint.checksum import crc32, safetensors_crc32
from fastgrpo.checkpoint.folders import find_checkpoints, read_manifest
from fastgrpo.checkpoint.places import Places
from fastgrpo.checkpoint.random_state import random_state, set_random_state
from fastgrpo.checkpoint.tensors import copied_bytes, copy_to_host, training_tensors
from fastgrpo.config import OptimConfig, TrainerConfig
from fastgrpo.errors import UserError
from fastgrpo.mesh import Mesh
from fastgrpo.policy.model import Policy, build_policy
from fastgrpo.policy.optim import apply_update, build_adamw
from fastgrpo.policy.weights import local


def make_policy(folder: Path, mesh: Mesh) -> tuple[Policy, torch.optim.Optimizer]:
    policy = build_policy(folder, mesh, dtype=torch.float32, attention_backend="sdpa", trainable=True)
    return policy, build_adamw(policy.module.parameters(), OptimConfig(lr=1e-2))


def update(policy: Policy, optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    torch.manual_seed(seed)
    for parameter in policy.module.parameters():
        parameter.grad = torch.zeros_like(parameter)
        local(parameter.grad).normal_()
    apply_update(optimizer, 1e-2, 1.0)


def manifest(step: int, metric: float | None = None, **parts: Any) -> Manifest:
    return Manifest(step, 9, 1, {}, {}, parts, metric, {})


def saver_of(root: Path, made: tuple[Policy, torch.optim.Optimizer], model: Path, mesh: Mesh, **options: Any) -> Saver:
    return Saver(root, *made, AutoTokenizer.from_pretrained(model), mesh, TrainerConfig(**options), Places((0,)))


def values(made: tuple[Policy, torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    return {
        name: getattr(t, "full_tensor", lambda t=t: t)().clone()
        for name, t in training_tensors(made[0].module, made[1]).items()
    }


class Counter:
    def __init__(self) -> None:
        self.number = 0.0

    def state(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state(self, state: Any) -> None:
        self.number = state["number"]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_everything_comes_back(asynchronous: bool, tiny_model: Path, mesh: Mesh, tmp_path: Path) -> None:
    made = make_policy(tiny_model, mesh)
    for seed in range(3):
        update(*made, seed=seed)
    saving, counter = saver_of(tmp_path, made, tiny_model, mesh, async_save=asynchronous), Counter()
    counter.number = 0.1 + 0.2
    right = values(made)
    assert len([name for name in right if name.endswith("exp_avg_sq")]) > 20
    saving.save(manifest(3, counter=counter.state()), random_state())
    drawn = torch.rand(3), np.random.rand(3), random.random()
    update(*made, seed=9)  # while the writer writes
    saving.wait()
    [(folder, found)] = find_checkpoints(tmp_path).complete

    other, restored = make_policy(tiny_model, mesh), Counter()
    assert not other[1].state
    restore(folder, found, *other, {"counter": restored, "newer": restored}, mesh)
    back = values(other)
    assert back.keys() == right.keys() and all(torch.equal(back[name], right[name]) for name in right)
    assert all(back[name].dtype == right[name].dtype for name in right)
    assert restored.number == 0.1 + 0.2
    assert torch.equal(torch.rand(3), drawn[0]) and np.array_equal(np.random.rand(3), drawn[1])
    assert random.random() == drawn[2]
    update(*other, seed=9)
    moved, unbroken = values(other), values(made)
    assert all(torch.equal(moved[name], unbroken[name]) for name in unbroken)


def test_the_model_folder_is_the_saved_policy(tiny_model: Path, mesh: Mesh, tmp_path: Path) -> None:
    made = make_policy(tiny_model, mesh)
    update(*made)
    saver_of(tmp_path, made, tiny_model, mesh).save(manifest(1), random_state(), wait=True)
    folder = tmp_path / "step_000001" / "model"
    weights, right = (
        load_file(folder / "model.safetensors"),
        {name: tensor.clone() for name, tensor in made[0].export()},
    )
    assert weights.keys() == right.keys() and all(torch.equal(weights[name], right[name]) for name in right)
    state = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(state[name], right[name]) for name in right)
    assert AutoTokenizer.from_pretrained(folder).chat_template


def test_a_checkpoint_before_the_first_update(tiny_model: Path, mesh: Mesh, tmp_path: Path) -> None:
    made = make_policy(tiny_model, mesh)
    saver_of(tmp_path, made, tiny_model, mesh).save(manifest(1), random_state(), wait=True)
    other = make_policy(tiny_model, mesh)
    update(*other)
    fresh = make_policy(tiny_model, mesh)
    restore(tmp_path / "step_000001", read_manifest(tmp_path / "step_000001"), *fresh, {}, mesh)
    assert not fresh[1].state
    assert all(torch.equal(a, b) for a, b in zip(values(fresh).values(), values(made).values(), strict=True))


def test_the_next_save_waits_and_old_ones_go(tiny_model: Path, mesh: Mesh, tmp_path: Path) -> None:
    made = make_policy(tiny_model, mesh)
    options = {"max_ckpt_to_keep": 1, "best_metric": "val/reward"}
    saving = saver_of(tmp_path, made, tiny_model, mesh, **options)
    for step, metric in ((1, 0.1), (2, 0.9), (3, None), (4, 0.2)):
        saving.save(manifest(step, metric), random_state())
    saving.wait()
    assert [found.step for _, found in find_checkpoints(tmp_path).complete] == [4, 2]
    assert saving.failures == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 9 MiB of its own, for whoever may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=9m", "none", str(folder)]).returncode:
        pytest.skip("may not mount a tmpfs")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def sizes(made: tuple[Policy, torch.optim.Optimizer]) -> int:
    return sum(tensor.nbytes for tensor in values(made).values())


def test_a_full_disk_costs_that_save_alone(
    tiny_model: Path, mesh: Mesh, small_disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made, root = make_policy(tiny_model, mesh), small_disk / "checkpoints"
    update(*made)
    assert sizes(made) == 3783276  # with the model's third of it, one fits and two do not
    saving = saver_of(root, made, tiny_model, mesh)
    saving.save(manifest(1), random_state(), wait=True)
    assert saving.failures == 0
    with caplog.at_level(logging.ERROR):
        saving.save(manifest(2), random_state(), wait=True)  # seen before
    assert "CHECKPOINT NOT SAVED (step_000002): OSError: a checkpoint takes 0.0047 GiB and 0.00" in caplog.text
    monkeypatch.setattr(room, "free_bytes", lambda folder: 1 << 40)
    with caplog.at_level(logging.ERROR):
        saving.save(manifest(3), random_state(), wait=True)  # met while writing
    assert "CHECKPOINT NOT SAVED (step_000003)" in caplog.text
    assert saving.failures == 2
    assert [path.name for path in sorted(root.iterdir())] == ["latest", "step_000001"]
    assert read_manifest(root / "step_000001").step == 1 and (root / "latest").read_text() == "step_000001\n"
    subprocess.run(["mount", "-o", "remount,size=40m", str(small_disk)], check=True)
    saving.save(manifest(4), random_state(), wait=True)
    assert [found.step for _, found in find_checkpoints(root).complete] == [4, 1]


def test_a_disk_that_turns_read_only(
    tiny_model: Path, mesh: Mesh, small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = make_policy(tiny_model, mesh)
    saving = saver_of(small_disk, made, tiny_model, mesh)
    saving.save(manifest(1), random_state(), wait=True)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with caplog.at_level(logging.ERROR):
        saving.save(manifest(2), random_state(), wait=True)
    assert "[Errno 30] Read-only file system" in caplog.text and saving.failures == 1
    assert [found.step for _, found in find_checkpoints(small_disk).complete] == [1]


def test_a_folder_that_cannot_be_made(
    tiny_model: Path, mesh: Mesh, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    saving = saver_of(tmp_path / "checkpoints", make_policy(tiny_model, mesh), tiny_model, mesh)
    with caplog.at_level(logging.ERROR):
        saving.save(manifest(1), random_state(), wait=True)
    assert "CHECKPOINT NOT SAVED (step_000001): " in caplog.text and saving.failures == 1


@pytest.mark.parametrize("where", ["write_shard", "write_index", "full_masters", "commit"])
def test_an_error_anywhere_leaves_nothing_half(
    where: str, tiny_model: Path, mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving = saver_of(tmp_path, make_policy(tiny_model, mesh), tiny_model, mesh)

    def fail(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(saver, where, fail)
        saving.save(manifest(1), random_state(), wait=True)
    assert saving.failures == 1 and list(tmp_path.iterdir()) == []
    saving.save(manifest(2), random_state(), wait=True)
    assert [found.step for _, found in find_checkpoints(tmp_path).complete] == [2]


def flip(file: Path) -> None:
    """One bit in the middle; a second time mends it."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.fixture(scope="module")
def three_saved(tiny_model: Path, mesh: Mesh, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, made = tmp_path_factory.mktemp("three"), make_policy(tiny_model, mesh)
    saving = saver_of(root, made, tiny_model, mesh)
    for step in (1, 2, 3):
        saving.save(manifest(step), random_state(), wait=True)
    return root


@pytest.mark.parametrize(
    "name",
    [
        "state/__0_0.distcp",  # torch reads it without a word
        "state/.metadata",
        "ranks/00000.json",
        "model/model.safetensors",  # these are for other programs, to which nothing would tell it
        "model/tokenizer.json",
        "model/generation_config.json",
    ],
)
def test_a_changed_bit_anywhere_ends_the_resume(
    name: str, three_saved: Path, tiny_model: Path, mesh: Mesh, tmp_path: Path
) -> None:
    """And what is offered in its place is not damaged itself."""
    root = shutil.copytree(three_saved, tmp_path / "checkpoints")
    first, second, third = (root / f"step_00000{step}" for step in (1, 2, 3))

    def refusal() -> str:
        with pytest.raises(UserError) as refused:
            restore(third, read_manifest(third), *make_policy(tiny_model, mesh), {}, mesh)
        assert "\n" not in str(refused.value)
        return str(refused.value)

    restore(third, read_manifest(third), *make_policy(tiny_model, mesh), {}, mesh)
    flip(third / name)
    said = refusal()
    assert f"{third} cannot be read, though no file is missing: rank 0: ValueError: {name} has changed" in said
    assert f"The complete one before it: trainer.resume={second}. Or copy" in said
    flip(second / name)
    assert f"before it: trainer.resume={first} (step_000002 cannot be read either). Or copy" in refusal()
    flip(first / name)
    assert "No older one can be read (step_000002, step_000001); copy it anew" in refusal()


def test_checkpoints_of_older_versions_have_fewer_checksums(
    three_saved: Path, tiny_model: Path, mesh: Mesh, tmp_path: Path
) -> None:
    """None in checkpoint.json, none of model/, at first none of shards; what torch cannot read is refused even so."""
    folder = shutil.copytree(three_saved / "step_000001", tmp_path / "step_000001")
    document = json.loads((folder / "checkpoint.json").read_text())
    del document["crc32"]
    for name in ("files.crc32", "state/__0_0.distcp.crc32"):
        (folder / name).unlink()
        del document["files"][name]
        (folder / "checkpoint.json").write_text(json.dumps(document))
        restore(folder, read_manifest(folder), *make_policy(tiny_model, mesh), {}, mesh)
    shard = folder / "state" / "__0_0.distcp"
    shard.write_bytes(bytes(shard.stat().st_size))
    with pytest.raises(UserError, match=r"rank 0: \w+: .*There is no older one"):
        restore(folder, read_manifest(folder), *make_policy(tiny_model, mesh), {}, mesh)


def test_checksums_from_memory_are_those_of_the_files(tmp_path: Path) -> None:
    """Weights are not read again at the save. In dtypes, sizes and strides of all kinds."""
    tensors = {
        "b": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T,
        "a": torch.tensor(1.5, dtype=torch.float64),
        "nothing": torch.zeros(0, 4),
        "z": torch.arange(5, dtype=torch.uint8),
        "y": torch.randn(3, 1, 2),
    }
    file = tmp_path / "a.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})
    right = crc32(file)
    assert safetensors_crc32(file, tensors) == right == f"{zlib.crc32(file.read_bytes()):08x}"
    flip(file)
    assert crc32(file) != right


def test_no_large_file_is_read_again_for_its_checksum(
    tiny_model: Path, mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    monkeypatch.setattr(checksum, "crc32", lambda file: read.append(file.name) or crc32(file))
    saver_of(tmp_path, make_policy(tiny_model, mesh), tiny_model, mesh).save(manifest(1), random_state(), wait=True)
    assert "tokenizer.json" in read and "model.safetensors" not in read
    saved = tmp_path / "step_000001"
    listed = [line.split("  ") for line in (saved / "files.crc32").read_text().splitlines()]
    assert [crc32(saved / "model" / "model.safetensors"), "model/model.safetensors"] in listed


def test_random_state_is_plain_and_exact() -> None:
    random.gauss(0, 1)  # leaves half a pair behind
    np.random.randn()
    state = json.loads(json.dumps(random_state()))

    def draw() -> list[float]:
        return [random.gauss(0, 1), random.random(), np.random.randn(), np.random.rand(), torch.rand(1).item()]

    first = draw()
    assert draw() != first
    set_random_state(state)
    assert draw() == first


def test_a_copy_from_a_gpu_is_pinned_and_rounded_up() -> None:
    there = [SimpleNamespace(nbytes=size, is_cuda=True) for size in (1000, 1024, 1025)]
    assert copied_bytes(cast("Any", [*there, torch.zeros(250)])) == 1024 + 1024 + 2048 + 1000


def test_without_room_for_a_copy_the_save_is_waited_for(
    tiny_model: Path, mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = make_policy(tiny_model, mesh)
    state = training_tensors(made[0].module, made[1]).values()
    needed = sum(local(tensor).nbytes for tensor in state)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: host_memory.RESERVE + needed - 1)
    saving = saver_of(tmp_path, made, tiny_model, mesh)
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            saving.save(manifest(step), random_state())
            assert find_checkpoints(tmp_path).complete[0][1].step == step  # complete already
    assert caplog.text.count("host memory has no room for a copy") == 1
    monkeypatch.setattr(host_memory, "available_bytes", lambda: host_memory.RESERVE + needed)
    copied: list[int] = []
    monkeypatch.setattr(saver, "copy_to_host", lambda tensors: copied.append(1) or copy_to_host(tensors))
    saving.save(manifest(3), random_state())
    saving.wait()
    assert copied == [1] and saving.failures == 0
