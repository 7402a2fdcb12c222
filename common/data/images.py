"""Images in prompts: read from a column or from chat messages, and made into tokens by the model's own processor.

A text says with <image> where an image stands. The trainer sees a placeholder for each vector that the model makes of
the image. The engine takes one placeholder an image, and expands it by itself:

    text       How many red squares? <image>
    compact    How many red squares? #                    for the engine, together with the image
    ids        How many red squares? # # # # ... #        for the trainer, together with the tensors of `tensors()`
"""

import base64
import hashlib
import struct
import zlib
from dataclasses import dataclass
from functools import cache, lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from transformers import AutoConfig, AutoProcessor

from common.data.conversations import last_response
from common.data.rows import CONVERSATIONS, first_line, lookup
from common.data.templates import prompt_column, solution_column
from common.data.tokenizer import image_tokens
from common.errors import BadInput

MARK = "<image>"
# A processor makes these of the text.
NO_TENSORS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
CACHED_PROMPTS = 64  # prompts whose tensors stay in memory, each of which may have 20 MB
# PIL's readers raise these for files that are broken.
UNREADABLE = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    LookupError,
    EOFError,
    OverflowError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)
REFUSALS = (ValueError, TypeError, IndexError)  # from a processor, for images or a text that it cannot take


class ImageIds(list):
    """Token ids of a prompt with images, as the trainer sees them. Code that needs no images takes it as a list."""

    def __init__(self, ids: list[int], compact: list[int], text: str, images: list[bytes], model_path: str):
        """compact: the ids as the engine takes them. images: files, in the order of their placeholders."""
        super().__init__(ids)
        self.compact = compact
        self.text = text
        self.images = images
        self.model_path = model_path
        # Prompts with the same ids and other images have another key.
        self.key = hashlib.sha256(repr([ids, images]).encode()).hexdigest()

    # The fingerprint of a run's data is made of this text.
    def __repr__(self) -> str:
        return f"{super().__repr__()} {self.key}"

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return self.key == other.key if isinstance(other, ImageIds) else super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __getitem__(self, place):
        return self.refuse() if isinstance(place, slice) else super().__getitem__(place)

    def refuse(self, *_) -> NoReturn:
        raise TypeError("a part of a prompt with images, or more than it, would lose them; list(ids) is the ids alone")

    # `plain_list += prompt` still works: a packed row takes the ids of many prompts.
    __add__ = __iadd__ = __mul__ = __imul__ = refuse

    def pictures(self) -> list[Image.Image]:
        return [picture(image) for image in self.images]


def picture(file: bytes) -> Image.Image:
    """The image in a file in RGB, as the trainer and the engine see it.

    Like transformers.load_image, this turns it as its EXIF orientation says. Unlike load_image, it makes transparency
    white: load_image shows the colour beneath, often black, and black lines would be lost in it.
    """
    image = ImageOps.exif_transpose(Image.open(BytesIO(file)))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


@lru_cache(maxsize=CACHED_PROMPTS)
def tensors(ids: ImageIds) -> dict[str, torch.Tensor]:
    """The model takes these beside the ids: pixel_values, and what its family needs to know about them."""
    processed = process(ids.model_path, ids.text, ids.pictures())
    return {name: value for name, value in processed.items() if name not in NO_TENSORS}


def together(prompts: list[ImageIds]) -> dict[str, torch.Tensor]:
    """The tensors of several prompts, in their order.

    Idefics 3 has a dimension for prompts and one for their images, and wants smaller images padded.
    """
    parts = [tensors(ids) for ids in prompts]
    if "pixel_attention_mask" not in parts[0]:
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    # Pad at the right and at the bottom.
    height = max(part["pixel_values"].shape[-2] for part in parts)
    width = max(part["pixel_values"].shape[-1] for part in parts)

    def padded(value: torch.Tensor) -> torch.Tensor:
        return F.pad(value, (0, width - value.shape[-1], 0, height - value.shape[-2]))

    return {name: torch.cat([padded(part[name]) for part in parts], dim=1) for name in parts[0]}


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


def check_same(model_path: str, ids: ImageIds) -> None:
    """Refuse a model whose processor makes other ids or tensors of a prompt than the policy's. Raises BadInput."""
    ours = process(ids.model_path, ids.text, ids.pictures())
    try:
        theirs = process(model_path, ids.text, ids.pictures())
    except REFUSALS as error:
        raise BadInput(f"--model {model_path}: its processor refuses a prompt: {first_line(error)}") from None
    if theirs.keys() != ours.keys() or not all(torch.equal(theirs[name], ours[name]) for name in ours):
        raise BadInput(f"--model {model_path}: its processor makes other tokens or pixels of images than the policy's")


