"""scripts/plan.py: its formulas against numbers worked out by hand, real configs and torch's own count of FLOPs."""

import dataclasses
import json
import sys

import pytest
import torch
import tyro
from conftest import ROOT
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, LlamaConfig, Qwen2Config

from common import batching, errors, model, placement, rollout

sys.path.append(str(ROOT / "scripts"))  # as python has it for a script there
import plan
import plan_measure
import plan_model
from plan_model import GIB, Assumed, Job, Layout, Machine, Model, Prediction

QWEN = {"vocab_size": 151936, "tie_word_embeddings": True}
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
    (
        Qwen2Config(
            hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
            num_key_value_heads=4, vocab_size=152064, tie_word_embeddings=False,
        ), 7_615_616_512, 57_344,
    ),
]  # fmt: skip
SEVEN = Model(3584, 18944, 28, 28, 4, 128, 152064, False, 7_615_616_512 - 2 * 3584 * 152064)
SMALL = Model(64, 256, 2, 4, 2, 16, 100, False, 1000)  # 13,800 parameters
JOB = Job(64, 8, 100, 100, 50, 80, mini_batches=2, token_budget=4096)
H100 = Machine(8, 8, 80e9, 989e12, 3.35e12, 450e9, 50e9)


@pytest.mark.parametrize("config, parameters, kv", KNOWN, ids=["smollm2-135m", "qwen2.5-0.5b", "qwen2.5-7b"])
def test_parameters_and_kv_cache_of_real_models(config, parameters, kv):
    shape = plan_model.from_config(config)
    assert shape.parameters == parameters and plan_model.kv_bytes(shape, torch.bfloat16) == kv
    sizes = (config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.num_attention_heads)
    by_hand = plan_model.layer_parameters(
        *sizes, config.num_key_value_heads, shape.head_dim, qkv_bias=config.model_type == "qwen2"
    )
    assert shape.layer_parameters == by_hand


def test_a_mixture_of_experts_is_refused():
    config = Qwen2Config()
    config.num_experts = 8
    with pytest.raises(errors.BadInput, match="dense models only"):
        plan_model.from_config(config)


def test_a_prompt_counts_once_a_group():
    # 2 prompts of 100 tokens with 8 responses of 50 each: 2 (100 + 8 x 50) = 1000; repeated: 2 x 8 x 150 = 2400
    assert plan_model.trained_tokens(JOB, 2) == 1000
    assert plan_model.trained_tokens(dataclasses.replace(JOB, shared_prompts=False), 2) == 2400
    assert plan_model.trained_tokens(dataclasses.replace(JOB, prompt_mean=31), 2) == 2 * 8 * 81  # too short to share
    # pairs of a group: 100^2 / 2 + 8 (50 x 100 + 50^2 / 2) = 55,000; repeated: 8 (150^2 / 2) = 90,000
    assert plan_model.attended_pairs(JOB, 1) == 55_000
    assert plan_model.attended_pairs(dataclasses.replace(JOB, shared_prompts=False), 1) == 90_000


@pytest.mark.parametrize("shared", [True, False])
def test_tokens_and_flops_are_those_of_the_trainer(models, world, shared):
    """Against common/ at work: the tokens it packs, and torch's count of its products, forward and backward.

    Attention weights are counted by half in the model, being causal, and wholly by torch: 3 % of the FLOPs here.
    """
    shape = plan_model.from_config(AutoConfig.from_pretrained(models["untied"]))
    job = Job(4, 8, 40, 40, 24, 24, 2, shared_prompts=shared, token_budget=2048, dtype=torch.float32)
    rows = [[5 + (i * 7 + k) % 40 for k in range(40)] for i in range(4) for _ in range(8)]
    batch = rollout.collate(rows, [[9] * 24 for _ in rows], None, [False] * 32, 0, world.device)
    compute = batching.Compute(job.token_budget, shared)
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
    assert tokens == plan_model.trained_tokens(job, 4)
    assert total == pytest.approx(plan_model.update_counts(shape, job, 1)["flop"], rel=0.06)
    frozen = plan_model.logprobs_counts(shape, job, 1)["flop"]
    assert counter.get_total_flops() == pytest.approx(frozen, rel=0.06)


