"""Rollout files: what is in them, the pages made of them, and that a saved step can be computed again from them."""

import dataclasses
import json
import shutil

import pytest
import torch
from cases import ALGORITHMS
from conftest import ROOT, launch
from helpers import load
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from common import errors
from common.data import arithmetic as embedded
from common.data.prompts import Prompt
from common.rewards import grading
from common.rollout import rollout
from common.run import charts, report, traces
from common.run.sampling import Batch

view, replay = load("scripts/view_rollouts.py"), load("scripts/replay.py")
EVIL = "<script>alert(1)</script>\x1b[2J\u00e9\U0001f600"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte: a character beyond ASCII is several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *alphabet])}
    byte_level = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=byte_level, pad_token="<pad>", eos_token="<eos>")


@pytest.fixture(scope="module")
def run(tmp_path_factory, world):
    """A run directory with one step: two prompts, two responses each, the last of them not graded."""
    folder, tokenizer = tmp_path_factory.mktemp("run"), byte_tokenizer()
    config = embedded.config()
    config.vocab_size = len(tokenizer)
    config.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "run.json").write_text(json.dumps({"args": {"model": str(folder / "model")}}))
    (folder / "rollouts").mkdir()
    texts = [EVIL, "ab", "a\nb", "abc"]
    ids = [[*tokenizer(text)["input_ids"], 1] for text in texts]
    prompts = [Prompt("first", f"p {EVIL}", [5, 6], EVIL), Prompt("second", "q", [7], "2")]
    rows = [ids for ids in ([5, 6], [7]) for _ in range(2)]
    batch = rollout.collate(rows, ids, [[-1.0] * len(row) for row in ids], [False, True, False, False], 4, "cpu")
    batch.response_mask[3] = False
    greedy = rollout.collate([[5, 6], [7]], [[9, 1], [1]], None, [False, True], 4, "cpu")
    results = [
        grading.Result(1.0, 1.0, "box", {"parts": {"gsm8k": 1.0, EVIL: 0.5}}),
        grading.Result(0.0, 0.0, None, {"tensor": torch.tensor(2)}),
        grading.Result(0.25, 0.0),
        grading.Result(None, None, None, {"ungraded": "timeout"}),
    ]
    advantages = torch.tensor([0.5, -2.0, torch.nan, 0.0])
    old = batch.rollout_logprobs + torch.tensor([0.0, 0.0, 0.125, 0.0])[:, None]
    needed = torch.tensor([True, False, True, True])
    path = folder / "rollouts/step_000007.jsonl"
    values = torch.arange(4.0)[:, None].expand_as(old)
    batch = Batch.of(batch, prompts, texts, results)
    batch.baseline = Batch.of(greedy, prompts, ["", ""], results[:2])
    traces.write(path, world, batch, advantages, old, needed, values=values)
    return folder


def test_a_file_has_everything(run):
    rows = traces.read(traces.find(run, 7))
    assert [row["index"] for row in rows] == [0, 0, 1, 1] and [row["id"] for row in rows][::2] == ["first", "second"]
    first, second, third, last = rows
    assert (
        first["response"] == EVIL
        and first["prompt_ids"] == [5, 6]
        and first["weight_versions"] == [4] * len(first["response_ids"])
    )
    assert len(first["response_ids"]) == len(first["rollout_logprobs"]) == len(first["old_logprobs"])
    assert first["info"]["parts"]["gsm8k"] == 1.0 and first["score"] == 1.0 and first["advantage"] == 0.5
    assert [(row["score"], row["acc"]) for row in rows] == [(1.0, 1.0), (0.0, 0.0), (0.25, 0.0), (None, None)]
    assert second["old_logprobs"] is None and second["finish_reason"] == "length" and third["values"][0] == 2.0
    assert last["score"] is None and last["info"] == {"ungraded": "timeout"}
    assert [row["dropped"] for row in rows] == [False, False, False, True]
    assert (first["baseline_response_ids"], third["baseline_finish_reason"]) == ([9, 1], "length")
    assert (first["baseline_score"], third["baseline_score"], third["baseline_info"]) == (
        1.0,
        0.0,
        {"tensor": "tensor(2)"},
    )
    assert "baseline_response_ids" not in second


