"""Does a GPU do here what this repository relies on? Each check is a process with a limit; ten minutes at most in all.

    python scripts/gpu_check.py                        every check that this machine can run, a table, and a page of it
    python scripts/gpu_check.py --list                 the checks, their bounds and what they need
    python scripts/gpu_check.py --only attention head  some of them

Checks that this machine cannot run are listed with the reason: those with vLLM where it is not installed, those of
several ranks with one GPU, and without a GPU all but a few, which then run small on the CPU. The most important ones
come first. Ends with exit code 1 and a line that names what failed, and another for what the ten minutes did not reach.
--output FOLDER has gpu_check.json and README.md, to be committed in baselines/gpu.
"""

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import tyro
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen2Config, Qwen3MoeConfig

from common import errors, placement, weight_sync
from common.data import arithmetic
from common.preflight import memory
from common.preflight.machine import triton_lacks
from common.preflight.memory import MemoryPlan
from common.rollout import engines
from common.rollout.rollout import Rollout, collate
from common.trainer import attention, batching, logits, model

ROOT = Path(__file__).parents[1]
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPE = torch.bfloat16 if CUDA else torch.float32
LARGE = CUDA and torch.cuda.get_device_properties(0).total_memory > 60e9
MINUTES, MINUTES_WITH_TWO_GPUS = 10.0, 16.0  # for all checks together
NEEDED_DRIVER, NEEDED_CAPABILITY = 580, (8, 0)  # the driver for CUDA 13
WITHOUT = "" if CUDA else "no GPU here: only the checks that need none are run, small on the CPU"
TEMPERATURE = 0.7  # of the head's check
ERROR = 1e-2 if CUDA else 1e-5  # bound of relative errors of a forward; twice this for gradients
Finding = tuple[str, bool]  # (what was measured, whether it holds)

QWEN_05B = Qwen2Config(
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    vocab_size=151936,
    tie_word_embeddings=True,
    max_position_embeddings=32768,
    eos_token_id=1,
    pad_token_id=0,
)
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 5000,
    "max_position_embeddings": 32768,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
SMALL = Qwen2Config(**SIZES)
EXPERTS = Qwen3MoeConfig(**SIZES, head_dim=64, moe_intermediate_size=256, num_experts=8, num_experts_per_tok=2)


@dataclasses.dataclass
class Args:
    list: bool = False  # Print the checks and leave.
    only: tuple[str, ...] = ()  # Names of checks. Default: all.
    output: str = "runs/gpu_check"  # Folder of the report.
    minutes: float = 0.0  # For all checks together. Default: 10, or 16 with two GPUs.
    models: str = ""  # Folder for models with random weights, about 2 GB. Default: a temporary one.
    here: bool = False  # Run them in this process, and print the findings as JSON: as the script does for each check.


def write_model(models: Path, config: PreTrainedConfig) -> str:
    """The folder, in this one, of a model with random weights of this shape and the embedded model's tokenizer."""
    folder = models / f"{config.model_type}-{config.hidden_size}"
    if not folder.exists():  # All checks use the same folder, so that vLLM compiles once.
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
        arithmetic.tokenizer().save_pretrained(folder)
    return str(folder)


