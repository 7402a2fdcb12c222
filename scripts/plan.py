"""How long will a step take, and how much memory will a rank need? An estimate before any GPU is rented.

python scripts/plan.py --model Qwen/Qwen2.5-7B-Instruct --gpus 16 --response-mean 800      # every layout on 16 GPUs
python scripts/plan.py --model Qwen/Qwen2.5-7B-Instruct --gpus 8 16 32 64                  # the best layout on each
python scripts/plan.py --model FOLDER --gpus 8 --run runs/grpo                             # corrected by a real run

Of the model only config.json is read: a folder with nothing else in it will do. NOTHING HERE WAS MEASURED ON A GPU:
times are a data sheet's figures divided by assumed shares of them, which are printed and are flags. With --run the time
of each phase is multiplied by what it took in that run divided by what is computed for it.

docs/planning.md lists what is left out.
"""

import dataclasses
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro
from transformers import AutoConfig

from common import errors
from common.errors import BadInput
from common.run import memory
from common.run.directory import described, flat, read_metrics
from common.run.memory import GIB, GPU, Decoder
from common.trainer import batching

ENGINE_RESPONSES = 512  # most responses that an engine works on at once
BLOCK_TOKENS = 16  # tokens of a block of the engine's KV cache; whole blocks of a prompt are shared by its responses
SPLIT_GAIN = 0.1  # share of a step that a split layout must save: it trains on responses one update old
PHASES = ("rollout", "logprobs", "update", "sync")


@dataclass(frozen=True)
class Job:
    """The work of one step; names as the flags of algos/."""

    prompts_per_step: int = 256
    group_size: int = 8
    prompt_mean: float = 200  # Tokens.
    response_mean: float = 400  # Tokens.
    max_response_tokens: int = 1024
    mini_batches: int = 4
    epochs: int = 1
    reference: bool = False  # Whether a reference policy is loaded, as --kl-coef > 0 does.
    teacher: str = ""  # The model of opd's --teacher, frozen, which computes the log-probs of all responses.
    lora_rank: int = 0  # As --lora-rank: only adapters have gradients and moments, and no reference is loaded.
    activation_checkpointing: bool = False
    token_budget: int = 0  # Tokens of one forward; 0 takes as many as memory allows.
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    rollout_memory: float = 0.0  # Share of a GPU's memory that an engine takes; 0 takes what it needs or what is left.


@dataclass(frozen=True)
class Hardware:
    """A data sheet, by default that of an H100 SXM, and shares of it that are assumptions. None of it was measured."""

    gpus_per_node: int = 8
    memory: float = 80e9  # Bytes: A100 and H100 80e9, H200 141e9, B200 180e9.
    peak: float = 989e12  # Dense bfloat16 FLOP/s: A100 312e12, H100 and H200 989e12, B200 2250e12.
    hbm: float = 3.35e12  # Bytes/s of its memory: A100 2.0e12, H100 3.35e12, H200 4.8e12, B200 7.7e12.
    link: float = 450e9  # Bytes/s to GPUs of its node, one way: A100 300e9, H100 and H200 450e9, B200 900e9.
    network: float = 50e9  # Bytes/s to other nodes, one way: a card of 400 Gbit/s for each GPU.
    update_share: float = 0.40  # Share of the peak that the products of forward and backward reach.
    forward_share: float = 0.45  # Share of the peak in log-probs, prefill and decoding.
    hbm_share: float = 0.60  # Share of the memory's bandwidth that decoding and the optimizer reach.
    network_share: float = 0.70  # Share of the bandwidth within and between nodes that collectives reach.
    step_seconds: float = 3e-3  # Scheduler and kernel launches of one decoding step.
    token_seconds: float = 10e-6  # Python's work for one sampled token.
    allreduce_seconds: float = 20e-6  # Latency of one all-reduce, two a layer and decoding step with rollout tp > 1.
    push_seconds: float = 1.0  # Waking the engine and loading weights, in addition to moving their bytes.

    def bandwidth(self, ranks: int) -> float:
        """Bytes/s of a collective over these ranks. Over several nodes the network counts; one rank needs none."""
        slowest = self.link if ranks <= self.gpus_per_node else self.network
        return self.network_share * slowest if ranks > 1 else math.inf


