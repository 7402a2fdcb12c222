"""The memory of a rank: one set of rules, for runs before anything is loaded and for scripts/plan.py.

Bytes are computed from the model's config.json. While a rank trains: float32 masters, gradients, Adam's two moments and
frozen models; the weights of the layers at work; activations of one micro-batch; a few chunks of logits. While it
samples on a GPU: the same states without gradients, beside the engine. On a CPU all of it shares one memory, which is
seldom short: there the states are checked, and activations get a fixed share.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import torch
from transformers import AutoConfig

from common.data.tokenizer import causal_class
from common.errors import BadInput, say
from common.placement import Layout, rank_memory
from common.run.checks import check_heads, engine_heads_refusal, heads_of
from common.trainer.batching import Compute
from common.trainer.kernels import check_kernels
from common.trainer.logits import GPU_LOGITS_PER_CHUNK
from common.trainer.model import GRADIENT_MEMORY_SHARE

GIB = 2**30  # bytes
MASTER_BYTES, GRADIENT_BYTES, FROZEN_BYTES = 12, 4, 4  # a parameter: master and Adam's moments, gradient, frozen weight
FREE = 0.1  # share of a GPU's memory that stays free, for its context, NCCL, fragmentation and errors of the estimate
ENGINE_ASLEEP = 2 * GIB  # bytes that a colocated engine keeps while its rank trains: CUDA graphs, libraries
ENGINE_WORKSPACE = 4 * GIB  # bytes that an engine needs beside weights and KV cache
ACTIVATION_SHARE = 0.2  # share of a rank's memory for the activations of one micro-batch, on a CPU and in float32
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # how configs call the number of experts of a layer
MIN_BUDGET_TOKENS, MAX_BUDGET_TOKENS = 1024, 16384  # beyond the maximum a micro-batch is no faster


@dataclass(frozen=True)
class Decoder:
    """Sizes of a model. The first three have the names of its config."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    query_width: int  # width of all query heads of a layer together
    key_width: int  # the same of keys, and of values
    embedding: int  # parameters of the embedding, or of the head
    inner: int  # parameters of all layers together and of the last norm
    parameters: int  # all of them, tied ones counted once
    heads: tuple[int, int]  # numbers of query heads, and of key and value heads, in a layer
    written_out: bool = False  # attention keeps its weights, as for caps of scores and sinks
    idle: int = 0  # parameters of `inner` that a token does not visit: of the experts that are not chosen for it

    @property
    def visited(self) -> int:
        """Parameters of `inner` that one token is multiplied with."""
        return self.inner - self.idle

    def kv_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of KV cache for one token: a key and a value of each layer."""
        return 2 * self.num_hidden_layers * self.key_width * dtype.itemsize

    def adapters(self, rank: int) -> int:
        """LoRA's parameters for the seven products of a layer like Llama's: rank x (input width + output width)."""
        attention = 2 * (self.hidden_size + self.query_width) + 2 * (self.hidden_size + self.key_width)
        return rank * self.num_hidden_layers * (attention + 3 * (self.hidden_size + self.intermediate_size))

    def activation_bytes(self, dtype: torch.dtype, checkpointing: bool) -> int:
        """Estimated bytes that one token keeps for the backward. Each layer keeps 4 hidden sizes in float32 (norms and
        residuals), 5 hidden sizes and 4 feed-forward widths. With checkpointing, all layers but one keep their input.
        """
        layer = 4 * 4 * self.hidden_size + (5 * self.hidden_size + 4 * self.intermediate_size) * dtype.itemsize
        kept = self.hidden_size * dtype.itemsize if checkpointing else layer
        return self.num_hidden_layers * kept + (layer if checkpointing else 0)


def without_weights(model_path: str) -> torch.nn.Module:
    """The model on the meta device. Reads the config, not the weights."""
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(model_path)
        return causal_class(config).from_config(config)


@lru_cache
def count_parameters(model_path: str) -> int:
    """Number of parameters of a causal language model, tied ones counted once."""
    return sum(parameter.numel() for parameter in without_weights(model_path).parameters())


@lru_cache
def count_experts(model_path: str) -> int:
    """Number of parameters of all experts among which a router chooses."""
    parameters = without_weights(model_path).named_parameters()
    return sum(parameter.numel() for name, parameter in parameters if ".experts." in name)


@lru_cache
def trained_parameters(model_path: str, lora_rank: int) -> int:
    """Number of parameters that a policy trains: all, or those of its adapters. Raises BadInput without such layers."""
    if not lora_rank:
        return count_parameters(model_path)
    from common.trainer import lora

    model = without_weights(model_path)
    lora.insert(model, lora_rank, torch.float32)
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def trained_bytes(parameters: int, trained: int, dtype: torch.dtype) -> int:
    """Bytes of masters and moments of a model. With LoRA, frozen weights are kept in the compute dtype."""
    return MASTER_BYTES * trained + (dtype.itemsize * parameters if trained < parameters else 0)


def decoder(model_path: str) -> Decoder:
    """Sizes of a model from its config.json."""
    config = AutoConfig.from_pretrained(model_path).get_text_config()
    heads, count, embedding = (
        config.num_attention_heads, count_parameters(model_path), config.vocab_size * config.hidden_size
    )  # fmt: skip
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    experts = getattr(config, "num_experts_per_tok", None) or 0  # a token visits so many of them
    among = next((n for name in EXPERTS if (n := getattr(config, name, None))), 1)
    width = max(
        config.intermediate_size, experts * (getattr(config, "moe_intermediate_size", None) or config.intermediate_size)
    )
    return Decoder(
        config.hidden_size, width, config.num_hidden_layers, heads * head_dim,
        config.num_key_value_heads * head_dim, embedding,
        count - embedding * (1 if config.tie_word_embeddings else 2), count, heads_of(config),
        getattr(config, "attn_logit_softcapping", None) is not None or config.model_type == "gpt_oss",
        count_experts(model_path) * (among - experts) // among if experts else 0,
    )  # fmt: skip


@dataclass(frozen=True)
class GPU:
    """One GPU of a run, and what the run puts on it. All models have the sizes of one."""

    memory: float  # bytes
    model: Decoder
    shards: int  # ranks that hold one copy of the weights together
    dtype: torch.dtype  # data type of forward and backward, and of the engine
    trained: int = 1  # models with gradients and an optimizer
    frozen: int = 0  # models without
    adapters: int = 0  # parameters of a model that LoRA trains; 0 without LoRA
    offload: str = "none"  # "others" and "all" as in --offload
    checkpointing: bool = False
    engine: Literal["asleep", "copy", "elsewhere"] = "asleep"  # see engine_state(); "elsewhere" also without any engine
    other: float = 0.0  # bytes of reward models, and of frozen models of other sizes

    @property
    def usable(self) -> float:
        return (1 - FREE) * self.memory

    @property
    def states(self) -> float:
        """Bytes that stay: masters and moments of trained models, frozen models, reward models."""
        trained, frozen = {"none": (self.trained, self.frozen), "others": (1, 0), "all": (0, 0)}[self.offload]
        count = self.model.parameters
        whole = trained * trained_bytes(count, self.with_gradient, self.dtype) + frozen * FROZEN_BYTES * count
        return whole / self.shards + self.other

    @property
    def with_gradient(self) -> int:
        """Parameters of a trained model that have a gradient and an optimizer state."""
        return self.adapters or self.model.parameters

    @property
    def whole_gradients(self) -> bool:
        """Whether gradients are kept whole between the micro-batches of a mini-batch, as in common/trainer/model.py."""
        return self.offload != "all" and GRADIENT_BYTES * self.with_gradient <= GRADIENT_MEMORY_SHARE * self.memory

    @property
    def activation_bytes(self) -> int:
        return self.model.activation_bytes(self.dtype, self.checkpointing)

    def update(self, tokens: float) -> float:
        """Most bytes in an update whose forwards have that many tokens."""
        model = self.model
        ends, layer = model.parameters - model.inner, model.inner / model.num_hidden_layers
        gathered = self.dtype.itemsize * (model.parameters if self.shards == 1 else ends + 2 * layer)
        largest = min(self.with_gradient, max(ends, layer))
        unreduced = GRADIENT_BYTES * (self.with_gradient if self.whole_gradients else largest)
        gradients = 0 if self.offload == "all" else GRADIENT_BYTES * self.with_gradient / self.shards
        engine = {"asleep": ENGINE_ASLEEP, "copy": model.parameters * self.dtype.itemsize, "elsewhere": 0}[self.engine]
        passing = gathered + unreduced + gradients + 3 * 4 * GPU_LOGITS_PER_CHUNK
        return self.states + engine + passing + tokens * self.activation_bytes

    def token_budget(self) -> int:
        """Tokens of one forward that fit: a multiple of MIN_BUDGET_TOKENS, and one of them even if it does not fit.

        In float32 and with caps of scores or sinks, attention has no kernel of its own: it pads and keeps more than is
        estimated, and gets a fixed share.
        """
        room = self.usable - self.update(0)
        if self.dtype == torch.float32 or self.model.written_out:
            room = min(room, ACTIVATION_SHARE * self.memory)
        fit = room / self.activation_bytes // MIN_BUDGET_TOKENS * MIN_BUDGET_TOKENS
        return int(max(MIN_BUDGET_TOKENS, min(fit, MAX_BUDGET_TOKENS)))

    def update_refusal(self, tokens: float) -> str:
        """Why an update does not fit, or ""."""
        return "" if self.update(tokens) <= self.usable else (
            f"an update with {math.ceil(tokens)} tokens in a forward needs {self.update(tokens) / GIB:.1f} GiB a rank, "
            f"{self.usable / GIB:.1f} of {self.memory / GIB:.0f} can be used: --activation-checkpointing, a smaller "
            "--token-budget, shorter rows or --sequence-parallel, more ranks, --offload"
        )  # fmt: skip

    def engine_room(self) -> float:
        """Bytes that an engine may take while it samples: of a GPU of its own, or what the trainer's states leave."""
        return self.usable - (0 if self.engine == "elsewhere" else self.states)

    def engine_needs(self, tp: int, tokens: float) -> float:
        """Bytes of an engine over tp GPUs, on each of them, with a KV cache for that many tokens.

        Where there are more GPUs than key and value heads, some GPUs keep the same head.
        """
        weights, cache = self.model.parameters * self.dtype.itemsize / tp, self.model.kv_bytes(self.dtype) * tokens
        return weights + cache / min(tp, self.model.heads[1]) + ENGINE_WORKSPACE

    def engine_share(self, tp: int, tokens: float) -> float:
        """Share of the GPU's memory for an engine, in hundredths: as much as that many tokens need, or what is left."""
        needs, room = self.engine_needs(tp, tokens) / self.memory, self.engine_room() / self.memory
        return min(math.ceil(100 * needs), math.floor(100 * room)) / 100

    def engine_refusal(self, tp: int, longest: float, share: float) -> str:
        """Why there cannot be an engine over tp GPUs that takes this share of the memory, or ""."""
        if refusal := engine_heads_refusal(self.model.heads, tp):
            return refusal
        needs, takes, room = self.engine_needs(tp, longest), share * self.memory, self.engine_room()
        if needs > takes:
            return (
                f"the engine needs {needs / GIB:.1f} GiB of each GPU for weights and one response, and has "
                f"{max(0, takes) / GIB:.1f} of {self.memory / GIB:.0f}: a larger --rollout-tp, more ranks, --offload"
            )
        if takes > room and self.engine != "elsewhere":
            return (
                f"--rollout-memory {share:g} takes {takes / GIB:.1f} GiB of each GPU, and the trainer leaves "
                f"{room / GIB:.1f} of {self.memory / GIB:.0f}"
            )
        return ""


