"""Files from elsewhere run no code, secrets are not written down, and a run is nobody else's to read."""

from __future__ import annotations

import ast
import json
import pickle
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from fastgrpo import RunConfig, Trainer
from fastgrpo.checkpoint.index import read_index
from fastgrpo.checkpoint.tensors import read_tensors
from fastgrpo.config import DataConfig, Device, ModelConfig, RewardConfig, RolloutConfig, TrainerConfig, option_keys
from fastgrpo.errors import UserError
from fastgrpo.provenance import environment
from fastgrpo.redact import redact

ROOT = Path(__file__).resolve().parents[2]


class Attack:
    """Unpickled, it writes a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return exec, (f"open({str(self.target)!r}, 'w').write('ran')",)


# ---- files from elsewhere


@pytest.mark.parametrize("wrap", [lambda attack: attack, lambda attack: {"a": [attack]}])
def test_an_index_runs_no_code(wrap: Callable[[Any], Any], tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(wrap(Attack(tmp_path / "ran"))))
    with pytest.raises(pickle.UnpicklingError, match=r"it names builtins\.exec, which no index of a checkpoint needs"):
        read_index(tmp_path)
    assert not (tmp_path / "ran").exists()
    (tmp_path / ".metadata").write_bytes(pickle.dumps({}))
    with pytest.raises(pickle.UnpicklingError, match="holds a dict, no index"):
        read_index(tmp_path)


class ByGetattr:
    """Pickled as Python 3.11.0 to 3.11.3 pickle the member of an enumeration."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name

    def __reduce__(self) -> tuple[Any, tuple[Any, str]]:
        return getattr, (self.owner, self.name)


def test_members_of_enumerations_are_read_as_every_python_writes_them(tmp_path: Path) -> None:
    for member in _MEM_FORMAT_ENCODING:
        assert read_pickled(tmp_path, ByGetattr(_MEM_FORMAT_ENCODING, member.name)) is member
        assert read_pickled(tmp_path, member) is member


@pytest.mark.parametrize(
    ("owner", "name"),
    [(Metadata, "__init__"), (_MEM_FORMAT_ENCODING, "__class__"), (_MEM_FORMAT_ENCODING, "mro"), (torch.Size, "numel")],
)
def test_nothing_else_is_reached_through_getattr(tmp_path: Path, owner: Any, name: str) -> None:
    with pytest.raises(pickle.UnpicklingError, match=f"for {name}, no member of an enumeration; it was not loaded"):
        read_pickled(tmp_path, ByGetattr(owner, name))


def read_pickled(folder: Path, value: Any) -> Any:
    """`value` as a part of an index, written and read."""
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata({}, planner_data=value)))
    return read_index(folder).planner_data


@pytest.mark.filterwarnings("ignore")
def test_an_index_of_every_dtype_is_read_and_a_shard_runs_no_code(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8)
    tensors: dict[str, Any] = {f"t{i}": torch.ones(2, dtype=dtype) for i, dtype in enumerate(dtypes)}
    dcp.save(tensors, checkpoint_id=tmp_path, no_dist=True)
    index = read_index(tmp_path)
    empty: dict[str, Any] = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    read_tensors(tmp_path, empty, index)
    assert all(torch.equal(empty[name], tensors[name]) for name in tensors)

    [shard] = tmp_path.glob("*.distcp")
    shard.write_bytes(pickle.dumps(Attack(tmp_path / "ran")).ljust(shard.stat().st_size, b"\0"))
    with pytest.raises(Exception):  # noqa: B017  torch's, whichever
        read_tensors(tmp_path, empty, index)
    assert not (tmp_path / "ran").exists()


