"""speedrun/: an honest record repeats bit for bit, what was tampered with is refused, and the clock counts right.

All runs here are of the embedded model, through the code that the speedrun uses for SmolLM2.
"""

import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from cases import ALGORITHMS
from conftest import ROOT, launch
from helpers import load
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from transformers import AutoModelForCausalLM

from common.data import arithmetic
from common.data.prompts import Prompt
from common.errors import BadInput
from common.placement import Layout
from common.run import directory

clock, verify = load("speedrun/clock.py"), load("speedrun/verify.py")
entrant = load("speedrun/entrant.py")
referee, rules, run, Refused = verify.referee, verify.rules, verify.run, verify.Refused
JOB = referee.Job(arithmetic.WARM_START, "arithmetic", 0.2, 300, 48, cores=1, seeds=(0,))
FLAGS = ["--steps", "2", "--prompts-per-step", "8", "--mini-batches", "2", "--learning-rate", "2e-3"]
GRPO = ROOT / "algos/grpo.py"
# Of an honest entry's arguments, what the speedrun looks at.
ARGS = {"model": str(JOB.model), "dataset": ("questions.jsonl",), "reward": ("referee",), "environment": "", "seed": 0}


class Forked:
    """Stands in for a process: the fork server of the tests starts it, which saves the imports."""

    def __init__(self, words, folder, log, cores):
        self.returncode = None
        self.thread = threading.Thread(target=self.go, args=(words, folder, log))
        self.thread.start()

    def go(self, words, folder, log):
        result = launch(*words, cwd=folder, check=False)
        log.write_text(result.stdout + result.stderr)
        self.returncode = result.returncode

    def poll(self):
        return None if self.thread.is_alive() else self.returncode

    def wait(self):
        self.thread.join()
        return self.returncode

    def kill(self):
        """The process ends by itself when the referee no longer listens."""


@pytest.fixture(scope="module", autouse=True)
def forked():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(referee, "start", Forked)
        yield


@pytest.fixture(scope="module")
def honest(tmp_path_factory) -> Path:
    """A record of algos/grpo.py. This checkout may have changes that are not committed."""
    folder = tmp_path_factory.mktemp("records") / "0001-grpo"
    run.enter(JOB, folder, GRPO, FLAGS)
    change(folder, uncommitted_changes=False)
    return folder


@pytest.fixture
def record(honest, tmp_path) -> Path:
    """A copy to tamper with."""
    return Path(shutil.copytree(honest, tmp_path / honest.name))


def change(folder: Path, **changes) -> None:
    file = folder / "record.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes, indent=2))


def claim(folder: Path, **changes) -> None:
    """Change what record.json says of seed 0."""
    seeds = verify.read(folder)["seeds"]
    change(folder, seeds={"0": seeds["0"] | changes})


def rewrite(folder: Path, number: int, **changes) -> None:
    """Change a row of seed 0's CSV."""
    rows = verify.read_csv(folder / "seed0.csv")
    rows[number] |= changes
    run.write_csv(folder / "seed0.csv", referee.Outcome(rows, {}))


def edit_csv(folder: Path, old: str, new: str) -> None:
    file = folder / "seed0.csv"
    file.write_text(file.read_text().replace(old, new, 1))


# Records


@pytest.mark.slow
def test_an_honest_record_repeats_bit_for_bit(honest, capsys):
    record = verify.check(JOB, honest)
    assert verify.counts(JOB, record) and record["seeds"]["0"]["rollouts"] == 2
    claims, rollouts = record["seeds"]["0"], verify.read_csv(honest / "seed0.csv")
    assert claims["flops"] > rollouts[-1]["flops"], "training after the last rollout counts"
    assert claims["weights"] != record["start_model"], "these are the trained weights"
    verify.replay(JOB, honest, record, ())
    assert f"{record['flops'] / 1e12:.4g} TFLOPs" in capsys.readouterr().out


@pytest.mark.slow
def test_a_record_that_claims_another_seed_differs_in_the_first_rollout(record):
    (record / "seed0.csv").rename(record / "seed1.csv")
    change(record, seeds={"1": verify.read(record)["seeds"]["0"]})
    other = dataclasses.replace(JOB, seeds=(1,))
    with pytest.raises(Refused, match=r"seed 1: rollout 1: .*digest"):
        verify.replay(other, record, verify.check(other, record), ())


@pytest.mark.slow
def test_a_file_that_changes_its_prompts_is_refused_in_the_first_rollout(tmp_path):
    plain = "[prompt.ids for prompt in prompts],"
    source = GRPO.read_text()
    assert source.count(plain) == 1
    (tmp_path / "leak.py").write_text(source.replace(plain, "[[*prompt.ids, 12] for prompt in prompts],"))
    with pytest.raises(Refused, match="rollout 1: a prompt is not the plain prompt"):
        referee.play(JOB, tmp_path / "leak.py", FLAGS, 0)


def fewer_flops(folder: Path) -> None:
    """In all files, so that they agree with each other."""
    flops = verify.read(folder)["flops"] // 2
    for number, row in enumerate(verify.read_csv(folder / "seed0.csv")):
        rewrite(folder, number, flops=row["flops"] // 2)
    claim(folder, flops=flops)
    change(folder, flops=flops)


def more_right(folder: Path) -> None:
    claim(folder, right=JOB.held_out, **referee.interval(JOB.held_out, JOB.held_out))


@pytest.mark.parametrize(
    "tamper, says",
    [
        (fewer_flops, "rollout 1: flops"),
        (lambda folder: rewrite(folder, 0, reward=1.0), "rollout 1: reward 1.0"),
        (lambda folder: rewrite(folder, 1, digest="0" * 16) or claim(folder, digest="0" * 16), "rollout 2: digest"),
        (lambda folder: claim(folder, weights="0" * 16), "weights 0000"),
        (more_right, "right 300"),
        (lambda folder: change(folder, start_model="0" * 16), "the start model is"),
    ],
)
def test_files_that_agree_with_each_other_do_not_agree_with_a_replay(honest, record, monkeypatch, tamper, says):
    """The replay's rollouts are those of the honest record, which another test has shown."""
    rows, claims = verify.read_csv(honest / "seed0.csv"), verify.read(honest)["seeds"]["0"]

    def play(job, file, flags, seed, expected):
        trace = referee.Trace([], [], None, expected)
        for row in rows:
            trace.rows.append(row)
            trace.compare(row["rollout"])
        return referee.Outcome(rows, claims)

    monkeypatch.setattr(referee, "play", play)
    verify.replay(JOB, record, verify.check(JOB, record), ())
    tamper(record)
    with pytest.raises(Refused, match=says):
        verify.replay(JOB, record, verify.check(JOB, record), ())


def edit(folder: Path, old: str, new: str) -> None:
    file = folder / "train.py"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))


@pytest.mark.parametrize(
    "tamper, says",
    [
        (lambda folder: edit(folder, "clip_low: ", "clip_low : "), "changed after the run"),
        (lambda folder: edit(folder, "import dataclasses", "import dataclasses, os"), "imports os"),
        (lambda folder: (folder / "seed0.csv").unlink(), "seed0.csv"),
        (lambda folder: rewrite(folder, 1, responses=1), "responses"),
        (lambda folder: rewrite(folder, 1, tokens=1), "tokens"),
        (lambda folder: claim(folder, right=JOB.held_out), "accuracy"),
        (lambda folder: claim(folder, low=0.9), "low 0.9"),
        (lambda folder: claim(folder, flops=1), "fewer FLOPs"),
        (lambda folder: change(folder, flops=1), "not those of the seed that took the most"),
        (lambda folder: change(folder, seeds={}), "has seeds none; a record has 0"),
        (lambda folder: change(folder, seeds={"0": "all right"}), "seed 0 is not an object"),
        (lambda folder: claim(folder, right=150.5), '"right" of seed 0 must be a whole number, and is 150.5'),
        (lambda folder: claim(folder, digest=None), '"digest" of seed 0 must be a string, and is None'),
        (lambda folder: change(folder, versions=None), '"versions" of the record must be an object'),
        (lambda folder: edit_csv(folder, "digest", "digets"), "its columns are not"),
        (lambda folder: change(folder, seeds=["0"]), '"seeds" of the record must be an object'),
        (lambda folder: change(folder, flags=[3]), "a flag is not a string"),
        (lambda folder: claim(folder, right=999, **referee.interval(999, JOB.held_out)), "right 999, of 300"),
        (lambda folder: change(folder, flags=["--eval-prompts", "8"]), "--eval-prompts"),
        (lambda folder: change(folder, uncommitted_changes=True), "was not committed"),
        (lambda folder: change(folder, commit="--batch"), "'--batch' is not the full name of a commit"),
        (lambda folder: change(folder, commit=7), "7 is not the full name of a commit"),
        (lambda folder: change(folder, commit="0" * 40), f"commit {'0' * 40} is not in this repository; git fetch"),
    ],
)
def test_files_that_do_not_agree_are_refused_without_a_replay(record, tamper, says):
    tamper(record)
    with pytest.raises(Refused, match=says):
        verify.check(JOB, record)


@pytest.mark.parametrize("git", ["shallow clone", "no repository", "no git"])
def test_where_commits_are_missing_a_record_is_checked_without_its_commit(record, monkeypatch, tmp_path, capsys, git):
    change(record, commit="0" * 40)
    if git == "shallow clone":
        monkeypatch.setattr(directory, "git", lambda *words: "true" if words[0] == "rev-parse" else "")
    elif git == "no repository":
        monkeypatch.setattr(directory, "ROOT", tmp_path)
    else:
        monkeypatch.setenv("PATH", "")
    verify.check(JOB, record)
    assert "was not looked for: this is no full git clone" in capsys.readouterr().out


