"""Checkpoints: all a run needs to go on as if it had not stopped, and the policy as a Hugging Face folder.

checkpoints/step_000010/model/      config, tokenizer, safetensors: transformers and vLLM load it; with LoRA for peft
checkpoints/step_000010/trainer/    float32 masters and optimizer state, sharded; the random state of each rank
checkpoints/step_000010/state.json  step, place in the data, weight version, reward weights

Everything else is a function of the step: learning rate, sampling seeds, the order of the data.
common/preflight/folders.py says what else lies in checkpoints/, and when a folder is complete.
"""

import io
import json
import math
import pickle
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path, PosixPath

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.serialization import _get_layout
from transformers import PreTrainedTokenizerBase
from transformers.utils import cached_file

from common.data.prompts import PromptLoader
from common.data.tokenizer import image_tokens
from common.errors import BadInput, RunFailed, say, warn
from common.placement import World
from common.preflight import folders
from common.preflight.flags import Saving
from common.rewards.mixture import Rewards
from common.run import model_card, stopping

Trained = dict[str, tuple[nn.Module, torch.optim.Optimizer]]  # "policy", and what is trained beside it
# Everything that torch writes into .metadata. Names of a pickle are looked up here, so that nothing is imported.
METADATA_CLASSES = (
    metadata.Metadata, metadata.MetadataIndex, metadata.StorageMeta, metadata.TensorProperties,
    metadata.TensorStorageMetadata, metadata.BytesStorageMetadata, metadata.ChunkStorageMetadata,
    metadata._MEM_FORMAT_ENCODING, filesystem._StorageInfo, torch.Size, _get_layout,
)  # fmt: skip
METADATA_NAMES = {f"{known.__module__}.{known.__qualname__}": known for known in METADATA_CLASSES}
METADATA_NAMES |= {f"{dtype}": dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
METADATA_NAMES |= dict.fromkeys(("pathlib.PosixPath", "pathlib._local.PosixPath"), PosixPath)  # Python 3.11 and 3.13


class Saver:
    """Goes through the steps of a run, saves when it is due, and stops early when a signal asks for it."""

    def __init__(
        self, saving: Saving, trained: Trained, loader: PromptLoader, reward: Rewards | None, engine,
        tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype, world: World,
    ):  # fmt: skip
        """The model named "policy" is also exported for Hugging Face and vLLM, in `dtype`. reward and engine: None in a
        run that does not sample. Collective.
        """
        self.saving, self.trained, self.loader, self.reward, self.engine = saving, trained, loader, reward, engine
        self.tokenizer, self.dtype, self.world = tokenizer, dtype, world
        self.signals, self.stopping, self.done, self.last = stopping.StopSignals(), False, 0, 0
        self.saved = 0  # the step of the newest checkpoint of this run
        self.run_dir, self.data = Path(), loader.fingerprint()
        self.writing: Future | None = None
        if saving.async_save:
            # The thread has a group of its own: in a shared one two threads would take each other's turn.
            self.group = dist.new_group(backend="gloo", timeout=world.timeout)
            self.thread = ThreadPoolExecutor(1, "checkpoint")

    def load(self, folder: Path | None) -> int:
        """Restore all that was saved and return the number of steps done, 0 without a folder.

        The engine then sleeps until the caller pushes the weights to it. Collective: every rank calls it. Raises
        BadInput or RunFailed on all ranks.
        """
        saved = folders.state(folder, tuple(folders.FACTS)) if folder else {"step": 0}
        self.done = self.saved = saved["step"]
        if self.world.min(self.done) != self.world.max(self.done):
            said = f"--resume: this rank finds step {self.done}, other ranks another one; they need one file system"
            raise RunFailed(said, code="not-shared")
        if folder is None:
            return 0
        if saved["data"] != self.data:
            said = f"--resume {folder}: the prompts are not those of that run: a file of --dataset has changed"
            if self.saving.resume == "auto":
                raise BadInput(f"{said}; restore it, or start another run with --resume {folder}", code="data-changed")
            warn(f"{said}; the run goes on at the same place of the changed data", "data-changed")
        then, now = saved.get("lora"), adapters_of(self.trained["policy"][0])
        if then != now:
            raise BadInput(f"--resume {folder}: was saved with {said_of(then)}, and this run has {said_of(now)}")
        then, now = saved.get("trained"), self.trained_parameters()
        if then not in (None, now):  # None in checkpoints of older versions
            frozen = "--model, --train-vision and --freeze-router must be as they were"
            raise BadInput(f"--resume {folder}: trained {then:,} parameters, and this run trains {now:,}; {frozen}")
        if self.engine:
            self.engine.sleep()  # states() makes gradients and moments, which have no room beside an awake engine
        state, kind = states(self.trained, saved["fresh"]), self.world.device.type
        then, now = ((saved["ranks"], saved.get("device", kind)), (self.world.size, kind))
        if then == now:
            state["random"] = random_states(self.world)
        else:
            said = "saved by {} ranks ({}), now {} ({})".format(*then, *now)
            say(f"--resume: {said}: it goes on, but not bit for bit")
        read_states(state, folder / "trainer")
        for name, (model, optimizer) in self.trained.items():
            restore(model, optimizer, state[name])
        for name, value in state.get("random", {}).items():
            (torch.cuda if name.endswith("cuda") else torch).set_rng_state(value)
        self.loader.position = saved["position"]
        if self.engine:
            self.reward.restore(saved["reward"])
            self.engine.weight_version = saved["weight_version"] - 1  # the push after loading is not an update
        say(f"resumed after step {self.done}: {folder}")
        return self.done

    def steps(self, run_dir: Path, last: int) -> Iterator[int]:
        """Yield the remaining steps until `last` or a signal. The caller ends each with step_done(). Collective."""
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
        self.done, self.signals.trained = step, True
        self.stopping = bool(self.world.max(bool(self.signals.asked)))
        if self.due(step) or self.stopping:
            self.save(step, metrics)

    def save(self, step: int, metrics: dict[str, float], position: int | None = None) -> None:
        """Write checkpoints/step_NNNNNN, with async_save in a thread. Collective. Raises RunFailed on a full disk.

        position: where the next prompts begin. None: behind those that the loader has given to steps that are done.
        """
        position = self.loader.resume_at if position is None else position
        self.finish_writing()
        self.check_space(step)
        self.saved = step
        folder = self.run_dir / "checkpoints" / f"step_{step:06d}"
        if self.world.is_main:
            folders.begin(folder)
        dist.barrier()
        new = fresh(self.trained)
        state = {**states(self.trained, new), "random": random_states(self.world)}
        weights = whole_weights(self.trained["policy"][0], self.dtype, copy=self.saving.async_save)
        facts = {
            "step": step,
            "position": position,
            "data": self.data,
            "fresh": new,
            "lora": adapters_of(self.trained["policy"][0]),
            "trained": self.trained_parameters(),
            "ranks": self.world.size,
            "device": self.world.device.type,
            "weight_version": self.engine.weight_version if self.engine else 0,
            "reward": self.reward.state() if self.reward else {"weights": {}},  # a run that does not sample has none
            "eval/accuracy": metrics.get("eval/accuracy"),
        }
        trainer = folder.with_suffix(".unfinished") / "trainer"
        if self.saving.async_save:
            # With one thread the writer would use streams of GPU 0 in every rank, though all is in host memory.
            writer = dcp.FileSystemWriter(trainer, thread_count=2)
            written = dcp.async_save(state, storage_writer=writer, process_group=self.group)
            self.writing = self.thread.submit(lambda: (written.result(), self.complete(folder, weights, facts)))
        else:
            dcp.save(state, checkpoint_id=trainer)
            self.complete(folder, weights, facts)
            dist.barrier()

    def rescue(self, step: int, position: int) -> None:
        """Save the state of a run that fails, unless it is saved already or has weights that are not finite.

        step: the last one that is done. position: where its next prompts begin. Collective: every rank calls it.
        """
        self.finish_writing()
        models = [model for model, _ in self.trained.values()]
        finite = all(bool(weight.to_local().isfinite().all()) for model in models for weight in model.parameters())
        if step <= self.saved or not self.world.min(finite):
            return
        try:
            self.save(step, {}, position)
            self.finish_writing()
            say(f"\nsaved after step {step}; to go on: {stopping.command(self.run_dir)}")
        except RunFailed as full:  # the reason why the run fails is said after this
            say(f"\nnot saved after step {step}: {full}")

    def complete(self, folder: Path, weights: dict[str, torch.Tensor], facts: dict) -> None:
        """Add what rank 0 writes, after all ranks have written their shares; then the folder gets its name."""
        if self.world.is_main:
            unfinished = folder.with_suffix(".unfinished")
            write_model(self.trained["policy"][0], weights, self.tokenizer, unfinished / "model", self.dtype)
            if (self.run_dir / "run.json").is_file():
                (unfinished / "model/README.md").write_text(model_card.text(self.run_dir, facts["step"]), "utf-8")
            facts["files"] = folders.sizes(unfinished)
            (unfinished / "state.json").write_text(json.dumps(facts) + "\n")
            folders.finish(folder)
            folders.rotate(self.run_dir, self.saving.keep_checkpoints)

    def trained_parameters(self) -> int:
        """Number of the policy's parameters that are not frozen, on all ranks together."""
        return sum(weight.numel() for weight in self.trained["policy"][0].parameters() if weight.requires_grad)

    def finish_writing(self) -> None:
        """Wait until an asynchronous save is on the disk. Collective: every rank calls it."""
        if self.writing:
            self.writing.result()
            self.writing = None
            dist.barrier()

    def check_space(self, step: int) -> None:
        """Raise RunFailed on all ranks without room for float32 masters, two moments of each and the export."""
        policy, adapted = self.trained["policy"][0], adapters_of(self.trained["policy"][0])
        count = lambda model, frozen: sum(p.numel() for p in model.parameters() if frozen or p.requires_grad)
        needed = sum(12 * count(model, False) for model, _ in self.trained.values())
        needed += self.dtype.itemsize * count(policy, not adapted)  # with adapters only they are written
        free = self.world.min(shutil.disk_usage(self.run_dir).free if self.world.is_main else math.inf)
        if needed > free:
            room = f"a checkpoint needs {folders.size(needed)}, and {self.run_dir} has {folders.size(free)} left"
            raise RunFailed(f"step {step}: {room}: make room there, then --resume auto goes on", code="disk-full")


def export(
    policy: nn.Module, tokenizer: PreTrainedTokenizerBase, folder: Path, dtype: torch.dtype, world: World
) -> None:
    """Write the policy as a Hugging Face folder in `dtype`. Collective: every rank calls it; rank 0 writes."""
    weights = whole_weights(policy, dtype)
    if world.is_main:
        write_model(policy, weights, tokenizer, folder, dtype)
    dist.barrier()


def whole_weights(policy: nn.Module, dtype: torch.dtype, copy: bool = False) -> dict[str, torch.Tensor]:
    """name -> tensor in host memory on rank 0; {} on other ranks. Without `copy` it may share memory with the trainer.
    With LoRA these are the adapters, in float32. Collective: every rank calls it.
    """
    only_trained = adapters_of(policy) is not None  # otherwise also what is frozen, such as a vision tower
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=only_trained)
    weights = get_model_state_dict(policy, options=whole)
    if policy.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)  # a second name for the embedding
    parameters = {} if adapters_of(policy) else dict(policy.named_parameters())  # adapters and buffers keep their dtype
    dtype_of = lambda name, tensor: dtype if name in parameters else tensor.dtype
    return {name: tensor.to(dtype_of(name, tensor), copy=copy) for name, tensor in weights.items()}


