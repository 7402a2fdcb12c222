"""Several ranks compute what one rank computes, and the engine's weights follow the trainer's."""

import json
import re
from pathlib import Path

import families
import pytest
import torch
import transformers
from cases import ALGORITHMS
from conftest import ROOT, launch, relative_difference
from helpers import nightly

from common.data import arithmetic

WORKERS = ROOT / "tests/workers"
SYNC, GRADIENT, MAINS, LAYOUTS = (WORKERS / f"{name}.py" for name in ("sync", "gradient", "mains", "layouts"))

PLAIN = {"token_budget": 1000, "shared_prompts": False}
CUTS = {  # ranks -> fields of batching.Compute, and the number of micro-batches of 8 rows (two ranks have 6 and 2)
    1: [({**PLAIN, "token_budget": 1}, 8)],
    2: [
        ({"token_budget": 1000}, 1),
        ({**PLAIN, "token_budget": 12}, 5),
        ({"token_budget": 20}, 2),
        ({**PLAIN, "token_budget": 5, "sequence_parallel": 2}, 6),  # 5 of one rank, then 1 of the other
        ({"token_budget": 7, "sequence_parallel": 2, "activation_checkpointing": True}, 4),  # cut after a prompt
        ({**PLAIN, "token_budget": 12, "shard_size": 1}, 5),
    ],
    4: [({**PLAIN, "token_budget": 5, "sequence_parallel": 2, "shard_size": 2}, 4)],  # 3 and a dummy
}
LORA = {"lora_rank": 4}
# One gradient of each kind: of sampled tokens, of values, of pairs, at another temperature, after hints, over the
# vocabulary, and over it after hints.
KINDS = ["grpo", "ppo critic", "dpo", "prime process model", "sdpo"]
KINDS += ["opd over the vocabulary", "sdpo over the vocabulary"]


def gradients_of(compute: dict) -> int:
    """Number of gradients that the worker saves. Ranks that share a row cannot compute sdpo's over the vocabulary."""
    return 17 if "sequence_parallel" in compute else 18


@pytest.fixture(scope="module")
def whole(models, tmp_path_factory) -> dict[str, dict[str, torch.Tensor]]:
    """Gradients of one rank with all rows in one micro-batch."""
    output = tmp_path_factory.mktemp("gradient") / "whole"
    launch(GRADIENT, models["tied and grouped"], output, json.dumps(PLAIN))
    (whole,) = torch.load(output)
    assert whole.pop("micro-batches") == 1
    return whole


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gradient_does_not_depend_on_ranks_budget_sharing_or_layout(models, whole, tmp_path, ranks):
    """All algorithms, also where one rank has micro-batches and another has dummies.

    The layers compute in float64. In float32 rounding alone is up to 1.5e-6 where advantages of opposite sign cancel. A
    wrong denominator changes a gradient by more than 1e-2.
    """
    layouts = [json.dumps(compute) for compute, _ in CUTS[ranks]]
    launch(GRADIENT, models["tied and grouped"], tmp_path / "cut", *layouts, ranks=ranks, engine=False)
    for (compute, count), cut in zip(CUTS[ranks], torch.load(tmp_path / "cut"), strict=True):
        assert cut.pop("micro-batches") == count, compute
        differences = {name: relative_difference(whole[name], cut[name]) for name in cut}
        assert len(cut) == gradients_of(compute) and max(differences.values()) <= 1e-6, (compute, differences)


@pytest.mark.slow
@pytest.mark.parametrize("name", [nightly("falcon_h1"), "gpt2", "hyperclovax"])
def test_gradients_of_rows_of_their_own_do_not_depend_on_ranks_or_budget(name, tmp_path):
    """A hybrid, a family whose positions are learned, and one whose own forward makes the logits. Opd and sdpo over the
    vocabulary know only products with the head. Falcon-H1 computes states and norms in float32, whatever its weights
    are. The other gradients come from the same forwards as those of KINDS.
    """
    if name == "hyperclovax":
        path = str(tmp_path / name)
        families.save_random(transformers.HyperCLOVAXConfig(**families.SIZES, logits_scaling=4.0), path)
    else:
        path = families.save(name, tmp_path)
    unpacked = {"token_budget": 1000, "packing": "off"}
    launch(GRADIENT, path, tmp_path / "1", json.dumps(unpacked), "--only", *KINDS)
    cuts = [{**unpacked, "token_budget": 20}, {**unpacked, "token_budget": 1}, unpacked | LORA]
    launch(GRADIENT, path, tmp_path / "2", *map(json.dumps, cuts), "--only", *KINDS, ranks=2, engine=False)
    (whole,) = torch.load(tmp_path / "1")
    assert whole.pop("micro-batches") == 1
    *cuts, adapters = torch.load(tmp_path / "2")
    for cut in cuts:
        assert cut.pop("micro-batches") > 1
        differences = {key: relative_difference(whole[key], cut[key]) for key in whole}
        assert cut.keys() == whole.keys() and max(differences.values()) <= 1e-5, differences
    assert len(whole) == len(KINDS) - 2 * (name == "hyperclovax")
    assert all(name.endswith(("lora_a", "lora_b")) for name in adapters["grpo"])


