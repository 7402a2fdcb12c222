"""Bugs that would make log-probs wrong without an error, planted in both ways through the trainer.

A state or an attention that leaks from one sequence into the next, a window off by one, a forgotten cap, a wrong
position: each moves log-probs by more than 1e-3, a hundred times what the tests of the families allow. And the check at
the start sees those that texts of its length can show.
"""

from functools import cache

import families
import pytest
import torch
from families import rows_longer_than_a_window

from common.errors import BadInput
from common.trainer import attention, batching, forward, model, packing_check, unpacked
from common.trainer.parts import body_of

PACKED = batching.Compute(400)
UNPACKED = batching.Compute(400, packing="off")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("families")
    return cache(lambda name: families.save(name, folder))


def leak_attention(monkeypatch, policy=None) -> None:
    """Neighbours that answer the same prompt, or none, are one sequence."""
    add_sequence = attention.add_sequence

    def leaking(runs, sequence):
        add_sequence(runs, sequence)
        runs[-1].lengths = [sum(runs[-1].lengths)]

    monkeypatch.setattr(attention, "add_sequence", leaking)


def leak_state(monkeypatch, policy=None) -> None:
    """The packed row goes through the layers as it is."""

    def whole_row(model, micro):
        hidden = body_of(model)(input_ids=micro.input_ids, position_ids=micro.position_ids, use_cache=False)
        return hidden.last_hidden_state[0].index_select(0, micro.predictors)

    monkeypatch.setattr(unpacked, "hidden_states", whole_row)


def widen_window(monkeypatch, policy=None) -> None:
    causal_mask = attention.causal_mask
    monkeypatch.setattr(
        attention, "causal_mask", lambda q, p, window, device: causal_mask(q, p, window and window + 1, device)
    )


def widen_configured(name: str):
    def plant(monkeypatch, policy) -> None:
        for module in policy.modules():
            for part in (module, getattr(module, "config", None)):
                if isinstance(getattr(part, name, None), int):
                    setattr(part, name, getattr(part, name) + 1)

    return plant


def forget_score_cap(monkeypatch, policy=None) -> None:
    options = attention.ScoreOptions
    monkeypatch.setattr(
        attention, "ScoreOptions", lambda scale, window, cap, sinks: options(scale, window, None, sinks)
    )


def forget_score_cap_unpacked(monkeypatch, policy) -> None:
    packing_check.attend_with(policy, "sdpa")


def forget_logit_cap(monkeypatch, policy=None) -> None:
    logit_shape = forward.logit_shape
    monkeypatch.setattr(forward, "logit_shape", lambda *given: logit_shape(*given)._replace(cap=None))


def restart_positions(monkeypatch, policy=None) -> None:
    """A response counts from 0 again."""
    lay_out = batching.lay_out

    def restarted(contents, *rest):
        micro = lay_out(contents, *rest)
        positions = [range(n) for prompt, responses in micro.group_lengths for n in (prompt, *responses)]
        micro.position_ids = torch.tensor([[place for places in positions for place in places]])
        return micro

    monkeypatch.setattr(batching, "lay_out", restarted)


def pad_on_the_left(monkeypatch, policy=None) -> None:
    rows_of = unpacked.rows_of

    def padded(groups, device, beginning=0):
        places, predictors = rows_of(groups, device, beginning)
        longest = places.shape[1]
        lengths = [beginning + prompt + response for prompt, responses in groups for response in responses]
        moved = torch.stack([row.roll(longest - length) for row, length in zip(places, lengths)])
        row = predictors // longest
        return moved, predictors + longest - torch.tensor(lengths)[row]

    monkeypatch.setattr(unpacked, "rows_of", padded)


def read_one_too_early(monkeypatch, policy=None) -> None:
    rows_of = unpacked.rows_of
    monkeypatch.setattr(unpacked, "rows_of", lambda *given: (rows_of(*given)[0], (rows_of(*given)[1] - 1).clamp(min=0)))


def forget_bias(monkeypatch, policy=None) -> None:
    monkeypatch.setattr(forward, "factors", lambda model, hidden: (hidden, model.get_output_embeddings().weight))


def forget_scale(monkeypatch, policy=None) -> None:
    logit_shape = forward.logit_shape
    monkeypatch.setattr(forward, "logit_shape", lambda c, temperature: logit_shape(c, 1.0)._replace(temperature=0.7))


