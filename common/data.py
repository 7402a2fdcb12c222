"""Prompts: built-in tasks, JSONL files and Hub data sets, as token ids with a reference answer.

Everything wrong with the data is said before a model is loaded, as `file:line: found, expected`.
"""

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from httpx2 import HTTPError  # what huggingface_hub raises without a connection
from huggingface_hub import model_info, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from common import embedded
from common.placement import BadInput, refuse_all, say

GSM8K_INSTRUCTION = "\nReason step by step, then write the final answer as a number after ####."


@dataclass(frozen=True)
class Prompt:
    id: str  # where it came from: "train.jsonl:17", "arithmetic/test:3"
    text: str  # as the model sees it, chat template included
    ids: list[int]
    answer: str
    solution: str | None = None  # a worked solution, for supervised fine-tuning
    meta: dict[str, Any] = field(default_factory=dict)


def load_tokenizer(model_path: str) -> tuple[PreTrainedTokenizerBase, list[int]]:
    """The model's tokenizer and the tokens that end a response. Reads no weights. Raises BadInput."""
    folder = Path(model_path)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise BadInput(f"--model {model_path}: the folder has no config.json")
    if not folder.is_dir() and not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model_path):
        raise BadInput(f"--model {model_path}: no such folder")
    try:
        if not folder.is_dir() and not isinstance(try_to_load_from_cache(model_path, "config.json"), str):
            model_info(model_path, timeout=5)  # one request; from_pretrained would retry for half a minute
        config = AutoConfig.from_pretrained(model_path)
        tokenizer = AutoTokenizer.from_pretrained(model_path)
    except (OSError, ValueError, HTTPError, HfHubHTTPError) as error:
        reason = str(error).strip().split("\n")[0]
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


def load(spec: str, split: str, tokenizer: PreTrainedTokenizerBase, max_prompt_tokens: int) -> list[Prompt]:
    """Prompts of --dataset. Prompts over the limit are dropped, counted and named. Raises BadInput.

    spec: "arithmetic"; "gsm8k" (from the Hub) or "gsm8k:FOLDER" (with train.jsonl and test.jsonl); "file.jsonl"
    (a split of its own: `split` is ignored) or "owner/name" on the Hub, with "prompt" or "question" (a
    string, or a list of chat messages) and "answer".
    """
    kind, _, folder = spec.partition(":")
    if spec == "arithmetic":
        rows = [(f"arithmetic/{split}:{i}", row) for i, row in enumerate(embedded.problems(split))]
        prompts = [make_prompt(where, row, tokenizer) for where, row in rows]
    elif kind == "gsm8k":
        rows = read_jsonl(Path(folder) / f"{split}.jsonl") if folder else read_hub("openai/gsm8k", split, "main")
        prompts = collect(rows, lambda where, row: make_gsm8k_prompt(where, row, tokenizer))
    elif spec.endswith(".jsonl"):
        prompts = collect(read_jsonl(Path(spec)), lambda where, row: make_prompt(where, row, tokenizer))
    elif re.fullmatch(r"[\w.-]+/[\w.-]+", spec) and not Path(spec).exists():
        prompts = collect(read_hub(spec, split), lambda where, row: make_prompt(where, row, tokenizer))
    else:
        raise BadInput(f'--dataset "{spec}": expected arithmetic, gsm8k, gsm8k:FOLDER, a .jsonl file or owner/name')
    kept = [prompt for prompt in prompts if len(prompt.ids) <= max_prompt_tokens]
    dropped = [prompt.id for prompt in prompts if len(prompt.ids) > max_prompt_tokens]
    if not kept:
        raise BadInput(f"{spec}: all {len(prompts)} prompts are longer than --max-prompt-tokens {max_prompt_tokens}")
    if dropped:
        named = ", ".join(dropped[:5]) + (" ..." if len(dropped) > 5 else "")
        say(f"{spec}: dropped {len(dropped)} of {len(prompts)} prompts over {max_prompt_tokens} tokens: {named}")
    return kept


def load_eval(spec: str, eval_spec: str, tokenizer: PreTrainedTokenizerBase, max_prompt_tokens: int) -> list[Prompt]:
    """Prompts of --eval-dataset, else the test split of a built-in --dataset, else none."""
    if eval_spec:
        return load(eval_spec, "test", tokenizer, max_prompt_tokens)
    built_in = spec == "arithmetic" or spec.partition(":")[0] == "gsm8k"
    return load(spec, "test", tokenizer, max_prompt_tokens) if built_in else []


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


