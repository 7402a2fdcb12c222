"""The end of a prompt is computed once for all responses to it: a connector for vLLM's KV cache, on a CPU.

vLLM keeps keys and values in blocks of 32 tokens. Requests with the same start share whole blocks. The tail of a
prompt, which fills a part of its last block, would be computed again for each response:

    prompt of 46 tokens       [ 32 tokens, shared ][ 14 tokens + 18 free places ]
                                                     ^ the tail; each response continues in a copy of this block

Here the first response computes the tail, and the worker saves a copy of its block. The other responses wait for this
one forward, and start with the copy in a block of their own. They compute only the prompt's last token, because they
need its logits. With short answers this takes a quarter of the time off a rollout (baselines/performance).

vLLM makes one connector for its scheduler and one for its worker, which gets `BlockCopies` from the first. Both run in
one process and one thread, in turns.
"""

from collections import defaultdict
from dataclasses import dataclass, field

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

SHORTEST_TAIL = 8  # tokens; computing fewer again is as fast as the forward that the others would wait for
Ids = tuple[int, ...]  # token ids of a prompt


@dataclass
class BlockCopies(KVConnectorMetadata):
    """The copies that the worker makes around one forward. A block is a number: its place in the KV cache."""

    restore: list[tuple[Ids, int]] = field(default_factory=list)  # before the forward: write the saved tail there
    drop: list[Ids] = field(default_factory=list)  # then: free these saved tails
    save: list[tuple[Ids, int]] = field(default_factory=list)  # after the forward: copy the block


class PromptTails(KVConnectorBase_V1):
    """Both sides of the connector. Methods that vLLM calls are documented in KVConnectorBase_V1."""

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        self.block_size = vllm_config.cache_config.block_size
        # The scheduler's side.
        self.waiting: dict[Ids, set[str]] = defaultdict(set)  # prompt -> requests that have never been scheduled
        self.computing: dict[Ids, object] = {}  # prompt -> the request that computes its tail for the others
        self.saved: set[Ids] = set()  # prompts whose tail the worker has saved
        self.copies = BlockCopies()  # around the next forward
        # The worker's side.
        self.caches: list[torch.Tensor] = []  # one for each layer; the first dimension counts blocks
        self.tails: dict[Ids, list[torch.Tensor]] = {}  # prompt -> its last block in each layer

    def on_new_request(self, request) -> None:
        self.waiting[tuple(request.prompt_token_ids)].add(request.request_id)

    def get_num_new_matched_tokens(self, request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that a saved tail provides after the shared blocks. None: it isn't saved yet, so ask again."""
        ids = tuple(request.prompt_token_ids)
        missing = len(ids) - 1 - num_computed_tokens  # without the last token, because its logits are needed
        if ids in self.saved and missing < self.block_size and not request.num_output_tokens:
            return missing, False
        if self.computing.get(ids, request) is request:
            return 0, False  # nobody computes this tail, or this request does
        return None, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens: int) -> None:
        ids = tuple(request.prompt_token_ids)
        self.waiting[ids].discard(request.request_id)
        # The last token is computed by every response, so it is no part of the tail.
        tail_tokens = (len(ids) - 1) % self.block_size
        if num_external_tokens:
            self.copies.restore.append((ids, self.last_block(request)))
        elif ids not in self.saved and self.waiting[ids] and tail_tokens >= SHORTEST_TAIL:
            self.computing.setdefault(ids, request)
        self.forget_if_unneeded(ids)

    def build_connector_meta(self, scheduler_output) -> BlockCopies:
        for ids, request in list(self.computing.items()):
            scheduled = scheduler_output.num_scheduled_tokens.get(request.request_id, 0)
            # A long prompt takes several forwards. Its block can be saved after the last one.
            if request.num_computed_tokens + scheduled >= len(ids):
                self.copies.save.append((ids, self.last_block(request)))
                self.saved.add(ids)
                del self.computing[ids]
        copies = self.copies
        self.copies = BlockCopies()
        return copies

    def request_finished(self, request, block_ids: list[int]) -> tuple[bool, None]:
        ids = tuple(request.prompt_token_ids)
        self.waiting[ids].discard(request.request_id)
        if self.computing.get(ids) is request:  # It was cancelled. The next one computes the tail.
            del self.computing[ids]
        self.forget_if_unneeded(ids)
        return False, None

    def last_block(self, request) -> int:
        """The block with the end of a request's prompt."""
        blocks = self._kv_cache_manager.get_blocks(request.request_id).get_block_ids()[0]
        return blocks[(request.num_prompt_tokens - 1) // self.block_size]

    def forget_if_unneeded(self, ids: Ids) -> None:
        """Drop a prompt's saved tail when no request waits for it."""
        if self.waiting[ids]:
            return
        del self.waiting[ids]
        if ids in self.saved:
            self.saved.discard(ids)
            self.copies.drop.append(ids)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.caches = list(kv_caches.values())

    def start_load_kv(self, forward_context, **kwargs) -> None:
        copies = self._get_connector_metadata()
        if copies.restore:
            blocks = torch.tensor([block for _, block in copies.restore])
            for layer, cache in enumerate(self.caches):
                tails = torch.stack([self.tails[ids][layer] for ids, _ in copies.restore])
                cache.index_copy_(0, blocks, tails)
        for ids in copies.drop:
            del self.tails[ids]

    def wait_for_save(self) -> None:
        for ids, block in self._get_connector_metadata().save:
            self.tails[ids] = [cache[block].clone() for cache in self.caches]

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: start_load_kv has copied everything."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata, **kwargs) -> None:
        """Nothing to do here: wait_for_save copies all layers after the forward."""
