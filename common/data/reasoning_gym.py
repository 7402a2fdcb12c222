"""--dataset "reasoning-gym:TASK?parameter=value&parameter=value": generated problems (pip install reasoning-gym).

TASK is a generator of the library, and the parameters are fields of its configuration. `size` is the number of training
problems; the test split has HELD_OUT problems from another seed. A row has a "question", an "answer" (in most tasks), a
"solution" (the answer in its tags), and what the task's verifier needs (common/rewards/reasoning_gym.py): the "task",
which is the text after "reasoning-gym:", and "metadata".

The generators run in worker processes. There PYTHONHASHSEED is 0: several generators iterate over sets of strings, so
each process would make other problems.
"""

import functools
import importlib.util
import math
import random
import typing
from typing import Any

from tqdm import tqdm

from common.cores import cores_of_this_rank
from common.data.rows import unknown
from common.errors import BadInput, RunFailed, say
from common.processes.child import Handler
from common.processes.pool import Failure, Pool, Program

HELD_OUT = 256  # problems of the test split
TRAINED_ON = 5000  # problems of the training split, unless the parameter `size` says otherwise
SEEDS = {"train": 0, "test": 2**31}  # problem i of the library is a function of seed + i
# More processes would spend their time importing the library.
MAX_PROCESSES = 8
# Problems in one request to a process.
AT_ONCE = 50
# Only a generator that hangs takes so long for one request.
REQUEST_SECONDS = 3600.0
# After this time a bar shows the progress.
SLOW_SECONDS = 10.0
REFUSED = {
    "codeio": "its problems are outputs of programs, some of which read the clock, so that each run has others",
    "composite": "name several data sets after --dataset instead",
    "game_of_life_halting": "its verifier accepts every answer (in version 0.1.25)",
}


def problems(spec: str, split: str, flag: str = "--dataset") -> list[dict[str, Any]]:
    """Rows of one split, the same on every machine. No question of the test split is trained on. Raises BadInput."""
    if importlib.util.find_spec("reasoning_gym") is None:
        raise BadInput(f"{flag} {spec}: reasoning-gym is not installed; pip install reasoning-gym")
    task = spec.partition(":")[2]
    try:
        # A task with few problems draws some of them for both splits.
        test = generate(task, "test")
        if split == "test":
            return test
        rows = generate(task, split)
    except RunFailed as failure:
        raise BadInput(f"{flag} {failure}") from None
    test_questions = {row["question"] for row in test}
    unseen = [row for row in rows if row["question"] not in test_questions]
    if not unseen:
        message = f"all {len(rows)} training problems are in the test split; choose parameters that allow more problems"
        raise BadInput(f"{flag} {spec}: {message}")
    if len(unseen) < len(rows):
        say(f"{spec}: left out {len(rows) - len(unseen)} of {len(rows)} problems: they are in the test split")
    return unseen


@functools.lru_cache(maxsize=16)
def generate(task: str, split: str) -> list[dict[str, Any]]:
    """All problems of a split in the order of their seeds, from several processes. Raises RunFailed.

    Problems on which the library raises an error are left out, and a line counts them.
    """
    name = f"reasoning-gym:{task}"
    program = Program(
        name=name,
        loader="common.data.reasoning_gym:load_generator",
        arguments=[task, split],
        error_code="bad-input",
        variables={"PYTHONHASHSEED": "0"},
    )
    pool = Pool(program, min(cores_of_this_rank(), MAX_PROCESSES))
    rows = []
    errors = []
    try:
        size = pool.start()

        def ask(first: int) -> dict | Failure:
            return pool.ask([first, min(first + AT_ONCE, size)], REQUEST_SECONDS)

        answers = pool.map(ask, range(0, size, AT_ONCE))
        for answer in tqdm(answers, name, total=math.ceil(size / AT_ONCE), delay=SLOW_SECONDS, disable=None):
            if isinstance(answer, Failure):
                raise RunFailed(f"{name}: its generator {answer.kind}: {answer.message}", code="bad-input")
            rows += answer["rows"]
            errors += answer["errors"]
    finally:
        pool.close()
    if not rows:
        raise RunFailed(f"{name}: {errors[0]}", code="bad-input")
    if errors:
        say(f"{name}: left out {len(errors)} of {size} problems of the {split} split: {errors[0]}")
    return rows


