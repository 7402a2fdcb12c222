"""The memory of a rank, computed before anything is loaded: what a run keeps there, and what that leaves.

Both follow from config.json, the flags and the size of the memory. While a rank trains, it holds

    states       float32 weights and Adam's two moments of trained models, weights of frozen ones, all sharded
    gradients    of the model that is being updated
    the engine   asleep: what vLLM keeps; or a second copy of the weights (--rollout-backend hf)
    one forward  the gathered weights of the layers at work, activations of its tokens, a few chunks of logits

While it samples, only the states remain, and the engine may have the rest. So the states decide how large the token
budget of a forward and the engine's share of a GPU can be.

A CPU has one memory for all of this, and it is seldom short: there the activations get a share that depends on the
number of trained models alone.
"""

import math
import re
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

import torch
from transformers import AutoConfig, PreTrainedConfig
from transformers.utils.import_utils import is_flash_linear_attention_available, is_mamba_2_ssm_available

from common.data.families import heads_of, layer_configs, layer_kinds, without_weights
from common.data.tokenizer import image_tokens
from common.errors import BadInput, say
from common.placement import Layout, rank_memory
from common.preflight.checks import heads_of_all
from common.rollout.engines import MOST_SEQUENCES, kv_bytes_per_token
from common.trainer import lora
from common.trainer.attention import KERNEL_MAX_WIDTH
from common.trainer.batching import Compute
from common.trainer.logits import GPU_LOGITS_PER_CHUNK
from common.trainer.model import keeps_whole_gradients, may_leave_unused
from common.trainer.parts import all_attentions, layers_of

GIB = 2**30  # bytes
FROZEN = ("reference", "teacher")  # models that are loaded from --model and that no gradient trains

# Bytes of a parameter.
MASTER_BYTES = 12  # a trained one: float32 weight and Adam's two moments
MOMENT_BYTES = 8  # the moments among them
GRADIENT_BYTES = 4
FROZEN_BYTES = 4  # one that is kept in float32 without moments: a frozen vision tower's, a moving teacher's

FREE = 0.1  # share of a GPU's memory that stays free, for its context, NCCL, fragmentation and errors of the estimate
ENGINE_ASLEEP = 2 * GIB  # kept by a sleeping engine: CUDA graphs, libraries
ENGINE_WORKSPACE = 4 * GIB  # needed by an engine besides weights and KV cache
# Share of a rank's memory for the activations of a forward, on a CPU and in float32. On a CPU two trained models have a
# quarter of it. With it SmolLM2-135M gets the budgets that were measured on a CPU (docs/planning.md).
ACTIVATION_SHARE = 0.18
LOGITS_BYTES = 3 * 4 * GPU_LOGITS_PER_CHUNK  # three float32 chunks at once
MIN_BUDGET_TOKENS = 1024  # on a GPU, where all budgets are multiples of it
MIN_CPU_BUDGET_TOKENS = 512
MAX_BUDGET_TOKENS = 16384  # a larger forward is no faster
RECURRENT = ("linear_attention", "hybrid")  # kinds of layers with a recurrence, in config.json


@lru_cache
def text_config(model_path: str) -> PreTrainedConfig:
    """The configuration of a model, or of its language model if it sees images too."""
    return AutoConfig.from_pretrained(model_path).get_text_config()


@lru_cache
def count_parameters(model_path: str) -> int:
    """Number of parameters of a causal language model, tied ones counted once."""
    return sum(parameter.numel() for parameter in without_weights(model_path).parameters())


@lru_cache
def unit_sizes(model_path: str) -> tuple[int, int]:
    """Parameters of the largest decoder layer, and those outside all layers.

    FSDP gathers each layer on its own, and all the rest together.
    """
    model = without_weights(model_path)
    inside = {parameter for layer in layers_of(model) for parameter in layer.parameters()}
    layers = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers_of(model)]
    rest = sum(parameter.numel() for parameter in model.parameters() if parameter not in inside)
    return max(layers, default=0), rest


