"""The supervised loss by hand."""

import torch

from algos.sft import sft_loss


def test_loss_is_the_mean_over_response_tokens():
    logprobs = torch.tensor([[-1.0, -2.0, float("nan")], [-3.0, float("nan"), float("nan")]], requires_grad=True)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    loss = sft_loss(logprobs, mask, denominator=3)
    loss.backward()
    assert loss.item() == 2.0  # (1 + 2 + 3) / 3
    assert torch.equal(logprobs.grad, -(mask / 3.0))
