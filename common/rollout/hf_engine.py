"""A slow engine on transformers' own `generate`. The other engines are tested against it; it needs no vLLM."""

from collections.abc import Iterable

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, GenerationConfig, LogitsProcessor, LogitsProcessorList

from common.data.tokenizer import causal_class, has_safetensors, image_tokens
from common.placement import World
from common.rollout.rollout import Rollout, collate
from common.rollout.turns import Replies, Reply, collate_turns, open_turns


class LogprobRecorder(LogitsProcessor):
    """Divides the logits by the temperature and keeps the log-prob of each token that is chosen from them.

    never: tokens that are never chosen.
    """

    def __init__(self, temperature: float, never: tuple[int, ...]):
        self.temperature, self.never, self.last, self.chosen = temperature, list(never), None, []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.last is not None:
            self.record_choice(input_ids)
        scaled = scores.float() / self.temperature if self.temperature > 0 else scores.float()
        scaled[:, self.never] = -torch.inf
        self.last = scaled.log_softmax(-1)  # (rows, vocabulary)
        return scaled

    def record_choice(self, input_ids: torch.Tensor) -> None:
        """Keep the log-prob of the token at the end of input_ids (rows, tokens): it was chosen from the last logits."""
        self.chosen.append(self.last.gather(-1, input_ids[:, -1:]).squeeze(-1))


class HFEngine:
    """A full copy of the model on each rank, without paging or continuous batching. Prompts are padded."""

    saved_names = False  # the trainer's model is of the same class

    def __init__(self, model_path: str, stop_token_ids: list[int], world: World, dtype: torch.dtype):
        safe = has_safetensors(model_path)
        config = AutoConfig.from_pretrained(model_path)
        self.model = causal_class(config).from_pretrained(model_path, dtype=dtype, use_safetensors=safe)
        self.never = image_tokens(config)
        self.model.to(world.device).eval()
        # A new configuration, without the sampling defaults of the model's folder.
        self.model.generation_config = GenerationConfig(eos_token_id=stop_token_ids, pad_token_id=stop_token_ids[0])
        self.stop_token_ids, self.world, self.wire_dtype, self.weight_version = stop_token_ids, world, dtype, 0

    def generate(
        self, prompt_ids, n: int, temperature: float, max_tokens: int, seed: int, done=None, reply: Reply | None = None
    ) -> Rollout:
        """n responses to each prompt. done is not called: all responses end at the same time."""
        torch.manual_seed((seed << 12) + self.world.rank)
        if reply is not None:
            return self.converse(prompt_ids, n, temperature, max_tokens, reply)
        rows = [ids for ids in prompt_ids for _ in range(n)]
        sampled = self.turn(rows, temperature, max_tokens)
        return collate(rows, *zip(*sampled), self.weight_version, self.world.device)

    def converse(self, prompt_ids, n: int, temperature: float, max_tokens: int, reply: Reply) -> Rollout:
        """generate() with an environment. All responses take a turn, then all environments reply."""
        rows = open_turns(prompt_ids, n, max_tokens)
        due = list(range(len(rows)))
        replies = Replies(lambda row: reply(row // n, rows[row]))
        while due:
            sampled = self.turn([rows[row].prompt for row in due], temperature, max(rows[row].room for row in due))
            for row, (ids, logprobs, truncated) in zip(due, sampled):
                room = rows[row].room  # The shortest turns of a batch may be cut off behind their own limit.
                rows[row].add(ids[:room], logprobs[:room], truncated or len(ids) > room)
                replies.ask(row)
            arrived = []
            while replies.coming:
                arrived += replies.take(idle=True)
            for row, ids in arrived:
                if ids is not None:
                    rows[row].observe(ids)
            due = sorted(row for row, ids in arrived if ids is not None)
        return collate_turns(rows, self.weight_version, self.world.device)

    @torch.no_grad()
    def turn(
        self, rows: list[list[int]], temperature: float, max_tokens: int
    ) -> list[tuple[list[int], list[float], bool]]:
        """(ids, log-probs, whether the limit cut it off) of one response to each row."""
        tensors = [torch.tensor(ids, device=self.world.device) for ids in rows]
        # Padding on the left makes all responses start in the same column.
        inputs = pad_sequence(tensors, batch_first=True, padding_side="left")  # (rows, width)
        attention_mask = pad_sequence([torch.ones_like(ids) for ids in tensors], True, padding_side="left")
        recorder, seen = LogprobRecorder(temperature, self.never), {}
        if with_images := [row for row in rows if hasattr(row, "images")]:
            from common.data import images

            seen = {name: value.to(inputs.device) for name, value in images.together(with_images).items()}
            if "image_grid_thw" in seen:  # Qwen's positions depend on which tokens are an image's
                seen["mm_token_type_ids"] = (inputs == self.never[0]).int()
        output = self.model.generate(
            inputs, attention_mask=attention_mask, **seen, logits_processor=LogitsProcessorList([recorder]),
            do_sample=temperature > 0, top_k=0 if temperature > 0 else None, max_new_tokens=max_tokens,
        )  # fmt: skip
        recorder.record_choice(output)
        sampled, logprobs = output[:, inputs.shape[1] :].tolist(), torch.stack(recorder.chosen, dim=1).tolist()
        ends = [next((t + 1 for t, token in enumerate(row) if token in self.stop_token_ids), None) for row in sampled]
        return [(row[:end], values[:end], end is None) for row, values, end in zip(sampled, logprobs, ends)]

    @torch.no_grad()
    def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy (name, full tensor) pairs into the model. Collective, because gathering the tensors is."""
        parameters = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        for name, tensor in named_tensors:
            parameters[name].copy_(tensor)
        self.weight_version += 1

    def sleep(self) -> None:
        """This engine keeps no cache between calls."""

    def shutdown(self) -> None:
        """This engine owns no process and no process group."""
