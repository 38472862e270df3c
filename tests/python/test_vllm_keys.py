# SPDX-License-Identifier: Apache-2.0
"""Which blocks vLLM's requests share, with the connectors' ledger and planner on a real pool. vLLM is a stand-in."""

from __future__ import annotations

import sys
import types

from common import ROOT, kvd, main

sys.path.append(str(ROOT / "tests/engines"))
import standins     # noqa: E402  (needs the path above)

standins.NAMES = ("vllm", "torch") if "torch" not in sys.modules else ("vllm",)

from kvd.engines import _vllm_keys as keys          # noqa: E402  (needs the stand-ins)
from kvd.engines._vllm_ledger import Ledger         # noqa: E402
from kvd.engines._vllm_copier import Planner        # noqa: E402

SIZE = 16


def request(name: str, tokens: list[int], *pictures: tuple[str, int, int], **more):
    """pictures: identifier, offset, length."""
    features = [types.SimpleNamespace(identifier=it, mm_position=types.SimpleNamespace(offset=at, length=n))
                for it, at, n in pictures]
    return types.SimpleNamespace(**{
        "request_id": name, "all_token_ids": tokens, "num_tokens": len(tokens), "mm_features": features,
        "lora_request": None, "cache_salt": None, "prompt_embeds": None, "skip_reading_prefix_cache": False,
        "num_computed_tokens": 0, "num_in_flight_tokens": 0, "resumable": False, "kv_transfer_params": None,
        "is_finished": lambda: True, **more})


def prompt(system: int, *pictures: tuple[str, int]) -> tuple[list[int], list[tuple[str, int, int]]]:
    """`system` tokens of text, then pictures, each followed by a word."""
    tokens, where = [100 + i % 50 for i in range(system)], []
    for name, n in pictures:
        where.append((name, len(tokens), n))
        tokens += [7] * n + [50]
    return tokens, where


class Serving:
    """A vLLM without a model, in place: it looks up requests and publishes their blocks."""

    def __init__(self, space: kvd.Space, ahead: int = 0):
        groups = types.SimpleNamespace(size=SIZE, step=SIZE, dense=[0], kinds=[], places={}, salts=lambda salt: [salt],
                                       ahead=ahead)
        self.space, self.ledger = space, Ledger(space, groups, keep=4, wait=0)

    def serve(self, it) -> int:
        """Returns the number of tokens found."""
        chain, n = self.ledger.find(it, it.num_tokens - 1), len(it.all_token_ids) // SIZE
        found = chain.length
        assert any(self.ledger.fetch(n - found) for _ in range(2))      # the first block is vLLM's null block
        table = [types.SimpleNamespace(block_id=i) for i in (chain.pins[0].blocks if chain.pins else [])]
        table += [types.SimpleNamespace(block_id=i) for i in self.ledger.hand_out(n - found)]
        self.ledger.admit(it, [table], found * SIZE)
        self.ledger.plan(it, n)
        it.num_computed_tokens = len(it.all_token_ids)
        self.ledger.publish()
        self.space.flush()
        chain = self.ledger.leave(it)
        self.ledger.close(chain)
        return found * SIZE


def opaque(space: kvd.Space, name: str) -> kvd.Space:
    return space.daemon.space(name, kvd.Geometry.opaque(4096, "vllm", block_tokens=SIZE))


def test_a_picture_changes_the_keys_from_its_block_on(space):
    """The system prompt before the picture is shared. A conversation that adds a picture finds all earlier blocks."""
    with opaque(space, "pictures") as own:
        engine, other = Serving(own), Planner([own], SIZE)
        for system in (64, 70, 79):             # a picture at a block's start, within it, and at its last token
            before = system // SIZE * SIZE
            tokens, where = prompt(system, ("cat", 40), (f"dog {system}", 20))
            assert engine.serve(request("a", tokens + [1] * 40, *where)) in (0, 64)
            assert other.find(request("a2", tokens + [1] * 40, *where), 0) == (len(tokens) + 39) // SIZE * SIZE
            changed, where_b = prompt(system, ("bird", 40), (f"dog {system}", 20))
            assert changed == tokens
            assert other.find(request("b", tokens + [1] * 40, *where_b), 0) == before
            assert engine.serve(request("b", tokens + [1] * 40, *where_b)) == before
            text = request("c", tokens + [1] * 40)
            assert engine.serve(text) == before             # the same tokens as text: no picture
            second = request("d", tokens + [1] * 40, where[0], ("fish", *where[1][1:]))
            assert engine.serve(second) == where[1][1] // SIZE * SIZE


