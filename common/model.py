"""Hugging Face weights as an FSDP2 model, and its one forward: log-probs of response tokens, packed.

float32 master weights sharded over all ranks, gathered layer by layer in the compute dtype; gradients are
averaged over ranks in float32.
"""

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
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
)
from transformers.utils.logging import disable_progress_bar

from common.batching import Compute, MicroBatch, pack_bins, pack_groups, rank_memory
from common.errors import BadInput
from common.layers import use_kernels
from common.logits import ChunkedLogprobs
from common.placement import World
from common.rollout import Rollout, collate
from common.safe_pickle import has_safetensors
from common.sequence_parallel import SlicedSpans, sliced_attention, to_owner

WHOLE_GRADIENTS = 0.1  # of a rank's memory that unreduced gradients may take between micro-batches


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

    Only rank 0 reads the weights; the others receive their shards. The model has a method that FSDP treats as
    a forward: `token_logprobs` or, with a value head, `token_values` (below). value_head: one number a token in
    place of the vocabulary; 0 everywhere at first, unless model_path holds a trained one. offload: parameters,
    gradients and optimizer state live in host memory, and layers come to the GPU one at a time.
    """
    kind, forward = (
        (AutoModelForTokenClassification, token_values) if value_head else (AutoModelForCausalLM, token_logprobs)
    )
    disable_progress_bar()  # transformers': they would tear the run's own
    # Its loops follow the lengths in a row: compiled with the layers around it, it would be so anew for each row.
    AttentionInterface.register("packed", torch.compiler.disable(sliced_attention))
    AttentionMaskInterface.register("packed", lambda *args, **kwargs: None)  # the lengths say it all
    config = AutoConfig.from_pretrained(model_path)
    config._attn_implementation = "packed"
    if value_head:
        config.num_labels, config.classifier_dropout, config.tie_word_embeddings = 1, 0.0, False
    check_architecture(config, model_path)
    state = {}
    buffers = {}
    if world.is_main:
        source, info = kind.from_pretrained(
            model_path, config=config, dtype=torch.float32, output_loading_info=True,
            use_safetensors=has_safetensors(model_path),
        )  # fmt: skip
        if "score.weight" in info["missing_keys"]:
            nn.init.zeros_(source.score.weight)  # a random value would be noise in every advantage
        state, buffers = source.state_dict(), dict(source.named_buffers())
    with torch.device("meta"):
        model = kind.from_config(config, dtype=torch.float32)
    use_kernels(model, compute.kernels)
    if compute.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    settings = {"mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)}
    if world.mesh.size(-1) == 1:
        settings["reshard_after_forward"] = False  # nothing is saved by gathering from oneself twice
    if offload:
        settings["offload_policy"] = CPUOffloadPolicy(pin_memory=world.device.type == "cuda")
    for layer in model.base_model.layers:
        fully_shard(layer, mesh=world.mesh, **settings)
    fully_shard(model, mesh=world.mesh, **settings)
    model.to_empty(device="cpu" if offload else world.device)
    model.tie_weights()
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    for name, buffer in list(model.named_buffers()):  # rotary frequencies: not part of a state dict
        path, _, last = name.rpartition(".")
        whole = buffers[name].to(world.device) if world.is_main else buffer.to(world.device)
        dist.broadcast(whole, src=0)
        setattr(model.get_submodule(path), last, whole)  # on the GPU even where parameters are offloaded
    size = 4 * sum(parameter.numel() for parameter in model.parameters())
    model.whole_gradients = not offload and size <= WHOLE_GRADIENTS * rank_memory()
    setattr(model, forward.__name__, MethodType(forward, model))
    register_fsdp_forward_method(model, forward.__name__)
    if not value_head:
        check_packing(model, model_path, world, 0.1 if dtype.itemsize < 4 else 1e-3)
    return model.train()


@torch.no_grad()
def check_packing(model: nn.Module, model_path: str, world: World, tolerance: float) -> None:
    """Refuse an architecture whose tokens see more of a packed row than their own sequence, by trying it.

    Four responses to two prompts, with the prompts computed once, against each sequence alone: convolutions and
    recurrent states run on into the neighbour. Collective. Raises BadInput.
    """
    ids = torch.arange(3, 3 + 40).view(4, 10) % model.config.vocab_size
    prompts, responses = [ids[i // 2, :6].tolist() for i in range(4)], [row[6:].tolist() for row in ids]
    rollout = collate(prompts, responses, None, [False] * 4, 0, world.device)
    alone = [response_logprobs(model, pack_groups(rollout, [[i]]), 1.0)[0] for i in range(4)]
    together = [response_logprobs(model, micro, 1.0)[0] for micro in pack_bins(rollout, [[[0, 1], [2, 3]]], world)]
    alone, together = torch.cat(alone), torch.cat(together)  # of another rank's turn there are no rows
    reshard(model)
    if (together - alone).norm() > tolerance * (alone - alone.mean()).norm():
        raise BadInput(f"--model {model_path}: layers of {model.config.model_type} let packed sequences see each other")


def check_architecture(config, model_path: str) -> None:
    """Refuse what the packed forward would compute wrongly without a word. Raises BadInput."""
    if (
        getattr(config, "lm_head_bias", False)
        or getattr(config, "final_logit_softcapping", None)
        or getattr(config, "logit_scale", None)
    ):
        raise BadInput(f"--model {model_path}: biased, scaled or capped logits ({config.model_type}) are not supported")
    if "sliding_attention" in (getattr(config, "layer_types", None) or []) or getattr(config, "attention_dropout", 0):
        raise BadInput(f"--model {model_path}: sliding windows or attention dropout are not supported")


def token_logprobs(
    self, input_ids, position_ids, spans, predictors, targets, temperature: float, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs and entropies, (R,) float32, of R target tokens predicted at R places of one packed row."""
    hidden = self.base_model(input_ids=input_ids, position_ids=position_ids, use_cache=False, spans=spans)
    hidden = hidden.last_hidden_state[0].index_select(0, predictors)  # (R, hidden size)
    head = self.get_output_embeddings().weight
    logprobs, entropy = ChunkedLogprobs.apply(hidden, head, targets, temperature, with_entropy)
    return logprobs, entropy if with_entropy else None


