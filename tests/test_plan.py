"""scripts/plan.py: its formulas against numbers worked out by hand, real configs and torch's own count of FLOPs."""

import dataclasses
import itertools
import json
import math
from contextlib import nullcontext
from types import SimpleNamespace

import families
import pytest
import torch
import tyro
from test_readme import load
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, LlamaConfig, Qwen2Config

from common import errors
from common.placement import Layout
from common.rollout import engines, rollout
from common.run import checks, memory
from common.run import plan as run_plan
from common.run.memory import GPU
from common.trainer import batching, model

plan = load("scripts/plan.py")
QWEN = {"vocab_size": 151936, "tie_word_embeddings": True}
SEVEN_B = Qwen2Config(
    hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
    vocab_size=152064, tie_word_embeddings=False,
)  # fmt: skip
KNOWN = [  # config, parameters as published, bytes of KV cache a token in bfloat16
    (
        LlamaConfig(
            hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
            vocab_size=49152, tie_word_embeddings=True,
        ), 134_515_008, 23_040,
    ),
    (
        Qwen2Config(
            hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
            num_key_value_heads=2, **QWEN,
        ), 494_032_768, 12_288,
    ),
    (SEVEN_B, 7_615_616_512, 57_344),
]  # fmt: skip
SEVEN = memory.Decoder(
    3584, 18944, 28, 3584, 512, 3584 * 152064, 7_615_616_512 - 2 * 3584 * 152064, 7_615_616_512, (28, 4)
)
SMALL = memory.Decoder(64, 256, 2, 64, 32, 6400, 1000, 13_800, (8, 4))
JOB = plan.Job(64, 8, 100, 50, 80, mini_batches=2, token_budget=4096)
H100 = plan.Hardware()


def step(shape=SEVEN, job=JOB, hardware=H100, train=8, rollout=8, tp=1, split=False, **changes):
    """A layout of 8 GPUs, of which some are only for sampling if it is split. changes: of the job."""
    return plan.Step(shape, dataclasses.replace(job, **changes), hardware, train, rollout, tp, split)


@pytest.mark.parametrize("config, parameters, kv", KNOWN, ids=["smollm2-135m", "qwen2.5-0.5b", "qwen2.5-7b"])
def test_parameters_and_kv_cache_of_real_models(config, parameters, kv, tmp_path):
    config.save_pretrained(tmp_path)
    shape = plan.load_model(str(tmp_path))
    assert shape.parameters == parameters and shape.kv_bytes(torch.bfloat16) == kv
    assert shape == SEVEN or config is not SEVEN_B


@pytest.mark.skipif(torch.cuda.is_available(), reason="the memory of a CPU")
@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_cpus_engine_counts_its_cache_as_the_plan_does(family, tmp_path, monkeypatch):
    """The formula stands in common/rollout/engines.py, too, which imports nothing of common/run."""
    monkeypatch.setattr(engines, "rank_memory", lambda: 1e15)
    sizes = {**families.SIZES, **families.FAMILIES[family].config}
    config = AutoConfig.for_model(family, **{key: value for key, value in sizes.items() if value is not None})
    config.save_pretrained(tmp_path)
    cache = engines.kv_cache_bytes(config, torch.float32, max_model_len=32_000, max_num_seqs=1000)
    assert cache == memory.decoder(str(tmp_path)).kv_bytes(torch.float32) * 1000 * 32 * 1002


def test_tokens_by_hand():
    # 2 prompts of 100 tokens with 8 responses of 50 each: 2 (100 + 8 x 50) = 1000
    assert step().trained_tokens(2) == 1000
    assert step(prompt_mean=31).trained_tokens(2) == 2 * 8 * 81  # too short to be computed once for all
    # 64 prompts on 4 ranks: 16 each, 16 (100 + 8 x 50) = 8000 tokens, and 6400 sampled ones
    # pairs of a group: 100^2 / 2 + 8 (50 x 100 + 50^2 / 2) = 55,000
    layers, logits = 2 * 1000 * 8000 + 4 * 64 * 2 * 16 * 55_000, 2 * 6400 * 6400
    assert step(SMALL, train=4).forward_flop() == (layers, logits)
    assert step(SMALL, train=4).update_flop() == 3 * layers + 4 * logits
    assert step(SMALL, train=4, activation_checkpointing=True, epochs=2).update_flop() == 2 * (4 * layers + 4 * logits)
    assert step(token_budget=3000).micro_batches(8) == 2 and step(token_budget=3000).micro_batches(6) == 1


