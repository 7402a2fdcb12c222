"""The flags of an algorithm file, with two sets of defaults, and what the loop does around each step of training."""

import contextlib
import copy
import importlib
import itertools
import json
import math
import shutil
import sys
import time
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from cases import ALGORITHMS

from algos import grpo
from common import placement, weight_sync
from common.data import arithmetic
from common.data.prompts import Prompt, PromptLoader
from common.errors import BadInput, RunFailed
from common.placement import Layout
from common.preflight import checks, flags
from common.preflight.docstrings import help_text
from common.preflight.prepare import prepare
from common.preflight.run_directory import read_metrics
from common.rewards.grading import Result
from common.rollout.rollout import collate
from common.rollout.servers.engine import CallGate, ServerEngine
from common.run import checkpoint, diagnosis, evaluation, guards, job, offline, tracking
from common.run.sampling import Batch
from common.run.tracking import Tracker


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


@pytest.mark.parametrize("prompts_per_step", ["8", "16"])
def test_a_user_hears_that_a_step_has_prompts_several_times(parsed, tmp_path, capsys, prompts_per_step):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n}+2=", "answer": f"{n + 2}"}) + "\n" for n in range(10, 18)))
    args = parsed("grpo", "--dataset", str(rows), "--eval-prompts", "0", "--prompts-per-step", prompts_per_step)
    prepare(args, models=["policy"])
    assert ("several times" in capsys.readouterr().out) == (prompts_per_step == "16")


def test_the_memory_plan_knows_what_is_offloaded(parsed, tmp_path):
    for offload in ("none", "others", "all"):
        args = parsed("grpo", "--offload", offload, "--run-dir", str(tmp_path / offload))
        assert prepare(args, models=["policy", "reference"]).plan.offload == offload


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


@pytest.mark.parametrize("name", ["grpo", "ppo", "opd"])
def test_the_help_keeps_formulas_and_commands_in_lines_of_their_own(parsed, capsys, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit):
        parsed(name, "--help")
    shown = capsys.readouterr().out.splitlines()
    docstring = importlib.import_module(f"algos.{name}").__doc__.splitlines()
    indented = [line for line in docstring if line.startswith(" ")]
    assert len(indented) > 3 and not set(indented) - set(shown)


def test_the_help_reflows_prose():
    text = "Title.\n\n    f = 1\nThe first\n`line` goes on.\n\nRun:  one\n      two\nResult: three\n"
    assert help_text(text) == (
        "Title.\n\n    f = 1\n\nThe first `line` goes on.\n\nRun:  one\n      two\n\nResult: three\n"
    )


@pytest.mark.parametrize("dtype, given, bound", [("float32", 0, 1e-3), ("bfloat16", 0, 0.1), ("bfloat16", 0.2, 0.2)])
def test_the_bound_of_the_gap_follows_the_dtype(parsed, dtype, given, bound):
    settings = prepare(parsed("grpo", "--dtype", dtype, "--max-logprob-gap", str(given)), models=["policy"])
    assert settings.max_logprob_gap == bound


@pytest.mark.parametrize("rounding, tokens, stops", [(9e-4, 5000, 0), (2e-3, 5000, 1), (2e-3, 999, 0)])
def test_rounding_stops_a_run_also_where_other_tokens_are_stale(rounding, tokens, stops):
    """The gap of stale tokens would hide it. A handful of tokens of current weights is not enough to judge by."""
    metrics = {"step": 3, "mismatch/logprob_abs_mean": 0.2, "mismatch/staleness": 0.5}
    metrics |= {"mismatch/rounding_abs_mean": rounding, "mismatch/current_tokens": tokens}
    with pytest.raises(RunFailed, match="0.002 per token") if stops else contextlib.nullcontext():
        guards.check_logprob_gap(metrics, 1e-3, lambda bound: ("logprob-gap", "why"))


