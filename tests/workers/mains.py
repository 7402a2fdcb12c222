"""Each algorithm's own main on canned responses, to be compared over ranks: mains.py MODEL RUNS_DIR [KIND]

The stub engine answers a prompt the same on any rank: odd responses are right, even ones wrong, so that every group is
mixed and dynamic sampling keeps the same prompts. Only what main does with them is at work: shares of the ranks,
rewards, statistics over all ranks, denominators, collectives. Two steps. Kinds:

- "ungraded": four steps, and from the fourth on the first response that is asked for cannot be graded. ReMax's greedy
  ones are all right. In remax-free, without KL, the mini-batch of that response has no other prompt.
- "signs": two steps, and once more with the advantage's sign flipped, in NAME-flipped. RUNS_DIR/signs.json says for
  each run how much more likely the right responses became than the wrong ones, in nats a token. At last PPO with
  weight decay and without any reward, which must leave the policy as it is.
"""

import importlib
import json
import statistics
import sys
from pathlib import Path

import torch
from cases import ALGORITHMS, once, short_run
from transformers import AutoModelForCausalLM

from algos import ppo, prime
from common import placement, rewards
from common.data import arithmetic as embedded
from common.data import prompts as data
from common.rewards.grading import Result, gsm8k_reward
from common.rewards.mixture import Rewards
from common.rollout import engines, rollout
from common.run import checkpoint, report
from common.trainer.batching import Compute

implicit_rewards = prime.implicit_rewards
PROBLEMS = [(12, 34), (56, 7), (8, 91), (23, 45)]
# A micro-batch has 200 tokens and a mini-batch of each of two ranks some 210, so that it takes two backwards.
FLAGS = {
    "prompts_per_step": 8,
    "group_size": 4,
    "mini_batches": 2,
    "source": data.TrainSource(eval_prompts=0),
    "schedule": "constant",
    "learning_rate": 1e-4,
    "compute": Compute(200),
    "max_logprob_gap": 1e9,
    "rollouts_every": 1,
}
# OPD and SDPO compare whole distributions here.
OWN = {name: short_run(name) for name in ALGORITHMS} | {"opd": {"full_vocabulary": True}}
OWN["sdpo"]["model"] = str(embedded.HINTS_START)  # a teacher that cannot read its hint teaches nothing


started: list["StubEngine"] = []  # the engines of all runs


class StubEngine:
    weight_version, wire_dtype, saved_names = 0, torch.float32, False

    def __init__(self, world):
        self.world, self.tokenizer, self.pushed = world, embedded.tokenizer(), []
        started.append(self)

    def generate(self, prompt_ids, n, temperature, max_tokens, seed, done=None, reply=None):
        rows, responses = [], []
        for ids in prompt_ids:
            a, b = map(int, self.tokenizer.decode(ids).rstrip("=").split("+"))
            for k in range(n):
                is_right = k % (2 + a % 2) == 1  # every second response, or every third: prompts and ranks differ
                right = embedded.solution(a, b)
                text = right if is_right else f"{right[: 5 + 2 * k]}\n#### {a * b + k}"
                rows.append(ids)
                responses.append([*self.tokenizer(text)["input_ids"], 1])
        logprobs = [[-1.0] * len(response) for response in responses]
        return rollout.collate(rows, responses, logprobs, [False] * len(rows), 0, "cpu")

    def load_weights(self, named_tensors):
        self.pushed.append({name: tensor.clone() for name, tensor in named_tensors})  # gathering them is a collective

    def sleep(self):
        pass


def fails_later(*specs) -> Rewards:
    """A reward that cannot say anything about the first row, from the fourth batch of a whole step on."""
    batches = []

    def reward(items, lengths, truncated):
        results = gsm8k_reward(items, lengths, truncated, "flexible")
        if len(items) <= 8:  # ReMax's greedy responses
            return [Result(1.0, 1.0)] * len(items)
        batches.append(items)
        return [Result(None, None, None, {"error": "down"}), *results[1:]] if len(batches) > 3 else results

    return Rewards({"reward": reward}, {"reward": 1.0})


