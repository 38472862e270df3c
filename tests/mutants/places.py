# SPDX-License-Identifier: Apache-2.0
"""Finds where a C source of this project can be mutated, and how: expressions and statements, by their text.

A place is an independent piece of text: the condition of an if or a loop, a returned value, an initial value, or a
statement. A mutated place has both the original and the other text, and a number chooses (mutant.h). That needs no
parser of C, because the house style is regular enough.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.S)
STRING = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'')
DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", re.M)
FUNCTION = re.compile(r"^(?!typedef|struct \w+ \{|enum|union|extern|#)([A-Za-z_][^\n;={}]*?)\b(\w+)"
                      r"\(((?:[^;{}()]|\([^()]*\))*)\)[^;{}=]*\{\n(.*?)^\}", re.S | re.M)
DECLARATION = re.compile(r"(?:const |static |struct |enum |union |unsigned |long |volatile |_Alignas\([^)]*\) |_cleanup_\(\w+\) )*"
                         r"\w+(?:\([\w *]+\))?\s[\s*]*\w+\s*(?:=|;|,|\[|\()")
WORD = re.compile(r"[A-Za-z_]\w*")

# The effects of these are invisible, or texts for people, so a mutant there shows nothing about the tests. On Linux a
# mutex or a condition variable owns nothing and begins as zeros; ThreadSanitizer finds a missing lock.
UNSEEN = re.compile(r"\b(?:\w*prefetch\w*|log_\w+|snprintf|sprintf|vsnprintf|fprintf|printf|client_why|why|strerror|"
                    r"static_assert|_Static_assert|madvise|free|"
                    r"pthread_mutex_(?:init|lock|destroy)|pthread_cond_(?:init|destroy))\b|(?:likely|expect)\(")
REFUSE = re.compile(r"(?:\w*refuse\w*|\w*_fail|fail|failed|lost)\(")
SWAPS = {" < ": " <= ", " <= ": " < ", " > ": " >= ", " >= ": " > ", " == ": " != ", " != ": " == ", " && ": " || ",
         " || ": " && ", " + ": " - ", " - ": " + "}
SWAP = re.compile(" (?:" + "|".join(re.escape(s.strip()) for s in sorted(SWAPS, key=len, reverse=True)) + ") ")
NUMBER = re.compile(r"(?<![\w.\"])(\d+)(u|U|UL|ULL)?(?![\w.])")
COSTLY = re.compile(r"[\w)]\s*\(|->|\[|\*|\+\+|--|[^=!<>]=[^=]|[\"?/%]|<<|>>") # calls, memory, assignments, divisions
ORDER = re.compile(r"\bmemory_order_(?:seq_cst|acq_rel|acquire|release)\b")


@dataclass
class Place:
    """A piece of a function that can be chosen at run time."""

    path: str
    function: str
    begin: int
    end: int
    kind: str           # condition, return, value, statement
    text: str
    plain: str
    type: str           # return type of the function
    nth: int = 1        # among places with this text in this function
    result: bool = False # it is the initial value of `int r`

    def line(self, source: str) -> int:
        return source.count("\n", 0, self.begin) + 1

    def mutations(self) -> list[tuple[str, str]]:
        """(description, the other text) of each possible change."""
        found = []
        if self.kind == "condition":
            found += [("condition negated", f"!({self.text})"), ("never", "0")]
        if self.kind == "statement" and not re.match(r"goto\b|pthread_\w+_(?:init|lock|destroy)\(", self.plain):
            found.append(("statement dropped", ""))
        if self.kind == "return":
            found += self.returns()
        if UNSEEN.search(self.plain) or REFUSE.search(self.plain) or '"' in self.text:
            return [m for m in found if m[0] in ("0 for an error", "condition negated", "never")]
        for match in SWAP.finditer(self.plain):
            found.append(self.swap(match, SWAPS[match[0]]))
        for match in NUMBER.finditer(self.plain):
            if self.is_success(match):
                found.append(self.swap(match, "-5"))
            elif not self.is_size(match):
                found.append(self.swap(match, f"{int(match[1]) + 1}{match[2] or ''}"))
        for match in ORDER.finditer(self.plain):
            found.append(self.swap(match, "memory_order_relaxed"))
        return found

    def returns(self) -> list[tuple[str, str]]:
        text = self.plain.strip()
        if re.search(r"\bint\b|ssize_t", self.type) and (re.match(r"-E|-?errno|-?r$", text) or REFUSE.match(text)):
            return [("0 for an error", "0")]
        if "bool" in self.type:
            return [("answer negated", f"!({self.text})")]
        return []

    def is_success(self, number: re.Match) -> bool:
        """The 0 of `return 0;`, of `return r == -EAGAIN ? 0 : r;`, and of `int r = 0`, which is returned: callers check for
        less than 0, so 1 would mean the same."""
        arm = re.search(r"(?:^|[?:])\s*$", self.plain[:number.start()])
        ends = re.match(r"\s*(?::|$)", self.plain[number.end():])
        returned = self.kind == "return" and re.search(r"\bint\s*$", self.type)
        return number[0] == "0" and bool(arm and ends) and (returned or self.result)

    def is_size(self, number: re.Match) -> bool:
        """The size of a batch, or an alignment: one more is a little more room, or not a power of two."""
        before, after = self.plain[:number.start()], self.plain[number.end():]
        return bool(re.search(r"\bU?INT\d+_C\($|\bALIGN_(?:UP|DOWN)\([^;]*, $|\b[A-Z_]{3,} [*/] $", before)
                    or re.match(r" \* [A-Z_]{3,}\b", after))

    def swap(self, match: re.Match, by: str) -> tuple[str, str]:
        return (f"{match[0].strip()} is {by.strip()}",
                self.text[:match.start()] + by + self.text[match.end():])

    def chosen(self, number: int, other: str, text: str) -> str:
        """The source text with both; text: the place's text so far, with other mutants of it."""
        if self.kind == "statement":
            return f"{{ if (mutant({number})) {{ {other} }} else {{ {text} }} }}"
        if text == self.text and self.can_be_seen(other):
            return f"mutant_instead({number}, {text}, {other})"
        return f"(mutant({number}) ? ({other}) : ({text}))"

    def can_be_seen(self, other: str) -> bool:
        """May both be computed, to see whether they differ? Not if that has side effects or makes invalid accesses."""
        return "{" not in self.plain and (other == "0" or not COSTLY.search(self.plain))


