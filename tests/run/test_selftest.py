"""scripts/selftest.py says what holds, and of each injected bug what fails; a gap that is too wide gets its reason."""

import dataclasses
import json
import math
import re
import textwrap
from pathlib import Path

import pytest
import torch
from cases import ALGORITHMS
from conftest import ROOT, launch
from helpers import load, nightly

from algos import grpo
from common import errors, placement, weight_sync
from common.data import arithmetic, prompts
from common.errors import RunFailed
from common.processes.child import import_algorithm
from common.rollout import engines
from common.rollout.hf_engine import HFEngine
from common.run import checkpoint, diagnosis, guards
from common.trainer import batching, model, packing_check

selftest, selftest_file = load("scripts/selftest.py"), load("scripts/selftest_file.py")
variants = load("scripts/variants.py")
ROWS = ["rollout", "log-probs, as loaded", "gradient", "weight sync", "weights restored", "checkpoint"]
ROWS.append("Hugging Face export")


class Drops(HFEngine):
    """Never gets one of the parameters."""

    name = "model.layers.1.mlp.up_proj.weight"

    def load_weights(self, named_tensors):
        super().load_weights((name, tensor) for name, tensor in named_tensors if name != self.name)


class DropsNorm(Drops):
    name = "model.norm.weight"


class OnlyOnce(HFEngine):
    """Takes the first weights it is sent, and none after them."""

    def load_weights(self, named_tensors):
        super().load_weights(named_tensors if not self.weight_version else (pair for pair in named_tensors if False))


class OtherTemperature(HFEngine):
    """Samples at a temperature of its own."""

    own = 1.0

    def generate(self, prompt_ids, n, temperature, max_tokens, seed, done=None, reply=None):
        return super().generate(prompt_ids, n, self.own, max_tokens, seed)


@pytest.fixture(scope="module")
def problems(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("data") / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in arithmetic.problems("test")[:8]))
    return str(file)


@pytest.fixture
def tried(models, world, problems, monkeypatch, tmp_path, capsys):
    """Runs the self-test with a variant of transformers' generate; returns which row holds. No file may be left."""
    monkeypatch.setattr(placement, "init", lambda *given: world)
    monkeypatch.setattr(placement, "finish", lambda world, engine: engine.shutdown())  # the group is for all tests

    def tried(kind: str = "tied", engine=HFEngine, temperature: float = 0.7, **compute) -> dict[str, bool]:
        monkeypatch.setattr(engines, "start", lambda backend, *given, **sizes: engine(*given))
        compute, error = batching.Compute(**{"token_budget": 10_000, **compute}), None
        args = selftest.Args(
            models[kind],
            (problems,),
            compute=compute,
            temperature=temperature,
            max_response_tokens=24,
            dtype="float32",
            folder=str(tmp_path),
        )
        try:
            selftest.main(args)
        except RunFailed as failed:
            error = failed
        lines = capsys.readouterr().out.splitlines()
        table = [line for line in lines if line.endswith(("  holds", "  FAILS"))]
        rows = {name: line.endswith("holds") for name in ROWS for line in table if line.startswith(f"{name}  ")}
        assert not list(tmp_path.iterdir()) and list(rows) == ROWS and len(table) == len(ROWS)
        assert f"selftest: {sum(rows.values())} of 7 hold" in lines[-1]
        assert (error is None) == all(rows.values())
        if error:
            assert error.code == "selftest-failed" and "\n" not in str(error)
            assert [name for name in ROWS if f"{name} (" in str(error)] == [name for name in ROWS if not rows[name]]
        return rows

    return tried


@pytest.mark.parametrize(
    "kind, short, compute", [("untied", 32, {"token_budget": 100}), ("tied", 32, {}), ("tied and grouped", 1, {})]
)
def test_what_is_right_holds(tried, monkeypatch, kind, short, compute):
    """short: prompts of at least so many tokens are shared; with 1 all of them are."""
    monkeypatch.setattr(batching, "SHARED_PROMPT_MIN_TOKENS", short)
    assert all(tried(kind, **compute).values())


