# SPDX-License-Identifier: Apache-2.0
"""libkvd_kernels for ctypes (kernels/kvd_kernels.h), and its view of tensors of any library."""

from __future__ import annotations

import ctypes
import functools
import importlib
import itertools
import os
import sys
from ctypes import (POINTER, Structure, c_bool, c_char_p, c_double, c_float, c_int, c_int64, c_size_t, c_uint8,
                    c_uint16, c_uint32, c_uint64, c_void_p)
from pathlib import Path
from typing import Any, Iterator, Sequence

np: Any = importlib.import_module("numpy")


class KeyRows(Structure):
    _fields_ = [("blocks", POINTER(c_void_p)), ("offset", c_size_t), ("head_stride", c_size_t),
                ("token_stride", c_size_t), ("per_block", c_uint32), ("heads", c_uint32), ("dim", c_uint32),
                ("type", c_int)]


class Bag(Structure):
    _fields_ = [("ids", c_void_p), ("counts", c_void_p), ("n", c_uint32), ("squares", c_double)]


class MemshareShape(Structure):
    _fields_ = [*((name, c_uint32) for name in ("layers", "heads", "tokens", "dim")), ("type", c_int)]


class MemshareBlock(Structure):
    _fields_ = [("data", c_void_p), ("norms", c_void_p)]


class MemshareQuery(Structure):
    _fields_ = [("shape", POINTER(MemshareShape)), ("metric", c_int), ("limit", c_double), ("cosine", c_void_p),
                ("sine", c_void_p), ("half", c_uint32)]


class SketchHash(Structure):
    _fields_ = [("family", c_int), ("rows", c_uint32), ("columns", c_uint32), ("salt", c_uint64)]


class SketchPart(Structure):
    _fields_ = [("cells", c_void_p), ("stride", c_size_t), ("rows", c_uint32), ("columns", c_uint32),
                ("dim", c_uint32), ("sign", c_uint32), ("mean", c_void_p)]


class SketchVectors(Structure):
    _fields_ = [("blocks", POINTER(c_void_p)), ("offset", c_size_t), ("stride", c_size_t), ("per_block", c_uint32),
                ("type", c_int)]


class LabelQuery(Structure):
    _fields_ = [("low", c_uint8 * 128), ("high", c_uint8 * 128), ("least", c_float), ("step", c_float),
                ("sum", c_uint32)]


class Window(Structure):
    _fields_ = [("sinks", c_uint32), ("recent", c_uint32), ("middle", c_uint32)]


class Products(Structure):
    _fields_ = [("ab", c_double), ("aa", c_double), ("bb", c_double)]


BTABLE_STEPS = 101


class BProfile(Structure):
    _fields_ = [("n_layers", c_uint32), ("ratio", c_int), ("tau", c_float), ("requests", c_uint32 * BTABLE_STEPS),
                ("sum_b", c_uint64 * BTABLE_STEPS), ("sum", c_void_p)]


class BStep(Structure):
    _fields_ = [("percent", c_uint8), ("b", c_uint16)]


class BTable(Structure):
    _fields_ = [("ratio", c_int), ("n", c_uint32), ("steps", BStep * BTABLE_STEPS)]


class Attention(Structure):
    _fields_ = [("ops", c_void_p), ("blocks", POINTER(c_void_p)), ("k_offset", c_size_t), ("v_offset", c_size_t),
                ("stride", c_size_t), ("type", c_int), ("block_tokens", c_uint32), ("dim", c_uint32),
                ("first", c_uint32), ("window", c_uint32), ("n_keys", c_uint32), ("chosen", c_void_p),
                ("n_chosen", c_uint32), ("n", c_uint32), ("group", c_uint32), ("scale", c_float), ("cap", c_float),
                ("sinks", c_void_p), ("q", c_void_p), ("ldq", c_size_t), ("out", c_void_p), ("ldo", c_size_t),
                ("weight", c_void_p), ("exact_k", c_void_p), ("exact_v", c_void_p), ("exact_ld", c_size_t),
                ("exact_first", c_uint32), ("exact_span", c_uint32), ("rotation", c_void_p), ("rotations", c_void_p),
                ("block_mass", c_void_p), ("token_mass", c_void_p), ("scratch", c_void_p)]


class CudaKeys(Structure):
    _fields_ = [("device", c_int), ("stream", c_void_p), ("keys", c_uint64), ("head_stride", c_uint64),
                ("token_stride", c_uint64), *((name, c_uint32) for name in ("heads", "tokens", "dim", "type")),
                ("scratch", c_uint64)]


CUDA_WHY = 200

# ---- the library -----------------------------------------------------------------------------------------------------

SONAME = "libkvd_kernels.so.0"


