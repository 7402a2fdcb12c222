"""What can be shown of the GPU's code paths without a GPU. scripts/gpu_check.py shows the rest on one."""

import contextlib
import inspect
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from types import SimpleNamespace

import families
import psutil
import pytest
import torch
from conftest import ROOT
from helpers import load
from torch._dynamo.backends.common import aot_autograd
from transformers import AttentionInterface, AutoModelForCausalLM, Qwen2Config, masking_utils

from common import weight_sync
from common.errors import BadInput, RunFailed
from common.placement import Layout
from common.preflight import memory
from common.preflight.machine import check_layout
from common.rollout import engines, vllm_engine
from common.rollout.servers import process, weights
from common.rollout.servers.client import Control
from common.trainer import attention, logits, model
from common.trainer.batching import Compute

CUDA = torch.device("cuda")
on_a_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="fakes a GPU")


class Stop(Exception):
    """Raised by a fake at the point to which a test wants to come."""


VLLMEngine = vllm_engine.VLLMEngine


def an_engine(rank: int = 0, size: int = 2) -> VLLMEngine:
    """An engine of a world with GPUs, without an LLM."""
    engine = object.__new__(VLLMEngine)
    engine.world = SimpleNamespace(device=CUDA, size=size, rollout_tp=1, engine_index=rank, tp_group=None)
    engine.stop_token_ids, engine.weight_version, engine.asleep, engine.never = [1], 0, False, ()
    return engine


def requested(rank: int, seed: int, n: int = 8) -> list:
    """The sampling parameters that an engine asks vLLM for, with three prompts."""
    found = []

    def enqueue(requests, sampling, use_tqdm):
        found.extend(sampling)
        raise Stop

    engine = an_engine(rank)
    engine.llm = SimpleNamespace(enqueue=enqueue)
    with pytest.raises(Stop):
        engine.generate([[5], [6], [7]], n=n, temperature=1.0, max_tokens=4, seed=seed)
    return found


@pytest.mark.parametrize("run", [0, 7, 2**31 - 1])
def test_on_a_gpu_each_request_brings_a_seed_of_its_own(run):
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


def test_vllms_sampler_on_gpus_takes_the_seeds_of_requests(monkeypatch):
    """Its states are made as in vLLM's runner. Without a seed a request takes one from numpy's global generator."""
    import vllm.v1.worker.gpu.buffer_utils as buffers
    from vllm.v1.engine.parallel_sampling import ParentRequest
    from vllm.v1.worker.gpu.sample.states import SamplingStates

    monkeypatch.setattr(buffers, "is_uva_available", lambda: False)
    states = SamplingStates(8, 100)
    parent = ParentRequest(SimpleNamespace(request_id="0", external_req_id="0", params=requested(1, 50)[0]))
    asked = [parent.get_child_info(i)[1] for i in range(3)]
    assert [sampling.seed - asked[0].seed for sampling in asked] == [0, 1, 2]
    for i, sampling in enumerate(asked):
        states.add_request(i, sampling)
    assert states.seeds.np[:3].tolist() == [sampling.seed for sampling in asked]


def test_an_engine_wakes_takes_the_weights_and_forgets_its_cache_in_this_order():
    calls = []
    record = lambda name: lambda *args, **kwargs: calls.append((name, *args, *kwargs.values()))
    names = ("sleep", "wake_up", "start_weight_update", "update_weights", "finish_weight_update", "reset_prefix_cache")
    engine = an_engine()
    engine.llm = SimpleNamespace(**{name: record(name) for name in names})
    engine.sleep()
    engine.load_weights([])
    engine.load_weights([])  # it is awake: nothing to wake
    update = [("start_weight_update",), ("update_weights", {"update_info": {"weights": []}}), ("finish_weight_update",)]
    slept = [("sleep", 2), ("wake_up", ["weights"]), *update, ("wake_up", ["kv_cache"]), ("reset_prefix_cache",)]
    assert calls == [*slept, *update, ("reset_prefix_cache",)] and engine.weight_version == 2