def blanked(text: str) -> str:
    """The text with comments, strings and directives blanked out; positions stay the same."""
    for pattern in (COMMENT, STRING, DIRECTIVE):
        text = pattern.sub(lambda m: re.sub(r"[^\n]", "_" if pattern is STRING else " ", m[0]), text)
    return text


def close(text: str, at: int) -> int:
    """The position that closes the bracket at this position."""
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] in "([{") - (text[i] in ")]}")
        if depth == 0:
            return i
    raise ValueError("a bracket is not closed")


def split(text: str, begin: int, end: int, by: str) -> list[tuple[int, int]]:
    """The parts between separators outside brackets."""
    parts, depth, start = [], 0, begin
    for i in range(begin, end):
        depth += (text[i] in "([{") - (text[i] in ")]}")
        if depth == 0 and text[i] == by:
            parts.append((start, i))
            start = i + 1
    return [*parts, (start, end)]


class Function:
    """Walks over the statements of one function."""

    def __init__(self, path: str, source: str, plain: str, match: re.Match):
        self.path, self.source, self.plain = path, source, plain
        self.type, self.name, self.found = match[1], match[2], []
        self.at, self.end = match.start(4), match.end(4)

    def add(self, kind: str, begin: int, end: int, result: bool = False) -> None:
        while begin < end and self.plain[begin].isspace():
            begin += 1
        text = self.source[begin:end].rstrip()
        if text and "\n#" not in text and "/*" not in text:
            self.found.append(Place(self.path, self.name, begin, begin + len(text), kind, text,
                                    self.plain[begin:begin + len(text)], self.type, result=result))

    def statement_end(self) -> int:
        i = self.at
        while self.plain[i] != ";":
            i = close(self.plain, i) if self.plain[i] in "([{" else i
            i += 1
        return i

    def brackets(self) -> tuple[int, int]:
        begin = self.plain.index("(", self.at)
        end = close(self.plain, begin)
        self.at = end + 1
        return begin + 1, end

    def declare(self, end: int) -> None:
        if self.plain.startswith("static", self.at):
            return
        for begin, stop in split(self.plain, self.at, end, ","):
            equals = self.plain.find(" = ", begin, stop)
            if equals >= 0 and not self.plain[equals + 3:stop].lstrip().startswith("{"):
                self.add("value", equals + 3, stop, bool(re.search(r"^\s*(?:int )?r$", self.plain[begin:equals])) and
                         self.plain.startswith("int ", self.at))

    def step(self) -> None:
        word = WORD.match(self.plain, self.at)
        word = word[0] if word else ""
        if self.plain[self.at] in "{};" or self.plain[self.at].isspace():
            self.at += 1
        elif word in ("else", "do"):
            self.at += len(word)
        elif word in ("if", "while"):
            self.add("condition", *self.brackets())
        elif word == "for":
            parts = split(self.plain, *self.brackets(), ";")
            if len(parts) == 3:
                self.add("condition", *parts[1])
        elif word == "switch":
            self.brackets()
        elif word in ("case", "default"):
            self.at = self.plain.index(":", self.at) + 1
        else:
            self.simple(word)

    def simple(self, word: str) -> None:
        end = self.statement_end()
        if word == "return":
            self.add("return", self.at + len("return"), end)
        elif word in ("static", "const", "struct", "union", "enum") or DECLARATION.match(self.plain, self.at):
            self.declare(end)
        elif word not in ("break", "continue", "goto"):
            self.add("statement", self.at, end + 1)
        self.at = end + 1

    def places(self) -> list[Place]:
        while self.at < self.end:
            self.step()
        return self.found


def places_of(path: str, source: str) -> list[Place]:
    plain, seen = blanked(source), Counter()
    found = [place for match in FUNCTION.finditer(plain)
             for place in Function(path, source, plain, match).places() if place.mutations()]
    for place in found:
        seen[place.function, place.text] += 1
        place.nth = seen[place.function, place.text]
    return found


def mutated(source: str, chosen: list[tuple[Place, int, str]]) -> str:
    texts: dict[tuple[int, int], str] = {}
    for place, number, other in chosen:
        at = (place.begin, place.end)
        texts[at] = place.chosen(number, other, texts.get(at, place.text))
    for (begin, end), text in sorted(texts.items(), reverse=True):
        source = source[:begin] + text + source[end:]
    return '#include "tests/mutants/mutant.h"\n' + source
