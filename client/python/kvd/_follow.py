# SPDX-License-Identifier: Apache-2.0
"""Which blocks are in a space."""

from __future__ import annotations

from collections import deque
from ctypes import byref, c_void_p
from typing import NamedTuple, Union

from ._handle import Handle
from ._native import FollowStruct, StoredStruct, check, closed, lib


class Stored(NamedTuple):
    """A full block of a chain of tokens came into the cache."""

    hash: int
    """Names the block and all tokens before it; never 0."""
    parent: int
    """Hash of the block before it; 0 if it begins a chain."""
    salt: int
    depth: int
    """Number of blocks before it."""
    group: int
    tokens: list[int]


class Removed(NamedTuple):
    """A block left the cache."""

    hash: int


class Cleared(NamedTuple):
    """All blocks are gone."""


Change = Union[Stored, Removed, Cleared]


def _stored(it: StoredStruct) -> Stored:
    return Stored(it.hash, it.parent, it.salt, it.depth, it.group, it.tokens[:it.n_tokens])


class Follow:
    """Follows which blocks are in a space, for routers that send requests where their prefix is. Made by
    Space.follow(). For one thread at a time; ended by end(), or by the garbage collector."""

    def __init__(self, space: Handle):
        changes = self._changes = deque[Change]()       # the functions have no reference to self
        self._ops = FollowStruct(FollowStruct.STORED(lambda _, it: changes.append(_stored(it.contents))),
                                 FollowStruct.REMOVED(lambda _, name: changes.append(Removed(name))),
                                 FollowStruct.CLEARED(lambda _: changes.append(Cleared())))
        pointer = c_void_p()
        check(lib.kvd_follow_begin(space, byref(self._ops), None, byref(pointer)))
        self._handle: Handle | None = Handle(pointer, lib.kvd_follow_end, space, self._ops)

    def step(self) -> list[Change]:
        """Return what has changed since the last step; at first all blocks, parents before their children. Removed
        blocks come first. Reads shared memory, and makes one system call. Without a daemon, nothing changes."""
        if not self._handle:
            raise closed("the follower")
        check(lib.kvd_follow_step(self._handle))
        changes = list(self._changes)
        self._changes.clear()
        return changes

    def end(self) -> None:
        """End it. Does nothing if already ended."""
        self._handle = None

    def __repr__(self) -> str:
        return f"<kvd.Follow{'' if self._handle else ', ended'}>"
