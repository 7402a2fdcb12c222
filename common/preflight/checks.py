"""Checks of what a user brings, before anything is loaded: the model, the prompts, the rewards."""

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

from transformers import AutoConfig, PreTrainedTokenizerBase

from common.data import families, weights
from common.data.prompts import Prompt
from common.data.tokenizer import causal_class, image_tokens, load_tokenizer
from common.errors import BadInput, say
from common.placement import Layout
from common.rewards.grading import Item
from common.rewards.mixture import Rewards, grade
from common.trainer import model, packing_check
from common.trainer.batching import Compute
from common.trainer.kernels import check_kernels
from common.trainer.parts import decoder_of


def check_held_out(
    prompts: list[Prompt],
    size: int,
    cure: str = "raise --eval-prompts, give more rows in --eval-dataset, or --eval-prompts 0",
) -> None:
    """Refuse prompts that are fewer than the ranks, whose engines all have to sample. Raises BadInput."""
    if 0 < len(prompts) < size:
        raise BadInput(f"{len(prompts)} prompts to evaluate on {size} ranks: each needs at least one; {cure}")


def check_images(prompts: list[Prompt], compute: Compute, environment="", layout=Layout()) -> None:
    """Refuse flags that prompts with images, or without, cannot be combined with. Raises BadInput."""
    with_images = have_images(prompts)
    if compute.train_vision and not with_images:
        raise BadInput("--train-vision: no prompt has an image")
    if compute.train_vision and compute.lora_rank:
        raise BadInput("--train-vision: --lora-rank freezes it")
    unsuitable = {
        "--environment": environment,
        "--rollout-placement split": layout.split,
        "--sequence-parallel": compute.sequence_parallel > 1,
        "--packing off": compute.packing == "off",
    }
    for flag, is_set in unsuitable.items():
        if is_set and with_images:
            raise BadInput(f"{flag}: prompts with images do not go together with it")


def have_images(prompts: list[Prompt]) -> bool:
    return any(hasattr(prompt.ids, "images") for prompt in prompts)


def check_model(
    model_path: str,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[Prompt],
    *,
    quantized: bool = False,
) -> None:
    """Refuse an architecture that is no decoder, weights that are not those of the architecture, and prompts with
    tokens that have no embedding. The weights of a name on the Hub are checked when they are loaded.

    quantized: only vLLM, which can read quantized weights, loads the model. Raises BadInput.
    """
    config = AutoConfig.from_pretrained(model_path)
    if not quantized:
        weights.refuse_quantized(config, f"--model {model_path}")
    model.skeleton(AutoConfig.from_pretrained(model_path), model_path)
    if image_tokens(config):
        from common.trainer import vision

        refused = f"--model {model_path}: {config.model_type} models are not supported, because of"
        vision.check_family(config, refused, any(hasattr(prompt.ids, "images") for prompt in prompts))
    if Path(model_path).is_dir() and not weights.quantization(config):
        check_weights(model_path)
    say_noise(config)
    # Such a token would raise an error of CUDA that names nothing, in the first forward.
    largest = max(max(prompt.ids) for prompt in prompts)
    embeddings = config.get_text_config().vocab_size
    if largest >= embeddings:
        raise BadInput(
            f"--model {model_path}: its tokenizer has {len(tokenizer)} tokens, config.json says {embeddings}, "
            f"and token {largest} is in a prompt"
        )


def check_compute(model_path: str, compute: Compute) -> None:
    """Refuse kernels that this machine or model lacks, and more ranks than can share a row. Raises BadInput."""
    config = AutoConfig.from_pretrained(model_path)
    check_kernels(compute.kernels)
    check_heads(config, compute.sequence_parallel, model_path)


def settle_packing(model_path: str, compute: Compute, prompts: list[Prompt]) -> Compute:
    """The settings with --packing off for a model whose layers need that. Prints the reason. Raises BadInput, also for
    prompts with images: only packed rows can have them.

    A model whose layers look right may still turn out to need it, once it is loaded (packing_check.choose_forward).
    """
    skeleton = model.skeleton(AutoConfig.from_pretrained(model_path), model_path)
    packed = compute
    if families.carries_state(decoder_of(skeleton)):
        packed = replace(compute, shared_prompts=False)  # kernels may keep sequences apart, but no two share a state
    reason = packing_check.why_not_packed(skeleton, packed)
    if reason and compute.packing == "on":
        raise BadInput(f"--packing on: packed rows of --model {model_path} would be wrong, because of {reason}")
    if reason and compute.packing == "auto":
        if have_images(prompts):
            raise BadInput(
                f"--model {model_path}: prompts with images need packed rows, which would be wrong because of {reason}"
            )
        say(f"packing: off, because of {reason}")
        compute = replace(compute, packing="off")
    if compute.packing == "off":
        packing_check.check_settings(compute)
        return compute
    return packed


def say_noise(config) -> None:
    """Print which random layers of a model are switched off. config is changed."""
    noise = model.silence(config.get_text_config())
    if noise:
        settings = ", ".join(f"{name} = {value:g}" for name, value in noise.items())
        say(f"random layers: switched off ({settings}), because the engine samples without them")


def check_weights(folder: str, flag: str = "--model") -> None:
    """Compare the headers of a folder's weights with the model of its config.json. Raises BadInput naming tensors."""
    # On the meta device only the headers of the files are read.
    where = f"{flag} {folder}"
    described = weights.read(causal_class(AutoConfig.from_pretrained(folder)), folder, where, device_map="meta")
    weights.check_headers(folder, described.all_tied_weights_keys, where)


