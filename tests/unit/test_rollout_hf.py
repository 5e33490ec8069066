"""The hf engine on a tiny Llama made here: against transformers' own generate, a full forward, and itself."""

import dataclasses

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fastgrpo.config import RunConfig
from fastgrpo.errors import ConfigError
from fastgrpo.records import Request, Sampling
from fastgrpo.rollout import build_engine
from fastgrpo.rollout.engine import sample_seed

VOCAB = 97
END = 3
GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0, repetition_penalty=1.0)
AT_07 = Sampling(temperature=0.7, top_p=1.0, top_k=-1, min_p=0.0, repetition_penalty=1.0)
PROMPTS = [(5, 6, 7), (8,), (9, 10, 11, 12, 13, 14, 15), (20, 21)]


class OneRank:
    """The part of Mesh that an engine reads."""

    def __init__(self, tp=1):
        self.device, self.tp, self.world, self.engine = torch.device("cpu"), tp, tp, 0


def tiny_model(folder, seed=0):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,  # the default's logits are so flat that every sampling test would pass by luck
        tie_word_embeddings=True,
        eos_token_id=END,
        bos_token_id=1,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()
    if folder is not None:
        config.save_pretrained(folder)
    return model


def export_of(model):
    return lambda: ((name, parameter.detach()) for name, parameter in model.named_parameters())


@pytest.fixture(scope="module")
def model_and_engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    model = tiny_model(folder)
    config = RunConfig()
    config.rollout.name = "hf"
    config.rollout.max_num_seqs = 3  # several batches
    return model, build_engine(config, OneRank(), folder, (END,))


def requests_for(prompts, n=1, max_tokens=12):
    return [
        Request(str(p), s, 0, ids, sample_seed(0, 1, 0, str(p), s), max_tokens)
        for p, ids in enumerate(prompts)
        for s in range(n)
    ]


def test_greedy_equals_transformers_generate(model_and_engine):
    model, engine = model_and_engine
    with engine.awake(export_of(model), 0):
        rollouts = engine.generate(requests_for(PROMPTS), GREEDY)
    for ids, rollout in zip(PROMPTS, rollouts, strict=True):
        want = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :]
        assert rollout.prompt_ids == ids
        assert rollout.response_ids.tolist() == want.tolist()
        assert rollout.sampler_logprobs is None
        assert rollout.response_mask.all() and rollout.response_mask.shape == rollout.response_ids.shape


def test_logprobs_are_the_full_softmax_at_the_temperature(model_and_engine):
    model, engine = model_and_engine
    with engine.awake(export_of(model), 0):
        rollouts = engine.generate(requests_for(PROMPTS, n=3), AT_07)
    for rollout in rollouts:
        ids = torch.tensor([[*rollout.prompt_ids, *rollout.response_ids.tolist()]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(rollout.prompt_ids) - 1 : -1]
        want = (logits.double() / 0.7).log_softmax(-1)[range(rollout.response_ids.size), rollout.response_ids.tolist()]
        np.testing.assert_allclose(rollout.sampler_logprobs, want.numpy(), atol=1e-5)


def test_a_seed_fixes_the_sample_whatever_the_batch(model_and_engine):
    model, engine = model_and_engine
    requests = requests_for(PROMPTS, n=4)
    with engine.awake(export_of(model), 0):
        together = engine.generate(requests, AT_07)
        alone = [engine.generate([request], AT_07)[0] for request in reversed(requests)][::-1]
    assert [r.response_ids.tolist() for r in together] == [r.response_ids.tolist() for r in alone]
    assert [(r.uid, r.sample) for r in together] == [(r.uid, r.sample) for r in requests]
    assert len({tuple(r.response_ids.tolist()) for r in together[:4]}) == 4  # one prompt, four seeds


def test_samples_follow_the_distribution(model_and_engine):
    model, engine = model_and_engine
    n = 6000
    engine._max_rows, rows = n, engine._max_rows
    with engine.awake(export_of(model), 0):
        first = [r.response_ids[0] for r in engine.generate(requests_for([(5, 6, 7)], n=n, max_tokens=1), AT_07)]
    engine._max_rows = rows
    with torch.no_grad():
        want = (model(torch.tensor([[5, 6, 7]])).logits[0, -1] / 0.7).softmax(-1).double().numpy()
    counts = np.bincount(first, minlength=VOCAB)
    large = want * n >= 5
    chi2 = ((counts - want * n) ** 2 / (want * n))[large].sum()
    assert large.sum() > 10
    assert chi2 < large.sum() + 5 * np.sqrt(2 * large.sum())  # mean and five standard deviations of chi-square


def test_ends_and_lengths(model_and_engine):
    model, engine = model_and_engine
    requests = [dataclasses.replace(r, max_tokens=1 + 5 * r.sample) for r in requests_for(PROMPTS, n=8)]
    with engine.awake(export_of(model), 0):
        rollouts = engine.generate(requests, AT_07)
    reasons = {r.finish_reason for r in rollouts}
    assert reasons == {"stop", "length"}
    for request, rollout in zip(requests, rollouts, strict=True):
        body, last = rollout.response_ids[:-1], rollout.response_ids[-1]
        assert END not in body
        assert (last == END) == (rollout.finish_reason == "stop")
        assert rollout.response_ids.size == request.max_tokens or rollout.finish_reason == "stop"


@pytest.mark.parametrize(
    ("change", "allowed"),
    [({"top_k": 4}, 4), ({"min_p": 0.5}, None), ({"top_p": 0.3}, None)],
)
def test_cut_vocabularies(model_and_engine, change, allowed):
    model, engine = model_and_engine
    sampling = dataclasses.replace(AT_07, **change)
    with engine.awake(export_of(model), 0):
        rollouts = engine.generate(requests_for([(5, 6, 7)], n=200, max_tokens=1), sampling)
    with torch.no_grad():
        probs = (model(torch.tensor([[5, 6, 7]])).logits[0, -1] / 0.7).softmax(-1)
    order = probs.argsort(descending=True)
    if allowed is None and "min_p" in change:
        allowed = int((probs >= 0.5 * probs.max()).sum())
    elif allowed is None:
        allowed = int((probs[order].cumsum(0) < 0.3).sum()) + 1
    drawn = {int(r.response_ids[0]) for r in rollouts}
    assert drawn == set(order[:allowed].tolist())
    assert all(r.sampler_logprobs is None for r in rollouts)


def test_repetition_penalty_ignores_padding_and_counts_the_prompt(model_and_engine):
    model, engine = model_and_engine
    sampling = dataclasses.replace(GREEDY, repetition_penalty=1.8)
    with engine.awake(export_of(model), 0):
        rollouts = engine.generate(requests_for(PROMPTS), sampling)
    for ids, rollout in zip(PROMPTS, rollouts, strict=True):
        want = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, repetition_penalty=1.8)
        assert rollout.response_ids.tolist() == want[0, len(ids) :].tolist()