def test_values_that_nobody_asked_for_are_not_kept(run):
    (path,) = traces.saved(run).values()
    assert traces.read(path, ("index", "score"))[2] == {"index": 1, "score": 0.25}
    with pytest.raises(errors.BadInput, match="missing key 'nothing'"):
        traces.read(path, ("nothing",))


def test_responses_are_gathered_a_prompt_at_a_time(world, monkeypatch):
    """All tokens of all ranks at once would be gigabytes on rank 0."""
    gathered = []

    def gather(lines, everyone):
        gathered.append(lines)
        everyone[:] = [lines]

    monkeypatch.setattr(traces.dist, "gather_object", gather)
    found = traces.gathered(iter([["a", "b"], ["c"]]), world)
    assert [next(found), len(gathered), *found] == ["a", 1, "b", "c"] and len(gathered) == 2


def test_what_is_missing_is_named(run, tmp_path):
    with pytest.raises(errors.BadInput, match=r"--step 3: .* 7; --rollouts-every"):
        traces.find(run, 3)
    with pytest.raises(errors.BadInput, match=r"no rollouts/step_\*.jsonl"):
        traces.find(tmp_path)
    (tmp_path / "half.jsonl").write_text('{"index": 0}\n{"ind')
    with pytest.raises(errors.BadInput, match=r"half.jsonl:2: invalid JSON"):
        traces.read(tmp_path / "half.jsonl")


def test_a_file_that_cannot_be_read_ends_no_report(run, tmp_path):
    """Somebody has cut it. The run that goes on writes its report all the same."""
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 7, "reward/mean": 0.5}\n')
    (tmp_path / "run" / "rollouts" / "step_000009.jsonl").write_text('{"index": 0}\n{"ind')
    assert "not readable: " in report.write(tmp_path / "run").read_text()


def test_text_of_tokens_that_are_parts_of_characters():
    tokenizer = byte_tokenizer()
    text = "a \u00e9\U0001f600\u4e2d b"
    ids = tokenizer(text)["input_ids"]
    assert view.pieces(ids, tokenizer) == ["a", " ", "", "\u00e9", "", "", "", "\U0001f600", "", "", "\u4e2d", " ", "b"]
    cut = tokenizer("\U0001f600")["input_ids"][:2]  # the length limit cut a character in two
    assert "".join(view.pieces([*cut, *ids], tokenizer)).endswith(text[2:])
    assert len(view.pieces(cut, tokenizer)) == 2


@pytest.mark.parametrize("color", ["advantage", "value", "mismatch"])
def test_the_page_is_one_file_without_foreign_markup(run, tmp_path, color, capsys):
    out = tmp_path / "page.html"
    view.main(view.Args(run, html=str(out), color=color))
    page = out.read_text()
    assert "<script" not in page and "http:" not in page and "src=" not in page.replace("default-src=", "")
    assert page.count("&lt;") == 14  # 2 each: response, a part's name, prompt, twice the reference; four <eos>
    assert "\x1b" not in page and page.count("left the step, not graded") == 1
    assert page.count("<pre>") == 4 and str(out) in capsys.readouterr().out


def test_tokens_are_coloured_by_what_was_asked_for(run):
    rows = traces.read(traces.find(run))
    tokenizer = byte_tokenizer()
    shades = lambda row, color: {background for _, background, _ in view.tokens(row, tokenizer, 2.0, color)}
    assert shades(rows[0], "advantage") == {view.tint(0.5, 2.0, "advantage")}
    assert shades(rows[1], "advantage") == {view.RED} and shades(rows[2], "advantage") == {view.VIOLET}
    assert shades(rows[2], "value") == {view.GREEN} and shades(rows[0], "value") == {None}
    assert shades(rows[0], "mismatch") == {None} and shades(rows[1], "mismatch") == {None}
    assert view.tint(0.125, 0.125, "mismatch") == view.ORANGE
    assert view.tint(0.125, 0.125, "advantage") == view.GREEN and view.tint(-0.125, 0.125, "advantage") == view.RED
    assert shades(rows[2], "mismatch") == {view.tint(0.125, 2.0, "mismatch")}


