"""Loads Hugging Face weights into an FSDP2 model, and computes log-probs or values of response tokens.

Trained weights are float32. All weights are sharded over the ranks, or over each group of --shard-size ranks, and
gathered layer by layer in the compute dtype. Gradients are summed over all ranks in float32.
"""

from collections import Counter
from collections.abc import Callable
from types import MethodType

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from transformers import AttentionInterface, AutoConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange
from transformers.modeling_layers import GradientCheckpointingLayer

from common.data import families, weights
from common.data.tokenizer import causal_class, image_tokens
from common.errors import BadInput, raise_together
from common.placement import World, rank_memory
from common.rollout.rollout import Rollout
from common.trainer.attention import packed_attention
from common.trainer.batching import Compute, MicroBatch
from common.trainer.forward import hidden_states, place, token_logprobs, token_values
from common.trainer.kernels import use_kernels
from common.trainer.packing_check import choose_forward, own_forward
from common.trainer.parts import all_attentions, decoder_of, layers_of, reset_iter_state

# Not noise, despite its name: how far below the best expert another may score and still be chosen (Phi-MoE).
NO_NOISE = (("phimoe", "router_jitter_noise"),)
GRADIENT_MEMORY_SHARE = 0.1  # share of a rank's memory that unreduced gradients may take between micro-batches


def load(
    model_path: str,
    world: World,
    dtype: torch.dtype,
    compute: Compute = Compute(),
    *,
    offload: bool = False,
    value_head: bool = False,
    frozen: bool = False,
) -> nn.Module:
    """Load a causal language model and shard it: one FSDP unit for each decoder layer, and one for all that is left,
    such as the embeddings. Collective: every rank calls it. Raises BadInput, on all ranks.

    dtype: data type of forward and backward. offload: parameters, gradients and optimizer state live in host memory,
    and layers come to the GPU one at a time (with --shard-size, gradients stay there until the last micro-batch).
    value_head: one value for each token instead of logits, 0 at the start unless model_path has a trained head. frozen:
    nothing is trained, and the weights are kept in dtype. FSDP treats some methods of the model as its forward:
    `token_logprobs` or, with a value head, `token_values`, and those that the check of packing needs.
    """
    if world.min(dtype.itemsize) < world.max(dtype.itemsize):  # each rank measures what --dtype auto stands for
        raise BadInput("the ranks' CPUs differ in what --dtype auto chooses: give --dtype float32 or bfloat16")
    model = build(model_path, world, dtype, compute, value_head)
    state, buffers, renamed = {}, {}, []
    error = None
    if world.is_main:
        try:
            state, buffers, renamed = read_weights(model, model_path, compute)
        except BadInput as refused:
            error = refused
    raise_together(error)  # the other ranks would wait for the weights
    if not world.max(len(renamed)):
        # A prefix that the files do not have must not be written either (Qwen3.5's text model).
        model._weight_conversions = [c for c in model._weight_conversions if not isinstance(c, PrefixChange)]
    use_kernels(model, compute.kernels)
    if compute.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        # transformers has made the output of every embedding require a gradient, which only reentrant checkpoints need.
        # A frozen vision tower would keep its activations, and the backward would go through it.
        model.disable_input_require_grads()
    if frozen:
        model.requires_grad_(False)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)  # each forward would cast it anyway
    shard(model, world, dtype, offload)
    fill(model, world, state, buffers, offload)
    families.fix_longrope(model, compute.longest)

    # With --activation-checkpointing a layer keeps only its inputs. transformers does that only in training mode. All
    # other modules stay in eval mode: in training mode some families add noise, ask for inputs that only images have
    # (Gemma 3), or read a weight past the module that adapts it (Mamba's fused kernel).
    model.eval()
    for layer in checkpointed(model, compute):
        layer.training = True

    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    unused = may_leave_unused(model)
    model.whole_gradients = keeps_whole_gradients(unused, trained, dtype, offload, world.min(rank_memory()))
    for function in (hidden_states, own_forward, token_values if value_head else token_logprobs):
        add_forward(model, function)
    choose_forward(model, model_path, world, compute, tolerance=0.1 if dtype.itemsize < 4 else 1e-3)
    reshard(model)
    return model


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
    model = skeleton(config, model_path, value_head)
    # weight_sync renames weights with it. It is found by the modules' classes, which FSDP replaces.
    model._weight_conversions = get_model_conversion_mapping(model, add_legacy=False)
    if image_tokens(config):
        from common.trainer import vision

        vision.prepare(model, compute.train_vision)
    for name, parameter in model.named_parameters():
        if ".indexer." in name:  # it chooses tokens, and no gradient passes through a choice (DeepSeek-V3.2, GLM-5)
            parameter.requires_grad_(False)
    if compute.lora_rank or compute.freeze_router:
        from common.trainer import lora

        lora.freeze(model, compute, dtype)
    return model


