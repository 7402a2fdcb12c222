"""Properties of model families that trainer and engines both depend on."""

from functools import lru_cache

import torch
from torch import nn
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from common.data.tokenizer import causal_class

# Their rotary layers choose longrope's frequencies in a way of their own, which fix_longrope() can't settle.
OWN_LONGROPE = ("phimoe",)
WITHOUT_KEYS = {"linear_attention", "conv", "mamba", "moe", "mlp"}  # kinds of layers without keys and values
# They attend to nothing, and their recurrence ignores a mask.
IGNORE_MASKS = ("rwkv", "xlstm")
PLAIN_ATTENTION = {"full_attention", "sliding_attention"}  # kinds of layers that packing and padding leave right


def layer_kinds(config) -> list[str]:
    """What config.json calls each of its layers; empty if it does not say. config: the decoder's."""
    return getattr(config, "layer_types", None) or []


def layer_configs(config) -> list:
    """The configuration of each decoder layer. They differ in few families (Gemma 4). config: the decoder's."""
    return list(getattr(config, "per_layer_config", None) or [config] * config.num_hidden_layers)


def heads_of(layer) -> tuple[int, int]:
    """Numbers of query heads, and of key and value heads, in a layer of attention: 0 if the family has none.

    layer: its configuration.
    """
    queries = getattr(layer, "num_attention_heads", 0)
    return queries, getattr(layer, "num_key_value_heads", None) or queries


def carries_state(model: nn.Module) -> bool:
    """Whether layers hand on something from token to token besides keys and values: convolutions, recurrent states.

    They are known by their short convolutions. xLSTM, RWKV and MiniMax have none, and no attention function in some
    layers, which why_not_packed() sees as well.
    """
    return any(isinstance(module, nn.Conv1d) for module in model.modules())


def without_weights(model_path: str) -> nn.Module:
    """The model on the meta device. Reads the config, not the weights."""
    config = AutoConfig.from_pretrained(model_path)
    with torch.device("meta"):
        return causal_class(config).from_config(config)


@lru_cache
def family_carries_state(model_path: str) -> bool:
    """carries_state() of the decoder of a folder or Hub name, whose weights are not read."""
    return carries_state(without_weights(model_path).get_decoder())  # a tower's convolutions are none


def layers_without_own_keys(config) -> int:
    """How many of the last layers read the keys and values of earlier ones (Gemma 3n and 4). config: the decoder's."""
    return getattr(config, "num_kv_shared_layers", None) or 0


def may_be_padded(model: nn.Module) -> bool:
    """Whether prompts can be padded on the left, under a mask, without changing what follows them."""
    config = model.config.get_text_config()
    decoder = model.get_decoder()  # convolutions of a tower do not matter
    plain = PLAIN_ATTENTION.issuperset(layer_kinds(config)) and config.model_type not in IGNORE_MASKS
    return plain and not carries_state(decoder)


def longrope_limit(config) -> int | None:
    """Tokens up to which a longrope model takes its short frequencies; None for other models. config: the decoder's."""
    rope = getattr(config, "rope_parameters", None) or {}
    return rope["original_max_position_embeddings"] if rope.get("rope_type") == "longrope" else None


def fix_longrope(model: nn.Module, longest: int) -> None:
    """Give a longrope model one set of frequencies for a whole run: the long ones if its longest row needs them.

    longest: tokens of the longest prompt and response. vLLM decides by the same number. transformers decides anew in
    each forward: a response that grows past the limit changes the log-probs of its own first tokens, and a packed row
    those of its other sequences.
    """
    for module in model.modules():
        if getattr(module, "rope_type", None) != "longrope" or module.config.model_type in OWN_LONGROPE:
            continue
        frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](module.config, module.inv_freq.device, seq_len=longest)
        module.inv_freq = frequencies
        module.rope_type = "default"  # transformers would choose again
