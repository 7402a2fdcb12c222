"""Checkpoints: what is exported is the policy; what is restored is what was saved; a name means all of it is there."""

import contextlib
import dataclasses
import json
import math
import os
import re
import shutil
import signal
import sys
import time
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from helpers import checkpoint_state
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from algos import cispo, dapo, dr_grpo, grpo, gspo, max_rl, opd, ppo, prime, reinforce_pp, remax, rloo, sdpo
from common import errors, placement, rewards
from common.data import arithmetic
from common.data import prompts as data
from common.data.tokenizer import load_tokenizer
from common.errors import BadInput, RunFailed
from common.preflight import folders, run_directory
from common.processes.child import import_algorithm
from common.run import checkpoint, directory, model_card, stopping, tracking
from common.trainer import model

ALGORITHMS = (grpo, dr_grpo, max_rl, gspo, cispo, rloo, reinforce_pp, remax, dapo, ppo, prime, opd, sdpo)


class Engine:
    """What a checkpoint knows of an engine."""

    weight_version = 7
    asleep = False

    def sleep(self) -> None:
        self.asleep = True


def step(policy, optimizer) -> None:
    """One optimizer step on made-up gradients, other ones each time: of equal ones Adam's momentum shows in nothing."""
    for i, parameter in enumerate(policy.parameters()):
        parameter.grad = parameter.detach() + 0.1 * (i % 3 - 1)
    optimizer.step()
    optimizer.zero_grad()


def values(policy) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().full_tensor().clone() for name, parameter in policy.named_parameters()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def start(models, world, run_dir, kind="untied", critic=False, reward=("gsm8k",), **saving) -> checkpoint.Saver:
    """A saver of a new run with a policy, or with a critic, too."""
    trained = {}
    for name in ["policy", "critic"][: 1 + critic]:
        trained_model = model.load(models[kind], world, torch.float32, value_head=name == "critic")
        trained[name] = (trained_model, torch.optim.AdamW(trained_model.parameters(), lr=1e-2, fused=True))
    loader = data.PromptLoader(data.load("arithmetic", data.Source(), "test", arithmetic.tokenizer(), 64), seed=0)
    saver = checkpoint.Saver(
        checkpoint.Saving(**saving),
        trained,
        loader,
        rewards.load(reward),
        Engine(),
        arithmetic.tokenizer(),
        torch.float32,
        world,
    )
    saver.run_dir = run_dir
    run_dir.mkdir(exist_ok=True)
    return saver


def policy_of(saver) -> dict[str, torch.Tensor]:
    return values(saver.trained["policy"][0])


def exported(folder) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).named_parameters())


@pytest.mark.parametrize("kind", ["untied", "tied", "grouped"])
def test_export_is_the_policy(models, world, tmp_path, kind):
    saver = start(models, world, tmp_path, kind)
    policy, optimizer = saver.trained["policy"]
    step(policy, optimizer)
    checkpoint.export(policy, arithmetic.tokenizer(), tmp_path / "model", torch.float32, world)
    assert same(exported(tmp_path), values(policy))
    assert load_tokenizer(str(tmp_path / "model"))[1] == [1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_export_is_loaded_in_the_data_type_in_which_it_was_written(models, world, tmp_path, dtype):
    """The masters are float32. transformers and vLLM take the data type from config.json."""
    policy = model.load(models["tied"], world, dtype)
    checkpoint.export(policy, arithmetic.tokenizer(), tmp_path / "model", dtype, world)
    written = load_file(tmp_path / "model/model.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {dtype}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").dtype == dtype
    assert AutoConfig.from_pretrained(tmp_path / "model").architectures == ["Qwen2ForCausalLM"]


def test_an_export_keeps_the_end_tokens_of_generation_config(models, world, tmp_path):
    """Phi-3's <|end|>, at which its responses stop, is named in no other file."""
    start = shutil.copytree(models["untied"], tmp_path / "start")
    (start / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 9]}))
    assert load_tokenizer(str(start))[1] == [1, 9]
    policy = model.load(str(start), world, torch.float32)
    for folder in (tmp_path / "model", start):  # the second is the folder that it was read from
        checkpoint.export(policy, arithmetic.tokenizer(), folder, torch.float32, world)
        assert load_tokenizer(str(folder))[1] == [1, 9] or folder == start


def test_a_parameter_without_a_gradient_yet_goes_on_as_it_would_have(models, world, tmp_path):
    """Adam's first step for it is its first also after a resume."""
    saver, unsaved = start(models, world, tmp_path), start(models, world, tmp_path)
    for policy, optimizer in (saver.trained["policy"], unsaved.trained["policy"]):
        for parameter in list(policy.parameters())[1:]:
            parameter.grad = parameter.detach() + 0.1
        optimizer.step()
        optimizer.zero_grad()
    saver.save(1, {})
    again = start(models, world, tmp_path)
    again.load(tmp_path / "checkpoints/step_000001")
    for each in (saver, unsaved, again):
        step(*each.trained["policy"])
        step(*each.trained["policy"])
    assert same(policy_of(unsaved), policy_of(saver)) and same(policy_of(unsaved), policy_of(again))


