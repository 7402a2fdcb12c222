"""Prompts: rows of --dataset as token ids with a reference answer, and the order in which a run takes them.

All errors in the data are reported before a model is loaded, as `file:line: found, expected`.
"""

import hashlib
import math
import random
import re
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import tyro
from pydantic import NonNegativeInt
from transformers import AutoConfig, PreTrainedTokenizerBase

from common.data import choices, sources, suites, templates
from common.data.conversations import tool_name
from common.data.rows import Row, collect, lookup, split_weight
from common.errors import BadInput, say, warn

LONGEST_ROUND = 1000  # prompts of a mixture, after which the turns of its data sets repeat
# Text after each question of a built-in data set, unless --template is given.
INSTRUCTIONS = {
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
    control_tokens: Literal["keep", "text"] = "keep"
    """Control tokens that a prompt spells, such as <|im_end|>: keep them, or encode them as text."""
    tools: tyro.conf.Suppress[list | None] = None  # Schemas of --environment's tools, for the chat template.
    lettered: tyro.conf.Suppress[bool] = False  # Prompts show the options of their rows, for --reward choice.


@dataclass(frozen=True)
class TrainSource(Source):
    eval_dataset: tuple[str, ...] = ()
    """Held-out data sets, named as in --dataset. Default: the test splits of built-in data sets."""
    eval_prompts: NonNegativeInt = 256  # Number of held-out prompts of all data sets. 0 turns evaluation off.

    def held_out(self) -> list[str]:
        """The SPECs of --eval-dataset. Scripts and older run.json files have one as a text. Raises BadInput."""
        named = self.eval_dataset
        specs = [named] if isinstance(named, str) else list(named)
        for spec in specs:
            if specs.count(spec) > 1:
                raise BadInput(f'--eval-dataset: "{spec}" is named twice')
        return [spec for spec in specs if spec]


@dataclass(frozen=True)
class Prompt:
    id: str  # place of the row: "train.jsonl:17", "arithmetic/test:3"
    text: str  # the text that the model sees, chat template included
    ids: list[int]  # the tokens of the text
    answer: str | None  # the reference answer, if the row has one
    # A response to learn: a text, alternating turns of policy and tools, or a turn with calls or reasoning.
    solution: templates.Solution = None
    meta: dict[str, Any] = field(default_factory=dict)  # the row; "prompt" is there without template and instruction
    dataset: str = ""  # SPEC of the data set
    weight: float = 1.0  # weight of the data set in the mixture
    messages: list[dict] = field(default_factory=list)  # what the chat template was given
    tools: list[dict] | None = None  # schemas that it has written before them

    @property
    def key(self) -> tuple[str, str]:
        """It tells prompts apart. Two data sets may have the same id, if one file is read with two SPECs."""
        return self.dataset, self.id


def load(
    dataset: tuple[str, ...] | str,
    source: Source,
    split: str,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
) -> list[Prompt]:
    """Prompts of --dataset. Each entry is a SPEC of sources.FORMS, or SPEC=WEIGHT in a mixture. Raises BadInput."""
    weights = parse(dataset)
    # --columns may be meant for --eval-dataset alone.
    held_out = source.held_out() if isinstance(source, TrainSource) else []
    if source.columns and all(sources.kind(spec) for spec in [*weights, *held_out]):
        raise BadInput(f"--columns: {', '.join(weights)} is built in, and its columns are known")
    prompts = []
    for spec, weight in weights.items():
        for prompt in load_one(spec, source, split, tokenizer, max_prompt_tokens):
            prompts.append(replace(prompt, weight=weight))
    return prompts


def load_eval(
    dataset: tuple[str, ...] | str, source: TrainSource, tokenizer: PreTrainedTokenizerBase, max_prompt_tokens: int
) -> list[Prompt]:
    """The first --eval-prompts prompts of --eval-dataset, or of the test splits of built-in data sets in --dataset.

    Several data sets contribute equal shares. The list is empty where there is no test split. Raises BadInput.
    """
    if source.eval_prompts == 0:
        return []
    flag = "--eval-dataset" if source.held_out() else "--dataset"
    specs = held_out_specs(dataset, source)
    sources.short_names(specs)  # metrics need them: raises BadInput before anything is loaded
    if source.eval_prompts < len(specs):
        raise BadInput(
            f"--eval-prompts {source.eval_prompts}: {flag} has {len(specs)} data sets; give at least as many"
        )
    prompts = []
    for place, spec in enumerate(specs):
        share = source.eval_prompts // len(specs) + (place < source.eval_prompts % len(specs))
        prompts += load_one(spec, source, "test", tokenizer, max_prompt_tokens, flag)[:share]
    return prompts


def held_out_specs(dataset: tuple[str, ...] | str, source: TrainSource) -> list[str]:
    """The SPECs behind load_eval(). Raises BadInput."""
    return source.held_out() or [spec for spec in parse(dataset) if sources.kind(spec) in sources.WITH_TEST_SPLIT]


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
    spec: str,
    source: Source,
    split: str,
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
    flag: str = "--dataset",
) -> list[Prompt]:
    """Prompts of one data set. flag: the flag that named it, for messages. Raises BadInput."""
    columns = sources.columns(spec, source.columns)
    template = templates.read_template(source.template, tokenizer) or suite_prompt(spec)
    instruction = "" if template else INSTRUCTIONS.get(sources.kind(spec), "")
    rows = sources.read(spec, split, flag)
    image_reader = make_image_reader(spec, rows, columns, tokenizer)
    spelled = SpelledTokens(tokenizer, source.control_tokens)

    def make(where: str, row: dict) -> Prompt:
        templates.check_columns(where, row, columns)
        # The images leave the row first: the text keeps an <image> where each of them stood.
        images = None
        if image_reader:
            row, images = image_reader.read(where, row)
        found = templates.fields(where, row, columns)
        if source.lettered:
            row, found = choices.letter(row, found, lookup(row, columns.get("answer", "answer")))
        # Chat messages stay as they are.
        question = found.content + instruction if isinstance(found.content, str) else found.content
        continues = found.continues
        if template:
            question = templates.fill(where, template, question)
            continues = isinstance(question, list) and question[-1]["role"] == "assistant"
        tools = tools_of(where, source.tools, found.tools)
        text = templates.render(where, question, tokenizer, tools, images, continues=continues)
        messages = templates.as_messages(question)
        said = [message["content"] for message in messages]
        if images:
            said = [images.without_marks(content) for content in said]
        quoted = spelled.found(where, said)
        if quoted and images and images.files:  # the processor encodes the prompt again, and knows no quoted tokens
            token = spelled.first_in(quoted[0])
            cure = "reword it, or use --control-tokens keep"
            raise BadInput(f"{where}: --control-tokens text: it spells {token}, and has images; {cure}")
        ids = templates.tokenize(where, text, tokenizer, quoted)
        if images:
            ids = images.expand(text, ids)
        # Rewards see the question as the data has it, under one name for all data sets.
        meta = {**row, "prompt": found.content}
        if found.other_answer is not None:
            meta["answer"] = found.other_answer
        return Prompt(where, text, ids, found.answer, found.solution, meta, spec, messages=messages, tools=tools)

    prompts = collect(rows, make)
    spelled.warn(spec, len(prompts))
    warn_of_lost_characters(spec, prompts, tokenizer)
    short = [prompt for prompt in prompts if len(prompt.ids) <= max_tokens]
    if not short:
        raise BadInput(f"{spec}: all {len(prompts)} prompts are longer than --max-prompt-tokens {max_tokens}")
    if len(short) < len(prompts):
        dropped = len(prompts) - len(short)
        say(f"{spec}: dropped {dropped} of {len(prompts)} prompts over {max_tokens} tokens (--max-prompt-tokens)")
    return short


