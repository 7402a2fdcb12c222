"""What rank 0 asks of vLLM's servers besides responses: their state, a pause, and to take weights."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx

from common.errors import RunFailed
from common.json_lines import parse
from common.servers import ANSWER_WITHIN, healthy, is_local

UPDATE_WITHIN = 300.0  # seconds, of one part of a weight update


@dataclass
class Control:
    """The weight-transfer routes of all servers at once: the client that vLLM's trainer engines want.

    Raises RunFailed naming the server that failed. vLLM opens these routes with VLLM_SERVER_DEV_MODE=1.
    """

    urls: list[str]
    offsets: list[int] = field(default_factory=list)  # NCCL rank of each server's first worker
    workers: int = 0  # of all servers
    version: str = "0"  # of the weights that are being sent

    def everywhere(self, path: str, bodies: list[dict] | dict | None = None, key: str = "") -> list:
        """POST to all servers at the same time; bodies: one for each, or one for all. The replies, or what each has
        under `key`.
        """
        bodies = bodies if isinstance(bodies, list) else [bodies] * len(self.urls)
        with ThreadPoolExecutor(len(self.urls)) as pool:
            return list(pool.map(lambda url, body: self.request("POST", url, path, body, key), self.urls, bodies))

    def request(self, method: str, url: str, path: str, body: dict | None = None, key: str = "") -> Any:
        """One request; the reply's JSON, or what it has under `key`. Raises RunFailed."""
        timeout = httpx.Timeout(ANSWER_WITHIN if method == "GET" else UPDATE_WITHIN, connect=ANSWER_WITHIN)
        try:
            reply = httpx.request(method, url + path, json=body, timeout=timeout, trust_env=not is_local(url))
        except httpx.HTTPError as error:
            said = f"rollout server {url} is gone: {path}: {type(error).__name__}: {error}"
            raise RunFailed(said, code="server-gone") from None
        if reply.status_code == 404:
            said = f"rollout server {url} has no {path}: scripts/serve_rollout.sh starts one that has"
            raise RunFailed(said, code="server-refused")
        if "arrived damaged" in reply.text:  # by SharedMemoryTransfer
            raise RunFailed(f"rollout server {url}: {reply.text[:300]}", code="weight-checksum")
        if reply.status_code != 200:  # also how a server answers in the moment its engine is lost
            code = "server-refused" if healthy(url) else "server-gone"
            raise RunFailed(f"rollout server {url} refused {path} ({reply.status_code}): {reply.text[:300]}", code=code)
        try:
            return parse(reply.content)[key] if key else parse(reply.content)
        except (LookupError, TypeError, ValueError) as error:
            said = f"rollout server {url} gave to {path} what is no reply of vLLM's: {type(error).__name__}: {error}"
            raise RunFailed(said, code="server-refused") from None

    def check(self) -> None:
        """Whether all answer, have the routes, and how many workers each has. Raises RunFailed."""
        self.offsets, self.workers = [], 0
        self.resume()  # a run that was killed during an update has left them paused
        self.everywhere("/update_weight_version", {"new_version": "0"})  # and numbered: this run counts its own
        for url in self.urls:
            self.offsets.append(1 + self.workers)
            self.workers += self.request("GET", url, "/get_world_size", key="world_size")

    def init_weight_transfer_engine(self, init_info: dict) -> None:
        """vLLM's trainer knows one server: its offset is right for the first one's workers alone."""
        bodies = [{"init_info": {**init_info, "rank_offset": offset}} for offset in self.offsets]
        self.everywhere("/init_weight_transfer_engine", bodies)

    def start_weight_update(self) -> None:
        self.everywhere("/start_weight_update")

    def update_weights(self, update_info: dict) -> None:
        self.everywhere("/update_weights", {"update_info": update_info})

    def finish_weight_update(self) -> None:
        self.everywhere("/finish_weight_update", {"weight_version": self.version})

    def pause(self) -> None:
        """Responses half done stay until resume(), and are then continued from keys and values computed anew: a pause
        clears the cache, so that nothing is continued from older weights'.
        """
        self.everywhere("/pause?mode=keep")

    def resume(self) -> None:
        self.everywhere("/resume")

    def check_version(self) -> None:
        """Raises RunFailed naming a server whose weights are of another version."""
        for url in self.urls:
            found = self.request("GET", url, "/weight_info", key="weight_version")
            if found != self.version:
                said = f"rollout server {url} has weights of version {found}, not {self.version}"
                raise RunFailed(said, code="weight-version")

    def check_alike(self) -> None:
        """Raises RunFailed naming a server whose weights are not those of the first."""
        checksums = self.everywhere("/weight_checker", {"action": "checksum"}, key="checksums")
        for url, found in zip(self.urls, checksums):
            if found != checksums[0]:
                said = f"rollout servers {self.urls[0]} and {url} hold different weights"
                raise RunFailed(said, code="weight-checksum")
