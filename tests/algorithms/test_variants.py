"""Variants of docs/variants.md: every gradient of a run by hand, and the formulas of papers whose code we can't call.

The runs are recorded and computed again as in test_main.py: one sequence at a time, with transformers' own forward.
"""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import by_hand
import pytest
import test_main
import torch
from by_hand import Case, Loss, Net, Row
from helpers import load, metrics
from recorder import Recording, Step, watch
from test_main import (
    EVERYTHING,
    MODEL,
    OFFLINE,
    PLAIN,
    case_of,
    check_offline,
    gradient,
    row_of,
    same,
    written,
)
from test_main import judged as in_test_main

from common import errors, rewards
from common.data import arithmetic
from common.data.pairs import load_pairs
from common.data.prompts import Prompt
from common.data.tokenizer import load_tokenizer
from common.processes.child import import_algorithm
from common.rewards import mixture
from common.rewards.grading import Item, Result
from common.rewards.mixture import Rewards

variants = load("scripts/variants.py")


def judged(items: list[Item], lengths: list[int], truncated: list[bool]) -> list[Result]:
    """Scores of test_main.py, with 0.5 instead of 0.25: some responses then have exactly their group's mean."""
    results = in_test_main(items, lengths, truncated)
    return [replace(result, score=0.5) if result.score == 0.25 else result for result in results]


def graded(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.graded]


def mean_of_response(row: Row) -> float:
    return 1 / len(row.response)


def whole_response(row: Row) -> float:
    return 1.0


def z_scores(case: Case) -> list[float]:
    return case.of_group(by_hand.z_scores, by_hand.scores(case))


def entropy_bonus(case: Case) -> Loss:
    """GRPO's loss minus the mean over responses of the mean entropy of their tokens."""
    policy_loss = by_hand.by_response(case, z_scores(case), mean_of_response)

    def loss(rows: list[Row], net: Net) -> torch.Tensor:
        total = policy_loss(rows, net)
        for row in graded(rows):
            log_p = (net.at_responses(row) / case.args.temperature).log_softmax(-1)
            entropies = -(log_p.exp() * log_p).sum(-1)
            total = total - case.args.entropy_coef * entropies.mean() / len(graded(rows))
        return total

    return loss


def tpo(case: Case) -> Loss:
    """The mean over groups of -sum q log p (eq. 1-3), and GRPO's KL term. Importance weights scale only gradients."""
    args = case.args

    def loss(rows: list[Row], net: Net) -> torch.Tensor:
        left = graded(rows)
        groups = [left[first : first + args.group_size] for first in range(0, len(left), args.group_size)]
        total = torch.zeros(())
        for group in groups:
            scores = [row.score for row in group]
            average = by_hand.mean(scores)
            std = math.sqrt(by_hand.mean([(score - average) ** 2 for score in scores]))
            u = torch.tensor([(score - average) / std if std else 0.0 for score in scores])
            old = torch.tensor([sum(row.old) for row in group])
            q = (old.log_softmax(0) + u / args.eta).softmax(0)
            sums = []
            for row in group:
                logprobs = net.logprobs(row, args.temperature)
                change = by_hand.importance(case, row) * (logprobs - logprobs.detach())
                sums.append(logprobs.detach().sum() + change.sum())
                if args.kl_coef:
                    total = total + by_hand.kl_term(case, row, logprobs).mean() / args.group_size
            total = total - (q * torch.stack(sums).log_softmax(0)).sum()
        return total / max(1, len(groups))

    return loss


def snapshot_kl(case: Case) -> Loss:
    """The mean over responses of the clipped loss of their whole ratio, and of k3 to the old policy."""
    args = case.args
    advantages = []
    for group in case.groups:
        scores = [row.score for row in group]
        average = by_hand.mean(scores)
        std = math.sqrt(by_hand.mean([(score - average) ** 2 for score in scores]))
        advantages += [(score - average) / (std + 1e-6) if len(set(scores)) > 1 else 0.0 for score in scores]
    of_row = dict(zip(map(id, case.rows), advantages))

    def loss(rows: list[Row], net: Net) -> torch.Tensor:
        total = torch.zeros(())
        for row in graded(rows):
            logprobs = net.logprobs(row, args.temperature)
            log_ratio = (logprobs - torch.tensor(row.old)).sum()
            change = (by_hand.importance(case, row) * (logprobs - logprobs.detach())).sum()
            ratio = log_ratio.detach().exp() * change.exp()
            total = total + by_hand.clipped(case, of_row[id(row)], ratio, *by_hand.clips(args))
            total = total + args.kl_coef * (torch.exp(-log_ratio) + log_ratio - 1)
        return total / max(1, len(graded(rows)))

    return loss


