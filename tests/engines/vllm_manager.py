# SPDX-License-Identifier: Apache-2.0
"""For test_vllm.py: kvd's block manager, made of vLLM's own, without a model. A request is what the scheduler makes.

    vllm_manager.py SOCKET      the socket of a daemon
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace

import msgspec
import torch
from common import daemon
from vllm import SamplingParams
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus

import kvd
from kvd.engines import _vllm_connector as connectors
from kvd.engines._vllm_connector import KvdConnector, Step
from kvd.engines._vllm_events import Teller
from kvd.engines._vllm_groups import Groups
from kvd.engines._vllm_ledger import Ledger
from kvd.engines._vllm_pool import Manager
from kvd.engines._vllm_rows import Rows
from kvd.engines._vllm_session import Session

SIZE, LENGTH = 16, 512
TOKENS = [7 + i % 250 for i in range(10 * SIZE + 5)]
KVCacheConfig.needs_kv_cache_zeroing = True     # as for caches of mixed precision, which are groups of their own today


@contextmanager
def manager(socket: str, keep: int = 4, most: int = 0, ahead: int = 0, pin: bool = True, fixed: bool = False):
    spec = FullAttentionSpec(block_size=SIZE, num_kv_heads=2, head_size=32, dtype=torch.float32)
    with kvd.connect(socket) as client:
        geometry = kvd.Geometry.opaque(spec.page_size_bytes, "manager", block_tokens=SIZE)
        with client.space(f"manager-{most}", geometry, max_blocks=most, fixed=fixed) as space:
            caches = KVCacheConfig(num_blocks=space.memory().blocks, kv_cache_tensors=[],
                                   kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
            it = KVCacheManager(caches, LENGTH, SIZE, SIZE)
            Manager.adopt(it, Ledger(space, Groups(it.coordinator, ahead), keep=keep, wait=0, pin=pin))
            it.ledger.fetch(1)      # the first block of a pool is vLLM's null block
            yield it
            it.ledger.shut()


def request(name: str, tokens: list[int], hint: dict | None = None, **more) -> Request:
    parameters = SamplingParams(max_tokens=99, extra_args={"kv_transfer_params": hint})
    return Request(name, tokens, parameters, None, block_hasher=lambda _: [], **more)


def ended(it: Manager, asked: Request) -> None:
    serve(it, asked)
    asked.status = RequestStatus.FINISHED_STOPPED
    it.free(asked)


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
        with client.space(it.ledger.space.name, it.ledger.space.geometry) as space:
            memory = space.memory()
            worker = object.__new__(KvdConnector)
            worker.space, worker.base, worker.mapped, worker.era = space, memory.base, memory.mapped, 0
            worker.rows = Rows(space)
            assert it.ledger.fetch(worker.mapped + 1) and it.ledger.top > worker.mapped
            worker.cache, worker.engine = 0, "apart"
            connectors._spaces["apart"] = space, worker.rows
            connectors.PATIENCE_S = 0
            for name, cache, words in (("another", space.cache, "the scheduler uses space another"),
                                       (space.name, space.cache ^ 1, "another daemon's pool than its scheduler")):
                try:
                    worker.handle_preemptions(Step(name, it.ledger.top, 0, cache))
                    raise AssertionError("a worker would write in another space, or another daemon's")
                except RuntimeError as error:
                    assert words in str(error), error
            connectors.PATIENCE_S = 600
            worker.handle_preemptions(Step(space.name, it.ledger.top, 0, it.ledger.space.cache))
            assert worker.mapped >= it.ledger.top
            ctypes.memset(worker.base + (it.ledger.top - 1) * memory.block_bytes, 0, memory.block_bytes)


def check_a_worker_meets_the_daemon_of_its_first_ids(_: str) -> None:
    """The daemon may be replaced after a worker has started and before its scheduler has."""
    geometry = kvd.Geometry.opaque(4096, "test", block_tokens=16)
    with daemon("--pool", "16M", "--set", "daemon.segment=1M") as it, kvd.connect(it.socket) as old, \
            old.space("met", geometry, fixed=True) as space:
        space.free(space.alloc(600))
        worker, memory = object.__new__(KvdConnector), space.memory()
        worker.space, worker.base, worker.mapped, worker.era, worker.cache = space, memory.base, memory.mapped, 0, 0
        worker.rows, worker.engine = Rows(space), "met"
        connectors._spaces["met"] = space, worker.rows
        it.kill()
        it.start()
        with kvd.connect(it.socket) as new, new.space("met", geometry, fixed=True) as scheduler:
            top = max(block.id for block in scheduler.alloc(10)) + 1
            worker.handle_preemptions(Step("met", top, 0, scheduler.cache))
            assert memory.mapped > worker.mapped == space.memory().mapped >= top, (memory.mapped, worker.mapped, top)
            assert worker.cache == space.cache == scheduler.cache and worker.memory.base == memory.base
            connectors.PATIENCE_S = 0           # the one after next may be there when a worker hears of the next
            for era, cache, why in ((1, scheduler.cache ^ 1, "another daemon's pool"), (0, scheduler.cache, "")):
                refused = ""
                try:
                    worker.handle_preemptions(Step("met", top, era, cache))
                except RuntimeError as error:
                    refused = str(error)
                assert why in refused and bool(why) == bool(refused), refused
            connectors.PATIENCE_S = 600
            del connectors._spaces["met"]       # as with a scheduler in its process, which has mapped what it uses
            worker.handle_preemptions(Step("met", memory.blocks, 0, scheduler.cache))


def check_a_daemon_is_replaced_between_lookup_and_slots(_: str) -> None:
    """What was found for a request is in the old pool: it is looked up again, and goes into the new one."""
    for fixed in (True, False):
        with daemon("--pool", "16M", "--set", "daemon.segment=1M") as own, manager(own.socket, most=40, fixed=fixed) as it:
            it.watermark_blocks = 2 * it.ledger.keep        # more than is there without asking the daemon
            ended(it, request("before", TOKENS))
            asked = request("asked", TOKENS)
            found, length, _ = it.get_computed_blocks(asked)
            assert length == 10 * SIZE
            it.ledger.space.free(it.ledger.free)
            it.ledger.free = []
            own.kill()
            own.start()
            assert it.allocate_slots(asked, asked.num_tokens - length, length, found, has_scheduled_reqs=False) is None
            for _ in range(3):                  # steps
                it.ledger.drop_found()
                found, length, _ = it.get_computed_blocks(asked)
                assert length == 0
                if it.allocate_slots(asked, asked.num_tokens, 0, found, has_scheduled_reqs=False) is not None:
                    break
            it.free(asked)
            ended(it, asked)
            assert it.ledger.space.match(TOKENS[:10 * SIZE]) == 10 * SIZE and not it.ledger.used


def check_blocks_left_over_are_no_daemon(_: str) -> None:
    """libkvd still has blocks of a daemon that is gone. New requests wait."""
    with daemon("--pool", "16M", "--set", "daemon.segment=1M") as own, manager(own.socket, fixed=True) as it:
        ended(it, request("before", TOKENS))
        own.kill()
        it.ledger.lose(kvd.ConnectionRefused(errno.ECONNREFUSED, "there is none"))
        asked = request("asked", TOKENS)
        for up in (False, True):
            if up:
                own.start()
            for _ in range(20):
                it.ledger.retry = 0.0
                found, n, _ = it.get_computed_blocks(asked)
                slots = it.allocate_slots(asked, asked.num_tokens - n, n, found, has_scheduled_reqs=False)
                assert up or (slots is None and it.ledger.state != it.ledger.SERVING)
                it.ledger.drop_found()
                while up and not it.ledger.space.catch_up():
                    time.sleep(0.01)
        assert it.ledger.state == it.ledger.SERVING and it.ledger.chains
        it.free(asked)


def check_posts_that_are_lost_are_no_second_loss(_: str) -> None:
    """What the old daemon has not taken is reported by the next post, which is a live daemon's."""
    with daemon("--pool", "16M", "--set", "daemon.segment=1M") as own, manager(own.socket, fixed=True) as it:
        found, n, _ = it.get_computed_blocks(asked := request("lost", TOKENS))
        assert it.allocate_slots(asked, asked.num_tokens - n, n, found) is not None
        asked.status, asked.num_computed_tokens = RequestStatus.RUNNING, asked.num_tokens
        own.process.send_signal(signal.SIGSTOP)
        it.ledger.publish()
        own.kill()
        own.start()
        it.free(asked)
        assert it.ledger._meet() and it.ledger.fetch(1)
        serve(it, asked := request("next", [5] + TOKENS))
        assert it.ledger.state == it.ledger.SERVING and not it.ledger.chains["next"].ended
        it.free(asked)
        assert it.ledger.space.match(([5] + TOKENS)[:10 * SIZE]) == 10 * SIZE