@pytest.mark.parametrize("gap, staleness, stops", [(9e-4, 0, 0), (1.1e-3, 0, 1), (0.4, 0.5, 0), (0.6, 0.5, 1)])
def test_a_gap_stops_the_run_unless_it_was_learned_since(gap, staleness, stops):
    """A float32 run of two different functions had a gap of 0.01, which 0.05 for every dtype let pass."""
    metrics = {"step": 3, "mismatch/logprob_abs_mean": gap, "mismatch/staleness": staleness}
    with pytest.raises(RunFailed) if stops else contextlib.nullcontext():
        guards.check_logprob_gap(metrics, 1e-3, lambda bound: ("logprob-gap", "why"))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_batch_in_flight_needs_a_correction(name):
    algorithm = importlib.import_module(f"algos.{name}")
    behind = {**algorithm.EMBEDDED, "layout": Layout("split", (0,), max_inflight_batches=2)}
    if name == "sdpo":
        behind["full_vocabulary"] = False
    with pytest.raises(BadInput, match="--max-inflight-batches > 1: .* --tis-cap 2"):
        algorithm.check_args(algorithm.Args(**behind))
    algorithm.check_args(algorithm.Args(**behind, tis_cap=2.0))
    if name in ("opd", "sdpo"):  # their loss over the vocabulary does not depend on who sampled
        algorithm.check_args(algorithm.Args(**behind | {"full_vocabulary": True}))


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
    with pytest.raises(BadInput, match=f"--teacher .*teacher: .*--model: {message}"):
        checks.check_companion("--teacher", str(tmp_path / "teacher"), own, [], 8)
    with pytest.raises(BadInput, match="--teacher absent/model/there: "):
        checks.check_companion("--teacher", "absent/model/there", own, [], 8)


LAYOUTS = {
    "here": Layout(),
    "two": Layout(rollout_placement="split", max_inflight_batches=2),
    "four": Layout(rollout_placement="split", max_inflight_batches=4),
}
PROMPTS_PER_STEP = 8


class Saver:
    """Goes through six steps, and notes what it is asked to save. A checkpoint is due after steps 4 and 6."""

    step = 0  # a fresh run
    sampled_again = 0

    def __init__(self):
        self.rescued = []

    def steps(self, run_dir, last: int) -> Iterator[int]:
        yield from range(1, last + 1)

    def due(self, step: int) -> bool:
        return step in (4, 6)

    def step_done(self, step: int, metrics: dict) -> None:
        self.metrics = metrics

    def rescue(self, step: int, position: int) -> None:
        self.rescued.append((step, position))


class Engine:
    """Takes every update at once. Nothing of it is used but what the loop asks of servers."""

    def __init__(self, weight_version: int = 0):
        self.weight_version = weight_version
        self.behind = 0
        self.calls = CallGate()
        self.wait_for_step_or_idle = partial(ServerEngine.wait_for_step_or_idle, self)
        self.wake = partial(ServerEngine.wake, self)

    def use_group(self, group) -> None:
        """It has no collectives."""

    def send_if_behind(self) -> None:
        """It has them."""


class Run(job.Run):
    """A run of six steps without models. The fixture below gives it what the loop uses."""

    def __init__(self, world, run_dir, layout: Layout):
        self.args = grpo.Args(run_dir=str(run_dir), steps=6, eval_every=3, rollouts_every=4, layout=layout)
        self.world = world
        self.settings = SimpleNamespace(
            reward=None,
            tokenizer=None,
            layout=layout,
            prompts=["to train on"],
            held_out=["held out"],
            max_logprob_gap=1.0,
        )
        self.loader = PromptLoader([Prompt("p", "p", [9], "1")], 0)
        self.engine = Engine(weight_version=5)
        self.saver = Saver()
        self.tracker = Tracker(self.args, "grpo", world)
        self.probe = None
        self.evaluator = SimpleNamespace(greedy_accuracy=self.evaluate)
        self.evaluated = []  # what was evaluated, and how many batches had begun and not ended
        self.files = []  # that got the responses
        self.begun = []  # steps whose sampling has begun
        self.ended = []
        self.fails_at = 0

    def sample(self, step: int, sampler) -> Batch:
        self.begun.append(step)
        sampler.prompts(PROMPTS_PER_STEP)
        if step == self.fails_at:
            raise RunFailed("the server is gone", code="server-gone")
        time.sleep(0.02)
        ids = [[5, 1], [6, 1]]
        rollout = collate([[9], [9]], ids, [[-1.0] * 2] * 2, [False] * 2, self.engine.weight_version, "cpu")
        self.ended.append(step)
        return Batch.of(rollout, [Prompt("p", "p", [9], "1")], ["a", "b"], [Result(0.0, 0.0), Result(1.0, 1.0)])

    def evaluate(self, prompts, metrics, file) -> float:
        self.evaluated.append((prompts, len(self.begun) - len(self.ended)))
        self.files.append(file.relative_to(self.tracker.run_dir).as_posix())
        return 0.25

    def train(self, step: int, batch: Batch) -> None:
        """As an algorithm does: train, push the weights, and end the step."""
        self.engine.weight_version += 1
        self.tracker.mean("reward/mean", 0.5)
        self.end_step(step, batch, advantages=torch.tensor([-2.0, 1.0]), old_logprobs=batch.rollout_logprobs)


