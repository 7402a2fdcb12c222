"""The memory of a rank, as runs and scripts/plan.py compute it: against numbers worked out by hand and real configs."""

import dataclasses
import itertools
import math

import pytest
import torch
import tyro
from helpers import load
from transformers import LlamaConfig, Qwen2Config

from common import errors
from common.placement import Layout
from common.preflight import checks, memory
from common.preflight.memory import GIB, MemoryPlan
from common.rollout import engines
from common.trainer.batching import Compute

plan = load("scripts/plan.py")
SMOLLM = LlamaConfig(
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    vocab_size=49152,
    tie_word_embeddings=True,
)
HALF_B = Qwen2Config(
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    vocab_size=151936,
    tie_word_embeddings=True,
)
SEVEN_B = Qwen2Config(
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    vocab_size=152064,
    tie_word_embeddings=False,
)
FOURTEEN_B = Qwen2Config(
    hidden_size=5120,
    intermediate_size=13824,
    num_hidden_layers=48,
    num_attention_heads=40,
    num_key_value_heads=8,
    vocab_size=152064,
    tie_word_embeddings=False,
)
PARAMETERS = 7_615_616_512  # of SEVEN_B


@pytest.fixture(scope="module")
def sizes(tmp_path_factory) -> dict[str, str]:
    """Folders of models of 0.1 to 14 B parameters, with nothing but a config.json."""
    configs = {"0.1": SMOLLM, "0.5": HALF_B, "7": SEVEN_B, "14": FOURTEEN_B}
    folders = {name: tmp_path_factory.mktemp(f"size-{name}") for name in configs}
    for name, config in configs.items():
        config.save_pretrained(folders[name])
    return {name: str(folder) for name, folder in folders.items()}


@pytest.fixture
def seven(sizes) -> MemoryPlan:
    """7 B with vLLM on 8 GPUs of 80 GB."""
    return MemoryPlan(model=sizes["7"], dtype=torch.bfloat16, size=8, backend="vllm", memory=80e9, gpu=True)


def change(plan: MemoryPlan, **changes) -> MemoryPlan:
    return dataclasses.replace(plan, **changes)


@pytest.mark.parametrize(
    "size, parameters, kv", [("0.1", 134_515_008, 23_040), ("0.5", 494_032_768, 12_288), ("7", PARAMETERS, 57_344)]
)
def test_parameters_and_kv_cache_of_real_models(size, parameters, kv, sizes):
    """As published; bytes of KV cache a token in bfloat16."""
    assert memory.count_parameters(sizes[size]) == parameters
    assert engines.kv_bytes_per_token(memory.text_config(sizes[size]), torch.bfloat16) == kv


@pytest.mark.parametrize(
    "heads, ranks, fits", [((28, 4), 4, True), ((28, 4), 8, False), ((32, 4), 8, True), ((24, 6), 4, False)]
)
def test_an_engine_is_refused_whose_heads_its_ranks_cannot_share(heads, ranks, fits, tmp_path):
    """vLLM shares query heads evenly, and repeats key and value heads where there are fewer of them than ranks."""
    config = Qwen2Config(num_attention_heads=heads[0], num_key_value_heads=heads[1])
    config.save_pretrained(tmp_path)
    assert checks.heads_of(config) == heads
    if fits:
        return checks.check_engine_heads(str(tmp_path), ranks)
    with pytest.raises(errors.BadInput, match=f"--rollout-tp {ranks} does not divide the {heads[0]} query heads"):
        checks.check_engine_heads(str(tmp_path), ranks)


def test_an_engine_keeps_a_head_on_each_gpu_where_there_are_more_gpus_than_heads(sizes, seven):
    def cache(tp: int) -> float:
        two_heads = change(seven, model=sizes["0.5"], rollout_tp=tp)
        return two_heads.engine_needs(100_000) - two_heads.engine_needs(0)

    assert cache(1) == 2 * cache(2) == 2 * cache(4) > 0


def test_what_stays_by_hand(seven):
    """12 bytes a parameter are 85 GiB on 1 GPU, 11 GiB on 8, and 14 with a reference."""
    states = lambda **changes: change(seven, **changes).states / GIB
    assert [states(size=1), states()] == pytest.approx([85.11, 10.64], rel=1e-3)
    assert states(models=("policy", "reference")) == pytest.approx(14.19, rel=1e-3)
    assert states(compute=Compute(shard_size=2)) == pytest.approx(6 * PARAMETERS / GIB)
    assert states(reward_bytes=GIB) == pytest.approx(11.64, rel=1e-3)


def test_a_teacher_is_frozen(sizes, seven):
    student = change(seven, model=sizes["0.5"])
    taught = change(student, others={"teacher": sizes["7"]})
    assert taught.states - student.states == pytest.approx(4 * PARAMETERS / 8)
    assert taught.update(1000) - student.update(1000) == pytest.approx(4 * PARAMETERS / 8)