def plan(
    compute: Compute, model_path: str, dtype: torch.dtype, size: int, *, longest: int = 0, **on_the_gpu
) -> Compute:  # fmt: skip
    """Check the settings against the model and the memory, and fill in and print the token budget if it is 0.

    longest: tokens of the longest row, which is a forward of its own if it is longer than the budget. on_the_gpu:
    fields of GPU, from `trained` on. The budget depends on the size of the memory, not on how much is free:
    a command always cuts the same micro-batches. Raises BadInput.
    """
    config = AutoConfig.from_pretrained(model_path)
    check_kernels(compute.kernels)
    check_heads(config, compute.sequence_parallel, model_path)
    if torch.cuda.is_available():
        gpu = this_gpu(compute, model_path, dtype, size, **on_the_gpu)
        per_token, budget = gpu.activation_bytes, compute.token_budget or gpu.token_budget()
        if refusal := gpu.update_refusal(max(budget, math.ceil(longest / compute.sequence_parallel))):
            raise BadInput(refusal)
    else:
        per_token = decoder(model_path).activation_bytes(dtype, compute.activation_checkpointing)
        budget = compute.token_budget or cpu_token_budget(per_token)
    if not compute.token_budget:
        say(f"token budget: {budget} a forward and rank ({per_token * budget / GIB:.2g} GiB of activations)")
    return replace(compute, token_budget=budget)


