#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Manual pages declare each function as its header does, and ERRORS has every error that the header or the page names.

    prototypes.py ROOT      one line for each that differs; exit status 1 if there are any
"""
from __future__ import annotations

import re
import sys
from pathlib import Path

COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*|^#[^\n]*$", re.S | re.M)
PROTOTYPE = re.compile(r"(?:^|(?<=[;{}]))\s*((?:const )?[\w ]+?[ \*]+)(kvd_\w+)\(([^;{}()]*)\)\s*(?=[;{])")
NEVER = {"EINTR"}   # the page says that no call fails with it


def plain(text: str) -> str:
    return re.sub(r"\s*\*\s*", " *", re.sub(r"\s+", " ", text)).strip()


def declared(header: Path) -> dict[str, str]:
    text = COMMENT.sub("", header.read_text()).replace('extern "C" {', "")
    return {name: f"{plain(type_.replace('static inline', ''))} ({', '.join(plain(one) for one in given.split(','))})"
            for type_, name, given in PROTOTYPE.findall(text)}


def documented(page: Path) -> dict[str, str]:
    lines = page.read_text().split(".Sh SYNOPSIS")[1].split(".Sh ")[0].splitlines()
    found, type_ = {}, ""
    for line in lines:
        words = [quoted or word for quoted, word in re.findall(r'"([^"]*)"|(\S+)', line)]
        if words[:1] == [".Ft"]:
            type_ = plain(" ".join(words[1:]))
        elif words[:1] == [".Fn"]:
            found[words[1]] = f"{type_} ({', '.join(plain(word) for word in words[2:])})"
    return found


def errors_of(header: Path, page: Path) -> set[str]:
    """Errors that are named but not in ERRORS."""
    text = page.read_text()
    named = set(re.findall(r"-(E[A-Z0-9]{3,})\b", header.read_text()))
    for line in re.findall(r"^\..*\bEr .*$", text, re.M):
        named |= set(re.findall(r"\b(E[A-Z0-9]{3,})\b", line))
    listed = set(re.findall(r"^\.It Bq Er (\w+)", text, re.M))
    return named - listed - NEVER


def main() -> int:
    root, wrong = Path(sys.argv[1]), []
    for name in ("kvd", "kvd_attend", "kvd_cuda", "kvd_methods"):
        header = root / f"client/{name}.h"
        page = root / f"tools/man/lib{name}.3"
        here, there = declared(header), documented(page)
        assert here, header
        wrong += [f"{page.name}: {call}: {there.get(call)}, in {header.name} {here.get(call)}"
                  for call in sorted(here.keys() | there.keys()) if here.get(call) != there.get(call)]
        if ".Sh ERRORS" in page.read_text():
            wrong += [f"{page.name}: ERRORS has no {error}" for error in sorted(errors_of(header, page))]
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
