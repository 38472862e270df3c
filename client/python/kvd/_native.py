# SPDX-License-Identifier: Apache-2.0
"""libkvd's functions and structs, as ctypes sees them (kvd.h, kvd_cuda.h, kvd_methods.h)."""

from __future__ import annotations

import ctypes
import errno
import operator
import os
from ctypes import (CFUNCTYPE, POINTER, Structure, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_uint8, c_uint16,
                    c_uint32, c_uint64, c_void_p)
from pathlib import Path
from typing import Any, SupportsIndex

from ._errors import Error


class GeometryStruct(Structure):
    _fields_ = [*((name, c_uint32) for name in ("layers", "kv_heads", "head_dim", "block_tokens", "layer_groups",
                                                "dtype", "order", "rope", "state_width", "vocab")),
                ("fingerprint", c_uint64 * 2), ("block_bytes", c_uint64), ("layout", ctypes.c_char * 32)]


class OptionsStruct(Structure):
    _fields_ = [("kind", c_uint32), ("keys", c_uint32), ("policy", c_uint32), ("flags", c_uint32),
                ("max_blocks", c_uint64), ("shard", c_uint32), ("reserved", c_uint32)]


class PinStruct(Structure):
    _fields_ = [("view", c_void_p), ("base", c_void_p), ("block_bytes", c_uint64),
                ("salt", c_uint64),
                *((name, c_uint32) for name in ("leaf", "generation", "n_blocks", "n_tokens", "group", "n_below",
                                              "n_posted", "posted", "posted_generation"))]


class TableStruct(Structure):
    _fields_ = [("view", c_void_p), ("blocks", c_void_p), ("n_blocks", c_uint32), ("first", c_uint32), ("n", c_uint32)]


class ExactStruct(Structure):
    _fields_ = [("k", c_void_p), ("v", c_void_p), ("ld", ctypes.c_size_t), ("n", c_uint32), ("span", c_uint32)]


class HeadsStruct(Structure):
    _fields_ = [("heads", c_uint32), ("window", c_uint32), ("scale", c_float), ("cap", c_float), ("sinks", c_void_p),
                ("exact", POINTER(ExactStruct))]


class SeenStruct(Structure):
    _fields_ = [(name, c_void_p) for name in ("sequence", "frequencies", "chosen", "n_chosen", "mass")]


class ReaderOptionsStruct(Structure):
    _fields_ = [("heads", c_uint32), ("scale", c_float), ("frequencies", c_void_p), ("timeout_ns", c_uint64)]


class ReaderStatsStruct(Structure):
    _fields_ = [(name, c_uint64) for name in ("selections", "misses", "late", "most_resident", "select_ns", "fetch_ns")]


class BatchOptionsStruct(Structure):
    _fields_ = [("heads", c_uint32), ("dtype", c_uint32), ("scale", c_float), ("frequencies", c_void_p)]


class RequestStruct(Structure):
    _fields_ = [("table", TableStruct), ("sequence", c_void_p), ("reader", c_void_p), ("mass", c_void_p)]


class BlockStruct(Structure):
    _fields_ = [("data", c_void_p), ("view", c_void_p), ("id", c_uint32), ("generation", c_uint32)]


class ScoresStruct(Structure):
    _fields_ = [("blocks", POINTER(BlockStruct)), ("n_blocks", c_uint32)]


class PlaceStruct(Structure):
    _fields_ = [("memory", c_uint32), ("device", c_int32), ("uuid", c_uint8 * 16), ("legacy", c_uint32),
                ("stream_order", c_uint32), ("shard", c_uint32), ("shards", c_uint32), ("cache", c_uint64)]


class MemoryStruct(Structure):
    _fields_ = [("base", c_void_p), ("sealed", c_void_p), ("block_bytes", c_uint64), ("blocks", c_uint32),
                ("mapped", c_uint32), ("view", c_void_p)]


class CountersStruct(Structure):
    _fields_ = [(name, c_uint64) for name in ("lookups", "lookup_hits", "tokens_asked", "tokens_found",
                                              "blocks_allocated", "blocks_sealed", "blocks_duplicate", "refused",
                                              "retries", "reconnects")]


class EntryStruct(Structure):
    _fields_ = [("data", c_void_p), *((name, c_uint32) for name in ("block", "generation", "position", "n_tokens")),
                ("delta", c_int32), ("flags", c_uint32), ("row", c_uint32), ("row_generation", c_uint32)]


