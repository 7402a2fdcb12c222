"""vLLM inside each rank's process, and the settings that vLLM's servers have as well.

vLLM takes 8 s to import and reads its environment only then, so it is imported when an engine is made.
"""

import gc
from collections.abc import Iterable

import torch
from transformers import AutoConfig

from common.data.tokenizer import has_safetensors, image_tokens
from common.errors import RunFailed, raise_together
from common.placement import Layout, World
from common.rollout.rollout import Done, Rollout, collate, gather_prompts
from common.rollout.turns import Reply


def engine_settings(model_path: str, dtype: torch.dtype, tp: int, layout: Layout, **limits: int) -> dict:
    """Arguments of LLM(...). A server takes them as flags. limits: max_model_len (tokens) and max_num_seqs."""
    cuda, sees_images = torch.cuda.is_available(), bool(image_tokens(AutoConfig.from_pretrained(model_path)))
    transfer = ("nccl" if cuda else "shared_memory") if layout.split else "in_process"
    settings = {
        "model": model_path,
        "load_format": "safetensors" if has_safetensors(model_path) else "auto",
        "dtype": str(dtype).removeprefix("torch."),
        **limits,
        "tensor_parallel_size": tp,
        "skip_tokenizer_init": not sees_images,  # token ids in, token ids out; images go through a processor
        "generation_config": "vllm",  # no sampling defaults from the model's folder
        "logprobs_mode": "processed_logprobs",  # after the temperature, as the trainer computes them
        "weight_transfer_config": {"backend": transfer},
        "enforce_eager": not cuda,  # CUDA graphs on a GPU; a CPU has nothing to capture
    }
    if cuda:
        settings["hf_overrides"] = {"head_dtype": "float32"}  # logits as the trainer's; on a CPU: Float32Head
        settings["gpu_memory_utilization"] = layout.rollout_memory or (0.9 if layout.split else 0.4)
    else:
        settings["block_size"] = 32  # tokens, the fewest: responses to one prompt share its whole blocks,
        if not layout.split and not sees_images:  # and its last one as well, which says nothing of images
            settings["kv_transfer_config"] = {
                "kv_connector": "PromptTails", "kv_connector_module_path": "common.rollout.vllm_tails",
                "kv_role": "kv_both",
            }  # fmt: skip
    return settings


def sampling_settings(
    temperature: float, max_tokens: int, stop_token_ids: list[int], never: tuple[int, ...] = ()
) -> dict:
    """Arguments of SamplingParams(...). A server takes the same ones as JSON. never: tokens that are not sampled."""
    return {
        "temperature": temperature,
        "top_p": 1.0,  # top-p, top-k and penalties would sample from another policy than the one trained
        "top_k": 0,
        "max_tokens": max_tokens,
        "stop_token_ids": stop_token_ids,
        "logprobs": 0,  # only the log-prob of the sampled token
        "detokenize": False,
        **({"logit_bias": dict.fromkeys(never, -100.0)} if never else {}),  # the most that vLLM allows
    }


def request(ids: list[int]) -> dict:
    """A prompt as vLLM takes it. In one with images vLLM repeats the placeholder of each image itself."""
    if not hasattr(ids, "images"):
        return {"prompt_token_ids": ids}
    return {"prompt_token_ids": ids.compact, "multi_modal_data": {"image": ids.pictures()}}


def request_seed(seed: int, number: int, n: int) -> int:
    """Seed of prompt `number` of a step: its n responses take this seed and the next n - 1. It fits into 63 bits."""
    return ((seed << 20) + number) * n % 2**62