@pytest.mark.parametrize("prompt", [40, 20])
def test_tokens_and_flops_are_those_of_the_trainer(models, world, prompt):
    """Against common/ at work: the tokens it packs, and torch's count of its products, forward and backward.

    Prompts of 40 tokens are shared, those of 20 are not. Attention weights are counted by half in the plan, being
    causal, and wholly by torch: 3 % of the FLOPs here.
    """
    job = plan.Job(4, 8, prompt, 24, 24, 2, token_budget=2048, dtype="float32")
    planned = step(plan.load_model(models["untied"]), job, train=1, rollout=1)
    rows = [[5 + (i * 7 + k) % 40 for k in range(prompt)] for i in range(4) for _ in range(8)]
    batch = rollout.collate(rows, [[9] * 24 for _ in rows], None, [False] * 32, 0, world.device)
    compute = batching.Compute(job.token_budget)
    policy = model.load(models["untied"], world, torch.float32, compute)
    tokens, total = 0, 0
    for rows in torch.arange(32).chunk(job.mini_batches):
        for micro in batching.pack(batch, rows, compute, world):
            tokens += micro.input_ids.numel()
            with FlopCounterMode(display=False) as counter:
                logprobs, _ = model.response_logprobs(policy, micro, 1.0)
                logprobs.sum().backward()
            total += counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        model.frozen_logprobs(policy, batch, batching.pack(batch, torch.arange(32), compute, world), 1.0)
    assert tokens == planned.trained_tokens(4)
    assert total == pytest.approx(planned.update_flop(), rel=0.06)
    assert counter.get_total_flops() == pytest.approx(sum(planned.forward_flop()), rel=0.06)


def test_the_rollout_by_hand():
    """8 GPUs, tp 2: 4 engines with 16 prompts, 128 responses of 50 tokens."""
    slow = dataclasses.replace(H100, peak=1e9, hbm=1e9, link=1e6)
    free = {"step_seconds": 0.0, "token_seconds": 0.0, "allreduce_seconds": 0.0}
    only = lambda **costs: step(SMALL, hardware=dataclasses.replace(slow, **free | costs), tp=2).rollout_seconds()
    filled = 16 * (100 + 7 * 8.5)  # half a block of 16 tokens for each further response
    flop = 2 * 1000 * filled + 4 * 64 * 2 * filled * 50 + 2 * (1000 + 6400) * 6400
    read = 80 * 13_800 * 2 + 6400 * (100 + 25) * 2 * 2 * 32 * 2
    moved = 2 * 2 * 6400 * 64 * 2 / (0.7 * 1e6)  # two all-reduces a layer of 64 bfloat16 numbers a token
    without = (flop / 0.45e9 + read / 0.6e9) / 2 + moved
    assert only() == pytest.approx(without)
    assert only(step_seconds=1.0) == pytest.approx(without + 80)
    assert only(token_seconds=1.0) == pytest.approx(without + 6400)
    assert only(allreduce_seconds=1.0) == pytest.approx(without + 2 * 2 * 80)