@pytest.mark.parametrize("dtype, said", [(torch.float32, "ieee"), (torch.bfloat16, None)])
def test_a_float32_engine_does_not_round_to_tf32(dtype, said, models, monkeypatch):
    def stop(*args, **kwargs):
        raise Stop

    monkeypatch.setattr(os, "environ", {**os.environ})
    monkeypatch.setattr(vllm_engine, "VLLMEngine", stop)
    with pytest.raises(Stop):
        engines.start("vllm", models["tied"], [1], an_engine().world, dtype, max_model_len=64, sequences=8)
    assert os.environ.get("TRITON_F32_DEFAULT") == said
    assert os.environ["VLLM_NO_USAGE_STATS"] == "1" and os.environ["VLLM_ALLREDUCE_USE_FLASHINFER"] == "0"
    script = (ROOT / "scripts/serve_rollout.sh").read_text()  # a server that a user starts has the same variables
    assert all(
        name in script for name in ("TRITON_F32_DEFAULT", "VLLM_NO_USAGE_STATS", "VLLM_ALLREDUCE_USE_FLASHINFER")
    )


FAKED_H100 = """
import json, sys, types
sys.modules["vllm._C_stable_libtorch"] = types.ModuleType("vllm._C_stable_libtorch")  # of the GPU wheel
import torch, vllm.platforms
from vllm.platforms.cuda import NonNvmlCudaPlatform
from vllm.platforms.interface import DeviceCapability
class H100(NonNvmlCudaPlatform):
    get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(9, 0))
    get_device_name = classmethod(lambda cls, device_id=0: "NVIDIA H100 80GB HBM3")
    get_device_total_memory = classmethod(lambda cls, device_id=0: 80 * 2**30)
    is_fully_connected = classmethod(lambda cls, device_ids: True)
    device_count = classmethod(lambda cls: 8)
    is_cumem_allocator_available = is_sleep_mode_available = lambda self: True
from common.placement import Layout
from common.rollout import vllm_engine
vllm.platforms._current_platform = H100()
import vllm.config.vllm
vllm.config.vllm.HAS_TRITON = True
from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.v1.executor.abstract import Executor
torch.cuda.is_available = lambda: True
sizes = dict(tensor_parallel=1, layout=Layout(), max_model_len=200, max_num_seqs=256)
settings = vllm_engine.engine_settings(vllm_engine.EngineConfig(model_path=sys.argv[1], dtype=torch.bfloat16, **sizes))
torch.cuda.is_available = lambda: False
own = dict(seed=0, distributed_executor_backend="external_launcher", enable_sleep_mode=True)
config = EngineArgs(**settings, **own).create_engine_config(UsageContext.LLM_CLASS)
print(json.dumps({
    "V2 runner": config.use_v2_model_runner, "async": config.scheduler_config.async_scheduling,
    "graphs": config.compilation_config.cudagraph_mode.name, "cumem": config.model_config.enable_cumem_allocator,
    "head": str(config.model_config.head_dtype), "memory": config.cache_config.gpu_memory_utilization,
    "executor": Executor.get_class(config).__name__, "logprobs": config.model_config.logprobs_mode,
    "prefixes": config.cache_config.enable_prefix_caching, "transfer": config.weight_transfer_config.backend,
}))
"""


@on_a_cpu
@pytest.mark.slow
def test_what_vllm_makes_of_our_settings_on_an_h100(models):
    """Its own configuration, on a platform that says it is one. A new vLLM may decide otherwise, and then look here."""
    variables = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "RANK": "0", "LOCAL_RANK": "0"}
    variables |= {"VLLM_PLUGINS": "", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}
    done = subprocess.run(
        [sys.executable, "-c", FAKED_H100, models["tied"]],
        capture_output=True,
        text=True,
        env=os.environ | variables,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "V2 runner": True,
        "async": True,
        "graphs": "FULL_AND_PIECEWISE",
        "cumem": True,
        "head": "torch.float32",
        "memory": 0.4,
        "executor": "ExecutorWithExternalLauncher",
        "logprobs": "processed_logprobs",
        "prefixes": True,
        "transfer": "in_process",
    }


class NamedCUDA:
    """Stands for a CUDA device where only its name is asked for."""

    type = "cuda"