BUGS = [
    ("llama", PACKED, leak_attention),
    ("lfm2", UNPACKED, leak_state),
    ("qwen3_next", UNPACKED, leak_state),
    ("granitemoehybrid", UNPACKED, leak_state),
    ("mistral", PACKED, widen_window),
    ("mistral", UNPACKED, widen_configured("sliding_window")),
    ("llama4_text", UNPACKED, widen_configured("attention_chunk_size")),
    ("gemma2", PACKED, forget_score_cap),
    ("gemma2", UNPACKED, forget_score_cap_unpacked),
    ("gemma2", PACKED, forget_logit_cap),
    ("gemma2", UNPACKED, forget_logit_cap),
    ("llama", PACKED, restart_positions),
    ("gpt2", PACKED, restart_positions),
    ("gpt2", UNPACKED, pad_on_the_left),
    ("llama4_text", UNPACKED, pad_on_the_left),
    ("qwen3_next", UNPACKED, pad_on_the_left),
    ("llama", UNPACKED, read_one_too_early),
    ("phi", PACKED, forget_bias),
    ("falcon_h1", UNPACKED, forget_scale),
]


@pytest.mark.parametrize("name, compute, plant", BUGS)
def test_a_bug_moves_log_probs(name, compute, plant, saved, world, monkeypatch):
    rollout = rows_longer_than_a_window()
    policy = model.load(saved(name), world, torch.float32, compute)
    assert families.difference(policy, saved(name), rollout, compute, world) <= 1e-5
    plant(monkeypatch, policy)
    assert families.difference(policy, saved(name), rollout, compute, world) > 1e-3


@pytest.mark.parametrize("name, plant", [("llama", leak_attention), ("llama", restart_positions)])
def test_packed_rows_that_are_wrong_are_seen_at_the_start(name, plant, saved, world, monkeypatch, capsys):
    """Each sequence gets a row of its own, and its log-probs are right."""
    plant(monkeypatch)
    policy = model.load(saved(name), world, torch.float32, PACKED)
    assert not policy.packed and "because of packed rows" in capsys.readouterr().out
    assert families.difference(policy, saved(name), rows_longer_than_a_window(), PACKED, world) <= 1e-5
    with pytest.raises(BadInput, match="with --packing on, because of packed rows that change its hidden states"):
        model.load(saved(name), world, torch.float32, batching.Compute(400, packing="on"))


@pytest.mark.parametrize(
    "name, plant",
    [("lfm2", leak_state), ("gpt2", pad_on_the_left), ("qwen3_next", pad_on_the_left), ("llama", read_one_too_early)],
)
def test_padded_rows_that_are_wrong_are_refused_at_the_start(name, plant, saved, world, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(BadInput, match="models are not supported: their log-probs"):
        model.load(saved(name), world, torch.float32, UNPACKED)


@pytest.mark.parametrize("name, plant", [("phi", forget_bias), ("gemma2", forget_logit_cap)])
def test_products_that_are_not_the_logits_are_seen_at_the_start(name, plant, saved, world, monkeypatch):
    plant(monkeypatch)
    monkeypatch.setattr(packing_check, "factors", forward.factors)
    monkeypatch.setattr(packing_check, "logit_shape", forward.logit_shape)
    policy = model.load(saved(name), world, torch.float32, PACKED)
    assert not policy.knows_logits
    assert families.difference(policy, saved(name), rows_longer_than_a_window(), PACKED, world) <= 1e-5


def test_frequencies_of_the_whole_run(saved, world):
    """Rows of a run whose longest needs the long frequencies have them all, as in vLLM and in transformers' forward of
    such a row. With a longest row below the limit all have the short ones.
    """
    rollout, path = rows_longer_than_a_window(), saved("phi3 longrope")
    for compute in (PACKED, UNPACKED):
        long = batching.Compute(400, packing=compute.packing, longest=96)
        policy = model.load(path, world, torch.float32, long)
        assert families.difference(policy, path, rollout, long, world) <= 1e-5
        short = model.load(path, world, torch.float32, batching.Compute(400, packing=compute.packing, longest=32))
        assert families.difference(short, path, rollout, long, world) > 1e-3