# Inside a worker


def load_generator(task: str, split: str) -> Handler:
    """A handler that makes the rows [first, end) of a split. Its facts are the number of problems."""
    dataset = create(task, split)

    def answer(request: list[int]) -> dict[str, list]:
        rows = []
        errors = []
        for number in range(*request):
            try:
                rows.append(make_row(task, dataset, number))
            except BadInput as error:
                errors.append(str(error))
        return {"rows": rows, "errors": errors}

    return Handler(answer, facts=dataset.size)


def create(task: str, split: str = "train"):
    """The library's data set for TASK?parameter=value&parameter=value. Raises BadInput."""
    from reasoning_gym.factory import DATASETS

    name, _, query = task.partition("?")
    tasks = sorted(DATASETS.keys() - REFUSED.keys())
    if name in REFUSED:
        raise BadInput(f'the task "{name}" cannot be used: {REFUSED[name]}')
    if name not in tasks:
        raise unknown("task", name, tasks)
    dataset, config = DATASETS[name]
    values = {"size": TRAINED_ON} | parameters(query, config)
    if values["size"] < 1:
        raise BadInput(f"size={values['size']}: expected a number > 0")
    if split == "test":
        values["size"] = HELD_OUT
    try:
        return dataset(config(**values, seed=SEEDS[split]))
    except Exception as error:
        # Their checks are assertions, and a few raise other errors.
        raise BadInput(f"refused by its generator: {error or type(error).__name__}") from None


def parameters(query: str, config: type) -> dict[str, Any]:
    """The values of parameter=value&parameter=value, with the types of the configuration's fields. Raises BadInput."""
    from pydantic import TypeAdapter, ValidationError

    types = typing.get_type_hints(config)
    del types["seed"]
    values = {}
    for pair in filter(None, query.split("&")):
        key, _, text = pair.partition("=")
        if key not in types:
            raise unknown("parameter", key, types)
        adapter = TypeAdapter(types[key])
        try:
            # Lists are JSON, and so are numbers. Words and dates are not.
            values[key] = adapter.validate_json(text) if text.startswith(("[", "{")) else adapter.validate_strings(text)
        except ValidationError as error:
            raise BadInput(f"{key}={text}: {error.errors()[0]['msg']}") from None
    return values


def make_row(task: str, dataset: Any, number: int) -> dict[str, Any]:
    """Problem `number` of the library's data set as a row. Raises BadInput."""
    # list_functions draws from the global generator.
    random.seed(dataset.seed + number)
    try:
        problem = dataset[number]
    except Exception as error:
        reason = f"problem {number}: its generator raised {type(error).__name__}: {error}"
        raise BadInput(reason.split("\n")[0]) from None
    row = {"question": problem["question"], "task": task, "metadata": pack(problem["metadata"])}
    if problem["answer"] is not None:
        row["answer"] = problem["answer"]
        row["solution"] = f"<answer>{problem['answer']}</answer>"
    return row


def pack(value: Any) -> Any:
    """The value as JSON holds it. A tuple, or an object with keys that are no strings, is marked: see unpack().

    A number of numpy becomes a plain one. Other objects, such as fractions, become text: no verifier reads them.
    """
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: pack(content) for key, content in value.items()}
        return {"__dict__": [[pack(key), pack(content)] for key, content in value.items()]}
    if isinstance(value, tuple):
        return {"__tuple__": [pack(entry) for entry in value]}
    if isinstance(value, list):
        return [pack(entry) for entry in value]
    if value is None or isinstance(value, (str, int, float)):
        return value
    return value.item() if hasattr(value, "item") else str(value)


def unpack(value: Any) -> Any:
    """The value that pack() was called with. Some verifiers compare tuples, or look up numbers."""
    if isinstance(value, list):
        return [unpack(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__dict__"}:
        return {unpack(key): unpack(content) for key, content in value["__dict__"]}
    if value.keys() == {"__tuple__"}:
        return tuple(unpack(entry) for entry in value["__tuple__"])
    return {key: unpack(content) for key, content in value.items()}
