"""Fixtures for all tests: tiny models made on the spot, data and a real model where they are at hand, and ranks.

FASTGRPO_TEST_DATA   folder with gsm8k/{train,test}.jsonl        (default: shared/data beside the checkout)
FASTGRPO_TEST_MODEL  SmolLM2-135M-Instruct as a Hugging Face folder (default: where `make quickstart` puts it)
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]  # ids 0 to 3
MERGES = [("t", "h"), ("th", "e"), ("i", "n"), ("e", "r"), ("o", "n"), ("a", "n"), ("1", "0")]


@pytest.fixture(scope="session")
def make_tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`make_tiny_model("llama", tied=True, num_hidden_layers=3)` -> a Hugging Face folder, the same for the same call.

    A random float32 model with a byte-level tokenizer (any text, 267 tokens, ChatML), 2 layers, hidden 128,
    4 heads of 32 (the smallest that vLLM's CPU attention takes), 2 KV heads. Keywords go to the model's config.
    """
    made: dict[str, Path] = {}

    def make(family: str = "qwen2", *, tied: bool = False, seed: int = 0, **config: Any) -> Path:
        key = json.dumps([family, tied, seed, config], sort_keys=True)
        if key not in made:
            made[key] = tmp_path_factory.mktemp(f"tiny-{family}")
            _save_tokenizer(made[key])
            _save_model(made[key], family, tied, seed, config)
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny_model(make_tiny_model: Callable[..., Path]) -> Path:
    """A small random Qwen2 with untied embeddings, see `make_tiny_model`."""
    return make_tiny_model()


@pytest.fixture(scope="session")
def gsm8k_dir() -> Path:
    """Folder with GSM8K's train.jsonl and test.jsonl; the test is skipped where it is missing."""
    folder = Path(os.environ.get("FASTGRPO_TEST_DATA", ROOT.parent / "shared" / "data")) / "gsm8k"
    if not (folder / "train.jsonl").exists():
        pytest.skip(f"no GSM8K in {folder}; set FASTGRPO_TEST_DATA")
    return folder


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct; the test is skipped where it is missing."""
    folder = Path(os.environ.get("FASTGRPO_TEST_MODEL", ROOT / ".cache" / "smollm2-135m-instruct"))
    if not (folder / "config.json").exists():
        pytest.skip(f"no SmolLM2 in {folder}; run `make quickstart` or set FASTGRPO_TEST_MODEL")
    return folder


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    """This process alone as the trainer's mesh, for tests that need FSDP but no second rank."""
    from cases import one_process

    with one_process() as alone:
        yield alone


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Any]]:
    """`ranks(n)` -> the session's RankPool of n processes in a gloo group (tests/dist/pool.py)."""
    from pool import RankPool

    pools: dict[int, RankPool] = {}
    yield lambda size: pools.setdefault(size, RankPool(size))
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Whole runs in processes that may be killed (tests/dist/small_runs.py)."""
    from small_runs import SmallRuns

    server = SmallRuns(tmp_path_factory.mktemp("outputs"))
    yield server
    server.close()


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    entries = [*SPECIAL_TOKENS, *alphabet, *(left + right for left, right in MERGES)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(entries)}, merges=MERGES))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|endoftext|>", eos_token="<|im_end|>", pad_token="<|pad|>"
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def _save_model(folder: Path, family: str, tied: bool, seed: int, config: dict[str, Any]) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "vocab_size": len(SPECIAL_TOKENS) + 256 + len(MERGES),
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 3,
        "initializer_range": 0.1,  # far enough from uniform for a wrong weight to show in the logprobs
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        settings = AutoConfig.for_model(family, tie_word_embeddings=tied, **(sizes | config))
        model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:  # biases start at 0 and norms at 1: one that was lost would go unnoticed
                    parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
