"""Images in prompts: read from a column of the data, or from chat messages, and turned into tokens by the model's own
processor.

A text says with <image> where an image stands. The trainer sees a placeholder there for each vector that the model
makes of the image, the engine one placeholder an image, which it expands by itself:

    text       How many red squares? <image>
    compact    How many red squares? #                    for the engine, beside the image
    ids        How many red squares? # # # # ... #        for the trainer, beside the tensors of `tensors()`
"""

import base64
import hashlib
import struct
import zlib
from collections.abc import Callable
from functools import cache, lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from transformers import AutoConfig, AutoProcessor

from common.data.formats import missing, split_conversation
from common.data.sources import first_line, lookup
from common.data.templates import CONVERSATIONS
from common.data.tokenizer import image_tokens
from common.errors import BadInput, RunFailed

MARK = "<image>"
# A processor makes these of the text.
NO_TENSORS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
KEPT = 64  # prompts whose tensors stay in memory, each of which may have 20 MB
# PIL's readers raise these for files that are broken.
UNREADABLE = (
    OSError, SyntaxError, ValueError, TypeError, LookupError, EOFError, OverflowError, struct.error, zlib.error,
    Image.DecompressionBombError,
)  # fmt: skip
REFUSALS = (ValueError, TypeError, IndexError)  # from a processor, for images or a text that it cannot take


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

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __getitem__(self, place):
        return self.refuse() if isinstance(place, slice) else super().__getitem__(place)

    def refuse(self, *_) -> NoReturn:
        raise TypeError("a part of a prompt with images, or more than it, would lose them; list(ids) is the ids alone")

    __add__ = __iadd__ = __mul__ = __imul__ = refuse  # a list of tokens may still take in these

    def pictures(self) -> list[Image.Image]:
        return [picture(image) for image in self.images]

    def check(self, engine_ids: list[int]) -> None:
        """Raise RunFailed unless the engine has made the same ids of the compact ones."""
        if list(engine_ids) != list(self):
            said = f"a prompt with {len(self.images)} images has {len(engine_ids)} tokens in vLLM and {len(self)} here"
            raise RunFailed(f"{said}: their processors of images differ", code="image-tokens")


def picture(file: bytes) -> Image.Image:
    """The image in a file, as the trainer and the engine see it."""
    return as_seen(Image.open(BytesIO(file)))