def wait_for_all(run: Run) -> None:
    for step in run.prefetcher.in_flight.values():
        step.ended.wait()


@pytest.fixture(params=LAYOUTS)
def run(world, tmp_path, monkeypatch, request):
    made = Run(world, tmp_path, LAYOUTS[request.param])
    monkeypatch.setattr(tracking, "write_report", lambda run_dir: tmp_path / "report.html")
    yield made
    if hasattr(made, "prefetcher"):
        wait_for_all(made)
    made.tracker.bar.close()


failing_step = pytest.mark.parametrize("failing", [1, 3, 4, 5])


@failing_step
def test_a_step_whose_sampling_fails_is_sampled_again_after_a_resume(run, failing):
    """Also where its prompts, or those of the steps after it, were drawn ahead."""
    run.fails_at = failing
    with pytest.raises(RunFailed, match="the server is gone"):
        for step, batch in run.steps(run.sample):
            run.train(step, batch)
    # The evaluation after step 3 waits for all steps in flight, also for step 5.
    done = 3 if (failing, run.prefetcher.limit) == (5, 4) else failing - 1
    assert run.saver.rescued == [(done, done * PROMPTS_PER_STEP)]
    rows = read_metrics(run.tracker.run_dir)
    assert [row["step"] for row in rows] == list(range(1, done + 1)), "a resumed run begins after the last of these"


@pytest.mark.parametrize("lost", ["evaluation", "servers"])
def test_the_first_failure_is_the_one_that_is_reported(run, monkeypatch, lost):
    """The metrics of the step are written on the way out, and may be the second thing that fails."""

    def fail(*given):
        raise RunFailed(f"{lost} gone")

    def write(step):
        raise RunFailed("loss/policy is nan")

    with pytest.raises(RunFailed, match=f"{lost} gone"):
        for step, batch in run.steps(run.sample):
            if step == 3:  # the first one with an evaluation
                monkeypatch.setattr(run.tracker, "write", write)
                monkeypatch.setattr(run, "accuracy", fail)
            if step == 3 and lost == "servers":
                run.tracker.mean("loss/policy", 0.5)
                run.rescue_pushed()
                fail()
            run.train(step, batch)
    assert run.saver.rescued[0] == (3, 3 * PROMPTS_PER_STEP)


def test_a_disk_that_is_full_at_a_save_ends_the_run_like_any_failure(run):
    def full(step, metrics):
        raise RunFailed("no room", code="disk-full")

    run.saver.step_done = full
    with pytest.raises(RunFailed, match="no room"):
        for step, batch in run.steps(run.sample):
            run.train(step, batch)
    assert run.saver.rescued == [(1, PROMPTS_PER_STEP)]


def test_prompts_that_were_in_flight_are_counted_once_after_a_resume(run):
    run.saver.sampled_again = 5
    for step, batch in run.steps(run.sample):
        run.train(step, batch)
    counted = [row.get("sampling/prompts_again") for row in read_metrics(run.tracker.run_dir)]
    assert counted == [5, *[None] * 5]


@failing_step
def test_a_step_whose_update_fails_is_sampled_again_after_a_resume(run, failing):
    for step, batch in run.steps(run.sample):
        if step == failing:
            with pytest.raises(RunFailed, match="nan"):
                guards.stop_unless_finite(run.tracker, "train/grad_norm", torch.tensor(math.nan))
            break
        run.train(step, batch)
    assert run.saver.rescued == [(failing - 1, (failing - 1) * PROMPTS_PER_STEP)]


@failing_step
def test_a_step_of_sft_or_dpo_whose_update_fails_is_trained_again_after_a_resume(world, tmp_path, monkeypatch, failing):
    monkeypatch.setattr(tracking, "write_report", lambda run_dir: tmp_path / "report.html")
    run = object.__new__(offline.Run)
    run.args, run.world, run.engine = grpo.Args(run_dir=str(tmp_path), steps=6), world, None
    run.loader = PromptLoader([Prompt("p", "p", [9], "1")], 0)
    run.saver, run.tracker = Saver(), Tracker(run.args, "sft", world)
    for step in run.steps():
        run.loader.take(PROMPTS_PER_STEP)
        if step == failing:
            with pytest.raises(RunFailed, match="nan"):
                guards.stop_unless_finite(run.tracker, "train/grad_norm", torch.tensor(math.nan))
            break
        run.end_step(step)
    run.tracker.bar.close()
    assert run.saver.rescued == [(failing - 1, (failing - 1) * PROMPTS_PER_STEP)]


