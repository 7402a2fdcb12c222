"""How long a step will take and how much memory a rank needs, before any GPU is rented.

python scripts/plan.py predict --model Qwen/Qwen2.5-7B-Instruct --gpus 16 --response-mean 800
python scripts/plan.py predict --sizes.hidden 3584 --sizes.layers 28 --sizes.parameters 7.6e9 --gpus 16   # no config
python scripts/plan.py scale --model Qwen/Qwen2.5-7B-Instruct --plot scale.svg       # to 512 GPUs
python scripts/plan.py measure --output costs.json                                   # this machine's costs
python scripts/plan.py predict --constants costs.json --model FOLDER --gpus 1        # with them
python scripts/plan.py validate                                                      # predicted against measured

NOTHING HERE WAS MEASURED ON A GPU: without --constants the costs are a data sheet's figures times assumed shares (the
--assume flags). Formulas: scripts/plan_model.py; what they leave out: docs/planning.md.
"""

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro
from plan_model import (
    GIB,
    Assumed,
    Costs,
    Job,
    Machine,
    Model,
    Prediction,
    assumed_costs,
    from_config,
    layer_parameters,
    predictions,
    recommend,
    running_responses,
    with_budget,
)
from transformers import AutoConfig

from common import data, errors, placement
from common.errors import BadInput

SHEETS = {  # data sheets, SXM: bytes, dense bfloat16 FLOP/s, HBM bytes/s, NVLink bytes/s in one direction
    "a100-80gb": (80e9, 312e12, 2.0e12, 300e9),
    "h100": (80e9, 989e12, 3.35e12, 450e9),
    "h200": (141e9, 989e12, 4.8e12, 450e9),
    "b200": (180e9, 2250e12, 7.7e12, 900e9),
}
COLUMNS = ("rollout", "logprobs", "update", "sync", "step")


@dataclass(frozen=True)
class Sizes:
    """A model without a config; what is 0 follows from the rest as in Qwen2."""

    hidden: int = 0
    layers: int = 0
    parameters: float = 0  # all of them; 0: from the other sizes
    vocabulary: int = 152_064
    heads: int = 0  # 0: 128 wide
    kv_heads: int = 0  # 0: as many as heads
    intermediate: int = 0  # 0: from the parameters, else four times hidden
    tied: bool = False  # one matrix as embedding and head


@dataclass(frozen=True)
class Gpu:
    """A data sheet; what is 0 is that of --gpu."""

    gpu: Literal["a100-80gb", "h100", "h200", "b200"] = "h100"
    gpus_per_node: int = 8
    memory_gb: float = 0  # 1e9 bytes
    peak_tflops: float = 0  # dense, in the compute dtype
    hbm_gb_s: float = 0
    link_gb_s: float = 0  # a GPU to others of its node, one direction
    network_gb_s: float = 50  # a GPU to other nodes, one direction: a 400 Gbit/s card each


@dataclass
class Planned:
    """What predict and scale share; the job's flags are those of algos/."""

    model: str = ""  # folder or Hub name, of which only config.json is read; empty: --sizes
    sizes: Sizes = Sizes()
    gpu: Annotated[Gpu, tyro.conf.OmitArgPrefixes] = Gpu()
    constants: str = ""  # costs that `measure` wrote, in place of the assumed ones
    assume: Assumed = dataclasses.field(default_factory=Assumed)
    prompts_per_step: int = 256
    group_size: int = 8
    prompt_mean: float = 200  # tokens
    max_prompt_tokens: int = 512
    response_mean: float = 400  # tokens
    max_response_tokens: int = 1024
    mini_batches: int = 4
    epochs: int = 1
    reference: bool = False  # a reference policy, as --kl-coef > 0 loads one
    shared_prompts: bool = True
    activation_checkpointing: bool = False
    token_budget: int = 0
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    rollout_memory: float = 0.4
    rollout_max_seqs: int = 0


@dataclass
class Predict(Planned):
    """One step on these GPUs: every layout that could run, the quickest first, and a recommendation."""

    gpus: int = 8
    rows: int = 8  # of the table


@dataclass
class Scale(Planned):
    """The recommended layout's step on 1, 2, 4, ... GPUs."""

    most: int = 512
    weak: bool = False  # the prompts of a step grow with the GPUs, from --prompts-per-step on 8; else one job on all
    plot: str = ""  # a file for the curves (.svg, .png)


@dataclass
class Measure:
    """Time this machine's phases and fit its costs. Takes minutes, alone on the machine."""

    sizes: tuple[str, ...] = ("192x4", "576x4", "256x10")  # WIDTHxLAYERS, random weights
    rounds: int = 5  # turns of each, after one of warm-up
    output: str = "costs.json"


@dataclass
class Validate:
    """Fit on some sizes, predict steps of algos/grpo.py on others, all taking turns. Takes minutes."""

    sizes: tuple[str, ...] = ("192x4", "576x4", "256x10")  # the costs come from these
    held_out: tuple[str, ...] = ("256x4", "320x8", "512x6")
    rounds: int = 5
    output: str = ""  # a markdown file for the table
    constants: str = ""  # a file for the costs, as `measure` writes it


