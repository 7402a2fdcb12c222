"""DPO: its loss by hand, the pairs it reads, and runs that learn, unlearn, resume, and are the same on two ranks."""

import json
import math
from dataclasses import replace

import pytest
import torch
from conftest import ROOT, launch
from helpers import load as load_script

from algos import dpo
from algos.dpo import dpo_loss, implicit_rewards
from common import placement
from common.data import arithmetic, pairs
from common.data.prompts import Prompt, Source
from common.preflight import flags
from common.rewards import grade_gsm8k
from common.rollout.rollout import collate
from common.run import report
from common.run.evaluation import Response
from common.trainer.batching import Compute, fill_bins

DPO, SFT = ROOT / "algos/dpo.py", ROOT / "algos/sft.py"
ALL = torch.ones(2, 1, dtype=torch.bool)


def test_loss_by_hand():
    """Policy -10 and -11, reference -12 and -11.5, beta 0.1: h = 0.1 (2 - 0.5)."""
    rewards = implicit_rewards(torch.tensor([[-10.0], [-11.0]]), torch.tensor([[-12.0, -11.5]]), ALL, 0.1)
    assert torch.allclose(rewards, torch.tensor([[0.2, 0.05]]))
    assert dpo_loss(rewards, 0.0).item() == pytest.approx(0.620957, abs=1e-6)
    smooth = 0.75 * math.log(1 + math.exp(-0.15)) + 0.25 * math.log(1 + math.exp(0.15))
    assert dpo_loss(rewards, 0.25).item() == pytest.approx(smooth, abs=1e-6)


def test_the_loss_starts_at_ln_2_and_its_gradient_raises_the_chosen_response():
    logprobs = torch.tensor([[-1.0, -2.0], [-3.0, -0.5]], requires_grad=True)
    mask = torch.ones(2, 2, dtype=torch.bool)
    rewards = implicit_rewards(logprobs, logprobs.detach().sum(1).view(1, 2), mask, 0.4)
    loss = dpo_loss(rewards, 0.0)
    loss.sum().backward()
    assert loss.item() == pytest.approx(math.log(2))
    assert torch.allclose(logprobs.grad, torch.tensor([[-0.2, -0.2], [0.2, 0.2]]))  # beta / 2


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_matches_a_slow_loop(smoothing):
    generator = torch.Generator().manual_seed(0)
    logprobs, ref = torch.randn(2, 8, 5, generator=generator, dtype=torch.float64) - 2
    mask = torch.rand(8, 5, generator=generator) < 0.6
    dirty = torch.where(mask, logprobs, torch.nan)
    found = dpo_loss(implicit_rewards(dirty, (ref * mask).sum(1).view(4, 2), mask, 0.3), smoothing)
    for k in range(4):
        sums = [
            sum(float(x[i, t]) for t in range(5) if mask[i, t]) for i in (2 * k, 2 * k + 1) for x in (logprobs, ref)
        ]
        h = 0.3 * ((sums[0] - sums[1]) - (sums[2] - sums[3]))
        sigma = lambda x: 1 / (1 + math.exp(-x))
        assert found[k].item() == pytest.approx(-(1 - smoothing) * math.log(sigma(h)) - smoothing * math.log(sigma(-h)))


def test_a_row_has_one_response_of_its_pair(tmp_path, monkeypatch):
    """Models with longrope look at the longest row. With that of a pair they would train at other frequencies."""
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"prompt": "1+1=", "chosen": "2", "rejected": "22222222"}\n')
    seen = []

    def settle(args, model, prompts, size, longest, longest_unit):
        seen.append((longest, longest_unit))
        raise InterruptedError

    monkeypatch.setattr(dpo, "settle", settle)
    with pytest.raises(InterruptedError):
        dpo.main(dpo.Args(**dpo.EMBEDDED | {"dataset": (str(file),)}))
    (prompt,), found = pairs.load_pairs((str(file),), Source(), arithmetic.tokenizer(), 64, 48)
    chosen, rejected = map(len, found[prompt.key])
    assert seen == [(len(prompt.ids) + rejected, len(prompt.ids) + chosen + rejected)]


def test_large_margins_neither_overflow_nor_vanish():
    rewards = torch.tensor([[500.0, -500.0], [-500.0, 500.0]], requires_grad=True)
    dpo_loss(rewards, 0.0).sum().backward()
    assert torch.equal(rewards.grad, torch.tensor([[0.0, 0.0], [-1.0, 1.0]]))


