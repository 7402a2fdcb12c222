"""The memory of a rank, as runs and scripts/plan.py compute it: against numbers worked out by hand and real configs."""

import contextlib
import itertools
import math
from dataclasses import replace

import psutil
import pytest
import torch
import transformers
import tyro
from helpers import load
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen2Config

from algos import dpo
from common import errors, placement
from common.data import arithmetic
from common.placement import Layout
from common.preflight import checks, memory, offline, roles
from common.preflight.memory import GIB, MemoryPlan
from common.rollout import engines
from common.trainer.batching import Compute

plan = load("scripts/plan.py")
COLUMNS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "tie_word_embeddings",
)
CONFIGS = {  # SmolLM2-135M and Qwen2.5
    "0.1": (LlamaConfig, 576, 1536, 30, 9, 3, 49_152, True),
    "0.5": (Qwen2Config, 896, 4864, 24, 14, 2, 151_936, True),
    "7": (Qwen2Config, 3584, 18_944, 28, 28, 4, 152_064, False),
    "14": (Qwen2Config, 5120, 13_824, 48, 40, 8, 152_064, False),
}
PARAMETERS = 7_615_616_512  # of the 7 B model


@pytest.fixture(scope="module")
def sizes(tmp_path_factory) -> dict[str, str]:
    """Folders of models of 0.1 to 14 B parameters, with nothing but a config.json."""
    folders = {}
    for name, (kind, *numbers) in CONFIGS.items():
        folders[name] = str(tmp_path_factory.mktemp(f"size-{name}"))
        kind(**dict(zip(COLUMNS, numbers))).save_pretrained(folders[name])
    return folders


@pytest.fixture
def seven(sizes) -> MemoryPlan:
    """7 B with vLLM on 8 GPUs of 80 GB."""
    return MemoryPlan(model=sizes["7"], dtype=torch.bfloat16, size=8, backend="vllm", memory=80e9, gpu=True)


def test_parameters_and_kv_cache_of_real_models(sizes):
    """As published; bytes of KV cache a token in bfloat16."""
    for name, parameters, kv in (("0.1", 134_515_008, 23_040), ("0.5", 494_032_768, 12_288), ("7", PARAMETERS, 57_344)):
        assert memory.count_parameters(sizes[name]) == parameters
        assert engines.kv_bytes_per_token(memory.text_config(sizes[name]), torch.bfloat16) == kv


@pytest.mark.parametrize("shards", [1, 2, 3, 7])
def test_page_locked_memory_comes_in_powers_of_two(sizes, seven, shards):
    """torch's host allocator rounds each tensor up, after it was cut. Adam's moments alone are in ordinary memory."""

    def locked_size(rows: int, columns: int = 1) -> int:
        return shards * 2 ** math.ceil(math.log2(math.ceil(rows / shards) * columns))

    layer = 2 * locked_size(18944, 3584) + locked_size(3584, 18944)  # feed-forward
    layer += 2 * locked_size(3584, 3584) + 2 * locked_size(512, 3584)  # queries, outputs; keys, values
    layer += 3 * locked_size(3584) + 2 * locked_size(512)  # two norms, bias of queries; biases of keys and values
    locked = 28 * layer + 2 * locked_size(152064, 3584) + locked_size(3584)  # embeddings, head, last norm
    plan = replace(seven, size=shards, models=("policy", "reference"), offload="all")
    policy, reference = roles.model_roles(plan)
    assert policy.host == pytest.approx((8 * PARAMETERS + (4 + 4) * locked) / shards)
    assert reference.host == pytest.approx(2 * locked / shards)
    on_a_cpu, _ = roles.model_roles(replace(plan, gpu=False))
    assert on_a_cpu.host == pytest.approx(16 * PARAMETERS / shards)