class VLLMEngine:
    """One engine per rank, or one for `world.rollout_tp` ranks, which then make every call together."""

    saved_names = True  # vLLM's loaders know the names in a model's files

    def __init__(
        self, model_path: str, stop_token_ids: list[int], world: World, dtype: torch.dtype, layout: Layout,
        **limits: int,
    ):  # fmt: skip
        from vllm import LLM
        from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper

        from common.rollout import vllm_weights

        gc.collect()
        gc.freeze()  # vLLM collects garbage five times while it starts, which takes 2 s if it walks through all modules
        vllm_weights.register()
        # Where vLLM has no model of its own it changes transformers' class, and so the trainer's model of that class.
        TorchCompileWithNoGuardsWrapper.do_not_compile = True  # models that vLLM makes set this attribute themselves
        self.stop_token_ids, self.world, self.wire_dtype = stop_token_ids, world, dtype
        self.never = image_tokens(AutoConfig.from_pretrained(model_path))
        self.weight_version, self.asleep, self.longest = 0, False, limits["max_model_len"]
        self.llm = LLM(
            **engine_settings(model_path, dtype, world.rollout_tp, layout, **limits),
            seed=world.engine_index,
            distributed_executor_backend="external_launcher",  # torchrun has started the ranks already
            enable_sleep_mode=world.device.type == "cuda",
            use_tqdm_on_load=False,
        )

    def settings(self) -> str:
        """One line with the sizes that vLLM derived from the job."""
        config = self.llm.llm_engine.vllm_config
        cache, scheduler = config.cache_config, config.scheduler_config
        said = f"{scheduler.max_num_seqs} responses at once, {scheduler.max_num_batched_tokens} tokens a forward, "
        return said + f"KV cache of {cache.num_gpu_blocks} blocks of {cache.block_size} tokens"

    def generate(
        self, prompt_ids: list[list[int]], n: int, temperature: float, max_tokens: int, seed: int,
        done: Done | None = None, reply: Reply | None = None,
    ) -> Rollout:  # fmt: skip
        """n responses to each prompt, in submission order. Collective over the ranks that share this engine."""
        from vllm import SamplingParams

        world, settings = self.world, sampling_settings(temperature, max_tokens, self.stop_token_ids, self.never)
        if world.device.type == "cpu":  # vLLM draws from this generator. The shift keeps engines from drawing the same.
            torch.manual_seed((seed << 12) + world.engine_index)
        settings |= {"n": n, "flat_logprobs": True}
        if reply is not None:
            from common.rollout.vllm_turns import converse

            return converse(self, prompt_ids, settings, seed, reply)
        sampling = SamplingParams(**settings)
        all_prompts, first = gather_prompts(prompt_ids, world)
        if world.device.type == "cuda":  # vLLM's sampler there ignores torch's generator: requests bring their seeds
            engines = world.size // world.rollout_tp
            seeds = [request_seed(seed, i * engines + world.engine_index, n) for i in range(len(all_prompts))]
            sampling = [SamplingParams(**settings, seed=each) for each in seeds]
        names = self.llm.enqueue([request(ids) for ids in all_prompts], sampling, use_tqdm=False)
        indices = {name.partition("-")[0]: i for i, name in enumerate(names)}  # vLLM adds "-" and random characters
        outputs, error = {}, None
        while self.llm.llm_engine.has_unfinished_requests():
            for output in self.llm.llm_engine.step():
                i = indices[output.request_id] - first
                if output.finished and 0 <= i < len(prompt_ids):
                    if hasattr(prompt_ids[i], "images"):
                        try:
                            prompt_ids[i].check(output.prompt_token_ids)
                        except RunFailed as failed:
                            error = failed
                    outputs[i] = output.outputs
                    if done is not None:
                        ids = [list(response.token_ids) for response in output.outputs]
                        done(i, ids, [response.finish_reason == "length" for response in output.outputs])
        if self.never:  # other ranks would wait for one that leaves alone
            raise_together(error)
        responses = [response for i in range(len(prompt_ids)) for response in outputs[i]]
        return collate(
            [ids for ids in prompt_ids for _ in range(n)],
            [list(response.token_ids) for response in responses],
            [response.logprobs.logprobs for response in responses],
            [response.finish_reason == "length" for response in responses],
            self.weight_version,
            world.device,
        )

    def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace all weights by (name, full tensor) pairs. Collective, because gathering the tensors is."""
        if self.asleep:
            self.llm.wake_up(tags=["weights"])
        self.llm.start_weight_update()
        self.llm.update_weights({"update_info": {"weights": named_tensors}})
        self.llm.finish_weight_update()
        if self.asleep:
            self.llm.wake_up(tags=["kv_cache"])
        self.asleep = False
        self.llm.reset_prefix_cache()  # the old weights computed its keys and values
        if self.never:  # and the vectors of the images
            self.llm.reset_mm_cache()
            self.llm.llm_engine.reset_encoder_cache()
        self.weight_version += 1

    def sleep(self) -> None:
        """Give the memory of weights and KV cache to the GPU's trainer. The next load_weights wakes the engine."""
        if self.world.device.type == "cuda":
            self.llm.sleep(level=2)
            self.asleep = True

    def shutdown(self) -> None:
        """Call it before the process group is destroyed: the engine's own groups live inside it."""
        from vllm.distributed import parallel_state

        core = self.llm.llm_engine.engine_core
        if self.world.device.type == "cuda":
            core.shutdown()
        else:  # vLLM's own would also look for garbage, for a second, in all that the process is about to leave
            core._finalizer.detach()  # it would call that at exit
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()
