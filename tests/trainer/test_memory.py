"""What the trainer holds in memory, and when it lets go: gradients, gathered weights, activations, logits, a push."""

import json
import mmap
import sys
from unittest import mock

import image_models
import pytest
import torch
from conftest import ROOT, launch, save_model
from families import config_of, save
from memory_meter import LargestTensor, bytes_in_use
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from common import placement, weight_sync
from common.data import arithmetic
from common.preflight.memory import MAX_BUDGET_TOKENS, MemoryPlan, unit_sizes
from common.rollout.rollout import collate
from common.trainer import attention, batching, distillation, logits, model, vision
from common.trainer.batching import Compute
from common.trainer.parts import layers_of

NOISE = 200_000  # bytes that Python itself may allocate in the meantime


@pytest.fixture(scope="module")
def deep(tmp_path_factory) -> str:
    """A model of eight equal layers, with 2.1 million parameters."""
    config = arithmetic.config()
    config.num_hidden_layers, config.layer_types = 8, ["full_attention"] * 8
    return save_model(tmp_path_factory.mktemp("deep"), config, 0.05)


def units_of(path: str, world) -> list[int]:
    """Parameters of each unit that FSDP gathers at once; the last one is the root's."""
    policy = model.build(path, world, torch.float32, Compute(), value_head=False)
    model.shard(policy, world, torch.float32, offload=False)
    sizes = []
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            (group,) = module._get_fsdp_state()._fsdp_param_groups
            sizes.append(sum(parameter._orig_size.numel() for parameter in group.fsdp_params))
    return [*sizes[1:], sizes[0]]


@pytest.mark.parametrize("name", ["qwen2", "gemma4_text", "deepseek_v3", "falcon_h1", "gpt2"])
def test_the_plan_knows_what_fsdp_gathers_at_once(name, world, tmp_path):
    """Gemma 4 has embeddings for each layer in the root, and DeepSeek a dense layer of another size than the others."""
    config_of(name).save_pretrained(tmp_path)
    *layers, rest = units_of(str(tmp_path), world)
    assert unit_sizes(str(tmp_path)) == (max(layers), rest)


@pytest.mark.parametrize("family", vision.FAMILIES)
def test_the_plan_of_a_model_with_images_counts_its_tower_in_the_root(family, world, tmp_path):
    image_models.FAMILIES[family].make(tmp_path)
    if family.startswith("qwen"):  # on the Hub only the whole model's configuration says whether the head is tied
        config = json.loads((tmp_path / "config.json").read_text())
        del config["text_config"]["tie_word_embeddings"]
        (tmp_path / "config.json").write_text(json.dumps(config))
    *layers, rest = units_of(str(tmp_path), world)
    assert unit_sizes(str(tmp_path)) == (max(layers), rest)
    plan = MemoryPlan(model=str(tmp_path), dtype=torch.bfloat16, size=2, backend="vllm", memory=80e9, gpu=True)
    assert plan.fitted_compute(1000).token_budget == MAX_BUDGET_TOKENS


def four_rows(world):
    return collate([[5] * 40] * 4, [[6] * 9] * 4, None, [False] * 4, 0, world.device)


@pytest.mark.slow
def test_two_ranks_hold_and_exchange_what_they_must_and_no_more(deep):
    """workers/memory.py says what is measured."""
    printed = launch(ROOT / "tests/workers/memory.py", deep, ranks=2, engine=False).stdout
    found = json.loads(next(line for line in printed.splitlines() if line.startswith("{")))
    assert found["decided"] == [False, False], "ranks that decide differently wait for each other forever"
    assert found["kept"] == pytest.approx({"without": 0.5, "room": 1.0}, abs=0.1), "without room it is a shard"
    assert found["over copies"] == 1
    assert 1 <= found["gathered"] <= 3, "eight layers would be held if none were freed before the next"
    assert found["widest"] <= 0.5, "a shard is cast before it is gathered, not the whole parameter after it"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_rank_does_not_use_has_a_gradient_of_0(models, world, monkeypatch, dtype):
    """Ranks reduce the gradients of a layer together, so each needs one for every parameter."""
    path = models["tied and grouped"]
    build, read_weights = model.build, model.read_weights

    def build_with_unused(*given):
        policy = build(*given)
        model.layers_of(policy)[0].compressor = torch.nn.Parameter(torch.empty(3, device="meta"))
        return policy

    def read_with_unused(*given):
        state, *rest = read_weights(*given)
        return state | {"model.layers.0.compressor": torch.ones(3)}, *rest

    monkeypatch.setattr(model, "build", build_with_unused)
    monkeypatch.setattr(model, "read_weights", read_with_unused)
    policy = model.load(path, world, dtype)
    rollout = four_rows(world)
    micro_batches = batching.pack(rollout, torch.arange(4), Compute(20), world)
    assert len(micro_batches) > 1
    for micro in micro_batches:
        model.response_logprobs(policy, micro, 1.0)[0].sum().backward()
    gradients = {name: parameter.grad for name, parameter in policy.named_parameters()}
    assert gradients["model.layers.0.compressor"].full_tensor().tolist() == [0.0] * 3
    assert all(gradient is not None for gradient in gradients.values())


