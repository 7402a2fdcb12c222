"""The packed forward equals transformers' own. Neighbours and the cut into micro-batches change nothing."""

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import relative_difference, save_model
from helpers import nightly
from torch._dynamo.utils import counters
from torch.distributed.tensor import distribute_tensor
from transformers import AutoModelForCausalLM, Lfm2Config

from common.data import arithmetic
from common.errors import BadInput
from common.preflight import checks
from common.preflight.memory import ACTIVATION_SHARE, MAX_BUDGET_TOKENS, MemoryPlan
from common.rollout.rollout import collate
from common.trainer import attention, batching, logits, model, packing_check, sequence_parallel
from common.trainer.attention import Run
from common.trainer.batching import Compute
from common.trainer.parts import layers_of
from common.trainer.sequence_parallel import SlicedSpans

TEMPERATURE = 0.7


def random_rollout(count: int, seed: int = 0, longest: int = 20):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda most: torch.randint(
        3, 50, (int(torch.randint(1, most, (), generator=generator)),), generator=generator
    )
    prompts, responses = [draw(9).tolist() for _ in range(count)], [draw(longest).tolist() for _ in range(count)]
    return collate(prompts, responses, None, [False] * count, 0, torch.device("cpu"))


def groups_of(rollout, size: int, prompt_length: int):
    """The same responses, `size` to each prompt of at least prompt_length tokens."""
    generator = torch.Generator().manual_seed(5)
    count = len(rollout) // size
    prompts = [torch.randint(3, 50, (prompt_length + i,), generator=generator).tolist() for i in range(count)]
    return dataclasses.replace(rollout, prompt_ids=[prompt for prompt in prompts for _ in range(size)])


def by_transformers(folder: str, rollout):
    """Log-probs and entropies (N, T), one sequence at a time, from full logits."""
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    logprobs, entropies = (torch.zeros(rollout.response_mask.shape) for _ in range(2))
    for i, (prompt, response) in enumerate(zip(rollout.prompt_ids, rollout.response_ids)):
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + response])).logits[0].float() / TEMPERATURE
        table = logits[len(prompt) - 1 : -1].log_softmax(-1)  # token t is predicted one place before it
        logprobs[i, : len(response)] = table.gather(-1, torch.tensor(response)[:, None])[:, 0]
        entropies[i, : len(response)] = -(table.exp() * table).sum(-1)
    return logprobs, entropies


def test_a_layer_gets_the_rows_layout_itself(models, world):
    """FSDP goes through the arguments of each layer, and would copy a dataclass: 0.3 ms a layer with 60 responses."""
    policy, rollout = model.load(models["grouped"], world, torch.float32), groups_of(random_rollout(8), 4, 40)
    (micro,) = batching.pack(rollout, torch.arange(8), Compute(token_budget=4096), world)
    seen = []
    for layer in layers_of(policy):
        layer.register_forward_pre_hook(lambda _, args, named: seen.append(named["spans"]), with_kwargs=True)
    model.response_logprobs(policy, micro, TEMPERATURE)
    assert len(seen) == policy.config.num_hidden_layers and all(spans is micro.spans for spans in seen)


@pytest.mark.parametrize("kind", ["untied", "tied", "grouped"])
def test_packed_equals_transformers(models, world, kind):
    policy, rollout = model.load(models[kind], world, torch.float32), random_rollout(12)
    (micro,) = batching.pack(rollout, torch.arange(12), Compute(10_000), world)
    logprobs, entropy = model.response_logprobs(policy, micro, TEMPERATURE)
    expected, expected_entropy = by_transformers(models[kind], rollout)
    assert torch.allclose(logprobs, expected[micro.rows], atol=1e-5)
    assert torch.allclose(entropy, expected_entropy[micro.rows], atol=1e-5)
    frozen = model.frozen_logprobs(
        policy, rollout, batching.pack(rollout, torch.arange(12), Compute(60), world), TEMPERATURE
    )
    assert torch.allclose(frozen, expected, atol=1e-5) and not frozen.requires_grad


