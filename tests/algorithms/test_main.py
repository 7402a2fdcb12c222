"""What main() of each algorithm makes of a rollout: every gradient, learning rate and call of the engine, by hand.

A run of three steps is recorded from outside (recorder.py). Its flags all differ from each other and from the defaults.
Then every gradient that an optimizer saw is computed again (by_hand.py) from three recorded facts: the weights before
that update, the responses, and their scores. So a wrong denominator, advantage, weight, temperature, clip, order of
clip and step, or a row that trains in the wrong mini-batch shows up as another gradient. The metrics and advantages
that a step reports are computed again, too.
"""

import importlib
import json
import math
from collections.abc import Callable
from functools import partial

import by_hand
import pytest
import torch
from by_hand import Case, Net, Row
from cases import ALGORITHM_FILES, ALGORITHMS
from recorder import Recording, Step, Update, watch

from algos import dapo
from common import rewards
from common.data import arithmetic
from common.data import prompts as data
from common.rewards import mixture
from common.rewards.grading import Item, Result
from common.rewards.mixture import Rewards
from common.run import job, sampling
from common.trainer.batching import Compute

SEED = 11
MODEL = str(arithmetic.WARM_START)
COMMON = {
    "rollout_backend": "hf",
    "source": data.TrainSource(eval_prompts=0),
    "compute": Compute(token_budget=120),  # several micro-batches in a mini-batch
    "max_logprob_gap": 1e9,
    "steps": 3,
    "prompts_per_step": 4,
    "group_size": 4,
    "max_response_tokens": 40,  # more than the longest response of most steps
    "temperature": 1.3,
    "mini_batches": 2,
    "learning_rate": 2e-3,
    "weight_decay": 0.07,
    "seed": SEED,
}
EVERYTHING = COMMON | {
    "clip": 0.06,
    "clip_low": 0.05,
    "clip_high": 0.09,
    "clip_dual": 1.12,
    "tis_cap": 1.2,
    "kl_coef": 0.3,
    "epochs": 2,
    "schedule": "linear",
    "warmup_steps": 2,
    "max_grad_norm": 0.03,
    "offload": "others",
}
PLAIN = COMMON | {
    "steps": 2,
    "schedule": "constant",
    "warmup_steps": 0,
    "max_grad_norm": 1e3,
    "tis_cap": 0.0,
    "kl_coef": 0.0,
    "offload": "all",
}
# What a file needs besides, in the first and in the second run.
OWN = {
    "gspo": [{"clip_low": 0.004, "clip_high": 0.006}, {}],
    "reinforce_pp": [{"baseline": "group"}, {}],
    "dapo": [{"gen_prompts": 8, "max_gen_batches": 7, "overlong_cache": 18}, {"gen_prompts": 0, "overlong_cache": 20}],
    "ppo": [
        {"lam": 0.9, "critic_lam": 0.7, "value_clip": 0.02, "critic_warmup_steps": 1, "critic_learning_rate": 3e-3},
        {"lam": 0.8, "critic_learning_rate": 1e-3},
    ],
    "prime": [
        {"beta": 0.6, "c_process": 0.4, "accuracy_range": (0.2, 0.8), "gen_prompts": 8, "prm_learning_rate": 3e-3},
        {"accuracy_range": (0.0, 1.0), "gen_prompts": 0},
    ],
    "opd": [{}, {"full_vocabulary": True}],
    "sdpo": [{"full_vocabulary": False, "teacher_rate": 0.4}, {"teacher_rate": 1.0}],
}
METRICS = {"policy": ("train", "policy"), "critic": ("critic", "value"), "prm": ("prm", "prm")}
# Every side of these has to have had an effect in the first run, or the test would not see it misplaced.
SIDES = {name: {"low", "high", "tis", "no tis"} for name in ALGORITHMS}
SIDES["dapo"] = SIDES["dapo"] | {"dual"}
SIDES["ppo"] = SIDES["ppo"] | {"value"}


