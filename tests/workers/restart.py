"""Two ranks with fake servers, whose losses only rank 1 sees. Prints what each rank does."""

import torch
import torch.distributed as dist

from common import placement
from common.data import arithmetic
from common.errors import RunFailed
from common.rollout.rollout import Response
from common.rollout.servers import client, process, vllm_api
from common.rollout.servers.engine import ServerEngine
from common.rollout.vllm_engine import EngineConfig

LOST = (1, 3)  # rank 1 loses its first and third request; the second repeats the first
asked = []


class Weights:
    def __iter__(self):
        for name in "ab":
            whole = torch.ones(2)
            dist.all_reduce(whole)  # gathering in FullParameters needs every rank, too
            yield name, whole


class Server:
    def __init__(self, url: str):
        self.url = url

    def last_words(self) -> str:
        return "nothing"

    def stop(self) -> None:
        """It is not there."""


class Control:
    def __init__(self, urls: list[str], inflight_updates: str):
        self.urls = urls

    def send(self, source, version: int, device) -> None:
        for _ in source:
            pass

    def __getattr__(self, route: str):
        return lambda *args, **named: None


async def ask_all(requests: list, versions, done, follow, api, salted: bool) -> list:
    url = requests[0][0]
    asked.append(url)
    if dist.get_rank() == 1 and len(asked) in LOST:
        raise RunFailed(f"rollout server {url} is gone", code="server-gone")
    return [[Response([7], [-0.5], False, list(versions()))]]


def main() -> None:
    started = iter((1, 2))
    process.start = lambda config: [Server(f"http://own{next(started)}")]
    vllm_api.Control, client.ask_all = Control, ask_all
    world = placement.init(0)
    config = EngineConfig(
        model_path=arithmetic.WARM_START,
        dtype=torch.float32,
        tensor_parallel=1,
        layout=placement.Layout("split", (1,)),
        max_model_len=64,
        max_num_seqs=8,
    )
    engine = ServerEngine(config, [1], world)
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
