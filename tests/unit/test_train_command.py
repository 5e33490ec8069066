"""The command as typed: files, overrides, messages, exit statuses. No model is loaded here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastgrpo import train
from fastgrpo.errors import ConfigError, RunError
from fastgrpo.torchrun import STATUS_FILE
from fastgrpo.train import main, read_config


def refusal(*argv: str) -> str:
    with pytest.raises(ConfigError) as refused:
        read_config(argv)
    return str(refused.value)


def command(*argv: str, launcher: tuple[str, ...] = ("-m", "fastgrpo.train"), cwd: Path | None = None, **environ: str):
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES")}
    repository = str(Path(train.__file__).parents[1])
    kept["PYTHONPATH"] = os.pathsep.join([repository, kept.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *launcher, *argv],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=kept | {"CUDA_VISIBLE_DEVICES": ""} | environ,
        timeout=120,
    )


def test_what_ends_a_run_is_one_line_and_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(argv: object) -> int:
        raise RunError("the disk is full")

    monkeypatch.setattr(train, "run", run)
    monkeypatch.setenv(STATUS_FILE, str(tmp_path / "status"))
    assert main(["+exp=quickstart"]) == 1
    assert capsys.readouterr() == ("", "fastgrpo: the disk is full\n")
    assert (tmp_path / "status").read_text() == "-1"  # the ranks' own exit codes decide: one may have been killed


def test_overrides_with_and_without_plus() -> None:
    for plus in ("", "+", "++"):
        config = read_config([f"{plus}exp=quickstart" if plus != "++" else "+exp=quickstart", f"{plus}rollout.n=3"])
        assert config.rollout.n == 3
    config = read_config(
        [
            "+exp=quickstart",
            "data.max_response_length=${data.max_prompt_length}",
            "reward.functions.mine.kind=custom",
            "reward.functions.mine.path=my.py",
            "trainer.logger=[console,wandb]",
            "actor.optim.lr=1e-6",
            "trainer.max_steps=null",
        ]
    )
    assert config.data.max_response_length == config.data.max_prompt_length
    assert config.reward.functions["mine"].path == "my.py"
    assert config.trainer.logger == ["console", "wandb"]
    assert config.actor.optim.lr == 1e-6
    assert config.trainer.max_steps is None


def test_own_file_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.yaml").write_text("exp: quickstart\nrollout: {n: 3}\nactor: {optim: {lr: 1e-4}}\n")
    (tmp_path / "hydra_style.yaml").write_text("defaults: [quickstart]\nrollout: {n: 5}\n")
    (tmp_path / "alone.yaml").write_text("# @package _global_\nmodel: {path: my/model}\n")
    monkeypatch.chdir(tmp_path)
    base = read_config(["+exp=quickstart"])
    mine = read_config(["+exp=mine.yaml"])
    assert (mine.rollout.n, mine.actor.optim.lr) == (3, 1e-4)
    assert (mine.model, mine.data) == (base.model, base.data)
    assert read_config([f"exp={tmp_path}/mine.yaml", "rollout.n=7"]).rollout.n == 7  # overrides come last
    hydra_style = read_config(["+exp=hydra_style.yaml"])
    assert (hydra_style.rollout.n, hydra_style.model) == (5, base.model)
    alone = read_config(["+exp=alone.yaml"])
    assert (alone.model.path, alone.data.train_files) == ("my/model", [])
    assert "did you mean +exp=mine.yaml?" in refusal("+exp=mine")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("rolout: {n: 3}", "unknown key rolout.n: did you mean rollout.n"),
        ('rollout: {n: "3"}', "rollout.n must be a whole number, not the text '3'"),
        ("a: [", "cannot be composed: while parsing"),
        ("- 3", "the file is no mapping of keys"),
        ("3", "cannot be composed"),
        ("exp: nope", "there is no experiment nope, which it builds on"),
        (
            "exp: mine.yaml",
            "exp: mine.yaml is a file, and a file builds on a shipped experiment alone: write exp: NAME",
        ),
        ("model: {path: '???'}", "model.path is left open (???); set model.path=..."),
    ],
)
def test_own_file_with_a_mistake(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(content)
    assert message in refusal(f"+exp={file}")


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("rollout.nn=3", "unknown key rollout.nn: did you mean rollout.n "),
        ("+rollout.nn=3", "unknown key rollout.nn: did you mean rollout.n "),
        ("actor_rollout_ref.rollout.n=3", "verl's; here it is rollout.n"),
        ("+num_generations=8", "TRL's; here it is rollout.n"),
        ("rollout.n='8'", "rollout.n must be a whole number, not the text '8'"),
        ("trainer.max_steps=None", "an empty value is written null"),
        ("actor.use_kl_loss=yes", "actor.use_kl_loss must be true or false, not the text 'yes'"),
        ("rollout.n.x=3", "rollout.n must be a whole number, not {'x': 3}"),
        ("rollout.n=1,2", "gives several values"),
        ("rollout.n=(", "cannot be read"),
        ("rollout.n=${data.nope}", "cannot be composed: Interpolation key 'data.nope' not found"),
        ("rollout", "'rollout' is no option: write key=value"),
        ("--rollout.n=3", "without dashes; write rollout.n=3"),
        ("--num_generations", "unknown key num_generations: TRL's; here it is rollout.n"),
        ("hydra.run.dir=x", "without hydra's own options and groups"),
        ("hydra/launcher=x", "without hydra's own options and groups"),
        ("trainer.max_steps=???", "trainer.max_steps is left open (???)"),
        ("~rollout.nope", "Could not delete from config"),
    ],
)
def test_argument_with_a_mistake(argument: str, message: str) -> None:
    assert message in refusal("+exp=quickstart", argument)


@pytest.mark.parametrize(
    ("argv", "first_line"),
    [
        ([], "no experiment given: add +exp=NAME"),
        (["+exp=gsm8k_8xa10"], "there is no experiment 'gsm8k_8xa10'; did you mean +exp=gsm8k_8xa100?"),
        (["+exp=quickstart", "exp=rules_zh"], "+exp=quickstart and +exp=rules_zh: a run has one experiment"),
        (["+exp=nowhere/mine.yaml"], "+exp=nowhere/mine.yaml: there is no file"),
    ],
)
def test_without_a_known_experiment(argv: list[str], first_line: str) -> None:
    lines = refusal(*argv).splitlines()
    assert lines[0].startswith(first_line)
    if len(lines) > 1:
        assert lines[1:] == train.list_experiments().splitlines()


def test_help_lists_the_experiments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("usage: torchrun -m fastgrpo.train +exp=NAME [key=value ...]")
    assert train.list_experiments() in out


def test_mistakes_end_with_status_2_and_one_message(tmp_path: Path) -> None:
    done = command("+exp=quickstart", "rollout.n=1", "data.train_batch_size=0", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    first, *lines = done.stderr.splitlines()
    assert first == "fastgrpo:"
    assert [line.split("=")[0] for line in lines] == ["  data.train_batch_size", "  rollout.n"]
    assert list(tmp_path.iterdir()) == []  # no folder of hydra's


def test_too_few_gpus_end_with_one_clear_message() -> None:
    done = command("+exp=gsm8k_8xa100")
    assert done.returncode == 2
    assert done.stderr == (
        "fastgrpo: 8 GPUs wanted on this node (trainer.n_gpus_per_node=8, trainer.device=auto), 0 found; run it where "
        "there are 8, or set trainer.device=cpu for a try-out with a tiny model\n"
    )


def test_several_ranks_print_a_mistake_once() -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "fastgrpo.train")
    done = command("+exp=quickstart", "rollout.n=1", launcher=launcher, OMP_NUM_THREADS="1")
    assert done.returncode != 0
    assert done.stderr.count("fastgrpo: rollout.n=1") == 1
    message, torchruns_summary = done.stderr.index("fastgrpo: rollout.n=1"), done.stderr.index("exitcode  : 2")
    assert message < torchruns_summary
    assert 'File "' not in done.stderr.split("fastgrpo.train FAILED")[0].split("Traceback")[0]


def test_interrupts_end_with_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(argv: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "run", interrupted)
    assert main(["+exp=quickstart"]) == 130
    out, err = capsys.readouterr()
    assert out.startswith("interrupted: ") and out.count("\n") == 1 and err == ""


def test_every_active_reward_is_shown() -> None:
    own = [
        "+reward.functions.capital.kind=custom",
        "reward.functions.capital.path=a.py",
        "reward.functions.capital.weight=0.5",
    ]
    assert train.rewards_line(train.read_config(["+exp=quickstart", *own])).split(maxsplit=1)[1] == (
        "answer (gsm8k) x 1 + capital (custom) x 0.5"
    )


@pytest.mark.parametrize("where", ["file/runs", "file"])
def test_a_run_folder_that_cannot_be_made_is_refused_early(
    where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["+exp=quickstart", f"trainer.run_dir={tmp_path / where}"]) == 2
    assert "cannot write into" in capsys.readouterr().err
