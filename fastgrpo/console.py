"""Words for the person at the terminal, once over all ranks. Imports no torch: it speaks before torch is loaded.

Under torchrun the first worker that exits takes the others with it. So rank 0 speaks at once, and the others wait
before they end; those that hit the same mistake are ended while they wait.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time

from fastgrpo.errors import ConfigError, Told
from fastgrpo.redact import redact

PATIENCE_S = 15.0  # longer than rank 0 needs to start, meet the same mistake and exit
TURN_S = 0.5  # between two ranks that wait to speak
# What libraries say at every start without consequence: logger, how the line begins, devices on which it means nothing.
NOISE = (
    ("vllm.triton_utils.importing", "Triton is installed, but", ("cpu",)),
    ("transformers.tokenization_utils_tokenizers", "Ignoring clean_up_tokenization_spaces=True", ("cpu", "cuda")),
)


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def say(text: str) -> None:
    """Print on rank 0."""
    if rank() == 0:
        print(text, flush=True)


def drop_noise(device: str) -> None:
    """Leave out the lines of NOISE; everything else of those loggers is shown. To be called before they speak, and
    before torch is loaded: of its C++ parts errors are shown, unless TORCH_CPP_LOG_LEVEL is set to something else.
    Their warnings are 30 lines of frames before our one when the job's key-value store is lost."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    for logger, beginning, devices in NOISE:
        if device in devices:
            logging.getLogger(logger).addFilter(_Without(beginning))


class _Without(logging.Filter):
    def __init__(self, beginning: str) -> None:
        super().__init__()
        self._beginning = beginning

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(self._beginning)


def complain(error: Told) -> None:
    """Print the message of `error` on standard error, once; returns when this rank may exit.

    A ConfigError is the same on all ranks, so rank 0 speaks alone. Anything else may be known to one rank only (a file
    missing on one node): after rank 0's turn each rank has its own. Once the run has begun its watchdog decides.
    """
    if rank() > 0 and not error.speaks_alone:
        # The trainer's handler only notes the signal; here it is the sign that another rank has spoken.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(PATIENCE_S + TURN_S * rank())
    if rank() == 0 or error.speaks_alone or not isinstance(error, ConfigError):
        lines = str(error).splitlines() or [type(error).__name__]
        text = f" {lines[0]}" if len(lines) == 1 else "\n  ".join(["", *lines])
        print(redact(f"fastgrpo:{text}"), file=sys.stderr, flush=True)
