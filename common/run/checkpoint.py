"""Checkpoints: all a run needs to go on as if it had not stopped, and the policy as a Hugging Face folder.

checkpoints/step_000010/model/      config, tokenizer, safetensors: transformers and vLLM load it; with LoRA for peft
checkpoints/step_000010/trainer/    safetensors: float32 masters, optimizer state, random states; each rank writes its
                                    shards, and any number of ranks reads them
checkpoints/step_000010/state.json  everything that is not a tensor: folders.SavedState

Everything else is a function of the step: learning rate, sampling seeds, the order of the data.
common/preflight/folders.py says what else lies in checkpoints/, and when a folder is complete.

A save goes like this. All ranks make the folder step_000010.unfinished/ and write trainer/ into it. Then rank 0 adds
model/ and state.json, flushes everything to the disk, and renames the folder. With --async-save the ranks copy their
tensors to host memory first, and a thread does the rest while the next step runs.
"""

import math
import shutil
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerBase
from transformers.utils import cached_file

from common.data.prompts import PromptLoader
from common.data.tokenizer import image_tokens
from common.errors import BadInput, RunFailed, raise_together, say, warn
from common.placement import World
from common.preflight import folders, run_directory
from common.preflight.flags import Saving
from common.preflight.folders import AdapterInfo, RewardState, SavedState
from common.rewards.mixture import Rewards
from common.run import model_card, stopping
from common.trainer.model import reshard

# name -> (model, optimizer) of each model that changes, "policy" among them. None: no optimizer trains it, as SDPO's
# teacher, which follows the policy.
Trained = dict[str, tuple[nn.Module, torch.optim.Optimizer | None]]
# Size of a file in trainer/. safetensors builds a whole file in memory before it writes it, and writer_for() lets two
# threads write, so a save needs about four times this much memory on each rank's machine.
FILE_BYTES = 2**28
WRITE_ERRORS = (OSError, SafetensorError, dcp.CheckpointException)  # the last one is no Exception