@dataclass
class Args:
    model: str  # Folder or Hub name. Only config.json is read.
    gpus: tuple[int, ...] = (8,)  # One number prints all layouts; several print the best layout on each.
    job: Annotated[Job, tyro.conf.OmitArgPrefixes] = Job()
    hardware: Annotated[Hardware, tyro.conf.OmitArgPrefixes] = Hardware()
    run: str = ""  # Directory of a colocated run of algos/ on the same kind of GPU, whose times correct the estimate.


def load_model(path: str, flag: str = "--model") -> Decoder:
    """Sizes from config.json. Raises BadInput."""
    try:
        AutoConfig.from_pretrained(path)
        return memory.decoder(path)
    except (OSError, ValueError, AttributeError) as error:  # AttributeError: no decoder with the sizes of Llama's
        raise BadInput(f"{flag} {path}: {str(error).splitlines()[0]}") from error


@dataclass(frozen=True)
class Step:
    """One step in one layout. Colocated: every rank trains and samples in turns. Split: each does one all the time."""

    model: Decoder
    job: Job
    hardware: Hardware
    train: int  # W, ranks that train
    rollout: int  # ranks that sample
    tp: int  # ranks of one engine
    split: bool

    def __str__(self) -> str:
        name = f"split, {self.train} train, {self.rollout} sample" if self.split else "colocate"
        return f"{name}, rollout tp {self.tp}"

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype."""
        return getattr(torch, self.job.dtype)

    @property
    def teacher(self) -> Decoder | None:
        return load_model(self.job.teacher, "--teacher") if self.job.teacher else None

    @property
    def gpu(self) -> GPU:
        """A GPU that trains, and what the layout puts on it."""
        return GPU(
            self.hardware.memory, self.model, self.train, self.dtype, adapters=self.model.adapters(self.job.lora_rank),
            frozen=int(self.job.reference and not self.job.lora_rank),
            checkpointing=self.job.activation_checkpointing, engine="elsewhere" if self.split else "asleep",
            other=memory.FROZEN_BYTES * self.teacher.parameters / self.train if self.teacher else 0.0,
        )  # fmt: skip

    @property
    def prompt_copies(self) -> int:
        """How often the trainer computes a prompt: once, or once for each response to it."""
        return 1 if self.job.prompt_mean >= batching.SHARED_PROMPT_MIN_TOKENS else self.job.group_size

    @property
    def token_budget(self) -> int:
        """Tokens of one forward: --token-budget, or what a run chooses on this GPU."""
        return self.job.token_budget or self.gpu.token_budget()

    def trained_tokens(self, prompts: float) -> float:
        """Tokens in the trainer's forward for these prompts and their responses."""
        return prompts * (self.prompt_copies * self.job.prompt_mean + self.job.group_size * self.job.response_mean)

    @property
    def longest(self) -> float:
        """Tokens of the longest response and its prompt."""
        return self.job.prompt_mean + self.job.max_response_tokens

    def forward_tokens(self, prompts: float) -> float:
        """Most tokens of a forward: those of the budget, or of the longest row, which is never cut."""
        return max(self.longest, min(self.token_budget, self.trained_tokens(prompts)))

    def micro_batches(self, prompts: float) -> int:
        """Number of forwards for these prompts."""
        return math.ceil(self.trained_tokens(prompts) / self.token_budget)

    def forward_flop(self) -> tuple[float, float]:
        """FLOPs of a rank's forward, (layers, logits): 2 for each parameter and token, 4 for each width and pair."""
        model, length, prompt = self.model, self.job.response_mean, self.job.prompt_mean
        prompts, group = self.job.prompts_per_step / self.train, self.job.group_size
        # A pair is a token and one that it attends to: with a prompt of P tokens and a response of L, P^2/2 in the
        # prompt, and L P + L^2/2 in the response.
        pairs = prompts * (self.prompt_copies * prompt**2 / 2 + group * (length * prompt + length**2 / 2))
        layers = (
            2 * model.visited * self.trained_tokens(prompts) + 4 * model.query_width * model.num_hidden_layers * pairs
        )
        return layers, 2 * model.embedding * prompts * group * length

    def update_flop(self) -> float:
        """FLOPs of one rank in the updates: 3 forwards' worth in layers (4 with checkpointing), 4 in logits."""
        layers, logits = self.forward_flop()
        return self.job.epochs * ((4 if self.job.activation_checkpointing else 3) * layers + 4 * logits)

    @property
    def engine_responses(self) -> float:
        """Responses that one engine has to generate in a step."""
        return self.job.prompts_per_step * self.job.group_size * self.tp / self.rollout

    @property
    def engine_share(self) -> float:
        """Share of the memory that an engine takes: --rollout-memory, or what a run chooses on this GPU."""
        most = min(self.engine_responses, ENGINE_RESPONSES) * (self.job.prompt_mean + self.job.max_response_tokens)
        return self.job.rollout_memory or self.gpu.engine_share(self.tp, most)

    def running_responses(self) -> float:
        """Responses an engine works on at once, each with its prompt's keys and values. 0: the longest does not fit."""
        each, kv_bytes = self.engine_share * self.hardware.memory, self.model.kv_bytes(self.dtype)
        if each < self.gpu.engine_needs(self.tp, self.job.prompt_mean + self.job.max_response_tokens):
            return 0.0
        room = self.tp * (each - self.gpu.engine_needs(self.tp, 0))
        held = room / (kv_bytes * (self.job.prompt_mean + self.job.response_mean))
        return min(self.engine_responses, ENGINE_RESPONSES, max(1.0, held))

    def rollout_seconds(self) -> float:
        """An engine's products, its reads of weights (each decoding step), keys and values, and the host's work."""
        model, job, hardware = self.model, self.job, self.hardware
        tokens, prompts = self.engine_responses * job.response_mean, self.engine_responses / job.group_size
        # A prompt is computed once, and half a block of the KV cache again for each further response to it.
        filled = prompts * (job.prompt_mean + (job.group_size - 1) * min((BLOCK_TOKENS + 1) / 2, job.prompt_mean))
        # Decoding takes as many forwards as the longest response has tokens, after rounds where not all run at once.
        rounds = max(1.0, self.engine_responses / self.running_responses())
        steps = rounds * job.response_mean + job.max_response_tokens - job.response_mean
        flop = filled * (2 * model.visited + 2 * model.query_width * model.num_hidden_layers * job.prompt_mean)
        flop += 2 * (model.visited + model.embedding) * tokens
        read = steps * model.parameters * self.dtype.itemsize
        read += tokens * (job.prompt_mean + job.response_mean / 2) * model.kv_bytes(self.dtype)
        spent = flop / (hardware.peak * hardware.forward_share) + read / (hardware.hbm * hardware.hbm_share)
        spent = spent / self.tp + steps * hardware.step_seconds + tokens * hardware.token_seconds
        if self.tp > 1:
            moved = 2 * (self.tp - 1) / self.tp * model.hidden_size * self.dtype.itemsize * tokens
            moved /= hardware.bandwidth(self.tp)
            spent += 2 * model.num_hidden_layers * (steps * hardware.allreduce_seconds + moved)
        return spent

    def seconds(self, ratios: dict[str, float]) -> dict[str, float]:
        """Seconds of each phase and of the step. ratios: measured / computed seconds of each phase, or {}.

        FSDP gathers the weights for each forward and each backward, and reduces gradients once an optimizer step, or in
        each backward where whole ones have no room. This runs at the same time as the products: the longer one counts.
        """
        job, hardware, parameters = self.job, self.hardware, self.model.parameters
        prompts, updates = job.prompts_per_step / self.train, job.epochs * job.mini_batches
        wide, read = hardware.bandwidth(self.train), hardware.hbm * hardware.hbm_share
        forwards = self.micro_batches(prompts / job.mini_batches)
        reductions = 1 if self.gpu.whole_gradients else forwards
        # Those after the first mini-batch need a forward for old log-probs, and all of them where a teacher grades.
        later = prompts if self.teacher else prompts - prompts / job.mini_batches
        passes = self.micro_batches(later) + job.reference * self.micro_batches(prompts)
        gathered = passes * self.dtype.itemsize * parameters
        exchanged = updates * (2 * forwards * self.dtype.itemsize + 4 * reductions) * parameters
        adam = 28 * updates * parameters / self.train / read  # four float32 arrays are read, three are written
        products = self.update_flop() / (hardware.peak * hardware.update_share)
        frozen = (later / prompts + job.reference) * sum(self.forward_flop())
        if self.teacher:
            frozen += sum(dataclasses.replace(self, model=self.teacher).forward_flop())
            gathered += self.micro_batches(prompts) * self.dtype.itemsize * self.teacher.parameters
        frozen /= hardware.peak * hardware.forward_share
        sent = parameters * self.dtype.itemsize  # bytes
        passed_on = sent / hardware.bandwidth(self.train + self.rollout) if self.split else 0.0
        phases = {
            "rollout": self.rollout_seconds(),
            "logprobs": max(frozen, gathered / wide),
            "update": max(products + adam, exchanged / wide),
            "sync": hardware.push_seconds + 4 * parameters / read + sent / wide + passed_on,
        }
        phases = {name: spent * ratios.get(name, 1.0) for name, spent in phases.items()}
        training = phases["logprobs"] + phases["update"]  # in a split layout it runs while the next rollout does
        both = max(phases["rollout"], training) if self.split else phases["rollout"] + training
        return phases | {"step": both + phases["sync"]}

    def peak_bytes(self) -> dict[str, float]:
        """Most bytes of a rank in the update and in the rollout, to which colocated trainers add their states."""
        prompts = self.job.prompts_per_step / self.train / self.job.mini_batches
        engine = self.engine_share * self.hardware.memory
        return {
            "update": self.gpu.update(self.forward_tokens(prompts)),
            "rollout": engine + (0 if self.split else self.gpu.states),
        }

    def refusal(self) -> str:
        """Why this layout cannot run, or ""."""
        job = self.job
        if job.prompts_per_step % (job.mini_batches * self.train):
            return f"{job.prompts_per_step} prompts is no multiple of {job.mini_batches} mini-batches x {self.train}"
        prompts = job.prompts_per_step / self.train / job.mini_batches
        if refusal := self.gpu.update_refusal(self.forward_tokens(prompts)):
            return refusal
        return self.gpu.engine_refusal(self.tp, self.longest, self.engine_share)


