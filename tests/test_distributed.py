"""Two ranks against one: gradients; and the engine's weights against the trainer's after updates."""

import json
import re
import sys

import pytest
import torch
from conftest import ROOT, launch, relative_difference

SYNC, GRADIENT, MAINS = (ROOT / f"tests/workers/{name}.py" for name in ("sync", "gradient", "mains"))


@pytest.fixture(scope="module")
def whole(models, tmp_path_factory) -> dict[str, dict[str, torch.Tensor]]:
    """Gradients of one rank that takes all rows in one micro-batch."""
    output = tmp_path_factory.mktemp("gradient") / "whole"
    launch(GRADIENT, models["tied"], 1000, output)
    return torch.load(output)


@pytest.mark.slow
@pytest.mark.parametrize("ranks, budget, shared", [(1, 1, ""), (2, 1000, "shared"), (2, 12, ""), (2, 20, "shared")])
def test_gradient_does_not_depend_on_ranks_budget_or_sharing(models, whole, tmp_path, ranks, budget, shared):
    """All seven algorithms; 6 rows on one rank, 2 on the other: with a small budget, micro-batches against dummies.

    The layers compute in float64: in float32 rounding alone is up to 1.5e-6 where advantages of opposite sign cancel.
    A wrong denominator is over 1e-2.
    """
    launch(GRADIENT, models["tied"], budget, tmp_path / "cut", *filter(None, [shared]), ranks=ranks)
    cut = torch.load(tmp_path / "cut")
    differences = {name: relative_difference(whole[name], cut[name]) for name in whole}
    assert len(cut) == 9 and max(differences.values()) <= 1e-6, differences


def gaps(*command, ranks: int = 1) -> list[float]:
    return [float(x) for x in re.findall(r"gap (\S+)", launch(SYNC, *command, ranks=ranks).stdout)]


@pytest.mark.slow
@pytest.mark.parametrize("ranks, tp", [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("kind", ["untied", "tied"])
def test_engine_follows_the_trainer(models, kind, ranks, tp):
    measured = gaps(models[kind], tp, "vllm", ranks=ranks)
    assert len(measured) == 6 and max(measured) <= 1e-5, measured


@pytest.mark.slow
def test_hf_engine_follows_the_trainer(models):
    measured = gaps(models["tied"], 1, "hf")
    assert len(measured) == 6 and max(measured) <= 1e-5, measured


@pytest.mark.slow
def test_without_the_repair_a_tied_head_goes_stale(models, tmp_path):
    """The same worker with the repair taken out: the test above would have seen it."""
    source = (ROOT / "common/vllm_engine.py").read_text()
    repair = "head.quant_method.process_weights_after_loading(head)"
    assert source.count(repair) == 1
    worker = tmp_path / "stale.py"
    worker.write_text(
        "import sys, common, importlib.util\n"
        f"spec = importlib.util.spec_from_file_location('common.vllm_engine', {str(tmp_path / 'broken.py')!r})\n"
        "import common.rollout\n"
        "class Broken:\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        return spec if name == 'common.vllm_engine' else None\n"
        "sys.meta_path.insert(0, Broken)\n"
        f"exec(open({str(SYNC)!r}).read())\n"
    )
    (tmp_path / "broken.py").write_text(source.replace(repair, "pass"))
    result = launch(worker, models["tied"], 1, "vllm")
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