@pytest.mark.parametrize("heads, ranks, fits", [((28, 4), 4, 1), ((28, 4), 8, 0), ((32, 4), 8, 1), ((24, 6), 4, 0)])
def test_an_engine_is_refused_whose_heads_its_ranks_cannot_share(heads, ranks, fits, tmp_path):
    """vLLM shares query heads evenly, and repeats key and value heads where there are fewer of them than ranks."""
    Qwen2Config(num_attention_heads=heads[0], num_key_value_heads=heads[1]).save_pretrained(tmp_path)
    if fits:
        return checks.check_engine_heads(str(tmp_path), ranks)
    with pytest.raises(errors.BadInput, match=f"--rollout-tp {ranks}"):
        checks.check_engine_heads(str(tmp_path), ranks)


def test_what_stays_by_hand(sizes, seven):
    """12 bytes a trained parameter and 2 a frozen one, sharded; what is offloaded does not stay."""
    states = lambda **changes: replace(seven, **changes).states
    assert states() == pytest.approx(12 * PARAMETERS / 8)
    assert states(size=1) == pytest.approx(12 * PARAMETERS)
    assert states(compute=Compute(shard_size=2)) == pytest.approx(6 * PARAMETERS)
    assert states(models=("policy", "reference"), reward_bytes=5e9) == pytest.approx(14 * PARAMETERS / 8 + 5e9)
    assert states(models=("policy", "reference"), dtype=torch.float32) == pytest.approx(16 * PARAMETERS / 8)
    assert states(models=("policy", "teacher")) == pytest.approx(16 * PARAMETERS / 8), "SDPO's moves in float32"
    for offload, trained in (("none", 12 * 2 + 2), ("others", 12), ("all", 0)):
        ppo = replace(seven, models=("policy", "critic", "reference"), offload=offload)
        assert ppo.states == pytest.approx(trained * PARAMETERS / 8)
        small = replace(ppo, model=sizes["0.1"])  # its gradients are kept whole unless the policy is offloaded, too
        assert small.whole_gradients == (offload != "all")
    whole, copies = (replace(seven, offload="all", compute=Compute(shard_size=n)).update(1000) for n in (0, 2))
    assert copies - whole == pytest.approx(4 * PARAMETERS / 2), "sums that wait for those of the other copies"
    student = replace(seven, model=sizes["0.5"])
    taught = replace(student, others={"teacher": sizes["7"]})
    assert taught.states - student.states == pytest.approx(2 * PARAMETERS / 8)
    assert taught.update(1000) - student.update(1000) == pytest.approx(2 * PARAMETERS / 8)


def test_a_teacher_in_the_update_is_gathered_beside_the_policy(sizes, seven):
    """Whole on a single shard, where no layer is freed after its forward. Otherwise two layers and what is outside."""
    layer, rest = memory.unit_sizes(sizes["7"])
    at_a_time = rest + 2 * layer
    for changes, gathered in (
        ({}, at_a_time),
        ({"size": 1}, PARAMETERS),
        ({"size": 1, "offload": "others"}, at_a_time),
        ({"compute": Compute(shard_size=1)}, PARAMETERS),
    ):
        before = replace(seven, model=sizes["0.5"], others={"teacher": sizes["7"]}, **changes)
        during = replace(before, teacher_in_update=True)
        assert during.update(1000) - before.update(1000) == pytest.approx(2 * gathered)
        own = replace(during, models=("policy", "teacher"), others={}, model=sizes["7"])
        assert own.update(1000) - replace(own, teacher_in_update=False).update(1000) == pytest.approx(2 * gathered)
    assert replace(seven, teacher_in_update=True).update(1000) == seven.update(1000), "the policy is its own teacher"


