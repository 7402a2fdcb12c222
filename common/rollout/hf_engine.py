"""A slow engine on transformers' own `generate`. The other engines are tested against it; it needs no vLLM."""

import sys
from collections.abc import Iterable

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, GenerationConfig, LogitsProcessor, LogitsProcessorList

from common.data import families, weights
from common.data.tokenizer import causal_class, image_tokens
from common.placement import World
from common.rollout.rollout import Response, Rollout, collate_responses, spread_seed
from common.rollout.turns import Replies, Reply, collate_turns, open_turns


class LogprobRecorder(LogitsProcessor):
    """Divides the logits by the temperature and keeps the log-prob of each token that is sampled from them.

    `generate` calls it once for each token, with the ids so far: their last one was sampled from the logits of the call
    before. transformers could return the scores of all tokens instead, which takes a vocabulary of memory for each.
    """

    def __init__(self, temperature: float):
        self.temperature = temperature
        self.latest: torch.Tensor | None = None  # (rows, vocabulary) log-probs of the token that is sampled next
        self.sampled: list[torch.Tensor] = []  # for each token so far: (rows,) its log-probs

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.latest is not None:
            self.record(input_ids)
        logits = scores.float()
        if self.temperature > 0:
            logits = logits / self.temperature
        self.latest = logits.log_softmax(-1)
        return logits

    def record(self, input_ids: torch.Tensor) -> None:
        """Keep the log-prob of the token at the end of input_ids (rows, tokens)."""
        self.sampled.append(self.latest.gather(-1, input_ids[:, -1:]).squeeze(-1))