def positions_of(model_path: str, trains: bool = True) -> int:
    """Positions of the model, or those that a run can train on.

    With longrope these are the positions of its short frequencies, if the family chooses its frequencies in a way that
    families.fix_longrope does not know.
    """
    config = AutoConfig.from_pretrained(model_path).get_text_config()
    if trains and config.model_type in families.OWN_LONGROPE:
        return families.longrope_limit(config) or config.max_position_embeddings
    return getattr(config, "max_position_embeddings", sys.maxsize)


def total_tokens(
    model_path: str, prompts: list[Prompt], max_response_tokens: int, flag: str = "--model", trains: bool = True
) -> int:
    """Tokens of the longest prompt plus the longest response. Raises BadInput if the model has fewer positions.

    trains: False for an engine alone, which can use all positions.
    """
    longest = max(len(prompt.ids) for prompt in prompts)
    total = longest + max_response_tokens
    positions = positions_of(model_path, trains)
    if total > positions:
        all_positions = positions_of(model_path, trains=False)
        limit = ""
        if positions < all_positions:
            limit = f" to train on (longrope: of its {all_positions}, those of its short frequencies)"
        raise BadInput(
            f"--max-response-tokens {max_response_tokens}: with prompts of up to {longest} tokens that is {total}, "
            f"and {flag} has {positions} positions{limit}"
        )
    return total


def check_companion(
    flag: str,
    model_path: str,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[Prompt],
    max_response_tokens: int,
    compute: Compute = Compute(),
) -> None:
    """Refuse a second model, such as a teacher, that cannot read the policy's tokens: it needs the same tokenizer,
    enough positions, and images where prompts have some. It has to pass the checks of --model, too. Raises BadInput.
    """
    # Equal tokens need equal numbers: the model reads the policy's token ids as they are.
    ours = tokenizer.get_vocab()
    theirs = load_tokenizer(model_path, flag)[0].get_vocab()
    for token, number in sorted(ours.items(), key=lambda item: item[1]):
        if theirs.get(token) != number:
            there = f"is {theirs[token]} there" if token in theirs else "is unknown there"
            raise BadInput(
                f"{flag} {model_path}: its tokenizer is not that of --model: token {number}, {token!r}, {there}"
            )
    with_images = next((prompt.ids for prompt in prompts if hasattr(prompt.ids, "images")), None)
    if with_images and not image_tokens(AutoConfig.from_pretrained(model_path)):
        raise BadInput(f"{flag} {model_path}: sees no images, and prompts have some")
    total_tokens(model_path, prompts, max_response_tokens, flag)
    try:
        check_compute(model_path, compute)
        check_model(model_path, tokenizer, prompts)
        if with_images:
            from common.data import images

            images.check_same(model_path, with_images)
    except BadInput as error:  # these checks name --model
        raise BadInput(str(error).replace(f"--model {model_path}", f"{flag} {model_path}"), code=error.code) from None


def try_rewards(reward: Rewards, prompts: list[Prompt], tokenizer: PreTrainedTokenizerBase) -> None:
    """Call each reward that can be tried with two responses to each of the first two prompts of each data set.

    The responses are the row's own solution or answer, and a wrong one. Raises BadInput if a call fails.
    """
    items = []
    # Data sets of a mixture may have different columns, so each of them is tried.
    tried = Counter()  # data set -> prompts
    for group, prompt in enumerate(prompts):
        tried[prompt.dataset] += 1
        if tried[prompt.dataset] > 2:
            continue
        solution = prompt.solution[-1] if isinstance(prompt.solution, list) else prompt.solution
        # A turn with calls or reasoning: a response is graded by its text.
        if isinstance(solution, dict):
            solution = solution["content"]
        for response in (solution or prompt.answer or "", "I do not know."):
            ids = tokenizer.encode(response, add_special_tokens=False)
            items.append(Item(prompt.text, response, prompt.answer, prompt.meta, ids, group))
    lengths = [len(item.response_ids) for item in items]
    for name, function in reward.rewards.items():
        if hasattr(function, "try_out"):
            grade(name, function.try_out, items, lengths, [False] * len(items))


def heads_of_all(config) -> list[tuple[int, int]]:
    """Numbers of query heads, and of key and value heads: of each kind of layer, if they differ."""
    return sorted(set(map(families.heads_of, families.layer_configs(config.get_text_config()))))


def check_engine_heads(model_path: str, ranks: int) -> None:
    """Refuse a model whose heads vLLM cannot share out among the ranks of an engine. Raises BadInput."""
    for queries, keys in heads_of_all(AutoConfig.from_pretrained(model_path)):
        # Several ranks can hold the same key and value head.
        keys_fit = keys % ranks == 0 or ranks % keys == 0
        if queries % ranks or not keys_fit:
            raise BadInput(
                f"--rollout-tp {ranks} does not divide the {queries} query heads and {keys} key and value heads of "
                f"--model {model_path}"
            )


def check_heads(config, ranks: int, model_path: str) -> None:
    """Refuse a model whose attention cannot be shared out among the ranks of --sequence-parallel. Raises BadInput."""
    for queries, keys in heads_of_all(config):
        if queries % ranks or keys % ranks:
            raise BadInput(
                f"--sequence-parallel {ranks} does not divide the {queries} query heads and {keys} key and value heads "
                f"of --model {model_path}"
            )
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    if ranks > 1 and rope.get("rope_type") == "dynamic":
        raise BadInput(
            f"--sequence-parallel {ranks}: a slice does not see the longest position of its row, on which the "
            f"rotary frequencies of --model {model_path} depend"
        )
