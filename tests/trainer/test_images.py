"""Prompts with images: the data, the packed forward, both engines, and a task that a small model learns."""

import base64
import dataclasses
import json
import os
import re
import runpy
from functools import cache
from io import BytesIO
from types import SimpleNamespace

import datasets
import image_models
import numpy as np
import pytest
import torch
import transformers
from conftest import ROOT, launch
from helpers import load as load_script
from image_models import FAMILIES
from PIL import Image
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForImageTextToText
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.smolvlm import processing_smolvlm

from common import rewards, weight_sync
from common.data import arithmetic, images, squares
from common.data.prompts import Prompt, TrainSource, load
from common.data.tokenizer import image_tokens, load_tokenizer
from common.errors import BadInput
from common.preflight import memory
from common.preflight.run_directory import read_metrics
from common.rewards.grading import Item
from common.rewards.text import format_boxed_reward
from common.rollout import hf_engine
from common.rollout.rollout import collate
from common.rollout.vllm_engine import image_error
from common.run import diagnosis, sampling
from common.trainer import batching, model, vision

TEMPERATURE = 0.7
replay = load_script("scripts/replay.py")
COMPUTE = batching.Compute(token_budget=1000, train_vision=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """name -> folder of a tiny model of the family."""
    folder = tmp_path_factory.mktemp("image-models")

    @cache
    def save(name: str) -> str:
        FAMILIES[name].make(folder / name)
        return str(folder / name)

    return save


@pytest.fixture(autouse=True)
def no_tensors_of_other_models():
    """Two models may make the same ids of a prompt, and other pixels. A run has one."""
    images.tensors.cache_clear()


@pytest.fixture
def processors(monkeypatch):
    """Qwen's processors, which transformers makes only beside torchvision."""
    own = images.processor
    stands_in = lambda path: image_models.QwenProcessor(path) if "qwen" in path else own(path)
    monkeypatch.setattr(images, "processor", stands_in)


def noise(seed: int, width: int = 32, height: int = 32) -> bytes:
    """A PNG file of random pixels."""
    pixels = np.random.RandomState(seed).randint(0, 255, (height, width, 3), dtype=np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return file.getvalue()


def write(folder, *rows: dict) -> str:
    """A data set of these rows, with the images 0.png, 1.png, 2.png (large) and 3.png (high) beside it."""
    for i, size in enumerate([(32, 32), (32, 32), (90, 64), (40, 90)]):
        (folder / f"{i}.png").write_bytes(noise(i, *size))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "rows.jsonl")


def read(path: str, model_path: str) -> list:
    return load((path,), TrainSource(), "train", load_tokenizer(model_path)[0], 400)


QUESTIONS = [
    {"prompt": "how many <image> red squares are in it?", "images": ["0.png"]},
    {"prompt": "how many <image> red squares are in it?", "images": ["1.png"]},  # the same text, another image
    {"prompt": "<image>is larger than<image>by how many?", "images": ["2.png", "3.png"]},
]


def rollout_of(prompts: list):
    generator = torch.Generator().manual_seed(0)
    draw = lambda n: torch.randint(30, 100, (n,), generator=generator).tolist()
    return collate(
        [prompt.ids for prompt in prompts for _ in range(2)],
        [draw(n) for n in (5, 7, 3, 4, 6, 2)],
        None,
        [False] * 6,
        0,
        torch.device("cpu"),
    )


def expected_logprobs(path: str, rollout) -> tuple[torch.nn.Module, torch.Tensor]:
    """The log-probs (N, T) of transformers' own model, one response at a time."""
    theirs = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    never, rows = list(image_tokens(theirs.config)), []
    for prompt, response in zip(rollout.prompt_ids, rollout.response_ids):
        made = dict(images.process(prompt.model_path, prompt.text, prompt.pictures()))
        ids = torch.cat([made.pop("input_ids"), torch.tensor([response])], dim=1)
        made.pop("attention_mask", None)
        if "mm_token_type_ids" in made:
            made["mm_token_type_ids"] = (ids == theirs.config.image_token_id).int()
        logits = theirs(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **made).logits[0]
        logits = logits[len(prompt) - 1 : -1] / TEMPERATURE
        logits[:, never] = -torch.inf
        rows.append(logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0])
    return theirs, torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_rows_with_images_give_what_transformers_gives_alone(name, saved, processors, world, tmp_path):
    """Log-probs and the gradient of every parameter, the vision tower included. Each image is encoded once a group."""
    path = saved(name)
    prompts = read(write(tmp_path, *QUESTIONS), path)
    rollout = rollout_of(prompts)
    policy = model.load(path, world, torch.float32, COMPUTE)
    (micro,) = batching.pack(rollout, torch.arange(6), COMPUTE, world)
    assert micro.input_ids.shape[1] == sum(len(p.ids) for p in prompts) + sum(map(len, rollout.response_ids))
    assert len(micro.position_ids) == (4 if name.startswith("qwen") else 1)
    ours, _ = model.response_logprobs(policy, micro, TEMPERATURE)
    theirs, expected = expected_logprobs(path, rollout)
    expected = expected[micro.rows]
    assert (ours - expected).abs().max() <= 1e-5
    weights = torch.linspace(-1, 1, ours.numel()).view(ours.shape)
    (ours * weights).sum().backward()
    (expected * weights).sum().backward()
    gradients, unused = dict(theirs.named_parameters()), 0
    for key, parameter in policy.named_parameters():
        if gradients[key].grad is None:  # a tower's last layers, which LLaVA does not use
            unused += 1
            continue
        found, right = parameter.grad.full_tensor(), gradients[key].grad
        assert (found - right).norm() <= 1e-4 * right.norm() + 1e-6, key
    assert unused <= 20


