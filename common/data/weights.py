"""Weights in a model's files. What transformers only warns of while it reads them is an error here.

It would start missing weights at random, leave out those that it does not know, read quantized ones as if they were
plain, and load another model than vLLM if config.json ties two weights that differ.
"""

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.utils import logging

from common.data.rows import first_line
from common.data.tokenizer import has_safetensors
from common.errors import BadInput, refuse_all

ROWS = 4096  # rows of two weights that are compared at once
WHOLE_NUMBERS = re.compile(r"[IU]\d+|BOOL")  # data types in the header of a file; a float's begin with F or BF


def quantization(config) -> str:
    """How config.json says that the weights are quantized, such as "quantization_config (fp8)"; "" if they are not."""
    for part in (config, config.get_text_config()):
        for key in ("quantization_config", "compression_config"):
            settings = getattr(part, key, None)
            if not settings:
                continue
            # A dict in a file, and sometimes an object in memory.
            settings = settings if isinstance(settings, dict) else settings.to_dict()
            # Older files of bitsandbytes name no method.
            return f"{key} ({settings.get('quant_method', 'of bitsandbytes')})"
    return ""


def refuse_quantized(config, where: str) -> None:
    """Raise BadInput for weights that config.json says are quantized. where: how the user named the model."""
    # transformers would undo some methods and forget it: the export would hold other weights than its config.json says.
    if how := quantization(config):
        raise BadInput(
            f"{where}: config.json has a {how}: quantized weights are not trained, merged or exported; name the model "
            "that they were made from, in bfloat16 or float32"
        )


def read(model_class: type, model_path: str, where: str, *, value_head: bool = False, **options) -> nn.Module:
    """model_class.from_pretrained(model_path, **options), with all weights of the files and no others.

    where: how the user named the model. value_head: the head of the vocabulary may be left over, and one with values
    may be missing; it starts at 0. Raises BadInput.
    """
    with quiet():
        try:
            model, info = model_class.from_pretrained(
                model_path,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                use_safetensors=has_safetensors(model_path),
                **options,
            )
        except (OSError, SafetensorError) as error:
            raise BadInput(
                f"{where}: its weights cannot be read, perhaps a copy was cut short: {first_line(error)}"
            ) from None
        except RuntimeError as error:
            if "automatic conversion" not in str(error):
                raise
            raise BadInput(f"{where}: its weights do not fit its config.json: {first_line(error)}") from None
    missing, unexpected = set(info["missing_keys"]), set(info["unexpected_keys"])
    if value_head:
        for name in missing & {"score.weight", "score.bias"}:
            nn.init.zeros_(model.get_parameter(name))  # random numbers would put noise into every advantage
        replaced = {"score.weight", "score.bias", "lm_head.weight", "lm_head.bias"}
        missing, unexpected = missing - replaced, unexpected - replaced
    wrong = [f"its weights have no {name}" for name in sorted(missing)]
    wrong += [f"config.json describes no {name}" for name in sorted(unexpected)]
    for name, saved, expected in sorted(info["mismatched_keys"]):
        wrong.append(f"{name} is {tuple(saved)} and should be {tuple(expected)}")
    # transformers takes what is not tied after all out of its own list.
    for tied, source in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        if tied not in model.all_tied_weights_keys:
            wrong.append(not_tied(tied, source))
    refuse_all([(where, text) for text in wrong])
    return model


def check_headers(folder: str, tied: dict[str, str], where: str) -> None:
    """Refuse what from_pretrained does not see on the meta device: data types, and whether tied weights are equal.

    Only weights that are tied and in the files twice are read. tied: name -> name of the weight that it shares.
    Raises BadInput.
    """
    files = files_of(folder)
    wrong = []
    for file in sorted(set(files.values())):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118, it is no dict
                dtype = tensors.get_slice(name).get_dtype()
                # Buffers, such as positions, may be whole numbers.
                if name.endswith(("weight", "bias")) and WHOLE_NUMBERS.fullmatch(dtype):
                    wrong.append(f"{name} is {dtype} in {file.name}: quantized weights are not read")
    for name, source in tied.items():
        if name in files and source in files and not equal(files, name, source):
            wrong.append(not_tied(name, source))
    refuse_all([(where, text) for text in sorted(wrong)])


def not_tied(name: str, source: str) -> str:
    return (
        f"config.json ties {name} to {source}, and the files have different ones; if the model has a head of its own, "
        f'write "tie_word_embeddings": false into config.json, otherwise remove {name} from the files'
    )


def files_of(folder: str) -> dict[str, Path]:
    """Name of each weight -> the file that has it."""
    index = Path(folder) / "model.safetensors.index.json"
    whole = index.with_name("model.safetensors")
    if whole.is_file():
        with safe_open(whole, "pt") as tensors:
            return dict.fromkeys(tensors.keys(), whole)
    names = json.loads(index.read_text())["weight_map"]
    return {name: index.with_name(file) for name, file in names.items()}


def equal(files: dict[str, Path], one: str, other: str) -> bool:
    """Whether two matrices are the same. A few rows are read at a time, and the first difference ends it."""
    with safe_open(files[one], "pt") as first, safe_open(files[other], "pt") as second:
        a, b = first.get_slice(one), second.get_slice(other)
        if a.get_shape() != b.get_shape():
            return False
        rows = range(0, a.get_shape()[0], ROWS)
        return all(torch.equal(a[row : row + ROWS], b[row : row + ROWS]) for row in rows)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """transformers prints neither its table of keys, which is an error here, nor a progress bar inside the run's."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
