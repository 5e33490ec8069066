"""Trained models as ordinary Hugging Face folders, which transformers and vLLM load as they are.

Written aside and renamed when complete, so a folder that exists is whole. Resuming a run from one is not here: what is
saved is the model.
"""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from fastgrpo.mesh import Mesh
from fastgrpo.policy.model import Policy
from fastgrpo.policy.weights import save_folder


def save_model(policy: Policy, tokenizer: PreTrainedTokenizerBase, folder: Path, mesh: Mesh) -> None:
    """A collective; rank 0 writes. Weights in the dtype that the checkpoint came in. The tokenizer carries the chat
    template that the run used."""
    save_folder(
        folder,
        policy.folder,
        policy.export(),
        policy.stored_dtype,
        write=mesh.is_main,
        extra=tokenizer.save_pretrained,
    )
    mesh.barrier()
