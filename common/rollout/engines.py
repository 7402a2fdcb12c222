"""The engine samples: prompts go in as token ids; responses come out as token ids and the log-probs of each token.

There are three engines with the same four methods: `VLLMEngine` (vllm_engine.py) runs vLLM in each rank's process,
`ServerEngine` (servers/engine.py) talks to servers of vLLM or SGLang, `HFEngine` (hf_engine.py) uses transformers.

    generate(prompt_ids, n, temperature, max_tokens, seed, done, reply) -> Rollout
                                 n responses to each of this rank's prompts; temperature 0 is greedy; seed: no two calls
                                 that sample may have the same
                                 done: rollout.Done or None; it lets a reward grade while other prompts are sampled
                                 reply: turns.Reply or None; what an environment answers to a turn
    load_weights(named_tensors)  take the trainer's weights, full tensors; weight_sync.push calls it
    sleep()                      free memory until the next call: on a GPU weights and KV cache until load_weights, on a
                                 CPU vLLM's KV cache (HFEngine frees nothing)
    shutdown()                   call it before the process group is destroyed

and these attributes:

    wire_dtype, saved_names      what load_weights wants: see weight_sync.FullParameters
    weight_version               number of the last push; a resumed run sets it

Sampling ahead needs more, which ServerEngine alone has.
"""

import gc
import os
import warnings

import torch
from transformers import AutoConfig, PreTrainedConfig

from common.data import families
from common.errors import BadInput, RunFailed, say
from common.placement import Layout, World, rank_memory, use_cores
from common.rollout import vllm_engine
from common.rollout.vllm_engine import CPU_BLOCK_TOKENS, EngineConfig

MOST_SEQUENCES = 512  # responses that one engine works on at the same time
# Families that vLLM 0.32 gets wrong (docs/models.md).
STALE_IN_VLLM = ("gpt_oss",)
WRONG_IN_VLLM_ON_A_CPU = ("deepseek_v2", "deepseek_v3", "lfm2", "lfm2_moe", "llama4", "llama4_text")
# Families that vLLM cannot start on a CPU: gated DeltaNet has no float32 there, and experts without gates and sparse
# attention have no kernel.
MISSING_IN_VLLM_ON_A_CPU = (
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_text",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "nemotron_h",
    "deepseek_v32",
    "glm_moe_dsa",
)


def check_family(backend: str, model_path: str) -> None:
    """Refuse a model that vLLM cannot start, or samples from with other weights or log-probs. Raises BadInput."""
    if backend != "vllm":
        return
    family = AutoConfig.from_pretrained(model_path).model_type
    problem = ""
    if family in STALE_IN_VLLM:
        problem = "vLLM keeps some of the old weights after an update"
    elif family in WRONG_IN_VLLM_ON_A_CPU and not torch.cuda.is_available():
        problem = "vLLM computes other log-probs on a CPU"
    elif family in MISSING_IN_VLLM_ON_A_CPU and not torch.cuda.is_available():
        problem = "vLLM has no kernels for it on a CPU"
    if problem:
        raise BadInput(f"--model {model_path}: {problem} ({family}); use --rollout-backend hf")


def check_servers(backend: str, model_path: str, max_model_len: int, dtype: torch.dtype, layout: Layout) -> None:
    """Refuse servers of the user that could not sample for this trainer.

    Raises BadInput, on the rank of each node that prints errors. max_model_len, dtype: as for start().
    """
    if not layout.rollout_urls or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    if backend == "sglang":
        from common.rollout.servers import sglang_api

        sglang_api.check_servers(layout.rollout_urls, model_path, max_model_len, dtype)
    else:
        from common.rollout.servers import vllm_api

        vllm_api.check_servers(layout.rollout_urls, max_model_len, dtype)


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
    """Start the layout's servers or, without any, load this rank's engine: its own, or one that rollout_tp ranks share.

    Collective: every rank calls it. Raises RunFailed if there is too little memory, or a server does not start.
    model_path: local folder or Hub name. stop_token_ids: sampling one of them ends a response and is part of it.
    max_model_len: tokens of prompt and response. sequences: responses that one engine is asked for in one call.
    rollout_tp: devices of one server. Without servers it is not read: the number given to placement.init() counts.
    """
    # A run imports only the engine that it uses.
    if backend == "hf":
        from common.rollout.hf_engine import HFEngine

        return HFEngine(model_path, stop_token_ids, world, dtype, max_model_len)
    max_num_seqs = min(MOST_SEQUENCES, sequences)
    # On a GPU vLLM takes a share of the memory for its KV cache. On a CPU it wants a number of bytes.
    cache_bytes = 0
    if world.device.type == "cpu":
        model_config = AutoConfig.from_pretrained(model_path).get_text_config()
        cache_bytes = kv_cache_bytes(model_config, dtype, max_model_len, max_num_seqs)
    config = EngineConfig(
        backend=backend,
        model_path=model_path,
        dtype=dtype,
        tensor_parallel=rollout_tp if layout.split else world.rollout_tp,
        layout=layout,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        kv_cache_bytes=cache_bytes,
    )
    if backend == "vllm":
        set_vllm_environment(world.device, dtype)
    if layout.split:
        from common.rollout.servers.engine import ServerEngine

        return ServerEngine(config, stop_token_ids, world)
    return start_in_process(config, stop_token_ids, world)


