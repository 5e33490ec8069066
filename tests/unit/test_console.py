"""Lines of libraries that are left out, and those beside them that are not."""

from __future__ import annotations

import logging
from collections.abc import Iterator

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