def warn_of_lost_characters(spec: str, prompts: list[Prompt], tokenizer: PreTrainedTokenizerBase) -> None:
    """Say which characters the model never sees: its tokenizer leaves them out, or reads them all as one token.

    The embedded model has no capital letters. Tokenizers of bytes have every character.
    """
    lost = set()
    for character in set().union(*(prompt.text for prompt in prompts)):
        ids = tokenizer.encode(character, add_special_tokens=False)
        # Some tokenizers leave out spaces on purpose, or join them to the next word.
        if not character.isspace() and (not ids or tokenizer.unk_token_id in ids):
            lost.add(character)
    if not lost:
        return
    # Of <|im_end|> the model sees one token, whichever characters it knows.
    pattern = control_token_pattern(tokenizer)
    texts = [pattern.sub(" ", prompt.text) if pattern else prompt.text for prompt in prompts]
    lost &= set().union(*texts)
    count = sum(not lost.isdisjoint(text) for text in texts)
    if count:
        warn(
            f"{spec}: the model's tokenizer has no token for {' '.join(sorted(lost)[:20])}, so {count} of "
            f"{len(prompts)} prompts lose characters. If --model is missing, name one: the embedded model only adds",
            "characters-lost",
        )


def suite_prompt(spec: str) -> str | None:
    """The text that a benchmark of suites.py has around each question. --template replaces it."""
    return suites.find(spec).prompt if sources.kind(spec) == "suite" else None


