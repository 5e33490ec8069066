"""Turns what a configuration calls a model or a data set into files on this machine.

A name is a local folder when it looks like one (it exists, or starts with `.`, `/` or `~`), else an id on the Hugging
Face hub. A local name never leads to a look-up on the hub. Whatever can go wrong ends in one `UserError` that says what
to do: nothing there, a gate, no network (with the way around it), a full disk (before the download starts).

Several processes of one node may ask at once: a lock file lets one download, and the others find its files. There is no
process group here, because the configuration is checked before one exists.

Data sets are read from the hub's own parquet conversion (revision `refs/convert/parquet`, files
`<config>/<split>/*.parquet`), which exists for public data sets whatever their original format. Private ones have none:
give local files instead.
"""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any, Literal

import httpx
import huggingface_hub
from filelock import FileLock
from huggingface_hub.errors import (
    DryRunError,
    GatedRepoError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from fastgrpo.errors import UserError

RepoType = Literal["model", "dataset"]

TEXT_FILES = ["*.json", "*.txt", "*.model", "*.jinja", "*.py"]  # .py only ever runs with model.trust_remote_code
WEIGHT_FILES = ["*.safetensors"]
# Subfolders hold other formats of the same weights, and so do consolidated files beside the sharded ones.
UNWANTED_FILES = ["*/*", "consolidated*"]
PARQUET_REVISION = "refs/convert/parquet"
DISK_RESERVE = 2**30  # bytes left free by a download
GIB = 2**30


def resolve_model(path: str, *, need_weights: bool = True, option: str = "model.path") -> Path:
    """Folder with config.json and (unless `need_weights` is false) complete safetensors weights of `path`, a folder or
    a hub id. `option` is the configuration key that the messages name."""
    folder = _local_folder(path, option)
    if folder is None:
        patterns = TEXT_FILES + (WEIGHT_FILES if need_weights else [])
        folder = _download(path, "model", patterns, option, revision=None)
    missing = _missing_from_model(folder, need_weights)
    if missing:
        raise UserError(f"{option}={path}: {folder} is not a complete model folder: {missing}")
    return folder


def read_model_config(folder: Path, option: str, *, trust_remote_code: bool) -> Any:
    """transformers' PretrainedConfig of a model folder. UserError where transformers does not know the model, or would
    have to run code that comes with it."""
    from transformers import AutoConfig  # here: others ask for files alone

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, OSError, ImportError) as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UserError(
            f"{option}: {folder / 'config.json'} cannot be used by this transformers: {reason.strip()} If the model "
            "brings code of its own that you trust, set model.trust_remote_code=true; if its type is newer than "
            "transformers, upgrade that"
        ) from error


def resolve_tokenizer(path: str, *, option: str = "model.tokenizer_path") -> Path:
    """Folder with the tokenizer files of `path`, a folder or a hub id. What they hold is checked on loading."""
    return _local_folder(path, option) or _download(path, "model", TEXT_FILES, option, revision=None)


def resolve_dataset(repo_id: str, config: str | None, split: str, *, option: str = "data.train_files") -> list[Path]:
    """Parquet files of one split of a hub data set, in order. `config` None means the hub's `default`."""
    pattern = f"{config or 'default'}/{split}/*.parquet"
    folder = _download(repo_id, "dataset", [pattern], option, revision=PARQUET_REVISION)
    files = sorted(folder.glob(pattern))
    if not files:  # the hub was not reached, and the cache holds another split
        raise UserError(f"{option}={repo_id}: {pattern} is not in the cache: {_by_hand(repo_id, 'dataset', option)}")
    return files


def looks_local(path: str) -> bool:
    """Whether `path` names something on this machine, there or missing, rather than a hub id."""
    return path.startswith((".", "/", "~")) or Path(path).exists()


def _local_folder(path: str, option: str) -> Path | None:
    if not path:
        raise UserError(
            f"{option} is empty: set it to a folder or to a Hugging Face id such as Qwen/Qwen2.5-7B-Instruct"
        )
    if not looks_local(path):
        return None
    folder = Path(path).expanduser().resolve()
    if not folder.exists():
        raise UserError(f"{option}={path}: there is no folder {folder}")
    if not folder.is_dir():
        raise UserError(f"{option}={path} is a file: give the folder that holds config.json and *.safetensors")
    return folder


def _missing_from_model(folder: Path, need_weights: bool) -> str | None:
    """What keeps `folder` from being loaded, with the remedy, or None."""
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            return "it holds an adapter and no config.json; merge the adapter into its base model and save that"
        return "config.json is missing; give the folder that a model was saved to (save_pretrained) or downloaded to"
    if not need_weights:
        return None
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        names = sorted(file.name for file in folder.glob("*.safetensors"))
    if not names:
        others = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for file in folder.glob(pattern))
        if others:
            return (
                f"no *.safetensors file, only {', '.join(others)}; load that with transformers and save_pretrained it"
            )
        return "there are no weights, no *.safetensors file; download the whole repository with `hf download`"
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        return f"{len(absent)} of {len(names)} weight files are missing, first {absent[0]}; download or copy it again"
    pointers = [name for name in names if _is_lfs_pointer(folder / name)]
    if pointers:
        return f"{pointers[0]} is a Git LFS pointer, not weights; run `git lfs pull` there or use `hf download`"
    return None


