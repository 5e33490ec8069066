"""Frozen records that the stages of a step hand each other. Nothing here computes.

Prompt -> Request -> Rollout -> Sample (with its Score) -> (advantages) -> MicroBatch -> StepRecord

Shape suffixes, used across the project:
    P prompts of a step          G samples a prompt (rollout.n)      N = P * G sequences
    T packed tokens of one SP group's micro-batch, padded to a multiple of sp
    U = T / sp tokens on this rank       L tokens of one response    H hidden    V vocabulary    D head size
    B sequences in one micro-batch       R rows of U that carry a loss weight
Arrays that travel between ranks are numpy; tensors appear from MicroBatch on.

The three logprobs keep three names everywhere and all mean the full-vocabulary softmax at the sampling temperature:
    sampler_logprobs  the engine's, when it drew the token
    old_logprobs      the trainer's, with the weights that the rollout was made with
    logprobs          the trainer's, now
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Prompt:
    """One task. Example: Prompt("gsm8k/train/17", (1, 9690, ...), "What is 3 + 4?", "7", {"level": 1})."""

    uid: str  # unique in its data set, the same in every run over the same data
    ids: tuple[int, ...]  # after the chat template, exactly what the engine reads and the trainer scores
    text: str  # what the user said, for rewards and for the eye
    reference: str | None  # the right answer, if the data has one
    meta: Mapping[str, Any]  # the data row, also what `text` and `reference` were made of


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence that an engine shall draw. `seed` is a pure function of (run seed, step, attempt, uid, sample)."""

    uid: str
    sample: int  # 0 <= sample < G
    attempt: int  # 0, or the later round of dynamic sampling that drew it
    ids: tuple[int, ...]
    seed: int  # 0 <= seed < 2**63
    max_tokens: int
    expected_tokens: float = 0.0  # a guess of the response's length, to order by; 0: none


@dataclass(frozen=True, slots=True)
class Sampling:
    """How an engine draws. `temperature` 0 is greedy."""

    temperature: float
    top_p: float
    top_k: int  # -1 = all
    min_p: float
    repetition_penalty: float

    @property
    def keeps_full_vocabulary(self) -> bool:
        """Whether the engine's logprobs after processing are those of the full softmax at `temperature`."""
        return self.top_p == 1 and self.top_k <= 0 and self.min_p == 0 and self.repetition_penalty == 1


@dataclass(frozen=True, slots=True)
class Rollout:
    """One drawn sequence. The end token, when one was drawn, is part of the response."""

    uid: str
    sample: int
    attempt: int
    prompt_ids: tuple[int, ...]
    response_ids: np.ndarray  # [L] int32
    response_mask: np.ndarray  # [L] bool: tokens that the policy drew (tool output, when there is any, is false)
    sampler_logprobs: np.ndarray | None  # [L] float32; None: not comparable or not asked for
    finish_reason: str  # "stop": an end token was drawn; "length": max_tokens reached; "time": rollout.max_seconds
    weight_version: int  # updates the weights had seen
    seconds: float = 0.0  # from the start of its engine's call to its last token; 0: the engine does not say

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def truncated(self) -> bool:
        """Whether it was cut, by its length or by the clock, before it came to an end of its own."""
        return self.finish_reason != "stop"


@dataclass(frozen=True, slots=True)
class RewardRequest:
    """What a reward function sees of one sample."""

    prompt: str
    response: str  # decoded, without special tokens
    reference: str | None
    meta: Mapping[str, Any]
    step: int
    uid: str = ""  # of the prompt
    sample: int = 0
    num_tokens: int = 0  # of the response, its end token included
    response_ids: bytes = b""  # int32 in the machine's order, its end token included


STATUSES = ("scored", "unscored", "timeout", "error")  # of a Score, from best to worst


@dataclass(frozen=True, slots=True)
class Score:
    """One sample's reward. `total` is None when any function of nonzero weight could not score it."""

    total: float | None
    parts: Mapping[str, float | None]  # label of the function -> its own score, unweighted
    details: Mapping[str, float]  # further metrics, e.g. {"rules/rule_0": 1.0} for a rule that matched
    status: str  # "scored", "unscored" (a function returned None), "timeout", "error"; the worst of those with a weight
    error: str | None = None  # label and first line of what a function raised
    pred: str | None = None  # the answer that was found in the response, where a function tells it; what maj@n counts


@dataclass(frozen=True, slots=True)
class Sample:
    """A rollout, what it says and what it is worth: what ranks exchange."""

    rollout: Rollout
    response: str  # decoded, without special tokens
    score: Score


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One row of packed sequences with positions that restart, as one SP group sees it; every rank of the group holds
    all T tokens and slices its own U. Targets are shifted before packing: targets_T[t] is the token after t in the
    same sequence, and everything of token t below speaks of drawing targets_T[t].

    Example (sp 2, prompt [5 6], response [7 2], then one pad): input_ids_T = [5 6 7 0], targets_T = [6 7 2 0],
    loss_mask_T = [0 1 1 0], positions_T = [0 1 2 0], cu_seqlens = [0 3 4]. The last token of a response is never an
    input: nothing is drawn after it.
    """

    input_ids_T: Tensor  # int64
    targets_T: Tensor  # int64
    positions_T: Tensor  # int64, restart at each sequence
    seq_id_T: Tensor  # int64, index into the sequences of this micro-batch; B for padding
    loss_mask_T: Tensor  # bool: targets that the policy drew
    weights_T: Tensor  # float32: factor of the token's loss in the sum; holds every normaliser (batch/denominators.py)
    advantages_T: Tensor  # float32
    sampler_logprobs_T: Tensor | None  # float32
    cu_seqlens: Tensor  # [B + 1 (+ 1 with padding)] int32, cumulative lengths; the padding is a sequence of its own
    max_seqlen: int
    rows: tuple[int, ...]  # [B] index of each sequence in the step's N rollouts

    @property
    def num_tokens(self) -> int:
        return self.input_ids_T.numel()


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one step was. Lists over prompts, then samples. `metrics` is the row of metrics.jsonl."""

    step: int
    rewards_PG: list[list[float | None]]
    group_means_P: list[float | None]
    advantages_PG: list[list[float]]
    responses_PG: list[list[str]]
    loss: float
    kl: float | None  # mean over tokens of the KL estimate; None without a KL term
    timings: Mapping[str, float]  # seconds: gen, reward, old, ref, update, sync, step
    metrics: Mapping[str, float]