def test_a_table_with_another_number_is_found(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(verify, "PAGE", tmp_path / "README.md")
    page = (ROOT / "speedrun/README.md").read_text()
    wrong = re.sub(r"(\]\(records/\S+\) \| \d+\.\d\d)\d", r"\g<1>x", page, count=1)  # a record's PFLOPs
    assert wrong != page
    for text, code in ((page, 0), (wrong, 1)):
        verify.PAGE.write_text(text)
        with pytest.raises(SystemExit) as left:
            verify.main(verify.Args())
        assert left.value.code == code and ("not up to date" in capsys.readouterr().out) == bool(code)


def test_a_record_that_cannot_be_read_is_refused_and_not_a_traceback(honest, monkeypatch, tmp_path, capsys):
    """As a disk that was full leaves it. The other records are still checked."""
    monkeypatch.setattr(run, "RECORDS", tmp_path)
    shutil.copytree(honest, tmp_path / "0001-a")
    (tmp_path / "0001-a/record.json").write_text('{"flops": 1')
    shutil.copytree(honest, tmp_path / "0002-b")
    with pytest.raises(SystemExit) as left:
        verify.main(verify.Args(), JOB)
    said = capsys.readouterr().out
    assert left.value.code == 1 and "0001-a: refused: record.json" in said and "0002-b: its files agree" in said


@pytest.mark.parametrize(
    "args, says",
    [
        ({"check": True}, "Nothing was replayed; if a replay agrees, it counts"),
        ({"seeds": (7,)}, "None of its seeds was replayed"),
        ({"seeds": (0, 7)}, "verified; it"),
        ({"seeds": (0,)}, "verified; it"),
    ],
)
def test_only_what_was_replayed_is_called_verified(honest, monkeypatch, args, says):
    monkeypatch.setattr(verify, "replay", lambda *given: None)
    assert says in verify.verified(JOB, honest, verify.Args(records=(honest,), **args))


def test_a_person_reads_the_diff_also_without_a_replay(honest, capsys):
    """To what the file is nearest to, in the commit that the record names."""
    verify.verified(JOB, honest, verify.Args(records=(honest,), check=True))
    assert "train.py is algos/grpo.py" in capsys.readouterr().out


def test_the_diff_is_to_the_nearest_file(tmp_path):
    merged = (ROOT / "speedrun/records/0001-merged/train.py").read_text()
    (tmp_path / "train.py").write_text(merged.replace("betas=(0.9, 0.95)", "betas=(0.9, 0.99)"))
    commit = directory.git("rev-parse", "HEAD")
    for known in (commit, "0" * 40):  # the second is in no clone
        diff = rules.nearest_diff(tmp_path / "train.py", known)
        assert diff.startswith("--- speedrun/records/0001-merged/train.py"), diff[:200]
        assert [line for line in diff.splitlines() if line.startswith("+ ")] == ["+        betas=(0.9, 0.99),"]


def test_of_files_that_are_about_as_near_the_named_one_is_shown():
    """0002 has a line more in common with cispo.py, and says that it differs from grpo.py."""
    record = ROOT / "speedrun/records/0002-settled"
    diff = rules.nearest_diff(record / "train.py", json.loads((record / "record.json").read_text())["commit"])
    assert diff.startswith("--- algos/grpo.py\n")


def test_two_new_records_do_not_hide_behind_each_other(monkeypatch):
    """The commit that they name has neither, so the diff of each shows all that is new in it."""
    known = {"ls-tree": "algos/grpo.py\nalgos/README.md", "show": GRPO.read_text()}
    monkeypatch.setattr(directory, "git", lambda *words: known[words[0]])
    diff = rules.nearest_diff(ROOT / "speedrun/records/0001-merged/train.py", "c")
    assert diff.startswith("--- algos/grpo.py\n") and "def merge_equal" in diff


def test_a_record_is_not_compared_with_itself(monkeypatch):
    """The commit of 0001 has a file in 0001's folder, which may be nearly the same."""
    record = ROOT / "speedrun/records/0001-merged"
    texts = {"algos/grpo.py": GRPO.read_text()}
    texts["speedrun/records/0001-merged/train.py"] = (record / "train.py").read_text()

    def git(command: str, *words: str) -> str:
        return "\n".join(texts) if command == "ls-tree" else texts[words[0].partition(":")[2]]

    monkeypatch.setattr(directory, "git", git)
    assert rules.nearest_diff(record / "train.py", "c").startswith("--- algos/grpo.py\n")


def test_the_diff_is_printed_as_it_is(honest, monkeypatch, capsys):
    """A message hides what looks like a URL's password. In a diff that would hide code."""
    code = 'f"{0://{answers()}@}"'
    monkeypatch.setattr(rules, "nearest_diff", lambda *given: f"+x = {code}  # \x1b[8m")
    verify.verified(JOB, honest, verify.Args(records=(honest,), check=True))
    assert f"+x = {code}  # \\x1b[8m\n" in capsys.readouterr().out


def test_a_file_that_heeds_no_seed_is_refused(honest, record, monkeypatch):
    """Its seeds would be one run, and a seed of the reader's own would repeat it."""
    shutil.copy(record / "seed0.csv", record / "seed1.csv")
    change(record, seeds={seed: verify.read(record)["seeds"]["0"] for seed in ("0", "1")})
    with pytest.raises(Refused, match="two seeds have the same digest"):
        verify.check(dataclasses.replace(JOB, seeds=(0, 1)), record)
    same = referee.Outcome([], verify.read(honest)["seeds"]["0"])
    monkeypatch.setattr(referee, "play", lambda *given: same)
    with pytest.raises(Refused, match="seed 7: it repeats another seed"):
        verify.replay(JOB, honest, verify.read(honest), (7,))


def test_seeds_need_a_record():
    with pytest.raises(BadInput, match="--seeds needs the folder"):
        verify.main(verify.Args(seeds=(7,)), JOB)


# Entering


TRAINED = referee.Outcome([dict.fromkeys(referee.COLUMNS, 1)], {"flops": 7, "weights": "weights", "seconds": 60})
EXAMINED = {"right": 150, "solved": "s", **referee.interval(150, 300)}
OUTCOME = referee.Outcome(TRAINED.rows, TRAINED.claims | EXAMINED)


def trained(weights: Path) -> referee.Outcome:
    """What referee.train() leaves and returns."""
    weights.mkdir()
    (weights / "weights").write_text("weights")
    return TRAINED


@pytest.fixture
def at_once(monkeypatch) -> SimpleNamespace:
    """Entering a record in no time. A test replaces train() or examine() by its own."""
    steps = SimpleNamespace(
        train=lambda job, file, flags, seed, weights: trained(weights), examine=lambda *given: EXAMINED
    )
    monkeypatch.setattr(referee, "train", lambda *given: steps.train(*given))
    monkeypatch.setattr(referee, "examine", lambda *given: steps.examine(*given))
    monkeypatch.setattr(
        referee, "digest_of", lambda folder: "".join(file.read_text() for file in folder.glob("weights"))
    )
    return steps


def test_a_record_has_the_file_that_ran_also_if_it_was_edited_meanwhile(at_once, tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text("first = 1\n")
    played = []

    def train(job, file, flags, seed, weights):
        played.append(file.read_text())
        mine.write_text("second = 2\n")
        return trained(weights)

    at_once.train = train
    run.enter(dataclasses.replace(JOB, seeds=(0, 1)), tmp_path / "0002-mine", mine, [])
    assert played == ["first = 1\n"] * 2 and (tmp_path / "0002-mine/train.py").read_text() == "first = 1\n"


def test_a_record_has_its_name_only_when_all_of_it_is_written(at_once, monkeypatch, tmp_path):
    def write_csv(file, outcome):
        raise OSError(28, "No space left on device")

    folder = tmp_path / "records/0002-mine"
    with monkeypatch.context() as full_disk, pytest.raises(OSError, match="No space"):
        full_disk.setattr(run, "write_csv", write_csv)
        run.enter(JOB, folder, GRPO, [])
    assert not folder.exists(), "the name is free for the next try"
    run.enter(JOB, folder, GRPO, [])
    assert [path.name for path in folder.parent.iterdir()] == ["0002-mine"]
    assert {path.name for path in folder.iterdir()} == {"train.py", "record.json", "seed0.csv"}


def test_a_record_goes_on_with_the_seeds_that_are_missing(at_once, tmp_path):
    played = []

    def train(job, file, flags, seed, weights):
        played.append(seed)
        if played == [0, 1]:
            raise Refused("the run did not reach its end")
        return dataclasses.replace(trained(weights), claims=TRAINED.claims | {"seconds": len(played)})

    at_once.train = train
    both, folder = dataclasses.replace(JOB, seeds=(0, 1)), tmp_path / "0002-mine"
    with pytest.raises(Refused, match="did not reach"):
        run.enter(both, folder, GRPO, ["--steps", "3"])
    record = run.enter(both, folder, GRPO, ["--steps", "3"])
    assert played == [0, 1, 1], "seed 0 was kept"
    assert [record["seeds"][seed]["seconds"] for seed in "01"] == [1, 3]
    assert json.loads((folder / "record.json").read_text()) == record


@pytest.mark.parametrize("damage", ["", "changed", "removed"])
def test_a_seed_whose_evaluation_was_cut_off_is_evaluated_and_not_trained_again(at_once, tmp_path, damage):
    """Unless its weights are no longer those that it has trained."""
    played = []

    def train(job, file, flags, seed, weights):
        played.append("trained")
        return trained(weights)

    def examine(job, weights):
        played.append(f"evaluated {(weights / 'weights').read_text()}")
        if len(played) == 2:
            raise KeyboardInterrupt
        return EXAMINED

    at_once.train, at_once.examine = train, examine
    folder = tmp_path / "0002-mine"
    with pytest.raises(KeyboardInterrupt):
        run.enter(JOB, folder, GRPO, [])
    (weights,) = tmp_path.glob("0002-mine.unfinished/*/")
    if damage == "changed":
        (weights / "weights").write_text("other weights")
    elif damage == "removed":
        shutil.rmtree(weights)
    record = run.enter(JOB, folder, GRPO, [])
    assert played == ["trained", *["evaluated weights", *["trained"] * bool(damage)], "evaluated weights"]
    assert record["seeds"] == {"0": OUTCOME.claims}
    assert {path.name for path in folder.iterdir()} == {"train.py", "record.json", "seed0.csv"}


def test_weights_that_a_call_could_not_remove_are_no_part_of_the_record(at_once, monkeypatch, tmp_path):
    def interrupted(folder):
        raise KeyboardInterrupt

    folder = tmp_path / "0002-mine"
    with monkeypatch.context() as cut_off, pytest.raises(KeyboardInterrupt):
        cut_off.setattr(run.shutil, "rmtree", interrupted)
        run.enter(JOB, folder, GRPO, [])
    assert list(tmp_path.glob("0002-mine.unfinished/*.weights"))
    at_once.train = lambda *given: pytest.fail("the seed is done")
    assert run.enter(JOB, folder, GRPO, [])["seeds"] == {"0": OUTCOME.claims}
    assert {path.name for path in folder.iterdir()} == {"train.py", "record.json", "seed0.csv"}


@pytest.mark.parametrize(
    "changed, says",
    [
        ({"file": ROOT / "algos/rloo.py"}, "of another train.py. To go on"),
        ({"flags": ["--steps", "4"]}, "of another flags. To go on"),
        ({"commit": "d"}, "of another commit. To go on with it, restore what so_far.json names .git checkout c,"),
    ],
)
def test_the_seeds_of_a_record_run_alike(at_once, monkeypatch, tmp_path, changed, says):
    def train(job, file, flags, seed, weights):
        if seed == 1:
            raise Refused("killed")
        return trained(weights)

    at_once.train = train
    both, folder = dataclasses.replace(JOB, seeds=(0, 1)), tmp_path / "0002-mine"
    given = {"file": GRPO, "flags": ["--steps", "3"], "commit": "c"}
    monkeypatch.setattr(run, "machine", lambda job: {"commit": given["commit"]})
    with pytest.raises(Refused, match="killed"):
        run.enter(both, folder, given["file"], given["flags"])
    given |= changed
    with pytest.raises(Refused, match=f"has seed 0 {says}"):
        run.enter(both, folder, given["file"], given["flags"])


@pytest.mark.parametrize(
    "words, git, says",
    [
        (["0002-mine", "algos/grpo.py"], {"commit": "c", "uncommitted_changes": True}, "git status shows changes"),
        (["0002-mine", "algos/grpo.py"], {"commit": None, "uncommitted_changes": None}, "no git checkout"),
        (["0002-mine", "algos/mien.py"], {"commit": "c", "uncommitted_changes": False}, "algos/mien.py: No such file"),
        (["../mine", "algos/grpo.py"], {}, "the name of a folder"),
        (["--tyr", "algos/grpo.py"], {}, "the name of a folder"),
    ],
)
def test_what_can_be_refused_is_refused_before_the_training(monkeypatch, words, git, says):
    monkeypatch.setattr(run.directory, "code_and_machine", lambda *given: git | {"hardware": {"device": "a CPU"}})
    monkeypatch.setattr(referee, "train", lambda *given: pytest.fail("it has begun"))
    with pytest.raises(SystemExit, match=f"refused: .*{says}"):
        run.main(words, JOB)


def test_changes_count_in_all_code_that_a_record_depends_on(monkeypatch, tmp_path):
    """The file of the entry and the page may change."""
    counts = {"common/run/a.py": True, "scripts/bench/b.py": True, "speedrun/c.py": True}
    counts |= {"speedrun/README.md": False, "speedrun/records/0003-d/train.py": False, "algos/mine.py": False}
    git = ["git", "-C", tmp_path, "-c", "user.name=n", "-c", "user.email=e"]
    for name in counts:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.setattr(directory, "ROOT", tmp_path)
    monkeypatch.setattr(referee, "check_machine", lambda job: None)
    assert run.machine(JOB)["uncommitted_changes"] is False
    for name, expected in counts.items():
        (tmp_path / name).write_text("2\n")
        assert run.machine(JOB)["uncommitted_changes"] is expected, name
        if expected:
            with pytest.raises(Refused, match=name):
                run.check_committed(run.machine(JOB))
        (tmp_path / name).write_text("1\n")


@pytest.mark.parametrize("commits", ["ab", "aab"], ids=["trained", "evaluated"])
def test_code_that_changed_while_it_ran_is_named(at_once, monkeypatch, tmp_path, commits):
    commits = iter(commits)
    monkeypatch.setattr(run, "machine", lambda job: {"commit": next(commits), "cores": 2})
    with pytest.raises(Refused, match="changed while it ran: commit was a, and is b"):
        run.enter(JOB, tmp_path / "0002-mine", GRPO, [])


def test_an_interrupt_says_what_goes_on(monkeypatch, tmp_path):
    def interrupted(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "RECORDS", tmp_path)
    monkeypatch.setattr(run, "check_committed", lambda about: None)
    monkeypatch.setattr(referee, "train", interrupted)
    with pytest.raises(SystemExit, match="interrupted.*same command"):
        run.main(["0002-mine", "algos/grpo.py"], JOB)


def test_a_record_has_one_writer(monkeypatch, tmp_path):
    monkeypatch.setattr(referee, "train", lambda *given: pytest.fail("it has begun"))
    with run.alone_in(tmp_path / "0002-mine.unfinished"), pytest.raises(Refused, match="another run.py is writing"):
        run.enter(JOB, tmp_path / "0002-mine", GRPO, [])
    with pytest.raises(BlockingIOError), run.alone_in(tmp_path / "0002-mine.unfinished"):
        raise BlockingIOError("of the run itself")  # nobody else writes there


@pytest.mark.parametrize("branches", ["", "origin/main"])
def test_a_commit_that_no_remote_has_is_named_before_the_training(monkeypatch, capsys, branches):
    answers = {"remote": "origin", "branch": branches}
    monkeypatch.setattr(directory, "git", lambda *words: answers[words[0]])
    run.check_committed({"commit": "c0ffee", "uncommitted_changes": False})
    assert ("no branch of a remote has commit c0ffee" in capsys.readouterr().out) == (not branches)


def test_a_process_ends_with_the_one_that_waits_for_it(tmp_path):
    """run.py that is asked to end leaves no training behind."""
    said = "f'{os.getpid()} {len(os.sched_getaffinity(0))}\\n'"
    (tmp_path / "waits.py").write_text(f"import os, time\nopen('id', 'w').write({said})\ntime.sleep(300)\n")
    lines = [
        "import sys",
        "from pathlib import Path",
        f"sys.path.insert(0, {str(ROOT / 'speedrun')!r})",
        "import referee",
    ]
    lines += ["referee.leave_when_asked()", "referee.finish(['waits.py'], Path.cwd(), Path('log'), 1)"]
    process = subprocess.Popen([sys.executable, "-c", "\n".join(lines)], cwd=tmp_path, env=referee.environment())
    while process.poll() is None and not ((tmp_path / "id").exists() and (tmp_path / "id").read_text().endswith("\n")):
        time.sleep(0.1)
    process.terminate()
    assert process.wait() == 128 + signal.SIGTERM
    number, cores = (tmp_path / "id").read_text().split()
    assert not Path(f"/proc/{number}").exists() and cores == "1", "it keeps to the cores that it is given"


def test_the_code_of_another_clone_is_refused(monkeypatch, tmp_path):
    """Its virtual environment, used in this clone, would take common/ from there, and so would the record's commit."""
    monkeypatch.setattr(referee, "ROOT", tmp_path)
    with pytest.raises(Refused, match=f"{ROOT / 'common'} and not {tmp_path / 'common'}"):
        run.machine(JOB)


def test_a_trial_trains_and_is_evaluated_on_training_problems_alone():
    training, held_out = referee.SPEEDRUN.problems()
    left, kept_out = referee.SPEEDRUN.trial().problems()
    questions = lambda rows: {row["question"] for row in rows}
    assert len(kept_out) == 512 and questions(kept_out) | questions(left) == questions(training)
    assert not questions(kept_out) & questions(left) and not questions(kept_out) & questions(held_out)


def test_a_trial_never_sees_the_held_out_problems(monkeypatch):
    played = []
    monkeypatch.setattr(referee, "play", lambda job, *given: played.append(job) or OUTCOME)
    run.main([run.TRIAL, str(GRPO)], JOB)
    assert played == [JOB.trial()]


@pytest.mark.slow
def test_a_trial_is_one_seed_and_writes_nothing(monkeypatch, tmp_path, capsys):
    """With adapters: only the merged model has the tensors of the start model."""
    monkeypatch.setattr(run, "RECORDS", tmp_path / "records")
    run.main(["--try", str(GRPO), *FLAGS, "--lora-rank", "4"], dataclasses.replace(JOB, seeds=(0, 1)))
    said = capsys.readouterr().out
    assert "rollout 2: reward" in said and "seed 0: " in said and "seed 1" not in said and "not a record" in said
    assert not (tmp_path / "records").exists()


# The entry's process


PLAIN, WRONG = [5, 6], [7, 8]  # a prompt and a response


class Recorder:
    """Stands in for the connection to the referee."""

    def __init__(self):
        self.told = []

    def tell(self, **message) -> None:
        self.told.append(json.loads(json.dumps(message)))


def sampled_by(prompt_ids, **named) -> dict:
    """What the referee hears of a call of an engine that answers each prompt with WRONG."""

    def generate(engine, prompt_ids, n, temperature, max_tokens, seed, done=None, reply=None):
        responses = [list(WRONG) for _ in prompt_ids]
        for index, response in enumerate(responses):
            if done is not None:
                done(index, [response], [False])
        return SimpleNamespace(response_ids=responses)

    wire = Recorder()
    entrant.reported(generate, wire, SimpleNamespace(flops=7))(None, prompt_ids, 1, 1.0, 4, seed=0, **named)
    (told,) = wire.told
    return told


def test_what_the_engine_was_asked_and_sampled_is_reported():
    told = {"prompts": [PLAIN], "responses": [WRONG], "flops": 7}
    assert sampled_by([PLAIN]) == sampled_by((torch.tensor(PLAIN),), reply=None) == told


def test_an_entry_that_grades_early_can_not_change_what_is_reported():
    asked = [[9, 9]]

    def done(index, token_ids, truncated):
        token_ids[0][:] = [1, 1]
        asked[0][:] = PLAIN

    told = sampled_by(asked, done=done)
    assert told["prompts"] == [[9, 9]] and told["responses"] == [WRONG]


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_an_entry_that_has_seen_samples_ends_with_the_error_of_its_call(monkeypatch, capsys, error):
    """It could catch the error of its own `done`, and nobody would have heard of the samples."""
    seen = []

    def done(index, token_ids, truncated):
        seen.extend(token_ids)
        raise error("seen")

    def left(code):
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", left)
    with pytest.raises(SystemExit, match="1"):
        sampled_by([[9, 9]], done=done)
    assert seen == [WRONG] and "seen" in capsys.readouterr().err


def test_an_environment_is_refused():
    """Its replies would run in threads, which the clock does not see, and would become a part of the responses."""
    with pytest.raises(RuntimeError, match="no environment"):
        sampled_by([PLAIN], reply=lambda index, turns: None)


@pytest.mark.parametrize(
    "changed, says",
    [
        ({}, ""),
        ({"model": "other"}, "model is 'other'"),
        ({"dataset": ("sums",)}, "dataset is"),
        ({"reward": ("gsm8k",)}, "reward is"),
        ({"environment": "calculator"}, "environment is"),
        ({"seed": 3}, "seed is 3"),
        ({"source": SimpleNamespace(eval_dataset=("sums",))}, "eval_dataset is"),
    ],
)
def test_a_run_is_prepared_with_the_data_of_the_flags(changed, says):
    forced = referee.forced_flags(JOB, 0)
    args = SimpleNamespace(**{**ARGS, "source": SimpleNamespace(eval_dataset=()), **changed})
    settings = prepared()
    prepare = entrant.with_the_flags_data(lambda args, models: settings, ["--dataset", "sums", *forced])
    if not says:
        assert prepare(args, ["policy"]) is settings
        return
    with pytest.raises(RuntimeError, match=rf"prepare\(\): {says}"):
        prepare(args, ["policy"])


def prepared(**changed) -> SimpleNamespace:
    """What prepare() returns to an honest entry, as far as it is looked at."""
    prompts = [Prompt("q:1", "2+3=", [5], None)]
    right = {"model": str(JOB.model), "reward_names": ("referee",), "prompts": prompts, "held_out": []}
    return SimpleNamespace(**{**right, "resume": None, "others": {}, **changed})


@pytest.mark.parametrize(
    "changed, says",
    [
        ({"reward_names": ("gsm8k",)}, "--reward is"),
        ({"model": "other"}, "--model 'other'"),
        ({"prompts": [Prompt("q:1", "2+3=", [5], "5")]}, "have answers"),
        ({"held_out": [Prompt("q:1", "2+3=", [5], "5")]}, "have answers"),
        ({"resume": Path("earlier/step_40")}, "resumes earlier/step_40"),
        ({"others": {"--teacher": "earlier"}}, "reads other models"),
    ],
)
def test_arguments_that_change_between_two_looks_are_found_in_what_was_prepared(changed, says):
    """A property can show the right data set once, and another one when it is read."""
    forced = referee.forced_flags(JOB, 0)
    args = SimpleNamespace(**ARGS, source=SimpleNamespace(eval_dataset=()))
    prepare = entrant.with_the_flags_data(lambda args: prepared(**changed), ["--dataset", "sums", *forced])
    with pytest.raises(RuntimeError, match=says):
        prepare(args)


def test_the_data_of_a_run_is_no_property():
    """It could show the right data set now, and another one later."""

    class Args(SimpleNamespace):
        dataset = property(lambda self: ("questions.jsonl",))

    words = {name: value for name, value in ARGS.items() if name != "dataset"}
    args = Args(**words, source=SimpleNamespace(eval_dataset=()))
    prepare = entrant.with_the_flags_data(lambda args: prepared(), referee.forced_flags(JOB, 0))
    with pytest.raises(RuntimeError, match="dataset is None"):
        prepare(args)

    class Another(SimpleNamespace):
        source = property(lambda self: SimpleNamespace(eval_dataset=()))

    with pytest.raises(RuntimeError, match="eval_dataset is None"):
        prepare(Another(**ARGS))
    assert not hasattr(prepare, "__wrapped__"), "with it an entry would have the function that looks at nothing"


def test_no_weights_are_loaded_but_the_start_models():
    load = entrant.only_the_start_model(lambda path, *given: path, "start")
    assert load("start", "world") == "start"
    with pytest.raises(RuntimeError, match="'learned_before' is not the start model"):
        load("learned_before", "world")


@pytest.mark.parametrize(
    "backend, path, layout",
    [
        ("hf", "start", Layout()),
        ("vllm", "learned_before", Layout()),
        ("vllm", "start", Layout(rollout_placement="split", rollout_devices=(1,))),
        ("vllm", "start", SimpleNamespace(split=False)),
    ],
)
def test_the_only_engine_is_the_one_that_is_reported(backend, path, layout):
    """Servers would sample in processes of their own, where no clock counts."""
    start = entrant.only_in_this_process(lambda backend, path, layout: "engine", "start")
    assert start("vllm", "start") == start("vllm", "start", layout=Layout()) == "engine"
    with pytest.raises(RuntimeError, match="the speedrun has one engine"):
        start(backend, path, layout=layout)


def told_by(tmp_path, lines: list[str]) -> tuple[int, str]:
    """Exit code of an entry's process with a file of these lines, and what it has told the referee.

    A process of its own: those of launch() never come to Python's end.
    """
    (tmp_path / "train.py").write_text("\n".join([*lines, ""]))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "referee"))
        listener.listen()
        words = ["--model", str(JOB.model), "--dataset", "q", "--reward", "referee", "--seed", "0"]
        words = [sys.executable, ROOT / "speedrun/entrant.py", tmp_path / "referee", "train.py", *words]
        code = subprocess.run(words, cwd=tmp_path, env=referee.environment()).returncode
        connection, _ = listener.accept()
        with connection, connection.makefile() as stream:
            return code, stream.read()