def write_model(policy: nn.Module, weights: dict, tokenizer, folder: Path, dtype: torch.dtype) -> None:
    """Write a Hugging Face folder, or with LoRA a peft folder."""
    policy.config.dtype = dtype
    if adapters_of(policy):
        from common.trainer.lora import write_adapter

        write_adapter(policy, weights, folder)
    else:
        policy.save_pretrained(folder, state_dict=weights)
    tokenizer.save_pretrained(folder)
    wanted = [] if adapters_of(policy) else ["generation_config.json"]  # It may name end tokens that no other file has.
    if image_tokens(policy.config):
        wanted += ["processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"]
    for name in wanted:
        # From a folder or from the cache of the Hub: the run has read these files at its start.
        file = cached_file(
            policy.config._name_or_path, name, local_files_only=True, _raise_exceptions_for_missing_entries=False
        )
        if file and not folder.samefile(Path(file).parent):
            shutil.copy(file, folder)


def adapters_of(model: nn.Module) -> dict | None:
    """Name of the base, rank and alpha of a model with LoRA, for state.json."""
    layer = next((layer for layer in model.modules() if hasattr(layer, "lora_a")), None)
    if layer is None:
        return None
    return {"base": Path(model.config._name_or_path).name, "rank": layer.lora_a.shape[0], "alpha": layer.alpha}