def as_seen(image: Image.Image) -> Image.Image:
    """The image in RGB. Like transformers.load_image, this turns it as its EXIF orientation says. Unlike there,
    transparency becomes white: load_image shows the colour beneath, often black, and black lines would be lost in it.
    """
    image = ImageOps.exif_transpose(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


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


def check_same(model_path: str, ids: ImageIds) -> None:
    """Refuse a model whose processor makes other ids or tensors of a prompt than the policy's. Raises BadInput."""
    try:
        theirs, ours = process(model_path, ids.text, ids.pictures()), tensors(ids)
    except REFUSALS as error:
        raise BadInput(f"--model {model_path}: its processor refuses a prompt: {first_line(error)}") from None
    found = {name: value for name, value in theirs.items() if name not in NO_TENSORS}
    same = found.keys() == ours.keys() and all(torch.equal(found[name], ours[name]) for name in ours)
    if not same or theirs["input_ids"][0].tolist() != list(ids):
        raise BadInput(f"--model {model_path}: its processor makes other tokens or pixels of images than the policy's")


@lru_cache(maxsize=4096)
def expanded(model_path: str, text: str, sizes: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    """The ids of a prompt with images of these sizes, in pixels, of which alone the number of their tokens depends."""
    blank = [Image.new("RGB", size) for size in sizes]
    return tuple(process(model_path, text, blank)["input_ids"][0].tolist())


class RowImages:
    """The images of one row, for templates.render. A row may have none."""

    def __init__(self, where: str, files: list[bytes], model_path: str, placeholders: dict[int, str], marked: bool):
        """placeholders: token -> text; the first stands for an image. marked: <image> in a text stands for an image,
        even if the row has none.
        """
        self.where, self.files, self.model_path = where, files, model_path
        self.placeholders, self.marked = placeholders, marked

    def as_parts(self, messages: list[dict]) -> list[dict]:
        """Chat messages whose text is cut at the marks, as chat templates want it. Without marks images come first in
        the first message of the user. Raises BadInput if there are not as many marks as images.
        """
        marks = sum(message["content"].count(MARK) for message in messages)
        if self.marked and marks not in (0, len(self.files)):
            raise BadInput(f"{self.where}: {marks} times {MARK} in the text, and {len(self.files)} images")
        if not self.files:
            return messages
        first = next((i for i, message in enumerate(messages) if message["role"] == "user"), 0)
        parted = []
        for i, message in enumerate(messages):
            text = MARK * len(self.files) * (not marks and i == first) + message["content"]
            pieces = [{"type": "text", "text": piece} for piece in text.split(MARK)]
            parts = [part for piece in pieces for part in ({"type": "image"}, piece)][1:]
            parted.append({**message, "content": [part for part in parts if part.get("text") != ""]})
        return parted

    def expand(self, text: str, compact: list[int]) -> list[int]:
        """The ids of a prompt as the trainer sees them: ImageIds if there are images. Raises BadInput."""
        found = [token for token in compact if token in self.placeholders]
        if found and not self.files:
            raise BadInput(f"{self.where}: the text has {self.placeholders[found[0]]}, and the row has no image")
        if len(found) != len(self.files):
            said = f"the chat template writes {len(found)} placeholders for {len(self.files)} images"
            raise BadInput(f"{self.where}: {said}")
        if not self.files:
            return compact
        processor(self.model_path)  # where it cannot be loaded, no row is to blame
        try:
            made = expanded(self.model_path, text, tuple(picture(file).size for file in self.files))
        except REFUSALS as error:
            raise BadInput(f"{self.where}: refused by the processor of images: {first_line(error)}") from None
        return ImageIds(list(made), compact, text, self.files, self.model_path)


def reader(
    columns: dict[str, str], spec: str, tokenizer, has_images: bool
) -> Callable[[str, dict], tuple[dict, RowImages]] | None:
    """A function of a row and its place: the row without images, and with messages as texts; and the row's images.

    has_images: some row has a value in the column of images. Without it the function refuses placeholders in texts, and
    is None for a model that sees no images. Raises BadInput for such a model if there are images. The function itself
    refuses rows without the column that --columns names, so "images" is taken out of `columns`.
    """
    model_path = tokenizer.name_or_path
    config = AutoConfig.from_pretrained(model_path)
    if not image_tokens(config):
        if not has_images:
            return None
        raise BadInput(f"--model {model_path}: {config.model_type} models see no images, and {spec} has some")
    try:  # Every data set of a mixture is rendered by the processor's template, with or without images.
        tokenizer.chat_template = processor(model_path).chat_template or tokenizer.chat_template
    except BadInput:
        if has_images:
            raise
    is_named, absent, folder = "images" in columns, object(), Path(spec).parent
    column = columns.pop("images", "images")
    pair = [columns.get(name, name) for name in ("chosen", "rejected")]
    placeholders = {token: tokenizer.convert_ids_to_tokens(token) for token in image_tokens(config)}

    def read(where: str, row: dict) -> tuple[dict, RowImages]:
        if is_named and lookup(row, column, absent) is absent:
            raise missing(where, row, column, is_usual=False)
        found = lookup(row, column)
        values = found if isinstance(found, list) else [found] if found else []
        row, inside = without(row, column), []
        usual = next((name for name in ("prompt", "question", *CONVERSATIONS, pair[0]) if name in row), "prompt")
        prompt = columns.get("prompt", usual)
        row = changed(row, prompt, lambda messages: as_texts(where, messages, inside))
        for name in pair:
            row = changed(row, name, lambda messages: as_texts(where, messages, []))
        refuse_placeholders(where, row, columns, list(placeholders.values()))
        values = values or [value for value in inside if value is not None]
        if not is_named and not values and is_image(row.get("image"), folder):
            raise BadInput(f'{where}: has "image" and no "images"; --columns images=image shows it to the model')
        files = [read_image(where, value, folder) for value in values]
        if files and not tokenizer.chat_template:
            said = f"--model {model_path}: has no chat template, which says where images stand in a prompt"
            raise BadInput(said)
        return row, RowImages(where, files, model_path, placeholders, has_images or bool(inside))

    return read


def without(row: dict, column: str) -> dict:
    """The row without a column, which may be inside of another one: "a.b"."""
    outer, _, inner = column.partition(".")
    if column in row or not isinstance(row.get(outer), dict):
        return {name: value for name, value in row.items() if name != column}
    return {**row, outer: without(row[outer], inner)}


def changed(row: dict, column: str, change: Callable[[Any], Any]) -> dict:
    """The row with change(value) in a column, if it has the column. It may be inside of another one: "a.b"."""
    outer, _, inner = column.partition(".")
    if column in row:
        return {**row, column: change(row[column])}
    return {**row, outer: changed(row[outer], inner, change)} if isinstance(row.get(outer), dict) else row


def as_texts(where: str, messages: Any, inside: list) -> Any:
    """Chat messages in OpenAI's form, whose contents are lists of parts, as texts with marks. Any other value stays.

    The images in the parts are added to `inside`, or None for a part without its own image. Raises BadInput.
    """

    def text(part: dict) -> str:
        kind = part["type"]
        if kind == "text":
            return str(part.get("text") or "")
        if kind not in ("image", "image_url"):
            raise BadInput(f'{where}: a part of the type "{kind}" is neither a text nor an image')
        own = next((part[name] for name in (kind, "url", "path") if part.get(name)), None)
        inside.append(own["url"] if isinstance(own, dict) and "url" in own else own)
        return MARK

    def plain(message: Any) -> Any:
        content = message.get("content") if isinstance(message, dict) else None
        is_parts = isinstance(content, list) and all(isinstance(part, dict) and "type" in part for part in content)
        return {**message, "content": "".join(map(text, content))} if is_parts and content else message

    return [plain(message) for message in messages] if isinstance(messages, list) else messages


def refuse_placeholders(where: str, row: dict, columns: dict[str, str], placeholders: list[str]) -> None:
    """Raise BadInput if a text that a policy may learn to say has a placeholder of an image: no engine samples it."""
    solution = columns.get("solution", "solution" if "solution" in row else "response")
    for column in (
        solution,
        "messages",
        "conversations",
        *(columns.get(name, name) for name in ("chosen", "rejected")),
    ):
        value = lookup(row, column)
        if isinstance(value, list):
            value = split_conversation(value, None)[1] or " ".join(text for text in value if isinstance(text, str))
        for placeholder in placeholders:
            if isinstance(value, str) and placeholder in value:
                raise BadInput(f'{where}: a response in "{column}" has {placeholder}, which stands for an image')


def is_image(value: Any, folder: Path) -> bool:
    """Whether read_image() can read the value."""
    try:
        return value is not None and bool(read_image("", value, folder))
    except BadInput:
        return False


def read_image(where: str, value: Any, folder: Path) -> bytes:
    """The file of an image that a row has as a path, a data URL, bytes, an object with bytes or path, or a PIL image.

    A path is relative to the folder of the data set, or else to the working directory. Raises BadInput.
    """
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if not isinstance(value, str | bytes | Image.Image):
        raise BadInput(f"{where}: an image must be a path, a data URL or bytes, got {type(value).__name__}")
    is_path = isinstance(value, str) and not value.startswith("data:")
    named = f"image {value.strip()[:80].partition(chr(10))[0]}" if is_path else "an image"
    if is_path and value.startswith(("http://", "https://")):
        raise BadInput(f"{where}: {named} is not downloaded; expected a path, a data URL or bytes")
    try:
        if is_path:
            value = value.removeprefix("file://")
            path = folder / value if (folder / value).is_file() else Path(value)
            value = path.read_bytes()
        elif isinstance(value, str):
            value = base64.b64decode(value.partition(",")[2], validate=True)
        elif isinstance(value, Image.Image):
            file = BytesIO()
            as_seen(value).save(file, format="PNG")
            value = file.getvalue()
        picture(value)
    except FileNotFoundError:
        raise BadInput(f"{where}: {named}: file not found") from None
    except UNREADABLE as error:
        reason = getattr(error, "strerror", None) or first_line(error)  # the system's own message repeats the name
        raise BadInput(f"{where}: {named} cannot be read: {reason}") from None
    return value