class Saver:
    """Goes through the steps of a run, saves when it is due, and stops early when a signal asks for it."""

    def __init__(
        self,
        saving: Saving,
        trained: Trained,
        loader: PromptLoader,
        reward: Rewards | None,
        engine,
        tokenizer: PreTrainedTokenizerBase,
        dtype: torch.dtype,
        world: World,
    ):
        """Collective: every rank calls it.

        The model named "policy" is also exported for Hugging Face and vLLM, in `dtype`. reward and engine are None in a
        run that does not sample.
        """
        self.saving = saving
        self.trained = trained
        self.policy = trained["policy"][0]
        self.loader = loader
        self.data = loader.fingerprint()
        self.reward = reward
        self.engine = engine
        self.tokenizer = tokenizer
        self.dtype = dtype
        self.world = world
        self.run_dir = Path()  # set in steps(): the tracker makes the folder, after load() has said where to resume
        self.signals = stopping.StopSignals()
        self.stopping = False
        self.step = 0  # the last step that is done
        self.last_step = 0
        self.saved_step = 0  # the step of the newest checkpoint of this run
        self.sampled_again = 0  # prompts that were in flight when the resumed checkpoint was saved
        self.writing: Future | None = None  # an asynchronous save that may not be on the disk yet
        if saving.async_save:
            # If two threads shared a process group, their collectives would be matched with each other.
            self.group = dist.new_group(backend="gloo", timeout=world.timeout)
            self.thread = ThreadPoolExecutor(1, "checkpoint")

    def load(self, folder: Path | None) -> int:
        """Restore all that was saved and return the number of steps done, 0 without a folder.

        The engine then sleeps until the caller pushes the weights to it. Collective: every rank calls it. Raises
        BadInput or RunFailed on all ranks.
        """
        saved = folders.state(folder) if folder else None
        self.step = self.saved_step = saved.step if saved else 0
        # A rank that found another checkpoint than rank 0 would silently train other weights.
        if self.world.min(self.step) != self.world.max(self.step):
            raise RunFailed(
                f"--resume: this rank finds step {self.step}, other ranks another one; they need one file system",
                code="not-shared",
            )
        # The first 48 bits are exact as a float.
        mark = int(self.data[:12], 16)
        if self.world.min(mark) != self.world.max(mark):
            raise RunFailed(
                "--dataset: the ranks have read different prompts; either a file differs between the nodes, or the "
                "chat template prints the date and the run began at midnight (UTC): then start it again",
                code="not-shared",
            )
        if saved is None:
            return 0
        self.check_fits(saved, folder)
        if self.engine:
            # training_state() makes all moments at once, and reading needs room besides.
            self.engine.sleep()
        tensors = training_state(self.trained, saved.fresh)
        # Each rank has random states of its own, so they only fit the same number of ranks.
        random_states = {}
        device = self.world.device.type
        if (saved.ranks, saved.device) == (self.world.size, device):
            random_states = get_random_states(self.world)
        else:
            say(
                f"--resume: saved by {saved.ranks} ranks ({saved.device}), now {self.world.size} ({device}): it goes "
                "on, but not bit for bit"
            )
        read_tensors(tensors | random_states, folder / "trainer")
        for name, state in random_states.items():
            if name.endswith("cuda"):
                torch.cuda.set_rng_state(state)
            else:
                torch.set_rng_state(state)
        self.loader.position = saved.position
        if self.engine:
            self.reward.restore(saved.reward.model_dump())
            # The push after loading is not an update. A checkpoint of SFT or DPO has version 0.
            self.engine.weight_version = max(0, saved.weight_version - 1)
        say(f"resumed after step {self.step}: {folder}")
        self.sampled_again = saved.in_flight
        if saved.in_flight:
            say(f"{saved.in_flight} prompts had been drawn and not trained on; they are drawn again")
        return self.step

    def check_fits(self, saved: SavedState, folder: Path) -> None:
        """Compare a checkpoint with this run's data, models, adapters and trained parameters. Raises BadInput."""
        if saved.data != self.data:
            problem = f"--resume {folder}: the prompts are not those of that run: {self.what_changed(folder)}"
            if self.saving.resume == "auto":
                raise BadInput(
                    f"{problem}; restore it, or start another run with --resume {folder}", code="data-changed"
                )
            warn(f"{problem}; the run goes on at the same place of the changed data", "data-changed")
        missing = [name for name in self.trained if saved.models and name not in saved.models]
        if missing:
            raise BadInput(
                f"--resume {folder}: was saved with {', '.join(saved.models)}, and this run also has "
                f"{', '.join(missing)}: start from its model folder instead, with --model"
            )
        adapters = adapters_of(self.policy)
        if saved.lora != adapters:
            raise BadInput(
                f"--resume {folder}: was saved with {saved.lora or 'no adapters'}, and this run has "
                f"{adapters or 'no adapters'}; --lora-rank and --model must be as they were"
            )
        count = count_parameters(self.policy)
        if saved.trained != count:
            raise BadInput(
                f"--resume {folder}: trained {saved.trained:,} parameters, and this run trains {count:,}; --model, "
                "--train-vision and --freeze-router must be as they were"
            )

    def what_changed(self, folder: Path) -> str:
        """Why the prompts may differ from those of the run that saved the folder."""
        prints_date = "strftime_now" in str(self.tokenizer.chat_template)
        if not prints_date or run_directory.date_of(run_dir="", resume=str(folder)):
            return "a file of --dataset has changed"
        return (
            "a file of --dataset has changed, or the date that the chat template prints; that run's run.json doesn't "
            'name it: add "date": "YEAR-MONTH-DAY" there, the day on which it began'
        )

    def steps(self, run_dir: Path, last: int) -> Iterator[int]:
        """Yield the remaining steps until `last` or a signal. The caller ends each with step_done(). Collective."""
        self.run_dir = run_dir
        self.last_step = last
        self.check_space(self.step + 1)
        self.signals.install()
        try:
            for step in range(self.step + 1, last + 1):
                yield step
                if self.stopping:
                    break
            self.finish_writing()
        finally:
            self.signals.remove()
        if self.step < last:
            say(f"\nstopped after step {self.step} of {last}; to go on: {stopping.command(run_dir)}")

    def due(self, step: int) -> bool:
        """Whether a checkpoint follows this step even if nobody asks for one."""
        return step == self.last_step or (self.saving.save_every > 0 and step % self.saving.save_every == 0)

    def step_done(self, step: int, metrics: dict[str, float]) -> None:
        """Save after the step if it is due, or if any rank was asked to stop. Collective: every rank calls it."""
        self.step = step
        self.signals.trained = True
        # A launcher may have sent the signal to one rank only. All of them have to stop after the same step.
        self.stopping = bool(self.world.max(bool(self.signals.asked)))
        if self.due(step) or self.stopping:
            self.save(step, metrics)

    def save(self, step: int, metrics: dict[str, float], position: int | None = None) -> None:
        """Write checkpoints/step_NNNNNN, with async_save in a thread.

        Raises RunFailed on all ranks if it can't be written. With async_save the next call does.
        position: where the next prompts begin. None: after the prompts of the steps that are done.
        Collective: every rank calls it.
        """
        self.finish_writing()
        self.check_space(step)
        folder = self.run_dir / "checkpoints" / f"step_{step:06d}"
        if self.world.is_main:
            folders.begin(folder)
        dist.barrier()  # no rank writes into the folder before it is there
        fresh = fresh_models(self.trained)
        if position is None:
            position = self.loader.resume_at
        saved = SavedState(
            step=step,
            position=position,
            in_flight=max(0, self.loader.position - position),
            data=self.data,
            models=[*self.trained],
            fresh=fresh,
            lora=adapters_of(self.policy),
            trained=count_parameters(self.policy),
            ranks=self.world.size,
            device=self.world.device.type,
            weight_version=self.engine.weight_version if self.engine else 0,
            reward=RewardState(**self.reward.state()) if self.reward else RewardState(weights={}),
            accuracy=metrics.get("eval/accuracy"),
            files={},
        )
        # The next step changes the weights while an asynchronous save writes them, so it needs copies.
        weights = whole_weights(self.policy, self.dtype, copy=self.saving.async_save)
        tensors = training_state(self.trained, fresh) | get_random_states(self.world)
        writer = writer_for(tensors, folder.with_suffix(".unfinished") / "trainer")
        if self.saving.async_save:
            trainer_written = dcp.async_save(tensors, storage_writer=writer, process_group=self.group)
            self.writing = self.thread.submit(self.complete, folder, weights, saved, trainer_written)
        else:
            error = None
            try:
                dcp.save(tensors, storage_writer=writer)  # if a rank fails, it raises on all of them
                self.complete(folder, weights, saved)
            except WRITE_ERRORS as failed:
                error = not_written(folder, failed)
            raise_together(error)  # complete() writes on rank 0 alone
        self.saved_step = step

    def rescue(self, step: int, position: int) -> None:
        """Save the state of a run that fails, unless it is saved already or has weights that are not finite.

        step: the last one that is done. position: where its next prompts begin. Collective: every rank calls it.
        """
        try:
            self.finish_writing()
            for model, _ in self.trained.values():
                reshard(model)  # SDPO's teacher may still be gathered, and its parameters are then no DTensors
            parameters = [parameter for model, _ in self.trained.values() for parameter in model.parameters()]
            finite = all(bool(parameter.to_local().isfinite().all()) for parameter in parameters)
            if step <= self.saved_step or not self.world.min(finite):
                return
            self.save(step, {}, position)
            self.finish_writing()
            say(f"\nsaved after step {step}; to go on: {stopping.command(self.run_dir)}")
        except RunFailed as failed:
            # The disk is full, or cannot be written to. The reason why the run fails is printed after this.
            say(f"\nnot saved after step {step}: {failed}")

    def complete(
        self,
        folder: Path,
        weights: dict[str, torch.Tensor],
        saved: SavedState,
        trainer_written: Future | None = None,
    ) -> None:
        """Add what rank 0 writes, after all ranks have written their shards; then the folder gets its name."""
        if trainer_written:
            trainer_written.result()
        if not self.world.is_main:
            return
        unfinished = folder.with_suffix(".unfinished")
        write_model(self.policy, weights, self.tokenizer, unfinished / "model", self.dtype)
        if (self.run_dir / "run.json").is_file():
            try:
                card = model_card.text(self.run_dir, saved.step)
                (unfinished / "model/README.md").write_text(card, "utf-8")
            except BadInput as error:  # somebody has changed a file, which must not cost the checkpoint
                warn(f"no model card: {error}", error.code)
        # state.json comes last, because it lists the sizes of all other files.
        saved.files = folders.sizes(unfinished)
        (unfinished / "state.json").write_text(saved.model_dump_json(indent=1) + "\n")
        folders.finish(folder)
        folders.rotate(self.run_dir, self.saving.keep_checkpoints)

    def finish_writing(self) -> None:
        """Wait until an asynchronous save is on the disk. Collective: every rank calls it.

        Raises RunFailed on all ranks if it can't be written, and once: the next call finds nothing to wait for.
        """
        if not self.writing:
            return
        writing, self.writing = self.writing, None
        error = None
        try:
            writing.result()
        except WRITE_ERRORS as failed:
            self.saved_step = 0  # so that rescue() tries again
            error = not_written(self.run_dir / "checkpoints", failed)
        raise_together(error)

    def check_space(self, step: int) -> None:
        """Raise RunFailed on all ranks if the disk has no room for a checkpoint. Collective: every rank calls it."""
        # Float32 masters and two moments of each of them, and the export, which with LoRA holds only the adapters.
        needed = 0
        for model, optimizer in self.trained.values():
            if optimizer is None:
                needed += 4 * count_parameters(model, frozen=True)
            else:
                needed += 12 * count_parameters(model)
        needed += self.dtype.itemsize * count_parameters(self.policy, frozen=adapters_of(self.policy) is None)
        # A run that began with another run's checkpoint and has none of its own would begin again with --resume auto.
        resume = "auto" if folders.complete(self.run_dir) else self.saving.resume or "auto"
        free = math.inf
        if self.world.is_main:
            free = shutil.disk_usage(self.run_dir).free
        free = self.world.min(free)
        if needed > free:
            raise RunFailed(
                f"step {step}: a checkpoint needs {folders.in_words(needed)}, and {self.run_dir} has "
                f"{folders.in_words(free)} left: make room there, then --resume {resume} goes on",
                code="disk-full",
            )