@pytest.mark.parametrize("name", ["llava", "idefics3"])
def test_a_critic_sees_what_the_policy_sees(name, saved, world, tmp_path):
    """Its values are products with the hidden states of transformers' model. They start at 0."""
    path = saved(name)
    (prompt, *_) = read(write(tmp_path, *QUESTIONS), path)
    critic = model.load(path, world, torch.float32, COMPUTE, value_head=True)
    rollout = collate([prompt.ids] * 2, [[40, 41, 42], [43, 44]], None, [False] * 2, 0, torch.device("cpu"))
    (micro,) = batching.pack(rollout, torch.arange(2), COMPUTE, world)
    assert (model.response_values(critic, micro) == 0).all()
    model.reshard(critic)
    with torch.no_grad():
        critic.score.weight.to_local().copy_(torch.linspace(-1, 1, 64)[None])
    theirs = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    made = dict(images.process(path, prompt.text, prompt.ids.pictures()))
    ids = torch.cat([made.pop("input_ids"), torch.tensor([[40, 41, 42]])], dim=1)
    made.pop("attention_mask")
    hidden = theirs.model(input_ids=ids, **made).last_hidden_state[0, -4:-1]
    values = model.response_values(critic, micro)[micro.rows.tolist().index(0)]
    assert (values - hidden @ torch.linspace(-1, 1, 64)).abs().max() <= 1e-5


FEW = ["--eval-prompts", "8", "--prompts-per-step", "4", "--group-size", "2"]


@pytest.mark.slow
def test_ppo_trains_with_images(tmp_path):
    launch(ROOT / "algos/ppo.py", "--dataset", "squares", *FEW, "--steps", "3", "--run-dir", tmp_path)
    metrics = read_metrics(tmp_path)
    assert [row["step"] for row in metrics] == [0, 1, 2, 3] and metrics[-1]["critic/explained_variance"] != 0