@pytest.mark.slow
def test_gradients_of_adapters_do_not_depend_on_ranks_or_budget(models, tmp_path):
    """LoRA under all algorithms, PPO's critic too: only adapters and the value head have a gradient."""
    launch(GRADIENT, models["tied and grouped"], tmp_path / "1", json.dumps(PLAIN | LORA))
    cuts = [{"token_budget": 20, **LORA}, {**PLAIN, "token_budget": 5, "sequence_parallel": 2, **LORA}]
    launch(GRADIENT, models["tied and grouped"], tmp_path / "2", *map(json.dumps, cuts), ranks=2, engine=False)
    (whole,) = torch.load(tmp_path / "1")
    assert whole.pop("micro-batches") == 1
    adapters = 2 * 7 * 2  # two factors of seven products in two layers
    assert all(name.endswith(("lora_a", "lora_b")) for name in whole["grpo"]) and len(whole["grpo"]) == adapters
    assert {name for name in whole["ppo critic"] if "lora" not in name} == {"score.weight", "score.bias"}
    for cut in torch.load(tmp_path / "2"):
        cut.pop("micro-batches")
        differences = {name: relative_difference(whole[name], cut[name]) for name in cut}
        assert len(cut) in (17, 18) and max(differences.values()) <= 1e-6, differences


def gaps(*command, ranks: int = 1, dtype: str = "float32", worker: Path = SYNC, lora_rank: int = 0) -> list[float]:
    """Largest difference between the trainer's and the engine's log-probs, at the start and after each of 5 updates."""
    result = launch(worker, *command, dtype, lora_rank, ranks=ranks)
    return [float(x) for x in re.findall(r"gap (\S+)", result.stdout)]


@pytest.mark.slow
@pytest.mark.parametrize("kind, ranks, tp", [("tied", 1, 1), ("tied", 2, 1), ("tied", 2, 2), ("untied", 2, 2)])
def test_engine_follows_the_trainer(models, kind, ranks, tp):
    measured = gaps(models[kind], tp, "vllm", ranks=ranks)
    assert len(measured) == 6 and max(measured) <= 1e-5, measured


@pytest.mark.slow
@pytest.mark.parametrize("kind, ranks, tp", [("tied", 1, 1), ("grouped", 2, 2)])
def test_engine_follows_adapters(models, kind, ranks, tp):
    measured = gaps(models[kind], tp, "vllm", ranks=ranks, lora_rank=4)
    assert len(measured) == 6 and max(measured) <= 1e-5, measured


@pytest.mark.slow
def test_the_responses_to_a_prompt_compute_it_once(models):
    """Of prompts of 41, 49, 44 and 100 tokens, the six responses share all but the last token or, where the tail after
    whole blocks of 32 is shorter than 8, the last 4. The first 26 or 40 tokens, with which all prompts begin, are
    computed once. So it is with prompts that are cut into several forwards, and with responses that wait for others
    or for blocks. Their log-probs are the trainer's, also if requests lose their blocks, and after the cache's memory
    was returned.
    """
    result = launch(WORKERS / "prefixes.py", models["untied"])
    rows = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    once = 41 + 49 + 44 + 100 + 5 * (1 + 1 + 1 + 4)
    expected = {"0": once, "26": once - 3 * 26, "40": once - 3 * 40}
    assert len(rows) == 4 and all(row["prefill"] == expected for row in rows), rows
    # The first prompt, then those that begin alike, then what waited for their tails. With whole blocks there already,
    # nobody waits for a beginning that lies in them.
    assert rows[0]["forwards"] == {"0": 2, "26": 3, "40": 3} and rows[0]["again"] == 2, rows[0]
    assert all(row["gap"] <= 1e-5 for row in rows), rows
    # vLLM has filled the cache with zeros, so all of its memory is in use before.
    assert rows[0]["cache"] > 1e8 and rows[0]["returned"] > 0.9 * rows[0]["cache"], rows


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["untied", "tied"])
def test_engine_follows_the_trainer_in_bfloat16(models, kind):
    """Both sides compute logits in float32. A head that kept old weights would be off by 0.1 or more."""
    measured = gaps(models[kind], 1, "vllm", dtype="bfloat16")
    assert len(measured) == 6 and max(measured) <= 0.05, measured