# The policy as a Hugging Face folder


def export(
    policy: nn.Module, tokenizer: PreTrainedTokenizerBase, folder: Path, dtype: torch.dtype, world: World
) -> None:
    """Write the policy as a Hugging Face folder in `dtype`. Collective: every rank calls it; rank 0 writes.

    The folder is there when it is whole: a write that fails leaves an older one as it was.
    """
    weights = whole_weights(policy, dtype)
    if world.is_main:
        with folders.written_whole(folder) as unfinished:
            write_model(policy, weights, tokenizer, unfinished, dtype)
    dist.barrier()


def whole_weights(policy: nn.Module, dtype: torch.dtype, copy: bool = False) -> dict[str, torch.Tensor]:
    """name -> tensor in host memory on rank 0; {} on other ranks. With LoRA these are the adapters, in float32.

    copy: False lets the tensors share memory with the trainer. Collective: every rank calls it.
    """
    only_adapters = adapters_of(policy) is not None
    # Without LoRA what is frozen belongs to the model, too, such as a vision tower.
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=only_adapters)
    weights = get_model_state_dict(policy, options=options)
    if policy.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)  # a second name for the embedding
    # Buffers keep their dtype, and so do adapters.
    cast = set() if only_adapters else {name for name, _ in policy.named_parameters()}
    return {name: tensor.to(dtype if name in cast else tensor.dtype, copy=copy) for name, tensor in weights.items()}


