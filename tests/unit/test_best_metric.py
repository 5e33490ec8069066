"""trainer.best_metric against the metrics that a run really has, made here by the functions that log them."""

import pytest
from test_summary import config_of, sample

from fastgrpo.best_metric import check_best_metric
from fastgrpo.config import RewardFunctionConfig, RunConfig
from fastgrpo.errors import ConfigError
from fastgrpo.evaluate import summarise
from fastgrpo.groups import make_groups
from fastgrpo.records import Score
from fastgrpo.summary import length_metrics, reward_metrics


def run_with(metric: str | None, n: int = 4) -> RunConfig:
    config = RunConfig()
    config.trainer.best_metric, config.rollout.val_kwargs.n = metric, n
    config.reward.functions = {"right": RewardFunctionConfig()}
    return config


@pytest.mark.parametrize("n", [1, 4, 6])
def test_every_metric_that_is_logged_may_be_named(n: int) -> None:
    score = Score(1.0, {"right": 1.0}, {"right/rule_0": 1.0}, "scored", pred="7")
    drawn = [sample(1.0, uid=f"openai/gsm8k/val/{i}") for i in range(2) for _ in range(n)]
    samples = [type(s)(s.rollout, s.response, score) for s in drawn]
    validation = summarise(samples, 1.0).metrics
    assert f"val/openai/gsm8k/pass@{n}/low" in validation and "val/reward/right/rule_0" in validation
    training = reward_metrics(samples, make_groups(samples, config_of(n))) | length_metrics(
        [s.rollout for s in samples]
    )
    for metric in (*validation, *training, "actor/entropy", "gap/abs_mean", "perf/mfu"):
        check_best_metric(run_with(metric, n), {"openai/gsm8k"})


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        ("val/one/pass@7", r"best_metric=val/one/pass@7 is no metric of this run; did you mean val/one/pass@1\?"),
        ("val/one/maj@1", r"with rollout\.val_kwargs\.n=1 .* val/one/mean@1, val/one/pass@1, val/one/scored"),
        ("val/two/pass@1", r"did you mean val/one/pass@1\?"),
        ("reward/nix", "there are reward/mean, reward/std"),
        ("reward/kl", "there are reward/mean"),  # not without the KL in the reward
        ("reward/part/wrong", r"did you mean reward/part/right\?"),
        ("reward", "there are reward/mean"),
        ("entropy", "and what begins with actor/, gap/"),
    ],
)
def test_one_that_cannot_come_is_refused_with_what_there_is(metric: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        check_best_metric(run_with(metric, 1), {"one"})


def test_what_cannot_be_known_is_let_through() -> None:
    check_best_metric(run_with(None), set())
    in_python = run_with("reward/part/score")
    in_python.reward.functions = {}
    check_best_metric(in_python, set())
    in_reward = run_with("reward/kl")
    in_reward.algorithm.use_kl_in_reward = True
    check_best_metric(in_reward, set())
