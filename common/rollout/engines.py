"""The engine samples: prompts go in as token ids; responses come out as token ids and the log-probs of each token.

There are three engines with the same four methods: `VLLMEngine` (vllm_engine.py) runs vLLM in each rank's process,
`ServerEngine` (servers/engine.py) uses vLLM's servers beside the ranks, `HFEngine` (hf_engine.py) uses transformers.

    generate(prompt_ids, n, temperature, max_tokens, seed, done, reply) -> Rollout
                                 done: rollout.Done or None; it lets a reward grade while other prompts are sampled
                                 reply: turns.Reply or None; what an environment answers to a turn
    load_weights(named_tensors)  take the trainer's weights, full tensors of wire_dtype; weight_sync.push calls it
    sleep()                      free the memory of weights and KV cache until the next load_weights
    shutdown()                   call it before the process group is destroyed
"""

import gc
import os
import warnings

import torch
from transformers import AutoConfig, PreTrainedConfig

from common.errors import BadInput, RunFailed, say
from common.placement import Layout, World, rank_memory, use_cores

MOST_SEQUENCES = 512  # responses that one engine works on at the same time
# Families that vLLM 0.32 gets wrong, and how (docs/models.md).
NOT_BY_VLLM = {"gpt_oss": "vLLM keeps some of the old weights after an update"}
NOT_BY_VLLM_ON_A_CPU = dict.fromkeys(("deepseek_v2", "deepseek_v3"), "vLLM computes other log-probs on a CPU")
MEMORY_CURE = "change --rollout-memory, or take a larger --rollout-tp or a smaller --max-response-tokens"


def check_family(backend: str, model_path: str) -> None:
    """Refuse a model that the engine would sample from with other weights or log-probs. Raises BadInput."""
    family = AutoConfig.from_pretrained(model_path).model_type
    wrong = NOT_BY_VLLM | ({} if torch.cuda.is_available() else NOT_BY_VLLM_ON_A_CPU)
    if backend == "vllm" and family in wrong:
        raise BadInput(f"--model {model_path}: {wrong[family]} ({family}); use --rollout-backend hf")


def start(
    backend: str, model_path: str, stop_token_ids: list[int], world: World, dtype: torch.dtype, *,
    max_model_len: int, sequences: int, layout: Layout = Layout(), rollout_tp: int = 1,
):  # fmt: skip
    """Load an engine on this rank (with rollout_tp > 1: on these ranks together), or start the layout's servers.

    Collective: every rank calls it. Raises RunFailed if there is too little memory, or a server does not start.
    model_path: local folder or Hub name. stop_token_ids: sampling one of them ends a response and is part of it.
    max_model_len: tokens of prompt and response. sequences: responses that one engine is asked for in one call.
    """
    if backend == "hf":
        from common.rollout.hf_engine import HFEngine

        return HFEngine(model_path, stop_token_ids, world, dtype)
    limits = {"max_model_len": max_model_len, "max_num_seqs": min(MOST_SEQUENCES, sequences)}
    environment = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    if world.device.type == "cuda":
        environment["VLLM_ALLREDUCE_USE_FLASHINFER"] = "0"  # it would be compiled at the first use, by nvcc
        if dtype == torch.float32:
            environment["TRITON_F32_DEFAULT"] = "ieee"  # vLLM's attention kernel would round its products to TF32
    if world.device.type == "cpu":
        limits["kv_cache_memory_bytes"] = kv_cache_bytes(
            AutoConfig.from_pretrained(model_path).get_text_config(), dtype, **limits
        )
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # vLLM would pin the engines of two ranks to one core
        environment["TORCHDYNAMO_DISABLE"] = "1"  # compiling costs 4-14 s at the start and gains nothing on a CPU
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # no process of its own for an engine's one worker
    environment = {name: os.environ.get(name, value) for name, value in environment.items()}
    # vLLM reads its environment when it is imported, which rank 0 does to send weights to servers, too.
    os.environ["VLLM_LOGGING_LEVEL"] = environment["VLLM_LOGGING_LEVEL"]
    if layout.split:
        from common.rollout.servers.engine import ServerEngine

        environment["VLLM_SERVER_DEV_MODE"] = "1"  # opens the routes for weights
        return ServerEngine(model_path, stop_token_ids, world, dtype, rollout_tp, layout, environment, **limits)
    os.environ.update(environment)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # an engine in this process takes weights by reference
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # raised inside vLLM about torch
        from common.rollout.vllm_engine import VLLMEngine

        try:
            engine = VLLMEngine(model_path, stop_token_ids, world, dtype, layout, **limits)
        except ValueError as error:
            if "memory" not in str(error):
                raise
            said = f"vLLM with {limits}: {str(error).split('. ')[0]}"
            raise RunFailed(f"{said}; {MEMORY_CURE}", code="engine-memory") from None
    say(f"engine: {engine.settings()}")
    use_cores()  # vLLM has changed the number of threads
    gc.freeze()  # Python's collector need not walk through everything that is loaded, again in every step
    return engine


def kv_cache_bytes(config: PreTrainedConfig, dtype: torch.dtype, max_model_len: int, max_num_seqs: int) -> int:
    """Bytes of a CPU engine's KV cache: for all responses at their longest, each in blocks of 32 tokens and one block
    more. At least 128 MiB, and at most a quarter of this rank's memory. vLLM fills it with zeros, seconds a GiB.
    """
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    bytes_per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * dtype.itemsize
    tokens = max_num_seqs * 32 * (max_model_len // 32 + 2)
    return int(max(2**27, min(bytes_per_token * tokens, rank_memory() / 4)))