def write_model(policy: nn.Module, weights: dict, tokenizer, folder: Path, dtype: torch.dtype) -> None:
    """Write a Hugging Face folder, or with LoRA a peft folder."""
    extra_files = []
    if adapters_of(policy):
        from common.trainer.lora import write_adapter

        write_adapter(policy, weights, folder)
    else:
        policy.save_pretrained(folder, state_dict=weights)
        # It has written the data type of the masters, in which transformers and vLLM would then load the weights.
        policy.config.dtype = dtype
        policy.config.save_pretrained(folder)
        # It may name end tokens that no other file has.
        extra_files.append("generation_config.json")
    tokenizer.save_pretrained(folder)
    if image_tokens(policy.config):
        extra_files += ["processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"]
    for name in extra_files:
        copy_file(policy.config._name_or_path, name, folder)


def copy_file(model_path: str, name: str, folder: Path) -> None:
    """Copy a file of a model's folder, or of the Hub's cache, as it is, if the model has such a file."""
    # The run has read these files at its start, so the cache has them.
    file = cached_file(model_path, name, local_files_only=True, _raise_exceptions_for_missing_entries=False)
    if file and not folder.samefile(Path(file).parent):
        shutil.copy(file, folder)


def adapters_of(model: nn.Module) -> AdapterInfo | None:
    """The description of a model's LoRA adapters for state.json; None for a model without them."""
    for layer in model.modules():
        if hasattr(layer, "lora_a"):
            base = Path(model.config._name_or_path).name
            return AdapterInfo(base=base, rank=layer.lora_a.shape[0], alpha=layer.alpha)
    return None