def _load() -> ctypes.CDLL:
    """Load $KVD_KERNELS_LIBRARY, or the library inside this package, or the system's."""
    inside = Path(__file__).with_name(SONAME)
    name = os.environ.get("KVD_KERNELS_LIBRARY") or (str(inside) if inside.exists() else SONAME)
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise ImportError(f"kvd.ops needs libkvd_kernels, and cannot load it ({error}): install a wheel that contains "
                          "it (pip install client/python), or kvd itself (meson install), or set KVD_KERNELS_LIBRARY "
                          f"to the path of {SONAME}", name="kvd.ops") from None


lib = _load()

_P, _U, _Z = c_void_p, c_uint32, c_size_t

_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "kvd_ops_pick": (c_void_p, (c_char_p,)),
    "kvd_ops_list": (POINTER(c_void_p), ()),
    "kvd_cuda_keydiff_scratch": (_Z, (_P,)),
    "kvd_cuda_keydiff_anchor": (c_int, (_P, c_uint64, c_uint64, c_char_p)),
    "kvd_cuda_keydiff_score": (c_int, (_P, c_uint64, c_uint64, c_char_p)),
    "kvd_attend": (None, (_P,)),
    "kvd_attend_scratch": (_Z, (_P,)),
    "kvd_row_bytes": (_Z, (c_int, _U)),
    "kvd_rotations": (_U, (_P, _U, _P, _U, _P, _P, _U)),
    "kvd_bag_make": (None, (_P, _P, _U, _P, _P)),
    "kvd_bag_cosine": (c_double, (_P, _P)),
    "kvd_memshare_angles": (None, (_P, _U, c_int64, _P, _P)),
    "kvd_sketch_place": (None, (_P, _P, _U, _P)),
    "kvd_label_channels": (None, (_P, _U, _U, _P)),
    "kvd_window_middle": (_U, (_P, _U, _P)),
    "kvd_window_positions": (_U, (_P, _P, _U, _U, _U, _P)),
    "kvd_share_similarity": (c_double, (_P, _P, _P, _U)),
    "kvd_share_count": (_U, (c_double, _U)),
    "kvd_share_plan": (None, (_P, _U, _U, c_int, _P, _P)),
    "kvd_share_check": (_U, (_P, _U)),
    "kvd_similarity_flat": (c_double, (_P, _P, _U)),
    "kvd_similarity_token_mean": (c_double, (_P, _P, _U)),
    "kvd_ratio_percent": (_U, (c_uint64, c_uint64)),
    "kvd_refresh_due": (c_bool, (_U, _U)),
    "kvd_bprofile_add": (c_int, (_P, _U, _P)),
    "kvd_btable_build": (None, (_P, c_int, _P)),
    "kvd_btable_lookup": (c_int, (_P, c_int, _U)),
}

for _name, (_result, _arguments) in _FUNCTIONS.items():
    _function = getattr(lib, _name)
    _function.restype, _function.argtypes = _result, _arguments

# Members of the tables, in order. struct kvd_ops begins with two other members: name and works.
_TABLES: dict[str, dict[str, tuple[Any, tuple[Any, ...]]]] = {
    "attend": {},
    "block": {"topk": (_U, (_P, _P, _U, _U, c_bool, _P))},
    "keydiff": {"anchor": (None, (_P, _P, _P, _U, _U, _P)), "score": (None, (_P, _Z, _P, _U, _U, _P, _P)),
                "priority": (None, (_P, _P, _Z)), "blocks": (None, (_P, _P, _P, _Z, _U, _U, _U))},
    "memshare": {"distance": (c_double, (_P, _P, _P)), "norms": (None, (_P, _P, _P))},
    "sketch": {"insert": (None, (_P, _P, _U, _P, c_float)), "query": (None, (_P, _P, _U, _P, c_float))},
    "hshare": {"label": (None, (_P, _P, _Z, c_int, _U, _U, _P, _U)), "query": (None, (_P, _P, _P, _U)),
               "scores": (None, (_P, _Z, _P, _Z, _U, _U, _P, _U, _U, _U)),
               "aggregate": (None, (_P, _P, _Z, _U, _U, c_float, c_int)), "top": (_U, (_P, _P, _U, _U, _U, _P)),
               "overlap": (None, (_P, _P, _P, _U, _U)), "weigh": (None, (_P, _P, _Z, _U, _P, _Z, c_int, _U, _U))},
    "bicache": {"products": (None, (_P, _P, _Z, _P, _Z, c_int, _U, _U))},
}


_ROWS = 2 + len(_TABLES) + 11   # of struct kvd_ops: the members before those that read and write rows