def test_the_cache_limits_what_runs_at_once():
    """7 B in bfloat16 is 15.23 GB: 0.4 of 80 GB leave 12.47 GB beside 4.29 GB that an engine needs besides, and a
    response of 2000 tokens takes 115 MB.
    """
    many = {"prompts_per_step": 2048, "prompt_mean": 1500, "response_mean": 500, "max_response_tokens": 1000}
    many["rollout_memory"] = 0.4
    share = 0.4 * 80e9 - 4 * plan.GIB
    room = share - 2 * 7_615_616_512
    assert step(**many).running_responses() == pytest.approx(room / (57_344 * 2000))
    two = step(**many, tp=2).running_responses()  # the weights are held once on two GPUs
    assert two == pytest.approx((room + share) / (57_344 * 2000))
    assert step().running_responses() == 64  # all that an engine has
    assert step(SMALL, prompts_per_step=2048).running_responses() == 512  # the engine's limit
    small_gpu = dataclasses.replace(H100, memory=45e9)
    assert step(hardware=small_gpu, rollout_memory=0.4).running_responses() == 0  # not even the weights fit


def test_a_step_is_the_sum_or_the_longer_of_the_two():
    together = step().seconds({})
    assert together["step"] == pytest.approx(sum(together[name] for name in plan.PHASES))
    apart = step(train=4, rollout=4, split=True).seconds({})
    assert apart["step"] == pytest.approx(max(apart["rollout"], apart["logprobs"] + apart["update"]) + apart["sync"])
    # Half of the GPUs sample: twice the responses an engine, in less than twice the time.
    assert together["rollout"] < apart["rollout"] < 2 * together["rollout"]
    corrected = step().seconds({"update": 3.0})
    assert corrected["update"] == 3 * together["update"] and corrected["sync"] == together["sync"]
    assert corrected["step"] == pytest.approx(together["step"] + 2 * together["update"])
    assert step(mini_batches=1).seconds({})["logprobs"] == 0  # a single update needs no old log-probs
    with_reference = step(reference=True).seconds({})["logprobs"]
    assert with_reference == pytest.approx(3 * together["logprobs"])  # of both mini-batches, where old ones are of one


def test_a_slow_network_holds_the_trainer_up():
    slow = dataclasses.replace(H100, link=1e9)
    # 2 mini-batches of one forward: weights twice in bfloat16, gradients once in float32, at 0.7 GB/s
    held_up = step(hardware=slow).seconds({})
    assert held_up["update"] == pytest.approx(2 * 7_615_616_512 * (2 * 2 + 4) / 0.7e9)
    assert held_up["logprobs"] == pytest.approx(7_615_616_512 * 2 / 0.7e9)
    held_up = step(hardware=slow, token_budget=1000).seconds({})  # two forwards a mini-batch, each reduces
    assert held_up["update"] == pytest.approx(2 * 7_615_616_512 * 2 * (2 * 2 + 4) / 0.7e9)


@pytest.mark.parametrize("link", [450e9, 5e9])
def test_more_gpus_never_make_the_update_slower(link):
    """On one network; from the second GPU on where that is slow: one GPU needs none."""
    hardware = dataclasses.replace(H100, link=link, network=link, memory=800e9)  # one GPU holds all
    job = dataclasses.replace(JOB, prompts_per_step=1024, token_budget=0)
    counts = (1, 2, 4, 8, 16, 64, 512)[link < 100e9 :]
    spent = [step(job=job, hardware=hardware, train=gpus, rollout=gpus).seconds({})["update"] for gpus in counts]
    assert spent == sorted(spent, reverse=True) and spent[-1] < spent[0]


@pytest.mark.parametrize(
    "heads, ranks, fits", [((28, 4), 4, True), ((28, 4), 8, False), ((32, 4), 8, True), ((24, 6), 4, False)]
)
def test_an_engine_is_refused_whose_heads_its_ranks_cannot_share(heads, ranks, fits, tmp_path):
    """vLLM shares query heads evenly, and repeats key and value heads where there are fewer of them than ranks."""
    refusal = "" if fits else f"--rollout-tp {ranks} does not divide the {heads[0]} query heads and {heads[1]} key"
    assert step(dataclasses.replace(SEVEN, heads=heads), tp=ranks).refusal().startswith(refusal or "\0") != fits
    config = Qwen2Config(num_attention_heads=heads[0], num_key_value_heads=heads[1])
    config.save_pretrained(tmp_path)
    assert memory.heads_of(config) == heads
    with nullcontext() if fits else pytest.raises(errors.BadInput, match=f"{refusal}.* of --model "):
        checks.check_engine_heads(str(tmp_path), ranks)


