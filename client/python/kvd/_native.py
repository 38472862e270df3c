# SPDX-License-Identifier: Apache-2.0
"""libkvd's functions and structs, as ctypes sees them."""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_int64, c_uint8, c_uint32, c_uint64, c_void_p


class Error(OSError):
    """errno and libkvd's line about it."""


class GeometryStruct(Structure):
    _fields_ = [(name, c_uint32) for name in ("layers", "kv_heads", "head_dim", "block_tokens", "layer_groups",
                                              "dtype", "order", "rope", "state_width", "vocab")]
    _fields_ += [("fingerprint", c_uint64 * 2), ("block_bytes", c_uint64), ("layout", ctypes.c_char * 32)]


class OptionsStruct(Structure):
    _fields_ = [("kind", c_uint32), ("keys", c_uint32), ("policy", c_uint32), ("flags", c_uint32),
                ("max_blocks", c_uint64)]


class PinStruct(Structure):
    _fields_ = [("view", c_void_p), ("base", c_void_p), ("block_bytes", c_uint64), ("salt", c_uint64), ("leaf", c_uint32),
                ("generation", c_uint32), ("n_blocks", c_uint32), ("n_tokens", c_uint32), ("group", c_uint32),
                ("pad", c_uint32)]


class BlockStruct(Structure):
    _fields_ = [("data", c_void_p), ("view", c_void_p), ("id", c_uint32), ("generation", c_uint32)]


class PlaceStruct(Structure):
    _fields_ = [("memory", c_uint32), ("device", ctypes.c_int32), ("uuid", c_uint8 * 16), ("legacy", c_uint32),
                ("stream_order", c_uint32)]


PIN, BLOCKS, TOKENS = POINTER(PinStruct), POINTER(BlockStruct), POINTER(c_uint32)

_FUNCTIONS = {
    "kvd_version": (c_char_p, []),
    "kvd_error": (c_char_p, []),
    "kvd_open": (c_int, [c_char_p, POINTER(c_void_p)]),
    "kvd_close": (c_void_p, [c_void_p]),
    "kvd_block_bytes": (c_uint64, [POINTER(GeometryStruct)]),
    "kvd_space_open": (c_int, [c_void_p, c_char_p, POINTER(GeometryStruct), POINTER(OptionsStruct),
                               POINTER(c_void_p)]),
    "kvd_space_close": (c_void_p, [c_void_p]),
    "kvd_space_place": (c_int, [c_void_p, POINTER(PlaceStruct)]),
    "kvd_lookup": (c_int64, [c_void_p, c_uint32, TOKENS, c_uint32, TOKENS, c_uint32, PIN]),
    "kvd_match": (c_int64, [c_void_p, c_uint32, TOKENS, c_uint32]),
    "kvd_alloc": (c_int, [c_void_p, c_uint32, BLOCKS]),
    "kvd_seal_on": (c_int, [c_void_p, PIN, c_uint32, BLOCKS, TOKENS, c_uint32, c_void_p]),
    "kvd_seal": (c_int, [c_void_p, PIN, c_uint32, BLOCKS, TOKENS, c_uint32]),
    "kvd_unpin": (None, [c_void_p, PIN]),
    "kvd_unpin_on": (None, [c_void_p, PIN, c_void_p]),
    "kvd_free": (None, [c_void_p, c_uint32, BLOCKS]),
    "kvd_free_on": (None, [c_void_p, c_uint32, BLOCKS, c_void_p]),
    "kvd_wait_on": (c_int, [c_void_p, PIN, c_void_p]),
    "kvd_check_pin": (c_int, [c_void_p, PIN]),
    "kvd_settle": (c_int, [c_void_p]),
    "kvd_dlpack_block": (c_int, [c_void_p, PIN, c_uint32, POINTER(c_void_p)]),
    "kvd_dlpack_filling": (c_int, [c_void_p, BLOCKS, POINTER(c_void_p)]),
    "kvd_dlpack_layer": (c_int, [c_void_p, c_uint32, c_uint32, POINTER(c_void_p)]),
    "kvd_dlpack_release_on": (None, [c_void_p, c_void_p]),
    "kvd_dlpack_live": (c_uint32, [c_void_p]),
    "kvd_dlpack_capsule_free": (None, [c_void_p]),
}


def _load() -> ctypes.CDLL:
    library = ctypes.CDLL(os.environ.get("KVD_LIBRARY", "libkvd.so.0"))
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


lib = _load()


def check(result: int) -> int:
    """The result, if it is not an error. In the thread that made the call, before its next one."""
    if result < 0:
        raise Error(-result, lib.kvd_error().decode())
    return result


# Python's own functions are called with the interpreter's lock held. The name must live as long as any capsule.
_NAME = ctypes.create_string_buffer(b"dltensor")
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, c_void_p, c_void_p, c_void_p)(("PyCapsule_New", ctypes.pythonapi))
_FREE = ctypes.cast(lib.kvd_dlpack_capsule_free, c_void_p).value


def capsule(tensor: c_void_p) -> object:
    """Owns the tensor until somebody takes it out; frees it if nobody does, in C, whatever is left of Python then."""
    return _new_capsule(tensor, ctypes.addressof(_NAME), _FREE)


def tokens_of(tokens) -> tuple[ctypes.Array, int]:
    """As uint32s: of anything with a buffer of 32-bit integers, of what has tolist, or of a sequence of integers."""
    try:
        view = memoryview(tokens)
    except TypeError:
        view = None
    if view is not None and view.format in ("i", "I") and view.contiguous:
        n = view.nbytes // 4
        return (c_uint32 * n).from_buffer_copy(view.cast("B")), n
    values = tokens.tolist() if hasattr(tokens, "tolist") else list(tokens)
    if any(value < 0 or value >> 32 for value in values):
        raise ValueError("token ids are numbers of 32 bits")
    return (c_uint32 * len(values))(*values), len(values)


__all__ = ["BlockStruct", "Error", "GeometryStruct", "OptionsStruct", "PinStruct", "PlaceStruct", "byref", "capsule",
           "check", "lib", "tokens_of"]
