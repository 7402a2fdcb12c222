"""Long tails: tokens trained a second when one response in sixteen is eight times as long as the others.

python scripts/bench/tails.py --json baselines/performance/tails.json

algos/grpo.py trains the embedded model on two cores in a split layout: the server has one core, the trainer the other.
Each group has 15 short responses and a long one, the same lengths in every row. The prompts, the model and the rewards
are real. Only the lengths are not: each request asks for exactly so many tokens, whatever they say. The number of
passes over a batch is chosen so that training alone takes about as long as sampling alone.

The rows run in turns, `rounds` times. Tokens a second are those of the steps after the first `warmup`, without the last
three, in which no further sampling begins. "Of the bound" compares them with the slower of two rates:

    sampling alone   all places of the server are taken all the time, and nothing trains
    training alone   the trainer's seconds in the synchronous row, in which nothing is sampled meanwhile

scripts/simulate.py predicts the rows from the other numbers of the JSON file.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import tyro

from algos import grpo
from common import placement, weight_sync
from common.rollout.rollout import Response
from common.rollout.servers import client

ROOT = Path(__file__).parents[2]
GROUP = 16  # responses to a prompt, the last of which is long
TIMES = 8  # as many tokens as a short one
MOST_AHEAD = 4  # the largest --max-inflight-batches of ROWS
DRAINING = MOST_AHEAD - 1  # steps at the end of a run, in which no further sampling begins
SHARING = MOST_AHEAD - 1  # batches that have the same weights if K = 4 and updates go in between responses
ROWS = {  # name -> --max-inflight-batches, --inflight-updates
    "synchronous": (1, "none"),
    "one ahead": (2, "none"),
    "K = 4": (4, "none"),
    "K = 4, recompute": (4, "recompute"),
    "K = 4, keep": (4, "keep"),
}
# The parts of a step that have a metric of their own.
PARTS = tuple(f"time/{part}" for part in ("rollout", "reward", "wait", "logprobs", "update", "sync"))


@dataclasses.dataclass
class Args:
    steps: int = 25  # Of each run.
    rounds: int = 3  # How often each row runs.
    warmup: int = 4  # First steps of a run that do not count.
    prompts: int = 4  # Of a step; each has 16 responses.
    short: int = 64  # Tokens of a short response.
    epochs: int = 0  # Passes over each batch. 0: so many that training takes as long as sampling with a full server.
    json: str = ""  # File for all numbers, which scripts/simulate.py reads.


@dataclasses.dataclass(frozen=True)
class Job:
    """What all runs have in common."""

    folder: Path
    args: Args

    @property
    def lengths(self) -> list[int]:
        """Tokens of the responses of a step."""
        group = [self.args.short] * (GROUP - 1) + [self.args.short * TIMES]
        return group * self.args.prompts

    def flags(self, name: str, steps: int, epochs: int, inflight: int = 1, updates: str = "none") -> list[str]:
        """Flags of algos/grpo.py."""
        flags = ["--model", self.folder / "model", "--reward", f"{self.folder / 'reward.py'}:score"]
        flags += ["--rollout-placement", "split", "--rollout-devices", cores()[-1]]
        flags += ["--max-inflight-batches", inflight, "--inflight-updates", updates, "--tis-cap", 2]
        flags += ["--prompts-per-step", self.args.prompts, "--group-size", GROUP, "--mini-batches", 2]
        flags += ["--max-response-tokens", self.args.short * TIMES, "--epochs", epochs, "--steps", steps]
        # The policy hardly changes: this is about seconds.
        flags += ["--learning-rate", 1e-6, "--eval-prompts", 0, "--rollouts-every", 1000]
        flags += ["--run-dir", self.folder / name]
        return list(map(str, flags))

    def prepare(self) -> None:
        """Write a model with room for long responses, and a reward that differs within every group."""
        model = self.folder / "model"
        shutil.copytree(ROOT / "baselines/warm-start", model)
        config = json.loads((model / "config.json").read_text())
        config["max_position_embeddings"] = 128 + self.args.short * TIMES  # RoPE has no table that would end
        (model / "config.json").write_text(json.dumps(config))
        (self.folder / "reward.py").write_text(
            "import zlib\n\n\ndef score(items, lengths, truncated):\n"
            "    return [zlib.crc32(item.response.encode()) / 2**32 for item in items]\n"
        )

    def run(self, name: str, *settings) -> list[dict]:
        """Metrics of each step of a run."""
        in_own_process(train, self.flags(name, *settings), self.folder / f"{name}.log")
        return [json.loads(line) for line in (self.folder / name / "metrics.jsonl").read_text().splitlines()]

    def rates(self) -> dict:
        """Seconds of the server for tokens and weights, while nothing trains and beside a busy trainer."""
        result = self.folder / "rates.json"
        in_own_process(measure, self.flags("rates", 1, 1), self.folder / "rates.log", result, self.lengths)
        return json.loads(result.read_text())


def cores() -> list[int]:
    """The last two of the cores that this process may use."""
    return sorted(os.sched_getaffinity(0))[-2:]


def in_own_process(function, flags: list[str], log: Path, *more) -> None:
    """Call function(flags, log, *more) in a new process, and wait. Raises RuntimeError if it fails."""
    log.touch()  # a process that is killed at once writes none
    process = multiprocessing.get_context("spawn").Process(target=function, args=(flags, log, *more))
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"{' '.join(flags)}: exit {process.exitcode}: {log.read_text()[-3000:]}")


def begin(log: Path) -> None:
    """Prepare a new process: it prints into a file and keeps to two cores, and responses get their lengths."""
    with open(log, "w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    os.sched_setaffinity(0, cores())
    client.ask = with_lengths(client.ask)


def with_lengths(ask):
    """client.ask, but a response ends at its length and nowhere else. A group becomes two requests.

    All responses of a request have the same limit. The seeds stay those of the whole group.
    """

    async def ask_twice(http, url: str, body: dict, versions, api) -> list[Response]:
        sampling = body["sampling_params"] | {"ignore_eos": True, "stop_token_ids": []}
        parts = [sampling]
        if sampling["n"] == GROUP:
            short = sampling | {"n": GROUP - 1, "max_tokens": sampling["max_tokens"] // TIMES}
            long = sampling | {"n": 1, "seed": sampling["seed"] + GROUP - 1}
            parts = [short, long]
        requests = [ask(http, url, body | {"sampling_params": part}, versions, api) for part in parts]
        responses = itertools.chain(*await asyncio.gather(*requests))
        # A run in which all responses are cut off is stopped.
        return [dataclasses.replace(response, truncated=False) for response in responses]

    return ask_twice


def train(flags: list[str], log: Path) -> None:
    """algos/grpo.py with these flags, in a process that does nothing else."""
    begin(log)
    grpo.main(tyro.cli(grpo.Args, args=flags, default=grpo.Args(**grpo.EMBEDDED)))


def measure(flags: list[str], log: Path, result: Path, lengths: list[int]) -> None:
    """The same up to the first step. Instead of training it writes the server's seconds to `result`."""

    def measure_and_leave(settings, world, engine, trained):
        prompts = [prompt.ids for prompt in settings.prompts]
        weight_sync.push(trained["policy"][0], engine)
        rates = {"alone": decoding(engine, prompts, lengths)}
        with busy():
            rates["beside"] = decoding(engine, prompts, lengths)
        rates["prefill_token"] = prefilling(engine, prompts, max(lengths))
        result.write_text(json.dumps(rates))
        placement.finish(world, engine)
        sys.exit()

    begin(log)
    grpo.job.start = measure_and_leave
    grpo.main(tyro.cli(grpo.Args, args=flags, default=grpo.Args(**grpo.EMBEDDED)))


