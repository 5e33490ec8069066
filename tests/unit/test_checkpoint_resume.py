"""Which run is gone on with, from which checkpoint: what each start finds, in folders that runs have left."""

from __future__ import annotations

import shutil
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from filelock import FileLock

from fastgrpo.checkpoint import Identity, Start, check_resume, find_start, resume, start_anew, way_on
from fastgrpo.checkpoint.folders import Manifest, best_of, commit, find_checkpoints
from fastgrpo.checkpoint.runs import take
from fastgrpo.config import (
    ActorConfig,
    DataConfig,
    ModelConfig,
    OptimConfig,
    RewardFunctionConfig,
    RunConfig,
    TrainerConfig,
    to_document,
)
from fastgrpo.data.prompts import load_prompts, load_tokenizer
from fastgrpo.errors import ConfigError
from fastgrpo.history import go_back

STEPS = 40
ALONE: Any = SimpleNamespace(is_main=True, broadcast=lambda answer: answer)
IDENTITY = Identity(data="d", prompts=8, model="m", reference=None, reward_code={})
OLD, NEW, NEWEST = "e-20261130-101500", "e-20261130-111500", "e-20261130-121500"


def configured(run_dir: Path, *, lr: float = 1e-6, **trainer: Any) -> RunConfig:
    options: dict[str, Any] = {"run_dir": str(run_dir), "experiment_name": "e", **trainer}
    return RunConfig(trainer=TrainerConfig(**options), actor=ActorConfig(optim=OptimConfig(lr=lr)))


def checkpoint(root: Path, step: int, by: RunConfig, metric: float | None = None) -> Path:
    part = root / f"step_{step:06d}.part"
    part.mkdir(parents=True)
    return commit(part, Manifest(step, STEPS, 2, to_document(by), asdict(IDENTITY), {}, metric, {}))


def run_folder(run_dir: Path, name: str, *steps: int, by: RunConfig | None = None, finished: int = 0) -> Path:
    folder = run_dir / name
    folder.mkdir()
    (folder / "config.yaml").write_text("{}\n")
    for step in steps:
        checkpoint(folder / "checkpoints", step, by or configured(run_dir))
    if finished:
        (folder / "finished").write_text(f"{finished}\n")
    return folder


def start(config: RunConfig) -> Start:
    check_resume(config)
    found, lock = find_start(config, ALONE, IDENTITY, STEPS)
    if lock is not None:
        lock.release()
    return found


def test_a_start_beside_a_live_run_hides_nothing(tmp_path: Path) -> None:
    """The same job twice: the second begins beside the first, is stopped before its first save, and is forgotten."""
    live = run_folder(tmp_path, OLD, 10, 20)
    with FileLock(live / ".lock"):
        beside = start(configured(tmp_path))
        again = start(configured(tmp_path))
    for found in (beside, again):
        assert found.checkpoint is None and found.folder not in (live,) and found.step == 0
        assert f"{live} is being written by another process" in found.said
        assert found.said[-1] == f"a new run: {found.folder}"
    assert beside.folder != again.folder
    resumed = start(configured(tmp_path))
    assert (resumed.folder, resumed.step) == (live, 20)
    assert resumed.said[0] == f"2 runs hold no complete checkpoint, the newest of them {again.folder}"
    shutil.rmtree(beside.folder)
    assert start(configured(tmp_path)).said[0] == f"{again.folder} holds no complete checkpoint"


def test_a_stopped_run_is_found_behind_one_that_is_live(tmp_path: Path) -> None:
    stopped, live = run_folder(tmp_path, OLD, 10), run_folder(tmp_path, NEW, 30)
    with FileLock(live / ".lock"):
        assert start(configured(tmp_path)).folder == stopped
        other = start(configured(tmp_path, lr=1.0))  # whatever the options are: a new run beside the live one
    assert other.checkpoint is None
    assert "actor.optim.lr was 1e-06 and is 1.0" in "\n".join(other.said)
    other.folder.joinpath(".lock").unlink(missing_ok=True)
    other.folder.rmdir()
    with pytest.raises(ConfigError, match=r"actor\.optim\.lr was 1e-06 and is 1\.0"):
        start(configured(tmp_path, lr=1.0))


