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
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
)
from transformers.utils.logging import disable_progress_bar

from common.batching import MicroBatch
from common.placement import BadInput, World
from common.rollout import Rollout

LOGITS_PER_CHUNK = 2**25  # float32 elements: (tokens, vocabulary) logits exist 128 MiB at a time


def load(
    model_path: str,
    world: World,
    dtype: torch.dtype,
    activation_checkpointing: bool = False,
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
    AttentionInterface.register("packed", packed_attention)
    AttentionMaskInterface.register("packed", lambda *args, **kwargs: None)  # the lengths say it all
    config = AutoConfig.from_pretrained(model_path)
    config._attn_implementation = "packed"
    if value_head:
        config.num_labels, config.classifier_dropout, config.tie_word_embeddings = 1, 0.0, False
    check_architecture(config, model_path)
    state = {}
    buffers = {}
    if world.is_main:
        source, info = kind.from_pretrained(model_path, config=config, dtype=torch.float32, output_loading_info=True)
        if "score.weight" in info["missing_keys"]:
            nn.init.zeros_(source.score.weight)  # a random value would be noise in every advantage
        state, buffers = source.state_dict(), dict(source.named_buffers())
    with torch.device("meta"):
        model = kind.from_config(config, dtype=torch.float32)
    if activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    settings = {"mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)}
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
    setattr(model, forward.__name__, MethodType(forward, model))
    register_fsdp_forward_method(model, forward.__name__)
    return model.train()


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
    self, input_ids, position_ids, seqlens, predictors, targets, temperature: float, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs and entropies, (R,) float32, of R target tokens predicted at R places of one packed row.

    Logits are computed at those places alone, in chunks, and again in the backward:
    no (tokens, vocabulary) float32 matrix of the whole row ever exists.
    """
    hidden = self.base_model(input_ids=input_ids, position_ids=position_ids, use_cache=False, seqlens=seqlens)
    hidden = hidden.last_hidden_state[0, predictors]  # (R, hidden size)
    head = self.get_output_embeddings()

    def logprobs_of(hidden: torch.Tensor, targets: torch.Tensor):
        logits = Float32Linear.apply(hidden, head.weight) / temperature  # (r, V)
        log_z = logits.logsumexp(-1)
        logprobs = logits.gather(-1, targets[:, None]).squeeze(-1) - log_z
        if not with_entropy:
            return logprobs, None
        with torch.no_grad():
            return logprobs, log_z - ((logits - log_z[:, None]).exp() * logits).sum(-1)

    chunk = max(1, LOGITS_PER_CHUNK // self.config.vocab_size)
    if len(targets) <= chunk:
        return logprobs_of(hidden, targets)
    parts = [
        checkpoint(logprobs_of, h, t, use_reentrant=False) for h, t in zip(hidden.split(chunk), targets.split(chunk))
    ]
    logprobs = torch.cat([part[0] for part in parts])
    return logprobs, torch.cat([part[1] for part in parts]) if with_entropy else None


class Float32Linear(torch.autograd.Function):
    """hidden (R, d), weight (V, d) -> hidden weight^T (R, V) in float32, whatever they are; the engine does the same.

    A logit of 20 rounded to bfloat16 is up to 0.06 off: the largest part of the gap between trainer and engine.
    """

    @staticmethod
    def forward(ctx, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        if hidden.is_cuda and hidden.dtype != torch.float32:
            return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
        return F.linear(hidden.float(), weight.float())

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, weight = ctx.saved_tensors
        grad = grad.to(hidden.dtype)
        return grad @ weight, grad.t() @ hidden


def token_values(self, input_ids, position_ids, seqlens, predictors) -> torch.Tensor:
    """Values, (R,) float32, at R places of one packed row: of the response so far, before the next token."""
    hidden = self.base_model(input_ids=input_ids, position_ids=position_ids, use_cache=False, seqlens=seqlens)
    hidden = hidden.last_hidden_state[0, predictors].float()
    return F.linear(hidden, self.score.weight.float(), self.score.bias.float()).squeeze(-1)


def response_logprobs(
    policy: nn.Module, micro: MicroBatch, temperature: float, with_entropy: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs and entropies (n, T) of a micro-batch's response tokens, 0 where there is none.

    temperature: the one the responses were sampled with. Collective: every rank runs the same number of these.
    """
    logprobs, entropy = policy.token_logprobs(
        micro.input_ids, micro.position_ids, micro.seqlens, micro.predictors, micro.targets, temperature, with_entropy
    )
    return place(logprobs, micro), place(entropy, micro) if with_entropy else None


def response_values(critic: nn.Module, micro: MicroBatch) -> torch.Tensor:
    """Values (n, T) before each response token of a micro-batch, 0 where there is none. Collective, as above."""
    return place(critic.token_values(micro.input_ids, micro.position_ids, micro.seqlens, micro.predictors), micro)


def place(values: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
    """(R,) -> (n, T): packed response tokens back in their rows."""
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
    model.reshard()  # no backward will: the embeddings would stay whole on every rank
    return out


def packed_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, seqlens=None, **kwargs):
    """Causal attention inside each of the packed sequences: (1, heads, L, d) -> (1, L, heads, d).

    On CUDA one variable-length kernel; elsewhere neighbours of similar length share one padded call. Padding
    stands on the right, so a causal mask alone keeps it out: no token sees a later one.
    """
    grouped = query.shape[1] != key.shape[1]  # grouped-query attention
    if query.is_cuda and query.dtype != torch.float32:
        ends = torch.tensor([0, *seqlens], device=query.device).cumsum(0, dtype=torch.int32)
        flat = (x[0].transpose(0, 1) for x in (query, key, value))  # (L, heads, d)
        longest = max(seqlens)
        out = varlen_attn(*flat, ends, ends, longest, longest, scale=scaling, window_size=(-1, 0), enable_gqa=grouped)
        return out[None], None
    outputs, first = [], 0
    for lengths in similar_lengths(seqlens):
        last = first + sum(lengths)
        if min(lengths) == max(lengths):  # no padding: a view
            rows = [x[0, :, first:last].unflatten(1, (len(lengths), -1)).transpose(0, 1) for x in (query, key, value)]
            out = F.scaled_dot_product_attention(*rows, is_causal=True, scale=scaling, enable_gqa=grouped)
            outputs.append(out.transpose(1, 2).flatten(0, 1))
        else:
            lengths = torch.tensor(lengths, device=query.device)
            real = torch.arange(int(lengths.max()), device=query.device)[None] < lengths[:, None]  # (n, longest)
            rows = []
            for x in (query, key, value):
                padded = x.new_zeros(*real.shape, x.shape[1], x.shape[3])  # (n, longest, heads, d)
                padded[real] = x[0, :, first:last].transpose(0, 1)
                rows.append(padded.transpose(1, 2))
            out = F.scaled_dot_product_attention(*rows, is_causal=True, scale=scaling, enable_gqa=grouped)
            outputs.append(out.transpose(1, 2)[real])
        first = last
    return torch.cat(outputs)[None], None


def similar_lengths(seqlens: list[int], waste: float = 0.15) -> list[list[int]]:
    """Cut a list of lengths into runs whose padded size exceeds the real one by at most `waste`."""
    runs: list[list[int]] = []
    for length in seqlens:
        run = [*runs[-1], length] if runs else []
        if runs and max(run) * len(run) <= (1 + waste) * sum(run):
            runs[-1] = run
        else:
            runs.append([length])
    return runs
