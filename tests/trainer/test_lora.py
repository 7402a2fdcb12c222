"""LoRA: adapters beside frozen weights, under the same trainer, checkpoints and engines."""

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import ROOT, launch
from helpers import load
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from common.data import arithmetic
from common.errors import BadInput
from common.preflight import memory, roles
from common.preflight.memory import MemoryPlan
from common.preflight.run_directory import read_metrics
from common.rollout.rollout import collate
from common.run import checkpoint
from common.trainer import batching, lora, model
from common.trainer.batching import Compute
from common.weight_sync import FullParameters

RANK = Compute(token_budget=200, lora_rank=4)


def some_rows():
    generator = torch.Generator().manual_seed(0)
    draw = lambda n: torch.randint(3, 18, (n,), generator=generator).tolist()
    prompt = draw(40)
    return collate([prompt] * 4, [draw(n) for n in (9, 3, 7, 5)], None, [False] * 4, 0, torch.device("cpu"))


def logprobs(policy, world):
    rows = some_rows()
    return model.frozen_logprobs(policy, rows, batching.pack(rows, torch.arange(4), RANK, world), 0.9)


def train(policy, optimizer, world, steps: int = 3) -> None:
    rows = some_rows()
    for _ in range(steps):
        micro_batches = batching.pack(rows, torch.arange(4), RANK, world)
        for micro in micro_batches:
            found, _ = model.response_logprobs(policy, micro, 0.9)
            (-found[micro.response_mask].sum() / 24).backward()
        optimizer.step()
        optimizer.zero_grad()


def adam(policy, **settings):
    return torch.optim.AdamW(policy.parameters(), lr=1e-2, fused=True, **settings)


def frozen(policy) -> dict[str, torch.Tensor]:
    return {name: p.detach().full_tensor().clone() for name, p in policy.named_parameters() if not p.requires_grad}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_starts_as_its_base_and_moves_nothing_else(models, world, dtype):
    """Bit for bit. Frozen weights are kept in the compute dtype, to which the forward would cast masters anyway; weight
    decay does not reach them. The reference policy is the base, also after training.
    """
    base, policy = (model.load(models["grouped"], world, dtype, compute) for compute in (Compute(), RANK))
    assert torch.equal(logprobs(base, world), logprobs(policy, world))
    assert {p.dtype for p in policy.parameters() if p.requires_grad} == {torch.float32}
    assert {tensor.dtype for tensor in frozen(policy).values()} == {dtype}
    reference = model.load_reference(policy, models["grouped"], world, dtype, RANK, offload=False)
    before = frozen(policy)
    train(policy, adam(policy, weight_decay=0.1), world)
    assert (logprobs(base, world) - logprobs(policy, world)).abs().max() > 0.1
    assert all(torch.equal(tensor, before[name]) for name, tensor in frozen(policy).items()) and before
    assert torch.equal(logprobs(base, world), logprobs(reference, world))
    assert (logprobs(base, world) - logprobs(policy, world)).abs().max() > 0.1  # the adapters are on again


def test_each_linear_layer_of_the_decoder_has_adapters(models, world):
    policy, critic = (model.load(models["tied"], world, torch.float32, RANK, value_head=head) for head in (False, True))
    names = {name.rpartition(".")[2] for name, _ in lora.adapted(policy)}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert len(lora.adapted(policy)) == 7 * 3  # three layers; neither embeddings nor head
    head = {name for name, p in critic.named_parameters() if p.requires_grad and "lora" not in name}
    assert head == {"score.weight", "score.bias"}
    with torch.device("meta"):
        other = AutoModelForCausalLM.from_config(LlamaConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1))
    other.model.layers[0] = torch.nn.Identity()
    with pytest.raises(BadInput, match="--lora-rank 2: .*llama"):
        lora.insert(other, 2, torch.float32)


def test_seeds_draw_different_adapters(models, world):
    drawn = []
    for seed in (0, 1, 0):
        torch.manual_seed(seed)
        policy = model.load(models["tied"], world, torch.float32, RANK)
        drawn.append(torch.cat([layer.lora_a.full_tensor().flatten() for _, layer in lora.adapted(policy)]))
    assert torch.equal(drawn[0], drawn[2]) and not torch.equal(drawn[0], drawn[1])
    assert all(x.lora_a.full_tensor().abs().max() <= x.in_features**-0.5 for _, x in lora.adapted(policy))


def test_the_export_is_a_peft_folder_and_merges_into_what_was_trained(models, world, tmp_path):
    """peft's names and settings, and W + (alpha / rank) B A after merging."""
    policy = model.load(models["tied"], world, torch.float32, RANK)
    train(policy, adam(policy), world)
    checkpoint.export(policy, arithmetic.tokenizer(), tmp_path / "adapters", torch.float32, world)
    config = json.loads((tmp_path / "adapters/adapter_config.json").read_text())
    assert config["peft_type"] == "LORA" and (config["r"], config["lora_alpha"]) == (4, lora.ALPHA)
    assert config["base_model_name_or_path"] == models["tied"] and len(config["target_modules"]) == 7
    with lora.switched_off(policy):  # as when a thread writes while the reference policy is asked
        checkpoint.export(policy, arithmetic.tokenizer(), tmp_path / "again", torch.float32, world)
    assert (tmp_path / "again/adapter_config.json").read_text() == json.dumps(config, indent=2) + "\n"
    tensors = load_file(tmp_path / "adapters/adapter_model.safetensors")
    shape = tensors["base_model.model.model.layers.2.mlp.down_proj.lora_B.weight"].shape
    assert len(tensors) == 2 * 7 * 3 and shape == (128, 4)
    merge = load("scripts/merge_lora.py")
    merge.main(merge.Args(tmp_path / "adapters", tmp_path / "merged", dtype="float32"))
    merged = model.load(str(tmp_path / "merged"), world, torch.float32)
    assert (logprobs(merged, world) - logprobs(policy, world)).abs().max() <= 1e-5
    pushed = dict(FullParameters(policy, torch.float32))
    assert all(torch.allclose(pushed[n], p.full_tensor(), atol=1e-6) for n, p in merged.named_parameters())
    merge.main(merge.Args(tmp_path / "adapters", tmp_path / "as its base"))
    as_its_base = AutoConfig.from_pretrained(tmp_path / "as its base").dtype
    assert as_its_base == AutoConfig.from_pretrained(models["tied"]).dtype == torch.float32
    for wrong, said in ((tmp_path / "merged", "has no adapter_config.json"), (tmp_path / "adapters", "exists already")):
        with pytest.raises(BadInput, match=said):
            merge.main(merge.Args(wrong, tmp_path / "merged"))