def calls() -> Iterator[tuple[str, str, dict[str, str]]]:
    """(file, name of the function, keyword arguments) of every call in the package."""
    for path in sorted((ROOT / "fastgrpo").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                keywords = {one.arg: ast.unparse(one.value) for one in node.keywords if one.arg}
                yield path.relative_to(ROOT).as_posix(), ast.unparse(node.func), keywords


def test_nothing_else_unpickles() -> None:
    """But a worker what its own trainer sends it, and a rank what the others of its job say."""
    ours = {"fastgrpo/reward/worker.py", "fastgrpo/checkpoint/words.py"}
    loads = [(file, name) for file, name, _ in calls() if name in ("pickle.load", "pickle.loads", "cloudpickle.loads")]
    assert {file for file, _ in loads} <= ours
    unsafe = [call for call in calls() if call[1] == "torch.load" and call[2].get("weights_only") != "True"]
    assert unsafe == []


def test_code_of_a_checkpoint_runs_only_when_asked_for() -> None:
    assert ModelConfig().trust_remote_code is False
    auto = [
        (file, name, keywords)
        for file, name, keywords in calls()
        if name.startswith("Auto") and name.endswith((".from_pretrained", ".from_config"))
    ]
    assert len(auto) >= 8
    assert [call[:2] for call in auto if "trust_remote_code" not in call[2]] == []
    assert [call[:2] for call in auto if call[2]["trust_remote_code"] == "True"] == []


def test_a_model_folder_with_code_is_refused(tiny_model: Path, tmp_path: Path, mesh: Any) -> None:
    config = json.loads((tiny_model / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.Model"}}
    folder = tmp_path / "model"
    folder.mkdir()
    for file in tiny_model.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    run = RunConfig(
        model=ModelConfig(path=str(folder)),
        data=DataConfig(train_batch_size=1, max_prompt_length=32, max_response_length=2),
        rollout=RolloutConfig(name="hf", n=2),
        trainer=TrainerConfig(device=Device["cpu"]),
    )
    with pytest.raises(UserError, match=r"^model\.path: .* set model\.trust_remote_code=true"):
        Trainer(run, prompts=["a"], reward=lambda response: 1.0)
    run.model.path, run.ref.path = str(tiny_model), str(folder)
    with pytest.raises(UserError, match=r"^ref\.path: .* set model\.trust_remote_code=true"):
        Trainer(run, prompts=["a"], reward=lambda response: 1.0)
    assert not (tmp_path / "ran").exists()


# ---- secrets

SECRETS = {
    "https://me:hunter2@host.example/v1": "https://***@host.example/v1",
    "clone https://ghp_abcdefghijklmnopqrstuvwx@host/x.git": "clone https://***@host/x.git",
    "https://host/v1?api_key=abc123&n=2": "https://host/v1?api_key=***&n=2",
    "https://host/?x=1&X-Amz-Signature=abc": "https://host/?x=***&X-Amz-Signature=***",
    "https://u:p@SECRET@host/": "https://***@host/",
    "https://bob:pw@m/x?sig=SECRET": "https://***@m/x?sig=***",
    "at http://h/v1?access=abc&n=2&api-version=3;x=y#token=abc.": "at http://h/v1?access=***&n=2&api-version=3;x=***#***",
    "https://h?SECRET": "https://h?***",
    "/score?pwd=hunter2&a=b": "/score?pwd=***&a=b",
    "x eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2ln-bmF0 y": "x *** y",
    "AKIAABCDEFGHIJKLMNOP": "***",
    "HF says hf_AbCdEfGhIjKlMnOpQrSt is not valid": "HF says *** is not valid",
    "sk-proj-abcdefghijklmnop1234 was used": "*** was used",
    "Authorization: Bearer abc.def-ghi": "Authorization: Bearer ***",
}
HARMLESS = [
    "https://host.example/v1/chat?n=2",
    "ssh to me@host.example",
    "actor.max_tokens_per_gpu=8192 keys: a=b",
    "data.train_files=[a@b.jsonl]",
    "hf_hub is a name",
    "sk-learn-pipelines-of-all-kinds",
    "http://host:8000/v1/chat@2",
]


@pytest.mark.parametrize("text", SECRETS)
def test_secrets_are_hidden(text: str) -> None:
    assert redact(text) == SECRETS[text] == redact(SECRETS[text])


@pytest.mark.parametrize("text", HARMLESS)
def test_the_rest_stays(text: str) -> None:
    assert redact(text) == text


def test_variables_are_listed_ones_without_secrets_in_their_values() -> None:
    environ = {
        "HF_ENDPOINT": "https://me:hunter2@hub.example",
        "NCCL_DEBUG": "INFO",
        "AWS_SECRET_ACCESS_KEY": "x",
        "WANDB_API_KEY": "x",
        "HF_TOKEN": "x",
        "OPENAI_ORG": "x",
        "NCCL_SIGNALS": "1",
    }
    environ |= dict.fromkeys(("HF_PWD", "HF_COOKIE", "TORCH_JWT", "VLLM_SAS", "HF_SIG_OLD", "CUDA_SESSION"), "x")
    assert environment(environ) == {"HF_ENDPOINT": "https://***@hub.example", "NCCL_DEBUG": "INFO", "NCCL_SIGNALS": "1"}


def test_no_option_holds_a_key() -> None:
    """Keys come from the environment: an option names the variable."""
    words = ("token", "secret", "password", "api_key", "credential")
    named = [key for key in option_keys() if any(word in key.rpartition(".")[2] for word in words)]
    counts = ("max_tokens_per_gpu", "max_num_batched_tokens", "max_tokens", "tokenizer_path", "api_key_env")
    assert [key for key in named if not key.endswith(counts)] == []


# ---- whose the files are


def test_a_run_folder_is_private(tiny_model: Path, tmp_path: Path, mesh: Any) -> None:
    config = RunConfig(
        model=ModelConfig(path=str(tiny_model)),
        data=DataConfig(train_batch_size=1, max_prompt_length=32, max_response_length=2),
        reward=RewardConfig(num_workers=1),
        rollout=RolloutConfig(name="hf", n=2),
        trainer=TrainerConfig(device=Device["cpu"], run_dir=str(tmp_path / "runs"), max_steps=1, logger=[]),
    )
    Trainer(config, prompts=["Say it."], reward=lambda response: float(len(response))).run()
    [run] = (tmp_path / "runs").iterdir()
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    [start] = (run / "starts.jsonl").read_text().splitlines()
    assert "environment" in json.loads(start) and "PATH" not in json.loads(start)["environment"]
