"""Hybrids in packed rows: convolutions and recurrent layers whose kernels are told where each sequence begins.

Such kernels run on GPUs only. Here functions that split the row at its boundaries, and give each sequence to
transformers' own code in PyTorch, stand in for them.
"""

import sys
from dataclasses import replace
from pathlib import Path

import families
import pytest
import torch
from conftest import ROOT
from families import FAMILIES, rows_longer_than_a_window
from test_families import check_against_transformers

from common.errors import BadInput
from common.preflight import checks
from common.trainer import batching, forward, model, packing_check

COMPUTE = batching.Compute(400, longest=96)
HYBRIDS = [name for name, family in FAMILIES.items() if "states" in family.unpacked]
SCANS = {"torch_chunk_gated_delta_rule": "cu_seqlens", "mamba2_chunk_scan": "seq_idx"}  # what their kernels take


@pytest.fixture(params=HYBRIDS)
def hybrid(request, tmp_path) -> str:
    """Folder of a tiny hybrid."""
    return families.save(request.param, tmp_path)


@pytest.fixture
def kernels(monkeypatch):
    """(folder, heed=True) -> gives the model's family kernels that heed boundaries, or some that ignore them."""

    def install(path: str, heed: bool = True) -> None:
        monkeypatch.setattr(packing_check, "KERNELS", dict.fromkeys(packing_check.KERNELS, lambda: True))
        if not heed:
            return  # transformers' own functions ignore them
        skeleton = model.skeleton(model.AutoConfig.from_pretrained(path), path)
        module = sys.modules[type(skeleton).__module__]
        monkeypatch.setattr(module, "causal_conv1d_fn", convolve_each(module.causal_conv1d_fn))
        for name, takes in SCANS.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, scan_each(getattr(module, name), takes))

    return install


def convolve_each(function):
    def split(x, *rest, seq_idx=None, **options):  # x (1, channels, L)
        if seq_idx is None:
            return function(x, *rest, **options)
        assert seq_idx.dtype == torch.int32 and seq_idx.shape == (1, x.shape[-1])
        lengths = seq_idx[0].unique_consecutive(return_counts=True)[1].tolist()
        return torch.cat([function(piece, *rest, **options) for piece in x.split(lengths, dim=-1)], dim=-1)

    return split


def scan_each(function, takes: str):
    def split(first, *rest, **options):  # first (1, L, heads, width)
        boundaries = options.pop(takes, None)
        if boundaries is None:
            return function(first, *rest, **options)
        assert boundaries.dtype == torch.int32
        if takes == "cu_seqlens":
            lengths = boundaries.diff().tolist()
        else:
            lengths = boundaries[0].unique_consecutive(return_counts=True)[1].tolist()

        def pieces(value):
            row = isinstance(value, torch.Tensor) and value.dim() > 2
            return value.split(lengths, dim=1) if row else [value] * len(lengths)

        names = options.keys()
        every = zip(*map(pieces, (first, *rest, *options.values())))
        given = len(rest) + 1
        results = [function(*piece[:given], **dict(zip(names, piece[given:]))) for piece in every]
        if isinstance(results[0], tuple):
            return torch.cat([result[0] for result in results], dim=1), None
        return torch.cat(results, dim=1)

    return split


def test_kernels_that_heed_boundaries_are_used_for_packed_rows(hybrid, kernels, world, capsys):
    """Log-probs and gradients are transformers' of single rows, with prompts that are not shared."""
    kernels(hybrid)
    compute = checks.settle_packing(hybrid, COMPUTE, [])
    assert compute == replace(COMPUTE, shared_prompts=False)
    (micro,) = batching.pack(rows_longer_than_a_window(), torch.arange(4), compute, world)
    assert all(len(responses) == 1 for _, responses in micro.group_lengths)
    policy = check_against_transformers(hybrid, compute, world)
    assert policy.packed and "packing" not in capsys.readouterr().out


def test_kernels_that_ignore_boundaries_are_found_after_loading(hybrid, kernels, world, capsys):
    kernels(hybrid, heed=False)
    compute = checks.settle_packing(hybrid, COMPUTE, [])
    policy = check_against_transformers(hybrid, compute, world)
    assert not policy.packed
    assert "because of packed rows that change its hidden states" in capsys.readouterr().out
    with pytest.raises(BadInput, match="not supported with --packing on, because of packed rows that change"):
        model.load(hybrid, world, torch.float32, replace(compute, packing="on"))


