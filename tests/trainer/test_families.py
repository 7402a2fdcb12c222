"""Model families: windows, caps, sinks, experts. The trainer against transformers, and vLLM against the trainer."""

import json
import re
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import families
import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from conftest import ROOT, launch
from families import FAMILIES, TEMPERATURE, own_tables, rows_longer_than_a_window, save_random, targets_of
from helpers import load, nightly
from torch.distributed.tensor import distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from common.data import weights
from common.data.families import family_carries_state, may_be_padded
from common.data.tokenizer import causal_class
from common.errors import BadInput
from common.preflight import checks
from common.rollout import engines
from common.run import checkpoint
from common.trainer import batching, distillation, forward, lora, model, packing_check, parts
from common.weight_sync import FullParameters

SERVED = [name for name, family in FAMILIES.items() if not family.refused]
# vLLM starts these with no connector to its cache, and not after an engine with one in the same process.
WITHOUT_TAILS = [name for name in SERVED if FAMILIES[name].unpacked or "shared keys" in FAMILIES[name].has]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """name -> folder of a tiny model of the family."""
    folder = tmp_path_factory.mktemp("families")
    return cache(lambda name: families.save(name, folder))


def check_against_transformers(path: str, compute: batching.Compute, world, micro_batches: int = 1, tolerance=1e-5):
    """Log-probs, entropies and gradient against eager attention on one row at a time. Returns the policy."""
    rollout = rows_longer_than_a_window()
    policy = model.load(path, world, torch.float32, compute)
    theirs = families.transformers_own(path)
    packed = batching.pack(rollout, torch.arange(4), compute, world)
    assert len(packed) == micro_batches
    for micro in packed:
        ours, entropy = model.response_logprobs(policy, micro, TEMPERATURE)
        tables = own_tables(theirs, rollout, micro.rows)
        expected = tables.gather(2, targets_of(rollout, micro.rows))[..., 0]
        assert (ours - expected).abs().max() <= tolerance
        assert (entropy + (tables.exp() * tables).sum(-1)).abs().max() <= tolerance and not entropy.requires_grad
        weights = torch.linspace(-1, 1, ours.numel()).view(ours.shape)
        (ours * weights).sum().backward()
        (expected * weights).sum().backward()
    gradients = dict(theirs.named_parameters())
    for key, parameter in policy.named_parameters():
        right = gradients[key].grad
        if right is None:  # an index that chooses tokens
            assert parameter.grad is None, key
            continue
        found = parameter.grad.full_tensor()
        assert (found - right).norm() <= 1e-4 * right.norm() + 1e-6, key
    return policy


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if not family.unpacked])
def test_packed_rows_give_what_transformers_gives_alone(name, saved, world, capsys):
    compute = batching.Compute(400, longest=96)
    (micro,) = batching.pack(rows_longer_than_a_window(), torch.arange(4), compute, world)
    assert micro.input_ids.shape[1] == 40 + 33 + 30 + 25 + 30 + 12  # shared prompts
    policy = check_against_transformers(saved(name), compute, world, tolerance=FAMILIES[name].tolerance)
    assert policy.packed and policy.knows_logits and "packing" not in capsys.readouterr().out


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_of_their_own_give_what_transformers_gives(name, saved, world, capsys):
    """Every family can be computed without packing, and some have to be. Here it is chosen after loading."""
    family = FAMILIES[name]
    compute = batching.Compute(400, longest=96, packing="auto" if family.unpacked else "off")
    policy = check_against_transformers(saved(name), compute, world, tolerance=family.tolerance)
    assert not policy.packed and policy.knows_logits
    said = f"packing: off for {saved(name)}, because of {family.unpacked}" if family.unpacked else ""
    assert capsys.readouterr().out.partition(" (with --packing off")[0] == said


@pytest.mark.parametrize("budget, micro_batches", [(400, 1), (150, 2), (130, 3), (1, 4)])
@pytest.mark.parametrize("name", ["qwen3_next", "lfm2", "granitemoehybrid"])
def test_padding_changes_nothing(name, budget, micro_batches, saved, world):
    """Rows of 70, 65, 63 and 45 tokens, with other rows beside them."""
    check_against_transformers(saved(name), batching.Compute(budget, packing="off"), world, micro_batches)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if "experts" in family.has])
