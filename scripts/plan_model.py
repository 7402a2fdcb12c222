"""The cost model of scripts/plan.py: seconds of each phase of a step and bytes of a rank, by pure functions.

    seconds of a phase = sum of count x cost over its counts, and what the network adds

Counts (FLOPs, bytes, engine steps, ...) follow from model, job and layout: `logprobs_counts`, `update_counts`,
`rollout_counts`, `sync_counts`. Costs are seconds a unit, either measured on a machine (`plan.py measure`) or, for
GPUs that nobody measured here, assumed from a data sheet and the shares in `Assumed`. docs/planning.md lists what is
left out.

P: prompt tokens, L: response tokens, both means; G: responses a prompt; W: ranks that train. A rank is one GPU.
"""

import dataclasses
import math
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from common.batching import MOST, SHARE, SHORT_PROMPT, activation_bytes
from common.errors import BadInput
from common.logits import LOGITS_PER_CHUNK
from common.model import WHOLE_GRADIENTS

GIB = 2**30
MOST_RESPONSES = 512  # that an engine works on at once, as engines.start has it
FREE = 0.05  # of a GPU's memory is left alone: the context, fragmentation
SPLIT_GAIN = 0.1  # a split layout, which trains on data one update old, must save this share of a step

Costs = dict[str, dict[str, float]]  # phase -> count -> seconds a unit


@dataclass(frozen=True)
class Model:
    """A decoder; the names are those of a Hugging Face config."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool
    layer_parameters: int  # of all layers together and the last norm; the rest is embedding and head

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, or of the head."""
        return self.vocab_size * self.hidden_size

    @property
    def parameters(self) -> int:
        return self.layer_parameters + self.embedding * (1 if self.tie_word_embeddings else 2)


def layer_parameters(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, head_dim: int, qkv_bias: bool = False
) -> int:
    """Parameters of the layers and the last norm of a Llama or, with qkv_bias, a Qwen2."""
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)  # q and o, k and v
    bias = head_dim * (heads + 2 * kv_heads) if qkv_bias else 0
    return layers * (attention + bias + 3 * hidden * intermediate + 2 * hidden) + hidden


def from_config(config: PreTrainedConfig) -> Model:
    """Sizes of an architecture, its parameters counted on a model without memory. Raises BadInput."""
    if getattr(config, "num_experts", 0) or getattr(config, "num_local_experts", 0):
        raise BadInput(
            f"{config.model_type}: a mixture of experts computes with some of its parameters; dense models only"
        )
    with torch.device("meta"):
        total = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    names = [field.name for field in dataclasses.fields(Model) if field.name not in ("head_dim", "layer_parameters")]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    ends = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    return Model(**{name: getattr(config, name) for name in names}, head_dim=head_dim, layer_parameters=total - ends)


@dataclass(frozen=True)
class Job:
    """One step's work; names as the flags of algos/."""

    prompts_per_step: int
    group_size: int
    prompt_mean: float  # P, tokens
    max_prompt_tokens: int
    response_mean: float  # L, tokens
    max_response_tokens: int
    mini_batches: int = 4
    epochs: int = 1
    reference: bool = False  # a reference policy, for the KL term
    shared_prompts: bool = True
    activation_checkpointing: bool = False
    token_budget: int = 0  # 0: to be chosen from memory, by with_budget
    dtype: torch.dtype = torch.bfloat16  # of computing; masters, gradients and Adam are float32
    rollout_memory: float = 0.4  # share of a GPU that a colocated engine takes
    rollout_max_seqs: int = 0  # responses an engine works on at once; 0: all of a step's, at most 512
    kv_block: int = 16  # tokens; whole blocks of a prompt are shared by its responses


@dataclass(frozen=True)
class Machine:
    """GPUs as a data sheet has them."""

    gpus: int
    gpus_per_node: int
    memory: float  # bytes a GPU
    peak: float  # FLOP/s of matrix products in the compute dtype
    hbm: float  # bytes/s
    link: float  # bytes/s of a GPU to others of its node, one direction
    network: float  # bytes/s of a GPU to other nodes, one direction


