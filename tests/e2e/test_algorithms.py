"""Steps of whole trainers on a CPU with a tiny model, one an algorithm: what the options change, seen in the record."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import yaml
from cases import one_process

from fastgrpo import RunConfig, Trainer
from fastgrpo.config import build
from fastgrpo.data import epoch_order
from fastgrpo.paths import config_dir
from fastgrpo.records import RewardRequest, Score
from fastgrpo.reward import Rewards

PROMPTS = ["Say hello.", "Name a colour.", "Count."]


def length(response: str) -> float:
    return len(set(response)) / 10


@pytest.fixture
def trainer(tiny_model, monkeypatch) -> Iterator[Callable[..., Trainer]]:
    """`trainer(document)`: three prompts, three samples each, one process. Rewards come without worker processes, whose
    start would take most of these tests' time."""
    rewards: list[Callable[[str], float]] = []

    def score(self: Rewards, requests: Sequence[RewardRequest]) -> list[Score]:
        scores = [rewards[-1](request.response) for request in requests]
        return [Score(score, {"reward": score}, {}, "scored") for score in scores]

    def make(document: dict[str, Any], reward: Callable[[str], float] = length) -> Trainer:
        rewards.append(reward)
        return Trainer(config_of(str(tiny_model), document), prompts=PROMPTS, reward=reward)

    monkeypatch.setattr(Rewards, "start", lambda self: None)
    monkeypatch.setattr(Rewards, "score", score)
    with one_process():
        yield make


def config_of(model: str, document: dict[str, Any]) -> RunConfig:
    base = {
        "model": {"path": model},
        "data": {"train_batch_size": 3, "max_prompt_length": 64, "max_response_length": 8},
        "rollout": {"name": "hf", "n": 3},
        "trainer": {"device": "cpu", "max_steps": 2},
        "actor": {"use_kl_loss": False, "optim": {"lr": 1e-3}},
    }
    return build(merge(base, document))


def merge(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in more.items():
        out[key] = merge(out[key], value) if isinstance(value, dict) and isinstance(out.get(key), dict) else value
    return out


def test_kl_in_the_reward_with_an_adaptive_coefficient(trainer):
    """At step 1 policy and reference are one, at step 2 they are not: the penalty and the coefficient follow."""
    ctrl = {"type": "adaptive", "kl_coef": 0.5, "target_kl": 0.1, "horizon": 90}
    t = trainer({"algorithm": {"use_kl_in_reward": True, "kl_penalty": "k3", "kl_ctrl": ctrl}})
    first = t.step()
    assert first.metrics["reward/kl_penalty"] == pytest.approx(0, abs=1e-5)
    assert t.stages.kl_controller.coef == pytest.approx(0.5 * (1 - 0.2 * 9 / 90))  # far below the target
    second = t.step()
    assert second.metrics["reward/kl_penalty"] > 1e-4
    assert (first.metrics["reward/kl_coef"], second.metrics["reward/kl_coef"]) == pytest.approx((0.5, 0.49))
    assert first.metrics["reward/kl"] == pytest.approx(0, abs=1e-5) and 1e-6 < second.metrics["reward/kl"] < 1
    assert second.kl is None  # no KL term in the loss
    rewards = [r for group in second.rewards_PG for r in group]
    assert all(r is not None and abs(r * 10 - round(r * 10)) < 1e-9 for r in rewards)  # scores are shown as they are


def test_rejection_takes_sequences_out_of_the_counts(trainer):
    """A bound that nothing meets: every sequence is rejected, no update is made, and it is said."""
    correction = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 1 + 1e-12}
    record = trainer(
        {"algorithm": {"rollout_correction": correction | {"rollout_rs_threshold_lower": 1.0 + 1e-13}}}
    ).step()
    share = record.metrics["rollout_corr/rollout_rs_seq_masked_fraction"]
    assert share > 0.5 and record.metrics["actor/trained_tokens"] < 9 * 8
    kept = trainer(
        {"algorithm": {"rollout_correction": {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 2.0}}}
    ).step()
    assert kept.metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == 0
    assert kept.metrics["actor/trained_tokens"] > 0


