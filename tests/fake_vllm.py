"""A VLLMEngine whose vLLM is played here: the shares of ranks, the order of responses and the noise are its own."""

import random
from types import SimpleNamespace

import torch

from common.placement import World
from common.rollout.vllm_engine import VLLMEngine

NOISE = 4  # tokens of a response that are drawn
VLLM = SimpleNamespace(SamplingParams=SimpleNamespace)  # the module, which takes 8 s to import


class FakeLLM:
    """Answers each prompt with its last token and NOISE others.

    As in vLLM, they follow from the seed of the request or, without one, from torch's generator. The length limit cuts
    off every second response to a prompt.
    """

    def __init__(self):
        self.waiting = []
        self.asked = []  # the sampling parameters of each prompt of the last call
        self.sampled = []  # all responses
        self.llm_engine = self

    def enqueue(self, prompts: list[dict], sampling, use_tqdm: bool) -> list[str]:
        each = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
        self.asked = each
        self.waiting = [(f"{i}", prompt["prompt_token_ids"], one) for i, (prompt, one) in enumerate(zip(prompts, each))]
        return [f"{name}-x" for name, *_ in self.waiting]

    def has_unfinished_requests(self) -> bool:
        return len(self.waiting) > 0

    def step(self) -> list:
        name, ids, sampling = self.waiting.pop()  # the last one ends first
        outputs = []
        for sample in range(sampling.n):
            seed = getattr(sampling, "seed", None)
            draw = random.Random(int(torch.randint(2**40, ())) if seed is None else seed + sample)
            noise = [draw.randrange(3, 50) for _ in range(NOISE)]
            logprobs = SimpleNamespace(logprobs=[-1.0] * (1 + NOISE))
            self.sampled.append([ids[-1], *noise])
            reason = "length" if sample % 2 else "stop"
            outputs.append(SimpleNamespace(token_ids=self.sampled[-1], logprobs=logprobs, finish_reason=reason))
        return [SimpleNamespace(request_id=name, finished=True, outputs=outputs, prompt_token_ids=ids)]


def fake_engine(world: World) -> VLLMEngine:
    """An engine of this world. generate() imports vllm: put VLLM in its place in sys.modules."""
    engine = object.__new__(VLLMEngine)
    engine.world = world
    engine.llm = FakeLLM()
    engine.stop_token_ids = [1]
    engine.never = ()
    engine.weight_version = 0
    return engine
