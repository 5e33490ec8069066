"""Models with random weights in the shape of real ones, and prompts for them: benchmarks need no download.

    make_model("Qwen2.5-1.5B-Instruct", folder)     shapes/<name>/config.json -> weights in bfloat16, a tokenizer
    make_model("tiny", folder)                      a model of a few thousand weights, for trying a script

The tokenizer knows a word for each id ("t17"): a prompt of n words has n tokens and any drawn id has a text. It is in
<folder>/tokenizer, apart from the model's config: beside one, transformers would rebuild it as the family's own class.
Random weights draw nearly uniformly: an answer of 1,024 tokens meets its end token once in 150 answers.
"""

from __future__ import annotations

import random
import zlib
from pathlib import Path

import torch
from filelock import FileLock
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerFast

from cli import SHAPES

TINY = dict(
    vocab_size=515,
    hidden_size=128,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=2048,
    tie_word_embeddings=True,
    bos_token_id=513,
    eos_token_id=514,
)


def shape_config(shape: str) -> PretrainedConfig:
    """Of `tiny`, or of a folder of shapes/ (cli.known_shape)."""
    if shape == "tiny":
        return AutoConfig.for_model("qwen2", **TINY)
    return AutoConfig.from_pretrained(SHAPES / shape)


def make_model(shape: str, folder: Path, device: str = "cpu", seed: int = 0) -> Path:
    """`folder`, filled unless it holds a model already; the same weights for the same shape, device and seed."""
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):  # the ranks of one job all ask
        if not (folder / "tokenizer" / "tokenizer.json").exists():  # written last
            config = shape_config(shape)
            torch.manual_seed(seed)
            with torch.device(device):
                model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            model.save_pretrained(folder)
            del model
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # or the first process's engine finds this much less free
            for place in (folder, folder / "tokenizer"):  # an engine of TRL's wants one beside the model
                make_tokenizer(config).save_pretrained(place)
    return folder


def make_tokenizer(config: PretrainedConfig) -> PreTrainedTokenizerFast:
    """A word an id. The beginning-of-text id pads."""
    special = {config.bos_token_id: "<|endoftext|>", config.eos_token_id: "<|im_end|>"}
    words = {special.get(index, f"t{index}"): index for index in range(config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in special.values()])
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    end, pad = special[config.eos_token_id], special[config.bos_token_id]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token=pad)


def make_prompts(count: int, words: int, vocab: int) -> list[str]:
    """Texts of `words` tokens each, all different."""
    generator = random.Random(0)
    return [" ".join(f"t{generator.randrange(vocab - 2)}" for _ in range(words)) for _ in range(count)]


def reward_of(response: str) -> float:
    """A number in [0, 1) that differs from answer to answer and costs nothing."""
    return zlib.crc32(response.encode()) % 1000 / 1000
