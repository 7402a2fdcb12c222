"""Write a hybrid with random weights, for the task `hybrid`: python baselines/hybrid_model.py FOLDER

It has Qwen3.5's layers, two of gated DeltaNet and one of attention, is as wide as the embedded model, and has as many
parameters. On a CPU its rows cannot be packed, because a recurrent state runs through each. algos/sft.py then teaches
it what the embedded model's warm start has learned, from the same sloppy teacher (baselines/README.md).
"""

import sys

import torch
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

from common.data import arithmetic


def config() -> Qwen3_5TextConfig:
    """The configuration of the hybrid: 128 wide, 3 layers, 4 heads."""
    llama_like = arithmetic.config()
    return Qwen3_5TextConfig(
        vocab_size=llama_like.vocab_size,
        hidden_size=llama_like.hidden_size,
        intermediate_size=448,
        num_hidden_layers=3,
        layer_types=["linear_attention", "linear_attention", "full_attention"],
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        max_position_embeddings=llama_like.max_position_embeddings,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
        },
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )


if __name__ == "__main__":
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config(), dtype=torch.float32).save_pretrained(sys.argv[1])
    arithmetic.tokenizer().save_pretrained(sys.argv[1])
