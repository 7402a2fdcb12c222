"""The losses of all algorithms once more, slowly: one sequence at a time, without masks, padding or packing.

A function here takes a Case, the facts of one training step, and returns the loss of some of its rows. It shares no
line with algos/ or common/: log-probs come from transformers' own forward of a single sequence. See docs/algorithms
for the formulas, and test_main.py for what is done with them.
"""

import copy
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from recorder import Weights
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

# Each token has an advantage of its own, so they are (N, T) instead of (N,).
BY_TOKEN = ("reinforce_pp", "remax", "ppo", "prime", "opd", "sdpo")
# What policy_loss adds up: each response's mean, or its tokens. A loss of another kind is in neither. The test of its
# mathematics then checks its values.
MEANS_OF_RESPONSES = ("grpo", "gspo")
SUMS_OF_TOKENS = (
    "dr_grpo",
    "max_rl",
    "cispo",
    "dapo",
    "rloo",
    "reinforce_pp",
    "remax",
    "ppo",
    "prime",
    "opd",
    "sdpo",
)


@functools.cache
def loaded(path: str, value_head: bool) -> torch.nn.Module:
    """A plain transformers model. Net copies it, which is faster than to load it for each update."""
    if value_head:
        config = AutoConfig.from_pretrained(path, num_labels=1, classifier_dropout=0.0, tie_word_embeddings=False)
        model = AutoModelForTokenClassification.from_config(config, attn_implementation="eager")
    else:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


class Net:
    """A plain transformers model with these weights."""

    def __init__(self, path: str, weights: Weights | None = None):
        self.model = copy.deepcopy(loaded(path, value_head="score.weight" in (weights or {})))
        if weights:
            missing, unexpected = self.model.load_state_dict(weights, strict=False)
            assert not unexpected and set(missing) <= {"lm_head.weight"}  # tied
        self.entropies: dict[int, float] = {}  # id of a row -> sum over its tokens, of the last call of distribution()

    def at_responses(self, row: "Row") -> torch.Tensor:
        """What the model says before each token of the response: logits (length, V) or values (length, 1)."""
        first = len(row.prompt) - 1
        return self.model(torch.tensor([row.prompt + row.response])).logits[0, first : first + len(row.response)]

    def distribution(self, row: "Row", temperature: float) -> torch.Tensor:
        """(length, V) log-probs."""
        log_p = (self.at_responses(row) / temperature).log_softmax(-1)
        p = log_p.detach().exp()
        self.entropies[id(row)] = -(p * log_p.detach()).sum().item()
        return log_p

    def logprobs(self, row: "Row", temperature: float) -> torch.Tensor:
        """(length,)"""
        return self.distribution(row, temperature)[range(len(row.response)), row.response]

    def values(self, row: "Row") -> torch.Tensor:
        """(length,)"""
        return self.at_responses(row)[:, 0]


@dataclass
class Row:
    """A response."""

    prompt: list[int]
    response: list[int]
    sampled_with: list[float]  # the engine's log-probs
    score: float
    correct: float
    graded: bool
    greedy_score: float = 0.0
    greedy_graded: bool = True
    in_update: bool = True  # main computed its log-probs with a gradient
    old: list[float] = field(default_factory=list)  # log-probs of the policy before the step
    ref: list[float] = field(default_factory=list)  # and of the reference
    old_values: list[float] = field(default_factory=list)
    hinted: "Row | None" = None  # SDPO: the same response after the prompt that its teacher reads; None: no teacher


