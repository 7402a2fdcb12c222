"""Data with images: its forms, the marks and placeholders in its texts, and files that are refused in one line."""

import base64
import json
import re
import shutil
import subprocess
import sys
from io import BytesIO
from pathlib import Path

import datasets
import image_models
import numpy as np
import pytest
from conftest import ROOT
from image_models import FAMILIES
from PIL import Image
from transformers import AutoTokenizer
from transformers.image_utils import load_image

from common.data import images, sources
from common.data.pairs import load_pairs
from common.data.prompts import TrainSource, load
from common.data.suffix import Suffix
from common.data.templates import render
from common.data.tokenizer import load_tokenizer
from common.errors import BadInput
from common.preflight import checks

# Templates as SmolVLM and LLaVA 1.5 have them: they loop over the parts of a content, and walk a text by characters.
PART = "{% if part['type'] == 'text' %}{{ part['text'] }}{% elif part['type'] == 'image' %}{{ '<image>' }}{% endif %}"
SMOLVLM = (
    "{% for message in messages %}{{ message['role'] }}: {% for part in message['content'] %}" + PART + "{% endfor %};"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
TEXTS = "{{ content['text'] }}{% endfor %};"
LLAVA = (
    "{% for message in messages %}{{ message['role'] }}: "
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}<image>{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}" + TEXTS + "{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def llava(tmp_path_factory) -> str:
    """Folder of a model whose placeholder is <image>."""
    folder = tmp_path_factory.mktemp("models") / "llava"
    FAMILIES["llava"].make(folder)
    return str(folder)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> str:
    """Folder of a model whose placeholder is <|image_pad|>, so that <image> is a text like any other."""
    folder = tmp_path_factory.mktemp("models") / "qwen2_vl"
    FAMILIES["qwen2_vl"].make(folder)
    return str(folder)


def file_of(image: Image.Image, form: str = "PNG", **settings) -> bytes:
    file = BytesIO()
    image.save(file, format=form, **settings)
    return file.getvalue()


PNG = file_of(Image.new("RGB", (32, 32), "red"))


def write(folder, *rows: dict) -> str:
    (folder / "0.png").write_bytes(PNG)
    (folder / "1.png").write_bytes(file_of(Image.new("RGB", (32, 32), "blue")))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "rows.jsonl")


def read(folder, model_path: str, *rows: dict, columns: tuple[str, ...] = ()) -> list:
    return load((write(folder, *rows),), TrainSource(columns), "train", load_tokenizer(model_path)[0], 400)


def refusal(folder, model_path: str, *rows: dict) -> str:
    """The one line that refuses these rows."""
    with pytest.raises(BadInput) as error:
        read(folder, model_path, *rows)
    assert "\n" not in str(error.value) and len(str(error.value)) < 300
    return str(error.value)


user = lambda content: {"role": "user", "content": content}
ROW = {"prompt": "<image>?", "images": ["0.png"]}


def test_control_tokens_that_a_text_spells_are_text_for_a_model_that_sees(llava, tmp_path):
    tokenizer = load_tokenizer(llava)[0]
    end, said = tokenizer.eos_token, {"prompt": f"say {tokenizer.eos_token}"}
    counts = []
    for control_tokens in ("keep", "text"):
        source = TrainSource(control_tokens=control_tokens)
        (prompt,) = load((write(tmp_path, said),), source, "train", tokenizer, 400)
        counts.append(prompt.ids.count(tokenizer.convert_tokens_to_ids(end)))
    assert counts[0] == counts[1] + 1
    other = tokenizer.pad_token  # the first row spells this one, and has no image
    rows = {"prompt": f"say {other}"}, ROW | {"prompt": f"<image> say {end}"}
    assert other not in (None, end)
    with pytest.raises(BadInput, match=f"rows.jsonl:2: --control-tokens text: it spells {re.escape(end)}, and has im"):
        load((write(tmp_path, *rows),), source, "train", tokenizer, 400)


@pytest.mark.parametrize("control_tokens", ["keep", "text"])
@pytest.mark.parametrize("family", ["llava", "smolvlm"])
def test_the_mark_of_an_image_is_no_control_token_that_a_text_spells(family, control_tokens, llava, tmp_path, capsys):
    """Both tokenizers have a control token <image>."""
    tokenizer = load_tokenizer(llava if family == "llava" else str(ROOT / "baselines/images-start"))[0]
    assert "<image>" in tokenizer.get_added_vocab()
    # Without the mark, the two halves of the second text would be a control token.
    split = f"{tokenizer.eos_token[:2]}<image>{tokenizer.eos_token[2:]}?"
    rows = ROW, ROW | {"prompt": split}
    prompts = load((write(tmp_path, *rows),), TrainSource(control_tokens=control_tokens), "train", tokenizer, 400)
    assert [len(prompt.ids.images) for prompt in prompts] == [1, 1]
    assert "control-tokens" not in capsys.readouterr().err


@pytest.mark.parametrize("template", [SMOLVLM, LLAVA])
def test_a_template_that_loops_over_parts_shows_texts(template, llava):
    tokenizer = AutoTokenizer.from_pretrained(llava)
    tokenizer.chat_template = template
    written = lambda content: render("here", content, tokenizer)
    assert written("user") == "user: user;assistant:"  # a word that the template writes anyway
    assert written([{"role": "system", "content": "Add."}, user("1+1?")]) == "system: Add.;user: 1+1?;assistant:"
    turns = [user("1+1?"), {"role": "assistant", "content": "2"}, user("2+2?")]
    assert written(turns) == "user: 1+1?;assistant: 2;user: 2+2?;assistant:"
    assert tokenizer.decode(Suffix(tokenizer, [2], "user").ids(["up"])) == ";user: up;assistant:"


def test_a_template_that_leaves_a_message_out_is_refused(llava):
    tokenizer = AutoTokenizer.from_pretrained(llava)
    tokenizer.chat_template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    assert render("here", "1+1?", tokenizer) == "1+1?"
    with pytest.raises(BadInput, match='here: .*"system"'):
        render("here", [{"role": "system", "content": "Add."}, user("1+1?")], tokenizer)
    tokenizer.chat_template = "{{ 'hello' }}"
    with pytest.raises(BadInput, match='"user"'):
        render("here", "1+1?", tokenizer)


def test_a_template_may_rewrite_what_is_said(llava):
    """Some remove /think from a text, many remove blanks, and most the thinking of earlier turns."""
    tokenizer = AutoTokenizer.from_pretrained(llava)
    said = "(m.content if loop.last else m.content.split('</think>')[-1]) | replace('/think', '') | trim"
    tokenizer.chat_template = "{% for m in messages %}{{ " + said + " }};{% endfor %}"
    turns = [user(" 1+1? /think"), {"role": "assistant", "content": "<think>so</think>2"}, user("?")]
    assert render("here", turns, tokenizer) == "1+1?;2;?;"


@pytest.mark.parametrize(
    "rows, said",
    [
        ([ROW, ROW | {"images": []}], "rows.jsonl:2: 1 times <image> in the text, and 0 images"),
        ([{"prompt": "<image>?"}], "rows.jsonl:1: the text has <image>, and the row has no image"),
        (
            [{"prompt": "?", "solution": "an <image>"}],
            'rows.jsonl:1: a response in "solution" has <image>, which stands',
        ),
        ([{"prompt": "?", "solution": ["look", "<image>", "7"]}], 'a response in "solution" has <image>'),
        ([ROW | {"response": "<image>"}], 'rows.jsonl:1: a response in "response" has <image>'),
        (
            [{"conversations": [{"from": "human", "value": "?"}, {"from": "chatgpt", "value": "<image>"}]}],
            'a response in "conversations" has <image>',
        ),
        (
            [{"messages": [user("?"), {"role": "assistant", "content": "<image>"}]}],
            'a response in "messages" has <image>',
        ),
        ([ROW | {"chosen": "7", "rejected": "<image>"}], 'rows.jsonl:1: a response in "rejected" has <image>'),
        (
            [ROW | {"chosen": [user("<image>?"), {"role": "assistant", "content": "<image>"}]}],
            'response in "chosen" has',
        ),
    ],
)
def test_placeholders_without_images_are_refused(rows, said, llava, tmp_path):
    assert said in refusal(tmp_path, llava, *rows)


def test_a_placeholder_is_what_the_model_says_it_is(qwen, models, monkeypatch, tmp_path):
    monkeypatch.setattr(images, "processor", image_models.QwenProcessor)
    assert read(tmp_path, qwen, {"prompt": "the <image> tag"})[0].text == "the <image> tag"
    assert "has <|image_pad|>, and the row has no image" in refusal(tmp_path, qwen, {"prompt": "<|image_pad|>?"})
    assert "has <|video_pad|>, and the row has no image" in refusal(tmp_path, qwen, {"prompt": "<|video_pad|>?"})
    assert "1 times <image> in the text, and 0 images" in refusal(tmp_path, qwen, ROW, {"prompt": "<image>?"})
    rows = [{"prompt": "a <image>", "solution": "<|image_pad|>"}]
    assert read(tmp_path, models["tied"], *rows)[0].solution == "<|image_pad|>", "a model of texts has no placeholders"


def test_a_model_of_texts_may_have_the_word_in_its_vocabulary(models, tmp_path):
    tokenizer = load_tokenizer(models["tied"])[0]
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|image_pad|>"]})
    (prompt,) = load((write(tmp_path, {"prompt": "<|image_pad|>"}),), TrainSource(), "train", tokenizer, 400)
    assert prompt.ids[-1] == len(tokenizer) - 1 and prompt.meta == {"prompt": "<|image_pad|>"}


def test_columns_beside_the_messages_stay_as_they_are(llava, tmp_path):
    beside = {
        "extra": {"tests": [{"type": "stdin", "text": "1"}], "content": [{"type": "text", "text": "1"}]},
    }
    parts = [{"type": "image"}, {"type": "text", "text": "?"}]
    (prompt,) = read(tmp_path, llava, {"messages": [user(parts)], "images": ["0.png"]} | beside)
    assert prompt.meta == {"messages": [user("<image>?")], "prompt": [user("<image>?")]} | beside


def test_pairs_have_messages_of_parts(llava, tmp_path):
    both = [user([{"type": "image"}, {"type": "text", "text": "?"}])]
    said = lambda text: {"role": "assistant", "content": [{"type": "text", "text": text}]}
    path = write(tmp_path, {"chosen": [*both, said("7")], "rejected": [*both, said("8")], "images": ["0.png"]})
    prompts, pairs = load_pairs((path,), TrainSource(), load_tokenizer(llava)[0], 400, 10)
    assert prompts[0].ids.images == [PNG] and len({tuple(ids) for ids in pairs[prompts[0].key]}) == 2


def test_messages_bring_their_images_and_texts_alone_need_none(llava, tmp_path):
    url = "data:image/png;base64," + base64.b64encode(PNG).decode()
    forms = [{"type": "image_url", "image_url": {"url": url}}, {"type": "image_url", "image_url": url}]
    forms += [{"type": "image", "image": "file://" + str(tmp_path / "0.png")}, {"type": "image", "url": "0.png"}]
    rows = [{"prompt": [user([{"type": "text", "text": "a"}, form, {"type": "text", "text": "b"}])]} for form in forms]
    texts = {"prompt": [user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])]}
    *seen, plain = read(tmp_path, llava, *rows, texts)
    assert all(prompt.text == "a<image>b" and prompt.ids.images == [PNG] for prompt in seen)
    assert plain.text == "ab" and type(plain.ids) is list
    (last,) = read(tmp_path, llava, rows[0] | {"images": ["1.png"]})
    assert last.ids.images == [(tmp_path / "1.png").read_bytes()], "the column of images goes before"