def test_turns_of_an_episode_are_counted_and_what_the_environment_said_is_grey(run):
    row, *_ = traces.read(traces.find(run))
    assert "turns" not in view.headline(row)
    count = len(row["response_ids"])
    row["sampled"] = [1, 0, 0] + [1] * (count - 4) + [0]
    assert f"tokens {count - 3} (stop) | turns 2 | " in view.headline(row)
    grey = [background == view.GREY for _, background, _ in view.tokens(row, byte_tokenizer(), 2.0, "advantage")]
    assert grey == [not own for own in row["sampled"]]


def test_means_of_an_episode_leave_out_what_the_environment_said(run):
    """Log-probs and advantages are 0 there, so a long observation would push a response down."""
    episode, plain, *_ = traces.read(traces.find(run))
    for row, logprobs, mask in ((episode, [-1.0, -1.0, 0.0, 0.0], [1, 1, 0, 0]), (plain, [-1.0] * 4, [1] * 4)):
        row["response_ids"], row["rollout_logprobs"], row["sampled"] = [5] * 4, logprobs, mask
        row["weight_versions"] = [1] * 4
    episode["old_logprobs"], plain["old_logprobs"] = [-1.3, -1.3, 0.0, 0.0], [-1.2] * 4
    assert view.choose([plain, episode], view.Args(run, sort="mismatch")) == [episode, plain]
    episode["advantage"] = [0.5, 0.5, 0.0, 0.0]
    assert "advantage +0.5 " in view.headline(episode)


def test_the_report_has_the_advantage_of_the_policys_tokens(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    path = traces.find(tmp_path / "run")
    row, *_ = traces.read(path)
    row |= {"advantage": [0.5, 0.5, 0.0, 0.0], "sampled": [1, 1, 0, 0]}
    path.write_text(json.dumps(row) + "\n")
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 7}\n')
    assert "advantage +0.50" in report.write(tmp_path / "run").read_text()


def test_a_replayed_prompt_is_found_by_tokens_and_answer_if_other_data_sets_have_its_id():
    """One file that is read with two instructions, as in --dataset gsm8k:data data/train.jsonl."""
    row = {"index": 0, "id": "data/train.jsonl:1", "prompt_ids": [5, 6], "answer": "7"}
    of_data_sets = (("a", [5, 6], "7"), ("b", [5, 7], "7"), ("c", [5, 6], "8"))
    prompts = [Prompt(row["id"], "", ids, answer, dataset=name) for name, ids, answer in of_data_sets]
    for order in (prompts, prompts[::-1]):
        assert replay.ReplayLoader([row], order, 0).take(1) == [prompts[0]]
    with pytest.raises(errors.BadInput, match="the data set or the tokenizer is not the one of the run"):
        replay.ReplayLoader([row], prompts[1:], 0)


def test_the_terminal_gets_no_control_characters_of_a_response(run, capsys):
    view.main(view.Args(run / "rollouts/step_000007.jsonl"))
    said = capsys.readouterr().out
    assert "\x1b" not in said and "\u241b[2J" in said and "<script>" in said and "4 of 4 responses" in said
    (row,) = view.choose(traces.read(traces.find(run)), view.Args(run, grep="a\nb"))
    coloured = view.to_terminal(row, view.tokens(row, byte_tokenizer(), 1.0, "advantage"), True)
    assert "\x1b[30;48;2;190;120;255ma\x1b[0m" in coloured and "↵\x1b[0m\n" in coloured


