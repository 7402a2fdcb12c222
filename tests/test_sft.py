"""The supervised loss by hand."""

import json

import pytest
import torch
from conftest import ROOT, launch
from transformers import AutoModelForCausalLM

from algos.sft import sft_loss
from common.data.tokenizer import load_tokenizer


def test_loss_is_the_mean_over_response_tokens():
    logprobs = torch.tensor([[-1.0, -2.0, float("nan")], [-3.0, float("nan"), float("nan")]], requires_grad=True)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    loss = sft_loss(logprobs, mask, denominator=3)
    loss.backward()
    assert loss.item() == 2.0  # (1 + 2 + 3) / 3
    assert torch.equal(logprobs.grad, -(mask / 3.0))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_it_learns_prompt_response_pairs_from_jsonl(models, tmp_path, ranks):
    """Rows without an answer. Greedy decoding with the trained folder returns the responses, on one rank and on two."""
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps({"prompt": f"{i}=", "response": f"{i} {i}"}) + "\n" for i in range(4)))
    flags = ["--model", models["untied"], "--dataset", pairs, "--steps", 40, "--batch-size", 4, "--warmup-steps", 0]
    launch(ROOT / "algos/sft.py", *flags, "--output", tmp_path / "out", ranks=ranks)
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer, stops = load_tokenizer(str(tmp_path / "out"))
    for i in range(4):
        ids = torch.tensor([tokenizer(f"{i}=")["input_ids"]])
        out = trained.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=stops)[0, ids.shape[1] :]
        assert tokenizer.decode(out, skip_special_tokens=True) == f"{i} {i}"