def test_unfinished_runs_that_auto_leaves_lying_are_named(tmp_path: Path) -> None:
    """Not those that are finished, have nothing to go on from, or would be refused."""
    names = [f"e-202611{day}-101500" for day in range(20, 30)]
    lying, other, _, live = (tmp_path / name for name in names[:4])
    run_folder(tmp_path, names[0], 4, 7)
    run_folder(tmp_path, names[1], 9, by=configured(tmp_path, lr=1.0))
    run_folder(tmp_path, names[2], STEPS, finished=STEPS)
    run_folder(tmp_path, names[3], 20)
    run_folder(tmp_path, names[4])
    taken = run_folder(tmp_path, NEW, 1)
    with FileLock(live / ".lock"):
        found = start(configured(tmp_path))
    named = f"unfinished as well, and passed over because it is older: {lying} after step 7 (trainer.resume={lying})"
    assert (found.folder, found.step) == (taken, 1) and found.said[:-1] == (named,)
    assert start(configured(tmp_path, resume=str(lying))).step == 7  # what is named works
    with pytest.raises(ConfigError):
        start(configured(tmp_path, resume=str(other)))
    (taken / "finished").write_text(f"{STEPS}\n")
    shutil.rmtree(live)
    anew = start(configured(tmp_path))
    assert anew.checkpoint is None and anew.said[:2] == (f"{taken} is finished", named)
    for name in names[6:]:
        run_folder(tmp_path, name, 3)
    assert start(configured(tmp_path)).said[-2].count("after step 3 ") == 3  # the newest
    assert "unfinished as well" not in "".join(start(configured(tmp_path, val_only=True)).said)


def test_the_way_on_is_what_auto_does(tmp_path: Path) -> None:
    trainer = configured(tmp_path).trainer
    old, new = run_folder(tmp_path, OLD, 7), run_folder(tmp_path, NEW)
    for path in (old, old / ".." / OLD):
        assert way_on(path, trainer) == "trainer.resume=auto"  # nothing in the newer one
    checkpoint(new / "checkpoints", 1, configured(tmp_path))
    assert way_on(old, trainer) == f"trainer.resume={old} (auto would come upon the newer {new})"
    assert way_on(new, trainer) == "trainer.resume=auto" and start(configured(tmp_path)).folder == new
    shutil.rmtree(new / "checkpoints")
    with FileLock(new / ".lock"):  # it will have one
        assert way_on(old, trainer).endswith(f"(auto would come upon the newer {new})")
    assert way_on(old, trainer) == "trainer.resume=auto"
    (new / "finished").write_text(f"{STEPS}\n")
    assert way_on(old, trainer).endswith(f"(auto would come upon the newer {new})")
    assert start_anew(old, trainer) == "trainer.resume=auto"
    assert start(configured(tmp_path)).checkpoint is None
    (new / "finished").unlink()
    newest = run_folder(tmp_path, NEWEST)
    assert start_anew(newest, trainer) == f"trainer.resume=never (auto would come upon {old})"
    assert start(configured(tmp_path)).folder == old
    shutil.rmtree(old / "checkpoints")
    assert start_anew(newest, trainer) == "trainer.resume=auto" and start(configured(tmp_path)).checkpoint is None
    shutil.rmtree(newest)
    for run in tmp_path.glob("e-20*"):
        if run not in (old, new):  # those of the starts here
            shutil.rmtree(run)
    (tmp_path / "elsewhere").mkdir()
    away = run_folder(tmp_path / "elsewhere", OLD, 7)
    new.rename(tmp_path / "n")
    old.rename(tmp_path / "o")
    assert way_on(away, trainer) == f"trainer.resume={away} (auto looks in {tmp_path})"


@pytest.mark.parametrize(("finished", "expected"), [(STEPS, None), (STEPS - 10, NEW)])
def test_a_newer_run_that_is_finished_ends_the_search(finished: int, expected: str | None, tmp_path: Path) -> None:
    run_folder(tmp_path, OLD, 10)
    run_folder(tmp_path, NEW, 20, finished=finished)
    run_folder(tmp_path, NEWEST)
    found = start(configured(tmp_path))
    assert found.folder.name == expected if expected else found.checkpoint is None
    assert (f"{tmp_path / NEW} is finished" in found.said) == (expected is None)