def zero_variance_filter(case: Case) -> Loss:
    policy_loss = by_hand.by_response(case, z_scores(case), mean_of_response)
    counted = set()
    for group in case.groups:
        if len({row.score for row in group}) > 1:
            counted |= set(map(id, group))
    return lambda rows, net: policy_loss([row for row in rows if id(row) in counted], net)


def no_std(case: Case) -> Loss:
    return by_hand.by_response(case, case.of_group(by_hand.centred, by_hand.scores(case)), mean_of_response)


def token_mean(case: Case) -> Loss:
    sum_by_responses = by_hand.by_response(case, z_scores(case), whole_response)

    def loss(rows: list[Row], net: Net) -> torch.Tensor:
        tokens = sum(len(row.response) for row in graded(rows))
        return sum_by_responses(rows, net) * len(graded(rows)) / max(1, tokens)

    return loss


def group_mean(case: Case) -> Loss:
    scores = [sum(by_hand.with_kl(case, row)) if row.graded else 0.0 for row in case.rows]
    return by_hand.by_token(case, by_hand.on_each_token(case, case.of_group(by_hand.centred, scores)))


def negative_only(case: Case) -> Loss:
    return by_hand.by_response(case, [row.correct - 1.0 for row in case.rows], mean_of_response)


def coin_kl(p: float, q: float) -> float:
    """KL of two coins."""
    p, q = (min(max(probability, 1e-6), 1 - 1e-6) for probability in (p, q))
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def flash_reinforce(case: Case) -> Loss:
    args = case.args
    average = by_hand.mean([row.score for row in graded(case.rows)])

    def loss(rows: list[Row], net: Net) -> torch.Tensor:
        total = torch.zeros(())
        for row in graded(rows):
            logprobs = net.logprobs(row, args.temperature)
            now = logprobs.tolist()
            kls = [coin_kl(math.exp(engine), math.exp(policy)) for engine, policy in zip(row.sampled_with, now)]
            stays = by_hand.mean(kls) <= args.delta
            case.clipped.add("stays" if stays else "leaves")
            if stays:
                ratios = torch.tensor([math.exp(policy - engine) for engine, policy in zip(row.sampled_with, now)])
                total = total - (row.score - average) * (ratios * logprobs).mean()
            if args.kl_coef:
                total = total + by_hand.kl_term(case, row, logprobs).mean()
        return total / max(1, len(graded(rows)))

    return loss


LOSSES = {
    "entropy-bonus": entropy_bonus,
    "tpo": tpo,
    "snapshot-kl": snapshot_kl,
    "zero-variance-filter": zero_variance_filter,
    "no-std": no_std,
    "token-mean": token_mean,
    "group-mean": group_mean,
    "negative-only": negative_only,
    "flash-reinforce": flash_reinforce,
}
UPDATES_WITHOUT_SIGNAL = ("entropy-bonus", "tpo", "flash-reinforce")  # graded rows are enough for an update
OWN = {
    "entropy-bonus": {"entropy_coef": 0.2},
    "tpo": {"eta": 0.6},
    "snapshot-kl": {"learning_rate": 1e-4},  # the ratio of a whole response moves further than those of its tokens
    "flash-reinforce": {"delta": 0.29, "mini_batches": 1, "epochs": 1},
}
NEGLIGIBLE = 1e-6  # a gradient of this norm is rounding


def variant(name: str, folder: Path) -> ModuleType:
    """A variant, in a file as a user would have it."""
    file = folder / "mine.py"
    file.write_text(variants.source(name))
    return import_algorithm(file)