def read_weights(model: nn.Module, model_path: str, compute: Compute) -> tuple[dict, dict, list]:
    """The weights in the files, in float32; all buffers, of which some are in no file, such as rotary frequencies; and
    the conversions of names that differ by a prefix.

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
    state = source.state_dict()
    if compute.lora_rank:
        from common.trainer import lora

        state |= lora.initial(model)
    renamed = [conversion for conversion in source._weight_conversions if isinstance(conversion, PrefixChange)]
    return state, dict(source.named_buffers()), renamed


def shard(model: nn.Module, world: World, dtype: torch.dtype, offload: bool) -> None:
    """Cut the parameters over the ranks. FSDP gathers one decoder layer at a time, in the compute dtype."""
    settings = {"mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)}
    if world.mesh.size(-1) == 1 and not offload:
        # A layer keeps its weights in the compute dtype until its backward. Freed after the forward, as on several
        # ranks, they would have to be cast again.
        settings["reshard_after_forward"] = False
    if offload:
        settings["offload_policy"] = CPUOffloadPolicy(pin_memory=world.device.type == "cuda")
    for module in (*layers_of(model), model):
        fully_shard(module, mesh=world.mesh, **settings)
        # Some parameters may be used on some ranks only (may_leave_unused). Without a gradient of 0 on the other ranks,
        # these would reduce other shapes.
        if hasattr(module, "set_reduce_scatter_unused_params"):  # torch 2.11 has none
            module.set_reduce_scatter_unused_params(True)
        if world.size > 1:
            # Add up the gradients of all ranks; FSDP's default is their mean. The denominator of each rank's loss
            # counts the whole mini-batch already. The second line is for gloo, which cannot scale while it reduces.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def checkpointed(model: nn.Module, compute: Compute) -> list[nn.Module]:
    """The layers that --activation-checkpointing recomputes: the decoder's, and those of a tower that is trained."""
    if not compute.train_vision:
        return list(layers_of(model))
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def may_leave_unused(model: nn.Module) -> bool:
    """Whether a micro-batch may use only some of the parameters: without images, or DeepSeek-V4's compressors."""
    return bool(image_tokens(model.config)) or any("compressor" in name for name, _ in model.named_parameters())


def keeps_whole_gradients(unused: bool, trained: int, dtype: torch.dtype, offload: bool, memory: float) -> bool:
    """Whether each rank keeps whole gradients between micro-batches, in float32; see plan_gradient_reduction().

    unused: may_leave_unused(). trained: number of trained parameters. memory: bytes of the rank that has least.
    """
    has_room = 4 * trained <= GRADIENT_MEMORY_SHARE * memory
    # FSDP adds up whole gradients in float32. But what the last micro-batch is the first to use, or nothing has used,
    # still has a gradient in dtype, and FSDP refuses to reduce both kinds together.
    of_two_kinds = dtype.itemsize < 4 and unused
    return has_room and not offload and not of_two_kinds


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
    """Make the function a method of the model that FSDP treats as a forward: it gathers the weights for each call."""
    setattr(model, function.__name__, MethodType(function, model))
    register_fsdp_forward_method(model, function.__name__)


def load_reference(policy: nn.Module, model_path: str, world: World, dtype, compute: Compute, *, offload: bool):
    """The policy as it is before training, frozen: a second copy, or with LoRA the policy without its adapters, which
    takes no memory. frozen_logprobs takes it. Collective: every rank calls it.
    """
    if compute.lora_rank:
        from common.trainer.lora import WithoutAdapters

        return WithoutAdapters(policy)
    return load(model_path, world, dtype, compute, offload=offload, frozen=True)


def class_of(config, value_head: bool) -> type | None:
    """transformers' class of a causal language model, or a subclass with a value for each token instead of logits.

    None if transformers has no such class.
    """
    found = causal_class(config)._model_mapping.get(type(config), None)
    return with_values(found) if value_head and found else found


def with_values(causal: type) -> type:
    """A subclass with `score`, one value for each token, in the place of the head. It starts at 0.

    transformers has such classes only for some families, and some of these give the head another name.
    """

    def init(self, config):
        causal.__init__(self, config)
        head = causal.get_output_embeddings(self)
        for name, child in list(self.named_children()):
            if child is head:
                delattr(self, name)
        self.score = nn.Linear(config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.score.weight)
        nn.init.zeros_(self.score.bias)

    # Under the name of the family's class, transformers finds what it knows about the names of its weights.
    own = {"__init__": init, "get_output_embeddings": lambda self: None, "__module__": causal.__module__}
    return type(causal.__name__, (causal,), own)


def skeleton(config, model_path: str, value_head: bool = False) -> nn.Module:
    """The model without weights, on the meta device, its random layers switched off. It changes `config`.

    Raises BadInput for a model that is no causal decoder, or whose layers share weights.
    """
    refused = f"--model {model_path}: {config.model_type} models are not supported, because"
    if config.is_encoder_decoder:
        raise BadInput(f"{refused} of their encoder: a policy is a decoder that goes on with its prompt")
    if value_head:
        config.num_labels = 1  # rewards/model.py asks an exported reward model for it
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False  # a value head ties nothing
    silence(config.get_text_config())
    model_class = class_of(config, value_head)
    if model_class is None:
        raise BadInput(f"{refused} transformers has no decoder of them that predicts the next token")
    try:
        with torch.device("meta"):
            model = model_class._from_config(config, dtype=torch.float32)
    except ValueError as error:
        raise BadInput(f"--model {model_path}: config.json describes no model: {error}") from None
    if not all(attention.is_causal for attention in all_attentions(model)):
        raise BadInput(f"{refused} their tokens see later ones, which a policy has not sampled yet")
    weights_of_layers = Counter(weight for layer in layers_of(model) for weight in layer.parameters())
    if any(count > 1 for count in weights_of_layers.values()):
        raise BadInput(f"{refused} several of their layers share weights, which FSDP cannot gather layer by layer")
    for module in decoder_of(model).modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if image_tokens(config):
        from common.trainer import vision

        vision.check_family(config, f"{refused} of", with_images=False)
    return model


