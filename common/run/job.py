"""The frame around training: the loop, and the books it keeps.

    settings = prepare(args, models)                 common/preflight/prepare.py: refuses bad input, loads no model
    run = start(settings, world, engine, trained)    resumes, pushes weights to the engine, opens the run directory
    for step, batch in run.steps(sample):            samples and grades; the algorithm file trains
        run.end_step(step, batch, ...)               writes metrics and rollouts/, evaluates, checks, saves
    run.close()

Nothing here computes a loss, an advantage or a gradient, and nothing calls an optimizer.
"""

import contextlib
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from common import errors, placement, weight_sync
from common.data import prompts as data
from common.placement import World
from common.preflight.offline import OfflineSettings
from common.preflight.prepare import Settings
from common.preflight.run_directory import saved_step
from common.run import checkpoint, diagnosis, evaluation, guards, sampling
from common.run.sampling import Batch, Sample
from common.run.tracking import Tracker


def nothing_to_do(settings: Settings | OfflineSettings) -> bool:
    """True with --dry-run, and if the checkpoint of --resume auto is that of the last step: then the run is done."""
    args = settings.args
    if args.saving.dry_run:
        return True
    if settings.resume is None or saved_step(settings.resume) < args.steps:
        return False
    run_dir = Path(args.run_dir)
    if not (run_dir / "report.html").is_file() and os.environ.get("RANK", "0") == "0":
        from common.run import report  # imports matplotlib, which takes a second

        report.write(run_dir)
    errors.say(
        f"{run_dir} is done: step {saved_step(settings.resume)} of {args.steps}, its model is {settings.resume}/model; "
        "a larger --steps goes on"
    )
    return True


class Run:
    """The loop around training: sampling, metrics, evaluation, checks, checkpoints. Every rank calls every method."""

    def __init__(self, settings: Settings, world: World, engine, trained: checkpoint.Trained):
        """Load the checkpoint to resume, give the engine the policy's weights, evaluate them. Raises RunFailed."""
        args = settings.args
        policy, _ = trained["policy"]
        self.settings = settings
        self.args = args
        self.world = world
        self.engine = engine
        self.loader = data.PromptLoader(settings.prompts, args.seed)
        self.saver = checkpoint.Saver(
            args.saving,
            trained,
            self.loader,
            settings.reward,
            engine,
            settings.tokenizer,
            settings.dtype,
            world,
        )
        steps_done = self.saver.load(settings.resume)
        # A fresh colocated engine has read the same weights from disk. All others need them from the trainer.
        if settings.resume or args.layout.split:
            weight_sync.push(policy, engine)
        self.probe = diagnosis.GapProbe(
            policy,
            engine,
            settings.prompts,
            args.temperature,
            args.max_response_tokens,
            settings.compute,
            world,
        )
        self.evaluator = evaluation.Evaluator(
            engine,
            settings.reward,
            settings.tokenizer,
            world,
            args.max_response_tokens,
        )
        self.tracker = Tracker(
            args.run_dir,
            settings.name,
            settings.recorded,
            world,
            args.track,
            steps_done,
            args.steps,
        )
        self.saver.signals.doing = self.tracker.doing
        self.rollouts: sampling.Prefetcher | None = None
        self.weight_version = 0  # number of pushes to the engine before this step's update
        if settings.held_out and not settings.resume:
            self.tracker.first(self.accuracy())

    def accuracy(self) -> float:
        """Greedy accuracy on the held-out prompts."""
        return self.evaluator.greedy_accuracy(self.settings.held_out, metrics=self.tracker)

    def steps(self, sample: Sample) -> Iterator[tuple[int, Batch]]:
        """Yields (step, batch) for the remaining steps, up to --steps or until a signal asks the run to stop."""
        tracker = self.tracker
        self.rollouts = sampling.Prefetcher(
            sample,
            self.loader,
            self.settings.reward,
            self.settings.tokenizer,
            self.world,
            tracker,
            self.settings.layout,
        )
        for step in self.saver.steps(tracker.run_dir, self.args.steps):
            tracker.begin(step)
            # If this step fails, the state after the last one is saved, and these prompts come again.
            position = self.loader.resume_at
            tracker.before_failing = partial(self.rescue, step - 1, position)
            with self.rescued(step - 1, position):
                batch = self.rollouts.get(step, last=self.saver.due(step))
            self.weight_version = self.engine.weight_version
            yield step, batch

    def end_step(
        self,
        step: int,
        batch: Batch,
        *,
        advantages: torch.Tensor,
        old_logprobs: torch.Tensor,
        rows: torch.Tensor | None = None,
        values: torch.Tensor | None = None,
    ) -> None:
        """Write metrics. Write rollouts, evaluate and save a checkpoint in steps in which they are due.

        advantages: (N,) or (N, T). old_logprobs: (N, T), valid in `rows` (N,) bool; None: in all rows. values: (N, T),
        the critic's values. Raises RunFailed if the metrics show that the run cannot be right.
        """
        tracker = self.tracker
        with self.rescued(step, self.loader.resume_at):
            tracker.mismatch(old_logprobs, batch, self.weight_version, rows)
            tracker.max("advantage/abs_max", advantages.abs().max())
            if self.writes_rollouts(step):
                tracker.save_rollouts(step, batch, advantages, old_logprobs, rows, values=values)
            if self.evaluates(step):
                with tracker.time("eval"):
                    self.rollouts.wait()  # the engine may be sampling the next step
                    tracker.mean("eval/accuracy", self.accuracy())
            metrics = tracker.write(step)
            explain = partial(diagnosis.explain_gap, self.probe, batch.prompts, self.rollouts.wait)
            guards.check(metrics, self.settings.max_logprob_gap, explain)
            tracker.refresh_report()
        # This step's metrics are written already, so the seconds count in the next step.
        with tracker.time("save"):
            self.saver.step_done(step, metrics)

    def writes_rollouts(self, step: int) -> bool:
        """Whether this step leaves a file in rollouts/."""
        return step % self.args.rollouts_every == 0 or step in (1, self.args.steps)

    def evaluates(self, step: int) -> bool:
        """Whether this step ends with an evaluation."""
        if not self.settings.held_out:
            return False
        every = self.args.eval_every
        return step == self.args.steps or (every > 0 and step % every == 0)

    @contextlib.contextmanager
    def rescued(self, step: int, position: int) -> Iterator[None]:
        """Call rescue() if the run fails inside. An errors.OneLine is raised by all ranks together."""
        try:
            yield
        except errors.OneLine:
            self.rescue(step, position)
            raise

    def rescue(self, step: int, position: int) -> None:
        """Save the state after `step`, from which the prompts at `position` come next, and write the report.

        Updates that the failing step has made before are in it. Collective: every rank calls it.
        """
        self.saver.rescue(step, position)
        self.tracker.close()
        dist.barrier()  # rank 0 writes the report, and a rank that ended now would end rank 0 as well

    def close(self) -> None:
        """Write the report and end the run on all ranks together."""
        self.rollouts.wait()  # A run that was stopped early may have a batch in flight.
        self.tracker.close()
        placement.finish(self.world, self.engine)


def start(settings: Settings, world: World, engine, trained: checkpoint.Trained) -> Run:
    """Start or resume the run. trained: name -> (model, optimizer), for "policy" and every other trained model."""
    return Run(settings, world, engine, trained)
