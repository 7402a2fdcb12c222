"""--selftest says what holds, and of each injected bug that it does not; a gap that is too wide gets its reason."""

import copy
import dataclasses
import json
import re
from functools import partial

import pytest
import torch
from conftest import ROOT, launch

from algos import dapo, dr_grpo, grpo, ppo, prime, remax, rloo
from common import (
    batching,
    checkpoint,
    data,
    diagnosis,
    embedded,
    model,
    placement,
    rewards,
    run,
    selftest,
    weight_sync,
)  # fmt: skip
from common.errors import RunFailed
from common.hf_engine import HFEngine

ROWS = ["rollout", "log-probs, as loaded", "gradient", "weight sync", "weights restored", "checkpoint"]
ROWS.append("Hugging Face export")
ALGORITHMS = (grpo, dr_grpo, rloo, remax, dapo, ppo, prime)


class Drops(HFEngine):
    """Never gets one of the parameters."""

    name = "model.layers.1.mlp.up_proj.weight"

    def load_weights(self, named_tensors):
        super().load_weights((name, tensor) for name, tensor in named_tensors if name != self.name)


class DropsNorm(Drops):
    name = "model.norm.weight"


class OnlyOnce(HFEngine):
    """Takes the first weights it is sent, and none after them."""

    def load_weights(self, named_tensors):
        super().load_weights(named_tensors if not self.weight_version else (pair for pair in named_tensors if False))


class OtherTemperature(HFEngine):
    """Samples at a temperature of its own."""

    own = 1.0

    def generate(self, prompt_ids, n, temperature, max_tokens, seed, done=None):
        return super().generate(prompt_ids, n, self.own, max_tokens, seed)


class OddTemperature(OtherTemperature):
    own = 0.45


class KeepsCache(HFEngine):
    """Answers prompts it was asked before the last update with the weights before it."""

    asked, cached, old = frozenset(), frozenset(), None

    def generate(self, prompt_ids, n, temperature, max_tokens, seed, done=None):
        prompts, now = {tuple(ids) for ids in prompt_ids}, self.model
        self.asked |= prompts
        self.model = self.old if prompts <= self.cached else now
        out = super().generate(prompt_ids, n, temperature, max_tokens, seed)
        self.model = now
        return out

    def load_weights(self, named_tensors):
        self.old, self.cached = copy.deepcopy(self.model), self.asked
        super().load_weights(named_tensors)


@pytest.fixture
def make(models, world):
    """(probe, saver) as a main makes them, with some variant of transformers' generate."""

    def make(kind="untied", engine=HFEngine, temperature=0.7, **compute):
        policy = model.load(models[kind], world, torch.float32)
        trained = {"policy": (policy, torch.optim.AdamW(policy.parameters(), lr=1e-3, fused=True))}
        engine = engine(models[kind], [1], world, torch.float32)
        prompts = data.load("arithmetic", data.Source(), "test", embedded.tokenizer(), 64)
        compute = batching.Compute(**{"token_budget": 10_000, **compute})
        saver = checkpoint.Saver(
            checkpoint.Saving(), trained, data.PromptLoader(prompts, 0), rewards.load(("gsm8k",)), engine,
            embedded.tokenizer(), torch.float32, world,
        )  # fmt: skip
        return diagnosis.Probe(policy, engine, prompts, temperature, 24, compute, world), saver

    return make


@pytest.fixture
def tried(monkeypatch, tmp_path, capsys):
    """Calls what makes a self-test for a run directory; returns which row holds. Nothing may be left on the disk."""
    monkeypatch.setattr(placement, "finish", lambda world, engine: engine.shutdown())  # the group is all tests'

    def tried(call) -> dict[str, bool]:
        failed = []
        try:
            call(str(tmp_path / "run"))
        except RunFailed as error:
            failed = [error]
        lines = capsys.readouterr().out.splitlines()
        table = [line for line in lines if line.endswith(("  holds", "  FAILS"))]
        rows = {name: line.endswith("holds") for name in ROWS for line in table if line.startswith(f"{name}  ")}
        assert not list(tmp_path.iterdir()) and list(rows) == ROWS and len(table) == len(ROWS)
        assert f"selftest: {sum(rows.values())} of 7 hold" in lines[-1]
        assert bool(failed) == (not all(rows.values()))
        for error in failed:
            assert error.code == "selftest-failed" and "\n" not in str(error)
            assert [name for name in ROWS if f"{name} (" in str(error)] == [name for name in ROWS if not rows[name]]
        return rows

    return tried


