"""The process of an entry: its file, run as a user would, with a clock and without answers.

    entrant.py ADDRESS FILE FLAG ...            referee.py starts it, and listens at ADDRESS

Each call of the engine's generate() is reported: prompts and responses as tokens, and what the clock shows. The reward
is the referee's answer. Messages are lines of JSON. A run that prepares itself with other data than the flags name, or
loads another model, is stopped. The clock counts in all threads, and nothing runs after its last reading.
"""

import itertools
import json
import os
import runpy
import socket
import sys
import threading
import traceback
from types import SimpleNamespace
from typing import NoReturn

from clock import Clock

from common import rewards
from common.data.tokenizer import resolve_model
from common.placement import Layout
from common.preflight import prepare as preflight
from common.rewards import Result
from common.rollout import engines
from common.rollout.vllm_engine import VLLMEngine
from common.run import stopping
from common.trainer import model


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
    """generate() of an engine, which also tells the referee what it has sampled. Only `done` sees responses before."""

    # Without functools.wraps, which would leave the engine's own generate() in an attribute.
    def generate_and_tell(engine, prompt_ids, n, temperature, max_tokens, seed, done=None, reply=None):
        # Replies would become a part of the responses.
        if reply is not None:
            raise RuntimeError("generate(reply=...): the speedrun has no environment; leave it out")
        # Tuples: the entry's `done` runs while the engine samples, and could change its own lists.
        prompts = tuple(tuple(map(int, ids)) for ids in prompt_ids)

        def done_with_copies(index, token_ids, truncated):
            done(index, [list(ids) for ids in token_ids], list(truncated))

        told = None if done is None else done_with_copies
        try:
            rollout = generate(engine, [list(ids) for ids in prompts], n, temperature, max_tokens, seed, told)
        except BaseException:
            # `done` may have shown samples to the entry. If that could catch this error, nobody would hear of them.
            traceback.print_exc()
            leave(1)
        wire.tell(prompts=prompts, responses=[list(ids) for ids in rollout.response_ids], flops=clock.flops)
        return rollout

    return generate_and_tell


def leave(code: int) -> NoReturn:
    """End this process at once, with what it has printed. No code of the entry runs after that."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def values_of(flags: list[str]) -> dict[str, str]:
    """Each flag and what follows it. Of equal flags the last one counts."""
    return dict(itertools.pairwise(flags))


def with_the_flags_data(prepare, flags: list[str]):
    """prepare(), which refuses arguments that the file has changed to get answers, or another start model."""
    words = values_of(flags)
    right = {
        "model": words["--model"],
        "dataset": (words["--dataset"],),
        "reward": (words["--reward"],),
        "environment": "",
        "seed": int(words["--seed"]),
    }
    start_model = resolve_model(right["model"])

    def prepare_with_the_flags_data(args, *given, **named):
        for name, value in right.items():
            # Not getattr: a property could show the right data set now, and another one to prepare().
            if vars(args).get(name) != value:
                raise RuntimeError(f"prepare(): {name} is {vars(args).get(name)!r}; the speedrun sets {value!r}")
        held_out = vars(vars(args).get("source", SimpleNamespace())).get("eval_dataset")
        if held_out != ():
            raise RuntimeError(f"prepare(): eval_dataset is {held_out!r}; the speedrun sets ()")
        settings = prepare(args, *given, **named)
        # What counts is what prepare() has read.
        if settings.reward_names != right["reward"] or settings.model != start_model:
            raise RuntimeError(f"prepare(): --reward is {settings.reward_names}, and --model {settings.model!r}")
        if settings.resume is not None or settings.others:
            raise RuntimeError(f"prepare(): it resumes {settings.resume}, or reads other models: {settings.others}")
        if any(prompt.answer is not None for prompt in settings.prompts + settings.held_out):
            raise RuntimeError("prepare(): its prompts have answers")
        return settings

    return prepare_with_the_flags_data


def only_the_start_model(load, start_model: str):
    """model.load(), which refuses other weights: they would be what an earlier run has learned."""

    def load_the_start_model(model_path, *given, **named):
        if model_path != start_model:
            raise RuntimeError(f"model.load(): {model_path!r} is not the start model {start_model!r}")
        return load(model_path, *given, **named)

    return load_the_start_model


def only_in_this_process(start, start_model: str):
    """engines.start(), which refuses servers, whose samples no clock would count, and another engine or model."""

    def start_in_this_process(backend, model_path, *given, layout=Layout(), **named):
        # A subclass could have a `split` of its own.
        if (backend, model_path) != ("vllm", start_model) or type(layout) is not Layout or layout.split:
            raise RuntimeError("engines.start(): the speedrun has one engine, vLLM in this process, of the start model")
        return start(backend, model_path, *given, layout=layout, **named)

    return start_in_this_process


def clocked(run, clock: Clock):
    """Thread.run(), with the clock: without it, torch computes in a new thread unseen."""

    def run_with_the_clock(thread):
        with clock:
            run(thread)

    return run_with_the_clock


def main(address: str, file: str, flags: list[str]) -> None:
    wire = Wire(address)
    clock = Clock()
    VLLMEngine.generate = reported(VLLMEngine.generate, wire, clock)
    preflight.prepare = with_the_flags_data(preflight.prepare, flags)
    start_model = resolve_model(values_of(flags)["--model"])
    model.load = only_the_start_model(model.load, start_model)
    engines.start = only_in_this_process(engines.start, start_model)

    def referee(items, lengths, truncated) -> list[Result]:
        """The reward of each response. The referee grades tokens that it knows were sampled, and not the text."""
        scores = wire.ask(grade=[[item.prompt, item.response_ids] for item in items])
        return [Result(score, score) for score in scores]

    rewards.BUILT_IN["referee"] = referee  # --reward referee, which referee.py adds to the flags
    threading.Thread.run = clocked(threading.Thread.run, clock)
    # A run that is asked to stop would save its weights and end as if all steps were done. So a signal kills it.
    stopping.StopSignals.install = lambda signals: None
    sys.argv = [file, *flags]
    with clock:
        runpy.run_path(file, run_name="__main__")
    wire.tell(done=True, flops=clock.flops)
    # A generator's `finally`, or what was registered for the end of the process, would compute after the clock.
    leave(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