@pytest.mark.parametrize("resume", ["auto", OLD, f"{OLD}/checkpoints/step_000010"])
def test_validation_has_a_folder_of_its_own(resume: str, tmp_path: Path) -> None:
    """Also of a run that is being written; later searches do not see it."""
    live = run_folder(tmp_path, OLD, 10, 20)
    path = resume if resume == "auto" else str(tmp_path / resume)
    with FileLock(live / ".lock"):
        found = [start(configured(tmp_path, resume=path, val_only=True)) for _ in range(2)]
    step = 10 if "step" in resume else 20
    for each in found:
        assert each.checkpoint == live / "checkpoints" / f"step_0000{step}" and each.folder.parent == tmp_path
        assert "-val" in each.folder.name
        assert each.said == (f"validating {live} after step {step} in {each.folder}",)
    assert found[0].folder != found[1].folder
    assert start(configured(tmp_path)).folder == live


def test_validation_of_a_finished_run_is_by_its_path(tmp_path: Path) -> None:
    run = run_folder(tmp_path, OLD, STEPS, finished=STEPS)
    found = start(configured(tmp_path, val_only=True))
    assert found.checkpoint is None and f"trainer.resume={run} validates its last checkpoint" in found.said[0]
    assert start(configured(tmp_path, val_only=True, resume=str(run))).step == STEPS


def changed(config: RunConfig, path: str, value: Any) -> RunConfig:
    name, _, rest = path.partition(".")
    return replace(config, **{name: changed(getattr(config, name), rest, value) if rest else value})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("actor.optim.lr", 3e-6),
        ("actor.optim.lr_scheduler_type", "cosine"),
        ("actor.ppo_mini_batch_size", 64),
        ("actor.use_kl_loss", False),
        ("algorithm.adv_estimator", "rloo"),
        ("rollout.n", 2),
        ("rollout.temperature", 0.7),
        ("data.train_batch_size", 4),
        ("data.shuffle", False),
        ("trainer.seed", 7),
    ],
)
def test_a_validation_is_not_refused_for_what_only_updates_read(option: str, value: Any, tmp_path: Path) -> None:
    """Other data, another reference policy and fewer steps than the run has done besides."""
    for path in ("auto", str(run_folder(tmp_path, OLD, 20))):
        training = changed(configured(tmp_path, resume=path), option, value)
        with pytest.raises(ConfigError):
            find_start(training, ALONE, replace(IDENTITY, data="other", reference="r"), 5)
        validating = changed(training, "trainer.val_only", True)
        check_resume(validating)
        found, lock = find_start(validating, ALONE, replace(IDENTITY, data="other", reference="r"), 5)
        assert found.step == 20 and "the training prompts are not those of the run" in found.said[-1]
        assert lock is not None
        lock.release()


@pytest.mark.parametrize(
    ("option", "value", "excusable"),
    [
        ("model.lora_rank", 8, False),
        ("model.target_modules", ["q_proj"], False),
        ("model.lora_alpha", 32, True),
        ("data.max_response_length", 7, True),
        ("reward.functions", {"a": RewardFunctionConfig(path="a.py")}, False),
    ],
)
def test_a_validation_is_refused_for_what_its_score_rests_on(
    option: str, value: Any, excusable: bool, tmp_path: Path
) -> None:
    config = configured(tmp_path, resume=str(run_folder(tmp_path, OLD, 20)), val_only=True)
    assert start(config).step == 20
    with pytest.raises(ConfigError, match=option) as refused:
        check_resume(changed(config, option, value))
    head = str(refused.value).splitlines()[0]
    assert head.endswith(
        "/step_000020 cannot be validated by this configuration (trainer.resume=never validates model.path instead):"
    )
    assert "new run" not in str(refused.value)
    if excusable:
        assert start(changed(changed(config, option, value), "trainer.resume_allow", [option])).step == 20


def test_a_validation_is_refused_for_another_model_or_reward_code(tmp_path: Path) -> None:
    config = configured(tmp_path, resume=str(run_folder(tmp_path, OLD, 20)), val_only=True)
    for identity, reason in (
        (replace(IDENTITY, model="n"), "holds another model"),
        (replace(IDENTITY, reward_code={"a": "1"}), "the code of reward a has changed"),
    ):
        with pytest.raises(ConfigError, match=reason):
            find_start(config, ALONE, identity, STEPS)


