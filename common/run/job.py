"""The training loop and its bookkeeping. The training itself is in the algorithm file, such as algos/grpo.py.

    settings = prepare(args, models)                 common/preflight/prepare.py: refuses bad input, loads no model
    run = start(settings, world, engine, trained)    resumes, gives the engine the weights if it lacks them, opens the
                                                     run directory, evaluates a fresh run
    for step, batch in run.steps(sample):            samples and grades; then the algorithm file trains, and pushes the
                                                     new weights to the engine
        run.end_step(step, batch, ...)               writes metrics and rollouts/, evaluates, checks, saves
    run.close()

If a step fails on all ranks together, the run saves what it has and writes its report before it ends.
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
    """True for --dry-run, or if the resumed checkpoint has reached --steps already.

    In the second case the run is done: this says so, and writes a missing report.
    """
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
        f"{run_dir} is done: step {saved_step(settings.resume)} of {args.steps}, its model is in "
        f"{settings.resume}/model; to continue, raise --steps"
    )
    return True


class Run:
    """The loop around training: sampling, metrics, evaluation, checks, checkpoints. Every rank calls every method."""

    def __init__(self, settings: Settings, world: World, engine, trained: checkpoint.Trained):
        """Load the checkpoint to resume, give the engine its weights if it lacks them, evaluate a fresh run.

        Raises RunFailed.
        """
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
        # In a fresh run, a colocated engine has loaded these weights from disk. Any other engine gets them here.
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
        self.saver.signals.doing = self.tracker.doing  # what the run tells someone who asks it to stop
        self.rollouts: sampling.Prefetcher | None = None
        self.weight_version = 0  # the engine's when this step's update starts; set in steps()
        if settings.held_out and not settings.resume:
            self.tracker.first(self.accuracy())

    def accuracy(self) -> float:
        """Greedy accuracy on the held-out prompts."""
        return self.evaluator.greedy_accuracy(self.settings.held_out, metrics=self.tracker)

    def steps(self, sample: Sample) -> Iterator[tuple[int, Batch]]:
        """Yield (step, batch) for the remaining steps, up to --steps or until a signal asks the run to stop."""
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
            # If this step fails, the run saves as of the previous step, so a resumed run repeats these prompts. The
            # with-block covers sampling. The caller's update is covered by before_failing, which guards call.
            position = self.loader.resume_at
            tracker.before_failing = partial(self.rescue, step - 1, position)
            with self.rescued(step - 1, position):
                # In a step that ends with a checkpoint nothing is sampled ahead: see Prefetcher.get.
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
        """Write metrics, check them and refresh the report. Write rollouts, evaluate and save when they are due.

        advantages: (N,) or (N, T), for N responses of up to T tokens. old_logprobs: (N, T). rows: (N,) bool, the rows
        that had a forward and so have old_logprobs; None: all. values: (N, T), of a critic. Raises RunFailed if the
        metrics show that something is broken.
        """
        tracker = self.tracker
        # The training of this step is complete. A run that fails from here on resumes with the next prompts.
        with self.rescued(step, self.loader.resume_at):
            tracker.mismatch(old_logprobs, batch, self.weight_version, rows)
            tracker.max("advantage/abs_max", advantages.abs().max())
            if self.writes_rollouts(step):
                tracker.save_rollouts(step, batch, advantages, old_logprobs, rows, values=values)
            if self.evaluates(step):
                with tracker.time("eval"):
                    self.rollouts.wait()  # the engine may still be sampling the next step
                    tracker.mean("eval/accuracy", self.accuracy())
            metrics = tracker.write(step)
            explain = partial(diagnosis.explain_gap, self.probe, batch.prompts, self.rollouts.wait)
            guards.check(metrics, self.settings.max_logprob_gap, explain)
            tracker.refresh_report()
        # This step's metrics are written already, so these seconds are reported with the next step.
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
        """If the block raises an errors.OneLine, such as RunFailed, rescue and raise it again.

        All ranks raise it together, so rescue() can be a collective.
        """
        try:
            yield
        except errors.OneLine:
            self.rescue(step, position)
            raise

    def rescue(self, step: int, position: int) -> None:
        """Save a checkpoint labelled `step` that resumes with the prompts at `position`, and write the report.

        It includes any updates that the failing step has already made. Collective: every rank calls it.
        """
        self.saver.rescue(step, position)
        self.tracker.close()
        dist.barrier()  # wait for rank 0's report: if another rank exited first, rank 0 would be killed

    def close(self) -> None:
        """Close the tracker, which writes the report, and shut down all ranks together."""
        self.rollouts.wait()  # A run that was stopped early may have a batch in flight.
        self.tracker.close()
        placement.finish(self.world, self.engine)


def start(settings: Settings, world: World, engine, trained: checkpoint.Trained) -> Run:
    """Start or resume the run. trained: name -> (model, optimizer), for "policy" and every other trained model."""
    return Run(settings, world, engine, trained)
