"""What a run writes: metrics.jsonl, rollouts/, report.html, one console line a step, wandb or TensorBoard by flag."""

import contextlib
import dataclasses
import json
import math
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from tqdm import tqdm

from common import folders, traces
from common.errors import RunFailed, redacted
from common.placement import World
from common.rollout import Rollout
from common.run import describe, read_metrics
from common.trends import Trends


class Figures:
    """Sums, counts and peaks of some part of a step, on every rank. Tensors stay tensors until the step ends."""

    def __init__(self, world: World):
        self.world, self.step = world, 0
        self.sums: dict[str, list] = {}
        self.peaks: dict[str, list] = {}

    def add(self, name: str, total, count=1) -> None:
        """Add to a mean: `total` over `count` items (numbers or tensors), summed over micro-batches and ranks."""
        self.sums.setdefault(name, []).append((total, count))

    def peak(self, name: str, value) -> None:
        """Largest value of the step over micro-batches and ranks."""
        self.peaks.setdefault(name, []).append(value)

    @contextlib.contextmanager
    def time(self, phase: str):
        """Seconds spent inside, as time/<phase>: summed over the step, mean over ranks."""
        began = time.perf_counter()
        self.world.enter(f"step {self.step}: {phase}")
        yield
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()
        self.add(f"time/{phase}", (time.perf_counter() - began) / self.world.size, 0)

    def rollout(self, scores: torch.Tensor, group_size: int, batch: Rollout) -> None:
        """reward/, group/ and response/ figures of N responses; of those that were graded, the first two."""
        graded = batch.response_mask.any(1).to(scores.device)  # (N,)
        groups = scores[graded].view(-1, group_size)  # (B, G)
        self.add("reward/mean", groups.sum(), groups.numel())
        if group_size > 1:
            self.add("reward/std", groups.std(dim=1).sum(), len(groups))
            self.add("group/zero_std_frac", (groups.amax(1) == groups.amin(1)).sum(), len(groups))
        self.add("reward/ungraded_frac", (~graded).sum(), len(batch))
        tokens = sum(map(len, batch.response_ids))
        self.add("response/length_mean", tokens, len(batch))
        self.add("response/truncated_frac", batch.truncated.sum(), len(batch))
        self.add("throughput/tokens_per_s", tokens, 0)  # per second: see write()

    def mismatch(
        self, old_logprobs: torch.Tensor, batch: Rollout, weight_version: int, rows: torch.Tensor | None = None
    ) -> None:
        """mismatch/ figures: d = trainer - engine log-prob of the tokens of `rows`, (N,) bool; KL = mean(e^d - 1 - d).

        weight_version: the trainer's. Of older tokens the gap is also what was learned since: mismatch/staleness, in
        updates of the engine, is the mean over all rows.
        """
        mask = batch.response_mask if rows is None else batch.response_mask & rows[:, None]
        difference = torch.where(mask, old_logprobs - batch.rollout_logprobs, 0.0)
        self.add("mismatch/logprob_abs_mean", difference.abs().sum(), mask.sum())
        self.add("mismatch/kl", (difference.clamp(-20, 20).exp() - 1 - difference).sum(), mask.sum())
        behind = (weight_version - batch.weight_versions) * batch.response_mask
        self.add("mismatch/staleness", behind.sum(), batch.response_mask.sum())
        self.peak("mismatch/logprob_abs_max", difference.abs().max())
        weights = torch.where(mask, difference.clamp(-20, 20).exp(), 0.0)  # of importance sampling, not truncated
        self.add("mismatch/weight_over_2_frac", (weights > 2).sum(), mask.sum())
        size = weights.sum() ** 2 / weights.square().sum().clamp(min=1e-9)  # Kish's effective number of tokens
        self.add("mismatch/effective_frac", size, mask.sum())

    def update(self, loss, entropy, response_mask, clipped) -> None:
        """loss/policy and train/ figures of a micro-batch: its share of the loss, and sums over its tokens."""
        tokens = response_mask.sum()
        self.add("loss/policy", loss.detach() * self.world.size, 0)
        self.add("train/entropy", (entropy * response_mask).sum(), tokens)
        self.add("train/clip_frac", clipped, tokens)

    def merge(self, other: "Figures") -> None:
        """Take over what another has collected beside an earlier step: its time/ as overlapped/, as no step's own."""
        for name, entries in other.sums.items():
            name = f"overlapped/{name.removeprefix('time/')}" if name.startswith("time/") else name
            self.sums.setdefault(name, []).extend(entries)
        for name, entries in other.peaks.items():
            self.peaks.setdefault(name, []).extend(entries)