def _is_lfs_pointer(file: Path) -> bool:
    with file.open("rb") as stream:
        return stream.read(40).startswith(b"version https://git-lfs")


def _download(repo_id: str, repo_type: RepoType, patterns: list[str], option: str, revision: str | None) -> Path:
    request: dict[str, Any] = {"repo_id": repo_id, "repo_type": repo_type, "revision": revision}
    request |= {"allow_patterns": patterns, "ignore_patterns": UNWANTED_FILES if repo_type == "model" else None}
    try:
        return _fetch(request, option)
    except (HFValidationError, httpx.HTTPError, OSError, RuntimeError) as error:  # RuntimeError: the xet transport
        raise UserError(_explain(error, repo_id, repo_type, option)) from error


def _fetch(request: dict[str, Any], option: str) -> Path:
    try:
        files = huggingface_hub.snapshot_download(**request, dry_run=True)
    except DryRunError as error:  # the hub cannot be asked: an earlier download will do, else its reason counts
        try:
            return Path(huggingface_hub.snapshot_download(**request, local_files_only=True))
        except FileNotFoundError:
            raise (error.__cause__ or error) from None
    if not files:
        raise UserError(_nothing_matches(request, option))
    if not any(file.will_download for file in files):  # no lock: the cache may be shared and read-only
        return Path(huggingface_hub.snapshot_download(**request))
    cache = Path(huggingface_hub.constants.HF_HUB_CACHE)
    locks = cache / ".locks"
    locks.mkdir(parents=True, exist_ok=True)
    with FileLock(locks / f"fastgrpo-{request['repo_type']}--{request['repo_id'].replace('/', '--')}.lock"):
        # Another process may have finished while this one waited.
        wanted = sum(file.file_size or 0 for file in files if not Path(file.local_path).exists())
        free = shutil.disk_usage(cache).free
        if wanted and wanted + DISK_RESERVE > free:
            raise UserError(
                f"{option}={request['repo_id']}: {wanted / GIB:.1f} GiB to download (and 1 GiB to spare), but "
                f"{cache} has {free / GIB:.1f} GiB free: make room, or set HF_HOME to a folder on a larger disk"
            )
        return Path(huggingface_hub.snapshot_download(**request))


def _nothing_matches(request: dict[str, Any], option: str) -> str:
    repo_id, revision = request["repo_id"], request["revision"]
    if request["repo_type"] == "model":
        return f"{option}={repo_id}: that repository on the hub holds no model files ({', '.join(TEXT_FILES)})"
    config, split, _ = request["allow_patterns"][0].split("/")
    names = huggingface_hub.HfApi().list_repo_files(repo_id, repo_type="dataset", revision=revision)
    there = sorted({"/".join(name.split("/")[:2]) for name in names if name.endswith(".parquet")})
    return (
        f"{option}={repo_id}: no split `{split}` of a configuration `{config}`; there are (configuration/split) "
        f"{', '.join(there) or 'none'}: set data.hub_config, data.train_split and data.val_split"
    )


def _explain(error: Exception, repo_id: str, repo_type: RepoType, option: str) -> str:
    """The message for whatever the hub's client raised."""
    what = f"{option}={repo_id}"
    by_hand = _by_hand(repo_id, repo_type, option)
    if isinstance(error, HFValidationError):
        return f"{what} is neither a {'folder' if repo_type == 'model' else 'file'} here nor a hub id (owner/name)"
    if isinstance(error, GatedRepoError):
        return (
            f"{what} is gated: accept its terms on its page on the hub, then log in with `hf auth login` or set "
            f"HF_TOKEN to a token of that account"
        )
    if isinstance(error, RepositoryNotFoundError):
        kind, here = ("model", "folder") if repo_type == "model" else ("data set", "file")
        return (
            f"{what}: no such {kind} on the hub and no such {here} here: check the spelling; if it is private, log in "
            f"with `hf auth login` or set HF_TOKEN"
        )
    if isinstance(error, RevisionNotFoundError):
        return f"{what}: the hub offers no parquet conversion of it (private data sets have none): {by_hand}"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"{what}: the disk of the cache filled up while downloading: make room, or set HF_HOME to a larger disk"
    if isinstance(error, PermissionError):
        return f"{what}: cannot write to the cache ({error}): set HF_HOME to a folder of your own, or {by_hand}"
    reason = str(error).partition("\n")[0]
    return f"{what}: the hub cannot be reached ({reason}) and the files are not in the cache: {by_hand}"


def _by_hand(repo_id: str, repo_type: RepoType, option: str) -> str:
    if repo_type == "model":
        return (
            f"on a machine with network run `hf download {repo_id} --local-dir DIR`, copy DIR here and set {option}=DIR"
        )
    return (
        f"on a machine with network run `hf download {repo_id} --repo-type dataset --local-dir DIR`, copy DIR here and "
        f"set {option} to its .parquet, .jsonl or .json files"
    )