class StatsStruct(Structure):
    _fields_ = [(name, c_uint64) for name in ("blocks", "resident", "own", "borrowed", "shared", "shared_tokens",
                                              "tokens", "bytes_saved", "spilled", "vague", "approximate", "dropped",
                                              "revived_exact", "revived_approx", "compacted", "resident_bytes",
                                              "label_bytes", "copy_bytes", "sketch_bytes")]


class LabelShapeStruct(Structure):
    _fields_ = [(name, c_uint32) for name in ("channels", "label_bytes", "layer_stride", "head_stride")]
    _fields_ += [("channel", POINTER(c_uint16))]


class StoredStruct(Structure):
    _fields_ = [*((name, c_uint64) for name in ("hash", "parent", "salt")),
                *((name, c_uint32) for name in ("depth", "group", "n_tokens")), ("tokens", POINTER(c_uint32))]


class FollowStruct(Structure):
    STORED, REMOVED, CLEARED, AWAY = (CFUNCTYPE(None, c_void_p, *it) for it in (
        (POINTER(StoredStruct),), (c_uint64,), (), (c_int,)))
    _fields_ = [("stored", STORED), ("removed", REMOVED), ("cleared", CLEARED), ("away", AWAY)]


# ---- the library -----------------------------------------------------------------------------------------------------

SONAME = "libkvd.so.0"


def _load() -> tuple[ctypes.CDLL, str]:
    """Load $KVD_LIBRARY, or the library inside this package, or the system's."""
    inside = Path(__file__).with_name(SONAME)
    name = os.environ.get("KVD_LIBRARY") or (str(inside) if inside.exists() else SONAME)
    try:
        return ctypes.CDLL(name), name
    except OSError as error:
        raise ImportError(f"kvd needs its library, and cannot load it ({error}): install a wheel that contains it "
                          "(pip install client/python), or kvd itself (meson install), or set KVD_LIBRARY to the path "
                          f"of {SONAME}", name="kvd") from error


lib, path = _load()

_HANDLE, _RET, _PIN, _BLOCKS, _ADDRESS = c_void_p, POINTER(c_void_p), POINTER(PinStruct), POINTER(BlockStruct), c_void_p
_TOKENS = (_ADDRESS, c_uint32)