def token_values(self, input_ids, position_ids, spans, predictors) -> torch.Tensor:
    """Values, (R,) float32, at R places of one packed row: of the response so far, before the next token."""
    hidden = self.base_model(input_ids=input_ids, position_ids=position_ids, use_cache=False, spans=spans)
    hidden = hidden.last_hidden_state[0].index_select(0, predictors).float()
    return F.linear(hidden, self.score.weight.float(), self.score.bias.float()).squeeze(-1)


def accumulate(model: nn.Module, *, last: bool) -> None:
    """Before each backward of an optimizer step: only the last reduces gradients over the ranks, layer by layer.

    Until then each rank keeps whole gradients in float32. Where they would take too much of its memory, or with
    offload, each backward reduces its own, over the ranks of one copy of the weights; over the copies the last does.
    The sums are the same but for rounding.
    """
    model.set_requires_gradient_sync(last or not model.whole_gradients)
    model.set_requires_all_reduce(last)


def response_logprobs(
    policy: nn.Module, micro: MicroBatch, temperature: float, with_entropy: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs and entropies (n, T) of a micro-batch's response tokens, 0 where there is none.

    temperature: the one the responses were sampled with. Collective: every rank runs the same number of these.
    """
    logprobs, entropy = policy.token_logprobs(
        micro.input_ids, micro.position_ids, micro.spans, micro.predictors, micro.targets, temperature, with_entropy
    )
    return place(logprobs, micro), place(entropy, micro) if with_entropy else None


def response_values(critic: nn.Module, micro: MicroBatch) -> torch.Tensor:
    """Values (n, T) before each response token of a micro-batch, 0 where there is none. Collective, as above."""
    return place(critic.token_values(micro.input_ids, micro.position_ids, micro.spans, micro.predictors), micro)


def place(values: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
    """(R,) -> (n, T): packed response tokens back in their rows; of a slice, on the rank whose rows they are."""
    if isinstance(micro.spans, SlicedSpans):
        values = to_owner(values, micro.spans)
    shape = micro.response_mask.shape
    return values.new_zeros(shape.numel()).index_copy(0, micro.scatter, values).view(shape)


def frozen_logprobs(
    policy: nn.Module, rollout: Rollout, micro_batches: list[MicroBatch], temperature: float
) -> torch.Tensor:
    """Log-probs (N, T) without gradient of the rows in these micro-batches, 0 elsewhere. Collective."""
    return frozen(policy, rollout, micro_batches, lambda micro: response_logprobs(policy, micro, temperature)[0])


def frozen_values(critic: nn.Module, rollout: Rollout, micro_batches: list[MicroBatch]) -> torch.Tensor:
    """Values (N, T) without gradient of the rows in these micro-batches, 0 elsewhere. Collective."""
    return frozen(critic, rollout, micro_batches, lambda micro: response_values(critic, micro))


@torch.no_grad()
def frozen(model: nn.Module, rollout: Rollout, micro_batches: list[MicroBatch], forward) -> torch.Tensor:
    """forward(micro) -> (n, T), gathered into (N, T)."""
    out = torch.zeros_like(rollout.rollout_logprobs)
    for micro in micro_batches:
        out[micro.rows] = torch.where(micro.response_mask, forward(micro), out[micro.rows])
    reshard(model)
    return out


def reshard(model: nn.Module) -> None:
    """After forwards without a backward, which would have done it: whole weights would outlive the next update."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