@pytest.mark.parametrize("name", FAMILIES)
def test_the_tower_is_frozen_and_what_connects_it_is_trained(name, saved):
    """Qwen's mergers are parts of its tower, and trained nevertheless."""
    path, (_, tower, connector, _) = saved(name), FAMILIES[name]
    found = {}
    for train_vision in (False, True):
        policy = model.skeleton(AutoConfig.from_pretrained(path), path)
        vision.prepare(policy, train_vision)
        found[train_vision] = {key for key, parameter in policy.named_parameters() if not parameter.requires_grad}
    names = {key for key, _ in policy.named_parameters()}
    assert found[False] == {key for key in names if key.startswith(tower) and not key.startswith(connector)}
    assert found[False] and not found[True]
    assert all(any(key.startswith(part) for key in names) for part in connector)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_frozen_tower_keeps_nothing_for_a_backward(name, saved, processors, world, tmp_path):
    """Nor with --activation-checkpointing, for which transformers makes the outputs of embeddings require gradients."""
    path, (_, tower, connector, _) = saved(name), FAMILIES[name]
    compute = dataclasses.replace(COMPUTE, train_vision=False, activation_checkpointing=True)
    policy = model.load(path, world, torch.float32, compute)
    kept = []

    def look(key):
        def hook(module, given, output):
            if torch.is_tensor(output) and output.requires_grad:
                kept.append(key)

        return hook

    for key, module in policy.named_modules():
        if key.startswith(tower) and not key.startswith(connector):
            module.register_forward_hook(look(key))
    rollout = rollout_of(read(write(tmp_path, *QUESTIONS), path))
    (micro,) = batching.pack(rollout, torch.arange(6), COMPUTE, world)
    logprobs, _ = model.response_logprobs(policy, micro, TEMPERATURE)
    logprobs.sum().backward()
    assert not [key for key in kept if not any(part.startswith(key) for part in connector)]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_trained_tower_is_recomputed_too(name, saved, processors, world, tmp_path):
    """--activation-checkpointing keeps fewer numbers for the backward, and changes no gradient."""
    path = saved(name)
    rollout = rollout_of(read(write(tmp_path, *QUESTIONS), path))
    gradients, kept = [], []

    def count(saved: torch.Tensor) -> torch.Tensor:
        kept[-1] += saved.numel()
        return saved

    for checkpointing in (False, True):
        compute = dataclasses.replace(COMPUTE, activation_checkpointing=checkpointing)
        policy = model.load(path, world, torch.float32, compute)
        (micro,) = batching.pack(rollout, torch.arange(6), compute, world)
        tower = policy.get_encoder(modality="image")
        layers = [module for module in tower.modules() if isinstance(module, GradientCheckpointingLayer)]
        assert layers and all(layer.training for layer in layers)
        kept.append(0)
        with torch.autograd.graph.saved_tensors_hooks(count, lambda saved: saved):
            logprobs, _ = model.response_logprobs(policy, micro, TEMPERATURE)
        logprobs.sum().backward()
        gradients.append({key: p.grad.full_tensor().clone() for key, p in policy.named_parameters()})
    assert kept[1] < kept[0] / 2
    for key, gradient in gradients[0].items():
        assert torch.allclose(gradient, gradients[1][key], atol=1e-6), key