@pytest.mark.parametrize("budget", [1, 20, 40, 100])
@pytest.mark.parametrize("prompt_tokens", [5, 40])
def test_pairs_stay_together_whatever_the_budget(budget, prompt_tokens):
    """Several pairs may have one prompt. Each row is in one micro-batch, its neighbour beside it."""
    generator = torch.Generator().manual_seed(budget)
    prompts = [[number] * prompt_tokens for number in (1, 2, 2, 2, 3)]
    lengths = torch.randint(1, 30, (10,), generator=generator).tolist()
    batch = collate(
        [prompts[i // 2] for i in range(10)], [[9] * n for n in lengths], None, [False] * 10, 0, torch.device("cpu")
    )
    bins = fill_bins(batch, torch.arange(10), Compute(token_budget=budget), 2)
    rows = [row for one in bins for group in one.groups for row in group]
    assert sorted(rows) == list(range(10))
    for one in bins:
        groups = one.groups
        flat = [row for group in groups for row in group]
        assert all(flat[i] % 2 == 0 and flat[i + 1] == flat[i] + 1 for i in range(0, len(flat), 2))
        assert all(len({tuple(batch.prompt_ids[row]) for row in group}) == 1 for group in groups)
        tokens = sum(len(batch.prompt_ids[group[0]]) + sum(lengths[row] for row in group) for group in groups)
        assert one.tokens == tokens and (tokens <= budget or len(flat) == 2)


USER, GOOD, BAD = (
    {"role": role, "content": text} for role, text in (("user", "1+1="), ("assistant", "2"), ("assistant", "3"))
)


def load(tmp_path, *rows, **source):
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return pairs.load_pairs((str(file),), Source(**source), arithmetic.tokenizer(), 20, 3)


@pytest.mark.parametrize(
    "row, source",
    [
        ({"prompt": "1+1=", "chosen": "2", "rejected": "3"}, {}),
        ({"question": "1+1=", "good": "2", "bad": "3"}, {"columns": ("chosen=good", "rejected=bad")}),
        ({"prompt": "1+1=", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, {}),
        ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, {}),
        ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, {}),
        ({"good": [USER, GOOD], "bad": [USER, BAD]}, {"columns": ("chosen=good", "rejected=bad")}),
    ],
)
def test_texts_and_messages_are_the_same_pair(tmp_path, row, source):
    (prompt,), found = load(tmp_path, row, **source)
    encode = arithmetic.tokenizer().encode
    assert prompt.text.strip() == "1+1=" and found == {prompt.key: [[*encode("2"), 1], [*encode("3"), 1]]}


def test_rows_of_two_data_sets_with_one_id_keep_their_own_responses(world):
    prompts = [Prompt("d:1", "", [5], None, dataset=name) for name in "ab"]
    batch = dpo.collate(prompts, {prompts[0].key: [[1], [2]], prompts[1].key: [[3], [4]]}, world)
    assert batch.response_ids == [[1], [2], [3], [4]]


PAIR = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}


def test_equal_and_overlong_responses_are_left_out_and_counted(tmp_path, capsys):
    rows = [PAIR, {**PAIR, "rejected": "2"}, {**PAIR, "chosen": "222"}, {**PAIR, "chosen": "4444"}]
    kept, _ = load(tmp_path, *rows)
    assert [prompt.id.rpartition(":")[2] for prompt in kept] == ["1"]
    said = capsys.readouterr().out
    assert "3 of 4" in said and "--max-response-tokens 3" in said


def test_the_committed_pairs_are_a_right_and_a_wrong_response():
    rows = [json.loads(line) for line in arithmetic.PAIRS.read_text().splitlines()]
    known = {row["question"]: row["answer"] for row in arithmetic.problems("train")}
    assert len(rows) > 1000 and all(known[row["prompt"]] == row["answer"] for row in rows)
    assert all(grade_gsm8k(row["chosen"], row["answer"]) == 1 for row in rows)
    assert all(grade_gsm8k(row["rejected"], row["answer"]) == 0 for row in rows)


def run(folder, *flags, script=DPO, ranks=1) -> list[dict]:
    launch(script, *flags, "--output", folder / "model", "--run-dir", folder, ranks=ranks, engine=False)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.nightly
