"""The files and lines that a run writes: metrics.jsonl, rollouts/, report.html, the console, and a tracker."""

import contextlib
import errno
import itertools
import json
import math
import re
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from common.errors import BadInput, RunFailed, in_phase, raise_together, redacted, warn
from common.placement import World
from common.preflight import folders
from common.preflight.run_directory import flags, read_metrics
from common.rollout.rollout import Rollout
from common.run import outcomes, response_table, traces, trackers
from common.run.directory import check_shared, describe
from common.run.guards import Trends
from common.trainer.batching import MicroBatch

REPORT_SECONDS = 60.0


class Metrics:
    """The numbers of one step, or of a part of it, on this rank: sums with their counts, and maxima.

    mean(), sum(), max() and loss() wait for nothing: tensors stay tensors until Tracker.write(), which adds up
    micro-batches and ranks. The other methods may wait for the GPU, and mismatch(), a collective, for all ranks.
    """

    def __init__(self, world: World):
        self.world = world
        self.step = 0
        self.phase = "start"
        self.sums: dict[str, list[tuple]] = {}  # name -> pairs (total, count). A sum has the count None
        self.maxima: dict[str, list] = {}

    def mean(self, name: str, total, count=1) -> None:
        """Record a part of a mean: `total` over `count` items. Totals and counts of all parts and ranks are added."""
        self.sums.setdefault(name, []).append((total, count))

    def sum(self, name: str, value) -> None:
        """Record a part of a sum. The parts of all micro-batches and ranks are added."""
        self.sums.setdefault(name, []).append((value, None))

    def max(self, name: str, value) -> None:
        """Record a value. The metric is the largest one, over micro-batches and ranks."""
        self.maxima.setdefault(name, []).append(value)

    def loss(self, name: str, loss: torch.Tensor, micro: MicroBatch) -> None:
        """Record a micro-batch's share of a loss. The metric is the mean of the whole loss over the optimizer steps.

        The shares of all micro-batches and ranks add up to a mini-batch's loss. Its last micro-batch, which each rank
        has, counts the optimizer step.
        """
        optimizer_steps = int(micro.last) / self.world.size
        self.mean(name, loss.detach(), optimizer_steps)

    @contextlib.contextmanager
    def time(self, phase: str):
        """Record the seconds spent inside as time/<phase>: the sum over the step, the mean over ranks."""
        began = time.perf_counter()
        self.phase = phase
        with in_phase(f"step {self.step}: {phase}"):
            yield
            if self.world.device.type == "cuda":
                torch.cuda.synchronize()
        self.sum(f"time/{phase}", (time.perf_counter() - began) / self.world.size)

    def rollout(self, scores: torch.Tensor, group_size: int, batch: Rollout) -> None:
        """Record reward/ and group/ metrics of the graded responses, and response/ metrics of all N responses."""
        graded = batch.response_mask.any(1).to(scores.device)  # (N,)
        groups = scores[graded].view(-1, group_size)  # (B, G)
        self.mean("reward/mean", groups.sum(), groups.numel())
        if group_size > 1:
            self.mean("reward/std", groups.std(dim=1).sum(), len(groups))
            self.mean("group/zero_std_frac", (groups.amax(1) == groups.amin(1)).sum(), len(groups))
        self.mean("reward/ungraded_frac", (~graded).sum(), len(batch))
        if batch.episodes is None:
            tokens = sum(len(ids) for ids in batch.response_ids)
        else:
            # The policy did not sample what an environment answered.
            tokens = sum(sum(turns.sampled) for turns in batch.episodes)
        self.mean("response/length_mean", tokens, len(batch))
        self.mean("response/truncated_frac", batch.truncated.sum(), len(batch))
        self.sum("throughput/tokens_per_s", tokens)  # write() divides it by the seconds of the step

    def mismatch(
        self, old_logprobs: torch.Tensor, batch: Rollout, weight_version: int, had_forward: torch.Tensor | None = None
    ) -> None:
        """Record mismatch/ metrics of d = trainer's - engine's log-prob.

        had_forward: (N,) bool, the rows that have old_logprobs; None: all have them. The other rows are left out of d.
        KL(engine || trainer) = mean(e^d - 1 - d), as the engine sampled the tokens. mismatch/staleness is the mean age
        of all tokens, in pushes of weights to the engine: for tokens of older weights d also contains what was learned
        since. weight_version: the trainer's. Collective.
        """
        staleness = (weight_version - batch.weight_versions) * batch.response_mask
        self.mean("mismatch/staleness", staleness.sum(), batch.response_mask.sum())
        self.max("mismatch/staleness_max", staleness.max())

        mask, difference = self._gap(old_logprobs, batch, had_forward)
        tokens = mask.sum()
        if not self.world.sum(tokens):
            return  # no rank has trained on a token, and a gap of 0 would look like perfect agreement
        self.mean("mismatch/logprob_abs_mean", difference.abs().sum(), tokens)
        self.mean("mismatch/kl", (difference.clamp(-20, 20).exp() - 1 - difference).sum(), tokens)
        self.max("mismatch/logprob_abs_max", difference.abs().max())

        weights = torch.where(mask, difference.clamp(-20, 20).exp(), 0.0)  # importance weights without a cap
        self.mean("mismatch/weight_over_2_frac", (weights > 2).sum(), tokens)
        # Kish's effective number of tokens: (sum w)^2 / sum w^2, over all ranks.
        total = self.world.sum(weights.sum())
        squares = self.world.sum(weights.square().sum())
        effective_tokens = total**2 / max(squares, 1e-9)
        self.mean("mismatch/effective_frac", effective_tokens / self.world.size, tokens)

    def mismatch_by_age(
        self,
        old_logprobs: torch.Tensor,
        batch: Rollout,
        weight_version: int,
        had_forward: torch.Tensor | None,
        *,
        exact: bool,
    ) -> None:
        """Record the mean |d| of tokens of the current weights and of older ones. Arguments as for mismatch().

        For current weights |d| is only rounding, and guards.check_logprob_gap() bounds it. exact: False with
        --inflight-updates keep: even a new token may then rest on keys and values of older weights, so none counts as
        current. Every rank calls it with the same `exact`, so that all record the same names.
        """
        mask, difference = self._gap(old_logprobs, batch, had_forward)
        difference = difference.abs()
        current = mask & (batch.weight_versions == weight_version)
        if exact:
            self.mean("mismatch/rounding_abs_mean", difference[current].sum(), current.sum())
            self.sum("mismatch/current_tokens", current.sum())
        stale = mask & (batch.weight_versions < weight_version)
        self.mean("mismatch/stale_abs_mean", difference[stale].sum(), stale.sum())

    def _gap(self, old_logprobs: torch.Tensor, batch: Rollout, had_forward: torch.Tensor | None) -> tuple:
        """(N, T) bool: the tokens that have old_logprobs; and (N, T): d of these tokens, 0 elsewhere."""
        mask = batch.response_mask
        if had_forward is not None:
            mask = mask & had_forward[:, None]
        return mask, torch.where(mask, old_logprobs - batch.rollout_logprobs, 0.0)

    def merge(self, other: "Metrics") -> None:
        """Add metrics that a thread recorded during an earlier step. Its time/ becomes overlapped/."""
        for name, parts in other.sums.items():
            if name.startswith("time/"):
                name = "overlapped/" + name.removeprefix("time/")
            self.sums.setdefault(name, []).extend(parts)
        for name, values in other.maxima.items():
            self.maxima.setdefault(name, []).extend(values)