def test_frozen_routers_stay_and_all_else_is_trained(name, saved, world, tmp_path):
    """--freeze-router: other parameters have the gradients that they have without it. Weight decay does not reach the
    routers, and a checkpoint, which leaves them out, goes on as it would have.
    """
    rollout = rows_longer_than_a_window()

    def load(freeze_router: bool):
        policy = model.load(saved(name), world, torch.float32, batching.Compute(400, freeze_router=freeze_router))
        return policy, torch.optim.AdamW(policy.parameters(), lr=1e-2, weight_decay=0.1, fused=True)

    def gradients(policy) -> dict[str, torch.Tensor]:
        (micro,) = batching.pack(rollout, torch.arange(4), batching.Compute(400), world)
        model.response_logprobs(policy, micro, TEMPERATURE)[0].sum().backward()
        return {key: p.grad.full_tensor().clone() for key, p in policy.named_parameters() if p.grad is not None}

    policy, optimizer = load(True)
    every, some = gradients(load(False)[0]), gradients(policy)
    frozen = every.keys() - some.keys()
    assert frozen == {key for key in every if re.search(r"\.(gate|router)\.(weight|bias)$", key)}
    assert frozen
    # gpt-oss reads the bias of each token's expert by an index, whose gradient several threads add in any order.
    indexed = {key for key in some if key.endswith("proj_bias")}
    assert all(torch.equal(every[key], some[key]) for key in some.keys() - indexed)
    assert all(torch.allclose(every[key], some[key], rtol=1e-5, atol=1e-7) for key in indexed)
    before = {key: parameter.detach().full_tensor().clone() for key, parameter in policy.named_parameters()}
    optimizer.step()
    unmoved = {key for key, p in policy.named_parameters() if torch.equal(p.full_tensor(), before[key])}
    no_gradient = before.keys() - every.keys()  # an index that chooses tokens
    assert unmoved == frozen | no_gradient and all("indexer" in key for key in no_gradient)
    tensors = checkpoint.training_state({"policy": (policy, optimizer)}, [])
    assert frozen.isdisjoint(name.removeprefix("policy.model.") for name in tensors)
    dcp.save(tensors, storage_writer=checkpoint.writer_for(tensors, tmp_path))
    again, restored = load(True)
    checkpoint.read_tensors(checkpoint.training_state({"policy": (again, restored)}, []), tmp_path)
    after = dict(again.named_parameters())
    assert all(torch.equal(p.full_tensor(), after[key].full_tensor()) for key, p in policy.named_parameters())


def test_routers_to_freeze_are_there_and_trained(saved, world):
    for name, rank, said in (("llama", 0, "a llama model has no router"), ("mixtral", 4, "--lora-rank freezes the")):
        with pytest.raises(BadInput, match=f"^--freeze-router: {said}"):
            model.load(saved(name), world, torch.float32, batching.Compute(lora_rank=rank, freeze_router=True))


@pytest.mark.slow
def test_vllm_follows_the_trainer(saved):
    """After loading, and after three updates: windows, caps, names of experts, experts packed for the processor."""
    check_gaps("vllm", saved, ["qwen2", "gemma2", "mixtral"])  # one of each kind


@pytest.mark.nightly
def test_vllm_follows_the_trainer_with_each_family(saved):
    check_gaps("vllm", saved, [name for name in SERVED if name not in WITHOUT_TAILS])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name if name == "granitemoehybrid" else nightly(name) for name in WITHOUT_TAILS])
def test_vllm_follows_the_trainer_in_a_process_of_its_own(saved, name):
    check_gaps("vllm", saved, [name])


@pytest.mark.slow
def test_what_lies_behind_a_window_is_not_copied(saved):
    """vLLM's table has an empty block there. Others would start with it as the beginning of their prompts."""
    (gap,) = re.findall(r"gap (\S+)", launch(ROOT / "tests/workers/windows.py", saved("mistral")).stdout)
    assert float(gap) <= 1e-5


@pytest.mark.slow
def test_vllm_takes_new_convolutions_in_bfloat16(saved):
    """It packs them for the processor, and Mamba 2 would go on with the first ones: 0.9 nats off after three."""
    gaps = gaps_of("vllm", "bfloat16", saved, ["falcon_h1"])
    assert max(gaps["falcon_h1"]) <= 0.2