def judged(items: list[Item], lengths: list[int], truncated: list[bool]) -> list[Result]:
    """Scores of 0 to 1 that only depend on the text; right and wrong is something else.

    The second of four responses can't be graded if its prompt has certain digits. If it has others, ReMax's greedy one
    can't be.
    """
    results = []
    greedy = len(items) == COMMON["prompts_per_step"]
    for place, item in enumerate(items):
        digits = sum(map(int, filter(str.isdigit, item.prompt)))
        if (digits % 4 == 2) if greedy else (digits % 4 == 0 and place % 4 == 1):
            results.append(Result(None, None, None, {"error": "down"}))
            continue
        number = sum(map(ord, item.response))
        results.append(Result((0.0, 0.25, 1.0)[number % 3], float(number // 3 % 2)))
    return results


@pytest.fixture
def record(world, monkeypatch, tmp_path) -> Callable[..., tuple[Recording, object]]:
    """Run main() of an algorithm with these flags; returns what was recorded, and the flags."""

    def record(name: str, flags: dict) -> tuple[Recording, object]:
        algorithm = importlib.import_module(f"algos.{name}")
        known = {field: value for field, value in flags.items() if field in algorithm.Args.__dataclass_fields__}
        others = {"teacher": str(arithmetic.TEACHER)} if name == "opd" else {}
        given = {**getattr(algorithm, "EMBEDDED", {}), **known, "model": MODEL, **others}
        args = algorithm.Args(**given, run_dir=str(tmp_path / "run"))
        # Otherwise a reward that fails in the first steps, or often, ends the run.
        monkeypatch.setattr(mixture, "SETUP_STEPS", 0)
        monkeypatch.setattr(mixture, "MAX_UNGRADED_SHARE", 1.0)
        monkeypatch.setattr(rewards, "load", lambda *given: Rewards({"judged": judged}, {"judged": 1.0}))
        recording = watch(monkeypatch, world, noise=0.3)
        algorithm.main(args)
        return recording, args

    return record


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    """Two gradients agree, up to rounding, in each parameter."""
    scale = max(gradient.norm() for gradient in theirs.values())
    return ours.keys() == theirs.keys() and all((ours[name] - theirs[name]).norm() <= 1e-3 * scale for name in theirs)


def gradient(loss: Callable, rows: list[Row], net: Net, max_norm: float) -> tuple[dict, float, float]:
    """The gradient of the loss of these rows, clipped; its norm before that; the loss."""
    net.model.zero_grad()
    value = loss(rows, net)
    if value.requires_grad:  # otherwise no row was graded
        value.backward()
    found = {name: parameter.grad for name, parameter in net.model.named_parameters() if parameter.grad is not None}
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in found.values()))
    return {name: g * min(1.0, max_norm / (norm + 1e-6)) for name, g in found.items()}, norm, value.item()


def rows_of(recording: Recording, step: Step, args) -> list[Row]:
    """The rows that should be trained on in this step, from the engine's answers alone."""
    calls = calls_of(recording, recording.steps.index(step), args)
    greedy = []
    if calls[-1].temperature == 0:
        *calls, greedy_call = calls
        greedy = graded(greedy_call)
    groups = []
    for call in calls:
        rows = graded(call, recording.noise)
        groups += [rows[first : first + call.n] for first in range(0, len(rows), call.n)]
    for group, baseline in zip(groups, greedy):
        for row in group:
            row.greedy_score = baseline.score
            row.greedy_graded = baseline.graded
    if hasattr(args, "gen_prompts"):  # dynamic sampling
        groups = [group for group in groups if all(row.graded for row in group) and keeps(group, args)]
        groups = groups[: args.prompts_per_step]
    for number, group in enumerate(groups):
        whole = all(row.graded for row in group) and (not greedy or greedy[number].graded)
        for row in group:
            if not whole:
                row.graded, row.score = False, 0.0
    return [row for group in groups for row in group]


def keeps(group: list[Row], args) -> bool:
    share = sum(row.correct for row in group) / len(group)
    low, high = getattr(args, "accuracy_range", (1e-6, 1 - 1e-6))
    return low <= share <= high


def graded(call, noise: float = 0.0) -> list[Row]:
    texts = partial(arithmetic.tokenizer().decode, skip_special_tokens=True)
    pairs = zip(call.answer.prompt_ids, call.answer.response_ids)
    results = judged([Item(texts(prompt), texts(response), None) for prompt, response in pairs], [], [])
    width = call.answer.rollout_logprobs.shape[1]
    rows = []
    for number, result in enumerate(results):
        ids = list(call.answer.response_ids[number])
        sampled_with = call.answer.rollout_logprobs[number, : len(ids)].tolist()
        changes = [(1.0, -1.0, 0.5)[(number * width + t) % 3] * noise for t in range(len(ids))]
        rows.append(
            Row(
                list(call.answer.prompt_ids[number]),
                ids,
                [logprob + change for logprob, change in zip(sampled_with, changes)],
                0.0 if result.score is None else result.score,
                result.acc or 0.0,
                result.score is not None,
            )
        )
    return rows


def calls_of(recording: Recording, number: int, args) -> list:
    """The calls of engine.generate for step `number`, which counts from 0."""
    if hasattr(args, "gen_prompts"):
        of_step = lambda call: (call.seed - args.seed * 2**20) // args.max_gen_batches - 1
        return [call for call in recording.calls if of_step(call) == number]
    per_step = len(recording.calls) // len(recording.steps)
    return recording.calls[number * per_step : (number + 1) * per_step]


def case_of(recording: Recording, step: Step, args, name: str) -> Case:
    """All facts of a step that the formulas need, computed with transformers' own forward."""
    case = Case(args, rows_of(recording, step, args), recording.steps.index(step) + 1)
    if step.rows is not None:
        for row, in_update in zip(case.rows, step.rows.tolist()):
            row.in_update = in_update
    policy, reference = Net(MODEL, step.before[0]), Net(MODEL)
    critic = Net(MODEL, step.before[1]) if by_hand.has_critic(args) else None
    if name == "opd":
        case.teacher = Net(str(arithmetic.TEACHER))
    if name == "sdpo":
        give_hints(case, recording)
    with torch.no_grad():
        for row in case.rows:
            nothing = [0.0] * len(row.response)
            row.old = policy.logprobs(row, args.temperature).tolist() if row.graded else nothing
            row.ref = reference.logprobs(row, args.temperature).tolist() if row.graded else nothing
            row.old_values = critic.values(row).tolist() if critic else nothing
            if row.graded:
                noise = [abs(old - sampled) for old, sampled in zip(row.old, row.sampled_with)]
                assert max(noise) < recording.noise + 1e-3, "the engine sampled with other weights or temperature"
        if name == "prime":
            phi = Net(MODEL, step.after[1])
            case.prm = [phi.logprobs(row, 1.0).tolist() for row in case.rows]
            case.prm_ref = [reference.logprobs(row, 1.0).tolist() for row in case.rows]
            before = Net(MODEL, step.before[1])
            case.prm_before = [before.logprobs(row, 1.0).tolist() for row in case.rows]
    return case


def give_hints(case: Case, recording: Recording) -> None:
    """SDPO: what the teacher of each row reads, and the weights that it has."""
    args = case.args
    tokenizer = arithmetic.tokenizer()
    solutions = {row["question"]: row["solution"] for row in arithmetic.problems("train")}
    for group in case.groups:
        for row in group:
            question = tokenizer.decode(row.prompt)
            right = [other for other in group if other is not row and other.correct]
            hint = tokenizer.decode(right[0].response, skip_special_tokens=True) if right else None
            if args.hint == "solution":
                hint = solutions[question]  # some are wrong: those demonstrations forget the carry
            if args.hint == "answer":
                first, second = question.rstrip("=").split("+")
                hint = str(int(first) + int(second))
            if hint is not None and row.graded:
                ids = tokenizer(f"{question}{hint}\n{question}")["input_ids"]
                row.hinted = Row(ids, row.response, [], 0.0, 0.0, True)
    earlier = recording.steps[: case.step]
    if args.teacher_rate < 1:
        weights = earlier[0].before[0]
        for step in earlier[:-1]:
            gone = {name: after - weights[name] for name, after in step.after[0].items()}
            weights = {name: before + args.teacher_rate * gone[name] for name, before in weights.items()}
        case.teacher = Net(MODEL, weights)
    elif not args.full_vocabulary:
        case.teacher = Net(MODEL, earlier[-1].before[0])


def order_of_updates(case: Case, name: str) -> list[tuple[str, int]]:
    """(model, mini-batch) of each update of a step."""
    mini_batches = list(range(case.args.mini_batches))
    if name == "prime":
        return [("prm", m) for m in mini_batches] + [("policy", m) for m in mini_batches]
    passes = mini_batches * getattr(case.args, "epochs", 1)
    if not by_hand.has_critic(case.args):
        return [("policy", m) for m in passes]
    both = ["critic"] if case.step <= case.args.critic_warmup_steps else ["critic", "policy"]
    return [(model, m) for m in passes for model in both]


def check_loads(recording: Recording, args) -> None:
    """Each model that main loads is in its memory plan, and lives where --offload says. A frozen one is resharded."""
    assert len(recording.models) == len(recording.plan.models) + len(recording.plan.others)
    offloads = [args.offload == "all"] + [args.offload != "none"] * (len(recording.loads) - 1)
    assert [named["offload"] for named in recording.loads] == offloads
    if getattr(args, "teacher_rate", 1.0) < 1:  # it moves, so it keeps float32 weights
        assert recording.loads[1]["frozen"] is False
    trained = [recording.model_of(optimizer) for optimizer in recording.optimizers]
    for frozen in recording.models:
        if frozen not in trained:
            by_load = 1  # model.load() calls it once
            times = recording.resharded.count(frozen) - by_load
            assert times >= args.steps, "its gathered weights stay beside its shards"


def learning_rate(args, model: str, step: int) -> float:
    if model == "critic":
        return args.critic_learning_rate
    if model == "prm":
        return args.prm_learning_rate
    late = getattr(args, "critic_warmup_steps", 0)
    decay = 1 - (step - late - 1) / (args.steps - late) if args.schedule == "linear" else 1.0
    return args.learning_rate * min(decay, (step - late) / max(1, args.warmup_steps))


def check_calls(recording: Recording, args, name: str) -> None:
    """What the engine was asked: all prompts once, at the right temperature, with other noise in every call."""
    for number in range(args.steps):
        calls = calls_of(recording, number, args)
        first = args.seed * 2**20 + number + 1
        if hasattr(args, "gen_prompts"):
            first = args.seed * 2**20 + (number + 1) * args.max_gen_batches
        if name == "remax":
            *calls, greedy = calls
            assert (greedy.n, greedy.temperature, greedy.max_tokens) == (1, 0.0, args.max_response_tokens)
            assert greedy.prompt_ids == calls[0].prompt_ids
        for draw, call in enumerate(calls):
            assert len(call.prompt_ids) == (getattr(args, "gen_prompts", 0) or args.prompts_per_step)
            assert call.n == args.group_size
            assert call.temperature == args.temperature
            assert call.max_tokens == args.max_response_tokens
            assert call.seed == first + draw
        sampled_so_far = recording.calls.index(calls_of(recording, number, args)[-1]) + 1
        assert sampled_so_far in recording.slept, "the engine kept its memory while the models were trained"
    sampled = [call for call in recording.calls if call.temperature > 0]
    asked = [tuple(ids) for call in sampled for ids in call.prompt_ids]
    assert len(set(asked)) == len(asked), "a prompt was asked twice in one epoch"
    assert len({call.seed for call in sampled}) == len(sampled), "two calls with the same noise"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_update_is_the_papers(record, tmp_path, name):
    """With everything switched on. test_main_plain.py has the same without, for another worker."""
    check_every_update(record, tmp_path, name, EVERYTHING | OWN.get(name, [{}, {}])[0])


def check_every_update(record, tmp_path, name: str, flags: dict) -> None:
    recording, args = record(name, flags)
    assert len(recording.steps) == args.steps
    check_calls(recording, args, name)
    check_loads(recording, args)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    sides, ungraded = set(), 0
    for step, line in zip(recording.steps, lines):
        case = case_of(recording, step, args, name)
        ungraded += sum(not row.graded for row in case.rows)
        assert [row.response for row in case.rows] == [list(ids) for ids in step.batch.response_ids]
        assert hasattr(by_hand, name), f"write {name}(case) in tests/algorithms/by_hand.py"
        losses = getattr(by_hand, name)(case)
        updates = list(step.updates)
        seen = {}
        updates_of_policy = []
        size = len(case.rows) // args.mini_batches
        for model, mini_batch in order_of_updates(case, name):
            update = updates[0] if updates else Update(-1, step.after[0], {}, {})
            net = Net(MODEL, update.before)
            rows = case.rows[mini_batch * size : (mini_batch + 1) * size]
            expected, norm, loss = gradient(losses[model], rows, net, args.max_grad_norm)
            has_kl = getattr(args, "kl_coef", 0.0) and any(row.graded for row in rows)
            if norm == 0 and not has_kl:
                continue  # a mini-batch without a gradient is no optimizer step: Adam's momentum would move the weights
            where = f"{name}, step {case.step}, {model}, mini-batch {mini_batch}"
            assert (model == "policy") == (update.model == 0), where
            assert same(update.gradient, expected), where
            assert update.settings["lr"] == pytest.approx(learning_rate(args, model, case.step)), where
            assert update.settings["weight_decay"] == args.weight_decay and update.settings["betas"] == (0.9, 0.95)
            seen.setdefault(model, []).append((norm, loss))
            if model == "policy":
                updates_of_policy.append((rows, net))
            updates = updates[1:]
        assert not updates, f"{name}, step {case.step}: an update too many"
        for model, prefix, loss in (
            ("policy", "train", "policy"),
            ("critic", "critic", "value"),
            ("prm", "prm", "prm"),
        ):
            if model in seen:
                norms, values = zip(*seen[model])
                assert line[f"{prefix}/grad_norm"] == pytest.approx(by_hand.mean(norms), rel=1e-3)
                assert line[f"loss/{loss}"] == pytest.approx(by_hand.mean(values), rel=1e-3, abs=1e-5)
        expected = by_hand.metrics(case, name, updates_of_policy)
        reported = {key: line[key] for key in expected}
        assert reported == pytest.approx(expected, rel=1e-3, abs=1e-5), f"{name}, step {case.step}"
        for number, row in enumerate(case.rows):
            if row.graded and id(row) in case.advantages:  # there are none while PPO's critic warms up
                found = torch.zeros_like(step.batch.rollout_logprobs[number]) + step.advantages[number]
                expected = torch.tensor(case.advantages[id(row)])
                assert torch.allclose(found[: len(row.response)], expected, rtol=1e-3, atol=1e-4), (name, number)
        sides |= case.clipped
    longest = [step.batch.response_mask.shape[1] for step in recording.steps]
    assert min(longest) < args.max_response_tokens, "no step shows what the limit is good for"
    if flags["tis_cap"] and not getattr(args, "full_vocabulary", False):
        assert sides >= SIDES[name], "the flags of this test leave a part of the formula without effect"
        assert ungraded or hasattr(args, "gen_prompts"), "every response could be graded"


def test_sdpo_learns_from_answers_and_from_a_teacher_of_its_own_weights(record, tmp_path):
    own = {"hint": "answer", "teacher_rate": 0.4}
    check_every_update(record, tmp_path, "sdpo", PLAIN | own)


def test_sdpo_learns_from_written_solutions(record, tmp_path, monkeypatch):
    """A checkpoint knows them, so a run with others isn't gone on with."""
    known = []
    loader = job.data.PromptLoader
    monkeypatch.setattr(job.data, "PromptLoader", lambda *given: known.append(given) or loader(*given))
    check_every_update(record, tmp_path, "sdpo", PLAIN | {"hint": "solution"})
    prompts, _, also = known[0]
    assert also == [prompt.solution for prompt in prompts] and any(also)


def test_the_first_update_of_a_step_clips_nothing(record, tmp_path):
    """Its log-probs are the old ones bit for bit, so the ratio is exactly 1."""
    record("grpo", PLAIN | {"mini_batches": 1, "clip_low": 1e-7, "clip_high": 1e-7})
    for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines():
        assert json.loads(line)["train/clip_frac"] == 0 < json.loads(line)["train/grad_norm"]


def test_the_denominator_of_dapo_counts_no_tokens_of_an_environment(record, monkeypatch):
    """The mask has holes there. The responses above have none."""
    get, policy_loss = sampling.Prefetcher.get, dapo.policy_loss
    expected, seen = [], []

    def with_holes(*given, **named):
        batch = get(*given, **named)
        batch.response_mask[:, 1] = False
        tokens = batch.response_mask.sum(1)
        expected.extend(part.sum().item() for part in tokens.chunk(PLAIN["mini_batches"]))
        return batch

    def loss(*given, denominator, **named):
        seen.append(denominator)
        return policy_loss(*given, denominator=denominator, **named)

    monkeypatch.setattr(sampling.Prefetcher, "get", with_holes)
    monkeypatch.setattr(dapo, "policy_loss", loss)
    record("dapo", PLAIN | OWN["dapo"][1])
    assert len(expected) == 4 and list(dict.fromkeys(seen)) == expected


def test_files_without_sampling_are_the_two_that_follow():
    assert sorted(set(ALGORITHM_FILES) - set(ALGORITHMS)) == ["dpo", "sft"]


# The files that sample nothing


OFFLINE = {
    "compute": Compute(token_budget=60),
    "steps": 3,
    "batch_size": 4,
    "learning_rate": 3e-3,
    "warmup_steps": 2,
    "weight_decay": 0.07,
    "max_grad_norm": 0.4,
}


def written(folder, rows: list[dict]) -> tuple[str]:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return (str(file),)


def row_of(step: Step, number: int) -> Row:
    return Row(list(step.batch.prompt_ids[number]), list(step.batch.response_ids[number]), [], 0.0, 0.0, True)


def check_offline(recording: Recording, args, tmp_path, loss_of: Callable[[Step], Callable]) -> None:
    """Each update of a run, against the loss of its step by hand."""
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert len(recording.steps) == args.steps
    for number, (step, line) in enumerate(zip(recording.steps, lines), 1):
        (update,) = step.updates
        net = Net(MODEL, update.before)
        expected, norm, loss = gradient(loss_of(step), [], net, args.max_grad_norm)
        assert same(update.gradient, expected)
        assert norm > args.max_grad_norm, "nothing was clipped"
        assert update.settings["lr"] == pytest.approx(args.learning_rate * min(1, number / args.warmup_steps))
        assert update.settings["weight_decay"] == args.weight_decay and update.settings["betas"] == (0.9, 0.95)
        assert line["train/grad_norm"] == pytest.approx(norm, rel=1e-3)
        assert line["train/loss"] == pytest.approx(loss, rel=1e-3)


def texts_of(recording: Recording, first: int = 0, every: int = 1) -> list[tuple[str, str]]:
    """(prompt, response) of all rows that a run has trained on."""
    decode = partial(arithmetic.tokenizer().decode, skip_special_tokens=True)
    found = []
    for step in recording.steps:
        pairs = list(zip(step.batch.prompt_ids, step.batch.response_ids))[first::every]
        found += [(decode(prompt), decode(response)) for prompt, response in pairs]
    return found


def test_sft_learns_each_solution_once_an_epoch(record, tmp_path):
    problems = arithmetic.problems("train")[:12]
    recording, args = record("sft", OFFLINE | {"dataset": written(tmp_path, problems), "output": str(tmp_path / "out")})

    def loss_of(step: Step):
        rows = [row_of(step, number) for number in range(len(step.batch))]
        tokens = sum(len(row.response) for row in rows)
        return lambda _, net: -sum(net.logprobs(row, 1.0).sum() for row in rows) / tokens

    check_offline(recording, args, tmp_path, loss_of)
    assert sorted(texts_of(recording)) == sorted((row["question"], row["solution"]) for row in problems)


def test_dpo_prefers_each_chosen_response(record, tmp_path):
    pairs = [json.loads(line) for line in arithmetic.PAIRS.read_text().splitlines()[:16]]  # more than a run takes
    own = {"beta": 0.7, "label_smoothing": 0.1, "max_prompt_tokens": 64, "max_response_tokens": 48}
    files = {"dataset": written(tmp_path, pairs), "output": str(tmp_path / "out")}
    recording, args = record("dpo", OFFLINE | own | files)
    reference = Net(MODEL)

    def implicit_reward(net: Net, step: Step, number: int) -> torch.Tensor:
        row = row_of(step, number)
        with torch.no_grad():
            start = reference.logprobs(row, 1.0).sum()
        return args.beta * (net.logprobs(row, 1.0).sum() - start)

    def loss_of(step: Step):
        def loss(_, net: Net) -> torch.Tensor:
            firsts = range(0, len(step.batch), 2)
            margins = [implicit_reward(net, step, i) - implicit_reward(net, step, i + 1) for i in firsts]
            right, swapped = 1 - args.label_smoothing, args.label_smoothing
            return -sum(right * m.sigmoid().log() + swapped * (-m).sigmoid().log() for m in margins) / len(margins)

        return loss

    check_offline(recording, args, tmp_path, loss_of)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    for step, line in zip(recording.steps, lines):
        net = Net(MODEL, step.updates[0].before)
        with torch.no_grad():
            rewards = [implicit_reward(net, step, number) for number in range(len(step.batch))]
        chosen, rejected = rewards[::2], rewards[1::2]
        ahead = [float(one > other) for one, other in zip(chosen, rejected)]
        for name, values in (("chosen", chosen), ("rejected", rejected), ("accuracy", ahead)):
            assert line[f"reward/{name}"] == pytest.approx(float(by_hand.mean(values)), rel=1e-3, abs=1e-5)
    for place, kind in enumerate(("chosen", "rejected")):
        taken = texts_of(recording, place, 2)
        assert len(set(taken)) == args.steps * args.batch_size
        assert set(taken) <= {(row["prompt"], row[kind]) for row in pairs}
