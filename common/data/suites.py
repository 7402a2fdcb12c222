"""Public test sets, and how each is asked, sampled and graded: the one table behind scripts/evaluate.py --suite.

    --suite math                                 all of a group
    --suite aime24 gpqa-diamond                  single ones
    --suite humaneval:HumanEval.jsonl            the rows come from a file with the columns of the Hub's
    --eval-dataset suite:math500 suite:aime24    during training, graded by the run's --reward

An entry is what a quoted number depends on. To add one, add it to BENCHMARKS. If its rows are not a question and an
answer, write a function that makes them so. Prompts are zero-shot, and one message of the user:

- mathematics: the prompt `qwen-boxed` of Qwen2.5-Math's evaluation, which DeepSeek-R1 recommends as well
- multiple choice, HumanEval: those of OpenAI's simple-evals
- MBPP: that of lm-evaluation-harness' mbpp_instruct, without its examples and without a begun answer

The engine here has no top-p. So 0.6 is the temperature of DeepSeek-R1's and Qwen3's evaluations without their top-p of
0.95. The lengths suit models that think for a page. Models that think for longer need a larger --max-response-tokens.
"""

import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from common.data.rows import Row, collect, missing
from common.errors import BadInput

PREFIX = "suite:"  # of a SPEC, such as suite:aime24 or suite:aime24:FILE
LETTERS = "ABCD"
BOXED = "{prompt}\nPlease reason step by step, and put your final answer within \\boxed{}."
CHOICE = (
    "Answer the following multiple choice question. The last line of your response should be of the following format: "
    "'Answer: $LETTER' (without quotes) where LETTER is one of ABCD. Think step by step before answering.\n\n{prompt}"
)
COMPLETE = (
    "Read the following function signature and docstring, and fully implement the function described. Your response "
    "should only contain the code for this function.\n{prompt}"
)
PASS_TESTS = "You are an expert Python programmer, and here is your task:\n{prompt}"
QUESTION = {"prompt": "question"}
PROBLEM = {"prompt": "problem"}
Rows = Iterable[Row]


# Rows as their data sets publish them -> rows with a prompt and an answer.


def gsm8k_row(where: str, row: dict) -> Row:
    """A row as GSM8K publishes it: the answer follows ####, and calculator marks <<...>> leave the solution."""
    if row.get("answer") is None:
        raise missing(where, row, "answer")
    working = str(row["answer"])
    if "####" not in working:
        raise BadInput(f'{where}: no "####" in "answer"')
    answer = working.rpartition("####")[2].strip()
    solution = re.sub(r"<<[^<\n]*?>>", "", working)
    return where, {**row, "answer": answer, "solution": solution}


def mmlu_row(where: str, row: dict) -> Row:
    """A row of MMLU: four "choices", and as "answer" the number of the right one, from 0."""
    choices, answer = row.get("choices"), row.get("answer")
    if not isinstance(choices, list) or len(choices) != len(LETTERS):
        raise BadInput(f'{where}: "choices" must be {len(LETTERS)} texts')
    if type(answer) is not int or not 0 <= answer < len(LETTERS):
        raise BadInput(f'{where}: "answer" must be the number of a choice, 0 to 3, got {answer!r:.40}')
    return where, with_options(where, row, "question", choices, answer)


def gpqa_rows(rows: Rows) -> list[Row]:
    """Rows of GPQA, whose right answer is in a column of its own: the four answers are shuffled.

    Each question gets the order that simple-evals gives it the first time, whatever the seed of the evaluation is.
    All responses to a question see the same order, because the question is the unit of the statistics.
    """
    draw = random.Random(0)
    columns = ["Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"]

    def shuffled(where: str, row: dict) -> Row:
        order = draw.sample(range(4), 4)
        for column in columns:
            if not isinstance(row.get(column), str):
                raise missing(where, row, column)
        return where, with_options(where, row, "Question", [row[columns[i]] for i in order], order.index(0))

    return collect(rows, shuffled)


def with_options(where: str, row: dict, column: str, choices: list[str], right: int) -> dict:
    """The row with the question and its lettered options as "prompt", and the letter of the right one as "answer".

    Its "choices" are in the order of their letters, for graders.
    """
    if not isinstance(row.get(column), str):
        raise missing(where, row, column)
    choices = [str(choice).strip() for choice in choices]
    options = [f"{letter}) {choice}" for letter, choice in zip(LETTERS, choices)]
    prompt = "\n".join([f"{row[column].strip()}\n", *options])
    return {**row, "prompt": prompt, "choices": choices, "answer": LETTERS[right]}


