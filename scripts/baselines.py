"""The committed baselines: train them, print their tables, draw their curves.

    python scripts/baselines.py                                     prints the tables of the committed CSVs
    python scripts/baselines.py --rebuild                           writes them into the READMEs, and the curves
    python scripts/baselines.py --run grpo ppo --seeds 0 1 2        trains on the embedded task again, then rebuilds
    python scripts/baselines.py --task sums --run grpo --seeds 0    trains SmolLM2-135M (scripts/smollm2_from_pypi.py)
    python scripts/baselines.py --task sums --run start             evaluates the initial model, in three wordings
    python scripts/baselines.py --task sums --add runs/FOLDER       takes a finished run as a baseline (--name)

A baseline is a task's recipe (RECIPES) and what a run changes in it (RUNS), or other commands (CONTROLS). Models that
it needs and that are too large to commit are made first (MADE). Its CSV has the curve. Its JSON is the run.json,
without this machine's folders, and for the tasks of STARTS what scripts/evaluate.py says of the trained model.
"""

import csv
import dataclasses
import json
import math
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import accumulate
from pathlib import Path

import blocks
import pictures
import study
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from common import errors
from common.data import arithmetic, tasks
from common.preflight import folders
from common.preflight.docstrings import help_text
from common.preflight.run_directory import comparable, flat, read_metrics
from common.run.guards import SILENT_STEPS