@pytest.mark.parametrize(
    "name, forgotten", [("lfm2", "seq_idx"), ("qwen3_next", "seq_idx"), ("qwen3_next", "cu_seq_lens_q")]
)
def test_a_forgotten_boundary_is_found(name, forgotten, tmp_path, kernels, world, monkeypatch):
    """A convolution takes one, the delta rule the other. bfloat16's tolerance is wide, and LFM2's short convolutions
    reach only into the first tokens of a sequence. Even so, what is forgotten is three times the tolerance."""
    choose_forward = packing_check.choose_forward
    monkeypatch.setattr(model, "choose_forward", lambda *given, tolerance: choose_forward(*given, tolerance=0.3))
    path = families.save(name, tmp_path)
    kernels(path)
    compute = checks.settle_packing(path, COMPUTE, [])
    assert model.load(path, world, torch.bfloat16, compute).packed
    boundaries = forward.boundaries
    monkeypatch.setattr(forward, "boundaries", lambda micro: boundaries(micro) | {forgotten: None})
    assert not model.load(path, world, torch.bfloat16, compute).packed


@pytest.mark.parametrize(
    "setting, flag", [({"sequence_parallel": 2}, "sequence-p"), ({"kernels": "compile"}, "kernels")]
)
def test_what_needs_rows_of_attention_alone_is_refused(setting, flag, tmp_path, kernels):
    """A slice knows nothing of the boundaries in its row, and compiled layers would compile for each."""
    path = families.save("lfm2", tmp_path)
    kernels(path)
    with pytest.raises(BadInput, match=f"^--{flag}"):
        checks.settle_packing(path, replace(COMPUTE, **setting), [])


def test_a_teacher_of_another_family_gets_rows_of_its_own(tmp_path, kernels, world):
    """A policy of attention alone shares prompts, and its teacher is given the same micro-batches."""
    path = families.save("lfm2", tmp_path)
    kernels(path)
    assert not check_against_transformers(path, COMPUTE, world).packed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("forgotten", ["seq_idx", "cu_seq_lens_q"])
def test_a_small_leak_of_a_trained_hybrid_is_found(forgotten, dtype, kernels, world, monkeypatch):
    """It moves hidden states less than the tolerance allows, but other text in the first row must not move the rest."""
    path = str(ROOT / "baselines/hybrid-start")
    kernels(path)
    compute = checks.settle_packing(path, COMPUTE, [])
    assert model.load(path, world, dtype, compute).packed
    boundaries = forward.boundaries
    monkeypatch.setattr(forward, "boundaries", lambda micro: boundaries(micro) | {forgotten: None})
    assert not model.load(path, world, dtype, compute).packed


def test_a_kernel_that_is_missing_is_known_before_loading(hybrid, kernels, monkeypatch):
    """Each family needs those of the functions that its layers call."""
    kernels(hybrid)
    needed = set()
    for function in packing_check.KERNELS:
        without = packing_check.KERNELS | {function: lambda: False}
        with monkeypatch.context() as patch:
            patch.setattr(packing_check, "KERNELS", without)
            if checks.settle_packing(hybrid, COMPUTE, []).packing == "off":
                needed.add(function.strip("("))
    scan = {"lfm2": [], "qwen3_next": ["gated_delta_rule"], "qwen3_5_text": ["gated_delta_rule"]}
    assert needed == {"causal_conv1d_fn", *scan.get(Path(hybrid).name, ["chunk_scan"])}


def test_without_shared_prompts_each_row_of_a_pair_brings_its_own(world):
    rollout = rows_longer_than_a_window()
    compute = batching.Compute(1, shared_prompts=False)
    for micro in batching.pack(rollout, torch.arange(4), compute, world, unit_size=2):
        first, second = micro.rows.tolist()
        assert second == first + 1  # they stay in one micro-batch
        lengths = [(len(rollout.prompt_ids[row]), [len(rollout.response_ids[row])]) for row in (first, second)]
        assert micro.group_lengths == lengths
    # the budget counts both prompts
    tokens = sum(len(rollout.prompt_ids[row]) + len(rollout.response_ids[row]) for row in range(4))
    for budget, micro_batches in (tokens, 1), (tokens - 1, 2):
        compute = batching.Compute(budget, shared_prompts=False)
        assert len(batching.pack(rollout, torch.arange(4), compute, world, unit_size=2)) == micro_batches


def test_a_hybrids_attention_may_still_need_a_mask(tmp_path, kernels):
    """Chunks in a layer of attention are left to the family's own mask, whatever the other layers do."""
    path = families.save("lfm2", tmp_path)
    kernels(path)
    skeleton = model.skeleton(model.AutoConfig.from_pretrained(path), path)
    compute = batching.Compute(shared_prompts=False)
    assert packing_check.why_not_packed(skeleton, compute) == ""
    skeleton.config.layer_types = ["conv", "chunked_attention"] * 2
    assert packing_check.why_not_packed(skeleton, compute) == "chunked_attention in some layers"
