"""The policy against transformers' own model of the same folder: logprobs, gradients, buffers, names, what is saved."""

import json
import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from cases import full, full_gradients, full_weights, make_rollouts, one_batch, policy_of, separate_logprobs
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from fastgrpo.checkpoint import save_model
from fastgrpo.config import ActorConfig, HeadImpl
from fastgrpo.errors import UserError
from fastgrpo.policy import attention, weights
from fastgrpo.policy.head import KernelChoice, score_head
from fastgrpo.policy.liger import use_liger_modules
from fastgrpo.policy.model import _meta_model, build_policy, restore_buffers
from fastgrpo.policy.selfcheck import check_packing
from fastgrpo_kernels import linear_logprob

ROLLOUTS = make_rollouts(6)
TEMPERATURE = 0.7
FAMILIES = ["llama", "qwen2", "qwen3", "mistral"]


def score(policy, rollouts=ROLLOUTS, temperature=TEMPERATURE):
    return policy.score(one_batch(rollouts), partial(score_head, temperature=temperature))


def pretrained(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **options)


# ---- the same model as transformers'


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logprobs_and_gradients_are_those_of_separate_sequences(mesh, make_tiny_model, family, tied):
    folder = make_tiny_model(family, tied=tied)
    policy, model = policy_of(folder, mesh), pretrained(folder)
    expected_R = separate_logprobs(model, ROLLOUTS, TEMPERATURE)
    torch.testing.assert_close(score(policy).logprobs_R, expected_R, rtol=1e-5, atol=1e-5)

    weights_R = torch.randn(len(expected_R), generator=torch.Generator().manual_seed(1))

    def weighted_sum(hidden_RH, output, batch):
        return (linear_logprob(hidden_RH, output.weight_VH, batch.targets_R, TEMPERATURE)[0] * weights_R).sum()

    policy.run(one_batch(ROLLOUTS), weighted_sum).backward()
    (expected_R * weights_R).sum().backward()
    gradients = full_gradients(policy)
    expected = {f"lm.{name}": parameter.grad for name, parameter in model.named_parameters()}
    assert gradients.keys() == expected.keys()  # a tied weight is one parameter
    assert ("lm.lm_head.weight" in gradients) == (not tied)
    for name, gradient in expected.items():
        # The bias of a key shifts all scores of a query alike: its gradient is zero, and what is left is rounding.
        floor = 1e-4 if name.endswith("k_proj.bias") else 1e-6
        assert (gradients[name] - gradient).norm() < 1e-4 * gradient.norm() + floor, name


def test_tied_weights_stay_one_parameter(mesh, make_tiny_model):
    lm = policy_of(make_tiny_model(tied=True), mesh).module.lm
    assert lm.lm_head.weight is lm.get_input_embeddings().weight


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("granite", {"logits_scaling": 6.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5}),
        ("cohere", {"logit_scale": 0.25}),
        ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": 2.0, "head_dim": 32}),
    ],
)
def test_what_a_model_does_around_its_head(mesh, make_tiny_model, family, config):
    folder = make_tiny_model(family, tied=True, **config)
    expected_R = separate_logprobs(pretrained(folder), ROLLOUTS, TEMPERATURE)
    torch.testing.assert_close(score(policy_of(folder, mesh)).logprobs_R, expected_R, rtol=1e-5, atol=1e-5)


def test_the_company_of_a_sequence_does_not_move_its_positions(mesh, tiny_model):
    policy, model = policy_of(tiny_model, mesh), pretrained(tiny_model)
    last = ROLLOUTS[-1:]
    alone_R = score(policy, last).logprobs_R
    torch.testing.assert_close(alone_R, separate_logprobs(model, last, TEMPERATURE), rtol=1e-5, atol=1e-5)
    for before in (1, 3, 5):
        packed_R = score(policy, ROLLOUTS[5 - before :]).logprobs_R
        torch.testing.assert_close(packed_R[-len(alone_R) :], alone_R, rtol=1e-5, atol=1e-5)


def test_entropy_is_that_of_the_tempered_softmax(mesh, tiny_model):
    policy, model = policy_of(tiny_model, mesh), pretrained(tiny_model)
    (rollout,) = ROLLOUTS[1:2]
    assert rollout.response_mask.all()
    ids = torch.tensor([[*rollout.prompt_ids, *rollout.response_ids.tolist()]])
    logprobs = (model(input_ids=ids).logits[0, len(rollout.prompt_ids) - 1 : -1] / TEMPERATURE).log_softmax(-1)
    expected_R = -(logprobs.exp() * logprobs).sum(-1)
    torch.testing.assert_close(score(policy, [rollout]).entropy_R, expected_R, rtol=1e-5, atol=1e-5)