def as_on_cuda(module, monkeypatch):
    """A second copy of a module whose tensors count as CUDA tensors, wherever they are."""
    source = inspect.getsource(module).replace("query.is_cuda and query.dtype != torch.float32", "True")
    source = source.replace("z.is_cuda", "True").replace("head.is_cuda", "True")
    copy = type(sys)("as_on_cuda")
    monkeypatch.setitem(sys.modules, "as_on_cuda", copy)
    exec(compile(source, "as_on_cuda", "exec"), copy.__dict__)
    to = torch.Tensor.to
    monkeypatch.setattr(
        torch.Tensor, "to", lambda x, *a, **k: x if a and isinstance(a[0], NamedCUDA) else to(x, *a, **k)
    )
    return copy


def reference_kernel(
    query, key, value, query_ends, key_ends, most_queries, most_keys, *, scale, window_size, enable_gqa
):
    """varlen_attn, one sequence at a time: causal, with the ends of queries and keys aligned."""
    assert window_size[1] == 0 and query_ends.dtype == key_ends.dtype == torch.int32
    assert [int(ends.diff().max()) for ends in (query_ends, key_ends)] == [most_queries, most_keys]
    out = []
    for q, k, v in zip(
        query.split(query_ends.diff().tolist()), *(x.split(key_ends.diff().tolist()) for x in (key, value))
    ):
        place, key_place = torch.arange(len(q))[:, None] + len(k) - len(q), torch.arange(len(k))
        mask = key_place <= place
        if window_size[0] >= 0:
            mask &= place - key_place <= window_size[0]
        rows = [x.transpose(0, 1)[None] for x in (q, k, v)]
        one = torch.nn.functional.scaled_dot_product_attention(*rows, mask, scale=scale, enable_gqa=enable_gqa)
        out.append(one[0].transpose(0, 1))
    return torch.cat(out)


@on_a_cpu
@pytest.mark.parametrize("window", [None, 1, 25])
@pytest.mark.parametrize("groups", [[(40, [17, 30, 5]), (33, [9]), (50, [20, 20])], [(7, [3]), (5, [1])]])
def test_attention_on_cuda_is_attention_on_a_cpu(groups, window, monkeypatch):
    """Forward and gradients, with a reference in the place of the kernel: its arguments are what is tested."""
    on_cuda = as_on_cuda(attention, monkeypatch)
    on_cuda.varlen_attn = reference_kernel
    tokens, generator = sum(p + sum(r) for p, r in groups), torch.Generator().manual_seed(0)
    qkv = [torch.randn(1, heads, tokens, 16, dtype=torch.float64, generator=generator) for heads in (4, 2, 2)]
    found = []
    for module, device in ((attention, torch.device("cpu")), (on_cuda, NamedCUDA())):
        own = [x.clone().requires_grad_() for x in qkv]
        spans = module.spans(groups, device)
        out, _ = module.packed_attention(None, *own, None, scaling=0.25, spans=spans, sliding_window=window)
        out.square().sum().backward()
        found.append([out, *(x.grad for x in own)])
    for one, two in zip(*found):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)


@on_a_cpu
def test_the_activations_of_a_token_are_as_estimated(monkeypatch):
    """What a backward keeps on the branch for CUDA, counted on the meta device: qwen2 at the sizes of 0.5 B and 7 B."""
    on_cuda = as_on_cuda(attention, monkeypatch)
    AttentionInterface.register("counted", on_cuda.packed_attention)
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
        with torch.device("meta"):
            policy = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        for groups in ([(256, [224] * 7)], [(256, [256])] * 4):
            tokens = sum(p + sum(r) for p, r in groups)
            spans = on_cuda.spans(groups, NamedCUDA())
            for name in ("query_ends", "key_ends", "key_places"):
                value = getattr(spans, name)
                setattr(spans, name, None if value is None else value.to("meta"))
            counted = kept_bytes(policy, tokens, spans) / tokens
            estimated = memory.activation_bytes(config, torch.bfloat16, checkpointing=False)
            assert 0.9 <= estimated / counted <= 1.1, (hidden, groups, counted)


