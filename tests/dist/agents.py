"""One update as a torchrun job: torchrun ... agents.py MODEL_FOLDER RESULT_FILE REPLICAS (see test_parity.py)."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from cases import one_update

if __name__ == "__main__":
    torch.set_num_threads(1)
    result = one_update(Path(sys.argv[1]), sp=2, replicas=int(sys.argv[3]), updates=2)
    if dist.get_rank() == 0:
        torch.save(result | {"world": dist.get_world_size()}, sys.argv[2])
    dist.destroy_process_group()