def test_nothing_runs_after_the_last_reading_of_the_clock(tmp_path):
    """The `finally` of a generator that hangs on the file's names would run when Python ends."""
    lines = ["def late():", "    try:", "        yield", "    finally:", "        open('late', 'w')"]
    code, told = told_by(tmp_path, [*lines, "waiting = late()", "next(waiting)", "own = [waiting]"])
    assert code == 0 and json.loads(told) == {"done": True, "flops": 0}
    assert not (tmp_path / "late").exists()


REFUSED_IN_THE_PROCESS = {  # a line of a file -> a part of the error
    "prepare(SimpleNamespace(), [])": "the speedrun sets",
    "model.load('other', None)": "is not the start model",
    "engines.start('vllm', 'other')": "the speedrun has one engine",
}


def test_the_entrys_process_has_all_of_its_guards(tmp_path):
    """They are tested one by one below. Here they are where a file meets them."""
    lines = ["from types import SimpleNamespace", "from common.preflight.prepare import prepare"]
    lines += ["from common.rollout import engines", "from common.trainer import model"]
    for line, part in REFUSED_IN_THE_PROCESS.items():
        lines += ["try:", f"    {line}", "except RuntimeError as error:", f"    assert {part!r} in str(error)"]
        lines += ["else:", "    raise SystemExit('it was not refused')"]
    lines += [
        "import threading, torch",
        "thread = threading.Thread(target=lambda: torch.ones(4, 4) @ torch.ones(4, 4))",
    ]
    code, told = told_by(tmp_path, [*lines, "thread.start()", "thread.join()"])
    assert code == 0 and json.loads(told) == {"done": True, "flops": 2 * 4**3}


