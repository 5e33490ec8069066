"""torchrun as this program starts it: python -m fastgrpo.torchrun [torchrun's options] -m fastgrpo.train +exp=...

Two things torchrun leaves out. It passes SIGUSR1 on to its workers, and gives them time to save, only when told so; and
when a signal ends it, it ends with status 1 and a traceback, whatever its workers did. Here the status is that of the
workers: 75 when they have saved and want to be started again, 2 for a mistake of the user.

    signal -> torchrun -> workers save -> a node's first leaves its exit status in the file STATUS_FILE -> status
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

STATUS_FILE = "FASTGRPO_STATUS_FILE"  # set for the workers
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
AGAIN = 75  # exit status of a run that wants to be started again (EX_TEMPFAIL)
SHUTDOWN_S = 120  # as trainer.shutdown_timeout_s; whoever sets that sets TORCH_ELASTIC_SHUTDOWN_TIMEOUT too


def main(argv: Sequence[str]) -> int:
    set_defaults(os.environ)
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    with tempfile.TemporaryDirectory(prefix="fastgrpo-") as folder:
        file = Path(folder) / "status"
        os.environ[STATUS_FILE] = str(file)
        try:
            run.main(list(argv))
        except SignalException as error:
            return abs(_status(file)) or 128 + error.sigval
        except ChildFailedError as error:
            left = status = _status(file)
            if left <= 0:  # what failed first counts: -AGAIN is of one that loaded while torchrun ended the others
                status = _status_of([(one.timestamp, one.exitcode) for one in error.failures.values()])
            if status == 1 and left == 0:
                raise  # the workers' traceback is above, torchrun's summary of it below
            return status if status > 0 else 128 - status
    return 0


def _status_of(failures: Sequence[tuple[int, int]]) -> int:
    """Of ranks that failed, (time in seconds, exit code) of each: where the first of them was killed, its signal, below
    0, for the others then say that it is gone; else the largest code. Those that want to be started again come last,
    and SIGTERM is what torchrun ends the others with."""
    failed = [failure for failure in failures if failure[1] != AGAIN] or list(failures)
    _, first = min(failed)
    return first if first < 0 and first != -signal.SIGTERM else max(code for _, code in failed)


def set_defaults(environ: MutableMapping[str, str]) -> None:
    """Both spellings: torch before 2.12 reads the first of each pair, later ones the option that the second stands
    for."""
    for names, value in (
        (("TORCHELASTIC_SIGNALS_TO_HANDLE", "PET_SIGNALS_TO_HANDLE"), SIGNALS),
        (("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "PET_SHUTDOWN_TIMEOUT"), str(SHUTDOWN_S)),
    ):
        given = next((environ[name] for name in names if name in environ), value)
        environ.update(dict.fromkeys(names, given))


@contextmanager
def loading(environ: MutableMapping[str, str]) -> Iterator[None]:
    """Of a worker: inside the block there is no run yet that could be saved, and a signal ends it with the status that
    asks to be started again."""
    here = os.getpid()

    def end(signum: int, frame: FrameType | None) -> None:
        if os.getpid() != here:  # a child that was forked meanwhile
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
            return
        leave_status(-AGAIN, environ)
        os.write(2, f"stopped by {signal.Signals(signum).name} before the run began: start it again\n".encode())
        os._exit(AGAIN)  # at once: what is being loaded may not like to be interrupted

    before = {signum: signal.signal(signum, end) for signum in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _status(file: Path) -> int:
    """0 where no worker left one, or had no room for it. Below 0 where the ranks' own exit codes decide: -AGAIN of one
    that was stopped while it loaded, -1 of one that has said why it failed."""
    return int(file.read_text() or 0) if file.exists() else 0


def leave_status(status: int, environ: MutableMapping[str, str]) -> None:
    """Of a worker: how this job ends, for the process that started it. On a full disk it has to do without."""
    if STATUS_FILE in environ:
        with suppress(OSError):
            Path(environ[STATUS_FILE]).write_text(str(status))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
