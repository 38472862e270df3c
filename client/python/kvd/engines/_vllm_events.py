# SPDX-License-Identifier: Apache-2.0
"""KV cache events of a vLLM whose cache is a space of kvd's.

Routers credit blocks to the engine that says it has them, and this vLLM has whatever anyone has computed in the space. So
each vLLM publishes all of it, by its own publisher, even while it is idle: blocks as BlockStored when they can be found,
and as BlockRemoved when they were evicted. After the daemon was replaced, it does so from its next request on.

Told are the chains of the first group of full attention, which hits need first. A chain's salt does not say which LoRA
adapter or cache_salt it stands for: chains of others with one are told only if this vLLM had a request with it before. The
parts of prompts from their first picture on are not told, since their words are digests.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import (AllBlocksCleared, BlockRemoved, BlockStored, EventPublisherFactory, KVCacheEvent,
                                        KVEventBatch, ZmqEventPublisher)
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.request import Request

import kvd

from ._vllm_groups import Groups
from ._vllm_keys import PICTURE, first_token

logger = init_logger("vllm." + __name__)

INTERVAL = 0.02         # seconds between looks at the space
BATCH = 4096            # changes per batch
MOST_SALTS = 65536


@dataclass(frozen=True)
class Names:
    """What the salt of a chain stands for, in vLLM's words. first: the first token, if the chain's words begin after it."""

    lora_id: int | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    first: int | None = None

    def extra_keys(self, depths: range) -> list[tuple | None] | None:
        """As vLLM has them: a LoRA adapter changes every block, a cache_salt the first one."""
        rows = [tuple(it for it in (self.lora_name, self.cache_salt if i == 0 else None) if it) or None for i in depths]
        return rows if any(rows) else None


class Salts:
    """What the salts of this vLLM's requests stand for. The scheduler notes it before the request's blocks are posted."""

    def __init__(self) -> None:
        self.plain: Names | None = Names()      # of chains without a salt
        self.names: dict[int, Names] = {}
        self.epoch = 0

    def note(self, salt: int, request: Request, ahead: int) -> None:
        if salt and salt not in self.names and first_token(salt) is None:
            lora, first = request.lora_request, request.all_token_ids[0] if ahead else None
            if len(self.names) == MOST_SALTS:
                del self.names[next(iter(self.names))]
            self.names[salt] = Names(lora.adapter_id if lora else None, lora.lora_name if lora else None,
                                     request.cache_salt, first)

    def forget(self) -> None:
        """vLLM has reset its cache, and finds nothing of before."""
        self.plain, self.names = None, {}
        self.epoch += 1

    def of(self, salt: int) -> Names | None:
        first = first_token(salt)
        if salt and first is None:
            return self.names.get(salt)
        return self.plain and replace(self.plain, first=first)


class Teller:
    """Translates what changes in a space into vLLM's events."""

    def __init__(self, space: kvd.Space, groups: Groups, salts: Salts, manager: KVCacheManager):
        self.space, self.follow, self.salts, self.size = space, space.follow(), salts, groups.size
        self.medium = manager.block_pool.medium
        self.ahead, self.group = groups.ahead, groups.dense[0]
        self.kind, self.window = manager.kv_cache_event_metadata[self.group]
        self.told: dict[int, int] = {}          # by hash: the last word of each block that was told
        self.epoch = -1

    def batches(self) -> Iterator[list[KVCacheEvent]]:
        """What has happened since the last call, and at first everything."""
        if self.epoch != self.salts.epoch:
            self.epoch = self.salts.epoch
            yield self._clear()
        changes = self.follow.step()
        for at in range(0, len(changes), BATCH):
            events = self._events(changes[at:at + BATCH])
            if events:
                yield events

    def _events(self, changes: list[kvd.Change]) -> list[KVCacheEvent]:
        events: list[KVCacheEvent] = []
        row: list[kvd.Stored] = []              # of one chain, whose salt stands for `names`
        names: Names | None = None
        for it in changes:
            if row and not (isinstance(it, kvd.Stored) and it.parent == row[-1].hash):
                events.append(self._stored(row, names))
                row = []
            if isinstance(it, kvd.Stored):
                names = names if row else self.salts.of(it.salt)
                row += [it] if names and self._tells(it) else []
            elif isinstance(it, kvd.Cleared):
                events += self._clear()
            elif self.told.pop(it.hash, None) is not None:
                events.append(BlockRemoved(block_hashes=[it.hash], medium=self.medium, group_idx=self.group))
        return events + ([self._stored(row, names)] if row else [])

    def again(self) -> None:
        """Begin anew, with everything."""
        self.follow, self.epoch = self.space.follow(), -1

    def _clear(self) -> list[KVCacheEvent]:
        self.told = {}
        return [AllBlocksCleared()]

    def _tells(self, block: kvd.Stored) -> bool:
        if (block.parent and block.parent not in self.told) or any(word >= PICTURE for word in block.tokens):
            return False
        self.told[block.hash] = block.tokens[-1]
        return True

    def _stored(self, row: list[kvd.Stored], names: Names) -> BlockStored:
        words = [word for block in row for word in block.tokens]
        if self.ahead:
            words = [self.told[row[0].parent] if row[0].parent else names.first, *words[:-1]]
        first = row[0].depth
        return BlockStored(block_hashes=[it.hash for it in row], parent_block_hash=row[0].parent or None, token_ids=words,
                           block_size=self.size, lora_id=names.lora_id, medium=self.medium, lora_name=names.lora_name,
                           extra_keys=names.extra_keys(range(first, first + len(row))), group_idx=self.group,
                           kv_cache_spec_kind=self.kind, kv_cache_spec_sliding_window=self.window)


