"""The trained model as an ordinary Hugging Face folder, which transformers and vLLM load as it is.

Written aside and renamed when complete, so a folder that exists is whole. A run cannot be resumed from one: it holds
rounded weights and no optimizer.
"""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from fastgrpo.mesh import Mesh
from fastgrpo.policy.model import Policy
from fastgrpo.policy.weights import save_folder


def save_model(policy: Policy, tokenizer: PreTrainedTokenizerBase, folder: Path, mesh: Mesh) -> None:
    """A collective; rank 0 writes. Weights in the dtype that the checkpoint came in. The tokenizer carries the chat
    template that the run used. What rank 0 cannot write raises on every rank."""
    tensors = policy.export()
    failure: Exception | None = None
    try:
        save_folder(
            folder, policy.folder, tensors, policy.stored_dtype, write=mesh.is_main, extra=tokenizer.save_pretrained
        )
    except Exception as error:
        failure = error
        for _ in tensors:  # the other ranks go on gathering
            pass
    others = mesh.broadcast(None if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    if others is not None:
        raise OSError(f"rank 0 could not save {folder} ({others})")