def test_an_engine_keeps_a_head_on_each_gpu_where_there_are_more_gpus_than_heads():
    gpu = dataclasses.replace(step().gpu, model=dataclasses.replace(SEVEN, heads=(28, 2)))
    cache = lambda tp: gpu.engine_needs(tp, 100_000) - gpu.engine_needs(tp, 0)
    assert cache(1) == 2 * cache(2) == 2 * cache(4) > 0


def test_what_does_not_fit_is_refused():
    """Beside an engine 12 bytes a parameter are 85 GiB of 75 on 1 GPU, 11 GiB on 8, and 14 with a reference."""
    states = lambda **of: (step(**of, rollout_memory=0.4).peak_bytes()["rollout"] - 0.4 * 80e9) / plan.GIB
    assert [states(train=1, rollout=1), states()] == pytest.approx([85.11, 10.64], rel=1e-3)
    assert states(reference=True) == pytest.approx(14.19, rel=1e-3)
    assert step(split=True, rollout_memory=0.9).peak_bytes()["rollout"] == pytest.approx(0.9 * 80e9)
    assert "GiB a rank, 67.1 of 75 can be used" in step(train=1, rollout=1).refusal()
    big = dataclasses.replace(SEVEN, inner=70 * 10**9, parameters=70 * 10**9 + 2 * SEVEN.embedding)
    large = {"shape": big, "train": 32, "rollout": 32, "token_budget": 1024}
    assert "has 29.8 of 75" in step(**large, tp=4, rollout_memory=0.4).refusal()  # 140 GB on 4 x 0.4 x 80 GB
    assert step(**large, tp=4).refusal() == ""  # the states leave more than that
    assert "a larger --rollout-tp" in step(**large, tp=2).refusal()
    assert "is no multiple of 2 mini-batches x 31" in step(train=31, rollout=1, split=True).refusal()
    # 7 B on 4 GPUs: 23 GB of states and 0.75 of 80 GB fit at the start, and not once Adam's moments exist.
    assert "--rollout-memory 0.75 takes 55.9 GiB" in step(train=4, rollout=4, rollout_memory=0.75).refusal()


def test_the_token_budget_by_hand():
    """7 B on 8 GPUs of 80 GB, of which 72 GB can be used."""
    states, gradients = 12 * 7_615_616_512 / 8, 4 * 7_615_616_512 / 8
    ends, layer = 2 * 3584 * 152064, (7_615_616_512 - 2 * 3584 * 152064) / 28
    passing = 2 * (ends + 2 * layer) + 4 * ends + 3 * 4 * 2**28  # gathered weights, unreduced gradients, logits
    room = 0.9 * 80e9 - 2 * plan.GIB - states - gradients - passing
    per_token = 28 * (16 * 3584 + 2 * (5 * 3584 + 4 * 18944))  # 6.85 MB
    assert 6144 <= room / per_token < 7168 and step(token_budget=0).token_budget == 6144
    assert step(token_budget=0, activation_checkpointing=True).token_budget == memory.MAX_BUDGET_TOKENS
    assert step(SMALL, token_budget=0).token_budget == memory.MAX_BUDGET_TOKENS
    narrow = step(token_budget=0, dtype="float32")  # its attention keeps more than is estimated
    assert narrow.token_budget * narrow.gpu.activation_bytes <= memory.ACTIVATION_SHARE * 80e9