@pytest.mark.slow
def test_transformers_generate_follows_the_trainer(saved):
    """One that vLLM does not sample, one whose prompts are not padded, and one whose frequencies depend on the longest
    row.
    """
    check_gaps("hf", saved, ["llama4_text", "qwen3_next", "phi3 longrope"])


@pytest.mark.nightly
def test_transformers_generate_follows_the_trainer_with_each_such_family(saved):
    check_gaps("hf", saved, [name for name, family in FAMILIES.items() if family.refused or family.unpacked])


@pytest.mark.slow
@pytest.mark.parametrize("backend, name", [("vllm", "mixtral"), ("hf", "qwen3_next")])
def test_engines_follow_two_ranks(backend, name, saved):
    """Experts, windows and states of weights that are sharded."""
    check_gaps(backend, saved, [name], ranks=2)


def check_gaps(backend: str, saved, names: list[str], ranks: int = 1) -> None:
    for name, gaps in gaps_of(backend, "float32", saved, names, ranks).items():
        assert max(gaps) <= FAMILIES[name].tolerance, name


def gaps_of(backend: str, dtype: str, saved, names: list[str], ranks: int = 1) -> dict[str, list[float]]:
    """Of each family: the largest difference of log-probs after loading, and after each of three updates."""
    result = launch(ROOT / "tests/workers/families.py", backend, dtype, *map(saved, names), ranks=ranks)
    rows = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert [row["model"] for row in rows] == names and all(len(row["gaps"]) == 4 for row in rows)
    print(*rows, sep="\n")  # pytest shows it if a gap is too wide
    return {row["model"]: row["gaps"] for row in rows}


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in SERVED])
def test_families_that_vllm_gets_wrong_are_refused(name, saved):
    engines.check_family("hf", saved(name))
    with pytest.raises(BadInput) as refused:
        engines.check_family("vllm", saved(name))
    family = FAMILIES[name]
    assert str(refused.value) == f"--model {saved(name)}: {family.refused} ({name}); use --rollout-backend hf"


@pytest.mark.parametrize("name", FAMILIES)
def test_an_export_is_what_transformers_loads(name, saved, world, tmp_path):
    """Names of experts on the disk, and buffers that are saved with the model."""
    from common.data import arithmetic

    policy = model.load(saved(name), world, torch.float32)
    checkpoint.export(policy, arithmetic.tokenizer(), tmp_path, torch.float32, world)
    before, after = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict() for path in (saved(name), tmp_path)
    )
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    files = [weights.files_of(path) for path in (saved(name), str(tmp_path))]
    assert files[0].keys() == files[1].keys()  # no prefix that the model's files did not have