def test_a_requeued_command_does_not_begin_at_its_checkpoint_again(tmp_path: Path) -> None:
    run = run_folder(tmp_path, OLD, 10, 20)
    path = run / "checkpoints" / "step_000010"
    command = configured(tmp_path, resume=str(path))
    assert start(command).step == 10  # what is later was made by another command
    go_back(run, 10)
    checkpoint(run / "checkpoints", 15, command)
    again = start(command)
    assert (again.folder, again.step) == (run, 15)
    shutil.rmtree(path)  # trainer.max_ckpt_to_keep: it had to make room
    assert start(command).step == 15
    checkpoint(run / "checkpoints", 10, configured(tmp_path))
    assert f"trainer.resume={path}: this command began there, has come to step 15 and goes on" in again.said[0]
    other = configured(tmp_path, resume=str(path), lr=1.0, resume_allow=["actor.optim.lr"])
    assert start(other).step == 10  # another attempt, not the same one
    (run / "finished").write_text(f"{STEPS}\n")
    assert start(command).step == 10  # it has ended: nobody requeues it


def test_a_copied_checkpoint_begins_a_new_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs"
    run_dir.mkdir()
    copied = checkpoint(tmp_path / "bak", 10, configured(run_dir))
    for path in (copied, shutil.copytree(copied, tmp_path / "bak" / "good")):
        command = configured(run_dir, resume=str(path))
        found = start(command)
        assert (found.checkpoint, found.step, found.folder.parent) == (path, 10, run_dir)
        assert found.said == (f"resuming {path} after step 10 of 40, saved by 2 ranks, in {found.folder}",)
    checkpoint(found.folder / "checkpoints", 15, command)
    again = start(command)
    assert (again.folder, again.step) == (found.folder, 15)
    aside = found.folder / "aside-20261130-101500" / "checkpoints"
    set_aside = checkpoint(aside, 12, command)
    assert start(replace(command, trainer=replace(command.trainer, resume=str(set_aside)))).folder != aside.parent


def test_pointers_and_the_word_finished_do_not_outlive_what_they_name(tmp_path: Path) -> None:
    run = run_folder(tmp_path, OLD, finished=40)
    root, config = run / "checkpoints", configured(tmp_path)
    for step, metric in ((10, 0.3), (20, 0.2), (30, 0.9), (40, 0.1)):
        checkpoint(root, step, config, metric)
    best = best_of(find_checkpoints(root).complete, "max")
    assert best is not None
    (root / "best").write_text(best.name + "\n")
    (run / "model").mkdir()
    go_back(run, 20, best_mode="max")
    assert (root / "latest").read_text() == "step_000020\n" and (root / "best").read_text() == "step_000010\n"
    assert not (run / "finished").exists() and not (run / "model").exists()
    [aside] = run.glob("aside-*")
    assert sorted(path.name for path in aside.iterdir()) == ["checkpoints", "model"]
    assert start(config).step == 20
    (root / "best").write_text("step_000010\n")
    go_back(run, 20, best_mode="min")
    assert (root / "best").read_text() == "step_000020\n"
    go_back(run, 5)
    assert not list(root.iterdir())


def test_a_finished_run_that_goes_on_keeps_its_model_until_the_next(tmp_path: Path) -> None:
    run = run_folder(tmp_path, OLD, 30, finished=30)
    (run / "model").mkdir()
    go_back(run, 30)
    assert (run / "model").is_dir() and not (run / "finished").exists() and not list(run.glob("aside-*"))


def test_the_newest_by_name_is_the_newest_after_a_clock_was_set_back(tmp_path: Path) -> None:
    run_folder(tmp_path, "e-20991130-101500", 10)
    run_folder(tmp_path, "e-20991130-101500-3", 10)
    new = start(configured(tmp_path, resume="never")).folder
    assert new.name == "e-20991130-101500-4"
    checkpoint(new / "checkpoints", 5, configured(tmp_path))
    assert start(configured(tmp_path)).folder == new
    assert start(configured(tmp_path, val_only=True)).folder.name < "e-2099"


