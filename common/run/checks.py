"""Tries what a user brings, model and rewards, before any weight is read."""

from pathlib import Path

from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase
from transformers.utils import logging

from common.data.prompts import Prompt
from common.errors import BadInput, refuse_all
from common.rewards.grading import Item
from common.rewards.mixture import Rewards, grade
from common.trainer import model


def check_model(model_path: str, tokenizer: PreTrainedTokenizerBase, prompts: list[Prompt]) -> None:
    """Refuse an architecture that cannot be packed, weights that are not those of the architecture, and prompts with
    tokens that the model has no embedding for. The weights of a name on the Hub are checked when they are there.

    Raises BadInput.
    """
    config = AutoConfig.from_pretrained(model_path)
    model.skeleton(config, model_path)
    if Path(model_path).is_dir():
        check_weights(model_path)
    largest = max(max(prompt.ids) for prompt in prompts)
    if largest >= config.vocab_size:
        raise BadInput(
            f"--model {model_path}: its tokenizer has {len(tokenizer)} tokens, config.json says {config.vocab_size}, "
            f"and token {largest} is in a prompt"
        )


def try_rewards(reward: Rewards, prompts: list[Prompt], tokenizer: PreTrainedTokenizerBase) -> None:
    """Call each function of a user with two responses to each of the first two prompts. Raises BadInput if one fails.

    The responses are the row's own solution or answer, and a wrong one.
    """
    items = []
    for prompt in prompts[:2]:
        for response in (prompt.solution or prompt.answer or "", "I do not know."):
            ids = tokenizer.encode(response, add_special_tokens=False)
            items.append(Item(prompt.text, response, prompt.answer, prompt.meta, ids))
    for name, function in reward.rewards.items():
        if hasattr(function, "try_out"):
            grade(name, function.try_out, items, [len(item.response_ids) for item in items], [False] * len(items))


def check_weights(folder: str) -> None:
    """Compare the headers of a folder's weights with the model of its config.json. Raises BadInput naming tensors."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # transformers would print a table of what is said below
    logging.disable_progress_bar()
    try:
        _, found = AutoModelForCausalLM.from_pretrained(
            folder, device_map="meta", output_loading_info=True, ignore_mismatched_sizes=True
        )
    except (OSError, SafetensorError) as error:
        raise BadInput(f"--model {folder}: its weights cannot be read, perhaps a copy was cut short: {error}") from None
    finally:
        logging.set_verbosity(verbosity)
    shapes = [f"{name} is {tuple(has)} and should be {tuple(wants)}" for name, has, wants in found["mismatched_keys"]]
    refuse_all(
        [f"--model {folder}: its weights have no {name}" for name in sorted(found["missing_keys"])]
        + [f"--model {folder}: config.json describes no {name}" for name in sorted(found["unexpected_keys"])]
        + [f"--model {folder}: {said}" for said in shapes]
    )