def test_an_export_names_no_layers_of_a_vision_tower(world, tmp_path):
    """peft adapts every layer whose name ends like a target, and the tower has the decoder's q_proj, k_proj, v_proj."""
    policy = model.load(str(arithmetic.IMAGES_START), world, torch.float32, RANK)
    checkpoint.export(policy, arithmetic.tokenizer(), tmp_path, torch.float32, world)
    targets = json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"]
    assert sorted(targets) == sorted(name for name, _ in lora.adapted(policy))


@pytest.mark.parametrize("kind", ["untied", "tied"])
def test_a_checkpoint_holds_adapters_and_goes_on_with_them(models, world, tmp_path, kind):
    policy = model.load(models[kind], world, torch.float32, RANK)
    optimizer = adam(policy)
    train(policy, optimizer, world)
    tensors = checkpoint.training_state({"policy": (policy, optimizer)}, [])
    weights = [name for name in tensors if name.startswith("policy.model.")]
    assert len(weights) == 2 * 7 * 3 and all(name.endswith(("lora_a", "lora_b")) for name in weights)
    moments = sum(value.numel() for kept in optimizer.state.values() for value in kept.values() if value.numel() > 1)
    assert moments == 2 * memory.trained_parameters(models[kind], RANK)
    dcp.save(tensors, storage_writer=checkpoint.writer_for(tensors, tmp_path))
    again = model.load(models[kind], world, torch.float32, RANK)
    restored = adam(again)
    checkpoint.read_tensors(checkpoint.training_state({"policy": (again, restored)}, []), tmp_path)
    assert torch.equal(logprobs(policy, world), logprobs(again, world))
    for one, other in ((policy, optimizer), (again, restored)):
        train(one, other, world, 1)
    assert torch.equal(logprobs(policy, world), logprobs(again, world))


def test_the_planned_memory_is_that_of_adapters(models, capsys):
    whole, adapters = (memory.trained_parameters(models["tied"], compute) for compute in (Compute(), RANK))
    assert adapters < 0.1 * whole
    large, small = (
        MemoryPlan(
            model=models["tied"],
            dtype=torch.bfloat16,
            size=1,
            compute=batching.Compute(lora_rank=rank),
            models=("policy", "reference"),
            memory=80e9,
            gpu=True,
        )
        for rank in (0, 4)
    )
    assert large.states == 14 * whole and small.states == 12 * adapters + 2 * whole
    assert small.update(0) < large.update(0)
    policy, reference = table = roles.model_roles(small)
    assert policy.device == 16 * adapters + 2 * whole and reference.device == 0
    roles.show(table)
    assert "the policy without its adapters" in capsys.readouterr().out


@pytest.mark.slow
def test_a_resumed_run_is_the_run(tmp_path):
    """PPO with a reference policy: both models have adapters, and the critic its head."""
    flags = ["--lora-rank", "4", "--learning-rate", "2e-3", "--kl-coef", "0.01", "--prompts-per-step", "16"]
    flags += ["--critic-warmup-steps", "0", "--mini-batches", "2", "--eval-prompts", "8", "--rollout-backend", "hf"]
    flags += ["--save-every", "1", "--schedule", "constant", "--max-response-tokens", "24"]
    ppo, folder = ROOT / "algos/ppo.py", tmp_path / "run"
    launch(ppo, *flags, "--steps", 3, "--run-dir", tmp_path / "whole")
    launch(ppo, *flags, "--steps", 1, "--run-dir", folder)
    launch(ppo, *flags, "--steps", 3, "--run-dir", folder, "--resume", "auto")
    keys = ("reward/mean", "loss/policy", "train/grad_norm", "critic/grad_norm", "loss/value")
    runs = [read_metrics(path) for path in (tmp_path / "whole", folder)]
    curves = [[{key: row.get(key) for key in keys} for row in run if row["step"]] for run in runs]
    assert curves[0] == curves[1] and len(curves[0]) == 3 and curves[0][2]["train/grad_norm"] > 0
    left = launch(ppo, "--model", folder / "checkpoints/step_000003/model", check=False)
    assert left.returncode == 2 and "holds LoRA adapters; scripts/merge_lora.py makes a model" in left.stderr
    other = ["--lora-rank", "8", "--resume", folder / "checkpoints/step_000003", "--run-dir", tmp_path / "other"]
    left = launch(ppo, *flags[2:], *other, "--steps", 4, check=False)
    assert left.returncode == 2 and "was saved with adapters of rank 4 and alpha 32 to" in left.stderr
