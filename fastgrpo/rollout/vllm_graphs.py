"""Which batch sizes of the engine's decoding get a CUDA graph. Arithmetic only; nothing is captured here."""

from __future__ import annotations

from fastgrpo.config import RunConfig


def capture_sizes(config: RunConfig, engines: int) -> list[int]:
    """`rollout.cudagraph_capture_sizes`, else sizes for what one of `engines` decodes at once: its share of a step, or
    with validation, whose size is another, all of rollout.max_num_seqs."""
    rollout = config.rollout
    if rollout.cudagraph_capture_sizes is not None:
        return sorted(rollout.cudagraph_capture_sizes)
    share = -(-config.data.train_batch_size // engines) * rollout.n
    return graph_sizes(rollout.max_num_seqs if config.data.val_files else min(rollout.max_num_seqs, share))


def graph_sizes(top: int) -> list[int]:
    """Batch sizes up to `top` decoding sequences, `top` among them: a batch shrinks from `top` to 1 while its sequences
    end, and runs in the next larger graph. Every 8th (16th from 256 on, 32nd from 512 on) keeps the padding below 13 %
    above 64 and the capture short. vLLM's own list ends at 512 and reaches to twice the sequences."""
    steps = [1, 2, 4, *range(8, 256, 8), *range(256, 512, 16), *range(512, top, 32)]
    return [size for size in steps if size < top] + [top]