def test_the_engine_sleeps_while_a_checkpoint_is_loaded(models, world, tmp_path, monkeypatch):
    """Loading makes moments of all parameters, for which the plan has no room beside an awake one."""
    saver = start(models, world, tmp_path)
    step(*saver.trained["policy"])
    saver.save(1, {})
    again, training_state, asleep = start(models, world, tmp_path), checkpoint.training_state, []

    def noted(*given):
        asleep.append(again.engine.asleep)
        return training_state(*given)

    monkeypatch.setattr(checkpoint, "training_state", noted)
    again.load(tmp_path / "checkpoints/step_000001")
    assert asleep == [True]


def test_a_run_that_trains_other_parameters_does_not_go_on(models, world, tmp_path):
    """As without --train-vision: the tower would be that of --model again, without a word."""
    saver = start(models, world, tmp_path)
    step(*saver.trained["policy"])
    saver.save(1, {})
    again = start(models, world, tmp_path)
    next(again.trained["policy"][0].parameters()).requires_grad_(False)
    with pytest.raises(BadInput, match="[0-9,]+ parameters.* [0-9,]+; --model, --train-vision"):
        again.load(tmp_path / "checkpoints/step_000001")


def test_a_checkpoint_of_another_kind_of_device_goes_on_without_its_random_states(models, world, tmp_path, capsys):
    saver = start(models, world, tmp_path)
    step(*saver.trained["policy"])
    saver.save(1, {})
    file = tmp_path / "checkpoints/step_000001/state.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "device": "cuda"}))
    start(models, world, tmp_path).load(file.parent)
    assert "saved by 1 ranks (cuda), now 1 (cpu): it goes on, but not bit for bit" in capsys.readouterr().out


@pytest.mark.parametrize("async_save, kind, file_bytes", [(False, "untied", 2**28), (True, "tied", 100_000)])
def test_restored_training_goes_on_bit_for_bit(models, world, tmp_path, monkeypatch, async_save, kind, file_bytes):
    monkeypatch.setattr(checkpoint, "FILE_BYTES", file_bytes)
    saver = start(models, world, tmp_path, kind, async_save=async_save)
    step(*saver.trained["policy"])
    saver.loader.take(5)
    saver.save(3, {})
    at_save = policy_of(saver)
    drawn = torch.rand(3)
    step(*saver.trained["policy"])  # a save that is not written yet does not see this
    saver.finish_writing()
    torch.manual_seed(1)
    again = start(models, world, tmp_path, kind)
    folder = run_directory.find_checkpoint("auto", tmp_path)
    assert again.load(folder) == 3 and again.engine.weight_version == 6  # the push that follows makes it 7
    assert same(policy_of(again), at_save) and same(exported(folder), at_save)
    assert torch.equal(torch.rand(3), drawn)
    assert again.loader.take(3) == saver.loader.take(3)
    step(*again.trained["policy"])
    assert same(policy_of(again), policy_of(saver))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000003"]
    files = list((folder / "trainer").iterdir())
    assert {file.suffix for file in files} == {".safetensors"} and (len(files) > 10) == (file_bytes < 2**28)


def test_a_new_run_from_a_checkpoint_has_the_settings_of_its_own_flags(models, world, tmp_path):
    saver = start(models, world, tmp_path)
    step(*saver.trained["policy"])
    saver.save(1, {})
    again = start(models, world, tmp_path / "new")
    optimizer = again.trained["policy"][1]
    optimizer.param_groups[0] |= {"lr": 0.5, "weight_decay": 0.25}
    again.load(tmp_path / "checkpoints/step_000001")
    (group,) = optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == (0.5, 0.25)
    assert all(state["step"] == 1 for state in optimizer.state.values()), "the state is the checkpoint's"


def test_prompts_that_are_in_flight_are_drawn_again_after_a_resume(models, world, tmp_path):
    """With --max-inflight-batches 2 the next step's prompts are drawn before this one is saved, as by a signal."""
    saver = start(models, world, tmp_path)
    step(*saver.trained["policy"])
    saver.loader.take(8)
    saver.loader.trained_until = 8
    in_flight = saver.loader.take(8)
    saver.save(3, {})
    again = start(models, world, tmp_path)
    again.load(tmp_path / "checkpoints/step_000003")
    assert again.loader.take(8) == in_flight and again.sampled_again == len(in_flight)


def test_a_run_that_fails_saves_no_weights_that_are_not_finite(models, world, tmp_path):
    """They are of no use, and --resume auto would go on with them."""
    saver = start(models, world, tmp_path, critic=True)
    for trained in saver.trained.values():
        step(*trained)
    for name in ("policy", "critic"):
        last = list(saver.trained[name][0].parameters())[-1].to_local().detach().view(-1)[-1]
        before = last.item()
        for value in (math.nan, math.inf, -math.inf):
            last.fill_(value)
            saver.rescue(3, 0)
            assert not folders.complete(tmp_path), f"{value} in the {name}"
        last.fill_(before)
    saver.rescue(3, 0)
    assert [folder.name for folder in folders.complete(tmp_path)] == ["step_000003"]