@lru_cache
def pinned_factor(model_path: str, shards: int) -> float:
    """How many times its size a model takes in page-locked host memory, where FSDP keeps offloaded weights.

    torch rounds each block there up to a power of two, and each shard of a parameter is a block.
    """
    blocks = []
    for parameter in without_weights(model_path).parameters():
        rows, *others = parameter.shape or (1,)
        blocks.append(math.ceil(rows / shards) * math.prod(others))  # FSDP cuts the first dimension
    return sum(2 ** (size - 1).bit_length() for size in blocks) * shards / count_parameters(model_path)


@lru_cache
def normalizes_heads(model_path: str) -> bool:
    """Whether layers of attention normalize queries and keys (Qwen3, Gemma 3). The norm of a latent is another."""
    attentions = all_attentions(without_weights(model_path))
    names = {name for attention in attentions for name, _ in attention.named_children()}
    return any(re.fullmatch("(q|qk|query)_(layer)?norm", name) for name in names)


@lru_cache
def leaves_unused(model_path: str) -> bool:
    """may_leave_unused() of a model whose weights are not read."""
    return may_leave_unused(without_weights(model_path))


@lru_cache
def trained_parameters(model_path: str, compute: Compute) -> int:
    """Number of parameters that a policy trains: without a vision tower that is frozen, or those of its adapters.

    Raises BadInput without layers to adapt, or to freeze.
    """
    sees = image_tokens(AutoConfig.from_pretrained(model_path))
    if not (sees or compute.lora_rank or compute.freeze_router):
        return count_parameters(model_path)  # the model need not be built again for each Compute
    model = without_weights(model_path)
    if sees:
        from common.trainer import vision  # few models see

        vision.prepare(model, compute.train_vision)
    if compute.lora_rank or compute.freeze_router:
        lora.freeze(model, compute, torch.float32)
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def activation_bytes(
    config: PreTrainedConfig, dtype: torch.dtype, checkpointing: bool, normalized: bool = False
) -> int:
    """Estimated bytes that one token of a forward keeps for the backward.

    With checkpointing, every layer keeps only its input, except for the one that is being computed again.
    normalized: queries and keys are normalized.
    """
    layers = [layer_bytes(layer, dtype, normalized) for layer in layer_configs(config)]
    kinds = layer_kinds(config) or [""] * len(layers)
    recurrence = state_bytes(config)
    layers = [size + recurrence * (kind in RECURRENT) for size, kind in zip(layers, kinds)]
    if checkpointing:
        return len(layers) * config.hidden_size * dtype.itemsize + max(layers)
    return sum(layers)


def layer_bytes(config: PreTrainedConfig, dtype: torch.dtype, normalized: bool) -> int:
    """Estimated bytes that one token keeps in a layer of attention: 4 hidden sizes in float32 (norms and residuals),
    queries, keys, values and outputs of all heads, and 4 feed-forward widths.
    """
    # GPT-2 names its width otherwise, and may leave it open.
    width = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * config.hidden_size
    if isinstance(width, list):  # of each layer (Gemma 3n)
        width = max(width)
    # In a mixture of experts a token passes through several small feed-forwards in place of a wide one.
    experts = getattr(config, "num_experts_per_tok", None) or 0  # a token visits this many of them
    expert_width = getattr(config, "moe_intermediate_size", None) or width
    width = max(width, experts * expert_width)

    queries, keys = heads_of(config)
    queries_and_keys = values_and_outputs = 0  # widths of all heads together
    if getattr(config, "kv_lora_rank", None):
        # Each query head gets keys and values of its own from a latent (DeepSeek).
        queries_and_keys = 2 * queries * (config.qk_nope_head_dim + config.qk_rope_head_dim)
        values_and_outputs = 2 * queries * config.v_head_dim
    elif queries:
        head = getattr(config, "head_dim", None) or config.hidden_size // queries  # heads may be wider than that
        queries_and_keys = values_and_outputs = (queries + keys) * head
    size = 4 * 4 * config.hidden_size + (queries_and_keys + values_and_outputs + 4 * width) * dtype.itemsize
    if normalized:
        size += (4 + dtype.itemsize) * queries_and_keys  # the norm keeps them in float32 and in the compute dtype
    return size


