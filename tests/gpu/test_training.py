"""The trainer on this machine's device: gradients in several ways, a step, a push, a checkpoint, and their memory."""

import gc
import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import relative_difference
from helpers import load

from common.preflight.memory import MemoryPlan
from common.rollout.rollout import Rollout, collate
from common.run import checkpoint
from common.trainer import batching, model
from common.trainer.batching import Compute
from common.weight_sync import FullParameters

CUDA = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not CUDA, reason="no GPU")
DTYPES = [torch.float32, torch.bfloat16]
WAYS = {  # settings of the trainer, and whether parameters are in host memory
    "one response at a time": (Compute(1, shared_prompts=False), False),
    "checkpointing": (Compute(4096, activation_checkpointing=True), False),
    "--offload all": (Compute(4096), True),
    "--kernels compile": (Compute(4096, kernels="compile"), False),
}


def random_rollout(world, prompts: int, group: int, prompt: int, response: int, vocabulary: int) -> Rollout:
    """Groups of responses to shared prompts, of random tokens and lengths up to those given."""
    generator = torch.Generator().manual_seed(0)

    def tokens(most: int) -> list[int]:
        length = int(torch.randint(most // 2, most + 1, (), generator=generator))
        return torch.randint(3, vocabulary, (length,), generator=generator).tolist()

    asked = [ids for ids in (tokens(prompt) for _ in range(prompts)) for _ in range(group)]
    return collate(asked, [tokens(response) for _ in asked], None, [False] * len(asked), 0, world.device)


def backward(policy, rollout: Rollout, compute: Compute, world) -> float:
    """Gradients of the mean log-prob of all tokens. Returns the mean."""
    total = 0.0
    for micro in batching.pack(rollout, torch.arange(len(rollout)), compute, world):
        logprobs, _ = model.response_logprobs(policy, micro, 1.0)
        mean = (logprobs * micro.response_mask).sum() / rollout.response_mask.sum()
        (-mean).backward()
        total += mean.item()
    return total


def whole(parameters) -> dict[str, torch.Tensor]:
    """A copy of sharded tensors, on the CPU."""
    return {name: tensor.detach().full_tensor().cpu().clone() for name, tensor in parameters}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("way", [pytest.param(way, marks=needs_gpu if "compile" in way else ()) for way in WAYS])
def test_a_gradient_is_the_same_however_it_is_computed(way, dtype, models, world, record_property):
    path, rollout, found = models["grouped"], random_rollout(world, 4, 4, 60, 40, 50), []
    for compute, offload in ((Compute(4096), False), WAYS[way]):
        policy = model.load(path, world, dtype, compute, offload=offload)
        backward(policy, rollout, compute, world)
        found.append(whole((name, parameter.grad) for name, parameter in policy.named_parameters()))
    error = relative_difference(*found)
    record_property("measured", f"{error:.1e}")
    assert error <= (1e-5 if dtype == torch.float32 else 0.1)


@pytest.mark.parametrize("offload", [False, True])
def test_steps_in_bfloat16_learn_are_pushed_and_go_on_from_a_checkpoint(offload, models, world, tmp_path):
    rollout = random_rollout(world, 4, 4, 40, 30, 50)

    def start():
        policy = model.load(models["grouped"], world, torch.bfloat16, offload=offload)
        return policy, torch.optim.AdamW(policy.parameters(), lr=1e-3, fused=True)

    def step(policy, optimizer) -> float:
        mean = backward(policy, rollout, Compute(400), world)
        assert {parameter.grad.dtype for parameter in policy.parameters()} == {torch.float32}
        assert {parameter.device.type for parameter in policy.parameters()} == {"cpu" if offload else world.device.type}
        assert torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0).full_tensor() > 0
        optimizer.step()
        optimizer.zero_grad()
        return mean

    policy, optimizer = start()
    first, second, third = (step(policy, optimizer) for _ in range(3))
    assert first < second < third
    # The push gives what the masters are, rounded once.
    masters = whole(policy.named_parameters())
    for name, tensor in FullParameters(policy, torch.bfloat16):
        assert torch.equal(tensor.cpu(), masters[name].bfloat16()), name
    tensors = checkpoint.training_state({"policy": (policy, optimizer)}, [])
    dcp.save(tensors, storage_writer=checkpoint.writer_for(tensors, tmp_path))
    again, restored = start()
    checkpoint.read_tensors(checkpoint.training_state({"policy": (again, restored)}, []), tmp_path)
    assert relative_difference(masters, whole(again.named_parameters())) == 0
    for trained in ((policy, optimizer), (again, restored)):
        step(*trained)
    # On a GPU sums are in another order each time, and Adam makes much of the smallest gradients.
    apart = relative_difference(whole(policy.named_parameters()), whole(again.named_parameters()))
    assert apart <= (1e-2 if CUDA else 0)


@needs_gpu
@pytest.mark.parametrize("streams", [1, 2])
def test_a_push_holds_two_full_parameters_and_sends_the_newest(streams, record_property):
    """The optimizer's last kernel has yet to run when the push begins, and its next one follows the last load at once.

    streams: how many the consumer uses in turns. vLLM's sender has two.
    """
    side, count = 4096, 6
    policy = torch.nn.Sequential(*(torch.nn.Linear(side, side, bias=False, device="cuda") for _ in range(count)))
    received = [torch.empty(side, side, dtype=torch.bfloat16, device="cuda") for _ in range(count)]
    consumers = [torch.cuda.Stream() for _ in range(streams)]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    # Active memory: a tensor that was freed counts until the streams that it is kept for have passed.
    active = lambda kind: torch.cuda.memory_stats()[f"active_bytes.all.{kind}"]
    before = active("current")
    with torch.no_grad():
        torch.cuda._sleep(10**8)  # cycles: some 50 ms
        for number, parameter in enumerate(policy.parameters()):
            parameter.fill_(number + 1)
        pairs = iter(FullParameters(policy, torch.bfloat16))
        for number in range(count):
            with torch.cuda.stream(consumers[number % streams]):
                torch.cuda._sleep(10**7)  # a slow load, during which the next parameter is gathered
                received[number].copy_(next(pairs)[1])  # without a name, which would keep the tensor
        assert next(pairs, None) is None
        peak = active("peak") - before
        for parameter in policy.parameters():
            parameter.zero_()
    torch.cuda.synchronize()
    for number, tensor in enumerate(received):
        assert (tensor == number + 1).all(), f"parameter {number} was read too early or too late"
    record_property("measured", f"{peak / tensor.nbytes:.2f} full parameters at most")
    assert tensor.nbytes < peak <= 2.01 * tensor.nbytes


@needs_gpu
def test_a_push_waits_for_the_trainer_on_whatever_stream_it_works():
    policy = torch.nn.Linear(4096, 4096, bias=False, device="cuda")
    trainer = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.no_grad(), torch.cuda.stream(trainer):
        parameters = FullParameters(policy, torch.bfloat16)
        torch.cuda._sleep(10**8)  # cycles: some 50 ms
        policy.weight.fill_(1.0)
    [(_, tensor)] = parameters
    assert (tensor == 1).all()


@needs_gpu
def test_pushes_use_the_memory_that_earlier_ones_have_left():
    """With an engine that never empties PyTorch's cache, such as servers or --rollout-backend hf."""
    policy = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096, bias=False, device="cuda") for _ in range(3)))
    reserved = []
    for _ in range(4):
        for _, tensor in FullParameters(policy, torch.bfloat16):
            del tensor
        torch.cuda.synchronize()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[1:] == reserved[:1] * 3