@pytest.mark.parametrize("offload, models", [("none", 12 * 2 + 4), ("others", 12), ("all", 0)])
def test_offloaded_models_are_not_on_the_gpu(offload, models, sizes, seven):
    ppo = change(seven, models=("policy", "critic", "reference"), offload=offload, reward_bytes=5e9)
    assert ppo.states == pytest.approx(models * PARAMETERS / 8 + 5e9)
    small = change(ppo, model=sizes["0.1"])  # its gradients are kept whole unless the policy is offloaded, too
    assert small.whole_gradients == (offload != "all")


def test_the_token_budget_by_hand(sizes, seven):
    """7 B on 8 GPUs of 80 GB, of which 72 GB can be used."""
    states, gradients = 12 * PARAMETERS / 8, 4 * PARAMETERS / 8
    ends = 2 * 3584 * 152064
    layer = (PARAMETERS - ends) / 28
    passing = 2 * (ends + 2 * layer) + 4 * ends + 3 * 4 * 2**28  # gathered weights, unreduced gradients, logits
    room = 0.9 * 80e9 - 2 * GIB - states - gradients - passing
    per_token = 28 * (16 * 3584 + 2 * (5 * 3584 + 4 * 18944))  # 6.85 MB
    assert seven.token_bytes == per_token
    assert 6144 <= room / per_token < 7168 and seven.token_budget() == 6144
    recomputed = change(seven, compute=Compute(activation_checkpointing=True))
    assert recomputed.token_budget() == memory.MAX_BUDGET_TOKENS
    assert change(seven, model=sizes["0.1"]).token_budget() == memory.MAX_BUDGET_TOKENS
    narrow = change(seven, dtype=torch.float32)  # its attention keeps more than is estimated
    assert narrow.token_budget() * narrow.token_bytes <= memory.ACTIVATION_SHARE * 80e9


def test_where_the_engine_is_while_a_rank_trains(seven):
    """A split run, or one without an engine, has no part for it; hf's engine is a copy of the weights."""
    without = change(seven, backend="none").update(0)
    assert seven.update(0) - without == memory.ENGINE_ASLEEP
    assert change(seven, backend="hf").update(0) - without == 2 * PARAMETERS
    for layout in (Layout("split", (1,)), Layout("split", rollout_urls=("http://a",))):
        assert change(seven, layout=layout).update(0) == without


def test_an_engine_takes_what_it_needs_or_what_is_left(seven):
    """7 B on 8 GPUs: weights of 15.2 GB, 57 kB of KV cache a token, 4 GiB besides; 11.4 GB of states."""
    assert seven.engine_share(64 * 1000) == math.ceil((15.231e9 + 64_000 * 57_344 + 4 * 2**30) / 0.8e9) / 100
    assert seven.engine_share(512 * 4000) == math.floor((0.9 * 80e9 - 12 * PARAMETERS / 8) / 0.8e9) / 100
    assert change(seven, layout=Layout("split", (1,))).engine_share(512 * 4000) == 0.9
    assert change(seven, offload="all").engine_share(512 * 4000) == 0.9
    alone = change(seven, compute=Compute(shard_size=2))
    assert alone.engine_share(512 * 4000) == math.floor((0.9 * 80e9 - 6 * PARAMETERS) / 0.8e9) / 100


@pytest.mark.parametrize("memory_bytes", range(45 * 10**9, 47 * 10**9, 5 * 10**7))
def test_an_accepted_engine_has_room_for_one_response(memory_bytes, seven):
    """Also where its share, in whole hundredths, is rounded below what it needs."""
    small = change(seven, memory=memory_bytes)
    try:
        share = small.fitted_layout(180, 64).rollout_memory
    except errors.BadInput:
        return
    assert share * memory_bytes >= small.engine_needs(180)


def test_a_run_fills_in_its_flags_or_does_not_start(seven, capsys):
    with pytest.raises(errors.BadInput, match="an update with .* more ranks, --offload"):
        change(seven, size=1).fitted_compute()
    with pytest.raises(errors.BadInput, match="an update with 22528 tokens in a forward needs .*, shorter rows"):
        seven.fitted_compute(longest=22528)  # a row is never cut
    for compute in (Compute(activation_checkpointing=True), Compute(sequence_parallel=4)):
        change(seven, compute=compute).fitted_compute(longest=22528)
    assert seven.fitted_compute(1000).token_budget == 6144
    assert seven.fitted_layout(1000, 64).rollout_memory == seven.engine_share(64_000)
    assert "engine: 29% of the GPU's 75 GiB" in capsys.readouterr().out
    # An engine works on at most 512 responses at once.
    assert seven.fitted_layout(1000, 4096).rollout_memory == seven.engine_share(512_000)
    half = change(seven, layout=Layout(rollout_memory=0.5))
    assert half.fitted_layout(1000, 64).rollout_memory == 0.5
    with pytest.raises(errors.BadInput, match="the engine needs .* a larger --rollout-tp"):
        change(seven, compute=Compute(shard_size=2)).fitted_layout(400_000, 64)
    with pytest.raises(errors.BadInput, match="--rollout-memory 0.8 takes .* and the trainer leaves"):
        change(seven, layout=Layout(rollout_memory=0.8)).fitted_layout(1000, 64)
    # 7 B on 4 GPUs: 23 GB of states and 0.75 of 80 GB fit at the start, and not once Adam's moments exist.
    with pytest.raises(errors.BadInput, match=r"--rollout-memory 0.75 takes 55\.9 GiB"):
        change(seven, size=4, layout=Layout(rollout_memory=0.75)).fitted_layout(1000, 64)


