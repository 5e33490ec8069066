"""Two nodes with a run folder each, on one host: saved by node, gone on with, and refused when a part is missing."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_runs import SmallRuns, document
from test_resume import MISUSE, SAVED, masters, only_run, rows

from fastgrpo.checkpoint.folders import find_checkpoints, read_manifest
from fastgrpo.checkpoint.places import Places


@pytest.fixture(scope="module")
def shared(runs: SmallRuns, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of 4 steps on 2 ranks whose nodes see one folder."""
    folder = tmp_path_factory.mktemp("shared")
    started = runs.start(2, small(tiny_model), nodes=[folder, folder])
    started.finish()
    run = only_run(folder / "runs")
    assert "place" not in " ".join(path.name for path in run.rglob("*"))
    return run


def small(model: Path, **options: Any) -> dict[str, Any]:
    return document(Path("runs"), model, **{"trainer__logger": ["console"], **options})


@pytest.fixture
def nodes(tmp_path: Path) -> list[Path]:
    folders = [tmp_path / "node0", tmp_path / "node1"]
    for folder in folders:
        folder.mkdir()
    return folders


def parts(nodes: list[Path]) -> list[Path]:
    return [only_run(node / "runs") / "checkpoints" for node in nodes]


def test_nodes_that_see_one_folder_write_one_checkpoint(shared: Path) -> None:
    found = find_checkpoints(shared / "checkpoints")
    assert [(manifest.step, manifest.nodes) for _, manifest in found.complete] == [(4, 1), (3, 1), (2, 1), (1, 1)]
    assert {"state/__0_0.distcp", "state/__1_0.distcp"} < set(found.complete[0][1].files)


def test_each_node_keeps_what_its_ranks_hold_and_the_run_goes_on(
    runs: SmallRuns, shared: Path, tiny_model: Path, nodes: list[Path]
) -> None:
    """Stopped after step 3 of 4, then on to the end: the run of one folder, to the last bit."""
    configured = small(tiny_model, trainer__max_ckpt_to_keep=2)
    stopped = runs.start(2, configured, nodes=nodes, faults="stop_in_the_rollout_of_step_4")
    assert stopped.wait() == [SAVED, SAVED], stopped.output()
    first, second = parts(nodes)
    for number, root in enumerate((first, second)):
        assert sorted(path.name for path in root.iterdir()) == ["latest", "step_000002", "step_000003"]
        manifest = read_manifest(root / "step_000003")
        assert (manifest.node, manifest.nodes) == (number, 2)
        assert {name for name in manifest.files if name.endswith((".distcp", ".json")) and "model/" not in name} == {
            f"state/__{number}_0.distcp",
            f"ranks/{number:05d}.json",
        }
    assert not (second / "step_000003" / "model").exists() and list(second.parent.iterdir()) == [second]
    assert len({read_manifest(root / "step_000003").save for root in (first, second)}) == 1
    saved, right = (load_file(run / "step_000003" / "model" / "model.safetensors") for run in (first, shared / "checkpoints"))
    assert saved.keys() == right.keys() and all(torch.equal(saved[key], right[key]) for key in right)

    # What another save left behind on one node is out of the way, not taken for a later checkpoint.
    shutil.copytree(second / "step_000003", second / "step_000004")
    resumed = runs.start(2, configured, nodes=nodes)
    resumed.finish()
    assert "after step 3 of 4, saved by 2 ranks" in resumed.output()
    assert rows(first.parent) == rows(shared)
    final, right = (load_file(run / "model" / "model.safetensors") for run in (first.parent, shared))
    assert all(torch.equal(final[key], right[key]) for key in right)
    for root in (first, second):
        assert sorted(path.name for path in root.iterdir()) == ["latest", "step_000003", "step_000004"]
    assert [path.name for path in second.parent.glob("aside-*/checkpoints/*")] == ["step_000004"]

    # All files in one folder are an ordinary checkpoint.
    together = shutil.copytree(second / "step_000004", nodes[0] / "together")
    shutil.copytree(first / "step_000004", together, dirs_exist_ok=True)
    actual, expected = masters(together), masters(shared / "checkpoints" / "step_000004")
    assert len(expected) > 20 and all(torch.equal(actual[key], expected[key]) for key in expected)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["no shard", "no folder", "another save", "other bytes"])
def test_what_one_node_lacks_is_lacking(
    damage: str, runs: SmallRuns, tiny_model: Path, nodes: list[Path], made: tuple[Path, Path]
) -> None:
    for node, original in zip(nodes, made, strict=True):
        shutil.copytree(original, node, dirs_exist_ok=True)
    first, second = parts(nodes)
    broken = second / "step_000002"
    shard = broken / "state" / "__1_0.distcp"
    if damage == "no shard":
        shard.unlink()
        said = "rank 1: ValueError: on this node it is not complete: state/__1_0.distcp is missing"
    elif damage == "no folder":
        shutil.rmtree(broken)
        said = "rank 1: ValueError: on this node it is not complete: it has no checkpoint.json"
    elif damage == "another save":
        (broken / "checkpoint.json").write_text(_of_another_save(broken))
        said = "rank 1: ValueError: on this node it is of another save than rank 0's"
    else:
        shard.write_bytes(bytes([shard.read_bytes()[0] ^ 1]) + shard.read_bytes()[1:])
        said = "rank 1: ValueError: state/__1_0.distcp has changed since it was written"
    refused = runs.start(2, small(tiny_model), nodes=nodes)
    assert MISUSE in refused.wait()
    assert f"{first.relative_to(nodes[0])}/step_000002 cannot be read: {said}" in refused.output()
    assert "The complete one before it: trainer.resume=" in refused.output()
    assert "step_000001" in refused.output().partition("trainer.resume=")[2]


