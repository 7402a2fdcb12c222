"""The parts of a model that the trainer works on: its body, its decoder, decoder layers and attention modules.

Families name them differently (`layers` or `h`, `self_attn` or `attention`), so they are found by what they are.
"""

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer


def body_of(model: nn.Module) -> nn.Module:
    """All but the head. Its output has the last hidden states."""
    if model.base_model is model:  # Llama 4, whose base_model_prefix names nothing, alone or in its model for images
        return getattr(model, "language_model", model).model
    return getattr(model.base_model, "decoder", model.base_model)  # OPT's body has a decoder, which its forward calls


def decoder_of(model: nn.Module) -> nn.Module:
    """The part that has the decoder layers: without the head and, if the model sees images, without the tower."""
    if hasattr(model.config, "vision_config") and model.base_model is not model:
        return model.base_model.get_decoder()
    return body_of(model)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The decoder layers, in order."""
    return [module for module in decoder_of(model).modules() if isinstance(module, GradientCheckpointingLayer)]


def reset_iter_state(model: nn.Module) -> None:
    """Make FSDP forget the forwards that no backward has followed. torch 2.11 can't."""
    getattr(model, "reset_iter_state", lambda: None)()


def all_attentions(model: nn.Module) -> list[nn.Module]:
    """The attention modules of all decoder layers."""
    return [attention for layer in layers_of(model) for attention in attentions_of(layer)]


def attentions_of(layer: nn.Module) -> list[nn.Module]:
    """The modules of a decoder layer that call the attention function: one, or none in a layer of another kind."""
    return [module for module in layer.modules() if hasattr(module, "is_causal")]