class Ops:
    """Function tables of one variant: ops.keydiff["anchor"](...)."""

    def __init__(self, address: int):
        self.address = address
        tables = (c_void_p * (_ROWS + 4)).from_address(address)[2:]
        self.write_row, self.read_row, self.write_key, self.read_key = (
            ctypes.CFUNCTYPE(None, _P, _P, _U, c_int)(it or 0) for it in tables[_ROWS - 2:])
        for (name, members), at in zip(_TABLES.items(), tables):
            pointers = (c_void_p * len(members)).from_address(at or 0)
            setattr(self, name, {member: ctypes.CFUNCTYPE(result, *arguments)(pointer)
                                 for (member, (result, arguments)), pointer in zip(members.items(), pointers)})

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


@functools.cache
def pick(variant: str | None) -> Ops:
    at = lib.kvd_ops_pick(variant.encode() if variant else None)
    if not at:
        raise ValueError(f"this processor does not run {variant}")
    return Ops(at)


def variants() -> list[str]:
    names = (c_char_p.from_address(table).value for table in itertools.takewhile(bool, lib.kvd_ops_list()))
    return [name.decode() for name in names if name and lib.kvd_ops_pick(name)]


# ---- tensors ---------------------------------------------------------------------------------------------------------

NUMBERS = {"float32": 1, "float16": 2, "bfloat16": 3, "q8": 5, "q4": 6, "e4m3": 7, "e5m2": 8}      # enum kvd_number
CODED = "q8", "q4", "e4m3", "e5m2"                      # those whose rows appear as bytes
CPU = 1                                                 # DLPack's device type
_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat"}
_BYTES = {10: "e4m3", 12: "e5m2"}


class _DLTensor(Structure):
    _fields_ = [("data", c_void_p), ("device", c_int), ("ordinal", c_int), ("ndim", c_int), ("code", c_uint8),
                ("bits", c_uint8), ("lanes", c_uint16), ("shape", POINTER(c_int64)), ("strides", POINTER(c_int64)),
                ("offset", c_uint64)]


_pointer_of = ctypes.PYFUNCTYPE(c_void_p, ctypes.py_object, c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))


