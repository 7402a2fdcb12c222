"""Compute a saved step of a run again, from its rollout file and the checkpoint before it, and compare.

    python scripts/replay.py runs/grpo --step 2                 (the run had --save-every 1 --rollouts-every 1)
    python scripts/replay.py runs/mine --step 2 --file mine.py       (the run of a file that is not in algos/)

The algorithm's own main() runs one step. run_step() replaces a few functions of common/ meanwhile:

    engines.start            an engine that answers with the recorded responses, see ReplayEngine
    prompts.PromptLoader     hands out the recorded prompts, see ReplayLoader
    Rewards.score            grades again; a response that could not be graded in the run stays ungraded
    Tracker.write            returns the metrics, and ends main() after the step

The rewards' code, and the services and weights files that they use, must be as they were. Start the replay in the
directory where the run was started, on any number of ranks. Another number of ranks packs other micro-batches. In
float32 the numbers still agree to 1e-6, in bfloat16 they don't.

Exits with 1 if losses, gradient norms, scores, advantages, values or log-probs differ by more than --tolerance. The
difference is relative for numbers above 1.
"""

import dataclasses
import importlib
import itertools
import math
import os
import sys
import tempfile
import typing
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import tyro

from common import errors, placement
from common.data import prompts as data
from common.preflight import folders, run_directory
from common.preflight.docstrings import help_text
from common.processes.child import import_algorithm
from common.rewards import mixture as reward_mixture
from common.rollout import engines, rollout, turns
from common.run import traces, tracking

ALGORITHMS = Path(__file__).parents[1] / "algos"


@dataclasses.dataclass
class Args:
    run_dir: tyro.conf.Positional[Path]
    step: int  # The step to compute again. Steps count from 1.
    tolerance: float = 1e-6  # The largest difference that still counts as equal.
    file: Path | None = None  # The algorithm's file, if it is not in algos/. Its code runs: name one that you trust.


class Finished(Exception):
    """The step is done. Raised to leave the algorithm's main before the next step."""


@dataclasses.dataclass
class Recorded(rollout.Rollout):
    """A rollout that knows what became of its rows."""

    rows: list[dict]


class ReplayEngine:
    """Answers each prompt with its responses in the file, in order.

    It only holds this rank's prompts, as PromptSampler deals them: two prompts with the same tokens may differ in their
    images or in their answer.
    """

    def __init__(self, rows: list[dict], world: placement.World):
        self.device = world.device
        self.wire_dtype = torch.float32
        self.saved_names = False
        self.weight_version = latest_version(rows)
        self.sampled: dict[tuple, list] = {}  # prompt ids -> groups of rows
        self.greedy: dict[tuple, list] = {}  # the same for ReMax's baselines
        groups = [list(group) for _, group in itertools.groupby(rows, lambda row: row["index"])]
        for group in groups[world.rank :: world.size]:
            first = group[0]
            key = tuple(first["prompt_ids"])
            self.sampled.setdefault(key, []).append(group)
            if "baseline_response_ids" in first:
                self.greedy.setdefault(key, []).append([baseline_row(first)])

    def generate(
        self, prompt_ids, n: int, temperature: float, max_tokens: int, seed: int, done=None, reply=None
    ) -> Recorded:
        """The recorded responses. Raises BadInput if the file does not hold n responses to a prompt."""
        waiting = self.sampled if temperature > 0 else self.greedy
        groups = []
        for ids in prompt_ids:
            groups_of_prompt = waiting.get(tuple(ids))
            group = groups_of_prompt.pop(0) if groups_of_prompt else []
            if len(group) != n:
                raise errors.BadInput(f"the file does not hold {n} responses to the prompt {ids}")
            groups.append(group)
        rows = [row for group in groups for row in group]

        if reply is not None:
            episodes = [play_again(row, partial(reply, i)) for i, group in enumerate(groups) for row in group]
            batch = turns.collate_turns(episodes, None, self.device)
            return Recorded(**vars(batch), rows=rows)

        logprobs = None
        if temperature > 0:
            logprobs = [row["rollout_logprobs"] for row in rows]
        batch = rollout.collate(
            [ids for ids in prompt_ids for _ in range(n)],  # with their images, which the file does not have
            [row["response_ids"] for row in rows],
            logprobs,
            [row["finish_reason"] == "length" for row in rows],
            [row["weight_versions"] for row in rows],
            self.device,
        )
        return Recorded(**vars(batch), rows=rows)

    def load_weights(self, named_tensors) -> None:
        """It samples nothing."""

    def sleep(self) -> None:
        """It holds nothing."""


