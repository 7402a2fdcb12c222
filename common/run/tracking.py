"""The files and lines that a run writes: metrics.jsonl, rollouts/, report.html, the console, and a tracker."""

import contextlib
import itertools
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from tqdm import tqdm

from common.errors import RunFailed, in_phase, redacted
from common.placement import World
from common.rollout.rollout import Rollout
from common.run import folders, traces, trackers
from common.run.directory import check_shared, describe, flags, read_metrics
from common.run.guards import Trends

REPORT_SECONDS = 60.0


class Figures:
    """Sums, counts and peaks of a part of a step, on every rank. Tensors are turned into numbers when the step ends."""

    def __init__(self, world: World):
        self.world, self.step, self.phase = world, 0, "start"
        self.sums: dict[str, list] = {}
        self.peaks: dict[str, list] = {}

    def add(self, name: str, total, count=1) -> None:
        """Add to a mean: `total` over `count` items (numbers or tensors), summed over micro-batches and ranks."""
        self.sums.setdefault(name, []).append((total, count))

    def peak(self, name: str, value) -> None:
        """Log the largest value of the step over micro-batches and ranks."""
        self.peaks.setdefault(name, []).append(value)

    @contextlib.contextmanager
    def time(self, phase: str):
        """Log the seconds spent inside as time/<phase>: the sum over the step, the mean over ranks."""
        began, self.phase = time.perf_counter(), phase
        with in_phase(f"step {self.step}: {phase}"):
            yield
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()
        self.add(f"time/{phase}", (time.perf_counter() - began) / self.world.size, 0)

    def rollout(self, scores: torch.Tensor, group_size: int, batch: Rollout) -> None:
        """Log reward/ and group/ metrics of the graded responses, and response/ metrics of all N responses."""
        graded = batch.response_mask.any(1).to(scores.device)  # (N,)
        groups = scores[graded].view(-1, group_size)  # (B, G)
        self.add("reward/mean", groups.sum(), groups.numel())
        if group_size > 1:
            self.add("reward/std", groups.std(dim=1).sum(), len(groups))
            self.add("group/zero_std_frac", (groups.amax(1) == groups.amin(1)).sum(), len(groups))
        self.add("reward/ungraded_frac", (~graded).sum(), len(batch))
        tokens = sum(map(len, batch.response_ids))
        if batch.episodes is not None:  # An environment's tokens are not the policy's.
            tokens = sum(sum(turns.sampled) for turns in batch.episodes)
        self.add("response/length_mean", tokens, len(batch))
        self.add("response/truncated_frac", batch.truncated.sum(), len(batch))
        self.add("throughput/tokens_per_s", tokens, 0)  # write() divides it by the seconds of the step

    def mismatch(
        self, old_logprobs: torch.Tensor, batch: Rollout, weight_version: int, rows: torch.Tensor | None = None
    ) -> None:
        """Log mismatch/ metrics of d = trainer's - engine's log-prob, for the tokens of `rows` (N,) bool; None: all.

        KL = mean(e^d - 1 - d). mismatch/staleness is the mean age of all tokens, in pushes of weights to the engine:
        for tokens of older weights d also contains what was learned since. weight_version: the trainer's. Collective.
        """
        mask = batch.response_mask if rows is None else batch.response_mask & rows[:, None]
        difference = torch.where(mask, old_logprobs - batch.rollout_logprobs, 0.0)
        self.add("mismatch/logprob_abs_mean", difference.abs().sum(), mask.sum())
        self.add("mismatch/kl", (difference.clamp(-20, 20).exp() - 1 - difference).sum(), mask.sum())
        behind = (weight_version - batch.weight_versions) * batch.response_mask
        self.add("mismatch/staleness", behind.sum(), batch.response_mask.sum())
        self.peak("mismatch/logprob_abs_max", difference.abs().max())
        weights = torch.where(mask, difference.clamp(-20, 20).exp(), 0.0)  # importance weights without a cap
        self.add("mismatch/weight_over_2_frac", (weights > 2).sum(), mask.sum())
        total, squares = (self.world.sum(each.sum()) for each in (weights, weights.square()))
        size = total**2 / max(squares, 1e-9)  # Kish's effective number of tokens, of all ranks
        self.add("mismatch/effective_frac", size / self.world.size, mask.sum())

    def update(self, loss, entropy, response_mask, clipped) -> None:
        """Log loss/policy and train/ metrics of a micro-batch: the loss is a share of the mini-batch's loss."""
        tokens = response_mask.sum()
        self.add("loss/policy", loss.detach() * self.world.size, 0)
        self.add("train/entropy", (entropy * response_mask).sum(), tokens)
        self.add("train/clip_frac", clipped, tokens)

    def explained_variance(self, values: torch.Tensor, returns: torch.Tensor, response_mask: torch.Tensor) -> None:
        """Log critic/explained_variance over the response tokens of all ranks. Collective: every rank calls it."""
        self.add("critic/explained_variance", explained_variance(values, returns, response_mask, self.world.sum))

    def merge(self, other: "Figures") -> None:
        """Add metrics that a thread collected during an earlier step. Its time/ is renamed to overlapped/."""
        for name, entries in other.sums.items():
            name = f"overlapped/{name.removeprefix('time/')}" if name.startswith("time/") else name
            self.sums.setdefault(name, []).extend(entries)
        for name, entries in other.peaks.items():
            self.peaks.setdefault(name, []).extend(entries)