@lru_cache(maxsize=4096)
def expanded(model_path: str, text: str, sizes: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    """The ids of a prompt with images of these sizes, in pixels. Their content doesn't change the number of tokens."""
    blank = [Image.new("RGB", size) for size in sizes]
    return tuple(process(model_path, text, blank)["input_ids"][0].tolist())


@dataclass(frozen=True)
class RowImages:
    """The images of one row, for templates.render. A row may have none."""

    where: str  # place of the row
    files: list[bytes]
    model_path: str
    placeholders: dict[int, str]  # token -> text
    marked: bool  # <image> in a text stands for an image, even if the row has none

    def without_marks(self, text: str) -> str:
        """The text without the marks that stand for images of this row. Some tokenizers have a token of that name."""
        return text.replace(MARK, " ") if self.files else text

    def as_parts(self, messages: list[dict]) -> list[dict]:
        """Chat messages whose texts are cut at the marks, as chat templates want it.

        Without marks images come first in the first message of the user. Raises BadInput if there are not as many
        marks as images.
        """
        marks = sum(message["content"].count(MARK) for message in messages)
        if self.marked and marks not in (0, len(self.files)):
            raise BadInput(f"{self.where}: {marks} times {MARK} in the text, and {len(self.files)} images")
        if not self.files:
            return messages
        if marks == 0:
            roles = [message["role"] for message in messages]
            first = roles.index("user") if "user" in roles else 0
            marked = {**messages[first], "content": MARK * len(self.files) + messages[first]["content"]}
            messages = [*messages[:first], marked, *messages[first + 1 :]]
        return [{**message, "content": cut_at_marks(message["content"])} for message in messages]

    def expand(self, text: str, compact: list[int]) -> list[int]:
        """The ids of a prompt as the trainer sees them: ImageIds if there are images. Raises BadInput."""
        placeholders = [self.placeholders[token] for token in compact if token in self.placeholders]
        if not self.files:
            if placeholders:
                raise BadInput(f"{self.where}: the text has {placeholders[0]}, and the row has no image")
            return compact
        if len(placeholders) != len(self.files):
            count = f"{len(placeholders)} placeholders for {len(self.files)} images"
            raise BadInput(f"{self.where}: the chat template writes {count}")
        # If the processor cannot be loaded, the error should not name a row.
        processor(self.model_path)
        try:
            ids = expanded(self.model_path, text, tuple(picture(file).size for file in self.files))
        except REFUSALS as error:
            raise BadInput(f"{self.where}: refused by the processor of images: {first_line(error)}") from None
        return ImageIds(list(ids), compact, text, self.files, self.model_path)


def cut_at_marks(text: str) -> list[dict]:
    """a<image>b -> the parts a, an image, b. Empty texts are left out."""
    parts = []
    for i, piece in enumerate(text.split(MARK)):
        if i > 0:
            parts.append({"type": "image"})
        if piece:
            parts.append({"type": "text", "text": piece})
    return parts


class ImageReader:
    """Takes the images out of rows, for a model that sees."""

    def __init__(self, spec: str, columns: dict[str, str], tokenizer, has_images: bool):
        """has_images: some row has a value in the column of images. Raises BadInput if the model sees none.

        Without images, only placeholders in texts are refused.
        """
        self.columns = columns
        self.tokenizer = tokenizer
        self.has_images = has_images
        self.folder = Path(spec) if Path(spec).is_dir() else Path(spec).parent
        self.model_path = tokenizer.name_or_path
        config = AutoConfig.from_pretrained(self.model_path)
        self.placeholders = {token: tokenizer.convert_ids_to_tokens(token) for token in image_tokens(config)}
        if not self.placeholders:
            raise BadInput(f"--model {self.model_path}: {config.model_type} models see no images, and {spec} has some")
        # All data sets of a mixture are rendered by the processor's template, with or without images.
        try:
            tokenizer.chat_template = processor(self.model_path).chat_template or tokenizer.chat_template
        except BadInput:
            if has_images:
                raise

    def read(self, where: str, row: dict) -> tuple[dict, RowImages]:
        """The row with messages as texts and without its images, and the images. Raises BadInput."""
        column = self.columns.get("images", "images")
        images = lookup(row, column) or []
        if not isinstance(images, list):
            images = [images]
        # Rewards and traces get the row, and megabytes of pixels are of no use to them.
        row = changed(row, column, None)

        prompt = prompt_column(row, self.columns)
        pair = [self.columns.get(name, name) for name in ("chosen", "rejected")]
        inside = []  # the images in chat messages
        for column in (prompt, *pair):
            messages = lookup(row, column)
            if isinstance(messages, list):
                # The messages of a pair repeat the images of the prompt.
                row = changed(row, column, as_texts(where, messages, inside if column == prompt else []))
        self.refuse_placeholders(where, row, [solution_column(row, self.columns), *CONVERSATIONS, *pair])

        if not images:
            images = [image for image in inside if image is not None]
        if not images and "images" not in self.columns and row.get("image"):
            raise BadInput(f'{where}: has "image" and no "images"; --columns images=image, or rename it')
        if images and not self.tokenizer.chat_template:
            name = f"--model {self.model_path}"
            raise BadInput(f"{name}: has no chat template, which says where images stand in a prompt")
        files = [read_image(where, image, self.folder) for image in images]
        # In data without any images, <image> is a text like any other.
        marked = self.has_images or bool(inside)
        return row, RowImages(where, files, self.model_path, self.placeholders, marked)

    def refuse_placeholders(self, where: str, row: dict, columns: list[str]) -> None:
        """Raise BadInput if a response to learn has a placeholder of an image. No engine samples one."""
        for column in columns:
            response = lookup(row, column)
            if isinstance(response, list):
                response = last_response(response) or " ".join(turn for turn in response if isinstance(turn, str))
            for placeholder in self.placeholders.values():
                if isinstance(response, str) and placeholder in response:
                    raise BadInput(f'{where}: a response in "{column}" has {placeholder}, which stands for an image')


def changed(row: dict, column: str, value: Any) -> dict:
    """The row with another value in a column, or without the column if the value is None.

    The column may be inside of another one: "a.b".
    """
    # A column whose name has a dot goes first, as in rows.lookup.
    outer, _, inner = column.partition(".")
    if column not in row and isinstance(row.get(outer), dict):
        return {**row, outer: changed(row[outer], inner, value)}
    row = {**row, column: value}
    if value is None:
        del row[column]
    return row


def as_texts(where: str, messages: list, images: list) -> list:
    """Chat messages in OpenAI's form, whose contents are lists of parts, as texts with marks. Any other value stays.

    The images in the parts are added to `images`, or None for a part without its own image. Raises BadInput.
    """
    texts = []
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if content and isinstance(content, list) and all(isinstance(part, dict) and "type" in part for part in content):
            message = {**message, "content": "".join(as_text(where, part, images) for part in content)}
        texts.append(message)
    return texts


def as_text(where: str, part: dict, images: list) -> str:
    """A part of a message as a text. An image is added to `images`."""
    kind = part["type"]
    if kind == "text":
        return str(part.get("text") or "")
    if kind not in ("image", "image_url"):
        raise BadInput(f'{where}: a part of the type "{kind}" is neither a text nor an image')
    # The forms of OpenAI, of transformers' chat templates, and of some data sets.
    image = part.get(kind) or part.get("url") or part.get("path")
    if isinstance(image, dict) and "url" in image:
        image = image["url"]
    images.append(image)
    return MARK


def read_image(where: str, value: Any, folder: Path) -> bytes:
    """The file of an image that a row has as a path, a data URL, bytes, or an object with bytes or path.

    A path is relative to the folder of the data set, or else to the working directory. Raises BadInput.
    """
    # Data sets of the Hub have objects.
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if not isinstance(value, str | bytes):
        raise BadInput(f"{where}: an image must be a path, a data URL or bytes, got {type(value).__name__}")
    name = "an image"
    if isinstance(value, str) and not value.startswith("data:"):
        # Somebody may have put a whole file here, so the name is cut.
        name = f"image {first_line(value)[:80]}"
    try:
        file = load_file(value, folder) if isinstance(value, str) else value
        # An image that cannot be decoded is refused now, and not in the middle of training.
        picture(file)
    except UNREADABLE as error:
        # The system's own message would repeat the name.
        reason = getattr(error, "strerror", None) or first_line(error)
        raise BadInput(f"{where}: {name} cannot be read: {reason}") from None
    return file


def load_file(address: str, folder: Path) -> bytes:
    """The bytes of a data URL or of a path. Raises OSError and ValueError."""
    if address.startswith("data:"):
        _, _, content = address.partition(",")
        return base64.b64decode(content, validate=True)
    if address.startswith(("http://", "https://")):
        raise ValueError("it is not downloaded; expected a path, a data URL or bytes")
    path = Path(address.removeprefix("file://"))
    if (folder / path).is_file():
        path = folder / path
    return path.read_bytes()
