"""The numbers of docs/how-it-works.md: one batch from prompt to weights, and what each detail is worth.

    python scripts/walkthrough.py walk                     # prints the walk through one batch
    python scripts/walkthrough.py measure                  # breaks one detail after the other, on recorded batches
    python scripts/walkthrough.py measure shift holes      # two of them
    python scripts/walkthrough.py learn masters --seeds 0  # trains the embedded job with a detail broken
    python scripts/walkthrough.py rebuild                  # writes all numbers into the page
    python scripts/walkthrough.py record                   # samples the batches again

The diffs on the page are the ablations: each breaks a detail of algos/grpo.py or of common/. They have the form of
docs/variants.md. `measure` trains on one batch twice, with the right code and with the broken one, and compares the
gradients (scripts/one_batch.py). `learn` trains 52 steps, and compares with the control of docs/claims.md.

baselines/walkthrough/ has the batches (*.jsonl.gz), what was measured (measured.json) and the runs (learning/).
"""

import dataclasses
import functools
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import runpy
import shutil
import statistics
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
import tyro
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.append(str(Path(__file__).parent))
import claims
import one_batch
import study
import variants

import baselines
from algos import grpo
from common import errors
from common.data import tasks
from common.preflight import prepare
from common.preflight.run_directory import read_metrics

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/how-it-works.md"
FOLDER = ROOT / "baselines/walkthrough"
MEASURED = "measured.json"
NOTHING = 1e-5  # relative differences below this are rounding
START = ROOT / "baselines/warm-start"  # the embedded model
TEACHER = ROOT / "baselines/teacher"  # another model with the same tokenizer