def test_an_engine_takes_what_it_needs_or_what_is_left():
    """7 B on 8 GPUs: weights of 15.2 GB, 57 kB of KV cache a token, 4 GiB besides; 11.4 GB of states."""
    gpu = step().gpu
    assert gpu.engine_share(1, 64 * 1000) == math.ceil((15.231e9 + 64_000 * 57_344 + 4 * 2**30) / 0.8e9) / 100
    assert gpu.engine_share(1, 512 * 4000) == math.floor((0.9 * 80e9 - 12 * 7_615_616_512 / 8) / 0.8e9) / 100
    assert dataclasses.replace(gpu, engine="elsewhere").engine_share(1, 512 * 4000) == 0.9
    assert dataclasses.replace(gpu, offload="all").engine_share(1, 512 * 4000) == 0.9
    alone = dataclasses.replace(gpu, shards=2)
    assert alone.engine_share(1, 512 * 4000) == math.floor((0.9 * 80e9 - 6 * 7_615_616_512) / 0.8e9) / 100


@pytest.mark.parametrize("memory_bytes", range(45 * 10**9, 47 * 10**9, 5 * 10**7))
def test_an_accepted_engine_has_room_for_one_response(memory_bytes):
    """Also where its share, in whole hundredths, is rounded below what it needs."""
    small = step(hardware=dataclasses.replace(H100, memory=memory_bytes), token_budget=1)
    if small.gpu.engine_refusal(1, 180, small.engine_share) == "":
        assert small.running_responses() >= 1


@pytest.mark.parametrize("offload, models", [("none", 12 * 2 + 4), ("others", 12), ("all", 0)])
def test_offloaded_models_are_not_on_the_gpu(offload, models):
    gpu = dataclasses.replace(step().gpu, trained=2, frozen=1, offload=offload, other=5e9)
    assert gpu.states == pytest.approx(models * 7_615_616_512 / 8 + 5e9)
    small = dataclasses.replace(gpu, model=SMALL)  # its gradients are kept whole unless the policy is offloaded, too
    assert small.whole_gradients == (offload != "all")