def test_absolute_positions_restart_too(mesh, make_tiny_model):
    folder = make_tiny_model("opt", ffn_dim=96, word_embed_proj_dim=128)
    expected_R = separate_logprobs(pretrained(folder).eval(), ROLLOUTS, TEMPERATURE)
    torch.testing.assert_close(score(policy_of(folder, mesh)).logprobs_R, expected_R, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "rates"),
    [
        ("qwen2", {"attention_dropout": 0.5}),
        ("starcoder2", {"attention_dropout": 0.5, "residual_dropout": 0.5, "embedding_dropout": 0.5}),
    ],
)
def test_dropout_of_the_config_is_off(mesh, make_tiny_model, family, rates):
    folder = make_tiny_model(family, **rates)
    policy = policy_of(folder, mesh)
    assert policy.module.training
    first_R = score(policy).logprobs_R
    assert torch.equal(first_R, score(policy).logprobs_R)
    expected_R = separate_logprobs(pretrained(folder).eval(), ROLLOUTS, TEMPERATURE)
    torch.testing.assert_close(first_R, expected_R, rtol=1e-5, atol=1e-5)


# ---- buffers that no checkpoint holds


def buffers_of(module):
    return {name.removeprefix("lm."): buffer for name, buffer in module.named_buffers()}


