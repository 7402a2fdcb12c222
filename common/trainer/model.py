"""Loads Hugging Face weights into an FSDP2 model, and computes log-probs or values of tokens in a packed row.

Master weights are float32 and sharded over all ranks. They are gathered layer by layer in the compute dtype, and
gradients are summed over the ranks in float32.
"""

import inspect
from collections.abc import Callable
from types import MethodType

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from transformers import AttentionInterface, AutoConfig, AutoModelForTokenClassification
from transformers.conversion_mapping import get_model_conversion_mapping

from common.data import weights
from common.data.tokenizer import causal_class, image_tokens
from common.errors import BadInput, raise_together
from common.placement import World, rank_memory
from common.rollout.rollout import Rollout, collate
from common.trainer.attention import packed_attention
from common.trainer.batching import Compute, MicroBatch, pack, pack_groups
from common.trainer.kernels import decoder_of, use_kernels
from common.trainer.logits import ChunkedLogprobs, LogitShape

SUPPORTED = "supported are decoders like Llama's, with sliding windows and experts too: see docs/models.md"
NOISE = (  # settings of layers that draw random numbers: the engine and the old log-probs would see other ones
    "attention_dropout",
    "residual_dropout",
    "embedding_dropout",
    "hidden_dropout",
    "resid_pdrop",
    "embd_pdrop",
    "router_jitter_noise",
)
GRADIENT_MEMORY_SHARE = 0.1  # share of a rank's memory that unreduced gradients may take between micro-batches


def load(
    model_path: str,
    world: World,
    dtype: torch.dtype,
    compute: Compute = Compute(),
    *,
    offload: bool = False,
    value_head: bool = False,
) -> nn.Module:
    """Load a causal language model and shard it, one FSDP unit per decoder layer. Collective: every rank calls it.

    dtype: data type of forward and backward. offload: parameters, gradients and optimizer state live in host memory,
    and layers come to the GPU one at a time. value_head: one value for each token instead of logits, 0 at the
    start unless model_path has a trained head. FSDP treats one method of the model as its forward: `token_logprobs`
    or, with a value head, `token_values` (both below).
    """
    if world.min(dtype.itemsize) < world.max(dtype.itemsize):  # each rank measures what --dtype auto stands for
        raise BadInput("the ranks' CPUs differ in what --dtype auto chooses: give --dtype float32 or bfloat16")
    model = build(model_path, world, dtype, compute, value_head)
    state, buffers, error = {}, {}, None
    if world.is_main:
        try:
            state, buffers = read_weights(model, model_path, compute)
        except BadInput as refused:
            error = refused
    raise_together(error)  # the other ranks would wait for the weights
    use_kernels(model, compute.kernels)
    if compute.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    shard(model, world, dtype, offload)
    fill(model, world, state, buffers, offload)

    # reduce_gradients_after() asks whether a rank can keep whole gradients between micro-batches.
    gradient_bytes = 4 * sum(p.numel() for p in model.parameters() if p.requires_grad)  # float32
    model.whole_gradients = not offload and gradient_bytes <= GRADIENT_MEMORY_SHARE * world.min(rank_memory())
    add_forward(model, token_values if value_head else token_logprobs)
    if not value_head:
        check_packing(model, model_path, world, tolerance=0.1 if dtype.itemsize < 4 else 1e-3)
    return model.train()


def build(model_path: str, world: World, dtype: torch.dtype, compute: Compute, value_head: bool) -> nn.Module:
    """The model on the meta device, with packed attention and adapters, and with its frozen parameters marked.

    It takes no memory yet. FSDP shards it first, so only rank 0, which reads the files, ever holds all weights.
    """
    attend = packed_attention
    if world.sp_group is not None:
        from common.trainer.sequence_parallel import sliced_attention as attend
    # Keep attention out of torch.compile: it loops over sequence lengths, so every new row would compile again.
    # No mask function is registered under this name, so transformers builds no mask and skips its packing check, a GPU
    # sync.
    AttentionInterface.register("packed", torch.compiler.disable(attend))
    config = AutoConfig.from_pretrained(model_path)
    weights.refuse_quantized(config, f"--model {model_path}")
    config.get_text_config()._attn_implementation = "packed"
    model = skeleton(config, model_path, value_head)
    # weight_sync needs it for the names of weights. It depends on classes, which FSDP changes.
    model._weight_conversions = get_model_conversion_mapping(model, add_legacy=False)
    if image_tokens(config):
        from common.trainer import vision

        vision.prepare(model, compute.train_vision)
    if compute.lora_rank or compute.freeze_router:
        from common.trainer import lora

        lora.freeze(model, compute, dtype)
    return model


