"""Compute a saved step of a run again, from its rollout file and the checkpoint before it, and compare.

    python scripts/replay.py runs/grpo --step 2                 (the run had --save-every 1 --rollouts-every 1)
    python scripts/replay.py runs/mine --step 2 --file mine.py       (the run of a file that is not in algos/)

The algorithm's own main runs, with an engine that answers from the file. Rewards are graded again, so their code and
the services and weights files that they use must be as they were. A response that could not be graded stays ungraded.
Start it in the directory where the run was started, on any number of ranks. Another number of ranks packs other
micro-batches: in float32 the figures still agree to 1e-6, in bfloat16 they do not.

Exits with 1 if losses, gradient norms, scores, advantages, values or log-probs differ by more than --tolerance,
relative to numbers above 1.
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
from common.rewards import mixture as reward_mixture
from common.rollout import engines, rollout, turns
from common.run import traces, tracking
from common.run.directory import import_algorithm

ALGORITHMS = Path(__file__).parents[1] / "algos"


@dataclasses.dataclass
class Args:
    run_dir: tyro.conf.Positional[Path]
    step: int
    tolerance: float = 1e-6
    file: Path | None = None  # The algorithm's file, if it is not in algos/. Its code runs: name one that you trust.


class Finished(Exception):
    """The step is done. Raised to leave the algorithm's main before the next step."""


@dataclasses.dataclass
class Recorded(rollout.Rollout):
    """A rollout that knows what became of its rows."""

    rows: list[dict]


class ReplayEngine:
    """Answers each prompt with its responses in the file, in order.

    It has those of this rank's prompts alone, which sampling.Draw deals: prompts whose tokens are the same may have
    other images, or another answer.
    """

    def __init__(self, rows: list[dict], world: placement.World):
        self.device, self.wire_dtype, self.saved_names = world.device, torch.float32, False
        self.weight_version = max(version for row in rows for version in row["weight_versions"])
        self.sampled: dict[tuple, list] = {}  # prompt ids -> groups of rows
        self.greedy: dict[tuple, list] = {}  # the same for ReMax's baselines
        groups = [list(group) for _, group in itertools.groupby(rows, lambda row: row["index"])]
        for group in groups[world.rank :: world.size]:
            key = tuple(group[0]["prompt_ids"])
            self.sampled.setdefault(key, []).append(group)
            if "baseline_response_ids" in group[0]:
                names = ("response_ids", "finish_reason", "sampled")
                greedy = {name: group[0].get(f"baseline_{name}") for name in names}
                self.greedy.setdefault(key, []).append([{**group[0], **greedy, "rollout_logprobs": []}])

    def generate(
        self, prompt_ids, n: int, temperature: float, max_tokens: int, seed: int, done=None, reply=None
    ) -> Recorded:
        waiting = self.sampled if temperature > 0 else self.greedy
        groups = [waiting[tuple(ids)].pop(0) if waiting.get(tuple(ids)) else [] for ids in prompt_ids]
        missing = next((ids for ids, group in zip(prompt_ids, groups) if len(group) != n), None)
        if missing is not None:
            raise errors.BadInput(f"the file does not hold {n} responses to the prompt {missing}")
        rows = [row for group in groups for row in group]
        if reply is not None:
            episodes = [play_again(row, partial(reply, i)) for i, group in enumerate(groups) for row in group]
            versions = max(version for row in rows for version in row["weight_versions"])
            return Recorded(**vars(turns.collate_turns(episodes, versions, self.device)), rows=rows)
        batch = rollout.collate(
            [ids for ids in prompt_ids for _ in range(n)],  # with their images, which the file does not have
            [row["response_ids"] for row in rows],
            [row["rollout_logprobs"] for row in rows] if temperature > 0 else None,
            [row["finish_reason"] == "length" for row in rows],
            [max(row["weight_versions"], default=0) for row in rows],
            self.device,
        )
        return Recorded(**vars(batch), rows=rows)

    def load_weights(self, named_tensors) -> None:
        """It samples nothing."""

    def sleep(self) -> None:
        """It holds nothing."""


