"""The bytes of all tensors that torch made and still holds, on any device, peak included: a memory profile for a CPU.

`with LiveBytes() as live: ...; live.peak` counts the storages that operators return inside the block, each once, by their
present size (FSDP2 frees and fills storages in place), from their first sight until they are collected.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._new = False  # a storage was met that was not known
        self.peak = 0

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count these too: what was made before the block."""
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if type(local) in (torch.Tensor, torch.nn.Parameter):
                storage = local.untyped_storage()
                seen = self._storages.get(storage._cdata)
                if seen is None or seen() is None:  # an address serves again once its storage is gone
                    self._storages[storage._cdata] = weakref.ref(storage)
                    self._new = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._new = False
        self.add(leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor))
        if self._new:  # views and writes add nothing
            self.peak = max(self.peak, self.now())
        return out

    def now(self) -> int:
        live = 0
        for key, reference in list(self._storages.items()):
            storage = reference()
            if storage is None:
                del self._storages[key]
            else:
                live += storage.nbytes()
        return live