def kept_bytes(policy, tokens: int, spans) -> int:
    """Bytes that a forward of the model's layers keeps for the backward, its parameters left out."""
    own, kept = {p.untyped_storage()._cdata for p in policy.parameters()}, {}

    def count(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage
        return tensor

    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        policy.model(input_ids=ids, position_ids=ids, use_cache=False, spans=spans)
    return sum(storage.nbytes() for storage in kept.values())


def test_transformers_does_not_ask_the_gpu_whether_rows_are_packed(models, world, monkeypatch):
    """It would wait for the GPU in every forward."""
    policy, asked = model.load(models["tied"], world, torch.float32), []
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", asked.append)
    model.check_packing(policy, models["tied"], world, 1e-3)
    assert asked == []


@on_a_cpu
def test_the_fused_functions_of_the_head_are_traced_whole(monkeypatch):
    """The branch for CUDA, but for the kernels: one graph for any number of rows, and the results of the CPU's."""
    on_cuda, graphs = as_on_cuda(logits, monkeypatch), []

    def compiler(graph, inputs):
        graphs.append(graph)
        return graph.forward

    backend = partial(aot_autograd(fw_compiler=compiler))
    z, targets, shape = torch.randn(6, 50), [torch.arange(rows) for rows in range(7)], logits.LogitShape(0.7)
    with torch.no_grad():
        for with_entropy in (True, False):
            measure = torch.compile(on_cuda.row_statistics, dynamic=True, fullgraph=True, backend=backend)
            for rows in (6, 4):
                given = z[:rows].clone()
                found = measure(given, targets[rows], shape, with_entropy)
                assert torch.equal(given, z[:rows]), "writing the logits back would be a pass more"
                expected = logits.row_statistics(given, targets[rows], shape, with_entropy)
                torch.testing.assert_close(found, expected)
        differentiate = torch.compile(on_cuda.logit_gradient, dynamic=True, fullgraph=True, backend=backend)
        for rows in (6, 4):
            given = (targets[rows], torch.ones(rows), torch.arange(rows) / 3, shape)
            found = differentiate(z[:rows].clone(), *given)
            torch.testing.assert_close(found, logits.logit_gradient(z[:rows].clone(), *given))
    assert len(graphs) == 3


@on_a_cpu
def test_the_gradient_of_the_head_is_summed_in_float32(monkeypatch):
    """Over 80 chunks of bfloat16, with CUDA's addmm(out_dtype) played on the CPU. One rounding is at most 2^-9."""
    on_cuda = as_on_cuda(logits, monkeypatch)
    addmm = torch.addmm

    def widening(total, one, two, *, out_dtype, out):
        assert out is total and total.dtype == out_dtype == torch.float32 and one.dtype == two.dtype == torch.bfloat16
        return out.copy_(addmm(total, one.float(), two.float()))

    monkeypatch.setattr(torch, "addmm", widening)
    generator = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(n, 64, generator=generator).bfloat16() for n in (1600, 300))
    parts = torch.rand(1600, 300, generator=generator).split(20)
    chunks = [(slice(20 * i, 20 * i + 20), part) for i, part in enumerate(parts)]
    _, found = on_cuda.backward_through_head(hidden, head, iter(chunks), True)
    exact = sum(part.bfloat16().double().T @ hidden[rows].double() for rows, part in chunks)
    error = ((found.double() - exact).norm() / exact.norm()).item()
    assert found.dtype == torch.bfloat16 and error <= 2**-9, error


class Stream:
    """A stream of CUDA's: what it is asked to do is written down, and nothing runs beside anything."""

    def __init__(self, log: list[str], name: str):
        self.log, self.name = log, name

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")

    def record_event(self):
        return len(self.log)  # what stands before it has happened once it is waited for

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for {self.log[event - 1]}")

    def synchronize(self): ...


@pytest.fixture
def streams(monkeypatch) -> SimpleNamespace:
    """torch.cuda's streams without CUDA. log: what they did. use(name): the stream that a caller works on from now."""
    found = SimpleNamespace(log=[], names={}, current=None)  # names: of tensors, as the log calls them

    class Gathering(Stream):
        def __init__(self, *args, **kwargs):
            super().__init__(found.log, "gather")

    def use(name: str) -> None:
        found.current = Stream(found.log, name)

    @contextlib.contextmanager
    def on(stream: Stream):
        before, found.current = found.current, stream
        yield
        found.current = before

    found.use = use
    use("load")
    monkeypatch.setattr(torch.cuda, "Stream", Gathering)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *args: found.current)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    keep = lambda tensor, stream: found.log.append(f"{found.names.get(tensor)} kept for {stream.name}")
    monkeypatch.setattr(torch.Tensor, "record_stream", keep)
    return found


