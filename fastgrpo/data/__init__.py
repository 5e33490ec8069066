"""Prompts: where they come from, their token ids, and the order in which a run takes them."""

from fastgrpo.data.order import PromptOrder, batch_prompts, epoch_order, steps_per_epoch
from fastgrpo.data.prompts import PromptSet, load_prompts, prompts_from_python
from fastgrpo.data.sources import find_file
from fastgrpo.data.template import load_tokenizer

__all__ = [
    "PromptOrder",
    "PromptSet",
    "batch_prompts",
    "epoch_order",
    "find_file",
    "load_prompts",
    "load_tokenizer",
    "prompts_from_python",
    "steps_per_epoch",
]