def read_weights(model: nn.Module, model_path: str, compute: Compute) -> tuple[dict, dict]:
    """The weights in the files, in float32, and the buffers, such as rotary frequencies, which no file has.

    Only rank 0 reads. The other ranks receive their shards from it. Raises BadInput for weights that do not fit.
    """
    value_head = hasattr(model, "score")
    source = weights.read(
        class_of(model.config, value_head),
        model_path,
        f"--model {model_path}",
        value_head=value_head,
        config=model.config,
        dtype=torch.float32,
    )
    if value_head and image_tokens(model.config):
        from common.trainer import vision

        vision.add_value_head(source)
    state = source.state_dict()
    if compute.lora_rank:
        from common.trainer import lora

        state |= lora.initial(model)
    return state, dict(source.named_buffers())


def shard(model: nn.Module, world: World, dtype: torch.dtype, offload: bool) -> None:
    """Cut the parameters over the ranks. FSDP gathers one decoder layer at a time, in the compute dtype."""
    settings = {"mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)}
    if world.mesh.size(-1) == 1:
        settings["reshard_after_forward"] = False  # a single shard has nothing to free
    if offload:
        settings["offload_policy"] = CPUOffloadPolicy(pin_memory=world.device.type == "cuda")
    for module in (*decoder_of(model).layers, model):
        fully_shard(module, mesh=world.mesh, **settings)
        if world.size > 1:
            # Add up the gradients of all ranks; FSDP's default is their mean. The denominator of each rank's loss
            # counts the whole mini-batch already. The second line is for gloo, which cannot scale while it reduces.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def fill(model: nn.Module, world: World, state: dict, buffers: dict, offload: bool) -> None:
    """Give the sharded model memory, and rank 0's weights and buffers. Collective: every rank calls it."""
    model.to_empty(device="cpu" if offload else world.device)
    model.tie_weights()
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    for name, buffer in list(model.named_buffers()):
        whole = buffers[name] if world.is_main else buffer
        whole = whole.to(world.device)  # on the GPU even when the parameters are offloaded
        dist.broadcast(whole, src=0)
        path, _, last = name.rpartition(".")
        setattr(model.get_submodule(path), last, whole)


def add_forward(model: nn.Module, function: Callable) -> None:
    """Make the function a method of the model that FSDP treats as a forward: it gathers the weights before."""
    setattr(model, function.__name__, MethodType(function, model))
    register_fsdp_forward_method(model, function.__name__)


def load_reference(policy: nn.Module, model_path: str, world: World, dtype, compute: Compute, *, offload: bool):
    """The policy as it is before training, frozen: a second copy, or with LoRA the policy without its adapters, which
    takes no memory. frozen_logprobs takes it. Collective: every rank calls it.
    """
    if compute.lora_rank:
        from common.trainer.lora import WithoutAdapters

        return WithoutAdapters(policy)
    return load(model_path, world, dtype, compute, offload=offload).requires_grad_(False)


@torch.no_grad()
def check_packing(model: nn.Module, model_path: str, world: World, tolerance: float) -> None:
    """Refuse an architecture whose log-probs in a packed row are not those of its own forward. Raises BadInput.

    Convolutions and recurrent states would continue into the next sequence, and a family may scale or cap its logits
    in a way that logit_shape() does not know. The check compares four responses to two shared prompts with what the
    model's own forward gives for each sequence alone. tolerance: largest relative difference of log-probs. Collective:
    every rank calls it.
    """
    never = image_tokens(model.config)
    usable = [token for token in range(3, model.config.get_text_config().vocab_size) if token not in never]
    ids = [usable[i % len(usable)] for i in range(160)]
    prompts = [ids[:36], ids[:36], ids[40:76], ids[40:76]]
    responses = [ids[start : start + 4] for start in (36, 76, 116, 156)]
    rollout = collate(prompts, responses, None, [False] * 4, 0, world.device)
    micro_batches = pack(rollout, torch.arange(4), Compute(token_budget=1000), world)
    # With slices, the micro-batches of other ranks have no rows here.
    packed = torch.cat([response_logprobs(model, micro, temperature=1.0)[0] for micro in micro_batches])  # (4, 4)
    alone = torch.stack([own_logprobs(model, pack_groups(rollout, [[row]]), never) for row in range(4)])
    reshard(model)
    if (packed - alone).norm() > tolerance * (alone - alone.mean()).norm():
        raise BadInput(
            f"--model {model_path}: {model.config.model_type} models are not supported, because packed rows change "
            "their log-probs: their layers let packed sequences see each other, or their logits are neither scaled nor "
            f"capped products with the head; {SUPPORTED}"
        )


def own_logprobs(model: nn.Module, micro: MicroBatch, never: tuple[int, ...]) -> torch.Tensor:
    """Log-probs (R,) at temperature 1 from the logits of transformers' own forward."""
    row = {"input_ids": micro.input_ids, "position_ids": micro.position_ids, "spans": micro.spans}
    logits = model(**row, use_cache=False).logits[0, micro.predictors].float()  # (R, V)
    logits[:, list(never)] = -torch.inf
    return logits.log_softmax(-1).gather(1, micro.targets[:, None])[:, 0]


def class_of(config, value_head: bool) -> type:
    """transformers' class of a causal language model, or of one with a value for each token instead of logits."""
    if value_head and not image_tokens(config):
        return AutoModelForTokenClassification
    return causal_class(config)


def skeleton(config, model_path: str, value_head: bool = False) -> nn.Module:
    """The model without weights, on the meta device. Raises BadInput for one that the packed forward gets wrong."""
    refused = f"--model {model_path}: {config.model_type} models are not supported, because of"
    if value_head:
        config.num_labels = 1
        config.classifier_dropout = 0.0
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False  # a value head ties nothing
    try:
        with torch.device("meta"):
            model = class_of(config, value_head).from_config(config, dtype=torch.float32)
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise BadInput(f"--model {model_path}: config.json describes no model: {error}") from None
        missing = "the value head that transformers lacks" if value_head else "their encoder"
        raise BadInput(f"{refused} {missing}; {SUPPORTED}") from None
    if image_tokens(config):
        from common.trainer import vision

        vision.check_family(config, refused)
        if value_head:
            vision.add_value_head(model)
    if unsupported := unsupported_part(model, config.get_text_config()):
        raise BadInput(f"{refused} {unsupported}")
    return model


def unsupported_part(model: nn.Module, config) -> str:
    """The part of the layers that the packed forward would get wrong, or "". config: that of the decoder."""
    layers = getattr(decoder_of(model), "layers", [])
    if not layers or not all(hasattr(layer, "self_attn") for layer in layers) or not model._supports_attention_backend:
        return f"layers unlike Llama's; {SUPPORTED}"
    # Chunked and linear attention would need a mask or a state, which packed rows do not have.
    kinds = set(getattr(config, "layer_types", None) or [])
    other = kinds - {"full_attention", "sliding_attention"}
    if other:
        return f"{', '.join(sorted(other))} in some layers; {SUPPORTED}"
    # The attention function must be told about a window. The mask alone is lost.
    has_windows = getattr(config, "sliding_window", None) and (not kinds or "sliding_attention" in kinds)
    if has_windows and "sliding_window=" not in inspect.getsource(type(layers[0].self_attn)):
        return f"windows: this family passes them only through the mask, which packed rows do not use; {SUPPORTED}"
    if getattr(getattr(model, "lm_head", None), "bias", None) is not None:
        return f"a head with a bias; {SUPPORTED}"
    noise = [name for name in NOISE if getattr(config, name, 0)]
    if noise:
        return f"random layers: set {', '.join(noise)} to 0 in config.json"
    return ""


def token_logprobs(
    self, micro: MicroBatch, temperature: float, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs and entropies, (R,) float32, of the R response tokens of one packed row."""
    hidden = hidden_states(self, micro)
    head = self.get_output_embeddings().weight
    shape = logit_shape(self.config, temperature)
    logprobs, entropy = ChunkedLogprobs.apply(hidden, head, micro.targets, shape, with_entropy)
    return logprobs, entropy if with_entropy else None


def hidden_states(self, micro: MicroBatch) -> torch.Tensor:
    """The decoder's last hidden states, (R, hidden size), at the predictors of the R response tokens of a row."""
    # base_model leaves out the head, which would make logits of prompts, too.
    hidden = self.base_model(
        input_ids=micro.input_ids, position_ids=micro.position_ids, use_cache=False, spans=micro.spans, **micro.images
    )
    return hidden.last_hidden_state[0].index_select(0, micro.predictors)


def logit_shape(config, temperature: float) -> LogitShape:
    """How a family's logits, at a temperature, follow from the products of hidden states and head.

    At temperature 1 most families have the products themselves; Cohere and Granite scale them, Gemma 2 caps them.
    """
    never = image_tokens(config)  # the engine does not sample them either
    config = config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    return LogitShape(temperature / scale, None if cap is None else cap / temperature, never)


def token_values(self, micro: MicroBatch) -> torch.Tensor:
    """Values, (R,) float32, before the R response tokens of one packed row: the value of the text up to there."""
    hidden = hidden_states(self, micro).float()  # (R, hidden size)
    values = F.linear(hidden, self.score.weight.float(), self.score.bias.float())  # (R, 1)
    return values.squeeze(-1).clone()  # FSDP warns of a view


def reduce_gradients_after(micro: MicroBatch, model: nn.Module) -> None:
    """Tell FSDP what to do with the gradients of the backward that follows this micro-batch's forward.

    Only the last micro-batch of an optimizer step reduces gradients over the ranks, layer by layer. Until then each
    rank keeps whole gradients in float32. If these would take too much memory, or with offload, every backward reduces
    its gradients over the ranks that share one copy of the weights, and the last backward also over the copies. The
    sums differ only by rounding.
    """
    model.set_requires_gradient_sync(micro.last or not model.whole_gradients)
    model.set_requires_all_reduce(micro.last)


def response_logprobs(
    policy: nn.Module, micro: MicroBatch, temperature: float, with_entropy: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs and entropies (n, T) of a micro-batch's response tokens, 0 where there is none.

    temperature: the temperature of sampling. Collective: every rank calls it equally often.
    """
    if torch.is_grad_enabled():
        reduce_gradients_after(micro, policy)
    logprobs, entropy = policy.token_logprobs(micro, temperature, with_entropy)
    return place(logprobs, micro), place(entropy, micro) if with_entropy else None


def response_values(critic: nn.Module, micro: MicroBatch) -> torch.Tensor:
    """Values (n, T) before each response token of a micro-batch, 0 where there is none. Collective, see above."""
    if torch.is_grad_enabled():
        reduce_gradients_after(micro, critic)
    return place(critic.token_values(micro), micro)


def place(values: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
    """(R,) -> (n, T): move values of packed tokens to their rows. The rows of a slice may be on another rank."""
    # With sequence parallelism each rank has the values of its slice.
    values = micro.spans.to_owner(values)
    shape = micro.response_mask.shape
    return values.new_zeros(shape.numel()).index_copy(0, micro.scatter, values).view(shape)


@torch.no_grad()
def frozen_logprobs(
    policy: nn.Module, rollout: Rollout, micro_batches: list[MicroBatch], temperature: float
) -> torch.Tensor:
    """Log-probs (N, T) without gradient for the rows in these micro-batches, 0 elsewhere. Collective, see above."""
    logprobs = [response_logprobs(policy, micro, temperature, with_entropy=False)[0] for micro in micro_batches]
    reshard(policy)
    return whole_rollout(logprobs, rollout, micro_batches)


@torch.no_grad()
def frozen_values(critic: nn.Module, rollout: Rollout, micro_batches: list[MicroBatch]) -> torch.Tensor:
    """Values (N, T) without gradient for the rows in these micro-batches, 0 elsewhere. Collective, see above."""
    values = [response_values(critic, micro) for micro in micro_batches]
    reshard(critic)
    return whole_rollout(values, rollout, micro_batches)


def whole_rollout(results: list[torch.Tensor], rollout: Rollout, micro_batches: list[MicroBatch]) -> torch.Tensor:
    """Results (n, T) of each micro-batch, at their rows in (N, T). A dummy's rows have been computed elsewhere."""
    out = torch.zeros_like(rollout.rollout_logprobs)  # (N, T)
    for micro, result in zip(micro_batches, results):
        out[micro.rows] = torch.where(micro.response_mask, result, out[micro.rows])
    return out


def reshard(model: nn.Module) -> None:
    """Free gathered weights after forwards without a backward. Otherwise they would stay after the next update."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
