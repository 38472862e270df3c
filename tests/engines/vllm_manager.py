# SPDX-License-Identifier: Apache-2.0
"""For test_vllm.py: kvd's block manager, made of vLLM's own, without a model. A request is what the scheduler makes.

    vllm_manager.py SOCKET      the socket of a daemon
"""

from __future__ import annotations

import ctypes
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from vllm import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus

import kvd
from kvd.engines._vllm_connector import KvdConnector, Step
from kvd.engines._vllm_groups import Groups
from kvd.engines._vllm_ledger import Ledger
from kvd.engines._vllm_pool import Manager

SIZE, LENGTH = 16, 512
TOKENS = [7 + i % 250 for i in range(10 * SIZE + 5)]
KVCacheConfig.needs_kv_cache_zeroing = True     # as for caches of mixed precision, which are groups of their own today


@contextmanager
def manager(socket: str, keep: int = 4):
    spec = FullAttentionSpec(block_size=SIZE, num_kv_heads=2, head_size=32, dtype=torch.float32)
    with kvd.connect(socket) as client:
        geometry = kvd.Geometry.opaque(spec.page_size_bytes, "manager", block_tokens=SIZE)
        with client.space("manager", geometry) as space:
            caches = KVCacheConfig(num_blocks=space.memory().blocks, kv_cache_tensors=[],
                                   kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
            it = KVCacheManager(caches, LENGTH, SIZE, SIZE)
            Manager.adopt(it, Ledger(space, Groups(it.coordinator), keep=keep, wait=0))
            it.ledger.fetch(1)      # the first block of a pool is vLLM's null block
            yield it
            it.ledger.shut()


def request(name: str, tokens: list[int]) -> Request:
    return Request(name, tokens, SamplingParams(max_tokens=99), None, block_hasher=lambda _: [])


def serve(it: Manager, asked: Request) -> list[int]:
    """Schedules a whole prompt, and has its output. Returns the ids of its blocks."""
    found, n, _ = it.get_computed_blocks(asked)
    assert it.allocate_slots(asked, asked.num_tokens - n, n, found) is not None
    asked.status, asked.num_computed_tokens = RequestStatus.RUNNING, asked.num_tokens
    it.ledger.publish()
    it.ledger.space.flush()
    return it.get_block_ids(asked.request_id)[0]


def check_the_longest_hit_that_vllm_allows(socket: str) -> None:
    with manager(socket) as it:
        serve(it, asked := request("one", TOKENS))
        it.free(asked)
        for most, n in ((None, 10 * SIZE), (10 * SIZE + 4, 10 * SIZE), (5 * SIZE - 1, 4 * SIZE), (SIZE - 1, 0), (0, 0)):
            found, length, _ = it.get_computed_blocks(request("two", TOKENS), most)
            assert (length, len(found.blocks[0])) == (n, n // SIZE), (most, length)
        assert it.get_computed_blocks(request("three", TOKENS))[1] == 10 * SIZE
        it.ledger.drop_found()


def check_slots_of_drafts(socket: str) -> None:
    """A draft model writes behind the tokens of a step: here into three blocks more, none of which has been taken from
    the pool yet. At the longest length, there is nothing behind it."""
    with manager(socket, keep=1) as it:
        ids = serve(it, asked := request("drafts", TOKENS[:2 * SIZE]))
        while it.ledger.free:
            it.ledger.space.free([it.ledger.free.pop()])
        asked.append_output_token_ids(9)
        more = it.allocate_slots(asked, 1, num_lookahead_tokens=2 * SIZE)
        assert more is not None and len(more.blocks[0]) == 3 and not {*ids} & {*more.get_block_ids()[0]}
        assert it.allocate_slots(asked, 1, num_lookahead_tokens=2 * SIZE).get_block_ids() == ([],)
        it.free(asked)
        serve(it, asked := request("full", [5] * (LENGTH - 1)))
        asked.append_output_token_ids(9)
        assert it.allocate_slots(asked, 1, num_lookahead_tokens=2 * SIZE).get_block_ids() == ([],)
        it.free(asked)
        assert not it.ledger.used


def check_a_watermark(socket: str) -> None:
    """The last blocks of a pool are for a request that runs alone, whatever vLLM's watermark is."""
    with manager(socket, keep=1) as it:
        it.watermark_blocks = it.ledger.space.memory().blocks
        found, n, _ = it.get_computed_blocks(asked := request("alone", TOKENS))
        assert it.allocate_slots(asked, asked.num_tokens - n, n, found, has_scheduled_reqs=False) is not None
        it.free(asked)


def check_guesses_behind_the_end(socket: str) -> None:
    """A request stops within the tokens that were guessed and accepted. The slots behind its last token are not
    published."""
    with manager(socket) as it:
        serve(it, asked := request("end", [8] * (3 * SIZE)))
        assert it.allocate_slots(asked, SIZE) is not None       # guesses; all are right, and the first ends the request
        asked.append_output_token_ids(9)
        asked.num_computed_tokens += SIZE
        it.ledger.plan(asked, 4)
        it.free(asked)
        it.ledger.space.flush()
        assert it.ledger.space.match([8] * (3 * SIZE) + [9] * SIZE) == 3 * SIZE
        assert it.ledger.state == it.ledger.SERVING


def check_only_own_blocks_are_zeroed(socket: str) -> None:
    with manager(socket) as it:
        first = serve(it, one := request("first", [6] + TOKENS))
        assert it.take_new_block_ids() == first
        it.free(one)
        second = serve(it, two := request("second", [6] + TOKENS + [3] * SIZE))
        zeroed = it.take_new_block_ids()
        assert second[:10] == first[:10] and zeroed == second[10:], (first, second, zeroed)
        assert {*zeroed} <= {*it.ledger.ours}
        scheduler = object.__new__(KvdConnector)
        scheduler.ledger, scheduler.space = it.ledger, it.ledger.space
        for preempted in (False, True):         # by a request that is scheduled later in the same step
            if preempted:
                it.free(two)
            scheduler.build_connector_meta(step := SimpleNamespace(new_block_ids_to_zero=[*zeroed]))
            assert step.new_block_ids_to_zero == ([] if preempted else zeroed)


def check_a_worker_maps_what_a_step_zeroes(socket: str) -> None:
    """vLLM zeroes new blocks before it binds the metadata of their step, in a worker that has its own mapping."""
    with manager(socket) as it, kvd.connect(socket) as client:
        with client.space("manager", it.ledger.space.geometry) as space:
            memory = space.memory()
            worker = object.__new__(KvdConnector)
            worker.space, worker.base, worker.mapped, worker.era = space, memory.base, memory.mapped, 0
            assert it.ledger.fetch(worker.mapped + 1) and it.ledger.top > worker.mapped
            worker.handle_preemptions(Step(space.name, it.ledger.top, 0))
            try:
                worker.handle_preemptions(Step("another", it.ledger.top, 0))
                raise AssertionError("a worker would write in another space")
            except RuntimeError as error:
                assert "the scheduler uses space another" in str(error), error
            assert worker.mapped >= it.ledger.top
            ctypes.memset(worker.base + (it.ledger.top - 1) * memory.block_bytes, 0, memory.block_bytes)


if __name__ == "__main__":
    for check in (check_the_longest_hit_that_vllm_allows, check_slots_of_drafts, check_guesses_behind_the_end,
                  check_only_own_blocks_are_zeroed, check_a_worker_maps_what_a_step_zeroes, check_a_watermark):
        check(sys.argv[1])
