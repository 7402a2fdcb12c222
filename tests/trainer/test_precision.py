"""With --dtype bfloat16 the layers compute in bfloat16. All that adds up or is compared stays float32."""

import json

import families
import pytest
import torch
from conftest import relative_difference
from torch.distributed.tensor import distribute_tensor
from transformers import AutoModelForCausalLM

from common.rollout.rollout import collate
from common.run import checkpoint
from common.trainer import attention, batching, distillation, logits, lora, model
from common.trainer.batching import Compute
from common.trainer.parts import decoder_of
from common.weight_sync import FullParameters

BF16 = torch.bfloat16
KIND = "tied and grouped"


def rows(world, count: int = 32):
    generator = torch.Generator().manual_seed(0)
    draw = lambda tokens: torch.randint(3, 50, (tokens,), generator=generator).tolist()
    prompts, responses = [draw(5) for _ in range(count)], [draw(8) for _ in range(count)]
    return collate(prompts, responses, None, [False] * count, 0, world.device)


def own(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a sharded tensor, whole."""
    return tensor.detach().full_tensor().clone()


@pytest.mark.parametrize("room", [True, False])
def test_gradients_of_micro_batches_are_added_up_in_float32(models, world, monkeypatch, room):
    """Each is rounded to bfloat16 by its own backward. Their sum would lose 1 % if it were rounded 32 times, too."""
    monkeypatch.setattr(model, "rank_memory", lambda: 1e15 if room else 1e6)
    policy = model.load(models[KIND], world, BF16)
    rollout = rows(world)
    micro_batches = batching.pack(rollout, torch.arange(32), Compute(1), world)

    def backward(micro: batching.MicroBatch) -> None:
        (model.response_logprobs(policy, micro, 1.0)[0].sum() / 100).backward()

    for micro in micro_batches:
        backward(micro)
    found = {name: own(parameter.grad) for name, parameter in policy.named_parameters()}
    assert {gradient.dtype for gradient in found.values()} == {torch.float32}
    exact = {name: torch.zeros_like(gradient, dtype=torch.float64) for name, gradient in found.items()}
    for micro in micro_batches:
        policy.zero_grad()
        micro.last = True
        backward(micro)
        for name, parameter in policy.named_parameters():
            exact[name] += own(parameter.grad)
    # A GPU adds in any order inside a backward, which may change how that is rounded.
    assert relative_difference(exact, found) <= (1e-3 if world.device.type == "cuda" else 1e-6)


def test_masters_and_moments_are_float32_and_small_updates_add_up(models, world, tmp_path):
    """An update of 1e-6 is lost in a bfloat16 weight of 0.05, whose neighbours are 2e-4 away."""
    policy = model.load(models[KIND], world, BF16)
    in_file = AutoModelForCausalLM.from_pretrained(models[KIND], dtype=torch.float32)
    before = {name: own(parameter) for name, parameter in policy.named_parameters()}
    for name, parameter in in_file.named_parameters():
        assert torch.equal(before[name].cpu(), parameter), f"{name} is not read as it is written"
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, weight_decay=0.0, fused=True)
    (micro,) = batching.pack(rows(world), torch.arange(32), Compute(10_000), world)
    seen = []
    last_layer = decoder_of(policy).layers[-1].mlp.down_proj
    last_layer.register_forward_pre_hook(lambda layer, given: seen.append((given[0].dtype, layer.weight.dtype)))
    for _ in range(4):
        model.response_logprobs(policy, micro, 1.0)[0].mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert set(seen) == {(BF16, BF16)}, "the layers compute in --dtype"
    # Adam moves a weight whose gradient keeps its sign by the learning rate in every step.
    moved = torch.cat([(own(p) - before[name]).abs().flatten() for name, p in policy.named_parameters()])
    assert 3e-6 < moved.median() < 5e-6
    saved = checkpoint.training_state({"policy": (policy, optimizer)}, [])
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    assert sum(name.endswith(("exp_avg", "exp_avg_sq")) for name in saved) == 2 * len(before)


@pytest.mark.parametrize("name", ["gemma3_text", "glm4_moe"])
def test_buffers_are_those_of_transformers_bit_for_bit(name, world, tmp_path):
    """Rotary frequencies and the biases of routers. Rounded frequencies would turn late tokens by radians."""
    path = families.save(name, tmp_path)
    policy = model.load(path, world, BF16)
    theirs = dict(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).named_buffers())
    ours = dict(policy.named_buffers())
    assert ours.keys() == theirs.keys() and any("inv_freq" in key for key in ours)
    assert all(torch.equal(ours[key].cpu(), theirs[key]) for key in ours)


def test_a_value_head_computes_in_float32(models, world):
    """A bfloat16 value of 100 would be rounded to halves."""
    critic = model.load(models[KIND], world, BF16, value_head=True)
    weights = 100 * torch.linspace(-1, 1, 128)[None].to(world.device)
    with torch.no_grad():
        critic.score.weight.copy_(distribute_tensor(weights, world.mesh, critic.score.weight.placements))
    hidden = []
    critic.base_model.register_forward_hook(lambda module, given, output: hidden.append(output.last_hidden_state[0]))
    (micro,) = batching.pack(rows(world), torch.arange(32), Compute(10_000), world)
    values = model.response_values(critic, micro)
    head = weights[0].to(BF16).double()  # gathered in bfloat16, as all weights are
    exact = hidden[0][micro.predictors].double() @ head
    assert values.dtype == torch.float32 and exact.abs().max() > 100
    assert (values.flatten()[micro.scatter] - exact).abs().max() <= 1e-3


def test_the_kl_to_a_teacher_is_float32(world):
    """Of bfloat16 hidden states and heads. A KL of 10 in bfloat16 would be up to 0.03 off."""
    generator = torch.Generator().manual_seed(0)
    hidden, head, teacher_hidden, teacher_head = (
        torch.randn(count, 64, generator=generator).to(world.device, BF16) for count in (40, 300, 40, 300)
    )
    shape = logits.LogitShape(0.7)
    found = distillation.ChunkedKL.apply(hidden, head, shape, teacher_hidden, teacher_head, shape)
    p, q = (
        (one.double() @ other.double().T / 0.7).log_softmax(1)
        for one, other in ((hidden, head), (teacher_hidden, teacher_head))
    )
    exact = ((p.exp() * (p - q)).sum(1), -(p.exp() * p).sum(1))
    for ours, theirs in zip(found, exact):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)


def test_adapters_are_merged_in_float32_and_the_sum_is_rounded_once(models, world):
    """One rounding changes a number by at most 2^-8 of it. Rounding the adapters or their product as well does more."""
    policy = model.load(models[KIND], world, BF16, Compute(lora_rank=4))
    with torch.no_grad():
        for _, layer in lora.adapted(policy):
            layer.lora_b.fill_(0.3).mul_(1.001)  # as large as the weights, and not a bfloat16 number
    pushed = dict(FullParameters(policy, BF16))
    for name, layer in lora.adapted(policy):
        weight, a, b = (own(x).double() for x in (layer.weight, layer.lora_a, layer.lora_b))
        exact = weight + layer.scaling * b @ a
        error = (pushed[f"{name}.weight"].double() - exact).abs()
        assert pushed[f"{name}.weight"].dtype == BF16
        assert (error <= 1.001 * 2**-8 * exact.abs() + 1e-7).all(), name


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_what_a_push_announces_is_what_it_sends(world, tmp_path, lora_rank):
    """Names, dtypes and shapes of metadata(), by which servers make room. Experts and adapters are as in the files."""
    policy = model.load(families.save("glm4_moe", tmp_path), world, BF16, Compute(lora_rank=lora_rank))
    parameters = FullParameters(policy, BF16, saved_names=True)
    sent = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in parameters]
    assert sent == [tuple(info) for info in parameters.metadata()]
    names = [name for name, _, _ in sent]
    in_files = json.loads((tmp_path / "glm4_moe/config.json").read_text())["num_hidden_layers"]
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in names and not any("lora" in name for name in names)
    biases = [dtype for name, dtype, _ in sent if name.endswith("e_score_correction_bias")]
    assert biases == [torch.float32] * (in_files - 1), "routers choose by the same numbers on both sides"


def test_an_export_rounds_weights_and_no_buffers(world, tmp_path):
    """Routers of the exported model choose the experts that the trained one chose."""
    policy = model.load(families.save("glm4_moe", tmp_path), world, BF16)
    weights = checkpoint.whole_weights(policy, BF16)
    dtypes = {name: tensor.dtype for name, tensor in weights.items()}
    kept = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    assert kept and kept == {name for name in dtypes if name.endswith("e_score_correction_bias")}
    assert set(dtypes.values()) == {torch.float32, BF16}


def test_gradients_of_a_shared_prompts_copies_add_up_in_float32():
    """In bfloat16, 1 + 1/256 is 1: of 200 small gradients on top of a large one, none would be left."""
    x = torch.ones(2, 1, 1, dtype=BF16, requires_grad=True)
    grad = torch.full((201, 1, 1), 1 / 256, dtype=BF16)
    grad[0] = 1.0
    attention.copies(x, torch.zeros(201, dtype=torch.long)).backward(grad)
    assert x.grad[0].item() == pytest.approx(1 + 200 / 256, rel=1 / 128) and x.grad[1].item() == 0


def test_the_heads_gradient_adds_up_in_float32_on_a_cpu_too(world, monkeypatch):
    """Of many chunks of rows. Each product is rounded, but their sum is not."""
    monkeypatch.setattr(logits, "LOGITS_PER_CHUNK", 4)  # one row of 4 logits a chunk
    hidden = torch.full((201, 1), 1 / 256, dtype=BF16)
    hidden[0] = 1.0
    chunks = ((slice(row, row + 1), torch.ones(1, 4)) for row in range(201))
    _, gradient = logits.backward_through_head(hidden, torch.ones(4, 1, dtype=BF16), chunks, True)
    assert gradient.flatten().tolist() == pytest.approx([1 + 200 / 256] * 4, rel=1 / 128)
