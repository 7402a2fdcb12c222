"""How fast is the loop? Simulated rows beside measured ones, and machines that nobody has measured.

    python scripts/simulate.py                                                # 8, 64 and 512 GPUs, by its assumptions
    python scripts/simulate.py --measured baselines/performance/tails.json    # beside what bench/tails.py measured

Both tables are Markdown, between comments that mark them in a page. scripts/loop_model.py is the model. It needs no
GPU, and a table is the same each time.
"""

import itertools
import json
import math
import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import tyro
from loop_model import Costs, Loop, Run, rate

from common.preflight.docstrings import help_text

MOST_SEQUENCES = 512  # as in common/rollout/engines.py, which takes seconds to import


def interpolated(seconds: dict[str, float]) -> Callable[[int], float]:
    """A function through these points, straight between them."""
    points = sorted((int(count), value) for count, value in seconds.items())

    def decode(count: int) -> float:
        for (left, low), (right, high) in itertools.pairwise(points):
            if count <= right:
                return low + (high - low) * (count - left) / (right - left)
        return points[-1][1]

    return decode


def predicted(data: dict, name: str) -> float:
    """Tokens a second of a row of tails.py. Of the row it knows the trainer's seconds, not how long it waited.

    data: the JSON file that tails.py has written.
    """
    runs = data["rows"][name]
    inflight, updates = data["loops"][name]
    loop = Loop(inflight, updates)
    synchronous = data["rows"]["synchronous"]
    training = mean_of(runs, "training") + mean_of(synchronous, "rest")
    # Amid responses each step has an update, which waits for the servers to pause.
    update = mean_of(synchronous if updates == "none" else runs, "sync")
    alone, beside = data["rates"]["alone"], data["rates"]["beside"]
    full = str(data["places"])  # the keys of a JSON object are texts
    costs = Costs(
        servers=1,
        places=data["places"],
        decode=interpolated(alone),
        train=lambda tokens: training,
        update=update,
        recompute=data["rates"]["prefill_token"],
        grade=mean_of(synchronous, "reward"),
        slower=beside[full] / alone[full],
    )
    trained = Run(costs, loop, lambda step: data["lengths"], data["steps"]).go()
    return rate(trained, data["warmup"], data["steps"] - data["draining"])


def mean_of(runs: list[dict], part: str) -> float:
    """Mean of one of the numbers that tails.py gives of each run of a row."""
    return statistics.mean(run[part] for run in runs)


def beside_measured(data: dict) -> str:
    """The ratios between rows, measured and predicted, in Markdown."""
    measured = {name: mean_of(runs, "tokens_per_s") for name, runs in data["rows"].items()}
    simulated = {name: predicted(data, name) for name in measured}
    lines = ["<!-- simulated -->", "| row | times synchronous, measured | simulated | simulated / measured |"]
    lines.append("|---" * 4 + "|")
    for name in measured:
        times_measured = measured[name] / measured["synchronous"]
        times_simulated = simulated[name] / simulated["synchronous"]
        quotient = times_simulated / times_measured
        lines.append(f"| {name} | {times_measured:.2f} | {times_simulated:.2f} | {quotient:.2f} |")
    return "\n".join([*lines, "<!-- /simulated -->"])


@dataclass(frozen=True)
class Args:
    measured: str = ""  # JSON file of scripts/bench/tails.py. Without one, the assumptions below.
    gpus: tuple[int, ...] = (8, 64, 512)
    responses: tuple[int, ...] = (1024,)  # Of a step, at any number of GPUs.
    median: float = 1000  # Tokens of a response.
    sigma: float = 1.0  # Of the logarithm of its tokens.
    longest: int = 16384  # A longer response is cut off.
    base: float = 0.010  # Seconds for the next token of one response on a server, which has one GPU ...
    each: float = 0.0001  # ... and for each response under way.
    full: int = 256  # With so many responses a server samples as fast as a GPU of the trainer trains.
    update: float = 2.0  # Seconds in which all servers get new weights.
    inflight: tuple[int, ...] = (4, 16)  # K of the columns with several batches in flight.
    lost: float = 0.0  # Probability that a server is lost in a step.
    restart: float = 300.0  # Seconds until it goes on.
    save_every: int = 10  # Steps between checkpoints.
    steps: int = 40
    seed: int = 0  # Of the lengths, and of the steps that lose a server.