@dataclass(frozen=True)
class Layout:
    """W = train; engines = rollout / tp. Colocated: every rank does both, in turn. Split: each does one, at once."""

    train: int
    rollout: int
    tp: int
    split: bool

    def __str__(self) -> str:
        name = f"split, {self.train} train, {self.rollout} sample" if self.split else "colocate"
        return f"{name}, rollout tp {self.tp}"


@dataclass(frozen=True)
class Assumed:
    """ASSUMED, never measured here: what share of a data sheet's figure is reached, and what the host costs."""

    update_mfu: float = 0.40  # of the peak, by the products of forward and backward
    logprobs_mfu: float = 0.45  # of the peak, by a forward alone
    prefill_mfu: float = 0.45
    decode_mfu: float = 0.45
    hbm_share: float = 0.60  # of the bandwidth: weights and KV cache in decoding, the optimizer's states
    network_share: float = 0.70  # of link and network
    engine_step: float = 3e-3  # s of scheduler and launches a decoding step
    engine_token: float = 10e-6  # s of Python a sampled token
    allreduce: float = 20e-6  # s before the first byte; two a layer and decoding step with rollout tp > 1
    push: float = 1.0  # s to wake the engine and load weights, beside the bytes


def assumed_costs(machine: Machine, assumed: Assumed) -> Costs:
    """Seconds a unit on these GPUs, from the data sheet. Traffic between products is in the MFU."""
    flop, byte = 1 / machine.peak, 1 / (machine.hbm * assumed.hbm_share)
    return {
        "rollout": {
            "prefill_flop": flop / assumed.prefill_mfu, "decode_flop": flop / assumed.decode_mfu,
            "weight_byte": byte, "kv_byte": byte, "step": assumed.engine_step, "token": assumed.engine_token,
        },
        "logprobs": {"flop": flop / assumed.logprobs_mfu},
        "update": {"flop": flop / assumed.update_mfu, "parameter": 28 * byte},  # Adam: 4 arrays read, 3 written
        "sync": {"byte": byte, "push": assumed.push},
    }  # fmt: skip


# ---- counts: what a step asks for -----------------------------------------------------------------------------------


def prompt_copies(job: Job) -> int:
    """How often the trainer computes a prompt: once, or once for each response."""
    return 1 if job.shared_prompts and job.prompt_mean >= SHORT_PROMPT else job.group_size


def trained_tokens(job: Job, prompts: float) -> float:
    """Tokens in the trainer's forward for these prompts and their responses."""
    return prompts * (prompt_copies(job) * job.prompt_mean + job.group_size * job.response_mean)


def attended_pairs(job: Job, prompts: float) -> float:
    """(query, key) pairs a layer and head: P^2/2 a computed prompt, L P + L^2/2 a response."""
    length, prompt = job.response_mean, job.prompt_mean
    return prompts * (prompt_copies(job) * prompt**2 / 2 + job.group_size * (length * prompt + length**2 / 2))


def layers_flop(model: Model, tokens: float, pairs: float) -> float:
    """FLOPs of one forward through the layers: 2 a parameter and token, 4 a head's width and pair."""
    width = model.num_attention_heads * model.head_dim
    return 2 * model.layer_parameters * tokens + 4 * width * model.num_hidden_layers * pairs


def head_flop(model: Model, tokens: float) -> float:
    """FLOPs of the logits at these places."""
    return 2 * model.embedding * tokens


def traffic(model: Model, job: Job, tokens: float, pairs: float) -> float:
    """Bytes that stand for all traffic between products: what a backward keeps of each token, and attention weights."""
    weights = model.num_hidden_layers * model.num_attention_heads * pairs * job.dtype.itemsize
    return tokens * activation_bytes(model, job.dtype, False) + weights


def micro_batches(job: Job, prompts: float) -> int:
    """Forwards of these prompts: their tokens over the budget."""
    return math.ceil(trained_tokens(job, prompts) / job.token_budget)


def frozen_passes(job: Job) -> int:
    """Forwards without gradient over a rollout: old log-probs unless there is a single update, and the reference's."""
    return (job.mini_batches * job.epochs > 1) + job.reference