def test_it_learns_and_with_the_responses_exchanged_it_unlearns(tmp_path):
    """It ranks the pairs rightly, and greedy answers become better; the wrong way round they become worse."""
    short = ["--steps", 24, "--batch-size", 32]
    rows = run(tmp_path / "right", *short)
    assert rows[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-5)  # the policy is its reference
    assert rows[-1]["reward/accuracy"] > 0.7 and rows[-1]["train/loss"] < 0.6
    assert rows[-1]["reward/chosen"] > rows[-1]["reward/rejected"] + 0.5
    exchanged = ["--dataset", arithmetic.PAIRS, "--columns", "chosen=rejected", "rejected=chosen"]
    run(tmp_path / "wrong", *short, *exchanged)
    greedy = {}
    for name in ("right", "wrong"):
        flags = ["--model", tmp_path / name / "model", "--rollout-backend", "hf", "--prompts", 128]
        greedy[name] = json.loads(launch(ROOT / "scripts/evaluate.py", *flags).stdout.splitlines()[-1])["greedy"]
    assert greedy["right"] > 0.6 and greedy["wrong"] < 0.45, greedy


@pytest.mark.slow
@pytest.mark.parametrize("script", [DPO, SFT, "kto"], ids=["dpo", "sft", "kto"])
def test_two_ranks_and_small_micro_batches_are_the_same_run(tmp_path, script):
    """DPO goes through its pairs several times: a reference does not depend on which rank computed it."""
    flags = ["--steps", 4, "--batch-size", 6, "--warmup-steps", 1]
    if script == "kto":
        script = tmp_path / "kto.py"
        script.write_text(load_script("scripts/variants.py").source("kto"))
        flags += ["--beta", 0.1]
    if script != SFT:
        few = tmp_path / "few.jsonl"
        long = lambda i, digit: digit * (20 if i % 3 == 0 else 1 + i % 2)  # ranks get unequal numbers of micro-batches
        rows = [{"prompt": f"{i}=", "chosen": long(i, "1"), "rejected": long(i, "2")} for i in range(10)]
        few.write_text("".join(json.dumps(row) + "\n" for row in rows))
        flags += ["--dataset", few]
    one = run(tmp_path / "1", *flags, script=script)
    two = run(tmp_path / "2", *flags, "--token-budget", 32, script=script, ranks=2)
    for row, other in zip(one, two, strict=True):
        assert row.keys() == other.keys()
        for key in row.keys() - {"time/step", "step"}:
            assert other[key] == pytest.approx(row[key], rel=1e-3, abs=1e-5), (row["step"], key)


def test_a_resumed_run_computes_the_references_that_it_needs_in_the_same_batches(world, tmp_path, monkeypatch):
    """With other pairs in a batch they would be rounded differently. Five pairs are drawn eight times."""
    monkeypatch.setattr(placement, "init", lambda *given, **named: world)
    monkeypatch.setattr(placement, "finish", lambda *given: None)
    monkeypatch.setattr(report, "write", lambda run_dir: run_dir)
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(arithmetic.PAIRS.read_text().splitlines(keepends=True)[:5]))
    batches: list[list[tuple]] = []  # of each run: the keys of each batch

    def collated(prompts, *others):
        batches[-1].append(tuple(prompt.key for prompt in prompts))
        return collate_pairs(prompts, *others)

    def train(name: str, steps: int) -> None:
        batches.append([])
        given = {"output": str(tmp_path / "out"), "run_dir": str(tmp_path / name)}
        given |= {"dataset": (str(data),), "steps": steps, "batch_size": 2, "saving": flags.Saving(resume="auto")}
        dpo.main(dpo.Args(**{**dpo.EMBEDDED, **given}))

    collate_pairs = dpo.collate
    monkeypatch.setattr(dpo, "collate", collated)
    train("whole", 4)
    train("parts", 2)
    train("parts", 4)
    whole, _, resumed = batches
    assert len(whole) == 3 + 4 and len(resumed) == 2 + 2
    assert resumed[-2:] == whole[-2:], "what is trained on"
    assert set(resumed[:2]) < set(whole[:3]), "the references"


