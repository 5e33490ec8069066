"""Regex rewards with values worked out by hand, and what build_rewards refuses before anything runs."""

import re
from pathlib import Path

import pytest

from fastgrpo.config import RegexRule, RewardConfig, RewardFunctionConfig, RewardKind
from fastgrpo.errors import ConfigError, UserError
from fastgrpo.reward import build_rewards, rules
from fastgrpo.reward.function import Setting

ZH = [
    RegexRule(pattern="谢谢您的提问！$", score=1.0),
    RegexRule(pattern="^.*[。！？]$", score=0.2),
    RegexRule(pattern=".*[a-zA-Z].*", score=-0.5),
]


def score(rule_list: list[RegexRule], response: str) -> dict[str, float]:
    function = rules.build("r", RewardFunctionConfig(kind=RewardKind["rules"], rules=rule_list), Setting(1.0, 8)).load()
    return function(response=response)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("response", "total", "hits"),
    [
        ("北京是首都。谢谢您的提问！", 1.2, [1, 1, 0]),
        ("谢谢您的提问！ \n", 1.2, [1, 1, 0]),  # trailing space is removed
        ("第一行\n谢谢您的提问！", 1.0, [1, 0, 0]),  # `.` stops at the end of a line
        ("我叫 AI。", -0.3, [0, 1, 1]),
        ("AI 谢谢您的提问！", 0.7, [1, 1, 1]),
        ("谢谢您的提问！好", 0.0, [0, 0, 0]),
        ("是吗？", 0.2, [0, 1, 0]),
        ("", 0.0, [0, 0, 0]),
        ("hello", -0.5, [0, 0, 1]),
    ],
)
def test_chinese_rules(response: str, total: float, hits: list[int]) -> None:
    result = score(ZH, response)
    assert result.pop("score") == pytest.approx(total, abs=1e-12)
    assert result == {f"rule_{i}": float(hit) for i, hit in enumerate(hits)}


@pytest.mark.parametrize(
    ("pattern", "flags", "response", "hit"),
    [
        ("^b$", "", "a\nb", 0.0),
        ("^b$", "m", "a\nb", 1.0),
        ("^b$", "mi", "a\nB", 1.0),
        ("a.b", "s", "a\nb", 1.0),
        (r"^\w$", "", "é", 1.0),
        (r"^\w$", "a", "é", 0.0),
        ("a b  # comment", "x", "ab", 1.0),
    ],
)
def test_flags(pattern: str, flags: str, response: str, hit: float) -> None:
    result = score([RegexRule(pattern=pattern, score=2.0, flags=flags)], response)
    assert result == {"score": 2.0 * hit, "rule_0": hit}


def config(**kwargs: object) -> RewardConfig:
    return RewardConfig(functions={"mine": RewardFunctionConfig(**kwargs)})  # type: ignore[arg-type]


def of_rules(**kwargs: object) -> RewardConfig:
    return config(kind=RewardKind["rules"], rules=[RegexRule(pattern="a"), RegexRule(**kwargs)])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (RewardConfig(), "{mine: {kind: custom, path: my_reward.py"),
        (config(kind=RewardKind["rules"]), "functions.mine is of kind rules and has none"),
        (of_rules(pattern="(a", score=1.0), "rules[1].pattern '(a' is no regular expression: missing )"),
        (of_rules(pattern="", score=1.0), "rules[1].pattern is empty"),
        (of_rules(pattern="a", flags="iq"), "rules[1].flags is 'iq': q unknown"),
        (of_rules(pattern="a", score=float("nan")), "rules[1].score is nan"),
        (config(), "functions.mine is of kind custom and has no path"),
        (config(path="nowhere/r.py"), "there is no file"),
        (config(kind=RewardKind["gsm8k"], weight=float("inf")), "functions.mine.weight is inf"),
        (config(kind=RewardKind["gsm8k"], weight=0.0), "every weight in reward.functions is 0"),
        (RewardConfig(functions=config(kind=RewardKind["gsm8k"]).functions, num_workers=0), "num_workers is 0"),
        (RewardConfig(functions=config(kind=RewardKind["gsm8k"]).functions, timeout_s=0.0), "timeout_s is 0.0"),
    ],
)
def test_refused_at_start(reward: RewardConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        build_rewards(reward)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def score(response): ...\ndef other(): ...", "defines no compute_score. It defines score, other."),
        ("x = 1", "defines no compute_score. It defines no function."),
        ("def compute_score(:", "is not valid Python"),
        (
            "def compute_score(solution_str, gold, level): ...",
            "requires the parameters gold, level, which no reward is given. It is called with prompt, response, "
            "reference, meta, step, uid, sample, num_tokens (name those it needs, give others a default); a column of "
            'the data is meta["gold"]. Write it as `def compute_score(prompt, response, reference, meta, step)',
        ),
        ("def compute_score(response, *, strictness): ...", "requires the parameter strictness"),
    ],
)
def test_file_is_refused_without_running_it(tmp_path: Path, source: str, message: str) -> None:
    path = tmp_path / "r.py"
    path.write_text(source + f"\nopen({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ConfigError, match=re.escape(message)):
        build_rewards(config(path=str(path)))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "source",
    [
        "def compute_score(response, extra=1, **kwargs): ...",
        "compute_score = lambda response: 1.0",
        "from math import exp as compute_score",
        "from os.path import *",
        "try:\n    import x\nexcept ImportError:\n    def compute_score(step): ...",
        "@wrapped\ndef compute_score(anything): ...",
        "async def compute_score(response): ...",
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None): ...",
        "def compute_score(prompts, completions, answer, **kwargs): ...",
    ],
)
def test_file_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    (tmp_path / "r.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    assert build_rewards(config(path="r.py")).functions[0].source == f"compute_score in {tmp_path / 'r.py'}"


def test_callable_is_refused() -> None:
    with pytest.raises(UserError, match=r"reward 'wrong' .*requires the parameter length"):
        build_rewards(RewardConfig(), wrong)
    with pytest.raises(UserError, match="3, which cannot be called"):
        build_rewards(RewardConfig(), 3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="label 'good' is used"):
        build_rewards(RewardConfig(functions={"good": RewardFunctionConfig(kind=RewardKind["gsm8k"])}), good)
    lock = __import__("threading").Lock()
    with pytest.raises(UserError, match="cannot be sent to a worker process: TypeError"):
        build_rewards(RewardConfig(), lambda response: lock)


def wrong(length: int) -> float:
    return float(length)


def good(response: str) -> float:
    return 1.0