QUOTA = OSError(122, "Disk quota exceeded")


@pytest.mark.parametrize(
    "module, name, error",
    [
        (checkpoint.dcp, "save", checkpoint.dcp.CheckpointException("write", {0: (QUOTA, None)})),  # on any rank
        (checkpoint, "write_model", QUOTA),  # on rank 0
        (checkpoint, "write_model", SafetensorError("Error while serializing")),
    ],
)
def test_a_save_that_fails_does_not_hide_why_the_run_does(
    models, world, tmp_path, monkeypatch, capsys, module, name, error
):
    """A quota is not seen beforehand, and the error of torch's checkpoints is no Exception."""
    saver = start(models, world, tmp_path)
    step(*saver.trained["policy"])

    def full(*given, **named):
        raise error

    monkeypatch.setattr(module, name, full)
    said = "SafetensorError: " if isinstance(error, SafetensorError) else "OSError: [Errno 122] Disk quota exceeded"
    for _ in range(2):  # the second call tries again
        saver.rescue(3, 0)
        assert re.search(f"not saved after step 3: .*{re.escape(said)}", capsys.readouterr().out)
    with pytest.raises(RunFailed, match=re.escape(said)) as failed:
        saver.save(3, {})
    assert failed.value.code == "disk-full"
    assert not folders.complete(tmp_path)


def test_an_asynchronous_save_that_fails_is_reported_once(models, world, tmp_path, monkeypatch):
    """The run may go on, or fail for another reason: its last state is saved then."""
    saver = start(models, world, tmp_path, async_save=True)
    step(*saver.trained["policy"])
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_model", lambda *given: (_ for _ in ()).throw(QUOTA))
        saver.save(3, {})
        with pytest.raises(RunFailed, match="Disk quota exceeded"):
            saver.finish_writing()
    saver.finish_writing()
    saver.rescue(3, 0)
    assert [folder.name for folder in folders.complete(tmp_path)] == ["step_000003"]


def test_a_run_that_fails_amid_an_update_saves_models_whose_weights_are_gathered(models, world, tmp_path):
    """As SDPO's teacher is, until the end of the update."""
    saver = start(models, world, tmp_path, critic=True)
    for trained in saver.trained.values():
        step(*trained)
    saver.trained["critic"][0].unshard()
    saver.rescue(3, 0)
    assert [folder.name for folder in folders.complete(tmp_path)] == ["step_000003"]


def test_the_first_push_after_a_checkpoint_of_sft_is_news_to_servers(models, world, tmp_path):
    """They take a push with a version that they have for one that they have missed nothing of."""
    saver = start(models, world, tmp_path)
    step(*saver.trained["policy"])
    saver.engine.weight_version = 0
    saver.save(3, {})
    saver.load(tmp_path / "checkpoints/step_000003")
    assert saver.engine.weight_version == 0


def test_a_checkpoint_is_due_after_every_so_many_steps_and_at_the_end(models, world, tmp_path):
    saver = start(models, world, tmp_path)
    saver.last_step = 5
    for every, due in ((2, [2, 4, 5]), (0, [5]), (5, [5]), (9, [5])):
        saver.saving = checkpoint.Saving(save_every=every)
        assert [number for number in range(1, 6) if saver.due(number)] == due


def test_a_run_of_other_prompts_does_not_go_on_without_a_word(models, world, tmp_path, capsys):
    """--resume auto goes on with a run as if it had not stopped. A new run may start from any checkpoint."""
    saver = start(models, world, tmp_path)
    step(*saver.trained["policy"])
    saver.save(1, {})
    folder = tmp_path / "checkpoints/step_000001"
    saver.data = "a row has another answer"
    saver.saving = checkpoint.Saving(resume="auto")
    with pytest.raises(BadInput) as failed:
        saver.check_fits(folders.state(folder), folder)
    assert failed.value.code == "data-changed"
    saver.saving = checkpoint.Saving(resume=str(folder))
    saver.check_fits(folders.state(folder), folder)
    assert capsys.readouterr().err.count("warning[data-changed]") == 1


def test_ranks_that_have_read_other_prompts_do_not_begin(models, world, tmp_path):
    """A file may differ between the nodes. Each rank would train on its own, and call it one run."""
    saver = start(models, world, tmp_path)

    def load_beside(other: data.PromptLoader) -> int:
        """Begin a run on two ranks, of which the other one has read these prompts."""
        mark = int(other.fingerprint()[:12], 16)
        of_the_other = iter([0, 0, mark, mark])  # its step, for both ends, and then the mark of its data
        saver.world = SimpleNamespace(
            min=lambda value: min(value, next(of_the_other)),
            max=lambda value: max(value, next(of_the_other)),
        )
        return saver.load(None)

    prompts = data.load("arithmetic", data.Source(), "test", arithmetic.tokenizer(), 64)
    assert load_beside(data.PromptLoader(prompts, seed=0)) == 0
    other_answer = [*prompts[:-1], dataclasses.replace(prompts[-1], answer="0")]
    for changed in (other_answer, prompts[:-1], prompts[::-1]):
        with pytest.raises(RunFailed, match="--dataset: the ranks have read different prompts") as failed:
            load_beside(data.PromptLoader(changed, seed=0))
        assert failed.value.code == "not-shared"


