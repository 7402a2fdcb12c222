"""Model families: windows, caps, sinks, experts. The trainer against transformers, and vLLM against the trainer."""

import json
import re
from functools import cache

import families
import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from conftest import ROOT, launch
from families import FAMILIES
from transformers import AutoConfig, AutoModelForCausalLM

from common.errors import BadInput
from common.rollout import engines
from common.rollout.rollout import collate
from common.run import checkpoint
from common.trainer import batching, model

SERVED = [name for name, family in FAMILIES.items() if not family.refused]
TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """name -> folder of a tiny model of the family."""
    folder = tmp_path_factory.mktemp("families")
    return cache(lambda name: families.save(name, folder))


def rows_longer_than_a_window():
    """Two groups of two, whose prompts are computed once."""
    generator = torch.Generator().manual_seed(3)
    draw = lambda n: torch.randint(3, 120, (n,), generator=generator).tolist()
    a, b = draw(40), draw(33)
    return collate([a, a, b, b], [draw(30), draw(25), draw(30), draw(12)], None, [False] * 4, 0, torch.device("cpu"))


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_rows_give_what_transformers_gives_alone(name, saved, world):
    """Log-probs and gradient of rows in one packed row, against eager attention on one row at a time."""
    path, rollout = saved(name), rows_longer_than_a_window()
    policy = model.load(path, world, torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    (micro,) = batching.pack(rollout, torch.arange(4), batching.Compute(400), world)
    assert micro.input_ids.shape[1] < sum(map(len, rollout.prompt_ids + rollout.response_ids))  # shared prompts
    ours, _ = model.response_logprobs(policy, micro, TEMPERATURE)
    expected = torch.zeros_like(ours)
    for place, row in enumerate(micro.rows.tolist()):
        prompt, response = rollout.prompt_ids[row], torch.tensor(rollout.response_ids[row])
        logits = theirs(torch.tensor([prompt + response.tolist()]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        table = (logits / TEMPERATURE).log_softmax(-1)
        expected[place, : len(response)] = table.gather(1, response[:, None])[:, 0]
    assert (ours - expected).abs().max() <= 1e-5
    weights = torch.linspace(-1, 1, ours.numel()).view(ours.shape)
    (ours * weights).sum().backward()
    (expected * weights).sum().backward()
    gradients = dict(theirs.named_parameters())
    for key, parameter in policy.named_parameters():
        found, right = parameter.grad.full_tensor(), gradients[key].grad
        assert (found - right).norm() <= 1e-4 * right.norm() + 1e-6, key


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if "experts" in family.has])
def test_frozen_routers_stay_and_all_else_is_trained(name, saved, world, tmp_path):
    """--freeze-router: other parameters have the gradients that they have without it. Weight decay does not reach the
    routers, and a checkpoint, which leaves them out, goes on as it would have.
    """
    rollout = rows_longer_than_a_window()

    def load(freeze_router: bool):
        policy = model.load(saved(name), world, torch.float32, batching.Compute(400, freeze_router=freeze_router))
        return policy, torch.optim.AdamW(policy.parameters(), lr=1e-2, weight_decay=0.1, fused=True)

    def gradients(policy) -> dict[str, torch.Tensor]:
        (micro,) = batching.pack(rollout, torch.arange(4), batching.Compute(400), world)
        model.response_logprobs(policy, micro, TEMPERATURE)[0].sum().backward()
        return {key: p.grad.full_tensor().clone() for key, p in policy.named_parameters() if p.grad is not None}

    policy, optimizer = load(True)
    every, some = gradients(load(False)[0]), gradients(policy)
    frozen = every.keys() - some.keys()
    assert frozen == {key for key in every if re.search(r"mlp\.(gate|router)\.(weight|bias)$", key)}
    assert len(frozen) >= 3
    # gpt-oss reads the bias of each token's expert by an index, whose gradient several threads add in any order.
    indexed = {key for key in some if key.endswith("proj_bias")}
    assert all(torch.equal(every[key], some[key]) for key in some.keys() - indexed)
    assert all(torch.allclose(every[key], some[key], rtol=1e-5, atol=1e-7) for key in indexed)
    before = {key: parameter.detach().full_tensor().clone() for key, parameter in policy.named_parameters()}
    optimizer.step()
    assert {key for key, p in policy.named_parameters() if torch.equal(p.full_tensor(), before[key])} == frozen
    tensors = checkpoint.training_state({"policy": (policy, optimizer)}, [])
    assert frozen.isdisjoint(name.removeprefix("policy.model.") for name in tensors)
    dcp.save(tensors, storage_writer=checkpoint.writer_for(tensors, tmp_path))
    again, restored = load(True)
    checkpoint.read_tensors(checkpoint.training_state({"policy": (again, restored)}, []), tmp_path)
    after = dict(again.named_parameters())
    assert all(torch.equal(p.full_tensor(), after[key].full_tensor()) for key, p in policy.named_parameters())


def test_routers_to_freeze_are_there_and_trained(saved, world):
    for name, rank, said in (("llama", 0, "a llama model has no router"), ("mixtral", 4, "--lora-rank freezes the")):
        with pytest.raises(BadInput, match=f"^--freeze-router: {said}"):
            model.load(saved(name), world, torch.float32, batching.Compute(lora_rank=rank, freeze_router=True))


@pytest.mark.slow
def test_vllm_follows_the_trainer(saved):
    """After loading, and after three updates: windows, caps, names of experts, experts packed for the processor."""
    result = launch(ROOT / "tests/workers/families.py", *map(saved, SERVED))
    gaps = {row["model"]: row["gaps"] for row in map(json.loads, find_rows(result.stdout))}
    assert list(gaps) == SERVED and all(len(row) == 4 for row in gaps.values())
    assert max(gap for row in gaps.values() for gap in row) <= 1e-5, gaps


@pytest.mark.slow
def test_vllm_follows_two_ranks(saved):
    """Experts and windows of weights that are sharded."""
    result = launch(ROOT / "tests/workers/families.py", saved("mixtral"), ranks=2)
    (row,) = map(json.loads, find_rows(result.stdout))
    assert len(row["gaps"]) == 4 and max(row["gaps"]) <= 1e-5, row


def find_rows(stdout: str) -> list[str]:
    return [line for line in stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in SERVED])