def test_layers_of_different_kinds_and_sizes_by_hand():
    """Heads, and bytes of the KV cache for a token in bfloat16."""
    of = lambda config: (checks.heads_of_all(config), engines.kv_bytes_per_token(config, torch.bfloat16))
    gemma = transformers.Gemma4TextConfig(  # 26 B
        num_attention_heads=16, num_key_value_heads=8, num_global_key_value_heads=2, attention_k_eq_v=True
    )
    assert of(gemma) == ([(16, 2), (16, 8)], 2 * (25 * 2 * 8 * 256 + 5 * 2 * 2 * 512))
    shared = transformers.Gemma4TextConfig(num_kv_shared_layers=10)  # the last ten, of which two see everything
    assert of(shared)[1] == 2 * (17 * 2 * 4 * 256 + 3 * 2 * 4 * 512)
    assert of(transformers.DeepseekV3Config())[1] == 2 * 61 * (512 + 64)
    hybrid = transformers.Qwen3_5TextConfig(num_hidden_layers=8, num_key_value_heads=2, head_dim=64)
    assert of(hybrid)[1] == 2 * 2 * 2 * 2 * 64  # two of eight layers
    assert of(transformers.Mamba2Config()) == ([(0, 0)], 0)


def test_there_is_an_estimate_for_every_decoder():
    """Families name their sizes in many ways. What the estimates read, every configuration of transformers has."""
    estimated = 0
    for kind in AutoModelForCausalLM._model_mapping:
        if kind.model_type.startswith("musicgen"):  # needs the configurations of its parts
            continue
        config = kind()
        text = config.get_text_config()
        if config.is_encoder_decoder or not hasattr(text, "num_hidden_layers"):
            continue
        for checkpointing in (False, True):
            assert memory.activation_bytes(text, torch.float32, checkpointing) > 0, kind
        engines.kv_bytes_per_token(text, torch.float32)
        checks.heads_of_all(config)
        estimated += 1
    assert estimated > 150


def test_the_token_budget_by_hand(sizes, seven, tmp_path):
    """7 B on 8 GPUs of 80 GB, of which 72 GB can be used."""
    states, gradients = 12 * PARAMETERS / 8, 4 * PARAMETERS / 8
    ends = 2 * 3584 * 152064 + 3584  # embeddings, head and the last norm
    layer = (PARAMETERS - ends) / 28
    passing = 2 * (ends + 2 * layer) + 4 * ends + 3 * 4 * 2**28  # gathered weights, unreduced gradients, logits
    room = 0.9 * 80e9 - 2 * GIB - states - gradients - passing
    per_token = 28 * (16 * 3584 + 2 * (2 * (28 + 4) * 128 + 4 * 18944))  # 6.31 MB
    assert seven.token_bytes == per_token
    assert 6144 <= room / per_token < 7168 and seven.token_budget() == 6144
    checkpointed = replace(seven, compute=Compute(activation_checkpointing=True))
    assert checkpointed.token_bytes == 28 * 2 * 3584 + per_token // 28, "the inputs of all layers, and one layer"
    assert checkpointed.token_budget() == memory.MAX_BUDGET_TOKENS
    assert replace(seven, model=sizes["0.1"]).token_budget() == memory.MAX_BUDGET_TOKENS
    narrow = replace(seven, dtype=torch.float32)
    wide = AutoConfig.from_pretrained(sizes["7"])
    wide.head_dim = 512
    wide.save_pretrained(tmp_path / "wide")
    latent = transformers.DeepseekV3Config(  # its values are narrower than its keys
        num_hidden_layers=6, first_k_dense_replace=6, vocab_size=1000
    )
    latent.save_pretrained(tmp_path / "latent")
    unsupported = [replace(seven, model=str(tmp_path / name)) for name in ("wide", "latent")]
    for without_kernel in (narrow, *unsupported):  # its attention keeps more than is estimated
        assert without_kernel.token_budget() * without_kernel.token_bytes <= memory.ACTIVATION_SHARE * 80e9