class Publisher(ZmqEventPublisher):
    """vLLM's publisher, with a thread that publishes what a teller tells."""

    made: ClassVar[Publisher | None] = None     # by the scheduler, until its connector takes it

    def __init__(self, **config):
        super().__init__(**config)
        self._ended = threading.Event()
        self._teller: threading.Thread | None = None
        Publisher.made = self

    def begin(self, teller: Teller) -> None:
        self._teller = threading.Thread(target=self._tell, args=(teller,), daemon=True, name="kvd-events")
        self._teller.start()

    def _tell(self, teller: Teller) -> None:
        while not self._ended.wait(INTERVAL):
            try:
                for events in teller.batches():
                    self.publish(KVEventBatch(ts=time.time(), events=events))
            except kvd.Error as error:
                logger.warning("kvd: no KV cache events for now: %s", error)
                self._ended.wait(1)
                teller.again()

    def shutdown(self) -> None:
        self._ended.set()
        if self._teller:
            self._teller.join()
        super().shutdown()


def replace_publisher(config: KVEventsConfig | None) -> None:
    """Have the scheduler, which comes next, make our publisher instead of vLLM's."""
    if Publisher.made:          # of a vLLM that did not start
        Publisher.made.shutdown()
    Publisher.made = None
    if config and config.enable_kv_cache_events and config.publisher == "zmq":
        if "kvd" not in EventPublisherFactory._registry:
            EventPublisherFactory.register_publisher("kvd", Publisher)
        config.publisher = "kvd"


def begin(config: KVEventsConfig | None, space: kvd.Space, groups: Groups, salts: Salts, manager: KVCacheManager) -> None:
    """Publish what is in the space from now on, if the scheduler has made our publisher. vLLM's pool tells nothing: its
    blocks are what it has planned, and have other hashes."""
    manager.enable_kv_cache_events = manager.block_pool.enable_kv_cache_events = False
    if config and config.publisher == "kvd":
        config.publisher = "zmq"        # for another vLLM of this configuration
        publisher, Publisher.made = Publisher.made, None
        publisher.begin(Teller(space, groups, salts, manager))