@pytest.mark.parametrize(
    "changes", [{"gpu": False}, {"backend": "hf"}, {"layout": Layout("split", rollout_urls=("http://a",))}]
)
def test_only_vllm_on_a_gpu_of_this_run_gets_a_share(changes, seven):
    other = change(seven, **changes)
    assert other.fitted_layout(1000, 64) == other.layout


@pytest.mark.parametrize("models", [(), ("reference",), ("critic",)], ids=["grpo", "reference", "ppo"])
def test_a_run_is_accepted_where_it_fits(models, sizes):
    """Models, GPUs and their memory, with what a run keeps counted here once more: 12 bytes a parameter of trained
    models, 4 of frozen ones; 2 of gathered weights and 4 of gradients at least; 2 of the engine's weights and 4 GiB.
    """
    accepted, refused, larger = set(), set(), {24e9: 40e9, 40e9: 80e9, 80e9: 141e9}
    for size, has, ranks, tp in itertools.product(sizes, (*larger, 141e9), (1, 2, 4, 8, 16, 64), (1, 2)):
        if ranks % tp:
            continue
        run = MemoryPlan(
            model=sizes[size],
            dtype=torch.bfloat16,
            size=ranks,
            models=("policy", *models),
            backend="vllm",
            rollout_tp=tp,
            memory=has,
            gpu=True,
        )
        try:
            budget = run.fitted_compute(1500).token_budget
            share = run.fitted_layout(1500, 256).rollout_memory
        except errors.BadInput:
            refused.add((size, has, ranks, tp))
            continue
        accepted.add((size, has, ranks, tp))
        states = (12 + {"reference": 4, "critic": 12}.get("".join(models), 0)) * run.parameters / ranks
        assert share * has >= 2 * run.parameters / tp + 4 * 2**30 and share * has + states <= 0.9 * has
        assert budget >= 1024 and states + 4 * run.parameters / ranks + 2 * 2**30 <= 0.9 * has
    assert {("0.5", 80e9, 1, 1), ("7", 141e9, 8, 1)} <= accepted
    assert {("7", 24e9, 4, 1), ("14", 24e9, 64, 1), ("14", 80e9, 2, 1)} <= refused
    for size, has, ranks, tp in accepted:
        more = {(size, has, 2 * ranks, tp), (size, larger.get(has), ranks, tp)}
        assert not more & refused, "more GPUs, or larger ones, never make a run impossible"


def run(*flags) -> None:
    plan.main(tyro.cli(plan.Args, args=list(map(str, flags))))


def test_the_table_of_layouts(capsys, sizes, seven):
    """The script shows what a run would choose, and why a layout cannot run."""
    run("--model", sizes["7"], "--gpus", 1, 8, 31)
    out = capsys.readouterr().out
    assert "7.62 B parameters" in out and "not measured" in out
    rows = {tuple(map(str.strip, line.split("|")[1:3])): line for line in out.splitlines() if line.startswith("| ")}
    assert {("1", "1"), ("8", "1"), ("8", "2"), ("8", "4"), ("8", "8"), ("31", "1")} <= rows.keys()
    needs = seven.update(max(1224, seven.token_budget())) / GIB
    assert f"| 6,144 | {needs:.1f} |" in rows["8", "1"]
    assert "GiB a rank, 67.1 of 75 can be used" in rows["1", "1"]
    assert "--rollout-tp 8 does not divide" in rows["8", "8"]
    assert "is no multiple of 4 mini-batches x 31" in rows["31", "1"]


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--response-mean", 2000], "--response-mean 2000 is over --max-response-tokens 1024"),
        (["--group-size", 0], "--group-size 0"),
        (["--model", "no/such/model"], "--model no/such/model: "),
        (["--teacher", "no/such/model"], "--teacher no/such/model: "),
    ],
)
def test_bad_input(sizes, flags, message):
    with pytest.raises(errors.BadInput) as error:
        run("--model", sizes["7"], *flags)
    assert message in str(error.value)