def long_tailed(args: Args, responses: int, step: int) -> list[int]:
    """Log-normal lengths of the responses of a step, the same for all rows."""
    draw = random.Random(f"{args.seed} {step}")
    lengths = (math.ceil(draw.lognormvariate(math.log(args.median), args.sigma)) for _ in range(responses))
    return [min(length, args.longest) for length in lengths]


def decode_seconds(args: Args, count: int) -> float:
    """Seconds for a token of each of so many responses under way on a server."""
    return args.base + args.each * count


def speed(args: Args) -> float:
    """Tokens a second of a GPU of the trainer, and of a full server."""
    return args.full / decode_seconds(args, args.full)


def tokens_per_gpu(args: Args, gpus: int, responses: int, loop: Loop, colocated: bool) -> float:
    """Tokens a second and GPU. Half of the GPUs sample and half train or, colocated, all do both in turns."""
    servers = trainers = gpus if colocated else gpus // 2
    costs = Costs(
        servers=servers,
        places=min(MOST_SEQUENCES, math.ceil(responses / servers)),  # as in a run
        decode=lambda count: decode_seconds(args, count),
        train=lambda tokens: tokens / speed(args) / trainers,
        update=args.update,
        restart=args.restart,
    )
    lengths = lambda step: long_tailed(args, responses, step)
    trained = Run(costs, loop, lengths, args.steps).go()
    return rate(trained, uncounted(args), args.steps - uncounted(args)) / gpus


def uncounted(args: Args) -> int:
    """Steps at each end of a run that do not count: the pipeline fills in the first ones, and drains in the last."""
    return max(args.inflight) - 1


def check_args(args: Args) -> None:
    """Leave with a message for numbers that no run can have."""
    if not args.inflight or min(args.inflight) < 1:
        sys.exit("error: --inflight: name numbers of batches, from 1")
    if args.steps <= 2 * uncounted(args):
        least = 2 * uncounted(args) + 1
        sys.exit(f"error: --steps {args.steps}: with --inflight {max(args.inflight)} use {least} or more")
    if not args.gpus or min(args.gpus) < 2:
        sys.exit("error: --gpus: half of them sample and half train, so use 2 or more")
    if min(args.responses, default=0) < 1:
        sys.exit("error: --responses: a step has one or more")
    if not 0 <= args.lost < 1:
        sys.exit(f"error: --lost {args.lost}: a run that loses a server in every step never ends; use less than 1")


def at_scale(args: Args) -> str:
    """What each loop makes of these GPUs, in Markdown. A first table has the assumptions."""
    synchronous = Loop(lost=args.lost, save_every=args.save_every, seed=args.seed)
    loops = {
        "synchronous, colocated": (synchronous, True),
        "synchronous, split": (synchronous, False),
        "one ahead": (replace(synchronous, inflight=2), False),
    }
    for inflight in args.inflight:
        loops[f"K = {inflight}, keep"] = (replace(synchronous, inflight=inflight, updates="keep"), False)
    most = speed(args) / 2
    assumptions = {
        "lengths": f"log-normal, median {args.median:g}, sigma {args.sigma:g}, cut off at {args.longest}",
        "a server on each GPU": f"{1000 * args.base:g} ms per decoding step, plus {1000 * args.each:g} ms for each "
        "unfinished response",
        "a GPU that trains": f"as many tokens a second as a server samples with {args.full} responses",
        "an update of the servers' weights": f"{args.update:g} s",
        "probability that a step loses a server": f"{args.lost:g}",
    }
    lines = [
        "<!-- scale -->",
        "These numbers are assumed, not measured:",
        "",
        "| assumed | |",
        "|---|---|",
        *(f"| {what} | {value} |" for what, value in assumptions.items()),
        "",
        f"Tokens a second per GPU. If servers and trainers were always busy, it would be {most:.0f}:",
        "",
        f"| GPUs | responses a step | {' | '.join(loops)} |",
        "|---" * (2 + len(loops)) + "|",
    ]
    for responses, gpus in itertools.product(args.responses, args.gpus):
        cells = [f"{tokens_per_gpu(args, gpus, responses, loop, alike):.0f}" for loop, alike in loops.values()]
        lines.append(f"| {gpus} | {responses} | {' | '.join(cells)} |")
    return "\n".join([*lines, "<!-- /scale -->"])


if __name__ == "__main__":
    args = tyro.cli(Args, description=help_text(__doc__))
    if args.measured:
        print(beside_measured(json.loads(Path(args.measured).read_text())))
    else:
        check_args(args)
        print(at_scale(args))
