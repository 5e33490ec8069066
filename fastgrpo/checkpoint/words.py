"""What the writer threads of a save tell each other, through the store: a collective would belong to the main thread.

    rank 0                                                      the others
    waits for all                                          <--  key `<n>/<rank>`: what was written, or what went wrong
    where nodes have disks of their own, with the leader of each other place:
    key `<n>/written`: what all ranks have written        -->  writes .metadata, checksums, checkpoint.json; renames
    waits for these leaders                                <--  key `<n>/there/<rank>`: what went wrong, or None
    renames its own, retires
    key `<n>/done`: whether it is complete, what was retired -> removes what was retired, or its own of what failed

<n> is the number of the save. Rank 0 renames last and removes first: a checkpoint that is complete in its place is
complete in all of them.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.storage import WriteResult

from fastgrpo.checkpoint.disk import remove_tree
from fastgrpo.checkpoint.folders import point_again
from fastgrpo.mesh import Store

Results = list[WriteResult]
_POLL_S = 0.05


class Words:
    """Of one save."""

    def __init__(self, store: Store, number: int, rank: int) -> None:
        self._store = store
        self._number = number
        self._rank = rank

    # Rank 0 ----------------------------------------------------------------------------------------------------------

    def all_results(self, own: Results, error: str | None, world: int) -> list[Results]:
        """What all ranks have written. Raises OSError when one of them could not."""
        answers = [(own, error), *(self._take(str(rank)) for rank in range(1, world))]
        _raise_any({rank: error for rank, (_, error) in enumerate(answers)})
        return [results for results, _ in answers]

    def publish(self, results: list[Results]) -> None:
        self._put("written", results)

    def await_places(self, leaders: Sequence[int]) -> None:
        """Until the checkpoint is complete in the other places. Raises OSError when it is not in one."""
        errors = {rank: self._take(f"there/{rank}") for rank in leaders}
        self._store.delete_key(self._key("written"))
        _raise_any(errors)

    def end(self, *, complete: bool, retired: Sequence[Path]) -> None:
        self._put("done", (complete, [folder.name for folder in retired]))

    # The others ------------------------------------------------------------------------------------------------------

    def tell(self, results: Results, error: str | None) -> None:
        self._put(str(self._rank), (results, error))

    def await_end(self) -> tuple[bool, list[str]]:
        return self._take("done", delete=False)

    def follow(self, folder: Path, part: Path, best_mode: str, commit: Callable[[list[Results]], object]) -> None:
        """Of a leader of another place. `commit` completes the checkpoint there: `part` before, `folder` after."""
        while not self._store.check([self._key("written")]):
            if self._store.check([self._key("done")]):  # some rank could not write
                return remove_tree(part)
            time.sleep(_POLL_S)
        error: str | None = None
        try:
            commit(self._take("written", delete=False))
        except Exception as failure:
            error = describe(failure)
        self._put(f"there/{self._rank}", error)
        complete, retired = self.await_end()
        for path in [folder.parent / name for name in retired] if complete else [part, folder]:
            remove_tree(path)
        if not complete:
            point_again(folder.parent, best_mode)

    def _key(self, what: str) -> str:
        return f"{self._number}/{what}"

    def _put(self, what: str, value: Any) -> None:
        self._store.set(self._key(what), pickle.dumps(value))  # pyright: ignore[reportArgumentType] bytes are taken

    def _take(self, what: str, *, delete: bool = True) -> Any:
        key = self._key(what)
        while not self._store.check([key]):
            time.sleep(_POLL_S)
        value = pickle.loads(self._store.get(key))
        if delete:
            self._store.delete_key(key)
        return value


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _raise_any(errors: dict[int, str | None]) -> None:
    if said := [f"rank {rank}: {error}" for rank, error in errors.items() if error]:
        raise OSError("; ".join(said))