@needs_gpu
def test_an_update_takes_the_memory_that_was_planned(tmp_path, world, record_property):
    """A model of 0.5 B: what a token keeps for the backward, and the peak of an update."""
    gc.collect()
    others = torch.cuda.memory_allocated()
    gpu_check = load("scripts/gpu_check.py")
    config = gpu_check.QWEN_05B
    path = gpu_check.write_model(Path(os.environ.get("GPU_CHECK_MODELS") or tmp_path), config)
    policy = model.load(path, world, torch.bfloat16)
    plan = MemoryPlan(model=path, dtype=torch.bfloat16, size=1)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=True)
    tokens = 8192 if torch.cuda.get_device_properties(0).total_memory > 60e9 else 2048
    rollout = random_rollout(world, 32, 8, 300, 300, config.vocab_size)
    micro_batches = batching.pack(rollout, torch.arange(len(rollout)), Compute(tokens), world)
    gathered = 2 * plan.parameters  # every forward gathers the weights anew
    kept = 0.0
    for step in range(3):
        torch.cuda.reset_peak_memory_stats()
        for micro in micro_batches:
            size = micro.input_ids.numel()
            before = torch.cuda.memory_allocated()
            logprobs, _ = model.response_logprobs(policy, micro, 1.0)
            if step and size > 0.8 * tokens:
                kept = max(kept, (torch.cuda.memory_allocated() - before - gathered) / size)
            logprobs.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    peak = torch.cuda.max_memory_allocated() - others
    planned = plan.update(max(micro.input_ids.numel() for micro in micro_batches))
    a_token = f"{kept / 1024:.0f} KiB a token, estimated {plan.token_bytes / 1024:.0f}"
    record_property("measured", f"{a_token}; peak {peak / 2**30:.1f} GiB, planned {planned / 2**30:.1f}")
    assert 0.9 <= plan.token_bytes / kept <= 1.15 and 0.85 <= planned / peak <= 1.3
