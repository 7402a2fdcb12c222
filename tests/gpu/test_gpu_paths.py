"""What a CPU can show of the paths that only a GPU takes: requests, settings, orders of calls, addresses, messages.

The other files of this folder make the real calls.
"""

import inspect
import os
import subprocess
import sys
import tempfile
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from conftest import ROOT
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, Qwen2Config, masking_utils

from common import weight_sync
from common.errors import BadInput, RunFailed
from common.placement import Layout
from common.preflight import memory
from common.preflight.machine import check_layout
from common.rollout import engines, vllm_engine
from common.rollout.servers import process, vllm_api, weights
from common.rollout.vllm_engine import EngineConfig, VLLMEngine
from common.trainer import attention, batching, model, packing_check

CUDA = torch.device("cuda")


def a_world(rank: int = 0) -> SimpleNamespace:
    """One of two ranks with a GPU each."""
    return SimpleNamespace(device=CUDA, size=2, rollout_tp=1, engine_index=rank, tp_group=None)


def requested(rank: int, seed: int, n: int = 8) -> list:
    """The sampling parameters of three prompts."""
    settings = vllm_engine.sampling_settings(1.0, 4, [1]) | {"n": n}
    return VLLMEngine.sampling_params(SimpleNamespace(world=a_world(rank)), settings, seed, 3)


@pytest.mark.parametrize("run", [0, 7, 2**31 - 1])
def test_each_request_brings_a_seed_of_its_own(run):
    """A prompt's n responses take its seed and those that follow: none may belong to two responses of a run."""
    steps = [run * 2**20 + step for step in (1, 2, 5000)]
    seeds = [
        sampling.seed + response
        for step in steps
        for rank in (0, 1)
        for sampling in requested(rank, step)
        for response in range(8)
    ]
    assert len(set(seeds)) == len(seeds) == 3 * 2 * 3 * 8 and min(seeds) >= 0 and max(seeds) < 2**63
    assert requested(0, steps[1]) == requested(0, steps[1])


def test_vllm_gives_the_responses_to_a_prompt_the_seeds_that_follow():
    from vllm.v1.engine.parallel_sampling import ParentRequest

    sampling = requested(1, 50)[0]
    parent = ParentRequest(SimpleNamespace(request_id="0", external_req_id="0", params=sampling))
    assert [parent.get_child_info(i)[1].seed - sampling.seed for i in range(3)] == [0, 1, 2]


def test_an_engine_wakes_takes_the_weights_and_forgets_its_cache_in_this_order():
    engine = SimpleNamespace(llm=mock.Mock(), world=a_world(), asleep=False, never=(), weight_version=0)
    VLLMEngine.sleep(engine)
    VLLMEngine.load_weights(engine, [])
    VLLMEngine.load_weights(engine, [])  # it is awake: nothing to wake
    call = mock.call
    update = [
        call.start_weight_update(),
        call.update_weights({"update_info": {"weights": []}}),
        call.finish_weight_update(),
    ]
    woken = [call.wake_up(tags=["weights"]), *update, call.wake_up(tags=["kv_cache"]), call.reset_prefix_cache()]
    assert engine.llm.mock_calls == [call.sleep(level=2), *woken, *update, call.reset_prefix_cache()]
    assert engine.weight_version == 2


def test_an_engine_that_sees_images_wakes_with_positions_that_are_an_index():
    """vLLM has written those of the tokens so far. It reads those of a graph's padding as well."""
    rope = SimpleNamespace(positions=torch.full((3, 5), -1))
    workers = [
        SimpleNamespace(model_runner=SimpleNamespace(model_state=SimpleNamespace(rope_state=rope))),
        SimpleNamespace(model_runner=SimpleNamespace(model_state=SimpleNamespace(rope_state=None))),
        SimpleNamespace(model_runner=SimpleNamespace()),  # vLLM's first runner keeps them outside the sleep's memory
    ]
    llm = mock.Mock()
    llm.collective_rpc.side_effect = lambda method: [method(worker) for worker in workers]
    engine = SimpleNamespace(llm=llm, world=a_world(), asleep=True, never=(7,), weight_version=0)
    VLLMEngine.load_weights(engine, [])
    assert rope.positions.tolist() == [[0] * 5] * 3
    assert [name for name, _, _ in llm.mock_calls[:2]] == ["wake_up", "collective_rpc"]


def test_vllm_still_has_the_positions_that_are_cleared():
    from vllm.v1.worker.gpu.mm import rope
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState

    assert "self.positions = torch.zeros(" in inspect.getsource(rope.RopeState.__init__)
    assert "self.rope_state = " in inspect.getsource(DefaultModelState.__init__)