@pytest.fixture
def poisoned_memory():
    """Every uninitialised tensor is full of NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("trainable", [True, False])
def test_rotary_frequencies(mesh, make_tiny_model, poisoned_memory, trainable):
    folder = make_tiny_model("llama", head_dim=8, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    policy = policy_of(folder, mesh, trainable=trainable)
    buffers, expected = buffers_of(policy.module), buffers_of(pretrained(folder))
    assert buffers.keys() == expected.keys() and len(buffers) > 0
    for name, buffer in buffers.items():
        assert buffer.dtype == expected[name].dtype and torch.equal(buffer, expected[name]), name
        if "inv_freq" in name:
            assert buffer.dtype == torch.float32
            torch.testing.assert_close(buffer, torch.tensor([1, 0.1, 0.01, 0.001]))
    expected_R = separate_logprobs(pretrained(folder), ROLLOUTS, TEMPERATURE)
    torch.testing.assert_close(score(policy).logprobs_R, expected_R, rtol=1e-5, atol=1e-5)


def test_rotary_frequencies_in_half_precision_stay_float32(mesh, make_tiny_model):
    folder = make_tiny_model("llama", head_dim=8)
    policy = policy_of(folder, mesh, trainable=False)
    half = build_policy(folder, mesh, dtype=torch.bfloat16, attention_backend="auto", trainable=False)
    for name, buffer in buffers_of(half.module).items():
        assert buffer.dtype == torch.float32 and torch.equal(buffer, buffers_of(policy.module)[name])
    assert {parameter.dtype for parameter in half.module.parameters()} == {torch.bfloat16}


def test_restoring_mends_every_buffer_and_touches_no_weight(mesh, tiny_model):
    policy = policy_of(tiny_model, mesh)
    before, names = full_weights(policy), buffers_of(policy.module).keys()
    for buffer in policy.module.buffers():
        buffer.fill_(1e30)
    restore_buffers(policy.module.lm, mesh.device)
    expected = buffers_of(pretrained(tiny_model))
    assert names == expected.keys()
    assert all(torch.equal(buffer, expected[name]) for name, buffer in buffers_of(policy.module).items())
    assert all(torch.equal(weight, before[name]) for name, weight in full_weights(policy).items())


# ---- recomputation


@pytest.mark.parametrize(("every", "offload"), [(1, False), (2, False), (1, True), (2, True)])
def test_recomputing_changes_no_bit(mesh, make_tiny_model, every, offload):
    folder = make_tiny_model("llama", num_hidden_layers=3)

    def loss_and_gradients(**options):
        policy = policy_of(folder, mesh, **options)

        def entropy_and_logprob(hidden_RH, output, batch):
            logprobs_R, entropy_R = linear_logprob(hidden_RH, output.weight_VH, batch.targets_R)
            return (logprobs_R + entropy_R).sum()

        loss = policy.run(one_batch(ROLLOUTS), entropy_and_logprob)
        loss.backward()
        return loss.detach(), full_gradients(policy)

    loss, gradients = loss_and_gradients(gradient_checkpointing=0)
    again, repeated = loss_and_gradients(gradient_checkpointing=every, activation_offload=offload)
    assert torch.equal(loss, again)
    assert all(torch.equal(gradients[name], repeated[name]) for name in gradients)
    assert gradients.keys() == repeated.keys()


@pytest.mark.parametrize(("every", "recomputed"), [(0, []), (1, [0, 1, 2]), (2, [0, 2]), (3, [0])])
def test_which_blocks_are_recomputed(mesh, make_tiny_model, every, recomputed):
    policy = policy_of(make_tiny_model("llama", num_hidden_layers=3), mesh, gradient_checkpointing=every)
    calls = []
    for number, block in enumerate(policy.module.lm.model.layers):
        block.mlp.register_forward_pre_hook(lambda *_, number=number: calls.append(number))
    batch = one_batch(ROLLOUTS)
    policy.run(batch, lambda hidden_RH, *_: hidden_RH.sum()).backward()
    assert calls[:3] == [0, 1, 2] and sorted(calls[3:]) == recomputed


# ---- names, export, save


@pytest.mark.parametrize("tied", [False, True])
def test_export_is_the_checkpoint(mesh, make_tiny_model, tied):
    folder = make_tiny_model("qwen3", tied=tied)
    stored = load_file(folder / "model.safetensors")
    exported = [(name, tensor.clone()) for name, tensor in policy_of(folder, mesh).export()]
    names = [name for name, _ in exported]
    assert sorted(names) == sorted(stored)  # once each
    assert all(torch.equal(tensor, stored[name]) for name, tensor in exported)


def test_export_between_a_score_and_an_update(mesh, tiny_model):
    """The gathered copies of one forward must not outlive a change of the weights. (In half precision, because then
    they are copies on one process too.)"""
    policy = build_policy(tiny_model, mesh, dtype=torch.bfloat16, attention_backend="auto", trainable=True)
    first = {name: tensor.clone() for name, tensor in policy.export()}
    masters = list(policy.module.parameters())  # what the optimizer holds
    before_R = score(policy).logprobs_R
    with torch.no_grad():
        for master in masters:
            master.mul_(2.0)
    assert all(torch.equal(tensor, 2.0 * first[name]) for name, tensor in policy.export())
    assert (score(policy).logprobs_R - before_R).abs().max() > 1e-2


def nudge(policy):
    with torch.no_grad():
        for number, parameter in enumerate(policy.module.parameters()):
            parameter.add_(1e-2 * (number % 3 - 1))


def test_saved_model_is_the_policy(mesh, make_tiny_model, tmp_path, monkeypatch):
    folder = make_tiny_model("qwen2")
    policy, tokenizer = policy_of(folder, mesh), AutoTokenizer.from_pretrained(folder)
    nudge(policy)
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    save_model(policy, tokenizer, tmp_path / "model", mesh)
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert names >= {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    saved = pretrained(tmp_path / "model")
    torch.testing.assert_close(
        separate_logprobs(saved, ROLLOUTS, TEMPERATURE), score(policy).logprobs_R, rtol=1e-5, atol=1e-5
    )
    assert torch.equal(saved.lm_head.weight, full(policy.module.lm.lm_head.weight))
    chat = AutoTokenizer.from_pretrained(tmp_path / "model").apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False
    )
    assert chat == "hi"
    # The same in several files, and over what was there.
    monkeypatch.setattr(weights, "_SHARD_BYTES", 100_000)
    save_model(policy, tokenizer, tmp_path / "model", mesh)
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1 and not (tmp_path / "model" / "model.safetensors").exists()
    assert index["metadata"]["total_size"] == sum(4 * p.numel() for p in saved.parameters())
    assert torch.equal(score(policy_of(tmp_path / "model", mesh)).logprobs_R, score(policy).logprobs_R)


def test_weights_are_saved_in_the_dtype_they_came_in(mesh, make_tiny_model, tmp_path):
    folder = make_tiny_model("llama", tied=True)
    pretrained(folder).to(torch.bfloat16).save_pretrained(tmp_path / "half")
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "half")
    policy = policy_of(tmp_path / "half", mesh)
    assert {weight.dtype for weight in policy.module.parameters()} == {torch.float32}
    nudge(policy)
    save_model(policy, AutoTokenizer.from_pretrained(folder), tmp_path / "model", mesh)
    saved = load_file(tmp_path / "model" / "model.safetensors")
    exported = {name: tensor.bfloat16() for name, tensor in policy.export()}
    assert saved.keys() == exported.keys()
    assert all(tensor.dtype == torch.bfloat16 and torch.equal(tensor, exported[name]) for name, tensor in saved.items())
    assert AutoConfig.from_pretrained(tmp_path / "model").dtype == torch.bfloat16


def test_an_interrupted_save_leaves_the_last_whole_one(mesh, tiny_model, tmp_path):
    policy, tokenizer = policy_of(tiny_model, mesh), AutoTokenizer.from_pretrained(tiny_model)

    class Broken:
        def save_pretrained(self, folder):
            raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space left"):
        save_model(policy, Broken(), tmp_path / "model", mesh)
    assert not (tmp_path / "model").exists()
    save_model(policy, tokenizer, tmp_path / "model", mesh)
    first = load_file(tmp_path / "model" / "model.safetensors")
    nudge(policy)
    with pytest.raises(OSError, match="No space left"):
        save_model(policy, Broken(), tmp_path / "model", mesh)
    kept = load_file(tmp_path / "model" / "model.safetensors")
    assert all(torch.equal(kept[name], tensor) for name, tensor in first.items())
    save_model(policy, tokenizer, tmp_path / "model", mesh)  # over the leftovers
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert not torch.equal(
        load_file(tmp_path / "model" / "model.safetensors")["lm_head.weight"], first["lm_head.weight"]
    )


def test_code_that_came_with_the_checkpoint_is_saved_with_it(mesh, tiny_model, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(tiny_model, source)
    (source / "modeling_own.py").write_text("# the class that auto_map names\n")
    save_model(policy_of(source, mesh), AutoTokenizer.from_pretrained(source), tmp_path / "model", mesh)
    assert (tmp_path / "model" / "modeling_own.py").read_text().startswith("# the class")


# ---- folders that do not fit


@pytest.fixture
def broken(make_tiny_model, tmp_path):
    """A copy of a tiny model whose tensors one may change: broken(change) -> folder."""

    def make(change):
        folder = tmp_path / "broken"
        shutil.copytree(make_tiny_model("llama"), folder)
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return make


def test_a_missing_tensor_is_named(mesh, broken):
    folder = broken(lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(UserError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight: is it a complete checkpoint"):
        policy_of(folder, mesh)


def test_many_missing_tensors_are_counted(mesh, broken):
    folder = broken(lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers.1." in name])
    with pytest.raises(UserError, match=r"and 4 more: is it a complete checkpoint of LlamaForCausalLM\?"):
        policy_of(folder, mesh)


def test_a_tied_model_lacks_its_output_layer_by_right(mesh, make_tiny_model):
    folder = make_tiny_model("llama", tied=True)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    policy_of(folder, mesh)


def test_another_shape_is_named(mesh, broken):
    def shorten(tensors):
        tensors["model.norm.weight"] = torch.ones(64)

    with pytest.raises(UserError, match=r"model\.norm\.weight has shape \(64,\), config\.json says \(128,\)"):
        policy_of(broken(shorten), mesh)


def test_tensors_that_the_model_does_not_know_are_left_alone(mesh, broken):
    def add(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.full((16,), 7.0)

    policy = policy_of(broken(add), mesh)
    assert len(dict(policy.export())) == len(dict(policy.module.named_parameters()))


def test_another_weight_format_is_refused(mesh, tiny_model, tmp_path):
    shutil.copytree(tiny_model, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "model" / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"holds no \*\.safetensors.*save_pretrained"):
        policy_of(tmp_path / "model", mesh)


def test_a_half_downloaded_folder_is_refused(mesh, tiny_model, tmp_path):
    folder = tmp_path / "model"
    pretrained(tiny_model).save_pretrained(folder, max_shard_size="200KB")
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(UserError, match=rf"lacks the file {shard.name}"):
        policy_of(folder, mesh)


def test_a_fused_checkpoint_is_refused(mesh, make_tiny_model):
    folder = make_tiny_model("mixtral", num_local_experts=2)
    with pytest.raises(UserError, match="MixtralForCausalLM fuses or splits"):
        policy_of(folder, mesh)


# ---- does packing fit the class?


@pytest.mark.parametrize("family", [*FAMILIES, "granite", "cohere"])
def test_selfcheck_passes(make_tiny_model, family):
    state = torch.random.get_rng_state()
    check_packing(AutoConfig.from_pretrained(make_tiny_model(family, tied=family == "cohere")))
    assert torch.equal(state, torch.random.get_rng_state())


def test_selfcheck_of_a_single_layer(make_tiny_model):
    check_packing(AutoConfig.from_pretrained(make_tiny_model("qwen2", num_hidden_layers=1)))


def test_selfcheck_refuses_soft_caps_by_name():
    config = AutoConfig.for_model("gemma2", num_hidden_layers=2, hidden_size=64, head_dim=16)
    with pytest.raises(UserError, match="Gemma2Attention asks for softcap"):
        check_packing(config)


@pytest.mark.parametrize("family", ["gpt2", "bloom", "mamba"])
def test_selfcheck_refuses_other_architectures_by_name(family):
    """Blocks under another name, ALiBi, a state that crosses tokens."""
    with pytest.raises(UserError, match=f"(?i)^{family}.*fastgrpo trains decoders"):
        check_packing(AutoConfig.for_model(family))


@pytest.mark.parametrize("fault", ["scale", "one sequence", "neighbour"])
def test_selfcheck_sees_wrong_numbers(make_tiny_model, monkeypatch, fault):
    config = AutoConfig.from_pretrained(make_tiny_model("llama"))
    honest, make_packing = attention.sdpa, attention.make_packing

    def faulty(q_TQD, k_TKD, v_TKD, packing, scale):
        if fault == "scale":
            return honest(q_TQD, k_TKD, v_TKD, packing, 1.05 * scale)
        if fault == "neighbour":  # the value of the token before
            return honest(q_TQD, k_TKD, v_TKD.roll(1, 0), packing, scale)
        tokens = q_TQD.shape[0]
        whole = make_packing(torch.tensor([0, tokens], dtype=torch.int32), tokens, honest, None, q_TQD.device)
        return honest(q_TQD, k_TKD, v_TKD, whole, scale)

    def make_faulty_packing(*args):
        return replace(make_packing(*args), backend=faulty)

    monkeypatch.setattr(attention, "make_packing", make_faulty_packing)
    with pytest.raises(UserError, match="Llama: packed sequences give other logits"):
        check_packing(config)


# ---- liger-kernel


@pytest.mark.parametrize(
    ("family", "count"), [("llama", 2 * 2 + 1 + 2), ("qwen2", 2 * 2 + 1 + 2), ("qwen3", 4 * 2 + 1 + 2)]
)
def test_liger_modules_hold_the_same_parameters(make_tiny_model, family, count):
    lm = pretrained(make_tiny_model(family))
    before = dict(lm.named_parameters())
    assert use_liger_modules(lm) == count
    after = dict(lm.named_parameters())
    assert list(after) == list(before) and all(after[name] is before[name] for name in before)


def test_liger_leaves_other_maths_alone(make_tiny_model):
    lm = pretrained(make_tiny_model("gemma2", tied=True, attn_logit_softcapping=None))
    assert use_liger_modules(lm) == 0
    gelu = pretrained(make_tiny_model("llama", hidden_act="gelu"))
    assert use_liger_modules(gelu) == 2 * 2 + 1  # norms only


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_liger_modules_compute_the_same(make_tiny_model, family):
    pytest.importorskip("liger_kernel")
    ids = torch.from_numpy(np.random.default_rng(0).integers(4, 200, (2, 33))).cuda()
    results = []
    for exchange in (False, True):
        lm = pretrained(make_tiny_model(family)).cuda()
        if exchange:
            use_liger_modules(lm)
        logits = lm(input_ids=ids).logits
        logits.logsumexp(-1).sum().backward()
        results.append((logits.detach(), {name: p.grad for name, p in lm.named_parameters()}))
    (plain, gradients), (fused, others) = results
    torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-4)
    for name, gradient in gradients.items():
        assert (others[name] - gradient).norm() < 1e-3 * gradient.norm() + 1e-4, name


def test_a_damaged_weights_file_is_named(tmp_path, tiny_model):
    folder = tmp_path / "damaged"
    shutil.copytree(tiny_model, folder)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:1000])
    with pytest.raises(UserError, match=r"model\.safetensors is damaged .* fetch it again"):
        weights.map_checkpoint(_meta_model(AutoConfig.from_pretrained(folder), torch.float32, False), folder)


def test_an_entropy_bonus_takes_all_passes_to_the_form_that_has_its_gradient():
    """Otherwise the ratio of an update to its old pass would be 1 but for rounding."""
    reference = HeadImpl["reference"]
    for actor, device, impl in (
        (ActorConfig(), "cuda", "auto"),
        (ActorConfig(entropy_coeff=0.01), "cuda", "rows"),
        (ActorConfig(entropy_coeff=0.01), "cpu", "auto"),
        (ActorConfig(entropy_coeff=0.01, head=reference), "cuda", "reference"),
    ):
        assert KernelChoice.of(actor, device).impl == impl