def set_vllm_environment(device: torch.device, dtype: torch.dtype) -> None:
    """Set what vLLM reads from the environment when it is imported. Servers inherit it. The user's own values stay."""
    variables = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    if device.type == "cuda":
        # FlashInfer's all-reduce would be compiled by nvcc at its first use.
        variables["VLLM_ALLREDUCE_USE_FLASHINFER"] = "0"
        if dtype == torch.float32:
            # vLLM's attention kernel would round the factors of its products to TF32.
            variables["TRITON_F32_DEFAULT"] = "ieee"
    else:
        # vLLM would pin the engines of two ranks to the same core.
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        # Compiling costs 4 to 14 s at the start and gains nothing on a CPU.
        variables["TORCHDYNAMO_DISABLE"] = "1"
        # An engine on a CPU has one worker, which needs no process to itself.
        variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def start_in_process(config: EngineConfig, stop_token_ids: list[int], world: World):
    """Load vLLM in this process. Raises RunFailed if the GPU's memory is too small for its weights and KV cache."""
    # The engine takes weights by reference, so it must be in this process.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # raised inside vLLM about torch
        try:
            engine = vllm_engine.VLLMEngine(config, stop_token_ids, world)
        except ValueError as error:
            if not vllm_engine.is_about_memory(str(error)):
                raise
            reason = str(error).split(". ")[0]
            cure = vllm_engine.memory_cure()
            raise RunFailed(f"vLLM does not start: {reason}; {cure}", code="engine-memory") from None
    say(f"engine: {engine.settings()}")
    use_cores()  # on a GPU vLLM has set one thread; on a CPU it has also made this call do nothing
    # All that is loaded by now stays. Python's garbage collector need not walk through it in every step.
    gc.freeze()
    return engine


def kv_bytes_per_token(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Bytes of KV cache for one token: a key and a value in each layer of attention. config: of the language model."""
    layers = families.layer_configs(config)
    kinds = families.layer_kinds(config) or ["full_attention"] * len(layers)
    own = len(layers) - families.layers_without_own_keys(config)
    values = 0
    for layer, kind in list(zip(layers, kinds))[:own]:
        queries, keys = families.heads_of(layer)
        if not queries or kind in families.WITHOUT_KEYS:
            continue
        if latent := getattr(layer, "kv_lora_rank", None):  # one vector for keys and values of all heads (DeepSeek)
            values += latent + layer.qk_rope_head_dim
        else:
            values += 2 * keys * (getattr(layer, "head_dim", None) or layer.hidden_size // queries)
    return values * dtype.itemsize


def kv_cache_bytes(config: PreTrainedConfig, dtype: torch.dtype, max_model_len: int, max_num_seqs: int) -> int:
    """Bytes of a CPU engine's KV cache: room for all responses at their longest.

    At least 128 MiB, and at most a quarter of this rank's memory. vLLM fills it with zeros at the start, seconds a GiB.
    """
    # A response fills whole blocks. vLLM may need one block more, for the next token.
    blocks = max_num_seqs * (max_model_len // CPU_BLOCK_TOKENS + 2)
    needed = blocks * CPU_BLOCK_TOKENS * kv_bytes_per_token(config, dtype)
    return int(max(2**27, min(needed, rank_memory() / 4)))