def collect(rows: list[tuple[str, dict]], make: Callable[[str, dict], Prompt]) -> list[Prompt]:
    """make() over all rows; what is wrong with the first five bad ones becomes one BadInput."""
    prompts, errors = [], []
    for where, row in rows:
        try:
            prompts.append(make(where, row))
        except BadInput as error:
            errors.append(str(error))
    refuse_all(errors)
    return prompts


def make_prompt(where: str, row: dict, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    """A row with "prompt" or "question", "answer", and perhaps a worked "solution" or "response"."""
    key = next((key for key in ("prompt", "question") if key in row), None)
    solution = row.get("solution", row.get("response"))  # fine-tuning needs no answer beside it
    missing = "prompt" if key is None else "answer" if "answer" not in row and solution is None else None
    if missing:
        raise BadInput(f'{where}: missing key "{missing}" (found: {", ".join(row) or "nothing"})')
    content, answer = row[key], row.get("answer", "")
    if not (isinstance(content, list) and content) and not (isinstance(content, str) and content.strip()):
        raise BadInput(f'{where}: "{key}" must be a non-empty string, got {json.dumps(content)[:80]}')
    if not isinstance(answer, (str, int, float)) or isinstance(answer, bool):
        raise BadInput(f'{where}: "answer" must be a string or a number, got {json.dumps(answer)[:80]}')
    text, ids = render(content, tokenizer)
    return Prompt(where, text, ids, str(answer), solution, row)


def make_gsm8k_prompt(where: str, row: dict, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    """A raw GSM8K row: the answer is what follows ####; calculator marks <<...>> leave the solution."""
    prompt = make_prompt(where, row, tokenizer)
    if "####" not in prompt.answer:
        raise BadInput(f'{where}: no "####" in "answer"')
    text, ids = render(row["question"] + GSM8K_INSTRUCTION, tokenizer)
    solution = re.sub(r"<<.*?>>", "", prompt.answer)
    return Prompt(where, text, ids, prompt.answer.rpartition("####")[2].strip(), solution, row)


def render(content: str | list[dict], tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[int]]:
    """Text and ids of a prompt: through the chat template if the tokenizer has one, else the plain string."""
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return text, tokenizer(text, add_special_tokens=False)["input_ids"]  # the template wrote the BOS
    text = content if isinstance(content, str) else "\n".join(message["content"] for message in content) + "\n"
    return text, tokenizer(text)["input_ids"]


def read_jsonl(path: Path) -> list[tuple[str, dict]]:
    """(file:line, object) of each row; lines end at "\\n" alone, blank ones are skipped but counted."""
    if not path.is_file():
        raise BadInput(f"{path}: file not found")
    rows, errors = [], []
    for number, line in enumerate(path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8"))
            if isinstance(row, dict):
                rows.append((f"{path}:{number}", row))
            else:
                errors.append(f"{path}:{number}: expected an object, got {type(row).__name__}")
        except UnicodeDecodeError as error:
            errors.append(f"{path}:{number}: not valid UTF-8 at byte {error.start + 1}")
        except json.JSONDecodeError as error:
            errors.append(f"{path}:{number}: invalid JSON at column {error.colno}: {error.msg}")
    refuse_all(errors)
    if not rows:
        raise BadInput(f"{path}: contains no rows")
    return rows


def read_hub(name: str, split: str, config: str | None = None) -> list[tuple[str, dict]]:
    """(name/split:row, object) of a Hub data set."""
    import datasets  # a second to import, and only this source needs it

    try:
        rows = datasets.load_dataset(name, config, split=split)
    except (OSError, ValueError) as error:  # offline, no such data set, no such split
        reason = str(error).strip().split("\n")[0]
        raise BadInput(f"--dataset {name}: cannot be loaded from the Hub: {reason}") from None
    return [(f"{name}/{split}:{i}", row) for i, row in enumerate(rows)]


class PromptLoader:
    """An endless walk over the prompts in an order that is a function of (seed, epoch) alone."""

    def __init__(self, prompts: list[Prompt], seed: int):
        self.prompts, self.seed, self.position = prompts, seed, 0

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts, the same on every rank."""
        taken = []
        while len(taken) < count:
            epoch, place = divmod(self.position, len(self.prompts))
            order = list(range(len(self.prompts)))
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
            chosen = order[place : place + count - len(taken)]
            taken += [self.prompts[i] for i in chosen]
            self.position += len(chosen)
        return taken