@pytest.mark.parametrize("kind", ["untied", "tied"])
def test_what_is_right_holds(make, tried, kind):
    probe, saver = make(kind, token_budget=100)
    assert all(tried(partial(selftest.run, probe, saver, 0.05)).values())


def test_short_prompts_may_be_shared(make, tried, monkeypatch):
    monkeypatch.setattr(batching, "SHORT_PROMPT", 1)
    probe, saver = make("tied and grouped")
    assert all(tried(partial(selftest.run, probe, saver, 0.05)).values())


def lose_last_tokens(monkeypatch):
    texts_of = batching.texts_of
    short = lambda texts: [(prompt, [response[:-1] for response in responses]) for prompt, responses in texts]
    monkeypatch.setattr(batching, "texts_of", lambda *given: short(texts_of(*given)))


def lose_last_micro_batch(monkeypatch):
    pack = batching.pack
    monkeypatch.setattr(batching, "pack", lambda *given: pack(*given)[:8])


def forget_the_optimizer(monkeypatch):
    monkeypatch.setattr(checkpoint, "fresh", list)  # all of them, as if none had stepped


def restore_nothing(monkeypatch):
    monkeypatch.setattr(checkpoint.dcp, "load", lambda *given, **named: None)


def export_badly(monkeypatch):
    write = checkpoint.write_model

    def rounded(policy, weights, *rest):
        write(policy, {name: tensor.bfloat16() for name, tensor in weights.items()}, *rest)

    monkeypatch.setattr(checkpoint, "write_model", rounded)


@pytest.mark.parametrize(
    "engine, bug, fail",
    [
        (Drops, None, ["weight sync"]),
        (DropsNorm, None, ["weight sync"]),
        (OnlyOnce, None, ["weights restored"]),
        (OtherTemperature, None, ["log-probs, as loaded", "weight sync", "weights restored"]),
        (HFEngine, lose_last_tokens, ["log-probs, as loaded", "weight sync", "weights restored"]),
        (HFEngine, lose_last_micro_batch, ["gradient"]),
        (HFEngine, forget_the_optimizer, ["checkpoint"]),
        (HFEngine, restore_nothing, ["checkpoint", "Hugging Face export"]),
        (HFEngine, export_badly, ["Hugging Face export"]),
    ],
)
def test_what_is_wrong_fails(make, tried, monkeypatch, engine, bug, fail):
    probe, saver = make("tied", engine)
    if bug:
        bug(monkeypatch)
    rows = tried(partial(selftest.run, probe, saver, 0.05))
    assert [name for name, holds in rows.items() if not holds] == fail


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: algorithm.__name__)
def test_every_algorithm_has_it(models, world, tried, monkeypatch, tmp_path_factory, algorithm):
    file = tmp_path_factory.mktemp("data") / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in embedded.problems("test")[:8]))
    monkeypatch.setattr(placement, "init", lambda *given: world)
    args = algorithm.Args(
        model=models["tied"], rollout_backend="hf", dtype="float32", max_response_tokens=24,
        saving=checkpoint.Saving(selftest=True), dataset=(str(file),),
    )  # fmt: skip
    trained = []
    saved = selftest.saved
    monkeypatch.setattr(selftest, "saved", lambda saver, folder: trained.extend(saver.trained) or saved(saver, folder))
    assert all(tried(lambda run_dir: algorithm.main(dataclasses.replace(args, run_dir=run_dir))).values())
    assert trained == ["policy", *{ppo: ["critic"], prime: ["prm"]}.get(algorithm, [])]


