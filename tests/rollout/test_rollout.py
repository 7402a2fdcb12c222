"""Rollouts as data, and the engines: their sampling settings, their noise, their logits, and the shares of ranks."""

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import families
import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, launch, save_model
from fake_vllm import VLLM, fake_engine
from helpers import gaps_of
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

from common import placement
from common.data import arithmetic
from common.placement import Layout
from common.rollout import engines, vllm_engine
from common.rollout.hf_engine import HFEngine
from common.rollout.rollout import Rollout, collate, collate_responses, select
from common.rollout.vllm_engine import EngineConfig, request_seed


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


def config_of(folder: Path) -> EngineConfig:
    """A small engine for the model in this folder."""
    return EngineConfig(
        model_path=str(folder),
        dtype=torch.float32,
        tensor_parallel=1,
        layout=Layout(),
        max_model_len=64,
        max_num_seqs=8,
    )


def test_a_models_own_sampling_defaults_never_reach_vllm(models, tmp_path):
    """vLLM's servers would take what a request does not name from the model's folder, such as a repetition penalty."""
    from vllm.engine.arg_utils import EngineArgs

    folder = shutil.copytree(models["untied"], tmp_path / "model")
    GenerationConfig(do_sample=True, temperature=0.1, top_p=0.1, top_k=2, repetition_penalty=2.0).save_pretrained(
        folder
    )
    settings = vllm_engine.engine_settings(config_of(folder))
    defaults = lambda **changes: EngineArgs(**settings | changes).create_model_config().get_diff_sampling_param()
    assert defaults() == {}
    assert defaults(generation_config="auto")["repetition_penalty"] == 2.0, "vLLM finds them elsewhere now"


@pytest.mark.parametrize("family, copied", [("llama", True), ("gemma4_text", False), ("falcon_h1", False)])
def test_parts_of_a_prompt_are_copied_where_each_layer_has_its_own_keys_and_no_state(family, copied, tmp_path):
    families.config_of(family).save_pretrained(tmp_path)
    assert ("kv_transfer_config" in vllm_engine.engine_settings(config_of(tmp_path))) == copied


@pytest.mark.parametrize("never", [(), (7, 9)])
def test_vllm_is_asked_for_the_whole_distribution(never):
    """Anything that bends it, such as top-k, samples from another policy than the one that is trained."""
    from vllm import SamplingParams

    asked = SamplingParams(**vllm_engine.sampling_settings(0.7, 12, [1, 5], never))
    assert (asked.temperature, asked.max_tokens, asked.stop_token_ids) == (0.7, 12, [1, 5])
    assert (asked.top_p, asked.top_k, asked.min_p) == (1.0, 0, 0.0)
    assert (asked.repetition_penalty, asked.presence_penalty, asked.frequency_penalty) == (1.0, 0.0, 0.0)
    assert asked.min_tokens == 0 and not asked.ignore_eos and not asked.stop and not asked.bad_words
    assert asked.logprobs == 0, "the log-prob of the sampled token"
    assert (asked.logit_bias or {}) == dict.fromkeys(never, -100.0)


@pytest.fixture(scope="module")
def uneven(tmp_path_factory, world) -> HFEngine:
    """An engine whose model has 120 tokens, likely ones and rare ones. Nine of them end a response."""
    config = arithmetic.config()
    config.vocab_size = 120
    config.num_hidden_layers, config.layer_types = 1, config.layer_types[:1]  # the tests take many forwards
    path = save_model(tmp_path_factory.mktemp("uneven"), config, 0.05)
    engine = HFEngine(path, list(range(1, 10)), world, torch.float32)
    with torch.no_grad():
        engine.model.lm_head.weight.mul_(2.0)
    return engine


