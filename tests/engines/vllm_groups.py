# SPDX-License-Identifier: Apache-2.0
"""For test_vllm.py: models with several KV cache groups, without a model. vLLM's own coordinator looks up, allocates and
frees random requests over kvd's pool, in two managers that share a space, and over vLLM's own pool.

    vllm_groups.py SOCKET      the socket of a daemon

With room for everything, hits and block tables are the same step by step: a request finds through kvd exactly what one
vLLM that had served all requests would have found, and has blocks at the same positions. With less room, requests wait
or are preempted. In both cases each block that a step may read has the bytes of its group and tokens.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import random
import sys
from array import array
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace

import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (ChunkedLocalAttentionSpec, FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec,
                                        KVCacheSpec, MambaSpec, MLAAttentionSpec, SlidingWindowMLASpec, SlidingWindowSpec)
from vllm.v1.request import Request, RequestStatus

import kvd
from kvd.engines._vllm_groups import Groups
from kvd.engines._vllm_ledger import Ledger
from kvd.engines._vllm_pool import Manager

LENGTH, BLOCK_BYTES, CHUNK = 400, 256, 48       # tokens of a sequence, bytes of a block, tokens of a step
COMMON = {"num_kv_heads": 2, "head_size": 8, "dtype": torch.float32}
PLAIN = (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)
init_none_hash(sha256_cbor)


def full(tokens: int) -> KVCacheSpec:
    return FullAttentionSpec(block_size=tokens, **COMMON)


def window(tokens: int, size: int) -> KVCacheSpec:
    return SlidingWindowSpec(block_size=tokens, sliding_window=size, **COMMON)


def chunk(tokens: int, size: int) -> KVCacheSpec:
    return ChunkedLocalAttentionSpec(block_size=tokens, attention_chunk_size=size, **COMMON)


def state(tokens: int, checkpoints: int = 0) -> KVCacheSpec:
    """checkpoints: 1 if a step can leave the state at the last end of a block, too."""
    return MambaSpec(block_size=tokens, shapes=((4, 8),), dtypes=(torch.float32,), mamba_cache_mode="align",
                     num_prefill_checkpoint_blocks=checkpoints, prefill_checkpoint_alignment=checkpoints or None)


def latent(tokens: int) -> KVCacheSpec:
    return MLAAttentionSpec(block_size=tokens, num_kv_heads=1, head_size=16, dtype=torch.float32)


def latent_window(tokens: int, size: int) -> KVCacheSpec:
    return SlidingWindowMLASpec(block_size=tokens, sliding_window=size, num_kv_heads=1, head_size=16, dtype=torch.float32)


MODELS = {
    "Gemma 3": [full(16)] + 5 * [window(16, 64)],
    "gpt-oss": [window(16, 40), full(16)],
    "Llama 4": [full(16)] + 3 * [chunk(16, 64)],
    "two windows": [full(16), window(16, 33), window(16, 100), full(16)],
    "blocks of other sizes": [full(32), window(16, 50), window(64, 128)],
    "a window of one block": [full(16), window(16, 2)],
    "Qwen3-Next": 3 * [state(16)] + [full(16)],
    "Nemotron-H": 2 * [state(16, checkpoints=1)] + [full(16)],
    "blocks longer than a step": [state(64), full(64)],
    "Kimi Linear": [latent(32)] + 3 * [state(32)],
    "DeepSeek": [latent(16)],
    "DeepSeek V4": [latent(64)] + 2 * [latent_window(16, 40)] + [latent_window(32, 64)],
}


def manager(specs: list[KVCacheSpec], blocks: int) -> KVCacheManager:
    sizes = [spec.block_size for spec in specs]
    caches = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[],
                           kv_cache_groups=[KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)])
    return KVCacheManager(caches, LENGTH, math.lcm(*sizes), math.gcd(*sizes), max_in_flight_tokens=CHUNK)


class Side:
    """A manager, and its running requests. With a space, it writes and compares blocks. ahead: as in Groups."""

    def __init__(self, specs: list[KVCacheSpec], blocks: int, space: kvd.Space | None = None, ahead: int = 0):
        self.it, self.space, self.specs, self.ahead = manager(specs, blocks), space, specs, ahead
        self.hasher = get_request_block_hasher(math.gcd(*(spec.block_size for spec in specs)), sha256_cbor)
        self.running: dict[str, Request] = {}
        self.written: dict[str, int] = {}       # number of tokens
        self.splits = [spec for spec in specs if isinstance(spec, MambaSpec)]
        if space:
            Manager.adopt(self.it, Ledger(space, Groups(self.it.coordinator, ahead), keep=4, wait=0))
            self.it.ledger.fetch(1)     # the first block of a pool is vLLM's null block

    def begin(self, name: str, tokens: list[int]) -> None:
        """Every other request has a session, one of two."""
        hint = {"kv_transfer_params": {"kvd_session": {"name": f"{len(tokens) % 2}"}}} if tokens[-1] % 2 else {}
        parameters = SamplingParams(max_tokens=99, extra_args=hint)
        self.running[name] = Request(name, tokens, parameters, None, block_hasher=self.hasher)

    def step(self, name: str, ends: bool = False) -> tuple | None:
        """Schedules a step of a request, and has its output. ends: it is the last one, so that nothing is published before
        end(). Returns the number of tokens that were found, and where
        its tables have blocks; None if the request must wait."""
        it, asked, hit, found = self.it, self.running[name], 0, None
        it.new_step_starts()
        if asked.status != RequestStatus.RUNNING:
            found, hit, asked.shared_prefix_boundary = it.get_computed_blocks(asked)
        computed = asked.num_computed_tokens + hit
        new = self.split(asked, min(CHUNK, asked.num_tokens - computed), hit)
        got = it.allocate_slots(asked, new, hit, found, full_sequence_must_fit=found is not None)
        if got is not None:
            asked.status, asked.num_computed_tokens = RequestStatus.RUNNING, computed + new
            if self.space:
                self.write(asked, hit)
                if not ends:
                    it.ledger.publish()
                with suppress(kvd.Refused):     # in a full space, the block before may be evicted first
                    self.space.flush()
        if self.space:
            it.ledger.drop_found()
            it.ledger.trim()
        tables = it.coordinator.get_blocks(name)
        return None if got is None else (hit, [[block.is_null for block in table] for table in tables])

    def split(self, asked: Request, new: int, hit: int) -> int:
        """Ends a step where vLLM's scheduler does."""
        for spec in self.splits[:1]:
            about = SimpleNamespace(
                cache_config=spec, scheduler_config=SimpleNamespace(long_prefill_token_threshold=0),
                max_num_scheduled_tokens=CHUNK, block_size=spec.block_size, hash_block_size=spec.block_size,
                use_eagle_block_drop=False, mamba_partial_cache_hit=False, mamba_shared_prefix_checkpoint=False,
                mamba_has_prefill_checkpoint_blocks=spec.num_prefill_checkpoint_blocks > 0,
                mamba_prefill_checkpoint_alignment=spec.prefill_checkpoint_alignment)
            return Scheduler._mamba_block_aligned_split(about, asked, new, hit)
        return new

    def decode(self, name: str, token: int) -> None:
        """The last step's output. A draft head has used it within the step."""
        self.running[name].append_output_token_ids(token)
        if self.space:
            self.write(self.running[name], 0)

    def preempt(self, name: str) -> None:
        asked = self.running[name]
        self.it.free(asked)
        asked.status, asked.num_computed_tokens = RequestStatus.PREEMPTED, 0
        self.written.pop(name, None)

    def end(self, name: str) -> None:
        """As vLLM's scheduler: what the window has left is freed first."""
        asked = self.running.pop(name)
        self.written.pop(name, None)
        asked.status = RequestStatus.FINISHED_STOPPED
        self.it.remove_skipped_blocks(name, asked.num_computed_tokens, asked.num_prompt_tokens)
        self.it.free(asked)
        if self.space:
            with suppress(kvd.Refused):
                self.space.flush()

    # ---- bytes

    def places(self, asked: Request, end: int) -> Iterator[tuple[int, bytes]]:
        """Addresses of the blocks of a request that are full with `end` tokens, and what they must contain. It depends
        on the next token with a draft head."""
        base = self.space.memory().base
        for group, (spec, table) in enumerate(zip(self.specs, self.it.coordinator.get_blocks(asked.request_id))):
            for i, block in enumerate(table[:end // spec.block_size]):
                if not block.is_null:
                    text = array("q", [group, *asked.all_token_ids[:(i + 1) * spec.block_size + self.ahead]]).tobytes()
                    yield base + block.block_id * BLOCK_BYTES, hashlib.sha256(text).digest()

    def write(self, asked: Request, hit: int) -> None:
        """Compares the blocks that are full before the step, and fills others, whose next token is known."""
        self.written.setdefault(asked.request_id, hit)
        self.compare(asked)
        before = {address for address, _ in self.places(asked, self.written[asked.request_id])}
        self.written[asked.request_id] = min(asked.num_computed_tokens, asked.num_tokens - self.ahead)
        for address, content in self.places(asked, self.written[asked.request_id]):
            if address not in before:
                ctypes.memmove(address, content, len(content))

    def compare(self, asked: Request) -> None:
        for address, content in self.places(asked, end := self.written[asked.request_id]):
            assert ctypes.string_at(address, len(content)) == content, (asked.request_id, end)


@contextmanager
def sides(socket: str, name: str, specs: list[KVCacheSpec], most: int = 0, ahead: int = 0) -> Iterator[list[Side]]:
    """Two managers of two clients in one space of at most `most` blocks."""
    tokens = next(spec.block_size for spec in specs if isinstance(spec, FullAttentionSpec))
    geometry = kvd.Geometry.opaque(BLOCK_BYTES, "groups", block_tokens=tokens)
    with ExitStack() as stack:
        made = []
        for _ in range(2):
            space = stack.enter_context(kvd.connect(socket)).space(name, geometry, max_blocks=most)
            made.append(Side(specs, space.memory().blocks, stack.enter_context(space), ahead))
        yield made
        for side in made:
            assert not (side.it.ledger.used or side.it.ledger.held or side.it.ledger.filling or side.it.ledger.planned)
            assert all(block.ref_cnt == 0 for block in side.it.block_pool.blocks if not block.is_null)
            side.it.ledger.shut()


def prompt(chance: random.Random) -> list[int]:
    """The beginning of one of three documents, and some tokens of its own."""
    document = random.Random(chance.randrange(3))
    tokens = [document.randrange(1000) for _ in range(300)]
    return tokens[:chance.choice((40, 96, 160, 161, 250, 300))] + [chance.randrange(3) for _ in range(chance.randrange(1, 40))]


def check_like_vllm(socket: str, name: str, specs: list[KVCacheSpec], chance: random.Random) -> int:
    """Returns the number of tokens that were found."""
    theirs, hits = Side(specs, 20000), 0
    with sides(socket, f"{name}-{chance.random()}".replace(" ", "-"), specs) as ours:
        for i in range(40):
            mine, request = chance.choice(ours), f"request{i}"
            both = (theirs, mine)
            tokens = prompt(chance)
            for side in both:
                side.begin(request, tokens)
            steps, ends = chance.randrange(3, 12), chance.random() < 0.7
            for left in reversed(range(steps)):
                got = [side.step(request, ends and not left) for side in both]
                assert got[0] == got[1] is not None, (name, request, got)
                hits += got[0][0]
                if ends and not left:
                    break
                asked, again = mine.running[request], chance.random() < 0.1
                for side in both:
                    if again:
                        side.preempt(request)
                    elif asked.num_computed_tokens == asked.num_tokens:
                        side.decode(request, len(tokens) % 7)
            for side in both if ends else ():
                side.end(request)
        for side in (theirs, *ours):
            for request in list(side.running):
                side.end(request)
    return hits


def check_with_less_room(socket: str, name: str, specs: list[KVCacheSpec], chance: random.Random, ahead: int) -> int:
    """Returns how often a request had to wait."""
    waits = 0
    with sides(socket, f"small-{ahead}-{name}-{chance.random()}".replace(" ", "-"), specs, most=200, ahead=ahead) as ours:
        for i in range(60):
            side = chance.choice(ours)
            side.begin(f"request{i}", prompt(chance))
            for _ in range(20):
                request = chance.choice(list(side.running))
                if side.step(request) is None:
                    waits += 1
                    other = chance.choice(list(side.running))
                    (side.end if chance.random() < 0.5 else side.preempt)(other)
                    if not side.running:
                        break
                    continue
                asked = side.running[request]
                if asked.num_computed_tokens == asked.num_tokens:
                    side.decode(request, chance.randrange(2))
                if asked.num_tokens > LENGTH - CHUNK:
                    side.end(request)
                    if not side.running:
                        break
        for side in ours:
            for request in list(side.running):
                if request in side.written:
                    side.compare(side.running[request])
                side.end(request)
    return waits


def run(side: Side, name: str, tokens: list[int]) -> int:
    """Computes a prompt and ends. Returns the number of tokens that were found."""
    side.begin(name, tokens)
    hit, _ = side.step(name)
    while side.running[name].num_computed_tokens < len(tokens):
        assert side.step(name)
    side.end(name)
    return hit


def check_kept(socket: str, name: str, specs: list[KVCacheSpec]) -> None:
    """A hit in a kept prefix is as long after the pool was filled with other blocks as before."""
    tokens, n = [1 + i % 9 for i in range(250)], iter(range(1000))
    with sides(socket, f"kept-{name}".replace(" ", "-"), specs, most=200) as (side, _):
        def hit_after_others() -> int:
            for _ in range(40):
                run(side, f"other{next(n)}", [1000 + next(n)] + [2] * 320)
            return run(side, f"again{next(n)}", tokens + [2])

        run(side, "kept", tokens[:-1] + [1])
        hit = run(side, "again", tokens[:-1] + [1, 2])
        assert hit, name
        tokens[-1] = 1
        assert hit_after_others() == hit, name
        side.space.end_session("0")
        assert hit_after_others() < hit, name


if __name__ == "__main__":
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    for model, groups in MODELS.items():
        times = rounds if all(type(spec) in PLAIN for spec in groups) else 1    # a round of a layout takes 6 s
        found = sum(check_like_vllm(sys.argv[1], model, groups, random.Random(i)) for i in range(times))
        waited = sum(check_with_less_room(sys.argv[1], model, groups, random.Random(i), 0) for i in range(times))
        waited += check_with_less_room(sys.argv[1], model, groups, random.Random(rounds), 1)
        check_kept(sys.argv[1], model, groups)
        assert found and waited, (model, found, waited)
        print(f"{model}: {found} tokens found, {waited} waits", flush=True)
