"""Every option with its default, unit and one sentence. The rules that they must obey are in rules.py.

One tree of dataclasses, `RunConfig`, is composed (hydra, in train.py) or written in Python, checked once by
`check(config, world_size)`, and never changed afterwards. Numbers that follow from others are not options: `Layout`
computes them. The section `reward` is in reward_schema.py.

Leaf names are verl's wherever the meaning is the same. Units are in the comments: prompts, sequences (= prompts x
rollout.n), tokens, updates, steps. A step is one rollout and all the updates made from it.

Why StrEnum("Name", ["value"]) and no class: the values are verl's, and names such as `token-mean` are no identifiers.
A plain string of the same spelling is as good as the member.

Options of memory (actor.max_tokens_per_gpu, head_chunk_gib, gradient_checkpointing, activation_offload, mlp_slices, the
fsdp and offload options, rollout.kv_cache_gib, rollout.tensor_model_parallel_size) are null by default: on CUDA the
memory plan (fastgrpo/plan) decides them, on a CPU they are fixed (plan/settle.py). What was decided is printed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from fastgrpo.config.reward_schema import RewardConfig

Device = StrEnum("Device", {"auto": "auto", "cpu": "cpu", "cuda": "cuda"})
Dtype = StrEnum("Dtype", {"auto": "auto", "bfloat16": "bfloat16", "float32": "float32"})
LossAgg = StrEnum(
    "LossAgg", ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]
)
PolicyLoss = StrEnum("PolicyLoss", ["vanilla", "gspo", "cispo", "sapo", "dppo_tv", "geo_mean", "reinforce"])
KlType = StrEnum(
    "KlType",
    ["low_var_kl", "k3", "kl", "k1", "mse", "k2", "abs", "low_var_kl+", "k3+", "kl+", "k1+", "mse+", "k2+", "abs+"],
)
AdvEstimator = StrEnum(
    "AdvEstimator",
    ["grpo", "dr_grpo", "rloo", "opo", "grpo_passk", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo"],
)
Schedule = StrEnum("Schedule", {"constant": "constant", "cosine": "cosine"})
Attention = StrEnum("Attention", {"auto": "auto", "flash": "flash", "varlen": "varlen", "sdpa": "sdpa"})
HeadImpl = StrEnum("HeadImpl", {"auto": "auto", "reference": "reference"})
Truncation = StrEnum("Truncation", {"error": "error", "left": "left", "right": "right"})
BestMode = StrEnum("BestMode", {"max": "max", "min": "min"})
RolloutIs = StrEnum("RolloutIs", ["token", "sequence", "icepop", "none"])
RolloutRs = StrEnum(
    "RolloutRs", ["none", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3", "seq_mean_k1", "seq_mean_k2", "seq_mean_k3"]
)
KlCtrl = StrEnum("KlCtrl", {"fixed": "fixed", "adaptive": "adaptive"})


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    path: str = ""  # Hugging Face id or folder of the policy
    tokenizer_path: str | None = None  # defaults to `path`
    chat_template: str | None = None  # Jinja file, or `plain` for base models that bring none; default: the tokenizer's
    trust_remote_code: bool = False  # run code that comes with the checkpoint
    lora_rank: int = 0  # of the adapters that are trained instead of the model; 0 = none, all weights are trained
    lora_alpha: int = 16  # the adapters' product counts lora_alpha / lora_rank times
    # the linear layers that get adapters, by the ends of their names; all-linear: all of them but the output layer
    target_modules: list[str] = field(default_factory=lambda: ["all-linear"])


@dataclass(kw_only=True, slots=True)
class ArithmeticConfig:
    """Sums made on the spot (`data.train_files=[arithmetic]`): nothing to download."""

    operations: str = "+"  # characters out of + - *
    operands: int = 2  # numbers in one task
    min_value: int = 0  # smallest operand
    max_value: int = 99  # largest operand
    # what the user says, each task in every wording; {task} is like `3 + 4`
    templates: list[str] = field(default_factory=lambda: ["{task} ="])
    train_size: int = 4096  # tasks, or fewer when there are no more
    val_size: int = 128  # tasks, none of them in the training set in any order of its operands


@dataclass(kw_only=True, slots=True)
class DataConfig:
    # each entry: a .jsonl, .json or .parquet file, a hub data set (`openai/gsm8k`), or `arithmetic`
    train_files: list[str] = field(default_factory=list)
    val_files: list[str] = field(default_factory=list)  # the same, each a set of its own; empty: no validation
    hub_config: str | None = None  # configuration of a hub data set, e.g. `main`
    train_split: str = "train"  # split of a hub data set, or some of its rows: train[:1000], train[1000:]
    val_split: str = "test"
    prompt_key: str = "prompt"  # column with a string or a list of chat messages; dots go into nested columns
    prompt_template: str | None = None  # instead of prompt_key: a text with the names of columns, as in {question}
    choices_key: str | None = None  # column with choices; they are lettered (a hash shuffles them), after the prompt or
    # at {choices}, and the reference, which says the right one (index, letter, text, list with a 1), becomes its letter
    reference_key: str | None = "reference"  # column with the right answer; verl: reward_model.ground_truth; null: none
    system_prompt: str | None = None  # put before a prompt that has no system message of its own; "" = an empty one
    prompt_suffix: str = ""  # appended to the last user message
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)  # e.g. {enable_thinking: false}
    train_batch_size: int = 128  # prompts a step, over all ranks
    gen_batch_size: int | None = None  # prompts a round of algorithm.filter_groups; default train_batch_size
    max_prompt_length: int = 512  # tokens after the chat template
    max_response_length: int = 1024  # tokens
    filter_overlong_prompts: bool = True  # drop (and count) prompts above max_prompt_length
    truncation: Truncation = Truncation["error"]  # what happens to them when they are not dropped
    shuffle: bool = True  # a new global order each epoch, a function of (trainer.seed, epoch)
    train_max_samples: int = -1  # prompts; -1 = all
    val_max_samples: int = -1  # prompts of each set; -1 = all
    arithmetic: ArithmeticConfig = field(default_factory=ArithmeticConfig)


@dataclass(kw_only=True, slots=True)
class ValidationSampling:
    temperature: float = 0.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = -1
    n: int = 1  # samples a prompt
    pass_score: float = 1.0  # reward from which on an answer passes, for pass@k and maj@n


@dataclass(kw_only=True, slots=True)
class RolloutConfig:
    name: str = "vllm"  # vllm, hf, or package.module:Class (see fastgrpo/rollout/engine.py)
    n: int = 8  # samples a prompt
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1 = all
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    # ranks an engine; null: the fewest with which the memory plan finds a fit (vllm on CUDA), else 1
    tensor_model_parallel_size: int | None = None
    max_model_len: int | None = None  # tokens; default max_prompt_length + max_response_length
    max_num_seqs: int = 256  # sequences decoded at once by one engine
    max_num_batched_tokens: int = 8192  # tokens one engine iteration prefills
    kv_cache_gib: float | None = None  # GiB of KV cache a rank; null: the memory plan's (CUDA), 2 (CPU)
    max_seconds: float | None = None  # of a rollout or validation; the rest is cut, counted; null: 80 % of limits_s.gen
    enforce_eager: bool = False  # no CUDA graphs: starts faster, generates slower
    cudagraph_capture_sizes: list[int] | None = None  # sequences; default: up to what one engine decodes at once
    sleep_level: int = 2  # CUDA: 2 drops the engine's weights while training, 1 keeps a copy in host memory
    dtype: Dtype = Dtype["auto"]  # engine weights; auto: as the trainer's compute
    max_logprob_gap: float = 0.1  # nats; mean |trainer - sampler| above it stops the run, and so does a signed
    # mean beyond 0.03 (or this, if less), whatever is set here: noise has no sign
    check_weight_update: bool = False  # vllm, hf: at each waking compare a checksum of every tensor that was sent with
    # that of what the engine holds, on all of its ranks; a difference stops the run with the names
    val_kwargs: ValidationSampling = field(default_factory=ValidationSampling)


@dataclass(kw_only=True, slots=True)
class OptimConfig:
    lr: float = 1e-6
    lr_scheduler_type: Schedule = Schedule["constant"]
    lr_warmup_steps: int = 0  # updates; update k of them runs at k / lr_warmup_steps of lr (k = 1, 2, ...)
    min_lr_ratio: float = 0.0  # cosine ends at this share of lr
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8


@dataclass(kw_only=True, slots=True)
class FsdpConfig:
    reshard_after_forward: bool | None = None  # free a block's full weights between its forward and its backward
    replicas: int = 1  # HSDP: shards are kept inside world / replicas ranks and replicated over the replicas
    offload_policy: bool | None = None  # FSDP2's CPU offload: masters, gradients and optimizer live in host memory
    offload_optimizer: bool | None = None  # AdamW's moments live in host memory and visit the device for their update
    offload_during_rollout: bool | None = None  # move masters and optimizer to host memory while the engine generates


@dataclass(kw_only=True, slots=True)
class ActorConfig:
    ppo_mini_batch_size: int | None = None  # prompts an update; default data.train_batch_size (one update a step)
    ppo_epochs: int = 1  # passes over the rollout
    max_tokens_per_gpu: int | None = None  # tokens a rank in one forward; a hard bound, times the sp size for a group
    micro_batch_size_per_gpu: int | None = None  # sequences a rank in one forward, further limiting the tokens
    policy_loss: PolicyLoss = PolicyLoss["vanilla"]
    clip_ratio_low: float = 0.2  # the ratio new / old counts from 1 - this; 1 = no lower bound
    clip_ratio_high: float = 0.2  # ... to 1 + this. dppo_tv: both bound the change of the token's probability
    clip_ratio_c: float = 3.0  # vanilla: dual clip, at most c * A for negative advantages; dppo_tv: the ratio's bound
    tau_pos: float = 1.0  # sapo: sharpness of the gate at positive advantages
    tau_neg: float = 1.05  # sapo: at negative ones
    loss_agg_mode: LossAgg = LossAgg["token-mean"]
    loss_scale_factor: float | None = None  # seq-mean-token-sum-norm; default data.max_response_length
    use_kl_loss: bool = True
    kl_loss_coef: float = 0.001
    kl_loss_type: KlType = KlType["low_var_kl"]
    entropy_coeff: float = 0.0  # entropy bonus
    grad_clip: float = 1.0  # global norm; 0 = none
    max_skipped_updates: int = 3  # non-finite gradient norms in a row that stop the run
    ulysses_sequence_parallel_size: int = 1  # ranks that share one row of tokens
    dtype: Dtype = Dtype["auto"]  # compute; masters are float32. auto: bfloat16 on CUDA, float32 on CPU
    attention: Attention = Attention["auto"]
    head: HeadImpl = HeadImpl["auto"]  # auto: the fused kernels on CUDA; reference: chunked torch
    head_chunk_gib: float | None = None  # GiB of the head's working buffers; on a CPU null is 0.25
    use_liger: bool = True  # RMSNorm, SwiGLU and RoPE of liger-kernel, on CUDA where it is installed
    use_torch_compile: bool = False  # torch.compile of each block, of the reference too; its blocks do without liger
    gradient_checkpointing: int | None = None  # recompute every k-th block in the backward: 1 = all, 0 = none
    activation_offload: bool | None = None  # keep the activations between blocks in host memory
    mlp_slices: int | None = None  # slices of a row that an MLP works through, recomputed in the backward; 1 = whole
    optim: OptimConfig = field(default_factory=OptimConfig)
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)


@dataclass(kw_only=True, slots=True)
class RefConfig:
    path: str | None = None  # reference policy; default model.path
    dtype: Dtype = Dtype["auto"]  # its weights and compute; auto as actor.dtype
    offload_policy: bool | None = None  # keep its shards in host memory


@dataclass(kw_only=True, slots=True)
class RolloutCorrectionConfig:
    # importance weight trainer / sampler of the policy loss: of each token or of the whole sequence, cut at the
    # threshold; icepop: of each token, and 0 outside the two thresholds
    rollout_is: RolloutIs = RolloutIs["token"]
    rollout_is_threshold: float = 2.0  # upper bound
    rollout_is_threshold_lower: float | None = None  # icepop's lower bound; default 1 / rollout_is_threshold
    # take out sequences whose ratio (k1: e^sum or e^mean of the log-ratios) or divergence (k2, k3) is out of bounds
    rollout_rs: RolloutRs = RolloutRs["none"]
    rollout_rs_threshold: float | None = None  # its upper bound; needed with rollout_rs
    rollout_rs_threshold_lower: float | None = None  # k1's lower bound; default 1 / rollout_rs_threshold
    bypass_mode: bool = False  # the sampler's logprobs are the old ones: the loss's ratio is new / sampler


@dataclass(kw_only=True, slots=True)
class KlCtrlConfig:
    type: KlCtrl = KlCtrl["fixed"]
    kl_coef: float = 0.001  # of the KL penalty in the reward; adaptive: at the start
    target_kl: float = 0.1  # adaptive: nats a token
    horizon: int = 10000  # adaptive: sequences over which the coefficient moves


@dataclass(kw_only=True, slots=True)
class FilterGroupsConfig:
    """Dynamic sampling (DAPO): groups without signal are replaced by those of further prompts."""

    enable: bool = False
    metric: str | None = None  # label of the reward function that must differ in a group; default: the whole reward
    max_num_gen_batches: int = 10  # rounds a step; after the last one, groups without signal fill the step


@dataclass(kw_only=True, slots=True)
class AlgorithmConfig:
    adv_estimator: AdvEstimator = AdvEstimator["grpo"]
    norm_adv_by_std_in_grpo: bool = True  # divide by the group's deviation; grpo, grpo_passk, gdpo
    use_kl_in_reward: bool = False  # reward -= coefficient * KL to the reference, summed over the response
    kl_penalty: KlType = KlType["kl"]  # estimate of that KL
    kl_ctrl: KlCtrlConfig = field(default_factory=KlCtrlConfig)
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    overlong_filtering: bool = False  # leave responses that hit data.max_response_length out of loss and counts
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)


BEAT_S = 0.5  # between two signs that a rank gives of itself


@dataclass(kw_only=True, slots=True)
class LimitsConfig:
    """Seconds after which the run is taken for hung and ended, with the stacks of its threads; null: none."""

    sync: float | None = 1800  # of bringing the weights to the engine
    gen: float | None = 1800  # of a rollout; rollout.max_seconds cuts it before
    reward: float | None = 1800  # of the rewards, with the wait for the slowest rank's rollout
    score: float | None = 1800  # of each pass that only scores: gate, whole sequences, old, reference
    update: float | None = 1800  # of all updates of a step
    validate: float | None = 3600  # of a validation
    save: float | None = 1800  # of a save, as far as training waits for it
    heartbeat: float | None = 60  # without a sign of another rank


@dataclass(kw_only=True, slots=True)
class TrainerConfig:
    n_gpus_per_node: int = 1  # processes; more than one and a bare start: the program starts itself again
    device: Device = Device["auto"]
    gpu_memory_gib: float | None = None  # GiB of a GPU to plan for and to stay within; default: all that it has
    host_memory_gib: float | None = None  # GiB of a node's host memory to plan for; default (CUDA): what is left there
    max_steps: int | None = None  # default: total_epochs over the data
    total_epochs: int = 1
    seed: int = 0
    project_name: str = "fastgrpo"
    experiment_name: str = "run"
    run_dir: str = "runs"  # a run writes to run_dir/experiment_name-<time>
    logger: list[str] = field(default_factory=lambda: ["console"])  # console, tensorboard, wandb
    save_freq: int = -1  # steps between checkpoints; -1 = none, only the trained model at the end
    max_ckpt_to_keep: int | None = None  # newest checkpoints that stay, besides the best; null = all
    best_metric: str | None = None  # of metrics.jsonl at a checkpoint's step, e.g. val/reward: its best one stays too
    best_mode: BestMode = BestMode["max"]  # which value of best_metric is the best
    async_save: bool = True  # copy to host memory (12 bytes a parameter / ranks), write while training goes on
    resume: str = "auto"  # auto: the newest unfinished run of experiment_name; never; or a run folder or checkpoint
    resume_allow: list[str] = field(default_factory=list)  # options that may differ from those of the resumed run
    deterministic: bool = False  # torch's deterministic algorithms: repeats bit for bit on the same layout, slower
    shutdown_timeout_s: int = 120  # seconds from a signal to the end of the save it asks for
    limits_s: LimitsConfig = field(default_factory=LimitsConfig)
    save_final: bool = True  # a Hugging Face folder of the trained model at the end; with adapters, peft's of those
    save_merged: bool = False  # with adapters: at the end a Hugging Face folder, too, with the adapters merged in
    test_freq: int = -1  # steps; -1 = only before and after
    val_before_train: bool = True
    val_only: bool = False  # validate once, the weights that a run would start or go on from, and end
    peak_tflops: float | None = None  # 1e12 FLOP/s of one GPU, for perf/mfu and the plan; default: by the GPU's name
    show_group_freq: int = 10  # steps between two groups shown on the console; 0 = never


@dataclass(kw_only=True, slots=True)
class RunConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)


def needs_reference(config: RunConfig) -> bool:
    """Whether a reference policy must be in memory: for the KL in the loss, or in the reward."""
    in_reward = config.algorithm.use_kl_in_reward and config.algorithm.kl_ctrl.kl_coef != 0
    return uses_reference(config.actor) or in_reward


def loads_reference(config: RunConfig) -> bool:
    """Whether the reference is a model of its own. With adapters it is the policy without them."""
    return needs_reference(config) and not (config.model.lora_rank and config.ref.path is None)


def uses_reference(actor: ActorConfig) -> bool:
    """Whether the loss has a KL term."""
    return actor.use_kl_loss and actor.kl_loss_coef != 0


def compute_dtype(wanted: Dtype, device_type: str) -> str:
    """Name of the torch dtype that a `dtype` option means: auto is bfloat16 on CUDA, float32 on a CPU."""
    if wanted == Dtype["auto"]:
        return "bfloat16" if device_type == "cuda" else "float32"
    return str(wanted)


def rollout_seconds(config: RunConfig) -> float | None:
    """After how long an engine cuts what still runs: rollout.max_seconds, else 80 % of what the watchdog allows. A run
    that is ended for a slow rollout would meet the same prompts and seeds again when it is resumed."""
    limit = config.trainer.limits_s.gen
    return config.rollout.max_seconds or (None if limit is None else 0.8 * limit)