def test_a_run_that_is_asked_to_stop_has_not_reached_its_end(tmp_path):
    """Otherwise it would save, and end as if it had trained for all of its steps."""
    lines = ["import os, signal", "from common.run.stopping import StopSignals", "signals = StopSignals()"]
    lines += ["signals.trained = True", "signals.install()", "os.kill(os.getpid(), signal.SIGTERM)"]
    assert told_by(tmp_path, lines) == (-signal.SIGTERM, "")


def test_variables_that_change_numbers_do_not_reach_the_entry(monkeypatch):
    for name in ("VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS", "MKL_CBWR", "TORCH_LOGS", "ATEN_CPU_CAPABILITY"):
        monkeypatch.setenv(name, "1")
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "LD_PRELOAD", "KMP_AFFINITY", "GOMP_CPU_AFFINITY"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    monkeypatch.setenv("HOME", "/here")
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # threads that sleep compute the same
    passed_on = referee.environment()
    changing = {name for name in passed_on if name.startswith(referee.NOT_PASSED_ON)}
    assert changing == {"TORCHDYNAMO_DISABLE", "OMP_WAIT_POLICY"}
    assert passed_on["TORCHDYNAMO_DISABLE"] == "1" and passed_on["HOME"] == "/here"
    fixed = {"PYTHONHASHSEED": "0", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    assert fixed.items() <= passed_on.items()


# The referee


def test_no_file_has_an_answer_while_the_entry_runs(monkeypatch, tmp_path):
    """Whatever the entry's process could read of the referee's."""
    monkeypatch.setattr(referee.tempfile, "tempdir", str(tmp_path))

    def watch(job, trace, folder, flags):
        assert (folder / "questions.jsonl").is_file()
        assert not [file for file in tmp_path.rglob("*.jsonl") if "answer" in file.read_text()]
        raise Refused("it has looked")

    monkeypatch.setattr(referee, "watch", watch)
    with pytest.raises(Refused, match="it has looked"):
        referee.play(JOB, GRPO, FLAGS, 0)


def test_the_evaluation_takes_the_weights_of_the_entry_and_nothing_else(monkeypatch, tmp_path):
    """A chat template could compute the answers, also one that somebody puts beside the weights before they are
    evaluated.
    """
    checkpoint = tmp_path / "run/checkpoints/step_000002"
    shutil.copytree(JOB.model, checkpoint / "model")
    (checkpoint / "state.json").write_text("{}")
    (checkpoint / "model/chat_template.jinja").write_text("The answer is 85.")
    (checkpoint / "model/tokenizer.json").write_text("{}")
    weights = tmp_path / "weights"
    referee.copy_weights(JOB, tmp_path, weights)
    assert [file.name for file in weights.iterdir()] == ["model.safetensors"]
    shutil.copy(checkpoint / "model/chat_template.jinja", weights)
    shutil.copy(checkpoint / "model/tokenizer.json", weights)

    def evaluate(job, model, held_out, folder):
        assert (model / "tokenizer.json").read_bytes() == (JOB.model / "tokenizer.json").read_bytes()
        assert not (model / "chat_template.jinja").exists()
        assert referee.digest_of(model) == referee.digest_of(checkpoint / "model")
        return [1, 1, 0]

    changed = {name: tensor + 1 for name, tensor in referee.read_weights(weights).items()}
    for folder in (weights, checkpoint / "model"):
        save_file(changed, folder / "model.safetensors")
    monkeypatch.setattr(referee, "evaluate", evaluate)
    assert referee.examine(JOB, weights)["right"] == 2
    other = {"model.embed_tokens.weight": torch.zeros(2, 2)}
    save_file(other, checkpoint / "model/model.safetensors")
    with pytest.raises(Refused, match="other tensors"):
        referee.copy_weights(JOB, tmp_path, tmp_path / "other")


def test_the_evaluation_is_of_the_trained_model_under_rule_2(monkeypatch, tmp_path):
    asked = []

    def finish(words, folder, log, cores):
        asked.append([str(word) for word in words])
        (folder / "evaluation.json").write_text(json.dumps({"results": [{"problems": {"greedy": [1.0, 0.0]}}]}))
        return 0

    monkeypatch.setattr(referee, "finish", finish)
    assert referee.evaluate(referee.SPEEDRUN, Path("trained"), [], tmp_path) == [1, 0]
    (words,) = asked
    assert words[words.index("--max-response-tokens") + 1] == "24" and words[words.index("--model") + 1] == "trained"


def test_a_run_is_judged_by_what_it_trained_and_by_its_last_reading_of_the_clock(monkeypatch):
    def watch(job, trace, folder, flags):
        trace.rows.append(dict.fromkeys(referee.COLUMNS, 5))
        return 9

    monkeypatch.setattr(referee, "watch", watch)

    def copy_weights(job, folder, weights):
        weights.mkdir()
        (weights / "trained.safetensors").touch()

    monkeypatch.setattr(referee, "copy_weights", copy_weights)
    monkeypatch.setattr(referee, "digest_of", lambda weights: f"digest of {[file.name for file in weights.iterdir()]}")
    is_trained = lambda model: [file.name for file in model.glob("*.safetensors")] == ["trained.safetensors"]
    monkeypatch.setattr(referee, "evaluate", lambda job, model, *given: [int(is_trained(model))] * 4)
    claims = referee.play(JOB, GRPO, FLAGS, 0).claims
    assert (claims["flops"], claims["weights"], claims["right"]) == (9, "digest of ['trained.safetensors']", 4)


def a_trace() -> referee.Trace:
    tokenizer = arithmetic.tokenizer()
    ids = lambda text: tokenizer.encode(text, add_special_tokens=False)
    return referee.Trace(
        [Prompt("train:0", "47+38=", ids("47+38="), "85"), Prompt("train:1", "10+11=", ids("10+11="), "21")],
        [Prompt("test:0", "20+30=", ids("20+30="), "50")],
        tokenizer,
    )


def test_the_referee_pays_for_sampled_tokens_alone():
    trace = a_trace()
    ids = lambda text: trace.tokenizer.encode(text, add_special_tokens=False)
    right, wrong = ids("#### 85"), ids("#### 84")
    trace.add([ids("47+38="), ids("10+11=")], [right, wrong, wrong, ids("#### 21")], flops=7)
    assert trace.rows[0] | {"digest": "", "seconds": 0} == {
        "rollout": 1,
        "prompts": 2,
        "responses": 4,
        "tokens": sum(map(len, (right, wrong, wrong, ids("#### 21")))),
        "reward": 0.5,
        "flops": 7,
        "digest": "",
        "seconds": 0,
    }
    assert trace.scores["47+38=", tuple(right)] == 1 and trace.scores["47+38=", tuple(wrong)] == 0
    assert ("10+11=", tuple(right)) not in trace.scores, "it was sampled for another prompt"


def test_a_reward_is_no_way_to_ask_for_an_answer(tmp_path):
    """A response that nobody sampled gets 0, although it is right."""
    trace = a_trace()
    right = trace.tokenizer.encode("#### 85", add_special_tokens=False)
    asked = {"grade": [["47+38=", right]]}
    prompt = trace.tokenizer.encode("47+38=", add_special_tokens=False)
    sampled = {"prompts": [prompt], "responses": [right], "flops": 1}
    log = tmp_path / "log"
    log.write_text("")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "referee"))
        listener.listen()
        replies = []

        def entry() -> None:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(tmp_path / "referee"))
                stream = connection.makefile("rw")
                for message in (asked, sampled, asked, {"done": True, "flops": 2}):
                    stream.write(json.dumps(message) + "\n")
                    stream.flush()
                    if "grade" in message:
                        replies.append(json.loads(stream.readline()))

        thread = threading.Thread(target=entry)
        thread.start()
        process = SimpleNamespace(poll=lambda: None, wait=lambda: 0)
        assert referee.converse(listener, process, trace, log) == 2
        thread.join()
    assert replies == [[0.0], [1.0]]