def test_update_counts_by_hand():
    """64 prompts on 4 ranks: 16 each, 16 (100 + 8 x 50) = 8000 tokens, 880,000 pairs, 6400 sampled ones."""
    job = dataclasses.replace(JOB, token_budget=3000)  # 4000 tokens a mini-batch: two forwards each
    counts = plan_model.update_counts(SMALL, job, 4)
    layers = 2 * 1000 * 8000 + 4 * (4 * 16) * 2 * 880_000
    assert counts["flop"] == 3 * layers + 8 * 6400 * 6400  # logits: 2 x 6400 weights, 4 times
    assert counts["layer_call"] == 2 * 2 * 2 and counts["parameter"] == 2 * 13_800 / 4
    recomputed = plan_model.update_counts(SMALL, dataclasses.replace(job, activation_checkpointing=True), 4)
    assert recomputed["flop"] - counts["flop"] == layers
    passes = plan_model.logprobs_counts(SMALL, dataclasses.replace(job, reference=True), 4)
    assert passes["flop"] == 2 * (layers + 2 * 6400 * 6400) and passes["layer_call"] == 2 * 2 * 3
    assert plan_model.logprobs_counts(SMALL, dataclasses.replace(job, mini_batches=1), 4)["flop"] == 0


def test_rollout_counts_by_hand():
    """8 GPUs, tp 2: 4 engines with 16 prompts, 128 responses of 50 tokens."""
    layout = Layout(8, 8, 2, False)
    counts = plan_model.rollout_counts(SMALL, JOB, layout, 80e9)
    assert counts["step"] == 80 and counts["layer_step"] == 160 and counts["token"] == 6400
    assert counts["weight_byte"] == 80 * 13_800 * 2 / 2
    assert counts["kv_byte"] == 6400 * (100 + 25) * plan_model.kv_bytes(SMALL, torch.bfloat16) / 2
    assert counts["decode_flop"] == 6400 * 2 * (1000 + 6400) / 2
    # blocks of 16: of a prompt's 100 tokens 96 are shared, 4 computed for each further response
    assert plan_model.prefill_tokens(JOB, 16) == 16 * (100 + 7 * 4)
    assert plan_model.prefill_tokens(dataclasses.replace(JOB, prompt_mean=64, max_prompt_tokens=64), 1) == 64 + 7 * 16
    assert plan_model.prefill_tokens(dataclasses.replace(JOB, max_prompt_tokens=200), 1) == 100 + 7 * 8.5
    assert plan_model.decode_steps(128, 128, 50, 80) == 80
    assert plan_model.decode_steps(128, 32, 50, 80) == 4 * 50 + 30


def test_the_cache_limits_what_runs_at_once():
    """7 B in bfloat16 is 15.23 GB: 0.4 of 80 GB leave 16.77 GB, and a response of 150 tokens takes 8.6 MB."""
    job = dataclasses.replace(JOB, prompts_per_step=2048, prompt_mean=1000, max_prompt_tokens=1000, response_mean=500)
    job = dataclasses.replace(job, max_response_tokens=1000, rollout_max_seqs=10_000)
    held = plan_model.running_responses(SEVEN, job, Layout(8, 8, 1, False), 80e9)
    assert held == pytest.approx((0.4 * 80e9 - 2 * 7_615_616_512) / (57_344 * 1500))
    assert plan_model.running_responses(SEVEN, JOB, Layout(8, 8, 1, False), 80e9) == 64  # all of an engine's
    two = plan_model.running_responses(SEVEN, job, Layout(8, 8, 2, False), 80e9)  # the weights once on two GPUs
    assert two == pytest.approx((2 * 0.4 * 80e9 - 2 * 7_615_616_512) / (57_344 * 1500))
    few = dataclasses.replace(JOB, rollout_max_seqs=16)
    assert plan_model.running_responses(SEVEN, few, Layout(8, 8, 1, False), 80e9) == 16
    assert plan_model.running_responses(SEVEN, JOB, Layout(8, 8, 1, False), 36e9) == 0  # not even the weights


