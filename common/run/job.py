"""The training loop and its bookkeeping. The training itself is in the algorithm file, such as algos/grpo.py.

    settings = prepare(args, models)                 common/preflight/prepare.py: refuses bad input, loads no model
    if nothing_to_do(settings): return               a dry run, or a run whose last step is done
    world, policy, optimizer, engine = ...           the algorithm file makes them
    run = start(settings, world, engine, trained)    resumes, gives the engine the weights if it lacks them, opens the
                                                     run directory, evaluates a fresh run
    for step, batch in run.steps(sample):            samples and grades; then the algorithm file trains, and pushes the
                                                     new weights to the engine
        run.end_step(step, batch, ...)               writes rollouts/, evaluates, writes and checks metrics, saves
    run.close()

`trained` names the models that a checkpoint has, with their optimizers: {"policy": (policy, optimizer)}. An error of
common/errors.py that is raised in sampling, by guards.stop_unless_finite(), by a push to servers or in end_step() is
raised on all ranks together. The run then saves what it has and writes its report before it ends. Any other exception,
such as running out of memory on one rank, ends it without a checkpoint.
Nothing here computes a loss, an advantage or a gradient, and nothing calls an optimizer.
"""

import contextlib
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from common import errors, placement, weight_sync
from common.data import prompts as data
from common.placement import World
from common.preflight.offline import OfflineSettings
from common.preflight.prepare import Settings
from common.preflight.run_directory import read_metrics, saved_step
from common.run import checkpoint, diagnosis, evaluation, guards, offline, outcomes, sampling
from common.run.sampling import Batch, Sample
from common.run.tracking import write_report


def nothing_to_do(settings: Settings | OfflineSettings) -> bool:
    """True for --dry-run, or if the resumed checkpoint has reached --steps already.

    In the second case the run is done: this says so, and writes the report. If its last evaluation failed, this says
    how to make up for it. No process group exists yet.
    """
    args = settings.args
    if args.saving.dry_run:
        return True
    if settings.resume is None or saved_step(settings.resume) < args.steps:
        return False
    run_dir = Path(args.run_dir)
    if os.environ.get("RANK", "0") == "0":
        write_report(run_dir)  # a run that was killed after its last step has none, or that of an earlier step
    errors.say(
        f"{run_dir} is done: step {saved_step(settings.resume)} of {args.steps}, its model is in "
        f"{settings.resume}/model; to continue, give more --steps, --resume {settings.resume} and a new --run-dir"
    )
    with contextlib.suppress(errors.BadInput):  # the report has said that metrics.jsonl can't be read
        rows = read_metrics(run_dir)
        if getattr(settings, "held_out", None) and rows and "eval/accuracy" not in rows[-1]:
            errors.say(f"it was not evaluated at its end: {evaluation_command(args, f'{settings.resume}/model')}")
    return True


def evaluation_command(args, trained: str) -> str:
    """The command that measures a trained model on the run's own held-out data, with its graders and its limit."""
    words = []
    if args.compute.lora_rank:  # scripts/evaluate.py takes whole models
        words += ["python scripts/merge_lora.py", trained, "MERGED", "&&"]
        trained = "MERGED"
    words += ["python scripts/evaluate.py --model", trained]
    words += ["--dataset", *data.held_out_specs(args.dataset, args.source)]
    words += ["--reward", *args.reward] if args.reward else []
    words += ["--environment", args.environment] if args.environment else []
    words += ["--max-response-tokens", str(args.max_response_tokens)]
    return " ".join(words)