def next_token(engine: HFEngine, prompt: list[int], temperature: float) -> torch.Tensor:
    """(vocabulary,) probabilities of the token after a prompt, by a forward without any engine."""
    with torch.no_grad():
        logits = engine.model(torch.tensor([prompt], device=engine.world.device)).logits[0, -1]
    return (logits.cpu().double() / temperature).softmax(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_hf_engine_samples_from_the_whole_distribution(uneven, temperature):
    """Ten parts of the vocabulary, from rare tokens to likely ones, come as often as they should."""
    prompt, count = [20, 30, 40], 4000
    expected = next_token(uneven, prompt, temperature)
    rollout = uneven.generate([prompt], count, temperature, 1, seed=3)
    sampled = torch.tensor(rollout.response_ids)[:, 0]
    shares = torch.bincount(sampled, minlength=120).double() / count
    for part in expected.argsort().chunk(10):
        wanted = expected[part].sum()
        error = (wanted * (1 - wanted) / count).sqrt()
        assert abs(shares[part].sum() - wanted) < 4 * error
    assert (expected.argsort().argsort()[sampled] < 40).sum() > 10, "no rare token was sampled"
    logprobs = rollout.rollout_logprobs[:, 0].cpu().double()
    torch.testing.assert_close(logprobs, expected.log()[sampled], rtol=0, atol=1e-4)


def test_at_temperature_0_the_hf_engine_takes_the_likeliest_token(uneven):
    prompts = [[20, 30, 40], [50, 60]]
    greedy, again = (uneven.generate(prompts, 2, 0.0, 1, seed=seed).response_ids for seed in (1, 2))
    likeliest = [[int(next_token(uneven, prompt, 1.0).argmax())] for prompt in prompts for _ in range(2)]
    assert greedy == again == likeliest


def test_the_hf_engine_says_which_responses_the_limit_cut_off(uneven):
    """An end token is a part of its response. After it there is nothing."""
    rollout = uneven.generate([[20, 30, 40], [50, 60]], 64, 1.3, 6, seed=3)
    ended = [1 <= ids[-1] < 10 for ids in rollout.response_ids]
    assert rollout.truncated.tolist() == [not end for end in ended] and 5 < sum(ended) < 123
    for ids, end, logprobs in zip(rollout.response_ids, ended, rollout.rollout_logprobs.tolist()):
        assert not any(1 <= token < 10 for token in ids[:-1])
        assert len(ids) == 6 or (end and len(ids) < 6)
        assert all(logprob < 0 for logprob in logprobs[: len(ids)]) and not any(logprobs[len(ids) :])


def test_each_rank_of_the_hf_engine_and_each_step_has_noise_of_its_own(uneven, world, monkeypatch):
    """Equal noise would give the ranks correlated responses, which a large group is meant not to have."""

    def sampled(rank: int, seed: int) -> str:
        monkeypatch.setattr(uneven, "world", replace(world, rank=rank, size=3))
        return str(uneven.generate([[20, 30, 40]], 32, 1.0, 1, seed).response_ids)

    noise = [(rank, seed) for rank in range(3) for seed in (0, 1, 2, 2**20, 2**20 + 1, 2**21)]  # and of each run
    found = [sampled(*each) for each in noise]
    assert len(set(found)) == len(noise)
    assert sampled(*noise[7]) == found[7], "a step that is repeated is the same step"


@pytest.fixture
def of_ranks(world, monkeypatch):
    """A function for what each of four ranks gets for its prompts [r], [4 + r] and [8 + r] from a fake vLLM, two
    responses to each, and what it is told meanwhile.
    """
    monkeypatch.setitem(sys.modules, "vllm", VLLM)
    on_cpu = lambda *given: collate_responses(*given[:-1], torch.device("cpu"))  # not every machine has a GPU
    monkeypatch.setattr(vllm_engine, "collate_responses", on_cpu)
    shares = [[[rank], [4 + rank], [8 + rank]] for rank in range(4)]

    def sampled(tp: int, device: str, seed: int) -> list[tuple[Rollout, dict]]:
        found = []
        engines_of = {}  # number of an engine -> all that it has sampled
        for rank in range(4):
            first = rank // tp * tp
            gather = lambda out, own, group, first=first: out.__setitem__(slice(None), shares[first : first + tp])
            monkeypatch.setattr(dist, "all_gather_object", gather)
            own = {"rank": rank, "size": 4, "device": torch.device(device), "rollout_tp": tp}
            engine = fake_engine(replace(world, **own, tp_group="group" if tp > 1 else None))
            torch.manual_seed(rank)  # the ranks have drawn different numbers before
            told = {}
            done = lambda place, ids, cut_off, told=told: told.update({place: (ids, cut_off)})
            found.append((engine.generate(shares[rank], 2, 0.7, 9, seed, done), told))
            together = engines_of.setdefault(engine.world.engine_index, engine.llm.sampled)
            assert engine.llm.sampled == together, "ranks that share an engine compute the same forwards"
            assert {(asked.temperature, asked.max_tokens, asked.n) for asked in engine.llm.asked} == {(0.7, 9, 2)}
        return found

    return sampled


def ids_of(found: list[tuple[Rollout, dict]]) -> list[list[list[int]]]:
    return [rollout.response_ids for rollout, _ in found]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_each_rank_gets_the_responses_to_its_own_prompts(of_ranks, tp, device):
    """With noise of their own, whether four ranks have four engines, two or one."""
    found = of_ranks(tp, device, 5)
    for rank, (rollout, told) in enumerate(found):
        assert rollout.prompt_ids == [[prompt] for prompt in (rank, 4 + rank, 8 + rank) for _ in range(2)]
        assert [ids[:1] for ids in rollout.response_ids] == rollout.prompt_ids
        assert rollout.truncated.tolist() == [False, True] * 3
        assert told == {place: (rollout.response_ids[2 * place :][:2], [False, True]) for place in range(3)}
    noise = {tuple(ids[1:]) for responses in ids_of(found) for ids in responses}
    assert len(noise) == 4 * 3 * 2
    assert ids_of(of_ranks(tp, device, 5)) == ids_of(found), "a step that is repeated is the same step"
    for other in (6, 2**20 + 5):  # another step, and the same step of a run with the next --seed
        others = ids_of(of_ranks(tp, device, other))
        assert noise.isdisjoint(tuple(ids[1:]) for responses in others for ids in responses)


@pytest.mark.parametrize("n", [1, 3, 6, 8])
def test_no_two_responses_of_a_step_have_a_seed_in_common(n):
    for step in (1, 700, 2000):
        seeds = {(request_seed(step, number, n) + i) % 2**32 for number in range(64) for i in range(n)}
        assert len(seeds) == 64 * n, "torch reads the lower 32 bits"


def test_the_seeds_of_requests_differ_in_the_bits_that_a_cpu_reads():
    """torch's generator keeps the lower 32 of them there. Three runs, four steps, four prompts, eight responses."""
    steps = [run * 2**20 + step for run in (0, 1, 2) for step in (1, 2, 3, 4000)]
    seeds = [request_seed(step, number, 8) + i for step in steps for number in range(4) for i in range(8)]
    read = {torch.randint(2**62, (), generator=torch.Generator().manual_seed(seed)).item() for seed in seeds}
    assert len(read) == len(seeds) == 3 * 4 * 4 * 8


@pytest.mark.parametrize("n", [1, 8, 64])
def test_no_two_runs_have_the_seeds_of_their_requests_in_common(n):
    """With the largest --seed, too: 62 bits have no room for a seed of 30, a step of 20, a prompt and a response."""
    runs = [0, 1, 2, 8192, 2**16, 2**16 + 1, 2**19, 2**20, 5 * 10**8, 10**9]
    seeds = [request_seed(run * 2**20 + step, 3, n) + i for run in runs for step in (1, 2, 500) for i in range(n)]
    assert len(set(seeds)) == len(runs) * 3 * n and max(seeds) < 2**63


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


def test_an_update_refreshes_a_head_that_vllm_has_tied_after_loading(monkeypatch):
    """A tied model's files may hold the head as well. vLLM then calls it untied, and the trainer sends it once."""
    from common.rollout import vllm_weights

    monkeypatch.setattr(vllm_weights, "finalize_layerwise_reload", lambda *given: None)

    def push(tied: bool, tied_later: bool) -> bool:
        """Whether the head's own copy is that of the new weight."""
        head = torch.nn.Module()
        head.weight = torch.nn.Parameter(torch.zeros(4, 2).bfloat16(), requires_grad=False)
        head.quant_method = vllm_weights.Float32Head()
        head.quant_method.process_weights_after_loading(head)
        transfer = object.__new__(vllm_weights.InProcessTransfer)
        transfer.device, transfer.model, transfer.head = torch.device("cpu"), torch.nn.Module(), head
        config = SimpleNamespace(tie_word_embeddings=tied)
        transfer.model_config = SimpleNamespace(hf_config=config, word_embeddings_untied_by_checkpoint=tied_later)
        head.weight.fill_(1.0)  # the embedding has this tensor, too
        transfer.finish_weight_update()
        return torch.equal(head.float32_weight, head.weight.float())

    assert push(True, False) and push(False, True)
    assert not push(False, False), "the head was sent, and vLLM has finished it"


@pytest.mark.slow
@pytest.mark.parametrize("dtype, bound", [("float32", 1e-5), ("bfloat16", 0.05)])
def test_the_engine_follows_a_tied_model_whose_files_hold_the_head_too(models, tmp_path, dtype, bound):
    """A head that kept old weights would be off by 0.1 or more."""
    folder = shutil.copytree(models["tied"], tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    result = launch(ROOT / "tests/workers/sync.py", folder, 1, "vllm", dtype, 0)
    measured = gaps_of(result.stdout)
    assert len(measured) == 6 and max(measured) <= bound, measured


def test_an_update_may_not_leave_keys_and_values_of_the_old_weights(world):
    engine = fake_engine(world)
    engine.asleep = False
    engine.llm = mock.Mock()
    engine.llm.reset_prefix_cache.return_value = False
    with pytest.raises(RuntimeError, match="keys and values of the old weights"):
        engine.load_weights([])
    assert engine.weight_version == 0


def test_a_cpu_engines_kv_cache_holds_every_response_at_its_longest():
    """512 responses of 112 tokens: 3.5 blocks of 32 tokens, rounded up, and one more, of 3 KiB a token."""
    size = lambda sequences: engines.kv_cache_bytes(arithmetic.config(), torch.float32, 112, sequences)
    assert size(512) == 512 * 5 * 32 * (2 * 3 * 128 * 4)
    assert size(1) == 2**27  # room for a family that keeps more than its config says
    assert size(2**30) == pytest.approx(placement.host_memory() / 4, rel=1e-3)


def test_an_engine_works_on_as_many_responses_as_it_is_asked_for_up_to_a_limit(world, models, monkeypatch):
    """More would only take memory."""
    monkeypatch.setattr(engines, "set_vllm_environment", lambda *given: None)
    monkeypatch.setattr(engines, "start_in_process", lambda config, *given: config)
    cpu = replace(world, device=torch.device("cpu"))
    for asked, at_once in ((8, 8), (512, 512), (10_000, 512)):
        config = engines.start("vllm", models["tied"], [1], cpu, torch.float32, max_model_len=112, sequences=asked)
        assert config.max_num_seqs == at_once
        assert config.kv_cache_bytes == engines.kv_cache_bytes(arithmetic.config(), torch.float32, 112, at_once)
