"""Whole runs of a tiny model in processes that may be killed, a second or two each.

A server process imports everything once and forks the ranks of each run from itself:

    runs = SmallRuns()
    run = runs.start(2, config_document)        # 2 ranks; run.pids
    run.kill() or run.signal(SIGTERM)
    codes = run.wait()                          # exit status of each rank, negative: the signal that ended it

The run is `Trainer(config, prompts=PROMPTS, reward=reward).run()`; `faults` names a function here to call first.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import faulty

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = [f"Count to {number}." for number in range(8)]


def reward(response: str, prompt: str) -> float:
    """Differs within a group, also for a random model."""
    return sum(map(ord, response)) % 7 / 7 + len(prompt) / 100


def document(folder: Path, model: Path, **options: Any) -> dict[str, Any]:
    """A configuration of 4 steps of 2 prompts x 2 samples, a checkpoint after each, its runs in `folder`. Options are
    keys with `__` for the dot."""
    values = {
        "model.path": str(model),
        "data.train_batch_size": 2,
        "data.max_prompt_length": 64,
        "data.max_response_length": 5,
        "rollout.name": "hf",
        "rollout.n": 2,
        "reward.num_workers": 1,
        "actor.use_kl_loss": False,
        "actor.optim.lr": 1e-3,
        "actor.optim.lr_warmup_steps": 3,
        "trainer.device": "cpu",
        "trainer.max_steps": 4,
        "trainer.run_dir": str(folder),
        "trainer.save_freq": 1,
        "trainer.logger": [],
        "trainer.deterministic": True,
    } | {key.replace("__", "."): value for key, value in options.items()}
    made: dict[str, Any] = {}
    for key, value in values.items():
        *sections, leaf = key.split(".")
        place = made
        for section in sections:
            place = place.setdefault(section, {})
        place[leaf] = value
    return made


class SmallRun:
    def __init__(self, server: SmallRuns, pids: list[int], output: Path) -> None:
        self._server = server
        self.pids = pids
        self._output = output

    def signal(self, signum: int, ranks: Sequence[int] | None = None) -> None:
        for rank in range(len(self.pids)) if ranks is None else ranks:
            try:
                os.kill(self.pids[rank], signum)
            except ProcessLookupError:
                continue

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def wait(self) -> list[int]:
        return self._server.ask("wait", self.pids)

    def output(self) -> str:
        return self._output.read_text()

    def finish(self) -> None:
        """Wait; every rank must have ended well."""
        codes = self.wait()
        assert codes == [0] * len(codes), f"{codes}\n{self.output()}"


class SmallRuns:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
        kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"},
        )
        self.ask("wait", [])  # until everything is imported

    def ask(self, *question: Any) -> Any:
        assert self._process.stdin and self._process.stdout
        print(json.dumps(question), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def start(
        self, ranks: int, document: dict[str, Any], *, faults: str | None = None, nodes: Sequence[Path] = ()
    ) -> SmallRun:
        """`nodes`: folders in which equal parts of the ranks run, as if each were a host with a disk of its own."""
        output = self._folder / f"output-{self._count}.txt"
        self._count += 1
        return SmallRun(self, self.ask("start", ranks, document, str(output), faults, [*map(str, nodes)]), output)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


# In the server and its ranks ------------------------------------------------------------------------------------------


def serve() -> None:
    import torch

    import fastgrpo.rollout.hf
    import fastgrpo.trainer
    from fastgrpo.metrics import plot_rewards

    plot_rewards(Path(os.devnull), [1], [1.0], [])  # matplotlib is loaded once, here

    torch.set_num_threads(1)
    for line in sys.stdin:
        question, *arguments = json.loads(line)
        answer = start(*arguments) if question == "start" else wait(*arguments)
        print(json.dumps(answer), flush=True)


def start(ranks: int, document: dict[str, Any], output: str, faults: str | None, nodes: list[str]) -> list[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    local = ranks // max(1, len(nodes))
    return [
        fork(rank, ranks, local, port, document, output, faults, nodes[rank // local] if nodes else None)
        for rank in range(ranks)
    ]


def fork(
    rank: int, ranks: int, local: int, port: int, document: dict[str, Any], output: str, faults: str | None, node: str | None
) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setsid()
        log = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank % local),
            WORLD_SIZE=str(ranks),
            LOCAL_WORLD_SIZE=str(local),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        if node is not None:
            os.chdir(node)
        status = train(document, faults)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def train(document: dict[str, Any], faults: str | None) -> int:
    from fastgrpo import console
    from fastgrpo.config import build
    from fastgrpo.errors import RunError, UserError
    from fastgrpo.stopping import Stopped
    from fastgrpo.trainer import Trainer

    if faults:
        getattr(faulty, faults)()
    try:
        Trainer(build(document), prompts=PROMPTS, reward=reward).run()
    except Stopped as stop:
        return stop.exit_code
    except UserError as error:
        print(error)
        return 2
    except RunError as error:
        console.complain(error)
        return 1
    return 0


def wait(pids: list[int]) -> list[int]:
    """Exit statuses; the others of a job are killed a little after one has failed, as torchrun does."""
    codes: dict[int, int] = {}
    deadline: float | None = None
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
        if any(codes.values()) and deadline is None:
            deadline = time.monotonic() + 15
        if deadline is not None and time.monotonic() > deadline:
            for pid in set(pids) - set(codes):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return [codes[pid] for pid in pids]


if __name__ == "__main__":
    serve()
