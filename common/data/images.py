"""Images in prompts: read from a column of the data, and turned into tokens by the model's own processor.

A text says with <image> where an image stands. The trainer sees a placeholder there for each vector that the model
makes of the image, the engine one placeholder an image, which it expands by itself:

    text       How many red squares? <image>
    compact    How many red squares? #                    for the engine, beside the image
    ids        How many red squares? # # # # ... #        for the trainer, beside the tensors of `tensors()`
"""

import base64
import binascii
import hashlib
from collections.abc import Callable
from functools import cache, lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image, UnidentifiedImageError
from transformers import AutoConfig, AutoProcessor

from common.data.sources import first_line, lookup
from common.data.tokenizer import image_tokens
from common.errors import BadInput, RunFailed

MARK = "<image>"
# A processor makes these of the text.
NO_TENSORS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
KEPT = 64  # prompts whose tensors stay in memory, each of which may have 20 MB


class ImageIds(list):
    """Token ids of a prompt with images, as the trainer sees them. It is a list of ids for all that needs no images."""

    def __init__(self, ids: list[int], compact: list[int], text: str, images: list[bytes], model_path: str):
        """compact: the ids as the engine takes them. images: files, in the order of their placeholders."""
        super().__init__(ids)
        self.compact, self.text, self.images, self.model_path = compact, text, images, model_path
        self.key = hashlib.sha256(repr([ids, images]).encode()).hexdigest()  # other for other images

    def __repr__(self) -> str:
        return f"{super().__repr__()} {self.key}"  # a run's fingerprint of its data reads it

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return self.key == other.key if isinstance(other, ImageIds) else super().__eq__(other)

    def pictures(self) -> list[Image.Image]:
        return [Image.open(BytesIO(image)).convert("RGB") for image in self.images]

    def check(self, engine_ids: list[int]) -> None:
        """Raise RunFailed unless the engine has made the same ids of the compact ones."""
        if list(engine_ids) != list(self):
            said = f"a prompt with {len(self.images)} images has {len(engine_ids)} tokens in vLLM and {len(self)} here"
            raise RunFailed(f"{said}: their processors of images differ", code="image-tokens")


@lru_cache(maxsize=KEPT)
def tensors(ids: ImageIds) -> dict[str, torch.Tensor]:
    """The model takes them beside the ids: pixel_values, and what its family needs to know about them."""
    made = process(ids.model_path, ids.text, ids.pictures())
    return {name: value for name, value in made.items() if name not in NO_TENSORS}


def together(prompts: list[ImageIds]) -> dict[str, torch.Tensor]:
    """The tensors of several prompts, in their order. Idefics 3 has a dimension for prompts and one for their images,
    and pads images of other sizes.
    """
    parts = [tensors(ids) for ids in prompts]
    if "pixel_attention_mask" not in parts[0]:
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    height, width = (max(part["pixel_values"].shape[i] for part in parts) for i in (-2, -1))
    whole = lambda value: F.pad(value, (0, width - value.shape[-1], 0, height - value.shape[-2]))
    return {name: torch.cat([whole(part[name]) for part in parts], dim=1) for name in parts[0]}


@cache
def processor(model_path: str):
    """The model's processor: its tokenizer and what it does to images. Raises BadInput."""
    try:
        return AutoProcessor.from_pretrained(model_path)
    except (OSError, ValueError, ImportError) as error:
        raise BadInput(f"--model {model_path}: its processor of images cannot be loaded: {first_line(error)}") from None


def process(model_path: str, text: str, pictures: list[Image.Image]) -> dict[str, torch.Tensor]:
    """The processor's ids, (1, tokens), and tensors of a prompt whose text has been through the chat template."""
    return processor(model_path)(text=[text], images=pictures, return_tensors="pt", add_special_tokens=False)