@pytest.mark.parametrize(
    "config, why",
    [
        (
            transformers.Qwen2MoeConfig(
                **families.SIZES, use_sliding_window=True, sliding_window=16, layer_types=["sliding_attention"] * 4
            ),
            "windows, which this family puts only into the mask",
        ),
        (transformers.PhimoeConfig(**families.SIZES, sliding_window=16), "windows, which this family puts only into"),
        (
            transformers.Qwen3Config(**families.SIZES, layer_types=["full_attention", "chunked_attention"] * 2),
            "chunked_attention in some layers",
        ),
        (transformers.BloomConfig(hidden_size=64, n_head=4, n_layer=2), "layers that do not call transformers' atten"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_layers_tell_why_they_are_not_packed(config, why, tmp_path):
    """It is settled before anything is loaded, and --packing on is refused."""
    assert packing_check.why_not_packed(model.skeleton(config, "m"), batching.Compute()).startswith(why)


@pytest.mark.parametrize("name", ["lfm2", "llama4_text"])
def test_packing_is_settled_before_anything_is_loaded(name, saved, capsys):
    auto, on, off = (batching.Compute(400, packing=packing) for packing in ("auto", "on", "off"))
    assert checks.settle_packing(saved("llama"), auto, []) == auto
    assert checks.settle_packing(saved("llama"), off, []) == off and not capsys.readouterr().out
    assert checks.settle_packing(saved(name), auto, []) == off
    assert capsys.readouterr().out == f"packing: off, because of {FAMILIES[name].unpacked}\n"
    with pytest.raises(BadInput, match=f"^--packing on: packed rows of --model .*{name} would be wrong, because of"):
        checks.settle_packing(saved(name), on, [])
    for setting, flag in ({"sequence_parallel": 2}, "--sequence-parallel 2"), ({"kernels": "compile"}, "--kernels com"):
        with pytest.raises(BadInput, match=f"^{flag}.*, and packing is off"):
            checks.settle_packing(saved(name), replace(auto, **setting), [])


def test_a_mask_of_its_own_is_found_after_loading(world, tmp_path, capsys):
    """Nemotron's decoder hands its layers a mask that it makes, and not what else it was given."""
    config = transformers.NemotronConfig(**families.SIZES, attention_dropout=0.0)
    save_random(config, tmp_path)
    policy = check_against_transformers(str(tmp_path), batching.Compute(400), world)
    assert not policy.packed and "do not get the layout of a packed row" in capsys.readouterr().out
    with pytest.raises(BadInput, match="nemotron models are not supported with --packing on"):
        model.load(str(tmp_path), world, torch.float32, batching.Compute(400, packing="on"))


@pytest.mark.parametrize(
    "config",
    [
        transformers.HyperCLOVAXConfig(**families.SIZES, logits_scaling=4.0),  # it multiplies where Granite divides
        transformers.Qwen3Config(**families.SIZES, logits_scaling=8.0),  # its forward does not know these settings
        transformers.Qwen3Config(**families.SIZES, logit_scale=0.5),
        transformers.Qwen3Config(**families.SIZES, final_logit_softcapping=0.5),
        transformers.BertConfig(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=128, is_decoder=True
        ),  # a dense layer, an activation and a norm before the products
        transformers.RemBertConfig(
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            vocab_size=128,
            output_embedding_size=48,
            is_decoder=True,
        ),  # a head of another width than the hidden states
    ],
    ids=lambda config: config.model_type,
)
@pytest.mark.parametrize("rows_of_a_piece", [3, 1000])
def test_logits_that_the_trainer_does_not_know_are_the_models_own(
    config, rows_of_a_piece, world, tmp_path, monkeypatch
):
    save_random(config, tmp_path)
    monkeypatch.setattr(forward, "LOGITS_PER_CHUNK", rows_of_a_piece * 128)
    policy = check_against_transformers(str(tmp_path), batching.Compute(400), world)
    assert not policy.knows_logits
    known = SimpleNamespace(knows_logits=True, config=policy.config)
    for flag, pair in (("--model", (policy, known)), ("--teacher", (known, policy))):
        with pytest.raises(BadInput, match=flag):
            distillation.check_heads(*pair)


@pytest.mark.parametrize("policy_name, teacher_name", [("llama", "cohere"), ("granite", "gemma2"), ("gemma2", "llama")])
def test_a_teachers_logits_are_scaled_and_capped_as_its_own_family_does(policy_name, teacher_name, saved, world):
    """The KL to a teacher of another family, against transformers' own tables of both."""
    rollout, compute = rows_longer_than_a_window(), batching.Compute(400)
    policy = model.load(saved(policy_name), world, torch.float32, compute)
    teacher = distillation.load_teacher(saved(teacher_name), policy, world, torch.float32, compute, offload=False)
    for micro in batching.pack(rollout, torch.arange(4), compute, world):
        with torch.no_grad():
            found, _ = distillation.divergences(policy, teacher, micro, TEMPERATURE)
            names = (policy_name, teacher_name)
            ours, theirs = (own_tables(families.transformers_own(saved(name)), rollout, micro.rows) for name in names)
        right = (ours.exp() * (ours - theirs)).sum(-1)
        assert right.max() > 0.1 and (found - right).abs().max() <= 1e-5


def test_a_model_whose_tokens_see_later_ones_is_refused(saved, world, monkeypatch):
    """BERT's layers say so themselves. A Llama with another mask is found by its numbers: padding changes them."""
    config = transformers.BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=128)
    with pytest.raises(BadInput, match="^--model m: bert models are not supported, because their tokens see later"):
        model.skeleton(config, "m")
    everything = lambda inputs_embeds, **_: torch.zeros(1, 1, inputs_embeds.shape[1], inputs_embeds.shape[1])
    monkeypatch.setattr(modeling_llama, "create_causal_mask", everything)
    with pytest.raises(BadInput, match="llama models are not supported: their log-probs of a response depend on"):
        model.load(saved("llama"), world, torch.float32)


def test_numbers_that_are_none_are_refused(saved, world, monkeypatch):
    """NaN is smaller than no tolerance, and a maximum over ranks may lose it."""
    assert packing_check.difference(torch.full((2, 3), torch.nan), torch.ones(2, 3), world) == torch.inf
    assert packing_check.difference(torch.ones(2, 3), torch.ones(2, 3), world) == 0  # equal numbers have no spread
    place = packing_check.place
    monkeypatch.setattr(packing_check, "place", lambda values, micro: place(values, micro) * float("nan"))
    with pytest.raises(BadInput, match="llama models are not supported"):
        model.load(saved("llama"), world, torch.float32)


@pytest.mark.parametrize(
    "config",
    [
        # A body with a decoder in it, and the head on that.
        transformers.OPTConfig(
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            ffn_dim=128,
            vocab_size=128,
            word_embed_proj_dim=64,
        ),
        # A recurrence and nothing else.
        transformers.Mamba2Config(
            hidden_size=64, num_hidden_layers=2, num_heads=4, head_dim=32, state_size=16, n_groups=1, vocab_size=128
        ),
    ],
    ids=lambda config: config.model_type,
)
def test_other_bodies(config, world, tmp_path):
    save_random(config, tmp_path)
    check_against_transformers(str(tmp_path), batching.Compute(400, longest=96), world)


def test_layers_that_share_weights_are_refused():
    config = transformers.Zamba2Config(
        hidden_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        mamba_headdim=32,
        num_mem_blocks=1,
        vocab_size=128,
        layers_block_type=["mamba", "hybrid", "mamba"] * 2,
        hybrid_layer_ids=[1, 4],
        n_mamba_heads=4,
        mamba_ngroups=1,
    )
    with pytest.raises(
        BadInput, match="zamba2 models are not supported, because several of their layers share weights"
    ):
        model.skeleton(config, "m")


@pytest.mark.parametrize(
    "config, carries_state, padded",
    [
        (transformers.Qwen2_5_VLConfig(), False, True),  # its decoder alone has no causal class
        (transformers.Qwen3VLConfig(), False, True),
        (transformers.Qwen3_5Config(), True, False),
        (transformers.xLSTMConfig(num_hidden_layers=2), False, False),  # no convolution, and it ignores a mask
        (transformers.BloomConfig(n_layer=2), False, True),
        (transformers.Llama4TextConfig(num_hidden_layers=4), False, False),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_what_engines_must_know_of_a_family(config, carries_state, padded, tmp_path):
    config.save_pretrained(tmp_path)
    assert family_carries_state(str(tmp_path)) == carries_state
    with torch.device("meta"):
        assert may_be_padded(causal_class(config).from_config(config)) == padded


@pytest.mark.parametrize(
    "config, why",
    [
        (transformers.T5Config(), "because of their encoder"),
        (transformers.BartConfig(), "because of their encoder"),
        (transformers.ViTConfig(), "because transformers has no decoder of them that predicts the next token"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_what_is_no_decoder_is_refused_in_one_sentence(config, why):
    with pytest.raises(BadInput, match=f"^--model m: {config.model_type} models are not supported, {why}"):
        model.skeleton(config, "m")


@pytest.mark.parametrize(
    "config, noise",
    [
        (transformers.LlamaConfig(**families.SIZES, attention_dropout=0.1), {"attention_dropout": 0.1}),
        (transformers.GPT2Config(n_embd=64, n_head=4), {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}),
        (transformers.PhimoeConfig(**families.SIZES, input_jitter_noise=0.01), {"input_jitter_noise": 0.01}),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_random_layers_are_switched_off(config, noise, world, tmp_path, capsys):
    """Two forwards of the trainer are the same, and the same as transformers', and the run says what was on."""
    save_random(config, tmp_path)
    checks.say_noise(AutoConfig.from_pretrained(tmp_path))
    said = capsys.readouterr().out
    assert all(f"{name} = {value:g}" in said for name, value in noise.items() if value) and said.count("\n") == 1
    policy = model.load(str(tmp_path), world, torch.float32)
    (micro,) = batching.pack(rows_longer_than_a_window(), torch.arange(4), batching.Compute(400), world)
    one, other = (model.response_logprobs(policy, micro, TEMPERATURE)[0] for _ in range(2))
    assert torch.equal(one, other)
    assert families.difference(policy, str(tmp_path), rows_longer_than_a_window(), batching.Compute(400), world) <= 1e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_critics(name, saved, world, tmp_path):
    """A value is the head's product with transformers' hidden state before the token. It starts at 0."""
    rollout = rows_longer_than_a_window()
    compute = batching.Compute(400, longest=96)
    critic = model.load(saved(name), world, torch.float32, compute, value_head=True)
    (micro,) = batching.pack(rollout, torch.arange(4), compute, world)
    assert (model.response_values(critic, micro) == 0).all() and not hasattr(critic, "lm_head")
    model.reshard(critic)
    weights = torch.linspace(-1, 1, critic.score.in_features)
    with torch.no_grad():
        critic.score.weight.copy_(distribute_tensor(weights[None], world.mesh, critic.score.weight.placements))
        values = model.response_values(critic, micro)
        theirs = AutoModelForCausalLM.from_pretrained(saved(name), dtype=torch.float32, attn_implementation="eager")
        for found, row in zip(values, micro.rows.tolist()):
            prompt, response = rollout.prompt_ids[row], rollout.response_ids[row]
            ids = torch.tensor([prompt + response])
            hidden = parts.body_of(theirs)(ids, use_cache=False).last_hidden_state[0, len(prompt) - 1 : -1]
            assert (found[: len(response)] - hidden @ weights).abs().max() <= 1e-5 * weights.norm() * hidden.norm()


@pytest.mark.parametrize(
    "name", ["deepseek_v3", "gpt2", "gpt_neox", "phi", *(name for name, family in FAMILIES.items() if family.unpacked)]
)
def test_adapters_of_layers_unlike_llamas(name, saved, world, tmp_path):
    """They begin as the base. What an engine gets is what is trained, and so is the merged export."""
    from common.data import arithmetic

    rollout, compute = rows_longer_than_a_window(), batching.Compute(400, longest=96, lora_rank=4)
    policy = model.load(saved(name), world, torch.float32, compute)
    assert families.difference(policy, saved(name), rollout, compute, world) <= 1e-5
    assert not any("indexer" in name for name, _ in lora.adapted(policy))  # no gradient would reach them
    # Mamba's fused kernel, which reads the weight of out_proj past its adapter, is for mixers in training.
    mixers = [module for module in policy.modules() if hasattr(module, "out_proj")]
    assert all(isinstance(mixer.out_proj, lora.Adapted) and not mixer.training for mixer in mixers)
    generator = torch.Generator().manual_seed(0)
    for _, layer in lora.adapted(policy):
        noise = 0.03 * torch.randn(layer.lora_b.shape, generator=generator)
        layer.lora_b.data.copy_(distribute_tensor(noise, world.mesh, layer.lora_b.placements))
    assert families.difference(policy, saved(name), rollout, compute, world) > 0.1
    pushed = AutoModelForCausalLM.from_pretrained(saved(name), dtype=torch.float32)
    pushed.load_state_dict(dict(FullParameters(policy, torch.float32)), strict=False)
    pushed.save_pretrained(tmp_path / "pushed")
    assert families.difference(policy, str(tmp_path / "pushed"), rollout, compute, world) <= 3e-5
    checkpoint.export(policy, arithmetic.tokenizer(), tmp_path / "adapters", torch.float32, world)
    arithmetic.tokenizer().save_pretrained(saved(name))
    merge = load("scripts/merge_lora.py")
    merge.main(merge.Args(tmp_path / "adapters", tmp_path / "merged", base=saved(name), dtype="float32"))
    assert families.difference(policy, str(tmp_path / "merged"), rollout, compute, world) <= 3e-5


def test_the_documented_table_is_that_of_these_tests():
    assert families.table() in (ROOT / "docs/models.md").read_text(), "python tests/families.py prints it"
