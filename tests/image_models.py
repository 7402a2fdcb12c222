"""Tiny random models of the families that see images, each with a tokenizer of one token a character."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

CHARACTERS = [chr(code) for code in range(32, 127)]
TEXT = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
QWEN = {"image_token_id": 4, "video_token_id": 5, "vision_start_token_id": 6, "vision_end_token_id": 7}
QWEN_SPECIAL = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
IDEFICS_SPECIAL = ["<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"]


class Family(NamedTuple):
    make: Callable[[Path], None]
    tower: str  # the beginning of the names of what is frozen without --train-vision
    connector: tuple[str, ...]  # and of what is trained in it or beside it
    served: bool = False  # vLLM runs it on a CPU


def tokenizer(special: list[str], image: str) -> PreTrainedTokenizerFast:
    """special: tokens 4 and on. image: what a chat template writes for an image."""
    vocabulary = ["<pad>", "<bos>", "<eos>", "<unk>", *special, *CHARACTERS]
    words = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token="<unk>"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=special,
    )
    part = "{{ '" + image + "' if part['type'] == 'image' else part['text'] }}"
    made.chat_template = (
        "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        "{% for part in message['content'] %}" + part + "{% endfor %}{% endif %}{% endfor %}"
    )
    return made


def save(model: torch.nn.Module, processor, folder: Path) -> None:
    """Random weights large enough for images to matter. The names are those of models on the Hub."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    model._weight_conversions = get_model_conversion_mapping(model, add_legacy=False)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def llava(folder: Path, tower: str = "Siglip") -> None:
    made = tokenizer(["<image>"], "<image>")
    # As in LLaVA 1.5: the last layer but one of CLIP, without its vector of the whole image.
    clip = tower == "CLIP"
    which = {"vision_feature_select_strategy": "default" if clip else "full"}
    size = {"height": 32, "width": 32}
    pixels = CLIPImageProcessorPil(size=size, crop_size=size) if clip else SiglipImageProcessorPil(size=size)
    processor = transformers.LlavaProcessor(
        pixels, made, patch_size=8, num_additional_image_tokens=int(clip), chat_template=made.chat_template, **which
    )
    config = transformers.LlavaConfig(
        vision_config=getattr(transformers, f"{tower}VisionConfig")(**VISION, image_size=32, patch_size=8),
        text_config=transformers.Qwen2Config(**TEXT),
        image_token_index=4,
        image_token_id=4,
        image_seq_length=16,
        vision_feature_layer=-2 if clip else -1,
        **which,
    )
    save(transformers.LlavaForConditionalGeneration(config), processor, folder)


def idefics(name: str) -> Callable[[Path], None]:
    """Images of other shapes are padded, and cut into tiles of 32 x 32 pixels. SmolVLM has Idefics 3's processor here:
    its own needs torchvision and num2words, for videos.
    """

    def make(folder: Path) -> None:
        tiles = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
        made = tokenizer(IDEFICS_SPECIAL + tiles, "<image>")
        pixels = Idefics3ImageProcessorPil(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
        processor = transformers.Idefics3Processor(pixels, made, image_seq_len=4, chat_template=made.chat_template)
        config, model = (getattr(transformers, name + end) for end in ("Config", "ForConditionalGeneration"))
        settings = {"text_config": transformers.LlamaConfig(**TEXT), "image_token_id": 4, "pad_token_id": 0}
        vision = {**VISION, "image_size": 32, "patch_size": 8}
        made = config(vision_config=vision, scale_factor=2, tie_word_embeddings=False, **settings)
        save(model(made), processor, folder)

    return make


def qwen(name: str, vision: dict) -> Callable[[Path], None]:
    """transformers loads a processor of Qwen's only beside torchvision; QwenProcessor stands in for it."""

    def make(folder: Path) -> None:
        config, model = (getattr(transformers, name + end) for end in ("Config", "ForConditionalGeneration"))
        text = {**TEXT, "rope_parameters": ROPE, **({"head_dim": 32} if name == "Qwen3VL" else {})}
        settings = {"vision_config": {"depth": 2, "num_heads": 2, "patch_size": 14, **vision}, "text_config": text}
        made = tokenizer(QWEN_SPECIAL, "<|vision_start|><|image_pad|><|vision_end|>")
        save(model(config(**settings, **QWEN, tie_word_embeddings=False)), made, folder)

    return make


class QwenProcessor:
    """Qwen's processor for images: each placeholder is repeated for four patches of 14 x 14 pixels."""

    def __init__(self, folder: str):
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.chat_template = self.tokenizer.chat_template
        size = {"shortest_edge": 28 * 28, "longest_edge": 16 * 28 * 28}
        self.pixels = Qwen2VLImageProcessorPil(size=size, patch_size=14, merge_size=2)

    def __call__(self, text: list[str], images: list, **settings) -> dict[str, torch.Tensor]:
        made, pieces = self.pixels(images=images, return_tensors="pt"), text[0].split("<|image_pad|>")
        expanded = pieces[0]
        for grid, piece in zip(made["image_grid_thw"], pieces[1:], strict=True):
            expanded += "<|image_pad|>" * (int(grid.prod()) // 4) + piece
        ids = self.tokenizer(expanded, add_special_tokens=False, return_tensors="pt")["input_ids"]
        return {**made, "input_ids": ids, "mm_token_type_ids": (ids == 4).int()}


WIDE = {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64}
LLAVA = ("model.vision_tower.", ("model.multi_modal_projector.",))
IDEFICS = ("model.vision_model.", ("model.connector.",))
QWEN_PARTS = ("model.visual.", ("model.visual.merger.",))
DEEPSTACK = ("model.visual.", ("model.visual.merger.", "model.visual.deepstack_merger_list."))
FAMILIES = {
    "llava": Family(llava, *LLAVA, True),
    "llava-clip": Family(partial(llava, tower="CLIP"), *LLAVA),
    "idefics3": Family(idefics("Idefics3"), *IDEFICS, True),
    "smolvlm": Family(idefics("SmolVLM"), *IDEFICS),
    "qwen2_vl": Family(qwen("Qwen2VL", {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}), *QWEN_PARTS),
    "qwen2_5_vl": Family(qwen("Qwen2_5_VL", {**WIDE, "fullatt_block_indexes": [1], "window_size": 56}), *QWEN_PARTS),
    "qwen3_vl": Family(
        qwen("Qwen3VL", {**WIDE, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16}), *DEEPSTACK
    ),
}