def said_of(adapters: dict | None) -> str:
    if adapters is None:
        return "no adapters"
    return "adapters of rank {rank} and alpha {alpha:g} to {base}".format(**adapters)


def random_states(world: World) -> dict[str, torch.Tensor]:
    """State of this rank's generators. Sampling seeds them in every step; whatever else draws from them goes on."""
    found = {f"rank{world.rank}-cpu": torch.get_rng_state()}
    if world.device.type == "cuda":
        found[f"rank{world.rank}-cuda"] = torch.cuda.get_rng_state()
    return found


def fresh(trained: Trained) -> list[str]:
    """Names of the models whose optimizer has not stepped yet, for example PPO's policy while the critic warms up."""
    return [name for name, (_, optimizer) in trained.items() if not optimizer.state]


def states(trained: Trained, fresh: list[str]) -> dict:
    """name -> {"model", "optimizer"}, sharded; only {"model"} for the names in `fresh`. Collective.

    Asked for the state of an optimizer without one, torch steps it on zeros: its first step would become its second.
    """
    out, trained_only = {}, StateDictOptions(ignore_frozen_params=True)
    for name, (model, optimizer) in trained.items():
        if name in fresh:
            out[name] = {"model": get_model_state_dict(model, options=trained_only)}
        else:
            out[name] = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer, options=trained_only)))
        if adapters_of(model):  # torch leaves out a frozen embedding, but not its second name
            kept = {key for key, parameter in model.named_parameters() if parameter.requires_grad}
            out[name]["model"] = {key: value for key, value in out[name]["model"].items() if key in kept}
    return out