@failing_step
def test_a_step_whose_push_fails_is_done_and_has_its_metrics(run, failing):
    if not run.settings.layout.split:
        pytest.skip("an engine in this process does not get lost")
    for step, batch in run.steps(run.sample):
        if step == failing:
            run.tracker.mean("loss/policy", 0.5)
            run.engine.before_failing()
            break
        run.train(step, batch)
    assert run.saver.rescued == [(failing, failing * PROMPTS_PER_STEP)]
    rows = read_metrics(run.tracker.run_dir)
    assert [row["step"] for row in rows] == list(range(1, failing + 1)) and rows[-1]["loss/policy"] == 0.5


def test_a_run_whose_first_push_fails_can_be_started_again(world, tmp_path, monkeypatch):
    """As a server of another model makes it fail. Nothing has begun, so nothing is in the run directory."""

    def fail(*given) -> None:
        raise RunFailed("another model", code="server-refused")

    monkeypatch.setattr(checkpoint, "Saver", lambda *given: SimpleNamespace(load=lambda resume: 0, policy=None))
    monkeypatch.setattr(weight_sync, "push", fail)
    args = grpo.Args(run_dir=str(tmp_path / "run"), layout=LAYOUTS["two"])
    settings = SimpleNamespace(args=args, prompts=[], tokenizer=None, reward=None, dtype=None, resume=None)
    with pytest.raises(RunFailed, match="another model"):
        job.Run(settings, world, Engine(), {"policy": (None, None)})
    assert not (tmp_path / "run").exists()


def test_a_user_hears_why_nothing_happens_before_the_first_step(world, tmp_path, monkeypatch, capsys):
    """With a real model on a CPU the evaluation takes minutes."""
    heard = []

    def greedy_accuracy(prompts, metrics, file) -> float:
        heard.append(capsys.readouterr().out)
        return 0.5

    saver = SimpleNamespace(load=lambda resume: 0, policy=None, signals=SimpleNamespace())
    monkeypatch.setattr(checkpoint, "Saver", lambda *given: saver)
    monkeypatch.setattr(diagnosis, "GapProbe", lambda *given: None)
    monkeypatch.setattr(evaluation, "Evaluator", lambda *given: SimpleNamespace(greedy_accuracy=greedy_accuracy))
    args = grpo.Args(run_dir=str(tmp_path / "run"), layout=LAYOUTS["here"])
    settings = SimpleNamespace(args=args, recorded=args, name="grpo", prompts=[], held_out=["a", "b", "c"])
    settings.tokenizer = settings.reward = settings.dtype = settings.resume = settings.compute = None
    job.Run(settings, world, Engine(), {})
    assert "evaluation of 3 held-out prompts" in heard[0]


def test_a_run_that_is_stopped_writes_its_report_before_it_waits_for_batches(run, monkeypatch):
    """A cluster that stops a run kills it after a while."""
    done = []
    monkeypatch.setattr(tracking, "write_report", lambda run_dir: done.append("report"))
    monkeypatch.setattr(placement, "finish", lambda *given: done.append("finish"))
    for _ in run.steps(run.sample):
        break
    monkeypatch.setattr(run.prefetcher, "abandon", lambda: done.append("batches"))
    run.close()
    assert done == ["report", "batches", "finish"]


@failing_step
def test_a_step_that_fails_after_its_update_is_done(run, failing):
    for step, batch in run.steps(run.sample):
        if step == failing:
            run.tracker.mean("loss/policy", math.nan)
            with pytest.raises(RunFailed, match="loss/policy is nan"):
                run.train(step, batch)
            break
        run.train(step, batch)
    assert run.saver.rescued == [(failing, failing * PROMPTS_PER_STEP)]


def test_nothing_is_sampled_that_is_too_early_or_too_late_to_be_trained_on(run):
    """K - 1 steps ahead, and none after the last. A checkpoint, as after step 4, holds nothing up."""
    begun_before_the_end_of = {}
    for step, batch in run.steps(run.sample):
        wait_for_all(run)
        begun_before_the_end_of[step] = max(run.begun)
        run.train(step, batch)
    ahead = run.prefetcher.limit - 1
    assert begun_before_the_end_of == {step: min(step + ahead, 6) for step in range(1, 7)}
    assert sorted(run.begun) == list(range(1, 7))


