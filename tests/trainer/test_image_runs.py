"""Runs with images: what they cannot be combined with, and what must not lose the images on its way."""

import json
from types import SimpleNamespace

import image_models
import pytest
import torch
from conftest import ROOT, launch
from test_images import QUESTIONS, noise, read, rollout_of, write

from algos import grpo, sft
from common.data import images
from common.data.prompts import Prompt, TrainSource, load
from common.data.tokenizer import load_tokenizer
from common.errors import BadInput, RunFailed
from common.placement import Layout
from common.preflight import checks, offline, prepare
from common.rollout import vllm_engine
from common.run import checkpoint
from common.trainer import batching, model, packing_check
from scripts import evaluate, merge_lora

SEEN = Prompt("seen", "?", images.ImageIds([4, 4, 5], [4, 5], "?", [noise(0)], "folder"), "1")
UNSEEN = Prompt("unseen", "?", [5], "1")
COMPUTE = batching.Compute(token_budget=1000)


@pytest.fixture(scope="module")
def idefics(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("models") / "idefics3"
    image_models.FAMILIES["idefics3"].make(folder)
    return str(folder)


@pytest.mark.parametrize(
    "prompts, compute, others, said",
    [
        ([UNSEEN, SEEN], batching.Compute(sequence_parallel=2), {}, "--sequence-parallel: prompts with images do not"),
        ([SEEN], COMPUTE, {"environment": "guess"}, "--environment: prompts with images do not"),
        ([SEEN], COMPUTE, {"layout": Layout("split")}, "--rollout-placement split: prompts with images do not"),
        ([SEEN], batching.Compute(train_vision=True, lora_rank=4), {}, "--train-vision: --lora-rank freezes it"),
        ([UNSEEN], batching.Compute(train_vision=True), {}, "--train-vision: no prompt has an image"),
        ([SEEN], batching.Compute(train_vision=True), {}, ""),
        ([UNSEEN], batching.Compute(sequence_parallel=2), {"environment": "guess", "layout": Layout("split")}, ""),
    ],
)
def test_what_does_not_go_together_with_images_is_refused(prompts, compute, others, said):
    if not said:
        return checks.check_images(prompts, compute, **others)
    with pytest.raises(BadInput, match=said):
        checks.check_images(prompts, compute, **others)


NEED_PACKING = "--model .*idefics3: prompts with images need packed rows, .*chunks in some layers"


def test_images_are_refused_before_loading_if_the_layers_turn_packing_off(idefics, monkeypatch, tmp_path):
    """A rank would find out in its first forward, and the others would wait for it."""
    args = grpo.Args(**grpo.EMBEDDED | {"model": idefics})
    inputs = SimpleNamespace(model=idefics, size=1, resume=None, prompts=[UNSEEN], held_out=[SEEN])
    monkeypatch.setattr(packing_check, "why_not_packed", lambda *given: "chunks in some layers")
    with pytest.raises(BadInput, match=NEED_PACKING):
        prepare.settle(args, inputs, ("policy",), 100, args.prompts_per_step, False)
    args = sft.Args(model=idefics, output=str(tmp_path / "out"))
    with pytest.raises(BadInput, match=NEED_PACKING):
        offline.settle(args, idefics, [UNSEEN, SEEN], 1, 100)


@pytest.mark.parametrize(
    "command",
    [
        ("algos/grpo.py", "--dataset", "arithmetic"),
        ("algos/sft.py", "--dataset", "arithmetic", "--output", "out"),
        ("algos/dpo.py", "--output", "out"),
    ],
)
def test_every_kind_of_run_is_checked(command, tmp_path):
    script, *flags = command
    left = launch(ROOT / script, *flags, "--train-vision", "--dry-run", cwd=tmp_path, check=False)
    assert left.returncode == 2 and "--train-vision: no prompt has an image" in left.stderr


def test_evaluation_plays_no_episodes_with_images(tmp_path):
    flags = ["--model", ROOT / "baselines/images-start", "--dataset", "squares", "--environment", "guess"]
    left = launch(ROOT / "scripts/evaluate.py", *flags, "--prompts", 4, check=False, cwd=tmp_path)
    assert left.returncode == 2 and "--environment" in left.stderr


def test_a_teacher_that_sees_nothing_is_refused(models):
    tokenizer = load_tokenizer(models["untied"])[0]
    checks.check_companion("--teacher", models["untied"], tokenizer, [UNSEEN], 8)
    with pytest.raises(BadInput, match="--teacher"):
        checks.check_companion("--teacher", models["untied"], tokenizer, [SEEN], 8)


def test_responses_that_are_kept_as_data_keep_their_images(tmp_path):
    """scripts/evaluate.py --save-right and --save-pairs write what algos/sft.py and algos/dpo.py read."""
    folder = str(ROOT / "baselines/images-start")
    tokenizer = load_tokenizer(folder)[0]
    (prompt,) = load(("squares",), TrainSource(), "test", tokenizer, 400)[:1]
    graded = [("3", 1.0), ("4", 0.0)]
    rows = evaluate.right(prompt, graded) + evaluate.pair(prompt, graded)
    (tmp_path / "kept.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    solved, compared = load((str(tmp_path / "kept.jsonl"),), TrainSource(), "train", tokenizer, 400)
    assert solved.ids.key == compared.ids.key == prompt.ids.key
    assert solved.solution == "3" and (compared.meta["chosen"], compared.meta["rejected"]) == ("3", "4")


def test_ranks_leave_together_when_an_engine_expands_images_otherwise(monkeypatch):
    """A rank that raised by itself in the engine's loop would let the others wait in their next collective."""
    finished = lambda row, ids: SimpleNamespace(
        request_id=str(row),
        finished=True,
        prompt_token_ids=ids,
        outputs=[SimpleNamespace(token_ids=[7], logprobs=SimpleNamespace(logprobs=[-1.0]), finish_reason="stop")],
    )
    steps = [[finished(0, [4, 5])], [finished(1, [4, 4, 5])]]
    llm_engine = SimpleNamespace(has_unfinished_requests=lambda: bool(steps), step=lambda: steps.pop(0))
    engine = object.__new__(vllm_engine.VLLMEngine)
    engine.stop_token_ids, engine.never, engine.weight_version = [1], (4,), 0
    engine.world = SimpleNamespace(device=torch.device("cpu"), engine_index=0, size=1, rollout_tp=1, tp_group=None)
    engine.llm = SimpleNamespace(llm_engine=llm_engine, enqueue=lambda *given, **named: ["0-x", "1-x"])
    raised = []
    monkeypatch.setattr(vllm_engine, "raise_together", raised.append)
    engine.generate([SEEN.ids, SEEN.ids], 1, 1.0, 4, 0)
    assert len(raised) == 1 and isinstance(raised[0], RunFailed) and not steps
    steps += [[finished(0, [4, 4, 5])], [finished(1, [4, 4, 5])]]
    engine.generate([SEEN.ids, SEEN.ids], 1, 1.0, 4, 0)
    assert raised[1:] == [None]


def test_adapters_of_a_model_that_sees_are_merged_and_its_processor_comes_along(idefics, world, tmp_path):
    policy = model.load(idefics, world, torch.float32, batching.Compute(token_budget=1000, lora_rank=2))
    for name, parameter in policy.named_parameters():
        if name.endswith("lora_b"):
            torch.nn.init.normal_(parameter, std=0.1)
    checkpoint.export(policy, load_tokenizer(idefics)[0], tmp_path / "adapters", torch.float32, world)
    merge_lora.main(merge_lora.Args(tmp_path / "adapters", tmp_path / "merged", dtype="float32"))
    merged = model.load(str(tmp_path / "merged"), world, torch.float32, COMPUTE)
    prompts = read(write(tmp_path, *QUESTIONS), str(tmp_path / "merged"))
    given = [logprobs(each, prompts, world) for each in (policy, merged)]
    assert (given[0] - given[1]).abs().max() <= 1e-5
    assert (given[0] - logprobs(model.load(idefics, world, torch.float32, COMPUTE), prompts, world)).abs().max() > 1e-2


def logprobs(policy, prompts: list, world) -> torch.Tensor:
    rollout = rollout_of(prompts)
    (micro,) = batching.pack(rollout, torch.arange(len(rollout)), COMPUTE, world)
    with torch.no_grad():
        return model.response_logprobs(policy, micro, 1.0)[0]


def test_short_prompts_share_their_images_and_only_theirs():
    ids = lambda seed: images.ImageIds([4, 4, 5], [4, 5], "?", [noise(seed)], "folder")
    same, prompts = ids(0), [ids(0), ids(0), ids(1), ids(1)]
    rollout = SimpleNamespace(prompt_ids=prompts, response_ids=[[7, 8]] * 4)
    (one,) = batching.fill_bins(rollout, torch.arange(4), COMPUTE, 1)
    assert sorted(map(sorted, one.groups)) == [[0, 1], [2, 3]] and prompts[0] == same
    rollout.prompt_ids = [[4, 4, 5]] * 4
    (one,) = batching.fill_bins(rollout, torch.arange(4), COMPUTE, 1)
    assert len(one.groups) == 4  # without images it is not worth it