ROOT = Path(__file__).parents[1]
BASELINES = ROOT / "baselines"
COLUMNS = (
    "step",
    "reward/mean",
    "eval/accuracy",
    "response/length_mean",
    "train/entropy",
    "mismatch/logprob_abs_max",
    "time/step",
    "sampling/prompts_generated",
    "critic/explained_variance",
    "prm/pair_accuracy",
    "train/loss",
    "reward/accuracy",
    "teacher/kl",
    "environment/turns",
    "eval/turns",
    "eval/reward",
)
SMOLLM2 = "models/SmolLM2-135M-Instruct"
MAZE_START, REVERSE_START, SUMS_TEACHER = "baselines/maze-start", "runs/reverse-start", "runs/sums-teacher"
HYBRID_START = "baselines/hybrid-start"
# For a task of scripts/claims.py. It was made once, with the demonstrations of claims.write_reversal():
#     python algos/sft.py --dataset runs/reversal/demonstrations.jsonl --steps 60 --output baselines/reversal-start
REVERSAL_START = "baselines/reversal-start"
SHUFFLED_TESTS = "runs/functions-shuffled.jsonl"
OF_135M = "--dtype float32 --prompts-per-step 32 --group-size 8 --mini-batches 2 --steps {} --learning-rate 2e-5 "
OF_135M += "--warmup-steps 2 --schedule linear --eval-every 5 --max-response-tokens {}"
DAPO_OF_135M = "--prompts-per-step 16 --gen-prompts 32 --overlong-cache 8"
FUNCTIONS = f"--model {SMOLLM2} --reward code {OF_135M.format(20, 64)} --prompts-per-step 16"  # its responses are long
RECIPES = {  # task: flags of all its runs
    "arithmetic": "--eval-every 5",
    "calculator": "--environment calculator --eval-every 5",
    "guess": "--environment guess --eval-every 10 --steps 40 --learning-rate 5e-4",
    "squares": "--dataset squares --eval-every 5",
    # The embedded job with another model. What that job sets by itself has to be said here.
    "hybrid": f"--model {HYBRID_START} --dataset arithmetic --rollout-backend hf --dtype float32 "
    "--max-prompt-tokens 64 --max-response-tokens 48 --prompts-per-step 64 --mini-batches 4 --warmup-steps 2 "
    "--schedule linear --eval-every 5",
    "sums": f"--model {SMOLLM2} --dataset sums {OF_135M.format(40, 24)}",
    "gcd": f"--model {SMOLLM2} --dataset gcd {OF_135M.format(40, 24)}",
    "functions": f"--dataset functions {FUNCTIONS}",
    "reverse": f"--model {REVERSE_START} --dataset reverse --reward baselines/nearness.py:score "
    f"{OF_135M.format(20, 24)}",
    "maze": f"--model {MAZE_START} --dataset maze --max-prompt-tokens 64 --max-response-tokens 20 --steps 100 "
    "--prompts-per-step 64 --group-size 8 --mini-batches 4 --learning-rate 2e-4 --warmup-steps 2 --schedule linear "
    "--eval-every 10",
}
# (task, run): flags after the recipe's. If they begin with --model, they take its place. Without an entry a run is the
# recipe. The run ALGORITHM-ANYTHING is of algos/ALGORITHM.py.
RUNS = {
    ("arithmetic", "grpo-lora"): "--lora-rank 8 --learning-rate 1e-3",
    ("calculator", "grpo-off"): "--model baselines/environments-start --dataset calculator --eval-every 5 --steps 52 "
    "--learning-rate 2e-4 --schedule linear --warmup-steps 2 --max-prompt-tokens 64 --max-response-tokens 48",
    ("guess", "ppo"): "--steps 60",
    ("hybrid", "grpo"): "--steps 52 --group-size 8 --learning-rate 2e-4",
    ("hybrid", "ppo"): "--steps 50 --group-size 4 --learning-rate 1.5e-4 --critic-learning-rate 1e-3",
    # The tests of another problem: --reward code pays for nothing that the prompt asks for. All flags, because a run
    # takes --dataset only once.
    ("functions", "grpo-shuffled"): f"{FUNCTIONS} --dataset {SHUFFLED_TESTS} --eval-dataset functions",
    ("gcd", "grpo-long"): "--steps 120",
    ("sums", "grpo-long"): "--steps 120",
    ("sums", "grpo-short"): "--steps 20",  # as many responses as ppo, reinforce_pp and opd
    ("sums", "max_rl-long"): "--steps 120",
    ("sums", "grpo-random"): "--reward gsm8k=0 baselines/random_reward.py:score --steps 20",
    ("sums", "dapo"): DAPO_OF_135M,
    ("sums", "dapo-long"): f"{DAPO_OF_135M} --steps 120",
    ("sums", "reinforce_pp"): "--steps 20",
    ("sums", "opd"): f"--teacher {SUMS_TEACHER} --steps 20",
    ("sums", "ppo"): "--critic-learning-rate 5e-5 --steps 20",
    ("sums", "ppo-long"): "--critic-learning-rate 5e-5 --steps 120",
    ("sums", "prime"): "--prompts-per-step 16 --gen-prompts 32 --accuracy-range 0.1 0.9 "
    "--prm-learning-rate 1e-5 --c-process 0.3 --steps 20",
}
# Runs that never get a reward. They end as `no-signal`, with exit code 3.
ENDED_BY_GUARD = {("calculator", "grpo-off"), ("functions", "grpo-shuffled")}
REJECTED = {"prompts": 2560, "n": 4}  # problems, and responses of the initial model to each, for the controls
# Runs that sample nothing while they train: number of responses from which their data were taken.
OFFLINE = {
    ("arithmetic", "dpo"): 4096 * 8,
    ("sums", "dpo"): REJECTED["prompts"] * REJECTED["n"],
    ("sums", "rejection"): REJECTED["prompts"] * REJECTED["n"],
    ("sums", "sft"): 0,
    ("gcd", "sft"): 0,
    ("reverse", "sft"): 0,
}
SFT = f"algos/sft.py --model {SMOLLM2} --dtype float32 --learning-rate 2e-5 --steps {{}}"  # of 64 answers each
TO_FOLDER = "--output {folder}/model --run-dir {folder}/run"
UNTRAINED = f"scripts/evaluate.py --model {SMOLLM2} --dataset sums --split train --dtype float32 "
UNTRAINED += f"--prompts {REJECTED['prompts']} --n {REJECTED['n']} --max-response-tokens 24 "
CONTROLS = {  # (task, run): commands that leave a model in {folder}/model
    ("sums", "sft"): [f"{SFT.format(100)} {TO_FOLDER} --dataset sums"],
    ("gcd", "sft"): [f"{SFT.format(40)} {TO_FOLDER} --dataset gcd"],
    ("reverse", "sft"): [  # more of what made the start; run it with seed 1, as seed 0 begins with the start's problems
        f"algos/sft.py --model {REVERSE_START} --dtype float32 --dataset reverse --steps 20 --learning-rate 5e-5 "
        f"--warmup-steps 2 {TO_FOLDER}"
    ],
    ("sums", "rejection"): [
        UNTRAINED + "--save-right {folder}/right.jsonl",
        f"{SFT.format(40)} {TO_FOLDER} --dataset {{folder}}/right.jsonl",  # nine epochs of some 300 right responses
    ],
    ("sums", "dpo"): [
        UNTRAINED + "--save-pairs {folder}/pairs.jsonl",
        f"algos/dpo.py --model {SMOLLM2} --dtype float32 --learning-rate 1e-5 --warmup-steps 4 --batch-size 32 "
        f"--steps 24 {TO_FOLDER} --dataset {{folder}}/pairs.jsonl",
    ],
}
# Tasks whose models are also sampled from: the model that their runs start from.
STARTS = {"sums": SMOLLM2, "gcd": SMOLLM2, "functions": SMOLLM2, "maze": MAZE_START, "reverse": REVERSE_START}
MADE = {  # models and data that are too large to commit: the command that makes each
    SHUFFLED_TESTS: f"baselines/shuffled_tests.py {SHUFFLED_TESTS}",
    REVERSE_START: f"algos/sft.py --model {SMOLLM2} --dtype float32 --dataset reverse --steps 30 --learning-rate 5e-5 "
    f"--output {REVERSE_START}",
    SUMS_TEACHER: f"{SFT.format(100)} --output {SUMS_TEACHER} --dataset sums",  # the run `sft` of `sums`
}
WORDINGS = {  # task: how its problems are asked, and other ways to ask them
    "sums": ("Compute {}. Reply with the number only.", "What is {}?", "{} ="),
    "gcd": (
        "Compute the gcd of {}. Reply with the number only.",
        "What is the greatest common divisor of {}?",
        "Find the greatest common divisor of {}. End with the number.",
    ),
    "functions": ("{}",),
    "maze": ("{}",),
    "reverse": ("{}",),
}
EXAMPLES = {"sums": "57 - 19", "gcd": "12 and 18"}  # task: what its table puts into the wordings
# Answers of simple rules to `gcd`, which stand in its table beside what a model has learned.
RULES = {
    "the smaller number": min,
    "the smallest of both and their difference": lambda a, b: min(a, b, abs(a - b)),
    "the product of those of 2, 3 and 5 that divide both": lambda a, b: math.gcd(math.gcd(a, b), 30),
}
FRONT = {"sums": ("grpo", "grpo-random", "rejection", "sft")}  # runs that the README's table has; without an entry, all
ACCURACY = ("eval/accuracy", "Greedy accuracy, held out.")  # what a picture shows: a column, and what it is
PICTURED = {"reverse": ("eval/reward", "Share of characters that match, greedy, held out.")}  # no answer is ever right
SAMPLES = 8  # responses to each held-out problem of these tasks
HELD_OUT = 256  # problems of each of these tasks