def latest_version(rows: list[dict]) -> int:
    """The newest version of the weights that sampled a token of these rows."""
    return max(version for row in rows for version in row["weight_versions"])


def baseline_row(row: dict) -> dict:
    """The row of ReMax's greedy response to the same prompt."""
    greedy = dict(row)
    for name in ("response_ids", "finish_reason", "sampled"):
        greedy[name] = row.get(f"baseline_{name}")
    greedy["rollout_logprobs"] = []
    # The file does not have its versions. It was sampled beside the others.
    greedy["weight_versions"] = [max(row["weight_versions"], default=0)] * len(greedy["response_ids"] or [])
    return greedy


def play_again(row: dict, reply) -> turns.Turns:
    """The recorded turns of an episode, answered by the environment again. Raises RunFailed if an answer differs."""
    ids = row["response_ids"]
    logprobs = row["rollout_logprobs"]
    episode = turns.Turns(row["prompt_ids"], len(ids) + 1)
    suffix = []  # what the environment adds to the policy's turn
    for is_sampled, places in itertools.groupby(range(len(ids)), lambda place: row["sampled"][place]):
        places = list(places)
        turn = slice(places[0], places[-1] + 1)
        if is_sampled:
            is_last = turn.stop == len(ids)
            cut_off = is_last and row["finish_reason"] == "length"
            episode.add(ids[turn], logprobs[turn] or [0.0] * len(places), cut_off)
            suffix = reply(episode)
        else:
            if suffix != ids[turn]:
                message = f"{row['id']}: the environment's answer is not the one it gave in the run"
                raise errors.RunFailed(message, code="environment-failed")
            episode.observe(suffix)
    episode.versions = row["weight_versions"]
    return episode


class ReplayLoader(data.PromptLoader):
    """Hands out the prompts of the file, in its order. Prompts that a filter dropped in the run are not in the file."""

    def __init__(self, rows: list[dict], prompts: list[data.Prompt], *arguments):
        super().__init__(prompts, *arguments)
        by_id: dict[str, list[data.Prompt]] = {}  # rows of two data sets may have one id
        for prompt in prompts:
            by_id.setdefault(prompt.id, []).append(prompt)
        self.waiting = []
        for _, group in itertools.groupby(rows, lambda row: row["index"]):
            row = next(group)
            seen = row["prompt_ids"], row["answer"]
            same = [prompt for prompt in by_id.get(row["id"], []) if (prompt.ids, prompt.answer) == seen]
            if not same:
                raise errors.BadInput(f"{row['id']}: the data set or the tokenizer is not the one of the run")
            self.waiting.append(same[0])

    def take(self, count: int) -> list[data.Prompt]:
        prompts = self.waiting[:count]
        self.waiting = self.waiting[count:]
        if not prompts:
            raise errors.RunFailed(
                "a filter drops prompts that it kept in the run: their rewards have changed", code="reward-failed"
            )
        return prompts


def as_recorded(results: list, batch: Recorded) -> list:
    """The new results, or the recorded ones of rows that could not be graded in the run.

    Rows that the run dropped leave the response mask. Raises RunFailed if a row that was graded then can't be now.
    """
    for i, (row, result) in enumerate(zip(batch.rows, results)):
        if row["dropped"]:
            batch.response_mask[i] = False
        if "ungraded" in traces.info(row):
            results[i] = dataclasses.replace(result, score=row["score"], acc=row["acc"], info=row["info"])
        elif "ungraded" in result.info and not row["dropped"]:
            raise errors.RunFailed(
                f"{row['id']}: was graded in the run, now: {result.info['ungraded']}", code="reward-failed"
            )
    return results


