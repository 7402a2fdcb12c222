"""All algorithms: what they share stays the same text. Runs of those that draw more prompts or have a critic."""

import ast
import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from cases import ALGORITHMS
from conftest import ROOT, launch

WORKERS = ROOT / "tests/workers"


@pytest.fixture(scope="module")
def run_of(tmp_path_factory) -> Callable[[str], Path]:
    """Name of an algorithm -> folder of a run of tests/workers/siblings.py, which the first call starts."""
    folder = tmp_path_factory.mktemp("siblings")

    @functools.cache
    def run_of(name: str) -> Path:
        launch(WORKERS / "siblings.py", name, folder / name)
        return folder / name

    return run_of


def lines(run) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def responses(run, step: int) -> list[dict]:
    return [json.loads(line) for line in (run / f"rollouts/step_{step:06d}.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("name, low, high", [("dapo", 1, 7), ("prime", 1, 7)])
def test_a_kept_batch_has_only_groups_within_the_bounds(run_of, name, low, high):
    run = run_of(name)
    for row in lines(run):
        assert row["sampling/prompts_generated"] % 32 == 0
        assert 8 <= row["sampling/prompts_kept"] < row["sampling/prompts_generated"]
    for step in (1, 2, 3):
        rows = responses(run, step)
        assert len(rows) == 8 * 8
        for group in range(0, 64, 8):
            assert len({row["prompt"] for row in rows[group : group + 8]}) == 1
            assert low <= sum(row["acc"] for row in rows[group : group + 8]) <= high


@pytest.mark.slow
def test_the_critic_learns_and_the_kl_term_is_measured(run_of):
    rows = lines(run_of("ppo"))
    assert all(row["train/grad_norm"] > 0 and 0 < row["reward/mean"] < 1 for row in rows)
    assert max(row["mismatch/logprob_abs_max"] for row in rows) < 5e-4
    assert rows[-1]["loss/value"] < rows[0]["loss/value"]
    assert abs(rows[0]["reward/kl"]) < 1e-4 < abs(rows[-1]["reward/kl"])  # the policy starts as its reference


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_dapo_gives_up_on_a_constant_reward(tmp_path, ranks):
    """On two ranks both leave together: nothing hangs."""
    flags = ["--rollout-backend", "hf", "--prompts-per-step", 8, "--gen-prompts", 8, "--max-gen-batches", 3]
    flags += ["--eval-prompts", 0, "--reward", f"{WORKERS / 'rewards.py'}:constant", "--run-dir", tmp_path / "run"]
    result = launch(ROOT / "algos/dapo.py", *flags, ranks=ranks, check=False)
    assert result.returncode != 0
    said = f"3 draws (--max-gen-batches) a rank has only 0 of its {8 // ranks} prompts with both right and wrong"
    assert said in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ("dapo", "ppo", "prime"))
def test_two_ranks_do_not_hang(tmp_path, name):
    """Ranks keep different numbers of groups, and critic and process model run their own collectives."""
    flags = ["--rollout-backend", "hf", "--prompts-per-step", 8, "--steps", 1, "--eval-prompts", 0]
    launch(ROOT / f"algos/{name}.py", *flags, "--run-dir", tmp_path / "run", ranks=2)
    (row,) = lines(tmp_path / "run")
    assert row["mismatch/logprob_abs_max"] < 1e-4 and row["train/grad_norm"] > 0


# Functions and flags of one name that differ between files on purpose; all others are the same text everywhere.
OWN_FUNCTIONS = {"compute_advantages", "policy_loss", "clipped_tokens", "keep_groups", "check_args", "main"}
OWN_FLAGS = {
    "steps",
    "prompts_per_step",
    "gen_prompts",
    "group_size",
    "temperature",
    "clip_low",
    "clip_high",
    "clip",
    "full_vocabulary",
    "learning_rate",
    "offload",
}
SAME_LOSS = ("reinforce_pp", "remax", "ppo", "prime", "opd", "sdpo")


def pieces(name: str) -> tuple[dict[str, str], dict[str, str]]:
    """Source of each function, and line of each flag, of algos/NAME.py."""
    source = (ROOT / f"algos/{name}.py").read_text()
    tree = ast.parse(source)
    functions = {node.name: ast.get_source_segment(source, node) for node in tree.body if hasattr(node, "args")}
    (args,) = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    flags = {node.target.id: source.splitlines()[node.lineno - 1] for node in args.body if hasattr(node, "target")}
    return functions, flags


@pytest.mark.parametrize("which, own", [(0, OWN_FUNCTIONS), (1, OWN_FLAGS)], ids=["functions", "flags"])
def test_shared_blocks_have_not_drifted_apart(which, own):
    seen: dict[str, tuple[str, str]] = {}
    for name in ALGORITHMS:
        for piece, text in pieces(name)[which].items():
            first, expected = seen.setdefault(piece, (name, text))
            assert piece in own or text == expected, f"{piece} in {name}.py is not the one of {first}.py"


def test_token_level_losses_are_one_text():
    for function in ("policy_loss", "clipped_tokens"):
        assert len({pieces(name)[0][function] for name in SAME_LOSS}) == 1