@dataclasses.dataclass
class Args:
    task: str = "arithmetic"  # Task of --run, --flags and --add: a key of RECIPES.
    run: tuple[str, ...] = ()  # Runs to train again: names of algorithms, or of controls (RUNS, CONTROLS, start).
    seeds: tuple[int, ...] = (0, 1, 2)
    add: tuple[str, ...] = ()  # Folders of runs to take as baselines.
    name: str = ""  # With --add: name of the run in RUNS, where it is not its algorithm's.
    rebuild: bool = False  # Write tables and curves.
    flags: str = ""  # Name of a run whose flags are printed.


def flags(task: str, name: str) -> str:
    """The flags of a baseline, without its seed."""
    own = RUNS.get((task, name), "")
    if (task, name) in OFFLINE or own.startswith("--model"):
        return own  # these are all its flags
    return f"{RECIPES[task]} {own}".strip()


def command(task: str, name: str, seed: int) -> list[str]:
    """The words of a baseline's command, after python."""
    return [f"algos/{name.partition('-')[0]}.py", *flags(task, name).split(), "--seed", str(seed)]


def commands(task: str, name: str, seed: int) -> list[str]:
    """The commands of a control, after python."""
    return [f"{words} --seed {seed}" for words in CONTROLS[task, name]]


def train(task: str, name: str, seed: int) -> None:
    """Train a baseline, and keep its results. Its folder stays if that fails: a run takes up to hours."""
    scratch = tempfile.mkdtemp(prefix=f"{task}-{name}-seed{seed}-")
    if (task, name) in CONTROLS:
        control(task, name, seed, scratch)
    else:
        run_dir = Path(scratch) / "run"
        words = ["--run-dir", str(run_dir), *(["--output", f"{scratch}/model"] if (task, name) in OFFLINE else [])]
        ended = subprocess.run([sys.executable, *command(task, name, seed), *words], cwd=ROOT).returncode
        if ended != (3 if (task, name) in ENDED_BY_GUARD else 0):
            sys.exit(f"error: {name}, seed {seed}: exit code {ended} of the run in {run_dir}")
        print(f"{name}, seed {seed}: trained in {run_dir}; if what follows fails, --add takes it", flush=True)
        add(run_dir, task, name)
    shutil.rmtree(scratch)