@pytest.mark.parametrize("dtype, precision", [(torch.float32, "ieee"), (torch.bfloat16, None)])
def test_a_float32_engine_does_not_round_to_tf32(dtype, precision, monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    engines.set_vllm_environment(CUDA, dtype)
    assert os.environ.get("TRITON_F32_DEFAULT") == precision
    assert os.environ["VLLM_NO_USAGE_STATS"] == "1" and os.environ["VLLM_ALLREDUCE_USE_FLASHINFER"] == "0"
    script = (ROOT / "scripts/serve_rollout.sh").read_text()  # a server that a user starts has the same variables
    assert all(name in script for name in [*os.environ, "TRITON_F32_DEFAULT"] if name != "VLLM_LOGGING_LEVEL")


@pytest.mark.parametrize("split, share, transfer", [(False, 0.4, "in_process"), (True, 0.9, "nccl")])
def test_vllm_knows_every_setting_that_an_engine_on_a_gpu_is_given(split, share, transfer, models, monkeypatch):
    from vllm.engine.arg_utils import EngineArgs

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    layout = Layout(rollout_placement="split" if split else "colocate")
    sizes = {"tensor_parallel": 1, "layout": layout, "max_model_len": 200, "max_num_seqs": 256}
    config = EngineConfig(model_path=models["tied"], dtype=torch.bfloat16, **sizes)
    arguments = EngineArgs(**vllm_engine.engine_settings(config))  # an argument that it lacks is a TypeError
    assert arguments.hf_overrides == {"head_dtype": "float32"} and arguments.logprobs_mode == "processed_logprobs"
    assert arguments.gpu_memory_utilization == share and not arguments.enforce_eager
    assert arguments.weight_transfer_config.backend == transfer
    assert arguments.compilation_config.pass_config.fuse_allreduce_rms is False
    # A server that a user starts has the same settings.
    script = (ROOT / "scripts/serve_rollout.sh").read_text()
    assert '{"pass_config": {"fuse_allreduce_rms": false}}' in script and '{"head_dtype": "float32"}' in script


def kernel_of_a_gpu(module, query, key, value, attention_mask, *, spans, scaling, **settings):
    """packed_attention as a GPU computes it. On the meta device the kernel has shapes and no numbers."""
    row = (query.squeeze(0), key.squeeze(0), value.squeeze(0))
    return attention.variable_length_attention(*row, spans, attention.ScoreOptions(scaling))[None], None


def test_the_activations_of_a_token_are_as_estimated():
    """What a backward keeps with the kernel of a GPU, counted without numbers: qwen2 at the sizes of 0.5 B and 7 B."""
    meta = torch.device("meta")
    AttentionInterface.register("counted", kernel_of_a_gpu)
    for hidden, wide, heads, keys in ((896, 4864, 14, 2), (3584, 18944, 28, 4)):
        config = Qwen2Config(
            vocab_size=1000,
            hidden_size=hidden,
            intermediate_size=wide,
            num_hidden_layers=3,
            num_attention_heads=heads,
            num_key_value_heads=keys,
        )
        config._attn_implementation = "counted"
        with meta:
            policy = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        for groups in ([(256, [224] * 7)], [(256, [256])] * 4):
            tokens = sum(prompt + sum(responses) for prompt, responses in groups)
            spans = attention.kernel_spans(attention.spans(groups, torch.device("cpu")).runs, meta)
            counted = kept_bytes(policy, tokens, spans) / tokens
            estimated = memory.activation_bytes(config, torch.bfloat16, checkpointing=False)
            assert 0.9 <= estimated / counted <= 1.1, (hidden, groups, counted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["qwen3_5_text", "granitemoehybrid", "falcon_h1", "mamba2", "mamba", "jamba"])
def test_a_recurrence_keeps_what_is_estimated(name, dtype):
    """In transformers' own code in PyTorch, with layers of usual sizes: many times what attention keeps."""
    width = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "vocab_size": 128}
    linear = {"layer_types": ["linear_attention"] * 2}
    mamba = {"mamba_n_heads": 16, "mamba_d_head": 64, "mamba_d_state": 128}
    own = {
        "qwen3_5_text": {"linear_num_value_heads": 16, "linear_num_key_heads": 8, **linear},
        "granitemoehybrid": {"num_local_experts": 0, "num_experts_per_tok": 0, **mamba, **linear},
        "falcon_h1": {"mamba_d_ssm": 1024, **mamba},
        "mamba2": {"num_heads": 16, "head_dim": 64, "state_size": 128, "intermediate_size": None},
        "mamba": {"intermediate_size": None},
        "jamba": {"num_experts": 1, "num_experts_per_tok": 1, "attn_layer_offset": 3, "mamba_dt_rank": 32},
    }
    settings = {key: value for key, value in {**width, **own[name]}.items() if value is not None}
    config = AutoConfig.for_model(name, **settings)
    policy = AutoModelForCausalLM.from_config(config, dtype=dtype)
    counted = kept_bytes(policy, 512) / 512
    estimated = memory.activation_bytes(config, dtype, checkpointing=False)
    assert 0.9 <= estimated / counted <= 1.4, counted
    attention_alone = memory.activation_bytes(Qwen2Config(**width), dtype, checkpointing=False)
    assert counted > 3 * attention_alone