_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "kvd_version": (c_char_p, ()),
    "kvd_error": (c_char_p, ()),
    "kvd_open_expecting": (c_int, (c_char_p, c_char_p, _RET)),
    "kvd_close": (c_void_p, (_HANDLE,)),
    "kvd_join": (c_int, (_HANDLE, c_char_p)),
    "kvd_block_bytes": (c_uint64, (POINTER(GeometryStruct),)),
    "kvd_space_open": (c_int, (_HANDLE, c_char_p, POINTER(GeometryStruct), POINTER(OptionsStruct), _RET)),
    "kvd_space_close": (c_void_p, (_HANDLE,)),
    "kvd_space_place": (c_int, (_HANDLE, POINTER(PlaceStruct))),
    "kvd_catch_up": (c_int, (_HANDLE,)),
    "kvd_space_memory": (c_int, (_HANDLE, POINTER(MemoryStruct))),
    "kvd_space_setting": (c_int, (_HANDLE, c_char_p, POINTER(c_double))),
    "kvd_space_set": (c_int, (_HANDLE, c_char_p, c_double)),
    "kvd_counters": (None, (_HANDLE, POINTER(CountersStruct))),
    "kvd_fingerprint": (None, (_ADDRESS, _ADDRESS, ctypes.c_size_t)),
    "kvd_copy": (None, (_ADDRESS, _ADDRESS, ctypes.c_size_t)),

    "kvd_lookup": (c_int64, (_HANDLE, c_uint32, *_TOKENS, _ADDRESS, c_uint32, _PIN)),
    "kvd_fetch": (c_int64, (_HANDLE, c_uint32, c_uint64, *_TOKENS, POINTER(c_int))),
    "kvd_fetch_key": (c_int64, (_HANDLE, c_uint64, _ADDRESS, c_uint32, POINTER(c_int))),
    "kvd_lookup_keys": (c_int64, (_HANDLE, _ADDRESS, c_uint32, c_uint32, _ADDRESS, _PIN)),
    "kvd_match_salted": (c_int64, (_HANDLE, c_uint32, c_uint64, *_TOKENS)),
    "kvd_unpin": (None, (_HANDLE, _PIN)),
    "kvd_unpin_on": (c_int, (_HANDLE, _PIN, c_void_p)),
    "kvd_wait_on": (c_int, (_HANDLE, _PIN, c_void_p)),
    "kvd_check_pin": (c_int, (_HANDLE, _PIN)),
    "kvd_alloc": (c_int, (_HANDLE, c_uint32, _BLOCKS)),
    "kvd_reserve": (c_int, (_HANDLE, c_uint32)),
    "kvd_available": (c_int64, (_HANDLE,)),
    "kvd_free": (None, (_HANDLE, c_uint32, _BLOCKS)),
    "kvd_free_on": (c_int, (_HANDLE, c_uint32, _BLOCKS, c_void_p)),
    "kvd_seal": (c_int, (_HANDLE, _PIN, c_uint32, _BLOCKS, *_TOKENS)),
    "kvd_seal_on": (c_int, (_HANDLE, _PIN, c_uint32, _BLOCKS, *_TOKENS, c_void_p)),
    "kvd_post": (c_int, (_HANDLE, _PIN, c_uint32, _BLOCKS, *_TOKENS)),
    "kvd_flush": (c_int, (_HANDLE,)),
    "kvd_seal_keep": (c_int, (_HANDLE, _PIN, c_uint32, _BLOCKS, *_TOKENS, _ADDRESS)),
    "kvd_seal_keep_on": (c_int, (_HANDLE, _PIN, c_uint32, _BLOCKS, *_TOKENS, _ADDRESS, c_void_p)),
    "kvd_write_on": (c_int, (_HANDLE, c_void_p, _ADDRESS)),
    "kvd_seal_written": (c_int, (_HANDLE, _PIN, c_uint32, _BLOCKS, *_TOKENS, _ADDRESS, _ADDRESS, c_uint32)),
    "kvd_post_key": (c_int, (_HANDLE, c_uint64, _ADDRESS, c_uint32, _BLOCKS)),
    "kvd_seal_key": (c_int, (_HANDLE, _ADDRESS, c_uint32, _BLOCKS, _PIN)),
    "kvd_settle": (c_int, (_HANDLE,)),
    "kvd_lease": (c_int, (_HANDLE, *_TOKENS, c_uint32)),
    "kvd_lease_end": (c_int, (_HANDLE, *_TOKENS)),
    "kvd_session": (c_int, (_HANDLE, c_char_p, c_uint32, c_uint32, POINTER(PinStruct), c_uint32)),
    "kvd_session_end": (c_int, (_HANDLE, c_char_p)),
    "kvd_follow_begin": (c_int, (_HANDLE, POINTER(FollowStruct), c_void_p, _RET)),
    "kvd_follow_step": (c_int, (_HANDLE,)),
    "kvd_follow_end": (c_void_p, (_HANDLE,)),

    "kvd_dlpack_block": (c_int, (_HANDLE, _PIN, c_uint32, _RET)),
    "kvd_dlpack_filling": (c_int, (_HANDLE, _BLOCKS, _RET)),
    "kvd_dlpack_layer": (c_int, (_HANDLE, c_uint32, c_uint32, _RET)),
    "kvd_dlpack_memory": (c_int, (_HANDLE, _RET)),
    "kvd_dlpack_versioned": (c_int, (c_void_p, _RET)),
    "kvd_dlpack_release_on": (None, (c_void_p, c_void_p)),
    "kvd_dlpack_live": (c_uint32, (_HANDLE,)),
    "kvd_dlpack_capsule_free": (None, (c_void_p,)),

    "kvd_sequence_open": (c_int, (_HANDLE, c_uint32, _RET)),
    "kvd_sequence_close": (c_void_p, (_HANDLE,)),
    "kvd_sequence_entries": (POINTER(EntryStruct), (_HANDLE, POINTER(c_uint32))),
    "kvd_sequence_borrow": (c_int, (_HANDLE, _PIN, c_uint32, _ADDRESS, _ADDRESS)),
    "kvd_sequence_append": (c_int, (_HANDLE, c_uint32, _BLOCKS, *_TOKENS)),
    "kvd_sequence_step": (c_int, (_HANDLE, c_uint32, c_uint32)),
    "kvd_sequence_sync": (c_int, (_HANDLE,)),
    "kvd_sequence_compact": (c_int, (_HANDLE, c_uint32, c_uint32, c_uint32, POINTER(ScoresStruct))),
    "kvd_sequence_wait": (c_int, (_HANDLE, c_uint64)),
    "kvd_sequence_cool": (c_int, (_HANDLE, c_uint32, _ADDRESS, c_int)),
    "kvd_sequence_revive": (c_int, (_HANDLE, c_uint32, _ADDRESS, c_int)),
    "kvd_sequence_use": (None, (_HANDLE, c_uint32, c_float, c_float)),
    "kvd_sequence_stats": (None, (_HANDLE, POINTER(StatsStruct))),
    "kvd_sequence_labels": (c_void_p, (_HANDLE, c_uint32, POINTER(LabelShapeStruct))),
    "kvd_sequence_critical": (c_int, (_HANDLE, c_uint32, _BLOCKS, c_uint32, c_uint32, c_uint32)),
    "kvd_sequence_sharing": (c_int, (_HANDLE, _ADDRESS, _ADDRESS)),
    "kvd_prefix_depth": (c_int, (_HANDLE, c_uint32, c_uint32, c_uint32)),
    "kvd_prefix_refresh": (c_int, (_HANDLE, c_uint32)),
    "kvd_prefix_sample": (c_int, (_HANDLE, c_uint32, c_uint32, _BLOCKS, c_uint32)),

    "kvd_paged_write": (c_int, (_HANDLE, c_uint32, _ADDRESS, _ADDRESS, _ADDRESS, ctypes.c_size_t)),
    "kvd_paged_attention": (c_int, (_HANDLE, c_uint32, _ADDRESS, POINTER(HeadsStruct), _ADDRESS, ctypes.c_size_t, _ADDRESS,
                                    ctypes.c_size_t)),
    "kvd_sequence_attention": (c_int, (POINTER(SeenStruct), c_uint32, _ADDRESS, POINTER(HeadsStruct), _ADDRESS,
                                       ctypes.c_size_t, _ADDRESS, ctypes.c_size_t)),
    "kvd_reader_new": (c_int, (_HANDLE, POINTER(ReaderOptionsStruct), _RET)),
    "kvd_reader_free": (c_void_p, (_HANDLE,)),
    "kvd_reader_begin": (None, (_HANDLE, c_uint32, c_uint32)),
    "kvd_reader_attention": (c_int, (_HANDLE, c_uint32, _ADDRESS, POINTER(HeadsStruct), _ADDRESS, ctypes.c_size_t, _ADDRESS,
                                     ctypes.c_size_t)),
    "kvd_reader_look": (c_int, (_HANDLE, c_uint32, _ADDRESS, ctypes.c_size_t)),
    "kvd_reader_end": (c_int, (_HANDLE,)),
    "kvd_reader_decode": (c_int, (_HANDLE, c_uint32)),
    "kvd_reader_select": (c_int, (_HANDLE, c_uint32, c_int, _ADDRESS, c_uint32, _ADDRESS, _ADDRESS)),
    "kvd_batch_new": (c_int, (_HANDLE, POINTER(BatchOptionsStruct), _RET)),
    "kvd_batch_free": (c_void_p, (_HANDLE,)),
    "kvd_batch_begin": (c_int, (_HANDLE, c_uint32, POINTER(RequestStruct), c_void_p)),
    "kvd_batch_attention": (c_int, (_HANDLE, c_uint32, _ADDRESS, ctypes.c_size_t, _ADDRESS, ctypes.c_size_t, c_void_p)),
    "kvd_batch_end": (c_int, (_HANDLE, c_void_p)),
    "kvd_reader_stats": (None, (_HANDLE, POINTER(ReaderStatsStruct))),
}