def mbpp_row(where: str, row: dict) -> Row:
    """A row of MBPP: the prompt is its "text" and its tests, which also say what the function is called."""
    for column in ("text", "test_list"):
        if not row.get(column):
            raise missing(where, row, column)
    tests = "\n".join(row["test_list"])
    return where, {**row, "prompt": f"{row['text']}\nYour code should pass these tests:\n{tests}"}


def each(make: Callable[[str, dict], Row]) -> Callable[[Rows], list[Row]]:
    return partial(collect, make=make)


@dataclass(frozen=True)
class Benchmark:
    """A public test set."""

    dataset: str  # SPEC of the data on the Hub, with its split
    problems: int  # how many there are; a result of fewer says so
    prompt: str  # text around each question, at {prompt}
    reward: str  # grader
    max_response_tokens: int
    n: int = 0  # sampled responses to each problem; 0: greedy alone
    temperature: float = 0.6
    columns: dict[str, str] = field(default_factory=dict)  # field -> its column, if that has an unusual name
    read: Callable[[Rows], list[Row]] = list  # makes rows with a prompt and an answer


# Small sets are sampled more often: the fewer problems, the more the noise of single samples counts.
BENCHMARKS = {
    "gsm8k": Benchmark(
        dataset="openai/gsm8k:main@test",
        problems=1319,
        prompt=BOXED,
        reward="gsm8k",
        max_response_tokens=2048,
        read=each(gsm8k_row),
    ),
    "math500": Benchmark(
        dataset="HuggingFaceH4/MATH-500@test",
        problems=500,
        prompt=BOXED,
        reward="math",
        max_response_tokens=4096,
        n=4,
        columns=PROBLEM,
    ),
    "amc23": Benchmark(
        dataset="math-ai/amc23@test",
        problems=40,
        prompt=BOXED,
        reward="math",
        max_response_tokens=8192,
        n=32,
        columns=QUESTION,
    ),
    "aime24": Benchmark(
        dataset="HuggingFaceH4/aime_2024@train",
        problems=30,
        prompt=BOXED,
        reward="math",
        max_response_tokens=16384,
        n=32,
        columns=PROBLEM,
    ),
    "aime25": Benchmark(
        dataset="math-ai/aime25@test",
        problems=30,
        prompt=BOXED,
        reward="math",
        max_response_tokens=16384,
        n=32,
        columns=PROBLEM,
    ),
    "humaneval": Benchmark(
        dataset="openai/openai_humaneval@test",
        problems=164,
        prompt=COMPLETE,
        reward="code",
        max_response_tokens=1024,
        n=8,
    ),
    "mbpp": Benchmark(
        dataset="google-research-datasets/mbpp:full@test",
        problems=500,
        prompt=PASS_TESTS,
        reward="code",
        max_response_tokens=1024,
        n=8,
        read=each(mbpp_row),
    ),
    "gpqa-diamond": Benchmark(
        dataset="Idavidrein/gpqa:gpqa_diamond@train",  # gated: accept its terms on the Hub, and log in
        problems=198,
        prompt=CHOICE,
        reward="choice",
        max_response_tokens=4096,
        n=8,
        read=gpqa_rows,
    ),
    "mmlu": Benchmark(
        dataset="cais/mmlu:all@test",
        problems=14042,
        prompt=CHOICE,
        reward="choice",
        max_response_tokens=2048,
        read=each(mmlu_row),
    ),
}
GROUPS = {
    "math": ("gsm8k", "math500", "amc23", "aime24", "aime25"),
    "code": ("humaneval", "mbpp"),
    "knowledge": ("gpqa-diamond", "mmlu"),
}


def is_known(spec: str) -> bool:
    """True for suite:NAME and suite:NAME:FILE."""
    return spec.startswith(PREFIX) and split(spec)[0] in BENCHMARKS


def split(spec: str) -> tuple[str, str]:
    """(name, file) of suite:NAME:FILE. Without a file it is "", which stands for the Hub."""
    name, _, file = spec.removeprefix(PREFIX).partition(":")
    return name, file


def find(spec: str) -> Benchmark:
    return BENCHMARKS[split(spec)[0]]


def expand(names: tuple[str, ...]) -> list[str]:
    """The SPECs of --suite, with each group as its benchmarks. Raises BadInput."""
    specs = []
    for name in names:
        for member in GROUPS.get(name, (name,)):
            spec = PREFIX + member
            if not is_known(spec):
                raise BadInput(f"--suite {member}: known are {', '.join(GROUPS)}, {', '.join(BENCHMARKS)}")
            if split(spec)[0] in [split(other)[0] for other in specs]:
                raise BadInput(f"--suite: {split(spec)[0]} is named twice")
            specs.append(spec)
    return specs