@pytest.mark.parametrize("flags", [EVERYTHING, PLAIN], ids=["all options", "no options"])
@pytest.mark.parametrize("name", LOSSES)
def test_every_update_of_a_variant_is_its_formula(world, monkeypatch, tmp_path, name, flags):
    """In several micro-batches, which may share a group, and several mini-batches; some groups are not graded."""
    algorithm = variant(name, tmp_path)
    flags = flags | OWN.get(name, {})
    known = {field: value for field, value in flags.items() if field in algorithm.Args.__dataclass_fields__}
    args = algorithm.Args(**algorithm.EMBEDDED | known | {"model": MODEL}, run_dir=str(tmp_path / "run"))
    monkeypatch.setattr(mixture, "SETUP_STEPS", 0)
    monkeypatch.setattr(mixture, "MAX_UNGRADED_SHARE", 1.0)
    monkeypatch.setattr(test_main, "judged", judged)
    monkeypatch.setattr(rewards, "load", lambda *given: Rewards({"judged": judged}, {"judged": 1.0}))
    recording = watch(monkeypatch, world, noise=0.3)
    algorithm.main(args)
    assert len(recording.steps) == args.steps
    of_mean = 0
    sides = set()
    for step in recording.steps:
        case = case_of(recording, step, args, name)
        of_mean += count_of_mean(case)
        # A KL term is a reason for an update, except in groups that are filtered out.
        always = name in UPDATES_WITHOUT_SIGNAL or (flags["kl_coef"] > 0 and name != "zero-variance-filter")
        check_updates(case, step, LOSSES[name](case), always)
        sides |= case.clipped
    assert of_mean or name != "zero-variance-filter", "no response tells apart an advantage of 0 and equal rewards"
    assert {"stays", "leaves"} <= sides or name != "flash-reinforce"
    assert {"low", "high"} <= sides or name != "snapshot-kl" or flags["kl_coef"] == 0


def count_of_mean(case: Case) -> int:
    """Number of responses with an advantage of 0 in groups of unequal scores."""
    count = 0
    for group in case.groups:
        scores = [row.score for row in group]
        if len(set(scores)) > 1:
            count += scores.count(by_hand.mean(scores))
    return count


def check_updates(case: Case, step: Step, loss: Loss, always: bool) -> None:
    """Each update of a step has the gradient of this loss. always: graded rows are enough for an update."""
    args = case.args
    size = len(case.rows) // args.mini_batches
    updates = list(step.updates)
    for mini_batch in list(range(args.mini_batches)) * args.epochs:
        rows = case.rows[mini_batch * size : (mini_batch + 1) * size]
        before = updates[0].before if updates else step.after[0]
        expected, norm, _ = gradient(loss, rows, Net(MODEL, before), args.max_grad_norm)
        if not graded(rows) or (norm == 0 and not always):
            continue  # no optimizer step: Adam's momentum would move the weights
        where = f"step {case.step}, mini-batch {mini_batch}"
        assert updates, where
        if norm > NEGLIGIBLE:
            assert same(updates[0].gradient, expected), where
        else:
            assert all(tensor.norm() <= NEGLIGIBLE for tensor in updates[0].gradient.values()), where
        updates = updates[1:]
    assert not updates, "an update too many"


def judged_alone(items: list[Item], lengths: list[int], truncated: list[bool]) -> list[Result]:
    """Scores of 0, 0.5 and 1 that depend on the texts alone, as responses to one prompt may be graded one by one."""
    results = []
    for item in items:
        number = sum(map(ord, item.response))
        result = Result((0.0, 0.5, 1.0)[number % 3], 0.0)
        if sum(map(ord, item.prompt)) % 5 == 0 and number % 2:
            result = Result(None, None, None, {"error": "down"})
        results.append(result)
    return results


@dataclass
class Tracked:
    """What SPO knows of a prompt, by hand."""

    successes: float = 0.5
    failures: float = 0.5
    last: Row | None = None
    logprobs: list[float] | None = None  # of the last response, by the policy after the updates of its step

    def after(self, net: Net, rows: list[Row], temperature: float) -> "tuple[Tracked, float]":
        """With the responses of a step, after its updates; and how far the policy has moved since the last of them."""
        drift = 0.0
        with torch.no_grad():
            if self.last:
                now = net.logprobs(self.last, temperature).tolist()
                drift = by_hand.mean([abs(a - b) for a, b in zip(now, self.logprobs)])
            logprobs = net.logprobs(rows[-1], temperature).tolist()
        rho = max(0.875, min(0.96, 2 ** (-drift / 0.06)))
        successes = rho * self.successes + sum(row.score for row in rows)
        failures = rho * self.failures + sum(1 - row.score for row in rows)
        return Tracked(successes, failures, rows[-1], logprobs), drift


