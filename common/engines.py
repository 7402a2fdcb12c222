"""The engine: prompts in as token ids; responses out as token ids and the log-probs they were sampled with.

Three engines behind the same four methods: `VLLMEngine` (common/vllm_engine.py) in each rank's process, `ServerEngine`
(common/server_engine.py) for vLLM's servers beside them, and `HFEngine` (common/hf_engine.py) by transformers.

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

import torch
from transformers import AutoConfig, PreTrainedConfig

from common.errors import say
from common.hf_engine import HFEngine
from common.placement import Layout, World, use_cores
from common.server_engine import ServerEngine


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