@dataclass
class Case:
    """One training step."""

    args: object
    rows: list[Row]
    step: int
    prm: list[list[float]] = field(default_factory=list)  # PRIME: log-probs of its updated model
    prm_ref: list[list[float]] = field(default_factory=list)  # and of the reference, both at temperature 1
    prm_before: list[list[float]] = field(default_factory=list)  # and of its model before the step
    teacher: Net | None = (
        None  # OPD, and SDPO with weights of its own or without gradient steps since; None: the policy
    )
    clipped: set[str] = field(default_factory=set)  # which sides of a clip have had an effect
    clipped_tokens: int = 0  # in all updates of the policy
    advantages: dict[int, list[float]] = field(
        default_factory=dict
    )  # id of a row -> of each token, as main reports them
    kl: float = 0.0  # in the loss: to the reference, or to OPD's teacher; the sum over all tokens of all updates

    @property
    def groups(self) -> list[list[Row]]:
        size = self.args.group_size
        return [self.rows[first : first + size] for first in range(0, len(self.rows), size)]

    def of_group(self, advantages: Callable[[list[float]], list[float]], rewards: list[float]) -> list[float]:
        """The advantages of all rows from those of one group."""
        size = self.args.group_size
        return [a for first in range(0, len(rewards), size) for a in advantages(rewards[first : first + size])]


def mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


def z_scores(rewards: list[float]) -> list[float]:
    if len(set(rewards)) == 1:
        return [0.0] * len(rewards)
    std = math.sqrt(sum((r - mean(rewards)) ** 2 for r in rewards) / (len(rewards) - 1))
    return [(r - mean(rewards)) / (std + 1e-6) for r in rewards]


def centred(rewards: list[float]) -> list[float]:
    return [r - mean(rewards) for r in rewards]


def relative(rewards: list[float]) -> list[float]:
    if mean(rewards) == 0:
        return [0.0] * len(rewards)
    return [(r - mean(rewards)) / mean(rewards) for r in rewards]


def leave_one_out(rewards: list[float]) -> list[float]:
    others = [(sum(rewards) - r) / (len(rewards) - 1) for r in rewards]
    return [r - other for r, other in zip(rewards, others)]


def to_come(numbers: list[float]) -> list[float]:
    """Sums from each number to the end."""
    return [sum(numbers[t:]) for t in range(len(numbers))]


def whitened(case: Case, advantages: list[list[float]]) -> list[list[float]]:
    """Mean 0 and variance 1 over the tokens of all graded rows of the step."""
    tokens = [a for row, of_row in zip(case.rows, advantages) if row.graded for a in of_row]
    variance = sum((a - mean(tokens)) ** 2 for a in tokens) / (len(tokens) - 1)
    return [[(a - mean(tokens)) / math.sqrt(variance + 1e-8) for a in of_row] for of_row in advantages]


def with_kl(case: Case, row: Row) -> list[float]:
    """Token rewards: the score on the last token, minus kl_coef (old - ref) on each."""
    rewards = [0.0] * len(row.response)
    if case.args.kl_coef:
        rewards = [-case.args.kl_coef * (old - ref) for old, ref in zip(row.old, row.ref)]
    rewards[-1] += row.score
    return rewards


def on_each_token(case: Case, advantages: list[float]) -> list[list[float]]:
    return [[a] * len(row.response) for row, a in zip(case.rows, advantages)]


