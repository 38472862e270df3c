# SPDX-License-Identifier: Apache-2.0
"""The keys of a vLLM request's blocks: whatever changes a block, in addition to the tokens before its end, is in its
key.

A LoRA adapter and a cache_salt change all blocks of a request: they are the salt of its chain. A picture changes the
blocks from its own on, so it is in the key of each block that it lies in, and the text before it is shared with other
requests.
Nothing here needs vLLM.
"""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import kvd

from ._common import digest

if TYPE_CHECKING:
    from vllm.v1.request import Request

LEAST = 8               # tokens of a block, so that the digest of a picture's block has 248 bits
PICTURE = 1 << 31       # of all words of such a block: no token has it

_adapters: dict[tuple[str, str], tuple | None] = {}     # LoRA adapters by name and path: what they were when first used


def _adapter(name: str, path: str) -> tuple | None:
    """None: files that cannot be compared."""
    if (name, path) not in _adapters:
        files = sorted(Path(path).glob("adapter_*")) if Path(path).is_dir() else []
        _adapters[name, path] = tuple((it.name, digest(it)) for it in files) or None
    return _adapters[name, path]


def extra_key(request: Request, epoch: bytes, size: int) -> int | None:
    """The salt of a request's chain. 0: there is none. None: no other request may share with this one."""
    lora = request.lora_request
    if request.prompt_embeds is not None or (request.mm_features and size < LEAST):
        return None
    if not (lora or request.cache_salt or epoch):
        return 0
    adapter = _adapter(lora.lora_name, lora.lora_path) if lora else ()
    if adapter is None:
        return None
    return kvd.fingerprint("vllm", adapter, request.cache_salt, [], epoch)[0] or 1


def tokens_of(request: Request, first: int, end: int, size: int) -> list[int]:
    """Tokens [first, end) of whole blocks, as they are looked up and published. A block with a part of a picture (or
    sound, or video) is a digest of its tokens and of which pictures lie where in it."""
    tokens = list(request.all_token_ids[first:end])
    for at in _blocks_of_pictures(request, first, end, size):
        there = [(it.identifier, it.mm_position.offset - at, it.mm_position.length) for it in request.mm_features
                 if it.mm_position.offset < at + size and it.mm_position.offset + it.mm_position.length > at]
        text = json.dumps([tokens[at - first:at - first + size], there]).encode()
        words = struct.unpack(f"<{size}I", hashlib.shake_256(text).digest(4 * size))
        tokens[at - first:at - first + size] = [word | PICTURE for word in words]
    return tokens


def _blocks_of_pictures(request: Request, first: int, end: int, size: int) -> list[int]:
    """The first positions of blocks within [first, end) that a picture lies in."""
    found: set[int] = set()
    for it in request.mm_features:
        begin, behind = it.mm_position.offset, it.mm_position.offset + it.mm_position.length
        if it.mm_position.length > 0:
            found.update(range(max(begin, first) // size * size, min(behind, end), size))
    return sorted(found)