@pytest.mark.skipif(torch.cuda.is_available(), reason="fakes a GPU")
def test_a_run_on_a_gpu_takes_these_rules(seven, monkeypatch, capsys):
    """The rules that scripts/plan.py shows are the ones by which a run fills in its flags, or does not start."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(memory, "rank_memory", lambda: 80e9)
    plan_for = lambda size, **more: memory.plan(batching.Compute(), seven, torch.bfloat16, size, **more)
    assert plan_for(8).token_budget == step(token_budget=0).token_budget
    assert plan_for(8, frozen=1).token_budget == step(token_budget=0, reference=True).token_budget
    with pytest.raises(errors.BadInput, match="an update with .* more ranks, --offload"):
        plan_for(1)
    with pytest.raises(errors.BadInput, match="an update with 22528 tokens in a forward needs .*, shorter rows"):
        plan_for(8, longest=22528)  # a row is never cut
    for compute in (batching.Compute(activation_checkpointing=True), batching.Compute(sequence_parallel=4)):
        memory.plan(compute, seven, torch.bfloat16, 8, longest=22528)
    gpu = memory.this_gpu(batching.Compute(), seven, torch.bfloat16, 8)
    layout = memory.plan_engine(Layout(), gpu, 1, 1000, 64)
    assert layout.rollout_memory == gpu.engine_share(1, 64_000)
    assert "engine: 29% of the GPU's 75 GiB" in capsys.readouterr().out
    assert memory.plan_engine(Layout(rollout_memory=0.5), gpu, 1, 1000, 64).rollout_memory == 0.5
    with pytest.raises(errors.BadInput, match="the engine needs .* a larger --rollout-tp"):
        memory.plan_engine(Layout(), dataclasses.replace(gpu, shards=2), 1, 400_000, 64)
    with pytest.raises(errors.BadInput, match="--rollout-memory 0.8 takes .* and the trainer leaves"):
        memory.plan_engine(Layout(rollout_memory=0.8), gpu, 1, 1000, 64)


FOURTEEN_B = Qwen2Config(
    hidden_size=5120, intermediate_size=13824, num_hidden_layers=48, num_attention_heads=40, num_key_value_heads=8,
    vocab_size=152064, tie_word_embeddings=False,
)  # fmt: skip


@pytest.fixture(scope="module")
def sizes(tmp_path_factory) -> dict[str, str]:
    """Folders of models of 0.1 to 14 B parameters."""
    configs = {"0.1": KNOWN[0][0], "0.5": KNOWN[1][0], "7": SEVEN_B, "14": FOURTEEN_B}
    folders = {name: tmp_path_factory.mktemp(f"size-{name}") for name in configs}
    for name, config in configs.items():
        config.save_pretrained(folders[name])
    return {name: str(folder) for name, folder in folders.items()}


@pytest.mark.skipif(torch.cuda.is_available(), reason="fakes a GPU")
@pytest.mark.parametrize("models", [{}, {"frozen": 1}, {"trained": 2}], ids=["grpo", "reference", "ppo"])
def test_a_run_is_accepted_where_it_fits_and_the_plan_says_the_same(models, sizes, monkeypatch):
    """Models, GPUs and their memory, with what a run keeps counted here once more: 12 bytes a parameter of trained
    models, 4 of frozen ones; 2 of gathered weights and 4 of gradients at least; 2 of the engine's weights and 4 GiB.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    accepted, refused, larger = set(), set(), {24e9: 40e9, 40e9: 80e9, 80e9: 141e9}
    grid = itertools.product(sizes, (*larger, 141e9), (1, 2, 4, 8, 16, 64), (1, 2))
    for size, has, ranks, tp in ((size, has, ranks, tp) for size, has, ranks, tp in grid if ranks % tp == 0):
        monkeypatch.setattr(memory, "rank_memory", lambda has=has: has)
        count, compute = plan.load_model(sizes[size]).parameters, batching.Compute()
        states = (12 * models.get("trained", 1) + 4 * models.get("frozen", 0)) * count / ranks
        try:
            compute = memory.plan(compute, sizes[size], torch.bfloat16, ranks, longest=1500, **models)
            gpu = memory.this_gpu(compute, sizes[size], torch.bfloat16, ranks, **models)
            share = memory.plan_engine(Layout(), gpu, tp, 1500, 256).rollout_memory
        except errors.BadInput:
            refused.add((size, has, ranks, tp))
        else:
            accepted.add((size, has, ranks, tp))
            assert share * has >= 2 * count / tp + 4 * 2**30 and share * has + states <= 0.9 * has
            assert compute.token_budget >= 1024 and states + 4 * count / ranks + 2 * 2**30 <= 0.9 * has
        if "trained" in models:
            continue  # the plan knows no critic
        job = plan.Job(64 * ranks, 4, 500, 800, 1000, 1, reference="frozen" in models)
        layout = plan.Step(plan.load_model(sizes[size]), job, plan.Hardware(memory=has), ranks, ranks, tp, False)
        assert (layout.refusal() == "") == ((size, has, ranks, tp) in accepted), (size, has, ranks, tp)
    assert {("0.5", 80e9, 1, 1), ("7", 141e9, 8, 1)} <= accepted
    assert {("7", 24e9, 4, 1), ("14", 24e9, 64, 1), ("14", 80e9, 2, 1)} <= refused
    more = lambda size, has, ranks, tp: {(size, has, 2 * ranks, tp), (size, larger.get(has), ranks, tp)}
    assert not any(more(*it) & refused for it in accepted), "more GPUs, or larger ones, never make a run impossible"