def play_again(row: dict, reply) -> turns.Turns:
    """The recorded turns of an episode, answered by the environment again. Raises RunFailed if an answer differs."""
    ids, logprobs = row["response_ids"], row["rollout_logprobs"]
    episode = turns.Turns(row["prompt_ids"], len(ids) + 1)
    for sampled, places in itertools.groupby(range(len(ids)), lambda t: row["sampled"][t]):
        places = list(places)
        part = slice(places[0], places[-1] + 1)
        if sampled:
            ends = part.stop == len(ids)
            given = (logprobs[part] or [0.0] * len(places), ends and row["finish_reason"] == "length")
            episode.add(ids[part], *given)
            suffix = reply(episode)
        else:
            if suffix != ids[part]:
                said = f"{row['id']}: the environment answers otherwise than in the run"
                raise errors.RunFailed(said, code="environment-failed")
            episode.observe(suffix)
    return episode


class ReplayLoader(data.PromptLoader):
    """Gives out the prompts of the file, in its order. Prompts that a filter dropped in the run are never drawn."""

    def __init__(self, rows: list[dict], prompts: list[data.Prompt], *given):
        super().__init__(prompts, *given)
        by_id = {prompt.id: prompt for prompt in prompts}
        self.waiting = []
        for _, group in itertools.groupby(rows, lambda row: row["index"]):
            row = next(group)
            prompt = by_id.get(row["id"])
            if prompt is None or prompt.ids != row["prompt_ids"]:
                raise errors.BadInput(f"{row['id']}: the data set or the tokenizer is not the one of the run")
            self.waiting.append(prompt)

    def take(self, count: int) -> list[data.Prompt]:
        taken, self.waiting = self.waiting[:count], self.waiting[count:]
        if not taken:
            raise errors.RunFailed(
                "a filter dropped prompts that the run kept: the reward grades them otherwise now", code="reward-failed"
            )
        return taken


def as_recorded(results: list, batch: Recorded) -> list:
    """Give rows that could not be graded in the run their recorded results. Raises RunFailed if another row fails."""
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


def zero_ungraded(rewards, results: list, *given) -> list:
    """In place of Rewards.drop_ungraded: as_recorded() decides what becomes of rows that could not be graded."""
    return [dataclasses.replace(r, score=0.0, acc=0.0) if r.score is None else r for r in results]


def rebuild(kind, value) -> Any:
    """Turn a value of run.json into the field's type: JSON has neither dataclasses nor tuples. Raises BadInput."""
    if dataclasses.is_dataclass(kind):
        types = typing.get_type_hints(kind)
        unknown = sorted(set(value) - set(types))
        if unknown:
            raise errors.BadInput(f"run.json: {unknown} are no flags of this version: check out the run's commit")
        return kind(**{name: rebuild(types[name], part) for name, part in value.items()})
    if isinstance(value, list) and typing.get_origin(kind) is not list:
        return tuple(rebuild(None, part) for part in value)
    return value


def load_run(run_dir: Path, step: int, file: Path | None = None) -> tuple[Any, dict, dict]:
    """The algorithm's module, its flags as a dict, and the metrics of the step. Raises BadInput.

    file: the algorithm's file. None: the one in algos/ that run.json names. A path that only run.json says is not run.
    """
    for name in ("run.json", "metrics.jsonl"):
        if not (run_dir / name).is_file():
            raise errors.BadInput(f"{run_dir}: no {name}; is this the directory of a run?")
    described = run_directory.described(run_dir / "run.json")
    argv = described.get("argv")
    script = str(argv[0]) if isinstance(argv, list) and argv else "an unknown script"
    known = ALGORITHMS / f"{Path(script).stem}.py"  # in runs of older versions, which have no "file"
    if "file" in described:
        script, known = str(described["file"]), ALGORITHMS.parent / str(described["file"])
    if file is None and not (known.is_file() and known.parent == ALGORITHMS):
        raise errors.BadInput(
            f"{run_dir / 'run.json'}: the run was made by {script}, not in algos/; --file {script} runs that file, if "
            "you trust it"
        )
    metrics = next((row for row in run_directory.read_metrics(run_dir) if row["step"] == step), None)
    if metrics is None:
        raise errors.BadInput(f"--step {step}: not in {run_dir / 'metrics.jsonl'}")
    algorithm = import_algorithm(file) if file else importlib.import_module(f"algos.{known.stem}")
    return algorithm, described["args"], metrics


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


