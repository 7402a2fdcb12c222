"""vLLM inside each rank's process, and the settings that vLLM's servers have as well.

vLLM takes 8 s to import and reads its environment only then, so it is imported when an engine is made.
"""

import gc
import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from transformers import AutoConfig

from common.data import families
from common.data.tokenizer import has_safetensors, image_tokens
from common.errors import RunFailed, raise_together
from common.placement import Layout, World, drop_pages
from common.rollout.rollout import Done, Response, Rollout, collate_responses, gather, spread_seed
from common.rollout.turns import Reply

CPU_BLOCK_TOKENS = 32  # tokens in a block of a CPU's KV cache: the fewest that vLLM allows


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What one engine is configured with: vLLM in this process, or a server."""

    backend: str = "vllm"  # or "sglang", which has servers only
    model_path: str  # local folder or Hub name
    dtype: torch.dtype  # the weights'
    tensor_parallel: int  # devices that hold the engine together
    layout: Layout
    max_model_len: int  # tokens of a prompt and its response
    max_num_seqs: int  # responses that it works on at the same time
    kv_cache_bytes: int = 0  # on a CPU; on a GPU layout.rollout_memory decides


def engine_settings(config: EngineConfig) -> dict:
    """Arguments of LLM(...). A server takes them as flags."""
    layout = config.layout
    cuda = torch.cuda.is_available()
    model_config = AutoConfig.from_pretrained(config.model_path)
    sees_images = bool(image_tokens(model_config))
    shares_keys = families.layers_without_own_keys(model_config.get_text_config()) > 0
    transfer = "in_process"
    if layout.split:
        transfer = "nccl" if cuda else "shared_memory"
    settings = {
        "model": config.model_path,
        "load_format": "safetensors" if has_safetensors(config.model_path) else "auto",
        "dtype": str(config.dtype).removeprefix("torch."),
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "tensor_parallel_size": config.tensor_parallel,
        # Token ids go in and come out. Only images need vLLM's processor, and this its tokenizer.
        "skip_tokenizer_init": not sees_images,
        # No sampling defaults from the model's folder: they are another policy than the one trained.
        "generation_config": "vllm",
        # Log-probs after the temperature, as the trainer computes them.
        "logprobs_mode": "processed_logprobs",
        "weight_transfer_config": {"backend": transfer},
        "enforce_eager": not cuda,  # CUDA graphs on a GPU; a CPU has nothing to capture
    }
    carries_state = families.family_carries_state(config.model_path)
    if carries_state:
        # vLLM caches states only with chunked prefill, which servers on a CPU do without (servers/process.py).
        settings["enable_prefix_caching"] = False
    if cuda:
        # Logits in float32, as in the trainer. On a CPU vllm_weights.Float32Head does this.
        settings["hf_overrides"] = {"head_dtype": "float32"}
        # Not FlashInfer's all-reduce here either: nvcc would compile it (see engines.set_vllm_environment).
        settings["compilation_config"] = {"pass_config": {"fuse_allreduce_rms": False}}
        settings["gpu_memory_utilization"] = layout.rollout_memory or (0.9 if layout.split else 0.4)
        return settings
    if config.kv_cache_bytes:
        settings["kv_cache_memory_bytes"] = config.kv_cache_bytes
    if carries_state:  # vllm_prefixes copies only keys and values, and vLLM starts no connector beside states
        return settings
    # Requests share whole blocks. vllm_prefixes also shares parts of a block. It recognizes a prompt by its token ids,
    # which don't say what an image shows, and copies each layer's own keys (Gemma 4's last layers have none).
    settings["block_size"] = CPU_BLOCK_TOKENS
    if not layout.split and not sees_images and not shares_keys:
        settings["kv_transfer_config"] = {
            "kv_connector": "PrefixCopies",
            "kv_connector_module_path": "common.rollout.vllm_prefixes",
            "kv_role": "kv_both",
        }
    return settings


def sampling_settings(
    temperature: float, max_tokens: int, stop_token_ids: list[int], never: tuple[int, ...] = ()
) -> dict:
    """Arguments of SamplingParams(...). A server takes the same ones as JSON. never: tokens that are not sampled."""
    settings = {
        "temperature": temperature,
        "top_p": 1.0,  # top-p, top-k and penalties would sample from another policy than the one trained
        "top_k": 0,
        "max_tokens": max_tokens,
        "stop_token_ids": stop_token_ids,
        "logprobs": 0,  # only the log-prob of the sampled token
        "detokenize": False,
    }
    if never:
        settings["logit_bias"] = dict.fromkeys(never, -100.0)  # the most that vLLM allows
    return settings


def request(ids: list[int]) -> dict:
    """A prompt as vLLM takes it. In one with images vLLM repeats the placeholder of each image itself."""
    if not hasattr(ids, "images"):
        return {"prompt_token_ids": ids}
    return {"prompt_token_ids": ids.compact, "multi_modal_data": {"image": ids.pictures()}}


def is_about_memory(message: str) -> bool:
    """Whether vLLM says that there is too little memory. "shared_memory" and paths don't count."""
    return re.search(r"(?<![\w/])memory(?![\w/])", message, re.IGNORECASE) is not None