def tools_of(where: str, of_environment: list[dict] | None, of_row: list[dict] | None) -> list[dict] | None:
    """The schemas that the chat template shows. Raises BadInput if the row has other tools than the environment."""
    if of_environment and of_row:
        ours, theirs = (sorted(map(tool_name, tools)) for tools in (of_environment, of_row))
        if ours != theirs:
            raise BadInput(f'{where}: "tools" has {", ".join(theirs)}, and --environment has {", ".join(ours)}')
    return of_environment or of_row


def control_token_pattern(tokenizer: PreTrainedTokenizerBase) -> re.Pattern | None:
    """Matches any control token of the tokenizer, the longest that fits. None if it has none."""
    names = sorted(set(templates.control_tokens(tokenizer).values()), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, names))) if names else None


class SpelledTokens:
    """Counts the rows in which control tokens are spelled, such as a question about <|im_end|>.

    The tokenizer makes the control token of the text, and the model may take it for the end of the turn.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, treatment: str):
        """treatment: --control-tokens."""
        self.pattern = control_token_pattern(tokenizer) if tokenizer.chat_template else None
        self.treatment = treatment
        self.rows: list[str] = []  # their places
        self.example = ""  # the first control token of the first of them

    def found(self, where: str, contents: list[str]) -> list[str]:
        """Those of a row's messages that are to be encoded as text."""
        if self.pattern is None:
            return []
        with_tokens = [content for content in contents if self.pattern.search(content)]
        if not with_tokens:
            return []
        self.rows.append(where)
        self.example = self.example or self.first_in(with_tokens[0])
        return with_tokens if self.treatment == "text" else []

    def first_in(self, content: str) -> str:
        """The first control token that is spelled in one of found()."""
        return self.pattern.search(content)[0]

    def warn(self, spec: str, count: int) -> None:
        if self.rows and self.treatment != "text":
            warn(
                f"{spec}: {len(self.rows)} of {count} prompts spell control tokens, such as {self.example} in "
                f"{self.rows[0]}; the model reads them as control tokens; where a policy is trained or evaluated, "
                "--control-tokens text makes text of them",
                "control-tokens",
            )


def make_image_reader(spec: str, rows: list[Row], columns: dict[str, str], tokenizer: PreTrainedTokenizerBase):
    """An images.ImageReader, or None if no row has an image and the model sees none. Raises BadInput."""
    column = columns.get("images", "images")
    has_images = any(lookup(row, column) for _, row in rows)
    if not has_images:
        # A text may still have a placeholder, if the model sees images. Tokenizers of other models may have tokens of
        # such names too, so config.json decides.
        has_placeholders = any("image" in token for token in tokenizer.get_added_vocab())
        if not has_placeholders or not hasattr(AutoConfig.from_pretrained(tokenizer.name_or_path), "vision_config"):
            return None
    from common.data import images  # texts do without its imports

    return images.ImageReader(spec, columns, tokenizer, has_images)


