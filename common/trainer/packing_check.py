"""Which models may be packed, and whether log-probs are right: decided by structure first, then by numbers.

why_not_packed() looks at the layers alone, so it can be asked before anything is loaded. The check's short texts cannot
show a longer window or chunk, so those are found in the layers. After loading, choose_forward() compares the trainer's
forward with transformers' own, which computes one sequence at a time with its plainest attention:

    packed rows    if they give other hidden states, each sequence gets a row of its own
    padded rows    if these do, too, a token's log-prob depends on later tokens, and the model is refused
    logits         if products with the head give other log-probs, the model's own forward makes the logits
"""

import inspect
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn
from transformers.utils.import_utils import (
    is_causal_conv1d_available,
    is_flash_linear_attention_available,
    is_mamba_2_ssm_available,
)

from common.data.families import PLAIN_ATTENTION, carries_state, layer_kinds
from common.data.tokenizer import image_tokens
from common.errors import BadInput, say
from common.placement import World
from common.rollout.rollout import Rollout, collate
from common.trainer.attention import NotPackable
from common.trainer.batching import Compute, pack
from common.trainer.forward import factors, logit_shape, own_logprobs, place
from common.trainer.logits import ChunkedLogprobs
from common.trainer.parts import (
    all_attentions,
    attentions_of,
    body_of,
    decoder_of,
    layers_of,
    reset_iter_state,
)

PROMPT_TOKENS = 36  # of the first two texts: enough to be shared
# Of different lengths, so that rows are padded. The prompts of the last two are one token: a state that leaks from the
# sequence before disturbs the first tokens most. After a longer prompt it could vanish in bfloat16's rounding.
RESPONSE_TOKENS = (4, 9, 4, 6)
SHORTEST = 2  # index of the shortest text, which comes first in a packed row
# Functions that a hybrid's layers call -> whether a kernel for them is installed, on a machine with a GPU.
KERNELS = {
    "causal_conv1d_fn(": is_causal_conv1d_available,
    "gated_delta_rule(": is_flash_linear_attention_available,
    "chunk_scan(": is_mamba_2_ssm_available,
}


def why_not_packed(model: nn.Module, compute: Compute) -> str:
    """Why packed rows would be wrong for this model, as a phrase after "because of". "" if its layers look right."""
    config = model.config.get_text_config()
    layers = layers_of(model)
    hybrid = any(map(carries_state, layers))
    if hybrid and not may_heed_boundaries(layers, compute):
        return "convolutions or recurrent states, which would run into the next sequence"
    # Empty if config.json names none.
    kinds = {kind for kind, layer in zip(layer_kinds(config), layers) if attentions_of(layer)}
    if other := kinds - PLAIN_ATTENTION - {"hybrid"}:  # attention beside Mamba in each layer (Falcon-H1)
        return f"{', '.join(sorted(other))} in some layers"
    if hybrid:  # not every layer has attention, and few of these classes declare _supports_attention_backend
        calls_function = all(mentions(attention, "ALL_ATTENTION_FUNCTIONS") for attention in all_attentions(model))
    else:
        calls_function = all(map(attentions_of, layers)) and model._supports_attention_backend
    if not calls_function:
        return "layers that do not call transformers' attention function"
    # The attention function must be told about a window. The mask alone is lost.
    has_windows = getattr(config, "sliding_window", None) and (not kinds or "sliding_attention" in kinds)
    if has_windows and not mentions(all_attentions(model)[0], "sliding_window="):
        return "windows, which this family puts only into the mask"
    return ""


def may_heed_boundaries(layers: list[nn.Module], compute: Compute) -> bool:
    """Whether a hybrid may be tried in packed rows: its kernels for a GPU are installed, no prompt is shared (its state
    would already include the first response), rows are whole, and nothing compiles its layers. Whether the kernels keep
    sequences apart is for the check after loading.
    """
    whole_rows = compute.sequence_parallel == 1 and not compute.shared_prompts
    if not whole_rows or compute.kernels != "eager":
        return False
    modules = [module for layer in layers for module in layer.modules()]
    mixers = [module for module in modules if any(isinstance(child, nn.Conv1d) for child in module.children())]
    return all(
        installed() for function, installed in KERNELS.items() if any(mentions(mixer, function) for mixer in mixers)
    )