@pytest.mark.parametrize(
    "part, said",
    [
        (
            {"type": "video", "video": "a.mp4"},
            'rows.jsonl:1: a part of the type "video" is neither a text nor an image',
        ),
        ({"type": "image"}, "rows.jsonl:1: 1 times <image> in the text, and 0 images"),
        (
            {"type": "image_url", "image_url": {"url": "https://a.b/c.png"}},
            "rows.jsonl:1: image https://a.b/c.png cannot be read: it is not downloaded",
        ),
    ],
)
def test_parts_that_cannot_be_shown_are_refused(part, said, llava, tmp_path):
    assert said in refusal(tmp_path, llava, {"prompt": [user([{"type": "text", "text": "?"}, part])]})


class Picky:
    """A processor that refuses what it gets, as Idefics 3's does if there are fewer placeholders than images."""

    def __init__(self, error: Exception, template: str = ""):
        self.error, self.chat_template = error, template

    def __call__(self, **given):
        raise self.error


@pytest.mark.parametrize("error", [ValueError("too\nsmall"), TypeError("too\nsmall"), IndexError("too\nsmall")])
def test_a_row_that_the_processor_refuses_is_named(error, llava, monkeypatch, tmp_path):
    images.expanded.cache_clear()  # the real processor has not refused these images
    monkeypatch.setattr(images, "processor", lambda path: Picky(error))
    said = refusal(tmp_path, llava, {"prompt": "?"}, ROW)
    assert said.endswith("rows.jsonl:2: refused by the processor of images: too")
    template = "{% for m in messages %}{% for part in m.content %}{{ part['text'] }}{% endfor %}{% endfor %}"
    monkeypatch.setattr(images, "processor", lambda path: Picky(error, template))
    assert "rows.jsonl:1: the chat template writes 0 placeholders for 1 images" in refusal(tmp_path, llava, ROW)
    monkeypatch.setattr(images, "processor", lambda path: Picky(error, "{{ messages[0].content + '?' }}"))
    assert "rows.jsonl:1: refused by the chat template: can only concatenate list" in refusal(tmp_path, llava, ROW)