@pytest.mark.parametrize("train_vision", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_micro_batches_without_images_train_in_bfloat16_too(name, train_vision, saved, processors, world, tmp_path):
    """FSDP refuses gradients of two dtypes: what an image alone uses has none from the other micro-batches."""
    path = saved(name)
    compute = dataclasses.replace(COMPUTE, train_vision=train_vision)
    policy = model.load(path, world, torch.bfloat16, compute)
    prompts = read(write(tmp_path, {"prompt": "how many?", "answer": "1"}, *QUESTIONS[:1]), path)
    for order in (prompts, prompts[::-1]):
        micro_batches = []
        for number, prompt in enumerate(order):
            (micro,) = batching.pack(rollout_of([prompt]), torch.arange(2), compute, world)
            micro.last = number == 1
            micro_batches.append(micro)
        assert sorted(bool(micro.images) for micro in micro_batches) == [False, True]
        for micro in micro_batches:
            model.response_logprobs(policy, micro, TEMPERATURE)[0].sum().backward()
        trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        assert all(parameter.grad is not None for parameter in trained)
        policy.zero_grad()


@pytest.mark.parametrize("name", FAMILIES)
def test_the_image_decides_and_a_budget_does_not(name, saved, processors, world, tmp_path):
    path = saved(name)
    prompts = read(write(tmp_path, *QUESTIONS), path)
    rollout, policy = rollout_of(prompts), model.load(path, world, torch.float32)
    found = []
    for budget in (1000, 1):
        compute = batching.Compute(token_budget=budget)
        micro_batches = batching.pack(rollout, torch.arange(6), compute, world)
        assert len(micro_batches) == (1 if budget == 1000 else 6)
        found.append(model.frozen_logprobs(policy, rollout, micro_batches, TEMPERATURE))
    assert torch.allclose(*found, atol=1e-5)
    rollout.prompt_ids[:2] = rollout.prompt_ids[2:4]  # the other image
    (micro,) = batching.pack(rollout, torch.arange(6), COMPUTE, world)
    other = model.frozen_logprobs(policy, rollout, [micro], TEMPERATURE)
    assert (other[:2] - found[0][:2]).abs().max() > 1e-3 and torch.allclose(other[2:], found[0][2:], atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_slow_engine_agrees_with_the_trainer_and_samples_no_placeholder(name, saved, processors, world, tmp_path):
    path = saved(name)
    prompts = [prompt.ids for prompt in read(write(tmp_path, *QUESTIONS, {"prompt": "and without one?"}), path)]
    policy = model.load(path, world, torch.float32, batching.Compute(token_budget=1000))
    engine = hf_engine.HFEngine(path, [2], world, torch.float32)
    with torch.no_grad():  # a head that would say nothing but the placeholder
        for head in (policy.get_output_embeddings().weight.to_local(), engine.model.get_output_embeddings().weight):
            head[4] = 50 * head[5]
    for update in range(2):
        rollout = engine.generate(prompts, 2, TEMPERATURE, 12, seed=update)
        assert not any(4 in response for response in rollout.response_ids)
        micro_batches = batching.pack(rollout, torch.arange(8), COMPUTE, world)
        ours = model.frozen_logprobs(policy, rollout, micro_batches, TEMPERATURE)
        assert (ours - rollout.rollout_logprobs).abs().max() <= 1e-5
        with torch.no_grad():
            for key, parameter in policy.named_parameters():
                if key.startswith(FAMILIES[name].connector):
                    parameter.to_local().add_(torch.randn(parameter.shape), alpha=0.02)
        weight_sync.push(policy, engine)


@pytest.mark.slow
def test_vllm_follows_the_trainer(saved, tmp_path, monkeypatch):
    """After loading and after three updates, with a frozen and with a trained tower. The same images come each time:
    vLLM keeps their vectors, and those of the old weights would be a nat off.
    """
    data, site = write(tmp_path, *QUESTIONS), str(ROOT / "tests/workers/without_torchvision")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [site, os.environ.get("PYTHONPATH")])))
    served = [saved(name) for name, family in FAMILIES.items() if family.served]
    result = launch(ROOT / "tests/workers/images.py", data, *served, fresh=True)
    rows = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert len(rows) == 2 * len(served) and all(len(row["gaps"]) == 4 for row in rows)
    assert max(gap for row in rows for gap in row["gaps"]) <= 1e-5, rows
    assert all(row["tower moved"] == row["train_vision"] for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llava", "idefics3", "qwen3_vl"])
def test_gradients_do_not_depend_on_ranks_of_which_one_sees_no_image(name, saved, processors, world, tmp_path):
    """Two ranks, and all images on one of them. Both have gradients for all that is trained, even for parts of the
    tower that no image uses, with a trained and with a frozen tower.
    """
    data, worker = write(tmp_path, *QUESTIONS), ROOT / "tests/workers/image_gradient.py"
    right = runpy.run_path(str(worker))["gradients"](world, data, saved(name))
    launch(worker, data, saved(name), tmp_path / "gradients", ranks=2, engine=False)
    found, (_, tower, connector, _) = torch.load(tmp_path / "gradients"), FAMILIES[name]
    assert found.keys() == right.keys()
    assert any(key.startswith(tuple(f"False {part}" for part in connector)) for key in found)
    assert any(key.startswith(f"True {tower}") for key in found)
    for key, gradient in right.items():
        assert (found[key] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-7, key


ROW = {"prompt": "<image>?", "images": ["0.png"]}


@pytest.mark.parametrize(
    "row, said",
    [
        (ROW | {"images": ["9.png"]}, "rows.jsonl:1: image 9.png cannot be read: No such file"),
        (ROW | {"images": ["broken.png"]}, "rows.jsonl:1: image broken.png cannot be read: cannot identify image file"),
        (ROW | {"images": ["cut.png"]}, "rows.jsonl:1: image cut.png cannot be read: "),
        (ROW | {"images": ["data:image/png;base64,!"]}, "rows.jsonl:1: an image cannot be read: "),
        (ROW | {"images": [3]}, "rows.jsonl:1: an image must be a path, a data URL or bytes, got int"),
        (ROW | {"prompt": "<image><image>?"}, "rows.jsonl:1: 2 times <image> in the text, and 1 images"),
        (ROW | {"prompt": "<image>?", "images": ["0.png", "1.png"]}, "1 times <image> in the text, and 2 images"),
    ],
)
def test_bad_images_are_refused_in_one_line(row, said, saved, tmp_path):
    path = write(tmp_path, row)
    (tmp_path / "broken.png").write_text("no image")
    (tmp_path / "cut.png").write_bytes(noise(0)[:500])
    with pytest.raises(BadInput) as error:
        read(path, saved("idefics3"))
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_model_without_eyes_is_refused(models, tmp_path):
    path = write(tmp_path, ROW)
    with pytest.raises(BadInput, match="--model .*qwen2.*rows.jsonl"):
        read(path, models["tied"])


def images_config(name: str, top: bool = False, decoder: bool = False, **tower):
    """A configuration of the family, whose head is tied at the top and for its decoder as these say."""
    text = image_models.TEXT | {"tie_word_embeddings": decoder}
    return CONFIG_MAPPING[name](
        text_config=text | {"model_type": "qwen2" if name == "llava" else "llama"},
        tie_word_embeddings=top,
        vision_config=image_models.VISION | {"image_size": 32, "patch_size": 8} | tower,
        image_token_id=4,
        pad_token_id=0,
    )


def test_towers_whose_images_have_several_sizes_are_refused():
    with pytest.raises(BadInput, match="^--model x: .*pixtral.*clip_vis"):
        model.skeleton(images_config("llava", model_type="pixtral"), "x")
    model.skeleton(images_config("llava", model_type="clip_vision_model"), "x")


@pytest.mark.parametrize("name, top, decoder", [("idefics3", 1, 0), ("idefics3", 0, 1), ("llava", 1, 0)])
def test_a_head_that_is_tied_in_one_place_is_refused(name, top, decoder):
    """If it were not, vLLM's log-probs would be 6 nats off with Idefics 3, and one after an update with LLaVA."""
    top, decoder = bool(top), bool(decoder)
    said = f"config.json, whose tie_word_embeddings is {top} and in text_config {decoder}: set both"
    with pytest.raises(BadInput, match=said):
        model.skeleton(images_config(name, top, decoder), "x")


def test_a_tied_head_is_not_refused():
    tied = images_config("idefics3", True, True)
    for value_head in (False, True):  # as before a run of PPO
        assert model.skeleton(tied, "x", value_head).config.model_type == "idefics3"
    qwen = transformers.Qwen2_5_VLConfig(vision_config={"depth": 1}, tie_word_embeddings=True)
    assert model.skeleton(qwen, "x").config.model_type == "qwen2_5_vl"


def test_a_package_that_is_missing_is_named(monkeypatch):
    """SmolVLM's processor writes the number of a video's frames in words."""
    monkeypatch.setattr(processing_smolvlm, "num2words", None)
    make = lambda path: transformers.SmolVLMProcessor(None, arithmetic.tokenizer(), None)
    monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", make)
    with pytest.raises(BadInput, match="--model smol: .*num2words"):
        images.processor("smol")


def test_a_gap_is_explained_with_the_images_in_place(saved, world, tmp_path):
    """The connector alone was trained, and the engine has not got it: prompts without their images show no gap."""
    path = saved("idefics3")
    policy = model.load(path, world, torch.float32)
    with torch.no_grad():
        policy.base_model.connector.modality_projection.proj.weight.to_local().mul_(-1)
    engine, asked = hf_engine.HFEngine(path, [2], world, torch.float32), []
    generate = engine.generate
    engine.generate = lambda ids, *given: asked.append(ids) or generate(ids, *given)
    prompts = read(write(tmp_path, *QUESTIONS), path)
    probe = diagnosis.GapProbe(policy, engine, prompts, TEMPERATURE, 8, COMPUTE, world)
    code, said = diagnosis.explain_gap(probe, prompts, lambda: None, 1e-3)
    assert code == "stale-weights", said
    first = [prompt.ids for prompt in prompts]
    assert asked == [first, first]
    assert all(asked_ids.images == ids.images for asked_ids, ids in zip(asked[1], first))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_replayed_rank_gets_the_responses_to_its_own_prompts(size):
    """All prompts have the same tokens, and each another answer or another image."""
    each = [
        {
            "index": i,
            "id": f"{i}",
            "prompt_ids": [5, 6],
            "answer": "",
            "response_ids": [10 * i + j],
            "rollout_logprobs": [0.0],
            "finish_reason": "stop",
            "weight_versions": [0],
            "baseline_response_ids": [100 + i],
        }
        for i in range(8)
        for j in range(2)
    ]
    prompts = [Prompt(f"{i}", "", images.ImageIds([5, 6], [5], "", [b"%d" % i], ""), "") for i in range(8)]
    for rank in range(size):
        world = SimpleNamespace(rank=rank, size=size, device=torch.device("cpu"))
        engine, loader = replay.ReplayEngine(each, world), replay.ReplayLoader(each, prompts, 0)
        draw = sampling.PromptSampler(world, SimpleNamespace(time=None), loader, None, None)
        for _ in range(2):  # draws, as with dynamic sampling
            mine = draw.prompts(4)
            assert [prompt.id for prompt in mine]
            ids, own = [prompt.ids for prompt in mine], [int(prompt.id) for prompt in mine]
            sampled, greedy = engine.generate(ids, 2, 1.0, 9, 0), engine.generate(ids, 1, 0.0, 9, 0)
            assert sampled.response_ids == [[10 * i + j] for i in own for j in range(2)]
            assert greedy.response_ids == [[100 + i] for i in own]
            assert sampled.prompt_ids == [row for row in ids for _ in range(2)]
        with pytest.raises(BadInput, match="does not hold 2 responses"):
            engine.generate(ids, 2, 1.0, 9, 0)


def test_servers_take_no_images():
    layout = ["--rollout-placement", "split", "--rollout-urls", "http://127.0.0.1:9"]
    said = launch(ROOT / "algos/grpo.py", "--dataset", "squares", *layout, "--dry-run", check=False)
    assert said.returncode == 2 and "prompts with images do not go together with it" in said.stderr


def test_images_come_in_many_forms(saved, tmp_path):
    file = noise(0)
    forms = ["0.png", str(tmp_path / "0.png"), "data:image/png;base64," + base64.b64encode(file).decode()]
    rows = [ROW | {"images": form} for form in (*forms, [forms[0]])]
    rows.append({"prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]} | ROW)
    rows.append({"prompt": "?", "images": ["0.png"]})  # without a mark, the image comes first
    prompts = read(write(tmp_path, *rows), saved("llava"))
    assert {prompt.ids.key for prompt in prompts} == {prompts[0].ids.key}
    assert prompts[0].ids.images == [file] and "images" not in prompts[0].meta
    assert images.read_image("", {"bytes": file, "path": None}, tmp_path) == file


def test_geo3k_from_the_hub(saved, monkeypatch):
    row = {"problem": "<image>Find x.", "answer": "3", "images": [Image.open(BytesIO(noise(0)))]}
    table = datasets.Dataset.from_list([row])
    monkeypatch.setattr(datasets, "load_dataset", lambda *where, split: table)
    (prompt,) = load(("geo3k",), TrainSource(), "train", load_tokenizer(saved("llava"))[0], 400)
    assert prompt.answer == "3" and prompt.text.startswith("<image>Find x. You FIRST think")
    assert prompt.text.endswith("within <think> </think> tags. The final answer MUST BE put in \\boxed{}.")
    assert prompt.ids.pictures()[0].size == (32, 32) and prompt.ids.count(4) == 16
    right, wrong = Item("", "<think>6 / 2</think> \\boxed{3}", "3"), Item("", "\\boxed{3}", "3")
    assert [result.score for result in format_boxed_reward([right, wrong], [9, 9], [False] * 2)] == [1.0, 0.0]
    flags = re.search(r"--dataset geo3k .*?--reward (\S+ \S+)", (ROOT / "docs/images.md").read_text(), re.DOTALL)[1]
    assert rewards.load(tuple(flags.split())).weights == {"math": 0.9, "format-boxed": 0.1}


def test_ids_for_the_engine_and_for_the_trainer(saved, tmp_path):
    (prompt,) = read(write(tmp_path, ROW), saved("llava"))
    assert prompt.ids.compact.count(4) == 1 and prompt.ids.count(4) == 16
    assert [token for token in prompt.ids if token != 4] == [token for token in prompt.ids.compact if token != 4]
    assert image_error(prompt.ids, tuple(prompt.ids)) is None and image_error([4, 4], [4, 5]) is None
    assert "2 tokens in vLLM and 17 here" in str(image_error(prompt.ids, [4, 5]))


@pytest.mark.parametrize(
    "compute", [batching.Compute(), batching.Compute(train_vision=True)], ids=["frozen", "trained"]
)
def test_the_planned_memory_is_that_of_the_parts_that_are_trained(world, compute):
    """A frozen vision tower has neither gradients nor moments."""
    start = str(ROOT / "baselines/images-start")
    policy = model.load(start, world, torch.float32, compute)
    trained = sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)
    assert memory.trained_parameters(start, compute) == trained
    assert (trained < memory.count_parameters(start)) == (not compute.train_vision)


def test_squares_are_counted(tmp_path):
    test, train = squares.problems("test"), squares.problems("train")
    assert len(test) == squares.HELD_OUT and len(train) == squares.TRAIN
    seen = {(row["question"], row["images"][0]) for row in train}
    assert not seen & {(row["question"], row["images"][0]) for row in test}
    for row in test[:50]:
        colour = squares.COLOURS[row["question"].split()[0]]
        pixels = np.asarray(Image.open(BytesIO(row["images"][0]))).reshape(-1, 3)
        assert (pixels == colour).all(1).sum() == 36 * int(row["answer"])
    said = [int(row["solution"]) - int(row["answer"]) for row in train if row["answer"] != "0"]
    assert set(said) == {0, -1} and 0.65 < -sum(said) / len(said) < 0.75


@pytest.mark.nightly
def test_it_learns_to_count_and_only_by_looking(tmp_path, world):
    """Six steps from the committed start, whose teacher overlooks squares. With noise in the place of the images the
    trained model is at chance: 20 %, or a little more for a number that is frequent.
    """
    flags = ["--dataset", "squares", "--steps", "6", "--eval-every", "6", "--eval-prompts", "128"]
    launch(ROOT / "algos/grpo.py", *flags, "--run-dir", tmp_path / "run")
    accuracy = [row["eval/accuracy"] for row in read_metrics(tmp_path / "run") if "eval/accuracy" in row]
    assert accuracy[0] < 0.5 and accuracy[-1] > 0.7, accuracy
    folder = next(tmp_path.glob("run/checkpoints/*/model"))
    assert AutoConfig.from_pretrained(folder).model_type == "idefics3"
    engine = hf_engine.HFEngine(str(folder), [1], world, torch.float32)
    tokenizer, _ = load_tokenizer(str(folder))
    prompts = load(("squares",), TrainSource(), "test", tokenizer, 64)[:128]
    assert counted(engine, prompts) > accuracy[-1] - 0.05
    for seed, prompt in enumerate(prompts):
        prompt.ids.images[:] = [noise(seed)]
        prompt.ids.key = f"noise {seed}"
    assert (blind := counted(engine, prompts)) < 0.3, blind


def counted(engine, prompts: list) -> float:
    """Share of the prompts whose greedy answer is right."""
    answers = engine.generate([prompt.ids for prompt in prompts], 1, 0.0, 2, seed=0).response_ids
    tokenizer = arithmetic.tokenizer()
    return sum(tokenizer.decode(ids[:1]) == prompt.answer for ids, prompt in zip(answers, prompts)) / len(prompts)