# ---- sessions --------------------------------------------------------------------------------------------------------

def check_sessions(socket: str) -> None:
    """The daemon keeps what a request names, also when its vLLM has ended; wrong values mean nothing."""
    def end(it: Manager, first: int, session: object, **more) -> list[int]:
        ended(it, request("ended", tokens := [first] + TOKENS, {"kvd_session": session}, **more))
        return tokens[:10 * SIZE]

    def sessions() -> dict:
        return {row["name"]: (row["keep"], row["blocks"]) for row in json.loads(kvctl("sessions", "--json"))["sessions"]}

    def kvctl(*arguments: str) -> bytes:
        return subprocess.run([os.environ["KVCTL"], "--socket", socket, *arguments], capture_output=True).stdout

    with manager(socket, keep=1, most=64) as it:
        pinned = end(it, 1, {"name": "one", "keep": "pinned", "ttl": 60})
        high = end(it, 2, {}, session_id="two")
        assert sessions() == {"one": ("pinned", 10), "two": ("high", 10)}
        for session in ("one", {"name": 1}, {}, {"name": "x", "keep": 1}, {"name": "x", "ttl": 1.5},
                        {"name": "x", "for": 1}, {"name": "x", "keep": "always"}, {"name": "two words"},
                        {"name": "x", "ttl": -1}):
            end(it, 3, session)
        serve(it, asked := request("preempted", TOKENS, {"kvd_session": {"name": "x"}}))
        it.free(asked)
        assert {*sessions()} == {"one", "two"}
    with manager(socket, keep=1, most=64) as it:
        kvctl("evict", it.ledger.space.name, "--all")
        assert it.ledger.space.match(pinned) == len(pinned) and not it.ledger.space.match(high)
        end(it, 4, {"name": "two", "ttl": 0})
        end(it, 1, {"name": "one"})
        assert sessions() == {"one": ("high", 10)}
        end(it, 5, None)
        kvctl("evict", it.ledger.space.name, "--blocks", "10")
        assert it.ledger.space.match(pinned) == len(pinned)
        it.ledger.space.end_session("one")
    with manager(socket, keep=1, most=64, pin=False) as it:
        end(it, 1, {"name": "one", "keep": "pinned"})
        assert sessions() == {"one": ("high", 10)}      # any client of vLLM's server could pin
        it.ledger.space.end_session("one")