def trust(policy, *arguments, **named_arguments) -> None:
    policy.packed = policy.knows_logits = True
    policy.carries_state = False
    packing_check.attend_with(policy, "packed")


def lose_last_tokens(monkeypatch):
    contents_of = batching.contents_of

    def shortened(*arguments):
        contents = contents_of(*arguments)
        return [(prompt, [response[:-1] for response in responses]) for prompt, responses in contents]

    monkeypatch.setattr(batching, "contents_of", shortened)
    monkeypatch.setattr(model, "choose_forward", trust)  # it would see it first


def lose_last_micro_batch(monkeypatch):
    pack = batching.pack

    def shorter(*given):
        micro_batches = pack(*given)[:8]
        micro_batches[-1].last = True  # otherwise no gradient is reduced
        return micro_batches

    monkeypatch.setattr(batching, "pack", shorter)


def forget_the_optimizer(monkeypatch):
    monkeypatch.setattr(checkpoint, "fresh_models", list)  # all of them, as if none had stepped


def restore_nothing(monkeypatch):
    monkeypatch.setattr(checkpoint.dcp, "load", lambda *given, **named: None)


def export_badly(monkeypatch):
    write = checkpoint.write_model

    def rounded(policy, weights, *rest):
        write(policy, {name: tensor.bfloat16() for name, tensor in weights.items()}, *rest)

    monkeypatch.setattr(checkpoint, "write_model", rounded)


@pytest.mark.parametrize(
    "engine, bug, fail",
    [
        (Drops, None, ["weight sync"]),
        (DropsNorm, None, ["weight sync"]),
        (OnlyOnce, None, ["weights restored"]),
        (OtherTemperature, None, ["log-probs, as loaded", "weight sync", "weights restored"]),
        (HFEngine, lose_last_tokens, ["log-probs, as loaded", "weight sync", "weights restored"]),
        (HFEngine, lose_last_micro_batch, ["gradient"]),
        (HFEngine, forget_the_optimizer, ["checkpoint"]),
        (HFEngine, restore_nothing, ["checkpoint", "Hugging Face export"]),
        (HFEngine, export_badly, ["Hugging Face export"]),
    ],
)
def test_what_is_wrong_fails(tried, monkeypatch, engine, bug, fail):
    if bug:
        bug(monkeypatch)
    assert [name for name, holds in tried("tied", engine).items() if not holds] == fail


@pytest.mark.slow
@pytest.mark.parametrize("ranks, backend, rank", [(1, "vllm", 0), (2, "hf", 0), (1, "hf", 4)])
def test_the_command_line(models, tmp_path, ranks, backend, rank):
    flags = ["--model", models["tied"], "--rollout-backend", backend, "--max-response-tokens", 24, "--lora-rank", rank]
    result = launch(ROOT / "scripts/selftest.py", *flags, ranks=ranks, cwd=tmp_path)
    assert "selftest: 7 of 7 hold" in result.stdout and f"{16 * ranks} responses" in result.stdout
    assert not list(tmp_path.iterdir())


@pytest.fixture
def make(models, world, problems):
    """The probe of a run, with a variant of transformers' generate."""

    def make(kind: str = "untied", engine=HFEngine) -> diagnosis.GapProbe:
        policy = model.load(models[kind], world, torch.float32)
        asked = prompts.load((problems,), prompts.Source(), "train", arithmetic.tokenizer(), 64)
        sampler = engine(models[kind], [1], world, torch.float32)
        return diagnosis.GapProbe(policy, sampler, asked, 0.7, 24, batching.Compute(token_budget=10_000), world)

    return make


def moved(probe) -> None:
    """The policy as after some updates."""
    selftest.perturb(probe.policy, probe.world, 0.15)


def explained(probe, bound: float = 0.05) -> tuple[str, str]:
    waited = []
    out = diagnosis.explain_gap(probe, probe.prompts[:8], lambda: waited.append(True), bound)
    assert waited and "\n" not in out[1]
    return out


def test_stale_weights_are_named(make):
    probe = make("tied")
    moved(probe)
    code, why = explained(probe)
    assert code == "stale-weights" and "the engine had not got the trainer's weights" in why