@pytest.mark.parametrize("mode", ["CMYK", "YCbCr", "LAB", "F", "I;16", "1", "P", "RGBA"])
def test_images_of_any_mode_are_read(mode, tmp_path):
    file = images.read_image("here", file_of(Image.new(mode, (8, 8)), "TIFF"), tmp_path)
    assert images.picture(file).mode == "RGB" and images.picture(file).size == (8, 8)


def test_files_that_pil_cannot_read_are_refused_in_one_line(llava, tmp_path):
    end = PNG.index(b"IEND") - 4
    broken = PNG[:end] + b"\0\0\0\2iCCPab0000" + PNG[end:]  # a chunk of colours in an unknown compression
    with pytest.raises(SyntaxError):
        Image.open(BytesIO(broken)).load()
    (tmp_path / "broken.png").write_bytes(broken)
    assert "image broken.png cannot be read: Unknown compression method" in refusal(
        tmp_path, llava, ROW | {"images": ["broken.png"]}
    )
    said = refusal(tmp_path, llava, ROW | {"images": ["iVBORw0KGgo" * 200]})  # base64 without its prefix
    assert said.endswith("/rows.jsonl:1: image " + ("iVBORw0KGgo" * 8)[:80] + " cannot be read: File name too long")


def test_an_image_is_upright_and_its_ground_is_white():
    pixels = np.random.RandomState(0).randint(0, 255, (20, 32, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held upright
    file = file_of(Image.fromarray(pixels), exif=exif)
    assert images.picture(file).size == (20, 32)
    assert (np.asarray(images.picture(file)) == np.asarray(load_image(Image.open(BytesIO(file))))).all()
    drawing = np.zeros((8, 8, 4), dtype=np.uint8)
    drawing[3, :, 3] = 255  # a black line on nothing
    for image in (Image.fromarray(drawing), Image.fromarray(drawing[:, :, 2:], mode="LA")):
        seen = np.asarray(images.picture(file_of(image)))
        assert (seen[3] == 0).all() and (np.delete(seen, 3, axis=0) == 255).all()


def test_images_of_the_hub_stay_files(llava, monkeypatch):
    """Also those inside of lists and objects. Decoded, a JPEG would come back as a PNG of other bytes."""
    jpeg = file_of(Image.fromarray(np.random.RandomState(0).randint(0, 255, (32, 32, 3), dtype=np.uint8)), "JPEG")
    file = {"bytes": jpeg, "path": None}
    features = {
        "prompt": datasets.Value("string"),
        "images": datasets.List(datasets.Image()),
        "one": datasets.Image(),
        "nested": {"more": [{"image": datasets.Image()}]},
    }
    row = {"prompt": "<image>?", "images": [file], "one": file, "nested": {"more": [{"image": file}]}}
    table = datasets.Dataset.from_list([row], features=datasets.Features(features))
    monkeypatch.setattr(datasets, "load_dataset", lambda *where, split: table)
    assert sources.read("someone/images", "train") == [("someone/images/train:row 1", row)]
    for column in ("images", "one"):
        (prompt,) = load(
            ("someone/images",), TrainSource((f"images={column}",)), "train", load_tokenizer(llava)[0], 400
        )
        assert prompt.ids.images == [jpeg] and column not in prompt.meta


def test_named_columns_of_images_leave_the_row(llava, tmp_path):
    row = {"prompt": "<image>?", "extra": {"pictures": {"all": ["0.png"], "source": "web"}, "x": 1}}
    (prompt,) = read(tmp_path, llava, row, columns=("images=extra.pictures.all",))
    assert prompt.ids.images == [PNG]
    assert prompt.meta == {"prompt": "<image>?", "extra": {"pictures": {"source": "web"}, "x": 1}}
    (prompt,) = read(tmp_path, llava, {"prompt": "<image>?", "a.b": "0.png"}, columns=("images=a.b",))
    assert prompt.ids.images == [PNG] and prompt.meta == {"prompt": "<image>?"}
    with pytest.raises(BadInput, match='rows.jsonl:1: .*"picture"'):
        read(tmp_path, llava, ROW, columns=("images=picture",))


def test_ids_are_other_for_other_images_and_do_not_lose_them():
    ids, same, other = (images.ImageIds([4, 5], [4, 5], "", [image], "") for image in (b"a", b"a", b"b"))
    equal = [(one == two, one != two) for one, two in [(ids, same), (ids, other), (ids, [4, 5]), ([4, 5], ids)]]
    assert equal == [(True, False), (False, True), (True, False), (True, False)]
    assert ids[0] == 4 and list(ids) == [4, 5] and [3, *ids] == [3, 4, 5]
    for lose in (lambda: ids.__add__([6]), lambda: ids[:1], lambda: ids * 2, lambda: ids.__iadd__([6])):
        with pytest.raises(TypeError, match="would lose them"):
            lose()
    tokens = [1]
    tokens += ids  # a packed row takes the tokens of many prompts
    assert tokens == [1, 4, 5] and type(tokens) is list


def test_a_column_of_another_name_is_not_overlooked(llava, tmp_path):
    assert 'rows.jsonl:1: has "image" and no "images"; --columns images=image' in refusal(
        tmp_path, llava, {"prompt": "how many?", "image": "0.png"}
    )
    parts = {"prompt": [user([{"type": "image", "image": "0.png"}, {"type": "text", "text": "?"}])], "image": "1.png"}
    (shown,) = read(tmp_path, llava, parts)
    assert shown.ids.images == [PNG]


def test_a_teacher_must_make_the_same_of_images(llava, tmp_path):
    """It gets the tokens and the pixels that the policy's processor has made."""
    prompts, other = read(tmp_path, llava, ROW), shutil.copytree(llava, tmp_path / "other")
    images.check_same(str(other), prompts[0].ids)
    for file in other.glob("*processor_config.json"):
        file.write_text(re.sub(r'"image_mean": \[[^\]]*\]', '"image_mean": [0.9, 0.1, 0.5]', file.read_text()))
    changed = str(other.rename(tmp_path / "changed"))
    with pytest.raises(BadInput, match="--teacher .*changed"):
        checks.check_companion("--teacher", changed, load_tokenizer(llava)[0], prompts, 4)


def test_all_data_sets_of_a_mixture_have_the_processors_template(llava, tmp_path):
    """Also those that are read before the first image."""
    tokenizer = load_tokenizer(llava)[0]
    tokenizer.chat_template = "{{ 'another' }}{{ messages[0].content }}"
    first, second = tmp_path / "texts", tmp_path / "images"
    first.mkdir(), second.mkdir()
    specs = (write(first, {"prompt": "?"}), write(second, ROW, {"prompt": "?"}))
    texts = [prompt.text for prompt in load(specs, TrainSource(), "train", tokenizer, 400)]
    assert texts == ["?", "<image>?", "?"]


def test_texts_need_no_processor(qwen, monkeypatch, tmp_path):
    def broken(path: str):
        raise BadInput("no processor")

    monkeypatch.setattr(images, "processor", broken)
    assert read(tmp_path, qwen, {"prompt": "?"})[0].text == "?"
    assert refusal(tmp_path, qwen, ROW) == "no processor"


def test_code_for_images_is_loaded_only_for_data_with_images(models, qwen, tmp_path):
    """In a fresh process. A tokenizer of Qwen's has placeholders, also where its model sees none."""
    tokenizer = load_tokenizer(models["tied"])[0]
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|image_pad|>"]})
    tokenizer.save_pretrained(tmp_path / "model")
    shutil.copy(Path(models["tied"]) / "config.json", tmp_path / "model")
    check = (
        "import sys, algos.grpo\n"
        "from common.data.prompts import TrainSource, load\n"
        "from common.data.tokenizer import load_tokenizer\n"
        "for model in sys.argv[2:]:\n"
        "    load((sys.argv[1],), TrainSource(), 'train', load_tokenizer(model)[0], 400)\n"
        "    print(*[name for name in sys.modules if name.startswith('common.') and name[-6:] in ('images', 'vision')])"
    )
    command = [sys.executable, "-c", check, write(tmp_path, {"prompt": "1+1?"}), tmp_path / "model", qwen]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert loaded == "\ncommon.data.images\n", "texts of a model that sees must have no placeholders"