def test_choice_and_order(run):
    rows = traces.read(traces.find(run))
    ids = lambda **flags: [rows.index(row) for row in view.choose(rows, view.Args(run, **flags))]
    assert ids() == [0, 1, 2, 3] and ids(limit=1) == [0] and ids(grep="alert") == [0, 1] and ids(grep="nothing") == []
    assert ids(sort="score") == [3, 1, 2, 0] and ids(sort="length")[0] == 0 and ids(sort="mismatch")[0] == 2


def test_without_its_tokenizer_a_file_is_still_shown(run, tmp_path, capsys):
    alone = tmp_path / "step.jsonl"
    alone.write_text(traces.find(run).read_text())
    view.main(view.Args(alone))
    shown = capsys.readouterr()
    assert "the tokenizer cannot be loaded" in shown.err and "abc" in shown.out
    view.main(view.Args(alone, html=str(tmp_path / "page.html")))
    page = (tmp_path / "page.html").read_text()
    assert "<script" not in page and "&lt;script&gt;" in page
    rows = [{name: value for name, value in row.items() if name != "values"} for row in traces.read(alone)]
    alone.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(errors.BadInput, match="--color value: "):
        view.main(view.Args(alone, color="value"))


@dataclasses.dataclass(frozen=True)
class Inner:
    columns: tuple[str, ...] = ()


@dataclasses.dataclass
class Outer:
    steps: int
    dataset: tuple[str, ...] = ("a",)
    inner: Inner = Inner()


def test_flags_come_back_from_json():
    args = Outer(3, ("b=1", "c=2"), Inner(("x=y",)))
    assert replay.rebuild(Outer, json.loads(json.dumps(dataclasses.asdict(args)))) == args
    with pytest.raises(errors.BadInput, match=r"run.json: \['gone'\]"):
        replay.rebuild(Outer, {"steps": 1, "gone": 2})


def test_rows_that_could_not_be_graded_stay_so(run):
    rows = [{"id": "x", "dropped": False, "info": {}, "score": 1.0, "acc": 1.0} for _ in range(2)]
    rows[1] |= {"dropped": True, "info": {"ungraded": "timeout"}, "score": 0.0, "acc": 0.0}
    batch = rollout.collate([[1]] * 2, [[1]] * 2, None, [False] * 2, 0, "cpu")
    batch = replay.Recorded(**vars(batch), rows=rows)
    results = replay.as_recorded([grading.Result(0.0, 0.0), grading.Result(1.0, 1.0)], batch)
    assert [result.score for result in results] == [0.0, 0.0] and results[1].info == {"ungraded": "timeout"}
    assert batch.response_mask.tolist() == [[True], [False]]
    with pytest.raises(errors.RunFailed, match="x: .*busy"):
        replay.as_recorded([grading.Result(0.0, 0.0, None, {"ungraded": "busy"})], batch)


@pytest.fixture(scope="module")
def replays(tmp_path_factory):
    """Tables of the replays of tests/workers/traces.py, and the directory of its runs."""
    folder = tmp_path_factory.mktemp("traces")
    tables = {}
    for ranks in (2, 1):
        launch(ROOT / "tests/workers/traces.py", folder, ranks=ranks, engine=False)
        tables |= json.loads((folder / f"replays-{ranks}.json").read_text())
    return folder, tables


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *ALGORITHMS,
        "opd-full",
        "sdpo-sampled",
        "fork",
        "ppo-guess",
        "remax-calculator",
        "grpo-squares",
        "2 ranks",
        "2 ranks on 1",
        "SGLang",
    ],
)
def test_a_replayed_step_is_the_step(replays, name):
    table = {row[0].split(",")[0]: row[1:] for row in replays[1][name]}
    assert {"loss/policy", "train/grad_norm", "score", "advantage", "old_logprobs"} <= set(table)
    assert table["train/grad_norm"][0] > 1e-3  # there was something to compute
    rounding = 5e-6 if name == "2 ranks on 1" else 1e-6  # the sum of two ranks' gradients, in float32
    assert max(difference for *_, difference in table.values()) <= rounding
    assert "values" in table or name != "ppo"


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage, seen",
    [
        ("other_token", {"loss/policy", "loss/kl", "train/grad_norm", "old_logprobs"}),
        ("other_advantage", {"advantage"}),  # computed again, it is what it was
        ("no_baselines", {"loss/policy", "train/grad_norm", "advantage", "old_logprobs"}),
    ],
)
def test_a_changed_file_is_noticed(replays, damage, seen):
    assert {row[0].split(",")[0] for row in replays[1][damage] if not row[-1] <= 1e-6} == seen