# The recorded batches: the flags of algos/grpo.py that sampled them.
BATCHES = {
    "embedded": "",  # the first step of the embedded job, as it is
    "cool": "--temperature 0.6 --prompts-per-step 16",
    "bf16": "--dtype bfloat16 --prompts-per-step 16",
    "short": "--max-response-tokens 22 --prompts-per-step 16",
    "calculator": "--environment calculator --prompts-per-step 16",
    "maze": "--model baselines/maze-start --dataset maze --max-prompt-tokens 64 --max-response-tokens 20 "
    "--prompts-per-step 16 --learning-rate 2e-4 --warmup-steps 2",
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A recorded batch, and flags beyond those that sampled it."""

    batch: str
    flags: str = ""

    def __str__(self) -> str:
        return f"`{self.batch}`" + (f" with `{self.flags}`" if self.flags else "")


# Ablations that are measured on a batch: the name of the page's diff -> the cases.
CASES = {
    "engine-logprobs": (Case("embedded"), Case("bf16")),
    "shift": (Case("embedded"),),
    "temperature": (Case("cool"),),
    "neighbours": (Case("embedded"),),
    "positions": (Case("embedded"),),
    "shared-prompt": (Case("embedded"),),
    "mean-of-means": (Case("maze", "--token-budget 80"),),
    "accumulation": (Case("maze", "--token-budget 80"),),
    "counted-rows": (Case("embedded"),),
    "token-mean": (Case("embedded"), Case("maze")),
    "holes": (Case("calculator"),),
    "end-token": (Case("embedded"),),
    "truncated": (Case("short"),),
    "groups": (Case("embedded"),),
    "std": (Case("embedded"),),
    "clip-side": (Case("embedded", "--warmup-steps 1 --epochs 4"),),
    "masters": (Case("embedded"), Case("embedded", "--learning-rate 1e-6 --warmup-steps 1")),
}
SEEDS = (0, 1, 2)  # of `learn`
LEARNED = ("groups", "end-token", "noise", "masters", "clip-side")  # Ablations that are trained with.


@dataclasses.dataclass
class Args:
    action: tyro.conf.Positional[Literal["walk", "measure", "learn", "rebuild", "record"]]
    names: tyro.conf.Positional[tuple[str, ...]] = ()  # Of ablations, or of batches for `record`. Default: all.
    seeds: tuple[int, ...] = SEEDS  # Of `learn`.
    folder: str = str(FOLDER.relative_to(ROOT))  # Where everything is. Runs of `learn` that are there are skipped.


# --- the page ---------------------------------------------------------------------------------------------------------


def diffs(page: str) -> dict[str, str]:
    """name -> diff, of each detail that has one. The name is that of the mark below the diff."""
    found = re.findall(r"^```diff\n(.*?)^```\n\n<!-- measured: ([\w-]+) -->$", page, re.MULTILINE | re.DOTALL)
    return {name: diff for diff, name in found}


def diff_of(name: str) -> str:
    return diffs(PAGE.read_text())[name]


def broken_source(diff: str) -> str:
    """The file that a diff changes, changed. Raises BadInput if the diff does not fit."""
    return variants.apply(diff, (ROOT / variants.base(diff)).read_text())


def broken_grpo(name: str) -> ModuleType:
    """algos/grpo.py with a detail broken, as a module."""
    return variants.module(f"broken {name}", broken_source(diff_of(name)))


def marked(page: str) -> list[str]:
    """The names of the page's marks, in order."""
    return re.findall(r"^<!-- measured: ([\w-]+) -->$", page, re.MULTILINE)


def filled(page: str, texts: dict[str, str]) -> str:
    """The page, with each text between its marks."""
    for name, text in texts.items():
        begin, end = f"<!-- measured: {name} -->\n", "<!-- /measured -->"
        before, rest = page.split(begin)
        page = before + begin + text + "\n" + end + rest.split(end, 1)[1]
    return page


# --- one batch --------------------------------------------------------------------------------------------------------


def copy_of_code(diff: str, folder: Path) -> None:
    """Put a copy of algos/ and common/ into the folder, with one detail broken, and links to what they read."""
    for name in ("algos", "common"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "baselines").symlink_to(ROOT / "baselines")
    (folder / variants.base(diff)).write_text(broken_source(diff))


def trace(case: Case, diff: str = "") -> dict[str, Any]:
    """What one_batch.py saves of this case. diff: the detail that is broken; "" for the code as it is.

    It runs in a process of its own, because it imports a copy of the code. A forked one, because torch is loaded here.
    """
    with tempfile.TemporaryDirectory() as scratch:
        code = ROOT
        if diff:
            code = Path(scratch)
            copy_of_code(diff, code)
        output, log = Path(scratch) / "trace.pt", Path(scratch) / "log"
        words = [FOLDER / f"{case.batch}.jsonl.gz", output, *BATCHES[case.batch].split(), *case.flags.split()]
        process = multiprocessing.get_context("fork").Process(
            target=run_one_batch, args=(code, list(map(str, words)), log)
        )
        process.start()
        process.join()
        if process.exitcode:
            raise RuntimeError(f"{case}: exit code {process.exitcode}:\n{log.read_text()[-2000:]}")
        return torch.load(output, weights_only=True)


def run_one_batch(code: Path, words: list[str], log: Path) -> None:
    """Run one_batch.py with the algos/ and common/ of another folder. log: gets all that it prints."""
    with open(log, "w") as out:
        os.dup2(out.fileno(), sys.stdout.fileno())
        os.dup2(out.fileno(), sys.stderr.fileno())
    for name in list(sys.modules):
        if name.split(".")[0] in ("algos", "common", "one_batch", "replay"):
            del sys.modules[name]
    sys.path.insert(0, str(code))
    sys.argv = ["one_batch.py", *words]
    runpy.run_path(str(ROOT / "scripts/one_batch.py"), run_name="__main__")


right_trace = functools.cache(trace)  # of a case, with the code as it is


def compare(right: dict, broken: dict) -> dict[str, float]:
    """What a broken detail changes in one step."""
    first, first_broken = right["gradients"][0], broken["gradients"][0]
    move = right["weights"][-1] - right["weights"][0]
    move_broken = broken["weights"][-1] - broken["weights"][0]
    return {
        "difference": float((first_broken - first).norm() / first.norm()),  # of the first update's gradient, relative
        "length": float(first_broken.norm() / first.norm()),
        "cosine": cosine(first_broken, first),
        "move_cosine": cosine(move_broken, move),  # of what all updates of the step do to the weights
        "gap": broken["metrics"]["mismatch/logprob_abs_mean"],
        "right_gap": right["metrics"]["mismatch/logprob_abs_mean"],
        "clipped": broken["metrics"]["train/clip_frac"],
        "right_clipped": right["metrics"]["train/clip_frac"],
        "largest_ratio": largest_ratio(broken),
        "right_largest_ratio": largest_ratio(right),
        "tokens": sum(map(sum, broken["micro_batches"])),
        "right_tokens": sum(map(sum, right["micro_batches"])),
        "forwards": sum(map(len, right["micro_batches"])),
        "moved": moved(broken),
        "right_moved": moved(right),
    }


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=0))


def largest_ratio(traced: dict) -> float:
    """The largest |ratio - 1| of the first update, which has the weights of old_logprobs."""
    largest = 0.0
    for given in traced["losses"][: len(traced["micro_batches"][0])]:
        differences = (given["logprobs"] - given["old_logprobs"])[given["response_mask"]]
        largest = max(largest, float(differences.exp().sub(1).abs().max()))
    return largest


