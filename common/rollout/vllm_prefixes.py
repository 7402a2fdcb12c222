"""What prompts have in common is computed once: a connector for vLLM's KV cache, on a CPU.

vLLM keeps keys and values in blocks of 32 tokens. Requests with the same start share whole blocks. What else they have
in common would be computed again for each of them, in two places:

    prompts of 46 tokens      [ 26 tokens, the same in all prompts + 6 ][ 14 tokens + 18 free places ]
                                ^ the beginning of all prompts            ^ the tail, the same in all responses

So the worker saves a copy of such a block after the first forward that has computed it. The other requests wait for
this one forward, and start with the copy in a block of their own:

- The tail of a prompt. The other responses to it compute only its last token, because they need its logits. With short
  answers this takes a quarter of the time off a rollout (baselines/performance).
- The beginning of all prompts that wait at the same time: a chat template, a system prompt. Each prompt computes what
  follows. Before that, the places behind the beginning hold another prompt's keys, and no query reads them.

A prompt that is cut into several forwards takes all that running requests leave of each, so vLLM asks no waiting
request before its last one. That is why no two requests can wait for each other.

vLLM makes one connector for its scheduler and one for its worker. The scheduler's sends the worker's `BlockCopies` in
each step. Both run in one process and one thread, and a step has run before the next is scheduled. So the scheduler
takes a copy for saved as soon as it has asked for it.
"""

import itertools
from collections import defaultdict
from dataclasses import dataclass, field

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

SHORTEST = 8  # tokens; to compute fewer again costs no more than to wait for one forward
Ids = tuple[int, ...]  # token ids, from the start of a prompt on


@dataclass
class BlockCopies(KVConnectorMetadata):
    """The copies that the worker makes around one forward. A block is a number: its place in the KV cache.

    The key of a copy is all token ids of a prompt, up to the last one that the block is shared for.
    """

    restore: list[tuple[Ids, int]] = field(default_factory=list)  # before the forward: write the copy there
    drop: list[Ids] = field(default_factory=list)  # after restoring, before saving: free these copies
    save: list[tuple[Ids, int]] = field(default_factory=list)  # after the forward: copy the block


def shareable(request) -> Ids:
    """All of a prompt but its last token, which each request computes itself, because it needs the logits."""
    return tuple(request.prompt_token_ids[:-1])


class PrefixCopies(KVConnectorBase_V1):
    """Both sides of the connector. Methods that vLLM calls are documented in KVConnectorBase_V1."""

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        self.block_size = vllm_config.cache_config.block_size
        # The scheduler's side.
        self.waiting: dict[Ids, set[str]] = defaultdict(set)  # shareable ids -> requests never scheduled so far
        # What all prompts of a call begin with. Fixed when the first one is scheduled, forgotten when none waits.
        self.beginning: Ids | None = None  # None: not fixed yet. (): they have nothing in common
        self.common: Ids = ()  # the same, narrowed by each prompt that comes
        self.found: Ids = ()  # the copy that the request at hand may start with
        self.computing: dict[Ids, object] = {}  # ids -> the request that computes them for the others
        self.saved: set[Ids] = set()  # ids whose last block the worker has copied when the next step is scheduled
        self.copies = BlockCopies()  # around the next forward
        # The worker's side.
        self.caches: list[torch.Tensor] = []  # one for each layer; the first dimension counts blocks
        self.contents: dict[Ids, list[torch.Tensor]] = {}  # ids -> keys and values of their last block in each layer

    def on_new_request(self, request) -> None:
        ids = shareable(request)
        known = self.common if self.waiting else ids
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(known, ids))
        self.common = tuple(token for token, _ in same)
        self.waiting[ids].add(request.request_id)

    def shared(self, ids: Ids) -> list[Ids]:
        """What a request may share, the longest first: all its shareable ids, and what all prompts begin with."""
        beginning = self.beginning or ()
        return [ids, beginning] if ids[: len(beginning)] == beginning else [ids]

    def get_num_new_matched_tokens(self, request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that a copy provides after the blocks that vLLM shares itself. None: not saved yet, so ask again."""
        if request.num_output_tokens:  # It lost its blocks while it sampled, and computes them again.
            return 0, False
        for ids in self.shared(shareable(request)):
            missing = len(ids) - num_computed_tokens
            if self.computing.get(ids, request) is not request and missing > 0:
                return None, False
            if ids in self.saved and 0 < missing < self.block_size:
                self.found = ids
                return missing, False
        return 0, False  # nobody else computes what is missing, and no copy fits

    def update_state_after_alloc(self, request, blocks, num_external_tokens: int) -> None:
        own = shareable(request)
        self.waiting[own].discard(request.request_id)
        if self.beginning is None:
            self.beginning = self.common
        if num_external_tokens:  # vLLM has just asked about this request
            self.copies.restore.append((self.found, self.last_block(request, self.found)))
        for ids in self.shared(own):
            if ids not in self.saved and len(ids) % self.block_size >= SHORTEST:
                self.computing.setdefault(ids, request)
        self.forget_if_unneeded(own)  # perhaps nobody waits for them

    def build_connector_meta(self, scheduler_output) -> BlockCopies:
        for ids, request in list(self.computing.items()):
            scheduled = scheduler_output.num_scheduled_tokens.get(request.request_id, 0)
            # A long prompt takes several forwards. This one computes the last of these ids.
            if request.num_computed_tokens + scheduled >= len(ids):
                del self.computing[ids]
                if block := self.last_block(request, ids):
                    self.copies.save.append((ids, block))
                    self.saved.add(ids)
        copies = self.copies
        self.copies = BlockCopies()
        return copies

    def request_finished(self, request, block_ids: list[int]) -> tuple[bool, None]:
        own = shareable(request)
        self.waiting[own].discard(request.request_id)
        # If it was cancelled, another request computes what this one didn't.
        self.computing = {ids: other for ids, other in self.computing.items() if other is not request}
        self.forget_if_unneeded(own)
        return False, None

    def last_block(self, request, ids: Ids) -> int:
        """The block in which these tokens of a request's prompt end. 0 if it is behind a sliding window."""
        blocks = self._kv_cache_manager.get_block_ids(request.request_id)[0]
        return blocks[(len(ids) - 1) // self.block_size]

    def forget_if_unneeded(self, own: Ids) -> None:
        """Give up a copy when no request waits that could share it, and all copies when no request waits at all.

        own: the shareable ids of a request that no longer waits. The worker frees what is given up in the next step.
        So none is used after the call of the engine that made it, or with other weights.
        """
        if self.waiting[own]:
            return
        del self.waiting[own]
        if self.waiting:
            unneeded = {own} - {self.beginning}
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
                saved = torch.stack([self.contents[ids][layer] for ids, _ in copies.restore])
                cache.index_copy_(0, blocks, saved)
        for ids in copies.drop:
            del self.contents[ids]

    def wait_for_save(self) -> None:
        for ids, block in self._get_connector_metadata().save:
            self.contents[ids] = [cache[block].clone() for cache in self.caches]

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: start_load_kv has copied everything."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata, **kwargs) -> None:
        """Nothing to do here: wait_for_save copies all layers after the forward."""
