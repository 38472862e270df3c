# SPDX-License-Identifier: Apache-2.0
"""Finds what can be pasted from a page: fenced blocks of Markdown, displays in the EXAMPLES of a manual page.

A comment on the line before a block can mark it, `<!-- MARK -->` in Markdown, `.\\" MARK` in a manual page:

    not run: REASON     neither run nor compiled; the test lists it with its reason
    compiled: REASON    C that is compiled but not run
    file: NAME          the block is written to NAME, for later blocks
    until Ctrl-C        its last command does not end by itself: SIGINT must end it cleanly
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

MARK = re.compile(r"(not run|compiled|file): (.+)|(until Ctrl-C)")
COMMENT = re.compile(r'(?:<!-- (.*) -->|\.\\" (.*))')
ESCAPES = {"\\-": "-", "\\e": "\\", "\\&": "", "\\(dq": '"', "\\(aq": "'", "\\ ": " "}
LANGUAGES = {"sh", "c", "python", "ini"}


@dataclass
class Block:
    """A piece of text, its position, and its mark."""

    page: str
    line: int
    language: str
    text: str
    mark: str = ""
    value: str = ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line} ({self.language})"


def mark_of(line: str) -> tuple[str, str]:
    """The mark in a comment, and the text after its colon."""
    comment = COMMENT.fullmatch(line.strip())
    mark = comment and MARK.fullmatch(comment[1] or comment[2] or "")
    if not mark:
        return "", ""
    return (mark[1], mark[2]) if mark[1] else (mark[3], "")


def markdown(path: Path) -> list[Block]:
    """Fenced blocks in a language that can be run. A fence without a language contains output."""
    blocks, lines = [], path.read_text().splitlines()
    at = 0
    while at < len(lines):
        fence = re.fullmatch(r" *```(\w*)", lines[at])
        if not fence:
            at += 1
            continue
        end = next(i for i in range(at + 1, len(lines)) if lines[i].strip() == "```")
        if fence[1] in LANGUAGES:
            blocks.append(Block(path.name, at + 2, fence[1], "\n".join(lines[at + 1:end]) + "\n", *mark_of(lines[at - 1])))
        at = end + 1
    return blocks


def plain(line: str) -> str:
    for escape, text in ESCAPES.items():
        line = line.replace(escape, text)
    return line


def language_of(text: str) -> str:
    if re.search(r"^#include <", text, re.M):
        return "c"
    return "ini" if re.match(r"\[\w+", text) else "sh"


def manual(path: Path) -> list[Block]:
    """Displays of the section EXAMPLES: .Bd -literal to .Ed, and .Dl with a prompt."""
    lines = path.read_text().splitlines()
    begin = next((i for i, line in enumerate(lines) if line == ".Sh EXAMPLES"), len(lines))
    end = next((i for i in range(begin + 1, len(lines)) if lines[i].startswith(".Sh ")), len(lines))
    blocks, at = [], begin
    while at < end:
        mark = mark_of(lines[at - 1])
        if lines[at].startswith(".Bd -literal"):
            last = lines.index(".Ed", at)
            text = "".join(plain(line) + "\n" for line in lines[at + 1:last])
            blocks.append(Block(path.name, at + 2, language_of(text), text, *mark))
            at = last
        elif lines[at].startswith(".Dl "):
            blocks.append(Block(path.name, at + 1, "sh", plain(lines[at][4:]) + "\n", *mark))
        at += 1
    return blocks


def commands(block: Block) -> str:
    """The block as a script. If some lines have a prompt, the others are output."""
    lines = block.text.splitlines()
    if any(re.match(r"[$#] ", line) for line in lines):
        lines = [line[2:] for line in lines if re.match(r"[$#] ", line)]
    return "\n".join(lines) + "\n"


def blocks_of(path: Path) -> list[Block]:
    return markdown(path) if path.suffix == ".md" else manual(path)