def moved(traced: dict) -> float:
    """The share of the weights that the second and all later updates of the step have changed."""
    return float((traced["weights"][-1] != traced["weights"][1]).double().mean())


def walk() -> dict[str, str]:
    """name of a mark -> what to print there: the first step of the embedded job, from prompt to weights."""
    traced = right_trace(Case("embedded"))
    batch = traced["batch"]
    advantages = traced["advantages"]
    mask = batch["response_mask"]
    trained = mask & (advantages != 0)[:, None]  # tokens that had a forward
    tokenizer = AutoTokenizer.from_pretrained(START)
    groups = batch["scores"].view(64, 8)
    mixed = (groups.amax(1) != groups.amin(1)).sum()
    gap = (batch["rollout_logprobs"] - traced["old_logprobs"])[trained].abs().max()

    def numbers(values: torch.Tensor, digits: int = 3) -> str:
        return " ".join(f"{value:z.{digits}f}" for value in values.tolist())

    def last_tokens(row: int) -> str:
        """The last four tokens of a response: text, ids, and log-probs of the engine and of the trainer."""
        ids = batch["response_ids"][row]
        last = slice(len(ids) - 4, len(ids))
        columns = {
            f"row {row}, last tokens": [tokenizer.decode([token]) for token in ids[last][:-1]] + ["<end>"],
            "  response_ids": ids[last],
            "  rollout_logprobs": [f"{value:z.3f}" for value in batch["rollout_logprobs"][row, last].tolist()],
            "  old_logprobs": [f"{value:z.3f}" for value in traced["old_logprobs"][row, last].tolist()],
        }
        return "\n".join(f"{name:20}" + "".join(f"{value:>8}" for value in row) for name, row in columns.items())

    updates = ["update   rows  tokens in the forward  smallest ratio  largest ratio  clipped  loss      gradient norm"]
    for number, (given, tokens, gradient) in enumerate(
        zip(traced["losses"], traced["micro_batches"], traced["gradients"]), 1
    ):
        own = given["response_mask"]
        ratio = (given["logprobs"] - given["old_logprobs"]).exp()
        clipped = grpo.clipped_tokens(
            given["logprobs"], given["old_logprobs"], given["advantages"], own, clip_low=0.2, clip_high=0.2
        )
        updates.append(
            f"{number:<9}{len(own):<6}{sum(tokens):<23}{ratio[own].min():<16.3f}{ratio[own].max():<15.3f}"
            f"{int(clipped):<9}{given['loss']:<+10.4f}{gradient.norm():.3f}"
        )
    place = int(traced["gradients"][0].abs().argmax())
    one = [float(weights[place]) for weights in traced["weights"]]
    first_move = (traced["weights"][1] - traced["weights"][0]).abs()
    sent = sum(tensor.numel() for tensor in traced["pushed"].values())
    same = torch.equal(
        torch.cat([tensor.flatten() for tensor in traced["pushed"].values()]).sort().values,
        traced["weights"][-1].sort().values,
    )
    return {
        "walk-prompt": fenced(
            f"prompts        {len(batch['prompts'])}",
            f"prompt 0       {batch['prompts'][0]!r}, answer {batch['answers'][0]!r}",
            f"prompt_ids     {batch['prompt_ids'][0]}",
        ),
        "walk-sample": fenced(
            f"rows           {len(batch['response_ids'])} = {len(batch['prompts'])} prompts x 8 responses",
            f"response_mask  {tuple(mask.shape)}, {int(mask.sum())} of {mask.numel()} are True",
            f"row 0          {batch['responses'][0]!r}",
            f"its ids        {batch['response_ids'][0]}",
            f"its mask       {''.join('1' if value else '0' for value in mask[0].tolist())}",
            f"row 1          {batch['responses'][1]!r}",
        ),
        "walk-grade": fenced(
            f"scores of rows 0 to 7        {numbers(groups[0], 0)}",
            f"advantages of rows 0 to 7    {numbers(advantages[:8], 2)}",
            f"groups with both scores      {int(mixed)} of {len(groups)}",
            f"rows with a gradient         {int((advantages != 0).sum())} of {len(advantages)}",
        ),
        "walk-logprobs": fenced(
            last_tokens(0),
            last_tokens(1),
            f"largest difference between them, over {int(trained.sum())} tokens: {rounding(float(gap))}",
        ),
        "walk-updates": fenced(*updates, f"denominator {int(traced['losses'][0]['denominator'])} in each update"),
        "walk-weights": fenced(
            f"learning rate                       {traced['learning_rates'][0]:g}",
            f"moved by the first update           {first_move.median():.6f}, the median over all weights",
            f"one weight, before and after each   {' '.join(f'{value:.5f}' for value in one)}",
        ),
        "walk-push": fenced(
            f"sent to the engine                {len(traced['pushed'])} tensors, {sent} numbers",
            f"equal to the trainer's weights    {same}",
        ),
    }