def logprobs_counts(model: Model, job: Job, ranks: int) -> dict[str, float]:
    """A rank's FLOPs, bytes and layer calls in the log-prob passes of a step."""
    prompts = job.prompts_per_step / ranks
    tokens, pairs, passes = trained_tokens(job, prompts), attended_pairs(job, prompts), frozen_passes(job)
    sampled = prompts * job.group_size * job.response_mean
    return {
        "flop": passes * (layers_flop(model, tokens, pairs) + head_flop(model, sampled)),
        "byte": passes * traffic(model, job, tokens, pairs),
        "layer_call": passes * model.num_hidden_layers * micro_batches(job, prompts),
    }


def update_counts(model: Model, job: Job, ranks: int) -> dict[str, float]:
    """A rank's FLOPs (layers 3 forwards' worth, 4 with checkpointing; logits 4: they are computed twice), bytes, layer
    calls, and parameters times optimizer steps.
    """
    prompts = job.prompts_per_step / ranks
    tokens, pairs = trained_tokens(job, prompts), attended_pairs(job, prompts)
    sampled, times = prompts * job.group_size * job.response_mean, 4 if job.activation_checkpointing else 3
    forwards = job.mini_batches * micro_batches(job, prompts / job.mini_batches)
    return {
        "flop": job.epochs * (times * layers_flop(model, tokens, pairs) + 4 * head_flop(model, sampled)),
        "byte": job.epochs * traffic(model, job, tokens, pairs),
        "layer_call": job.epochs * model.num_hidden_layers * forwards,
        "parameter": job.epochs * job.mini_batches * model.parameters / ranks,
    }


def kv_bytes(model: Model, dtype: torch.dtype) -> int:
    """Bytes of KV cache a token: a key and a value of each layer."""
    return 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim * dtype.itemsize


def prefill_tokens(job: Job, prompts: float) -> float:
    """Prompt tokens the engine computes: P once, and for each further response what stands behind whole blocks.

    Of prompts of one length that is known; of others half a block, where they are longer than one.
    """
    behind = (job.kv_block + 1) / 2
    if job.prompt_mean == job.max_prompt_tokens:
        behind = (job.max_prompt_tokens - 1) % job.kv_block + 1
    return prompts * (job.prompt_mean + (job.group_size - 1) * min(behind, job.prompt_mean))


def running_responses(model: Model, job: Job, layout: Layout, memory: float) -> float:
    """Responses an engine works on at once: all it has, at most rollout_max_seqs, as many as its KV cache holds.

    memory: bytes a GPU. Each takes P + L tokens, an upper bound with shared prompts. Below 1: not one fits.
    """
    share = 1 - 2 * FREE if layout.split else job.rollout_memory
    room = layout.tp * share * memory - model.parameters * job.dtype.itemsize
    longest = job.max_prompt_tokens + job.max_response_tokens
    if room < longest * kv_bytes(model, job.dtype):
        return 0.0
    held = room / (kv_bytes(model, job.dtype) * (job.prompt_mean + job.response_mean))
    responses = job.prompts_per_step * job.group_size * layout.tp / layout.rollout
    return min(responses, job.rollout_max_seqs or MOST_RESPONSES, max(1.0, held))


def decode_steps(responses: float, running: float, mean: float, longest: float) -> float:
    """Forwards of an engine: the longest response's tokens, after rounds of the mean where not all run at once."""
    return max(1.0, responses / running) * mean + longest - mean


def rollout_counts(model: Model, job: Job, layout: Layout, memory: float) -> dict[str, float]:
    """An engine's work in a step; FLOPs and bytes are those of each of its `tp` ranks. memory: bytes a GPU."""
    prompts = job.prompts_per_step * layout.tp / layout.rollout
    responses = prompts * job.group_size
    running = running_responses(model, job, layout, memory)
    steps = decode_steps(responses, running, job.response_mean, job.max_response_tokens)
    tokens, context = responses * job.response_mean, job.prompt_mean + job.response_mean / 2
    filled = prefill_tokens(job, prompts)
    return {
        "prefill_flop": layers_flop(model, filled, filled * job.prompt_mean / 2) / layout.tp,
        "decode_flop": (2 * model.layer_parameters * tokens + head_flop(model, tokens)) / layout.tp,
        "weight_byte": steps * model.parameters * job.dtype.itemsize / layout.tp,
        "kv_byte": tokens * context * kv_bytes(model, job.dtype) / layout.tp,
        "step": steps,
        "layer_step": steps * model.num_hidden_layers,
        "token": tokens,
    }


