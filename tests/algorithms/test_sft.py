"""The supervised loss by hand."""

import json

import pytest
import torch
from conftest import ROOT, launch
from transformers import AutoModelForCausalLM

from algos import sft
from algos.sft import sft_loss
from common import placement
from common.data import arithmetic
from common.data.demonstrations import that_fit
from common.data.prompts import Prompt, Source, load
from common.data.tokenizer import load_tokenizer
from common.errors import BadInput
from common.rewards import grade_gsm8k
from common.run import checkpoint, report


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
    flags += ["--learning-rate", 2e-3]
    launch(
        ROOT / "algos/sft.py",
        *flags,
        "--output",
        tmp_path / "out",
        "--run-dir",
        tmp_path / "run",
        ranks=ranks,
        engine=False,
    )
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer, stops = load_tokenizer(str(tmp_path / "out"))
    for i in range(4):
        ids = torch.tensor([tokenizer(f"{i}=")["input_ids"]])
        out = trained.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=stops)[0, ids.shape[1] :]
        assert tokenizer.decode(out, skip_special_tokens=True) == f"{i} {i}"


@pytest.mark.slow
def test_right_samples_become_data_for_sft(tmp_path):
    """Rejection sampling: evaluate.py keeps the right responses, with the problems that they answer."""
    right = tmp_path / "right.jsonl"
    flags = ["--model", arithmetic.WARM_START, "--split", "train", "--prompts", 32, "--n", 4, "--save-right", right]
    found = json.loads(launch(ROOT / "scripts/evaluate.py", *flags).stdout.splitlines()[-1])
    assert found["sampled_reward"] == found["sampled"] and found["greedy_reward"] == found["greedy"]
    rows = [json.loads(line) for line in right.read_text().splitlines()]
    assert 0 < len(rows) < 32 * 4 and len(rows) == found["saved"] == round(found["sampled"] * 32 * 4)
    assert all(grade_gsm8k(row["solution"], row["answer"]) == 1 for row in rows)
    known = {row["question"]: row["answer"] for row in arithmetic.problems("train")[:32]}
    assert all(known[row["prompt"]] == row["answer"] for row in rows)
    prompts = load((str(right),), Source(), "train", arithmetic.tokenizer(), 64)
    assert [prompt.solution for prompt in prompts] == [row["solution"] for row in rows]


def test_a_run_does_not_go_on_with_other_solutions(models, world, tmp_path, monkeypatch):
    """The prompts are the same, and there are no answers. Only the solutions say what is learned."""
    monkeypatch.setattr(placement, "init", lambda *given, **named: world)
    monkeypatch.setattr(placement, "finish", lambda *given: None)
    monkeypatch.setattr(report, "write", lambda run_dir: run_dir)
    file = tmp_path / "rows.jsonl"

    def train(solution: str, steps: int) -> None:
        file.write_text("".join(json.dumps({"prompt": f"{i}=", "solution": solution}) + "\n" for i in range(4)))
        saving = checkpoint.Saving(resume="auto")
        folders = {"output": str(tmp_path / "out"), "run_dir": str(tmp_path / "run")}
        sft.main(sft.Args(models["untied"], (str(file),), steps=steps, batch_size=2, saving=saving, **folders))

    train("1", steps=1)
    train("1", steps=2)
    with pytest.raises(BadInput) as refused:
        train("2", steps=3)
    assert refused.value.code == "data-changed"


def test_an_older_model_stays_until_the_new_one_is_trained(world, tmp_path, monkeypatch):
    """Random weights of a run that is interrupted would be taken for it."""

    def interrupted(*given, **named):
        raise KeyboardInterrupt

    monkeypatch.setattr(placement, "init", lambda *given, **named: world)
    monkeypatch.setattr(sft.model, "load", interrupted)
    older = tmp_path / "out/model.safetensors"
    older.parent.mkdir()
    older.write_text("trained")
    with pytest.raises(KeyboardInterrupt):
        sft.main(sft.Args(dataset=("arithmetic",), output=str(older.parent), run_dir=str(tmp_path / "run")))
    assert [file.name for file in older.parent.iterdir()] == [older.name] and older.read_text() == "trained"


def test_random_weights_are_removed_in_the_end(world, tmp_path, monkeypatch):
    monkeypatch.setattr(placement, "init", lambda *given, **named: world)
    monkeypatch.setattr(placement, "finish", lambda *given: None)
    monkeypatch.setattr(report, "write", lambda run_dir: run_dir)
    folders = {"output": str(tmp_path / "out"), "run_dir": str(tmp_path / "run")}
    sft.main(sft.Args(dataset=("arithmetic",), steps=1, batch_size=4, **folders))
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["out", "run"]
    assert (tmp_path / "out/model.safetensors").is_file()


def test_positions_of_the_model_are_a_limit(tmp_path, capsys):
    rows = [{"prompt": "1+1=", "solution": "2" * n} for n in (10, 300)]  # the embedded model has 256 positions
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    saving = checkpoint.Saving(dry_run=True)
    sft.main(sft.Args(dataset=(str(tmp_path / "rows.jsonl"),), output=str(tmp_path / "out"), saving=saving))
    said = capsys.readouterr().out
    assert "1 of 2" in said and "256 tokens" in said


def test_rows_that_are_too_long_are_left_out_and_counted(capsys):
    """One row longer than memory allows would end every attempt to resume."""
    tokenizer = arithmetic.tokenizer()
    rows = [Prompt(f"a:{n}", "1+1=", [2] * 4, "2", solution="2" * n) for n in (10, 200, 300)]  # and an end token
    fit = lambda limit: [prompt.id for prompt in that_fit(rows, tokenizer, limit)[0]]
    assert fit(256) == ["a:10", "a:200"] and "1 of 3" in capsys.readouterr().out
    assert fit(15) == ["a:10"]
    with pytest.raises(BadInput, match="14 tokens"):
        fit(14)
