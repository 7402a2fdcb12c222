"""Watches the main() of an algorithm from outside: what the engine was asked, and what went into each optimizer step.

Nothing that is recorded comes from the algorithm's own functions, so a test can compute all of it once more.
"""

import copy
from dataclasses import dataclass, field

import torch
from cases import once
from torch.distributed.tensor import DTensor

from common import placement
from common.data import prompts
from common.preflight.memory import MemoryPlan
from common.rollout import rollout
from common.rollout.hf_engine import HFEngine
from common.rollout.rollout import Rollout
from common.run import checkpoint, job, offline, report, sampling
from common.trainer import model

Weights = dict[str, torch.Tensor]
load_prompts = once(prompts.load)  # for all tests of this process


@dataclass
class Update:
    """One optimizer step."""

    model: int  # which model it was: 0 is the first that main loaded, the policy
    before: Weights
    gradient: Weights  # as the optimizer saw it, after clipping
    settings: dict  # of the optimizer, at that moment: lr, betas, weight_decay ...


@dataclass
class Step:
    """One training step."""

    batch: Rollout | None  # graded, as main got it
    before: list[Weights]  # of each trained model, when training began
    after: list[Weights] = field(default_factory=list)  # and at its end
    advantages: torch.Tensor | None = None  # (N,) or (N, T), as main reports them
    rows: torch.Tensor | None = None  # (N,) bool, rows that main computed with a gradient, as it says; None: all
    updates: list[Update] = field(default_factory=list)


@dataclass
class Call:
    """One call of engine.generate."""

    prompt_ids: list[list[int]]
    n: int
    temperature: float
    max_tokens: int
    seed: int
    answer: Rollout  # with the engine's own log-probs


@dataclass
class Recording:
    """What one run did."""

    noise: float  # is added to the engine's log-probs, up or down, so that importance weights differ from 1
    models: list = field(default_factory=list)  # in the order in which main loads them
    loads: list[dict] = field(default_factory=list)  # the named arguments of these calls
    resharded: list = field(default_factory=list)  # models whose gathered weights were freed, one for each time
    optimizers: list = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    slept: set[int] = field(default_factory=set)  # after so many calls the engine was sent to sleep
    plan: MemoryPlan | None = None  # what main announced to prepare()
    steps: list[Step] = field(default_factory=list)

    def weights(self) -> list[Weights]:
        """The weights of the trained models, as they are now."""
        return [whole(dict(trained.named_parameters())) for trained in map(self.model_of, self.optimizers)]

    def model_of(self, optimizer):
        first = optimizer.param_groups[0]["params"][0]
        return next(trained for trained in self.models if next(trained.parameters()) is first)


def whole(tensors: dict[str, torch.Tensor | None]) -> Weights:
    """Copies of full tensors."""
    found = {}
    for name, tensor in tensors.items():
        if tensor is not None:
            tensor = tensor.detach()
            found[name] = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()
    return found


def watch(monkeypatch, world, noise: float = 0.0) -> Recording:
    """From now on, record what a main() does. The process group is the test's."""
    recording = Recording(noise)
    monkeypatch.setattr(placement, "init", lambda *given, **named: world)
    monkeypatch.setattr(placement, "finish", lambda *given: None)
    for slow in ((checkpoint.Saver, "save"), (report, "write"), (checkpoint, "export")):
        monkeypatch.setattr(*slow, lambda *given, **named: None)
    monkeypatch.setattr(prompts, "load", load_prompts)

    load = model.load

    def loaded(*given, **named):
        recording.models.append(load(*given, **named))
        recording.loads.append(named)
        return recording.models[-1]

    reshard = model.reshard

    def freed(each):
        recording.resharded.append(each)
        reshard(each)

    class AdamW(torch.optim.AdamW):
        def __init__(self, *given, **named):
            super().__init__(*given, **named)
            recording.optimizers.append(self)

        def step(self, *given):
            trained = recording.model_of(self)
            parameters = dict(trained.named_parameters())
            (group,) = self.param_groups
            recording.steps[-1].updates.append(
                Update(
                    recording.models.index(trained),
                    whole(parameters),
                    whole({name: parameter.grad for name, parameter in parameters.items()}),
                    {name: value for name, value in group.items() if name != "params"},
                )
            )
            return super().step(*given)

    generate = HFEngine.generate

    def generated(engine, prompt_ids, n, temperature, max_tokens, seed, done=None, reply=None):
        answer = generate(engine, prompt_ids, n, temperature, max_tokens, seed, done, reply)
        recording.calls.append(Call(prompt_ids, n, temperature, max_tokens, seed, copy.deepcopy(answer)))
        shape = answer.rollout_logprobs.shape
        up_and_down = torch.tensor([1.0, -1.0, 0.5]).repeat(shape.numel())[: shape.numel()].view(shape)
        answer.rollout_logprobs += recording.noise * up_and_down * answer.response_mask
        return answer

    def slept(engine):
        recording.slept.add(len(recording.calls))

    get = sampling.Prefetcher.get

    def got(prefetcher, *given, **named):
        batch = get(prefetcher, *given, **named)
        recording.steps.append(Step(copy.copy(batch), recording.weights()))
        return batch

    end_step = job.Run.end_step

    def ended(run, *given, **named):
        recording.steps[-1].after = recording.weights()
        recording.steps[-1].advantages = named["advantages"]
        recording.steps[-1].rows = named.get("rows")
        recording.plan = run.settings.plan
        end_step(run, *given, **named)

    steps = offline.Run.steps

    def counted(run):
        for step in steps(run):
            recording.steps.append(Step(None, recording.weights()))
            yield step
            recording.steps[-1].after = recording.weights()

    collate = rollout.collate

    def collated(*given, **named):
        batch = collate(*given, **named)
        if recording.steps and recording.steps[-1].batch is None:  # of sft.py and dpo.py
            recording.steps[-1].batch = batch
        return batch

    monkeypatch.setattr(model, "load", loaded)
    monkeypatch.setattr(model, "reshard", freed)
    monkeypatch.setattr(torch.optim, "AdamW", AdamW)
    monkeypatch.setattr(HFEngine, "generate", generated)
    monkeypatch.setattr(HFEngine, "sleep", slept)
    monkeypatch.setattr(sampling.Prefetcher, "get", got)
    monkeypatch.setattr(job.Run, "end_step", ended)
    monkeypatch.setattr(offline.Run, "steps", counted)
    monkeypatch.setattr(rollout, "collate", collated)
    return recording
