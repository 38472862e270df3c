# SPDX-License-Identifier: Apache-2.0
"""Natural text that is on every checkout: README.md, CHANGELOG.md and the manual pages, as plain text."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

# Macros of manual pages whose arguments are no prose; others are words around their arguments.
SILENT = set("Sh Ss Dd Dt Os Bl El Bd Ed Rs Re Sx Bk Ek ie el if de nh ad".split())
CALLED = re.compile(r"[A-Z][a-z]")      # macros that a line calls among its words
SPECIAL = {r"\&": "", r"\-": "-", r"\e": "\\", r"\(em": "-", r"\(mc": "micro", r"\(dq": '"', r"\(aq": "'"}


def plain(page: str) -> str:
    """The prose of a manual page, one paragraph a line, with an empty line between."""
    paragraphs: list[str] = []
    words: list[str] = []
    name = ""
    for line in [*page.splitlines(), ".Pp"]:
        if line.startswith(('.\\"', "'\\\"")):
            continue
        if line.startswith("."):
            macro, *rest = line[1:].split() or [""]
            if macro in ("Pp", "Sh", "Ss", "It", "br", "sp"):
                paragraphs.append(" ".join(words))
                words = []
            if macro == "Nm":
                name = name or " ".join(rest)
                rest = rest or [name]
            if macro in SILENT:
                continue
            line = " ".join(word for word in rest if not CALLED.fullmatch(word))
        words += line.split()
    return "\n\n".join(filter(None, map(unescaped, paragraphs)))


def unescaped(text: str) -> str:
    for escape, meant in SPECIAL.items():
        text = text.replace(escape, meant)
    text = re.sub(r"\\f(\[.*?\]|.)", "", text)
    return re.sub(r" ([,.;:)])", r"\1", text).strip()


def standard(root: Path) -> list[Path]:
    return [root / "README.md", root / "CHANGELOG.md", *sorted((root / "tools/man").glob("*.[1-8]"))]


def read(files: list[Path]) -> dict[str, str]:
    """Names and contents of texts; manual pages as plain text."""
    return {it.name: plain(it.read_text()) if re.fullmatch(r"\.[1-8]", it.suffix) else it.read_text() for it in files}


def fingerprint(texts: dict[str, str]) -> str:
    return hashlib.sha256(repr(sorted(texts.items())).encode()).hexdigest()[:12]


def sentences(texts: dict[str, str]) -> list[str]:
    """Sentences of the texts' prose, in order, for haystacks; without tables, code and headings."""
    found = []
    for text in texts.values():
        text = re.sub(r"```.*?```", "", text, flags=re.S)
        for paragraph in re.split(r"\n\s*\n", text):
            if not paragraph.lstrip().startswith(("|", "#", "<", "[")):
                found += re.split(r"(?<=[.!?])\s+(?=[A-Z])", " ".join(paragraph.split()))
    return [it for it in found if it.endswith((".", "!", "?")) and 5 <= len(it.split()) <= 60]


def windows(texts: dict[str, list[int]], length: int, count: int) -> list[tuple[str, list[int]]]:
    """Disjoint pieces of `length` tokens with their names: one of each text in turn, as many as there are."""
    found: list[tuple[str, list[int]]] = []
    at = 0
    while len(found) < count and any(len(ids) >= (at + 1) * length for ids in texts.values()):
        found += [(f"{name} {at}", ids[at * length:(at + 1) * length]) for name, ids in texts.items()
                  if len(ids) >= (at + 1) * length]
        at += 1
    return found[:count]