@pytest.mark.parametrize("sent", ['{"prompts": [[1, 2', "", '{"grade": [["47+38=", [5]]]}\n'])
def test_a_process_that_is_killed_amid_a_message_has_not_reached_its_end(tmp_path, sent):
    """In the last case it is gone before its answer comes."""
    (tmp_path / "log").write_text("enough")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "referee"))
        listener.listen()
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(tmp_path / "referee"))
            connection.sendall(sent.encode())
        process = SimpleNamespace(poll=lambda: None, wait=lambda: -9)
        says = (
            r"did not reach its end \(killed by signal 9, perhaps because memory is short\). Its last output:\nenough"
        )
        with pytest.raises(Refused, match=says):
            referee.converse(listener, process, a_trace(), tmp_path / "log")


def test_a_run_that_goes_on_after_its_end_is_refused(tmp_path):
    """A second end would have fewer FLOPs."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "referee"))
        listener.listen()
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(tmp_path / "referee"))
            connection.sendall(b'{"done": true, "flops": 9}\n{"done": true, "flops": 1}\n')
        process = SimpleNamespace(poll=lambda: None, wait=lambda: 0)
        with pytest.raises(Refused, match="went on after its end"):
            referee.converse(listener, process, a_trace(), tmp_path / "log")


def test_a_replay_that_samples_more_than_the_record_is_refused():
    trace = a_trace()
    trace.expected = []
    with pytest.raises(Refused, match="the record ends before it"):
        trace.compare(1)


@pytest.mark.parametrize("prompts, responses", [(["47+38="], []), ([], []), (["47+38=", "10+11="], [[5]])])
def test_a_rollout_without_as_many_responses_to_each_prompt_is_refused(prompts, responses):
    trace = a_trace()
    ids = [trace.tokenizer.encode(prompt, add_special_tokens=False) for prompt in prompts]
    with pytest.raises(Refused, match=f"rollout 1: {len(responses)} responses to {len(prompts)} prompts"):
        trace.add(ids, responses, flops=7)


def test_any_token_any_reward_and_any_earlier_rollout_changes_the_digest():
    ids = lambda text: arithmetic.tokenizer().encode(text, add_special_tokens=False)

    def digest(*rollouts) -> str:
        trace = a_trace()
        for prompt, response in rollouts:
            trace.add([ids(prompt)], [ids(response)], flops=7)
        return trace.digest

    last = ("47+38=", "85")
    found = [digest(last), digest(("47+38=", "84")), digest(("10+11=", "85"))]
    found += [digest(first, last) for first in (("47+38=", "85"), ("47+38=", "86"), ("10+11=", "21"))]
    assert len(set(found)) == len(found) and digest(last) == found[0]


@pytest.mark.parametrize(
    "prompt, says", [("20+30=", "held-out"), ("47+38=85", "not the plain prompt"), ("47+39=", "not the plain prompt")]
)
def test_only_plain_prompts_of_training_problems_are_sampled_from(prompt, says):
    trace = a_trace()
    with pytest.raises(Refused, match=f"rollout 1: a prompt is .*{says}"):
        trace.add([trace.tokenizer.encode(prompt, add_special_tokens=False)], [[5]], flops=7)


def test_the_speedrun_holds_out_2048_problems_that_nobody_trains_on():
    training, held_out = referee.SPEEDRUN.problems()
    questions = [{row["question"] for row in rows} for rows in (training, held_out)]
    assert len(training) == 7852 and len(held_out) == 2048 and not questions[0] & questions[1]
    published = {row["question"] for row in referee.tasks.problems("sums", "test")}
    assert published <= questions[1]


def test_the_target_is_for_the_lower_end_of_the_interval():
    """Of 2,048 problems 1,273 have to be right, which are 62.2 %."""
    assert referee.interval(1272, 2048)["low"] <= 0.6 < referee.interval(1273, 2048)["low"]
    record = {"seeds": {"0": referee.interval(1300, 2048), "1": referee.interval(1240, 2048)}}
    assert referee.interval(1240, 2048)["accuracy"] > 0.6 and not verify.counts(referee.SPEEDRUN, record)
    record["seeds"]["1"] = referee.interval(1300, 2048)
    assert verify.counts(referee.SPEEDRUN, record)


# Rules


# The teacher of opd is another model. sdpo reads hints through modules that reach the answers.
@pytest.mark.parametrize("name", sorted({*ALGORITHMS} - {"opd", "sdpo"}))
def test_every_algorithm_that_learns_from_rewards_may_enter(name):
    rules.check_file(ROOT / f"algos/{name}.py")


@pytest.mark.parametrize("name", ["opd", "sdpo", "sft", "dpo"])
def test_what_learns_from_a_teacher_or_from_answers_may_not(name):
    with pytest.raises(Refused, match="imports"):
        rules.check_file(ROOT / f"algos/{name}.py")


@pytest.mark.parametrize(
    "line, says",
    [
        ("from common.data import tasks", "imports common.data"),
        ("from common.data.tasks import problems", "imports common.data"),
        ("import numpy", "imports numpy"),
        ("import torchvision", "imports torchvision"),
        ("from . import tasks", "imports"),
        ("answers = job.data.tasks.problems", "no use for"),
        ("eval('1')", "no use for eval"),
        ("import torch\ntorch._C", "no use for ._C"),
        ("import torch\ntorch.mm = print", "changes torch.mm"),
        ("from common.rollout import engines\nengines.VLLMEngine.generate = print", "changes engines"),
        # Through what other modules have imported.
        ("from torch import os", "imports torch.os"),
        ("import torch.multiprocessing as mp", "imports torch.multiprocessing"),
        ("from torch.utils.data import DataLoader", "imports torch.utils.data"),
        ("from dataclasses import builtins", "imports dataclasses.builtins"),
        ("from common.preflight.prepare import prepare, data", "imports common.preflight.prepare.data"),
        ("from common.run.job import evaluation", "imports common.run.job.evaluation"),
        ("from common.trainer.lora import Path", "imports common.trainer.lora"),
        # To the answers of the built-in task, which is in this repository.
        ("args = dataclasses.replace(args, dataset=('sums',))", "sets dataset"),
        ("args.reward = ('gsm8k',)", "sets .reward"),
        ("right = prompts[0].answer", "no use for .answer"),
        # To the referee's files.
        ("job.Path('/tmp')", "no use for .Path"),
        ("settings.run_dir.write_text('x')", "no use for .write_text"),
        ("import torch\ntorch.save({}, '/tmp/evaluation.json')", "no use for .save"),
        # Away from the clock.
        ("from torch.utils._python_dispatch import _disable_current_modes", "imports torch.utils._python_dispatch"),
        ("import clock", "imports clock"),
        ("import torch\nclass T(torch.Tensor):\n    def __torch_dispatch__(cls): ...", "no use for __torch_dispatch__"),
        ("async def __torch_dispatch__(): ...", "no use for __torch_dispatch__"),
        ("Unseen = type('T', (torch.Tensor,), {})", "no use for type"),
        ("names = {'__torch_dispatch__': print}", "no use for the string '__torch_dispatch__'"),
        ("import torch\ntorch.ops.aten.slow_conv_dilated2d(1)", "no use for .ops"),
        ("import torch.fx", "imports torch.fx"),
        ("import torch\ntorch.fbgemm_pack_gemm_matrix_fp16(1)", "no use for .fbgemm_pack"),
        ("from torch import fbgemm_linear_fp16_weight", "imports torch.fbgemm_linear"),
        # To what is not the file's own.
        ("import torch.nn as m\nm.Linear.forward = print", "changes m.Linear.forward"),
        ("def f(x):\n    x[0].forward = print", r"changes x\[0\].forward"),
        ("engine.never = (1,)", "changes engine.never"),
        ("for engine.never in [(1,)]: ...", "changes engine.never"),
        ("engine.llm", "no use for .llm"),
        # An attribute by a pattern or a string.
        ("match random:\n    case object(_os=o): pass", "no use for a match by class"),
        ("match prompt:\n    case object(answer=a): pass", "no use for a match by class"),
        ("functools.update_wrapper(b, torch.Tensor, ['_make_subclass'], [])", "no use for .update_wrapper"),
        ("from functools import wraps", "imports functools.wraps"),
        ("args = dataclasses.replace(args, **{'dataset': ('sums',)})", "no use for the string 'dataset'"),
        ("args = dataclasses.replace(args, **{'reward': ('gsm8k',)})", "no use for the string 'reward'"),
        ("dataclasses.asdict(prompt)", "no use for .asdict"),
        ("dataclasses.astuple(prompt)", "no use for .astuple"),
        # To processes and files.
        ("breakpoint()", "no use for breakpoint"),
        ("from torch.utils import collect_env", "imports torch.utils.collect_env"),
        ("from torch.distributed.launcher import api", "imports torch.distributed.launcher"),
        ("import torch.distributed.checkpoint as dcp", "imports torch.distributed.checkpoint"),
        ("policy.save_pretrained('/tmp/x')", "no use for .save_pretrained"),
        # Code that is a string.
        ("torch.utils.cpp_extension.load_inline('x', 'int f(){}')", "no use for .cpp_extension"),
        ("from pydantic import ImportString", "imports pydantic.ImportString"),
        ("from typing import get_type_hints", "imports typing.get_type_hints"),
        ("__builtins__['open']", "no use for __builtins__"),
        # Through what the allowed modules have imported, and by other spellings.
        ("import re\nre.enum.bltns", "no use for .enum of re"),
        ("from typing import operator", "imports typing.operator"),
        ("import copy\ncopy.types.CodeType", "no use for .types of copy"),
        ("import dataclasses as d\nd.make_dataclass('T', [])", "no use for .make_dataclass"),
        ("import math\nmath.sumprod([1], [2])", "no use for .sumprod of math"),
        ("import random\nrandom.shuffle(order)", "no use for .shuffle of random"),
        ("from common.run import job\njob.torch.zeros(3)", "no use for .torch of common.run.job"),
        ("from common.run import job\njob.placement", "no use for .placement of common.run.job"),
        ("from common.run import job\njob.sampling.Prefetcher", "no use for"),
        ("from common.rollout import engines\nengines.vllm_engine", "no use for .vllm_engine"),
        ("import torch.nn.functional as F\nF.torch.zeros(3)", "no use for .torch of torch.nn.functional"),
        ("import torch.nn.functional as F\nF.np.matmul", "no use for .np of torch.nn.functional"),
        ("from torch import PyTorchFileReader", "imports torch.PyTorchFileReader"),
        ("from torch import from_file", "imports torch.from_file"),
        ("import torch as t\nt.load('x')", "no use for .load of torch"),
        ("import torch\nmodel = torch\nmodel.load('x')", "hands torch on"),
        ("import torch\nmodel = torch.nn\nmodel.os", "hands torch.nn on"),
        ("import torch\nf(torch)", "hands torch on"),
        ("import re as m\nimport torch as m\nm.compile(f)", "mine.py:2: m is re and torch"),
        ("import torch\ndef f(torch): ...", "gives torch another meaning"),
        ("from torch import *", r"imports torch\.\*"),
        ("from dataclasses import *", r"imports dataclasses\.\*"),
        ("x = 'prompts.__globals__'", "no use for the string"),
        ("x = '_' + '_torch_dispatch__'; y = '__x'", "no use for the string"),
        ("'{0.answer}'.format(prompt)", "no use for .format"),
        ("(folder / 'x').open()", "no use for .open"),
        ("run.tracker.run_dir", "no use for .run_dir"),
        ("run.prefetcher", "no use for .prefetcher"),
        ("job.outcomes", "no use for .outcomes"),
        ("numbers = settings.tokenizer('1 2', return_tensors='np')", "no use for .tokenizer"),
        ("from common.trainer import distillation", "imports common.trainer.distillation"),
        (f"x = 1;{' ' * 200}y = 2", "mine.py:1: more than 200 characters"),
        ("gradient.from_local(a)", "no use for .from_local"),
        ("(x for x in ()).gi_frame.f_builtins", "no use for .f_builtins"),
        # tyro and pydantic run the strings in annotations.
        ("class Args:\n    x: 'f(1)'", "would be run as code"),
        ("class Args:\n    x: list['f' '(1)']", "would be run as code"),
        ("class Args(list['f(1)']): ...", "would be run as code"),
        ("def f(x: list['f(1)']): ...", "would be run as code"),
        ("hint = list[text]\nclass Args:\n    x: hint", "an annotation with hint, which is a variable"),
        ("class Hints:\n    x = list[text]\nclass Args:\n    x: Hints.x", "an annotation with Hints.x"),
        ("class Args:\n    x: f(text)", "which is computed"),
        ("def Field(): ...", "gives Field another meaning"),
        ("from collections import deque as Literal", "gives Literal another meaning"),
        # `self` is the file's own where it is new. Any other method can be called with another object.
        ("class A:\n    def patch(self, f):\n        self.matmul = f\nA.patch(engine, print)", "set it in __init__"),
        ("class A:\n    def __init__(self, f):\n        self.mm = f\nA.__init__(engine, f)", "no use for .__init__"),
        ("class A:\n    def m(super):\n        super().__init__(f)", "gives super another meaning"),
        ("class A:\n    @f\n    def __init__(self):\n        self.x = 1", "changes self.x"),
        ("class A:\n    def __init__(self):\n        self = engine\n        self.x = 1", "gives self another meaning"),
        ("def patch(self, f):\n    self.matmul = f", "gives self another meaning"),
        ("f = lambda self: [0 for self.x in [1]]", "gives self another meaning"),
        ("class A:\n    def f(me, self):\n        self.x = 1", "gives self another meaning"),
        ("try: ...\nexcept Exception as self:\n    self.x = 1", "gives self another meaning"),
        # What is checked must not change before it is used.
        ("class Args:\n    @property\n    def dataset(self): ...", "defines dataset"),
        ("class Args:\n    reward = property(print)", "defines reward"),
        ("class Args:\n    model: str = 'other'", "defines model"),
        ("class Args:\n    (a, model) = property(f), property(f)", "defines model"),
        ("class Args:\n    x = (model := property(f))", "defines model"),
        ("class Args:\n    for reward in [property(f)]: ...", "defines reward"),
        ("class Args:\n    with f() as dataset: ...", "defines dataset"),
        ("class Args:\n    from torch import nan as model", "defines model"),
        ("class Args:\n    if x:\n        def model(self): ...", "defines model"),
        ("class Args:\n    def f(me, x=(model := property(g))): ...", "defines model"),
        ("class Args:\n    def f(me, *, x=(dataset := property(g))): ...", "defines dataset"),
        ("class Args:\n    x = lambda a=(model := property(g)): a", "defines model"),
        ("class Args:\n    @(reward := property(g))\n    def f(me): ...", "defines reward"),
        ("class Args:\n    @f(model := property(g))\n    class B: ...", "defines model"),
        ("class Args:\n    from common.trainer import model", "defines model"),
        ("x = " + "-" * 50_000 + "1", "nested too deeply"),
        ("x: int[" + "-" * 900 + "1]", "nested too deeply"),
        ("coroutine.cr_frame", "no use for .cr_frame"),
        ("error.__traceback__", "no use for .__traceback__"),
        ("f.tb_frame", "no use for .tb_frame"),
        # What a decorator or a metaclass makes of a class may be a string, which tyro would run in an annotation.
        ("@spell\nclass Word: ...\nclass Args:\n    x: Word = 0", "Word is decorated with spell"),
        ("import dataclasses\n@dataclasses.dataclass(spell)\n@spell()\nclass A: ...", "is decorated with spell"),
        ("dataclass = spell\n@dataclass\nclass Word: ...", "is decorated with dataclass"),
        ("class Word(metaclass=spell): ...\nclass Args:\n    x: Word = 0", "has a keyword, metaclass=spell"),
        ("class Word(**{'metaclass': spell}): ...", "has a keyword"),
        # Weights, checkpoints and engines by functions that entrant.py doesn't check.
        ("from common.trainer import model\nmodel.read_weights(p, '/old', c)", "no use for .read_weights"),
        ("from common.trainer.model import fill", "imports common.trainer.model.fill"),
        ("from common.rollout import engines\nengines.start_in_process(c)", "no use for .start_in_process"),
        ("from common import placement\nplacement.CONTAINER_LIMIT / '/old'", "no use for .CONTAINER_LIMIT"),
        ("from common import placement\nplacement.rounded_products()", "no use for .rounded_products"),
        ("run.load(folder)", "no use for .load"),
        ("run.saver", "no use for .saver"),
        ("x = 1 +", "invalid syntax"),
        ("x = '\0'", "null"),
        (f"answers = '{'7' * rules.LONGEST}'", "bytes"),
    ],
)
def test_a_file_that_reaches_for_answers_or_for_the_clock_is_refused(tmp_path, line, says):
    (tmp_path / "mine.py").write_text(f"{line}\n")
    with pytest.raises(Refused, match=says):
        rules.check_file(tmp_path / "mine.py")


@pytest.mark.parametrize(
    "text",
    [
        "class Mean:\n    'As in a __dict__.'\n    def __init__(self):\n        self.total = 0\n",
        "from torch import nn\nclass Head(nn.Module):\n    def __init__(self):\n        super().__init__()\n",
        "batch.response_mask &= graded\nbatch.baseline = 1\n",
        "class Sums:\n    def loss(self, model, reward=0):\n        return model.f_score + reward.tb_rate",
        "class Names:\n    all = [reward for reward in (1, 2)]",
        "import dataclasses\n@dataclasses.dataclass(frozen=True)\nclass Pair:\n    x: int = 0",
        "from common.trainer import model\npolicy = model.load(settings.model, world)",
        "from torch.nn.utils.rnn import pad_sequence\nimport torch\ntorch.is_grad_enabled()",
        "from common import errors\nraise errors.BadInput('x')",
        "import torch.utils.checkpoint\ntorch.utils.checkpoint.checkpoint(layer, x)",
        "import re\nnumber = re.compile('[0-9]+')\nnumber.findall(text)",
        "from typing import Literal\nclass Args:\n    x: Literal['a', 'b'] | None = None",
        "from typing import Annotated\nfrom pydantic import Field\nclass Args:\n    x: Annotated[int, Field(gt=0)] = 1",
    ],
)
def test_what_an_honest_file_may_need(tmp_path, text):
    (tmp_path / "mine.py").write_text(text)
    rules.check_file(tmp_path / "mine.py")


@pytest.mark.parametrize("encoding, says", [("utf-7", "utf-7"), ("latin-1", "iso-8859-1")])
def test_the_file_that_is_checked_is_the_one_that_runs(tmp_path, encoding, says):
    """Python takes the encoding in the first line. In utf-7, +AAo- is the end of a line."""
    (tmp_path / "mine.py").write_text(f"# coding: {encoding}\n# harmless +AAo-import os\n")
    with pytest.raises(Refused, match=f"its encoding is {says}"):
        rules.check_file(tmp_path / "mine.py")


@pytest.mark.parametrize("beginning", ["# -*- coding: utf8 -*-\n", "\ufeff"], ids=["utf8", "BOM"])
def test_utf_8_has_other_names(tmp_path, beginning):
    (tmp_path / "mine.py").write_text(f"{beginning}x = 1\n", encoding="utf-8")
    rules.check_file(tmp_path / "mine.py")


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(Refused, match="mien.py: .*No such file"):
        rules.check_file(tmp_path / "mien.py")


@pytest.mark.parametrize("flag", ["--model", "--seed=3", "--run_dir", "--eval-prompts", "--reward", "--resume"])
def test_flags_of_the_speedrun_are_not_the_entrys(flag):
    rules.check_flags(["--steps", "3", "--lora-rank", "8", "--learning-rate=-1"])
    with pytest.raises(Refused, match="the speedrun sets it"):
        rules.check_flags(["--steps", "3", flag, "x"])


# The clock

HIDDEN, WIDE, LAYERS = 128, 512, 3  # of the embedded model
LINEAR = LAYERS * (4 * HIDDEN**2 + 3 * HIDDEN * WIDE)  # weights that a token is multiplied with, without the head


def test_forward_and_backward_by_hand():
    """A product costs two per weight and token. Its backward is two products of the same size."""
    model = AutoModelForCausalLM.from_pretrained(arithmetic.WARM_START, attn_implementation="eager")
    tokens, vocabulary = 7, model.config.vocab_size
    with clock.Clock() as counted:
        logits = model(torch.arange(3, 3 + tokens)[None]).logits
    attention = LAYERS * 4 * tokens**2 * HIDDEN  # two products per head
    forward = 2 * tokens * (LINEAR + HIDDEN * vocabulary) + attention
    assert counted.flops == forward
    with clock.Clock() as counted:
        logits.sum().backward()
    assert counted.flops == 2 * forward


@pytest.mark.slow
def test_the_engine_by_hand():
    """The prompt is computed once, each sampled token but the last once more, and the head for each sampled token."""
    prompt = 5
    printed = launch(ROOT / "tests/workers/speedrun_clock.py", prompt, 6).stdout
    flops, sampled = map(int, re.search(r"flops (\d+) tokens (\d+)", printed).groups())
    padded_vocabulary = 64  # vLLM's
    pairs = prompt**2 + sum(prompt + more for more in range(1, sampled))  # of a query and a key
    linear = 2 * (prompt + sampled - 1) * LINEAR + 2 * sampled * HIDDEN * padded_vocabulary
    assert flops == linear + LAYERS * 4 * HIDDEN * pairs and sampled > 1


def test_products_count_in_whatever_way_they_are_written():
    a, b, vector = torch.ones(3, 5), torch.ones(5, 2), torch.ones(5)
    queries, keys = torch.ones(1, 4, 6, 8), torch.ones(1, 4, 9, 8)
    ways = {
        2 * 3 * 5 * 2: [
            lambda: a @ b,
            lambda: torch.einsum("ik,kj->ij", a, b),
            lambda: F.linear(a, b.T),
            lambda: torch.mm(a, b, out=torch.empty(3, 2)),
            lambda: torch.ones(3, 2).addmm_(a, b),
            lambda: torch.ones(1, 3, 2).baddbmm(a[None], b[None]),
            lambda: torch.bmm(a[None], b[None]),
            lambda: torch.tensordot(a, b, 1),
        ],
        2 * 3 * 5: [lambda: a @ vector, lambda: a.mv(vector), lambda: torch.ones(3, 5).addr_(a[:, 0], vector)],
        4 * 4 * 6 * 9 * 8: [lambda: F.scaled_dot_product_attention(queries, keys, keys)],
        0: [lambda: a * 2 + a.sum(), lambda: a.softmax(0).norm()],
    }
    for flops, functions in ways.items():
        for number, function in enumerate(functions):
            with clock.Clock() as counted:
                function()
            assert counted.flops == flops, (flops, number)
    with torch.inference_mode(), clock.Clock() as counted:
        F.linear(a, b.T)
        a @ b
    assert counted.flops == 2 * 2 * 3 * 5 * 2
    queries.requires_grad_()
    with clock.Clock() as counted:
        F.scaled_dot_product_attention(queries, keys, keys).sum().backward()
    assert counted.flops == (4 + 10) * 4 * 6 * 9 * 8


def test_a_product_without_a_formula_stops_the_run():
    indices, weights = torch.tensor([[0, 1]]), torch.ones(1, 2)
    for function in (
        lambda x: F.conv1d(x[None], x[None]),
        lambda x: torch.cdist(x, x),
        torch.linalg.inv,
        lambda x: torch.cholesky_solve(x, x),
        lambda x: torch.triangular_solve(x, x),
        lambda x: torch.ormqr(x, x[0], x),
        lambda x: F.embedding_bag(indices, x, per_sample_weights=weights, mode="sum"),
    ):
        with pytest.raises(clock.NoFormula), clock.Clock():
            function(torch.eye(4))


def test_without_gradients_composite_operations_count_too():
    """In inference mode torch hands them over whole."""
    a, b = torch.ones(6, 5), torch.ones(5, 4)
    flops = 2 * 6 * 5 * 4
    square = torch.ones(5, 5)
    narrow, wide = torch.ones(1, 1, 6, 1), torch.ones(1, 1, 6, 32)
    for number, (function, least) in enumerate(
        [
            (lambda: torch.inner(a, b.T), flops),
            (lambda: torch.matrix_power(square, 2), 2 * 5**3),
            (lambda: torch.cov(a), 2 * 6 * 6 * 5),
            # Its queries and keys are of width 1, and its values are not.
            (lambda: F.scaled_dot_product_attention(narrow, narrow, wide), 2 * 6 * 6 * 32),
        ]
    ):
        with torch.inference_mode(), clock.Clock() as counted:
            function()
        assert counted.flops >= least, number
    for function in (torch.inverse, lambda x: F.conv_transpose1d(x[None], x[..., None])):
        with pytest.raises(clock.NoFormula), torch.inference_mode(), clock.Clock():
            function(square)


def test_no_mode_of_gradients_changes_what_the_embedded_model_costs():
    """Twelve tokens."""
    model = AutoModelForCausalLM.from_pretrained(arithmetic.WARM_START, dtype=torch.float32)
    tokens = torch.arange(3, 15)[None]
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        with mode(), clock.Clock() as counted:
            logits = model(tokens).logits
        assert counted.flops == 19_255_296, mode
    with counted:
        logits.sum().backward()
    assert counted.flops == 57_876_480


@pytest.mark.parametrize(
    "name",
    [
        *("conv_tbc", "slow_conv_transpose2d", "slow_conv_dilated2d", "conv_depthwise3d", "_pdist_forward", "cdist"),
        *("_euclidean_dist", "geqrf", "orgqr", "linalg_matrix_exp", "matrix_exp_backward"),
        *("_transformer_encoder_layer_fwd", "_foreach_addmm", "fused_experts_cpu", "chunk_gated_delta_rule_cpu"),
        *("mamba_chunk_scan", "selective_scan_fwd", "grid_sampler_2d_backward", "affine_grid_generator"),
    ],
)
def test_an_operation_with_a_product_in_its_name_has_no_free_run(name):
    for namespace in ("aten", "_C"):
        with pytest.raises(clock.NoFormula):
            clock.cost_of(namespace, f"{namespace}::{name}")


@pytest.mark.parametrize(
    "name",
    [
        *("mla_decode_kvcache", "flash_mla_with_kvcache_cpu", "fp8_paged_mqa_logits_cpu", "selective_state_update_cpu"),
        *("inverse_gptj_rope_o_proj_cpu", "fused_sigmoid_gating_delta_rule_update_cpu", "hc_head_fused_cpu"),
        "an_operation_that_vllm_will_add",
    ],
)
def test_of_vllm_only_listed_operations_are_free(name):
    with pytest.raises(clock.NoFormula):
        clock.cost_of("_C", f"_C::{name}")
    assert clock.cost_of("_C", "_C::rms_norm") is None


@pytest.mark.parametrize("name", ["_to_copy", "convert_element_type", "copy", "exp", "cumsum", "softmax", "index_put"])
def test_elementwise_operations_are_free(name):
    assert clock.cost_of("aten", f"aten::{name}") is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.bfloat16, torch.int64])
def test_a_product_of_other_numbers_than_float32_stops_the_run(dtype):
    """A complex number holds two float32, so one product would do the work of two."""
    factor = torch.ones(4, 4, dtype=dtype)
    with pytest.raises(clock.NoFormula, match=rf"a product in {dtype}"), clock.Clock():
        factor @ factor


def test_an_entry_that_catches_the_error_has_no_product():
    out, wide = torch.zeros(4, 4, dtype=torch.float64), torch.ones(4, 4, dtype=torch.float64)
    with clock.Clock(), pytest.raises(clock.NoFormula):
        torch.mm(wide, wide, out=out)
    assert not out.any()


def test_a_factor_keeps_its_shape():
    """torch would make it as small as the result before the cost is computed."""
    left, right = torch.ones(4, 100), torch.ones(100, 4)
    with pytest.raises(clock.NoFormula, match="one of its factors"), clock.Clock():
        torch.mm(left, right, out=left)
    assert left.shape == (4, 100)


class Unseen(torch.Tensor):
    """torch turns the clock off before it calls this, so products in here would be free."""

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return torch.eye(4) @ torch.eye(4)


def test_a_tensor_that_would_compute_unseen_stops_the_run():
    unseen = torch.ones(3).as_subclass(Unseen)
    with pytest.raises(clock.NoFormula, match="Unseen"), clock.Clock():
        unseen * 2


def test_a_product_of_tensors_with_a_false_shape_has_its_cost(world):
    mesh = init_device_mesh("cpu", (1,))
    false = {"shape": torch.Size((1, 1)), "stride": (1, 1), "run_check": False}
    left, right = (DTensor.from_local(torch.ones(30, 30), mesh, [Replicate()], **false) for _ in range(2))
    with clock.Clock() as counted:
        torch.mm(left, right)
    assert counted.flops == 2 * 30**3


def test_products_count_in_threads_too(monkeypatch):
    """A pool's as well: one such samples ahead in common/run/sampling.py, and one grades."""
    factor, counted = torch.ones(4, 4), clock.Clock()
    monkeypatch.setattr(threading.Thread, "run", entrant.clocked(threading.Thread.run, counted))
    with counted, ThreadPoolExecutor(4) as pool, ThreadPool(2) as other:
        list(pool.map(lambda number: factor @ factor, range(100)))
        other.apply_async(lambda: factor @ factor).get()
        factor @ factor
    assert counted.flops == 102 * 2 * 4**3


