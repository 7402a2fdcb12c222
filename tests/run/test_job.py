"""The flags of an algorithm file: one set of defaults for real models, another for the embedded job."""

import contextlib
import copy
import importlib
import shutil
import sys

import pytest
from cases import ALGORITHMS

from algos import grpo
from common.data import arithmetic
from common.errors import BadInput, RunFailed
from common.placement import Layout
from common.preflight import checks, flags
from common.preflight.prepare import prepare
from common.run import guards


@pytest.fixture
def parsed(monkeypatch):
    """The arguments that main() of an algorithm gets for a command line."""

    def parse(name: str, *words: str):
        algorithm, calls = importlib.import_module(f"algos.{name}"), []
        monkeypatch.setattr(sys, "argv", [f"algos/{name}.py", *words])
        flags.launch(calls.append, algorithm.Args, algorithm.EMBEDDED, algorithm.__doc__)
        return calls[0]

    return parse


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("words", [(), ("--model", "embedded"), ("--model=embedded",), ("--seed", "3")])
def test_without_a_model_it_is_the_embedded_job(parsed, name, words):
    args = parsed(name, *words)
    assert args.model == "embedded" and args.dataset == ("arithmetic",)
    assert (args.max_prompt_tokens, args.max_response_tokens, args.warmup_steps) == (64, 48, 2)
    assert args.schedule == "linear" and 1e-4 <= args.learning_rate <= 3e-4 and 26 <= args.steps <= 60


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("words", [("--model", "folder"), ("--model=folder",), ("--seed", "3", "--model", "folder")])
def test_a_real_model_has_the_defaults_of_real_models(parsed, name, words):
    args = parsed(name, *words)
    assert args.model == "folder" and args.dataset == ("gsm8k",)
    assert (args.max_prompt_tokens, args.max_response_tokens, args.learning_rate) == (512, 1024, 1e-6)
    assert args.schedule == "constant" and args.steps == 200


def test_flags_win_over_both_sets(parsed):
    assert parsed("grpo", "--steps", "7", "--learning-rate", "1e-3").steps == 7
    assert parsed("grpo", "--model", "folder", "--steps", "7").steps == 7


@pytest.mark.parametrize("words, reward", [((), "gsm8k"), (("--environment", "calculator"), "environment")])
def test_an_environment_gives_the_reward_unless_another_is_asked_for(parsed, words, reward):
    assert prepare(parsed("grpo", *words), models=["policy"]).reward_names == (reward,)
    if words:
        both = parsed("grpo", *words, "--reward", "environment", "gsm8k=0.5")
        assert prepare(both, models=["policy"]).reward_names == ("environment", "gsm8k=0.5")


def test_a_built_in_environment_brings_its_problems(parsed):
    assert parsed("grpo", "--environment", "guess").dataset == ("guess",)
    assert parsed("grpo", "--model", "folder", "--environment=calculator").dataset == ("calculator",)
    assert parsed("grpo", "--environment", "file.py:Class").dataset == ("arithmetic",)


def test_args_stay_what_the_user_typed(parsed):
    """run.json records the settled values, with which a run can be repeated."""
    args = parsed("grpo")
    typed = copy.deepcopy(args)
    settings = prepare(args, models=["policy"])
    assert args == typed and settings.args is args
    recorded = settings.recorded
    assert type(recorded) is grpo.Args and recorded.model == str(arithmetic.WARM_START)
    assert recorded.dtype == "float32" and recorded.reward == ("gsm8k",) and recorded.max_logprob_gap == 1e-3
    assert recorded.compute.token_budget == settings.compute.token_budget >= 1024
    assert (recorded.steps, recorded.seed) == (typed.steps, typed.seed)


@pytest.mark.parametrize("words, shown", [((), "52"), (("--model", "folder"), "200")])
def test_the_help_shows_the_defaults_of_the_case_at_hand(parsed, capsys, monkeypatch, words, shown):
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit):
        parsed("grpo", *words, "--help")
    assert f"One step is one rollout and its updates. (default: {shown})" in capsys.readouterr().out


@pytest.mark.parametrize("dtype, given, bound", [("float32", 0, 1e-3), ("bfloat16", 0, 0.1), ("bfloat16", 0.2, 0.2)])
def test_the_bound_of_the_gap_follows_the_dtype(parsed, dtype, given, bound):
    settings = prepare(parsed("grpo", "--dtype", dtype, "--max-logprob-gap", str(given)), models=["policy"])
    assert settings.max_logprob_gap == bound


@pytest.mark.parametrize("gap, staleness, stops", [(9e-4, 0, 0), (1.1e-3, 0, 1), (0.4, 0.5, 0), (0.6, 0.5, 1)])
def test_a_gap_stops_the_run_unless_it_was_learned_since(gap, staleness, stops):
    """A float32 run of two different functions had a gap of 0.01, which 0.05 for every dtype let pass."""
    metrics = {"step": 3, "mismatch/logprob_abs_mean": gap, "mismatch/staleness": staleness}
    with pytest.raises(RunFailed) if stops else contextlib.nullcontext():
        guards.check(metrics, 1e-3, lambda bound: ("logprob-gap", "why"))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_batch_in_flight_needs_a_correction(name):
    algorithm = importlib.import_module(f"algos.{name}")
    behind = {**algorithm.EMBEDDED, "layout": Layout("split", (0,), max_inflight_batches=2)}
    with pytest.raises(BadInput, match="--max-inflight-batches 2: .* --tis-cap 2"):
        algorithm.check_args(algorithm.Args(**behind))
    algorithm.check_args(algorithm.Args(**behind, tis_cap=2.0))
    if name == "opd":  # its loss over the vocabulary does not depend on who sampled
        algorithm.check_args(algorithm.Args(**behind, full_vocabulary=True))


@pytest.mark.parametrize("name", ["dapo", "prime"])
@pytest.mark.parametrize(
    "changes, message",
    [
        ({"gen_prompts": 31}, "31 prompts in a draw are not a multiple of the 2 ranks"),
        ({"gen_prompts": 4, "max_gen_batches": 2}, "2 draws of 4 prompts are fewer than --prompts-per-step"),
    ],
)
def test_draws_that_cannot_fill_a_step_are_refused(name, changes, message, monkeypatch):
    algorithm = importlib.import_module(f"algos.{name}")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(BadInput, match=message):
        algorithm.main(algorithm.Args(**{**algorithm.EMBEDDED, "mini_batches": 2, **changes}))


@pytest.mark.parametrize("count, message", [(0, "token 3, '0', is 51 there"), (5, "token 47, .*, is unknown there")])
def test_a_teacher_with_another_tokenizer_is_refused(monkeypatch, tmp_path, count, message):
    """The same characters with other numbers; and fewer characters."""
    own = arithmetic.tokenizer()
    shutil.copytree(arithmetic.WARM_START, tmp_path / "teacher")
    changed = arithmetic.CHARACTERS[:-count] if count else arithmetic.CHARACTERS[1:] + arithmetic.CHARACTERS[0]
    monkeypatch.setattr(arithmetic, "CHARACTERS", changed)
    arithmetic.tokenizer().save_pretrained(tmp_path / "teacher")
    with pytest.raises(BadInput, match=f"--teacher .*teacher: its tokenizer is not that of --model: {message}"):
        checks.check_companion("--teacher", str(tmp_path / "teacher"), own, [], 8)
    with pytest.raises(BadInput, match="--teacher absent/model/there: no such folder"):
        checks.check_companion("--teacher", "absent/model/there", own, [], 8)
