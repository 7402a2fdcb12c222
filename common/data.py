"""Prompts: rows of --dataset as token ids with a reference answer, and the order in which a run takes them.

Everything wrong with the data is said before a model is loaded, as `file:line: found, expected`.
"""

import hashlib
import math
import random
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from httpx2 import HTTPError  # what huggingface_hub raises without a connection
from huggingface_hub import model_info, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from common import rendering, safe_pickle, sources
from common.errors import BadInput, say
from common.placement import split_weight

INSTRUCTIONS = {  # what follows a question of a built-in data set, unless --template says it another way
    "gsm8k": "\nReason step by step, then write the final answer as a number after ####.",
    "math": "\nReason step by step, and put your final answer within \\boxed{}.",
}
CHARACTERS = 1000  # of a prompt for each token it may have: what stands before these would only take time to tokenize


@dataclass(frozen=True)
class Source:
    columns: tuple[str, ...] = ()  # where a file or Hub set has what is needed: prompt=problem answer=meta.gold
    template: str = ""  # a file around each {prompt}: text, or .json with messages (system prompt, examples)
    overlong_prompts: Literal["drop", "error", "truncate-left"] = "drop"  # those over --max-prompt-tokens
    hub: Literal["huggingface", "modelscope"] = "huggingface"  # where data sets and the model come from by name


@dataclass(frozen=True)
class TrainSource(Source):
    eval_dataset: str = ""  # same forms as --dataset; empty: the test split of a built-in data set
    eval_prompts: int = 256  # how many of it; 0: no evaluation


@dataclass(frozen=True)
class Prompt:
    id: str  # where it came from: "train.jsonl:17", "arithmetic/test:3"
    text: str  # as the model sees it, chat template included
    ids: list[int]
    answer: str
    solution: str | None = None  # a worked solution, for supervised fine-tuning
    meta: dict[str, Any] = field(default_factory=dict)  # the row; its "prompt" is without template and instruction
    dataset: str = ""  # the SPEC it came by
    weight: float = 1.0  # of that data set among the others


def resolve_model(model_path: str, hub: str) -> str:
    """--model as a folder, if it is a name on ModelScope; else as it is. Raises BadInput."""
    if hub != "modelscope" or Path(model_path).is_dir() or "/" not in model_path:
        return model_path
    return sources.download(model_path, "model", "--model")


def load_tokenizer(model_path: str, trust_pickle: bool = False) -> tuple[PreTrainedTokenizerBase, list[int]]:
    """The model's tokenizer and the tokens that end a response. Reads no weights, and refuses those that are a pickle.

    Raises BadInput.
    """
    folder = Path(model_path)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise BadInput(f"--model {model_path}: the folder has no config.json")
    if not folder.is_dir() and not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model_path):
        raise BadInput(f"--model {model_path}: no such folder")
    safe_pickle.check_weights(model_path, trust_pickle)
    try:
        if not folder.is_dir() and not isinstance(try_to_load_from_cache(model_path, "config.json"), str):
            model_info(model_path, timeout=5)  # one request; from_pretrained would retry for half a minute
        config = AutoConfig.from_pretrained(model_path)
        tokenizer = AutoTokenizer.from_pretrained(model_path)
    except (OSError, ValueError, HTTPError, HfHubHTTPError) as error:
        reason = sources.first_line(error)
        raise BadInput(f"--model {model_path}: neither a folder nor loadable from the Hub: {reason}") from None
    try:
        generation = GenerationConfig.from_pretrained(model_path)
    except OSError:  # optional file
        generation = GenerationConfig()
    stops: list[int] = []
    for ids in (tokenizer.eos_token_id, config.eos_token_id, generation.eos_token_id):
        stops += ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not stops:
        raise BadInput(f"--model {model_path}: neither tokenizer nor config names an end-of-sequence token")
    return tokenizer, sorted(set(stops))


def load(
    dataset: tuple[str, ...] | str, source: Source, split: str, tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
) -> list[Prompt]:  # fmt: skip
    """Prompts of --dataset: each a SPEC of sources.FORMS, or SPEC=WEIGHT in a mixture. Raises BadInput."""
    weights = parse(dataset)
    others = [source.eval_dataset] if getattr(source, "eval_dataset", "") else []
    if source.columns and all(sources.kind(spec) for spec in [*weights, *others]):
        raise BadInput(f"--columns: {', '.join(weights)} is built in, and its columns are known")
    return [
        prompt
        for spec, weight in weights.items()
        for prompt in load_one(spec, weight, source, split, tokenizer, max_prompt_tokens)
    ]


def load_eval(
    dataset: tuple[str, ...] | str, source: TrainSource, tokenizer: PreTrainedTokenizerBase, max_prompt_tokens: int
) -> list[Prompt]:
    """--eval-prompts prompts of --eval-dataset, else of the test splits of built-in ones in --dataset, else none."""
    if source.eval_prompts < 0:
        raise BadInput(f"--eval-prompts {source.eval_prompts}: must be at least 0")
    specs = [spec for spec in parse(dataset) if sources.has_test(spec)]
    specs = [source.eval_dataset] if source.eval_dataset else specs
    flag = "--eval-dataset" if source.eval_dataset else "--dataset"
    if not specs or source.eval_prompts == 0:
        return []
    share = math.ceil(source.eval_prompts / len(specs))
    prompts = []
    for spec in specs:
        prompts += load_one(spec, 1.0, source, "test", tokenizer, max_prompt_tokens, flag)[:share]
    return prompts[: source.eval_prompts]