def layouts(model: Decoder, job: Job, hardware: Hardware, gpus: int) -> list[Step]:
    """Every layout on these GPUs: tp a power of two inside a node, split at any multiple of it."""
    sizes = [tp for tp in (1, 2, 4, 8) if tp <= hardware.gpus_per_node and gpus % tp == 0]
    found = [Step(model, job, hardware, gpus, gpus, tp, False) for tp in sizes]
    shares = [(used, tp) for tp in sizes for used in range(tp, gpus, tp)]
    return found + [Step(model, job, hardware, gpus - used, used, tp, True) for used, tp in shares]


def recommend(seconds: dict[Step, float]) -> Step:
    """The quickest colocated layout, or the quickest split one where that saves SPLIT_GAIN. seconds: of a step."""
    quickest = min(seconds, key=seconds.get)
    colocated = min((it for it in seconds if not it.split), key=seconds.get, default=quickest)
    return quickest if seconds[quickest] <= (1 - SPLIT_GAIN) * seconds[colocated] else colocated


def check_args(args: Args) -> None:
    """Raises BadInput."""
    job, node = args.job, args.hardware.gpus_per_node
    if job.response_mean > job.max_response_tokens:
        raise BadInput(f"--response-mean {job.response_mean:g} is over --max-response-tokens {job.max_response_tokens}")
    for name in ("prompts_per_step", "group_size", "mini_batches", "epochs", "prompt_mean", "response_mean"):
        if getattr(job, name) < 1:
            raise BadInput(f"--{name.replace('_', '-')} {getattr(job, name)}: must be at least 1")
    if bad := [gpus for gpus in args.gpus if gpus < 1 or (gpus > node and gpus % node)]:
        raise BadInput(f"--gpus {bad[0]}: expected part of a node of {node}, or whole nodes")