def test_two_starts_in_one_second_set_aside_each_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "strftime", lambda form: "20261130-130000")
    run = run_folder(tmp_path, OLD, 10, 20)
    (run / "metrics.jsonl").write_text('{"step": 10}\n{"step": 15}\n')
    go_back(run, 10)
    checkpoint(run / "checkpoints", 20, configured(tmp_path))
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 16}\n')
    go_back(run, 10)
    for name, step in (("aside-20261130-130000", 15), ("aside-20261130-130000-1", 16)):
        assert (run / name / "metrics.jsonl").read_text() == f'{{"step": {step}}}\n'
        assert (run / name / "checkpoints" / "step_000020" / "checkpoint.json").is_file()


def test_what_happened_before_the_lock_was_taken_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process has looked as well, was faster, went on to step 30 and ended."""
    run = run_folder(tmp_path, OLD, 10, 20)

    def taken_late(folder: Path) -> Any:
        if not (run / "checkpoints" / "step_000030").exists():
            checkpoint(run / "checkpoints", 30, configured(tmp_path))
            shutil.rmtree(run / "checkpoints" / "step_000020")  # to make room
        return take(folder)

    monkeypatch.setattr(resume, "take", taken_late)
    found = start(configured(tmp_path))
    assert (found.folder, found.step) == (run, 30)
    assert start(configured(tmp_path)).step == 30  # the lock was given back


def test_folders_with_wrong_names_or_nothing_to_read(tmp_path: Path) -> None:
    run = run_folder(tmp_path, OLD, 10, 20, 30, 40)
    root = run / "checkpoints"
    (root / "step_000020").rename(root / "step_000090")
    (root / "step_000040").rename(root / "step_000040.part")
    manifest = root / "step_000030" / "checkpoint.json"
    manifest.unlink()
    manifest.mkdir()  # as for a disk that answers with an error
    (root / "latest").unlink()
    (root / "latest").mkdir()
    found = start(configured(tmp_path))
    assert found.step == 10
    said = "\n".join(found.said)
    assert "step_000090: it holds step 20: name it step_000020 again" in said
    assert "step_000030: its checkpoint.json cannot be read ([Errno 21]" in said
    for name, why in (("step_000090", "name it step_000020"), ("step_000040.part", "was still being written")):
        with pytest.raises(ConfigError, match=why):
            start(configured(tmp_path, resume=str(root / name)))
    go_back(run, 10)
    assert find_checkpoints(root).complete[0][1].step == 10


def test_a_run_dir_that_cannot_be_read_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    run_folder(tmp_path, OLD, 10)
    monkeypatch.setattr(Path, "iterdir", fail)
    with pytest.raises(ConfigError, match=r"trainer\.resume=auto: what is there cannot be read: \[Errno 13\]"):
        start(configured(tmp_path))


def test_a_renamed_data_file_is_resumed_through_a_link(tiny_model: Path, tmp_path: Path) -> None:
    """The seeds of the samples follow from the name; the refusal says what to do, and it does."""
    tokenizer = load_tokenizer(ModelConfig(path=str(tiny_model)), tiny_model)
    file = tmp_path / "sums.jsonl"
    file.write_text('{"prompt": "3 + 4", "reference": "7"}\n')

    def prompts_of(path: Path) -> str:
        data = DataConfig(train_files=[str(path)])
        return load_prompts(data, tokenizer, split="train", seed=0).fingerprint

    def resumed(path: Path) -> Start:
        config = changed(configured(tmp_path), "data.train_files", [str(path)])
        return find_start(config, ALONE, replace(IDENTITY, data=prompts_of(path)), STEPS)[0]

    run = run_folder(tmp_path, OLD)
    named = changed(configured(tmp_path), "data.train_files", [str(file)])
    part = run / "checkpoints" / "step_000010.part"
    part.mkdir(parents=True)
    identity = asdict(replace(IDENTITY, data=prompts_of(file)))
    commit(part, Manifest(10, STEPS, 2, to_document(named), identity, {}, None, {}))
    other = file.rename(tmp_path / "additions.jsonl")
    with pytest.raises(ConfigError, match=r"/sums\.jsonl'\] and is .*: if only .* a link of the old name will do"):
        resumed(other)
    (tmp_path / "links").mkdir()
    link = tmp_path / "links" / "sums.jsonl"
    link.symlink_to(other)
    assert resumed(link).step == 10
