"""Models that see images, as they lie on the Hub, trained on text alone: families whose images are unsupported."""

from pathlib import Path

import families
import pytest
import torch
from families import DELTA, SIZES, TEMPERATURE, WINDOW, own_tables, rows_longer_than_a_window, targets_of
from helpers import load
from torch.distributed.tensor import distribute_tensor
from transformers import AutoConfig

from common import weight_sync
from common.data import arithmetic, weights
from common.errors import BadInput
from common.preflight import checks
from common.rollout import engines
from common.run import checkpoint
from common.trainer import batching, lora, model, vision

COMPUTE = batching.Compute(400, longest=96)
ROWS = rows_longer_than_a_window()
TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
PATCHES = {"image_size": 28, "patch_size": 14}
TOKENS = {"image_token_id": 120, "boi_token_id": 121, "eoi_token_id": 122}
MODELS = {  # family -> its configuration, and how far trainer and engine may be apart
    "qwen3_5": (
        {
            "text_config": SIZES
            | DELTA
            | {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "partial_rotary_factor": 0.25,
                    "mrope_section": [2, 1, 1],
                }
            },
            "vision_config": {
                "depth": 1,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_heads": 2,
                "out_hidden_size": 64,
                "num_position_embeddings": 16,
            },
            "image_token_id": 120,
            "video_token_id": 121,
        },
        5e-5,
    ),
    "gemma3": (
        {
            "text_config": SIZES | {"sliding_window": WINDOW, "num_hidden_layers": 6, "query_pre_attn_scalar": 32},
            "vision_config": TOWER | PATCHES,
            "mm_tokens_per_image": 4,
            **TOKENS,
        },
        1e-5,
    ),
    "gemma4": (
        {
            "text_config": SIZES
            | {
                "sliding_window": WINDOW,
                "global_head_dim": 64,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "vocab_size_per_layer_input": 128,
                "hidden_size_per_layer_input": 16,
            },
            "vision_config": TOWER | {"head_dim": 16, "num_key_value_heads": 2},
            "audio_config": None,
            "audio_token_id": 123,
            "boa_token_id": 124,
            "eoa_token_id": 125,
            "video_token_id": 126,
            **TOKENS,
        },
        5e-5,
    ),
    "llama4": (
        {
            "text_config": SIZES
            | {
                "num_local_experts": 4,
                "attention_chunk_size": 32,
                "intermediate_size_mlp": 128,
                "interleave_moe_layer_step": 2,
            },
            "vision_config": TOWER
            | PATCHES
            | {"vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64},
            "image_token_index": 120,
            "boi_token_index": 121,
            "eoi_token_index": 122,
        },
        1e-5,
    ),
    "mistral3": (
        {
            "text_config": SIZES | {"model_type": "mistral"},
            "vision_config": TOWER | PATCHES | {"model_type": "pixtral", "head_dim": 16},
            "image_token_index": 120,
        },
        1e-5,
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def path(request, tmp_path_factory) -> str:
    """Folder of a tiny model of the family, with its tower."""
    settings, _ = MODELS[request.param]
    config = AutoConfig.for_model(request.param, **settings)
    folder = families.save_model(config, tmp_path_factory.mktemp("towers") / request.param)
    arithmetic.tokenizer().save_pretrained(folder)
    return folder


def move(parameters, world) -> None:
    """Add the same noise on every rank."""
    generator = torch.Generator().manual_seed(1)
    for parameter in parameters:
        noise = 0.02 * torch.randn(parameter.shape, generator=generator)
        parameter.data.add_(distribute_tensor(noise, world.mesh, parameter.placements))


def test_log_probs_and_gradients_are_transformers(path, world):
    compute = checks.settle_packing(path, COMPUTE, [])
    policy = model.load(path, world, torch.float32, compute)
    theirs = families.transformers_own(path)
    (micro,) = batching.pack(ROWS, torch.arange(4), compute, world)
    found, _ = model.response_logprobs(policy, micro, TEMPERATURE)
    tables = own_tables(theirs, ROWS, micro.rows)
    right = tables.gather(2, targets_of(ROWS, micro.rows))[..., 0]
    assert (found - right).abs().max() <= 1e-5
    factors = torch.linspace(-1, 1, found.numel()).view(found.shape)
    (found * factors).sum().backward()
    (right * factors).sum().backward()
    gradients = {key: parameter.grad for key, parameter in theirs.named_parameters()}
    for key, parameter in policy.named_parameters():
        if not parameter.requires_grad:
            assert gradients[key] is None, key  # only parts that text does not reach are frozen
            continue
        right = gradients[key]
        assert (parameter.grad.full_tensor() - right).norm() <= 1e-4 * right.norm() + 1e-6, key


def test_the_engine_and_the_export_follow(path, world, tmp_path):
    compute = checks.settle_packing(path, COMPUTE, [])
    policy = model.load(path, world, torch.float32, compute)
    engine = engines.start("hf", path, [2], world, torch.float32, max_model_len=96, sequences=4)
    prompts = [[3 + 7 * i % 110 for i in range(45)], [5 + 11 * i % 110 for i in range(33)]]
    for update in range(2):
        if update:
            move([parameter for parameter in policy.parameters() if parameter.requires_grad], world)
            weight_sync.push(policy, engine)
        batch = engine.generate(prompts, n=2, temperature=TEMPERATURE, max_tokens=30, seed=update)
        micro_batches = batching.pack(batch, torch.arange(len(batch)), compute, world)
        logprobs = model.frozen_logprobs(policy, batch, micro_batches, temperature=TEMPERATURE)
        gap = (logprobs - batch.rollout_logprobs)[batch.response_mask].abs().max()
        assert gap <= MODELS[Path(path).name][1]
    checkpoint.export(policy, arithmetic.tokenizer(), tmp_path, torch.float32, world)
    assert weights.files_of(path).keys() == weights.files_of(str(tmp_path)).keys()
    assert families.difference(policy, str(tmp_path), ROWS, compute, world) <= 1e-5


def test_a_critic_has_a_value_for_each_token(path, world):
    compute = checks.settle_packing(path, COMPUTE, [])
    critic = model.load(path, world, torch.float32, compute, value_head=True)
    (micro,) = batching.pack(ROWS, torch.arange(4), compute, world)
    model.response_values(critic, micro).sum().backward()
    assert critic.score.weight.grad.full_tensor().norm() > 0


def test_adapters_are_for_the_decoder_alone(path, world, tmp_path):
    compute = checks.settle_packing(path, batching.Compute(400, longest=96, lora_rank=4), [])
    policy = model.load(path, world, torch.float32, compute)
    assert families.difference(policy, path, ROWS, compute, world) <= 1e-5  # they begin as the base
    names = {name for name, _ in lora.adapted(policy)}
    assert names and not any("vision" in name or "visual" in name for name in names)
    move([layer.lora_b for _, layer in lora.adapted(policy)], world)
    assert families.difference(policy, path, ROWS, compute, world) > 0.05
    checkpoint.export(policy, arithmetic.tokenizer(), tmp_path / "adapters", torch.float32, world)
    merge = load("scripts/merge_lora.py")
    merge.main(merge.Args(tmp_path / "adapters", tmp_path / "merged", base=path, dtype="float32"))
    assert families.difference(policy, str(tmp_path / "merged"), ROWS, compute, world) <= 3e-5


def test_prompts_with_images_are_refused(path):
    with pytest.raises(BadInput, match="^refused: their images; supported are .* and prompts without images"):
        vision.check_family(AutoConfig.from_pretrained(path), "refused:", with_images=True)
