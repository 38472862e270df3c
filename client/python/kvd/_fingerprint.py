# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of everything that changes the bytes of a block."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from ctypes import c_uint64
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from ._buffer import memory
from ._native import lib


class _Fingerprint:
    """Hashes each value as two parts, its kind and its bytes, so that different values have different encodings."""

    def __init__(self) -> None:
        self.value = (c_uint64 * 2)()

    def put(self, what: str, array: Any = b"") -> None:
        name = what.encode()
        lib.kvd_fingerprint(self.value, name, len(name))
        with memory(array) as (address, size):
            lib.kvd_fingerprint(self.value, address, size)

    def add(self, it: Any) -> None:
        if it is None or isinstance(it, (bool, int)):
            self.put(type(it).__name__, str(it).encode())
        elif isinstance(it, float):
            self.put("float", struct.pack("<d", it))
        elif isinstance(it, str):
            self.put("str", it.encode(errors="surrogatepass"))
        elif isinstance(it, Path):
            self.add_file(it)
        elif isinstance(it, Mapping):
            self.put(f"dict {len(it)}")
            for key in sorted(it, key=lambda key: (type(key).__name__, str(key))):
                self.add(key)
                self.add(it[key])
        elif isinstance(it, (list, tuple)):
            self.put(f"list {len(it)}")
            for part in it:
                self.add(part)
        elif isinstance(it, type) or type(it).__name__ == "dtype":
            self.put("type", str(getattr(it, "name", None) or getattr(it, "__name__", it)).encode())
        else:
            self.put(f"array {getattr(it, 'dtype', '')} {list(getattr(it, 'shape', ()))}", it)

    def add_file(self, path: Path) -> None:
        """Add a file's contents, or names and contents of all files in a directory."""
        if path.is_dir():
            files = sorted(it for it in path.rglob("*") if it.is_file())
            self.put(f"folder {len(files)}")
            for inside in files:
                self.add(inside.relative_to(path).as_posix())
                self.add_file(inside)
            return
        with open(path, "rb") as file:
            if path.stat().st_size == 0:
                self.put("file")
                return
            with mmap(file.fileno(), 0, access=ACCESS_READ) as contents:
                self.put("file", contents)


def fingerprint(*parts: Any) -> tuple[int, int]:
    """Hash everything else that changes the bytes of a block into two numbers of 64 bits, for
    Geometry(fingerprint=...): the weights, the RoPE parameters, versions and kernels of the engine, its layout.

    Parts are str, bytes, int, float, bool, None, lists, tuples and dicts of them, dtypes, arrays (anything with a
    buffer, or a contiguous CPU tensor of torch), and Paths: the contents of a file, or names and contents of all files
    in a directory. Order matters, except in dicts. The result is the same on every machine. Raises TypeError for other
    parts.

        kvd.fingerprint("my-engine 1.2", Path("model.safetensors"), {"rope_theta": 10000.0})
    """
    it = _Fingerprint()
    for part in parts:
        it.add(part)
    return int(it.value[0]), int(it.value[1])