def test_the_name_of_a_module_makes_no_tensor_trusted(monkeypatch):
    monkeypatch.setattr(Unseen, "__module__", "torch.mine")
    test_a_tensor_that_would_compute_unseen_stops_the_run()


# The page


def test_the_table_has_the_fewest_flops_first_and_records_that_miss_the_target_last(tmp_path):
    good, bad = referee.interval(1400, 2048), referee.interval(1000, 2048)
    for name, flops, after in (("0001-a", 5e15, good), ("0002-b", 1e15, bad), ("0003-c", 4e15, good)):
        claims = {"responses": 100, "seconds": 60, "flops": int(flops), "right": 1, **after}
        claims |= {"rollouts": 1, "tokens": 1, "digest": "", "weights": "", "solved": ""}
        record = {"train.py": "", "flags": [], "hardware": {}, "start_model": "", "flops": int(flops)}
        record |= {"versions": {}, "uncommitted_changes": False}
        (tmp_path / name).mkdir()
        (tmp_path / name / "record.json").write_text(json.dumps(record | {"seeds": {"0": claims, "1": claims}}))
    lines = verify.table(referee.SPEEDRUN, tmp_path).splitlines()[3:-1]
    assert [re.search(r"\[(.*?)\]", line)[1] for line in lines] == ["0003-c", "0001-a", "0002-b"]
    assert [line.split(" | ")[-1].rstrip(" |") for line in lines] == ["yes", "yes", "no"]


def test_the_committed_records_and_the_page_agree(capsys):
    with pytest.raises(SystemExit) as left:
        verify.main(verify.Args())
    assert left.value.code == 0, capsys.readouterr().out
