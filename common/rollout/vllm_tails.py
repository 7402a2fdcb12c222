"""The end of a prompt is computed once for all responses to it: a connector for vLLM's KV cache, on a CPU.

vLLM keeps keys and values in blocks, of 32 tokens on a CPU, and requests with the same start share whole blocks. The
tail of a prompt, which fills a part of its last block, would be computed again for each response. Here the first
response to a prompt computes it, a copy of that block is kept, and the other responses, which wait for one forward,
begin with the copy. They compute only the prompt's last token, because they need its logits.

vLLM makes one connector for its scheduler, and one for its worker, which gets `Orders` from the first. Both run in one
process and one thread, in turns.
"""

from collections import defaultdict
from dataclasses import dataclass, field

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

SHORTEST_TAIL = 8  # tokens; computing fewer again is as fast as the forward that the others would wait for
Ids = tuple[int, ...]  # token ids of a prompt


@dataclass
class Orders(KVConnectorMetadata):
    """Copies that the worker makes around one forward. A place is the number of a block in the KV cache."""

    give: list[tuple[Ids, int]] = field(default_factory=list)  # before the forward: write the prompt's copy there
    drop: list[Ids] = field(default_factory=list)  # then: free these copies
    keep: list[tuple[Ids, int]] = field(default_factory=list)  # after the forward: copy the block


class PromptTails(KVConnectorBase_V1):
    """Both sides of the connector. Methods that vLLM calls are documented in KVConnectorBase_V1."""

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        self.block_size = vllm_config.cache_config.block_size
        # The scheduler's side.
        self.waiting: dict[Ids, set[str]] = defaultdict(set)  # prompt -> requests that have never been scheduled
        self.first: dict[Ids, object] = {}  # prompt -> the request that is computing its tail for the others
        self.kept: set[Ids] = set()  # prompts whose tail the worker has copied
        self.orders = Orders()
        # The worker's side.
        self.caches: list[torch.Tensor] = []  # one a layer; the first dimension counts blocks
        self.copies: dict[Ids, list[torch.Tensor]] = {}  # prompt -> its last block in each layer

    def on_new_request(self, request) -> None:
        self.waiting[tuple(request.prompt_token_ids)].add(request.request_id)

    def get_num_new_matched_tokens(self, request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that a copy provides after the shared blocks. None: the copy is not there yet, so ask again."""
        ids = tuple(request.prompt_token_ids)
        missing = len(ids) - 1 - num_computed_tokens  # without the last token, whose logits are needed
        if ids in self.kept and missing < self.block_size and not request.num_output_tokens:
            return missing, False
        return (0 if self.first.get(ids, request) is request else None), False

    def update_state_after_alloc(self, request, blocks, num_external_tokens: int) -> None:
        ids = tuple(request.prompt_token_ids)
        self.waiting[ids].discard(request.request_id)
        if num_external_tokens:
            self.orders.give.append((ids, self.last_block(request)))
        elif ids not in self.kept and self.waiting[ids] and (len(ids) - 1) % self.block_size >= SHORTEST_TAIL:
            self.first.setdefault(ids, request)
        self.forget(ids)

    def build_connector_meta(self, scheduler_output) -> Orders:
        for ids, request in list(self.first.items()):
            computed = request.num_computed_tokens + scheduler_output.num_scheduled_tokens.get(request.request_id, 0)
            if computed >= len(ids):  # A long prompt takes several forwards; this is the last of them.
                self.orders.keep.append((ids, self.last_block(request)))
                self.kept.add(ids)
                del self.first[ids]
        orders, self.orders = self.orders, Orders()
        return orders

    def request_finished(self, request, block_ids: list[int]) -> tuple[bool, None]:
        ids = tuple(request.prompt_token_ids)
        self.waiting[ids].discard(request.request_id)
        if self.first.get(ids) is request:  # It was cancelled. The next one computes the tail.
            del self.first[ids]
        self.forget(ids)
        return False, None

    def last_block(self, request) -> int:
        """The place of the block with the end of a request's prompt."""
        blocks = self._kv_cache_manager.get_blocks(request.request_id).get_block_ids()[0]
        return blocks[(request.num_prompt_tokens - 1) // self.block_size]

    def forget(self, ids: Ids) -> None:
        """Drop a prompt's copy when no request waits for it."""
        if not self.waiting[ids]:
            del self.waiting[ids]
            if ids in self.kept:
                self.kept.discard(ids)
                self.orders.drop.append(ids)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.caches = list(kv_caches.values())

    def start_load_kv(self, forward_context, **kwargs) -> None:
        orders = self._get_connector_metadata()
        for i, cache in enumerate(self.caches if orders.give else []):
            copies = torch.stack([self.copies[ids][i] for ids, _ in orders.give])
            cache.index_copy_(0, torch.tensor([place for _, place in orders.give]), copies)
        for ids in orders.drop:
            del self.copies[ids]

    def wait_for_save(self) -> None:
        for ids, place in self._get_connector_metadata().keep:
            self.copies[ids] = [cache[place].clone() for cache in self.caches]

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: start_load_kv has copied everything."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata, **kwargs) -> None:
        """Nothing to do here: wait_for_save copies all layers after the forward."""
