"""The forward of a loaded model: hidden states, log-probs or values before the response tokens of a micro-batch.

model.load() makes hidden_states and, depending on the head, token_logprobs or token_values methods of the model. FSDP
gathers the weights before each of them. Three attributes of the model, which packing_check.py sets, say how they
compute:

    model.packed         sequences lie end to end in one row; otherwise each has a row of its own (unpacked.py)
    model.carries_state  packed rows need the boundaries of sequences in layers other than attention
    model.knows_logits   logits are the products of hidden states and head, scaled and capped as logit_shape() says;
                         otherwise the model's own forward makes them; not set with a value head
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutput

from common.data.tokenizer import image_tokens
from common.trainer import unpacked
from common.trainer.batching import MicroBatch
from common.trainer.logits import LOGITS_PER_CHUNK, NEVER, ChunkedLogprobs, LogitShape
from common.trainer.parts import body_of


def token_logprobs(
    self, micro: MicroBatch, temperature: float, with_entropy: bool, entropy_gradient: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs and entropies, (R,) float32, of the R response tokens of a micro-batch."""
    hidden = hidden_states(self, micro)
    if not self.knows_logits:
        return own_logprobs(self, hidden, micro.targets, temperature, with_entropy, entropy_gradient)
    hidden, head = factors(self, hidden)
    shape = logit_shape(self.config, temperature)
    logprobs, entropy = ChunkedLogprobs.apply(hidden, head, micro.targets, shape, with_entropy, entropy_gradient)
    return logprobs, (entropy if with_entropy else None)


def token_values(self, micro: MicroBatch) -> torch.Tensor:
    """Values, (R,) float32, before the R response tokens of a micro-batch: the value of the text up to there."""
    hidden = hidden_states(self, micro).float()  # (R, hidden size)
    values = F.linear(hidden, self.score.weight.float(), self.score.bias.float())  # (R, 1)
    return values.squeeze(-1).clone()  # FSDP warns about an output that is a view


def hidden_states(self, micro: MicroBatch) -> torch.Tensor:
    """The decoder's last hidden states, (R, hidden size), before the R response tokens of a micro-batch."""
    if not self.packed:
        return unpacked.hidden_states(self, micro)
    layout = {"spans": micro.spans}
    if self.carries_state:
        layout |= boundaries(micro)
    # The body leaves out the head, which would make logits of prompts, too.
    images = {name: value.to(micro.input_ids.device) for name, value in micro.images.items()}
    output = body_of(self)(
        input_ids=micro.input_ids, position_ids=micro.position_ids, use_cache=False, **layout, **images
    )
    return output.last_hidden_state[0].index_select(0, micro.predictors)


def boundaries(micro: MicroBatch) -> dict:
    """Where the S sequences of a packed row begin, for kernels of convolutions and of recurrent layers.

    transformers hands them down: `cu_seq_lens_*` (S + 1,) int32 to gated DeltaNet, and `seq_idx` (1, L) int32, which is
    the number of each token's sequence, to convolutions and Mamba 2. Its own code in PyTorch silently ignores both, so
    packing_check.py compares numbers. Raises ValueError if a prompt is shared.
    """
    lengths = torch.tensor([prompt + response for prompt, (response,) in micro.group_lengths])
    device = micro.input_ids.device
    offsets = F.pad(lengths.cumsum(0), (1, 0)).to(device, torch.int32)
    numbers = torch.arange(len(lengths)).repeat_interleave(lengths).to(device, torch.int32)
    longest = int(lengths.max())
    return {
        "cu_seq_lens_q": offsets,
        "cu_seq_lens_k": offsets,
        "max_length_q": longest,
        "max_length_k": longest,
        "seq_idx": numbers[None],
    }


def factors(model: nn.Module, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states (R, d) and head (V, d) whose products are the logits, before scale and cap.

    A head with a bias (Phi) has one column more, and so do the hidden states: a column of ones.
    """
    head = model.get_output_embeddings()
    bias = getattr(head, "bias", None)
    if bias is None:
        return hidden, head.weight
    return F.pad(hidden, (0, 1), value=1.0), torch.cat([head.weight, bias[:, None]], dim=1)


def logit_shape(config, temperature: float) -> LogitShape:
    """How a family's logits, at a temperature, follow from the products of hidden states and head.

    At temperature 1 most families have the products themselves. Cohere, Falcon-H1 and Granite scale them, and Gemma 2
    caps them.
    """
    never = image_tokens(config)  # the engine does not sample them either
    config = config.get_text_config()
    factor = getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", None) or 1.0
    scale = factor / (getattr(config, "logits_scaling", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    return LogitShape(temperature / scale, None if cap is None else cap / temperature, never)


def own_logprobs(
    model: nn.Module,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    with_entropy: bool,
    entropy_gradient: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs and entropies, (R,) float32, from the logits that the model's own forward makes of hidden (R, d).

    For families that scale, cap or transform logits in a way that logit_shape() does not know. It is slower than
    products: the backward computes the logits of a piece again, and keeps them in float32 until the piece is done. In
    bfloat16 the model's head rounds them first, so a logit of 20 may be 0.06 off. r: rows of a piece.
    """
    never = list(image_tokens(model.config))

    def statistics(piece: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = own_logits(model, piece).float() / temperature  # (r, V)
        logits[:, never] = NEVER
        log_p = logits.log_softmax(-1)
        entropy = torch.zeros_like(log_p[:, 0])
        if with_entropy:
            entropy = -(log_p.exp() * log_p).sum(-1)
        if not entropy_gradient:
            entropy = entropy.detach()
        return log_p.gather(1, targets[:, None])[:, 0], entropy

    size = max(1, LOGITS_PER_CHUNK // model.config.get_text_config().vocab_size)
    pieces = [
        checkpoint(statistics, *piece, use_reentrant=False) for piece in zip(hidden.split(size), targets.split(size))
    ]
    logprobs, entropy = (torch.cat(values) for values in zip(*pieces))
    return logprobs, (entropy if with_entropy else None)


class Answer(BaseModelOutput):
    """The output of a body: the last hidden states alone. Any other field that a family's forward asks for is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)
        return None


def own_logits(model: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Logits (r, V) that the model's own forward makes of hidden states (r, d)."""
    body = body_of(model)
    # Its forward is run without its layers: for the moment, the body's answer is these hidden states.
    body.forward = lambda *_, **__: Answer(last_hidden_state=hidden[None])
    try:
        no_tokens = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
        return model.forward(input_ids=no_tokens, use_cache=False).logits[0]
    finally:
        del body.forward


def place(values: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
    """(R, ...) -> (n, T, ...): values of response tokens at their rows, with 0 where there is none.

    With sequence parallelism they first go from the rank of a slice to the rank that owns the row, which is a
    collective over the ranks that share the row.
    """
    values = micro.spans.to_owner(values)
    shape = micro.response_mask.shape
    rows = values.new_zeros(shape.numel(), *values.shape[1:]).index_copy(0, micro.scatter, values)
    return rows.view(*shape, *values.shape[1:])