class HFEngine:
    """A full copy of the model on each rank, without paging or continuous batching. Prompts are padded."""

    saved_names = False  # the trainer's model is of the same class

    def __init__(self, model_path: str, stop_token_ids: list[int], world: World, dtype: torch.dtype, longest: int = 0):
        """longest: tokens of a prompt and its response."""
        config = AutoConfig.from_pretrained(model_path)
        self.model = weights.read(causal_class(config), model_path, f"--model {model_path}", dtype=dtype)
        self.model.to(world.device).eval()
        families.fix_longrope(self.model, longest)
        # Phi's generate() would drop its cache in the column of this number, where it expects other frequencies, and
        # then see the last token alone. The frequencies are settled, so no column is that one.
        if families.longrope_limit(config.get_text_config()):
            self.model.config.original_max_position_embeddings = sys.maxsize
        self.may_be_padded = families.may_be_padded(self.model)
        self.image_tokens = image_tokens(config)  # they are never sampled
        # A new configuration, without the sampling defaults of the model's folder.
        self.model.generation_config = GenerationConfig(
            eos_token_id=stop_token_ids,
            pad_token_id=stop_token_ids[0],
            suppress_tokens=list(self.image_tokens) or None,
        )
        self.stop_token_ids = stop_token_ids
        self.world = world
        self.wire_dtype = dtype
        self.weight_version = 0

    def generate(
        self, prompt_ids, n: int, temperature: float, max_tokens: int, seed: int, done=None, reply: Reply | None = None
    ) -> Rollout:
        """n responses to each prompt. done is not called: all responses end at the same time."""
        # Without the rank all ranks would draw the same numbers.
        torch.manual_seed(spread_seed((seed << 12) + self.world.rank))
        if reply is not None:
            return self.converse(prompt_ids, n, temperature, max_tokens, reply)
        responses = self.sample([ids for ids in prompt_ids for _ in range(n)], temperature, max_tokens)
        return collate_responses(prompt_ids, n, responses, self.weight_version, self.world.device)

    def converse(self, prompt_ids, n: int, temperature: float, max_tokens: int, reply: Reply) -> Rollout:
        """generate() with an environment. All responses take a turn, then all environments reply."""
        turns = open_turns(prompt_ids, n, max_tokens)
        replies = Replies(lambda row: reply(row // n, turns[row]))
        due = list(range(len(turns)))  # responses that take a turn now
        while due:
            # All share the largest limit. A response with less room is cut off at its own.
            limit = max(turns[row].room for row in due)
            responses = self.sample([turns[row].prompt for row in due], temperature, limit)
            for row, response in zip(due, responses):
                room = turns[row].room
                truncated = response.truncated or len(response.token_ids) > room
                turns[row].add(response.token_ids[:room], response.logprobs[:room], truncated)
                replies.ask(row)
            due = []
            while replies.coming:
                for row, ids in replies.take(idle=True):
                    if ids is not None:  # otherwise the episode has ended
                        turns[row].observe(ids)
                        due.append(row)
            due.sort()
        return collate_turns(turns, self.weight_version, self.world.device)

    def sample(self, rows: list[list[int]], temperature: float, max_tokens: int) -> list[Response]:
        """One response to each row of token ids."""
        if self.may_be_padded:
            return self.sample_padded(rows, temperature, max_tokens)
        # Padding would enter states, or count as positions. Rows of one length need none.
        responses = {}
        for length in sorted(set(map(len, rows))):
            places = [place for place, row in enumerate(rows) if len(row) == length]
            found = self.sample_padded([rows[place] for place in places], temperature, max_tokens)
            responses |= dict(zip(places, found))
        return [responses[place] for place in range(len(rows))]

    @torch.no_grad()
    def sample_padded(self, rows: list[list[int]], temperature: float, max_tokens: int) -> list[Response]:
        """The same in one batch."""
        tensors = [torch.tensor(ids, device=self.world.device) for ids in rows]
        # Padding on the left makes all responses start in the same column.
        inputs = pad_sequence(tensors, batch_first=True, padding_side="left")  # (rows, width)
        attention_mask = pad_sequence(
            [torch.ones_like(ids) for ids in tensors], batch_first=True, padding_side="left"
        )  # (rows, width)
        recorder = LogprobRecorder(temperature)
        output = self.model.generate(
            inputs,
            attention_mask=attention_mask,
            **self.image_inputs(rows, inputs),
            logits_processor=LogitsProcessorList([recorder]),
            do_sample=temperature > 0,
            top_k=0 if temperature > 0 else None,
            max_new_tokens=max_tokens,
        )
        # `generate` does not call the recorder again after the last token.
        recorder.record(output)
        response_ids = output[:, inputs.shape[1] :].tolist()
        logprobs = torch.stack(recorder.sampled, dim=1).tolist()
        return [self.cut(ids, values) for ids, values in zip(response_ids, logprobs)]

    def image_inputs(self, rows: list[list[int]], inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """The model's inputs besides ids, for prompts with images. inputs: (rows, width), the padded ids."""
        with_images = [row for row in rows if hasattr(row, "images")]
        if not with_images:
            return {}
        from common.data import images

        tensors = {name: value.to(inputs.device) for name, value in images.together(with_images).items()}
        # Qwen's positions depend on which tokens are an image's.
        if "image_grid_thw" in tensors:
            tensors["mm_token_type_ids"] = (inputs == self.image_tokens[0]).int()
        return tensors

    def cut(self, ids: list[int], logprobs: list[float]) -> Response:
        """A response without the padding that `generate` appends after a stop token."""
        for t, token in enumerate(ids):
            if token in self.stop_token_ids:
                return Response(ids[: t + 1], logprobs[: t + 1], truncated=False)
        return Response(ids, logprobs, truncated=True)

    @torch.no_grad()
    def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy (name, full tensor) pairs into the model. Collective, because gathering the tensors is."""
        own_tensors = dict(self.model.named_parameters())
        own_tensors |= dict(self.model.named_buffers())
        for name, tensor in named_tensors:
            own_tensors[name].copy_(tensor)
            del tensor  # otherwise it stays in memory while the next one is gathered
        self.weight_version += 1

    def sleep(self) -> None:
        """Frees nothing: it keeps no cache, and its weights stay on the device."""

    def shutdown(self) -> None:
        """This engine owns no process and no process group."""
