"""Episodes of several turns with a random model: turns.py MODEL ENVIRONMENT TP BACKEND, where BACKEND is vllm, hf or
servers (one vLLM server on each of two cores). Servers follow the trainer's updates first, as in sync.py: they take
longer to start than all of this to run.

For each of four forms of a conversation it prints max |log-prob of the trainer - log-prob of the engine| over the
tokens that the policy sampled, after it has asserted that every token of the loss is one that the engine returned.
"""

import os
import runpy
import sys
from pathlib import Path

import torch

from common import placement
from common.data.prompts import Prompt
from common.data.suffix import Suffix
from common.data.tokenizer import load_tokenizer
from common.rollout import engines
from common.rollout.environments.episodes import Environments
from common.trainer import batching, model

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
THINKING = (  # like Qwen3's: an empty thought stands before the latest turn only
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORMS = {"plain": None, "chatml": CHATML, "llama": LLAMA, "thinking": THINKING}
ROOM, N = 60, 3  # tokens of a response, responses to a prompt


def main(model_path: str, environment: str, tp: int, backend: str) -> None:
    layout = placement.Layout()
    if backend == "servers":
        backend, cores = "vllm", sorted(os.sched_getaffinity(0))[:2]
        layout = placement.Layout(rollout_placement="split", rollout_devices=tuple(cores))
    tokenizer, _ = load_tokenizer(model_path)
    # With many end tokens a random model takes short turns.
    ends = sorted(tokenizer.convert_tokens_to_ids(["<eos>", "<|im_end|>", "<|eot_id|>", *"uvwxyz"]))
    world = placement.init(0, tp)
    policy = model.load(model_path, world, torch.float32, batching.Compute())
    sizes = {"max_model_len": 160, "sequences": 32, "layout": layout, "rollout_tp": tp}
    engine = engines.start(backend, model_path, ends, world, torch.float32, **sizes)
    if layout.split:
        engine.stop_token_ids = [1]  # longer responses
        runpy.run_path(str(Path(__file__).with_name("sync.py")))["follow"](world, policy, engine)
        engine.stop_token_ids = ends
    kinds = set()
    for form, template in FORMS.items():
        tokenizer.chat_template = template
        environments = Environments(environment, tokenizer, ends)
        prompts = [Prompt(f"{form}:{world.rank}:{i}", "", [5 + world.rank, 6, 7 + i] * 9, str(i)) for i in range(6)]
        for seed in range(2):
            reply = environments.replies(prompts, step=seed)
            batch = engine.generate([prompt.ids for prompt in prompts], N, 1.0, ROOM, seed, reply=reply)
            if form in ("plain", "thinking"):
                again = engine.generate([prompt.ids for prompt in prompts], N, 1.0, ROOM, seed, reply=reply)
                assert again.response_ids == batch.response_ids, "the same seed gives the same episodes"
            kinds |= check(batch, prompts, tokenizer, environments.suffix, ends)
            micro_batches = batching.pack(batch, torch.arange(len(batch)), batching.Compute(600), world)
            trainer = model.frozen_logprobs(policy, batch, micro_batches, temperature=1.0)
            gap = world.max((trainer - batch.rollout_logprobs)[batch.response_mask].abs().max())
            if world.is_main:
                print(f"gap {form} {gap:.3e}", flush=True)
        environments.pool.close()
    expected = {"one turn", "several turns", "cut off", "no room for the observation", "other ids if encoded again"}
    assert kinds >= expected, kinds
    placement.finish(world, engine)


def check(batch, prompts: list[Prompt], tokenizer, suffix: Suffix, ends: list[int]) -> set[str]:
    """Assert that the batch is what its episodes say, and return the kinds of episodes that it has."""
    kinds = set()
    for row, turns in enumerate(batch.episodes):
        ids, mask = batch.response_ids[row], batch.response_mask[row, : len(turns.ids)].tolist()
        assert ids == turns.ids and mask == turns.sampled and len(ids) <= ROOM and mask[0] and mask[-1]
        assert batch.prompt_ids[row] == prompts[row // N].ids and not batch.response_mask[row, len(ids) :].any()
        assert (batch.rollout_logprobs[row, : len(ids)] < 0).tolist() == mask  # random weights are never certain
        # Play the turns again: sampled ids, then the suffix of the environment's answer to their text.
        place = 0
        for i, said in enumerate(turns.texts):
            end = next((t + 1 for t in range(place, len(ids)) if ids[t] in ends), len(ids))
            ended = ids[end - 1] in ends
            assert all(mask[place:end]) and tokenizer.decode(ids[place : end - ended], skip_special_tokens=True) == said
            again = tokenizer(tokenizer.decode(ids[place:end]), add_special_tokens=False)["input_ids"]
            kinds |= {"other ids if encoded again"} if again != ids[place:end] else set()
            place = end
            if i < len(turns.observations):
                expected = suffix.ids([turns.observations[i]])
                assert turns.observations[i].startswith(f"{i}: {len(said)} letters")
                assert (
                    ended and ids[place : place + len(expected)] == expected and not any(mask[place:][: len(expected)])
                )
                place += len(expected)
        assert place == len(ids) and len(turns.texts) == len(turns.observations) + 1
        cut_off, finished = ids[-1] not in ends, turns.result.info["finished"]
        assert turns.truncated == batch.truncated[row].item() and (len(ids) == ROOM or not cut_off)
        assert turns.truncated if cut_off else turns.truncated != finished
        ending = "cut off" if cut_off else "no room for the observation"
        kinds |= {"one turn" if len(turns.texts) == 1 else "several turns"} | ({ending} if not finished else set())
    return kinds


main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
