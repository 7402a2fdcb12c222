"""Two ranks against one: gradients; and the engine's weights against the trainer's after updates."""

import json
import re
import sys

import pytest
import torch
from conftest import ROOT, launch, relative_difference

WORKERS = ROOT / "tests/workers"
SYNC, GRADIENT, MAINS, LAYOUTS = (WORKERS / f"{name}.py" for name in ("sync", "gradient", "mains", "layouts"))

PLAIN = {"token_budget": 1000, "shared_prompts": False}
CUTS = {  # ranks -> batching.Compute and how many micro-batches it cuts of 8 rows, 6 of them on one of two ranks
    1: [({**PLAIN, "token_budget": 1}, 8)],
    2: [
        ({"token_budget": 1000}, 1),
        ({**PLAIN, "token_budget": 12}, 5),
        ({"token_budget": 20}, 2),
        ({**PLAIN, "token_budget": 5, "sequence_parallel": 2}, 6),  # 5 and 1, one after the other; slices of 4 or 5
        ({"token_budget": 7, "sequence_parallel": 2, "activation_checkpointing": True}, 4),  # cut behind its prompt
        ({**PLAIN, "token_budget": 12, "shard_size": 1}, 5),
    ],
    4: [({**PLAIN, "token_budget": 5, "sequence_parallel": 2, "shard_size": 2}, 4)],  # 3 and a dummy on the last two
}


@pytest.fixture(scope="module")
def whole(models, tmp_path_factory) -> dict[str, dict[str, torch.Tensor]]:
    """Gradients of one rank that takes all rows in one micro-batch."""
    output = tmp_path_factory.mktemp("gradient") / "whole"
    launch(GRADIENT, models["tied and grouped"], output, json.dumps(PLAIN))
    (whole,) = torch.load(output)
    assert whole.pop("micro-batches") == 1
    return whole


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gradient_does_not_depend_on_ranks_budget_sharing_or_layout(models, whole, tmp_path, ranks):
    """All seven algorithms; micro-batches of one rank or group against dummies of another.

    The layers compute in float64: in float32 rounding alone is up to 1.5e-6 where advantages of opposite sign cancel.
    A wrong denominator is over 1e-2.
    """
    layouts = [json.dumps(compute) for compute, _ in CUTS[ranks]]
    launch(GRADIENT, models["tied and grouped"], tmp_path / "cut", *layouts, ranks=ranks)
    for (compute, count), cut in zip(CUTS[ranks], torch.load(tmp_path / "cut"), strict=True):
        assert cut.pop("micro-batches") == count, compute
        differences = {name: relative_difference(whole[name], cut[name]) for name in whole}
        assert len(cut) == 9 and max(differences.values()) <= 1e-6, (compute, differences)


def gaps(*command, ranks: int = 1, dtype: str = "float32") -> list[float]:
    return [float(x) for x in re.findall(r"gap (\S+)", launch(SYNC, *command, dtype, ranks=ranks).stdout)]