def fenced(*lines: str) -> str:
    return "\n".join(["```", *lines, "```"])


def rounding(value: float) -> str:
    """A number that rounding makes. It depends on the processor, so only its size is shown."""
    return "under 1e-5" if value < NOTHING else f"{value:.2g}"


# --- ablations that need no run ---------------------------------------------------------------------------------------


def equal_rewards() -> dict[str, float]:
    """Advantages of groups whose rewards are all equal: group sizes 2 to 16, rewards 0.1 to 0.9."""
    broken = broken_grpo("equal-rewards")
    largest = largest_right = count = wrong = 0.0
    for group_size in range(2, 17):
        for tenths in range(1, 10):
            rewards = torch.full((group_size,), tenths / 10)
            advantage = broken.compute_advantages(rewards, group_size).abs().max().item()
            largest = max(largest, advantage)
            largest_right = max(largest_right, grpo.compute_advantages(rewards, group_size).abs().max().item())
            wrong += advantage > 0
            count += 1
    return {"groups": count, "wrong": wrong, "largest": largest, "right_largest": largest_right}


def masked_nan() -> dict[str, float]:
    """The loss of three tokens: one is usual, one has ratio e^100 and advantage 0, one is outside the mask and NaN."""
    given = {
        "logprobs": torch.tensor([[-1.0, -2.0], [-1.0, math.nan]]),
        "old_logprobs": torch.tensor([[-101.0, -2.0], [-1.0, -1.0]]),
        "ref_logprobs": None,
        "advantages": torch.tensor([0.0, 1.0]),
        "response_mask": torch.tensor([[True, True], [True, False]]),
        "clip_low": 0.2,
        "clip_high": 0.2,
        "kl_coef": 0.0,
        "denominator": 2.0,
    }
    losses = {"right": grpo.policy_loss(**given), "broken": broken_grpo("nan").policy_loss(**given)}
    return {name: loss.item() for name, loss in losses.items()}