def test_all_ranks_save_and_stop_after_a_step_in_which_one_of_them_was_asked(models, world, tmp_path):
    """A launcher may send the signal to one rank only, and this is another one."""

    class Asked(placement.World):
        def max(self, value: float) -> float:
            return 1.0

    saver = start(models, world, tmp_path)
    step(*saver.trained["policy"])
    saver.world = Asked(**vars(world))
    saver.last_step = 9
    saver.step_done(3, {})
    assert saver.stopping and [folder.name for folder in folders.complete(tmp_path)] == ["step_000003"]


def test_a_run_that_fails_waits_for_the_save_that_is_being_written(models, world, tmp_path):
    saver = start(models, world, tmp_path, async_save=True)
    step(*saver.trained["policy"])
    saver.save(3, {})
    saver.rescue(3, 5)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000003"]
    assert folders.state(tmp_path / "checkpoints/step_000003").position == 0, "it was saved once more"
    saver.rescue(4, 2)  # its prompts begin where the caller says, wherever the loader is
    assert folders.state(tmp_path / "checkpoints/step_000004").position == 2


def test_a_resumed_run_that_fails_in_its_first_step_leaves_its_checkpoint_alone(models, world, tmp_path):
    start(models, world, tmp_path).save(3, {"eval/accuracy": 0.5})
    folder = tmp_path / "checkpoints/step_000003"
    resumed = start(models, world, tmp_path)
    resumed.load(folder)
    resumed.rescue(3, 0)
    assert folders.state(folder).accuracy == 0.5, "it was saved once more, without its evaluation"


def test_an_asynchronous_save_that_fails_is_noticed_before_the_next_one(models, world, tmp_path, monkeypatch):
    saver = start(models, world, tmp_path, async_save=True)
    with monkeypatch.context() as broken:
        broken.setattr(checkpoint, "write_model", lambda *given: os.stat(tmp_path / "absent"))
        saver.save(3, {})
        wait([saver.writing])
    with pytest.raises(RunFailed, match="cannot be written: FileNotFoundError"):
        saver.save(4, {})