@pytest.mark.slow
@pytest.mark.parametrize("ranks, tp", [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("kind", ["untied", "tied"])
def test_engine_follows_the_trainer(models, kind, ranks, tp):
    measured = gaps(models[kind], tp, "vllm", ranks=ranks)
    assert len(measured) == 6 and max(measured) <= 1e-5, measured


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["untied", "tied"])
def test_engine_follows_the_trainer_in_bfloat16(models, kind):
    """With logits in float32 on both sides; a head that kept old weights is off by 0.1 and more."""
    measured = gaps(models[kind], 1, "vllm", dtype="bfloat16")
    assert len(measured) == 6 and max(measured) <= 0.05, measured


@pytest.mark.slow
def test_hf_engine_follows_the_trainer(models):
    measured = gaps(models["tied"], 1, "hf")
    assert len(measured) == 6 and max(measured) <= 1e-5, measured


@pytest.mark.slow
def test_without_the_repair_a_tied_head_goes_stale(models, tmp_path):
    """The same worker with the repair taken out: the test above would have seen it."""
    source = (ROOT / "common/weight_transfer.py").read_text()
    repair = "head.quant_method.process_weights_after_loading(head)"
    assert source.count(repair) == 1
    worker = tmp_path / "stale.py"
    worker.write_text(
        "import sys, common, importlib.util\n"
        f"spec = importlib.util.spec_from_file_location('common.weight_transfer', {str(tmp_path / 'broken.py')!r})\n"
        "import common.rollout\n"
        "class Broken:\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        return spec if name == 'common.weight_transfer' else None\n"
        "sys.meta_path.insert(0, Broken)\n"
        f"exec(open({str(SYNC)!r}).read())\n"
    )
    (tmp_path / "broken.py").write_text(source.replace(repair, "pass"))
    result = launch(worker, models["tied"], 1, "vllm", "float32")
    measured = [float(x) for x in re.findall(r"gap (\S+)", result.stdout)]
    assert measured[0] <= 1e-5 and max(measured[2:]) > 1e-2, (measured, sys.executable)


@pytest.mark.slow
def test_each_main_does_the_same_on_two_ranks(models, tmp_path):
    """Gradient norms and losses of two steps on canned responses: denominators, whitening and maxima of all ranks."""
    for ranks in (1, 2):
        launch(MAINS, models["untied"], tmp_path / str(ranks), ranks=ranks)
    same = re.compile("reward/mean|reward/kl|loss/.*|.*grad_norm|critic/.*|prm/.*|train/entropy|train/clip_frac")
    for name in ("grpo", "dr_grpo", "rloo", "remax", "dapo", "ppo", "prime"):
        lines = [(tmp_path / str(ranks) / name / "metrics.jsonl").read_text().splitlines() for ranks in (1, 2)]
        for step, (one, two) in enumerate(zip(*[map(json.loads, run) for run in lines])):
            for key in filter(same.fullmatch, one):
                assert two[key] == pytest.approx(one[key], rel=1e-3 if step else 1e-4, abs=1e-5), (name, step, key)
        assert len(lines[0]) == 2 and one["train/grad_norm"] > 0


@pytest.mark.slow
def test_a_single_update_needs_no_pass_of_its_own(models, tmp_path):
    """One mini-batch and no KL: each run beside one in which the old log-probs come from a pass before the update."""
    launch(MAINS, models["untied"], tmp_path, "single")
    for name in ("grpo", "dr_grpo", "rloo", "remax", "dapo", "prime"):
        runs = [(tmp_path / folder / "metrics.jsonl").read_text().splitlines() for folder in (name, f"{name}-pass")]
        for one, other in zip(*[map(json.loads, run) for run in runs]):
            assert one["train/clip_frac"] == 0 and one["train/grad_norm"] > 0
            for key in filter(re.compile("reward/.*|loss/.*|mismatch/.*|.*grad_norm|train/entropy").fullmatch, one):
                assert one[key] == pytest.approx(other[key], rel=1e-4, abs=1e-6), (name, key)


@pytest.mark.slow
def test_a_run_is_the_same_in_any_layout(tmp_path):
    """Rollouts, rewards, losses, evaluation, weights in the engine; and a checkpoint goes on in another layout."""
    launch(LAYOUTS, tmp_path, ranks=2)
    runs = {run.name: (run / "metrics.jsonl").read_text().splitlines() for run in tmp_path.iterdir()}
    runs = {name: [json.loads(line) for line in lines] for name, lines in runs.items()}
    assert [len(runs[name]) for name in ("plain", "slices", "copies", "resumed")] == [3, 3, 3, 1]
    for name, lines in runs.items():
        for plain, line in zip(runs["plain"][-len(lines) :], lines):
            for key in filter(re.compile("step|reward/.*|response/.*|eval/.*").fullmatch, plain):
                assert line[key] == plain[key], (name, line["step"], key)
            for key in filter(re.compile("loss/.*|train/.*").fullmatch, plain):
                assert line[key] == pytest.approx(plain[key], rel=1e-4, abs=1e-5), (name, line["step"], key)
            assert line.get("mismatch/logprob_abs_max", 0) <= 2e-5, (name, line["step"])  # rounding, the largest of all


@pytest.mark.slow
@pytest.mark.parametrize("way, code", [("finish", 0), ("fail", 3)])
def test_a_run_ends_with_its_own_exit_code_however_slow_gloos_threads_are(way, code):
    """One that drops its last tensors while the interpreter ends would abort the process."""
    result = launch(WORKERS / "leaving.py", way, ranks=2, check=False)
    assert result.stdout.count("slowed down") >= 2
    assert "terminate called" not in result.stderr
    assert re.findall(r"failed \(exitcode: (\d+)\)", result.stderr) == [str(code)] * bool(code)
    assert bool(result.returncode) == bool(code)