def test_the_picture_in_batching():
    """Prompts a (3 tokens) and d (2 tokens); b and c answer a, e answers d. Every number of the docstring."""
    a, b, c, d, e = [10, 11, 12], [20, 21], [30, 31], [40, 41], [50, 51, 52]
    rollout = collate([a, a, d], [b, c, e], None, [False] * 3, 0, torch.device("cpu"))
    micro = batching.pack_groups(rollout, [[0, 1], [2]])
    assert micro.input_ids.tolist() == [a + b + c + d + e]
    assert micro.position_ids.tolist() == [[0, 1, 2, 3, 4, 3, 4, 0, 1, 2, 3, 4]]
    assert micro.predictors.tolist() == [2, 3, 2, 5, 8, 9, 10] and micro.targets.tolist() == b + c + e
    assert micro.scatter.tolist() == [0, 1, 3, 4, 6, 7, 8] and micro.response_mask.shape == (3, 3)
    assert micro.spans.runs == [Run(0, [3]), Run(3, [2, 2], ((0, 3),)), Run(7, [5])]


@pytest.mark.parametrize("shared", [False, True])
def test_neighbours_change_nothing(models, world, shared):
    """Neither a neighbour with another prompt nor one with the same prompt changes a bit of a row's log-probs."""
    policy, rollout = model.load(models["grouped"], world, torch.float32), random_rollout(8)
    rollout = groups_of(rollout, 4, 40) if shared else rollout
    logprobs = []
    for _ in range(2):
        (micro,) = batching.pack(rollout, torch.arange(8), Compute(10_000), world)
        logprobs.append(model.response_logprobs(policy, micro, TEMPERATURE)[0])
        rollout.response_ids[3] = [9] * len(rollout.response_ids[3])
        if not shared:
            rollout.prompt_ids[3] = [7] * len(rollout.prompt_ids[3])
    before, after, others = *logprobs, micro.rows != 3
    assert torch.equal(before[others], after[others])
    assert not torch.equal(before[~others], after[~others])


def gradient(policy, rollout, compute, world) -> dict[str, torch.Tensor]:
    """Gradient of a token-weighted loss over all rows, cut as `compute` says."""
    weights = torch.linspace(-1, 1, rollout.response_mask.numel()).view_as(rollout.response_mask)
    micro_batches = batching.pack(rollout, torch.arange(len(rollout)), compute, world)
    for micro in micro_batches:
        logprobs, _ = model.response_logprobs(policy, micro, TEMPERATURE)
        ((logprobs * weights[micro.rows] * micro.response_mask).sum() / 100).backward()
    gradients = {name: parameter.grad.full_tensor().clone() for name, parameter in policy.named_parameters()}
    policy.zero_grad()
    return gradients


VARIANTS = {  # settings of the trainer, arguments of load(), and values to patch
    "one row a micro-batch": (Compute(1), {}, ()),
    "several rows": (Compute(40), {}, ()),
    "checkpointing, 7 tokens a chunk of logits": (
        Compute(10_000, activation_checkpointing=True),
        {},
        (logits, "LOGITS_PER_CHUNK", 7 * 50),
    ),
    "offload": (Compute(100), {"offload": True}, ()),
    "no room for whole gradients": (Compute(60), {}, (model, "rank_memory", lambda: 1e6)),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradient_is_the_same_however_it_is_computed(models, world, monkeypatch, variant):
    compute, arguments, patch = VARIANTS[variant]
    rollout, plain = random_rollout(16), model.load(models["tied and grouped"], world, torch.float32)
    whole = gradient(plain, rollout, Compute(10_000), world)
    if patch:
        monkeypatch.setattr(*patch)
    policy = model.load(models["tied and grouped"], world, torch.float32, compute, **arguments)
    assert plain.whole_gradients and policy.whole_gradients == (patch[:1] != (model,) and not arguments)
    assert relative_difference(whole, gradient(policy, rollout, compute, world)) <= 1e-6


def test_compiled_layers_change_nothing_and_are_compiled_once_for_all_lengths(tmp_path, world, monkeypatch):
    """One layer is traced as for the real compiler, which would take a minute."""
    asked = []

    def trace(layer, *, dynamic: bool, options: dict):
        asked.append(options)
        return compile_layer(layer, dynamic=dynamic, backend="aot_eager")

    compile_layer = torch.compile
    monkeypatch.setattr(torch, "compile", trace)
    config = arithmetic.config()
    config.num_hidden_layers, config.num_key_value_heads, config.layer_types = 1, 2, config.layer_types[:1]
    path = save_model(tmp_path, config, 0.05)
    plain, compiled = [model.load(path, world, torch.float32, Compute(kernels=k)) for k in ("eager", "compile")]
    graphs = []
    for seed, count in enumerate((16, 9)):
        rollout = random_rollout(count, seed)
        whole, other = [gradient(policy, rollout, Compute(60), world) for policy in (plain, compiled)]
        assert relative_difference(whole, other) <= 1e-5
        graphs.append(counters["stats"]["unique_graphs"])
    assert 0 < graphs[0] == graphs[-1]
    assert asked == [{"emulate_precision_casts": True}], "or bfloat16's first ratios differ from 1 by up to 20 %"


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype, kernels",
    [(torch.float32, "eager"), (torch.bfloat16, "eager"), nightly(torch.bfloat16, "compile")],
    ids=["float32-eager", "bfloat16-eager", "bfloat16-compile"],
)
def test_the_first_updates_ratio_is_exactly_one(world, dtype, kernels):
    """Old log-probs come from a forward without gradient. It must round as the training forward does.

    To compile takes half a minute or more, so only bfloat16 is compiled. There a fused kernel may skip a rounding.
    """
    policy = model.load(str(arithmetic.WARM_START), world, dtype, Compute(token_budget=4096, kernels=kernels))
    rollout = random_rollout(8)
    (micro,) = batching.pack(rollout, torch.arange(8), Compute(token_budget=4096), world)
    old_logprobs = model.frozen_logprobs(policy, rollout, [micro], TEMPERATURE)
    logprobs, _ = model.response_logprobs(policy, micro, TEMPERATURE)
    assert torch.equal(logprobs.detach(), old_logprobs[micro.rows])