def zero_ungraded(rewards, results: list, *arguments) -> list:
    """In place of Rewards.drop_ungraded: as_recorded() decides what becomes of rows that could not be graded."""
    graded = []
    for result in results:
        if result.score is None:
            result = dataclasses.replace(result, score=0.0, acc=0.0)
        graded.append(result)
    return graded


def rebuild(kind, value) -> Any:
    """Turn a value of run.json into the type of its flag: JSON has neither dataclasses nor tuples. Raises BadInput."""
    if dataclasses.is_dataclass(kind):
        types = typing.get_type_hints(kind)
        unknown = sorted(set(value) - set(types))
        if unknown:
            raise errors.BadInput(f"run.json: {unknown} are not flags of this version: check out the run's commit")
        return kind(**{name: rebuild(types[name], part) for name, part in value.items()})
    if isinstance(value, list) and typing.get_origin(kind) is not list:
        return tuple(rebuild(None, part) for part in value)
    return value


def load_run(run_dir: Path, step: int, file: Path | None = None) -> tuple[Any, dict, dict]:
    """The algorithm's module, the contents of run.json, and the metrics of the step. Raises BadInput.

    file: the algorithm's file. None: the one in algos/ that run.json names. Another path in run.json is never run,
    because somebody else may have written it.
    """
    for name in ("run.json", "metrics.jsonl"):
        if not (run_dir / name).is_file():
            raise errors.BadInput(f"{run_dir}: no {name}; is this the directory of a run?")
    described = run_directory.described(run_dir / "run.json")
    script = str(described.get("file", "FILE"))  # older versions did not record it
    recorded_file = ALGORITHMS.parent / script
    if file is None and not (recorded_file.is_file() and recorded_file.parent == ALGORITHMS):
        raise errors.BadInput(
            f"{run_dir / 'run.json'}: the run was made by {script}, not in algos/; --file {script} runs that file, if "
            "you trust it"
        )
    metrics = next((row for row in run_directory.read_metrics(run_dir) if row["step"] == step), None)
    if metrics is None:
        raise errors.BadInput(f"--step {step}: not in {run_dir / 'metrics.jsonl'}")
    algorithm = import_algorithm(file) if file else importlib.import_module(f"algos.{recorded_file.stem}")
    return algorithm, described, metrics


def checkpoint_before(run_dir: Path, step: int, resumed: str) -> str:
    """Folder of the checkpoint that the step began with; "" if it began with the start model. Raises BadInput."""
    name = f"step_{step - 1:06d}"
    for folder in (run_dir / "checkpoints" / name, Path(resumed)):
        if folder.name == name and (folder / "state.json").is_file():
            return str(folder)
    if step == 1:
        return ""
    saved = [run_directory.saved_step(folder) + 1 for folder in folders.complete(run_dir)]
    raise errors.BadInput(
        f"--step {step}: no checkpoint of step {step - 1} in {run_dir}; pick 1 or one of {saved}, if its rollouts are "
        "saved, or run again with --save-every 1"
    )


@dataclasses.dataclass
class Comparison:
    """A number of the step, in the run and in the replay."""

    name: str
    recorded: float
    recomputed: float
    difference: float  # the largest one, if the numbers are means


def replay(run_dir: Path, step: int, file: Path | None = None) -> list[Comparison]:
    """All comparisons, on rank 0; other ranks get none. Collective. Raises BadInput, RunFailed."""
    algorithm, described, metrics = load_run(run_dir, step, file)
    flags = described["args"]
    rows = traces.read(traces.find(run_dir, step))
    with tempfile.TemporaryDirectory() as scratch:
        flags = {
            **flags,
            "run_dir": scratch,
            "saving": {"resume": checkpoint_before(run_dir, step, flags["saving"]["resume"])},
            "source": {**flags["source"], "eval_prompts": 0},
            # This run may have another number of ranks.
            "rollout_tp": 1,
            "layout": dataclasses.asdict(placement.Layout()),
            # SGLang has no engine in this process. None samples here, so which one it is doesn't matter.
            "rollout_backend": flags["rollout_backend"].replace("sglang", "hf"),
            "compute": {**flags["compute"], "sequence_parallel": 1, "shard_size": 0},
            "rollouts_every": 1,
            "track": "none",
        }
        # A chat template may print the date, and step 1 has no checkpoint that would tell.
        date = described.get("date", "")
        with mock.patch.object(run_directory, "date_of", lambda *given: date):
            new_metrics = run_step(algorithm, rebuild(algorithm.Args, flags), rows, step)
        if int(os.environ["RANK"]):
            return []
        new_rows = traces.read(traces.find(Path(scratch), step))
    return compare_metrics(metrics, new_metrics) + compare_rows(rows, new_rows)