def test_a_step_is_the_sum_or_the_longer_of_the_two():
    costs = plan_model.assumed_costs(H100, Assumed())
    together = plan_model.seconds(SEVEN, JOB, Layout(8, 8, 1, False), H100, costs)
    assert together["step"] == pytest.approx(sum(together[name] for name in ("rollout", "logprobs", "update", "sync")))
    apart = plan_model.seconds(SEVEN, JOB, Layout(4, 4, 1, True), H100, costs)
    longer = max(apart["rollout"], apart["logprobs"] + apart["update"])
    assert apart["step"] == pytest.approx(longer + apart["sync"])
    # half the GPUs sample: twice the responses an engine, not twice the time; half of them train: twice the products
    assert together["rollout"] < apart["rollout"] < 2 * together["rollout"]
    slow = dataclasses.replace(H100, link=1e9)
    # 2 mini-batches of one forward: weights twice in bfloat16, gradients once in float32, at 0.7 GB/s
    held_up = plan_model.seconds(SEVEN, JOB, Layout(8, 8, 1, False), slow, costs)
    assert held_up["update"] == pytest.approx(2 * 7_615_616_512 * (2 * 2 + 4) / 0.7e9)
    assert held_up["logprobs"] == pytest.approx(7_615_616_512 * 2 / 0.7e9)
    small = dataclasses.replace(JOB, token_budget=1000)  # 2000 tokens a mini-batch: two forwards, each reduces
    held_up = plan_model.seconds(SEVEN, small, Layout(8, 8, 1, False), slow, costs)
    assert held_up["update"] == pytest.approx(2 * 7_615_616_512 * 2 * (2 * 2 + 4) / 0.7e9)
    late = plan_model.seconds(SEVEN, JOB, Layout(4, 4, 1, True), slow, costs)  # now the trainer is the longer
    assert late["step"] == pytest.approx(late["logprobs"] + late["update"] + late["sync"])
    four = plan_model.seconds(SEVEN, JOB, Layout(8, 8, 4, False), H100, costs)
    assert four["rollout"] > plan_model.dot(
        plan_model.rollout_counts(SEVEN, JOB, Layout(8, 8, 4, False), 80e9), costs["rollout"]
    )


@pytest.mark.parametrize("link", [450e9, 5e9])
def test_more_gpus_never_make_the_update_slower(link):
    """On one network; from the second GPU on where that is slow: one GPU needs none."""
    job = dataclasses.replace(JOB, prompts_per_step=1024, token_budget=0)
    spent = []
    for gpus in (1, 2, 4, 8, 16, 64, 512):
        machine = dataclasses.replace(H100, gpus=gpus, link=link, network=link)
        costs = plan_model.assumed_costs(machine, Assumed())
        given = plan_model.with_budget(SEVEN, job, machine.memory)
        spent.append(plan_model.seconds(SEVEN, given, Layout(gpus, gpus, 1, False), machine, costs)["update"])
    spent = spent[link < 100e9 :]
    assert spent == sorted(spent, reverse=True) and spent[-1] < spent[0]


def test_what_does_not_fit_is_refused():
    """16 bytes a parameter on 1 GPU are 113 GiB of 75; on 8 14 GiB, with a reference 18."""
    job = plan_model.with_budget(SEVEN, JOB, 80e9)
    states = [plan_model.trainer_bytes(SEVEN, job, ranks, 80e9)["states"] / GIB for ranks in (1, 8)]
    assert states == pytest.approx([113.5, 14.19], rel=1e-3)
    with_reference = plan_model.trainer_bytes(SEVEN, dataclasses.replace(job, reference=True), 8, 80e9)["states"]
    assert with_reference / GIB == pytest.approx(17.73, rel=1e-3)
    one = dataclasses.replace(H100, gpus=1)
    costs = plan_model.assumed_costs(H100, Assumed())
    with pytest.raises(errors.BadInput, match=r"no layout can run: colocate.* needs \d+\.\d GiB a rank of 75 GiB"):
        plan_model.recommend(plan_model.predictions(SEVEN, JOB, one, costs))
    rollout_peaks = [
        plan_model.peak_bytes(SEVEN, job, Layout(8, 8, 1, split), H100)["rollout"] for split in (False, True)
    ]
    assert rollout_peaks == pytest.approx([0.4 * 80e9 + 2 * 7_615_616_512, 0.9 * 80e9])
    big = dataclasses.replace(SEVEN, layer_parameters=70 * 10**9)
    found = plan_model.predictions(big, JOB, dataclasses.replace(H100, gpus=32), costs)
    reasons = {str(it.layout): it.refused for it in found}
    assert "the engine's share" in reasons["colocate, rollout tp 4"]  # 140 GB on 4 x 0.4 x 80 GB
    assert "not a multiple of 2 mini-batches x 31" in reasons["split, 31 train, 1 sample, rollout tp 1"]


