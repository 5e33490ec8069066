"""Rows on a disk that is full: none is lost, none is half, and it is said once."""

from __future__ import annotations

import json
import logging
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fastgrpo.metrics import JsonlFile
from fastgrpo.run_files import RunFiles
from fastgrpo.torchrun import STATUS_FILE, _status, leave_status


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """No file grows beyond `size` bytes: the write before it is cut short, the next one fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_rows_wait_until_there_is_room(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows, files = JsonlFile(tmp_path / "metrics.jsonl"), RunFiles(tmp_path)

    def log(step: int) -> bool:
        return files.attempt(rows.name, lambda: rows.log(step, {"reward/mean": step / 4}))

    assert log(1)
    size = (tmp_path / "metrics.jsonl").stat().st_size
    with room_for(size + 7), caplog.at_level(logging.WARNING):
        assert [log(step) for step in (2, 3, 4)] == [False] * 3
        assert (tmp_path / "metrics.jsonl").stat().st_size == size + 7  # half a row
    assert caplog.text.count("metrics.jsonl NOT WRITTEN") == 1 and files.failures == 3
    assert log(5) and "metrics.jsonl is written again; 3 writes" in caplog.text
    rows.close()
    read = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert read == [{"step": step, "reward/mean": step / 4} for step in range(1, 6)]


def test_a_file_that_ends_without_room_ends_with_a_whole_row(tmp_path: Path) -> None:
    rows = JsonlFile(tmp_path / "metrics.jsonl")
    rows.log(1, {"reward/mean": 0.5})
    size = (tmp_path / "metrics.jsonl").stat().st_size
    for room in (size + 7, size + 12):  # the second failure adds to the half row
        with room_for(room), pytest.raises(OSError):
            rows.log(2, {"reward/mean": 0.25})
    with room_for(size + 12), pytest.raises(OSError):
        rows.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "reward/mean": 0.5}\n'


def test_what_may_not_be_on_the_disk_is_kept_in_whole_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f'{{"step": {step}, "reward/mean": 0.5}}\n' for step in range(5)]
    rows = JsonlFile(tmp_path / "metrics.jsonl")
    rows.log(0, {"reward/mean": 0.5})
    rows.sync()
    assert rows.not_synced() == ""
    rows.log(1, {"reward/mean": 0.5})
    assert rows.not_synced() == texts[1]  # in the file, on the disk or not
    with monkeypatch.context() as broken:
        broken.setattr("os.fsync", lambda handle: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        with pytest.raises(OSError):
            rows.sync()
    with room_for(len(texts[0]) * 2 + 7):
        for step in (2, 3):
            with pytest.raises(OSError):
                rows.log(step, {"reward/mean": 0.5})
        with pytest.raises(OSError):
            rows.sync()
    assert (tmp_path / "metrics.jsonl").read_text() == texts[0] + texts[1] + texts[2][:7]
    assert rows.not_synced() == "".join(texts[1:4])
    assert not rows.went_away()
    (tmp_path / "metrics.jsonl").rename(tmp_path / "elsewhere")
    assert rows.went_away()
    (tmp_path / "metrics.jsonl").touch()
    assert rows.went_away()  # another file
    rows.reopen()  # half a row in the file that went is no part of the new one
    rows.log(4, {"reward/mean": 0.5})
    assert (tmp_path / "metrics.jsonl").read_text() == rows.not_synced() == "".join(texts[2:])
    assert not rows.went_away()
    (tmp_path / "metrics.jsonl").unlink()
    rows.reopen(again=True)
    rows.flush()
    assert (tmp_path / "metrics.jsonl").read_text() == "".join(texts[2:])
    rows.sync()
    assert rows.not_synced() == ""


def test_a_status_that_finds_no_room_is_none(tmp_path: Path) -> None:
    file = tmp_path / "status"
    with room_for(0):
        leave_status(74, {STATUS_FILE: str(file)})
    assert file.read_text() == "" and _status(file) == 0
    leave_status(74, {STATUS_FILE: str(file)})
    assert _status(file) == 74


def test_answers_are_whole_or_not_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files, file = RunFiles(tmp_path), tmp_path / "rollouts" / "step_000001.jsonl"
    with room_for(100):
        files.write_rows("rollouts", file, [{"response": "x" * 60}] * 2)
    assert files.failures == 1 and not file.exists()
    assert "rollouts NOT WRITTEN" in caplog.text and caplog.text.endswith("It will be tried again.\n")
    with room_for(0), caplog.at_level(logging.ERROR):
        files.attempt("finished", lambda: (tmp_path / "finished").write_text("4\n"), again=False)
    assert "finished NOT WRITTEN" in caplog.text and caplog.text.endswith("It was the last try.\n")
    files.write_rows("rollouts", file, [{"response": "x" * 60}] * 2)
    assert files.failures == 2 and len(file.read_text().splitlines()) == 2


def test_a_folder_is_known_by_more_than_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    files = RunFiles(folder)
    assert not files.went_away(1) and files.moved_at is None
    folder.rename(tmp_path / "other")
    folder.symlink_to(tmp_path / "other")
    assert not files.went_away(2)  # its old name leads to it
    folder.unlink()
    assert files.went_away(3) and files.moved_at == 3 and folder.is_dir()
    assert not files.went_away(4) and files.moved_at == 3  # said once