def test_compiled_layers_need_a_compiler(models, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # a GPU's compiler is another one
    with pytest.raises(BadInput, match="--kernels compile"):
        checks.check_compute(models["tied"], Compute(100, kernels="compile"))


@pytest.mark.parametrize("budget", [60, 150, 10_000])
@pytest.mark.parametrize("kind", ["tied", "grouped"])
def test_shared_prompts_change_nothing_but_the_work(models, world, kind, budget):
    """Log-probs and gradients equal those of plain packing. A budget of 60 splits groups, one of 150 does not."""
    policy, rollout = model.load(models[kind], world, torch.float32), groups_of(random_rollout(12), 4, 40)
    plain, shared = Compute(budget, shared_prompts=False), Compute(budget)
    tokens = {}
    for compute in (plain, shared):
        micro_batches = batching.pack(rollout, torch.arange(12), compute, world)
        tokens[compute] = sum(micro.input_ids.numel() for micro in micro_batches)
        assert all(micro.input_ids.shape[1] <= budget for micro in micro_batches)
        logprobs = model.frozen_logprobs(policy, rollout, micro_batches, TEMPERATURE)
        assert torch.allclose(logprobs, by_transformers(models[kind], rollout)[0], atol=1e-5)
    assert tokens[shared] < tokens[plain] * (0.5 if budget > 60 else 1)
    gradients = [gradient(policy, rollout, compute, world) for compute in (plain, shared)]
    assert relative_difference(*gradients) <= 1e-5


def begin_alike(rollout, tokens: int):
    """2, 3, 1, 1 and 1 responses to five prompts that begin with the same `tokens` tokens. Two have only one more."""
    generator = torch.Generator().manual_seed(5)
    beginning = torch.randint(3, 50, (tokens,), generator=generator).tolist()
    ends = [[7]] * 2 + [[8, 9, 10]] * 3 + [[9, 9]] + [[11]] + [[12, 5]]
    return dataclasses.replace(rollout, prompt_ids=[beginning + end for end in ends])


@pytest.mark.parametrize("budget", [60, 110, 10_000])
@pytest.mark.parametrize("kind", ["tied", "grouped"])
def test_what_all_prompts_begin_with_is_computed_once_a_micro_batch(models, world, kind, budget):
    policy, rollout = model.load(models[kind], world, torch.float32), begin_alike(random_rollout(8), 40)
    plain, shared = Compute(budget, shared_prompts=False), Compute(budget)
    micro_batches = batching.pack(rollout, torch.arange(8), shared, world)
    for micro in micro_batches:
        assert micro.beginning == (40 if len(micro.group_lengths) > 1 else 0)
        assert micro.input_ids[0, :40].tolist() == rollout.prompt_ids[0][:40]
        assert micro.input_ids.shape[1] <= budget
    assert any(micro.beginning for micro in micro_batches) or budget == 60
    assert (len(micro_batches) == 1) == (budget == 10_000)
    apart = batching.pack(rollout, torch.arange(8), shared, world, beginning=0)
    assert [micro.rows.tolist() for micro in micro_batches] == [micro.rows.tolist() for micro in apart]
    once = 40 + (1 + 3 + 2 + 1 + 2) + sum(map(len, rollout.response_ids))
    if budget == 10_000:
        assert micro_batches[0].input_ids.numel() == once
    logprobs = model.frozen_logprobs(policy, rollout, micro_batches, TEMPERATURE)
    assert torch.allclose(logprobs, by_transformers(models[kind], rollout)[0], atol=1e-5)
    gradients = [gradient(policy, rollout, compute, world) for compute in (plain, shared)]
    assert relative_difference(*gradients) <= 1e-5


def test_a_beginning_is_shared_if_it_is_long_enough_or_if_it_is_asked_for(models, world):
    policy = model.load(models["tied"], world, torch.float32)
    rollout = begin_alike(random_rollout(8), batching.SHARED_PROMPT_MIN_TOKENS - 1)
    rows, expected = torch.arange(8), by_transformers(models["tied"], rollout)[0]
    for asked, found in ((None, 0), (0, 0), (9, 9), (31, 31)):
        (mini_batch,) = batching.split(rollout, 1, rows >= 0, Compute(10_000), world, beginning=asked)
        (micro,) = mini_batch.micro_batches
        assert micro.beginning == found
        assert torch.allclose(model.frozen_logprobs(policy, rollout, [micro], TEMPERATURE), expected, atol=1e-5)
    for compute in (Compute(10_000, shared_prompts=False), Compute(10_000, packing="off")):
        assert all(micro.beginning == 0 for micro in batching.pack(rollout, rows, compute, world, beginning=31))
    longer = begin_alike(rollout, batching.SHARED_PROMPT_MIN_TOKENS)
    (micro,) = batching.pack(longer, rows, Compute(10_000), world)
    assert micro.beginning == batching.SHARED_PROMPT_MIN_TOKENS


def test_a_beginning_that_a_prompt_does_not_have_is_refused(world):
    rollout = begin_alike(random_rollout(8), 40)
    for beginning in (41, 42, 99):  # one prompt goes on with 40 + 1, and another one differs there
        with pytest.raises(ValueError, match=f"beginning={beginning}: "):
            batching.pack(rollout, torch.arange(8), Compute(10_000), world, beginning=beginning)
    # A dummy of a rank without rows is any row.
    among_others = SimpleNamespace(rank=0, sp_group=None, max=lambda count: 1)
    short = dataclasses.replace(rollout, prompt_ids=[[3], *rollout.prompt_ids[1:]])
    (dummy,) = batching.pack(short, torch.arange(0), Compute(10_000), among_others, beginning=40)
    assert dummy.beginning == 0 and not dummy.response_mask.any()


def test_a_model_whose_rows_are_not_packed_gets_the_beginning_in_each_row(models, world):
    """Which families are not packed is in part found out after loading, and a teacher can be one of them."""
    policy, rollout = model.load(models["grouped"], world, torch.float32), begin_alike(random_rollout(8), 40)
    (micro,) = batching.pack(rollout, torch.arange(8), Compute(10_000), world)
    assert micro.beginning == 40
    policy.packed = False
    packing_check.attend_with(policy, "sdpa")
    logprobs, _ = model.response_logprobs(policy, micro, TEMPERATURE)
    assert torch.allclose(logprobs, by_transformers(models["grouped"], rollout)[0][micro.rows], atol=1e-5)


def test_the_common_beginning_of_prompts():
    class WithImages(list):
        images = ()

    def common(*prompts, rows=None) -> int:
        rollout = collate(list(prompts), [[3]] * len(prompts), None, [False] * len(prompts), 0, torch.device("cpu"))
        return batching.common_beginning(rollout, torch.arange(len(prompts)) if rows is None else rows)

    assert common([1, 2, 3, 4], [1, 2, 4], [1, 2, 3, 5]) == 2
    assert common([1, 2, 3, 4], [1, 2, 4], [1, 2, 3, 5], rows=torch.tensor([0, 2])) == 3
    assert common([1, 2], [1, 2, 3]) == 1, "each prompt keeps a token"
    assert common([1, 2], [2, 1]) == 0
    assert common([1, 2], [1, 2]) == 0, "a prompt that all rows have is shared as a whole"
    assert common([1], rows=torch.arange(0)) == 0
    assert common([1, 2, 3], WithImages([1, 2, 4])) == 0


def test_dummies_have_no_tokens_that_count_and_come_before_the_reduction():
    """Another rank has five micro-batches, and this one three. Only the very last backward reduces gradients."""
    rollout = random_rollout(3)
    among_others = SimpleNamespace(rank=0, sp_group=None, max=lambda count: 5)
    budget = max(len(ids) + len(response) for ids, response in zip(rollout.prompt_ids, rollout.response_ids))
    micro_batches = batching.pack(rollout, torch.arange(3), Compute(budget // 2), among_others)
    assert [micro.last for micro in micro_batches] == [False] * 4 + [True]
    assert [bool(micro.response_mask.any()) for micro in micro_batches] == [True] * 3 + [False] * 2
    assert all(len(micro.rows) == 1 for micro in micro_batches), "a dummy is as short as it can be"
    assert rollout.response_mask.any(1).all(), "the rollout keeps its mask"
    nothing = batching.pack(rollout, torch.arange(0), Compute(budget), among_others)
    assert len(nothing) == 5 and not any(micro.response_mask.any() for micro in nothing)


def test_short_prompts_are_not_shared(world):
    rollout = groups_of(random_rollout(8), 4, batching.SHARED_PROMPT_MIN_TOKENS - 2)  # 30 and 31 tokens
    shared, plain = [batching.pack(rollout, torch.arange(8), Compute(999, which), world) for which in (True, False)]
    assert torch.equal(shared[0].input_ids, plain[0].input_ids)


def test_an_architecture_that_mixes_neighbours_is_not_packed(world, tmp_path, monkeypatch, capsys):
    """Short convolutions run over the borders of packed sequences. Here they do not give themselves away by name."""
    monkeypatch.setattr(packing_check, "why_not_packed", lambda policy, compute: "")
    config = Lfm2Config(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=50,
        layer_types=["conv", "full_attention"],
        initializer_range=0.5,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    policy = model.load(str(tmp_path), world, torch.float32, Compute(shared_prompts=False))
    assert not policy.packed
    assert "because of packed rows that change its hidden states (with --packing off" in capsys.readouterr().out
    with pytest.raises(BadInput, match="lfm2 models are not supported with --packing on"):
        model.load(str(tmp_path), world, torch.float32, Compute(packing="on", shared_prompts=False))


def test_a_rank_that_could_pack_ends_with_the_rank_that_cannot(world, models, monkeypatch):
    """Kernels may be installed on one machine only. A rank that went on would wait for the other one."""
    monkeypatch.setattr(type(world), "max", lambda self, value: 1.0)
    with pytest.raises(BadInput, match="with --packing on, because of layers or kernels of another rank"):
        model.load(models["untied"], world, torch.float32, Compute(packing="on"))


def test_ranks_of_two_data_types_end_together(world, models, monkeypatch):
    """--dtype auto on nodes whose CPUs differ: what the ranks gather would have two sizes."""
    monkeypatch.setattr(type(world), "min", lambda self, value: 2.0)
    with pytest.raises(BadInput, match="--dtype"):
        model.load(models["untied"], world, torch.float32)


def test_rows_without_packing_fill_the_budget_with_their_padding(world):
    """Rows times the longest one, prompts included; a longer unit has a bin of its own. Each row is in one."""
    rollout = groups_of(random_rollout(8), 4, 40)
    lengths = [len(prompt) + len(response) for prompt, response in zip(rollout.prompt_ids, rollout.response_ids)]
    for budget in (2 * max(lengths), 4 * max(lengths), 1, 10_000):
        micro_batches = batching.pack(rollout, torch.arange(8), Compute(budget, packing="off"), world)
        assert sorted(row for micro in micro_batches for row in micro.rows.tolist()) == list(range(8))
        for micro in micro_batches:
            assert len(micro.rows) == 1 or len(micro.rows) * max(lengths[row] for row in micro.rows) <= budget
            assert all(len(responses) == 1 for _, responses in micro.group_lengths)  # no prompt is shared
        assert (len(micro_batches) == 8) == (budget == 1) and (len(micro_batches) == 1) == (budget == 10_000)
    pairs = batching.pack(rollout, torch.arange(8), Compute(1, packing="off"), world, unit_size=2)
    assert [micro.rows.tolist() for micro in sorted(pairs, key=lambda m: m.rows[0])] == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize("shared", [False, True])
def test_a_value_head_starts_at_zero_and_reads_before_each_token(models, world, shared):
    """The value of token t is the head's output for transformers' hidden state one place before it."""
    critic = model.load(models["grouped"], world, torch.float32, value_head=True)
    rollout = groups_of(random_rollout(6), 3, 40) if shared else random_rollout(6)
    micro_batches = batching.pack(rollout, torch.arange(6), Compute(200 if shared else 40), world)
    assert (model.frozen_values(critic, rollout, micro_batches) == 0).all()
    weights = torch.linspace(-1, 1, 128)
    with torch.no_grad():
        critic.score.weight.copy_(distribute_tensor(weights[None], world.mesh, critic.score.weight.placements))
    values = model.frozen_values(critic, rollout, micro_batches)
    body = AutoModelForCausalLM.from_pretrained(models["grouped"], dtype=torch.float32).eval().model
    for i, (prompt, response) in enumerate(zip(rollout.prompt_ids, rollout.response_ids)):
        with torch.no_grad():
            hidden = body(torch.tensor([prompt + response])).last_hidden_state[0]
        assert torch.allclose(values[i, : len(response)], hidden[len(prompt) - 1 : -1] @ weights, atol=1e-4)
        assert (values[i, len(response) :] == 0).all()


def test_pack_keeps_the_budget_and_every_row(world):
    rollout = random_rollout(30)
    rows = torch.arange(30)[torch.arange(30) % 3 != 0]
    micro_batches = batching.pack(rollout, rows, Compute(60), world)
    assert sorted(row for micro in micro_batches for row in micro.rows.tolist()) == rows.tolist()
    assert all(micro.input_ids.shape[1] <= 60 or len(micro.rows) == 1 for micro in micro_batches)
    assert batching.pack(rollout, rows[:0], Compute(60), world) == []


@pytest.mark.parametrize("rows_per_chunk, cap", [(1, None), (7, None), (100, None), (7, 2.0)])
def test_chunked_logprobs_equal_the_whole_table(monkeypatch, rows_per_chunk, cap):
    """Log-probs, entropies and both gradients, with targets that repeat, a temperature, and a cap of the logits.

    A head that LoRA does not train changes nothing in the gradient of the hidden states.
    """
    monkeypatch.setattr(logits, "LOGITS_PER_CHUNK", rows_per_chunk * 50 + 1)
    generator = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(n, 16, generator=generator).requires_grad_() for n in (20, 50))
    targets, weights = torch.arange(20) % 6, torch.linspace(-1, 1, 20)
    z = 3 * hidden @ head.t() / TEMPERATURE
    table = (z if cap is None else cap * torch.tanh(z / cap)).log_softmax(-1)
    expected = table[range(20), targets]
    shape = logits.LogitShape(TEMPERATURE, cap)
    logprobs, entropy = logits.ChunkedLogprobs.apply(3 * hidden, head, targets, shape, True)
    assert torch.allclose(logprobs, expected, atol=1e-5) and not entropy.requires_grad
    assert torch.allclose(entropy, -(table.exp() * table).sum(-1), atol=1e-5)
    ours = torch.autograd.grad((logprobs * weights).sum(), (hidden, head))
    theirs = torch.autograd.grad((expected * weights).sum(), (hidden, head))
    assert all((a - b).norm() <= 1e-5 * b.norm() for a, b in zip(ours, theirs))
    alone, _ = logits.ChunkedLogprobs.apply(3 * hidden, head.detach(), targets, shape, True)
    assert torch.equal(torch.autograd.grad((alone * weights).sum(), hidden)[0], ours[0])


def test_logits_of_bfloat16_weights_are_float32():
    """Rounded to bfloat16, a logit of 20 would be up to 0.06 off."""
    hidden, head = (torch.randn(n, 64, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (40, 3000))
    targets = torch.arange(40) * 70
    table = (hidden.double() @ head.double().t()).log_softmax(-1)
    logprobs, entropy = logits.ChunkedLogprobs.apply(hidden, head, targets, logits.LogitShape(), True)
    assert torch.allclose(logprobs.double(), table[range(40), targets], atol=1e-4)
    assert torch.allclose(entropy.double(), -(table.exp() * table).sum(-1), atol=1e-4)


def test_only_products_of_bfloat16_values_may_be_rounded(monkeypatch):
    """The settings are compared and not the results, because most processors round neither product."""
    matmul, asked, may_round = torch.backends.mkldnn.matmul, [], logits.rounded_products
    before = matmul.fp32_precision
    with pytest.raises(KeyError), logits.rounded_products():
        assert matmul.fp32_precision == "bf16"
        raise KeyError
    assert matmul.fp32_precision == before != "bf16"
    monkeypatch.setattr(logits, "rounded_products", lambda rounded: asked.append(rounded) or may_round(rounded))
    for dtype in (torch.float32, torch.bfloat16):
        hidden, head = (torch.randn(n, 8).to(dtype) for n in (4, 30))
        assert {matmul.fp32_precision for _ in logits.logits_in_chunks(hidden, head)} == {before}
    assert asked == [False, True]


def test_long_and_short_sequences_attend_alike(models, world, monkeypatch):
    """Written-out attention weights and the fused kernel give the same gradient, with shared prompts and without."""
    policy, rollout = model.load(models["grouped"], world, torch.float32), groups_of(random_rollout(8), 4, 40)
    for shared in (False, True):
        compute = Compute(10_000, shared_prompts=shared)
        short = gradient(policy, rollout, compute, world)
        with monkeypatch.context() as patch:
            patch.setattr(attention, "WRITTEN_OUT_MAX_KEYS", 0)
            assert relative_difference(short, gradient(policy, rollout, compute, world)) <= 1e-6


@pytest.mark.parametrize("layer", [{"scaling": 0.05}, {"sliding_window": 4}, {"scaling": 2.0, "sliding_window": 9}])
def test_long_sequences_keep_the_scale_and_the_window_of_a_layer(monkeypatch, layer):
    generator = torch.Generator().manual_seed(0)
    layout = attention.spans([(12, [3, 7]), (1, [9])], torch.device("cpu"))
    row = [torch.randn(1, heads, 32, 6, generator=generator) for heads in (4, 2, 2)]
    short, _ = attention.packed_attention(None, *row, None, spans=layout, **layer)
    monkeypatch.setattr(attention, "WRITTEN_OUT_MAX_KEYS", 0)
    long, _ = attention.packed_attention(None, *row, None, spans=layout, **layer)
    assert torch.allclose(short, long, atol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU it is what other needs leave: test_plan.py")
def test_the_token_budget_follows_from_memory(models, capsys):
    def plan(compute: Compute, memory: float = 1e9) -> MemoryPlan:
        return MemoryPlan(model=models["tied"], dtype=torch.float32, size=1, compute=compute, memory=memory)

    small = plan(Compute()).fitted_compute().token_budget
    assert f"token budget: {small} a forward and rank" in capsys.readouterr().out
    taken = small * plan(Compute()).token_bytes
    assert taken <= ACTIVATION_SHARE * 1e9 < 2 * taken
    assert plan(Compute(activation_checkpointing=True)).fitted_compute().token_budget > small
    assert plan(Compute(77)).fitted_compute() == Compute(77)
    assert plan(Compute(), memory=1e15).fitted_compute().token_budget == MAX_BUDGET_TOKENS


@pytest.mark.parametrize("kind, ranks", [("untied", 3), ("grouped", 4)])
def test_heads_that_cannot_be_dealt_to_the_ranks_are_refused(models, kind, ranks):
    checks.check_compute(models[kind], Compute(77, sequence_parallel=2))
    with pytest.raises(BadInput) as refused:
        checks.check_compute(models[kind], Compute(77, sequence_parallel=ranks))
    assert f"--sequence-parallel {ranks} " in str(refused.value) and f"--model {models[kind]}" in str(refused.value)


def test_slices_refuse_positions_that_depend_on_the_row(models):
    config = arithmetic.config()
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    checks.check_heads(config, 1, "m")
    with pytest.raises(BadInput, match="--sequence-parallel 2.* --model m"):
        checks.check_heads(config, 2, "m")


class Slices:
    """Stands for the process group of two ranks, which are threads here."""

    ranks = 2

    def __init__(self):
        self.here = threading.local()
        self.barrier = threading.Barrier(self.ranks, timeout=20)
        self.sent = {}

    def rank(self, group=None) -> int:
        return self.here.rank

    def exchange(self, pieces: torch.Tensor, spans) -> torch.Tensor:
        """Piece k goes to rank k."""
        self.sent[self.here.rank] = pieces
        self.barrier.wait()
        received = torch.stack([self.sent[rank][self.here.rank] for rank in range(self.ranks)])
        self.barrier.wait()  # nobody sends again before all have read
        return received

    def run(self, function) -> list:
        """function(rank) on each rank."""

        def on(rank: int):
            self.here.rank = rank
            return function(rank)

        with ThreadPoolExecutor(self.ranks) as threads:
            return list(threads.map(on, range(self.ranks)))


@pytest.mark.parametrize(
    "layer",
    [{}, {"scaling": 0.3}, {"sliding_window": 4}, {"softcap": 0.5}, {"s_aux": torch.linspace(-2, 2, 8)}],
    ids=lambda layer: next(iter(layer), "plain"),
)
def test_slices_of_a_row_attend_as_the_whole_row_does(monkeypatch, layer):
    """Each rank attends with its own heads, and with their sinks. The row is no multiple of the ranks."""
    generator = torch.Generator().manual_seed(0)
    layout = attention.spans([(4, [3, 2]), (1, [3])], torch.device("cpu"))
    length = 13
    row = [torch.randn(1, heads, length, 6, generator=generator) for heads in (8, 4, 4)]
    (whole,), _ = attention.packed_attention(None, *row, None, spans=layout, **layer)

    group = Slices()
    monkeypatch.setattr(sequence_parallel, "exchange", group.exchange)
    monkeypatch.setattr(sequence_parallel.dist, "get_rank", group.rank)
    size = 7
    spans = SlicedSpans(layout, group=None, length=length, size=size, owner=0, counts=[0] * group.ranks)

    def attend(rank: int) -> torch.Tensor:
        padded = [F.pad(x, (0, 0, 0, group.ranks * size - length)) for x in row]
        slices = [x[:, :, rank * size : (rank + 1) * size] for x in padded]
        (out,), _ = sequence_parallel.sliced_attention(None, *slices, None, spans=spans, **layer)
        return out

    assert torch.allclose(torch.cat(group.run(attend))[:length], whole, atol=1e-6)


def test_neighbours_of_similar_length_share_a_call():
    lengths = sorted(random_rollout(200, longest=90).response_mask.sum(1).tolist())
    runs = attention.spans([(0, [length]) for length in lengths], torch.device("cpu")).runs
    assert [length for run in runs for length in run.lengths] == lengths and len(runs) < len(lengths)
    assert all(max(run.lengths) * len(run.lengths) <= 1.15 * sum(run.lengths) for run in runs)
    starts = [run.start for run in runs]
    assert starts == [sum(lengths[: lengths.index(run.lengths[0])]) for run in runs]
    (run,) = attention.spans([(2, [3])] * 3, torch.device("cpu")).runs
    assert run == Run(0, [5, 5, 5])
    # Responses to one prompt may have more padding, because a call copies the prompt. It has a limit, too.
    few, many = (
        [run.lengths for run in attention.spans([(40, lengths)], torch.device("cpu")).runs[1:]]
        for lengths in ([10, 90], [10] * 50 + [900])
    )
    assert few == [[10, 90]] and many == [[10] * 50, [900]]


def test_mask_comes_from_lengths_not_from_token_ids():
    """A padding id inside a response is a sampled token like any other."""
    rollout = collate([[3]], [[0, 1, 0, 1]], [[-1.0, -2.0, -3.0, -4.0]], [False], 0, torch.device("cpu"))
    assert rollout.response_mask.tolist() == [[True] * 4]
    assert rollout.rollout_logprobs.tolist() == [[-1.0, -2.0, -3.0, -4.0]]