def test_the_token_budget_is_the_trainers(models):
    for dtype in (torch.float32, torch.bfloat16):
        shape = plan_model.from_config(AutoConfig.from_pretrained(models["untied"]))
        job = dataclasses.replace(JOB, dtype=dtype, token_budget=0)
        chosen = batching.plan(batching.Compute(), models["untied"], dtype).token_budget
        assert plan_model.with_budget(shape, job, batching.rank_memory()).token_budget == chosen


def test_a_large_models_token_budget():
    """A token keeps 28 (16 x 3584 + 2 (5 x 3584 + 4 x 18944)) = 6.85 MB: 2048 are 14.0 GB of the 16 allowed."""
    assert plan_model.with_budget(SEVEN, dataclasses.replace(JOB, token_budget=0), 80e9).token_budget == 2048


def test_split_has_to_save_a_tenth():
    together, apart = Layout(8, 8, 1, False), Layout(4, 4, 1, True)
    of = lambda layout, step: Prediction(layout, {"step": step}, {"update": 1.0}, "")
    assert plan_model.recommend([of(apart, 9.1), of(together, 10.0)]).layout == together
    assert plan_model.recommend([of(apart, 8.9), of(together, 10.0)]).layout == apart
    assert plan_model.recommend([of(apart, 9.9)]).layout == apart


def test_costs_are_found_again():
    """Seconds made of known costs; one that would come out negative is 0."""
    true = {"flop": 1e-11, "call": 2e-4, "byte": 0.0}
    rows = []
    for k in range(1, 9):
        counts = {"flop": 1e9 * k**2, "call": 10.0 * (k % 3 + 1), "byte": 1e6 * (9 - k)}
        rows.append((counts, plan_model.dot(counts, true)))
    found = plan_measure.fit_costs(rows)
    assert found == pytest.approx(true, rel=1e-6, abs=1e-18)
    against = [(counts, spent - 1e-11 * counts["byte"]) for counts, spent in rows]
    assert plan_measure.fit_costs(against)["byte"] == 0 and plan_measure.fit_costs(against)["flop"] > 0


SIZES = ["--sizes.hidden", "3584", "--sizes.layers", "28", "--sizes.kv-heads", "4", "--sizes.parameters", "7.6e9"]


def run(*flags) -> None:
    plan.main(tyro.cli(plan.Args, args=list(map(str, flags))))


def test_predict(capsys, models, tmp_path):
    run("predict", *SIZES, "--gpus", 8)
    out = capsys.readouterr().out
    assert "7.6 B parameters" in out and "ASSUMED" in out and "recommended: " in out
    assert out.count("| colocate, ") == 4 and "| split, " in out
    costs = plan_model.assumed_costs(H100, Assumed())
    kept = plan_measure.record(costs, {"update": 0.1}, ("192x4",), torch.float32, 5)
    (tmp_path / "costs.json").write_text(json.dumps(kept))
    run("predict", "--model", models["untied"], "--constants", tmp_path / "costs.json", "--gpus", 1)
    out = capsys.readouterr().out
    assert "ASSUMED" not in out and "Costs: measured on " in out and "| colocate, rollout tp 1 |" in out


