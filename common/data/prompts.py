"""Prompts: rows of --dataset as token ids with a reference answer, and the order in which a run takes them.

Everything that is wrong with the data is reported before a model is loaded, as `file:line: found, expected`.
"""

import hashlib
import math
import random
from dataclasses import dataclass, field
from typing import Any

import tyro
from transformers import AutoConfig, PreTrainedTokenizerBase

from common.data import sources, templates
from common.errors import BadInput, say
from common.rewards.grading import split_weight

INSTRUCTIONS = {  # text after each question of a built-in data set, unless --template is given
    "gsm8k": "\nReason step by step, then write the final answer as a number after ####.",
    "math": "\nReason step by step, and put your final answer within \\boxed{}.",
    "geo3k": " You FIRST think about the reasoning process as an internal monologue and then provide the final answer. "
    "The reasoning process MUST BE enclosed within <think> </think> tags. The final answer MUST BE put in \\boxed{}.",
    "reasoning-gym": "\nReason step by step, then write only the final answer inside <answer></answer> tags.",
}


@dataclass(frozen=True)
class Source:
    columns: tuple[str, ...] = ()  # Columns of a file or Hub data set: prompt=problem answer=meta.gold.
    template: str = ""  # File that surrounds each {prompt}: a text, or chat messages in a .json file.
    tools: tyro.conf.Suppress[list | None] = None  # Schemas of --environment's tools, for the chat template.


@dataclass(frozen=True)
class TrainSource(Source):
    eval_dataset: str = ""  # Held-out data, named as in --dataset. Default: the test splits of built-in data sets.
    eval_prompts: int = 256  # Number of held-out prompts. 0 turns evaluation off.


@dataclass(frozen=True)
class Prompt:
    id: str  # place of the row: "train.jsonl:17", "arithmetic/test:3"
    text: str  # the text that the model sees, chat template included
    ids: list[int]  # the tokens of the text
    answer: str | None  # the reference answer, if the row has one
    solution: str | list[str] | None = None  # a worked solution, or alternating turns of policy and tools, for SFT
    meta: dict[str, Any] = field(default_factory=dict)  # the row; "prompt" is there without template and instruction
    dataset: str = ""  # SPEC of the data set
    weight: float = 1.0  # weight of the data set in the mixture


def load(
    dataset: tuple[str, ...] | str, source: Source, split: str, tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
) -> list[Prompt]:  # fmt: skip
    """Prompts of --dataset. Each entry is a SPEC of sources.FORMS, or SPEC=WEIGHT in a mixture. Raises BadInput."""
    weights = parse(dataset)
    eval_dataset = getattr(source, "eval_dataset", "") or "arithmetic"
    if source.columns and all(sources.kind(spec) for spec in [*weights, eval_dataset]):
        raise BadInput(f"--columns: {', '.join(weights)} is built in, and its columns are known")
    each = (load_one(spec, weight, source, split, tokenizer, max_prompt_tokens) for spec, weight in weights.items())
    return [prompt for prompts in each for prompt in prompts]


def load_eval(
    dataset: tuple[str, ...] | str, source: TrainSource, tokenizer: PreTrainedTokenizerBase, max_prompt_tokens: int
) -> list[Prompt]:
    """The first --eval-prompts prompts of --eval-dataset, or of the test splits of built-in data sets in --dataset.

    Several test splits contribute equal shares. The list is empty where there is no test split. Raises BadInput.
    """
    specs, flag = [spec for spec in parse(dataset) if sources.kind(spec) in sources.WITH_TEST_SPLIT], "--dataset"
    if source.eval_dataset:
        specs, flag = [source.eval_dataset], "--eval-dataset"
    prompts = []
    for spec in specs if source.eval_prompts else []:
        share = math.ceil(source.eval_prompts / len(specs))
        prompts += load_one(spec, 1.0, source, "test", tokenizer, max_prompt_tokens, flag)[:share]
    return prompts[: source.eval_prompts]