@pytest.mark.slow
def test_a_file_outside_algos_is_run_only_if_it_is_named(replays):
    """The fork has the name of a file in algos/, which is not what made the run."""
    run, file = replays[0] / "fork", replays[0] / "elsewhere/rloo.py"
    assert json.loads((run / "run.json").read_text())["file"] == str(file)
    assert json.loads((run.parent / "ppo/run.json").read_text())["file"] == "algos/ppo.py"
    with pytest.raises(errors.BadInput, match=f"{file}.* --file {file}"):
        replay.replay(run, 2)
    table = {row[0].split(",")[0]: row[1:] for row in replays[1]["another file"]}
    assert table["advantage"][-1] > 0.1 and table["score"][-1] == 0  # advantages are twice as large as they were


@pytest.mark.slow
def test_a_file_of_two_ranks_holds_the_rows_of_both(replays):
    rows = traces.read(replays[0] / "ranks/dapo/rollouts/step_000002.jsonl")
    assert [row["index"] for row in rows] == [i for i in range(4) for _ in range(4)]
    assert len({row["id"] for row in rows}) == 4


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 2])
def test_a_replay_has_the_date_of_its_run(replays, monkeypatch, tmp_path, step):
    """A chat template may print it. The first step has no checkpoint."""
    run = shutil.copytree(replays[0] / "dapo", tmp_path / "dapo")
    about = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(about | {"date": "2026-05-01"}))

    def run_step(algorithm, args, rows, step):
        raise LookupError(replay.run_directory.date_of(args.run_dir, args.saving.resume))

    monkeypatch.setattr(replay, "run_step", run_step)
    with pytest.raises(LookupError, match="2026-05-01"):
        replay.replay(run, step)


@pytest.mark.slow
def test_what_cannot_be_replayed_is_said(replays, monkeypatch):
    run = replays[0] / "dapo"
    with pytest.raises(errors.BadInput, match="--step 9: "):
        replay.replay(run, 9)
    assert replay.checkpoint_before(run, 1, "") == ""
    with pytest.raises(errors.BadInput, match=r"step 7 .*\[2, 3\]"):
        replay.checkpoint_before(run, 8, "")
    elsewhere = str(run / "checkpoints/step_000002")
    assert replay.checkpoint_before(run.parent / "none", 3, elsewhere) == elsewhere  # the run was resumed from there
    for difference, code in ((1e-7, None), (2e-6, 1)):
        row = replay.Comparison("loss/policy", 1.0, 1.0 + difference, difference)
        monkeypatch.setattr(replay, "replay", lambda *given, row=row: [row])
        if code:
            with pytest.raises(SystemExit, match="1"):
                replay.main(replay.Args(run, 2))
        else:
            replay.main(replay.Args(run, 2))


def test_a_prompt_is_shown_once_and_what_was_found_beside_the_reference(run, tmp_path, capsys):
    view.main(view.Args(run, sort="score"))
    said = capsys.readouterr().out
    assert said.count("--- prompt 1 (second)\nq\n") == 1 and said.count("--- prompt 1 (second)") == 2
    assert "found box | reference p" not in said and "found box | reference " in said and "found nothing" in said