def kept_bytes(policy, tokens: int, spans=None) -> int:
    """Bytes that a forward of the model's layers keeps for the backward, its parameters left out."""
    own = {parameter.untyped_storage()._cdata for parameter in policy.parameters()}
    kept = {}

    def count(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage
        return tensor

    ids = torch.zeros(1, tokens, dtype=torch.long, device=policy.device)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        if spans is None:
            policy.base_model(input_ids=ids, use_cache=False)
        else:
            policy.base_model(input_ids=ids, position_ids=ids, use_cache=False, spans=spans)
    return sum(storage.nbytes() for storage in kept.values())


def test_transformers_does_not_ask_the_gpu_whether_rows_are_packed(models, world, monkeypatch):
    """It would wait for the GPU in every forward."""
    policy, asked = model.load(models["tied"], world, torch.float32), []
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", asked.append)
    packing_check.hidden_states_of(policy, packing_check.texts(policy, world), batching.Compute(), world)
    assert policy.packed and asked == []


@pytest.mark.parametrize("second, address", [("127.0.0.1", "127.0.0.1"), ("10.0.0.7", "10.0.0.1")])
def test_servers_join_nccl_with_ranks_of_their_own_at_an_address_that_they_reach(second, address, monkeypatch):
    """Also where the first of them is on this node. vLLM's own sender, before it opens its end of NCCL."""
    import vllm.distributed.weight_transfer.nccl_engine as nccl
    import vllm.utils.network_utils as network

    monkeypatch.setattr(network, "get_ip", lambda: "10.0.0.1")
    monkeypatch.setattr(nccl, "open_trainer_endpoint", lambda info: None)
    control = vllm_api.Control(["http://localhost:1", f"http://{second}:2"], workers=[2, 4])
    control.request = mock.Mock()
    policy = torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.Linear(8, 3))
    source = weights.SingleIteration(weight_sync.FullParameters(policy, torch.bfloat16))
    sender = vllm_api.nccl_sender(source, control)
    _, path, bodies = control.request.call_args.args
    infos = [body["init_info"] for body in bodies]
    assert path == "/init_weight_transfer_engine" and sender.is_sender
    assert [info["rank_offset"] for info in infos] == [1, 3]
    for info in infos:
        assert (info["master_address"], info["world_size"]) == (address, 1 + 2 + 4)
        # Both ends cut the weights alike.
        assert info["packed_buffer_size_bytes"] == sender.packed_buffer_size_bytes == weights.BROADCAST_BYTES
    assert list(sender.source.metadata()) == source.metadata()


@pytest.mark.parametrize("said", ["No available memory for the cache blocks. Try this.", "another cause"])
@pytest.mark.parametrize("gpu", [True, False])
def test_an_engine_without_enough_memory_says_which_flag_to_change(said, gpu, monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(vllm_engine, "VLLMEngine", mock.Mock(side_effect=ValueError(said)))
    with pytest.raises((RunFailed, ValueError)) as failed:
        engines.start_in_process(None, [1], a_world())
    if "memory" in said:
        assert failed.value.code == "engine-memory" and "--rollout-tp" in str(failed.value)
        assert ("--rollout-memory" in str(failed.value)) == gpu  # that flag does nothing on a CPU
    else:
        assert str(failed.value) == said


@pytest.mark.parametrize(
    "said, code, named",
    [
        ("ValueError: No available memory for the cache blocks.", "engine-memory", "--max-response-tokens"),
        ("OSError: no such model", "server-start", "no such model"),
    ],
)
def test_a_server_without_enough_memory_says_so_too(said, code, named):
    log = tempfile.TemporaryFile()  # noqa: SIM115 -- stop() closes it
    command = [sys.executable, "-c", f"import sys; sys.exit({said!r})"]
    running = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True)
    server = process.Server("http://127.0.0.1:9", running, log)
    with pytest.raises(RunFailed) as failed:
        server.wait_until_ready()
    assert failed.value.code == code and named in str(failed.value) and server.url in str(failed.value)
    server.stop()


def test_a_server_that_hangs_at_its_start_is_given_up(monkeypatch):
    monkeypatch.setattr(process, "START_SECONDS", 0.3)
    log = tempfile.TemporaryFile()  # noqa: SIM115 -- stop() closes it
    running = subprocess.Popen(["sleep", "30"], stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True)
    server = process.Server("http://127.0.0.1:9", running, log)
    with pytest.raises(RunFailed) as failed:
        server.wait_until_ready()
    server.stop()
    assert failed.value.code == "server-start" and running.poll() not in (None, 0), "it was still running"


@pytest.mark.parametrize("visible, names", [("4,5,6,7", ["4", "7"]), (None, ["0", "3"])])
def test_a_server_gets_gpus_that_this_process_may_use(monkeypatch, visible, names):
    """Of a node that is shared with other jobs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [process.device_name(device) for device in (0, 3)] == names


@pytest.mark.skipif(torch.cuda.is_available(), reason="its device is a core")
def test_servers_on_devices_of_one_node_are_refused_on_several(monkeypatch):
    monkeypatch.setattr(os, "environ", {**os.environ, "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"})
    with pytest.raises(BadInput, match="--rollout-devices"):
        check_layout(Layout("split", (min(os.sched_getaffinity(0)),)), 1, "vllm")