def random_rollout(prompts: int, group: int, prompt: int, response: int, vocabulary: int) -> Rollout:
    """Groups of responses to shared prompts, of random tokens and lengths up to those given."""
    generator = torch.Generator().manual_seed(0)
    tokens = lambda most: torch.randint(
        3, vocabulary, (torch.randint(most // 2, most + 1, (), generator=generator),), generator=generator
    ).tolist()
    asked = [ids for ids in (tokens(prompt) for _ in range(prompts)) for _ in range(group)]
    return collate(asked, [tokens(response) for _ in asked], None, [False] * len(asked), 0, DEVICE)


def relative(value: torch.Tensor, reference: torch.Tensor) -> float:
    return ((value.double() - reference.double()).norm() / reference.double().norm()).item()


def seconds(work: Callable[[], object], repeats: int = 5) -> float:
    """Median seconds of a call, after one to warm up."""
    taken = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        work()
        if CUDA:
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def files_of_two_packages() -> dict[str, bool]:
    """The installed files that two packages own, and whether they differ in the two."""
    owner, found = {}, {}
    for package in importlib.metadata.distributions():
        name = package.name  # reads the package's metadata, so once
        for line in (package.read_text("RECORD") or "").splitlines():
            file, hashed = line.split(",")[:2]
            if file.startswith("..") or "__pycache__" in file:
                continue
            first, as_first = owner.setdefault(file, (name, hashed))
            if first != name:
                found[file] = found.get(file, False) or hashed != as_first
    return found


def machine(models: Path) -> Iterator[Finding]:
    """Driver, capability, packages, and what is compiled with."""
    twice = [file for file, differs in files_of_two_packages().items() if differs]
    yield f"{len(twice)} files belong to two packages and differ {twice[:3] or ''}".strip(), not twice
    if not CUDA:
        return
    if not shutil.which("nvidia-smi"):
        yield "no nvidia-smi in PATH", False
        return
    smi = lambda query: subprocess.run(["nvidia-smi", *query], capture_output=True, text=True).stdout.strip()
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    # MiB, read before this process takes memory for a context of its own
    used = float(smi(["--query-gpu=memory.used", "--format=csv,noheader,nounits", f"--id={first}"])) / 1024
    yield f"{used:.1f} GiB of the first GPU are in use by others", used < 2
    driver = smi(["--query-gpu=driver_version", "--format=csv,noheader"]).splitlines()[0]
    new = torch.version.cuda.split(".")[0] != "13" or int(driver.split(".")[0]) >= NEEDED_DRIVER
    yield f"driver {driver} for CUDA {torch.version.cuda}", new
    yield f"capability {torch.cuda.get_device_capability()}", torch.cuda.get_device_capability() >= NEEDED_CAPABILITY
    locked = re.search(r"^cuda-bindings==(\S+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE)[1]
    if importlib.util.find_spec("cuda") and importlib.util.find_spec("vllm"):
        found = importlib.metadata.version("cuda-bindings")
        yield f"cuda-bindings {found}, locked {locked}", found == locked
    lacks = triton_lacks()
    yield f"for Triton: {lacks or 'a C compiler and Python.h'}", not lacks
    for library in ("vllm._C_stable_libtorch", "vllm.cumem_allocator") if importlib.util.find_spec("vllm") else ():
        try:
            importlib.import_module(library)
            yield f"{library} is imported", True
        except ImportError as error:
            yield f"{library}: {error}", False


@dataclasses.dataclass(frozen=True)
class Layer:
    """What one attention layer has."""

    heads: int
    keys: int  # heads of keys and values
    width: int  # of a head
    window: int | None = None
    cap: float | None = None
    sinks: bool = False

    def inputs(self, groups: list[attention.Group]) -> tuple[list[torch.Tensor], torch.Tensor]:
        """([queries, keys, values, sinks or nothing], gradient of the output), float32, of which bfloat16 keeps all."""
        tokens, generator = sum(p + sum(r) for p, r in groups), torch.Generator().manual_seed(0)
        random = lambda *shape: torch.randn(shape, generator=generator).to(torch.bfloat16).float()
        qkv = [random(1, count, tokens, self.width) for count in (self.heads, self.keys, self.keys)]
        return qkv + [random(self.heads)] * self.sinks, random(1, tokens, self.heads, self.width)


def attend(groups: list[attention.Group], layer: Layer, dtype: torch.dtype) -> list[torch.Tensor]:
    """Output and gradients of packed attention over these groups."""
    inputs, gradient = layer.inputs(groups)
    query, key, value, *sinks = inputs = [x.to(DEVICE, dtype).requires_grad_() for x in inputs]
    out, _ = attention.packed_attention(
        None,
        query,
        key,
        value,
        None,
        scaling=layer.width**-0.5,
        spans=attention.spans(groups, DEVICE),
        sliding_window=layer.window,
        softcap=layer.cap,
        s_aux=sinks[0] if sinks else None,
    )
    out.backward(gradient.to(DEVICE, dtype))
    return [out.detach(), *(x.grad for x in inputs)]


def reference_attention(groups: list[attention.Group], layer: Layer) -> list[torch.Tensor]:
    """The same in float64, each sequence alone behind its prompt."""
    inputs, gradient = layer.inputs(groups)
    query, key, value, *sinks = inputs = [x.double().requires_grad_() for x in inputs]
    outputs, start = [], 0
    for prompt, responses in groups:
        before = list(range(start, start + prompt))
        start += prompt
        for place, length in enumerate(responses):
            row = before + list(range(start, start + length))
            q, k, v = (x[0, :, row] for x in (query, key, value))  # (heads, tokens, width)
            k, v = (x.repeat_interleave(layer.heads // layer.keys, 0) for x in (k, v))
            distance = torch.arange(len(row))[:, None] - torch.arange(len(row))  # of a query from a key before it
            scores = q @ k.transpose(1, 2) * layer.width**-0.5
            if layer.cap:
                scores = layer.cap * (scores / layer.cap).tanh()
            scores = scores.masked_fill((distance < 0) | (distance >= (layer.window or len(row))), -torch.inf)
            if sinks:
                scores = torch.cat([scores, sinks[0].view(-1, 1, 1).expand(-1, len(row), 1)], dim=2)
            out = scores.softmax(2)[:, :, : len(row)] @ v
            outputs.append(out.transpose(0, 1)[prompt if place else 0 :])  # (tokens, heads, width)
            start += length
    out = torch.cat(outputs)[None]
    out.backward(gradient.double())
    return [out.detach(), *(x.grad for x in inputs)]


def check_attention(models: Path) -> Iterator[Finding]:
    """Packed attention and its gradients against float64: plain, with a window, with a cap of scores, with sinks."""
    groups = [(70, [40, 1, 33, 7]), (33, [12]), (64, [50] * 16), (5, [1])]
    layers = {
        "plain": Layer(14, 2, 64),
        "heads of 128": Layer(8, 8, 128),
        "window": Layer(8, 2, 64, window=48),
        "cap": Layer(8, 2, 64, window=48, cap=3.0),
        "sinks": Layer(8, 2, 64, window=48, sinks=True),
    }
    for name, layer in layers.items():
        found = [
            relative(one.cpu(), two)
            for one, two in zip(attend(groups, layer, DTYPE), reference_attention(groups, layer))
        ]
        yield (
            f"{name}: output {found[0]:.1e}, gradients {max(found[1:]):.1e}",
            (found[0] <= ERROR and max(found[1:]) <= 2 * ERROR),
        )


def attention_memory(models: Path) -> Iterator[Finding]:
    """Peak memory of attention for 4, 8 and 16 thousand tokens: linear, or a mask was made."""
    peaks = []
    for tokens in (4096, 8192, 16384):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        attend([(512, [512] * 7)] * (tokens // 4096), Layer(14, 2, 64), DTYPE)
        peaks.append(torch.cuda.max_memory_allocated() / tokens)
    yield ", ".join(f"{peak / 1024:.1f}" for peak in peaks) + " KiB a token", max(peaks) <= 1.1 * min(peaks)


def check_head(models: Path) -> Iterator[Finding]:
    """Log-probs, entropies and gradients of the logit head against float64, and its time."""
    rows, width, vocabulary = (3000, 896, 151936) if CUDA else (300, 64, 5000)
    generator = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(n, width, generator=generator).to(torch.bfloat16) for n in (rows, vocabulary))
    targets = torch.randint(vocabulary, (rows,), generator=generator).to(DEVICE)
    weight = torch.randn(rows, generator=generator).to(DEVICE)
    own = [hidden.to(DEVICE).requires_grad_(), (0.15 * head).to(DEVICE).requires_grad_()]
    own = [x.detach().to(DTYPE).requires_grad_() for x in own]
    logprobs, entropy = logits.ChunkedLogprobs.apply(*own, targets, logits.LogitShape(TEMPERATURE), True)
    (logprobs * weight).sum().backward()
    wide = [x.detach().double().requires_grad_() for x in own]
    expected, entropies, gradients = [], [], [torch.zeros_like(x) for x in wide]
    for part in torch.arange(rows, device=DEVICE).split(500):  # float64 logits of all rows would take 4 GB
        z = (wide[0][part] @ wide[1].T / TEMPERATURE).log_softmax(-1)
        chosen = z.gather(1, targets[part, None])[:, 0]
        for total, gradient in zip(gradients, torch.autograd.grad((chosen * weight[part]).sum(), wide)):
            total += gradient
        expected.append(chosen.detach())
        entropies.append(-(z.detach().exp() * z.detach()).sum(1))
    found = [relative(one, torch.cat(two)) for one, two in ((logprobs, expected), (entropy, entropies))]
    yield f"log-probs {found[0]:.1e}, entropies {found[1]:.1e}", max(found) <= 1e-5
    found = [relative(x.grad, gradient) for x, gradient in zip(own, gradients)]
    yield f"gradients of hidden {found[0]:.1e} and head {found[1]:.1e}", max(found) <= (5e-3 if CUDA else 1e-5)

    def both() -> None:
        logits.ChunkedLogprobs.apply(*own, targets, logits.LogitShape(TEMPERATURE), True)[0].sum().backward()

    if CUDA:
        micro = seconds(both) / rows * 1e6
        yield f"{micro:.1f} us a token, forward and backward", True


def check_activations(models: Path) -> Iterator[Finding]:
    """A model of 0.5 B: bytes that a token keeps, and the peak of an update, against common/preflight/memory.py."""
    path, world = write_model(models, QWEN_05B), placement.init(0)
    policy = model.load(path, world, DTYPE)
    plan = MemoryPlan(model=path, dtype=DTYPE, size=1)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=True)
    batch, tokens = random_rollout(32, 8, 300, 300, QWEN_05B.vocab_size), 8192 if LARGE else 2048
    micro_batches = batching.pack(batch, torch.arange(len(batch)), batching.Compute(tokens), world)
    gathered, kept = DTYPE.itemsize * plan.parameters, 0.0  # every forward gathers the weights anew
    for step in range(3):
        torch.cuda.reset_peak_memory_stats()
        for micro in micro_batches:
            before = torch.cuda.memory_allocated()
            logprobs, _ = model.response_logprobs(policy, micro, 1.0)
            if step and micro.input_ids.numel() > 0.8 * tokens:
                kept = max(kept, (torch.cuda.memory_allocated() - before - gathered) / micro.input_ids.numel())
            logprobs.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    estimated = plan.token_bytes
    yield f"{kept / 1024:.0f} KiB a token, estimated {estimated / 1024:.0f}", 0.9 <= estimated / kept <= 1.15
    peak = torch.cuda.max_memory_allocated()
    expected = plan.update(max(micro.input_ids.numel() for micro in micro_batches))
    text = f"peak of an update {peak / 2**30:.1f} GiB, computed {expected / 2**30:.1f}"
    yield text, 0.85 <= expected / peak <= 1.3
    placement.finish(world)


def check_gradient(models: Path) -> Iterator[Finding]:
    """One gradient, computed in several ways: packed or alone, recomputed, compiled, from host memory."""
    ways = {
        "one response at a time": (batching.Compute(1, shared_prompts=False), False),
        "checkpointing": (batching.Compute(4096, activation_checkpointing=True), False),
    }
    if CUDA:
        ways |= {
            "--offload all": (batching.Compute(4096), True),
            "--kernels compile": (batching.Compute(4096, kernels="compile"), False),
        }
    world, batch = placement.init(0), random_rollout(4, 8, 60, 40, SMALL.vocab_size)
    path = write_model(models, SMALL)
    bounds = {torch.float32: 1e-5, DTYPE: 0.1 if CUDA else 1e-5}
    usual = {dtype: gradient(path, batch, world, dtype, batching.Compute(4096), False) for dtype in bounds}
    for name, (compute, offload) in ways.items():
        for dtype, bound in bounds.items():
            error = relative(gradient(path, batch, world, dtype, compute, offload), usual[dtype])
            yield f"{str(dtype).removeprefix('torch.')}, {name}: {error:.1e}", error <= bound
    placement.finish(world)


def gradient(path: str, batch: Rollout, world, dtype: torch.dtype, compute, offload: bool) -> torch.Tensor:
    """The gradient of the mean log-prob, all parameters in one vector, on the CPU."""
    policy = model.load(path, world, dtype, compute, offload=offload)
    micro_batches = batching.pack(batch, torch.arange(len(batch)), compute, world)
    for micro in micro_batches:
        (model.response_logprobs(policy, micro, 1.0)[0].sum() / batch.response_mask.sum()).backward()
    return torch.cat([p.grad.full_tensor().flatten().cpu() for p in policy.parameters()])


def check_engine(models: Path) -> Iterator[Finding]:
    """vLLM in this process: its settings, seeds that repeat, and memory that it gives back."""
    import numpy

    path, world = write_model(models, QWEN_05B), placement.init(0)
    policy = model.load(path, world, DTYPE)
    plan = MemoryPlan(model=path, dtype=DTYPE, size=1, backend="vllm")
    layout = plan.fitted_layout(1024, 256)
    torch.cuda.empty_cache()
    before = used_memory()
    began = time.perf_counter()
    engine = engines.start("vllm", path, [1], world, DTYPE, max_model_len=1024, sequences=256, layout=layout)
    yield f"started in {time.perf_counter() - began:.0f} s", time.perf_counter() - began <= 240
    config = engine.llm.llm_engine.vllm_config
    graphs, head = config.compilation_config.cudagraph_mode.name, config.model_config.head_dtype
    fast = config.use_v2_model_runner and config.scheduler_config.async_scheduling
    yield f"graphs {graphs}, head {head}, {engine.settings()}", graphs != "NONE" and head == torch.float32
    yield f"{'second' if fast else 'NOT the second'} model runner, scheduled ahead", fast
    tokens = config.cache_config.num_gpu_blocks * config.cache_config.block_size
    yield f"KV cache of {tokens} tokens, planned 1024 x 256", tokens >= 0.9 * 1024 * 256
    prompts = [[5 + i, 6, 7, 8] for i in range(16)]
    sample = lambda seed: engine.generate(prompts, n=4, temperature=1.0, max_tokens=32, seed=seed).response_ids
    first = sample(1)
    numpy.random.seed(3)
    yield "the same seed samples the same tokens", sample(1) == first
    differ = sum(one != two for one, two in zip(sample(2), first)) / len(first)
    yield f"another seed changes {differ:.0%} of the responses", differ >= 0.9
    awake = used_memory() - before
    engine.sleep()
    held = plan.parameters * DTYPE.itemsize + tokens * engines.kv_bytes_per_token(memory.text_config(path), DTYPE)
    yield from engine_memory(awake, used_memory() - before, held)
    taken, used = [], []
    for _ in range(6):
        began = time.perf_counter()
        weight_sync.push(policy, engine)
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
        sample(3)
        engine.sleep()
        used.append(used_memory())
    drift = (max(used[1:]) - min(used[1:])) / 2**20
    yield f"waking and a push {statistics.median(taken):.2f} s; free memory drifts {drift:.0f} MiB", drift <= 64
    placement.finish(world, engine)


def used_memory() -> int:
    """Bytes of the GPU that are in use, CUDA's own among them."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def engine_memory(awake: int, asleep: int, held: int) -> Iterator[Finding]:
    """What an engine takes, awake and asleep, against what common/preflight/memory.py plans.

    held: its weights and KV cache, all in bytes.
    """
    gib = lambda size: f"{size / memory.GIB:.1f} GiB"
    yield f"sleep frees {gib(awake - asleep)} of {gib(held)}", awake - asleep >= 0.95 * held
    beside, planned = awake - held, memory.ENGINE_WORKSPACE
    yield f"awake it takes {gib(beside)} beside weights and cache, planned {gib(planned)}", beside <= planned
    yield f"asleep it keeps {gib(asleep)}, planned {gib(memory.ENGINE_ASLEEP)}", asleep <= memory.ENGINE_ASLEEP


def lines_of(command: list, limit: float = 540) -> tuple[int, list[str]]:
    """(exit code, lines) of a command of this repository."""
    code, out, err = finish([sys.executable, *map(str, command)], limit)
    return code, (out + err).splitlines()


def finish(command: list[str], limit: float) -> tuple[int | None, str, str]:
    """(exit code or None after the limit, output, errors) of a command. Nothing that it started outlives the limit, or
    this process if that is asked to end.
    """
    # Inherited by all that the command starts, also in sessions of their own; a check's own commands add to its mark.
    mark = os.environ.get("GPU_CHECK", "") + str(uuid.uuid4())
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"GPU_CHECK": mark},
    )
    try:
        out, err = process.communicate(timeout=limit)
        return process.returncode, out, err
    except subprocess.TimeoutExpired:
        end_all(mark)
        out, err = process.communicate()
        return None, out, err
    except BaseException:  # Ctrl-C, or SIGTERM, which is SystemExit here
        end_all(mark)
        raise


def end_all(mark: str) -> None:
    """Kill every process with this mark."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if f"GPU_CHECK={mark}".encode() in (folder / "environ").read_bytes():
                os.kill(int(folder.name), signal.SIGKILL)


def selftest(
    models: Path, *, flags: tuple = (), ranks: int = 1, config: PreTrainedConfig = QWEN_05B
) -> Iterator[Finding]:
    """scripts/selftest.py: rollout, gap to the trainer, gradients, weight sync, checkpoints."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_model(models, config)
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", ranks] if ranks > 1 else []
        code, said = lines_of([*launcher, "scripts/selftest.py", "--model", path, "--folder", folder, *flags])
    rows = [" ".join(line.split()) for line in said]
    rows = [row for row in rows if row.startswith(("log-probs", "gradient", "weight")) or "error[" in row]
    yield " / ".join(rows[-8:]) or " ".join(said[-3:]), code == 0


def check_update(models: Path) -> Iterator[Finding]:
    """FLOP/s of the update of 1.5 B, as a share of one large product's, with and without compiled layers."""
    size, best = "qwen2.5-1.5b" if LARGE else "qwen2.5-0.5b", 0
    for kernels in ("eager", "compile"):  # one at a time: each has a model and its optimizer
        flags = ["--size", size, "--prompts", 16, "--budgets", 4096, "--dtype", "bfloat16", "--kernels", kernels]
        code, said = lines_of(["scripts/bench/update_mfu.py", *flags])
        rows = [line for line in said if line.startswith(f"| {kernels}")]
        best = max([best, *(int(row.rstrip("| ").rsplit("|", 1)[-1].strip(" %")) for row in rows)])
        yield f"{size}: " + " ".join(rows) + " ".join(said[-1:]), code == 0
    yield f"best {best} % of a large product", best >= 25


def check_runs(models: Path) -> Iterator[Finding]:
    """The embedded task: GRPO and a resume of it, PPO, PRIME. The last two without vLLM, whose start takes longest."""
    vllm = ["--rollout-backend", "vllm" if importlib.util.find_spec("vllm") else "hf"]
    hf = ["--rollout-backend", "hf"]
    common = ["--prompts-per-step", 16, "--mini-batches", 2, "--eval-prompts", 32]
    with tempfile.TemporaryDirectory() as folder:
        runs = {  # the name of the run's folder, the algorithm, and its own flags
            "grpo": ("grpo", ["--steps", 3, "--save-every", 2, *vllm]),
            "resumed": ("grpo", ["--steps", 4, "--resume", f"{folder}/grpo/checkpoints/step_000002", *vllm]),
            "ppo": ("ppo", ["--steps", 1, *hf]),
            "prime": ("prime", ["--gen-prompts", 16, "--steps", 1, *hf]),
        }
        for name, (algorithm, flags) in runs.items():
            code, said = lines_of([f"algos/{algorithm}.py", *common, *flags, "--run-dir", f"{folder}/{name}"], 240)
            steps = [line for line in said if line.startswith("step") or "error[" in line]
            yield f"{name}: {steps[-1] if steps else ' '.join(said[-2:])}", code == 0


@dataclasses.dataclass(frozen=True)
class Check:
    run: Callable[[Path], Iterator[Finding]]  # The path is the folder of models.
    bound: str
    limit_s: float
    needs: tuple[str, ...] = ()  # "a GPU", "vLLM", "2 GPUs"


TWO = ("2 GPUs", "vLLM")
ROWS, AS_ABOVE = "each row holds: rollout, gap, gradient, weight sync, checkpoint", "as self-test"
CHECKS = {  # those first that decide whether the rest is worth its time
    "machine": Check(machine, f"driver >= {NEEDED_DRIVER}, capability >= 8.0, no file of two packages", 60),
    "engine": Check(
        check_engine, "start <= 240 s, planned memory and cache, seeds repeat, drift <= 64 MiB", 300, ("a GPU", "vLLM")
    ),
    "self-test": Check(selftest, ROWS, 240, ("a GPU", "vLLM")),
    "self-test-float32": Check(
        partial(selftest, flags=("--dtype", "float32"), config=SMALL), f"{AS_ABOVE}, gap 1e-4", 240, ("a GPU", "vLLM")
    ),
    "attention": Check(check_attention, "relative error <= 1e-2, gradients <= 2e-2 (CPU, float32: 1e-5)", 60),
    "attention-memory": Check(attention_memory, "linear in the tokens within 10 %", 30, ("a GPU",)),
    "head": Check(check_head, "log-probs 1e-5, gradients 5e-3 (CPU: 1e-5); the time is only shown", 90),
    "memory": Check(check_activations, "estimate / measured: activations 0.9-1.15, peak 0.85-1.3", 90, ("a GPU",)),
    "gradient": Check(check_gradient, "relative difference <= 1e-5 in float32, 0.1 in bfloat16", 150),
    "self-test-hf": Check(
        partial(selftest, flags=("--rollout-backend", "hf"), config=QWEN_05B if CUDA else SMALL), AS_ABOVE, 180
    ),
    "self-test-lora": Check(
        partial(selftest, flags=("--rollout-backend", "hf", "--lora-rank", "8")), AS_ABOVE, 180, ("a GPU",)
    ),
    "self-test-experts": Check(partial(selftest, config=EXPERTS), AS_ABOVE, 180, ("a GPU", "vLLM")),
    "update": Check(check_update, ">= 25 % of a large product's FLOP/s", 180, ("a GPU",)),
    "runs": Check(check_runs, "grpo, a resume of it, ppo and prime end without an error", 300),
    "2-ranks": Check(partial(selftest, ranks=2), AS_ABOVE, 240, TWO),
    "rollout-tp-2": Check(partial(selftest, flags=("--rollout-tp", "2"), ranks=2), AS_ABOVE, 240, TWO),
    "sequence-parallel-2": Check(partial(selftest, flags=("--sequence-parallel", "2"), ranks=2), AS_ABOVE, 240, TWO),
    "shard-size-1": Check(partial(selftest, flags=("--shard-size", "1"), ranks=2), AS_ABOVE, 240, TWO),
    "split": Check(
        partial(selftest, flags=("--rollout-placement", "split", "--rollout-devices", "1")),
        AS_ABOVE,
        300,
        TWO,
    ),
}


def missing(check: Check) -> str:
    """What a check needs and this machine lacks, or ""."""
    there = {
        "a GPU": CUDA,
        "2 GPUs": torch.cuda.device_count() >= 2,
        "vLLM": importlib.util.find_spec("vllm") is not None,
    }
    return ", ".join(need for need in check.needs if not there[need])


def run_child(name: str, left: float, models: str) -> dict:
    """A check in a process of its own: its findings, seconds, and whether all hold. left: seconds for all checks."""
    limit, began = min(CHECKS[name].limit_s, left), time.perf_counter()
    code, out, err = finish([sys.executable, __file__, "--here", "--models", models, "--only", name], limit)
    findings = [json.loads(line[9:]) for line in out.splitlines() if line.startswith("finding: ")]
    ended = code == 0 and findings
    if code is None:
        cut = ", all that was left for this check" if limit == left else ""
        findings.append([f"no end within {limit:.0f} s{cut}", False])
    elif not ended:
        findings.append([" ".join((err or out).split("\n")[-4:]).strip()[-600:], False])
    passed = bool(ended) and all(holds for _, holds in findings)
    return {"findings": findings, "passed": passed, "seconds": round(time.perf_counter() - began, 1)}


def about() -> dict[str, str]:
    """The machine and versions that a report is worth nothing without."""
    versions = {}
    for name in ("torch", "transformers", "vllm", "triton"):
        if importlib.util.find_spec(name):
            versions[name] = getattr(__import__(name), "__version__", "?") if name != "vllm" else "installed"
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    device = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if CUDA else "no GPU"
    return {"device": device, "python": platform.python_version(), "commit": commit.stdout.strip(), **versions}


def main(args: Args) -> int:
    if unknown := [name for name in args.only if name not in CHECKS]:
        raise errors.BadInput(f"--only {unknown[0]}: the checks are {', '.join(CHECKS)}")
    if args.list:
        width = max(map(len, CHECKS))
        for name, check in CHECKS.items():
            needs = f"; needs {', '.join(check.needs)}" if check.needs else ""
            print(f"{name:<{width}}  {check.bound}; at most {check.limit_s:.0f} s{needs}")
        print(f"all together: at most {MINUTES:g} minutes, {MINUTES_WITH_TWO_GPUS:g} with two GPUs (--minutes)")
        print(WITHOUT, end="\n" * bool(WITHOUT))
        return 0
    if args.here:
        for measured, holds in (finding for name in args.only for finding in CHECKS[name].run(Path(args.models))):
            print("finding: " + json.dumps([measured, bool(holds)]), flush=True)
        return 0
    print(WITHOUT, end="\n" * bool(WITHOUT))
    minutes = args.minutes or (MINUTES_WITH_TWO_GPUS if torch.cuda.device_count() >= 2 else MINUTES)
    with tempfile.TemporaryDirectory() as scratch:
        results = run_checks(
            args.only or tuple(CHECKS), str(Path(args.models or scratch).resolve()), time.monotonic() + 60 * minutes
        )
    failed = [name for name, found in results.items() if not found.get("passed", True)]
    missed = [name for name, found in results.items() if "not reached" in found]
    ending = [f"failed: {', '.join(failed)}"] * bool(failed)
    if missed:
        rest = shlex.join(["--only", *missed])
        ending.append(f"not reached in {minutes:g} minutes: {', '.join(missed)} ({rest} runs these, --minutes N all)")
    write_report(Path(args.output), args.only, results, ending)
    print("\n".join(ending), end="\n" * bool(ending))
    return int(bool(ending))


def run_checks(names: tuple[str, ...], models: str, deadline: float) -> dict[str, dict]:
    """Check -> what was found, or why it was left out, or that it was not reached. deadline: of time.monotonic()."""
    results = {}
    for name in names:
        lacks, left = missing(CHECKS[name]), deadline - time.monotonic()
        if lacks:
            results[name], said = {"left out": f"needs {lacks}"}, f"left out, needs {lacks}"
        elif left <= 0:
            results[name], said = {"not reached": "no time was left"}, "NOT REACHED"
        else:
            results[name] = found = run_child(name, left, models)
            said = f"{'passed' if found['passed'] else 'FAILED'}, {found['seconds']:.0f} s"
        print(f"{name}: {said}", flush=True)
        for measured, holds in results[name].get("findings", []):
            print(f"    {'' if holds else 'FAILED '}{measured}", flush=True)
    return results


def write_report(folder: Path, only: tuple[str, ...], results: dict[str, dict], ending: list[str]) -> None:
    """gpu_check.json, and a page with the same."""
    folder.mkdir(parents=True, exist_ok=True)
    words = ["python", "scripts/gpu_check.py", *(["--only", *only] if only else [])]
    machine_words, command = about(), shlex.join(words)
    (folder / "gpu_check.json").write_text(
        json.dumps({"about": machine_words, "command": command, "checks": results}, indent=2) + "\n"
    )
    words = ", ".join(f"{name} {value}" for name, value in machine_words.items())
    page = [f"# {machine_words['device']}", "", f"`{command}`: {words}.", "", "| check | result | measured | s |"]
    page.append("|---|---|---|---|")
    for name, found in results.items():
        if "findings" not in found:
            page += [f"| {name} | {word}: {reason} | | |" for word, reason in found.items()]
            continue
        measured = "<br>".join(
            f"{'' if ok else '**failed** '}{text}".replace("|", "/") for text, ok in found["findings"]
        )
        page.append(f"| {name} | {'passed' if found['passed'] else '**failed**'} | {measured} | {found['seconds']} |")
    (folder / "README.md").write_text("\n".join([*page, "", *(ending or ["failed: none"]), ""]))
    print(f"report: {folder / 'README.md'}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # finish() ends its command then
    parsed = tyro.cli(Args, description=__doc__)
    errors.launch(lambda args: sys.exit(main(args)), parsed)