def parse(dataset: tuple[str, ...] | str) -> dict[str, float]:
    """SPEC -> WEIGHT of --dataset: SPEC=WEIGHT each, or SPEC, which weighs 1. Raises BadInput."""
    weights: dict[str, float] = {}
    for entry in [dataset] if isinstance(dataset, str) else dataset:
        spec, weight = split_weight(entry)
        if not 0 < weight < math.inf:
            raise BadInput(f'--dataset "{entry}": expected a weight > 0')
        if spec in weights:
            raise BadInput(f'--dataset: "{spec}" is named twice')
        weights[spec] = weight
    if not weights:
        raise BadInput("--dataset: names no data set")
    return weights


def load_one(
    spec: str, weight: float, source: Source, split: str, tokenizer: PreTrainedTokenizerBase, limit: int,
    flag: str = "--dataset",
) -> list[Prompt]:  # fmt: skip
    """Prompts of one data set; those over the limit are dropped, cut or refused, and said. Raises BadInput."""
    columns = sources.columns(spec, source.columns)
    template = rendering.read_template(source.template, tokenizer)
    instruction = "" if template else INSTRUCTIONS.get(sources.kind(spec), "")
    rows = sources.read(spec, split, source.hub, flag)
    sources.refuse_repeated_ids(rows, columns.get("id", "id"))
    long = []

    def make(where: str, row: dict) -> Prompt:
        content, answer, solution = rendering.fields(where, row, columns)
        content = rendering.tail(content, CHARACTERS * limit)
        asked = content + instruction if isinstance(content, str) else content
        text, ids = rendering.render(where, asked, tokenizer, template)
        if len(ids) > limit:
            long.append(where)
            if source.overlong_prompts == "error":
                raise BadInput(f"{where}: {len(ids)} tokens, more than --max-prompt-tokens {limit}")
            if source.overlong_prompts == "truncate-left":
                text, ids = rendering.cut_left(where, asked, tokenizer, template, limit)
        return Prompt(where, text, ids, answer, solution, {**row, "prompt": content}, spec, weight)

    prompts = sources.collect(rows, make)
    kept = [prompt for prompt in prompts if len(prompt.ids) <= limit]
    if not kept:
        raise BadInput(f"{spec}: all {len(prompts)} prompts are longer than --max-prompt-tokens {limit}")
    if long:
        named = ", ".join(long[:5]) + (" ..." if len(long) > 5 else "")
        done = "dropped" if source.overlong_prompts == "drop" else "cut on the left"
        say(f"{spec}: {done} {len(long)} of {len(prompts)} prompts over {limit} tokens: {named}")
    return kept


def total_tokens(model_path: str, prompts: list[Prompt], max_response_tokens: int) -> int:
    """Longest prompt plus longest response. Raises BadInput if the model has fewer positions."""
    total = max(len(prompt.ids) for prompt in prompts) + max_response_tokens
    positions = getattr(AutoConfig.from_pretrained(model_path), "max_position_embeddings", total)
    if total > positions:
        raise BadInput(
            f"--max-response-tokens {max_response_tokens}: with prompts of up to {total - max_response_tokens} tokens "
            f"that is {total}, and --model has {positions} positions"
        )
    return total


class PromptLoader:
    """An endless walk over the prompts, a function of the seed and the position alone.

    Each data set is walked in its own order, shuffled anew in each of its epochs. A mixture takes them in turns that
    repeat, evenly spread, each as often as its weight says, to a thousandth of the whole.
    """

    def __init__(self, prompts: list[Prompt], seed: int):
        self.seed, self.position = seed, 0
        self.in_flight: int | None = None  # where the batch begins that is drawn and not yet trained on, if any
        by_name: dict[str, list[Prompt]] = {}
        for prompt in prompts:
            by_name.setdefault(prompt.dataset, []).append(prompt)
        self.datasets = list(by_name.values())
        self.turns = turns([dataset[0].weight for dataset in self.datasets])

    @property
    def resume_at(self) -> int:
        """Where a resumed run draws first: behind what has been trained on."""
        return self.position if self.in_flight is None else self.in_flight

    def fingerprint(self) -> str:
        """SHA-256 of all prompts and answers, in their order: another file of the same name has another."""
        said = [[(prompt.ids, prompt.answer) for prompt in dataset] for dataset in self.datasets]
        return hashlib.sha256(repr(said).encode()).hexdigest()

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts, the same on every rank."""
        orders: dict[tuple[int, int], list[int]] = {}
        taken = []
        for position in range(self.position, self.position + count):
            rounds, turn = divmod(position, len(self.turns))
            which = self.turns[turn]
            before = rounds * self.turns.count(which) + self.turns[:turn].count(which)  # of this data set
            epoch, place = divmod(before, len(self.datasets[which]))
            if (which, epoch) not in orders:
                orders[which, epoch] = self.order(which, epoch)
            taken.append(self.datasets[which][orders[which, epoch][place]])
        self.position += count
        return taken

    def order(self, which: int, epoch: int) -> list[int]:
        """The order of a data set's prompts in an epoch."""
        order = list(range(len(self.datasets[which])))
        random.Random(f"{self.seed}/{epoch}" + (f"/{which}" if which else "")).shuffle(order)
        return order


def turns(weights: list[float], longest: int = 1000) -> list[int]:
    """Which data set each prompt of a round comes from, evenly spread: [2.0, 1.0] -> [0, 1, 0].

    The shortest round in which the weights are whole numbers, else they are rounded in the longest.
    """
    shares = [weight / sum(weights) for weight in weights]
    whole = lambda count: round(count) > 0 and abs(count - round(count)) < 1e-9
    length = next((n for n in range(1, longest) if all(whole(n * share) for share in shares)), longest)
    counts = [max(1, round(length * share)) for share in shares]
    places = [((i + 0.5) / count, which) for which, count in enumerate(counts) for i in range(count)]
    return [which for _, which in sorted(places)]