def sync_counts(model: Model) -> dict[str, float]:
    """Float32 bytes that each engine takes in, layers, and one push."""
    return {"byte": 4 * model.parameters, "layer": model.num_hidden_layers, "push": 1}


# ---- seconds --------------------------------------------------------------------------------------------------------


def dot(counts: dict[str, float], costs: dict[str, float]) -> float:
    """Seconds: each count times its cost; a count without one costs nothing."""
    return sum(amount * costs.get(name, 0.0) for name, amount in counts.items())


def bandwidth(machine: Machine, ranks: int, assumed: Assumed) -> float:
    """Bytes/s of a collective over these ranks; over nodes the network's. One rank talks to nobody."""
    if ranks == 1:
        return math.inf
    return assumed.network_share * (machine.link if ranks <= machine.gpus_per_node else machine.network)


def update_traffic(model: Model, job: Job, ranks: int, memory: float) -> float:
    """Bytes FSDP moves for a rank in the updates of a step: the weights for each forward and each backward, in the
    compute dtype, and float32 gradients once an optimizer step, or each backward where whole ones have no room.

    (W - 1) / W is taken as 1.
    """
    steps = job.epochs * job.mini_batches
    forwards = micro_batches(job, job.prompts_per_step / ranks / job.mini_batches)
    reductions = 1 if 4 * model.parameters <= WHOLE_GRADIENTS * memory else forwards
    return steps * model.parameters * (2 * forwards * job.dtype.itemsize + 4 * reductions)


def seconds(
    model: Model, job: Job, layout: Layout, machine: Machine, costs: Costs, assumed: Assumed = Assumed()
) -> dict[str, float]:
    """Seconds of each phase and of the step.

    FSDP's traffic runs beside the products (the longer counts), tensor parallelism's between them. Colocated phases
    follow each other; split: max(rollout, logprobs + update) + sync.
    """
    ranks, wide = layout.train, bandwidth(machine, layout.train, assumed)
    gathered = frozen_passes(job) * micro_batches(job, job.prompts_per_step / ranks) * model.parameters
    out = {
        "rollout": dot(rollout_counts(model, job, layout, machine.memory), costs["rollout"]),
        "logprobs": max(
            dot(logprobs_counts(model, job, ranks), costs["logprobs"]), gathered * job.dtype.itemsize / wide
        ),
        "update": max(
            dot(update_counts(model, job, ranks), costs["update"]),
            update_traffic(model, job, ranks, machine.memory) / wide,
        ),
        "sync": dot(sync_counts(model), costs["sync"]) + 4 * model.parameters / wide,
    }
    if layout.tp > 1:
        counts = rollout_counts(model, job, layout, machine.memory)
        moved = 2 * (layout.tp - 1) / layout.tp * model.hidden_size * job.dtype.itemsize * counts["token"]
        moved /= bandwidth(machine, layout.tp, assumed)
        out["rollout"] += 2 * model.num_hidden_layers * (counts["step"] * assumed.allreduce + moved)
    if layout.split:  # the gathered weights go on to the engines
        out["sync"] += model.parameters * job.dtype.itemsize / bandwidth(machine, machine.gpus, assumed)
        out["step"] = max(out["rollout"], out["logprobs"] + out["update"]) + out["sync"]
    else:
        out["step"] = out["rollout"] + out["logprobs"] + out["update"] + out["sync"]
    return out


# ---- memory ---------------------------------------------------------------------------------------------------------


def with_budget(model: Model, job: Job, memory: float) -> Job:
    """The job with a token budget: as given, or as batching.plan chooses it for a rank of `memory` bytes."""
    budget, per_token = 1024, activation_bytes(model, job.dtype, job.activation_checkpointing)
    while budget < MOST and 2 * budget * per_token <= SHARE * memory:
        budget *= 2
    return dataclasses.replace(job, token_budget=job.token_budget or budget)


