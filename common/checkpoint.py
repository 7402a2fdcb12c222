"""Checkpoints: all a run needs to go on as if it had not stopped, and the policy as a Hugging Face folder.

checkpoints/step_000010/model/      config, tokenizer, safetensors: AutoModelForCausalLM and vLLM load it
checkpoints/step_000010/trainer/    float32 masters and optimizer state, sharded; each rank's random state
checkpoints/step_000010/state.json  step, place in the data, weight version, reward weights

What is not there is a function of the step: learning rate, sampling seeds, the order of the data. What else lies in
checkpoints/, and when a folder is complete: common/folders.py.
"""

import json
import math
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from transformers import PreTrainedTokenizerBase

from common import folders, safe_pickle, stopping
from common.data import PromptLoader
from common.errors import BadInput, RunFailed, say, warn
from common.placement import World
from common.reward_mixture import Rewards

Trained = dict[str, tuple[nn.Module, torch.optim.Optimizer]]  # "policy", and what is trained beside it


@dataclass(frozen=True)
class Saving:
    resume: str = ""  # a checkpoint folder, or "auto": the newest of run_dir, if any
    save_every: int = 0  # steps between checkpoints; 0: after the last step only, and when asked to stop
    keep_checkpoints: int = 0  # how many of the newest stay, beside the best by eval/accuracy; 0: all
    async_save: bool = False  # write while the next step runs, from a copy in host memory
    dry_run: bool = False  # check flags and data, print the plan, and leave before a model is loaded
    trust_pickle: bool = False  # read checkpoints and weights that are pickles: they may run code of who wrote them
    selftest: bool = False  # try rollout, weight sync, gradient and checkpoint, print a table, and leave


class Saver:
    """Goes through the steps of a run, saves when it is due, and stops early when a signal asks for it."""

    def __init__(
        self, saving: Saving, trained: Trained, loader: PromptLoader, reward: Rewards, engine,
        tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype, world: World,
    ):  # fmt: skip
        """Of the trained models, "policy" is exported for Hugging Face and vLLM, too, in `dtype`. Collective."""
        self.saving, self.trained, self.loader, self.reward, self.engine = saving, trained, loader, reward, engine
        self.tokenizer, self.dtype, self.world = tokenizer, dtype, world
        self.signals, self.stopping, self.done, self.last = stopping.StopSignals(), False, 0, 0
        self.run_dir, self.data = Path(), loader.fingerprint()
        self.writing: Future | None = None
        if saving.async_save:
            # Its own: two threads in one would take each other's turn.
            self.group = dist.new_group(backend="gloo", timeout=world.timeout)
            self.thread = ThreadPoolExecutor(1, "checkpoint")

    def load(self, folder: Path | None) -> int:
        """Restore all that was saved; returns the steps done, 0 without a folder. The caller pushes the weights to the
        engine. Collective. Raises BadInput or RunFailed on all ranks.
        """
        saved = folders.state(folder, tuple(folders.FACTS)) if folder else {"step": 0}
        self.done = saved["step"]
        if self.world.min(self.done) != self.world.max(self.done):
            raise RunFailed(
                f"--resume: this rank finds step {self.done}, others another; they need one file system",
                code="not-shared",
            )
        if folder is None:
            return 0
        if saved["data"] != self.data:
            said = f"--resume {folder}: the prompts are not those of that run any more: a file of --dataset has changed"
            if self.saving.resume == "auto":
                raise BadInput(f"{said}; restore it, or start another run: --resume {folder}", code="data-changed")
            warn(f"{said}; the order of the data goes on in the new ones", "data-changed")
        state = states(self.trained, saved["fresh"])
        if saved["ranks"] == self.world.size:
            state["random"] = random_states(self.world)
        else:
            say(f"--resume: saved by {saved['ranks']} ranks, now {self.world.size}: it goes on, but not bit for bit")
        safe_pickle.load(state, folder / "trainer", self.saving.trust_pickle)
        for name, (model, optimizer) in self.trained.items():
            loaded = state[name]
            if name in saved["fresh"]:
                set_model_state_dict(model, loaded["model"])
            else:
                set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
        for name, value in state.get("random", {}).items():
            (torch.cuda if name.endswith("cuda") else torch).set_rng_state(value)
        self.loader.position = saved["position"]
        self.reward.restore(saved["reward"])
        self.engine.weight_version = saved["weight_version"] - 1  # the push that follows is none of the run's
        say(f"resumed after step {self.done}: {folder}")
        return self.done

    def steps(self, run_dir: Path, last: int) -> Iterator[int]:
        """The steps that are not done yet, up to `last` or until a signal. Each ends with step_done(). Collective."""
        self.run_dir, self.last = run_dir, last
        self.check_space(self.done + 1)
        self.signals.install()
        try:
            for step in range(self.done + 1, last + 1):
                yield step
                if self.stopping:
                    break
            self.finish_writing()
        finally:
            self.signals.remove()
        if self.done < last:
            say(f"\nstopped after step {self.done} of {last}; to go on: {stopping.command(run_dir)}")

    def due(self, step: int) -> bool:
        """Whether a checkpoint follows this step even if nobody asks for one."""
        return step == self.last or (self.saving.save_every > 0 and step % self.saving.save_every == 0)

    def step_done(self, step: int, metrics: dict[str, float]) -> None:
        """Save after the step if it is due, or if any rank was asked to stop. Collective."""
        self.done, self.stopping = step, bool(self.world.max(bool(self.signals.asked)))
        if self.due(step) or self.stopping:
            self.save(step, metrics)

    def save(self, step: int, metrics: dict[str, float]) -> None:
        """Write checkpoints/step_NNNNNN, or begin to. Collective. Raises RunFailed where there is no room for it."""
        self.finish_writing()
        self.check_space(step)
        folder = self.run_dir / "checkpoints" / f"step_{step:06d}"
        if self.world.is_main:
            folders.begin(folder)
        dist.barrier()
        new = fresh(self.trained)
        state = {**states(self.trained, new), "random": random_states(self.world)}
        weights = whole_weights(self.trained["policy"][0], self.dtype, copy=self.saving.async_save)
        facts = {
            "step": step,
            "position": self.loader.resume_at,
            "data": self.data,
            "fresh": new,
            "ranks": self.world.size,
            "weight_version": self.engine.weight_version,
            "reward": self.reward.state(),
            "eval/accuracy": metrics.get("eval/accuracy"),
        }
        trainer = folder.with_suffix(".unfinished") / "trainer"
        if self.saving.async_save:
            written = dcp.async_save(state, checkpoint_id=trainer, process_group=self.group)
            self.writing = self.thread.submit(lambda: (written.result(), self.complete(folder, weights, facts)))
        else:
            dcp.save(state, checkpoint_id=trainer)
            self.complete(folder, weights, facts)
            dist.barrier()

    def complete(self, folder: Path, weights: dict[str, torch.Tensor], facts: dict) -> None:
        """Add what rank 0 writes, when all ranks have written theirs; then the folder gets its name."""
        if self.world.is_main:
            unfinished = folder.with_suffix(".unfinished")
            write_model(self.trained["policy"][0], weights, self.tokenizer, unfinished / "model", self.dtype)
            facts["files"] = folders.sizes(unfinished)
            (unfinished / "state.json").write_text(json.dumps(facts) + "\n")
            folders.finish(folder)
            folders.rotate(self.run_dir, self.saving.keep_checkpoints)

    def finish_writing(self) -> None:
        """Wait for a save that is being written meanwhile. Collective."""
        if self.writing:
            self.writing.result()
            self.writing = None
            dist.barrier()

    def check_space(self, step: int) -> None:
        """Room for a checkpoint: float32 masters, two moments of each, and the export. Raises RunFailed together."""
        count = lambda model: sum(parameter.numel() for parameter in model.parameters())
        needed = sum(12 * count(model) for model, _ in self.trained.values())
        needed += self.dtype.itemsize * count(self.trained["policy"][0])
        free = self.world.min(shutil.disk_usage(self.run_dir).free if self.world.is_main else math.inf)
        if needed > free:
            raise RunFailed(
                f"step {step}: a checkpoint needs {folders.size(needed)}, and {self.run_dir} has {folders.size(free)} "
                "left: make room there, then --resume auto goes on",
                code="disk-full",
            )