def test_spo_tracks_the_value_of_each_prompt(world, monkeypatch, tmp_path):
    """Four prompts and six responses a step: two prompts are in it twice, and values have counts of earlier steps.

    Some responses are not graded.
    """
    flags = {"dataset": written(tmp_path, arithmetic.problems("train")[:4]), "prompts_per_step": 6, "group_size": 1}
    flags |= {"steps": 5, "learning_rate": 5e-5, "max_grad_norm": 0.3}
    algorithm = variant("spo", tmp_path)
    known = {field: value for field, value in EVERYTHING.items() if field in algorithm.Args.__dataclass_fields__}
    args = algorithm.Args(**algorithm.EMBEDDED | known | flags | {"model": MODEL}, run_dir=str(tmp_path / "run"))
    monkeypatch.setattr(mixture, "SETUP_STEPS", 0)
    monkeypatch.setattr(mixture, "MAX_UNGRADED_SHARE", 1.0)
    monkeypatch.setattr(test_main, "judged", judged_alone)
    monkeypatch.setattr(rewards, "load", lambda *given: Rewards({"judged": judged_alone}, {"judged": 1.0}))
    recording = watch(monkeypatch, world, noise=0.3)
    algorithm.main(args)

    prompts: dict[tuple[int, ...], Tracked] = {}
    seen, twice, ungraded, moved = 0, 0, 0, []
    for step in recording.steps:
        case = case_of(recording, step, args, "spo")
        of_rows = [prompts.setdefault(tuple(row.prompt), Tracked()) for row in case.rows]
        differences = [row.score - t.successes / (t.successes + t.failures) for row, t in zip(case.rows, of_rows)]
        left = [difference for row, difference in zip(case.rows, differences) if row.graded]
        average = by_hand.mean(left)
        std = math.sqrt(sum((a - average) ** 2 for a in left) / (len(left) - 1))
        advantages = [(a - average) / (std + 1e-8) for a in differences]
        check_updates(case, step, by_hand.by_response(case, advantages, mean_of_response), always=True)
        seen += sum(tracked.last is not None for tracked in of_rows)
        ungraded += sum(not row.graded for row in case.rows)
        net = Net(MODEL, step.after[0])
        graded = [row for row in case.rows if row.graded]
        twice += len(graded) - len({tuple(row.prompt) for row in graded})
        for prompt in {tuple(row.prompt) for row in graded}:
            of_prompt = [row for row in graded if tuple(row.prompt) == prompt]
            prompts[prompt], drift = prompts[prompt].after(net, of_prompt, args.temperature)
            moved.append(drift)
    assert twice and seen >= 8 and ungraded
    assert any(0.0035 < drift < 0.0116 for drift in moved), "a rho between its bounds"


def test_a_value_forgets_the_more_the_further_the_policy_has_moved():
    """With a drift of 0.01, rho is 2^(-1/6) = 0.891. It is at most 0.96 and at least 0.875."""
    module = variants.load("spo")
    for drift, rho in ((0.0, 0.96), (0.01, 2 ** (-1 / 6)), (1.0, 0.875)):
        value = module.Value(successes=3.0, failures=1.0)
        assert value.mean == 0.75
        value.add(scores=[0.25, 1.0], drift=drift)
        assert (value.successes, value.failures) == pytest.approx((3 * rho + 1.25, rho + 0.75))


def test_spo_whitens_the_graded_scores_minus_values():
    module = variants.load("spo")
    scores = torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    values = torch.tensor([0.5, 0.5, 0.9, 0.5], dtype=torch.float64)
    graded = torch.tensor([True, True, True, False])
    found = module.compute_advantages(scores, values, graded)
    differences = [0.5, -0.5, 0.1]
    average = 0.1 / 3
    std = math.sqrt(sum((a - average) ** 2 for a in differences) / 2)
    assert found.tolist() == pytest.approx([(a - average) / (std + 1e-8) for a in differences] + [0.0], rel=1e-9)
    assert not module.compute_advantages(torch.full((50,), 0.7), torch.full((50,), 0.5), torch.ones(50).bool()).any()