@on_a_cpu
def test_vllms_sender_over_nccl_and_its_receiver_agree_with_our_control(streams, monkeypatch):
    """Its own trainer engine and consumer; streams and the communicator are replaced. Two servers of 2 GPUs each."""
    import vllm.distributed.weight_transfer.nccl_engine as nccl

    wire, joined, calls, received = queue.Queue(), [], [], {}

    class Group:
        def __init__(self, sends: bool):
            self.sends = sends

        def broadcast(self, tensor, src=0, stream=None):
            wire.put(tensor.clone()) if self.sends else tensor.copy_(wire.get(timeout=20))

        def destroy(self): ...

    monkeypatch.setattr(nccl, "open_trainer_endpoint", lambda info: (joined.append(info), Group(True))[1])

    class TwoServers(Control):
        def request(self, method, path, bodies=None, key=""):
            calls.append(path)
            if path == "/init_weight_transfer_engine":
                self.infos = [body["init_info"] for body in bodies]
            if path == "/update_weights":
                about, info = bodies["update_info"], self.infos[0]
                sizes = [(shape, getattr(torch, dtype)) for shape, dtype in zip(about["shapes"], about["dtype_names"])]
                nccl.packed_nccl_broadcast_consumer(
                    iter(zip(about["names"], sizes)),
                    Group(False),
                    0,
                    lambda pairs: received.update({name: tensor.clone() for name, tensor in pairs}),
                    buffer_size_bytes=info["packed_buffer_size_bytes"],
                    num_buffers=info["packed_num_buffers"],
                    device="cpu",
                )
            return [{}] * 2

    control = TwoServers(["http://127.0.0.1:1", "http://127.0.0.1:2"])
    control.workers = [2, 2]
    policy = torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 3, bias=False))
    parameters = weight_sync.FullParameters(policy, torch.bfloat16)
    monkeypatch.setattr(weights, "NCCL_BUFFER_BYTES", 500)  # smaller than the embedding, and then several chunks
    source = weights.SingleIteration(parameters)
    source.pairs = weight_sync.gather_ahead([pair] for pair in parameters)
    sender = weights.nccl_sender(source, control)
    sender.source = source
    sender.send_weights()
    assert [info["rank_offset"] for info in control.infos] == [1, 3] and joined[0].world_size == 5
    assert {info["packed_buffer_size_bytes"] for info in control.infos} == {500}
    assert calls[-2] == "/finish_weight_update" and list(received) == [name for name, _ in policy.named_parameters()]
    assert all(torch.equal(received[name], p.detach().bfloat16()) for name, p in policy.named_parameters())


@pytest.mark.parametrize("second, address", [("127.0.0.1", "127.0.0.1"), ("10.0.0.7", "10.0.0.1")])
def test_servers_on_other_nodes_are_given_an_address_that_they_reach(second, address, monkeypatch):
    """Also where the first of them is on this one."""
    import vllm.utils.network_utils as network
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    monkeypatch.setattr(network, "get_ip", lambda: "10.0.0.1")
    monkeypatch.setattr(WeightTransferTrainerFactory, "trainer_init", lambda info, **of: info)
    control = SimpleNamespace(urls=["http://localhost:1", f"http://{second}:2"], workers=[1, 2])
    source = weights.SingleIteration(weight_sync.FullParameters(torch.nn.Linear(2, 2), torch.float32))
    info = weights.nccl_sender(source, control)
    assert (info.master_address, info.world_size) == (address, 4)


@pytest.mark.parametrize("said", ["No available memory for the cache blocks. Try this.", "another cause"])
def test_an_engine_without_enough_memory_says_which_flag_to_change(said, models, monkeypatch):
    def fail(*args, **kwargs):
        raise ValueError(said)

    monkeypatch.setattr(os, "environ", {**os.environ})
    monkeypatch.setattr(vllm_engine, "VLLMEngine", fail)
    start = lambda: engines.start(
        "vllm",
        models["tied"],
        [1],
        an_engine().world,
        torch.bfloat16,
        max_model_len=64,
        sequences=8,
        layout=Layout(rollout_memory=0.3),
    )
    if "memory" not in said:
        with pytest.raises(ValueError, match=said):
            start()
        return
    with pytest.raises(RunFailed, match="for the cache blocks; change --rollout-memory") as it:
        start()
    assert it.value.code == "engine-memory"