def prepare(task: str, name: str) -> None:
    """Make the models and data of MADE that a run needs and that are missing."""
    named = [flags(task, name), *CONTROLS.get((task, name), [])]
    for folder, words in MADE.items():
        there = any((ROOT / made).is_file() for made in (folder, f"{folder}/model.safetensors"))
        if folder in " ".join(named).split() and not there:
            # A run directory that stayed after an interruption would be refused by each later try.
            with tempfile.TemporaryDirectory() as run_dir:
                run_directory = ["--run-dir", run_dir] if words.startswith("algos/") else []
                subprocess.run([sys.executable, *words.split(), *run_directory], check=True, cwd=ROOT)


def add(run_dir: Path, task: str, name: str) -> None:
    """Keep the curve and run.json of a run, and evaluate its last checkpoint for the tasks of STARTS.

    Raises BadInput for a run with other flags than this baseline's, one that was stopped early, or one without a model.
    """
    about = json.loads((run_dir / "run.json").read_text())
    rows = read_metrics(run_dir)
    check_ran(run_dir, about, rows, task, name)
    checkpoints = folders.complete(run_dir)
    if not checkpoints:
        raise errors.BadInput(f"{run_dir}: has no complete checkpoint, so there is no model to evaluate")
    trained = checkpoints[-1] / "model"
    about["argv"] = command(task, name, about["seed"])
    about.pop("launcher", None)  # names a folder of this machine
    if (task, name) in OFFLINE:
        about["args"] |= {"dataset": [f"baselines/{arithmetic.PAIRS.name}"], "output": f"runs/{name}"}
        about["responses"] = OFFLINE[task, name]
        about["evaluation"] = evaluate(task, trained)
        rows = [{"step": 0, "eval/accuracy": evaluate(task, arithmetic.WARM_START)["greedy"]}, *rows]
        rows[-1]["eval/accuracy"] = about["evaluation"]["greedy"]
    if "teacher" in about["args"]:
        about["args"]["teacher"] = (ROOT / about["args"]["teacher"]).relative_to(ROOT).as_posix()
    if task in STARTS:
        about["evaluation"] = evaluate(task, trained)
    words = flags(task, name).split()
    about["args"]["model"] = words[words.index("--model") + 1] if "--model" in words else "embedded"
    about["args"]["run_dir"] = ""
    keep(task, name, about, rows)


def check_ran(run_dir: Path, about: dict, rows: list[dict], task: str, name: str) -> None:
    """Raises BadInput if a run had another command than the baseline that it is to become, or did not end."""
    if (task, name) in CONTROLS:
        raise errors.BadInput(f"{name} of {task} is made by several commands; use --run {name}")
    file, *words = about["argv"]
    ran = by_flag(words)
    for flag in ("--run-dir", "--output"):
        ran.pop(flag, None)
    if ran.get("--resume") == ["auto"]:  # it was stopped, and has gone on bit for bit
        del ran["--resume"]
    wanted = command(task, name, about["seed"])
    if Path(file).name != Path(wanted[0]).name or ran != by_flag(wanted[1:]):
        raise errors.BadInput(
            f"{run_dir} ran {' '.join(about['argv'])}; the baseline {name} of {task} is {' '.join(wanted)}"
        )
    # The guard's exit code may also mean that the memory or the disk was full. Only the guard ends it at this step.
    last = SILENT_STEPS if (task, name) in ENDED_BY_GUARD else about["args"]["steps"]
    reached = rows[-1]["step"] if rows else 0
    if reached != last:
        raise errors.BadInput(f"{run_dir} was stopped after step {reached} of {last}; resume it first")


def by_flag(words: list[str]) -> dict[str, list[str]]:
    """The values of each flag. Of a flag that is given twice, the last one counts."""
    values: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            values[flag] = [value] if equals else []
        else:
            values[flag].append(word)
    return values


