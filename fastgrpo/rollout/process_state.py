"""Hosting a guest that rearranges the house: what vLLM changes in the process that it lives in, put back.

Found in vLLM 0.26 and 0.31, whose worker was written for a process of its own: it reseeds Python, numpy and torch,
replaces `torch.set_num_threads` by a function that refuses (CPU), sets the float32 matmul precision, and writes
environment variables. Left alone on purpose: on hosts without an accelerator it also empties
`torch.accelerator.synchronize` and `empty_cache`, which could only raise there and which it calls while it generates.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

# LOCAL_WORLD_SIZE is torchrun's word, overwritten with the engine's size; LD_PRELOAD would reach the reward processes.
_VARIABLES = ("LOCAL_WORLD_SIZE", "LD_PRELOAD", "NUMEXPR_MAX_THREADS")


@contextmanager
def kept_process_state() -> Iterator[None]:
    """Random states (Python, numpy, torch on the CPU and on this rank's GPU), thread counts, matmul precision and the
    variables above are afterwards what they were before, also when the body raises."""
    python_state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda_state = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    variables = {name: os.environ.get(name) for name in _VARIABLES}
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        if cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state)
        torch.set_num_threads = set_num_threads
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)
        torch.set_float32_matmul_precision(precision)
        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