@pytest.mark.slow
@pytest.mark.parametrize("name, ranks, backend", [("grpo", 1, "vllm"), ("ppo", 2, "hf")])
def test_the_command_line(models, tmp_path, name, ranks, backend):
    flags = ["--model", models["tied"], "--selftest", "--rollout-backend", backend, "--max-response-tokens", 24]
    result = launch(ROOT / f"algos/{name}.py", *flags, "--eval-prompts", 0, ranks=ranks, cwd=tmp_path)
    assert "selftest: 7 of 7 hold" in result.stdout and f"{16 * ranks} responses" in result.stdout
    assert not list(tmp_path.iterdir())


def moved(probe) -> None:
    """The policy as after some updates."""
    selftest.perturb(probe.policy, probe.world, 0.15)


def explained(probe, bound: float = 0.05) -> tuple[str, str]:
    waited = []
    out = diagnosis.explain_gap(probe, probe.prompts[:8], lambda: waited.append(True), bound)
    assert waited and "\n" not in out[1]
    return out


def test_stale_weights_are_named(make):
    probe, _ = make("tied")
    moved(probe)
    code, why = explained(probe)
    assert code == "stale-weights" and "the engine had not got the trainer's weights" in why


@pytest.mark.parametrize("engine", [OtherTemperature, OddTemperature])
def test_another_temperature_is_named(make, engine):
    code, why = explained(make("untied", engine)[0])
    named = re.search(r"at temperature (\S+): the engine does not sample at --temperature 0.7,", why)
    assert code == "wrong-temperature" and float(named[1]) == pytest.approx(engine.own, rel=0.01)


def test_a_stale_cache_is_named(make):
    probe, _ = make("untied", KeepsCache)
    probe.sample([prompt.ids for prompt in probe.prompts[:4]], seed=9)
    moved(probe)
    weight_sync.push(probe.policy, probe.engine)
    code, why = explained(probe)
    assert code == "stale-cache" and "prefix cache" in why


def test_what_is_none_of_these_is_described(make):
    """Sending the weights again does not bring the one that never arrives."""
    probe, _ = make("untied", Drops)
    moved(probe)
    weight_sync.push(probe.policy, probe.engine)
    code, why = explained(probe, bound=0.002)
    assert code == "logprob-gap"
    assert re.search(r"it is 0\.\d+ at the first token and 0\.\d+ after it, and \d\d% of the", why), why


def test_a_gap_that_is_gone_is_not_explained_away(make):
    code, why = explained(make("untied")[0])
    assert code == "logprob-gap" and "this step's were sampled with other weights" in why


def test_the_gap_is_measured_by_hand(make, world):
    """Log-probs off by 0.1 at each first token and by 0.3 at the rest."""
    probe, _ = make("untied")
    batch = probe.sample(probe.some_prompts(), seed=1)
    batch.rollout_logprobs += 0.3 * batch.response_mask
    batch.rollout_logprobs[:, 0] -= 0.2
    gap, tokens = probe.gap(batch, bound=0.2), int(batch.response_mask.sum())
    assert (gap.first, gap.rest, gap.largest) == pytest.approx((0.1, 0.3, 0.3), abs=1e-4)
    assert gap.mean == pytest.approx(0.3 - 0.2 * len(batch) / tokens, abs=1e-4)
    assert gap.wide == pytest.approx(1 - len(batch) / tokens)
    batch.rollout_logprobs[0, 0] = torch.nan
    assert probe.gap(batch).largest == torch.inf


@pytest.mark.parametrize(
    "gap, staleness, stops", [(0.04, 0.0, False), (0.06, 0.0, True), (0.4, 0.5, False), (0.6, 0.5, True)]
)
def test_a_run_asks_why_only_where_it_stops(gap, staleness, stops):
    asked = []
    explain = lambda bound: asked.append(bound) or ("stale-cache", "it is so")
    metrics = {"step": 3, "mismatch/logprob_abs_mean": gap, "mismatch/staleness": staleness}
    if not stops:
        run.check(metrics, 0.05, explain)
    else:
        with pytest.raises(RunFailed) as failed:
            run.check(metrics, 0.05, explain)
        assert failed.value.code == "stale-cache"
        assert str(failed.value).startswith(f"step 3: trainer and engine disagree by {gap} per token, over --max-log")
        assert str(failed.value).endswith("; it is so")
    assert asked == [0.05] * stops
