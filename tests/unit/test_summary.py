"""A step in numbers, by hand: groups, rewards, lengths, means of sums, the rows that are written."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fastgrpo.algorithm.advantage import ADVANTAGES
from fastgrpo.batch.mini_batches import Share, build_mini_batches
from fastgrpo.config import AdvEstimator, RunConfig
from fastgrpo.errors import UserError
from fastgrpo.groups import make_groups
from fastgrpo.metrics import JsonlFile, Sums, loss_metrics, plot_rewards, ratio, write_rows
from fastgrpo.outage import Outage
from fastgrpo.policy.actor import UpdateResult
from fastgrpo.records import Rollout, Sample, Score
from fastgrpo.stopping import Stopped
from fastgrpo.summary import length_metrics, make_record, reward_metrics, tail_seconds


def sample(reward=0.0, *, length=3, reason="stop", status="scored", prompt=2, uid="p", seconds=0.0, **score):
    rollout = Rollout(
        uid=uid,
        sample=0,
        attempt=0,
        prompt_ids=tuple(range(4, 4 + prompt)),
        response_ids=np.full(length, 5, np.int32),
        response_mask=np.ones(length, np.bool_),
        sampler_logprobs=None,
        finish_reason=reason,
        weight_version=0,
        seconds=seconds,
    )
    return Sample(rollout, f"answer {reward}", Score(reward, score.get("parts", {}), score.get("details", {}), status))


def config_of(n, *, by_std=False):
    config = RunConfig()
    config.rollout.n, config.algorithm.norm_adv_by_std_in_grpo = n, by_std
    return config


# ---- groups and rewards


def test_group_advantages_without_std():
    groups = make_groups([sample(reward) for reward in (92, 85, 76, 94, 88)], config_of(5))
    assert groups.advantages_N.tolist() == [5, -2, -11, 7, 1]
    assert groups.means_P.tolist() == [87]
    assert groups.advantages_N.dtype == groups.rewards_N.dtype == torch.float64


def test_groups_are_neighbours_and_an_unscored_sample_is_out():
    totals = [1.0, 0.0, None, 0.5, 0.5, None, None, None, None]
    samples = [sample(total, status="scored" if total is not None else "timeout") for total in totals]
    groups = make_groups(samples, config_of(3))
    assert groups.advantages_N.tolist() == [0.5, -0.5, 0, 0, 0, 0, 0, 0, 0]
    assert groups.means_P[:2].tolist() == [0.5, 0.5] and groups.means_P[2].isnan()
    metrics = reward_metrics(samples, groups)
    assert metrics["reward/zero_signal_groups"] == pytest.approx(2 / 3)
    assert (metrics["reward/scored"], metrics["reward/timeout"], metrics["reward/error"]) == (4, 5, 0)
    assert metrics["reward/mean"] == 0.5 and metrics["reward/std"] == pytest.approx(math.sqrt(0.125))
    assert (metrics["reward/min"], metrics["reward/max"]) == (0, 1)


def test_with_std_the_advantages_are_scaled():
    groups = make_groups([sample(reward) for reward in (1, 0, 0, 1)], config_of(4, by_std=True))
    assert groups.advantages_N.tolist() == pytest.approx([0.8660, -0.8660, -0.8660, 0.8660], abs=1e-4)


@pytest.mark.parametrize("status", ["unscored", "timeout", "error"])
def test_every_status_is_counted(status):
    samples = [sample(None, status=status), sample(None, status=status), sample(2.0), sample(2.0)]
    metrics = reward_metrics(samples, make_groups(samples, config_of(2)))
    assert metrics[f"reward/{status}"] == 2 and metrics["reward/scored"] == 2
    assert metrics["reward/zero_signal_groups"] == 1 and metrics["reward/mean"] == 2


def test_a_step_without_any_score_counts_nothing():
    samples = [sample(None, status=status, parts={"right": None}) for status in ("timeout", "error")]
    for estimator in ADVANTAGES:
        config = config_of(2)
        config.algorithm.adv_estimator = AdvEstimator[estimator]
        groups = make_groups(samples, config)
        assert groups.advantages_N.tolist() == [0, 0] and groups.counted_N.tolist() == [False, False]
    metrics = reward_metrics(samples, groups)
    assert "reward/mean" not in metrics and metrics["reward/zero_signal_groups"] == 1


def test_an_outage_is_a_mistake_at_first_and_later_ends_the_run_saved():
    outage, good = Outage(3, speaks=False), [sample(1.0), sample(None, status="error")]
    nothing = [sample(None, status="timeout"), sample(None, status="error")]
    with pytest.raises(UserError, match=r"none of the step's 2 samples could be scored \(the first: timeout"):
        outage.note(nothing, 0)
    for step, samples in enumerate([nothing, nothing, good, nothing, nothing], start=1):
        outage.note(samples, step)
        outage.check()
    outage.note(nothing, 6)
    with pytest.raises(Stopped, match="3 steps in a row without a scored sample") as stopped:
        outage.check()
    assert stopped.value.exit_code == 1


def test_parts_are_means_over_those_who_have_one():
    samples = [
        sample(1.0, parts={"right": 1.0, "style": 0.5}, details={"style/rule_0": 1.0}),
        sample(0.0, parts={"right": 0.0, "style": None}, details={"style/rule_0": 0.0}),
    ]
    metrics = reward_metrics(samples, make_groups(samples, config_of(2)))
    assert metrics["reward/part/right"] == 0.5 and metrics["reward/part/style"] == 0.5
    assert metrics["reward/part/style/rule_0"] == 0.5


# ---- lengths


def test_lengths_are_those_drawn_whatever_the_loss_leaves_out():
    """4 stopped, 8 hit the limit of 8, 6 stopped; with the truncated one out of the counts the loss has 10 tokens."""
    rollouts = [s.rollout for s in (sample(length=4), sample(length=8, reason="length"), sample(length=6))]
    metrics = length_metrics(rollouts)
    named = {name: metrics[f"response_length/{name}"] for name in ("min", "mean", "max", "stopped_mean", "truncated")}
    assert named == {"min": 4, "mean": 6, "max": 8, "stopped_mean": 5, "truncated": pytest.approx(1 / 3)}
    share = Share(1, 0, 1, 0, 100, None, float, 0)
    for counted, tokens in (([True, False, True], 10), ([True] * 3, 18), ([False] * 3, 0)):
        (mini_batch,) = build_mini_batches(
            rollouts,
            np.ones(3),
            np.array(counted),
            share,
            sequences=3,
            keep_zero_advantage=True,
            loss_agg_mode="token-mean",
            max_response_length=8,
            loss_scale_factor=None,
        )
        weights = torch.cat([batch.weights_R for batch in mini_batch.micro])
        assert mini_batch.loss_tokens == tokens == len(weights)
        assert tokens == 0 or torch.equal(weights, torch.full((tokens,), 1 / tokens))


def test_lengths_when_none_stopped():
    metrics = length_metrics([sample(length=8, reason="length", prompt=5).rollout])
    assert metrics["response_length/truncated"] == 1 and "response_length/stopped_mean" not in metrics
    assert metrics["prompt_length/mean"] == metrics["prompt_length/max"] == 5


# ---- sums and means


def scalars(**values):
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}


def test_sums_add_and_maxima_are_largest(mesh):
    sums = Sums()
    sums.add(scalars(tokens=3, kl=0.5, ratio_max=1.5))
    sums.add(scalars(tokens=4, kl=0.25, ratio_max=1.25))
    assert sums.reduce(mesh) == {"tokens": 7, "kl": 0.75, "ratio_max": 1.5}
    assert Sums().reduce(mesh) == {}


def test_adding_changes_no_tensor_that_was_given(mesh):
    first = scalars(loss=1.0)
    sums = Sums()
    sums.add(first)
    sums.add(scalars(loss=2.0))
    sums.reduce(mesh)
    assert first["loss"] == 1.0


def test_a_mean_is_of_tokens_and_not_of_micro_batches(mesh):
    """2 tokens of KL 3 and 6 of KL 1: 12 / 8, where the mean of the means is 2."""
    sums = Sums()
    for tokens, kl in ((2, 6.0), (6, 6.0)):
        sums.add(scalars(tokens=tokens, kl=kl))
    assert loss_metrics(sums.reduce(mesh))["actor/kl"] == 1.5


def test_loss_metrics_by_hand():
    metrics = loss_metrics(
        {
            "loss": -0.25,
            "tokens": 8.0,
            "clip_high": 1.0,
            "clip_low": 2.0,
            "dual_clip": 4.0,
            "old_kl": 0.4,
            "ratio": 8.8,
            "ratio_max": 1.7,
            "entropy": 16.0,
            "kl": 0.08,
        }
    )
    assert metrics == {
        "actor/loss": -0.25,
        "actor/pg_clipfrac_high": 0.125,
        "actor/pg_clipfrac_low": 0.25,
        "actor/pg_clipfrac_dual": 0.5,
        "actor/ppo_kl": pytest.approx(0.05),
        "actor/ratio_mean": pytest.approx(1.1),
        "actor/ratio_max": 1.7,
        "actor/entropy": 2.0,
        "actor/trained_tokens": 8.0,
        "actor/kl": pytest.approx(0.01),
    }


@pytest.mark.parametrize("sums", [{}, {"loss": 0.0, "tokens": 0.0, "ratio": 0.0, "ratio_max": 0.0, "entropy": 0.0}])
def test_a_step_without_tokens_has_no_means(sums):
    """Neither a ratio of 0 nor an entropy of 0: nothing was measured."""
    assert loss_metrics(sums) == {"actor/loss": 0.0, "actor/trained_tokens": 0.0}
    assert ratio(3.0, 0.0) == 0.0


# ---- the record and the files


def clock_of(**seconds):
    return SimpleNamespace(finish=lambda: seconds, memory={"perf/train_peak_gib": 1.5}, mfu={"perf/mfu": 0.5})


def test_record():
    samples = [sample(reward, length=n) for reward, n in ((1.0, 2), (0.0, 4), (None, 6), (3.0, 8))]
    config = config_of(2)
    groups = make_groups(samples, config)
    sums = {"loss": 0.5, "tokens": 10.0, "kl": 0.2}
    update = UpdateResult(grad_norms=(1.0, 3.0), lr=1e-3, skipped=1)
    record = make_record(7, samples, groups, sums, update, clock_of(gen=1.0, step=4.0), config)
    assert (record.step, record.loss, record.kl) == (7, 0.5, pytest.approx(0.02))
    assert record.rewards_PG == [[1.0, 0.0], [None, 3.0]]
    assert record.advantages_PG == [[0.5, -0.5], [0.0, 0.0]]
    assert record.group_means_P == [0.5, 3.0]
    assert record.responses_PG == [["answer 1.0", "answer 0.0"], ["answer None", "answer 3.0"]]
    metrics = record.metrics
    assert metrics["actor/grad_norm"] == 2.0 and metrics["actor/lr"] == 1e-3
    assert (metrics["actor/updates"], metrics["actor/skipped_updates"]) == (2, 1)
    assert metrics["perf/tokens_per_s"] == (4 * 2 + 2 + 4 + 6 + 8) / 4
    assert record.timings == {"gen": 1.0, "step": 4.0}
    assert metrics["timing_s/gen"] == 1.0 and metrics["perf/train_peak_gib"] == 1.5
    assert metrics["perf/mfu"] == 0.5 and metrics["timing_s/gen_tail"] == 0
    assert metrics["reward/mean"] == pytest.approx(4 / 3)


def test_a_group_without_any_score_has_no_mean():
    samples = [sample(None, status="error"), sample(None, status="error"), sample(1.0), sample(2.0)]
    config = config_of(2)
    update = UpdateResult((), 0.0, 1)
    record = make_record(1, samples, make_groups(samples, config), {}, update, clock_of(step=1.0), config)
    assert record.group_means_P == [None, 1.5] and record.kl is None and record.loss == 0.0
    assert record.metrics["actor/grad_norm"] == 0.0


def test_metrics_file(tmp_path):
    log = JsonlFile(tmp_path / "metrics.jsonl")
    log.log(1, {"a": 1.5, "b": math.nan})
    log.log(2, {"a": math.inf, "b": 2.0})
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]  # before it is closed
    assert rows == [{"step": 1, "a": 1.5, "b": None}, {"step": 2, "a": None, "b": 2.0}]
    log.close()
    again = JsonlFile(tmp_path / "metrics.jsonl")  # a resumed run appends
    again.log(3, {})
    again.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_rows_keep_their_text(tmp_path):
    write_rows(tmp_path / "new" / "rows.jsonl", [{"response": "谢谢您的提问！\n"}, {"response": "“ü”"}])
    text = (tmp_path / "new" / "rows.jsonl").read_text(encoding="utf-8")
    assert [json.loads(line)["response"] for line in text.splitlines()] == ["谢谢您的提问！\n", "“ü”"]
    assert "谢谢" in text


@pytest.mark.parametrize("validation", [[], [(0, 0.1), (3, 0.4)]])
def test_reward_curve(tmp_path, validation):
    plot_rewards(tmp_path / "rewards.png", [1, 2, 3], [0.1, 0.2, 0.4], validation)
    assert (tmp_path / "rewards.png").read_bytes().startswith(b"\x89PNG")


def test_the_tail_is_the_time_with_under_a_tenth_alive():
    def tail(ends):
        return tail_seconds([sample(seconds=end).rollout for end in ends])

    assert tail([5.0, *range(1, 10), *range(1, 10), 6.0, 30.0, 10.0]) == 30 - 9  # of 22, 2 outlive second 9, 3 second 8
    assert tail(range(1, 11)) == 0  # of 10, the last is a tenth until it ends
    assert tail(range(1, 21)) == 1  # of 20, one alone is under a tenth
    assert tail([3.0]) == tail([0.0, 0.0]) == 0  # alone; from an engine that does not say


def test_what_the_clock_cut_is_truncated_and_counted():
    rollouts = [sample(length=4, reason=reason).rollout for reason in ("stop", "length", "time", "time")]
    metrics = length_metrics(rollouts)
    assert metrics["response_length/truncated"] == 0.75 and metrics["response_length/cut_by_time"] == 0.5
    assert metrics["response_length/stopped_mean"] == 4