def new_folder(path: str) -> str:
    """Make a folder and return its path, to which -2, -3 ... is added if another run has just made it."""
    for number in itertools.count(1):
        folder = Path(path if number == 1 else f"{path}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return str(folder)


class Tracker(Figures):
    """Collects the metrics of each step on every rank; rank 0 writes them."""

    def __init__(self, run_dir: str, name: str, args, world: World, track: str, start: int, steps: int):
        """run_dir: "" is runs/<name>-DATE-TIME. start: number of steps that a resumed run has done. Collective."""
        super().__init__(world)
        chosen = [run_dir or (new_folder(f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}") if world.is_main else "")]
        dist.broadcast_object_list(chosen, src=0)  # clocks of ranks may differ
        self.run_dir = Path(chosen[0])
        self.step_began, self.step_seconds = time.perf_counter(), 0.0
        self.reported, self.report_seconds = time.perf_counter(), 0.0  # when report.html was written, and in how long
        self.trends = Trends(heard=start > 0)
        self.sampled = None  # the sampling.Batch of this step
        self.before_failing: Callable[[], None] = lambda: None  # saves what can be saved; every rank calls it
        if world.is_main:
            (self.run_dir / "rollouts").mkdir(parents=True, exist_ok=True)
        check_shared(self.run_dir, world)
        if not world.is_main:
            return
        for file in (self.run_dir / "rollouts").glob("*_[0-9]*.jsonl") if start else []:
            # A resumed run repeats the steps after its checkpoint.
            if int(file.stem.rpartition("_")[2]) > start:
                file.unlink()
        folders.write(self.run_dir / "run.json", redacted(json.dumps(describe(args, name, world), indent=2)) + "\n")
        self.metrics_file = self.run_dir / "metrics.jsonl"
        # The rows of those steps go, too. The last row may be incomplete.
        kept = read_metrics(self.run_dir) if start and self.metrics_file.is_file() else []
        folders.write(self.metrics_file, "".join(json.dumps(row) + "\n" for row in kept if row["step"] <= start))
        # A log file gets the line of each step, and no bar.
        self.bar = tqdm(total=steps, initial=start, desc=name, dynamic_ncols=True, smoothing=0.1, disable=None)
        self.sink = trackers.open_sink(track, self.run_dir, flags(args))

    def begin(self, step: int) -> None:
        """Start a step."""
        self.step = step

    def doing(self) -> str:
        """The step that a run finishes when it is asked to stop, as a text."""
        seconds = f"; the last one took {self.step_seconds:.0f} s" if self.step_seconds else ""
        return f"step {self.step}, which is at its {self.phase}{seconds}"

    def first(self, accuracy: float) -> None:
        """Log the accuracy before the first step, as step 0. Collective: every rank calls it."""
        self.add("eval/accuracy", accuracy)
        self.write(0)

    def write(self, step: int) -> dict[str, float]:
        """Reduce metrics over ranks, write them to file and console, return them on every rank. Collective.

        Raises RunFailed if a metric is not finite.
        """
        now = time.perf_counter()
        if step:
            self.add("time/step", now - self.step_began)
        self.step_began, self.step_seconds = now, now - self.step_began
        names, peaks = sorted(self.sums), sorted(self.peaks)
        sums = [[sum(float(entry[i]) for entry in self.sums[name]) for i in (0, 1)] for name in names]
        sums = torch.tensor(sums, dtype=torch.float64)
        largest = torch.tensor([max(map(float, self.peaks[name])) for name in peaks], dtype=torch.float64)
        dist.all_reduce(sums)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        for name, (total, count) in zip(names, sums.tolist()):
            self.sums[name] = total / count if count else total
        metrics = {"step": step, **self.sums, **dict(zip(peaks, largest.tolist()))}
        if "throughput/tokens_per_s" in metrics:
            metrics["throughput/tokens_per_s"] /= metrics["time/step"]
        self.sums, self.peaks = {}, {}
        if self.world.is_main:
            with open(self.metrics_file, "a") as file:
                file.write(json.dumps(metrics) + "\n")
            self.sink(step, metrics)
            self.bar.update(step - self.bar.n)
            self.bar.write(console_line(metrics))
        for name, value in metrics.items():
            if not math.isfinite(value):
                raise RunFailed(f"step {step}: {name} is {value}{self.blame(step)}", code="non-finite")
        self.trends.check(metrics)
        return metrics

    def save_rollouts(self, step: int, *given, **optional) -> None:
        """Write rollouts/step_NNNNNN.jsonl with the arguments of traces.write. Collective: every rank calls it."""
        traces.write(self.run_dir / "rollouts" / f"step_{step:06d}.jsonl", self.world, *given, **optional)

    def grad_norm(self, step: int, norm, name: str = "train/grad_norm", loss: str = "loss/policy") -> None:
        """Log the gradient norm, and stop before an update that would write NaN into the weights. Raises RunFailed."""
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if not torch.isfinite(norm):
            said = f"step {step}: {name} is {float(norm)}; this update was not applied"
            failed = RunFailed(said + self.blame(step), code="non-finite")
            self.before_failing()
            raise failed
        self.add(name, norm)
        self.add(loss, 0.0)  # counts one optimizer step, over which the loss is averaged

    def blame(self, step: int) -> str:
        """Write the step's responses to rollouts/refused_NNNNNN.jsonl; the path ends the error message. Collective."""
        if self.sampled is None:
            return ""
        path = self.run_dir / "rollouts" / f"refused_{step:06d}.jsonl"
        traces.write(path, self.world, self.sampled)
        return f"; its responses are in {path}"

    def refresh_report(self) -> None:
        """Write report.html, at most once in REPORT_SECONDS, and in a twentieth of the time at most."""
        pause = max(REPORT_SECONDS, 20 * self.report_seconds)
        if self.world.is_main and time.perf_counter() - self.reported > pause:
            self.write_report()

    def write_report(self) -> Path:
        """Write report.html as it is now, and return its path."""
        from common.run import report  # imports matplotlib, which takes a second

        began = time.perf_counter()
        path, self.reported = report.write(self.run_dir), time.perf_counter()
        self.report_seconds = self.reported - began  # Long responses make large files of rollouts.
        return path

    def close(self) -> None:
        """Close the trackers, write report.html and print its path."""
        if self.world.is_main:
            self.sink(None, None)
            self.bar.close()
            print(f"report: {self.write_report()}", flush=True)


def explained_variance(values: torch.Tensor, returns: torch.Tensor, response_mask: torch.Tensor, total=float) -> float:
    """1 - Var(returns - values) / Var(returns) over the response tokens; 0 for constant returns.

    total: sums a number over the ranks (World.sum). The default, float, is for rows that no other rank shares.
    """
    count = max(1, total(response_mask.sum()))

    def variance(x: torch.Tensor) -> float:
        x = x[response_mask].double()
        return total(x.square().sum()) / count - (total(x.sum()) / count) ** 2

    spread = variance(returns)
    return 1 - variance(returns - values) / spread if spread > 1e-12 else 0.0


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