@pytest.mark.skipif(torch.cuda.is_available(), reason="fakes a GPU")
@pytest.mark.parametrize(
    "models, flags, expected",
    [
        (["policy"], {}, {"trained": 1, "frozen": 0, "engine": "asleep"}),
        (["policy", "critic", "reference"], {"offload": "others"}, {"trained": 2, "frozen": 1, "offload": "others"}),
        (["policy"], {"rollout_backend": "hf"}, {"engine": "copy"}),
        (["policy"], {"layout": Layout("split", ("1",))}, {"engine": "elsewhere"}),
        (["policy"], {"layout": Layout("split", ("http://a",))}, {"engine": "elsewhere"}),
    ],
)
def test_a_run_counts_its_models_and_its_engine(seven, monkeypatch, models, flags, expected):
    """What common/run/plan.py tells the rules of memory about a run."""
    told = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(memory, "rank_memory", lambda: 80e9)
    monkeypatch.setattr(memory, "GPU", lambda *args, **kwargs: told.append(kwargs) or GPU(*args, **kwargs))
    args = SimpleNamespace(
        model=seven, compute=batching.Compute(), rollout_tp=1,
        **{"layout": Layout(), "offload": "none", "rollout_backend": "vllm"} | flags,
    )  # fmt: skip
    run_plan.fit_memory(args, models, {}, 8, torch.bfloat16, 1000, sequences=4096)
    assert {name: told[0][name] for name in expected} == expected
    gpu = GPU(80e9, memory.decoder(seven), 8, torch.bfloat16, **told[0])
    assert args.compute.token_budget == gpu.token_budget()
    chosen = args.rollout_backend == "vllm" and not args.layout.rollout_urls
    assert args.layout.rollout_memory == (gpu.engine_share(1, 1000 * 512) if chosen else 0)


def test_split_has_to_save_a_tenth():
    together, apart = step(), step(train=4, rollout=4, split=True)
    assert plan.recommend({apart: 9.1, together: 10.0}) == together
    assert plan.recommend({apart: 8.9, together: 10.0}) == apart
    assert plan.recommend({apart: 9.9}) == apart


@pytest.fixture(scope="module")
def seven(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("seven")
    SEVEN_B.save_pretrained(folder)
    return str(folder)


def run(*flags) -> None:
    plan.main(tyro.cli(plan.Args, args=list(map(str, flags))))


def test_the_table_says_its_assumptions(capsys, seven):
    run("--model", seven)
    out = capsys.readouterr().out
    assert "7.62 B parameters" in out and out.count(" | best |") == 1 and "best: " in out
    assert out.count("| 8 GPUs, colocate, ") == 4 and "| 8 GPUs, split, " in out
    assert "ASSUMED, not measured: " in out and "update_share 0.4," in out and "peak 9.89e+14" in out
    run("--model", seven, "--gpus", 1, 8, 16, "--prompts-per-step", 1024)
    rows = [line for line in capsys.readouterr().out.splitlines() if " GPUs, " in line]
    assert [row.split(" GPUs")[0] for row in rows] == ["| 1", "| 8", "| 16"]
    assert "needs" in rows[0] and rows[0].count("|") == rows[1].count("|") == 10


def test_a_run_corrects_the_estimate(capsys, models, tmp_path):
    """A run that took twice as long as computed in every phase: all later estimates double."""
    job = plan.Job(10, 8, 65, 35, 56, mini_batches=2, token_budget=2048)
    computed = step(plan.load_model(models["untied"]), job, train=1, rollout=1).seconds({})
    row = {f"time/{name}": 2 * computed[name] for name in (*plan.PHASES, "step")} | {"response/length_mean": 35.0}
    slow = {name: 9 * value for name, value in row.items()} | {"response/length_mean": 35.0}
    metrics = [{"step": 0, "eval/accuracy": 0.5}, *({"step": i + 1, **it} for i, it in enumerate((row, slow, row)))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    flags = {
        "model": models["untied"], "prompts_per_step": 10, "group_size": 8, "mini_batches": 2, "epochs": 1,
        "max_response_tokens": 56, "rollout_tp": 1,
        "compute": {"token_budget": 2048}, "layout": {"rollout_tp": 1},
    }  # fmt: skip
    (tmp_path / "run.json").write_text(json.dumps({"args": flags, "hardware": {"ranks": 1}}))
    ratios = plan.measured_ratios(tmp_path, plan.Job(prompt_mean=65), H100)
    assert ratios == pytest.approx(dict.fromkeys(plan.PHASES, 2.0))
    assert "computed" in capsys.readouterr().out
    run("--model", models["untied"], "--gpus", 1, "--run", tmp_path, "--prompt-mean", 65)
    assert ": update " in capsys.readouterr().out
    with_reference = {**flags, "kl_coef": 0.1, "dtype": "float32"}
    (tmp_path / "run.json").write_text(json.dumps({"args": with_reference, "hardware": {"ranks": 1}}))
    ratios = plan.measured_ratios(tmp_path, plan.Job(prompt_mean=65), H100)
    job = dataclasses.replace(job, reference=True, dtype="float32")
    again = step(plan.load_model(models["untied"]), job, train=1, rollout=1).seconds({})
    assert (
        ratios["logprobs"] == pytest.approx(2 * computed["logprobs"] / again["logprobs"]) and ratios["logprobs"] < 1.5
    )
    (tmp_path / "metrics.jsonl").write_text(json.dumps(metrics[0]) + "\n")
    with pytest.raises(errors.BadInput, match="has no finished step of an algorithm that samples"):
        plan.measured_ratios(tmp_path, plan.Job(), H100)


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--gpus", 12], "--gpus 12: expected part of a node of 8, or whole nodes"),
        (["--response-mean", 2000], "--response-mean 2000 is over --max-response-tokens 1024"),
        (["--group-size", 0], "--group-size 0: must be at least 1"),
        (["--model", "no/such/model"], "--model no/such/model: "),
        (["--teacher", "no/such/model"], "--teacher no/such/model: "),
    ],
)
def test_bad_input(seven, flags, message):
    with pytest.raises(errors.BadInput) as error:
        run("--model", seven, *flags)
    assert message in str(error.value)


