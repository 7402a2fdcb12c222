"""vLLM in this process, and the engine that takes the trainer's weights through vLLM's own weight-transfer API.

Imported by engines.start alone, after the environment is set.
"""

from collections.abc import Iterable

import torch
from vllm import LLM, SamplingParams
from vllm.config.weight_transfer import WeightTransferConfig

from common import weight_transfer
from common.placement import Layout, World
from common.rollout import Done, Rollout, collate, gather_prompts
from common.safe_pickle import has_safetensors


class VLLMEngine:
    """One engine a rank, or one for `world.rollout_tp` ranks, which then all make every call together."""

    wire_dtype = None  # the weights do not leave the process: vLLM's loader casts them

    def __init__(
        self,
        model_path: str,
        stop_token_ids: list[int],
        world: World,
        dtype: torch.dtype,
        *,
        max_model_len: int,
        max_num_seqs: int,
        layout: Layout,
    ):
        weight_transfer.register()
        cuda = world.device.type == "cuda"
        self.stop_token_ids, self.world, self.weight_version = stop_token_ids, world, 0
        self.asleep = False
        self.llm = LLM(
            model_path,
            load_format="safetensors" if has_safetensors(model_path) else "auto",
            skip_tokenizer_init=True,  # token ids in, token ids out
            generation_config="vllm",  # no sampling defaults from the model's folder
            # As the trainer's: rounding logits is most of a bfloat16 gap. On a CPU weight_transfer.Float32Head does it.
            hf_overrides={"head_dtype": "float32"} if cuda else None,
            logprobs_mode="processed_logprobs",  # after the temperature, as the trainer computes them
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            seed=world.engine_index,
            tensor_parallel_size=world.rollout_tp,
            distributed_executor_backend="external_launcher",  # the ranks are there already: torchrun made them
            weight_transfer_config=WeightTransferConfig(backend="in_process"),
            use_tqdm_on_load=False,
            enforce_eager=not cuda,  # CUDA graphs on a GPU; nothing to capture on a CPU
            max_num_batched_tokens=layout.rollout_batched_tokens or None,
            **(dict(enable_sleep_mode=True, gpu_memory_utilization=layout.rollout_memory or 0.4) if cuda else {}),
            # The responses to one prompt share its keys and values in whole blocks, else of 128 tokens.
            **(dict(block_size=32) if not cuda and max_model_len > 128 else {}),
        )

    def settings(self) -> str:
        """What was derived from the job, in a line."""
        config = self.llm.llm_engine.vllm_config
        cache, scheduler = config.cache_config, config.scheduler_config
        return (
            f"{scheduler.max_num_seqs} responses at once, {scheduler.max_num_batched_tokens} tokens a forward, "
            f"KV cache of {cache.num_gpu_blocks} blocks of {cache.block_size} tokens"
        )

    def generate(
        self, prompt_ids: list[list[int]], n: int, temperature: float, max_tokens: int, seed: int,
        done: Done | None = None,
    ) -> Rollout:  # fmt: skip
        """n responses to each prompt, in submission order. Collective over the ranks that share this engine."""
        everyone, first = gather_prompts(prompt_ids, self.world)
        sampling = SamplingParams(
            n=n,
            temperature=temperature,
            top_p=1.0,  # top-p, top-k and penalties would sample from another policy than the one trained
            top_k=-1,
            max_tokens=max_tokens,
            stop_token_ids=self.stop_token_ids,
            logprobs=0,  # the sampled token's alone
            flat_logprobs=True,
            detokenize=False,
        )
        # The sampler draws from the process's generator. Shifted, so that no engine at one step repeats another's.
        torch.manual_seed((seed << 12) + self.world.engine_index)
        requests = [{"prompt_token_ids": ids} for ids in everyone]
        names = self.llm.enqueue(requests, sampling, use_tqdm=False)
        places = {name.partition("-")[0]: place for place, name in enumerate(names)}  # behind "-" is vLLM's own, random
        outputs = {}
        while self.llm.llm_engine.has_unfinished_requests():
            for output in self.llm.llm_engine.step():
                place = places[output.request_id] - first
                if output.finished and 0 <= place < len(prompt_ids):
                    outputs[place] = output
                    tell(done, place, output.outputs)
        outputs = [outputs[place] for place in range(len(prompt_ids))]
        responses = [response for output in outputs for response in output.outputs]
        return collate(
            [ids for ids in prompt_ids for _ in range(n)],
            [list(response.token_ids) for response in responses],
            [response.logprobs.logprobs for response in responses],
            [response.finish_reason == "length" for response in responses],
            self.weight_version,
            self.world.device,
        )

    def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace all weights by (name, full tensor) pairs. Collective: gathering them is."""
        if self.asleep:
            self.llm.wake_up(tags=["weights"])
        self.llm.start_weight_update()
        self.llm.update_weights({"update_info": {"weights": named_tensors}})
        self.llm.finish_weight_update()
        if self.asleep:
            self.llm.wake_up(tags=["kv_cache"])
        self.asleep = False
        self.llm.reset_prefix_cache()  # else prompts would be continued from the old weights' keys and values
        self.weight_version += 1

    def sleep(self) -> None:
        """Give weights and KV cache back to the GPU's trainer; the next load_weights wakes the engine."""
        if self.world.device.type == "cuda":
            self.llm.sleep(level=2)
            self.asleep = True

    def shutdown(self) -> None:
        """Before World.shutdown: the engine's process groups live inside ours."""
        self.llm.llm_engine.engine_core.shutdown()


def tell(done: Done | None, place: int, responses: list) -> None:
    """Call done() with a prompt's responses, vLLM's own objects."""
    if done is not None:
        ended = [response.finish_reason == "length" for response in responses]
        done(place, [list(response.token_ids) for response in responses], ended)