def measured_ratios(run_dir: Path, job: Job, hardware: Hardware) -> dict[str, float]:
    """Measured / computed seconds of each phase of a run, whose own flags describe its job. Prints both."""
    run, steps = described(run_dir / "run.json"), [row for row in read_metrics(run_dir) if "time/step" in row]
    median = lambda name: statistics.median(row.get(name, 0.0) for row in steps)
    flags, ranks = flat(run["args"]), run["hardware"]["ranks"]
    if not steps or "rollout_tp" not in flags:
        raise BadInput(f"--run {run_dir}: has no finished step of an algorithm that samples")
    own = {name: flags[name] for name in {*vars(job)} & {*flags} - {"rollout_memory"}}
    own["reference"] = flags.get("kl_coef", 0) > 0
    job = dataclasses.replace(job, **own, response_mean=median("response/length_mean"))
    computed = Step(load_model(flags["model"]), job, hardware, ranks, ranks, flags["rollout_tp"], False).seconds({})
    for name in PHASES:
        print(f"{run_dir}: {name} {median(f'time/{name}'):.3f} s, computed {computed[name]:.3f} s")
    return {name: median(f"time/{name}") / computed[name] for name in PHASES if computed[name]}


def main(args: Args) -> None:
    check_args(args)
    model, hardware = load_model(args.model), args.hardware
    print(f"{model.parameters / 1e9:.3g} B parameters")
    print("ASSUMED, not measured:", ", ".join(f"{name} {value:g}" for name, value in vars(hardware).items()))
    ratios = measured_ratios(Path(args.run), args.job, hardware) if args.run else {}
    print("\n| layout | " + ", s | ".join((*PHASES, "step")) + ", s | tokens/s | GiB a rank | |\n" + "|---" * 9 + "|")
    for gpus in args.gpus:
        found = layouts(model, args.job, hardware, gpus)
        able = {it: it.seconds(ratios) for it in found if not it.refusal()}
        best = recommend({it: spent["step"] for it, spent in able.items()}) if able else None
        shown = sorted(able, key=lambda it: able[it]["step"])[:8]
        shown += [it for it in found if it not in shown and not it.split]  # colocated layouts are always shown
        for it in shown if len(args.gpus) == 1 else [best or found[0]]:
            cells = ["-"] * 7 + [it.refusal()]
            if it in able:
                rate = args.job.prompts_per_step * args.job.group_size * args.job.response_mean / able[it]["step"]
                cells = [f"{spent:.1f}" for spent in able[it].values()]
                cells += [f"{rate:,.0f}", f"{max(it.peak_bytes().values()) / GIB:.1f}", "best" * (it == best)]
            print(f"| {gpus} GPUs, {it} | {' | '.join(cells)} |")
        if best and len(args.gpus) == 1:
            needs = " and ".join(f"{size / GIB:.1f} GiB in {phase}" for phase, size in best.peak_bytes().items())
            print(f"\nbest: {needs} a rank, {best.token_budget} tokens a forward")


if __name__ == "__main__":
    errors.launch(main, tyro.cli(Args, description=__doc__))