def mentions(module: nn.Module, text: str) -> bool:
    """Whether the source of a module's class has a text, such as "softcap=", an argument that it hands on."""
    return text in inspect.getsource(type(module))


def attend_with(model: nn.Module, implementation: str) -> None:
    """Let the decoder's layers call this attention function of transformers, or our own, "packed"."""
    # model.set_attn_implementation() does the same and warns of classes that do not declare it.
    for module in decoder_of(model).modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = implementation


def name_of_unpacked_attention(model: nn.Module) -> str:
    """transformers' attention function for rows of their own. The fused one would silently leave out caps and sinks."""
    attentions = all_attentions(model)
    caps_or_sinks = any(mentions(attention, word) for attention in attentions for word in ("softcap=", "s_aux="))
    return "eager" if caps_or_sinks or not model._supports_sdpa else "sdpa"


def check_settings(compute: Compute) -> None:
    """Refuse settings that need packed rows. Raises BadInput."""
    if compute.sequence_parallel > 1:
        raise BadInput(f"--sequence-parallel {compute.sequence_parallel}: it cuts packed rows, and packing is off")
    if compute.kernels != "eager":
        raise BadInput(f"--kernels {compute.kernels}: it compiles layers for packed rows, and packing is off")


@torch.no_grad()
def choose_forward(model: nn.Module, model_path: str, world: World, compute: Compute, tolerance: float) -> None:
    """Set model.packed, model.carries_state and model.knows_logits, and the attention that goes with them.

    Raises BadInput if no choice is right. The model needs `hidden_states` and `own_forward` as FSDP forwards.
    tolerance: largest relative difference of hidden states and of log-probs. Collective: every rank calls it, and all
    choose the same.
    """
    refused = f"--model {model_path}: {model.config.model_type} models are not supported"
    model.carries_state = carries_state(decoder_of(model))
    rollout = texts(model, world)
    attend_with(model, "eager")
    right = []
    for prompt, response in zip(rollout.prompt_ids, rollout.response_ids):
        ids = torch.tensor([prompt + response], device=world.device)
        right.append(model.own_forward(ids, len(prompt)))
    right_hidden = torch.cat([row.hidden for row in right])

    def try_rows(packed: bool) -> bool:
        """Switch the model to packed rows, or to rows of their own. True if its hidden states are right."""
        model.packed = packed
        attend_with(model, "packed" if packed else name_of_unpacked_attention(model))
        found = hidden_states_of(model, rollout, compute, world)
        if packed and model.carries_state:
            # What a trained model has read before may move it less than rounding does. But with another text at the
            # start of the row, the same operations compute the rest from the same numbers, so nothing may move.
            again = hidden_states_of(model, texts(model, world, shortest_at=110), compute, world)
            row_of_token = [row for row, length in enumerate(RESPONSE_TOKENS) for _ in range(length)]
            rest = torch.tensor(row_of_token) != SHORTEST  # (tokens,)
            if world.max((again - found)[rest].norm() / found[rest].norm()) > tolerance / 1000:
                return False
        return difference(found, right_hidden, world) <= tolerance

    reason = "" if compute.packing == "off" else why_not_packed(model, compute)
    # All ranks choose the same, also if kernels are installed on some machines only.
    packed = not world.max(compute.packing == "off" or bool(reason))
    if packed:
        try:
            packed = try_rows(packed=True)
            reason = "" if packed else "packed rows that change its hidden states"
        except NotPackable as error:
            packed = False
            reason = str(error)
            reset_iter_state(model)  # the error left FSDP in the middle of a forward
    if compute.packing == "on" and not packed:
        reason = reason or "layers or kernels of another rank"
        raise BadInput(f"{refused} with --packing on, because of {reason}")
    if reason:
        counted = "" if compute.packing == "off" else " (with --packing off, --token-budget counts padding)"
        say(f"packing: off for {model_path}, because of {reason}{counted}")
    if not packed:
        check_settings(compute)
        if not try_rows(packed=False):
            raise BadInput(
                f"{refused}: their log-probs of a response depend on tokens after it, as padding on the right shows"
            )

    if right[0].logprobs is None:  # a value head
        return
    by_logits, by_products, by_pieces = torch.cat([row.logprobs for row in right], dim=1)
    model.knows_logits = difference(by_products, by_logits, world) <= tolerance
    if not model.knows_logits and difference(by_pieces, by_logits, world) > tolerance:
        raise BadInput(f"{refused}: their logits do not follow from the last hidden states alone")