def memory_cure() -> str:
    """What to do if the engine finds too little memory. On a CPU --rollout-memory has no effect."""
    first = "change --rollout-memory, or take" if torch.cuda.is_available() else "take"
    return f"{first} a larger --rollout-tp or a smaller --max-response-tokens"


def request_seed(seed: int, number: int, n: int) -> int:
    """Seed of prompt `number` of a step: its n responses take this seed and the next n - 1. It fits into 63 bits."""
    width = 1 << (n - 1).bit_length()  # a power of two: spread_seed() XORs, which keeps such blocks apart
    block = ((seed << 20) + number) * width
    # What is above 62 bits, a large --seed, isn't lost: it changes the other bits.
    return spread_seed((block ^ (block >> 62) * 0x9E3779B97F4A7C15 * width) % 2**62)


class VLLMEngine:
    """One engine per rank, or one for `world.rollout_tp` ranks, which then make every call together."""

    saved_names = True  # vLLM's loaders know the names in a model's files

    def __init__(self, config: EngineConfig, stop_token_ids: list[int], world: World):
        from vllm import LLM
        from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper

        from common.rollout import vllm_weights

        gc.collect()
        # vLLM collects garbage five times while it starts, which takes 2 s if it walks through all modules.
        gc.freeze()
        vllm_weights.register()
        # For models that vLLM runs through transformers, its compile wrapper patches the class itself, which would also
        # change the trainer's model. Models that vLLM has written set this attribute themselves.
        TorchCompileWithNoGuardsWrapper.do_not_compile = True
        self.stop_token_ids = stop_token_ids
        self.world = world
        self.wire_dtype = config.dtype
        self.longest = config.max_model_len
        self.never = image_tokens(AutoConfig.from_pretrained(config.model_path))
        self.weight_version = 0
        self.asleep = False
        self.llm = LLM(
            **engine_settings(config),
            seed=world.engine_index,
            distributed_executor_backend="external_launcher",  # torchrun has started the ranks already
            enable_sleep_mode=world.device.type == "cuda",
            use_tqdm_on_load=False,
        )

    def settings(self) -> str:
        """One line with the sizes that vLLM derived from the job."""
        config = self.llm.llm_engine.vllm_config
        cache, scheduler = config.cache_config, config.scheduler_config
        return (
            f"{scheduler.max_num_seqs} responses at once, {scheduler.max_num_batched_tokens} tokens a forward, "
            f"KV cache of {cache.num_gpu_blocks} blocks of {cache.block_size} tokens"
        )

    def generate(
        self,
        prompt_ids: list[list[int]],
        n: int,
        temperature: float,
        max_tokens: int,
        seed: int,
        done: Done | None = None,
        reply: Reply | None = None,
    ) -> Rollout:
        """n responses to each prompt, in submission order.

        Collective over the ranks that share this engine, and over all ranks if the model sees images.
        """
        settings = sampling_settings(temperature, max_tokens, self.stop_token_ids, self.never)
        settings |= {"n": n, "flat_logprobs": True}
        if self.world.device.type == "cpu":
            # vLLM draws from this generator on a CPU. Without the engine's index all engines would draw the same.
            torch.manual_seed(spread_seed((seed << 12) + self.world.engine_index))
        if reply is not None:
            from common.rollout.vllm_turns import converse

            return converse(self, prompt_ids, settings, seed, reply)

        all_prompts, first = gather(prompt_ids, self.world)
        sampling = self.sampling_params(settings, seed, len(all_prompts))
        names = self.llm.enqueue([request(ids) for ids in all_prompts], sampling, use_tqdm=False)
        indices = {}  # name of a request -> index of its prompt
        for i, name in enumerate(names):
            indices[name.partition("-")[0]] = i  # vLLM adds "-" and random characters
        groups: dict[int, list[Response]] = {}  # index of one of this rank's prompts -> its n responses
        error = None
        while self.llm.llm_engine.has_unfinished_requests():
            for output in self.llm.llm_engine.step():
                i = indices[output.request_id] - first
                if not output.finished or not 0 <= i < len(prompt_ids):
                    continue  # a part of a response, or a prompt of another rank
                groups[i] = [to_response(completion) for completion in output.outputs]
                error = error or image_error(prompt_ids[i], output.prompt_token_ids)
                if done is not None:
                    done(i, [each.token_ids for each in groups[i]], [each.truncated for each in groups[i]])
        # Only models that see images can have this error. If one rank stopped alone, the others would wait for it.
        if self.never:
            raise_together(error)
        responses = [response for i in range(len(prompt_ids)) for response in groups[i]]
        return collate_responses(prompt_ids, n, responses, self.weight_version, self.world.device)

    def sampling_params(self, settings: dict, seed: int, prompts: int):
        """SamplingParams for all prompts or, on a GPU, a list with those of each prompt. There vLLM's sampler ignores
        torch's generator, so each request brings a seed of its own.
        """
        from vllm import SamplingParams

        world = self.world
        if world.device.type == "cpu":
            return SamplingParams(**settings)
        engines = world.size // world.rollout_tp
        # No other prompt of the step has the same number. Without --rollout-tp it is the prompt's place in the step.
        numbers = [i * engines + world.engine_index for i in range(prompts)]
        return [SamplingParams(**settings, seed=request_seed(seed, number, settings["n"])) for number in numbers]

    def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace all weights by (name, full tensor) pairs. Collective, because gathering the tensors is."""
        if self.asleep:
            self.llm.wake_up(tags=["weights"])
            if self.never:
                self.llm.collective_rpc(clear_positions)
        self.llm.start_weight_update()
        self.llm.update_weights({"update_info": {"weights": named_tensors}})
        self.llm.finish_weight_update()
        if self.asleep:
            self.llm.wake_up(tags=["kv_cache"])
        self.asleep = False
        # The old weights computed the keys and values in the caches, and the vectors of images.
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("a request still holds keys and values of the old weights")
        if self.never:
            self.llm.reset_mm_cache()
            self.llm.llm_engine.reset_encoder_cache()
        self.weight_version += 1

    def sleep(self) -> None:
        """Give memory to the trainer, until the next call needs it.

        On a GPU that is weights and KV cache, and the next load_weights wakes the engine. On a CPU it is the KV cache:
        over two steps with SmolLM2 on `sums`, GRPO's peak fell from 8.8 to 6.5 GiB.
        """
        if self.world.device.type == "cuda":
            self.llm.sleep(level=2)
            self.asleep = True
        else:
            # drop_caches leaves zeros, which vLLM would take for a prompt's keys and values if it is asked for again.
            # The reset fails while a request still samples.
            if self.llm.reset_prefix_cache():
                self.llm.collective_rpc(drop_caches)

    def shutdown(self) -> None:
        """Call it before the process group is destroyed: the engine's own groups live inside it."""
        from vllm.distributed import parallel_state

        core = self.llm.llm_engine.engine_core
        if self.world.device.type == "cuda":
            core.shutdown()
        else:
            # vLLM's shutdown would collect garbage for a second, in a process that is about to end. Its finalizer would
            # do the same at exit, so it is detached.
            core._finalizer.detach()
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


