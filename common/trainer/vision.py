"""Models that see images: what their training needs in addition to that of a language model.

The model's own forward encodes the images of a packed row, each once, and puts the vectors in the place of their
placeholders. The vision tower is not cut into FSDP units of its own: a rank whose micro-batch has no images would not
join the collective that the others wait in.
"""

from functools import cache

import torch
from torch import nn
from transformers import AutoConfig

from common.data.families import without_weights
from common.data.images import ImageIds, tensors, together
from common.data.tokenizer import image_tokens
from common.errors import BadInput
from common.trainer.parts import decoder_of

# Families whose packed forward is tested against transformers. Gemma 3 is not among them: its image tokens see later
# ones, which no packed row allows.
FAMILIES = ("llava", "idefics3", "smolvlm", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
# LLaVA takes any tower of transformers. Pixtral's images keep their sizes, so `together` could not concatenate them.
LLAVA_TOWERS = ("clip_vision_model", "siglip_vision_model")


def check_family(config, refused: str, with_images: bool) -> None:
    """Raise BadInput for a model whose images are not known to work. refused: the beginning of the message.

    with_images: prompts have images. Without, any family will do whose decoder can be trained alone.
    """
    if config.model_type not in FAMILIES:
        if with_images:
            raise BadInput(f"{refused} their images; supported are {', '.join(FAMILIES)}, and prompts without images")
        return
    tower = config.vision_config.model_type
    if config.model_type == "llava" and tower not in LLAVA_TOWERS:
        raise BadInput(f"{refused} their {tower}; supported are {', '.join(LLAVA_TOWERS)}")
    # The first flag ties the head in transformers, the second one in vLLM's Idefics 3 and in our updates of vLLM on a
    # CPU. Qwen's models on the Hub have the first alone, and vLLM hands it on to their decoder.
    tied = config.tie_word_embeddings
    decoder_tied = getattr(config.get_text_config(), "tie_word_embeddings", False)
    if not config.model_type.startswith("qwen") and tied != decoder_tied:
        raise BadInput(
            f"{refused} config.json, whose tie_word_embeddings is {tied} and in text_config {decoder_tied}: set both "
            "to what the weights are"
        )


def prepare(model: nn.Module, train_vision: bool) -> None:
    """Freeze the vision tower, unless --train-vision.

    The part that connects it with the decoder is trained. In Qwen's models it is a part of the tower, its mergers. In
    other families than FAMILIES, which see text alone here, only decoder and head are trained.
    """
    if model.config.model_type not in FAMILIES:
        model.requires_grad_(False)
        for part in (decoder_of(model), model.get_output_embeddings(), getattr(model, "score", None)):
            if part is not None:
                part.requires_grad_(True)
        return
    if not train_vision:
        tower = model.get_encoder(modality="image").requires_grad_(False)
        for name, part in tower.named_children():
            part.requires_grad_("merger" in name)


def lay_out(
    texts: list[tuple[list[int], list[list[int]]]], positions: list[int]
) -> tuple[list, dict[str, torch.Tensor]]:
    """Position ids, (1, L) or (4, 1, L), and the images of a packed row with these texts. positions: L of plain text.

    The images stay in host memory until their forward, because a step packs all of its micro-batches first.

    Qwen's models give an image's vectors places in time, height and width: rows 1 to 3. Row 0 counts tokens.
    """
    prompts = [prompt for prompt, _ in texts if isinstance(prompt, ImageIds)]
    images = together(prompts)
    if rope_model(prompts[0].model_path) is None:
        return [positions], images
    rows: list[list[int]] = [[], [], []]
    for prompt, responses in texts:
        prompt_places = places_of(prompt)
        first = 1 + max(map(max, prompt_places))  # a response goes on after the prompt's largest place
        for row, places in zip(rows, prompt_places):
            row += places
            for response in responses:
                row += range(first, first + len(response))
    return [[positions], *([row] for row in rows)], images


def places_of(prompt: list[int]) -> list[list[int]]:
    """(3, tokens): places of a prompt's tokens in time, height and width. In plain text these are equal."""
    if not isinstance(prompt, ImageIds):
        return [list(range(len(prompt)))] * 3
    model = rope_model(prompt.model_path)
    ids = torch.tensor([list(prompt)])
    is_image = (ids == image_tokens(model.config)[0]).int()
    grid = tensors(prompt)["image_grid_thw"]
    places, _ = model.base_model.get_rope_index(ids, is_image, image_grid_thw=grid)  # (3, 1, tokens)
    return places[:, 0].tolist()


@cache
def rope_model(model_path: str) -> nn.Module | None:
    """The model without weights, if it gives images places in two dimensions, otherwise None."""
    is_qwen = AutoConfig.from_pretrained(model_path).model_type.startswith("qwen")
    return without_weights(model_path) if is_qwen else None