def test_pictures_that_only_seem_alike(space):
    """Keys depend on the order, place and length of pictures, too."""
    tokens = [9] * 96
    rows = [keys.tokens_of(request("x", tokens, *pictures), 0, 96, SIZE) for pictures in (
        (), [("a", 16, 32)], [("a", 16, 33)], [("a", 17, 32)], [("b", 16, 32)], [("a", 16, 16), ("b", 32, 16)],
        [("b", 16, 16), ("a", 32, 16)], [("a", 16, 16), ("a", 32, 16)], [("a", 31, 1)], [("b", 31, 1)],
        [("a", 31, 1), ("b", 32, 1)])]
    assert len({tuple(row) for row in rows}) == len(rows)
    for row in rows:
        assert row[:16] == tokens[:16] and row[64:] == tokens[64:]
        for at in range(0, 96, SIZE):
            block = row[at:at + SIZE]
            assert block == [9] * SIZE or all(keys.PICTURE <= word < 1 << 32 for word in block)
    assert keys.tokens_of(request("x", tokens, ("a", 16, 0)), 0, 96, SIZE) == tokens
    whole = keys.tokens_of(request("x", tokens, ("a", 20, 50)), 0, 96, SIZE)
    for first in range(0, 96, SIZE):            # published block by block, looked up at once
        end = first + SIZE
        assert keys.tokens_of(request("x", tokens, ("a", 20, 50)), first, end, SIZE) == whole[first:end]


def test_keys_of_prefixes(space):
    """A key covers all that comes before its position, and nothing behind it, however it is computed."""
    tokens, pictures = [9] * 96, [("a", 20, 20)]
    first = keys.PrefixKeys(request("x", tokens, *pictures), 0, SIZE)
    whole = [first.upto(end) for end in range(SIZE, 97, SIZE)]
    assert len({*whole}) == 6 and all(len(it) == 32 for it in whole)
    for other, salt, like in ((tokens + [1] * 40, 0, 6), (tokens[:40] + [1] * 99, 0, 2), (tokens, 1, 0)):
        again = keys.PrefixKeys(request("y", other, *pictures), salt, SIZE)
        assert [again.upto(end) for end in (96, 80, 64, 48, 32, 16)][::-1][:like] == whole[:like]
        assert not {*whole[like:]} & {again.upto(end) for end in range(SIZE, 97, SIZE)}
    plain = keys.PrefixKeys(request("z", tokens), 0, SIZE)
    assert plain.upto(16) == whole[0] and plain.upto(32) != whole[1]


def test_with_a_draft_head_the_next_token_counts(space):
    """A block is found if the token behind it is the same, too, and published when that is known."""
    engine, tokens = Serving(space, ahead=1), [100 + i % 50 for i in range(64)]
    for more, found in (([], 0), ([], 48), ([7], 48), ([7], 64), ([8], 48), ([7, 9], 64)):
        assert engine.serve(request("r", tokens + more)) == found, (more, found)
    assert engine.serve(request("r", [99] + tokens[1:] + [7])) == 0
    for no in (request("r", tokens, ("cat", 8, 8)), request("r", tokens, resumable=True)):
        assert keys.salt_ahead(no, 0) is None
    keyed = [keys.PrefixKeys(request("r", tokens + [it]), 0, SIZE, 1) for it in (7, 8)]
    assert [keyed[0].upto(n) == keyed[1].upto(n) for n in (48, 64)] == [True, False]


def test_request_wide_inputs_change_the_salt(space):
    tokens, where = prompt(64, ("cat", 20))
    plain, salted = request("x", tokens, *where), request("x", tokens, *where, cache_salt="mine")
    assert keys.extra_key(plain, b"", SIZE) == 0 and keys.extra_key(salted, b"", SIZE)
    assert keys.extra_key(plain, b"epoch", SIZE) not in (0, keys.extra_key(salted, b"", SIZE))
    assert keys.extra_key(request("x", tokens, prompt_embeds=1), b"", SIZE) is None
    assert keys.extra_key(plain, b"", 4) is None and keys.extra_key(request("x", tokens), b"", 4) == 0
    lora = types.SimpleNamespace(lora_name="nowhere", lora_path="/nowhere")
    assert keys.extra_key(request("x", tokens, lora_request=lora), b"", SIZE) is None


if __name__ == "__main__":
    sys.exit(main(globals()))
