"""What docs/kernels.md says about other trainers beyond its own lines: TRL's shapes, and autocast over fp32 masters."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from fastgrpo_kernels import linear_grpo_loss

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "kernels.md").read_text()
BATCH, PROMPT, COMPLETION, WIDTH, VOCAB = 4, 5, 6, 24, 37


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)


@pytest.fixture
def batch():
    """Of TRL's shapes, with logprobs near those of a random model."""
    torch.manual_seed(0)
    mask = torch.arange(COMPLETION) < torch.tensor([[6], [3], [4], [1]])
    old, ref = (-3.6 + 0.3 * torch.randn(BATCH, COMPLETION) for _ in range(2))
    return {
        "input_ids": torch.randint(0, VOCAB, (BATCH, PROMPT + COMPLETION)),
        "completion_mask": mask.int(),
        "advantages": torch.tensor([1.0, -0.5, 0.25, -2.0]),
        "old": old,
        "ref": ref,
    }


def run_lines(model, **batch):
    """The page's lines on tensors over the whole sequence, [batch, length - 1]."""
    (lines,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    return _run(lines, model, batch)


def _run(lines, model, batch):
    model.zero_grad()
    exec(lines, scope := {"model": model, **batch})
    return scope["out"], [parameter.grad.clone() for parameter in model.parameters()]


def whole(batch):
    """The same with prompts: mask [batch, length], logprobs [batch, length - 1]."""
    mask, old, ref = (
        torch.cat([torch.zeros(BATCH, width, dtype=x.dtype), x], 1)
        for x, width in ((batch["completion_mask"], PROMPT), (batch["old"], PROMPT - 1), (batch["ref"], PROMPT - 1))
    )
    return {"input_ids": batch["input_ids"], "response_mask": mask, "advantages": batch["advantages"]} | {
        "old": old,
        "ref": ref,
    }


def test_trls_shapes_give_the_same_loss(batch):
    model = Model()
    expected, gradients = run_lines(model, **whole(batch))
    (lines,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    hidden, keep, targets = re.search(
        r"take `(hidden = [^`]*)`,\s*`(keep = [^`]*)`\s*and the targets `([^`]*)`", PAGE
    ).groups()
    lines = re.sub(r"hidden = model.*", hidden, lines)
    lines = re.sub(r"keep = response_mask.*", keep, lines)
    lines = lines.replace("input_ids[:, 1:][keep]", targets)
    trl = batch | {"completion": COMPLETION, "completion_ids": batch["input_ids"][:, PROMPT:]}
    out, found = _run(lines, model, trl)
    assert out.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6) and expected.loss.item() != 0
    assert out.flags_N.any() and len(out.flags_N) == batch["completion_mask"].sum()
    for got, true in zip(found, gradients, strict=True):
        assert (got - true).norm() <= 1e-6 * true.norm()


@pytest.mark.parametrize("into", ["autograd", "accumulator"])
def test_fp32_masters_under_autocast(batch, into):
    """Both cast to bfloat16: the fp32 masters get the gradients of that product, exact but for the stated roundings."""
    model, inputs = Model(), whole(batch)
    keep = inputs["response_mask"][:, 1:].bool()
    target = inputs["input_ids"][:, 1:][keep]
    weights = keep[keep] / keep.sum()
    advantages = inputs["advantages"][:, None].expand_as(keep)[keep]
    options = {"weights_N": weights, "advantages_N": advantages, "old_logprobs_N": inputs["old"][keep]}
    master = model.lm_head.weight
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.body(inputs["input_ids"])[:, :-1]
        hidden.retain_grad()
        with pytest.raises(ValueError, match=r"hidden_NH is torch.bfloat16 and weight_VH torch.float32"):
            linear_grpo_loss(hidden[keep], master, target, **options)
        if into == "accumulator":
            master.grad = torch.zeros_like(master)
            options["weight_grad_VH"] = master.grad
        loss = linear_grpo_loss(hidden[keep].bfloat16(), master.bfloat16(), target, **options).loss
    loss.backward()

    x, w = hidden.detach()[keep].double().requires_grad_(), master.detach().bfloat16().double().requires_grad_()
    logprob = (x @ w.t()).log_softmax(1).gather(1, target[:, None]).squeeze(1)
    ratio = (logprob - options["old_logprobs_N"].double()).exp()
    gain = torch.minimum(advantages * ratio, advantages * ratio.clamp(0.8, 1.2))
    gain = torch.where(advantages < 0, torch.maximum(gain, 3 * advantages), gain)
    expected = -(gain * weights).sum()
    expected.backward()
    assert loss.dtype == master.grad.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for got, true in ((master.grad, w.grad), (hidden.grad[keep], x.grad)):
        assert (got.double() - true).norm() < 4e-3 * true.norm()
    rounded = torch.equal(master.grad, master.grad.bfloat16().float())
    assert rounded == (into == "autograd")