def control(task: str, name: str, seed: int, folder: str) -> None:
    """Run a control's commands, evaluate its model, and keep both ends of its curve."""
    # Read first: if it is missing, that is known before hours of training.
    initial = next(iter(json.loads((BASELINES / task / "start.json").read_text()).values()))
    began = time.perf_counter()
    for words in commands(task, name, seed):
        subprocess.run([sys.executable, *words.format(folder=folder).split()], check=True, cwd=ROOT)
    seconds, measured = time.perf_counter() - began, evaluate(task, f"{folder}/model")
    ran = json.loads((Path(folder) / "run/run.json").read_text())
    about = {"seed": seed, "argv": commands(task, name, seed), "responses": OFFLINE[task, name], "evaluation": measured}
    about |= {"args": {}} | {key: ran[key] for key in ("commit", "uncommitted_changes", "versions", "hardware")}
    keep(
        task,
        name,
        about,
        [
            {"step": 0, "eval/accuracy": initial["greedy"]},
            {"step": ran["args"]["steps"], "eval/accuracy": measured["greedy"], "time/step": seconds},
        ],
    )


def keep(task: str, name: str, about: dict, rows: list[dict]) -> None:
    """Write the CSV and the JSON of a baseline."""
    study.write_run(BASELINES / task / name / f"seed{about['seed']}.csv", rows, about, COLUMNS)