class Quantised:
    """Rows of quantised numbers, as blocks of dtype q8 and q4 hold them: of keys, transformed ones (libkvd(3)). Also rows
    of e4m3 and e5m2, numbers of 8 bits.

    rows: uint8 [..., bytes of a row], any tensor that kvd.ops takes. dtype: "q8", "q4", "e4m3" or "e5m2". dim: numbers of
    a row.
    """

    def __init__(self, rows: Any, dtype: str, dim: int):
        if dtype not in CODED:
            raise ValueError(f"dtype must be one of {', '.join(CODED)}, not {dtype!r}")
        if dim <= 0 or dim % 2 and dtype in ("q8", "q4"):
            raise ValueError(f"a quantised row has an even number of numbers, not {dim}")
        self.rows, self.dtype, self.dim = rows, dtype, dim

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the numbers."""
        return (*self.rows.shape[:-1], self.dim)


class Tensor:
    """Pointer, shape, strides (in elements, of size bytes each), dtype name and device of a tensor. Keeps its memory
    alive. The elements of quantised rows are bytes."""

    dtype: str
    shape: tuple[int, ...]

    def __init__(self, name: str, x: Any):
        self.name, self.source = name, x
        try:
            self._from(x.rows if isinstance(x, Quantised) else x)
        except (BufferError, KeyError) as error:
            raise TypeError(f"{name}: {error}") from None
        self._elements = self.shape
        if isinstance(x, Quantised):
            self._quantise(x)

    def _from(self, x: Any) -> None:
        if hasattr(x, "__array_interface__"):
            self._from_array(x.__array_interface__)
        elif hasattr(x, "__dlpack__"):
            self._from_capsule(x.__dlpack__(stream=-1) if on_gpu(x) else x.__dlpack__())
        else:
            self._from_array(self._keep(np.asarray(x)).__array_interface__)

    def _quantise(self, x: Quantised) -> None:
        row = lib.kvd_row_bytes(NUMBERS[x.dtype], x.dim)
        if self.dtype != "uint8" or self.shape[-1:] != (row,):
            raise ValueError(f"{self.name} must have rows of {row} bytes (uint8), {x.dim} numbers of {x.dtype}")
        self.dtype, self.shape = x.dtype, x.shape

    def _keep(self, x: Any) -> Any:
        self.source = x
        return x

    def _from_array(self, it: dict[str, Any]) -> None:
        """numpy has no bfloat16: that of ml_dtypes appears as a void of two bytes, as does a view of type "V2"."""
        kind, size = it["typestr"][1], int(it["typestr"][2:])
        self.size = size
        if size == 1 and kind not in "biu":     # of ml_dtypes, which names none of them there
            raise TypeError(f"{self.name}: pass numbers of 8 bits as kvd.ops.Quantised(x.view('uint8'), 'e4m3', dim)")
        if it["typestr"][0] == (">" if sys.byteorder == "little" else "<"):
            raise TypeError(f"{self.name} has the wrong byte order")
        self.dtype = "bfloat16" if (kind, size) == ("V", 2) else np.dtype(it["typestr"]).name
        self.shape, self.pointer, self.device = tuple(it["shape"]), it["data"][0], (CPU, 0)
        strides = it.get("strides")
        if any(s % size for s in strides or ()) or self.pointer % size:     # unaligned: a record field, sliced bytes
            return self._from_array(self._keep(np.array(self.source)).__array_interface__)
        self.strides = tuple(s // size for s in strides) if strides else _dense(self.shape)

    def _from_capsule(self, capsule: Any) -> None:
        self.capsule = capsule
        it = _DLTensor.from_address(_pointer_of(capsule, b"dltensor") or 0)
        if it.lanes != 1:
            raise BufferError(f"elements of {it.lanes} numbers are not supported")
        if it.code not in _BYTES and it.code not in _KINDS:
            raise BufferError(f"numbers of DLPack's kind {it.code} are not supported")
        self.dtype = _BYTES.get(it.code) or f"{_KINDS[it.code]}{it.bits}"
        self.device = it.device, it.ordinal
        self.size = it.bits // 8
        self.shape = tuple(it.shape[:it.ndim])
        self.strides = tuple(it.strides[:it.ndim]) if it.strides else _dense(self.shape)
        self.pointer = (it.data or 0) + it.offset

    @property
    def number(self) -> int:
        return NUMBERS[self.dtype]

    @property
    def rows_are_dense(self) -> bool:
        return not self.shape or self._elements[-1] <= 1 or self.strides[-1] == 1

    @property
    def is_dense(self) -> bool:
        return all(n <= 1 or a == b for n, a, b in zip(self._elements, self.strides, _dense(self._elements))) or \
            0 in self.shape

    @property
    def row(self) -> int:
        """Bytes of a row."""
        return int(lib.kvd_row_bytes(self.number, self.shape[-1]))

    def step(self, axis: int) -> int:
        """Return the bytes from one to the next along an axis."""
        return self.strides[axis] * self.size


def _dense(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for i in range(len(shape) - 1, 0, -1):
        strides[i - 1] = strides[i] * shape[i]
    return tuple(strides)


def copied(x: Any) -> Any:
    if isinstance(x, Quantised):
        return Quantised(copied(x.rows), x.dtype, x.dim)
    return x.contiguous() if hasattr(x, "contiguous") else np.ascontiguousarray(x)


def take(name: str, x: Any, axes: str, dtypes: Sequence[str], *, strided: bool = False, cuda: bool = False) -> Tensor:
    """Check x and prepare it for a kernel; axes are names. Copies tensors that are not dense (with strided: whose rows
    are not dense)."""
    t = Tensor(name, x)
    if len(t.shape) != len(axes.split()):
        raise ValueError(f"{name} must be [{', '.join(axes.split())}], not of shape {list(t.shape)}")
    if t.dtype not in dtypes:
        raise TypeError(f"{name} must be of {', '.join(dtypes)}, not {t.dtype}")
    if t.device[0] != CPU and not (cuda and on_gpu(x)):
        raise TypeError(f"{name} is in device memory, but this operation runs on the CPU: copy it to host memory")
    if max(t.shape, default=0) >= 1 << 31:
        raise ValueError(f"{name} has a dimension of 2^31 or more")
    return t if (t.rows_are_dense and min(t.strides, default=1) >= 0 if strided else t.is_dense) else \
        Tensor(name, copied(t.source))


def alike(*tensors: Tensor, shape: bool = True) -> None:
    first = tensors[0]
    for t in tensors[1:]:
        if t.dtype != first.dtype or t.device != first.device:
            raise TypeError(f"{first.name} and {t.name} differ in dtype or device")
        if shape and t.shape != first.shape:
            raise ValueError(f"{first.name} and {t.name} differ in shape: {list(first.shape)} and {list(t.shape)}")


def _is_torch(x: Any) -> bool:
    return type(x).__module__.partition(".")[0] == "torch"


def on_gpu(x: Any) -> bool:
    """Return whether x is a PyTorch tensor on a GPU. Its kernels run in the stream that kvd launches in, so there is no
    need to wait."""
    return _is_torch(x) and bool(x.is_cuda)


def given(array: Any, like: Any) -> Any:
    """Return a result as the caller's kind of tensor: PyTorch's, or else numpy's."""
    if _is_torch(like.rows if isinstance(like, Quantised) else like):
        return importlib.import_module("torch").from_numpy(array)
    return array


def at(array: Any) -> int:
    """Return the address of a numpy array."""
    return int(array.ctypes.data)


def pointers(addresses: Iterator[int | None] | Sequence[int | None]) -> Any:
    them = list(addresses)
    return (c_void_p * max(len(them), 1))(*them)
