"""The engine: prompts in as token ids; responses out as token ids and the log-probs they were sampled with.

Three engines behind the same four methods: `VLLMEngine` (common/vllm_engine.py) in each rank's process, `ServerEngine`
(common/server_engine.py) for vLLM's servers beside them, and `HFEngine` below, slow, independent, and the oracle the
others are tested against.

    generate(prompt_ids, n, temperature, max_tokens, seed, done) -> Rollout
                                     done: Done or None, for a reward that grades while others are sampled
    load_weights(named_tensors)      the trainer's weights, full tensors of wire_dtype (None: of the masters);
                                     called through weight_sync.push
    sleep()                          free the memory of weights and KV cache until the next load_weights
    shutdown()                       before the process group goes away
"""

import gc
import math
import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedConfig,
)

from common.errors import say
from common.placement import Layout, World, use_cores
from common.safe_pickle import has_safetensors

# Called with the place of a prompt as soon as all responses to it are there: their token ids, and which were cut off.
Done = Callable[[int, list[list[int]], list[bool]], None]


@dataclass
class Rollout:
    """N sampled responses, group-major: rows i*G ... i*G+G-1 answer prompt i. T = longest response."""

    prompt_ids: list[list[int]]  # N, as the engine took them
    response_ids: list[list[int]]  # N, as the engine returned them, with the end token it sampled
    response_mask: torch.Tensor  # (N, T) bool, True on a token the policy sampled
    rollout_logprobs: torch.Tensor  # (N, T) float32 as the engine reports them, 0 where the mask is False
    truncated: torch.Tensor  # (N,) bool: stopped by the length limit, not by an end token
    weight_versions: torch.Tensor  # (N, T) how many pushes the weights had seen that sampled each token

    def __len__(self) -> int:
        return len(self.response_ids)


def collate(prompt_ids, response_ids, logprobs, truncated, weight_version, device) -> Rollout:
    """Pad N lists to (N, T). The mask comes from the lengths: a pad token may well be an end token.

    logprobs: None for demonstrations, which nobody sampled; weight_version: a number, or N lists of them.
    """
    lengths = torch.tensor([len(ids) for ids in response_ids])
    width = int(lengths.max()) if len(lengths) else 0
    mask = torch.arange(width)[None, :] < lengths[:, None]  # (N, T)
    padded = torch.zeros(len(response_ids), width)
    if logprobs is not None:
        padded[mask] = torch.tensor([x for row in logprobs for x in row], dtype=torch.float32)
    truncated = torch.tensor(truncated, dtype=torch.bool, device=device)
    versions = torch.full(mask.shape, weight_version if isinstance(weight_version, int) else 0)
    if not isinstance(weight_version, int):
        versions[mask] = torch.tensor([x for row in weight_version for x in row], dtype=torch.long)
    return Rollout(prompt_ids, response_ids, mask.to(device), padded.to(device), truncated, versions.to(device))


def select(parts: list[tuple[Rollout, Iterable[int]]]) -> Rollout:
    """The chosen rows of several rollouts as one rollout, in this order, padded anew."""
    chosen = [(rollout, row) for rollout, rows in parts for row in rows]
    return collate(
        [rollout.prompt_ids[row] for rollout, row in chosen],
        [rollout.response_ids[row] for rollout, row in chosen],
        [rollout.rollout_logprobs[row, : len(rollout.response_ids[row])].tolist() for rollout, row in chosen],
        [rollout.truncated[row].item() for rollout, row in chosen],
        [rollout.weight_versions[row, : len(rollout.response_ids[row])].tolist() for rollout, row in chosen],
        parts[0][0].response_mask.device,
    )


def start(
    backend: str,
    model_path: str,
    stop_token_ids: list[int],
    world: World,
    dtype: torch.dtype,
    *,
    max_model_len: int,
    sequences: int,
    layout: Layout = Layout(),
    rollout_tp: int = 1,
):
    """Load an engine on this rank (with rollout_tp > 1: on these ranks together), or start the layout's servers.

    Collective: every rank calls it. model_path: local folder or Hub name; stop_token_ids: sampling one of them ends a
    response and is part of it; max_model_len: prompt + response, tokens; sequences: responses that one engine is
    asked for in one call. A GPU's memory is given back while the trainer works. Raises RunFailed.
    """
    if backend == "hf":
        return HFEngine(model_path, stop_token_ids, world, dtype)
    lengths = {"max_model_len": max_model_len, "max_num_seqs": layout.rollout_max_seqs or min(512, sequences)}
    environment = {"VLLM_LOGGING_LEVEL": "ERROR"}
    if world.device.type == "cpu":
        gib = kv_cache_gib(AutoConfig.from_pretrained(model_path), dtype, math.prod(lengths.values()))
        environment["VLLM_CPU_KVCACHE_SPACE"] = str(gib)
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # pinning would put two ranks on one core
        environment["TORCHDYNAMO_DISABLE"] = "1"  # compiling costs 4-14 s at start and gains nothing here
    environment = {name: os.environ.get(name, value) for name, value in environment.items()}
    if layout.split:
        from common.server_engine import ServerEngine  # it needs this module

        environment["VLLM_SERVER_DEV_MODE"] = "1"  # opens the routes for weights
        return ServerEngine(model_path, stop_token_ids, world, dtype, rollout_tp, layout, environment, **lengths)
    # All of vLLM's environment, in one place, before its first import.
    os.environ.update(environment)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine lives in this process: weights go by reference
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # vLLM's, about torch's
        from common.vllm_engine import VLLMEngine  # 8 s to import: not for --help, not for the hf backend

        engine = VLLMEngine(model_path, stop_token_ids, world, dtype, layout=layout, **lengths)
    say(f"engine: {engine.settings()}")
    use_cores()  # vLLM sets the thread count for itself
    gc.freeze()  # what is loaded by now stays: Python's collector need not walk it again in every step
    return engine


def kv_cache_gib(config: PreTrainedConfig, dtype: torch.dtype, tokens: int) -> int:
    """GiB that hold the keys and values of `tokens` tokens, at least 1, at most a quarter of this rank's memory."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    bytes_per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * dtype.itemsize
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, math.ceil(min(bytes_per_token * tokens, memory / 4) / 2**30))


def gather_prompts(prompt_ids: list[list[int]], world: World) -> tuple[list[list[int]], int]:
    """Ranks that share an engine must feed it the same prompts: all of theirs. Returns them and where ours start."""
    if world.tp_group is None:
        return prompt_ids, 0
    everyone: list = [None] * world.rollout_tp
    dist.all_gather_object(everyone, prompt_ids, group=world.tp_group)
    before = everyone[: world.rank % world.rollout_tp]
    return [ids for share in everyone for ids in share], sum(len(share) for share in before)


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
