# SPDX-License-Identifier: Apache-2.0
"""Retrieval tasks in the manner of RULER (Hsieh et al. 2024, arXiv:2404.06654), drawn by seed: what is asked for is
hidden among sentences of natural text. A context never contains an answer but where it was hidden.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

CITIES = ("amber birch cobalt delta ember falcon garnet harbor indigo jasper kestrel lagoon marble nectar onyx pepper"
          " quartz raven saffron timber umber velvet walnut yarrow zephyr").split()
COMMON, REPEATS = 3, 12     # words of the list that are common, and how often each occurs


@dataclass(frozen=True)
class Question:
    """A context, a question behind it with the beginning of the answer, and everything that a right answer names."""

    task: str
    context: str
    question: str
    begin: str
    answers: tuple[str, ...]

    def right(self, text: str) -> bool:
        """Whether the text names all answers, in any order, as whole words."""
        return set(self.answers) <= set(re.findall(r"\w+", text))


Counter = Callable[[str], int]      # the number of tokens of a text


class Maker:
    """Draws questions of `length` tokens, as `count` counts them, with sentences of `prose` as the haystack."""

    def __init__(self, prose: list[str], length: int, count: Counter, seed: str) -> None:
        self.prose, self.length, self.count, self.rng = prose, length, count, random.Random(seed)

    def numbers(self, n: int) -> list[str]:
        """n different numbers that occur nowhere in the prose."""
        found: list[str] = []
        while len(found) < n:
            number = str(self.rng.randrange(10000, 100000))
            if number not in found and not any(number in it for it in self.prose):
                found.append(number)
        return found

    def haystack(self, needles: list[str], intro: str) -> str:
        """Sentences from a random place on, with the needles among them: about `length` tokens."""
        start, room = self.rng.randrange(len(self.prose)), self.length - self.count(" ".join([intro, *needles]))
        hay: list[str] = []
        while True:
            sentence = self.prose[(start + len(hay)) % len(self.prose)]
            room -= self.count(" " + sentence)
            if room < 0:
                break
            hay.append(sentence)
        if len(hay) + 1 < len(needles):
            raise ValueError(f"{self.length} tokens have no room for {len(needles)} sentences among others")
        for place, needle in sorted(zip(sorted(self.rng.sample(range(len(hay) + 1), len(needles))), needles),
                                    reverse=True):
            hay.insert(place, needle)
        return f"{intro}\n\n{' '.join(hay)}"

    def magic(self, task: str, keys: list[str], numbers: list[str], asked: str, answers: list[str]) -> Question:
        needles = [f"One of the special magic numbers for {key} is: {number}." for key, number in zip(keys, numbers)]
        self.rng.shuffle(needles)
        several = len(answers) > 1
        what = f"the special magic number{'s' if several else ''} for {asked}"
        return Question(task, self.haystack(needles, "Some special magic numbers are hidden within the following text. "
                                            "Memorize them. You will be asked about them afterwards."),
                        f"What {'are all' if several else 'is'} {what} mentioned in the provided text?",
                        f"{what[0].upper()}{what[1:]} mentioned in the provided text {'are' if several else 'is'}",
                        tuple(answers))

    def single(self) -> Question:
        [key], [number] = self.rng.sample(CITIES, 1), self.numbers(1)
        return self.magic("single needle", [key], [number], key, [number])

    def keys(self) -> Question:
        keys, numbers = self.rng.sample(CITIES, 4), self.numbers(4)
        return self.magic("several keys", keys, numbers, keys[0], numbers[:1])

    def values(self) -> Question:
        [key], numbers = self.rng.sample(CITIES, 1), self.numbers(2)
        return self.magic("several values", [key] * 2, numbers, key, numbers)

    def tracking(self) -> Question:
        [number], names = self.numbers(1), ["".join(self.rng.sample("BCDFGHJKLMNPQRSTVWXZ", 5)) for _ in range(3)]
        needles = [f"VAR {names[0]} = {number}.", *(f"VAR {b} = VAR {a}." for a, b in zip(names, names[1:]))]
        context = self.haystack(needles, "Memorize and track the chain of variable assignments hidden in the following "
                                "text.")
        return Question("variable tracking", context,
                        f"Find all variables that are assigned the value {number} in the text above.",
                        f"The {len(names)} variables that are assigned the value {number} are", tuple(names))

    def common(self) -> Question:
        """The words are the prose's own, each once, but the common ones, which are none of them."""
        own = sorted({w for it in self.prose for w in re.findall(r"[a-z]{4,9}", it)} - set(CITIES))
        self.rng.shuffle(own)
        common = self.rng.sample(CITIES, COMMON)
        intro = "Below is a numbered list of words. Memorize the ones that appear most often."
        words, room = common * REPEATS, self.length - self.count(intro)
        room -= sum(self.count(f" 100. {word}") for word in words)
        while own and room >= (size := self.count(f" 100. {own[-1]}")):
            words.append(own.pop())
            room -= size
        self.rng.shuffle(words)
        listed = " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))
        return Question("common words", f"{intro}\n\n{listed}", f"What are the {COMMON} most common words in the list?",
                        f"The {COMMON} most common words in the list are", tuple(common))


TASKS: dict[str, Callable[[Maker], Question]] = {
    "single needle": Maker.single, "several keys": Maker.keys, "several values": Maker.values,
    "variable tracking": Maker.tracking, "common words": Maker.common}


def question(task: str, prose: list[str], length: int, count: Counter, number: int, seed: str = "judge") -> Question:
    """The question of that number, which does not depend on others."""
    return TASKS[task](Maker(prose, length, count, f"{seed} {task} {length} {number}"))
