# SPDX-License-Identifier: Apache-2.0
"""What a ledger (_vllm_ledger.py) knows of one request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

import kvd

from ._vllm_groups import Groups, Kind
from ._vllm_keys import PrefixKeys

if TYPE_CHECKING:
    from ._vllm_methods import Kept
    from ._vllm_session import Session


@dataclass
class Object:
    """An object that a lookup found. Its pin holds it until `users`, the blocks of it in tables, are all freed."""

    pin: kvd.Pin
    users: int = 0


class Chain:
    """What the pool has of a request: one pin for each dense group holds the contents of its first `length` blocks;
    objects are those that were looked up, by kind and end, before the request was admitted. Without pins, the request
    is not shared."""

    __slots__ = ("request", "salts", "pins", "length", "blocks", "keys", "objects", "below", "tables", "ended",
                 "kept", "session")

    def __init__(self, request: Request, salt: int, pins: list[kvd.Pin], groups: Groups):
        self.request, self.salts, self.pins = request, groups.salts(salt), pins
        self.length = pins[0].tokens // groups.size if pins else 0
        self.blocks = {group: pin.blocks for group, pin in zip(groups.dense, pins)}
        self.keys = PrefixKeys(request, salt, groups.step, groups.ahead)
        self.objects: dict[tuple[Kind, int], Object | None] = {}
        self.below = False              # there may be more of it below the pool
        self.tables: list[list[KVCacheBlock]] = []      # of the dense groups
        self.ended = not pins           # no further block is published
        self.kept: Kept | None = None   # of a request that follows methods
        self.session: Session | None = None     # of a request that has ended

    def publishes(self, blocks: int) -> int:
        """Return how many of its first blocks may be published, when so many are complete."""
        return blocks if self.kept is None else min(blocks, self.kept.published)


@dataclass
class Plan:
    """What steps will fill, of a request to publish: the number of blocks of each chain, and the blocks of objects."""

    length: int = 0
    objects: dict[tuple[Kind, int], list[kvd.Block | None]] = field(default_factory=dict)
