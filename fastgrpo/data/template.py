"""From a row's prompt to token ids: the tokenizer, the messages and the chat template, applied once and for all.

The ids made here are what the engine reads and the trainer scores; nothing is tokenised a second time. Special tokens
come from the template alone, never from the tokenizer besides, so a template that writes BOS gives exactly one BOS and
one that does not gives none. Text only: a message's content is a string.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from jinja2 import TemplateError

from fastgrpo.config import DataConfig, ModelConfig
from fastgrpo.data.sources import find_file
from fastgrpo.errors import UserError
from fastgrpo.hub import resolve_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Message = dict[str, Any]

# `model.chat_template=plain`: the contents of the messages, one below the other, and nothing else. Whether BOS comes
# first is the tokenizer's convention, which the name of this template in front of it settles.
PLAIN = "{% for message in messages %}{{ message['content'] }}{% if not loop.last %}{{ '\\n' }}{% endif %}{% endfor %}"
OUR_ARGUMENTS = {"conversation", "tokenize", "return_dict", "return_tensors", "padding", "truncation", "max_length"}
BATCH = 1024  # conversations tokenised at once: bounds the memory of the tokenizer's intermediate records


def load_tokenizer(model: ModelConfig, model_dir: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of `model.tokenizer_path` or else `model_dir`, with the chat template that `model` asks for.

    Raises UserError when there is no tokenizer, or none of the two has a chat template.
    """
    from transformers import AutoTokenizer  # takes seconds to import

    folder = resolve_tokenizer(model.tokenizer_path) if model.tokenizer_path else model_dir
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError, ImportError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"no tokenizer can be loaded from {folder} ({reason}): set model.tokenizer_path to a folder or hub id with "
            f"tokenizer files, or put tokenizer.json and tokenizer_config.json there"
        ) from error
    if model.chat_template == "plain":
        tokenizer.chat_template = ("{{ bos_token }}" if _adds_bos(tokenizer) else "") + PLAIN
    elif model.chat_template is not None:
        tokenizer.chat_template = find_file(model.chat_template, "model.chat_template").read_text(encoding="utf-8")
    if not tokenizer.chat_template:
        raise UserError(
            f"the tokenizer in {folder} has no chat template, as is usual for base models: set "
            f"model.chat_template=plain (the text of the prompt and nothing else) or to a Jinja file"
        )
    return tokenizer


def _adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    return tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]


def to_messages(prompt: Any, data: DataConfig, where: str) -> list[Message]:
    """Chat messages of a prompt: a string is one user message, a list of {role, content} stays as it is.

    `data.system_prompt` comes first unless the list begins with a system message of its own; an empty string puts an
    empty system message there, which keeps templates that bring a default one (SmolLM2, Qwen2.5) from using it.
    `data.prompt_suffix` is appended to the last user message. `where` names the row in messages of errors.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else _checked_messages(prompt, where)
    if not messages or not any(message["content"] for message in messages):
        raise UserError(f"{where}: the prompt in `{data.prompt_key}` is empty")
    if messages[-1]["role"] == "assistant" and not data.apply_chat_template_kwargs.get("continue_final_message"):
        raise UserError(
            f"{where}: the last message is the assistant's, so the prompt would hold the answer: take it out, or set "
            f"data.apply_chat_template_kwargs={{continue_final_message: true, add_generation_prompt: false}}"
        )
    if data.system_prompt is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": data.system_prompt})
    if data.prompt_suffix:
        last = _last_user(messages)
        if last is None:
            raise UserError(f"{where}: no user message to append data.prompt_suffix={data.prompt_suffix!r} to")
        messages[last] = {**messages[last], "content": messages[last]["content"] + data.prompt_suffix}
    return messages


def what_the_user_said(messages: Sequence[Message]) -> str:
    """Content of the last user message (of the last message when there is none)."""
    last = _last_user(messages)
    return messages[-1 if last is None else last]["content"]


def _last_user(messages: Sequence[Message]) -> int | None:
    return next((i for i in reversed(range(len(messages))) if messages[i]["role"] == "user"), None)


def _checked_messages(prompt: Any, where: str) -> list[Message]:
    if not isinstance(prompt, Sequence):
        raise UserError(f"{where}: a prompt is a string or a list of {{role, content}}, not {type(prompt).__name__}")
    for message in prompt:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UserError(f"{where}: a message is {{role, content}}, not {str(message)[:80]!r}")
        if not isinstance(message.get("content"), str):
            raise UserError(f"{where}: a message's content is text, not {str(message.get('content'))[:80]!r}")
    # A parquet struct has every key in every message; those that are null were not in the data.
    return [{key: value for key, value in message.items() if value is not None} for message in prompt]


def encode(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[list[Message]],
    template_kwargs: Mapping[str, Any],
    where: Callable[[int], str],
) -> list[list[int]]:
    """Token ids of each conversation after the chat template, opened for the assistant's answer.

    `where(i)` names conversation i in the error of a template that refuses it (UserError).
    """
    ours = OUR_ARGUMENTS & set(template_kwargs)
    if ours:
        raise UserError(f"data.apply_chat_template_kwargs: {', '.join(sorted(ours))} cannot be set: fastgrpo sets it")
    arguments = {"add_generation_prompt": True, **template_kwargs, "tokenize": True, "return_dict": False}
    ids: list[list[int]] = []
    for start in range(0, len(conversations), BATCH):
        batch = list(conversations[start : start + BATCH])
        try:
            ids += cast("list[list[int]]", tokenizer.apply_chat_template(batch, **arguments))
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            index, reason = _first_refused(tokenizer, batch, arguments) or (0, error)
            raise UserError(
                f"{where(start + index)}: the chat template refuses it: {type(reason).__name__}: {reason} (see "
                f"model.chat_template, data.system_prompt, data.apply_chat_template_kwargs)"
            ) from error
    return ids


def _first_refused(tokenizer: PreTrainedTokenizerBase, batch: list, arguments: dict) -> tuple[int, Exception] | None:
    for index, conversation in enumerate(batch):
        try:
            tokenizer.apply_chat_template(conversation, **arguments)
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            return index, error
    return None