def kl_estimators() -> dict[str, dict[str, float]]:
    """The KL from the embedded model to its teacher, at the tokens of `embedded`: the estimators and their gradients.

    "exact" sums over the vocabulary: KL(policy || reference) at each token. Its gradient is what a penalty should have.
    """
    rows = one_batch.read_batch(FOLDER / "embedded.jsonl.gz")
    policy = AutoModelForCausalLM.from_pretrained(START, dtype=torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(TEACHER, dtype=torch.float32)
    width = max(len(row["prompt_ids"]) + len(row["response_ids"]) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)  # True on response tokens
    for i, row in enumerate(rows):
        tokens = row["prompt_ids"] + row["response_ids"]
        ids[i, : len(tokens)] = torch.tensor(tokens)
        mask[i, len(row["prompt_ids"]) : len(tokens)] = True
    targets, mask = ids[:, 1:, None], mask[:, 1:]
    with torch.no_grad():
        of_reference = reference(ids).logits[:, :-1].log_softmax(-1)  # (N, L - 1, V)
    of_policy = policy(ids).logits[:, :-1].log_softmax(-1)
    logprobs = of_policy.gather(2, targets)[..., 0]
    ref_logprobs = of_reference.gather(2, targets)[..., 0]
    per_token = {
        "exact": (of_policy.exp() * (of_policy - of_reference)).sum(-1),
        "k1": logprobs - ref_logprobs,
        "k2": (logprobs - ref_logprobs).square() / 2,
        "k3": grpo.kl_to_reference(logprobs, ref_logprobs, mask),
    }
    results = {}
    for name, values in per_token.items():
        gradients = torch.autograd.grad(values[mask].mean(), list(policy.parameters()), retain_graph=True)
        gradient = one_batch.vector(list(gradients))
        if name == "exact":
            exact = gradient
        results[name] = {
            "mean": values[mask].mean().item(),
            "deviation": values[mask].std().item(),
            "length": float(gradient.norm() / exact.norm()),
            "cosine": cosine(gradient, exact),
        }
    return results


def token_ids() -> dict[str, float]:
    """How many recorded responses have other token ids after decoding and encoding."""
    changed = count = 0
    for batch, flags in BATCHES.items():
        folder = ROOT / "baselines" / ("maze-start" if batch == "maze" else "warm-start")
        if "--environment" in flags:
            folder = ROOT / "baselines/environments-start"
        tokenizer = AutoTokenizer.from_pretrained(folder)
        for row in one_batch.read_batch(FOLDER / f"{batch}.jsonl.gz"):
            text = tokenizer.decode(row["response_ids"])
            changed += tokenizer.encode(text, add_special_tokens=False) != row["response_ids"]
            count += 1
    return {"responses": count, "changed": changed}


def without_push() -> dict[str, Any]:
    """A real run that never gives the engine new weights: what ends it, and in which step."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "grpo_broken.py"
        file.write_text(broken_source(diff_of("push")))
        ended = study.launch(file, f"--steps 10 --eval-prompts 0 --run-dir {scratch}/run".split())
    code, step = re.search(r"error\[([\w-]+)\]: step (\d+)", ended.stdout).groups()
    gap = re.search(r"disagree by ([\d.e-]+) per token", ended.stdout)[1]
    return {"code": code, "step": int(step), "gap": float(gap)}


def without_reset() -> dict[str, list[float]]:
    """The gap in each of four real steps on the same eight mazes, with the reset of the prefix cache and without it.

    A maze has 56 tokens. Whole blocks of a prompt are cached, and a block has 32.
    """
    with tempfile.TemporaryDirectory() as scratch:
        code = Path(scratch) / "code"
        code.mkdir()
        copy_of_code(diff_of("prefix-cache"), code)
        problems = Path(scratch) / "mazes.jsonl"
        rows = itertools.islice(tasks.maze(random.Random(0)), 8)
        problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
        flags = f"--model {ROOT}/baselines/maze-start --dataset {problems} --max-prompt-tokens 64 --steps 4 "
        flags += "--max-response-tokens 20 --prompts-per-step 8 --learning-rate 2e-4 --warmup-steps 1 "
        flags += "--eval-prompts 0 --max-logprob-gap 100"
        gaps = {}
        for name, folder in (("right", ROOT), ("broken", code)):
            run_dir = Path(scratch) / name
            subprocess.run(
                [sys.executable, folder / "algos/grpo.py", *flags.split(), "--run-dir", run_dir],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
                stdout=subprocess.DEVNULL,
                check=True,
            )
            gaps[name] = [row["mismatch/logprob_abs_mean"] for row in read_metrics(run_dir) if row["step"]]
    return gaps


OTHERS: dict[str, Callable[[], dict]] = {
    "equal-rewards": equal_rewards,
    "nan": masked_nan,
    "token-ids": token_ids,
    "push": without_push,
    "prefix-cache": without_reset,
    "walk": walk,
    "kl": kl_estimators,  # last: a process that has run a backward can't be forked any more
}


def measure(name: str) -> list[dict] | dict:
    """All numbers of an ablation."""
    if name in OTHERS:
        return OTHERS[name]()
    cases = []
    for case in CASES[name]:
        numbers = compare(right_trace(case), trace(case, diff_of(name)))
        cases.append({"batch": case.batch, "flags": case.flags} | numbers)
    return cases


def measure_all(names: tuple[str, ...], folder: Path) -> None:
    """Measure, and write the results into measured.json, next to those of other names."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / MEASURED
    for name in names or (*CASES, *OTHERS):
        results = json.loads(file.read_text()) if file.is_file() else {}
        results[name] = measure(name)
        order = [known for known in (*CASES, *OTHERS) if known in results]
        file.write_text(json.dumps({known: results[known] for known in order}, indent=1) + "\n")
        print(f"{name}: {results[name]}", flush=True)


# --- learning ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run with a detail broken."""

    name: str
    seed: int

    def file(self, folder: Path) -> Path:
        return folder / "learning" / self.name / f"seed{self.seed}.csv"

    def flags(self) -> str:
        return f"{claims.TASKS['arithmetic']} --seed {self.seed}"


def learn(cell: Cell, folder: Path) -> str:
    """Train with a detail broken, write the run's CSV and JSON, say how it ended. Raises RuntimeError if it fails."""
    diff = diff_of(cell.name)
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "grpo_broken.py"
        file.write_text(broken_source(diff))
        run_dir = Path(scratch) / "run"
        ended = study.launch(file, [*cell.flags().split(), "--run-dir", str(run_dir)])
        rows, about = study.result(run_dir, ended.returncode, ended.stdout)
    about |= {"flags": cell.flags(), "seed": cell.seed, "diff": diff}
    study.write_run(cell.file(folder), rows, about, claims.COLUMNS)
    minutes = sum(row.get("time/step", 0.0) for row in rows) / 60
    return f"{study.final_accuracy(rows):.1%} in {minutes:.1f} minutes"


def learn_all(names: tuple[str, ...], seeds: tuple[int, ...], folder: Path) -> None:
    """A seed of all ablations comes before the next, so half a study says something."""
    asked = [Cell(name, seed) for seed in seeds for name in names or LEARNED]
    cells = [cell for cell in asked if not cell.file(folder).exists()]
    if len(cells) < len(asked):
        known = len(asked) - len(cells)
        print(f"{known} of {len(asked)} runs are in {folder} already; another --folder runs them anew")
    if failed := study.run_all(cells, lambda cell: learn(cell, folder), jobs=1):
        sys.exit(f"error: {failed} of {len(cells)} runs failed; the same command repeats them")


def final_accuracies(files: list[Path]) -> dict[int, float]:
    """seed -> greedy accuracy of the last evaluation."""
    rows = {int(file.stem.removeprefix("seed")): baselines.read_curve(file) for file in files}
    return {seed: study.final_accuracy(curve) for seed, curve in rows.items()}


def controls() -> list[Path]:
    """The CSVs of the embedded job as it is, from docs/claims.md. Only the seeds that `learn` has."""
    return [claims.COMMITTED / f"arithmetic/grpo/seed{seed}.csv" for seed in SEEDS]


# --- what the page says -----------------------------------------------------------------------------------------------


def sentence(numbers: dict) -> str:
    """What one case of CASES shows."""
    where = f"on {Case(numbers['batch'], numbers['flags'])}"
    if numbers["difference"] < NOTHING:
        return f"{where}: the same gradient (relative difference under 1e-5)."
    text = (
        f"{where}: the first update's gradient is {numbers['length']:.2f} times as long as the right one, and the "
        f"cosine between them is {numbers['cosine']:z.3f}. For the weights' move in the whole step, the cosine is "
        f"{numbers['move_cosine']:z.3f}."
    )
    if is_stopped(numbers):
        text += f" The gap to the engine is {nats(numbers['gap'])}, so the run stops after this step."
    return text


def is_stopped(numbers: dict) -> bool:
    """Whether --max-logprob-gap would end the run."""
    dtype = torch.bfloat16 if "bfloat16" in BATCHES[numbers["batch"]] else torch.float32
    return numbers["gap"] > prepare.MAX_GAP[dtype]


def nats(gap: float) -> str:
    return f"{gap:.2f} nats per token" if gap > 0.1 else f"{gap:.1g} nats per token"


def says_measured(cases: list[dict]) -> str:
    return measured_lines(*map(sentence, cases))


def measured_lines(*lines: str) -> str:
    """One paragraph, or a list if there are several."""
    if len(lines) == 1:
        return f"**Measured** {lines[0]}"
    return "\n".join(f"- **Measured** {line}" for line in lines)


def says_engine_logprobs(cases: list[dict]) -> str:
    float32, bfloat16 = cases
    more = (
        f" The gap is {nats(bfloat16['gap'])}. The ratios of the first update should be 1, and are off by up to "
        f"{bfloat16['largest_ratio']:.2f}."
    )
    return measured_lines(sentence(float32), sentence(bfloat16) + more)


def says_shared_prompt(cases: list[dict]) -> str:
    (numbers,) = cases
    saved = 1 - numbers["tokens"] / numbers["right_tokens"]
    return measured_lines(
        f"{sentence(numbers)} The forward passes have {numbers['tokens']} tokens instead of {numbers['right_tokens']}, "
        f"{saved:.0%} fewer, though a prompt has only six tokens here."
    )


def says_mean_of_means(cases: list[dict]) -> str:
    (numbers,) = cases
    return measured_lines(f"{sentence(numbers)} The step has {numbers['forwards']} micro-batches in four updates.")


def says_clip_side(cases: list[dict]) -> str:
    (numbers,) = cases
    return measured_lines(
        f"on {Case(numbers['batch'], numbers['flags'])}, so 16 updates at the full learning rate. The first update is "
        "the same, because its ratios are 1. For the weights' move in all 16, the cosine is "
        f"{numbers['move_cosine']:z.3f}. In this step {numbers['clipped']:.1%} of the tokens are where the right clip "
        f"would end their gradient. With the right code {numbers['right_clipped']:.1%} are."
    )


def says_masters(cases: list[dict]) -> str:
    lines = []
    for numbers, rate in zip(cases, ("1e-4", "1e-6"), strict=True):
        lines.append(
            f"on `{numbers['batch']}` at a learning rate of {rate}: the last three updates change "
            f"{numbers['moved']:.1%} of the weights instead of {numbers['right_moved']:.1%}."
        )
    return measured_lines(*lines)


def says_equal_rewards(found: dict) -> str:
    return measured_lines(
        f"on {found['groups']:.0f} groups of equal rewards (sizes 2 to 16, rewards 0.1 to 0.9): {found['wrong']:.0f} "
        f"get an advantage that isn't 0, up to {found['largest']:.2f}. With the right code, the largest "
        f"is {found['right_largest']:.0f}."
    )


def says_nan(found: dict) -> str:
    return measured_lines(
        "on two responses. One has a token with a ratio of e^100 and advantage 0, and the other has NaN outside its "
        f"mask. The loss is {found['broken']:.2f} instead of {found['right']:.2f}."
    )


def says_kl(found: dict) -> str:
    lines = [
        "| loss term | mean, nats | standard deviation over tokens | length of the gradient | cosine of the gradient |",
        "|---|---|---|---|---|",
    ]
    for name, values in found.items():
        label = "the KL itself, summed over the vocabulary" if name == "exact" else name
        lines.append(
            f"| {label} | {values['mean']:.4f} | {values['deviation']:.3f} | {values['length']:.2f} | "
            f"{values['cosine']:z.2f} |"
        )
    return "\n".join(lines)


def says_token_ids(found: dict) -> str:
    return measured_lines(
        f"on the {found['responses']:.0f} recorded responses: after decoding and encoding, {found['changed']:.0f} have "
        "other ids."
    )


def says_push(found: dict) -> str:
    return measured_lines(
        f"with a real run: it ends in step {found['step']} with `error[{found['code']}]`, because of a gap of "
        f"{nats(found['gap'])}."
    )


def says_prefix_cache(found: dict) -> str:
    *first, last = [rounding(gap) for gap in found["broken"]]
    right = max(found["right"])
    return measured_lines(
        "with real runs of four steps on the same eight mazes. Without the reset, the gaps of the four steps are "
        f"{', '.join(first)} and {last} nats per token. With it, each is {rounding(right)}."
    )


SAYS: dict[str, Callable[[Any], str]] = {
    "engine-logprobs": says_engine_logprobs,
    "shared-prompt": says_shared_prompt,
    "mean-of-means": says_mean_of_means,
    "clip-side": says_clip_side,
    "masters": says_masters,
    "equal-rewards": says_equal_rewards,
    "nan": says_nan,
    "kl": says_kl,
    "token-ids": says_token_ids,
    "push": says_push,
    "prefix-cache": says_prefix_cache,
}


def trained(name: str, folder: Path) -> tuple[dict[int, float], dict[int, float]]:
    """Accuracies with a detail broken, and those of the control: seed -> accuracy, of the seeds that both have."""
    broken = final_accuracies(sorted((folder / "learning" / name).glob("seed*.csv")))
    control = final_accuracies(controls())
    seeds = sorted(broken.keys() & control.keys())
    return {seed: broken[seed] for seed in seeds}, {seed: control[seed] for seed in seeds}


def count_seeds(seeds: dict) -> str:
    return "1 seed" if len(seeds) == 1 else f"{len(seeds)} seeds"


def learned(name: str, folder: Path) -> str:
    """What the runs of `learn` show, next to the control with the same seeds."""
    broken, control = trained(name, folder)
    difference = study.paired(broken, control)
    if difference is None:
        return f"**Trained with it:** not yet. `python scripts/walkthrough.py learn {name}` does it."
    ends = ", ".join(f"{accuracy:.1%}" for accuracy in broken.values())
    right = ", ".join(f"{accuracy:.1%}" for accuracy in control.values())
    text = f"**Trained with it,** {count_seeds(broken)}: greedy accuracy after 52 steps is {ends}. "
    text += f"The control has {right}."
    if not math.isnan(difference.low):
        text += f" The difference is {difference} points."
    return text


def learned_difference(name: str, folder: Path) -> str:
    """Broken minus control, in points, and the number of seeds. "" for a detail without a run."""
    broken, control = trained(name, folder)
    difference = study.paired(broken, control)
    return "" if difference is None else f"{difference} ({count_seeds(broken)})"


def seeds_differ() -> str:
    """The spread of the control's seeds, and how wide an interval it makes."""
    finals = list(final_accuracies(controls()).values())
    deviation = statistics.stdev(finals)
    return measured_lines(
        f"on the control: its {len(finals)} seeds end at {min(finals):.1%} to {max(finals):.1%}. Their standard "
        f"deviation is {100 * deviation:.1f} points. With so much noise, the 95 % interval of a mean over three "
        f"seeds reaches {100 * study.half_width(deviation, 3):.0f} points to each side, and over ten seeds "
        f"{100 * study.half_width(deviation, 10):.0f}. A single run has no interval at all."
    )


def norms() -> str:
    """How often --max-grad-norm has clipped in the control's runs. A step's norm is the mean of its four updates."""
    values = [row["train/grad_norm"] for file in controls() for row in baselines.read_curve(file) if row["step"]]
    above = sum(value > 1 for value in values)
    return measured_lines(
        f"on the {len(values)} steps of the control's {len(controls())} runs, with the mean norm of each step's four "
        f"updates. The median is {statistics.median(values):.2f}, and the largest is {max(values):.2f}. "
        f"It is above 1, where the clip begins, in {above} steps."
    )


def texts(folder: Path) -> dict[str, str]:
    """name of a mark -> its text, for all marks of the page."""
    results = json.loads((folder / MEASURED).read_text())
    known = dict(results["walk"])
    known |= {"seeds": seeds_differ(), "norms": norms(), "summary": summary(results, folder)}
    found = {}
    for name in marked(PAGE.read_text()):
        if name in known:
            found[name] = known[name]
            continue
        parts = []
        if name in results:
            parts.append(SAYS.get(name, says_measured)(results[name]))
        if name in LEARNED:
            parts.append(learned(name, folder))
        found[name] = "\n\n".join(filter(None, parts))
    return {name: wrapped(text) for name, text in found.items()}


def wrapped(text: str) -> str:
    """The text with lines of at most 140 characters, as on the rest of the page. Tables and blocks stay as they are."""
    if text.startswith(("|", "```")):
        return text
    lines = []
    for line in text.splitlines():
        indent = "  " if line.startswith("- ") else ""
        pieces = textwrap.wrap(line, 140, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        lines += pieces or [""]  # an empty line stays
    return "\n".join(lines)


def summary(results: dict, folder: Path) -> str:
    """A line for each detail that was broken on a batch, or in training."""
    lines = [
        "| detail | batch | first gradient, cosine | weights' move, cosine | stopped by the gap | trained, points |",
        "|---|---|---|---|---|---|",
    ]
    for title, name in titles(PAGE.read_text()):
        if name not in CASES and name not in LEARNED:
            continue
        cells = {"batch": "", "cosine": "", "move": "", "stops": ""}
        if name in results:
            numbers = results[name][-1]  # of several cases the last
            cells = {
                "batch": f"`{numbers['batch']}`" + (f", `{numbers['flags']}`" if numbers["flags"] else ""),
                "cosine": f"{numbers['cosine']:z.3f}",
                "move": f"{numbers['move_cosine']:z.3f}",
                "stops": "yes" if is_stopped(numbers) else "",
            }
        link = f"[{title}](#{anchor(title)})"
        lines.append(f"| {link} | {' | '.join(cells.values())} | {learned_difference(name, folder)} |")
    return "\n".join(lines)


def titles(page: str) -> list[tuple[str, str]]:
    """(title, name of the first mark below it) of each detail, such as ("12. Masks have holes", "holes")."""
    found = []
    for section in re.split(r"^### ", page, flags=re.MULTILINE):
        title = section.partition("\n")[0]
        marks = marked(section)
        if re.match(r"\d+\. ", title) and marks:
            found.append((title, marks[0]))
    return found


def anchor(heading: str) -> str:
    """The anchor that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def rebuild(folder: Path) -> None:
    """Write all numbers into the page."""
    PAGE.write_text(filled(PAGE.read_text(), texts(folder)))


def record(names: tuple[str, ...], folder: Path) -> None:
    """Sample batches with the engine, in the first step of real runs."""
    for name in names or BATCHES:
        with tempfile.TemporaryDirectory() as scratch:
            words = [*BATCHES[name].split(), "--steps", "1", "--eval-prompts", "0", "--run-dir", scratch]
            subprocess.run([sys.executable, "algos/grpo.py", *words], check=True, cwd=ROOT)
            one_batch.write_batch(Path(scratch) / "rollouts/step_000001.jsonl", folder / f"{name}.jsonl.gz")


def check_names(names: tuple[str, ...], known) -> None:
    """Raises BadInput for a name that does not exist."""
    for name in names:
        if name not in known:
            raise errors.BadInput(f'"{name}" is not one of {", ".join(known)}')


def main(args: Args) -> None:
    folder = ROOT / args.folder
    torch.set_num_threads(1)
    if args.action == "walk":
        for text in walk().values():
            print(text.replace("```", "").strip() + "\n")
    elif args.action == "measure":
        check_names(args.names, (*CASES, *OTHERS))
        measure_all(args.names, folder)
    elif args.action == "learn":
        check_names(args.names, LEARNED)
        learn_all(args.names, args.seeds, folder)
    elif args.action == "record":
        check_names(args.names, BATCHES)
        record(args.names, folder)
    else:
        rebuild(folder)


if __name__ == "__main__":
    errors.launch(main, tyro.cli(Args, description=__doc__))