def decoding(engine, prompts: list[list[int]], lengths: list[int]) -> dict[int, float]:
    """Number of responses under way -> seconds for a token of each. The shortest of three tries, prompts included.

    Few are under way where the others have ended, so they are long.
    """
    seconds = {}
    for count in sorted({1, len(lengths) // 16, len(lengths) // 4, len(lengths)}):
        tokens = max(lengths) if count < len(lengths) else round(statistics.mean(lengths))
        tries = []
        for seed in range(3):
            began = time.perf_counter()
            engine.generate(prompts[:count], 1, 1.0, tokens, seed)
            tries.append((time.perf_counter() - began) / tokens)
        seconds[count] = min(tries)
    return seconds


def prefilling(engine, prompts: list[list[int]], tokens: int) -> float:
    """Seconds for a token of a prompt. Each of these long ones is read once, so none of it comes from the cache."""
    ids = list(itertools.chain(*prompts))
    if len(ids) < 16 * tokens:
        raise ValueError(f"--short: 16 prompts of {tokens} tokens do not fit into the {len(ids)} of all problems")
    long = [ids[i * tokens : (i + 1) * tokens] for i in range(16)]
    began = time.perf_counter()
    engine.generate(long, 1, 1.0, 1, 0)
    return (time.perf_counter() - began) / (len(long) * tokens)


@contextlib.contextmanager
def busy():
    """The trainer's core multiplies matrices, as in training, in a thread beside the one that asks the server."""
    over = threading.Event()

    def multiply() -> None:
        matrix = torch.randn(512, 512)
        while not over.is_set():
            matrix @ matrix

    thread = threading.Thread(target=multiply)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def total(row: dict, *names: str) -> float:
    """The sum of some metrics of a step. One that the run does not have is 0."""
    return sum(row.get(name, 0.0) for name in names)


def training_seconds(rows: list[dict]) -> float:
    """Mean seconds of a step in which the trainer computes."""
    return statistics.mean(total(row, "time/logprobs", "time/update") for row in rows)


def summary(rows: list[dict], tokens: int) -> dict:
    """What the JSON file keeps of one run: means over its counted steps, `rows`. tokens: of each step."""
    steps = [row["time/step"] for row in rows]
    return {
        "tokens_per_s": tokens / statistics.mean(steps),
        "steps": [round(seconds, 3) for seconds in steps],
        "training": training_seconds(rows),
        "sync": statistics.mean(row["time/sync"] for row in rows),
        "reward": statistics.mean(total(row, "time/reward", "overlapped/reward") for row in rows),
        "waited": statistics.mean(total(row, "time/rollout", "time/wait") for row in rows),
        "rest": statistics.mean(row["time/step"] - total(row, *PARTS) for row in rows),  # none of the parts
        "staleness": statistics.mean(row["mismatch/staleness"] for row in rows),
        "staleness_max": max(row["mismatch/staleness_max"] for row in rows),
    }


def choose_epochs(job: Job, sampling: float) -> int:
    """So many passes that training takes about as long as sampling."""
    rows = job.run("probe", 4, 1)[1:]
    once = statistics.median(row["time/update"] for row in rows)
    old = statistics.median(row["time/logprobs"] for row in rows)
    return max(1, round((sampling - old) / once))


def table(data: dict) -> str:
    """The results in Markdown, between comments that mark them in a page."""
    tokens = sum(data["lengths"])
    sampling = tokens / data["sampling_alone"]
    training = tokens / data["training_alone"]
    bound = min(sampling, training)
    rates = {name: [run["tokens_per_s"] for run in runs] for name, runs in data["rows"].items()}
    synchronous = rates["synchronous"]
    lines = [
        "<!-- tails -->",
        f"Sampling alone {sampling:.0f} tokens a second with all {data['places']} places taken, training alone "
        f"{training:.0f} (`--epochs {data['epochs']}`).",
        "",
        "| row | tokens a second | times synchronous (each round) | of the bound | p50 step, s | staleness mean, max |",
        "|---" * 6 + "|",
    ]
    for name, runs in data["rows"].items():
        rate = statistics.mean(rates[name])
        times = rate / statistics.mean(synchronous)
        each = [mine / theirs for mine, theirs in zip(rates[name], synchronous)]
        p50 = statistics.median(itertools.chain(*(run["steps"] for run in runs)))
        age = statistics.mean(run["staleness"] for run in runs)
        oldest = max(run["staleness_max"] for run in runs)
        lines.append(
            f"| {name} | {rate:.0f} | {times:.2f} ({min(each):.2f} to {max(each):.2f}) | {rate / bound:.2f} | "
            f"{p50:.2f} | {age:.2f}, {oldest:.0f} |"
        )
    return "\n".join([*lines, "<!-- /tails -->"])


def main(args: Args) -> None:
    counted = args.steps - args.warmup - DRAINING
    if counted < 1 or counted % SHARING:
        # Batches that share their weights come together. A part of such a group would bend the mean.
        raise SystemExit(
            f"--steps {args.steps} --warmup {args.warmup}: {counted} steps count, without {DRAINING} at the end; "
            f"let it be a multiple of {SHARING}"
        )
    with tempfile.TemporaryDirectory() as scratch:
        job = Job(Path(scratch), args)
        job.prepare()
        rates = job.rates()
        tokens = sum(job.lengths)
        places = len(job.lengths)
        # With all places taken, `places` tokens take rates["alone"][places] seconds. JSON made the key a text.
        sampling = rates["alone"][str(places)] * tokens / places
        epochs = args.epochs or choose_epochs(job, sampling)
        rows = {name: [] for name in ROWS}
        for turn in range(args.rounds):
            for name, (inflight, updates) in ROWS.items():
                settings = (args.steps, epochs, inflight, updates)
                steps = job.run(f"{turn}-{inflight}-{updates}", *settings)
                rows[name].append(summary(steps[args.warmup : -DRAINING], tokens))
                print(f"round {turn + 1}, {name}: {rows[name][-1]['tokens_per_s']:.0f} tokens/s", file=sys.stderr)
    data = {
        "lengths": job.lengths,
        "places": places,
        "epochs": epochs,
        "rates": rates,
        "sampling_alone": sampling,  # seconds for the tokens of a step
        "training_alone": statistics.mean(run["training"] for run in rows["synchronous"]),
        "steps": args.steps,
        "warmup": args.warmup,
        "draining": DRAINING,
        "loops": ROWS,
        "rows": rows,
    }
    if args.json:
        Path(args.json).write_text(json.dumps(data) + "\n")
    print(table(data))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