def this_gpu(compute: Compute, model_path: str, dtype: torch.dtype, size: int, **on_the_gpu) -> GPU:
    """This rank's GPU in a run of `size` ranks. on_the_gpu: fields of GPU, from `trained` on."""
    shards, checkpointing = compute.shard_size or size, compute.activation_checkpointing
    adapters = trained_parameters(model_path, compute.lora_rank) if compute.lora_rank else 0
    return GPU(
        rank_memory(), decoder(model_path), shards, dtype, checkpointing=checkpointing, adapters=adapters, **on_the_gpu
    )


def cpu_token_budget(per_token: int) -> int:
    """The largest power of two whose activations take no more than their share of a CPU rank's memory."""
    budget = MIN_BUDGET_TOKENS
    while budget < MAX_BUDGET_TOKENS and 2 * budget * per_token <= ACTIVATION_SHARE * rank_memory():
        budget *= 2
    return budget


def engine_state(layout: Layout, backend: str) -> str:
    """The engine while a rank trains: "elsewhere" on other GPUs, "asleep" (vLLM), or a "copy" that stays (hf)."""
    return "elsewhere" if layout.split else "asleep" if backend == "vllm" else "copy"


def plan_engine(layout: Layout, gpu: GPU, tp: int, longest: int, sequences: int) -> Layout:
    """Fill in and print the share of a GPU's memory that vLLM may take, if it is 0. Raises BadInput if it does not fit.

    longest: tokens of the longest prompt and response. sequences: responses that one engine works on at once.
    """
    share = layout.rollout_memory or gpu.engine_share(tp, longest * sequences)
    if refusal := gpu.engine_refusal(tp, longest, share):
        raise BadInput(refusal)
    if not layout.rollout_memory:
        say(f"engine: {share:.0%} of the GPU's {gpu.memory / GIB:.0f} GiB")
    return replace(layout, rollout_memory=share)
