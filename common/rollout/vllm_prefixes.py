"""What prompts have in common is computed once: a connector for vLLM's KV cache, on a CPU.

vLLM keeps keys and values in blocks of 32 tokens. Requests with the same start share whole blocks. What else they have
in common would be computed again for each of them, in two places:

    prompts of 46 tokens      [ 26 tokens, the same in all prompts + 6 ][ 14 tokens + 18 free places ]
                                ^ the beginning of all prompts            ^ the tail, the same in all responses

So the worker saves a copy of such a block after the first forward that has computed it. The other requests wait for
this one forward, and start with the copy in a block of their own:

- The tail of a prompt. The responses to it compute only its last token, because they need its logits. With short
  answers this takes a quarter of the time off a rollout (baselines/performance).
- The beginning of all prompts that wait at the same time: a chat template, a system prompt. Each prompt computes what
  follows. The places behind the beginning hold the first prompt's tokens until then, and no query looks that far.

vLLM makes one connector for its scheduler and one for its worker, which gets `BlockCopies` from the first. Both run in
one process and one thread, in turns.
"""

import itertools
from collections import defaultdict
from dataclasses import dataclass, field

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

SHORTEST = 8  # tokens; computing fewer again is as fast as the forward that the others would wait for
Ids = tuple[int, ...]  # token ids, from the start of a prompt on


@dataclass
class BlockCopies(KVConnectorMetadata):
    """The copies that the worker makes around one forward. A block is a number: its place in the KV cache.

    A copy goes by the token ids that end in it, from the start of the prompt on.
    """

    restore: list[tuple[Ids, int]] = field(default_factory=list)  # before the forward: write the copy there
    drop: list[Ids] = field(default_factory=list)  # then: free these copies
    save: list[tuple[Ids, int]] = field(default_factory=list)  # after the forward: copy the block


class PrefixCopies(KVConnectorBase_V1):
    """Both sides of the connector. Methods that vLLM calls are documented in KVConnectorBase_V1."""

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        self.block_size = vllm_config.cache_config.block_size
        # The scheduler's side.
        self.waiting: dict[Ids, set[str]] = defaultdict(set)  # prompt -> requests that have never been scheduled
        # What all prompts begin with. It is decided when the first of them is scheduled, and holds until none waits.
        self.beginning: Ids | None = None  # None: not decided. (): they have nothing in common
        self.common: Ids = ()  # the same while prompts still come in
        self.found: dict[str, Ids] = {}  # request -> the copy that it is about to start with
        self.computing: dict[Ids, object] = {}  # ids -> the request that computes them for the others
        self.saved: set[Ids] = set()  # ids whose last block the worker has copied
        self.copies = BlockCopies()  # around the next forward
        # The worker's side.
        self.caches: list[torch.Tensor] = []  # one for each layer; the first dimension counts blocks
        self.blocks: dict[Ids, list[torch.Tensor]] = {}  # ids -> their last block in each layer

    def on_new_request(self, request) -> None:
        ids = tuple(request.prompt_token_ids)
        known = self.common if self.waiting else ids
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(known, ids))
        self.common = tuple(token for token, _ in same)
        self.waiting[ids].add(request.request_id)

    def shared(self, prompt: Ids) -> list[Ids]:
        """What a request may share, the longest first: all but its prompt's last token, and the beginning of all.

        Each request computes its prompt's last token itself, because it needs the logits.
        """
        tail, beginning = prompt[:-1], self.beginning or ()
        return [tail, beginning] if tail[: len(beginning)] == beginning else [tail]

    def get_num_new_matched_tokens(self, request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that a copy provides after the shared blocks. None: it isn't saved yet, so ask again."""
        self.found.pop(request.request_id, None)
        if request.num_output_tokens:  # It lost its blocks while it sampled, and computes them again.
            return 0, False
        for ids in self.shared(tuple(request.prompt_token_ids)):
            missing = len(ids) - num_computed_tokens
            if self.computing.get(ids, request) is not request and missing > 0:
                return None, False
            if ids in self.saved and 0 < missing < self.block_size:
                self.found[request.request_id] = ids
                return missing, False
        return 0, False  # nobody computes any of these, or this request does

    def update_state_after_alloc(self, request, blocks, num_external_tokens: int) -> None:
        prompt = tuple(request.prompt_token_ids)
        self.waiting[prompt].discard(request.request_id)
        if self.beginning is None:
            self.beginning = self.common if len(self.waiting) > 1 else ()
        if num_external_tokens:
            ids = self.found.pop(request.request_id)
            self.copies.restore.append((ids, self.last_block(request, ids)))
        for ids in self.shared(prompt):
            is_awaited = self.waiting[prompt] or (ids == self.beginning and len(self.waiting) > 1)
            if is_awaited and ids not in self.saved and len(ids) % self.block_size >= SHORTEST:
                self.computing.setdefault(ids, request)
        self.forget_if_unneeded(prompt)

    def build_connector_meta(self, scheduler_output) -> BlockCopies:
        for ids, request in list(self.computing.items()):
            scheduled = scheduler_output.num_scheduled_tokens.get(request.request_id, 0)
            # A long prompt takes several forwards. Its block can be saved when these tokens are computed.
            if request.num_computed_tokens + scheduled >= len(ids):
                del self.computing[ids]
                if block := self.last_block(request, ids):  # 0 stands for one that is behind a sliding window
                    self.copies.save.append((ids, block))
                    self.saved.add(ids)
        copies = self.copies
        self.copies = BlockCopies()
        return copies

    def request_finished(self, request, block_ids: list[int]) -> tuple[bool, None]:
        prompt = tuple(request.prompt_token_ids)
        self.waiting[prompt].discard(request.request_id)
        self.found.pop(request.request_id, None)
        # If it was cancelled, another request computes what this one didn't.
        self.computing = {ids: other for ids, other in self.computing.items() if other is not request}
        self.forget_if_unneeded(prompt)
        return False, None

    def last_block(self, request, ids: Ids) -> int:
        """The block in which these tokens of a request's prompt end."""
        blocks = self._kv_cache_manager.get_blocks(request.request_id).get_block_ids()[0]
        return blocks[(len(ids) - 1) // self.block_size]

    def forget_if_unneeded(self, prompt: Ids) -> None:
        """Drop a prompt's tail when no request waits for it, and everything when no request waits at all.

        So no copy outlives a call of the engine, or the weights that computed it.
        """
        if self.waiting[prompt]:
            return
        del self.waiting[prompt]
        if self.waiting:
            unneeded = {prompt[:-1]} - {self.beginning}
        else:
            unneeded = self.saved | self.computing.keys()
            self.beginning = None
        for ids in unneeded:
            self.computing.pop(ids, None)
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
                saved = torch.stack([self.blocks[ids][layer] for ids, _ in copies.restore])
                cache.index_copy_(0, blocks, saved)
        for ids in copies.drop:
            del self.blocks[ids]

    def wait_for_save(self) -> None:
        for ids, block in self._get_connector_metadata().save:
            self.blocks[ids] = [cache[block].clone() for cache in self.caches]

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: start_load_kv has copied everything."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata, **kwargs) -> None:
        """Nothing to do here: wait_for_save copies all layers after the forward."""
