"""Which checkpoints are complete, which go, what a crash leaves; which run is the newest; what is set aside."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from filelock import FileLock

from fastgrpo.checkpoint import disk, folders, resume
from fastgrpo.checkpoint.disk import file_sizes, remove_tree, write_durably
from fastgrpo.checkpoint.folders import Manifest, commit, find_checkpoints, point_to_best, read_manifest, retire
from fastgrpo.checkpoint.identity import model_fingerprint
from fastgrpo.checkpoint.resume import check_resume
from fastgrpo.checkpoint.runs import runs_of
from fastgrpo.config import DataConfig, RunConfig, TrainerConfig, changed_options, to_document
from fastgrpo.config.build import option_keys
from fastgrpo.config.resume import COMPARED, FIXED, FREE, IDENTITY
from fastgrpo.errors import ConfigError
from fastgrpo.history import go_back


def make(root: Path, step: int, metric: float | None = None) -> Path:
    part = root / f"step_{step:06d}.part"
    (part / "state").mkdir(parents=True)
    (part / "state" / "__0_0.distcp").write_bytes(bytes(range(100)))
    return commit(part, Manifest(step, 40, 1, {}, {}, {"actor": {"version": step}}, metric, {}))


def steps(root: Path) -> list[int]:
    return [manifest.step for _, manifest in find_checkpoints(root).complete]


def test_a_commit_is_whole(tmp_path: Path) -> None:
    folder = make(tmp_path, 10, 0.5)
    manifest = read_manifest(folder)
    assert (manifest.step, manifest.metric, manifest.parts) == (10, 0.5, {"actor": {"version": 10}})
    assert manifest.files == {"state/__0_0.distcp": 100}
    assert (tmp_path / "latest").read_text() == "step_000010\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_000010"]


@pytest.mark.parametrize("call", ["write manifest", "rename", "write latest"])
def test_a_crash_in_a_commit_loses_nothing(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, 10)

    class Crash(BaseException):
        pass

    def write(path: Path, text: str) -> None:
        if path.name == {"write manifest": "checkpoint.json", "write latest": "latest"}.get(call):
            raise Crash
        write_durably(path, text)

    def rename(self: Path, target: Path) -> Path:
        raise Crash

    monkeypatch.setattr(folders, "write_durably", write)
    if call == "rename":
        monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(Crash):
        make(tmp_path, 20)
    monkeypatch.undo()
    assert steps(tmp_path) == ([20, 10] if call == "write latest" else [10])
    assert (tmp_path / "latest").read_text() == "step_000010\n"


def test_incomplete_folders_say_why(tmp_path: Path) -> None:
    make(tmp_path, 10)
    (make(tmp_path, 20) / "state" / "__0_0.distcp").write_bytes(b"cut")
    (make(tmp_path, 30) / "state" / "__0_0.distcp").unlink()
    (make(tmp_path, 40) / "checkpoint.json").unlink()
    (make(tmp_path, 50) / "checkpoint.json").write_text("{")
    manifest = make(tmp_path, 60) / "checkpoint.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 2}))
    for step, changed in ((61, {"files": []}), (62, {"files": {"a": None}}), (63, {"step": "63", "parts": None})):
        manifest = make(tmp_path, step) / "checkpoint.json"
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | changed))
    manifest = make(tmp_path, 64) / "checkpoint.json"
    manifest.write_text(manifest.read_text().replace('"step": 64', '"step": 65'))  # one bit
    (tmp_path / "step_000070.part").mkdir()
    found = find_checkpoints(tmp_path)
    assert [path.name for path, _ in found.complete] == ["step_000010"]
    reasons = [line.removeprefix(f"{tmp_path}/") for line in found.passed_over]
    assert reasons[0] == "step_000020: state/__0_0.distcp has 3 of 100 bytes"
    assert reasons[1] == "step_000030: state/__0_0.distcp is missing"
    assert reasons[2] == "step_000040: it has no checkpoint.json, which is written last"
    assert reasons[3].startswith("step_000050: its checkpoint.json cannot be read")
    assert reasons[4] == "step_000060: its format is 2, this version of fastgrpo reads 1"
    assert reasons[5] == "step_000061: its checkpoint.json is damaged: files cannot be what it says"
    assert reasons[6] == "step_000062: its checkpoint.json is damaged: files cannot be what it says"
    assert reasons[7] == "step_000063: its checkpoint.json is damaged: parts, step cannot be what it says"
    assert reasons[8].startswith("step_000064: its checkpoint.json has changed since it was written (CRC32 ")
    assert reasons[9] == "step_000070.part: it was still being written"
    assert reasons[10] == "latest: it names 'step_000064', which is no complete checkpoint"


@pytest.mark.parametrize(
    ("keep", "best", "metrics", "left"),
    [
        (None, None, [None] * 4, [40, 30, 20, 10]),
        (2, None, [None] * 4, [40, 30]),
        (1, None, [9.0, 1.0, 1.0, 1.0], [40]),  # no best was asked for
        (1, "max", [0.1, 0.9, 0.2, 0.3], [40, 20]),
        (1, "min", [0.1, 0.9, 0.2, 0.3], [40, 10]),
        (1, "max", [0.9, 0.9, None, 0.3], [40, 20]),  # of equals the newest
        (1, "max", [0.1, 0.2, 0.3, 0.4], [40]),
        (2, "max", [None] * 4, [40, 30]),  # never measured
    ],
)
def test_retention(
    keep: int | None, best: str | None, metrics: list[float | None], left: list[int], tmp_path: Path
) -> None:
    for step, metric in zip((10, 20, 30, 40), metrics, strict=True):
        make(tmp_path, step, metric)
    removed = retire(tmp_path, keep, best=best)
    assert steps(tmp_path) == left
    assert sorted(folders.step_of(path) or 0 for path in removed) == sorted({10, 20, 30, 40} - set(left))
    assert (tmp_path / "latest").read_text() == "step_000040\n"


def test_the_best_is_pointed_to(tmp_path: Path) -> None:
    point_to_best(tmp_path, "max")
    assert not (tmp_path / "best").exists()
    for step, metric in ((10, 0.5), (20, 0.9), (30, None), (40, 0.9), (50, 0.1)):
        make(tmp_path, step, metric)
    point_to_best(tmp_path, "max")
    assert (tmp_path / "best").read_text() == "step_000040\n"  # of equals the newest
    point_to_best(tmp_path, "min")
    assert (tmp_path / "best").read_text() == "step_000050\n"
    assert find_checkpoints(tmp_path).passed_over == []


def test_retention_counts_complete_ones_alone(tmp_path: Path) -> None:
    make(tmp_path, 10)
    for step in (20, 30):
        (make(tmp_path, step) / "state" / "__0_0.distcp").unlink()
    assert retire(tmp_path, 1, best=None) == []
    assert steps(tmp_path) == [10]


def test_a_removal_that_is_cut_short_leaves_no_half_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(tmp_path, 10)

    def crash(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise KeyboardInterrupt

    monkeypatch.setattr(disk.shutil, "rmtree", crash)
    with pytest.raises(KeyboardInterrupt):
        remove_tree(folder)
    assert not folder.exists() and (tmp_path / "step_000010.part").is_dir()
    monkeypatch.undo()
    remove_tree(tmp_path / "step_000010.part")
    remove_tree(tmp_path / "never_there")
    assert file_sizes(tmp_path) == {"latest": 12}


def test_runs_are_ordered_by_the_name(tmp_path: Path) -> None:
    assert runs_of(tmp_path / "nowhere", "a") == []
    names = ["a-20261130-101500-10", "a-20261130-101500-2", "a-20261130-101500", "a-20261129-235959"]
    for name in sorted(names):
        (tmp_path / name).mkdir()
    for other in ("ab-20261201-000000", "a-b-20261201-000000", "a-20261201", "a-20261201-000000-val"):
        (tmp_path / other).mkdir()
    (tmp_path / "a-20261231-000000").write_text("a file")
    assert [path.name for path in runs_of(tmp_path, "a")] == names


def test_the_way_back_keeps_what_is_later_aside(tmp_path: Path) -> None:
    rows = [
        {"step": 1, "reward/mean": 0.5},
        {"step": 1, "val/reward": 0.25, "val/scored": 4.0},
        {"step": 2},
        {"step": 3},
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 4, "rew')
    for name in ("rollouts", "validation"):
        (tmp_path / name).mkdir()
        for step in (1, 2, 3):
            (tmp_path / name / f"step_{step:06d}.jsonl").write_text(f"{name} {step}")
    for step in (2, 3):
        make(tmp_path / "checkpoints", step)
    (tmp_path / "checkpoints" / "step_000004.part").mkdir()
    history = go_back(tmp_path, 2)
    assert (history.steps, history.curve, history.scores) == (2, [(1, 0.5)], [(1, 0.25, 4)])
    assert history.value_at(1, "val/reward") == 0.25 and history.value_at(2, "val/reward") is None
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 1, 2]
    [aside] = tmp_path.glob("aside-*")
    assert (aside / "metrics.jsonl").read_text() == '{"step": 3}\n{"step": 4, "rew'
    assert sorted(str(path.relative_to(aside)) for path in aside.rglob("*.jsonl")) == [
        "metrics.jsonl",
        "rollouts/step_000003.jsonl",
        "validation/step_000003.jsonl",
    ]
    assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == ["step_000001.jsonl", "step_000002.jsonl"]
    assert steps(tmp_path / "checkpoints") == [2] and steps(aside / "checkpoints") == [3]
    assert go_back(tmp_path, 2).steps == 2  # once more: nothing is left to do
    assert len(list(tmp_path.glob("aside-*"))) == 1


def test_rows_of_the_checkpoint_go_where_the_file_lacks_them(tmp_path: Path) -> None:
    """One of them was written meanwhile, one is half there, and what is later than the checkpoint goes aside."""
    row = [f'{{"step": {step}, "reward/mean": 0.5}}\n' for step in range(8)]
    validation = '{"step": 4, "val/reward": 0.25, "val/scored": 4.0}\n'
    file = tmp_path / "metrics.jsonl"
    file.write_text(row[1] + row[3] + row[7] + row[5][:9])
    for _ in range(2):  # the second finds all there
        history = go_back(tmp_path, 5, kept_rows=row[2] + row[3] + row[4] + validation + row[5])
        assert file.read_text() == "".join([*row[1:5], validation, row[5]])
        assert history.curve == [(step, 0.5) for step in range(1, 6)] and history.scores == [(4, 0.25, 4)]
        assert history.missing(0, 5, 4) == ""
    [aside] = tmp_path.glob("aside-*")
    assert (aside / "metrics.jsonl").read_text() == row[7] + row[5][:9]
    assert history.missing(0, 9, 8) == "steps 6-9 and the validation at step 8"
    assert history.missing(3, 6, 2) == "step 6" and history.missing(0, 5, 0) == "the validation at step 0"
    assert go_back(tmp_path, 5).missing(5, 5, 5) == ""  # a run that began there, with another's validation


def test_a_line_that_is_no_row_is_set_aside_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = [b'{"step": 1, "reward/mean": 0.5}\n', b'{"step": 2, "val/reward": 0.25, "actor/grad_norm": null}\n']
    bad = [b"\xff\n", b"17\n", b'{"step": "1"}\n', b'{"step": 1, "reward/mean": "x"}\n', b"\n"]
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(good[0] + b"".join(bad) + good[1])
    history = go_back(tmp_path, 2)
    assert (history.curve, history.scores) == ([(1, 0.5)], [(2, 0.25, 0)])
    assert file.read_bytes() == b"".join(good)
    [aside] = tmp_path.glob("aside-*")
    assert (aside / "metrics.jsonl").read_bytes() == b"".join(bad)
    assert f"{file}: line 2, 3, 4, 5, 6 is no row of metrics and is moved to {aside}" in caplog.text


def test_a_validation_that_the_checkpoint_does_not_know_of_is_set_aside(tmp_path: Path) -> None:
    """The process was killed after the row, before the checkpoint heard of it: validated again, so the row must go."""
    rows = [{"step": 1, "val/scored": 4.0}, {"step": 2, "reward/mean": 0.5}, {"step": 2, "val/scored": 4.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "validation").mkdir()
    for step in (1, 2):
        (tmp_path / "validation" / f"step_{step:06d}.jsonl").write_text("")
    go_back(tmp_path, 2, validated=True)
    assert not list(tmp_path.glob("aside-*"))
    go_back(tmp_path, 2, validated=False)
    kept = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert kept == rows[:2]
    assert [path.name for path in (tmp_path / "validation").iterdir()] == ["step_000001.jsonl"]


def test_kinds_of_options_name_options() -> None:
    known = option_keys()
    for key in (*FREE, *IDENTITY, *FIXED, *COMPARED):
        assert any(option.startswith(key) if key.endswith(".") else option == key for option in known), key


def changed(**options: object) -> list[str]:
    """Of a run with defaults, when this is set now."""
    allowed = options.pop("allow", [])
    config = RunConfig(trainer=TrainerConfig(resume_allow=allowed))  # type: ignore[arg-type]
    for key, value in options.items():
        *sections, leaf = key.split("__")
        place: object = config
        for section in sections:
            place = getattr(place, section)
        setattr(place, leaf, value)
    return changed_options(to_document(RunConfig()), config)


def test_options_that_may_differ() -> None:
    assert changed() == []
    assert changed(actor__ulysses_sequence_parallel_size=2, actor__max_tokens_per_gpu=99, trainer__save_freq=3) == []
    assert changed(rollout__tensor_model_parallel_size=2, actor__fsdp__replicas=2, rollout__val_kwargs__n=4) == []
    assert changed(model__path="elsewhere", data__train_files=["moved.jsonl"], trainer__max_steps=7) == []
    assert changed(rollout__n=16) == ["rollout.n was 8 and is 16 (allow it: trainer.resume_allow=[rollout.n])"]
    assert changed(rollout__n=16, allow=["rollout.n"]) == []
    assert len(changed(actor__optim__lr=1.0, actor__optim__beta1=0.5)) == 2
    assert changed(actor__optim__lr=1.0, actor__optim__beta1=0.5, allow=["actor.optim"]) == []
    assert len(changed(data__max_response_length=7)) == 1
    place = "the place in the data would mean something else"
    assert changed(data__train_batch_size=4) == [f"data.train_batch_size was 128 and is 4 ({place})"]
    assert len(changed(trainer__seed=1, data__shuffle=False, allow=["trainer.seed", "data.shuffle"])) == 2


def test_adapters_of_another_shape_cannot_be_allowed() -> None:
    """Their tensors are not in the checkpoint; with another alpha they are, and count otherwise."""
    lines = changed(model__lora_rank=8, model__target_modules=["q_proj"], allow=["model"])
    assert [line.partition(" (")[0] for line in lines] == [
        "model.lora_rank was 0 and is 8",
        "model.target_modules was ['all-linear'] and is ['q_proj']",
    ]
    assert all(
        "adapters of another shape; set it back, or do without them: trainer.resume=never" in line for line in lines
    )
    assert changed(model__lora_alpha=8) == [
        "model.lora_alpha was 16 and is 8 (allow it: trainer.resume_allow=[model.lora_alpha])"
    ]
    assert changed(model__lora_alpha=8, allow=["model.lora_alpha"]) == []


def test_a_run_of_a_version_with_fewer_options_is_continued() -> None:
    before = to_document(RunConfig())
    del before["actor"]["clip_ratio_c"]
    before["actor"]["an_option_that_is_gone"] = 3
    assert changed_options(before, RunConfig()) == [
        "actor.an_option_that_is_gone was 3 and is not there (this version has no such option)"
    ]


def test_paths_that_lead_to_no_checkpoint(tmp_path: Path) -> None:
    def refusal(path: Path) -> str:
        with pytest.raises(ConfigError) as refused:
            check_resume(RunConfig(trainer=TrainerConfig(resume=str(path))))
        return str(refused.value)

    assert "there is no folder" in refusal(tmp_path / "nowhere")
    assert "neither a checkpoint (it has no checkpoint.json) nor a run" in refusal(tmp_path)
    (make(tmp_path / "checkpoints", 10) / "state" / "__0_0.distcp").unlink()
    assert "state/__0_0.distcp is missing" in refusal(tmp_path)
    assert "is no complete checkpoint: state/__0_0.distcp is missing" in refusal(
        tmp_path / "checkpoints" / "step_000010"
    )
    assert "beside it" not in refusal(tmp_path / "checkpoints" / "step_000010")
    for step in (5, 7):
        make(tmp_path / "checkpoints", step)
    (tmp_path / "checkpoints" / "step_000009.part").mkdir()
    for name in ("step_000010", "step_000009.part", "step_000008"):  # damaged, half written, not there
        said = refusal(tmp_path / "checkpoints" / name)
        assert f"the newest complete one beside it: trainer.resume={tmp_path}/checkpoints/step_000007" in said


def test_a_run_that_is_being_written_is_not_compared(tmp_path: Path) -> None:
    """The same experiment with another reward or batch starts beside it; by its path it cannot be had."""
    run = tmp_path / "e-20261130-101500"
    before = to_document(RunConfig())
    (run / "checkpoints" / "step_000010.part").mkdir(parents=True)
    commit(run / "checkpoints" / "step_000010.part", Manifest(10, 40, 1, before, {}, {}, None, {}))
    other = RunConfig(data=DataConfig(train_batch_size=64), trainer=TrainerConfig(run_dir=str(tmp_path)))
    other = replace(other, trainer=replace(other.trainer, experiment_name="e"))
    by_path = replace(other, trainer=replace(other.trainer, resume=str(run)))
    for lock in (None, FileLock(run / ".lock")):  # there was never a lock; there was one
        if lock is not None:
            with lock:
                check_resume(other)
                with pytest.raises(ConfigError, match="is being written by another process; wait until it has ended"):
                    check_resume(by_path)
        for config in (other, by_path):
            with pytest.raises(ConfigError, match=r"data\.train_batch_size was 128 and is 64"):
                check_resume(config)


def test_a_run_on_a_read_only_mount_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "e-20261130-101500"
    part = run / "checkpoints" / "step_000010.part"
    part.mkdir(parents=True)
    commit(part, Manifest(10, 40, 1, to_document(RunConfig()), {}, {}, None, {}))
    config = RunConfig(trainer=TrainerConfig(resume=str(run), max_steps=40))
    check_resume(config)
    monkeypatch.setattr(resume.os, "access", lambda path, mode: Path(path) != run)
    with pytest.raises(ConfigError, match=f"^trainer.resume={run}: {run} cannot be written to, .*copy it to a place"):
        check_resume(config)
    check_resume(replace(config, trainer=replace(config.trainer, val_only=True)))  # writes elsewhere


def test_a_model_is_known_by_its_ends(tiny_model: Path, tmp_path: Path) -> None:
    for path in tiny_model.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert model_fingerprint(tmp_path) == model_fingerprint(tiny_model)
    weights = tmp_path / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert model_fingerprint(tmp_path) != model_fingerprint(tiny_model)


def test_tidying_up_costs_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of one that is kept elsewhere the link goes; what cannot be removed is said, and the new one is whole."""
    root = tmp_path / "checkpoints"
    for step in (10, 20, 30):
        make(root, step)
    (root / "step_000010").rename(tmp_path / "elsewhere")
    (root / "step_000010").symlink_to(tmp_path / "elsewhere")
    folders.tidy(root, 2, best=None)
    assert sorted(path.name for path in root.iterdir()) == ["latest", "step_000020", "step_000030"]
    assert (tmp_path / "elsewhere" / "checkpoint.json").is_file()

    def fail(folder: Path) -> None:
        raise OSError(39, "Directory not empty", str(folder))

    monkeypatch.setattr(folders, "remove_tree", fail)
    folders.tidy(root, 1, best=None)
    assert "the new checkpoint is whole, but" in caplog.text and "Directory not empty" in caplog.text
