"""Measure the accuracy of a model or a checkpoint with confidence intervals, and compare two models.

    python scripts/evaluate.py --model runs/grpo/checkpoints/step_000045/model
    python scripts/evaluate.py --model HuggingFaceTB/SmolLM2-135M-Instruct --dataset gsm8k --max-response-tokens 256
    torchrun --nproc-per-node 8 scripts/evaluate.py --model MODEL      (each rank takes its share of the prompts)

Public test sets, each with the prompt, the grader and the sampling of common/data/suites.py:

    python scripts/evaluate.py --model MODEL --suite math --output a.json
    python scripts/evaluate.py --model MODEL --suite aime24 gpqa-diamond humaneval:HumanEval.jsonl
    python scripts/evaluate.py --compare a.json b.json                 (two models on the same problems)

Rejection sampling: keep the right responses to training problems, and train on them.

    python scripts/evaluate.py --model MODEL --dataset sums --split train --n 4 --save-right right.jsonl
    python algos/sft.py --model MODEL --dataset right.jsonl --learning-rate 2e-5

Pairs for algos/dpo.py: a right and a wrong response to each training problem that has both.

    python scripts/evaluate.py --model MODEL --dataset sums --split train --n 8 --save-pairs pairs.jsonl

For each test set the script prints a line to quote and a JSON object: "greedy" and "sampled" (mean@n) are accuracies,
"pass@k" the share of problems that k responses solve, "interval" has their 95 % confidence intervals, and
"greedy_reward" and "sampled_reward" are mean scores, which say more with a reward model (docs/evaluation.md).
"""

import base64
import dataclasses
import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal

import results
import torch.distributed as dist
import tyro
from pydantic import NonNegativeInt, PositiveInt

from common import errors, placement, rewards
from common.data import sources, suites
from common.data.prompts import INSTRUCTIONS, Prompt, Source, load, parse
from common.data.sources import kind
from common.data.tokenizer import load_tokenizer, resolve_model
from common.preflight import checks, folders, machine, precision, ranges
from common.preflight.docstrings import help_text
from common.preflight.ranges import Seed, Temperature
from common.preflight.run_directory import check_writable, flat
from common.rewards.mixture import Rewards
from common.rollout import engines
from common.rollout.environments import episodes
from common.run import directory, evaluation
from common.run.tracking import Metrics
from common.trainer.batching import Compute


@dataclasses.dataclass
class Args:
    model: str = ""  # Folder, Hub name or modelscope:OWNER/NAME.
    dataset: tuple[str, ...] = ("arithmetic",)  # Data sets: arithmetic, gsm8k, math, FILE, OWNER/NAME, ...
    suite: tuple[str, ...] = ()
    """Public test sets: math, code, knowledge, aime24, humaneval:FILE, ... They choose what follows, except for flags
    that are given."""
    source: Annotated[Source, tyro.conf.OmitArgPrefixes] = Source()
    split: str = "test"  # Split of the data set: test or train.
    environment: str = ""  # Answers the policy between its turns: calculator, guess, FILE.py:CLASS or openenv:URL.
    reward: tuple[str, ...] = ()
    """Graders: gsm8k, math, FILE.py:FUNCTION, ... The first one decides. Default: the environment's or gsm8k."""
    prompts: NonNegativeInt = 0  # Number of prompts of each data set, its first ones. 0: all.
    n: NonNegativeInt | None = None  # Sampled responses per prompt. 0, the default: greedy decoding only.
    temperature: Temperature | None = None  # Temperature of the sampled responses. Default: 1.
    max_prompt_tokens: PositiveInt | None = None
    """Longest prompt in tokens. Longer ones are dropped. Default: 512, with --suite 4096."""
    max_response_tokens: PositiveInt | None = None  # Longest response in tokens. Default: 48.
    rollout_backend: Literal["vllm", "hf"] = "vllm"  # Engine that generates the responses.
    rollout_tp: PositiveInt = 1  # Ranks that hold one engine together (tensor parallelism).
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # Data type of the engine.
    seed: Seed = 0  # Seed of the sampled responses.
    output: str = ""  # JSON file for the results with the value of each problem, for --compare.
    compare: tuple[str, str] | None = None  # Two files of --output: compares them, and does nothing else.
    save_right: str = ""  # JSON lines file for the right ones of the sampled responses, as --dataset of algos/sft.py.
    save_pairs: str = ""  # JSON lines file for a right and a wrong response to each problem, for algos/dpo.py.


@dataclasses.dataclass
class Exam:
    """A test set, or several as one, and how it is asked, sampled and graded."""

    dataset: tuple[str, ...]
    reward_names: tuple[str, ...]
    n: int
    temperature: float
    max_prompt_tokens: int
    max_response_tokens: int
    problems: int = 0  # how many the test set has; 0: whatever is there
    # prepare() fills these.
    name: str = ""
    prompts: list[Prompt] = dataclasses.field(default_factory=list)
    reward: Any = None
    template: list = dataclasses.field(default_factory=list)  # the text around each question, for each data set


