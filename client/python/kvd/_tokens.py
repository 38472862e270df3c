# SPDX-License-Identifier: Apache-2.0
"""Token ids as libkvd takes them, of whatever holds integers. No loop in Python: 2,048 ids take microseconds."""

from __future__ import annotations

import ctypes
import sys
from array import array
from itertools import islice
from typing import Any, Iterable, SupportsIndex, Union

Tokens = Union[Iterable[SupportsIndex], Any]
"""Integers from 0 to 2**32 - 1 in one row: a list, an array of numpy, torch or array.array, whatever has a buffer."""

MOST = 1 << 28
"""Tokens in one row."""

_SIGNED, _UNSIGNED = "bhilqn", "BHILQN"
_FORMATS = {"torch.int64": "q", "torch.int32": "i", "torch.int16": "h", "torch.int8": "b", "torch.uint8": "B",
            "torch.uint16": "H", "torch.uint32": "I", "torch.uint64": "Q"}


def words(tokens: Tokens) -> array[int]:
    """A copy, as 32-bit words. TypeError: no integers; ValueError: not one row, or an id that is no token's."""
    if isinstance(tokens, (str, bytes, bytearray)):
        raise TypeError(f"token ids are integers, not {type(tokens).__name__}")
    _check_length(tokens)
    try:
        view = memoryview(tokens)       # type: ignore[arg-type]
    except TypeError:
        return _words_of_objects(tokens)
    return _words_of_view(view)


def _words_of_view(view: memoryview) -> array[int]:
    kind = view.format.lstrip("@=<")
    _check_row(view.ndim)
    if len(kind) != 1 or kind not in _SIGNED + _UNSIGNED:
        raise TypeError(f"token ids are integers, not an array of format {view.format!r}")
    return _words_of_bytes(view.tobytes(), kind, view.itemsize)


def _words_of_objects(tokens: Any) -> array[int]:
    if hasattr(tokens, "data_ptr"):
        return _words_of_tensor(tokens)
    if hasattr(tokens, "__array__"):
        return _words_of_view(memoryview(tokens.__array__()))
    try:
        row = array("I", tokens if hasattr(tokens, "__len__") else islice(tokens, MOST + 1))
        _check_length(row)
        return row
    except OverflowError:
        raise _beyond(tokens) from None
    except TypeError as error:
        raise TypeError(f"token ids are one row of integers: {error}") from None


def _words_of_tensor(tensor: Any) -> array[int]:
    """Of torch, which has no buffer, and may be there without numpy."""
    kind = _FORMATS.get(str(tensor.dtype))
    _check_row(tensor.dim())
    if kind is None:
        raise TypeError(f"token ids are integers, not {tensor.dtype}")
    tensor = tensor.detach().cpu().contiguous()
    size = tensor.element_size()
    return _words_of_bytes(ctypes.string_at(tensor.data_ptr(), len(tensor) * size), kind, size)


def _words_of_bytes(data: bytes, kind: str, size: int) -> array[int]:
    """Sign bits are found as bytes that are not ASCII, and large numbers as upper halves that are not zero."""
    result: array[int] = array("I")
    if size == 4:
        result.frombytes(data)
        right = kind in _UNSIGNED or data[3::4].isascii()
    elif size == 8:
        right = _take_lower_halves(result, data)
    else:
        right = kind in _UNSIGNED or data[size - 1::size].isascii()
        if right:
            result = array("I", array(kind, data))
    if not right:
        raise _beyond(array(kind, data))
    return result


def _take_lower_halves(result: array[int], data: bytes) -> bool:
    """Of words of 64 bits; whether the upper halves are zero. By numpy if it is loaded: that is ten times as fast."""
    numpy = sys.modules.get("numpy")
    if numpy:
        halves = numpy.frombuffer(data, "<u4").reshape(-1, 2)
        result.frombytes(halves[:, 0].tobytes())
        return not halves[:, 1].any()
    words: array[int] = array("I", data)
    result.extend(words[::2])
    return not any(words[1::2])


def _check_length(tokens: Any) -> None:
    """Before it is copied: a range has any length without memory."""
    try:
        too_many = len(tokens) > MOST
    except OverflowError:
        too_many = True
    except TypeError:           # an iterator, or a single number: checked when it is read
        return
    if too_many:
        raise ValueError(f"one row has at most {MOST} token ids")


def _check_row(dimensions: int) -> None:
    if dimensions != 1:
        raise ValueError(f"token ids are one row, not an array of {dimensions} dimensions; pass one row of it")


def _beyond(values: Iterable[Any]) -> ValueError:
    wrong = next((value for value in values if not 0 <= value < 1 << 32), "one of these")
    return ValueError(f"token ids are from 0 to 4294967295, which {wrong} is not")