@pytest.mark.parametrize(
    "said, code, cure",
    [
        ("ValueError: No available memory for the cache blocks. Try this.", "engine-memory", "change --rollout-memory"),
        ("OSError: no such model", "server-start", "no such model"),
    ],
)
def test_a_server_without_enough_memory_says_so_too(said, code, cure):
    log = tempfile.TemporaryFile()  # noqa: SIM115 -- stop() closes it
    command = [sys.executable, "-c", f"import sys; sys.exit({said!r})"]
    running = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True)
    server = process.Server("http://127.0.0.1:9", running, log)
    with pytest.raises(RunFailed, match=cure) as it:
        server.wait_until_ready()
    assert it.value.code == code and "http://127.0.0.1:9 did not start: " in str(it.value)
    server.stop()


@on_a_cpu
def test_servers_on_devices_of_one_node_are_refused_on_several(monkeypatch):
    monkeypatch.setattr(os, "environ", {**os.environ, "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"})
    with pytest.raises(BadInput, match="--rollout-devices works on one node"):
        check_layout(Layout("split", (min(os.sched_getaffinity(0)),)), 1, "vllm")


def gathered(streams, *names_of_lists: str):
    """Lists of one tensor for each letter, made when they are asked for, as weight_sync's gathers are."""
    for names in names_of_lists:
        pairs = [(name, torch.zeros(1)) for name in names]
        streams.names.update({tensor: name for name, tensor in pairs})
        streams.log.append(f"{names} on {streams.current.name}")
        yield pairs


@on_a_cpu
def test_a_parameter_is_gathered_while_the_one_before_is_loaded(streams):
    """The calls to CUDA, in their order."""
    for name, tensor in weight_sync.gather_ahead(gathered(streams, "a", "b", "c")):
        assert streams.names[tensor] == name
        streams.log.append(f"use {name}")
    assert streams.log == [
        "gather waits for load",
        *("a on gather", "b on gather", "load waits for a on gather", "a kept for load", "use a"),
        *("c on gather", "load waits for b on gather", "b kept for load", "use b"),
        *("load waits for c on gather", "c kept for load", "use c"),
    ]


@on_a_cpu
def test_every_piece_of_a_parameter_waits_for_the_stream_that_cut_it(streams):
    """vLLM's sender changes its stream between two tensors, which may be experts of one gathered parameter."""
    used = []
    streams.use("user 0")
    for number, (name, _) in enumerate(weight_sync.gather_ahead(gathered(streams, "abc", "d")), 1):
        used.append(name)
        streams.use(f"user {number}")
    assert used == ["a", "b", "c", "d"]
    expected = [("user 0", "abc", "a"), ("user 1", "abc", "b"), ("user 2", "abc", "c"), ("user 3", "d", "d")]
    waits = [entry for entry in streams.log if entry.startswith("user") or "kept" in entry]
    assert waits == [
        entry
        for user, cut, name in expected
        for entry in (f"{user} waits for {cut} on gather", f"{name} kept for {user}")
    ]


def test_what_a_gathered_parameter_is_cut_into_is_what_was_announced(world, tmp_path):
    """Names, dtypes and shapes of metadata(), of which servers make room, are those of the tensors that are sent."""
    policy = model.load(families.save("glm4_moe", tmp_path), world, torch.bfloat16, Compute(lora_rank=2))
    parameters = weight_sync.FullParameters(policy, torch.bfloat16, saved_names=True)
    sent = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in parameters]
    assert sent == [tuple(parameter) for parameter in parameters.metadata()]
    names = [name for name, _, _ in sent]
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in names and not any("lora" in name for name in names)
    biases = [dtype for name, dtype, _ in sent if name.endswith("e_score_correction_bias")]
    assert biases == [torch.float32] * 3  # routers choose by the same numbers on both sides