def exams(args: Args) -> list[Exam]:
    """What is to be measured. A flag that is given goes before what a suite says. Raises BadInput."""
    if args.suite:
        planned = [exam_of(spec, args) for spec in suites.expand(args.suite)]
    else:
        planned = [
            Exam(
                dataset=args.dataset,
                reward_names=("environment",) if args.environment else ("gsm8k",),
                n=0,
                temperature=1.0,
                max_prompt_tokens=512,
                max_response_tokens=48,
            )
        ]
    given = {
        "reward_names": args.reward or None,
        "n": args.n,
        "temperature": args.temperature,
        "max_prompt_tokens": args.max_prompt_tokens,
        "max_response_tokens": args.max_response_tokens,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    return [dataclasses.replace(exam, **changes) for exam in planned]


def exam_of(spec: str, args: Args) -> Exam:
    """The exam that the table of suites.py describes."""
    benchmark = suites.find(spec)
    return Exam(
        dataset=(spec,),
        reward_names=(benchmark.reward,),
        n=benchmark.n,
        temperature=benchmark.temperature,
        max_prompt_tokens=4096,
        max_response_tokens=benchmark.max_response_tokens,
        problems=0 if args.prompts else benchmark.problems,
    )


def check_flags(args: Args) -> None:
    """Refuse flags that don't go together, and files that can't be written. Raises BadInput."""
    if bool(args.model) == bool(args.compare):
        raise errors.BadInput("give either --model, to measure it, or --compare, for two files of --output")
    saving = args.save_right or args.save_pairs
    if args.compare:
        given, default = (flat(dataclasses.asdict(each)) for each in (args, Args(compare=args.compare)))
        if ignored := [name.replace("_", "-") for name in given if given[name] != default[name]]:
            raise errors.BadInput(f"--compare: --{ignored[0]} does not go together with it, as nothing is measured")
    if saving and not args.n:
        raise errors.BadInput("--save-right and --save-pairs keep sampled responses: give --n as well")
    if saving and args.environment:
        raise errors.BadInput("--save-right and --save-pairs: they keep one text, and episodes have several turns")
    check_files({"--output": args.output, "--save-right": args.save_right, "--save-pairs": args.save_pairs})
    if args.suite:
        others = {
            "--dataset": args.dataset != ("arithmetic",),
            "--split": args.split != "test",
            "--columns": args.source.columns,
            "--environment": args.environment,
            "--save-right and --save-pairs": saving,  # nobody should train on them
        }
        for flag, is_given in others.items():
            if is_given:
                raise errors.BadInput(f"--suite: {flag} does not go together with it; it names public test sets")


def check_files(named: dict[str, str]) -> None:
    """Refuse files that can't be written: otherwise one would find out after everything was sampled. Raises BadInput.

    named: flag -> file, "" where it isn't given.
    """
    given = {flag: Path(file).absolute() for flag, file in named.items() if file}
    if len(set(given.values())) < len(given):
        raise errors.BadInput(f"{' and '.join(given)}: each needs a file of its own")
    for flag, file in given.items():
        if not file.parent.is_dir():
            raise errors.BadInput(f"{flag} {named[flag]}: there is no folder {file.parent}")
        if file.is_dir():
            raise errors.BadInput(f"{flag} {named[flag]}: is a folder; name a file in it")
        check_writable(str(file.parent), flag)


def prepare(exam: Exam, args: Args, reward: Rewards, tokenizer, stop_token_ids: list[int], size: int) -> None:
    """Read an exam's prompts, and check them with its reward. Raises BadInput."""
    source = args.source
    if args.environment:
        source = episodes.attach(args.environment, reward, source, tokenizer, stop_token_ids)
    if "choice" in reward.rewards:
        source = dataclasses.replace(source, lettered=True)
    weights = parse(exam.dataset)
    for spec, weight in weights.items():
        if weight != 1:
            raise errors.BadInput(f"--dataset {spec}={weight:g}: all problems are measured alike; leave out the weight")
    specs = list(weights)
    prompts = load(exam.dataset, source, args.split, tokenizer, exam.max_prompt_tokens)
    exam.prompts = first_of_each(prompts, args.prompts) if args.prompts else prompts
    exam.reward = reward
    exam.name = "+".join(sources.short_names(specs).values())
    exam.template = [results.template_of(spec, source.template, tokenizer) for spec in specs]
    checks.check_held_out(exam.prompts, size, cure="raise --prompts, or use fewer ranks")
    reward.check_answers(exam.prompts)
    checks.try_rewards(reward, exam.prompts, tokenizer)
    if reward.environment:
        reward.environment.try_out(exam.prompts[0])
    checks.check_images(exam.prompts, Compute(), args.environment)
    if exam.problems and len(exam.prompts) != exam.problems:
        errors.warn(
            f"{exam.name}: {len(exam.prompts)} problems, and the test set has {exam.problems}; "
            "an accuracy on others is another number",
            "incomplete-suite",
        )


def first_of_each(prompts: list[Prompt], count: int) -> list[Prompt]:
    """The first `count` prompts of each data set."""
    seen: Counter[str] = Counter()
    kept = []
    for prompt in prompts:
        seen[prompt.dataset] += 1
        if seen[prompt.dataset] <= count:
            kept.append(prompt)
    return kept


Graded = list[tuple[str, float]]  # responses to a prompt, and whether each is right
Key = tuple[str, str]  # data set and id of a prompt: rows of two data sets may have one id


def question(prompt: Prompt, template: str = "") -> dict[str, Any]:
    """The part of a row of data that all responses to the prompt share. template: --template, which goes without the
    instruction of gsm8k and math.
    """
    content = prompt.meta["prompt"]
    if isinstance(content, str) and not template:
        content += INSTRUCTIONS.get(kind(prompt.dataset), "")
    row = {"prompt": content} | ({} if prompt.answer is None else {"answer": prompt.answer})
    if prompt.tools:
        row["tools"] = prompt.tools
    if hasattr(prompt.ids, "images"):
        row["images"] = [f"data:image;base64,{base64.b64encode(image).decode()}" for image in prompt.ids.images]
    return row


def ended(responses: evaluation.Graded) -> Graded:
    """The responses that were not cut off: with an end token after it, half a sentence would teach something else.

    The engine knows. The text doesn't: it can have other tokens than the ones that were sampled.
    """
    return [(response.text, response.acc) for response in responses if not response.truncated]


def right(prompt: Prompt, graded: Graded, template: str = "") -> list[dict[str, Any]]:
    """Rows for algos/sft.py: each right response as a solution."""
    return [{**question(prompt, template), "solution": text} for text, acc in graded if acc > 0]


def pair(prompt: Prompt, graded: Graded, template: str = "") -> list[dict[str, Any]]:
    """A row for algos/dpo.py: the first right response and the first wrong one, if there are both."""
    good, bad = ([text for text, acc in graded if (acc > 0) == wanted] for wanted in (True, False))
    return [{**question(prompt, template), "chosen": good[0], "rejected": bad[0]}] if good and bad else []


def save(file: str, own_rows: list[dict[str, str]], world: placement.World) -> int:
    """Write the rows of all ranks as JSON lines, and return their number. Collective: every rank calls it."""
    everyone: list = [None] * world.size
    dist.all_gather_object(everyone, own_rows)
    lines = [json.dumps(row) + "\n" for rows in everyone for row in rows]
    if world.is_main:
        Path(file).write_text("".join(lines))
    return len(lines)


def gather(graded: evaluation.GradedPrompts, world: placement.World) -> dict[Key, evaluation.Graded]:
    """Key of a prompt -> its graded responses, of all ranks. Collective: every rank calls it."""
    everyone: list = [None] * world.size
    dist.all_gather_object(everyone, [(prompt.key, responses) for prompt, responses in graded])
    return {name: responses for rank in everyone for name, responses in rank}


def share_truncated(graded: dict[Key, evaluation.Graded]) -> float:
    cut_off = [response.truncated for responses in graded.values() for response in responses]
    return sum(cut_off) / len(cut_off)


def values_of(exam: Exam, by_how: dict[str, dict[Key, evaluation.Graded]]) -> results.Problems:
    """The value of each problem. None stands for a prompt whose responses could not be graded."""
    problems = results.Problems(id=[prompt.id for prompt in exam.prompts], greedy=[], right=[])
    for prompt in exam.prompts:
        responses = by_how["greedy"].get(prompt.key)
        problems.greedy.append(None if responses is None else responses[0].acc)
        if exam.n:
            responses = by_how["sampled"].get(prompt.key)
            problems.right.append(None if responses is None else count_right(responses))
    return problems


def count_right(responses: list) -> int:
    """How many of a prompt's responses are right. Raises BadInput for a response that is right in part."""
    for response in responses:
        if response.acc not in (0, 1):
            raise errors.BadInput(
                f"a reward gave the acc {response.acc}, and mean@n and pass@k need 0 or 1; with --n 0 the mean acc of "
                "greedy responses is measured"
            )
    return sum(response.acc == 1 for response in responses)


def measure(exam: Exam, args: Args, engine, tokenizer, world: placement.World) -> tuple[dict, results.Problems]:
    """Sample, grade and count. Returns the result that is printed, and the values behind it. Collective."""
    evaluator = evaluation.Evaluator(engine, exam.reward, tokenizer, world, exam.max_response_tokens)
    greedy, sampled = Metrics(world), Metrics(world)
    by_how = {"greedy": gather(evaluator.evaluate(exam.prompts, metrics=greedy), world)}
    kept = {}
    if exam.n:
        for responses in by_how["greedy"].values():
            count_right(responses)  # refuses a reward before most of the time is spent
        graded = evaluator.evaluate(exam.prompts, exam.n, exam.temperature, args.seed, sampled)
        by_how["sampled"] = gather(graded, world)
        whole = [(prompt, ended(given)) for prompt, given in graded]
        for name, file, rows_of in (("saved", args.save_right, right), ("pairs", args.save_pairs, pair)):
            if file:
                rows = [row for given in whole for row in rows_of(*given, args.source.template)]
                kept[name] = save(file, rows, world)

    problems = values_of(exam, by_how)
    measured = results.measures(problems, exam.n)
    result = {
        "name": exam.name,
        "model": args.model,
        "dataset": exam.dataset,
        "reward": exam.reward_names,
        "prompts": len(exam.prompts),
        **{name: each.mean for name, each in measured.items()},
        **kept,
    }
    for how, metrics in (("greedy_", greedy), ("sampled_", sampled)):
        for name, ((total, count),) in metrics.sums.items():  # eval/reward, the mean score, and eval/turns
            result[name.replace("eval/", how)] = world.sum(total) / world.sum(count)
    result |= {
        "interval": {name: each.interval() for name, each in measured.items()},
        "truncated": {how: share_truncated(graded) for how, graded in by_how.items()},
        "ungraded": {how: len(exam.prompts) - len(graded) for how, graded in by_how.items()},
        "reward_files": results.file_hashes((*exam.reward_names, args.environment)),
        "data": results.fingerprint(exam.prompts),
        "settings": {
            "split": args.split,
            "environment": args.environment,
            "template": exam.template,
            "n": exam.n,
            "temperature": exam.temperature,
            "max_prompt_tokens": exam.max_prompt_tokens,
            "max_response_tokens": exam.max_response_tokens,
            "seed": args.seed,
        },
    }
    return result, problems


def main(args: Args) -> None:
    ranges.check(args)
    check_flags(args)
    if args.compare:
        compared = results.compare(args.compare)
        errors.say(results.comparison_table(compared))
        print(json.dumps(compared))
        return
    size = machine.check_world(args.rollout_tp, backend=args.rollout_backend)
    planned = exams(args)
    args.model = resolve_model(args.model)
    tokenizer, stop_token_ids = load_tokenizer(args.model)
    # Exams with the same graders share their worker processes.
    loaded = {names: rewards.load(names) for names in dict.fromkeys(exam.reward_names for exam in planned)}
    for exam in planned:
        prepare(exam, args, loaded[exam.reward_names], tokenizer, stop_token_ids, size)
    prompts = [prompt for exam in planned for prompt in exam.prompts]
    checks.check_model(args.model, tokenizer, prompts, quantized=args.rollout_backend == "vllm")
    engines.check_family(args.rollout_backend, args.model)
    checks.check_engine_heads(args.model, args.rollout_tp)
    longest = [
        checks.total_tokens(args.model, exam.prompts, exam.max_response_tokens, trains=False) for exam in planned
    ]

    world, dtype = placement.init(args.seed, args.rollout_tp), precision.choose(args.dtype, args.model)
    engine = engines.start(
        args.rollout_backend,
        args.model,
        stop_token_ids,
        world,
        dtype,
        max_model_len=max(longest),
        sequences=256,
        layout=placement.Layout(rollout_memory=0.9),
    )
    about = {
        "backend": args.rollout_backend,
        "dtype": str(dtype).removeprefix("torch."),
        # Some tokenizers have several templates, and some have none.
        "chat_template": hashlib.sha256(repr(tokenizer.chat_template).encode()).hexdigest(),
        **directory.code_and_machine(world, ("common", "scripts/evaluate.py")),
    }
    written = []
    for exam in planned:
        result, problems = measure(exam, args, engine, tokenizer, world)
        result |= about
        written.append({**result, "problems": problems.model_dump()})
        # Each result is printed and written as soon as it is there: a later test set may take hours, and fail.
        if world.is_main:
            errors.say(results.in_words(exam.name, result))
            print(json.dumps(result), flush=True)
        if world.is_main and args.output:
            folders.write(Path(args.output), json.dumps({"results": written}) + "\n")
    placement.finish(world, engine)


if __name__ == "__main__":
    errors.launch(main, tyro.cli(Args, description=help_text(__doc__)))