def clipped(case: Case, advantages, ratios: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """max(-A ratio, -A clip(ratio)) of each token of a response."""
    advantages = torch.as_tensor(advantages)
    too_high = (advantages > 0) & (ratios > 1 + high)
    too_low = (advantages < 0) & (ratios < 1 - low)
    case.clipped |= {"high"} if too_high.any() else set()
    case.clipped |= {"low"} if too_low.any() else set()
    case.clipped_tokens += int((too_high | too_low).sum())
    out = -advantages * ratios
    out = torch.where(too_high, -advantages * (1 + high), out)
    return torch.where(too_low, -advantages * (1 - low), out)


def importance(case: Case, row: Row) -> torch.Tensor | float:
    """w_it of --tis-cap, for each token."""
    if not case.args.tis_cap:
        return 1.0
    weights = [math.exp(old - engine) for old, engine in zip(row.old, row.sampled_with)]
    case.clipped |= {"tis" if weight > case.args.tis_cap else "no tis" for weight in weights}
    return torch.tensor([min(weight, case.args.tis_cap) for weight in weights])


def kl_term(case: Case, row: Row, logprobs: torch.Tensor) -> torch.Tensor | float:
    """kl_coef (exp(ref - logprobs) - (ref - logprobs) - 1), for each token."""
    if not case.args.kl_coef:
        return 0.0
    log_r = torch.tensor(row.ref) - logprobs
    k3 = log_r.exp() - log_r - 1
    case.kl += k3.sum().item()
    return case.args.kl_coef * k3


Loss = Callable[[list[Row], Net], torch.Tensor]


def clips(args) -> tuple[float, float]:
    return (args.clip, args.clip) if hasattr(args, "clip") else (args.clip_low, args.clip_high)


def by_response(case: Case, advantages: list[float], share: Callable[[Row], float]) -> Loss:
    """GRPO and Dr. GRPO. share(row): what the sum of its token losses is multiplied by, before the division by S."""
    of_row = dict(zip(map(id, case.rows), advantages))
    case.advantages = dict(zip(map(id, case.rows), on_each_token(case, advantages)))

    def loss(rows: list[Row], net: Net) -> torch.Tensor:
        graded = [row for row in rows if row.graded]
        total = torch.zeros(())
        for row in graded:
            logprobs = net.logprobs(row, case.args.temperature)
            ratios = (logprobs - torch.tensor(row.old)).exp()
            tokens = importance(case, row) * clipped(case, of_row[id(row)], ratios, *clips(case.args))
            total = total + share(row) * (tokens + kl_term(case, row, logprobs)).sum()
        return total / max(1, len(graded))

    return loss


def by_token(case: Case, advantages: list[list[float]], bound: float = math.inf) -> Loss:
    """RLOO, REINFORCE++, ReMax, PPO, PRIME, DAPO, OPD: the mean over all tokens of clipped token losses.

    It has no KL term. bound: a token with A < 0 costs at most -A times this.
    """
    of_row = dict(zip(map(id, case.rows), advantages))
    case.advantages = of_row

    def loss(rows: list[Row], net: Net) -> torch.Tensor:
        graded = [row for row in rows if row.graded]
        total = torch.zeros(())
        for row in graded:
            advantages = torch.tensor(of_row[id(row)])
            logprobs = net.logprobs(row, case.args.temperature)
            tokens = clipped(case, advantages, (logprobs - torch.tensor(row.old)).exp(), *clips(case.args))
            too_much = (advantages < 0) & (tokens > -advantages * bound)
            case.clipped |= {"dual"} if too_much.any() else set()
            case.clipped_tokens += int(too_much.sum())
            tokens = torch.where(too_much, -advantages * min(bound, 1e9), tokens)
            total = total + (importance(case, row) * tokens).sum()
        return total / max(1, sum(len(row.response) for row in graded))

    return loss


def scores(case: Case) -> list[float]:
    return [row.score for row in case.rows]


def grpo(case: Case) -> dict[str, Loss]:
    return {"policy": by_response(case, case.of_group(z_scores, scores(case)), lambda row: 1 / len(row.response))}


def dr_grpo(case: Case) -> dict[str, Loss]:
    share = 1 / case.args.max_response_tokens
    return {"policy": by_response(case, case.of_group(centred, scores(case)), lambda row: share)}


def max_rl(case: Case) -> dict[str, Loss]:
    share = 1 / case.args.max_response_tokens
    return {"policy": by_response(case, case.of_group(relative, scores(case)), lambda row: share)}


def gspo(case: Case) -> dict[str, Loss]:
    z = case.of_group(z_scores, scores(case))
    advantages = dict(zip(map(id, case.rows), z))
    case.advantages = dict(zip(map(id, case.rows), on_each_token(case, z)))

    def loss(rows: list[Row], net: Net) -> torch.Tensor:
        graded = [row for row in rows if row.graded]
        total = torch.zeros(())
        for row in graded:
            logprobs = net.logprobs(row, case.args.temperature)
            s = (logprobs - torch.tensor(row.old)).mean().exp()
            # A token's ratio has the value of s, and a gradient through its own log-prob.
            ratios = s.detach() * (logprobs - logprobs.detach()).exp()
            tokens = importance(case, row) * clipped(case, advantages[id(row)], ratios, *clips(case.args))
            total = total + (tokens + kl_term(case, row, logprobs)).mean()
        return total / max(1, len(graded))

    return {"policy": loss}


def cispo(case: Case) -> dict[str, Loss]:
    z = case.of_group(z_scores, scores(case))
    advantages = dict(zip(map(id, case.rows), z))
    case.advantages = dict(zip(map(id, case.rows), on_each_token(case, z)))

    def loss(rows: list[Row], net: Net) -> torch.Tensor:
        graded = [row for row in rows if row.graded]
        total = torch.zeros(())
        for row in graded:
            logprobs = net.logprobs(row, case.args.temperature)
            weights = []
            for logprob, old in zip(logprobs.tolist(), row.old):
                ratio = math.exp(logprob - old)
                weights.append(min(max(ratio, 1 - case.args.clip_low), 1 + case.args.clip_high))
                if weights[-1] != ratio:
                    case.clipped.add("low" if ratio < 1 else "high")
                    case.clipped_tokens += row.in_update
            tokens = -importance(case, row) * torch.tensor(weights) * advantages[id(row)] * logprobs
            total = total + (tokens + kl_term(case, row, logprobs)).sum()
        return total / max(1, sum(len(row.response) for row in graded))

    return {"policy": loss}


def rloo(case: Case) -> dict[str, Loss]:
    rewards = [sum(with_kl(case, row)) if row.graded else 0.0 for row in case.rows]
    return {"policy": by_token(case, on_each_token(case, case.of_group(leave_one_out, rewards)))}


def reinforce_pp(case: Case) -> dict[str, Loss]:
    advantages = []
    for group in case.groups:
        baseline = mean([row.score for row in group]) if case.args.baseline == "group" else 0.0
        advantages += [[a - baseline for a in to_come(with_kl(case, row))] for row in group]
    return {"policy": by_token(case, whitened(case, advantages))}


def remax(case: Case) -> dict[str, Loss]:
    advantages = [[a - row.greedy_score for a in to_come(with_kl(case, row))] for row in case.rows]
    return {"policy": by_token(case, advantages)}


def dapo(case: Case) -> dict[str, Loss]:
    args = case.args
    rewards = []
    for row in case.rows:
        over = len(row.response) - (args.max_response_tokens - args.overlong_cache)
        rewards.append(2 * row.score - 1 - min(max(over / args.overlong_cache, 0), 1))
    advantages = on_each_token(case, case.of_group(z_scores, rewards))
    return {"policy": by_token(case, advantages, bound=args.clip_dual)}


def gae(rewards: list[float], values: list[float], lam: float) -> list[float]:
    """A_t = sum_k lam^k delta_{t+k}, delta_t = r_t + V_{t+1} - V_t."""
    following = [*values[1:], 0.0]
    deltas = [r + v_next - v for r, v_next, v in zip(rewards, following, values)]
    return [sum(lam**k * delta for k, delta in enumerate(deltas[t:])) for t in range(len(deltas))]


def ppo(case: Case) -> dict[str, Loss]:
    args = case.args
    warming_up = case.step <= args.critic_warmup_steps
    advantages = [gae(with_kl(case, row), row.old_values, args.lam) for row in case.rows]
    lam = 1.0 if warming_up else args.critic_lam
    returns = {}
    for row in case.rows:
        of_row = gae(with_kl(case, row), row.old_values, lam)
        returns[id(row)] = [a + v for a, v in zip(of_row, row.old_values)]

    def value_loss(rows: list[Row], net: Net) -> torch.Tensor:
        graded = [row for row in rows if row.graded]
        total = torch.zeros(())
        for row in graded:
            values, old, target = net.values(row), torch.tensor(row.old_values), torch.tensor(returns[id(row)])
            near = old + (values - old).clamp(-args.value_clip, args.value_clip)
            case.clipped |= {"value"} if (near != values).any() else set()
            total = total + 0.5 * torch.max((values - target) ** 2, (near - target) ** 2).sum()
        return total / max(1, sum(len(row.response) for row in graded))

    losses = {"critic": value_loss}
    if not warming_up:
        losses["policy"] = by_token(case, whitened(case, advantages))
    return losses


def prime(case: Case) -> dict[str, Loss]:
    args = case.args

    def process_rewards(logprobs, ref):
        return [args.beta * (phi - r) for phi, r in zip(logprobs, ref)]

    def prm_loss(rows: list[Row], net: Net) -> torch.Tensor:
        total = torch.zeros(())
        for row in rows:
            ref = case.prm_ref[case.rows.index(row)]
            z = sum(process_rewards(net.logprobs(row, 1.0), ref))
            # log sigmoid(-z) is log(1 - sigmoid(z)), without its rounding error for a large z
            total = total - F.logsigmoid(z if row.correct else -z)
        return total / len(rows)

    of_tokens = [process_rewards(phi, ref) for phi, ref in zip(case.prm, case.prm_ref)]
    largest = max(abs(number) for of_row in of_tokens for number in to_come(of_row))
    of_tokens = [[r / (largest + 1e-6) for r in of_row] for of_row in of_tokens]
    means = [mean(of_row) for of_row in of_tokens]
    baselines = [m - own for m, own in zip(means, case.of_group(leave_one_out, means))]  # the others' mean
    outcomes = case.of_group(leave_one_out, [row.correct for row in case.rows])
    advantages = []
    for of_row, baseline, outcome in zip(of_tokens, baselines, outcomes):
        process = to_come([r - baseline for r in of_row])
        advantages.append([args.c_process * p + outcome for p in process])
    return {"prm": prm_loss, "policy": by_token(case, whitened(case, advantages))}


def opd(case: Case) -> dict[str, Loss]:
    temperature = case.args.temperature
    with torch.no_grad():
        teacher = {id(row): case.teacher.distribution(row, temperature) for row in case.rows}
    if not case.args.full_vocabulary:
        advantages = []
        for row in case.rows:
            of_row = teacher[id(row)][range(len(row.response)), row.response].tolist()
            advantages.append([theirs - old for theirs, old in zip(of_row, row.old)])
        return {"policy": by_token(case, advantages)}

    def loss(rows: list[Row], net: Net) -> torch.Tensor:
        graded = [row for row in rows if row.graded]
        total = torch.zeros(())
        for row in graded:
            log_p = net.distribution(row, temperature)
            divergences = (log_p.exp() * (log_p - teacher[id(row)])).sum(1)
            case.kl += divergences.sum().item()
            case.advantages[id(row)] = (-divergences).tolist()
            total = total + divergences.sum()
        return total / max(1, sum(len(row.response) for row in graded))

    return {"policy": loss}


def sdpo(case: Case) -> dict[str, Loss]:
    """OPD for the rows that have a hint. The teacher reads another prompt than the policy."""
    temperature = case.args.temperature
    case.advantages = {id(row): [0.0] * len(row.response) for row in case.rows}
    if not case.args.full_vocabulary:
        advantages = []
        for row in case.rows:
            if row.hinted is None:
                advantages.append([0.0] * len(row.response))
                continue
            with torch.no_grad():
                theirs = case.teacher.logprobs(row.hinted, temperature).tolist()
            advantages.append([teacher - old for teacher, old in zip(theirs, row.old)])
        of_tokens = by_token(case, advantages)
        return {"policy": lambda rows, net: of_tokens([row for row in rows if row.hinted], net)}

    def loss(rows: list[Row], net: Net) -> torch.Tensor:
        taught = [row for row in rows if row.hinted]
        total = torch.zeros(())
        for row in taught:
            with torch.no_grad():
                log_q = (case.teacher or net).distribution(row.hinted, temperature)
            log_p = net.distribution(row, temperature)
            divergences = (log_p.exp() * (log_p - log_q)).sum(1)
            case.kl += divergences.sum().item()
            case.advantages[id(row)] = (-divergences).tolist()
            total = total + divergences.sum()
        return total / max(1, sum(len(row.response) for row in taught))

    return {"policy": loss}


# What a step reports besides losses and norms (docs/metrics.md)


def has_critic(args) -> bool:
    """Of PPO, or of a copy of it under another name."""
    return hasattr(args, "critic_learning_rate")


def metrics(case: Case, name: str, updates: list[tuple[list[Row], Net]]) -> dict[str, float]:
    """updates: for each update of the policy its mini-batch and the policy before it, whose loss has been computed."""
    graded = [row for row in case.rows if row.graded]
    found = {}
    tokens = 0
    entropy = 0.0
    for rows, net in updates:
        for row in rows:
            if row.graded and row.in_update:
                tokens += len(row.response)
                entropy += net.entropies[id(row)]
    if tokens:
        found["train/entropy"] = entropy / tokens
        if not getattr(case.args, "full_vocabulary", False):  # a loss over the whole vocabulary has no ratio
            found["train/clip_frac"] = case.clipped_tokens / tokens
    if getattr(case.args, "kl_coef", 0.0) and name != "prime":
        if case.kl:
            found["loss/kl"] = case.kl / tokens
        else:
            found["reward/kl"] = mean([sum(row.old) - sum(row.ref) for row in graded])
    if name == "opd":
        found["teacher/kl"] = case.kl / tokens if case.args.full_vocabulary else sampled_divergence(case, graded)
    if name == "sdpo":
        taught = [row for row in graded if row.hinted]
        found["teacher/hinted"] = len(taught) / len(graded)
        if taught:
            found["teacher/kl"] = case.kl / tokens if case.args.full_vocabulary else sampled_divergence(case, taught)
    if name == "remax":
        greedy = [group[0] for group in case.groups if group[0].greedy_graded]
        found["reward/greedy_mean"] = mean([row.greedy_score for row in greedy])
    if name == "prime":
        found["prm/pair_accuracy"] = pair_accuracy(case)
    if has_critic(case.args):
        found["critic/explained_variance"] = explained_variance(case, graded)
    return found


def sampled_divergence(case: Case, rows: list[Row]) -> float:
    """The mean of log p - log q over the sampled tokens. q is the teacher's probability."""
    differences = []
    for row in rows:
        with torch.no_grad():
            theirs = case.teacher.logprobs(row.hinted or row, case.args.temperature).tolist()
        differences += [old - teacher for old, teacher in zip(row.old, theirs)]
    return mean(differences)


def pair_accuracy(case: Case) -> float:
    """Share of pairs of a right and a wrong response to one prompt in which the right one has more reward."""
    rewards = {}
    for row, phi, ref in zip(case.rows, case.prm_before, case.prm_ref):
        rewards[id(row)] = sum(phi) - sum(ref)
    ranked = []
    for group in case.groups:
        for right in (row for row in group if row.correct):
            for wrong in (row for row in group if not row.correct):
                ahead = rewards[id(right)] - rewards[id(wrong)]
                ranked.append(0.5 if ahead == 0 else float(ahead > 0))
    return mean(ranked)


def explained_variance(case: Case, rows: list[Row]) -> float:
    """1 - Var(returns - values) / Var(returns) over all tokens."""
    args = case.args
    lam = 1.0 if case.step <= args.critic_warmup_steps else args.critic_lam
    returns, errors = [], []
    for row in rows:
        advantages = gae(with_kl(case, row), row.old_values, lam)
        returns += [a + value for a, value in zip(advantages, row.old_values)]
        errors += advantages

    def variance(numbers: list[float]) -> float:
        return mean([(number - mean(numbers)) ** 2 for number in numbers])

    return 1 - variance(errors) / variance(returns)