def test_a_run_without_git_has_no_commit(world, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    described = directory.describe(grpo.Args(), "grpo", world)
    assert described["commit"] is None and described["uncommitted_changes"] is None


def test_what_is_trained_beside_the_policy_is_restored_too(models, world, tmp_path):
    saver = start(models, world, tmp_path, critic=True)
    step(*saver.trained["critic"])
    saver.save(1, {})
    again = start(models, world, tmp_path, critic=True)
    folder = tmp_path / "checkpoints/step_000001"
    again.load(folder)
    for both in (saver.trained, again.trained):
        step(*both["critic"])  # with Adam's momentum of the first
        step(*both["policy"])  # its first step, saving or not
    alone = start(models, world, tmp_path)
    step(*alone.trained["policy"])
    assert same(policy_of(alone), policy_of(saver)) and same(policy_of(alone), policy_of(again))
    critic = values(saver.trained["critic"][0])
    assert "score.weight" in critic and same(critic, values(again.trained["critic"][0]))
    assert AutoModelForCausalLM.from_pretrained(folder / "model").config.architectures == ["Qwen2ForCausalLM"]


def test_a_run_with_another_model_does_not_go_on(models, world, tmp_path):
    saver = start(models, world, tmp_path)
    step(*saver.trained["policy"])
    saver.save(1, {})
    folder = tmp_path / "checkpoints/step_000001"
    with pytest.raises(BadInput, match="saved with policy, and this run also has critic"):
        start(models, world, tmp_path, critic=True).load(folder)


def test_reward_weights_are_restored_for_the_same_rewards(models, world, tmp_path):
    file = tmp_path / "weights.json"
    file.write_text('{"weights": {"gsm8k": 1.0, "format": 0.1}}')
    saver = start(models, world, tmp_path, reward=(str(file),))
    saver.reward.weights, saver.reward.first_step = {"gsm8k": 1.0, "format": 0.5}, 1
    saver.save(4, {})
    folder = tmp_path / "checkpoints/step_000004"
    again = start(models, world, tmp_path, reward=(str(file),))
    again.load(folder)
    assert again.reward.state() == saver.reward.state()
    # Without a file, the command line has the weights.
    weighed = start(models, world, tmp_path, reward=("gsm8k", "format=0.2"))
    weighed.load(folder)
    assert weighed.reward.state() == {"weights": {"gsm8k": 1.0, "format": 0.2}, "first_step": 1}
    other = start(models, world, tmp_path, reward=("gsm8k=3",))
    other.load(folder)
    assert other.reward.weights == {"gsm8k": 3.0} and other.reward.first_step is None


class Cut(BaseException):
    """The process is killed here."""


def cut_after(monkeypatch, count: int) -> None:
    """`count` more operations on files happen, and none after them."""
    left = [count]

    def guard(function):
        def guarded(*given, **named):
            left[0] -= 1
            if left[0] < 0:
                raise Cut
            return function(*given, **named)

        return guarded

    for where, names in ((os, ("fsync", "mkdir", "unlink", "rmdir")), (Path, ("rename", "replace", "write_text"))):
        for name in names:
            monkeypatch.setattr(where, name, guard(getattr(where, name)))


def test_a_save_cut_off_anywhere_leaves_a_whole_newest_one(models, world, tmp_path, monkeypatch):
    """After 2 and 4: 6, for which 4 or 2 has to go. In a checkpoint stands the number of its save."""
    last = 6
    saver, number = start(models, world, tmp_path / "first", keep_checkpoints=1), [0]

    def write(folder) -> None:
        folder.mkdir()
        for name in "ab":
            (folder / name).write_text(str(number[0]))

    monkeypatch.setattr(checkpoint, "training_state", lambda *given: {})
    monkeypatch.setattr(checkpoint, "whole_weights", lambda *given, **named: {})
    monkeypatch.setattr(checkpoint.dcp, "save", lambda tensors, storage_writer: write(Path(storage_writer.path)))
    monkeypatch.setattr(checkpoint, "write_model", lambda policy, weights, tokenizer, folder, dtype: write(folder))

    def save(step: int, accuracy=None) -> None:
        number[0] += 1
        saver.save(step, {"eval/accuracy": accuracy})

    save(2, 0.8)
    save(4, 0.6)
    count, ended, seen = 0, False, set()
    while not ended:
        saver.run_dir = tmp_path / f"{count}"
        shutil.copytree(tmp_path / "first", saver.run_dir)
        with monkeypatch.context() as patch, contextlib.suppress(Cut):
            cut_after(patch, count)
            save(last, 0.9)
            ended = True
        newest = run_directory.find_checkpoint("auto", saver.run_dir)
        whole = {str(path.relative_to(newest)): path.read_text() for path in newest.rglob("*") if path.is_file()}
        facts = json.loads(whole.pop("state.json"))
        assert facts["step"] in (4, last) and whole.keys() == {"model/a", "model/b", "trainer/a", "trainer/b"}
        assert set(whole.values()) in ({"2"}, {str(number[0])})
        seen.add((newest.name, whole["model/a"] == "2"))
        save(8)  # removes what is left
        best = 2 if whole["model/a"] == "2" else last
        names = {path.name for path in (saver.run_dir / "checkpoints").iterdir()}
        assert names == {f"step_{best:06d}", "step_000008", "best.json"}
        count += 1
    assert count > 25
    assert seen == {("step_000004", True), (f"step_{last:06d}", False)}


def fake(run_dir, step: int, accuracy=None) -> None:
    folder = run_dir / f"checkpoints/step_{step:06d}"
    (folders.begin(folder) / "state.json").write_text(checkpoint_state(step, accuracy))
    folders.finish(folder)


def test_a_checkpoint_of_a_step_to_come_makes_room(tmp_path):
    """Somebody has deleted metrics.jsonl and starts again. The newest whole one is not lost before it."""
    fake(tmp_path, 2)
    fake(tmp_path, 4, 0.5)
    fake(tmp_path, 4, 0.75)
    assert [folders.state(folder).accuracy for folder in folders.complete(tmp_path)] == [None, 0.75]


ALL = [2, 4, 6, 8, 10]


@pytest.mark.parametrize("keep, stay", [(0, ALL), (1, [4, 10]), (2, [4, 8, 10]), (9, ALL)])
def test_the_last_and_the_best_stay(tmp_path, keep, stay):
    for number, accuracy in zip(ALL, (0.5, 0.75, None, 0.75, 0.25)):
        fake(tmp_path, number, accuracy)
        folders.rotate(tmp_path, keep)
        fake(tmp_path / "never evaluated", number)
        folders.rotate(tmp_path / "never evaluated", 1)
    assert [run_directory.saved_step(folder) for folder in folders.complete(tmp_path)] == stay
    said = json.loads((tmp_path / "checkpoints/best.json").read_text())
    assert said == {"folder": "step_000004", "step": 4, "eval/accuracy": 0.75}
    assert [path.name for path in (tmp_path / "never evaluated/checkpoints").iterdir()] == ["step_000010"]


def test_without_room_nothing_is_written(models, world, tmp_path, monkeypatch):
    saver = start(models, world, tmp_path, critic=True)
    policy, critic = (sum(p.numel() for p in trained.parameters()) for trained, _ in saver.trained.values())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2**40, 2**40, 3 * 2**20))
    with pytest.raises(RunFailed) as failed:
        saver.save(3, {})
    needed = (12 * (policy + critic) + 4 * policy) / 2**20
    assert str(failed.value).startswith(
        f"step 3: a checkpoint needs {needed:.1f} MiB, and {tmp_path} has 3.0 MiB left: make room there"
    )
    with pytest.raises(RunFailed, match="step 1: a checkpoint needs"):  # not only after hours
        next(saver.steps(tmp_path, 10))
    assert not (tmp_path / "checkpoints").exists()