def test_bypass_takes_the_engines_logprobs_for_old(trainer):
    t = trainer({"algorithm": {"rollout_correction": {"bypass_mode": True}}, "actor": {"ppo_epochs": 2}})
    record = t.step()
    assert "old" in record.timings and record.metrics["actor/updates"] == 2
    assert record.metrics["actor/ratio_max"] > 1.001  # the second pass sees other weights
    assert record.metrics["gap/abs_mean"] < 1e-4  # the gap speaks of the first alone
    assert record.metrics["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=1e-4)


def test_dynamic_sampling_goes_on_through_the_data_and_resumes(tiny_model, trainer):
    """A reward that never differs: every round is drawn, the step is filled up, and the order has moved on by as much.
    One that does differ: as many rounds as it takes, and a run that takes over its state draws the same."""
    filtering = {"enable": True, "max_num_gen_batches": 3}
    document = {"algorithm": {"filter_groups": filtering}, "data": {"train_batch_size": 1}}
    t = trainer(document, reward=lambda response: 1.0)
    record = t.step()
    assert record.metrics["filter_groups/gen_batches"] == record.metrics["filter_groups/drawn"] == 3
    assert record.metrics["filter_groups/filled_up"] == 1 and record.metrics["reward/zero_signal_groups"] == 1
    assert t.stages.order.state() == {"batches": 3}
    assert t._rows[0]["uid"] == t.stages.train.prompts[epoch_order(3, 0, 0, True)[0]].uid

    one, two = trainer(document), trainer(document)
    first = one.step()
    assert first.metrics["filter_groups/gen_batches"] >= 1 and first.metrics["reward/zero_signal_groups"] == 0
    two.stages.order.load_state(one.stages.order.state())
    assert [p.uid for p in two.stages.order.take()] == [p.uid for p in one.stages.order.take()]


def test_a_run_resumed_amid_dynamic_sampling_and_adaptive_kl_goes_on_the_same(trainer):
    """With learning rate 0 the weights need no checkpoint: the rest is what a checkpoint keeps as JSON."""
    ctrl = {"type": "adaptive", "kl_coef": 0.5, "horizon": 90}
    document = {
        "algorithm": {"filter_groups": {"enable": True}, "use_kl_in_reward": True, "kl_ctrl": ctrl},
        "data": {"train_batch_size": 2, "gen_batch_size": 1},
        "actor": {"optim": {"lr": 0.0}},
    }
    one, two = trainer(document), trainer(document)
    one.step()
    for name, state in json.loads(json.dumps({name: part.state() for name, part in one.stateful.items()})).items():
        if name != "actor":
            two.stateful[name].load_state(state)
    first, second = one.step(), two.step()
    assert [row["uid"] for row in one._rows] == [row["uid"] for row in two._rows]
    assert (first.responses_PG, first.advantages_PG) == (second.responses_PG, second.advantages_PG)
    assert one.stages.order.state() == two.stages.order.state() and one.stages.order.state()["batches"] >= 4
    assert one.stages.kl_controller.coef == two.stages.kl_controller.coef < 0.5


def test_filtered_answers_do_not_train_and_are_still_measured(trainer):
    """A random model never stops by itself here: every answer is cut off, so nothing is left to learn from."""
    record = trainer({"algorithm": {"overlong_filtering": True}, "data": {"max_response_length": 2}}).step()
    truncated = record.metrics["response_length/truncated"]
    assert truncated > 0.5 and record.metrics["response_length/filtered"] == truncated
    assert record.metrics["response_length/max"] == 2
    if truncated == 1:
        assert (record.loss, record.metrics["actor/skipped_updates"]) == (0.0, 1.0)


PRESETS = sorted((config_dir() / "algorithm").glob("*.yaml"))


@pytest.mark.parametrize("preset", PRESETS, ids=lambda file: file.stem)
def test_two_steps_of_each_preset(trainer, preset):
    """Two passes over each rollout, so that ratios leave 1 and bounds may act."""
    t = trainer(merge(yaml.safe_load(preset.read_text(encoding="utf-8")), {"actor": {"ppo_epochs": 2}}))
    for _ in range(2):
        metrics = t.step().metrics
        assert metrics["actor/updates"] == 2 and metrics["actor/skipped_updates"] == 0
        assert metrics["actor/grad_norm"] > 0 and all(math.isfinite(x) for x in metrics.values())
        assert metrics["actor/ratio_max"] > 1.0001
    assert ("reward/kl_penalty" in metrics) == (preset.stem in ("rloo", "reinforce_pp"))
    assert ("filter_groups/drawn" in metrics) == (preset.stem == "dapo")


ALGORITHMS = {
    "gspo": {
        "actor": {"policy_loss": "gspo", "loss_agg_mode": "seq-mean-token-mean", "ppo_epochs": 2},
        "algorithm": {"rollout_correction": {"rollout_is": "sequence"}},
    },
    "cispo": {"actor": {"policy_loss": "cispo", "clip_ratio_low": 1.0, "clip_ratio_high": 4.0, "ppo_epochs": 2}},
    "sapo": {"actor": {"policy_loss": "sapo", "ppo_epochs": 2}, "algorithm": {"adv_estimator": "rloo"}},
    "dppo_tv": {"actor": {"policy_loss": "dppo_tv", "ppo_epochs": 2}, "algorithm": {"adv_estimator": "opo"}},
    "geo_mean": {"actor": {"policy_loss": "geo_mean", "ppo_epochs": 2}, "algorithm": {"adv_estimator": "grpo_passk"}},
    "reinforce": {
        "actor": {"policy_loss": "reinforce", "entropy_coeff": 0.01},
        "algorithm": {"adv_estimator": "reinforce_plus_plus", "rollout_correction": {"rollout_is": "icepop"}},
    },
    "baseline": {
        "actor": {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3+"},
        "algorithm": {"adv_estimator": "reinforce_plus_plus_baseline"},
    },
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_two_steps_of_each(trainer, name):
    t = trainer(ALGORITHMS[name])
    for _ in range(2):
        record = t.step()
        updates = record.metrics["actor/updates"]
        assert updates == ALGORITHMS[name]["actor"].get("ppo_epochs", 1)
        assert record.metrics["actor/skipped_updates"] == 0 and record.metrics["actor/grad_norm"] > 0
        assert all(math.isfinite(x) for x in record.metrics.values())
        assert record.metrics["gap/abs_mean"] < 1e-4
