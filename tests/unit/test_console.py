"""Lines of libraries that are left out, and those beside them that are not."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastgrpo import console

TRITON = ("vllm.triton_utils.importing", "Triton is installed, but `triton.backends` could not be imported.")
CLEAN_UP = ("transformers.tokenization_utils_tokenizers", "Ignoring clean_up_tokenization_spaces=True for BPE x")


@pytest.fixture(autouse=True)
def filters_as_before() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name, _, _ in console.NOISE]
    before = [list(logger.filters) for logger in loggers]
    yield
    for logger, filters in zip(loggers, before, strict=True):
        logger.filters = filters


def heard(said: tuple[str, str], text: str | None = None) -> bool:
    logger = logging.getLogger(said[0])
    record = logger.makeRecord(logger.name, logging.WARNING, "file", 1, text or said[1], (), None)
    return bool(logger.filter(record))


@pytest.mark.parametrize(("device", "triton"), [("cpu", False), ("cuda", True)])
def test_noise_is_dropped_where_it_means_nothing(device: str, triton: bool) -> None:
    """On a GPU a missing Triton is no noise."""
    assert heard(TRITON) and heard(CLEAN_UP)
    console.drop_noise(device)
    assert heard(TRITON) is triton and not heard(CLEAN_UP)
    assert heard(TRITON, "something else") and heard(CLEAN_UP, "something else")


@pytest.mark.parametrize(("given", "level"), [(None, "ERROR"), ("WARNING", "WARNING")])
def test_warnings_of_torchs_cpp_parts(given: str | None, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "to be put back")
    if given is None:
        monkeypatch.delenv("TORCH_CPP_LOG_LEVEL")
    else:
        monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", given)
    console.drop_noise("cpu")
    assert os.environ["TORCH_CPP_LOG_LEVEL"] == level


STORE = """
import sys, subprocess
from datetime import timedelta
from torch.distributed import TCPStore
if len(sys.argv) > 1:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    print(store.port, flush=True)
    sys.stdin.read()
holder = subprocess.Popen([sys.executable, __file__, "serve"], stdin=-1, stdout=-1, text=True)
port = int(holder.stdout.readline())
store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=5))
store.set("a", "b")
holder.kill()
holder.wait()
store.check(["a"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("level", ["WARNING", "ERROR"])
def test_a_lost_store_is_an_error_without_frames(level: str, tmp_path: Path) -> None:
    """The exception, which is ours to report, comes all the same."""
    program = tmp_path / "lose.py"
    program.write_text(STORE)
    environment = os.environ | {"TORCH_CPP_LOG_LEVEL": level}
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 1 and "DistNetworkError: Failed to recv" in done.stderr
    assert ("[c10d] recvValue failed" in done.stderr) is (level == "WARNING")
    assert ("frame #0" in done.stderr) is (level == "WARNING")