def test_weights_are_not_blamed_for_a_gap_that_is_small_enough(make):
    """It shrinks, too, when they are sent once more."""
    probe = make("tied")
    moved(probe)
    assert explained(probe, bound=10.0)[0] == "logprob-gap"


def test_another_temperature_is_described(make):
    """Sending the weights again changes nothing."""
    code, why = explained(make("untied", OtherTemperature))
    assert code == "logprob-gap" and "that the engine samples at --temperature 0.7" in why


def test_what_is_none_of_these_is_described(make):
    """Sending the weights again does not bring the one that never arrives."""
    probe = make("untied", Drops)
    moved(probe)
    weight_sync.push(probe.policy, probe.engine)
    code, why = explained(probe, bound=0.002)
    assert code == "logprob-gap"
    assert re.search(r"sent once more, it is 0\.\d+: check that all weights arrive", why), why


def test_a_gap_that_is_gone_is_not_explained_away(make):
    code, why = explained(make("untied"))
    assert code == "logprob-gap" and "this step's were sampled with other weights" in why


def test_the_gap_is_measured_by_hand(make, world):
    """Log-probs off by 0.1 at each first token and by 0.3 at the rest."""
    probe = make("untied")
    batch = probe.sample(probe.some_prompts(), seed=1)
    batch.rollout_logprobs += 0.3 * batch.response_mask
    batch.rollout_logprobs[:, 0] -= 0.2
    gap, tokens = probe.gap(batch), int(batch.response_mask.sum())
    assert gap.largest == pytest.approx(0.3, abs=1e-4)
    assert gap.mean == pytest.approx(0.3 - 0.2 * len(batch) / tokens, abs=1e-4)
    batch.rollout_logprobs[0, 0] = torch.nan
    assert probe.gap(batch).largest == torch.inf


@pytest.mark.parametrize(
    "gap, staleness, stops", [(0.04, 0.0, False), (0.06, 0.0, True), (0.4, 0.5, False), (0.6, 0.5, True)]
)
def test_a_run_asks_why_only_where_it_stops(gap, staleness, stops):
    asked = []
    explain = lambda bound: asked.append(bound) or ("stale-weights", "it is so")
    metrics = {"step": 3, "mismatch/logprob_abs_mean": gap, "mismatch/staleness": staleness}
    if not stops:
        guards.check_logprob_gap(metrics, 0.05, explain)
    else:
        with pytest.raises(RunFailed) as failed:
            guards.check_logprob_gap(metrics, 0.05, explain)
        assert failed.value.code == "stale-weights"
        bound = 0.5 if staleness else 0.05
        assert f"disagree by {gap} per token, and --max-logprob-gap allows {bound}; it is so" in str(failed.value)
    assert asked == [0.05] * stops


# An algorithm's file


@pytest.fixture
def fork(tmp_path):
    """Writes a changed copy of an algorithm's file to a folder outside the repository."""

    def fork(name: str, *changes: tuple[str, str]) -> Path:
        text = (ROOT / f"algos/{name}.py").read_text()
        for before, after in changes:
            assert text.count(before) == 1, before
            text = text.replace(before, after)
        file = tmp_path / "mine.py"
        file.write_text(text)
        return file

    return fork


@pytest.fixture
def holds(world, problems, monkeypatch, tmp_path, capsys):
    """Tries a file; returns which model's loss and masks hold, and the lines about the others. No file may be left."""
    monkeypatch.setattr(placement, "init", lambda *given, **named: world)
    monkeypatch.setattr(placement, "finish", lambda *given: None)  # the group is for all tests
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(selftest_file, "ROWS_PER_UPDATE", 12)
    monkeypatch.setattr(selftest_file.tempfile, "tempdir", str(tmp_path / "temporary"))

    def holds(file: Path, **flags) -> tuple[dict[str, bool], str]:
        algorithm, code = import_algorithm(file), 0
        given = {"dataset": (problems,), "mini_batches": 2, "max_response_tokens": 8, **flags}
        try:
            selftest_file.main(algorithm, algorithm.Args(**{**algorithm.EMBEDDED, **given}))
        except SystemExit as left:
            code = left.code
        lines = capsys.readouterr().out.splitlines()
        table = [line for line in lines if line.endswith(("  holds", "  FAILS"))]
        rows = {line.partition("  ")[0]: line.endswith("holds") for line in table}
        assert lines[len(table)].startswith(f"selftest: {sum(rows.values())} of {len(rows)} hold, ")
        assert code == (0 if all(rows.values()) else 1) and not list((tmp_path / "temporary").iterdir())
        models: dict[str, bool] = {}
        for label, right in rows.items():
            name = re.fullmatch("(?:loss|mask) of (.*)", label)[1]
            models[name] = models.get(name, True) and right
        return models, "\n".join(lines[len(table) + 1 :])

    return holds