def test_spo_refuses_to_resume_and_groups(monkeypatch):
    module = variants.load("spo")
    with pytest.raises(errors.BadInput, match="--group-size"):
        module.check_args(module.Args(group_size=2))
    monkeypatch.setattr(module, "prepare", lambda *given: SimpleNamespace(resume="runs/mine/checkpoints/step_000010"))
    monkeypatch.setattr(module.job, "nothing_to_do", lambda settings: False)
    with pytest.raises(errors.BadInput, match="--resume .*values"):
        module.main(module.Args())


def ipo(args, chosen: "Response", rejected: "Response") -> torch.Tensor:
    margin = (chosen.sum - chosen.start) / chosen.length - (rejected.sum - rejected.start) / rejected.length
    return (margin - 1 / (2 * args.beta)) ** 2


def simpo(args, chosen: "Response", rejected: "Response") -> torch.Tensor:
    margin = args.beta * (chosen.sum / chosen.length - rejected.sum / rejected.length) - args.gamma
    right, swapped = 1 - args.label_smoothing, args.label_smoothing
    return -right * margin.sigmoid().log() - swapped * (-margin).sigmoid().log()


def apo_zero(args, chosen: "Response", rejected: "Response") -> torch.Tensor:
    raised = args.beta * (chosen.sum - chosen.start)
    lowered = args.beta * (rejected.sum - rejected.start)
    return 1 - raised.sigmoid() + lowered.sigmoid()


@dataclass
class Response:
    """Of a pair."""

    sum: torch.Tensor  # of its log-probs
    start: float  # the same under the reference
    length: int


@pytest.mark.parametrize(
    "name, pair_loss, flags",
    [
        ("ipo", ipo, {"beta": 0.4}),
        ("simpo", simpo, {"beta": 1.7, "gamma": 0.6, "label_smoothing": 0.1}),
        ("apo-zero", apo_zero, {"beta": 0.3}),
    ],
)
def test_every_update_on_pairs_is_the_formula(world, monkeypatch, tmp_path, name, pair_loss, flags):
    """The mean over the pairs, in several micro-batches. The reference is the model before its first update."""
    recording, args = on_pairs(world, monkeypatch, tmp_path, name, flags)
    reference = Net(MODEL)

    def loss_of(step: Step):
        def loss(_, net: Net) -> torch.Tensor:
            responses = [response_of(net, reference, row_of(step, number)) for number in range(len(step.batch))]
            losses = [pair_loss(args, *responses[first : first + 2]) for first in range(0, len(responses), 2)]
            return sum(losses) / len(losses)

        return loss

    check_offline(recording, args, tmp_path, loss_of)


def on_pairs(world, monkeypatch, tmp_path, name: str, flags: dict) -> tuple[Recording, object]:
    """A run of a variant of dpo.py, and its flags."""
    pairs = [json.loads(line) for line in arithmetic.PAIRS.read_text().splitlines()[:16]]  # more than a run takes
    own = {"model": MODEL, "dataset": written(tmp_path, pairs), "max_prompt_tokens": 64, "max_response_tokens": 48}
    algorithm = variant(name, tmp_path)
    folders = {"output": str(tmp_path / "out"), "run_dir": str(tmp_path / "run")}
    args = algorithm.Args(**OFFLINE | own | {"max_grad_norm": 0.02} | flags | folders)
    recording = watch(monkeypatch, world)
    algorithm.main(args)
    return recording, args


def response_of(net: Net, reference: Net, row: Row) -> Response:
    with torch.no_grad():
        start = reference.logprobs(row, 1.0).sum().item()
    return Response(net.logprobs(row, 1.0).sum(), start, len(row.response))