def restore(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict) -> None:
    """Give a model and its optimizer one entry of states(). Collective: every rank calls it.

    Learning rate and weight decay stay those of this run's flags, which may differ from those of the checkpoint's run.
    """
    if "optimizer" in state:
        own = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
        for group, values in zip(optimizer.param_groups, own):
            group.update(values)
    whole = all(parameter.requires_grad for parameter in model.parameters())  # frozen ones come from --model
    set_model_state_dict(model, state["model"], options=StateDictOptions(strict=whole))


class MetadataUnpickler(pickle.Unpickler):
    """Reads .metadata, torch's pickle of what lies where, and refuses names that could run code of who wrote it."""

    def find_class(self, module: str, name: str):
        if f"{module}.{name}" not in METADATA_NAMES:
            raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")  # in the words of torch.load(weights_only=True)
        return METADATA_NAMES[f"{module}.{name}"]


class Reader(dcp.FileSystemReader):
    def read_metadata(self) -> metadata.Metadata:
        with open(self.path / ".metadata", "rb") as file:
            return MetadataUnpickler(file).load()


class Planner(dcp.DefaultLoadPlanner):
    """Reads numbers, texts and lists as torch reads tensors, where its base class would unpickle anything."""

    def load_bytes(self, read_item: dcp.ReadItem, value: io.BytesIO) -> None:
        plain = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


def read_states(state: dict, folder: Path) -> None:
    """dcp.load into `state` without running code from the files. Collective. Raises RunFailed on all ranks."""
    try:
        dcp.load(state, storage_reader=Reader(folder), planner=Planner())
    except dcp.CheckpointException as failed:  # on all ranks, with what each of them met
        error = next(iter(failed.failures.values()))[0]
        if unknown := re.search(r"GLOBAL (\S+)", str(error)):
            said = (
                f"{folder}: holds a pickle with {unknown[1]}, which could run code as it is read; no save writes that"
            )
            raise RunFailed(said, code="pickle-refused") from None
        first = f"{type(error).__name__}: {error}".split("\n")[0]
        raise RunFailed(f"{folder}: cannot be read: {first}", code="checkpoint-damaged") from None