def test_only_complete_checkpoints_are_found(tmp_path):
    for name, complete in (
        ("step_000002", True),
        ("step_000010", True),
        ("step_000020", False),
        ("step_000030.unfinished", True),
    ):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        if complete:
            (tmp_path / "checkpoints" / name / "state.json").write_text(checkpoint_state(int(name[5:11])))
    assert run_directory.find_checkpoint("auto", tmp_path).name == "step_000010"
    assert run_directory.find_checkpoint("auto", tmp_path / "nothing") is None
    assert run_directory.find_checkpoint("", tmp_path) is None
    for name in ("step_000020", "step_000030.unfinished/"):
        with pytest.raises(BadInput, match="--resume"):
            run_directory.find_checkpoint(f"{tmp_path}/checkpoints/{name}", tmp_path)
    older = str(tmp_path / "checkpoints/step_000002")
    with pytest.raises(BadInput, match=r"step_000002: --run-dir .* step_000010.*--resume auto"):
        run_directory.check_directory(str(tmp_path), older)
    assert run_directory.check_directory(str(tmp_path / "other"), older) == Path(older)


def test_steps_of_another_run_are_not_the_past_of_a_resumed_one(tmp_path):
    checkpoint = tmp_path / "a/checkpoints/step_000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text(checkpoint_state(2))
    other = tmp_path / "b"
    other.mkdir()
    (other / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(BadInput, match="another run"):
        run_directory.check_directory(str(other), str(checkpoint))
    (other / "metrics.jsonl").write_text('{"step": 3}\n')  # the first attempt of the same command
    assert run_directory.check_directory(str(other), str(checkpoint)) == checkpoint


@pytest.mark.parametrize("linked", ["checkpoints", "checkpoints/step_000002", "."])
def test_a_run_with_checkpoints_on_another_disk_goes_on(tmp_path, linked):
    """The folder on the other disk is not the run directory's, and yet it's this run's checkpoint."""
    run_dir, disk = tmp_path / "run", tmp_path / "disk"
    fake(run_dir, 2)
    (run_dir / "metrics.jsonl").write_text('{"step": 1}\n')
    (run_dir / linked).rename(disk)
    (run_dir / linked).symlink_to(disk)
    checkpoint = run_dir / "checkpoints/step_000002"
    assert run_directory.check_directory(str(run_dir), "auto") == checkpoint
    for named in (checkpoint, checkpoint.resolve()):
        assert run_directory.check_directory(str(run_dir), str(named)) == named


def test_a_resumed_run_without_a_checkpoint_says_that_it_begins_anew(tmp_path, capsys):
    fake(tmp_path / "run", 2)
    assert run_directory.check_directory(str(tmp_path / "run"), "auto") and not capsys.readouterr().out
    mistyped = str(tmp_path / "rnu")
    assert run_directory.check_directory(mistyped, "auto") is None
    assert mistyped in capsys.readouterr().out


def test_a_copy_of_a_checkpoint_can_be_resumed(tmp_path):
    fake(tmp_path, 2)
    copy = tmp_path / "checkpoints/step_000002-copy"
    shutil.copytree(tmp_path / "checkpoints/step_000002", copy)
    folders.check(copy)


def test_a_damaged_checkpoint_costs_no_save(tmp_path, capsys):
    for number in (2, 4, 6):
        fake(tmp_path, number, 0.5)
    (tmp_path / "checkpoints/step_000002/state.json").write_text("{}")
    folders.rotate(tmp_path, 1)
    assert [folder.name for folder in folders.complete(tmp_path)] == [f"step_{n:06d}" for n in (2, 4, 6)]
    assert "step_000002/state.json" in capsys.readouterr().err


def test_a_torn_line_is_no_step(world, tmp_path):
    """A run killed while it wrote metrics.jsonl goes on; so does one killed in its first moment."""
    lines = [json.dumps({"step": number}) + "\n" for number in range(4)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines) + '{"step": 4, "rew')
    tracking.Tracker(grpo.Args(run_dir=str(tmp_path)), "grpo", world, start=2).bar.close()
    assert (tmp_path / "metrics.jsonl").read_text() == "".join(lines[:3])
    assert json.loads((tmp_path / "run.json").read_text())["algorithm"] == "grpo"


@dataclasses.dataclass
class Flags:
    run_dir: str
    steps: int = 10
    seed: int = 0
    schedule: str = "constant"
    eval_every: int = 0
    dataset: tuple[str, ...] = ("arithmetic",)
    layout: placement.Layout = placement.Layout()
    source: data.TrainSource = data.TrainSource()