class RowImages:
    """The images of one row, for templates.render."""

    def __init__(self, where: str, files: list[bytes], model_path: str, placeholder: int):
        """placeholder: the token that stands for an image."""
        self.where, self.files, self.model_path, self.placeholder = where, files, model_path, placeholder

    def as_parts(self, messages: list[dict]) -> list[dict]:
        """Chat messages whose text is cut at the marks, as chat templates want it. Without marks images come first in
        the first message of the user. Raises BadInput if there are not as many marks as images.
        """
        marks = sum(message["content"].count(MARK) for message in messages)
        if marks not in (0, len(self.files)):
            raise BadInput(f"{self.where}: {marks} times {MARK} in the text, and {len(self.files)} images")
        first = next((i for i, message in enumerate(messages) if message["role"] == "user"), 0)
        parted = []
        for i, message in enumerate(messages):
            text = MARK * len(self.files) * (not marks and i == first) + message["content"]
            pieces = [{"type": "text", "text": piece} for piece in text.split(MARK)]
            parts = [part for piece in pieces for part in ({"type": "image"}, piece)][1:]
            parted.append({**message, "content": [part for part in parts if part.get("text") != ""]})
        return parted

    def expand(self, text: str, compact: list[int]) -> ImageIds:
        """The ids of a prompt with images, as the trainer sees them."""
        ids = ImageIds([], compact, text, self.files, self.model_path)
        made = process(self.model_path, text, ids.pictures())["input_ids"][0].tolist()
        if (found := compact.count(self.placeholder)) != len(self.files):
            raise BadInput(f"{self.where}: the chat template writes {found} placeholders for {len(self.files)} images")
        return ImageIds(made, compact, text, self.files, self.model_path)


def reader(column: str, spec: str, tokenizer) -> Callable[[str, dict], RowImages | None]:
    """A function of a row and its place: the row's images, or None. Raises BadInput for a model that sees no images."""
    model_path = tokenizer.name_or_path
    config = AutoConfig.from_pretrained(model_path)
    if not image_tokens(config):
        raise BadInput(f"--model {model_path}: {config.model_type} models see no images, and {spec} has some")
    tokenizer.chat_template = processor(model_path).chat_template or tokenizer.chat_template
    if not tokenizer.chat_template:
        raise BadInput(f"--model {model_path}: has no chat template, which says where images stand in a prompt")
    folder = Path(spec).parent

    def read(where: str, row: dict) -> RowImages | None:
        found = lookup(row, column)
        values = found if isinstance(found, list) else [] if found is None else [found]
        files = [read_image(where, value, folder) for value in values]
        return RowImages(where, files, model_path, image_tokens(config)[0]) if files else None

    return read


def read_image(where: str, value: Any, folder: Path) -> bytes:
    """The file of an image that a row has as a path, a data URL, bytes, an object with bytes or path, or a PIL image.

    A path is relative to the folder of the data set, or else to the working directory. Raises BadInput.
    """
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, Image.Image):
        buffer = BytesIO()
        value.save(buffer, format="PNG")
        return buffer.getvalue()
    named = f"image {value}" if isinstance(value, str) and not value.startswith("data:") else "an image"
    try:
        if isinstance(value, str) and value.startswith("data:"):
            value = base64.b64decode(value.partition(",")[2], validate=True)
        elif isinstance(value, str):
            path = folder / value if (folder / value).is_file() else Path(value)
            value = path.read_bytes()
        if not isinstance(value, bytes):
            raise BadInput(f"{where}: an image must be a path, a data URL or bytes, got {type(value).__name__}")
        with Image.open(BytesIO(value)) as image:
            image.load()
    except FileNotFoundError:
        raise BadInput(f"{where}: {named}: file not found") from None
    except (OSError, UnidentifiedImageError, binascii.Error, ValueError, Image.DecompressionBombError) as error:
        raise BadInput(f"{where}: {named} cannot be read: {first_line(error)}") from None
    return value


def without_images(row: dict, column: str) -> dict:
    """The row without its images, and with chat messages in OpenAI's form, lists of parts, as texts with marks."""
    is_part = lambda value: isinstance(value, dict) and "type" in value
    is_parts = lambda value: isinstance(value, list) and value and all(map(is_part, value))
    mark = lambda part: MARK if part["type"] == "image" else str(part.get("text", ""))

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return "".join(map(mark, value)) if is_parts(value) else [plain(each) for each in value]
        return {name: plain(each) for name, each in value.items()} if isinstance(value, dict) else value

    return {name: plain(value) for name, value in row.items() if name != column}