def check_sessions_that_end(socket: str) -> None:
    """"ttl": 0 ends a session, whatever became of the request; and what would be refused again is told once."""
    def over(name: str, tokens: list[int], **more) -> Request:
        asked = request(name, tokens, {"kvd_session": {"name": "agent", "ttl": 0}}, **more)
        asked.status = RequestStatus.FINISHED_ABORTED
        return asked

    with manager(socket, keep=1, most=64) as it:
        def begin() -> None:
            ended(it, request("begin", TOKENS, {"kvd_session": {"name": "agent"}}))

        def is_over() -> bool:
            try:
                it.ledger.space.end_session("agent")
            except kvd.NotFound:
                return True
            return False

        begin()
        assert not is_over()
        begin()
        it.free(over("never admitted", TOKENS))
        assert is_over()
        begin()
        serve(it, asked := request("short", [5], {"kvd_session": {"name": "agent", "ttl": 0}}))
        asked.status = RequestStatus.FINISHED_STOPPED
        it.free(asked)
        assert is_over()
        begin()
        serve(it, asked := request("doubtful", TOKENS, {"kvd_session": {"name": "agent", "ttl": 0}}))
        asked.status = RequestStatus.FINISHED_STOPPED
        it.ledger.doubtful.add("doubtful")
        it.free(asked)
        assert is_over() and not it.ledger.doubtful

    tries = []

    def refuse(name: str, pins: list, keep: str, ttl: int) -> None:
        tries.append(keep)
        raise kvd.QuotaExceeded(errno.EDQUOT, reason)

    for reason, expected in (("domain 'd' is at its limit of this: sessions", ["pinned"]),
                             ("session 'x' would pin 9 KiB more", ["pinned", "high"])):
        tries.clear()
        Session("x", "pinned", 9).tell(SimpleNamespace(session=refuse), [])
        assert tries == expected, tries


# ---- what routers are told -------------------------------------------------------------------------------------------