def test_a_token_keeps_wide_heads_and_their_norms_by_hand(tmp_path):
    """Qwen3-4B in bfloat16: 32 query heads and 8 key heads of 128, which are wider than hidden size / 32."""
    sizes = {"hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32, "num_key_value_heads": 8}
    transformers.Qwen3Config(**sizes, head_dim=128, num_hidden_layers=3, vocab_size=64).save_pretrained(tmp_path)
    plan = MemoryPlan(model=str(tmp_path), dtype=torch.bfloat16, size=1)
    heads = (32 + 8) * 128
    assert plan.token_bytes == 3 * (16 * 2560 + 2 * (2 * heads + 4 * 9728) + (4 + 2) * heads)


def test_a_token_keeps_what_all_heads_make_of_a_latent_by_hand(tmp_path):
    """DeepSeek-V2-Lite in bfloat16: 16 heads with keys of 128 + 64 and values of 128. Its `head_dim` is the 64."""
    heads = {"num_attention_heads": 16, "kv_lora_rank": 512, "q_lora_rank": None, "num_key_value_heads": 16}
    sizes = {"hidden_size": 2048, "intermediate_size": 10944, "first_k_dense_replace": 3, "num_experts_per_tok": 6}
    config = transformers.DeepseekV2Config(
        **heads, **sizes, moe_intermediate_size=1408, num_hidden_layers=3, vocab_size=64
    )
    config.save_pretrained(tmp_path)
    plan = MemoryPlan(model=str(tmp_path), dtype=torch.bfloat16, size=1)
    assert plan.token_bytes == 3 * (16 * 2048 + 2 * (2 * 16 * (192 + 128) + 4 * 10944))


NORMS_OF_HEADS = {"qwen3": True, "hunyuan_v1_dense": True, "llama4_text": True, "deepseek_v2": False, "llama": False}


@pytest.mark.parametrize("family", NORMS_OF_HEADS)
def test_families_name_the_norm_of_queries_differently(tmp_path, family):
    small = {"num_hidden_layers": 2, "vocab_size": 64, "hidden_size": 64, "head_dim": 64}
    AutoConfig.for_model(family, **small).save_pretrained(tmp_path)
    assert memory.normalizes_heads(str(tmp_path)) == NORMS_OF_HEADS[family]


def test_on_a_cpu_a_second_trained_model_quarters_the_forward(seven):
    """A share of the memory for the activations, and a quarter of it with a critic. A reference changes nothing."""
    memory_of_4096 = 4096 * seven.token_bytes / memory.ACTIVATION_SHARE
    one = replace(seven, gpu=False, memory=1.01 * memory_of_4096)
    assert one.token_budget() == 4096
    assert replace(one, models=("policy", "reference")).token_budget() == 4096
    assert replace(one, models=("policy", "critic")).token_budget() == 1024
    assert replace(one, models=("policy", "reference", "critic")).token_budget() == 1024
    assert replace(one, models=("policy", "critic"), memory=memory_of_4096 / 8).token_budget() == 512
    assert replace(one, models=("policy", "critic"), memory=memory_of_4096 / 80).token_budget() == 512


def test_with_offload_no_gradient_stays_on_the_gpu(seven):
    """What stays is what a backward passes through: gathered weights, gradients of the largest part, and logits."""
    ends = 2 * 3584 * 152064 + 3584
    layer = (PARAMETERS - ends) / 28
    passing = 2 * (ends + 2 * layer) + 4 * ends + 3 * 4 * 2**28
    for ranks in (1, 8):
        assert replace(seven, backend="none", offload="all", size=ranks).update(0) == pytest.approx(passing)


def test_where_the_engine_is_while_a_rank_trains(seven):
    """A split run, or one without an engine, has no part for it; hf's engine is a copy of the weights."""
    without = replace(seven, backend="none").update(0)
    assert seven.update(0) - without == memory.ENGINE_ASLEEP
    assert replace(seven, backend="hf").update(0) - without == 2 * PARAMETERS
    for layout in (Layout("split", (1,)), Layout("split", rollout_urls=("http://a",))):
        assert replace(seven, layout=layout).update(0) == without


def test_an_engine_takes_what_it_needs_or_what_is_left(sizes, seven):
    """7 B on 8 GPUs: weights of 15.2 GB, 57 kB of KV cache a token, 4 GiB besides; 11.4 GB of states."""
    assert seven.engine_share(64 * 1000) == math.ceil((15.231e9 + 64_000 * 57_344 + 4 * 2**30) / 0.8e9) / 100
    assert seven.engine_share(512 * 4000) == math.floor((0.9 * 80e9 - 12 * PARAMETERS / 8) / 0.8e9) / 100
    assert replace(seven, layout=Layout("split", (1,))).engine_share(512 * 4000) == 0.9
    assert replace(seven, offload="all").engine_share(512 * 4000) == 0.9
    cache = []
    for tp in (1, 2, 4):
        two_heads = replace(seven, model=sizes["0.5"], rollout_tp=tp)
        cache.append(two_heads.engine_needs(100_000) - two_heads.engine_needs(0))
    assert cache[0] == 2 * cache[1] == 2 * cache[2] > 0, "with more GPUs than heads, some keep the same head"


def test_a_run_fills_in_its_flags_or_does_not_start(seven, capsys):
    assert seven.fitted_compute(1000).token_budget == 6144
    assert seven.fitted_layout(1000, 64).rollout_memory == seven.engine_share(64_000)
    assert "6144" in (said := capsys.readouterr().out) and "29%" in said
    # An engine works on at most 512 responses at once.
    assert seven.fitted_layout(1000, 4096).rollout_memory == seven.engine_share(512_000)
    assert replace(seven, layout=Layout(rollout_memory=0.5)).fitted_layout(1000, 64).rollout_memory == 0.5
    for elsewhere in ({"gpu": False}, {"backend": "hf"}, {"layout": Layout("split", rollout_urls=("http://a",))}):
        other = replace(seven, **elsewhere)
        assert other.fitted_layout(1000, 64) == other.layout
    for compute in (Compute(activation_checkpointing=True), Compute(sequence_parallel=4)):
        replace(seven, compute=compute).fitted_compute(longest=22528)
    for has in range(45 * 10**9, 47 * 10**9, 5 * 10**7):  # a share is rounded down to hundredths
        small = replace(seven, memory=has)
        with contextlib.suppress(errors.BadInput):
            assert small.fitted_layout(180, 64).rollout_memory * has >= small.engine_needs(180)
    refused = [
        (lambda: replace(seven, size=1).fitted_compute(), "--offload"),
        (lambda: seven.fitted_compute(longest=22528), "--sequence-parallel"),  # a row is never cut
        (lambda: seven.fitted_compute(11264, longest_unit=22528), "--sequence-parallel"),  # and a pair neither
        (lambda: replace(seven, compute=Compute(shard_size=2)).fitted_layout(400_000, 64), "--rollout-tp"),
        (lambda: replace(seven, layout=Layout(rollout_memory=0.8)).fitted_layout(1000, 64), "--rollout-memory 0.8"),
        # On 4 GPUs, 23 GB of states and 0.75 of 80 GB fit at the start, and not once Adam's moments exist.
        (lambda: replace(seven, size=4, layout=Layout(rollout_memory=0.75)).fitted_layout(9, 9), "--rollout-memory"),
    ]
    for call, named in refused:
        with pytest.raises(errors.BadInput, match=named):
            call()


@pytest.mark.parametrize("models", [(), ("reference",), ("critic",)], ids=["grpo", "reference", "ppo"])
def test_a_run_is_accepted_where_it_fits(models, sizes):
    """Models, GPUs and their memory, with what a run keeps counted here once more: 12 bytes a parameter of trained
    models, 2 of frozen ones; 2 of gathered weights and 4 of gradients at least; 2 of the engine's weights and 4 GiB.
    """
    accepted, refused, larger = set(), set(), {24e9: 40e9, 40e9: 80e9, 80e9: 141e9}
    for size, has, ranks, tp in itertools.product(sizes, (*larger, 141e9), (1, 2, 4, 8, 64), (1, 2)):
        if ranks % tp:
            continue
        given = {"models": ("policy", *models), "backend": "vllm", "rollout_tp": tp, "memory": has, "gpu": True}
        run = MemoryPlan(model=sizes[size], dtype=torch.bfloat16, size=ranks, **given)
        try:
            budget = run.fitted_compute(1500).token_budget
            share = run.fitted_layout(1500, 256).rollout_memory
        except errors.BadInput:
            refused.add((size, has, ranks, tp))
            continue
        accepted.add((size, has, ranks, tp))
        states = (12 + {"reference": 2, "critic": 12}.get("".join(models), 0)) * run.parameters / ranks
        assert share * has >= 2 * run.parameters / tp + 4 * 2**30 and share * has + states <= 0.9 * has
        assert budget >= 1024 and states + 4 * run.parameters / ranks + 2 * 2**30 <= 0.9 * has
    assert {("0.5", 80e9, 1, 1), ("7", 141e9, 8, 1)} <= accepted
    assert {("7", 24e9, 4, 1), ("14", 24e9, 64, 1), ("14", 80e9, 2, 1)} <= refused
    for size, has, ranks, tp in accepted:
        more = {(size, has, 2 * ranks, tp), (size, larger.get(has), ranks, tp)}
        assert not more & refused, "more GPUs, or larger ones, never make a run impossible"


@pytest.mark.parametrize("shares", ["packed", "each its prompt", "padded"])
def test_a_pair_without_a_shared_prompt_is_checked_at_its_full_length(shares, tmp_path, monkeypatch):
    """Rows of up to 100 tokens. A pair that shares a prompt of 90 has 110; other pairs have the prompt twice."""
    compute = Compute(packing="off" if shares == "padded" else "auto", shared_prompts=shares != "each its prompt")
    checked = []

    def fitted(plan: MemoryPlan, *sizes: int) -> Compute:
        checked.append(sizes)
        return plan.compute

    monkeypatch.setattr(MemoryPlan, "fitted_compute", fitted)
    folders = {"output": str(tmp_path / "model"), "run_dir": str(tmp_path / "run")}
    args = dpo.Args(**dpo.EMBEDDED | folders | {"compute": compute})
    offline.settle(args, arithmetic.warm_start(), [], 1, 100, 110)
    assert checked == [(100, 110 if shares == "packed" else 200)]


def test_the_table_of_layouts(capsys, sizes, seven):
    """The script shows what a run would choose, and why a layout cannot run."""
    plan.main(tyro.cli(plan.Args, args=["--model", sizes["7"], "--gpus", "1", "8", "31"]))
    out = capsys.readouterr().out
    rows = {tuple(map(str.strip, line.split("|")[1:3])): line for line in out.splitlines() if line.startswith("| ")}
    assert "7.62 B" in out and {("1", "1"), ("8", "2"), ("8", "4"), ("8", "8"), ("31", "1")} <= rows.keys()
    needs = seven.update(max(1224, seven.token_budget())) / GIB
    rollout = 80e9 * seven.engine_share(1224 * 64) + seven.states
    assert f"| 6,144 | {needs:.1f} | {rollout / GIB:.1f} |" in rows["8", "1"]
    assert "--offload" in rows["1", "1"] and "--rollout-tp 8" in rows["8", "8"] and "mini-batches" in rows["31", "1"]


def test_the_table_of_layouts_has_room_for_a_teacher(sizes):
    args = tyro.cli(plan.Args, args=["--model", sizes["0.5"], "--gpus", "8"])
    taught = replace(args, teacher=sizes["7"])
    alone, both = (plan.row_of(each, 8, 1).update for each in (args, taught))
    assert both - alone >= 2 * PARAMETERS / 8, "its weights in bfloat16, over eight GPUs"


@pytest.mark.parametrize("limit, gib", [("1073741824\n", 1.0), ("max\n", None), (None, None)])
def test_a_container_has_no_more_memory_than_its_limit(tmp_path, monkeypatch, limit, gib):
    """The kernel would kill a run that plans with all of the machine's, without a word."""
    if limit:
        (tmp_path / "memory.max").write_text(limit)
    monkeypatch.setattr(placement, "CONTAINER_LIMIT", tmp_path / "memory.max")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    whole = psutil.virtual_memory().total
    assert placement.host_memory() == pytest.approx(gib * GIB / 2 if gib else whole / 2, rel=1e-3)