def evaluate(task: str, model: Path | str, dataset: str = "", recipe: str = "") -> dict[str, float]:
    """Greedy accuracy, the mean of SAMPLES samples and pass@k of a model on a task's held-out problems.

    dataset: problems in place of the task's own. recipe: flags in place of RECIPES[task].
    """
    recipe = (recipe or RECIPES[task]).split()
    own = {name: recipe[recipe.index(name) + 1] for name in ("--max-response-tokens", "--reward") if name in recipe}
    words = f"--model {model} --dataset {dataset or task} --n {SAMPLES} --dtype float32 "
    words += " ".join(f"{name} {value}" for name, value in own.items())
    said = subprocess.run(
        [sys.executable, "scripts/evaluate.py", *words.split()], check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    result = json.loads(said.stdout.splitlines()[-1])
    if any(result["ungraded"].values()):
        raise RuntimeError(f"{model}: responses that could not be graded: {result['ungraded']}")
    return {name: round(value, 4) for name, value in result.items() if isinstance(value, float)}


def start(task: str) -> None:
    """Evaluate the model that a task's runs start from on its held-out problems, in each of its wordings."""
    own, found = WORDINGS[task][0].split("{}"), {}
    with tempfile.TemporaryDirectory() as scratch:
        for wording in WORDINGS[task]:
            rows = tasks.problems(task, "test")
            for row in rows:
                row["question"] = wording.format(row["question"].removeprefix(own[0]).removesuffix(own[1]))
            file = Path(scratch) / "problems.jsonl"
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
            found[wording] = evaluate(task, STARTS[task], str(file))
    (BASELINES / task).mkdir(exist_ok=True)
    (BASELINES / task / "start.json").write_text(json.dumps(found, indent=2) + "\n")


def read_curve(path: Path) -> list[dict[str, float]]:
    """Rows of a committed CSV, without its empty fields."""
    with open(path, newline="") as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


def curves(task: str) -> dict[str, list[list[dict]]]:
    """{run: a list of rows for each seed}, from a task's committed CSVs."""
    runs = [folder for folder in sorted((BASELINES / task).iterdir()) if list(folder.glob("seed*.csv"))]
    return {folder.name: [read_curve(path) for path in sorted(folder.glob("seed*.csv"))] for folder in runs}


def settings_of(about: dict) -> dict:
    """The settings in a run.json, by name. Before --critic-lam, --lam took two: the actor's and the critic's."""
    settings = {name: comparable(value) for name, value in flat(about["args"]).items()}
    if isinstance(settings.get("lam"), list):
        settings["lam"], settings["critic_lam"] = settings["lam"]
    return settings


def described(task: str, name: str) -> list[dict]:
    """The run.json of each seed. Their flags must be the same, or they are not one experiment.

    Except the seed, whether the run was stopped and resumed, and the token budget, whose default follows the memory. It
    only cuts micro-batches, on which the gradient doesn't depend: like another processor, it changes a curve by
    rounding.
    """
    files = sorted((BASELINES / task / name).glob("seed*.csv"))  # the CSV says that a run is done
    found = [json.loads(file.with_suffix(".json").read_text()) for file in files]
    args = [settings_of(each) for each in found]
    shared = set.intersection(*map(set, args)) - {"seed", "resume", "token_budget"}
    differing = [flag for flag in sorted(shared) if any(each[flag] != args[0][flag] for each in args)]
    if differing:
        sys.exit(f"error: the seeds in baselines/{task}/{name} have different flags: {', '.join(differing)}")
    return found


def sampled(about: dict, rows: list[dict]) -> list[int]:
    """How many responses had been sampled at each row of a run, those to dropped prompts included.

    about: its run.json.
    """
    if "responses" in about:
        return [about["responses"] * (row["step"] > 0) for row in rows]
    args = about["args"]
    drawn = [row.get("sampling/prompts_generated", args["prompts_per_step"]) * (row["step"] > 0) for row in rows]
    return [int(prompts) * args["group_size"] for prompts in accumulate(drawn)]


def pages(task: str) -> list[Path]:
    """The pages that have the table of a task. The README has room for one."""
    return [BASELINES / "README.md", *[ROOT / "README.md"] * (task == "sums")]


def page_table(task: str, page: Path) -> str:
    """The table of a page. The README's is shorter."""
    return table(task, short=page == ROOT / "README.md")


def table(task: str, short: bool = False) -> str:
    """A line for each run: greedy accuracy before and after, for the tasks of STARTS samples as well, steps, time.

    A mean over three seeds or more is followed by half of its 95 % interval (mean_of).
    short: the table of the README, with one wording of the initial model, its best, with the runs of FRONT alone, and
    without the time, which depends on what else the machine did.
    """
    return "\n".join(table_lines(task, short))


def table_lines(task: str, short: bool) -> Iterator[str]:
    sampled_too, plays = task in STARTS, task in arithmetic.WITH_ENVIRONMENT
    columns = ""  # that not every task has
    forms = {}  # what evaluate() says of samples -> its format
    if sampled_too:
        columns += f" mean@{SAMPLES} | pass@{SAMPLES} |"
        forms |= {"sampled": ".1%", f"pass@{SAMPLES}": ".1%"}
    if graded := "--reward" in RECIPES[task]:  # a score between right and wrong
        columns += " reward, greedy | reward, sampled |"  # of held-out answers
        forms |= {"greedy_reward": ".3f", "sampled_reward": ".3f"}
    if plays:
        columns += " turns before | after, each seed |"
    time, dashes, no_time = ("", "", "") if short else (" minutes |", "---|", " |")
    yield f"| run | seeds | greedy accuracy before | after, each seed | mean |{columns} steps | responses |{time}"
    yield "|---|---|---|---|---|---|---|" + dashes + "---|---|" * (sampled_too + plays + graded)

    def samples(*evaluations: dict) -> str:
        """Cells of what was sampled: means over the seeds, which have an evaluation each."""
        cells = []
        for name, form in forms.items():
            values = [found[name] for found in evaluations]
            cells.append(mean_of(list(map(exact, values)) if form == ".1%" else values, form))
        return "".join(f" {cell} |" for cell in cells)

    if sampled_too:
        initial = json.loads((BASELINES / task / "start.json").read_text())
        highest = max(found["greedy"] for found in initial.values())
        for wording, found in initial.items():
            if short and found["greedy"] < highest:
                continue
            label = "start" if wording == "{}" else f'initial model, asked "{wording.format(EXAMPLES[task])}"'
            yield f"| {label} | | {exact(found['greedy']):.1%} | | |{samples(found)} | |{no_time}"
        answer, share = most_frequent_answer(task)
        if share > max(2 / 100, highest / 2):  # A smaller share would not mislead a reader.
            yield f"| always {answer} | | {share:.1%} | | | {share:.1%} | {share:.1%} | | |{no_time}"
        for rule, share in shares_of_rules().items() if task == "gcd" else []:
            yield f"| {rule} | | {share:.1%} | | | {share:.1%} | {share:.1%} | | |{no_time}"
    for name, seeds in curves(task).items():
        if short and name not in FRONT.get(task, (name,)):
            continue
        accuracies = [[row["eval/accuracy"] for row in rows if "eval/accuracy" in row] for rows in seeds]
        if sampled_too:
            accuracies = [list(map(exact, values)) for values in accuracies]
        after = [values[-1] for values in accuracies]
        minutes = statistics.mean(sum(row.get("time/step", 0) for row in rows) for rows in seeds) / 60
        abouts = described(task, name)
        responses = statistics.mean(sampled(about, rows)[-1] for about, rows in zip(abouts, seeds))
        cells = samples(*(about["evaluation"] for about in abouts)) if sampled_too else ""
        if plays:
            turns = [[row["eval/turns"] for row in rows if "eval/turns" in row] or [1.0] for rows in seeds]
            cells += f" {turns[0][0]:.2f} | {', '.join(f'{values[-1]:.2f}' for values in turns)} |"
        yield (
            f"| `{name}` | {len(seeds)} | {statistics.mean(v[0] for v in accuracies):.1%} "
            f"| {', '.join(f'{value:.1%}' for value in after)} | {mean_of(after, '.1%')} |{cells} "
            f"{int(seeds[0][-1]['step'])} | {round(responses):,} |{'' if short else f' {minutes:.1f} |'}"
        )


def exact(share: float) -> float:
    """A share of held-out problems or samples that was stored with four digits: 0.0195 is 5 / 256, and so 2.0 %."""
    parts = HELD_OUT * SAMPLES
    return round(share * parts) / parts


def mean_of(values: list[float], form: str) -> str:
    """A mean over seeds and half of Student's 95 % interval, as in 54.8 ± 6.5%.

    The mean alone with one or two seeds, where an interval says nothing, and for seeds that all reach the same.
    """
    mean = f"{statistics.mean(values):{form}}"
    if len(values) < 3 or min(values) == max(values):
        return mean
    estimate = study.over_seeds(values)
    return f"{mean.removesuffix('%')} ± {estimate.high - estimate.mean:{form}}"


@cache
def most_frequent_answer(task: str) -> tuple[str, float]:
    """The answer that most of a task's held-out problems have, and their share."""
    answers = Counter(row["answer"] for row in tasks.problems(task, "test"))
    answer, count = answers.most_common(1)[0]
    return answer, count / answers.total()


@cache
def shares_of_rules() -> dict[str, float]:
    """The share of held-out problems of `gcd` that each of RULES answers right."""
    rows = tasks.problems("gcd", "test")
    numbers = [tuple(map(int, re.findall(r"\d+", row["question"]))) for row in rows]
    right = lambda rule: [str(rule(*pair)) == row["answer"] for pair, row in zip(numbers, rows)]
    return {name: statistics.mean(right(rule)) for name, rule in RULES.items()}


@dataclasses.dataclass
class Curve:
    """What a picture shows of a run. Each list has an item for each evaluation that all seeds have."""

    responses: list[float]
    mean: list[float]  # of the seeds
    worst: list[float]
    best: list[float]


def curve(task: str, name: str, seeds: list[list[dict]]) -> Curve:
    column, _ = PICTURED.get(task, ACCURACY)
    known = [
        [(x, row[column]) for x, row in zip(sampled(about, rows), rows) if column in row]
        for about, rows in zip(described(task, name), seeds)
    ]
    evaluations = [list(zip(*points)) for points in zip(*known)]
    return Curve(
        responses=[statistics.mean(x) for x, _ in evaluations],
        mean=[statistics.mean(values) for _, values in evaluations],
        worst=[min(values) for _, values in evaluations],
        best=[max(values) for _, values in evaluations],
    )


@pictures.styled
def draw(task: str) -> None:
    """Draw TASK/curves.svg: a panel for each run, with `grpo` in grey behind it."""
    shown = {name: curve(task, name, seeds) for name, seeds in curves(task).items()}
    # A control without a curve stands in the table alone.
    shown = {name: each for name, each in shown.items() if len(each.mean) >= 3}
    if not shown:
        return
    names = sorted(shown, key=lambda name: (name != "grpo", name))
    _, caption = PICTURED.get(task, ACCURACY)
    if any(each.worst != each.best for each in shown.values()):
        caption += " Bands: worst to best seed."
    if "grpo" in shown and len(shown) > 1:
        caption += " Grey: grpo."
    axes = pictures.panels(names, caption, "responses sampled")
    for axis, name in zip(axes, names):
        if "grpo" in shown and name != "grpo":
            line(axis, shown["grpo"], pictures.BEHIND, pictures.BEHIND, zorder=1)
        line(axis, shown[name], pictures.BLUE, pictures.PALE)
        last = shown[name].mean[-1]
        pictures.label_end(axis, shown[name].responses[-1], last, f"{100 * last:.0f} %")
    pictures.percent_axis(axes[0], max(max(each.best) for each in shown.values()))
    pictures.count_axis(axes[0], max(each.responses[-1] for each in shown.values()))
    pictures.save(axes[0].figure, BASELINES / task / "curves.svg")


def line(axis: Axes, shown: Curve, color: str, band: str, zorder: int = 2) -> None:
    """The mean of the seeds, and from the worst to the best of them."""
    axis.fill_between(shown.responses, shown.worst, shown.best, color=band, linewidth=0, zorder=zorder)
    axis.plot(shown.responses, shown.mean, color=color, linewidth=1.8, zorder=zorder, clip_on=False)


@pictures.styled
def draw_front() -> None:
    """Draw the README's first picture, sums/front.svg: what GRPO learns from a grader, and what from coin flips."""
    figure = Figure(figsize=(pictures.WIDTH, 3.6), layout="constrained")
    axis = figure.subplots()
    known = curves("sums")
    random = curve("sums", "grpo-random", known["grpo-random"])
    grpo = curve("sums", "grpo", known["grpo"])
    start, end, untaught = (f"{100 * share:.0f} %" for share in (grpo.mean[0], grpo.mean[-1], random.mean[-1]))
    line(axis, random, pictures.GREY, pictures.BEHIND)
    line(axis, grpo, pictures.BLUE, pictures.PALE)
    pictures.label_end(axis, random.responses[-1], random.mean[-1], f"random rewards: {untaught}", pictures.GREY)
    pictures.label_end(axis, grpo.responses[-1], grpo.mean[-1], f"GRPO\n{end}")
    figure.suptitle(
        f"A pretrained model learns sums on a CPU: {start} to {end}.\nOne run with random rewards does not learn.",
        x=0.01,
        ha="left",
        size=13,
        weight="bold",
    )
    below = f"responses sampled (SmolLM2-135M, held-out problems; seeds of GRPO: {len(known['grpo'])})"
    axis.set_xlabel(below, size=10, color=pictures.GREY, loc="left")
    pictures.percent_axis(axis, max(grpo.best))
    pictures.count_axis(axis, grpo.responses[-1])
    pictures.save(figure, BASELINES / "sums/front.svg")


def check_names(args: Args) -> None:
    """Refuse tasks and runs that do not exist. Raises BadInput."""
    if args.task not in RECIPES:
        raise errors.BadInput(f"--task {args.task}: use one of {', '.join(RECIPES)}")
    if "start" in args.run and args.task not in STARTS:
        raise errors.BadInput(
            f"--run start: is for {', '.join(STARTS)}; --task {args.task} starts from a committed model"
        )
    if "grpo-avx2" in args.run:
        raise errors.BadInput("--run grpo-avx2: it is grpo on a CPU without AVX-512; baselines/README.md says how")
    special = {name for task, name in (*RUNS, *OFFLINE, *CONTROLS) if task == args.task}
    algorithms = {file.stem for file in (ROOT / "algos").glob("[!_]*.py")}
    committed = {file.parent.name for file in (BASELINES / args.task).glob("*/seed*.csv")}
    known = special | algorithms | committed
    trained = known | ({"start"} if args.task in STARTS else set())
    for flag, given, names in (
        ("run", args.run, trained),
        ("flags", filter(None, [args.flags]), known),
        ("name", filter(None, [args.name]), known),
    ):
        for name in given:
            if name not in names:
                raise errors.BadInput(f"--{flag} {name}: --task {args.task} has {', '.join(sorted(names))}")
    if args.name and not args.add:
        raise errors.BadInput(f"--name {args.name}: is for --add")


def main(args: Args) -> None:
    check_names(args)
    if args.flags:
        print("\n".join(CONTROLS.get((args.task, args.flags), [flags(args.task, args.flags)])))
        return
    for name in args.run:
        prepare(args.task, name)
        if name == "start":
            start(args.task)
            continue
        for seed in args.seeds:
            train(args.task, name, seed)
    for folder in map(Path.resolve, map(Path, args.add)):  # other scripts run in ROOT
        about = json.loads((folder / "run.json").read_text())
        add(folder, args.task, args.name or about["algorithm"])
    for task in [task for task in RECIPES if (BASELINES / task).is_dir() and curves(task)]:
        print(f"{task}\n{table(task)}")
        if args.run or args.add or args.rebuild:
            draw(task)
            if task == "sums":
                draw_front()
            for page in pages(task):
                blocks.write(page, f"baselines {task}", page_table(task, page))


if __name__ == "__main__":
    errors.launch(main, tyro.cli(Args, description=help_text(__doc__)))
