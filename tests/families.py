"""Tiny random models of the families in docs/models.md, and the table there.

    python tests/families.py        prints the table

A row names what a family has in addition to Llama's layers, and which engines sample from it.
tests/trainer/test_families.py shows that each row is true: the trainer against transformers' eager attention, and vLLM
after loading and after three pushes.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

WINDOW = 16  # tokens; the rows of the tests are longer
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WIDE = {"hidden_size": 128}  # for families without head_dim: vLLM's attention on a CPU wants heads of 32 or wider
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
SHARED_EXPERTS = EXPERTS | {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
    "head_dim": None,
}


@dataclass
class Family:
    has: str  # in addition to Llama's layers
    config: dict = field(default_factory=dict)  # in addition to SIZES
    refused: str = ""  # why vLLM cannot sample from it, as the refusal says


FAMILIES = {
    "llama": Family("nothing"),
    "qwen2": Family("biases", WIDE),
    "qwen3": Family("norms of queries and keys"),
    "smollm3": Family("layers without positions"),
    "olmo3": Family("norms after layers, windows in 3 of 4 layers", {"sliding_window": WINDOW}),
    "mistral": Family("windows", {"sliding_window": WINDOW}),
    "phi3": Family("windows, fused projections", {"sliding_window": WINDOW}),
    "gemma2": Family(
        "windows in every second layer, caps of scores and of logits",
        {
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 32,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 2.0,
        },
    ),
    "gemma3_text": Family(
        "windows in 5 of 6 layers, two rotary bases",
        {
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 32,
            "num_hidden_layers": 6,
        },
    ),
    "granite": Family("scaled logits, embeddings and residuals", {**WIDE, "logits_scaling": 4.0}),
    "cohere": Family("scaled logits, parallel layers", {**WIDE, "logit_scale": 0.25}),
    "mixtral": Family("experts, windows", {"num_local_experts": 4, **EXPERTS, "sliding_window": WINDOW}),
    "qwen3_moe": Family("experts", {"num_experts": 4, **EXPERTS, "decoder_sparse_step": 1}),
    "glm4_moe": Family("experts, one of them shared", SHARED_EXPERTS),
    "deepseek_v3": Family(
        "experts, one of them shared; latent attention: values of another width",
        SHARED_EXPERTS | LATENT,
        "vLLM computes other log-probs on a CPU",
    ),
    "gpt_oss": Family(
        "experts, windows, attention sinks",
        {"num_local_experts": 4, **EXPERTS, "sliding_window": WINDOW},
        "vLLM keeps some of the old weights after an update",
    ),
}


def save(name: str, folder: Path) -> str:
    """A random model of the family, with log-probs that differ from token to token."""
    torch.manual_seed(0)
    sizes = {key: value for key, value in {**SIZES, **FAMILIES[name].config}.items() if value is not None}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes), dtype=torch.float32)
    for key, parameter in model.named_parameters():
        if parameter.dim() > 1 or "sinks" in key:
            nn.init.normal_(parameter, std=1.0 if "sinks" in key else 0.08)
    for key, buffer in model.named_buffers():
        if "correction_bias" in key:  # it moves the choice of experts, and is not a parameter
            nn.init.normal_(buffer, std=0.1)
    model.save_pretrained(folder / name)
    return str(folder / name)


def has_value_head(name: str) -> bool:
    """Whether transformers has the class that PPO's critic is made of."""
    return type(AutoConfig.for_model(name)) in AutoModelForTokenClassification._model_mapping


def table() -> str:
    """The rows of docs/models.md."""
    rows = ["| family | in addition to Llama's layers | trained | sampled by |", "|---|---|---|---|"]
    for name, family in FAMILIES.items():
        engines = f"`hf` only: {family.refused}" if family.refused else "`vllm`, `hf`"
        trained = "yes" if has_value_head(name) else "yes, not by PPO"
        rows.append(f"| `{name}` | {family.has} | {trained} | {engines} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