@pytest.mark.parametrize(
    "name, flags, models",
    [
        ("grpo", {"kl_coef": 0.1, "epochs": 2, "tis_cap": 2.0}, ["policy"]),
        ("dr_grpo", {"mini_batches": 1}, ["policy"]),
        ("max_rl", {}, ["policy"]),
        ("gspo", {}, ["policy"]),
        ("cispo", {}, ["policy"]),
        ("rloo", {}, ["policy"]),
        ("reinforce_pp", {"baseline": "group"}, ["policy"]),
        ("remax", {}, ["policy"]),
        ("dapo", {"overlong_cache": 4}, ["policy"]),
        ("ppo", {"critic_warmup_steps": 1}, ["policy", "critic"]),
        ("prime", {}, ["policy", "prm"]),
        ("opd", {}, ["policy"]),
        ("opd", {"full_vocabulary": True}, ["policy"]),
        ("sdpo", {}, ["policy"]),
        ("sdpo", {"full_vocabulary": False}, ["policy"]),
    ],
)
def test_the_loss_of_each_algorithm_holds(holds, name, flags, models):
    assert holds(ROOT / f"algos/{name}.py", **flags) == (dict.fromkeys(models, True), "")


DIFFS = variants.variants(variants.PAGE.read_text())
SAMPLING = [name for name, diff in DIFFS.items() if variants.base(diff) != "algos/dpo.py"]
# Masks of tokens and of sequences, weights of a group, other denominators and batches. And those that no test of
# test_variants.py runs in the whole loop.
EACH_PUSH = {"dppo", "sequence-mask", "tpo", "token-mean", "zero-variance-filter", "spo", "flash-reinforce"}
EACH_PUSH |= {"clip-cov", "kl-cov", "opo", "lite-ppo"}


@pytest.mark.parametrize("name", [name if name in EACH_PUSH else nightly(name) for name in SAMPLING])
def test_the_loss_of_each_variant_holds(holds, tmp_path, name):
    """The diffs of docs/variants.md, in the whole loop. Their functions are compared with the peers' in test_parity.

    Files that sample nothing can't be tried so. test_variants.py runs those.
    """
    file = tmp_path / "mine.py"
    file.write_text(variants.source(name))
    flags = {"tis_cap": 2.0}
    if name == "dppo":
        flags = {}
    if name == "flash-reinforce":  # it has one update for each batch
        flags = {"mini_batches": 1}
    if name == "spo":
        flags = {"group_size": 1}
    assert holds(file, **flags) == ({"policy": True}, "")


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("variant", ["icepop", "sequence-weights", "sequence-mask", "geometric-mask"])
def test_importance_weights_fit_every_file(name, variant):
    """Ratios of two responses: e^0, e^1 and e^2; e^0 and e^-1."""
    mask = torch.tensor([[True, True, True], [True, True, False]])
    old, sampled = torch.tensor([[0.0, 1.0, 2.0], [0.0, -1.0, torch.nan]]), torch.zeros(2, 3)
    weights = variants.load(variant, ROOT / f"algos/{name}.py").rollout_weights(old, sampled, mask, 2.0)
    expected = {
        "icepop": [1, 0, 0, 1, 0],
        "sequence-weights": [2, 2, 2, 1 / math.e, 1 / math.e],
        "sequence-mask": [0, 0, 0, 1 / math.e, 1 / math.e],
        "geometric-mask": [0, 0, 0, 1, 1],  # geometric means of e and 0.61
    }[variant]
    assert torch.allclose(weights[mask], torch.tensor(expected).float())


