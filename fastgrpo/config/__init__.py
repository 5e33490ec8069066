"""The configuration: the schema, the rules that it must obey, and the numbers that follow from it.

    schema.py   every option, its default and its unit; reward_schema.py those of `reward`
    build.py    plain documents (YAML) <-> the schema; types and unknown keys
    names.py    what verl's and TRL's names are called here
    layout.py   the numbers that follow from the options and the number of ranks
    resume.py   which options a resumed run may have otherwise
    notes.py    what is unlikely to be meant
    rules.py    one function a rule; `check` runs them all

It imports neither torch nor vllm nor hydra, so that a mistake is answered in milliseconds and every shipped experiment
is checked on a laptop.
"""

from fastgrpo.config.build import build, option_keys, to_document
from fastgrpo.config.layout import Layout, total_steps
from fastgrpo.config.notes import notes
from fastgrpo.config.resume import changed_options, leaves
from fastgrpo.config.reward_schema import AnswerMode, RegexRule, RewardConfig, RewardFunctionConfig, RewardKind
from fastgrpo.config.rules import check, check_model, heads_divide
from fastgrpo.config.schema import (
    BEAT_S,
    ActorConfig,
    AdvEstimator,
    AlgorithmConfig,
    ArithmeticConfig,
    Attention,
    BestMode,
    DataConfig,
    Device,
    Dtype,
    FilterGroupsConfig,
    FsdpConfig,
    HeadImpl,
    KlCtrl,
    KlCtrlConfig,
    KlType,
    LimitsConfig,
    LossAgg,
    ModelConfig,
    OptimConfig,
    PolicyLoss,
    RefConfig,
    RolloutConfig,
    RolloutCorrectionConfig,
    RolloutIs,
    RolloutRs,
    RunConfig,
    Schedule,
    TrainerConfig,
    Truncation,
    ValidationSampling,
    compute_dtype,
    loads_reference,
    needs_reference,
    rollout_seconds,
    uses_reference,
)

__all__ = [
    "BEAT_S",
    "ActorConfig",
    "AdvEstimator",
    "AlgorithmConfig",
    "AnswerMode",
    "ArithmeticConfig",
    "Attention",
    "BestMode",
    "DataConfig",
    "Device",
    "Dtype",
    "FilterGroupsConfig",
    "FsdpConfig",
    "HeadImpl",
    "KlCtrl",
    "KlCtrlConfig",
    "KlType",
    "Layout",
    "LimitsConfig",
    "LossAgg",
    "ModelConfig",
    "OptimConfig",
    "PolicyLoss",
    "RefConfig",
    "RegexRule",
    "RewardConfig",
    "RewardFunctionConfig",
    "RewardKind",
    "RolloutConfig",
    "RolloutCorrectionConfig",
    "RolloutIs",
    "RolloutRs",
    "RunConfig",
    "Schedule",
    "TrainerConfig",
    "Truncation",
    "ValidationSampling",
    "build",
    "changed_options",
    "check",
    "check_model",
    "compute_dtype",
    "heads_divide",
    "leaves",
    "loads_reference",
    "needs_reference",
    "notes",
    "option_keys",
    "rollout_seconds",
    "to_document",
    "total_steps",
    "uses_reference",
]
