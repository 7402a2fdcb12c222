"""The process of an entry: its file, run as a user would, with a clock and without answers.

    entrant.py ADDRESS FILE FLAG ...            referee.py starts it, and listens at ADDRESS

Each call of the engine's generate() is reported: prompts and responses as tokens, and what the clock shows. The reward
is the referee's answer. Messages are lines of JSON.
"""

import functools
import json
import runpy
import socket
import sys

from clock import Clock

from common import rewards
from common.rewards import Result
from common.rollout.hf_engine import HFEngine
from common.rollout.vllm_engine import VLLMEngine


class Wire:
    """The connection to the referee."""

    def __init__(self, address: str):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(address)
        self.stream = connection.makefile("rw")

    def tell(self, **message) -> None:
        """Send a message that has no answer."""
        self.stream.write(json.dumps(message) + "\n")
        self.stream.flush()

    def ask(self, **message):
        """Send a message, and wait for its answer."""
        self.tell(**message)
        return json.loads(self.stream.readline())


def reported(generate, wire: Wire, clock: Clock):
    """generate() of an engine, which also tells the referee what it has sampled, before the entry sees it."""

    @functools.wraps(generate)
    def generate_and_tell(engine, prompt_ids, *given, **named):
        rollout = generate(engine, prompt_ids, *given, **named)
        prompts = [list(ids) for ids in prompt_ids]
        wire.tell(prompts=prompts, responses=[list(ids) for ids in rollout.response_ids], flops=clock.flops)
        return rollout

    return generate_and_tell


def main(address: str, file: str, flags: list[str]) -> None:
    wire = Wire(address)
    clock = Clock()
    for engine in (VLLMEngine, HFEngine):
        engine.generate = reported(engine.generate, wire, clock)

    def referee(items, lengths, truncated) -> list[Result]:
        """The reward of each response. The referee grades tokens that it knows were sampled, and not the text."""
        scores = wire.ask(grade=[[item.prompt, item.response_ids] for item in items])
        return [Result(score, score) for score in scores]

    rewards.BUILT_IN["referee"] = referee  # --reward referee, which referee.py adds to the flags
    sys.argv = [file, *flags]
    with clock:
        runpy.run_path(file, run_name="__main__")
    wire.tell(done=True, flops=clock.flops)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