class Run(offline.Run):
    """The loop around training: sampling, metrics, evaluation, checks, checkpoints. Every rank calls every method."""

    def __init__(self, settings: Settings, world: World, engine, trained: checkpoint.Trained, also: list | None = None):
        """Load the checkpoint to resume, give the engine its weights if it lacks them, evaluate a fresh run.

        Raises RunFailed if the checkpoint can't be read or the evaluation can't grade.
        """
        args = settings.args
        loader = data.PromptLoader(settings.prompts, args.seed, also)
        super().__init__(settings, trained, loader, settings.tokenizer, world, settings.reward, engine)
        self.settings = settings
        # Finds out why trainer and engine disagree on log-probs (mismatch/), if they do.
        self.probe = diagnosis.GapProbe(
            self.saver.policy,
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
        self.prefetcher: sampling.Prefetcher | None = None  # made in steps(); samples the batches
        self.weight_version = 0  # pushes before this step's update; set in steps()
        if settings.held_out and not settings.resume:
            # Of a real model on a CPU this takes minutes.
            errors.say(f"evaluation of {len(settings.held_out)} held-out prompts before the first step")
            self.tracker.mean("eval/accuracy", self.accuracy(0))
            self.tracker.write(0)  # before the first step

    def load(self, resume: Path | None) -> int:
        """Load the checkpoint to resume, and give the engine its weights. Returns its step."""
        done = super().load(resume)
        # In a fresh run, an engine in this process has loaded the same weights from disk. After a resume it needs the
        # checkpoint's. Servers get them in any case, as those of the user may have the weights of another run.
        if resume or self.args.layout.split:
            weight_sync.push(self.saver.policy, self.engine)
        return done

    def accuracy(self, step: int) -> float:
        """Greedy accuracy on the held-out prompts after a step. Writes their responses to evaluations/."""
        file = outcomes.path_of(self.tracker.run_dir, step)
        return self.evaluator.greedy_accuracy(self.settings.held_out, metrics=self.tracker, file=file)

    def steps(self, sample: Sample) -> Iterator[tuple[int, Batch]]:
        """Yield (step, batch) for the remaining steps, up to --steps or until a signal asks the run to stop."""
        tracker = self.tracker
        self.prefetcher = sampling.Prefetcher(
            sample,
            self.loader,
            self.settings.reward,
            self.settings.tokenizer,
            self.world,
            tracker,
            self.settings.layout,
            self.engine,
            first_step=self.saver.step + 1,
        )
        if self.settings.layout.split:
            self.engine.before_failing = self.rescue_pushed
        for step in self.saver.steps(tracker.run_dir, self.args.steps):
            tracker.begin(step)
            placement.return_holes()  # those that the update has left
            # If this step fails, a checkpoint labelled with the previous step lets a resumed run repeat these prompts.
            # The with-block covers sampling. The update is the caller's. It calls guards.stop_unless_finite, and that
            # calls before_failing.
            position = self.loader.resume_at
            tracker.before_failing = partial(self.rescue, step - 1, position)
            with self.rescued(step - 1, position):
                batch = self.prefetcher.get(step, last_step=self.args.steps)
            placement.return_holes()  # or the holes that sampling leaves would come on top of what training needs
            self.weight_version = self.engine.weight_version
            if self.saver.sampled_again:
                # These prompts were in flight when the checkpoint was saved. Their responses are lost.
                tracker.sum("sampling/prompts_again", self.saver.sampled_again / self.world.size)
                self.saver.sampled_again = 0
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

        advantages: (N,) or (N, T), for N responses of up to T tokens. old_logprobs: (N, T). rows: (N,) bool, not
        indices: True for responses that had a forward, as only they have old_logprobs; None: all had one. values:
        (N, T), of a critic.
        Raises RunFailed if a metric isn't finite, or if trainer and engine disagree (--max-logprob-gap).
        """
        tracker = self.tracker
        # The training of this step is complete. A run that fails from here on resumes with the next prompts.
        with self.rescued(step, self.loader.resume_at):
            tracker.mismatch(old_logprobs, batch, self.weight_version, rows)
            if self.prefetcher.ahead:
                exact = self.args.layout.inflight_updates != "keep"
                tracker.mismatch_by_age(old_logprobs, batch, self.weight_version, rows, exact=exact)
            tracker.max("advantage/abs_max", advantages.abs().max())
            if self.writes_rollouts(step):
                tracker.save_rollouts(step, batch, advantages, old_logprobs, rows, values=values)
            if self.evaluates(step):
                try:
                    placement.return_holes()  # those that training leaves would come on top of what sampling needs
                    with tracker.time("eval"):
                        self.prefetcher.settle()  # the engine may still be sampling later steps
                        tracker.mean("eval/accuracy", self.accuracy(step))
                except errors.OneLine:
                    # The step is done: a resumed run begins with the next one. The first failure is the one to report.
                    with contextlib.suppress(errors.RunFailed):
                        tracker.write(step)
                    raise
            metrics = tracker.write(step)
            # Called only if the gap is too large: it samples and pushes again, after which the run could not go on.
            explain = partial(diagnosis.explain_gap, self.probe, batch.prompts, self.prefetcher.settle)
            guards.check_logprob_gap(metrics, self.settings.max_logprob_gap, explain)
            tracker.refresh_report()
            # This step's metrics are written already, so these seconds are reported with the next step.
            with tracker.time("save"):
                self.saver.step_done(step, metrics)

    def rescue_pushed(self) -> None:
        """Called when servers are lost in the push after an update.

        The step's training is complete, so its metrics are written here, and a resumed run begins with the next step.
        """
        step = self.tracker.step
        with contextlib.suppress(errors.RunFailed):  # the loss of the servers is the failure to report
            if self.tracker.sums:  # empty if end_step() has written them: explain_gap() pushes, too
                self.tracker.write(step)
        self.rescue(step, self.loader.resume_at)

    def writes_rollouts(self, step: int) -> bool:
        """Whether this step writes a file to rollouts/."""
        return step % self.args.rollouts_every == 0 or step in (1, self.args.steps)

    def evaluates(self, step: int) -> bool:
        """Whether this step ends with an evaluation."""
        if not self.settings.held_out:
            return False
        every = self.args.eval_every
        return step == self.args.steps or (every > 0 and step % every == 0)

    def close(self) -> None:
        """Write the report, stop the engine and leave the process group together. Collective: every rank calls it."""
        self.tracker.close()
        self.prefetcher.abandon()  # waits for the batches in flight of a run that was stopped early
        placement.finish(self.world, self.engine)


def start(settings: Settings, world: World, engine, trained: checkpoint.Trained, also: list | None = None) -> Run:
    """Start or resume the run. trained: name -> (model, optimizer), for "policy" and every other model that changes;
    None for an optimizer says that none trains it.

    also: what the run learns from besides prompts and answers. A checkpoint of a run with others is refused.
    Collective: every rank calls it.
    """
    return Run(settings, world, engine, trained, also)