def new_folder(name: str) -> str:
    """Make the folder runs/NAME-DATE-TIME and return its path. If another run has just made it, -2, -3 ... is added."""
    path = f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in itertools.count(1):
        folder = Path(path if number == 1 else f"{path}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return str(folder)


class Tracker(Metrics):
    """Records the metrics of each step on every rank. Rank 0 writes them."""

    def __init__(
        self,
        args,
        name: str,
        world: World,
        start: int = 0,
        date: str = "",
    ):
        """args: the flags, for run.json. Its run_dir, track and steps are used here, too; "" as run_dir makes
        runs/NAME-DATE-TIME. start: number of steps that a resumed run has done. date: of the run, for run.json.

        Collective: every rank calls it. Raises BadInput, or RunFailed if a rank does not see the folder.
        """
        super().__init__(world)
        paths = [args.run_dir]
        if not args.run_dir and world.is_main:
            paths = [new_folder(name)]
        dist.broadcast_object_list(paths, src=0)  # the clocks of the ranks may differ
        self.run_dir = Path(paths[0])
        self.step_began = time.perf_counter()
        self.step_seconds = 0.0
        self.report_written = time.perf_counter()
        self.report_seconds = 0.0  # how long it took to write report.html
        self.sampled = None  # the sampling.Batch of this step
        self.before_failing: Callable[[], None] = lambda: None  # saves what can be saved; every rank calls it
        if world.is_main:
            (self.run_dir / "rollouts").mkdir(parents=True, exist_ok=True)
        check_shared(self.run_dir, world)
        error = None
        if world.is_main:
            try:
                self.open_files(args, name, start, date)
            except BadInput as refused:
                error = refused
                if not start:
                    self.metrics_file.unlink(missing_ok=True)  # nothing has begun: the same command can be tried again
        raise_together(error)  # the other ranks would wait for rank 0
        trends = [Trends()]
        if start and world.is_main:
            trends = [Trends.after(read_metrics(self.run_dir))]
        dist.broadcast_object_list(trends, src=0)  # rank 0 alone reads the file
        self.trends = trends[0]

    def open_files(self, args, name: str, start: int, date: str) -> None:
        """Write run.json, and open metrics.jsonl and the service of --track. On rank 0. Raises BadInput."""
        record = json.dumps(describe(args, name, self.world, date), indent=2)
        folders.write(self.run_dir / "run.json", redacted(record) + "\n")
        self.metrics_file = self.run_dir / "metrics.jsonl"
        repeated = self.forget_steps_after(start)
        # disable=None: a log file gets the line of each step, and no bar.
        self.bar = tqdm(total=args.steps, initial=start, desc=name, dynamic_ncols=True, smoothing=0.1, disable=None)
        named = flags(args)
        self.sink = trackers.Sink(args.track, self.run_dir, named, start, repeated)
        every = named.get("rollouts_every", 1)  # SFT and DPO have no rollouts
        self.table_characters = response_table.characters_of_each(2 + args.steps // every)

    def forget_steps_after(self, start: int) -> set[int]:
        """Delete the metrics, rollouts and evaluations of steps that a run repeats: those after its checkpoint, or all
        if there was no checkpoint yet. Returns the steps whose rollouts it has deleted.
        """
        rows = []
        repeated = set()
        for file in (self.run_dir / "rollouts").iterdir():
            found = re.fullmatch(r"(step|refused)_(\d{6,18})\.jsonl", file.name)  # and not a copy that somebody made
            if found and int(found[2]) > start:
                file.unlink()
                if found[1] == "step":
                    repeated.add(int(found[2]))
        for step, file in outcomes.saved(self.run_dir).items():
            if step > start:
                file.unlink()
        if start and self.metrics_file.is_file():
            rows = read_metrics(self.run_dir)  # without the last row if it is incomplete
        lines = [json.dumps(row) + "\n" for row in rows if row["step"] <= start]
        folders.write(self.metrics_file, "".join(lines))
        return repeated

    def begin(self, step: int) -> None:
        """Start a step."""
        self.step = step

    def doing(self) -> str:
        """The step that a run finishes when it is asked to stop, as a text."""
        seconds = f"; the step before took {self.step_seconds:.0f} s" if self.step_seconds else ""
        return f"step {self.step} (now: {self.phase}{seconds})"

    def write(self, step: int) -> dict[str, float]:
        """Reduce metrics over ranks, write them to file and console, return them on every rank. Collective.

        Raises RunFailed if a metric is not finite.
        """
        now = time.perf_counter()
        if step:
            self.mean("time/step", now - self.step_began)
        self.step_seconds = now - self.step_began
        self.step_began = now
        metrics = {"step": step, **self._reduced()}
        if "throughput/tokens_per_s" in metrics:
            metrics["throughput/tokens_per_s"] /= metrics["time/step"]
        self.sums = {}
        self.maxima = {}
        if self.world.is_main:
            with open(self.metrics_file, "a") as file:
                file.write(json.dumps(metrics) + "\n")
            self.sink.log(step, metrics)
            self.bar.update(step - self.bar.n)
            self.bar.write(console_line(metrics))
        for name, value in metrics.items():
            if not math.isfinite(value):
                raise RunFailed(f"step {step}: {name} is {value}{self.save_refused(step)}", code="non-finite")
        self.trends.check(metrics)
        return metrics

    def _reduced(self) -> dict[str, float]:
        """All metrics of the step, over all ranks. Ranks record the same names, so sorted names match. Collective."""
        names = sorted(self.sums)
        totals_and_counts = []
        for name in names:
            total = sum(float(total) for total, _ in self.sums[name])
            count = sum(float(count) for _, count in self.sums[name] if count is not None)
            totals_and_counts.append([total, count])
        reduced = torch.tensor(totals_and_counts, dtype=torch.float64)
        dist.all_reduce(reduced)

        largest_names = sorted(self.maxima)
        largest = [max(float(value) for value in self.maxima[name]) for name in largest_names]
        largest = torch.tensor(largest, dtype=torch.float64)
        dist.all_reduce(largest, dist.ReduceOp.MAX)

        metrics = {}
        for name, (total, count) in zip(names, reduced.tolist()):
            if count:
                metrics[name] = total / count
            elif self.sums[name][0][1] is None:
                metrics[name] = total  # a sum. A mean of nothing is left out: 0 would be a wrong one.
        for name, value in zip(largest_names, largest.tolist()):
            metrics[name] = value
        return metrics

    def save_rollouts(
        self,
        step: int,
        batch,
        advantages: torch.Tensor,
        old_logprobs: torch.Tensor | None = None,
        had_forward: torch.Tensor | None = None,
        *,
        values: torch.Tensor | None = None,
    ) -> None:
        """Write rollouts/step_NNNNNN.jsonl, and send a part of it to the tracker. Shapes are those of traces.write().

        Collective: every rank calls it.
        """
        path = self.run_dir / "rollouts" / f"step_{step:06d}.jsonl"
        traces.write(path, self.world, batch, advantages, old_logprobs, had_forward, values=values)
        if self.world.is_main and self.sink.wants_table(step):
            responses = len(batch.responses) * self.world.size  # every rank has as many
            self.sink.table(response_table.read(path, step, responses, self.table_characters))

    def save_refused(self, step: int) -> str:
        """Write the responses of a step that failed to rollouts/refused_NNNNNN.jsonl. Collective: every rank calls it.

        Returns the end of an error message, which names the file.
        """
        if self.sampled is None:
            return ""
        path = self.run_dir / "rollouts" / f"refused_{step:06d}.jsonl"
        try:
            traces.write(path, self.world, self.sampled)
        except OSError as error:  # on rank 0, when all ranks have sent it theirs: the reason of the failure comes first
            return f"; its responses could not be written: {error}"
        return f"; its responses are in {path}"

    def refresh_report(self) -> None:
        """Rewrite report.html at most once a minute, and spend at most 5 % of the run on it."""
        pause = max(REPORT_SECONDS, 20 * self.report_seconds)
        if self.world.is_main and time.perf_counter() - self.report_written > pause:
            began = time.perf_counter()
            write_report(self.run_dir)
            self.report_written = time.perf_counter()
            self.report_seconds = self.report_written - began  # Long responses make large files of rollouts.

    def close(self) -> None:
        """Write report.html, give it to the tracker, close that, and print where the report and the last model are."""
        if not self.world.is_main:
            return
        path = write_report(self.run_dir)
        if path:
            self.sink.file(path)
        self.sink.close()
        self.bar.close()
        if path:
            print(f"report: {path}", flush=True)
        if saved := folders.complete(self.run_dir):
            print(f"model: {saved[-1]}/model", flush=True)


def write_report(run_dir: Path) -> Path | None:
    """Write report.html as it is now, and return its path. A report that cannot be written is a warning: it must not
    decide how a run goes on or ends.
    """
    from common.run import report  # imports matplotlib, which takes a second

    try:
        return report.write(run_dir)
    except BadInput as error:  # somebody has changed a file
        warn(f"no report: {error}", error.code)
    except OSError as error:
        warn(f"no report: {error}", "disk-full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "bad-input")
    return None


def console_line(metrics: dict[str, float]) -> str:
    """The main metrics of a step in one line. All metrics are in metrics.jsonl."""
    line = f"step {metrics['step']:4d}"
    for label, name, form in (
        ("greedy accuracy", "eval/accuracy", ".3f"),
        ("reward", "reward/mean", ".3f"),
        ("length", "response/length_mean", ".1f"),
        ("loss", "train/loss", ".3f"),
        ("grad", "train/grad_norm", ".2f"),
        ("clip", "train/clip_frac", ".3f"),
        ("gap", "mismatch/logprob_abs_mean", ".0e"),
        ("rollout s", "time/rollout", ".1f"),
        ("update s", "time/update", ".1f"),
        ("step s", "time/step", ".1f"),
    ):
        if name in metrics:
            line += f" | {label} {metrics[name]:{form}}"
    return line