def compare_metrics(recorded: dict[str, float], recomputed: dict[str, float]) -> list[Comparison]:
    """Losses and gradient norms."""
    comparisons = []
    for name, before in recorded.items():
        if name.startswith("loss/") or name.endswith("grad_norm"):
            now = recomputed.get(name, math.nan)
            comparisons.append(Comparison(name, before, now, gap(before, now)))
    return comparisons


def compare_rows(recorded: list[dict], recomputed: list[dict]) -> list[Comparison]:
    """Means of the numbers in the rollout files, and their largest difference."""
    comparisons = []
    for name in ("score", "advantage", "old_logprobs", "values"):
        before = flatten([row.get(name) for row in recorded])
        now = flatten([row.get(name) for row in recomputed])
        if not before and not now:
            continue  # only an algorithm with a critic has values
        largest = math.inf
        if len(before) == len(now):
            largest = max(map(gap, before, now), default=0.0)
        comparisons.append(Comparison(f"{name}, mean of {len(before)}", mean(before), mean(now), largest))
    return comparisons


def run_step(algorithm, args, rows: list[dict], step: int) -> dict[str, float]:
    """The metrics of the algorithm's main after this one step."""
    write = tracking.Tracker.write
    grade = reward_mixture.Rewards.score

    def start(backend, model_path, stop_token_ids, world, *arguments, **sizes):
        return ReplayEngine(rows, world)

    def score(rewards, prompts, responses, batch, *arguments):
        return as_recorded(grade(rewards, prompts, responses, batch, *arguments), batch)

    def write_and_leave(tracker, written: int):
        metrics = write(tracker, written)
        if tracker.world.is_main:
            tracker.bar.close()
        raise Finished(metrics)

    with (
        mock.patch.object(engines, "start", start),
        mock.patch.object(data, "PromptLoader", partial(ReplayLoader, rows)),
        mock.patch.object(reward_mixture.Rewards, "score", score),
        mock.patch.object(reward_mixture.Rewards, "drop_ungraded", zero_ungraded),
        mock.patch.object(tracking.Tracker, "write", write_and_leave),
    ):
        try:
            algorithm.main(args)
        except Finished as finished:
            dist.barrier()  # no rank leaves while another still talks to it
            return finished.args[0]
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    raise errors.BadInput(f"--step {step}: the run's --steps {args.steps} end before it")


def gap(before: float, now: float) -> float:
    """The absolute difference, relative for numbers above 1; infinite if only one of the two is NaN."""
    if before == now or (math.isnan(before) and math.isnan(now)):
        return 0.0
    difference = abs(before - now) / max(1.0, abs(before))
    return math.inf if math.isnan(difference) else difference


def flatten(values: list) -> list[float]:
    """Numbers, lists of numbers and None, as one list."""
    numbers = []
    for value in values:
        if isinstance(value, list):
            numbers.extend(value)
        elif value is not None:
            numbers.append(value)
    return numbers


def mean(values: list[float]) -> float:
    return sum(values) / max(1, len(values))


def main(args: Args) -> None:
    if args.step < 1:
        raise errors.BadInput(f"--step {args.step}: steps count from 1")
    comparisons = replay(args.run_dir, args.step, args.file)
    title = f"step {args.step}"
    errors.say(f"{title:<32}{'run':>16}{'now':>16}{'difference':>14}")
    for row in comparisons:
        mark = "  differs" if row.difference > args.tolerance else ""
        errors.say(f"{row.name:<32}{row.recorded:>16.9g}{row.recomputed:>16.9g}{row.difference:>14.1e}{mark}")
    if any(row.difference > args.tolerance for row in comparisons):
        sys.exit(1)


if __name__ == "__main__":
    errors.launch(main, tyro.cli(Args, description=help_text(__doc__)))
