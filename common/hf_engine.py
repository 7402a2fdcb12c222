"""The slow, independent engine: the oracle that the others are tested against, and what works without vLLM."""

from collections.abc import Iterable

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessor, LogitsProcessorList

from common.placement import World
from common.rollout import Rollout, collate
from common.safe_pickle import has_safetensors


class LogprobRecorder(LogitsProcessor):
    """Scale the logits by the temperature and keep the log-prob of each chosen token, not of the vocabulary."""

    def __init__(self, temperature: float):
        self.temperature, self.last, self.chosen = temperature, None, []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.last is not None:
            self.record_choice(input_ids)
        scaled = scores.float() / self.temperature if self.temperature > 0 else scores.float()
        self.last = scaled.log_softmax(-1)
        return scaled

    def record_choice(self, input_ids: torch.Tensor) -> None:
        """The token chosen from the last logits is now at the end of input_ids (rows, tokens)."""
        self.chosen.append(self.last.gather(-1, input_ids[:, -1:]).squeeze(-1))


class HFEngine:
    """transformers' `generate` on a full copy of the model: no paging, no continuous batching, padded prompts."""

    wire_dtype = None

    def __init__(self, model_path: str, stop_token_ids: list[int], world: World, dtype: torch.dtype):
        safe = has_safetensors(model_path)
        self.model = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype, use_safetensors=safe)
        self.model.to(world.device).eval()
        self.model.generation_config = GenerationConfig()  # else what is not set below comes from the model's folder
        self.stop_token_ids, self.world, self.weight_version = stop_token_ids, world, 0

    @torch.no_grad()
    def generate(self, prompt_ids, n: int, temperature: float, max_tokens: int, seed: int, done=None) -> Rollout:
        """n responses to each prompt; done is not called: they all end together."""
        device, width = self.world.device, max(len(ids) for ids in prompt_ids)
        rows = [ids for ids in prompt_ids for _ in range(n)]
        inputs = torch.zeros(len(rows), width, dtype=torch.long, device=device)
        attention_mask = torch.zeros_like(inputs)
        for i, ids in enumerate(rows):  # padded on the left: responses start in one column
            inputs[i, width - len(ids) :] = torch.tensor(ids, device=device)
            attention_mask[i, width - len(ids) :] = 1
        torch.manual_seed((seed << 12) + self.world.rank)
        recorder = LogprobRecorder(temperature)
        settings = GenerationConfig(
            do_sample=temperature > 0,
            top_k=0 if temperature > 0 else None,
            max_new_tokens=max_tokens,
            eos_token_id=self.stop_token_ids,
            pad_token_id=self.stop_token_ids[0],
        )
        processors = LogitsProcessorList([recorder])
        output = self.model.generate(inputs, settings, attention_mask=attention_mask, logits_processor=processors)
        recorder.record_choice(output)
        sampled, logprobs = output[:, width:].tolist(), torch.stack(recorder.chosen, dim=1).tolist()
        ends = [next((t for t, token in enumerate(row) if token in self.stop_token_ids), None) for row in sampled]
        lengths = [len(row) if end is None else end + 1 for row, end in zip(sampled, ends)]
        return collate(
            rows,
            [row[:length] for row, length in zip(sampled, lengths)],
            [row[:length] for row, length in zip(logprobs, lengths)],
            [end is None for end in ends],
            self.weight_version,
            device,
        )

    @torch.no_grad()
    def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.model.named_parameters())
        for name, tensor in named_tensors:
            parameters[name].copy_(tensor)
        self.weight_version += 1

    def sleep(self) -> None:
        """Nothing to free: this engine keeps no cache between calls."""

    def shutdown(self) -> None:
        """Nothing to end: this engine owns no process and no process group."""