def test_scale(capsys, tmp_path):
    run("scale", *SIZES, "--most", 32, "--prompts-per-step", 1024, "--plot", tmp_path / "scale.svg")
    out = capsys.readouterr().out
    rows = [line for line in out.splitlines() if line.startswith("| ")][1:]
    assert [line.split(" | ")[0] for line in rows] == ["| 1", "| 2", "| 4", "| 8", "| 16", "| 32"]
    assert "no layout can run" in rows[0] and rows[-1].count("|") == rows[0].count("|") == 13
    assert "ASSUMED" in out and "<svg" in (tmp_path / "scale.svg").read_text()
    run("scale", *SIZES, "--most", 32, "--weak")
    assert "| 32 | 1024 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--gpus", 8], "--model, or --sizes.hidden and --sizes.layers"),
        ([*SIZES, "--gpus", 12], "--gpus 12: a whole number of nodes"),
        (
            [*SIZES, "--response-mean", 2000],
            "--response-mean 2000 must be above 0 and at most --max-response-tokens 1024",
        ),
        ([*SIZES[:-1], "1e9"], "--sizes.parameters 1e+09: the vocabulary and attention alone have more"),
        ([*SIZES, "--constants", "none.json"], "--constants none.json: no such file"),
        ([*SIZES, "--group-size", 0], "--group-size 0: must be at least 1"),
        (["--model", "no/such/model"], "--model no/such/model: "),
    ],
)
def test_bad_input(flags, message):
    with pytest.raises(errors.BadInput) as error:
        run("predict", *flags)
    assert message in str(error.value)


def test_validate_predicts_what_the_costs_it_found_make(monkeypatch, tmp_path):
    """Turns made up from known costs: those come out again, and steps on the held-out size are as predicted."""
    true = {
        "rollout": {"decode_flop": 1e-11, "prefill_flop": 2e-11, "step": 2e-3, "token": 1e-4},
        "logprobs": {"flop": 1e-11, "layer_call": 1e-3},
        "update": {"flop": 2e-11, "layer_call": 3e-3, "parameter": 1e-9},
        "sync": {"byte": 1e-9, "layer": 1e-2, "push": 0.0},
    }

    def spent(size: str, longest: int, **fields) -> dict[str, float]:
        shape = plan_model.from_config(plan_measure.config(size))
        amounts = plan_measure.counts(shape, plan_measure.as_job(shape, torch.float32, longest, **fields))
        return {phase: plan_model.dot(amounts[phase], true[phase]) for phase in true}

    def turns(size: str, host: float) -> list[dict]:
        """One turn of time_phases on a host that takes `host` times as long."""
        results = []
        for prompts, group, prompt, response, mini_batches in plan_measure.WORK:
            job = {"prompts_per_step": prompts, "group_size": group, "prompt_mean": prompt, "max_prompt_tokens": prompt}
            job |= {"response_mean": 0.7 * response, "max_response_tokens": response, "mini_batches": mini_batches}
            seconds = {phase: host * seconds for phase, seconds in spent(size, 136, **job).items()}
            results.append({"job": job, "seconds": seconds})
        return results

    def play(fit, held_out, rounds):
        steps = spent(held_out[0], 156, prompt_mean=65.0, response_mean=35.0, **plan_measure.STEP)
        step = {f"time/{phase}": seconds for phase, seconds in steps.items()} | {"response/length_mean": 35.0}
        slow = {name: 3 * seconds if name.startswith("time/") else seconds for name, seconds in step.items()}
        return {size: [turns(size, host) for host in (1, 1, 5)] for size in fit}, {held_out[0]: [step, slow, step]}

    monkeypatch.setattr(plan_measure, "play", play)
    monkeypatch.setattr(placement, "native_dtype", lambda: torch.float32)
    files = ["--output", tmp_path / "page.md", "--constants", tmp_path / "costs.json"]
    run("validate", "--sizes", "64x2", "192x4", "256x10", "--held-out", "320x8", "--rounds", 3, *files)
    found = json.loads((tmp_path / "costs.json").read_text())
    assert found["costs"]["update"]["flop"] == pytest.approx(2e-11, rel=1e-3)
    assert max(found["largest_fit_error"].values()) < 1e-6 and found["sizes"] == ["64x2", "192x4", "256x10"]
    rows = [line.split(" | ") for line in (tmp_path / "page.md").read_text().splitlines() if line.startswith("| 320x8")]
    assert [row[2].strip("*") for row in rows] == ["rollout", "logprobs", "update", "sync", "step"]
    assert all(row[5].strip("|* ") == "1.00" for row in rows), rows