Args = Predict | Scale | Measure | Validate


# ---- input ----------------------------------------------------------------------------------------------------------


def model_of(args: Planned) -> Model:
    """--model or --sizes. Raises BadInput."""
    sizes = args.sizes
    if args.model:
        try:
            return from_config(AutoConfig.from_pretrained(data.resolve_model(args.model, "huggingface")))
        except (OSError, ValueError) as error:
            first = str(error).splitlines()[0]
            raise BadInput(
                f"--model {args.model}: {first} (or give its sizes: --sizes.hidden, --sizes.layers)"
            ) from error
    if sizes.hidden < 1 or sizes.layers < 1:
        raise BadInput("--model, or --sizes.hidden and --sizes.layers at least, says what is trained")
    heads = sizes.heads or max(1, sizes.hidden // 128)
    kv_heads, head_dim = sizes.kv_heads or heads, sizes.hidden // heads
    ends = sizes.vocabulary * sizes.hidden * (1 if sizes.tied else 2)
    shape = {"hidden": sizes.hidden, "layers": sizes.layers, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    intermediate, inside = sizes.intermediate or 4 * sizes.hidden, round(sizes.parameters - ends)
    if sizes.parameters:
        rest = inside - layer_parameters(intermediate=0, **shape, qkv_bias=True)
        if rest <= 0:
            raise BadInput(f"--sizes.parameters {sizes.parameters:g}: the vocabulary and attention alone have more")
        intermediate = sizes.intermediate or round(rest / (3 * sizes.hidden * sizes.layers))
    else:
        inside = layer_parameters(intermediate=intermediate, **shape, qkv_bias=True)
    return Model(
        sizes.hidden, intermediate, sizes.layers, heads, kv_heads, head_dim, sizes.vocabulary, sizes.tied, inside
    )


def job_of(args: Planned) -> Job:
    """The job's flags, looked over. Raises BadInput."""
    for mean, most in (("prompt_mean", "max_prompt_tokens"), ("response_mean", "max_response_tokens")):
        if not 0 < getattr(args, mean) <= getattr(args, most):
            flags = [f"--{name.replace('_', '-')} {getattr(args, name):g}" for name in (mean, most)]
            raise BadInput(f"{flags[0]} must be above 0 and at most {flags[1]}")
    for name in ("prompts_per_step", "group_size", "mini_batches", "epochs"):
        if getattr(args, name) < 1:
            raise BadInput(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least 1")
    names = {field.name for field in dataclasses.fields(Job)} & {field.name for field in dataclasses.fields(Planned)}
    return Job(**{name: getattr(args, name) for name in names} | {"dtype": getattr(torch, args.dtype)})


def machine_of(gpu: Gpu, gpus: int) -> Machine:
    """GPUs by their data sheet and the flags that replace parts of it. Raises BadInput."""
    if gpus < 1 or (gpus > gpu.gpus_per_node and gpus % gpu.gpus_per_node):
        raise BadInput(f"--gpus {gpus}: a whole number of nodes of --gpus-per-node {gpu.gpus_per_node}, or part of one")
    given = (gpu.memory_gb * 1e9, gpu.peak_tflops * 1e12, gpu.hbm_gb_s * 1e9, gpu.link_gb_s * 1e9)
    figures = [own or sheet for own, sheet in zip(given, SHEETS[gpu.gpu])]
    return Machine(gpus, gpu.gpus_per_node, *figures, gpu.network_gb_s * 1e9)


def costs_of(args: Planned, job: Job, machine: Machine) -> tuple[Costs, Job, Machine, str]:
    """(costs, job, machine, where the costs are from): assumed, or --constants and the machine they hold for."""
    if not args.constants:
        sheet = f"{args.gpu.gpu}'s data sheet" if machine.gpus == 1 else f"{machine.gpus} x {args.gpu.gpu}, data sheet"
        return assumed_costs(machine, args.assume), job, machine, f"ASSUMED shares of {sheet}; nothing was measured"
    if not Path(args.constants).is_file():
        raise BadInput(
            f"--constants {args.constants}: no such file; plan.py measure --output {args.constants} makes it"
        )
    found = json.loads(Path(args.constants).read_text())
    if found["device"] == "cpu" and machine.gpus > 1:
        raise BadInput(f"--gpus {machine.gpus}: the costs in {args.constants} are those of one rank with all cores")
    job = dataclasses.replace(job, dtype=getattr(torch, found["dtype"]))
    if found["device"] == "cpu":
        job = dataclasses.replace(job, kv_block=32, rollout_memory=0.25)
    return found["costs"], job, dataclasses.replace(machine, memory=found["memory"]), f"measured on {found['hardware']}"


# ---- output ---------------------------------------------------------------------------------------------------------


def row(found: Prediction, job: Job) -> str:
    """A layout as a line of the table."""
    if found.refused:
        return f"| {found.layout} | " + " | ".join("-" for _ in COLUMNS) + f" | - | - | {found.refused} |"
    phases = " | ".join(f"{found.seconds[name]:.1f}" for name in COLUMNS)
    rate = job.prompts_per_step * job.group_size * job.response_mean / found.seconds["step"]
    memory = max(found.bytes.values()) / GIB
    return f"| {found.layout} | {phases} | {rate:,.0f} | {memory:.1f} | |"


HEADER = (
    "| layout | rollout, s | logprobs, s | update, s | sync, s | step, s | tokens/s | GiB a rank | |\n"
    + "|---" * 9
    + "|"
)


def predict(args: Predict) -> None:
    """Print the table of layouts and the recommendation."""
    model, job, machine = model_of(args), job_of(args), machine_of(args.gpu, args.gpus)
    costs, job, machine, origin = costs_of(args, job, machine)
    found = predictions(model, job, machine, costs, args.assume)
    best = recommend(found)
    job = with_budget(model, job, machine.memory)
    print(f"{model.parameters / 1e9:.3g} B parameters, token budget {job.token_budget}. Costs: {origin}.\n\n{HEADER}")
    for place, it in enumerate(found):
        if place < args.rows or not it.layout.split:  # colocated ones are always said
            print(row(it, job))
    running = running_responses(model, job, best.layout, machine.memory)
    parts = ", ".join(f"{amount / GIB:.1f} GiB in the {phase}" for phase, amount in best.bytes.items())
    print(f"\nrecommended: {best.layout}: {best.seconds['step']:.1f} s a step")
    print(f"memory of a rank: {parts}; an engine works on {running:.0f} responses at once")
    if best.layout.split:
        print(
            "split: the rollout of the next step runs beside the update, so it is sampled from weights one update old"
        )


def scaled(args: Scale) -> list[tuple[int, Job, Prediction | None]]:
    """(GPUs, its job, the recommended layout or None) for 1, 2, 4, ..., args.most."""
    model, rows, gpus = model_of(args), [], 1
    while gpus <= args.most:
        job = job_of(args)
        if args.weak:
            job = dataclasses.replace(job, prompts_per_step=max(1, job.prompts_per_step * gpus // 8))
        costs, job, machine, _ = costs_of(args, job, machine_of(args.gpu, gpus))
        found = predictions(model, job, machine, costs, args.assume)
        able = not all(it.refused for it in found)
        rows.append((gpus, job, recommend(found) if able else None))
        gpus *= 2
    return rows


def scale(args: Scale) -> None:
    """Print the table, and draw it."""
    rows = scaled(args)
    origin = costs_of(args, job_of(args), machine_of(args.gpu, 1))[3]
    print(f"Costs: {origin}.\n\n| GPUs | prompts {HEADER.removesuffix('|---' * 9 + '|').strip()} share of linear |")
    print("|---" * 12 + "|")
    first = None
    for gpus, job, best in rows:
        if best is None:
            print(f"| {gpus} | {job.prompts_per_step} | no layout can run |" + " |" * 9)
            continue
        rate = job.prompts_per_step / best.seconds["step"] / gpus
        first = first or rate
        print(f"| {gpus} | {job.prompts_per_step} {row(best, job)} {rate / first:.0%} |")
    if args.plot:
        draw([it for it in rows if it[2]], args.plot, origin)
        print(f"\nplot: {args.plot}")


def draw(rows, path: str, origin: str) -> None:
    """Seconds of each phase over the GPUs, both logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for name in COLUMNS:
        axes.loglog([gpus for gpus, *_ in rows], [it.seconds[name] for *_, it in rows], marker="o", label=name, base=2)
    axes.set(xlabel="GPUs", ylabel="s a step", title=f"Expectation: {origin}")
    axes.title.set_fontsize(9)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
    pyplot.close(figure)


def main(args: Args) -> None:
    if isinstance(args, Predict):
        return predict(args)
    if isinstance(args, Scale):
        return scale(args)
    import plan_measure  # it imports the trainer's modules

    held_out = args.held_out if isinstance(args, Validate) else ()
    dtype = placement.native_dtype()
    timed, steps = plan_measure.play(args.sizes, held_out, args.rounds)
    costs, errors = plan_measure.fit_turns(timed, dtype)
    found = plan_measure.record(costs, errors, args.sizes, dtype, args.rounds)
    constants = args.output if isinstance(args, Measure) else args.constants
    if constants:
        Path(constants).write_text(json.dumps(found, indent=2) + "\n")
        print(f"costs: {constants}; largest error of a phase: {max(errors.values()):.0%}")
    if isinstance(args, Validate):
        command = " ".join(["python", "scripts/plan.py", *sys.argv[1:]])
        text = plan_measure.page(plan_measure.validation_rows(costs, steps, dtype), found, command)
        print(text)
        if args.output:
            Path(args.output).write_text(text)


if __name__ == "__main__":
    errors.launch(main, tyro.cli(Args, description=__doc__))