def free_gathered(policy: torch.nn.Module) -> None:
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def test_forwards_without_a_backward_free_the_gathered_weights(deep, world):
    """The packing check of load(), old log-probs and old values. The weights of the next update are then gathered."""
    rollout, weight_bytes = four_rows(world), 2 * 2.1e6  # in bfloat16
    micro_batches = batching.pack(rollout, torch.arange(4), Compute(1000), world)
    for value_head, frozen in ((False, model.frozen_logprobs), (True, model.frozen_values)):
        policy = model.load(deep, world, torch.bfloat16, value_head=value_head)
        loaded = bytes_in_use()
        free_gathered(policy)
        assert loaded - bytes_in_use() <= NOISE < weight_bytes / 10
        temperature = [] if value_head else [1.0]
        frozen(policy, rollout, micro_batches, *temperature)  # makes buffers that stay
        free_gathered(policy)
        before = bytes_in_use()
        first = frozen(policy, rollout, micro_batches, *temperature)
        assert bytes_in_use() - before <= NOISE
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(0.1)
        assert not torch.equal(frozen(policy, rollout, micro_batches, *temperature), first)


def test_checkpointing_keeps_the_input_of_each_layer_alone(deep, world):
    kept = {}
    for checkpointing in (False, True):
        policy = model.load(deep, world, torch.float32, Compute(activation_checkpointing=checkpointing))
        rollout = collate([[5] * 40] * 8, [[6] * 90] * 8, None, [False] * 8, 0, world.device)
        (micro,) = batching.pack(rollout, torch.arange(8), Compute(10_000), world)
        model.response_logprobs(policy, micro, 1.0)[0].sum().backward()  # makes buffers that stay
        before = bytes_in_use()
        logprobs, _ = model.response_logprobs(policy, micro, 1.0)
        kept[checkpointing] = bytes_in_use() - before
        del logprobs, policy
    gathered = 4 * 2.1e6  # the weights themselves, which a single rank gathers until the backward
    assert kept[True] - gathered < 0.3 * (kept[False] - gathered)


def test_logits_exist_for_one_chunk_at_a_time(monkeypatch):
    """Forward and backward, of log-probs and of the KL to a teacher, whose rows count as four."""
    rows, vocabulary, width, chunk = 200, 50, 3, 3000
    monkeypatch.setattr(logits, "LOGITS_PER_CHUNK", chunk)
    hidden, head = (torch.randn(count, width, requires_grad=True) for count in (rows, vocabulary))
    targets, shape = torch.arange(rows) % vocabulary, logits.LogitShape()
    with LargestTensor() as largest:
        logits.ChunkedLogprobs.apply(hidden, head, targets, shape, True)[0].sum().backward()
    assert rows * width < largest.elements <= chunk
    teacher = hidden.detach(), head.detach(), shape
    with LargestTensor() as largest:
        distillation.ChunkedKL.apply(hidden, head, shape, *teacher)[0].sum().backward()
    assert rows * width <= largest.elements <= chunk // 4


def test_long_sequences_have_no_matrix_of_attention_weights(world):
    heads, tokens = 2, 1500
    qkv = [torch.randn(1, heads, tokens, 8, device=world.device, requires_grad=True) for _ in range(3)]
    spans = attention.spans([(tokens - 1, [1])], torch.device("cpu"))
    with LargestTensor() as largest:
        attention.packed_attention(None, *qkv, None, spans=spans)[0].sum().backward()
    assert largest.elements < tokens**2 / 4


@pytest.mark.parametrize("kind, saved_names", [("grouped", False), ("mixtral", True)])
def test_a_push_frees_a_full_parameter_before_it_gathers_the_next(
    kind, saved_names, models, world, tmp_path, monkeypatch
):
    """With saved names, experts are cut out of one parameter: all pieces keep it alive."""
    path = models[kind] if kind in models else save(kind, tmp_path)
    policy = model.load(path, world, torch.float32)
    gathered = []
    gather = weight_sync.gather

    def watched(parameter, dtype):
        alive = [reference for reference in gathered if not reference.expired()]
        assert not alive, "the last parameter is still in memory"
        full = gather(parameter, dtype)
        gathered.append(StorageWeakRef(full.untyped_storage()))
        return full

    monkeypatch.setattr(weight_sync, "gather", watched)
    pairs = iter(weight_sync.FullParameters(policy, torch.bfloat16, saved_names))
    pushed = 0
    # A loop variable would keep the tensor while the next one is gathered.
    while next(pairs, (None, None))[0] is not None:
        pushed += 1
    assert pushed >= len(gathered) == len(list(policy.parameters()))


