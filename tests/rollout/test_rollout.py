"""Rollouts as data, and the engines' sampling settings and logits."""

import shutil

import psutil
import pytest
import torch
from transformers import GenerationConfig

from common.data import arithmetic
from common.rollout import engines
from common.rollout.rollout import collate, select


def test_select_takes_rows_of_several_rollouts_in_order():
    cpu = torch.device("cpu")
    one = collate([[1], [2]], [[5, 6, 7], [8]], [[-1.0, -2.0, -3.0], [-4.0]], [True, False], 3, cpu)
    two = collate([[3], [4]], [[9, 9], [4]], [[-5.0, -6.0], [-7.0]], [False, True], 3, cpu)
    chosen = select([(two, [0]), (one, [1, 0]), (two, range(1, 2))])
    assert chosen.prompt_ids == [[3], [2], [1], [4]] and chosen.response_ids == [[9, 9], [8], [5, 6, 7], [4]]
    assert chosen.response_mask.sum(1).tolist() == [2, 1, 3, 1] and chosen.truncated.tolist() == [
        False,
        False,
        True,
        True,
    ]
    assert chosen.rollout_logprobs.tolist() == [[-5, -6, 0], [-4, 0, 0], [-1, -2, -3], [-7, 0, 0]]
    assert (chosen.weight_versions == 3)[chosen.response_mask].all() and select([(one, [1])]).response_mask.shape == (
        1,
        1,
    )


def test_select_keeps_what_an_environment_said_out_of_the_mask():
    """DAPO and PRIME choose groups by it: an observation stays a hole, and no token of it counts."""
    sampled = [[True, False, True], [True]]
    logprobs = [[-1.0, 0.0, -3.0], [-4.0]]
    one = collate([[1], [2]], [[5, 6, 7], [8]], logprobs, [False, False], 3, torch.device("cpu"), sampled)
    one.episodes = ["first", "second"]
    chosen = select([(one, [1, 0])])
    assert chosen.response_mask.tolist() == [[True, False, False], [True, False, True]]
    assert chosen.weight_versions.tolist() == [[3, 0, 0], [3, 0, 3]] and chosen.lengths.tolist() == [1, 3]
    assert chosen.rollout_logprobs.tolist() == [[-4, 0, 0], [-1, 0, -3]] and chosen.episodes == ["second", "first"]


def test_a_models_own_sampling_defaults_never_reach_the_hf_engine(models, world, tmp_path):
    """Instruct models ship a generation_config.json with top-p and penalties: another policy than the one trained."""
    folder = shutil.copytree(models["untied"], tmp_path / "model")
    GenerationConfig(do_sample=True, temperature=0.1, top_p=0.1, top_k=2, repetition_penalty=2.0).save_pretrained(
        folder
    )
    batches = []
    for path in (models["untied"], str(folder)):
        engine = engines.start("hf", path, [1], world, torch.float32, max_model_len=64, sequences=8)
        batches.append(engine.generate([[5, 6, 7]], n=8, temperature=1.0, max_tokens=16, seed=1))
    assert batches[0].response_ids == batches[1].response_ids
    assert torch.equal(batches[0].rollout_logprobs, batches[1].rollout_logprobs)


def test_a_cpus_bfloat16_head_gives_float32_logits():
    """Also after the weight of its layer has changed, once it is told so."""
    from common.rollout.vllm_weights import Float32Head  # it imports vLLM

    method, layer, generator = Float32Head(), torch.nn.Module(), torch.Generator().manual_seed(0)
    x = torch.randn(5, 64, generator=generator).bfloat16()
    for _ in range(2):
        layer.weight = torch.nn.Parameter(torch.randn(100, 64, generator=generator).bfloat16(), requires_grad=False)
        method.process_weights_after_loading(layer)
        exact = x.double() @ layer.weight.double().t()
        assert exact.abs().max() > 20 and (method.apply(layer, x) - exact).abs().max() <= 1e-4


def test_a_cpu_engines_kv_cache_holds_every_response_at_its_longest():
    """512 responses of 112 tokens: 3.5 blocks of 32 tokens, rounded up, and one more, of 3 KiB a token."""
    size = lambda sequences: engines.kv_cache_bytes(arithmetic.config(), torch.float32, 112, sequences)
    assert size(512) == 512 * 5 * 32 * (2 * 3 * 128 * 4)
    assert size(1) == 2**27  # room for a family that keeps more than its config says
    assert size(2**30) == pytest.approx(psutil.virtual_memory().total / 4, rel=1e-3)