@pytest.mark.parametrize(
    "before, now, refused",
    [
        ({}, {}, ""),
        ({}, {"steps": 20, "eval_every": 5, "layout": placement.Layout(rollout_memory=0.5)}, ""),
        ({"seed": 1}, {}, "its run began with --seed 1, now 0. Use"),
        ({}, {"dataset": ("gsm8k", "math")}, "--dataset ['arithmetic'], now ['gsm8k', 'math']. Use"),
        ({}, {"source": data.TrainSource(template="t"), "seed": 2}, "--seed 0, now 2; --template '', now 't'. Use"),
        (
            {"schedule": "linear"},
            {"schedule": "linear", "steps": 20},
            "--steps 10, now 20 (with --schedule linear",
        ),
        ({"schedule": "linear"}, {"schedule": "linear", "eval_every": 20}, ""),
    ],
)
def test_another_configuration_is_refused(world, tmp_path, before, now, refused):
    began = directory.describe(Flags("elsewhere", **before), "grpo", world)
    (tmp_path / "run.json").write_text(json.dumps(began))
    check = partial(run_directory.check_configuration, Flags(str(tmp_path), **now))
    if refused:
        with pytest.raises(BadInput) as error:
            check("grpo")
        assert refused in str(error.value) and "\n" not in str(error.value)
    else:
        check("grpo")
    with pytest.raises(BadInput, match=r"grpo.py.* rloo.py"):
        check("rloo")
    run_directory.check_configuration(Flags(str(tmp_path / "new"), seed=5), "grpo")
    run_directory.check_configuration(Flags("", seed=5), "grpo")
    began["args"]["old_flag"] = 1
    (tmp_path / "run.json").write_text(json.dumps(began))
    with pytest.raises(BadInput, match="--old-flag 1, now None"):
        check("grpo")


def test_a_run_goes_on_with_changed_code_but_says_so(world, tmp_path, capsys):
    """The algorithm's file, and those of the reward and the environment. One that is gone is refused elsewhere."""
    file = tmp_path / "mine.py"
    file.write_text(
        "import dataclasses\n\n\n@dataclasses.dataclass\nclass Args:\n    run_dir: str\n    reward: tuple\n"
        "    environment: str\n    steps: int = 1\n    seed: int = 0\n\n\ndef main(args):\n    pass\n"
    )
    others = [tmp_path / "r.py", tmp_path / "g.py"]
    for other in others:
        other.write_text("1")
    reward = ("gsm8k=0", f"{others[0]}:score=1")
    args = import_algorithm(file).Args(str(tmp_path), reward, f"{others[1]}:Game")
    record = errors.redacted(json.dumps(directory.describe(args, "mine", world)))
    (tmp_path / "run.json").write_text(record)
    run_directory.warn_of_changed_code(args, tmp_path)
    assert capsys.readouterr().err == ""
    file.write_text(file.read_text() + "# another\n")
    for other in others:
        other.write_text("2")
    run_directory.warn_of_changed_code(args, tmp_path)
    said = capsys.readouterr().err
    assert said.startswith("warning[code-changed]") and all(str(path) in said for path in others) and "mine.py" in said
    older = {name: value for name, value in json.loads(record).items() if name != "code"}
    (tmp_path / "run.json").write_text(json.dumps(older))
    run_directory.warn_of_changed_code(args, tmp_path)
    assert capsys.readouterr().err == ""


def test_runs_of_one_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda form: "now")
    assert [tracking.new_folder("x") for _ in range(3)] == ["runs/x-now", "runs/x-now-2", "runs/x-now-3"]


@pytest.mark.parametrize("done", [0, 2])  # 0: an attempt that ended before its first checkpoint
def test_a_resumed_run_removes_the_responses_of_steps_that_it_repeats(world, tmp_path, done):
    for folder in ("rollouts", "evaluations"):
        (tmp_path / folder).mkdir()
        for name in ("step_000000", "step_000002", "step_000003", "step_000003 (copy)"):
            (tmp_path / f"{folder}/{name}.jsonl").touch()
    (tmp_path / "rollouts/refused_000004.jsonl").touch()
    tracking.Tracker(grpo.Args(run_dir=str(tmp_path)), "grpo", world, start=done).bar.close()
    stay = ["step_000000", "step_000002", "step_000003 (copy)"]
    for folder in ("rollouts", "evaluations"):
        left = sorted(path.stem for path in (tmp_path / folder).iterdir())
        assert left == [name for name in stay if done or name != "step_000002"], folder


def test_a_tracker_that_cannot_be_opened_ends_all_ranks(world, tmp_path, monkeypatch):
    def closed(*given):
        raise BadInput("--track wandb: cannot be opened")

    told = []
    monkeypatch.setattr(tracking.trackers, "Sink", closed)
    monkeypatch.setattr(tracking, "raise_together", lambda error: told.append(str(error)))
    tracking.Tracker(grpo.Args(run_dir=str(tmp_path), track="wandb"), "grpo", world).bar.close()
    assert told == ["--track wandb: cannot be opened"]


def test_flags_that_may_differ_are_flags():
    flags = [set(run_directory.flat(dataclasses.asdict(algorithm.Args()))) for algorithm in ALGORITHMS]
    assert set(run_directory.MAY_DIFFER) <= set.intersection(*flags)
    assert {"learning_rate", "seed", "dataset", "temperature", "group_size", "schedule", "dtype"}.isdisjoint(
        run_directory.MAY_DIFFER
    )


RANKS = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "8"}
NODES = "NNODES=2 NODE_RANK=... MASTER_ADDR=... NPROC_PER_NODE=4 bash scripts/launch/torchrun.sh"


