"""Without a GPU triton runs the kernels under its interpreter, on CPU tensors.

It has to know when it is imported. The environment variable that says so is taken back at once, so that no subprocess
of another test inherits it; in this process the knob of the same meaning stays.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        import triton

        triton.knobs.runtime.interpret = True
    finally:
        del os.environ["TRITON_INTERPRET"]