class Tracker(Figures):
    """Collects a step's figures on every rank; rank 0 writes them."""

    def __init__(self, run_dir: str, name: str, args, world: World, track: str, start: int, steps: int):
        """run_dir: "" is runs/<name>-DATE-TIME; start: steps already done, by a run that is resumed. Collective."""
        super().__init__(world)
        chosen = [run_dir or f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}"]
        dist.broadcast_object_list(chosen, src=0)  # the clocks of two ranks may differ
        self.run_dir = Path(chosen[0])
        self.step_began = time.perf_counter()
        self.profiler = None
        self.trends = Trends(heard=start > 0)
        self.sampled: tuple | None = None  # the prompts and ..., batch, responses, results of this step
        if not world.is_main:
            return
        (self.run_dir / "rollouts").mkdir(parents=True, exist_ok=True)
        folders.write(self.run_dir / "run.json", redacted(json.dumps(describe(args, name, world), indent=2)) + "\n")
        self.metrics_file = self.run_dir / "metrics.jsonl"
        # A resumed run rewrites what came after its checkpoint. The last line may be torn: it has no end.
        kept = read_metrics(self.run_dir) if start and self.metrics_file.is_file() else []
        folders.write(self.metrics_file, "".join(json.dumps(row) + "\n" for row in kept if row["step"] <= start))
        self.bar = tqdm(total=steps, initial=start, desc=name, dynamic_ncols=True, smoothing=0.1)
        self.sink = open_sink(track, self.run_dir, args)

    def begin(self, step: int, profiled: tuple[int, ...]) -> None:
        """Start a step. Of a profiled one write() leaves profile/step_NNNNNN.rankR.json.gz, for ui.perfetto.dev."""
        self.step = step
        if step in profiled:
            self.profiler = torch.profiler.profile()
            self.profiler.start()

    def first(self, accuracy: float) -> None:
        """Log the accuracy before the first step, as step 0. Collective."""
        self.add("eval/accuracy", accuracy)
        self.write(0)

    def write(self, step: int) -> dict[str, float]:
        """Reduce over ranks, write this step's line to file and console, return it on every rank. Collective."""
        if self.profiler:
            self.profiler.stop()
            folder = self.run_dir / "profile"
            folder.mkdir(parents=True, exist_ok=True)
            self.profiler.export_chrome_trace(str(folder / f"step_{step:06d}.rank{self.world.rank}.json.gz"))
            self.profiler = None
        now = time.perf_counter()
        if step:
            self.add("time/step", now - self.step_began)
        self.step_began = now
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
        """rollouts/step_NNNNNN.jsonl, from what traces.write takes. Collective: every rank calls it."""
        traces.write(self.run_dir / "rollouts" / f"step_{step:06d}.jsonl", self.world, *given, **optional)

    def grad_norm(self, step: int, norm, name: str = "train/grad_norm", loss: str = "loss/policy") -> None:
        """Log the gradient norm, and stop before an update that would write NaN into the weights. Raises RunFailed."""
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if not torch.isfinite(norm):
            said = f"step {step}: {name} is {float(norm)}; this update was not applied"
            raise RunFailed(said + self.blame(step), code="non-finite")
        self.add(name, norm)
        self.add(loss, 0.0)  # its mean is over optimizer steps

    def blame(self, step: int) -> str:
        """Write the step's responses to rollouts/refused_NNNNNN.jsonl, for people. Collective. Returns where."""
        if self.sampled is None:
            return ""
        path = self.run_dir / "rollouts" / f"refused_{step:06d}.jsonl"
        prompts, *_, batch, responses, results = self.sampled
        traces.write(path, self.world, prompts, responses, results, batch, None, None)
        return f"; its responses are in {path}"

    def close(self) -> None:
        """Write the report and say where it is."""
        if not self.world.is_main:
            return
        from common import report  # matplotlib, a second to import, at the end of a run alone

        self.sink(None, None)
        self.bar.close()
        print(f"report: {report.write(self.run_dir)}", flush=True)


def console_line(metrics: dict[str, float]) -> str:
    """The step in one readable line; the rest is in metrics.jsonl."""
    line = f"step {metrics['step']:4d}"
    for label, name, form in (
        ("greedy accuracy", "eval/accuracy", ".3f"),
        ("reward", "reward/mean", ".3f"),
        ("length", "response/length_mean", ".1f"),
        ("grad", "train/grad_norm", ".2f"),
        ("clip", "train/clip_frac", ".3f"),
        ("gap", "mismatch/logprob_abs_max", ".0e"),
        ("rollout s", "time/rollout", ".1f"),
        ("update s", "time/update", ".1f"),
        ("step s", "time/step", ".1f"),
    ):
        if name in metrics:
            line += f" | {label} {metrics[name]:{form}}"
    return line


def open_sink(track: str, run_dir: Path, args):
    """A function (step, metrics) for the tracker of --track; (None, None) closes it. Offline unless configured."""
    if track == "wandb":
        import wandb

        mode = os.environ.get("WANDB_MODE", "online" if os.environ.get("WANDB_API_KEY") else "offline")
        run = wandb.init(
            project="onefile-rl", name=run_dir.name, dir=run_dir, config=dataclasses.asdict(args), mode=mode
        )
        return lambda step, metrics: run.finish() if step is None else run.log(metrics, step=step)
    if track == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(run_dir / "tensorboard")

        def sink(step, metrics):
            if step is None:
                writer.close()
            for name, value in (metrics or {}).items():
                writer.add_scalar(name, value, step)

        return sink
    return lambda step, metrics: None