@pytest.mark.parametrize(
    "given, environment, said",
    [
        ("--steps 9", {}, "python -u algos/grpo.py --steps 9"),
        ("--run_dir=x --resume auto --template t --run-dir y", {}, "python -u algos/grpo.py --template t"),
        ("", {**RANKS, "LOCAL_WORLD_SIZE": "8"}, "torchrun --nproc-per-node 8 algos/grpo.py"),
        ("", {**RANKS, "LOCAL_WORLD_SIZE": "4"}, NODES + " algos/grpo.py"),
    ],
)
def test_the_command_that_goes_on(monkeypatch, given, environment, said):
    monkeypatch.setattr(sys, "argv", ["algos/grpo.py", *given.split()])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-u", "algos/grpo.py", *given.split()])
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert stopping.command(Path("my run")) == f"{said} --run-dir 'my run' --resume auto"


def test_a_second_signal_leaves_at_once(monkeypatch):
    signals, before = stopping.StopSignals(), [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    signals.install()
    sent = []
    kill = os.kill
    monkeypatch.setattr(os, "kill", lambda *given: sent.append((*given, signal.getsignal(signal.SIGTERM))))
    try:
        with pytest.raises(KeyboardInterrupt):  # there is nothing to save
            kill(os.getpid(), signal.SIGTERM)
        assert not signals.asked
        signals.trained = True
        kill(os.getpid(), signal.SIGTERM)
        kill(os.getpid(), signal.SIGTERM)  # a launcher's, of the same Ctrl-C
        assert signals.asked == "SIGTERM" and not sent
        signals.since = time.monotonic() - 2 * stopping.ONE_REQUEST_SECONDS
        kill(os.getpid(), signal.SIGTERM)
        assert sent == [(os.getpid(), signal.SIGTERM, signal.SIG_DFL)]
    finally:
        signals.remove()
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == before


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: algorithm.__name__)
def test_a_dry_run_says_the_plan_and_loads_nothing(models, tmp_path, monkeypatch, capsys, algorithm):
    for module, name in ((placement, "init"), (model, "load")):
        monkeypatch.setattr(module, name, lambda *a, **k: pytest.fail("went on to load a model"))
    saving = checkpoint.Saving(dry_run=True, save_every=5)
    given = {"model": models["untied"], "dtype": "float32", "run_dir": str(tmp_path / "run"), "saving": saving}
    args = algorithm.Args(**{**algorithm.EMBEDDED, **given})
    errors.launch(algorithm.main, args)
    said = capsys.readouterr().out
    responses = args.prompts_per_step * args.group_size
    for part in (
        ": 0.8 M parameters, torch.float32",
        "7,844 to train on, 256 held out; up to 6 tokens",
        f"{args.prompts_per_step} prompts x {args.group_size} = {responses} responses of up to 48 tokens",
        f"4 of {responses // 4} responses",
        f"steps          {args.steps}: ",
        "starts         at step 1",
        "1 on CPU",
    ):
        assert part in said, said
    assert not (tmp_path / "run").exists()
    with pytest.raises(SystemExit) as left:  # what is wrong is still found
        errors.launch(algorithm.main, dataclasses.replace(args, prompts_per_step=7))
    assert left.value.code == 2


def test_an_exported_model_carries_a_card(tmp_path):
    """Front matter that a hub reads, what made the model, and how far it came, at the step that was saved."""
    args = {"model": "Org/Base", "dataset": ["gsm8k"], "reward": ["gsm8k"], "steps": 40, "seed": 3}
    run = {"algorithm": "grpo", "args": args, "argv": ["/home/me/algos/grpo.py", "--template", "a b"], "commit": "abc"}
    run |= {"versions": {"torch": "2.13"}, "hardware": {"ranks": 8, "device": "H100"}}
    (tmp_path / "run.json").write_text(json.dumps(run))
    rows = [{"step": 0, "eval/accuracy": 0.25}, *({"step": i, "reward/mean": i / 100} for i in range(1, 41))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = model_card.text(tmp_path, 30)
    _, front, body = text.split("---\n", 2)
    assert yaml.safe_load(front)["base_model"] == "Org/Base" and "grpo" in yaml.safe_load(front)["tags"]
    for part in (
        "commit `abc`",
        "30 of 40, seed 3, 8 rank(s) on H100",
        "torch 2.13",
        "torchrun --nproc-per-node 8 grpo.py --template 'a b'",
    ):
        assert part in body, body
    table = [line for line in body.splitlines() if line.startswith("| ") and line[2].isdigit()]
    assert table[0] == "| 0 |  | 0.250 |" and table[-1] == "| 30 | 0.300 |  |" and len(table) <= 14
    assert "/home/me" not in text
    for row in rows[10::10]:  # an evaluation between the steps that the table would show
        row["eval/accuracy"] = 0.5
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert model_card.text(tmp_path, 30).count(" 0.500 |") == 3
    # A hub does not know the folder of somebody's machine.
    args["model"] = str(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps(run | {"uncommitted_changes": True}))
    _, front, body = model_card.text(tmp_path, 30).split("---\n", 2)
    assert "commit `abc`, with uncommitted changes" in body and "uncommitted" not in text
    assert "base_model" not in yaml.safe_load(front)
    assert f"base model: `{tmp_path.name}`" in body and str(tmp_path) not in body