def test_gpu_check_lists_its_checks_and_runs_those_that_this_machine_can(tmp_path, capsys):
    check = load("scripts/gpu_check.py")
    assert check.main(check.Args(list=True)) == 0
    *listed, together, here = capsys.readouterr().out.splitlines() + [""] * torch.cuda.is_available()
    assert len(listed) == len(check.CHECKS) and all("at most" in line for line in [*listed, together])
    assert here.startswith("no GPU here: ") or torch.cuda.is_available()
    assert "gradients <= 2e-2" in next(line for line in listed if line.startswith("attention "))
    with pytest.raises(BadInput, match="--only nothing: the checks are machine, engine, "):
        check.main(check.Args(only=("nothing",)))
    assert check.main(check.Args(only=("attention", "split"), output=str(tmp_path))) == 0
    said = capsys.readouterr().out
    assert "attention: passed" in said
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    assert report["about"]["torch"] == torch.__version__ and report["checks"]["attention"]["passed"]
    if torch.cuda.device_count() < 2:
        assert "split: left out, needs 2 GPUs" in said
        assert report["checks"]["split"] == {"left out": "needs 2 GPUs"}
        assert "| split | left out: needs 2 GPUs | | |" in (tmp_path / "README.md").read_text()


def test_gpu_check_ends_with_1_and_names_what_failed(tmp_path, monkeypatch, capsys):
    """A check that does not hold, one that crashes, and one that never ends."""
    check = load("scripts/gpu_check.py")
    broken = (
        (ROOT / "scripts/gpu_check.py")
        .read_text()
        .replace(
            "CHECKS = {",
            'def wrong(models):\n    yield "too much", False\n\n\n'
            'def crash(models):\n    raise OSError("gone")\n    yield\n\n\n'
            "def hang(models):\n    yield time.sleep(60), True\n\n\nCHECKS = {\n"
            '    "wrong": Check(wrong, "", 60), "crash": Check(crash, "", 60), "hang": Check(hang, "", 0.5),\n',
            1,
        )
    )
    script = tmp_path / "gpu_check.py"
    script.write_text(broken)
    for name, limit in (("wrong", 60), ("crash", 60), ("hang", 0.5)):
        monkeypatch.setitem(check.CHECKS, name, check.Check(check.machine, "", limit))
    monkeypatch.setattr(check, "__file__", str(script))
    assert check.main(check.Args(only=("wrong", "crash", "hang"), output=str(tmp_path))) == 1
    said = capsys.readouterr().out
    assert "FAILED too much" in said and "OSError: gone" in said and "no end within 0 s" in said
    assert said.splitlines()[-1] == "failed: wrong, crash, hang"


def test_gpu_check_ends_when_its_minutes_are_over_and_names_what_it_did_not_reach(tmp_path, monkeypatch, capsys):
    """Limits of single checks add up to more. A check that hangs takes what is left, and not what it may take alone."""
    check = load("scripts/gpu_check.py")
    hang = "import sys, time; print('finding: [\"began\", true]', flush=True); time.sleep(60)"
    script = tmp_path / "gpu_check.py"
    script.write_text(hang)
    monkeypatch.setattr(check, "__file__", str(script))
    for name in ("hangs", "later", "another"):
        monkeypatch.setitem(check.CHECKS, name, check.Check(check.machine, "", 60))
    monkeypatch.setitem(check.CHECKS, "lacking", check.Check(check.machine, "", 60, ("2 GPUs",)))
    monkeypatch.setattr(check, "missing", lambda it: ", ".join(it.needs))
    began = time.monotonic()
    asked = ("hangs", "later", "lacking", "another")
    assert check.main(check.Args(only=asked, minutes=2 / 60, output=str(tmp_path))) == 1
    assert time.monotonic() - began < 10
    said = capsys.readouterr().out.splitlines()
    assert said[-2] == "failed: hangs"
    assert said[-1].startswith("not reached in 0.0333333 minutes: later, another (--only later another runs")
    assert "    FAILED no end within 2 s, all that was left for this check" in said
    assert "later: NOT REACHED" in said and "lacking: left out, needs 2 GPUs" in said
    assert "| another | not reached: no time was left | | |" in (tmp_path / "README.md").read_text()
    assert check.main(check.Args(only=("later",), minutes=1e-9, output=str(tmp_path))) == 1, "nothing passed"


GIB, ENGINE_TOKENS = memory.GIB, 1024 * 256