@pytest.mark.parametrize("family", [name for name, it in families.FAMILIES.items() if "experts" in it.has])
def test_a_token_computes_with_the_experts_that_are_chosen_for_it(family, tmp_path):
    """2 of 4 experts of 64 x 64 x 3 parameters in each layer. DeepSeek and GLM have a first layer without experts."""
    sizes = {**families.SIZES, **families.FAMILIES[family].config}
    config = AutoConfig.for_model(family, **{key: value for key, value in sizes.items() if value is not None})
    config.save_pretrained(tmp_path)
    model = plan.load_model(str(tmp_path))
    layers = 3 if "first_k_dense_replace" in sizes else 4
    expert = 3 * 64 * (128 if family in ("mixtral", "gpt_oss") else 64)
    biases = 128 * 2 + 64 if family == "gpt_oss" else 0
    assert model.inner - model.visited == 2 * layers * (expert + biases)
    whole = dataclasses.replace(model, idle=0)
    for work in (lambda it: it.forward_flop()[0], plan.Step.update_flop, plan.Step.rollout_seconds):
        assert work(step(model)) < work(step(whole))
    assert step(model).peak_bytes() == step(whole).peak_bytes(), "all experts are kept and gathered"


def test_a_teacher_is_frozen_and_computes_log_probs(tmp_path, seven):
    """OPD: 7 B teach 0.5 B on 8 GPUs. A run counts it by fit_memory(others=...)."""
    KNOWN[1][0].save_pretrained(tmp_path)
    small = plan.load_model(str(tmp_path))
    alone, taught = step(small), step(small, teacher=seven)
    more = {phase: size - alone.peak_bytes()[phase] for phase, size in taught.peak_bytes().items()}
    assert more == pytest.approx({"update": 4 * 7_615_616_512 / 8, "rollout": 4 * 7_615_616_512 / 8})
    one, two = alone.seconds({}), taught.seconds({})
    # The student's forward is over both mini-batches with a teacher, and over the second one without.
    assert two["logprobs"] == pytest.approx(2 * one["logprobs"] + sum(step().forward_flop()) / (989e12 * 0.45))
    assert all(two[phase] == one[phase] for phase in ("rollout", "update", "sync"))
    slow = dataclasses.replace(H100, link=1e9)
    held_up = step(small, hardware=slow, teacher=seven).seconds({})["logprobs"]
    assert held_up == pytest.approx((7_615_616_512 + small.parameters) * 2 / 0.7e9)