@pytest.mark.slow
@pytest.mark.parametrize("script", [DPO, SFT], ids=["dpo", "sft"])
def test_a_run_that_is_resumed_is_the_run_bit_for_bit(tmp_path, script):
    flags = ["--batch-size", 8, "--save-every", 3, "--steps", 6]
    whole = run(tmp_path / "whole", *flags, script=script)
    again = run(tmp_path / "again", *flags, script=script)
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts/metrics.jsonl").write_text((tmp_path / "whole/metrics.jsonl").read_text())
    checkpoint = tmp_path / "parts/checkpoints/step_000003"
    checkpoint.parent.mkdir()
    (tmp_path / "whole/checkpoints/step_000003").rename(checkpoint)
    parts = run(tmp_path / "parts", *flags, "--resume", "auto", script=script)
    strip = lambda rows: [{key: value for key, value in row.items() if not key.startswith("time/")} for row in rows]
    assert strip(whole) == strip(again) == strip(parts) and len(parts) == 6
    weights = [(tmp_path / name / "model/model.safetensors").read_bytes() for name in ("whole", "again", "parts")]
    assert weights[0] == weights[1] == weights[2]


@pytest.mark.slow
def test_a_file_whose_responses_changed_is_not_gone_on_with(tmp_path):
    """The prompts and answers are the same; what the run learns from is the other way round."""
    lines = arithmetic.PAIRS.read_text().splitlines(keepends=True)[:16]
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(lines))
    flags = ["--dataset", data, "--batch-size", 4, "--output", tmp_path / "model", "--run-dir", tmp_path / "run"]
    launch(DPO, *flags, "--steps", 2)
    rows = [json.loads(line) for line in lines]
    data.write_text("".join(json.dumps({**r, "chosen": r["rejected"], "rejected": r["chosen"]}) + "\n" for r in rows))
    result = launch(DPO, *flags, "--steps", 4, "--resume", "auto", check=False)
    assert result.returncode == 2 and "error[data-changed]" in result.stderr


@pytest.mark.slow
def test_a_copy_has_the_name_of_its_file(tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text(DPO.read_text())
    run(tmp_path / "run", "--steps", 1, "--batch-size", 4, script=mine)
    assert json.loads((tmp_path / "run/run.json").read_text())["algorithm"] == "mine"


def test_a_response_that_was_cut_off_is_not_kept():
    """The engine says which one. A long text may have ended by itself, and a short one may have been cut off."""
    evaluate = load_script("scripts/evaluate.py")
    prompt = Prompt("a:1", "1+1=", [1], "2", meta={"prompt": "1+1="})
    graded = [Response("222222", 1.0, True), Response("2", 1.0, False), Response("333333", 0.0, True)]
    ended = evaluate.ended([*graded, Response("3", 0.0, False)])
    assert ended == [("2", 1.0), ("3", 0.0)]
    assert evaluate.pair(prompt, ended) == [{"prompt": "1+1=", "answer": "2", "chosen": "2", "rejected": "3"}]
    assert evaluate.right(prompt, ended) == [{"prompt": "1+1=", "answer": "2", "solution": "2"}]
    assert evaluate.pair(prompt, ended[:1]) == []


def test_kept_rows_have_the_prompt_that_was_answered_and_an_answer_only_if_there_is_one():
    evaluate = load_script("scripts/evaluate.py")
    prompt = Prompt("a:1", "", [1], None, meta={"prompt": "2 apples?"}, dataset="gsm8k")
    (asked,), (with_template,) = (evaluate.right(prompt, [("2", 1.0)], template) for template in ("", "{prompt}"))
    assert asked["prompt"].startswith("2 apples?") and len(asked["prompt"]) > len("2 apples?")
    assert with_template == {"prompt": "2 apples?", "solution": "2"}
    (with_tools,) = evaluate.right(replace(prompt, tools=[{"name": "add"}]), [("2", 1.0)])
    assert with_tools == {**asked, "tools": [{"name": "add"}]}


@pytest.mark.slow
def test_a_run_that_goes_on_with_smaller_batches_has_the_references_of_its_pairs(tmp_path):
    """A checkpoint says where its pairs end. That isn't steps times the batch size of the run that goes on."""
    flags = ["--output", tmp_path / "model", "--run-dir"]
    launch(ROOT / "algos/dpo.py", "--steps", "2", "--batch-size", "32", *flags, tmp_path / "first")
    saved = tmp_path / "first/checkpoints/step_000002"
    resumed = ["--steps", "4", "--batch-size", "8", "--resume", saved]
    launch(ROOT / "algos/dpo.py", *resumed, *flags, tmp_path / "second")
    steps = [json.loads(line)["step"] for line in (tmp_path / "second/metrics.jsonl").read_text().splitlines()]
    assert steps[-2:] == [3, 4]