def export(
    policy: nn.Module, tokenizer: PreTrainedTokenizerBase, folder: Path, dtype: torch.dtype, world: World
) -> None:
    """Write the policy as a Hugging Face folder in `dtype`. Collective: every rank calls it; rank 0 writes."""
    weights = whole_weights(policy, dtype)
    if world.is_main:
        write_model(policy, weights, tokenizer, folder, dtype)
    dist.barrier()


def whole_weights(policy: nn.Module, dtype: torch.dtype, copy: bool = False) -> dict[str, torch.Tensor]:
    """name -> tensor in host memory, on rank 0; {} elsewhere. Without `copy` perhaps the trainer's own. Collective."""
    weights = get_model_state_dict(policy, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if policy.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)  # a second name for the embedding
    return {name: tensor.to(dtype, copy=copy) for name, tensor in weights.items()}


def write_model(policy: nn.Module, weights: dict, tokenizer, folder: Path, dtype: torch.dtype) -> None:
    policy.config.dtype = dtype
    policy.save_pretrained(folder, state_dict=weights)
    tokenizer.save_pretrained(folder)


def random_states(world: World) -> dict[str, torch.Tensor]:
    """This rank's generators. Sampling seeds them in every step; what else draws from them goes on as it would have."""
    found = {f"rank{world.rank}-cpu": torch.get_rng_state()}
    if world.device.type == "cuda":
        found[f"rank{world.rank}-cuda"] = torch.cuda.get_rng_state()
    return found


def fresh(trained: Trained) -> list[str]:
    """Names of those whose optimizer has not stepped yet: PPO's policy while the critic warms up."""
    return [name for name, (_, optimizer) in trained.items() if not optimizer.state]


def states(trained: Trained, fresh: list[str]) -> dict:
    """name -> {"model", "optimizer"}, sharded; of a fresh one the model alone. Collective.

    Asked for the state of an optimizer without one, torch makes it step on zeros: its next step would be its second.
    """
    out = {}
    for name, (model, optimizer) in trained.items():
        if name in fresh:
            out[name] = {"model": get_model_state_dict(model)}
        else:
            out[name] = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    return out
