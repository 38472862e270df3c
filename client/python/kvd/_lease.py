# SPDX-License-Identifier: Apache-2.0
"""Single flight: one process computes a prefix, the others wait."""

from __future__ import annotations

from array import array

from ._handle import Handle, when_forgotten
from ._native import check, lib, ticks


def _end(handle: Handle, row: array[int]) -> None:
    lib.kvd_lease_end(handle, *row.buffer_info())


class Lease:
    """The right to compute a prefix, if it is true. Made by Space.lease(). Ended by end(), by the end of a with block,
    or by the garbage collector."""

    def __init__(self, handle: Handle, row: array[int], timeout: float):
        self._ours = bool(check(lib.kvd_lease(handle, *row.buffer_info(), ticks(timeout, 1000, 32))))
        self._end = when_forgotten(self, _end, handle, row) if self._ours else None

    def __bool__(self) -> bool:
        """Return whether this process has the right to compute the prefix."""
        return self._ours

    def end(self) -> None:
        """End the lease. Waiting processes then use the sealed prefix, or one of them computes it. Does nothing if
        already ended."""
        if self._end:
            self._end()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def __repr__(self) -> str:
        return f"<kvd.Lease, {'ours' if self._ours else 'finished by another process'}>"
