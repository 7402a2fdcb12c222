"""scripts/plan.py: its formulas against numbers worked out by hand, real configs and torch's own count of FLOPs."""

import dataclasses
import json

import pytest
import torch
import tyro
from test_readme import load
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, Qwen2Config

from common import errors
from common.rollout import rollout
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
SEVEN = plan.Model(3584, 18944, 28, 3584, 512, 3584 * 152064, 7_615_616_512 - 2 * 3584 * 152064, 7_615_616_512)
SMALL = plan.Model(64, 256, 2, 64, 32, 6400, 1000, 13_800)
JOB = plan.Job(64, 8, 100, 50, 80, mini_batches=2, token_budget=4096)
H100 = plan.Hardware()


def step(shape=SEVEN, job=JOB, hardware=H100, train=8, rollout=8, tp=1, split=False, **changes):
    """A layout of 8 GPUs, of which some are only for sampling if it is split. changes: of the job."""
    return plan.Step(shape, dataclasses.replace(job, **changes), hardware, train, rollout, tp, split)


@pytest.mark.parametrize("config, parameters, kv", KNOWN, ids=["smollm2-135m", "qwen2.5-0.5b", "qwen2.5-7b"])
def test_parameters_and_kv_cache_of_real_models(config, parameters, kv, tmp_path):
    config.save_pretrained(tmp_path)
    shape = plan.load_model(str(tmp_path))
    assert shape.parameters == parameters and step(shape).kv_bytes == kv
    assert shape == SEVEN or config is not SEVEN_B


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
    """7 B in bfloat16 is 15.23 GB: 0.4 of 80 GB leave 16.77 GB, and a response of 2000 tokens takes 115 MB."""
    many = {"prompts_per_step": 2048, "prompt_mean": 1500, "response_mean": 500, "max_response_tokens": 1000}
    room = 0.4 * 80e9 - 2 * 7_615_616_512
    assert step(**many).running_responses() == pytest.approx(room / (57_344 * 2000))
    two = step(**many, tp=2).running_responses()  # the weights are held once on two GPUs
    assert two == pytest.approx((room + 0.4 * 80e9) / (57_344 * 2000))
    assert step().running_responses() == 64  # all that an engine has
    assert step(SMALL, prompts_per_step=2048).running_responses() == 512  # the engine's limit
    small_gpu = dataclasses.replace(H100, memory=36e9)
    assert step(hardware=small_gpu).running_responses() == 0  # not even the weights fit


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
    twice = step(reference=True).seconds({})["logprobs"]
    assert twice == pytest.approx(2 * together["logprobs"])


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
    hardware = dataclasses.replace(H100, link=link, network=link)
    job = dataclasses.replace(JOB, prompts_per_step=1024, token_budget=0)
    counts = (1, 2, 4, 8, 16, 64, 512)[link < 100e9 :]
    spent = [step(job=job, hardware=hardware, train=gpus, rollout=gpus).seconds({})["update"] for gpus in counts]
    assert spent == sorted(spent, reverse=True) and spent[-1] < spent[0]


def test_what_does_not_fit_is_refused():
    """16 bytes a parameter on 1 GPU are 113 GiB of 75; on 8 they are 14 GiB, and 18 with a reference."""
    states = lambda **of: (step(**of).peak_bytes()["rollout"] - 0.4 * 80e9) / plan.GIB
    assert [states(train=1, rollout=1), states()] == pytest.approx([113.5, 14.19], rel=1e-3)
    assert states(reference=True) == pytest.approx(17.73, rel=1e-3)
    assert step(split=True).peak_bytes()["rollout"] == pytest.approx(0.9 * 80e9)
    assert "GiB a rank of 75 GiB in the update" in step(train=1, rollout=1).refusal()
    big = dataclasses.replace(SEVEN, inner=70 * 10**9, parameters=70 * 10**9 + 2 * SEVEN.embedding)
    assert "the engine's share" in step(big, train=32, rollout=32, tp=4).refusal()  # 140 GB on 4 x 0.4 x 80 GB
    assert "is no multiple of 2 mini-batches x 31" in step(train=31, rollout=1, split=True).refusal()


def test_the_token_budget_is_the_trainers(models):
    hardware = dataclasses.replace(H100, memory=batching.rank_memory())
    for dtype in ("float32", "bfloat16"):
        planned = step(plan.load_model(models["untied"]), hardware=hardware, dtype=dtype, token_budget=0)
        chosen = batching.plan(batching.Compute(), models["untied"], getattr(torch, dtype)).token_budget
        assert planned.token_budget == chosen
    # A token of 7 B keeps 28 (16 x 3584 + 2 (5 x 3584 + 4 x 18944)) = 6.85 MB: 2048 are 14.0 GB of the 16 allowed.
    assert step(token_budget=0).token_budget == 2048


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


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--gpus", 12], "--gpus 12: expected part of a node of 8, or whole nodes"),
        (["--response-mean", 2000], "--response-mean 2000 is over --max-response-tokens 1024"),
        (["--group-size", 0], "--group-size 0: must be at least 1"),
        (["--model", "no/such/model"], "--model no/such/model: "),
    ],
)
def test_bad_input(seven, flags, message):
    with pytest.raises(errors.BadInput) as error:
        run("--model", seven, *flags)
    assert message in str(error.value)


def test_a_mixture_of_experts_is_refused(tmp_path):
    config = Qwen2Config(num_experts=8)
    config.save_pretrained(tmp_path)
    with pytest.raises(errors.BadInput, match="dense models only"):
        plan.load_model(str(tmp_path))