def check_events(socket: str) -> None:
    """Two vLLMs tell the same of what either of them has computed, in vLLM's words; with a draft head, too."""
    for ahead in (0, 1):
        with manager(socket, most=1000 + ahead, ahead=ahead) as one, manager(socket, most=1000 + ahead, ahead=ahead) as two:
            tellers = [Teller(it.ledger.space, it.ledger.groups, it.ledger.salts, it) for it in (one, two)]
            told = [Told(), Told()]

            def tell() -> None:
                for it, teller in zip(told, tellers):
                    it.hear(teller)

            tell()
            assert all(it.cleared == 1 and not it.blocks for it in told)
            ended(one, request("plain", TOKENS))
            tell()
            assert told[0].blocks == told[1].blocks and told[0].prompts() == [(TOKENS[:10 * SIZE], None, None)]
            ended(one, request("salted", [5] + TOKENS, cache_salt="alice"))
            tell()
            assert len(told[0].blocks) == 20 and len(told[1].blocks) == 10    # the other one does not know that salt
            assert told[0].prompts()[0] == (([5] + TOKENS)[:10 * SIZE], "alice", None)
            serve(two, asked := request("salted", [5] + TOKENS + 2 * SIZE * [3], cache_salt="alice"))
            two.free(asked)
            tell()
            assert len(told[0].blocks) == 22 and len(told[1].blocks) == 10
            before = told[0].prompts()
            subprocess.run([os.environ["KVCTL"], "--socket", socket, "evict", one.ledger.space.name, "--all"], check=True,
                           capture_output=True)
            tell()
            assert not told[0].blocks and not told[1].blocks and len(before) == 2
            ended(one, request("plain", TOKENS))
            assert one.reset_prefix_cache() and one.ledger.fetch(1)
            ended(one, request("afterwards", [6] + TOKENS))
            ended(two, request("theirs", [4] + TOKENS))
            tell()
            assert told[0].cleared == 2 and told[0].prompts() == [(([6] + TOKENS)[:10 * SIZE], None, None)]
            assert [tokens[0] for tokens, *_ in told[1].prompts()] == [4, TOKENS[0]]


class Told:
    """What a router knows."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple] = {}      # by hash: parent, tokens, cache_salt and LoRA adapter
        self.cleared = 0

    def hear(self, teller: Teller) -> None:
        for events in teller.batches():
            msgspec.msgpack.encode(events)
            for it in events:
                if isinstance(it, AllBlocksCleared):
                    self.cleared += 1
                    self.blocks.clear()
                elif isinstance(it, BlockRemoved):
                    assert it.group_idx == 0 and it.medium == "GPU"
                    for name in it.block_hashes:
                        del self.blocks[name]
                else:
                    self._stored(it)

    def _stored(self, it: BlockStored) -> None:
        assert (it.group_idx, it.medium, it.block_size, it.kv_cache_spec_kind) == (0, "GPU", SIZE, "full_attention"), it
        assert len(it.token_ids) == SIZE * len(it.block_hashes)
        parent = it.parent_block_hash
        for i, name in enumerate(it.block_hashes):
            assert name not in self.blocks and (parent is None or parent in self.blocks)
            keys = it.extra_keys[i] if it.extra_keys else None
            self.blocks[name] = parent, it.token_ids[i * SIZE:][:SIZE], keys[0] if keys else None, it.lora_name
            parent = name

    def prompts(self) -> list[tuple]:
        """The longest prompts, with what is told of their first blocks."""
        parents = {parent for parent, *_ in self.blocks.values()}
        found = []
        for name in self.blocks.keys() - parents:
            tokens: list[int] = []
            while name is not None:
                parent, more, *salt = self.blocks[name]
                tokens, name = more + tokens, parent
            found.append((tokens, *salt))
        return sorted(found)


if __name__ == "__main__":
    for check in (check_sessions, check_sessions_that_end, check_events,
                  check_the_longest_hit_that_vllm_allows, check_slots_of_drafts, check_guesses_behind_the_end,
                  check_only_own_blocks_are_zeroed, check_a_worker_maps_what_a_step_zeroes,
                  check_a_worker_meets_the_daemon_of_its_first_ids,
                  check_a_daemon_is_replaced_between_lookup_and_slots, check_posts_that_are_lost_are_no_second_loss,
                  check_blocks_left_over_are_no_daemon, check_a_watermark):
        check(sys.argv[1])