def difference(found: torch.Tensor, right: torch.Tensor, world: World) -> float:
    """The largest error of any rank, relative to how much the right values differ among each other. NaN is infinite."""
    size = (right - right.mean(0)).norm().clamp_min(1e-12)
    error = (found - right).norm() / size
    return world.max(error.nan_to_num(nan=torch.inf))  # a maximum over ranks could lose NaN


def texts(model: nn.Module, world: World, shortest_at: int = 100) -> Rollout:
    """Four responses of different lengths, two to the same prompt. They are the same on every rank.

    shortest_at: where in `ids` the shortest response begins. Another place gives it another text.
    """
    never = image_tokens(model.config)
    usable = [token for token in range(3, model.config.get_text_config().vocab_size) if token not in never]
    ids = [usable[i % len(usable)] for i in range(160)]
    prompts = [ids[:PROMPT_TOKENS], ids[:PROMPT_TOKENS], [ids[shortest_at - 1]], [ids[129]]]
    starts = (PROMPT_TOKENS, 76, shortest_at, 130)  # no two responses have a token in common
    responses = [ids[start : start + length] for start, length in zip(starts, RESPONSE_TOKENS)]
    return collate(prompts, responses, None, [False] * 4, 0, world.device)


def hidden_states_of(model: nn.Module, rollout: Rollout, compute: Compute, world: World) -> torch.Tensor:
    """The trainer's hidden states before all response tokens, (tokens, hidden size), row after row."""
    together = replace(compute, token_budget=1000, packing="auto")  # as one micro-batch, whatever is being tried
    micro_batches = pack(rollout, torch.arange(len(rollout)), together, world)
    # With slices, the micro-batches of other ranks have no rows here.
    placed = [place(model.hidden_states(micro), micro) for micro in micro_batches]  # (n, T, hidden size) each
    rows = torch.cat([micro.rows for micro in micro_batches])
    return torch.cat(placed)[rows.argsort()][rollout.response_mask].float()


class OwnForward(NamedTuple):
    """What transformers' own forward says of one sequence."""

    hidden: torch.Tensor  # (r, d) last hidden states before the r response tokens, float32
    logprobs: torch.Tensor | None  # (3, r): from its logits, from products with the head, from own_logprobs()


def own_forward(self, ids: torch.Tensor, prompt: int) -> OwnForward:
    """The model's own forward of ids (1, L), of which `prompt` tokens are a prompt, with no mask and no positions.

    Collective: every rank calls it.
    """
    before = slice(prompt - 1, -1)  # the places before each response token
    body = body_of(self)
    if hasattr(self, "score"):
        hidden = body(input_ids=ids, use_cache=False).last_hidden_state[0, before]
        return OwnForward(hidden.float(), None)
    outputs = []
    hook = body.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    try:
        logits = self.forward(input_ids=ids, use_cache=False).logits[0, before].float()
    finally:
        hook.remove()
    hidden = outputs[0].last_hidden_state[0, before]
    targets = ids[0, prompt:]
    logits[:, list(image_tokens(self.config))] = -torch.inf
    by_logits = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    by_products = torch.full_like(by_logits, torch.nan)
    hidden_and_head = factors(self, hidden)
    if hidden_and_head[0].shape[1] == hidden_and_head[1].shape[1]:  # otherwise something lies between them (RemBERT)
        by_products, _ = ChunkedLogprobs.apply(*hidden_and_head, targets, logit_shape(self.config, 1.0), False)
    by_pieces, _ = own_logprobs(self, hidden, targets, temperature=1.0, with_entropy=False)
    return OwnForward(hidden.float(), torch.stack([by_logits, by_products, by_pieces]))
