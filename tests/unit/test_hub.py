"""Models and data sets by folder and by hub id. The hub is a small server in this file, asked by the real client
library in processes of their own, because that library reads its endpoint and cache folder when it is imported."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import unquote, urlparse

import pyarrow
import pyarrow.parquet
import pytest

from fastgrpo.errors import UserError
from fastgrpo.hub import resolve_model

REPO = Path(__file__).resolve().parents[2]
SHA = "a" * 40


# --------------------------------------------------------------------------------------------------- local folders


def model_folder(folder: Path, **files: bytes) -> Path:
    folder.mkdir(parents=True)
    for name, content in {"config.json": b"{}", **{k.replace("__", "."): v for k, v in files.items()}}.items():
        (folder / name).write_bytes(content)
    return folder


def refusal(path: Path | str, **options: object) -> str:
    with pytest.raises(UserError) as caught:
        resolve_model(str(path), **options)  # type: ignore[arg-type]
    return str(caught.value)


def test_complete_folder_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_folder(tmp_path / "m", model__safetensors=b"x")
    assert resolve_model(str(folder)) == folder
    monkeypatch.chdir(tmp_path)
    assert resolve_model("m") == folder == resolve_model("./m")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/m") == folder


def test_weights_are_only_asked_for_where_needed(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    assert resolve_model(str(folder), need_weights=False) == folder
    said = refusal(folder, option="ref.path")
    assert said.startswith(f"ref.path={folder}: ") and "there are no weights, no *.safetensors file" in said


def test_every_shard_of_the_index_must_be_there(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors", "c": "m-1.safetensors"}}
    folder = model_folder(tmp_path / "m", model__safetensors__index__json=json.dumps(index).encode())
    (folder / "m-1.safetensors").write_bytes(b"x")
    assert "1 of 2 weight files are missing, first m-2.safetensors" in refusal(folder)
    (folder / "m-2.safetensors").write_bytes(b"x")
    assert resolve_model(str(folder)) == folder


def test_what_else_a_folder_can_lack(tmp_path: Path) -> None:
    assert f"there is no folder {tmp_path / 'none'}" in refusal(tmp_path / "none")
    assert "there is no folder" in refusal("./none/at-all")  # looks local: the hub is not asked
    (tmp_path / "empty").mkdir()
    assert "config.json is missing" in refusal(tmp_path / "empty")
    adapter = model_folder(tmp_path / "adapter", adapter_config__json=b"{}")
    (adapter / "config.json").unlink()
    assert "it holds an adapter and no config.json" in refusal(adapter)
    pickled = model_folder(tmp_path / "pickled", pytorch_model__bin=b"x")
    assert "no *.safetensors file, only pytorch_model.bin" in refusal(pickled)
    pointer = model_folder(tmp_path / "p", model__safetensors=b"version https://git-lfs.github.com/spec/v1\noid x\n")
    assert "model.safetensors is a Git LFS pointer" in refusal(pointer)
    assert "is a file: give the folder" in refusal(pointer / "model.safetensors")
    assert refusal("").startswith("model.path is empty")
    assert "models/of/mine is neither a folder here nor a hub id (owner/name)" in refusal("models/of/mine")


# --------------------------------------------------------------------------------------------------------- the hub


def _parquet() -> bytes:
    stream = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"question": "hi", "answer": "#### 7"}]), stream)
    return stream.getvalue()


REPOS: dict[str, dict[str, bytes]] = {
    "models/good/model": {
        "config.json": b"{}",
        "tokenizer.json": b"{}",
        "model.safetensors": b"w" * 1000,
        "pytorch_model.bin": b"not wanted",
        "consolidated.safetensors": b"not wanted",
        "onnx/model.safetensors": b"not wanted",
    },
    "models/gated/model": {"config.json": b"{}"},
    "models/huge/model": {"config.json": b"{}", "model.safetensors": b"w"},
    "models/pickled/model": {"config.json": b"{}", "pytorch_model.bin": b"w"},
    "models/other/thing": {"README.md": b"-"},
    "datasets/good/data": {"main/train/0000.parquet": _parquet(), "main/test/0000.parquet": _parquet()},
    "datasets/private/data": {},
}


class Hub(BaseHTTPRequestHandler):
    """The four answers of the hub that the client library needs: repository, tree, file head, file."""

    served: ClassVar[Counter[str]] = Counter()

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        path = unquote(urlparse(self.path).path).strip("/")
        about = path.startswith("api/")
        path = path.removeprefix("api/")
        path = path if path.startswith(("models/", "datasets/")) else f"models/{path}"
        repo, rest = "/".join(path.split("/")[:3]), "/".join(path.split("/")[3:])
        if repo not in REPOS:
            return self._send(401, {"X-Error-Code": "RepoNotFound"}, b"Repository Not Found")
        if "private" in repo and about:
            return self._send(404, {"X-Error-Code": "RevisionNotFound"}, b"Revision Not Found")
        sizes = {name: 10**16 if "huge" in repo else len(content) for name, content in REPOS[repo].items()}
        if about and rest.startswith("tree"):
            tree = [{"type": "file", "path": name, "size": size, "oid": "b" * 40} for name, size in sizes.items()]
            return self._send(200, {"Content-Type": "application/json"}, json.dumps(tree).encode())
        if about:
            info = {"id": repo.split("/", 1)[1], "sha": SHA, "siblings": [{"rfilename": name} for name in sizes]}
            return self._send(200, {"Content-Type": "application/json"}, json.dumps(info).encode())
        name = rest.removeprefix(f"resolve/{SHA}/")
        if "gated" in repo:
            return self._send(403, {"X-Error-Code": "GatedRepo"}, b"Access to model is restricted")
        headers = {"ETag": f'"{hash(name) & 0xFFFFFFFF:x}"', "X-Repo-Commit": SHA}
        if with_body:
            Hub.served[name] += 1
            return self._send(200, headers, REPOS[repo][name])
        self._send(200, {**headers, "Content-Length": str(sizes[name])}, b"")

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def start(calls: list[str], endpoint: str, cache: Path, **environment: str) -> subprocess.Popen[str]:
    """A process that prints, a line each, what the calls return, or `refused: ` and the message of a UserError."""
    code = (
        "from fastgrpo.config import DataConfig\nfrom fastgrpo.data.sources import read_sources\n"
        "from fastgrpo.errors import UserError\nfrom fastgrpo.hub import *\n"
        f"for call in {calls!r}:\n"
        "    try:\n        print(eval(call))\n    except UserError as error:\n        print('refused:', error)"
    )
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and not k.lower().endswith("_proxy")}
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "PYTHONPATH": str(REPO), "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-c", code]
    environment = inherited | settings | environment
    return subprocess.Popen(command, env=environment, cwd=cache, text=True, stdout=-1, stderr=-1)


def ask(calls: list[str], endpoint: str, cache: Path, **environment: str) -> list[str]:
    process = start(calls, endpoint, cache, **environment)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    lines = out.splitlines()
    assert len(lines) == len(calls), out  # every message is one line
    return lines


def test_three_processes_download_once_and_only_what_is_needed(hub: str, tmp_path: Path) -> None:
    Hub.served.clear()
    call = "resolve_model('good/model')"
    processes = [start([call], hub, tmp_path) for _ in range(3)]
    outs = [process.communicate(timeout=60) for process in processes]
    folder = tmp_path / "hub" / "models--good--model" / "snapshots" / SHA
    assert [out.strip() for out, _ in outs] == [str(folder)] * 3, outs
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (folder / "model.safetensors").read_bytes() == b"w" * 1000
    assert Hub.served == {"config.json": 1, "model.safetensors": 1, "tokenizer.json": 1}
    # Afterwards neither a network nor the hub is needed.
    assert ask([call], "http://127.0.0.1:9", tmp_path) == [str(folder)]
    assert ask([call], hub, tmp_path, HF_HUB_OFFLINE="1") == [str(folder)]


def test_refusals_of_the_hub(hub: str, tmp_path: Path) -> None:
    parts = {
        "resolve_model('nobody/nothing')": ["model.path=nobody/nothing: no such model on the hub", "HF_TOKEN"],
        "resolve_model('gated/model', option='ref.path')": ["ref.path=gated/model is gated", "`hf auth login`"],
        "resolve_model('pickled/model')": ["is not a complete model folder", "no weights"],
        "resolve_model('other/thing')": ["other/thing: that repository on the hub holds no model files"],
        "resolve_dataset('nobody/nothing', None, 'train')": ["data.train_files=nobody/nothing: no such data set"],
        "resolve_dataset('private/data', None, 'train')": ["no parquet conversion", "hf download private/data --repo-"],
        "resolve_dataset('good/data', None, 'train')": [
            "no split `train` of a configuration `default`",
            "main/test, main/train",
            "data.hub_config",
        ],
    }
    for line, expected in zip(ask(list(parts), hub, tmp_path), parts.values(), strict=True):
        assert line.startswith("refused: ") and all(part in line for part in expected), line


def test_too_little_disk_is_seen_before_the_download(hub: str, tmp_path: Path) -> None:
    Hub.served.clear()
    (said,) = ask(["resolve_model('huge/model')"], hub, tmp_path)
    # config.json and model.safetensors of 10**16 bytes each
    assert "refused: model.path=huge/model: 18626451.5 GiB to download" in said
    assert "GiB free: make room, or set HF_HOME" in said and not Hub.served


@pytest.mark.parametrize("environment", [{}, {"HF_HUB_OFFLINE": "1"}])
def test_unreachable_hub_names_the_offline_way(tmp_path: Path, environment: dict[str, str]) -> None:
    calls = ["resolve_model('good/model')", "resolve_dataset('good/data', 'main', 'train')"]
    model, data = ask(calls, "http://127.0.0.1:9", tmp_path, **environment)
    assert "model.path=good/model: the hub cannot be reached (" in model
    assert "run `hf download good/model --local-dir DIR`, copy DIR here and set model.path=DIR" in model
    assert "run `hf download good/data --repo-type dataset --local-dir DIR`" in data
    assert "set data.train_files to its .parquet, .jsonl or .json files" in data


def test_tokenizer_comes_without_weights_and_data_from_the_parquet_conversion(hub: str, tmp_path: Path) -> None:
    Hub.served.clear()
    read = "read_sources(DataConfig(val_files=['good/data'], hub_config='main'), 'val', 0)"
    rows = f"[row for source in {read} for row in [source.name, source.origin, *source.rows]]"
    folder, data = ask(["resolve_tokenizer('good/model')", rows], hub, tmp_path)
    assert sorted(file.name for file in Path(folder).iterdir()) == ["config.json", "tokenizer.json"]
    assert data == str(["good/data", "good/data (main/test)", {"question": "hi", "answer": "#### 7"}])
    assert Hub.served == {"config.json": 1, "tokenizer.json": 1, "main/test/0000.parquet": 1}
    # A cache that holds one split and no list of files, as older versions of the client leave it, is no other split.
    shutil.rmtree(tmp_path / "hub" / "datasets--good--data" / "trees", ignore_errors=True)
    (said,) = ask(["resolve_dataset('good/data', 'main', 'train')"], hub, tmp_path, HF_HUB_OFFLINE="1")
    assert "good/data: main/train/*.parquet is not in the cache: on a machine with network run" in said