def trainer_bytes(model: Model, job: Job, ranks: int, memory: float) -> dict[str, float]:
    """Bytes of a rank in the update. "states": float32 masters, gradients and Adam's two moments, 16 / W a parameter,
    and 4 / W for a reference; they stay during the rollout.
    """
    size, layer = job.dtype.itemsize, model.layer_parameters / model.num_hidden_layers
    ends = model.parameters - model.layer_parameters
    forwards = micro_batches(job, job.prompts_per_step / ranks / job.mini_batches)
    whole = 4 * model.parameters if 4 * model.parameters <= WHOLE_GRADIENTS * memory and forwards > 1 else 0
    tokens = min(job.token_budget, trained_tokens(job, job.prompts_per_step / ranks / job.mini_batches))
    return {
        "states": (20 if job.reference else 16) * model.parameters / ranks,
        "gathered": size * (model.parameters if ranks == 1 else ends + 2 * layer),
        "gradients": max(whole, 4 * max(ends, layer)),  # whole ones, or those of one unit on their way
        "activations": tokens * activation_bytes(model, job.dtype, job.activation_checkpointing)
        + 3 * 4 * LOGITS_PER_CHUNK,
    }


def peak_bytes(model: Model, job: Job, layout: Layout, machine: Machine) -> dict[str, float]:
    """Most bytes of a rank "in the update" and "in the rollout" (colocated: the engine beside the trainer's states)."""
    trainer = trainer_bytes(model, job, layout.train, machine.memory)
    engine = (1 - 2 * FREE if layout.split else job.rollout_memory) * machine.memory
    return {"update": sum(trainer.values()), "rollout": engine + (0 if layout.split else trainer["states"])}


def refusal(model: Model, job: Job, layout: Layout, machine: Machine) -> str:
    """Why this layout cannot run, or ""."""
    share = job.mini_batches * layout.train
    if job.prompts_per_step % share:
        return f"{job.prompts_per_step} prompts are not a multiple of {job.mini_batches} mini-batches x {layout.train}"
    usable, gpus = (1 - FREE) * machine.memory, f"of {machine.memory / GIB:.0f} GiB"
    for phase, needed in peak_bytes(model, job, layout, machine).items():
        if needed > usable:
            return f"needs {needed / GIB:.1f} GiB a rank {gpus} in the {phase}"
    if running_responses(model, job, layout, machine.memory) < 1:
        return f"weights and the longest response's KV cache do not fit into the engine's share {gpus}"
    return ""


# ---- choice ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prediction:
    layout: Layout
    seconds: dict[str, float]  # empty where refused
    bytes: dict[str, float]
    refused: str


def layouts(machine: Machine) -> list[Layout]:
    """All that the GPUs allow: tp a power of two inside a node; split at any multiple of it."""
    sizes = [tp for tp in (1, 2, 4, 8) if tp <= machine.gpus_per_node and machine.gpus % tp == 0]
    found = [Layout(machine.gpus, machine.gpus, tp, False) for tp in sizes]
    return found + [Layout(machine.gpus - used, used, tp, True) for tp in sizes for used in range(tp, machine.gpus, tp)]


def predictions(
    model: Model, job: Job, machine: Machine, costs: Costs, assumed: Assumed = Assumed()
) -> list[Prediction]:
    """Every layout, those that can run first, the quickest of them first."""
    found, job = [], with_budget(model, job, machine.memory)
    for layout in layouts(machine):
        refused = refusal(model, job, layout, machine)
        spent = {} if refused else seconds(model, job, layout, machine, costs, assumed)
        found.append(Prediction(layout, spent, peak_bytes(model, job, layout, machine), refused))
    return sorted(found, key=lambda it: (bool(it.refused), it.seconds.get("step", 0.0)))


def recommend(found: list[Prediction]) -> Prediction:
    """The quickest colocated layout, or the quickest split one where that saves SPLIT_GAIN. Raises BadInput."""
    able = [it for it in found if not it.refused]
    if not able:
        least = min(found, key=lambda it: max(it.bytes.values()))
        raise BadInput(f"no layout can run: {least.layout} {least.refused}; more GPUs, or a smaller job")
    colocated = [it for it in able if not it.layout.split]
    if colocated and able[0].seconds["step"] > (1 - SPLIT_GAIN) * colocated[0].seconds["step"]:
        return colocated[0]
    return able[0]
