"""Tiny random models of the families in docs/models.md, and the table there.

    python tests/families.py        prints the table

A row names what a family has in addition to Llama's layers, and which engines sample from it.
tests/trainer/test_families.py shows that each row is true: the trainer against transformers' eager attention, and vLLM
after loading and after three pushes.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from common.data.tokenizer import causal_class, image_tokens
from common.rollout.rollout import Rollout, collate
from common.trainer.batching import Compute, pack
from common.trainer.model import reshard, response_logprobs

WINDOW = 16  # tokens; the rows of the tests are longer
TEMPERATURE = 0.7
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
# Mamba's and DeltaNet's states. Chunks are shorter than the rows of the tests.
MAMBA = {"mamba_d_state": 16, "mamba_n_groups": 1, "mamba_d_head": 32, "mamba_chunk_size": 32}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
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

STATES = "convolutions or recurrent states, which would run into the next sequence"


@dataclass
class Family:
    has: str  # in addition to Llama's layers
    config: dict = field(default_factory=dict)  # in addition to SIZES
    refused: str = ""  # why vLLM cannot sample from it, as the refusal says
    unpacked: str = ""  # why its rows are not packed, as the line at the start says
    tolerance: float = 1e-5  # nats between log-probs of trainer, transformers and engine
    type: str = ""  # transformers' model_type, if it is not the name


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
    "gemma4_text": Family(
        "windows in 5 of 6 layers, wider heads in the others, embeddings of each layer's own, shared keys and values, "
        "a cap",
        {
            "sliding_window": WINDOW,
            "global_head_dim": 64,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "vocab_size_per_layer_input": 128,
            "hidden_size_per_layer_input": 16,
            "final_logit_softcapping": 2.0,
        },
        tolerance=5e-5,  # its scores are not divided by the root of their width, so they are large
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
    "phi3 longrope": Family(
        "one set of rotary frequencies for short rows, another for long ones",
        {
            **WIDE,
            "head_dim": None,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 16,
                "long_factor": [1 + i / 4 for i in range(16)],
            },
            "original_max_position_embeddings": 32,  # tokens; the rows of the tests are longer
        },
        type="phi3",
    ),
    "gpt2": Family(
        "learned positions, no gates, biases",
        {**WIDE, "head_dim": None, "num_key_value_heads": None, "intermediate_size": None},
    ),
    "gpt_neox": Family(
        "parallel layers, positions in a quarter of each head, biases",
        {**WIDE, "head_dim": None, "num_key_value_heads": None},
    ),
    "phi": Family("a head with a bias, parallel layers, positions in half of each head", {**WIDE, "head_dim": None}),
    "lfm2": Family(
        "short convolutions in some layers",
        {
            **WIDE,
            "head_dim": None,
            "layer_types": ["conv", "full_attention"] * 2,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": True,
            "block_dim": 128,  # vLLM reads these two
            "conv_dim": 128,
        },
        refused="vLLM computes other log-probs on a CPU",
        unpacked=STATES,
    ),
    "qwen3_next": Family(
        "gated DeltaNet in 3 of 4 layers, gated attention, experts",
        {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 64, **DELTA},
        refused="vLLM has no kernels for it on a CPU",
        unpacked=STATES,
    ),
    "qwen3_5_text": Family(
        "gated DeltaNet in 3 of 4 layers, gated attention",
        {
            **DELTA,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.25,
                "mrope_section": [2, 1, 1],
            },
        },
        refused="vLLM has no kernels for it on a CPU",
        unpacked=STATES,
    ),
    "granitemoehybrid": Family(
        "Mamba 2 in some layers, experts, scaled logits, embeddings and residuals",
        {
            **WIDE,
            "head_dim": None,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "mamba_n_heads": 8,
            **MAMBA,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 64,
            "logits_scaling": 4.0,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.2,
        },
        unpacked=STATES,
    ),
    "falcon_h1": Family(
        "Mamba 2 beside attention in each layer, scaled logits, embeddings and keys",
        {
            **WIDE,
            "mamba_d_ssm": 128,
            "mamba_n_heads": 4,
            **MAMBA,
            "lm_head_multiplier": 0.5,
            "embedding_multiplier": 2.0,
            "key_multiplier": 0.7,
        },
        unpacked=STATES,
    ),
    "nemotron_h": Family(
        "layers of Mamba 2, of experts, of attention and of feed-forward",
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "num_hidden_layers": None,
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "n_groups": 2,
            "ssm_state_size": 16,
            "chunk_size": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "moe_shared_expert_intermediate_size": 64,
        },
        refused="vLLM has no kernels for it on a CPU",
        unpacked=STATES,
    ),
    "glm_moe_dsa": Family(
        "experts, latent attention to the tokens that an index chooses",
        SHARED_EXPERTS | LATENT | {"index_topk": WINDOW, "index_n_heads": 32, "index_head_dim": 32},
        refused="vLLM has no kernels for it on a CPU",
        unpacked="indexed_attention in some layers",
    ),
    "llama4_text": Family(
        "experts, attention within chunks in 3 of 4 layers, queries scaled by position",
        {
            "num_local_experts": 4,
            "attention_chunk_size": 32,
            "floor_scale": 16,
            "attn_scale": 0.5,
            "intermediate_size_mlp": 128,
            "interleave_moe_layer_step": 2,
        },
        refused="vLLM computes other log-probs on a CPU",
        unpacked="chunked_attention in some layers",
    ),
}


def config_of(name: str):
    sizes = {key: value for key, value in {**SIZES, **FAMILIES[name].config}.items() if value is not None}
    return AutoConfig.for_model(FAMILIES[name].type or name, **sizes)


def save(name: str, folder: Path) -> str:
    """A random model of the family, with log-probs that differ from token to token."""
    return save_model(config_of(name), folder / name)


def save_model(config, folder: Path) -> str:
    """The same of a configuration, in this folder."""
    torch.manual_seed(0)
    model = causal_class(config).from_config(config, dtype=torch.float32)
    for key, parameter in model.named_parameters():
        if key.endswith("A_log"):
            # Random states forget within a few tokens. These keep something for tens of tokens, so a leak shows.
            nn.init.uniform_(parameter, -4, -1)
        elif "conv1d" in key or ".conv.conv" in key:
            nn.init.normal_(parameter, std=0.5)
        elif "sinks" in key:
            nn.init.normal_(parameter, std=1.0)
        elif parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.08)
        elif key.endswith((".bias", ".D")):
            nn.init.normal_(parameter, std=0.3)  # they start at 0 or 1, and nobody would miss them
    for key, buffer in model.named_buffers():
        if "correction_bias" in key:  # it moves the choice of experts, and is not a parameter
            nn.init.normal_(buffer, std=0.1)
    model.save_pretrained(folder)
    return str(folder)


def save_random(config, folder) -> None:
    """A random model of a configuration, in this folder."""
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(config)
    for parameter in reference.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.08)
    reference.save_pretrained(folder)


def rows_longer_than_a_window() -> Rollout:
    """Two groups of two, whose prompts are computed once."""
    generator = torch.Generator().manual_seed(3)
    draw = lambda n: torch.randint(3, 120, (n,), generator=generator).tolist()
    a, b = draw(40), draw(33)
    return collate([a, a, b, b], [draw(30), draw(25), draw(30), draw(12)], None, [False] * 4, 0, torch.device("cpu"))


def own_tables(theirs, rollout, rows: torch.Tensor) -> torch.Tensor:
    """(n, T, V) log-probs of transformers' model, one row at a time; 0 where there is no token.

    Tokens that stand for images are never sampled.
    """
    tables = []
    for row in rows.tolist():
        prompt, response = rollout.prompt_ids[row], rollout.response_ids[row]
        logits = theirs(input_ids=torch.tensor([prompt + response]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        logits[:, list(image_tokens(theirs.config))] = -torch.inf
        missing = rollout.response_mask.shape[1] - len(response)
        tables.append(F.pad((logits / TEMPERATURE).log_softmax(-1), (0, 0, 0, missing)))
    return torch.stack(tables)


def targets_of(rollout, rows: torch.Tensor) -> torch.Tensor:
    """(n, T, 1) the response tokens."""
    length = rollout.response_mask.shape[1]
    ids = [rollout.response_ids[row] + [0] * (length - len(rollout.response_ids[row])) for row in rows.tolist()]
    return torch.tensor(ids)[..., None]


def transformers_own(path: str):
    """transformers' model of a folder, with its plainest attention."""
    automatic = causal_class(AutoConfig.from_pretrained(path))
    return automatic.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def difference(policy, path: str, rollout: Rollout, compute: Compute, world) -> float:
    """The largest one between the policy's log-probs and those of transformers' eager attention, row by row."""
    theirs = transformers_own(path)
    largest = 0.0
    with torch.no_grad():
        for micro in pack(rollout, torch.arange(len(rollout)), compute, world):
            found, _ = response_logprobs(policy, micro, TEMPERATURE)
            right = own_tables(theirs, rollout, micro.rows).gather(2, targets_of(rollout, micro.rows))[..., 0]
            largest = max(largest, float((found - right).abs().max()))
    reshard(policy)
    return largest


def table() -> str:
    """The rows of docs/models.md."""
    rows = ["| family | in addition to Llama's layers | rows | sampled by, on a CPU |", "|---|---|---|---|"]
    for name, family in FAMILIES.items():
        engines = f"`hf` only: {family.refused}" if family.refused else "`vllm`, `hf`"
        layout = "one sequence each" if family.unpacked else "packed"
        rows.append(f"| `{name}` | {family.has} | {layout} | {engines} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
