# SPDX-License-Identifier: Apache-2.0
"""How the KV cache groups of a model are kept in a space.

vLLM divides a model's layers into groups. Each group has a block table of its own, and all take their blocks from one
pool, so that a block of kvd holds one group's layers of some tokens.

Groups of full attention need all blocks of a prefix. They are chains of tokens: one chain for each group, whose salts
differ. Groups with windows or chunks need only the last blocks before a position, and Mamba's need the state there; a
chain would hold those before, too. Their blocks are objects, found by a key that covers all tokens up to the block's end
(_vllm_keys.py). An object has one block for each group of one kind, since vLLM uses a position either in all of them or
in none. Tokens are compared in chains only. But a hit ends within a chain in any model that is accepted, so it never
depends on keys alone.

The keys that a draft head (EAGLE, MTP) has for a token depend on the next token, too. vLLM therefore does not use the last
block that it finds. Here, the words of a chain are the tokens from the second one on, so that the next token is compared
as well, and the block is used. (For the last token of a part of a prompt, vLLM's head uses the prompt's last token, whatever
the next one is. Such guesses are worse, in vLLM alone, too; answers do not depend on them.)

A block of Mamba's is the state after its last token. vLLM computes a prompt in steps that end where blocks end, so that
there is one; most positions have none.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator, KVCacheCoordinator
from vllm.v1.kv_cache_interface import (ChunkedLocalAttentionSpec, FullAttentionSpec, KVCacheSpec, MambaSpec,
                                        MLAAttentionSpec, SlidingWindowMLASpec, SlidingWindowSpec, iter_layer_specs)

import kvd


DENSE = (FullAttentionSpec, MLAAttentionSpec)
# Sparse groups, and the number of tokens before a position of which they need blocks.
REACH = {SlidingWindowSpec: lambda spec: spec.sliding_window - 1,
         SlidingWindowMLASpec: lambda spec: spec.sliding_window - 1,
         ChunkedLocalAttentionSpec: lambda spec: spec.attention_chunk_size,
         MambaSpec: lambda spec: 1}


def is_dense(spec: KVCacheSpec) -> bool:
    return all(type(it) in DENSE for it in iter_layer_specs(spec))


def is_sparse(spec: KVCacheSpec) -> bool:
    return all(type(it) in REACH and it.prefix_cacheable for it in iter_layer_specs(spec))


@dataclass(frozen=True)
class Kind:
    """Groups of one kind, whose blocks are objects."""

    number: int                 # from 1; salt of its objects
    groups: tuple[int, ...]     # ids of the groups, in the order of an object's blocks
    tokens: int                 # per block
    tail: int                   # number of blocks before a position that a hit needs


class Groups:
    """dense: ids of the groups that are chains, of `size` tokens per block. kinds: the others. step: tokens per key.
    ahead: number of tokens behind a block that its bytes depend on, 1 with a draft head."""

    def __init__(self, coordinator: KVCacheCoordinator, ahead: int = 0):
        self.ahead = ahead
        managers = coordinator.single_type_managers
        found = _together(coordinator) if isinstance(coordinator, HybridKVCacheCoordinator) else [[0]]
        self.step = coordinator.block_pool.hash_block_size
        self.dense = [i for ids in found for i in ids if is_dense(managers[i].kv_cache_spec)]
        self.size = managers[self.dense[0]].block_size
        self.kinds: list[Kind] = []
        for ids in found:
            manager = managers[ids[0]]
            if ids[0] not in self.dense:
                reach = REACH[type(manager.kv_cache_spec)](manager.kv_cache_spec)
                self.kinds.append(Kind(len(self.kinds) + 1, tuple(ids), manager.block_size,
                                       max(cdiv(reach, manager.block_size), 1)))
        self.places = {group: (kind, i) for kind in self.kinds for i, group in enumerate(kind.groups)}

    def salts(self, salt: int) -> list[int]:
        """Return the salts of a request's chains."""
        return [salt, *(kvd.fingerprint("vllm group", salt, i)[0] or 1 for i in range(1, len(self.dense)))]


def _together(coordinator: HybridKVCacheCoordinator) -> list[list[int]]:
    """Return the ids of groups that vLLM looks up together."""
    return [it.group_ids for it in coordinator.attention_groups]