def _declare() -> None:
    for name, (result, arguments) in _FUNCTIONS.items():
        try:
            function = getattr(lib, name)
        except AttributeError:
            words = f"{path} has no {name}: it is older than this package, kvd {VERSION}"
            raise ImportError(words, name="kvd") from None
        function.restype, function.argtypes = result, arguments


VERSION = "0.1.0"
_declare()


def error(result: int) -> Error:
    """Return the exception for a negative result. Call it in the same thread, before the next call of libkvd."""
    return Error(-result, lib.kvd_error().decode(errors="replace"))


def check(result: int) -> int:
    """Return the result, or raise its error."""
    if result < 0:
        raise error(result)
    return result


def number(field: str, value: SupportsIndex, bits: int = 32) -> int:
    """Return the value as an int of that many bits, or raise ValueError; ctypes would truncate it silently."""
    it = operator.index(value)
    if not 0 <= it < 1 << bits:
        raise ValueError(f"{field} must be a number from 0 to {(1 << bits) - 1}, not {it}")
    return it


def ticks(seconds: float, each: int, bits: int) -> int:
    """Convert a time limit to units of which each second has `each`, at most the largest number of `bits` bits."""
    return round(min(max(0.0, seconds * each), (1 << bits) - 1))


def c_string(field: str, value: str | bytes) -> bytes:
    """Encode a string for C. Raises ValueError if it contains a NUL."""
    it = value.encode() if isinstance(value, str) else value
    if 0 in it:
        raise ValueError(f"{field} contains a NUL: {value!r}")
    return it


def closed(what: str) -> Error:
    return Error(errno.EBADF, f"{what} is closed")