def drop_caches(worker) -> None:
    """Return the memory of a CPU worker's keys and values to the kernel. vLLM's own sleep() does nothing on a CPU."""
    # Layers may be views of one storage, which is dropped once.
    caches = {cache.untyped_storage().data_ptr(): cache for cache in worker.model_runner.kv_caches}
    for cache in caches.values():
        drop_pages(cache)


def clear_positions(worker) -> None:
    """Zero the positions of a GPU worker whose model sees images: sleep() has given their memory back.

    vLLM writes those of real tokens anew. But a CUDA graph also reads those of its padding, and uses them as an index.
    """
    state = getattr(worker.model_runner, "model_state", None)
    rope = getattr(state, "rope_state", None)  # None: a family without positions in several dimensions
    if rope is not None:
        rope.positions.zero_()


def to_response(completion) -> Response:
    """vLLM's CompletionOutput as ours."""
    return Response(list(completion.token_ids), completion.logprobs.logprobs, completion.finish_reason == "length")


def image_error(ids: list[int], engine_ids: list[int]) -> RunFailed | None:
    """The error of a prompt whose images have become other ids in the engine than in the trainer, or None."""
    if not hasattr(ids, "images") or list(engine_ids) == list(ids):
        return None
    return RunFailed(
        f"a prompt with {len(ids.images)} images has {len(engine_ids)} tokens in vLLM and {len(ids)} here: their "
        "processors of images differ; compare --model's preprocessor_config.json with the original, or use "
        "--rollout-backend hf",
        code="image-tokens",
    )