def state_bytes(config: PreTrainedConfig) -> int:
    """Estimated bytes that one token keeps in the recurrence of a layer, in transformers' own code in PyTorch: float32,
    and many times what attention keeps. 0 without gated DeltaNet or Mamba. Factors are fitted to what was counted.

    Kernels on a GPU keep less. The 4 vectors per head assumed for them are a guess.
    """

    def given(*names: str) -> int:
        """The first of these settings that the configuration has, or 0."""
        return next((value for name in names if (value := getattr(config, name, None))), 0)

    if heads := given("linear_num_value_heads"):  # gated DeltaNet, in chunks of 64 tokens
        widths = config.linear_key_head_dim + config.linear_value_head_dim
        values = 4 * widths if is_flash_linear_attention_available() else 14 * widths + 2 * 64
        return 4 * heads * values
    state = given("mamba_d_state", "ssm_state_size", "state_size")
    heads = given("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads")
    if state and heads:  # Mamba 2
        widths = state + given("mamba_d_head", "mamba_head_dim", "mamba_headdim", "head_dim")
        chunk = given("mamba_chunk_size", "chunk_size")
        return 4 * heads * (4 * widths if is_mamba_2_ssm_available() else 11 * widths + 2 * chunk)
    if state:  # Mamba: a state for each of its channels
        channels = given("mamba_expand", "expand") * config.hidden_size
        return 4 * channels * (4 if is_mamba_2_ssm_available() else 4 * state)
    return 0


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The memory of one rank. `memory` and `gpu` are this machine's, unless scripts/plan.py names another."""

    model: str  # folder or Hub name; only its config.json is read
    dtype: torch.dtype  # data type of forward and backward, and of the engine
    size: int  # number of ranks
    compute: Compute = Compute()
    models: tuple[str, ...] = ("policy",)  # each as large as `model`; those of FROZEN are frozen, others are trained
    others: dict[str, str] = field(default_factory=dict)  # name -> a frozen model with a config of its own
    teacher_in_update: bool = False  # its forward is a part of the update (--full-vocabulary)
    offload: str = "none"  # value of --offload
    backend: Literal["vllm", "sglang", "hf", "none"] = "none"  # "none": no engine, as in SFT
    rollout_tp: int = 1
    layout: Layout = Layout()
    reward_bytes: float = 0.0  # bytes of reward models on this rank's device
    memory: float = field(default_factory=rank_memory)  # bytes of this rank's GPU, or its share of the machine
    gpu: bool = field(default_factory=torch.cuda.is_available)

    @property
    def shards(self) -> int:
        """Ranks that hold one copy of the weights together."""
        return self.compute.shard_size or self.size

    @property
    def parameters(self) -> int:
        return count_parameters(self.model)

    @property
    def trainable(self) -> int:
        """Parameters of each trained model that have a gradient and moments."""
        return trained_parameters(self.model, self.compute)

    @property
    def usable(self) -> float:
        """Bytes of the GPU that the estimates below may fill."""
        return (1 - FREE) * self.memory

    @property
    def token_bytes(self) -> int:
        """Bytes of activations of one token."""
        checkpointing = self.compute.activation_checkpointing
        return activation_bytes(text_config(self.model), self.dtype, checkpointing, normalizes_heads(self.model))

    @property
    def engine(self) -> Literal["asleep", "copy", "elsewhere"]:
        """Where the engine is while this rank trains. "elsewhere": on other GPUs, or nowhere."""
        if self.layout.split or self.backend == "none":
            return "elsewhere"
        return "asleep" if self.backend == "vllm" else "copy"

    def offloaded(self, name: str) -> bool:
        """Whether a model's states are in host memory."""
        return self.offload == "all" or (self.offload == "others" and name != "policy")

    def model_states(self) -> dict[str, int]:
        """name -> bytes of each model that stay between the steps, on all shards together.

        A policy with adapters is its own reference, so that reference takes nothing.
        """
        adapts = self.compute.lora_rank > 0
        trained = MASTER_BYTES * self.trainable
        if adapts:
            # The frozen weights below the adapters are kept in the compute dtype.
            trained += self.dtype.itemsize * self.parameters
        else:
            trained += FROZEN_BYTES * (self.parameters - self.trainable)  # such as a vision tower
        states = dict.fromkeys(self.models, trained)
        if "reference" in states:
            states["reference"] = 0 if adapts else self.dtype.itemsize * self.parameters
        # A teacher from --model follows the policy in float32 (SDPO).
        if "teacher" in states:
            states["teacher"] = FROZEN_BYTES * self.parameters
        return states | {name: self.dtype.itemsize * count_parameters(path) for name, path in self.others.items()}

    @property
    def states(self) -> float:
        """Bytes that stay on this rank's device, also while it samples."""
        models = sum(size for name, size in self.model_states().items() if not self.offloaded(name))
        return models / self.shards + self.reward_bytes

    @property
    def whole_gradients(self) -> bool:
        """Whether gradients are kept whole between the micro-batches of a mini-batch."""
        unused = leaves_unused(self.model)
        return keeps_whole_gradients(unused, self.trainable, self.dtype, self.offload == "all", self.memory)

    @property
    def gathered_teacher(self) -> int:
        """Parameters of a teacher that are gathered while the policy's are. Only model.reshard() frees them."""
        if not self.teacher_in_update or "teacher" not in (*self.models, *self.others):
            return 0
        path = self.others.get("teacher", self.model)
        if self.shards == 1 and not self.offloaded("teacher"):
            return count_parameters(path)
        layer, rest = unit_sizes(path)
        return rest + 2 * layer

    def update(self, tokens: float) -> float:
        """Most bytes of this rank in an update whose forwards have that many tokens."""
        layer, rest = unit_sizes(self.model)
        # The rest is gathered for the whole pass, and two layers at a time: one at work, and the next one ahead of it.
        # On a single rank layers stay until their backward, unless they come from the host (model.shard).
        stay = self.shards == 1 and self.offload != "all"
        gathered = (self.parameters if stay else rest + 2 * layer) + self.gathered_teacher
        # A gradient is whole until it has been reduced over the ranks.
        unreduced = self.trainable if self.whole_gradients else min(self.trainable, max(rest, layer))
        # Models are updated one after the other, so only one of them has gradients at a time.
        # Offloaded gradients go to the host. But with several copies of the weights, FSDP keeps sums on the GPU until
        # they are added up over the copies.
        offloaded = self.offload == "all" and self.shards == self.size
        gradients = 0 if offloaded else self.trainable / self.shards
        engine = {"asleep": ENGINE_ASLEEP, "copy": self.dtype.itemsize * self.parameters, "elsewhere": 0}[self.engine]

        passing = self.dtype.itemsize * gathered + GRADIENT_BYTES * (unreduced + gradients) + LOGITS_BYTES
        return self.states + engine + passing + tokens * self.token_bytes

    def token_budget(self) -> int:
        """Tokens of one forward that fit, at least MIN_BUDGET_TOKENS or, on a CPU, MIN_CPU_BUDGET_TOKENS.

        It depends on the size of the memory, not on how much is free: a command always cuts the same micro-batches.
        """
        share = ACTIVATION_SHARE * self.memory
        if not self.gpu:
            # A second trained model doubles the states, and a smaller forward makes up for a part of it.
            share /= sum(name not in FROZEN for name in self.models) ** 2
            # A power of two is the same on machines of nearly the same memory.
            budget = MIN_CPU_BUDGET_TOKENS
            while budget < MAX_BUDGET_TOKENS and 2 * budget * self.token_bytes <= share:
                budget *= 2
            return budget
        room = self.usable - self.update(0)
        config = text_config(self.model)
        capped = getattr(config, "attn_logit_softcapping", None) is not None
        # Gemma 4 has heads of two widths.
        widths = [getattr(config, name, None) or 0 for name in ("head_dim", "global_head_dim")]
        # DeepSeek's values have another width than its keys.
        latent = getattr(config, "kv_lora_rank", None) is not None
        # Attention in float32, with capped scores, with sinks, with wide heads or with two widths has no kernel of its
        # own: it pads, and keeps more than activation_bytes() says.
        no_kernel = capped or latent or config.model_type == "gpt_oss" or max(widths) > KERNEL_MAX_WIDTH
        if self.dtype == torch.float32 or no_kernel:
            room = min(room, share)
        tokens = room / self.token_bytes // MIN_BUDGET_TOKENS * MIN_BUDGET_TOKENS
        return int(max(MIN_BUDGET_TOKENS, min(tokens, MAX_BUDGET_TOKENS)))

    def check_update(self, tokens: float) -> None:
        """Raises BadInput if an update whose forwards have that many tokens does not fit."""
        if self.update(tokens) > self.usable:
            raise BadInput(
                f"an update with {math.ceil(tokens)} tokens in a forward needs {self.update(tokens) / GIB:.1f} GiB a "
                f"rank, {self.usable / GIB:.1f} of {self.memory / GIB:.0f} can be used: --activation-checkpointing, a "
                "smaller --token-budget, shorter rows or --sequence-parallel, more ranks, --offload"
            )

    def fitted_compute(self, longest: int = 0, longest_unit: int = 0) -> Compute:
        """The settings with their token budget filled in, and printed if it was open. Raises BadInput.

        longest: tokens of the longest row, which is never cut. longest_unit: of the longest rows that stay together.
        """
        budget = self.compute.token_budget or self.token_budget()
        if self.gpu:
            # The longest unit is a forward of its own if it is longer than the budget. Sequence parallelism cuts it.
            unit = max(longest, longest_unit)
            self.check_update(max(budget, math.ceil(unit / self.compute.sequence_parallel)))
        if not self.compute.token_budget:
            activations = self.token_bytes * budget / GIB
            say(f"token budget: {budget} a forward and rank ({activations:.2g} GiB of activations)")
        return replace(self.compute, token_budget=budget, longest=longest)

    @property
    def engine_room(self) -> float:
        """Bytes that an engine may take while it samples: of a GPU of its own, or what the trainer's states leave."""
        return self.usable if self.engine == "elsewhere" else self.usable - self.states

    def engine_needs(self, tokens: float) -> float:
        """Bytes of the engine on each of its GPUs, with a KV cache for that many tokens."""
        config = text_config(self.model)
        weights = self.parameters * self.dtype.itemsize / self.rollout_tp
        cache = kv_bytes_per_token(config, self.dtype) * tokens
        # If there are more GPUs than key and value heads, some GPUs keep the same head. A latent (DeepSeek) has no
        # heads, and each GPU keeps all of it.
        fewest = min(keys for _, keys in heads_of_all(config))
        sharing = 1 if getattr(config, "kv_lora_rank", None) else max(1, min(self.rollout_tp, fewest))
        return weights + cache / sharing + ENGINE_WORKSPACE

    def engine_share(self, tokens: float) -> float:
        """Share of the GPU for the engine, in hundredths: as much as that many tokens need, or all that is left."""
        needs = math.ceil(100 * self.engine_needs(tokens) / self.memory)
        room = math.floor(100 * self.engine_room / self.memory)
        return min(needs, room) / 100

    def check_engine(self, longest: float, share: float) -> None:
        """Raises BadInput if this share of the GPU is too small for one response of that length, or too large."""
        needs = self.engine_needs(longest)
        takes = share * self.memory
        if needs > takes:
            cures = "a larger --rollout-memory, " if self.layout.rollout_memory else ""
            raise BadInput(
                f"the engine needs {needs / GIB:.1f} GiB of each GPU for weights and one response, and has "
                f"{max(0, takes) / GIB:.1f} of {self.memory / GIB:.0f}: {cures}a larger --rollout-tp, more ranks, "
                "--offload"
            )
        if takes > self.engine_room and self.engine != "elsewhere":
            raise BadInput(
                f"--rollout-memory {share:g} takes {takes / GIB:.1f} GiB of each GPU, and the trainer leaves "
                f"{self.engine_room / GIB:.1f} of {self.memory / GIB:.0f}"
            )

    def fitted_layout(self, longest: int, sequences: int) -> Layout:
        """The layout with vLLM's share of a GPU filled in, and printed if it was open. Raises BadInput.

        longest: tokens of the longest prompt and response. sequences: responses that one engine is asked for at once.
        """
        if not self.gpu or self.backend != "vllm" or self.layout.rollout_urls:
            return self.layout
        # Room for all responses that the engine works on at once, each at its longest.
        tokens = longest * min(MOST_SEQUENCES, sequences)
        share = self.layout.rollout_memory or self.engine_share(tokens)
        self.check_engine(longest, share)
        if not self.layout.rollout_memory:
            say(f"engine: {share:.0%} of the GPU's {self.memory / GIB:.0f} GiB")
        return replace(self.layout, rollout_memory=share)