def silence(config) -> dict[str, float]:
    """Switch off dropout and other noise of the layers. Returns what was on.

    The engine samples without noise, so log-probs with noise would belong to another policy.
    """
    noise = {}
    for name, value in vars(config).items():
        named_so = ("drop" in name or "jitter" in name) and (config.model_type, name) not in NO_NOISE
        if named_so and isinstance(value, int | float) and value:
            noise[name] = value
    for name in noise:
        setattr(config, name, 0.0)
    return noise


def plan_gradient_reduction(model: nn.Module, micro: MicroBatch) -> None:
    """Tell FSDP what to do with the gradients of the backward that follows this micro-batch's forward.

    Only the last micro-batch of an optimizer step reduces gradients over the ranks, layer by layer. Until then each
    rank keeps whole gradients in float32. If load() has found that it can't (model.whole_gradients), every backward
    reduces its gradients over the ranks that share one copy of the weights, and the last backward also over the copies.
    The sums differ only by rounding.
    """
    model.set_requires_gradient_sync(micro.last or not model.whole_gradients)
    model.set_requires_all_reduce(micro.last)


def response_logprobs(
    policy: nn.Module,
    micro: MicroBatch,
    temperature: float,
    with_entropy: bool = True,
    entropy_gradient: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs and entropies (n, T) of a micro-batch's response tokens, 0 on padding.

    An environment's tokens have some, too: a loss multiplies by micro.response_mask, which is False there.
    temperature: the temperature of sampling. with_entropy: False gives None in the place of the entropies.
    entropy_gradient: entropies have a gradient, too. It costs the backward one more pass over each chunk of logits.
    With gradients on, the backward must come before the next call, which decides anew whether gradients are reduced.
    Collective: every rank calls it equally often.
    """
    if torch.is_grad_enabled():
        plan_gradient_reduction(policy, micro)
    logprobs, entropy = policy.token_logprobs(micro, temperature, with_entropy, entropy_gradient)
    if not with_entropy:
        return place(logprobs, micro), None
    return place(logprobs, micro), place(entropy, micro)


def response_values(critic: nn.Module, micro: MicroBatch) -> torch.Tensor:
    """Values (n, T) before each response token of a micro-batch, 0 on padding. Those of an environment have some, too.

    Collective: every rank calls it equally often.
    """
    if torch.is_grad_enabled():
        plan_gradient_reduction(critic, micro)
    return place(critic.token_values(micro), micro)


@torch.no_grad()
def frozen_logprobs(
    policy: nn.Module, rollout: Rollout, micro_batches: list[MicroBatch], temperature: float
) -> torch.Tensor:
    """Log-probs (N, T) without gradient for the rows in these micro-batches, 0 elsewhere.

    policy: the policy as it is now, or a frozen model. Collective: every rank calls it equally often.
    """
    logprobs = [response_logprobs(policy, micro, temperature, with_entropy=False)[0] for micro in micro_batches]
    reshard(policy)
    return whole_rollout(logprobs, rollout, micro_batches)


@torch.no_grad()
def frozen_values(critic: nn.Module, rollout: Rollout, micro_batches: list[MicroBatch]) -> torch.Tensor:
    """Values (N, T) without gradient for the rows in these micro-batches, 0 elsewhere.

    Collective: every rank calls it equally often.
    """
    values = [response_values(critic, micro) for micro in micro_batches]
    reshard(critic)
    return whole_rollout(values, rollout, micro_batches)


def whole_rollout(results: list[torch.Tensor], rollout: Rollout, micro_batches: list[MicroBatch]) -> torch.Tensor:
    """Results (n, T) of each micro-batch, at their rows in (N, T). A dummy's mask is False, so it changes nothing."""
    out = torch.zeros_like(rollout.rollout_logprobs)  # (N, T)
    for micro, result in zip(micro_batches, results):
        out[micro.rows] = torch.where(micro.response_mask, result, out[micro.rows])
    return out


def reshard(model: nn.Module) -> None:
    """Free gathered weights after forwards without a backward.

    FSDP does not gather what is gathered already, so forwards after the next update would still use the old weights.
    """
    modules = list(model.modules())
    for module in modules:
        if isinstance(module, FSDPModule):
            module.reshard()
    # FSDP lists the layers of each forward until the next backward. A frozen model has none, so its list would grow.
    if not any(parameter.requires_grad for module in modules for parameter in module.parameters(recurse=False)):
        reset_iter_state(modules[0])
