"""Pinned host memory of exactly the size that is asked for, for tensors that stay as long as the run.

    anonymous pages  --cudaHostRegister-->  pinned: copies to and from the GPU need no buffer and wait for nobody
                     <--cudaHostUnregister--  when the last tensor on them is gone

torch's own pinned memory comes in powers of two: a moment of 18,944 x 3,584 float32 numbers, 259 MiB, takes 512. What
is used for a moment at a time can live with that, since torch keeps and reuses it (parking.py, a checkpoint's copy).

Unlike torch's, this memory does not wait for copies that are under way when it is freed: whoever holds it, does.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress
from math import prod
from typing import Any

import torch
from torch import Tensor


class _Pages(mmap.mmap):
    """Pinned until nobody refers to them any more. Raises RuntimeError where CUDA refuses."""

    address: int = 0

    def pin(self) -> Tensor:
        """The pages as uint8 [size]."""
        whole = torch.frombuffer(self, dtype=torch.uint8)  # refers to the pages as long as it lives
        runtime: Any = torch.cuda.cudart()
        torch.cuda.check_error(runtime.cudaHostRegister(whole.data_ptr(), len(self), 0))
        self.address, self._unregister = whole.data_ptr(), runtime.cudaHostUnregister
        return whole

    def __del__(self) -> None:
        if self.address:
            self._unregister(self.address)


def pinned_empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Not initialised. Where CUDA cannot pin pages that are there already, torch's own pinned memory."""
    size = prod(shape) * dtype.itemsize
    if size == 0:
        return torch.empty(shape, dtype=dtype)
    try:
        pages = _Pages(-1, size)
        # Large pages are fewer to pin. And a child has no part in them: the first write after a fork would go to a copy
        # of the page, and the GPU would go on with the old one (torch's own are the driver's, which no child shares).
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            with suppress(AttributeError, OSError):  # not known to this system
                pages.madvise(getattr(mmap, advice))
        return pages.pin().view(dtype).view(*shape)
    except (OSError, RuntimeError):
        return torch.empty(shape, dtype=dtype, pin_memory=True)