@on_a_cpu
@pytest.mark.parametrize(
    "beside, asleep, leak, tokens, runner, failing",
    [
        (3.0, 1.0, 0, ENGINE_TOKENS, True, []),
        (5.0, 1.0, 0, ENGINE_TOKENS, True, ["awake it takes 5.0 GiB beside weights and cache, planned 4.0 GiB"]),
        (3.0, 2.5, 0, ENGINE_TOKENS, True, ["asleep it keeps 2.5 GiB, planned 2.0 GiB"]),
        (3.0, 1.0, 0.02, ENGINE_TOKENS, True, ["free memory drifts 82 MiB"]),
        (3.0, 1.0, 0, 1000, True, ["KV cache of 1000 tokens, planned 1024 x 256"]),
        (3.0, 1.0, 0, ENGINE_TOKENS, False, ["NOT the second model runner"]),
    ],
)
def test_gpu_check_compares_an_engine_with_the_plan_of_memory(
    beside, asleep, leak, tokens, runner, failing, models, monkeypatch
):
    """With an engine that takes what the test says, in GiB, beside a trainer that takes 7."""
    check, gpu = load("scripts/gpu_check.py"), SimpleNamespace(used=7 * GIB, cycles=0)
    cache = engines.kv_bytes_per_token(memory.text_config(models["tied"]), check.DTYPE)
    held = memory.count_parameters(models["tied"]) * check.DTYPE.itemsize + tokens * cache
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_mode=SimpleNamespace(name="FULL")),
        model_config=SimpleNamespace(head_dtype=torch.float32),
        use_v2_model_runner=runner,
        scheduler_config=SimpleNamespace(async_scheduling=True),
        cache_config=SimpleNamespace(num_gpu_blocks=tokens, block_size=1),
    )

    class Engine:
        llm = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config))
        settings = staticmethod(lambda: "as faked")

        def wake(self, *args):
            gpu.used = int((7 + beside) * GIB) + held

        def generate(self, prompts, seed, **settings):
            return SimpleNamespace(response_ids=[[seed, *ids] for ids in prompts])

        def sleep(self):
            gpu.used = int((7 + asleep + leak * gpu.cycles) * GIB)
            gpu.cycles += 1

    engine = Engine()
    monkeypatch.setattr(check, "write_model", lambda folder, config: models["tied"])
    monkeypatch.setattr(check, "used_memory", lambda: gpu.used)
    monkeypatch.setattr(check.placement, "init", lambda seed: None)
    monkeypatch.setattr(check.placement, "finish", lambda *args: None)
    monkeypatch.setattr(check.model, "load", lambda *args: None)
    monkeypatch.setattr(engines, "start", lambda *args, **kwargs: engine.wake() or engine)
    monkeypatch.setattr(weight_sync, "push", engine.wake)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    found = list(check.check_engine(None))
    assert len(found) == 10
    wrong = [text for text, holds in found if not holds]
    assert len(wrong) == len(failing) and all(words in text for words, text in zip(failing, wrong)), wrong


def test_nothing_that_a_check_started_outlives_its_limit(monkeypatch):
    """Ranks of torchrun have sessions of their own: killing the check's process would leave them on the GPU."""
    check, seconds = load("scripts/gpu_check.py"), "3217.5"
    start = f"import subprocess; subprocess.Popen(['sleep', '{seconds}'], start_new_session=True).wait()"
    assert check.finish([sys.executable, "-c", start], 1.0)[0] is None
    running = lambda: [p for p in psutil.process_iter(["cmdline"]) if seconds in (p.info["cmdline"] or [])]
    deadline = time.monotonic() + 10
    while running() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not running()
    # The script is asked to end while a check runs.
    stop = f"import os, signal; os.kill(os.getppid(), signal.SIGTERM)\n{start}"
    with pytest.raises(SystemExit):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        try:
            check.finish([sys.executable, "-c", stop], 30.0)
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(0.3)
    assert not running()
    # The commands that a check starts by the same function keep the mark by which the check is found.
    monkeypatch.setenv("GPU_CHECK", "outer-")
    inner = check.finish([sys.executable, "-c", "import os; print(os.environ['GPU_CHECK'])"], 20.0)[1]
    assert inner.startswith("outer-") and inner.strip() != "outer-"