def replay(run_dir: Path, step: int, file: Path | None = None) -> list[tuple[str, float, float, float]]:
    """(name, recorded, recomputed, difference) of each figure, on rank 0. Collective. Raises BadInput, RunFailed."""
    algorithm, flags, metrics = load_run(run_dir, step, file)
    rows = traces.read(traces.find(run_dir, step))
    with tempfile.TemporaryDirectory() as scratch:
        flags = {
            **flags,
            "run_dir": scratch,
            "saving": {"resume": checkpoint_before(run_dir, step, flags["saving"]["resume"])},
            "source": {**flags["source"], "eval_prompts": 0},
            "rollout_tp": 1,
            "layout": dataclasses.asdict(placement.Layout()),
            "compute": {**flags["compute"], "sequence_parallel": 1, "shard_size": 0},  # other ranks than the run's
            "rollouts_every": 1,
            "track": "none",
        }
        now = run_step(algorithm, rebuild(algorithm.Args, flags), rows, step)
        if int(os.environ["RANK"]):
            return []
        again = traces.read(traces.find(Path(scratch), step))
    names = [name for name in metrics if name.startswith("loss/") or name.endswith("grad_norm")]
    table = [(name, metrics[name], now.get(name, math.nan)) for name in names]
    table = [(*row, gap(*row[1:])) for row in table]
    for name in ("score", "advantage", "old_logprobs", "values"):
        before, after = flatten([row.get(name) for row in rows]), flatten([row.get(name) for row in again])
        largest = max(map(gap, before, after), default=0.0) if len(before) == len(after) else math.inf
        if before or after:
            table.append((f"{name}, mean of {len(before)}", mean(before), mean(after), largest))
    return table


def run_step(algorithm, args, rows: list[dict], step: int) -> dict[str, float]:
    """The metrics of the algorithm's main after this one step."""
    write, grade = tracking.Tracker.write, reward_mixture.Rewards.score

    def start(backend, model_path, stop_token_ids, world, *given, **sizes):
        return ReplayEngine(rows, world)

    def score(rewards, prompts, responses, batch, *given):
        return as_recorded(grade(rewards, prompts, responses, batch, *given), batch)

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
    """Absolute difference, relative for numbers above 1; infinite if only one of the two is NaN."""
    if before == now or (math.isnan(before) and math.isnan(now)):
        return 0.0
    difference = abs(before - now) / max(1.0, abs(before))
    return math.inf if math.isnan(difference) else difference


def flatten(values: list) -> list[float]:
    """Numbers, lists of numbers and None, as one list."""
    lists = [value if isinstance(value, list) else [] if value is None else [value] for value in values]
    return [number for part in lists for number in part]


def mean(values: list[float]) -> float:
    return sum(values) / max(1, len(values))


def main(args: Args) -> None:
    if args.step < 1:
        raise errors.BadInput(f"--step {args.step}: steps count from 1")
    table = replay(args.run_dir, args.step, args.file)
    errors.say(f"{f'step {args.step}':<32}{'run':>16}{'now':>16}{'difference':>14}")
    for name, before, now, difference in table:
        mark = "  differs" if difference > args.tolerance else ""
        errors.say(f"{name:<32}{before:>16.9g}{now:>16.9g}{difference:>14.1e}{mark}")
    if any(row[-1] > args.tolerance for row in table):
        sys.exit(1)


if __name__ == "__main__":
    errors.launch(main, tyro.cli(Args, description=__doc__))