def test_nothing_that_is_pushed_or_only_compared_with_has_a_gradient(models, world):
    policy = model.load(models["tied and grouped"], world, torch.float32)
    reference = model.load_reference(policy, models["tied and grouped"], world, torch.float32, Compute(), offload=False)
    assert not any(parameter.requires_grad for parameter in reference.parameters())
    assert not any(tensor.requires_grad for _, tensor in weight_sync.FullParameters(policy, torch.bfloat16))


def listed_forwards(policy) -> int:
    """Layers of forwards that FSDP lists until the next backward."""
    return len(policy._get_fsdp_state()._comm_ctx.post_forward_order)


def frozen_models(policy, path: str, world, dtype: torch.dtype) -> dict[str, torch.nn.Module]:
    """What is loaded beside a policy and only compared with. The last one follows the policy (SDPO)."""
    return {
        "reference": model.load_reference(policy, path, world, dtype, Compute(), offload=False),
        "teacher": distillation.load_teacher(path, policy, world, dtype, Compute(), offload=False),
        "moving": distillation.load_teacher(path, policy, world, dtype, Compute(), offload=False, moves=True),
    }


def test_a_frozen_copy_is_kept_in_the_compute_dtype_and_computes_the_same(deep, world):
    """Bit for bit, as each forward would cast float32 weights. A teacher that moves is float32."""
    rollout = four_rows(world)
    micro_batches = batching.pack(rollout, torch.arange(4), Compute(20), world)
    policy = model.load(deep, world, torch.bfloat16)
    right = model.frozen_logprobs(policy, rollout, micro_batches, 1.0)
    for name, frozen in frozen_models(policy, deep, world, torch.bfloat16).items():
        kept = torch.float32 if name == "moving" else torch.bfloat16
        assert {parameter.dtype for parameter in frozen.parameters()} == {kept}, name
        assert torch.equal(model.frozen_logprobs(frozen, rollout, micro_batches, 1.0), right), name


def test_forwards_of_a_frozen_model_leave_nothing_behind(models, world):
    """FSDP lists each of its layers until a backward, which never comes."""
    path = models["tied and grouped"]
    rollout = four_rows(world)
    micro_batches = batching.pack(rollout, torch.arange(4), Compute(20), world)
    policy = model.load(path, world, torch.float32)
    for name, frozen in frozen_models(policy, path, world, torch.float32).items():
        for _ in range(3):
            model.frozen_logprobs(frozen, rollout, micro_batches, 1.0)
            assert listed_forwards(frozen) == 0, name
        if name != "reference":
            for micro in micro_batches:
                distillation.divergences(policy, frozen, micro, 1.0)[0].sum().backward()
            assert listed_forwards(frozen) > 0
            model.reshard(frozen)
            assert listed_forwards(frozen) == listed_forwards(policy) == 0, name


@pytest.mark.parametrize("offload", [False, True])
def test_fsdp_is_asked_to_keep_parameters_in_host_memory(offload, models, world):
    """On a CPU they are there anyway. tests/gpu/test_training.py looks where they are on a GPU."""
    with mock.patch.object(model, "fully_shard", wraps=model.fully_shard) as sharded:
        model.load(models["tied and grouped"], world, torch.float32, offload=offload)
    assert sharded.call_count == 3  # two layers and the model
    for call in sharded.call_args_list:
        assert isinstance(call.kwargs.get("offload_policy"), CPUOffloadPolicy) == offload


@pytest.mark.parametrize("offload", [False, True])
def test_weights_from_the_host_leave_the_gpu_after_each_layers_forward(offload, models, world):
    """Also on a single rank, where weights that live on the GPU keep their copy in the compute dtype."""
    policy = model.load(models["tied and grouped"], world, torch.bfloat16, offload=offload)
    (micro,) = batching.pack(four_rows(world), torch.arange(4), Compute(1000), world)
    logprobs, _ = model.response_logprobs(policy, micro, 1.0)
    sharded = {isinstance(weight, DTensor) for layer in layers_of(policy) for weight in layer.parameters()}
    assert sharded == {offload}
    logprobs.sum().backward()
    assert all(isinstance(weight, DTensor) for weight in policy.parameters())


@pytest.mark.skipif(sys.platform != "linux", reason="drop_pages is for Linux only")
def test_dropped_pages_are_those_of_the_tensor_alone():
    """Neighbours in the first and the last page of its storage keep their values."""
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 4 * page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[:] = b"\1" * (4 * page)
    tensor = torch.frombuffer(memory, dtype=torch.uint8, offset=100, count=3 * page)
    placement.drop_pages(tensor)
    assert set(memory[:page]) == {1} and set(memory[3 * page :]) == {1}
    assert set(memory[page : 3 * page]) == {0}