def test_new_weights_make_a_new_model(model_and_engine):
    model, engine = model_and_engine
    other = tiny_model(None, seed=1)
    exports = []

    def counted(source):
        def export():
            exports.append(source)
            return export_of(source)()

        return export

    answers = []
    for source, version, held in ((model, 10, False), (other, 11, False), (other, 11, True), (model, 12, False)):
        assert engine.holds(version) == held
        with engine.awake(counted(source), version):
            rollout = engine.generate(requests_for([PROMPTS[2]]), GREEDY)[0]
        assert rollout.weight_version == version
        want = source.generate(torch.tensor([PROMPTS[2]]), max_new_tokens=12, do_sample=False)
        assert rollout.response_ids.tolist() == want[0, len(PROMPTS[2]) :].tolist()
        answers.append(rollout.response_ids.tolist())
    assert exports == [model, other, model]  # the same version is not loaded twice
    assert answers[0] == answers[3] != answers[1]


def test_refusals(model_and_engine, tmp_path):
    model, engine = model_and_engine
    with pytest.raises(RuntimeError, match="sleeps"):
        engine.generate(requests_for(PROMPTS), GREEDY)
    with (
        pytest.raises(RuntimeError, match=r"no parameter 'model.nonsense'"),
        engine.awake(lambda: iter([("model.nonsense", torch.zeros(1))]), 20),
    ):
        pass
    with pytest.raises(RuntimeError, match=r"were given no value"), engine.awake(lambda: iter([]), 20):
        pass
    with (
        engine.awake(export_of(model), 20),
        pytest.raises(RuntimeError, match="nest"),
        engine.awake(export_of(model), 20),
    ):
        pass
    config = RunConfig()
    config.rollout.name = "hf"
    config.rollout.tensor_model_parallel_size = 2
    with pytest.raises(ConfigError, match="tensor_model_parallel_size=2"):
        build_engine(config, OneRank(tp=2), tmp_path, (END,))


def test_building_leaves_random_states_alone(tmp_path):
    tiny_model(tmp_path)
    config = RunConfig()
    config.rollout.name = "hf"
    torch.manual_seed(5)
    want = torch.rand(4)
    torch.manual_seed(5)
    build_engine(config, OneRank(), tmp_path, (END,)).close()
    assert torch.equal(torch.rand(4), want)


def test_a_rollout_past_its_time_draws_one_more_token_a_batch(model_and_engine):
    model, engine = model_and_engine
    requests = requests_for(PROMPTS, n=2)
    rounds = []
    for limit in (None, 1e-9):
        engine._max_seconds = limit
        with engine.awake(export_of(model), 0):
            rounds.append(engine.generate(requests, AT_07))
    engine._max_seconds = None
    for whole, cut in zip(*rounds, strict=True):
        assert cut.finish_reason == ("stop" if cut.response_ids[0] == END else "time")
        assert cut.response_ids.tolist() == whole.response_ids.tolist()[:1]
        assert cut.sampler_logprobs.size == 1 and cut.seconds > 0
        assert len(whole.response_ids) == 1 or whole.seconds > 0