class PromptLoader:
    """An endless walk over the prompts. The order is a function of the seed and the position alone.

    Each data set is shuffled again in each of its epochs. A mixture takes the data sets in turns that repeat. The turns
    are evenly spread, and a data set has as many of them as its weight says, to a thousandth of the whole.
    """

    def __init__(self, prompts: list[Prompt], seed: int, also: list | None = None):
        """also: what else a run learns from, such as solutions, for the fingerprint."""
        self.seed = seed
        # Number of prompts drawn so far. A resumed run sets it.
        self.position = 0
        # Place behind the last prompts that were trained on, if others have been drawn since. None: there are none.
        self.trained_until: int | None = None
        self.also = also
        by_name: dict[str, list[Prompt]] = {}
        for prompt in prompts:
            by_name.setdefault(prompt.dataset, []).append(prompt)
        self.datasets = list(by_name.values())
        self.turns = turns([dataset[0].weight for dataset in self.datasets])
        # Data set -> its epoch, and the order of its prompts there. A million rows take a second to shuffle.
        self.orders: dict[int, tuple[int, list[int]]] = {}

    @property
    def resume_at(self) -> int:
        """Position at which a resumed run continues: the first prompt that has not been trained on."""
        return self.position if self.trained_until is None else self.trained_until

    def fingerprint(self) -> str:
        """SHA-256 of the token ids and answers of all prompts, in order; not of columns that only a reward reads."""
        content = [[(prompt.ids, prompt.answer) for prompt in dataset] for dataset in self.datasets]
        if self.also is not None:
            content.append(self.also)
        return hashlib.sha256(repr(content).encode()).hexdigest()

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts, the same on every rank."""
        prompts = [self.prompt_at(position) for position in range(self.position, self.position + count)]
        self.position += count
        return prompts

    def prompt_at(self, position: int) -> Prompt:
        """The prompt at any position of the walk."""
        rounds, turn = divmod(position, len(self.turns))
        which = self.turns[turn]
        # Prompts that came from this data set before: those of whole rounds, and those of this one.
        earlier = rounds * self.turns.count(which) + self.turns[:turn].count(which)
        epoch, place = divmod(earlier, len(self.datasets[which]))
        if which not in self.orders or self.orders[which][0] != epoch:
            self.orders[which] = (epoch, self.order(which, epoch))
        order = self.orders[which][1]
        return self.datasets[which][order[place]]

    def order(self, which: int, epoch: int) -> list[int]:
        """The order of one data set's prompts in one epoch, as indices."""
        order = list(range(len(self.datasets[which])))
        # Published results depend on these seeds. The seed of the first data set does not name it.
        seed = f"{self.seed}/{epoch}"
        if which > 0:
            seed += f"/{which}"
        random.Random(seed).shuffle(order)
        return order


def turns(weights: list[float]) -> list[int]:
    """The data set that each prompt of a round comes from, evenly spread: [2.0, 1.0] -> [0, 1, 0].

    The round is the shortest in which all weights are whole numbers. In the longest they are rounded.
    """
    # 3:1 has the shares 0.75 and 0.25, which are whole numbers in a round of 4.
    shares = [weight / sum(weights) for weight in weights]
    length = 1
    while length < LONGEST_ROUND and not all(is_whole(length * share) for share in shares):
        length += 1
    # A data set with 3 turns has its places at 1/6, 3/6 and 5/6 of the round.
    places = []
    for which, share in enumerate(shares):
        count = max(1, round(length * share))
        places += [((i + 0.5) / count, which) for i in range(count)]
    return [which for _, which in sorted(places)]


def is_whole(count: float) -> bool:
    """True for a whole number above 0. Sums of fractions miss it by rounding errors."""
    return round(count) > 0 and abs(count - round(count)) < 1e-9
