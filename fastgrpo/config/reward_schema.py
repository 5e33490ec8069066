"""The options of rewards: `reward.functions.NAME` is one function, its kind decides which of the others it reads.

READ_BY says which; the rule `reward_options_are_read` refuses an option that the kind does not read. docs/rewards.md
shows each kind with an example.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

RewardKind = StrEnum(
    "RewardKind",
    {
        "gsm8k": "gsm8k",
        "math": "math",
        "code": "code",
        "choice": "choice",
        "exact": "exact",
        "format": "format",
        "length": "length",
        "rules": "rules",
        "model": "model",
        "judge": "judge",
        "file": "file",
        "custom": "custom",
    },
)
AnswerMode = StrEnum("AnswerMode", {"strict": "strict", "flexible": "flexible"})
Isolation = StrEnum("Isolation", {"full": "full", "best_effort": "best_effort"})
RewardInput = StrEnum("RewardInput", {"prompt_response": "prompt_response", "response": "response"})
RewardDevice = StrEnum("RewardDevice", {"auto": "auto", "cpu": "cpu"})
LengthShape = StrEnum("LengthShape", {"overlong": "overlong", "linear": "linear"})


@dataclass(kw_only=True, slots=True)
class RegexRule:
    pattern: str = ""  # for re.search on the response, special tokens and trailing space removed
    score: float = 0.0  # added when it matches
    flags: str = ""  # letters of re's inline flags: a i m s x


@dataclass(kw_only=True, slots=True)
class RewardFunctionConfig:
    kind: RewardKind = RewardKind["custom"]
    weight: float = 1.0  # the sample's reward is the weighted sum of its functions' scores
    mode: AnswerMode = AnswerMode["strict"]  # where the answer stands: at its mark (####, \\boxed{}, ...), or anywhere
    format_score: float = 0.0  # for a wrong answer in the right form
    partial_credit: bool = False  # code: the share of tests passed, not all or nothing
    time_limit_s: float = 10.0  # code: seconds for all tests of a sample together
    memory_limit_mb: int = 1024  # code: MiB a process of the program
    max_processes: int = 8  # code: processes and threads of the program
    isolation: Isolation = Isolation["full"]  # code: refuse weaker isolation at the start, or take what is in force
    entry_point_key: str | None = "entry_point"  # code: column with the name of the function that is tested
    setup_key: str | None = "test_setup_code"  # code: column with what runs before the tests
    prefix_key: str | None = None  # code: column with what is put before the response's code
    ignore_case: bool = True  # exact
    tags: list[str] = field(default_factory=lambda: ["think", "answer"])  # format: one block each, in this order
    tag_opened: bool = False  # format: the chat template has opened the first tag already
    shape: LengthShape = LengthShape["overlong"]  # length: DAPO's soft overlong punishment, or -tokens / max_length
    max_length: int | None = None  # tokens; length: default data.max_response_length; model: default what it can read
    overlong_buffer_len: int = 0  # length: tokens before max_length over which the punishment grows
    overlong_penalty_factor: float = 1.0  # length: the punishment at max_length
    rules: list[RegexRule] = field(default_factory=list)  # rules: scores of all matching rules are summed
    path: str | None = None  # custom: a Python file; model: a folder or hub id; file: .jsonl, .json or .parquet
    name: str = "compute_score"  # custom: the function in it
    url: str | None = None  # judge: OpenAI-compatible, up to /v1; model: instead of `path`
    api_key_env: str | None = None  # judge, model at a url: environment variable with the key
    max_retries: int = 3  # judge, model at a url
    input: RewardInput = RewardInput["prompt_response"]  # model: what it reads
    device: RewardDevice = RewardDevice["auto"]  # model: auto = the trainer's
    offload: bool = True  # model: keep it in host memory while it does not score
    micro_batch_size_per_gpu: int = 16  # model: sequences a forward
    label: str | None = None  # model: of several labels, the one whose probability is the score
    sigmoid: bool = False  # model: of the logit of a model with one label
    model: str = ""  # judge: the model's name at the endpoint
    prompt_template: str | None = (
        None  # judge: a text with {prompt}, {response}, {reference}, ... or a file; null = ours
    )
    max_score: float = 10.0  # judge: its best number; the score is its share of that
    temperature: float = 0.0  # judge
    max_tokens: int = 1024  # judge: tokens of a judgement


READ_BY: dict[str, tuple[str, ...]] = {
    "mode": ("gsm8k", "math", "choice", "exact"),
    "format_score": ("gsm8k", "math", "choice"),
    "partial_credit": ("code",),
    "time_limit_s": ("code",),
    "memory_limit_mb": ("code",),
    "max_processes": ("code",),
    "isolation": ("code",),
    "entry_point_key": ("code",),
    "setup_key": ("code",),
    "prefix_key": ("code",),
    "ignore_case": ("exact",),
    "tags": ("format",),
    "tag_opened": ("format",),
    "shape": ("length",),
    "max_length": ("length", "model"),
    "overlong_buffer_len": ("length",),
    "overlong_penalty_factor": ("length",),
    "rules": ("rules",),
    "path": ("custom", "model", "file"),
    "name": ("custom",),
    "url": ("judge", "model"),
    "api_key_env": ("judge", "model"),
    "max_retries": ("judge", "model"),
    "input": ("model",),
    "device": ("model",),
    "offload": ("model",),
    "micro_batch_size_per_gpu": ("model",),
    "label": ("model",),
    "sigmoid": ("model",),
    "model": ("judge",),
    "prompt_template": ("judge",),
    "max_score": ("judge",),
    "temperature": ("judge",),
    "max_tokens": ("judge",),
}
NEEDS_REFERENCE = ("gsm8k", "math", "code", "choice", "exact")


@dataclass(kw_only=True, slots=True)
class RewardConfig:
    functions: dict[str, RewardFunctionConfig] = field(default_factory=dict)  # label (in the metrics) -> function
    num_workers: int = 4  # processes a rank
    timeout_s: float = 30.0  # seconds a call; then its process is killed and the sample is unscored
    max_unscored_steps: int = 5  # steps in a row without one scored sample after which the run is saved and ended