@pytest.mark.slow
def test_hf_engine_follows_the_trainer(models):
    measured = gaps(models["tied"], 1, "hf")
    assert len(measured) == 6 and max(measured) <= 1e-5, measured


@pytest.mark.slow
def test_without_the_repair_a_tied_head_goes_stale(models):
    """With the update of workers/stale.py the log-probs differ: the tests above would see it."""
    measured = gaps(models["tied"], 1, "vllm", worker=WORKERS / "stale.py")
    assert measured[0] <= 1e-5 and max(measured[2:]) > 1e-2, measured


@pytest.mark.slow
def test_each_main_learns_what_is_right_and_does_the_same_on_two_ranks(tmp_path):
    """Two steps on fixed responses. The right ones become more likely than the wrong ones, in nats a token, and less
    with the sign of the advantage flipped. Losses and gradient norms are the same on two ranks, so denominators,
    whitening and maxima are those of all ranks.
    """
    launch(MAINS, arithmetic.WARM_START, tmp_path / "1", "signs")
    gains = json.loads((tmp_path / "1/signs.json").read_text())
    # SDPO's teacher has an opinion on each token, and finds the form of these wrong responses likelier than the policy
    # does. Its sign is tested by hand (test_math_sdpo.py, test_main.py).
    for name in set(ALGORITHMS) - {"sdpo"}:
        assert gains[name] > 0.003 and gains[f"{name}-flipped"] < -0.003, (name, gains)
    launch(MAINS, arithmetic.WARM_START, tmp_path / "2", ranks=2, engine=False)
    same = re.compile(
        "reward/mean|reward/kl|loss/.*|.*grad_norm|critic/.*|prm/.*|teacher/.*|train/entropy|train/clip_frac"
    )
    for name in ALGORITHMS:
        lines = [(tmp_path / str(ranks) / name / "metrics.jsonl").read_text().splitlines() for ranks in (1, 2)]
        for step, (one, two) in enumerate(zip(*[map(json.loads, run) for run in lines])):
            for key in filter(same.fullmatch, one):
                assert two[key] == pytest.approx(one[key], rel=1e-3 if step else 1e-4, abs=1e-5), (name, step, key)
        assert len(lines[0]) == 2 and one["train/grad_norm"] > 0
        assert json.loads((tmp_path / "1" / name / "run.json").read_text())["algorithm"] == name


@pytest.mark.slow
def test_a_run_is_the_same_in_any_layout(tmp_path):
    """Rollouts, rewards, losses, evaluation and the engine's weights. A checkpoint resumes in another layout, too."""
    launch(LAYOUTS, tmp_path, ranks=2, engine=False)
    runs = {run.name: (run / "metrics.jsonl").read_text().splitlines() for run in tmp_path.iterdir()}
    runs = {name: [json.loads(line) for line in lines] for name, lines in runs.items()}
    assert [len(runs[name]) for name in ("plain", "slices", "copies", "resumed")] == [3, 3, 3, 1]
    for name, lines in runs.items():
        for plain, line in zip(runs["plain"][-len(lines) :], lines):
            for key in filter(re.compile("step|reward/.*|response/.*|eval/.*").fullmatch, plain):
                assert line[key] == plain[key], (name, line["step"], key)
            for key in filter(re.compile("loss/.*|train/.*").fullmatch, plain):
                assert line[key] == pytest.approx(plain[key], rel=1e-4, abs=1e-5), (name, line["step"], key)
            assert line.get("mismatch/logprob_abs_max", 0) <= 2e-5, (name, line["step"])  # rounding


@pytest.mark.slow
@pytest.mark.parametrize("way, code", [("finish", 0), ("fail", 3)])
def test_a_run_ends_with_its_own_exit_code_however_slow_gloos_threads_are(way, code):
    """A gloo thread that drops its last tensors while the interpreter ends would abort the process."""
    result = launch(WORKERS / "leaving.py", way, ranks=2, check=False, fresh=True)
    assert result.stdout.count("slowed down") >= 2
    assert "terminate called" not in result.stderr
    assert re.findall(r"failed \(exitcode: (\d+)\)", result.stderr) == [str(code)] * bool(code)
    assert bool(result.returncode) == bool(code)
