"""Checkpoints: what is exported is the policy; what is restored is what was saved."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from common import checkpoint, data, embedded, model, run
from common.placement import BadInput


def step(policy, optimizer) -> None:
    """One optimizer step on made-up gradients."""
    for i, parameter in enumerate(policy.parameters()):
        parameter.grad = torch.full_like(parameter, 0.1 * (i % 3 - 1))
    optimizer.step()
    optimizer.zero_grad()


def values(policy) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().full_tensor().clone() for name, parameter in policy.named_parameters()}


def start(models, world, kind="untied"):
    policy = model.load(models[kind], world, torch.float32)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2, fused=True)
    loader = data.PromptLoader(data.load("arithmetic", data.Source(), "test", embedded.tokenizer(), 64), seed=0)
    return policy, optimizer, loader


@pytest.mark.parametrize("kind", ["untied", "tied", "grouped"])
def test_export_is_the_policy(models, world, tmp_path, kind):
    policy, optimizer, _ = start(models, world, kind)
    step(policy, optimizer)
    checkpoint.export(policy, embedded.tokenizer(), tmp_path, torch.float32, world)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    exported = dict(loaded.named_parameters())
    assert exported.keys() == values(policy).keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in values(policy).items())
    assert data.load_tokenizer(str(tmp_path))[1] == [1]


def test_restored_training_goes_on_bit_for_bit(models, world, tmp_path):
    policy, optimizer, loader = start(models, world)
    step(policy, optimizer)
    loader.take(5)
    folder = checkpoint.save(
        tmp_path, 3, {"policy": (policy, optimizer)}, loader, embedded.tokenizer(), torch.float32, world
    )
    step(policy, optimizer)
    again, again_optimizer, again_loader = start(models, world)
    assert checkpoint.load(folder, {"policy": (again, again_optimizer)}, again_loader) == 3
    assert again_loader.take(3) == loader.take(3)
    step(again, again_optimizer)
    assert all(torch.equal(x, y) for x, y in zip(values(policy).values(), values(again).values()))
    assert not list(tmp_path.glob("checkpoints/*.unfinished"))


def test_what_is_trained_beside_the_policy_is_restored_too(models, world, tmp_path):
    def start_both():
        policy, optimizer, loader = start(models, world)
        critic = model.load(models["untied"], world, torch.float32, value_head=True)
        critic_optimizer = torch.optim.AdamW(critic.parameters(), lr=1e-2, fused=True)
        return {"policy": (policy, optimizer), "critic": (critic, critic_optimizer)}, loader

    trained, loader = start_both()
    step(*trained["critic"])
    folder = checkpoint.save(tmp_path, 1, trained, loader, embedded.tokenizer(), torch.float32, world)
    again, again_loader = start_both()
    checkpoint.load(folder, again, again_loader)
    for both in (trained, again):
        step(*both["critic"])  # with Adam's momentum of the first
        step(*both["policy"])  # its first step, saving or not
    alone, _ = start_both()
    step(*alone["policy"])
    for both in (trained, again):
        expected, got = values(alone["policy"][0]), values(both["policy"][0])
        assert all(torch.equal(expected[name], got[name]) for name in expected)
    before, after = values(trained["critic"][0]), values(again["critic"][0])
    assert "score.weight" in before and all(torch.equal(before[name], after[name]) for name in before)
    assert AutoModelForCausalLM.from_pretrained(folder / "model").config.architectures == ["Qwen2ForCausalLM"]


def test_only_complete_checkpoints_are_found(tmp_path):
    for name, complete in (("step_000002", True), ("step_000010", True), ("step_000020", False)):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        if complete:
            (tmp_path / "checkpoints" / name / "state.json").touch()
    assert run.find_checkpoint("auto", tmp_path).name == "step_000010"
    assert run.find_checkpoint("auto", tmp_path / "nothing") is None
    assert run.find_checkpoint("", tmp_path) is None
    with pytest.raises(BadInput, match="no complete checkpoint there"):
        run.find_checkpoint(str(tmp_path / "checkpoints/step_000020"), tmp_path)