def test_the_delight_gate_passes_surprising_successes_and_holds_back_surprising_failures():
    """A success of advantage 2 and a failure of -2, of two tokens each: an expected one (p = 0.9) and a surprising one
    (p = 0.05). Ratios of 1.1 are not clipped. The gate is that of the current policy, and has no gradient.
    """
    surprisal = -torch.tensor([[0.9, 0.05, math.nan]]).log().expand(2, 3)
    logprobs = (-surprisal).clone().requires_grad_()
    mask = torch.tensor([[True, True, False]]).expand(2, 3)
    old = logprobs.detach() - math.log(1.1)
    gate = variants.load("delight-gate")

    def gradient(old_logprobs: torch.Tensor) -> torch.Tensor:
        advantages = torch.tensor([2.0, -2.0])
        settings = {"clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.0, "denominator": 1.0}
        loss = gate.policy_loss(logprobs, old_logprobs, None, advantages, mask, **settings)
        assert loss.isfinite(), "NaN outside the mask changes nothing"
        return torch.autograd.grad(loss, logprobs)[0][:, :2]

    delight = [2 * math.log(1 / 0.9), 2 * math.log(1 / 0.05)]
    success = [-1.1 / (1 + math.exp(-value)) for value in delight]  # -A / 2 tokens = -1
    failure = [1.1 / (1 + math.exp(value)) for value in delight]
    assert torch.allclose(gradient(old), torch.tensor([success, failure]))
    # GRPO's clip is still there: ratios of 1.5 have no gradient where the advantage is positive.
    clipped = gradient(logprobs.detach() - math.log(1.5))
    assert clipped[0].tolist() == [0, 0] and (clipped[1] > 0).all()


def test_the_delight_gate_needs_no_importance_weights_for_batches_in_flight():
    layout = placement.Layout(rollout_placement="split", max_inflight_batches=2)
    with pytest.raises(errors.BadInput, match="--tis-cap"):
        grpo.check_args(grpo.Args(layout=layout))
    gate = variants.load("delight-gate")
    gate.check_args(gate.Args(layout=layout))


def test_a_diff_that_no_longer_fits_says_where():
    with pytest.raises(
        errors.BadInput,
        match="0 places .*algos/grpo.py.*\nold line",
    ):
        variants.apply("--- algos/grpo.py\n@@\n-old line\n+new line\n", "another line\n")
    with pytest.raises(errors.BadInput, match="2 places"):
        variants.apply("--- algos/grpo.py\n@@\n-old line\n+new line\n", "old line\nanother line\nold line\n")


def test_the_loss_of_a_right_fork_holds(holds, fork):
    """It takes its mini-batches in another order in each step."""
    in_turn = "for mini_batch in mini_batches * args.epochs:"
    shuffled = "for mini_batch in [mini_batches[i] for i in torch.randperm(len(mini_batches))]:"
    file = fork("grpo", (in_turn, shuffled))
    assert holds(file) == ({"policy": True}, "")


@dataclasses.dataclass
class Bug:
    """A wrong change of an algorithm's file, and what the self-test says of it."""

    file: str  # name of the algorithm
    changes: list[tuple[str, str]]  # (lines of the file, what stands there instead)
    messages: list[str]  # regular expressions, one for each line
    flags: dict = dataclasses.field(default_factory=dict)


DIFFERS = (
    r"loss of policy: in \d+ micro-batches instead of one the gradient differs by [\d.]+ % .*: is something divided by"
)
MASK = (
    r"mask of policy: with other numbers where response_mask is False the gradient differs by [\d.]+ % .*: does a sum"
)
DENOMINATOR = "denominator=denominator,\n                        token_weights"
VALUE_DENOMINATOR = "clip=args.value_clip,\n                        denominator=denominator"
MEAN_OVER_ROWS = (".sum(1) / lengths.clamp(min=1)).sum() / denominator", ".sum(1) / lengths.clamp(min=1)).mean()")
COLUMN = "advantages = advantages[:, None]  # (n, 1); leave this line out if each token has its own advantage\n"
ADVANTAGES = f"{COLUMN}    per_token"
CENTRED = "advantages = (advantages - advantages.mean())[:, None]\n    per_token"
WHITENED = "advantages = ((advantages - advantages.mean()) / advantages.std())[:, None]\n    per_token"


def update_of(name: str) -> str:
    """The lines of an algorithm's file from the gradient norm to zero_grad()."""
    text = (ROOT / f"algos/{name}.py").read_text()
    return re.search(r"^ *grad_norm = .*?zero_grad\(\)\n", text, re.DOTALL | re.MULTILINE)[0]


NOT_REPLACED = r"mask of policy: its log-probs or values stayed as they were: does the file call model.response_logp"

BUGS = {
    "divided by the rows of the micro-batch": Bug(
        "grpo",
        [(DENOMINATOR, DENOMINATOR.replace("=denominator", "=len(micro.rows)"))],
        [DIFFERS],
    ),
    "the same, with rows that are not packed": Bug(
        "grpo",
        [(DENOMINATOR, DENOMINATOR.replace("=denominator", "=len(micro.rows)"))],
        [DIFFERS],
        {"compute": batching.Compute(packing="off")},
    ),
    "divided by the tokens of the micro-batch": Bug(
        "rloo",
        [(DENOMINATOR, DENOMINATOR.replace("=denominator", "=micro.response_mask.sum()"))],
        [DIFFERS],
    ),
    "the mean of means over rows": Bug(
        "grpo",
        [MEAN_OVER_ROWS, ("loss.backward()", "(loss / len(mini_batch.micro_batches)).backward()")],
        [DIFFERS],
    ),
    "divided by the longest response": Bug(
        "grpo",
        [("/ lengths.clamp(min=1)", "/ lengths.max()")],
        [DIFFERS],
    ),
    "advantages centred": Bug(
        "grpo",
        [(ADVANTAGES, CENTRED)],
        [DIFFERS],
    ),
    "advantages whitened, one row alone": Bug(
        "grpo",
        [(ADVANTAGES, WHITENED)],
        [r"loss of all models: in \d+ micro-batches .*, and not otherwise, the run fails: step 1: train/grad_norm is"],
    ),
    "an optimizer step for each micro-batch": Bug(
        "grpo",
        [(update_of("grpo"), textwrap.indent(update_of("grpo"), "    "))],
        [r"loss of policy: 2 optimizer steps in the plain run, and \d+ in \d+ micro-batches .*: does optimizer.step"],
    ),
    "the critic's loss": Bug(
        "ppo",
        [(VALUE_DENOMINATOR, VALUE_DENOMINATOR.replace("=denominator", "=len(micro.rows)"))],
        [DIFFERS.replace("policy", "critic")],
    ),
    "a sum of negative log-probs without the mask": Bug(
        "grpo",
        [("((per_token * response_mask).sum(1)", "((-advantages * logprobs).sum(1)")],
        [MASK],
    ),
    "log-probs that the masked run cannot replace": Bug(
        "grpo",
        [
            ("import torch\n", "import torch\nfrom common.trainer.model import response_logprobs\n"),
            ("= model.response_logprobs(policy, micro", "= response_logprobs(policy, micro"),
        ],
        [NOT_REPLACED],
    ),
    "an update that masked tokens decide on": Bug(
        "grpo",
        [
            (
                "                optimizer.step()\n",
                "                if not (logprobs > 0.5).any():\n                    optimizer.step()\n",
            )
        ],
        [r"mask of policy: 2 optimizer steps in the plain run, and 0 with .*: does a condition before optimizer.step"],
    ),
    "advantages through masked tokens": Bug(
        "ppo",
        [("in_response = response_mask[:, t].bool()", "in_response = response_mask[:, t] >= 0")],
        [MASK],  # the critic's targets have a lambda of their own, which is 1
        {"lam": 0.9},  # with 1 the values of later tokens cancel out
    ),
    "a value loss of masked tokens": Bug(
        "ppo",
        [("    mask = response_mask.bool()\n    values,", "    mask = response_mask >= 0\n    values,")],
        [MASK.replace("policy", "critic")],
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_loss_that_depends_on_the_micro_batch_or_on_masked_tokens_is_found(holds, fork, bug):
    bug = BUGS[bug]
    rows, lines = holds(fork(bug.file, *bug.changes), **bug.flags)
    failing = [model for model, right in rows.items() if not right]
    assert failing == [re.match("(?:loss|mask) of (.*?):", message)[1] for message in bug.messages]
    for line, message in zip(lines.splitlines(), bug.messages, strict=True):
        assert re.match(message, line), line


def test_the_other_runs_go_on_with_the_gradients_of_the_first():
    """Otherwise Adam would turn rounding errors of small gradients into steps, and later gradients would differ."""
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer, first = torch.optim.SGD([weight], lr=1.0), selftest_file.Trial("plain")
    second = selftest_file.Trial("cut", first)
    for trial, gradient in ((first, [1.0, 2.0]), (second, [1.0, 2.1]), (second, [3.0, 4.0])):
        trial.trained, weight.grad = {"policy": (None, optimizer)}, torch.tensor(gradient)
        trial.before_update(optimizer)
        assert trial.gradients["policy"][-1][0].tolist() == pytest.approx(gradient)
        assert weight.grad.tolist() == ([1.0, 2.0] if gradient[1] < 3 else [3.0, 4.0])  # one update more has its own


def test_what_cannot_be_compared_fails(world):
    def wrong(one: list, several: list, micro_batches: int = 3) -> str:
        plain = selftest_file.Trial("plain")
        cut = selftest_file.Trial("cut", plain)
        plain.gradients["policy"], cut.gradients["policy"], cut.micro_batches = one, several, micro_batches
        return selftest_file.compare(plain, cut, "policy", world).wrong

    gradient = [torch.ones(2)]
    other = [torch.tensor([1.0, 1.0002])]
    not_a_number = [torch.full((2,), torch.nan)]
    assert wrong([gradient], [gradient]) == ""
    assert "differs by 0.014 % from" in wrong([gradient], [other])
    assert "it was not updated in 10 steps" in wrong([], [])
    assert "never cut into micro-batches" in wrong([gradient], [gradient], micro_batches=1)
    for nothing in ([torch.zeros(2)], not_a_number, []):
        assert "all its gradients are 0 or NaN" in wrong([nothing], [nothing])
    assert "differs by inf %" in wrong([gradient], [[]])
    assert "differs by inf %" in wrong([gradient], [not_a_number])
    # A tiny gradient, next to a large one, is rounding error.
    assert wrong([[torch.full((2,), 1e-7)], gradient], [[torch.full((2,), 2e-7)], gradient]) == ""


@pytest.mark.parametrize(
    "text, said",
    [
        (None, "expected the file of an algorithm"),
        ("", "has no dataclass Args and no function main"),
        ("sft", "its Args does not extend Flags"),
    ],
)
def test_what_is_no_algorithm_is_refused(tmp_path, text, said):
    file = tmp_path / "mine.py"
    if text is not None:
        file.write_text((ROOT / "algos/sft.py").read_text() if text else text)
    with pytest.raises(errors.BadInput, match=said):
        selftest_file.launch(str(file))
    with pytest.raises(errors.BadInput, match="mine.py: "):
        selftest.main(selftest.Args(file=str(file)))


@pytest.mark.slow
def test_the_command_line_takes_a_file_from_anywhere(fork, problems, tmp_path):
    """It imports a neighbour, and is started from its own folder. Its flags are those of the file."""
    (tmp_path / "neighbour.py").write_text("def local(rows):\n    return len(rows)\n")
    imported = ("import torch\n", "import torch\nfrom neighbour import local\n")
    fork("grpo", imported, (DENOMINATOR, DENOMINATOR.replace("=denominator", "=local(micro.rows)")))
    flags = ["--dataset", problems, "--max-response-tokens", 10, "--mini-batches", 2, "--clip-low", 0.1]
    result = launch(ROOT / "scripts/selftest.py", "mine.py", *flags, cwd=tmp_path, check=False)
    assert result.returncode == 1 and re.search(f"^{DIFFERS}", result.stdout, re.MULTILINE), result.stderr
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {"mine.py", "neighbour.py"}