def test_families_that_vllm_gets_wrong_are_refused(name, saved):
    engines.check_family("hf", saved(name))
    with pytest.raises(BadInput) as refused:
        engines.check_family("vllm", saved(name))
    family = FAMILIES[name]
    assert str(refused.value) == f"--model {saved(name)}: {family.refused} ({name}); use --rollout-backend hf"


@pytest.mark.parametrize("name", FAMILIES)
def test_an_export_is_what_transformers_loads(name, saved, world, tmp_path):
    """Names of experts on the disk, and buffers that are saved with the model."""
    from common.data import arithmetic

    policy = model.load(saved(name), world, torch.float32)
    checkpoint.export(policy, arithmetic.tokenizer(), tmp_path, torch.float32, world)
    before, after = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict() for path in (saved(name), tmp_path)
    )
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize(
    "config, why",
    [
        (transformers.Llama4TextConfig(**families.SIZES, num_local_experts=2), "layers unlike Llama's"),
        (transformers.Qwen3NextConfig(**families.SIZES), "layers unlike Llama's"),
        (
            transformers.LlamaConfig(**families.SIZES, attention_dropout=0.1),
            "random layers: set attention_dropout",
        ),
        (transformers.Starcoder2Config(**families.SIZES, residual_dropout=0.1), "random layers: set residual_dropout"),
        (
            transformers.Qwen2MoeConfig(
                **families.SIZES, use_sliding_window=True, sliding_window=16, layer_types=["sliding_attention"] * 4
            ),
            "windows",
        ),
        (
            transformers.PhimoeConfig(**families.SIZES, sliding_window=16),
            "windows",
        ),
        (
            transformers.Qwen3Config(**families.SIZES, layer_types=["full_attention", "chunked_attention"] * 2),
            "chunked_attention in some layers",
        ),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_other_families_are_refused_in_one_sentence(config, why):
    with pytest.raises(BadInput, match=f"^--model m: {config.model_type} models are not supported, because of {why}"):
        model.skeleton(config, "m")


@pytest.mark.parametrize(
    "config",
    [
        transformers.HyperCLOVAXConfig(**families.SIZES, logits_scaling=4.0),  # it multiplies where Granite divides
        transformers.Qwen3Config(**families.SIZES, logits_scaling=8.0),  # its forward does not know these settings
        transformers.Qwen3Config(**families.SIZES, logit_scale=0.5),
        transformers.Qwen3Config(**families.SIZES, final_logit_softcapping=0.5),
    ],
    ids=lambda config: config.model_type,
)
def test_logits_that_the_trainer_would_make_otherwise_are_refused(config, world, tmp_path):
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(config)
    for parameter in reference.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.08)
    reference.save_pretrained(tmp_path)
    with pytest.raises(BadInput, match=f"{config.model_type}.* logits"):
        model.load(str(tmp_path), world, torch.float32)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_critic_needs_a_value_head_of_transformers(name, saved):
    config = AutoConfig.from_pretrained(saved(name))
    if families.has_value_head(name):
        assert hasattr(model.skeleton(config, "m", value_head=True), "score")
    else:
        with pytest.raises(BadInput, match="value head"):
            model.skeleton(config, "m", value_head=True)


def test_attention_with_a_mask_of_its_own_is_refused(world, tmp_path):
    sizes = {**families.SIZES, "attention_dropout": 0.0}
    AutoModelForCausalLM.from_config(transformers.NemotronConfig(**sizes)).save_pretrained(tmp_path)
    with pytest.raises(BadInput, match="nemotron models are not supported"):
        model.load(str(tmp_path), world, torch.float32)


def test_the_documented_table_is_that_of_these_tests():
    assert families.table() in (ROOT / "docs/models.md").read_text(), "python tests/families.py prints it"
