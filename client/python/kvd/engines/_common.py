# SPDX-License-Identifier: Apache-2.0
"""Functions for several engines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import kvd

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")

_seen: dict[tuple, tuple[int, int]] = {}    # fingerprints by (path, size, mtime)


def digest(path: Path) -> tuple[int, int]:
    """Return the fingerprint of a file's bytes, which are read once."""
    about = path.stat()
    key = (path, about.st_size, about.st_mtime_ns)
    if key not in _seen:
        _seen[key] = kvd.fingerprint(path)
    return _seen[key]


def weights(model: str, given: str | None = None, commit: str | None = None) -> tuple:
    """Identify a model's weights, as a part of a fingerprint: by the user's name for them, by the bytes of a file or of
    the files in a directory, or by the commit of a model on the hub."""
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
    """Return __getattr__ for a module whose engine is not installed: only its documentation is available."""
    def tell(name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ImportError(f"{name} needs its engine, which cannot be imported: {error}", name=error.name) from error
    return tell
