"""Every number of the memory plan that no formula gives, with where it comes from. Bytes unless said otherwise.

"Estimate" marks what no run of ours has isolated yet; bench/bench_memory.py compares plan and measurement.
"""

from __future__ import annotations

GIB = 1 << 30
MIB = 1 << 20

# ---- training: what torch counts as allocated

MASTER = 4  # bytes of a parameter: masters, gradients and both AdamW moments are float32 (policy/model.py, optim.py)
ADAMW_STATES = 2
ADAMW_VISIT = 256 * MIB  # moments that visit the device together with offload_optimizer (policy/host_adamw.py)
ADAMW_VISITS = 3  # at the same time: one arrives, one is stepped, one leaves
REDUCED = 4  # bytes of a gradient on its way through the reduce-scatter (reduce_dtype float32)
MERGING = 12  # bytes of a merged weight: float32 of the base and of the sum, the noise of its rounding (policy/lora.py)
# Whole blocks that live at once with reshard_after_forward. One rank copies its shard, and that is all; with several
# the next block is gathered while one computes, into a flat buffer that is copied out (FSDP2's implicit prefetch).
GATHERED_BLOCKS_ALONE = 1
GATHERED_BLOCKS = 3
# Sequences of one bucket are padded to its longest, to 1 to 2 times their length (policy/attention.py).
SDPA_PADDING = 1.25
PROCESSORS = 132  # streaming multiprocessors of an H100 or H200; fewer on smaller GPUs
MLP_SLICES = 8  # what the plan tries beside 1: with it the MLP's share of a block's memory is small
OFFLOADED_IN_FLIGHT = 2  # block inputs on the device with activation_offload: the one computed and the one copied

# ---- the head (kernels/fastgrpo_kernels)

HEAD_CHUNK_CUDA = 2600 * MIB  # the kernels' own default for all working buffers of a call (_chunks.py)
HEAD_CHUNK_LEAST = HEAD_CHUNK_CUDA // 8  # below it the products are too thin: some 1,000 rows of a large vocabulary
HEAD_SUB_ROWS = 1024  # rows whose float32 logits exist at once (_sweep.py)
HEAD_ROW_MULTIPLE = 256  # least rows of a chunk
LOGITS = 4  # bytes: logits are float32 whatever the model computes in

# ---- the device outside of torch's tensors

CUDA_CONTEXT = int(0.6 * GIB)  # context and cuBLAS workspaces of one process. Estimate
NCCL = GIB  # communicators of world, SP and TP groups, where there is more than one rank. Estimate
# Graphs and workspaces of vLLM that stay while it sleeps: seen on an H200, 137 of 140 GiB free after sleep(level=2)
# with a 1.5B model, less the context. In whole GiB and with what torch had kept: an upper bound.
ENGINE_ASLEEP = int(2.2 * GIB)
ENGINE_ASLEEP_EAGER = int(0.7 * GIB)  # without CUDA graphs. Estimate
# The same while it draws, beside logits and a prefill, and the share of the training peak that torch keeps although it
# was told to give back what is free: two numbers for the six rollouts of docs/memory.md, 9.0 to 35.5 GiB.
ENGINE_AWAKE = int(1.0 * GIB)
KEPT_BY_TORCH = 0.03
ENGINE_LOGIT_COPIES = 4  # float32 [max_num_seqs, vocab]: logits, their log-softmax, sorted copies, scratch. Estimate
KV_BLOCK_TOKENS = 16  # vLLM hands out its cache in blocks of 16 tokens
TRAINING_SLACK = 0.10  # share of torch's tensors that its allocator loses between them, and the plan's own error
ROLLOUT_SLACK = 0.03  # of the GPU; nearly all of it is one block of cache that is asked for in bytes

# ---- the host

# Resident set of one rank: torch, vLLM, CUDA's libraries, the data. Seen on an H200: 5.1 GiB beside what is pinned, a
# process with an engine and its imports before the count began.
PROCESS_HOST = 6 * GIB
SAVE_BUFFER = 4 * GIB  # rank 0 writes a checkpoint in files of this size (policy/weights.py)
EXCHANGED_TOKEN = 64  # bytes of host memory a token of a step's rollouts, which every rank holds. Estimate

# ---- speed, in shares of the training phase's time. Only the order of choices that they lead to matters. Estimates.

COST_RECOMPUTE = 1 / 3  # of all blocks: forward, forward again, backward (2 forwards) instead of forward, backward
COST_GATHER_AGAIN = 0.03  # a second all-gather of each block, mostly hidden
COST_ACTIVATION_OFFLOAD = 0.10
COST_PARK = 0.10  # 12 bytes a parameter over PCIe, twice a step
COST_HOST_MOMENTS = 0.05  # 8 bytes a parameter over PCIe both ways at once, an update
COST_CPU_OPTIMIZER = 0.3  # AdamW on the CPU
# And in each micro-batch 20 bytes a parameter over PCIe and through host memory (weights twice, gradients once and
# added there), at 25 GB/s as long as 6 FLOP a parameter for 10,000 tokens at 75 TFLOP/s.
COST_CPU_OFFLOAD_TOKENS = 10_000
COST_REF_OFFLOAD = 0.03
# What a row takes at least, a block's forward and backward, however short it is: Python and launches. Seen on an H200:
# 128 rows of 28 blocks in 27.2 s, 4 of 24 in 0.79 s, where the device had work for less than a third of that.
ROW_BLOCK_S = 7.5e-3
ROW_MLP = 0.25  # of that, made again for each further slice of the MLP. Estimate
REACHED = 0.45  # of the peak, by an update whose kernels run without a break
A100_TFLOPS = 312.0  # where nobody said how fast the GPU is (trainer.peak_tflops)
COST_MICRO_BATCH_TOKENS = 256  # a micro-batch of n tokens loses 256 / n to launches and thin products
COST_GATHER_TOKENS = 256  # and as much again to gathers and reductions, where there is a shard
COST_CHUNK_HALVED = 0.01
COST_CACHE_HALVED = 0.3  # half as many sequences at their longest in the cache as a step has for an engine

# What CUDA reports as the whole memory of cards that are sold as so many GB, GiB, the least of the usual ones. Seen:
# H200. The others from their makers' and users' reports.
CARDS_GIB = {"24 GB": 22.0, "40 GB": 39.3, "48 GB": 44.3, "80 GB": 79.1, "141 GB": 139.5}