def checked(*given, **named):
    """PRIME's process rewards. main() names the arguments: every row must have log-probs, whatever its mini-batch."""
    if named:
        rows = named["prm_logprobs"][named["response_mask"]]
        assert (rows != 0).all(), "rows without log-probs of the process reward model"
    return implicit_rewards(*given, **named)


def main(model_path: str, runs: Path, kind: str = "") -> None:
    prime.implicit_rewards = checked
    world, finish = placement.init(seed=0), placement.finish
    placement.init = lambda *given, **named: world  # one process group for all runs
    placement.finish = lambda *given: None
    engines.start = lambda backend, path, stops, world, dtype, **sizes: StubEngine(world)
    checkpoint.Saver.save = report.write = lambda *given: None  # tested elsewhere, and slower than the steps
    data.load = once(data.load)  # to tokenize them for each run takes longer than the steps
    if kind == "ungraded":
        rewards.load = fails_later
    if kind == "signs":
        signs(model_path, runs)
        return finish(world)
    steps = 4 if kind == "ungraded" else 2
    free = {"remax-free": {"kl_coef": 0.0, "mini_batches": 8}} if kind == "ungraded" else {}
    for name, flags in (OWN | free).items():
        algorithm = importlib.import_module(f"algos.{name.partition('-')[0]}")
        given = {**algorithm.EMBEDDED, **FLAGS, "model": model_path, **flags, "steps": steps}
        algorithm.main(algorithm.Args(**given, run_dir=str(runs / name)))
    finish(world)


def signs(model_path: str, runs: Path) -> None:
    gains = {}
    for name, flags in OWN.items():
        algorithm = importlib.import_module(f"algos.{name}")
        compute_advantages = algorithm.compute_advantages

        def flipped(compute_advantages=compute_advantages, **given):
            out = compute_advantages(**given)
            return (-out[0], out[1]) if isinstance(out, tuple) else -out

        given = {**algorithm.EMBEDDED, **FLAGS, "model": model_path, **flags, "steps": 2}
        for folder, function in ((name, compute_advantages), (f"{name}-flipped", flipped)):
            algorithm.compute_advantages = function
            if folder in ("opd-flipped", "sdpo-flipped"):  # otherwise the loss takes no advantage
                given["full_vocabulary"] = False
            algorithm.main(algorithm.Args(**given, run_dir=str(runs / folder)))
            pushed = started[-1].pushed
            gains[folder] = preference(pushed[-1], model_path) - preference(pushed[0], model_path)
    (runs / "signs.json").write_text(json.dumps(gains))
    rewards.load = lambda *given: Rewards({"none": lambda items, *_: [Result(0.0, 0.0)] * len(items)}, {"none": 1.0})
    given = {**ppo.EMBEDDED, **FLAGS, "model": model_path, "steps": 2, "weight_decay": 0.1}
    ppo.main(ppo.Args(**given, run_dir=str(runs / "ppo-nothing")))
    first, *_, last = started[-1].pushed
    assert all(torch.equal(first[name], last[name]) for name in first), "moved without an advantage"


def preference(weights: dict[str, torch.Tensor], model_path: str) -> float:
    """Mean log-prob of the tokens of right responses minus that of wrong ones, to four problems."""
    policy = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    policy.load_state_dict(weights)
    problems = [embedded.tokenizer()(f"{a}+{b}=", add_special_tokens=False)["input_ids"] for a, b in PROBLEMS]
    batch, means = started[-1].generate(problems, 2, 1.0, 48, 0), ([], [])
    for row, (prompt, response) in enumerate(zip(batch.prompt_ids, batch.response_ids)):
        with torch.no_grad():
            logprobs = policy(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        means[row % 2].append(logprobs.gather(1, torch.tensor(response)[:, None]).mean().item())
    wrong, right = map(statistics.mean, means)
    return right - wrong


main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