def test_every_update_of_kto_is_the_formula(world, monkeypatch, tmp_path):
    """The mean over responses of lambda (1 - sigma(+-(r - z))). z is of the responses to the file's next prompt, and
    those to the first one for the last.
    """
    own = {
        "beta": 0.3,
        "desirable_weight": 2.0,
        "undesirable_weight": 0.3,
        "learning_rate": 3e-4,
        "batch_size": 6,
        "max_grad_norm": 1e-3,
    }
    recording, args = on_pairs(world, monkeypatch, tmp_path, "kto", own)
    tokenizer = load_tokenizer(MODEL)[0]
    prompts, pairs = load_pairs(args.dataset, args.source, tokenizer, 64, 48)
    following = {tuple(prompts[i - 1].ids): pairs[prompts[i].key] for i in range(len(prompts))}
    assert len(following) == len(prompts)
    reference, seen = Net(MODEL), []

    def loss_of(step: Step):
        rows = [row_of(step, number) for number in range(len(step.batch))]
        others = [replace(row, response=following[tuple(row.prompt)][i % 2]) for i, row in enumerate(rows)]

        def loss(_, net: Net) -> torch.Tensor:
            rewards = [args.beta * (r.sum - r.start) for r in (response_of(net, reference, row) for row in others)]
            z = max(0.0, by_hand.mean([reward.item() for reward in rewards]))
            seen.append(z)
            losses = []
            for number, response in enumerate(response_of(net, reference, row) for row in rows):
                reward = args.beta * (response.sum - response.start)
                sign, weight = ((1, args.desirable_weight), (-1, args.undesirable_weight))[number % 2]
                losses.append(weight * (1 - (sign * (reward - z)).sigmoid()))
            return sum(losses) / len(losses)

        return loss

    check_offline(recording, args, tmp_path, loss_of)
    assert max(seen) > 0.01 and seen == pytest.approx([row["reward/z"] for row in metrics(tmp_path / "run")], abs=1e-4)


def test_the_reference_point_of_kto_is_a_mean_over_the_ranks_and_not_negative():
    module = variants.load("kto")
    rewards = torch.tensor([[0.5, 1.5], [-1.0, 2.0]])
    assert module.reference_point(rewards) == 0.75
    assert module.reference_point(rewards, lambda number: 3 * float(number)) == 0.75, "sum and count are of all ranks"
    assert module.reference_point(-rewards) == 0.0


def test_kto_takes_responses_to_another_prompt(tmp_path):
    """Files often have several rows of one prompt in a row."""
    module = variants.load("kto")
    prompts = [Prompt(f"d:{i}", "", [ids], None) for i, ids in enumerate((5, 5, 6, 5))]
    pairs = {prompt.key: [[i], [10 + i]] for i, prompt in enumerate(prompts)}
    others = module.with_other_responses(prompts, pairs)
    assert [others[prompt.key][0] for prompt in prompts] == [[2], [2], [3], [2]]
    with pytest.raises(errors.BadInput, match="--dataset"):
        module.with_other_responses(prompts[:2], pairs)


