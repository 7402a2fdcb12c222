"""Two ranks, servers that are not there: rank 1 alone sees the losses. Prints what each rank does."""

import torch
import torch.distributed as dist

from common import placement, server_control, server_engine, servers
from common.errors import RunFailed

LOST = (1, 3)  # of rank 1's requests; the second is the first one again
asked = []


class Weights:
    def __iter__(self):
        for name in "ab":
            whole = torch.ones(2)
            dist.all_reduce(whole)  # as FullParameters gathers: every rank, or none
            yield name, whole


class Server:
    def __init__(self, url: str):
        self.url = url

    def last_words(self) -> str:
        return "nothing"

    def stop(self) -> None:
        """It is not there."""


class Control:
    def __init__(self, urls: list[str]):
        self.urls = urls

    def __getattr__(self, route: str):
        return lambda *args: None


async def ask_all(requests: list, told) -> list:
    url = requests[0][0]
    asked.append(url)
    if dist.get_rank() == 1 and len(asked) in LOST:
        raise RunFailed(f"rollout server {url} is gone", code="server-gone")
    spans = [{"version": "1", "start": 0, "end": 1}]
    content = [{"token_id": 7, "logprob": -0.5}]
    return [[{"token_ids": [7], "logprobs": {"content": content}, "finish_reason": "stop", "weight_versions": spans}]]


def main() -> None:
    started = iter((1, 2))
    servers.start = lambda *args, **limits: [Server(f"http://own{next(started)}")]
    server_control.Control = Control
    server_engine.ask_all = ask_all
    world = placement.init(0)
    layout, sizes = placement.Layout("split", (1,)), {"max_model_len": 64, "max_num_seqs": 8}
    engine = server_engine.ServerEngine("model", [1], world, torch.float32, 1, layout, {}, **sizes)
    engine.load_weights(Weights())
    batch = engine.generate([[5]], n=1, temperature=1.0, max_tokens=1, seed=0)
    print(f"goes on with version {batch.weight_versions.item()} at {engine.urls[0]}", flush=True)
    engine.load_weights(Weights())
    try:
        engine.generate([[5]], n=1, temperature=1.0, max_tokens=1, seed=0)
    except RunFailed as error:
        print(f"ended: {error.code}", flush=True)
    placement.finish(world, engine)


main()