@pytest.fixture(scope="module")
def made(runs: SmallRuns, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Both nodes' folders of a run that was stopped after step 2."""
    nodes = tmp_path_factory.mktemp("node0"), tmp_path_factory.mktemp("node1")
    stopped = runs.start(2, small(tiny_model), nodes=nodes, faults="stop_in_the_rollout_of_step_3")
    assert stopped.wait() == [SAVED, SAVED], stopped.output()
    return nodes


def _of_another_save(checkpoint: Path) -> str:
    document = json.loads((checkpoint / "checkpoint.json").read_text())
    del document["crc32"]  # as an older version wrote it
    return json.dumps(document | {"save": "f" * 32})


@pytest.mark.slow
def test_exchanged_nodes_and_other_ranks_are_refused_and_files_put_together_are_read(
    runs: SmallRuns, tiny_model: Path, nodes: list[Path], made: tuple[Path, Path]
) -> None:
    for node, original in zip(nodes, made, strict=True):
        shutil.copytree(original, node, dirs_exist_ok=True)
    first, second = parts(nodes)
    exchanged = runs.start(2, small(tiny_model), nodes=nodes[::-1])
    assert MISUSE in exchanged.wait()
    assert "rank 0 was on another node then" in exchanged.output()
    fewer = runs.start(1, small(tiny_model), nodes=nodes[:1])
    assert fewer.wait() == [MISUSE]
    assert "step_000002 cannot be read: rank 0: ElsewhereError: __1_0.distcp in state/ not on this node" in fewer.output()
    assert "copy state/*.distcp* and ranks/* of every node together" in fewer.output()
    assert "The complete one before it" not in fewer.output()  # it would be the same with an older one
    for file in (*(second / "step_000002").glob("state/*.distcp*"), *(second / "step_000002").glob("ranks/*")):
        shutil.copy(file, first / "step_000002" / file.parent.name)
    runs.start(1, small(tiny_model), nodes=nodes[:1]).finish()
    assert (first.parent / "finished").read_text() == "4\n"


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_node_that_cannot_write_loses_that_save_on_all(
    rank: int, runs: SmallRuns, tiny_model: Path, nodes: list[Path]
) -> None:
    """Rank 1's shard; rank 0's index, when the other node has its part complete already."""
    faults = ("fail_at_the_second_index", "rank_1_cannot_write_its_second_shard")[rank]
    run = runs.start(2, small(tiny_model), nodes=nodes, faults=faults)
    run.finish()
    assert "CHECKPOINT NOT SAVED (step_000002)" in run.output()
    for root in parts(nodes):
        found = find_checkpoints(root)
        assert [manifest.step for _, manifest in found.complete] == [4, 3, 1] and found.passed_over == []


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"model__lora_rank": 4}])
def test_killed_when_the_checkpoint_was_complete_on_the_other_node_alone(
    options: dict[str, Any], runs: SmallRuns, tiny_model: Path, nodes: list[Path]
) -> None:
    configured = small(tiny_model, **options)
    killed = runs.start(2, configured, nodes=nodes, faults="die_on_rank_0_before_the_commit")
    assert killed.wait()[0] == -signal.SIGKILL
    first, second = parts(nodes)
    assert (first / "step_000003.part").is_dir() and read_manifest(second / "step_000003").nodes == 2
    resumed = runs.start(2, configured, nodes=nodes)
    resumed.finish()
    assert "after step 2 of 4, saved by 2 ranks" in resumed.output()
    assert [path.name for path in second.parent.glob("aside-*/checkpoints/*")] == ["step_000003"]
    for root in (first, second):
        assert [manifest.step for _, manifest in find_checkpoints(root).complete] == [4, 3, 2, 1]
    kind = "adapter" if options else "model"
    final, saved = (next((run / kind).glob("*.safetensors")) for run in (first.parent, first / "step_000004"))
    final, saved = load_file(final), load_file(saved)
    assert final.keys() == saved.keys() and all(torch.equal(final[key], saved[key]) for key in final)


@pytest.mark.slow
def test_a_run_that_saves_nothing_needs_no_folder_on_other_nodes(
    runs: SmallRuns, shared: Path, tiny_model: Path, nodes: list[Path]
) -> None:
    runs.start(2, small(tiny_model, trainer__save_freq=-1), nodes=nodes).finish()
    run = only_run(nodes[0] / "runs")
    assert list((nodes[1] / "runs").iterdir()) == []
    assert rows(run) == rows(shared) and (run / "model" / "model.safetensors").is_file()


@pytest.mark.slow
def test_replicas_on_nodes_of_their_own_are_whole_there(
    runs: SmallRuns, tiny_model: Path, nodes: list[Path]
) -> None:
    """HSDP across two nodes: what both hold is on both, so each goes on from its own."""
    configured = small(tiny_model, actor__fsdp__replicas=2)
    stopped = runs.start(4, configured, nodes=nodes, faults="stop_in_the_rollout_of_step_3")
    assert stopped.wait() == [SAVED] * 4, stopped.output()
    whole = [masters(root / "step_000002") for root in parts(nodes)]
    assert len(whole[0]) > 20 and all(torch.equal(whole[0][key], whole[1][key]) for key in whole[0])
    resumed = runs.start(4, configured, nodes=nodes)
    resumed.finish()
    assert "after step 2 of 4, saved by 4 ranks" in resumed.output()


def test_places() -> None:
    places = Places((0, 0, 2, 2, 0, 5))
    assert places.several and places.others == [2, 5]
    assert [places.leads(rank) for rank in range(6)] == [True, False, True, False, False, True]
    assert [places.number(rank) for rank in range(6)] == [0, 0, 1, 1, 0, 2]
    assert not Places((0, 0)).several and Places((0, 0)).others == []
