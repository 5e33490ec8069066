"""The lines of docs/kernels.md that put the op into another trainer, run as they stand, against whole logits."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

PAGE = Path(__file__).resolve().parents[2] / "docs" / "kernels.md"


class Model(nn.Module):
    """A language model as far as the head is concerned."""

    def __init__(self):
        super().__init__()
        self.body = nn.Embedding(37, 24)
        self.lm_head = nn.Linear(24, 37, bias=False)


def plain_loss(model, ids, mask, advantages, old, ref):
    """Token by token over the whole logits: clip 0.2, dual clip 3, k3 with 0.001, mean over the response tokens."""
    logprobs = model.lm_head(model.body(ids)[:, :-1]).log_softmax(-1)
    total = torch.zeros((), dtype=torch.float64)
    for row, column in mask[:, 1:].nonzero().tolist():
        x, advantage = logprobs[row, column, ids[row, column + 1]], advantages[row]
        ratio, k = (x - old[row, column]).exp(), ref[row, column] - x
        policy = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        policy = torch.minimum(policy, -3 * advantage) if advantage < 0 else policy
        total = total + policy + 0.001 * (k.exp() - k - 1)
    return total / mask[:, 1:].sum()


def test_the_lines_of_the_page_give_the_loss_of_whole_logits():
    (lines,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    torch.manual_seed(0)
    model = Model().double()
    input_ids = torch.randint(0, 37, (4, 9))
    response_mask = torch.arange(9) >= torch.tensor([[3], [4], [2], [5]])
    response_mask[1, 7:] = False
    advantages = torch.tensor([1.0, -0.5, 0.25, -2.0], dtype=torch.float64)
    with torch.no_grad():
        logprobs = model.lm_head(model.body(input_ids)[:, :-1]).log_softmax(-1)
        logprobs = logprobs.gather(-1, input_ids[:, 1:, None]).squeeze(-1)
    old, ref = (logprobs + 0.3 * torch.randn_like(logprobs) for _ in range(2))
    expected = plain_loss(model, input_ids, response_mask, advantages, old, ref)
    parameters = dict(model.named_parameters())
    wanted = torch.autograd.grad(expected, list(parameters.values()))

    scope = dict(model=model, input_ids=input_ids, response_mask=response_mask, advantages=advantages, old=old, ref=ref)
    exec(lines, scope)
    assert scope["out"].loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert scope["out"].flags_N.any()  # some rows are clipped
    for (name, parameter), gradient in zip(parameters.items(), wanted, strict=True):
        assert (parameter.grad - gradient).norm() < 1e-6 * gradient.norm(), name