def small_batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """12 responses of 3 to 9 tokens to 3 prompts: log-probs before and after an update, and the mask. float64."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(3, 10, (12,), generator=generator)
    mask = torch.arange(9)[None] < lengths[:, None]
    old = -torch.rand(12, 9, generator=generator, dtype=torch.float64)
    change = 0.2 * torch.randn(12, 9, generator=generator, dtype=torch.float64)
    return old.masked_fill(~mask, torch.nan), (old + change).masked_fill(~mask, torch.nan), mask


# Unequal rewards; equal ones; equal but for rounding in float32, and with a reward that is exactly the group's mean.
SCORES = torch.tensor([1.0, 0.0, 0.25, 1.0, 0.7, 0.7, 0.7, 0.7, -3.0, 0.0, 3.0, 0.0])


@pytest.mark.parametrize("eta", [1.0, 0.4])
def test_the_gradient_of_tpo_is_that_of_the_cross_entropy_to_its_target(eta):
    """The paper's loss by autograd: the mean over groups of -sum q log p, with q proportional to p_old exp(u / eta).

    u are z-scores with the standard deviation over G. Ours is added up over micro-batches that cut through the groups.
    """
    module = variants.load("tpo")
    old, new, mask = small_batch()
    groups = SCORES.double().view(3, 4)
    std = groups.std(1, correction=0, keepdim=True)
    u = torch.where(std > 1e-6, (groups - groups.mean(1, keepdim=True)) / std.clamp(min=1e-6), 0.0)

    def sums(logprobs: torch.Tensor) -> torch.Tensor:
        return torch.stack([row[kept].sum() for row, kept in zip(logprobs, mask)]).view(3, 4)

    leaf = new.clone().requires_grad_()
    target = (sums(old).log_softmax(-1) + u / eta).softmax(-1)
    (-(target * sums(leaf).log_softmax(-1)).sum(-1)).mean().backward()

    advantages = module.compute_advantages(SCORES.double(), 4)
    weights = module.target_weights(new, old, advantages, mask, group_size=4, eta=eta)
    ours = new.clone().requires_grad_()
    for rows in ([0, 5, 7], [11], [1, 2, 3, 4, 6, 8], [9, 10]):
        loss = module.policy_loss(ours[rows], None, weights[rows], mask[rows], kl_coef=0.0, denominator=12)
        assert loss.isfinite(), "NaN outside the mask changes nothing"
        loss.backward()
    assert (ours.grad - leaf.grad)[mask].abs().max() <= 1e-6 * leaf.grad[mask].abs().max()
    assert not ours.grad[~mask].any()


def test_tpo_stands_still_where_the_policy_has_reached_its_target():
    """q is fixed before the first update. Without a difference in rewards it is the old policy."""
    module = variants.load("tpo")
    old, new, mask = small_batch()
    settings = {"group_size": 4, "eta": 1.0}
    equal = torch.zeros(12, dtype=torch.float64)
    assert module.target_weights(old, old, equal, mask, **settings).abs().max() < 1e-12
    # Adam would make full steps of rounding noise.
    many, all_of_it = torch.randn(256, 5), torch.ones(256, 5, dtype=torch.bool)
    assert not module.target_weights(many, many, torch.zeros(256), all_of_it, **settings).any()
    assert module.target_weights(new, old, equal, mask, **settings).abs().max() > 1e-3

    # A policy whose sums of log-probs moved by u, up to a constant, is the target.
    u = module.compute_advantages(SCORES.double(), 4)
    reached = old.clone()
    reached[:, 0] += u + 0.3
    assert module.target_weights(reached, old, u, mask, **settings).abs().max() < 1e-12


def test_snapshot_kl_is_the_loss_in_the_code_of_tpos_paper():
    """grpo_loss() of github.com/JeanKaddour/tpo on log-probs of whole responses, which it sums over a group."""
    module = variants.load("snapshot-kl")
    old, new, mask = small_batch()
    groups = SCORES.double().view(3, 4)
    spread = groups.std(1, correction=0, keepdim=True)
    u = torch.where(spread > 1e-6, (groups - groups.mean(1, keepdim=True)) / (spread + 1e-6), 0.0)  # theirs has 1e-8

    def sums(logprobs: torch.Tensor) -> torch.Tensor:
        return torch.stack([row[kept].sum() for row, kept in zip(logprobs, mask)]).view(3, 4)

    leaf = new.clone().requires_grad_()
    log_ratio = sums(leaf) - sums(old)
    ratio = log_ratio.exp()
    surrogate = torch.minimum(ratio * u, ratio.clip(0.8, 1.2) * u)
    kl = torch.exp(-log_ratio) + log_ratio - 1
    theirs = -(surrogate - 0.04 * kl).sum(1).mean() / 4  # we average over a group
    theirs.backward()

    settings = {"clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.04, "denominator": 12}
    advantages = module.compute_advantages(SCORES.double(), 4)
    ours = new.clone().requires_grad_()
    loss = module.policy_loss(ours, old, advantages, mask, **settings)
    loss.backward()
    assert loss.item() == pytest.approx(theirs.item(), rel=1e-6)
    assert (ours.grad - leaf.grad)[mask].abs().max() <= 1e-6 * leaf.grad[mask].abs().max()
    assert not ours.grad[~mask].any()
    dummy = torch.zeros_like(mask[:1])
    assert advantages[0] and module.policy_loss(new[:1], old[:1], advantages[:1], dummy, **settings) == 0
    clipped = module.clipped_tokens(new, old, advantages, mask, clip_low=0.2, clip_high=0.2)
    acts = ((u > 0) & (ratio > 1.2)) | ((u < 0) & (ratio < 0.8))
    assert clipped == (acts.view(-1) * mask.sum(1)).sum() > 0


def test_a_wrong_response_trains_whatever_its_group_scores():
    """Also in a group without a right one, where GRPO has no gradient."""
    module = variants.load("negative-only")
    correct = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0])
    assert module.compute_advantages(correct).tolist() == [0, -1, -1, 0, -1, -1, 0, 0]


def test_a_group_counts_if_its_rewards_differ():
    """Also if a response has the mean of its group. In float32 the mean of sixteen times 0.7 is not 0.7."""
    module = variants.load("zero-variance-filter")
    assert module.compute_advantages(SCORES, 4)[9] == 0
    assert module.has_signal(SCORES, 4).tolist() == [True] * 4 + [False] * 4 + [True] * 4
    assert module.has_signal(torch.tensor([0.0, -1.0, 1.0]), 3).all()
    assert not module.has_signal(torch.full((16,), 0.7), 16).any()


@pytest.mark.parametrize("delta, left", [(3e-3, 6), (float("inf"), 12)])
def test_the_gradient_of_flash_reinforce_is_that_of_its_formula(delta, left):
    """Minus the mean over all responses of A / T times the sum of (ratio, detached) log p, without those that left.

    The first six responses hardly drift. Ours is added up over micro-batches.
    """
    module = variants.load("flash-reinforce")
    engine, policy, mask = small_batch()
    policy[:6] = engine[:6] + 0.01 * (policy - engine)[:6]
    advantages = SCORES.double() - SCORES.double().mean()

    leaf = policy.clone().requires_grad_()
    total, stayed = 0.0, 0
    for row in range(12):
        now, before = leaf[row][mask[row]], engine[row][mask[row]]
        kls = [coin_kl(math.exp(p), math.exp(q)) for p, q in zip(before.tolist(), now.tolist())]
        if by_hand.mean(kls) <= delta:
            stayed += 1
            total = total - advantages[row] * ((now - before).exp().detach() * now).mean()
    (total / 12).backward()
    assert stayed == left

    graded = torch.ones(12, dtype=torch.bool)
    ours = policy.clone().requires_grad_()
    assert module.compute_advantages(SCORES.double(), graded).tolist() == pytest.approx(advantages.tolist(), rel=1e-12)
    for rows in ([0, 5, 7], [11], [1, 2, 3, 4, 6, 8], [9, 10]):
        settings = {"delta": delta, "kl_coef": 0.0, "denominator": 12}
        loss = module.policy_loss(ours[rows], engine[rows], None, advantages[rows], mask[rows], **settings)
        assert loss.isfinite(), "NaN outside the mask changes nothing"
        loss.backward()
    scale = leaf.grad[mask].abs().max()
    assert (ours.grad - leaf.grad.nan_to_num())[mask].abs().max() <= 1e-6 * scale and not ours.grad[~mask].any()


def test_equal_rewards_of_a_batch_have_no_advantage():
    """In float32 the mean of 48 times 0.7 is not 0.7, and Adam would make a step of the difference."""
    module = variants.load("flash-reinforce")
    graded = torch.arange(50) < 48
    rewards = torch.where(graded, 0.7, 0.0)
    assert not module.compute_advantages(rewards, graded).any()
    rewards[3] = 0.0
    advantages = module.compute_advantages(rewards, graded)
    assert (advantages[graded] != 0).all() and not advantages[~graded].any()


def test_flash_reinforce_refuses_a_second_update_of_a_batch():
    module = variants.load("flash-reinforce")
    module.check_args(module.Args(group_size=1))
    for flags in ({"mini_batches": 2}, {"epochs": 2}):
        with pytest.raises(errors.BadInput, match="one update"):
            module.check_args(module.Args(**flags))


def test_the_delight_gate_has_the_gradient_of_its_papers():
    """At a ratio of 1: -sigmoid(A surprisal) A, with a detached gate. GRPO divides it by the length of the response."""
    module = variants.load("delight-gate")
    _, policy, mask = small_batch()
    advantages = SCORES.double() - 0.4
    leaf = policy.clone().requires_grad_()
    gate = torch.sigmoid(advantages[:, None] * -policy)
    terms = torch.where(mask, gate * advantages[:, None] * torch.where(mask, leaf, 0.0), 0.0)
    (-terms.sum(1) / mask.sum(1)).mean().backward()

    ours = policy.clone().requires_grad_()
    settings = {"clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.0, "denominator": 12}
    for rows in ([0, 5, 7], [11], [1, 2, 3, 4, 6, 8], [9, 10]):
        module.policy_loss(ours[rows], policy[rows], None, advantages[rows], mask[rows], **settings).backward()
    assert (ours.grad - leaf.grad)[mask].abs().max() <= 1e-6 * leaf.grad[mask].abs().max()