def graded(index: int, *scores: float) -> list[dict]:
    given = {
        "prompt": f"prompt {index}",
        "answer": "7",
        "extracted": "8",
        "advantage": 0.0,
        "info": {},
        "finish_reason": "stop",
    }
    return [{"index": index, "response": f"{index}:{score}", "score": score, "acc": 0, **given} for score in scores]


def test_the_report_shows_mixed_groups_first_and_the_best_and_worst_of_each():
    rows = [*graded(0, 1, 1, 1, 1), *graded(1, 0.2, 0.9, 0.1, 0.8, 0.5, 0.4), *graded(2, 0, 0), *graded(3, 0, 1)]
    chosen = [[row["response"] for row in group] for group in report.choose(rows)]
    assert chosen == [["1:0.9", "1:0.8", "1:0.2", "1:0.1"], ["3:1", "3:0"], ["0:1"] * 4, ["2:0"] * 2]
    page = report.responses(rows)
    assert page.count("prompt 1") == 1 and page.count("found 8") == 12 and page.count("reference <b>7</b>") == 4


def panels(rows: list[dict]) -> dict[str, list[str]]:
    """title -> metrics, of all panels that a report of these rows shows."""
    every = [panel for section in charts.SECTIONS.values() for panel in section]
    return {panel.title: names for panel in every if (names := charts.shown(panel, rows))}


def test_the_report_has_a_panel_for_each_kind_of_metric_that_is_there():
    rows = [{"step": 0, "eval/accuracy": 0.5}]
    names = ["reward/mean", "reward/gsm8k/mean", "reward/format/mean", "train/grad_norm", "critic/grad_norm", "loss/kl"]
    names += ["train/clip_frac", "group/zero_std_frac", "response/truncated_frac", "time/step", "time/rollout"]
    names += ["mismatch/staleness", "mismatch/staleness_max"]
    rows += [{"step": step, **dict.fromkeys(names, 0.1 * step)} for step in (1, 2)]
    found = panels(rows)
    assert found["Seconds of a step"] == ["time/rollout"], "phases that are not there are not in the legend"
    assert found["Each reward"] == ["reward/format/mean", "reward/gsm8k/mean"]
    assert len(found) == 10 and "Entropy" not in found
    assert [charts.label(name, found["Gradient norm"]) for name in found["Gradient norm"]] == ["critic", "train"]
    assert charts.draw(rows).count("<svg") == len(found) and charts.draw([]) == ""
    overlapping = [row | {"overlapped/environment": 2.0, "overlapped/rollout": 3.0} for row in rows[1:]]
    assert panels(overlapping)["Waiting for environments"] == ["overlapped/environment"]
    current = [row | {"mismatch/staleness": 0.0} for row in rows[1:]]
    assert "Age of the weights" in found and "Age of the weights" not in panels(current)


def test_the_report_of_training_without_sampling_gives_no_advice_about_sampling():
    rows = [{"step": step, "train/loss": 1.0, "time/step": 2.0, "reward/accuracy": 0.5} for step in (1, 2)]
    assert report.times(rows) == ""
    pairs = panels([row | {"reward/chosen": 1.0, "reward/rejected": 0.0} for row in rows])
    assert list(pairs) == ["Share right", "Training loss", "Implicit rewards"]


@pytest.mark.parametrize("flag", ["step", "limit"])
def test_a_negative_number_of_responses_is_refused(tmp_path, flag):
    with pytest.raises(errors.BadInput, match=f"--{flag} -1: must be greater than or equal to 0"):
        view.main(view.Args(tmp_path, **{flag: -1}))


def test_the_report_shows_what_only_one_algorithm_measures():
    rows = [{"step": 1, "time/step": 2.0, "time/rollout": 0.5, "time/<i>": 1.5, "teacher/kl": 0.1, "mismatch/kl": 0.1}]
    assert charts.phases(rows) == ["rollout", "<i>"] and "The longest phase is &lt;i&gt;. Ways" in report.times(rows)
    assert panels(rows)["KL to another model"] == ["teacher/kl"]
