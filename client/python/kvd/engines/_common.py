# SPDX-License-Identifier: Apache-2.0
"""What several engines need."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import kvd

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")

_seen: dict[tuple, tuple[int, int]] = {}    # by (path, size, mtime)


def digest(path: Path) -> tuple[int, int]:
    """Of a file's bytes, read once."""
    about = path.stat()
    key = (path, about.st_size, about.st_mtime_ns)
    if key not in _seen:
        _seen[key] = kvd.fingerprint(path)
    return _seen[key]


def weights(model: str, given: str | None = None, commit: str | None = None) -> tuple:
    """Which weights a model has, as a part of a fingerprint: what the user says, or the bytes of a folder's or a
    file's, or the commit of a model on the hub."""
    if given is not None:
        return ("given", str(given))
    path = Path(model)
    if path.is_file():
        return ("file", digest(path))
    if path.is_dir():
        return ("files", *((it.name, digest(it)) for it in sorted(path.iterdir()) if it.suffix in WEIGHTS))
    if commit:
        return ("hub", model, commit)
    raise ValueError(f"kvd cannot tell which weights {model} are: give a folder, or a \"fingerprint\" of your own that"
                     " changes whenever they do")


def missing(error: ImportError) -> Callable[[str], NoReturn]:
    """__getattr__ of a module whose engine is not installed: only its documentation is there."""
    def tell(name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ImportError(f"{name} needs its engine, which cannot be imported: {error}", name=error.name) from error
    return tell