def count_parameters(model: nn.Module, frozen: bool = False) -> int:
    """Number of a model's trained parameters on all ranks together. frozen: count the frozen ones, too."""
    return sum(parameter.numel() for parameter in model.parameters() if frozen or parameter.requires_grad)


# The state of the trainer


def fresh_models(trained: Trained) -> list[str]:
    """Names of the models whose optimizer has not stepped yet, for example PPO's policy while the critic warms up."""
    return [name for name, (_, optimizer) in trained.items() if optimizer is None or not optimizer.state]


def training_state(trained: Trained, fresh: list[str]) -> dict[str, torch.Tensor]:
    """name -> sharded tensor: all trained parameters, and their moments except those of the models in `fresh`. For a
    model without an optimizer: all parameters.

    The tensors are the models' and the optimizers' own, so to write into them is to restore a run. Collective: every
    rank calls it.
    """
    tensors = {}
    for name, (model, optimizer) in trained.items():
        options = StateDictOptions(ignore_frozen_params=optimizer is not None)
        weights = get_model_state_dict(model, options=options)
        for key, parameter in model.named_parameters():
            # A tied weight is here once, and in `weights` under each of its names.
            if parameter.requires_grad or optimizer is None:
                tensors[f"{name}.model.{key}"] = weights[key]
        if name in fresh:
            continue
        add_moments(optimizer)
        moments = get_optimizer_state_dict(model, optimizer, options=options)["state"]
        for key, values in moments.items():
            for kind, tensor in values.items():  # step, exp_avg, exp_avg_sq
                tensors[f"{name}.optimizer.{key}.{kind}"] = tensor
    return tensors


def add_moments(optimizer: torch.optim.AdamW) -> None:
    """Give the parameters that have none the moments that Adam would begin with.

    These are all parameters of a fresh optimizer, and those that have had no gradient yet: long rows alone reach some
    (DeepSeek-V4's compressors).
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and not optimizer.state[parameter]:
                # A fused or capturable Adam keeps its step counts on the device.
                on_device = {"device": parameter.device} if group["fused"] or group["capturable"] else {}
                optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, **on_device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def get_random_states(world: World) -> dict[str, torch.Tensor]:
    """State of this rank's generators. Sampling seeds them in every step; whatever else draws from them goes on."""
    states = {f"random.rank{world.rank}-cpu": torch.get_rng_state()}
    if world.device.type == "cuda":
        states[f"random.rank{world.rank}-cuda"] = torch.cuda.get_rng_state()
    return states


def writer_for(tensors: dict[str, torch.Tensor], folder: Path) -> dcp.HuggingFaceStorageWriter:
    """A writer of safetensors files of about FILE_BYTES, in which each rank puts its shards into files of its own."""
    # Rank 0's numbers count for all ranks. Random states of other ranks, which it does not have, go to file 0.
    file_numbers = defaultdict(int)
    total = 0
    for name, tensor in tensors.items():
        file_numbers[name] = 1 + total // FILE_BYTES
        total += (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes
    # With one thread the writer would use streams of GPU 0 on every rank.
    return dcp.HuggingFaceStorageWriter(
        str(folder),
        fqn_to_index_mapping=file_numbers,
        thread_count=2,
        save_distributed=True,
    )


def read_tensors(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Fill the tensors in place, from shards of any number of ranks. No pickle is read.

    Collective: every rank calls it. Raises RunFailed on all ranks.
    """
    if (folder / ".metadata").exists():
        raise RunFailed(
            f"{folder}: holds pickles, which could run code as they are read, and no save of this version writes them; "
            "resume another checkpoint, or start from its model/ with --model",
            code="pickle-refused",
        )
    try:
        dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(folder)))
    except dcp.CheckpointException as failed:
        # It is raised on all ranks, with what each of them met.
        raise RunFailed(f"{folder}: cannot be read: {first_line(failed)}", code="checkpoint-damaged") from None


def not_written(folder: Path, failed: BaseException) -> RunFailed:
    """The error of a checkpoint that can't be written. A quota, for example, is not seen beforehand."""
    return RunFailed(f"{folder}: cannot be written: {first_line(failed)}", code="disk-full")


def first_line(failed: BaseException) -> str:
    """What went wrong, in one line: with torch's checkpoints, on the first rank that failed."""
    if isinstance(failed, dcp.CheckpointException):
        failed = next(iter(failed.failures.values()))[0]
    return f"{type(failed).__name__}: {failed}".split("\n")[0]
