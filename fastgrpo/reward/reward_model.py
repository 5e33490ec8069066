"""Reward from a model (kind `model`): a sequence-classification checkpoint on the trainer's GPU, or any endpoint.

    path    on this rank's device, while the engine sleeps:
            host ──copy──► device: texts -> ids -> batches of like lengths -> logits -> scores; the host keeps its copy
    url     POST {"prompt", "response", "reference"} -> {"score": number or null}

What the model reads: prompt and response as a chat, by its own template (as a pair of texts without one), or the
response alone. The score is the logit of a model with one label (its sigmoid, if asked for); of one with several the
probability of `label`. A text longer than the model reads is unscored, with an error that says so: cut, it would be
another text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastgrpo.errors import UserError
from fastgrpo.records import RewardRequest
from fastgrpo.reward.endpoint import Endpoint, EndpointError, authorization
from fastgrpo.reward.function import LocalReward, Outcome, RewardFunction, Setting, finite

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from fastgrpo.config import RewardFunctionConfig


def build(label: str, config: RewardFunctionConfig, setting: Setting) -> RewardFunction | LocalReward:
    option = f"reward.functions.{label}"
    if config.url is not None:
        header = authorization(config.api_key_env, f"{option}.api_key_env")
        make = partial(Endpoint, config.url, header, config.max_retries, setting.timeout_s)
        return RewardFunction(label, f"model at {config.url}", config.weight, partial(load_endpoint, make))
    from fastgrpo import hub  # with its client library; workers import this module and need neither

    return ModelReward(label, config, hub.resolve_model(config.path or "", option=f"{option}.path"))


def load_endpoint(make: Callable[[], Endpoint]) -> Callable[..., object]:
    endpoint = make()

    async def compute_score(prompt: str, response: str, reference: str | None) -> dict[str, Any]:
        answer, retries = await endpoint.post({"prompt": prompt, "response": response, "reference": reference})
        if not isinstance(answer, dict) or "score" not in answer:
            raise EndpointError(f'the answer is no {{"score": number}}: {str(answer)[:200]}')
        score = finite(answer["score"])
        if score is None and answer["score"] is not None:
            raise EndpointError(f"the score is neither a finite number nor null: {str(answer['score'])[:200]!r}")
        return {"score": score, "retries": float(retries)}

    return compute_score


class ModelReward:
    """Loaded once, from `folder`; the weights are never changed."""

    def __init__(self, label: str, config: RewardFunctionConfig, folder: Path) -> None:
        self.label = label
        self.weight = config.weight
        self._config = config
        self._folder = folder
        where = (
            "on the host" if config.device == "cpu" else "moved to the GPU to score" if config.offload else "on the GPU"
        )
        self.notes = (f"reward {label}: {folder}, {where}",)

    def __str__(self) -> str:
        return f"reward {self.label!r} (model {self._folder})"

    def load(self, device: torch.device) -> None:
        """UserError for a checkpoint without a classification head, and for a `label` that it does not have."""
        import torch

        self._device = torch.device("cpu") if self._config.device == "cpu" else device
        self._model = _load_model(self._folder, self._device, f"reward.functions.{self.label}.path")
        self._tokenizer = _load_tokenizer(self._folder, f"reward.functions.{self.label}.path")
        self._column = _column(self._model, self._config, f"reward.functions.{self.label}")
        self._longest = self._config.max_length or self._model.config.get_text_config().max_position_embeddings
        self._moves = self._device.type != "cpu" and self._config.offload
        if not self._moves:
            self._model.to(self._device)  # type: ignore[arg-type]

    def outcomes(self, requests: Sequence[RewardRequest]) -> list[Outcome]:
        ids = [self._encode(request) for request in requests]
        found = [Outcome("unscored", error=self._too_long(row)) if len(row) > self._longest else None for row in ids]
        order = sorted((i for i, outcome in enumerate(found) if outcome is None), key=lambda i: len(ids[i]))
        size = self._config.micro_batch_size_per_gpu
        with self._on_device():
            for start in range(0, len(order), size):
                chosen = order[start : start + size]
                for i, score in zip(chosen, self._scores([ids[i] for i in chosen]), strict=True):
                    found[i] = Outcome("scored", score) if abs(score) < float("inf") else _not_finite(score)
        return [outcome for outcome in found if outcome is not None]

    def _too_long(self, ids: Sequence[int]) -> str:
        return f"{len(ids)} tokens, more than the {self._longest} that the reward model reads"

    def _encode(self, request: RewardRequest) -> list[int]:
        tokenizer: Any = self._tokenizer
        if self._config.input == "response":
            return tokenizer(request.response)["input_ids"]
        if not tokenizer.chat_template:
            return tokenizer(request.prompt, request.response)["input_ids"]
        messages = [{"role": "user", "content": request.prompt}, {"role": "assistant", "content": request.response}]
        return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)

    def _scores(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """One a row; the same as for the row alone, up to rounding."""
        import torch

        pad = _pad_id(self._tokenizer, rows)
        longest = max(map(len, rows))
        ids_BT = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows], device=self._device)
        mask_BT = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=self._device)
        self._model.config.pad_token_id = pad  # transformers finds the last token of a row by it
        with torch.inference_mode():
            logits_BK = self._model(input_ids=ids_BT, attention_mask=mask_BT).logits.float()
        if logits_BK.shape[1] > 1:
            return logits_BK.softmax(dim=1)[:, self._column].tolist()
        logits_B = logits_BK[:, 0]
        return (logits_B.sigmoid() if self._config.sigmoid else logits_B).tolist()

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """The host's copy stays, so leaving only drops the device's."""
        if not self._moves:
            yield
            return
        import torch

        tensors = [*self._model.parameters(), *self._model.buffers()]
        host = [tensor.data for tensor in tensors]
        for tensor in tensors:
            tensor.data = tensor.data.to(self._device, non_blocking=True)
        try:
            yield
        finally:
            for tensor, data in zip(tensors, host, strict=True):
                tensor.data = data
            if self._device.type == "cuda":
                torch.cuda.empty_cache()  # the memory is the engine's next


def _load_model(folder: Path, device: torch.device, option: str) -> PreTrainedModel:
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForSequenceClassification

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    try:
        model, report = AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=dtype, output_loading_info=True, use_safetensors=True, trust_remote_code=False
        )
    except (ValueError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{option}: {folder} is no sequence-classification model: {reason}") from None
    except SafetensorError as error:
        raise UserError(f"{option}: the weights in {folder} cannot be read ({error}); copy them there again") from None
    if report["missing_keys"]:
        names = ", ".join(sorted(report["missing_keys"])[:3])
        raise UserError(
            f"{option}: {folder} has no weights for {names}, so its scores would be random numbers; give a reward "
            "model (a checkpoint saved from AutoModelForSequenceClassification)"
        )
    return model.eval()


def _load_tokenizer(folder: Path, option: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # without its files transformers fails in many ways, by the model's type
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"{option}: {folder} has no tokenizer that can be loaded ({type(error).__name__}: {reason}); save the "
            "reward model's tokenizer there"
        ) from None


def _column(model: PreTrainedModel, config: RewardFunctionConfig, option: str) -> int:
    """Index of the logit that counts, for a model with several. UserError for `label` or `sigmoid` that do not fit."""
    names, label = model.config.id2label or {}, config.label
    if model.config.num_labels == 1:
        if label is not None:
            raise UserError(f"{option}.label={label} is not read: the model has one label, its logit is the score")
        return 0
    if config.sigmoid:
        raise UserError(
            f"{option}.sigmoid=true is not read: the model has {model.config.num_labels} labels, and the score is the "
            f"probability of the one that {option}.label names"
        )
    known = {str(name): index for index, name in names.items()} | {str(index): index for index in names}
    if label not in known:
        raise UserError(
            f"{option}.label={label}: the model has {model.config.num_labels} labels, set the one whose probability is "
            f"the score: {', '.join(map(str, names.values()))}"
        )
    return int(known[label])


def _pad_id(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Sequence[int]]) -> int:
    """The tokenizer's, or else one that no row holds: where a text may hold the padding (it often is the end token),
    transformers would take an earlier token for its last."""
    used = {token for row in rows for token in row}
    pad = tokenizer.pad_token_id
    if isinstance(pad, int) and pad not in used:
        return pad
    return next(token for token in range(len(tokenizer)) if token not in used)


def _not_finite(score: float) -> Outcome:
    return Outcome("error", error=f"the reward model's score is {score}")
