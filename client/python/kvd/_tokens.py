# SPDX-License-Identifier: Apache-2.0
"""Conversion of token ids for libkvd, from any container of integers. Without Python loops: 2,048 ids take
microseconds."""

from __future__ import annotations

import ctypes
import sys
from array import array
from itertools import islice
from typing import Any, Iterable, SupportsIndex, Union

Tokens = Union[Iterable[SupportsIndex], Any]
"""One row of integers from 0 to 2**32 - 1: a list, an array of numpy, torch or array.array, or anything with a
buffer."""

MOST = 1 << 28
"""Maximum number of tokens in one row."""

_SIGNED, _UNSIGNED = "bhilqn", "BHILQN"
_FORMATS = {"torch.int64": "q", "torch.int32": "i", "torch.int16": "h", "torch.int8": "b", "torch.uint8": "B",
            "torch.uint16": "H", "torch.uint32": "I", "torch.uint64": "Q"}


def words(tokens: Tokens) -> array[int]:
    """Copy token ids to 32-bit words. Raises TypeError if they are not integers, ValueError if they are not one row or
    an id is out of range."""
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
    """Convert a tensor of torch, which has no buffer, and may be installed without numpy."""
    kind = _FORMATS.get(str(tensor.dtype))
    _check_row(tensor.dim())
    if kind is None:
        raise TypeError(f"token ids are integers, not {tensor.dtype}")
    tensor = tensor.detach().cpu().contiguous()
    size = tensor.element_size()
    return _words_of_bytes(ctypes.string_at(tensor.data_ptr(), len(tensor) * size), kind, size)


def _words_of_bytes(data: bytes, kind: str, size: int) -> array[int]:
    """Convert integers of any size. Negative ids show as highest bytes that are not ASCII, too large ones as upper
    halves that are not zero."""
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
    """Append the lower halves of 64-bit words. Returns whether all upper halves are zero. Uses numpy if it is loaded,
    which is ten times as fast."""
    numpy = sys.modules.get("numpy")
    if numpy:
        halves = numpy.frombuffer(data, "<u4").reshape(-1, 2)
        result.frombytes(halves[:, 0].tobytes())
        return not halves[:, 1].any()
    words: array[int] = array("I", data)
    result.extend(words[::2])
    return not any(words[1::2])


def _check_length(tokens: Any) -> None:
    """Check the length before copying: a range can be huge without using memory."""
    try:
        too_many = len(tokens) > MOST
    except OverflowError:
        too_many = True
    except TypeError:           # an iterator or a single number: checked when read
        return
    if too_many:
        raise ValueError(f"one row has at most {MOST} token ids")


def _check_row(dimensions: int) -> None:
    if dimensions != 1:
        raise ValueError(f"token ids are one row, not an array of {dimensions} dimensions; pass one row of it")


def _beyond(values: Iterable[Any]) -> ValueError:
    wrong = next((value for value in values if not 0 <= value < 1 << 32), "one of these")
    return ValueError(f"token ids are from 0 to 4294967295, which {wrong} is not")