def test_an_evaluation_waits_for_the_engine_and_has_the_held_out_prompts(run):
    for step, batch in run.steps(run.sample):
        run.train(step, batch)
    assert run.files == ["evaluations/step_000003.jsonl", "evaluations/step_000006.jsonl"]
    assert run.evaluated == [(["held out"], 0)] * 2 and run.saver.metrics["eval/accuracy"] == 0.25
    assert [step for step in range(1, 7) if run.evaluates(step)] == [3, 6]
    run.args.eval_every = 0
    assert [step for step in range(1, 7) if run.evaluates(step)] == [6]
    assert [step for step in range(1, 7) if run.writes_rollouts(step)] == [1, 4, 6]
    assert len(list(run.tracker.run_dir.glob("rollouts/step_*.jsonl"))) == 3


def test_holes_in_the_heap_are_returned_between_sampling_and_training(world, tmp_path, monkeypatch):
    """Otherwise the heap grows to the sum of both: two steps of PPO with evaluations took 10.3 GiB instead of 8.9."""
    run, events = Run(world, tmp_path, LAYOUTS["here"]), []

    def sample(step: int, sampler) -> Batch:
        events.append("sample")
        return run.sample(step, sampler)

    def evaluate(*arguments, **keywords) -> float:
        events.append("sample")
        return run.evaluate(*arguments, **keywords)

    run.evaluator.greedy_accuracy = evaluate
    monkeypatch.setattr(placement, "return_holes", lambda: events.append("holes"))
    monkeypatch.setattr(tracking, "write_report", lambda run_dir: tmp_path / "report.html")
    for step, batch in run.steps(sample):
        events.append("train")
        run.train(step, batch)
    run.tracker.bar.close()
    assert len(run.evaluated) == 2 and events.count("train") == 6
    assert {"sample", "train"} not in [set(pair) for pair in itertools.pairwise(events)], events


@pytest.mark.parametrize("updates", ["none", "recompute", "keep"])
def test_no_gap_is_rounding_where_keys_and_values_may_be_old(world, tmp_path, monkeypatch, updates):
    """With --inflight-updates keep a token of the current weights may rest on those of older ones."""
    monkeypatch.setattr(tracking, "write_report", lambda run_dir: tmp_path / "report.html")
    run = Run(world, tmp_path, Layout("split", max_inflight_batches=2, inflight_updates=updates))
    for step, batch in run.steps(run.sample):
        wait_for_all(run)
        run.train(step, batch)
        assert ("mismatch/current_tokens" in run.saver.metrics) == (updates != "keep")
    run.tracker.bar.close()


def test_responses_are_as_old_as_the_weights_that_sampled_them(run):
    """In updates of the engine. The push at the end of a step makes nothing of this step older."""
    staleness = []
    for step, batch in run.steps(run.sample):
        wait_for_all(run)  # the next step is sampled before this one's push
        run.train(step, batch)
        staleness.append(run.saver.metrics["mismatch/staleness"])
    assert staleness == [min(run.prefetcher.limit - 1, step - 1) for step in range(1, 7)]
    assert run.saver.metrics["advantage/abs_max"] == 2.0, "a negative advantage is a signal, too"


def test_only_steps_in_a_row_end_a_run(capsys):
    """A step with an advantage, or with a response that ended, starts the count again."""
    trends = guards.Trends()
    for step in range(1, 5 * guards.SILENT_STEPS):
        silent = step % guards.SILENT_STEPS != 0
        cut_off = step % guards.TRUNCATED_STEPS != 0
        metrics = {"advantage/abs_max": 0.0 if silent else 1.0, "response/truncated_frac": 1.0 if cut_off else 0.9}
        trends.check({"step": step, "reward/mean": 0.5, **metrics})
    assert "no-signal" not in capsys.readouterr().err


@pytest.mark.parametrize("value, stops", [(math.nan, True), (math.inf, True), (0.0, False), (1e30, False)])
def test_a_gradient_that_is_not_finite_ends_the_run_before_it_reaches_the_weights(value, stops):
    saved = []
    tracker = SimpleNamespace(step=3, save_refused=lambda step: "", before_failing=lambda: saved.append(True))
    with pytest.raises(RunFailed) if stops else contextlib.nullcontext() as failed:
        guards.stop_unless_finite(tracker, "train/grad_norm", torch.tensor(value))
    assert saved == [True] * stops and (not stops or failed.value.code == "non-finite")
