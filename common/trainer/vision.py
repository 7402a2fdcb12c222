"""Models that see images: what their training needs beside that of a language model.

The model's own forward encodes the images of a packed row, each once, and puts the vectors in the place of their
placeholders. The part that sees is not cut into FSDP units of its own: a micro-batch without images does not use it,
and its ranks would wait for those that do.
"""

from functools import cache

import torch
from torch import nn
from transformers import AutoConfig

from common.data.images import ImageIds, tensors, together
from common.data.tokenizer import causal_class, image_tokens
from common.errors import BadInput
from common.trainer.kernels import decoder_of

# Families whose packed forward is tested against transformers. Gemma 3's image tokens see later ones, which no packed
# row has.
FAMILIES = ("llava", "idefics3", "smolvlm", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
# LLaVA takes any tower of transformers. Pixtral's images keep their sizes, and `together` could not lay them side by
# side.
LLAVA_TOWERS = ("clip_vision_model", "siglip_vision_model")


def check_family(config, refused: str) -> None:
    """Raise BadInput for a model whose images are not known to work. refused: the beginning of the message."""
    if config.model_type not in FAMILIES:
        raise BadInput(f"{refused} their images; supported are {', '.join(FAMILIES)}")
    tower = config.vision_config.model_type
    if config.model_type == "llava" and tower not in LLAVA_TOWERS:
        raise BadInput(f"{refused} their {tower}; supported are {', '.join(LLAVA_TOWERS)}")
    # The first flag ties the head in transformers, and the second in vLLM's Idefics 3 and in our updates of vLLM on a
    # CPU. Qwen's models on the Hub have the first alone, which vLLM hands on to their decoder.
    tied, decoder_tied = config.tie_word_embeddings, getattr(config.get_text_config(), "tie_word_embeddings", False)
    if not config.model_type.startswith("qwen") and tied != decoder_tied:
        raise BadInput(
            f"{refused} config.json, whose tie_word_embeddings is {tied} and in text_config {decoder_tied}: set both "
            "to what the weights are"
        )


class WithValueHead:
    """A value for each token instead of logits. transformers has no such class for models that see images."""

    @staticmethod
    def from_config(config, **settings) -> nn.Module:
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
        return with_value_head(causal_class(config).from_config(config, **settings))

    @staticmethod
    def from_pretrained(model_path: str, config, **settings) -> tuple[nn.Module, dict]:
        """The model and what is known of its loading, as with output_loading_info. The head is new."""
        model, info = causal_class(config).from_pretrained(model_path, config=config, **settings)
        return with_value_head(model), {**info, "missing_keys": {*info["missing_keys"], "score.weight"}}


def with_value_head(model: nn.Module) -> nn.Module:
    """The model with `score` in the place of `lm_head`. The bias is 0, and load() sets the weight to 0."""
    model.score = nn.Linear(model.config.get_text_config().hidden_size, 1)
    nn.init.zeros_(model.score.bias)
    del model.lm_head
    return model


def prepare(model: nn.Module, train_vision: bool) -> None:
    """Freeze the tower that encodes images, unless --train-vision. The part that connects it with the decoder is
    trained; in Qwen's models it is a part of the tower, its mergers.

    FSDP reduces the gradients of all these parameters together, so every rank must have one for each of them. A
    micro-batch may have no images, and LLaVA uses some parameters of a tower in none: they get gradients of 0.
    """
    if not train_vision:
        tower = model.get_encoder(modality="image").requires_grad_(False)
        for name, part in tower.named_children():
            part.requires_grad_("merger" in name)

    def use_all(base: nn.Module, given: tuple, output):
        beside = [child for child in base.children() if child is not decoder_of(model)]
        trained = [p for child in beside for p in child.parameters() if p.requires_grad]
        if trained and torch.is_grad_enabled():
            output.last_hidden_state = output.last_hidden_state + 0.0 * sum(p.sum() for p in trained)
        return output

    model.base_model.register_forward_hook(use_all)


def with_other_text(prompt: ImageIds, count: int) -> ImageIds:
    """A prompt with the same images, for which a prefix cache has no entry: the last `count` tokens stand at its front.

    Where fewer follow the last image, those before the first image are turned by `count`, and where there is none
    either, the prompt stays as it is. The placeholders and what a processor writes around them are not touched.
    """
    placeholder = image_tokens(AutoConfig.from_pretrained(prompt.model_path))[0]
    ids, compact = list(prompt), list(prompt.compact)

    def alike(ids: list[int], compact: list[int]) -> int:
        """Number of the first tokens that are text for the engine and for the trainer."""
        return next(i for i, (a, b) in enumerate(zip(ids, compact)) if a != b or a == placeholder)

    before, after = alike(ids, compact), alike(ids[::-1], compact[::-1])
    turn = count % before if before else 0
    at_front = lambda row: row[-count:] + row[:-count]
    around = lambda row: row[turn:before] + row[:turn] + row[before:]
    other = at_front if after >= count else around
    return ImageIds(other(ids), other(compact), prompt.text, prompt.images, prompt.model_path)


def lay_out(
    texts: list[tuple[list[int], list[list[int]]]], positions: list[int], device: torch.device
) -> tuple[list, dict[str, torch.Tensor]]:
    """Position ids, (1, L) or (4, 1, L), and the images of a packed row with these texts. positions: L of plain text.

    Qwen's models give an image's vectors places in time, height and width: rows 1 to 3. Row 0 counts tokens.
    """
    seen = [prompt for prompt, _ in texts if isinstance(prompt, ImageIds)]
    images = {name: value.to(device) for name, value in together(seen).items()}
    if rope_model(seen[0].model_path) is None:
        return [positions], images
    places: list[list[int]] = [[], [], []]
    for prompt, responses in texts:
        own = places_of(prompt) if isinstance(prompt, ImageIds) else [list(range(len(prompt)))] * 3
        first = max(map(max, own)) + 1  # place of a response's first token
        for row, values in zip(places, own):
            row += values
            for response in responses:
                row += range(first, first + len(response))
    return [[row] for row in (positions, *places)], images


def places_of(prompt: ImageIds) -> list[list[int]]:
    """(3, tokens): places of a prompt's tokens in time, height and width."""
    model, ids = rope_model(prompt.model_path), torch.tensor([list(prompt)])
    image_token = image_tokens(model.config)[0]
    grid = tensors(prompt)["image_grid_thw"]
    found, _ = model.base_model.get_rope_index(ids, (ids == image_token).int(), image_grid_thw=grid)  # (3, 1, tokens)
    return found[:, 0].tolist()


@cache
def rope_model(model_path: str) -> nn.Module | None:
    """The model without weights, if it gives images places in two dimensions, otherwise None."""
    config = AutoConfig.from_pretrained(model_path)
    if not config.model_type.startswith("qwen"):
        return None
    with torch.device("meta"):
        return causal_class(config).from_config(config)