def parse(dataset: tuple[str, ...] | str) -> dict[str, float]:
    """SPEC -> WEIGHT of --dataset. An entry without =WEIGHT weighs 1. Raises BadInput."""
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
    """Prompts of one data set, none over `limit` tokens. flag: the flag that named the data set. Raises BadInput."""
    columns = sources.columns(spec, source.columns)
    template, images_of = templates.read_template(source.template, tokenizer), None
    instruction = "" if template else INSTRUCTIONS.get(sources.kind(spec), "")
    rows = sources.read(spec, split, flag)
    sources.refuse_repeated_ids(rows, columns.get("id", "id"))
    has_images = any(sources.lookup(row, columns.get("images", "images")) for _, row in rows)
    has_marks = any("image" in token for token in tokenizer.get_added_vocab())  # one may be in a text
    if has_images or (has_marks and hasattr(AutoConfig.from_pretrained(tokenizer.name_or_path), "vision_config")):
        from common.data import images

        images_of = images.reader(columns, spec, tokenizer, has_images)

    def make(where: str, row: dict) -> Prompt:
        row, seen = images_of(where, row) if images_of else (row, None)
        content, answer, solution = templates.fields(where, row, columns)
        question = content + instruction if isinstance(content, str) else content
        text, ids = templates.render(where, question, tokenizer, template, source.tools, seen)
        if not ids:
            raise BadInput(f"{where}: the prompt has no token that the tokenizer knows")
        return Prompt(where, text, ids, answer, solution, {**row, "prompt": content}, spec, weight)

    prompts = sources.collect(rows, make)
    kept = [prompt for prompt in prompts if len(prompt.ids) <= limit]
    if not kept:
        raise BadInput(f"{spec}: all {len(prompts)} prompts are longer than --max-prompt-tokens {limit}")
    if overlong := [prompt.id for prompt in prompts if len(prompt.ids) > limit]:
        names = ", ".join(overlong[:5]) + (" ..." if len(overlong) > 5 else "")
        say(f"{spec}: dropped {len(overlong)} of {len(prompts)} prompts over {limit} tokens: {names}")
    return kept


class PromptLoader:
    """An endless walk over the prompts. The order is a function of the seed and the position alone.

    Each data set is shuffled again in each of its epochs. A mixture takes the data sets in turns that repeat. The turns
    are evenly spread, and a data set has as many of them as its weight says, to a thousandth of the whole.
    """

    def __init__(self, prompts: list[Prompt], seed: int, also: list | None = None):
        """also: what a run learns from beside prompts and answers, for the fingerprint."""
        self.seed, self.position, self.also = seed, 0, also
        self.in_flight: int | None = None  # start of a batch that has been drawn and not yet been trained on
        by_name: dict[str, list[Prompt]] = {}
        for prompt in prompts:
            by_name.setdefault(prompt.dataset, []).append(prompt)
        self.datasets = list(by_name.values())
        self.turns = turns([dataset[0].weight for dataset in self.datasets])
        self.orders: dict[int, tuple[int, list[int]]] = {}  # data set -> an epoch, and the order of its prompts in it

    @property
    def resume_at(self) -> int:
        """Position at which a resumed run continues: the first prompt that has not been trained on."""
        return self.position if self.in_flight is None else self.in_flight

    def fingerprint(self) -> str:
        """SHA-256 of all prompts and answers in their order. A file whose content changed has another fingerprint."""
        content = [[(prompt.ids, prompt.answer) for prompt in dataset] for dataset in self.datasets]
        content += [] if self.also is None else [self.also]
        return hashlib.sha256(repr(content).encode()).hexdigest()

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts, the same on every rank."""
        taken = []
        for position in range(self.position, self.position + count):
            rounds, turn = divmod(position, len(self.turns))
            which = self.turns[turn]
            before = rounds * self.turns.count(which) + self.turns[:turn].count(which)  # draws from this data set
            epoch, place = divmod(before, len(self.datasets[which]))
            if which not in self.orders or self.orders[which][0] != epoch:
                self.orders[which] = epoch, self.order(which, epoch)
            taken.append(self.datasets[which][self.orders[which][1][place]])
        self.position += count
        return taken

    def order(self, which: int, epoch: int) -> list[int]:
        """The order of one data set's prompts in one epoch, as indices."""
        order = list(range(len(self.datasets[which])))
        random.Random(f"{self.seed}/{epoch}" + (f"/{which}" if which else "")).shuffle(order)
        return order


def turns(weights: list[float], longest: int = 1000) -> list[int]:
    """The data set that each prompt of a round comes from, evenly spread: [2.0, 1.0] -> [0, 1, 0].

    The round is the shortest in which all weights are whole numbers. Where `longest` is not enough, they are rounded.
    """
    shares = [weight / sum(weights) for weight in weights]
    whole = lambda count: round(count) > 0 and abs(count - round(count)) < 1e-9
    length = next((n for n in range(1, longest) if all(whole(n * share) for share in shares)), longest)
    counts = [max(1, round(length * share)) for share in shares]
    places = [((i + 0.5) / count, which) for which, count in enumerate(counts) for i in range(count)]
    return [which for _, which in sorted(places)]
