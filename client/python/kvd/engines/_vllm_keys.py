# SPDX-License-Identifier: Apache-2.0
"""Keys of a vLLM request's blocks. A key covers everything that changes a block in addition to the tokens up to its
end.

A LoRA adapter and a cache_salt change all blocks of a request: they are the salt of its chain. A picture changes the
blocks from its first one on. It is therefore part of the key of each block that it overlaps, and the text before it is
shared with other requests.
This module does not need vLLM.
"""

from __future__ import annotations

import hashlib
import json
import struct
from array import array
from pathlib import Path
from typing import TYPE_CHECKING

import kvd

from ._common import digest

if TYPE_CHECKING:
    from vllm.v1.request import Request

LEAST = 8               # tokens per block for pictures, so that the digest of a block has 248 bits
PICTURE = 1 << 31       # set in all words of such a block, and in no token
AHEAD = 1 << 63         # set in the salt of a chain whose words begin with the second token, above the first token

_adapters: dict[tuple[str, str], tuple | None] = {}     # digests of LoRA adapters at first use, by name and path


def _adapter(name: str, path: str) -> tuple | None:
    """Return names and digests of the adapter's files; None if there are none to compare."""
    if (name, path) not in _adapters:
        files = sorted(Path(path).glob("adapter_*")) if Path(path).is_dir() else []
        _adapters[name, path] = tuple((it.name, digest(it)) for it in files) or None
    return _adapters[name, path]


def extra_key(request: Request, epoch: bytes, size: int) -> int | None:
    """Return the salt of a request's chain; 0 if it has none; None if the request must not be shared."""
    lora = request.lora_request
    if request.prompt_embeds is not None or (request.mm_features and size < LEAST):
        return None
    if not (lora or request.cache_salt or epoch):
        return 0
    adapter = _adapter(lora.lora_name, lora.lora_path) if lora else ()
    if adapter is None:
        return None
    return kvd.fingerprint("vllm", adapter, request.cache_salt, [], epoch)[0] or 1


def salt_ahead(request: Request, salt: int | None) -> int | None:
    """Return the salt of a chain whose words are the tokens from the second one on, so that the next token is compared
    with each block. The salt has the first token. Requests with pictures are not shared so, nor sessions of streaming
    input, whose last token may be replaced."""
    if salt is None or request.mm_features or request.resumable:
        return None
    first = request.all_token_ids[0]
    return kvd.fingerprint("vllm ahead", salt, first)[0] or 1 if salt else AHEAD | first


def first_token(salt: int) -> int | None:
    """Return the first token of such a chain, if it has no other salt; otherwise None."""
    return salt & ~AHEAD if salt & ~0xffffffff == AHEAD else None


class PrefixKeys:
    """Keys of a request's prefixes, by their numbers of tokens, which are multiples of `step`: SHA-256 of the request's
    salt and of all tokens before that position, with pictures as in tokens_of(), and of `ahead` more (salt_ahead())."""

    def __init__(self, request: Request, salt: int, step: int, ahead: int = 0):
        self.request, self.step, self.ahead = request, step, ahead
        self.keys = [hashlib.sha256(struct.pack("<QI", salt, step)).digest()]

    def upto(self, tokens: int) -> bytes:
        first, end = (len(self.keys) - 1) * self.step, tokens // self.step * self.step
        if end > first:
            words = array("I", tokens_of(self.request, first + self.ahead, end + self.ahead, self.step)).tobytes()
            for at in range(0, len(words), 4 * self.step):
                self.keys.append(hashlib.sha256(self.keys[-1] + words[at:at + 4 * self.step]).digest())
        return self.keys[tokens // self.step]


def tokens_of(request: Request, first: int, end: int, size: int) -> list[int]:
    """Return tokens [first, end) of whole blocks for lookups and publishing. A block that overlaps a picture (or sound,
    or video) is replaced by a digest of its tokens and of the pictures and their places in it."""
    tokens = list(request.all_token_ids[first:end])
    for at in _blocks_of_pictures(request, first, end, size):
        there = [(it.identifier, it.mm_position.offset - at, it.mm_position.length) for it in request.mm_features
                 if it.mm_position.offset < at + size and it.mm_position.offset + it.mm_position.length > at]
        text = json.dumps([tokens[at - first:at - first + size], there]).encode()
        words = struct.unpack(f"<{size}I", hashlib.shake_256(text).digest(4 * size))
        tokens[at - first:at - first + size] = [word | PICTURE for word in words]
    return tokens


def _blocks_of_pictures(request: Request, first: int, end: int, size: int) -> list[int]:
    """Return the first positions of the blocks within [first, end) that a picture overlaps."""
    found: set[int] = set()
    for it in request.mm_features:
        begin, behind = it.mm_position.offset, it.mm_position.offset + it.mm_position.length
        if it.mm_position.length > 0:
            found.update(range(max(begin, first) // size * size, min(behind, end), size))
    return sorted(found)
