"""Train on one recorded batch, and save all that went through the loop. scripts/walkthrough.py calls it.

    python scripts/one_batch.py baselines/walkthrough/embedded.jsonl.gz out.pt          (then flags of algos/grpo.py)
    python scripts/one_batch.py baselines/walkthrough/cool.jsonl.gz out.pt --temperature 0.6 --prompts-per-step 16

The engine's responses are in the file, so all processors train on the same tokens. The rest is computed: main() of
algos/grpo.py makes its first step with the real functions of common/, and the grader grades again. `algos` and `common`
are those on PYTHONPATH. walkthrough.py puts a copy there in which a line is wrong.
"""

import dataclasses
import gzip
import importlib
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

sys.path.append(str(Path(__file__).parent))
import replay

from common import weight_sync
from common.preflight import flags
from common.run import job
from common.trainer import batching, model, packing_check

# What the engine returned, and the grade. The rest of a rollout file can be computed from it.
KEYS = (
    "index",
    "id",
    "answer",  # replay.py looks for a prompt by id, tokens and answer
    "prompt_ids",
    "response_ids",
    "rollout_logprobs",
    "sampled",  # only with an environment
    "score",
    "acc",
    "info",
    "dropped",
    "finish_reason",
    "weight_versions",
)


@dataclasses.dataclass
class Trace:
    """All that went through one step of the loop. Tensors are on the CPU."""

    metrics: dict[str, float]  # as in metrics.jsonl
    batch: dict[str, Any]  # fields of sampling.Batch, and its scores
    advantages: torch.Tensor  # (N,)
    old_logprobs: torch.Tensor  # (N, T)
    micro_batches: list[list[int]]  # for each optimizer step: tokens in each of its forwards
    losses: list[dict]  # for each call of policy_loss: what it got and what it returned
    learning_rates: list[float]  # of each optimizer step
    gradients: list[torch.Tensor]  # of each optimizer step, before clipping; all parameters in one vector
    weights: list[torch.Tensor]  # before each optimizer step, and after the last; all parameters in one vector
    pushed: dict[str, torch.Tensor]  # what the engine is sent after the step: full tensors, under its own names


class Recorder:
    """Keeps what passes through the functions that it wraps."""

    def __init__(self):
        self.kept: dict[str, Any] = {"losses": [], "learning_rates": [], "gradients": [], "weights": []}
        self.parameters: list[torch.Tensor] = []

    @torch.no_grad()
    def before_update(self, optimizer: torch.optim.Optimizer, *hook_arguments) -> None:
        """A hook of torch: runs at the beginning of each optimizer step."""
        self.parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.kept["learning_rates"].append(optimizer.param_groups[0]["lr"])
        self.kept["weights"].append(vector(self.parameters))

    def clip(self, clip, parameters, *given):
        """Calls clip_grad_norm_, and keeps the gradient from before."""
        parameters = list(parameters)
        self.kept["gradients"].append(vector([parameter.grad for parameter in parameters]))
        return clip(parameters, *given)

    def policy_loss(self, compute, **given) -> torch.Tensor:
        """Calls the file's policy_loss, and keeps its arguments and its result."""
        loss = compute(**given)
        tensors = {name: value.detach().clone() for name, value in given.items() if isinstance(value, torch.Tensor)}
        self.kept["losses"].append(given | tensors | {"loss": loss.item()})
        return loss

    def split(self, cut, *given) -> list:
        """Calls batching.split, and keeps how many tokens each forward has."""
        mini_batches = cut(*given)
        self.kept["micro_batches"] = [
            [micro.input_ids.shape[1] for micro in mini_batch.micro_batches] for mini_batch in mini_batches
        ]
        return mini_batches

    def push(self, policy, engine) -> None:
        """Keeps what weight_sync.push would send, in place of sending it: nothing samples from it."""
        sent = weight_sync.FullParameters(policy, torch.float32, saved_names=True)
        self.kept["pushed"] = {name: tensor.clone() for name, tensor in sent}

    def end_step(self, run: job.Run, step: int, batch, *, advantages, old_logprobs, **named) -> None:
        """Keeps the batch, then ends the step as usual."""
        fields = ("prompt_ids", "response_ids", "response_mask", "rollout_logprobs", "truncated", "responses", "scores")
        self.kept["batch"] = {name: getattr(batch, name) for name in fields}
        self.kept["batch"]["prompts"] = [prompt.text for prompt in batch.prompts]
        self.kept["batch"]["answers"] = [prompt.answer for prompt in batch.prompts]
        self.kept["advantages"] = advantages
        self.kept["old_logprobs"] = old_logprobs
        self.kept["weights"].append(vector(self.parameters))
        self.end(run, step, batch, advantages=advantages, old_logprobs=old_logprobs, **named)

    end = staticmethod(job.Run.end_step)


def vector(tensors: list[torch.Tensor]) -> torch.Tensor:
    """All numbers of these tensors, one after the other."""
    own = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return torch.cat([tensor.detach().flatten() for tensor in own])


def read_batch(file: Path) -> list[dict]:
    """The rows of a recorded batch."""
    with gzip.open(file, "rt") as lines:
        return [json.loads(line) for line in lines]


def write_batch(rollouts: Path, file: Path) -> None:
    """Keep of a run's rollout file what the engine returned, compressed. The same rows give the same bytes."""
    rows = [json.loads(line) for line in rollouts.read_text().splitlines()]
    lines = [json.dumps({key: row[key] for key in KEYS if key in row}) + "\n" for row in rows]
    file.write_bytes(gzip.compress("".join(lines).encode(), mtime=0))


def choose_packed(policy, *given, **named) -> None:
    """In place of packing_check.choose_forward, which would find what walkthrough.py breaks, and not pack."""
    policy.packed = True
    policy.carries_state = False
    policy.knows_logits = True
    packing_check.attend_with(policy, "packed")


def trace(algorithm: ModuleType, rows: list[dict], args) -> Trace:
    """Run the first step of the algorithm's main() on these responses."""
    recorder = Recorder()
    hook = register_optimizer_step_pre_hook(recorder.before_update)
    with (
        tempfile.TemporaryDirectory() as run_dir,
        mock.patch.object(algorithm, "policy_loss", partial(recorder.policy_loss, algorithm.policy_loss)),
        mock.patch.object(model, "choose_forward", choose_packed),
        mock.patch.object(torch.nn.utils, "clip_grad_norm_", partial(recorder.clip, torch.nn.utils.clip_grad_norm_)),
        mock.patch.object(batching, "split", partial(recorder.split, batching.split)),
        mock.patch.object(weight_sync, "push", recorder.push),
        mock.patch.object(job.Run, "end_step", lambda *given, **named: recorder.end_step(*given, **named)),
    ):
        source = dataclasses.replace(args.source, eval_prompts=0)
        args = dataclasses.replace(args, run_dir=run_dir, source=source)
        try:
            metrics = replay.run_step(algorithm, args, rows, step=1)
        finally:
            hook.remove()
    return Trace(metrics=metrics, **recorder.kept)


def main(rows: list[dict], output: str, args) -> None:
    algorithm = importlib.import_module("algos.grpo")
    torch.save(dataclasses.asdict(trace(algorithm, rows, args)), output)


if __name__ == "__main__":
    file, output, *sys.argv[1:] = sys.argv[1:]
    from algos import grpo

    flags.launch(partial(main, read_batch(Path(file)), output), grpo.Args, grpo.EMBEDDED, __doc__)
